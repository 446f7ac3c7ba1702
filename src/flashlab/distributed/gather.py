"""All-gather attention: every rank fetches all keys and values, then calls a kernel once for each run of its queries.

The simplest way, and at short lengths not a bad one. What it costs is memory: K and V of the whole sequence on every
rank, so that the longest sequence does not grow with the number of ranks.

Source: Dubey et al., "The Llama 3 Herd of Models" (2024), arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashlab.attention.door import flash_attention
from flashlab.distributed.layout import places, shard, unshard
from flashlab.distributed.link import Group, Link, connect
from flashlab.distributed.ring import plan_of

__all__ = ["all_gather_attention"]


def all_gather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Group = None, causal: bool = False,
    layout: str = "zigzag", documents: Sequence[int] | None = None, scale: float | None = None, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """What `ring_attention` computes, by fetching all keys first; arguments as there.

    Raises:
        ValueError: the "striped" layout under a mask: its rows are no run of the sequence; and as `ring_attention`.
    """
    link = connect(group)
    plan = plan_of(link, q, k, v, causal, layout, documents, scale, backend)
    if layout == "striped" and (causal or documents is not None):
        raise ValueError(
            "layout is 'striped', whose rows are no run of the sequence: no kernel's causal mask fits them; take "
            "'contiguous' or 'zigzag', or ring_attention"
        )
    whole = _Gather.apply(torch.stack([k, v]), link, layout, documents)
    options: dict[str, Any] = dict(causal=causal, scale=plan.scale, backend=backend)
    if not causal and documents is None:
        return flash_attention(q, *whole, **options)
    n, found, at = q.shape[2] * link.world, [], 0
    mine = places(n, link.rank, link.world, layout=layout, documents=documents)
    start = 0
    for local in plan.lengths:
        end = start + local * link.world
        for size in (local // 2,) * 2 if layout == "zigzag" else (local,):
            keys = slice(start, int(mine[at + size - 1]) + 1 if causal else end)
            k_seen, v_seen = whole[:, :, :, keys]
            found.append(flash_attention(q[:, :, at : at + size], k_seen, v_seen, **options))
            at += size
        start = end
    return torch.cat(found, dim=2)


class _Gather(torch.autograd.Function):
    """K and V of the whole sequence, in order; backward, every rank gets the sum of what all have found for its rows."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, link: Link, layout: str, documents: Sequence[int] | None) -> torch.Tensor:
        ctx.link, ctx.layout, ctx.documents = link, layout, documents
        return unshard(list(link.all_gather(kv)), layout=layout, documents=documents)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        link, options = ctx.link, dict(layout=ctx.layout, documents=ctx.documents)
        wide = grad if grad.dtype == torch.float64 else grad.float()
        theirs = link.all_to_all(torch.stack([shard(wide, r, link.world, **options) for r in range(link.world)]))
        return theirs.sum(0).to(grad.dtype), None, None, None
