"""The emulator against the hardware, for every kernel of the series: results, counters, and compute-sanitizer.

Every kernel is launched once, natively and emulated, on the same inputs: 2 heads of 200 rows, causal, so that every
kernel meets a ragged end and a diagonal. The record holds, for each,

    difference   max |native - emulated| of O, and the largest it may be: both round, in another order
    counters     pairs [emulated, native]; native ones are Nsight Compute's
    sanitizer    what each tool of compute-sanitizer says of a process that launches all, fragment kernels too

A native count that the emulator cannot know is not compared (instructions, stalls, caches). The counts of global loads
are sectors of plain loads and of cp.async together: the hardware has one counter for both.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from flashlab.bench import harness, ncu, records
from flashlab.bench.harness import Data, Row, jobs_of
from flashlab.bench.mma import Variant, build
from flashlab.bench.rows import where
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels import SERIES, path
from flashlab.table import Table

SHAPE = (1, 2, 200)  # batch, heads, rows
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


class Count(NamedTuple):
    """Nsight Compute's metric, and the emulator's counters whose sum, so many times, it should be."""

    metric: str
    parts: tuple[str, ...]
    times: int = 1


_SHARED, _CONFLICTS, _GLOBAL = (
    f"l1tex__{what}_op_{{}}.sum"
    for what in ("data_pipe_lsu_wavefronts_mem_shared", "data_bank_conflicts_pipe_lsu_mem_shared",
                 "t_sectors_pipe_lsu_mem_global")
)  # fmt: skip
METRICS = {
    "mma": Count("smsp__inst_executed_pipe_tensor_op_hmma.sum", ("mma",)),
    "ldmatrix": Count("smsp__inst_executed_op_ldsm.sum", ("ldmatrix",)),
    "cp.async": Count("smsp__inst_executed_op_ldgsts.sum", ("cp_async",)),
    "shared read wavefronts": Count(_SHARED.format("ld"), ("ldmatrix_wavefronts", "shared_load_wavefronts")),
    "shared write wavefronts": Count(_SHARED.format("st"), ("shared_store_wavefronts", "stmatrix_wavefronts")),
    "bank conflicts, reads": Count(_CONFLICTS.format("ld"), ("conflicts_read",)),
    "bank conflicts, writes": Count(_CONFLICTS.format("st"), ("conflicts_write",)),
    "global read sectors": Count(_GLOBAL.format("ld"), ("global_load_sectors", "cp_async_sectors")),
    "global write sectors": Count(_GLOBAL.format("st"), ("global_store_sectors",)),
}
"""What is compared."""


def variants() -> list[Variant]:
    """Every step at head_dim 64, and the last of each phase at 128."""
    last = {step.phase: step for step in SERIES}.values()
    return [
        Variant(step, head_dim, step.dtypes[0])
        for step in SERIES
        for head_dim in (64, 128)
        if head_dim == 64 or step in last
    ]


def inputs(v: Variant) -> list[torch.Tensor]:
    """q, k, v on the CPU, the same in every process."""
    shape = (*SHAPE, v.head_dim)
    return [x.to(v.dtype) for x in harness.draw(*[shape] * 3, dtype=torch.float32, seed=7, device="cpu")]


def watched(v: Variant) -> CudaModule:
    """The emulator's build that sees every access."""
    return load_inline(v.step, head_dim=v.head_dim, dtype=v.dtype, check=True, defines=dict(v.defines))


def emulate(v: Variant, metrics: Mapping[str, Count] = METRICS) -> tuple[torch.Tensor, dict[str, float]]:
    """O and the counts of one launch. Raises KernelFindings if the emulator finds anything."""
    module = watched(v)
    o, _ = module.forward(*inputs(v), causal=True)
    assert module.report is not None, "every run in the emulator leaves a report"
    c = dict(module.report.raise_if_findings().counters)

    def over(*kinds: str) -> int:
        return sum(c.get(f"{kind}_wavefronts", 0) - c.get(f"{kind}_ideal", 0) for kind in kinds)

    c |= {"conflicts_read": over("ldmatrix", "shared_load"), "conflicts_write": over("stmatrix", "shared_store")}
    return o, {name: m.times * sum(c.get(part, 0) for part in m.parts) for name, m in metrics.items()}


def launch_all() -> list[torch.Tensor]:
    """Every variant once on the GPU, in order."""
    outputs = []
    for v, module in build(variants()):
        o, _ = module.forward(*(x.cuda() for x in inputs(v)), causal=True)
        torch.cuda.synchronize()
        outputs.append(o.cpu())
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


def profile() -> list[Row]:
    """Nsight Compute's counters of each variant's forward kernel, in order."""
    metrics = {name: m.metric for name, m in METRICS.items()}
    rows = ncu.profile(harness.calling(launch_all), metrics, kernels="flash_forward", timeout=500)
    if len(rows) != len(variants()):
        kernels = [row["kernel"] for row in rows]
        raise RuntimeError(f"{len(variants())} kernels were launched, and ncu lists {len(rows)}: {kernels}")
    return rows


def sanitize(arguments: Sequence[str], tool: str, timeout: float = 500) -> str:
    """The closing line of a tool of compute-sanitizer, run over `python ARGUMENTS`, which launches the kernels."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    lines = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout)
    return lines[-1] if lines else f"no summary: {done.stdout[-300:]}"


def jobs() -> list[Row]:
    return [{"part": "kernels"}, *jobs_of("sanitizer", tool=TOOLS)]


def prepare(todo: Sequence[Row], until: float) -> None:
    """Raises NoGpu where one of the tools is missing."""
    if missing := [tool for tool in ("nvcc", "ncu", "compute-sanitizer") if shutil.which(tool) is None]:
        raise records.NoGpu(f"validation compares with the hardware; there is no {', no '.join(missing)} here")


def measure(job: Row) -> list[Row]:
    """A row for each kernel, or one of a tool."""
    if job["part"] == "sanitizer":
        return [job | {"said": sanitize(harness.calling(launch_all), job["tool"])}]
    rows = []
    for v, o, found in zip(variants(), launch_all(), profile(), strict=True):
        emulated_o, emulated = emulate(v)
        # Both are right within rounding of the truth; each may be a unit or two in the last place from the other.
        bound = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}[v.dtype]
        pairs = {name: [emulated[name], found[name]] for name in METRICS}
        difference = (o.float() - emulated_o.float()).abs().max().item()
        about = {"kernel": v.name, "head_dim": v.head_dim, "bound": bound, "difference": difference}
        rows.append(job | about | {"counters": pairs})
    return rows


def table(data: Data) -> Table:
    """Per kernel: the difference of its bound, and the counters that are not the same."""
    kernels, rows = where(data["rows"], part="kernels"), []
    for r in kernels:
        unlike = [f"{name} {a} / {b}" for name, (a, b) in r["counters"].items() if a != b]
        rows.append([r["kernel"], r["head_dim"], f"{r['difference'] / r['bound']:.2f}", "; ".join(unlike) or "none"])
    pairs = [pair for r in kernels for pair in r["counters"].values()]
    caption = f"{sum(a == b for a, b in pairs)} of {len(pairs)} counters are equal. " + "; ".join(
        f"{r['tool']}: {r['said']}" for r in where(data["rows"], part="sanitizer")
    )
    columns = ["kernel", "D", "difference / bound", "counters that differ, emulated / native"]
    return Table.of(rows, columns, align="lrrl", caption=caption)


BENCH = harness.Bench(
    __name__, "the emulator is", ("kernel", "head_dim"), quick_too=True, facts={"shape": list(SHAPE), "causal": True}
)
main = BENCH.main
