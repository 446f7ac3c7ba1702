"""Checks of phase 9: masks, occupancy, a lazy rescaling, parts of kernels put together, a kernel from nothing.

CUDA answers are text, as in phase 8.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from functools import partial

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import (
    PROBES,
    WALKED,
    Source,
    built,
    examine,
    expect_wide,
    listed,
    probe,
    ran,
    region,
    replaced,
    text_of,
    walk,
)
from flashlab.check.lookup import Row
from flashlab.check.mistakes import weights
from flashlab.cuda import CudaModule
from flashlab.exercises import phase_09_ladder as _ladder  # noqa: F401  9.8 to 9.12
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.figures.ladder import wavefronts
from flashlab.kernels.series import step
from flashlab.simt.source import blank_comments, entries

# ---- 9.1 -------------------------------------------------------------------------------------------------------------


def _block_of_queries(r: random.Random) -> tuple[int, ...]:
    seq_q, seq_k, block_m = r.randint(1, 300), r.randint(1, 300), r.choice((32, 64, 128))
    start = block_m * r.randrange(-(-seq_q // block_m))
    return start, block_m, r.choice((16, 32, 64)), seq_q, seq_k, r.random() < 0.8


@rule(
    "9.1",
    title="Which tiles need a mask?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Without a causal mask: how many tiles does seq_k need, rounded up, and how many of them are whole?",
        "Causal: the block's last row, m_start + block_m - 1, sees the most keys, its first row, m_start, the fewest. "
        "How many keys does each see?",
        "Row i sees i + 1 + seq_k - seq_q keys. end is the last row's number of keys over block_n, rounded up; full is "
        "the first row's, rounded down; neither above what seq_k allows, nor below 0.",
    ],
    returns="end, full",
    whole=True,
    inputs=[
        (m_start, block_m, block_n, seq_q, seq_k, causal)
        for seq_q, seq_k in (
            (64, 64), (200, 200), (70, 330), (330, 70), (1, 129), (256, 512), (64, 127), (64, 65), (64, 97), (4, 700),
        )
        for block_m, block_n in ((64, 64), (128, 64), (64, 16))
        for causal in (False, True)
        for m_start in range(0, seq_q, block_m)
    ],
    draw=_block_of_queries,
    alike=lambda end, full: (end, min(end, full)),  # from end on no tile is visited
    notes={
        "diagonal": "the last query sees the last key",
        "block_m": "the block's last row, m_start + block_m - 1, sees most",
        "1": "row i sees its own key too, i + 1 and not i",
    },
    rows=[
        Row("own-key-left-out", "full leaves out a key: row i sees its own key too, so i + 1 and not i",
            [("m_start + 1 + diagonal", "m_start + diagonal")]),
        Row("full-is-end", "full is end: a tile of which the first row sees only a part needs the mask",
            [("return end, full", "return end, end")]),
    ],
)  # fmt: skip
def tiles(m_start, block_m, block_n, seq_q, seq_k, causal):
    """(end, full), not below 0: the block walks tiles end - 1 to 0; tiles full to end - 1 need a mask."""
    # BEGIN SOLUTION
    end, full = -(-seq_k // block_n), seq_k // block_n
    if causal:
        diagonal = seq_k - seq_q
        end = max(0, min(end, -(-(m_start + block_m + diagonal) // block_n)))
        full = max(0, min(full, (m_start + 1 + diagonal) // block_n))
    return end, full
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
    title="How many blocks fit?",
    minutes=15,
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
    ],
    draw=_kernel,
    words={"warps": "(threads // 32)", "per_warp": "registers per warp", "by_registers": "blocks by registers",
           "by_shared": "blocks by shared memory"},
    notes={
        "warps": "a block has threads // 32 warps", "1024": "each block takes 1024 bytes more for the system",
        "16384 // per_warp * 4": "an SM has four quarters", "4": "an SM has four quarters of 16384 registers",
        "-(-32 * registers // 256) * 256": "a warp's registers are rounded up to a multiple of 256",
        "32": "a warp has 32 threads", "16384": "a warp takes its registers from one quarter",
        "warps_per_sm // warps": "an SM holds warps_per_sm warps",
    },
    rows=[
        Row("one-register-file", "registers: they are counted over the whole SM. A warp takes its registers from one "
            "quarter, 16384, so what is left over in the quarters makes no warp",
            [("16384 // per_warp * 4 // warps", "65536 // per_warp // warps")]),
        Row("registers-not-rounded", "registers: a warp's registers are rounded up to a multiple of 256",
            [("-(-32 * registers // 256) * 256", "32 * registers")]),
        Row("registers-rounded-down", "registers: a warp's registers are rounded up to a multiple of 256, and not down",
            [("-(-32 * registers // 256) * 256", "max(256, 32 * registers // 256 * 256)")]),
        Row("by-threads", "registers: a block's are counted together and divided into 65536: they are handed out by "
            "warps, from quarters of 16384", [("16384 // per_warp * 4 // warps", "65536 // (registers * threads)")]),
        Row("whole-blocks-per-quarter", "registers: blocks are fitted into one quarter: a block's warps are spread "
            "over all four", [("16384 // per_warp * 4 // warps", "16384 // (per_warp * warps) * 4")]),
        Row("whole-blocks-per-quarter", "registers: each block takes as many warps of every quarter: what is left over "
            "in two quarters holds a block of the next", [("* 4 // warps", "// -(-warps // 4)")]),
        Row("system-once", "shared memory: the 1024 bytes for the system are taken by each block, not once per SM",
            [("shared_per_sm // (shared_bytes + 1024)", "(shared_per_sm - 1024) // max(1, shared_bytes)")]),
        Row("system-forgotten", "shared memory: each block takes 1024 bytes more for the system",
            [("(shared_bytes + 1024)", "max(1, shared_bytes)")]),
        Row("registers-ignored", "registers do not limit your number: the blocks share 65536 of them, in four quarters",
            [("min(by_registers, by_shared,", "min(by_shared,")]),
        Row("shared-ignored", "shared memory does not limit your number: shared_per_sm is shared by the blocks",
            [("min(by_registers, by_shared,", "min(by_registers,")]),
        Row("warps-ignored", "the warps do not limit your number: an SM holds warps_per_sm, a block has threads // 32",
            [("by_shared, warps_per_sm // warps", "by_shared")]),
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


# ---- 9.3 -------------------------------------------------------------------------------------------------------------


@exercise(
    "9.3",
    title="Right on random numbers",
    minutes=15,
    difficulty="Bug hunt",
    untouched="f6c43c9aea9b",
    history="a common mistake; a related one, in a lazy rescaling too, is meta-pytorch/MSLK, pull request 242 (2026)",
    hints=[
        "With random numbers only the first tile of a row rescales. What are acc and l_i then, before the correction?",
        "Both are 0, and 0 times anything is 0: a forgotten correction does not show. Which of a row's three numbers, "
        "m_i, l_i and acc, belong to one reference?",
        "All three. l_i[r] *= correction; beside m_i[r] = m_new[r].",
    ],
)
def _(rescale: str) -> str:
    text = text_of(rescale, "rescale")
    whole = replaced(step("p9_3_rescale"), "rescale", text)
    try:
        verdict = examine(whole)
    except CheckFailed as failed:
        if failed.diagnosis == "no-max-subtraction":
            raise CheckFailed(
                "not finite where the maximum moves far: some row is not moved to its new maximum. The warp has to "
                "rescale as soon as any of its rows moves far",
                diagnosis="row-not-moved",
                case=failed.case,
            ) from None
        vague = ("wrong-value", "low-precision", "nan-everywhere", "rows-scaled", *weights.SLUGS)
        if failed.diagnosis not in vague:
            raise
        _expect_vote(whole)
        factors = _factors(whole)
        if factors is None:
            raise
        row = max(range(len(factors)), key=lambda i: abs(factors[i] - 1))
        raise CheckFailed(
            "where the maximum moves far in a late tile, all numbers of a row are wrong by one and the same factor "
            f"(row {row}: {factors[row]:.2f}): acc is under the new maximum, and what it is divided by is not",
            diagnosis="l-not-rescaled",
            case="seq_q=128, seq_k=128, head_dim=64, float16, the largest scores in the tile that is walked last",
        ) from None
    _expect_lazy(whole)
    return f"{verdict.cases} cases, late maxima among them"


_SEEN = ("exp2_approx", "exp2f", "exp2", "expf", "__expf")  # functions that a correction may be computed with


def _expect_lazy(whole: Source) -> None:
    """Counts the corrections where no maximum moves after the first tile: scores of 0, four tiles of keys."""
    __tracebackhide__ = True
    lines, first, last = whole.text.splitlines(), whole.first or 1, whole.last or 0
    count = [f'#define {name}(...) (printf("r"), {name}(__VA_ARGS__))' for name in _SEEN]
    own = [*count, *lines[first - 1 : last], *(f"#undef {name}" for name in _SEEN)]
    module = built(Source("\n".join([*lines[: first - 1], *own, *lines[last:], ""]), whole.name), check=False)
    q, k = torch.zeros(1, 1, 64, 64).half(), torch.zeros(1, 1, 256, 64).half()
    module.forward(q, k, k, echo=False)
    assert module.report is not None, "every run in the emulator leaves a report"
    times = module.report.printed.count("r") / (4 * 64)  # the four lanes of a row
    expect(
        times < 2,
        f"the result is right, but not lazy: each row computes its correction {times:.3g} times in 4 tiles, though its "
        "maximum moves in the first tile only. Keep the vote: it spares the other tiles the multiplications",
        diagnosis="not-lazy",
        case="seq_q=64, seq_k=256, head_dim=64, float16, all scores 0",
    )


def _moving(whole: Source, every: int = 1, far: float = 10.0) -> tuple[torch.Tensor, torch.Tensor]:
    """o and what it should be, [128, 64]: in each `every`-th row the tile walked last has scores of about `far`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 128, 64, generator=generator).half() for _ in range(3))
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, :, ::every, 0] = 8.0
    k[:, :, :64, 0] = far  # in the first tile, in which the walk ends
    o = built(whole, check=True).forward(q, k, v, causal=False, echo=False)[0][0, 0].double()
    return o, reference.attention(q, k, v)[0][0, 0].double()


def _expect_vote(whole: Source) -> None:
    """Right where the maxima of all rows move, wrong where those of some do."""
    __tracebackhide__ = True
    (every, want), (some, of_some) = _moving(whole, far=40.0), _moving(whole, every=5, far=40.0)
    all_right = bool(((every - want).abs() < 1e-2).all())
    off = ~((some - of_some).abs().amax(1) < 1e-2)
    elsewhere = bool(off[torch.arange(128) % 5 > 0].any())
    expect(
        not all_right or not bool(off.any()) or elsewhere,
        "right where the maxima of all rows move far, wrong in a row whose maximum moves far while those of other rows "
        "of its warp do not: the warp has to rescale as soon as any of its rows moves",
        diagnosis="row-not-moved",
        case="seq_q=128, seq_k=128, head_dim=64, float16, the largest scores of each fifth row in the tile walked last",
    )


def _factors(whole: Source) -> list[float] | None:
    """The factor by which each row is wrong, if it is one per row, and not 1 everywhere."""
    o, want = _moving(whole)
    factors = (o * want).sum(1) / want.square().sum(1)
    one = (o - factors[:, None] * want).abs().max() < 1e-2 and (factors - 1).abs().max() > 0.02
    return factors.tolist() if one else None


# ---- 9.4 ------------------------------------------------------------------------------------------------------------


@exercise(
    "9.4",
    title="Merge the parts",
    minutes=25,
    difficulty="Core",
    hints=[
        "Part s is a finished attention over its share of the keys: o_s is normalised, lse_s = log of the sum of its "
        "exponentials. With which weight does o_s enter the whole?",
        "Its share of the total sum: exp(lse_s) / sum of exp(lse_s'). Subtract the largest lse first, as "
        "in any softmax; a part "
        "without a key has lse = -inf, and if all have, -inf - (-inf) must not arise.",
        "weight = exp2_approx((part_lse[s * rows + row] - base) * LOG2E) with base = m_i, or 0 where m_i "
        "is -inf; l_i += weight; "
        "acc[i] += weight * the part's element.",
    ],
)
def _(merge_loop: str) -> str:
    text = text_of(merge_loop, "merge_loop")
    whole = _low_tiles_alone(replaced(step("p9_flash"), "weighted sum", text))
    probes = ((1, 1, 1, 16, 1024, False), (1, 2, 1, 70, 700, True))
    try:
        verdict = examine(whole, probes=probes, fast=False, max_seq=1100)
    except CheckFailed as failed:
        if failed.diagnosis in _OF_PARTS:
            _expect_own_parts(whole)
        raise
    _rows_without_a_key(whole)
    _other_head_dim(whole)
    return f"{verdict.cases} cases, split keys among them"


# What p9_flash has for many rows and for a small GPU, and what stands there instead.
_OTHER_TILES = (
    ("using Tall = Tile<HEAD_DIM == 256 ? 1 : 2>;", "using Tall = Low;"),
    ("if constexpr (NEEDED > 100 * 1024)", "if constexpr (NEEDED > 228 * 1024)"),
)


def _low_tiles_alone(whole: Source) -> Source:
    """p9_flash without the tiles that no problem of this check uses: they are two thirds of what g++ compiles."""
    text = whole.text
    for old, new in _OTHER_TILES:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is no longer in p9_flash")
        text = text.replace(old, new)
    return replace(whole, text=text)


# Diagnoses of whole kernels that a mistake of the merge may hide behind.
_OF_PARTS = (
    "wrong-with-many-keys", "wrong-value", "rows-scaled", "low-precision", "wrong-weights", "l-in-low-precision",
    "o-accumulated-in-low-precision",
)  # fmt: skip
_MERGE_ALONE = """
extern "C" int merge_alone(T* o, float* lse, const float* part_o, const float* part_lse, int splits, int rows) {
    Problem p{};
    p.o = o, p.lse = lse, p.batch = p.heads = p.kv_heads = 1, p.seq_q = rows, p.head_dim = HEAD_DIM;
    p.o_stride = {(int64_t)rows * HEAD_DIM, (int64_t)rows * HEAD_DIM, HEAD_DIM};
    merge<<<ceil_div(rows, WARPS), THREADS>>>(p, splits, part_o, part_lse);
    return (int)cudaGetLastError();
}
"""


def _expect_own_parts(whole: Source) -> None:
    """Raises CheckFailed where a part's weight, or its part of O, is that of another part or row.

    The merge alone, of 3 parts of 8 rows: with one part of O that is 1 and others of 0, O is that part's weight.
    """
    __tracebackhide__ = True
    splits, rows = 3, 8
    count = splits * rows
    module = built(Source(whole.text + _MERGE_ALONE, whole.name, whole.first, whole.last), check=False)
    case = f"the merge alone, {splits} parts of {rows} rows"

    def weights_of(part_lse: torch.Tensor) -> torch.Tensor | None:
        """[rows, count]: the weight that each row of the result gives to each part; None if columns differ in it."""
        found = torch.zeros(rows, count)
        for number in range(count):
            parts = torch.zeros(count, 64)
            parts[number] = 1
            o, lse = torch.zeros(rows, 64).half(), torch.zeros(rows)
            try:
                given = (o, lse, parts, part_lse, splits, rows)
                ran(module, whole, None, partial(module.launch, "merge_alone", *given, echo=False))
            except CheckFailed:
                return None
            if not o.isfinite().all() or not torch.equal(o, o[:, :1].expand_as(o)):
                return None
            found[:, number] = o[:, 0].float()
        return found

    plain = weights_of(torch.zeros(count))
    if plain is None:
        return
    row_of = torch.arange(count) % rows
    for r in range(rows):
        if not torch.equal(plain[r] > 0, row_of == r):
            taken = ", ".join(
                f"part {x // rows} of row {x % rows}" for x in (plain[r] > 0).nonzero().flatten().tolist()
            )
            raise CheckFailed(
                f"row {r} adds up {taken or 'nothing of part_o'}: it should add parts 0 to {splits - 1} of row {r}, "
                "the elements from (s * rows + row) * HEAD_DIM on",
                diagnosis="wrong-part",
                case=case,
            )
    for number in (1, rows, rows + 1, 2 * rows + 2):
        raised = torch.zeros(count)
        raised[number] = 4
        after = weights_of(raised)
        if after is None:
            return
        own = after[row_of, torch.arange(count)] > 1.2 * plain[row_of, torch.arange(count)]
        fallen = after[row_of[number], number] < 0.8 * plain[row_of[number], number]
        expect(
            not fallen,
            "a part with a larger lse gets a smaller weight: it is exp(lse - the largest lse)",
            diagnosis="split-sign",
            case=case,
        )
        gained = own.nonzero().flatten().tolist()
        if gained and number not in gained:
            s, r = divmod(gained[0], rows)
            raise CheckFailed(
                f"the weight of part {s}, row {r} is made of the lse of part {number // rows}, row {number % rows}: "
                "the lse of part s of a row is part_lse[s * rows + row]",
                diagnosis="wrong-lse",
                case=case,
            )
    raised = torch.zeros(splits, rows)
    raised[0] = 1
    after = weights_of(raised.flatten())
    if after is None:
        return
    first, second = after[0, 0].item(), after[0, rows].item()
    ratio, total = first / max(second, 1e-6), after[0].sum().item()
    expect(
        abs(ratio / math.e - 1) < 0.02,
        f"where the lse of part 0 is 1 above that of the others, its weight is {ratio:.4g} times theirs: it should be "
        f"exp(1), {math.e:.4g} times",
        diagnosis="wrong-weight",
        case=case,
    )
    expect(
        abs(total - 1) < 0.01,
        f"the parts are added in the right ratio, but with lse of 1, 0, 0 their weights add up to {total:.4g}, "
        "not to 1: l_i, which acc is divided by, is not the sum of the weights",
        diagnosis="weights-not-normalised",
        case=case,
    )
    o, lse = torch.zeros(rows, 64).half(), torch.zeros(rows)
    given = (o, lse, torch.zeros(splits * rows, 64), torch.ones(splits * rows), splits, rows)
    ran(module, whole, None, partial(module.launch, "merge_alone", *given, echo=False))
    expect(
        bool((lse - (1 + math.log(splits))).abs().max() < 1e-3),
        f"o is right for parts of any lse, but of {splits} parts with an lse of 1 each the merged lse is {lse[0]:.5g}: "
        f"it should be 1 + log({splits}), {1 + math.log(splits):.5g}. What is subtracted in the exponent is added to "
        "lse after the loop",
        diagnosis="wrong-lse",
        case=case,
    )


def _other_head_dim(whole: Source) -> None:
    """Split keys at head_dim 128, where the loop over a lane's columns has two rounds."""
    __tracebackhide__ = True
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator).half() for n in (16, 1024, 1024))
    module = built(whole, check=False, head_dim=128)
    o, lse = module.forward(q, k, v, echo=False)
    want_o, want_lse = reference.attention(q, k, v)
    case = "head_dim=128, seq_q=16, seq_k=1024"
    expect(
        bool((lse - want_lse).abs().max() < 1e-2),
        f"right at head_dim 64, but at 128 lse[0, 0, 0] is {lse[0, 0, 0]:.4g} instead of {want_lse[0, 0, 0]:.4g}: a "
        "lane has four columns there, and goes through the inner loop twice. What must be summed once per part?",
        diagnosis="wrong-at-head-dim-128",
        case=case,
    )
    off = (o - want_o).abs().amax((0, 1, 2))
    column = int(off.argmax())
    expect(
        bool(off.max() < 5e-3),
        f"right at head_dim 64, but at 128 o[0, 0, 0, {column}] is {o[0, 0, 0, column]:.4g} instead of "
        f"{want_o[0, 0, 0, column]:.4g}: a lane has four columns there, two pairs 64 apart",
        diagnosis="wrong-at-head-dim-128",
        case=case,
    )
    _in_float32(module, (o, lse), (want_o, want_lse), case)
    for level in (200.0, -200.0):
        q[..., 0], k[..., 0] = 8.0, level * math.sqrt(128) / 8
        o, lse = module.forward(q, k, v, echo=False)
        want_o, want_lse = reference.attention(q, k, v)
        right = (o - want_o).abs().max() < 2e-2 and (lse - want_lse).abs().max() < 1e-1
        expect(
            bool(right),
            f"right while the scores are small, but near {level:+.0f} lse[0, 0, 0] is {lse[0, 0, 0]:.4g} instead of "
            f"{want_lse[0, 0, 0]:.4g}: exp of a part's lse overflows, or is 0; subtract the largest lse first",
            diagnosis="no-max-subtraction",
            case=f"{case}, every score near {level:+.0f}",
        )


Pair = tuple[torch.Tensor, torch.Tensor]  # o and lse


def _in_float32(module: CudaModule, got: Pair, want: Pair, case: str) -> None:
    """Raises CheckFailed where the weights, or what is summed with them, have less than float32's digits.

    Of 16 bits lse shows as much, which is float32. o is 16 bits itself: there a weight far below 1 shows, of which
    fp16 has few digits, with a V as far above the others.
    """
    __tracebackhide__ = True
    off = (got[1] - want[1]).abs()
    at = int(off.argmax())
    expect(
        bool(off.max() < 3e-5),
        f"nearly right, but lse[0, 0, {at}] is {got[1].flatten()[at]:.7g} instead of {want[1].flatten()[at]:.7g}: the "
        "parts and their lse are float32, and float32 errs by a hundredth of that. Is something on the way narrower?",
        diagnosis="merge-in-low-precision",
        case=case,
    )
    generator = torch.Generator().manual_seed(1)
    q, k = (0.3 * torch.randn(1, 1, n, 128, generator=generator) for n in (16, 1024))
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, 512:, 0] = 13 * math.sqrt(128) / 8  # scores higher by 13: the weight of what comes before is 2e-6
    v = torch.zeros(1, 1, 1024, 128)
    v[:, :, :512] = 3e4
    q, k, v = q.half(), k.half(), v.half()
    o = module.forward(q, k, v, echo=False)[0].float()
    want_o = reference.attention(q, k, v)[0].float()
    error = ((o - want_o) / want_o).abs().amax((0, 1, 3))
    row = int(error.argmax())
    expect(
        bool(error.max() < 2e-3),
        f"nearly right, but where a part's weight is about 2e-6 and its V is 30000, o[0, 0, {row}, 0] is "
        f"{o[0, 0, row, 0]:.5g} instead of {want_o[0, 0, row, 0]:.5g}: so small a weight has lost its digits, which "
        "float32 would keep",
        diagnosis="merge-in-low-precision",
        case="head_dim=128, seq_q=16, seq_k=1024, the scores of the keys from 512 on higher by 13",
    )


def _rows_without_a_key(whole: Source) -> None:
    """Split keys, causal, and more queries than keys: the first rows have no key in any part."""
    __tracebackhide__ = True
    q, k = torch.ones(1, 1, 640, 64).half(), torch.ones(1, 1, 520, 64).half()
    o, lse = built(whole, check=True).forward(q, k, k, causal=True)
    expect(
        o[0, 0, :120].eq(0).all() and lse[0, 0, :120].eq(-torch.inf).all(),
        "rows that no part has seen a key for should be o = 0 and lse = -inf: mind -inf - (-inf), and 0 / 0",
        diagnosis="masked-rows-nan",
        case="seq_q=640, seq_k=520, causal",
    )


# ---- 9.5 -------------------------------------------------------------------------------------------------------------

_TOGETHER = "p9_5_prefetch"
PARTS = dict(zip("ABCDEFGHIJKLMNOPQR", (
    "row maxima", "which keys", "store", "copy a tile", "scores", "constants", "first copies", "probabilities",
    "which rows", "launch", "load K and V", "state", "output", "swizzle", "Q in registers", "rescale",
    "shared memory", "addresses",
), strict=True))  # fmt: skip
"""The parts of p9_5_prefetch, which are its regions, by the letters that the exercise gives them."""

# What a part needs of others: {part: {the other: what for}}.
_NEEDS = {
    "swizzle": {"constants": "it uses ROW_BYTES"},
    "copy a tile": {"constants": "it uses CHUNKS and THREADS"},
    "shared memory": {
        "constants": "it uses the constants",
        "swizzle": "it begins the kernel, and a function cannot stand inside of one",
        "copy a tile": "it begins the kernel, and a function cannot stand inside of one",
    },
    "which rows": {"shared memory": "it stands inside of the kernel, which begins there"},
    "which keys": {"which rows": "it uses m_start"},
    "state": {"shared memory": "it stands inside of the kernel, which begins there"},
    "addresses": {"which rows": "it uses lane and warp_row", "which keys": "it uses end"},
    "first copies": {"addresses": "it uses the places to copy from and to"},
    "Q in registers": {"first copies": "Q has to be on its way before it can be waited for"},
    "load K and V": {"first copies": "the first tile has to be on its way before the loop waits for it"},
    "scores": {
        "load K and V": "the tile of K has to be waited for, and `stage` says where it lies",
        "Q in registers": "it multiplies with Q's fragments",
    },
    "row maxima": {"scores": "it looks for the maxima of the scores", "state": "it begins with m_i"},
    "rescale": {"row maxima": "it uses m_new and moved"},
    "probabilities": {"rescale": "only then m_i is the reference of this tile"},
    "output": {"probabilities": "it multiplies P, not S", "rescale": "acc has to be under the tile's reference"},
    "store": {"output": "it stores what the loop has summed"},
    "launch": {"store": "the kernel ends there, and a launch cannot stand inside of it"},
}
_PLACE = re.compile(r"^\s*// PART ([A-Z])\s*$", re.M)


def part(letter: str) -> str:
    """One of the parts of exercise 9.5, under the line that stands for it."""
    return f"// PART {letter}\n{region(step(_TOGETHER), PARTS[letter])}"


@exercise(
    "9.5",
    title="Put the kernel together",
    minutes=40,
    difficulty="Core",
    hints=[
        "Begin with the constants and the functions; then the part that begins the kernel; what each lane computes "
        "once before the loop; the body of the loop in the order of the algorithm; the store; the launch.",
        "The body is a lambda: auto tile = [&](int j, auto is_masked) { constexpr bool MASKED = "
        "decltype(is_masked)::value; ... }; with six parts in it.",
        "After it: int j = end - 1; for (; j >= full; j--) tile(j, std::true_type{}); and the same down to 0 with "
        "std::false_type{}.",
    ],
)
def _(kernel: str) -> str:
    text = text_of(kernel, "kernel")
    places = [match[1] for match in _PLACE.finditer(text)]
    for letter in places:
        known = letter in PARTS
        expect(known, f"there is no part {letter}: they are A to {list(PARTS)[-1]}", diagnosis="part-unknown")
        sentence = f"part {letter}, {PARTS.get(letter)}, stands there {places.count(letter)} times"
        expect(places.count(letter) == 1, sentence, diagnosis="part-twice")
    for letter, name in PARTS.items():
        expect(letter in places, f"part {letter}, {name}, is missing", diagnosis="part-missing")
    for at, letter in enumerate(places):
        for other, why in _NEEDS.get(PARTS[letter], {}).items():
            first = next(x for x in PARTS if PARTS[x] == other)
            expect(
                places.index(first) < at,
                f"part {letter}, {PARTS[letter]}, is out of place: {why}, so part {first}, {other}, comes before it",
                diagnosis="part-out-of-place",
            )
    whole = _PLACE.sub(lambda match: region(step(_TOGETHER), PARTS[match[1]]).rstrip("\n"), text)
    expect("MASKED" in _PLACE.sub("", text), "the glue should define MASKED, for the two bodies", diagnosis="no-flag")
    try:
        verdict = examine(Source(whole, "kernel"))
    except CheckFailed as failed:
        if failed.diagnosis != "does-not-compile":
            _expect_downwards(text)
        raise
    masked, plain = _bodies(whole)
    expect(
        masked < plain,
        f"right, but {masked} tiles of a long causal problem are masked, and {plain} are not: only the tiles from "
        "`full` on need a mask",
        diagnosis="everything-masked",
    )
    return f"{verdict.cases} cases right, nothing found by the emulator"


_BODY = ("load K and V", "scores", "row maxima", "rescale", "probabilities", "output")


def _expect_downwards(text: str) -> None:
    """Raises CheckFailed where a wrong answer does not walk the tiles from the last one down to 0, each once."""
    __tracebackhide__ = True

    def said(match: re.Match[str]) -> str:
        name = PARTS[match[1]]
        if name == "load K and V":
            return 'if (threadIdx.x == 0) printf("%d ", (int)j);'
        return "" if name in _BODY else region(step(_TOGETHER), name).rstrip("\n")

    walked, last = walk(Source(_PLACE.sub(said, text), "kernel")), -(-WALKED // 64) - 1
    if walked is None or walked == [str(j) for j in range(last, -1, -1)]:
        return
    raise CheckFailed(
        f"with {last + 1} tiles of keys j is {listed(walked)}. It has to be {last} down to 0: the first copies are of "
        "tile end - 1, and each round asks for tile j - 1",
        diagnosis="wrong-walk",
        case=f"seq_q=64, seq_k={WALKED}, head_dim=64, float16",
    )


def _bodies(whole: str) -> tuple[int, int]:
    """How many tiles of one causal head of 768 rows run with a mask, and how many without.

    Raises CheckFailed where MASKED is no constant.
    """
    __tracebackhide__ = True
    scores = region(step(_TOGETHER), "scores").rstrip("\n")
    said = 'if (threadIdx.x == 0) printf("%d\\n", (int)MASKED);\n'
    said += 'static_assert(MASKED || !MASKED, "MASKED");\n'
    try:
        module = built(Source(whole.replace(scores, said + scores), "kernel"), check=False)
    except CheckFailed:  # it compiled without these lines
        raise CheckFailed(
            "right, but MASKED is a variable that is looked at while the kernel runs: the body is compiled once, and "
            "every tile pays for the mask. Make it a constant of each of two bodies: constexpr bool MASKED = "
            "decltype(is_masked)::value",
            diagnosis="not-a-constant",
        ) from None
    q = torch.zeros(1, 1, 768, 64).half()
    module.forward(q, q, q, causal=True, echo=False)
    assert module.report is not None, "every run in the emulator leaves a report"
    words = module.report.printed.split()
    return words.count("1"), words.count("0")


# ---- 9.6 ------------------------------------------------------------------------------------------------------------


def _expect_earlier_tile(in_loop: str) -> None:
    """Raises CheckFailed where a round asks for a tile that the walk has been through: load_kv(j + something)."""
    __tracebackhide__ = True
    for asked in re.findall(r"\bload_kv\(\s*j\s*\+\s*(\w+)\s*\)", blank_comments(in_loop)):
        sentence = f"load_kv(j + {asked}) asks for a tile that has been worked on: the walk goes from end - 1 down to 0"
        raise CheckFailed(sentence, diagnosis="wrong-tile")


_ASKED = (
    '__device__ inline int flashlab_asked(int j) { if (threadIdx.x == 0 && blockIdx.x == 0) printf("%d ", j); '
    "return j; }\n#define load_kv(...) load_kv(flashlab_asked(__VA_ARGS__))\n"
)


def _tiles_asked(whole: Source) -> list[int] | None:
    """The arguments of the calls of load_kv, in their order, for one block of 64 queries; None where it cannot run.

    The macro takes calls alone: where load_kv is defined, no bracket follows.
    """
    if not re.search(
        r"\bauto\s+load_kv\s*=\s*\[&\]\(int (\w+)\)\s*\{\s*const int n_start = \1 \* BLOCK_N\b", whole.text
    ):
        return None  # another function, whose argument may count otherwise
    at = re.search(r'#include "problem.cuh"\n', whole.text).end()  # type: ignore[union-attr]
    words = walk(Source(whole.text[:at] + _ASKED + whole.text[at:], whole.name))
    return None if words is None else [int(word) for word in words]


def _expect_order(whole: Source, failed: CheckFailed) -> None:
    """Raises CheckFailed where the tiles are not asked for in the order in which the loop takes them."""
    __tracebackhide__ = True
    asked = _tiles_asked(whole)
    if asked is None:
        return
    end = -(-WALKED // 64)
    there = [j for j in asked if 0 <= j < end]
    if there == list(range(end - 1, -1, -1)):
        return
    numbers = listed([str(j) for j in asked])
    raise CheckFailed(
        f"with {end} tiles of keys load_kv is called for {numbers}: the loop takes tile {end - 1} first, then down to "
        "0, so they have to be asked for in that order, two before the loop and one more in each round",
        diagnosis="wrong-order",
        case=failed.case,
    ) from None


_WAIT = re.compile(r"\bcp_async_wait<([^;]*)>\(\)\s*;")


def _expect_q_alone(wait: re.Match[str]) -> str:
    """The wait for Q, and before it, on the same line, the test that it waits for no tile.

    A learner who puts Q into the first tile's group has to wait for that one too.
    """
    own_group = wait.string[: wait.start()].count("cp_async_commit()") >= 2
    test = f'static_assert(({wait[1]}) >= STAGES - 1, "Q_WAIT"); ' if own_group else ""
    return test + wait[0]


@exercise(
    "9.6",
    title="A third stage, backwards",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Before the loop Q and the first STAGES - 1 tiles have to be on their way: end - 1, end - 2, "
        "... Past the first tile "
        "load_kv commits an empty group, so that the count goes on.",
        "Q may be read when all but the latest STAGES - 1 groups have arrived; tile j when all but "
        "STAGES - 2 have. Which tile "
        "goes into the stage that tile j + 1 has left?",
        "for (int i = 1; i < STAGES; i++) load_kv(end - i); wait for Q with STAGES - 1; IN_FLIGHT = "
        "STAGES - 2; after the "
        "barrier load_kv(j - STAGES + 1).",
    ],
)
def _(before_loop: str, in_loop: str) -> str:
    before = _WAIT.sub(_expect_q_alone, text_of(before_loop, "before_loop"))
    whole = replaced(step("p9_1_masks"), "first copies", before)
    whole = replaced(replaced(whole, "Q in registers", "// (above)"), "load K and V", text_of(in_loop, "in_loop"))
    lines = whole.text.splitlines()
    test = 'static_assert(IN_FLIGHT == STAGES - 2, "IN_FLIGHT");'
    text = "\n".join([*lines[: whole.last], f"        {test}", *lines[whole.last or 0 :]]) + "\n"
    whole = Source(text.replace("STAGES = 2;", "STAGES = 3;"), whole.name, whole.first, whole.last)
    try:
        verdict = examine(whole)
    except CheckFailed as failed:
        if failed.diagnosis == "does-not-compile" and "Q_WAIT" in str(failed):
            raise CheckFailed(
                "where Q is waited for, STAGES - 1 groups should be left in flight, those of the first tiles: Q's "
                "group is older, and nobody needs a tile yet. Are that many tiles on their way before the loop?",
                diagnosis="waits-too-long",
            ) from None
        _expect_earlier_tile(in_loop)
        if failed.diagnosis == "does-not-compile" and "static assertion" in str(failed):
            raise CheckFailed(
                "IN_FLIGHT should leave the copies of all later tiles in flight, and wait for tile j's: "
                "with three stages "
                "that is one group",
                diagnosis="wrong-wait-count",
            ) from None
        if failed.diagnosis != "does-not-compile":
            _expect_order(whole, failed)
        raise
    shared = built(whole, check=True)
    report = probe(shared, whole, PROBES[1])
    bytes_ = report.launches[0].shared_bytes
    expect(
        bytes_ == (64 + 6 * 64) * 64 * 2,
        f"the kernel asks for {bytes_} bytes of shared memory; Q and three stages of K and V are {(64 + 6 * 64) * 128}",
        diagnosis="wrong-shared-size",
    )
    return f"{verdict.cases} cases, {bytes_} bytes of shared memory"


# ---- 9.7 -------------------------------------------------------------------------------------------------------------

_BUDGET = 1.25  # wavefronts per MMA: 1 for K and V with 32 rows per warp, and room for Q, the store and small things


@exercise(
    "9.7",
    title="A kernel of your own",
    minutes=120,
    difficulty="Stretch",
    hints=[
        "Make it right before you make it fast: one warp, 16 rows, no mask; then causal, lengths, four warps. Between "
        "two steps run the check: it says what is wrong first.",
        "Its parts: at(), the swizzle; a copy with cp.async that makes rows past the end zeros; in the kernel the "
        "block's rows and keys; Q's fragments; a loop of copy, wait, barrier, scores, maxima, probabilities, output; "
        "the division by the sums; the store. A barrier before the next copy, too.",
        "32 rows per warp: s[2][...][4] and acc[2][...][4], and for each ldmatrix_x4 of K or V a loop over two "
        "fragments of Q or P. Phase 9's section 16 has every line of a larger kernel.",
        "The scores: for (int k = 0; k < HEAD_DIM / 16; k++) for (int n = 0; n < S_TILES / 2; n++) { uint32_t b[4]; "
        "ldmatrix_x4(b, k_smem + at(n * 16 + lane % 8 + lane / 16 * 8, k * 16 + lane / 8 % 2 * 8)); for (int m = 0; "
        "m < 2; m++) mma_m16n8k16<T>(s[m][2 * n], q[k][m], b[0], b[1]), mma_m16n8k16<T>(s[m][2 * n + 1], q[k][m], "
        "b[2], b[3]); }. Row r of a lane is s[r / 2][n][r % 2 * 2 + e], and stands in the tile at g + r * 8.",
    ],
)
def _(my_kernel: str) -> str:
    text = text_of(my_kernel, "my_kernel")
    if not text.strip():
        raise NotImplementedError
    whole = Source(text, "my_kernel", 1, len(text.splitlines()))
    signature = 'extern "C" int forward(const Problem* p, void* stream)'
    expect("forward" in entries(text), f"the source has no `{signature}`", diagnosis="wrong-entry")
    verdict = examine(whole)
    report = probe(built(whole, check=True), whole, (1, 1, 1, 256, 256, False), sms=1)
    c, case = report.counters, "seq_q=256, seq_k=256, head_dim=64, float16"
    expect(
        c["mma"] > 0,
        "the result is right, but no MMA was issued: use the tensor cores",
        diagnosis="no-tensor-cores",
        case=case,
    )
    spent, conflicts = wavefronts(report) / c["mma"], c.bank_conflicts / c["mma"]
    right = f"the result is right, but it takes {spent:.2f} wavefronts per MMA, where {_BUDGET} are the budget"
    if spent > _BUDGET >= spent - conflicts:
        raise CheckFailed(f"{right}: {conflicts:.2f} of them are bank conflicts", diagnosis="bank-conflicts", case=case)
    expect(
        spent <= _BUDGET,
        f"{right}: with 16 rows per warp a fragment of K or V feeds two MMAs, with 32 rows four",
        diagnosis="too-few-rows-per-warp",
        case=case,
    )
    expect_wide(whole)
    return f"{verdict.cases} cases right, {spent:.2f} wavefronts per MMA"
