"""Phase 6: the float32 kernels against unfused PyTorch and torch's SDPA, in one run on one GPU.

    flashlab bench scalar                       # writes recorded/scalar_<gpu>.json beside this file; about a minute
    flashlab bench scalar --quick --out scalar.json

Shapes: the float32 ones of a published table (published/fa1_f32_fa2_mma_ada.csv), where a FlashAttention-1 kernel
was 18 to 107 times slower than unfused PyTorch; the same with head_dim 128; and some causal. All in float32 with TF32
off. Where the tensors of one call fit in L2, several sets of them take turns.

torch_naive_f32     softmax(q k^T * scale) v, three PyTorch operations, the scores in memory
sdpa_efficient_f32  scaled_dot_product_attention, its memory-efficient backend
sdpa_math_f32       the same, its unfused backend
p6_...              a step of the series
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashlab.bench import harness, peers, published, records, timing
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels import steps
from flashlab.table import Table

PEERS = ("torch_naive_f32", "sdpa_efficient_f32", "sdpa_math_f32")
CAUSAL_SHAPES = ((8, 16, 1024, 64), (4, 16, 2048, 64), (4, 16, 2048, 128))
STEPS = steps(6)
SHAPE = ("batch", "heads", "seq_len", "head_dim", "causal")
Shape = tuple[int, int, int, int, bool]


def published_rows() -> list[dict[str, Any]]:
    """The float32 rows of the published table: batch, heads, seq_len, head_dim, variant, ms."""
    return [r for r in published.load("fa1_f32_fa2_mma_ada") if str(r["variant"]).endswith("f32")]


def shapes() -> list[Shape]:
    """What is measured."""
    ada = sorted({(r["batch"], r["heads"], r["seq_len"], r["head_dim"]) for r in published_rows()})
    wide = [(b, h, n, 128) for b, h, n, _ in ada]
    return [(*s, False) for s in (*ada, *wide)] + [(*s, True) for s in CAUSAL_SHAPES]


def measure(modules: dict[str, CudaModule], shape: Shape, rounds: int = 15) -> list[dict[str, Any]]:
    """One shape: a row for each variant, with its time, its speed and its largest error against float64."""
    batch, heads, seq_len, head_dim, causal = shape
    torch.manual_seed(seq_len + head_dim)
    sets = timing.input_sets(4 * batch * heads * seq_len * head_dim * 4)
    inputs = [[torch.randn(batch, heads, seq_len, head_dim, device="cuda") for _ in range(3)] for _ in range(sets)]
    variants: dict[str, Callable[..., Callable[[], Any]]] = {
        name: lambda q, k, v, m=m: lambda: m.forward(q, k, v, causal=causal)[0] for name, m in modules.items()
    }
    variants |= {
        "torch_naive_f32": lambda q, k, v: peers.unfused(q, k, v, causal),
        "sdpa_efficient_f32": lambda q, k, v: peers.sdpa("EFFICIENT_ATTENTION", q, k, v, causal),
        "sdpa_math_f32": lambda q, k, v: peers.sdpa("MATH", q, k, v, causal),
    }
    every = {name: [variant(*qkv) for qkv in inputs] for name, variant in variants.items()}
    functions, reasons = timing.able(every)
    q, k, v = (x.double() for x in inputs[0])
    want = peers.unfused(q, k, v, causal)()
    errors = {name: (every[name][0]().double() - want).abs().max().item() for name in functions}
    del q, k, v, want
    work = timing.attention_flops(*shape)
    row = dict(zip(SHAPE, shape, strict=True))
    times = timing.interleaved(functions, rounds=rounds)
    rows: list[dict[str, Any]] = [
        {**row, "variant": name, **t.row(), "tflops": t.tflops(work), "max_error": errors[name]}
        for name, t in times.items()
    ]
    return rows + [row | {"variant": name, "unavailable": why} for name, why in reasons.items()]


@functools.cache
def _modules(head_dims: Sequence[int] = (64, 128)) -> dict[str, CudaModule]:
    """Every step, for the head_dims that are measured; several nvcc at a time."""
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        builds = [(s, d, pool.submit(load_inline, s, backend="nvcc", head_dim=d)) for s in STEPS for d in head_dims]
        built = {(s.name, d): job.result() for s, d, job in builds}
    return {s.name: built[s.name, head_dims[0]] for s in STEPS}


def jobs() -> list[harness.Row]:
    """Every shape."""
    return [{"part": "shapes"} | dict(zip(SHAPE, shape, strict=True)) for shape in shapes()]


def measure_job(job: harness.Row, rounds: int = 15) -> list[harness.Row]:
    """The rows of a job, with TF32 off."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        shape: Shape = (job["batch"], job["heads"], job["seq_len"], job["head_dim"], job["causal"])
        return [job | row for row in measure(_modules(), shape, rounds)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def recorded() -> list[dict[str, Any]]:
    """The recorded runs, one per GPU; their rows as ``run`` makes them."""
    return records.recorded("scalar")


def ratios(data: dict[str, Any], variant: str, peer: str = "torch_naive_f32") -> dict[tuple, float]:
    """By shape (batch, heads, seq_len, head_dim, causal): how many times faster than the peer the variant is."""
    times: dict[str, dict[tuple, float]] = {}
    for r in data["rows"]:
        shape = (r["batch"], r["heads"], r["seq_len"], r["head_dim"], r["causal"])
        if "ms" in r:
            times.setdefault(r["variant"], {})[shape] = r["ms"]
    theirs = times.get(peer, {})
    return {shape: theirs[shape] / ms for shape, ms in times.get(variant, {}).items() if shape in theirs}


def table(data: dict[str, Any]) -> Table:
    """How many times as fast as unfused PyTorch each variant is, over the shapes."""
    rows = []
    for name in (*(s.name for s in STEPS), *PEERS):
        found = sorted(ratios(data, name).values())
        if found:
            rows.append([name, *(f"{x:.2f}" for x in (found[0], found[len(found) // 2], found[-1]))])
    return Table.of(rows, ["variant", "lowest", "median", "highest"], align="lrrr",
                    caption="times as fast as unfused PyTorch, float32")  # fmt: skip


BENCH = harness.Bench(
    "scalar", __doc__, jobs=jobs, measure=measure_job, table=table, keys=(*SHAPE, "variant"),
    quick=lambda: jobs()[:3], needs=harness.gpu_for("the float32 kernels are"),
    prepare=lambda todo, until, rounds: _modules() and None,
    facts={"dtype": "float32", "tf32": False, "timing": "CUDA graph replays, in turns; median, fastest, slowest"},
    options={"rounds": {"type": int, "default": 15}},
)  # fmt: skip
main = BENCH.main
