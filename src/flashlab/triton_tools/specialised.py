"""A Triton kernel's text as it is for given constants: the branches that the compiler drops before it begins are gone.

A `tl.constexpr` is known when a kernel is compiled, so of `if CAUSAL:` only one side is ever compiled. Here is the
text of that, with its comments, for a reader; it is a kernel too, with the same parameters and the same result.
"""

import ast
import inspect
import textwrap

from flashlab.triton_tools.portable import unwrap

_Branch = tuple[bool | None, list[str], list[str]]  # of an if: its test, where it is known; header; body


def specialised(function, **constants: object) -> str:
    """The source of a function or kernel without the `if` branches that the constants decide against.

    A test that also needs something else is left as it is. Raises OSError where there is no source, and KeyError for
    a constant that is no parameter.
    """
    raw = unwrap(function)
    unknown = constants.keys() - inspect.signature(raw).parameters.keys()
    if unknown:
        raise KeyError(f"{raw.__name__} has no parameter {', '.join(sorted(unknown))}")
    source = textwrap.dedent(inspect.getsource(raw))
    tree = ast.parse(source)
    text = _Text(source.splitlines(), constants).block(tree.body, 1)
    return "\n".join(text) + "\n"


class _Text:
    def __init__(self, lines: list[str], constants: dict[str, object]):
        self.lines, self.constants = lines, constants

    def raw(self, first: int, last: int) -> list[str]:
        """Lines counted from 1, both ends included."""
        return self.lines[first - 1 : last]

    def block(self, statements: list[ast.stmt], first: int) -> list[str]:
        """The lines of statements, from line `first`, where the comments above the first of them begin."""
        out: list[str] = []
        for statement in statements:
            out += self.raw(first, statement.lineno - 1)
            body = getattr(statement, "body", None)
            if isinstance(statement, ast.If):
                out += self.choice(statement)
            elif body:
                out += self.raw(statement.lineno, body[0].lineno - 1) + self.block(body, body[0].lineno)
            else:
                out += self.raw(statement.lineno, statement.end_lineno or statement.lineno)
            first = (statement.end_lineno or statement.lineno) + 1
        return out

    def choice(self, statement: ast.If) -> list[str]:
        branches = self.branches(statement)
        open_ = [branch for branch in branches if branch[0] is not False]
        decided = next((i for i, branch in enumerate(open_) if branch[0]), None)
        if decided is not None:
            open_ = open_[: decided + 1]
        if not open_:
            return []
        if decided == 0:
            return [line.removeprefix("    ") for line in open_[0][2]]
        indent = " " * statement.col_offset
        out: list[str] = []
        for i, (test, header, body) in enumerate(open_):
            if test:
                header = [f"{indent}else:"]
            elif i == 0 and header[0].startswith(f"{indent}elif"):
                header = [header[0].replace("elif", "if", 1), *header[1:]]
            out += header + body
        return out

    def branches(self, statement: ast.If) -> list[_Branch]:
        header = self.raw(statement.lineno, statement.body[0].lineno - 1)
        found = [(self.known(statement.test), header, self.block(statement.body, statement.body[0].lineno))]
        if len(statement.orelse) == 1 and isinstance(chained := statement.orelse[0], ast.If):
            if self.lines[chained.lineno - 1].lstrip().startswith("elif"):
                return found + self.branches(chained)
        if statement.orelse:
            last = statement.body[-1].end_lineno or statement.body[-1].lineno
            header = self.raw(last + 1, statement.orelse[0].lineno - 1)
            found.append((True, header, self.block(statement.orelse, statement.orelse[0].lineno)))
        return found

    def known(self, test: ast.expr) -> bool | None:
        """The value of a test that only the constants decide; None where it needs more."""
        if isinstance(test, ast.BoolOp):
            values = [self.known(value) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if not names <= self.constants.keys():
            return None
        return bool(eval(compile(ast.Expression(test), "test", "eval"), {"__builtins__": {}}, dict(self.constants)))
