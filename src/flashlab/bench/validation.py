"""The emulator against the hardware, for every kernel of the series: results, counters, and compute-sanitizer.

    python -m flashlab.bench.validation --out x.json     # on a machine with a GPU, nvcc, ncu and compute-sanitizer

Every kernel is launched once, natively and emulated, on the same inputs: 2 heads of 200 rows, causal, so that every
kernel meets a ragged end and a diagonal. The record holds, for each,

    difference   max |native - emulated| of O, and the largest it may be: both round, in another order
    counters     pairs [emulated, native]; native ones are Nsight Compute's
    sanitizer    what each tool of compute-sanitizer says of a process that launches all, fragment kernels too

A native count that the emulator cannot know is not compared (instructions, stalls, caches). The counts of global loads
are sectors of plain loads and of cp.async together: the hardware has one counter for both.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashlab.bench import mma as mma_ladder
from flashlab.bench import records, timing
from flashlab.cuda import load_inline
from flashlab.kernels import SERIES, path, steps

SHAPE = (1, 2, 200)  # batch, heads, rows
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# What is compared: Nsight Compute's metric, and the emulator's counters whose sum it should be.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mma": ("smsp__inst_executed_pipe_tensor_op_hmma.sum", ("mma",)),
    "ldmatrix": ("smsp__inst_executed_op_ldsm.sum", ("ldmatrix",)),
    "cp.async": ("smsp__inst_executed_op_ldgsts.sum", ("cp_async",)),
    "shared read wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        ("ldmatrix_wavefronts", "shared_load_wavefronts"),
    ),
    "shared write wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        ("shared_store_wavefronts", "stmatrix_wavefronts"),
    ),
    "bank conflicts, reads": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", ("conflicts_read",)),
    "bank conflicts, writes": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum", ("conflicts_write",)),
    "global read sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        ("global_load_sectors", "cp_async_sectors"),
    ),
    "global write sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", ("global_store_sectors",)),
}


def variants() -> list[mma_ladder.Variant]:
    """Every step of phases 6 to 9 at head_dim 64, and the last of each phase at 128."""
    last = {steps(phase)[-1].name for phase in (6, 7, 8, 9)}
    return [
        mma_ladder.Variant(step, head_dim, step.dtypes[0])
        for step in SERIES
        for head_dim in (64, 128)
        if head_dim == 64 or step.name in last
    ]


def inputs(v: mma_ladder.Variant) -> list[torch.Tensor]:
    """q, k, v on the CPU, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    batch, heads, rows = SHAPE
    return [torch.randn(batch, heads, rows, v.head_dim, generator=generator).to(v.dtype) for _ in range(3)]


def emulate(v: mma_ladder.Variant) -> tuple[torch.Tensor, dict[str, float]]:
    """O and the counters, from the build that sees every access. Raises KernelFindings if it finds anything."""
    module = load_inline(v.step, head_dim=v.head_dim, dtype=v.dtype, check=True, defines=dict(v.defines))
    o, _ = module.forward(*inputs(v), causal=True)
    report = module.report
    report.raise_if_findings()
    c = dict(report.counters)

    def over(*kinds: str) -> int:
        return sum(c.get(f"{kind}_wavefronts", 0) - c.get(f"{kind}_ideal", 0) for kind in kinds)

    c |= {
        "conflicts_read": over("ldmatrix", "shared_load"),
        "conflicts_write": over("stmatrix", "shared_store"),
    }
    return o, {name: sum(c.get(part, 0) for part in parts) for name, (_, parts) in METRICS.items()}


def launch_all(folder: Path) -> list[torch.Tensor]:
    """Every variant once on the GPU, in order; announced on a line each, for the profiler's table."""
    outputs = []
    for kernel in mma_ladder.build(variants(), folder, mma_ladder.architecture()):
        q, k, v = (x.cuda() for x in inputs(kernel.variant))
        run, o, _ = kernel.prepare(q, k, v, causal=True)
        run()
        torch.cuda.synchronize()
        outputs.append(o.cpu())
        print(f"LAUNCHED {kernel.variant.name} D={kernel.variant.head_dim}", flush=True)
    launch_fragments()
    return outputs


def launch_fragments() -> None:
    """The small kernels of phase 7's lecture, which have no Problem, each once: for compute-sanitizer."""
    module = load_inline(path("p7_one_mma"), backend="nvcc")
    lane = torch.arange(32, dtype=torch.int32, device="cuda")

    def halves(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").half()

    for count in (1, 2, 4):
        for transposed in (0, 1):
            tile = torch.zeros(16, 64, dtype=torch.int16, device="cuda")
            out = torch.zeros(32, count, 2, dtype=torch.int16, device="cuda")
            module.ldmatrix(tile, lane % 16, lane // 16 * 8, out, 16, 64, count, transposed)
    module.mma(halves(32, 4, 2), halves(32, 2, 2), torch.zeros(32, 4, device="cuda"))
    module.reuse(halves(16, 16), halves(16, 16), halves(16, 8), torch.zeros(16, 8, device="cuda"))
    torch.cuda.synchronize()


def profile(folder: Path) -> list[dict[str, float | None]]:
    """Nsight Compute's counters, a dict a variant; kernels that one launch call starts together are added up."""
    command = [
        "ncu",
        "--csv",
        "--page",
        "raw",
        "--clock-control",
        "none",
        "-k",
        "regex:flash_forward",
    ]
    metrics = ",".join(metric for metric, _ in METRICS.values())
    done = subprocess.run(
        [*command, "--metrics", metrics, *_again(folder)], capture_output=True, text=True, timeout=500
    )
    rows: list[dict[str, float | None]] = []
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"ncu gave no counters: {(done.stderr or done.stdout).strip()[-500:]}")
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]  # the second line holds the units
    names = [line.split(" ", 1)[1] for line in lines[:start] if line.startswith("LAUNCHED ")]
    for row in table:
        rows.append({"kernel": row["Kernel Name"]} | {n: _number(row.get(m, "")) for n, (m, _) in METRICS.items()})
    if len(rows) != len(names):
        raise RuntimeError(
            f"{len(names)} kernels were launched, and ncu lists {len(rows)}: {[r['kernel'] for r in rows]}"
        )
    return rows


def sanitize(folder: Path) -> dict[str, str]:
    """The closing line of each tool of compute-sanitizer, run over a process that launches every variant."""
    said = {}
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, *_again(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        lines = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout)
        said[tool] = lines[-1] if lines else f"no summary: {done.stdout[-300:]}"
        print(f"{tool}: {said[tool]}", flush=True)
    return said


def _again(folder: Path) -> list[str]:
    return [sys.executable, "-m", "flashlab.bench.validation", "--launch-all", "--build", str(folder)]


def _number(text: str) -> float | None:
    text = text.replace(",", "")
    return float(text) if text else None


def run(folder: Path, *, sanitizer: bool = True) -> dict[str, Any]:
    """Everything; a few minutes. Raises NoGpu where there is no GPU or one of the tools is missing."""
    missing = [tool for tool in ("nvcc", "ncu", "compute-sanitizer") if shutil.which(tool) is None]
    missing += [] if torch.cuda.is_available() else ["a GPU"]
    if missing:
        raise records.NoGpu(f"validation compares with the hardware; there is no {', no '.join(missing)} here")
    native = launch_all(folder)
    counted = profile(folder)
    rows = []
    for v, o, counters in zip(variants(), native, counted, strict=True):
        emulated_o, emulated = emulate(v)
        # Both are right within rounding of the truth; each may be a unit or two in the last place from the other.
        bound = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}[v.dtype]
        difference = (o.float() - emulated_o.float()).abs().max().item()
        pairs = {name: [emulated[name], counters[name]] for name in METRICS}
        rows.append(
            {"kernel": v.name, "head_dim": v.head_dim, "difference": difference, "bound": bound, "counters": pairs}
        )
        unlike = {n: p for n, p in pairs.items() if p[0] != p[1]}
        print(
            f"{v.name} D={v.head_dim}: difference {difference:.1e} of {bound:.0e}; unlike: {unlike or 'none'}",
            flush=True,
        )
    machine = timing.machine() | {"ncu": _version("ncu")}
    result = {"machine": machine, "shape": list(SHAPE), "causal": True, "rows": rows}
    return result | ({"sanitizer": sanitize(folder)} if sanitizer else {})


def _version(tool: str) -> str:
    done = subprocess.run([tool, "--version"], capture_output=True, text=True)
    found = re.search(r"Version ([\d.]+)", done.stdout)
    return found[1] if found else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashlab.bench.validation", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file; recorded/validation_<gpu>.json by default")
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir()) / f"flashlab-mma-{os.getuid()}")
    parser.add_argument("--launch-all", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.launch_all:
        launch_all(given.build)
        return
    result = run(given.build)
    out = given.out or records.default_path("validation", result["machine"]["gpu"])
    records.write_json(out, result)
    same = sum(p[0] == p[1] for row in result["rows"] for p in row["counters"].values())
    count = sum(len(row["counters"]) for row in result["rows"])
    print(f"written: {out.name}; {same} of {count} counters are equal; {json.dumps(result['sanitizer'])}")


if __name__ == "__main__":
    records.entry(main)
