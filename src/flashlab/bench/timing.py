"""Timing on a GPU that a reader can trust: peers in turns, the median and the spread, and what it was measured on.

    with measured() as machine:
        times = interleaved({"ours": lambda: kernel(q, k, v), "torch": lambda: reference(q, k, v)})
    times["ours"].ms, times["ours"].spread, machine["gpu"], machine["sm_clock_mhz"]

Each function is recorded into a CUDA graph, so that its launches cost no time on the CPU, repeated until a replay takes
some milliseconds. The graphs are then replayed in turns, round after round: a clock that falls as the chip gets warm
falls for all of them. A list of functions instead of one stands for the same work on different tensors: where one set
of tensors would stay in the L2 cache, the graph goes through them in turn.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlab import runtime
from flashlab.bench.records import NoGpu, machine, nvidia_smi

Work = Callable[[], Any] | Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over the rounds: the median, the fastest and the slowest."""

    ms: float
    fastest: float
    slowest: float
    rounds: int

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (self.slowest - self.fastest) / self.ms

    def tflops(self, flops: float) -> float:
        """10^12 floating-point operations per second, for that many in a call."""
        return flops / (self.ms * 1e9)

    def row(self) -> dict[str, float]:
        """What a record keeps of it."""
        return {"ms": self.ms, "fastest": self.fastest, "slowest": self.slowest, "rounds": self.rounds}


def summary(samples: Sequence[float]) -> Timing:
    """The Timing of some milliseconds."""
    if not samples:
        raise ValueError("there is nothing to summarise: no samples")
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples))


def attention_flops(batch: int, heads: int, seq_len: int, head_dim: int, causal: bool = False) -> float:
    """Of a forward pass: two products of 2 N^2 D each per head, half of that if causal."""
    return 4.0 * batch * heads * seq_len**2 * head_dim / (2 if causal else 1)


def able(functions: Mapping[str, Work]) -> tuple[dict[str, Work], dict[str, str]]:
    """Those of the functions that run here; and for the others why they do not, in a line: no memory, no backend."""
    runs: dict[str, Work] = {}
    reasons: dict[str, str] = {}
    for name, given in functions.items():
        try:
            for function in [given] if callable(given) else given:
                function()
            torch.cuda.synchronize()
            runs[name] = given
        except Exception as error:  # Triton's want of shared memory is no RuntimeError
            reasons[name] = reason(error)
    return runs, reasons


def interleaved(
    functions: Mapping[str, Work],
    *,
    rounds: int = 15,
    target_ms: float = 2.0,
    graphs: bool = True,
    most_ms: float = 150.0,
) -> dict[str, Timing]:
    """Times functions that launch GPU work, in turns.

    Args:
        functions: by name; each without arguments, or a list of them: the same work on different tensors.
        rounds: how often each is timed.
        target_ms: a replay repeats its function until it takes about as long.
        graphs: record into CUDA graphs. False: plain launches, the CPU's time for them included where it is longer.
        most_ms: a function slower than this in all gets fewer rounds, three at least.

    Raises:
        NoGpu: there is none.
    """
    if not torch.cuda.is_available():
        raise NoGpu("timing needs a GPU, and PyTorch sees none")
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():  # on which nothing can be recorded
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    with torch.cuda.stream(stream):
        for name, given in functions.items():
            several = [given] if callable(given) else list(given)
            for function in (*several, several[0]):  # builds, autotuning, workspaces
                function()
            once = _milliseconds(several[0], stream)
            repeats = max(len(several), min(64, round(target_ms / max(once, 1e-3))))
            work: Callable[[], Any] = functools.partial(_in_turn, several, repeats)
            if graphs:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    work()
                work = graph.replay
            runs[name] = (work, repeats)
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 1):
            for name, (work, repeats) in runs.items():
                if len(samples[name]) < 4 or sum(samples[name]) * repeats < most_ms:
                    samples[name].append(_milliseconds(work, stream) / repeats)
    if stream != torch.cuda.current_stream():
        torch.cuda.current_stream().wait_stream(stream)
    return {name: summary(found[1:]) for name, found in samples.items()}  # the first round warms up


def on_cpu(functions: Mapping[str, Work], *, rounds: int = 3) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times functions by the clock on the wall, in turns, after a call that warms up; and why the others have none."""
    runs: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    for name, given in functions.items():
        function = given if callable(given) else given[0]
        try:
            function()
            runs[name] = function
        except Exception as error:
            reasons[name] = reason(error)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, function in runs.items():
            start = time.perf_counter()
            function()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: summary(found) for name, found in samples.items()}, reasons


def reason(error: BaseException) -> str:
    """Why something cannot run here, in a line."""
    said = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {said}"
    return said if type(error) is RuntimeError and said else f"{type(error).__name__}: {said}"


def _in_turn(several: Sequence[Callable[[], Any]], repeats: int) -> None:
    for i in range(repeats):
        several[i % len(several)]()


def _milliseconds(work: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end)


def input_sets(bytes_per_call: int, *, most: int = 8) -> int:
    """How many sets of tensors to go through in turn, so that together they exceed the L2 cache (1 if one does)."""
    return max(1, min(most, -(-2 * runtime.limits().l2_bytes // max(1, bytes_per_call))))


def allocated(fn: Callable[[], Any]) -> int:
    """Bytes that the allocator had given out at the worst moment of fn(), beyond those given out before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- the machine while it is measured --------------------------------------------------------------------------------
@contextlib.contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """The machine's description for a record; at the end it holds the SM clock as it was meanwhile, and what held it
    down. Raises NoGpu."""
    if not torch.cuda.is_available():
        raise NoGpu("this is measured on a CUDA GPU, and PyTorch sees none")
    found = machine()
    with Clock() as clock:
        yield found
    found["sm_clock_mhz"] = clock.summary()
    found["throttled"] = clock.throttled()


THROTTLES = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "too warm", 0x40: "too warm, by the hardware",
    0x80: "power brake",
}  # fmt: skip
"""The bits of nvidia-smi's reasons for a lower clock that say that the chip was held back."""


class Clock:
    """Samples the clock of the multiprocessors, in MHz, and what holds it down, while it is open."""

    def __enter__(self) -> Clock:
        self.samples: list[int] = []
        self.reasons: list[int] = []
        self._most = self._number("clocks.max.sm")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    @staticmethod
    def _number(query: str) -> int | None:
        said = nvidia_smi(query)
        try:
            return int(said, 0) if said else None  # reasons are hexadecimal
        except ValueError:
            return None

    def _sample(self) -> None:
        # The newer name first; nvidia-smi refuses a query with a name that it does not know.
        names = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
        query = next((name for name in names if self._number(name) is not None), None)
        while not self._done.wait(0.5):
            clock = self._number("clocks.sm")
            if clock is None:
                return
            self.samples.append(clock)
            held = self._number(query) if query else None
            self.reasons += [] if held is None else [held]

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def throttled(self) -> dict[str, float] | None:
        """The share of the samples in which each of THROTTLES held the clock down; {} for never, None if not known."""
        if not self.reasons:
            return None
        shares = {name: sum(bool(r & bit) for r in self.reasons) / len(self.reasons) for bit, name in THROTTLES.items()}
        return {name: share for name, share in shares.items() if share}

    def summary(self) -> dict[str, float | None] | None:
        """The median, lowest and highest sample, and what the chip can at most; None without samples."""
        s = self.samples
        if not s:
            return None
        return {"median": statistics.median(s), "lowest": min(s), "highest": max(s), "max": self._most}


__all__ = [
    "Clock", "NoGpu", "THROTTLES", "Timing", "able", "allocated", "attention_flops", "input_sets", "interleaved",
    "machine", "measured", "nvidia_smi", "on_cpu", "reason", "summary",
]  # fmt: skip
