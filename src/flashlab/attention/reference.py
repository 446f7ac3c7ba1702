"""The oracle: attention in float64, forward and backward, and its eager low-precision twin.

`attention` is what every kernel of the course is compared with, and `attention_backward` what its gradient is. The
twins do the same work in the inputs' own precision, as plain PyTorch would: their error against the oracle is the
yardstick for everybody else's (the rule of flash-attention's own test suite; see `flashlab.check.tolerance`).

Conventions, stated because libraries differ: a causal mask is aligned bottom-right (the last query sees the last
key), and a row that may look at no key at all gives an output of 0 and a log-sum-exp of minus infinity, and has no
gradient. Windows and soft-caps: `flashlab.attention.options`.
"""

import math
from typing import NamedTuple

import torch

from flashlab.attention.inputs import check_qkv, check_results, scale_of
from flashlab.attention.options import Window, softcap_of, visible


class Gradients(NamedTuple):
    """Of a loss with respect to q, k and v; each has its input's shape."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def causal_mask(seq_q: int, seq_k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Boolean [seq_q, seq_k], True where query i may look at key j: j <= i + (seq_k - seq_q)."""
    return visible(seq_q, seq_k, causal=True, device=device)


def _expand_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _probabilities(s: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of the seen scores, 0 where nothing is seen; and the log-sum-exp, at least in float32."""
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s if s.dtype == torch.float64 else s.float(), dim=-1)
    # Not exp(s - lse): beside a score of -1e38, lse has no room for log(l). A row with nothing to look at would be NaN,
    # and so would its gradient; both are 0.
    empty = torch.isneginf(lse)[..., None]
    return torch.softmax(s.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0), lse


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(cap(scale * q k^T) + mask) v with every step in float64.

    Args:
        q: [batch, heads, seq_q, head_dim], any floating dtype.
        k: [batch, kv_heads, seq_k, head_dim]; `heads` is a multiple of `kv_heads` (grouped-query attention).
        v: [batch, kv_heads, seq_k, v_dim].
        causal: query i looks at the keys j <= i + seq_k - seq_q.
        scale: defaults to 1 / sqrt(head_dim).
        window: (left, right), the keys before and after its own that a query looks at; None is no bound.
        softcap: cap(s) = softcap * tanh(s / softcap); None is no cap.
    Returns:
        o: [batch, heads, seq_q, v_dim], float64. lse: [batch, heads, seq_q], float64, natural logarithm.
    Raises:
        TypeError, ValueError: see `flashlab.attention.inputs.check_qkv` and `flashlab.attention.options`.
    """
    check_qkv(q, k, v)
    scale, cap = scale_of(scale, q.shape[-1]), softcap_of(softcap)
    k, v = _expand_heads(q, k, v)
    s = scale * (q.double() @ k.double().transpose(-1, -2))
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    p, lse = _probabilities(s, seen)
    # A key that no query may see must not reach the output, whatever V holds there: 0 * NaN is NaN.
    somewhere = seen.any(dim=0)
    o = p[..., somewhere] @ v.double()[..., somewhere, :]
    return o, lse


def attention_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same mathematics as `attention`, eagerly, in the dtype of q: every intermediate is rounded to it.

    It knowingly differs from a fused kernel in one way: scores and probabilities are stored in q.dtype, where a
    kernel keeps them in float32 registers. That makes it the worst implementation that is still right.

    Returns:
        o in q.dtype, [batch, heads, seq_q, v_dim]; lse in float32, [batch, heads, seq_q].
    """
    check_qkv(q, k, v)
    scale, cap = scale_of(scale, q.shape[-1]), softcap_of(softcap)
    k, v = _expand_heads(q, k, v)
    s = (q @ k.transpose(-1, -2)) * scale
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    p, lse = _probabilities(s, visible(q.shape[2], k.shape[2], causal, window, q.device))
    return p @ v, lse


def attention_backward(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    scale: float | None = None, window: Window = None, softcap: float | None = None,
    grad_lse: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of `attention` in float64, from its inputs alone.

    With P the probabilities and delta = rowsum(dO * O):
        dV = P^T dO,   dS = P * (dO V^T - delta + dlse),   dQ = scale * dS K,   dK = scale * dS^T Q,
    dS times 1 - tanh^2 under a soft-cap. A key head's gradient is the sum over the query heads that share it.
    grad_o is like o; grad_lse is like lse, or None for zeros.
    """
    check_qkv(q, k, v)
    like_o = v.new_empty(1).expand(*q.shape[:3], v.shape[3])
    check_results(like_o, {"grad_o": grad_o}, {"grad_lse": grad_lse}, dtypes=False)
    scale, cap = scale_of(scale, q.shape[-1]), softcap_of(softcap)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double() for x in _expand_heads(q, k, v))
    q, do = q.double(), grad_o.double()
    s = scale * (q @ wide_k.transpose(-1, -2))
    slope: torch.Tensor | float = 1.0
    if cap is not None:
        t = torch.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
    p, _ = _probabilities(s, visible(q.shape[2], k.shape[2], causal, window, q.device))
    dp = do @ wide_v.transpose(-1, -2)
    ds = dp - (p * dp).sum(-1, keepdim=True)  # rowsum(P * dP) is rowsum(dO * O)
    if grad_lse is not None:
        ds = ds + grad_lse.double()[..., None]
    ds = scale * p * ds * slope
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do
    return Gradients(ds @ wide_k, *(x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv)))


def low_precision_backward(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options
) -> Gradients:
    """The gradients of `attention_low_precision` by autograd, in the dtype of q: what bounds are calibrated on."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        o, _ = attention_low_precision(q, k, v, **options)
        return Gradients(*torch.autograd.grad(o, (q, k, v), grad_o))
