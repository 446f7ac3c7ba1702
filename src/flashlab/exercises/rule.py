"""An exercise whose answer is a small function: one decorated function is all there is of it.

    @rule("3.7", title="How many bytes?", minutes=10, hints=[...], returns="bytes_read", inputs=[(64, 64, 32, 32, 2)],
          draw=lambda r: (r.randint(1, 200), ...))
    def bytes_read(M, N, HEAD_DIM, BLOCK_M, itemsize):
        # BEGIN SOLUTION
        programs = math.ceil(M / BLOCK_M)
        return (M + 2 * N * programs) * HEAD_DIM * itemsize
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
import math
import operator
import random
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashlab.check import CheckFailed, running
from flashlab.check.changes import Text
from flashlab.check.lookup import Index, Row, Values, in_units, where_right
from flashlab.check.symptoms import Symptoms
from flashlab.exercises.answers import in_words
from flashlab.exercises.registry import exercise

RULES: dict[str, Rule] = {}

_COUNTS = ("no", "one", "two", "three", "four", "five", "six")
_BESIDE = 40  # drawn inputs that the check runs beside its own
_DRAWN = 3000  # inputs on which a change that the check accepts is compared with the right rule


@dataclass(frozen=True)
class Rule:
    """A right function, the check's inputs, and what of its mistakes cannot be computed.

    Attributes:
        returns: the names of the results. whole: they are whole numbers.
        draw: one more input, from a random.Random: any that the exercise allows.
        rows: mistakes that no change of the text makes. words: what local names are called in a sentence.
        notes: {piece of the right text: why it is there}, told with whatever change of it fits.
        also: expressions of the parameters that give the same, to be changed too; of tensors also functions, and
            lists of edits of the right one.
        units: {result: {words: expression}}: what the result is a sum of, and `hint` what to say with it.
        alike: makes one of results that are as good as each other. tol: relative.
        then: asked last, with the learner's function; raises CheckFailed.
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
    alike: Callable[..., Values] = lambda *values: values
    whole: bool = False
    tol: float = 1e-9
    then: Callable[[Callable[..., Any]], Any] | None = None

    @property
    def params(self) -> list[str]:
        return list(inspect.signature(self.fn).parameters)

    @cached_property
    def index(self) -> Index:
        whole = not any(isinstance(value, float) for given in self.tried for value in given)
        texts = [Text(self.fn, self.words, other, whole) for other in (None, *self.also)]
        rows = [(row, self.with_row(row)) for row in self.rows]
        return Index(
            texts, self.tried, self.returns, self._values, self.tol, rows, self.alike, self.drawn(300), self.notes
        )

    @cached_property
    def tried(self) -> tuple[tuple[Any, ...], ...]:
        """What the check runs: its own inputs, and some that are drawn, always the same."""
        return tuple(dict.fromkeys((*self.inputs, *self.drawn(_BESIDE, seed=1))))

    def with_row(self, row: Row) -> Callable[..., Any]:
        """The function as a learner with this mistake has it."""
        if row.instead:
            return Text(self.fn, other=row.instead).compiled()
        names = dict(self.fn.__globals__)
        exec(f"from __future__ import annotations\n{self.edited(row.edits)}", names)
        return names[self.fn.__name__]

    def edited(self, edits: Sequence[tuple[str, str]]) -> str:
        """The function's source with these edits; each old text occurs once."""
        source = textwrap.dedent(inspect.getsource(self.fn))
        source = source[source.index("\ndef ") + 1 :] if not source.startswith("def ") else source
        for old, new in edits:
            if source.count(old) != 1:
                raise ValueError(f"{old!r} occurs {source.count(old)} times in {self.fn.__name__}")
            source = source.replace(old, new)
        return source

    def drawn(self, count: int = _DRAWN, seed: int = 0) -> list[tuple[Any, ...]]:
        source = random.Random(seed)
        return [self.draw(source) for _ in range(count)]

    def survivors(self) -> list[tuple[str, tuple[Any, ...] | None]]:
        """What the check does not tell from the right rule, and a drawn input that does, or None: the same there."""
        return [(f"{c.slug}: {c.said}", input_) for c, input_ in self.index.survivors(self.drawn())]

    # ---- a learner's answer

    def _values(self, got: Any) -> Values:
        parts = (got,) if len(self.returns) == 1 else tuple(got)
        return tuple(_number(x) for x in parts)

    def read(self, got: Any, case: str) -> Values:
        """The results as `Values`; CheckFailed where they are something else."""
        __tracebackhide__ = True
        names = self.returns
        wanted = f"({', '.join(names)})" if len(names) > 1 else names[0]
        if got is None:
            raise CheckFailed(
                f"the function returns nothing: is a `return` missing? Return {wanted}",
                diagnosis="returned-none", case=case,
            )  # fmt: skip
        parts: Sequence[Any] = [got]
        if len(names) > 1:
            kind = "numbers" if not any(isinstance(x, str) for x in self.fn(*self.tried[0])) else "things"
            got = got.tolist() if hasattr(got, "tolist") else got
            if not isinstance(got, (tuple, list)) or len(got) != len(names):
                raise CheckFailed(
                    f"{in_words(got, article=True)} is returned; return {_COUNTS[len(names)]} {kind}, {wanted}",
                    diagnosis="wrong-type", case=case,
                )  # fmt: skip
            parts = got
        right = self.fn(*self.tried[0])
        kinds = right if len(names) > 1 else (right,)
        for name, value, kind in zip(names, parts, kinds, strict=True):
            number = _number(value)
            if isinstance(kind, str) != isinstance(number, str) or not isinstance(number, (int, float, str)):
                wanted = "a text" if isinstance(kind, str) else "a number"
                raise CheckFailed(
                    f"{name} should be {wanted}, not {in_words(value, article=True)}", diagnosis="wrong-type", case=case
                )
            texts = list(dict.fromkeys(x[names.index(name)] for x in self.index.right if isinstance(kind, str)))
            if texts and number not in texts:
                listed = " or ".join(map(repr, texts))
                raise CheckFailed(f"{name} is {listed}, not {number!r:.60}", diagnosis="wrong-word", case=case)
            if self.whole and (isinstance(number, str) or not math.isfinite(number) or number != int(number)):
                by = ": division by // gives one" if isinstance(value, float) and math.isfinite(value) else ""
                raise CheckFailed(
                    f"{name} is {value!r:.40}, which is no whole number{by}", diagnosis="no-whole-number", case=case
                )
        return self._values(got)

    def case(self, given: tuple[Any, ...]) -> str:
        return ", ".join(f"{name}={_short(value)}" for name, value in zip(self.params, given, strict=True))

    def check(self, learners: Callable[..., Any]) -> str:
        __tracebackhide__ = True
        got = []
        for given in self.tried:
            with running(self.case(given)):
                result = learners(*given)
            got.append(self.read(result, self.case(given)))
        wrong = self.index.wrong_parts(got) if got != self.index.right else []
        if wrong:
            raise self._failed(learners, got, wrong)
        if self.then is not None:
            self.then(learners)
        return f"{len(got)} inputs"

    def _failed(self, learners: Callable[..., Any], got: list[Values], wrong: list[int]) -> CheckFailed:
        index, names = self.index, self.returns
        off = [not index.same_outcome([x], [y]) for x, y in zip(got, index.right, strict=True)]
        plain = [x and (isinstance(y, str) or self.alike(*y) == y) for x, y in zip(off, index.right, strict=True)]
        at = (plain if any(plain) else off).index(True)
        case = self.case(self.tried[at])
        numbers = [f"{names[i]} is {_short(got[at][i])}, it should be {_short(index.right[at][i])}" for i in wrong
                   if not index.same_outcome([got[at]], [index.right[at]], i)]  # fmt: skip
        well = [name for i, name in enumerate(names) if i not in wrong]
        evidence = "; ".join(numbers)
        evidence += f". {' and '.join(well)} {'are' if len(well) > 1 else 'is'} right in every case" if well else ""
        said = (
            self._counted(got, wrong) or index.explain(got) or self._common(got, wrong)
            or index.explain_as_two(got) or index.explain(got, some=True) or self._where(learners, wrong, off)
        )  # fmt: skip
        if said is None:
            return CheckFailed(f"{evidence}; {sum(off)} of {len(off)} cases are wrong", case=case)
        return CheckFailed(f"{said[1]}.\n{evidence}", diagnosis=said[0], case=case)

    def _counted(self, got: list[Values], wrong: list[int]) -> tuple[str, str] | None:
        """A result that is a sum of the right units, and not as many of each."""
        for i in wrong:
            units = self.units.get(self.returns[i])
            values = [x[i] for x in got]
            found = in_units(values, self.tried, self.params, units, self.fn.__globals__) if units else None
            if units and found:
                parts = [f"{n:g} {words}" for n, words in zip(found, units, strict=True) if n]
                said = f"{self.returns[i]} counts {' and '.join(parts) or 'nothing'}: {self.hint[self.returns[i]]}"
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


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(getattr(value, "name", value)) if not isinstance(value, str) else repr(value)


def rule(
    id: str, *, title: str, minutes: int, hints: Sequence[str], returns: str, difficulty: str = "Core",
    make: Callable[..., Rule] = Rule, parts: Sequence[str] = (), answer: str = "", untouched: str = "",
    history: str = "", **data: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register the decorated function as the right answer of exercise `id`; `data` is the rest of `Rule`'s fields.

    parts: further functions of the answer, rules `"ID NAME"` of their own, which are judged first. answer: what the
    learner hands in where that is no such function: a kernel, which the rule's `through` makes one.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        lists = {k: v if isinstance(v, Mapping) else tuple(v) for k, v in data.items() if k in (
            "inputs", "rows", "also")}  # fmt: skip
        it = RULES[id] = make(fn, tuple(returns.split(", ")), **{**data, **lists})
        count = len(it.returns)
        one: Any = int if it.whole else torch.Tensor if "Tensor" in str(fn.__annotations__.get("return")) else float
        kind: Any = Any if answer else Callable[..., tuple[(Any,) * count] if count > 1 else one]  # type: ignore[misc]

        def run(learners: Any, *others: Any) -> str:
            __tracebackhide__ = True
            for name, other in zip(parts, others, strict=True):
                RULES[f"{id} {name}"].check(other)
            return it.check(learners)

        run.__module__, run.__wrapped__ = fn.__module__, fn  # type: ignore[attr-defined]
        kinds = {answer or fn.__name__: kind, **dict.fromkeys(parts, Callable[..., Any])}
        run.__annotations__ = kinds
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, either, annotation=kind) for name, kind in kinds.items()]
        )
        exercise(id, title=title, minutes=minutes, difficulty=difficulty, hints=hints, untouched=untouched,
                 history=history)(run)  # fmt: skip
        return fn

    return register


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
