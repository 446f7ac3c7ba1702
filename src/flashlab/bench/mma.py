"""Phases 7 to 9 on a GPU: every kernel of the series against FlashAttention-2, and the last one against its peers.

    python -m flashlab.bench.mma              # writes recorded/mma_<gpu>.json beside this file; about 2 minutes
    python -m flashlab.bench.mma --only ladder --out x.json

ladder    every step at a few shapes, interleaved with FlashAttention-2; registers and spills as ptxas reports them
final     the last step, FlashAttention-2, cuDNN and unfused PyTorch, at the published tables' shapes and at large ones
counters  what Nsight Compute counts for one launch of each step, where ``ncu`` is installed

Every kernel is first checked against float64. A measurement is a CUDA graph of as many launches as fill a few
milliseconds; the graphs of one shape are replayed in turn, round after round; the median of the rounds is kept, with
the fastest and the slowest. Inputs are random, and stay in L2 where they fit, for every peer alike. FLOPs: 4 B H N N D,
halved when causal.
Needs nvcc and a GPU of compute capability 8.0 or later.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import io
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlab.bench import records, timing
from flashlab.bench.records import NoGpu
from flashlab.kernels import FOLDER, Step, problem, steps

SERIES = steps(7, 8, 9)
PUBLISHED = Path(__file__).parent / "published"
INCLUDE = Path(__file__).parents[1] / "simt" / "include"
Shape = tuple[int, int, int, int]  # batch, heads, seq_len, head_dim

# (shape, causal)
BIG: list[tuple[Shape, bool]] = [
    ((4, 16, 4096, 128), False), ((4, 16, 4096, 128), True), ((4, 32, 4096, 64), False), ((4, 32, 4096, 64), True),
]  # fmt: skip
LADDER = [
    *BIG,
    ((1, 1, 1024, 64), False), ((2, 8, 2048, 64), False), ((1, 4, 1024, 128), False), ((4, 8, 2048, 128), False),
]  # fmt: skip
MORE: list[tuple[Shape, bool]] = [
    (shape, causal)
    for shape in ((16, 16, 1024, 128), (16, 32, 1024, 64), (1, 16, 16384, 128), (4, 8, 4096, 256))
    for causal in (False, True)
]
COUNTED: list[Shape] = [(2, 8, 2048, 64), (2, 8, 2048, 128)]
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "instructions": "smsp__inst_executed.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "tensor_active_pct": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_active_pct": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
}


# ---- building --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Variant:
    """A step with its defines, for one head_dim and dtype."""

    step: Step
    head_dim: int
    dtype: torch.dtype = torch.float16
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.step.name, *(f"{k}={v}" for k, v in self.defines)])


class Kernel:
    """A built variant: callable on CUDA tensors."""

    def __init__(self, variant: Variant, library: Path, resources: dict[str, dict[str, int]]):
        self.variant, self.resources = variant, resources
        self._library = ctypes.CDLL(str(library))
        if hasattr(self._library, "workspace_floats"):
            self._library.workspace_floats.restype = ctypes.c_int64
        self._library.forward.restype = ctypes.c_int

    def prepare(self, q, k, v, *, causal: bool, o=None) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
        """A function that launches the kernel on these tensors, and the o and lse that it writes."""
        o = torch.empty_like(q) if o is None else o
        lse = torch.empty(q.shape[:3], device=q.device)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        p = problem.problem(q, k, v, o, lse, causal=causal, sms=sms, head_dims=(self.variant.head_dim,))
        wanted = self._library.workspace_floats(ctypes.byref(p)) if hasattr(self._library, "workspace_floats") else 0
        workspace = torch.empty(max(1, wanted), device=q.device)
        p.workspace = workspace.data_ptr()

        def launch(keep=(q, k, v, o, lse, workspace)) -> None:
            error = self._library.forward(ctypes.byref(p), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
            if error:
                raise RuntimeError(f"{self.variant.name}: cudaError {error}")

        return launch, o, lse

    def main(self, causal: bool) -> dict[str, int]:
        """Registers and spilled bytes of the kernel that a large grid runs."""
        best: tuple[int, dict[str, int]] = (-1, {})
        for name, numbers in self.resources.items():
            bools = [int(x) for x in re.findall(r"Lb(\d)E", name)]
            tiles = int((re.findall(r"Li(\d+)E", name) or ["0"])[0])
            if "flash_forward" in name and bools[:1] in ([], [int(causal)]) and not any(bools[1:]) and tiles > best[0]:
                best = (tiles, numbers)
        return best[1]


def variants(dtypes: Sequence[torch.dtype] = (torch.float16,), final_only: bool = False) -> list[Variant]:
    """Every step at every head_dim, and beside the default of a define its other values, in the step that brings it."""
    found, seen = [], set()
    for step in SERIES[-1:] if final_only else SERIES:
        for head_dim in step.head_dims:
            for dtype in dtypes:
                found.append(Variant(step, head_dim, dtype))
                for define, values in step.defines.items():
                    if (define, head_dim, dtype) not in seen:
                        seen.add((define, head_dim, dtype))
                        found += [Variant(step, head_dim, dtype, ((define, v),)) for v in values[1:]]
    return found


def build(wanted: Sequence[Variant], folder: Path, architecture: str) -> list[Kernel]:
    """Compiles the variants with nvcc, in parallel; what the folder holds already is not compiled again.

    Raises:
        NoGpu: there is no nvcc. RuntimeError: nvcc's messages.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NoGpu("the kernels are compiled with nvcc, and there is none on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    headers = b"".join(p.read_bytes() for p in sorted(FOLDER.glob("*.cuh")))

    def one(v: Variant) -> Kernel:
        defines = {"HEAD_DIM": v.head_dim, "ELEMENT": problem.ELEMENTS[v.dtype], **dict(v.defines)}
        target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        flags = ["-std=c++17", "-O3", target, "-Xptxas", "-v", *(f"-D{k}={x}" for k, x in defines.items())]
        key = hashlib.sha256(headers + v.step.path.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
        library, log = folder / f"{v.step.name}_{key}.so", folder / f"{v.step.name}_{key}.txt"
        if not (library.exists() and log.exists()):
            scratch = library.with_suffix(".tmp")
            output = ["-shared", "-Xcompiler", "-fPIC", f"-I{INCLUDE}", "-o", str(scratch), str(v.step.path)]
            done = subprocess.run([nvcc, *flags, *output], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"nvcc does not compile {v.name}:\n{done.stderr}")
            log.write_text(done.stderr)
            scratch.replace(library)
        return Kernel(v, library, resources(log.read_text()))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, wanted))


def resources(log: str) -> dict[str, dict[str, int]]:
    """What ``ptxas -v`` says: registers and spilled bytes (stores + loads) by mangled kernel name."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)'", line):
            name = m[1]
        elif m := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found.setdefault(name, {})["spill_bytes"] = int(m[1]) + int(m[2])
        elif m := re.search(r"Used (\d+) registers", line):
            found.setdefault(name, {})["registers"] = int(m[1])
    return found


# ---- checking --------------------------------------------------------------------------------------------------------
# batch, heads, kv_heads, seq_q, seq_k
CASES = (
    (2, 4, 2, 300, 300), (1, 2, 2, 64, 130), (2, 4, 1, 513, 100),
    (1, 1, 1, 1, 147), (1, 3, 1, 3, 799), (2, 8, 2, 700, 1023),
)  # fmt: skip


def verify(kernel: Kernel) -> float:
    """The worst error against float64, relative to the bound of its dtype; raises AssertionError above it.

    The cases: ragged lengths, seq_q != seq_k both ways, grouped heads, causal and not, strides of both layouts.
    """
    worst = 0.0
    generator = torch.Generator("cuda").manual_seed(0)
    dtype, d = kernel.variant.dtype, kernel.variant.head_dim
    bound = 2e-3 if dtype == torch.float16 else 1.6e-2
    for b, h, hk, m, n in CASES:
        for causal in (False, True):
            q = torch.randn(b, m, h, d, device="cuda", generator=generator).to(dtype).transpose(1, 2)
            k, v = (torch.randn(b, hk, n, d, device="cuda", generator=generator).to(dtype) for _ in range(2))
            v = v + 0.5
            o = torch.full((b, m, h, d), math.nan, device="cuda", dtype=dtype).transpose(1, 2)
            launch, o, lse = kernel.prepare(q, k, v, causal=causal, o=o)
            lse.fill_(math.nan)
            launch()
            kk, vv = (x.repeat_interleave(h // hk, 1).double() for x in (k, v))
            s = q.double() @ kk.mT * d**-0.5
            if causal:
                s = s.masked_fill(~torch.ones(m, n, dtype=torch.bool, device="cuda").tril(n - m), -math.inf)
            want, want_lse = s.softmax(-1).nan_to_num() @ vv, s.logsumexp(-1)
            error = ((o - want).abs().max() / bound).item()
            same_empty = torch.equal(lse.isneginf(), want_lse.isneginf())
            lse_error = ((lse - want_lse).abs().nan_to_num(0.0) if same_empty else lse.new_ones(1)).max().item()
            where = f"{kernel.variant.name} {dtype} D={d} at {(b, h, hk, m, n)}{' causal' if causal else ''}"
            assert o.isfinite().all() and error <= 1, f"{where}: error {error:.2f} times the bound"
            assert lse_error <= 1e-4, f"{where}: lse off by {lse_error:.2g}"
            worst = max(worst, error)
    return worst


# ---- measuring -------------------------------------------------------------------------------------------------------
def peers(q, k, v, causal: bool) -> dict[str, Callable[[], object]]:
    """FlashAttention-2 and cuDNN as torch has them, forced; and attention as separate operations in the same dtype."""
    scale = q.shape[-1] ** -0.5

    def sdpa(backend):
        def run():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None

    def unfused():
        s = q @ k.mT * scale
        if causal:
            s.masked_fill_(mask, -math.inf)
        return s.softmax(-1) @ v

    return {"fa2": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "unfused": unfused}


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, ms: float
) -> dict[str, dict[str, float] | None]:
    """Milliseconds of each function: median, fastest and slowest of the rounds. None for one that cannot run here."""
    able = {}
    for name, f in functions.items():
        try:
            f()
            torch.cuda.synchronize()
            able[name] = f
        except (RuntimeError, torch.OutOfMemoryError) as e:
            print(f"\n  {name} cannot run: {str(e).splitlines()[0][:100]}", file=sys.stderr)
    found = timing.interleaved(able, rounds=rounds, target_ms=ms)
    spread = {name: {"ms": t.ms, "fastest": min(t.all_ms), "slowest": max(t.all_ms)} for name, t in found.items()}
    return {name: spread.get(name) for name in functions}


def flops(shape: Shape, causal: bool) -> float:
    b, h, n, d = shape
    return 4 * b * h * n * n * d / (2 if causal else 1)


def inputs(shape: Shape) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]


def published_shapes(file: str) -> list[Shape]:
    """The shapes of a published table, in its order."""
    with open(PUBLISHED / file, newline="") as f:
        rows = [tuple(int(r[c]) for c in ("batch", "heads", "seq_len", "head_dim")) for r in csv.DictReader(f)]
    return list(dict.fromkeys(rows))


def rows_of(shape: Shape, causal: bool, times: dict[str, dict[str, float] | None]) -> list[dict[str, Any]]:
    fa2 = times.get("fa2")
    return [
        {"shape": list(shape), "causal": causal, "name": name, **t, "tflops": flops(shape, causal) / t["ms"] / 1e9,
         "vs_fa2": fa2["ms"] / t["ms"] if fa2 else None}
        for name, t in times.items() if t
    ]  # fmt: skip


def measure_ladder(built: Sequence[Kernel], rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Every variant of the head_dim at the shapes of LADDER."""
    rows = []
    for shape, causal in LADDER:
        q, k, v = inputs(shape)
        functions = {"fa2": peers(q, k, v, causal)["fa2"]}
        mine = {b.variant.name: b for b in built if b.variant.head_dim == shape[3] and b.variant.dtype == q.dtype}
        functions |= {name: b.prepare(q, k, v, causal=causal)[0] for name, b in mine.items()}
        found = rows_of(shape, causal, interleaved(functions, rounds, 2.0))
        for row in found:
            if row["name"] in mine:
                row |= mine[row["name"]].main(causal)
        rows += found
        progress.step("ladder", shape, causal, found)
    return rows


def measure_final(built: Sequence[Kernel], rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """The last step and its peers at the shapes of both published tables, and at large ones."""
    last = {b.variant.head_dim: b for b in built if b.variant.step is SERIES[-1] and b.variant.dtype == torch.float16}
    tables: dict[str, list[tuple[Shape, bool]]] = {
        "mma_stages_ada": [(s, False) for s in published_shapes("mma_stages_ada.csv")],
        "fa1_f32_fa2_mma_ada": [(s, False) for s in published_shapes("fa1_f32_fa2_mma_ada.csv") if s[3] in last],
        "big": [*BIG, *MORE],
    }
    rows = []
    for table, shapes in tables.items():
        for shape, causal in shapes:
            q, k, v = inputs(shape)
            functions = {SERIES[-1].name: last[shape[3]].prepare(q, k, v, causal=causal)[0]}
            every = peers(q, k, v, causal)
            if shape[0] * shape[1] * shape[2] ** 2 > 2**33:  # scores of 16 GB
                every.pop("unfused")
            found = rows_of(shape, causal, interleaved(functions | every, rounds, 1.5))
            rows += [row | {"table": table} for row in found]
            progress.step(table, shape, causal, found)
    return rows


def count(folder: Path) -> list[dict[str, Any]]:
    """Nsight Compute's counters for one launch of each step; [] where there is no ncu, or it may not read them."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return []
    profiler = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "-k", "regex:flash_forward"]
    profiled = [sys.executable, "-m", "flashlab.bench.mma", "--launch-once", "--build", str(folder)]
    command = [*profiler, "--metrics", ",".join(METRICS.values()), *profiled]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        print(f"  ncu gave no counters: {(done.stderr or done.stdout).strip()[-300:]}", file=sys.stderr)
        return []
    launches = [json.loads(line[7:]) for line in lines[:start] if line.startswith("LAUNCH ")]
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]  # the second line holds the units
    rows = []
    for launch, row in zip(launches, table, strict=False):
        values = {name: row.get(metric, "").replace(",", "") for name, metric in METRICS.items()}
        rows.append(launch | {name: float(x) if x else None for name, x in values.items()})
    return rows


def launch_once(folder: Path) -> None:
    """For ncu: every step once at each counted shape, announced on a line."""
    built = build(variants(), folder, architecture())
    for shape in COUNTED:
        q, k, v = inputs(shape)
        for b in built:
            if b.variant.head_dim == shape[3]:
                b.prepare(q, k, v, causal=False)[0]()
                torch.cuda.synchronize()
                launch = {"shape": list(shape), "causal": False, "name": b.variant.name}
                print("LAUNCH " + json.dumps(launch), flush=True)


# ---- the whole -------------------------------------------------------------------------------------------------------
class Progress:
    """Prints what has been measured, and how long it took."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {text}", flush=True)

    def step(self, table: str, shape: Shape, causal: bool, rows: list[dict[str, Any]]) -> None:
        numbers = "  ".join(f"{r['name']} {r['tflops']:.0f} ({r['vs_fa2'] or 0:.2f})" for r in rows)
        self.say(f"{table} {shape}{' causal' if causal else ''}: {numbers}")


class Clock:
    """Samples the SM clock, in MHz, while it is open."""

    def __enter__(self) -> Clock:
        self.samples: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        device = torch.cuda.current_device()
        query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={device}"]
        while not self._done.wait(0.5):
            try:
                answer = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
                self.samples.append(int(answer.split()[0]))
            except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
                return

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def summary(self) -> dict[str, float] | None:
        s = self.samples
        return {"median": statistics.median(s), "lowest": min(s), "highest": max(s)} if s else None


def machine() -> dict[str, Any]:
    """What the figures were measured with, and when."""
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    return timing.machine() | {"nvcc": nvcc[-1] if nvcc else None, "cudnn": torch.backends.cudnn.version()}


def architecture() -> str:
    """Of this machine's GPU, as nvcc names it: "90"."""
    return "".join(map(str, torch.cuda.get_device_capability()))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def summary(final: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per published table: the geometric mean of the last step's speed over FlashAttention-2's, and the worst shape."""
    last = [r for r in final if r["name"] == SERIES[-1].name and r["vs_fa2"]]
    by_table = {t: [r["vs_fa2"] for r in last if r["table"] == t] for t in dict.fromkeys(r["table"] for r in last)}
    return {t: {"shapes": len(v), "geomean_vs_fa2": geometric_mean(v), "worst": min(v)} for t, v in by_table.items()}


def run(out: Path, only: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Build, check, measure, write. Raises NoGpu where there is none."""
    if not torch.cuda.is_available():
        raise NoGpu("the ladder is measured on a CUDA GPU; this process sees none")
    torch.manual_seed(0)
    progress = Progress()
    dtypes = (torch.float16, torch.bfloat16)
    built = build(variants(dtypes, final_only=list(only) == ["final"]), folder, architecture())
    progress.say(f"{len(built)} kernels built")
    worst = max(verify(b) for b in built)
    progress.say(f"all of them agree with float64: the worst error is {worst:.2f} of the bound")
    result: dict[str, Any] = {"machine": machine(), "rounds": rounds, "worst_error_of_bound": worst}
    with Clock() as clock:
        if "ladder" in only:
            result["ladder"] = measure_ladder(built, rounds, progress)
        if "final" in only:
            result["final"] = measure_final(built, rounds, progress)
            result["summary"] = summary(result["final"])
    result["machine"]["sm_clock_mhz"] = clock.summary()
    records.write_json(out, result)
    if "counters" in only:
        result["counters"] = count(folder)
        progress.say(f"{len(result['counters'])} launches counted by ncu")
        records.write_json(out, result)
    progress.say(f"{out}: {json.dumps(result.get('summary', {}))}; SM clock {result['machine']['sm_clock_mhz']}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashlab.bench.mma", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file; recorded/mma_<gpu>.json by default")
    parts = ["ladder", "final", "counters"]
    parser.add_argument(
        "--only", nargs="+", default=parts, choices=parts, help="what to measure; everything by default"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir()) / f"flashlab-mma-{os.getuid()}")
    parser.add_argument("--launch-once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.launch_once:
        launch_once(args.build)
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    run(args.out or records.default_path("mma", gpu), args.only, args.rounds, args.build)


if __name__ == "__main__":
    records.entry(main)
