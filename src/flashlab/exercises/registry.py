"""The exercises' registry: what each is called, how long it takes, its hints, and the function that checks it.

A phase registers its exercises in `phase_NN.py` beside this file:

    @exercise("2.3", title="Rescale the accumulator", minutes=10, difficulty="Core", hints=["...", "..."])
    def _(fn):
        expect_close(fn(...), want, what="O")

The function raises `flashlab.check.CheckFailed` when the answer is wrong, and may return a sentence or a report that
says what was checked. Modules are imported only when an exercise is asked for: they may import any part of the package.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlab.course import number_of

DIFFICULTIES = ("Warm-up", "Core", "Stretch", "Bug hunt")

_registry: dict[str, Exercise] = {}
_imported: set[str] = set()  # phase modules that were run to their end


@dataclass(frozen=True)
class Exercise:
    """One exercise: `id` is "phase.number", `minutes` an estimate, `hints` go from a nudge to nearly the answer.

    bug: of a hunt, the edits (right, wrong) of the page's code that make what it begins with; a rule has a `Row` of
    them. untouched: the `answers.fingerprint` of that; history: where the bug has been seen, told to those who have
    mended it.
    """

    id: str
    title: str
    minutes: int
    difficulty: str
    hints: tuple[str, ...]
    run: Callable[..., Any] = field(repr=False, compare=False)
    bug: Sequence[tuple[str, str]] = ()
    untouched: str = ""
    history: str = ""

    @property
    def phase(self) -> int | str:
        """The phase's number; of "11b.1" it is "11b"."""
        return number_of(self.id.split(".")[0])

    @property
    def order(self) -> tuple[int, str, int]:
        phase, number = self.id.split(".")
        return int(phase.rstrip("bc")), phase, int(number)


def exercise(
    id: str,
    *,
    title: str,
    minutes: int,
    difficulty: str = "Core",
    hints: Sequence[str] = (),
    bug: Sequence[tuple[str, str]] = (),
    untouched: str = "",
    history: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the check of exercise `id`; ValueError when the id is malformed or taken.

    The annotation of a parameter says what is handed in: `str` is CUDA text, `Any` a Triton kernel, anything else a
    function; `Callable[..., float]` also says, in a sentence for the learner, what it should return.
    """
    if not re.fullmatch(r"\d+[a-z]?\.\d+", id):
        raise ValueError(f'an exercise id is "phase.number", for instance "2.3", not {id!r}')
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty is one of {', '.join(DIFFICULTIES)}, not {difficulty!r}")
    if isinstance(hints, str):
        raise ValueError(f"exercise {id}: hints is a list of sentences, not one string")
    if (difficulty == "Bug hunt") != bool(untouched and history):
        raise ValueError(f"exercise {id}: a bug hunt, and nothing else, has the fingerprint of its code and a history")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        before = _registry.get(id)
        if before is not None and not _replaces(run, before.run):
            raise ValueError(f"exercise {id} is registered twice: {before.title!r} and {title!r}")
        _registry[id] = Exercise(id, title, minutes, difficulty, tuple(hints), run, bug, untouched, history)
        return run

    return register


def _replaces(new: Callable[..., Any], old: Callable[..., Any]) -> bool:
    """True when `new` comes from a second run of `old`'s module (autoreload, or a retry of an import that failed)."""
    if new.__module__ != old.__module__:
        return False
    new, old = inspect.unwrap(new), inspect.unwrap(old)  # a rule is run by a function of another module
    return new.__globals__ is not old.__globals__ or new.__module__ in _imported


def find(id: str) -> Exercise | None:
    """The exercise `id`, or None. Only the module of its phase is imported."""
    if id not in _registry and (match := re.fullmatch(r"(\d+[a-z]?)\.\d+", id)):
        name = f"phase_{number_of(match[1]):0>2}"
        if name in _modules():
            _import(name)
    return _registry.get(id)


def exercises() -> dict[str, Exercise]:
    """Every registered exercise by id, in course order."""
    for name in _modules():
        _import(name)
    return dict(sorted(_registry.items(), key=lambda item: item[1].order))


def _modules() -> list[str]:
    names = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return [name for name in names if re.fullmatch(r"phase_\d\d[a-z]?", name)]


def _import(name: str) -> None:
    module = importlib.import_module(f"{__package__}.{name}")
    _imported.add(module.__name__)
