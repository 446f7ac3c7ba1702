"""What can go wrong between a CUDA source and its results."""


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


_KINDS = {
    LaunchError: "launch-configuration",
    DeadlockError: (
        "deadlock divergent lanes-missing mask-without-self barrier-arguments barrier-threads wgmma-block "
        "wgmma-form wgmma-warps registers-missing mbarrier-arrivals mbarrier-in-use mbarrier-bytes "
        "mbarrier-number cluster-barrier"
    ),
    IllegalAccess: (
        "cluster-begin cluster-end cluster-rank global-out-of-bounds shared-out-of-bounds misaligned not-shared "
        "bulk-misaligned bulk-size mbarrier-again mbarrier-missing reduce-type store-corner tensor-map stack-overflow"
    ),
    KernelTimeout: "timeout",
    KernelTrap: "trap assert division-by-zero host-call launch-in-kernel",
}
RAISED = {kind: error for error, kinds in _KINDS.items() for kind in kinds.split()}
"""What is raised for a finding, by its kind."""
