"""Which change of the right text gives all of a learner's values?

`Index` runs every change of `changes` once on the check's own inputs and keeps what came out; the learner's values are
looked up in it. A cause is told only if it gives all of them, on every input; the likelier first, and where two of
different kinds do, both. Where none does: one cause for each of several results, or two slips in one of them.

A rule's index is made when the first wrong answer comes: some 300 to 900 changes, 0.1 to 0.4 s on one core, and nothing
that could be out of date. So is that of a Triton kernel, whose 500 to 4000 changes run on a model. The input that takes
least comes first, and a verdict runs only so much (`most`): seconds, of whatever is wrong.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flashlab.check.changes import Change, EndlessError, Text, Variants, changes
from flashlab.check.claims import Claims, tokens_of
from flashlab.check.expect import allowed_error, is_close
from flashlab.check.trees import names_in, nodes, reads

Values = tuple[Any, ...]  # the results of one call: numbers, texts or tensors
Outcome = Sequence["Values | str"]  # for each input; a text: the exception that it raised
Found = tuple["Text | None", Change, Outcome]  # None: a row

_PLAIN = (  # what may be told together with another one; two rare ones give too much by chance
    "term-missing", "factor-missing", "division-missing", "wrong-sign", "off-by-one", "wrong-name", "wrong-number",
    "limit-missing", "wrong-rounding", "wrong-function", "function-missing", "brackets-missing", "upside-down",
    "wrong-operator", "wrong-comparison", "taken-as-fixed", "condition-missing",
)  # fmt: skip
HEDGE = "as in a right answer where"
_ENDLESS = EndlessError.__name__
_UNCLEAR = 2.0  # what it costs to take one of several rows that give the same
_CLAIMED = re.compile(r"`([a-z]\w+|[^\w`]{1,3})` (?:stands|adds|is taken for)")
_WHOLE = re.compile(r"it is `(\w+)`$")
_FOR_A_NUMBER = re.compile(r"stands where [\d.]+ belongs")
_ALMOST = 0.35  # costs so near say nothing about which is likelier
_SYMPTOMS = ("always-the-same", "always-one-branch")
_UNSEEN = 1.5  # what a change costs more of which nothing is seen in the learner's text
_UNLIKE = 1.5  # the cost of a row that the learner's text does not look like
_SHORT = 60  # characters of what a name stands for
_PAIRED = 200  # changes that are tried two at a time
_TRIES = 12_000


@dataclass(frozen=True)
class Row:
    """A mistake that no single change makes: an edit of the right text, or another text for it, and a sentence.

    edits: (old, new) texts, each of which occurs once. Or instead: an expression of the parameters.
    """

    slug: str
    sentence: str
    edits: Sequence[tuple[str, str]] = ()
    instead: str = ""


def same(a: Any, b: Any, tol: float) -> bool:
    """Whether two results are one; tol is relative, and absolute near 0; of tensors absolute, or by their dtypes."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        numbers = all(isinstance(x, (torch.Tensor, int, float)) for x in (a, b))
        return numbers and is_close(a, b, None if tol <= 1e-9 else tol)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y, tol) for x, y in zip(a, b, strict=True))
    if not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        return type(a) is type(b) and bool(a == b)
    if a == b or (a != a and b != b):
        return True
    try:
        return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tol * max(1e-6, abs(b))
    except OverflowError:  # a whole number beyond every float
        return False


def as_they_are(*values: Any) -> Values:
    return values


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, torch.Tensor) else None


@contextlib.contextmanager
def _calls() -> Iterator[Counter[str]]:
    """How often what runs in it calls a function of Python's or of C's: the same number every time."""
    events: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            events[event] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield events
    finally:
        sys.setprofile(before if callable(before) else None)


def outcome_of(error: BaseException) -> str:
    """An exception as the result of a call: its name; of a stray address and of those that torch has for whatever does
    not fit, all that it says.
    """
    if isinstance(error, UnboundLocalError):
        return NameError.__name__  # a line is missing, here or there
    said = type(error) in (RuntimeError, IndexError, ValueError) or type(error).__name__ == "OutOfBounds"
    return str(error) if said else type(error).__name__


class Later(Sequence[Any]):
    """What a function gives for each input, run when it is asked for: most changes differ on the first."""

    def __init__(self, one: Callable[[tuple[Any, ...]], Values | str], inputs: Sequence[tuple[Any, ...]]):
        self._one, self._inputs, self._known = one, inputs, {}  # type: ignore[var-annotated]
        self._endless = False  # not waited for again

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        if i not in self._known:
            self._known[i] = _ENDLESS if self._endless else self._one(self._inputs[i])
            self._endless = self._known[i] == _ENDLESS
        return self._known[i]


class Index:
    """The changes of a right text, and what each gives.

    Args:
        texts: the right text, and others that give the same, each with changes of its own.
        inputs: the check's own. names: of the results. rows: told first where they fit.
        read: makes `Values` of what a call returned; raises where it cannot. tol: see `same`.
        alike: makes one of results that are as good as each other. more: inputs on which two causes may differ.
        notes: {piece of the text: why it is there}, told with every change of it.
        kinds: further changes, see `changes`. tries: how many pairs of changes are tried. copied: makes a copy of an
            input that a change may write to. without: slugs of changes that are not made.
        called: calls a function with one input. longest: characters that a sentence may have. most: work of a verdict,
            in turns of loops and programs; so many calls of functions are a turn too. error: an exception as a result.
        case: an input in words.
    """

    def __init__(
        self, texts: Sequence[Text], inputs: Sequence[tuple[Any, ...]], names: Sequence[str],
        read: Callable[[Any], Values], tol: float, rows: Sequence[tuple[Row, Callable[..., Any]]] = (),
        alike: Callable[..., Values] = as_they_are, more: Sequence[tuple[Any, ...]] = (),
        notes: Mapping[str, str] | None = None, kinds: Any = None, tries: int = _TRIES,
        copied: Callable[[Any], Any] = lambda x: x, without: Sequence[str] = (),
        called: Callable[..., Any] = lambda fn, *given: fn(*given), longest: int = 200, most: int = 10**6,
        calls: int = 30, error: Callable[[BaseException], str] = outcome_of,
        case: Callable[[tuple[Any, ...]], str] = lambda given: "",
    ):  # fmt: skip
        self.copied, self.without = copied, without
        self.texts, self.inputs, self.names, self.read, self.tol, self.rows = texts, inputs, names, read, tol, rows
        self.alike, self.more, self.notes, self.kinds, self.tries = alike, more, notes or {}, kinds, tries
        self.called, self.longest, self.error, self.case = called, longest, error, case
        self.right: list[Any] = []
        self.work: list[int] = []  # turns on each input
        right = texts[0].compiled()
        for given in inputs:
            before = texts[0].turns
            with _calls() as counted:
                self.right.append(self._one(right, given))
            self.work.append(1 + max(texts[0].turns - before, counted.total() // calls))
        assert not inputs or not all(isinstance(x, str) for x in self.right), f"the right text: {self.right[0]}"
        self.order = sorted(range(len(inputs)), key=lambda i: self.work[i])  # what takes least tells most of them apart
        self.looked_up: Any = None  # an answer's outcome, and the changes that fit
        self.of_result = ""  # which of its expressions gives a wrong result of what is right
        self.variants: dict[int, Variants] = {}
        self.written: frozenset[str] = frozenset()  # the tokens of the learner's text, where it is known
        self.code = ""  # the same in order, less the heads of functions
        self.most, self.spent = most, 0  # work of a verdict; what is left out costs a cause, and the symptom is told
        self.paid: dict[tuple[int, int], Outcome] = {}

    def run(self, fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]] | None = None) -> Outcome:
        return Later(lambda given: self._one(fn, given), self.inputs if inputs is None else inputs)

    def _one(self, fn: Callable[..., Any], given: tuple[Any, ...]) -> Values | str:
        try:
            return self.read(self.called(fn, *map(self.copied, given)))
        except (Exception, EndlessError) as error:
            return self.error(error)

    @cached_property
    def outcomes(self) -> list[Found]:
        """Every change that can be run, the rows first, then the likelier first."""
        found: list[Found] = []
        for row, fn in self.rows:
            found.append((None, Change(row.slug, row.sentence, 0.0, ()), self.run(fn)))
        for text in self.texts:
            if self.kinds:
                text.kinds = self.kinds.kinds_of(text, [tuple(map(self.copied, x)) for x in self.inputs[:3]])
            seen = {name: [given[i] for given in self.inputs] for i, name in enumerate(text.params)}
            made = [c for c in changes(text, seen, self.kinds) if c.slug not in self.without]
            variants = self.variants[id(text)] = Variants(text, made)
            runs = ((c, variants.chosen(c)) for c in made)
            found += [(text, c, self.run(run)) for c, run in runs if run is not None]
        beside = 0.3 if self.kinds else 0.0  # other texts are other functions then: one's own is likelier
        return sorted(found, key=lambda x: x[1].cost + beside * (x[0] not in (None, self.texts[0])))

    def same_outcome(self, a: Outcome, b: Outcome, part: int | None = None) -> bool:
        if len(a) != len(self.inputs):
            return all(self._same_values(x, y, part) for x, y in zip(a, b, strict=True))
        return all(self._same_values(a[i], b[i], part) for i in self.order)

    def _fits(self, outcome: Outcome, got: Outcome, part: int | None = None, order: Sequence[int] = ()) -> bool:
        """`same_outcome`, as long as this verdict may run changes; what has been run before costs the same."""
        for i in order or self.order:
            if (id(outcome), i) not in self.paid:
                self.paid[id(outcome), i] = outcome
                self.spent += self.work[i]
            if self.spent > self.most or not self._same_values(outcome[i], got[i], part):
                return False
        return True

    def _fits_where_finite(self, outcome: Outcome, got: Outcome) -> bool:
        """Of a row: in two wrong cases, and all others in which it gives no NaN, which a learner may have patched."""
        plain = [i for i in self.order if not isinstance(outcome[i], str) and not any(
            isinstance(x, (float, torch.Tensor)) and torch.as_tensor(x).isnan().any() for x in outcome[i])]  # fmt: skip
        wrong = [not self._same_values(x, right, None) for x, right in zip(got, self.right, strict=True)]
        return len(plain) < len(wrong) and sum(wrong[i] for i in plain) > 1 and self._fits(outcome, got, order=plain)

    def _same_values(self, x: Values | str, y: Values | str, part: int | None) -> bool:
        if isinstance(x, str) or isinstance(y, str):
            return isinstance(x, str) and isinstance(y, str) and x == y
        if len(x) != len(y):
            return False
        if part is not None and same(x[part], y[part], self.tol):
            return True
        if part is not None and self.alike is as_they_are:
            return False
        try:
            x, y = self.alike(*x), self.alike(*y)
        except Exception:  # a change may have made anything of a result
            return False
        return len(x) == len(y) and all(same(a, b, self.tol) for a, b in zip(x, y, strict=True))

    def wrong_parts(self, got: Outcome) -> list[int]:
        return [i for i in range(len(self.names)) if not self.same_outcome(got, self.right, i)]

    def explain(self, got: Outcome, some: bool = False) -> tuple[str, str] | None:
        """(slug, sentence) of what gives all of these values, or those of each result on its own; or None.

        some: what gives those of one result will do, if it is a number: a word is right too often by chance.
        """
        if not (some and self.looked_up and self.looked_up[0] is got):
            self.spent, self.paid = 0, {}
            whole: list[Found] = []
            for found in self._said_of_it():  # the likelier first: one that is far less likely is not told
                if whole and found[1].cost - whole[0][1].cost > _ALMOST:
                    break
                if self._fits(found[2], got) and self.wrong_parts(found[2]) and not self._goes_along(found):
                    whole.append(found)  # what the check accepts is no cause
            if whole and not self._seen(whole[0]):  # a row is likelier, though the text is not like it either
                rows = itertools.takewhile(lambda x: x[1].cost <= _UNLIKE, self._said_of_it())
                whole = [x for x in rows if x[0] is None and self._fits(x[2], got)] + whole
            whole = whole or [x for x in self._said_of_it() if x[0] is None and self._fits_where_finite(x[2], got)][:1]
            wrong = self.wrong_parts(got) if not whole else []
            parts = {
                i: [x for x in self._said_of_it(of_one=len(self.names) > 1)
                    if self._may_be(x, i) and self._fits(x[2], got, i) and not self.same_outcome(x[2], self.right, i)]
                for i in wrong
            }  # fmt: skip
            self.looked_up = got, whole, parts
        _, whole, parts = self.looked_up
        if whole:
            return self._told(whole)
        wrong = [*parts]
        told = {i: self._told(parts[i], i) for i in wrong if parts[i]}
        alone = {i: [x for x in parts[i] if self._leaves(x[2], got, {*wrong} - {i})] for i in wrong}
        if wrong and all(alone.values()):
            parts, told = alone, {i: self._told(alone[i], i) for i in wrong}
            if len(one := {parts[i][0][1].said for i in wrong}) == 1:
                return told[wrong[0]][0], self._of(wrong, one.pop())
            both = "; and ".join(said for _, said in told.values())
            if len(both) > self.longest:
                both = "; and ".join(self._told(parts[i], i, noted=False)[1] for i in wrong)
            if len(both) <= self.longest:
                return told[wrong[0]][0], both
        numbers = [i for i in told if not any(isinstance(x[i], str) for x in self.right)]
        for i in numbers if some else ():
            fitting = [x for x in parts[i] if self._spares(x[2], got, i)]
            if not fitting:
                continue
            slug, said = self._told(fitting, i)
            others = [self.names[k] for k in wrong if k != i]
            return slug, f"{said}; {' and '.join(others)} {'is' if len(others) == 1 else 'are'} wrong too"
        return None

    def cost(self, got: Outcome) -> float:
        """Of the change that explains all of these values; 0: it is a row, and no other one is."""
        if self.looked_up is None or self.looked_up[0] is not got or not self.looked_up[1]:
            return math.inf
        if len({x.said for text, x, _ in self.looked_up[1] if text is None}) > 1:
            return _UNCLEAR
        text, change, _ = found = self.looked_up[1][0]
        symptom = change.slug in _SYMPTOMS or (text is None and change.cost)
        return math.inf if symptom else change.cost + _UNSEEN * (not self._seen(found))

    def _seen(self, found: Found) -> bool:
        """Whether the learner's text has the words and signs of a change."""
        text, change, _ = found
        if text is None or not self.code or change.said.startswith(("it is ", "{order}")):
            return True
        if self._claims(text).of_a_stranger(change.said):
            return False
        with text.changed(change):
            changed = tokens_of(ast.unparse(text.tree))
        return self._claims(text).seen(changed)

    def _goes_along(self, found: Found) -> bool:
        """Whether a parameter that the learner's text has would be missing with what is said to be missing."""
        text, change, _ = found
        if text is None or not self.code or not change.slug.endswith("-missing"):
            return False
        with text.changed(change):
            read = {*reads(text.tree)}
            if any(self.code.count(f" {name} ") == 1 for name in {*text.meant} - read):
                return False  # the learner's text has it, and does not read it
            idle = {*text.meant} - read
            lines = [x for x in text.tree.body if ast.unparse(getattr(x, "targets", [x])[0]) not in idle]
            left = {name for line in lines for name in names_in(line)}
        return any(f" {name} " in self.code for name in {*text.params} & {*text.reads} - left)

    def _claims(self, text: Text) -> Claims:
        return Claims(self.code, tokens_of(ast.unparse(text.tree)), text.words, text.locals, text.params)

    def result_told(self) -> tuple[str, str] | None:
        return ("own-slip", f"{self.of_result}: the rest is right") if self.of_result else None

    def note_on(self, own: str) -> str:
        """Why the piece is there whose change explains the values, where what is said of a learner's text names it."""
        for text, change, _ in self.looked_up[1][:1]:
            pieces = [x for x in change.about if not x.isdigit()]  # another 2 has another reason
            if text is not None and any(f"`{piece}`" in own for piece in pieces):
                return self._note(text, change, "")
        return ""

    def less_sure(self, sentence: str) -> str:
        """The same as a comparison, unless what it says can be seen in the learner's text."""
        _, whole, parts = self.looked_up
        for text, change, _ in whole[:1] or [x[0] for x in parts.values() if x]:
            if text is None:
                continue
            if self._claims(text).no_number(change.said) or not self._seen((text, change, ())):
                said = rf"(?<!answer where ){re.escape(change.said)}"
                meant = self._its_own_names(text, change.said)
                sentence = re.sub(said, lambda found: f"{HEDGE} {found[0]}{meant}", sentence, count=1)  # noqa: B023
        return sentence

    def _its_own_names(self, text: Text, said: str) -> str:
        """What names of the right text stand for there, where the learner's text has them not, or for another thing."""
        pieces = " ".join(re.findall(r"`([^`]*)`", said))
        names = dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z_]\w*(?![\w=])", pieces))
        meant = {name: ast.unparse(text.meant[name]) for name in names
                 if isinstance(text.meant.get(name), (ast.BinOp, ast.Call, ast.Compare, ast.Subscript))}  # fmt: skip
        told = [f"`{name}` is `{x}`" for name, x in meant.items()
                if tokens_of(f"{name} = {x}").strip() not in self.code and len(x) <= _SHORT]  # fmt: skip
        return f" (there {' and '.join(told)})" if told and len(said + " ".join(told)) < self.longest else ""

    def _leaves(self, outcome: Outcome, got: Outcome, others: set[int]) -> bool:
        """Whether the other wrong results are then right, or as they are: else the causes contradict each other."""
        return all(any(self.same_outcome(outcome, x, i) for x in (got, self.right)) for i in others)

    def _spares(self, outcome: Outcome, got: Outcome, part: int) -> bool:
        """Whether all that is right in these values is right there too, and a wrong one of the part is a number.

        Else it is by chance that they agree: many changes have NaN in common.
        """
        number = False
        for x, y, right in zip(outcome, got, self.right, strict=True):
            for i in range(len(self.names)) if not isinstance(y, str) else ():
                well = self._same_values(y, right, i)
                if well and (isinstance(x, str) or not self._same_values(x, right, i)):
                    return False
                lost = isinstance(y[i], (float, torch.Tensor)) and not torch.as_tensor(y[i]).isfinite().any()
                number |= i == part and not well and not lost
        return number

    def _said_of_it(self, of_one: bool = False) -> Iterator[Found]:
        """The outcomes, less those whose words do not fit the learner's text: of an operator that it has not, say."""
        claims = {id(x): self._claims(x) for x in self.texts if self.code}
        late = list[Found]()  # rows whose values come by another way here
        for nth, found in enumerate(self.outcomes):
            text, change, outcome = found
            if text is None and claims and claims[id(self.texts[0])].unlike(self.rows[nth][0].edits):
                late.append((None, Change(change.slug, self._as_in_an_answer(change.said), _UNLIKE, ()), outcome))
                continue
            while late and change.cost >= _UNLIKE:
                yield late.pop(0)
            if id(text) in claims and claims[id(text)].untrue(change.said, of_one):
                continue
            claimed = _CLAIMED.match(change.said)
            known = text is not None and claimed and claimed[1] not in (*text.params, *text.locals)
            whole = _WHOLE.match(change.said) if self.written and text is not None else None
            if whole and whole[1] not in self.written:
                continue
            if not (self.written and known and claimed[1] not in self.written):  # type: ignore[index]
                yield found
        yield from late

    def _as_in_an_answer(self, said: str) -> str:
        head, colon, rest = said.partition(": ")
        of_results = colon and all(x in self.names for x in re.split(", | and ", head))
        return f"{head}: as in an answer where {rest}" if of_results else f"as in an answer where {said}"

    def _may_be(self, found: Found, part: int) -> bool:
        """Whether it may be told of one result alone: a row, only if that is all it is about."""
        text, _, outcome = found
        return text is not None or self.wrong_parts(outcome) == [part]

    def explain_as_two(self, got: Outcome) -> tuple[str, str] | None:
        """(slug, sentence) of two changes that give all of these values together, or None."""
        wrong = self.wrong_parts(got)
        if all(isinstance(x[i], str) for x in self.right for i in wrong):
            return None  # a word is right too often by chance
        spent, self.spent = self.spent, 0
        pair = self._pair(got, wrong[0] if len(wrong) == 1 else None)
        self.spent = spent
        if pair is None:
            return None
        text, one, other = pair
        with text.changed(one, other):
            changed = tokens_of(ast.unparse(text.tree))
        if self.code and not self._claims(text).seen(changed):
            return None  # two changes give much by chance
        return "two-slips", f"two slips at once would give this: {self._of(wrong, one.said)}; and {other.said}"

    def _told(self, fitting: Sequence[Found], part: int | None = None, noted: bool = True) -> tuple[str, str]:
        """The likeliest, and another one where they are two things: where other inputs tell them apart."""
        text, best, outcome = fitting[0]
        if text is None:
            said = next((x.said for t, x, _ in fitting if t is None and x.said != best.said), "")
            both = f"{best.said}. Or: {said}" if said else best.said
            return best.slug, both if len(both) <= self.longest else best.said
        raw = [i for i, _ in enumerate(self.names) if not self._raw(outcome, i)]
        sentence = self._of(raw if part is None else [part], best.said)
        for other_text, other, _ in fitting[1:]:
            if other_text is not None and other.cost - best.cost <= _ALMOST and other.slug != best.slug:
                runs = (t.compiled(c) for t, c in ((text, best), (other_text, other)))
                a, b = (self.run(fn, self.more) for fn in runs)
                both = f"{sentence}. Or: {other.said.removeprefix('it is ')}"
                if not self.same_outcome(a, b, part) and len(both) <= self.longest:
                    return best.slug, both
        if noted and (note := self._note(text, best, sentence)) and len(f"{sentence}: {note}") <= self.longest:
            sentence += f"{';' if ': it is' in sentence else ':'} {note}"
        return best.slug, sentence

    def _note(self, text: Text, change: Change, sentence: str) -> str:
        """Why the piece is there that was changed. A name that is there often has several reasons."""
        for piece in change.about if change.slug not in ("factor-too-many", "term-too-many") else ():
            often = sum(n.id == piece for n in nodes(text.tree, ast.Name)) > 1
            if change.slug == "wrong-name" and often:
                continue
            for name in self.names:
                if sentence.startswith(name) and f"{name}: {piece}" in self.notes:
                    return self.notes[f"{name}: {piece}"]
            if piece in self.notes:
                return self.notes[piece]
        return ""

    def _raw(self, outcome: Outcome, part: int) -> bool:
        """Whether this result is right everywhere, to the letter."""
        pairs = zip(outcome, self.right, strict=True)
        return all(not isinstance(x, str) and same(x[part], y[part], self.tol) for x, y in pairs)

    def _of(self, wrong: Sequence[int], said: str) -> str:
        if said.startswith("{order}"):
            order = [self.names[int(i)] for i in said[7:].split(",")]
            came, wanted = ", ".join(order), ", ".join(self.names)
            return f"the results are exchanged: they come as ({came}): return ({wanted})"
        names = " and ".join(self.names[i] for i in wrong).replace(" and ", ", ", max(0, len(wrong) - 2))
        if said.startswith("it is "):  # of the first: the others are computed of it
            follow = f", and {names.partition(' and ' if len(wrong) == 2 else ', ')[2]} with it" if wrong[1:] else ""
            return f"{self.names[wrong[0]]} {said[3:]}{follow}"
        return f"{names}: {said}"

    def _pair(self, got: Outcome, part: int | None) -> tuple[Text, Change, Change] | None:
        """Two of the likelier changes of one text that give all of these values together.

        Of two slips each mostly does to a result what it does alone: where one leaves it right, it is what the other
        makes of it. Pairs of which that is so come first.
        """
        differs = [i for i in self.order if not self._same_values(got[i], self.right[i], None)]
        # One of two may do nothing to the first inputs. On those that differ further, both may touch one element.
        telling, order = differs[:2], [*differs, *(i for i in self.order if i not in differs)]
        tries = 0
        for text in self.texts:
            mine: list[Found] = []
            said = self._said_of_it(of_one=len(self.names) > 1)
            for found in (x for x in said if x[0] is text and x[1].slug in _PLAIN):
                if len(mine) == _PAIRED:
                    break
                ends = any(isinstance(found[2][i], str) and not isinstance(got[i], str) for i in telling)
                if not ends and not all(self._fits(found[2], self.right, part, [i]) for i in differs[:4]):
                    mine.append(found)
            pairs = itertools.combinations(range(len(mine)), 2)
            apart = self._contradict([x[2] for x in mine], got, telling, part)
            for i, k in sorted(pairs, key=lambda x: (apart[x[0]][x[1]], mine[x[0]][1].cost + mine[x[1]][1].cost)):
                a, b = mine[i][1], mine[k][1]
                if a.clashes(b) or (a.slug == b.slug == "wrong-name" and a.edits[0][0][0] is b.edits[0][0][0]):
                    continue  # two other names in one operation give too much by chance
                if a.said == b.said or a.slug == b.slug == "wrong-sign":
                    continue  # of one piece
                if a.slug == b.slug == "wrong-name" and _FOR_A_NUMBER.search(a.said + b.said):
                    continue
                tries += 1
                if tries > self.tries or self.spent > self.most:
                    return None
                fn = self.variants[id(text)].chosen(a, b)
                if fn and self._fits(self.run(fn), got, part, order):
                    return text, a, b
        return None

    def _contradict(
        self, found: Sequence[Outcome], got: Outcome, at: Sequence[int], part: int | None
    ) -> list[list[bool]]:
        """For each two: whether an element that one of them leaves right is not what the other makes of it."""
        parts = range(len(self.names)) if part is None else [part]
        at = [i for i in at if not isinstance(got[i], str) and not isinstance(self.right[i], str)]
        places = [(i, p) for i in at for p in parts if _shape(got[i][p]) == _shape(self.right[i][p])]
        if not found or not places:
            return [[False] * len(found) for _ in found]
        right, mine = (
            torch.stack([torch.cat([self._elements(x[i], p, wanted[i][p]) for i, p in places]) for x in found]).float()
            for wanted in (self.right, got)
        )
        bad = right @ (1 - mine).T > 0
        return (bad | bad.T).tolist()

    def _elements(self, x: Values | str, part: int, wanted: Any) -> torch.Tensor:
        """Of each number of a result whether it is what is wanted."""
        mine: Any = None if isinstance(x, str) else x[part]
        if not isinstance(wanted, torch.Tensor):
            return torch.tensor([mine is not None and same(mine, wanted, self.tol)])
        if _shape(mine) != wanted.shape:
            return torch.zeros(wanted.numel(), dtype=torch.bool)
        a, b = mine.double().flatten(), wanted.double().flatten()
        return ((a - b).abs() <= allowed_error(wanted, self.tol)) | (a == b) | (a.isnan() & b.isnan())

    def survivors(self, more: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Change, tuple[Any, ...] | None]]:
        """Changes that the check's inputs do not tell from the right text, and one of `more` that does, or None."""
        right = self.run(self.texts[0].compiled(), more)
        for text, change, outcome in self.outcomes:
            if text is not None and self.same_outcome(outcome, self.right):
                found = self.run(text.compiled(change), more)
                pairs = zip(more, found, right, strict=True)
                yield change, next((given for given, x, y in pairs if not self._same_values(x, y, None)), None)


def where_right(names: Sequence[str], inputs: Sequence[tuple[Any, ...]], verdicts: Sequence[bool]) -> str | None:
    """The condition on the inputs that tells right answers from wrong ones, in words, or None.

    Tried: one parameter has one of its values; two are equal, one is larger, one divides the other.
    """
    if all(verdicts) or not any(verdicts):
        return None
    held: dict[str, list[bool]] = {}
    numbers = [i for i in range(len(names))
               if all(isinstance(x[i], (int, float)) and not isinstance(x[i], bool) for x in inputs)]  # fmt: skip
    for i in range(len(names)):
        for value in dict.fromkeys(x[i] for x in inputs if isinstance(x[i], (int, float, str))):
            held[f"{names[i]} is {value}"] = [x[i] == value for x in inputs]
    for i, k in itertools.permutations(numbers, 2):
        if i < k:
            held[f"{names[i]} = {names[k]}"] = [x[i] == x[k] for x in inputs]
        held[f"{names[i]} > {names[k]}"] = [x[i] > x[k] for x in inputs]
        held[f"{names[i]} >= {names[k]}"] = [x[i] >= x[k] for x in inputs]
        if all(isinstance(x[k], int) and x[k] > 0 and isinstance(x[i], int) for x in inputs):
            held[f"{names[k]} divides {names[i]}"] = [x[i] % x[k] == 0 for x in inputs]
    for words, holds in held.items():
        inside = [v for v, h in zip(verdicts, holds, strict=True) if h]
        outside = [v for v, h in zip(verdicts, holds, strict=True) if not h]
        if len(inside) > 1 and len(outside) > 1 and all(inside) and not any(outside):
            return words
    return None


def in_units(
    got: Sequence[Any], inputs: Sequence[tuple[Any, ...]], params: Sequence[str], units: Mapping[str, str],
    names: Mapping[str, Any],
) -> list[float] | None:  # fmt: skip
    """How often each unit (words: an expression of the parameters) is in every value, in halves; None if they are not.

    So a sum of a learner's is read back: 4 matrices of N x N and 3 of N x D.
    """
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in got) or len(inputs) <= len(units):
        return None
    rows = [[eval(u, dict(names), dict(zip(params, x, strict=True))) for u in units.values()] for x in inputs]
    a = torch.tensor(rows, dtype=torch.float64)
    b = torch.tensor([float(x) for x in got], dtype=torch.float64)
    scale = b.abs().clamp(min=1.0)
    parts = torch.linalg.lstsq(a / scale[:, None], (b / scale)[:, None]).solution[:, 0]
    parts = (2 * parts).round() / 2
    if bool((parts.abs() > 64).any()) or not bool(((a @ parts - b).abs() <= 1e-9 * scale).all()):
        return None
    return [float(x) + 0.0 for x in parts]
