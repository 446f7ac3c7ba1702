"""Rules whose inputs and results are tensors, lists or kernels' buffers: `flashlab.exercises.rule` with what they add.

    @tensor_rule("5.1", title="Through a softmax with a sink", minutes=15, hints=[...], returns="ds, dsink",
                 inputs={"3 rows of 5 keys": (p, dp), ...}, draw=lambda r: ...)
    def softmax_backward(p, dp):
        ...

Inputs have names. Shapes, dtypes and what becomes of the inputs are looked at; an exception is a result like another,
which a change may explain; results that are not finite say what they come of. One answer of several functions is a
rule for each: those that `part` registers are judged first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, Report, pattern, running, tensor_changes
from flashlab.check.changes import Text
from flashlab.check.expect import allowed_error
from flashlab.check.first_nan import where_made
from flashlab.check.lookup import HEDGE, Index, Values
from flashlab.check.mend import mended, quietly
from flashlab.check.poison import carried
from flashlab.check.running import is_unsolved
from flashlab.check.symptoms import Symptoms, seen_where, watched
from flashlab.check.value_mend import IN_NUMBERS
from flashlab.exercises.answers import chain, in_words
from flashlab.exercises.rule import _LATE, RULES, Rule, rule, sources, unwrapped

_BESIDE, _DRAWN, _DIFFERING, _TRIES, _WORK = 6, 60, 30, 2_000, 15_000
_NO_CAUSE = ("wrong-value", "not-finite", "nan-everywhere", "rows-scaled", "output-scaled")
_UNKNOWN = (*_NO_CAUSE, "wrong-keys")  # what is told is no line yet
EMPTY_ROWS = "empty rows"  # a key of `nan`: all that is lost should be 0, or -inf


def normal(r: random.Random, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normally distributed numbers, always the same from the same `r`."""
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


_MOVED = re.compile(r"the line `.*` comes too (early|late)")
_OF_NAN = ("not-finite", "zero", "wrong-value")  # better said with the line in which NaN arise


@dataclass(frozen=True)
class TensorRule(Rule):
    """A `Rule` of tensors.

    Attributes:
        names: of the inputs; what is drawn has none.
        through: makes a function of the inputs of what the learner hands in: a kernel's launch, an iterator for a list.
        on_device: inputs are handed in where kernels run, results are looked at on the CPU.
        nan: {part of a case's name, "", or EMPTY_ROWS: what a result that is not finite there comes of}.
            Of several cases each needs one.
        beside: how many drawn inputs the check runs beside its own.
        without: slugs of changes that say too much: on one input alone some of them fit by chance.
        axes: what those of a result are called; lse has batches, heads and rows.
        alone: makes inputs of one row each of one, where each row is for itself.
    """

    names: tuple[str, ...] = ()
    through: Callable[[Any], Callable[..., Any]] = lambda answer: answer
    on_device: bool = False
    nan: Mapping[str, str] = field(default_factory=dict)
    beside: int = _BESIDE
    tries: int = _TRIES
    without: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    trials: int = _DRAWN
    alone: Callable[..., Sequence[tuple[Any, ...]]] | None = None

    @property
    def writes_to_inputs(self) -> str:
        return "the function changes its inputs in place: write to new tensors, or work on a copy"

    @cached_property
    def index(self) -> Index:
        texts = []
        for other in (None, *self.also):
            fn = other if callable(other) else self.fn
            kept = {name: name for name in fn.__code__.co_varnames}  # a reader has these lines in mind
            texts.append(Text(fn, {**kept, **self.words}, None if callable(other) else other))
        rows = [(row, self.with_row(row)) for row in self.rows]
        more = self.drawn(_DIFFERING)
        return Index(
            texts, self.tried, self.returns, self._values, self.tol, rows, self.alike, more, self.notes,
            tensor_changes, self.tries, copied, self.without, most=_WORK, case=self.case,
        )  # fmt: skip

    @cached_property
    def tried(self) -> tuple[tuple[Any, ...], ...]:
        return (*self.inputs, *self.drawn(self.beside, seed=1))

    def case(self, given: tuple[Any, ...]) -> str:
        for name, mine in zip(self.names, self.inputs, strict=True):
            if mine is given:
                return name
        return ", ".join(f"{n}: {_in_short(x)}" for n, x in zip(self.params, given, strict=True))

    def _values(self, got: Any) -> Values:
        parts = (got,) if len(self.returns) == 1 else tuple(got.values() if isinstance(got, dict) else got)
        return tuple(x.detach().cpu() if isinstance(x, torch.Tensor) else super(TensorRule, self)._values((x,) if len(
            self.returns) > 1 else x)[0] for x in parts)  # fmt: skip

    # ---- a learner's answer

    def read(self, got: Any, case: str, right: Any = None) -> Values:
        """The results, whatever their shapes; CheckFailed where they are of another kind."""
        names = self.returns
        if got is None:
            listed = f"({', '.join(names)})" if len(names) > 1 else names[0]
            said = f"the function returns None: is a `return` missing? Return {listed}"
            raise CheckFailed(said, diagnosis="returned-none", case=case)
        fits = True
        if len(names) > 1:
            fits = isinstance(got, type(right)) if isinstance(right, dict) or hasattr(right, "_fields") else (
                isinstance(got, (tuple, list)) and len(got) == len(names))  # fmt: skip
            fits = fits and (not isinstance(right, dict) or set(got) == set(right))
            got = {name: got[name] for name in right} if fits and isinstance(right, dict) else got
        if not fits:
            named = type(right).__name__ if hasattr(right, "_fields") else ""
            shape = f"{named}({', '.join(names)})" + (", whose parts have names" if named else "")
            kind = "a dictionary with the keys " if isinstance(right, dict) else ""
            said = f"{in_words(got, article=True)} is returned; return {len(names)} things, {kind}{shape}"
            raise CheckFailed(said, diagnosis="wrong-type", case=case)
        rights = (right,) if len(names) == 1 else tuple(right.values() if isinstance(right, dict) else right)
        values = got.values() if isinstance(got, dict) else got if len(names) > 1 else (got,)
        for name, mine, one in zip(names, values, rights, strict=True):
            self._expect_kind(name, mine, one, case)
        return self._values(got)

    def _expect_kind(self, name: str, mine: Any, right: Any, case: str) -> None:
        if isinstance(right, torch.Tensor) and not (right.ndim == 0 and isinstance(mine, (int, float))):
            if not isinstance(mine, torch.Tensor):
                said = f"{name} should be a tensor, not {in_words(mine, article=True)}"
                raise CheckFailed(said, diagnosis="wrong-type", case=case)
            if mine.dtype != right.dtype:
                kinds = [str(x.dtype).removeprefix("torch.") for x in (mine, right)]
                why = self.notes.get("dtype", "")
                said = f"{name} is {kinds[0]}, it should be {kinds[1]}" + (f": {why}" if why else "")
                raise CheckFailed(said, diagnosis="wrong-dtype", case=case)
        elif isinstance(right, (int, float)):
            number = super()._values((mine,) if len(self.returns) > 1 else mine)[0]
            if isinstance(number, str) or not isinstance(number, (int, float)):
                said = f"{name} should be a number, not {in_words(mine, article=True)}"
                raise CheckFailed(said, diagnosis="wrong-type", case=case)

    def own_text(self, fn: Any, words: Mapping[str, str]) -> Text:
        text = super().own_text(fn, words)
        text.launched = self.through  # type: ignore[method-assign, assignment]
        return text

    def check(self, answer: Any) -> str:
        learners = self.through(answer)
        if learners is not answer and inspect.isfunction(answer):
            learners.__wrapped__ = answer  # type: ignore[attr-defined]  # its text is looked at
        self.compare(learners)
        report = self.then(answer) if self.then is not None and watched() is None else None
        return repr(report).removeprefix("✓ ") if isinstance(report, Report) else f"{len(self.tried)} cases"

    def compare(self, learners: Callable[..., Any]) -> None:
        """CheckFailed unless the function gives what the right one does, on every input."""
        got: list[Values | str] = []
        errors: list[Exception] = []
        for given in self.tried:
            case = self.case(given)
            mine = [copied(x, self.on_device) for x in given]
            right = self.right(*map(copied, given))
            try:
                with running(case):
                    result = learners(*mine)
            except CheckFailed:
                raise
            except Exception as error:
                if is_unsolved(error):
                    raise
                errors.append(error)
                got.append(self.index.error(error))
                continue
            if not all(_same_input(x, y) for x, y in zip(mine, given, strict=True)):
                raise CheckFailed(self.writes_to_inputs, diagnosis="inputs-changed", case=case)
            got.append(self.read(result, case, right))
        if watched() is not None:
            self._note_symptoms(got)
        elif errors or self.index.wrong_parts(got):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a change does is no matter of the learner's
                failed = self._failure(learners, got if errors else self._on_the_cpu(learners, got), errors)
            raise failed

    def _on_the_cpu(self, learners: Callable[..., Any], got: list[Any]) -> list[Any]:
        """What it gives where the changes run: only there the same sums give the same bits."""
        if not self.on_device or runtime.device().type == "cpu":
            return got
        with contextlib.redirect_stdout(io.StringIO()):
            here = [*self.index.run(learners, self.tried)]
        wrong = not any(isinstance(x, str) for x in here) and self.index.wrong_parts(here)
        return here if wrong else got

    @contextlib.contextmanager
    def mending(self, answer: Any, hunt: bool = False) -> Iterator[None]:
        """Where what is asked within fails, a change of the answer's own text that makes it right is told first; in a
        hunt, where no cause is known.
        """
        try:
            yield
        except Exception as failed:
            raises = not isinstance(failed, CheckFailed)
            slug = getattr(failed, "diagnosis", "")
            told = slug == "input-modified" or (hunt and slug not in _UNKNOWN)
            if is_unsolved(failed) or told or not (said := self._mended(answer, raises)):
                raise
            if (IN_NUMBERS in said and slug not in _NO_CAUSE) or (_MOVED.search(said) and "NaN" in str(failed)):
                raise
            said += f": {self.rest}"
            if not isinstance(failed, CheckFailed):
                for error in chain(failed):
                    error.__dict__.setdefault("__notes__", []).append(said)
                raise
            raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis="own-slip", case=failed.case) from None

    def _mended(self, answer: Any, raises: bool, most: float = math.inf) -> str | None:
        """raises: it raises what is no stray address, and has to do so here too. most: that it may cost."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), quietly():
            warnings.simplefilter("ignore")
            fn = getattr(unwrapped(answer), "fn", unwrapped(answer))
            made = self.own_text(fn, {}).compiled() if raises else None
            if made is None or any(isinstance(x, str) for x in self.index.run(made)):
                words, price = mended(self.index, fn, self.own_text, self.asked_of(answer))
                return words if price <= most else None
        return None

    def _failure(self, learners: Callable[..., Any], got: list[Any], errors: Sequence[Exception]) -> CheckFailed:
        index, names = self.index, self.returns
        off = [not index.same_outcome([x], [y]) for x, y in zip(got, index.right, strict=True)]
        raised = [isinstance(x, str) for x in got]
        at = (raised if errors and any(raised) else off).index(True)
        case = self.case(self.tried[at])
        if errors:
            cause = self._of_errors(learners, got, errors)
            if cause is None:
                raise errors[0]
            words = f"{type(errors[0]).__name__}: {errors[0]}"
            return CheckFailed(f"{_ended(cause[1])}\nYour code raised {words[:160]}", diagnosis=cause[0], case=case)
        wrong = index.wrong_parts(got)
        shapes = [(i, x[i], y[i]) for x, y in zip(got, index.right, strict=True) for i in wrong
                  if _shape(x[i]) != _shape(y[i])]  # fmt: skip
        if shapes:
            i, x, y = shapes[0]
            said = f"{names[i]} has the shape {_shape(x)}, it should be {_shape(y)}"
            found = self.explained(learners, got)
            found = None if found and HEDGE in found[1] else found
            return CheckFailed(f"{found[1]}.\n{said}" if found else said, diagnosis="wrong-shape", case=case)
        evidence = "; ".join(self._seen(i, got) for i in wrong)
        well = [name for i, name in enumerate(names) if i not in wrong]
        evidence += f". {' and '.join(well)} {'are' if len(well) > 1 else 'is'} right in every case" if well else ""
        right = [name for name, bad in zip(self.names, off, strict=False) if not bad]
        evidence += f". {sum(off)} of {len(off)} cases are wrong" if len(off) > 1 else ""
        evidence += f"; right: {'; '.join(right[:2])}{'; ...' if len(right) > 2 else ''}" if right else ""
        found = self._not_finite(got, wrong) or self._all_nan(got, wrong)
        own = found and self._mended(learners, False, _LATE)
        if found and own and not (_MOVED.match(own) and "NaN" in found[1]):  # a line that moves hides what makes NaN
            found, evidence = ("own-slip", f"{own}: {self.rest}"), f"{_ended(found[1])}\n{evidence}"
        found = (
            found or self.explained(learners, got)
            or self.symptom_of(learners) or self._together(learners, off)
            or self._common(got, wrong) or index.explain_as_two(got) or index.explain(got, some=True)
            or index.result_told() or self._pattern(got, wrong)
        )  # fmt: skip
        if (found is None or (found[0] in _OF_NAN and "arises in" not in found[1])) and (
            line := self._nan_made(learners, got, off)
        ):
            large = bool(re.search(r"(?<!-)\binf", line))
            fits = found is not None and not (
                (" overflow" in found[1] and "underflow" not in found[1] and not large)
                or ("0 / 0" in found[1] and "inf / inf" in line)
            )
            without = self._without_nan(got, off) if found is None else ""
            line = f"{without} is wrong without NaN. In another case NaN arises in {line}" if without else (
                f"NaN arises in {line}")  # fmt: skip
            found = "not-finite", f"{_ended(found[1]) + ' ' if found and fits else ''}{line}"
        if found is None:
            return CheckFailed(evidence, case=case)
        return CheckFailed(f"{_ended(found[1])}\n{evidence}", diagnosis=found[0], case=case)

    def _nan_made(self, learners: Callable[..., Any], got: Sequence[Values], off: Sequence[bool]) -> str | None:
        """The line in which NaN arise, where a result shows some, or all of it is 0, which may hide them."""
        for given, mine, bad in zip(self.tried, got, off, strict=True):
            results = [torch.as_tensor(x, dtype=torch.float64) for x in mine if isinstance(x, (float, torch.Tensor))]
            if bad and any(x.isnan().any() or not x.any() for x in results):
                with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
                    return where_made(lambda: learners(*[copied(x, self.on_device) for x in given]))  # noqa: B023
        return None

    def _without_nan(self, got: Sequence[Values], off: Sequence[bool]) -> str:
        """The first wrong case whose results have no NaN: what makes these is not all that is wrong."""
        for given, mine, bad in zip(self.tried, got, off, strict=True):
            floats = [torch.as_tensor(x) for x in mine if isinstance(x, (float, torch.Tensor))]
            if bad and not any(x.isnan().any() for x in floats):
                return f"the result of [{self.case(given)}]"
        return ""

    def _of_errors(
        self, learners: Callable[..., Any], got: Sequence[Any], errors: Sequence[Exception]
    ) -> tuple[str, str] | None:
        """Nothing, where every case raises what a name or an argument too many does: many changes do."""
        vague = all(isinstance(x, str) for x in got) and isinstance(errors[0], (TypeError, AttributeError, NameError))
        found = None if vague else self.explained(learners, got)
        return self._own_slip(learners) if found and HEDGE in found[1] else found

    def _own_slip(self, learners: Callable[..., Any], raises: bool = False) -> tuple[str, str] | None:
        own = self._mended(learners, raises)
        return ("own-slip", f"{own}: {self.rest}") if own else None

    def _seen(self, part: int, got: Sequence[Values]) -> str:
        """Where a result is wrong in the first case in which it is, with two of its numbers."""
        for given, mine, right in zip(self.tried, got, self.index.right, strict=True):
            if not self.index.same_outcome([mine], [right], part):
                x, y = (torch.as_tensor(z[part], dtype=torch.float64) for z in (mine, right))
                if x.ndim == 0:
                    return f"{self.returns[part]} is {x.item():.7g}, it should be {y.item():.7g} [{self.case(given)}]"
                name = self.returns[part]
                axes = self.axes if name != "lse" else ("batches", "heads", "rows") if x.ndim > 1 else ()
                seen = seen_where(x, y, allowed_error(right[part], self.tol), axes)
                return f"{name} {seen} [{self.case(given)}]"
        raise AssertionError("unreachable")

    def _not_finite(
        self, got: Sequence[Values], wrong: Sequence[int], nan: Mapping[str, str] | None = None
    ) -> tuple[str, str] | None:
        """What is said of results that are wrong only where they are not finite."""
        words: list[str] = []
        for given, mine, right in zip(self.tried, got, self.index.right, strict=True):
            lost, empty = False, True
            for i in (i for i in wrong if not self.index.same_outcome([mine], [right], i)):
                x, y = (torch.as_tensor(z[i], dtype=torch.float64) for z in (mine, right))
                off = ~((x - y).abs() <= allowed_error(right[i], self.tol)) & (x != y) & ~(x.isnan() & y.isnan())
                lost |= not bool(x[off].isfinite().any())
                empty &= bool(((y[off] == 0) | y[off].isneginf()).all())
                if bool(x[off].isfinite().any()) and not isinstance(right[i], int):  # a count goes with the others
                    return None
            if lost:
                fits = [said for part, said in (nan or self.nan).items()
                        if (empty if part == EMPTY_ROWS else part in self.case(given))]  # fmt: skip
                if not fits:
                    return None  # and so it is not what is told of another case
                words += fits[:1]
            elif not self.index.same_outcome([mine], [right]):
                return None
        return ("not-finite", words[0]) if words else None

    def _all_nan(self, got: Sequence[Values], wrong: Sequence[int]) -> tuple[str, str] | None:
        """Many changes give nothing but NaN, or 0: which one did cannot be told, if it is none of the rows."""
        found = [torch.as_tensor(mine[i], dtype=torch.float64) for mine in got for i in wrong]
        lost, zero = all(x.isnan().all() for x in found), not any(x.any() for x in found)
        if not (lost or zero):
            return None
        for text, row, outcome in self.index.outcomes:
            if text is None and self.index.same_outcome(outcome, got):
                return row.slug, row.said
        if lost:
            return "not-finite", f"{self.returns[wrong[0]]} is NaN everywhere: inf - inf, 0 * inf and 0 / 0 are"
        names = " and ".join(self.returns[i] for i in wrong)
        verb = "are" if len(wrong) > 1 else "is"
        return "zero", f"{names} {verb} 0 everywhere: nothing is added up, or it does not come back"

    def _together(self, learners: Callable[..., Any], off: Sequence[bool]) -> tuple[str, str] | None:
        """Of a wrong case whose rows are right each by itself: something is of all rows together."""
        for given in [given for given, bad in zip(self.tried, off, strict=True) if bad and self.alone]:
            rows = self.alone(*given)  # type: ignore[misc]
            with contextlib.redirect_stdout(io.StringIO()):
                if rows and self.index.same_outcome(self.index.run(learners, rows), self.index.run(self.right, rows)):
                    break
        else:
            return None
        found = re.findall(r"\S[^\n]*\.(?:max|min|amax|any|all|sum|mean)\(\)[^\n]*", "\n".join(sources(learners)))
        said = f"{self.case(given)}: each row by itself is right, and with others it is not: something is of all rows"
        return "rows-together", said + (f", in `{found[0].rstrip(':')}`" if len(found) == 1 else "")

    def _common(self, got: Sequence[Values], wrong: Sequence[int]) -> tuple[str, str] | None:
        """Few digits; or one factor, one difference or one value in every case."""
        seen = Symptoms()
        for i in wrong[:1] if len(wrong) == 1 else ():
            for k in range(len(self.returns)):
                for way, done in ((torch.div, "divided"), (torch.mul, "multiplied")):
                    if k != i and all(
                        _is_made_so(way, x[i], y[i], y[k]) for x, y in zip(got, self.index.right, strict=True)
                    ):
                        return "wrong-factor", f"{self.returns[i]} is {done} by {self.returns[k]}: leave that out"
        for i in wrong:
            pairs = [[torch.as_tensor(z[i], dtype=torch.float64) for z in (x, y)]
                     for x, y in zip(got, self.index.right, strict=True)]  # fmt: skip
            few = all(not isinstance(y[i], torch.Tensor) or y[i].dtype != torch.float64 or bool((a == b).all())
                      for (a, b), y in zip(pairs, self.index.right, strict=True))  # fmt: skip
            if few and all(_few_digits(a, b) for a, b in pairs if b.numel()):
                noted = [self.notes[x] for x in ("digits", "tl.float32", "dtype") if x in self.notes]
                why = noted[0] if noted else "is something rounded, or cut off?"
                return "low-precision", f"{self.returns[i]} is right to a few digits only: {why}"
            for (a, b), y in zip(pairs, self.index.right, strict=True):
                seen.compared_with.append((self.returns[i], a, b, allowed_error(y[i], self.tol)))
            if common := seen.everywhere(self.returns[i]):
                return "wrong-factor", common
        return None

    def _pattern(self, got: Sequence[Any], wrong: Sequence[int]) -> tuple[str, str] | None:
        """Of the first wrong case that has some numbers: what only a later, special one shows is no pattern."""
        for i in wrong:
            for given, mine, right in zip(self.tried, got, self.index.right, strict=True):
                if not self.index.same_outcome([mine], [right], i) and isinstance(right[i], torch.Tensor):
                    x, y = (z[i].double() for z in (mine, right))
                    named = zip(getattr(self, "params", inspect.signature(self.right).parameters), given, strict=False)
                    known = {name: z for name, z in named if isinstance(z, torch.Tensor) and z.ndim == 1}
                    if seen := pattern.observe(x, y, allowed_error(right[i], self.tol), known):
                        return "wrong-value", f"{self.returns[i]}, {self.case(given)}: {seen}"
                    if x.numel() >= 4:
                        break
        return None


def rows_of(axis: int) -> Callable[..., list[tuple[torch.Tensor, ...]]]:
    """For `alone`: all that is given has its rows along this axis."""
    return lambda *given: [tuple(x.narrow(axis, i, 1) for x in given) for i in range(given[0].shape[axis])]


def copied(x: Any, on_device: bool = False) -> Any:
    """A copy, where kernels run; of a tensor with the same strides, and what lies between its rows."""
    if isinstance(x, torch.Tensor):
        return carried(x, runtime.device() if on_device else x.device)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(copied(y, on_device) for y in x))
    return [copied(y, on_device) for y in x] if isinstance(x, list) else x


def _is_made_so(way: Callable[..., torch.Tensor], x: Any, of: Any, by: Any) -> bool:
    """Whether x is `of` divided or multiplied by another result, wherever that is a number."""
    x, of, by = (torch.as_tensor(z, dtype=torch.float64) for z in (x, of, by))
    if x.shape != of.shape or of.shape[: by.ndim] != by.shape:
        return False
    want = way(of, by.reshape([*by.shape, *[1] * (of.ndim - by.ndim)]))
    some = want.isfinite()
    return bool(torch.isclose(x[some], want[some], rtol=1e-5).all())


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(("?", ".")) else sentence + "."


def _few_digits(x: torch.Tensor, right: torch.Tensor) -> bool:
    some = right.isfinite()
    return bool(((x - right).abs()[some] <= 5e-3 * right[some].abs().max()).all() if some.any() else True) and bool(
        ((x == right) | (x.isnan() & right.isnan()))[~some].all())  # fmt: skip


def _same_input(mine: Any, given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return torch.equal(mine.cpu().nan_to_num(12345.0), given.nan_to_num(12345.0))
    if isinstance(given, (tuple, list)):
        return len(mine) == len(given) and all(_same_input(x, y) for x, y in zip(mine, given, strict=True))
    return True


def _shape(x: Any) -> list[int]:
    return list(x.shape) if isinstance(x, torch.Tensor) else []


def _in_short(x: Any) -> str:
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return _in_short(x[-1])
    return in_words(x).removeprefix("tensor ").split(" float")[0]


def made(fn: Callable[..., Any], returns: tuple[str, ...], **data: Any) -> TensorRule:
    """A rule that is not registered: what an answer is mended to that something else judges (`mending`)."""
    inputs = data.pop("inputs")
    return TensorRule(fn, returns, inputs=tuple(inputs.values()), names=tuple(inputs), **data)


tensor_rule = functools.partial(rule, make=made)


def part(id: str, *, returns: str, **data: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as one of several that answer exercise `id`; see `Rule`'s `parts`."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        RULES[f"{id} {fn.__name__}"] = made(fn, tuple(returns.split(", ")), **data)
        return fn

    return register
