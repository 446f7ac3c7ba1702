"""Build the notebooks of the course from the lessons beside this file.

    NN_slug.py            -> notebooks/NN_slug.ipynb   the lecture, executed
    NN_slug_exercises.py  -> exercises/NN_slug.ipynb   blanks to fill, not executed
                             solutions/NN_slug.ipynb   the same, solved and executed

    python src/lessons/build.py                 build what is out of date
    python src/lessons/build.py --only 02       one phase (number, slug or file name; repeatable)
    python src/lessons/build.py --check         write and execute nothing; exit 1 when a notebook is out of date

When a lesson is executed. A lecture or solution is executed when its code cells, or a flashlab module that
they import (directly or not), changed since the notebook was built; the notebook's metadata holds the digest,
and `--check` names the notebooks that a build would execute again (which is no error: nbval compares outputs).
Otherwise the outputs it has are kept, so that a change of wording executes nothing and a rebuild of an
unchanged lesson changes no byte. `--force` executes in any case. An execution is reproducible byte for byte,
except for the outputs of cells tagged `nbval-ignore-output` (timings, device names).

What is never lost. Notebooks are replaced only after the whole lesson has succeeded. An exercise notebook that
is not as the build last wrote it holds a learner's answers: it is left alone, unless `--force-exercises`, which
first keeps a copy as NN_slug.mine-DATE.ipynb.

CONTRIBUTING.md describes the lesson format; lesson_source.py enforces it.
"""

import argparse
import contextlib
import copy
import datetime
import os
import sys
import textwrap
import time
from pathlib import Path

import nbformat
from lesson_execution import execute, execution_digest
from lesson_source import LessonError, content_digest, find_lessons, inputs, make_notebook, read_lesson
from rich.console import Console
from rich.progress import Progress

from flashlab.runtime.cache import write_whole

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- writing


def read_notebook(path: Path) -> nbformat.NotebookNode | None:
    """The notebook at `path`, or None when there is none or it is no notebook."""
    unreadable = (ValueError, TypeError, AttributeError, KeyError, nbformat.ValidationError)  # what nbformat raises
    with contextlib.suppress(FileNotFoundError, *unreadable):
        return nbformat.read(path, as_version=4)
    return None


def text_of(notebook: nbformat.NotebookNode) -> str:
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def write(path: Path, notebook: nbformat.NotebookNode) -> bool:
    """Replace the file at once, or leave it when it is the same already. Returns whether it changed."""
    text = text_of(notebook)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_whole(path, text.encode())
    return True


def keep_outputs(notebook, old) -> bool:
    """Take over the outputs of `old` when it was executed with the same code and modules, in order."""
    if old is None or recorded(old, "built_from") != recorded(notebook, "built_from"):
        return False
    ours, theirs = ([c for c in n.cells if c.cell_type == "code"] for n in (notebook, old))
    if [(c.source, i) for i, c in enumerate(ours, 1)] != [(c.source, c.execution_count) for c in theirs]:
        return False
    for new, was in zip(ours, theirs, strict=True):
        new.outputs, new.execution_count = copy.deepcopy(was.outputs), was.execution_count
    return True


def is_untouched(notebook) -> bool:
    """Whether an exercise notebook holds what the build wrote, and no answers."""
    return recorded(notebook, "as_written") == content_digest(notebook)


def recorded(notebook, name: str) -> str | None:
    """A digest that the build wrote into the notebook itself: "built_from" or "as_written"."""
    return notebook.metadata.get("flashlab", {}).get(name)


def backup(path: Path) -> Path:
    """Copy a filled-in exercise beside itself, under a name nobody has."""
    stem = f"{path.stem}.mine-{datetime.date.today().isoformat()}"
    copies = [path.with_name(f"{stem}{suffix}.ipynb") for suffix in ("", *(f"-{i}" for i in range(2, 1000)))]
    kept = next(p for p in copies if not p.exists())
    kept.write_bytes(path.read_bytes())
    return kept


def build_lesson(path: Path, options: argparse.Namespace, bars: Progress) -> tuple[bool, list[str]]:
    """Build one lesson file: execute first, then replace its notebooks. Raises LessonError, nothing written.

    Returns whether it went well, and lines to print.
    """
    lesson = read_lesson(path)
    kind = "solutions" if lesson.is_exercises else "notebooks"
    target = lesson.root / kind / f"{lesson.name}.ipynb"
    notebook, numbers = make_notebook(lesson, kind)
    notebook.metadata["flashlab"]["built_from"] = execution_digest(notebook, lesson)
    how = "outputs kept"
    if options.force or not keep_outputs(notebook, read_notebook(target)):
        target.parent.mkdir(exist_ok=True)
        task, started = bars.add_task(path.stem, total=len(notebook.cells)), time.perf_counter()
        try:
            execute(notebook, lesson, numbers, target.parent, lambda: bars.advance(task))
        finally:
            bars.remove_task(task)
        how = f"executed in {time.perf_counter() - started:.1f} s"
    ok, lines = True, []
    if lesson.is_exercises:
        blank = make_notebook(lesson, "exercises")[0]
        ok, lines = write_exercise(blank, lesson.root / "exercises" / target.name, options.force_exercises)
    changed = write(target, notebook)
    return ok, [*lines, f"{kind}/{target.name}: {how}, {'written' if changed else 'unchanged'}"]


def write_exercise(notebook, path: Path, force: bool) -> tuple[bool, list[str]]:
    """Write an exercise notebook, unless the one that is there holds answers; `force` keeps those in a copy first."""
    name, lines = f"exercises/{path.name}", []
    old = read_notebook(path)
    if path.exists() and (old is None or not is_untouched(old)):
        if force:
            lines.append(f"{name}: your version is kept as exercises/{backup(path).name}")
        elif old is not None and recorded(old, "as_written") == recorded(notebook, "as_written"):
            return True, [f"{name}: holds your answers and is up to date, left as it is"]
        else:
            return False, [
                f"{name}: NOT written. It is not as the build last wrote it, so it may hold your answers, and there "
                "is a newer version. Rename it, or build with --force-exercises, which keeps a copy of yours."
            ]
    changed = write(path, notebook)
    return True, [*lines, f"{name}: {'written' if changed else 'unchanged'}"]


def build(paths: list[Path], options: argparse.Namespace, console: Console) -> bool:
    """Build the lessons in turn; a failing one is reported and the others go on. Returns whether all went well."""
    well = True
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        for path in paths:
            try:
                ok, lines = build_lesson(path, options, bars)
            except LessonError as error:
                ok, lines = False, [f"{error}\n  nothing written for this lesson, its notebooks are as they were"]
            except Exception as error:  # the other lessons go on
                ok, lines = False, [f"{path.stem}: the build failed with {type(error).__name__}: {error}"]
            for line in lines:
                console.print(line, style=None if ok else "red", markup=False)
            well &= ok
    return well


# ---------------------------------------------------------------- check


def out_of_date(paths: list[Path], root: Path, exercises: bool, strays: bool) -> tuple[list[str], list[str]]:
    """One sentence for each notebook that is not what its lesson makes; executes nothing.

    And the lectures and solutions whose outputs were made with other modules of flashlab than today's. `exercises`:
    compare exercises/ too. `strays`: report notebooks that no lesson makes.
    """
    problems, stale = [], []
    made: dict[str, set[str]] = {"notebooks": set(), "exercises": set(), "solutions": set()}
    for path in paths:
        try:
            lesson = read_lesson(path)
            kinds = ["solutions", "exercises"] if lesson.is_exercises else ["notebooks"]
            wanted = {kind: make_notebook(lesson, kind)[0] for kind in kinds}
        except LessonError as error:
            problems.append(str(error))
            continue
        for kind, notebook in wanted.items():
            made[kind].add(lesson.name)
            executed, found = kind != "exercises", read_notebook(root / kind / f"{lesson.name}.ipynb")
            if (executed or exercises) and (problem := difference(notebook, found, executed=executed)):
                problems.append(f"{kind}/{lesson.name}.ipynb: {problem}")
            elif executed and recorded(found, "built_from") != execution_digest(notebook, lesson):
                stale.append(f"{kind}/{lesson.name}")
    if strays:
        for kind, names in made.items():
            for path in sorted((root / kind).glob("*.ipynb")):
                if path.stem not in names and ".mine-" not in path.stem:
                    problems.append(f"{kind}/{path.name}: no lesson in src/lessons makes this notebook")
    return problems, stale


def difference(wanted, found, *, executed: bool) -> str | None:
    """How a notebook differs from its lesson, in one sentence, or None."""
    if found is None:
        return "is missing, or cannot be read"
    ours, theirs = inputs(wanted), inputs(found)
    if ours != theirs:
        if len(ours) != len(theirs):
            return f"has {len(theirs)} cells where its lesson has {len(ours)}"
        cell = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        first = ours[cell][2].strip().splitlines()[0]
        return f"cell {cell + 1} is not as in its lesson ({textwrap.shorten(first, 60)})"
    code = [c for c in found.cells if c.cell_type == "code"]
    if executed and any(c.execution_count is None for c in code):
        return "has cells that were never run: nbval would compare nothing there"
    if not executed and text_of(found) != text_of(wanted):
        return "has outputs or metadata that the build did not write"
    return None


# ---------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="build.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="02", help="only this phase; repeatable")
    parser.add_argument("--check", action="store_true", help="execute and write nothing, exit 1 on a difference")
    too = "with --check: compare exercises/ too, as where CI=true"
    parser.add_argument("--exercises", action="store_true", help=too)
    parser.add_argument("--force", action="store_true", help="execute lessons that have not changed too")
    filled = "replace exercises that were filled in, keeping a copy of each"
    parser.add_argument("--force-exercises", action="store_true", help=filled)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    root = options.root.resolve()
    paths = find_lessons(root, options.only)
    console = Console(highlight=False, soft_wrap=True)
    if not options.check:
        try:
            return 0 if build(paths, options, console) else 1
        except KeyboardInterrupt:
            console.print("stopped by you: what was built is kept, and the next build goes on from there")
            return 130
    in_ci = os.environ.get("CI", "").lower() == "true"
    exercises = options.exercises or in_ci
    problems, stale = out_of_date(paths, root, exercises, strays=in_ci and not options.only)
    for problem in problems:
        console.print(f"out of date: {problem}", markup=False)
    if problems:
        console.print("Build again: .venv/bin/python src/lessons/build.py")
        return 1
    if stale:
        console.print("executed before flashlab changed, and again by the next build:", ", ".join(stale), markup=False)
    scope = "" if exercises else " (exercises/ is yours to edit and was not compared; --exercises compares it)"
    console.print(f"{len(paths)} lessons in sync{scope}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
