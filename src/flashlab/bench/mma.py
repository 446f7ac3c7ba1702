"""Phases 7 to 9 on a GPU: every step against FlashAttention-2, and the last one against its peers.

ladder     every step at a few shapes, interleaved with FlashAttention-2; registers and spills as ptxas reports them
exhibits   every exhibit beside its step, with its error
final      the last step, FlashAttention-2, cuDNN and unfused PyTorch, at the published tables' shapes and at large ones
published  the five variants of published/mma_stages_ada.csv again, at its 36 shapes, each with its first outputs
counters   what Nsight Compute counts for one launch of each step, where ``ncu`` is installed

Every kernel is first checked against float64. Inputs stay in L2 where they fit, for every peer alike. A row's
``inputs`` are "randn", where a row's maximum hardly moves after the first tile of keys, or "moving", where it moves far
in every tile: what a kernel saves by not rescaling O shows only beside the two.
"""

import functools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.bench import harness, ncu, peers, published, truth
from flashlab.bench.harness import Data, Row, Way, jobs_of
from flashlab.bench.records import NoGpu
from flashlab.bench.resources import tile_of
from flashlab.bench.rows import where
from flashlab.cuda import CudaModule, load_inline
from flashlab.cuda.resources import Resources, resources
from flashlab.cuda.toolchain import device_arch
from flashlab.kernels import SERIES as ALL
from flashlab.kernels import SIDE, Step, step

ROUNDS = 9
SERIES = tuple(s for s in ALL if torch.float16 in s.dtypes)  # those on the tensor cores
STAGES_ADA = {
    "naive_unfused": "unfused", "mma_naive": "p7_naive", "mma_stage1": "p8_6_store STAGES=1",
    "mma_stage2": "p8_6_store", "flash_official": "fa2",
}  # fmt: skip
"""The variants of published/mma_stages_ada.csv, and what here has done the same work."""
KINDS = {"exhibits": "last", "final": "last", "published": "published"}
"""Which kernels a part needs, where it does not need every one."""
Shape = Sequence[int]  # batch, heads, seq_len, head_dim
Case = tuple[Shape, bool, str]  # shape, causal, inputs

BIG: list[tuple[Shape, bool]] = [
    ((4, 16, 4096, 128), False), ((4, 16, 4096, 128), True), ((4, 32, 4096, 64), False), ((4, 32, 4096, 64), True),
]  # fmt: skip
SMALL: list[Shape] = [(1, 1, 1024, 64), (2, 8, 2048, 64), (1, 4, 1024, 128), (4, 8, 2048, 128)]
MORE: list[tuple[Shape, bool]] = [
    (shape, causal)
    for shape in ((16, 16, 1024, 128), (16, 32, 1024, 64), (1, 16, 16384, 128), (4, 8, 4096, 256))
    for causal in (False, True)
]
LADDER: list[Case] = [
    *((shape, causal, kind) for kind in ("randn", "moving") for shape, causal in BIG),
    *((shape, False, "randn") for shape in SMALL),
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


# ---- what is measured ------------------------------------------------------------------------------------------------
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

    def load(self) -> CudaModule:
        """Built by nvcc, or found built."""
        return load_inline(
            self.step, backend="nvcc", head_dim=self.head_dim, dtype=self.dtype, defines=dict(self.defines)
        )


def variants(dtypes: Sequence[torch.dtype] = (torch.float16,), only_last: bool = False) -> list[Variant]:
    """Every step at every head_dim, and beside the default of a define its other values, in each step that has it."""
    found = []
    for one in SERIES[-1:] if only_last else SERIES:
        for head_dim in one.head_dims:
            for dtype in dtypes:
                others = [((define, v),) for define, values in one.defines.items() for v in values[1:]]
                found += [Variant(one, head_dim, dtype, defines) for defines in [(), *others]]
    return found


Built = list[tuple[Variant, CudaModule]]


def build(wanted: Sequence[Variant]) -> Built:
    """The variants, built in parallel. Raises flashlab.cuda.Unavailable, CompileError."""
    return list(zip(wanted, harness.at_once(Variant.load, wanted), strict=True))


def main_kernel(found: Iterable[Resources], causal: bool) -> Resources | None:
    """Of a step's kernels the one that a large grid runs: of its mask, with the largest tile, the keys not split."""
    suited = [(tile, r) for r in found if (tile := tile_of(r, causal))]
    return max(suited, key=lambda pair: pair[0])[1] if suited else None


def compiled(variant: Variant) -> list[Resources]:
    """Registers and spills of the variant's kernels: of the very build that is measured."""
    return resources(
        variant.step, target=device_arch(), head_dim=variant.head_dim, dtype=variant.dtype, launches=False,
        **dict(variant.defines),
    )  # fmt: skip


# ---- checking --------------------------------------------------------------------------------------------------------
# batch, heads, kv_heads, seq_q, seq_k: ragged lengths, seq_q != seq_k both ways, grouped heads.
CASES = (
    (2, 4, 2, 300, 300), (1, 2, 2, 64, 130), (2, 4, 1, 513, 100),
    (1, 1, 1, 1, 147), (1, 3, 1, 3, 799), (2, 8, 2, 700, 1023),
)  # fmt: skip


def verify(name: str, head_dim: int, dtype: torch.dtype, module: CudaModule) -> float:
    """The worst error against float64, as a part of what is allowed; raises AssertionError above that.

    Causal and not, strides of both layouts; what a kernel does not write is NaN.
    """
    found = []
    for causal in (False, True):
        found.append(truth.compared(module.forward, CASES, head_dim, dtype, causal))
        moving = q, k, values = [x.to(dtype) for x in inputs((1, 2, 512, head_dim), "moving")]
        found.append(truth.judged(module.forward(*moving, causal=causal), truth.pieces(q, k, values, causal)))
    assert all(map(truth.right, found)), f"{name} {dtype} D={head_dim} is wrong: {found}"
    return max(row["of_bound"] for row in found)


# ---- inputs ----------------------------------------------------------------------------------------------------------
MOVE = 12.0
"""How far, in log2 units after the scale, the maximum of a row moves from one tile of 64 keys to the next, "moving"."""


def inputs(shape: Sequence[int], kind: str = "randn", device: Any = None) -> list[torch.Tensor]:
    """q, k, v in fp16, [batch, heads, seq_len, head_dim].

    "moving": one component of all queries is 8, and that of the keys rises from each tile of 64 to the tile before it,
    so that the scores rise by MOVE. FlashAttention-2, and the steps that may leave O as it is, read the keys from the
    last to the first: every tile moves the maximum of every row by more than the 8 that such a step would let pass. The
    other steps rescale in every tile, whatever the numbers.

    Raises:
        ValueError: another kind.
    """
    device = device or runtime.device()
    q, k, v = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(3))
    if kind == "moving":
        tiles = (shape[2] - 1 - torch.arange(shape[2], device=device)) // 64  # after the one that the key is in
        q[..., 0] = 8.0
        k[..., 0] = tiles * (MOVE / 8.0 * math.sqrt(shape[3]) * math.log(2))
    elif kind != "randn":
        raise ValueError(f"inputs are randn or moving, not {kind!r}")
    return [q, k, v]


# ---- measuring -------------------------------------------------------------------------------------------------------
def about(case: Case) -> Row:
    """A case as a job says it."""
    return {"shape": list(case[0]), "causal": case[1], "inputs": case[2]}


def rows_of(job: Row, times: Mapping[str, Row], reasons: Mapping[str, str]) -> list[Row]:
    """A row for each implementation of a job, with its speed over FlashAttention-2's."""
    fa2 = times.get("fa2")
    rows = harness.rows_of(job, times, reasons, harness.work_of(job))
    return [row | {"vs_fa2": fa2["ms"] / row["ms"] if fa2 else None} if "ms" in row else row for row in rows]


@functools.cache
def _built(which: str) -> Built:
    """The kernels that are measured: "every" step in fp16 and bf16, or the "last", or those of "published" in fp16."""
    if which == "published":
        return build([v for v in variants() if v.name in STAGES_ADA.values() and v.head_dim in (64, 128)])
    return build(variants((torch.float16, torch.bfloat16), which == "last"))


@functools.cache
def _kernels() -> dict[tuple[str, int], list[Resources]]:
    """Registers and spills of the kernels in fp16, by name and head_dim."""
    halves = [v for v, _ in _built("every") if v.dtype == torch.float16]
    found = harness.at_once(compiled, halves)
    return {(v.name, v.head_dim): kernels for v, kernels in zip(halves, found, strict=True)}


def _published(name: str) -> list[list[int]]:
    """The shapes of a published table."""
    columns = ("batch", "heads", "seq_len", "head_dim")
    return [list(s) for s in dict.fromkeys(tuple(int(str(r[c])) for c in columns) for r in published.load(name))]


def _kernels_of(job: Row) -> Built:
    """The kernels that a job is about. An exhibit stands beside the step from which it differs, but at a head_dim that
    only the exhibit can be compiled for."""
    part, head_dim = job["part"], job["shape"][3]
    if part == "exhibits":
        side = step(job["exhibit"])
        return build([Variant(s, head_dim) for s in (step(side.beside), side) if head_dim in s.head_dims])
    built = _built(KINDS.get(part, "every"))
    return [(v, m) for v, m in built if v == Variant(v.step, head_dim, defines=() if part == "final" else v.defines)]


PEERS = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "unfused": "eager"}
"""By the name in rows here: as flashlab.bench.peers has it."""
PEERS_OF = {"published": ("unfused", "fa2"), "final": tuple(PEERS)}
"""By part; of the others "fa2" alone."""


def measure(job: Row) -> list[Row]:
    """The rows of a job: our kernels and their peers, in turns. "ladder" with registers and spills, "published" with
    the first values of each output, "exhibits" with the error of o against float64."""
    if job["part"] == "counters":
        return measure_counters(job)
    torch.manual_seed(0)
    about: Row = {"causal": False, "inputs": "randn"}
    part, job = job["part"], about | job
    (batch, heads, n, d), causal = job["shape"], job["causal"]
    q, k, v = inputs(job["shape"], job["inputs"])
    # Unfused: no scores beyond 16 GB
    left_out = {"fa2"} if part == "exhibits" and d > 128 else {"unfused"} if batch * heads * n**2 > 2**33 else set()
    beside = [name for name in PEERS_OF.get(part, ("fa2",)) if name not in left_out]
    ways: dict[str, Way] = {name: peers.attention(PEERS[name], q, k, v, causal) for name in beside}
    ways |= {one.name: functools.partial(module.forward, q, k, v, causal=causal) for one, module in _kernels_of(job)}
    rows = rows_of(job, *harness.times_of(ways, ROUNDS))
    want = reference.attention(*(x[:1, :1] for x in (q, k, v)))[0] if part == "exhibits" else None
    for row in rows:
        kernel = main_kernel(_kernels().get((row["name"], d), []), causal) if part == "ladder" else None
        row |= {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes} if kernel else {}
        if want is not None:
            row["error"] = None
        if "ms" in row and (part == "published" or (want is not None and row["name"] not in PEERS)):
            out = ways[row["name"]]()
            o = out[0] if isinstance(out, tuple) else out
            kept = o[0, 0, 0, :3].tolist() if want is None else (o[:1, :1] - want).abs().max().item()
            row["first" if want is None else "error"] = kept
    return rows


def measure_counters(job: Row) -> list[Row]:
    """Nsight Compute's counters for one launch of each step; where there is no ncu, or it may not read them, why."""
    try:
        rows = ncu.profile(harness.calling(launch_once), METRICS, kernels="flash_forward")
    except NoGpu as missing:
        return [harness.failed(job, str(missing))]
    return [job | row["launch"] | {name: row[name] for name in METRICS} for row in rows if row["launch"]]


def launch_once() -> None:
    """For ncu: every step once at each counted shape, announced on a line."""
    built = build(variants())
    for shape in COUNTED:
        q, k, v = inputs(shape)
        for variant, module in built:
            if variant.head_dim == shape[3]:
                print("LAUNCH " + json.dumps({"shape": list(shape), "causal": False, "name": variant.name}), flush=True)
                module.forward(q, k, v)
                torch.cuda.synchronize()


# ---- the whole -------------------------------------------------------------------------------------------------------
def jobs() -> list[Row]:
    """In "final" the shapes of both published tables, and large ones, those with moving maxima too."""
    large = [shape for shape, causal in BIG if not causal]
    exhibits = [(side, shape) for side in SIDE for shape in (*large, (2, 8, 2048, 256), (2, 8, 2048, 512))
                if shape[3] in side.head_dims]  # fmt: skip
    tables: dict[str, list[Case]] = {
        name: [(s, False, "randn") for s in _published(name) if s[3] in SERIES[-1].head_dims]
        for name in ("mma_stages_ada", "fa1_f32_fa2_mma_ada")
    }
    tables["big"] = [(shape, causal, kind) for shape, causal in BIG for kind in ("randn", "moving")]
    tables["big"] += [(shape, causal, "randn") for shape, causal in MORE]
    return [
        *({"part": "ladder"} | about(case) for case in LADDER),
        *({"part": "exhibits", "exhibit": side.name, "shape": list(shape)} for side, shape in exhibits),
        *({"part": "final", "table": name} | about(case) for name, cases in tables.items() for case in cases),
        *jobs_of("published", shape=_published("mma_stages_ada")), {"part": "counters"},
    ]  # fmt: skip


def quick_jobs() -> list[Row]:
    """The large shapes alone."""
    big = [list(shape) for shape, _ in BIG]
    ladder = [job for job in where(jobs(), part="ladder") if job["shape"] == big[0]]
    return ladder + [job for job in where(jobs(), part="final", table="big") if job["shape"] in big]


def prepare(todo: Sequence[Row], until: float) -> dict[str, Any]:
    """Builds what the jobs need, and checks all of it against float64."""
    parts = {job["part"] for job in todo}
    if "exhibits" in parts:
        build([Variant(s, d) for s in SIDE for d in s.head_dims])
    every = "ladder" in parts  # which has the others'
    kinds = ["every"] if every else sorted({which for part, which in KINDS.items() if part in parts})
    built = [one for which in kinds for one in _built(which)]
    worst = max((verify(v.name, v.head_dim, v.dtype, module) for v, module in built), default=0.0)
    print(f"{len(built)} kernels agree with float64: the worst error is {worst:.2f} of the bound", file=sys.stderr)
    return {"rounds": ROUNDS} | ({"worst_error_of_bound": worst} if every else {})


def summary(data: Data) -> dict[str, Row]:
    """Per table, on randn: the geometric mean of the last step's speed over FlashAttention-2's, and the worst shape."""
    last = where(data["rows"], part="final", name=SERIES[-1].name, inputs="randn")
    last = [r for r in last if r.get("vs_fa2")]
    by_table = {t: [r["vs_fa2"] for r in last if r["table"] == t] for t in dict.fromkeys(r["table"] for r in last)}
    return {
        t: {"shapes": len(v), "geomean_vs_fa2": statistics.geometric_mean(v), "worst": min(v)}
        for t, v in by_table.items()
    }


BENCH = harness.Bench(
    __name__, "the tensor-core kernels are", ("table", "exhibit", "shape", "causal", "inputs", "name"), quick_too=True
)
main = BENCH.main
