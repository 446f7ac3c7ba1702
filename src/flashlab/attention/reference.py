"""The oracle: attention in float64, and its eager low-precision twin.

Two functions with the same contract. `attention` is what every kernel of the course is compared with. Its twin
does the same work in the inputs' own precision, as plain PyTorch would: its error against the oracle is the
yardstick for everybody else's (the rule of flash-attention's own test suite; see `flashlab.check.tolerance`).

Conventions, stated because libraries differ: a causal mask is aligned bottom-right (the last query sees the last
key), and a row that may look at no key at all gives an output of 0 and a log-sum-exp of minus infinity.
"""

from __future__ import annotations

import math

import torch

from flashlab.attention.inputs import check_qkv, scale_of

__all__ = ["attention", "attention_backward", "attention_low_precision", "causal_mask"]


def causal_mask(seq_q: int, seq_k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Boolean [seq_q, seq_k], True where query i may look at key j: j <= i + (seq_k - seq_q)."""
    i = torch.arange(seq_q, device=device)[:, None]
    j = torch.arange(seq_k, device=device)[None, :]
    return j <= i + (seq_k - seq_q)


def _expand_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T + mask) v with every step in float64.

    Args:
        q: [batch, heads, seq_q, head_dim], any floating dtype.
        k: [batch, kv_heads, seq_k, head_dim]; `heads` is a multiple of `kv_heads` (grouped-query attention).
        v: [batch, kv_heads, seq_k, v_dim].
        causal: query i looks at the keys j <= i + seq_k - seq_q.
        scale: defaults to 1 / sqrt(head_dim).
    Returns:
        o: [batch, heads, seq_q, v_dim], float64. lse: [batch, heads, seq_q], float64, natural logarithm.
    Raises:
        TypeError, ValueError: see `flashlab.attention.inputs.check_qkv`.
    """
    check_qkv(q, k, v)
    scale = scale_of(scale, q.shape[-1])
    k, v = _expand_heads(q, k, v)
    s = scale * (q.double() @ k.double().transpose(-1, -2))
    visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    if causal:
        visible = causal_mask(s.shape[-2], s.shape[-1], device=s.device)
        s = s.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    # Not exp(s - lse): beside a score of -1e38, lse has no room for log(l). A row with nothing to look at would be NaN;
    # its output is 0.
    p = torch.softmax(s, dim=-1).masked_fill(torch.isneginf(lse)[..., None], 0.0)
    # A key that no query may see must not reach the output, whatever V holds there: 0 * NaN is NaN.
    seen = visible.any(dim=0)
    o = p[..., seen] @ v.double()[..., seen, :]
    return o, lse


def attention_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same mathematics as `attention`, eagerly, in the dtype of q: every intermediate is rounded to it.

    It knowingly differs from a fused kernel in one way: scores and probabilities are stored in q.dtype, where a
    kernel keeps them in float32 registers. That makes it the worst implementation that is still right.

    Returns:
        o in q.dtype, [batch, heads, seq_q, v_dim]; lse in float32, [batch, heads, seq_q].
    """
    check_qkv(q, k, v)
    scale = scale_of(scale, q.shape[-1])
    k, v = _expand_heads(q, k, v)
    s = (q @ k.transpose(-1, -2)) * scale
    if causal:
        s = s.masked_fill(~causal_mask(s.shape[-2], s.shape[-1], device=s.device), -math.inf)
    lse = torch.logsumexp(s.float(), dim=-1)
    p = torch.softmax(s, dim=-1).masked_fill(torch.isneginf(lse)[..., None], 0.0)
    return p @ v, lse


def attention_backward(
    grad_o: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, *, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv of attention, from its inputs and outputs; in float32, or float64 where q is.

    With P = exp(scale * q k^T - lse) and delta = rowsum(do * o):
        dv = P^T do,  dS = P * (do v^T - delta + dlse),  dq = scale * dS k,  dk = scale * dS^T q.
    A key head's gradient is the sum over the query heads that share it. Takes [seq_q, seq_k] floats a head.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, seq_q)
    qg, og, gg = (x.to(wide).reshape(*grouped, head_dim) for x in (q, o, grad_o))
    kg, vg = (x.to(wide).unsqueeze(2) for x in (k, v))
    lg = lse.to(wide).reshape(grouped)
    s = scale * (qg @ kg.transpose(-1, -2))
    p = torch.exp(s - lg.masked_fill(torch.isneginf(lg), 0.0)[..., None])
    hidden = torch.isneginf(lg)[..., None]  # rows that see no key
    if causal:
        hidden = hidden | ~causal_mask(seq_q, seq_k, device=q.device)
    p = p.masked_fill(hidden, 0.0)
    ds = gg @ vg.transpose(-1, -2) - (gg * og).sum(-1, keepdim=True)
    if grad_lse is not None:
        ds = ds + grad_lse.to(wide).reshape(grouped)[..., None]
    ds = p * ds
    dq = (scale * (ds @ kg)).reshape(q.shape)
    dk = (scale * (ds.transpose(-1, -2) @ qg)).sum(2)
    dv = (p.transpose(-1, -2) @ gg).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
