"""Which single change of the learner's own CUDA makes it right? `mend`, for kernels.

All changes of the answer's lines, the likeliest first, go into one build and run one after the other; the first that
gives what is right on all of an exercise's trials is told. So nothing is said that has not been run.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import keyword
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashlab.check import cuda_text, mend
from flashlab.check.changes import Change, Slot, _at, _expr, _slots, changes
from flashlab.check.claims import tokens
from flashlab.check.cuda_text import CudaText, Declaration, Loop, Opaque, _counts
from flashlab.check.cuda_values import value_mended
from flashlab.check.failed import CheckFailed
from flashlab.check.mend import _both, elsewhere, in_turn, said, which
from flashlab.check.own_changes import PART, of_branches, of_two_names
from flashlab.check.trees import blocks, both, is_op, names_in, nodes

_SECONDS = 5.0  # on a machine with other work, where some of these are not tried; else it takes 1 to 5
_ENDLESS = 0.2  # seconds, at least, after which a changed text has no end
_AT_LEAST = 1.5  # of it for the trials of a build
_OF_VALUES = 2.0  # more, for the values
_FIRST = 80  # changes of the first build
_MORE = 0.5  # seconds for another change that is as likely
_TRIED = {"6": 700, "7": 700, "8": 400, "9": 400, "11": 300, "11c": 300, "12": 300}  # by phase, where there is time
_FEW_RUNS = ("11", "11c", "12")  # in which a number is right by chance
_REMOVED = ("condition-missing", "limit-missing", "term-missing", "factor-missing", "function-missing")
_LIKELY = ("wrong-name", "wrong-number")  # nothing comes or goes
_LINES = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, Declaration)
_ALIKE = 0.5  # of the words and signs of a right text's piece, that the one in its place has
_KEPT = r"\b(?:const|__shared__|static|__restrict__|constexpr)\b|\s"
_FAR = 0.5  # what it costs more to set an index of the frame
_COUNTED = (ast.Name, ast.Constant, ast.operator, ast.cmpop, ast.Attribute, ast.Subscript, ast.Call)
_ROOT = 8  # characters that functions have in common of which one is taken for another
_LARGE = 100  # no number of an index
_VALUES = (ast.Name, ast.Constant, ast.Subscript, ast.Call)  # no conditions
_ORDERED = re.compile("sync|wait|arrive|commit|fence")
_EXTREMES = ("fmax", "fmin", "max", "min")
_BASES = ({"exp2f": "expf", "exp2": "exp", "log2f": "logf", "log2": "log", "exp2_approx": "expf"},
          {"expf": "exp2f", "__expf": "exp2f", "logf": "log2f", "__logf": "log2f"})  # fmt: skip
_BY_HAND = 1.5  # what it costs more to say that what is made by hand is wrong
_SHORTEST = 5  # words and signs of a piece
_LONGEST = 80  # characters of a missing line


def mended(it: Any, code: str) -> str:
    """In words, the change that makes a file right by an exercise's `Trials`, or which of its values is wrong; "" where
    there is none, or too late.
    """
    until, tried = time.monotonic() + _SECONDS, _TRIED.get(it.id.partition(".")[0], 0)
    if not tried:
        return ""
    try:
        text, right = (CudaText(it.read(x), it.region) for x in (it.own_text(code), it.kept["text"]))
        text.foreign = True
        around = _types(it.place(it.kept["text"]))
        made = _likeliest(text, right, around, tried)
        start = time.monotonic()
        said_of_it, order = _tried(it, text, made[:_FIRST], until)
        if said_of_it or not order or it.judged:  # then the right text's values are some of many
            return said_of_it
        each = (time.monotonic() - start) / _FIRST
        of_a_value, price = value_mended(it, text, right, order, time.monotonic() + _OF_VALUES, _said)
        if price > 1.0 and it.id.partition(".")[0] in _FEW_RUNS:
            of_a_value = ""
        if of_a_value and price <= 1.0:
            return of_a_value
        until += _OF_VALUES
        more = max(0, int((until - time.monotonic()) / each))  # so many as there is time for
        return (more and _tried(it, text, made[_FIRST:][:more], until)[0]) or of_a_value
    except (cuda_text.UnreadableError, SyntaxError, CheckFailed, AssertionError, StopIteration, KeyError):
        pass  # what cannot be read, or not be put together again
    return ""


def _tried(it: Any, text: CudaText, made: Sequence[Change], until: float) -> tuple[str, list[int]]:
    """What is said of the first change that makes it right; and the runs, the wrong ones first, if there are any."""
    module, refused = it._built(text, made, until)
    module.timeout, until = 1.0, max(until, time.monotonic() + _AT_LEAST)
    wrong, rest, longest = _by_time(it, module)
    module.timeout = min(1.0, max(_ENDLESS, 10 * longest))  # a loop that ends never is left soon
    order, another = [*wrong, *rest] if wrong else [], ""
    found: Change | None = None
    for number, change in enumerate(made, 1):
        if time.monotonic() > until or (found and change.cost > found.cost + mend.AS_LIKELY):
            break
        if order and number not in refused:
            module.launch("flashlab_choose", number)
            if all(it.gives(module, i) for i in order) and it.well(module):
                words = (told := _said(text, change)) + which(text, change, told)
                if not found:
                    found, another, until = change, words, min(until, time.monotonic() + _MORE)
                elif elsewhere(text, change, text, found):
                    return f"{another}; or {words}", order
            if not another and it.is_one(module):
                another = _said(text, change)
    return _noted(it.notes, another) if found else another, order


def _noted(notes: Mapping[str, str], words: str) -> str:
    """And why what belongs there is there, where the exercise says that."""
    found = re.search(r"where `([^`]+)` belongs|the (?:term|factor|divisor) `([^`]+)` is missing", words)
    note = notes.get(found[1] or found[2]) if found else None
    return f"{words}: {note}" if note else words


def _by_time(it: Any, module: Any) -> tuple[list[int], list[int], float]:
    """The runs that are wrong and those that are right, the quickest first; and the seconds of the longest."""
    took: tuple[dict[int, float], dict[int, float]] = {}, {}
    for i in range(len(it.runs)):
        start = time.monotonic()
        gives = it.gives(module, i)
        took[gives][i] = time.monotonic() - start
    wrong, right = (sorted(x, key=lambda i: x[i]) for x in took)  # noqa: B023
    return wrong, right, max((*took[0].values(), *took[1].values()))


def _types(code: str) -> dict[str, str]:
    """Of the variables of a file, where it can be read."""
    with contextlib.suppress(cuda_text.UnreadableError, SyntaxError):
        return CudaText(code).types
    return {}


def _said(text: CudaText, change: Change) -> str:
    words = change.said if change.slug in (_MISSING, _GUARD) else said(text, change)
    if words and isinstance(change.edits[0][0][0], Declaration):
        words = words.partition(", in `")[0] + text.line_of(replace(change, said=""))
    held = r"^`(?:if|while) \((.*)\)` stands where `\w+ \(true\)` belongs"
    return re.sub(held, r"the condition `\1` is one too many", words)


_MISSING, _TERM, _GUARD = "line-added", "term-of-a-right-text", "condition-added"


def _likeliest(text: CudaText, right: CudaText, around: dict[str, str], tried: int) -> list[Change]:
    """So many changes of the answer, the likeliest first; around: the types of the file's variables."""
    shared = _known(text, right)
    read = text.reads + right.reads
    around = {x: of for x, of in around.items() if x in read and x not in {*text.types, *right.types}}
    text.locals += [*around]
    text.kinds |= {x: {text.kind_of(of)} for x, of in around.items()}
    text.types |= around
    scope = _in_scope(text, {*text.params, *around})
    pieces = (
        _missing_lines(text, right, scope),
        _of_the_right(text, right),
        _of_states(text, scope),
        _further(text, right),
    )
    found = [*changes(text, None, cuda_text), *itertools.chain(*pieces)]
    indices = {x for x in around if text.kinds[x] == {"int"}}  # there are many, and each has its place
    made: dict[Any, Change] = {}
    axes = {x for one in (text, right) for x in re.findall(r"\b\w+(?:Idx|Dim)\.\w", one.unchanged)}
    priced = ((_price(x, shared, indices), x) for x in found)
    for change in in_turn((price, x.slug, replace(x, cost=price)) for price, x in priced):
        key = change.said, *((id(holder), *where, text.plain(new)) for (holder, *where), new in change.edits)
        of_another = {*re.findall(r"\b\w+(?:Idx|Dim)\.\w", " ".join(text.plain(new) for _, new in change.edits))} - axes
        if change.slug not in mend._BY_CHANCE and not of_another and _fits(text, change, scope) and _said(text, change):
            made.setdefault(key, change)
        if len(made) == tried:
            break
    return [*made.values()]


def _fits(text: CudaText, change: Change, scope: dict[int, set[str]]) -> bool:
    """Whether it is of one type, of what is declared there, and not right by accident."""
    if change.slug == "wrong-number" and len(change.edits) > 1 and getattr(change.edits[0][1], "value", 2) in (0, 1):
        return False  # 32 for 1 everywhere: one lane does all, and nothing is exchanged
    tests = {id(x.test) for x in nodes(text.tree, Loop)}
    asked = {id(n) for x in nodes(text.tree, ast.If) for n in ast.walk(x.test)}
    lambdas = [(m[1], x) for x in ast.walk(text.tree) if (m := re.match(r"auto (\w+) = \[", getattr(x, "head", "")))]
    for (holder, field, at), new in change.edits:
        old = _at((holder, field, at))
        if isinstance(getattr(new, "op", None), ast.Pow) and _name(new.left) not in text.others:
            return False  # that is how a cast is written here
        if text.plain(old) == "INFINITY" and isinstance(new, ast.Constant):
            return False  # below all that the runs have
        if id(holder) in asked and text.plain(new).startswith("blockIdx"):
            return False  # no thread of a block, or each: the condition is not asked any more
        if text.plain(old) in ("true", "false") and isinstance(new, ast.BinOp):
            return False
        if type(getattr(old, "value", "")) is int and isinstance(new, ast.Name) and _type(text, new.id) == "bool":
            return False
        if any(name in names_in(new) and any(x is holder for x in ast.walk(one)) for name, one in lambdas):
            return False  # within itself
        if id(old) in tests and isinstance(new, ast.Compare) and _turned(old, new):
            return False  # no turn at all
        if isinstance(holder, ast.Call):
            if text.plain(new) in map(text.plain, holder.args) and text.plain(holder.func).startswith(_EXTREMES):
                return False  # of one, not of two: any reference gives as good a sum
            if "__shfl" in text.plain(holder.func) and getattr(new, "value", 0) == 32:
                return False  # of 32 lanes that is lane 0
        names = (x.id for x in (old, new) if isinstance(x, ast.Name))
        if change.slug == "wrong-name" and len({_type(text, x) for x in names}) > 1:
            return False
        if type(getattr(old, "value", "")) is int and type(getattr(new, "value", 0)) is float:
            return False
        if isinstance(holder, ast.Assign) and text.plain(holder.targets[0]) == text.plain(new):
            return False  # set to itself
        if isinstance(holder, ast.Compare) and (isinstance(new, ast.Compare) or "INFINITY" in text.plain(old)):
            return False
        if isinstance(new, ast.Compare) and isinstance(new.ops[0], ast.GtE) and text.plain(new.comparators[0]) == "0":
            return False  # always, of an index
        if isinstance(holder, (ast.If, ast.While)) and field == "test" and isinstance(new, _VALUES):
            return False  # it holds always, where the trials are of one size
        if isinstance(holder, ast.BinOp) and isinstance(holder.op, (ast.Mod, ast.Sub, ast.FloorDiv, ast.Div)):
            sides = [new if field == side else getattr(holder, side) for side in ("left", "right")]
            if len({*map(text.plain, sides)}) == 1:
                return False  # 0 or 1, whatever it is
        own = names_in(new) & {*text.types}
        known = scope.get(id(holder.test if isinstance(holder, Loop) else holder), own)  # of a loop its own too
        if change.slug != _MISSING and not own <= known:
            return False
    return True


def _turned(old: Any, new: ast.Compare) -> bool:
    less = [isinstance(x.ops[0], (ast.Lt, ast.LtE)) for x in (old, new) if isinstance(x, ast.Compare)]
    return len(less) == 2 and less[0] != less[1]


def _type(text: CudaText, name: str) -> str:
    return re.sub(_KEPT, "", text.types.get(name, ""))


def _known(text: CudaText, right: CudaText) -> set[int]:
    """What stands in lines that the right text has too."""
    known = {right.plain(x) for x in nodes(right.tree, *_LINES)}
    lines = [x for x in nodes(text.tree, *_LINES) if text.plain(x) in known]
    return {id(x) for line in lines for x in ast.walk(line)}


def _price(change: Change, shared: set[int], indices: set[str]) -> float:
    """The lower, the likelier is it that this is what a learner has to change; indices: of the frame."""

    def length(x: Any) -> int:
        return len(nodes(x, *_COUNTED)) if isinstance(x, ast.AST) else 0

    axis = any(getattr(getattr(new, "value", None), "id", "") == "threadIdx" for _, new in change.edits)  # often 0
    likely = (change.slug in _LIKELY and not axis) or mend._loosened(change)
    target = any(field in ("target", "targets") for (_, field, _), _ in change.edits)  # else a line counts for nothing
    price = change.cost + 0.7 * (change.slug in _REMOVED) - 0.5 * likely + target  # pieces are rather missing
    if change.slug == "lines-exchanged":
        one, other = (_at(slot) for slot, _ in change.edits)
        depends = bool(_set_in(one) & names_in(other) or _set_in(other) & names_in(one))
        price -= 0.6 * bool(_ORDERED.search(change.said)) + 0.8 * depends
    if change.slug != _MISSING:
        price += mend._SHARED * all(id(holder) in shared for (holder, _, _), _ in change.edits)
    if change.slug not in (_MISSING, _TERM, "lines-exchanged"):
        price += mend._LONGER * max(0, *(length(new) - length(old) for old, new in map(_both, change.edits)))
    if change.slug in ("wrong-name", "more"):
        price += _FAR * any(names_in(new) & indices for _, new in change.edits)
    return price


def _set_in(node: Any) -> set[str]:
    return {x.id for x in _targets(node)}


def _in_scope(text: CudaText, outside: set[str]) -> dict[int, set[str]]:
    """Of each node the variables that are declared where it stands; outside: before all of the text."""
    scope: dict[int, set[str]] = {}

    def walk(block: Iterable[ast.AST], names: set[str]) -> None:
        for one in block:
            inner = names
            for first in getattr(one, "first", ()):
                inner = inner | _declared(first)
            inner = inner | {*re.findall(r"(\w+) (?=[,)])", getattr(one, "head", ""))}  # a lambda's arguments
            scope.update((id(x), inner) for x in ast.walk(one))
            names = names | _declared(one)
            scope[id(one)] = names
            for field in ("body", "orelse"):
                walk(getattr(one, field, ()), inner)

    walk(text.tree.body, outside)
    return scope


def _declared(node: ast.AST) -> set[str]:
    texts = node.texts if isinstance(node, Declaration) else []
    return {*re.findall(r"(\w+)\)?\s*(?:\[[^]]*\]\s*)*[=;\0]", "".join(texts))}


def _blocks(text: CudaText) -> Iterator[tuple[ast.AST, str, list[Any]]]:
    return (found for found in blocks(text.tree) if found[0] is not text.tree)


def _missing_lines(text: CudaText, right: CudaText, scope: dict[int, set[str]]) -> Iterator[Change]:
    """A line of the right text that is there less often, behind each line, where its names are known; a variable of the
    frame that is never set, set to one of the answer's at the end of a block.
    """
    whole = (ast.Expr, ast.AugAssign)
    calls, ours = (Counter(x.plain(n) for n in nodes(x.tree, *whole)) for x in (right, text))
    known = _known_names(text, right)
    wanted, have = (Counter(x.plain(n.func) for n in nodes(x.tree, ast.Call)) for x in (right, text))
    there = {right.plain(n): n for n in nodes(right.tree, *whole) if names_in(n) <= known
             and not isinstance(getattr(n, "value", None), ast.Constant)}  # fmt: skip
    set_to, own = ({x.plain(t) for n in ast.walk(x.tree) for t in _targets(n)} for x in (right, text))
    by_hand = {_base(x.targets[0]) for x in nodes(text.tree, ast.Assign)} - {""}
    kept = {x for x in text.types if text.types[x].strip() == "int"} - own - {
        x for n in nodes(text.tree, Loop) for one in n.first for x in _declared(one)}  # fmt: skip
    for holder, field, block in _blocks(text):
        for at, line in enumerate(block):
            for call in (x for x in there if calls[x] > ours[x] and len(x) < _LONGEST):
                if not names_in(there[call]) & {*text.types} <= scope[id(line)]:
                    continue
                new, here = _foreign(right, text, there[call]), text.plain(line)[:_LONGEST]
                if here == call:
                    continue
                made = sorted(names_in(new) & by_hand)
                words = f"`{call}` is missing behind `{here}`"
                words = f"`{made[0]}` is not what `{call}` makes of it, behind `{here}`" if made else words
                otherwise = have[call.split("(")[0]] >= wanted[call.split("(")[0]] > 0  # in other words
                cost = 1.0 + _BY_HAND * bool(made) + mend._SHARED * otherwise
                yield _added(holder, field, at, line, new, words, cost)
                if isinstance(line, ast.Expr) and here.split("(")[0][:_ROOT] == call.split("(")[0][:_ROOT]:
                    yield _added(holder, field, at, ast.Pass(), new, f"`{here}` stands where `{call}` belongs", 0.9)
        for name in sorted({x for n in block if not isinstance(n, Declaration) for x in names_in(n)} & kept):
            words, more = f"`{name}` is never moved on: `{name}++` is missing", ast.parse(f"{name} += 1").body[0]
            yield _added(holder, field, len(block) - 1, block[-1], more, f"{words} at the end of the loop", 0.3)
        fixed = {x for x in text.types if "const" in text.types[x].split()}
        for name in sorted((set_to - own - fixed) & ({*text.types} | set_to - {*right.locals})) if block else ():
            for other in sorted(x for x in scope[id(block[-1])] if x != name and _type(text, x) == _type(text, name)):
                new = ast.Assign([ast.Name(name, ast.Store())], ast.Name(other, ast.Load()))
                at = len(block) - 1
                yield _added(holder, field, at, block[at], new, f"the line `{name} = {other}` is missing")


def _whole_lines(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A line or a loop too many, too early, or in the other's place; what is added to where it is set; a barrier."""
    unmet = "__shared__" in text.unchanged and "__syncthreads" not in right.unchanged
    guards, known = _guards(text), _known_names(text, right)
    tests = {right.plain(n.test): n.test for n in nodes(right.tree, ast.If)}
    asked = [(x, _foreign(right, text, test)) for x, test in tests.items() if names_in(test) <= known]
    for holder, field, block in _blocks(text):
        for at, line in enumerate(block):
            slot, here = (holder, field, at), text.plain(line).split("\n")[0][:_LONGEST]
            element = isinstance(line, (ast.Assign, ast.AugAssign)) and not _targets(line)
            wanted = [(x, _expr(x)) for x in guards] if element else asked if isinstance(line, ast.Expr) else []
            for guard, test in wanted:
                if not isinstance(holder, ast.If):
                    words = f"`if ({guard})` is missing before `{here}`"
                    yield Change(_GUARD, words, 1.0, ((slot, ast.If(test, [line], [])),))
            if unmet and not isinstance(line, (Declaration, ast.Return)):
                met = ast.parse("__syncthreads()").body[0]
                yield _added(holder, field, at, line, met, f"`__syncthreads()` is missing behind `{here}`", 0.9)
            if isinstance(line, Loop) or (isinstance(line, Opaque) and not line.declares):
                said_of_it = re.sub(r"(?<=\() | (?=[);]|$)", "", text.plain(line))
                words = f"the line `{said_of_it}` is one too many, with all that belongs to it"
                yield Change(_MISSING, words, 1.6, ((slot, ast.Pass()),))
            if isinstance(line, ast.If) and len(line.body) == 1 and not line.orelse:
                words = f"the line `if ({text.plain(line.test)}) {text.plain(line.body[0])}` is one too many"
                if isinstance(line.body[0], _LINES):
                    yield Change(_MISSING, words, 1.3, ((slot, ast.Pass()),))
            elif isinstance(line, ast.If) and not line.orelse:
                words = f"the condition `{text.plain(line.test)}` is one too many"
                yield Change(_MISSING, words, 1.1, ((slot, ast.If(ast.Constant(True), line.body, [])),))
            if isinstance(line, ast.AugAssign) and isinstance(line.op, ast.Add):
                put = ast.Assign([line.target], line.value)
                yield Change(_MISSING, f"`+=` stands where `=` belongs, in `{here}`", 1.2, ((slot, put),))
            if isinstance(line, ast.Assign) and at + 1 < len(block):
                set_to = {x.id for x in _targets(line)}
                if set_to and not set_to & {*text.types}:
                    edits = (slot, ast.Pass()), ((holder, field, len(block) - 1), both(block[-1], line))
                    yield Change(_MISSING, f"the line `{text.plain(line)}` comes too early", 1.3, edits)
        for one, other in _initialisers(block):
            words = f"`{text.plain(_at(one))}` and `{text.plain(_at(other))}` are exchanged"
            yield Change("names-exchanged", words, 1.3, ((one, _at(other)), (other, _at(one))))


def _guards(text: CudaText) -> list[str]:
    """Conditions that some threads of a block fail: of one alone, of as many as a loop says."""
    made = [(re.findall(r"(\w+)\s*=\s*$", n.texts[i]), text.plain(x)) for n in ast.walk(text.tree)
            if isinstance(n, Declaration) for i, x in enumerate(n.values)]  # fmt: skip
    threads = ["threadIdx.x", *(x for names, value in made if value.startswith("threadIdx.x") for x in names)]
    loops = {x for n in nodes(text.tree, Loop) for one in n.first for x in _declared(one)}
    return [f"{x} {y}" for x in threads if x in text.unchanged for y in ("== 0", *(f"< {z}" for z in sorted(loops)))]


def _base(node: ast.AST) -> str:
    """The array of which an element is set."""
    while isinstance(node, ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name):
            return node.id
    return ""


def _terms(text: CudaText, slot: Slot, node: ast.AST) -> list[tuple[Slot, Any]]:
    """Of an index: the numbers, or multiples of one, that are summed in it."""
    name = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else node
    multiple = name is node or isinstance(node.right, ast.Constant)  # type: ignore[attr-defined]
    if isinstance(name, ast.Name) and multiple and text.kinds.get(name.id) == {"int"}:
        return [(slot, node)] if is_op(slot[0], ast.Add, ast.Sub) else []
    parts = _slots(node) if isinstance(node, ast.BinOp) else ()
    return [x for s, y in parts if s[0] is node for x in _terms(text, s, y)]


def _frame(node: ast.AST) -> str:
    """An expression less its names and numbers."""
    return re.sub(r"\w+", "", ast.unparse(node))


def _in_one_line(text: CudaText) -> Iterator[Change]:
    """In one line another array of the same type, two terms of an index or two arguments exchanged; a name without the
    factor that it has elsewhere; a loop that goes on where one ended.
    """
    arrays = [x for x in text.types if text.kinds.get(x) == {"array"}]
    for line in nodes(text.tree, ast.Expr, ast.Assign):
        slots: dict[str, list[Slot]] = defaultdict(list)
        for x in (x for x in nodes(line, ast.Subscript) if _name(x.value) in arrays):
            slots[_name(x.value)].append((x, "value", None))
        for here, there in itertools.product(slots, arrays):
            if here != there and _type(text, here) == _type(text, there):
                edits = tuple((slot, ast.Name(there, ast.Load())) for slot in slots[here])
                yield Change("wrong-name", "", 1.2, edits)
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.BinOp) and not isinstance(slot[0], ast.BinOp):
            for (a, x), (b, y) in itertools.combinations(_terms(text, slot, node), 2):
                if text.plain(x) != text.plain(y):
                    words = f"`{text.plain(x)}` and `{text.plain(y)}` are exchanged, in `{text.plain(node)}`"
                    yield Change("names-exchanged", words, 1.0, ((a, y), (b, x)))
        if isinstance(node, ast.Call) and len(node.args) == 2 and len({*map(_frame, node.args)}) == 1:
            if not text.plain(node.func).startswith(_EXTREMES):
                turned = ast.Call(node.func, node.args[::-1], [])
                yield Change("arguments-exchanged", "", 1.2, ((slot, turned),))
    products: dict[str, Any] = {_name(x): y for _, n in _slots(text.tree) if isinstance(n, ast.BinOp)
                and isinstance(n.op, ast.Mult) for x, y in ((n.left, n.right), (n.right, n.left))
                if _name(x) and _name(y)}  # fmt: skip
    for slot, node in _slots(text.tree):
        factor = is_op(slot[0], ast.Mult)
        by = products.get(_name(node))
        if by is not None and not (factor and _name(by) in {*map(_name, ast.iter_child_nodes(slot[0]))}):
            yield Change("more", "", 0.8, ((slot, ast.BinOp(node, ast.Mult(), by)),))
    for block in (text.tree.body, *(block for _, _, block in _blocks(text))):
        for one, other in itertools.pairwise(x for x in block if isinstance(x, Loop)):
            first = other.first[0] if len(other.first) == 1 else None
            if isinstance(first, Declaration) and len(first.values) == 1 and isinstance(one.test, ast.Compare):
                on = ast.BinOp(one.test.comparators[0], ast.Add(), first.values[0])
                yield Change("more", "", 0.8, (((first, "values", 0), on),))


def _further(text: CudaText, right: CudaText) -> Iterator[Change]:
    """What an exponential, a bound or an index lacks."""
    yield from _whole_lines(text, right)
    yield from _heads(text, right)
    yield from _throughout(text, right)
    yield from _in_one_line(text)
    yield from _for_another(text, right)
    yield from of_two_names(text, lambda a, b: _type(text, a) == _type(text, b))
    yield from _in_one_branch(text)
    yield from _of_strides(text, right)
    made = {x for n in ast.walk(text.tree) for x in _declared(n) if not keyword.iskeyword(x)}
    unread = sorted(x for x in made if not text.reads[x] and text.kind_of(text.types.get(x, "")) in ("int", "float"))
    powers = sorted({f for x in nodes(text.tree, ast.Call) if "exp" in (f := text.plain(x.func))})
    constants = [x for x in ("LN2", "LOG2E") if x in right.reads]
    ints, floats, idle = ([x for x in of if text.kinds.get(x) == {kind}] for of, kind in (
        (text.locals, "int"), (text.locals, "float"), (unread, "float")))  # fmt: skip
    yield from _of_floats(text, floats)
    pairs = [*itertools.permutations(floats, 2)] if len(floats) < 2 * _SHORTEST else []
    kept = {id(x) for n in nodes(text.tree, ast.Assign) for x in ast.walk(n.value)
            if _name(x) in {*map(_name, n.targets)} & {*floats}}  # fmt: skip
    swizzled = any(isinstance(x, ast.BitXor) for x in ast.walk(text.tree))
    add, sub, mult = ast.Add(), ast.Sub(), ast.Mult()

    def more(slot: Slot, node: ast.expr, ops: Sequence[ast.operator], names: Iterable[str], cost: float) -> Any:
        for op, name in itertools.product(ops, names):
            yield Change("more", "", cost, ((slot, ast.BinOp(node, op, ast.Name(name, ast.Load()))),))

    for slot, node in _slots(text.tree):
        holder, field, _ = slot
        for name in unread if isinstance(node, ast.Name) else ():  # it is there for something
            yield Change("wrong-name", "", 0.4, ((slot, ast.Name(name, ast.Load())),))
        summed = is_op(holder, ast.Add, ast.Sub)
        row: Any = holder.value if isinstance(holder, ast.Subscript) else None
        in_row = swizzled and isinstance(row, ast.Subscript)
        if isinstance(holder, ast.Call) and field == "args" and "exp" in text.plain(holder.func):
            yield from more(slot, node, [sub], floats, 1.2)
            yield from more(slot, node, [mult], constants, 1.2)
        elif summed and isinstance(node, (ast.Name, ast.Subscript)) and not _counts(text, node):
            yield from more(slot, node, [mult], floats, 1.2)
            yield from more(slot, node, [mult], idle, 0.4)
            for (a, b), f in itertools.product(pairs if id(node) in kept else (), powers):
                power = ast.Call(ast.Name(f, ast.Load()), [_expr(f"{a} - {b}")], [])
                yield Change(_TERM, "", 1.0, ((slot, ast.BinOp(node, mult, power)),))
        elif in_row and isinstance(node, (ast.Name, ast.BinOp)) and field == "slice":
            yield Change("swizzled", "", 0.8, ((slot, ast.BinOp(node, ast.BitXor(), row.slice)),))
        elif summed and _name(node) in ints:
            yield Change("more", "", 1.2, ((slot, _expr("x * 2", x=node)),))
        elif isinstance(holder, (ast.Compare, ast.Subscript)) and isinstance(node, (ast.Name, ast.BinOp)):
            yield from more(slot, node, [add, sub], ints, 2.2)
        elif isinstance(node, ast.Constant) and node.value == 0 and isinstance(holder, (Declaration, ast.IfExp)):
            minus = ast.UnaryOp(ast.USub(), ast.Name("INFINITY", ast.Load()))
            yield Change("more", "", 1.2, ((slot, minus),))
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            if swizzled and isinstance(node.op, ast.Add):
                yield Change("wrong-operator", "", 1.2, ((slot, ast.BinOp(node.left, ast.BitXor(), node.right)),))
            elif not isinstance(node.op, ast.Add) and any(map(_is_power, (node.left, node.right))):
                yield Change("more", "", 1.2, ((slot, ast.BinOp(node, add, ast.Constant(1))),))


def _of_floats(text: CudaText, floats: Sequence[str]) -> Iterator[Change]:
    """A variable that a factor of an exponent lacks as a difference, or one in the place of a number; a size that a
    number of a sum lacks as a factor.
    """
    sizes = [x for x in sorted(text.reads) if re.fullmatch("[A-Z][A-Z_]*", x) and x != "INFINITY"]
    in_powers = {id(x) for n in ast.walk(text.tree) if _is_power(n) for x in n.args}  # type: ignore[attr-defined]
    for slot, node in _slots(text.tree):
        number = isinstance(node, ast.Constant) and isinstance(node.value, float)
        term = isinstance(node, ast.Constant) and isinstance(getattr(slot[0], "op", None), ast.Add)
        for size in sizes if term and not number else ():
            yield Change("more", "", 0.6, ((slot, _expr(f"x * {size}", x=node)),))
        for name in floats:
            new = ast.Name(name, ast.Load())
            if id(slot[0]) in in_powers and _name(node) in floats:
                yield Change("more", "", 1.0, ((slot, ast.BinOp(node, ast.Sub(), new)),))
            elif number and not isinstance(slot[0], Declaration):
                yield Change("wrong-name", "", 1.0, ((slot, new),))


def _of_strides(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A stride for a number; that of a tensor which the line names is the likelier."""
    strides = {said: _foreign(of, text, x) for of in (text, right) for x in ast.walk(of.tree)
               if isinstance(x, ast.Attribute) and "_stride." in (said := of.plain(x))}  # fmt: skip
    for line in nodes(text.tree, *_LINES):
        for slot, node in _slots(line):
            product = isinstance(node, ast.Constant) and isinstance(getattr(slot[0], "op", None), ast.Mult)
            for said, stride in strides.items() if product else ():
                cost = 0.8 if said.rpartition(".")[0] in text.plain(line) else 1.4
                yield Change("wrong-name", "", cost, ((slot, stride),))


def _in_one_branch(text: CudaText) -> Iterator[Change]:
    for (branch, field), at, line in of_branches(text):
        block = getattr(branch, field)
        words = f"`{text.plain(line)}` is missing behind `{text.plain(block[at])}`, as it stands in the other branch"
        yield _added(branch, field, at, block[at], line, words, 1.0)


def _for_another(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A number, a name, a function or an axis in the place of another one."""
    numbers, ints = _numbers(text, right), [x for x in text.locals if text.kinds.get(x) == {"int"}]
    calls = [(x, n) for x in (text, right) for n in nodes(x.tree, ast.Call)]
    functions = {x.plain(n.func): len(n.args) for x, n in calls}
    lasts = {one.plain(x): _expr(one.plain(x)) for one in (text, right) for _, x in _slots(one.tree)
             if re.fullmatch(r"[A-Z]\w* - 1", one.plain(x))}  # fmt: skip
    tests = {id(x.test) for x in nodes(text.tree, Loop)}
    for slot, node in _slots(text.tree):
        holder, field, _ = slot
        if isinstance(node, ast.Constant) and type(n := node.value) is int:
            for name in ints if isinstance(holder, ast.Call) and field == "args" else ():
                yield Change("wrong-name", "", 1.4, ((slot, ast.Name(name, ast.Load())),))
            near = {n * 2, *(n // x for x in (2, 4, 8) if n % x == 0)} if n and not n & (n - 1) else set()
            cheap = 1.45 if id(holder) in tests else 1.6  # twice or half as many turns
            for value, cost in (*((x, cheap) for x in sorted(near)), *((x, 2.1) for x in sorted(numbers - near))):
                if value and value != n:
                    yield Change("wrong-number", "", cost, ((slot, ast.Constant(value)),))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and text.plain(node.right) == "2":
            of = ast.BinOp(node.left, ast.Add(), ast.Constant(1))
            yield Change("wrong-parity", "", 1.0, ((slot, ast.BinOp(of, node.op, node.right)),))
        if isinstance(holder, ast.Compare) and isinstance(holder.ops[0], (ast.Eq, ast.NotEq)):
            for end in (*lasts.values(), ast.Constant(0)):
                if text.plain(node) in (*lasts, "0") and text.plain(node) != text.plain(end):
                    yield Change("wrong-end", "", 0.9, ((slot, end),))
        if isinstance(node, ast.Call) and (own := text.plain(node.func)).isidentifier():
            for f in (f for f, n in functions.items() if f.isidentifier() and f != own and n == len(node.args)):
                if f[:_ROOT] == own[:_ROOT] or (own[:2] == f[:2] == "__" and own[-5:] == f[-5:] == "_sync"):
                    yield Change("wrong-function", "", 0.8, (((node, "func", None), ast.Name(f, ast.Load())),))
        if isinstance(node, ast.Attribute) and node.attr in "xyzw":
            for attr in sorted({*"xyzw"} - {node.attr}):
                yield Change("wrong-name", "", 1.8, ((slot, ast.Attribute(node.value, attr, ast.Load())),))


def _is_power(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and "exp" in _name(node.func)


def _numbers(*texts: CudaText) -> set[int]:
    numbers = (n.value for x in texts for n in nodes(x.tree, ast.Constant) if type(n.value) is int)
    return {n for n in numbers if n < _LARGE}


def _divisors(text: CudaText) -> Iterator[tuple[Slot, Any]]:
    for slot, x in _slots(text.tree):
        if slot[1] == "right" and isinstance(slot[0], ast.BinOp) and isinstance(slot[0].op, (ast.Div, ast.Mod)):
            yield slot, x


def _throughout(text: CudaText, right: CudaText) -> Iterator[Change]:
    """Another base everywhere, another number in the bounds of all loops that have it, a constant's name for a number
    that divides.
    """
    divided, divide = defaultdict(list), {x.id for _, x in _divisors(right) if isinstance(x, ast.Name)}
    for slot, x in _divisors(text):
        if isinstance(x, ast.Constant):
            divided[x.value, text.plain(slot[0].left)].append(slot)  # type: ignore[attr-defined]
    constants = sorted(x for x in _known_names(text, right) if x in divide and re.fullmatch("[A-Z][A-Z_]+", x))
    for slots, name in itertools.product(divided.values(), constants):
        yield Change("wrong-number", "", 1.4, tuple((slot, ast.Name(name, ast.Load())) for slot in slots))
    bounds = defaultdict(list)
    for slot, x in (found for n in nodes(text.tree, Loop) for found in _slots(n.test)):
        if isinstance(x, ast.Constant) and type(x.value) is int:
            bounds[x.value].append(slot)
    for bound, slots in bounds.items():
        for wanted in sorted({*_numbers(text, right), 2 * bound, 4 * bound} - {0, bound}) if len(slots) > 1 else ():
            yield Change("wrong-number", "", 1.7, tuple((slot, ast.Constant(wanted)) for slot in slots))

    called = [(slot, x) for slot, x in _slots(text.tree) if isinstance(x, ast.Call)]
    for to in _BASES:
        based = [(slot, x, f) for slot, x in called if (f := text.plain(x.func)) in to]
        olds = dict.fromkeys(f for _, _, f in based)
        if {"log", "exp"} <= {f.strip("_")[:3] for f in olds}:
            here, there = (" and ".join(f"`{x}`" for x in y) for y in (olds, dict.fromkeys(to[f] for f in olds)))
            every = [(slot, ast.Call(ast.Name(to[f], ast.Load()), x.args, [])) for slot, x, f in based]
            yield Change(_MISSING, f"{here} stand where {there} belong", 1.0, tuple(every))


def _heads(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A loop that begins, ends and goes on as one of the right text does."""

    def head(of: CudaText, loop: Loop) -> tuple[str, list[Any], list[str]] | None:
        """The variable, and where its three numbers stand; in words."""
        first, step = (x[0] if len(x) == 1 else None for x in (loop.first, loop.step))
        if not (isinstance(first, Declaration) and len(first.values) == 1 and isinstance(step, ast.AugAssign)):
            return None
        name, places = _name(step.target), [(first, "values", 0), (loop, "test", None), (step, "value", None)]
        op = {ast.Add: "+=", ast.Mult: "*=", ast.Sub: "-="}.get(type(step.op), "")
        words = [of.plain(_at(x)) for x in places]
        return (name, places, [*words[:2], f"{name} {op} {words[2]}"]) if op else None

    for mine in nodes(text.tree, Loop):
        for other in nodes(right.tree, Loop):
            here, there = head(text, mine), head(right, other)
            if not (here and there and "-=" not in here[2][2] + there[2][2] and "*=" not in here[2][2]):
                continue
            news = [_foreign(right, text, _at(x)) for x in there[1]]
            for x in (x for new in news for x in nodes(new, ast.Name) if x.id == there[0]):
                x.id = here[0]
            if "*= 2" in there[2][2]:
                news[2] = ast.Name(here[0], ast.Load())
            heads = (f"for ({here[0]} = {a}; {b}; {c})" for a, b, c in (here[2], [re.sub(
                     rf"\b{there[0]}\b", here[0], x) for x in there[2]]))  # fmt: skip
            words = "`{}` stands where `{}` belongs".format(*heads)
            yield Change(_MISSING, words, 1.3, tuple(zip(here[1], news, strict=True)))


def _name(node: ast.AST) -> str:
    return getattr(node, "id", "")


def _initialisers(block: Sequence[Any]) -> Iterator[tuple[Slot, Slot]]:
    """Two places that follow each other where variables of one type are set."""
    for node, behind in itertools.pairwise([*block, None]):
        ours = [*range(len(node.values))] if isinstance(node, Declaration) else []
        slots: list[Slot] = [(node, "values", i) for i in ours]
        if isinstance(behind, Declaration) and len(behind.values) == len(ours) == 1:
            slots.append((behind, "values", 0))
        for a, b in itertools.pairwise(slots):
            kinds = [re.sub(rf"{_KEPT}|\w+ =", "", x[0].texts[x[2]]) for x in (a, b)]  # type: ignore[attr-defined]
            if kinds[0] == kinds[1] or not kinds[1].strip(",; \0"):
                yield a, b


def _known_names(text: CudaText, right: CudaText) -> set[str]:
    """Names of the right text that mean something in the answer."""
    frame = {*right.reads} - {*right.locals, *right.params, *re.findall(r"\b([A-Z]\w*) = ", right.unchanged)}
    return names_in(text.tree) | frame | {*right.others}


def _targets(node: ast.AST) -> list[Any]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return [x for x in found if isinstance(x, ast.Name)]


def _added(holder: ast.AST, field: str, at: int, line: Any, new: ast.stmt, words: str, cost: float = 1.0) -> Change:
    return Change(_MISSING, words, cost, (((holder, field, at), both(line, new)),))


def _foreign(right: CudaText, text: CudaText, node: Any) -> Any:
    """A piece of the right text in the learner's tree, where what is no Python name is numbered otherwise."""
    names = {k: text._other(v) for k, v in right.others.items()}
    new = ast.parse(ast.unparse(node)).body[0]
    for x in nodes(new, ast.Name):
        x.id = names.get(x.id, x.id)
    return new if isinstance(node, ast.stmt) else new.value  # type: ignore[attr-defined]


def _of_states(text: CudaText, scope: dict[int, set[str]]) -> Iterator[Change]:
    """What one loop has and another lacks, of a state that both bring up to date: a line that takes a variable over;
    the exponential that is one of two summed terms' factor, for the other.
    """
    lines = {text.plain(x): x for x in nodes(text.tree, ast.Assign) if isinstance(
        x.value, ast.Name) and _set_in(x)}  # fmt: skip
    for holder, field, block in _blocks(text):
        here = {text.plain(x) for x in block}
        for said_of_it, line in lines.items() if isinstance(holder, Loop) and block else ():
            if said_of_it not in here and names_in(line) <= scope[id(block[-1])]:
                words = f"the line `{said_of_it}` is missing at the end of the loop"
                yield _added(holder, field, len(block) - 1, block[-1], copy.deepcopy(line), words, 0.5)
    floats = sorted(x for x in text.types if text.kinds.get(x) == {"float"})
    for slot, node in _slots(text.tree):
        if not (isinstance(slot[0], ast.BinOp) and isinstance(slot[0].op, ast.Add)):
            continue
        other = slot[0].left if slot[1] == "right" else slot[0].right
        powers: list[Any] = [x for x in ast.walk(other) if _is_power(x)]
        for power in powers if isinstance(node, ast.expr) and not any(map(_is_power, ast.walk(node))) else ():
            if power.args and isinstance(power.args[0], ast.BinOp) and isinstance(power.args[0].left, ast.Name):
                for name in floats:
                    factor = copy.deepcopy(power)
                    factor.args[0].left = ast.Name(name, ast.Load())
                    by = f"`{text.plain(factor)}`, in `{text.plain(slot[0])}`"
                    words = f"`{text.plain(node)}` is not multiplied by {by}"
                    yield Change(_MISSING, words, 0.9, ((slot, ast.BinOp(node, ast.Mult(), factor)),))


def _of_the_right(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A piece of the right text for one that has most of its words and signs, where all its names are known here."""
    known = _known_names(text, right)
    kinds = (ast.BinOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript)
    pieces = {right.plain(n): n for n in ast.walk(right.tree) if isinstance(n, kinds)}
    off_by = {_name(n.left): n for n in pieces.values()
              if isinstance(n, ast.BinOp) and isinstance(n.right, ast.Constant)
              and isinstance(n.op, (ast.Add, ast.Sub))}  # fmt: skip
    off_by = {x: _foreign(right, text, n) for x, n in off_by.items() if x and right.plain(n) not in text.unchanged}
    for slot, node in _slots(text.tree):
        if _name(node) in off_by and not isinstance(slot[0], ast.BinOp):
            yield Change("more", "", 0.8, ((slot, off_by[_name(node)]),))
    pieces = {x: n for x, n in pieces.items() if len(tokens(x).split()) >= _SHORTEST and names_in(n) <= known}
    counted = [(_foreign(right, text, n), Counter(tokens(x).split())) for x, n in pieces.items()]
    have, wanted = (Counter(x.plain(n) for n in nodes(x.tree, ast.expr)) for x in (text, right))
    sums = (n for n in nodes(right.tree, ast.BinOp) if isinstance(n.op, ast.Add))
    sides = (x for n in sums for x in ((n.left, n.right), (n.right, n.left)) if names_in(x[0]) <= known)
    terms = {said: (_foreign(right, text, x), Counter(tokens(right.plain(other)).split())) for x, other in sides
             if have[said := right.plain(x)] < wanted[said] and not said.isdigit()}  # fmt: skip

    def alike(a: Counter[str], b: Counter[str]) -> bool:
        fewer, more = sorted((a.total(), b.total()))
        return fewer >= _ALIKE * more and (a & b).total() >= _ALIKE * more

    same: dict[tuple[str, int], list[tuple[float, Any]]] = defaultdict(list)
    for slot, node in _slots(text.tree):
        mine = Counter(tokens(text.plain(node)).split())
        behind_cast = isinstance(slot[0], ast.BinOp) and isinstance(slot[0].op, ast.Pow)
        whole = isinstance(slot[0], Declaration) or slot[1] in ("args", "slice") or behind_cast
        if whole and isinstance(node, (ast.Name, ast.BinOp)):
            for term, others in terms.values():
                more = ast.BinOp(node, ast.Add(), term)
                yield Change(_TERM, "", 1.2 + 0.4 * (not alike(mine, others)), ((slot, more),))
        for nth, (piece, there) in enumerate(counted):
            if mine != there and alike(mine, there) and not isinstance(slot[0], ast.Return):  # that is all of it
                cost = 1.1 + 0.1 * ((mine | there).total() - (mine & there).total())
                yield Change(PART, "", cost, ((slot, piece),))
                same[text.plain(node), nth].append((cost, (slot, piece)))
    for found in same.values():
        if len(found) > 1:
            yield Change(PART, "", found[0][0] + 0.1, tuple(edit for _, edit in found))
