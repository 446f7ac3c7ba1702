"""Checks of phase 3: the pieces of a Triton kernel, then the minimal FlashAttention kernel itself.

A kernel that is handed in is run on small inputs with every address checked, then on the checker's cases, and then it
is given to the real compiler, which accepts less than the interpreter.
"""

# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.triton_minimal import (
    LOG2_E,
    compile_arguments,
    flash_attention_forward,
    flash_attention_forward_kernel,
)
from flashlab.check import CheckFailed, expect, expect_close, verify_one_head
from flashlab.check.claims import tokens_of
from flashlab.check.lookup import Row
from flashlab.check.verification import Report
from flashlab.exercises.kernel_rule import apart, empty, kernel_rule
from flashlab.exercises.phase_01 import SIZES, mended_to, of_one_head, some_sizes
from flashlab.exercises.phase_02 import random_tensors
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.exercises.tensor_rule import normal, part, tensor_rule
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of
from flashlab.triton_tools.watch import hbm_traffic

FORWARD_PARAMETERS = tuple(inspect.signature(flash_attention_forward_kernel.fn).parameters)


def _forward(kernel: Any) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) that launches `kernel` as the package's launcher does, with small tiles."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        case = f"M={len(q)}, N={len(k)}, BLOCK_M = BLOCK_N = 32"
        with in_bounds(case, q=q, k=k, v=v) as traffic:
            o, lse = flash_attention_forward(q, k, v, scale, 32, 32, kernel=kernel)
        explain_undefined(traffic, o, case)
        return o, lse

    return forward


def _launcher(kernel: Any) -> Callable[..., Any]:
    """A plain function around `kernel`, whose source hbm_traffic can take to a process that interprets."""

    def launch(q, k, v):
        return flash_attention_forward(q, k, v, BLOCK_M=32, BLOCK_N=32, kernel=kernel)

    return launch


# ---- 3.1 ------------------------------------------------------------------------------------------------------------


def _layouts(r: random.Random, rows: int, cols: int, which: str) -> tuple[Any, ...]:
    """copy_tile_kernel's arguments, x and y laid out in memory as `which` says."""
    x = normal(r, rows, cols, dtype=torch.float32)
    y = empty(cols, rows).T if "transposed destination" in which else empty(rows, cols)
    if "transposed source" in which:
        x = x.T.contiguous().T
    if "every second column" in which:
        x = torch.stack([x, torch.full_like(x, math.nan)], dim=2).reshape(rows, 2 * cols)[:, ::2]
    return x, y, *x.stride(), *y.stride(), rows, cols


_ORDERS = ("contiguous", "a transposed source", "a transposed destination", "every second column of a wider matrix")
_OWN = "each matrix has strides of its own, and each stride its own index"


@kernel_rule(
    "3.1",
    title="A tile's addresses", minutes=10, difficulty="Warm-up",
    hints=[
        "`tl.arange(0, ROWS)` is the row numbers, `tl.arange(0, COLS)` the column numbers. Which of them becomes a "
        "column (`[:, None]`), which a row (`[None, :]`)?",
        "address = pointer + row number * stride of a row + column number * stride of a column.",
        "x_ptrs = x_ptr + rows[:, None] * stride_xr + cols[None, :] * stride_xc, and the same for y. Then "
        "tl.store(y_ptrs, tl.load(x_ptrs)).",
    ],
    writes="y_ptr",
    returns="y",
    inputs={f"{which}, {rows} × {cols}": _layouts(random.Random(rows), rows, cols, which)
            for rows, cols in ((8, 16), (32, 4)) for which in _ORDERS},
    draw=lambda r: _layouts(r, r.choice((4, 8, 16)), r.choice((4, 8, 16)), r.choice(_ORDERS)),
    notes=dict.fromkeys(("stride_xr", "stride_xc", "stride_yr", "stride_yc"), _OWN),
    rows=[
        Row("strides-exchanged", "x's strides are exchanged: a row's number goes with the stride from row to row",
            [("rows[:, None] * stride_xr", "rows[:, None] * stride_xc"),
             ("cols[None, :] * stride_xc", "cols[None, :] * stride_xr")]),
        Row("columns-side-by-side", "the strides from column to column are taken for 1, in x and in y",
            [(" * stride_xc", ""), (" * stride_yc", "")]),
        *(Row("strides-ignored", f"{x} is taken to be contiguous: its strides say where its rows and columns lie", [
            (f"rows[:, None] * stride_{x}r", "rows[:, None] * COLS"),
            (f"cols[None, :] * stride_{x}c", "cols[None, :]")]) for x in "xy"),
        Row("never-written", "nothing is ever stored to y", [("tl.store(y_ptrs, tl.load(x_ptrs))", "tl.load(x_ptrs)")]),
    ],
)  # fmt: skip
@triton.jit
def copy_tile_kernel(
    x_ptr, y_ptr, stride_xr, stride_xc, stride_yr, stride_yc, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    # BEGIN SOLUTION
    x_ptrs = x_ptr + rows[:, None] * stride_xr + cols[None, :] * stride_xc
    y_ptrs = y_ptr + rows[:, None] * stride_yr + cols[None, :] * stride_yc
    tl.store(y_ptrs, tl.load(x_ptrs))
    # END SOLUTION


# ---- 3.2 ------------------------------------------------------------------------------------------------------------


def _base_2(r: random.Random, size: float = 8.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum and the sum of rows of base-2 scores."""
    s = normal(r, 5, 40, dtype=torch.float32) * size * LOG2_E
    m = s.amax(1)
    return m, torch.exp2(s - m[:, None]).sum(1)


_BASES = "from base 2 to base e it is times ln 2 = 0.6931, and m and log2(l) are both in base 2"


def _growth(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """By how much a row's lse grows with each of its parts, where that is wrong."""
    m, l = torch.tensor([3.0, 40.0]), torch.tensor([1.5, 5.0])
    for what, more, why in (
        ("where m is 1 larger", (m + 1, l), "2^m is twice as much"),
        ("where l is twice as large", (m, 2 * l), "so is the row's total"),
    ):
        grown = (answer(*more) - answer(m, l)).tolist()
        if any(abs(x - math.log(2)) > 1e-3 for x in grown):
            said = f"{what}, {why}, and its natural logarithm ln 2 = 0.6931 larger; yours is {grown[0]:.4g} larger"
            return "wrong-base", said + f" (m = 3, l = 1.5), or {grown[1]:.4g} (m = 40, l = 5)"
    return None


def _twice(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """What twice the scale gives, where that is not twice as much."""
    one, two = answer(0.5), answer(1.0)
    if abs(two - 2 * one) < 1e-6 * abs(two):
        return None
    said = f"for a scale of 0.5 it is {one:.6g}, for one of 1 {two:.6g}: it should be twice as much"
    return "not-proportional", f"{said}, as 2^(scale_log2 · qk) is exp(scale · qk) for every qk"


@part(
    "3.2",
    returns="natural_lse",
    inputs={"scores near 0": _base_2(random.Random(0)), "scores of 1000": _base_2(random.Random(0), 800.0)},
    draw=_base_2,
    also=["m * math.log(2) + torch.log(l)"],
    nan={"1000": "is 2^m computed? It overflows"},
    symptom=_growth,
    notes={"math.log(2)": _BASES, "torch.log2": _BASES, "torch.log2(l)": "a sum of 2^x is in base 2 too"},
    tol=1e-3,
    on_device=True,
)
def natural_lse(m, l):
    # BEGIN SOLUTION
    return (m + torch.log2(l)) * math.log(2)
    # END SOLUTION


@tensor_rule(
    "3.2",
    title="Into base 2 and back", minutes=10, difficulty="Warm-up",
    hints=[
        "exp(x) = 2^(x · log2 e). Which factor does `scale` need so that 2^(scale_log2 · qk) is exp(scale · qk)?",
        "The kernel's m is a maximum of base-2 scores, so it is log2(e) times the natural one. log2(l) is a base-2 "
        "logarithm too. Their sum is log2 of the row's total.",
        "scale_log2 = scale * log2(e); lse = (m + log2(l)) * ln(2), and ln(2) = 1 / log2(e).",
    ],
    parts=["natural_lse"],
    returns="scale_log2",
    inputs={f"scale = {scale}": (scale,) for scale in (0.3, 1.0, 0.125)},
    draw=lambda r: (r.choice((0.5, 0.088, r.uniform(0.01, 3))),),
    also=["scale / math.log(2)"],
    symptom=_twice,
    notes={"scale * math.log2(math.e)": "the factor is log2(e) = 1.4427, not its inverse, ln 2",
           "math.log2(math.e)": "2^(scale · qk) is not exp(scale · qk)", "math.log2": "the factor is log2(e) = 1.4427",
           "math.log(2)": "the factor is log2(e) = 1 / ln 2 = 1.4427"},
    rows=[
        Row("exponential", "that is 2^scale; the scale is multiplied by log2(e)", instead="2.0**scale"),
    ],
    tol=1e-6,
)  # fmt: skip
def scale_log2(scale):
    # BEGIN SOLUTION
    return scale * math.log2(math.e)
    # END SOLUTION


# ---- 3.3 ------------------------------------------------------------------------------------------------------------


def _rows_apart(r: random.Random, rows: int, N: int, level: str = "near 0") -> tuple[Any, ...]:
    """row_lse_kernel's arguments: rows of N scores, apart in memory."""
    x = normal(r, rows, N, dtype=torch.float32)
    ramp = torch.linspace(0, 300, N)
    x = {"falling by 300": x - ramp, "rising by 300": x + ramp, "all 2": torch.full_like(x, 2.0)}.get(level, 3 * x)
    x = apart(x + (float(level.removeprefix("near ")) if level.startswith("near") else 0.0), 39)
    return x, empty(rows), x.stride(0), N, 32


_LEVELS = ("near 0", "near -5", "near 300", "falling by 300", "rising by 300", "near -3.39e38", "all 2")
_AGAIN = "the address has to move with start"


@kernel_rule(
    "3.3",
    title="The log-sum-exp of a row of any length", minutes=20,
    hints=[
        "One block is `tl.load(x_ptr + row * stride + offs, mask=offs < N, other=...)`. What must a missing element "
        "be, so that it changes neither a maximum nor a sum of exponentials?",
        'other=float("-inf"). Then m_new = tl.maximum(m, tl.max(x, 0)) and l = l * tl.exp(m - m_new) + '
        "tl.sum(tl.exp(x - m_new), 0).",
        "Keep m and l as scalars: m starts at -inf (given), l at 0. Set m = m_new last. After the loop store "
        "m + tl.log(l).",
    ],
    writes="lse_ptr",
    returns="lse",
    programs=lambda x_ptr, **_: len(x_ptr),
    inputs={
        f"N={n}, BLOCK=32, {rows} rows apart in memory, scores {level}": _rows_apart(random.Random(n), rows, n, level)
        for level in _LEVELS for rows, n in ((3, 96), (2, 100), (4, 5), (2, 129), (1, 1))
    },
    draw=lambda r: _rows_apart(r, r.randint(1, 3), r.randint(1, 80)),
    notes={
        "tl.exp(m - m_new)": "the old terms must be rescaled when the maximum moves, by exp(m - m_new)",
        "m - m_new": "the correction is exp(m - m_new), old minus new",
        "m_new": "the new terms are exp(x - m_new), with the maximum that has seen them",
        "tl.exp": "the base is e here", "tl.log": "the base is e here", "start": _AGAIN,
        "float('-inf')": "elements past the end, and m before the first block, are -inf",
        "m = m_new": "each block starts from the first maximum again",
    },
    rows=[
        Row("correction-inverted", "the correction is upside down: it is exp(m - m_new), old minus new",
            [("m - m_new", "m_new - m")]),
        Row("m-of-this-block-only", "m_new is the block's own maximum, also where that is lower: it should be the "
            "larger of that and m", [("tl.maximum(m, tl.max(x, axis=0))", "tl.max(x, axis=0)")]),
        Row("first-block-again", f"the first block is read again and again: {_AGAIN}",
            [("+ offs, mask", "+ tl.arange(0, BLOCK), mask")]),
        Row("equal-scores-left-out", "a score that equals the maximum so far is left out: its term is exp(0) = 1",
            [("tl.sum(tl.exp(x - m_new)", "tl.sum(tl.where(x == m, 0.0, tl.exp(x - m_new))")]),
    ],
)  # fmt: skip
@triton.jit
def row_lse_kernel(x_ptr, lse_ptr, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m = float("-inf")
    l = 0.0
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        # BEGIN SOLUTION
        x = tl.load(x_ptr + row * stride + offs, mask=offs < N, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
        # END SOLUTION
    tl.store(lse_ptr + row, m + tl.log(l))


# ---- 3.4, and the two bug hunts that repair the lecture's kernel -----------------------------------------------------


def _verify_forward(kernel: Any) -> Report:
    kernel_of(kernel, FORWARD_PARAMETERS)
    with _FORWARD.mending(kernel, hunt=True):
        report = verify_one_head(_forward(kernel), head_dims=(64, 32), max_seq=300, max_tile=128)
        _expect_other_tiles(kernel)
        _expect_strides_of_o(kernel)
    compiles(kernel, compile_arguments(torch.float16, 64))
    return report


def _given(r: random.Random, *sizes: Any, later: bool = False, unseen: bool = False) -> tuple[Any, ...]:
    """The arguments of phase 3's kernels. later: o and lse are those of earlier keys. unseen: whoever visits the last
    of several tiles of keys has NaN of it.
    """
    *given, M, N, scale, HEAD_DIM, BLOCK_M, BLOCK_N = of_one_head(r, *sizes)
    if later:
        given[3][:], given[4][:] = normal(r, *given[3].shape), normal(r, M)
    if unseen and N > BLOCK_N:
        given[2][(N - 1) // BLOCK_N * BLOCK_N :] = math.nan
    return *given, scale * LOG2_E, M, N, HEAD_DIM, BLOCK_M, BLOCK_N


_FORWARD = mended_to(flash_attention_forward_kernel, SIZES, some_sizes, _given, "O_ptr, LSE_ptr")
_CAUSAL = mended_to(
    flash_attention_forward_kernel, ((12, 5, 8, 4, 4, 1.0), *SIZES, (12, 12, 8, 4, 4, 1.0)), some_sizes,
    lambda r, *sizes: _given(r, *sizes, unseen=r.random() < 0.5), "O_ptr, LSE_ptr", edits=[
        ("range(0, N, BLOCK_N)", "range(0, tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M + N - M), BLOCK_N)"),
        ("where(in_range[None, :], s", "where(in_range[None, :] & (offs_n[None, :] <= offs_m[:, None] + N - M), s"),
    ])  # fmt: skip


def _expect_other_tiles(kernel: Any, causal: bool = False) -> None:
    """Tiles whose sides differ, of a kernel that is right where they are alike."""
    q, k, v = random_tensors((100, 32), (150, 32), (150, 32))
    want, _ = reference.attention(*(x[None, None] for x in (q, k, v)), causal=causal)
    for BLOCK_M, BLOCK_N in ((64, 16), (16, 64)):
        case = f"M=100, N=150, BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}"
        with in_bounds(case, q=q, k=k, v=v):
            o, _ = flash_attention_forward(q, k, v, None, BLOCK_M, BLOCK_N, kernel=kernel)
        because = "it is right where both are 32: does one of them stand where the other belongs?"
        expect_close(o, want[0, 0], what="o", case=case, tol=1e-2, diagnosis="tile-sides-alike", because=because)


def _expect_strides_of_o(kernel: Any) -> None:
    """The launcher's o is contiguous; this one is not."""
    q, k, v = random_tensors((40, 32), (50, 32), (50, 32))
    case = "o stored by columns"
    o, lse = _begun(40, 32, q.dtype, by_columns=True)
    _goes_on(kernel, q, k, v, o, lse, case=case)
    want, _ = reference.attention(*(x[None, None] for x in (q, k, v)))
    because = "are the addresses of O made with stride_om and stride_od?"
    expect_close(o, want[0, 0], what="o", case=case, tol=1e-2, diagnosis="wrong-strides", because=because)


def _begun(M: int, D: int, dtype: torch.dtype, by_columns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of no key yet."""
    o = torch.zeros((D, M) if by_columns else (M, D), dtype=dtype, device=runtime.device())
    return o.T if by_columns else o, torch.full((M,), -math.inf, device=o.device)


def _goes_on(
    kernel: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, case: str, scale: float | None = None
) -> None:  # fmt: skip
    """Launches `kernel` with small tiles, o and lse as they are."""
    with in_bounds(case, q=q, k=k, v=v, o=o, lse=lse) as traffic:
        _launch_next(q, k, v, o, lse, q.shape[1] ** -0.5 if scale is None else scale, kernel)
    explain_undefined(traffic, o, case)


def _launch_next(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, kernel: Any = None) -> None:
    (flash_attention_next_kernel if kernel is None else kernel)[(triton.cdiv(len(q), 32),)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), scale * LOG2_E, len(q), len(k),
        HEAD_DIM=q.shape[1], BLOCK_M=32, BLOCK_N=32,
    )  # fmt: skip


def _from_nothing(kernel: Any) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) that launches `kernel` where no key has been seen."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        o, lse = _begun(len(q), q.shape[1], q.dtype)
        _goes_on(kernel, q, k, v, o, lse, case=f"M={len(q)}, N={len(k)}, BLOCK_M = BLOCK_N = 32", scale=scale)
        return o, lse

    return forward


def _expect_weights(got: torch.Tensor, want: torch.Tensor, old: torch.Tensor, new: torch.Tensor, case: str) -> None:
    """CheckFailed, in weights, where a row is a sum of the two parts, with others than it should have."""
    if not got.isfinite().all():
        return
    parts = torch.stack([old, new], 2)
    found, right = (torch.linalg.lstsq(parts, x[:, :, None]).solution[:, :, 0] for x in (got, want))
    row = int((found - right).abs().amax(1).argmax())
    (a, b), (x, y) = ((round(z, 5) + 0.0 for z in of[row].tolist()) for of in (found, right))
    if max(abs(a - x), abs(b - y)) > 1e-2 and torch.allclose((parts @ found[:, :, None])[..., 0], got, atol=1e-3):
        said = f"in row {row} what O held counts {a:.3g}, and the new keys' part {b:.3g}: they should count {x:.3g} and"
        raise CheckFailed(f"{said} {y:.3g}", diagnosis="merge-weights", case=case)


def _expect_it_goes_on(kernel: Any) -> None:
    """CheckFailed where the earlier keys' o and lse are lost, or weighed wrongly."""
    for case, before, first, second in (("scores alike", 50, 1.0, 1.0), ("scores alike", 2, 1.0, 1.0),
                                        ("larger scores first", 50, 30.0, 1.0),
                                        ("larger scores last", 50, 1.0, 30.0)):  # fmt: skip
        q, k, v = random_tensors((40, 32), (90, 32), (90, 32))
        k = torch.cat([first * k[:before], second * k[before:]])
        (o, lse), new = (reference.attention(*(x[None, None] for x in (q, *kv)))
                         for kv in ((k[:before], v[:before]), (k[before:], v[before:])))  # fmt: skip
        o, lse, new_o, new_lse = (x[0, 0].float() for x in (o, lse, *new))
        got_o, got_lse, case = o.clone(), lse.clone(), f"{90 - before} keys after {before} others, {case}"
        _goes_on(kernel, q, k[before:], v[before:], got_o, got_lse, case=case)

        def merged(of_l: Any = 0.0, lse: Any = lse, o: Any = o, new_o: Any = new_o, new_lse: Any = new_lse) -> Any:
            """of_l: log of what l_i begins with, under m_i = lse."""
            total = torch.logsumexp(torch.stack([lse + of_l, new_lse]), 0)
            return torch.exp(lse - total)[:, None] * o + torch.exp(new_lse - total)[:, None] * new_o, total

        def is_it(like: Any, got: Any = (got_o, got_lse)) -> bool:
            return all(torch.allclose(*pair, atol=1e-3) for pair in zip(got, like, strict=True))

        to_2 = "lse is a natural logarithm, and m_i is in base 2: it is lse times log2(e) = 1.4427"
        sum_is_1 = "o is divided by the sum of its weights: with m_i of lse, and acc = o, that sum is 1"
        for slug, said, wrong in (
            ("starts-anew", "what O and LSE hold is not taken over: the keys before are lost", (new_o, new_lse)),
            ("wrong-base", to_2, merged(lse=lse / LOG2_E)),
            ("wrong-base", f"{to_2}, and not ln 2", merged(lse=lse / LOG2_E**2)),
            ("l-starts-at-0", f"the keys before are in acc and not in l_i: {sum_is_1}", merged(-math.inf)),
            ("wrong-sum", f"l_i begins with e^lse; {sum_is_1}", merged(lse)),
            ("acc-starts-at-0", "the keys before are in l_i and not in acc: it starts from o", merged(o=0 * o)),
        ):
            if is_it(wrong) and not is_it(merged()):
                raise CheckFailed(said, diagnosis=slug, case=case)
        want_o, want_lse = merged()
        _expect_weights(got_o, want_o, o, new_o, case)
        expect_close(got_o, want_o, what="o", case=case, tol=1e-3)
        expect_close(got_lse, want_lse, what="lse", case=case, tol=1e-3)
    (o, lse), case = _begun(len(q), q.shape[1], q.dtype), "no key before, and none now"
    want = {"o": o.clone(), "lse": lse.clone()}
    _goes_on(kernel, q, k[:0], v[:0], o, lse, case=case)
    for what, got in (("o", o), ("lse", lse)):
        because = "where no key came, o is 0 and lse -inf: what are 0 / 0 and -inf - (-inf)?"
        expect_close(got, want[what], what=what, case=case, tol=0.0, diagnosis="no-key-yet", because=because)


@exercise(
    "3.4",
    title="A kernel that goes on",
    minutes=40,
    hints=[
        "Which m_i, l_i and acc belong to rows whose o and lse are known? Divided by l_i acc has to give o, and "
        "m_i + log2(l_i) has to give lse, in base 2. Several do; with l_i = 1 they are simplest.",
        "m_i is lse times log2(e) = 1.4427, l_i is 1, acc is o, in float32: two loads with the mask offs_m < M. Where "
        "no key was seen m_i is -inf, and the first correction takes the 1 away.",
        "Keep the simulation of phase 2 beside you: each of its lines has one line here. Order: scores, mask with "
        "-inf, m_new, p, correction, l_i, acc, then m_i = m_new. Scores: `tl.dot(q, k.T, input_precision='ieee') * "
        "scale_log2`.",
        "Mask the scores with `tl.where(in_range[None, :], s, float('-inf'))`: keys are the columns of s. The masked "
        "K rows are zeros, and a score of 0 is not nothing.",
        "acc = tl.dot(p.to(v.dtype), v, acc, input_precision='ieee') after acc was multiplied by correction[:, None]. "
        "At the end acc / l_i, and lse = (m_i + log2(l_i)) * ln 2, both stored with the mask offs_m < M.",
        "float32 inputs wrong in the fourth digit? That is TF32: tl.dot(..., input_precision='ieee').",
    ],
)
def of_any_length(flash_attention_next_kernel: Any) -> Report:
    kernel = kernel_of(flash_attention_next_kernel, FORWARD_PARAMETERS)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    with _NEXT.mending(kernel):
        report = verify_one_head(_from_nothing(kernel), dtypes=dtypes, head_dims=(64, 32), max_seq=300, max_tile=128)
        _expect_strides_of_o(kernel)
        _expect_it_goes_on(kernel)
    compiles(kernel, compile_arguments(torch.float16, 64))
    return report


@triton.jit
def flash_attention_next_kernel(
    Q_ptr,  # [M, HEAD_DIM]
    K_ptr,  # [N, HEAD_DIM]
    V_ptr,  # [N, HEAD_DIM]
    O_ptr,  # [M, HEAD_DIM]: of the keys before; then of all
    LSE_ptr,  # [M], float32, natural: likewise
    stride_qm,
    stride_qd,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    stride_om,
    stride_od,
    scale_log2,  # scale * log2(e)
    M,
    N,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    q_ptrs = Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od

    # 1. The state, m_i, l_i and acc: what O and LSE hold of the keys before.
    # BEGIN SOLUTION
    m_i = tl.load(LSE_ptr + offs_m, mask=offs_m < M, other=float("-inf")) * 1.4426950408889634
    l_i = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.load(o_ptrs, mask=offs_m[:, None] < M, other=0.0).to(tl.float32)
    # END SOLUTION
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        in_range = offs_n < N
        k_ptrs = K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0)
        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=in_range[:, None], other=0.0)
        # 2. Scores, masked; the new maximum; p and the correction; l_i, acc, m_i.
        # BEGIN SOLUTION
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        s = tl.where(in_range[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        m_i = m_new
        # END SOLUTION
    # 3. Normalise; lse. Store both, masked: o in O_ptr.dtype.element_ty.
    # BEGIN SOLUTION
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(o_ptrs, acc.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(LSE_ptr + offs_m, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=offs_m < M)
    # END SOLUTION


_NEXT = mended_to(
    flash_attention_next_kernel, SIZES, some_sizes, functools.partial(_given, later=True), "O_ptr, LSE_ptr"
)


@exercise(
    "3.5",
    title="The half that is never looked at",
    minutes=15,
    difficulty="Bug hunt",
    bug=[("(m_i + tl.log2(l_i)) * 0.6931471805599453", "m_i + tl.log2(l_i)")],
    untouched="0301d4112ed1",
    history="flashinfer-ai/flashinfer, issue 2113 (2025), and sgl-project/sglang, pull request 35045 (2026)",
    hints=[
        "The outputs are right, so m_i, l_i and acc belong together. Only the last line can be wrong. What does the "
        "check say that it stores, and what should be there?",
        "The quotient is 1.4427 in every row. Which number of this kernel is 1.4427?",
        "The scores were multiplied by log2(e), so m_i and log2(l_i) are logarithms in base 2. lse is a natural one: "
        "times ln 2 = 0.6931.",
    ],
)
def half_right(flash_attention_forward_kernel: Any) -> Report:
    report = _verify_forward(flash_attention_forward_kernel)
    code = tokens_of(inspect.getsource(flash_attention_forward_kernel.fn))
    said = "right, but by another exponential: the kernel is to go on working with `exp2`, and lse alone is wrong"
    expect("exp" not in code.split(), said, diagnosis="another-base")
    return report


@exercise(
    "3.6",
    title="A very small number",
    minutes=15,
    difficulty="Bug hunt",
    bug=[
        ('[BLOCK_M], float("-inf")', "[BLOCK_M], -1e6"),
        ('N, s, float("-inf")', "N, s, -1e6"),
        ('        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)\n', ""),
        ("s - m_safe", "s - m_new"),
        ("m_i - m_safe", "m_i - m_new"),
        ("tl.where(l_i == 0.0, 1.0, l_i)", "tl.maximum(l_i, 1e-20)"),
        ("tl.log2(l_i)", "tl.log2(tl.maximum(l_i, 1e-20))"),
    ],
    untouched="91615cf68108",
    history="TransformerLensOrg/TransformerLens, issue 318 (2023); flashinfer-ai/flashinfer, pull request 4401 (2026)",
    hints=[
        "Which rows are zero? Look at their scores: nothing is special about them but their size.",
        "The author wanted to avoid -inf - (-inf). What does m_i start from instead, and what happens to a row whose "
        "scores are all below that number?",
        "exp2(s - m_i) underflows to 0 if m_i is far above every s. Start from float('-inf'), mask with it, and guard "
        "the one subtraction that can be -inf - (-inf), as the lecture's m_safe does.",
    ],
)
def no_infinity(flash_attention_forward_kernel: Any) -> Report:
    try:
        return _verify_forward(flash_attention_forward_kernel)
    except CheckFailed as failed:
        if failed.diagnosis == "tail-not-masked":  # a low number for infinity shows there as one that is not low enough
            _expect_low_rows(flash_attention_forward_kernel)
        raise


def _expect_low_rows(kernel: Any) -> None:
    """Scores of -400 in whole tiles, where there is nothing to mask."""
    q, v = random_tensors((32, 32), (64, 32))
    o, _ = _forward(kernel_of(kernel, FORWARD_PARAMETERS))(q.abs(), -4 * q.abs().repeat(2, 1), v, scale=16.0)
    want, _ = reference.attention(q.abs()[None, None], -4 * q.abs().repeat(2, 1)[None, None], v[None, None], scale=16.0)
    said = (
        "rows whose scores are all low come out wrong in whole tiles too, where no key is masked: m_i is above all of "
    )
    said += "them from the start, and every p is 0"
    well = torch.allclose(o.cpu(), want[0, 0].to("cpu", o.dtype), atol=0.1)  # else o is 0; such scores have few digits
    expect(well, said, diagnosis="m-starts-at-zero", case="M=32, N=64, BLOCK_M = BLOCK_N = 32, every score below -400")


# ---- 3.7 ------------------------------------------------------------------------------------------------------------


def _as_the_interpreter_counts(bytes_read: Callable[..., Any]) -> None:
    q, k, v = random_tensors((100, 32), (150, 32), (150, 32), dtype=torch.float16)
    counted = hbm_traffic(_launch_next, q, k, v, *_begun(100, 32, q.dtype), 0.2).bytes_read
    sentence = f"the interpreter counted {counted} bytes for M=100, N=150, HEAD_DIM=32, BLOCK_M=32"
    expect(bytes_read(100, 150, 32, 32, 2) == counted, sentence, diagnosis="wrong-value")


@rule(
    "3.7",
    title="How many bytes?", minutes=10,
    hints=[
        "How many programs are there? Each reads its own rows of Q, O and lse once, and the whole of K and of V.",
        "Rows that do not exist are masked, so all programs together read M rows of Q, not P · BLOCK_M; likewise O.",
        "P = ceil(M / BLOCK_M); (2 · M + 2 · N · P) · HEAD_DIM · itemsize, and 4 · M for lse.",
    ],
    returns="bytes_read",
    inputs=[(64, 64, 32, 32, 2), (150, 200, 32, 64, 2), (1, 40, 16, 64, 4), (90, 30, 64, 16, 2)],
    draw=lambda r: (
        r.randint(1, 400), r.randint(1, 400), r.choice((8, 16, 64, 80)), r.choice((16, 32, 64, 128)), r.choice((2, 4))
    ),
    notes={
        "2": "K and V are two matrices, Q and O as well", "programs": "each program reads all of K and V",
        "itemsize": "an element has itemsize bytes", "M": "each block reads its own rows of Q, O and lse once",
        "HEAD_DIM": "a row has HEAD_DIM elements", "4": "lse is in float32",
        "math.ceil(M / BLOCK_M)": "the last program counts too, and there is no fraction of one",
    },
    rows=[
        Row("masked-rows", "rows past the end are masked: they are not read",
            [("(2 * M + 2", "(2 * programs * BLOCK_M + 2"), ("4 * M", "4 * programs * BLOCK_M")]),
    ],
    units={
        "bytes_read": {
            "times Q or O": "M * HEAD_DIM * itemsize", "times K or V": "N * HEAD_DIM * itemsize",
            "times K or V for each program": "math.ceil(M / BLOCK_M) * N * HEAD_DIM * itemsize",
            "times Q or O for each program": "math.ceil(M / BLOCK_M) * M * HEAD_DIM * itemsize",
            "times the scores, which never leave the chip": "M * N * itemsize", "times lse": "4 * M",
            "times lse for each program": "math.ceil(M / BLOCK_M) * 4 * M",
        },
    },
    then=_as_the_interpreter_counts,
)  # fmt: skip
def bytes_read(M, N, HEAD_DIM, BLOCK_M, itemsize):
    # BEGIN SOLUTION
    programs = math.ceil(M / BLOCK_M)
    return (2 * M + 2 * N * programs) * HEAD_DIM * itemsize + 4 * M
    # END SOLUTION


# ---- 3.8 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.8",
    title="A causal mask that saves work",
    minutes=45,
    difficulty="Stretch",
    hints=[
        "Query i may see key j if j <= i + N - M: the last query sees the last key. Which tiles of s can have such a "
        "pair, for the rows of this program?",
        "The program's last row is start_m + BLOCK_M - 1, so no key from start_m + BLOCK_M + N - M on is ever seen: "
        "let the loop end at min(N, that). Mask the rest inside a tile: offs_n[None, :] <= offs_m[:, None] + N - M.",
        "With M > N the first rows see nothing: m_new stays -inf. Keep m_safe, and l_i == 0 gives o = 0. Triton's "
        "range takes a computed end: range(0, tl.minimum(N, last), BLOCK_N), with an end below 0 for no iteration.",
    ],
)
def causal_tiles(flash_attention_causal_kernel: Any) -> Report:
    kernel = kernel_of(flash_attention_causal_kernel, FORWARD_PARAMETERS)
    forward = _forward(kernel)
    with _CAUSAL.mending(kernel):
        report = verify_one_head(forward, always_causal=True, head_dims=(64, 32), max_seq=200, max_tile=128)
        _expect_other_tiles(kernel, causal=True)
    q, k, v = random_tensors((128, 32), (128, 32), (128, 32), dtype=torch.float16)
    row = 32 * 2  # bytes
    needed = (32 + 64 + 96 + 128) * row  # of K, by the four programs of 32 rows
    read = hbm_traffic(_launcher(kernel), q, k, v).read_from["k"]
    said = f"right, but it reads {read} bytes of K for M = N = 128 and BLOCK_M = BLOCK_N = 32, where {needed} "
    said += "suffice: end the loop where the program's last row stops seeing keys"
    expect(read <= needed, said, diagnosis="causal-tiles-not-skipped")
    compiles(kernel, compile_arguments(torch.float16, 64))
    return report
