"""The roofline of the whole course: every kernel that was timed as a point, below ceilings that were measured.

It measures nothing. It reads the records of one GPU: hardware for the ceilings; walls, triton, scalar, mma,
industrial and hopper for the kernels. What has no record there has no point.

A kernel's ceiling is the lower of two: what the unit that multiplies for it can do, and its arithmetic intensity times
the memory's speed. Intensity is FLOPs of the matrix products per byte that has to move: q, k, v and o once, but every
line's inputs and results where attention runs line by line.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures"
(2009), Communications of the ACM 52(4).
"""

import functools
from typing import Any, NamedTuple

from flashlab.attention.cost import fused_cost, naive_cost
from flashlab.bench import hopper_jobs, records
from flashlab.bench.rows import Row, of, where

SHAPE = (4, 16, 4096, 128)
"""(batch, heads, N, D) of most points: large, and in the records of phases 4, 7 to 9 and 11."""
TENSOR_FLOPS = 4096
"""Per clock and multiprocessor of Hopper, with 16-bit inputs: four tensor cores of 512 multiply-adds each."""
FLOAT32, MMA, WGMMA = "float32 multiply-adds", "mma.sync", "wgmma"


class Ceilings(NamedTuple):
    """Of a GPU: 10^12 bytes per second of memory, and 10^12 FLOP/s of each unit at its highest clock; and which of them
    are the documentation's."""

    gpu: str
    memory: float
    units: dict[str, float]
    not_measured: tuple[str, ...]

    def at(self, intensity: float, unit: str) -> float:
        """The lower of both ceilings, in 10^12 FLOP/s."""
        return min(self.units[unit], intensity * self.memory)


class Point(NamedTuple):
    """A kernel: the phase that it belongs to (None: a peer), and what it reached on which shape."""

    phase: int | None
    name: str
    shape: tuple[int, int, int, int]
    dtype: str
    intensity: float  # FLOPs per byte
    tflops: float
    unit: str

    def share(self, ceilings: Ceilings) -> float:
        """What it reached, of its ceiling."""
        return self.tflops / ceilings.at(self.intensity, self.unit)


recorded = functools.partial(records.recorded, "hardware")
"""The records of hardware: one for each GPU that has a roofline."""


def ceilings(hardware: dict[str, Any]) -> Ceilings:
    """What one record of hardware measured.

    mma.sync and multiply-adds: the best rate per clock, at the highest clock of that GPU. wgmma has not been measured:
    it is TENSOR_FLOPS, at the same clock. (The datasheet's TFLOP/s are of a lower one.) Memory: the most bytes per
    second that any of the recorded kernels moved to and from DRAM.
    """
    machine = hardware["machine"]
    clocks = machine["sms"] * machine["sm_clock_mhz"]["max"] * 1e6 / 1e12

    def most(instruction: str) -> float:
        return max(r["per_clock"] for r in where(hardware["rows"], part="rates", instruction=instruction))

    # An mma.sync of 16 x 8 x 16 is 4096 FLOPs too.
    units = {FLOAT32: 2 * clocks * most("multiply-adds"), MMA: 4096 * clocks * most("mma, float32 sums")}
    if machine["target"] == "sm_90":
        units[WGMMA] = TENSOR_FLOPS * clocks
    moved = max(
        (r["dram_read"] + r["dram_written"]) / r["nanoseconds"] for r in where(hardware["rows"], part="traffic")
    )
    return Ceilings(machine["gpu"], moved / 1e3, units, tuple(u for u in units if u == WGMMA))


_LARGE = {"shape": list(SHAPE), "causal": False}
_PHASE_4 = {"triton": (4, "Triton"), "gluon": (4, "Gluon"), "cuDNN": (None, "cuDNN"),
            "FlexAttention": (None, "FlexAttention")}  # fmt: skip
_SHOWN: tuple[tuple[str, str, dict[str, Any], dict[str, tuple[int | None, str]]], ...] = (
    ("walls", "", {"part": "lengths", "N": SHAPE[2]}, {"naive": (1, "naive PyTorch")}),
    ("walls", "", {"part": "scheme_b", "ok": True},
     {"scheme A": (1, "scheme A, {seq_q} queries"), "two passes": (1, "scheme B, two passes, {seq_q} queries")}),
    ("triton", "", {"part": "times", "D": SHAPE[3]}, {"minimal kernel": (3, "minimal Triton kernel")}),
    ("industrial", "", _LARGE | {"part": "shapes", "pass": "forward"}, _PHASE_4),
    ("scalar", FLOAT32, {"shape": [8, 16, 1024, 128], "causal": False}, {"p6": (6, "{name}")}),
    ("mma", MMA, _LARGE | {"part": "ladder", "inputs": "randn"},
     {"fa2": (None, "FlashAttention-2"), "p7": (7, "{name}"), "p8": (8, "{name}"), "p9": (9, "{name}")}),
    ("hopper", MMA, _LARGE | {"part": "ladder", "name": "p11_1_tma"}, {"p11": (11, "{name}")}),
    ("hopper", "", _LARGE | {"part": "ladder", "name": {s.name for s in hopper_jobs.ladder()[1:-1]}},
     {"p11": (11, "{name}")}),
    ("hopper", "", _LARGE | {"part": "shapes", "kind": "standard", "dtype": "bf16"},
     {hopper_jobs.OURS: (11, "{step}"), "FlashAttention-4": (None, "FlashAttention-4")}),
)  # fmt: skip
"""Record, unit ("": what Triton emits for tl.dot), which rows, and by their name or its first part: the phase
(None: a peer) and what the point is called."""


def points(hardware: dict[str, Any]) -> list[Point]:
    """Every kernel with a record of the same GPU, in the order of the course, peers last."""
    gpu = hardware["machine"]["gpu"]
    triton = WGMMA if WGMMA in ceilings(hardware).units else MMA  # what its compiler emits for tl.dot there
    found = []
    for bench, unit, wanted, names in _SHOWN:
        for run in records.recorded(bench):
            if run["machine"]["gpu"] == gpu:
                found += [p for r in where(of(run), **wanted) if (p := _point(r, unit or triton, names))]
    minimal = [p for p in found if p.phase == 3]
    longest = max((p.shape[2] for p in minimal), default=0)
    return sorted((p for p in found if p.phase != 3 or p.shape[2] == longest), key=lambda p: p.phase or 99)


def _point(r: Row, unit: str, names: dict[str, tuple[int | None, str]]) -> Point | None:
    name = r["name"] if r["name"] in names else r["name"].partition("_")[0]
    if "ms" not in r or name not in names or "=" in r["name"]:
        return None
    phase, words = names[name]
    batch, heads, n, d = r["shape"]
    if r["name"] == "naive":
        cost = naive_cost(n, d, heads=batch * heads)
    else:
        itemsize = 4 if r["dtype"] == "f32" else 2
        cost = fused_cost(n, d, heads=batch * heads, seq_q=r.get("seq_q"), itemsize=itemsize)
    intensity, tflops = cost.matmul_flops / cost.bytes, cost.matmul_flops / r["ms"] / 1e9
    return Point(phase, words.format(**r), (batch, heads, n, d), r["dtype"], intensity, tflops, unit)
