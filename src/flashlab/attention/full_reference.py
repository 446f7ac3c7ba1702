"""The oracle with everything that the kernels of phases 4 and 5 take: windows, soft-caps, gradients; in float64.

`flashlab.attention.reference` is the formula as the course begins with it. Here are its masks and its derivative in
full, with the same conventions: aligned bottom-right, and a row that sees no key gives 0, with lse = -inf and no
gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashlab.attention.inputs import check_qkv, scale_of
from flashlab.attention.options import Window, softcap_of, visible

__all__ = ["Gradients", "attention", "attention_backward", "attention_low_precision", "low_precision_backward"]


class Gradients(NamedTuple):
    """Of a loss with respect to q, k and v; each has its input's shape."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Scores(NamedTuple):
    """All [batch, kv_heads, group, seq_q, seq_k], float64."""

    s: torch.Tensor  # scaled, capped, -inf where hidden
    slope: torch.Tensor | float  # ds / d(scale * q k^T): 1 - tanh^2 under a soft-cap
    hidden: torch.Tensor


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch, heads, ...] as [batch, kv_heads, group, ...]: the heads that share a key head side by side."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _scores(q, k, causal: bool, scale: float, window: Window, softcap: float | None) -> _Scores:
    s = scale * (_grouped(q.double(), k.shape[1]) @ k.double().unsqueeze(2).transpose(-1, -2))
    slope: torch.Tensor | float = 1.0
    if softcap is not None:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    hidden = ~visible(q.shape[2], k.shape[2], causal, window, q.device)
    return _Scores(s.masked_fill(hidden, -math.inf), slope, hidden)


def _probabilities(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]), lse


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(cap(scale * q k^T) + mask) v in float64.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], any floating dtypes.
        causal, window: see `flashlab.attention.options`. softcap: cap(s) = softcap * tanh(s / softcap).
    Returns:
        o: [batch, heads, seq_q, head_dim]; lse: [batch, heads, seq_q]; float64.
    """
    check_qkv(q, k, v)
    found = _scores(q, k, causal, scale_of(scale, q.shape[-1]), window, softcap_of(softcap))
    p, lse = _probabilities(found.s)
    seen = ~found.hidden.all(dim=0)  # a key that no query may see must not reach the output: 0 * NaN is NaN
    o = p[..., seen] @ v.double().unsqueeze(2)[..., seen, :]
    return o.flatten(1, 2), lse.flatten(1, 2)


def attention_backward(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    scale: float | None = None, window: Window = None, softcap: float | None = None,
    grad_lse: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of `attention` in float64, from its inputs alone.

    With P the probabilities and delta = rowsum(dO * O):
        dV = P^T dO,   dS = P * (dO V^T - delta + dlse),   dQ = scale * dS K,   dK = scale * dS^T Q,
    dS times 1 - tanh^2 under a soft-cap. A key head's gradient is the sum over the query heads that share it.
    """
    check_qkv(q, k, v)
    scale = scale_of(scale, q.shape[-1])
    s, slope, _ = _scores(q, k, causal, scale, window, softcap_of(softcap))
    p, _ = _probabilities(s)
    kv_heads = k.shape[1]
    wide_k, wide_v = k.double().unsqueeze(2), v.double().unsqueeze(2)
    do, wide_q = _grouped(grad_o.double(), kv_heads), _grouped(q.double(), kv_heads)
    dp = do @ wide_v.transpose(-1, -2)
    ds = dp - (p * dp).sum(-1, keepdim=True)  # rowsum(P * dP) is rowsum(dO * O)
    if grad_lse is not None:
        ds = ds + _grouped(grad_lse.double(), kv_heads)[..., None]
    ds = p * ds * slope * scale
    return Gradients(
        (ds @ wide_k).flatten(1, 2), (ds.transpose(-1, -2) @ wide_q).sum(2), (p.transpose(-1, -2) @ do).sum(2)
    )


def attention_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """o of the same mathematics, eagerly, in the dtype of q: the worst implementation that is still right."""
    check_qkv(q, k, v)
    scale, softcap = scale_of(scale, q.shape[-1]), softcap_of(softcap)
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    s = s.masked_fill(~seen, -math.inf)
    p = torch.softmax(s.masked_fill(~seen.any(-1, keepdim=True), 0.0), dim=-1)  # a row of -inf alone would be NaN
    return p.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v.repeat_interleave(group, 1)


def low_precision_backward(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options
) -> Gradients:
    """The gradients of `attention_low_precision` by autograd, in the dtype of q: what the bounds are calibrated on."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        o = attention_low_precision(q, k, v, **options)
        return Gradients(*torch.autograd.grad(o, (q, k, v), grad_o))
