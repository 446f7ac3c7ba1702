"""A Triton kernel's text as it is for given constants: the branches that the compiler drops before it begins are gone.

A `tl.constexpr` is known when a kernel is compiled, so of `if CAUSAL:` only one side is ever compiled. Here is the
text of that, with its comments, for a reader; it is a kernel too, with the same parameters and the same result.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

from flashlab.triton_tools.portable import unwrap


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
    lines: dict[int, str] = dict(enumerate(source.splitlines(), 1))  # those that are left
    seen: set[ast.If] = set()

    def branches(statement: ast.If) -> Iterator[tuple[bool | None, int, int, int]]:
        """The test of each, where it is known; the first line of its header and of its body, and its last."""
        seen.add(statement)
        last = statement.body[-1].end_lineno or 0
        yield _known(statement.test, constants), statement.lineno, statement.body[0].lineno, last
        other = statement.orelse[:1]
        if other and isinstance(other[0], ast.If) and re.match(r" *elif\b", source.splitlines()[other[0].lineno - 1]):
            yield from branches(other[0])
        elif other:
            yield True, last + 1, other[0].lineno, statement.orelse[-1].end_lineno or 0

    for statement in ast.walk(ast.parse(source)):  # the outer ones first
        if not isinstance(statement, ast.If) or statement in seen or statement.lineno not in lines:
            continue
        open_ = 0  # branches so far that may be taken
        decided: bool | None = False
        for test, header, body, last in branches(statement):
            if test is False or decided:
                for n in range(header, last + 1):
                    lines.pop(n, None)
                continue
            if test:
                head = re.sub(r"\S.*", "else:", lines[header])
                for n in range(header, body):
                    del lines[n]
                if open_:
                    lines[header] = head
                else:
                    lines |= {n: lines[n].removeprefix("    ") for n in range(body, last + 1)}
            elif not open_:
                lines[header] = re.sub(r"^( *)elif\b", r"\1if", lines[header])
            open_, decided = open_ + 1, test
    return "\n".join(lines[n] for n in sorted(lines)) + "\n"


def _known(test: ast.expr, constants: dict[str, object]) -> bool | None:
    """The value of a test that only the constants decide; None where it needs more."""
    if isinstance(test, ast.BoolOp):
        values = [_known(value, constants) for value in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    if not names <= constants.keys():
        return None
    return bool(eval(compile(ast.Expression(test), "test", "eval"), {"__builtins__": {}}, dict(constants)))
