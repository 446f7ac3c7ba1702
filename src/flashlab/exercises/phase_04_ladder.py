"""Checks of 4.11 to 4.13, the ladder to a kernel from an empty page: heads, a mask's end, two head sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, Report, expect, verify
from flashlab.exercises.registry import exercise
from flashlab.exercises.triton_answers import explain_undefined, in_bounds
from flashlab.triton_tools.watch import watched as watched_memory

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """fp16, and no two neighbours in memory: strides that are not used show."""
    generator = torch.Generator().manual_seed(4)
    drawn = [0.5 * torch.randn(*shape[:-1], shape[-1] + 8, generator=generator) for shape in shapes]
    return [x.to(runtime.device(), torch.float16)[..., :-8] for x in drawn]


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse in float64 of q [B, H, M, D], k and v [B, H_kv, N, ...], under a mask [M, N]."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * scale
    s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.where(lse.isfinite(), torch.zeros(()).double())[..., None])
    return p @ v.repeat_interleave(group, 1), lse


def _watched(fn: Attention, case: str, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer's results, every address checked where kernels are interpreted; CheckFailed if it is no kernel's."""
    __tracebackhide__ = True
    tensors = {name: x for name, x in inputs.items() if name in "qkv"}
    options = {name: x for name, x in inputs.items() if name not in "qkv"}
    before = {name: x.clone() for name, x in tensors.items()}
    with in_bounds(case, **tensors) as traffic:
        result = fn(*tensors.values(), **options)
    changed = [name for name, x in tensors.items() if not torch.equal(x, before[name])]
    expect(not changed, f"the function changes its input {', '.join(changed)}", diagnosis="input-modified", case=case)
    expect(
        traffic is None or traffic.loads > 0,
        "no Triton kernel reads anything here: the work should be done in a kernel of yours",
        diagnosis="no-kernel",
        case=case,
    )
    pair = isinstance(result, (tuple, list)) and len(result) == 2 and all(isinstance(x, torch.Tensor) for x in result)
    expect(pair, "return two tensors, (o, lse)", diagnosis="wrong-type", case=case)
    explain_undefined(traffic, result[0], case)
    return result[0], result[1]


def _expect_both(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], case: str) -> None:
    """o and lse of their shapes and within their bounds, -inf where it is wanted."""
    __tracebackhide__ = True
    for name, x, y, bound in zip(("o", "lse"), got, want, (0.01, 2e-3), strict=True):
        shapes = f"{name} has the shape {list(x.shape)}, it should be {list(y.shape)}"
        expect(x.shape == y.shape, shapes, diagnosis="wrong-shape", case=case)
        x = x.cpu().double()
        near = (x == y) | ((x - y).abs() <= bound)  # -inf equals itself
        if not near.all():
            at = [int(i) for i in (~near).nonzero()[0]]
            raise CheckFailed(
                f"{name}{at} is {float(x[tuple(at)]):.4g}, it should be {float(y[tuple(at)]):.4g}; "
                f"{int(near.sum())} of {near.numel()} are right",
                diagnosis="wrong-value",
                case=case,
            )


@exercise(
    "4.11",
    title="From one head to all of them",
    minutes=35,
    hints=[
        "First the grid: one program for each block of each head of each batch. Take the program's number apart, as "
        "the lecture's kernel does.",
        "Then move each pointer to its head, once: `Q_ptr += batch * stride_qb + head * stride_qh`. From there on the "
        "kernel is phase 3's. K and V go to head `head // group`.",
        "The strides come in the order of the layout: `*q.stride()` gives stride_qb, stride_qm, stride_qh, stride_qd. "
        "lse has another layout, [batch, heads, seq_q]: LSE_ptr + (batch * heads + head) * M + offs_m.",
    ],
)
def _(heads_attention: Attention) -> Report:
    case = "batch=2, heads=6, kv_heads=2, seq_q=20, seq_k=50, head_dim=32"
    q, k, v = _random((2, 20, 6, 32), (2, 50, 2, 32), (2, 50, 2, 32))
    o, lse = _watched(heads_attention, case, q=q, k=k, v=v, scale=0.3)
    expect(o.shape == q.shape, f"o has the shape {list(o.shape)}, q has {list(q.shape)}: they are alike",
           diagnosis="wrong-shape", case=case)  # fmt: skip
    by_head = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    want = _formula(*by_head, torch.ones(20, 50, dtype=torch.bool), 0.3)
    _expect_both((o.transpose(1, 2), lse), want, case)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            o, lse = heads_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale)
        return o.transpose(1, 2).contiguous(), lse

    return verify(forward, gqa=True, max_seq=150)


@exercise(
    "4.12",
    title="The mask, and where the loop ends",
    minutes=30,
    hints=[
        "Two changes in the kernel: which scores are -inf (4.3), and what stands in `range(0, ..., BLOCK_N)` (4.2).",
        "The last row of the block is min((block + 1) * BLOCK_M, M) - 1: rows that do not exist must not move the end.",
        "end = tl.minimum(N, tl.maximum(prefix, tl.minimum((block + 1) * BLOCK_M, M) + N - M)), and a row that sees no "
        "key needs m_safe, and a division by 1 where l_i is 0.",
    ],
)
def _(prefix_attention: Attention) -> Report:
    for M, N, prefix in ((20, 50, 40), (100, 100, 70), (90, 30, 0), (70, 40, 40), (20, 50, 0)):
        case = f"batch=2, heads=4, kv_heads=2, seq_q={M}, seq_k={N}, head_dim=32, prefix={prefix}"
        q, k, v = _random((2, 4, M, 32), (2, 2, N, 32), (2, 2, N, 32))
        i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
        want = _formula(q, k, v, (j <= i + N - M) | (j < prefix), 0.3)
        _expect_both(_watched(prefix_attention, case, q=q, k=k, v=v, prefix=prefix, scale=0.3), want, case)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None = None) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            return prefix_attention(q, k, v, prefix=0 if causal else k.shape[2], scale=scale)

    report = verify(forward, causal=True, gqa=True, max_seq=150)
    if runtime.INTERPRETED:
        q, k, v = _random((1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16))
        read = []
        for prefix in (512, 64):
            with watched_memory(q=q, k=k, v=v) as traffic:
                prefix_attention(q, k, v, prefix=prefix, scale=0.25)
            read.append(sum(traffic.read_from.values()))
        expect(
            read[1] < 0.85 * read[0],
            f"right, but with prefix=64 it reads {read[1]} bytes of the {read[0]} that it reads without a mask: end "
            "the loop where the block's last row stops seeing keys",
            diagnosis="causal-tiles-not-skipped",
            case="seq_q=512, seq_k=512, prefix=64",
        )
    return report


@exercise(
    "4.13",
    title="Two head sizes, no power of two",
    minutes=30,
    hints=[
        "Tiles have BLOCK_D and BLOCK_V columns, the next powers of two, at least 16 each. Every load and "
        "store of such "
        "a tile needs a second condition.",
        "Q and K are loaded with offs_d < HEAD_DIM, V is loaded and O stored with offs_v < VALUE_DIM, all with "
        "other=0.0. acc has BLOCK_V columns.",
        "o = torch.empty((batch, heads, M, value_dim), ...) has strides of its own: pass them. The default scale is "
        "head_dim**-0.5, of the real head_dim.",
    ],
)
def _(two_sizes_attention: Attention) -> Report:
    for M, N, D, DV, causal in ((20, 50, 40, 24, False), (70, 90, 24, 80, True), (40, 20, 96, 64, True)):
        case = f"batch=2, heads=4, kv_heads=2, seq_q={M}, seq_k={N}, head_dim={D}, value_dim={DV}, causal={causal}"
        q, k, v = _random((2, 4, M, D), (2, 2, N, D), (2, 2, N, DV))
        i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
        want = _formula(q, k, v, (j <= i + N - M) | torch.tensor(not causal), D**-0.5)
        _expect_both(_watched(two_sizes_attention, case, q=q, k=k, v=v, causal=causal), want, case)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None = None) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            return two_sizes_attention(q, k, v, causal=causal, scale=scale)

    return verify(forward, causal=True, gqa=True, head_dims=(64, 40), max_seq=150)
