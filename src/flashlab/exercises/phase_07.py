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
    VAGUE,
    Answer,
    Source,
    built,
    examine,
    expect_set,
    expect_variant,
    expect_wide,
    lines_of,
    normal,
    of_a_variant,
    ran,
    region,
    replaced,
    spelled,
    whole_kernel,
)
from flashlab.check.cuda_index import Trials, calls, examined, explained, forwards
from flashlab.check.lookup import Row
from flashlab.check.mistakes.weights import counted, crossed
from flashlab.check.stored import expect_results, expect_stored
from flashlab.cuda import CudaModule
from flashlab.exercises.phase_07_fragments import Factors, fragments_told, sums_told
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels.problem import ELEMENTS
from flashlab.kernels.series import step

DTYPES = (torch.float16, torch.bfloat16)
LANES = range(32)


def _builds(dtype: torch.dtype, first: bool = True) -> tuple[bool, ...]:
    """Which builds to run, watched or fast: both of the first case, then only fast ones, to save seconds."""
    return (True, False) if first and dtype == torch.float16 else (False,)


# ---- 7.1 ------------------------------------------------------------------------------------------------------------


_ELEMENTS = tuple(itertools.product(range(16), range(8)))
_LANE = "the lane is 4 g + t, and here it is 8 t + g: neighbours in t are neighbouring lanes"


def _element(r: random.Random) -> tuple[int, int]:
    return r.choice(_ELEMENTS)


@rule(
    "7.1",
    title="Who holds it?", minutes=10, difficulty="Warm-up",
    hints=[
        "C first: its row is g or g + 8, its column 2t or 2t + 1. So what of the row is g, and what says which of c0 "
        "c1 | c2 c3? In B, rows and columns change parts: the column is g.",
        "The lane is 4 g + t. For C: g = row % 8 and t = column // 2. For B: g = column and t = row % 8 // 2.",
        "B: (4 * column + row % 8 // 2, row // 8, row % 2). C: (4 * (row % 8) + column // 2, 2 * (row // 8) + column % "
        "2).",
    ],
    returns="lane, register, half",
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
    strict=True,
    inputs=_ELEMENTS,
    draw=_element,
    notes={
        "row % 8": "rows 8 to 15 are in the same lanes, in c2 and c3", "4": "the lane is 4 g + t",
        "row // 8": "c2 and c3 lie 8 rows below c0 and c1", "column % 2": "c0 and c1 are neighbours of one row",
        "column // 2": "c0 and c1 are neighbours of one row",
    },
    rows=[
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


def _tile_told(right: str) -> Callable[..., tuple[str, str] | None]:
    """Which 8 x 8 tile the first register that gets another one gets: its rows are named by eight lanes."""

    def told(learners: Callable[..., Any]) -> tuple[str, str] | None:
        for register in range(4):
            lanes = range(8 * register, 8 * register + 8)
            mine, wanted = ([tuple(fn(lane)) for lane in lanes] for fn in (learners, globals()[right]))
            if mine != wanted:
                here, there = (_tile_of(rows) for rows in (mine, wanted))
                return "wrong-tile", f"register {register}, whose rows lanes {lanes[0]} to {lanes[-1]} name, gets " + (
                    f"{here}: {there} belong there")  # fmt: skip
        return None

    return told


def _tile_of(rows: Sequence[tuple[int, int]]) -> str:
    key, dimension = rows[0]
    if rows == [(key + i, dimension) for i in range(8)]:
        return f"keys {key} to {key + 7}, dimensions {dimension} to {dimension + 7}"
    return f"rows from {', '.join(map(str, rows[:3]))} and so on"


@rule(
    "7.2",
    title="Thirty-two addresses", minutes=15,
    hints=[
        "Lanes 8 i to 8 i + 7 name the rows of the tile that arrives in register i. Write down, for each of the four "
        "registers, which keys and which dimensions its 8 x 8 tile has.",
        "K: registers 0 and 1 have the same keys and different dimensions; V: registers 0 and 1 have different keys "
        "and the same dimensions (.trans turns the tile around after it was named by its rows).",
        "K: (lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8). V: (lane % 16, lane // 16 * 8), which are A's addresses.",
    ],
    returns="key, dimension",
    strict=True,
    symptom=_tile_told("k_address"),
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
    strict=True,
    symptom=_tile_told("v_address"),
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


def _with(**macros: Any) -> Callable[..., CudaModule]:
    """A watched build in bf16, in which a forgotten <T> shows, with these macros."""
    return partial(built, check=True, ELEMENT=ELEMENTS[torch.bfloat16], **macros)


def _brief(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).bfloat16()


_LANES_16 = "ldmatrix_x2 takes the addresses of lanes 0 to 15 alone"
_COPIES = {
    "comes too late": "neither line needs the other", "remainder by `16` is missing: it is `lane`": _LANES_16,
}  # fmt: skip
_SLICES = _COPIES | {
    "in `d < D`": "d and D are multiples of 16", "remainder by `2`": _LANES_16,
    "`d + 16` is one too small": "d and D are multiples of 8", "remainder by `8`": "ldmatrix_x1 takes eight addresses",
    "`D` is one too large": "d and D are multiples of 8",
}  # fmt: skip
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
    "7.3", _with(HEAD_DIM=48), [calls("run", _brief(16, 48), _brief(8, 48, seed=1), None, out=(16, 8))],
    words=_OF_LANES, notes=_WHY, rows=_SCORES, equal=_SLICES,
)  # fmt: skip
ANY_EIGHT = Trials(
    "7.9", _with(HEAD_DIM=40), [calls("run", _brief(16, 40), _brief(8, 40, seed=1), None, out=(16, 8))],
    words=_OF_LANES, notes=_WHY, rows=[
        *_SCORES,
        Row("tail-alone", "only the last 8 dimensions are in the sum", [("d + 16 <= D", "d + 160 <= D")]),
        Row("tail-from-0", "the last step takes dimensions 0 to 7: what is left begins at column D - 8",
            [("lane % 16 * D + D - 8", "lane % 16 * D"), ("lane % 8 * D + D - 8", "lane % 8 * D")]),
    ],
    equal=_SLICES | dict.fromkeys(
        ("is missing: it is `D`", "`d + 16", "in `d + 16 <= D`", "`D % 16`"), "the check runs D = 8 and 64 too"
    ),
)  # fmt: skip


def _expect_scores(answer: Answer, cases: Sequence[tuple[int, torch.dtype]], tail: bool = False) -> None:
    """Runs Q K^T of 16 queries and 8 keys for each (head_dim, dtype); the first one's watched build too."""
    for number, (head_dim, dtype) in enumerate(cases):
        q, k = normal(16, head_dim, seed=head_dim).to(dtype), normal(8, head_dim, seed=head_dim + 1).to(dtype)
        case, wide = f"D={head_dim}, {spelled(dtype)}", (q.double(), k.double())

        def said(s: torch.Tensor, q: Any = q, k: Any = k, wide: Any = wide) -> str | None:
            slices = (wide[0][:, None] * wide[1]).unflatten(2, (-1, 8)).sum(3)
            sums = counted(slices.flatten(0, 1), s.double().flatten(), 1e-3) or ""
            return sums if sums.startswith("dimensions") else crossed(q, k, s, 1e-3)  # expect_close sees a factor

        c = expect_results(
            answer, [q, k, None], {"s_gmem": wide[0] @ wide[1].T}, case, checks=_builds(dtype, number == 0), tol=1e-4,
            said=said, dtype=dtype, HEAD_DIM=head_dim,
        )  # fmt: skip
        wanted = {"mma_m16n8k16": head_dim // 16, "mma_m16n8k8": head_dim % 16 // 8}
        for name, count in wanted.items():
            sentence = f"the result is right, with {c[name]} {name.removeprefix('mma_')} where {count} are wanted"
            expect(c[name] == count, sentence, diagnosis="wrong-count", case=case)
        loads = 2 * sum(wanted.values())
        sentence = f"the result is right, with {c['ldmatrix']} ldmatrix where {loads} are wanted: one for A and one "
        sentence += "for "
        right = c["ldmatrix"] <= loads if tail else c["ldmatrix"] == loads
        expect(right, sentence + "B for each MMA", diagnosis="wrong-count", case=case)


@exercise(
    "7.3",
    title="One tile of S",
    minutes=20,
    hints=[
        "A are 16 rows and 16 columns of q_smem, from column d on: lane l names row l % 16, at column d + l / 16 * 8. "
        "B is the transposed K tile: which rows does ldmatrix_x2 want, and with or without trans?",
        "ldmatrix_x2(b, smem_u32(k_smem + lane % 8 * D + d + lane / 8 % 2 * 8)): keys 0 to 7; dimensions d to d + 7 in "
        "b[0], the next eight in b[1]. Then mma_m16n8k16<T>(c, a, b[0], b[1]).",
        "c[i] is row g + i / 2 * 8, column t * 2 + i % 2, and a row of s_gmem has 8 elements.",
    ],
)
def tile_of_scores(one_tile: str) -> str:
    answer = Answer(one_tile, "one_tile")
    factors = Factors("Q", "K", "S", 48, torch.float16, True, {"HEAD_DIM": 48})
    with fragments_told(answer, factors), explained(lambda: ONE_TILE.build(answer.whole), ONE_TILE):
        _expect_scores(answer, [(48, torch.float16), (16, torch.float16), (64, torch.bfloat16)])
    return "D = 16, 48 and 64, with D/16 MMAs"


@exercise(
    "7.9",
    title="A head dimension of 40",
    minutes=25,
    difficulty="Stretch",
    hints=[
        "The loop of 7.3, while 16 dimensions are left: for (int d = 0; d + 16 <= D; d += 16). What remains begins at "
        "column D - 8.",
        "m16n8k8's A is 16 rows of 8 columns: two 8 x 8 tiles, one above the other, so ldmatrix_x2 with row lane % 16. "
        "Its B is one tile.",
        "if (D % 16) { ldmatrix_x2(a, q_smem + lane % 16 * D + D - 8); ldmatrix_x1(b, k_smem + lane % 8 * D + D - 8); "
        "mma_m16n8k8<T>(c, a, b[0]); } with smem_u32 around the addresses.",
    ],
)
def scores_of_any_eight(any_eight: str) -> str:
    answer = Answer(any_eight, "any_eight")
    with explained(lambda: ANY_EIGHT.build(answer.whole), ANY_EIGHT):
        _expect_scores(answer, [(40, torch.float16), (8, torch.bfloat16), (64, torch.bfloat16)], True)
    return "D = 8, 40 and 64, no MMA too many"


# ---- 7.4 ------------------------------------------------------------------------------------------------------------


STATISTICS = Trials(
    "7.4", partial(built, check=True),
    [calls("run", x, None, None, out=(16,)) for x in (normal(16, 8), normal(16, 8, seed=1).sort(1).values)],
    words=_OF_LANES, notes={"m": "the row lives in the four lanes of a quad", "l": "the row lives in four lanes"},
    equal=dict.fromkeys(("`t == 0`", "`t != 0`", "`t <= 0`", "`t >= 0`"), "each lane of a quad has both") | {
        "__shfl_down_sync": "lane t = 0 alone stores the sum", "__expf": "it differs by a rounding",
    },
)  # fmt: skip


@exercise(
    "7.4",
    title="Four lanes, one maximum",
    minutes=15,
    difficulty="Bug hunt",
    bug=[("m, 0b10", "m, 0x10")],
    untouched="f25b4eb82615",
    history="a common mistake",
    hints=[
        "A lane holds two columns of its row. After the first exchange it knows four of the eight columns. Which lane "
        "has the other four?",
        "Lanes t and t ^ 2 of a quad differ in bit 1 of the lane number. Which number has only bit 1 set, and which "
        "one is in the code?",
        "0x10 is sixteen: lane ^ 16 is four rows away. 0b10 is two.",
    ],
)
def statistics(row_statistics: str) -> str:
    answer = Answer(row_statistics, "row_statistics")
    inputs = {"random scores": normal(16, 8), "rising scores": torch.arange(128.0).reshape(16, 8) / 8}
    inputs["the maximum in column 7"] = torch.where(torch.arange(8) == 7, 3.0, -1.0).repeat(16, 1) + normal(16, 1) * 2
    with explained(lambda: STATISTICS.build(answer.whole), STATISTICS):
        for case, s in inputs.items():
            top = s.amax(1)
            want = {"row_max": top, "row_sum": torch.exp(s - top[:, None]).sum(1)}
            expect_results(answer, [s, None, None], want, case, tol=1e-4)
    return f"{len(inputs)} inputs"


# ---- 7.5 ------------------------------------------------------------------------------------------------------------

SECOND_PRODUCT = Trials(
    "7.5", _with(), [calls("run", normal(16, 16).abs(), _brief(16, 8), None, out=(16, 8))],
    words={x: x for x in ("lane", "g", "t", "c", "d")},
    equal=_COPIES,
    rows=[
        Row("halves-exchanged", "the two numbers of each register are exchanged: it is pack<T>(low, high), and column "
            "2t is the low one", [(f"pack<T>({x}[{i}], {x}[{i + 1}])", f"pack<T>({x}[{i + 1}], {x}[{i}])")
                                  for x in "cd" for i in (0, 2)]),
        Row("interleaved", "each register has a number of c and one of d: its two are neighbours of a row, c[0] and "
            "c[1]", [(f"pack<T>({a})", f"pack<T>({b})") for a, b in (
                ("c[0], c[1]", "c[0], d[0]"), ("c[2], c[3]", "c[1], d[1]"), ("d[0], d[1]", "c[2], d[2]"),
                ("d[2], d[3]", "c[3], d[3]"))]),
    ],
)  # fmt: skip


@exercise(
    "7.5",
    title="P becomes A",
    minutes=15,
    hints=[
        "Register r of A is row g + 8 (r % 2), columns 2t + 8 (r // 2) and the next, as in 7.1. Where are these in c "
        "and d?",
        "a[0] is row g, columns 2t and 2t + 1, which are c[0] and c[1]. a[1] is eight rows below: c[2] and c[3]. a[2] "
        "is eight columns to the right of a[0].",
        "a[0] = pack<T>(c[0], c[1]); a[1] = pack<T>(c[2], c[3]); a[2] = pack<T>(d[0], d[1]); a[3] = pack<T>(d[2], "
        "d[3]);",
    ],
)
def fragment_of_p(second_product: str) -> str:
    answer = Answer(second_product, "second_product")
    factors = Factors("P", "V", "O", 16, torch.float32, False)
    with fragments_told(answer, factors), explained(lambda: SECOND_PRODUCT.build(answer.whole), SECOND_PRODUCT):
        for dtype in DTYPES:
            p, v, case = normal(16, 16, seed=5).abs(), normal(16, 8).to(dtype), spelled(dtype)
            want = {"P V": p.to(dtype).double() @ v.double()}
            c = expect_results(answer, [p, v, None], want, case, checks=_builds(dtype), tol=1e-4, dtype=dtype)
            sentence = f"right, but with {c['shuffles']} shuffles: no lane needs another lane's numbers"
            expect(c["shuffles"] == 0, sentence, diagnosis="wrong-count", case=case)
            sentence = "right, but P goes through shared memory: each lane has its numbers in registers already"
            direct = c["ldmatrix"] == 1 and answer.whole.text.count("__shared__") == 1
            expect(direct, sentence, diagnosis="wrong-count", case=case)
    return "fp16 and bf16, no shuffle"


# ---- 7.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "7.6",
    title="Two bugs in P V",
    minutes=20,
    difficulty="Bug hunt",
    bug=[
        ("16 * D; i += 32) v_smem[i] = i < keys * D ? v_gmem[i] : T(0.f)", "keys * D; i += 32) v_smem[i] = v_gmem[i]"),
        ("ldmatrix_x2_trans(b", "ldmatrix_x2(b"),
    ],
    untouched="28d61c57e0a1",
    history="0 times NaN: pytorch/pytorch, issue 101967 (2023); .trans is a common mistake",
    hints=[
        "What the emulator calls uninitialised holds anything, also the bits of a NaN. What is 0 times NaN?",
        "The missing rows of V have to be zeros in shared memory. And then: a register of B holds two neighbours of a "
        "column of V. Which two numbers does ldmatrix without .trans put into a register?",
        "Copy 16 * D elements, T(0.f) where i >= keys * D; and ldmatrix_x2_trans.",
    ],
)
def product_with_v(pv: str) -> str:
    answer = Answer(pv, "pv")
    cases = [(13, torch.float16), (16, torch.float16), (1, torch.float16), (9, torch.bfloat16)]
    with explained(lambda: PV.build(answer.whole), PV):
        for keys, dtype in cases:
            p, v = normal(16, 16, seed=keys).abs(), normal(keys, 64, seed=keys).to(dtype)
            p[:, keys:] = 0
            p = p.to(dtype)
            want = {"P V": p[:, :keys].double() @ v.double()}
            case = f"{keys} keys, {spelled(dtype)}"
            expect_results(answer, [p, v, None, keys], want, case, checks=_builds(dtype), tol=1e-4, dtype=dtype)
    return f"{len(cases)} cases"


_P13 = torch.where(torch.arange(16) < 13, normal(16, 16).abs(), 0.0).bfloat16()
PV = Trials(
    "7.6", _with(),
    [calls("run", _P13, _brief(13, 64), None, 13, out=(16, 64)),
     calls("run", _brief(16, 16), _brief(16, 64), None, 16, out=(16, 64))],
    words=_OF_LANES, notes=_WHY | {"D": "a row of V has D numbers"},
    equal=_COPIES | {"in `T(0)`": "P is 0 there, and 0 times a number is 0"},
)  # fmt: skip


# ---- 7.7 ------------------------------------------------------------------------------------------------------------


_OF_THE_MASK = dict.fromkeys(
    ("above `p.seq_k", "`-1` is missing", "`1` has the wrong sign", "before it is limited"),
    "no row that exists sees a key past the last one",
) | {"__half": "the check runs bfloat16 too", "remainder by `16`": _LANES_16}
_SHAPES = ((1, 2, 1, 20, 40, True), (1, 1, 1, 16, 24, False), (1, 1, 1, 40, 20, True))
_FALLS = forwards((1, 1, 1, 16, 80, False), dtype=torch.float16, fall=150)
_RUNS = [*(forwards(x, dtype=torch.float16) for x in _SHAPES), _FALLS]
LOOP = Trials(
    "7.7", partial(built, check=True), _RUNS, region=True, tol=1e-3, most=400,
    place=lambda text: replaced(step("p7_naive"), "one tile", text).text,
    words={x: x for x in ("m_new", "base", "correction", "last_key", "row", "x", "c", "d")},
    equal=_OF_THE_MASK | {
        "warp_row": "there is one warp, and its first row is 0",
        "`n < S_TILES`": "what is behind an array of registers is not seen",
        "outside of `smem_u32`": "the address is a number of bytes",
        "MMA_K` is missing": "BLOCK_N is MMA_K: k is 0", "BLOCK_N / MMA_K": "both are 16",
        "`BLOCK_M` stands": "both are 16, as the page says",
        "`m_i[r]` is one too": "P and what is summed are under the same number",
        "are exchanged, in `fmaf": "a product has no order",
        "remainder by `2`": _LANES_16,
    },
    notes={
        "correction": "what was summed under the old maximum is brought under the new one",
        "scale_log2": "2^x is taken of scores times the scale and log2(e)",
    },
)  # fmt: skip


_RIGHT, _USE = "the result is right, but", "use the tensor cores"


def naive_loop() -> str:
    """What `p7_naive.cu` does with a tile of K and V in shared memory: the body of its loop, after the barrier."""
    return region(step("p7_naive"), "one tile")


@exercise(
    "7.7",
    title="The loop of the kernel",
    minutes=40,
    hints=[
        "S is exercise 7.3 twice, for keys 0-7 and 8-15 of the tile: k_smem + at(n * 8 + lane % 8, k * 16 + lane / 8 % "
        "2 * 8). Check early: a line that does not compile, or reads what nobody wrote, is named at once.",
        "For r = 0, 1 (row g + 8 r): mask s[n][2 * r + e] by its key, n_start + n * 8 + t * 2 + e; take the maximum "
        "with m_i[r]; two shuffles, 1 and 2. correction = exp2_approx((old - new) * scale_log2), with 0 in place of a "
        "new maximum of -infinity.",
        "p = exp2_approx((s - max) * scale_log2); l_i[r] = l_i[r] * correction + the lane's own p; acc[n][2 * r] and "
        "[2 * r + 1] times correction. Then 7.5's packing, and for each n: ldmatrix_x2_trans(b, smem_u32(v_smem + "
        "at(lane % 16, n * 8))).",
        "The lecture's section 10 has every part, and section 11 the whole.",
    ],
)
def loop_of_the_kernel(loop: str) -> str:
    whole = replaced(step("p7_naive"), "one tile", lines_of(loop, "loop"))
    verdict = examined(whole, LOOP)
    case = "heads=2, kv_heads=1, seq_q=200, seq_k=200, head_dim=64, float16, causal"
    expect(verdict.counters["mma"] > 0, f"{_RIGHT} there is no MMA in it: {_USE}", diagnosis="wrong-count", case=case)
    expect_variant(whole, head_dim=128)
    return f"{verdict.cases + 1} cases right, nothing found by the emulator"


# ---- 7.8 ------------------------------------------------------------------------------------------------------------

ROW_SUMS = Trials(
    "7.8", _with(), [calls("run", normal(16, 16).abs().bfloat16(), None, out=(16,))], words=_OF_LANES,
    equal=_COPIES | dict.fromkeys(
        ("`l[", "t == 0", "`lane % 4`", "3 stands where 2"),
        "every column of the product holds the row's sum, in every lane of a quad",
    ),
    rows=[
        Row("fp16-ones", "the sum is 128 times too small: 0x3C00 is 1 in fp16 and 1/128 in bf16; pack<T>(1.f, 1.f) is "
            "right in both", [("pack<T>(1.f, 1.f)", "0x3C003C00u")]),
        Row("half-of-the-columns", "only every second column is in the sum: both halves of b0 and b1 have to be one",
            [("pack<T>(1.f, 1.f)", "pack<T>(1.f, 0.f)")]),
        Row("eight-columns", "only columns 0 to 7 are in the sum: b1 has to be ones too",
            [("a, ones, ones", "a, ones, 0u")]),
        Row("bits-of-a-float", "only odd columns are in the sum, times what half of the bits of a float 1 are: a "
            "register of B holds two 16-bit numbers, pack<T>(1.f, 1.f)", [("pack<T>(1.f, 1.f)", "0x3F800000u")]),
    ],
)  # fmt: skip


@exercise(
    "7.8",
    title="Row sums on the tensor core",
    minutes=20,
    difficulty="Stretch",
    hints=[
        "Every element of B is one. So what is in b0 and b1 of every lane, whatever the layout?",
        "pack<T>(1.f, 1.f) is two ones, in fp16 or in bf16. All eight columns of the product are the same: which of c0 "
        "to c3 hold row g's sum?",
        "float l[4] = {}; mma_m16n8k16<T>(l, a, ones, ones); lane t == 0 writes l[0] to row g and l[2] to row g + 8.",
    ],
)
def sums_by_mma(row_sums: str) -> str:
    answer = Answer(row_sums, "row_sums")
    for dtype in DTYPES:
        p, case = normal(16, 16, seed=8).abs().to(dtype), spelled(dtype)
        want, why = {"sum_gmem": p.double().sum(1)}, "lane t = 0 of each quad writes rows g and g + 8"
        with sums_told(answer), explained(lambda: ROW_SUMS.build(answer.whole), ROW_SUMS):
            c = expect_results(
                answer, [p, None], want, case, checks=_builds(dtype), tol=1e-4, because=why, dtype=dtype
            )  # fmt: skip
        sentence = f"the sums are right, with {c['mma']} MMAs, {c['shuffles']} shuffles and {c['ldmatrix']} ldmatrix; "
        few = c["mma"] == 1 and c["shuffles"] == 0 and c["ldmatrix"] == 1
        expect(few, sentence + "one MMA and the given ldmatrix will do", diagnosis="wrong-count", case=case)
    return "fp16 and bf16, one MMA, no shuffle"


# ---- 7.10 -----------------------------------------------------------------------------------------------------------

WHOLE = Trials(
    "7.10", partial(built, check=True), _RUNS, tol=1e-3, most=400,
    words={x: x for x in ("lane", "g", "t", "first", "head", "last", "base")},
    equal=_OF_THE_MASK | {
        "by `p.heads`": "the check runs two batches", "by `p.kv_heads`": "the check runs 2 heads of K for 6 of Q",
        "`t == 0`": "each lane of a quad has the row's lse",
    },
)  # fmt: skip

COUNTED = 256  # rows of Q and of K: a multiple of the usual tiles
SLACK = 1.5  # times the MMAs that the products need: tiles that do not divide COUNTED
CAUSAL = 0.8  # of the MMAs without a mask; tiles of 128 rows do 0.75


def _run_whole(whole: Source, head_dim: int, dtype: torch.dtype) -> tuple[float, float, bool, bool]:
    """Compares one variant with the oracle. Returns FLOPs of its MMAs over those needed, causal over all, whether some
    are beside the tiles that are needed, and whether there are more of them under a mask, where it hides no tile."""
    module = built(whole, check=False, head_dim=head_dim, dtype=dtype)
    q, k, v = normal(3, 1, 1, COUNTED, head_dim, seed=1).to(dtype)
    flops, need = [], 4 * COUNTED**2 * head_dim
    for keys, causal in ((COUNTED, False), (COUNTED, True), (COUNTED // 2, False)):
        given, case = (q, k[:, :, :keys], v[:, :, :keys]), f"{spelled(dtype)}, head_dim={head_dim}, seq_q={COUNTED}, "
        case += f"seq_k={keys}{', causal' if causal else ''}"
        o, lse = ran(module, whole, case, partial(module.forward, *given, causal=causal, echo=False))
        want, want_lse = reference.attention(*given, causal=causal)
        tol = 2e-2 if dtype == torch.bfloat16 else 4e-3  # P and the output are rounded, to 8 or to 11 bits
        expect_close(o, want, what="o", tol=tol, case=case)
        expect_close(lse, want_lse, what="lse", tol=1e-4, case=case)
        assert module.report is not None, "every run in the emulator leaves a report"
        flops.append(module.report.counters["mma_flops"])
    beside = flops[0] > need and flops[0] - flops[2] == need // 2  # as many more with fewer keys
    few = []
    for causal in (False, True):
        given = q[:, :, :20], k[:, :, :32], v[:, :, :32]
        ran(module, whole, "seq_q=20, seq_k=32", partial(module.forward, *given, causal=causal, echo=False))
        few.append(module.report.counters["mma_flops"])  # type: ignore[union-attr]
    return flops[0] / need, flops[1] / max(1, flops[0]), beside, few[1] > few[0]


@exercise(
    "7.10",
    title="An empty page",
    minutes=120,
    difficulty="Stretch",
    hints=[
        "Plan before you type. Which block has which rows of which head? What does a lane keep in registers from tile "
        "to tile (acc, two maxima, two sums), and what is in shared memory (a tile of Q, of K, of V)? Where does "
        "somebody read what another lane has written?",
        "Launch: ceil_div(p->seq_q, 16) blocks for each of batch * heads, 32 threads, the stream as the fourth "
        "argument. rows_of(p.q, p.q_stride, batch, head, row) is a pointer to a row; rows are p.q_stride.row elements "
        "apart. Copy uint4, 8 elements each; rows that do not exist become zeros.",
        "The loop: barrier, copy K and V, barrier. S as in 7.3, twice. Mask by the key's number, start + n * 8 + t * 2 "
        "+ e. Row maxima with shuffles 1 and 2; correction = exp(old - new), with 0 in place of a new maximum of "
        "-infinity; acc and l times the correction; P; 7.5's packing; ldmatrix_x2_trans for V.",
        "Causal: the last row of the block sees the keys before first + 16 + seq_k - seq_q: stop there. Store: add up "
        "l over the quad, divide acc by it (0 where it is 0), write only rows below seq_q, pairs of columns as "
        "pack<T>. lse = m + log(l), of scaled scores, at (batch * heads + head) * seq_q + row.",
        "p7_naive.cu is one right answer: the lecture's section 11 has it on one page. Read it, close it, and write.",
    ],
)
def whole_forward(kernel: str) -> str:
    whole = whole_kernel(kernel, "kernel")
    with explained(lambda: built(whole, check=True), WHOLE, vague=VAGUE):
        expect_stored(whole)
    cases = examined(whole, WHOLE, LOOP).cases
    expect_set(whole)

    def large(dtype: torch.dtype = torch.bfloat16) -> int:
        return examine(whole, head_dim=128, dtype=dtype, probes=PROBES[:1], max_seq=150).cases

    try:
        cases += large()
    except CheckFailed as failed:
        raise of_a_variant(failed, 128, lambda: large(torch.float16)) from None
    for head_dim, dtype in ((64, torch.float16), (128, torch.bfloat16)):
        cases += 2
        share, causal, beside, past = _run_whole(whole, head_dim, dtype)
        case = f"{spelled(dtype)}, head_dim={head_dim}"
        wrong = [
            (share == 0, f"there is no MMA in it: {_USE}"),
            (share <= 0.99, f"the MMAs do {share:.0%} of the two products: S = Q K^T and O = P V both belong on the "
             "tensor cores"),
            (beside, f"with {share - 1:.2%} more MMAs than the two products need, as many however many keys there are: "
             "is there an MMA beside the loop, or a tile too many?"),
            (share > SLACK, f"with {share:.4g} times the MMAs that the two products need: does every warp do the same "
             "tile, or is a product computed twice?"),
            (causal > CAUSAL, f"a causal mask leaves {causal:.0%} of the MMAs, where about half are needed: stop after "
             "the last tile that the block's last row sees"),
            (past, "for 20 queries and 32 keys a causal mask takes more MMAs than none: the loop goes past the last "
             "key"),
        ]  # fmt: skip
        for holds, sentence in wrong:
            expect(not holds, f"{_RIGHT} {sentence}", diagnosis="wrong-count", case=case)
    expect_wide(whole)
    mmas = "as many MMAs as needed" if share == 1 else f"{share:.4g} times the MMAs that the products need"
    return f"{cases} cases right, nothing found by the emulator, {mmas}"
