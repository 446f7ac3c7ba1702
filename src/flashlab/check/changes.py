"""The right text of a function, changed in one place: what each slip would have given, and words for it.

`Text` parses a function once. `changes` lists its edits: a name for a name in scope, a sign, an operator, a factor or a
term left out or doubled, an index or a bound one off, a limit left out, arguments or results exchanged, a line left out
or moved, a comparison loosened or tightened, and the same slip everywhere it occurs. An edit replaces nodes in place:
`Text.compiled` puts it in, compiles (some 0.1 ms) and takes it out again, so that several can be tried at once.

A sentence says what was changed in the words of the right text, for a reader who has seen neither: a local name stands
for its definition where that is short, or for what `words` says.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import math
import operator
import pickle
import re
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flashlab.check.code_changes import of_code, of_lines
from flashlab.check.trees import LOOPS, blocks, both, is_op, names_in, nodes, reads

Edits = Sequence[tuple[str, str]]  # (old, new) texts, each of which occurs once
Slot = tuple[ast.AST, str, "int | None"]  # a node, one of its fields, and the place in it where it is a list

CHANGED = "<a change>"  # the file's name of a changed text
_MOST_ITEMS = 2_000  # of an iterator that a change may have made endless
_LONGEST_LIST, _TIMES_AS_MANY = 100_000, 3
_FACTORS = (4, 8, 1000, 1024)
_FEW = 12  # values of a parameter, each of which an answer may take for all of them
_LONGEST_NAME = 44  # characters of a definition that stands for a local name

# What stands for what, besides the operators: each with the likely ones first.
_OPERATORS: Mapping[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add, ast.Div), ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv), ast.FloorDiv: (ast.Mod, ast.Mult), ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE), ast.NotEq: (ast.Eq,),
    ast.BitXor: (ast.Add, ast.BitAnd, ast.BitOr), ast.BitAnd: (ast.BitOr, ast.BitXor, ast.Mod),
    ast.BitOr: (ast.BitAnd, ast.BitXor), ast.LShift: (ast.RShift, ast.Mult), ast.RShift: (ast.LShift, ast.FloorDiv),
}  # fmt: skip
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "log": ("log2", "log10"), "log2": ("log", "log10"), "log10": ("log",), "exp": ("exp2",), "exp2": ("exp",),
    "min": ("max",), "max": ("min",), "maximum": ("minimum",), "minimum": ("maximum",), "ceil": ("floor",),
    "floor": ("ceil",), "amax": ("amin", "sum"), "amin": ("amax",), "sum": ("mean", "amax"), "sqrt": (),
    "abs": (), "tiny": ("max",), "tril": ("triu",), "triu": ("tril",),
    "median": ("mean",), "logaddexp": ("maximum", "logaddexp2"),
}  # fmt: skip
_SIGNS = (ast.Add, ast.Sub)
_TURNS = dict.fromkeys((ast.Lt, ast.Gt), "a turn more") | dict.fromkeys((ast.LtE, ast.GtE), "a turn less")
_SYMBOLS: Mapping[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.MatMult: "@",
    ast.BitXor: "^", ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One edit. `said` goes on after the name of what it makes wrong; the lower `cost`, the likelier it is."""

    slug: str
    said: str
    cost: float
    edits: tuple[tuple[Slot, Any], ...]
    key: tuple[Any, ...] = ()  # the same for the same slip in another place
    about: tuple[str, ...] = ()  # pieces of the text that a note may explain, the nearest first

    def __post_init__(self) -> None:
        for new in (new for _, new in self.edits if isinstance(new, ast.AST)):
            ast.fix_missing_locations(new)  # `ast.unparse` of a line asks for them

    def clashes(self, other: Change) -> bool:
        return any(a == b for (a, _), (b, _) in itertools.product(self.edits, other.edits))


def edited(text: str, edits: Edits, name: str = "the text") -> str:
    """The text with these edits; ValueError where one does not fit once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times in {name}")
        text = text.replace(old, new)
    return text


def edited_function(fn: Callable[..., Any], edits: Edits) -> str:
    """The function's text without its decorator, with these edits."""
    source = textwrap.dedent(inspect.getsource(fn))
    source = source[source.index("\ndef ") + 1 :] if not source.startswith("def ") else source
    return edited(source, edits, fn.__name__)


class EndlessError(Exception):
    """A change has made a loop endless."""


def _tree_of(fn: Callable[..., Any], other: str | Edits | None) -> ast.FunctionDef:
    """A function's, without its decorators and docstring; with edits, or with another expression for its body."""
    edits = other if other and not isinstance(other, str) else None
    source = edited_function(fn, edits) if edits else textwrap.dedent(inspect.getsource(fn))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef), "a right text is one function"
    tree.decorator_list, tree.returns = [], None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    if isinstance(other, str):
        tree.body = [ast.Return(ast.parse(other, mode="eval").body)]
    return tree


class Text:
    """A right function's text.

    Args:
        words: what local names are called. whole: numbers are whole, so that one may be off by 1.
        other: another way to write it: an expression of the parameters that gives the same, or edits of the text.
    """

    foreign = False  # a learner's, of which a change may make numbers grow without end
    from_zero = False  # a learner's: a right one walks from 0
    most_steps = 2_000  # of the loops in one call, that a change may have made endless
    longest = 0  # so many in one call

    @functools.cached_property
    def unchanged(self) -> str:
        """The whole text, as Python has it."""
        return ast.unparse(self.tree)

    def __init__(
        self, fn: Callable[..., Any], words: Mapping[str, str] | None = None, other: str | Edits | None = None,
        whole: bool = True,
    ):  # fmt: skip
        tree = _tree_of(fn, other)
        self.params = [a.arg for a in tree.args.args]
        for argument in tree.args.args:
            argument.annotation = None
        for loop in nodes(tree, *LOOPS):
            loop.body.insert(0, ast.Expr(ast.Call(ast.Name("_tick", ast.Load()), [], [])))
        ast.fix_missing_locations(tree)
        self.tree, self.globals, self.turns = tree, fn.__globals__, 0  # turns: of its loops, in all that has been run
        self.numbers = self.params  # those that are numbers
        self.reads = Counter(reads(tree))
        halves = {ast.unparse(n): n for n in nodes(tree, ast.BinOp)}
        plain = (ast.Name, ast.Constant)
        self.parts = [n for n in halves.values() if isinstance(n.left, plain) and isinstance(n.right, plain)]
        self.fixed: dict[str, Any] = {}  # values that no constant can hold
        self.kinds: dict[str, set[Any]] = {}  # of a name: what it is, where that has been looked at
        self.words, self.whole = dict(words or {}), whole
        assigned: dict[str, list[ast.expr | None]] = defaultdict(list)  # None: what it becomes has no short words
        for node in nodes(tree, ast.AugAssign, ast.For, ast.comprehension, ast.Assign):
            if not isinstance(node, ast.Assign):
                for target in nodes(node.target, ast.Name):
                    assigned[target.id].append(None)
                continue
            for target in node.targets:
                value: Any = node.value
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                targets, values = (target.elts, value.elts) if several else ([target], [value])  # type: ignore[attr-defined]
                for name, value in zip(targets, values, strict=True):
                    if isinstance(name, ast.Name):
                        assigned[name.id].append(value)
                    for one in name.elts if isinstance(name, ast.Tuple) else ():  # of what a call gives
                        if isinstance(one, ast.Name):
                            assigned[one.id].append(None)
        self.assigned = assigned
        self.locals = list(assigned)
        lists = (ast.List, ast.ListComp, ast.Dict, ast.Tuple)
        self.lists = {name for name, meant in assigned.items() if meant and isinstance(meant[0], lists)}
        returned = [n.value for n in nodes(tree, ast.Return) if n.value is not None]
        results = [x for value in returned for x in (value.elts if isinstance(value, ast.Tuple) else [value])]
        turns = {id(x) for loop in nodes(tree, *LOOPS) for x in ast.walk(loop)}
        named = [v for x in results if isinstance(x, ast.Name) for v in assigned[x.id] if v and id(v) not in turns]
        self.results = {id(x) for x in (*results, *named)}
        self.meant = {name: x[0] for name, x in assigned.items() if len(x) == 1 and x[0] is not None}
        for local, value in self.meant.items():
            if local not in self.words:
                said = self.plain(value)
                if len(said) <= _LONGEST_NAME:
                    compound = isinstance(value, (ast.BinOp, ast.IfExp, ast.Compare))
                    self.words[local] = f"({said})" if compound else said

    @functools.cached_property
    def often(self) -> Counter[str]:
        """How often each name stands there."""
        return Counter(n.id for n in nodes(self.tree, ast.Name))

    def are_alike(self, *names: Any) -> bool:
        """Whether one of these may be taken for the other, as far as it is known what they are."""
        kinds = [self.kinds[name] for name in names if name in self.kinds]
        return len(kinds) < 2 or bool(kinds[0] & kinds[1])

    def plain(self, node: ast.AST) -> str:
        """A part of the text as a reader of the exercise would write it."""
        read = (n for n in nodes(node, ast.Name) if n.id in self.words)
        named = {n: n.id for n in read if not isinstance(getattr(n, "ctx", None), ast.Store)}
        for n, name in named.items():
            n.id = self.words[name]
        said = re.sub(r"(^|\()0 \+ ", r"\1", _short_numbers(ast.unparse(node)))
        for n, name in named.items():
            n.id = name
        whole = said.startswith("(") and said.endswith(")") and said.count("(") == 1
        return said[1:-1] if whole else said

    def say(self, node: ast.AST) -> str:
        said = self.plain(node)
        return f"`{said}`" if len(said) <= 60 else f"`{said[:57]}...`"

    @contextlib.contextmanager
    def changed(self, *changes: Change) -> Iterator[None]:
        """Inside it `tree` has these changes."""
        before = []
        try:
            for slot, new in (edit for change in changes for edit in change.edits):
                before.append((slot, _at(slot)))
                _put_at(slot, new)
            yield
        finally:
            for slot, old in reversed(before):
                _put_at(slot, old)

    def compiled(self, *changes: Change) -> Callable[..., Any]:
        """The function with these changes; SyntaxError where they make no sense."""
        with self.changed(*changes):
            return self.launched(self.function(self.tree)[0])

    def steps_as(self, run: Callable[[Callable[..., Any]], Any]) -> Any:
        """What `run` makes of the text; a change of it may take some times as many steps, and no more."""
        self.most_steps, before = 100 * self.most_steps, self.most_steps
        try:
            return run(self.compiled())
        finally:
            self.most_steps = max(before, _TIMES_AS_MANY * self.longest)

    def launched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """What is called with an input, of the function itself."""
        return made

    def function(self, tree: ast.FunctionDef) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of a tree, whose loops end, and the names that it looks up."""
        if self.foreign:
            tree = _Bounded().visit(pickle.loads(pickle.dumps(tree)))
            if tree.name in names_in(tree):  # it calls itself
                tree.body.insert(0, ast.Expr(ast.Call(ast.Name("_tick", ast.Load()), [], [])))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "'int' object is not callable"
                code = compile(ast.fix_missing_locations(ast.Module([tree], [])), CHANGED, "exec")
        except (ValueError, TypeError, RecursionError) as error:  # two changes, each of which is put into the other
            raise SyntaxError(str(error)) from error
        begun = 0

        def tick() -> None:
            self.turns += 1
            if self.turns - begun > self.most_steps or (self.foreign and _grows(sys._getframe(1).f_locals)):
                raise EndlessError

        known = {name: _ending(x) for name, x in self.globals.items()} if self.foreign else self.globals
        names = {**known, **self.fixed, "math": math, "_tick": tick, "_bounded": _bounded, "_itertools": _ENDING}
        exec(code, names)
        made = names[tree.name]

        def run(*args: Any, **named: Any) -> Any:
            nonlocal begun
            begun = self.turns
            try:
                return made(*args, **named)
            finally:
                self.longest = max(self.longest, self.turns - begun)

        return run, names


def _grows(names: Mapping[str, Any]) -> bool:
    """Whether a list has become so long that a change must have doubled it in each turn."""
    return any(type(x) is list and len(x) > _LONGEST_LIST for x in names.values())


class _Ending:
    """An iterator without end, of which a loop, or what else goes through all of it, sees the first few items."""

    def __init__(self, endless: Iterator[Any]) -> None:
        self.endless = endless

    def __next__(self) -> Any:
        return next(self.endless)

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.endless, _MOST_ITEMS)
        raise EndlessError


_ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)


def _ending(x: Any) -> Any:
    """What a name stands for, where a change may put it in the place of something that ends."""
    if x is itertools:
        return SimpleNamespace(**{name: _ending(value) for name, value in vars(itertools).items()})
    if isinstance(x, _ENDLESS):
        return _Ending(x)
    return (lambda *given, **named: _Ending(x(*given, **named))) if any(x is made for made in _ENDLESS) else x


_ENDING = _ending(itertools)


class _Bounded(ast.NodeTransformer):
    """Products and powers by `_bounded`, and no itertools but those that end."""

    def visit_Import(self, node: ast.Import) -> Any:
        parts = [f"{x.asname or x.name} = _itertools" if x.name == "itertools" else f"import {x.name}" + (
                 f" as {x.asname}" if x.asname else "") for x in node.names]  # fmt: skip
        return ast.parse("; ".join(parts)).body

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module != "itertools":
            return node
        return ast.parse("; ".join(f"{x.asname or x.name} = _itertools.{x.name}" for x in node.names)).body

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if (name := _GROWING.get(type(node.op))) is None:
            return node
        return ast.Call(ast.Name("_bounded", ast.Load()), [ast.Constant(name), node.left, node.right], [])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if type(node.op) not in _GROWING or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        new = self.visit(ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))
        new.args[0].value = f"i{new.args[0].value}"  # of a tensor in place
        return ast.Assign([node.target], new)


_GROWING = {ast.Mult: "mul", ast.Pow: "pow", ast.LShift: "lshift"}
_BITS = 4096


def _bounded(name: str, a: Any, b: Any) -> Any:
    """a * b, a ** b or a << b; OverflowError where that is a whole number, a text or a list beyond reason."""
    several = ((x, y) for x, y in ((a, b), (b, a)) if isinstance(x, (str, list, tuple)) and isinstance(y, int))
    if any(len(x) * y > _BITS for x, y in several):
        raise OverflowError(name)
    if isinstance(a, int) and isinstance(b, int):
        bits = {"mul": a.bit_length() + b.bit_length(), "pow": a.bit_length() * max(b, 1), "lshift": a.bit_length() + b}
        if bits[name.removeprefix("i")] > _BITS:
            raise OverflowError(name)
    return getattr(operator, name)(a, b)


class Variants:
    """A text with its changes as one function, compiled once: a number for each place chooses what stands there.

    `chosen` gives the function with some changes, or None where they make no sense.
    """

    def __init__(self, text: Text, changes: Sequence[Change]):
        self.text = text
        fixed = {id(n) for n in ast.walk(text.tree.args)}  # evaluated once, where the function is made
        fixed |= {id(n) for n in nodes(text.tree, ast.JoinedStr)}
        choosable = [c for c in changes if not _nested([c]) and all(
            id(slot[0]) not in fixed and _fits(slot, new) for slot, new in c.edits)]  # fmt: skip
        self.changes: dict[int, Change] = {}
        self._put(choosable)

    def _put(self, changes: list[Change]) -> None:
        """Take these, less those that cannot be compiled."""
        try:
            self._make([*self.changes.values(), *changes])
            self.changes |= {id(c): c for c in changes}
        except SyntaxError:
            if len(changes) > 1:
                half = len(changes) // 2
                self._put(changes[:half])
                self._put(changes[half:])
                self._make([*self.changes.values()])

    def _make(self, changes: Sequence[Change]) -> None:
        self.places: dict[tuple[int, str, int | None], tuple[str, dict[int, Any]]] = {}
        for (node, name, at), new in (edit for change in changes for edit in change.edits):
            variable, others = self.places.setdefault((id(node), name, at), (f"_at_{len(self.places)}", {}))
            others.setdefault(id(new), new)
        self.run, self.names = self.text.function(self._with_choices(self.text.tree))
        self.names |= {variable: 0 for variable, _ in self.places.values()}

    def _with_choices(self, node: Any) -> Any:
        new = type(node)()
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(new, name, [self._choice(node, name, at, x) for at, x in enumerate(value)])
            else:
                setattr(new, name, self._choice(node, name, None, value))
        return ast.copy_location(new, node)

    def _choice(self, holder: ast.AST, name: str, at: int | None, value: Any) -> Any:
        if not isinstance(value, ast.AST):
            return value
        right = self._with_choices(value)
        variable, others = self.places.get((id(holder), name, at), ("", {}))
        if not others:
            return right
        chosen = ast.Name(variable, ast.Load())
        one: Any = _If if isinstance(value, ast.stmt) else ast.IfExp

        def among(new: Sequence[Any], first: int) -> Any:
            if len(new) == 1:
                return new[0]
            half = len(new) // 2
            low = ast.Compare(chosen, [ast.Lt()], [ast.Constant(first + half)])
            return one(low, among(new[:half], first), among(new[half:], first + half))

        return one(chosen, among([*others.values()], 1), right)

    def chosen(self, *changes: Change) -> Callable[..., Any] | None:
        if (len(changes) > 1 and _nested(changes)) or not all(id(c) in self.changes for c in changes):
            try:
                return self.text.compiled(*changes)
            except SyntaxError:
                return None
        choice: dict[str, int] = {}
        for (node, name, at), new in (edit for c in changes for edit in c.edits):
            variable, others = self.places[id(node), name, at]
            choice[variable] = [*others].index(id(new)) + 1
        none = dict.fromkeys(choice, 0)

        def run(*given: Any, **named: Any) -> Any:
            self.names.update(choice)
            try:
                return self.run(*given, **named)
            finally:
                self.names.update(none)

        return self.text.launched(run)


def _If(test: ast.expr, yes: ast.stmt, no: ast.stmt) -> ast.If:
    return ast.If(test, [yes], [no])


def _nested(changes: Sequence[Change]) -> bool:
    """Whether an edit is made in what another one replaces, or puts there."""
    edits = [edit for c in changes for edit in c.edits]
    if len(edits) == 1:
        return False
    olds = [_at(slot) for slot, _ in edits]
    inner = {id(n) for x in (*olds, *(new for _, new in edits)) for n in ast.walk(x)}
    return any(id(node) in inner for (node, _, _), _ in edits)


def _fits(slot: Slot, new: ast.AST) -> bool:
    """Whether a conditional may stand in this place: of two statements or two expressions, and no slice."""
    old = _at(slot)
    both = [old, new]
    if all(isinstance(x, ast.stmt) for x in both):
        return True
    if any(isinstance(x, (ast.Slice, ast.Starred)) for y in both for x in (y, *getattr(y, "elts", ()))):
        return False
    stored = isinstance(getattr(old, "ctx", None), (ast.Store, ast.Del))
    return all(isinstance(x, ast.expr) for x in both) and not stored


def _at(slot: Slot) -> Any:
    value = getattr(slot[0], slot[1])
    return value if slot[2] is None else value[slot[2]]


def _put_at(slot: Slot, new: Any) -> None:
    if slot[2] is None:
        setattr(slot[0], slot[1], new)
    else:
        getattr(slot[0], slot[1])[slot[2]] = new


def _slots(root: ast.AST) -> Iterator[tuple[Slot, ast.expr]]:
    """Every expression that is read, with the place where it stands; outermost first."""
    for name, value in ast.iter_fields(root):
        if isinstance(root, ast.Call) and name == "func":
            if isinstance(value, ast.Attribute):
                yield from _slots(value)
            if isinstance(value, ast.Subscript):  # the grid of a launch
                yield (value, "slice", None), value.slice
                yield from _slots(value.slice)
            continue
        for at, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), (ast.Store, ast.Del)):
                yield (root, name, at), child
            yield from _slots(child)


def _expr(text: str, **parts: ast.expr) -> ast.expr:
    """An expression with nodes in the place of names."""

    class Put(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return parts.get(name.id, name)

    return Put().visit(ast.parse(text, mode="eval").body)


def changes(text: Text, values: Mapping[str, Sequence[Any]] | None = None, more: Any = None) -> list[Change]:
    """Every single change of the text, and every slip made wherever it is possible.

    values: what the parameters are in the inputs, for an answer that takes one of them to be the same always.
    more: has further ones in place of those of `code_changes`: `of_expression`, `of_statements` (see `tensor_changes`).
    """
    found: list[Change] = []
    flags = {name for name, seen in (values or {}).items() if not all(_is_number(x) for x in seen)}
    text.numbers = [name for name in text.params if name not in flags]
    inner: set[int] = set()  # of -(-a // b), which is one thing
    for slot, node in _slots(text.tree):
        if _rounded_up(node) is not None:
            division = node.operand if isinstance(node, ast.UnaryOp) else node.args[0]  # type: ignore[attr-defined]
            negative = division.left if isinstance(node, ast.UnaryOp) else division  # type: ignore[union-attr]
            inner |= {id(division), id(negative)}
        if id(node) not in inner and getattr(getattr(node, "func", None), "id", "") != "_tick":
            found += [
                Change(slug, said, cost, ((slot, new),), (slug, *rest), _about(node, new))
                for slug, said, cost, new, *rest in (
                    *_of_expression(text, slot, node),
                    *(more.of_expression(text, slot, node) if more else of_code(text, node)),
                )
                if slug != "wrong-name" or len(rest) < 2 or text.are_alike(*rest[:2])
            ]
    found += _of_statements(text)
    found += more.of_statements(text) if more else [
        Change(slug, said, cost, ((slot, new),)) for slug, said, cost, slot, new in of_lines(text)]  # fmt: skip
    found += _of_results(text)
    again: dict[tuple[Any, ...], list[Change]] = defaultdict(list)
    for change in found:
        if len(change.key) > 1:
            again[change.key].append(change)
    for same in again.values():
        if len(same) > 1 and len({repr(edit[0][0]) + str(edit[0][1:]) for c in same for edit in c.edits}) == len(same):
            where = "both times" if len(same) == 2 else "everywhere"
            one = same[0]
            said = one.said if len({c.said for c in same}) == 1 else one.said.partition(", in ")[0]  # of several places
            edits = tuple(edit for c in same for edit in c.edits)
            found.append(Change(one.slug, f"{said}, {where}", one.cost + 0.2, edits, about=one.about))
    return [*found, *_of_parameters(text, values or {})]


def _of_parameters(text: Text, values: Mapping[str, Sequence[Any]]) -> Iterator[Change]:
    """Another attribute, two parameters exchanged everywhere, one taken for a value that it has in some inputs."""
    reads: dict[str, list[Slot]] = defaultdict(list)
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Name) and node.id in text.params:
            reads[node.id].append(slot)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in values:
            one = values[node.value.id][0]
            of: type = type(getattr(one, node.attr, None))
            kind: Any = (int, float) if issubclass(of, (int, float)) else of if isinstance(one, tuple) else ()
            for other in dir(one) if kind else ():
                if other != node.attr and isinstance(getattr(one, other, None), kind) and other[0] != "_":
                    said = f"`{node.value.id}.{other}` stands where {text.say(node)} belongs"
                    new = ast.Attribute(node.value, other, ast.Load())
                    yield Change("wrong-name", said, 2.1, ((slot, new),), about=(ast.unparse(node),))
    for a, b in itertools.combinations(reads, 2):
        if not text.are_alike(a, b):
            continue
        edits = tuple((slot, ast.Name(y, ast.Load())) for x, y in ((a, b), (b, a)) for slot in reads[x])
        yield Change("names-exchanged", f"`{a}` and `{b}` are exchanged, everywhere", 2.05, edits)
    for name, seen in values.items():
        plain_ones = all(isinstance(x, (int, float, str)) or not hasattr(x, "__len__") for x in seen)
        several = [*dict.fromkeys(seen)] if plain_ones and not name.startswith("stride_") else []  # nobody counts one
        for i, value in enumerate(several if len(several) <= _FEW else ()):
            plain = isinstance(value, (int, float, str))
            text.fixed[f"_{name}_{i}"] = value
            said = f"`{name}` is taken for {value if plain else getattr(value, 'name', value)}, whatever it is"
            instead: Any = ast.Constant(value) if plain else ast.Name(f"_{name}_{i}", ast.Load())
            fixed = tuple((slot, instead) for slot in reads[name])
            cost = 0.9 if isinstance(value, bool) else 2.2
            yield Change("taken-as-fixed", said.replace("torch.", ""), cost, fixed, about=(name,))


def _about(node: ast.expr, new: ast.AST) -> tuple[str, ...]:
    """The text of what is gone, where a part is left out, then of the whole, then of its last part."""
    gone: list[ast.AST] = [node]
    if _rounded_up(node) is not None and not isinstance(new, (ast.BinOp, ast.Call)):
        return ()
    if isinstance(node, ast.Call) and isinstance(new, ast.Call) and new not in node.args and (
        ast.dump(new.func) != ast.dump(node.func)):  # fmt: skip
        gone = [node.func]
    elif isinstance(node, ast.BinOp):
        inner = new.operand if isinstance(new, ast.UnaryOp) else new
        gone = [node.right, node] if inner is node.left else [node.left, node] if inner is node.right else [
            node]  # fmt: skip
        if isinstance(new, ast.BinOp) and new.left is node and not isinstance(new.right, ast.Constant):
            return ()  # something is there as well
        if isinstance(new, ast.BinOp) and type(new.op) is not type(node.op):
            gone.append(node.right)
    elif isinstance(node, ast.Call) and new in node.args:
        gone = [*(x for x in node.args if x is not new), node]
    elif isinstance(node, ast.Compare):
        gone = [node, *node.comparators]
    return tuple(_short_numbers(ast.unparse(x)) for x in gone)


def _short_numbers(said: str) -> str:
    """1e12, not 1000000000000.0."""
    return re.sub(r"\b1(0{6,})\.0\b", lambda m: f"1e{len(m[1])}", said)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of_expression(text: Text, slot: Slot, node: ast.expr) -> Iterator[tuple[Any, ...]]:
    """(slug, words, cost, new node, key...) of one expression."""
    parent, w, root = slot[0], text.say, id(node) in text.results
    if isinstance(node, ast.Name):
        yield from _of_name(text, parent, node)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from _of_number(text, parent, node)
    if isinstance(node, ast.BinOp):
        yield from _of_operation(text, node)
    yield from _of_missing(text, node)
    if (up := _rounded_up(node)) is not None:
        yield from _of_rounding_up(text, *up)
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "wrong-sign", f"{w(node.operand)} has the wrong sign", 1.2, node.operand
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for value in (True, False) if root else ():
            yield "always-the-same", f"it is {value} always", 0.8, ast.Constant(value)
        for op in _OPERATORS.get(type(node.ops[0]), ()):
            new = ast.Compare(node.left, [op()], node.comparators)
            said = f"the comparison is {w(new)}: it is `{_SYMBOLS[type(node.ops[0])]}`"
            if isinstance(parent, ast.While) and type(node.ops[0]) in _TURNS:  # another loop may have none of this
                first = op is _OPERATORS[type(node.ops[0])][0]
                said = f"the loop {w(node)} has {_TURNS[type(node.ops[0])] if first else 'no turn'}"
            yield "wrong-comparison", said, 1.4, new
    if isinstance(node, ast.IfExp):
        yield "branches-exchanged", f"{w(node.body)} and {w(node.orelse)} are exchanged", 1.5, ast.IfExp(
            node.test, node.orelse, node.body)  # fmt: skip
        for branch in (node.body, node.orelse):
            said = f"it is {w(branch)} always" if root else f"{w(branch)} is taken always"
            yield "always-one-branch", f"{said}: {w(node.test)} is not asked", 1.3, branch
    if isinstance(node, ast.Call):
        alone = isinstance(parent, ast.Expr)  # its arguments are no statement
        yield from (x for x in _of_call(text, node) if not (alone and x[0] == "function-missing"))
    if isinstance(node, ast.Attribute):
        for other in _FUNCTIONS.get(node.attr, ()):
            yield "wrong-function", f"`{other}` is taken for `{node.attr}`", 2.4, ast.Attribute(
                node.value, other, ast.Load()), node.attr, other  # fmt: skip
    yield from _one_off(text, parent, node)


def _of_name(text: Text, parent: ast.AST, node: ast.Name) -> Iterator[tuple[Any, ...]]:
    """Another name, or what is near it, in its place."""
    w, root = text.say, id(node) in text.results
    often = text.often
    mixed = text.whole and not text.kinds  # of numbers alone: what is mixed up there is more
    if node.id in (*text.params, *text.locals):
        for other in (*text.params, *text.locals):
            flag = mixed and isinstance(parent, ast.BinOp) and other in text.params and other not in text.numbers
            if other != node.id and not flag and (other in text.lists) == (node.id in text.lists):
                name = ast.Name(other, ast.Load())
                within = ast.BinOp if not text.kinds else (ast.BinOp, ast.Call)
                where = f", in {w(parent)}" if isinstance(parent, within) and often[node.id] > 1 else ""
                of = f".{parent.attr}" if isinstance(parent, ast.Attribute) else ""
                said = f"it is {w(name)}" if root else f"{w(name)} stands where {w(node)} belongs{where}"
                said = f"`{other}{of}` stands where `{node.id}{of}` belongs" if of else said
                yield "wrong-name", said, 2.0, name, node.id, other
                beside = isinstance(parent, ast.BinOp) and other not in ast.unparse(parent)
                if mixed and other in text.params and node.id in text.params and beside:
                    said = f"the middle of `{node.id}` and `{other}` stands where {w(node)} belongs"
                    yield "wrong-name", said, 2.5, _expr("(x + y) // 2", x=node, y=name)
                if mixed and other in text.params and beside:
                    said = f"{w(node)} is counted from the end of {w(name)}"
                    yield "from-the-end", said, 2.4, _expr(f"{other} - 1 - x", x=node), node.id, other
                for sign in "-+" if mixed and other in text.params and beside else "":
                    said = f"`{other} {sign} 1` stands where {w(node)} belongs"
                    yield "wrong-name", said, 2.4, _expr(f"x {sign} 1", x=name), node.id, other, sign
    if node.id in text.numbers and isinstance(parent, ast.BinOp):
        for part in text.parts if not text.kinds else ():  # such as heads // kv_heads for heads
            if part is not parent:
                yield "wrong-name", f"{w(part)} stands where {w(node)} belongs, in {w(parent)}", 2.5, part


def _one_off(text: Text, parent: ast.AST, node: ast.expr) -> Iterator[tuple[Any, ...]]:
    w, root = text.say, id(node) in text.results
    number = isinstance(node, (ast.BinOp, ast.Name, ast.Call, ast.IfExp))
    if isinstance(node, ast.Name) and node.id not in (*text.numbers, *text.locals):
        number = False
    if isinstance(node, ast.Name) and text.kinds.get(node.id, {"number"}) != {"number"} and not root:
        number = False
    texts = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))
    if not number or texts or isinstance(parent, ast.Attribute):
        return
    in_sum = is_op(parent, *_SIGNS)  # which is itself one off
    bare = isinstance(node, ast.Name) or (isinstance(node, ast.Call) and not root)
    limited = isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("min", "max") and not bare
    for sign, size in (("+", "large"), ("-", "small")) if text.whole and not in_sum else ():
        of_result = root or (limited and id(parent) in text.results)
        said = f"{'it' if of_result else w(node)} is one too {size}" + (", before it is limited" if limited else "")
        yield "off-by-one", said, (0.9 if root else 1.2 if limited else 1.5 + _weight(node)), _expr(
            f"x {sign} 1", x=node)  # fmt: skip
    if is_op(node, ast.Sub):
        yield "taken-as-positive", f"{w(node)} is taken as positive where it is negative", 1.8, _expr("abs(x)", x=node)
        yield "cut-off-at-0", f"{w(node)} is cut off at 0 where it is negative", 1.8, _expr("max(0, x)", x=node)
    if root or isinstance(parent, ast.BinOp):
        it = "it" if root else w(node)
        yield "twice-as-much", f"{it} is counted twice", 2.3, _expr("2 * x", x=node)
        for way in ("x / 2", "x // 2")[text.foreign :] if text.whole else ("x / 2",):
            yield "half", f"{it} is half of what it should be", 2.4, _expr(way, x=node)
        if not isinstance(node, ast.Constant):
            yield "wrong-sign", f"{it} has the wrong sign", 2.3 if root else 1.9, _expr("-x", x=node)
    if root or (isinstance(node, ast.Name) and node.id in text.numbers):
        for factor in _FACTORS if not text.kinds else ():
            for way, times in ((f"x * {factor}", f"{factor}"), (f"x / {factor}", f"1 / {factor}")):
                said = f"{'it' if root else w(node)} is {times} times what it should be"
                yield "wrong-factor", said, 2.5 if root else 2.6, _expr(way, x=node)
    if (is_op(node, *_SIGNS) and not in_sum) or root:
        for other in text.numbers:
            if not text.kinds:
                yield "term-too-many", f"`{other}` is added as well", 2.1, _expr(f"x + {other}", x=node)
                yield "term-too-many", f"`{other}` is subtracted as well", 2.1, _expr(f"x - {other}", x=node)
            if root:
                yield "factor-too-many", f"it is multiplied by `{other}` as well", 2.1, _expr(f"x * {other}", x=node)
                yield "factor-too-many", f"it is divided by `{other}` as well", 2.2, _expr(f"x / {other}", x=node)
    if root:
        for way in ("math.floor", "round", "math.ceil") if not text.kinds else ():
            yield "rounded", f"it is rounded to a whole number, by `{way}`", 2.3, _expr(f"{way}(x)", x=node)
        for other in text.numbers if text.whole and not text.kinds else ():
            for way, how in ((f"x // {other}", "down"), (f"-(-x // {other})", "up")):
                said = f"it is divided by `{other}` as well, and rounded {how}"
                yield "factor-too-many", said, 2.2, _expr(way, x=node)
            for way, how in ((f"x // {other} * {other}", "down"), (f"-(-x // {other}) * {other}", "up")):
                yield "rounded", f"it is rounded {how} to a multiple of `{other}`", 2.2, _expr(way, x=node)
        for value in (0, 1):
            yield "always-the-same", f"it is {value} always", 0.8, ast.Constant(value)
        for other in (*text.params, *text.locals):
            if not isinstance(node, ast.Name):
                yield "wrong-result", f"it is {w(ast.Name(other))}", 2.2, ast.Name(other, ast.Load())


def _of_missing(text: Text, node: ast.AST) -> Iterator[tuple[Any, ...]]:
    """Of -a % b, what a lacks to a multiple of b."""
    match node:
        case ast.BinOp(left=ast.UnaryOp(op=ast.USub(), operand=a), op=ast.Mod(), right=b):
            said = f"it is {text.say(b)} where {text.say(a)} is a multiple of it, and has to be 0 there"
            yield "whole-for-none", said, 1.0, _expr("b - a % b", a=a, b=b)


def _rounded_up(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The a and b of math.ceil(a / b) and of -(-a // b)."""
    match node:
        case ast.Call(func=ast.Attribute(attr="ceil"), args=[ast.BinOp(left=a, op=ast.Div(), right=b)]):
            return a, b
        case ast.UnaryOp(op=ast.USub(), operand=ast.BinOp(left=negative, op=ast.FloorDiv(), right=b)):
            return (of, b) if (of := _positive(negative)) is not None else None
    return None


def _positive(node: ast.expr) -> ast.expr | None:
    """The a of -a, also where that is read as a product: -32 * n."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left = _positive(node.left)
        return ast.BinOp(left, node.op, node.right) if left is not None else None
    return node.operand if isinstance(node, ast.UnaryOp) else None


def _of_rounding_up(text: Text, a: ast.expr, b: ast.expr) -> Iterator[tuple[Any, ...]]:
    said = text.say(ast.BinOp(a, ast.Div(), b))
    ways = {
        "a // b": "is rounded down", "a / b": "is not rounded", "a // b + 1": "is rounded down, plus 1",
        "round(a / b)": "is rounded to the nearest", "max(1, a // b)": "is rounded down, to 1 at least",
        "-(-a // b) - 1": "is rounded up, less 1",
        "-(-a // b) + 1": "is rounded up, plus 1",
    }  # fmt: skip
    for way, how in ways.items():
        yield "wrong-rounding", f"{said} {how}: it should be rounded up", 1.1, _expr(way, a=a, b=b), way
    for alone in "ab1":
        instead = {"a": a, "b": b}.get(alone)
        what = text.say(instead) if instead else "`1`"
        yield "division-missing", f"{what} stands where {said}, rounded up, belongs", 1.3, _expr(alone, a=a, b=b), alone
    if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Mult):
        for gone, left in ((a.left, a.right), (a.right, a.left)):
            words = f"the factor {text.say(gone)} is missing, in {text.say(a)}"
            yield "factor-missing", words, 0.95 + _weight(gone), _expr("-(-a // b)", a=left, b=b)


def _weight(node: ast.AST) -> float:
    """What is left out or said is the likelier, the smaller it is."""
    return 0.12 * sum(isinstance(n, (ast.Name, ast.Constant)) for n in ast.walk(node))


def _of_number(text: Text, parent: ast.AST, node: ast.Constant) -> Iterator[tuple[Any, ...]]:
    value: Any = node.value
    half = value // 2 if isinstance(value, int) and value % 2 == 0 else value / 2
    others: list[Any] = [value + 1, value - 1, 2 * value, half, 4 * value, -value, 0, 1]
    units = not (text.kinds and text.foreign)  # tensors have none
    if units and abs(value) >= 1000 and abs(math.log10(abs(value)) % 1) < 1e-9:
        power = round(math.log10(abs(value)))
        others = [10.0 ** (power + k) for k in (-3, 3, -6, 6, -9, 9)] + [2.0 ** round(power / 3 * 10), 1]
    elif isinstance(value, int):
        others += [k for k in (2, 3, 4, 8) if k != value]
    seen = [value, *(others if getattr(getattr(parent, "func", None), "attr", "") == "program_id" else ())]
    within = (ast.BinOp, ast.Compare) if not text.kinds else (ast.BinOp, ast.Compare, ast.Call)
    whole = text.say(parent) if isinstance(parent, within) else ""
    for other in others:
        if other not in seen:
            seen.append(other)
            number = f"2**{round(math.log2(other))}" if other > 2**19 and math.log2(other) % 1 == 0 else f"{other:g}"
            said = f"{number} stands where {value:g} belongs".replace("e+0", "e").replace("e+", "e")
            said += f", in {whole}" if whole else ""
            yield "wrong-number", said, 1.6 + 0.1 * len(seen), ast.Constant(other), value, other
    ratio = isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Div, ast.FloorDiv, ast.Mod))
    used = {n.id for n in ast.walk(parent) if ratio and isinstance(n, ast.Name)}  # x / x is a number, not x
    numbers = [x for x in text.numbers if x not in used and text.kinds.get(x, {"number"}) == {"number"}]
    for name in numbers if whole and not isinstance(parent, ast.Call) else ():
        said = f"`{name}` stands where {value:g} belongs, in {whole}"
        yield "wrong-name", said, 2.3, ast.Name(name, ast.Load()), value, name


def _of_operation(text: Text, node: ast.BinOp) -> Iterator[tuple[Any, ...]]:
    w, left, right, op = text.say, node.left, node.right, node.op
    noun = {ast.Add: "the term", ast.Sub: "the term", ast.Mult: "the factor"}.get(type(op), "")
    if noun:
        slug, back = noun.split()[1] + "-missing", text.plain(right)
        if isinstance(op, ast.Sub):
            back = f"-({back})" if " + " in back or " - " in back else f"-{back}"
        where = [f", in {w(node)}" if isinstance(x, ast.Constant) or text.reads[getattr(x, "id", "")] > 1 else ""
                 for x in (left, right)]  # fmt: skip
        yield slug, f"{noun} `{back}` is missing{where[1]}", 0.9 + _weight(right), left, text.plain(right)
        alone = ast.UnaryOp(ast.USub(), right) if isinstance(op, ast.Sub) else right
        yield slug, f"{noun} {w(left)} is missing{where[0]}", 0.95 + _weight(left), alone, text.plain(left)
        if isinstance(op, ast.Sub):
            yield "wrong-result", f"{w(right)} stands where {w(node)} belongs", 1.9, right
        twice = "twice" if noun == "the factor" else "counted twice"
        yield "twice", f"{noun} {w(right)} is there twice" if twice == "twice" else f"{w(right)} is {twice}", 2.0, (
            ast.BinOp(node, op, right))  # fmt: skip
        yield "twice", f"{noun} {w(left)} is there twice" if twice == "twice" else f"{w(left)} is {twice}", 2.1, (
            ast.BinOp(left, ast.Mult() if noun == "the factor" else ast.Add(), node))  # fmt: skip
    elif isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)):
        if isinstance(op, ast.Mod) and text.whole and not text.kinds:
            yield "from-the-end", f"{w(node)} is counted from the end", 1.9, _expr("b - 1 - x", b=right, x=node)
        what = "remainder by" if isinstance(op, ast.Mod) else "division by"
        yield "division-missing", f"the {what} {w(right)} is missing: it is {w(left)} as it stands", 1.0, left
        inside = text.results and id(node) not in text.results
        said = f"{w(right)} stands where {w(node)} belongs" if inside else f"it is {w(right)} instead of {w(node)}"
        yield "dividend-missing", said, 1.8, right
        if isinstance(op, ast.Div):
            yield "twice", f"the division by {w(right)} is there twice", 2.1, ast.BinOp(node, op, right)
            said = f"1 stands where {w(left)} belongs, in {w(node)}"
            yield "dividend-missing", said, 1.8, _expr("1 / b", b=right)
    for other in _OPERATORS.get(type(op), ()):
        said = f"`{_SYMBOLS[other]}` stands where `{_SYMBOLS[type(op)]}` belongs, in {w(node)}"
        if other in _SIGNS and isinstance(op, _SIGNS):
            said = f"{w(right)} has the wrong sign"
        yield "wrong-sign" if "sign" in said else "wrong-operator", said, 1.2 if "sign" in said else 1.7, ast.BinOp(
            left, other(), right), type(op), other, text.plain(right)  # fmt: skip
    if isinstance(op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)):
        slug = "upside-down" if isinstance(op, (ast.Div, ast.FloorDiv)) else "operands-exchanged"
        less = f"{w(right)} stands where {w(node)} belongs", 1.2, right
        turned = f"{w(node)} is the other way round", 1.5, ast.BinOp(right, op, left)
        yield slug, *(less if getattr(left, "value", None) == 1 else turned)
    if isinstance(op, ast.FloorDiv):
        ways = {"a / b": "is not rounded", "-(-a // b)": "is rounded up", "a // b + 1": "is one too large"}
        for way, said in (ways | {"round(a / b)": "is rounded to the nearest"}).items():
            yield "wrong-rounding", f"{w(node)} {said}", 1.4, _expr(way, a=left, b=right), way
    yield from _of_brackets(text, node)
    match node:  # two terms, and two neighbouring axes of an address
        case ast.BinOp(ast.BinOp(rest, ast.Add(), a), ast.Sub(), b) | ast.BinOp(
            ast.BinOp(rest, ast.Sub(), b), ast.Add(), a
        ):
            both, turned_round = ast.BinOp(a, ast.Sub(), b), ast.BinOp(ast.BinOp(rest, ast.Add(), b), ast.Sub(), a)
            yield "term-missing", f"the term {w(both)} is missing", 1.1 + _weight(both), rest
            yield "wrong-sign", f"{w(both)} has the wrong sign", 1.3 + _weight(both), turned_round
        case ast.BinOp(ast.BinOp(ast.BinOp(ast.BinOp(a, ast.Mult(), n), ast.Add(), b), ast.Mult(), c), ast.Add(), d):
            said = f"{w(b)} changes faster than {w(d)}: it is the other way round"
            yield "axes-exchanged", said, 1.3, _expr("(a * c + d) * n + b", a=a, n=n, b=b, c=c, d=d)
    if isinstance(op, (ast.FloorDiv, ast.Mod)) and isinstance(left, ast.BinOp) and isinstance(left.op, ast.FloorDiv):
        yield "division-missing", f"the division by {w(left.right)} is missing", 1.2, ast.BinOp(left.left, op, right)


def _of_brackets(text: Text, node: ast.BinOp) -> Iterator[tuple[Any, ...]]:
    """A factor or a divisor of one term alone that belongs to both, or of both that belongs to one."""
    w, left, right, op = text.say, node.left, node.right, node.op
    if isinstance(op, (ast.Div, ast.FloorDiv)) and isinstance(left, ast.BinOp) and isinstance(left.op, _SIGNS):
        halves: tuple[tuple[ast.expr, ast.expr, ast.expr], ...] = (
            (left.left, left.right, ast.BinOp(ast.BinOp(left.left, op, right), left.op, left.right)),
            (left.right, left.left, ast.BinOp(left.left, left.op, ast.BinOp(left.right, op, right))),
        )
        for part, rest, whole in halves:
            yield "brackets-missing", f"{w(right)} divides {w(part)} alone, and not {w(rest)}", 1.4, whole
    factors = factors_of(node)
    for i, total in enumerate(factors if len(factors) > 1 else ()):  # (a + b) * f * g: f may stand at a or b alone
        if not (isinstance(total, ast.BinOp) and isinstance(total.op, _SIGNS)):
            continue
        for k, factor in enumerate(factors):
            left_over = [x for j, x in enumerate(factors) if j not in (i, k)]
            ends: list[tuple[ast.expr, ast.expr]] = [(total.left, total.right), (total.right, total.left)]
            for mine, rest in ends if k != i else ():
                times = ast.BinOp(mine, ast.Mult(), factor)
                sides = (times, rest) if mine is total.left else (rest, times)
                new = _product([ast.BinOp(sides[0], total.op, sides[1]), *left_over])
                yield "brackets-missing", f"{w(factor)} multiplies {w(mine)} alone, and not {w(rest)}", 1.4, new
    if isinstance(op, _SIGNS):
        for product, other_side in ((right, left), (left, right)):
            factors = factors_of(product) if isinstance(product, ast.BinOp) else []
            for i, factor in enumerate(factors if len(factors) > 1 else ()):
                others = _product(factors[:i] + factors[i + 1 :])
                first, second = (other_side, others) if product is right else (others, other_side)
                said = f"{w(factor)} multiplies {w(other_side)} as well"
                yield "brackets-too-wide", said, 1.6, ast.BinOp(ast.BinOp(first, op, second), ast.Mult(), factor)
                times = ast.BinOp(other_side, ast.Mult(), factor)
                sides = (times, others) if product is right else (others, times)
                said = f"{w(factor)} multiplies {w(other_side)}, and not {w(others)}"
                yield "factor-elsewhere", said, 1.6, ast.BinOp(sides[0], op, sides[1])


def factors_of(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*factors_of(node.left), *factors_of(node.right)]
    return [node]


def _product(factors: Sequence[ast.expr]) -> ast.expr:
    return functools.reduce(lambda x, y: ast.BinOp(x, ast.Mult(), y), factors)


def _of_call(text: Text, node: ast.Call) -> Iterator[tuple[Any, ...]]:
    w = text.say
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    called = name if isinstance(node.func, ast.Attribute) else re.sub(r" < (.*) >$", r"<\1>", text.plain(node.func))
    behind = node.func.value if isinstance(node.func, ast.Attribute) else None  # x of x.sum(), and not tl of tl.sum(x)
    if behind is not None and re.fullmatch(r"\w*|(torch|math|tl)[.\w]*", ast.unparse(behind)):
        behind = None
    if behind is not None:
        alone = ast.Call(ast.Name(name), node.args, node.keywords)
        yield "function-missing", f"`.{ast.unparse(alone)}` is missing behind {w(behind)}", 1.7, behind
    if name in ("min", "max", "maximum", "minimum") and len(node.args) == 2:
        for kept, gone in (node.args, node.args[::-1]):
            if isinstance(gone, ast.Constant) or isinstance(kept, (ast.BinOp, ast.Call)):
                side = "below" if name.startswith("max") else "above"
                it = w(kept) if not text.results else "it"
                yield "limit-missing", f"nothing keeps {it} from going {side} {w(gone)}", 1.0, kept, text.plain(gone)
            else:
                said = f"{w(gone)} does not count: it is {w(kept)} always"
                if text.kinds:
                    said = f"{w(kept)} is taken, whichever of {w(kept)} and {w(gone)} is the {name[:3]}imum"
                yield "always-the-limit", said, 1.1, kept
        either = f"{w(node.args[0])} and {w(node.args[1])}"
        for mixed, how in (("a + b", "added"), ("(a + b) / 2", "averaged"))[: 1 if text.foreign else 2]:
            said = f"{either} are {how} where one of them belongs"
            yield "sum-for-one", said, 1.9, _expr(mixed, a=node.args[0], b=node.args[1])
    elif name in ("min", "max") and len(node.args) > 2:
        for gone in node.args:
            others = [x for x in node.args if x is not gone]
            yield "limit-missing", f"{w(gone)} does not count", 0.95, ast.Call(node.func, others, []), text.plain(gone)
    elif len(node.args) == 1 and not node.keywords and behind is None and not isinstance(node.args[0], ast.Constant):
        said = f"`{called}` is missing: it is {w(node.args[0])} as it stands"
        yield "function-missing", said, 1.3, node.args[0], name
        inner = node.args[0]
        if isinstance(inner, ast.BinOp):
            moved = ast.BinOp(ast.Call(node.func, [inner.left], []), inner.op, inner.right)
            out = f"{_SYMBOLS[type(inner.op)]} {text.plain(inner.right)}"
            said = f"`{out}` stands outside of `{called}`: it belongs inside the {called}"
            yield "outside-of-the-function", said, 1.5, moved
            both = ast.BinOp(ast.Call(node.func, [inner.left], []), inner.op, ast.Call(node.func, [inner.right], []))
            yield "function-of-the-parts", f"`{called}` is taken of each part of {w(inner)}", 1.8, both
    for other in _FUNCTIONS.get(name, ()):
        func = ast.Attribute(node.func.value, other, ast.Load()) if isinstance(node.func, ast.Attribute) else None
        new = ast.Call(func or ast.Name(other, ast.Load()), node.args, node.keywords)
        yield "wrong-function", f"`{other}` stands where `{name}` belongs", 1.5, new, name, other
    if len(node.args) == 2 and name not in ("min", "max", "maximum", "minimum"):
        yield "arguments-exchanged", f"the arguments of `{called}` are exchanged", 1.9, ast.Call(
            node.func, node.args[::-1], node.keywords), name  # fmt: skip
    for i, keyword in enumerate(node.keywords):
        if keyword.arg == "other":
            continue  # of a load: what is undefined is told by itself
        rest = [k for k in node.keywords if k is not keyword]
        said = f"`{keyword.arg}={text.plain(keyword.value)}` is missing, in `{name}`"
        yield "argument-missing", said, 1.6, ast.Call(node.func, node.args, rest)
        if keyword.arg in ("dim", "axis"):
            for other_dim in (0, 1, -1):
                value = [*node.keywords]
                value[i] = ast.keyword(keyword.arg, ast.Constant(other_dim))
                said = f"`{name}` runs along {keyword.arg}={other_dim}: it is {keyword.arg}={text.plain(keyword.value)}"
                yield "wrong-axis", said, 1.3, ast.Call(node.func, node.args, value), other_dim


def _sets(line: ast.stmt, calls: bool = False) -> bool:
    """Whether a line sets something: `x.exp_()` does too; calls: or calls what may do so."""
    if calls and isinstance(line, ast.Expr):
        return True
    call = line.value if isinstance(line, ast.Expr) else None
    in_place = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_")
    return in_place or isinstance(line, (ast.Assign, ast.AugAssign))


def _of_statements(text: Text) -> Iterator[Change]:
    """Lines left out, exchanged with the next, and moved out of a loop."""
    for holder, field, block in blocks(text.tree):
        for at, line in enumerate(block):
            if "_tick" in names_in(line) and not isinstance(line, LOOPS):
                continue
            slot = (holder, field, at)
            if isinstance(line, (ast.Assign, ast.AugAssign, ast.If, ast.Expr, ast.For)):
                said = text.plain(line).splitlines()[0].rstrip(":")
                what = "loop" if isinstance(line, ast.For) else "line"
                gone = ((slot, ast.Pass()),)
                yield Change(f"{what}-missing", f"the {what} `{said}` is missing", 1.6, gone, about=(said,))
            for op in _OPERATORS.get(type(line.op), ()) if isinstance(line, ast.AugAssign) else ():
                new = ast.AugAssign(line.target, op(), line.value)
                said = f"`{_SYMBOLS[op]}=` stands where `{_SYMBOLS[type(line.op)]}=` belongs"
                yield Change("wrong-operator", said, 1.7, ((slot, new),))
            if all(_sets(x, text.foreign) for x in block[at : at + 2]) and at + 1 < len(block):
                said = f"the line `{text.plain(line)}` comes too late"
                yield Change("lines-exchanged", said, 1.7, ((slot, block[at + 1]), ((holder, field, at + 1), line)))
            if isinstance(holder, LOOPS) and isinstance(line, (ast.Assign, ast.AugAssign)):
                for outer, name, lines in blocks(text.tree):
                    if name == "body" and holder in lines:
                        there = (outer, "body", lines.index(holder))
                        edits = ((slot, ast.Pass()), (there, both(holder, line)))
                        yield Change("outside-of-the-loop", _behind_the_loop(text, line), 2.0, edits)


def _behind_the_loop(text: Text, line: ast.Assign | ast.AugAssign) -> str:
    """What it means that a line of a loop stands after it: of a sum, the same as that the sum begins anew."""
    said = f"the line `{text.plain(line)}` stands after the loop"
    target = line.target if isinstance(line, ast.AugAssign) else line.targets[0]
    if isinstance(line, ast.AugAssign) or getattr(target, "id", None) in names_in(line.value):
        return f"only the loop's last turn counts in {text.say(target)}: it begins anew in each, or {said}"
    return f"{said}: it belongs into it"


def _of_results(text: Text) -> Iterator[Change]:
    for node in nodes(text.tree, ast.Return):
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
        for order in itertools.permutations(range(len(parts))) if len(parts) < 5 else ():
            if [*order] != sorted(order):
                new = ast.Tuple([parts[i] for i in order], ast.Load())
                said = "{order}" + ",".join(map(str, order))
                yield Change("exchanged", said, 1.0, (((node, "value", None), new),))
