"""Timing on a GPU that a reader can trust: peers in turns, the median and the spread, and what it was measured on.

    with measured() as machine:
        times = interleaved({"ours": lambda: kernel(q, k, v), "torch": lambda: reference(q, k, v)})
    times["ours"]["ms"], times["ours"]["slowest"], machine["gpu"], machine["sm_clock_mhz"]

Each function is recorded into a CUDA graph, so that its launches cost no time on the CPU, repeated until a replay takes
some milliseconds. The graphs are then replayed in turns, round after round: a clock that falls as the chip gets warm
falls for all of them. Each round has an order of its own: nobody always comes right behind the one that heats the chip
most. A list of functions instead of one stands for the same work on different tensors: where one set
of tensors would stay in the L2 cache, the graph goes through them in turn.
"""

import contextlib
import ctypes
import gc
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.bench.records import NoGpu, machine, nvidia_smi, this_gpu

Work = Callable[[], Any] | Sequence[Callable[[], Any]]


Times = dict[str, Any]  # of one call, over the rounds: ms, the median; fastest; slowest; rounds. In milliseconds.


def summary(samples: Sequence[float]) -> Times:
    """The Times of some milliseconds. Raises statistics.StatisticsError where there are none."""
    median = statistics.median(samples)
    return {"ms": median, "fastest": min(samples), "slowest": max(samples), "rounds": len(samples)}


def made(names: Iterable[str], make: Callable[[str], Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """make(name) of each, and why the others have none, in a line: no memory, no backend."""
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            found[name] = make(name)
        except Exception as error:  # Triton's want of shared memory is no RuntimeError
            reasons[name] = reason(error)
    return found, reasons


def able(functions: Mapping[str, Work]) -> tuple[dict[str, Work], dict[str, str]]:
    """Those of the functions that run here; and for the others why they do not."""

    def run(name: str) -> Work:
        given = functions[name]
        for function in [given] if callable(given) else given:
            function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return given

    return made(functions, run)


def interleaved(
    functions: Mapping[str, Work],
    *,
    rounds: int = 15,
    graphs: bool = True,
) -> dict[str, Times]:
    """Times functions that launch GPU work, in turns.

    functions: by name; each without arguments, or a list of them: the same work on different tensors. A replay repeats
    its function until it takes about 2 ms. graphs: record into CUDA graphs; False: plain launches, the CPU's time for
    them included where it is longer. One that takes 150 ms in all gets fewer rounds, three at least. Raises NoGpu.
    """
    with _own_stream() as stream:
        runs = {name: _repeated(given, stream, 2.0, graphs) for name, given in functions.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name in order(runs, number):
                work, repeats = runs[name]
                if len(samples[name]) < 4 or sum(samples[name]) * repeats < 150.0:
                    samples[name].append(milliseconds(work, stream) / repeats)
    return {name: summary(found[1:]) for name, found in samples.items()}  # the first round warms up


def order(names: Iterable[str], number: int) -> list[str]:
    """The names as they take turns in the round of that number: shuffled, the same way in every run."""
    found = list(names)
    random.Random(number).shuffle(found)
    return found


def sustained(functions: Mapping[str, Work]) -> dict[str, dict[str, Any]]:
    """Each function alone, again and again for 2.5 seconds, of which the first 1.2 do not count.

    Where a chip may draw only so much power, a clock that holds for milliseconds does not hold for a second.

    By name: Times of a call, and `clock` as Clock.summary has it. Raises NoGpu.
    """
    seconds, settle = 2.5, 1.2
    found = {}
    with _own_stream() as stream, Clock(0.02) as clock:
        for name, given in functions.items():
            work, repeats = _repeated(given, stream, 20.0, True)
            start, samples = time.monotonic(), []
            while (now := time.monotonic()) < start + seconds:
                ms = milliseconds(work, stream) / repeats
                samples += [ms] if now > start + settle else []
            found[name] = summary(samples) | {"clock": clock.summary(start + settle, time.monotonic())}
    return found


@contextlib.contextmanager
def _own_stream() -> Iterator[torch.cuda.Stream]:
    """The current stream, or, where that is the default, on which nothing can be recorded, a new one. Raises NoGpu."""
    if not torch.cuda.is_available():
        raise NoGpu("timing needs a GPU, and PyTorch sees none")
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    if stream != torch.cuda.current_stream():
        torch.cuda.current_stream().wait_stream(stream)


def _repeated(given: Work, stream: torch.cuda.Stream, target_ms: float, graphs: bool) -> tuple[Callable[[], Any], int]:
    """A function that does the work so often that it takes about target_ms, and how often that is."""
    several = [given] if callable(given) else list(given)
    for function in (*several, several[0]):  # builds, autotuning, workspaces
        function()
    once = milliseconds(several[0], stream)
    repeats = max(len(several), min(64, round(target_ms / max(once, 1e-3))))
    work: Callable[[], Any] = lambda: [several[i % len(several)]() for i in range(repeats)]  # noqa: E731
    if graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        work = graph.replay
    return work, repeats


def on_cpu(functions: Mapping[str, Work], *, rounds: int) -> dict[str, Times]:
    """Times functions that have run before by the clock on the wall, in turns; of several the first."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, given in functions.items():
            function = given if callable(given) else given[0]
            start = time.perf_counter()
            function()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: summary(found) for name, found in samples.items()}


def reason(error: BaseException) -> str:
    """Why something cannot run here, in a line."""
    said = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"out of memory: {said}"
    return said if type(error) is RuntimeError and said else f"{type(error).__name__}: {said}"


def milliseconds(work: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    """Of what some work gives to this stream, the current one."""
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
    """The machine's description for a record; at the end it holds the SM clock as it was meanwhile. Raises NoGpu."""
    if not torch.cuda.is_available():
        raise NoGpu("this is measured on a CUDA GPU, and PyTorch sees none")
    found = machine()
    with Clock() as clock:
        yield found
    found["sm_clock_mhz"] = clock.summary()


class Clock:
    """Samples the clock of the multiprocessors, and the power, while it is open.

    samples: (a time of time.monotonic(), MHz, watts); None for what is not known.
    """

    def __init__(self, every: float = 0.5) -> None:
        self.samples: list[tuple[float, int | None, float | None]] = []
        self._every = every

    def __enter__(self) -> "Clock":
        most = nvidia_smi("clocks.max.sm") or ""
        self._most = int(most) if most.isdecimal() else None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(_nvml(),), daemon=True)
        self._thread.start()
        return self

    def _sample(self, read: "Reader | None") -> None:
        while read and not self._done.wait(self._every):
            found = read()
            if found[0] is None:
                return
            self.samples.append((time.monotonic(), *found))

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def summary(self, start: float = 0.0, end: float = math.inf) -> dict[str, float | None] | None:
        """MHz of the samples between two times: median, lowest, highest, and what the chip can at most; the median of
        the watts. None without samples."""
        some = [(mhz, watts) for at, mhz, watts in self.samples if start <= at <= end]
        mhz, watts = [x for x, _ in some if x is not None], [x for _, x in some if x is not None]
        if not mhz:
            return None
        found = {"median": statistics.median(mhz), "lowest": min(mhz), "highest": max(mhz), "max": self._most}
        return found | ({"watts": statistics.median(watts)} if watts else {})


Reader = Callable[[], tuple[int | None, float | None]]  # MHz, watts


def _nvml() -> Reader | None:
    """Reads by nvidia-smi's own library; None where it is not to be found."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        clock, power = library.nvmlDeviceGetClockInfo, library.nvmlDeviceGetPowerUsage
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(this_gpu().encode(), ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def read() -> tuple[int | None, float | None]:
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        no_mhz = clock(handle, 1, ctypes.byref(mhz))  # 1: of the multiprocessors
        no_watts = power(handle, ctypes.byref(milliwatts))
        return None if no_mhz else mhz.value, None if no_watts else milliwatts.value / 1e3

    return read
