"""Which single change of the learner's own CUDA makes it right? `mend`, for kernels.

All changes of the answer's lines, the likeliest first, go into one build and run one after the other; the first that
gives what is right on all of an exercise's trials is told. So nothing is said that has not been run.
"""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flashlab.check import cuda_text
from flashlab.check.changes import Change, _new, _slots, changes
from flashlab.check.claims import tokens
from flashlab.check.cuda_text import CudaText, Declaration
from flashlab.check.failed import CheckFailed
from flashlab.check.mend import _BY_CHANCE, _LONGER, _SHARED, _both, said

if TYPE_CHECKING:
    from flashlab.check.cuda_index import Trials

_SECONDS = 6.0  # on a machine with other work, where some of these are not tried; else it takes 1 to 5
_TRIED = {"6": 350, "7": 350, "8": 150, "9": 120}  # changes, by phase: later kernels take long to build and to run
_REMOVED = ("condition-missing", "limit-missing", "term-missing", "factor-missing", "function-missing")
_LINES = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, Declaration)
_ALIKE = 0.5  # of the words and signs of a right text's piece, that the one in its place has
_KEPT = r"\b(?:const|__shared__|static|__restrict__|constexpr)\b|\s"
_FAR = 0.5  # what it costs more to set an index of the frame
_COUNTED = (ast.Name, ast.Constant, ast.operator, ast.cmpop, ast.Attribute, ast.Subscript, ast.Call)
_SHORTEST = 5  # words and signs of a piece
_LONGEST = 80  # characters of a missing line


def mended(it: Trials, code: str) -> str:
    """In words, the change that makes a file right; "" where there is none, or too late."""
    until, tried = time.monotonic() + _SECONDS, _TRIED.get(it.id.partition(".")[0], 0)
    if not tried:
        return ""
    own = it.own_lines(code)
    try:
        mine = "\n".join(code.splitlines()[own.start : own.stop])
        text, right = (CudaText(it.read(x), it.region) for x in (mine, it.kept["text"]))
        frame = CudaText(it.place(it.kept["text"]))
        made = _likeliest(text, right, frame, tried)
        module, refused = it._built(text, made)
    except (cuda_text.UnreadableError, SyntaxError, CheckFailed, AssertionError, StopIteration, KeyError):
        return ""  # what cannot be read, or not be put together again
    module.timeout = 1.0
    order = [i for i in range(len(it.runs)) if not it.gives(module, i)]
    if not order:
        return ""  # what is wrong does not show here
    order += [i for i in range(len(it.runs)) if i not in order]
    for number, change in enumerate(made, 1):
        if time.monotonic() > until:
            return ""
        if number in refused:
            continue
        module.launch("flashlab_choose", number)
        if all(it.gives(module, i) for i in order):
            return _said(text, change)
    return ""


def _said(text: CudaText, change: Change) -> str:
    words = change.said if change.slug == _MISSING else said(text, change)
    held = r"^`(?:if|while) \((.*)\)` stands where `\w+ \(true\)` belongs"
    return re.sub(held, r"the condition `\1` is one too many", words)


_MISSING = "line-added"


def _likeliest(text: CudaText, right: CudaText, frame: CudaText, tried: int) -> list[Change]:
    shared = _known(text, right)
    around = {x: of for x, of in frame.types.items() if x not in text.types}
    text.locals += [x for x in around if x in text.reads]
    text.kinds |= {x: frame.kinds[x] for x in around}
    found = [
        *changes(text, None, cuda_text),
        *_missing_lines(text, right),
        *_of_the_right(text, right),
        *_further(text),
    ]
    scope, own = _in_scope(text), {*text.types}
    text.types |= around

    def fits(change: Change) -> bool:  # types, and what is declared where
        if change.slug == "wrong-name" and not all(_alike(text, *_both(x)) for x in change.edits):
            return False
        if any(
            isinstance(x[0], ast.Assign) and text.plain(x[0].targets[0]) == text.plain(new) for x, new in change.edits
        ):
            return False  # set to itself
        return change.slug == _MISSING or all(_names(new) & own <= scope.get(id(x[0]), own) for x, new in change.edits)

    made: dict[Any, Change] = {}
    far = {x for x in around if text.kinds[x] == {"int"}}  # there are many, and each has its place
    for change in sorted(
        filter(fits, found), key=lambda x: _price(x, shared) + _FAR * any(_names(new) & far for _, new in x.edits)
    ):
        key = change.said, *((id(holder), *where, text.plain(new)) for (holder, *where), new in change.edits)
        if change.slug not in _BY_CHANCE and _said(text, change):
            made.setdefault(key, change)
        if len(made) == tried:
            break
    return [*made.values()]


def _alike(text: CudaText, old: Any, new: Any) -> bool:
    """Whether two names are of one kind."""
    of = [re.sub(_KEPT, "", text.types.get(x.id, "")) for x in (old, new) if isinstance(x, ast.Name)]
    return len(of) < 2 or of[0] == of[1]


def _known(text: CudaText, right: CudaText) -> set[int]:
    """What stands in lines that the right text has too."""
    known = {right.plain(x) for x in ast.walk(right.tree) if isinstance(x, _LINES)}
    lines = [x for x in ast.walk(text.tree) if isinstance(x, _LINES) and text.plain(x) in known]
    return {id(x) for line in lines for x in ast.walk(line)}


def _price(change: Change, shared: set[int]) -> float:
    def length(x: Any) -> int:
        return sum(isinstance(n, _COUNTED) for n in ast.walk(x)) if isinstance(x, ast.AST) else 0

    target = any(field in ("target", "targets") for (_, field, _), _ in change.edits)  # else a line counts for nothing
    rare = 0.7 * (change.slug in _REMOVED) - 0.5 * (change.slug == "wrong-name") + target  # pieces are rather missing
    longer = 0 if change.slug == _MISSING else max(length(new) - length(old) for old, new in map(_both, change.edits))
    known = change.slug != _MISSING and all(id(holder) in shared for (holder, _, _), _ in change.edits)
    return change.cost + rare + _SHARED * known + _LONGER * max(0, longer)


def _names(node: Any) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} if isinstance(node, ast.AST) else set()


def _in_scope(text: CudaText) -> dict[int, set[str]]:
    """Of each node the variables of the text that are declared where it stands."""
    scope: dict[int, set[str]] = {}

    def walk(block: Iterable[ast.AST], names: set[str]) -> None:
        for one in block:
            inner = names
            for first in getattr(one, "first", ()):
                inner = inner | _declared(first)
            scope.update((id(x), inner) for x in ast.walk(one))
            names = names | _declared(one)
            scope[id(one)] = names
            for field in ("body", "orelse"):
                walk(getattr(one, field, ()), inner)

    walk(text.tree.body, {*text.params})
    return scope


def _declared(node: ast.AST) -> set[str]:
    texts = node.texts if isinstance(node, Declaration) else []
    return {*re.findall(r"(\w+)\s*(?:\[[^]]*\])*\s*[=;]", "".join(texts))}


def _blocks(text: CudaText) -> Iterator[tuple[ast.AST, str, list[Any]]]:
    for holder in ast.walk(text.tree):
        for field in ("body", "orelse"):
            if isinstance(block := getattr(holder, field, None), list) and holder is not text.tree:
                yield holder, field, block


def _missing_lines(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A line of the right text that is there less often, behind each line, where its names are known; a variable of the
    frame that is never set, set to one of the answer's at the end of a block.
    """
    whole = (ast.Expr, ast.AugAssign)
    calls, ours = (Counter(x.plain(n) for n in ast.walk(x.tree) if isinstance(n, whole)) for x in (right, text))
    known = _known_names(text, right)
    nodes = {right.plain(n): n for n in ast.walk(right.tree) if isinstance(n, whole) and _names(n) <= known
             and not isinstance(getattr(n, "value", None), ast.Constant)}  # fmt: skip
    scope = _in_scope(text)
    set_to, own = ({x.plain(t) for n in ast.walk(x.tree) for t in _targets(n)} for x in (right, text))
    for holder, field, block in _blocks(text):
        for at, line in enumerate(block):
            for call in (x for x in nodes if calls[x] > ours[x] and len(x) < _LONGEST):
                if not _names(nodes[call]) & {*text.types} <= scope[id(line)]:
                    continue
                where = f"behind `{text.plain(line)[:_LONGEST]}`"
                new = _foreign(right, text, nodes[call])
                yield _added(holder, field, at, line, new, f"`{call}` is missing {where}")
        declared = [n for x in block if isinstance(x, Declaration) for n in re.findall(r"(\w+)\s*=", "".join(x.texts))]
        for name in sorted(set_to - own - {*right.locals}) if block else ():
            for other in declared:
                new = ast.Assign([ast.Name(name, ast.Store())], ast.Name(other, ast.Load()))
                at = len(block) - 1
                yield _added(holder, field, at, block[at], new, f"the line `{name} = {other}` is missing")


def _further(text: CudaText) -> Iterator[Change]:
    """A variable of the frame that is set too early; what an exponential's argument, a bound or an index lacks."""
    for holder, field, block in _blocks(text):
        for at, line in enumerate(block[:-1]):
            if isinstance(line, ast.Assign) and not {x.id for x in _targets(line)} & {*text.types}:
                last = ast.If(ast.Constant(True), [block[-1], line], [])
                edits = ((holder, field, at), _new(ast.Pass())), ((holder, field, len(block) - 1), _new(last))
                yield Change(_MISSING, f"the line `{text.plain(line)}` comes too early", 1.3, edits)
    ints, floats = ([x for x in text.locals if text.kinds.get(x) == {kind}] for kind in ("int", "float"))
    for slot, node in _slots(text.tree):
        if isinstance(node, ast.Call) and "exp" in text.plain(node.func) and len(node.args) == 1:
            for other in floats:
                less = ast.BinOp(node.args[0], ast.Sub(), ast.Name(other, ast.Load()))
                yield Change("more", "", 1.2, ((slot, _new(ast.Call(node.func, [less], []))),))
        if isinstance(slot[0], (ast.Compare, ast.Subscript)) and isinstance(node, (ast.Name, ast.BinOp)):
            for other, sign in itertools.product(ints, (ast.Add(), ast.Sub())):
                new = ast.BinOp(node, sign, ast.Name(other, ast.Load()))
                yield Change("more", "", 2.2, ((slot, _new(new)),))


def _known_names(text: CudaText, right: CudaText) -> set[str]:
    """Names of the right text that mean something in the answer."""
    frame = {*right.reads} - {*right.locals}
    return _names(text.tree) | frame | {*right.others}


def _targets(node: ast.AST) -> list[Any]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return [x for x in found if isinstance(x, ast.Name)]


def _added(holder: ast.AST, field: str, at: int, line: Any, new: ast.stmt, words: str) -> Change:
    lines = ast.If(ast.Constant(True), [line, new], [])
    return Change(_MISSING, words, 1.0, (((holder, field, at), _new(lines)),))


def _foreign(right: CudaText, text: CudaText, node: Any) -> Any:
    """A piece of the right text in the learner's tree, where what is no Python name is numbered otherwise."""
    names = {k: text._other(v) for k, v in right.others.items()}
    new = ast.parse(ast.unparse(node)).body[0]
    for x in ast.walk(new):
        if isinstance(x, ast.Name):
            x.id = names.get(x.id, x.id)
    return new if isinstance(node, ast.stmt) else new.value  # type: ignore[attr-defined]


def _of_the_right(text: CudaText, right: CudaText) -> Iterator[Change]:
    """A piece of the right text for one that has most of its words and signs, where all its names are known here."""
    known = _known_names(text, right)
    kinds = (ast.BinOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript)
    pieces = {right.plain(n): n for n in ast.walk(right.tree) if isinstance(n, kinds)}
    pieces = {x: n for x, n in pieces.items() if len(tokens(x).split()) >= _SHORTEST and _names(n) <= known}
    counted = {x: Counter(tokens(x).split()) for x in pieces}
    for slot, node in _slots(text.tree):
        mine = Counter(tokens(text.plain(node)).split())
        for said_there, piece in pieces.items():
            there = counted[said_there]
            if mine != there and (mine & there).total() >= _ALIKE * max(mine.total(), there.total()):
                yield Change("part-of-it", "", 1.3, ((slot, _new(_foreign(right, text, piece))),))
