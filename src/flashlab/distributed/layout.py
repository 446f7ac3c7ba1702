"""How a sequence is dealt out to ranks, and which block of scores a rank computes when which keys are there.

Token p of N on W ranks:

    contiguous   one piece each: rank p // (N / W)
    zigzag       2 W pieces; rank r has piece r and piece 2 W - 1 - r: an early one and a late one
    striped      like cards: rank p % W

Under a causal mask an early query sees few keys and a late one many. So with "contiguous" the last rank works most;
zigzag and stripes give every rank the same share in every step of the ring.

Packed documents are dealt out one by one: each rank has an equal part of each, whatever their lengths.

With `heads` > 1 ranks form a mesh: neighbours in groups of `heads` share a shard of the ring, a run of its rows each
(flashlab.distributed.ulysses).

Sources: zigzag: Zhu, ring-flash-attention (2024), and Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2;
stripes: Brandon et al., "Striped Attention" (2023), arXiv 2311.09431.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from flashlab.attention.inputs import one_of

LAYOUTS = ("contiguous", "zigzag", "striped")


class Block(NamedTuple):
    """What one call of a kernel computes: rows of the rank's queries against rows of the keys that are there.

    causal is aligned at the end, as at the door: the last of these queries sees the last of these keys.
    """

    rows: slice
    keys: slice
    causal: bool


def local_lengths(n: int, world: int, layout: str = "zigzag", documents: Sequence[int] | None = None) -> list[int]:
    """How many tokens of each document a rank has.

    Args:
        n: tokens of the whole sequence. documents: their lengths, with the sum n; None is one.
    Raises:
        ValueError: a layout of another name, documents of another sum, a length that does not divide.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be {one_of([repr(x) for x in LAYOUTS])}")
    lengths = [n] if documents is None else list(documents)
    if sum(lengths) != n or min(lengths, default=0) < 1:
        raise ValueError(f"documents has the lengths {lengths}; each is at least 1, and their sum must be {n}")
    pieces = 2 * world if layout == "zigzag" else world
    for i, length in enumerate(lengths):
        if length % pieces:
            what = "the sequence" if documents is None else f"document {i}"
            raise ValueError(
                f"{what} has {length} tokens; {layout!r} over {world} ranks cuts it into {pieces} equal pieces: pad it "
                f"to {-(-length // pieces) * pieces}"
            )
    return [length // world for length in lengths]


def places(
    n: int, rank: int, world: int, *, layout: str = "zigzag", documents: Sequence[int] | None = None, heads: int = 1
) -> torch.Tensor:
    """Where in the whole sequence each of a rank's rows stands: [n / world], int64.

    Args:
        n, documents: as `local_lengths`. heads: ranks that share a shard of the ring; world is a multiple.
    Raises:
        ValueError: as `local_lengths`; a rank or a number of heads that does not go with world.
    """
    runs = _runs(n, rank, world, layout, documents, heads)
    return torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs])


def _runs(n: int, rank: int, world: int, layout: str, documents: Sequence[int] | None, heads: int) -> list[range]:
    """`places` as runs of rows, which one copy moves each."""
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}; of {world} ranks it is 0 to {world - 1}")
    if heads < 1 or world % heads:
        raise ValueError(f"{world} ranks do not form groups of {heads}: take a divisor of {world}")
    ring, (at, part) = world // heads, divmod(rank, heads)
    found, start = [], 0
    for length in local_lengths(n, ring, layout, documents):
        end = start + ring * length
        if layout == "striped":
            found.append(range(start + at, end, ring))
        else:
            numbers = (at, 2 * ring - 1 - at) if layout == "zigzag" else (at,)
            size = length // len(numbers)
            found += [range(start + i * size, start + (i + 1) * size) for i in numbers]
        start = end
    rows = sum(map(len, found))
    if rows % heads:
        raise ValueError(f"a shard of {rows} tokens is not shared evenly by {heads} ranks: pad the sequence")
    first, cut, before = part * rows // heads, [], 0
    for run in found:
        cut.append(run[max(0, first - before) : max(0, first + rows // heads - before)])
        before += len(run)
    return [run for run in cut if run]


def positions(
    n: int, rank: int, world: int, *, layout: str = "zigzag", documents: Sequence[int] | None = None, heads: int = 1
) -> torch.Tensor:
    """The position of each of a rank's rows in its document, for its rotary embedding; arguments as `places`."""
    mine = places(n, rank, world, layout=layout, documents=documents, heads=heads)
    if documents is None:
        return mine
    ends = torch.tensor(list(documents)).cumsum(0)
    starts = ends - torch.tensor(list(documents))
    return mine - starts[torch.searchsorted(ends, mine, right=True)]


def shard(
    x: torch.Tensor, rank: int, world: int, *, layout: str = "zigzag", documents: Sequence[int] | None = None,
    heads: int = 1, dim: int = -2,
) -> torch.Tensor:  # fmt: skip
    """A rank's rows of x, contiguous in memory; `dim` is the sequence, the rest as `places`."""
    runs = _runs(x.shape[dim], rank, world, layout, documents, heads)
    return torch.cat([x[_at(x, dim, run)] for run in runs], dim)


def unshard(
    parts: Sequence[torch.Tensor], *, layout: str = "zigzag", documents: Sequence[int] | None = None, heads: int = 1
) -> torch.Tensor:
    """The whole sequence again, of the shards of all ranks in order; arguments as `shard`."""
    *before, rows, last = parts[0].shape
    whole = parts[0].new_empty(*before, rows * len(parts), last)
    for there, here in _matched(whole, parts, layout, documents, heads):
        there.copy_(here)
    return whole


def shards(
    x: torch.Tensor, world: int, *, layout: str = "zigzag", documents: Sequence[int] | None = None
) -> torch.Tensor:
    """The rows of all ranks at once, [world, ...]; arguments as `shard`. It has no gradient."""
    *before, rows, last = x.shape
    parts = x.new_empty(world, *before, rows // world, last)
    for there, here in _matched(x, parts, layout, documents, 1):
        here.copy_(there)
    return parts


def _matched(
    whole: torch.Tensor, parts: Sequence[torch.Tensor] | torch.Tensor, layout: str, documents: Sequence[int] | None,
    heads: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Views of the same rows, in the whole sequence and in a shard."""
    for rank, part in enumerate(parts):
        runs = _runs(whole.shape[-2], rank, len(parts), layout, documents, heads)
        for run, rows in zip(runs, part.split([len(run) for run in runs], -2), strict=True):
            yield whole[_at(whole, -2, run)], rows


def _at(x: torch.Tensor, dim: int, run: range) -> tuple[slice, ...]:
    """The index of a run of rows."""
    return (*[slice(None)] * (dim % x.ndim), slice(run.start, run.stop, run.step))


# region: blocks
def blocks(
    rank: int, source: int, world: int, lengths: Sequence[int], *, causal: bool, layout: str = "zigzag"
) -> list[Block]:
    """The blocks that a rank computes when it has the keys of `source`: at most one per document.

    lengths: what a rank has of each document, as `local_lengths` gives it.
    """
    found, start = [], 0
    for n in lengths:
        block = _block(rank, source, n, causal, layout)
        if block is not None:
            rows, keys = (slice(start + s.start, start + s.stop) for s in block[:2])
            found.append(Block(rows, keys, block.causal))
        start += n
    return found


def _block(rank: int, source: int, n: int, causal: bool, layout: str) -> Block | None:
    whole = slice(0, n)
    if not causal:
        return Block(whole, whole, False)
    if source == rank:
        return Block(whole, whole, True)  # the rows stand in order, whatever lies between them
    if layout == "contiguous":
        return Block(whole, whole, False) if source < rank else None
    if layout == "zigzag":
        half = n // 2
        if source < rank:  # their early piece is before both of mine, their late one behind both
            return Block(whole, slice(0, half), False)
        return Block(slice(half, n), whole, False)  # both of theirs lie between my two
    if source < rank:  # striped: my row i stands behind their row i
        return Block(whole, whole, True)
    return Block(slice(1, n), slice(0, n - 1), True) if n > 1 else None  # and here before it


# endregion


def pairs(block: Block) -> int:
    """The pairs of a query and a key that a block computes: work, whatever the kernel."""
    m, n = (s.stop - s.start for s in block[:2])
    return m * n - m * (m - 1) // 2 if block.causal else m * n
