"""Phase 6: the float32 kernels against unfused PyTorch and torch's SDPA, in one run on one GPU.

Shapes: the float32 ones of a published table (published/fa1_f32_fa2_mma_ada.csv), where a FlashAttention-1 kernel
was 18 to 107 times slower than unfused PyTorch; the same with head_dim 128; and some causal. All in float32 with TF32
off. Where the tensors of one call fit in L2, several sets of them take turns.

torch_naive_f32     softmax(q k^T * scale) v, three PyTorch operations, the scores in memory
sdpa_efficient_f32  scaled_dot_product_attention, its memory-efficient backend
sdpa_math_f32       the same, its unfused backend
p6_...              a step of the series
"""

import functools
from collections.abc import Callable, Sequence

import torch

from flashlab.bench import harness, peers, published
from flashlab.bench.harness import Data, Row, Way
from flashlab.bench.rows import by, of, over
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels import steps

PEERS: dict[str, Callable[..., Way]] = {
    "torch_naive_f32": peers.unfused,
    "sdpa_efficient_f32": functools.partial(peers.sdpa, "EFFICIENT_ATTENTION"),
    "sdpa_math_f32": functools.partial(peers.sdpa, "MATH"),
}
CAUSAL_SHAPES = ((8, 16, 1024, 64), (4, 16, 2048, 64), (4, 16, 2048, 128))
STEPS = steps(6)
SHAPE = ("batch", "heads", "seq_len", "head_dim", "causal")


def measure(job: Row) -> list[Row]:
    """A row for each variant, with its time, its speed and its largest error against float64."""
    *shape, causal = (job[name] for name in SHAPE)
    inputs = harness.sets_of(harness.draw(*[shape] * 3, dtype=torch.float32))
    variants: dict[str, Callable[..., Way]] = {
        name: lambda q, k, v, causal, m=m: lambda: m.forward(q, k, v, causal=causal)[0]
        for name, m in _modules().items()
    }
    functions = {name: [way(*qkv, causal) for qkv in inputs] for name, way in (variants | PEERS).items()}
    torch.backends.cuda.matmul.allow_tf32 = False
    times, reasons = harness.times_of(functions, 15)
    q, k, v = (x.double() for x in inputs[0])
    want = peers.unfused(q, k, v, causal)()
    for name in times:
        times[name]["max_error"] = (functions[name][0]().double() - want).abs().max().item()
    rows = harness.rows_of(job, times, reasons, harness.work_of({"shape": shape, "causal": causal}))
    return [row | {"variant": row.pop("name")} for row in rows]


@functools.cache
def _modules() -> dict[str, CudaModule]:
    """Every step, for the head_dims that are measured; several nvcc at a time."""
    wanted = [(s, d) for s in STEPS for d in (64, 128)]
    built = harness.at_once(lambda one: load_inline(one[0], backend="nvcc", head_dim=one[1]), wanted)
    return {s.name: module for (s, d), module in zip(wanted, built, strict=True) if d == 64}


def jobs() -> list[Row]:
    """The float32 shapes of the published table, those with head_dim 128, and some causal."""
    float32: list[Row] = [r for r in published.load("fa1_f32_fa2_mma_ada") if str(r["variant"]).endswith("f32")]
    ada = sorted({(r["batch"], r["heads"], r["seq_len"], r["head_dim"]) for r in float32})
    wide = [(b, h, n, 128) for b, h, n, _ in ada]
    shapes = [(*s, False) for s in (*ada, *wide)] + [(*s, True) for s in CAUSAL_SHAPES]
    return [{"part": "shapes"} | dict(zip(SHAPE, shape, strict=True)) for shape in shapes]


def prepare(todo: Sequence[Row], until: float) -> None:
    _modules()


def ratios(data: Data, variant: str, peer: str = "torch_naive_f32") -> dict[tuple, float]:
    """By shape (batch, heads, seq_len, head_dim, causal): how many times faster than the peer the variant is."""
    return over(by(of(data), "batch", "heads", "N", "D", "causal"), variant, peer)


BENCH = harness.Bench(
    __name__, "the float32 kernels are", (*SHAPE, "variant"), quick_too=True, quick=3,
    facts={"dtype": "float32"},
)  # fmt: skip
main, recorded = BENCH.main, BENCH.recorded
