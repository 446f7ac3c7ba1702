"""A GPU to practise timing on: a CPU and a GPU with simulated clocks, so that every run gives the same times.

    gpu = SimulatedGpu()
    flash = gpu.program("flash", kernel_ms=2.0, first_calls_ms=(300.0,))
    flash()                a launch: the CPU goes on at once
    gpu.synchronize()      the CPU waits until the GPU has done everything
    gpu.clock()            the CPU's clock, in milliseconds

It has what makes timing difficult on a real one: launches that come back at once, a queue of 1024 launches, and first
calls that take longer. Calls may differ, but only as you say: there is no noise, and the chip is always at the same
clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

LAUNCH_MS = 0.005  # the CPU's time for one launch
QUEUE = 1024  # launches that may be under way; the next one has to wait
_READING_MS = 1e-6  # so that a loop that waits for the clock ends


class SimulatedGpu:
    """One stream of a GPU, and the CPU that launches.

    Args:
        blocking: each launch waits for its kernel, which no real GPU does unless CUDA_LAUNCH_BLOCKING=1 is set.
        warm: what a program's first calls take longer is left out.
        launch_ms: the CPU's time for one launch.
    Attributes:
        blocking, warm, launch_ms; readings: how often the clock was read.
    """

    def __init__(self, *, blocking: bool = False, warm: bool = False, launch_ms: float = LAUNCH_MS) -> None:
        self.blocking, self.warm, self.launch_ms = blocking, warm, launch_ms
        self._now = 0.0  # of the CPU
        self.readings = 0
        self._ends: deque[float] = deque()  # of the kernels under way

    def __repr__(self) -> str:
        return f"SimulatedGpu at {self._now:.3f} ms"

    def clock(self) -> float:
        """The CPU's clock in milliseconds, as time.perf_counter() * 1000 is."""
        self._now += _READING_MS
        self.readings += 1
        return self._now

    def synchronize(self) -> None:
        """Wait until every kernel launched has ended, as torch.cuda.synchronize() does."""
        if self._ends:
            self._now = max(self._now, self._ends[-1])
            self._ends.clear()

    def program(
        self, name: str, *, kernel_ms: float | Sequence[float], kernels: int = 1, first_calls_ms: Sequence[float] = ()
    ) -> Callable[[], None]:
        """A function without arguments that launches `kernels` kernels of `kernel_ms` milliseconds each.

        Args:
            kernel_ms: a sequence holds those of one call after another, and begins anew at its end.
            first_calls_ms: so much longer its first calls keep the CPU: they compile, tune, record a graph.
        """
        longer = [] if self.warm else list(reversed(first_calls_ms))
        each_call = itertools.cycle(_several(kernel_ms))

        def run() -> None:
            if longer:
                self._now += longer.pop()
            self._launch(kernels, next(each_call))

        run.__name__ = run.__qualname__ = name
        return run

    def _launch(self, kernels: int, ms: float) -> None:
        now, ends = self._now, self._ends  # hunts and their tests launch millions
        last = ends[-1] if ends else 0.0
        for _ in range(kernels):
            now += self.launch_ms
            while ends and ends[0] <= now:
                ends.popleft()
            if len(ends) == QUEUE:
                now = ends.popleft()
            last = (last if last > now else now) + ms
            if self.blocking:
                now = last if last > now else now
            else:
                ends.append(last)
        self._now = now


def _several(kernel_ms: float | Sequence[float]) -> Sequence[float]:
    return kernel_ms if isinstance(kernel_ms, Sequence) else (kernel_ms,)
