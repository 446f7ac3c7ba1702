"""Phase 11 on a Hopper GPU: its kernels beside cuDNN, FlashAttention-2 and 4, and what the course had before.

shapes     forward, 16384 queries and 2048 columns in all heads together: N 512 ... 32768, D 64, 128, 256, causal and
           not, bf16 and fp16; then grouped queries, by token, odd lengths, more keys than queries
sizes      forward, head sizes between those; at N = 4096 the last step with other macros too
ladder     every step of the phase at four shapes, beside cuDNN and the last kernel of phase 9
variants   the last step with its macros set otherwise, one at a time
inputs     the last step, with trust and without, beside its peers: scores that rise, sinks, scores three times as wide;
           speed, error over whole heads (the largest and rms), and how many tiles are doubted
captured   the same for the scores of language models, layer by layer (flashlab.bench.hopper_inputs)
clock      each kernel alone for seconds, on random numbers and on zeros: the clock and the power meanwhile
backward   dQ, dK and dV, bf16, beside phase 5's in Triton (flashlab.bench.hopper_backward)
validate   repeats: the same bits, 200 times; shapes: a list of lengths and heads; cases: all those of the checker
profile    Nsight Compute on each step and cuDNN at a large shape: the tensor pipe, what the warps wait for
stamps     the multiprocessor's clock in two steps: what a consumer does in a part, in cycles (flashlab.bench.clocked)
counters   Nsight Compute's counts of a small launch of each step, beside the emulator's
planted    kernels with one mistake each: is the result right, and what does compute-sanitizer say?
sanitizer  what each tool of compute-sanitizer says of one launch of each step

Every o is compared with float64 by the checker's rule (flashlab.check.tolerance), on long rows a sample of it:
`of_bound` is the largest error as a part of what is allowed. A kernel of phase 11 that is wrong has a time, but counts
nowhere. FlashAttention-4 compiles for minutes: with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 several processes do so
beforehand. TFLOP/s count 4 Nq Nk D for each head, half if causal, and 2.5 times that backward.
"""

import functools
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from flashlab.attention import triton_forward
from flashlab.bench import harness, hopper_backward, hopper_inputs, hopper_jobs, ncu, peers, timing, truth, validation
from flashlab.bench.clocked import clocked, cycles
from flashlab.bench.harness import Row, Way
from flashlab.bench.hopper_inputs import Inputs
from flashlab.bench.hopper_jobs import BOXES, CUDNN, DTYPES, FA2, FA4, OURS, P9, TRITON, defines_of, last, step_of
from flashlab.bench.hopper_results import goal_table
from flashlab.bench.mma import Variant
from flashlab.bench.peers import fa4
from flashlab.bench.records import version_of
from flashlab.bench.validation import Count
from flashlab.check import CheckFailed, verify
from flashlab.check.mistakes.hopper import MUTANTS
from flashlab.cuda import CudaModule, load_inline

CACHED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


# ---- the kernels -----------------------------------------------------------------------------------------------------
Key = tuple[str, int, torch.dtype]  # a step with its macros, head_dim, dtype
_modules: dict[Key, CudaModule | Exception] = {}
_unsound: set[str] = set()  # the steps whose trial failed


def module_of(name: str, head_dim: int, dtype: torch.dtype) -> CudaModule:
    """The compiled kernel: for this GPU, or for the emulator where there is none. One that failed is left at that."""
    key = (name, head_dim, dtype)
    if key not in _modules:
        backend = "nvcc" if harness.on_gpu() else "emulator"
        try:
            one, defines = step_of(name), dict(defines_of(name))
            if head_dim not in one.head_dims or dtype not in one.dtypes:
                raise ValueError(f"{one.name} is not written for {dtype} with a head_dim of {head_dim}")
            _modules[key] = load_inline(one, backend=backend, head_dim=head_dim, dtype=dtype, defines=defines)
        except Exception as error:
            _modules[key] = error
    found = _modules[key]
    if isinstance(found, Exception):
        raise found
    return found


def wanted_modules(todo: Iterable[Row]) -> list[Key]:
    """What these jobs need of nvcc, each once."""
    ours, found = last(), []
    for job in todo:
        part, dtype = job["part"], DTYPES[job.get("dtype", "bf16")]
        if part in ("planted", "backward", "stamps"):  # the last two build their own
            continue
        if part in ("counters", "profile", "sanitizer"):
            found += [(v.name, v.head_dim, v.dtype) for v in launched()]
        elif job.get("what") == "cases":
            found += [(ours.name, d, t) for d in ours.head_dims for t in ours.dtypes]
        else:
            names = hopper_jobs.steps_of(job) + ([P9] if part in ("shapes", "sizes", "ladder") else [])
            found += [(name, job.get("head_dim") or job["shape"][3], dtype) for name in names]
    return [key for key in dict.fromkeys(found) if key[1] in step_of(key[0]).head_dims]


_TRIED = ((1, 2, 2, 1, 1), (2, 6, 2, 300, 300), (4, 16, 16, 4096, 4096))  # batch, heads, key heads, queries, keys


def try_out(step: str, *builds: str) -> None:
    """Launches builds of a step, such as "128 bf16", at a few shapes. Raises ValueError where a result is wrong."""
    for build, causal in itertools.product(builds, (False, True)):
        d, dtype = build.split()
        forward = module_of(step, int(d), DTYPES[dtype]).forward
        found = truth.compared(forward, _TRIED, int(d), DTYPES[dtype], causal)
        if found["wrong"]:
            where = f"D = {d}, {dtype}, {'causal' if causal else 'whole'}"
            raise ValueError(f"at {where} it is wrong: {found}")


def forward_of(name: str, *qkv: torch.Tensor, causal: bool) -> Way:
    """The forward pass of OURS, of a step, or of a peer, on these tensors. Raises where it cannot be had here."""
    q, k, v = qkv
    if name in (CUDNN, FA2, FA4):
        return peers.attention(name, q, k, v, causal)
    if name in (TRITON, BOXES):
        return functools.partial(triton_forward.flash_attention_forward, q, k, v, causal=causal, tma=name == BOXES)
    name = last().name if name == OURS else name
    return functools.partial(module_of(name, q.shape[3], q.dtype).forward, q, k, v, causal=causal)


# ---- the tensors, and what is right ----------------------------------------------------------------------------------
def make(job: Row) -> Inputs:
    """q, k, v of a job."""
    batch, heads, rows, head_dim = job["shape"]
    kv_heads, keys = job.get("kv_heads", heads), job.get("keys", rows)
    by_token = job.get("kind") == "by token"
    sizes = [(heads, rows), (kv_heads, keys), (kv_heads, keys)]
    shapes = [(batch, n, h, head_dim) if by_token else (batch, h, n, head_dim) for h, n in sizes]
    drawn = harness.draw(*shapes, dtype=DTYPES[job.get("dtype", "bf16")], seed=sum(job["shape"]))
    q, k, v = (x.transpose(1, 2) if by_token else x for x in drawn)
    hopper_inputs.shaped(job.get("inputs", "random"), q, k, v)
    return q, k, v


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure(job: Row, rounds: int = 9, captured: Path | None = None) -> list[Row]:
    """The rows of a job. captured: the file of tools/capture_scores.py."""
    part = job["part"]
    if part == "backward":
        return hopper_backward.measure(job, rounds)
    if part == "validate":
        return [job | {"name": OURS} | validate(job)]
    if part == "planted":
        return [job | planted(job["what"])]
    if part in ("counters", "profile", "sanitizer"):
        if not sound():
            return [harness.failed(job, "no step can be launched")]
        if part == "sanitizer":
            said = validation.sanitize(harness.calling(launch_all, *sound()), job["tool"], timeout=180)
            return [job | {"name": "all", "said": said}]
        return [job | row for row in (count() if part == "counters" else profile())]
    if part == "clock":
        return measure_clock(job)
    if part == "stamps":
        return measure_stamps(job)
    names = hopper_jobs.steps_of(job)
    if part in ("inputs", "captured"):
        return measure_inputs(job, [OURS, *names[1:], CUDNN, FA2, FA4], rounds, captured)
    # Triton's descriptors are nothing for the interpreter, nor for older chips.
    boxes = harness.on_gpu() and torch.cuda.get_device_capability() >= (9, 0)
    here = [name for name in hopper_jobs.PEERS if boxes or name != BOXES]
    names = [OURS, *here, *names[1:]] if part in ("shapes", "sizes") else [*names, P9, CUDNN]
    return compared(job, names, rounds, harness.sets_of(make(job)))


def measure_inputs(job: Row, names: Sequence[str], rounds: int, captured: Path | None) -> list[Row]:
    """`compared`, over whole heads, and in our row how many tiles are doubted of so many that are trusted."""
    if job["part"] == "captured":
        inputs, counted = hopper_inputs.captured(job["inputs"], job["layer"], job["shape"], captured)
        if inputs is None:
            return [job | {"name": OURS} | counted._asdict()]
    else:
        inputs = make(job)
        counted = hopper_inputs.doubts(*inputs[:2], causal=job["causal"])
    rows = compared(job, names, rounds, [inputs])
    return [row | counted._asdict() if row["name"] == OURS else row for row in rows]


def measure_stamps(job: Row) -> list[Row]:
    """A row for each of two steps, the last before O's way out was shortened and the last: cycles between its marks."""
    q, k, v = make(job)
    found = []
    for step in (hopper_jobs.LEARNS, last().name):
        module = load_inline(clocked(step_of(step)), head_dim=q.shape[3], dtype=q.dtype)
        for _ in range(3):  # of which the last one counts
            module.forward(q, k, v, causal=job["causal"])
            passed = cycles(module)
        found.append(job | {"name": step, "cycles": passed})
    return found


def measure_clock(job: Row) -> list[Row]:
    """A row for each kernel, and for a product of 8192 x 8192 matrices: its speed and the clock when it runs alone."""
    q, k, v = make(job)
    draw = torch.zeros if job["inputs"] == "zeros" else torch.randn
    a = draw(8192, 8192, device=q.device, dtype=q.dtype)
    who = [OURS, CUDNN, FA2, FA4]
    ways, reasons = timing.made(who, lambda name: forward_of(name, q, k, v, causal=job["causal"]))
    able, more = timing.able(ways | {"matmul": lambda: a @ a})
    found = timing.sustained(able)
    product = {"matmul": found.pop("matmul")} if "matmul" in found else {}
    rows = harness.rows_of(job, found, reasons | more, harness.work_of(job))
    return rows + harness.rows_of(job, product, {}, 2.0 * 8192**3)


def compared(job: Row, names: Sequence[str], rounds: int, several: Sequence[Sequence[torch.Tensor]]) -> list[Row]:
    """A row for each of the names: their times in turns, and how far from right each is, of other inputs over whole
    heads. several: sets of q, k and v."""
    causal = job["causal"]
    ways, reasons = timing.made(names, lambda name: [forward_of(name, *qkv, causal=causal) for qkv in several])
    found, more = times(ways, rounds)
    q, k, v = several[0]
    wanted = truth.pieces(q, k, v, causal, q.shape[2] if job["part"] in ("inputs", "captured") else None)
    for name in found:
        found[name] |= truth.judged(ways[name][0](), wanted)
    if OURS in found:
        found[OURS]["step"] = last().name
    return harness.rows_of(job, found, reasons | more, harness.work_of(job))


def times(ways: Mapping[str, Sequence[Way]], rounds: int) -> tuple[dict[str, Row], dict[str, str]]:
    """harness.times_of. One that cannot be recorded into a graph leaves the others theirs, and its row says so."""
    found, reasons = harness.times_of(ways, rounds)
    if FA4 in found and not all(row.get("graph", True) for row in found.values()):
        alone = found[FA4]
        found, _ = harness.times_of({name: way for name, way in ways.items() if name != FA4}, rounds)
        found[FA4] = alone
    return found, reasons


# ---- validation ------------------------------------------------------------------------------------------------------
LISTED = (
    (1, 1), (1, 147), (1, 239), (2, 1), (3, 513), (3, 799), (127, 513), (113, 203), (108, 256), (239, 1), (799, 3),
    (512, 256), (640, 128), (1023, 1024), (1024, 1023), (0, 16), (16, 0), (176, 176), (2049, 2049),
)  # fmt: skip
"""Queries and keys: flash-attention's own test list, nothing at all, and more than a grid of tiles at once."""
HEADS = ((2, 2, 2), (1, 6, 2), (1, 4, 1), (1, 7, 1), (0, 2, 2))  # batch, heads, key heads


def listed(most: int | None) -> Iterator[truth.Case]:
    """None longer than most."""
    for (rows, keys), heads in itertools.product(LISTED, HEADS):
        if most is None or max(rows, keys) <= most:
            yield *heads, rows, keys


def validate(job: Row) -> Row:
    """What is found of the last step. Of "repeats" `different`: how many gave other bits of o or lse than the first
    run; of "shapes" see truth.compared."""
    step: Row = {"step": last().name}
    if job["what"] == "cases":
        return step | checked()
    if job["what"] == "shapes":
        dtype = DTYPES[job["dtype"]]
        forward = module_of(last().name, job["head_dim"], dtype).forward
        return step | truth.compared(forward, listed(job.get("most")), job["head_dim"], dtype, job["causal"])
    way = forward_of(OURS, *make(job), causal=job["causal"])
    return step | {"different": hopper_backward.different(way, way(), job["repeats"])}


def checked() -> Row:
    """The checker's own cases, all of them: what a learner's kernel has to pass, and longer ones."""
    ours = last()

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None):
        return module_of(ours.name, q.shape[3], q.dtype).forward(q, k, v, causal=causal, scale=scale)

    about: dict[str, Any] = {"dtypes": ours.dtypes, "head_dims": ours.head_dims}
    try:
        report = verify(kernel, causal=True, gqa=True, empty=True, deterministic=True, full=True, **about)
    except CheckFailed as failed:
        return {"wrong": [str(failed).partition("\n")[0]]}
    return {"cases": report.cases, "wrong": [], "worst_of_twin": report.worst}


# ---- counters --------------------------------------------------------------------------------------------------------
PLANTED_TOOLS = ("racecheck", "memcheck", "synccheck")
METRICS = {
    "wgmma, by warp": Count("smsp__inst_executed_pipe_tensor_op_gmma.sum", ("wgmma",), 4),  # counted by warpgroup there
    "TMA instructions": Count(
        "sm__inst_executed_pipe_tma.sum", ("tma_loads", "tma_stores", "tma_reduces", "bulk_loads", "bulk_stores")
    ),
    "bytes loaded by TMA": Count(
        "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum", ("tma_load_global_bytes", "bulk_load_global_bytes")
    ),
    "bytes stored by TMA": Count(
        "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum",
        ("tma_store_global_bytes", "bulk_store_global_bytes"),
    ),
} | {
    name: validation.METRICS[name]
    for name in ("shared read wavefronts", "shared write wavefronts", "global read sectors", "global write sectors")
}
"""What both count. A metric that an ncu does not know is left out."""
_STALLS = ("gmma", "long_scoreboard", "barrier", "sleeping", "wait", "math_pipe_throttle", "short_scoreboard",
           "mio_throttle", "not_selected", "selected", "branch_resolve", "no_instruction")  # fmt: skip
_TIME = {"nanoseconds": "gpu__time_duration.sum"}
PROFILED = {
    **_TIME,
    "registers": "launch__registers_per_thread",
    "tensor pipe, % of the time": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "bytes from L2 by TMA": METRICS["bytes loaded by TMA"].metric,
    "bytes from memory": "dram__bytes_read.sum",
    **{f"stalled: {x}": f"smsp__average_warps_issue_stalled_{x}_per_issue_active.ratio" for x in _STALLS},
}


def launched() -> list[Variant]:
    """Every step at one head_dim, and the last at each that it is written for; in bf16, for which it is built anyway,
    where it takes that."""
    found = [(one, 64 if 64 in one.head_dims else one.head_dims[0]) for one in hopper_jobs.ladder()]
    found += [(one, d) for one in hopper_jobs.ladder()[-1:] for d in one.head_dims if (one, d) not in found]
    bf16 = torch.bfloat16
    return [Variant(one, d, bf16 if bf16 in one.dtypes else one.dtypes[0]) for one, d in found]


def sound() -> list[str]:
    """The steps of which nothing is known that speaks against a launch."""
    return [one.name for one in hopper_jobs.ladder() if one.name not in _unsound]


def launch_all(*names: str) -> None:
    """Each of these steps once, small; announced, for the profiler and the sanitizer."""
    for v in launched():
        if v.name not in names:
            continue
        key = (v.name, v.head_dim, v.dtype)
        if why := _tried(key):
            print(f"left out: {v.name}: {why}", file=sys.stderr)
            continue
        print("LAUNCH " + json.dumps([v.name, v.head_dim]), flush=True)
        module_of(*key).forward(*(x.cuda() for x in validation.inputs(v)), causal=True)
        torch.cuda.synchronize()


def launch_planted(mistake: str) -> None:
    """A kernel of the zoo, once and small. Prints whether its result is within the rule."""
    mutant = next(m for m in MUTANTS if m.name == mistake)
    module = load_inline(mutant.source().text, backend="nvcc", head_dim=64, dtype=torch.bfloat16)
    q, k, v = (
        x.bfloat16().cuda() for x in harness.draw(*[(1, 2, 1000, 64)] * 3, dtype=torch.float32, seed=7, device="cpu")
    )
    out = module.forward(q, k, v, causal=False)
    torch.cuda.synchronize()
    print(f"RESULT {'right' if truth.right(truth.judged(out, truth.pieces(q, k, v, False))) else 'wrong'}", flush=True)


def planted(mistake: str) -> Row:
    """name: the step that was edited. result: of the broken kernel, "right", "wrong" or none. said: by each tool."""
    again = harness.calling(launch_planted, mistake)
    done = harness.again(*again, capture_output=True, text=True, timeout=240)
    result = re.findall(r"^RESULT (\w+)$", done.stdout, re.M)
    said = {tool: validation.sanitize(again, tool, timeout=240) for tool in PLANTED_TOOLS}
    file = next(m.file for m in MUTANTS if m.name == mistake)
    return {"name": file, "result": result[-1] if result else "none", "said": said}


def launch_big(*names: str) -> None:
    """Each of these steps, and cuDNN, once at the first shape of the ladder; for the profiler."""
    shape, causal = hopper_jobs.LADDER[0]
    q, k, v = make({"shape": shape})
    for name in [*names, CUDNN]:
        try:
            way = forward_of(name, q, k, v, causal=causal)
            way()
        except Exception as error:
            print(f"left out: {name}: {timing.reason(error)}", file=sys.stderr)
            continue
        torch.cuda.synchronize()
        print("LAUNCH " + json.dumps(name), flush=True)
        torch.cuda.profiler.start()
        way()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def count() -> list[Row]:
    """A row for each step launched small: pairs [emulated, native], of what both count. Raises NoGpu without ncu."""
    todo = launched()
    harness.at_once(validation.watched, todo)  # to run is short
    metrics = ncu.known(_TIME | {name: m.metric for name, m in METRICS.items()})
    native = _by_launch(ncu.profile(harness.calling(launch_all, *sound()), metrics, timeout=300))
    found = []
    for v in todo:
        about: Row = {"name": v.name, "head_dim": v.head_dim}
        try:
            _, emulated = validation.emulate(v, METRICS)
        except Exception as error:
            found.append(about | {"unavailable": f"in the emulator: {timing.reason(error)}"})
            continue
        counted = native.get(json.dumps([v.name, v.head_dim]), {})
        pairs = {
            name: [emulated[name], counted[name]]
            for name in metrics
            if name in emulated and counted.get(name) is not None
        }
        found.append(about | {"counters": pairs, "native": counted})
    return found


def profile() -> list[Row]:
    """A row for each step, and cuDNN, at a large shape: where the time goes. Raises NoGpu without ncu."""
    metrics = ncu.known(PROFILED)
    rows = ncu.profile(harness.calling(launch_big, *sound()), metrics, only_marked=True, timeout=300)
    return [{"name": json.loads(launch)} | row for launch, row in _by_launch(rows).items()]


def _by_launch(rows: Sequence[Row]) -> dict[str, Row]:
    """By what was announced: the metrics; of several kernels of one launch those of the longest."""
    order = sorted((row for row in rows if row["launch"]), key=lambda row: row.get("nanoseconds") or 0.0)
    return {json.dumps(row["launch"]): {k: x for k, x in row.items() if k != "launch"} for row in order}


# ---- before the measurements -----------------------------------------------------------------------------------------
def prepare(todo: Sequence[Row], until: float, **options: Any) -> Row:
    """Builds what the jobs need, by as many compilers as there are cores, and tries it out."""
    start = time.monotonic()
    room = 2 * (until - start) / hopper_jobs.SECONDS  # the time is up at twice that
    todo = [job for i, job in enumerate(todo) if i < room]
    keys = wanted_modules(todo)
    parts = ("shapes", "sizes", "inputs", "captured", "clock")
    compiled = {(j["dtype"], j["shape"][3], j["causal"]) for j in todo if j["part"] in parts}
    names = ([TRITON, BOXES] if any(job["part"] in ("shapes", "sizes") for job in todo) else []) + (
        [FA4] if os.environ.get(CACHED) == "1" and fa4()[0] else []
    )
    tasks = [(name, *variant) for variant in sorted(compiled) for name in names]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        built = threads.map(_tried, keys)
        harness.compiled_by(max(1, min(8, (os.cpu_count() or 2) // 2)), warm, tasks, until)
        failed = [f"{key[0]}, D = {key[1]}: {why}" for key, why in zip(keys, built, strict=True) if why]
    took = time.monotonic() - start
    print(f"built {len(keys) - len(failed)} of {len(keys)} kernels in {took:.0f} s", file=sys.stderr)
    named = {t: name for name, t in DTYPES.items()}
    builds: dict[str, list[str]] = {}
    for name, head_dim, dtype in keys:
        if step_of(name).phase == hopper_jobs.PHASE and not isinstance(_modules[name, head_dim, dtype], Exception):
            builds.setdefault(name, []).append(f"{head_dim} {named[dtype]}")

    def tried(name: str) -> str | None:
        return harness.trial(*harness.calling(try_out, name, *builds[name]), seconds=60.0 + 15 * len(builds[name]))

    # Each takes seconds to begin, and milliseconds of the GPU.
    for name, reason in zip(builds, harness.at_once(tried, builds, 4), strict=True):
        if reason:
            failed.append(f"{name}: {reason}")
            _unsound.add(name)
            _modules.update({key: RuntimeError(reason) for key in keys if key[0] == name})
    for line in failed:
        print(f"  {line}", file=sys.stderr)
    # Without it a record keeps the version that its rows are of.
    there = {"flash_attention_4": version_of("flash-attn-4") or "a version without a name"} if fa4()[0] else {}
    return {"not_built": failed} | there


def _tried(key: Key) -> str:
    try:
        module_of(*key)
    except Exception as error:
        return timing.reason(error)
    return ""


def warm(name: str, dtype: str, head_dim: int, causal: bool) -> None:
    """In a process of its own: what compiles itself when it is called first, and keeps what it compiled on the disk."""
    q, k, v = make({"shape": [1, 4, 256, head_dim], "dtype": dtype})
    forward_of(name, q, k, v, causal=causal)()
    torch.cuda.synchronize()


jobs, quick_jobs, table = hopper_jobs.jobs, hopper_jobs.quick_jobs, goal_table
BENCH = harness.Bench(
    __name__, "phase 11 is", minutes=8.0, facts={"dtype": "bfloat16"},
    keys=("kind", "inputs", "layer", "shape", "kv_heads", "keys", "causal", "dtype", "what", "head_dim", "tool",
          "name"),
    options={
        "rounds": {"type": int, "default": 9},
        "captured": {"type": Path, "metavar": "FILE", "help": "that tools/capture_scores.py wrote"},
    },
)  # fmt: skip
main = BENCH.main
