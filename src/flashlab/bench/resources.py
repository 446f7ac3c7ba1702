"""What the compiled kernels of the series use, side by side: recorded, and measured where there is an nvcc.

print(table("sm_90"))                     # recorded figures
flashlab bench resources                  # measures every step again
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashlab.bench.records import RECORDED as FOLDER
from flashlab.bench.records import write_json
from flashlab.cuda.inline import nvcc_version
from flashlab.cuda.resources import TARGETS, Resources, resources
from flashlab.kernels.series import SERIES, SIDE, Step, step
from flashlab.table import Table

RECORDED = FOLDER / "resources.json"


def measure(targets: Sequence[str] = TARGETS, steps: Sequence[Step] | None = None) -> list[Resources]:
    """Every step of the series and every exhibit, each head_dim up to 128, each target; two at a time."""
    wanted = SERIES + SIDE if steps is None else steps
    jobs = [(s, d, t) for s in wanted for d in s.head_dims if d <= 128 for t in targets]
    with ThreadPoolExecutor(2) as pool:
        one = lambda job: resources(job[0].path, target=job[2], head_dim=job[1], dtype=job[0].dtypes[0])  # noqa: E731
        return [r for found in pool.map(one, jobs) for r in found]


def recorded() -> dict[str, Any]:
    """The recorded figures: {"nvcc": ..., "date": ..., "kernels": [Resources, ...]}."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    return data | {"kernels": [Resources(**row) for row in data["kernels"]]}


def table(
    target: str = "sm_90", *, steps: Sequence[str] | None = None, head_dim: int | None = 64,
    opcodes: Sequence[str] = ("FFMA", "HMMA", "LDS", "LDSM", "LDGSTS", "MUFU"), live: bool = False,
) -> Table:  # fmt: skip
    """The kernels of the series beside each other, from the recorded figures (``live``: measured now).

    Args:
        target: "sm_80" or "sm_90".
        steps: names of steps or exhibits; all of them, if None.
        head_dim: 64 or 128; both, if None.
        opcodes: which instructions to count.
    """
    rows = measure([target], _chosen(steps)) if live else recorded()["kernels"]
    rows = [r for r in rows if r.target == target and (head_dim is None or r.head_dim == head_dim)]
    if steps is not None:
        rows = [r for name in steps for r in rows if r.step == name]
    if not rows:
        raise ValueError(f"no figures for {target}, head_dim {head_dim}, {steps}; targets are {', '.join(TARGETS)}")
    several = len({r.head_dim for r in rows}) > 1
    columns = ["step", "kernel", *(["D"] if several else []), "registers", "spilled bytes", "shared bytes", *opcodes]
    cells = [
        [r.step, r.kernel, *([r.head_dim] if several else []), r.registers, r.spill_bytes]
        + ["?" if r.shared_bytes is None else r.shared_bytes, *(r.instructions.get(opcode, 0) for opcode in opcodes)]
        for r in rows
    ]
    return Table.of(cells, columns, align="ll" + "r" * (len(columns) - 2))


def _chosen(steps: Sequence[str] | None) -> list[Step] | None:
    return None if steps is None else [step(name) for name in steps]


def record(path: Path = RECORDED) -> Path:
    """Measures every step and writes the recorded figures, in one step."""
    rows = [asdict(r) for r in measure()]
    data = {
        "nvcc": nvcc_version(),
        "date": datetime.date.today().isoformat(),
        "targets": list(TARGETS),
        "kernels": rows,
    }
    write_json(path, data)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the compiled kernels' resources with nvcc, and record them.")
    parser.add_argument("--out", type=Path, default=RECORDED)
    path = record(parser.parse_args(arguments).out)
    print(f"written: {path.name}, {len(recorded()['kernels'])} kernels, nvcc {nvcc_version()}")


__all__ = ["RECORDED", "main", "measure", "record", "recorded", "table"]  # fmt: skip

if __name__ == "__main__":
    main()
