"""What a learner calls in an exercise notebook: `check`, `hint` and `progress`."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from flashlab.check.failed import CheckFailed
from flashlab.check.running import is_unsolved, running
from flashlab.course import PHASES
from flashlab.exercises import record, registry
from flashlab.table import Table

_NUMBERS = "no one two three four five six seven eight nine".split()

_shown_hints: dict[str, int] = {}


# ---- check ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """What `check` returns: its repr is one line, the same on every machine; `report` is what the check returned."""

    id: str
    title: str
    report: Any = field(repr=False, default=None)

    def __repr__(self) -> str:
        what = getattr(self.report, "verdict", self.report)
        return f"✓ {self.id} {self.title}" + (f" — {what}" if isinstance(what, str) and what else "")


def check(id: str, *answers: Any) -> Passed:
    """Check the learner's `answers` to exercise `id`: `check("2.3", my_function)`.

    Returns a `Passed`. Raises `CheckFailed` when the answer is wrong (`.diagnosis` is a slug, "not-solved-yet" for a
    blank that still raises NotImplementedError). An exception of the learner's own code is raised as theirs, with
    their traceback and a note that says which input was being run. A KeyboardInterrupt passes through.
    """
    __tracebackhide__ = True
    exercise = _find(id)
    _check_count(exercise, answers)
    try:
        with running(None):
            report = exercise.run(*answers)
    except CheckFailed as failed:
        if failed.diagnosis != "not-solved-yet":
            record.failed_try(id)
        raise failed.with_traceback(None) from None
    except Exception as error:
        if is_unsolved(error):
            raise _not_solved(exercise) from None
        record.failed_try(id)
        raise error.with_traceback(_without_checker(error.__traceback__))  # noqa: B904 (it is the learner's error)
    record.solved(id)
    return Passed(exercise.id, exercise.title, report)


def _find(id: str) -> registry.Exercise:
    __tracebackhide__ = True
    if not isinstance(id, str):
        sentence = f'write the exercise as text, in quotes: check("2.3", ...), not {id!r}'
        raise CheckFailed(sentence, diagnosis="unknown-exercise")
    exercise = registry.find(id.strip())
    if exercise is not None:
        return exercise
    known = list(registry.exercises())
    close = difflib.get_close_matches(id, known, n=3, cutoff=0.5)
    close = close or [other for other in known if other.split(".")[0] == id.split(".")[0]]
    ask = f"; did you mean {' or '.join(close)}?" if close else "; `progress()` lists them all"
    raise CheckFailed(f"there is no exercise {id!r}{ask}", diagnosis="unknown-exercise")


def _check_count(exercise: registry.Exercise, answers: tuple[Any, ...]) -> None:
    __tracebackhide__ = True
    signature = inspect.signature(exercise.run)
    try:
        signature.bind(*answers)
    except TypeError:
        wanted = ", ".join(signature.parameters)
        raise CheckFailed(
            f'this check is called as check("{exercise.id}", {wanted}); it was given {len(answers)} '
            f"answer{'s' if len(answers) != 1 else ''}",
            diagnosis="wrong-arguments",
        ) from None
    if any(answer is None for answer in answers):
        raise _not_solved(exercise)


def _not_solved(exercise: registry.Exercise) -> CheckFailed:
    return CheckFailed(f"{exercise.id} {exercise.title}: not solved yet", diagnosis="not-solved-yet")


def _without_checker(traceback: TracebackType | None) -> TracebackType | None:
    """The same traceback without the checker's own frames, so that it begins in the learner's code."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    ours = ("flashlab.check", "flashlab.exercises")
    theirs = [f for f in frames if not f.tb_frame.f_globals.get("__name__", "").startswith(ours)]
    clean = None
    for f in reversed([f for f in theirs if f.tb_frame.f_code.co_filename != contextlib.__file__] or frames):
        clean = TracebackType(clean, f.tb_frame, f.tb_lasti, f.tb_lineno)
    return clean


# ---- hint -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hint:
    """One hint of an exercise, rendered as Markdown in a notebook."""

    id: str
    title: str
    text: str
    level: int
    of: int

    def _rest(self) -> str:
        left = self.of - self.level
        if left <= 0:
            return "That was the last hint."
        count = _NUMBERS[left] if left < len(_NUMBERS) else str(left)
        return f'{count.capitalize()} more: call hint("{self.id}") again.'

    def __repr__(self) -> str:
        if not self.of:
            return self.text
        return f"Hint {self.level} of {self.of} · {self.id} {self.title}\n{self.text}\n{self._rest()}"

    def _repr_markdown_(self) -> str:
        if not self.of:
            return self.text
        return f"**Hint {self.level} of {self.of} · {self.id} {self.title}**\n\n{self.text}\n\n*{self._rest()}*"


def hint(id: str, *, level: int | None = None) -> Hint:
    """The next hint of exercise `id`, from a nudge to nearly the answer; `level=1` shows one again."""
    __tracebackhide__ = True
    exercise = _find(id)
    count = len(exercise.hints)
    if count == 0:
        return Hint(exercise.id, exercise.title, "This exercise has no hints.", 0, 0)
    if level is not None and not 1 <= level <= count:
        raise CheckFailed(f"exercise {id} has hints 1 to {count}, not {level}", diagnosis="wrong-arguments")
    wanted = level or min(_shown_hints.get(id, 0) + 1, count)
    _shown_hints[id] = max(wanted, _shown_hints.get(id, 0))
    record.saw_hints(id, wanted)
    return Hint(exercise.id, exercise.title, exercise.hints[wanted - 1], wanted, count)


# ---- progress -------------------------------------------------------------------------------------------------------


def progress(phase: int | None = None) -> Table:
    """A table of every exercise (or of one phase's), phase by phase, each phase with a row that sums it up.

    Of an exercise: solved and when, tries, hints used, the minutes it may take. Of a phase: how many are solved.
    """
    file = record.path()
    if file is None:
        return Table((), (), "Progress is not recorded here.")
    entries = record.load()
    titles = {p.number: p.title for p in PHASES}
    rows: list[tuple[str, ...]] = []
    done = of = minutes_left = 0
    chosen = [e for e in registry.exercises().values() if phase is None or e.phase == phase]
    for number in sorted({exercise.phase for exercise in chosen}):
        mine = [exercise for exercise in chosen if exercise.phase == number]
        solved = [exercise for exercise in mine if entries.get(exercise.id, record.Entry()).solved]
        minutes = sum(exercise.minutes for exercise in mine)
        rows.append(
            (f"Phase {number}", titles.get(number, ""), "", str(minutes), f"{len(solved)} of {len(mine)}", "", "")
        )
        rows += [_exercise_row(exercise, entries.get(exercise.id, record.Entry())) for exercise in mine]
        done, of = done + len(solved), of + len(mine)
        minutes_left += minutes - sum(exercise.minutes for exercise in solved)
    summary = f"{done} of {of} solved"
    summary += f", about {minutes_left} minutes left." if minutes_left else "."
    columns = ("Exercise", "Title", "Difficulty", "Minutes", "Solved", "Tries", "Hints")
    return Table(columns, tuple(rows), summary, align="lllrlrl")


def _exercise_row(exercise: registry.Exercise, entry: record.Entry) -> tuple[str, ...]:
    mark = "✓" if entry.solved else ("…" if entry.tries else "")
    hints = f"{entry.hints} of {len(exercise.hints)}" if entry.hints else ""
    row = (f"{exercise.id} {mark}".rstrip(), exercise.title, exercise.difficulty, str(exercise.minutes))
    return (*row, (entry.solved or "")[:10], str(entry.tries or ""), hints)
