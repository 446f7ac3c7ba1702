"""What each way sends and waits for, in exact numbers; and a simulation of many GPUs from measured and published ones.

    work(4, 64, causal=True, layout="zigzag")[step][rank]      pairs of a query and a key
    critical_path(...)                                           steps as long as their busiest rank, added up
    sent_bytes("ring", 4, ...)                                   by a rank, in a forward or a backward pass
    simulate("ring", machine, 64, ...)                           seconds, with blocks and sends one behind the other

The simulation knows three things: how fast a kernel is at a length (measured on one GPU), how fast links are
(published), and what a step costs beside them. It has no congestion and no slow GPU, so it is kinder than a cluster.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlab.attention.inputs import one_of
from flashlab.distributed.layout import blocks, local_lengths, pairs

WAYS = ("gather", "ring", "ulysses", "mesh")


def work(world: int, n: int, *, causal: bool, layout: str) -> list[list[int]]:
    """Pairs of a query and a key by step of the ring and rank; n is the whole sequence."""
    lengths = local_lengths(n, world, layout)
    same, before, after = (  # a block depends on nothing but which of the two comes first
        sum(map(pairs, blocks(rank, source, world, lengths, causal=causal, layout=layout)))
        for rank, source in ((0, 0), (1, 0), (0, 1))
    )
    # The keys that are there at a step are of rank - step: an earlier one, until the ring has gone round.
    return [[before if rank >= step else after for rank in range(world)] if step else [same] * world
            for step in range(world)]  # fmt: skip


def critical_path(world: int, n: int, *, causal: bool, layout: str) -> int:
    """The pairs that are computed one after the other: of each step those of its busiest rank."""
    return sum(map(max, work(world, n, causal=causal, layout=layout)))


def sent_bytes(
    way: str, world: int, n: int, *, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2, backward: bool = False
) -> int:
    """Bytes that one rank sends in a forward pass, or in its backward pass.

    Args:
        way: "gather", "ring" or "ulysses". n: rows of a rank, of one batch. itemsize: bytes per number of q, k and v; a
            gradient that is summed over ranks has 4 at least.
    Raises:
        ValueError: another way.
    """
    if way not in WAYS[:3]:
        raise ValueError(f"way is {way!r}; it must be {one_of([repr(x) for x in WAYS[:3]])}")
    kv, q = 2 * kv_heads * n * head_dim, heads * n * head_dim  # numbers in a shard
    if way == "ulysses":  # q, k and v there, o back; backward the same the other way
        return (2 * q + kv) * itemsize // world * (world - 1)
    forward = (world - 1) * kv * itemsize
    if not backward:
        return forward
    summed = max(4, itemsize)
    if way == "gather":
        return (world - 1) * kv * summed
    return forward + (kv * ((world - 1) * summed + itemsize) if world > 1 else 0)  # the last step is no sum any more


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes.

    Attributes:
        tflops: measured speed of a kernel by its length, 10^12 FLOP/s; between two lengths it is interpolated.
        backward: the same of the backward kernel, with 2.5 times the FLOP; None: as fast as tflops.
        node: GPUs that are linked to each other directly. inside, between: 10^9 bytes per second that a GPU sends
            within its node and out of it.
        step_us: what a step takes beside the kernel and the link: launches, the merge, waiting for the slowest rank.
        in_ring: times that a ring's blocks take of one kernel's time for the same work, forward and backward. Both as
            measured on four H200 (lecture 13).
        memory: 10^9 bytes per second that a copy reads and writes: what is fetched or exchanged is put in order.
    """

    tflops: Mapping[int, float]
    node: int = 8
    inside: float = 450.0
    between: float = 50.0
    step_us: float = 150.0
    in_ring: tuple[float, float] = (1.01, 1.06)
    memory: float = 4000.0
    backward: Mapping[int, float] | None = None

    def speed(self, n: float, backward: bool = False) -> float:
        """FLOP/s of a kernel over n rows; no faster than measured beyond the longest."""
        tflops = self.backward if backward and self.backward else self.tflops
        known = sorted(tflops)
        return 1e12 * float(np.interp(math.log(n), [math.log(x) for x in known], [tflops[x] for x in known]))

    def seconds(self, flop: Any, n: float, backward: bool = False) -> Any:
        """Of so many FLOP, a number or an array, of a forward pass over n rows, or of its backward pass."""
        return flop * (2.5 if backward else 1) / self.speed(n, backward)


def one_gpu(machine: Machine, n: int, *, heads: int, head_dim: int, both: bool = False) -> float:
    """Seconds of one GPU with the whole sequence, of a causal forward pass; `both`: and of its backward pass."""
    flop = 2 * heads * head_dim * n * n
    return sum(machine.seconds(flop, n, backward) for backward in (False, True)[: 1 + both])


def simulate(
    way: str, machine: Machine, world: int, n: int, *, heads: int, kv_heads: int, head_dim: int, layout: str = "zigzag",
    group: int = 8, both: bool = False,
) -> float:  # fmt: skip
    """Seconds of a causal forward pass over n tokens in 16 bits; infinity where the way has no room for the ranks.

    Args:
        way: of `WAYS`. group: ranks of a mesh that share heads; they are in one node. both: and of the backward pass,
            whose gradients of keys and values travel in float32.
    """
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; it must be {one_of([repr(x) for x in WAYS])}")
    flop, local, group = 4 * heads * head_dim, n // world, min(group, machine.node, world)
    kv, q = 4 * kv_heads * local * head_dim, 2 * heads * local * head_dim
    across = machine.between if world > machine.node else machine.inside
    if way == "ulysses" and world > kv_heads or way == "mesh" and (group > kv_heads or world % group):
        return math.inf

    def one_pass(backward: bool) -> float:
        if way == "gather":  # a ring of NCCL's own, then the busiest rank's kernel; backward, gradients come home
            busiest = max(map(sum, zip(*work(world, n, causal=True, layout=layout), strict=True)))
            sent = (world - 1) * kv * (1 + backward) / (across * 1e9)
            # whole tensors: cleared, added to, dealt out and summed; or only put in order
            copied = world * kv * (12 if backward else 2) / (machine.memory * 1e9)
            return sent + copied + machine.seconds(flop * busiest, local, backward) + machine.step_us / 1e6
        if way == "ulysses":
            each = machine.seconds(flop * n * n / 2 / world, n, backward)
            return _exchange(machine, world, 2 * q + kv) + each + machine.step_us / 1e6
        if way == "mesh":
            ring = _ring(machine, world // group, n, flop // group, kv, layout, group, backward)
            return _exchange(machine, group, 2 * q + kv) + ring
        return _ring(machine, world, n, flop, kv, layout, 1, backward)

    return sum(one_pass(backward) for backward in (False, True)[: 1 + both])


def _exchange(machine: Machine, world: int, sent: float) -> float:
    """Seconds of the all-to-alls: what leaves the node goes by the slower link, and all is copied once."""
    out = max(0, world - machine.node) / world
    return sent * ((1 - out - 1 / world) / machine.inside + out / machine.between + 2 / machine.memory) / 1e9


def _ring(machine: Machine, world: int, n: int, flop: int, kv: int, layout: str, apart: int, backward: bool) -> float:
    """Rank by rank: a step begins when the one before has ended and its keys are there; they are sent meanwhile.
    Backward the gradients follow a step behind their keys, and nothing hides their last step."""
    flops = machine.in_ring[backward] * flop * np.array(work(world, n, causal=True, layout=layout))
    seconds = machine.seconds(flops, n // world, backward)
    nodes = np.arange(world) * apart // machine.node
    link = np.where(nodes == np.roll(nodes, 1), machine.inside, machine.between) * 1e9  # from the previous rank
    begin = np.zeros(world)
    for step in range(world):
        ended = begin + seconds[step] + machine.step_us / 1e6
        if step + 1 == world:
            break
        sent = kv + (2 * kv if backward and step else 0)
        arrives = np.maximum(begin, np.roll(begin, 1)) + sent / link
        begin = np.maximum(ended, arrives)
    if backward and world > 1:
        ended = np.maximum(ended, begin + 2 * kv / link) + kv / link
    return float(ended.max())
