"""Checks of phase 9: masks, occupancy, a lazy rescaling, parts of kernels put together, a kernel from nothing.

CUDA answers are text, as in phase 8.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from flashlab.check import CheckFailed, expect, expect_close
from flashlab.check.changes import edited
from flashlab.check.cuda_answer import (
    NOT_SET,
    PROBES,
    Source,
    built,
    examine,
    expect_variant,
    normal,
    probe,
    ran,
    region,
    replaced,
    text_of,
    with_nan,
)
from flashlab.check.cuda_index import KINDS, Outputs, Trials, all_found, explained, forwards, parted
from flashlab.check.lookup import Row
from flashlab.check.poison import mark_unwritten
from flashlab.cuda import CudaModule
from flashlab.exercises.phase_09_ladder import said_by  # which registers 9.7 to 9.12
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels.series import source, step

# ---- 9.1 -------------------------------------------------------------------------------------------------------------

_LAST_QUERY, _FIRST_SEES = "(m_start + block_m - 1) // group", "m_start // group + 1 + seq_k - seq_q"
_END, _FULL = "max(0, -(-most // block_n))", "max(0, fewest // block_n)"


def _block_of_rows(r: random.Random) -> tuple[int, ...]:
    seq_q, seq_k, block_m, group = r.randint(1, 300), r.randint(1, 300), r.choice((32, 64, 128)), r.choice((1, 3, 4, 8))
    start = block_m * r.randrange(-(-seq_q * group // block_m))
    return start, block_m, r.choice((16, 32, 64)), group, seq_q, seq_k, r.random() < 0.8


@rule(
    "9.1",
    title="Which tiles need a mask?", minutes=10, difficulty="Warm-up",
    hints=[
        "Without a causal mask: how many tiles does seq_k need, rounded up, and how many of them are whole?",
        "Causal: the block's last row, m_start + block_m - 1, sees the most keys, its first row, m_start, the fewest. "
        "Of which queries are these rows? How many keys does a query see?",
        "Row r is of query r // group, and query i sees i + 1 + seq_k - seq_q keys. end is the last row's number of "
        "keys over block_n, rounded up; full is the first row's, rounded down; neither above what seq_k allows, nor "
        "below 0.",
    ],
    returns="end, full",
    strict=True,
    inputs=[
        (m_start, block_m, block_n, group, seq_q, seq_k, causal)
        for seq_q, seq_k, group in (
            (64, 64, 1), (200, 200, 4), (70, 330, 3), (330, 70, 1), (1, 129, 8), (256, 512, 1), (64, 127, 4),
            (64, 65, 1), (64, 97, 5), (4, 700, 8), (80, 230, 3), (1, 224, 1), (43, 107, 3), (49, 64, 7),
        )
        for block_m, block_n in ((64, 64), (128, 64), (64, 16))
        for causal in (False, True)
        for m_start in range(0, seq_q * group, block_m)
    ] + [(128, 128, 16, 3, 128, 347, True), (64, 64, 16, 5, 100, 333, True)],
    draw=_block_of_rows,
    alike=lambda end, full: (end, min(end, full)),  # from end on no tile is visited
    words={"most": "the last row's keys", "fewest": "the first row's keys", "first": "the first row's query",
           "last": "the last row's query"},
    notes={
        "diagonal": "the last query sees the last key",
        "block_m": "the block's last row, m_start + block_m - 1, sees most",
        "1": "query i sees its own key too, i + 1 and not i",
        "group": "row r is of query r // group",
    },
    rows=[
        Row("full-is-end", "full is end: a tile of which the first row sees only a part needs the mask",
            [("max(0, fewest // block_n)", "max(0, -(-most // block_n))")]),
        Row("ragged-tile-full", "full counts the last tile as whole where seq_k ends within it: seq_k // block_n is "
            "rounded down", [("fewest // block_n)", "fewest // block_n if causal else -(-seq_k // block_n))")]),
        Row("rows-for-queries", "a row's number is taken for its query's: row r is of query r // group",
            [("m_start // group", "m_start"), (_LAST_QUERY, "m_start + block_m - 1")]),
        Row("rows-for-queries", "the diagonal counts rows: there are seq_q queries, and seq_q * group rows",
            [("seq_k - seq_q", "seq_k - seq_q * group")]),
        Row("head-by-head", "the rows are taken head by head: row r is of query r // group, not r % seq_q",
            [("m_start // group", "m_start % seq_q"), (_LAST_QUERY, "(m_start + block_m - 1) % seq_q")]),
        Row("block-divided", "end: m_start and block_m are divided by group each for itself: it is the last row that "
            "is divided, m_start + block_m - 1", [(_LAST_QUERY, "m_start // group + block_m // group - 1")]),
        Row("block-divided", "end: the block's queries are counted as block_m / group, rounded up: a block may begin "
            "within a query's rows, and then it has one more. It is the last row that is divided, m_start + block_m - "
            "1", [(_LAST_QUERY, "m_start // group - (-block_m // group) - 1")]),
        Row("rounded-up", "full: the first row's keys over block_n are rounded up: a tile of which it sees a part "
            "needs the mask", [(_FULL, f"max(0, min(seq_k // block_n, -(-({_FIRST_SEES}) // block_n)) if causal else "
                                "seq_k // block_n)")]),
        Row("full-is-end-less-1", "full is end - 1: the diagonal may cut more tiles than the last one",
            [(_FULL, f"max(0, {_END} - 1) if causal else seq_k // block_n")]),
        *(Row(slug, said, [(_END, f"max(0, min(-(-seq_k // block_n), ({sees} + seq_k - seq_q) // block_n) if causal "
                            "else -(-seq_k // block_n))")]) for slug, said, sees in (
            ("rounded-down", "end: the last row's keys over block_n are rounded down: a tile of which it sees a part "
             "is walked too", "last + 1"),
            ("last-tile", "end is the number of the last tile that is seen: it is one more", "last"))),
        Row("queries-for-rows", "end: the block's rows are cut off at seq_q: there are seq_q * group of them",
            [(_LAST_QUERY, "(min(m_start + block_m, seq_q) - 1) // group")]),
    ],
)  # fmt: skip
def tiles(m_start, block_m, block_n, group, seq_q, seq_k, causal):
    """(end, full), not below 0: the block walks tiles end - 1 to 0; tiles full to end - 1 need a mask."""
    # BEGIN SOLUTION
    most = fewest = seq_k  # keys that the block's last row sees, and its first
    if causal:
        diagonal = seq_k - seq_q
        first, last = m_start // group, (m_start + block_m - 1) // group
        most = min(seq_k, last + 1 + diagonal)
        fewest = min(seq_k, first + 1 + diagonal)
    return max(0, -(-most // block_n)), max(0, fewest // block_n)
    # END SOLUTION


# ---- 9.2 ------------------------------------------------------------------------------------------------------------


def _kernel(r: random.Random) -> tuple[int, ...]:
    """Where the shared memory just allows one block more, about every second time."""
    limit, warps = r.choice(((164 * 1024, 64), (228 * 1024, 64), (100 * 1024, 48)))
    threads = 32 * r.choice((2, 4, 8, 3, 5, 12))
    few = r.randint(1, 16)
    exact = r.choice((limit // few - 1024, limit // few, (limit - 1024) // few))
    shared = r.choice((exact + r.choice((-1, 0, 1, r.randint(-40, 40), r.randint(1, 30))), r.randint(0, 98304)))
    return r.randint(24, 255), max(0, shared), threads, limit, warps


@rule(
    "9.2",
    title="How many blocks fit?", minutes=15,
    hints=[
        "Compute three numbers of blocks, one for each resource, and take the least.",
        "Registers: a warp's are 32 * registers, rounded up to a multiple of 256. How many such warps fit in one "
        "quarter, 16384? Four times that many in the SM, and a block needs threads // 32 of them.",
        "16384 // per_warp * 4 // warps, shared_per_sm // (shared_bytes + 1024), warps_per_sm // warps.",
    ],
    returns="blocks",
    whole=True,
    inputs=[
        (registers, shared_bytes, threads, *sm)
        for sm in ((164 * 1024, 64), (228 * 1024, 64), (100 * 1024, 48))
        for registers in (32, 64, 73, 96, 128, 143, 168, 200, 238, 255)
        for shared_bytes in (6144, 40960, 65536, 98304)
        for threads in (64, 128, 256)
    ] + [_kernel(random.Random(i)) for i in range(150)] + [
        (24, 16935, 160, 233472, 64), (98, 11894, 160, 167936, 64), (24, 16935, 96, 233472, 64),
        (32, 32340, 128, 233472, 64),
    ],
    draw=_kernel,
    words={"warps": "(threads // 32)", "per_warp": "registers per warp", "by_registers": "blocks by registers",
           "by_shared": "blocks by shared memory"},
    notes={
        "warps": "a block has threads // 32 warps", "1024": "each block takes 1024 bytes more for the system",
        "16384 // per_warp * 4": "an SM has four quarters", "4": "an SM has four quarters of 16384 registers",
        "-(-32 * registers // 256)": "a warp's registers are rounded up to a multiple of 256",
        "32": "a warp has 32 threads", "16384": "a warp takes its registers from one quarter",
        "warps_per_sm // warps": "an SM holds warps_per_sm warps",
    },
    rows=[
        Row("one-register-file", "registers: they are counted over the whole SM. A warp takes its registers from one "
            "quarter, 16384, so what is left over in the quarters makes no warp",
            [("16384 // per_warp * 4 // warps", "65536 // per_warp // warps")]),
        Row("by-threads", "registers: a block's are counted together and divided into 65536: they are handed out by "
            "warps, from quarters of 16384", [("16384 // per_warp * 4 // warps", "65536 // (registers * threads)")]),
        Row("by-blocks", "registers: a block's are rounded up together: it is each warp's that are",
            [("16384 // per_warp * 4 // warps", "65536 // (-(-registers * threads // 256) * 256)")]),
        Row("by-threads", "registers: a thread's are rounded up to a multiple of 256: it is a warp's, 32 * registers",
            [("-(-32 * registers // 256) * 256", "-(-registers // 256) * 256 * 32")]),
        Row("whole-blocks-per-quarter", "registers: blocks are fitted into one quarter: a block's warps are spread "
            "over all four", [("16384 // per_warp * 4 // warps", "16384 // (per_warp * warps) * 4")]),
        Row("whole-blocks-per-quarter", "registers: each block takes as many warps of every quarter: what is left over "
            "in two quarters holds a block of the next", [("* 4 // warps", "// -(-warps // 4)")]),
        Row("system-once", "shared memory: the 1024 bytes for the system are taken by each block, not once per SM",
            [("shared_per_sm // (shared_bytes + 1024)", "(shared_per_sm - 1024) // max(1, shared_bytes)")]),
        Row("warps-of-shared-memory", "shared memory: it is divided by the block's warps as well: they share it",
            [("(shared_bytes + 1024)", "(shared_bytes + 1024) // warps")]),
        Row("1000-for-1024", "shared memory: the system takes 1024 bytes of each block, not 1000",
            [("shared_bytes + 1024", "shared_bytes + 1000")]),
    ],
)  # fmt: skip
def blocks_per_sm(registers, shared_bytes, threads, shared_per_sm, warps_per_sm):
    """Blocks of `threads` threads, `registers` per thread and `shared_bytes` per block that one SM holds."""
    # BEGIN SOLUTION
    warps = threads // 32
    per_warp = -(-32 * registers // 256) * 256
    by_registers = 16384 // per_warp * 4 // warps
    by_shared = shared_per_sm // (shared_bytes + 1024)
    return min(by_registers, by_shared, warps_per_sm // warps)
    # END SOLUTION


# ---- CUDA texts: told by changes of the right text ------------------------------------------------------------------


_watched = partial(built, check=True)
_halves = partial(forwards, dtype=torch.float16)
# Several heads and tiles; rows that see no key
_RUNS = [_halves((1, 2, 1, 70, 90, True)), _halves((1, 1, 1, 40, 24, True))]


# ---- 9.3 -------------------------------------------------------------------------------------------------------------


def _with_rescaling(text: str) -> Source:
    return replaced(step("p9_3_rescale"), "rescale", text)


def _fifths(module: CudaModule, late: float = 8.0, scale: float = 1 / 8) -> Outputs:
    """Where the maxima of each fifth row move in the tile that is walked last: by 40, or with late=0 as the others'.

    scale: a power of 2; the scores are the same.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).half() for n in (64, 128, 128))
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, :, ::5, 0], k[:, :, :64, 0] = late, 40.0
    return module.forward(q / (8 * scale), k, v, causal=False, echo=False, scale=scale)


_IS_FAR = "(m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE"
_FAR = f"if ({_IS_FAR}) m_i[r] = m_new[r];"
RESCALE = Trials(
    "9.3", _watched, region=True,
    runs=[_fifths, *(_halves((1, 1, 1, 64, 130, False), fall=x) for x in (3.0, 8.0)), _RUNS[1]],
    place=lambda text: _with_rescaling(text).text, tol=1e-3,
    equal={
        "`m_i[r]` is one too": "-inf and a number is -inf",
        "stands where 0 belongs": "any number will do there: 2 to -inf less it is 0",
        "comes too late": "neither line needs the other", "as positive": "no maximum is above the one that follows it",
        "the factor `r` is there twice": "r is 0 or 1",
        "`m_i[0]` stands where": "in base's test: while row g has no key, row g + 8 has none before this tile",
    } | dict.fromkeys(
        ("* scale_log2` is one too", "`RESCALE_ABOVE` is one too", ">= RESCALE_ABOVE"),
        "how far a maximum may lag is a choice, and 2^9 is far from 65504 too",
    ),
    words={"base": "base", "correction": "correction", "before": "the reference before"},
    notes={
        "l_i[r] *= correction": "m_i, l_i and acc of a row belong to one reference",
        "m_i[r] = m_new[r]": "m_i, l_i and acc of a row belong to one reference", "base": "-inf - (-inf) would be NaN",
        "scale_log2": "2^x is taken of scores times the scale and log2(e)",
    },
    rows=[
        Row("moved-before-corrected", "m_i is moved before the correction is computed from it, which is then 1: it is "
            "the old reference less the new one",
            [("                const float before = m_i[r];\n", ""), ("(before - base)", "(m_i[r] - base)")]),
        Row("kept-and-corrected", "a row that keeps its reference is corrected as if it moved: `base` is the reference "
            "that it has from now on",
            [("m_i[r] == -INFINITY ? 0.f : m_i[r]", "m_new[r] == -INFINITY ? 0.f : m_new[r]")]),
        Row("row-not-moved", "the warp rescales only where all of its rows move far: it has to as soon as any does",
            [("__any_sync(", "__all_sync(")]),
        Row("maximum-moved-alone", "the maximum is moved where nothing is rescaled",
            [("if (__any_sync(~0u, moved)) {", "for (int r = 0; r < 2; r++) if (!__any_sync(~0u, moved)) m_i[r] = "
              "m_new[r];\n        if (__any_sync(~0u, moved)) {")]),
        Row("wrong-correction", "log2(e) is missing in the correction",
            [("(before - base) * scale_log2", "(before - base) * p.scale")]),
        Row("reference-of-another-row", "both rows of a lane are corrected with the first one's reference before",
            [("                const float before = m_i[r];\n", ""),
             ("(~0u, moved)) {\n", "(~0u, moved)) {\n            const float before = m_i[0];\n")]),
        Row("acc-not-rescaled", "l_i is multiplied by the correction and acc is not: both belong to one reference",
            [("acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction;", ";")]),
        Row("maximum-not-moved", "m_i is never moved: l_i and acc are brought under a reference that is not kept",
            [(_FAR, f"const float next = {_IS_FAR} ? m_new[r] : m_i[r];"),
             ("m_i[r] == -INFINITY ? 0.f : m_i[r]", "next == -INFINITY ? 0.f : next")]),
        Row("moved-and-not-rescaled", "rows that do not move far take the new maximum too, and their l_i and acc stay "
            "as they are: the three go together",
            [(_FAR, f"const bool far = {_IS_FAR};\n                m_i[r] = m_new[r];"),
             ("exp2_approx((before - base) * scale_log2)", "far ? exp2_approx((before - base) * scale_log2) : 1.f")]),
        Row("moved-of-the-lane", "acc is multiplied in every row, m_i and l_i are changed where `moved` is set, which "
            "is of both rows of a lane: the three go together, row by row",
            [(_FAR, "if (moved) m_i[r] = m_new[r];"), ("l_i[r] *= correction;", "if (moved) l_i[r] *= correction;"),
             ("m_i[r] == -INFINITY ? 0.f : m_i[r]", "m_new[r] == -INFINITY ? 0.f : m_new[r]")]),
        Row("never-rescaled", "nothing is ever rescaled", [("if (__any_sync(~0u, moved)) {", "if (false) {")]),
    ],
)  # fmt: skip


@exercise(
    "9.3",
    title="Right on random numbers",
    minutes=20,
    difficulty="Bug hunt",
    bug=[("                const float before = m_i[r];\n", ""), ("(before - base)", "(m_i[r] - base)")],
    untouched="a75e67e2aaa0",
    history="a common mistake in any online softmax: the maximum is set before its correction is computed",
    hints=[
        "With random numbers only the first tile of a row rescales. What are acc and l_i then, before the correction?",
        "Both are 0, and 0 times anything is 0: a wrong correction does not show. Take a row whose reference moves "
        "from 0 to 40, and compute its correction line by line. What is m_i[r] there?",
        "The correction is 2 to the old reference less the new one. When it is computed the old one is gone: keep it "
        "in a variable, before m_i[r] is set.",
    ],
)
def right_on_random_numbers(rescale: str) -> str:
    whole = _with_rescaling(text_of(rescale, "rescale"))
    with explained(lambda: _watched(whole), RESCALE):
        verdict = examine(whole)
    _expect_lazy(whole)
    for scale in (1 / 8, 128.0):
        _expect_each_row_alone(whole, scale)
    expect_variant(whole, head_dim=128)
    return f"{verdict.cases} cases, late maxima among them"


_SEEN = ("exp2_approx", "exp2f", "exp2", "expf", "__expf")  # functions that a correction may be computed with


def _expect_lazy(whole: Source) -> None:
    """Counts the corrections where no maximum moves after the first tile: scores of 0, four tiles of keys."""
    count = "\n".join(f'#define {name}(...) (printf("r"), {name}(__VA_ARGS__))' for name in _SEEN)
    said = said_by(whole, count, "\n".join(f"#undef {name}" for name in _SEEN), 64, 256)
    times = said.count("r") / (4 * 64)  # the four lanes of a row
    said = f"the result is right, but not lazy: each row computes its correction {times:.3g} times in 4 tiles, though "
    said += "its maximum moves in the first tile only"
    expect(times < 2, said, diagnosis="not-lazy", case="seq_q=64, seq_k=256, head_dim=64, float16, all scores 0")


def _expect_each_row_alone(whole: Source, scale: float) -> None:
    """That rows which do not move far come out bit by bit the same, whether others of their warp do or not."""
    module = built(whole, check=False)
    moved, unmoved = (ran(module, whole, None, partial(_fifths, module, late, scale)) for late in (8.0, 0.0))
    others = [i for i in range(64) if i % 5]
    off = torch.zeros(len(others), dtype=torch.bool)
    for x, y in zip(moved, unmoved, strict=True):
        off |= (x != y).reshape(64, -1)[others].any(1)
    expect(
        not off.any(),
        f"the result is right, but not row by row: {int(off.sum())} of {len(off)} rows that do not move far change in "
        "their last bits when others of their warp do. Such a row keeps its m_i, l_i and acc",
        diagnosis="rescaled-with-the-warp",
        case=f"seq_q=64, seq_k=128, head_dim=64, float16, scale={scale:g}, each fifth row moves far in the second tile",
    )


# ---- 9.4 ------------------------------------------------------------------------------------------------------------
_MERGE_ALONE = """
extern "C" int merge_alone(T* o, float* lse, const float* part_o, const float* part_lse, int splits, int rows) {
    Problem p{};
    p.o = o, p.lse = lse, p.batch = p.heads = p.kv_heads = 1, p.seq_q = rows, p.head_dim = HEAD_DIM;
    p.o_stride = {(int64_t)rows * HEAD_DIM, (int64_t)rows * HEAD_DIM, HEAD_DIM};
    merge<<<ceil_div(rows, WARPS), THREADS>>>(p, splits, part_o, part_lse);
    return (int)cudaGetLastError();
}
"""


def _merging(text: str) -> Source:
    """The second kernel of p9_flash by itself, with a learner's loop."""
    flash = step("p9_flash").path.read_text()
    constants, merge = flash.partition("// region: shared memory")[0], flash[flash.index("// region: merge") :]
    alone = constants + merge.partition("// region: launch")[0] + _MERGE_ALONE
    return replaced(Source(alone, "p9_flash"), "weighted sum", text)


_LIGHT = "a weight of 1.5e-6"
_EMPTY = ("parts without a key", "parts without a key, others near -200")
_LOW = {"near -1e4": (-1e4, -2e4), "near -1e30": (-1e30, -2e30)}  # lse of every second row


def _parts(splits: int, rows: int, head_dim: int, how: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """part_o [splits, rows, head_dim] and part_lse [splits, rows], float32."""
    generator = torch.Generator().manual_seed(splits)
    part_o = torch.randn(splits, rows, head_dim, generator=generator)
    near = {"near 200": 200, "near -200": -200, _EMPTY[1]: -200}.get(how, 0)
    part_lse = near + 2 * torch.randn(splits, rows, generator=generator)
    if how == "near 200 and near -200":
        part_lse[1:2] += 400
        part_lse -= 200
    if how in _EMPTY:
        none = torch.rand(splits, rows, generator=generator) < 0.5
        none[:, 0], none[:, 1] = True, torch.arange(splits) == 0
        part_lse[none], part_o[none] = -torch.inf, 0.0
    if how in _LOW:
        part_lse[:] = torch.tensor(_LOW[how])[torch.arange(rows) % 2]
    if how.startswith(_LIGHT):
        light = -1 if how.endswith("last") else 0
        part_lse[:], part_lse[light] = 0.0, -13.4  # of such a weight fp16 has five bits
        part_o[:], part_o[light] = 0.0, 3e4
    return part_o, part_lse


def _merged(module: CudaModule, part_o: torch.Tensor, part_lse: torch.Tensor) -> Outputs:
    splits, rows, head_dim = part_o.shape
    o, lse = mark_unwritten(torch.empty(rows, head_dim).half()), mark_unwritten(torch.empty(rows))
    module.launch("merge_alone", o, lse, part_o, part_lse, splits, rows, echo=False)
    return [o, lse]


MERGE = Trials(
    "9.4", lambda text: built(text, check=True, HEAD_DIM=128), region=True, place=lambda text: _merging(text).text,
    runs=[partial(_merged, part_o=o, part_lse=lse) for o, lse in (
        _parts(3, 9, 128), _parts(4, 8, 128, "parts without a key"), _parts(3, 8, 128, "near 200"),
        _parts(2, 8, 128, "near -200"), _parts(4, 8, 128, _EMPTY[1]))],
    tol=5e-4,
    words={"reference": "the reference", "weight": "the weight", "correction": "the correction", "x": "x",
           "lse": "the part's lse", "m_new": "the new maximum"},
    equal={
        "in `i < HEAD_DIM / 32`": "i goes up by two, to an even number",
        "comes too late": "neither line needs the other",
    } | dict.fromkeys(
        ("in `m_i == -INFINITY`", "`m_i == -INFINITY` is not asked", "0 stands where `INFINITY`"),
        "below the loop base counts only where a part has a key",
    ),
    notes={
        "exp2_approx((lse - reference) * LOG2E)": "o of a part counts with exp(lse - the largest lse)",
        "exp2_approx((m_i - reference) * LOG2E)": "what was merged before is brought under the new maximum",
        "lse - reference": "only differences of lse go into an exponential",
        "LOG2E": "exp2 of a number times log2(e) is its exp", "weight": "o of a part counts with its weight",
        "s * rows + row": "the parts lie [splits, rows]",
        "correction": "what was merged before is brought under the new maximum",
    },
    rows=[
        Row("no-exponential", "the weight is 1 for every part: the exponential of its lse is forgotten",
            [("exp2_approx((lse - reference) * LOG2E)", "1.f")]),
        Row("no-exponential", "the weight is the difference of two lse: the exponential of it is forgotten",
            [("exp2_approx((lse - reference) * LOG2E)", "(lse - reference) * LOG2E")]),
        Row("no-exponential", "the weight is the part's lse itself: the exponential of it is forgotten",
            [("exp2_approx((lse - reference) * LOG2E)", "lse")]),
        Row("no-max-subtraction", "the largest lse is not subtracted in the exponent: exp overflows, or is 0",
            [("m_new == -INFINITY ? 0.f : m_new", "0.f"), ("        m_i = m_new;\n", ""),
             ("exp2_approx((m_i - reference) * LOG2E)", "1.f")]),
        Row("never-rescaled", "the correction is 1 always, as where m_i is set before it is computed: what was merged "
            "before a new maximum counts too much", [("exp2_approx((m_i - reference) * LOG2E)", "1.f")]),
        Row("acc-not-rescaled", "acc is not brought under a new maximum: what was merged before counts too much in it",
            [("acc[i] * correction", "acc[i]"), ("acc[i + 1] * correction", "acc[i + 1]")]),
        Row("old-maximum-in-the-weight", "the weight is taken against the maximum before this part, not the new one",
            [("(lse - reference) * LOG2E", "(lse - (m_i == -INFINITY ? 0.f : m_i)) * LOG2E")]),
        Row("old-maximum-in-the-guard", "0 is subtracted where m_i, the maximum before, is -inf, and so from the first "
            "part with a key: m_new is asked", [("reference = m_new == ", "reference = m_i == ")]),
        Row("each-counts-one", "l_i counts each part as 1: it is the sum of the weights",
            [("correction + weight;", "correction + 1.f;")]),
        Row("divided-in-the-loop", "parts are divided by l_i in the loop, and acc is again below it",
            [("weight * x.x", "weight * x.x / l_i"), ("weight * x.y", "weight * x.y / l_i")]),
        Row("divided-in-the-loop", "acc is divided by l_i in every round, and again below the loop: once, at the end",
            [("acc[i] * correction + weight * x.x", "(acc[i] * correction + weight * x.x) / l_i"),
             ("acc[i + 1] * correction + weight * x.y", "(acc[i + 1] * correction + weight * x.y) / l_i")]),
        Row("corrected-for-each-pair", "all of acc is multiplied by the correction for each pair of columns: once for "
            "a part", [
            ("acc[i] = acc[i] * correction +", "for (int k = 0; k < HEAD_DIM / 32; k++) acc[k] *= correction;\n"
             "            acc[i] +="), ("acc[i + 1] = acc[i + 1] * correction +", "acc[i + 1] +=")]),
        Row("first-part-twice", "l_i counts the first part before the loop's sum does: its weight is in it twice",
            [("m_new = fmaxf(m_i, lse);", "m_new = fmaxf(m_i, lse);\n        if (s == 0) m_i = lse, l_i = 1.f;")]),
        Row("wrong-base", "LN2 stands where LOG2E belongs: exp2 of a number times log2(e) is its exp",
            [("(m_i - reference) * LOG2E", "(m_i - reference) * LN2"),
             ("(lse - reference) * LOG2E", "(lse - reference) * LN2")]),
        Row("no-max-subtraction", "the weight is exp(lse), with no maximum subtracted, and below the loop m_i is added",
            [("m_new == -INFINITY ? 0.f : m_new", "0.f"), ("exp2_approx((m_i - reference) * LOG2E)", "1.f")]),
        Row("correction-upside-down", "the correction is upside down: it is 2 to the old maximum less the new one",
            [("(m_i - reference) * LOG2E", "(reference - m_i) * LOG2E")]),
        Row("summed-per-pair", "l_i is summed once per pair of a lane's columns: there are several at head_dim 128",
            [("        l_i = l_i * correction + weight;\n", "        l_i *= correction;\n"),
             ("            acc[i] =", "            l_i += weight;\n            acc[i] =")]),
        Row("split-not-weighted", "the parts are added as they are: o of a part counts with its weight",
            [("weight * x.x", "x.x"), ("weight * x.y", "x.y")]),
        Row("part-of-another", "parts are taken in the order [rows, splits], and they lie [splits, rows]",
            [("lse = part_lse[s * rows + row]", "lse = part_lse[row * splits + s]")]),
        Row("part-of-another", "`part_lse[s]` is taken for every row: a part has as many lse as there are rows",
            [("lse = part_lse[s * rows + row]", "lse = part_lse[s]")]),
        Row("overwritten", "acc is set by each part, and not added to: the last one is all that is left",
            [("acc[i] * correction + ", ""), ("acc[i + 1] * correction + ", "")]),
        Row("empty-part-nan", "m_new is subtracted as it is: where no part so far has a key, -inf - (-inf) is NaN",
            [("m_new == -INFINITY ? 0.f : m_new", "m_new")]),
        Row("stops-at-an-empty-part", "the parts behind one that has seen no key are left out",
            [("        const float reference", "        if (lse == -INFINITY) break;\n        const float reference")]),
    ],
)  # fmt: skip


@exercise(
    "9.4",
    title="Merge the parts in one pass",
    minutes=30,
    hints=[
        "It is the online softmax of phase 0, with parts in the place of scores: part s has the score lse_s, and o_s "
        "in the place of a row of V. What has to happen to acc and l_i when lse_s is larger than all before?",
        "Both times exp(old - new): acc and l_i are multiplied by exp(old maximum - new maximum), part s by exp(lse_s "
        "- new maximum). As long as no part has had a key, -inf - (-inf) must not arise: subtract 0 in its place.",
        "m_new = fmaxf(m_i, lse); correction = exp2_approx((m_i - reference) * LOG2E), weight = exp2_approx((lse - "
        "reference) * LOG2E); l_i = l_i * correction + weight; acc[i] = acc[i] * correction + weight * x.x; m_i last.",
    ],
)
def merge_of_parts(merge_loop: str) -> str:
    whole = _merging(text_of(merge_loop, "merge_loop"))
    cases = [
        (splits, rows, head_dim, how)
        for head_dim in (64, 128)
        for splits, rows, how in (
            (3, 8, ""), (1, 5, ""), (7, 18, ""), *((4, 8, how) for how in _EMPTY),
            *((3, 8, how) for how in ("near 200", "near -200", "near 200 and near -200")),
            *((2, 4, how) for how in (f"{_LIGHT}, first", f"{_LIGHT}, last", *_LOW)),
        )
    ]  # fmt: skip
    with _weights_told(whole), explained(lambda: built(whole, check=True, HEAD_DIM=128), MERGE):
        for given in cases:
            _expect_merge(whole, *given)
    if (filled := with_nan(whole.text)) != whole.text:
        try:
            _expect_merge(replace(whole, text=filled), *cases[0])
        except CheckFailed as failed:
            raise CheckFailed(f"{NOT_SET}, {failed.sentence}", diagnosis="uninitialised-local") from None
    _expect_one_pass(whole)
    return f"{len(cases)} cases, parts without a key among them"


_PROBES = {
    "one part": (0.0,), "a part with a smaller lse second": (3.0, 0.0), "a part with a larger lse second": (0.0, 3.0),
    "a part without a key second": (0.0, -math.inf), "a part without a key first": (-math.inf, 0.0),
    "two parts without a key": (-math.inf, -math.inf), "three parts that are alike": (0.0, 0.0, 0.0),
    "lse far from 0": (200.0, 201.0),
}  # fmt: skip


@contextlib.contextmanager
def _weights_told(whole: Source) -> Iterator[None]:
    """Tells what parts count, in the plainest case in which that is wrong: behind a cause that is known."""
    try:
        yield
    except CheckFailed as failed:
        said = "" if failed.diagnosis in KINDS else _said_of_weights(built(whole, check=False, HEAD_DIM=64))
        if not said:
            raise
        known, *numbers = failed.sentence.split("\n")
        both = f"{known}\n{said}" if numbers else f"{said}\n{known}"
        raise CheckFailed(both, diagnosis=failed.diagnosis, case=failed.case) from None


def _said_of_weights(module: CudaModule) -> str:
    """Read from parts of ones and zeros; "" where no case shows it, or columns of o differ."""
    for what, lse in _PROBES.items():
        part_lse, counts = torch.tensor(lse)[:, None].expand(-1, 8).contiguous(), []
        for s, of_s in enumerate(lse):
            part_o = torch.zeros(len(lse), 8, 64)
            part_o[s] = of_s > -math.inf
            o, merged = _merged(module, part_o, part_lse)
            if not torch.equal(o.nan_to_num(7.0), o[:1, :1].nan_to_num(7.0).expand_as(o)):
                return ""
            counts.append(float(o[0, 0]))
        right = [0.0 if x == -math.inf else x for x in torch.softmax(part_lse[:, 0], 0).nan_to_num(0.0).tolist()]
        whole, found = float(torch.logsumexp(part_lse[:, 0], 0)), float(merged[0])
        given = ", ".join(f"{x:g}" for x in lse)
        if not torch.allclose(torch.tensor(counts), torch.tensor(right), atol=2e-3):
            mine, wanted = (" and ".join(f"{x:.3g}" for x in values) for values in (counts, right))
            return f"{what}, lse {given}: in o they count {mine}, and should count {wanted}"
        if not math.isclose(found, whole, abs_tol=1e-3):
            return (
                f"{what}, lse {given}: they count as they should in o, but lse is {found:.4g}; it should be {whole:.4g}"
            )
    return ""


def _expect_one_pass(whole: Source) -> None:
    """Counts the bytes that a warp reads, of which each lane may read the lse of a part."""
    module, (splits, rows, head_dim) = built(whole, check=True, HEAD_DIM=64), (3, 8, 64)
    ran(module, whole, None, partial(_merged, module, *_parts(splits, rows, head_dim)))
    assert module.report is not None, "every run in the emulator leaves a report"
    read = module.report.counters["global_load_bytes"] / (splits * rows)
    expect(
        read <= 4 * (head_dim + 32),
        f"the result is right, but the lanes of a warp read {read / 4:g} numbers of each part and row: o has "
        f"{head_dim}, and each of 32 lanes needs lse once. Walk the parts once, and keep what you have read",
        diagnosis="two-passes",
        case=f"{splits} parts of {rows} rows, head_dim={head_dim}",
    )


def _expect_merge(whole: Source, splits: int, rows: int, head_dim: int, how: str) -> None:
    case = f"{splits} parts of {rows} rows, head_dim={head_dim}{', ' * bool(how)}{how}"
    module, (part_o, part_lse) = built(whole, check=True, HEAD_DIM=head_dim), _parts(splits, rows, head_dim, how)
    o, lse = ran(module, whole, case, partial(_merged, module, part_o, part_lse))
    want = torch.logsumexp(part_lse.double(), 0)
    share = torch.softmax(part_lse.double(), 0).nan_to_num(0.0)
    light = how.startswith(_LIGHT)
    digits = "fp16 has no such digits, and float32 has: is something on the way narrower?" if light else None
    near = max(1e-4, 1e-6 * float(part_lse.abs().max())) if how in _LOW else 1e-4
    expect_close(lse, want, what="lse", case=case, tol=near if "near" in how else 3e-5)
    want_o = (share[..., None] * part_o).sum(0)
    expect_close(o, want_o, what="o", case=case, tol=1.3e-4 if light else 3e-3, because=digits)


# ---- 9.5 -------------------------------------------------------------------------------------------------------------
PARTS = dict(zip("ABCDEFGHIJKLMNOPQR", (
    "row maxima", "which keys", "store", "copy a tile", "scores", "constants", "first copies", "probabilities",
    "which rows", "launch", "load K and V", "state", "output", "swizzle", "Q in registers", "rescale",
    "shared memory", "addresses",
), strict=True))  # fmt: skip
"""The parts of p9_5_prefetch and its header, which are their regions, by the letters that the exercise gives them."""

# What a part needs of others, as {letter: (why, letters)}.
_INSIDE = "it stands inside of the kernel, which begins there"
_NEEDS = {
    "N": [("it uses ROW_BYTES", "F")], "D": [("it uses CHUNKS and THREADS", "F")],
    "Q": [("it uses the constants", "F"), ("it begins the kernel, and a function cannot stand inside of one", "ND")],
    "I": [(_INSIDE, "Q")], "B": [("it uses m_start", "I")], "L": [(_INSIDE, "Q")],
    "R": [("it uses lane, warp_row and end", "IB")], "G": [("it uses the places to copy from and to", "R")],
    "O": [("Q has to be on its way before it can be waited for", "G")],
    "K": [("the first tile has to be on its way before the loop waits for it", "G")],
    "E": [("the tile of K has to be waited for, and `stage` says where it lies", "K"),
          ("it multiplies with Q's fragments", "O")],
    "A": [("it looks for the maxima of the scores, and begins with m_i", "EL")],
    "P": [("it uses m_new and moved", "A")], "H": [("only then m_i is the reference of this tile", "P")],
    "M": [("it multiplies P, under the tile's reference", "HP")], "C": [("it stores what the loop has summed", "M")],
    "J": [("the kernel ends there, and a launch cannot stand inside of it", "C")],
}  # fmt: skip
# A line that stands for a part; as a declaration where changes are made, which leave it alone.
_PLACE = re.compile(r"^\s*// PART ([A-Z])\s*$|\bflashlab_part ([A-Z]) ?;", re.M)


_WINDOW, _NARROW = 300, 40


@cache
def _windowed() -> str:
    """p9_5_prefetch with the window's constant, its left border in the mask, and the last tile that is asked for.

    And behind it its header, whose regions are parts too.
    """
    text, header = source("p9_5_prefetch"), "copies.cuh"
    return edited(text.replace(f'#include "p09_past_flash_attention_2/{header}"\n', "") + source(header), [
        ("constexpr int SHARED =", f"constexpr int LEFT = {_WINDOW};{' ' * 32}// keys that a row sees before its own "
         "position\nconstexpr int SHARED ="),
        ("        if (j > 0) {   ", "        if (j > begin) {"),
        ("            float x = m_i[r];\n",
         "            const int first_key = row + diagonal - LEFT;\n            float x = m_i[r];\n"),
        ("                    if (MASKED && j * BLOCK_N + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;\n",
         "                    const int key = j * BLOCK_N + n * MMA_N + t * 2 + e;\n"
         "                    if (MASKED && (key < first_key || key > last_key)) c = -INFINITY;\n"),
    ])  # fmt: skip


def part(letter: str) -> str:
    """One of the parts of exercise 9.5, under the line that stands for it."""
    return f"// PART {letter}\n{region(_windowed(), PARTS[letter])}"


def _together(text: str) -> str:
    return _PLACE.sub(lambda m: "\n" + region(_windowed(), PARTS[m[1] or m[2]]).rstrip("\n") + "\n", text)


_DOWN = "    for (; j >= {}; j--) tile(j, std::{}_type{{}});\n"
_RIGHT, _BETWEEN, _LEFT = _DOWN.format("full", "true"), _DOWN.format("whole", "false"), _DOWN.format("begin", "true")
_FIRST_ROW, _LAST_ROW = "max(0, m_start + diagonal - LEFT)", "max(0, m_start + BLOCK_M - 1 + diagonal - LEFT)"
_BEGIN, _WHOLE = f"begin = {_FIRST_ROW} / BLOCK_N", f"whole = ceil_div({_LAST_ROW}, BLOCK_N)"
_CLIPPED = "ceil_div(max(0, min(m_start + BLOCK_M, p.seq_q) - 1 + diagonal - LEFT), BLOCK_N)"
# (queries, keys, causal): where the window begins with a tile, ends one, and where it does for the last row
_BORDERS: list[tuple[int, int, bool]] = [(128, seq_k, True) for seq_k in (492, 491, 493, 494)]


def _walked(seq_q: int, seq_k: int, causal: bool = True) -> Callable[[CudaModule], Any]:
    """A run of a text that says its tiles: they are kept behind its outputs."""
    run = _halves((1, 1, 1, seq_q, seq_k, causal))

    def kept(module: CudaModule) -> Outputs:
        outputs = run(module)
        assert module.report is not None, "every run in the emulator leaves a report"
        return [*outputs, torch.tensor([float(x) for x in module.report.printed.split()])]

    return all_found(kept)


GLUE = Trials(
    "9.5", _watched, [_walked(*x) for x in [(200, 520, True), (400, 330, True), *_BORDERS, (64, 200, False)]],
    region=True, tol=1e-3, place=lambda text: _telling(_together(text)),
    read=lambda text: _PLACE.sub(lambda m: f"flashlab_part {m[1]};", text),
    words={"begin": "begin", "whole": "whole"},
    equal={
        "stands where 0 belongs": "-1 and numbers below BLOCK_N lie in tile 0 as well",
        "LEFT` is cut off": "it is cut off once more", "`m_start + BLOCK_M - 1` is": "it is not negative",
    },
    notes={
        "m_start + diagonal - LEFT": "the first row sees furthest to the left",
        "m_start + BLOCK_M - 1 + diagonal - LEFT": "the last row begins to see last",
    },
    rows=[
        Row("tiles-outside", "`begin` is 0 where the window begins later: it comes from m_start + diagonal - LEFT",
            [(f"begin = {_FIRST_ROW} / BLOCK_N", "begin = 0")]),
        Row("everything-masked", "no tile runs without a mask: those between the borders need none", [(_BETWEEN, "")]),
        Row("never-masked", "the tiles from `full` on run without a mask, and need it", [(_RIGHT, "")]),
        Row("tiles-left-out", "the tiles at the left border are left out: the loop goes on to `begin`", [(_LEFT, "")]),
        Row("no-window", "the walk is that of a kernel without a window, down to tile 0 and there without a mask: the "
            "left border cuts tiles too", [(_BETWEEN, _DOWN.format(0, "false")), (_LEFT, "")]),
        Row("left-border-unmasked", "the tiles at the left border run without a mask, and need it",
            [(_LEFT, _LEFT.replace("true", "false"))]),
        Row("wrong-walk", "the tiles are walked upwards, and part K asks for tile j - 1: it is down to `begin`",
            [(f"    int j = end - 1;\n{_RIGHT}{_BETWEEN}{_LEFT}", "    for (int j = begin; j < end; j++) if (j < whole "
              "|| j >= full) tile(j, std::true_type{}); else tile(j, std::false_type{});\n")]),
        Row("wrong-row", "`begin` is that of the block's last row: the first row sees furthest to the left",
            [(f"begin = {_FIRST_ROW}", f"begin = {_LAST_ROW}")]),
        Row("wrong-row", "the tiles that the left border cuts end where the first row sees all: the last row begins to "
            "see later", [(f"whole = ceil_div({_LAST_ROW}", f"whole = ceil_div({_FIRST_ROW}")]),
        Row("rounded-down", "the first tile that the left border does not cut is rounded down, into one that it cuts",
            [(f"ceil_div({_LAST_ROW}, BLOCK_N)", f"{_LAST_ROW} / BLOCK_N")]),
        Row("rounded-up", "`begin` is rounded up: a part of the tile before it is seen",
            [(f"{_FIRST_ROW} / BLOCK_N", f"ceil_div({_FIRST_ROW}, BLOCK_N)")]),
        *(Row(slug, said, [(_BEGIN, f"begin = min(end, {begin or _BEGIN[8:]})"),  # of who keeps them in their order
                           (_WHOLE, f"whole = max(begin, {whole or _CLIPPED})"),
                           (_RIGHT, _DOWN.format("max(begin, full)", "true"))]) for slug, said, begin, whole in (
            ("wrong-row", "`begin` is that of the block's last row: the first row sees furthest to the left",
             f"{_LAST_ROW} / BLOCK_N", ""),
            ("rounded-up", "`begin` is rounded up: a part of the tile before it is seen",
             f"ceil_div({_FIRST_ROW}, BLOCK_N)", ""),
            ("rounded-down", "the first tile that the left border does not cut is rounded down, into one that it cuts",
             "", f"{_CLIPPED[9:-10]} / BLOCK_N"),
            ("rounded-down", "the first tile that the left border does not cut is rounded down, plus 1: it is rounded "
             "up, and a border between two tiles cuts neither", "", f"{_CLIPPED[9:-10]} / BLOCK_N + 1"),
            ("no-diagonal", "`diagonal` is missing: row m_start stands at position m_start + diagonal",
             "max(0, m_start - LEFT) / BLOCK_N", _CLIPPED.replace("+ diagonal - LEFT", "- LEFT")))),
    ],
)  # fmt: skip


@exercise(
    "9.5",
    title="Put a kernel with a window together",
    minutes=50,
    hints=[
        "Begin with the constants and the functions; then the part that begins the kernel; what each lane computes "
        "once before the loop; the body of the loop in the order of the algorithm; the store; the launch. The body is "
        "a lambda with six parts in it, behind constexpr bool MASKED = decltype(is_masked)::value.",
        "The first row sees the keys from m_start + diagonal - LEFT on, the last one from BLOCK_M - 1 further on: the "
        "tile of the one, rounded down, is begin; that of the other, rounded up, is the first that is not cut. Neither "
        "is below 0.",
        "Three loops over one j, from end - 1 on: down to full with std::true_type{}, down to the first tile that is "
        "not cut with std::false_type{}, down to begin with std::true_type{}. Where nothing is full the second one "
        "does not run.",
    ],
)
def kernel_of_parts(kernel: str) -> str:
    text = text_of(kernel, "kernel")
    _expect_parts(text)
    whole = Source(_together(text), "kernel")
    cases = [(1, 1, 1, 200, 520, True), (1, 2, 1, 130, 700, False), (2, 1, 1, 600, 450, True)]
    cases += [(1, 1, 1, *shape) for shape in _BORDERS]
    with explained(lambda: _watched(_telling(whole.text)), GLUE), _walk_told(whole.text):
        verdict = examine(whole)  # of cases that are shorter than the window
        for shape in cases:
            _expect_window(whole, *shape)
        _expect_window(whole, *cases[0], _NARROW)
        _expect_constant_mask(whole.text)
        for sizes in [*_BORDERS, (768, 768, True), (130, 700, False)]:
            said = _wrong_walk(whole.text, *sizes)
            expect(said is None, f"right, but {said}", diagnosis="wrong-walk")
    return f"{verdict.cases + len(cases) + 1} cases right, nothing found by the emulator"


@contextlib.contextmanager
def _walk_told(whole: str) -> Iterator[None]:
    """Say first which tiles a block works on, where they are not those that it should."""
    try:
        yield
    except CheckFailed as failed:
        said = None
        for sizes in [*_BORDERS, (200, 520, True), (130, 700, False), (400, 330, True)]:
            with contextlib.suppress(Exception):  # what fails here fails there too
                said = said or _wrong_walk(whole, *sizes)
        with contextlib.suppress(Exception):
            said = said or _wrong_walk(whole, 200, 520, True, _NARROW)
        if said is None or said in failed.sentence:
            raise
        raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis="wrong-walk", case=failed.case) from None


def _wrong_walk(whole: str, seq_q: int, seq_k: int, causal: bool, left: int = _WINDOW) -> str | None:
    """Words for the tiles of the first block that works on others than it should, or in another order."""
    whole = whole.replace(f"LEFT = {_WINDOW};", f"LEFT = {left};")
    text = _telling(whole, 'if (threadIdx.x == 0) printf("%d\\n", -1 - m_start);\n')
    module = built(Source(text, "kernel"), check=False)
    q, k = (torch.zeros(1, 1, n, 64).half() for n in (seq_q, seq_k))
    module.forward(q, k, k, causal=causal, echo=False)
    assert module.report is not None, "every run in the emulator leaves a report"
    tall, wide, numbers = 128, 64, [int(x) for x in module.report.printed.split()]
    walks: dict[int, list[tuple[int, bool]]] = {m_start: [] for m_start in range(0, seq_q, tall)}
    for tile, m_start in zip(numbers[::2], numbers[1::2], strict=True):
        walks[-1 - m_start].append((tile // 2, tile % 2 == 1))
    for m_start, walk in walks.items():
        first = m_start + seq_k - seq_q  # the position of its first row
        last = min(m_start + tall, seq_q) - 1 + seq_k - seq_q
        end, full = -(-seq_k // wide), seq_k // wide
        if causal:
            end, full = max(0, min(end, -(-(first + tall) // wide))), max(0, min(full, (first + 1) // wide))
        uncut, of_all = (-(-max(0, x - left) // wide) for x in (last, first + tall - 1))  # of rows past the end, too
        want = [(j, not uncut <= j < full) for j in range(end - 1, max(0, first - left) // wide - 1, -1)]
        if [(j, mask or uncut <= j < of_all) for j, mask in walk] != [(j, x or uncut <= j < of_all) for j, x in want]:
            listed = [", ".join(f"{j}{'*' * mask}" for j, mask in tiles) or "none" for tiles in (walk, want)]
            said = f"LEFT={left}, seq_q={seq_q}, seq_k={seq_k}{', causal' * causal}: the block at m_start={m_start} "
            return f"{said}works on tiles {listed[0]}; right: {listed[1]} (*: with a mask)"
    return None


def _expect_window(
    whole: Source, batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, causal: bool, left: int = _WINDOW
) -> None:  # fmt: skip
    """One run on more keys than the window has, beside the definition."""
    case = f"heads={heads}, seq_q={seq_q}, seq_k={seq_k}, LEFT={left}{', causal' * causal}"
    sizes = (heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)
    q, k, v = (normal(batch, *size, 64, seed=i).half() for i, size in enumerate(sizes))
    whole = Source(whole.text.replace(f"LEFT = {_WINDOW};", f"LEFT = {left};"), whole.name)
    module = built(whole, check=False)
    o, lse = ran(module, whole, case, partial(module.forward, q, k, v, causal=causal, echo=False))
    scores = q.double() @ k.double().mT / 8
    ahead = torch.arange(seq_k) - torch.arange(seq_q)[:, None] - (seq_k - seq_q)  # of the row's own position
    scores[..., (ahead < -left) | (causal & (ahead > 0))] = -torch.inf
    want = scores.logsumexp(-1)
    p = torch.exp(scores - want.masked_fill(want == -torch.inf, 0.0)[..., None])
    narrow = f"right with LEFT = {_WINDOW}; with {left} no tile is full: is none walked twice, and none left out?"
    expect_close(lse, want, what="lse", case=case, tol=1e-4, because=narrow if left == _NARROW else None)
    expect_close(o, p @ v.double(), what="o", case=case, tol=4e-3)


def _expect_parts(text: str) -> None:
    """That each part stands there once, behind those that it needs."""
    places = [m[1] or m[2] for m in _PLACE.finditer(text)]
    for letter in places:
        known = letter in PARTS
        expect(known, f"there is no part {letter}: they are A to {list(PARTS)[-1]}", diagnosis="part-unknown")
        sentence = f"part {letter}, {PARTS.get(letter)}, stands there {places.count(letter)} times"
        expect(places.count(letter) == 1, sentence, diagnosis="part-twice")
    for letter, name in PARTS.items():
        expect(letter in places, f"part {letter}, {name}, is missing", diagnosis="part-missing")
    for at, letter in enumerate(places):
        for why, others in _NEEDS.get(letter, ()):
            for first in others:
                said = f"part {letter}, {PARTS[letter]}, is out of place: {why}, so part {first}, {PARTS[first]}, "
                said += "comes before it"
                expect(places.index(first) < at, said, diagnosis="part-out-of-place")
    expect("MASKED" in _PLACE.sub("", text), "the glue should define MASKED, for the two bodies", diagnosis="no-flag")


def _telling(whole: str, more: str = "") -> str:
    """The text, and each of its tiles prints 2 j, and 1 more if it has a mask."""
    scores = region(_windowed(), "scores").rstrip("\n")
    return whole.replace(scores, f'if (threadIdx.x == 0) printf("%d\\n", 2 * j + (int)MASKED);\n{more}{scores}')


def _expect_constant_mask(whole: str) -> None:
    try:
        built(Source(_telling(whole, 'static_assert(MASKED || !MASKED, "MASKED");\n'), "kernel"), check=False)
    except CheckFailed:  # it compiled without these lines
        said = "right, but MASKED is a variable that is looked at while the kernel runs: every tile pays for the "
        said += "mask. Make it a constant of each of two bodies: constexpr bool MASKED = decltype(is_masked)::value"
        raise CheckFailed(said, diagnosis="not-a-constant") from None


# ---- 9.6 ------------------------------------------------------------------------------------------------------------


def _third_stage(before: str, in_loop: str, more: str = "") -> Source:
    """p9_1_masks with three stages, and these lines; more: behind those in the loop."""
    whole = replaced(step("p9_1_masks"), "first copies", before)
    whole = replaced(replaced(whole, "Q in registers", "// (above)"), "load K and V", in_loop)
    lines = whole.text.splitlines()
    text = "\n".join([*lines[: whole.last], more, *lines[whole.last or 0 :]]) + "\n"
    return replace(whole, text=text.replace("STAGES = 2;", "STAGES = 3;"))


_FIRST_TILES, _NEXT_TILE = "for (int i = 1; i < STAGES; i++) load_kv(end - i);", "load_kv(j - STAGES + 1);"
_STAGE = "const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;"
_IN_LOOP = f"                  // tile j - 1's group may still be under way\n        {_STAGE}"
THIRD_STAGE = Trials(
    "9.6", _watched, [*map(all_found, (_halves((1, 1, 1, 64, 330, False)), _RUNS[1]))], region=True, tol=1e-3, most=110,
    place=lambda text: _third_stage(*parted(text)).text,
    equal={"sign, both times": "any place will do, if load_kv and the loop take the same", "`BLOCK_M`": "both are 64"},
    unless={"q-before-wait": r"cp_async_wait<(STAGES-1|2)>"},
    notes={
        "j - STAGES + 1": "it goes into the stage of tile j + 1, which has been worked on",
        "(end - 1 - j) % STAGES": "tile j lies in stage (end - 1 - j) % STAGES, where it was copied to",
    },
    rows=[
        Row("wrong-stage", "load_kv and the loop take two stages for one tile: tile j lies in (end - 1 - j) % STAGES",
            [(_IN_LOOP, _IN_LOOP.replace("(end - 1 - j)", "j"))]),
        Row("wrong-tile", "each round asks for tile j - 1, which is under way: the next one is j - STAGES + 1",
            [(_NEXT_TILE, "load_kv(j - 1);")]),
        Row("wrong-tile", "each round asks for a tile that has been worked on: the walk goes down to 0",
            [(_NEXT_TILE, "load_kv(j + STAGES - 1);")]),
        Row("wrong-order", "the first tiles are asked for from 0 upwards: the walk begins at end - 1",
            [(_FIRST_TILES, "for (int i = 0; i < STAGES - 1; i++) load_kv(i);")]),
        Row("wrong-order", "tile end - 2 is asked for before end - 1: the loop begins with end - 1, which waits for "
            "the older group", [(_FIRST_TILES, "for (int i = STAGES - 1; i > 0; i--) load_kv(end - i);")]),
        *(Row("no-empty-group", "past the first tile no group is committed: an empty one keeps the count, or a wait "
              "for all but one waits for too little", edits) for edits in (
            [("        }\n        cp_async_commit();", "            cp_async_commit();\n        }")],
            [(_NEXT_TILE, f"if (j >= STAGES - 1) {_NEXT_TILE}")])),
        Row("one-tile-before", "one tile is on its way before the loop, and STAGES - 1 have to be",
            [(_FIRST_TILES, "load_kv(end - 1);"), ("cp_async_wait<STAGES - 1>", "cp_async_wait<1>")]),
        Row("one-tile-before", "one tile is on its way before the loop, and STAGES - 1 have to be",
            [(_FIRST_TILES, "load_kv(end - 1);")]),
        Row("q-before-wait", "Q is read when its copy may still be under way: STAGES - 1 groups are younger",
            [("cp_async_wait<STAGES - 1>", "cp_async_wait<STAGES>")]),
        Row("read-before-wait", "tile j is read when its copy may still be under way: STAGES - 2 groups are younger",
            [("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = STAGES - 1")]),
    ],
)  # fmt: skip
_WAIT = re.compile(r"\bcp_async_wait\s*<([^;]*)>\s*\(\s*\)\s*;")


_Q_ALONE = r'static_assert((\1) >= STAGES - 1, "Q_WAIT"); \g<0>'


@exercise(
    "9.6",
    title="A third stage, backwards",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Before the loop Q and the first STAGES - 1 tiles have to be on their way: end - 1, end - 2, ... Past the "
        "first tile load_kv commits an empty group, so that the count goes on.",
        "Q may be read when all but the latest STAGES - 1 groups have arrived; tile j when all but STAGES - 2 have. "
        "Which tile goes into the stage that tile j + 1 has left?",
        "for (int i = 1; i < STAGES; i++) load_kv(end - i); wait for Q with STAGES - 1; IN_FLIGHT = STAGES - 2; after "
        "the barrier load_kv(j - STAGES + 1).",
    ],
)
def third_stage(before_loop: str, in_loop: str) -> str:
    texts = text_of(before_loop, "before_loop"), text_of(in_loop, "in_loop")
    whole = _third_stage(*texts)
    with explained(lambda: _watched(whole), THIRD_STAGE):
        verdict = examine(whole)
    test = 'static_assert(IN_FLIGHT >= STAGES - 2, "IN_FLIGHT");'
    try:
        _watched(_third_stage(_WAIT.sub(_Q_ALONE, texts[0]), texts[1], test))
    except CheckFailed as failed:  # it compiled without these lines
        for_q = "Q_WAIT" in failed.sentence
        raise CheckFailed(
            "right, but where Q is waited for, STAGES - 1 groups should be left in flight, those of the first tiles: Q "
            "is a group of its own"
            if for_q
            else "right, but IN_FLIGHT should leave the copies of all later tiles in flight: with three stages that is "
            "one group",
            diagnosis="waits-too-long" if for_q else "wrong-wait-count",
        ) from None
    bytes_ = probe(_watched(whole), whole, PROBES[1]).launches[0].shared_bytes
    said = f"the kernel asks for {bytes_} bytes of shared memory; Q and three stages of K and V are "
    said += f"{(64 + 6 * 64) * 128}"
    expect(bytes_ == (64 + 6 * 64) * 64 * 2, said, diagnosis="wrong-shared-size")
    return f"{verdict.cases} cases, {bytes_} bytes of shared memory"
