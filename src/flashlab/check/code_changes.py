"""Further changes of a right text, of what a loop or a state machine is made of (`flashlab.check.changes`).

An element of a list left out or added, an index for its entry, the first for the last of a list, one of several
conditions left out, a bit operation left out, an assignment for an addition, a condition not asked or asked the other
way round.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from typing import Any

from flashlab.check.trees import LOOPS, blocks, nodes

_BITS = (ast.BitXor, ast.BitAnd, ast.BitOr, ast.LShift, ast.RShift)
_FEWEST = 3  # elements of a list of numbers of which one may be forgotten


def _strings(text: Any) -> list[str]:
    return [*dict.fromkeys(n.value for n in nodes(text.tree, ast.Constant) if isinstance(n.value, str))]


def of_code(text: Any, node: ast.expr) -> Iterator[tuple[Any, ...]]:
    """(slug, words, cost, new node, key...) of one expression."""
    w = text.say
    if isinstance(node, ast.BinOp) and isinstance(node.op, _BITS):
        for alone in (node.left, node.right):
            yield "bits-missing", f"{w(alone)} alone stands where {w(node)} belongs", 1.2, alone
    if isinstance(node, ast.BoolOp):
        turned, word = (ast.Or(), "or") if isinstance(node.op, ast.And) else (ast.And(), "and")
        said = f"`{word}` stands between {' and '.join(map(w, node.values))}"
        yield "wrong-operator", said, 1.5, ast.BoolOp(turned, node.values)
        for i, gone in enumerate(node.values):
            rest = node.values[:i] + node.values[i + 1 :]
            new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            again = text.kinds and len(rest) == 1 and text.often[getattr(gone, "id", "")] > 1
            beside = f", beside {w(rest[0])}" if again else ""
            yield "condition-missing", f"{w(gone)} is not asked{beside}", 1.1, new, ast.unparse(gone)
            turned_round = [*node.values[:i], ast.UnaryOp(ast.Not(), gone), *node.values[i + 1 :]]
            said = f"{w(gone)} is asked the other way round"
            yield "condition-inverted", said, 1.5, ast.BoolOp(node.op, turned_round), ast.unparse(gone)
        names = dict.fromkeys(n.id for n in nodes(node, ast.Name) if n.id in text.params)
        known = {*text.params, *text.locals}
        asked = [[n.id for n in nodes(x, ast.Name) if n.id in known] for x in node.values] if text.foreign else []
        opposite = [x for one, other in itertools.combinations(asked, 2) for x in zip(one, other, strict=False)]
        for a, b in dict.fromkeys([*itertools.combinations(names, 2), *(x for x in opposite if x[0] != x[1])]):
            new = copy.deepcopy(node)
            for n in (n for n in nodes(new, ast.Name) if n.id in (a, b)):
                n.id = b if n.id == a else a
            yield "names-exchanged", f"`{a}` and `{b}` are exchanged, in {w(node)}", 1.1 if text.foreign else 1.7, new
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.comparators[0], (ast.Tuple, ast.List)):
        among = node.comparators[0]
        if isinstance(node.ops[0], ast.In) and all(isinstance(x, ast.Constant) for x in among.elts):
            yield from _of_cases(text, node, among)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        one: Any = node.comparators[0]
        for other in _strings(text) if isinstance(one, ast.Constant) and isinstance(one.value, str) else ():
            if other != one.value:
                both = ast.Compare(node.left, [ast.In()], [ast.Tuple([one, ast.Constant(other)], ast.Load())])
                yield "case-too-many", f"{w(node)} is taken to hold for {other!r} too", 1.3, both
                alone = ast.Compare(node.left, [ast.Eq()], [ast.Constant(other)])
                yield "wrong-case", f"{other!r} stands where {one.value!r} belongs", 1.6, alone
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) >= _FEWEST:
        if all(isinstance(x, ast.Constant) and isinstance(x.value, int) for x in node.elts):
            for gone, rest in ((node.elts[0], node.elts[1:]), (node.elts[-1], node.elts[:-1])):
                new = type(node)(rest, ast.Load())
                yield "element-missing", f"{w(gone)} is missing in {w(node)}", 1.2, new
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
        for at in (0, -1, 1, -2):
            new = ast.Subscript(node.value, ast.Constant(at), ast.Load())
            if ast.unparse(new) != ast.unparse(node):
                said = f"`{text.plain(node.value)}[{at}]` stands where {w(node)} belongs"
                yield "wrong-element", said, 1.1 + 0.2 * (at not in (0, -1)), new
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.BinOp):
        yield "entry-missing", f"{w(node.slice)} itself stands where {w(node)} belongs", 1.3, node.slice
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and node.generators[0].ifs:
        first = node.generators[0]
        left = [ast.comprehension(first.target, first.iter, [], 0), *node.generators[1:]]
        yield "condition-missing", f"{w(first.ifs[0])} is not asked", 1.5, type(node)(node.elt, left)


def _of_cases(text: Any, node: ast.Compare, among: ast.Tuple | ast.List) -> Iterator[tuple[Any, ...]]:
    here = [x.value for x in among.elts if isinstance(x, ast.Constant)]
    for gone in here:
        rest = [ast.Constant(x) for x in here if x != gone]
        new = ast.Compare(node.left, node.ops, [ast.Tuple(rest, ast.Load())])  # type: ignore[arg-type]
        yield "case-missing", f"{gone!r} is left out of {text.say(node)}", 1.1, new
    for more in _strings(text):
        if more not in here:
            both = [ast.Constant(x) for x in (*here, more)]
            new = ast.Compare(node.left, node.ops, [ast.Tuple(both, ast.Load())])  # type: ignore[arg-type]
            yield "case-too-many", f"{text.say(node)} is taken to hold for {more!r} too", 1.3, new


def of_lines(text: Any) -> Iterator[tuple[Any, ...]]:
    """(slug, words, cost, slot, new node) of one statement."""
    for holder, field, block in blocks(text.tree):
        for at, line in enumerate(block):
            slot = (holder, field, at)
            if isinstance(line, ast.AugAssign):
                said = f"{text.say(line.target)} is set to {text.say(line.value)}, and not changed by it"
                yield "set-for-added", said, 1.4, slot, ast.Assign([line.target], line.value)
            if not isinstance(line, ast.If):
                continue
            asked = text.say(line.test)
            held = ast.If(ast.Constant(True), line.body, [])
            leaves = len(line.body) == 1 and isinstance(line.body[0], (ast.Continue, ast.Break, ast.Return))
            if leaves and not line.orelse:
                yield "condition-missing", f"{asked} is not asked", 0.9, slot, ast.Pass()
                yield "condition-missing", f"{asked} is taken to hold always", 1.0, slot, held
            else:
                yield "condition-missing", f"{asked} is not asked", 0.9, slot, held
            other = line.test.operand if isinstance(line.test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), line.test)
            new = ast.If(other, line.body, line.orelse)
            yield "condition-inverted", f"{asked} is asked the other way round", 1.6, slot, new
            for after in block[at + 1 : at + 2]:
                if isinstance(after, ast.If) and not line.orelse:
                    either = ast.If(line.test, line.body, [after])
                    ends = [ast.Continue()] if isinstance(holder, LOOPS) else []  # it stands for all that follows, too
                    said = f"`elif` stands before {text.say(after.test)}: both may hold"
                    new = ast.If(ast.Constant(True), [either, *block[at + 2 :], *ends], [])
                    yield "either-or", said, 1.5, slot, new
