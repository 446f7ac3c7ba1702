"""What the tests of phase 13 share: inputs, a pass over ranks as threads, the formula of the whole sequence."""

import torch

from flashlab.attention import reference
from flashlab.distributed import mesh_attention, run, shard, unshard


def inputs(n, heads=4, kv_heads=2, head_dim=8, batch=1, dtype=torch.float64, seed=0):
    """q, k, v and the gradient of o, of the whole sequence."""
    g = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, h, n, head_dim, generator=g, dtype=torch.float64).to(dtype) for h in counts]


def both_passes(link, q, k, v, grad_o, function, options, heads):
    """o, dq, dk and dv of a rank, and the bytes that it sent in each pass."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    if heads > 1:
        o = mesh_attention(q, k, v, mesh=link.split(heads), **options)
    else:
        o = function(q, k, v, group=link, **options)
    forward = link.counts.sent
    found = torch.autograd.grad(o, (q, k, v), grad_o)
    return (o.detach(), *found), (forward, link.counts.sent - forward)


def over_ranks(world, whole, function=None, *, layout="zigzag", documents=None, heads=1, **options):
    """o, dq, dk and dv of the whole sequence, and each rank's bytes, by ranks as threads."""
    options = dict(layout=layout, **options) | ({} if documents is None else {"documents": documents})
    cut = dict(layout=layout, documents=documents, heads=heads)
    shards = [[shard(x, rank, world, **cut) for rank in range(world)] for x in whole]
    found = run(world, both_passes, *shards, [function] * world, [options] * world, [heads] * world, timeout=600)
    return [unshard([o[i] for o, _ in found], **cut) for i in range(4)], [sent for _, sent in found]


def formula(q, k, v, grad_o, causal, documents=None):
    """o, dq, dk and dv in float64, each document for itself."""
    found, lengths = [], list(documents or [q.shape[2]])
    for *one, grad in zip(*(x.split(lengths, 2) for x in (q, k, v, grad_o)), strict=True):
        o, _ = reference.attention(*one, causal=causal)
        found.append((o, *reference.attention_backward(grad, *one, causal=causal)))
    return [torch.cat(parts, dim=2) for parts in zip(*found, strict=True)]


def furthest(found, want):
    return max((a.double() - b).abs().max().item() for a, b in zip(found, want, strict=True))
