"""Phase 3: the minimal Triton kernel beside unfused PyTorch and FlashAttention-2, one head.

One head is a small job for a big GPU: at N = 1024 and BLOCK_M = 64 it is 16 programs, and an H200 has 132
multiprocessors. The figures say so; phase 4 fills the GPU with batch and heads. fp16 inputs, float32 accumulation in
all three; inputs stay in L2, for all alike.

And the kernel's errors against float64 at lengths that the interpreter would take minutes for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention.naive import naive_attention
from flashlab.attention.triton_minimal import flash_attention_forward
from flashlab.bench import harness, peers
from flashlab.bench.rows import by, grid, of, where
from flashlab.check.cases import Case, make_inputs
from flashlab.check.tolerance import excess, truth
from flashlab.table import Table

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LONG = (4096, 4001)  # the second is no multiple of any tile
NAMES = ("minimal kernel", "unfused PyTorch", "FlashAttention-2 (torch)")


def jobs(
    lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = (64, 128), long: Sequence[int] = LONG
) -> list[harness.Row]:
    """lengths: what is timed. long: where the errors are taken."""
    timed = [{"part": "times", "seq_len": n, "head_dim": head_dim} for head_dim in head_dims for n in lengths]
    errors = {"dtype": ("float16", "bfloat16"), "content": ("plain", "rising")}
    return timed + [job for d in head_dims for job in harness.jobs_of("errors", seq_len=long, head_dim=[d], **errors)]


def quick_jobs() -> list[harness.Row]:
    return jobs((512, 4096), (64,), (512, 500))


def measure(job: harness.Row) -> list[harness.Row]:
    """One row for each implementation: milliseconds and TFLOP/s, or why there are none; or the errors of the kernel."""
    n, head_dim = job["seq_len"], job["head_dim"]
    if job["part"] == "errors":
        return [job | {"name": NAMES[0]} | accuracy(n, head_dim, getattr(torch, job["dtype"]), job["content"])]
    q, k, v = harness.draw(*[(n, head_dim)] * 3, dtype=torch.float16)
    ways: list[Callable[[], Any]] = [
        lambda: flash_attention_forward(q, k, v),
        lambda: naive_attention(q, k, v),
        peers.sdpa("FLASH_ATTENTION", q[None, None], k[None, None], v[None, None]),
    ]
    times, reasons = harness.times_of(dict(zip(NAMES, ways, strict=True)), rounds=15)
    return harness.rows_of(job, times, reasons, harness.work_of({"shape": (1, 1, n, head_dim), "causal": False}))


def accuracy(n: int, head_dim: int, dtype: torch.dtype = torch.float16, content: str = "plain") -> dict[str, Any]:
    """The minimal kernel's largest errors against float64 on n queries and keys; on any machine.

    content: of the checker's inputs (flashlab.check.cases), "plain" or "rising", where every block has a new maximum.
    o_error, lse_error: the largest absolute errors. twin_error: that of eager attention in `dtype`, for comparison.
    o_of_bound, lse_of_bound: the largest error as a multiple of what the checker allows there; right is at most 1.
    """
    case = Case("", n, n, content, head_dim=head_dim, dtype=dtype)
    q, k, v = make_inputs(case, torch.device("cpu"))
    right = truth(case, q, k, v)
    one, two, three = (x[0, 0].to(runtime.device()) for x in (q, k, v))
    o, lse = (x.cpu().double()[None, None] for x in flash_attention_forward(one, two, three))
    return {
        "seq_len": n, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."), "content": content,
        "o_error": (o - right.o).abs().max().item(),
        "twin_error": right.twin_error,
        "lse_error": (lse - right.lse).abs().max().item(),
        "o_of_bound": excess(o, right.o, right.o_bound).max().item(),
        "lse_of_bound": excess(lse, right.lse, right.lse_bound).max().item(),
    }  # fmt: skip


def table(data: dict[str, Any]) -> Table:
    """Microseconds of each implementation over the lengths."""
    said = lambda r: f"{1e3 * r['ms']:.1f} ({r['tflops']:.1f})" if "ms" in r else "none"  # noqa: E731
    at = by(where(of(data), part="times"), "D", "N")
    return grid(at, ("D", "N"), said, NAMES, "microseconds, in brackets TFLOP/s")


BENCH = harness.Bench(__name__, "phase 3's kernel is", ("seq_len", "head_dim", "name"), quick_too=True)
main, recorded = BENCH.main, BENCH.recorded
