"""Checks of phase 0: attention and online softmax.

Each check runs the answer on inputs on which the usual mistakes give themselves away (a moving maximum, masked rows,
large scores, one element, other splits), and knows what those mistakes would have produced.
"""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashlab.attention.online_softmax import State, block_state, finish, identity, merge, softmax_safe
from flashlab.check import CheckFailed, expect, expect_close, running
from flashlab.check.lookup import Row
from flashlab.check.mistakes.row import INVERTED, NOT_RESCALED, OF_THE_OUTPUT, ROW_MISTAKES, walk
from flashlab.check.mistakes.steps import lazily, lazy_slips, row_gives, slips, usual
from flashlab.check.slips import Chosen, explain, explained, right_where
from flashlab.check.symptoms import watched
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule

INF = math.inf
LN2 = math.log(2)

_MINUS_INFINITY = (
    "NaN came out of exp(-inf - (-inf)): where the maximum itself is -inf there is nothing to add, so use 0"
)
_NO_KEY = (
    "a row that sees no key gives NaN: by -inf - (-inf), where the maximum itself is -inf, or by 0 / 0, where the sum "
    "is 0"
)


def _t(*values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def _call(case: str, fn: Callable[..., Any], *args: Any, unchanged: Sequence[torch.Tensor] = ()) -> Any:
    """fn(*args), its exceptions annotated with the case; `unchanged` must hold the same numbers after it."""
    __tracebackhide__ = True
    before = [x.clone() for x in unchanged]
    with running(case):
        got = fn(*args)
    same = all(torch.equal(x, y) for x, y in zip(unchanged, before, strict=True))
    sentence = "the function changed its inputs in place: write the result to new tensors"
    expect(same, sentence, diagnosis="inputs-changed", case=case)
    return got


def _parts(got: Any, names: str, case: str) -> tuple[Any, ...]:
    """Check that the answer is a tuple of as many parts as there are names."""
    __tracebackhide__ = True
    wanted = names.split()
    expect(got is not None, "the function returns None: is a `return` missing?", diagnosis="returned-none", case=case)
    fits = isinstance(got, tuple | list) and len(got) == len(wanted)
    kind = f"{len(got)} things" if isinstance(got, tuple | list) else type(got).__name__
    sentence = f"the function should return {len(wanted)} things, {', '.join(wanted)}, not {kind}"
    expect(fits, sentence, diagnosis="wrong-type", case=case)
    return tuple(got)


def _has_nan(*values: Any) -> bool:
    return any(bool(torch.as_tensor(x, dtype=torch.float64).isnan().any()) for x in values)


# ---- 0.1 ------------------------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@rule(
    "0.1",
    title="Where softmax overflows",
    minutes=5,
    difficulty="Warm-up",
    hints=[
        "One exponential overflows near ln(largest finite number). `torch.finfo(dtype).max` is that number.",
        "With n equal scores s the sum is n · e^s. Set it equal to the largest number and solve for s.",
    ],
    returns="the largest score",
    inputs=[(torch.float16, 1), (torch.float16, 8), (torch.bfloat16, 4096), (torch.float32, 1024)],
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


def _expect_shifted_exp(shifted_exp: Callable[..., Any]) -> None:
    __tracebackhide__ = True
    cases = {
        "shifted_exp of two rows": (_t([1.0, 2.0, 3.0], [-5.0, 0.0, -1.0]), _t([3.0], [0.0])),
        "shifted_exp near 1000": (_t([999.0, 1000.0]), _t(1000.0)),
        "shifted_exp of masked scores": (_t([-INF, 1.0], [-INF, -INF]), _t([1.0], [-INF])),
    }
    for case, (x, m) in cases.items():
        got = _call(case, shifted_exp, x, m, unchanged=[x, m])
        right = torch.where(torch.isneginf(x), 0.0, torch.exp(x - m.clamp(min=-1e30)))
        if not torch.isneginf(m).any():
            expect_close(got, right, what="shifted_exp(x, m)", case=case)
            continue
        expect(not _has_nan(got), f"shifted_exp: {_MINUS_INFINITY}", diagnosis="minus-infinity", case=case)
        both = torch.isneginf(x) & torch.isneginf(m)
        told = {
            "masked-counts-as-one": (
                right.masked_fill(both, 1.0),
                "shifted_exp is 1 where x and m are both -inf: such a score is masked, and its exponential is 0",
            ),
            "row-of-zeros": (
                right.masked_fill(torch.isneginf(x).any(-1, keepdim=True), 0.0),
                "shifted_exp is 0 in a whole row as soon as one of its scores is masked: only that score's is 0",
            ),
        }
        expect_close(got, right, what="shifted_exp(x, m)", case=case, mistakes=told)


@exercise(
    "0.2",
    title="The safe softmax",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Subtract from each row its own maximum: `x.amax(dim=-1, keepdim=True)`, or `row_max(x)[..., None]`.",
        "In a row of nothing but -inf the maximum is -inf too. Replace that one by 0 before subtracting: "
        "`m.masked_fill(torch.isneginf(m), 0.0)`.",
        "Such a row then has the sum 0. Divide by 1 there: `l.masked_fill(l == 0, 1.0)`.",
    ],
)
def _(softmax: Callable[..., torch.Tensor], shifted_exp: Callable[..., torch.Tensor] | None = None) -> Any:
    if shifted_exp is not None:
        _expect_shifted_exp(shifted_exp)
    x = _t([1.0, 2.0, 3.0], [3.0, 1.0, 1.0])
    mistakes = {
        "wrong-axis": (torch.softmax(x, dim=0), "the softmax runs along the wrong axis: each row is to sum to 1"),
        "flattened": (
            torch.softmax(x.flatten(), 0).view(2, 3),
            "all rows share one sum: keep the axes apart with dim=-1, keepdim=True",
        ),
        "not-normalised": (
            torch.exp(x - x.amax(-1, keepdim=True)),
            "the exponentials are right, but they are not divided by their row's sum",
        ),
    }
    got = _call("two small rows", softmax, x, unchanged=[x])
    expect_close(got, softmax_safe(x), what="the softmax", case="two small rows", mistakes=mistakes)

    case = "three rows and two axes before them"
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).sin().view(2, 3, 4) * 4
    told = {
        f"wrong-axis {dim}": (torch.softmax(x, dim), f"the softmax runs along dim={dim}: the last axis is dim=-1")
        for dim in (0, 1)
    }
    expect_close(_call(case, softmax, x), softmax_safe(x), what="the softmax", case=case, mistakes=told)
    for case, x in {"scores of 1000": _t([1000.0, 1001.0]), "scores of -1000": _t([-1000.0, -1001.0])}.items():
        got = _call(case, softmax, x)
        sentence = "the exponentials overflowed or all underflowed: subtract the row maximum before exp"
        fine = not _has_nan(got) and torch.as_tensor(got).sum() > 0.5
        expect(fine, sentence, diagnosis="no-max-subtraction", case=case)
        expect_close(got, softmax_safe(x), what="the softmax", case=case)

    case = "one score far above the others"
    x = _t([0.0] * 15 + [1000.0])
    got = _call(case, softmax, x)
    sentence = "exp overflowed: what is subtracted from each row must be its maximum, so that no exponent is above 0"
    expect(not _has_nan(got), sentence, diagnosis="not-the-maximum", case=case)
    expect_close(got, softmax_safe(x), what="the softmax", case=case)

    case = "rows at different heights"
    x = _t([0.0, 1.0], [2000.0, 2001.0])
    got = _call(case, softmax, x)
    sentence = "one maximum was taken for all rows; a row far below it underflows: take each row's own"
    lowered = torch.exp(x - x.max()) / torch.exp(x - x.max()).sum(-1, keepdim=True)
    as_if = torch.allclose(torch.as_tensor(got, dtype=x.dtype).nan_to_num(), lowered.nan_to_num())
    expect(not as_if, sentence, diagnosis="global-max", case=case)
    sentence = (
        "a row's exponentials overflowed, or all underflowed: the maximum that is subtracted is not this row's own"
    )
    own = not _has_nan(got) and bool((torch.as_tensor(got).sum(-1) > 0.5).all())
    expect(own, sentence, diagnosis="not-the-rows-maximum", case=case)
    expect_close(got, softmax_safe(x), what="the softmax", case=case)

    case = "masked scores and a masked row"
    x = _t([-INF, 1.0, 2.0], [-INF, -INF, -INF])
    got = _call(case, softmax, x, unchanged=[x])
    expect(not _has_nan(got), _NO_KEY, diagnosis="minus-infinity", case=case)
    uniform = torch.where(torch.isneginf(x).all(-1, keepdim=True), 1 / 3, softmax_safe(x))
    mistakes = {
        "finite-sentinel": (
            uniform,
            "a fully masked row gives equal weights to keys that nobody may see; its softmax is 0 everywhere",
        )
    }
    expect_close(got, softmax_safe(x), what="the softmax", case=case, mistakes=mistakes)

    for dtype in (torch.float16, torch.float32):
        x = (4 * torch.randn(2, 3, 17, generator=torch.Generator().manual_seed(0))).to(dtype)
        case = f"[2, 3, 17] in {str(dtype).removeprefix('torch.')}"
        expect_close(_call(case, softmax, x), softmax_safe(x), what="the softmax", case=case, dtype=dtype)
    x = _t(7.0)
    expect_close(_call("one element", softmax, x), _t(1.0), what="the softmax", case="one element")
    return "10 cases: any height, masked rows, one element"


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


def _normalizer(xs: Sequence[float], mistake: str = "") -> tuple[float, float]:
    """(m, l) as the right function gives it, or as one with a known mistake would."""
    if mistake == "unshifted":
        return max(xs), sum(math.exp(x) for x in xs)
    row = torch.tensor(list(xs), dtype=torch.float64)
    m, l, _ = walk(row, torch.zeros_like(row)[:, None], 1, mistake)
    return m.item(), l.item()


def _expect_maximum(m: Any, xs: Sequence[float], case: str) -> None:
    __tracebackhide__ = True
    want = max(xs, default=-INF)
    told = {}
    if xs:
        unmasked = [x for x in xs if x > -INF] or [-INF]
        told = {
            "minimum": (min(unmasked), "m is the smallest score; it is the largest"),
            "m-not-updated": (unmasked[0], "m is the first score, though a larger one comes later"),
            "last-score": (xs[-1], "m is the last score, though a larger one came before it"),
        }
        if want > -INF:
            masked = (-INF, "m is -inf, though a finite score comes later: a masked score does not end the row")
            told["stopped-at-the-mask"] = masked
    expect(
        not (isinstance(m, float | int) and want < m < INF and m not in xs),
        f"m is {m:.6g}, and no score is that large: it must start at -inf, not at a finite number",
        diagnosis="finite-start",
        case=case,
    )
    expect_close(m, want, what="the maximum m", diagnosis="wrong-maximum", case=case, mistakes=told)


@exercise(
    "0.3",
    title="Maximum and sum in one pass",
    minutes=15,
    hints=[
        "Start with m = -inf and l = 0. For each x: the new maximum first, under a new name, since the old one is "
        "still needed.",
        "l = l * exp(m - m_new) + exp(x - m_new), then m = m_new. The order of these two lines matters.",
        "If m_new is still -inf, nothing has been seen yet: go on to the next x before any subtraction.",
    ],
)
def _(online_max_and_sum: Callable[..., tuple[float, float]]) -> Any:
    rows = {
        "the lecture's row": [1 * LN2, 3 * LN2, 2 * LN2, 4 * LN2, 0.0],
        "the maximum comes first": [4.0, 1.0, 2.0, 3.0],
        "the maximum moves at every step": [0.5 * i for i in range(-6, 6)],
        "the maximum comes again": [1.0, 2.0, 0.5, 2.0, 2.0],
        "one element": [-3.0],
        "scores of 800": [799.0, 801.0, 800.0],
        "scores of -800": [-801.0, -799.0],
        "a jump of 1000": [0.0, 1000.0, 1.0],
        "masked scores in between": [1.0, -INF, 2.0, -INF],
        "masked scores first": [-INF, -INF, 2.0, 3.0],
        "all masked": [-INF, -INF],
        "an empty row": [],
    }

    def slipped() -> tuple[str, str] | None:
        known = {case: xs for case, xs in rows.items() if max(xs, default=-INF) > -INF}
        got: list[list[float]] = []
        for xs in known.values():
            try:
                got.append([float(x) for x in online_max_and_sum(iter(xs))])
            except (OverflowError, ZeroDivisionError):
                got.append([INF, INF])
        fits = row_gives([(xs, 1) for xs in known.values()], got, lambda m, of_l, of_o: (m, sum(of_l)))
        return explain(fits, slips(["l"]), most=1)

    with explained(slipped):
        _expect_max_and_sum(online_max_and_sum, rows)
    return f"{len(rows) + 1} rows, each read once"


def _expect_max_and_sum(online_max_and_sum: Callable[..., tuple[float, float]], rows: dict[str, list[float]]) -> None:
    __tracebackhide__ = True
    for case, xs in rows.items():
        most = [0]
        unshifted = "exp overflowed: every exponent must be a score minus the running maximum"
        try:
            got = _call(case, online_max_and_sum, _watched_row(xs, most))
        except OverflowError as error:
            raise CheckFailed(unshifted, diagnosis="no-max-subtraction", case=case) from error
        m, l = _parts(got, "m l", case)
        want_m, want_l = _normalizer(xs)
        if m == want_l and l == want_m and want_m != want_l:
            raise CheckFailed("the two results are swapped: return m, l", diagnosis="swapped", case=case)
        _expect_maximum(m, xs, case)
        expect(
            not (xs and want_l and l == 0),
            "l is 0: the row was read a second time, and by then it was used up; both must be found in one loop",
            diagnosis="two-passes",
            case=case,
        )
        if _has_nan(l):
            masked = xs[0] == -INF
            slug, sentence = ("minus-infinity", _MINUS_INFINITY) if masked else ("correction-inverted", INVERTED)
            raise CheckFailed(sentence, diagnosis=slug, case=case)
        expect(
            not (want_m == -INF and want_l == 0 and l == l and l != 0),
            f"l is {l:.6g} for a row without a finite score: a masked score adds nothing",
            diagnosis="masked-counted",
            case=case,
        )
        mistakes = {}
        if xs and want_m > -INF:
            known = [slug for slug in ROW_MISTAKES if slug not in OF_THE_OUTPUT and slug != "l-not-rescaled"]
            mistakes = {slug: (_normalizer(xs, slug)[1], f"l: {ROW_MISTAKES[slug]}") for slug in known}
            once = _normalizer(sorted(set(xs)))[1]
            mistakes["equal-scores-once"] = (once, "scores that are equal count once; each has a term of its own")
            mistakes["lse-for-l"] = (want_m + math.log(want_l), "that is m + ln(l), the log-sum-exp; return l itself")
            mistakes["log-for-l"] = (math.log(want_l), "that is ln(l); return l itself")
            if max(xs) < 700:
                value = _normalizer([x for x in xs if x > -INF], "unshifted")[1]
                mistakes["no-max-subtraction"] = (value, "l is the sum of exp(x): subtract the running maximum")
        expect_close(l, want_l, what="the sum l", case=case, tol=1e-9 * max(1.0, want_l), mistakes=mistakes)

    case, most = "a row of 1000", [0]
    xs = [math.sin(i) for i in range(1000)]
    _, l = _parts(_call(case, online_max_and_sum, _watched_row(xs, most)), "m l", case)
    expect_close(l, _normalizer(xs)[1], what="the sum l", case=case)
    sentence = f"{most[0]} scores were kept in memory at once; the point is to keep two numbers, m and l"
    expect(most[0] <= 8, sentence, diagnosis="row-kept", case=case)


# ---- 0.4 ------------------------------------------------------------------------------------------------------------


def _whole_states(a: State, b: State) -> dict[str, bool]:
    """Whether a whole state is a, for each order in which one may look for a masked row; none without one."""
    masked_a, masked_b = (bool(torch.isneginf(x.m).any()) for x in (a, b))
    if not (masked_a or masked_b) or not a.m.ndim:
        return {}
    return {"a first": not masked_a, "b first": masked_b}


def _expect_state(got: Any, a: State, b: State, case: str) -> None:
    """Compare a merged state with the right one; `a` and `b` are what was merged."""
    __tracebackhide__ = True
    m, l, o = _parts(got, "m l o", case)
    expect(
        hasattr(got, "m") and hasattr(got, "l") and hasattr(got, "o"),
        f"the function returns a plain {type(got).__name__}: return State(m, l, o), whose parts have names",
        diagnosis="wrong-type",
        case=case,
    )
    right = merge(a, b)
    told = {
        "m-of-a": (a.m, "m is a's maximum, also where b's is larger: either may be"),
        "m-of-b": (b.m, "m is b's maximum, also where a's is larger: either may be"),
        "minimum": (torch.minimum(a.m, b.m), "m is the smaller of the two maxima; it is the larger"),
        "global-max": (right.m.max().expand(right.m.shape), "m is one maximum for all rows: each row has its own"),
        "m-added": (a.m + b.m, "m is the sum of the two maxima; it is the larger of them"),
        "lse-for-m": (
            torch.logaddexp(a.m, b.m),
            "m is a log-sum-exp of both; it is the larger of the two maxima",
        ),
        "guard-in-m": (
            right.m.masked_fill(torch.isneginf(right.m), 0.0),
            "a row that saw no key has m = -inf: the 0 that keeps NaN out belongs in the exponents only",
        ),
    }
    rows = right.m.shape
    told |= {
        f"rows-together {i}": (
            x.expand(rows),
            "m is taken from one of the two for all rows at once: compare row by row, with torch.maximum",
        )
        for i, x in enumerate((a.m, b.m))
        if bool((a.m > b.m).any()) and bool((b.m > a.m).any())
    }
    expect_close(m, right.m, what="m", diagnosis="wrong-maximum", case=case, dtype=right.m.dtype, mistakes=told)
    if _has_nan(l, o) and torch.isneginf(torch.minimum(a.m, b.m)).any():
        raise CheckFailed(_MINUS_INFINITY, diagnosis="minus-infinity", case=case)

    reference = right.m.masked_fill(torch.isneginf(right.m), 0.0)
    ca, cb, one = torch.exp(a.m - reference), torch.exp(b.m - reference), torch.ones_like(a.m)

    def both_with(wa: torch.Tensor, wb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.l * wa + b.l * wb, a.o * wa[..., None] + b.o * wb[..., None]

    either = "was not rescaled: either of the two may have the smaller maximum"
    known: dict[str, tuple[Any, Any, str]] = {
        "only-the-first-rescaled": (ca, one, f"b {either}"),
        "not-rescaled": (one, one, f"what is kept {NOT_RESCALED}"),
        "only-the-second-rescaled": (one, cb, f"a {either}"),
        "correction-inverted": (torch.exp(reference - a.m), torch.exp(reference - b.m), INVERTED),
        "corrections-swapped": (cb, ca, "each state was multiplied by the other one's correction"),
        "base-2": (torch.exp2(a.m - reference), torch.exp2(b.m - reference), ROW_MISTAKES["base-2"]),
        "only-a": (one * (a.m >= b.m), one * (b.m > a.m), "the state with the smaller maximum was dropped"),
    }
    whole = (
        "one of the two states is returned as a whole as soon as one of its rows, or of the other's, is masked: look "
        "at each row by itself"
    )
    for first, of_a in _whole_states(a, b).items():
        known[f"whole-state {first}"] = (one * of_a, one * (not of_a), whole)
    wrong = {slug: (*both_with(wa, wb), sentence) for slug, (wa, wb, sentence) in known.items()}
    told = {slug: (x, why) for slug, (x, _, why) in wrong.items()}
    terms = "l is a sum of terms, so those of both states add up, each l times its own correction"
    told |= {
        "l-like-a-maximum": (torch.maximum(a.l * ca, b.l * cb), f"the larger of the two corrected l is kept: {terms}"),
        "l-like-a-maximum 2": (torch.maximum(a.l, b.l), f"the larger of the two l is kept, as with a maximum: {terms}"),
        "l-like-a-minimum": (torch.minimum(a.l * ca, b.l * cb), f"the smaller of the two l is kept: {terms}"),
        "l-like-a-minimum 2": (torch.minimum(a.l, b.l), f"the smaller of the two l is kept: {terms}"),
        "l-as-a-logarithm": (
            torch.logaddexp(a.l, b.l),
            f"the two l are joined as logarithms are, with logaddexp: {terms}",
        ),
        "l-multiplied": (a.l * ca * b.l * cb, f"the two l are multiplied: {terms}"),
        "l-multiplied 2": (a.l * b.l, f"the two l are multiplied: {terms}"),
        "l-of-one": (a.l, f"l is a's, as it was: {terms}"),
        "l-of-one 2": (b.l, f"l is b's, as it was: {terms}"),
        "l-subtracted": (a.l * ca - b.l * cb, f"b's l is subtracted: {terms}"),
    }
    expect_close(l, right.l, what="l", case=case, dtype=right.l.dtype, mistakes=told)

    mistakes = {slug: (x, f"l is right, but o is not: {why}") for slug, (_, x, why) in wrong.items()}
    mistakes["normalised-early"] = (
        right.o / right.l.masked_fill(right.l == 0, 1.0)[..., None],
        "o was divided by l: a state stays unnormalised, finish divides once at the end",
    )
    terms = "o is a sum of terms, so those of both states add up, each o times its own correction"
    wa, wb = a.o * ca[..., None], b.o * cb[..., None]
    mistakes["o-like-a-maximum"] = torch.maximum(wa, wb), f"the larger of the two corrected o is kept: {terms}"
    mistakes["o-like-a-maximum 2"] = torch.maximum(a.o, b.o), f"the larger of the two o is kept: {terms}"
    mistakes["o-multiplied"] = wa * wb, f"the two o are multiplied: {terms}"
    mistakes["o-weighted-by-l"] = (
        a.l[..., None] * wa + b.l[..., None] * wb,
        f"each o is multiplied by its l as well; it is not normalised: {terms}",
    )
    if a.m.ndim and a.m.shape[-1] == a.o.shape[-1]:
        mistakes["broadcast-along-the-wrong-axis"] = (
            a.o * ca + b.o * cb,
            "the corrections were broadcast along the columns of o; there is one a row: correction[..., None]",
        )
    expect_close(o, right.o, what="o", case=case, dtype=right.o.dtype, mistakes=mistakes)


@exercise(
    "0.4",
    title="Merge two states",
    minutes=15,
    hints=[
        "Take the common maximum first: `torch.maximum(a.m, b.m)`. Each side then has its own correction.",
        "l adds up as a.l * exp(a.m - m) + b.l * exp(b.m - m), and o the same way; o has one more axis, so its "
        "corrections are `[..., None]`.",
        "When both maxima are -inf, refer to 0 instead: `shifted_exp` of exercise 0.2 does that.",
    ],
)
def _(merge_states: Callable[..., State]) -> Any:
    g = torch.Generator().manual_seed(0)

    def block(low: float, n: int = 5, rows: tuple[int, ...] = (), d: int = 3) -> State:
        return block_state(
            low + torch.randn(*rows, n, generator=g, dtype=torch.float64),
            0.5 + torch.randn(*rows[:-1], n, d, generator=g, dtype=torch.float64),
        )

    low, high, nothing = block(0.0), block(4.0), identity(head_dim=3, dtype=torch.float64)
    masked = block_state(_t(-INF, -INF), torch.ones(2, 3, dtype=torch.float64))
    seen, keys = _t([1.0, 2.0], [-INF, -INF], [0.0, -INF], [-INF, -INF]), torch.ones(2, 3, dtype=torch.float64)
    mixed, mixed_too = block_state(seen, keys), block_state(seen.flip(0).roll(1, 0) + 1, 2 * keys)
    many, more = block(0.0, rows=(6,)), block(0.0, rows=(6,))  # in each row another one has the maximum
    cases = {
        "equal maxima": (low, low),
        "b has the maximum": (low, high),
        "a has the maximum": (high, low),
        "six rows": (many, more),
        "as many rows as columns": (block(0.0, rows=(3,)), block(1.0, rows=(3,))),
        "scores of 1000": (block(1000.0), block(1003.0)),
        "b is the identity": (low, nothing),
        "a is the identity": (nothing, low),
        "a is masked": (masked, low),
        "the identity twice": (nothing, nothing),
        "some rows masked in both, some in one": (mixed, mixed_too),
        "batch and heads": (block(0.0, rows=(2, 2, 4)), block(0.0, rows=(2, 2, 4))),
    }

    def neutral() -> tuple[str, str] | None:
        """Is it right where something that it should use is the same in both, or 1?"""
        plain = [(x, y) for x, y in cases.values() if not any(torch.isneginf(s.m).any() for s in (x, y))]
        tried: list[tuple[State, State, str]] = [(x, y, "") for x, y in plain]
        for x, y in plain:
            units = [State(s.m, torch.ones_like(s.l), s.o) for s in (x, y)]
            tried += [
                (units[0], units[1], "l of both states is 1"),
                (x, State(x.m, y.l, y.o), "both states have the same m"),
            ]
            tried += [(x, State(y.m, x.l, y.o), "both states have the same l")]

        def is_right(x: State, y: State, _: str) -> bool:
            got = merge_states(x, y)
            return all(torch.allclose(p, q, atol=1e-9) for p, q in zip(got, merge(x, y), strict=True))

        words = dict.fromkeys(words for *_, words in tried if words)
        return right_where({w: lambda x, y, has, w=w: has == w for w in words}, tried, is_right, "the state")

    with explained(neutral):
        for case, (a, b) in cases.items():
            _expect_state(_call(case, merge_states, a, b, unchanged=[*a, *b]), a, b, case)

    case = "three blocks, both ways"
    a, b, c = block(0.0), block(3.0), block(1.0)
    right, _ = finish(merge(merge(a, b), c))
    for way in (
        lambda: merge_states(State(*merge_states(a, b)), c),
        lambda: merge_states(a, State(*merge_states(b, c))),
    ):
        o, _ = finish(State(*_call(case, way)))
        expect_close(o, right, what="the output of three blocks", case=case)
    return "13 cases, the identity and masked blocks among them"


# ---- 0.5 ------------------------------------------------------------------------------------------------------------


def _agree(got: Any, right: torch.Tensor) -> bool:
    return isinstance(got, torch.Tensor) and got.shape == right.shape and torch.allclose(got.double(), right, atol=1e-9)


@exercise(
    "0.5",
    title="Bug hunt: right until it is not",
    minutes=15,
    difficulty="Bug hunt",
    untouched="1e0d4bd35900",
    history="Algorithm 1 of the FlashAttention-2 paper inverts this factor too (Dao-AILab/flash-attention, issue 991)",
    hints=[
        "The function is right whenever the largest score is in the first block. What is different in the code path of "
        "a later block that brings a new maximum?",
        "Print `correction` for scores 0, 0, 5, 0 in blocks of 2. Can a correction be above 1?",
        "Old terms are too large, by what? They are exp(x - m) and should be exp(x - m_new). Write down the quotient.",
    ],
)
def _(attention_in_blocks: Callable[..., torch.Tensor]) -> Any:
    g = torch.Generator().manual_seed(1)
    v = 0.5 + torch.randn(12, 3, generator=g, dtype=torch.float64)
    x = torch.randn(12, generator=g, dtype=torch.float64)
    first, late = x.clone(), x.clone()
    first[1], late[10] = 4.0, 4.0
    rows = {
        "the largest score in the first block": first,
        "the largest score in the last block": late,
        "a maximum that moves in every block": torch.linspace(-3, 3, 12, dtype=torch.float64),
        "scores around 1000": late + 1000,
        "scores that are all equal": torch.full_like(x, 2.0),
    }

    def slipped() -> tuple[str, str] | None:
        inputs = [(row, n) for row in rows.values() for n in (4, 5, 1, 12, 100)]
        got = [attention_in_blocks(row, v, n).tolist() for row, n in inputs]
        values = v.tolist()

        def output(m: float, of_l: Sequence[float], of_o: Sequence[float]) -> list[float]:
            return [sum(w * x[i] for w, x in zip(of_o, values, strict=True)) / sum(of_l) for i in range(3)]

        return explain(row_gives([(row.tolist(), n) for row, n in inputs], got, output), slips(), paired=usual)

    with explained(slipped):
        _expect_attention_in_blocks(attention_in_blocks, rows, v)
    return "25 cases"


def _expect_attention_in_blocks(
    attention_in_blocks: Callable[..., torch.Tensor], rows: dict[str, torch.Tensor], v: torch.Tensor
) -> None:
    __tracebackhide__ = True
    for case, row in rows.items():
        for n in (4, 5, 1, 12, 100):
            name = f"{case}, blocks of {n}"
            got = _call(name, attention_in_blocks, row, v, n, unchanged=[row, v])
            expect(
                got is not None,
                "the function returns None: is a `return` missing?",
                diagnosis="returned-none",
                case=name,
            )
            overflow = "exp overflowed: every exponent must be a score minus the running maximum"
            unshifted = _finite_where(got, v[0]) or row.max() < 700
            expect(unshifted, overflow, diagnosis="no-max-subtraction", case=name)
            right = walk(row, v, n)[2]
            mistakes = {}
            if watched() is not None or not _agree(got, right):
                mistakes = {slug: (walk(row, v, n, slug)[2], why) for slug, why in ROW_MISTAKES.items()}
                for slug, why in ROW_MISTAKES.items():  # and what was wrong before is wrong still
                    both = walk(row, v, n, f"correction-inverted+{slug}")[2]
                    mistakes[f"correction-inverted {slug}"] = (both, f"{INVERTED}. And {why}")
            expect_close(got, right, what="the output", case=name, mistakes=mistakes)


# ---- 0.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "0.6",
    title="Merge two finished results",
    minutes=15,
    hints=[
        "A finished result (o, lse) is a state. Which m and which l has it? Look at φ(m, l, o) in section 8.",
        "State(m=lse, l=1, o=o). Merge two of them, then finish.",
        "Or directly: with m = max(lse1, lse2), the weights are w1 = exp(lse1 - m) and w2 = exp(lse2 - m); "
        "o = (w1 o1 + w2 o2) / (w1 + w2) and lse = m + ln(w1 + w2). Mind two rows that saw no key.",
    ],
)
def _(merge_results: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    g = torch.Generator().manual_seed(2)

    def result(low: float, rows: tuple[int, ...] = (4,), n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
        scores = low + torch.randn(*rows, n, generator=g, dtype=torch.float64)
        return finish(block_state(scores, 1 + torch.randn(n, 2, generator=g, dtype=torch.float64)))

    nothing = finish(identity(4, head_dim=2, dtype=torch.float64))
    cases = {
        "the second is heavier": (*result(0.0), *result(2.0)),
        "the first is heavier": (*result(2.0), *result(0.0)),
        "equal weights": (_t([0.0, 2.0]), _t(1.0), _t([4.0, 6.0]), _t(1.0)),
        "lse of 1000": (*result(1000.0), *result(1001.0)),
        "lse of -1000": (*result(-1000.0), *result(-1001.0)),
        "the second saw no key": (*result(0.0), *nothing),
        "neither saw a key": (*nothing, *nothing),
    }

    def weighed() -> tuple[str, str] | None:
        """o is linear in o1 and o2: with ones and zeros it is the weight of each."""
        for case, (o1, lse1, o2, lse2) in cases.items():
            total = torch.logaddexp(lse1, lse2)
            right = torch.stack([torch.exp(x - total).nan_to_num() for x in (lse1, lse2)], -1).reshape(-1, 2)
            ones, zeros = torch.ones_like(o1), torch.zeros_like(o2)
            mine = [merge_results(a, lse1, b, lse2)[0][..., 0] for a, b in ((ones, zeros), (zeros, ones))]
            weights = torch.stack(mine, -1).reshape(-1, 2)
            off = (weights - right).abs().sum(-1)
            if off.max() > 1e-7:
                (a, b), (c, d) = weights[off.argmax()].tolist(), right[off.argmax()].tolist()
                words = [f"{n} has the weight {x:.4g} in o, and should have {y:.4g} = exp(its lse - the whole lse)"
                         for n, x, y in (("the first", a, c), ("the second", b, d)) if abs(x - y) > 1e-7]  # fmt: skip
                return "wrong-weights", f"{case}: {'; '.join(words)}"
        return None

    with explained(weighed):
        _expect_merged(merge_results, cases)
    case = "three parts, one after another"
    scores, v = (
        3 * torch.randn(4, 9, generator=g, dtype=torch.float64),
        torch.randn(9, 2, generator=g, dtype=torch.float64),
    )
    parts = [finish(block_state(scores[:, i : i + 3], v[i : i + 3])) for i in (0, 3, 6)]
    o, lse = _call(case, lambda: merge_results(*merge_results(*parts[0], *parts[1]), *parts[2]))
    expect_close(o, softmax_safe(scores) @ v, what="o", case=case)
    expect_close(lse, torch.logsumexp(scores, -1), what="lse", case=case)
    return "8 cases, rows without a key among them"


def _expect_merged(merge_results: Callable[..., Any], cases: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
    __tracebackhide__ = True
    for case, (o1, lse1, o2, lse2) in cases.items():
        got = _call(case, merge_results, o1, lse1, o2, lse2, unchanged=[o1, lse1, o2, lse2])
        o, lse = _parts(got, "o lse", case)
        a, b = (State(s, torch.isfinite(s).to(s.dtype), r) for r, s in ((o1, lse1), (o2, lse2)))
        want_o, want_lse = finish(merge(a, b))
        if _has_nan(o, lse) or not _finite_where(o, want_o):
            empty = torch.isneginf(want_lse).any()
            overflow = "the weights overflowed or underflowed: subtract the larger lse before exp"
            slug, sentence = ("minus-infinity", _NO_KEY) if empty else ("no-max-subtraction", overflow)
            raise CheckFailed(sentence, diagnosis=slug, case=case)
        expect(
            want_lse.isneginf().all() or not torch.as_tensor(lse).isneginf().all(),
            "lse is -inf, the logarithm of a sum that is 0: a finished result counts with a sum of 1 beside m = lse",
            diagnosis="empty-sum",
            case=case,
        )
        w1, w2 = torch.exp(lse1 - want_lse)[..., None], torch.exp(lse2 - want_lse)[..., None]
        m = torch.maximum(lse1, lse2)
        total = lse1 + lse2
        mistakes = {
            "averaged": ((o1 + o2) / 2, "o is the plain average; the parts are as heavy as their sums of exponentials"),
            "added": (
                o1 + o2,
                "the outputs were added; each is already divided by its own sum, so they must be weighted",
            ),
            "weighted-by-lse": (
                (o1 * lse1[..., None] + o2 * lse2[..., None]) / total[..., None],
                "the outputs are weighted by lse; the weight is exp(lse)",
            ),
            "base-2": (
                (torch.exp2(lse1 - m)[..., None] * o1 + torch.exp2(lse2 - m)[..., None] * o2)
                / (torch.exp2(lse1 - m) + torch.exp2(lse2 - m))[..., None],
                "2 is raised to lse; lse is a natural logarithm, so the weights are e to the lse",
            ),
            "largest-only": (
                torch.where((lse1 >= lse2)[..., None], o1, o2),
                "the lighter of the two results is dropped; both count, by their weights",
            ),
            "only-the-first": (o1, "o is the first result: the second is missing"),
            "only-the-second": (o2, "o is the second result: the first is missing"),
            "weights-swapped": (w2 * o1 + w1 * o2, "each output was multiplied by the other one's weight"),
            "not-normalised": (
                torch.exp(lse1 - m)[..., None] * o1 + torch.exp(lse2 - m)[..., None] * o2,
                "the weights do not sum to 1: divide by their sum",
            ),
        }
        if not torch.isneginf(want_lse).any():
            expect_close(o, want_o, what="o", case=case, mistakes=mistakes)
        else:
            expect_close(o, want_o, what="o", case=case)
        mistakes = {
            "lse-added": (total, "the two lse were added; add their exponentials, then take the logarithm"),
            "lse-is-the-maximum": (m, "lse is the larger of the two; the other one's share is missing"),
            "lse-sign": (-want_lse, "lse has the wrong sign: it is m + ln(w1 + w2)"),
            "lse-difference": (
                2 * m - want_lse,
                "the logarithm was subtracted from the maximum; add it: lse = m + ln(w1 + w2)",
            ),
            "lse-mean": (total / 2, "lse is the mean of the two; add their exponentials, then take the logarithm"),
            "lse-in-base-2": (want_lse / LN2, "lse is in base 2; take the natural logarithm"),
            "lse-mixed-bases": (m + (want_lse - m) / LN2, "m is natural and the logarithm in base 2: use torch.log"),
            "log-forgotten": (m + torch.exp(want_lse - m), "lse is m plus the sum of the weights; take its logarithm"),
            "lse-without-the-maximum": (want_lse - m, "the maximum was subtracted, and not added back"),
        }
        expect_close(lse, want_lse, what="lse", case=case, mistakes=mistakes)


def _finite_where(got: Any, want: torch.Tensor) -> bool:
    got = torch.as_tensor(got, dtype=torch.float64)
    return got.shape != want.shape or bool(got[want.isfinite()].isfinite().all())


# ---- 0.7 ------------------------------------------------------------------------------------------------------------


def _depth(tree: Any) -> int:
    return 1 + max(_depth(part) for part in tree) if isinstance(tree, tuple) else 0


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _leaves(tree: Any) -> list[int]:
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


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
def _(merge_as_tree: Callable[..., State]) -> Any:
    for n in (1, 2, 3, 4, 5, 7, 8, 13, 64, 100):
        case = f"{n} states"
        count = [0]

        def pair(a, b, count=count):
            count[0] += 1
            return (a, b)

        # Numbers for states and tuples for merges: the result is the tree itself.
        tree = _call(case, merge_as_tree, list(range(n)), pair, "nothing")
        expect(
            tree is not None, "the function returns None: is a `return` missing?", diagnosis="returned-none", case=case
        )
        leaves = [leaf for leaf in _leaves(tree) if leaf != "nothing"]
        lost, twice = sorted(set(range(n)) - set(leaves)), len(leaves) != len(set(leaves))
        sentence = f"states {lost} were left out; a state without a partner goes on to the next round"
        expect(not lost, sentence, diagnosis="state-lost", case=case)
        expect(
            not twice, "a state was merged in twice: its keys would count double", diagnosis="merged-twice", case=case
        )
        sentence = (
            "the states were reordered: merge neighbours, so that the tree also serves operations that do not commute"
        )
        expect(leaves == list(range(n)), sentence, diagnosis="reordered", case=case)
        most = math.ceil(math.log2(n))
        sentence = (
            f"the result is {_plural(_depth(tree), 'merge')} deep; {_plural(n, 'state')} need no more than {most}"
        )
        expect(_depth(tree) <= most, sentence, diagnosis="not-a-tree", case=case)
        expect(
            count[0] == n - 1,
            f"{_plural(count[0], 'merge')} for {_plural(n, 'state')}; {n - 1} suffice",
            diagnosis="extra-merges",
            case=case,
        )

    case = "no states"
    nothing = identity(head_dim=2)
    got = _call(case, merge_as_tree, [], merge, nothing)
    sentence = "the sum of no states is the identity"
    expect(
        isinstance(got, tuple) and got is nothing or _same(got, nothing), sentence, diagnosis="empty-list", case=case
    )

    case = "real states"
    g = torch.Generator().manual_seed(3)
    x, v = 5 * torch.randn(37, generator=g, dtype=torch.float64), torch.randn(37, 2, generator=g, dtype=torch.float64)
    states = [block_state(x[i : i + 4], v[i : i + 4]) for i in range(0, 37, 4)]
    given = list(states)
    got = _call(case, merge_as_tree, states, merge, identity(head_dim=2, dtype=torch.float64))
    expect(states == given, "the list of states was changed; work on a copy", diagnosis="inputs-changed", case=case)
    expect_close(finish(State(*_parts(got, "m l o", case)))[0], torch.softmax(x, 0) @ v, what="the output", case=case)
    return "12 lists, each as flat as it can be"


def _same(got: Any, want: State) -> bool:
    return isinstance(got, tuple) and len(got) == 3 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- 0.8 ------------------------------------------------------------------------------------------------------------


def _lazy(
    x: torch.Tensor, v: torch.Tensor, n: int, threshold: float, mistake: str = ""
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Blockwise attention with a reference that moves only when it must; right, or with a known mistake."""
    m, last, count = x.new_tensor(0.0 if mistake == "starts-at-zero" else -INF), x.new_tensor(-INF), 0
    l, o = x.new_zeros(()), x.new_zeros(v.shape[-1])
    threshold = {"threshold-ignored": 0.0, "threshold-in-base-2": threshold * LN2}.get(mistake, threshold)
    for start in range(0, len(x) // n * n if mistake == "tail-lost" else len(x), n):
        x_j, v_j = x[start : start + n], v[start : start + n]
        top = x_j.max()
        seen = torch.maximum(last, top)
        if seen == -INF:
            continue
        compared = last if mistake == "drift" else m
        moves = bool(top > compared + threshold)
        moves = moves or (mistake == "not-above-the-threshold" and bool(top == compared + threshold))
        moves = moves or (mistake == "below-too" and bool((top - m).abs() > threshold))
        if m == -INF:
            m = top
            count += mistake == "start-counted"
        elif moves and mistake != "never":
            top = m + threshold if mistake == "moved-too-little" else top
            correction = torch.exp(top - m if mistake == "inverted" else m - top)
            l = l * (1.0 if mistake in ("not-rescaled", "l-not-rescaled") else correction)
            o = o * (1.0 if mistake in ("not-rescaled", "o-not-rescaled") else correction)
            m, count = top, count + 1
        elif mistake == "moved-unseen":
            m = torch.maximum(m, top)
        p = torch.exp(x_j - m)
        l, o, last = l + p.sum(), o + p @ v_j, seen
    if m == -INF:
        return o, m, 0
    return (
        o if mistake == "not-normalised" else o / l,
        (last if mistake == "lse-from-the-maximum" else m) + torch.log(l),
        count,
    )


def _as_far_as_finite(got: Any, predicted: torch.Tensor) -> bool:
    """Whether an output is what a model predicts, wherever both are finite."""
    got = torch.as_tensor(got, dtype=torch.float64)
    if got.shape != predicted.shape:
        return False
    both = got.isfinite() & predicted.isfinite()
    return bool(((got - predicted).abs()[both] <= 1e-5 * (1 + predicted.abs()[both])).all())


@exercise(
    "0.8",
    title="Skip the correction",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Keep a reference m that is allowed to be stale. For each block compute its maximum, and compare it with the "
        "*reference*, not with the last maximum seen.",
        "Only if the block's maximum is above m + threshold: correct l and o by exp(m - new) and let m be the block's "
        "maximum. Otherwise take the block's exponentials against the old m; they stay below exp(threshold).",
        "At the end nothing changes: o / l and m + ln(l), with the reference m. The first block that holds a "
        "finite score sets m and is no correction.",
    ],
)
def _(lazy_attention: Callable[..., tuple[torch.Tensor, torch.Tensor, int]]) -> Any:
    g = torch.Generator().manual_seed(4)
    v = 0.5 + torch.randn(24, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(24, generator=g, dtype=torch.float64)
    masked = noise.clone()
    masked[:9] = -INF
    rows = {
        "the maximum first": torch.linspace(4, -4, 24, dtype=torch.float64),
        "random scores": 3 * noise,
        "a slow climb": torch.linspace(0, 23, 24, dtype=torch.float64),
        "a climb to 3000": torch.linspace(0, 3000, 24, dtype=torch.float64),
        "a climb from -46 to 0": torch.linspace(-46, 0, 24, dtype=torch.float64),
        "masked blocks first": masked,
        "all masked": torch.full((24,), -INF, dtype=torch.float64),
        "steps of exactly the threshold": 2.5 * torch.arange(24, dtype=torch.float64),
    }
    counted = {
        "not-above-the-threshold": "a correction was made where the maximum is just reference + threshold; "
        "the rule is `>`, not `>=`",
        "moved-too-little": "more corrections than needed: the reference moves to the block's maximum, not to "
        "reference + threshold",
        "threshold-ignored": "a correction was made for every new maximum; below the threshold it can wait",
        "threshold-in-base-2": "corrections are made from threshold * ln 2 on: the threshold here is in natural units",
        "below-too": "a correction was made for a block that lies far below the reference; only one above it needs one",
        "drift": "the block was compared with the last maximum seen; compare it with the reference, or many small "
        "steps add up unseen until exp overflows",
        "start-counted": "the first block sets the reference; no correction to count yet",
        "starts-at-zero": "the reference starts at 0, so that the first block is taken for a move: it starts at -inf",
        "never": "the reference never moved",
    }
    valued = {
        "not-rescaled": f"what is kept {NOT_RESCALED}",
        "l-not-rescaled": f"l {NOT_RESCALED}",
        "o-not-rescaled": f"o {NOT_RESCALED}",
        "inverted": INVERTED,
        "not-normalised": ROW_MISTAKES["not-normalised"],
        "tail-lost": ROW_MISTAKES["tail-lost"],
        "moved-unseen": "the reference moves although no correction is made: below the threshold it stays as it is",
        "starts-at-zero": counted["starts-at-zero"],
    }
    answers = []
    for case, x in rows.items():
        for n, threshold in ((4, 0.0), (4, 5.0), (1, 2.5), (7, 8 * LN2)):
            name = f"{case}, blocks of {n}, threshold {threshold:.3g}"
            got = _call(name, lazy_attention, x, v, n, threshold, unchanged=[x, v])
            answers.append((name, (x, v, n, threshold), _parts(got, "o lse corrections", name)))

    def slipped() -> tuple[str, str] | None:
        known = [
            ([*o.flatten().tolist(), float(lse)], int(count), (x.tolist(), v.tolist(), n, threshold))
            for _, (x, v, n, threshold), (o, lse, count) in answers if not torch.isneginf(x).all()
        ]  # fmt: skip

        def fits(chosen: Chosen) -> bool:
            for numbers, count, inputs in known:
                o, lse, corrections = lazily(*inputs, chosen)
                for a, b in zip(numbers, [*o, lse], strict=True):
                    if math.isfinite(a) and math.isfinite(b) and abs(a - b) > 1e-7 * (1 + abs(b)):
                        return False
                if count != corrections:
                    return False
            return True

        return explain(fits, lazy_slips())

    with explained(slipped):
        _expect_lazy(answers, counted, valued)
    return "32 cases: same output, fewer corrections"


def _expect_lazy(
    answers: Sequence[tuple[str, tuple[Any, Any, int, float], Any]], counted: dict[str, str], valued: dict[str, str]
) -> None:
    __tracebackhide__ = True
    # A wrong count is no proof on one row: the mistake must give all the counts.
    counts = [count for _, _, (_, _, count) in answers]
    fits = [slug for slug in counted if counts == [_lazy(*inputs, slug)[2] for _, inputs, _ in answers]]
    # Nor is a wrong value, where correcting and not correcting are the same, as at a threshold of 0.
    valued = {
        slug: why for slug, why in valued.items()
        if all(_as_far_as_finite(o, _lazy(*inputs, slug)[0]) for _, inputs, (o, _, _) in answers)
    }  # fmt: skip
    for name, inputs, (o, lse, count) in answers:
        want_o, want_lse, want_count = _lazy(*inputs)
        if torch.isneginf(inputs[0]).any():
            expect(not _has_nan(o, lse), _NO_KEY, diagnosis="minus-infinity", case=name)
        if count != want_count and fits:
            raise CheckFailed(counted[fits[0]], diagnosis=fits[0], case=name)
        finite = not _has_nan(o, lse) and _finite_where(o, want_o)
        sentence = "exp overflowed: the reference must follow a maximum that is above it by more than the threshold"
        expect(finite, sentence, diagnosis="reference-too-low", case=name)
        slugs = {slug: "correction-inverted" if slug == "inverted" else slug for slug in valued}
        mistakes = {slugs[slug]: (_lazy(*inputs, slug)[0], why) for slug, why in valued.items()}
        true_maximum = _lazy(*inputs, "lse-from-the-maximum")[1]
        why = "lse is the true maximum plus ln(l), but l refers to the reference: lse = reference + ln(l)"
        expect_close(o, want_o, what="o", case=name, mistakes=mistakes)
        expect_close(lse, want_lse, what="lse", case=name, mistakes={"lse-from-the-maximum": (true_maximum, why)})
        expect_close(count, want_count, what="the number of corrections", diagnosis="wrong-count", case=name)
