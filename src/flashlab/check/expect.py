"""Small assertions for an exercise's check: a value, a condition; each fails with one plain sentence."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlab.check import pattern
from flashlab.check.failed import CheckFailed
from flashlab.check.symptoms import watched

# Relative to the size of the expected values; a few hundred roundings of each dtype, far below any real mistake.
_DEFAULT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def expect(condition: Any, sentence: str, *, diagnosis: str, case: str | None = None) -> None:
    """Raise `CheckFailed(sentence)` unless `condition` is true."""
    __tracebackhide__ = True
    if not bool(condition):
        raise CheckFailed(sentence, diagnosis=diagnosis, case=case)


def expect_close(
    got: Any,
    want: Any,
    *,
    what: str,
    diagnosis: str = "wrong-value",
    case: str | None = None,
    tol: float | None = None,
    because: str | None = None,
) -> float:
    """Compare a learner's value with the right one; raise `CheckFailed`, or return the largest absolute error.

    got, want   tensors, numbers, nested lists or arrays, of the same shape. `want` may hold inf: `got` must then hold
                the same inf there. A NaN in `got` fails unless `want` has it too.
    what        what the value is called in the sentence: "the running maximum m".
    tol         largest absolute error allowed; by default a small multiple of the rounding of the lower of the two
                dtypes, times max(1, max|want|).
    because     words for the end of the sentence: what to look at.
    """
    __tracebackhide__ = True

    def fail(sentence: str, slug: str = diagnosis) -> None:
        __tracebackhide__ = True
        failed = CheckFailed(sentence + (f"; {because}" if because else ""), diagnosis=slug, case=case)
        failed.unexplained, failed.what = slug == "wrong-value", what
        raise failed

    expected = _tensor(want)
    if (strange := _strange(got, expected, what)) is not None:
        fail(*strange)
    actual = _tensor(got)
    if expected.numel() == 0:
        return 0.0
    bound = _bound(expected, got, want, tol)
    if (seen := watched()) is not None:  # a bug hunt that is as it was given: no cause, and the next case
        seen.compared(case, what, actual, expected, bound)
        seen.compared_with.append((what, actual, expected, bound))
        return _worst(actual, expected)[0]

    error, at = _worst(actual, expected)
    if error <= bound:  # NaN and inf fail here: the comparison is false
        return error
    place = f" at {list(at)}" if at else ""
    here, there = actual[at].item(), expected[at].item()
    if here != here:
        fail(f"{what} is NaN{place}, it should be {there:.6g}")
    digits = next((d for d in (6, 9, 12) if f"{here:.{d}g}" != f"{there:.{d}g}"), 17)  # never the same number twice
    common = pattern.observe(actual, expected, bound)
    fail(
        f"{what} is wrong{place}: it is {here:.{digits}g}, it should be {there:.{digits}g} (allowed error {bound:.2g})"
        + (f"; {common}" if common else "")
    )
    raise AssertionError("unreachable")


def _strange(got: Any, expected: torch.Tensor, what: str) -> tuple[str, str] | None:
    """(sentence, slug) of what cannot be compared."""
    if got is None:
        return f"{what} is None: is a `return` missing?", "returned-none"
    try:
        actual = _tensor(got)
    except (TypeError, ValueError, RuntimeError):
        return f"{what} should be a number or a tensor, not {type(got).__name__}", "wrong-type"
    if actual.shape != expected.shape:
        return f"{what} has shape {list(actual.shape)}, it should be {list(expected.shape)}", "wrong-shape"
    return None


def is_close(got: Any, want: Any, tol: float | None = None) -> bool:
    """Whether two numbers or tensors of one shape agree as `expect_close` compares them."""
    actual, expected = _tensor(got), _tensor(want)
    return actual.shape == expected.shape and _agrees(actual, expected, _bound(expected, got, want, tol))


def allowed_error(want: Any, tol: float = 0.0) -> float:
    """What `expect_close` allows beside this value; a `tol` of 1e-9 at most says no more than the dtype does."""
    return _bound(_tensor(want), want, want, tol if tol > 1e-9 else None)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)


def _bound(expected: torch.Tensor, got: Any, want: Any, tol: float | None) -> float:
    if tol is not None:
        return tol
    dtypes = [x.dtype for x in (got, want) if isinstance(x, torch.Tensor)]
    relative = max((_DEFAULT_TOLERANCE.get(d, 0.0) for d in dtypes), default=1e-9)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    if not math.isfinite(largest):
        finite = expected[expected.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
    return max(relative, 1e-9) * max(1.0, largest)


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|actual - expected|, 0 where both are the same inf or both NaN, inf where only one is not finite."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(actual), (actual - expected).abs())
    return torch.where(error.isnan(), torch.full_like(error, float("inf")), error)


def _agrees(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    if actual.numel() == 0:
        return True
    worst = (actual - expected).abs().max().item()  # NaN: something is not finite, which takes longer to compare
    return (worst if worst == worst else _errors(actual, expected).max().item()) <= bound


def _worst(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    errors = _errors(actual, expected)
    flat = int(errors.flatten().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape)) if errors.ndim else ()
    return errors.flatten()[flat].item(), at
