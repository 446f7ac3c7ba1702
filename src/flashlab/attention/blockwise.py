"""Attention by PyTorch's own matrix products, a block of queries at a time: what is fast on a CPU.

A block of queries meets all the keys that it sees at once. So a row's scores are all there, and its softmax needs no
running maximum; the memory for scores is [rows of the block, keys], never [seq_q, seq_k]. The backward pass computes
each block's probabilities again. Products are in float32 for 16-bit inputs, and in float64 for float64.

Query heads that share a key head are rows of one product. What a query may not see is never multiplied where the whole
block does not see it, and nowhere where an input holds a NaN or an infinity: 0 * NaN is NaN.

Source: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021), arXiv 2112.05682.
"""

import math
from collections.abc import Iterator

import torch

from flashlab.attention.options import Band, band

ROWS = 128  # queries in a block; fewer where there are many keys
SCORES = 2**19  # scores in memory at a time, but for a single row's: 2 MiB of float32, which a cache holds


def attention_blockwise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, left: int | None, right: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(cap(scale * q k^T) + mask) v.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], of one floating dtype.
        left, right: how many keys before and after its own position a query sees; None is no bound.
        softcap: cap(s) = softcap * tanh(s / softcap); None is no cap.
    Returns:
        o: like q, in its order in memory; lse: [batch, heads, seq_q], float32 or float64. A row that sees no key gives
        o = 0 and lse = -inf.
    """
    Q, K, V = _wide(q, k.shape[1]), _wide(k), _wide(v)
    O, lse = torch.zeros_like(Q), Q.new_full(Q.shape[:3], -math.inf)
    for heads, rows, keys, edges in _blocks(Q, K, (left, right), V):
        s = _scores(Q[heads, :, rows], K[heads, keys], scale, softcap)
        if softcap is not None:
            s.mul_(softcap)
        _hide(s, rows, keys, edges, -math.inf)
        m = s.amax(-1, keepdim=True)
        m.masked_fill_(m.isneginf(), 0.0)  # a row that sees no key: -inf - (-inf) is NaN
        p = s.sub_(m).exp_()
        l = p.sum(-1, keepdim=True)
        o = (p.flatten(1, 2) @ V[heads, keys]).unflatten(1, l.shape[1:3])
        O[heads, :, rows] = o.div_(l.masked_fill(l == 0, 1.0))
        lse[heads, :, rows] = m.add_(l.log_()).squeeze(-1)
    return _like(q, O), lse.view(q.shape[:3])


def attention_backward_blockwise(
    grad_o: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, *, scale: float, left: int | None, right: int | None, softcap: float | None,
    partial: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv, each like its input, from what `attention_blockwise` took and gave; grad_lse may be None.

    partial: o and lse are of more keys than these, and what comes out is these keys' share of the gradient.
    """
    Q, dO, K, V = _wide(q, k.shape[1]), _wide(grad_o, k.shape[1]), _wide(k), _wide(v)
    L, delta = lse.to(Q.dtype), (grad_o.to(Q.dtype) * o).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse  # d lse / d score is P too
    L, delta = (x.reshape(*Q.shape[:3], 1) for x in (L.masked_fill(L.isneginf(), 0.0), delta))
    dQ, dK, dV = (torch.zeros_like(x) for x in (Q, K, V))
    for heads, rows, keys, edges in _blocks(Q, K, (left, right), V, dO):
        q_rows, do_rows = Q[heads, :, rows], dO[heads, :, rows].flatten(1, 2)
        s = _scores(q_rows, K[heads, keys], scale, softcap)
        slope = None if softcap is None else 1 - s * s
        p = (s if softcap is None else s.mul_(softcap)).sub_(L[heads, :, rows]).exp_()
        _hide(p, rows, keys, edges, 0.0)
        if not partial:
            l = p.sum(-1, keepdim=True)  # 1, but for the rounding of a large lse to float32
            p.div_(l.masked_fill_(l == 0, 1.0))
        dV[heads, keys] += p.flatten(1, 2).transpose(1, 2) @ do_rows
        ds = (do_rows @ V[heads, keys].transpose(1, 2)).view(p.shape).sub_(delta[heads, :, rows]).mul_(p)
        ds = (ds if slope is None else ds.mul_(slope)).flatten(1, 2)
        dQ[heads, :, rows] = (ds @ K[heads, keys]).view(q_rows.shape)
        dK[heads, keys] += ds.transpose(1, 2) @ q_rows.flatten(1, 2)
    return _like(q, dQ.mul_(scale)), _like(k, dK.mul_(scale)), _like(v, dV)


def _wide(x: torch.Tensor, kv_heads: int | None = None) -> torch.Tensor:
    """[batch * kv_heads, rows, head_dim] at least in float32; [batch * kv_heads, group, rows, head_dim] of a query."""
    x = x if x.dtype == torch.float64 else x.float()
    return (x if kv_heads is None else x.unflatten(1, (kv_heads, -1))).flatten(0, 1)


def _like(x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(found.view(x.shape))


def _blocks(
    Q: torch.Tensor, K: torch.Tensor, window: tuple[int | None, int | None], *others: torch.Tensor
) -> Iterator[tuple[slice, slice, slice, Band]]:
    """Some key heads, some rows of queries, the keys that these see, and the band of `flashlab.attention.options`."""
    (all_heads, group, seq_q, _), seq_k = Q.shape, K.shape[1]
    edges = band(seq_q, seq_k, window=window)
    first, last = edges
    rows = min(seq_q, ROWS, max(16, SCORES // max(1, group * seq_k)))
    if edges != (None, None) and not all(bool(x.isfinite().all()) for x in (Q, K, *others)):
        rows = 1  # a row sees all the keys of its own slice: so what it does not see cannot reach it
    for start in range(0, seq_q, max(1, rows)):
        stop = min(start + rows, seq_q)
        begin = 0 if first is None else max(0, start + first)
        end = seq_k if last is None else min(seq_k, stop + last)
        if begin >= end:
            continue
        step = max(1, SCORES // (group * (stop - start) * (end - begin)))
        for head in range(0, all_heads, step):
            yield slice(head, head + step), slice(start, stop), slice(begin, end), edges


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """scale * q k^T, [heads, group, rows, keys]; under a soft-cap tanh(scale * q k^T / softcap)."""
    factor = scale if softcap is None else scale / softcap
    s = torch.baddbmm(q.new_zeros(()), q.flatten(1, 2), k.transpose(1, 2), beta=0, alpha=factor)
    return (s if softcap is None else s.tanh_()).view(*q.shape[:3], -1)


def _hide(x: torch.Tensor, rows: slice, keys: slice, edges: Band, value: float) -> None:
    """Fill in what its query does not see; x is [..., rows, keys]. Only columns that some row does not see are read."""
    i = torch.arange(rows.start, rows.stop, device=x.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=x.device)
    if edges.first is not None:
        cut = max(0, rows.stop - 1 + edges.first - keys.start)
        x[..., :cut].masked_fill_(j[:cut] < i + edges.first, value)
    if edges.last is not None:
        cut = max(0, rows.start + edges.last + 1 - keys.start)
        x[..., cut:].masked_fill_(j[cut:] > i + edges.last, value)
