"""What can go wrong between a CUDA source and its results."""

from __future__ import annotations


class SimtError(Exception):
    """Base of the emulator's errors. ``report`` holds what was found and counted until then, or is None."""

    def __init__(self, message: str, report=None):
        super().__init__(message)
        self.report = report


class CompileError(SimtError):
    """The host compiler refused the source. The message is its own, with the learner's line numbers."""


class LaunchError(SimtError):
    """The launch was refused (its configuration), or the entry returned an error code."""


class IllegalAccess(SimtError):
    """A thread touched memory that is not its own: out of bounds, misaligned, through a wild pointer."""


class DeadlockError(SimtError):
    """All threads of a block wait for each other, or a collective was called by the wrong lanes."""


class KernelTimeout(SimtError):
    """The launch took longer than allowed: most likely a loop that does not end."""


class HostError(SimtError):
    """The host part of the source ended its process: a bad pointer, ``exit()``, an exception, a failed assertion."""


class KernelTrap(SimtError):
    """A thread stopped itself: ``assert``, ``__trap()``, a division by zero."""


class KernelFindings(SimtError):
    """Raised by :meth:`Report.raise_if_findings`: the kernel ran to its end, and did something wrong."""
