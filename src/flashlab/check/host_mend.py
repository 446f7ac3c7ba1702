"""Which single change of the functions around a learner's kernels makes all right? `mend`, for an answer of several.

The kernels run as they are, on `flashlab.triton_tools.model`, where the functions and classes of the learner's cell
launch them; the text of one function after the other is changed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from flashlab.check import mend, tensor_changes
from flashlab.check.changes import Change, Text, Variants, _expr, _slots, changes
from flashlab.check.failed import CheckFailed
from flashlab.check.kernel_changes import KernelText, _Started
from flashlab.check.own_changes import of_grids, own_changes
from flashlab.check.trees import names_in, nodes, plain
from flashlab.triton_tools.model import launch
from flashlab.triton_tools.portable import jit_function

_VAGUE = ("wrong-dq", "wrong-dk", "wrong-dv", "wrong-value", "out-of-bounds")
_STORES = ("tl.store", "tl.atomic")
_SECONDS = 6.0  # of one core: a trial takes some 4 ms
Run = Callable[[Callable[..., Any], Any], Sequence[torch.Tensor]]


class _Part(Text):
    """A function of the cell; `compiled` makes a function of a case, with the changed one in its place."""

    def __init__(self, fn: FunctionType, put: Callable[[Any], Any], run: Callable[[Any], Any]):
        super().__init__(fn, {name: name for name in fn.__code__.co_varnames + fn.__code__.co_cellvars})
        self.put, self.run, self.foreign = put, run, True
        self.globals = {**self.globals, **inspect.getclosurevars(fn).nonlocals}

    def launched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def run(case: Any) -> Any:
            before = self.put(made)
            try:
                return self.run(case)
            finally:
                self.put(before)

        return run


@contextlib.contextmanager
def mended(answer: Callable[..., Any], run: Run, cases: Mapping[str, Any], **instead: Any) -> Iterator[None]:
    """Have the change that makes an answer right told before what a check says of it.

    Args:
        run: (the answer, a case) -> its results. cases: what is right for each: (case, results).
        instead: what stands, in the cell's namespace, in the place of slow functions.
    """
    try:
        yield
    except Exception as failed:
        said = ""
        if getattr(failed, "diagnosis", "out-of-bounds") in _VAGUE:
            with mend.quietly():
                said = _found(inspect.unwrap(getattr(answer, "answer", answer)), run, [*cases.values()], instead)
        if not said:
            raise
        more = {x: getattr(failed, x, None) for x in ("diagnosis", "case")}
        sentence = f"{said}: the rest is right.\n{failed}"
        raise CheckFailed(sentence, diagnosis=more["diagnosis"] or "own-slip", case=more["case"]) from failed.__cause__


def _found(answer: Any, run: Run, cases: Sequence[Any], instead: Mapping[str, Any]) -> str:
    names, file = answer.__globals__, answer.__code__.co_filename
    called = {x for _, _, fn in _functions(names, file) for x in fn.__code__.co_names}
    before = {x: names[x] for x in called & {*names} if x in instead or jit_function(names[x])}
    names.update({x: instead.get(x) or _Started(_on_model(jit_function(old).fn)) for x, old in before.items()})
    try:
        return _first([*_parts(names, file, lambda case: run(names[answer.__name__], case[0]))], cases)
    finally:
        names.update(before)


def _first(parts: Sequence[_Part], cases: Sequence[Any]) -> str:
    until, priced = time.process_time() + _SECONDS, []
    if not parts or all(_gives(parts[0].compiled(), case) for case in cases):
        return ""  # what is wrong shows elsewhere
    set_to = [x for part in parts for x in nodes(part.tree, ast.Attribute) if isinstance(x.ctx, ast.Store)]
    options = {plain(x): _expr(plain(x)) for x in set_to if plain(x).startswith("ctx.")}
    for part in parts:
        own = options if "ctx" in part.params else {}
        part.kinds = tensor_changes.kinds_of(part, [(case,) for case in cases[:1]])
        made = [*changes(part, {}), *of_grids(part), *_of_hosts(part, own), *own_changes(part, (), {}, False)]
        variants = Variants(part, made := [c for c in made if c.slug not in mend._BY_CHANCE and not mend._of_a_tile(c)])
        priced += [(mend._price(c, mend.UNKNOWN), c.slug, (part, c, x)) for c in made if (x := variants.chosen(c))]
    for part, change, one in mend.in_turn(priced):
        if time.process_time() > until:
            break
        if (words := mend.said(part, change)) and all(_gives(one, case) for case in cases):
            return words + mend.which(part, change, words)
    return ""


def _gives(one: Callable[..., Any], case: Any) -> bool:
    with contextlib.suppress(Exception):
        pairs = zip(one(case), case[1], strict=True)
        return all(torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-4) for x, y in pairs)
    return False


def _functions(names: dict[str, Any], file: str) -> Iterator[tuple[Any, str, FunctionType]]:
    """Of the cell and its classes: where each is found, under which name."""
    for name, x in list(names.items()):
        inner = {k: y.__func__ for k, y in vars(x).items() if isinstance(y, staticmethod)} if inspect.isclass(x) else {}
        for owner, k, fn in [(names, name, x), *((x, k, y) for k, y in inner.items())]:
            if isinstance(fn, FunctionType) and fn.__code__.co_filename == file:
                yield owner, k, fn


def _parts(names: dict[str, Any], file: str, run: Callable[[Any], Any]) -> Iterator[_Part]:
    def put(owner: Any, name: str, made: Any) -> Any:
        if isinstance(owner, dict):
            before, owner[name] = owner[name], made
            return before
        before = inspect.getattr_static(owner, name)
        setattr(owner, name, made if isinstance(made, staticmethod) else staticmethod(made))
        return before

    for owner, name, fn in _functions(names, file):
        with contextlib.suppress(OSError, TypeError, SyntaxError, AssertionError):
            yield _Part(fn, functools.partial(put, owner, name), run)


def _on_model(kernel: FunctionType) -> Callable[..., None]:
    """(grid, arguments) -> None: runs a kernel on the model, and writes what it stores."""
    text = KernelText(kernel, (), lambda **_: 1, {})
    made, _ = text.function(text.tree)
    calls = [n for n in nodes(text.tree, ast.Call) if plain(n.func).startswith(_STORES)]
    stored = {name for n in calls for name in names_in(n.args[0])}
    for _ in text.locals:
        stored |= {x for name in stored for value in text.assigned.get(name, ()) if value for x in names_in(value)}
    defaults = {x.name: x.default for x in inspect.signature(kernel).parameters.values() if x.default is not x.empty}

    def start(grid: Any, *args: Any, **named: Any) -> None:
        arguments = {**defaults, **named, **dict(zip(text.params, args, strict=False))}
        arguments = {name: arguments[name] for name in text.params}
        sizes = [*map(operator.index, grid(arguments) if callable(grid) else grid)]
        text.turns += math.prod(sizes)
        into = {name: x for name, x in arguments.items() if name in stored and isinstance(x, torch.Tensor)}
        for name, x in launch(made, text.model, sizes, arguments, tuple(into), text.constants).items():
            into[name].copy_(x)

    return start


def _of_hosts(text: Text, options: Mapping[str, ast.expr]) -> Iterator[Change]:
    """A tensor that wants other strides, a size that a grid or a loop lacks, an option that is not taken, or that is
    handed on as something else.
    """
    numbers = [x for x, kinds in text.kinds.items() if kinds == {"number"}]
    tensors = [x for x, kinds in text.kinds.items() if any(isinstance(kind, tuple) for kind in kinds)]
    sizes = [x for n in nodes(text.tree, ast.Subscript) for x in ast.walk(n.slice)]
    named = {x.id for x in sizes if isinstance(x, ast.Name)} & {*numbers}
    sizes += [x for name in named for value in text.assigned.get(name, ()) if value for x in ast.walk(value)]
    grids = {*map(id, sizes)}
    for slot, node in _slots(text.tree):
        for name in numbers if id(node) in grids and isinstance(node, (ast.BinOp, ast.Call, ast.Name)) else ():
            yield Change("more", "", 0.8, ((slot, _expr(f"x * {name}", x=node)),))
            if isinstance(node, ast.Name) and node.id in numbers:
                yield Change("wrong-name", "", 0.5, ((slot, _expr(name)),))
        if isinstance(node, ast.Name) and node.id in tensors:
            for other in (x for x in tensors if x != node.id and text.kinds[x] & text.kinds[node.id]):
                yield Change("wrong-name", "", 1.2, ((slot, ast.Name(other, ast.Load())),))
            yield Change("more", "", 0.6, ((slot, _expr("x.contiguous()", x=node)),))
        handed = slot[1] == "args" and isinstance(node, (ast.Constant, ast.Name, ast.BinOp))  # only calls have these
        for option in (x for said, x in options.items() if handed and said != plain(node)):
            yield Change("wrong-name", "", 0.7 if isinstance(node, ast.Constant) else 1.4, ((slot, option),))
        if isinstance(slot[0], ast.Assign) and slot[1] == "value":
            for name in (x for x in text.params if x not in tensors):
                yield Change("more", "", 0.0, ((slot, _expr(f"{name} if {name} is not None else x", x=node)),))
        if isinstance(node, ast.Constant) and plain(getattr(slot[0], "func", node)) == "range":
            for name, axis in itertools.product((x for x in text.params if x in tensors), (0, 1)):
                yield Change("wrong-number", "", 0.8, ((slot, _expr(f"{name}.shape[{axis}]")),))
        if isinstance(slot[0], ast.Assign) and isinstance(node, ast.Name) and node.id in numbers:
            for other in numbers:
                yield Change("more", "", 1.2, ((slot, _expr(f"{other} // x", x=node)),))
