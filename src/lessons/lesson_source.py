"""The lesson format: reads a lesson, checks it, and makes its notebooks, without executing anything.

CONTRIBUTING.md describes the format; every departure from it is a LessonError that names the line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import json
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat.v4

from flashlab.course import PHASES, hours, number_of
from flashlab.triton_tools.portable import names_read

# A cell that is made is validated alone, and once more by jupytext: a quarter of the time that a lesson takes. A
# notebook is validated where it is written, and by the tests.
nbformat.v4.nbbase.validate = lambda *_, **__: None

TAGS = {"exercise", "check", "nbval-ignore-output"}

MARKER = re.compile(
    r"^(?P<indent>[ \t]*)(?P<word>#|//)\s*(?P<edge>BEGIN|END) (?P<name>SOLUTION|STARTER)\b(?P<said>:.*)?"
)
QUOTE = re.compile(
    r"^# \w+ +(?P<module>\w+(?:\.\w+)*): *(?P<symbols>\w+(?: *, *\w+)*)"
    r"(?P<bare> +\(no docstrings\))?\s*$"
)
UNTITLED = re.compile(r"^## (?P<id>\d+[a-z]?\.\d+)\s*$")
ASIDE = re.compile(r"^[ \t]*(?:#|//): .*\n|[ \t]+(?:#|//): .*$", re.M)  # said of a repair
REGION = re.compile(r"^\s*# (region:.*|endregion)\s*$")  # flashlab.kernels.regions: never shown

Line = tuple[int | None, str]  # the number it has in the lesson (None: written by the build), and the text


class LessonError(Exception):
    """A lesson that cannot be built; the message names the file and the line."""

    def __init__(self, path: Path, line: int | None, message: str):
        super().__init__(f"src/lessons/{path.name}{f', line {line}' if line else ''}: {message}")


# ---------------------------------------------------------------- reading a lesson


@dataclass
class Cell:
    """A cell of a lesson. `line` is that of its `# %%`."""

    type: str
    lines: list[Line]
    tags: list[str]
    line: int
    id: str = ""

    @property
    def source(self) -> str:
        return "\n".join(text for _, text in self.lines)


@dataclass(frozen=True)
class Exercise:
    """One exercise, as `flashlab.exercises` registers it; `line` is that of its heading, `## 2.3`.

    solves: the function of `module` that the registration decorates, "" where none. bug: the edits of a hunt.
    """

    id: str
    title: str
    minutes: int
    module: str
    line: int | None
    difficulty: str = "Core"
    solves: str = ""
    bug: Sequence[tuple[str, str]] = ()


@dataclass
class Lesson:
    """A lesson file. `name` is NN_slug, the name of the notebooks; `exercises` is empty for a lecture."""

    path: Path
    name: str
    is_exercises: bool
    cells: list[Cell] = field(default_factory=list)
    exercises: list[Exercise] = field(default_factory=list)

    @property
    def number(self) -> int | str:
        return number_of(self.name)

    @property
    def root(self) -> Path:
        """The folder of the course."""
        return self.path.parents[2]

    def error(self, line: int | None, message: str) -> LessonError:
        return LessonError(self.path, line, message)


def find_lessons(root: Path, only: list[str] | None = None) -> list[Path]:
    """The lesson files in course order; `only` keeps those with that number, slug or file name.

    Raises SystemExit with a sentence when an `only` matches no lesson.
    """
    paths = sorted((root / "src" / "lessons").glob("[0-9][0-9]*_*.py"))
    if not only:
        return paths
    kept = set()
    for wanted in only:
        wanted = Path(wanted).stem
        found = {p for p in paths if wanted in (*lesson_name(p).split("_", 1), lesson_name(p), p.stem)}
        if not found:
            raise SystemExit(f"No lesson is called {wanted!r}. There are: {', '.join(p.stem for p in paths)}.")
        kept |= found
    return [p for p in paths if p in kept]


def lesson_name(path: Path) -> str:
    return path.stem.removesuffix("_exercises")


def read_lesson(path: Path, *, linked: bool = True) -> Lesson:
    """Parse a py:percent lesson, check its format, add its links. Raises LessonError, naming the line."""
    text = path.read_text(encoding="utf-8")
    lesson = Lesson(path, lesson_name(path), path.stem.endswith("_exercises"))
    physical = text.splitlines()
    marks = [i for i, line in enumerate(physical, 1) if re.match(r"# %%(?: |$)", line)]
    notebook = jupytext.reads(text, fmt="py:percent")
    if len(marks) != len(notebook.cells):
        raise lesson.error(
            marks[0] if marks else 1,
            f"{len(marks)} lines start with '# %%' but {len(notebook.cells)} cells were read: "
            "is there more than one blank line or some text before the first cell, or such a line inside a string?",
        )
    for cell, mark in zip(notebook.cells, marks, strict=True):
        metadata = {k: v for k, v in cell.metadata.items() if k != "lines_to_next_cell"}
        tags = metadata.pop("tags", [])
        if metadata:
            raise lesson.error(mark, f"a cell takes tags=[...] and nothing else, not {', '.join(metadata)}")
        if unknown := set(tags) - TAGS:
            raise lesson.error(mark, f"unknown tag {sorted(unknown)[0]!r}; known are {', '.join(sorted(TAGS))}")
        if not cell.source.strip():
            raise lesson.error(mark, "the cell is empty")
        first = mark + 1
        while not physical[first - 1].strip():
            first += 1
        lines: list[Line] = [(first + i, line) for i, line in enumerate(cell.source.split("\n"))]
        lines = from_rules(lesson, lines)
        if "exercise" in tags and lesson.exercises:
            lines = with_bug(lesson, lines, lesson.exercises[-1].bug)
        lesson.cells.append(Cell(cell.cell_type, lines, list(tags), mark))
    if lesson.is_exercises:
        add_cells(lesson)
        check_exercises(lesson)
    else:
        check_lecture(lesson)
    seen: dict[str, int] = {}
    for cell in lesson.cells:  # from the content, so that a new cell does not change the ids of those after it
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = f"{lesson.name.partition('_')[0]}-{digest}" + (f"-{seen[digest]}" if seen[digest] > 1 else "")
    if linked:
        add_links(lesson)
    return lesson


def add_cells(lesson: Lesson) -> None:
    """What the text below a heading does not have to say: a cell for the registered function, where none is to be
    filled; behind the cells to be filled a check of all that they define; and at the end what is solved so far.
    """
    heads = {exercise.line for exercise in lesson.exercises}
    sections: list[list[Cell]] = [[]]
    for cell in lesson.cells:
        sections += [[]] if heads & {number for number, _ in cell.lines} else []
        sections[-1].append(cell)
    for exercise, section in zip(lesson.exercises, sections[1:], strict=True):
        id, line = exercise.id, exercise.line
        checked = next((i for i, cell in enumerate(section) if "check" in cell.tags), len(section))
        if exercise.solves and not any("exercise" in cell.tags for cell in section):
            lines = from_rules(lesson, [(line, f"# RULE {exercise.module}: {exercise.solves}")])
            lines = with_bug(lesson, lines, exercise.bug)
            section.insert(checked, Cell("code", lines, ["exercise"], section[-1].line))
        places = [i for i, cell in enumerate(section) if "exercise" in cell.tags]
        if places and not any("check" in cell.tags for cell in section):
            defined = [name for i in places for name in _defined(lesson, section[i])]
            lines = [(line, f'# hint("{id}")'), (line, f'check("{id}", {", ".join(defined)})')]
            section.insert(places[-1] + 1, Cell("code", lines, ["check"], section[places[-1]].line))
    lesson.cells = [cell for section in sections for cell in section]
    if any(phase.name == lesson.name for phase in PHASES):  # a test's page has no progress
        shown = [(None, f"progress({json.dumps(lesson.number)})")]
        lesson.cells.append(Cell("code", shown, ["nbval-ignore-output"], lesson.cells[-1].line))


def _defined(lesson: Lesson, cell: Cell) -> list[str]:
    """What a filled cell defines, in its order; nothing where it has a mistake, which is told later."""
    try:
        body = _parsed("\n".join(text for _, text in answered(lesson, cell, "solutions"))).body
    except (SyntaxError, LessonError):
        return []
    return [name for node in body if not isinstance(node, (ast.Import, ast.ImportFrom)) for name in bound_by(node)]


def add_links(lesson: Lesson) -> None:
    """Behind the title a line with the page's hours and its other halves, and a last cell that leads on.

    A lecture's list of what is needed leads to the phases that it names.
    """
    here = next((i for i, p in enumerate(PHASES) if p.name == lesson.name), None)
    if here is None:
        return
    after = next(iter(PHASES[here + 1 :]), None)
    lecture, page = (f"../{folder}/{lesson.name}.ipynb" for folder in ("notebooks", "exercises"))
    beside = lesson.path.with_name(f"{lesson.name}_exercises.py")
    own = lesson if lesson.is_exercises else read_lesson(beside, linked=False)
    stretch = sum(e.minutes for e in own.exercises if e.difficulty == "Stretch")
    core = hours(sum(e.minutes for e in own.exercises) - stretch)
    taken = f"{core}, and {hours(stretch)} for the stretch" if stretch else core
    reading = hours(PHASES[here].reading)
    solved = f"[the solutions](../solutions/{lesson.name}.ipynb)"
    following = f"[phase {after.number}, {after.title}](../notebooks/{after.name}.ipynb)" if after else ""
    if lesson.is_exercises:
        top = f"**Time:** {taken}. [The lecture]({lecture}) ({reading}) comes first; {solved} come last."
        end = f"**Next:** {following}." if after else f"Back to [the lecture]({lecture})."
    else:
        top = f"**Time:** {reading} to read and run; [the exercises]({page}) take {taken}."
        end = f"**Next:** [the exercises of this phase]({page})" + (f", then {following}." if after else ".")
        needed = next(c for c in lesson.cells if c.lines[0][1] == "## What you need first")
        names = {str(p.number): p.name for p in PHASES}
        known = re.compile(rf"\bPhase ({'|'.join(names)})\b")
        to_it = lambda mention: f"[{mention[0]}](../notebooks/{names[mention[1]]}.ipynb)"  # noqa: E731
        needed.lines = [(n, known.sub(to_it, line)) for n, line in needed.lines]
    key = lesson.name.partition("_")[0]
    lesson.cells.insert(1, Cell("markdown", [(None, top)], [], lesson.cells[0].line, f"{key}-links"))
    lesson.cells.append(Cell("markdown", [(None, end)], [], lesson.cells[-1].line, f"{key}-next"))


def from_rules(lesson: Lesson, lines: list[Line]) -> list[Line]:
    """A cell with what stands in the package: `## 4.5` gets its title, `# RULE module: function` its code.

    What stands below a RULE line that begins its cell is the starter, and the code its solution.
    """
    begin, below = lines[0][0], trimmed(lines[1:])
    if below and quote_of(lesson, *lines[0], "RULE"):
        head = [(begin, "# BEGIN STARTER"), *below, (begin, "# END STARTER"), (begin, "# BEGIN SOLUTION")]
        return [*head, *from_rules(lesson, lines[:1]), (begin, "# END SOLUTION")]
    out: list[Line] = []
    for number, line in lines:
        if quote := quote_of(lesson, number, line, "RULE"):
            for i, symbol in enumerate(quote.symbols):
                source = symbol_source(lesson, quote, symbol)
                code = source[re.search(r"^(@triton\.jit|def )", source, re.M).start() :]  # type: ignore[union-attr]
                code = re.sub(r"  # fmt: skip$", "", code, flags=re.M)
                out += [(None, "")] * (2 if i else 0) + [(number, text) for text in code.split("\n")]
        elif match := UNTITLED.match(line):
            exercise = registered(lesson, match["id"], number)
            lesson.exercises.append(exercise)
            effort = f"*{exercise.difficulty} · {exercise.minutes} min*"
            out += [(number, f"{line.rstrip()} {exercise.title}"), (None, ""), (None, effort)]
        else:
            out.append((number, line))
    return out


def with_bug(lesson: Lesson, lines: list[Line], bug: Sequence[tuple[str, str]]) -> list[Line]:
    """A hunt's cell: the right code, and as its starter the same with the bug, without comments behind `#:`, `//:`."""
    if not bug:
        return lines
    number, right = lines[0][0], "\n".join(text for _, text in lines)
    wrong = ASIDE.sub("", right)
    for old, new in bug:
        if wrong.count(old) != 1:
            raise lesson.error(number, f"the bug's {old!r} is {wrong.count(old)} times in this cell")
        wrong = wrong.replace(old, new)
    right = re.sub(r"(?<!\S)(#|//): ", r"\1 ", right)
    text = f"# BEGIN STARTER\n{wrong}\n# END STARTER\n# BEGIN SOLUTION\n{right}\n# END SOLUTION"
    return [(number, line) for line in text.split("\n")]


def registered(lesson: Lesson, id: str, line: int | None) -> Exercise:
    """The exercise of that id, read from the call that registers it."""
    path = module_file(lesson.root, f"flashlab.exercises.phase_{lesson.number:0>2}")
    paths = [path, *sorted(path.parent.glob(f"{path.stem}_*.py"))] if path else []
    for path in paths:
        if told := _announced(path.read_text(encoding="utf-8")).get(id):
            return Exercise(id=id, module=f"flashlab.exercises.{path.stem}", line=line, **told)
    sentence = f"flashlab/exercises registers no {id!r} with a title: @exercise, @rule, @tensor_rule, ..."
    raise lesson.error(line, sentence)


@functools.cache
def _announced(text: str) -> dict[str, dict[str, Any]]:
    """Of the calls in a module with a title, what an Exercise has of them, by the first argument: the id."""
    found: dict[str, dict[str, Any]] = {}
    nodes, lines = [*ast.walk(_parsed(text))], text.splitlines()
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    solutions = (f for f in functions if any("BEGIN SOLUTION" in line for line in lines[f.lineno : f.end_lineno]))
    decorated = {id(call): f.name for f in solutions for call in f.decorator_list}
    for call in nodes:
        given = {k.arg: k.value for k in call.keywords} if isinstance(call, ast.Call) and call.args else {}
        if isinstance(given.get("title"), ast.Constant):
            told = {name: ast.literal_eval(given[name]) for name in given.keys() & {"title", "minutes", "difficulty"}}
            if bug := given.get("bug"):
                told["bug"] = ast.literal_eval(bug.args[2] if isinstance(bug, ast.Call) else bug)
            told["solves"] = decorated.get(id(call), "")
            found.setdefault(ast.literal_eval(call.args[0]), told)
    return found


_parsed = functools.cache(ast.parse)  # the same modules for each lesson and exercise; nobody changes a tree


def check_lecture(lesson: Lesson) -> None:
    for cell in lesson.cells:
        if tags := {"exercise", "check"} & set(cell.tags):
            raise lesson.error(cell.line, f"the tag {sorted(tags)[0]!r} belongs in {lesson.name}_exercises.py")
        if cell.type == "code":
            for number, line in cell.lines:
                if MARKER.match(line):
                    raise lesson.error(number, f"{line.strip()!r} belongs in {lesson.name}_exercises.py")
            read_quotes(lesson, cell)  # raises where one is malformed


def check_exercises(lesson: Lesson) -> None:
    """Every heading has its check cell and the reverse, in order; every exercise cell has something to fill."""
    checks: dict[str, int] = {}
    for cell in lesson.cells:
        if cell.type == "markdown":
            continue
        marked = [n for n, line in cell.lines if MARKER.match(line)]
        if marked and "exercise" not in cell.tags:
            raise lesson.error(marked[0], 'a cell with something to fill needs tags=["exercise"]')
        if "exercise" in cell.tags and not marked:
            raise lesson.error(cell.line, "an exercise cell needs BEGIN SOLUTION ... END SOLUTION")
        quotes, _ = read_quotes(lesson, cell)
        if quotes and marked:
            raise lesson.error(quotes[0].line, "a FROM line would give the answer away: fill a cell of its own")
        if marked:
            blocks(lesson, cell)  # raises where the markers are malformed
        calls = check_calls(cell) if "check" in cell.tags else []
        if "check" in cell.tags and len(calls) != 1:
            wanted = f'one call check("{lesson.number}.k", ...)'
            raise lesson.error(cell.line, f"a check cell makes {wanted}, not {len(calls)}")
        for exercise_id in calls:
            if exercise_id in checks:
                first = checks[exercise_id]
                raise lesson.error(cell.line, f"exercise {exercise_id} is checked twice, first on line {first}")
            checks[exercise_id] = cell.line
    for i, exercise in enumerate(lesson.exercises, 1):
        if exercise.id != f"{lesson.number}.{i}":
            wanted = f"{lesson.number}.{i}"
            raise lesson.error(exercise.line, f"exercise {exercise.id} should be {wanted}: ids are unique, in order")
        if exercise.id not in checks:
            raise lesson.error(exercise.line, f'exercise {exercise.id} has no check cell: # %% tags=["check"]')
    if stray := set(checks) - {e.id for e in lesson.exercises}:
        exercise_id = sorted(stray)[0]
        raise lesson.error(checks[exercise_id], f"check({exercise_id!r}, ...) has no heading '## {exercise_id}'")


def check_calls(cell: Cell) -> list[str]:
    """The ids of the check(...) calls in a cell."""
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        return []
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "check"]
    return [c.args[0].value for c in calls if c.args and isinstance(c.args[0], ast.Constant)]


# ---------------------------------------------------------------- blanks and starters


@dataclass
class Block:
    """A part of an exercise cell: "CODE" (shown to everyone), "STARTER" or "SOLUTION".

    blank: of a solution, the lines that stand for it where no starter does.
    """

    kind: str
    line: int | None
    blank: Sequence[str] = ()
    lines: list[Line] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not trimmed(self.lines)


def blocks(lesson: Lesson, cell: Cell) -> list[Block]:
    """The parts of an exercise cell in order."""
    found = [Block("CODE", cell.line)]
    for number, line in cell.lines:
        current = found[-1]
        if not (match := MARKER.match(line)):
            current.lines.append((number, line))
        elif match["edge"] == "BEGIN":
            if current.kind != "CODE":
                where = f"the {current.kind} that begins on line {current.line}"
                raise lesson.error(number, f"BEGIN {match['name']} inside {where}")
            blank = [f"{match['indent']}{match['word']} YOUR CODE HERE{match['said'] or ''}"]
            blank += [f"{match['indent']}raise NotImplementedError"] if match["word"] == "#" else []
            found.append(Block(match["name"], number, blank))
        else:
            if current.kind != match["name"]:
                raise lesson.error(number, f"END {match['name']} without BEGIN {match['name']} before it")
            if current.is_empty:
                raise lesson.error(current.line, f"the {current.kind} is empty")
            found.append(Block("CODE", number))
    if found[-1].kind != "CODE":
        raise lesson.error(found[-1].line, f"BEGIN {found[-1].kind} has no END {found[-1].kind}")
    found = [b for b in found if b.kind != "CODE" or not b.is_empty]
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.kind == "STARTER":
            if after is None or after.kind != "SOLUTION":
                raise lesson.error(block.line, "a STARTER is followed at once by its SOLUTION")
            after.blank = ()
    return found


def answered(lesson: Lesson, cell: Cell, kind: str) -> list[Line]:
    """The lines of an exercise cell in the "solutions", or in the "exercises", as the learner gets them."""
    out: list[Line] = []
    for block in blocks(lesson, cell):
        if block.kind == "SOLUTION" and kind == "exercises":
            out += [(None, text) for text in block.blank]
        elif block.kind != "STARTER" or kind == "exercises":
            out += block.lines
    return trimmed(out)


def trimmed(lines: list[Line]) -> list[Line]:
    """Without the blank lines at both ends."""
    full = [i for i, (_, text) in enumerate(lines) if text.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


# ---------------------------------------------------------------- code of the package in a cell


@dataclass(frozen=True)
class Quote:
    """`# FROM module: symbol, symbol` or `# RULE ...`: what of the package a cell is filled with.

    line: of the lesson. bare: without docstrings.
    """

    line: int | None
    word: str
    module: str
    symbols: Sequence[str]
    bare: bool

    @property
    def name(self) -> str:
        return f"{self.word} {self.module}: {', '.join(self.symbols)}"


def quote_of(lesson: Lesson, number: int | None, line: str, word: str) -> Quote | None:
    """What a line "# FROM ..." or "# RULE ..." quotes; None where it is no such line."""
    if not re.match(rf"# {word}\b", line):
        return None
    if not (match := QUOTE.match(line)):
        raise lesson.error(number, f"{line!r} should read '# {word} flashlab.module: symbol, symbol'")
    return Quote(number, word, match["module"], re.split(r" *, *", match["symbols"]), bool(match["bare"]))


def read_quotes(lesson: Lesson, cell: Cell) -> tuple[list[Quote], list[Line]]:
    """The FROM lines at the head of a code cell, and the lines below them."""
    quotes: list[Quote] = []
    for i, (number, line) in enumerate(cell.lines if cell.type == "code" else []):
        if quote := quote_of(lesson, number, line, "FROM"):
            if i != len(quotes):
                raise lesson.error(number, "FROM lines come first in their cell")
            quotes.append(quote)
    return quotes, cell.lines[len(quotes) :]


def quoted(lesson: Lesson, quotes: list[Quote], headed: bool = False) -> list[Line]:
    """The lines that quotes stand for; `headed` says above each where it is from."""
    out: list[Line] = []
    for quote in quotes:
        if headed:
            file = module_file(lesson.root, quote.module)
            out += [(quote.line, "")] * (2 if out else 0)
            out.append((quote.line, f"# from {file.relative_to(lesson.root).as_posix() if file else quote.module}"))
        for i, symbol in enumerate(quote.symbols):
            out += [(quote.line, "")] * (2 if (i or not headed) and out else 0)
            out += [(quote.line, text) for text in symbol_source(lesson, quote, symbol).split("\n")]
    return out


def symbol_source(lesson: Lesson, quote: Quote, symbol: str) -> str:
    """The source text of a module-level function, class or constant, decorators included."""
    path = module_file(lesson.root, quote.module)
    if path is None:
        raise lesson.error(quote.line, f"{quote.name}: there is no module {quote.module} in src/")
    text = path.read_text(encoding="utf-8")
    for node in _parsed(text).body:
        if symbol in bound_by(node) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(d.lineno for d in decorators)])
            lines = text.splitlines()
            dropped = docstring_lines(node, lines) if quote.bare else set()
            last = node.end_lineno or first
            last += any(re.match(r"\s+# END SOLUTION", text) for text in lines[last : last + 1])  # of a rule
            kept = [n for n in range(first, last + 1) if n not in dropped]
            return "\n".join(lines[n - 1] for n in kept if not REGION.match(lines[n - 1]))
    raise lesson.error(quote.line, f"{quote.name}: {quote.module} defines no {symbol} at module level")


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement at module level defines, assigns or imports."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}


def docstring_lines(node: ast.stmt, lines: list[str]) -> set[int]:
    """The lines of the docstrings in a definition, and the blank ones under them; not where nothing else is there."""
    found: set[int] = set()
    for inner in ast.walk(node):
        if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or len(inner.body) < 2:
            continue
        if ast.get_docstring(inner) is not None and inner.body[0].lineno > inner.lineno:
            last = inner.body[0].end_lineno or inner.body[0].lineno
            while not lines[last].strip():
                last += 1
            found |= set(range(inner.body[0].lineno, last + 1))
    return found


def check_names(lesson: Lesson, quotes: list[Quote], known: set[str]) -> None:
    """Raises LessonError, if the package's code in a cell needs a name that neither this cell nor an earlier one has.

    `known`: the names that they have.
    """
    source = "\n".join(text for _, text in quoted(lesson, quotes))
    if missing := sorted(free_names(source) - known):
        names = f"the name{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        sentence = f"the code for this cell needs {names}, which no cell before it defines or imports"
        raise lesson.error(quotes[0].line, sentence)


def free_names(source: str) -> set[str]:
    """The global names that a cell's code uses, anywhere in it, and does not bind itself."""
    used = names_read(source)
    return used - defined_names(source) - set(dir(builtins)) - {"__name__", "__file__"}


def defined_names(source: str) -> set[str]:
    """The names that a cell's code leaves behind."""
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def module_file(root: Path, module: str) -> Path | None:
    base = root / "src" / Path(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


# ---------------------------------------------------------------- from lesson to notebook


def make_notebook(lesson: Lesson, kind: str) -> tuple[nbformat.NotebookNode, list[list[int | None]]]:
    """The notebook of that kind ("notebooks", "exercises", "solutions"), without outputs.

    Also returns, for each cell, the line numbers in the lesson of the cell's lines.
    """
    notebook = nbformat.v4.new_notebook()
    notebook.nbformat_minor = 5
    notebook.metadata = nbformat.from_dict(
        {
            "flashlab": {"lesson": f"src/lessons/{lesson.path.name}"},
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    numbers = []
    known = {"display", "get_ipython"}  # IPython's own
    for cell in lesson.cells:
        tags = list(cell.tags)
        quotes, lines = read_quotes(lesson, cell)
        if "exercise" in tags:
            lines = answered(lesson, cell, kind)
        elif quotes:  # the code that they name, and what stands below them
            below = trimmed(lines)
            lines = quoted(lesson, quotes, headed=True) + [(quotes[-1].line, "")] * (2 if below else 0) + below
        if kind == "exercises" and "check" in tags:
            tags.append("raises-exception")  # so that "Run All" goes on past an unsolved exercise
        source = "\n".join(text for _, text in lines)
        metadata = {"tags": tags} if tags else {}
        new_cell = nbformat.v4.new_code_cell if cell.type == "code" else nbformat.v4.new_markdown_cell
        notebook.cells.append(new_cell(source, id=cell.id, metadata=metadata))
        if cell.type == "code":
            try:
                known |= defined_names(source)
            except SyntaxError as error:
                raise lesson.error(lines[(error.lineno or 1) - 1][0], f"SyntaxError: {error.msg}") from None
            if quotes:
                check_names(lesson, quotes, known)
        numbers.append([n for n, _ in lines])
    if kind == "exercises":
        notebook.metadata["flashlab"]["as_written"] = content_digest(notebook)
    return notebook, numbers


def content_digest(notebook: nbformat.NotebookNode) -> str:
    """What a learner can edit, without what JupyterLab changes on its own: outputs, counts, an empty last cell."""
    cells = [(c.cell_type, c.source.strip()) for c in notebook.cells if c.source.strip()]
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:16]


def inputs(notebook: nbformat.NotebookNode) -> list[tuple]:
    """What of a notebook comes from its lesson."""
    return [(c.cell_type, c.id, c.source, list(c.metadata.get("tags", []))) for c in notebook.cells]
