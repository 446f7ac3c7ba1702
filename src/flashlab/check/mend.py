"""Which single change of the learner's own text makes it right?

`lookup` changes the right text, and knows what is missing in another one. A slip in an answer that is written in its
own way is no change of the right text: here the same engine changes the learner's. If all results are right with a
change, then what it changes is the cause, whatever else stands there; and nothing is told that has not been run.

After Singh, Gulwani and Solar-Lezama, "Automated Feedback Generation for Introductory Programming Assignments" (PLDI
2013), who look for the fewest corrections of a student's program among those that a teacher has listed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from flashlab.check.changes import Change, EndlessError, Text, Variants, _at, _put_at, _rounded_up, _slots, changes
from flashlab.check.claims import tokens
from flashlab.check.kernel_changes import HostedText, HostText, KernelText
from flashlab.check.lookup import Index, Outcome
from flashlab.check.own_changes import BEFORE, LINES, MOVED, PART, ROUNDING, WITHIN, of_grids, of_numbers, own_changes
from flashlab.check.trees import LOOPS, called, dump, is_op, names_in, nodes, plain, reads, terms_of
from flashlab.check.value_mend import nth_time, value_mended

_SECONDS = 3.0  # of one core
_PIECE, _OF_A_RIGHT_ONE = 4, 0.6  # signs of a piece, less one; what it costs less to make one of a right text
_WIDE, _CLOSER = 0.01, 2  # a tolerance, and by how much a mended answer has to be closer
_MORE = 0.7  # to look for a change that walks over less
_HUGE, _THOUSAND = 10**4, 1000
_AROUND = 8  # words, spaces and signs that are shown beside what differs
_LONGEST = 160  # characters of what is said
_SHORT, _BEGUN = 60, 12
_OFTEN, _MANY = 0.002, 4000  # what each change of a kind costs more than the one before, where there are so many
_KNOWN = 0.2  # what it costs more to find fault with a number that a right text has
_SHARED = 1.0  # what it costs more to find fault with a line that a right text has
_LONGER = 0.15  # for each word and sign that is added
AS_LIKELY = 0.3  # how much more a change may cost that is told beside another
_KINDS = {ast.Add: "term", ast.Sub: "term", ast.Mult: "factor", ast.Div: "divisor", ast.FloorDiv: "divisor"}
_WORDED = ("line-added", "names-exchanged", "never-moved", "not-rescaled", "not-divided", "rounded-all", "tf32",
           "strides-of-another", "turned-round", "walks-to", "begins-elsewhere", "counted-in-a-tile",
           "shape-of-another", "not-set-back", "base-2", MOVED)  # fmt: skip
_PLACES = (ast.Subscript, ast.Call, ast.BinOp, ast.Compare)
_BEHIND = "outside-of-the-loop"
_TWO_PLACES = {
    "lines-exchanged": "comes too early", _BEHIND: "stands in the loop, and belongs behind it",
    WITHIN: "stands before the loop, and belongs inside it",
    BEFORE: "stands in the loop, and belongs before it",
}  # fmt: skip
_BY_CHANCE = ("taken-as-fixed", "always-the-same", "always-0", "wrong-base", "in-every-block")  # or no words for it


loud = False  # in tests: what fails here is a mistake of ours, and silence would hide it


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Any text may come, and none may stop the verdict on it."""
    try:
        yield
    except Exception:
        if loud:
            raise


def own_text(fn: Callable[..., Any], make: Callable[..., Text] = Text) -> Text | None:
    """The text of a learner's function, in its own names; None of what is no `def`."""
    try:
        closed = inspect.getclosurevars(fn).nonlocals
        text = make(fn, {name: name for name in _named_in(fn.__code__)})
    except (OSError, TypeError, SyntaxError, AttributeError, AssertionError, ValueError):
        return None
    text.globals, text.foreign = {**text.globals, **closed}, True
    return text


def _named_in(code: CodeType) -> Iterator[str]:
    """The variables of a function, and of those within it."""
    yield from code.co_varnames + code.co_cellvars
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_in(inner)


def mended(
    index: Index, fn: Callable[..., Any], make: Callable[..., Text] = Text, then: Callable[..., Any] | None = None,
    walks: bool = True,
) -> tuple[str | None, float]:  # fmt: skip
    """In words, the likeliest change of this function, or of one beside it that it calls, that gives all that is right,
    on further inputs too, or one for each of several wrong results; "" where there is none, None of what is no `def`.
    And what it costs.

    then: raises CheckFailed where such a function gives what is right and is not. walks: how often a loop goes round
    may be changed.
    """
    text = own_text(fn, make)
    if text is None:
        return None, 0.0
    before = index.tol
    index.tol = before / _CLOSER if before >= _WIDE else before  # 81 calls for 80 are right to 2 %, and not mended
    try:
        return _mended(index, fn, text, then, walks)
    finally:
        index.tol = before


def _mended(
    index: Index, fn: Callable[..., Any], text: Text, then: Callable[..., Any] | None, walks: bool
) -> tuple[str | None, float]:
    now, parts = _beside(text, fn)
    got = text.steps_as(lambda run: [*index.run(run)])
    wrong = index.wrong_parts(got)
    off = [i for i in index.order if not index.same_outcome([got[i]], [index.right[i]])]
    order = [*off, *(i for i in index.order if i not in off)]
    if index.kinds:
        text.kinds = index.kinds.kinds_of(text, [tuple(map(index.copied, x)) for x in index.inputs[:3]])
    likely = _likely(index, text, got)
    text.from_zero = _walk_from_zero(index.texts)
    made = _in_order(index, text, now, parts, likely)
    made = made if walks else [x for x in made if not _walks(text, x[1])]
    right = index.run(index.texts[0].compiled(), index.more)

    is_right = functools.partial(_is_right, index, order, right, then)
    of_part: dict[int, Change] = {}
    found, other, enough = list[tuple[int, float, str]](), index.texts[0], False

    until = time.process_time() + _SECONDS
    for at, (of, change, run) in enumerate(made):
        if time.process_time() > until:
            break
        outcome = index.run(run)
        mends = [p for p in wrong if all(index.same_outcome([outcome[i]], [index.right[i]], p) for i in order)]
        if not mends or not (words := said(of, change)) or _undoes(of, change):
            continue
        further = isinstance(text, KernelText) and _at_heads(of, change)  # else a walk is the learner's own
        if len(mends) == len(wrong) and is_right(run):
            if _never_asked(of, change, is_right):
                continue
            words += which(of, change, words)
            if not further and not enough:
                price, rest = _price(change, likely), made[at + 1 :]
                other_one = _or_above(change, rest, is_right) or _or_elsewhere(of, change, rest, likely, is_right)
                apart = "; or " if len(words + other_one) < index.longest - 20 else ";\nor "
                return words + apart * bool(other_one) + other_one, price
            turns = _turns(index, text, run)
            alone = isinstance(text, HostedText) or not _of_heads(other)[1]  # there is no walk to compare with
            found.append((turns, _price(change, likely), words))
            if alone or turns <= _turns(index, other, other.compiled()):
                enough, until = True, min(until, time.process_time() + _MORE)
        of_part |= {p: change for p in mends if p not in of_part and of is text and not further}
    if enough or (found and min(found)[0] < max(found)[0]):  # what walks over more is right by accident
        return min(found)[2], min(found)[1]
    if len(wrong) > 1 and len(of_part) == len(wrong):
        with contextlib.suppress(SyntaxError):
            if is_right(text.compiled(*{id(c): c for c in of_part.values()}.values())):
                each = [f"{index.names[p]}: {said(text, change)}" for p, change in of_part.items()]
                return ("; and " if sum(map(len, each)) < index.longest - 20 else ";\nand ").join(each), 2.0
    return _mended_by_value(index, text, off, is_right, _has_nan(got)) if off else ("", 0.0)


def mended_for(fn: Callable[..., Any], passes: Callable[[Any], Any]) -> str:
    """In words, the likeliest change of a function that passes, which raises nothing then: of many right answers."""
    if (text := own_text(fn)) is None:
        return ""
    made = [*changes(text, {}), *of_numbers(text), *map(_copied, own_changes(text, (), {}, True))]
    made = [c for c in made if not (c.slug in _BY_CHANCE or _fraction(c) or _too_often_right(c))]
    variants = Variants(text, made)
    with contextlib.suppress(Exception, EndlessError):
        text.steps_as(passes)
    until = time.process_time() + _SECONDS
    for change in sorted(made, key=lambda c: _price(c, UNKNOWN)):
        if time.process_time() > until:
            break
        if (words := said(text, change)) and (run := variants.chosen(change)):
            with contextlib.suppress(Exception, EndlessError):
                passes(run)
                return words + which(text, change, words)
    return ""


def _walk_from_zero(rights: Sequence[Text]) -> bool:
    ranges = [x.args for right in rights for x in nodes(right.tree, ast.Call) if called(x) == "range"]
    return bool(ranges) and all(len(x) == 1 or ast.unparse(x[0]) == "0" for x in ranges)


def _turns(index: Index, text: Text, run: Callable[..., Any]) -> int:
    """Of the loops, on all inputs."""
    before = text.turns
    _ = [*index.run(run)]
    return text.turns - before


def _at_heads(text: Text, change: Change) -> bool:
    """Whether it changes something in the head of a loop, or in what that reads."""
    heads, _ = _of_heads(text)
    olds = [x for slot, _ in change.edits if isinstance(old := _at(slot), ast.AST) for x in (slot[0], *ast.walk(old))]
    return any(id(x) in heads for x in olds)


def _walks(text: Text, change: Change) -> bool:
    """Whether it changes how often a loop goes round, or how far."""
    heads, ends = _of_heads(text)
    return any(id(slot[0]) in heads or ends & {*reads(new)} - {*reads(_at(slot))} for slot, new in change.edits)


def _of_heads(text: Text) -> tuple[set[int], set[str]]:
    """What says how often a loop goes round, and how far a turn reaches: its head, the lines that set what that reads,
    ends of slices; and the names there.
    """
    loops = nodes(text.tree, *LOOPS)
    heads = [loop.iter if isinstance(loop, ast.For) else loop.test for loop in loops]
    names = {name for head in heads for name in reads(head)}
    lines = [x for x in nodes(text.tree, ast.Assign) if names & names_in(x.targets[0])]
    names |= {name for line in lines for name in names_in(line)} - {*text.globals}
    slices = [x for x in ast.walk(text.tree) if isinstance(x, ast.Slice) or plain(getattr(x, "func", x)) == "slice"]
    tests = [x.test for x in nodes(text.tree, ast.If) if any(line in lines for line in (*x.body, *x.orelse))]
    parts = [*heads, *lines, *slices, *tests]
    exprs = (x for part in parts for x in nodes(part, ast.expr, ast.slice))  # a Load is shared
    return {*map(id, exprs)} | {*map(id, loops)}, names


def _mended_by_value(
    index: Index, text: Text, off: Sequence[int], is_right: Callable[..., bool], nan: bool
) -> tuple[str, float]:
    """nan: it is among the results; another walk may step round it, and its first line says more than a number."""
    say = functools.partial(_said_of_value, nan and isinstance(text, KernelText))
    value, price = value_mended(index, text, off, is_right, say)
    return (value, price) if price <= 1.0 or not nan else ("", 0.0)


def _said_of_value(no_heads: bool, text: Text, change: Change) -> str | None:
    if _undoes(text, change) or (text.kinds and _too_often_right(change)) or (no_heads and _at_heads(text, change)):
        return None
    return said(text, change)


def _has_nan(got: Outcome) -> bool:
    """Whether NaN is among the results."""
    values = (x for one in got if not isinstance(one, str) for x in one)
    return any(bool(torch.as_tensor(x).isnan().any()) for x in values if isinstance(x, (float, torch.Tensor)))


def _in_order(
    index: Index, text: Text, now: dict[str, Any], parts: dict[str, Text], likely: _Likely
) -> list[tuple[Text, Change, Callable[..., Any]]]:
    """The changes of a text, and of those beside it, with the function that each makes; the likeliest first."""
    given = [] if isinstance(text, HostedText) else text.params  # else a function of the inputs launches it
    values = {name: [x[i] for x in index.inputs] for i, name in enumerate(given)}
    made, called = _runs(index, text, values, index.kinds), text.compiled()
    for name, part in parts.items():
        made += [(part, change, functools.partial(_with, now, name, other, called))
                 for _, change, other in _runs(index, part, {}, index.kinds)]  # fmt: skip
    if isinstance(text, HostedText):
        around = HostText(text)
        beside = [x for x in (*changes(around, {}), *of_grids(around)) if not _of_a_tile(x)]
        variants = Variants(around, beside)
        made += [(around, c, run) for c in beside if (run := variants.chosen(c)) is not None]
        return in_turn((_price(x[1], likely), x[1].slug, x) for x in made)
    moved = (_BEHIND, WITHIN, BEFORE, MOVED)  # one line
    several = lambda c: len(c.edits) > 1 and c.slug not in moved  # noqa: E731
    return sorted(made, key=lambda x: (several(x[1]), _price(x[1], likely)))


def _of_a_tile(change: Change) -> bool:
    """Whether it is another size of a tile, in the function around a kernel: any one is right; or fewer digits of a
    result, which agree by rounding.
    """
    olds = [getattr(_at(slot), "value", 0) for slot, _ in change.edits]
    if any(isinstance(old := _at(slot), ast.Call) and "dtype" in plain(old) and "dtype" not in plain(new)
           for slot, new in change.edits):  # fmt: skip
        return True
    return change.slug == "wrong-number" and all(type(x) is int and x >= 16 and not x & (x - 1) for x in olds)


class _Likely(NamedTuple):
    """What stands in lines that a right text has too; tensors that are read or written out of bounds, and what is in
    lines with these; parameters that nobody reads; pieces of a right text, and its numbers.
    """

    shared: set[int]
    stray: set[str]
    strays: set[int]
    unread: set[str]
    pieces: set[str]
    numbers: set[str]

    def made(self, change: Change) -> int:
        """1 where a piece of a right text comes of it, -1 where one goes."""
        slot, new = change.edits[0]
        if len(change.edits) > 1 or not isinstance(slot[0], ast.expr) or not isinstance(new, ast.expr):
            return 0
        before, old = _canon(slot[0]), _at(slot)
        _put_at(slot, new)
        try:
            return (not self.pieces.isdisjoint(map(_canon, (slot[0], new)))) - (before in self.pieces)
        finally:
            _put_at(slot, old)


UNKNOWN = _Likely(set(), set(), set(), set(), set(), set())  # where no right text is known


def _likely(index: Index, text: Text, got: Outcome) -> _Likely:
    pieces = {_canon(x) for right in index.texts for x in ast.walk(right.tree) if isinstance(x, ast.expr)}
    stray = {m[1] for x in got if isinstance(x, str) and (m := re.search(r"out of bounds: .* of (\w+)", x))}
    unread = {*text.params} - {*reads(text.tree)}
    long = {x for x in pieces if x.count(" ") >= _PIECE}
    numbers = {x for x in pieces if x[:1].isdigit() and " " not in x}
    return _Likely(_lines_of_both(text, index.texts), stray, _at_strays(text, stray), unread, long, numbers)


def _canon(node: ast.AST) -> str:
    """An expression's words and signs, in any order."""
    return " ".join(sorted(tokens(ast.unparse(node)).split()))


def _price(change: Change, likely: _Likely) -> float:
    """The lower, the likelier."""
    longer = max(_length(new) - _length(old) for old, new in map(_both, change.edits))
    longer *= not change.slug.endswith("-exchanged")
    known = all(id(holder) in likely.shared for (holder, _, _), _ in change.edits)
    strays = any(id(x) in likely.strays or getattr(new, "id", "").lower() in likely.stray
                 for (x, _, _), new in change.edits)  # fmt: skip
    unread = any(likely.unread & {*reads(new)} for _, new in change.edits if isinstance(new, ast.AST))
    kept = any(is_op(old, ast.FloorDiv) and (new is old.left or isinstance(getattr(new, "op", None), ast.Mult))
               for old, new in map(_both, change.edits))  # fmt: skip  # more likely its being rounded down is wrong
    as_long = change.slug == "wrong-number" or _loosened(change)  # nothing comes or goes
    there = change.slug in ("mask", "shape-of-another", "not-divided")
    whole = there or any(isinstance(new, ast.If) for _, new in change.edits)  # it is there already
    price = change.cost - 0.5 * as_long + _SHARED * known + _LONGER * max(0, longer * (not whole)) + 1.5 * kept
    lost = (getattr(new, "operand", 0) is getattr(old, "right", 1) for old, new in map(_both, change.edits))
    price += any(lost)  # a - b becomes -b
    if change.slug == "wrong-number":  # a number of a right text is less likely to be what is wrong
        price += _KNOWN * (plain(_at(change.edits[0][0])) in likely.numbers)
    return price - _SHARED * strays - _SHARED * unread - _OF_A_RIGHT_ONE * likely.made(change)


def in_turn(priced: Iterable[tuple[float, str, Any]]) -> list[Any]:
    """The cheapest first, of (price, kind, what); of a long text's changes, where a kind has hundreds, each costs more
    than the one before, or nothing else would be tried.
    """
    nth: Counter[str] = Counter()
    priced = sorted(priced, key=lambda x: x[0])
    found = []
    for price, kind, one in priced:
        nth[kind] += 1
        found.append((price + _OFTEN * nth[kind] * (len(priced) > _MANY), one))
    return [one for _, one in sorted(found, key=lambda x: x[0])]


def _is_right(
    index: Index, order: Sequence[int], right: Any, then: Callable[..., Any] | None, run: Callable[..., Any]
) -> bool:
    """Whether a function gives what is right, on further inputs too, and passes what is asked beside that."""
    outcome = index.run(run)
    if not all(index.same_outcome([outcome[i]], [index.right[i]]) for i in order):
        return False
    if not index.same_outcome(index.run(run, index.more), right):
        return False
    with contextlib.suppress(Exception):
        if then is not None:
            then(run)
        return True
    return False


def _at_strays(text: Text, stray: set[str]) -> set[int]:
    """What stands in lines that name one of these tensors."""
    lines = [x for x in nodes(text.tree, *LINES) if stray & {name.removesuffix("_ptr").lower() for name in reads(x)}]
    return {id(x) for line in lines for x in ast.walk(line)}


def _lines_of_both(text: Text, right: Sequence[Text]) -> set[int]:
    """What stands in lines that a right text has too: it is less likely to be what is wrong."""
    known = {ast.unparse(line) for other in right for line in nodes(other.tree, *LINES)}
    lines = [line for line in nodes(text.tree, *LINES) if ast.unparse(line) in known]
    return {id(x) for line in lines for x in ast.walk(line)}


def _beside(text: Text, fn: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Text]]:
    """The functions beside this one that it may call, by name, as they are called now; and their texts."""
    now: dict[str, Any] = {x.__name__: x for x in text.globals.values() if isinstance(x, FunctionType) and x is not fn
           and x.__code__.co_filename == fn.__code__.co_filename
           and x.__name__ in {*text.often} - {*text.params, *text.locals}}  # fmt: skip
    parts = {name: part for name, helper in now.items() if (part := own_text(helper))}
    for part in (text, *parts.values()):
        part.globals |= {name: functools.partial(_called, now, name) for name in now}
    now |= {name: part.compiled() for name, part in parts.items()}  # their loops end
    return now, parts


def _undoes(text: Text, change: Change) -> bool:
    """Whether a change takes out what the text is about: all of a tensor, or all before its end, for the part that a
    name stands for, or every use of a parameter."""
    loops = nodes(text.tree, ast.For)
    parts = {part: whole for loop in loops for part, whole in _parts(loop)}
    turns = {name for loop in loops for name in names_in(loop.target)}
    begins: list[Any] = [x.iter.args[0] for x in loops if isinstance(x.iter, ast.Call) and len(x.iter.args) > 1]
    begins += [value for x in begins if isinstance(x, ast.Name) for value in text.assigned.get(x.id, ()) if value]
    of_begins = {id(x) for begin in begins for x in ast.walk(begin)}
    for old, new in map(_both, change.edits):
        known = isinstance(old, ast.Constant)
        if id(old) in of_begins and not known and (plain(new) == "0") != text.from_zero:
            return True  # all of the walk, where a part is enough; or what is 0 there by chance
        tests = [getattr(x, "test", x) for x in (old, new)]
        if isinstance(tests[0], ast.Compare) and isinstance(tests[1], ast.Constant):
            return True  # a condition that then always holds, or never
        if isinstance(old, ast.Name) and isinstance(new, ast.Name) and new.id in text.params:
            if old.id in turns and any(isinstance(kind, tuple) for kind in text.kinds.get(new.id, ())):
                return True
            of = text.assigned.get(old.id, ())
            part = any(isinstance(x, ast.Subscript) and getattr(x.value, "id", "") == new.id for x in of if x)
            if part or new.id in parts.get(old.id, ()):
                return True
        cut, other = (nodes(x, ast.Slice) for x in (old, new))
        whole = isinstance(old, ast.Subscript) and dump(old.value) == dump(new)
        for x, y in zip(cut, [ast.Slice()] * len(cut) if whole else other, strict=False):
            if loops and (x.lower or x.upper) and not (y.lower or y.upper):
                return True
            longer = plain(y.lower) in ("", "0") and dump(x.upper) == dump(y.upper)
            if x.lower and not isinstance(x.lower, ast.Constant) and longer:
                return True
    before = {*text.params} & {*reads(text.tree)}
    with text.changed(change):
        return not before <= {*reads(text.tree)}


def _parts(loop: ast.For) -> Iterator[tuple[str, set[str]]]:
    """The names that a loop sets, each with what it is a part of: `for s, v in zip(scores.split(n), V.split(n))`."""
    targets, values = [loop.target], [loop.iter]
    if isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
        targets, values = loop.target.elts, loop.iter.args
    for target, value in zip(targets, values, strict=False):
        yield getattr(target, "id", ""), {*reads(value)}


def _length(x: Any) -> int:
    return len(tokens(ast.unparse(x) if isinstance(x, ast.AST) else "").split())


def _remainder(change: Change) -> bool:
    """Whether it takes a remainder: often that is 0, by accident."""
    olds, news = zip(*map(_both, change.edits), strict=True)
    return any(is_op(n, ast.Mod) for n in news) and not any(is_op(o, ast.Mod) for o in olds)


def _called(now: dict[str, Any], name: str, *given: Any, **named: Any) -> Any:
    return now[name](*given, **named)


def _with(now: dict[str, Any], name: str, other: Any, run: Callable[..., Any], *given: Any) -> Any:
    """What `run` gives with another function of this name."""
    before, now[name] = now[name], other
    try:
        return run(*given)
    finally:
        now[name] = before


def _hides(text: Text, change: Change) -> bool:
    """Whether another `other` hides what comes of a masked element, or another tile stands in for a maximum's."""
    (holder, field, _), new = change.edits[0]
    other = isinstance(holder, ast.keyword) and holder.arg == "other" and isinstance(new, (ast.Constant, ast.UnaryOp))
    if other:
        return plain(new) not in ("0", "0.0", "float('inf')", "float('-inf')")
    of = text.meant.get(new.id) if isinstance(new, ast.Name) else None
    return called(holder) in ("max", "maximum") and isinstance(of, ast.Call) and plain(of.func).endswith("load")


def _too_often_right(change: Change) -> bool:
    """Of tensors: a number, or inf, where there is -inf, and a factor of 1000: what is large enough does not show."""
    old, new = (ast.unparse(x) if isinstance(x, ast.AST) else "" for x in _both(change.edits[0]))
    finite = change.slug == "finite-number" and any(isinstance(new, ast.Constant) for _, new in change.edits)
    values = [getattr(x, "value", 0) for x in _both(change.edits[0])]
    finite |= all(isinstance(x, float) and x >= _HUGE for x in values)
    finite |= bool(re.match(r"[\w.]*full\(.*inf", old)) and "inf" not in new  # a maximum that starts elsewhere
    return finite or ("inf" in old and old.lstrip("-") == new) or "1000" in new or "1024" in new


def _runs(
    index: Index, text: Text, values: dict[str, Any], kinds: Any
) -> list[tuple[Text, Change, Callable[..., Any]]]:
    further = getattr(kinds, "further", lambda _: ()) if kinds else of_numbers
    alone = not isinstance(text, HostedText)
    made = [*changes(text, values, kinds), *further(text), *map(_copied, own_changes(text, index.texts, values, alone))]
    foreign = {*text.globals} - {*text.locals}
    made = [c for c in made if not any(isinstance(x.ctx, ast.Store) and x.id in foreign
            for _, new in c.edits if isinstance(new, ast.stmt) for x in nodes(new, ast.Name))]  # fmt: skip
    made = [c for c in made if c.edits and not (text.whole and _fraction(c)) and not _negligible(c, values)]
    made = [c for c in made if not _squares(c)]
    if not any(_has(right.tree, lambda x: x >= _THOUSAND) for right in index.texts):  # there are no units
        made = [c for c in made if not _has(c.edits[0][1], lambda x: x == _THOUSAND)]
    divides = any(nodes(right.tree, ast.Mod) for right in index.texts)
    made = [c for c in made if c.slug not in (*_BY_CHANCE, *index.without) and not _digits(c)
            and (divides or not _remainder(c))]  # fmt: skip
    if kinds:
        made = [c for c in made if not (c.slug == "twice" or _without_limit(c) or _too_often_right(c))]
        made = [c for c in made if not _hides(text, c)]
    variants = Variants(text, made)
    return [(text, c, run) for c in made if (run := variants.chosen(c)) is not None]


def _copied(change: Change) -> Change:
    """The same, where a part of the text takes the place of something in it: a tree that has itself as a part has no
    end.
    """
    if not any(holder is x for (holder, _, _), new in change.edits for x in ast.walk(new)):
        return change
    edits = tuple((slot, pickle.loads(pickle.dumps(new))) for slot, new in change.edits)
    return dataclasses.replace(change, edits=edits)


def _fraction(change: Change) -> bool:
    """Whether whole numbers are no longer rounded, and nothing around does it: parts of one may pass for it."""
    (holder, _, _), _ = change.edits[0]
    old, new = _both(change.edits[0])
    rounded = called(holder) in ROUNDING
    ops = [getattr(x, "op", None) for x in (old, new)]
    return isinstance(ops[0], ast.FloorDiv) and isinstance(ops[1], ast.Div) and not rounded


def _squares(change: Change) -> bool:
    """Whether a factor or a term comes again that is more than a name or a number: that is right by accident."""
    again = getattr(change.edits[0][1], "right", None)
    return change.slug == "twice" and not isinstance(again, (ast.Name, ast.Constant))


def _never_asked(text: Text, change: Change, is_right: Callable[..., bool]) -> bool:
    """Whether a condition that it changes need not be asked then: yes or no is as right, and right by accident."""
    slot, new = change.edits[0]
    asked = [x for x in nodes(text.tree, ast.Compare) if any(y is slot[0] for y in ast.walk(x))]
    if isinstance(new, ast.Compare):
        asked.append(_at(slot))
    for place in (s for s, node in _slots(text.tree) if node in asked and not isinstance(s[0], ast.While)):
        for answer in (True, False):
            with contextlib.suppress(SyntaxError):
                if is_right(text.compiled(Change("", "", 0.0, ((place, ast.Constant(answer)),)))):
                    return True
    return False


def _has(tree: Any, wanted: Callable[[float], bool]) -> bool:
    """Whether there is such a number in it."""
    values = (getattr(x, "value", 0) for x in ast.walk(tree)) if isinstance(tree, ast.AST) else ()
    return any(isinstance(x, (int, float)) and wanted(x) for x in values)


def _negligible(change: Change, values: dict[str, Any]) -> bool:
    """Whether 1 is added to what is large on all inputs: it is right where a `>` should be a `>=`."""
    old, new = _both(change.edits[0])
    terms = terms_of(new) if isinstance(new, ast.BinOp) else []
    if not (terms and terms[0] is old and plain(terms[-1]).lstrip("-") == "1" and {*reads(old)} <= {*values}):
        return False
    code = compile(ast.fix_missing_locations(ast.Expression(pickle.loads(pickle.dumps(old)))), "", "eval")
    with contextlib.suppress(Exception):
        return all(
            abs(eval(code, {}, dict(zip(values, x, strict=True)))) > _HUGE for x in zip(*values.values(), strict=True)
        )
    return False


def _factor(change: Change) -> float | None:
    """By which number a product is multiplied that is changed; None where it is no such change, or of a remainder."""
    (holder, *_), (old, new) = change.edits[0][0], _both(change.edits[0])
    remainder = isinstance(getattr(holder, "op", None), ast.Mod)
    if remainder or len(change.edits) > 1 or not (isinstance(old, ast.expr) and isinstance(new, ast.expr)):
        return None
    for whole, rest, more in ((new, old, True), (old, new, False)):
        if isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Mult) and rest in (whole.left, whole.right):
            by = getattr(whole.left if rest is whole.right else whole.right, "value", None)
            return None if not isinstance(by, (int, float)) or not by else by if more else 1 / by
    one, other = (getattr(x, "value", None) for x in (old, new))
    both = isinstance(one, (int, float)) and isinstance(other, (int, float)) and one and other
    return other / one if both else None  # type: ignore[operator]


def _or_above(change: Change, rest: Sequence[tuple[Text, Change, Any]], is_right: Callable[..., bool]) -> str:
    """Of a fraction either side may have the factor that is wrong: the other one, too."""
    factor = _factor(change)
    others = (x for x in rest if factor and (by := _factor(x[1])) and math.isclose(by * factor, 1.0))
    for of, other, run in itertools.islice(others, 12):
        if (words := said(of, other)) and is_right(run):
            return words
    return ""


def _or_elsewhere(
    of: Text, change: Change, rest: Sequence[tuple[Text, Change, Any]], likely: _Likely, is_right: Callable[..., bool]
) -> str:
    """A change of another line that is as likely, and right too: that one is tried first does not make it the cause."""
    most, until = _price(change, likely) + AS_LIKELY, time.process_time() + _MORE
    for other_of, other, run in rest:
        if time.process_time() > until or _price(other, likely) > most:
            break
        heads = isinstance(other_of, KernelText) and _at_heads(other_of, other)
        if heads or not elsewhere(of, change, other_of, other):
            continue
        words = "" if _undoes(other_of, other) else said(other_of, other)
        if words and is_right(run) and not _never_asked(other_of, other, is_right):
            return words + which(other_of, other, words)
    return ""


def elsewhere(of: Text, change: Change, other_of: Text, other: Change) -> bool:
    """Whether two changes are of different lines, and neither is of a piece of the other's."""
    lines, olds = list[ast.AST | None](), [_at(x.edits[0][0]) for x in (change, other)]
    for text, one in ((of, change), (other_of, other)):
        holder = one.edits[0][0][0]
        around = [x for x in nodes(text.tree, ast.stmt) if any(y is holder for y in ast.walk(x))]
        lines.append(around[-1] if around else None)
    nested = any(x is b for a, b in itertools.permutations(olds) if isinstance(a, ast.AST) for x in ast.walk(a))
    return lines[0] is not lines[1] and not nested


def _loosened(change: Change) -> bool:
    """Whether a comparison counts equal numbers too, or no longer."""
    ops = [{type(x.ops[0]) for x in pair if isinstance(x, ast.Compare)} for pair in map(_both, change.edits)]
    return all(x in ({ast.Lt, ast.LtE}, {ast.Gt, ast.GtE}) for x in ops)


def _digits(change: Change) -> bool:
    """Whether a number is rounded to more digits: it should not be."""
    (holder, _, at), _ = change.edits[0]
    return isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "round" and bool(at)


def _without_limit(change: Change) -> bool:
    """Whether a maximum or the like goes, of tensors, or is one for all rows: any reference gives as good a sum, as
    long as none overflows.
    """
    old, new = _both(change.edits[0])
    calls = isinstance(old, ast.Call) and isinstance(new, ast.Call) and plain(old.func).endswith("max")
    if calls and plain(old.func) == plain(new.func) and len(new.args + new.keywords) < len(old.args + old.keywords):
        return True
    return isinstance(old, ast.Call) and new in old.args and getattr(old.func, "attr", "")[:3] in ("max", "min", "whe")


def said(text: Text, change: Change) -> str:
    """What stands there, and what belongs there; "" where that is too long."""
    if change.said.startswith("{order}"):
        alone = sum(isinstance(x, ast.Return) for x in ast.walk(text.tree)) < 2  # then the index says which
        return "" if alone else f"the results are exchanged, in `{text.plain(change.edits[0][0][0])}`"[:_LONGEST]
    if change.slug in _WORDED:
        return change.said
    pieces = [_pieces(text, edit) for edit in change.edits]
    if change.slug in _TWO_PLACES:
        words, then = f"the line `{pieces[0][0]}` {_TWO_PLACES[change.slug]}", f", before `{pieces[0][1]}`"
        return words + then * (change.slug == "lines-exchanged" and len(words + then) <= _LONGEST)
    old, new = pieces[0]
    before, after = _both(change.edits[0])
    up = _rounded_up(after) if is_op(before, ast.FloorDiv) else None
    if up and [*map(dump, up)] == [dump(before.left), dump(before.right)]:
        return f"`{old}` is rounded down: it should be rounded up"
    holder, by = change.edits[0][0][0], ast.unparse(after) if isinstance(after, ast.AST) else ""
    once = text.whole and len(pieces) == 1 and by in (f"{text.plain(before)} + 1", f"{text.plain(before)} - 1")
    if once and isinstance(holder, ast.BinOp) and isinstance(holder.op, ast.Mult):
        other = holder.left if before is holder.right else holder.right
        how = "missing beside" if by.endswith("+ 1") else "too many in"
        if isinstance(before, ast.Name) and isinstance(other, ast.Name):
            return f"one `{text.plain(other)}` is {how} `{text.plain(holder)}`"
    if change.slug == PART and len({*pieces}) == 2:
        return f"`{old}` stands where `{new}` belongs, and `{pieces[1][0]}` where `{pieces[1][1]}` does"
    if len(set(pieces)) > 1 or old == new:
        return ""
    where = "" if len(pieces) == 1 else ", both times" if len(pieces) == 2 else ", everywhere"
    part = _part(text, change.edits[0])
    gone = new in ("pass", "")
    words = f"the line `{old}` is one too many" if gone else part or f"`{old}` stands where `{new}` belongs"
    spot = text.plain(before)
    again = part and text.unchanged.count(spot) > 1 and spot.isprintable()
    where = where or (_place(text, change, old) if not part or old.isidentifier() else
                      _place(text, change, spot) if again else "")  # fmt: skip
    if len(words) > _LONGEST and not gone:
        shorter = _where_they_differ(old, new), _shortened(text, *_both(change.edits[0]))
        words, where = min(("`{}` stands where `{}` belongs".format(*x) for x in shorter), key=len), ""
    return "" if len(words) > _LONGEST else words + where * (len(words + where) <= _LONGEST)


def _shortened(text: Text, old: Any, new: Any) -> tuple[str, str]:
    """Both pieces, with the beginning alone of the long parts that they have in common."""
    here, there = ({dump(x) for x in ast.walk(y) if isinstance(x, ast.expr)} for y in (old, new))

    class Short(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            said = text.plain(node) if dump(node) in here & there else ""
            return ast.Name(f"{said[:_BEGUN]}…") if len(said) > 2 * _BEGUN else self.generic_visit(node)

    one, other = (text.plain(Short().visit(pickle.loads(pickle.dumps(x)))).splitlines() for x in (old, new))
    return (one or [""])[0], (other or [""])[0]


def _where_they_differ(old: str, new: str) -> tuple[str, str]:
    """The words and signs of two long pieces around what differs in them."""
    a, b = (re.findall(r"\w+|\s+|[^\w\s]+", x) for x in (old, new))
    same = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(a, b, strict=False)))
    behind = sum(
        1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(a[same:][::-1], b[same:][::-1], strict=False))
    )
    first, last = max(0, same - _AROUND), max(0, behind - _AROUND)
    ends = "… " * (first > 0), " …" * (last > 0)
    one, other = ("".join(x[first : len(x) - last]).strip() for x in (a, b))
    return ends[0] + one + ends[1], ends[0] + other + ends[1]


def _part(text: Text, edit: Any) -> str:
    """Of a term, a factor, a divisor or a condition that goes or comes: which."""
    old, new = _both(edit)
    if isinstance(new, ast.IfExp) and (arm := next((x for x in (new.body, new.orelse) if dump(x) == dump(old)), None)):
        test, other = text.plain(new.test), text.plain(new.orelse if arm is new.body else new.body)
        return f"`{test}` is not asked: where it {'fails' if arm is new.body else 'holds'}, it is `{other}`"
    for whole, rest, what in ((old, new, "one too many, in"), (new, old, "missing in")):
        if isinstance(whole, ast.Call) and getattr(whole.func, "value", None) is rest:
            alone = ast.Call(ast.Name(whole.func.attr), whole.args, whole.keywords)  # type: ignore[attr-defined]
            where = what.replace(", in", " behind").replace(" in", " behind")
            return f"`.{text.plain(alone)}` is {where} `{text.plain(whole.func.value)[:_SHORT]}`"  # type: ignore[attr-defined]
        if not isinstance(whole, ast.BinOp) or type(whole.op) not in _KINDS:
            continue
        if rest is whole.left or (rest is whole.right and isinstance(whole.op, (ast.Add, ast.Mult))):
            part, around = (text.plain(x) for x in (whole.right if rest is whole.left else whole.left, old))
            sign = "-" * isinstance(whole.op, ast.Sub) * (rest is whole.left)
            around = around if len(around) < _SHORT else f"{around[:_SHORT]} ..."
            return f"the {_KINDS[type(whole.op)]} `{sign}{part}` is {what} `{around}`"
    return ""


def _both(edit: Any) -> tuple[Any, Any]:
    return _at(edit[0]), edit[1]


def _pairs(x: Any, y: Any) -> list[tuple[Any, Any]]:
    both = isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
    return [*zip(x, y, strict=True)] if both else [(x, y)]


def _pieces(text: Text, edit: Any) -> tuple[str, str]:
    (holder, field, _), _ = edit
    old, new = _both(edit)
    if field == "slice" and isinstance(old, ast.Tuple):
        old, new = holder, ast.Subscript(holder.value, new, ast.Load())
    while type(old) is type(new) and not isinstance(old, (ast.stmt, ast.UnaryOp)):  # the smallest part that differs
        fields = [(getattr(old, x), getattr(new, x)) for x in old._fields]
        pairs = [pair for x, y in fields for pair in _pairs(x, y) if dump(pair[0]) != dump(pair[1])]
        if len(pairs) != 1 or not all(isinstance(x, ast.expr) and not isinstance(x, ast.Tuple) for x in pairs[0]):
            break
        old, new = pairs[0]
    ends = "" if isinstance(old, ast.Slice) else ":"
    first, second = ((text.plain(x).splitlines() or [""])[0].rstrip(ends) for x in (old, new))
    return first, second


def which(text: Text, change: Change, words: str) -> str:
    """Of a piece that stands in several alike, which one of these."""
    if len(change.edits) > 1 or not (place := re.search(r", in `([^`]+)`$", words)):
        return ""

    def in_order(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for child in ast.iter_child_nodes(node):
            yield from in_order(child)

    holder = change.edits[0][0][0]
    alike = [any(x is holder for x in ast.walk(n)) for n in in_order(text.tree) if text.plain(n) == place[1]]
    return f", the {nth_time(alike.index(True) + 1).split()[1]} of {len(alike)}" if sum(alike) == 1 < len(alike) else ""


def _place(text: Text, change: Change, old: str) -> str:
    """Where a piece stands that is there more than once."""
    if text.unchanged.count(old) < 2 and not old.isdigit():
        return ""
    holder = change.edits[0][0][0]
    line: ast.AST | None = holder if isinstance(holder, (ast.stmt, ast.BinOp, ast.Call, ast.Compare)) else None
    around = [x for x in nodes(text.tree, *_PLACES, *LINES) if holder in ast.walk(x)]
    if line is None:  # the least that has it
        line = min(around, key=_length, default=None)
    whole = (text.plain(line).splitlines() or [""])[0].rstrip(":") if line else ""
    if text.unchanged.count(whole) > 1:  # the least that is there once
        wholes = [text.plain(x) for x in sorted(around, key=_length)]
        once = (x for x in wholes if whole in x and text.unchanged.count(x) < 2 and "\n" not in x)
        whole = next((x for x in once if len(x) <= _LONGEST), whole)
    return f", in `{whole}`" if whole and len(whole) <= _LONGEST else ""
