"""What a learner calls in an exercise notebook: `check`, `hint` and `progress`."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashlab.check.failed import CheckFailed
from flashlab.check.running import Blank, Warnings, heeding_warnings, is_unsolved, last_case, ran_on, running
from flashlab.check.symptoms import Symptoms, watching
from flashlab.course import PHASES
from flashlab.exercises import record, registry
from flashlab.exercises.answers import Called, expect_kinds, fingerprint, told
from flashlab.table import Table

_NUMBERS = "no one two three four five six seven eight nine".split()

_LONG = 30.0  # seconds after which a check that still runs says how to stop it

_WARNINGS = 3  # of a compiler that are told

_shown_hints: dict[str, int] = {}


# ---- check ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """What `check` returns: its repr is the same on every machine; `report` is what the check returned.

    The repr is one line, and for a bug hunt a second one with the bug's history.
    """

    id: str
    title: str
    report: Any = field(repr=False, default=None)
    history: str = field(repr=False, default="")
    warnings: tuple[str, ...] = field(repr=False, default=())

    def __repr__(self) -> str:
        what = getattr(self.report, "verdict", self.report)
        line = f"✓ {self.id} {self.title}" + (f" — {what}" if isinstance(what, str) and what else "")
        lines = [line, *(f"  The compiler warns: {said}." for said in self.warnings)]
        return "\n".join([*lines, f"  The bug's history: {self.history}."] if self.history else lines)


def check(id: str, *answers: Any) -> Passed:
    """Check the learner's `answers` to exercise `id`: `check("2.3", my_function)`.

    Returns a `Passed`. Raises `CheckFailed` when the answer is wrong (`.diagnosis` is a slug, "not-solved-yet" for a
    blank that still raises NotImplementedError). So is an exception of the learner's own code, with their line and the
    input (`__cause__` is the exception itself), and whatever a strange answer makes of the check. A bug hunt whose code
    is as it was given shows symptoms only. A KeyboardInterrupt passes through.
    """
    __tracebackhide__ = True
    exercise = _find(id)
    _check_count(exercise, answers)
    expect_kinds(exercise.id, exercise.run, answers)
    with _saying_how_to_stop(exercise):  # also as the answer is run again, on cases that it had not come to
        return _checked(exercise, answers)


def _checked(exercise: registry.Exercise, answers: tuple[Any, ...]) -> Passed:
    __tracebackhide__ = True
    if exercise.untouched and fingerprint(*answers) == exercise.untouched:
        raise _symptoms(exercise, answers)
    called = Called()
    ran_on(None)
    warnings = Warnings()
    try:
        with running(None), heeding_warnings() as warnings:
            report = exercise.run(*_wrapped(exercise, answers, called))
    except CheckFailed as failed:
        if failed.diagnosis == "not-solved-yet":
            raise failed.with_traceback(None) from None
        record.failed_try(exercise.id)
        case = failed.case or (last_case() if called.call else None)
        also = _contrast(exercise, answers, failed.case, failed.what) if failed.unexplained else ""
        if failed.diagnosis == "wrong-value":
            warnings.ask(passed=False)
        said = failed.sentence + also
        if warnings:
            said += f"{'' if said.endswith('?') else '.'} The compiler warns: {'; '.join(warnings[:_WARNINGS])}"
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=case).with_traceback(None) from failed.__cause__
    except (Exception, SystemExit) as error:
        if is_unsolved(error):
            raise _not_solved(exercise, f": {error}" if isinstance(error, Blank) else "") from None
        record.failed_try(exercise.id)
        raise told(error, exercise.run, called, last_case()) from error
    warnings.ask(passed=True)
    record.solved(exercise.id)
    return Passed(exercise.id, exercise.title, report, exercise.history, tuple(warnings[:_WARNINGS]))


@contextlib.contextmanager
def _saying_how_to_stop(exercise: registry.Exercise) -> Iterator[None]:
    """One line on stderr where it takes long: a loop without an end looks like a check that is at work."""
    sentence = f"{exercise.id}: {_LONG:.0f} s so far. If your code loops without an end, interrupt it: ■ in the "
    sentence += "notebook, Ctrl-C in a terminal"
    timer = threading.Timer(_LONG, print, [sentence], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _wrapped(exercise: registry.Exercise, answers: tuple[Any, ...], called: Called) -> list[Any]:
    names = inspect.signature(exercise.run).parameters
    return [called.wrap(answer, name) for name, answer in zip(names, answers, strict=False)]  # some may be left out


def _on_all_cases(exercise: registry.Exercise, answers: tuple[Any, ...]) -> tuple[Symptoms, bool]:
    """What its comparisons see when none of them ends the check, and whether it came to its end."""
    whole = False
    with watching() as seen, running(None), contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(Exception, SystemExit):  # what else is wrong is told once this is right
            exercise.run(*answers)
            whole = True
    return seen, whole


def _contrast(exercise: registry.Exercise, answers: tuple[Any, ...], case: str | None, what: str = "") -> str:
    """What all cases have in common, or which others are right and which are wrong: the answer is run on all."""
    if any(isinstance(answer, str) for answer in answers):
        return ""  # a source: its builds and runs take too long to be made twice
    seen, whole = _on_all_cases(exercise, answers)
    if common := seen.everywhere(what):
        name = common.split(" ")[0]  # l is not L
        return f". {common if name == what else common[0].upper() + common[1:]}"
    others = [name for name in seen.wrong if name != case]
    if not seen.right or case not in seen.wrong:
        return ""
    parts = {name: name.split(", ") for name in (*seen.wrong, *seen.right)}
    for word, cases, one in (("Wrong", seen.wrong, case), ("Right", seen.right, next(iter(seen.right)))):
        shared = [part for part in parts[one] if all((part in parts[name]) == (name in cases) for name in parts)]
        if shared and others and len(seen.right) > 1:
            return f". {word} are just the cases with {', '.join(shared)}: {len(cases)} of {len(parts)}"
    said = f". Right: {_some(list(seen.right))}"
    if others:
        return f"{said}. Wrong too: {_some(others)}"
    return f"{said}. No other case is wrong" if whole else said


def _some(cases: list[str]) -> str:
    return cases[0] + (f"; and {len(cases) - 1} more" if cases[1:] else "")


def _symptoms(exercise: registry.Exercise, answers: tuple[Any, ...]) -> CheckFailed:
    """What can be seen of a bug hunt's own code. Its cause would spoil the hunt."""
    where = None
    with watching() as seen, running(None):
        try:
            exercise.run(*answers)
        except Exception as error:  # told only once the learner has changed something
            where = getattr(error, "case", None)
    lines = seen.lines() or [f"it fails its check{f' on {where}' if where else ''}"]
    head = f"{exercise.id} {exercise.title}: this is the code as it was given, so here are its symptoms, without a "
    head += "cause."
    last = "Change something and run the check again: then it says what it thinks of your change."
    return CheckFailed("\n".join([head, *lines, last]), diagnosis="symptoms")


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


def _not_solved(exercise: registry.Exercise, where: str = "") -> CheckFailed:
    return CheckFailed(f"{exercise.id} {exercise.title}: not solved yet{where}", diagnosis="not-solved-yet")


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
    if level is not None and (type(level) is not int or not 1 <= level <= count):
        sentence = f"exercise {exercise.id} has hints 1 to {count}, and level is one of these numbers, not {level!r}"
        raise CheckFailed(sentence, diagnosis="wrong-arguments")
    wanted = level or min(_shown_hints.get(exercise.id, 0) + 1, count)
    _shown_hints[exercise.id] = max(wanted, _shown_hints.get(exercise.id, 0))
    record.saw_hints(exercise.id, wanted)
    return Hint(exercise.id, exercise.title, exercise.hints[wanted - 1], wanted, count)


# ---- progress -------------------------------------------------------------------------------------------------------


def progress(phase: int | str | None = None) -> Table:
    """A table of the phases, each with a row that sums it up, and below it the exercises of the phases begun.

    Of an exercise: solved and when, tries, hints used, the minutes it may take. Of a phase: how many are solved. A
    phase that is asked for by its number is listed in full.
    """
    titles = {p.number: p.title for p in PHASES}
    phases = list(dict.fromkeys(e.phase for e in registry.exercises().values()))
    if phase is not None and (type(phase) not in (int, str) or phase not in phases):
        sentence = f"phase is one of the numbers {', '.join(map(str, phases))}, or left out, not {phase!r}"
        raise CheckFailed(sentence, diagnosis="wrong-arguments")
    if record.path() is None:
        return Table((), (), "Progress is not recorded here.")
    entries = record.load()
    rows: list[tuple[str, ...]] = []
    heads: list[int] = []
    done = of = minutes_left = 0
    chosen = [e for e in registry.exercises().values() if phase is None or e.phase == phase]
    for number in dict.fromkeys(exercise.phase for exercise in chosen):
        mine = [exercise for exercise in chosen if exercise.phase == number]
        solved = [exercise for exercise in mine if entries.get(exercise.id, record.Entry()).solved]
        minutes = sum(exercise.minutes for exercise in mine)
        heads.append(len(rows))
        rows.append(
            (f"Phase {number}", titles.get(number, ""), "", str(minutes), f"{len(solved)} of {len(mine)}", "", "")
        )
        if phase is not None or any(exercise.id in entries for exercise in mine):
            rows += [_exercise_row(exercise, entries.get(exercise.id, record.Entry())) for exercise in mine]
        done, of = done + len(solved), of + len(mine)
        minutes_left += minutes - sum(exercise.minutes for exercise in solved)
    summary = f"{done} of {of} solved" + (f", {_time(minutes_left)} left." if minutes_left else ".")
    if phase is None and len(heads) == len(rows) > 0:
        summary += " You have not begun yet."
    if following := next_exercise(phase, entries):
        summary += f" Next: {_announced(following)}"
    columns = ("Exercise", "Title", "Difficulty", "Minutes", "Solved", "Tries", "Hints")
    used = [i for i, name in enumerate(columns) if name in ("Exercise", "Title", "Solved") or any(r[i] for r in rows)]
    kept = tuple(tuple(row[i] for i in used) for row in rows)
    align = "".join("lllrlrl"[i] for i in used)
    return Table(tuple(columns[i] for i in used), kept, summary, align=align, heads=frozenset(heads))


def next_exercise(
    phase: int | str | None = None, entries: Mapping[str, record.Entry] | None = None
) -> registry.Exercise | None:
    """The first exercise that is not solved, in course order, from the phase on in which something was solved last.

    The stretch exercises of a phase come after its others, and optional phases only when asked for. None: all solved.
    """
    entries = record.load() if entries is None else entries
    solved = {id: entry.solved for id, entry in entries.items() if entry.solved}
    course = [e for e in registry.exercises().values() if e.phase == phase or (phase is None and type(e.phase) is int)]
    course.sort(key=lambda e: (e.order[:2], e.difficulty == "Stretch", e.order))
    done = [e for e in course if e.id in solved]
    begin = max(done, key=lambda e: (str(solved[e.id]), e.order)).order[0] if done else 0
    left = [e for e in course if e.id not in solved]
    return next((e for e in left if e.order[0] >= begin), left[0] if left else None)


def _announced(exercise: registry.Exercise) -> str:
    """An exercise with its page and its minutes, in a sentence."""
    (page,) = (p.name for p in PHASES if p.number == exercise.phase) if exercise.order < (90,) else ("",)
    where = f" exercises/{page}.ipynb," if page else ""
    return f"{exercise.id} {exercise.title},{where} about {exercise.minutes} min."


def following() -> str:
    """What `flashlab next` says: the next exercise, its page, its minutes."""
    exercise = next_exercise()
    return "Every exercise is solved." if exercise is None else f"Next: {_announced(exercise)}"


def _time(minutes: int) -> str:
    return f"about {minutes} minutes" if minutes < 120 else f"about {round(minutes / 60)} hours"


def _exercise_row(exercise: registry.Exercise, entry: record.Entry) -> tuple[str, ...]:
    mark = "✓" if entry.solved else ("…" if entry.tries else "")
    hints = f"{entry.hints} of {len(exercise.hints)}" if entry.hints else ""
    row = (f"{exercise.id} {mark}".rstrip(), exercise.title, exercise.difficulty, str(exercise.minutes))
    return (*row, (entry.solved or "")[:10], str(entry.tries or ""), hints)
