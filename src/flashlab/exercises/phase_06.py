"""The checks of phase 6: CUDA sources as text, built and run by the emulator.

Each source is built twice. The check build comes first: what it finds (a race, a bad address) is told in the finding's
own words, with the lines quoted. Then the results are compared, of the fast build too.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect
from flashlab.check.changes import edited
from flashlab.check.cuda_answer import (
    VAGUE,
    Answer,
    Source,
    Verdict,
    built,
    expect_set,
    expect_wide,
    lines_of,
    normal,
    probe,
    ran,
    replaced,
    whole_kernel,
)
from flashlab.check.cuda_index import Trials, calls, examined, explained, forwards
from flashlab.check.lookup import Row
from flashlab.check.stored import expect_results, expect_stored
from flashlab.cuda import CudaModule
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels import steps
from flashlab.kernels.series import Step
from flashlab.simt import Counters

_watched = partial(built, check=True)
_WRITTEN = "either no thread has them, or what their threads store lands elsewhere"


# ---- 6.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.1",
    title="Which element is mine?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Blocks lie side by side: how many threads in x-direction come before this block's first one?",
        "col = blockIdx.x * blockDim.x + threadIdx.x, and the same in y for the row. Element (row, col) is number row "
        "* cols + col.",
        "Before anything is read: if (row >= rows || col >= cols) return; both can happen, at the right edge and at "
        "the bottom.",
    ],
)
def sum_with_bias(add_bias: str) -> str:
    answer = Answer(add_bias, "add_bias")
    with explained(lambda: answer.module(check=True), ADD_BIAS):
        for rows, cols in _MATRICES:
            case, x, bias = f"rows={rows}, cols={cols}", normal(rows, cols), normal(cols, seed=1)
            with _whose(answer, rows, cols):
                c = expect_results(answer, [x, bias, None, rows, cols], {"y": x + bias}, case, because=_WRITTEN)
            # The stores apart: a warp of 8 x 4 elements saves as many sectors of bias as it wastes of x.
            for kind in ("load", "store"):
                most, advice = _row_sectors(rows, cols, kind == "load"), ", so that a warp has 32 neighbouring columns"
                _expect_coalesced(c, kind, most, f"threadIdx.x should run along the row{advice}", case)
    return f"{len(_MATRICES)} shapes, both builds"


_STRAYS = re.compile(r"thread (\d+|\(.*?\)) of block (\d+|\(.*?\)) (reads|writes).* past its end")


@contextlib.contextmanager
def _whose(answer: Answer, rows: int, cols: int) -> Iterator[None]:
    """Where a thread strays or an element is not written: which element is a thread's, x running along a row."""
    try:
        yield
    except CheckFailed as failed:
        report, said = answer.module(check=True).report, ""
        if report is not None and report.launches and "threadIdx.y" in answer.whole.text:
            (x_blocks, y_blocks, _), (x_threads, y_threads, _) = report.launches[0].grid, report.launches[0].block
            size = f"the matrix has {rows} rows and {cols} columns"
            if at := _STRAYS.match(failed.sentence):
                (tx, ty, *_), (bx, by, *_) = ([*map(int, re.findall(r"\d+", n)), 0] for n in at.groups()[:2])
                row, col = by * y_threads + ty, bx * x_threads + tx
                said = f"this thread's element is row {row}, column {col}"
                there = row < rows and col < cols
                said += f", number {row * cols + col}" if there else f", and {size}: it has to do nothing"
            elif failed.diagnosis == "elements-missing":
                covered = f"{y_blocks * y_threads} rows and {x_blocks * x_threads} columns"
                said = f"a grid of {x_blocks} x {y_blocks} blocks of {x_threads} x {y_threads} threads"
                enough = x_blocks * x_threads >= cols and y_blocks * y_threads >= rows
                said += " has a thread for each element: does each take its own?" if enough else (
                    f" covers {covered}, and {size}")  # fmt: skip
        if not said:
            raise
        raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis=failed.diagnosis, case=failed.case) from None


_MATRICES = ((4, 32), (8, 64), (10, 50), (7, 33), (1, 1), (3, 100), (50, 10))


def _expect_coalesced(c: Counters, kind: str, most: int, advice: str, case: str) -> None:
    sectors, moved = c[f"global_{kind}_sectors"], c[f"global_{kind}_bytes"]
    if moved >= 24 * sectors:  # whole sectors, again and again
        advice = f"they move {moved} bytes, so elements are {'loaded' if kind == 'load' else 'stored'} more than once"
    said = f"right, but the {kind}s touch {sectors} sectors where {most} suffice: {advice}"
    expect(sectors <= most, said, diagnosis="not-coalesced", case=case)


_COL, _ROW = "blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.y * blockDim.y + threadIdx.y"
_BY_COLUMNS = "number row * cols + col of {} is element (row, col), and you take col * rows + row: it is stored by rows"
ADD_BIAS = Trials(
    "6.1", _watched,
    [calls("run", normal(r, c), normal(c, seed=1), None, r, c, out=(r, c)) for r, c in ((10, 50), (70, 90), (9, 20))],
    notes={"col": "bias has an element per column"},
    rows=[
        Row("another-element", f"row and column are exchanged: x runs along a row, so the column is {_COL}",
            [(f"col = {_COL}, row = {_ROW}", f"row = {_COL}, col = {_ROW}")]),
        Row("by-columns", _BY_COLUMNS.format("x and y"),
            [("y[row * cols + col] = x[row * cols + col]", "y[col * rows + row] = x[col * rows + row]")]),
        Row("by-columns", _BY_COLUMNS.format("x"), [("x[row * cols + col]", "x[col * rows + row]")]),
        Row("by-columns", _BY_COLUMNS.format("y"), [("y[row * cols + col]", "y[col * rows + row]")]),
    ],
)  # fmt: skip


def _row_sectors(rows: int, cols: int, bias: bool = True) -> int:
    """Sectors that loads of x and of bias touch where each warp has 32 neighbouring columns of a row."""
    return sum(
        (4 * (first + min(32, cols - start)) - 1) // 32 - 4 * first // 32 + 1
        for row in range(rows)
        for start in range(0, cols, 32)
        for first in (row * cols + start, start)[: 2 if bias else 1]  # of x or y, and of bias
    )


# ---- 6.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.2",
    title="The sum that was right",
    minutes=15,
    difficulty="Bug hunt",
    bug=[
        ("            const float other = part_smem[threadIdx.x + half];\n            __syncwarp();\n", ""),
        ("+= other;\n            __syncwarp();\n", "+= part_smem[threadIdx.x + half];\n"),
    ],
    untouched="3990f2a4f798",
    history="the last rounds of NVIDIA's Optimizing Parallel Reduction in CUDA (Mark Harris, 2007); since Volta (2017) "
    "the lanes of a warp need not go in step",
    hints=[
        "Nothing makes lane 16 wait for lane 0, also not in one warp. In the first round lane 0 reads part_smem[16], "
        "and lane 16 writes it. Which of the two values does lane 0 get?",
        "Every round has two dangers: a lane may read what is written in this round, and what has not been written in "
        "the round before. What is to a warp what __syncthreads() is to a block?",
        "Read into a register; __syncwarp(); add and write; __syncwarp(). (Or let only the lanes below half write: "
        "then one __syncwarp() per round will do, behind the if, where all 32 lanes pass.)",
    ],
)
def fractions(block_sum: str) -> str:
    answer = Answer(block_sum, "block_sum")
    with explained(lambda: answer.module(check=True), BLOCK_SUM):
        for blocks in (1, 3):
            x, case = 1 + normal(blocks, 128, seed=blocks).abs(), f"blocks={blocks}"
            c = expect_results(answer, [x, None, blocks], {"y = x / sum": x / x.sum(1, keepdim=True)}, case, tol=1e-5)
            tree = not c["shared_atomics"] + c["global_atomics"] and c["shared_loads"] < 40 * blocks
            said = "right, but the tree is gone: half of the threads that are left should add, in each round, with a "
            said += "barrier after it, and nothing is added by atomics"
            expect(tree, said, diagnosis="no-tree", case=case)
    return "no race, right fractions"


BLOCK_SUM = Trials(
    "6.2", _watched, [calls("run", 1 + normal(3, 128).abs(), None, 3, out=(3, 128))],
    equal={"in `half > 16`": "half is a power of two"},
    rows=[
        Row("race", "the next round may read before this one's sums are written: a __syncwarp() belongs behind them",
            [("__syncwarp();                        // all have", "// all have")]),
        Row("first-numbers-alone", "the sum is that of the first 32 numbers: what the block's rounds added is lost",
            [("half > 16", "half > 64")]),
    ],
)  # fmt: skip


# ---- 6.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.3",
    title="A transpose that wastes nothing",
    minutes=25,
    hints=[
        "threadIdx.x must run along a row of x when you load, and along a row of y when you store. So a thread stores "
        "another number than the one it loaded: that is what the tile is for.",
        "for (int i = threadIdx.y; i < 32; i += 8): load tile_smem[i][threadIdx.x]; barrier; in a second loop of the "
        "same kind store tile_smem[threadIdx.x][i] to row 32 * blockIdx.x + i of y. Each loop has its own guard.",
        "tile_smem[threadIdx.x][i] is a column of the tile: 32 words of one bank, if rows are 32 words long. Make them "
        "33.",
        "Do not `return` early at the edges: all threads have to reach the barrier. Put guards around the accesses.",
    ],
)
def transposed(transpose: str) -> str:
    answer = Answer(transpose, "transpose")
    with explained(lambda: answer.module(check=True), TRANSPOSE):
        for rows, cols in _TRANSPOSED:
            case, x = f"rows={rows}, cols={cols}", normal(rows, cols)
            c = expect_results(answer, [x, None, rows, cols], {"y": x.T}, case, because=_WRITTEN)
            whole = not (rows % 32 or cols % 32)
            for kind, matrix, size in (("load", "x", (rows, cols)), ("store", "y", (cols, rows))):
                most = rows * cols // 8 if whole else _row_sectors(*size, bias=False)
                advice = "is anything loaded or stored that is behind the row's end?"
                advice = f"let threadIdx.x run along a row of {matrix}" if whole else advice
                _expect_coalesced(c, kind, most, advice, case)
            said = f"right, and coalesced, but shared memory takes {c.bank_conflicts} wavefronts more than needed: "
            said += "number i of a column of the tile is in bank i * pitch % 32, where pitch is the words of a row"
            expect(not whole or c.bank_conflicts == 0, said, diagnosis="bank-conflicts", case=case)
    return f"{len(_TRANSPOSED)} shapes, no sector and no wavefront too many"


_TRANSPOSED = ((64, 96), (32, 32), (50, 70), (70, 5), (1, 40))


_TO_Y = "if (col + i < cols && row + lane < rows) y[(col + i) * rows + row + lane] = tile_smem[lane][i]"
_TO_X = "if (row + i < rows && col + lane < cols) y[(row + i) * cols + col + lane] = tile_smem[i][lane]"
_IN_PLACE = "if (row + i < cols && col + lane < rows) y[(row + i) * rows + col + lane] = tile_smem[lane][i]"
TRANSPOSE = Trials(
    "6.3", _watched,
    [calls("run", normal(r, c), None, r, c, out=(c, r)) for r, c in ((64, 96), (50, 70), (33, 5))],
    then=lambda module: expect(not (module.report and module.report.counters.bank_conflicts), "", diagnosis=""),
    rows=[
        Row("tiles-in-place", "each tile is transposed, and stored where it came from: in y the tile of block (bx, by) "
            "begins at row 32 bx, column 32 by", [(_TO_Y, _IN_PLACE)]),
        Row("not-transposed", "y is x itself: nothing was transposed", [(_TO_Y, _TO_X)]),
        Row("tiles-only", "the tiles went to their places, but inside a tile nothing moved",
            [("tile_smem[lane][i];", "tile_smem[i][lane];")]),
    ],
)  # fmt: skip


# ---- 6.4 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.4",
    title="Online softmax of a row, in one warp",
    minutes=30,
    hints=[
        "The loop is for (int i = threadIdx.x; i < n; i += 32). With a new value: m_new = max(m, value), and what "
        "happens to l when the maximum moves?",
        "l = l * expf(m - m_new) + expf(value - m_new); m = m_new. The first time m is -INFINITY and expf gives 0.",
        "Merging two states is the same with two sums: fetch m and l of lane ^ step, then l * expf(m - m_new) + "
        "l_other * expf(m_other - m_new). Fetch both before you change either.",
        "If both lanes are empty, m_new is -INFINITY and m - m_new is NaN. Subtract base = m_new == -INFINITY ? 0 : "
        "m_new instead.",
    ],
)
def log_sum_exp(row_lse: str) -> str:
    answer = Answer(row_lse, "row_lse")
    with explained(lambda: answer.module(check=True), ROW_LSE):
        cases = _expect_lse(answer, _in_the_last_lane(answer))
    return f"{cases // 2} cases in both builds, each row read once"


_STORED = re.compile(r"\bif\s*\(\s*threadIdx\.x\s*==\s*0\s*\)(?=\s*lse\[blockIdx\.x\]\s*=)")


def _in_the_last_lane(answer: Answer) -> Answer:
    """The answer with its last line, if it is as it was given, stored by lane 31: every lane has the row's state."""
    text, times = _STORED.subn("if (threadIdx.x == 31)", answer.whole.text)
    return Answer(text, "row_lse") if times == 1 else answer


_KINDS = ("random", "rising", "near -200", "near 300", "all 2", "a peak", "near -100000")


def _scores(n: int, kind: str) -> torch.Tensor:
    x = 3 * normal(4, n, seed=n) + {"near -200": -200, "near 300": 300, "near -100000": -1e5}.get(kind, 0)
    if kind == "a peak":
        x[:, n // 2] += 200
    return x.sort(1).values if kind == "rising" else torch.full_like(x, 2.0) if kind == "all 2" else x


_ADDED = "expf(m - m_new) + expf(value - m_new)"
_MERGED = "expf(m - base) + l_other * expf(m_other - base)"
_EXPF = [(_ADDED, _ADDED.replace("expf", "exp2f")), (_MERGED, _MERGED.replace("expf", "exp2f"))]
_MERGES = "in the merge, both sums are brought under the common maximum before they are added"
ROW_LSE = Trials(
    "6.4", _watched,
    [calls("run", _scores(n, kind), None, 4, n, out=(4,)) for n, kind in (
        (100, "random"), (257, "rising"), (5, "random"), (64, "near -200"), (64, "near 300"), (64, "all 2"),
        (33, "a peak"), (5, "near -200"))],
    words={x: x for x in ("m_new", "base", "value", "m_other", "l_other")}, most=400,
    equal={
        **dict.fromkeys(("`threadIdx.x ==", "`threadIdx.x !=", "`threadIdx.x <=", "`threadIdx.x >="),
                        "every lane has the row's state"),
        "__expf": "it differs by a rounding", "in `step < 32`": "the steps are powers of two",
        "__shfl_down_sync": "the check has lane 31 store too", "arguments of `fmaxf`": "a maximum has no order",
        "where `m_new` is made": "both sums are brought under one number", "1e+30": "no score is below -1e30",
        "where `l` is made": "it is multiplied by exp(-infinity)",
    },
    notes={
        "expf(m - m_new)": "l is rescaled whenever the maximum moves", "step < 32": "32 lanes take five rounds",
        "expf(m - base)": _MERGES, "expf(m_other - base)": _MERGES, "base": _MERGES,
        "m_other": "each sum has its own lane's maximum",
        "blockIdx.x * n": "every block has a row of its own",
    },
    rows=[
        Row("merge-not-rescaled", "the 32 sums are added as they are: each is relative to its own lane's maximum, and "
            "has to be brought under the common one, l * expf(m - m_new)", [("l * " + _MERGED, "l + l_other")]),
        Row("one-round-short", "that is the log-sum-exp of lanes 0 to 15: 32 lanes take five rounds, 1, 2, 4, 8, 16",
            [("step < 32", "step < 16")]),
        Row("steps-not-doubled", "the steps of the exchange are 1, 2, 3, 4, ...: they have to double, 1, 2, 4, 8, 16",
            [("step *= 2", "step++")]),
        Row("equal-scores-left-out", "a score that equals the maximum so far is left out: its term is exp(0) = 1",
            [(_ADDED, "expf(m - m_new) + (value == m ? 0.f : expf(value - m_new))")]),
        Row("m-starts-at-zero", "right near 300, and infinite near -200: the maximum is larger than all scores. Where "
            "does m begin?", [("float m = -INFINITY", "float m = 0.f")]),
        Row("no-max-subtraction", "near -200 and near 300 the sum of exp is 0 or infinite. Is the maximum subtracted "
            "before exp, in the loop and in the merge?",
            [("m_new = fmaxf(m, value)", "m_new = 0.f"), ("m_new = fmaxf(m, m_other)", "m_new = 0.f")]),
        Row("nan-from-empty-lanes", "the log-sum-exp is NaN: some lanes have no element, and their -INFINITY - "
            "(-INFINITY) is NaN", [("base = m_new == -INFINITY ? 0.f : m_new", "base = m_new")]),
        Row("exp2-for-exp", "2^x is summed, and the natural logarithm is taken of it: exp2f belongs with x * log2(e)",
            _EXPF),
        Row("tail-not-masked", "elements past the end of the row were counted: they belong to the next row",
            [("i < n;", "i < (n + 31) / 32 * 32;")]),
        Row("tail-dropped", "the last n % 32 elements were left out: some lanes have one more than others",
            [("i < n;", "i < n / 32 * 32;")]),
    ],
)  # fmt: skip


def _expect_lse(answer: Answer, last_lane: Answer) -> int:
    """Runs the cases; the fast build is that of `last_lane`. Returns how many."""
    cases = list(itertools.product((64, 100, 257, 32, 5, 1), _KINDS))
    for n, kind in cases:
        case, x = f"n={n}, scores {kind}", _scores(n, kind)
        given, want = [x, None, 4, n], {"the log-sum-exp": torch.logsumexp(x.double(), 1)}
        tol = max(1e-3, 2e-7 * float(x.abs().max()))
        c = expect_results(answer, given, want, case, checks=(True,), tol=tol)
        try:
            expect_results(last_lane, given, want, case, checks=(False,), tol=tol)
        except CheckFailed:
            if last_lane is answer:
                raise
            said = "lane 0 has the row's state, and lane 31 another one: stored by lane 31, lse is wrong. After five "
            said += "rounds of __shfl_xor_sync each lane has it"
            raise CheckFailed(said, diagnosis="lane-0-alone", case=case) from None
        _expect_one_pass(c, n, case)
    return 2 * len(cases)


def _expect_one_pass(c: Counters, n: int, case: str) -> None:
    loads, needed = c["global_loads"], 4 * -(-n // 32)
    said = f"right, but a warp loads {loads / 4:g} times for a row where {needed // 4} suffice: read the row once, and "
    expect(loads <= needed, said + "give lane t the elements t, t + 32, ...", diagnosis="read-twice", case=case)
    _expect_coalesced(c, "load", 4 * (n // 8 + 2 + n // 32), "neighbouring lanes should take neighbours", case)
    said = "right, but it uses shared memory: merge the states with __shfl_xor_sync"
    expect(c["shared_stores"] == 0, said, diagnosis="uses-shared-memory", case=case)


# ---- 6.5 and 6.6: parts of p6_2_loop_order.cu -----------------------------------------------------------------------

FRAME: Step = steps(6)[1]
_PROBES = ((1, 1, 1, 70, 100, False), (1, 2, 1, 130, 130, True), (1, 1, 1, 50, 20, True))


def _in_float32(text: Any) -> CudaModule:
    return built(text, check=True, head_dim=64, dtype=torch.float32)


_RUNS = [
    *(forwards((1, 1, 1, *x)) for x in ((9, 12, False), (9, 4, True), (40, 44, True))),
    forwards((1, 1, 1, 8, 80, False), fall=150.0),
]
WHICH_ROWS = Trials(
    "6.5", _in_float32, [forwards((2, 4, 2, 9, 12, False)), forwards((1, 2, 1, 130, 8, True))], region=True,
    place=lambda text: replaced(FRAME, "which rows", text).text,
    words={x: x for x in ("m_blocks", "m_start", "head_index", "kv_head", "diagonal")},
)  # fmt: skip
_TWO_LANES = [
    ("BLOCK_M = 128, BLOCK_N = 32, THREADS = BLOCK_M;",
     "BLOCK_M = 64, BLOCK_N = 32, THREADS = 2 * BLOCK_M, OWN = CHUNKS / 2;"),
    ("row = threadIdx.x;  ", "row = threadIdx.x / 2, odd = threadIdx.x % 2;  "),
    ("    // New: the row's state, in registers. Threads past the last row compute on zeros and store nothing.\n",
     "    // Two neighbouring lanes share a row. Each has every second chunk of Q and of O: 2 c + odd, c < OWN.\n"
     "    // Each has the row's m_i and l_i, the same numbers. Lanes past the last row compute on zeros.\n"),
    ("float4 q_rmem[CHUNKS], acc[CHUNKS];\n#pragma unroll\n    for (int c = 0; c < CHUNKS;",
     "float4 q_rmem[OWN], acc[OWN];\n#pragma unroll\n    for (int c = 0; c < OWN;"),
    ("? q[c] :", "? q[2 * c + odd] :"),
    ("for (int c = 0; c < CHUNKS; c++) o[c] =", "for (int c = 0; c < OWN; c++) o[2 * c + odd] ="),
    ("    lse_gmem[row] =", "    if (odd == 0) lse_gmem[row] ="),
]  # fmt: skip


def two_lanes() -> Source:
    """The frame of 6.6: step 2 with two lanes per row."""
    return Source(edited(FRAME.path.read_text(), _TWO_LANES), "two_lanes")


INNER_LOOP = Trials(
    "6.6", _in_float32, _RUNS, region=True, place=lambda text: replaced(two_lanes(), "one tile", text).text,
    words={x: x for x in ("m_new", "base", "correction", "keys")},
    equal={
        "above `p.seq_k`": "no row sees a key past the last one", "`m_start` is": "the check runs two blocks",
        "are exchanged, in `dot": "a product has no order",
        "`m_i` is one too": "P and what is summed are under one number", "1e+30": "no score is below -1e30",
        "10000 stands": "the check runs scores below it",
    },
    notes={
        "n_start": "key n of a tile is key n_start + n", "correction": "older sums are rescaled",
        "scale_log2": "2^x is taken of scores times the scale and log2(e)", "m_i": "it takes in the old maximum",
        "2 * c + odd": "a lane has every second chunk",
    },
    rows=[
        Row("half-a-product", "a score is the product over half of the chunks: the other half is the neighbour's, one "
            "__shfl_xor_sync away", [("s[n] += __shfl_xor_sync(~0u, s[n], 1);", "")]),
        Row("halves-of-a-row", "chunks are read as if a lane had one half of the row: it has every second one",
            [("k_smem[n][2 * c + odd]", "k_smem[n][odd * OWN + c]"),
             ("v_smem[n][2 * c + odd]", "v_smem[n][odd * OWN + c]")]),
        Row("chunk-of-another", "q_rmem[c] is multiplied with chunk c of the key: it is chunk 2 * c + odd of the row",
            [("k_smem[n][2 * c + odd]", "k_smem[n][c]")]),
        Row("old-maximum-lost", "the new maximum is that of this tile alone: the old one, m_i, belongs in it",
            [("float m_new = m_i,", "float m_new = -INFINITY,")]),
        Row("row-of-a-thread", "the mask is that of row threadIdx.x: two lanes share a row, which is threadIdx.x / 2",
            [("m_start + row +", "m_start + threadIdx.x +")]),
        Row("counted-twice", "l counts every key twice: both lanes of a row have all of its probabilities, so there is "
            "nothing to add up between them",
            [("+ l_tile;", "+ l_tile + __shfl_xor_sync(~0u, l_tile, 1);")]),
        Row("divided-twice", "acc is divided by the sum inside of the loop, and again after it: leave the division to "
            "the end", [("+ odd], acc[c]);", "+ odd], acc[c]); acc[c] = scaled(1 / l_i, acc[c]);")]),
        Row("exp2-without-log2e", "exp2 is used on scores that were not multiplied by log2(e)",
            [("s[n] * scale_log2", "s[n] * p.scale")]),
        Row("causal-top-left", "causal: query i sees the keys up to i, as if the mask began at the first key. The last "
            "query sees the last key, query i those up to i + seq_k - seq_q", [("row + diagonal + 1", "row + 1")]),
        Row("tail-not-masked", "the keys that do not exist count as keys of zeros, with a score of 0: it has to be "
            "-INFINITY", [("s[n] * scale_log2 : -INFINITY", "s[n] * scale_log2 : 0.f")]),
        Row("l-is-0", "o is 0 and lse -inf everywhere: l is 0 in the end. Is what is added to it lost again?",
            [("l_i = l_i * correction + l_tile", "l_i = (l_i + l_tile) * correction")]),
    ],
)  # fmt: skip


def _examined(source: Source, *trials: Trials) -> Verdict:
    """examine; trials: whose right text's changes may explain it."""
    return examined(source, *trials, dtype=torch.float32, probes=_PROBES, max_seq=200)


def _expect_heads(source: Source) -> None:
    """Several tiles of each of several heads of several sequences."""
    q, (k, v) = normal(2, 6, 130, 64, seed=1), normal(2, 2, 3, 8, 64, seed=2)
    case = "batch=2, heads=6, kv_heads=3, seq_q=130, seq_k=8"
    o, lse = ran(module := _in_float32(source), source, case, partial(module.forward, q, k, v, echo=False))
    for what, got, want in zip(("o", "lse"), (o, lse), reference.attention(q, k, v), strict=True):
        off = (got - want).abs().reshape(12, -1).amax(1) > 1e-4
        heads = [f"head {i % 6} of batch {i // 6}" for i in off.nonzero().flatten().tolist()]
        said = (
            f"{what} is wrong in {', '.join(heads[:4])}{' ...' if len(heads) > 4 else ''}, and {12 - len(heads)} of 12 "
        )
        expect(not heads, f"{said}heads are right", diagnosis="wrong-heads", case=case)


@exercise(
    "6.5",
    title="Right for two kinds of model",
    minutes=15,
    difficulty="Bug hunt",
    bug=[("head / (p.heads / p.kv_heads)", "head % p.kv_heads")],
    untouched="daa139947b0c",
    history="HazyResearch/HipKittens, pull request 22 (2025): a mapping that was right for 64 and 8 heads alone",
    hints=[
        "Only cases with 1 < kv_heads < heads are wrong. Which head of K and V does this code give to each head of Q? "
        "Compute it for heads = 4, kv_heads = 2.",
        "The code gives 0, 1, 0, 1. Grouped-query attention wants neighbours to share: 0, 0, 1, 1.",
        "A group has p.heads / p.kv_heads heads of Q: divide the head by that.",
    ],
)
def heads_of_a_block(which_rows: str) -> Verdict:
    source = replaced(FRAME, "which rows", lines_of(which_rows, "which_rows"))
    verdict = _examined(source, WHICH_ROWS)
    _expect_heads(source)
    return verdict


@exercise(
    "6.6",
    title="Two lanes per row",
    minutes=45,
    hints=[
        "Keep the simulation of phase 2 beside you. A tile of scores is float s[BLOCK_N], and both lanes of a row keep "
        "all of it. What does a lane know of S = q . k, when it has half of the chunks of q?",
        "keys = (p.causal ? min(p.seq_k, m_start + row + diagonal + 1) : p.seq_k) - n_start. It may be 0 or negative: "
        "then n < keys is never true, and all scores are -INFINITY.",
        "s[n] = dot(q_rmem[c], k_smem[n][2 * c + odd], s[n]) over c < OWN is half of a score. s[n] += "
        "__shfl_xor_sync(~0u, s[n], 1) makes it whole, in both lanes. All 32 lanes have to take part, so do it before "
        "you ask whether n < keys.",
        "m_new = fmaxf(m_i, m_tile); base = m_new == -INFINITY ? 0 : m_new; correction = exp2_approx(m_i - base); s[n] "
        "= exp2_approx(s[n] - base). With base no difference is ever -INFINITY - (-INFINITY).",
        "m_i = m_new, l_i = l_i * correction + the sum of s: both lanes have the whole row, nothing is exchanged. For "
        "each own chunk acc[c] = scaled(correction, acc[c]), then acc[c] = axpy(s[n], v_smem[n][2 * c + odd], acc[c]) "
        "for all n. Do not divide: that is done after the loop.",
    ],
)
def one_tile(inner_loop: str) -> Verdict:
    return _examined(replaced(two_lanes(), "one tile", lines_of(inner_loop, "inner_loop")), INNER_LOOP)


# ---- 6.7 ------------------------------------------------------------------------------------------------------------


def _shape(r: random.Random) -> tuple[int, int, int, int]:
    block_n = r.choice((16, 32, 64))
    return r.randint(1, 400), r.choice((16, 64, 128)), block_n * r.randint(1, 4), block_n


_VISITS = "visits * (2 * D + 2)"


def _visits(N: int, BLOCK_N: int) -> int:
    return sum(N - n_start for n_start in range(0, N, BLOCK_N))


def _keys(N: int, BLOCK_M: int) -> int:
    return sum(min(N, m_start + BLOCK_M) for m_start in range(0, N, BLOCK_M))


@rule(
    "6.7",
    title="Count the bytes of a causal mask", minutes=30, difficulty="Stretch",
    hints=[
        "FA1's order: which rows see a key of the tile that starts at n_start? Row i sees the keys 0 to i, so those "
        "with i >= n_start: N - n_start rows. Each of them reads a row of Q, a row of O, m and l.",
        "FA2's order: the block that starts at m_start has m_start + BLOCK_M - 1 as its last row. It reads the keys 0 "
        "to that one, but no more than N, of K and of V.",
        "FA1: 4 * (2ND + sum over n_start of (N - n_start) * (2D + 2) + 2N). FA2: 4 * (ND + sum over m_start of min(N, "
        "m_start + BLOCK_M) * 2D).",
    ],
    returns="FA1, FA2",
    whole=True,
    inputs=[(256, 64, 128, 32), (128, 64, 64, 64), (200, 64, 128, 32), (300, 128, 64, 16)],
    draw=_shape,
    words={"visits": "visits", "keys": "keys", "fa1": "FA1", "fa2": "FA2"},
    notes={
        "min(N, m_start + BLOCK_M)": "the last block ends at N",
        "m_start + BLOCK_M": "a block reads the keys up to its last row's",
        "N - n_start": "the rows from n_start on see the tile", "4": "a float32 has 4 bytes",
        "2 * N": "m and l of each row are read once more, for lse", "2 * N * D": "K and V are read once each",
        "N * D": "Q is read once", "2 * D + 2": "a visited row reads its rows of Q and O, and m and l",
        "2 * D": "a visited row reads its rows of Q and of O", "BLOCK_M": "a block reads the keys up to its last row's",
        "FA2: 2": "of K and of V",
    },
    units={
        "FA1": {
            "times K or V": "4 * N * D", "numbers for each row": "4 * N",
            "rows of D numbers at each visit of a row": "4 * D * _visits(N, BLOCK_N)",
            "further numbers at each visit of a row": "4 * _visits(N, BLOCK_N)",
        },
        "FA2": {
            "times Q": "4 * N * D", "numbers for each row": "4 * N",
            "times the keys that a block reads": "4 * D * _keys(N, BLOCK_M)",
        },
    },
    rows=[
        Row("block-skipped", "FA2: the first block reads keys too: those of its own rows",
            [("for m_start in range(0, N", "for m_start in range(BLOCK_M, N")]),
        Row("keys-halved", "FA2: half of the keys is only nearly right: a block reads up to the last key of its last "
            "row", [("2 * D * keys", "2 * D * N * -(-N // BLOCK_M) / 2")]),
        Row("own-rows-skipped", "FA1: a tile is seen by its own rows too: by those from n_start on",
            [("sum(N - n_start for", "sum(max(0, N - n_start - BLOCK_N) for")]),
        Row("halved", "FA1: half of the rows is only nearly right: those from n_start on see the tile",
            [("sum(N - n_start for", "sum(N // 2 for")]),
        Row("halved", "FA1: half of the visits is only nearly right: the rows from n_start on see the tile",
            [(_VISITS, "N * -(-N // BLOCK_N) * (2 * D + 2) / 2")]),
        Row("whole-tiles", "FA2: keys are counted in whole tiles: the last one has only the keys that are left",
            [("sum(min(N, m_start + BLOCK_M)", "sum(-(-min(N, m_start + BLOCK_M) // BLOCK_N) * BLOCK_N")]),
        Row("whole-tiles-alone", "FA1: the last tile is left out where N is no multiple of BLOCK_N",
            [("range(0, N, BLOCK_N)", "range(0, N // BLOCK_N * BLOCK_N, BLOCK_N)")]),
    ],
)  # fmt: skip
def causal_bytes_read(N, D, BLOCK_M, BLOCK_N):
    """Return (bytes read in FlashAttention-1's order, bytes read in FlashAttention-2's order)."""
    # BEGIN SOLUTION
    visits = sum(N - n_start for n_start in range(0, N, BLOCK_N))  # rows that see the tile, over all tiles
    fa1 = 2 * N * D + visits * (2 * D + 2) + 2 * N
    keys = sum(min(N, m_start + BLOCK_M) for m_start in range(0, N, BLOCK_M))
    fa2 = N * D + 2 * D * keys
    return 4 * fa1, 4 * fa2
    # END SOLUTION


# ---- 6.8: a whole kernel --------------------------------------------------------------------------------------------

SERVED = 8  # query rows that each number of K and V has to serve, at least
_SHARED_PROBE = (1, 1, 1, 256, 256, False)


KERNEL = Trials(
    "6.8", _in_float32,
    [*(forwards(x) for x in ((2, 4, 2, 9, 40, False), (1, 2, 1, 160, 172, True), (1, 1, 1, 140, 44, True))), _RUNS[3]],
    most=400,
    words={x: x for x in ("m_blocks", "m_start", "head_index", "m_new", "base", "correction", "keys", "row", "n_end")},
    equal={
        "above `p.seq_k`": "keys past the last one are zeros, and no row of the last block sees them",
        "are exchanged, in `": "a product has no order",
        **dict.fromkeys(("`m_blocks - 1 - m_block`", "`m_block` is taken"), "the blocks may begin in any order"),
        **dict.fromkeys(("`p.seq_k` is taken", "BLOCK_M + diagonal` is one", "`n_start < n_end`", "`max` stands"),
                        "what no row sees is hidden; the page does not ask to leave it out"),
        **dict.fromkeys(("`(m_i + log2f(l_i)) * LN2` is taken", "l_i <= 0"), "log2(0) is -inf, and no sum is below 0"),
    },
)  # fmt: skip


@exercise(
    "6.8",
    title="FlashAttention on an empty page",
    minutes=90,
    difficulty="Stretch",
    hints=[
        "Take step 2's plan: a block is 128 threads and a tile of 128 query rows of one head. A thread has one row; "
        "its q, acc, m_i and l_i are registers. K and V come through shared memory in tiles of 32 keys. The page has "
        "five parts: constants, where am I, state, loop over tiles, store; then forward.",
        "Begin with what launches and stores: grid = p->batch * p->heads * ceil_div(p->seq_q, 128), 128 threads, 0 "
        "bytes, (cudaStream_t)stream; pass *p by value. Store zeros to o and lse with the guard row < p.seq_q, and run "
        "the check: from then on it tells you what is missing.",
        "Where am I: blocks per head m_blocks = ceil_div(p.seq_q, 128); head_index = blockIdx.x / m_blocks; batch = "
        "head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads). Pointers by "
        "rows_of(p.k, p.k_stride, batch, kv_head, 0), and so on.",
        "The loop over tiles: __syncthreads(); all threads copy K and V, for (int i = threadIdx.x; i < 32 * 16; i += "
        "128), row i / 16, chunk i % 16, zeros where n_start + row >= p.seq_k; __syncthreads(). No thread may leave "
        "before its block's last barrier: threads without a row compute on zeros.",
        "Row i sees the keys up to i + p.seq_k - p.seq_q if p.causal, and none past p.seq_k; other scores are "
        "-INFINITY. m_new = fmaxf(m_i, scores); base = m_new == -INFINITY ? 0 : m_new; correction = exp(m_i - base); "
        "l_i = l_i * correction + the sum of p; acc = acc * correction + p V.",
        "The store: if the row exists, o = acc / l_i, and 0 where l_i is 0; lse = m_i + log(l_i) in natural logarithms "
        "((m_i + log2f(l_i)) * LN2 if you used powers of two), and -INFINITY where l_i is 0.",
    ],
)
def float32_kernel(flash_attention: str) -> str:
    whole = whole_kernel(flash_attention, "flash_attention")
    with explained(lambda: _in_float32(whole), KERNEL, vague=VAGUE):
        expect_stored(whole, dtype=torch.float32)
    verdict = _examined(whole, KERNEL)
    expect_set(whole, dtype=torch.float32)
    module = built(whole, check=True, head_dim=64, dtype=torch.float32)
    served = _expect_shared(probe(module, whole, _SHARED_PROBE, dtype=torch.float32).counters)
    expect_wide(whole, dtype=torch.float32)
    return f"{verdict.verdict}; each number of K and V serves {served:.0f} rows"


def _expect_shared(c: Counters) -> float:
    """That rows share what is loaded, and loads their sectors. Returns the rows that a number of K and V serves."""
    _, _, _, rows, keys, _ = _SHARED_PROBE
    case = f"seq_q={rows}, seq_k={keys}, head_dim=64, float32"
    asked, sectors = c["global_load_bytes"] + c["cp_async_bytes"], c["global_load_sectors"] + c["cp_async_sectors"]
    alone, q = rows * keys * 2 * 64 * 4, rows * 64 * 4  # each row reads all of K and V by itself; Q once
    served = alone / max(1, asked - q)
    if served < 2:
        slug, said = "tiles-not-shared", f"right, but the threads ask for {asked} bytes of global memory, where "
        said += f"{alone + q} are those of rows that each read all of K and V by themselves: bring a tile to shared "
        said += "memory once, and let all rows of the block use it"
    else:
        slug, said = (
            "tiles-too-small",
            f"right, and tiles are shared, but a number of K and V serves {served:.3g} rows ",
        )
        said += f"where at least {SERVED} are wanted: give each block more rows"
    expect(served >= SERVED, said, diagnosis=slug, case=case)
    said = f"right, and tiles are shared, but the loads touch {sectors} sectors where {asked // 32} hold what is asked "
    said += "for: let neighbouring threads load neighbouring numbers of a row, of Q too"
    expect(2 * 32 * sectors <= 3 * asked, said, diagnosis="not-coalesced", case=case)
    return served
