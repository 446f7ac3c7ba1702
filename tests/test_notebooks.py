"""The contract of the lessons, for every phase that there is.

Unsolved exercises fail exactly at their checks (made afresh from src/lessons, so a learner's answers in exercises/ do
not matter here); lectures have the frame and the outputs that a reader can follow. How they read, tests/test_pacing.py
counts; what the outputs are, nbval compares.
"""

import ast
import functools
import pkgutil
import re
import types
import urllib.parse
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from lesson_execution import kernel_for, output_problem
from lesson_source import blocks, check_calls, find_lessons, lesson_name
from lesson_source import make_notebook as new_notebook
from lesson_source import read_lesson as new_lesson
from pacing import output_lines, reading_minutes, squeezed
from tools.forked_kernels import Kernel

from flashlab.course import PHASES, number_of
from flashlab.exercises import registry as registry
from flashlab.figures import show

ROOT = Path(__file__).resolve().parents[1]
PATHS = find_lessons(ROOT)
BUILT = sorted(p for folder in ("notebooks", "solutions") for p in (ROOT / folder).glob("[0-9][0-9]*_*.ipynb"))

MOST_OUTPUT_LINES = 15
MOST_BYTES = 1_500_000
FRAME = [
    "## What you will be able to do",
    "## What you need first",
    "## Summary, and what is left to explore",
    "## References",
]


read_lesson = functools.cache(new_lesson)


@functools.cache
def built(path):
    return nbformat.v4.reads_json(path.read_text(encoding="utf-8"))  # validated by its own test alone


@functools.cache
def make_notebook(path, kind):
    return new_notebook(read_lesson(path), kind)[0]


LESSONS = [pytest.param(path, id=path.stem) for path in PATHS]
LECTURES, EXERCISES = ([x for x in LESSONS if x.id.endswith("_exercises") == y] for y in (False, True))
PAGES_AS_BUILT = [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in BUILT]
PAGES = {number_of(x.id): x.values[0] for x in EXERCISES}
# As registered: every page would have to be read here. That it has the same ones is tested below.
EXERCISE_IDS = [pytest.param(PAGES[e.phase], id, id=id) for id, e in registry.exercises().items()]


def code_cells(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def run_unsolved(path):
    """Run an exercise notebook as a learner first meets it. Returns [(cell, its error output or None)]."""
    notebook = make_notebook(path, "exercises")
    forked = mock.patch.object(local_provisioner, "launch_kernel", Kernel)
    with forked, kernel_for(notebook, ROOT / "exercises", ROOT) as (client, _):
        client.allow_errors = True
        for i, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                client.execute_cell(cell, i)
    return [(c, next((o for o in c.outputs if o.output_type == "error"), None)) for c in code_cells(notebook)]


def headings(notebook, marks):
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    return re.findall(rf"^{marks} .+$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


# ---------------------------------------------------------------- exercises


@pytest.mark.parametrize("path", EXERCISES)
def test_a_page_fails_at_its_checks_and_nowhere_else_before_it_is_solved(path):
    checked = set()
    for cell, error in run_unsolved(path):
        if "check" not in cell.metadata.get("tags", []):
            assert error is None, f"{error.ename}: {error.evalue}\n{cell.source}"
            continue
        (id,) = check_calls(cell)
        checked.add(id)
        assert error is not None, f"{cell.source} passes, though nothing was filled in"
        assert error.ename == "CheckFailed", f"{cell.source} raises {error.ename}: {error.evalue}"
        if registry.find(id).difficulty == "Bug hunt":
            assert error.traceback[-1].endswith("(symptoms)"), "untouched code: what can be seen of it, and no cause"
            assert len(error.traceback) <= 17
        else:
            said = error.traceback[0]
            assert len(error.traceback) == 1 and "\n" not in said, "CheckFailed is shown as one short line"
            assert "(not-solved-yet)" in said, f"{cell.source} should say 'not solved yet', it says: {said}"
    assert checked == {e.id for e in registry.exercises().values() if e.phase == number_of(path.stem)}


@pytest.mark.parametrize("path, id", EXERCISE_IDS)
def test_an_exercise_is_registered_as_it_is_announced(path, id):
    registered, page = registry.find(id), next(x for x in read_lesson(path).exercises if x.id == id)
    assert (registered.title, registered.minutes, registered.difficulty) == (page.title, page.minutes, page.difficulty)
    assert len(registered.hints) >= 1
    assert all(hint.strip() for hint in registered.hints)


@pytest.mark.parametrize("path", EXERCISES)
def test_a_phase_has_five_exercises_and_a_bug_hunt(path):
    found = read_lesson(path).exercises
    if type(number_of(path.stem)) is str:  # an optional one
        return
    assert len(found) >= 5
    difficulties = [e.difficulty for e in found]
    assert difficulties[0] == "Warm-up", "the first exercise is a warm-up"
    assert "Stretch" in difficulties
    assert "Bug hunt" in difficulties


@pytest.mark.parametrize("path", EXERCISES)
def test_the_learner_does_not_get_the_answers(path):
    lesson = read_lesson(path)
    exercise, solution = (make_notebook(path, kind) for kind in ("exercises", "solutions"))
    for shown, solved, cell in zip(exercise.cells, solution.cells, lesson.cells, strict=True):
        assert not re.search(r"# (BEGIN|END) ", shown.source + solved.source)
        if "exercise" in cell.tags:
            assert shown.source != solved.source, f"line {cell.line}: the exercise holds its solution"


def test_every_lecture_has_exercises_and_the_reverse():
    assert [x.id for x in EXERCISES] == [f"{x.id}_exercises" for x in LECTURES]


# ---------------------------------------------------------------- a lecture does not print the answers


def answers(lesson):
    """{exercise id: the squeezed lines of code that its answer needs}, from the cells before each check."""
    found, lines = {}, set()
    for cell in lesson.cells:
        if "exercise" in cell.tags:
            given = set()  # a hunt's wrong lines
            for block in blocks(lesson, cell):
                some = {line for line in map(squeezed, (text for _, text in block.lines)) if len(line) > 6}
                if block.kind == "SOLUTION":
                    lines |= some - given
                given = some if block.kind == "STARTER" else given
        if "check" in cell.tags:
            found[check_calls(cell)[0]], lines = lines, set()
    return found


def told(cell):
    """The squeezed lines of code that a lecture's cell shows, in its source and in its output; folds left out."""
    texts = [show.shown(o.get("data", {}).get("text/markdown", "")) for o in cell.get("outputs", [])]
    return {squeezed(line) for line in [*cell.source.split("\n"), *(x for text in texts for x in text)]}


@pytest.mark.parametrize("path", EXERCISES)
def test_a_lecture_does_not_print_the_answers_of_its_exercises(path):
    cells = [told(cell) for cell in code_cells(built(ROOT / "notebooks" / f"{lesson_name(path)}.ipynb"))]
    asked = answers(read_lesson(path))  # none of a hunt that puts its own lines in another order
    printed = {id for id, lines in asked.items() if lines and any(lines <= cell for cell in cells)}
    assert printed <= {"1.4"}, "phase 1 shows its first kernel whole, and asks for it again"


# ---------------------------------------------------------------- lectures, as text


@pytest.mark.parametrize("path", LESSONS)
def test_what_a_lesson_takes_from_our_modules_is_there(path):
    """Branches for a GPU are not run here: a function that was renamed would be missed there first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, types.ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "flashlab":
            for name in node.names:
                found = pkgutil.resolve_name(f"{node.module}.{name.name}")
                if isinstance(found, types.ModuleType):
                    modules[name.asname or name.name] = found
    for node in ast.walk(tree):  # a parameter of the same name is no module
        if isinstance(node, ast.arg):
            modules.pop(node.arg, None)
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }
    missing = [f"{name}.{attribute}" for name, attribute in used if not hasattr(modules[name], attribute)]
    assert not missing


@pytest.mark.parametrize("path", LECTURES)
def test_the_frame_of_a_lecture(path):
    notebook = make_notebook(path, "notebooks")
    number = number_of(path.stem)
    assert notebook.cells[0].source.startswith(f"# Phase {number} · ")
    assert len(headings(notebook, "#")) == 1, "one title"
    found = headings(notebook, "##")
    assert found[:2] == FRAME[:2]
    assert found[-2:] == FRAME[2:]
    assert len(found) > 4, "and a body between them"


@pytest.mark.parametrize("path", LECTURES)
def test_the_course_table_has_the_hours_of_a_lecture(path):
    counted = reading_minutes(make_notebook(path, "notebooks").cells)
    stated = next(p.reading for p in PHASES if p.name == path.stem)
    assert abs(counted - stated) <= 15, f"write reading={counted} in flashlab/course.py"


@pytest.mark.parametrize("path", LESSONS)
def test_a_page_states_its_hours_and_leads_to_its_other_half(path):
    lesson = read_lesson(path)
    top, end = lesson.cells[1].source, lesson.cells[-1].source
    assert top.startswith("**Time:** ") and end.startswith(("**Next:** ", "Back to "))
    wanted = ("notebooks", "solutions") if lesson.is_exercises else ("exercises",)
    assert all(f"](../{folder}/{lesson.name}.ipynb)" in top for folder in wanted)


@pytest.mark.parametrize("path", LESSONS)
def test_markdown_links_resolve(path):
    kind = "solutions" if path.stem.endswith("_exercises") else "notebooks"
    notebook = make_notebook(path, kind)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text) + re.findall(r"(?:src|href)=[\"']([^\"']+)", text)
    for target in targets:
        assert not target.startswith("data:"), "a figure belongs in an output or a file, not in the markdown"
        url = urllib.parse.urlparse(target)
        if url.scheme or not url.path:
            continue
        assert (ROOT / kind / urllib.parse.unquote(url.path)).exists(), f"{target} leads nowhere"


# ---------------------------------------------------------------- lectures and solutions, as built


@pytest.mark.parametrize("path", PAGES_AS_BUILT)
def test_outputs_are_there_as_long_as_one_reads_and_the_same_on_every_machine(path):
    notebook = built(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert all(c.execution_count for c in cells), "nbval compares nothing in a cell that was never run"
    for cell in cells:
        assert not any(o.output_type == "error" for o in cell.outputs), cell.source
        assert output_problem(cell) is None, cell.source
        assert output_lines(cell) <= MOST_OUTPUT_LINES, f"{output_lines(cell)} lines of output from:\n{cell.source}"
    assert path.stat().st_size <= MOST_BYTES, f"{path.stat().st_size / 1e6:.1f} MB in every clone"
