"""Phase 3's figures: the minimal kernel beside unfused PyTorch and FlashAttention-2, one head, on this machine's GPU.

    python -m flashlab.bench.triton            # writes results/triton_<gpu>.json beside this file
    python -m flashlab.bench.triton --out x.json

One head is a small job for a big GPU: at N = 1024 and BLOCK_M = 64 it is 16 programs, and an H200 has 132
multiprocessors. The figures say so; phase 4 fills the GPU with batch and heads. FLOPs: 4 · N · N · D, fp16 inputs,
float32 accumulation in all three. Milliseconds are triton.testing.do_bench's (the L2 cache is flushed before every
run); median, 20th and 80th percentile; the three are measured one after the other for each length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention.naive import naive_attention
from flashlab.attention.triton_minimal import flash_attention_forward
from flashlab.bench import records
from flashlab.bench.records import NoGpu
from flashlab.bench.walls import machine

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def run(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = (64, 128)) -> dict[str, Any]:
    """Measure on this machine's GPU; return what is written to JSON. Less than a minute on an H200.

    Raises NoGpu where there is none, or where kernels are interpreted.
    """
    if runtime.INTERPRETED or not torch.cuda.is_available():
        raise NoGpu("phase 3's recorded figures are measured on a GPU, with Triton compiled; this process has none")
    torch.manual_seed(3)
    rows = [row for head_dim in head_dims for n in lengths for row in measure(n, head_dim)]
    return {"phase": 3, "machine": machine(), "dtype": "float16", "batch": 1, "heads": 1, "rows": rows}


def measure(n: int, head_dim: int) -> list[dict[str, Any]]:
    """One row for each implementation: milliseconds and TFLOP/s, or why there are none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(n, head_dim, device=runtime.device(), dtype=torch.float16) for _ in range(3))
    heads = [x[None, None] for x in (q, k, v)]

    def flash_attention_2() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads)

    ways: dict[str, Callable[[], Any]] = {
        "minimal kernel": lambda: flash_attention_forward(q, k, v),
        "unfused PyTorch": lambda: naive_attention(q, k, v),
        "FlashAttention-2 (torch)": flash_attention_2,
    }
    return [{"name": name, "seq_len": n, "head_dim": head_dim} | _time(way, n, head_dim) for name, way in ways.items()]


def _time(way: Callable[[], Any], n: int, head_dim: int) -> dict[str, Any]:
    import triton.testing

    try:
        median, low, high = triton.testing.do_bench(way, quantiles=[0.5, 0.2, 0.8])
    except RuntimeError as error:  # out of memory, or a backend that this GPU does not have
        return {"unavailable": str(error).splitlines()[0]}
    return {"ms": median, "ms_p20": low, "ms_p80": high, "tflops": 4 * n * n * head_dim / median / 1e9}


def recorded() -> list[dict[str, Any]]:
    """Every recorded run there is, in the order of their file names; [] where none is."""
    return records.recorded("triton")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure and record phase 3's figures on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    out = parser.parse_args(arguments).out
    figures = run()
    out = out or records.default_path("triton", figures["machine"]["gpu"])
    records.write_json(out, figures)
    print(f"written: {out.name}, {len(figures['rows'])} rows on {figures['machine']['gpu']}")


if __name__ == "__main__":
    records.entry(main)
