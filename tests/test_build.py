"""The lessons build, on tiny lessons in a directory of their own. (What real ones become: `make test-sync`.)"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import build
import lesson_execution
import lesson_source
import nbformat
import pytest
from tools.forked_kernels import second_try

LECTURE = """
# %% [markdown]
# # Phase 2 · Tiny

# %%
import tinylib

print(tinylib.double(21))

# %% [markdown]
# A figure.

# %%
import matplotlib.pyplot as plt

plt.plot([0, 1], [1, 0])
plt.show()

# %% [markdown]
# Two chunks of one stream, then a time.

# %%
print("a", end="", flush=True)
print("b")

# %% tags=["nbval-ignore-output"]
import time

print(time.perf_counter_ns())
"""

EXERCISES = '''
# %% [markdown]
# # Phase 2 · Exercises

# %%
import functools

def check(id, fn):
    """Stands for flashlab.check.check."""
    assert fn(3) == 6, id

# %% [markdown]
# ## 2.1

# %% tags=["exercise"]
def twice(x):
    """x + x"""
    # BEGIN SOLUTION
    y = x + x
    return y
    # END SOLUTION

# %% tags=["check"]
check("2.1", twice)

# %% [markdown]
# ## 2.2

# %% tags=["exercise"]
# RULE flashlab.tinymod:traced, double
def double(x):
    """Twice x."""
    raise NotImplementedError

# %% tags=["check"]
check("2.2", double)

# %% [markdown]
# ## 2.3

# %% tags=["exercise"]
# BEGIN STARTER
def buggy(x):
    return x * x
# END STARTER
# BEGIN SOLUTION
def buggy(x):
    return 2 * x
# END SOLUTION

# %% tags=["check"]
check("2.3", buggy)
'''

REGISTERED = """
rule("2.1", title="Twice", minutes=5, difficulty="Warm-up")
rule("2.2", title="The one from the library", minutes=10)
rule("2.3", title="Find the bug", minutes=10, difficulty="Bug hunt")
"""

TINYMOD = '''
import functools


def traced(fn):
    return functools.wraps(fn)(lambda x: fn(x))


LIMIT: int = 4


@traced
def double(x):
    """Twice x."""
    return 2 * x  # twice
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A course with one lesson, and a module `tinylib` that its lecture imports."""
    package = tmp_path / "src" / "flashlab"
    (package / "exercises").mkdir(parents=True)
    (package / "exercises" / "phase_02.py").write_text(REGISTERED)
    (package / "__init__.py").write_text("")
    (package / "tinymod.py").write_text(TINYMOD)
    (tmp_path / "src" / "tinylib.py").write_text("from flashlab.tinymod import double as double\n")
    (tmp_path / "src" / "lessons").mkdir()
    lesson(tmp_path, "02_tiny", LECTURE)
    lesson(tmp_path, "02_tiny_exercises", EXERCISES)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


SLEEPY = """
# %%
import os, subprocess, sys, time
from pathlib import Path

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(PLACE).write_text(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


@pytest.mark.long
def test_ctrl_c_stops_the_build(root):
    marks = [root / f"mark{i}" for i in range(2)]
    (root / "src" / "lessons" / "02_tiny.py").unlink()
    (root / "src" / "lessons" / "02_tiny_exercises.py").unlink()
    for i, mark in enumerate(marks):
        text = f"# %% [markdown]\n# # {i} · Sleepy\n" + SLEEPY.replace("PLACE", repr(str(mark)))
        lesson(root, f"{i:02d}_sleepy", text)
    process = subprocess.Popen(
        [sys.executable, build.__file__, "--root", str(root)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not marks[0].exists() or len(marks[0].read_text().split()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said, complaint = process.communicate()
    assert process.returncode == 130 and "Traceback" not in complaint, complaint
    assert "stopped by you: what was built is kept" in said
    assert not marks[1].exists(), "no other lesson was begun"
    assert snapshot(root) == {} and not list(root.glob("*/.*.ipynb.*"))
    for pid in marks[0].read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", "a kernel, or what it started, still runs"


@pytest.fixture
def no_kernel(monkeypatch):
    """Replace the execution by one that only counts the cells; returns the list of what was executed."""
    executed = []

    def execute(notebook, lesson, numbers, folder, on_cell):
        executed.append(f"{folder.name}/{lesson.name}")
        code = [c for c in notebook.cells if c.cell_type == "code"]
        for count, cell in enumerate(code, 1):
            cell.execution_count = count
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"run {len(executed)}\n")]

    monkeypatch.setattr(build, "execute", execute)
    return executed


def lesson(root, name, text):
    path = root / "src" / "lessons" / f"{name}.py"
    path.write_text(text.lstrip("\n"))
    return path


def edit(root, name, old, new):
    path = root / "src" / "lessons" / f"{name}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def run(root, *arguments):
    return build.main(["--root", str(root), *arguments])


def notebook(root, name):
    return nbformat.read(root / f"{name}.ipynb", as_version=4)


def snapshot(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob("*/*.ipynb"))}


def sources(notebook, tag=None):
    return [c.source for c in notebook.cells if tag is None or tag in c.metadata.get("tags", [])]


# ---------------------------------------------------------------- execution


@pytest.mark.slow
def test_an_execution_is_reproducible_byte_for_byte(root, capsys):
    assert run(root) == 0, capsys.readouterr().out
    first = snapshot(root)
    assert list(first) == ["exercises/02_tiny.ipynb", "notebooks/02_tiny.ipynb", "solutions/02_tiny.ipynb"]
    lecture = notebook(root, "notebooks/02_tiny")
    code = [c for c in lecture.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [1, 2, 3, 4]
    assert code[0].outputs[0].text == "42\n"
    assert [o.text for o in code[2].outputs] == ["ab\n"], "two chunks are one output"
    png = base64.b64decode(code[1].outputs[0].data["image/png"])
    assert png.startswith(b"\x89PNG") and b"tEXt" not in png and b"IEND" in png
    text = json.dumps(lecture)
    assert str(root) not in text and "iopub" not in text and "version" not in lecture.metadata["language_info"]

    assert run(root) == 0
    assert snapshot(root) == first, "nothing changed, so nothing is executed, not even the time"

    assert run(root, "--force") == 0
    again = snapshot(root)
    assert again.keys() == first.keys()
    assert again["solutions/02_tiny.ipynb"] == first["solutions/02_tiny.ipynb"]
    assert again["exercises/02_tiny.ipynb"] == first["exercises/02_tiny.ipynb"]
    assert again["notebooks/02_tiny.ipynb"] != first["notebooks/02_tiny.ipynb"], "the time is another one"
    assert without_time(again) == without_time(first), "and nothing else"
    assert not list(root.glob("*/.*")), "no temporary file is left"


def without_time(files):
    lecture = nbformat.reads(files["notebooks/02_tiny.ipynb"].decode(), as_version=4)
    lecture.cells[-1].outputs = []
    return nbformat.writes(lecture)


@pytest.mark.slow
def test_a_failing_lesson_is_named_and_leaves_everything_as_it_was(root, capsys):
    lecture_of(root, "x = 1\nprint(x)")
    assert run(root) == 0
    before = snapshot(root)
    edit(root, "02_tiny", "print(x)", "\nprint(x / 0)")
    lesson(root, "03_other", "\n# %% [markdown]\n# # Other\n\n# %%\nprint('fine')\n")
    capsys.readouterr()

    assert run(root) == 1

    out = capsys.readouterr().out
    line = (root / "src/lessons/02_tiny.py").read_text().split("\n").index("print(x / 0)") + 1
    assert f"src/lessons/02_tiny.py, line {line}: ZeroDivisionError: division by zero" in out
    after = snapshot(root)
    assert {name: after[name] for name in before} == before
    assert notebook(root, "notebooks/03_other").cells[1].outputs[0].text == "fine\n", "the build went on"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, sentence",
    [
        ("import os\nos._exit(3)", "the kernel died"),
        ("import warnings\nwarnings.warn('old')", "writes to stderr"),
        ("import os\nprint('now in', os.getcwd())", "absolute path"),
        ("print(object())", "memory address"),
        ("def f(:\n    pass", "SyntaxError"),
    ],
    ids=["dies", "warns", "path", "address", "syntax"],
)
def test_a_cell_that_cannot_be_compared_elsewhere_fails(root, capsys, code, sentence):
    lecture_of(root, code)
    assert run(root) == 1
    assert sentence in capsys.readouterr().out
    assert not (root / "notebooks" / "02_tiny.ipynb").exists()


# ---------------------------------------------------------------- when a lesson is executed


def test_only_what_changed_is_executed(root, no_kernel):
    edit(root, "02_tiny", "import tinylib", "import flashlab.tinymod as tinylib")
    assert run(root) == 0
    assert no_kernel == ["notebooks/02_tiny", "solutions/02_tiny"]
    outputs = [c.get("outputs") for c in notebook(root, "notebooks/02_tiny").cells]

    no_kernel.clear()
    edit(root, "02_tiny", "# A figure.", "# A nicer figure.")
    assert run(root) == 0
    assert no_kernel == [], "a change of wording executes nothing"
    built = notebook(root, "notebooks/02_tiny")
    assert "A nicer figure." in sources(built)
    assert [c.get("outputs") for c in built.cells] == outputs

    edit(root, "02_tiny", "[1, 0]", "[1, 1]")
    assert run(root) == 0
    assert no_kernel == ["notebooks/02_tiny"]

    no_kernel.clear()
    (root / "src/flashlab/tinymod.py").write_text(TINYMOD + "\nMORE = 1\n")
    assert run(root) == 0
    assert no_kernel == ["notebooks/02_tiny"], "it imports the module; the solution only quotes two functions of it"

    no_kernel.clear()
    assert run(root, "--force", "--only", "02_tiny_exercises") == 0
    assert no_kernel == ["solutions/02_tiny"]


def test_imports_are_followed(root):
    package = root / "src" / "flashlab"
    for name, text in {
        "a.py": "def f():\n    from flashlab import b\n",
        "b.py": "from . import c\n",
        "c.py": "import numpy\n",
        "unused.py": "",
        "kit/__init__.py": "def f():\n    from .inner import x\n",
        "kit/inner.py": "from ..c import y\n",
        "kit/other.py": "",
        "kit/parts/kernel.cu": "// code\n",
        "exercises/__init__.py": "",
        "exercises/phase_02.py": "import flashlab.a\n",
        "exercises/phase_03.py": "import flashlab.unused\n",
    }.items():
        (package / name).parent.mkdir(exist_ok=True, parents=True)
        (package / name).write_text(text)

    def found(*cells):
        paths = lesson_execution.imported_files(list(cells), 2, root)
        return " ".join(p.relative_to(package).as_posix() for p in paths)

    assert found("import numpy") == ""
    assert found("from flashlab.a import f") == "__init__.py a.py b.py c.py"
    kit = "__init__.py c.py kit/__init__.py kit/inner.py kit/parts/kernel.cu"
    assert found("from flashlab import kit") == kit
    exercises = "__init__.py a.py b.py c.py exercises/__init__.py exercises/phase_02.py"
    assert found("import flashlab.exercises") == exercises
    (package / "__init__.py").write_text(
        "if TYPE_CHECKING:\n    import flashlab.c\ndef __getattr__(name):\n    import flashlab.c\n"
    )
    assert found("import flashlab.unused") == "__init__.py unused.py"
    for ask in ("from flashlab import door", "import flashlab\nflashlab.door()"):
        assert found(ask) == "__init__.py c.py"


# ---------------------------------------------------------------- exercises and solutions


def test_blanks_starters_and_bug_hunts(root, no_kernel):
    assert run(root) == 0
    exercise, solution = notebook(root, "exercises/02_tiny"), notebook(root, "solutions/02_tiny")
    assert sources(exercise, "exercise") == [
        'def twice(x):\n    """x + x"""\n    # YOUR CODE HERE\n    raise NotImplementedError',
        'def double(x):\n    """Twice x."""\n    raise NotImplementedError',
        "def buggy(x):\n    return x * x",
    ]
    assert sources(solution, "exercise") == [
        'def twice(x):\n    """x + x"""\n    y = x + x\n    return y',
        "def traced(fn):\n    return functools.wraps(fn)(lambda x: fn(x))\n\n\n"
        'def double(x):\n    """Twice x."""\n    return 2 * x  # twice',
        "def buggy(x):\n    return 2 * x",
    ]
    assert len(sources(exercise, "raises-exception")) == len(sources(exercise, "check")) == 3
    assert sources(solution, "raises-exception") == []
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in exercise.cells)
    assert [c.id for c in exercise.cells] == [c.id for c in solution.cells]
    assert len({c.id for c in exercise.cells}) == len(exercise.cells)


def test_a_new_cell_leaves_the_ids_of_the_others(root):
    before = [c.id for c in build.read_lesson(root / "src/lessons/02_tiny.py").cells]
    edit(root, "02_tiny", "# %% [markdown]\n# A figure.", "# %% [markdown]\n# More.\n\n# %% [markdown]\n# A figure.")
    after = [c.id for c in build.read_lesson(root / "src/lessons/02_tiny.py").cells]
    assert len(after) == len(before) + 1 and set(before) < set(after)


# ---------------------------------------------------------------- cells that the build fills


def lecture_of(root, *cells):
    (root / "src/lessons/02_tiny_exercises.py").unlink(missing_ok=True)
    return lesson(root, "02_tiny", "".join(f"\n# %%\n{cell}\n" for cell in cells))


def test_below_a_heading_a_page_needs_its_text_alone(root):
    """The cells that are not there: the registered function, and the check of what is defined."""
    cell, check = ('# %% tags=["exercise"]\ndef twice', 'check("2.1", twice)\n')
    begin, end = EXERCISES.index(cell), EXERCISES.index(check)
    function = EXERCISES[begin : EXERCISES.index("# %%", begin + 1)].split("\n", 1)[1]
    registration = root / "src/flashlab/exercises/phase_02.py"
    registration.write_text(REGISTERED.replace("\n", "\n@", 1).replace('up")\n', f'up")\n{function}', 1))
    whole = EXERCISES.replace(check, f'# hint("2.1")\n{check}')
    path = lesson(root, "02_tiny_exercises", whole)
    wanted = [(c.id, c.source, c.tags) for c in lesson_source.read_lesson(path).cells]
    for short in (
        EXERCISES[: end - 21] + EXERCISES[end + len(check) :],
        EXERCISES[:begin] + EXERCISES[end + len(check) :],
    ):
        lesson(root, "02_tiny_exercises", short)
        assert [(c.id, c.source, c.tags) for c in lesson_source.read_lesson(path).cells] == wanted


def test_a_cell_is_filled_with_the_code_it_names_and_runs_it(root, capsys):
    lecture_of(root, "import functools", "# FROM flashlab.tinymod: traced, double\nprint(double(21))")
    assert run(root) == 0, capsys.readouterr().out
    cell = notebook(root, "notebooks/02_tiny").cells[1]
    assert cell.source == (
        "# from src/flashlab/tinymod.py\n"
        "def traced(fn):\n    return functools.wraps(fn)(lambda x: fn(x))\n\n\n"
        '@traced\ndef double(x):\n    """Twice x."""\n    return 2 * x  # twice\n\n\n'
        "print(double(21))"
    )
    assert cell.outputs[0].text == "42\n"


UNRESOLVED = {
    "an import": ([], "traced", "functools"),
    "a function": (["import functools"], "double", "traced"),
    "several": ([], "traced, uses_path", "Path, functools, p"),
    "an annotation": (["p = 1"], "uses_path", "Path"),
}


@pytest.mark.parametrize("before, symbols, names", UNRESOLVED.values(), ids=UNRESOLVED)
def test_a_name_that_the_code_needs_and_no_cell_has(root, no_kernel, capsys, before, symbols, names):
    more = "from pathlib import Path\n\np = Path()\n\ndef uses_path(x: Path):\n    return [p for y in x if len(y)]\n"
    (root / "src/flashlab/tinymod.py").write_text(f"{more}{TINYMOD}")
    path = lecture_of(root, *before, f"# FROM flashlab.tinymod: {symbols}")
    assert run(root) == 1
    out = capsys.readouterr().out
    line = path.read_text()[: path.read_text().index("# FROM")].count("\n") + 1
    assert f"src/lessons/02_tiny.py, line {line}: " in out and f" {names}, which no cell" in out
    assert not no_kernel


def test_an_exercise_cell_is_not_filled_for_the_learner(root, no_kernel, capsys):
    edit(root, "02_tiny_exercises", "def twice", "# FROM flashlab.tinymod: traced\ndef twice")
    assert run(root) == 1
    assert "would give the answer away" in capsys.readouterr().out
    edit(root, "02_tiny_exercises", "# FROM flashlab.tinymod: traced\n", "")
    edit(root, "02_tiny_exercises", "\nimport functools\n", "\n# FROM flashlab.tinymod: traced\nimport functools\n")
    assert run(root) == 0, capsys.readouterr().out
    for kind in ("exercises", "solutions"):
        assert "def traced" in sources(notebook(root, f"{kind}/02_tiny"))[1]


CELLS = EXERCISES[EXERCISES.index("# RULE") - 23 : EXERCISES.index("# %% [markdown]\n# ## 2.3")]
MALFORMED = {
    "nested": ("    y = x + x", "    # BEGIN SOLUTION\n    y = x + x", "    # BEGIN SOLUTION\n    y",
               "BEGIN SOLUTION inside the SOLUTION that begins on line"),
    "end only": ("    # BEGIN SOLUTION\n", "", "    # END SOLUTION", "END SOLUTION without BEGIN SOLUTION"),
    "empty": ("    y = x + x\n    return y\n", "", "    # BEGIN SOLUTION", "the SOLUTION is empty"),
    "no such symbol": (", double", ", triple", "# RULE flashlab.tinymod:traced, triple", "defines no triple"),
    "odd rule": ("flashlab.tinymod:traced, double", "double", "# RULE double", "should read"),
    "marker in a plain cell": ('    """Stands', '    # BEGIN SOLUTION\n    """Stands',
                               '    # BEGIN SOLUTION\n    """Stands', 'needs tags=["exercise"]'),
    "nothing to fill": (CELLS, "", "## 2.2", "exercise 2.2 has no check cell"),
    "no heading": ("# ## 2.3", "# Find", '# %% tags=["check"]\ncheck("2.3"', "has no heading"),
    "out of order": ("## 2.2", "## 2.3", '# ## 2.3\n\n# %% tags=["exercise"]\n# RULE', "should be 2.2"),
    "not registered": ("## 2.2", "## 2.4", "# ## 2.4", "registers no '2.4' with a title"),
    "unknown tag": ('tags=["check"]\ncheck("2.2"', 'tags=["chek"]\ncheck("2.2"', '# %% tags=["chek"]',
                    "unknown tag 'chek'"),
}  # fmt: skip


@pytest.mark.parametrize("old, new, where, sentence", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_exercise_file_is_refused_with_its_line(root, no_kernel, capsys, old, new, where, sentence):
    edit(root, "02_tiny_exercises", old, new)
    text = (root / "src/lessons/02_tiny_exercises.py").read_text()
    line = text[: text.rindex(where)].count("\n") + 1
    assert run(root, "--only", "02_tiny_exercises") == 1
    out = capsys.readouterr().out
    assert sentence in out
    assert f"src/lessons/02_tiny_exercises.py, line {line}: " in out
    assert not no_kernel and not list(root.glob("*/*.ipynb"))
    assert run(root, "--check") == 1


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("print(1)\n\n# %%\nprint(2)\n", "text before the first cell"),
        ('# %% tags=["exercise"]\nprint(2)\n', "belongs in 02_tiny_exercises.py"),
        ("# %%\n# BEGIN SOLUTION\nprint(2)\n", "belongs in 02_tiny_exercises.py"),
        ("# %%\n# FROM flashlab.tinymod", "should read '# FROM flashlab.module: symbol, symbol'"),
        ("# %%\n# FROM flashlab.tinymod: LIMIT (no comments)", "should read"),
        ("# %%\nx = 1\n# FROM flashlab.tinymod: LIMIT", "FROM lines come first"),
        ("# %%\n# FROM flashlab.tinymod: limit", "limit: flashlab.tinymod defines no limit"),
        ("# %%\n# FROM flashlab.tinymod: functools", "defines no functools"),
        ("# %%\n# FROM flashlab.nomod: LIMIT", "there is no module flashlab.nomod"),
    ],
)
def test_a_malformed_lecture_is_refused(root, no_kernel, capsys, text, sentence):
    lesson(root, "02_tiny", text)
    (root / "src/lessons/02_tiny_exercises.py").unlink()
    assert run(root) == 1
    out = capsys.readouterr().out
    assert sentence in out and "src/lessons/02_tiny.py, line " in out
    assert run(root, "--check") == 1


# ---------------------------------------------------------------- the learner's answers


def answer(root, text="def twice(x):\n    return 2 * x"):
    path = root / "exercises" / "02_tiny.ipynb"
    filled = nbformat.read(path, as_version=4)
    next(c for c in filled.cells if "exercise" in c.metadata.get("tags", [])).source = text
    nbformat.write(filled, path)
    return path


def test_a_filled_in_exercise_is_never_overwritten(root, no_kernel, capsys):
    run(root)
    path = answer(root)
    mine = path.read_bytes()

    assert run(root) == 0, "there is nothing new to write"
    assert "holds your answers and is up to date" in capsys.readouterr().out

    (root / "src/flashlab/exercises/phase_02.py").write_text(REGISTERED.replace("Twice", "Two times"))
    assert run(root) == 1
    out = capsys.readouterr().out
    assert "exercises/02_tiny.ipynb: NOT written" in out and "--force-exercises" in out
    assert run(root, "--force") == 1
    assert path.read_bytes() == mine
    assert "## 2.1 Two times" in sources(notebook(root, "solutions/02_tiny"))[2], "the solution is still built"

    for copies in (1, 2):
        assert run(root, "--force-exercises") == 0
        kept = sorted(root.glob("exercises/02_tiny.mine-*.ipynb"))
        assert len(kept) == copies
        assert "def twice(x):\n    return 2 * x" in sources(nbformat.read(kept[-1], 4))
        assert "## 2.1 Two times" in sources(notebook(root, "exercises/02_tiny"))[2]
        answer(root)
    assert mine in [p.read_bytes() for p in kept]


def test_an_exercise_that_was_only_opened_and_run_is_not_an_answer(root, no_kernel):
    run(root)
    path = root / "exercises" / "02_tiny.ipynb"
    pristine = path.read_bytes()
    opened = nbformat.read(path, as_version=4)
    for i, cell in enumerate(c for c in opened.cells if c.cell_type == "code"):
        cell.execution_count, cell.outputs = i, [nbformat.v4.new_output("stream", text="x")]
    opened.metadata["language_info"] = nbformat.from_dict({"name": "python", "version": "3.12.1"})
    opened.cells.append(nbformat.v4.new_code_cell(""))
    path.write_text(json.dumps(opened, indent=4))

    assert run(root) == 0
    assert path.read_bytes() == pristine


@pytest.mark.parametrize("text", ["not a notebook", "{}", "[]", '{"nbformat": 4, "cells": 3}', "\x00"])
def test_something_else_under_the_name_of_an_exercise_is_left_alone(root, no_kernel, capsys, text):
    (root / "exercises").mkdir()
    path = root / "exercises" / "02_tiny.ipynb"
    path.write_text(text)
    assert run(root) == 1
    assert path.read_text() == text
    assert "NOT written" in capsys.readouterr().out


# ---------------------------------------------------------------- check


def test_check_finds_what_is_out_of_date(root, no_kernel, capsys):
    assert run(root, "--check") == 1
    assert "notebooks/02_tiny.ipynb: is missing" in capsys.readouterr().out
    run(root)
    no_kernel.clear()
    assert run(root, "--check", "--exercises") == 0

    edit(root, "02_tiny", "# A figure.", "# Another figure.")
    capsys.readouterr()
    assert run(root, "--check") == 1
    assert "notebooks/02_tiny.ipynb: cell 3 is not as in its lesson (Another figure.)" in capsys.readouterr().out
    assert run(root, "--check", "--only", "02_tiny_exercises") == 0
    run(root)

    (root / "src/flashlab/tinymod.py").write_text(TINYMOD.replace("2 * x", "x + x"))
    assert run(root, "--check") == 1
    assert "solutions/02_tiny.ipynb: cell 7 is not as in its lesson" in capsys.readouterr().out, "a function moved on"
    run(root)

    built = notebook(root, "notebooks/02_tiny")
    built.cells[-1].execution_count = None
    nbformat.write(built, root / "notebooks/02_tiny.ipynb")
    no_kernel.clear()
    assert run(root, "--check") == 1
    assert "never run" in capsys.readouterr().out
    assert no_kernel == []


def test_a_learners_exercise_is_compared_only_in_ci_or_on_request(root, no_kernel, monkeypatch, capsys):
    run(root)
    answer(root)
    (root / "notebooks" / "99_scratch.ipynb").write_text("{}")
    assert run(root, "--check") == 0
    assert run(root, "--check", "--exercises") == 1
    capsys.readouterr()
    monkeypatch.setenv("CI", "true")
    assert run(root, "--check") == 1
    out = capsys.readouterr().out
    assert "exercises/02_tiny.ipynb: cell 4 is not as in its lesson" in out
    assert "notebooks/99_scratch.ipynb: no lesson" in out


# ---------------------------------------------------------------- small parts


def test_only_names_a_lesson_in_four_ways(root):
    lesson(root, "03_other", "")

    def names(*only):
        return [p.stem for p in build.find_lessons(root, list(only))]

    both = ["02_tiny", "02_tiny_exercises"]
    assert names() == [*both, "03_other"]
    assert names("02") == names("tiny") == names("02_tiny") == names("src/lessons/02_tiny.py") == both
    assert names("02_tiny_exercises") == ["02_tiny_exercises"]
    assert names("03", "02") == [*both, "03_other"]
    with pytest.raises(SystemExit, match="No lesson is called '07'. There are: 02_tiny, "):
        names("07")


@pytest.mark.parametrize(
    "text, found",
    [
        ("File /home/me/x.py", True),
        ("'/tmp/ipykernel_7/1.py:3'", True),
        ("see https://example.org/home/x and ./usr/lib", False),
        ("1/2, a/usr/b, <br/>/2", False),
        ("src=data:image/gif;base64,R0lGO/tmp/abc", False),
    ],
)
def test_what_counts_as_an_absolute_path(text, found):
    assert bool(lesson_execution.PATH.search(text)) == found


def test_an_unexpected_failure_of_one_lesson_does_not_stop_the_others(root, monkeypatch, capsys):
    lesson(root, "03_other", "\n# %% [markdown]\n# # Other\n")

    def execute(notebook, lesson, *rest):
        if lesson.name == "02_tiny":
            raise OSError("disk full")

    monkeypatch.setattr(build, "execute", execute)
    assert run(root) == 1
    assert "02_tiny: the build failed with OSError: disk full" in capsys.readouterr().out
    assert [p.name for p in root.glob("notebooks/*")] == ["03_other.ipynb"]


def test_a_failing_write_leaves_the_old_notebook(root, no_kernel, monkeypatch):
    run(root)
    before = snapshot(root)
    edit(root, "02_tiny", "# A figure.", "# Another figure.")

    def replace(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(build.os, "replace", replace)
        assert run(root) == 1
    assert snapshot(root) == before
    assert not list(root.glob("notebooks/.*"))


def test_a_kernel_that_says_nothing_is_begun_anew_once():
    tried = []

    def start(timeout, name, cwd=None):
        tried.append((timeout, name, cwd))
        if len(tried) < least:
            raise RuntimeError("Kernel didn't respond")
        return "a kernel"

    least = 2
    with pytest.warns(UserWarning, match="begun anew: Kernel didn't respond"):
        assert second_try(start)(60, "python", cwd="here") == "a kernel"
    assert tried == [(20, "python", "here"), (60, "python", "here")]
    least = 5
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="didn't respond"):
        second_try(start)(60, "python")
