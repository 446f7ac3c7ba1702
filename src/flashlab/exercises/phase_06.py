"""The checks of phase 6: CUDA sources as text, built and run by the emulator.

Each source is built twice. The check build comes first: what it finds (a race, a bad address) is told in the finding's
own words, with the lines quoted. Then the results are compared, of the fast build too.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlab.check import CheckFailed, expect, expect_close, pattern
from flashlab.check.cuda_answer import (
    Answer,
    Source,
    Verdict,
    built,
    examine,
    expect_set,
    expect_wide,
    probe,
    ran,
    replaced,
    text_of,
    whole_kernel,
)
from flashlab.check.lookup import Row
from flashlab.check.mistakes import tiles, weights
from flashlab.check.slips import explained
from flashlab.check.stored import expect_stored, expect_written, marked
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels import steps
from flashlab.kernels.series import Step
from flashlab.simt import Counters
from flashlab.simt.sentences import KINDS


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


_WRITTEN = "either no thread has them, or what their threads store lands elsewhere"


# ---- 6.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.1",
    title="Which element is mine?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Blocks lie side by side: how many threads in x-direction come before this block's first one?",
        "col = blockIdx.x * blockDim.x + threadIdx.x, and the same in y for the row. Element (row, col) is number "
        "row * cols + col.",
        "Before anything is read: if (row >= rows || col >= cols) return; both can happen, at the right edge and at "
        "the bottom.",
    ],
)
def _(add_bias: str) -> str:
    answer = Answer(add_bias, "add_bias")
    try:
        _expect_sums(answer)
    except CheckFailed as failed:
        if failed.diagnosis not in ("elements-missing", "global-race"):
            raise
        if (known := _other_place(answer)) is not None:
            raise CheckFailed(known, diagnosis="another-element", case=failed.case) from None
        if (known := _other_limits(answer)) is not None:
            raise CheckFailed(known, diagnosis="wrong-guard", case=failed.case) from None
        raise
    return f"{len(_MATRICES)} shapes, both builds"


_MATRICES = ((4, 32), (8, 64), (10, 50), (7, 33), (1, 1), (3, 100), (50, 10))


def _expect_sums(answer: Answer) -> None:
    __tracebackhide__ = True
    for rows, cols in _MATRICES:
        case = f"rows={rows}, cols={cols}"
        x, bias = _random(rows, cols), _random(cols, seed=1)
        for check in (True, False):
            y = marked(rows, cols)
            counters = answer.run(x, bias, y, rows, cols, case=case, check=check)
            expect_written(y, "y", case=case, because=_WRITTEN)
            wrong = x + bias[:1]
            expect_close(
                y,
                x + bias,
                what="y",
                case=case,
                mistakes={
                    "no-bias": (x, "y is x: the bias is missing"),
                    "bias-subtracted": (x - bias, "the bias is subtracted"),
                    "one-bias": (wrong, "every column got bias[0]"),
                    "bias-of-the-row": (
                        x + bias[torch.arange(rows) % cols, None],
                        "bias has an element per column, and you take that of the row",
                    ),
                    **_by_columns(x, bias),
                },
            )
            if check:
                sectors, ideal = counters["global_load_sectors"], _row_sectors(rows, cols)
                expect(
                    sectors <= ideal,
                    f"right, but the loads touch {sectors} sectors where {ideal} suffice: "
                    "threadIdx.x should run along the row",
                    diagnosis="not-coalesced",
                    case=case,
                )
                # Of y alone: a warp of 8 x 4 elements saves as many sectors of bias as it wastes of x.
                stored, ideal = counters["global_store_sectors"], _row_sectors(rows, cols, bias=False)
                expect(
                    stored <= ideal,
                    f"right, but the stores touch {stored} sectors where {ideal} suffice: the 32 threads of a warp "
                    "should have 32 neighbouring columns of one row",
                    diagnosis="not-coalesced",
                    case=case,
                )


def _by_columns(x: torch.Tensor, bias: torch.Tensor) -> dict[str, tuple[torch.Tensor, str]]:
    """The sums where x, y or both are taken as if they were stored column by column."""
    rows, cols = x.shape
    place = "element (row, col) is number row * cols + col, and {} number col * rows + row: that is a matrix stored "
    place += "column by column"
    return {
        "by-columns": ((x.reshape(cols, rows) + bias[:, None]).reshape(rows, cols), place.format("you take")),
        "by-columns x": (x.reshape(cols, rows).T + bias, place.format("of x you take")),
        "by-columns y": ((x + bias).T.reshape(rows, cols), place.format("of y you take")),
    }


# What a thread may take for its row and for its column, of block (bx, by) and thread (tx, ty).
_TAKEN: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "blockIdx.y * blockDim.y + threadIdx.y": lambda bx, by, tx, ty: 4 * by + ty,
    "blockIdx.x * blockDim.x + threadIdx.x": lambda bx, by, tx, ty: 32 * bx + tx,
    "blockIdx.y * blockDim.x + threadIdx.y": lambda bx, by, tx, ty: 32 * by + ty,
    "blockIdx.x * blockDim.y + threadIdx.x": lambda bx, by, tx, ty: 4 * bx + tx,
    "blockIdx.y * blockDim.x + threadIdx.x": lambda bx, by, tx, ty: 32 * by + tx,
    "blockIdx.x * blockDim.y + threadIdx.y": lambda bx, by, tx, ty: 4 * bx + ty,
    "blockIdx.x * blockDim.x + threadIdx.y": lambda bx, by, tx, ty: 32 * bx + ty,
    "blockIdx.y * blockDim.y + threadIdx.x": lambda bx, by, tx, ty: 4 * by + tx,
    "blockIdx.y + threadIdx.y": lambda bx, by, tx, ty: by + ty,
    "blockIdx.x + threadIdx.x": lambda bx, by, tx, ty: bx + tx,
    "threadIdx.y": lambda bx, by, tx, ty: ty,
    "threadIdx.x": lambda bx, by, tx, ty: tx,
    "threadIdx.y * blockDim.y + blockIdx.y": lambda bx, by, tx, ty: 4 * ty + by,
    "threadIdx.x * blockDim.x + blockIdx.x": lambda bx, by, tx, ty: 32 * tx + bx,
}
_ROW, _COL = list(_TAKEN)[:2]

# What the guard may let through, of row, col, rows and cols, where row and col are right.
_LIMITS: dict[str, tuple[Callable[[Any, Any, int, int], Any], str]] = {
    "row < cols and col < rows": (
        lambda r, c, rows, cols: (r < cols) & (c < rows), "the two limits are exchanged",
    ),
    "row < rows and col < rows": (lambda r, c, rows, cols: (r < rows) & (c < rows), "col has the other's limit"),
    "row < cols and col < cols": (lambda r, c, rows, cols: (r < cols) & (c < cols), "row has the other's limit"),
    "row < rows - 1": (lambda r, c, rows, cols: (r < rows - 1) & (c < cols), "the last row is left out"),
    "col < cols - 1": (lambda r, c, rows, cols: (r < rows) & (c < cols - 1), "the last column is left out"),
    "row < rows - 1 and col < cols - 1": (
        lambda r, c, rows, cols: (r < rows - 1) & (c < cols - 1), "the last row and the last column are left out",
    ),
    "row > 0": (lambda r, c, rows, cols: (r > 0) & (r < rows) & (c < cols), "row 0 is left out"),
    "col > 0": (lambda r, c, rows, cols: (c > 0) & (r < rows) & (c < cols), "column 0 is left out"),
}  # fmt: skip


def _other_limits(answer: Answer) -> str | None:
    """Which elements the guard lets through, if just one formula gives those that are written, in all shapes."""
    left, told = dict(_LIMITS), 0
    for rows, cols in (*_MATRICES, (8, 96), (12, 20), (96, 64)):
        x, bias, y = _random(rows, cols), _random(cols, seed=1), marked(rows, cols)
        try:
            answer.run(x, bias, y, rows, cols, case="", check=True)
        except CheckFailed:  # out of bounds: no element to compare
            continue
        written = ~y.isnan()
        if not torch.allclose(y[written], (x + bias)[written], rtol=0, atol=1e-4):
            return None  # more is wrong than which are written
        told += not bool(written.all())
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        left = {name: x for name, x in left.items() if torch.equal(written, x[0](r, c, rows, cols))}
    if told < 2 or len(left) != 1:
        return None
    (name, (_, said)), *_ = left.items()
    return f"the elements that are written are those with {name}: {said}; a row is below rows, a column below cols"


def _other_place(answer: Answer) -> str | None:
    """Which row and column the threads take, if just one pair of formulas has written what is written in all shapes."""
    left = set(itertools.product(_TAKEN, _TAKEN)) - {(_ROW, _COL)}
    tried = 0
    for rows, cols in (*_MATRICES, (70, 90)):  # the last has several blocks either way, of rows and of columns
        x, bias, y = _random(rows, cols), _random(cols, seed=1), marked(rows, cols)
        try:
            answer.run(x, bias, y, rows, cols, case="", check=False)
        except CheckFailed:  # out of bounds: no element to compare
            continue
        tried += 1
        at = torch.meshgrid(
            *(torch.arange(n) for n in (-(-cols // 32), -(-rows // 4), 32, 4)), indexing="ij"
        )  # bx, by, tx, ty
        for pair in list(left):
            row, col = (_TAKEN[name](*at).flatten() for name in pair)
            there = (row < rows) & (col < cols)
            want = torch.full((rows, cols), math.nan)
            want[row[there], col[there]] = (x + bias)[row[there], col[there]]
            if not torch.allclose(y, want, rtol=0, atol=1e-4, equal_nan=True):
                left.discard(pair)
    if len(left) != 1 or tried < 3:
        return None
    row_taken, col_taken = left.pop()
    if (row_taken, col_taken) == (_COL, _ROW):
        return (
            f"row and column are exchanged: your row is {_COL}, and x runs along a row, so that is the column; the row "
            f"is {_ROW}"
        )
    wrong = [
        f"{taken} for the {name}, which is {right}"
        for name, taken, right in (("row", row_taken, _ROW), ("column", col_taken, _COL))
        if taken != right
    ]
    return f"the elements that are written are those of threads that take {' and '.join(wrong)}"


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
    title="The sum that is sometimes right",
    minutes=10,
    difficulty="Bug hunt",
    untouched="a802e116fc57",
    history="a common mistake, in reductions of every library; for one, ORNL/HeCBench, issue 253 (2026)",
    hints=[
        "The check names one pair of lines that race; there is another. Who writes part_smem[40] in the first round of "
        "the loop, and who reads it in the second? A barrier before the division alone would mend the first pair only.",
        "Every round reads what other threads wrote in the round before. What has to come between two rounds?",
        "One __syncthreads() in the loop. Careful where: inside the `if`, not every thread would reach it.",
    ],
)
def _(block_sum: str) -> str:
    answer = Answer(block_sum, "block_sum")
    with explained(lambda: _divisors(answer)):
        _expect_fractions(answer)
    return "no race, right fractions"


def _divisors(answer: Answer) -> tuple[str, str] | None:
    """Of which numbers of x the sums are made that threads divide by: block j has a 2 at j, and the last one has none.

    Only where each sum is so many times each number.
    """
    x = torch.ones(129, 128) + torch.eye(129, 128)
    y = marked(129, 128)
    answer.run(x, y, 129, case="", check=False)
    divisor = (x / y).double()  # [blocks, threads]
    times = (divisor[:128] - divisor[128]).T  # [threads, numbers of x]
    whole = times.round()
    if not times.isfinite().all() or (times - whole).abs().max() > 0.01:
        return None
    if (whole.sum(1) - divisor[128]).abs().max() > 0.01:
        return None
    wrong = (whole != 1).any(1)
    if not wrong.any():
        return None
    thread = int(wrong.nonzero()[0])
    which = whole[thread]
    has = f"has {pattern.runs(which != 0, 'element')} in it" if which.any() else "is 0"
    has += f", {int((which == 0).sum())} of the 128 numbers are missing" if (which == 0).any() else ""
    has += f", and {pattern.runs(which > 1, 'element')} more than once" if (which > 1).any() else ""
    if bool((whole == which).all()):
        return "partial-sum", f"the sum that all threads divide by {has}; it is that of all 128"
    right = f", that of thread {int((~wrong).nonzero()[0])} is right" if not wrong.all() else ""
    return "partial-sum", (
        f"the threads divide by different sums: that of thread {thread} {has}{right}; all 128 numbers are in "
        "part_smem[0] at the end"
    )


def _expect_fractions(answer: Answer) -> None:
    __tracebackhide__ = True
    for blocks in (1, 3):
        x = 1 + _random(blocks, 128, seed=blocks).abs()
        for check in (True, False):
            y = marked(blocks, 128)
            counters = answer.run(x, y, blocks, case=f"blocks={blocks}", check=check)
            expect_written(y, "y", case=f"blocks={blocks}")
            expect_close(
                y,
                x / x.sum(1, keepdim=True),
                what="y = x / sum",
                case=f"blocks={blocks}",
                tol=1e-5,
                mistakes={
                    "upper-half-left-out": (
                        x / x[:, :64].sum(1, keepdim=True),
                        "the sum is that of the first 64 numbers: in the first round, 64 threads add the upper half",
                    ),
                    "odd-left-out": (
                        x / x[:, ::2].sum(1, keepdim=True),
                        "the sum is that of elements 0, 2, 4, ...: the last round, in which thread 0 adds "
                        "part_smem[1], is missing",
                    ),
                    "part-for-value": (
                        _tree(x) / x.sum(1, keepdim=True),
                        "part_smem[threadIdx.x] is divided, a partial sum by now: divide the thread's own value",
                    ),
                },
            )
            expect(
                not check or not (counters["shared_atomics"] or counters["global_atomics"]),
                "right, but the tree is gone: half of the threads that are left should add, in each round, with a "
                "barrier after it, and nothing is added by atomics",
                diagnosis="no-tree",
                case=f"blocks={blocks}",
            )
            expect(
                not check or counters["shared_loads"] < 60 * blocks,
                "right, but the tree is gone: half of the threads that are left should add, in each round",
                diagnosis="no-tree",
                case=f"blocks={blocks}",
            )


def _tree(x: torch.Tensor) -> torch.Tensor:
    """What the tree leaves in part_smem, for x [blocks, 128]."""
    parts = x.clone()
    for half in (64, 32, 16, 8, 4, 2, 1):
        parts[:, :half] += parts[:, half : 2 * half]
    return parts


# ---- 6.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.3",
    title="A transpose that wastes nothing",
    minutes=25,
    difficulty="Core",
    hints=[
        "threadIdx.x must run along a row of x when you load, and along a row of y when you store. So a thread stores "
        "another number than the one it loaded: that is what the tile is for.",
        "for (int i = threadIdx.y; i < 32; i += 8): load tile_smem[i][threadIdx.x]; barrier; in a second loop of the "
        "same kind store tile_smem[threadIdx.x][i] to row 32 * blockIdx.x + i of y. Each loop has its own guard.",
        "tile_smem[threadIdx.x][i] is a column of the tile: 32 words of one bank, if rows are 32 words long. Make "
        "them 33.",
        "Do not `return` early at the edges: all threads have to reach the barrier. Put guards around the accesses.",
    ],
)
def _(transpose: str) -> str:
    answer = Answer(transpose, "transpose")
    try:
        _expect_transposed(answer)
    except CheckFailed as failed:
        if failed.diagnosis not in ("elements-missing", "wrong-value", "global-race") or not _in_place(answer):
            raise
        raise CheckFailed(
            "each tile is transposed, and stored where it came from: in y the tile of block (bx, by) begins at row "
            "32 bx, column 32 by",
            diagnosis="tiles-in-place",
            case=failed.case,
        ) from None
    return f"{len(_TRANSPOSED)} shapes, no sector and no wavefront too many"


_TRANSPOSED = ((64, 96), (32, 32), (50, 70), (33, 5), (1, 40))


def _in_place(answer: Answer) -> bool:
    """Whether the tiles are transposed one by one and stay at their places, as far as y has these."""
    for rows, cols in ((64, 96), (96, 64), (64, 64)):
        x, y = _random(rows, cols), marked(cols, rows)
        want = torch.full((cols, rows), math.nan)
        for row, col in itertools.product(range(0, min(rows, cols), 32), repeat=2):
            want[row : row + 32, col : col + 32] = x[row : row + 32, col : col + 32].T
        try:
            answer.run(x, y, rows, cols, case="", check=False)
        except CheckFailed:
            return False
        if not torch.allclose(y, want, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def _expect_transposed(answer: Answer) -> None:
    __tracebackhide__ = True
    for rows, cols in _TRANSPOSED:
        case = f"rows={rows}, cols={cols}"
        x = _random(rows, cols)
        for check in (True, False):
            y = marked(cols, rows)
            counters = answer.run(x, y, rows, cols, case=case, check=check)
            expect_written(y, "y", case=case, because=_WRITTEN)
            expect_close(
                y,
                x.T,
                what="y",
                case=case,
                mistakes={
                    "not-transposed": (x.reshape(cols, rows), "y is x itself: nothing was transposed"),
                    "tiles-only": (
                        _tiles_swapped(x),
                        "the tiles went to their places, but inside a tile nothing moved",
                    ),
                },
            )
            if not check or rows % 32 or cols % 32:
                continue
            for kind, matrix in (("load", "x"), ("store", "y")):
                sectors, ideal = counters[f"global_{kind}_sectors"], rows * cols // 8
                expect(
                    sectors <= ideal,
                    f"right, but the {kind}s touch {sectors} sectors where {ideal} suffice: let threadIdx.x run "
                    f"along a row of {matrix}",
                    diagnosis="not-coalesced",
                    case=case,
                )
            expect(
                counters.bank_conflicts == 0,
                f"right, and coalesced, but shared memory takes {counters.bank_conflicts} wavefronts more than needed: "
                "number i of a column of the tile is in bank i * pitch % 32, where pitch is the words of a row",
                diagnosis="bank-conflicts",
                case=case,
            )


def _tiles_swapped(x: torch.Tensor) -> torch.Tensor:
    """x [rows, cols] with its 32 x 32 tiles transposed as a matrix of tiles, each left as it is."""
    rows, cols = x.shape
    if rows % 32 or cols % 32:
        return torch.full((cols, rows), math.nan)
    return x.reshape(rows // 32, 32, cols // 32, 32).permute(2, 1, 0, 3).reshape(cols, rows)


# ---- 6.4 ------------------------------------------------------------------------------------------------------------


EQUAL = "a score that equals the maximum so far is left out: its term is exp(0) = 1"


@exercise(
    "6.4",
    title="Online softmax of a row, in one warp",
    minutes=30,
    difficulty="Core",
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
def _(row_lse: str) -> str:
    answer = Answer(row_lse, "row_lse")
    try:
        cases = _expect_lse(answer, _in_the_last_lane(answer))
    except CheckFailed as failed:
        if failed.diagnosis != "wrong-value" or (known := _elements_counted(answer)) is None:
            raise
        raise CheckFailed(known, diagnosis="wrong-elements", case=failed.case) from None
    return f"{cases // 2} cases in both builds, each row read once"


_STORED = re.compile(r"\bif\s*\(\s*threadIdx\.x\s*==\s*0\s*\)(?=\s*lse\[blockIdx\.x\]\s*=)")


def _in_the_last_lane(answer: Answer) -> Answer:
    """The answer with its last line, if it is as it was given, stored by lane 31: every lane has the row's state."""
    text, times = _STORED.subn("if (threadIdx.x == 31)", answer.whole.text)
    return Answer(text, "row_lse") if times == 1 else answer


def _elements_counted(answer: Answer) -> str | None:
    """Which elements of a row are left out of the sum, or counted several times, if no other mistake is in it.

    Row i has a score of 12 at element i and 0 elsewhere: its sum is n - 1 plus that element's exp(12), as often as it
    is counted.
    """
    for n in (64, 100, 257):
        x, lse = 12 * torch.eye(n), marked(n)
        try:
            answer.run(x, lse, n, n, case="", check=False)
        except CheckFailed:
            return None
        times = lse.double().exp() / math.exp(12)
        whole = times.round()
        if not lse.isfinite().all() or (times - whole).abs().max() > 0.02 or whole.max() > 4:
            return None
        rest = lse.double().exp() - whole * math.exp(12)  # how often the zeros are counted
        if (rest - (whole.sum() - whole)).abs().max() > 0.25 + 1e-5 * math.exp(12):
            return None
        if bool((whole == 1).all()):
            continue
        missing, often = whole == 0, whole > 1
        said = []
        if missing.any():
            said.append(f"{pattern.runs(missing, 'element')} of the row {_is(missing)} in no lane's sum")
        if often.any():
            said.append(f"{pattern.runs(often, 'element')} {_is(often)} counted more than once")
        return f"with n={n}, {' and '.join(said)}: which elements does lane t take?"
    return None


def _is(chosen: torch.Tensor) -> str:
    return "is" if int(chosen.sum()) == 1 else "are"


def _expect_lse(answer: Answer, last_lane: Answer) -> int:
    """Runs the cases; the fast build is that of `last_lane`. Returns how many."""
    __tracebackhide__ = True
    cases = 0
    for n in (64, 100, 257, 32, 5, 1):
        for kind in ("random", "rising", "near -200", "near 300", "all 2"):
            case = f"n={n}, scores {kind}"
            x = 3 * _random(4, n, seed=n) + {"near -200": -200, "near 300": 300}.get(kind, 0)
            x = x.sort(1).values if kind == "rising" else torch.full_like(x, 2.0) if kind == "all 2" else x
            want = torch.logsumexp(x.double(), 1)
            state = _lane_states(x)
            whole = torch.cat([x.flatten(), torch.zeros(64)])
            padded = torch.stack([whole[r * n : r * n - (-n // 32) * 32] for r in range(4)])
            first = [x[:, lane::32] for lane in range(min(32, n))]
            unscaled = torch.stack([_no_rescale(part) for part in first], 1)  # [rows, lanes]
            alone = torch.logsumexp(x[:, ::32].double(), 1)
            lanes = [x[:, lane::32].double() for lane in range(min(32, n))]
            tops, sums = (torch.stack([f(part) for part in lanes], 1) for f in (_top, _sum_below_top))
            half = torch.logsumexp(torch.stack([y for i, y in enumerate(lanes) if i < 16 for y in y.unbind(1)], 1), 1)
            for check in (True, False):
                lse = marked(4)
                counters = (answer if check else last_lane).run(x, lse, 4, n, case=case, check=check)
                expect_written(lse, "lse", case=case)
                if not check and not _close(lse, want) and last_lane is not answer:
                    raise CheckFailed(
                        f"lane 0 has the row's state, and lane 31 another one: stored by lane 31, lse is "
                        f"{lse[0]:.6g} and not {want[0]:.6g}. After five rounds of __shfl_xor_sync each lane has it",
                        diagnosis="lane-0-alone",
                        case=case,
                    )
                if kind.startswith("near") and lse.isinf().any():
                    _raise_overflow(answer, n, case)
                if lse.isnan().any() and want.isfinite().all():
                    raise CheckFailed(
                        "the log-sum-exp is NaN: some lanes have no element, and their -INFINITY - (-INFINITY) is NaN",
                        diagnosis="nan-from-empty-lanes",
                        case=case,
                    )
                expect_close(
                    lse,
                    want,
                    what="the log-sum-exp",
                    case=case,
                    tol=1e-3,
                    mistakes={
                        "tail-not-masked": (
                            torch.logsumexp(padded.double(), 1),
                            "elements past the end of the row were counted: they belong to the next row",
                        ),
                        "lanes-not-merged": (alone, "that is lane 0's own part: the 32 states were not merged"),
                        "merge-not-rescaled": (
                            tops.amax(1) + sums.sum(1).log(),
                            "the 32 sums are added as they are: each is relative to its own lane's "
                            "maximum, and has to be "
                            "brought under the common one, l * expf(m - m_new), before it is added",
                        ),
                        "one-round-short": (
                            half,
                            "that is the log-sum-exp of lanes 0 to 15: 32 lanes take five rounds, steps 1, 2, 4, 8, 16",
                        ),
                        "no-rescale": (
                            torch.logsumexp(unscaled, 1),
                            "wrong where a lane's maximum moves: l was not rescaled to the new maximum",
                        ),
                        "tail-dropped": (
                            torch.logsumexp(x[:, : n // 32 * 32].double(), 1),
                            "the last n % 32 elements were left out: some lanes have one more than others",
                        ),
                        "exp2-for-exp": (
                            _top(x.double()) + torch.exp2(x.double() - x.double().amax(1, keepdim=True)).sum(1).log(),
                            "2^x is summed, and the natural logarithm is taken of it: exp2f belongs with x * log2(e)",
                        ),
                        "one-row": (
                            want[:1].expand(4),
                            "every row got the log-sum-exp of row 0: which row is this block's?",
                        ),
                        **_merge_mistakes(*state),
                    }
                    if kind != "all 2"
                    else {"equal-scores-left-out": (want.new_full((4,), 2.0 + math.log(min(n, 32))), EQUAL)},
                )
                if check:
                    _expect_one_pass(counters, n, case)
                cases += 1
    return cases


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((got - want).abs() <= 1e-3).all())


def _lane_states(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m and l of each lane, [rows, 32], after its loop over x [rows, n]; -inf and 0 where it has no element."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32), value=-math.inf).unflatten(1, (-1, 32))
    m = padded.amax(1)
    return m, torch.exp(padded - m.masked_fill(m == -math.inf, 0.0)[:, None]).sum(1)


def _merge_mistakes(m: torch.Tensor, l: torch.Tensor) -> dict[str, tuple[torch.Tensor, str]]:  # noqa: E741
    """What lane 0 has in the end where the merge of two of the states m and l [rows, 32] has a mistake."""

    def merged(
        own: bool = True,
        other: bool = True,
        late: bool = False,
        same: bool = False,
        steps: Sequence[int] = (1, 2, 4, 8, 16),
    ) -> torch.Tensor:
        top, total = m, l
        for step in steps:
            lane = torch.arange(32) ^ step
            new = torch.maximum(top, top[:, lane])
            base = new.masked_fill(new == -math.inf, 0.0)
            mine, its = torch.exp(top - base), torch.exp((new if late else top)[:, lane] - base)
            its = mine if same else its
            total = total * (mine if own else 1.0) + total[:, lane] * (its if other else 1.0)
            top = new
        return top[:, 0] + total[:, 0].log()

    rescale = "is not brought under the common maximum before the sums are added: l * expf(m - m_new)"
    return {
        "own-not-rescaled": (merged(own=False), f"in the merge, the lane's own l {rescale}"),
        "other-not-rescaled": (merged(other=False), f"in the merge, the other lane's l {rescale}"),
        "others-by-own-maximum": (
            merged(same=True),
            "in the merge, the other lane's l is multiplied by the factor of the lane's own m: it needs that of "
            "its own, exp(m_other - m_new)",
        ),
        "shuffled-after-the-maximum": (
            merged(late=True),
            "the other lane's m is fetched after it has become m_new: fetch m and l of both before either changes",
        ),
        "steps-not-doubled": (
            merged(steps=range(1, 32)),
            "the steps of the exchange are 1, 2, 3, 4, ...: they have to double, 1, 2, 4, 8, 16",
        ),
        **{
            f"rounds-missing {some}": (
                merged(steps=some),
                f"that is what lane 0 has after exchanges with the steps {', '.join(map(str, some))} alone: it takes "
                "1, 2, 4, 8 and 16",
            )
            for count in (1, 2, 3, 4)
            for some in itertools.combinations((1, 2, 4, 8, 16), count)
        },
    }


def _raise_overflow(answer: Answer, n: int, case: str) -> None:
    """The result is infinite near -200 or near 300: is it so in both?"""
    __tracebackhide__ = True
    infinite = []
    for level in (-200, 300):
        lse = marked(4)
        answer.run(3 * _random(4, n, seed=n) + level, lse, 4, n, case=case, check=False)
        infinite.append(bool(lse.isinf().any()))
    if all(infinite):
        sentence = (
            "the result is right while the scores are small: near -200 and near 300 the sum of exp is 0 or infinite. "
            "Is the maximum subtracted before exp, in the loop and in the merge?"
        )
    elif infinite[0]:
        sentence = (
            "right near 300, and infinite near -200, where every exp is 0: the maximum is larger than all scores. "
            "Where does m begin?"
        )
    else:
        sentence = "right near -200, and infinite near 300: some exp is not relative to the maximum"
    slug = "m-starts-at-zero" if infinite == [True, False] else "no-max-subtraction"
    raise CheckFailed(sentence, diagnosis=slug, case=case)


def _top(x: torch.Tensor) -> torch.Tensor:
    return x.amax(1)


def _sum_below_top(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x - x.amax(1, keepdim=True)).sum(1)


def _no_rescale(x: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of each row of x when l is never rescaled."""
    running_maximum = x.double().cummax(1).values
    return running_maximum[:, -1] + torch.exp(x.double() - running_maximum).sum(1).log()


def _expect_one_pass(counters: Counters, n: int, case: str) -> None:
    __tracebackhide__ = True
    loads, needed = counters["global_loads"], 4 * -(-n // 32)
    expect(
        loads <= needed,
        f"right, but a warp loads {loads / 4:g} times for a row where {needed // 4} suffice: read the row once, and "
        "give lane t the elements t, t + 32, ...",
        diagnosis="read-twice",
        case=case,
    )
    expect(
        counters["global_load_sectors"] <= 4 * (n // 8 + 2 + n // 32),
        f"right, but the loads touch {counters['global_load_sectors']} sectors: neighbouring lanes should take "
        "neighbouring elements",
        diagnosis="not-coalesced",
        case=case,
    )
    expect(
        counters["shared_stores"] == 0,
        "right, but it uses shared memory: merge the states with __shfl_xor_sync",
        diagnosis="uses-shared-memory",
        case=case,
    )


# ---- 6.5 and 6.6: parts of p6_2_loop_order.cu -----------------------------------------------------------------------

FRAME: Step = steps(6)[1]
_PROBES = ((1, 1, 1, 70, 100, False), (1, 2, 1, 130, 130, True), (1, 1, 1, 50, 20, True))


# What the frame cannot get wrong, told for the lines that are the learner's.
_OF_THE_LINES = {
    "m-starts-at-zero": (
        "mask-after-maximum",
        "wrong where all scores of a row are negative: the maximum takes in a 0, the score of a key "
        "that does not exist. "
        "A key that is not seen has to score -INFINITY before the maximum is taken",
    ),
}


def _examined(source: Source, lines_only: bool = True) -> Verdict:
    """examine, with more to say about float32 kernels; lines_only: the state and the store are given."""
    __tracebackhide__ = True
    try:
        return examine(source, dtype=torch.float32, probes=_PROBES, max_seq=200)
    except CheckFailed as failed:
        if failed.diagnosis in (*KINDS, "does-not-compile"):
            raise
        known = _OF_THE_LINES.get(failed.diagnosis) if lines_only else None
        known = known or _explained(source, failed.diagnosis)
        if known is None:
            raise
        raise CheckFailed(known[1], diagnosis=known[0], case=failed.case) from None


def _explained(source: Source, diagnosis: str) -> tuple[str, str] | None:
    module = built(source, check=False, head_dim=64, dtype=torch.float32)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return ran(module, source, None, lambda: module.forward(q, k, v, echo=False, **options))

    vague = ("wrong-value", "output-scaled", "rows-scaled", *weights.SLUGS)
    known = tiles.explain if diagnosis in vague else tiles.adds_nothing
    return known(forward, 64, torch.float32)


@exercise(
    "6.5",
    title="Right for two kinds of model",
    minutes=15,
    difficulty="Bug hunt",
    untouched="daa139947b0c",
    history="HazyResearch/HipKittens, pull request 22 (2025): a mapping that was right for 64 and 8 heads alone",
    hints=[
        "Only cases with 1 < kv_heads < heads are wrong. Which head of K and V does this code give to each head of Q? "
        "Compute it for heads = 4, kv_heads = 2.",
        "The code gives 0, 1, 0, 1. Grouped-query attention wants neighbours to share: 0, 0, 1, 1.",
        "A group has p.heads / p.kv_heads heads of Q: divide the head by that.",
    ],
)
def _(which_rows: str) -> Verdict:
    text = text_of(which_rows, "which_rows")
    if not text.strip():
        raise NotImplementedError
    return _examined(replaced(FRAME, "which rows", text), lines_only=False)


@exercise(
    "6.6",
    title="FlashAttention-2's inner loop",
    minutes=45,
    difficulty="Core",
    hints=[
        "Keep the simulation of phase 2 beside you. One thread has one row, so m_i and l_i are plain numbers, and a "
        "tile of scores is float s[BLOCK_N].",
        "keys = (p.causal ? min(p.seq_k, m_start + row + diagonal + 1) : p.seq_k) - n_start. It may be 0 or negative: "
        "then n < keys is never true, and all scores are -INFINITY.",
        "s[n] = dot(q_rmem[c], k_smem[n][c], s[n]) over all c; then s[n] = n < keys ? s[n] * scale_log2 : -INFINITY, "
        "and the maximum of those.",
        "m_new = fmaxf(m_i, m_tile); base = m_new == -INFINITY ? 0 : m_new; correction = exp2_approx(m_i - base); "
        "s[n] = exp2_approx(s[n] - base). With base no difference is ever -INFINITY - (-INFINITY).",
        "m_i = m_new, l_i = l_i * correction + the sum of s; for each chunk acc[c] = scaled(correction, acc[c]), then "
        "acc[c] = axpy(s[n], v_smem[n][c], acc[c]) for all n. Do not divide: that is done after the loop.",
    ],
)
def _(inner_loop: str) -> Verdict:
    text = text_of(inner_loop, "inner_loop")
    if not text.strip():
        raise NotImplementedError
    return _examined(replaced(FRAME, "one tile", text))


# ---- 6.7 ------------------------------------------------------------------------------------------------------------


def _shape(r: random.Random) -> tuple[int, int, int, int]:
    block_n = r.choice((16, 32, 64))
    return r.randint(1, 400), r.choice((16, 64, 128)), block_n * r.randint(1, 4), block_n


_VISITS = "visits * (2 * D + 2)"


@rule(
    "6.7",
    title="Count the bytes of a causal mask",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "FA1's order: which rows see a key of the tile that starts at n_start? Row i sees the keys 0 to i, so those "
        "with i >= n_start: N - n_start rows. Each of them reads a row of Q, a row of O, m and l.",
        "FA2's order: the block that starts at m_start has m_start + BLOCK_M - 1 as its last row. It reads the keys 0 "
        "to that one, but no more than N, of K and of V.",
        "FA1: 4 * (2ND + sum over n_start of (N - n_start) * (2D + 2) + 2N). "
        "FA2: 4 * (ND + sum over m_start of min(N, m_start + BLOCK_M) * 2D).",
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
        "FA2: 2": "of K and of V", "FA1: 2": "a visited row reads its m and its l",
    },
    rows=[
        Row("no-o", "FA1: a row that is visited reads both its row of Q and its row of O",
            [(_VISITS, "visits * (D + 2)")]),
        Row("one-statistic", "FA1: a row that is visited reads both m and l", [(_VISITS, "visits * (2 * D + 1)")]),
        Row("no-statistics", "FA1: m and l are read too: at each visit of a row, and for lse",
            [(_VISITS + " + 2 * N", "visits * 2 * D")]),
        Row("no-lse-pass", "FA1: at the end m and l of each row are read once more, for lse: 2N numbers",
            [(_VISITS + " + 2 * N", _VISITS)]),
        Row("writes-counted", "FA1: it counts what is written too: O, m, l and lse",
            [(_VISITS + " + 2 * N", "visits * (3 * D + 4) + 3 * N")]),
        Row("writes-counted", "FA2: it counts what is written too: O and lse",
            [("N * D + 2 * D * keys", "2 * N * D + N + 2 * D * keys")]),
        Row("k-or-v", "FA2: a block reads the keys it needs twice: of K and of V", [("2 * D * keys", "D * keys")]),
        Row("block-skipped", "FA2: the first block reads keys too: those of its own rows",
            [("for m_start in range(0, N", "for m_start in range(BLOCK_M, N")]),
        Row("nothing-skipped", "FA1: it is the count without a mask", [("sum(N - n_start for", "sum(N for")]),
        Row("nothing-skipped", "FA2: it is the count without a mask", [("min(N, m_start + BLOCK_M)", "N")]),
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
def _(flash_attention: str) -> str:
    whole = whole_kernel(flash_attention, "flash_attention")
    expect_stored(whole, dtype=torch.float32)
    verdict = _examined(whole, lines_only=False)
    expect_set(whole, dtype=torch.float32)
    module = built(whole, check=True, head_dim=64, dtype=torch.float32)
    served = _expect_shared(probe(module, whole, _SHARED_PROBE, dtype=torch.float32).counters)
    expect_wide(whole, dtype=torch.float32)
    return f"{verdict.verdict}; each number of K and V serves {served:.0f} rows"


def _expect_shared(c: Counters) -> float:
    """That rows share what is loaded, and loads their sectors. Returns the rows that a number of K and V serves."""
    __tracebackhide__ = True
    _, _, _, rows, keys, _ = _SHARED_PROBE
    case = f"seq_q={rows}, seq_k={keys}, head_dim=64, float32"
    asked, sectors = c["global_load_bytes"] + c["cp_async_bytes"], c["global_load_sectors"] + c["cp_async_sectors"]
    alone, q = rows * keys * 2 * 64 * 4, rows * 64 * 4  # each row reads all of K and V by itself; Q once
    served = alone / max(1, asked - q)
    expect(
        served >= SERVED or served < 2,  # below 2: K or V is not shared
        f"right, and tiles are shared, but a number of K and V serves {served:.3g} rows where at least {SERVED} are "
        "wanted: give each block more rows",
        diagnosis="tiles-too-small",
        case=case,
    )
    expect(
        served >= SERVED,
        f"right, but the threads ask for {asked} bytes of global memory, where {alone + q} are those of rows that each "
        "read all of K and V by themselves: bring a tile to shared memory once, and let all rows of the block use it",
        diagnosis="tiles-not-shared",
        case=case,
    )
    expect(
        32 * sectors <= 4 * asked,
        f"right, and tiles are shared, but the loads touch {sectors} sectors where {asked // 32} hold what is asked "
        "for: let neighbouring threads copy neighbouring numbers of a row",
        diagnosis="not-coalesced",
        case=case,
    )
    return served
