"""What else goes wrong in a Triton kernel's text: masks, `other`, strides, dtypes, products, what stands in which loop.

As `tensor_changes`, whose changes are made too. `KernelText` is a right kernel whose changes run on
`flashlab.triton_tools.model`: some milliseconds for a change that the first case tells, so that no table is kept.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashlab.check import tensor_changes
from flashlab.check.changes import Change, Edits, Slot, Text, _expr, _slots, factors_of
from flashlab.check.poison import carried
from flashlab.check.trees import LOOPS, both, is_op, names_in, nodes, reads
from flashlab.triton_tools.model import Model, Pointer, launch
from flashlab.triton_tools.portable import jit_function


class KernelText(Text):
    """A right kernel. programs: how many a launch with these arguments has; outputs: the tensors that it writes.

    `compiled` makes a function of the kernel's arguments, in their order, that gives the outputs.
    """

    def __init__(
        self, fn: Callable[..., Any], outputs: tuple[str, ...], programs: Callable[..., int], words: dict[str, str],
        other: Edits | None = None,
    ):  # fmt: skip
        super().__init__(fn, words, other)
        self.outputs, self.programs, self.model = outputs, programs, Model()
        self.buffers: dict[Any, Any] = {}
        triton = SimpleNamespace(cdiv=self.model.cdiv, jit=lambda fn: fn, language=self.model)
        ours: dict[str, Any] = {"tl": self.model, "triton": triton}
        for name, x in self.globals.items():
            if (called := jit_function(x)) is not None:  # a function that the kernel may call
                ours[name] = FunctionType(called.fn.__code__, {**called.fn.__globals__, **ours})
        self.globals = {**self.globals, **ours}
        self.constants = {name for name, kind in fn.__annotations__.items() if "constexpr" in str(kind)}
        self.results = {id(n.args[1]) for n in nodes(self.tree, ast.Call) if _name(n) == "store"}

    @functools.cached_property
    def strides(self) -> dict[str, tuple[str, str]]:
        return strides_of(self.params)

    def are_alike(self, *names: Any) -> bool:
        """A stride is taken for one of the same tensor or axis, or for a size; a size for no stride."""
        one, other = (self.strides.get(name) for name in names)
        if one and other:
            return one[0] == other[0] or one[1] == other[1]
        return not other and (not one or str(names[1]).isupper()) and super().are_alike(*names)

    def launched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            arguments = dict(zip(self.params, given, strict=True))
            programs = self.programs(**arguments)
            self.turns += programs
            results = launch(made, self.model, programs, arguments, self.outputs, self.constants, self.buffers)
            return list(results.values()) if len(results) > 1 else results[self.outputs[0]]

        return run


class HostedText(KernelText):
    """A learner's kernel with a function of its own around it: `compiled` makes a function of the inputs, which `call`
    hands to that function, with the changed kernel in the kernel's place.
    """

    def __init__(self, host: FunctionType, call: Callable[..., Any]):
        found = ((name, jit_function(host.__globals__.get(name))) for name in host.__code__.co_names)
        kernels = {name: kernel for name, kernel in found if kernel}
        if len(kernels) != 1:
            raise TypeError("not one kernel")
        ((self.name, kernel),) = kernels.items()
        self.host, self.call = host, call
        parameters = inspect.signature(kernel.fn).parameters.values()
        self.defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        super().__init__(kernel.fn, (), lambda **_: 1, {name: name for name in kernel.fn.__code__.co_varnames})

    def launched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._run, made, self._around)

    def _around(self, start: Callable[..., None]) -> Callable[..., Any]:
        """The function, which calls `start` where it launches its kernel."""
        host = self.host
        names = {**host.__globals__, self.name: _Started(start)}
        again = FunctionType(host.__code__, names, host.__name__, host.__defaults__, host.__closure__)
        again.__kwdefaults__ = host.__kwdefaults__
        return again

    def _run(self, made: Callable[..., Any], around: Callable[..., Any], *given: Any) -> Any:
        given = tuple(carried(x, x.device) if isinstance(x, torch.Tensor) else x for x in given)  # it may write to them
        inputs = {id(x) for x in given}

        def start(grid: Any, *args: Any, **named: Any) -> None:
            arguments = {**self.defaults, **named, **dict(zip(self.params, args, strict=False))}
            arguments = {name: arguments[name] for name in self.params}
            sizes = [*map(operator.index, grid(arguments) if callable(grid) else grid)]  # a tensor is none
            self.turns += math.prod(sizes)
            new = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and id(x) not in inputs}
            written = launch(made, self.model, sizes, arguments, tuple(new), self.constants)
            for name, x in new.items():
                x.copy_(written[name])

        return self.call(around(start), *given)


class HostText(Text):
    """The function around a learner's kernel, whose changes run with that kernel as it is."""

    def __init__(self, kernel: HostedText):
        super().__init__(kernel.host, {name: name for name in kernel.host.__code__.co_varnames})
        self.kernel, self.made, self.foreign = kernel, kernel.function(kernel.tree)[0], True
        self.started = _Started(print)
        self.globals = {**self.globals, kernel.name: self.started}

    def launched(self, made: Any) -> Callable[..., Any]:
        def around(start: Callable[..., None]) -> Any:
            self.started.start = start
            return made

        return functools.partial(self.kernel._run, self.made, around)


def strides_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Of each stride its tensor and its axis, where they are named alike: stride_qm, q_stride_m, sqm or q_m."""
    found: dict[str, tuple[Any, ...]] = {}
    for pattern in (r"stride_(\w+)(\w)", r"(\w+)_stride_?(\w+)", r"s_?([a-z])(\w)", r"([a-zA-Z]+)_(\w\w?)"):
        named = {name: m.groups() for name in names if (m := re.fullmatch(pattern, name))}
        axes: dict[str, set[str]] = defaultdict(set)
        for tensor, axis in named.values():
            axes[tensor].add(axis)
        of = {x for x in axes if any(len(axes[x] & axes[y]) > 1 for y in axes if y != x)}
        if found := {name: x for name, x in named.items() if x[0] in of}:
            break
    return {name: ("", name) for name in names if name.startswith("stride_")} | found


@dataclass
class _Started:
    """What stands in a kernel's place: `kernel[grid](...)` is start(grid, ...)."""

    start: Callable[..., None]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.start, grid)


def _name(node: ast.AST) -> str:
    func = node.func if isinstance(node, ast.Call) else node
    return func.attr if isinstance(func, ast.Attribute) else ""


def kinds_of(text: KernelText, inputs: Sequence[tuple[Any, ...]]) -> dict[str, set[Any]]:
    """What each name of the text is while it runs: a number, a pointer, numbers of one axis, a tile."""
    return tensor_changes.kinds_of(text, inputs[:1], _kind)


def _kind(value: Any) -> Any:
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and not value.ndim):
        return "number"
    if isinstance(value, np.ndarray):
        return ("tile", value.ndim, value.dtype.kind)
    return ("pointer", np.ndim(value.at)) if isinstance(value, Pointer) else type(value).__name__


def _loaded(node: ast.Call) -> str:
    return next((n.id for n in nodes(node.args[0], ast.Name) if "ptr" in n.id), "it")


def _with(node: ast.Call, **parts: Any) -> ast.Call:
    new = copy.copy(node)
    for name, value in parts.items():
        setattr(new, name, value)
    return new


def of_expression(text: Text, slot: Slot, node: ast.expr) -> Iterator[tuple[Any, ...]]:
    """(slug, words, cost, new node, key...) of one expression."""
    parent, w = slot[0], text.say
    yield from tensor_changes.of_expression(text, slot, node)
    new: ast.expr
    if isinstance(parent, ast.Call) and _name(parent) == "dot" and node in parent.args[:2]:
        new = ast.Attribute(node, "T", ast.Load())
        if not (isinstance(node, ast.Attribute) and node.attr == "T"):
            yield "transposed", f"{w(node)} is transposed", 1.9, new, "to T"
        yield "rounded", f"{w(node)} is rounded to 16 bits before `dot`", 1.9, _expr(
            "x.to(tl.float16).to(x.dtype)", x=node)  # fmt: skip
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE)):
        always = _expr("(x < y) | (x >= y)", x=node.left, y=node.comparators[0])
        yield "condition-missing", f"{w(node)} is not asked", 1.3, always
    if isinstance(node, ast.Attribute) and node.attr == "float32":
        yield "low-precision", f"`tl.float16` stands where {w(node)} belongs", 1.8, _expr("tl.float16"), "16"
    if not isinstance(node, ast.Call):
        return
    name = _name(node)
    keywords = {k.arg: k.value for k in node.keywords}
    if getattr(node.func, "id", "") == "float" and "inf" in ast.unparse(node):
        for value in (0.0, -1e4, -1e6, -1e9, -1e30, 1e9) if "-" in ast.unparse(node) else (0.0, -1000.0, 1.0):
            said = f"{f'a number such as {value:g}' if value else '0'} stands where {w(node)} belongs"
            yield "finite-number", said, 1.4, ast.Constant(value), "inf", value
        turned = "inf" if "-" in ast.unparse(node) else "-inf"
        yield "wrong-sign", f"{w(node)} has the wrong sign", 1.4, _expr(f"float('{turned}')"), "inf", turned
    if name in ("load", "store") and "mask" in keywords:
        rest = [k for k in node.keywords if k.arg not in ("mask", "other")]
        said = f"`{_loaded(node)}` is {'read' if name == 'load' else 'written'} without a mask"
        yield "mask-missing", f"{said}, or with one that is always true", 1.0, _with(node, keywords=rest)
    if "other" in keywords:
        right = ast.unparse(keywords["other"])
        for mine in ("1.0", "-1000.0", "float('-inf')", "float('inf')"):
            others = [k if k.arg != "other" else ast.keyword("other", _expr(mine)) for k in node.keywords]
            said = f"`other` is {mine}, where `{_loaded(node)}` is loaded: it is {right}"
            if mine != right:
                yield "wrong-other", said, 1.6, _with(node, keywords=others), "other", mine
    if name == "store":
        new = _with(node, func=_expr("tl.atomic_add"))
        yield "atomic-for-store", "`atomic_add` adds to what is there: `store` it", 1.5, new, "store", "atomic_add"
    if name == "dot":
        if "input_precision" in keywords:
            rest = [k for k in node.keywords if k.arg != "input_precision"]
            said = f"`input_precision={text.plain(keywords['input_precision'])}` is missing, in {w(node)}"
            yield "tf32", said, 1.5, _with(node, keywords=rest), "dot", "tf32"
        if len(node.args) == 3:
            yield "overwritten", f"{w(node.args[2])} is not added to: each turn begins anew", 1.2, _with(
                node, args=node.args[:2])  # fmt: skip
            said = f"{w(node.args[2])} is added to what `dot` has added it to: it doubles in every turn"
            yield "added-twice", said, 1.2, _expr("x + y", x=node.args[2], y=node), "twice"
            said = f"the sum {w(node)} is rounded to 16 bits in every turn of the loop"
            yield "rounded-in-every-turn", said, 1.5, _expr("x.to(tl.float16).to(tl.float32)", x=node), "per turn"
        swapped = _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        yield "arguments-exchanged", "the operands of `dot` are exchanged", 1.9, swapped
    if name == "where" and len(node.args) == 3:
        asked, yes, no = node.args
        yield "mask-missing", f"{w(asked)} is not asked, in `where`", 0.9, yes  # likelier than one that is always true
        yield "inverted", f"{w(asked)} is asked the other way round", 1.3, _with(node, args=[asked, no, yes])
    other = {"sum": ("max",), "max": ("sum", "min"), "exp": ("log",)}.get(name, ())
    for better in other if name else ():
        new = _with(node, func=ast.Attribute(_expr("tl"), better, ast.Load()))
        yield "wrong-function", f"`{better}` stands where `{name}` belongs", 1.7, new, name, better
    if name == "sum" and node.args:
        yield "absolute-values", f"absolute values are summed: {w(node.args[0])} keeps its signs", 1.9, _with(
            node, args=[_expr("tl.abs(x)", x=node.args[0]), *node.args[1:]])  # fmt: skip
        yield "mean", "the mean is taken: it is the sum", 1.7, _expr("x / y.shape[1]", x=node, y=node.args[0])


def further(text: Text) -> Iterator[Change]:
    """Of a learner's text: in one line, all strides of one tensor for those of another; a result not moved on or
    rescaled in the loop, a parameter that nothing reads, an edge without the difference of two lengths.
    """
    yield from _of_loops(text)
    yield from _of_edges(text)
    yield from _of_walks(text)
    yield from _of_beginnings(text)
    known: dict[str, tuple[str, str]] = getattr(text, "strides", {})
    there = {place: name for name, place in known.items()}
    tensors = sorted({of for of, _ in there if of})
    for line in nodes(text.tree, ast.Assign, ast.AugAssign, ast.Expr):
        at = [(slot, node.id) for slot, node in _slots(line) if isinstance(node, ast.Name) and node.id in known]
        for mine, other in itertools.permutations(tensors, 2):
            own = [(slot, there.get((other, known[name][1]), "")) for slot, name in at if known[name][0] == mine]
            edits = [(slot, ast.Name(name, ast.Load())) for slot, name in own]
            if len(edits) > 1 and all(name for _, name in own):
                said = f"the strides of {mine.upper()} stand where those of {other.upper()} belong, in {text.say(line)}"
                yield Change("strides-of-another", said, 1.5, tuple(edits))


def _of_edges(text: Text) -> Iterator[Change]:
    """An edge without the difference of two lengths, a product without what nobody reads, an index not divided."""
    fixed: set[str] = getattr(text, "constants", set())
    numbers = {x for x in text.kinds if text.kinds[x] == {"number"} or x in fixed}
    found: list[tuple[Slot, Any]] = [*_slots(text.tree)]
    unread = [x for x in text.params if x not in {*reads(text.tree)}]
    divided = {ast.unparse(n): n for _, n in found if is_op(n, ast.FloorDiv)}

    def edge(parent: ast.AST) -> bool:
        compared = isinstance(parent, ast.Compare) and not isinstance(parent.ops[0], (ast.Eq, ast.NotEq))
        return compared or (isinstance(parent, ast.Call) and _name(parent) in ("minimum", "maximum"))

    edges = [(slot, node) for slot, node in found if edge(slot[0])]
    at_edges = {name for _, node in edges for name in names_in(node)}
    strides = getattr(text, "strides", {})
    sizes = [x for x in text.params if x in (at_edges | {*unread}) & numbers - fixed and x not in strides]
    last = {x: (text.assigned.get(x) or [None])[-1] for x in text.locals if x in numbers}
    own = [x for x, value in last.items() if isinstance(getattr(value, "op", None), (ast.Add, ast.Sub))
           and names_in(value) <= {*text.params}]  # fmt: skip
    pairs = [f"{a} - {b}" for a, b in itertools.permutations(sizes, 2)]
    shifts = [*own, *([x for x in pairs if x in text.unchanged] or pairs)]  # one that stands elsewhere, if any does
    for slot, node in edges:
        for shift in shifts if not isinstance(node, ast.Constant) else ():
            cost = 0.3 + 0.1 * (slot[1] == "left")
            yield Change("edge", "", cost, ((slot, ast.BinOp(node, ast.Add(), _expr(shift))),))
    yield from _of_calls(text, unread)
    yield from _of_factors(found, text, unread, {*strides})
    for slot, node in found:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            yield Change("rounded-up", "", 1.0, ((slot, _expr("tl.cdiv(a, b)", a=node.left, b=node.right)),))
        if isinstance(slot[0], ast.Assign) and slot[1] == "value":
            for name in (x for x in text.locals if ("tile", 2, "b") in text.kinds.get(x, ()) and not text.reads[x]):
                hidden = _expr(f'tl.where({name}, x, float("-inf"))', x=node)
                yield Change("mask", "", 0.1, ((slot, hidden),))
        if not isinstance(node, ast.Name) or node.id not in numbers:
            continue
        factor = is_op(slot[0], ast.Mult)
        for new in (x for x in divided.values() if factor and getattr(x.left, "id", "") == node.id):
            yield Change("divisor", "", 0.9, ((slot, new),))
        others = {*unread} & numbers | ((fixed - {node.id}) if factor and node.id in fixed else set())
        for name in sorted(others):
            yield Change("wrong-name", "", 0.5 if name in unread else 1.0, ((slot, _expr(name)),))
    yield from _of_masks(text)


def _of_factors(
    found: Sequence[tuple[Slot, Any]], text: Text, unread: Sequence[str], strides: set[str]
) -> Iterator[Change]:
    """What nobody reads in the place of two factors, or a stride of these as a factor that is missing."""
    for slot, node in found:
        many = factors_of(node) if is_op(node, ast.Mult) else []
        for name, (i, k) in itertools.product(unread, itertools.combinations(range(len(many)), 2)):
            rest = [x for at, x in enumerate(many) if at not in (i, k)]
            new = functools.reduce(lambda a, b: ast.BinOp(a, ast.Mult(), b), [*rest, _expr(name)])
            both = f"{text.plain(many[i])} * {text.plain(many[k])}"
            words = f"`{both}` stands where `{name}` belongs, in {text.say(node)}"
            yield Change("strides-of-another", words, 0.8, ((slot, new),))
        term = is_op(slot[0], ast.Add) and isinstance(node, (ast.Subscript, ast.Name, ast.Call))
        for name in (x for x in unread if term and x in strides):
            yield Change("more", "", 0.6, ((slot, ast.BinOp(node, ast.Mult(), _expr(name))),))


def _of_calls(text: Text, unread: Sequence[str]) -> Iterator[Change]:
    """What a product, a condition or a maximum lacks."""
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Call) and _name(node) == "dot":
            for name in unread:
                yield Change("more", "", 1.0, ((slot, ast.BinOp(node, ast.Mult(), _expr(name))),))
            matrices = [x for x, kinds in text.kinds.items() if ("tile", 2, "f") in kinds]
            for i, name in itertools.product((0, 1), matrices):
                if i < len(node.args):
                    yield Change("wrong-name", "", 0.9, (((node, "args", i), _expr(f"tl.trans({name})")),))
            if not any(x.arg == "input_precision" for x in node.keywords):
                exact = [*node.keywords, ast.keyword("input_precision", ast.Constant("ieee"))]
                words = f'`input_precision="ieee"` is missing in {text.say(node)}: float32 is rounded to TF32'
                yield Change("tf32", words, 0.4, ((slot, _with(node, keywords=exact)),))
            for name in (x for x, kinds in text.kinds.items() if kinds == {"float"}):
                yield Change("more", "", 1.0, ((slot, ast.BinOp(node, ast.Mult(), _expr(name))),))
        if isinstance(node, ast.Call) and _name(node) in ("exp", "exp2") and len(node.args) == 1:
            rows = (x for x, kinds in text.kinds.items() if ("tile", 1, "f") in kinds)
            for less in (f"x - {name}{axes}" for name in rows for axes in ("[:, None]", "[None, :]")):
                yield Change("more", "", 1.2, (((node, "args", 0), _expr(less, x=node.args[0])),))
        if isinstance(node, ast.Call) and _name(node) == "where":
            for i in (i for i, x in enumerate(node.args) if isinstance(x, ast.Constant)):
                yield Change("finite-number", "", 0.1, (((node, "args", i), _expr('float("-inf")')),))
        if isinstance(node, ast.Call) and _name(node) == "max" and node.args:
            if _name(node.args[0]) == "max":
                yield Change("more", "", 0.8, ((slot, node.args[0]),))


def _of_walks(text: Text) -> Iterator[Change]:
    """Where a loop ends: one later, a block later, not before or not after a length."""
    fixed: set[str] = getattr(text, "constants", set())
    numbers = [x for x in text.params if text.kinds.get(x) == {"number"} and x not in fixed]
    lengths = [x for x in numbers if x not in getattr(text, "strides", {})]
    heads = [x.iter for x in nodes(text.tree, ast.For) if isinstance(x.iter, ast.Call)]
    heads += [x.test for x in nodes(text.tree, ast.While)]
    read = {name for head in heads for name in names_in(head)} - {*text.params}
    begun = [*heads, *(x for name in read for x in text.assigned.get(name, ()) if x)]
    here = Counter(x.id for value in begun for x in nodes(value, ast.Name))
    asked = {name for n in nodes(text.tree, ast.Compare) for name in names_in(n)} - {*here}
    read = {x for x in {*here} - {*text.params} if here[x] == text.reads[x]}  # by a mask too: then it is no end alone
    ends = {id(x) for name in read for x in text.assigned.get(name, ()) if x}
    ends |= {id(x) for value in begun for call in nodes(value, ast.Call) for x in call.args}
    for slot, node in _slots(text.tree):
        less = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Constant)
        if id(node) not in ends or isinstance(node, ast.Constant) or less:  # it may be left out
            continue
        for more in ("1", *sorted(fixed & {*text.reads}), "-1"):
            yield Change("edge", "", 0.5 + 0.3 * (more == "-1"), ((slot, _expr(f"x + {more}", x=node)),))
        for name, way in itertools.product(lengths, ("maximum", "minimum")):
            if name not in ast.unparse(node):
                said = f"`{name}` is forgotten where a loop ends: `tl.{way}({text.plain(node)}, {name})` belongs there"
                cost = 0.8 if name in asked and way == "maximum" else 1.3
                yield Change("walks-to", said, cost, ((slot, _expr(f"tl.{way}(x, {name})", x=node)),))


def _of_beginnings(text: Text) -> Iterator[Change]:
    """What a loop makes of itself, from another first value."""
    names = [x for loop in nodes(text.tree, *LOOPS) for x in nodes(loop, ast.Name)]
    inside = {x.id for x in names if isinstance(x.ctx, ast.Store)}
    tiles = {x for x, kinds in text.kinds.items() if any(isinstance(k, tuple) and k[0] == "tile" for k in kinds)}
    for line in (x for x in text.tree.body if isinstance(x, ast.Assign)):
        name = getattr(line.targets[0], "id", "")
        for first in ("0.0", "1.0", 'float("-inf")') if name in inside & tiles else ():
            said = f"`{name}` begins at `{text.plain(line.value)}`, and should at {first}"
            new = _expr(f"tl.where(x == x, {first}, {first})", x=line.value)
            yield Change("begins-elsewhere", said, 0.9, (((line, "value", None), new),))


def _of_masks(text: Text) -> Iterator[Change]:
    """A condition that another mask has, beside those of a mask or in the place of one."""
    masks = [x for x in nodes(text.tree, ast.keyword) if x.arg == "mask"]
    parts = {ast.unparse(x): x for mask in masks for x in _conditions(mask.value)}
    turned = {"[:, None]": "[None, :]", "[None, :]": "[:, None]"}
    for said, (here, there) in itertools.product([*parts], turned.items()):
        if said.endswith(here) and said.count("[") == 1:
            other = said.replace(here, there)
            parts.setdefault(other, _expr(other))
    for mask in masks:
        own = [ast.unparse(x) for x in _conditions(mask.value)]
        for new in (x for said, x in parts.items() if said not in own):
            yield Change("mask", "", 0.9, (((mask, "value", None), ast.BinOp(mask.value, ast.BitAnd(), new)),))
            for slot, node in _slots(mask):
                if ast.unparse(node) in own:
                    yield Change("mask", "", 1.0, ((slot, new),))


def _conditions(mask: ast.expr) -> list[ast.expr]:
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        return [*_conditions(mask.left), *_conditions(mask.right)]
    return [mask]


def _is_pointer(text: Text, name: str) -> bool:
    return any("ptr" in x.lower() for value in text.assigned.get(name, ()) if value for x in names_in(value))


def _moved_on(text: Text, loop: Any, at: int, line: ast.AugAssign, name: str) -> Iterator[Change]:
    """Pointers that stay where others go on."""
    known = getattr(text, "strides", {})
    strides = [x.id for x in nodes(line.value, ast.Name) if x.id in known]
    own = {x for value in text.assigned.get(name, ()) if value for x in names_in(value) if x in known}
    for stride in sorted(own) if len(strides) == 1 else ():
        step = ast.parse(ast.unparse(line.value).replace(strides[0], stride), mode="eval").body
        moved = ast.AugAssign(ast.Name(name, ast.Store()), line.op, step)
        said = f"`{name}` is not moved on, as `{line.target.id}` is"  # type: ignore[union-attr]
        yield Change("never-moved", said, 0.2, (((loop, "body", at), both(line, moved)),))


def _of_loops(text: Text) -> Iterator[Change]:
    """Pointers that a loop never moves; what is added to without a factor that the loop makes."""
    axes = {x: max((k[1] for k in kinds if isinstance(k, tuple) and k[0] == "tile"), default=0)
            for x, kinds in text.kinds.items()}  # fmt: skip
    for loop in nodes(text.tree, *LOOPS):
        inside = [n for line in loop.body for n in nodes(line, ast.Name)]
        made = {n.id for n in inside if isinstance(n.ctx, ast.Store)}
        read = {n.id for n in inside} - made - {*text.params, *text.globals}
        for at, step in enumerate(loop.body):
            if isinstance(step, ast.AugAssign) and isinstance(step.target, ast.Name):
                for name in sorted(x for x in read if _is_pointer(text, x) and _is_pointer(text, step.target.id)):
                    yield from _moved_on(text, loop, at, step, name)
        for line in (x for x in loop.body if isinstance(x, ast.Assign)):
            name = getattr(line.targets[0], "id", "")
            for slot, node in _slots(line):
                if not (isinstance(node, ast.Name) and node.id == name and axes.get(name)):
                    continue
                for factor in sorted(x for x in made if axes.get(name, 0) >= axes.get(x, 0) > 0 and x != name):
                    behind = "[:, None]" * (axes[name] - axes[factor])
                    said = f"the factor `{factor}{behind}` is missing at `{name}`, in {text.say(line)}"
                    new = _expr(f"x * {factor}{behind}", x=node)
                    yield Change("not-rescaled", said, 0.6, ((slot, new),))


def of_statements(text: Text) -> Iterator[Change]:
    """The walk's begin and end; lines around the loop that are made lines of it; results in each other's place."""
    yield from tensor_changes.of_statements(text)
    stores = [n for n in nodes(text.tree, ast.Call) if _name(n) == "store"]
    for a, b in itertools.combinations(stores, 2):
        said = f"what is stored at `{_loaded(a)}` and at `{_loaded(b)}` is exchanged"
        yield Change("exchanged", said, 1.4, (((a, "args", 1), b.args[1]), ((b, "args", 1), a.args[1])))
    for loop in [n for n in text.tree.body if isinstance(n, ast.For)]:
        at = text.tree.body.index(loop)
        for i, line in enumerate(text.tree.body):
            if i == at or not isinstance(line, (ast.Assign, ast.AugAssign, ast.Expr)):
                continue
            body = [loop.body[0], line, *loop.body[1:]] if i < at else [*loop.body, line]
            turn = ast.For(loop.target, loop.iter, body, [])
            said = text.plain(line)
            said = f"the line `{said if len(said) < 60 else said[:57] + '...'}` stands in the loop: it belongs " + (
                "before it" if i < at else "after it")  # fmt: skip
            edits: list[tuple[Slot, Any]] = [((text.tree, "body", at), turn)]
            edits += [((text.tree, "body", i), ast.Pass())] if i > at else []
            yield Change("in-every-turn", said, 1.9, tuple(edits))
