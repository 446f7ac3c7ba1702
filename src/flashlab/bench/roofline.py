"""The roofline of the whole course: every kernel that was timed as a point, below ceilings that were measured.

It measures nothing. It reads the records of one GPU: hardware for the ceilings; walls, triton, scalar, mma,
industrial and hopper for the kernels. What has no record there has no point.

A kernel's ceiling is the lower of two: what the unit that multiplies for it can do, and its arithmetic intensity times
the memory's speed. Intensity is FLOPs of the matrix products per byte that has to move: q, k, v and o once, but every
line's inputs and results where attention runs line by line.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures"
(2009), Communications of the ACM 52(4).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flashlab.attention.cost import Cost, fused_cost, naive_cost
from flashlab.bench import records

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


def recorded() -> list[dict[str, Any]]:
    """The records of hardware: one for each GPU that has a roofline."""
    return records.recorded("hardware")


def ceilings(hardware: dict[str, Any]) -> Ceilings:
    """What one record of hardware measured.

    mma.sync and multiply-adds: the best rate per clock, at the highest clock of that GPU. wgmma has not been measured:
    it is TENSOR_FLOPS, at the same clock. (The datasheet's TFLOP/s are of a lower one.) Memory: the most bytes per
    second that any of the recorded kernels moved to and from DRAM.
    """
    machine = hardware["machine"]
    clocks = machine["sms"] * machine["sm_clock_mhz"]["max"] * 1e6 / 1e12

    def most(instruction: str) -> float:
        return max(r["per_clock"] for r in hardware["rates"] if r["instruction"] == instruction)

    # An mma.sync of 16 x 8 x 16 is 4096 FLOPs too.
    units = {FLOAT32: 2 * clocks * most("multiply-adds"), MMA: 4096 * clocks * most("mma, float32 sums")}
    if machine["target"] == "sm_90":
        units[WGMMA] = TENSOR_FLOPS * clocks
    moved = max((r["dram_read"] + r["dram_written"]) / r["nanoseconds"] for r in hardware["traffic"])
    return Ceilings(machine["gpu"], moved / 1e3, units, tuple(u for u in units if u == WGMMA))


def points(hardware: dict[str, Any]) -> list[Point]:
    """Every kernel with a record of the same GPU, in the order of the course, peers last."""
    gpu = hardware["machine"]["gpu"]
    triton = WGMMA if WGMMA in ceilings(hardware).units else MMA  # what its compiler emits for tl.dot there
    return sorted(_points(gpu, triton), key=lambda p: 99 if p.phase is None else p.phase)


def _points(gpu: str, triton: str) -> Iterator[Point]:
    def of(name: str) -> Iterator[dict[str, Any]]:
        return (run for run in records.recorded(name) if run["machine"]["gpu"] == gpu)

    for run in of("walls"):
        heads, d = run["shape"]["heads"], run["shape"]["head_dim"]
        for row in run["naive"]:
            if row["seq_len"] == SHAPE[2]:
                shape = (1, heads, row["seq_len"], d)
                yield _point(1, "naive PyTorch", shape, row["ms"], triton, cost=_lines(shape))
        for row in run["scheme_b"]:
            if row["ok"] and row["how"] in ("scheme A", "two passes"):
                name = {"scheme A": "scheme A", "two passes": "scheme B, two passes"}[row["how"]]
                name = f"{name}, {row['seq_q']} queries"
                cost = fused_cost(row["seq_len"], d, seq_q=row["seq_q"])
                shape = (1, 1, row["seq_len"], d)
                yield _point(1, name, shape, row["ms"], triton, cost=cost)
    for run in of("triton"):
        rows = [r for r in run["rows"] if r["name"] == "minimal kernel" and r["head_dim"] == SHAPE[3]]
        for row in [max(rows, key=lambda r: r["seq_len"])] if rows else []:
            yield _point(3, "minimal Triton kernel", (1, 1, row["seq_len"], SHAPE[3]), row["ms"], triton)
    names = {"triton": (4, "Triton"), "gluon": (4, "Gluon"), "cuDNN": (None, "cuDNN"),
             "FlexAttention": (None, "FlexAttention")}  # fmt: skip
    for run in of("industrial"):
        for row in run["rows"]:
            wanted = (row.get("shape") == list(SHAPE), row.get("pass"), row.get("causal"))
            if row["part"] == "shapes" and wanted == (True, "forward", False) and "ms" in row and row["name"] in names:
                phase, name = names[row["name"]]
                yield _point(phase, name, SHAPE, row["ms"], triton, dtype="bf16")
    for run in of("scalar"):
        for row in run["rows"]:
            shape = (row["batch"], row["heads"], row["seq_len"], row["head_dim"])
            if shape == (8, 16, 1024, 128) and not row["causal"] and row["variant"].startswith("p6"):
                yield _point(6, row["variant"], shape, row["ms"], FLOAT32, dtype="f32")
    for run in of("mma"):
        for row in run["ladder"]:
            case = (row["shape"], row["causal"], row["inputs"])
            if case == (list(SHAPE), False, "randn") and "=" not in row["name"]:
                if row["name"] == "fa2":
                    yield _point(None, "FlashAttention-2", SHAPE, row["ms"], MMA)
                else:
                    yield _point(int(row["name"][1]), row["name"], SHAPE, row["ms"], MMA)
    for run in of("hopper"):
        # The ladder, then the last step beside its peers.
        for row in sorted(run["rows"], key=lambda r: r["part"] != "ladder"):
            if (row.get("shape"), row.get("causal")) != (list(SHAPE), False) or "ms" not in row:
                continue
            if row["part"] == "ladder" and row["name"].startswith("p11") and row["name"] != "p11_flash":
                unit = MMA if row["name"] == "p11_1_tma" else triton
                yield _point(11, row["name"], SHAPE, row["ms"], unit, dtype="bf16")
            if (row["part"], row.get("kind"), row.get("dtype")) == ("shapes", "standard", "bf16"):
                if row["name"] == "p11":
                    yield _point(11, row["step"], SHAPE, row["ms"], triton, dtype="bf16")
                if row["name"] == "FlashAttention-4":
                    yield _point(None, row["name"], SHAPE, row["ms"], triton, dtype="bf16")


def _lines(shape: tuple[int, int, int, int]) -> Cost:
    batch, heads, n, d = shape
    return naive_cost(n, d, heads=batch * heads)


def _point(
    phase: int | None, name: str, shape: tuple[int, int, int, int], ms: float, unit: str, *, dtype: str = "fp16",
    cost: Cost | None = None,
) -> Point:  # fmt: skip
    batch, heads, n, d = shape
    cost = cost or fused_cost(n, d, heads=batch * heads, itemsize=4 if dtype == "f32" else 2)
    flops = cost.matmul_flops
    return Point(phase, name, shape, dtype, flops / cost.bytes, flops / ms / 1e9, unit)
