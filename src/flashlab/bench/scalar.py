"""Phase 6's figures: the float32 kernels against unfused PyTorch and torch's SDPA, in one run on one GPU.

    flashlab bench scalar                       # or: python -m flashlab.bench.scalar --out scalar.json

Shapes: the float32 ones of a published table (published/fa1_f32_fa2_mma_ada.csv), where a FlashAttention-1 kernel
was 18 to 107 times slower than unfused PyTorch; the same with head_dim 128; and some causal. All in float32 with TF32
off: the peers multiply with the same arithmetic units.

torch_naive_f32     softmax(q k^T * scale) v, three PyTorch operations, the scores in memory
sdpa_efficient_f32  scaled_dot_product_attention, its memory-efficient backend
sdpa_math_f32       the same, its unfused backend
p6_...              a step of the series
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from flashlab.bench import records, timing

RECORDED = Path(__file__).parent / "recorded" / "scalar_h200.json"
PEERS = ("torch_naive_f32", "sdpa_efficient_f32", "sdpa_math_f32")
CAUSAL_SHAPES = ((8, 16, 1024, 64), (4, 16, 2048, 64), (4, 16, 2048, 128))


def published() -> list[dict[str, Any]]:
    """The float32 rows of the published table: batch, heads, seq_len, head_dim, variant, ms."""
    text = files("flashlab.bench").joinpath("published/fa1_f32_fa2_mma_ada.csv").read_text(encoding="utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        if row["variant"].endswith("f32"):
            rows.append({**{k: int(v) for k, v in row.items() if k not in ("variant", "ms")},
                         "variant": row["variant"], "ms": float(row["ms"])})  # fmt: skip
    return rows


def shapes() -> list[tuple[int, int, int, int, bool]]:
    """(batch, heads, seq_len, head_dim, causal) of what is measured."""
    ada = sorted({(r["batch"], r["heads"], r["seq_len"], r["head_dim"]) for r in published()})
    wide = [(b, h, n, 128) for b, h, n, _ in ada]
    return [(*s, False) for s in (*ada, *wide)] + [(*s, True) for s in CAUSAL_SHAPES]


def flops(batch: int, heads: int, seq_len: int, head_dim: int, causal: bool) -> float:
    """Of a forward pass: two products of 2 N^2 D each a head, half of that if causal."""
    return 4.0 * batch * heads * seq_len**2 * head_dim / (2 if causal else 1)


def torch_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Unfused attention in PyTorch's operations."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    return torch.softmax(s, dim=-1) @ v


def _sdpa(backend: str) -> Callable[..., torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def variants() -> dict[str, Callable[..., torch.Tensor]]:
    """fn(q, k, v, causal) -> o, by name: the steps of the series, then the peers."""
    from flashlab.cuda.operators import module
    from flashlab.kernels import steps

    def kernel(name: str) -> Callable[..., torch.Tensor]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
            return module(name, head_dim=q.shape[-1], dtype=torch.float32).forward(q, k, v, causal=causal)[0]

        return call

    found: dict[str, Callable[..., torch.Tensor]] = {s.name: kernel(s.name) for s in steps(6)}
    peers = (torch_naive, _sdpa("EFFICIENT_ATTENTION"), _sdpa("MATH"))
    return found | dict(zip(PEERS, peers, strict=True))


def measure(
    batch: int, heads: int, seq_len: int, head_dim: int, causal: bool, *, rounds: int = 15
) -> list[dict[str, Any]]:
    """One shape: a row for each variant, with its time, its speed and its largest error against float64."""
    torch.manual_seed(seq_len + head_dim)
    sets = timing.input_sets(4 * batch * heads * seq_len * head_dim * 4)
    inputs = [[torch.randn(batch, heads, seq_len, head_dim, device="cuda") for _ in range(3)] for _ in range(sets)]
    want = torch_naive(*(x.double() for x in inputs[0]), causal)
    errors, functions = {}, {}
    for name, fn in variants().items():
        errors[name] = (fn(*inputs[0], causal).double() - want).abs().max().item()
        functions[name] = [lambda fn=fn, qkv=qkv: fn(*qkv, causal) for qkv in inputs]
    del want
    work = flops(batch, heads, seq_len, head_dim, causal)
    shape = {"batch": batch, "heads": heads, "seq_len": seq_len, "head_dim": head_dim, "causal": causal}
    return [
        {**shape, "variant": name, "ms": round(t.ms, 6), "ms_low": round(t.ms_low, 6), "ms_high": round(t.ms_high, 6),
         "rounds": t.rounds, "tflops": round(t.tflops(work), 2), "max_error": float(f"{errors[name]:.3g}")}
        for name, t in timing.interleaved(functions, rounds=rounds).items()
    ]  # fmt: skip


def _build(progress: Callable[[str], None]) -> None:
    """Every kernel, several nvcc at a time."""
    from flashlab.cuda.operators import module
    from flashlab.kernels import steps

    progress("building the kernels")
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        jobs = [pool.submit(module, s.name, head_dim=d, dtype=torch.float32) for s in steps(6) for d in s.head_dims]
        for job in jobs:
            job.result()


def run(
    *, rounds: int = 15, progress: Callable[[str], None] = lambda text: None, only: int | None = None
) -> dict[str, Any]:
    """Every shape on this machine's GPU; about a minute on an H200. Raises timing.NoGpu, flashlab.cuda.Unavailable."""
    machine = timing.machine()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    _build(progress)
    rows, clocks = [], []
    try:
        todo = shapes()[:only]
        for i, shape in enumerate(todo, 1):
            rows += measure(*shape, rounds=rounds)
            clocks.append(timing.sm_clock_mhz())
            best = min((r for r in rows[-len(variants()) :]), key=lambda r: r["ms"])
            text = "x".join(map(str, shape[:4])) + (" causal" if shape[4] else "")
            progress(f"{i}/{len(todo)}  {text}: fastest {best['variant']}, {best['ms'] * 1e3:.1f} us")
            torch.cuda.empty_cache()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    seen = [c["now"] for c in clocks if c]
    clock = {"sm_clock_mhz": [min(seen), max(seen)], "sm_clock_max_mhz": clocks[0]["max"]} if seen else {}
    return {"bench": "scalar", "machine": machine | clock, "dtype": "float32", "tf32": False,
            "timing": "CUDA graph replays, in turns; median, 10th and 90th percentile", "rows": rows}  # fmt: skip


def recorded() -> dict[str, Any]:
    """The recorded run; its rows as ``run`` makes them."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def ratios(data: dict[str, Any], variant: str, peer: str = "torch_naive_f32") -> dict[tuple, float]:
    """By shape (batch, heads, seq_len, head_dim, causal): how many times faster than the peer the variant is."""
    times = {
        (r["batch"], r["heads"], r["seq_len"], r["head_dim"], r["causal"], r["variant"]): r["ms"] for r in data["rows"]
    }
    return {k[:5]: times[(*k[:5], peer)] / ms for k, ms in times.items() if k[5] == variant and (*k[:5], peer) in times}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure phase 6's kernels and their peers on this machine's GPU.")
    parser.add_argument("--out", type=Path, default=RECORDED, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", type=int, help="only the first so many shapes")
    given = parser.parse_args(arguments)
    data = run(rounds=given.rounds, progress=lambda text: print(text, flush=True), only=given.only)
    records.write_json(given.out, data)
    last = sorted({r["variant"] for r in data["rows"] if r["variant"].startswith("p6_")})[-1]
    speedups = ratios(data, last).values()
    print(
        f"{last} against unfused PyTorch: {min(speedups):.2f} to {max(speedups):.2f} times as fast; in {given.out.name}"
    )


if __name__ == "__main__":
    records.entry(main)
