"""Phase 0's exercises: attention and online softmax.

Each is a right function and inputs on which the usual mistakes give themselves away (a moving maximum, masked rows,
large scores, one element, other splits); what is said of a wrong one comes from the changes of the right one.
"""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashlab.attention.cost import peak_bytes
from flashlab.attention.online_softmax import (
    State,
    block_state,
    finish,
    identity,
    merge,
    merge_finished,
    shifted_exp,
    softmax_safe,
)
from flashlab.check import expect, expect_close, running
from flashlab.check.lookup import Row
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import mending, rule
from flashlab.exercises.tensor_rule import EMPTY_ROWS, normal, part, rows_of, tensor_rule

INF = math.inf

_MINUS_INFINITY = (
    "NaN came out of exp(-inf - (-inf)): where the maximum itself is -inf there is nothing to add, so use 0"
)
_NO_KEY = (
    "a row that sees no key gives NaN: by -inf - (-inf), where the maximum itself is -inf, or by 0 / 0, where the sum "
    "is 0"
)
_RESCALE = "the old terms must be rescaled when the maximum moves, by exp(old m - new m)"
_OLD_MINUS_NEW = "the correction is exp(m - m_new), old minus new, and never above 1"


def _t(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- 0.1 ------------------------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@rule(
    "0.1",
    title="Where softmax overflows", minutes=5, difficulty="Warm-up",
    hints=[
        "One exponential overflows near ln(largest finite number). `torch.finfo(dtype).max` is that number.",
        "With n equal scores s the sum is n · e^s. Set it equal to the largest number and solve for s.",
    ],
    returns="the largest score",
    inputs=[(torch.float16, 1), (torch.float16, 8), (torch.bfloat16, 4096), (torch.float32, 1024), (torch.float64, 9)],
    draw=lambda r: (r.choice(_DTYPES), r.choice((1, 2, 3, 10, r.randint(1, 5000)))),
    also=["math.log(torch.finfo(dtype).max / n)"],
    notes={
        "n": "the sum of n terms overflows first", "math.log(n)": "the sum of n terms overflows first",
        "math.log(torch.finfo(dtype).max / n)": "n terms share the largest number",
        "math.log": "the exponential is e^s, so the logarithm is the natural one",
    },
    rows=[
        Row("smallest-number", "that is from tiny, the smallest number of the dtype: an overflow is past max, the "
            "largest", instead="-math.log(torch.finfo(dtype).tiny) - math.log(n)"),
        Row("rounded", "the result was rounded to the dtype itself: compute it as a Python float",
            instead="float(torch.tensor(math.log(torch.finfo(dtype).max / n)).to(dtype))"),
    ],
    tol=2e-6,
)  # fmt: skip
def largest_safe_score(dtype: torch.dtype, n: int) -> float:
    """The largest s for which the sum of n exponentials e^s is still finite in `dtype`."""
    # BEGIN SOLUTION
    return math.log(torch.finfo(dtype).max) - math.log(n)
    # END SOLUTION


# ---- 0.2 ------------------------------------------------------------------------------------------------------------


def _softmax_inline(x):
    m = x.amax(dim=-1, keepdim=True)
    m = m.masked_fill(torch.isneginf(m), 0.0)
    p = torch.exp(x - m)
    l = p.sum(dim=-1, keepdim=True)
    return p / l.masked_fill(l == 0, 1.0)


def _some_scores(r: random.Random) -> torch.Tensor:
    x = 4 * normal(r, *r.choice(((), (2,), (2, 3))), r.randint(1, 6))
    return x.masked_fill(normal(r, *x.shape) > r.choice((1.0, 9.0)), -INF)


_OWN_MAXIMUM = "a row's exponentials overflowed, or all underflowed: each row's own maximum is to be subtracted"

part(
    "0.2",
    returns="shifted_exp",
    inputs={
        "two rows": (_t([1.0, 2.0, 3.0], [-5.0, 0.0, -1.0]), _t([3.0], [0.0])),
        "scores near 1000": (_t([999.0, 1000.0]), _t(1000.0)),
        "masked scores": (_t([-INF, 1.0], [-INF, -INF]), _t([1.0], [-INF])),
        "maxima far from 0": (_t([30000.0, -INF], [-30000.0, -INF]), _t([30000.0], [-30000.0])),
    },
    draw=lambda r: (lambda x: (x, x.amax(dim=-1, keepdim=True)))(_some_scores(r)),
    also=["torch.exp(x - m).nan_to_num(0.0)"],
    nan={EMPTY_ROWS: _MINUS_INFINITY, "1000": "exp overflowed: the exponent is x - m"},
)(shifted_exp)  # fmt: skip

tensor_rule(
    "0.2",
    title="The safe softmax", minutes=10, difficulty="Warm-up",
    hints=[
        "Subtract from each row its own maximum: `x.amax(dim=-1, keepdim=True)`, or `row_max(x)[..., None]`.",
        "In a row of nothing but -inf the maximum is -inf too. Replace that one by 0 before subtracting: "
        "`m.masked_fill(torch.isneginf(m), 0.0)`.",
        "Such a row then has the sum 0. Divide by 1 there: `l.masked_fill(l == 0, 1.0)`.",
    ],
    parts=["shifted_exp"],
    returns="the softmax",
    inputs={
        "two small rows": (_t([1.0, 2.0, 3.0], [3.0, 1.0, 1.0]),),
        "three rows and two axes before them": (torch.linspace(-2, 3, 24).double().sin().view(2, 3, 4) * 4,),
        "scores of 1000": (_t([1000.0, 1001.0]),), "scores of -1000": (_t([-1000.0, -1001.0]),),
        "rows at heights of 30000 and -30000": (_t([30000.0, 30001.0], [-30000.0, -30001.0]),),
        "low scores beside -inf": (_t([-INF, -1000.0], [-INF, -30000.0]),),
        "one score far above the others": (_t([0.0] * 15 + [1000.0]),),
        "rows at different heights": (_t([0.0, 1.0], [2000.0, 2001.0]),),
        "masked scores and a masked row": (_t([-INF, 1.0, 2.0], [-INF, -INF, -INF]),),
        "[2, 3, 17] in float16": (4 * normal(random.Random(0), 2, 3, 17, dtype=torch.float16),),
        "[2, 3, 17] in float32": (4 * normal(random.Random(0), 2, 3, 17, dtype=torch.float32),),
        "one element": (_t([7.0]),), "no axis before the scores": (_t([1.0, 2.0]),),
    },
    draw=lambda r: (_some_scores(r),),
    also=[_softmax_inline, "torch.softmax(x, dim=-1).nan_to_num(0.0)"],
    nan={
        "scores of": "the exponentials overflowed or all underflowed: subtract the row maximum before exp",
        "far above": "exp overflowed: what is subtracted from each row must be its maximum, so that no exponent is "
        "above 0",
        "heights": _OWN_MAXIMUM, "beside -inf": _OWN_MAXIMUM, "masked": _NO_KEY, "": _NO_KEY,
    },
    notes={
        "torch.softmax(x, dim=-1)": "the softmax runs along the last axis", "l.masked_fill": _NO_KEY,
        "dtype": "the result has the dtype of x", "p.sum(dim=-1, keepdim=True)": "each row is to sum to 1",
        "p.sum": "each row is divided by its own sum", "m": "subtract the row's maximum before exp",
        "l.masked_fill(l == 0, 1.0)": "the exponentials are divided by their row's sum",
    },
    rows=[
        Row("finite-sentinel", "a fully masked row gives equal weights to keys that nobody may see: its softmax is 0",
            instead="torch.softmax(x.masked_fill(torch.isneginf(x), -1e30), dim=-1)"),
    ],
)(softmax_safe)  # fmt: skip


# ---- 0.3 ------------------------------------------------------------------------------------------------------------


class _Score(float):
    """A float that can be watched: how many of a row are alive at once says whether the row was kept."""

    __slots__ = ("__weakref__",)


_Score.__name__ = "float"  # as a message should call it


def _watched_row(xs: Sequence[float], most: list[int]) -> Iterator[float]:
    """The row as an iterator; `most[0]` becomes the largest number of its scores that were alive at once."""
    alive: weakref.WeakSet[_Score] = weakref.WeakSet()
    for x in xs:
        score = _Score(x)
        alive.add(score)
        most[0] = max(most[0], len(alive))
        yield score


def _expect_two_numbers(online_max_and_sum: Callable[..., Any]) -> None:
    most = [0]
    online_max_and_sum(_watched_row([math.sin(i) for i in range(1000)], most))
    sentence = f"{most[0]} scores were kept in memory at once; the point is to keep two numbers, m and l"
    expect(most[0] <= 8, sentence, diagnosis="row-kept", case="a row of 1000")


def _by_branches(xs):
    m, l = -math.inf, 0.0
    for x in xs:
        if x > m:
            l = l * math.exp(m - x) + 1.0
            m = x
        elif x > -math.inf:
            l = l + math.exp(x - m)
    return m, l


@tensor_rule(
    "0.3",
    title="Maximum and sum in one pass", minutes=15,
    hints=[
        "Start with m = -inf and l = 0. For each x: the new maximum first, under a new name, since the old one is "
        "still needed.",
        "l = l * exp(m - m_new) + exp(x - m_new), then m = m_new. The order of these two lines matters.",
        "If m_new is still -inf, nothing has been seen yet: go on to the next x before any subtraction.",
    ],
    returns="m, l",
    inputs={
        "the lecture's row": ([math.log(2) * x for x in (1, 3, 2, 4, 0)],),
        "the maximum comes first": ([4.0, 1.0, 2.0, 3.0],),
        "the maximum moves at every step": ([0.5 * i for i in range(-6, 6)],),
        "the maximum comes again": ([1.0, 2.0, 0.5, 2.0, 2.0],), "one element": ([-3.0],),
        "scores of 800": ([799.0, 801.0, 800.0],), "scores of -800": ([-801.0, -799.0],),
        "scores of -1e35": ([-1e35, -1e35],),
        "a jump of 1000": ([0.0, 1000.0, 1.0],), "masked scores in between": ([1.0, -INF, 2.0, -INF],),
        "masked scores first": ([-INF, -INF, 2.0, 3.0],), "all masked": ([-INF, -INF],), "an empty row": ([],),
    },
    draw=lambda r: ([r.choice((-INF, r.gauss(0, 3), r.gauss(0, 3))) for _ in range(r.randint(0, 7))],),
    also=[_by_branches],
    through=lambda fn: lambda xs: fn(x for x in xs),
    nan={"masked": _MINUS_INFINITY},
    notes={
        "math.exp(m - m_new)": _RESCALE, "m - m_new": _OLD_MINUS_NEW, "math.exp(m - x)": _RESCALE,
        "m - x": "the correction is exp(old m - new m), old minus new", "m = m_new": "the old m is needed before",
        "max(m, x)": "m is the largest score so far, and l refers to it", "l": "the old terms are kept, rescaled",
        "m_new": "every exponent is a score minus the running maximum, or exp overflows",
        "math.exp": "the exponential is e^x", "math.exp(x - m_new)": "each score has a term of its own",
        "if m_new == -math.inf": _MINUS_INFINITY, "-math.inf": "m must start at -inf, not at a finite number",
    },
    rows=[
        Row("two-passes", "l is 0: the row was read a second time, and by then it was used up; both must be found in "
            "one loop", instead="(max(xs, default=-math.inf), 0.0)"),
        Row("equal-scores-once", "l: scores that are equal count once; each has a term of its own",
            [("+ math.exp(x - m_new)", "+ (math.exp(x - m_new) if x != m else 0.0)")]),
        Row("not-rescaled", "l is not rescaled, or m is overwritten before the correction is computed, which is 1 "
            "then: it is exp(m - m_new)", [("l * math.exp(m - m_new)", "l")]),
    ],
    then=_expect_two_numbers,
)  # fmt: skip
def online_max_and_sum(xs) -> tuple[float, float]:
    """The maximum m and the sum l of exp(x - m) of an iterator; (-inf, 0.0) if no score is finite."""
    # BEGIN SOLUTION
    m, l = -math.inf, 0.0
    for x in xs:
        m_new = max(m, x)
        if m_new == -math.inf:
            continue  # nothing seen yet: no -inf - (-inf)
        l = l * math.exp(m - m_new) + math.exp(x - m_new)
        m = m_new
    return m, l
    # END SOLUTION


# ---- 0.4 ------------------------------------------------------------------------------------------------------------


def _state(r: random.Random, low: float, *rows: int, n: int = 5, d: int = 3) -> State:
    return block_state(low + normal(r, *rows, n), 0.5 + normal(r, *rows[:-1], n, d))


def _merge_inline(a, b):
    m = torch.maximum(a.m, b.m)
    base = m.masked_fill(torch.isneginf(m), 0.0)
    ca, cb = torch.exp(a.m - base), torch.exp(b.m - base)
    l = a.l * ca + b.l * cb
    o = a.o * ca[..., None] + b.o * cb[..., None]
    return State(m, l, o)


def _merge_patched(a, b):
    m = torch.maximum(a.m, b.m)
    ca, cb = torch.exp(a.m - m), torch.exp(b.m - m)
    l = a.l * ca + b.l * cb
    o = a.o * ca[..., None] + b.o * cb[..., None]
    return State(m, l.nan_to_num(), o.nan_to_num())


def _two_states(r: random.Random) -> tuple[State, State]:
    rows = r.choice(((), (3,), (2, 4)))
    states = [_state(r, r.choice((0.0, 3.0)), *rows) for _ in range(2)]
    return tuple(identity(*rows, head_dim=3, dtype=torch.float64) if r.random() < 0.2 else x for x in states)  # type: ignore[return-value]


_R = random.Random(0)
_LOW, _HIGH, _NOTHING = _state(_R, 0.0), _state(_R, 4.0), identity(head_dim=3, dtype=torch.float64)
_SEEN, _KEYS = _t([1.0, 2.0], [-INF, -INF], [0.0, -INF], [-INF, -INF]), torch.ones(2, 3, dtype=torch.float64)
_TERMS = "both are sums of terms, each times its own correction"

tensor_rule(
    "0.4",
    title="Merge two states", minutes=15,
    hints=[
        "Take the common maximum first: `torch.maximum(a.m, b.m)`. Each side then has its own correction.",
        "l adds up as a.l * exp(a.m - m) + b.l * exp(b.m - m), and o the same way; o has one more axis, so its "
        "corrections are `[..., None]`.",
        "When both maxima are -inf, refer to 0 instead: `shifted_exp` of exercise 0.2 does that.",
    ],
    returns="m, l, o",
    inputs={
        "equal maxima": (_LOW, _LOW), "b has the maximum": (_LOW, _HIGH), "a has the maximum": (_HIGH, _LOW),
        "six rows": (_state(_R, 0.0, 6), _state(_R, 0.0, 6)),  # in each row another one has the maximum
        "as many rows as columns": (_state(_R, 0.0, 3), _state(_R, 1.0, 3)),
        "scores of 1000": (_state(_R, 1000.0), _state(_R, 1003.0)),
        "b is the identity": (_LOW, _NOTHING), "a is the identity": (_NOTHING, _LOW),
        "a is masked": (block_state(_t(-INF, -INF), _KEYS), _LOW), "the identity twice": (_NOTHING, _NOTHING),
        "some rows masked in both, some in one": (
            block_state(_SEEN, _KEYS), block_state(_SEEN.flip(0).roll(1, 0) + 1, 2 * _KEYS)),
        "batch and heads": (_state(_R, 0.0, 2, 2, 4), _state(_R, 0.0, 2, 2, 4)),
    },
    draw=_two_states,
    alone=lambda a, b: [tuple(State(*(x[i : i + 1] for x in s)) for s in (a, b)) for i in range(a.m.numel())] if (
        a.m.ndim == 1) else [],
    also=[_merge_inline, _merge_patched],
    words={"ca": "exp(a.m - m)", "cb": "exp(b.m - m)", "correction_a": "exp(a.m - m)", "correction_b": "exp(b.m - m)",
           "base": "m, or 0 where it is -inf,"},
    nan={
        "identity": _MINUS_INFINITY, "masked": _MINUS_INFINITY,
        "": "NaN comes of -inf - (-inf), or of an exponential that overflowed, times 0: subtract the new maximum first",
    },
    notes={
        "ca": "either of the two may have the smaller maximum, and must be rescaled then",
        "cb": "either of the two may have the smaller maximum, and must be rescaled then",
        "shifted_exp(a.m, m)": "either of the two may have the smaller maximum, and must be rescaled then",
        "shifted_exp(b.m, m)": "either of the two may have the smaller maximum, and must be rescaled then",
        "ca[..., None]": "o must be rescaled as l is", "cb[..., None]": "o must be rescaled as l is",
        "a.m - base": _OLD_MINUS_NEW, "b.m - base": _OLD_MINUS_NEW, "a.m - m": _OLD_MINUS_NEW,
        "torch.exp": "the exponential is e^x", "torch.maximum(a.m, b.m)": "the larger of the two, row by row",
        "m": "the larger of the two maxima, row by row", "a.l": _TERMS, "b.l": _TERMS,
    },
    rows=[
        Row("not-rescaled", f"l and o: what is kept was not rescaled: {_RESCALE}", [
            ("shifted_exp(a.m, m), shifted_exp(b.m, m)", "torch.ones_like(m), torch.ones_like(m)")]),
        Row("o-not-rescaled", "l is right, but o was not rescaled when the maximum moved: it has the corrections of l",
            [("a.o * correction_a[..., None] + b.o * correction_b[..., None]", "a.o + b.o")]),
        Row("correction-inverted", f"the correction is inverted: {_OLD_MINUS_NEW}", [
            ("shifted_exp(a.m, m), shifted_exp(b.m, m)", "torch.exp(m - a.m), torch.exp(m - b.m)")]),
    ],
)(merge)  # fmt: skip


# ---- 0.5 ------------------------------------------------------------------------------------------------------------


def _of_row(r: random.Random) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = r.randint(1, 12)
    return 2 * normal(r, n), 0.5 + normal(r, n, 3), r.randint(1, 13)


_X, _V = normal(random.Random(1), 12), 0.5 + normal(random.Random(2), 12, 3)
_ROWS = {
    "the largest score in the first block": _X.index_fill(0, torch.tensor(1), 4.0),
    "the largest score in the last block": _X.index_fill(0, torch.tensor(10), 4.0),
    "a maximum that moves in every block": torch.linspace(-3, 3, 12).double(),
    "scores around 1000": _X.index_fill(0, torch.tensor(10), 4.0) + 1000,
    "scores around -1000": _X.index_fill(0, torch.tensor(10), 4.0) - 1000,
    "scores that are all equal": torch.full_like(_X, 2.0),
    "a score of 1000 in the first block": _X.index_fill(0, torch.tensor(0), 1000.0),
    "a score of 1000 in the last block": _X.index_fill(0, torch.tensor(10), 1000.0),
}


def _expect_blocks(fn: Callable[..., Any]) -> None:
    """CheckFailed where 3072 numbers more take half as many bytes more at once: the whole row's exponentials."""
    r = random.Random(3)
    few, many = (peak_bytes(fn, normal(r, n), normal(r, n, 1), 32) for n in (1024, 4096))
    said = "the values are right, but your function took the whole row at once: it is to go on block by block"
    expect(many - few < 3072 * 8 // 2, said, diagnosis="not-in-blocks")


@tensor_rule(
    "0.5",
    title="Bug hunt: right until it is not", minutes=15, difficulty="Bug hunt",
    bug=Row("correction-inverted", f"the correction is inverted: {_OLD_MINUS_NEW}", [("m - m_new", "m_new - m")]),
    history="Algorithm 1 of the FlashAttention-2 paper inverts this factor too (Dao-AILab/flash-attention, issue 991)",
    hints=[
        "The function is right whenever the largest score is in the first block. What is different in the code path of "
        "a later block that brings a new maximum?",
        "Print `correction` for scores 0, 0, 5, 0 in blocks of 2. Can a correction be above 1?",
        "Old terms are too large, by what? They are exp(x - m) and should be exp(x - m_new). Write down the quotient.",
    ],
    returns="the output",
    inputs={f"{case}, blocks of {n}": (x, _V, n) for case, x in _ROWS.items() for n in (4, 5, 1, 12, 100)},
    draw=_of_row, then=_expect_blocks,
    nan={"1000": "exp overflowed: every exponent must be a score minus the running maximum"},
    notes={
        "correction": _RESCALE, "m - m_new": _OLD_MINUS_NEW, "m_new": "every exponent is a score minus the new maximum",
        "l": "the output is o divided by l, once, at the end", "torch.exp": "the exponential is e^x",
    },
)  # fmt: skip
def attention_in_blocks(scores: torch.Tensor, v: torch.Tensor, BLOCK_N: int) -> torch.Tensor:
    """softmax(scores) @ v for one row: scores [N], v [N, D] -> [D]. The last block may be shorter."""
    x = scores[:BLOCK_N]
    m = x.max()
    p = torch.exp(x - m)
    l, o = p.sum(), p @ v[:BLOCK_N]
    for start in range(BLOCK_N, len(scores), BLOCK_N):
        x, v_block = scores[start : start + BLOCK_N], v[start : start + BLOCK_N]
        m_new = torch.maximum(m, x.max())
        correction = torch.exp(m - m_new)
        p = torch.exp(x - m_new)
        l = l * correction + p.sum()
        o = o * correction + p @ v_block
        m = m_new
    return o / l


# ---- 0.6 ------------------------------------------------------------------------------------------------------------


def _result(r: random.Random, low: float, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return finish(block_state(low + normal(r, rows, 6), 1 + normal(r, 6, 2)))


def _lower(x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return x[0].half(), x[1].float()


def _from_scratch(o1, lse1, o2, lse2):
    m = torch.maximum(lse1, lse2)
    base = m.masked_fill(torch.isneginf(m), 0.0)
    w1, w2 = torch.exp(lse1 - base), torch.exp(lse2 - base)
    s = w1 + w2
    o = (w1[..., None] * o1 + w2[..., None] * o2) / s.masked_fill(s == 0, 1.0)[..., None]
    return o.to(o1.dtype), m + torch.log(s)


_FAR = _result(random.Random(6), 0.0)  # below the other rows, in both
_NO_RESULT = finish(identity(4, head_dim=2, dtype=torch.float64))

tensor_rule(
    "0.6",
    title="Merge two finished results", minutes=15,
    hints=[
        "A finished result (o, lse) is a state. Which m and which l has it? Look at φ(m, l, o) in section 8.",
        "State(m=lse, l=1, o=o). Merge two of them, then finish.",
        "Or directly: with m = max(lse1, lse2), the weights are w1 = exp(lse1 - m) and w2 = exp(lse2 - m); "
        "o = (w1 o1 + w2 o2) / (w1 + w2) and lse = m + ln(w1 + w2). Mind two rows that saw no key.",
    ],
    returns="o, lse",
    inputs={
        "the second is heavier": (*_result(_R, 0.0), *_result(_R, 2.0)),
        "the first is heavier": (*_result(_R, 2.0), *_result(_R, 0.0)),
        "equal weights": (_t([0.0, 2.0]), _t(1.0), _t([4.0, 6.0]), _t(1.0)),
        "lse of 1000": (*_result(_R, 1000.0), *_result(_R, 1001.0)),
        "lse of -1000": (*_result(_R, -1000.0), *_result(_R, -1001.0)),
        "o in float16, lse in float32": (*_lower(_result(_R, 30.0)), *_lower(_result(_R, 31.0))),
        "the second saw no key": (*_result(_R, 0.0), *_NO_RESULT), "neither saw a key": (*_NO_RESULT, *_NO_RESULT),
        "rows far apart": tuple(map(torch.cat, zip(_result(_R, 10000.0), _result(_R, 0.0), _FAR, strict=True))) + tuple(
            map(torch.cat, zip(_result(_R, 0.0), _result(_R, 10000.0), _FAR, strict=True))),
    },
    draw=lambda r: (*_result(r, r.gauss(0, 2)), *(_NO_RESULT if r.random() < 0.2 else _result(r, r.gauss(0, 2)))),
    alone=rows_of(0),
    also=[_from_scratch],
    words={"s": "w1 + w2", "base": "m"},
    nan={
        "1000": "the weights overflowed or underflowed: subtract the larger lse before exp", "no key": _NO_KEY,
        "neither": _NO_KEY,
    },
    notes={
        "dtype": "o comes back in the dtype of o1", "digits": "the arithmetic is in the dtype of lse",
        "torch.exp": "lse is a logarithm, so the weights are e to the lse", "torch.log": "lse = m + ln(w1 + w2)",
        "torch.log(s)": "lse = m + ln(w1 + w2): the other one's share is missing", "m": "lse = m + ln(w1 + w2)",
        "s.masked_fill(s == 0, 1.0)[..., None]": "the weights do not sum to 1: divide by their sum",
        "s": "lse = m + ln(w1 + w2)", "base": "subtract the larger lse before exp",
    },
    rows=[
        Row("averaged", "o is the plain average; the parts are as heavy as their sums of exponentials",
            instead="((o1 + o2) / 2, torch.logaddexp(lse1, lse2))"),
        Row("added", "o: the outputs were added; each is already divided by its own sum, so they must be weighted",
            instead="(o1 + o2, torch.logaddexp(lse1, lse2))"),
        Row("weighted-by-lse", "o: the outputs are weighted by lse; the weight is exp(lse)",
            instead="(((o1 * lse1[..., None] + o2 * lse2[..., None]) / (lse1 + lse2)[..., None]).to(o1.dtype), "
            "torch.logaddexp(lse1, lse2))"),
        Row("lse-added", "lse: the two lse were added; add their exponentials, then take the logarithm",
            [("return o.to(o1.dtype), lse", "return o.to(o1.dtype), lse1 + lse2")]),
        Row("exp-of-lse", "a finished result is the state m = lse, l = 1: the sum is in m already", [
            ("torch.ones_like(lse1)", "lse1.exp()"), ("torch.ones_like(lse2)", "lse2.exp()")]),
        Row("empty-sum", "a finished result counts with a sum of 1 beside m = lse, and not with a sum of 0",
            instead="finish(merge(State(lse1, 0 * lse1, o1), State(lse2, 0 * lse2, o2)))"),
        Row("lse-for-l", "a finished result is the state m = lse, l = 1: lse is a logarithm, and not the sum",
            instead="finish(merge(State(torch.zeros_like(lse1), lse1, o1), State(torch.zeros_like(lse2), lse2, o2)))"),
    ],
)(merge_finished)  # fmt: skip


# ---- 0.7 ------------------------------------------------------------------------------------------------------------


def _on(case: str, fn: Callable[..., Any], *args: Any) -> Any:
    with running(case):
        return fn(*args)


class _Merge(NamedTuple):
    """What `merge` gives where a number stands for a state: these states, in order, so many merges deep."""

    leaves: list[Any]
    depth: int


def _tree_of(x: Any) -> _Merge:
    return x if isinstance(x, _Merge) else _Merge([x], 0)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


@exercise(
    "0.7",
    title="Merge as a tree",
    minutes=20,
    difficulty="Stretch",
    hints=[
        "In one round merge the neighbours 0 and 1, 2 and 3, ... That halves the list. Repeat until one state is left.",
        "A list of odd length has one state without a partner: hand it on to the next round as it is.",
        "The empty list needs an answer too: what is the sum of no states?",
    ],
)
def a_tree(merge_as_tree: Callable[..., State]) -> Any:
    return mending(merge_as_tree, _expect_a_tree)


def _expect_a_tree(merge_as_tree: Callable[..., State]) -> str:
    for n in (13, 1, 2, 3, 4, 5, 7, 8, 64, 100):
        case = f"{n} states"
        count, most, uneven = [0], math.ceil(math.log2(n)), list[tuple[int, int]]()

        def pair(a, b, n=n, count=count, uneven=uneven):
            count[0] += 1
            one, other = _tree_of(a), _tree_of(b)
            whole = _Merge(one.leaves + other.leaves, 1 + max(one.depth, other.depth))
            if 2 ** (whole.depth - 1) >= len(whole.leaves):
                uneven.append((len(one.leaves), len(other.leaves)))
            said = f"after {count[0]} merges of {_plural(n, 'state')} a sum has {len(whole.leaves)} of them in it"
            expect(max(count[0], len(whole.leaves)) <= 4 * n, said, diagnosis="extra-merges", case=f"{n} states")
            return whole

        got = _on(case, merge_as_tree, list(range(n)), pair, "nothing")
        said = "the function returns None: is a `return` missing?"
        expect(got is not None, said, diagnosis="returned-none", case=case)
        expect(
            count[0] or n == 1, "`merge` is never called: it makes one state of two", diagnosis="no-merge", case=case
        )
        every, depth = _tree_of(got)
        leaves = [leaf for leaf in every if leaf != "nothing"]
        lost, twice = sorted(set(range(n)) - set(leaves)), len(leaves) != len(set(leaves))
        sentence = f"states {lost} were left out; a state without a partner goes on to the next round"
        expect(not lost, sentence, diagnosis="state-lost", case=case)
        said = "a state was merged in twice: its keys would count double"
        expect(not twice, said, diagnosis="merged-twice", case=case)
        sentence = "the states were reordered: merge neighbours, so that the tree also serves operations that do not "
        sentence += "commute"
        if leaves == [*range(n)][::-1]:
            sentence = "they come in the reverse order: merge(left, right), the one with the earlier states first"
        expect(leaves == list(range(n)), sentence, diagnosis="reordered", case=case)
        idle = len(every) - len(leaves)
        said = "every state is merged with `nothing`, which is for the empty list alone"
        expect(idle < n, said, diagnosis="extra-merges", case=case)
        left, right = max(uneven, key=lambda x: abs(x[0] - x[1]), default=(0, 0))
        sentence = f"a sum of {_plural(left, 'state')} is merged with one of {right}: merge two that have as many, or "
        sentence += f"nearly\nThe result is {_plural(depth, 'merge')} deep; {n} states need no more than {most}"
        expect(depth <= most, sentence, diagnosis="not-a-tree", case=case)
        said = f"{_plural(count[0], 'merge')} for {_plural(n, 'state')}; {n - 1} suffice"
        times = "once" if idle == 1 else f"{idle} times"
        said += f": `nothing` is merged {times}, and is for the empty list" if idle else ""
        expect(count[0] == n - 1, said, diagnosis="extra-merges", case=case)
    _expect_a_sum_of_states(merge_as_tree)
    return "12 lists, each as flat as it can be"


def _expect_a_sum_of_states(merge_as_tree: Callable[..., State]) -> None:
    """Of none, and of some that are real."""
    case = "no states"
    nothing = identity(head_dim=2)
    got = _on(case, merge_as_tree, [], merge, nothing)
    sentence = "the sum of no states is the identity"
    expect(
        isinstance(got, tuple) and got is nothing or _same(got, nothing), sentence, diagnosis="empty-list", case=case
    )

    case = "real states"
    g = torch.Generator().manual_seed(3)
    x, v = 5 * torch.randn(37, generator=g, dtype=torch.float64), torch.randn(37, 2, generator=g, dtype=torch.float64)
    states = [block_state(x[i : i + 4], v[i : i + 4]) for i in range(0, 37, 4)]
    given = list(states)
    got = _on(case, merge_as_tree, states, merge, identity(head_dim=2, dtype=torch.float64))
    expect(states == given, "the list of states was changed; work on a copy", diagnosis="inputs-changed", case=case)
    expect_close(finish(State(*got))[0], torch.softmax(x, 0) @ v, what="the output", case=case)


def _same(got: Any, want: State) -> bool:
    return isinstance(got, tuple) and len(got) == 3 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- 0.8 ------------------------------------------------------------------------------------------------------------


def _lazily(r: random.Random) -> tuple[torch.Tensor, torch.Tensor, int, float]:
    n = r.randint(1, 20)
    return 4 * normal(r, n), 0.5 + normal(r, n, 2), r.randint(1, 8), r.choice((0.0, 1.0, 2.5, 6.0))


_NOISE, _VALUES = normal(random.Random(4), 24), 0.5 + normal(random.Random(5), 24, 2)
_CLIMBS = {
    "the maximum first": torch.linspace(4, -4, 24).double(),
    "random scores": 3 * _NOISE,
    "a slow climb": torch.linspace(0, 23, 24).double(),
    "a climb to 3000": torch.linspace(0, 3000, 24).double(),
    "a climb from -46 to 0": torch.linspace(-46, 0, 24).double(),
    "masked blocks first": _NOISE.masked_fill(torch.arange(24) < 9, -INF),
    "all masked": torch.full((24,), -INF, dtype=torch.float64),
    "steps of exactly the threshold": 2.5 * torch.arange(24, dtype=torch.float64),
}
_TOO_LOW = "exp overflowed: the reference must follow a maximum that is above it by more than the threshold"


@tensor_rule(
    "0.8",
    title="Skip the correction", minutes=30, difficulty="Stretch",
    hints=[
        "Keep a reference m that is allowed to be stale. For each block compute its maximum, and compare it with the "
        "*reference*, not with the last maximum seen.",
        "Only if the block's maximum is above m + threshold: correct l and o by exp(m - new) and let m be the block's "
        "maximum. Otherwise take the block's exponentials against the old m; they are exp(threshold) at most.",
        "At the end nothing changes: o / l and m + ln(l), with the reference m. The first block that holds a "
        "finite score sets m and is no correction.",
    ],
    returns="o, lse, corrections",
    inputs={
        f"{case}, blocks of {n}, threshold {threshold:.3g}": (x, _VALUES, n, threshold)
        for case, x in _CLIMBS.items() for n, threshold in ((4, 0.0), (4, 5.0), (1, 2.5), (7, 8 * math.log(2)))
    },
    draw=_lazily,
    also=[[  # one branch
        ("m = scores.new_tensor(-math.inf)", "m, last = scores.new_tensor(-math.inf), scores.new_tensor(-math.inf)"),
        ("if top == -math.inf", "last = torch.maximum(last, top)\n        if last == -math.inf"),
        ("if m == -math.inf:\n            m = top\n        elif", "if"),
        ("l, o, m = l * correction, o * correction, top\n            corrections += 1",
         "corrections = corrections + (1 if m > -math.inf else 0)\n"
         "            l, o, m = l * correction, o * correction, top"),
        ("(o / l if l > 0 else o)", "o / (l if l > 0 else 1)")]],
    nan={"masked": _NO_KEY, "": _TOO_LOW},
    notes={
        "correction": "l and o must be rescaled when the reference moves, by exp(old - new)",
        "m - top": "the correction is exp(m - top), old reference minus new, and never above 1",
        "threshold": "below the threshold a correction can wait", "top > m + threshold": "it moves where it is above, "
        "not where it is just reference + threshold", "m": "l and o refer to the reference",
        "last": "compare it with the reference, or many small steps add up unseen", "m + threshold": "it is compared "
        "with the reference", "l": "o / l, once, at the end",
        "top": "the reference moves to the block's maximum", "x - m": "terms refer to the reference",
    },
    rows=[
        Row("start-counted", "corrections: the first block sets the reference; that is no correction to count yet", [
            ("            m = top\n", "            m, corrections = top, corrections + 1\n")]),
        Row("drift", "the block was compared with the largest maximum seen: compare it with the reference, or many "
            "small steps add up unseen until exp overflows", [
            ("top > m + threshold", "top > scores[:start].max() + threshold")]),
        Row("compared-with-the-last-block", "the block was compared with the one before it: compare it with the "
            "reference, or many small steps add up unseen", [
            ("top > m + threshold", "top > scores[max(0, start - BLOCK_N) : start].max() + threshold")]),
        Row("lse-from-the-maximum", "lse is the true maximum plus ln(l), but l refers to the reference: lse = "
            "reference + ln(l)", [("m + torch.log(l)", "scores.max() + torch.log(l)")]),
        Row("moved-unseen", "the reference moves although no correction is made: below the threshold it stays as it is",
            [("            corrections += 1\n", "            corrections += 1\n        m = torch.maximum(m, top)\n")]),
    ],
    tries=500,
)  # fmt: skip
def lazy_attention(
    scores: torch.Tensor, v: torch.Tensor, BLOCK_N: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One row: scores [N], v [N, D] -> o [D], lse [], and the number of corrections made."""
    # BEGIN SOLUTION
    m = scores.new_tensor(-math.inf)  # the reference, perhaps stale
    l, o = scores.new_zeros(()), scores.new_zeros(v.shape[-1])
    corrections = 0
    for start in range(0, len(scores), BLOCK_N):
        x, v_block = scores[start : start + BLOCK_N], v[start : start + BLOCK_N]
        top = x.max()
        if top == -math.inf:
            continue  # a masked block adds nothing
        if m == -math.inf:
            m = top
        elif top > m + threshold:
            correction = torch.exp(m - top)
            l, o, m = l * correction, o * correction, top
            corrections += 1
        p = torch.exp(x - m)
        l, o = l + p.sum(), o + p @ v_block
    return (o / l if l > 0 else o), m + torch.log(l), corrections
    # END SOLUTION
