"""What the hardware itself does: the rates that the lectures argue with, and the facts that they state about it.

rates       per clock and multiprocessor: MMAs of mma.sync, exponentials, multiply-adds, wavefronts of ldmatrix
sums        how the tensor cores add: what is cut off, what is rounded
zero_copy   a cp.async of no bytes from an address that is nobody's
float32     whether PyTorch's fused float32 attention runs on the tensor cores, with TF32 off
traffic     bytes of DRAM and of L2, by ncu, beside the sizes of the tensors and the formulas
naive       which kernels PyTorch runs for naive attention, and how long each, over the length
workspace   what FlashAttention-2 allocates beside its result, over the number of heads
stalls      where a kernel's issue slots go, by ncu
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import cost
from flashlab.attention.naive import naive_attention
from flashlab.attention.triton_minimal import flash_attention_forward
from flashlab.bench import harness, ncu, peers, timing
from flashlab.bench.harness import Data, Row
from flashlab.bench.rows import where
from flashlab.cuda import load_inline
from flashlab.figures import fragments
from flashlab.kernels import SERIES, path, step
from flashlab.table import Table

SOURCE = Path(__file__).with_name("hardware.cu")
CHAINS, UNROLL, WARP = 8, 4, 32  # of hardware.cu
# The instruction, and what is counted of it: units per instruction of a warp.
RATES = {
    "mma, float32 sums": 1,
    "mma, float16 sums": 1,
    "exponentials": WARP,
    "multiply-adds": WARP,
    "ldmatrix wavefronts": 4,
}


# ---- rates -----------------------------------------------------------------------------------------------------------
def rates(rounds: int = 4000) -> list[Row]:
    """Units per clock and multiprocessor of each instruction, with 4 to 32 warps on every multiprocessor."""
    module = load_inline(SOURCE, backend="nvcc")
    sms = runtime.limits().sms
    rows = []
    for which, (name, units) in enumerate(RATES.items()):
        for warps in (4, 8, 16, 32):
            clocks = torch.zeros(sms, dtype=torch.int64, device="cuda")
            out = torch.zeros(sms * warps * WARP, device="cuda")
            for _ in range(3):  # the last counts: the clock has risen, the code is loaded
                module.rate(which, sms, warps * WARP, rounds, clocks, out)
            torch.cuda.synchronize()
            instructions = warps * rounds * UNROLL * CHAINS
            per_clock = instructions * units / clocks.double().median().item()
            rows.append({"instruction": name, "warps": warps, "per_clock": per_clock})
    return rows


# ---- how the tensor cores add ----------------------------------------------------------------------------------------
def sums() -> list[Row]:
    """One MMA whose products and sum are known: 1 + k products of a fraction of 1's last place (2^-23); got: the sum
    in units of the last place above 1."""
    module = load_inline(path("p7_one_mma"), backend="nvcc")
    rows = []
    for count, fraction in ((1, 0.75), (1, 0.5), (2, 0.5), (4, 0.25), (8, 0.125), (15, 0.25), (3, 0.75), (15, 0.75)):
        a, b = torch.zeros(16, 16), torch.zeros(16, 8)
        a[:, 0], b[0] = 1.0, 1.0
        a[:, 1 : 1 + count], b[1 : 1 + count] = 2.0**-12, fraction * 2.0**-11  # products of fraction * 2^-23
        c = torch.zeros(32, 4, device="cuda")
        module.mma(fragments.fragment(a, "a").half().cuda(), fragments.fragment(b, "b").half().cuda(), c)
        got = fragments.matrix(c.cpu(), "c")[0, 0].item()
        rows.append({"products": count, "fraction": fraction, "got": (got - 1) * 2.0**23})
    return rows


# ---- a copy of no bytes ----------------------------------------------------------------------------------------------
ADDRESSES = {"null": 0, "unmapped": 1 << 46, "misaligned": 1 << 46 | 2}


def zero_copy() -> list[Row]:
    """What cp.async of no bytes does at addresses that are nobody's; each in a process of its own, which it may end."""
    rows = []
    for name in ADDRESSES:
        done = harness.again(*harness.calling(_zero_copy, name), capture_output=True, text=True, timeout=120)
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        rows.append({"name": name, "said": lines[-1][:200] if lines else f"status {done.returncode}"})
    return rows


def _zero_copy(name: str) -> None:
    out = torch.ones(WARP, dtype=torch.int32, device="cuda")
    load_inline(SOURCE, backend="nvcc").zero_copy(ADDRESSES[name], out)
    torch.cuda.synchronize()
    print("zeros, no error" if not out.any() else "no error, but no zeros")


# ---- under ncu -------------------------------------------------------------------------------------------------------
TRAFFIC = {
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_read_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_srcunit_tex_op_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
DRAM = {name: TRAFFIC[name] for name in ("dram_read", "dram_written")}  # one pass of ncu
TENSOR = {"tensor_instructions": "smsp__inst_executed_pipe_tensor_op_hmma.sum", "nanoseconds": TRAFFIC["nanoseconds"]}
REASONS = (
    "not_selected", "wait", "short_scoreboard", "long_scoreboard", "math_pipe_throttle", "mio_throttle",
    "barrier", "dispatch_stall", "lg_throttle", "no_instruction", "branch_resolve", "sleeping", "membar", "imc_miss",
    "drain", "tex_throttle", "misc",
)  # fmt: skip
STALLS = {
    **{name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in REASONS},
    "issue_active_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_active": "smsp__warps_active.avg.per_cycle_active",
    "warps_eligible": "smsp__warps_eligible.avg.per_cycle_active",
    "tensor_active_pct": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_active_pct": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "xu_active_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma_active_pct": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu_active_pct": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "nanoseconds": TRAFFIC["nanoseconds"],
}
LAST = SERIES[-1].name


def _last(*qkv: torch.Tensor) -> Any:
    return load_inline(step(LAST), backend="nvcc").forward(*qkv)


def _sdpa(backend: str) -> Callable[..., Any]:
    return lambda *qkv: peers.sdpa(backend, *qkv)()


# launch name -> the tensors' shape, their dtype, what is run. One head of 16384 x 64: its scores are 512 MiB in fp16.
LAUNCHES: dict[str, tuple[tuple[int, ...], torch.dtype, Callable[..., Any]]] = {
    "naive": ((1, 1, 16384, 64), torch.float16, naive_attention),
    "naive, in L2": ((1, 1, 2048, 64), torch.float16, naive_attention),
    "minimal": ((1, 1, 16384, 64), torch.float16, lambda *qkv: flash_attention_forward(*(x[0, 0] for x in qkv))),
    "fa2": ((1, 1, 16384, 64), torch.float16, _sdpa("FLASH_ATTENTION")),
    "series": ((1, 1, 16384, 64), torch.float16, _last),
    "series, 64 heads": ((4, 16, 8192, 64), torch.float16, _last),
    "efficient, float32": ((4, 16, 1024, 64), torch.float32, _sdpa("EFFICIENT_ATTENTION")),
    "math, float32": ((4, 16, 1024, 64), torch.float32, naive_attention),
    "stalls, D=128": ((4, 16, 4096, 128), torch.float16, _last),
    "stalls, D=64": ((4, 32, 4096, 64), torch.float16, _last),
    "stalls, fa2, D=128": ((4, 16, 4096, 128), torch.float16, _sdpa("FLASH_ATTENTION")),
}


def launch(name: str) -> None:
    """For ncu: one of LAUNCHES, with the L2 cache flushed before it."""
    shape, dtype, run = LAUNCHES[name]
    torch.backends.cuda.matmul.allow_tf32 = False
    q, k, v = harness.draw(*[shape] * 3, dtype=dtype)
    run(q, k, v)  # builds, workspaces
    torch.cuda.synchronize()
    torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda").max()  # read too: no written line is left in L2
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(name: str, metrics: dict[str, str], *, keep_caches: bool = False) -> list[Row]:
    """ncu's counters of the kernels of one of LAUNCHES; keep_caches: see ncu.profile."""
    rows = ncu.profile(harness.calling(launch, name), metrics, only_marked=True, keep_caches=keep_caches)
    return [{"launch": name} | {k: x for k, x in row.items() if k != "launch"} for row in rows]


def traffic() -> list[Row]:
    """DRAM and L2 bytes of each kernel, and what the tensors and the formulas say of the whole launch.

    ncu empties the caches before each kernel, so `dram_read` has what the kernel before wrote too; of the launches of
    several kernels `kept_read` and `kept_written` are DRAM bytes with the caches left alone.
    """
    rows = []
    for name in ("naive", "naive, in L2", "minimal", "fa2", "series", "series, 64 heads"):
        (batch, heads, n, d), dtype, _ = LAUNCHES[name]
        block_m = 64 if name == "minimal" else 128
        formula = cost.naive_cost(n, d) if name.startswith("naive") else cost.flash_cost(n, n, d, block_m)
        compulsory = 4 * batch * heads * n * d * dtype.itemsize
        kept = counted(name, DRAM, keep_caches=True) if name.startswith("naive") else []
        for i, row in enumerate(counted(name, TRAFFIC)):
            if kept:
                row |= {"kept_read": kept[i]["dram_read"], "kept_written": kept[i]["dram_written"]}
            rows.append(row | {
                "shape": [batch, heads, n, d], "compulsory_bytes": compulsory,
                "formula_read": batch * heads * formula.bytes_read,
                "formula_written": batch * heads * formula.bytes_written,
            })  # fmt: skip
    return rows


def moved(run: Data, name: str) -> dict[str, int] | None:
    """Bytes of all kernels of a recorded launch; None where the run has no counters of it.

    tensors: q, k, v and o once. asked: by the formula. l2: what the multiprocessors got from and gave to L2. dram.
    """
    if not (rows := where(run["rows"], part="traffic", launch=name)):
        return None
    return {
        "tensors": rows[0]["compulsory_bytes"],
        "asked": rows[0]["formula_read"] + rows[0]["formula_written"],
        "l2": int(32 * sum(r["l2_read_sectors"] + r["l2_write_sectors"] for r in rows)),  # 32 bytes per sector
        "dram": int(sum(r["dram_read"] + r["dram_written"] for r in rows)),
    }


# ---- naive attention's kernels ---------------------------------------------------------------------------------------
def naive_kernels() -> list[Row]:
    """Microseconds of each of PyTorch's four kinds of kernel (scores, scale, softmax, output) at phase 1's shapes."""
    rows = []
    for n in (2048, 4096, 8192, 16384):
        q, k, v = harness.draw(*[(1, 16, n, 128)] * 3, dtype=torch.float16)
        for _ in range(3):
            naive_attention(q, k, v)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            naive_attention(q, k, v)
            torch.cuda.synchronize()
        launched = sorted((e for e in profiler.events() if e.device_time_total > 5), key=lambda e: e.time_range.start)
        for kernel in dict.fromkeys(e.name for e in launched):  # a large tensor is scaled by several launches
            microseconds = sum(e.device_time_total for e in launched if e.name == kernel)
            rows.append({"seq_len": n, "kernel": kernel, "microseconds": microseconds})
    return rows


# ---- what FlashAttention-2 allocates ---------------------------------------------------------------------------------
def workspace() -> list[Row]:
    """Bytes that a call allocates at most, beside its output and lse, by the number of heads and the length."""
    rows = []
    for backend, heads, n in itertools.product(
        ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"), (1, 4, 16, 64, 128), (512, 1024, 2048, 4096, 8192, 16384)
    ):
        q, k, v = harness.draw(*[(1, heads, n, 64)] * 3, dtype=torch.float16)
        way = peers.sdpa(backend, q, k, v)
        way()
        peak = timing.allocated(way)
        own = q.nbytes + (heads * n * 4 if backend == "FLASH_ATTENTION" else 0)  # lse; the other leaves it out
        rows.append({"backend": backend, "heads": heads, "seq_len": n, "peak_bytes": peak, "beside": peak - own})
    return rows


# ---- the whole -------------------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], list[Row]]] = {
    "rates": rates, "sums": sums, "zero_copy": zero_copy, "workspace": workspace, "naive": naive_kernels,
    "float32": lambda: [r for n in ("efficient, float32", "math, float32") for r in counted(n, TENSOR)],
    "traffic": traffic,
    "stalls": lambda: [r for n in LAUNCHES if n.startswith("stalls") for r in counted(n, STALLS)],
}  # fmt: skip


def jobs() -> list[Row]:
    return [{"part": part} for part in PARTS]


def measure(job: Row) -> list[Row]:
    return [job | row for row in PARTS[job["part"]]()]


def table(data: Data) -> Table:
    """The highest rate of each instruction, and which parts there are."""
    best: dict[str, float] = {}
    for r in where(data["rows"], part="rates"):
        best[r["instruction"]] = max(best.get(r["instruction"], 0.0), r["per_clock"])
    rows = [[name, rate, f"{data['machine']['gpu']}, per clock and multiprocessor"] for name, rate in best.items()]
    for part in PARTS if best else ():
        found = where(data["rows"], part=part)
        rows += [[part, "failed" if "unavailable" in found[0] else len(found), "rows"]] if found[:1] else []
    return Table.of(rows, ["what", "measured", "unit"])


BENCH = harness.Bench(__name__, "the hardware is", ("launch", "kernel"), quick_too=True, quick=5)  # needs no ncu
main, recorded = BENCH.main, BENCH.recorded
STALL_COLUMNS = ("per issued instruction, warps wait", "ours, D = 64", "ours, D = 128", "FlashAttention-2, D = 128")
_STALL_LAUNCHES = ("stalls, D=64", "stalls, D=128", "stalls, fa2, D=128")
_OVERALL = {
    "issue_active_pct": "clocks in which a scheduler issues, %",
    "warps_eligible": "warps that could issue, per clock",
    "tensor_active_pct": "tensor pipe active, %",
    "shared_active_pct": "shared memory active, %",
}


def stall_rows(run: Data, reasons: int = 7) -> list[list[Any]]:
    """A recorded run's stalls under STALL_COLUMNS: the largest reasons of all launches, then how busy the units are."""
    found = {r.get("launch"): r for r in where(run["rows"], part="stalls")}
    launches = [found.get(name, {}) for name in _STALL_LAUNCHES]
    largest = sorted(REASONS, key=lambda name: -max((r.get(name) or 0.0) for r in launches))[:reasons]
    return [
        [label, *("" if r.get(name) is None else f"{r[name]:.2f}" for r in launches)]
        for name, label in [*((n, n.replace("_", " ")) for n in largest), *_OVERALL.items()]
    ]
