"""What the compiled kernels of the series use, side by side: recorded, and measured where there is an nvcc.

flashlab bench resources         # compiles every step again, and writes recorded/resources.json; no GPU is needed
table("sm_90")                   # of the recorded figures
occupancy("A100", ["p9_flash"])  # how many blocks and warps an SM of it holds, and which resource ends it
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashlab import runtime
from flashlab.bench import harness, records
from flashlab.cuda.resources import TARGETS, Resources, resources
from flashlab.kernels.series import SERIES, SIDE, Step
from flashlab.runtime import GpuLimits
from flashlab.table import Table

RECORDED = records.RECORDED / "resources.json"
OPCODES = ("FFMA", "HMMA", "LDS", "LDSM", "LDGSTS", "MUFU")


def measure(targets: Sequence[str], steps: Sequence[Step]) -> list[Resources]:
    """Of each step and target, for each head_dim up to 128."""
    jobs = [(s, d, t) for s in steps for d in s.head_dims if d <= 128 for t in targets]
    found = harness.at_once(lambda job: resources(job[0], head_dim=job[1], target=job[2]), jobs)
    return [r for several in found for r in several]


def recorded() -> dict[str, Any]:
    """The recorded figures: {"nvcc": ..., "date": ..., "kernels": [Resources, ...]}."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    return data | {"kernels": [Resources(**row) for row in data["kernels"]]}


def table(
    target: str = "sm_90", *, steps: Sequence[str] | None = None, head_dim: int | None = 64,
    opcodes: Sequence[str] = OPCODES,
) -> Table:  # fmt: skip
    """The kernels of the series beside each other, from the recorded figures: of these steps or exhibits, all if None,
    for a target of TARGETS; head_dim: 64 or 128, both if None. Raises ValueError where there are none."""
    rows = [r for r in recorded()["kernels"] if r.target == target and (head_dim is None or r.head_dim == head_dim)]
    if steps is not None:
        rows = [r for name in steps for r in rows if r.step == name]
    if not rows:
        raise ValueError(f"no figures for {target}, head_dim {head_dim}, {steps}; targets are {', '.join(TARGETS)}")
    return _table(rows, opcodes)


def _table(rows: Sequence[Resources], opcodes: Sequence[str]) -> Table:
    several = len({r.head_dim for r in rows}) > 1
    columns = ["step", "kernel", *(["D"] if several else []), "registers", "spilled bytes", "shared bytes", *opcodes]
    cells = [
        [r.step, r.kernel, *([r.head_dim] if several else []), r.registers, r.spill_bytes]
        + ["?" if r.shared_bytes is None else r.shared_bytes, *(r.instructions.get(opcode, 0) for opcode in opcodes)]
        for r in rows
    ]
    return Table.of(cells, columns, align="ll" + "r" * (len(columns) - 2))


# ---- what an SM holds of them ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Occupancy:
    """How many blocks and warps of a kernel one SM holds."""

    kernel: Resources
    blocks: int
    warps: int
    limit: str  # what allows no more: "registers", "shared memory", "warps" or "blocks"


def fits(kernel: Resources, gpu: GpuLimits, threads: int = 128) -> Occupancy:
    """Blocks of ``threads`` threads that fit on an SM. Raises ValueError where the shared memory is not known."""
    if kernel.shared_bytes is None:
        raise ValueError(f"no launch of {kernel.step}'s {kernel.kernel} was seen, so its shared memory is not known")
    allowed = gpu.resident(threads, kernel.shared_bytes, kernel.registers)
    limit = min(allowed, key=lambda name: allowed[name])
    return Occupancy(kernel, allowed[limit], allowed[limit] * (threads // 32), limit)


def occupancy(gpu: str, names: Sequence[str], head_dim: int = 64) -> list[Occupancy]:
    """Of each step, as a large grid without a mask runs it: the recorded kernel, and how often it fits on an SM.

    Where a step has several tiles, it is the one with the most rows per warp; of those with the most blocks per SM the
    one with the most keys, as the steps' launchers choose.

    Args:
        gpu: of flashlab.runtime.GPUS, "A100".
        names: of steps whose blocks have 128 threads.
    Raises:
        ValueError: nothing is recorded for that GPU's target, or for a step.
    """
    limits = runtime.limits(gpu)
    kernels = [r for r in recorded()["kernels"] if (r.target, r.head_dim) == (limits.target, head_dim)]
    found = []
    for name in names:
        mine = [r for r in kernels if r.step == name and r.element != "__nv_bfloat16"]
        fitting = [(tile, fits(r, limits)) for r in mine if (tile := tile_of(r))]
        if not fitting:
            raise ValueError(f"no figures of {name} for {limits.target}, head_dim {head_dim}")
        tallest = max(tile[0] for tile, _ in fitting)
        tall = [(tile, o) for tile, o in fitting if tile[0] == tallest]
        found.append(max(tall, key=lambda pair: (pair[1].blocks, pair[0]))[1])
    return found


def tile_of(kernel: Resources, causal: bool = False) -> tuple[int, ...] | None:
    """The numbers among a kernel's template arguments; None for one of another mask, with split keys, or for the merge.

    Of the flags among them the first says causal, a further one splits the keys.
    """
    words = re.findall(r"\w+", kernel.kernel.partition("<")[2])
    flags = [word == "true" for word in words if word in ("true", "false")]
    if not kernel.kernel.startswith("flash_forward") or flags[:1] not in ([], [causal]) or any(flags[1:]):
        return None
    return tuple(int(word) for word in words if word.isdigit()) or (0,)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every step (``--quick``: the last one, for one target) and writes the recorded figures."""
    given = records.parser(__doc__, "resources").parse_args(arguments)
    targets, steps = (TARGETS[-1:], SERIES[-1:]) if given.quick else (TARGETS, SERIES + SIDE)
    found = measure(targets, steps)
    shown = [r for r in found if r.target == targets[-1]]
    facts = {"targets": list(targets), "kernels": [asdict(r) for r in found]}
    records.keep_compiled(RECORDED, given, targets[-1], facts, _table(shown, OPCODES))
