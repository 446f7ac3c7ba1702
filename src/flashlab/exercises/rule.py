"""An exercise whose answer is a small function: one decorated function is all there is of it.

    @rule("3.7", title="How many bytes?", minutes=10, hints=[...], returns="bytes_read", inputs=[(64, 64, 32, 32, 2)],
          draw=lambda r: (r.randint(1, 200), ...))
    def bytes_read(M, N, HEAD_DIM, BLOCK_M, itemsize):
        # BEGIN SOLUTION
        programs = math.ceil(M / BLOCK_M)
        return (2 * M + 2 * N * programs) * HEAD_DIM * itemsize + 4 * M
        # END SOLUTION

The function is the right answer. The lesson takes its heading from the decorator and its cell from the function, less
the marked lines; the check runs it on `inputs` beside the learner's, and what its changes give is the diagnosis
(`flashlab.check.lookup`). `rows` are the few mistakes that no change makes.

    python -m flashlab.exercises.rule [3.7 ...]

prints the survivors: changes that the check accepts. One that a drawn input tells from the right rule is a hole in the
check, to be closed with that input; the others are the same rule in other words (`tests/exercises/test_rules.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import math
import operator
import random
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashlab.check import CheckFailed, running
from flashlab.check.changes import Text, edited_function
from flashlab.check.claims import tokens_of
from flashlab.check.expect import allowed_error
from flashlab.check.lookup import _TRIES, HEDGE, Index, Row, Values, as_they_are, in_units, same, where_right
from flashlab.check.mend import mended, mended_for, quietly
from flashlab.check.running import is_unsolved
from flashlab.check.symptoms import Symptoms, watched
from flashlab.check.value_mend import IN_NUMBERS
from flashlab.exercises.answers import _PACKAGE, in_words, python_fingerprint
from flashlab.exercises.registry import exercise, find

RULES: dict[str, Rule] = {}

_COUNTS = ("no", "one", "two", "three", "four", "five", "six")
_LIKELY = 1.0  # what costs no more comes before what was read off
_LATE = 5.0  # what costs more says less than all else
_NEAR = 0.1  # so near, the learner's own words come first
_BESIDE = 40  # drawn inputs that the check runs beside its own
_DRAWN = 3000
_MOVED = 200  # of which one number is exchanged


@dataclass(frozen=True)
class Rule:
    """A right function, the check's inputs, and what of its mistakes cannot be computed.

    Attributes:
        returns: the names of the results. whole: they are whole numbers. strict: so, and no floats: something's place.
        draw: one more input, from a random.Random: any that the exercise allows.
        rows: mistakes that no change of the text makes. words: what local names are called in a sentence.
        notes: {piece of the right text: why it is there}, told with whatever change of it fits.
        also: other ways to write it, to be changed too: an expression of the parameters, or edits of the text; of
            tensors also functions.
        units: {result: {words: expression}}: what the result is a sum of; where there is a `hint`, all is told with it.
        alike: makes one of results that are as good as each other. tol: relative.
        then: asked last, with the learner's function; raises CheckFailed.
        judged: says in place of the values what is right, where more than one is; raises CheckFailed.
        called: calls a function with an input, where that is no plain call. shown: an input in words.
        symptom: asked where no change surely explains the answer: (slug, sentence) in numbers, or None.
        walks: of an answer's own text it is changed, too, how often its loops go round: not where more is as right.
        each: the results come as a list, a tuple for each of these ("operation"). item: makes one value of a tuple.
        id: of the exercise, which may ask for several functions.
        parts: further functions of the answer, rules `"ID NAME"` without an `id`, which are judged first.
        trials: inputs on which a change that the check accepts is compared with the right rule.
        tries: pairs of changes that are tried.
        answer: what the learner hands in where that is no such function: a kernel, which `through` makes one.
    """

    fn: Callable[..., Any]
    returns: tuple[str, ...]
    inputs: tuple[tuple[Any, ...], ...]
    draw: Callable[[random.Random], tuple[Any, ...]]
    rows: tuple[Row, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    also: tuple[Any, ...] = ()
    units: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hint: Mapping[str, str] = field(default_factory=dict)
    alike: Callable[..., Values] = as_they_are
    whole: bool = False
    strict: bool = False
    tol: float = 1e-9
    then: Callable[[Callable[..., Any]], Any] | None = None
    judged: Callable[[Callable[..., Any]], Any] | None = None
    called: Callable[..., Any] = lambda fn, *given: fn(*given)
    symptom: Callable[[Callable[..., Any]], tuple[str, str] | None] | None = None
    shown: Callable[..., str] | None = None
    each: str = ""
    item: Callable[[Any], Any] = bool
    id: str = ""
    parts: tuple[str, ...] = ()
    answer: str = ""
    trials: int = _DRAWN
    walks: bool = True
    tries: int = _TRIES

    @property
    def prefix(self) -> str:
        """The function's name, where the exercise asks for several."""
        return f"{self.fn.__name__}: " if len(functions(self.id)) > 1 else ""

    @property
    def rest(self) -> str:
        """What is right with the change that is told."""
        several = self.prefix or any(self is RULES.get(f"{x.id} {name}") for x in RULES.values() for name in x.parts)
        return f"then `{self.fn.__name__}` is right" if several else "the rest is right"

    @property
    def right(self) -> Callable[..., Any]:
        """What gives the right values."""
        return self.fn

    @property
    def params(self) -> list[str]:
        return list(self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount])

    @cached_property
    def index(self) -> Index:
        whole = not any(map(_has_fractions, self.tried))
        texts = [Text(self.fn, self.words, other, whole) for other in (None, *self.also)]
        rows = [(row, self.with_row(row)) for row in self.rows]
        return Index(
            texts, self.tried, self.returns, self._values, self.tol, rows, self.alike, self.drawn(300), self.notes,
            tries=self.tries, called=self.called, longest=200 - len(self.prefix), case=self.case,
        )  # fmt: skip

    @cached_property
    def tried(self) -> tuple[tuple[Any, ...], ...]:
        """What the check runs: its own inputs, and some that are drawn, always the same."""
        return tuple(dict.fromkeys((*self.inputs, *self.drawn(_BESIDE, seed=1))))

    def own_text(self, fn: Callable[..., Any], words: Mapping[str, str]) -> Text:
        """The text of a learner's function."""
        return Text(fn, words, whole=self.index.texts[0].whole)

    def explained(self, learners: Callable[..., Any], got: Sequence[Any]) -> tuple[str, str] | None:
        """A row that gives all of these values; or the likelier of two: a change of the right text that gives them, and
        one of the learner's that gives the right ones.
        """
        index = self.index
        index.written, index.code = written(learners), code_of(learners)
        found = index.explain(got)
        cost = index.cost(got) if found else math.inf
        if cost == 0:
            return found
        read = self.read_off(learners)
        if not index.code:
            return read or found
        own, price = None, 0.0
        with contextlib.redirect_stdout(io.StringIO()), quietly():
            own, price = mended(index, unwrapped(learners), self.own_text, self.asked_of(learners), self.walks)
        if read:
            likely = own and price <= _LIKELY
            return ("own-slip", f"{own}: {self.rest}.\n{read[1]}") if likely else read
        index.of_result, own = (own, "") if own and price > _LATE else ("", own)
        if own and price <= cost + _NEAR and not (found and IN_NUMBERS in own):
            return "own-slip", f"{own}: {(found and index.note_on(own)) or self.rest}"
        return (found[0], index.less_sure(found[1])) if found and own is not None else found

    def asked_of(self, learners: Any) -> Callable[..., Any] | None:
        """What a function is asked beside its values: none of one that the check has put together."""
        return self.then if inspect.isfunction(learners) and not hasattr(learners, "answer") else None

    def read_off(self, learners: Callable[..., Any]) -> tuple[str, str] | None:
        """What other inputs show of the answer, where no row is it: before a guess at the text."""
        return None

    def symptom_of(self, learners: Callable[..., Any]) -> tuple[str, str] | None:
        """What its `symptom` says: on inputs of its own, so what fails there explains nothing."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            return self.symptom(learners) if self.symptom else None
        return None

    def with_row(self, row: Row) -> Callable[..., Any]:
        """The function as a learner with this mistake has it."""
        if row.instead:
            return Text(self.fn, other=row.instead).compiled()
        source = edited_function(self.fn, row.edits)
        names = dict(self.fn.__globals__)
        exec(f"from __future__ import annotations\n{source}", names)
        return names[self.fn.__name__]

    def drawn(self, count: int = -1, seed: int = 0) -> list[tuple[Any, ...]]:
        """So many inputs; `trials` of them where nothing is said."""
        source = random.Random(seed)
        return [self.draw(source) for _ in range(self.trials if count < 0 else count)]

    def survivors(self) -> list[tuple[str, tuple[Any, ...] | None]]:
        """What the check does not tell from the right rule, and a drawn input that does, or None: the same there."""
        drawn = {repr(given): given for given in self.drawn()}.values()
        return [(f"{c.slug}: {c.said}", input_) for c, input_ in self.index.survivors([*drawn])]

    # ---- a learner's answer

    def _values(self, got: Any) -> Values:
        if got is None:
            return (None,) * len(self.returns)
        if self.each:
            found = tuple(tuple(map(self.item, part)) for part in zip(*got, strict=True))
            return found or ((),) * len(self.returns)
        parts = (got,) if len(self.returns) == 1 else tuple(got)
        return tuple(_number(x) for x in parts)

    def read(self, got: Any, case: str) -> Values:
        """The results as `Values`; CheckFailed where they are something else."""
        names = self.returns
        wanted = f"({', '.join(names)})" if len(names) > 1 else names[0]
        if got is None and (None,) * len(names) in self.index.right:
            return self._values(got)
        if got is None:
            said = f"the function returns nothing: is a `return` missing? Return {wanted}"
            raise CheckFailed(said, diagnosis="returned-none", case=case)
        if self.each:
            return self._read_each(got, case)
        none = (None,) * len(names)
        if isinstance(got, (tuple, list)) and any(x is None for x in got) and none in self.index.right:
            raise CheckFailed(f"{got} is returned: return None alone", diagnosis="wrong-type", case=case)
        parts: Sequence[Any] = [got]
        if len(names) > 1:
            kind = "numbers" if not any(isinstance(x, str) for x in self.index.right[0]) else "things"
            got = got.tolist() if hasattr(got, "tolist") else got
            if not isinstance(got, (tuple, list)) or len(got) != len(names):
                said = f"{in_words(got, article=True)} is returned; return {_COUNTS[len(names)]} {kind}, {wanted}"
                raise CheckFailed(said, diagnosis="wrong-type", case=case)
            parts = got
        for name, value, kind in zip(names, parts, self.index.right[0], strict=True):
            number = _number(value)
            if isinstance(kind, str) != isinstance(number, str) or not isinstance(number, (int, float, str)):
                wanted = "a text" if isinstance(kind, str) else "a number"
                sentence = f"{name} should be {wanted}, not {in_words(value, article=True)}"
                raise CheckFailed(sentence, diagnosis="wrong-type", case=case)
            texts = list(dict.fromkeys(x[names.index(name)] for x in self.index.right if isinstance(kind, str)))
            if texts and number not in texts:
                listed = " or ".join(map(repr, texts))
                raise CheckFailed(f"{name} is {listed}, not {number!r:.60}", diagnosis="wrong-word", case=case)
            if (self.whole or self.strict) and (
                isinstance(number, str) or not math.isfinite(number) or number != int(number)
            ):
                by = ": is it to be rounded up, or down?" if isinstance(value, float) and math.isfinite(value) else ""
                sentence = f"{name} is {value!r:.40}, which is no whole number{by}"
                raise CheckFailed(sentence, diagnosis="no-whole-number", case=case)
            if self.strict and isinstance(number, float):
                raise CheckFailed(f"{name} is {value!r:.40}, a float: return an int", diagnosis="float", case=case)
        return self._values(got)

    def _read_each(self, got: Any, case: str) -> Values:
        wanted = f"a list of ({', '.join(self.returns)}), one for each {self.each}"
        found = list(got) if hasattr(got, "__iter__") else got
        strange = [x for x in found if not hasattr(x, "__len__") or len(x) != len(self.returns)] if (
            isinstance(found, list)) else [found]  # fmt: skip
        if strange:
            said = f"{in_words(strange[0], article=True)} is returned; return {wanted}"
            raise CheckFailed(said, diagnosis="wrong-type", case=case)
        try:
            return self._values(found)
        except (TypeError, ValueError):
            said = f"something else is returned; return {wanted}"
            raise CheckFailed(said, diagnosis="wrong-type", case=case) from None

    def case(self, given: tuple[Any, ...]) -> str:
        if self.shown is not None:
            return self.shown(*given)
        return ", ".join(f"{name}={_short(value)}" for name, value in zip(self.params, given, strict=True))

    def check(self, learners: Callable[..., Any]) -> str:
        if self.judged is not None:
            return self._judge(learners, self.judged)
        got = []
        for given in self.tried:
            try:
                with running(self.case(given)):
                    result = self.called(learners, *given)
            except Exception as error:
                if not is_unsolved(error) and (found := self._of_error(learners, error)):
                    error.__dict__.setdefault("__notes__", []).append(found[1])
                raise
            got.append(self.read(result, self.case(given)))
        for given, mine, right in zip(self.tried, got, self.index.right, strict=True):
            if self.each and len(mine[0]) != len(right[0]):
                each = self.each if len(right[0]) == 1 else f"{self.each}s"
                several = f"the result has {len(mine[0])} elements for {len(right[0])} {each}"
                found = self.explained(learners, got)
                seen = self.symptom_of(learners) if not found or HEDGE in found[1] else None
                slug, said = seen or found or ("wrong-shape", "")
                raise CheckFailed(
                    f"{said}.\n{several}" if said else f"{several}: return one for each",
                    diagnosis=slug, case=self.case(given),
                )  # fmt: skip
        if watched() is not None:
            self._note_symptoms(got)
            return ""
        wrong = self.index.wrong_parts(got) if got != self.index.right else []
        if wrong:
            self._expect_the_same_again(learners, got)
            raise self._failed(learners, got, wrong)
        if self.then is not None:
            self.then(learners)
        return f"{len(got)} inputs"

    def _of_error(self, learners: Callable[..., Any], error: Exception) -> tuple[str, str] | None:
        """What is told before an exception: one that numbers make, not what Python does not know."""
        if self.each and self.symptom:
            return self.symptom_of(learners)
        if not isinstance(error, (ArithmeticError, LookupError, ValueError)):
            return None
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.explained(learners, [*self.index.run(learners, self.tried)])
        return found if found and HEDGE not in found[1] else None

    def _note_symptoms(self, got: Sequence[Values | str]) -> None:
        """Of a hunt's own code: what is wrong, without a cause."""
        for given, mine, right in zip(self.tried, got, self.index.right, strict=True):
            for name, x, y in zip(self.returns, mine, right, strict=True) if not isinstance(mine, str) else ():
                a, b = (torch.as_tensor(z, dtype=torch.float64) for z in (x, y))
                allowed = allowed_error(y) if isinstance(y, torch.Tensor) else self.tol * float(b.abs().max())
                if a.shape == b.shape and (seen := watched()) is not None:
                    seen.compared(self.case(given), name, a, b, allowed)

    def _judge(self, learners: Callable[..., Any], judged: Callable[[Callable[..., Any]], Any]) -> str:
        """The verdict of `judged`; a change of the right text is told beside what is wrong, where one gives this."""
        try:
            return judged(learners)
        except CheckFailed as symptom:
            if symptom.diagnosis in ("wrong-type", "returned-none"):
                raise
            with contextlib.redirect_stdout(io.StringIO()):
                said = self.explained(learners, [*self.index.run(learners, self.tried)])
                said = None if said and IN_NUMBERS in said[1] else said  # other numbers are as right
                own = "" if said and HEDGE not in said[1] else _mended(learners, judged)
            if not (words := own or (said or ("", ""))[1]):
                raise
            raise _after(words, symptom) from None

    def _expect_the_same_again(self, learners: Callable[..., Any], got: list[Values]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            again = self.index.run(learners, self.tried)
        if any(not isinstance(x, str) and x != y and x == x for x, y in zip(again, got, strict=True)):
            sentence = "the same call gives another result when it is made again: nothing may be kept from call to call"
            raise CheckFailed(sentence, diagnosis="state-kept", case=self.case(self.tried[0]))

    def _failed(self, learners: Callable[..., Any], got: list[Values], wrong: list[int]) -> CheckFailed:
        index, names = self.index, self.returns
        off = [not index.same_outcome([x], [y]) for x, y in zip(got, index.right, strict=True)]
        plain = [x and (isinstance(y, str) or self.alike(*y) == y) for x, y in zip(off, index.right, strict=True)]
        at = (plain if any(plain) else off).index(True)
        case = self.case(self.tried[at])
        numbers = [self._beside(names[i], got[at][i], index.right[at][i], self.tried[at][0]) for i in wrong
                   if not index.same_outcome([got[at]], [index.right[at]], i)]  # fmt: skip
        well = [name for i, name in enumerate(names) if i not in wrong]
        evidence = "; ".join(numbers)
        evidence += f". {' and '.join(well)} {'are' if len(well) > 1 else 'is'} right in every case" if well else ""
        cause = self.explained(learners, got)
        by_chance = cause and (IN_NUMBERS in cause[1] or "`2` is missing in" in cause[1])  # of what is as large
        if not cause or by_chance or (self.hint and "are exchanged: they" not in cause[1]):
            cause = self._counted(got, wrong) or cause
        if self.symptom and (not cause or HEDGE in cause[1]):
            seen = self.symptom_of(learners)
            evidence = f"As{HEDGE[2:]}{cause[1].partition(HEDGE)[2]}. {evidence}" if seen and cause else evidence
            cause = seen or cause
        said = (
            cause or self._common(got, wrong)
            or index.explain_as_two(got) or index.explain(got, some=True) or index.result_told()
            or self._of_another(got, wrong) or self._moved_by(learners, wrong) or self._where(learners, wrong, off)
        )  # fmt: skip
        if said is None:
            return CheckFailed(f"{evidence}; {sum(off)} of {len(off)} cases are wrong", case=case)
        return CheckFailed(f"{said[1]}.\n{evidence}", diagnosis=said[0], case=case)

    def _beside(self, name: str, mine: Any, right: Any, script: Any) -> str:
        if not self.each:
            return f"{name} is {_short(mine)}, it should be {_short(right)}"
        at = next(i for i, (x, y) in enumerate(zip(mine, right, strict=True)) if not same(x, y, self.tol))
        one, other = (_short(set(x) if isinstance(x, frozenset) else x) for x in (mine[at], right[at]))
        listed = isinstance(script, tuple) and len(script) == len(right) and isinstance(script[at], tuple)
        what = f", {script[at]}," if listed else ","
        return f"{name} is {one} for {self.each} {at + 1}{what} it should be {other}"

    def _counted(self, got: list[Values], wrong: list[int]) -> tuple[str, str] | None:
        """A result that is a sum of the right units, and not as many of each."""
        for i in wrong:
            units = self.units.get(self.returns[i])
            values = [x[i] for x in got]
            found = in_units(values, self.tried, self.params, units, self.fn.__globals__) if units else None
            if not (units and found):
                continue
            name = self.returns[i]
            right = [x[i] for x in self.index.right]
            want = in_units(right, self.tried, self.params, units, self.fn.__globals__) or found
            if name in self.hint:
                counted = [*zip(found, want, units, strict=True)]
                said = " and ".join(f"{n:g} {words}" for n, _, words in counted if n)
                off = [f"too {'few' if n < m else 'many'} of {words.rsplit('of ')[-1].removeprefix('times ')} (by "
                       f"{abs(n - m):g})" for n, m, words in counted if n != m]  # fmt: skip
                said = f"{name} counts {said or 'nothing'}, {' and '.join(off)}"
                why = self.hint[name]
                below = len(said) + len(why) + 2 > self.index.longest
                return "miscounted", f"{said}.\n{why[0].upper()}{why[1:]}" if below else f"{said}: {why}"
            off = [f"{n:g} {unit}, {m:g} is right" for n, m, unit in zip(found, want, units, strict=True) if n != m]
            said = f"{name} counts {'; and '.join(off)}"
            if off and len(said) <= self.index.longest:
                return "miscounted", said
        return None

    def _common(self, got: list[Values], wrong: list[int]) -> tuple[str, str] | None:
        """One factor, one difference or one value in every case."""
        seen = Symptoms()
        for i in wrong:
            for x, y in zip(got, self.index.right, strict=True):
                if isinstance(x[i], (int, float)) and isinstance(y[i], (int, float)):
                    mine, should = (torch.tensor([float(v)], dtype=torch.float64) for v in (x[i], y[i]))
                    seen.compared_with.append(
                        (self.returns[i], mine, should, min(self.tol, 1e-6) * max(1.0, abs(float(should))))
                    )
            if common := seen.everywhere(self.returns[i]):
                return "wrong-factor", common
        return None

    def _of_another(self, got: list[Values], wrong: list[int]) -> tuple[str, str] | None:
        """A result that is right for another function of the exercise."""
        others = [it for it in functions(self.id) if it is not self and it.params == self.params]
        for i, it in ((i, it) for i in wrong for it in others if self.returns[i] in it.returns):
            at = it.returns.index(self.returns[i])
            right = [(x[at],) for x in it.index.run(it.fn, self.tried)]
            if self.index.same_outcome([(x[i],) for x in got], right, 0):
                said = f"{self.returns[i]} is what it should be in `{it.fn.__name__}`, and not here"
                return "of-another-function", said
        return None

    def _moved_by(self, learners: Callable[..., Any], wrong: list[int]) -> tuple[str, str] | None:
        """Which numbers change a result, where others should."""
        if self.each or not all(isinstance(x, (int, float)) for given in self.tried for x in given):
            return None
        drawn = self.drawn(_MOVED)
        for i in wrong:
            mine, right = set[str](), set[str]()
            for n, name in enumerate(self.params):
                moved = [(*a[:n], b[n], *a[n + 1 :]) for a, b in itertools.pairwise(drawn)]
                for fn, by in ((learners, mine), (self.fn, right)):
                    with contextlib.redirect_stdout(io.StringIO()):
                        pairs = zip(self.index.run(fn, drawn), self.index.run(fn, moved), strict=False)
                    if any(x[i] != y[i] for x, y in pairs if not isinstance(x, str) and not isinstance(y, str)):
                        by.add(name)
            if mine == right:
                continue
            more, less = (" and ".join(f"`{x}`" for x in self.params if x in a - b)
                          for a, b in ((mine, right), (right, mine)))  # fmt: skip
            said = " and ".join(
                x for x in (f"changes with {more}" * bool(more), f"never with {less}" * bool(less)) if x
            )
            should = " and ".join(f"`{x}`" for x in self.params if x in right)
            return "moved-by-another", f"{self.returns[i]} {said}: it should change with {should or 'none of them'}"
        return None

    def _where(self, learners: Callable[..., Any], wrong: list[int], off: list[bool]) -> tuple[str, str] | None:
        """On which inputs it is right, if one condition says so."""
        more = self.drawn(200)
        with contextlib.redirect_stdout(io.StringIO()):
            ours, theirs = (self.index.run(fn, more) for fn in (self.fn, learners))
        verdicts = [not x for x in off] + [self.index.same_outcome([x], [y]) for x, y in zip(theirs, ours, strict=True)]
        where = where_right(self.params, [*self.tried, *more], verdicts)
        verb = "is" if len(wrong) == 1 else "are"
        names = " and ".join(self.returns[i] for i in wrong)
        return ("right-where", f"{names} {verb} right just where {where}") if where else None


def mending(learners: Callable[..., Any], judged: Callable[[Callable[..., Any]], Any]) -> Any:
    """The verdict of `judged`; a change of the learner's own that passes is told before what is wrong."""
    try:
        return judged(learners)
    except CheckFailed as symptom:
        if not (words := _mended(learners, judged)):
            raise
        raise _after(words, symptom) from None


def _mended(learners: Callable[..., Any], judged: Callable[[Callable[..., Any]], Any]) -> str:
    own = ""
    with quietly():
        own = mended_for(unwrapped(learners), judged)
    return own and f"{own}: then it is right"


def _after(words: str, symptom: CheckFailed) -> CheckFailed:
    return CheckFailed(f"{words}.\n{symptom.sentence}", diagnosis=symptom.diagnosis, case=symptom.case)


def unwrapped(answer: Any) -> Any:
    """The function that a learner has written, or the one of the kernel that it launches."""
    answer = getattr(answer, "answer", answer)
    return inspect.unwrap(getattr(answer, "fn", answer))


def written(answer: Any) -> frozenset[str]:
    """The tokens of the learner's cell or file in which a function, or the kernel that it launches, is written."""
    fn = unwrapped(answer)
    try:
        if inspect.getfile(fn).startswith(_PACKAGE):
            return frozenset()
        lines = iter(inspect.findsource(fn)[0])
        return frozenset(token.string for token in tokenize.generate_tokens(lambda: next(lines, "")))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return frozenset()


def code_of(answer: Any) -> str:
    """The same tokens in order, of the function alone and of what it calls beside it."""
    return "".join(map(tokens_of, sources(answer)))


def sources(answer: Any) -> list[str]:
    """The texts of the function and of those that it calls beside it."""
    fn = unwrapped(answer)
    try:
        file = inspect.getfile(fn)
        if file.startswith(_PACKAGE):
            return []
        called = (unwrapped(fn.__globals__.get(name)) for name in fn.__code__.co_names)
        beside = [x for x in called if inspect.isfunction(x) and x is not fn and x.__module__ == fn.__module__]
        return [inspect.getsource(x) for x in (fn, *beside)]
    except (OSError, TypeError):
        return []


def functions(id: str) -> list[Rule]:
    """The functions that an exercise asks for, less their `parts`."""
    return [it for it in RULES.values() if id and it.id == id]


def answers(it: Rule, fn: Callable[..., Any]) -> list[Callable[..., Any]]:
    """What its exercise is handed: `fn` for this function, and the right ones for the others."""
    return [fn if other is it else other.fn for other in functions(it.id)]


def _number(value: Any) -> Any:
    """A number as a Python number, whatever it came as; a text as it is; anything else unchanged."""
    if isinstance(value, (str, bool)) or value is None:
        return int(value) if isinstance(value, bool) else value
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _has_fractions(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, tuple) and any(map(_has_fractions, value)))


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "name", value)) if not isinstance(value, str) else repr(value)


def rule(
    id: str, *, returns: str, title: str = "", minutes: int = 0, hints: Sequence[str] = (), difficulty: str = "Core",
    make: Callable[..., Rule] = Rule, untouched: str = "", history: str = "", bug: Row | None = None, **data: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register the decorated function as the right answer of exercise `id`; `data` is the rest of `Rule`'s fields.

    Where an exercise asks for several functions, the first alone has a title. bug: what a hunt begins with, a row.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        if bug is not None:
            data["rows"] = (bug, *data.get("rows", ()))
        head = "@triton.jit\n" if "\n@triton.jit\n" in inspect.getsource(fn) else ""
        begun = python_fingerprint(head + edited_function(fn, bug.edits)) if bug is not None else untouched
        edits = bug.edits if bug is not None else ()
        lists = {k: v if isinstance(v, Mapping) else tuple(v) for k, v in data.items() if k in (
            "inputs", "rows", "also", "parts")}  # fmt: skip
        for key in [key for key, it in RULES.items() if title and it.id == id]:
            del RULES[key]
        it = make(fn, tuple(returns.split(", ")), id=id, **{**data, **lists})
        RULES[id if title else f"{id} {fn.__name__}"] = it
        if title:
            exercise(id, title=title, minutes=minutes, difficulty=difficulty, hints=hints, bug=edits,
                     untouched=begun, history=history)(_run(id, fn))  # fmt: skip
        _sign(find(id).run, id)  # type: ignore[union-attr]
        return fn

    return register


def _run(id: str, fn: Callable[..., Any]) -> Callable[..., str]:
    def run(*learners: Any) -> str:
        asked = functions(id)
        further = [RULES[f"{id} {name}"] for it in asked for name in it.parts]
        for it, answer in zip(further, learners[len(asked) :], strict=True):
            it.check(answer)
        said = []
        for it, answer in zip(asked, learners, strict=False):
            try:
                said.append(it.check(answer))
            except CheckFailed as failed:
                if not it.prefix:
                    raise
                raise CheckFailed(it.prefix + failed.sentence, diagnosis=failed.diagnosis, case=failed.case) from None
        return "; ".join(said)

    run.__module__, run.__wrapped__ = fn.__module__, fn  # type: ignore[attr-defined]
    return run


def _sign(run: Callable[..., Any], id: str) -> None:
    """What the check asks for, in its signature."""
    kinds: dict[str, Any] = {}
    for it in functions(id):
        count, tensor = len(it.returns), "Tensor" in str(it.fn.__annotations__.get("return"))
        one: Any = list if it.each else int if it.whole or it.strict else torch.Tensor if tensor else float
        kind: Any = tuple[(Any,) * count] if count > 1 and not it.each else one  # type: ignore[misc]
        kinds[it.answer or it.fn.__name__] = Any if it.answer else Callable[..., kind]
    kinds |= {name: Callable[..., Any] for it in functions(id) for name in it.parts}
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__annotations__ = kinds
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, either, annotation=kind) for name, kind in kinds.items()]
    )


def main(ids: Sequence[str]) -> None:
    """Print what the checks of these exercises, or of all, do not tell from the right rule."""
    for id, it in RULES.items():
        if not ids or id in ids:
            found = it.survivors()
            print(f"{id}: {len(it.index.outcomes)} changes and rows on {len(it.tried)} inputs, {len(found)} survive")
            for said, given in found:
                print(f"  {'HOLE' if given else 'same'}  {said}" + (f"  [{it.case(given)}]" if given else ""))


if __name__ == "__main__":
    from flashlab.exercises import exercises
    from flashlab.exercises import rule as module

    exercises()  # imports every phase
    module.main(sys.argv[1:])
