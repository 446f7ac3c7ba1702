"""Checks of phase 7: fragments, ldmatrix, single MMAs, the loop of the naive tensor-core kernel, a whole kernel.

CUDA answers are text. Each is built for the emulator twice, a check build first: a race, a read of what nobody wrote or
an address out of bounds is told with the learner's line. Then the numbers are compared with float64's, and with what
the known mistakes would have given.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
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
from flashlab.check.cuda_index import Trials, calls, explained
from flashlab.check.lookup import Row
from flashlab.check.mistakes.weights import counted, crossed
from flashlab.check.stored import expect_stored, expect_written, marked
from flashlab.cuda import CudaModule
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.figures import fragments
from flashlab.kernels.problem import ELEMENTS
from flashlab.kernels.series import step
from flashlab.simt import Counters
from flashlab.simt.sentences import KINDS
from flashlab.simt.source import entries

DTYPES = (torch.float16, torch.bfloat16)
LANES = range(32)


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


def _with(**macros: Any) -> Callable[[str], CudaModule]:
    """A watched build in fp16, with these macros."""

    def build(text: str) -> CudaModule:
        __tracebackhide__ = True
        return built(text, check=True, ELEMENT=ELEMENTS[torch.float16], **macros)

    return build


def _half(*shape: int, seed: int = 0) -> torch.Tensor:
    return _random(*shape, seed=seed).half()


_A = "q_smem + lane % 16 * D + d + lane / 16 * 8"
_STORED = ("(g + i / 2 * 8) * 8", "(g + (1 - i / 2) * 8) * 8")
_OF_LANES = {x: x for x in ("lane", "g", "t")}
_SCORES = [
    Row("rows-exchanged", "the upper and the lower 8 rows are exchanged: c0 and c1 are row g, c2 and c3 row g + 8",
        [_STORED]),
    Row("a-registers-exchanged", "a1 and a2 are exchanged: lanes 8 to 15 name rows 8 to 15 of columns 0 to 7, lanes 16 "
        "to 23 rows 0 to 7 of columns 8 to 15",
        [(_A, "q_smem + (lane % 8 + lane / 16 * 8) * D + d + lane / 8 % 2 * 8")]),
    Row("last-slice-only", "only the last 16 dimensions are in c: it has to add up over d",
        [("mma_m16n8k16<T>(c, a", "for (float& x : c) x = 0;\n        mma_m16n8k16<T>(c, a")]),
]  # fmt: skip
_WHY = {
    "d": "the addresses move with d", "ldmatrix_x2": "the rows of K are the columns of B already, so no .trans",
    "ldmatrix_x2_trans": "a register of B holds two keys of one column",
}  # fmt: skip
ONE_TILE = Trials(
    "7.3", _with(HEAD_DIM=48), [calls("run", _half(16, 48), _half(8, 48, seed=1), None, out=(16, 8))], words=_OF_LANES,
    most=900, notes=_WHY, rows=_SCORES,
)  # fmt: skip
ANY_EIGHT = Trials(
    "7.9", _with(HEAD_DIM=40), [calls("run", _half(16, 40), _half(8, 40, seed=1), None, out=(16, 8))], words=_OF_LANES,
    most=900, notes=_WHY, rows=[
        *_SCORES,
        Row("tail-alone", "only the last 8 dimensions are in the sum", [("d + 16 <= D", "d + 160 <= D")]),
        Row("tail-from-0", "the last step takes dimensions 0 to 7: what is left begins at column D - 8",
            [("lane % 16 * D + D - 8", "lane % 16 * D"), ("lane % 8 * D + D - 8", "lane % 8 * D")]),
    ],
)  # fmt: skip


def _check_scores(answer: Answer, cases: Sequence[tuple[int, torch.dtype]], tail: bool = False) -> None:
    """Runs Q K^T of 16 queries and 8 keys for each (head_dim, dtype); the first one's check build too."""
    __tracebackhide__ = True
    for number, (head_dim, dtype) in enumerate(cases):
        q, k = _random(16, head_dim, seed=head_dim).to(dtype), _random(8, head_dim, seed=head_dim + 1).to(dtype)
        case = f"D={head_dim}, {_name(dtype)}"

        def compared(
            check: bool, q: Any = q, k: Any = k, dtype: torch.dtype = dtype, head_dim: int = head_dim, case: str = case,
        ) -> Counters:  # fmt: skip
            __tracebackhide__ = True
            s = marked(16, 8)
            counters = answer.run(q.to(dtype), k.to(dtype), s, case=case, check=check, dtype=dtype, HEAD_DIM=head_dim)
            expect_written(s, "s_gmem", case=case)
            wide, slices = (q.double(), k.double()), (q.double()[:, None] * k.double()).unflatten(2, (-1, 8)).sum(3)
            said = counted(slices.flatten(0, 1), s.double().flatten(), 1e-3) or ""
            because = said if said.startswith("dimensions") else None  # a factor is seen by expect_close
            because = because or crossed(q, k, s, 1e-3)
            expect_close(s, wide[0] @ wide[1].T, what="s", tol=1e-4, case=case, because=because)
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
    answer = Answer(one_tile, "one_tile")
    with explained(lambda: answer.module(check=True, ELEMENT=ELEMENTS[torch.float16], HEAD_DIM=48), ONE_TILE):
        _check_scores(answer, [(48, torch.float16), (16, torch.float16), (64, torch.bfloat16)])
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
    answer = Answer(any_eight, "any_eight")
    with explained(lambda: answer.module(check=True, ELEMENT=ELEMENTS[torch.float16], HEAD_DIM=40), ANY_EIGHT):
        _check_scores(answer, cases, True)
    return "D = 8, 40 and 64, no MMA too many"


# ---- 7.4 ------------------------------------------------------------------------------------------------------------


STATISTICS = Trials(
    "7.4", lambda text: built(text, check=True),
    [calls("run", x, None, None, out=(16,)) for x in (_random(16, 8), _random(16, 8, seed=1).sort(1).values)],
    words=_OF_LANES, notes={"m": "the row lives in the four lanes of a quad", "l": "the row lives in four lanes"},
)  # fmt: skip


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
    with explained(lambda: answer.module(check=True), STATISTICS):
        return _expect_statistics(answer)


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
            expect_close(row_max, s.amax(1), what="row_max", case=case)
            expect_close(row_sum, torch.exp(s - s.amax(1, keepdim=True)).sum(1), what="row_sum", case=case, tol=1e-4)
    return f"{len(inputs)} inputs"


# ---- 7.5 ------------------------------------------------------------------------------------------------------------


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
            expect_close(o, rounded @ wide, what="P V", tol=1e-4, case=_name(dtype))
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
    with explained(lambda: answer.module(check=True, ELEMENT=ELEMENTS[torch.float16]), PV):
        return _expect_pv(answer)


_P13 = torch.where(torch.arange(16) < 13, _random(16, 16).abs(), 0.0).half()
PV = Trials(
    "7.6", _with(),
    [calls("run", _P13, _half(13, 64), None, 13, out=(16, 64)),
     calls("run", _half(16, 16), _half(16, 64), None, 16, out=(16, 64))],
    words=_OF_LANES, notes=_WHY | {"D": "a row of V has D numbers"},
)  # fmt: skip


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
            expect_close(o, p.double() @ filled, what="P V", tol=1e-4, case=case)
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
