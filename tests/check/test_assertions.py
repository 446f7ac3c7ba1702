"""No AssertionError without a text can reach a learner: not from the package, not from a cell of the exercises."""

import ast
from pathlib import Path

import pytest

import flashlab

PACKAGE = Path(flashlab.__file__).parent
LESSONS = PACKAGE.parent / "lessons"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *LESSONS.glob("*_exercises.py")])


def silent(source):
    """The lines with an assert, or a raised AssertionError, that says nothing."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            empty = node.msg is None or isinstance(node.msg, ast.Constant) and not node.msg.value
        elif isinstance(node, ast.Raise):
            raised = node.exc.func if isinstance(node.exc, ast.Call) and not node.exc.args else node.exc
            empty = isinstance(raised, ast.Name) and raised.id == "AssertionError"
        else:
            continue
        if empty:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_every_assertion_has_a_text(path):
    assert not silent(path.read_text()), "an assert needs a message, and an AssertionError a text"


def test_the_scan_finds_them():
    assert silent("assert x\nassert x, ''\nraise AssertionError\nraise AssertionError()\n") == [1, 2, 3, 4]
    assert not silent("assert x, 'why'\nraise AssertionError('why')\nraise ValueError\n")
