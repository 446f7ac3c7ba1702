"""Checks of phase 7: fragments, ldmatrix, single MMAs, the loop of the naive tensor-core kernel, a whole kernel.

CUDA answers are text. Each is built for the emulator twice, a check build first: a race, a read of what nobody wrote or
an address out of bounds is told with the learner's line. Then the numbers are compared with float64's, and with what
the known mistakes would have given.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect, expect_close
from flashlab.check.cuda_answer import (
    PROBES,
    Answer,
    Source,
    built,
    examine,
    expect_set,
    expect_wide,
    ran,
    region,
    replaced,
    text_of,
)
from flashlab.check.lookup import Row
from flashlab.check.mistakes.weights import counted, crossed
from flashlab.check.stored import expect_stored, expect_written, marked
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.figures import fragments
from flashlab.kernels.series import step
from flashlab.simt import Counters
from flashlab.simt.sentences import KINDS
from flashlab.simt.source import entries

DTYPES = (torch.float16, torch.bfloat16)
LANES = range(32)
Mistakes = Mapping[str, tuple[Any, str]]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _builds(dtype: torch.dtype, first: bool = True) -> tuple[bool, ...]:
    """Which builds to run, check builds or fast ones: both of the first case, then only fast ones, to save seconds."""
    return (True, False) if first and dtype == torch.float16 else (False,)


def _in_fp16_too(failed: CheckFailed, dtype: torch.dtype, again: Callable[[], Any]) -> CheckFailed:
    """The failure of a case in bf16, with what the same case does in fp16; that of another dtype as it is."""
    if dtype != torch.bfloat16 or failed.diagnosis in KINDS:
        return failed
    try:
        again()
    except CheckFailed:
        return failed
    sentence = (
        f"wrong in bfloat16 alone, the same case is right in float16 ({failed}). Is there a <T> at every mma and pack? "
        "Without it they take __half"
    )
    return CheckFailed(sentence, diagnosis="fp16-alone", case=failed.case)


# ---- 7.1 ------------------------------------------------------------------------------------------------------------


_ELEMENTS = tuple(itertools.product(range(16), range(8)))
_LANE = "the lane is 4 g + t, and here it is 8 t + g: neighbours in t are neighbouring lanes"


def _element(r: random.Random) -> tuple[int, int]:
    return r.choice(_ELEMENTS)


@rule(
    "7.1",
    title="Who holds it?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "C first: its row is g or g + 8, its column 2t or 2t + 1. So what of the row is g, and what says which of "
        "c0 c1 | "
        "c2 c3? In B, rows and columns change parts: the column is g.",
        "The lane is 4 g + t. For C: g = row % 8 and t = column // 2. For B: g = column and t = row % 8 // 2.",
        "B: (4 * column + row % 8 // 2, row // 8, row % 2). C: (4 * (row % 8) + column // 2, 2 * (row // 8) + "
        "column % 2).",
    ],
    returns="lane, register, half",
    whole=True,
    strict=True,
    inputs=_ELEMENTS,
    draw=_element,
    notes={
        "row % 8": "rows 8 to 15 are in the same lanes, in register 1",
        "4 * column": "the lane is 4 g + t, and g is the column",
        "4": "the lane is 4 g + t", "row % 2": "a register holds two neighbours of a column",
        "row // 8": "rows 8 to 15 are in register 1",
    },
    rows=[
        Row("b-paired-along-rows", "it pairs two neighbours of a row, as A does: a register of B holds two neighbours "
            "of a column", [("4 * column + row % 8 // 2, row // 8, row % 2",
                             "4 * (row % 8) + column // 2, row // 8, column % 2")]),
        Row("g-and-t-exchanged", _LANE, [("4 * column + row % 8 // 2", "8 * (row % 8 // 2) + column")]),
        Row("halves-exchanged", "the halves are exchanged: the element with the lower index is in the lower half, 0",
            [(", row % 2", ", 1 - row % 2")]),
        Row("half-apart", "half: a register holds rows four apart: it holds two neighbours of a column",
            [("row % 8 // 2, row // 8, row % 2", "row % 4, row // 8, row // 4 % 2")]),
    ],
)  # fmt: skip
def holder_of_b(row, column):
    """The lane, the register (0 or 1) and the half (0 or 1) that hold B[row, column]."""
    # BEGIN SOLUTION
    return 4 * column + row % 8 // 2, row // 8, row % 2
    # END SOLUTION


@rule(
    "7.1",
    returns="lane, register",
    whole=True,
    strict=True,
    inputs=_ELEMENTS,
    draw=_element,
    notes={
        "row % 8": "rows 8 to 15 are in the same lanes, in c2 and c3", "4": "the lane is 4 g + t",
        "row // 8": "c2 and c3 lie 8 rows below c0 and c1", "column % 2": "c0 and c1 are neighbours of one row",
        "column // 2": "c0 and c1 are neighbours of one row",
    },
    rows=[
        Row("c1-and-c2-exchanged", "c1 and c2 are exchanged: c0 and c1 are neighbours of one row, c2 and c3 lie 8 rows "
            "below them", [("2 * (row // 8) + column % 2", "row // 8 + 2 * (column % 2)")]),
        Row("g-and-t-exchanged", _LANE, [("4 * (row % 8) + column // 2", "8 * (column // 2) + row % 8")]),
        Row("columns-apart", "a lane holds columns four apart: c0 and c1 are neighbours of one row",
            [("column // 2, 2 * (row // 8) + column % 2", "column % 4, 2 * (row // 8) + column // 4")]),
    ],
)  # fmt: skip
def holder_of_c(row, column):
    """The lane and the register (0 to 3) that hold C[row, column]."""
    # BEGIN SOLUTION
    return 4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2
    # END SOLUTION


# ---- 7.2 ------------------------------------------------------------------------------------------------------------


def _lane(r: random.Random) -> tuple[int]:
    return (r.randrange(32),)


@rule(
    "7.2",
    title="Thirty-two addresses",
    minutes=15,
    hints=[
        "Lanes 8 i to 8 i + 7 name the rows of the tile that arrives in register i. Write down, for each of the "
        "four registers, which keys "
        "and which dimensions its 8 x 8 tile has.",
        "K: registers 0 and 1 have the same keys and different dimensions; V: registers 0 and 1 have different "
        "keys and the same "
        "dimensions (.trans turns the tile around after it was named by its rows).",
        "K: (lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8). V: (lane % 16, lane // 16 * 8), which are A's addresses.",
    ],
    returns="key, dimension",
    whole=True,
    strict=True,
    inputs=[(lane,) for lane in range(32)],
    draw=_lane,
    notes={
        "lane % 8": "eight lanes name the eight rows of one register's tile",
        "lane // 16 * 8": "lanes 16 to 31 name keys 8 to 15",
        "lane // 8 % 2 * 8": "registers 1 and 3 have dimensions 8 to 15",
        "8": "a tile has 8 keys and 8 dimensions",
    },
    rows=[
        Row("registers-exchanged", "registers 1 and 2 are exchanged: register 1 should be b1 of the first fragment, "
            "dimensions 8 to 15, and it is b0 of the second",
            [("lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8", "lane % 16, lane // 16 * 8")]),
    ],
)  # fmt: skip
def k_address(lane):
    """(key, dimension) at which the row that this lane names begins, for K."""
    # BEGIN SOLUTION
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8
    # END SOLUTION


@rule(
    "7.2",
    returns="key, dimension",
    whole=True,
    strict=True,
    inputs=[(lane,) for lane in range(32)],
    draw=_lane,
    notes={
        "lane % 16": "lanes 0 to 15 name the keys of dimensions 0 to 7", "16": "lanes 0 to 15 name the 16 keys",
        "lane // 16 * 8": "registers 2 and 3 have dimensions 8 to 15", "8": "a tile has 8 keys and 8 dimensions",
    },
    rows=[
        Row("registers-exchanged", "registers 1 and 2 are exchanged: register 1 should be b1 of the first fragment, "
            "keys 8 to 15, and it is b0 of the second",
            [("lane % 16, lane // 16 * 8", "lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8")]),
    ],
)  # fmt: skip
def v_address(lane):
    """(key, dimension) at which the row that this lane names begins, for V."""
    # BEGIN SOLUTION
    return lane % 16, lane // 16 * 8
    # END SOLUTION


# ---- 7.3 and 7.9: a tile of Q K^T -----------------------------------------------------------------------------------


def _tiles_transposed(x: torch.Tensor) -> torch.Tensor:
    """Each 8 x 8 tile of a matrix, transposed."""
    rows, columns = x.shape
    tiles = x.reshape(rows // 8, 8, columns // 8, 8)
    return tiles.permute(0, 3, 2, 1).reshape(rows, columns)


def _score_mistakes(q: torch.Tensor, k: torch.Tensor) -> Mistakes:
    want = q @ k.T
    last, first = slice(q.shape[1] - 16, None), slice(0, 16)
    times = q.shape[1] // 16
    half = torch.cat([want[8:], want[:8]])
    return {
        "k-not-plain": (
            q @ _tiles_transposed(k).T,
            "that is Q times a K whose 8 x 8 tiles are transposed: the rows of K are the columns of B already, so "
            "no .trans",
        ),
        "same-slice": (
            times * q[:, first] @ k[:, first].T,
            "every step of the sum takes dimensions 0 to 15 again: the addresses have to move with d",
        ),
        "same-slice-of-a": (
            sum(q[:, first] @ k[:, d : d + 16].T for d in range(0, q.shape[1] - 15, 16)),
            "every step takes dimensions 0 to 15 of Q again, and K is right: A's address has to move with d",
        ),
        "same-slice-of-b": (
            sum(q[:, d : d + 16] @ k[:, first].T for d in range(0, q.shape[1] - 15, 16)),
            "every step takes dimensions 0 to 15 of K again, and Q is right: B's address has to move with d",
        ),
        "last-slice-only": (q[:, last] @ k[:, last].T, "only the last 16 dimensions are in c: it has to add up over d"),
        "rows-exchanged": (
            half,
            "the upper and the lower 8 rows are exchanged: c0 and c1 are row g, c2 and c3 row g + 8",
        ),
        "b-registers-exchanged": (
            sum(
                q[:, [*range(d, d + 16)]] @ k[:, [*range(d + 8, d + 16), *range(d, d + 8)]].T
                for d in range(0, q.shape[1] - 15, 16)
            ),
            "b0 and b1 are exchanged: lanes 0 to 7 name dimensions 0 to 7 of the keys, lanes 8 to 15 dimensions 8 "
            "to 15",
        ),
        "a-registers-exchanged": (
            sum(_a1_a2(q[:, d : d + 16]) @ k[:, d : d + 16].T for d in range(0, q.shape[1] - 15, 16)),
            "a1 and a2 are exchanged: lanes 8 to 15 name rows 8 to 15 of columns 0 to 7, lanes 16 to 23 rows 0 to "
            "7 of columns 8 to 15",
        ),
    }


def _a1_a2(x: torch.Tensor) -> torch.Tensor:
    """A 16 x 16 operand whose registers a1 and a2 are exchanged."""
    return fragments.matrix(fragments.fragment(x, "a")[:, [0, 2, 1, 3]], "a")


def _check_scores(answer: Answer, cases: Sequence[tuple[int, torch.dtype]], tail: bool = False) -> None:
    """Runs Q K^T of 16 queries and 8 keys for each (head_dim, dtype); the first one's check build too."""
    __tracebackhide__ = True
    for number, (head_dim, dtype) in enumerate(cases):
        q, k = _random(16, head_dim, seed=head_dim).to(dtype), _random(8, head_dim, seed=head_dim + 1).to(dtype)
        case = f"D={head_dim}, {_name(dtype)}"
        wide_q, wide_k = q.double(), k.double()
        mistakes = _tail_mistakes(wide_q, wide_k) if tail else {}
        if head_dim % 16 == 0:
            mistakes = {**_score_mistakes(wide_q, wide_k), **mistakes}

        def compared(
            check: bool, q: Any = q, k: Any = k, dtype: torch.dtype = dtype, head_dim: int = head_dim,
            case: str = case, mistakes: Mistakes = mistakes,
        ) -> Counters:  # fmt: skip
            __tracebackhide__ = True
            s = marked(16, 8)
            counters = answer.run(q.to(dtype), k.to(dtype), s, case=case, check=check, dtype=dtype, HEAD_DIM=head_dim)
            expect_written(s, "s_gmem", case=case)
            wide, slices = (q.double(), k.double()), (q.double()[:, None] * k.double()).unflatten(2, (-1, 8)).sum(3)
            said = counted(slices.flatten(0, 1), s.double().flatten(), 1e-3) or ""
            because = said if said.startswith("dimensions") else None  # a factor is seen by expect_close
            because = because or crossed(q, k, s, 1e-3)
            expect_close(s, wide[0] @ wide[1].T, what="s", tol=1e-4, case=case, mistakes=mistakes, because=because)
            return counters

        for check in _builds(dtype, number == 0):
            try:
                counters = compared(check)
            except CheckFailed as failed:
                raise _in_fp16_too(failed, dtype, partial(compared, False, dtype=torch.float16)) from None
        wanted = {"mma_m16n8k16": head_dim // 16, "mma_m16n8k8": head_dim % 16 // 8}
        for name, count in wanted.items():
            expect(
                counters[name] == count,
                f"the result is right, with {counters[name]} {name.removeprefix('mma_')} where {count} are wanted",
                diagnosis="wrong-count",
                case=case,
            )
        loads = 2 * sum(wanted.values())
        expect(
            counters["ldmatrix"] <= loads if tail else counters["ldmatrix"] == loads,
            f"the result is right, with {counters['ldmatrix']} ldmatrix where {loads} are wanted: one for A and "
            "one for B for each MMA",
            diagnosis="wrong-count",
            case=case,
        )


def _tail_mistakes(q: torch.Tensor, k: torch.Tensor) -> Mistakes:
    """Of a head dimension that may not be a multiple of 16."""
    head_dim = q.shape[1]
    whole = head_dim // 16 * 16
    tail = slice(head_dim - 8, None)
    most, rest = q[:, :whole] @ k[:, :whole].T, q[:, tail] @ k[:, tail].T
    if head_dim % 16 == 0:
        return {
            "tail-always": (
                most + rest,
                "the last 8 dimensions are in the sum twice: D is a multiple of 16, and nothing is left for m16n8k8",
            )
        }
    turned = q[:, tail] @ _tiles_transposed(k[:, tail]).T
    upper = q[:8, tail].repeat(2, 1)
    return {
        "tail-missing": (most, "the last 8 dimensions are missing from the sum"),
        "tail-alone": (rest, "only the last 8 dimensions are in the sum"),
        "k-not-plain": (
            most + turned,
            "the last 8 dimensions come from a K whose 8 x 8 tile is transposed: the rows of K are the columns of B "
            "already, so no .trans",
        ),
        "rows-repeated": (
            most + upper @ k[:, tail].T,
            "in the last 8 dimensions rows 8 to 15 of A are rows 0 to 7 again: lanes 8 to 15 name the lower tile",
        ),
        "tail-from-0": (
            most + q[:, :8] @ k[:, :8].T,
            "the last step takes dimensions 0 to 7: what is left begins at column D - 8",
        ),
    }


@exercise(
    "7.3",
    title="One tile of S",
    minutes=20,
    difficulty="Core",
    hints=[
        "A are 16 rows and 16 columns of q_smem, from column d on: lane l names row l % 16, at column d + l / 16 * "
        "8. B is the transposed "
        "K tile: which rows does ldmatrix_x2 want, and with or without trans?",
        "ldmatrix_x2(b, smem_u32(k_smem + lane % 8 * D + d + lane / 8 % 2 * 8)): keys 0 to 7; dimensions d to d + "
        "7 in b[0], the next "
        "eight in b[1]. Then mma_m16n8k16<T>(c, a, b[0], b[1]).",
        "c[i] is row g + i / 2 * 8, column t * 2 + i % 2, and a row of s_gmem has 8 elements.",
    ],
)
def _(one_tile: str) -> str:
    _check_scores(Answer(one_tile, "one_tile"), [(48, torch.float16), (16, torch.float16), (64, torch.bfloat16)])
    return "D = 16, 48 and 64, with D/16 MMAs"


@exercise(
    "7.9",
    title="A head dimension of 40",
    minutes=25,
    difficulty="Stretch",
    hints=[
        "The loop of 7.3, while 16 dimensions are left: for (int d = 0; d + 16 <= D; d += 16). What remains begins "
        "at column D - 8.",
        "m16n8k8's A is 16 rows of 8 columns: two 8 x 8 tiles, one above the other, so ldmatrix_x2 with row lane % "
        "16. Its B is one tile.",
        "if (D % 16) { ldmatrix_x2(a, q_smem + lane % 16 * D + D - 8); ldmatrix_x1(b, k_smem + lane % 8 * D + D - "
        "8); "
        "mma_m16n8k8<T>(c, a, b[0]); } with smem_u32 around the addresses.",
    ],
)
def _(any_eight: str) -> str:
    cases = [(40, torch.float16), (8, torch.bfloat16), (64, torch.bfloat16)]
    _check_scores(Answer(any_eight, "any_eight"), cases, True)
    return "D = 8, 40 and 64, no MMA too many"


# ---- 7.4 ------------------------------------------------------------------------------------------------------------


def _maxima(s: torch.Tensor, masks: tuple[int, ...]) -> torch.Tensor:
    """Row maxima of a C tile as lane t = 0 of each quad ends up with them after exchanges with these masks."""
    lane, half = torch.arange(32), []
    for h in (0, 8):
        x = torch.maximum(s[lane // 4 + h, lane % 4 * 2], s[lane // 4 + h, lane % 4 * 2 + 1])
        for mask in masks:
            x = torch.maximum(x, x[lane ^ mask])
        half.append(x[::4])
    return torch.cat(half)


def _exchanged(x: torch.Tensor, masks: Sequence[int], join: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What lane t = 0 of each quad has of x [32 lanes] after exchanges with these masks."""
    lane = torch.arange(32)
    for mask in masks:
        x = join(x, x[lane ^ mask])
    return x[::4]


def _asked(masks: Sequence[int], what: str) -> list[int]:
    """The lanes whose numbers lane 0 has after the exchanges; in a sum a lane may be there twice."""
    lanes = [0]
    for mask in masks:
        lanes += [lane ^ mask for lane in lanes]
    return lanes if what == "sum" else sorted(set(lanes))


def _with_shuffles_down(s: torch.Tensor, down: tuple[bool, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maxima and sums of a C tile as lane t = 0 has them; down: which of the four exchanges are shuffles down."""
    lane, maxima, sums = torch.arange(32), [], []
    for h in (0, 8):
        own = torch.stack([s[lane // 4 + h, lane % 4 * 2 + e] for e in (0, 1)])
        x, join = own.amax(0), torch.maximum
        for n, goes_down in enumerate(down):
            if n == 2:
                maxima.append(x[::4])
                x, join = torch.exp(own - x).sum(0), torch.add
            there = lane + (1, 2)[n % 2]
            x = join(x, x[torch.where(there < 32, there, lane) if goes_down else lane ^ (1, 2)[n % 2]])
        sums.append(x[::4])
    return torch.cat(maxima), torch.cat(sums)


def _told_by_masks(answer: Answer) -> str | None:
    """Which lanes' numbers a row's maximum is made of, or its sum, if they are not those of its quad."""
    lane, runs = torch.arange(32), []
    for seed in range(3):
        s, row_max, row_sum = _random(16, 8, seed=50 + seed), marked(16), marked(16)
        answer.run(s, row_max, row_sum, case="", check=False)
        runs.append((s.double(), row_max.double(), row_sum.double()))
    for down in itertools.product((False, True), repeat=4):
        models = [(_with_shuffles_down(s, down), row_max, row_sum) for s, row_max, row_sum in runs]
        if not any(down[:2]) or any(
            max((m - row_max).abs().max(), (n - row_sum).abs().max()) > 1e-3 for (m, n), row_max, row_sum in models
        ):
            continue
        return (
            "a shuffle down brings the maximum to the first lane of the quad alone: others subtract another number "
            "before the sum. __shfl_xor_sync gives it to all four"
        )
    pairs = [*itertools.combinations_with_replacement(range(1, 32), 2), *((m,) for m in range(1, 32)), ()]
    pairs += itertools.combinations((1, 2, 4, 8, 16), 3)
    for what, join in (("maximum", torch.maximum), ("sum", torch.add)):
        fit = []
        for masks in pairs:
            for s, row_max, row_sum in runs:
                mine = []
                for h in (0, 8):
                    own = torch.stack([s[lane // 4 + h, lane % 4 * 2 + e] for e in (0, 1)])
                    top = s.amax(1)[lane // 4 + h]
                    start = own.amax(0) if what == "maximum" else torch.exp(own - top).sum(0)
                    mine.append(_exchanged(start, masks, join))
                got = row_max if what == "maximum" else row_sum
                if not (torch.cat(mine) - got).abs().max() < 1e-4:
                    break
            else:
                fit.append(masks)
        lanes = {tuple(sorted(_asked(masks, what))) for masks in fit}
        if (0, 1, 2, 3) in lanes:
            continue
        maxima_right = all((row_max - s.amax(1)).abs().max() < 1e-5 for s, row_max, _ in runs)
        if len(lanes) != 1 or (what == "sum" and not maxima_right):
            return None
        (mine_of,) = lanes
        listed = ", ".join(map(str, mine_of))
        beside = "its maximum is right, but the" if what == "sum" else "the"
        if set(mine_of) <= {0, 1, 2, 3}:
            twice = ", some of them twice" if len(set(mine_of)) < len(mine_of) else ""
            return f"{beside} {what} of row 0 is that of lanes {listed} alone{twice}: the row lives in lanes 0, 1, 2, 3"
        return (
            f"{beside} {what} of row 0 is that of lanes {listed}, as some exchange leaves the quad: the row lives in "
            "lanes 0, 1, 2, 3, and lane ^ 1 and lane ^ 2 stay among them"
        )
    return None


@exercise(
    "7.4",
    title="Four lanes, one maximum",
    minutes=15,
    difficulty="Bug hunt",
    untouched="f25b4eb82615",
    history="a common mistake",
    hints=[
        "A lane holds two columns of its row. After the first exchange it knows four of the eight columns. Which "
        "lane has the other four?",
        "Lanes t and t ^ 2 of a quad differ in bit 1 of the lane number. Which number has only bit 1 set, and "
        "which one is in the code?",
        "0x10 is sixteen: lane ^ 16 is four rows away. 0b10 is two.",
    ],
)
def _(row_statistics: str) -> str:
    answer = Answer(row_statistics, "row_statistics")
    try:
        return _expect_statistics(answer)
    except CheckFailed as failed:
        if failed.diagnosis != "wrong-value" or (known := _told_by_masks(answer)) is None:
            raise
        raise CheckFailed(known, diagnosis="wrong-shuffle-mask", case=failed.case) from None


def _expect_statistics(answer: Answer) -> str:
    __tracebackhide__ = True
    inputs = {"random scores": _random(16, 8), "rising scores": torch.arange(128.0).reshape(16, 8) / 8}
    inputs["the maximum in column 7"] = torch.where(torch.arange(8) == 7, 3.0, -1.0).repeat(16, 1) + _random(16, 1) * 2
    for case, s in inputs.items():
        for check in (True, False):
            row_max, row_sum = marked(16), marked(16)
            answer.run(s, row_max, row_sum, case=case, check=check)
            expect_written(row_max, "max_gmem", case=case)
            expect_written(row_sum, "sum_gmem", case=case)
            expect_close(
                row_max,
                s.amax(1),
                what="row_max",
                case=case,
                mistakes={
                    "wrong-shuffle-mask": (
                        _maxima(s, (1, 16)),
                        "row_max[0] is the largest of columns 0 to 3 of rows 0 and 4, and so on: the second "
                        "exchange leaves the quad",
                    ),
                    "one-shuffle": (
                        _maxima(s, (1,)),
                        "row_max is the largest of columns 0 to 3: the other two lanes of the quad were not asked",
                    ),
                    "one-lane": (_maxima(s, ()), "row_max is that of lane t = 0 alone, columns 0 and 1"),
                    **{
                        f"another-lane {mask}": (
                            _maxima(s, (1, mask)),
                            f"row_max is what a second exchange with mask {mask} gives: lane 0 asks lane {mask}, which "
                            f"holds {'another row' if mask > 3 else 'what it knows'}",
                        )
                        for mask in range(4, 32)
                        if mask != 16
                    },
                    "too-many-lanes": (
                        _maxima(s, (1, 2, 4, 8, 16)),
                        "row_max is the largest of 8 rows: only the four lanes of a quad may be asked",
                    ),
                },
            )
            expect_close(row_sum, torch.exp(s - s.amax(1, keepdim=True)).sum(1), what="row_sum", case=case, tol=1e-4)
    return f"{len(inputs)} inputs"


# ---- 7.5 ------------------------------------------------------------------------------------------------------------


def _packed(p: torch.Tensor, order: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The matrix that an A fragment stands for whose registers are these pairs of (c0 .. c3, d0 .. d3)."""
    held = torch.cat([fragments.fragment(p[:, :8], "c"), fragments.fragment(p[:, 8:], "c")], dim=1)  # [32, 8]
    return fragments.matrix(torch.stack([held[:, list(pair)] for pair in order], dim=1), "a")


_PACKINGS = {
    "middle-registers-exchanged": (
        ((0, 1), (4, 5), (2, 3), (6, 7)),
        "a1 and a2 are exchanged: a1 is 8 rows below a0, a2 is 8 columns to its right",
    ),
    "c2-c3-swapped": (
        ((0, 1), (3, 2), (4, 5), (7, 6)),
        "rows 0 to 7 are right, and in the lower rows neighbouring columns of P are exchanged: c2 comes before c3, "
        "in the lower half",
    ),
    "c2-c3-swapped-once": (
        ((0, 1), (3, 2), (4, 5), (6, 7)),
        "in rows 8 to 15 neighbouring columns 0 to 7 of P are exchanged: c2 comes before c3, in the lower half",
    ),
    "halves-exchanged": (
        ((1, 0), (3, 2), (5, 4), (7, 6)),
        "neighbouring columns of P are exchanged in every row: pack takes the element with the lower index first",
    ),
    "rows-mixed": (
        ((0, 2), (1, 3), (4, 6), (5, 7)),
        "a register got an element of row g and one of row g + 8: c0 and c1 belong together, and c2 and c3",
    ),
    "tiles-exchanged": (
        ((4, 5), (6, 7), (0, 1), (2, 3)),
        "columns 0 to 7 and 8 to 15 of P are exchanged: c goes to a0 and a1, d to a2 and a3",
    ),
    "second-tile-forgotten": (
        ((0, 1), (2, 3), (0, 1), (2, 3)),
        "columns 8 to 15 of P are those of 0 to 7 again: a2 and a3 come from d",
    ),
}
_PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
_ORDERS = {
    f"registers-exchanged {order}": (
        tuple(_PAIRS[i] for i in order),
        "each register has the right two numbers, but they are in the wrong order: "
        + ", ".join(f"a[{i}] has what belongs in a[{x}]" for i, x in enumerate(order) if i != x),
    )
    for order in itertools.permutations(range(4))
}


@exercise(
    "7.5",
    title="P becomes A",
    minutes=15,
    difficulty="Core",
    hints=[
        "Take a_position: register r of A is row g + 8 (r % 2), columns 2t + 8 (r // 2) and the next. Where are "
        "these in c and d?",
        "a[0] is row g, columns 2t and 2t + 1, which are c[0] and c[1]. a[1] is eight rows below: c[2] and c[3]. "
        "a[2] is eight columns to "
        "the right of a[0].",
        "a[0] = pack<T>(c[0], c[1]); a[1] = pack<T>(c[2], c[3]); a[2] = pack<T>(d[0], d[1]); a[3] = pack<T>(d[2], "
        "d[3]);",
    ],
)
def _(second_product: str) -> str:
    answer = Answer(second_product, "second_product")
    try:
        return _expect_product(answer)
    except CheckFailed as failed:
        if failed.diagnosis != "wrong-value" or (known := _registers(answer)) is None:
            raise
        raise CheckFailed(known, diagnosis="wrong-register", case=failed.case) from None


def _as_the_mma_sees_p(answer: Answer) -> torch.Tensor | None:
    """For each element of A the element of P that it holds, row * 16 + column; -1 for 0; None for anything else."""
    p = (1 + torch.arange(256.0)).reshape(16, 16)  # whole numbers that fp16 has
    halves = []
    for first in (0, 8):
        v, o = torch.zeros(16, 8), marked(16, 8)
        v[first + torch.arange(8), torch.arange(8)] = 1
        answer.run(p, v.half(), o, case="", check=False, dtype=torch.float16)
        halves.append(o)
    seen = torch.cat(halves, 1).double()
    if not bool(((seen == seen.round()) & (seen >= 0) & (seen <= 256)).all()):
        return None
    return seen.long() - 1


def _registers(answer: Answer) -> str | None:
    """Which register of A holds what of P, of the first that is wrong."""
    seen = _as_the_mma_sees_p(answer)
    if seen is None:
        return None
    held = fragments.fragment(seen, "a")  # [32, 4, 2]
    want = fragments.fragment(torch.arange(256).reshape(16, 16), "a")
    wrong = (held != want).any(2).any(0)
    if not wrong.any():
        return None
    register = int(wrong.nonzero()[0])
    names = [*(f"c[{i}]" for i in range(4)), *(f"d[{i}]" for i in range(4))]
    own = torch.arange(256).reshape(16, 16)
    own = torch.cat([fragments.fragment(own[:, :8], "c"), fragments.fragment(own[:, 8:], "c")], 1)  # [32, 8]
    said = []
    for half in (0, 1):
        same = [i for i in range(8) if torch.equal(held[:, register, half], own[:, i])]
        if not same and not bool((held[:, register, half] == -1).all()):
            return None
        said.append(names[same[0]] if same else "0")
    right = [names[int((own == want[:, register, half, None]).all(0).nonzero()[0])] for half in (0, 1)]
    more = ", and other registers are wrong too" if int(wrong.sum()) > 1 else "; the other registers are right"
    return f"a[{register}] holds {said[0]} and {said[1]}, and should hold {right[0]} and {right[1]}{more}"


def _expect_product(answer: Answer) -> str:
    __tracebackhide__ = True
    for dtype in DTYPES:
        p, v = torch.rand(16, 16, generator=torch.Generator().manual_seed(5)), _random(16, 8)

        def compared(check: bool, dtype: torch.dtype = dtype, p: Any = p, v: Any = v) -> Counters:
            __tracebackhide__ = True
            rounded, wide = p.to(dtype).double(), v.to(dtype).double()
            o = marked(16, 8)
            counters = answer.run(p, v.to(dtype), o, case=_name(dtype), check=check, dtype=dtype)
            expect_written(o, "o_gmem", case=_name(dtype))
            known = {**_PACKINGS, **_ORDERS}
            mistakes = {slug: (_packed(rounded, order) @ wide, said) for slug, (order, said) in known.items()}
            expect_close(o, rounded @ wide, what="P V", tol=1e-4, case=_name(dtype), mistakes=mistakes)
            return counters

        for check in _builds(dtype):
            try:
                counters = compared(check)
            except CheckFailed as failed:
                raise _in_fp16_too(failed, dtype, partial(compared, False, torch.float16)) from None
        expect(
            counters["shuffles"] == 0,
            f"right, but with {counters['shuffles']} shuffles: no lane needs another lane's numbers",
            diagnosis="wrong-count",
            case=_name(dtype),
        )
        expect(
            counters["ldmatrix"] == 1 and answer.whole.text.count("__shared__") == 1,
            "right, but P goes through shared memory: each lane has its numbers in registers already",
            diagnosis="wrong-count",
            case=_name(dtype),
        )
    return "fp16 and bf16, no shuffle"


# ---- 7.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "7.6",
    title="Two bugs in P V",
    minutes=20,
    difficulty="Bug hunt",
    untouched="28d61c57e0a1",
    history="0 times NaN: pytorch/pytorch, issue 101967 (2023); .trans is a common mistake",
    hints=[
        "What the emulator calls uninitialised holds anything, also the bits of a NaN. What is 0 times NaN?",
        "The missing rows of V have to be zeros in shared memory. And then: a register of B holds two neighbours "
        "of a column of V. Which "
        "two numbers does ldmatrix without .trans put into a register?",
        "Copy 16 * D elements, T(0.f) where i >= keys * D; and ldmatrix_x2_trans.",
    ],
)
def _(pv: str) -> str:
    answer = Answer(pv, "pv")
    try:
        return _expect_pv(answer)
    except CheckFailed as failed:
        if failed.diagnosis != "wrong-value" or (known := _values_of_v(answer)) is None:
            raise
        raise CheckFailed(known, diagnosis="wrong-values-of-v", case=failed.case) from None


def _values_of_v(answer: Answer) -> str | None:
    """How the V that the product has seen differs from V: P is the identity, so O is that V."""
    for keys in (13, 16):
        p, v, o = torch.eye(16), 1 + torch.arange(keys * 64.0).reshape(keys, 64), marked(16, 64)
        p[:, keys:] = 0
        answer.run(p.half(), v.half(), o, keys, case="", check=False, dtype=torch.float16)
        want = torch.cat([v, v.new_zeros(16 - keys, 64)])
        if o.isnan().any() or torch.equal(o, want):
            continue
        start = f"with {keys} keys, the V that is multiplied with P"
        wrong = o != want
        if bool((o[wrong] == 0).all()) and wrong.any():
            kept = int((~wrong[:keys]).sum())
            at = wrong.nonzero()[0].tolist()
            return (
                f"{start} has only {kept} of its {keys * 64} numbers, and 0 in place of the others, the first in row "
                f"{at[0]}, column {at[1]}: a row has {64} numbers"
            )
        at = wrong.nonzero()[0].tolist()
        number = o[at[0], at[1]].item() - 1
        if number == round(number) and 0 <= number < keys * 64:
            row, column = divmod(int(number), 64)
            return f"{start} has, in row {at[0]}, column {at[1]}, what belongs in row {row}, column {column}"
        return None
    return None


def _expect_pv(answer: Answer) -> str:
    __tracebackhide__ = True
    cases = [(13, torch.float16), (16, torch.float16), (1, torch.float16), (9, torch.bfloat16)]
    for keys, dtype in cases:
        p, v = torch.rand(16, 16, generator=torch.Generator().manual_seed(keys)), _random(keys, 64, seed=keys)
        p[:, keys:] = 0
        p, v = p.to(dtype), v.to(dtype)
        filled = torch.cat([v, v.new_zeros(16 - keys, 64)]).double()
        case = f"{keys} keys, {_name(dtype)}"
        for check in _builds(dtype):
            o = marked(16, 64)
            answer.run(p, v, o, keys, case=case, check=check, dtype=dtype)
            expect_written(o, "o_gmem", case=case)
            expect_close(
                o,
                p.double() @ filled,
                what="P V",
                tol=1e-4,
                case=case,
                mistakes={
                    "v-not-transposed": (
                        p.double() @ _tiles_transposed(filled),
                        "that is P times a V whose 8 x 8 tiles are transposed: each register of B got two "
                        "dimensions of one key, and "
                        "should have two keys of one dimension",
                    ),
                    "p-transposed": (
                        _tiles_transposed(p.double()) @ filled,
                        "that is V times a P whose 8 x 8 tiles are transposed: P is an A, as it lies, without .trans",
                    ),
                    "both-transposed": (
                        _tiles_transposed(p.double()) @ _tiles_transposed(filled),
                        "the 8 x 8 tiles of P are transposed, and those of V are not: P is an A, as it lies, without "
                        ".trans; V is a B by rows of keys, with .trans",
                    ),
                    "b-registers-exchanged": (
                        p.double() @ filled.roll(8, 0),
                        "b0 and b1 are exchanged: b0 has keys 0 to 7, b1 keys 8 to 15",
                    ),
                    "v-not-transposed and b-registers-exchanged": (
                        p.double() @ _tiles_transposed(filled.roll(8, 0)),
                        "b0 and b1 are exchanged: b0 has keys 0 to 7, b1 keys 8 to 15. And each register of B got two "
                        "dimensions of one key",
                    ),
                },
            )
    return f"{len(cases)} cases"


def _of_a_variant(failed: CheckFailed, in_fp16: Callable[[], Any]) -> CheckFailed:
    """What fails in bf16 with head_dim = 128, and is right in fp16 with 64: which of the two is it?"""
    case = failed.case or "bfloat16, head_dim=128"
    try:
        in_fp16()
    except CheckFailed as again:
        if failed.diagnosis == "does-not-compile" and again.diagnosis != failed.diagnosis:
            return failed
        sentence = (
            f"right with head_dim=64, wrong with 128, in either dtype ({failed}): is there a number that should follow "
            "HEAD_DIM, 64, or 8 for HEAD_DIM / 8, or 4 for HEAD_DIM / 16?"
        )
        return CheckFailed(sentence, diagnosis="head-dim-64-alone", case=case)
    sentence = (
        f"wrong in bfloat16, the same case is right in float16 ({failed}): is T used everywhere, mma_m16n8k16<T> and "
        "pack<T>, or __half somewhere?"
    )
    return CheckFailed(sentence, diagnosis="fp16-alone", case=case)


# ---- 7.7 ------------------------------------------------------------------------------------------------------------


def naive_loop() -> str:
    """What `p7_naive.cu` does with a tile of K and V in shared memory: the body of its loop, after the barrier."""
    return region(step("p7_naive"), "one tile")


@exercise(
    "7.7",
    title="The loop of the kernel",
    minutes=40,
    difficulty="Core",
    hints=[
        "S is exercise 7.3 twice, for keys 0-7 and 8-15 of the tile: k_smem + at(n * 8 + lane % 8, k * 16 + lane / "
        "8 % 2 * 8). Check early: a line that does not compile, or reads what nobody wrote, is named at once.",
        "For r = 0, 1 (row g + 8 r): mask s[n][2 * r + e] by its key, n_start + n * 8 + t * 2 + e; take the maximum "
        "with m_i[r]; two shuffles, 1 and "
        "2. correction = exp2_approx((old - new) * scale_log2), with 0 in place of a new maximum of -infinity.",
        "p = exp2_approx((s - max) * scale_log2); l_i[r] = l_i[r] * correction + the lane's own p; "
        "acc[n][2 * r] and [2 * r + 1] times "
        "correction. Then 7.5's packing, and for each n: ldmatrix_x2_trans(b, smem_u32(v_smem + at(lane % 16, n * "
        "8))).",
        "The lecture's section 10 has every part, and section 11 the whole.",
    ],
)
def _(loop: str) -> str:
    text = text_of(loop, "loop")
    if not text.strip():
        raise NotImplementedError
    whole = replaced(step("p7_naive"), "one tile", text)
    verdict = examine(whole)
    expect(
        verdict.counters["mma"] > 0,
        "the result is right, but there is no MMA in it: use the tensor cores",
        diagnosis="wrong-count",
        case="heads=2, kv_heads=1, seq_q=200, seq_k=200, head_dim=64, float16, causal",
    )
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, 77, 128, generator=generator).bfloat16() for _ in range(3))
    case = "bfloat16, head_dim=128, seq_q=seq_k=77, causal"

    def compared(dtype: torch.dtype = torch.bfloat16) -> None:
        __tracebackhide__ = True
        given, module = [x.to(dtype) for x in (q, k, v)], built(whole, check=False, head_dim=128, dtype=dtype)
        o, lse = ran(module, whole, case, lambda: module.forward(*given, causal=True, echo=False))
        want, want_lse = reference.attention(*given, causal=True)
        # Rounding of P and of the output, to 8 bits each.
        expect_close(o, want, what="o", tol=2e-2, case=case)
        expect_close(lse, want_lse, what="lse", tol=1e-4, case=case)

    try:
        compared()
    except CheckFailed as failed:
        raise _of_a_variant(failed, lambda: compared(torch.float16)) from None
    return f"{verdict.cases + 1} cases right, nothing found by the emulator"


# ---- 7.8 ------------------------------------------------------------------------------------------------------------


@exercise(
    "7.8",
    title="Row sums on the tensor core",
    minutes=20,
    difficulty="Stretch",
    hints=[
        "Every element of B is one. So what is in b0 and b1 of every lane, whatever the layout?",
        "pack<T>(1.f, 1.f) is two ones, in fp16 or in bf16. All eight columns of the product are the same: which "
        "of c0 to c3 hold row g's sum?",
        "float l[4] = {}; mma_m16n8k16<T>(l, a, ones, ones); lane t == 0 writes l[0] to row g and l[2] to row g + 8.",
    ],
)
def _(row_sums: str) -> str:
    answer = Answer(row_sums, "row_sums")
    for dtype in DTYPES:
        p, case = torch.rand(16, 16, generator=torch.Generator().manual_seed(8)), _name(dtype)

        def compared(check: bool, dtype: torch.dtype = dtype, p: Any = p) -> Counters:
            __tracebackhide__ = True
            wide, case = p.to(dtype).double(), _name(dtype)
            want, sums = wide.sum(1), marked(16)
            counters = answer.run(p.to(dtype), sums, case=case, check=check, dtype=dtype)
            expect_written(sums, "sum_gmem", case=case, because="lane t = 0 of each quad writes rows g and g + 8")
            expect_close(
                sums,
                want,
                what="sum_gmem",
                tol=1e-4,
                case=case,
                mistakes={
                    "half-of-the-columns": (
                        wide[:, ::2].sum(1),
                        "only every second column is in the sum: both halves of b0 and b1 have to be one",
                    ),
                    "eight-columns": (
                        wide[:, :8].sum(1),
                        "only columns 0 to 7 are in the sum: b1 has to be ones too",
                    ),
                    "fp16-ones": (
                        want / 128,
                        "the sum is 128 times too small: 0x3C00 is 1 in fp16 and 1/128 in bf16; pack<T>(1.f, 1.f) "
                        "is right in both",
                    ),
                    "bits-of-a-float": (
                        wide[:, 1::2].sum(1) * (1.875 if dtype == torch.float16 else 1),
                        "only odd columns are in the sum, times what half of the bits of a float 1 are: a register "
                        "of B holds two 16-bit numbers, pack<T>(1.f, 1.f)",
                    ),
                    "rows-exchanged": (want.roll(8), "the sums of the upper and the lower 8 rows are exchanged"),
                },
            )
            return counters

        for check in _builds(dtype):
            try:
                counters = compared(check)
            except CheckFailed as failed:
                if failed.diagnosis == "fp16-ones":
                    raise
                raise _in_fp16_too(failed, dtype, partial(compared, False, torch.float16)) from None
        expect(
            counters["mma"] == 1 and counters["shuffles"] == 0 and counters["ldmatrix"] == 1,
            f"the sums are right, with {counters['mma']} MMAs, {counters['shuffles']} shuffles and "
            f"{counters['ldmatrix']} ldmatrix; one MMA and "
            "the given ldmatrix will do",
            diagnosis="wrong-count",
            case=case,
        )
    return "fp16 and bf16, one MMA, no shuffle"


# ---- 7.10 -----------------------------------------------------------------------------------------------------------

COUNTED = 256  # rows of Q and of K: a multiple of the usual tiles
SLACK = 1.5  # times the MMAs that the products need: tiles that do not divide COUNTED, row sums on the tensor cores
CAUSAL = 0.8  # of the MMAs without a mask; tiles of 128 rows do 0.75


def _run_whole(whole: Source, head_dim: int, dtype: torch.dtype) -> tuple[float, float]:
    """Compares one variant with the oracle; returns FLOPs of its MMAs over those needed, and causal over all."""
    __tracebackhide__ = True
    module = built(whole, check=False, head_dim=head_dim, dtype=dtype)
    q, k, v = (_random(1, 1, COUNTED, head_dim, seed=seed).to(dtype) for seed in (1, 2, 3))
    flops = []
    for causal in (False, True):
        case = f"{_name(dtype)}, head_dim={head_dim}, seq_q=seq_k={COUNTED}{', causal' if causal else ''}"

        def call(causal: bool = causal) -> tuple[torch.Tensor, torch.Tensor]:
            return module.forward(q, k, v, causal=causal, echo=False)

        o, lse = ran(module, whole, case, call)
        want, want_lse = reference.attention(q, k, v, causal=causal)
        tol = 2e-2 if dtype == torch.bfloat16 else 4e-3  # P and the output are rounded, to 8 or to 11 bits
        expect_close(o, want, what="o", tol=tol, case=case)
        expect_close(lse, want_lse, what="lse", tol=1e-4, case=case)
        assert module.report is not None, "every run in the emulator leaves a report"
        flops.append(module.report.counters["mma_flops"])
    return flops[0] / (4 * COUNTED**2 * head_dim), flops[1] / max(1, flops[0])


@exercise(
    "7.10",
    title="An empty page",
    minutes=120,
    difficulty="Stretch",
    hints=[
        "Plan before you type. Which block has which rows of which head? What does a lane keep in registers from "
        "tile to tile (acc, two maxima, two sums), and what is in shared memory (a tile of Q, of K, of V)? Where does "
        "somebody read what another lane has written?",
        "Launch: ceil_div(p->seq_q, 16) blocks for each of batch * heads, 32 threads, the stream as the fourth "
        "argument. rows_of(p.q, p.q_stride, batch, head, row) is a pointer to a row; rows are p.q_stride.row "
        "elements apart. Copy uint4, 8 elements each; rows that do not exist become zeros.",
        "The loop: barrier, copy K and V, barrier. S as in 7.3, twice. Mask by the key's number, start + n * 8 + "
        "t * 2 + e. Row maxima with shuffles 1 and 2; correction = exp(old - new), with 0 in place of a new maximum "
        "of -infinity; acc and l times the correction; P; 7.5's packing; ldmatrix_x2_trans for V.",
        "Causal: the last row of the block sees the keys before first + 16 + seq_k - seq_q: stop there. Store: add up "
        "l over the quad, divide acc by it (0 where it is 0), write only rows below seq_q, pairs of columns as "
        "pack<T>. lse = m + log(l), of scaled scores, at (batch * heads + head) * seq_q + row.",
        "p7_naive.cu is one right answer: the lecture's section 11 has it on one page. Read it, close it, and write.",
    ],
)
def _(kernel: str) -> str:
    text = text_of(kernel, "kernel")
    if not text.strip():
        raise NotImplementedError
    whole = Source(text, "kernel", 1, len(text.splitlines()))
    expect(
        "forward" in entries(text),
        'there is no extern "C" int forward(const Problem* p, void* stream), which the check calls',
        diagnosis="wrong-entry",
    )
    expect_stored(whole)
    cases = examine(whole).cases
    expect_set(whole)

    def large(dtype: torch.dtype = torch.bfloat16) -> int:
        __tracebackhide__ = True
        return examine(whole, head_dim=128, dtype=dtype, probes=PROBES[:1], max_seq=150).cases

    try:
        cases += large()
    except CheckFailed as failed:
        raise _of_a_variant(failed, lambda: large(torch.float16)) from None
    for head_dim, dtype in ((64, torch.float16), (128, torch.bfloat16)):
        cases += 2
        share, causal = _run_whole(whole, head_dim, dtype)
        case = f"{_name(dtype)}, head_dim={head_dim}"
        said = "the result is right, but "
        expect(share > 0, f"{said}there is no MMA in it: use the tensor cores", diagnosis="wrong-count", case=case)
        expect(
            share > 0.99,
            f"{said}the MMAs do {share:.0%} of the two products: S = Q K^T and O = P V both belong on the tensor cores",
            diagnosis="wrong-count",
            case=case,
        )
        expect(
            share <= SLACK,
            f"{said}with {share:.1f} times the MMAs that the two products need: does every warp do the same tile, or "
            "is a product computed twice?",
            diagnosis="wrong-count",
            case=case,
        )
        expect(
            causal <= CAUSAL,
            f"{said}a causal mask leaves {causal:.0%} of the MMAs, where about half are needed: stop after the last "
            "tile that the block's last row sees",
            diagnosis="wrong-count",
            case=f"{case}, causal",
        )
    expect_wide(whole)
    mmas = "as many MMAs as needed" if share == 1 else f"{share:.4g} times the MMAs that the products need"
    return f"{cases} cases right, nothing found by the emulator, {mmas}"
