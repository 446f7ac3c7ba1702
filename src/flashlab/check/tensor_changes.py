"""What else goes wrong in a text of tensors and loops: axes, shapes, dtypes, first values, where a loop ends.

For `flashlab.check.changes.changes`: each function gives (slug, words, cost, new node, key...) of one expression, or
whole changes of the statements.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from flashlab.check.changes import CHANGED, Change, Slot, Text, _at, _expr
from flashlab.check.code_changes import of_code, of_lines
from flashlab.check.trees import is_op, nodes

_REDUCTIONS = {
    "sum": ("mean", "amax", "prod"), "amax": ("amin", "mean", "sum"), "max": ("min", "mean", "sum"),
    "logsumexp": ("amax", "sum", "mean"), "mean": ("sum",), "median": ("max",),
}  # fmt: skip
_OPPOSITE = {f"{a}{end}": f"{b}{end}" for x, y in (("mul", "div"), ("add", "sub")) for a, b in ((x, y), (y, x))
             for end in ("", "_")}  # fmt: skip
_CASTS = ("float", "double", "half", "to", "unsqueeze", "contiguous")


def of_expression(text: Text, slot: Slot, node: ast.expr) -> Iterator[tuple[Any, ...]]:
    parent, w = slot[0], text.say
    if isinstance(node, ast.BoolOp):
        yield from of_code(text, node)
    match node:
        case ast.Subscript(value=value, slice=ast.Tuple(elts=parts)) if any(_is_none(x) for x in parts):
            how = f"[{', '.join(map(ast.unparse, parts))}]"
            yield "axis-missing", f"`{how}` is missing behind {w(value)}", 1.2, value, how
            others = [x for x in parts if not _is_none(x)]
            for at in range(len(parts)) if len(others) + 1 == len(parts) else ():
                axes = [*others[:at], ast.Constant(None), *others[at:]]
                new = ast.Subscript(value, ast.Tuple(axes, ast.Load()), ast.Load())
                if not _is_none(parts[at]):
                    yield "wrong-axis", f"{w(new)} stands where {w(node)} belongs", 1.4, new, how, at
        case ast.Slice() | ast.Subscript(slice=ast.Slice()):
            yield from _of_slices(text, node)
        case ast.Attribute(value=value, attr="T" | "mT"):
            yield "not-transposed", f"{w(value)} is not transposed", 1.3, value, "T"
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as both, right=right):
            for alone, gone in ((left, right), (right, left)):
                yield "condition-missing", f"the condition {w(gone)} is missing", 0.85, alone
            other_way = ast.BitOr() if isinstance(both, ast.BitAnd) else ast.BitAnd()
            yield "wrong-operator", f"the conditions are joined by {'|&'[isinstance(other_way, ast.BitAnd)]}", 1.5, (
                ast.BinOp(left, other_way, right))  # fmt: skip
            yield "inverted", f"{w(node)} is asked the other way round", 1.2, ast.UnaryOp(ast.Invert(), node)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Attribute(attr="inf")):
            for finite in (0.0, -1.0, -1e4, -1e5, -1e6, -1e9, -1e30, -3.4e38):
                yield "finite-number", f"{finite:g} stands where -inf belongs", 1.4, ast.Constant(finite), id(node)
        case ast.Call(func=ast.Name(id=name), args=[first, _]) if name in text.globals and type(parent) is not ast.Expr:
            yield "function-missing", f"`{name}` is missing: {w(first)} is taken as it stands", 1.3, first, name
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            yield from _of_method(text, node, owner, name)
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult) and not isinstance(node, ast.Attribute):
        yield "transposed", f"{w(node)} is transposed", 1.9, ast.Attribute(node, "mT", ast.Load()), "to T"
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("exp"):
        yield "squared", f"{w(node)} counts twice, as its square", 1.8, _expr("x * x", x=node)
        yield "root", f"the square root of {w(node)} is taken", 2.2, _expr("x ** 0.5", x=node)
        yield "always-1", f"{w(node)} is taken for 1", 1.7, _expr("0 * x + 1", x=node)
        inner = node.args[0] if node.args else None  # of x.exp() it is x
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            upper = ast.Call(node.func, [_expr("-x", x=inner.right)], [])
            yield "term-missing", f"the term {w(inner.left)} is missing, in {w(node)}", 1.9, upper
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.BinOp):
        yield from _of_comparison(w, node, node.comparators[0])


def _of_comparison(w: Callable[[ast.expr], str], node: ast.Compare, right: ast.BinOp) -> Iterator[tuple[Any, ...]]:
    """x < a + b."""
    left = node.left
    for term, rest in ((right.left, right.right), (right.right, right.left)):
        away = ast.Compare(_expr("abs(a - t)", a=left, t=term), node.ops, [rest])
        yield "taken-as-positive", f"it is {w(away)}: it is {w(node)}, without the absolute value", 1.8, away
    if isinstance(right.right, ast.Name):
        by = right.right
        for way, how in ("t / 2", "half"), ("2 * t", "twice"), ("t * math.log(2)", "ln 2 times"), (
            "t / math.log(2)", "1 / ln 2 times"):  # fmt: skip
            times = ast.Compare(left, node.ops, [ast.BinOp(right.left, right.op, _expr(way, t=by))])
            yield "wrong-factor", f"{w(by)} is {how} what it should be", 1.9, times


def _of_slices(text: Text, node: Any) -> Iterator[tuple[Any, ...]]:
    w = text.say
    match node:
        case ast.Slice(lower=ast.Name() as low, upper=ast.BinOp(ast.Name(same), ast.Add(), size)) if low.id == same:
            product = _expr("a * n", a=low, n=size)
            said = f"{w(low)} is taken for the number of a block of {w(size)}, where it is its first index"
            yield "block-for-index", said, 1.4, ast.Slice(product, _expr("a + n", a=product, n=size))
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper)):
            yield "slice-missing", f"all of {w(value)} is taken where {w(node)} belongs", 1.6, value, "slice"
            if lower is not None:
                new = ast.Subscript(value, ast.Slice(None, upper), ast.Load())
                yield "wrong-slice", f"{w(new)} stands where {w(node)} belongs", 2.0, new, "lower"
                begin = ast.unparse(lower)
                first = ast.Subscript(value, _put(node.slice, begin, "0"), ast.Load())
                said = f"{w(value)} is read from its beginning again and again: `{begin}` is taken for 0"
                yield "first-block-again", said, 1.5, first, "first", begin
            if upper is not None:
                new = ast.Subscript(value, ast.Slice(lower, None), ast.Load())
                yield "wrong-slice", f"{w(new)} stands where {w(node)} belongs", 2.0, new, "upper"


def _of_method(text: Text, node: ast.Call, owner: ast.expr, name: str) -> Iterator[tuple[Any, ...]]:
    """x.f(...) and torch.f(x, ...)."""
    w = text.say
    of_module = isinstance(owner, ast.Name) and owner.id in text.globals and owner.id not in text.params
    if not of_module and isinstance(owner, ast.Name):
        what = "is not converted" if name in _CASTS else "is taken as it stands"
        yield "function-missing", f"`.{name}` is missing: {w(owner)} {what}", 1.3, owner, name
    if name == "permute" and 2 < len(node.args) < 6 and all(isinstance(x, ast.Constant) for x in node.args):
        for axes in itertools.permutations(node.args):
            if list(axes) != node.args:
                order = ", ".join(map(ast.unparse, axes))
                said = f"the axes are taken in the order {order} in {w(node)}"
                yield "wrong-order", said, 1.5, ast.Call(node.func, list(axes), node.keywords), "permute", order
    unshifted = "the exponentials are taken as they are, in {}, and overflow, or are all 0: the maximum comes off first"
    if name == "logaddexp":
        new = _expr("torch.log(torch.exp(a) + torch.exp(b))", a=node.args[0], b=node.args[1])
        yield "overflows", unshifted.format(w(node)), 1.2, new
    tensor = owner if not of_module else node.args[0] if node.args else None
    if tensor is None or name not in _REDUCTIONS:
        return
    options = (*(node.args[1:] if of_module else node.args), *(k.value for k in node.keywords))
    if not options:
        return
    for other in _REDUCTIONS[name]:
        new = copy.copy(node)
        new.func = ast.Attribute(owner, other, ast.Load())
        yield "wrong-function", f"`{other}` stands where `{name}` belongs", 1.7, new, name, other
    if name != "logsumexp":
        said = f"one `{name}` is taken for all rows of {w(tensor)}: each row has its own"
        yield "one-for-all", said, 1.2, _expr(f"x.{name}().expand(y.shape)", x=tensor, y=node), name
    else:
        parts = "torch.exp(x).sum(d)", "without the logarithm"
        yield "function-missing", f"{w(node)} is {parts[1]}", 1.8, _expr(parts[0], x=tensor, d=options[0])
        new = _expr(f"torch.log({parts[0]})", x=tensor, d=options[0])
        yield "overflows", unshifted.format(w(node)), 1.2, new
    if name == "sum":
        if isinstance(tensor, ast.BinOp) and isinstance(tensor.op, ast.Mult) and len(options) == 1:
            said = f"each factor of {w(tensor)} is summed by itself: it is the products' sum"
            new = _expr("x.sum(d) * y.sum(d)", x=tensor.left, y=tensor.right, d=options[0])
            yield "sum-of-the-parts", said, 1.5, new
        new = copy.copy(node)
        swap = _expr("abs(x)", x=tensor)
        new.func = ast.Attribute(swap if not of_module else owner, name, ast.Load())
        new.args = [swap, *node.args[1:]] if of_module else node.args
        yield "absolute-values", f"absolute values are summed: {w(tensor)} keeps its signs", 1.9, new
    if name in ("amax", "max"):
        said = f"{w(node)} is 0 where it is negative: a maximum starts at -inf, not at 0"
        yield "starts-at-0", said, 1.5, _expr("y.clamp(min=0)", y=node), name


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _put(node: ast.expr, old: str, new: str) -> ast.expr:
    """The expression with another one in the place of every part that reads so."""

    class Put(ast.NodeTransformer):
        def visit(self, part: ast.AST) -> Any:
            if isinstance(part, ast.expr) and ast.unparse(part) == old:
                return ast.parse(new, mode="eval").body
            return self.generic_visit(part)

    return Put().visit(copy.deepcopy(node))


def kinds_of(
    text: Text, inputs: Sequence[tuple[Any, ...]], kind: Callable[[Any], Any] | None = None
) -> dict[str, set[Any]]:
    """What each name of the text is while it runs: a number, a tensor of so many axes, or something else."""
    found: dict[str, set[Any]] = defaultdict(set)
    run, before = text.compiled(), sys.gettrace()

    def lines(frame: FrameType, event: str, arg: Any) -> Any:
        for name, value in frame.f_locals.items():
            found[name].add((kind or _kind)(value))
        return lines

    def calls(frame: FrameType, event: str, arg: Any) -> Any:
        return lines if frame.f_code.co_filename == CHANGED and frame.f_code.co_name == text.tree.name else None

    sys.settrace(calls)
    try:
        for given in inputs:
            with contextlib.suppress(Exception):  # it may be what is asked about
                run(*given)
    finally:
        sys.settrace(before)
    return dict(found)


def _kind(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return "flag" if isinstance(value, bool) else "number"
    return ("tensor", value.ndim) if isinstance(value, torch.Tensor) else type(value).__name__


def of_statements(text: Text) -> Iterator[Change]:
    """Where a loop begins and ends, what is done in every turn of it instead of once at the end, what is always 0."""
    yield from (Change(slug, said, cost, ((slot, new),)) for slug, said, cost, slot, new in of_lines(text))
    of: dict[str, list[tuple[Slot, Any]]] = {"exp": [], "log": []}
    for node in nodes(text.tree, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in of:
            new = ast.Attribute(node.func.value, f"{node.func.attr}2", ast.Load())
            of[node.func.attr].append(((node, "func", None), new))
    if all(of.values()):
        said = "`exp2` and `log2` stand where `exp` and `log` belong: the base is e"
        yield Change("wrong-base", said, 1.7, tuple(of["exp"] + of["log"]))
    for slot in _places(text.tree):
        line = _at(slot)
        for jump, here, there in ((ast.Continue, "continue", "break"), (ast.Break, "break", "continue")):
            if isinstance(line, jump):
                said = f"`{there}` stands where `{here}` belongs"
                yield Change("wrong-jump", said, 1.2, ((slot, ast.parse(there).body[0]),))
    sets = [t.id for n in nodes(text.tree, ast.Assign) for t in nodes(n.targets[0], ast.Name)]
    for line in nodes(text.tree, ast.Assign):
        if isinstance(line.value, ast.Tuple) and len(line.value.elts) == 2:
            said = f"{' and '.join(map(text.say, line.value.elts))} are exchanged"
            turned = ast.Tuple(line.value.elts[::-1], ast.Load())
            yield Change("names-exchanged", said, 1.4, (((line, "value", None), turned),))
        if isinstance(line.targets[0], ast.Name):
            zero = _expr("0 * x", x=line.value)
            what = line.value if sets.count(line.targets[0].id) > 1 else line.targets[0]
            yield Change("always-0", f"{text.say(what)} is 0 always", 2.0, (((line, "value", None), zero),))
    for loop in nodes(text.tree, ast.For):
        if isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", "") == "range":
            yield from _of_range(text, (loop, "iter", None), loop.iter.args)
        for node in nodes(text.tree, ast.BinOp):
            if is_op(node, ast.Div, ast.Mult):
                yield from _in_every_turn(text, loop, node)


def _of_range(text: Text, slot: Slot, args: Sequence[ast.expr]) -> Iterator[Change]:
    if len(args) != 3:
        return
    begin, end, step = args
    ways = {
        "range(b, (e - b) // s * s + b, s)": ("tail-lost", "the last, shorter block is left out", 1.0),
        "range(b, e - s, s)": ("last-block-lost", "the last block is left out", 1.1),
        "range(b + s, e, s)": ("first-block-lost", "the first block is left out", 1.1),
        "range(b, b + 1, s)": ("first-block-only", "only the first block is looked at", 1.1),
        "(b, *range(b, e, s))": ("first-block-twice", "the first block counts twice", 1.3),
        "range(max(b, (e - 1) // s * s), e, s)": ("last-block-only", "only the last block is looked at", 1.3),
        "range(b, e)": ("step-missing", f"the loop takes a step of 1 where {text.say(step)} belongs", 1.4),
    }  # fmt: skip
    for way, (slug, said, cost) in ways.items():
        yield Change(slug, said, cost, ((slot, _expr(way, b=begin, e=end, s=step)),), about=("range",))


def further(text: Text) -> Iterator[Change]:
    """Of a learner's text, what a right one has nowhere: a number that should be -inf, what is not finite and stays or
    goes, a running result that is not rescaled or divided.
    """
    infinite = _expr("-math.inf")
    axes = {x: max((kind[1] for kind in kinds if isinstance(kind, tuple)), default=0)
            for x, kinds in text.kinds.items()}  # fmt: skip
    for slot in _places(text.tree):
        node = _at(slot)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if axes.get(name):
                for other in (x for x, n in axes.items() if n == axes[name] and isinstance(slot[0], ast.Assign)):
                    yield Change("more", "", 1.2, ((slot, _expr(f"x + torch.log({other})", x=node)),))
                yield Change("not-finite", "", 1.6, ((slot, _expr("x.nan_to_num()", x=node)),))
                for function in ("log", "exp") if isinstance(slot[0], (ast.BinOp, ast.Assign)) else ():
                    yield Change(f"{function}-missing", "", 1.6, ((slot, _expr(f"x.{function}()", x=node)),))
            case ast.Call(func=ast.Attribute(value=owner, attr="maximum"), args=given):
                both = ast.Call(ast.Attribute(owner, "logaddexp", ast.Load()), given, [])
                yield Change("wrong-function", "", 3.2, ((slot, both),))
            case ast.Call(func=ast.Attribute(attr="log" | "log2")):
                for name in (x for x, n in axes.items() if n):
                    yield Change("more", "", 1.4, ((slot, _expr("y + x", x=node, y=_expr(name))),))
            case ast.Call(func=ast.Attribute(value=owner, attr="max" | "amax" | "sum" as name), args=[], keywords=[]):
                for how in ("-1", "-1, keepdim=True"):
                    of_rows = f"x.{name.replace('max', 'amax').replace('aam', 'am')}({how})"
                    yield Change("one-for-all", "", 0.8, ((slot, _expr(of_rows, x=owner)),))
            case ast.Call(func=ast.Attribute(value=owner, attr="max" | "amax")):
                total = ast.Call(ast.Attribute(owner, "sum", ast.Load()), node.args, node.keywords)
                yield Change("wrong-function", "", 1.5, ((slot, total),))
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Name()]):
                yield Change("finite-number", "", 1.2, ((slot, ast.Compare(left, node.ops, [infinite])),))
            case ast.BinOp(op=ast.MatMult(), left=left, right=right):
                for name in (x for x, n in axes.items() if n > 1):
                    for way in (f"x.mT @ {name}", f"x @ {name}.mT", f"x.mT @ {name}.mT"):
                        yield Change("wrong-name", "", 1.2, ((slot, _expr(way, x=left)),))
                    for way in (f"{name}.mT @ x", f"{name} @ x.mT", f"{name}.mT @ x.mT"):
                        yield Change("wrong-name", "", 1.2, ((slot, _expr(way, x=right)),))
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _OPPOSITE:
                turned = ast.Call(ast.Attribute(owner, _OPPOSITE[name], ast.Load()), node.args, node.keywords)
                yield Change("upside-down", "", 1.2, ((slot, turned),))
            case ast.Call(func=ast.Attribute(value=owner, attr="any" | "all" as name)):
                all_or_any = ast.Attribute(owner, "all" if name == "any" else "any", ast.Load())
                yield Change("wrong-function", "", 1.0, ((slot, ast.Call(all_or_any, node.args, node.keywords)),))
            case ast.BinOp(left=ast.Constant(value=2), op=ast.Pow(), right=power):
                yield Change("power-of-2", "", 1.2, ((slot, _expr("x.exp()", x=power)),))
            case ast.Constant(value=0) | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                yield Change("finite-number", "", 1.6, ((slot, infinite),))
            case ast.Call(func=ast.Attribute(value=owner, attr="zeros_like" | "new_zeros" as name), args=[shape]):
                full = ast.Attribute(owner, name.replace("zeros", "full"), ast.Load())
                new: ast.expr = ast.Call(full, [shape, infinite], node.keywords)
                yield Change("finite-number", "", 1.2, ((slot, new),))
            case ast.Call(func=ast.Attribute(attr="nan_to_num")):
                for names in (["neginf"], ["nan", "neginf"]) if not node.keywords else ():
                    new = ast.Call(node.func, node.args, [ast.keyword(name, infinite) for name in names])
                    yield Change("finite-number", "", 1.0, ((slot, new),))
    yield from _without_a_factor(text, axes)
    yield from _not_rescaled(text, axes)


def _without_a_factor(text: Text, axes: dict[str, int]) -> Iterator[Change]:
    """A matrix times another one that the text makes."""
    for line in nodes(text.tree, ast.Assign):
        of = axes.get(getattr(line.targets[0], "id", ""), 0)
        for name in (x for x, n in axes.items() if n == of > 1 and x not in text.params):
            said = f"the factor `{name}` is missing in `{text.plain(line.value)}`"
            yield Change("not-rescaled", said, 2.0, (((line, "value", None), _expr(f"x * {name}", x=line.value)),))


def _not_rescaled(text: Text, axes: dict[str, int]) -> Iterator[Change]:
    """What a loop makes of itself, with a factor or a divisor."""
    lines = [line for loop in nodes(text.tree, ast.For) for line in loop.body]
    for line, name in [(x, getattr(x.targets[0], "id", "")) for x in lines if isinstance(x, ast.Assign)]:
        reads = [slot for slot in _places(line) if getattr(_at(slot), "id", "") == name and slot[1] != "targets"]
        of = axes.get(name, 0)
        behind = {x: "[..., None]" * (of - n) for x, n in axes.items() if of >= n >= max(1, of - 1)}
        for a, b in itertools.permutations(behind if reads else (), 2):
            if behind[a] != behind[b]:
                continue
            for slot in reads:
                said = f"the factor `torch.exp({a} - {b}){behind[a]}` is missing at `{name}`, in {text.say(line)}"
                new = _expr(f"x * torch.exp({a} - {b}).nan_to_num(){behind[a]}", x=_at(slot))
                yield Change("not-rescaled", said, 1.6, ((slot, new),))
            for by in (a, f"1 + {a}", f"{a} + {b}"):
                divisor = f"({by}){behind[a]}"
                new = _expr(f"(x / {divisor}).nan_to_num()", x=line.value)
                said = f"the divisor `{divisor}` is missing, in {text.say(line)}"
                yield Change("not-divided", said, 1.8, (((line, "value", None), new),))


def _in_every_turn(text: Text, loop: ast.For, node: ast.BinOp) -> Iterator[Change]:
    """x / y, or x * y, after the loop that makes x: done in the loop, and perhaps again at the end."""
    inside = {id(n) for n in ast.walk(loop)}
    slot = next((s for s in _places(text.tree) if _at(s) is node), None)
    made = {t.id for n in nodes(loop, ast.Assign) for t in nodes(n.targets[0], ast.Name)}
    for kept, by in ((node.left, node.right), (node.right, node.left)):
        if slot is None or id(node) in inside or not isinstance(kept, ast.Name) or kept.id not in made:
            continue
        if kept is node.right and isinstance(node.op, ast.Div):
            continue
        done = "divided by" if isinstance(node.op, ast.Div) else "multiplied by"
        line = ast.Assign([ast.Name(kept.id, ast.Store())], ast.BinOp(kept, node.op, by))
        turn = ast.For(loop.target, loop.iter, [*loop.body, line], [])
        holder = next((s for s in _places(text.tree) if _at(s) is loop), None)
        if holder is None:
            continue
        said = f"{text.say(kept)} is {done} {text.say(by)} in every block"
        yield Change("in-every-block", f"{said}: once, at the end", 1.2, ((holder, turn), (slot, kept)))
        yield Change("in-every-block", f"{said}, and again at the end: once is right", 1.3, ((holder, turn),))


def _places(root: ast.AST) -> Iterator[Slot]:
    for parent in ast.walk(root):
        for name, value in ast.iter_fields(parent):
            for at, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST):
                    yield parent, name, at
