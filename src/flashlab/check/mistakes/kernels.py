"""The mistakes that only a tensor-core kernel can make, known by what they give: for each a slug, a sentence, a model.

The mistakes of flashlab.check.mistakes.attention are about attention; these are about fragments, lanes and places in
shared memory. A model predicts the output of one small problem, one tile of keys, to a few roundings; what matches
it has been explained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

Tensor = torch.Tensor
ROWS = 64  # of Q, K and V in the small problem: one tile of each
_CHUNK = 8  # elements of 16 bytes


def explain(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """The slug and the sentence of the mistake that ``forward(q, k, v, causal=..., scale=...)`` makes, if it is known.

    Args:
        forward: takes q, k, v [1, 1, rows, head_dim] in fp16 and returns (o, lse).
    """
    q, k, v = _tensors(ROWS, head_dim)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    if o.isnan().all():
        return "nan-everywhere", (
            "every output is NaN, from the first tile on. At the start the maximum is -inf and the sum 0: which "
            "difference is +inf or -inf - (-inf), and which product is inf * 0?"
        )
    one = [x[0, 0].double() for x in (q, k, v)]
    truth = _attend(*one)
    if _near(o, truth):
        return _causal(forward, head_dim) or _split(forward, head_dim)
    for slug, sentence, prediction in _predictions(*one):
        if not _near(prediction, truth) and _near(o, prediction):
            return slug, sentence
    return None


def _tensors(rows: int, head_dim: int, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)

    def normal(n: int) -> Tensor:
        return (1.5 * torch.randn(1, 1, n, head_dim, generator=generator)).half()

    return normal(queries or rows), normal(rows), normal(rows)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 0.012)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """exp(s - the row's maximum), [rows, keys]."""
    s = q @ k.T / math.sqrt(q.shape[1])
    return torch.exp(s - s.amax(1, keepdim=True))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = _weights(q, k)
    return p @ v / p.sum(1, keepdim=True)


def _swizzled(x: Tensor) -> Tensor:
    """Chunk c of row r where chunk c ^ (r % 8) belongs."""
    chunks = x.unflatten(1, (-1, _CHUNK))
    place = torch.arange(chunks.shape[1])[None, :] ^ (torch.arange(len(x)) % 8)[:, None]
    return torch.gather(chunks, 1, place[..., None].expand_as(chunks)).flatten(1)


def _blocks_transposed(x: Tensor) -> Tensor:
    """Each 8 x 8 block of it transposed."""
    return x.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).transpose(1, 3).flatten(2, 3).flatten(0, 1)


def _columns(x: Tensor, bit: int, rows: Tensor | None = None) -> Tensor:
    """Columns c and c ^ bit exchanged, in these rows."""
    other = x[:, torch.arange(x.shape[1]) ^ bit]
    return other if rows is None else torch.where(rows[:, None], other, x)


def _quadrants(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """A fragments with their registers in another order: register i of the four holds what belongs in order[i]."""
    tiles = x.unflatten(0, (-1, 2, 8)).unflatten(3, (-1, 2, 8))  # [m, upper/lower, 8, n, left/right, 8]
    tiles = tiles.permute(0, 3, 4, 1, 2, 5).flatten(2, 3)  # [m, n, register, 8, 8]: a0 a1 | a2 a3 is column-major
    return tiles[:, :, list(order)].unflatten(2, (2, 2)).permute(0, 3, 4, 1, 2, 5).flatten(3, 5).flatten(0, 2)


def _predictions(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    one_side = "is swizzled where it is written and not where it is read, or the reverse: both must use one formula"
    yield "swizzle-one-side", f"K {one_side}", _attend(q, _swizzled(k), v)
    yield "swizzle-one-side", f"V {one_side}", _attend(q, k, _swizzled(v))
    yield "swizzle-one-side", f"Q {one_side}", _attend(_swizzled(q), k, v)
    yield "swizzle-one-side", f"each of K and V {one_side}", _attend(q, _swizzled(k), _swizzled(v))
    yield "swizzle-one-side", f"each of Q and V {one_side}", _attend(_swizzled(q), k, _swizzled(v))
    yield "swizzle-one-side", f"each of Q and K {one_side}", _attend(_swizzled(q), _swizzled(k), v)
    yield "swizzle-one-side", f"each of Q, K and V {one_side}", _attend(_swizzled(q), _swizzled(k), _swizzled(v))

    transposed = "B wants two keys of one column in a register, so V needs ldmatrix with .trans"
    sentence = f"every 8 x 8 block of V arrives transposed: {transposed}"
    yield "v-not-transposed", sentence, _attend(q, k, _blocks_transposed(v))
    sentence = "every 8 x 8 block of K arrives transposed: its rows are the columns of K^T, so ldmatrix without .trans"
    yield "k-transposed", sentence, _attend(q, _blocks_transposed(k), v)

    p = _weights(q, k)
    total = p.sum(1, keepdim=True)
    lower = torch.arange(ROWS) % 16 >= 8
    first = torch.arange(ROWS) % 16 < 8  # keys of c, the rest of d
    for rows, name in ((lower, "c2 and c3, of row g + 8,"), (~lower, "c0 and c1, of row g,")):
        swapped = _columns(p, 1, rows)
        for keys in (first, ~first, first | ~first):
            sentence = f"{name} change places when P is packed: the lower half of a register is the lower column"
            yield "fragment-swapped", sentence, torch.where(keys[None, :], swapped, p) @ v / total
        sentence = f"{name} change places when O is stored: neighbouring columns of those rows are exchanged"
        yield "fragment-swapped", sentence, _columns(p @ v / total, 1, rows)
    both = "the two halves of a register of P are exchanged: pack(low, high) takes the lower column first"
    yield "fragment-swapped", both, _columns(p, 1) @ v / total
    yield "fragment-swapped", "b0 and b1 of V change places: keys 8 apart", _columns(p, 8) @ v / total
    yield "fragment-swapped", "b0 and b1 of K change places: columns 8 apart", _attend(q, _columns(k, 8), v)
    for order in itertools.permutations(range(4)):
        names = ", ".join(f"a{i}" for i in order)
        sentence = f"the registers of the A fragment of P are in the wrong order, {names}: which quarter is which?"
        yield "fragment-swapped", sentence, _quadrants(p, order) @ v / total
        yield "fragment-swapped", sentence.replace("of P are", "of Q are"), _attend(_quadrants(q, order), k, v)
    yield from _reductions(q, k, v)


def _reductions(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """A row lives in the four lanes 4 g + t; what comes of reducing it over others."""
    s = q @ k.T / math.sqrt(q.shape[1])
    pair = torch.arange(ROWS) // 4 % 2  # lanes t and t ^ 1 hold key columns 2t, 2t + 1 of every 8
    other_row = torch.arange(ROWS) ^ 4  # lane ^ 16 is row g ^ 4
    halves = torch.stack([s[:, pair == i].amax(1) for i in (0, 1)], 1)  # [rows, pair]
    advice = "a row lives in the four lanes of a quad: reduce with lane masks 1 and 2 (0b10, not 0x10)"
    for m in (halves, torch.maximum(halves, halves[other_row])):
        p = torch.exp(s - m[:, pair])
        yield "quad-not-reduced", f"the maximum is not that of the row: {advice}", p @ v / p.sum(1, keepdim=True)
    p = _weights(q, k)
    sums = torch.stack([p[:, pair == i].sum(1) for i in (0, 1)], 1)
    column_pair = torch.arange(v.shape[1]) // 4 % 2
    for total in (sums, sums + sums[other_row]):
        yield "quad-not-reduced", f"the sum is not that of the row: {advice}", p @ v / total[:, column_pair]


def _causal(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    q, k, v = _tensors(2 * ROWS, head_dim)
    o = forward(q, k, v, causal=True, scale=None)[0][0, 0].double()
    i = torch.arange(2 * ROWS)
    s = (q[0, 0].double() @ k[0, 0].double().T) / math.sqrt(head_dim)
    for size in (16, 32, 64, 128):
        by_block = (s.masked_fill(i[None, :] // size > i[:, None] // size, -math.inf)).softmax(1) @ v[0, 0].double()
        if _near(o, by_block):
            return "diagonal-not-masked", (
                f"causal: tiles of {size} keys on the diagonal are not masked, only those behind it are left out; a "
                "tile is full only if the block's first row sees all of it"
            )
    return None


def _split(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    q, k, v = _tensors(16 * ROWS, head_dim, queries=16)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    one = [x[0, 0].double() for x in (q, k, v)]
    if _near(o, _attend(*one)):
        return None
    for splits in (2, 4, 8, 16):
        shares = list(zip(one[1].chunk(splits), one[2].chunk(splits), strict=True))
        parts = [_attend(one[0], a, b) for a, b in shares]
        scores = one[0] @ one[1].T / math.sqrt(head_dim)
        lse = torch.stack([x.logsumexp(1) for x in scores.chunk(splits, 1)])
        weights = torch.exp(lse - lse.amax(0))[..., None]  # [splits, rows, 1]
        weighted, added = (weights * torch.stack(parts)).sum(0), torch.stack(parts).sum(0)
        if _near(o, weighted):
            return "split-not-normalised", (
                f"the {splits} parts are weighted and added, but the result is not divided by the sum of the weights"
            )
        odd = torch.arange(head_dim) % 2 == 1
        for columns, name in ((odd, "second"), (~odd, "first")):
            if _near(o, torch.where(columns, added, weighted) / weights.sum(0)):
                sentence = f"in the {name} column of each pair the parts are added without their weights"
                return "split-not-weighted", sentence
        if _near(o, added / splits):
            return "split-not-weighted", (
                f"{splits} parts of the keys are averaged with equal weights: each counts by exp(its lse - the largest "
                "lse)"
            )
        if _near(o, added):
            return "split-not-weighted", f"{splits} parts of the keys are added: divide by the sum of their weights"
    return None
