"""CUDA text as a tree of Python's `ast`, so that `flashlab.check.changes` can change it, and all changes in one build.

What is no Python has another form in the tree: a cast, a dereference or a template's arguments are a name with a power,
`->` is an attribute that begins so. What cannot be said so stays as it is (`Opaque`), and is not changed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from flashlab.check.changes import Change, Slot, Text
from flashlab.check.code_changes import of_code, of_lines
from flashlab.check.trees import blocks, names_in, nodes

CHOSEN = "flashlab_change"  # the variable that says which change runs; 0 is the right text
PRELUDE = f"""#include <type_traits>
template <class T> using flashlab_as = std::decay_t<T>;
static int {CHOSEN} = 0;
extern "C" int flashlab_choose(int number) {{ {CHOSEN} = number; return 0; }}
"""
_NEXT = "\0"  # between two variables that are declared together
_NAME, _ARROW = "C__", "A__"
_TOKEN = re.compile(
    r"\s*(#[^\n]*(?:\\\n[^\n]*)*|[A-Za-z_]\w*(?:::\w+)*|0[xXbB][\da-fA-F]+[uUlL]*|(?:\d[\d.]*|\.\d+)(?:[eE][+-]?\d+)?[fFuUlL]*"
    r"|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|<<<|>>>|<<=|>>=|->|<<|>>|[<>=!+\-*/%&|^]=|&&|\|\||\+\+|--|::|.)", re.S
)  # fmt: skip
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|#pragma[^\n]*", re.S)
_WORDS = "const|unsigned|signed|volatile|__restrict__"
_TYPES = (
    r"(?:(?:unsigned|signed) )?(?:int|float|double|char|bool|auto|T|half2?|long|short|size_t|u?int\d+_t|uint|unsigned"
    r"|dim3|(?:float|int|uint)[234]|__half2?|__nv_bfloat162?)"
)
_CHANGED = {"__global__", "__device__", "Problem", "CUtensorMap"}  # of a head: the last two are of host functions
_CAST = re.compile(rf"(?:const )?{_TYPES}(?: const)?(?: \*)*")
_OPENS, _CLOSES = "([{", ")]}"
_GOES_ON = ("else", "while", ";", ",", ")")  # behind the brackets of a statement that does not end there
_PRECEDENCE: dict[type, int] = {
    ast.BitOr: 4, ast.BitXor: 5, ast.BitAnd: 6, ast.LShift: 9, ast.RShift: 9, ast.Add: 10, ast.Sub: 10, ast.Mult: 11,
    ast.Div: 11, ast.FloorDiv: 11, ast.Mod: 11,
}  # fmt: skip
_SYMBOLS: dict[type, str] = {
    ast.BitOr: "|", ast.BitXor: "^", ast.BitAnd: "&", ast.LShift: "<<", ast.RShift: ">>", ast.Add: "+", ast.Sub: "-",
    ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "/", ast.Mod: "%", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.USub: "-", ast.UAdd: "+", ast.Invert: "~", ast.Not: "!",
}  # fmt: skip
_AUGMENTED = {f"{_SYMBOLS[op]}=": op for op in (*_PRECEDENCE,) if op is not ast.FloorDiv}


class UnreadableError(ValueError):
    """A piece of CUDA that has no such form."""


class Opaque(ast.stmt):
    """A statement that is not changed: `c`."""

    c: str
    _fields = ()

    @property
    def declares(self) -> bool:
        """Whether it may: what stands behind it needs it."""
        return not re.match(r"(?:for|while|do|if|switch)\b", self.c)


class Body(ast.stmt):
    """Statements in brackets of their own, or a function's; a lambda's have a head before the brackets."""

    body: list[ast.stmt]
    head = ""
    _fields = ("body",)


class Declaration(ast.stmt):
    """Of a type: `texts[0] values[0] texts[1] ...`, expressions with text between."""

    of: str
    texts: list[str]
    values: list[ast.expr]
    _fields = ("values",)


class Loop(ast.While):
    """A `for` of C++."""

    first: list[ast.stmt]
    step: list[ast.stmt]
    _fields = ("first", "test", "step", "body")


def _closing(tokens: Sequence[str], at: int) -> int:
    """Where the bracket closes that opens at `at`."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] in _OPENS) - (tokens[i] in _CLOSES)
        if not depth:
            return i
    raise UnreadableError("a bracket is not closed")


def _split(tokens: Sequence[str], by: str) -> list[Sequence[str]]:
    """The pieces between separators that stand in no bracket."""
    pieces, depth, start = [], 0, 0
    for i, token in enumerate(tokens):
        depth += (token in _OPENS) - (token in _CLOSES)
        if token == by and not depth:
            pieces.append(tokens[start:i])
            start = i + 1
    return [*pieces, tokens[start:]]


def _end(tokens: Sequence[str], at: int) -> int:
    """Where the statement ends that begins at `at`, whatever it is."""
    if tokens[at].startswith("#"):
        return at + 1
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] in _OPENS) - (tokens[i] in _CLOSES)
        after = tokens[i + 1] if i + 1 < len(tokens) else ""
        if not depth and (tokens[i] == ";" and after != "else" or tokens[i] == "}" and after not in _GOES_ON):
            return i + 1
    return len(tokens)


def _opaque(tokens: Sequence[str]) -> Opaque:
    node = Opaque()
    node.c = _joined(tokens)
    return node


class CudaText(Text):
    """The right text of an answer. region: it is statements; else kernels and device functions are changed."""

    def __init__(self, text: str, region: bool = False, words: dict[str, str] | None = None):
        self.others: dict[str, str] = {}  # what a name stands for that no Python name can be
        self.types: dict[str, str] = {}
        self.before: list[str] = []  # the text before each function's body
        self.words, self.whole, self.fixed, self.lists = words or {}, True, {}, set()
        self.params: list[str] = []
        tokens = [m[1] for m in _TOKEN.finditer(_COMMENTS.sub(" ", text).rstrip())]
        tokens = [x for x, left in zip(tokens, ["", *tokens], strict=False) if (left, x) != ("if", "constexpr")]
        self.spelled = {int(x, 0): x for x in tokens if re.fullmatch(r"0[xb][\da-fA-F]+", x)}
        bodies = [self._block(tokens)] if region else self._functions(tokens)
        self.tree = ast.FunctionDef("text", ast.arguments([], [], None, [], [], None, []), [], [])
        self.tree.body = [Body(body=x) for x in bodies]  # type: ignore[call-arg]
        ast.fix_missing_locations(self.tree)
        names = [n.id for n in nodes(self.tree, ast.Name)]
        self.reads, self.locals = Counter(names), [x for x in self.types if x not in self.params and x in names]
        self.kinds = {name: {self.kind_of(of)} for name, of in self.types.items()}
        self.numbers = [x for x in self.params if self.kinds[x] == {"int"}]
        self.parts, self.results = [], set()
        made = defaultdict[str, list[ast.expr]](list)
        for node in nodes(self.tree, Declaration):
            for text, value in zip(node.texts, node.values, strict=False):
                made[next(iter(re.findall(r"(\w+)\s*=\s*$", text)), "")].append(value)
        again = {ast.unparse(n.targets[0] if isinstance(n, ast.Assign) else n.target)
                 for n in nodes(self.tree, ast.Assign, ast.AugAssign)}  # fmt: skip
        self.meant = {name: x[0] for name, x in made.items() if len(x) == 1 and name not in again}

    @functools.cached_property
    def unchanged(self) -> str:
        """The whole text, as `plain` has its pieces."""
        return re.sub(r" < ([\w:, +*-]+) >\(", r"<\1>(", self.all_in_one([]))

    @staticmethod
    def kind_of(of: str) -> str:
        return "pointer" if "*" in of else "array" if "[" in of else "float" if "float" in of else "int"

    def _functions(self, tokens: Sequence[str]) -> list[list[ast.stmt]]:
        bodies, start, i, depth = [], 0, 0, 0
        while i < len(tokens):
            head = tokens[start:i]
            if tokens[i] == "{" and not depth and i and tokens[i - 1] == ")" and _CHANGED & {*head}:
                end = _closing(tokens, i)
                at = i - 1
                while _closing(tokens, at) != i - 1 or tokens[at] != "(":
                    at -= 1
                for part in _split(tokens[at + 1 : i - 1], ","):
                    if len(part) > 1 and part[-1].isidentifier():
                        self.types[part[-1]] = " ".join(part[:-1])
                        self.params.append(part[-1])
                self.before.append(_joined(tokens[start : i + 1]))
                bodies.append(self._block(tokens[i + 1 : end]))
                start = i = end
            depth += (tokens[i] == "{" and i != start) - (tokens[i] == "}" and i != start)
            i += 1
        self.before.append(_joined(tokens[start:]))
        return bodies

    # ---- statements --------------------------------------------------------------------------------------------------
    def _block(self, tokens: Sequence[str]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        at = 0
        while at < len(tokens):
            try:
                more, at = self._statement(tokens, at)
            except (UnreadableError, SyntaxError):
                end = _end(tokens, at)
                more, at = [_opaque(tokens[at:end])], end
            found += more
        return found

    def _body(self, tokens: Sequence[str], at: int) -> tuple[list[ast.stmt], int]:
        if tokens[at] == "{":
            end = _closing(tokens, at)
            return self._block(tokens[at + 1 : end]), end + 1
        return self._statement(tokens, at)

    def _statement(self, tokens: Sequence[str], at: int) -> tuple[list[ast.stmt], int]:
        first = tokens[at]
        if first == ";":
            return [], at + 1
        if first == "{":
            body, end = self._body(tokens, at)
            return [Body(body=body)], end  # type: ignore[call-arg]
        if first in ("if", "while", "for") and tokens[at + 1] == "(":
            end = _closing(tokens, at + 1)
            head = tokens[at + 2 : end]
            body, after = self._body(tokens, end + 1)
            if first == "for":
                parts = _split(head, ";")
                if len(parts) != 3:
                    raise UnreadableError(_joined(head))
                test = self._expression(parts[1]) if parts[1] else ast.Constant(True)
                before, step = self._simple(parts[0]), self._simple(parts[2])
                return [Loop(first=before, test=test, step=step, body=body)], after  # type: ignore[call-arg]
            test = self._expression(head)
            if first == "while":
                return [ast.While(test, body, [])], after
            orelse: list[ast.stmt] = []
            if after < len(tokens) and tokens[after] == "else":
                orelse, after = self._body(tokens, after + 1)
            return [ast.If(test, body, orelse)], after
        if (begin := self._lambda(tokens, at)) and "".join(tokens[(end := _closing(tokens, begin)) + 1 :][:1]) == ";":
            named = Body(body=self._block(tokens[begin + 1 : end]))  # type: ignore[call-arg]
            named.head = _joined(tokens[at:begin]) + " "
            return [named], end + 2
        end = at
        depth = 0
        while end < len(tokens) and (tokens[end] != ";" or depth):
            depth += (tokens[end] in _OPENS) - (tokens[end] in _CLOSES)
            end += 1
        if first.startswith("#") or first in ("if", "switch", "do", "else"):
            raise UnreadableError(first)
        return self._simple(tokens[at:end]), end + 1

    @staticmethod
    def _lambda(tokens: Sequence[str], at: int) -> int:
        """Where the brackets of `auto name = [...](...) {` open; 0 where it is none."""
        if at + 4 >= len(tokens) or (tokens[at], tokens[at + 2], tokens[at + 3]) != ("auto", "=", "["):
            return 0
        after = _closing(tokens, at + 3) + 1
        if after >= len(tokens) or tokens[after] != "(":
            return 0
        begin = _closing(tokens, after) + 1
        return begin if begin < len(tokens) and tokens[begin] == "{" else 0

    def _simple(self, tokens: Sequence[str]) -> list[ast.stmt]:
        """A statement without its semicolon, or several with commas between."""
        if not tokens:
            return []
        try:
            if tokens[0] == "return":
                return [ast.Return(self._expression(tokens[1:]) if tokens[1:] else None)]
            if (declared := self._declaration(tokens)) is not None:
                return [declared]
            return [self._assignment(x) for x in _split(tokens, ",")]
        except (UnreadableError, SyntaxError):
            return [_opaque([*tokens, ";"])]

    def _declaration(self, tokens: Sequence[str]) -> ast.stmt | None:
        at = 0
        while at < len(tokens) and re.fullmatch(rf"{_WORDS}|__shared__|static|constexpr|extern", tokens[at]):
            at += 1
        plain = any(x in tokens[:at] for x in ("static", "constexpr", "__shared__", "extern"))
        bare = at and tokens[at - 1] in ("unsigned", "signed") and at + 1 < len(tokens) and tokens[at + 1] in "=["
        if not bare:
            if at >= len(tokens) or not re.fullmatch(r"[A-Za-z_][\w:]*", tokens[at]):
                return None
            at += 1
            if at < len(tokens) and tokens[at] == "<":
                at = next((i + 1 for i in range(at, len(tokens)) if tokens[i] == ">"), len(tokens))
        start = at
        while at < len(tokens) and tokens[at] in ("*", "&", "const", "__restrict__"):
            at += 1
        if at >= len(tokens) or not re.fullmatch(r"[A-Za-z_]\w*", tokens[at]):
            return None
        if at + 1 < len(tokens) and tokens[at + 1] not in ("=", "[", ",", "(", "{"):
            return None
        of = _joined(tokens[:start])
        texts, values = [of + " "], []
        for part in _split(tokens[start:], ","):
            name = next(x for x in part if re.fullmatch(r"[A-Za-z_]\w*", x) and x not in ("const", "__restrict__"))
            stars = "*" if "*" in part[: part.index(name)] else ""
            sizes = part[: part.index("=")] if "=" in part else part
            dimensions = "[" * sizes.count("[")
            self.types[name] = f"{of} {stars}{dimensions}"
            value = None
            if not plain and (listed := self._list(of, part)):
                head, *elements = listed
                texts[-1] += head
                texts += [*[", "] * (len(elements) - 1), part[-1] + _NEXT]
                values += elements
                continue
            if "=" in part and not plain and part[part.index("=") + 1] != "{":
                value = self._expression(part[part.index("=") + 1 :])
            if value is None:
                texts[-1] += _joined(part) + _NEXT
            else:
                texts[-1] += _joined(part[: part.index("=") + 1]) + " "
                values.append(value)
                texts.append(_NEXT)
        texts[-1] = texts[-1].removesuffix(_NEXT) + ";"
        node = Declaration(values=values)  # type: ignore[call-arg]
        node.of, node.texts = of, texts
        return node

    def _list(self, of: str, part: Sequence[str]) -> list[Any]:
        """Of `name[] = {a, b}`, or `dim3 name(a, b)`, the text before, and its elements; nothing of what is no list."""
        if of.split()[-1] == "dim3" and part[1:2] == ["("]:
            return [_joined(part[:2]), *map(self._expression, _split(part[2:-1], ","))]
        if "=" not in part or part[part.index("=") + 1] != "{" or part[-1] != "}" or "{" in part[part.index("=") + 2 :]:
            return []
        inside = part[part.index("=") + 2 : -1]
        return [_joined(part[: part.index("=") + 2]), *map(self._expression, _split(inside, ","))] if inside else []

    def _assignment(self, tokens: Sequence[str]) -> ast.stmt:
        for step in ("++", "--"):
            if tokens[0] == step or tokens[-1] == step:
                name: Any = self._expression(tokens[1:] if tokens[0] == step else tokens[:-1])
                return ast.AugAssign(name, ast.Add() if step == "++" else ast.Sub(), ast.Constant(1))
        depth = 0
        for i, token in enumerate(tokens):
            depth += (token in _OPENS) - (token in _CLOSES)
            if not depth and (token == "=" or token in _AUGMENTED):
                target: Any = self._expression(tokens[:i])
                value = self._expression(tokens[i + 1 :])
                if token == "=":
                    return ast.Assign([target], value)
                return ast.AugAssign(target, _AUGMENTED[token](), value)
        return ast.Expr(self._expression(tokens))

    # ---- expressions -------------------------------------------------------------------------------------------------
    def _expression(self, tokens: Sequence[str]) -> ast.expr:
        return ast.parse(self._python(tokens), mode="eval").body

    def _other(self, text: str) -> str:
        name = next((k for k, v in self.others.items() if v == text), f"{_NAME}{len(self.others)}")
        self.others[name] = text
        return name

    def _python(self, tokens: Sequence[str]) -> str:
        """The expression as Python's."""
        if not tokens:
            raise UnreadableError("nothing")
        if "?" in tokens and len(asked := _split(tokens, "?")) > 1:
            rest = tokens[len(asked[0]) + 1 :]
            depth = nested = 0
            for i, token in enumerate(rest):
                depth += (token in _OPENS) - (token in _CLOSES)
                nested += (token == "?") * (not depth)
                if token == ":" and not depth:
                    if not nested:
                        yes, no = self._python(rest[:i]), self._python(rest[i + 1 :])
                        return f"(({yes}) if ({self._python(asked[0])}) else ({no}))"
                    nested -= 1
        said: list[str] = []
        i = called = cast = 0
        while i < len(tokens):
            token, left = tokens[i], tokens[i - 1] if i else "("
            unary = left in ("(", "[", ",", "=") or not re.search(r"[\w)\]\"']$", left) or left == "return"
            unary = (unary or bool(cast and i == cast)) and not (called and i == called)
            if token in "([":
                end = _closing(tokens, i)
                inside = tokens[i + 1 : end]
                operand = end + 1 < len(tokens) and re.match(r"[\w(*&~!.-]", tokens[end + 1])
                if token == "(" and unary and operand and _CAST.fullmatch(" ".join(inside)):
                    said.append(self._other(f"({_joined(inside)})") + " **")
                    cast = end + 1
                else:
                    parts = [self._python(x) for x in _split(inside, ",")] if inside else []
                    if token == "(" and unary and len(parts) != 1:
                        raise UnreadableError(_joined(tokens))
                    said.append(f"{token}{', '.join(parts)}{tokens[end]}")
                i = end
            elif token in ("*", "&") and unary:
                said.append(self._other(token) + " **")
            elif token in ("&&", "||", "!"):
                said.append({"&&": "and", "||": "or", "!": "not"}[token])
            elif re.match(r"\d|\.\d", token):
                plain = re.fullmatch(r"\d+|0[xb][\da-f]+|[\d.]+(?:[eE][+-]?\d+)?[fF]?", token)
                said.append((token if token[:2] == "0x" else token.rstrip("fF")) if plain else self._other(token))
            elif token == "->":
                i += 1
                said.append(f".{_ARROW}{tokens[i]}")
            elif re.match(r"[A-Za-z_]", token):
                end = self._template(tokens, i)
                name = _joined(tokens[i:end]) if end else token
                said.append(self._other(name) if end or "::" in name or keyword.iskeyword(name) else name)
                i, called = end - 1 if end else i, end
            elif token[0] in "\"'":
                said.append(self._other(token))
            elif token in ("{", "}", "=", "++", "--", "?", ":", "<<<", ";") or token in _AUGMENTED:
                raise UnreadableError(token)
            else:
                said.append(token)
            i += 1
        return " ".join(said)

    @staticmethod
    def _template(tokens: Sequence[str], at: int) -> int:
        """Where `name<...>` ends, in front of a `(`; 0 where it is a comparison."""
        if at + 1 >= len(tokens) or tokens[at + 1] != "<":
            return 0
        for i in range(at + 2, len(tokens) - 1):
            if tokens[i] == ">" and tokens[i + 1] == "(":
                return i + 1
            if not re.fullmatch(r"[\w:*,+-]+", tokens[i]):
                return 0
        return 0

    # ---- and back ----------------------------------------------------------------------------------------------------
    def c(self, node: ast.AST, around: int = 0, words: bool = False) -> str:
        """C++ of an expression; words: with what local names are called."""
        said, own = self._c(node, words)
        return f"({said})" if own < around else said

    def _c(self, node: ast.AST, words: bool) -> tuple[str, int]:
        def c(x: ast.AST, around: int = 0) -> str:
            return self.c(x, around, words)

        match node:
            case ast.Name(id):
                return (self.words.get(id, self.others.get(id, id)) if words else self.others.get(id, id)), 20
            case ast.Constant(bool() as value):
                return str(value).lower(), 20
            case ast.Constant(int() as value):
                spelled = self.spelled.get(value, "") if words and self.foreign else ""
                return spelled or str(value), 20 if value >= 0 else 12
            case ast.Constant(float() as value):
                return f"{value!r}f" if not words else f"{value:g}", 20
            case ast.Attribute(value, attr):
                arrow = attr.startswith(_ARROW)
                return c(value, 15) + ("->" if arrow else ".") + attr.removeprefix(_ARROW), 20
            case ast.Subscript(value, index):
                return f"{c(value, 15)}[{c(index)}]", 20
            case ast.Call(func, args):
                return f"{c(func, 15)}({', '.join(map(c, args))})", 20
            case ast.UnaryOp(op, operand):
                return _SYMBOLS[type(op)] + c(operand, 13), 12
            case ast.BinOp(ast.Name(id), ast.Pow(), right) if id in self.others:
                return self.others[id] + c(right, 12), 12
            case ast.BinOp(left, op, right) if type(op) in _SYMBOLS:
                own = _PRECEDENCE[type(op)]
                return f"{c(left, own)} {_SYMBOLS[type(op)]} {c(right, own + 1)}", own
            case ast.Compare(left, [op], [right]) if type(op) in _SYMBOLS:
                return f"{c(left, 8)} {_SYMBOLS[type(op)]} {c(right, 8)}", 7
            case ast.BoolOp(op, values):
                own, word = (3, " && ") if isinstance(op, ast.And) else (2, " || ")
                return word.join(c(x, own + 1) for x in values), own
            case ast.IfExp(test, body, orelse):
                return f"{c(test, 2)} ? {c(body, 2)} : {c(orelse, 1)}", 1
        raise UnreadableError(ast.dump(node))

    def plain(self, node: ast.AST) -> str:
        try:
            if isinstance(node, (ast.If, ast.While)):
                word = "for" if isinstance(node, Loop) else type(node).__name__.lower()
                return f"{word} ({self.c(node.test, words=True)})"
            said = self.c(node, words=True) if isinstance(node, ast.expr) else self.written(node).rstrip(";")
            return re.sub(r" < ([\w:, +*-]+) >\(", r"<\1>(", said)
        except UnreadableError:
            return ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else ""

    def line_of(self, change: Change) -> str:
        """ ", in `half /= 2`", where what is said of a change does not say where it is."""
        holder, _, at = change.edits[0][0]
        if len(change.edits) > 1 or ", in " in change.said or isinstance(change.edits[0][1], ast.stmt):
            return ""
        if isinstance(holder, (ast.AugAssign, ast.Compare)):
            return f", in `{self.plain(holder)}`"
        if isinstance(holder, Declaration) and at is not None:
            names = re.findall(r"(\w+)\s*=", re.sub(r"\[.*?\]", "", "".join(holder.texts[: at + 1])))
            return f", where `{names[-1]}` is made" if names else ""
        return ""

    def written(self, node: ast.AST) -> str:
        """C++ of a statement."""
        match node:
            case Opaque():
                return node.c
            case ast.Pass():
                return ";"
            case ast.Return(value):
                return f"return {self.c(value)};" if value else "return;"
            case ast.Expr(value):
                return self.c(value) + ";"
            case ast.Assign([target], value):
                return f"{self.c(target)} = {self.c(value)};"
            case ast.AugAssign(target, op, value):
                return f"{self.c(target)} {_SYMBOLS[type(op)]}= {self.c(value)};"
            case ast.Continue():
                return "continue;"
            case ast.If() | ast.While() | Body() | Declaration():
                return self.built(node, defaultdict(list))
        raise UnreadableError(ast.dump(node))

    def built(
        self, node: ast.AST, other: dict[tuple[int, str, int | None], list[tuple[int, str]]], apart: bool = True
    ) -> str:
        """C++ of a statement with its changes: {slot: [(number, what stands there)]}, each of which runs if chosen.

        apart: variables are declared one by one, so that a change of one that makes no sense is an error of its own.
        """

        def value(holder: ast.AST, field: str, at: int | None, one: ast.expr) -> str:
            said = self.c(one, 1)
            if other[id(holder), field, at] and isinstance(holder, Declaration) and "&" in holder.texts[at or 0]:
                for number, instead in other[id(holder), field, at]:  # a reference
                    said = f"*({CHOSEN} == {number} ? &({instead})\n : &({said}))"
            else:
                said = chosen(said, other[id(holder), field, at], one)
            return f"({said})" if CHOSEN in said else said

        def chosen(said: str, instead_of: Sequence[tuple[int, str]], one: ast.expr) -> str:
            for number, instead in instead_of:
                said = f"{CHOSEN} == {number} ? (flashlab_as<decltype({self.c(one)})>)({instead})\n : {said}"
            return said

        def lines(holder: ast.AST, field: str) -> str:
            return "\n".join(line(holder, field, i, x) for i, x in enumerate(getattr(holder, field)))

        def line(holder: ast.AST, field: str, at: int, one: ast.stmt) -> str:
            said = self.built(one, other)
            own = [] if isinstance(one, (Body, ast.If, ast.While)) else other[id(one), "", None]
            declares = isinstance(one, Declaration) or (isinstance(one, Opaque) and one.declares)
            if declares or (isinstance(one, Body) and one.head):
                return said
            for number, instead in [*other[id(holder), field, at], *own]:
                said = f"if ({CHOSEN} == {number}) {{ {instead} }}\nelse {{ {said} }}"
            return said

        if isinstance(node, Loop):
            begins = "".join(self.built(x, other, False) for x in node.first) or ";"
            each = [edit for x in node.step for edit in other[id(x), "", None]]
            steps = "".join(f"if ({CHOSEN} == {number}) {{ {new} }} else " for number, new in each)
            plain = ", ".join(self.written(x).rstrip(";") for x in node.step)
            step = f"[&] {{ {steps}{{ {plain}; }} }}()" if steps else plain
            return f"for ({begins} {value(node, 'test', None, node.test)}; {step}) {{ {lines(node, 'body')} }}"
        if isinstance(node, ast.While):
            return f"while ({value(node, 'test', None, node.test)}) {{ {lines(node, 'body')} }}"
        if isinstance(node, Body) or (isinstance(node, ast.If) and isinstance(node.test, ast.Constant)):
            head = node.head if isinstance(node, Body) else ""
            return f"{head}{{ {lines(node, 'body')} }}{';' if head else ''}"
        if isinstance(node, ast.If):
            orelse = f" else {{ {lines(node, 'orelse')} }}" if node.orelse else ""
            return f"if ({value(node, 'test', None, node.test)}) {{ {lines(node, 'body')} }}{orelse}"
        if isinstance(node, Declaration):
            values = [value(node, "values", i, x) for i, x in enumerate(node.values)]
            values = [  # each one in braces has that type
                f"({node.of}){v}" if "dim3" not in node.of and text.rstrip().endswith(("{", ",")) and CHOSEN in v else v
                for text, v in zip(node.texts, values, strict=False)
            ]
            said = "".join(t + v for t, v in zip(node.texts, [*values, ""], strict=True))
            return said.replace(_NEXT, f"; {node.of} " if apart else ", ")
        return self.written(node)

    def all_in_one(self, changes: Sequence[Change], without: Collection[int] = ()) -> str:
        """The text with every change in it; change number n is the n-th, from 1."""
        units: dict[int, tuple[ast.AST, str, int | None]] = {}  # of a node: the expression or statement it stands in
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.If, ast.While)):
                units.update({id(x): (node, "test", None) for x in ast.walk(node.test)})
            elif isinstance(node, Declaration):
                for i, one in enumerate(node.values):
                    units.update({id(x): (node, "values", i) for x in ast.walk(one)})
            elif isinstance(node, (ast.Return, ast.Expr, ast.Assign, ast.AugAssign)):
                units.update({id(x): (node, "", None) for x in ast.walk(node)})
        other: dict[tuple[int, str, int | None], list[tuple[int, str]]] = defaultdict(list)
        for number, change in enumerate(changes, 1):
            if number in without:
                continue
            with self.changed(change):
                told = {}
                try:
                    for (holder, field, at), new in change.edits:
                        if isinstance(new, ast.stmt):
                            told[id(holder), field, at] = self.written(new)
                            continue
                        node, name, k = units.get(id(holder), (holder, field, at))
                        value: Any = getattr(node, name) if name else node
                        one = value if k is None else value[k]
                        told[id(node), name, k] = self.c(one, 1) if name else self.written(node)
                except (UnreadableError, KeyError, RecursionError):  # the last: a node that is put into itself
                    continue
            for slot, text in told.items():
                other[slot].append((number, text.replace("\n", " ")))
        bodies = [self.built(holder, other) for holder in self.tree.body]
        if not self.before:
            return bodies[0][1:-1]
        return "".join(b + body for b, body in zip(self.before, [*bodies, ""], strict=True))


def _joined(tokens: Sequence[str]) -> str:
    return " ".join(f"\n{x}\n" if x.startswith("#") else x for x in tokens)


_LINES = (ast.Expr, ast.Assign, ast.AugAssign)


# ---- what else goes wrong in CUDA ------------------------------------------------------------------------------------
_AXES = ("x", "y", "z")
_INDICES = ("threadIdx", "blockIdx", "blockDim", "gridDim")
_FIELDS = (
    ("batch", "heads", "kv_heads", "seq_q", "seq_k"), ("q", "k", "v", "o"), ("batch", "head", "row"),
    ("q_stride", "k_stride", "v_stride", "o_stride"),
)  # fmt: skip
_CONSTANTS = (("BLOCK_M", "BLOCK_N"), ("S_TILES", "O_TILES"))
_FUNCTIONS = {
    "fmaxf": ("fminf",), "fminf": ("fmaxf",), "expf": ("exp2f", "__expf"), "exp2f": ("expf",), "logf": ("log2f",),
    "log2f": ("logf",), "ldmatrix_x2": ("ldmatrix_x2_trans",), "ldmatrix_x4": ("ldmatrix_x4_trans",),
    "ldmatrix_x2_trans": ("ldmatrix_x2",), "ldmatrix_x4_trans": ("ldmatrix_x4",), "ldmatrix_x1": ("ldmatrix_x1_trans",),
    "exp2_approx": ("expf",), "__shfl_xor_sync": ("__shfl_down_sync", "__shfl_up_sync"),
}  # fmt: skip


def of_expression(text: CudaText, slot: Slot, node: ast.expr) -> Iterator[tuple[object, ...]]:
    """(slug, words, cost, new node, key...) of one expression."""
    w, parent = text.say, slot[0]
    yield from of_code(text, node)
    if isinstance(node, ast.Attribute):
        owner, attr = ast.unparse(node.value), node.attr.removeprefix(_ARROW)
        arrow = _ARROW if node.attr.startswith(_ARROW) else ""
        groups = (_AXES[:2],) if owner in _INDICES else _FIELDS
        for other in dict.fromkeys(x for group in groups if attr in group for x in group if x != attr):
            new = ast.Attribute(node.value, arrow + other, ast.Load())
            yield "wrong-name", f"{w(new)} stands where {w(node)} belongs", 1.7, new, f".{attr}", other, owner
        for other in _INDICES if owner in _INDICES else ():
            if other != owner:
                new = ast.Attribute(ast.Name(other, ast.Load()), attr, ast.Load())
                yield "wrong-name", f"{w(new)} stands where {w(node)} belongs", 2.0, new, owner, other, attr
    if isinstance(node, (ast.Name, ast.Attribute, ast.BinOp, ast.Subscript)) and _counts(text, node) and isinstance(
        parent, (ast.Compare, ast.Subscript, Declaration)) and (slot[1] != "value"):  # fmt: skip
        for step, words in ((ast.Add(), "large"), (ast.Sub(), "small")):
            said = f"{w(node)} is one too {words}"
            yield "off-by-one", said, 1.5, ast.BinOp(node, step, ast.Constant(1)), ast.unparse(node), words
    called = node.id if isinstance(node, ast.Name) else ""
    for other in (x for group in _CONSTANTS for x in group if called in group and x != called):
        constant = ast.Name(other, ast.Load())
        yield "wrong-name", f"{w(constant)} stands where {w(node)} belongs", 1.5, constant, called, other
    if isinstance(node, ast.Name) and node.id == "INFINITY":
        for value in (0.0, 1e4, 1e30):
            said = f"{value:g} stands where {w(node)} belongs"
            yield "finite-number", said, 1.4, ast.Constant(value), "inf", value
    if isinstance(parent, ast.Subscript) and slot[1] == "slice":
        ints = [ast.Name(x, ast.Load()) for x in text.types if text.kinds[x] == {"int"}]
        thread = ast.Attribute(ast.Name("threadIdx", ast.Load()), "x", ast.Load())
        for index in (ast.Constant(0), *ints, thread):
            said = f"{w(ast.Subscript(parent.value, index))} stands where {w(parent)} belongs"
            if not (isinstance(node, ast.Name) and isinstance(index, ast.Name)) and w(node) != w(index):
                yield "wrong-element", said, 1.6 if isinstance(index, ast.Constant) else 2.0, index
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _of_call(text, node, text.others.get(node.func.id, node.func.id))


def of_statements(text: CudaText) -> Iterator[Change]:
    for slug, said, cost, slot, new in of_lines(text):
        yield Change(slug, said, cost, ((slot, new),))
    for holder, name, block in blocks(text.tree):
        for i, (one, after) in enumerate(itertools.pairwise(block)):
            if isinstance(one, _LINES) and isinstance(after, _LINES) and ast.Expr in (type(one), type(after)):
                edits = ((holder, name, i), after), ((holder, name, i + 1), one)
                said = f"the line `{text.plain(one)}` comes too late, after `{text.plain(after)}`"
                yield Change("lines-exchanged", said, 1.5, edits)
        yield from _of_registers(text, block)
    for made in nodes(text.tree, Declaration):
        if len(made.texts) > 2 and ", " in made.texts:
            yield from _exchanged(text, [(made, "values", i) for i in range(len(made.values))])


def _of_registers(text: CudaText, block: Sequence[ast.AST]) -> Iterator[Change]:
    """What two elements of one array are set to, exchanged."""
    set_to: dict[str, list[Slot]] = defaultdict(list)
    for line in block:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Subscript):
            set_to[ast.dump(line.targets[0].value)].append((line, "value", None))
    for slots in set_to.values():
        yield from _exchanged(text, slots)


def _exchanged(text: CudaText, slots: Sequence[Slot]) -> Iterator[Change]:
    for a, b in itertools.combinations(slots, 2):
        x, y = (getattr(node, field) if at is None else getattr(node, field)[at] for node, field, at in (a, b))
        if ast.dump(x) != ast.dump(y):
            said = f"{text.say(x)} and {text.say(y)} are exchanged"
            yield Change("elements-exchanged", said, 1.0, ((a, y), (b, x)))


def _of_call(text: CudaText, node: ast.Call, called: str) -> Iterator[tuple[object, ...]]:
    w, args = text.say, node.args
    name, _, inside = called.removesuffix(" >").partition(" < ")
    less = re.fullmatch(r"(.*STAGES) - (\d)", inside)
    near = [f"{less[1]} - {int(less[2]) + n}".removesuffix(" - 0") for n in (-1, 1)] if less else []
    for instead in ("__half",) if inside == "T" else near:
        said, slug, cost = f"`{name}<{instead}>` stands where `{name}<{inside}>` belongs", "off-by-one", 1.3
        if instead == "__half":
            said, slug, cost = f"{said}: it is right in float16 alone", "fp16-alone", 1.2
        new = ast.Call(ast.Name(text._other(f"{name} < {instead} >"), ast.Load()), args, [])
        yield slug, said, cost, new, name, instead
    for instead in _FUNCTIONS.get(called, ()):
        new = ast.Call(ast.Name(instead, ast.Load()), args, [])
        yield "wrong-function", f"`{instead}` stands where `{called}` belongs", 1.5, new, called, instead
    if called in ("fmaxf", "fminf") and len(args) == 2:
        for kept, gone in (args, args[::-1]):
            yield "limit-missing", f"{w(gone)} does not count: it is {w(kept)}, in {w(node)}", 1.0, kept
    for i in range(len(args) - 1 if len(args) > 2 else 0):
        said = f"{w(args[i])} and {w(args[i + 1])} are exchanged, in {w(node)}"
        new = ast.Call(node.func, [*args[:i], args[i + 1], args[i], *args[i + 2 :]], [])
        yield "arguments-exchanged", said, 1.5, new
    for other in nodes(text.tree, ast.Call) if len(args) > 1 else ():
        same = ast.dump(other.func) == ast.dump(node.func) and w(other) != w(node)
        if same and not any(x is node for x in ast.walk(other)):  # else it would be within itself
            likely = 0.9 if name == "pack" else 1.7  # registers are easily confused
            yield "wrong-call", f"{w(other)} stands where {w(node)} belongs", likely, other
    if called.startswith("__shfl") and isinstance(args[-1], ast.Constant):
        right = args[-1].value
        for lane in (x for x in range(1, 32) if x != right):
            said = f"an exchange asks lane ^ {lane}, where lane ^ {right!r} belongs, in {w(node)}"
            cost = 1.4 if lane & (lane - 1) == 0 else 2.4
            yield "wrong-shuffle-mask", said, cost, ast.Call(node.func, [*args[:-1], ast.Constant(lane)], [])


def _counts(text: CudaText, node: ast.expr) -> bool:
    names = names_in(node)
    return bool(names) and all(text.kinds.get(x, {"int"}) == {"int"} and x != "INFINITY" for x in names)
