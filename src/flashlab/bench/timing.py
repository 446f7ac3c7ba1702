"""Timing on a GPU that a reader can trust: peers in turns, the median and the spread, and what it was measured on.

    times = interleaved({"ours": lambda: kernel(q, k, v), "torch": lambda: reference(q, k, v)})
    times["ours"].ms, times["ours"].spread

Each function is recorded into a CUDA graph, so that its launches cost no time on the CPU, repeated until a replay takes
some milliseconds. The graphs are then replayed in turns, round after round: a clock that falls as the chip gets warm
falls for all of them. A list of functions instead of one stands for the same work on different tensors: where one set
of tensors would stay in the L2 cache, the graph goes through them in turn.
"""

from __future__ import annotations

import datetime
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flashlab import runtime
from flashlab.bench.records import NoGpu


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, over the rounds.

    ms is the median; ms_low and ms_high are the 10th and the 90th percentile.
    """

    ms: float
    ms_low: float
    ms_high: float
    rounds: int
    all_ms: tuple[float, ...] = field(repr=False, default=())

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median."""
        return (self.ms_high - self.ms_low) / self.ms

    def tflops(self, flops: float) -> float:
        """10^12 floating-point operations a second, for that many in a call."""
        return flops / (self.ms * 1e9)


def summary(samples: Sequence[float]) -> Timing:
    """The Timing of some milliseconds."""
    if not samples:
        raise ValueError("there is nothing to summarise: no samples")
    ordered = sorted(samples)

    def percentile(p: float) -> float:
        place = p * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Timing(statistics.median(ordered), percentile(0.1), percentile(0.9), len(ordered), tuple(samples))


def interleaved(
    functions: Mapping[str, Callable[[], Any] | Sequence[Callable[[], Any]]],
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

            def work(several=several, repeats=repeats):
                for i in range(repeats):
                    several[i % len(several)]()

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
    torch.cuda.current_stream().wait_stream(stream)
    return {name: summary(found[1:]) for name, found in samples.items()}  # the first round warms up


def _milliseconds(work: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end)


def input_sets(bytes_a_call: int, *, most: int = 8) -> int:
    """How many sets of tensors to go through in turn, so that together they exceed the L2 cache (1 if one does)."""
    return max(1, min(most, -(-2 * runtime.limits().l2_bytes // max(1, bytes_a_call))))


def sm_clock_mhz() -> dict[str, int] | None:
    """The multiprocessors' clock now and at most, in MHz, by nvidia-smi; None where it does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        return None
    query = [tool, "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits", "-i", str(_index())]
    said = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(",")
    try:
        return {"now": int(said[0]), "max": int(said[1])}
    except (ValueError, IndexError):
        return None


def _index() -> str:
    """The current GPU as nvidia-smi names it: by its UUID, since CUDA_VISIBLE_DEVICES renumbers."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())


def machine() -> dict[str, Any]:
    """What figures were measured on, with what, and when. Raises NoGpu."""
    if not torch.cuda.is_available():
        raise NoGpu("a machine's figures are those of its GPU, and PyTorch sees none")
    gpu = runtime.limits()
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    driver = None
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "-i", _index()]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() or None
    return {
        "gpu": gpu.name,
        "target": gpu.target,
        "sms": gpu.sms,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


__all__ = ["NoGpu", "Timing", "input_sets", "interleaved", "machine", "sm_clock_mhz", "summary"]
