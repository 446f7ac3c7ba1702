"""Ring attention: every rank keeps its queries, keys and values travel round, and parts merge by their lse.

    o = ring_attention(q, k, v, causal=True)          # on every rank, of its shards

In step s a rank has the keys of rank - s. It computes the block of its queries against them and merges it in; meanwhile
the keys are on their way to the next rank already. After as many steps as ranks everybody has seen all keys, and nobody
has held more than two shards of them.

The backward pass goes the same way round. dQ stays where Q is. dK and dV travel with their K and V, and every rank adds
what its queries give; after one step more than K and V they are home.

Sources: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), arXiv
2310.01889; Zhu, ring-flash-attention (2024).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashlab.attention.backends import INSTEAD
from flashlab.attention.door import choose_backend
from flashlab.attention.inputs import check_causal, refuse_words, scale_of
from flashlab.distributed.layout import LAYOUTS, Block, blocks, local_lengths, pairs
from flashlab.distributed.link import Group, Link, connect
from flashlab.distributed.parts import added, block_backward
from flashlab.runtime.dispatch import no_forward_mode, once


class Plan(NamedTuple):
    """What all ranks agree on. lengths: a rank's tokens of each document; together: key heads that go round at once."""

    lengths: list[int]
    causal: bool
    layout: str
    scale: float
    backend: str
    overlap: bool = True
    together: int = 1


ENOUGH = 5e12
"""FLOP of a step, half of its pairs masked, beside which its own start and end count little: 10 ms of a Hopper GPU."""


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Group = None, causal: bool = False,
    layout: str = "zigzag", documents: Sequence[int] | None = None, scale: float | None = None, backend: str = "auto",
    overlap: bool = True, together: int | None = None, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale * q k^T + mask) v of one sequence that lies on all ranks, with its gradient.

    Args:
        q: [batch, heads, n, head_dim], this rank's shard as `flashlab.distributed.shard` makes it; k, v: [batch,
            kv_heads, n, head_dim]. The same on every rank.
        group: the ranks: None for all that torchrun started, a process group, or a Link.
        causal: a query sees no key behind its own place in the sequence (in its document).
        layout: by which `shard` dealt the sequence out: "contiguous", "zigzag" or "striped".
        documents: the lengths of packed documents, of the whole sequence; a query sees keys of its own alone.
        scale: 1 / sqrt(head_dim) unless given. backend: of the door, for each block; "auto" as there.
        overlap: False waits for the next keys before it computes: to see what sending meanwhile is worth.
        together: key heads that go round at a time, a divisor of their number. What is on its way, and the gradients'
            float32, are of those alone: the fewer, the less memory. None: on a GPU as few as keep it busy for 10 ms,
            which on short sequences is all of them; else all.
    Returns:
        o: like q. State and parts are in float32 (see flashlab.distributed.parts).
    Raises:
        TypeError, ValueError: a sentence that names the argument, on every rank where ranks differ. RankLost: another
            rank has ended. NotImplementedError: for a second derivative.
    """
    if others:
        if {"window", "attn_mask", "mask"} & set(others):
            raise TypeError(
                f"ring_attention has no {next(iter(others))}: its layouts balance a causal mask or none, and with a "
                "window most blocks are empty: give each rank a contiguous piece and its neighbours' last keys"
            )
        refuse_words("ring_attention", others, "group, causal, layout, documents, scale, backend, overlap and together")
    link = connect(group)
    plan = plan_of(link, q, k, v, causal, layout, documents, scale, backend, overlap, together)
    return _Ring.apply(q, k, v, link, plan)


def plan_of(
    link: Link, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, layout: str = "zigzag",
    documents: Sequence[int] | None = None, scale: float | None = None, backend: str = "auto", overlap: bool = True,
    together: int | None = None,
) -> Plan:  # fmt: skip
    """The plan of `ring_attention`; raises what that raises, before anything is sent."""
    check_causal(causal)
    chosen = choose_backend(q, k, v, causal=causal, backend=backend).backend
    batch, heads, n, head_dim = q.shape
    if k.shape[2] != n:
        raise ValueError(f"q has {n} rows and k has {k.shape[2]}: both are the rank's shard of one sequence")
    lengths = local_lengths(n * link.world, link.world, layout, documents)
    if together is None:
        together = _together(batch * heads * n * n * head_dim, k.shape[1]) if q.is_cuda else k.shape[1]
    elif together < 1 or k.shape[1] % together:
        raise ValueError(f"together is {together}; it must divide the {k.shape[1]} key heads")
    numbers = (*q.shape, k.shape[1], q.element_size(), causal, LAYOUTS.index(layout), together, *lengths)
    link.agree("what ring_attention is asked for", numbers, _said)
    return Plan(lengths, causal, layout, scale_of(scale, head_dim), chosen, overlap, together)


def _together(products: int, kv_heads: int) -> int:
    """The fewest key heads whose share of so many products of two numbers, in Q K^T and in P V, is ENOUGH."""
    each = 2 * products / kv_heads
    return next((h for h in range(1, kv_heads) if kv_heads % h == 0 and h * each >= ENOUGH), kv_heads)


def _said(numbers: tuple[int, ...]) -> str:
    shape, (kv_heads, itemsize, causal, layout, together) = list(numbers[:4]), numbers[4:9]
    said = f"{kv_heads} key heads, {together} together, {itemsize} bytes per number"
    return f"q {shape}, {said}, {'causal' if causal else 'not causal'}, {LAYOUTS[layout]!r}"


# region: forward
def ring_forward(
    link: Link, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [batch, heads, n, head_dim] and lse [batch, heads, n] of this rank's queries, as the state has them."""
    state = None
    for kv, todo in _round(link, (k, v), plan):
        for block in todo:  # the rank's own keys first: each row sees one at least
            state = added(
                state, plan.backend, q, kv[0], kv[1], block.rows, block.keys, causal=block.causal, scale=plan.scale,
                first=link.step == 0, last=link.step + 1 == link.world,
            )  # fmt: skip
    assert state is not None, "a rank has rows, and they see its own keys"
    return state


# endregion


# region: round
def _round(
    link: Link, kv: tuple[torch.Tensor, torch.Tensor], plan: Plan
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], list[Block]]]:
    """Step by step the keys and values that are there, and what to compute with them; meanwhile they travel on."""
    for step in range(link.world):
        link.step = step
        last = step + 1 == link.world
        if not last:
            coming, arrived = link.pass_on(kv)
            if not plan.overlap:
                arrived()
        source = (link.rank - step) % link.world
        todo = blocks(link.rank, source, link.world, plan.lengths, causal=plan.causal, layout=plan.layout)
        begin = time.perf_counter()
        yield kv, todo
        if todo:
            link.note("block", begin, sum(map(pairs, todo)))
        if not last:
            if plan.overlap:
                arrived()
            kv = coming


# endregion


# region: backward
def ring_backward(
    link: Link, grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq of this rank's queries, as wide as the state, dk and dv of its keys; o and lse are of the whole rows."""
    dq = dk = dv = None
    arrived: Callable[[], None] | None = None
    for kv, todo in _round(link, (k, v), plan):
        found = [
            block_backward(
                plan.backend, grad_o[:, :, rows], q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys],
                o[:, :, rows], lse[:, :, rows], causal=causal, scale=plan.scale,
            )
            for rows, keys, causal in todo
        ]  # fmt: skip
        if arrived is not None:  # what the ranks before have found for the same keys
            arrived()
        for block, (dq_part, dk_part, dv_part) in zip(todo, found, strict=True):
            dq = _summed(dq, q, block.rows, dq_part, lse.dtype)
            dk = _summed(dk, k, block.keys, dk_part, lse.dtype)
            dv = _summed(dv, v, block.keys, dv_part, lse.dtype)
        assert dk is not None and dv is not None, "a rank's own keys come first"
        if link.step + 1 == link.world:  # nothing is added any more: half of the bytes
            dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        (dk, dv), arrived = link.pass_on((dk, dv))  # to whom these keys go next; at the end that is whose they are
    assert arrived and dq is not None and dk is not None and dv is not None, "there is at least one rank"
    arrived()
    return dq, dk, dv


def _summed(
    whole: torch.Tensor | None, x: torch.Tensor, rows: slice, part: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of x, in dtype, with a part of some rows added. The first part of all rows is all there is."""
    if whole is None:
        if part.shape == x.shape:
            return part.to(dtype)
        whole = x.new_zeros(x.shape, dtype=dtype)
    whole[:, :, rows] += part
    return whole


# endregion


class _Ring(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode("ring_attention", INSTEAD))

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, link: Link, plan: Plan) -> torch.Tensor:
        o, lse = torch.empty_like(q), None
        for heads, kv_heads in _groups(q, k, plan):
            of_heads, lse_of_heads = ring_forward(link, q[:, heads], k[:, kv_heads], v[:, kv_heads], plan)
            lse = lse_of_heads.new_empty(q.shape[:3]) if lse is None else lse
            o[:, heads], lse[:, heads] = of_heads, lse_of_heads
        assert lse is not None, "there is at least one head"
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.link, ctx.plan = link, plan
        return o

    @staticmethod
    @once("ring_attention", INSTEAD)
    def backward(ctx: Any, grad_o: torch.Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for heads, kv_heads in _groups(q, k, ctx.plan):
            dq[:, heads], dk[:, kv_heads], dv[:, kv_heads] = ring_backward(
                ctx.link, grad_o[:, heads], q[:, heads], k[:, kv_heads], v[:, kv_heads], o[:, heads], lse[:, heads],
                ctx.plan,
            )  # fmt: skip
        return dq, dk, dv, None, None


def _groups(q: torch.Tensor, k: torch.Tensor, plan: Plan) -> Iterator[tuple[slice, slice]]:
    """The query heads and the key heads that go round together."""
    shared = q.shape[1] // k.shape[1]
    for first in range(0, k.shape[1], plan.together):
        end = first + plan.together
        yield slice(first * shared, end * shared), slice(first, end)
