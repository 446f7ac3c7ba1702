"""Running a learner's code: an exception of theirs says on which input it happened."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch

from flashlab.check.failed import CheckFailed

_current_case: ContextVar[str | None] = ContextVar("flashlab_case", default=None)
_last_case: ContextVar[str | None] = ContextVar("flashlab_last_case", default=None)


class Blank(NotImplementedError):
    """A blank in a text, and where it is."""


class Warnings(list[str]):
    """Sentences, and who can be asked for more of them: that takes a compiler another second."""

    def __init__(self) -> None:
        super().__init__()
        self.askable: dict[str, Callable[[bool], Sequence[str]]] = {}

    def ask(self, passed: bool) -> None:
        """Add what is said of an answer that has passed, or of one whose values are wrong."""
        for asked in self.askable.values():
            self.extend(sentence for sentence in asked(passed) if sentence not in self)


_compiler_warnings: ContextVar[Warnings | None] = ContextVar("flashlab_compiler_warnings", default=None)


@contextlib.contextmanager
def heeding_warnings() -> Iterator[Warnings]:
    """Collect what compilers warn about in a learner's own lines."""
    warnings = Warnings()
    token = _compiler_warnings.set(warnings)
    try:
        yield warnings
    finally:
        _compiler_warnings.reset(token)


def compiler_warned(sentence: str) -> None:
    """Note a compiler's warning, once, if somebody heeds it."""
    warnings = _compiler_warnings.get()
    if warnings is not None and sentence not in warnings:
        warnings.append(sentence)


def compiler_can_be_asked(about: str, ask: Callable[[bool], Sequence[str]]) -> None:
    """Offer more warnings about a text, once: `ask(passed)` gives them."""
    warnings = _compiler_warnings.get()
    if warnings is not None:
        warnings.askable.setdefault(about, ask)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For small cases: more threads of torch only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ran_on(case: str | None) -> None:
    """Say what a learner's code is run on, where no case is named at the moment; None forgets the last one."""
    if case is None or _current_case.get() is None:
        _last_case.set(case)


def last_case() -> str | None:
    """What a learner's code was last run on."""
    return _last_case.get()


@contextlib.contextmanager
def running(case: str | None) -> Iterator[None]:
    """Name the case that is being run, so that an exception raised inside carries a note that says so."""
    token = _current_case.set(case)
    if case is not None:
        _last_case.set(case)
    try:
        yield
    except CheckFailed:
        raise
    except Exception as error:
        if case is not None and not is_unsolved(error):
            _add_note(error, f"This happened in your code, while it was run on: {case}")
        raise
    finally:
        _current_case.reset(token)


def _add_note(error: BaseException, note: str) -> None:
    if note in getattr(error, "__notes__", ()):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10 shows no notes
        print(note, file=sys.stderr)


def is_unsolved(error: BaseException | None) -> bool:
    """Whether a blank was reached: NotImplementedError, perhaps wrapped by Triton's interpreter, not torch's own."""
    for _ in range(8):
        if error is None:
            return False
        if isinstance(error, NotImplementedError):
            return "aten::" not in str(error) and "Could not run" not in str(error)
        error = error.__cause__ or error.__context__
    return False
