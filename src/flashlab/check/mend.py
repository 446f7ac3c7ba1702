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
import functools
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from flashlab.check.changes import Change, Slot, Text, Variants, _at, _expr, _new, _rounded_up, _slots, changes
from flashlab.check.claims import tokens
from flashlab.check.kernel_changes import HostedText, HostText
from flashlab.check.lookup import Index, Outcome
from flashlab.check.value_mend import value_mended

_SECONDS, _HOSTED = 3.0, 2.0  # of one core; the latter for a kernel with a function around it, whose text is long
_LONGEST = 160  # characters of what is said
_SHORT = 60
_OFTEN, _MANY = 0.002, 4000  # what each change of a kind costs more than the one before, where there are so many
_SHARED = 1.0  # what it costs more to find fault with a line that a right text has
_LONGER = 0.15  # for each word and sign that is added
_LINES = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
_KINDS = {ast.Add: "term", ast.Sub: "term", ast.Mult: "factor", ast.Div: "divisor", ast.FloorDiv: "divisor"}
_PART = "part-of-it"
_WORDED = ("names-exchanged", "never-moved", "not-rescaled", "not-divided", "rounded-all", "strides-of-another",
           "turned-round", "counted-in-a-tile", "not-set-back")  # fmt: skip
_BEHIND = "outside-of-the-loop"
_WITHIN = "in-each-turn"
_ROUNDING = ("round", "int", "ceil", "floor", "abs")
_LIMITS = ("min", "max", "minimum", "maximum")
_POWERS = ("exp", "exp2")
_DIVISIONS = (ast.Div, ast.FloorDiv)
_BINARY = {f"2 ** {n}": 10 ** (n // 10 * 3) for n in (10, 20, 30, 40)}
_TWO_PLACES = {
    "lines-exchanged": "comes too early", _BEHIND: "stands in the loop, and belongs behind it",
    _WITHIN: "stands before the loop, and belongs inside it",
}  # fmt: skip
_BY_CHANCE = ("taken-as-fixed", "always-the-same", "always-0", "wrong-base", "in-every-block")  # or no words for it


def own_text(fn: Callable[..., Any], make: Callable[..., Text] = Text) -> Text | None:
    """The text of a learner's function, in its own names; None of what is no `def`."""
    try:
        closed = inspect.getclosurevars(fn).nonlocals
        text = make(fn, {name: name for name in fn.__code__.co_varnames + fn.__code__.co_cellvars})
    except (OSError, TypeError, SyntaxError, AttributeError, AssertionError, ValueError):
        return None
    text.globals, text.foreign = {**text.globals, **closed}, True
    return text


def mended(
    index: Index, fn: Callable[..., Any], make: Callable[..., Text] = Text, then: Callable[..., Any] | None = None
) -> tuple[str | None, float]:
    """In words, the likeliest change of this function, or of one beside it that it calls, that gives all that is right,
    on further inputs too, or one for each of several wrong results; "" where there is none, None of what is no `def`.
    And what it costs.

    then: raises CheckFailed where such a function gives what is right and is not.
    """
    text = own_text(fn, make)
    if text is None:
        return None, 0.0
    now, parts = _beside(text, fn)
    got = index.run(text.compiled())
    wrong = index.wrong_parts(got)
    off = [i for i in index.order if not index.same_outcome([got[i]], [index.right[i]])]
    order = [*off, *(i for i in index.order if i not in off)]
    if index.kinds:
        text.kinds = index.kinds.kinds_of(text, [tuple(map(index.copied, x)) for x in index.inputs[:3]])
    shared = _lines_of_both(text, index.texts)
    made = _in_order(index, text, now, parts, shared)
    right = index.run(index.texts[0].compiled(), index.more)

    is_right = functools.partial(_is_right, index, order, right, then)
    of_part: dict[int, Change] = {}

    until = time.process_time() + (_SECONDS if not isinstance(text, HostedText) else _HOSTED)
    for of, change, run in made:
        if time.process_time() > until:
            break
        outcome = index.run(run)
        mends = [p for p in wrong if all(index.same_outcome([outcome[i]], [index.right[i]], p) for i in order)]
        if not mends or not (words := said(of, change)) or _undoes(of, change):
            continue
        if len(mends) == len(wrong) and is_right(run):
            return words, _price(change, shared)
        of_part |= {p: change for p in mends if p not in of_part and of is text}
    if len(wrong) > 1 and len(of_part) == len(wrong):
        with contextlib.suppress(SyntaxError):
            if is_right(text.compiled(*{id(c): c for c in of_part.values()}.values())):
                each = [f"{index.names[p]}: {said(text, change)}" for p, change in of_part.items()]
                return ("; and " if sum(map(len, each)) < index.longest - 20 else ";\nand ").join(each), 2.0
    value, price = value_mended(index, text, off, is_right, said) if off else ("", 0.0)
    return (value, price) if price <= 1.0 or not _has_nan(got) else ("", 0.0)


def _has_nan(got: Outcome) -> bool:
    """Whether NaN is among the results: the line in which it arises says more than a number."""
    values = (x for one in got if not isinstance(one, str) for x in one)
    return any(bool(torch.as_tensor(x).isnan().any()) for x in values if isinstance(x, (float, torch.Tensor)))


def _in_order(
    index: Index, text: Text, now: dict[str, Any], parts: dict[str, Text], shared: set[int]
) -> list[tuple[Text, Change, Callable[..., Any]]]:
    """The changes of a text, and of those beside it, with the function that each makes; the likeliest first."""
    if isinstance(text, HostedText):  # it is called with the inputs
        made, around = _runs(index, text, {}, index.kinds), HostText(text)
        variants = Variants(around, beside := [*changes(around, {}), *_of_grids(around)])
        made += [(around, c, run) for c in beside if (run := variants.chosen(c)) is not None]
        return in_turn((_price(x[1], shared), x[1].slug, x) for x in made)
    values = {name: [given[i] for given in index.inputs] for i, name in enumerate(text.params)}
    made, called = _runs(index, text, values, index.kinds), text.compiled()
    for name, part in parts.items():
        made += [(part, change, functools.partial(_with, now, name, other, called))
                 for _, change, other in _runs(index, part, {}, index.kinds)]  # fmt: skip
    return sorted(made, key=lambda x: (len(x[1].edits) > 1, _price(x[1], shared)))


def _price(change: Change, shared: set[int]) -> float:
    """The lower, the likelier. shared: what stands in lines that a right text has too."""
    longer = max(_length(new) - _length(old) for old, new in map(_both, change.edits))
    known = all(id(holder) in shared for (holder, _, _), _ in change.edits)
    kept = any(
        isinstance(old, ast.BinOp)
        and isinstance(old.op, ast.FloorDiv)
        and (new is old.left or isinstance(getattr(new, "op", None), ast.Mult))
        for old, new in map(_both, change.edits)
    )  # more likely its being rounded down is wrong
    likely = change.slug == "wrong-number" or _loosened(change)  # nothing comes or goes
    whole = change.slug == "mask" or any(isinstance(new, ast.If) for _, new in change.edits)  # it is there already
    return change.cost - 0.5 * likely + _SHARED * known + _LONGER * max(0, longer * (not whole)) + 1.5 * kept


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


def _lines_of_both(text: Text, right: Sequence[Text]) -> set[int]:
    """What stands in lines that a right text has too: it is less likely to be what is wrong."""
    known = {ast.unparse(line) for other in right for line in ast.walk(other.tree) if isinstance(line, _LINES)}
    lines = [line for line in ast.walk(text.tree) if isinstance(line, _LINES) and ast.unparse(line) in known]
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
    loops = [loop for loop in ast.walk(text.tree) if isinstance(loop, ast.For)]
    parts = {part: whole for loop in loops for part, whole in _parts(loop)}
    begins: list[Any] = [x.iter.args[0] for x in loops if isinstance(x.iter, ast.Call) and len(x.iter.args) > 1]
    begins += [value for x in begins if isinstance(x, ast.Name) for value in text.assigned.get(x.id, ()) if value]
    of_begins = {id(x) for begin in begins for x in ast.walk(begin)}
    for old, new in map(_both, change.edits):
        if id(old) in of_begins and isinstance(new, ast.Constant) and new.value == 0:
            return True  # all of the walk, where a part is enough
        tests = [getattr(x, "test", x) for x in (old, new)]
        if isinstance(tests[0], ast.Compare) and isinstance(tests[1], ast.Constant):
            return True  # a condition that then always holds, or never
        if isinstance(old, ast.Name) and isinstance(new, ast.Name) and new.id in text.params:
            of = text.assigned.get(old.id, ())
            cut = any(isinstance(x, ast.Subscript) and getattr(x.value, "id", "") == new.id for x in of if x)
            if cut or new.id in parts.get(old.id, ()):
                return True
        begins, other = ([n.lower for n in ast.walk(x) if isinstance(n, ast.Slice)] for x in (old, new))
        whole = isinstance(old, ast.Subscript) and _dump(old.value) == _dump(new)
        for x, y in zip(begins, [None] * len(begins) if whole else other, strict=False):
            if x is not None and not isinstance(x, ast.Constant) and (y is None or ast.unparse(y) == "0"):
                return True
    before = {*text.params} & {*_reads(text.tree)}
    with text.changed(change):
        return not before <= {*_reads(text.tree)}


def _parts(loop: ast.For) -> Iterator[tuple[str, set[str]]]:
    """The names that a loop sets, each with what it is a part of: `for s, v in zip(scores.split(n), V.split(n))`."""
    targets, values = [loop.target], [loop.iter]
    if isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
        targets, values = loop.target.elts, loop.iter.args
    for target, value in zip(targets, values, strict=False):
        yield getattr(target, "id", ""), {*_reads(value)}


def _reads(tree: ast.AST) -> Iterator[str]:
    return (x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load))


def _length(x: Any) -> int:
    return len(tokens(ast.unparse(x) if isinstance(x, ast.AST) else "").split())


def _remainder(change: Change) -> bool:
    """Whether it takes a remainder: often that is 0, by accident."""
    olds, news = zip(*map(_both, change.edits), strict=True)
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in news) and not any(
        isinstance(o, ast.BinOp) and isinstance(o.op, ast.Mod) for o in olds)  # fmt: skip


def _called(now: dict[str, Any], name: str, *given: Any, **named: Any) -> Any:
    return now[name](*given, **named)


def _with(now: dict[str, Any], name: str, other: Any, run: Callable[..., Any], *given: Any) -> Any:
    """What `run` gives with another function of this name."""
    before, now[name] = now[name], other
    try:
        return run(*given)
    finally:
        now[name] = before


def _too_often_right(change: Change) -> bool:
    """Of tensors: a number, or inf, where there is -inf, and a factor of 1000: what is large enough does not show."""
    old, new = (ast.unparse(x) if isinstance(x, ast.AST) else "" for x in _both(change.edits[0]))
    finite = change.slug == "finite-number" and any(isinstance(new, ast.Constant) for _, new in change.edits)
    return finite or ("inf" in old and old.lstrip("-") == new) or "1000" in new or "1024" in new


def _runs(
    index: Index, text: Text, values: dict[str, Any], kinds: Any
) -> list[tuple[Text, Change, Callable[..., Any]]]:
    further = getattr(kinds, "further", lambda _: ()) if kinds else _further
    hosted = isinstance(text, HostedText)  # no lists, and time for few
    zero = not hosted and any(ast.unparse(x) == "0" for right in index.texts for x in ast.walk(right.tree))
    state = () if hosted else _of_state(text)
    made = [*changes(text, values, kinds), *_of_lines(text, zero), *_of_blocks(text), *state, *further(text),
            *_of_flags(text, values), *_of_sums(text), *_of_tiles(text), *_of_unread(text)]  # fmt: skip
    divides = any(isinstance(x, ast.Mod) for right in index.texts for x in ast.walk(right.tree))
    made = [c for c in made if c.slug not in (*_BY_CHANCE, *index.without) and not (_digits(c) or (
        kinds and (_without_limit(c) or _too_often_right(c))) or (not divides and _remainder(c)))]  # fmt: skip
    variants = Variants(text, made)
    return [(text, c, run) for c in made if (run := variants.chosen(c)) is not None]


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
    for line in [line for line in ast.walk(text.tree) if isinstance(line, _LINES)]:
        reads: dict[str, list[Slot]] = {}
        for slot, node in _slots(line):
            if (of := whole.get(ast.unparse(node))) and node is not of[0]:
                yield Change(_PART, "", 1.2, ((slot, _new(ast.Name(of[1], ast.Load()))),))
            if isinstance(node, ast.BinOp) and ast.unparse(node.right).lstrip("-") == "0.5":
                yield Change("root", "", 1.2, ((slot, ast.BinOp(node.left, ast.Pow(), node.right)),))
            if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
                yield Change("wrong-sign", "", 1.2, ((slot, node.operand),))
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value and node.value % 4 == 0:
                yield Change("wrong-number", "", 2.0, ((slot, ast.Constant(node.value // 4)),))
            inner = isinstance(slot[0], ast.BinOp) and isinstance(slot[0].op, ast.Add)
            terms = _terms(node) if isinstance(node, ast.BinOp) and not inner else []
            for i, j in itertools.permutations(range(len(terms)), 2) if len(terms) < 5 else ():
                if isinstance(product := terms[i], ast.BinOp) and isinstance(product.op, ast.Mult):
                    for rest, factor in ((product.left, product.right), (product.right, product.left)):
                        moved = [*terms]
                        moved[i], moved[j] = rest, ast.BinOp(terms[j], ast.Mult(), factor)
                        yield Change("elsewhere", "", 1.9, ((slot, _new(functools.reduce(_plus, moved))),))
            if zero and isinstance(node, ast.BinOp):
                yield Change(_PART, "", 0.9, ((slot, _new(ast.Constant(0))),))
            if isinstance(node, ast.Name) and isinstance(slot[0], ast.Call) and not _keeps(slot[0]):
                yield Change("wrong-sign", "", 1.9, ((slot, _expr("-x", x=node)),))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
                yield Change("more", "", 1.6, ((slot, _expr("x * y", x=node, y=node.right)),))
            term = isinstance(slot[0], ast.BinOp) and isinstance(slot[0].op, (ast.Add, ast.Sub))
            for other in text.numbers if term and isinstance(node, ast.Name) else ():
                yield Change("more", "", 2.3, ((slot, _expr("x * y", x=node, y=_expr(other))),))
            for one, instead in beside.get(ast.unparse(node), ()) if isinstance(node, ast.Call) else ():
                if node is not one:
                    yield Change(_PART, "", 1.2, ((slot, _new(instead)),))
            if isinstance(node, ast.Name) and node.id in own:
                reads.setdefault(node.id, []).append(slot)
        for a, b in itertools.combinations(reads, 2):
            turned = [(slot, _new(ast.Name(y, ast.Load()))) for x, y in ((a, b), (b, a)) for slot in reads[x]]
            if text.are_alike(a, b):
                yield Change(
                    "names-exchanged", f"`{a}` and `{b}` are exchanged, in {text.say(line)}", 1.6, tuple(turned)
                )
            parts = [*zip(meant.get(a, ()), meant.get(b, ()), strict=False)]
            for x, y in parts if len(reads[a]) == len(reads[b]) else ():
                for here, there in zip(reads[a], reads[b], strict=True) if type(x) is type(y) else ():
                    yield Change(_PART, "", 1.9, ((here, x), (there, y)))
        for name, slots in reads.items():
            for slot, part in itertools.product(slots, meant.get(name, ())):
                yield Change(_PART, "", 1.9, ((slot, part),))


def _of_blocks(text: Text) -> Iterator[Change]:
    """What two names are set to in lines that follow each other, exchanged."""
    for block in (getattr(x, "body", None) for x in ast.walk(text.tree)):
        for a, b in itertools.pairwise(block) if isinstance(block, list) else ():
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
        turned = ast.parse(f"{flag} = not {flag}").body
        begun = _new(ast.If(ast.Constant(True), [*turned, first], []))
        words = f"`{flag}` is taken the other way round, everywhere"
        yield Change("turned-round", words, 1.2, (((text.tree, "body", 0), begun),))
        for holder in ast.walk(text.tree):
            if isinstance(holder, (ast.If, ast.IfExp)) and flag not in _reads(holder.test):
                new = ast.BoolOp(ast.And(), [_expr(flag), holder.test])
                yield Change("condition-missing", "", 1.0, (((holder, "test", None), _new(new)),))


def _of_unread(text: Text) -> Iterator[Change]:
    """What is made and never read, in a minimum or the like."""
    for name in sorted({*text.locals} - {*_reads(text.tree)}):
        for slot, node in _slots(text.tree):
            called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            if called in _LIMITS and len(node.args) > 1:  # type: ignore[attr-defined]
                more = ast.Call(node.func, [*node.args, _expr(name)], node.keywords)  # type: ignore[attr-defined]
                yield Change("limit-missing", "", 0.4, ((slot, _new(more)),))


def _of_sums(text: Text) -> Iterator[Change]:
    """What a loop multiplies one of its sums by, and not the other."""
    for loop in (x for x in ast.walk(text.tree) if isinstance(x, ast.For)):
        blocks = [body for x in ast.walk(loop) if isinstance(body := getattr(x, "body", None), list)]
        lines = [(body, at) for body in blocks for at in range(len(body))]
        parts = {id(body[at]): [*_set_by(body[at])] for body, at in lines}
        sums = {name for set_to in parts.values() for name, value in set_to if name in _reads(value)}
        for body, at in lines:
            line, own = body[at], dict(parts[id(body[at])])
            for name, value in own.items():
                product = value if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) else None
                by = product and {_plain(product.left): product.right, _plain(product.right): product.left}.get(name)
                for other, behind in itertools.product(sums - {*own}, ("", "[:, None]", "[..., None]") if by else ()):
                    factor = f"{_plain(by)}{behind}"
                    more = ast.parse(f"{other} = {other} * {factor}").body
                    words = f"`{other}` is not multiplied by `{factor}`, as `{name}` is"
                    holder = next(x for x in ast.walk(loop) if getattr(x, "body", None) is body)
                    new = _new(ast.If(ast.Constant(True), [*more, line], []))
                    yield Change("not-rescaled", words, 1.3, (((holder, "body", at), new),))


def _set_by(line: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a line sets, each with what it is set to."""
    if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
        yield line.target.id, ast.BinOp(ast.Name(line.target.id, ast.Load()), line.op, line.value)
    if isinstance(line, ast.Assign):
        target, value = line.targets[0], line.value
        several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for x, y in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:  # type: ignore
            if isinstance(x, ast.Name):
                yield x.id, y


def _of_tiles(text: Text) -> Iterator[Change]:
    """Numbers that count from 0 in each tile, where they count in all of the tensor."""
    loops = [x for x in ast.walk(text.tree) if isinstance(x, ast.For) and isinstance(x.target, ast.Name)]
    inner = next((x for x in reversed(loops) if _aranges(x)), None)
    counted = [(s, x) for s, x in _slots(inner or ast.Module([], [])) if _dump(x) in _aranges(inner)]
    begins = [ast.unparse(x.target) for x in loops if any(y is inner for y in ast.walk(x))]
    for several in itertools.product((*begins, ""), repeat=len(counted)) if len(counted) < 4 else ():
        edits = [(s, _expr(f"x + {name}", x=x)) for (s, x), name in zip(counted, several, strict=True) if name]
        if edits:
            each = " and ".join(f"`{name}` is missing at `{text.plain(x)}`"
                                for (_, x), name in zip(counted, several, strict=True) if name)  # fmt: skip
            words = f"{each}: it counts from 0 in each tile"
            yield Change("counted-in-a-tile", words, 1.0 + 0.3 * len(edits), tuple(edits))


def _aranges(tree: ast.AST | None) -> set[str]:
    calls = (x for x in ast.walk(tree or ast.Pass()) if isinstance(x, ast.Call))
    return {_dump(x) for x in calls if ast.unparse(x.func).endswith("arange")}


def _of_grids(text: Text) -> Iterator[Change]:
    """The numbers of a grid's blocks in another order."""
    for node in ast.walk(text.tree):
        sizes = node.slice if isinstance(node, ast.Subscript) else None
        for order in itertools.permutations(sizes.elts) if isinstance(sizes, ast.Tuple) and len(sizes.elts) < 4 else ():
            if [*order] != sizes.elts:  # type: ignore[union-attr]
                new = _new(ast.Tuple([*order], ast.Load()))
                yield Change("grid-exchanged", "", 0.8, (((node, "slice", None), new),))


def _loosened(change: Change) -> bool:
    """Whether a comparison counts equal numbers too, or no longer."""
    ops = [{type(x.ops[0]) for x in pair if isinstance(x, ast.Compare)} for pair in map(_both, change.edits)]
    return all(x in ({ast.Lt, ast.LtE}, {ast.Gt, ast.GtE}) for x in ops)


def _keeps(call: ast.Call) -> bool:
    """Whether it is a list's or a set's, for which the sign of what it keeps may not show."""
    return getattr(call.func, "attr", "") in ("add", "append", "discard", "extend", "get", "setdefault", "update")


def _digits(change: Change) -> bool:
    """Whether a number is rounded to more digits: it should not be."""
    (holder, _, at), _ = change.edits[0]
    return isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "round" and bool(at)


def _without_limit(change: Change) -> bool:
    """Whether a maximum or the like goes, of tensors: any reference gives as good a sum, as long as none overflows."""
    old, new = _both(change.edits[0])
    return isinstance(old, ast.Call) and new in old.args and getattr(old.func, "attr", "")[:3] in ("max", "min", "whe")


def _further(text: Text) -> Iterator[Change]:
    """What a right text has nowhere and a wrong one may want: no rounding, a quotient rounded up, a divisor of the
    whole sum that divides one term, another factor or term of a line.
    """
    roundings: list[tuple[Slot, Any]] = []
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in _ROUNDING:
            roundings.append((slot, node.args[0]))
            yield Change("more", "", 1.0, (roundings[-1],))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _POWERS:
            for other in (*text.numbers, *text.locals):
                less = ast.Call(
                    node.func, [_expr("x - y", x=node.args[0], y=_expr(other)), *node.args[1:]], node.keywords
                )
                yield Change("more", "", 2.2, ((slot, _new(less)),))
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
                    yield Change("brackets", "", 1.5, ((slot, _new(new)),))
                floor = isinstance(rounded, ast.BinOp) and isinstance(rounded.op, ast.FloorDiv)
                of = (rounded.left, rounded.right) if floor else _rounded_up(rounded)  # type: ignore[attr-defined]
                if of and _dump(of[1]) == _dump(factor):
                    yield Change("more", "", 0.6, ((slot, of[0]),))
        if isinstance(node.op, (ast.Add, ast.Sub)) and not isinstance(getattr(slot[0], "op", None), (ast.Add, ast.Sub)):
            terms = _terms(node)
            for at, term in enumerate(terms):
                rest = terms[:at] + terms[at + 1 :]
                if not (rest and isinstance(term, ast.BinOp) and isinstance(term.op, _DIVISIONS)):
                    continue
                for more in (x for n in (1, 2, len(rest)) for x in itertools.combinations(rest, n)):
                    whole = ast.BinOp(functools.reduce(_plus, [term.left, *more]), term.op, term.right)
                    others = [x for x in rest if not any(x is y for y in more)]
                    yield Change("brackets", "", 1.5, ((slot, _new(functools.reduce(_plus, [whole, *others]))),))
    if len(roundings) > 1:
        yield Change("rounded-all", "numbers are rounded that should not be", 1.0, tuple(roundings))
    for line in ast.walk(text.tree):
        if not isinstance(line, (ast.Assign, ast.AugAssign, ast.Return)) or line.value is None:
            continue
        several = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
        for i, x in enumerate(several):
            if isinstance(x, ast.Constant) and isinstance(x.value, bool):
                continue
            slot = (line.value, "elts", i) if isinstance(line.value, ast.Tuple) else (line, "value", None)
            ways = ("x * y", "x + y", "x - y", "y - x", *(("x // y", "y // x") if text.whole else ("x / y", "y / x")))
            for other, way in (*itertools.product((*text.numbers, *text.locals), ways), ("1", "x + y"), ("1", "x - y")):
                yield Change("more", "", 2.5, ((slot, _expr(way, x=x, y=_expr(other))),))


def _of_state(text: Text) -> Iterator[Change]:
    """What goes wrong from turn to turn: a list that two names share, a number that begins anew or does not, a pair the
    other way round.
    """
    nodes = [*ast.walk(text.tree)]
    names = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    indexed = [x for x in nodes if isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Name)]
    read = {ast.unparse(x) for x in indexed if isinstance(x.ctx, ast.Load)}
    items = [_expr(x) for x in (*sorted(names), *sorted(read))]  # the same verdict each time
    slices = [x for x in nodes if isinstance(x, ast.Slice) and x.step is None]
    ends = {(ast.unparse(x), side): x for s in slices for side in ("lower", "upper") if (x := getattr(s, side))}
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Slice) and node.step is None:
            for (_, side), end in ends.items():
                if getattr(node, side) is None:
                    bounds = {"lower": node.lower, "upper": node.upper, side: end}
                    yield Change("cut", "", 1.3, ((slot, _new(ast.Slice(**bounds))),))
        kept = isinstance(slot[0], (ast.Call, ast.Assign, ast.Tuple, ast.List, ast.Dict))
        if kept and isinstance(node, (ast.Name, ast.Subscript)) and isinstance(node.ctx, ast.Load):
            yield Change("shared", "", 1.0, ((slot, _expr("list(x)", x=node)),))
        if kept and isinstance(node, ast.Constant) and type(node.value) is int:
            for item in items:
                yield Change(_PART, "", 1.5, ((slot, item),))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield Change("turned", "", 1.3, ((slot, ast.Constant(not node.value)),))
        if isinstance(node, ast.Tuple) and not isinstance(slot[0], ast.Assign) and len(node.elts) == 2:
            yield Change("turned", "", 1.3, ((slot, _new(ast.Tuple(node.elts[::-1], ast.Load()))),))
    loops = [x for x in text.tree.body if isinstance(x, (ast.For, ast.While))]
    for loop in loops:
        for holder in ast.walk(loop):
            for at, line in enumerate(body) if isinstance(body := getattr(holder, "body", None), list) else ():
                if isinstance(line, ast.Return):
                    yield Change("turned", "", 1.3, (((holder, "body", at), _new(ast.Continue())),))
                target = line.targets[0] if isinstance(line, ast.Assign) else None
                if isinstance(target, ast.Subscript):
                    new = _new(ast.AugAssign(target, ast.Add(), line.value))
                    yield Change("added", "", 1.3, (((holder, "body", at), new),))
                    before = _expr("d.get(k, 0) + x", d=target.value, k=target.slice, x=line.value)
                    yield Change("added", "", 1.4, (((line, "value", None), before),))
    begun_with = {name: value for line in text.tree.body for name, value in _set_by(line)}
    for branch in (x for loop in loops for x in ast.walk(loop) if isinstance(x, ast.If)):
        last = branch.body[-1]
        for name, value in begun_with.items():
            if isinstance(value, (ast.Name, ast.Constant)) and name not in dict(_set_by(last)):
                again = _new(ast.If(ast.Constant(True), [last, *ast.parse(f"{name} = {_plain(value)}").body], []))
                words = f"`{name}` is not set back to `{_plain(value)}`, where `{text.plain(branch.test)}`"
                yield Change("not-set-back", words, 1.0, (((branch, "body", len(branch.body) - 1), again),))
    for at, line in enumerate(text.tree.body):
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            for loop in loops:
                begun = _new(ast.If(ast.Constant(True), [line, loop.body[1]], []))
                edits = (((text.tree, "body", at), _new(ast.Pass())), ((loop, "body", 1), begun))
                yield Change(_WITHIN, "", 1.2, edits)


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


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return [*_terms(node.left), ast.UnaryOp(ast.USub(), node.right)]
    return [node]


def said(text: Text, change: Change) -> str:
    """What stands there, and what belongs there; "" where that is too long."""
    if change.said.startswith("{order}"):
        return ""  # the index says which
    if change.slug in _WORDED:
        return change.said
    pieces = [_pieces(text, edit) for edit in change.edits]
    if change.slug in _TWO_PLACES:
        words, then = f"the line `{pieces[0][0]}` {_TWO_PLACES[change.slug]}", f", before `{pieces[0][1]}`"
        return words + then * (change.slug == "lines-exchanged" and len(words + then) <= _LONGEST)
    old, new = pieces[0]
    before, after = _both(change.edits[0])
    if isinstance(before, ast.BinOp) and isinstance(before.op, ast.FloorDiv) and _rounded_up(after):
        return f"`{old}` is rounded down: it is rounded up"
    if change.slug == _PART and len({*pieces}) == 2:
        return f"`{old}` stands where `{new}` belongs, and `{pieces[1][0]}` where `{pieces[1][1]}` does"
    if len(set(pieces)) > 1 or old == new:
        return ""
    where = "" if len(pieces) == 1 else ", both times" if len(pieces) == 2 else ", everywhere"
    part = _part(text, change.edits[0])
    gone = new in ("pass", "")
    words = f"the line `{old}` is one too many" if gone else part or f"`{old}` stands where `{new}` belongs"
    where = where or (_place(text, change, old) if not part or old.isidentifier() else "")
    return "" if len(words) > _LONGEST else words + where * (len(words + where) <= _LONGEST)


def _part(text: Text, edit: Any) -> str:
    """Of a term, a factor, a divisor or a condition that goes or comes: which."""
    old, new = _both(edit)
    if isinstance(new, ast.IfExp) and (
        arm := next((x for x in (new.body, new.orelse) if _dump(x) == _dump(old)), None)
    ):
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


def _plain(x: Any) -> str:
    return ast.unparse(x) if isinstance(x, ast.AST) else ""


def _dump(x: Any) -> str:
    return ast.dump(x) if isinstance(x, ast.AST) else repr([*map(_dump, x)] if isinstance(x, list) else x)


def _pairs(x: Any, y: Any) -> list[tuple[Any, Any]]:
    both = isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
    return [*zip(x, y, strict=True)] if both else [(x, y)]


def _pieces(text: Text, edit: Any) -> tuple[str, str]:
    old, new = _both(edit)
    while type(old) is type(new) and not isinstance(old, (ast.stmt, ast.UnaryOp)):  # the smallest part that differs
        fields = [(getattr(old, x), getattr(new, x)) for x in old._fields]
        pairs = [pair for x, y in fields for pair in _pairs(x, y) if _dump(pair[0]) != _dump(pair[1])]
        if len(pairs) != 1 or not all(isinstance(x, ast.expr) and not isinstance(x, ast.Tuple) for x in pairs[0]):
            break
        old, new = pairs[0]
    ends = "" if isinstance(old, ast.Slice) else ":"
    first, second = ((text.plain(x).splitlines() or [""])[0].rstrip(ends) for x in (old, new))
    return first, second


def _place(text: Text, change: Change, old: str) -> str:
    """Where a piece stands that is there more than once."""
    if text.unchanged.count(old) < 2 and not old.isdigit():
        return ""
    holder = change.edits[0][0][0]
    line: ast.AST | None = holder if isinstance(holder, (ast.stmt, ast.BinOp, ast.Call, ast.Compare)) else None
    around = [x for x in ast.walk(text.tree) if isinstance(x, (ast.Subscript, *_LINES)) and holder in ast.walk(x)]
    if line is None:  # the least that has it
        line = min(around, key=_length, default=None)
    whole = (text.plain(line).splitlines() or [""])[0].rstrip(":") if line else ""
    if text.unchanged.count(whole) > 1:  # the least that is there once
        wholes = [text.plain(x) for x in sorted(around, key=_length)]
        whole = next((x for x in wholes if whole in x and text.unchanged.count(x) < 2 and "\n" not in x), whole)
    return f", in `{whole}`" if whole and len(whole) <= _LONGEST else ""
