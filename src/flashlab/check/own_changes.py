"""What a learner's own text may want that is no change of a right text: `mend` runs these beside those of `changes`.

A name for a part of what it stands for, a weight that one of two sums lacks, a condition that a right text has, what is
never set in a loop. Each is a class that readers' answers have shown, and says by itself what is wrong where the pieces
would not.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flashlab.check.changes import Change, Slot, Text, _at, _expr, _rounded_up, _slots
from flashlab.check.trees import LOOPS, blocks, both, called, dump, is_op, names_in, nodes, plain, reads, terms_of

LINES = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
PART, WITHIN, BEFORE, MOVED = "part-of-it", "in-each-turn", "before-the-loop", "line-moved"
_NUMBERS = ("value", "args", "elts", "left", "right")  # where one stands
_OF_ALL = ("any", "all", "sum", "max", "min", "len")
ROUNDING = ("round", "int", "ceil", "floor", "abs")
_BEHIND_A_FACTOR = ("", "[:, None]", "[..., None]", "-")
_RUNNING = ("maximum", "logaddexp", "max")
_REDUCED = ("sum", "mean", "amax")
_LIMITS = ("min", "max", "minimum", "maximum")
_POWERS = ("exp", "exp2")
_LINES = 12  # of a block, that are moved in it
_FEW = 9
_SHIFTS = {ast.LShift: ast.RShift, ast.RShift: ast.LShift}
_LOOSER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_DIVISIONS = (ast.Div, ast.FloorDiv)
_BINARY = {f"2 ** {n}": 10 ** (n // 10 * 3) for n in (10, 20, 30, 40)}


def own_changes(text: Text, rights: Sequence[Text], values: dict[str, Any], alone: bool) -> Iterator[Change]:
    """Every one of them. values: what the parameters are in the inputs; alone: no function launches the text."""
    zero = alone and any(ast.unparse(x) == "0" for right in rights for x in ast.walk(right.tree))
    yield from _of_lines(text, zero)
    yield from _of_blocks(text)
    yield from _of_state(text) if alone else ()  # no lists there, and time for few
    yield from _of_flags(text, values)
    yield from _of_sums(text)
    yield from _of_siblings(text)
    yield from _of_bases(text)
    yield from _of_merges(text)
    yield from _of_running(text)
    yield from _of_conditions(text, rights)
    yield from _of_tiles(text)
    yield from _of_unread(text)
    yield from _of_calls_alone(text, rights)
    yield from of_two_names(text, text.are_alike) if alone else ()
    yield from _of_remainders(text)
    yield from _of_reductions(text, rights)
    yield from _of_negations(text)
    yield from _of_moves(text)
    for branch, at, line in of_branches(text):
        last = getattr(*branch)[-1]
        words = f"{text.say(line)} stands in one branch alone: it is missing behind {text.say(last)}"
        yield Change("line-added", words, 1.2, (((*branch, at), both(last, line)),))


def _of_lines(text: Text, zero: bool) -> Iterator[Change]:
    """Two names exchanged in one line alone; a part of what a name stands for in its place, or of two alike names; 0
    for what is computed, where a right text has a 0."""
    own = {*text.params, *text.locals}
    meant = {name: [x for x in ast.walk(value) if x is not value and (isinstance(x, (ast.BinOp, ast.Call)) or (
                    isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load) and x.id in own))]
             for name, value in text.meant.items()}  # fmt: skip
    whole = {ast.unparse(x): (x, name) for name, parts in reversed(meant.items())
             for x in parts if not isinstance(x, ast.Name)}  # fmt: skip
    beside: dict[str, list[tuple[ast.expr, ast.expr]]] = {}  # of an operand of a maximum or the like: the other one
    for value in (x for x in text.meant.values() if isinstance(x, ast.Call) and len(x.args) == 2):
        for one, instead in itertools.permutations(value.args, 2):
            beside.setdefault(ast.unparse(one), []).append((one, instead))
    for line in nodes(text.tree, *LINES):
        read: dict[str, list[Slot]] = {}
        for slot, node in _slots(line):
            if (of := whole.get(ast.unparse(node))) and node is not of[0]:
                yield Change(PART, "", 1.2, ((slot, ast.Name(of[1], ast.Load())),))
            yield from _of_node(text, line, slot, node, zero)
            for one, instead in beside.get(ast.unparse(node), ()) if isinstance(node, ast.Call) else ():
                if node is not one:
                    yield Change(PART, "", 1.2, ((slot, instead),))
            if isinstance(node, ast.Name) and node.id in own:
                read.setdefault(node.id, []).append(slot)
        for a, b in itertools.combinations(read, 2):
            if text.are_alike(a, b):
                words = f"`{a}` and `{b}` are exchanged, in {text.say(line)}"
                yield Change("names-exchanged", words, 1.6, exchanged(a, b, read))
            parts = [*zip(meant.get(a, ()), meant.get(b, ()), strict=False)]
            for x, y in parts if len(read[a]) == len(read[b]) else ():
                for here, there in zip(read[a], read[b], strict=True) if type(x) is type(y) else ():
                    yield Change(PART, "", 1.9, ((here, x), (there, y)))
        for name, slots in read.items():
            for slot, part in itertools.product(slots, meant.get(name, ())):
                yield Change(PART, "", 1.9, ((slot, part),))


def exchanged(a: str, b: str, where: Mapping[str, Sequence[Slot]]) -> tuple[tuple[Slot, Any], ...]:
    """Edits that put each of two names in the other's places."""
    return tuple((slot, ast.Name(y, ast.Load())) for x, y in ((a, b), (b, a)) for slot in where[x])


def _of_node(text: Text, line: ast.stmt, slot: Slot, node: ast.expr, zero: bool) -> Iterator[Change]:
    """Of an expression of a line; zero: a right text has a 0."""
    own = {*text.params, *text.locals}
    if isinstance(node, ast.BinOp) and ast.unparse(node.right).lstrip("-") == "0.5":
        yield Change("root", "", 1.2, ((slot, ast.BinOp(node.left, ast.Pow(), node.right)),))
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        yield Change("wrong-sign", "", 1.2, ((slot, node.operand),))
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value and node.value % 4 == 0:
        yield Change("wrong-number", "", 2.0, ((slot, ast.Constant(node.value // 4)),))
    terms = terms_of(node) if isinstance(node, ast.BinOp) and not is_op(slot[0], ast.Add) else []
    for i, j in itertools.permutations(range(len(terms)), 2) if len(terms) < 5 else ():
        if isinstance(product := terms[i], ast.BinOp) and isinstance(product.op, ast.Mult):
            for rest, factor in ((product.left, product.right), (product.right, product.left)):
                moved = [*terms]
                moved[i], moved[j] = rest, ast.BinOp(terms[j], ast.Mult(), factor)
                yield Change("elsewhere", "", 1.9, ((slot, functools.reduce(_plus, moved)),))
    if zero and isinstance(node, ast.BinOp):
        yield Change(PART, "", 1.6, ((slot, ast.Constant(0)),))
    if isinstance(node, ast.Name) and isinstance(slot[0], ast.Call) and not _keeps(slot[0]):
        yield Change("wrong-sign", "", 1.9, ((slot, _expr("-x", x=node)),))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        yield Change("more", "", 1.6, ((slot, _expr("x * y", x=node, y=node.right)),))
    match node:
        case ast.Call(func=ast.Attribute(value=ast.BinOp(left=a, op=ast.Mult(), right=b), attr=called), keywords=[]):
            for first, second in ((a, b), (b, a)):  # rounded, or widened, before the product
                alone = ast.Call(ast.Attribute(first, called, ast.Load()), node.args, [])
                yield Change("brackets", "", 1.5, ((slot, ast.BinOp(alone, ast.Mult(), second)),))
    if text.whole and not text.kinds:
        yield from _of_bits(text, slot, node)
    term = is_op(slot[0], ast.Add, ast.Sub)
    if term and isinstance(node, ast.Name) and node.id in text.numbers:
        yield Change("more", "", 1.5, ((slot, _expr("2 * x", x=node)),))
    if isinstance(node, ast.BinOp) and not isinstance(slot[0], ast.BinOp):
        yield from _of_constants(text, node)
        target = line.targets[0] if isinstance(line, ast.Assign) and slot[0] is line else None
        for other in own - {plain(target)} if isinstance(target, (ast.Name, ast.Attribute)) else ():
            if text.are_alike(other, getattr(target, "id", "")):
                yield Change(PART, "", 1.5, ((slot, ast.Name(other, ast.Load())),))
    if isinstance(node, ast.Call):
        yield from _of_listed(node)
    last = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else None
    if isinstance(last, ast.Name) and last.id in text.params:
        module = "tl." if "tl" in text.globals and text.kinds else ""
        for way in ("maximum", "minimum") if module else ("max", "min"):
            yield Change("more", "", 1.3, ((slot, _expr(f"{module}{way}(x, y)", x=node.left, y=last)),))  # type: ignore
    for other in text.numbers if term and isinstance(node, ast.Name) else ():
        yield Change("more", "", 2.3, ((slot, _expr("x * y", x=node, y=_expr(other))),))


def _of_bits(text: Text, slot: Slot, node: ast.expr) -> Iterator[Change]:
    """Other bits, another way to shift, the last bits of a number for all of it."""
    for mask in (1, 3, 7, 15, 31) if is_op(slot[0], ast.BitAnd) and isinstance(node, ast.Constant) else ():
        yield Change("wrong-number", "", 1.2, ((slot, ast.Constant(mask)),))
    if isinstance(node, ast.BinOp) and type(node.op) in _SHIFTS:
        turned = ast.BinOp(node.left, _SHIFTS[type(node.op)](), node.right)
        yield Change("wrong-operator", "", 1.0, ((slot, turned),))
    if isinstance(node, ast.Name) and node.id in text.numbers and isinstance(slot[0], ast.BinOp):
        for way in ("x % 8", "x & 7", "x % 32", "x & 31"):
            yield Change("more", "", 1.4, ((slot, _expr(way, x=node)),))


def _of_constants(text: Text, node: ast.BinOp) -> Iterator[Change]:
    """Two numbers of an expression exchanged."""
    numbers = [(slot, x) for slot, x in _slots(node) if isinstance(x, ast.Constant) and type(x.value) is int]
    for (a, x), (b, y) in itertools.combinations(numbers, 2):
        if x.value != y.value:
            words = f"`{plain(x)}` and `{plain(y)}` are exchanged, in {text.say(node)}"
            yield Change("names-exchanged", words, 1.5, ((a, y), (b, x)))


def _of_listed(call: ast.Call) -> Iterator[Change]:
    """Numbers that are listed: each one more or less, or in the other order; axes in any."""
    for at, axes in enumerate(call.args):
        order = [getattr(x, "value", None) for x in axes.elts] if isinstance(axes, ast.Tuple) else []
        for turned in itertools.permutations(order) if {*order} == {*range(len(order))} and len(order) < 5 else ():
            axes_there = ast.Tuple([ast.Constant(x) for x in turned], ast.Load())
            yield Change("wrong-axis", "", 1.5, (((call, "args", at), axes_there),))
    numbers = [i for i, x in enumerate(call.args) if isinstance(x, ast.Constant) and type(x.value) is int]
    values = [call.args[i].value for i in numbers]  # type: ignore[attr-defined]
    for new in ([x + 1 for x in values], [x - 1 for x in values], values[::-1]) if len(values) > 1 else ():
        args = [*call.args]
        for i, x in zip(numbers, new, strict=True):
            args[i] = ast.Constant(x)
        edits = tuple(((call, "args", i), args[i]) for i in numbers if args[i] is not call.args[i])
        there, here = (ast.unparse(ast.Call(call.func, x, call.keywords)) for x in (args, call.args))
        yield Change("names-exchanged", f"`{here}` stands where `{there}` belongs", 1.2, edits)


def _of_blocks(text: Text) -> Iterator[Change]:
    """What two names are set to in lines that follow each other, exchanged."""
    for block in (block for _, field, block in blocks(text.tree) if field == "body"):
        for a, b in itertools.pairwise(block):
            if not (isinstance(a, ast.Assign) and isinstance(b, ast.Assign)):
                continue
            one, other = (getattr(x.targets[0], "id", "") for x in (a, b))
            if one and other and one != other and text.are_alike(one, other):
                edits = ((a, "value", None), b.value), ((b, "value", None), a.value)
                yield Change("names-exchanged", f"`{one}` and `{other}` are exchanged", 1.6, edits)


def _of_flags(text: Text, values: dict[str, Any]) -> Iterator[Change]:
    """A parameter that says yes or no, taken the other way round, or not asked in a condition."""
    for flag in [x for x, given in values.items() if given and all(isinstance(y, bool) for y in given)]:
        first = text.tree.body[0]
        begun = both(ast.parse(f"{flag} = not {flag}").body[0], first)
        words = f"`{flag}` is taken the other way round, everywhere"
        yield Change("turned-round", words, 1.2, (((text.tree, "body", 0), begun),))
        for holder in nodes(text.tree, ast.If, ast.IfExp):
            if flag not in reads(holder.test):
                new = ast.BoolOp(ast.And(), [_expr(flag), holder.test])
                yield Change("condition-missing", "", 1.0, (((holder, "test", None), new),))


def _of_conditions(text: Text, rights: Sequence[Text]) -> Iterator[Change]:
    """A condition of a right text in the place of one; two opposite ones the wrong way round; the edges of a part."""
    known = {*text.params, *text.locals}
    asked = [(s, x) for s, x in _slots(text.tree) if s[1] == "test" and isinstance(s[0], (ast.If, ast.IfExp))]
    wanted = {ast.unparse(x.test): x.test for right in rights for x in nodes(right.tree, ast.If, ast.IfExp)
              if {*reads(x.test)} <= known | {*right.globals}}  # fmt: skip
    for part in nodes(text.tree, ast.comprehension):
        for i, test in enumerate(part.ifs):
            words = f"the condition `{text.plain(test)}` is one too many"
            yield Change("line-added", words, 1.2, (((part, "ifs", i), ast.Constant(True)),))
    lefts = {plain(x.left): x.left for x in nodes(text.tree, ast.Compare)}
    for node in nodes(text.tree, ast.Compare) if len(lefts) < _FEW else ():
        for other in (x for said, x in lefts.items() if said != plain(node.left)):
            yield Change(PART, "", 1.1, (((node, "left", None), copy.deepcopy(other)),))
    have = {ast.unparse(x) for _, x in asked}
    for (slot, x), (said_there, there) in itertools.product(asked, wanted.items()):
        if said_there not in have and {*reads(x)} & {*reads(there)}:
            yield Change("condition-missing", "", 0.9, ((slot, copy.deepcopy(there)),))
    opposite = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
    compared: dict[str, list[tuple[Slot, ast.Compare]]] = {}
    for slot, x in _slots(text.tree):
        if isinstance(x, ast.Compare) and type(x.ops[0]) in opposite:
            compared.setdefault(plain(x.left) + plain(x.comparators[0]), []).append((slot, x))
    for pair in (x for x in compared.values() if len(x) == 2 and len({type(y.ops[0]) for _, y in x}) == 2):
        edits = tuple((slot, ast.Compare(x.left, [opposite[type(x.ops[0])]()], x.comparators)) for slot, x in pair)
        words = " and ".join(f"`{text.plain(x)}`" for _, x in pair)
        yield Change("names-exchanged", f"{words} are exchanged", 0.9, edits)
    parts: list[tuple[Slot, Any]] = [(s, x) for s, x in _slots(text.tree) if _is_slice(x)]
    edges = {plain(y): y for _, x in parts for y in x.args}
    for (slot, x), (a, b) in itertools.product(parts, itertools.permutations(edges.values(), 2)):
        yield Change("cut", "", 1.3, ((slot, ast.Call(x.func, [a, b], [])),))


def _is_slice(node: Any) -> bool:
    return plain(getattr(node, "func", None)) == "slice" and len(node.args) == 2


def _of_calls_alone(text: Text, rights: Sequence[Text]) -> Iterator[Change]:
    """A line of a right text that only calls something, such as a wait, before each line."""
    known = {*text.params, *text.globals}
    lines = {plain(x): x for right in rights for x in nodes(right.tree, ast.Expr) if {*reads(x)} <= known}
    for holder, field, block in blocks(text.tree):
        for (said, new), (at, line) in itertools.product(lines.items(), enumerate(block if field == "body" else ())):
            if plain(line) not in (said, "_tick()"):
                words = f"the line `{said}` is missing before {text.say(line)}"
                yield Change("line-added", words, 1.1, (((holder, "body", at), both(new, line)),))


def of_two_names(text: Text, alike: Callable[[str, str], bool]) -> Iterator[Change]:
    """Two names exchanged in all of a block or of a line, or one for the other in all of a line or of an element."""
    everywhere = Counter(reads(text.tree))
    for part in (x for x in ast.walk(text.tree) if x is not text.tree):
        block = isinstance(getattr(part, "body", None), list)
        slots: dict[str, list[Slot]] = defaultdict(list)
        for slot, node in _slots(part) if block or isinstance(part, (*LINES, ast.Subscript)) else ():
            if isinstance(node, ast.Name) and node.id in {*text.params, *text.locals}:
                slots[node.id].append(slot)
        walk = {*reads(part.iter)} if isinstance(part, ast.For) else set()
        for a, b in itertools.combinations(slots, 2) if block or isinstance(part, LINES) else ():
            if len(slots[a]) + len(slots[b]) > 2 * block and alike(a, b) and not {a, b} <= walk:
                words = f"`{a}` and `{b}` are exchanged, in `{text.plain(part).splitlines()[0].rstrip(':{ ')}`"
                yield Change("names-exchanged", words, 1.7, exchanged(a, b, slots))
        for a, b in itertools.product(slots, {*text.params, *text.locals}) if not block else ():
            if 1 < len(slots[a]) < everywhere[a] and a != b and alike(a, b):
                yield Change("wrong-name", "", 1.9, tuple((slot, ast.Name(b, ast.Load())) for slot in slots[a]))


def of_branches(text: Text) -> Iterator[tuple[tuple[ast.AST, str], int, ast.stmt]]:
    """A line that stands in one branch alone, with the end of the other one."""
    for branch in (x for x in nodes(text.tree, ast.If) if x.orelse):
        for here, there in ((branch.body, "orelse"), (branch.orelse, "body")):
            other = getattr(branch, there)
            for line in here:
                if isinstance(line, LINES) and plain(line) not in map(plain, other):
                    yield (branch, there), len(other) - 1, line


def _of_moves(text: Text) -> Iterator[Change]:
    """A line that belongs behind a later one, or before an earlier one, of its block; not the next one."""
    for holder, field, block in blocks(text.tree):
        lines = [(i, x) for i, x in enumerate(block) if isinstance(x, (ast.Assign, ast.AugAssign)) and field == "body"]
        for (i, line), (k, other) in itertools.permutations(lines, 2) if len(lines) <= _LINES else ():
            if abs(i - k) < 2:
                continue
            pair = both(other, line) if i < k else both(line, other)
            where = "early: it belongs behind" if i < k else "late: it belongs before"
            words = f"the line {text.say(line)} comes too {where} {text.say(other)}"
            cost = 1.3 + 0.1 * abs(i - k)
            yield Change(MOVED, words, cost, (((holder, "body", i), ast.Pass()), ((holder, "body", k), pair)))


def _of_negations(text: Text) -> Iterator[Change]:
    """What is turned round and should not be, or should: a mask, a flag."""
    for slot, node in _slots(text.tree):
        holder, field, at = slot
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
            yield Change("negated", "", 0.8, ((slot, node.operand),))
        elif not isinstance(node, (ast.Name, ast.Call, ast.Attribute)):
            continue
        elif field == "test":
            yield Change("negated", "", 1.2, ((slot, ast.UnaryOp(ast.Not(), node)),))
        elif called(holder) in ("where", "masked_fill") and field == "args" and not at:
            yield Change("negated", "", 1.0, ((slot, ast.UnaryOp(ast.Invert(), node)),))


def _of_remainders(text: Text) -> Iterator[Change]:
    """A quotient and the remainder of the same two numbers, exchanged."""
    found: dict[str, dict[type, list[tuple[Slot, ast.BinOp]]]] = {}
    for slot, x in _slots(text.tree):
        if isinstance(x, ast.BinOp) and isinstance(x.op, (ast.Mod, ast.FloorDiv)):
            found.setdefault(f"{dump(x.left)} {dump(x.right)}", {}).setdefault(type(x.op), []).append((slot, x))
    turned = {ast.Mod: ast.FloorDiv(), ast.FloorDiv: ast.Mod()}
    for pair in (x for x in found.values() if len(x) == 2):
        edits = [(slot, ast.BinOp(x.left, turned[type(x.op)], x.right)) for of in pair.values() for slot, x in of]
        words = " and ".join(text.say(of[0][1]) for of in pair.values())
        yield Change("names-exchanged", f"{words} are exchanged", 1.0, tuple(edits))


def _of_reductions(text: Text, rights: Sequence[Text]) -> Iterator[Change]:
    """A sum, or the like, that a right text makes of a result, and this one does not."""
    made = [x for right in rights for x in nodes(right.tree, ast.Call) if getattr(x.func, "attr", "") in _REDUCED]
    calls = {plain(ast.Call(ast.Attribute(ast.Name("x"), x.func.attr), x.args, x.keywords)) for x in made}
    for line in nodes(text.tree, ast.Assign, ast.Return) if calls else ():
        for slot, way in itertools.product(_results_of(line), sorted(calls)):
            yield Change("function-missing", "", 1.2, ((slot, _expr(way, x=_at(slot))),))


def _results_of(line: Any) -> list[Slot]:
    """What a line sets or returns, one by one."""
    if isinstance(line.value, ast.Tuple):
        return [(line.value, "elts", i) for i in range(len(line.value.elts))]
    return [(line, "value", None)] if line.value is not None else []


def _of_unread(text: Text) -> Iterator[Change]:
    """What is made and never read, in a minimum or the like; a parameter that is not, in two places of another one."""
    number = [{"number"}, {"flag"}]
    unread = [x for x in text.params if not text.reads[x] and text.kinds.get(x) in number]
    for name, other in itertools.product(unread, (x for x in text.params if text.kinds.get(x) in number)):
        slots = [s for s, x in _slots(text.tree) if isinstance(x, ast.Name) and x.id == other]
        for pair in itertools.combinations(slots, 2) if 2 < len(slots) < _FEW else ():
            yield Change("wrong-name", "", 1.2, tuple((s, ast.Name(name, ast.Load())) for s in pair))
    for name in sorted({*text.locals} - {*reads(text.tree)}):
        for slot, node in _slots(text.tree):
            if isinstance(node, ast.Call) and called(node) in _LIMITS and len(node.args) > 1:
                more = ast.Call(node.func, [*node.args, _expr(name)], node.keywords)
                yield Change("limit-missing", "", 0.4, ((slot, more),))


def _of_sums(text: Text) -> Iterator[Change]:
    """What a loop multiplies one of its sums by, and not the other."""
    for loop in nodes(text.tree, ast.For):
        lines = [(x, at, line) for x, field, block in blocks(loop) if field == "body" for at, line in enumerate(block)]
        parts = {id(line): [*_set_by(line)] for _, _, line in lines}
        sums = {name for set_to in parts.values() for name, value in set_to if name in reads(value)}
        for holder, at, line in lines:
            own = dict(parts[id(line)])
            for name, value in own.items():
                product = value if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) else None
                by = product and {plain(product.left): product.right, plain(product.right): product.left}.get(name)
                for other, behind in itertools.product(sums - {*own}, ("", "[:, None]", "[..., None]") if by else ()):
                    factor = f"{plain(by)}{behind}"
                    new = both(ast.parse(f"{other} = {other} * {factor}").body[0], line)
                    words = f"`{other}` is not multiplied by `{factor}`, as `{name}` is"
                    yield Change("not-rescaled", words, 1.3, (((holder, "body", at), new),))


def _of_siblings(text: Text) -> Iterator[Change]:
    """A term that another number has before it is multiplied by the same factor."""
    found: list[tuple[Slot, Any]] = [(slot, x) for slot, x in _slots(text.tree) if is_op(x, ast.Mult)]
    products = [(slot, *way) for slot, x in found for way in ((x.left, x.right), (x.right, x.left))]
    for (slot, own, factor), (_, other, by) in itertools.permutations(products, 2):
        if plain(by) == plain(factor) and is_op(other, ast.Add, ast.Sub) and plain(other.right) not in names_in(own):
            new = ast.BinOp(ast.BinOp(own, other.op, other.right), ast.Mult(), factor)
            yield Change("more", "", 1.3, ((slot, new),))


def _of_bases(text: Text) -> Iterator[Change]:
    """Base 2 for e, throughout."""
    found: list[tuple[Slot, Any]] = [*_slots(text.tree)]
    powers = [(s, x) for s, x in found if is_op(x, ast.Pow) and plain(x.left) == "2"]
    calls = [x for _, x in found if getattr(getattr(x, "func", 0), "attr", "") in ("exp2", "log2")]
    for way in ("math.exp(x)", "x.exp()") if powers else ("",):
        edits = [(s, _expr(way, x=x.right)) for s, x in powers]
        edits += [((x, "func", None), ast.Attribute(x.func.value, x.func.attr[:3], ast.Load())) for x in calls]
        if len(edits) > 1:
            yield Change("base-2", "base 2 stands where base e belongs, everywhere", 0.9, tuple(edits))


def _of_merges(text: Text) -> Iterator[Change]:
    """Weights that one of two sums has and the other lacks; a number that keeps a divisor from 0, and is too large."""
    sums: list[tuple[Slot, Any]] = [(slot, x) for slot, x in _slots(text.tree) if is_op(x, ast.Add)]
    weights = {dump(x): x for _, node in sums for x in _weights_of(node)}
    for slot, node in sums:
        bare = not any(isinstance(getattr(x, "op", None), ast.Mult) for x in (node.left, node.right))
        for factors, behind in itertools.product(weights.values() if bare else (), _BEHIND_A_FACTOR):
            a, b = (_reshaped(f, behind) for f in factors)
            new = _expr("a * x + b * y", a=a, b=b, x=node.left, y=node.right)
            words = f"`{text.plain(node)}` lacks the weights `{text.plain(a)}` and `{text.plain(b)}`"
            yield Change("not-rescaled", words, 1.2, ((slot, new),))
    scales = {name for _, x in _slots(text.tree) if is_op(x, ast.Mult) for name in names_in(x)} & {*text.locals}
    for slot, x in _slots(text.tree):
        if not (isinstance(x, ast.Name) and x.id in text.locals and isinstance(slot[0], ast.BinOp)):
            continue
        if text.kinds and not _is_float(text, x.id):
            continue
        by = sorted(x for x in scales - {*reads(slot[0])} if not text.kinds or _is_float(text, x))
        for factor, behind in itertools.product(by, ("", "[:, None]")):
            if not behind or ("tile", 1, "f") in text.kinds.get(factor, ()):
                words = f"`{x.id}` is not multiplied by `{factor}{behind}`, in `{text.plain(slot[0])}`"
                yield Change("not-rescaled", words, 1.1, ((slot, _expr(f"x * {factor}{behind}", x=x)),))
    for slot, number in _slots(text.tree):
        if isinstance(number, ast.Constant) and isinstance(number.value, float) and 0 < number.value <= 0.1:
            yield Change("wrong-number", "", 1.6, ((slot, ast.Constant(1e-30)),))


def _is_float(text: Text, name: str) -> bool:
    """Of a tensor, or of a kernel's tile."""
    return any(x[0] != "pointer" and x[-1] not in ("i", "b") for x in text.kinds.get(name, ()) if isinstance(x, tuple))


def _weights_of(node: ast.BinOp) -> Iterator[list[ast.expr]]:
    """Of a * x + b * y: a and b, and x and y."""
    match node:
        case ast.BinOp(left=ast.BinOp(op=ast.Mult()) as one, right=ast.BinOp(op=ast.Mult()) as other):
            yield [one.left, other.left]
            yield [one.right, other.right]


def _of_running(text: Text) -> Iterator[Change]:
    """Of sums that a loop makes: a factor that another one has, or that the new term has too; a division in each turn;
    a maximum of this turn alone, or one that is never handed on."""
    for loop in nodes(text.tree, *LOOPS):
        places: list[Slot] = [(x, "body", at) for x, field, block in blocks(loop) if field == "body"
                              for at in range(len(block))]  # fmt: skip
        lines = [(at, name, value) for at in places for name, value in _set_by(_at(at), parts=True)]
        sums = [x for x in lines if x[1] in map(plain, ast.walk(x[2]))]
        slots = {id(node): slot for slot, node in _slots(loop)}
        over: list[tuple[Slot, Any]] = []
        for at, name, value in sums:
            here = slots.get(id(value))
            match value:
                case ast.BinOp(op=ast.Add()):
                    for _, other, product in sums:
                        yield from _with_the_weight_of(text, at, name, other, product)
                    yield from _with_a_weight_alike(text, name, value, {x for _, x, _ in lines})
                case ast.BinOp(left=ast.BinOp(left=old, op=ast.Add(), right=term), op=ast.Mult(), right=by) if here:
                    if plain(old) == name:
                        over.append((here, _expr("x * c + t", x=old, c=by, t=term)))
                        words = f"`{text.plain(by)}` multiplies the new term too, in `{text.plain(value)}`"
                case ast.BinOp(op=ast.Div(), left=kept, right=by) if here:
                    yield from _divided_behind(text, loop, name, by, (here, kept))
        if over:
            yield Change("not-rescaled", f"{words}: it belongs to what was there before", 0.9, tuple(over))
        running = {name for _, name, _ in sums if name.isidentifier()}
        for slot, node in _slots(loop):
            given = isinstance(node, ast.Subscript) and plain(node.value) in text.params
            for name in running if given and isinstance(slot[0], ast.BinOp) else ():
                yield Change("wrong-name", "", 1.2, ((slot, ast.Name(name, ast.Load())),))
        stored = {plain(x) for x in ast.walk(loop) if isinstance(getattr(x, "ctx", None), ast.Store)}
        yield from _set_for_added(text, loop, [x for x in lines if x not in sums])
        begun = {name for line in text.tree.body if line is not loop for name, _ in _set_by(line)}
        for at, name, value in lines:
            maker = _maker(value)
            for before in value.args if maker in _RUNNING and isinstance(value, ast.Call) else ():
                given = isinstance(before, ast.Subscript) and plain(before.value) in text.params
                if isinstance(before, (ast.Name, ast.Subscript)) and plain(before) not in stored and not given:
                    last, block = ast.parse(f"{plain(before)} = {name}").body[0], at[0].body  # type: ignore[attr-defined]
                    words = f"the line `{plain(last)}` is missing at the end of the loop"
                    edit = (at[0], "body", len(block) - 1), both(block[-1], last)
                    yield Change("never-moved", words, 0.3, (edit,))
            kept_as = [x for _, x, y in lines if plain(y) == name or (x == name and x in begun and y is value)]
            for old_name, way in itertools.product(kept_as, ("torch.maximum", "tl.maximum", "max")):
                known = way.split(".")[0] in text.globals or way == "max"
                if maker in ("max", "amax") and id(value) in slots and known:
                    limited = _expr(f"{way}({old_name}, x)", x=value)
                    yield Change("limit-missing", "", 0.9, ((slots[id(value)], limited),))


def _maker(value: ast.expr) -> str:
    """The function of a call, or of `x.max(1)[0]` and `x.max(1).values`."""
    return called(value.value if isinstance(value, (ast.Subscript, ast.Attribute)) else value)


def _set_for_added(text: Text, loop: ast.stmt, lines: Sequence[tuple[Slot, str, ast.expr]]) -> Iterator[Change]:
    """What a loop sets anew in each turn, and is there before it and behind it: a sum."""
    begun = {name for line in text.tree.body if line is not loop for name, _ in _set_by(line)}
    inside = {id(x) for x in ast.walk(loop)}
    read = {x.id for x in nodes(text.tree, ast.Name) if id(x) not in inside and isinstance(x.ctx, ast.Load)}
    for at, name, value in lines:
        line: Any = _at(at)
        if name not in begun & read or not (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)):
            continue
        added = ast.AugAssign(line.targets[0], ast.Add(), value)
        yield Change("not-rescaled", f"`=` stands where `+=` belongs, in {text.say(line)}", 1.0, ((at, added),))


def _divided_behind(text: Text, loop: ast.stmt, name: str, by: ast.expr, edit: Any) -> Iterator[Change]:
    """A division that belongs behind the loop. edit: of the line in the loop."""
    end = loop.end_lineno or 0
    behind = [s for s, x in _slots(text.tree) if isinstance(x, ast.Name) and x.id == name and x.lineno > end]
    words = f"`{name}` is divided by `{text.plain(by)}` in each turn: once, behind the loop"
    for way in ("x / y", "(x / y).nan_to_num()") if behind else ():
        edits = [(s, _expr(way, x=ast.Name(name, ast.Load()), y=by)) for s in behind]
        yield Change("not-rescaled", words, 1.0, (edit, *edits))


def _with_the_weight_of(text: Text, at: Slot, name: str, other: str, product: ast.expr) -> Iterator[Change]:
    """A running sum that lacks the factor that another one has."""
    line: Any = _at(at)
    terms = [(s, x) for s, x in _slots(line) if plain(x) == name and is_op(s[0], ast.Add)]
    for node in nodes(product, ast.BinOp) if other != name else ():
        if isinstance(node.op, ast.Mult):
            by = {plain(node.left): node.right, plain(node.right): node.left}.get(other)
            for behind in _BEHIND_A_FACTOR if by is not None else ():
                factor = _reshaped(by, behind)  # type: ignore[arg-type]
                words = f"`{name}` is not multiplied by `{text.plain(factor)}`, as `{other}` is"
                edits: list[Any] = [(slot, _expr("x * c", x=x, c=factor)) for slot, x in terms]
                if isinstance(line, ast.AugAssign):
                    value = _expr("x * c + t", x=ast.Name(name, ast.Load()), c=factor, t=line.value)
                    edits = [(at, ast.Assign([line.target], value))]
                if edits:
                    yield Change("not-rescaled", words, 1.1, tuple(edits))


def _with_a_weight_alike(text: Text, name: str, total: ast.BinOp, made: set[str]) -> Iterator[Change]:
    """exp(m - top) * l + t, with a weight of its own, exp(x - top), for t."""
    for old, field in ((total.left, "right"), (total.right, "left")):
        weight: Any = next((x for x in nodes(old, ast.Call) if x.args and is_op(x.args[0], ast.Sub)), None)
        for other in sorted(made - {name}) if weight and name in map(plain, ast.walk(old)) else ():
            difference = _expr("x - y", x=_expr(other), y=weight.args[0].right)
            by, term = ast.Call(weight.func, [difference], weight.keywords), getattr(total, field)
            words = f"`{text.plain(term)}` is not multiplied by `{text.plain(by)}`, in `{text.plain(total)}`"
            yield Change("not-rescaled", words, 1.0, (((total, field, None), _expr("t * w", t=term, w=by)),))


def _reshaped(factor: ast.expr, behind: str) -> ast.expr:
    """A factor of rows, for a matrix; or ("-") that of a matrix, for a vector."""
    if behind == "-":
        if isinstance(factor, ast.Subscript) or ast.unparse(factor).endswith((".unsqueeze(-1)", ".unsqueeze(1)")):
            return factor.value if isinstance(factor, ast.Subscript) else factor.func.value  # type: ignore
        return _expr("x.squeeze(-1)", x=factor)
    return _expr(f"x{behind}", x=factor)


def _set_by(line: ast.stmt, parts: bool = False) -> Iterator[tuple[str, ast.expr]]:
    """The names that a line sets, each with what it is set to. parts: those of tensors too, by what stands there."""
    if parts and isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Subscript):
        yield plain(line.targets[0]), line.value
    if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
        yield line.target.id, ast.BinOp(ast.Name(line.target.id, ast.Load()), line.op, line.value)
    if isinstance(line, ast.Assign):
        target, value = line.targets[0], line.value
        several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for x, y in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:  # type: ignore
            if isinstance(x, ast.Name):
                yield x.id, y


def _of_tiles(text: Text) -> Iterator[Change]:
    """Numbers that count from 0 in each tile, where they count in all of the tensor; a walk that begins late."""
    loops = [x for x in nodes(text.tree, ast.For) if isinstance(x.target, ast.Name)]
    for walk in (x.iter for x in loops if text.from_zero):
        if isinstance(walk, ast.Call) and len(walk.args) > 1 and plain(walk.args[0]) != "0":
            yield Change(PART, "", 0.5, (((walk, "args", 0), ast.Constant(0)),))
    for loop in (x for x in loops if plain(getattr(x.iter, "func", None)) == "range" and len(x.iter.args) == 2):
        for name in sorted({*text.numbers, *text.meant} - {*reads(loop.iter)}):
            edges: list[Any] = [ast.BinOp(x, ast.Mult(), _expr(name)) for x in loop.iter.args]
            new = ast.Call(ast.Name("range", ast.Load()), edges, [])
            yield Change("more", "", 1.4, (((loop, "iter", None), new),))
    stepped = {y.target.id: x for x in nodes(text.tree, ast.While) for y in x.body
               if isinstance(y, ast.AugAssign) and isinstance(y.target, ast.Name)}  # fmt: skip
    inner: Any = next((x for x in reversed([*loops, *stepped.values()]) if _aranges(x)), None)
    counted = [(s, x) for s, x in _slots(inner or ast.Module([], [])) if dump(x) in _aranges(inner)]
    begins = [ast.unparse(x.target) for x in loops if any(y is inner for y in ast.walk(x))]
    begins += [name for name, x in stepped.items() if x is inner]
    for several in itertools.product((*begins, ""), repeat=len(counted)) if len(counted) < 4 else ():
        edits = [(s, _expr(f"x + {name}", x=x)) for (s, x), name in zip(counted, several, strict=True) if name]
        if edits:
            each = " and ".join(f"`{name}` is missing at `{text.plain(x)}`"
                                for (_, x), name in zip(counted, several, strict=True) if name)  # fmt: skip
            words = f"{each}: it counts from 0 in each tile"
            yield Change("counted-in-a-tile", words, 1.0 + 0.3 * len(edits), tuple(edits))


def _aranges(tree: ast.AST | None) -> set[str]:
    return {dump(x) for x in nodes(tree or ast.Pass(), ast.Call) if ast.unparse(x.func).endswith("arange")}


def of_grids(text: Text) -> Iterator[Change]:
    """The numbers of a grid's blocks in another order; a result as wide as another tensor."""
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Call) and plain(node.func).endswith("empty_like"):
            for other in (x for x in text.params[:3] if x != plain(node.args[0])):
                way = f"x.new_empty(*x.shape[:-1], {other}.shape[-1])"
                words = f"`{text.plain(node)}` has `{plain(node.args[0])}`'s shape: its rows are as long as `{other}`'s"
                yield Change("shape-of-another", words, 0.0, ((slot, _expr(way, x=node.args[0])),))
        sizes = node.elts if slot[1] == "slice" and isinstance(node, ast.Tuple) and len(node.elts) < 4 else []
        for order in itertools.permutations(sizes):
            if [*order] != sizes:
                yield Change("grid-exchanged", "", 0.8, ((slot, ast.Tuple([*order], ast.Load())),))


def of_numbers(text: Text) -> Iterator[Change]:
    """What a right text has nowhere and a wrong one may want: no rounding, a quotient rounded up, a divisor of the
    whole sum that divides one term.
    """
    roundings: list[tuple[Slot, Any]] = []
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Call) and node.args and called(node) in ROUNDING:
            roundings.append((slot, node.args[0]))
            yield Change("more", "", 1.0, (roundings[-1],))
        if isinstance(node, ast.Call) and called(node) in _POWERS:
            for other in (*text.numbers, *text.locals):
                args = [_expr("x - y", x=node.args[0], y=_expr(other)), *node.args[1:]]
                yield Change("more", "", 2.2, ((slot, ast.Call(node.func, args, node.keywords)),))
        if isinstance(node, ast.BinOp) and ast.unparse(node) in _BINARY:
            yield Change("more", "", 1.0, ((slot, ast.Constant(_BINARY[ast.unparse(node)])),))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and abs(node.value) >= 1000:
            yield Change("more", "", 1.0, ((slot, _expr("math.inf")),))
        if not isinstance(node, ast.BinOp):
            continue
        a, b = node.left, node.right
        if isinstance(node.op, ast.Mod):
            yield Change("rounded-down", "", 1.2, ((slot, _expr("a - a % b", a=a, b=b)),))
        if isinstance(node.op, _DIVISIONS):
            yield Change("rounded-up", "", 1.6, ((slot, _expr("-(-a // b)", a=a, b=b)),))
        if isinstance(node.op, ast.Mult):
            for rounded, factor in ((a, b), (b, a)):
                if new := _into(rounded, factor):
                    yield Change("brackets", "", 1.5, ((slot, new),))
                floor = isinstance(rounded, ast.BinOp) and isinstance(rounded.op, ast.FloorDiv)
                of = (rounded.left, rounded.right) if floor else _rounded_up(rounded)  # type: ignore[attr-defined]
                if of and dump(of[1]) == dump(factor):
                    yield Change("more", "", 0.6, ((slot, of[0]),))
        if isinstance(node.op, (ast.Add, ast.Sub)) and not isinstance(getattr(slot[0], "op", None), (ast.Add, ast.Sub)):
            terms = terms_of(node)
            for at, term in enumerate(terms):
                rest = terms[:at] + terms[at + 1 :]
                if not (rest and isinstance(term, ast.BinOp) and isinstance(term.op, _DIVISIONS)):
                    continue
                for more in (x for n in (1, 2, len(rest)) for x in itertools.combinations(rest, n)):
                    whole = ast.BinOp(functools.reduce(_plus, [term.left, *more]), term.op, term.right)
                    others = [x for x in rest if not any(x is y for y in more)]
                    yield Change("brackets", "", 1.5, ((slot, functools.reduce(_plus, [whole, *others])),))
        if isinstance(node.op, ast.Add) and plain(b) == "1":
            match a:
                case ast.BinOp(left=x, op=ast.FloorDiv(), right=y):
                    yield Change("rounded-up", "", 0.4, ((slot, _expr("-(-x // y)", x=x, y=y)),))
                case ast.Call(func=ast.Attribute(value=owner, attr="floor"), args=given):
                    up = ast.Call(ast.Attribute(owner, "ceil", ast.Load()), given, [])
                    yield Change("rounded-up", "", 0.4, ((slot, up),))
    if len(roundings) > 1:
        yield Change("rounded-all", "numbers are rounded that should not be", 1.0, tuple(roundings))
    yield from _of_bounds(text)
    yield from _of_sums_anew(text)
    yield from _of_values(text)


def _of_bounds(text: Text) -> Iterator[Change]:
    """A limit, the begin or the step of a range, another reduction, a sign of all of a quotient."""
    names = [*dict.fromkeys((*text.params, *text.locals))]
    for slot, node in _slots(text.tree):
        function = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if function in _OF_ALL and len(node.args) == 1:  # type: ignore[attr-defined]
            for other in (x for x in _OF_ALL if x != function):
                cost = 0.9 if function != "sum" else 3.5  # its divisor may be missing
                yield Change("wrong-function", "", cost, (((node, "func", None), ast.Name(other, ast.Load())),))
        if function == "range" and len(given := node.args) < 3:  # type: ignore[attr-defined]
            for name in (*names, "2"):
                ends = [_expr(name), *given] if len(given) == 1 else [*given, _expr(name)]
                yield Change("more", "", 1.0, ((slot, ast.Call(node.func, ends, [])),))  # type: ignore[attr-defined]
        if is_op(node, ast.FloorDiv) and isinstance(node.left, ast.UnaryOp):  # type: ignore[attr-defined]
            yield Change("negated", "", 0.6, ((slot, _expr("-x", x=node)),))
        whole = isinstance(node, (ast.Name, ast.BinOp, ast.Call)) and slot[1] in _NUMBERS
        for name in (
            sorted({*names} & {*reads(node)}) if whole and isinstance(node, ast.BinOp) else ()
        ):  # the limit is all
            yield Change(PART, "", 1.5, ((slot, _expr(name)),))
        for name, way in itertools.product(names if whole else (), ("min(x, y)", "max(x, y)")):
            if name != plain(node):
                yield Change("limit-missing", "", 1.6, ((slot, _expr(way, x=node, y=_expr(name))),))


def _of_sums_anew(text: Text) -> Iterator[Change]:
    """A sum that each turn of a loop sets anew, or begins anew."""
    for outer, field, block in blocks(text.tree):
        for at, loop in enumerate(block if field == "body" else ()):
            before = [x for line in text.tree.body if line.lineno < loop.lineno for x in nodes(line, ast.Name)]
            begun = {x.id for x in before if isinstance(x.ctx, ast.Store)}
            for i, line in enumerate(loop.body if isinstance(loop, LOOPS) else ()):
                for name, value in _set_by(line) if isinstance(line, ast.Assign) else ():
                    if name in begun:
                        yield Change("more", "", 0.9, (((line, "value", None), _expr(f"{name} + x", x=value)),))
                    elif not {*reads(value)} & {*text.locals}:
                        edits = (((loop, "body", i), ast.Pass()), ((outer, "body", at), both(line, loop)))
                        yield Change(BEFORE, "", 1.2, edits)


def _of_values(text: Text) -> Iterator[Change]:
    """Another factor or term of a line."""
    for line in nodes(text.tree, ast.Assign, ast.AugAssign, ast.Return):
        for slot in _results_of(line):
            if isinstance(x := _at(slot), ast.Constant) and isinstance(x.value, bool):
                continue
            ways = ("x * y", "x + y", "x - y", "y - x", *(("x // y", "y // x") if text.whole else ("x / y", "y / x")))
            for other, way in (*itertools.product((*text.numbers, *text.locals), ways), ("1", "x + y"), ("1", "x - y")):
                yield Change("more", "", 2.5, ((slot, _expr(way, x=x, y=_expr(other))),))


def _of_state(text: Text) -> Iterator[Change]:
    """What goes wrong from turn to turn: a list that two names share, a number that begins anew or does not, a pair the
    other way round.
    """
    names = {x.id for x in nodes(text.tree, ast.Name) if isinstance(x.ctx, ast.Store)}
    indexed = [x for x in nodes(text.tree, ast.Subscript) if isinstance(x.slice, ast.Name)]
    read = {ast.unparse(x) for x in indexed if isinstance(x.ctx, ast.Load)}
    items = [_expr(x) for x in (*sorted(names), *sorted(read))]  # the same verdict each time
    slices = [x for x in nodes(text.tree, ast.Slice) if x.step is None]
    ends = {(ast.unparse(x), side): x for s in slices for side in ("lower", "upper") if (x := getattr(s, side))}
    added = [x.value for x in nodes(text.tree, ast.AugAssign)]
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Slice) and node.step is None:
            for (_, side), end in ends.items():
                if getattr(node, side) is None:
                    bounds = {"lower": node.lower, "upper": node.upper, side: end}
                    yield Change("cut", "", 1.3, ((slot, ast.Slice(**bounds)),))
        kept = isinstance(slot[0], (ast.Call, ast.Assign, ast.Tuple, ast.List, ast.Dict))
        if kept and isinstance(node, (ast.Name, ast.Subscript)) and isinstance(node.ctx, ast.Load):
            yield Change("shared", "", 1.0, ((slot, _expr("list(x)", x=node)),))
        if kept and isinstance(node, ast.Constant) and type(node.value) is int:
            for item in items:
                yield Change(PART, "", 1.5, ((slot, item),))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield Change("turned", "", 1.3, ((slot, ast.Constant(not node.value)),))
        several = isinstance(slot[0], ast.Assign) and isinstance(slot[0].targets[0], ast.Tuple)
        if isinstance(node, ast.Tuple) and not several and len(node.elts) == 2:
            cost = 0.9 if isinstance(slot[0], ast.Assign) else 1.3
            yield Change("turned", "", cost, ((slot, ast.Tuple(node.elts[::-1], ast.Load())),))
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            for i, op in enumerate(node.ops):
                if type(op) in _LOOSER:
                    ops = [*node.ops[:i], _LOOSER[type(op)](), *node.ops[i + 1 :]]
                    yield Change("compared", "", 0.9, ((slot, ast.Compare(node.left, ops, node.comparators)),))
        if isinstance(slot[0], ast.AugAssign) and slot[1] == "value":
            for other in added:
                if plain(other) != plain(node) and {*reads(other)} == {*reads(node)}:
                    yield Change(PART, "", 0.9, ((slot, copy.deepcopy(other)),))
    yield from _of_turns(text)


def _of_turns(text: Text) -> Iterator[Change]:
    """What is added, set back or begun in the turns of a loop."""
    loops: list[Any] = [x for x in text.tree.body if isinstance(x, LOOPS)]
    for loop in loops:
        for holder, field, block in blocks(loop):
            for at, line in enumerate(block if field == "body" else ()):
                if isinstance(line, ast.Return):
                    yield Change("turned", "", 1.3, (((holder, "body", at), ast.Continue()),))
                target = line.targets[0] if isinstance(line, ast.Assign) else None
                if isinstance(target, ast.Subscript):
                    new = ast.AugAssign(target, ast.Add(), line.value)
                    yield Change("added", "", 1.3, (((holder, "body", at), new),))
                    before = _expr("d.get(k, 0) + x", d=target.value, k=target.slice, x=line.value)
                    yield Change("added", "", 1.4, (((line, "value", None), before),))
    begun_with = {name: value for line in text.tree.body for name, value in _set_by(line)}
    for branch in (x for loop in loops for x in nodes(loop, ast.If)):
        last = branch.body[-1]
        for name, value in begun_with.items():
            if isinstance(value, (ast.Name, ast.Constant)) and name not in dict(_set_by(last)):
                again = both(last, ast.parse(f"{name} = {plain(value)}").body[0])
                words = f"`{name}` is not set back to `{plain(value)}`, where `{text.plain(branch.test)}`"
                yield Change("not-set-back", words, 1.0, (((branch, "body", len(branch.body) - 1), again),))
    for at, line in enumerate(text.tree.body):
        if isinstance(line, ast.Assign) and isinstance(line.value, (ast.Constant, ast.List, ast.Dict)):
            for loop in loops:
                edits = (((text.tree, "body", at), ast.Pass()), ((loop, "body", 1), both(line, loop.body[1])))
                yield Change(WITHIN, "", 1.2, edits)


def _into(rounded: ast.expr, factor: ast.expr) -> ast.expr | None:
    """ceil(a / b) * factor with the factor within what is rounded."""
    match rounded:
        case ast.BinOp(left=a, op=ast.FloorDiv(), right=b):
            return _expr("a * f // b", a=a, b=b, f=factor)
        case ast.UnaryOp(op=ast.USub(), operand=ast.BinOp(left=a, op=ast.FloorDiv(), right=b)):
            return _expr("-(a * f // b)", a=a, b=b, f=factor)
        case ast.Call(func=called, args=[ast.BinOp(left=a, op=ast.Div(), right=b)]):
            return _expr("g(a * f / b)", g=called, a=a, b=b, f=factor)
    return None


def _plus(x: ast.expr, y: ast.expr) -> ast.expr:
    if isinstance(y, ast.UnaryOp) and isinstance(y.op, ast.USub):
        return ast.BinOp(x, ast.Sub(), y.operand)
    return ast.BinOp(x, ast.Add(), y)


def _keeps(call: ast.Call) -> bool:
    """Whether it is a list's or a set's, for which the sign of what it keeps may not show."""
    return getattr(call.func, "attr", "") in ("add", "append", "discard", "extend", "get", "setdefault", "update")
