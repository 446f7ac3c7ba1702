"""All-gather attention: every rank fetches all keys and values, then calls a kernel once for each run of its queries.

The simplest way, and at short lengths not a bad one. What it costs is memory: K and V of the whole sequence on every
rank, so that the longest sequence does not grow with the number of ranks.

Source: Dubey et al., "The Llama 3 Herd of Models" (2024), arXiv 2407.21783, section 3.3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flashlab.attention.backends import INSTEAD
from flashlab.distributed.layout import Block, places, shards, unshard
from flashlab.distributed.link import Group, Link, connect
from flashlab.distributed.parts import block_backward, block_forward
from flashlab.distributed.ring import Plan, plan_of
from flashlab.runtime.dispatch import no_forward_mode, once


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
    return _Gathered.apply(q, k, v, link, plan, documents)


def _runs(link: Link, plan: Plan, documents: Sequence[int] | None) -> list[Block]:
    """Each run of a rank's queries against the keys that it sees, of the whole sequence in order."""
    mine = places(sum(plan.lengths) * link.world, link.rank, link.world, layout=plan.layout, documents=documents)
    found, at, start = [], 0, 0
    for local in plan.lengths:
        end = start + local * link.world
        for size in (local // 2,) * 2 if plan.causal and plan.layout == "zigzag" else (local,):
            last = int(mine[at + size - 1]) + 1 if plan.causal else end
            found.append(Block(slice(at, at + size), slice(start, last), plan.causal))
            at += size
        start = end
    return found


class _Gathered(torch.autograd.Function):
    """Backward, every rank gets the sum of what all have found for its keys."""

    jvp = staticmethod(no_forward_mode("all_gather_attention", INSTEAD))

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, link: Link, plan: Plan,
                documents: Sequence[int] | None) -> torch.Tensor:  # fmt: skip
        ctx.link, ctx.plan, ctx.runs = link, plan, _runs(link, plan, documents)
        ctx.cut = dict(layout=plan.layout, documents=documents)
        whole = unshard(list(link.all_gather(torch.stack([k, v]))), **ctx.cut)
        parts = [
            block_forward(
                plan.backend, q[:, :, rows], whole[0][:, :, keys], whole[1][:, :, keys], causal=causal, scale=plan.scale
            )
            for rows, keys, causal in ctx.runs
        ]
        o, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        o = o.to(q.dtype)
        ctx.save_for_backward(q, whole, o, lse)
        return o

    @staticmethod
    @once("all_gather_attention", INSTEAD)
    def backward(ctx: Any, grad_o: torch.Tensor) -> Any:
        (q, whole, o, lse), link = ctx.saved_tensors, ctx.link
        dq, dkv = q.new_empty(q.shape), torch.zeros_like(whole, dtype=lse.dtype)
        for rows, keys, causal in ctx.runs:
            dq[:, :, rows], dk, dv = block_backward(
                ctx.plan.backend, grad_o[:, :, rows], q[:, :, rows], whole[0][:, :, keys], whole[1][:, :, keys],
                o[:, :, rows], lse[:, :, rows], causal=causal, scale=ctx.plan.scale,
            )  # fmt: skip
            dkv[0][:, :, keys] += dk
            dkv[1][:, :, keys] += dv
        theirs = link.all_to_all(shards(dkv, link.world, **ctx.cut))
        dk, dv = theirs.sum(0).to(whole.dtype)
        return dq, dk, dv, None, None, None
