"""The answers that a learner's notebook holds: unsolved as it is given, or solved."""

import ast
import functools
import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
from lesson_source import defined_names, find_lessons, make_notebook, read_lesson

from flashlab.check import CheckFailed
from flashlab.check.changes import edited
from flashlab.course import number_of
from flashlab.exercises import check

ROOT = Path(__file__).resolve().parents[2]
PATHS = {number_of(p.stem): p for p in find_lessons(ROOT) if p.stem.endswith("_exercises")}


lesson_of = functools.cache(read_lesson)


@functools.cache
def cells_of(phase: int | str, kind: str) -> list:
    """The code cells of a page: "exercises" or "solutions"."""
    return [c for c in make_notebook(lesson_of(PATHS[phase]), kind)[0].cells if c.cell_type == "code"]


@functools.cache
def asked(phase: int | str, kind: str) -> dict[str, list[str]]:
    """{exercise id: the names of its answers}, as the checks of a page have them; nothing of it is run."""
    checks = [cell.source for cell in cells_of(phase, kind) if "check" in cell.metadata.get("tags", [])]
    calls = [x for source in checks for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call)]
    return {
        call.args[0].value: [ast.unparse(x) for x in call.args[1:]]
        for call in calls if getattr(call.func, "id", "") == "check"
    }  # fmt: skip


@functools.cache
def namespace(phase: int | str, kind: str) -> tuple[dict, dict]:
    """Runs a notebook's cells but its checks. Returns its names, and {exercise id: names of the answers}.

    kind: "exercises" or "solutions".
    """
    names: dict = {"__name__": "__main__"}
    for i, cell in enumerate(cells_of(phase, kind)):
        if "check" not in cell.metadata.get("tags", []) and "matplotlib" not in cell.source:
            run(cell.source, f"<{kind} {phase} cell {i}>", names)
    return names, asked(phase, kind)


def run(source: str, name: str, names: dict) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)


def answers_of(id: str, kind: str) -> list:
    names, answers = namespace(number_of(id.split(".")[0]), kind)
    return [names[x] for x in answers[id]]


def cell_of(id: str, kind: str) -> str:
    """The source of the cell that defines an exercise's answers."""
    phase = number_of(id.split(".")[0])
    wanted = asked(phase, kind)[id][0]
    for cell in cells_of(phase, kind):
        if "exercise" in cell.metadata.get("tags", []) and wanted in defined_names(cell.source):
            return cell.source
    raise LookupError(id)


def changed(id: str, *changes: tuple[str, str], kind: str = "solutions") -> list:
    """The answers after some changes of their cell, which is run as a cell would be."""
    names, answers = namespace(number_of(id.split(".")[0]), kind)
    cell, scope = edited(cell_of(id, kind), changes, id), dict(names)
    run(cell, f"<{id} {hash(cell)}>", scope)
    return [scope[x] for x in answers[id]]


def changed_texts(id: str, *changes: tuple[str, str]) -> list[str]:
    """The solution's texts, with these changes."""
    texts = answers_of(id, "solutions")
    for old, new in changes:
        assert sum(text.count(old) for text in texts) == 1, old
        texts = [text.replace(old, new) for text in texts]
    return texts


def failure(id: str, *answers) -> CheckFailed:
    """What the check says against these answers."""
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers)
    assert 20 < len(caught.value.sentence.partition("\n")[0]) < 600
    return caught.value


def diagnosis(id: str, *answers) -> str:
    return failure(id, *answers).diagnosis


def said(id: str, *answers) -> str:
    return failure(id, *answers).sentence.partition("\n")[0]


# ---- tables of answers: each of these makes a test of its rows ------------------------------------------------------


def _table(
    names: str, rows: tuple, test: Callable, every: int = 1, marks: list | tuple = (), one_of_each: bool = False
) -> Callable:  # fmt: skip
    """one_of_each: all but the first row of an exercise are long."""
    if one_of_each:
        first = {row[0]: row for row in reversed(rows)}
        rows = [pytest.param(*x, marks=[] if first[x[0]] is x else pytest.mark.long) for x in rows]
    for mark in (pytest.mark.parametrize(names, rows), pytest.mark.every(every), *marks):
        test = mark(test)
    return test


def _edited(id: str, edits) -> list:
    edits = [edits] if edits and isinstance(edits[0], str) else edits
    texts = isinstance(answers_of(id, "solutions")[0], str)
    return (changed_texts if texts else changed)(id, *edits)


def accepted(*rows, **how) -> Callable:
    """Rows (id, edits of the solution): one (old, new), or several."""

    def test(id, edits):
        assert check(id, *_edited(id, edits))

    return _table("id, edits", rows, test, **how)


def _failed(fits: Callable[[CheckFailed, str], bool]) -> Callable:
    """Rows (id, edits of the solution, and a text that what the check says has to fit)."""

    def table(*rows, **how) -> Callable:
        def test(id, edits, text):
            failed = failure(id, *_edited(id, edits))
            assert fits(failed, text), failed

        return _table("id, edits, text", rows, test, **how)

    return table


diagnosed = _failed(lambda failed, slug: failed.diagnosis == slug)
told = _failed(lambda failed, words: words in failed.sentence)
