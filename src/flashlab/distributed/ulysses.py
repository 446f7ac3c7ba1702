"""Ulysses: the ranks exchange, so that each has some heads of the whole sequence; and the mesh of both ways.

    before   every head of n tokens           [batch, heads, n, head_dim]
    after    heads / W heads of all tokens    [batch, heads / W, W n, head_dim]

An all-to-all each of q, k and v, any kernel on whole rows, an all-to-all of o. Every rank has the same work under any
mask, and what it sends does not grow with the ranks; but there are no more of them than key heads. So on many ranks
both are used: groups of neighbours exchange heads, and rings go through the groups, [world / heads, heads].

Sources: Jacobs et al., "DeepSpeed Ulysses" (2023), arXiv 2309.14509; the mesh: Fang and Zhao, "USP" (2024), arXiv
2405.07719.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flashlab.attention.backends import INSTEAD
from flashlab.attention.door import flash_attention
from flashlab.distributed.layout import local_lengths, shards, unshard
from flashlab.distributed.link import Group, Link, connect
from flashlab.distributed.ring import ring_attention
from flashlab.runtime.dispatch import no_forward_mode


def exchange(x: torch.Tensor, link: Link, *, to_heads: bool, layout: str = "contiguous") -> torch.Tensor:
    """Heads for tokens: [batch, heads, n, head_dim] to [batch, heads / world, world * n, head_dim]; or back.

    layout: by which the ranks hold the sequence; on the side of heads it is in order. It has a gradient: the exchange
    the other way.
    """
    return _Exchange.apply(x, link, to_heads, layout)


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Group = None, causal: bool = False,
    layout: str = "contiguous", scale: float | None = None, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """What `ring_attention` computes, by exchanging heads for tokens; arguments as there.

    Raises:
        ValueError: heads that the ranks do not share evenly; and as `flashlab.flash_attention`.
    """
    link = connect(group)
    _check_heads(link, q, k)
    local_lengths(q.shape[2] * link.world, link.world, layout)
    wide = (exchange(x, link, to_heads=True, layout=layout) for x in (q, k, v))
    o = flash_attention(*wide, causal=causal, scale=scale, backend=backend)
    return exchange(o, link, to_heads=False, layout=layout)


def mesh_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mesh: tuple[Link, Link], causal: bool = False,
    layout: str = "zigzag", documents: Sequence[int] | None = None, scale: float | None = None, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """What `ring_attention` computes, on a mesh: rings through groups of ranks that share the heads of a shard.

    Args:
        q, k, v: as `shard(..., heads=H)` deals them out. mesh: `Link.split(H)`, which is made once.
        causal, layout, documents, scale, backend: as `ring_attention`.
    """
    around, beside = mesh
    _check_heads(beside, q, k)
    wide = (exchange(x, beside, to_heads=True) for x in (q, k, v))
    options: dict[str, Any] = dict(causal=causal, layout=layout, documents=documents, scale=scale, backend=backend)
    return exchange(ring_attention(*wide, group=around, **options), beside, to_heads=False)


def _check_heads(link: Link, q: torch.Tensor, k: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % link.world:
            raise ValueError(
                f"{name} has {x.shape[1]} heads, which {link.world} ranks do not share evenly: take a divisor of it "
                "for the heads, and a ring for the rest (mesh_attention)"
            )
    numbers = (*q.shape, k.shape[1], q.element_size())
    link.agree("the shape of q, k and v", numbers, lambda x: f"q {list(x[:4])} and {x[4]} key heads")


class _Exchange(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode("ulysses_attention", INSTEAD))

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: Link, to_heads: bool, layout: str) -> torch.Tensor:
        ctx.link, ctx.to_heads, ctx.layout = link, to_heads, layout
        if to_heads:
            theirs = link.all_to_all(x.unflatten(1, (link.world, -1)).movedim(1, 0))
            return unshard(list(theirs), layout=layout)
        theirs = link.all_to_all(shards(x, link.world, layout=layout))
        return theirs.movedim(0, 1).flatten(1, 2)  # in a batch of one nothing moves

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, ctx.link, not ctx.to_heads, ctx.layout), None, None, None
