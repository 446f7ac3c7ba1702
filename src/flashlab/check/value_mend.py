"""Which value of the learner's is wrong, and what belongs there?

Where no change of a learner's text makes it right (`mend`), values may. A right answer is run, and what each of its
expressions gives is kept, turn by turn. In the learner's an expression gets these values in the place of its own. If
all results are right with them, then it is there that it goes wrong, and all that comes of it is right. What the right
expression reads has the same values under some name of the learner's, mostly: then it can be said in these names, and
is run once more.

After Chandra, Torlak, Barman and Bodik, "Angelic Debugging" (ICSE 2011), where a value is sought that lets all tests
pass; here only those of a right answer are tried.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flashlab.check.changes import Change, Slot, Text
from flashlab.check.claims import tokens
from flashlab.check.lookup import Index

_SEEN = (ast.BinOp, ast.Call, ast.Compare, ast.Subscript, ast.UnaryOp, ast.IfExp, ast.Attribute, ast.BoolOp, ast.Name)
_MODULES = ("tl", "torch", "math", "np")
_SECONDS = 1.5
_FEW = 3  # so many values that will do say which one belongs there
_DEEP = 6  # definitions within definitions
_LONG, _SHORT = 110, 90  # characters of an expression that is told; of numbers, and the input
_NEAR, _FAR = 30, 50  # characters more than those of what stands there twice
_LESS_SURE = 1.6  # what it costs to say a piece of the right text in the learner's names
_ALIKE = 3  # words and signs that come, of a result
_ROOM = 10**7  # numbers of all spots on one input
_SOME, _ROUNDED = 50, 2e-3  # numbers of a result; what rounding it to 16 bits may change
_HOOK = "_value"
IN_NUMBERS = ", or what it reads, is wrong:"


@dataclass(frozen=True)
class Spot:
    """An expression of a text, and the name that is set to it, if there is one. line: they come in this order. last: it
    is a result."""

    slot: Slot
    node: ast.expr
    target: str
    line: int
    last: bool


class Values:
    """What a spot gives, one after the other. shapes: how many, where; the same for what may stand there instead."""

    def __init__(self, each: Sequence[Any], shapes: Any, flat: np.ndarray):
        self.each, self.shapes, self.flat = each, shapes, flat

    def alike(self, other: Values, tol: float = 1e-4) -> bool:
        if self.shapes != other.shapes:
            return False
        return bool(np.allclose(self.flat, other.flat, rtol=tol, atol=1e-3 * tol, equal_nan=True))

    @property
    def always(self) -> bool:
        """Whether it is a flag that is always set, or never: that is right by chance too often."""
        return len(self.flat) > 1 and bool((self.flat == 0).all() or (self.flat == 1).all())

    def has(self, result: Values) -> bool:
        """Whether the result is among what it gives: a sum's last value is."""
        some = result.flat[np.isfinite(result.flat)][:_SOME]
        if not (set(some) - {0.0, 1.0}):  # flags, which may be those of anything
            return self.alike(result, _ROUNDED)
        return bool(np.isclose(some[:, None], self.flat, rtol=_ROUNDED, atol=1e-6).any(1).all())


class Watched:
    """A text whose spots are watched. of_first: what they give on the first input that was looked at."""

    text: Text
    spots: Sequence[Spot]

    def __init__(self) -> None:
        self.known: dict[int, dict[int, Values]] = {}

    def on(self, i: int) -> dict[int, Values]:
        """What each spot gives on an input; nothing of those that are not asked."""
        if i not in self.known:
            self.known[i] = self.noted(i)
        return self.known[i]

    @property
    def of_first(self) -> dict[int, Values]:
        return next(iter(self.known.values()))

    def noted(self, i: int) -> dict[int, Values]:
        raise NotImplementedError

    def after(self, at: int, right: Watched, by: int) -> dict[int, Values]:
        """`of_first`, where it can be told with what another spot gives in the place of one."""
        return self.of_first

    def fits(self, mine: Values, instead: Values) -> bool:
        """Whether a spot that gives the one may give the other."""
        raise NotImplementedError

    def does(self, at: int, right: Watched, by: int, moved: bool = False) -> bool:
        """Whether all results are right where one spot gives what another one of the right text does; moved: or all of
        these values a little too large."""
        raise NotImplementedError

    def is_right(self, change: Change) -> bool:
        """Whether all is right with a change of the text."""
        raise NotImplementedError

    def told(self, mine: Values, right: Values) -> str:
        """Where they differ most, the first time that they do, in words."""
        raise NotImplementedError

    def foreign(self, name: str, right: Watched) -> str:
        """What a name of the right text that is neither local nor a parameter is called in this one."""
        return name


@dataclass(frozen=True)
class _Found:
    """Values of a right answer's spot that make all right in the place of a learner's spot."""

    at: int
    by: int
    right: Watched
    sure: bool  # all that it reads is right
    last: bool  # it is a result: what it should be is what the exercise asks for
    part: bool  # what the learner has there is right, and only a part of what belongs there


def found_in(
    mine: Watched, rights: Iterable[Watched], i: int, late: Callable[[], bool], say: Callable[[Any, Change], str | None]
) -> tuple[str, float]:
    """(which expression of a text is wrong, and what belongs there, in words; what that costs, 9 if it is a result);
    "" where no value is found. i: an input on which it is wrong. late: whether it is time to end. say: what is said of
    a change, None of one that is no repair.
    """
    found, got = list[_Found](), mine.on(i)
    for right in rights:
        wanted = right.on(i)
        ends = [wanted[k] for k, x in enumerate(right.spots) if k in wanted and x.last]
        usual = _distinct(wanted)
        known = {at for at, values in got.items() if any(values.alike(wanted[k]) for k in usual)}
        lines = [x.line for x in mine.spots]
        within = {at: _around(got[at], right, wanted) for at in known if mine.spots[at].target}  # a part is forgotten
        for at in sorted(
            {*got} - known | {at for at, x in within.items() if x},
            key=lambda k: (lines[k], _length(mine.spots[k].node), k),
        ):
            node, here = mine.spots[at].node, []
            if found and lines[at] > lines[found[0].at]:
                break  # what comes of it
            if isinstance(node, ast.Name) or any(_within(mine.spots[x.at].node, node) for x in found):
                continue
            sure = all(_is_known(mine, known, node, x) for x in ast.walk(node) if isinstance(x, ast.Name))
            fitting = [k for k in within.get(at, usual) if mine.fits(got[at], wanted[k]) and not (
                       wanted[k].always and isinstance(right.spots[k].node, (ast.Compare, ast.BoolOp)))]  # fmt: skip
            for by in sorted(fitting, key=lambda k: -_often(got[at], wanted[k])):
                if late():
                    return _said(mine, found, say)
                last = any(wanted[by].has(x) for x in ends)
                if not ((sure or not last) and mine.does(at, right, by)):
                    continue
                if at in known or not mine.does(at, right, by, moved=True):  # any higher maximum is as right
                    here.append(_Found(at, by, right, sure, last, at in known))
            found += here * (len(here) <= _FEW)
    return _said(mine, found, say)


def _around(mine: Values, right: Watched, wanted: dict[int, Values]) -> list[int]:
    """The spots of the right text of which this is a part."""
    alike = [right.spots[k].node for k in wanted if wanted[k].alike(mine)]
    whole = (k for k in wanted if any(x is not right.spots[k].node and _within(x, right.spots[k].node) for x in alike))
    return [k for k in whole if not wanted[k].alike(mine)]


def _often(mine: Values, other: Values) -> int:
    """How many of the values are those of the other."""
    return int(np.isclose(mine.flat, other.flat, equal_nan=True).sum()) if mine.flat.shape == other.flat.shape else 0


def _is_known(mine: Watched, known: set[int], node: ast.expr, name: ast.Name) -> bool:
    """Whether a right answer has this value too, or what an expression of the node takes of it."""
    if name.id not in {*mine.text.params, *mine.text.locals}:
        return True
    around = (ast.Attribute, ast.Subscript, ast.Name)
    parts = {k for k, x in enumerate(mine.spots) if x.target == name.id or (isinstance(x.node, around) and (
             x.node is not node and _within(name, x.node) and _within(x.node, node)))}  # fmt: skip
    return bool(parts & known)


def _said(mine: Watched, found: Sequence[_Found], say: Callable[[Any, Change], str | None]) -> tuple[str, float]:
    plain = mine.text.plain
    found = [x for x in found if len(plain(mine.spots[x.at].node)) <= _LONG]
    found = sorted(found, key=lambda x: (mine.spots[x.at].line, not x.sure))
    ways = (_NEAR, True, False), (_FAR, False, False), (_FAR, False, True)
    for (room, shorter, last), x in itertools.product(ways, found):
        if x.last != last:
            continue
        spot = mine.spots[x.at]
        old = plain(spot.node)
        for new in _in_own_names(mine, x, shorter):
            with contextlib.suppress(SyntaxError):
                words, own = (Counter(tokens(y).split()) for y in (plain(new), old))
                if x.last and (words - own).total() > _ALIKE:
                    continue  # a result is what the exercise asks for
                well = plain(new) != old and len(plain(new)) <= min(_LONG, 2 * len(old) + room)
                change = Change("value", "", 0.0, ((spot.slot, new),))
                if well and (said := say(mine.text, change)) is not None and mine.is_right(change):
                    price = 1.0 if shorter else _LESS_SURE + 0.8 * last
                    return said or f"`{old}` stands where `{plain(new)}` belongs", price
    for x in (x for x in found if not x.part):
        if told := mine.told(mine.of_first[x.at], x.right.of_first[x.by]):
            it = f"`{plain(mine.spots[x.at].node)}`"
            return f"{it}{IN_NUMBERS} it {told}", 9.0 if x.last else 2.5
    return "", 0.0


def _in_own_names(mine: Watched, found: _Found, shorter: bool) -> Iterator[ast.expr]:
    """The right spot's expression, or one with the same values, with the names under which the learner has them.
    shorter: a name for a whole piece, too.
    """
    right = found.right
    got, wanted = mine.after(found.at, right, found.by), right.of_first
    of = {id(x.node): k for k, x in enumerate(right.spots) if k in wanted}
    set_to = {x.target: k for k, x in enumerate(right.spots) if k in wanted and x.target}
    own = {x.node.id: got[k] for k, x in enumerate(mine.spots) if k in got and isinstance(x.node, ast.Name)}
    own |= {x.target: got[k] for k, x in enumerate(mine.spots) if k in got and x.target}
    own.pop(mine.spots[found.at].target, None)  # it is another one then
    places = dict(zip(right.text.params, mine.text.params, strict=False))

    def named(node: Any, depth: int) -> Any:
        """The same, in the learner's names; LookupError where it has none."""
        if isinstance(node, list):
            return [named(x, depth) for x in node]
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, ast.Name) and node.id in places:
            return ast.Name(places[node.id], ast.Load())
        k = of.get(id(node), set_to.get(getattr(node, "id", "")))
        whole = shorter or isinstance(node, ast.Name)
        same = [x for x, values in own.items() if k is not None and depth and whole and values.alike(wanted[k])]
        if same and _shapes(own[same[0]]) == _shapes(wanted[k]):  # type: ignore[index]
            return ast.Name(same[0], ast.Load())
        if isinstance(node, ast.Name) and node.id in right.text.locals:
            if node.id not in right.text.meant and node.id in mine.text.locals:
                return node  # a loop's variable, perhaps: it is run
            if depth > _DEEP or node.id not in right.text.meant:
                raise LookupError(node.id)
            return named(right.text.meant[node.id], depth + 1)
        if isinstance(node, ast.Name):
            return ast.Name(mine.foreign(node.id, right), ast.Load())
        fields = {x: named(y, depth + 1) for x, y in ast.iter_fields(node)}
        return type(node)(**fields)

    alike = [k for k in wanted if wanted[k].alike(wanted[found.by])]
    for k in sorted(alike, key=lambda k: _length(right.spots[k].node)):
        with contextlib.suppress(LookupError):
            yield named(right.spots[k].node, 0)


def _shapes(values: Values) -> list[Any]:
    return [*map(np.shape, values.each)]


def _distinct(values: dict[int, Values]) -> list[int]:
    kept: list[int] = []
    for at, mine in values.items():
        if not any(mine.alike(values[k]) for k in kept):
            kept.append(at)
    return kept


def _within(node: ast.AST, whole: ast.AST) -> bool:
    return any(x is node for x in ast.walk(whole))


def _length(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


# ---- Python, and kernels that run on a model -------------------------------------------------------------------------


def value_mended(
    index: Index, text: Text, off: Sequence[int], is_right: Callable[[Callable[..., Any]], bool],
    say: Callable[[Text, Change], str | None],
) -> tuple[str, float]:  # fmt: skip
    """`found_in` a text. off: the inputs on which it is wrong. is_right: whether a function gives what is right, on
    further inputs too.
    """
    order = [*off, *(i for i in index.order if i not in off)]
    mine, *rights = (_Run(index, x, order, is_right) for x in (text, *index.texts))
    until = time.process_time() + _SECONDS
    return found_in(mine, rights, off[0], lambda: time.process_time() > until, say)


class _Run(Watched):
    def __init__(
        self, index: Index, text: Text, order: Sequence[int], is_right: Callable[[Callable[..., Any]], bool]
    ):  # fmt: skip
        super().__init__()
        self.index, self.text, self.spots, self.order = index, text, [*_spots(text)], order
        self.gives_right = is_right
        self.values: dict[int, list[Any]] = defaultdict(list)
        self.room = 0  # for so many numbers more
        self.run = _watched(text, range(len(self.spots)), self._note)

    def _note(self, at: int, value: Any) -> Any:
        if isinstance(value, (int, float, np.ndarray, np.generic, torch.Tensor)) and self.room > 0:
            self.room -= math.prod(getattr(value, "shape", ()))
            kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self.values[at].append(kept.copy() if isinstance(kept, np.ndarray) else kept)
        return value

    def noted(self, i: int) -> dict[int, Values]:
        return self._given(i, self.run)

    def after(self, at: int, right: Watched, by: int) -> dict[int, Values]:
        i = next(iter(self.known))
        values = iter(right.on(i)[by].each)
        put = lambda k, x: self._note(k, _as(next(values), x) if k == at else x)  # noqa: E731
        return self._given(i, _watched(self.text, range(len(self.spots)), put))

    def _given(self, i: int, run: Callable[..., Any]) -> dict[int, Values]:
        self.values.clear()
        self.room = _ROOM
        self.index._one(run, self.index.inputs[i])
        found = {}
        for at, each in self.values.items():
            with contextlib.suppress(OverflowError):  # a whole number beyond every float
                flat = np.concatenate([_array(x).reshape(-1) for x in each]).astype(float)
                found[at] = Values(each, [*map(_plain_shape, each)], flat)
        return found

    def fits(self, mine: Values, instead: Values) -> bool:
        each = zip(mine.each, instead.each, strict=False)
        return len(mine.each) == len(instead.each) and all(_as(y, x) is not None for x, y in each)

    def does(self, at: int, right: Watched, by: int, moved: bool = False) -> bool:
        index, values = self.index, iter(())

        def put(_: int, value: Any) -> Any:
            new: Any = next(values)  # StopIteration: it is asked more often
            return _as(_moved(new) if moved else new, value)

        run = _watched(self.text, [at], put)
        for i in self.order:
            values = iter(right.on(i)[by].each if by in right.on(i) else ())
            if not index.same_outcome([index._one(run, index.inputs[i])], [index.right[i]]):
                return False
        return True

    def is_right(self, change: Change) -> bool:
        return self.gives_right(self.text.compiled(change))

    def told(self, mine: Values, right: Values) -> str:
        case = f" [{self.index.case(self.index.inputs[next(iter(self.known))])}]"
        for nth, (x, y) in enumerate(zip(mine.each, right.each, strict=True), 1):
            a, b = (_array(z).reshape(-1) for z in (x, y))
            if a.shape != b.shape:
                break
            if np.allclose(a.astype(float), b.astype(float), rtol=1e-2, equal_nan=True):
                continue
            k = where_most(a, b)
            at = f" at {[int(z) for z in np.unravel_index(k, np.shape(x))]}" if np.ndim(x) else ""
            when = f", {nth_time(nth)}," if len(mine.each) > 1 else ","
            old, new = (str(bool(z)) if z.dtype == bool else f"{z:.5g}" for z in (a[k], b[k]))
            said = f"is {old}{at}{when} and should be {new}"
            return said + case * (len(said + case) <= _SHORT)
        return ""


def where_most(a: Any, b: Any) -> int:
    """Where two arrays differ most."""
    a, b = a.astype(float), b.astype(float)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))


def nth_time(n: int) -> str:
    return f"the {('first', 'second', 'third')[n - 1] if n < 4 else f'{n}th'} time"


def _spots(text: Text, tree: ast.AST | None = None) -> Iterator[Spot]:
    """Every expression that may be a number or numbers, a whole one before its parts."""
    left_out: set[int] = set()
    tree = tree or text.tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            left_out.add(id(node.func))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in _MODULES:
            left_out |= {id(node), id(node.value)}
        if isinstance(node, ast.Subscript):  # [:, None] is no number
            left_out |= {id(x) for x in ast.walk(node.slice) if isinstance(x, (ast.Slice, ast.Tuple))}
        if isinstance(node, ast.arguments):
            left_out |= {id(x) for x in ast.walk(node)}
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            for at, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                loaded = isinstance(getattr(child, "ctx", None) or ast.Load(), ast.Load)
                if isinstance(child, _SEEN) and loaded and id(child) not in left_out:
                    targets = parent.targets if isinstance(parent, ast.Assign) else ()
                    set_to = getattr(targets[0], "id", "") if targets else ""
                    yield Spot(
                        (parent, name, at), child, set_to, getattr(child, "lineno", 0), id(child) in text.results
                    )


def _watched(text: Text, which: Sequence[int], hook: Callable[[int, Any], Any]) -> Callable[..., Any]:
    """The function, which hands what these spots give to `hook` and goes on with what that returns."""
    tree = pickle.loads(pickle.dumps(text.tree))
    for at, spot in reversed([*enumerate(_spots(text, tree))]):
        if at in which:
            holder, name, i = spot.slot
            new = ast.Call(ast.Name(_HOOK, ast.Load()), [ast.Constant(at), spot.node], [])
            if i is None:
                setattr(holder, name, new)
            else:
                getattr(holder, name)[i] = new
    before, text.fixed = text.fixed, {**text.fixed, _HOOK: hook}
    try:
        return text.launched(text.function(tree)[0])
    finally:
        text.fixed = before


def _moved(x: Any) -> Any:
    """Another value."""
    if isinstance(x, (bool, np.bool_)) or getattr(x, "dtype", None) in (bool, torch.bool):
        return not x if isinstance(x, bool) else ~x
    return x + (1 if isinstance(x, int) or getattr(getattr(x, "dtype", None), "kind", "f") in "iu" else 0.125)


def _array(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        x = x.detach().float() if x.dtype == torch.bfloat16 else x.detach()
    return np.asarray(x)


def _plain_shape(x: Any) -> tuple[int, ...]:
    return tuple(n for n in getattr(x, "shape", ()) if n != 1)


def _as(new: Any, old: Any) -> Any:
    """The value in the other one's shape and kind; None where it has not so many numbers, or they are flags."""
    tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    if tensors and new.dim() == old.dim() and all(n in (1, m) for n, m in zip(old.shape, new.shape, strict=True)):
        old = old.expand(new.shape)  # of which it is made where it is used
    if _plain_shape(new) != _plain_shape(old):
        return None
    if tensors:
        alike = (new.dtype == torch.bool) == (old.dtype == torch.bool)
        return new.reshape(old.shape).to(old.dtype, copy=True) if alike else None  # it may be changed in place
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return new.reshape(old.shape).astype(old.dtype) if (new.dtype == bool) == (old.dtype == bool) else None
    numbers = not any(isinstance(x, (torch.Tensor, np.ndarray)) for x in (old, new))
    return new if numbers and isinstance(old, bool) == isinstance(new, bool) else None
