"""What is asked of a tree of Python's `ast`, by all who change one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

LOOPS = (ast.For, ast.While)


def nodes(tree: ast.AST, *kinds: type) -> list[Any]:
    """All that is of these kinds in a tree, outermost first."""
    return [x for x in ast.walk(tree) if isinstance(x, kinds)]


def reads(tree: ast.AST) -> Iterator[str]:
    return (x.id for x in nodes(tree, ast.Name) if isinstance(x.ctx, ast.Load))


def names_in(tree: Any) -> set[str]:
    return {x.id for x in nodes(tree, ast.Name)} if isinstance(tree, ast.AST) else set()


def blocks(tree: ast.AST) -> Iterator[tuple[Any, str, list[Any]]]:
    """Statements that follow each other, with the node and the field that hold them."""
    for holder in ast.walk(tree):
        for field in ("body", "orelse"):
            if isinstance(block := getattr(holder, field, None), list):
                yield holder, field, block


def is_op(node: Any, *ops: type) -> bool:
    """Whether it is one of these operations of two numbers."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ops)


def both(first: Any, then: Any) -> ast.If:
    """Two lines in the place of one."""
    return ast.If(ast.Constant(True), [first, then], [])


def plain(x: Any) -> str:
    return ast.unparse(x) if isinstance(x, ast.AST) else ""


def dump(x: Any) -> str:
    return ast.dump(x) if isinstance(x, ast.AST) else repr([*map(dump, x)] if isinstance(x, list) else x)


def called(node: Any) -> str:
    """The last word of what a call calls; "" of what is no call."""
    return plain(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""


def terms_of(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*terms_of(node.left), *terms_of(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return [*terms_of(node.left), ast.UnaryOp(ast.USub(), node.right)]
    return [node]
