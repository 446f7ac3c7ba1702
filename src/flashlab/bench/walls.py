"""Phase 1's figures, measured natively on a GPU and recorded as JSON; the lecture draws what is recorded.

    python -m flashlab.bench.walls            # writes recorded/walls_<gpu>.json beside this file
    python -m flashlab.bench.walls --out x.json

naive     naive_attention in fp16: milliseconds, and the allocator's peak beside the formula's
fused     the same shapes through torch's FlashAttention-2 (the backend is forced, so the peer has a name)
scheme_a  one head through scheme_a, N doubling until the GPU refuses; then what its error says
scheme_b  one head through each escape hatch and through two_pass: milliseconds and error against float64

Milliseconds are triton.testing.do_bench's: the L2 cache is flushed before every run; median, 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import naive_peak_bytes
from flashlab.attention.naive import naive_attention
from flashlab.bench import records, timing
from flashlab.bench.records import NoGpu


def run(
    seq_lens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384), *, heads: int = 16, head_dim: int = 128
) -> dict[str, Any]:
    """Measure everything on this machine's GPU; return what is written to JSON. About a minute on an H200.

    Raises NoGpu where there is none.
    """
    if runtime.INTERPRETED or not torch.cuda.is_available():
        raise NoGpu("phase 1's recorded figures are measured on a GPU, with Triton compiled; this process has none")
    torch.manual_seed(1)
    return {
        "phase": 1,
        "machine": machine(),
        "shape": {"batch": 1, "heads": heads, "head_dim": head_dim, "dtype": "float16"},
        "naive": [measure_naive(n, heads, head_dim) for n in seq_lens],
        "fused": [measure_fused(n, heads, head_dim) for n in seq_lens],
        "scheme_a": measure_scheme_a(head_dim),
        "scheme_b": measure_scheme_b(head_dim),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured with, and when."""
    return timing.machine() | {"shared_per_block": runtime.limits().shared_per_block}


def _qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device=runtime.device(), dtype=torch.float16) for _ in range(3)]


def _milliseconds(fn: Callable[[], Any]) -> dict[str, float]:
    import triton.testing

    median, low, high = triton.testing.do_bench(fn, quantiles=[0.5, 0.2, 0.8])
    return {"ms": median, "ms_p20": low, "ms_p80": high}


def _allocated(fn: Callable[[], Any]) -> int:
    """Bytes that the allocator had given out at the worst moment of fn(), beyond those given out before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_naive(seq_len: int, heads: int, head_dim: int) -> dict[str, Any]:
    """One length of naive_attention; its row says "out_of_memory": True where memory runs out."""
    predicted = naive_peak_bytes(seq_len, head_dim, heads=heads)
    row: dict[str, Any] = {"seq_len": seq_len, "predicted_peak_bytes": predicted}
    try:
        q, k, v = _qkv(1, heads, seq_len, head_dim)
        naive_attention(q, k, v)  # cuBLAS allocates its workspace on the first call
        row["peak_bytes"] = _allocated(lambda: naive_attention(q, k, v))
        return row | _milliseconds(lambda: naive_attention(q, k, v))
    except torch.cuda.OutOfMemoryError:
        return row | {"out_of_memory": True}


def measure_fused(seq_len: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The same shape through torch's FlashAttention-2, or "unavailable" with its reason."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    row: dict[str, Any] = {"seq_len": seq_len, "backend": "FLASH_ATTENTION"}
    q, k, v = _qkv(1, heads, seq_len, head_dim)

    def fused() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fused()
            row["peak_bytes"] = _allocated(fused)
            return row | _milliseconds(fused)
    except RuntimeError as error:
        return row | {"unavailable": str(error).splitlines()[0]}


def out_of_resources(error: Exception) -> dict[str, Any] | None:
    """The figures in Triton's OutOfResources: {"resource", "required", "limit"}; None for another error."""
    if type(error).__name__ != "OutOfResources":
        return None
    found = re.search(r"out of resource: ([\w ]+), Required: (\d+), Hardware limit: (\d+)", str(error))
    return {"resource": found[1], "required": int(found[2]), "limit": int(found[3])} if found else None


def measure_scheme_a(head_dim: int) -> list[dict[str, Any]]:
    """scheme_a on one head, N doubling from 64, ending with the first N that this GPU refuses."""
    rows: list[dict[str, Any]] = []
    seq_len = 64
    while not rows or rows[-1]["ok"]:
        q, k, v = _qkv(seq_len, head_dim)
        row: dict[str, Any] = {"seq_len": seq_len, "shared_bytes": schemes.scheme_a_shared_bytes(seq_len, head_dim)}
        try:
            row |= {"ok": True, "max_error": _error(schemes.scheme_a(q, k, v)[0], q, k, v)}
            row |= _milliseconds(lambda q=q, k=k, v=v: schemes.scheme_a(q, k, v))
        except Exception as error:
            figures = out_of_resources(error)
            if figures is None:
                raise
            row |= {"ok": False, "message": str(error)} | figures
        rows.append(row)
        seq_len *= 2
    return rows


def measure_scheme_b(head_dim: int, seq_len: int = 256) -> list[dict[str, Any]]:
    """Each escape hatch and two_pass, one program a multiprocessor of the GPU, at a length scheme_b can hold."""
    rows = []
    q = torch.randn(64 * runtime.limits().sms, head_dim, device=runtime.device(), dtype=torch.float16)
    k, v = _qkv(seq_len, head_dim)[:2]
    ways: dict[str, Callable[[], Any]] = {"scheme A": lambda: schemes.scheme_a(q, k, v)}
    ways |= {how: lambda how=how: schemes.scheme_b(q, k, v, how=how) for how in schemes.ESCAPE_HATCHES}
    ways |= {"two passes": lambda: schemes.two_pass(q, k, v)}
    for name, way in ways.items():
        row: dict[str, Any] = {"how": name, "seq_q": q.shape[0], "seq_len": seq_len}
        try:
            rows.append(row | {"ok": True, "max_error": _error(way()[0], q, k, v)} | _milliseconds(way))
        except Exception as error:
            figures = out_of_resources(error)
            if figures is None:
                raise
            rows.append(row | {"ok": False, "message": str(error)} | figures)
    return rows


def _error(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    want, _ = reference.attention(*(x[None, None] for x in (q, k, v)))
    return (o.double() - want[0, 0]).abs().max().item()


def recorded() -> list[dict[str, Any]]:
    """Every recorded run there is, in the order of their file names; [] where none is."""
    return records.recorded("walls")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure and record phase 1's figures on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    out = parser.parse_args(arguments).out
    figures = run()
    out = out or records.default_path("walls", figures["machine"]["gpu"])
    records.write_json(out, figures)
    print(f"written: {out.name}, {len(figures['naive'])} lengths on {figures['machine']['gpu']}")


if __name__ == "__main__":
    records.entry(main)
