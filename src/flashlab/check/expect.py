"""Small assertions for an exercise's check: a value, a condition, an exception; each fails with one plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashlab.check import pattern
from flashlab.check.failed import CheckFailed
from flashlab.check.symptoms import watched

AllMistakes = Mapping[str, tuple[Sequence[Any], str]]

# Relative to the size of the expected values; a few hundred roundings of each dtype, far below any real mistake.
_DEFAULT_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def expect(condition: Any, sentence: str, *, diagnosis: str, case: str | None = None) -> None:
    """Raise `CheckFailed(sentence)` unless `condition` is true."""
    __tracebackhide__ = True
    if not bool(condition):
        raise CheckFailed(sentence, diagnosis=diagnosis, case=case)


def expect_raises(
    exception: type[BaseException] | tuple[type[BaseException], ...],
    fn: Callable[..., Any],
    *args: Any,
    what: str,
    diagnosis: str,
    case: str | None = None,
    **kwargs: Any,
) -> str:
    """Raise `CheckFailed` unless `fn(*args, **kwargs)` raises `exception`; return the message it raised with.

    A NotImplementedError of the learner's is passed on, so that an unsolved exercise is reported as unsolved.
    """
    __tracebackhide__ = True
    kinds = exception if isinstance(exception, tuple) else (exception,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        fn(*args, **kwargs)
    except kinds as error:
        return str(error)
    except NotImplementedError:
        raise
    except Exception as error:
        raise CheckFailed(
            f"{what} should raise {names}, but it raised {type(error).__name__}: {error}",
            diagnosis=diagnosis,
            case=case,
        ) from error
    raise CheckFailed(f"{what} should raise {names}, but nothing was raised", diagnosis=diagnosis, case=case)


def expect_close(
    got: Any,
    want: Any,
    *,
    what: str,
    diagnosis: str = "wrong-value",
    case: str | None = None,
    tol: float | None = None,
    dtype: torch.dtype | None = None,
    because: str | None = None,
    mistakes: Mapping[str, tuple[Any, str]] | None = None,
) -> float:
    """Compare a learner's value with the right one; raise `CheckFailed`, or return the largest absolute error.

    got, want   tensors, numbers, nested lists or arrays, of the same shape. `want` may hold inf: `got` must then hold
                the same inf there. A NaN in `got` fails unless `want` has it too.
    what        what the value is called in the sentence: "the running maximum m".
    tol         largest absolute error allowed; by default a small multiple of the rounding of the lower of the two
                dtypes, times max(1, max|want|).
    dtype       when given, `got` must be a tensor of this dtype.
    because     words for the end of the sentence: what to look at.
    mistakes    {slug: (value, sentence)}: what known mistakes would have produced. If `got` is one of them, that slug
                and that sentence are raised in place of the general ones. Two ways to one mistake: "slug 1", "slug 2".
                `check` then looks at the other cases, and takes the general ones if the mistake does not give those.
    """
    __tracebackhide__ = True

    known: list[tuple[str, str, str]] = []

    def fail(sentence: str, slug: str = diagnosis) -> None:
        __tracebackhide__ = True
        failed = CheckFailed(sentence + (f"; {because}" if because else ""), diagnosis=slug, case=case)
        failed.unexplained, failed.what = slug == "wrong-value", what
        if known:
            general, (_, slug, sentence) = failed, known[0]
            failed = CheckFailed(sentence, diagnosis=slug, case=case)
            failed.known, failed.otherwise = known, general
        raise failed

    expected = _tensor(want)
    if (strange := _strange(got, expected, what, dtype)) is not None:
        fail(*strange)
    actual = _tensor(got)
    if expected.numel() == 0:
        return 0.0
    if (seen := watched()) is not None:  # a bug hunt that is as it was given: no cause, and the next case
        bound = _bound(expected, got, want, tol)
        seen.compared(case, what, actual, expected, bound)
        seen.compared_with.append((what, actual, expected, bound))
        seen.contradicted.update((what, sentence) for sentence in _contradicted(actual, got, mistakes or {}, tol))
        return _worst(actual, expected)[0]

    for slug, (value, sentence) in (mistakes or {}).items():
        wrong = _tensor(value)
        if wrong.shape == actual.shape and _agrees(actual, wrong, _bound(wrong, got, value, tol)):
            if not _agrees(wrong, expected, _bound(expected, got, want, tol)):
                known.append((what, slug.partition(" ")[0], sentence))

    bound = _bound(expected, got, want, tol)
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


def _strange(got: Any, expected: torch.Tensor, what: str, dtype: torch.dtype | None) -> tuple[str, str] | None:
    """(sentence, slug) of what cannot be compared."""
    if got is None:
        return f"{what} is None: is a `return` missing?", "returned-none"
    try:
        actual = _tensor(got)
    except (TypeError, ValueError, RuntimeError):
        return f"{what} should be a number or a tensor, not {type(got).__name__}", "wrong-type"
    if dtype is not None and (not isinstance(got, torch.Tensor) or got.dtype != dtype):
        kind = got.dtype if isinstance(got, torch.Tensor) else type(got).__name__
        return f"{what} should be of dtype {dtype}, not {kind}", "wrong-dtype"
    if actual.shape != expected.shape:
        return f"{what} has shape {list(actual.shape)}, it should be {list(expected.shape)}", "wrong-shape"
    return None


def _contradicted(
    actual: torch.Tensor, got: Any, mistakes: Mapping[str, tuple[Any, str]], tol: float | None
) -> set[str]:
    """The sentences of mistakes that give other values here. What overflows in one of the two says nothing."""
    verdicts: dict[str, list[bool]] = {}
    for value, sentence in mistakes.values():
        wrong = _tensor(value)
        if actual.isfinite().all() and wrong.isfinite().all():
            agrees = wrong.shape == actual.shape and _agrees(actual, wrong, _bound(wrong, got, value, tol))
            verdicts.setdefault(sentence, []).append(agrees)
    return {sentence for sentence, agree in verdicts.items() if not any(agree)}


def expect_all_close(
    answers: Sequence[tuple[str, Any, Any]],
    *,
    what: str,
    mistakes: AllMistakes | Callable[[], AllMistakes] | None = None,
    tol: float | None = None,
    diagnosis: str = "wrong-value",
) -> None:
    """`expect_close` of several (case, got, want) at once; a known mistake is told only if it gives every answer.

    On one case alone two mistakes often agree. mistakes is {slug: (a value per answer, sentence)}, or a function that
    gives that, called only where an answer is wrong; see `expect_close`.
    """
    __tracebackhide__ = True

    def all_close(values: Sequence[Any]) -> bool:
        try:
            return all(is_close(got, value, tol) for (_, got, _), value in zip(answers, values, strict=True))
        except (TypeError, ValueError, RuntimeError):
            return False  # not a number or a tensor: expect_close says so

    # A bug hunt that is as it was given is told no cause: expect_close notes its symptoms.
    if watched() is None and not all_close([want for _, _, want in answers]):
        for slug, (values, sentence) in (mistakes() if callable(mistakes) else mistakes or {}).items():
            if all_close(values):
                telling = (not is_close(value, want, tol) for value, (_, _, want) in zip(values, answers, strict=True))
                case = next(case for (case, _, _), tells in zip(answers, telling, strict=True) if tells)
                raise CheckFailed(sentence, diagnosis=slug.partition(" ")[0], case=case)
    for case, got, want in answers:
        expect_close(got, want, what=what, diagnosis=diagnosis, case=case, tol=tol)


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
    finite = expected[expected.isfinite()].abs()
    return max(relative, 1e-9) * max(1.0, finite.max().item() if finite.numel() else 0.0)


def _errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|actual - expected|, 0 where both are the same inf or both NaN, inf where only one is not finite."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(actual), (actual - expected).abs())
    return torch.where(error.isnan(), torch.full_like(error, float("inf")), error)


def _agrees(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return actual.numel() == 0 or bool(_errors(actual, expected).max() <= bound)


def _worst(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    errors = _errors(actual, expected)
    flat = int(errors.flatten().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape)) if errors.ndim else ()
    return errors.flatten()[flat].item(), at
