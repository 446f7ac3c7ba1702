"""The mistakes that only a tensor-core kernel can make, known by what they give: for each a slug, a sentence, a model.

The mistakes of flashlab.check.mistakes.attention are about attention; these are about fragments, lanes and places in
shared memory. A model predicts the output of one small problem, one tile of keys, to a few roundings; what matches
it has been explained.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from flashlab.check import pattern

Tensor = torch.Tensor
ROWS = 64  # of Q, K and V in the small problem: one tile of each
MMA_K = 16  # and of a smaller one: a kernel's smallest tile
_CHUNK = 8  # elements of 16 bytes


def explain(
    forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int, simpler: Callable[[], tuple[str, str] | None]
) -> tuple[str, str] | None:
    """The slug and the sentence of the mistake that ``forward(q, k, v, causal=..., scale=...)`` makes, if it is known.

    Args:
        forward: takes q, k, v [1, 1, rows, head_dim] in fp16 and returns (o, lse).
        simpler: what the catalogue of attention says of simpler cases, where it knows no cause of all of them.
    """

    def plain() -> tuple[str, str] | None:
        return _falling(forward, head_dim) or simpler()

    for rows in (ROWS, MMA_K):
        q, k, v = _tensors(rows, head_dim)
        o, lse = (x[0, 0].double() for x in forward(q, k, v, causal=False, scale=None))
        if o.isnan().all():
            said = "every output is NaN, from the first tile on. At the start the maximum is -inf and the sum 0: "
            said += "which difference is +inf or -inf - (-inf), and which product is inf * 0?"
            return "nan-everywhere", said
        if rows == ROWS and o.eq(0).all():
            return _all_zero(forward, head_dim, lse)
        one = [x[0, 0].double() for x in (q, k, v)]
        truth = _attend(*one)
        if _near(o, truth):
            if rows < ROWS:  # right in a tile of 16 keys, wrong in four of them
                return plain() or _tiles(forward, head_dim, sizes=(16, 32))
            causal = _causal(forward, head_dim)
            if causal and (other := plain()):  # there may be no mask at all
                return other[0], f"{other[1]}. And {causal[1]}"
            found = causal or _tiles(forward, head_dim) or _split(forward, head_dim)
            return found or plain() or _many_keys(forward, head_dim)
        for slug, sentence, prediction in _predictions(*one):
            if not _near(prediction, truth) and _near(o, prediction):
                return slug, sentence
    return _sum_of_scores(forward, head_dim) or _places_of_v(forward, head_dim) or plain()


def _all_zero(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int, lse: Tensor) -> tuple[str, str]:
    """Of a kernel that gives 0 in the small problem: the loop, if a longer problem lacks a tile and nothing else."""
    q, k, v = _tensors(4 * ROWS, head_dim, queries=16)
    o, one = forward(q, k, v, causal=False, scale=None)[0][0, 0].double(), [x[0, 0].double() for x in (q, k, v)]
    skipped = [
        x for size in (64, 128) for *_, x in itertools.islice(_tile_predictions(one[0], one[1], one[2], size), 2)
    ]
    said = f"with {ROWS} keys every output is 0"
    if any(_near(o, x) for x in (_attend(*one), *skipped)):
        said += ": the loop over tiles leaves out a tile, and a short problem has no other. Where does it begin, and "
        return "tile-skipped", f"{said}where does it end?"
    if lse.isneginf().all():
        said += ", and lse is -infinity: l is 0 too. Is P added to it, and is l multiplied after that by the tile's "
        return "all-zero", f"{said}correction, which is 0 at the first one?"
    said += ", and lse is not -infinity: P is in l. Is acc multiplied by 0 after P V is added, or are there zeros "
    return "all-zero", f"{said}where V should be?"


def _sum_of_scores(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Whether a row is divided by a sum of its scores, where that of their exponentials belongs.

    Even keys have one score and the value 1 in column 0, odd keys another one and the value 1 in column 1: so O says
    how large the two P are beside each other, and what both are divided by.
    """
    keys, scale = 2 * ROWS, 1 / math.sqrt(head_dim)
    terms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "the scores": lambda s, m: s,
        "the scores times the scale": lambda s, m: scale * s,
        "the scores times scale and log2(e)": lambda s, m: scale * s / math.log(2),
        "the scores minus the maximum": lambda s, m: s - m,
        "the scaled scores minus the maximum": lambda s, m: scale * (s - m),
        "the scores minus the maximum, times scale and log2(e)": lambda s, m: scale * (s - m) / math.log(2),
    }
    left = set(terms)
    for even, odd in ((8.0, 16.0), (2.0, 12.0), (20.0, 4.0)):
        q, k, v = (torch.zeros(1, 1, n, head_dim) for n in (16, keys, keys))
        q[..., 0], k[:, :, ::2, 0], k[:, :, 1::2, 0] = 1.0, even, odd
        v[:, :, ::2, 0] = v[:, :, 1::2, 1] = 1.0
        o = forward(q.half(), k.half(), v.half(), causal=False, scale=None)[0][0, 0, :, :2].double()
        s = torch.tensor([even, odd], dtype=torch.float64)
        acc = keys / 2 * torch.exp(scale * (s - s.max()))
        factor = o / acc  # of acc, in both columns
        if not o.isfinite().all() or (factor - factor[0, 0]).abs().max() > 0.02 * factor[0, 0].abs():
            return None
        for name in list(left):
            total = keys / 2 * float(terms[name](s, s.max()).sum())
            gives = (1 / total, total) if total <= 0 else (1 / total,)  # "l > 0 ? 1 / l : l" is usual
            if not any(abs(float(factor[0, 0]) - x) <= 0.01 * abs(x) for x in gives):
                left.discard(name)
    if not left:
        return None
    said = f"acc is right, but a row is divided by a sum of scores ({left.pop()}): l has to add up their "
    said += "exponentials, so after exp2, where they are P"
    return "l-before-exp", said


def _places_of_v(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Which number of V arrives in the place of another: each query has all of its weight on one key.

    V holds the number of each key, then that of each column: O says where its numbers come from.
    """
    n = min(ROWS, head_dim)
    unit = torch.eye(n, head_dim)[None, None]
    q, k = 16.0 * math.sqrt(head_dim) * unit, unit
    used = []
    for v in (torch.arange(n)[:, None].expand(n, head_dim), torch.arange(head_dim)[None].expand(n, head_dim)):
        o, lse = (x[0, 0].double() for x in forward(q.half(), k.half(), v[None, None].half(), causal=False, scale=None))
        if not o.isfinite().all() or (o - o.round()).abs().max() > 0.1 or (lse - 16).abs().max() > 0.01:
            return None
        used.append(o.round().long())
    key, column = torch.meshgrid(torch.arange(n), torch.arange(head_dim), indexing="ij")
    wrong = (used[0] != key) | (used[1] != column)
    if not wrong.any() or 16 * len((used[0] * head_dim + used[1]).unique()) < wrong.numel():  # few numbers, by chance
        return None
    j, c = wrong.nonzero()[0].tolist()
    j_used, c_used = int(used[0][j, c]), int(used[1][j, c])
    back = (used[0][j_used, c_used], used[1][j_used, c_used]) if j_used < n else (-1, -1)
    both = ", and the other way round" if tuple(map(int, back)) == (j, c) else ""
    if bool((used[0] == used[0][:, :1]).all()) and bool((used[1] == column).all()):
        said = f"a query that has all of its weight on key {j} gets the value of key {j_used}{both}, and so on, for "
        said += f"{int(wrong.any(1).sum())} of {n} keys; lse is right, so keys meet the values of others: which rows "
        said += "of K's tile, and of V's, does each lane give to ldmatrix, or a descriptor name?"
        return "values-exchanged", said
    said = f"where V[{j}, {c}] belongs (key, column), V[{j_used}, {c_used}] is multiplied{both}, and so on, for "
    said += f"{int(wrong.sum())} of {wrong.numel()} numbers; lse is right. Which 8 x 8 matrices of V does this "
    said += "product read, or which registers of P? Or is O stored elsewhere?"
    return "values-moved", said


def _tensors(rows: int, head_dim: int, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)

    def normal(n: int) -> Tensor:
        return (1.5 * torch.randn(1, 1, n, head_dim, generator=generator)).half()

    return normal(queries or rows), normal(rows), normal(rows)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() < 0.012 * b.abs().clamp(min=1)).all())


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """exp(s - the row's maximum), [rows, keys]."""
    s = q @ k.T / math.sqrt(q.shape[1])
    return torch.exp(s - s.amax(1, keepdim=True))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = _weights(q, k)
    return p @ v / p.sum(1, keepdim=True)


def _swizzled(x: Tensor, bits: int = 7) -> Tensor:
    """Chunk c of row r where chunk c ^ (r & bits) belongs."""
    chunks = x.unflatten(1, (-1, _CHUNK))
    place = torch.arange(chunks.shape[1])[None, :] ^ (torch.arange(len(x)) & bits)[:, None]
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
    formulas = (4, "row % 4"), (6, "row % 2")
    two = "is swizzled by two formulas, as by row % 8 where it is written and {} where it is read"
    for bits, said in ((7, one_side), *((bits, two.format(mod)) for bits, mod in formulas)):
        for of in ("K", "V", "Q", "K and V", "Q and V", "Q and K", "Q, K and V"):
            who = f"each of {of}" if of[1:] else of
            given = (_swizzled(x, bits) if name in of else x for name, x in zip("QKV", (q, k, v), strict=True))
            yield "swizzle-one-side", f"{who} {said}", _attend(*given)

    transposed = "B wants two keys of one column in a register, so V needs ldmatrix with .trans"
    sentence = f"every 8 x 8 block of V arrives transposed: {transposed}"
    yield "v-not-transposed", sentence, _attend(q, k, _blocks_transposed(v))
    sentence = "every 8 x 8 block of K arrives transposed: its rows are the columns of K^T, so ldmatrix without .trans"
    yield "k-transposed", sentence, _attend(q, _blocks_transposed(k), v)

    if k.shape == v.shape:
        yield "k-and-v-exchanged", "O is P K: K is where V belongs", _attend(q, k, k)
        yield "k-and-v-exchanged", "the scores are those of Q and V: V is where K belongs", _attend(q, v, v)
    p = _weights(q, k)
    total = p.sum(1, keepdim=True)
    lower = torch.arange(len(q)) % 16 >= 8
    first = torch.arange(len(q)) % 16 < 8  # keys of c, the rest of d
    for rows, name in ((lower, "c2 and c3, of row g + 8,"), (~lower, "c0 and c1, of row g,")):
        swapped = _columns(p, 1, rows)
        for keys in (first, ~first, first | ~first):
            sentence = f"{name} change places when P is packed: the lower half of a register is the lower column"
            yield "fragment-swapped", sentence, torch.where(keys[None, :], swapped, p) @ v / total
        sentence = f"{name} change places when O is stored: neighbouring columns of those rows are exchanged"
        yield "fragment-swapped", sentence, _columns(p @ v / total, 1, rows)
    both = "the two halves of a register of P are exchanged: pack(low, high) takes the lower column first. Or rows of "
    both += "V that are neighbours change places"
    yield "fragment-swapped", both, _columns(p, 1) @ v / total
    apart = "keys 8 apart are exchanged in P V: a0, a1 of P (tile 2k of S) with a2, a3, or b0 of V with b1 (rows of "
    apart += "V), or S's tiles"
    yield "fragment-swapped", apart, _columns(p, 8) @ v / total
    yield "fragment-swapped", "b0 and b1 of K change places: columns 8 apart", _attend(q, _columns(k, 8), v)
    sentence = "K comes by the addresses of an A fragment: b1 of the first 8 keys and b0 of the next 8 change places"
    yield "fragment-swapped", sentence, _attend(q, _quadrants(k, (0, 2, 1, 3)), v)
    for order in itertools.permutations(range(4)):
        names = ", ".join(f"a{i}" for i in order)
        sentence = f"the registers of the A fragment of P are in the wrong order, {names}: which quarter is which?"
        stored = " Or rows g and g + 8 change places where O is stored" if order == (1, 0, 3, 2) else ""
        yield "fragment-swapped", sentence + stored, _quadrants(p, order) @ v / total
        yield "fragment-swapped", sentence.replace("of P are", "of Q are"), _attend(_quadrants(q, order), k, v)
    acc, above = p @ v, torch.arange(len(q))
    which = "rows {} of O are made of {}, which belong to rows {}; theirs are {}. Which two of an accumulator's four?"
    sentence = which.format("g + 8", "c0 and c1", "g", "c2 and c3")
    yield "another-row-stored", sentence, acc[torch.where(lower, above - 8, above)] / total
    sentence = which.format("g", "c2 and c3", "g + 8", "c0 and c1")
    yield "another-row-stored", sentence, acc[torch.where(lower, above, above + 8)] / total
    yield from _reductions(q, k, v)


def _reductions(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """A row lives in the four lanes 4 g + t; what comes of reducing it over others."""
    s = q @ k.T / math.sqrt(q.shape[1])
    pair = torch.arange(len(q)) // 4 % 2  # lanes t and t ^ 1 hold key columns 2t, 2t + 1 of every 8
    other_rows = [torch.arange(len(q)) ^ bit for bit in (1, 2, 4)]  # lane ^ 4, 8 or 16 is row g ^ 1, 2 or 4
    halves = torch.stack([s[:, pair == i].amax(1) for i in (0, 1)], 1)  # [rows, pair]
    advice = "a row lives in the four lanes of a quad: reduce with lane masks 1 and 2 (0b10, not 0x10)"
    column_pair = torch.arange(v.shape[1]) // 4 % 2
    for m in (halves, *(torch.maximum(halves, halves[other]) for other in other_rows)):
        p = torch.exp(s - m[:, pair])
        yield "quad-not-reduced", f"the maximum is not that of the row: {advice}", p @ v / p.sum(1, keepdim=True)
        sums = torch.stack([p[:, pair == i].sum(1) for i in (0, 1)], 1)
        for total in (sums, *(sums + sums[other] for other in other_rows)):
            both = f"neither the maximum nor the sum is that of the row: {advice}"
            yield "quad-not-reduced", both, p @ v / total[:, column_pair]
    p = _weights(q, k)
    sums = torch.stack([p[:, pair == i].sum(1) for i in (0, 1)], 1)
    keys, columns = torch.arange(len(k)), torch.arange(v.shape[1])
    for shift, count, masks in ((2, 4, "neither with mask 1 nor 2"), (2, 2, "with mask 2 only")):  # lanes that differ
        lane, column_lane = keys // shift % count, columns // shift % count
        m = torch.stack([s[:, lane == x].amax(1) for x in range(count)], 1)
        own = torch.exp(s - m[:, lane])
        yield "quad-not-reduced", f"the maximum is reduced {masks}: {advice}", own @ v / own.sum(1, keepdim=True)
        some = torch.stack([own[:, lane == x].sum(1) for x in range(count)], 1)
        both = f"the maximum and the sum are reduced {masks}: {advice}"
        yield "quad-not-reduced", both, own @ v / some[:, column_lane]
        some = torch.stack([p[:, lane == x].sum(1) for x in range(count)], 1)
        late = f"O is divided by a sum that is reduced {masks}: {advice}, before the division"
        yield "quad-not-reduced", late, p @ v / some[:, column_lane]
        inside = "acc is divided by a lane's own sum inside of the loop: leave the division to the end"
        yield "divided-twice", inside, p @ v / some[:, column_lane] / p.sum(1, keepdim=True)
    fourth = "the output is 1/4 of what it should be: the sum is exchanged in the quad with each tile, and once more "
    fourth += "at the end. In the loop a lane sums its own columns only"
    yield "l-reduced-twice", fourth, p @ v / p.sum(1, keepdim=True) / 4
    for total in (sums, *(sums + sums[other] for other in other_rows)):
        yield "quad-not-reduced", f"the sum is not that of the row: {advice}", p @ v / total[:, column_pair]


_TILE_MASKED = (
    "right without a mask, but causal some rows are NaN: where all keys of a tile are masked for a row, its maximum "
    "may still be -inf, and -inf - (-inf) is NaN"
)


def _causal(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    q, k, v = _tensors(2 * ROWS, head_dim)
    o = forward(q, k, v, causal=True, scale=None)[0][0, 0].double()
    i = torch.arange(2 * ROWS)
    s = (q[0, 0].double() @ k[0, 0].double().T) / math.sqrt(head_dim)
    for size in (16, 32, 64, 128):
        by_block = (s.masked_fill(i[None, :] // size > i[:, None] // size, -math.inf)).softmax(1) @ v[0, 0].double()
        if _near(o, by_block):
            said = f"causal: each row sees the keys to the last row of its {size}, so the tiles on the diagonal are "
            said += "not masked; a tile is full only if the block's first row sees all of it"
            return "diagonal-not-masked", said
    visible = i[None, :] <= i[:, None]
    for block_m, block_n in itertools.product((64, 128), (32, 64, 128)):
        full = (i // block_m * block_m + 1) // block_n  # of each row's block
        plain = visible | (i[None, :] // block_n == full[:, None])
        if _near(o, s.masked_fill(~plain, -math.inf).softmax(1) @ v[0, 0].double()):
            sentence = "causal: of the tiles that need a mask, the first one (tile `full`) runs without one: which "
            sentence += "tiles does each of the two loops walk?"
            return "diagonal-not-masked", sentence
    strict = s.masked_fill(i[None, :] >= i[:, None], -math.inf)[1:].softmax(1) @ v[0, 0].double()
    if _near(o[1:], strict):
        return "diagonal-masked", "causal: a row does not see its own key, on the diagonal: <= and < are exchanged"
    if o.isnan().any():
        return "masked-rows-nan", _TILE_MASKED
    q, k, v = _tensors(2 * ROWS - 1, head_dim, queries=2 * ROWS)  # row ROWS sees no key of the second tile
    if forward(q, k, v, causal=True, scale=None)[0].isnan().any():
        return "masked-rows-nan", _TILE_MASKED
    return None


def _tiles(
    forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int, sizes: tuple[int, ...] = (32, 64, 128)
) -> tuple[str, str] | None:
    """Mistakes that show with several tiles of keys: one is left out, or what was summed is not rescaled."""
    explained: Counter[tuple[str, str]] = Counter()
    for move in (12.0, -12.0, 4.0, -4.0, 0.0):  # of the maximum in the middle, in powers of two; 0: as it comes
        q, k, v = _tensors(4 * ROWS, head_dim, queries=16)
        if move:
            q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
            q[..., 1:] *= 0.25
            k[:, :, 2 * ROWS :, 0] = move * math.log(2)
        o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
        one = [x[0, 0].double() for x in (q, k, v)]
        truth = _attend(*one)
        if _near(o, truth):
            continue
        predictions = [x for size in sizes for x in _tile_predictions(one[0], one[1], one[2], size)]
        explained.update(
            {(slug, sentence): 1 for slug, sentence, x in predictions if not _near(x, truth) and _near(o, x)}
        )
    # Two mistakes may give the same where the maximum moves one way, and differ where it moves the other.
    if explained:
        return explained.most_common(1)[0][0]
    return _corrections(forward, head_dim) or _exponent(forward, head_dim)


_HALF = 128  # keys: a multiple of any tile


def _falling(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """A maximum that is the tile's own: right until it falls so far that the correction is infinite."""
    right = {}
    for fall in (20.0, 150.0, -20.0, -150.0):  # of the scores of the keys from _HALF on, in units of ln
        q, k, v = _tensors(2 * _HALF, head_dim, queries=16)
        q, v = 0.05 * q, v + 0.5
        q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
        k[:, :, _HALF:, 0] = -fall
        o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
        finite = bool(o.isfinite().all())
        right[fall] = finite and _near(o, _attend(q[0, 0].double(), k[0, 0].double(), v[0, 0].double()))
        if fall == 150.0 and finite:
            return None
    if right == {20.0: True, 150.0: False, -20.0: True, -150.0: True}:
        said = "right where the maximum rises from tile to tile, and not finite where the scores of a later tile lie "
        said += "far below it: the new maximum has to take in the old one, not this tile's scores alone"
        return "maximum-of-the-tile", said
    return None


# What a correction's exponent may be, as a multiple of the right one, at a scale.
_LN_2 = math.log(2)
_EXPONENTS: dict[str, tuple[Callable[[float], float], str]] = {
    "scale-missing": (lambda s: _LN_2 / s, "2^x of the difference of raw maxima: the factor scale_log2 is missing"),
    "scale-missing 2": (lambda s: 1 / s, "exp of the difference of raw maxima: the scale is missing"),
    "exp2-without-log2e": (lambda s: _LN_2, "2^x of scaled maxima: log2(e) is missing"),
    "exp-for-exp2": (lambda s: 1 / _LN_2, "exp(x) with log2(e) in x: that goes with exp2"),
    "exp-for-exp2 2": (lambda s: 1 / _LN_2 / s, "exp(x) of raw maxima with log2(e) in x: the scale is missing"),
    "scale-twice": (lambda s: s, "one that has the scale twice"),
    "scale-twice 2": (lambda s: s / _LN_2, "one that has the scale twice, and log2(e) too"),
    "corrected-twice": (lambda s: 2.0, "its square"),
    "square-root": (lambda s: 0.5, "its square root"),
    "correction-inverted": (lambda s: -1.0, "its inverse, exp(m_new - m_old)"),
}


def _exponent(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Which multiple of its exponent a correction has, measured at several scales.

    The keys of one half have scores of 0 and the value 1; the maximum moves with the other half, of which the values
    are 0. lse says what l was multiplied by, and o then says it of acc.
    """
    same = torch.ones(1, 1, 4 * ROWS, head_dim).half()
    lse = forward(same[:, :, :16], same, same, causal=False, scale=6.0 / head_dim)[1]
    if (lse - 6.0 - math.log(4 * ROWS)).abs().max() > 0.01:
        return None  # wrong though no maximum moves
    measured: list[tuple[float, float, float]] = []  # scale, exponents of acc and l as multiples of the right one
    for first in (slice(0, 2 * ROWS), slice(2 * ROWS, 4 * ROWS)):  # the walk may go either way
        for scale, up in itertools.product((0.5, 1.0, 2.0), (5.75, 6.25)):
            q, k, v = (torch.zeros(1, 1, n, head_dim) for n in (16, 4 * ROWS, 4 * ROWS))
            q[..., 0], k[..., 0] = 1.0, up / scale
            k[:, :, first, 0], v[:, :, first] = 0.0, 1.0
            o, lse = (x[0, 0].double() for x in forward(q.half(), k.half(), v.half(), causal=False, scale=scale))
            of_l = torch.exp(lse - up) / (2 * ROWS) - 1
            of_acc = o * (1 + of_l)[:, None]
            if not o.isfinite().all() or (of_acc - of_acc[0, 0]).abs().max() > 1e-4:
                return None
            a, b = float(of_acc[0, 0]), float(of_l[0])
            if all(1e-4 < x < 0.98 or x > 1.02 for x in (a, b)):
                measured.append((scale, -math.log(a) / up, -math.log(b) / up))
        if any(abs(a - 1) > 0.03 or abs(b - 1) > 0.03 for _, a, b in measured):
            break
        measured = []  # this way round nothing is corrected
    if len({scale for scale, *_ in measured}) < 2:
        return None
    for multiple, said in _EXPONENTS.values():
        acc, l_i = (all(abs(x[i] / multiple(x[0]) - 1) < 0.03 for x in measured) for i in (1, 2))
        right = [all(abs(x[i] - 1) < 0.03 for x in measured) for i in (1, 2)]
        if (acc and (l_i or right[1])) or (l_i and right[0]):
            what = "acc and l are" if acc and l_i else "acc is" if acc else "l is"
            sentence = f"when the maximum moves from tile to tile, {what} multiplied by another factor than exp(m_old "
            sentence += f"- m_new) of scaled maxima: by {said}"
            return "wrong-correction", sentence
    return None


def _corrections(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Which row's correction each element of acc has been multiplied by, if lse is right.

    One half of the keys has scores of 0 and the value 1, the other half, which comes later, a higher score for each row
    and the value 1/4 (0 would not tell which half of V is multiplied by which of P): a row of O less a quarter is its
    correction, divided by the sum, which lse tells.
    """
    rows, keys = 16, 4 * ROWS
    up = 1 + torch.arange(rows).double() / 8  # a row's maximum rises by so much
    corrections = torch.exp(-up)
    for first in (slice(0, 2 * ROWS), slice(2 * ROWS, keys)):  # the walk may go either way
        q, k, v = (torch.zeros(1, 1, n, head_dim) for n in (rows, keys, keys))
        q[0, 0, :, 0] = 4 * up
        k[..., 0] = math.sqrt(head_dim) / 4
        k[:, :, first, 0] = 0
        v[:], v[:, :, first] = 0.25, 1
        o, lse = (x[0, 0].double() for x in forward(q.half(), k.half(), v.half(), causal=False, scale=None))
        want = math.log(2 * ROWS) + torch.log1p(torch.exp(up))
        if not o.isfinite().all() or not (lse - want).abs().max() < 2e-3:
            return None
        used = o * (torch.exp(lse - up) / (2 * ROWS))[:, None] - 0.25  # [rows, head_dim]
        near = lambda value: (used - value).abs() < 0.02 * value + 5e-4  # noqa: E731, B023
        wrong = ~near(corrections[:, None])
        if not wrong.any():
            continue
        known = {
            "no correction": torch.ones(rows, 1),
            "its correction twice": corrections[:, None] ** 2,
            "the correction of the row 8 above or below it": corrections[torch.arange(rows) ^ 8, None],
            "the corrections of both of the lane's rows": (corrections * corrections[torch.arange(rows) ^ 8])[:, None],
        }
        for words, value in known.items():
            if bool(near(value)[wrong].all()):
                where = _elements_of_c(wrong)
                if where is None:
                    return None
                said = "with one tile o is right, and lse always is; but when the maximum moves from tile to tile, "
                said += f"{where} {'gets' if where.startswith('acc[n]') and ' and ' not in where else 'get'} {words}"
                return "wrong-correction", said
        return None
    return None


def _elements_of_c(chosen: Tensor) -> str | None:
    """Words for some of the four registers of an accumulator, in all of its tiles and lanes; None for anything else."""
    i, j = torch.arange(chosen.shape[0])[:, None], torch.arange(chosen.shape[1])[None, :]
    register = 2 * (i % 16 // 8) + j % 2
    which = [r for r in range(4) if bool(chosen[register == r].all())]
    if not which or bool(chosen[~torch.isin(register, torch.tensor(which))].any()):
        return None
    if len(which) == 4:
        return "all of acc"
    return "acc[n] " + " and ".join(f"c{r}" for r in which)


def _tile_predictions(q: Tensor, k: Tensor, v: Tensor, size: int) -> Iterator[tuple[str, str, Tensor]]:
    said = f"the last {size} keys, a tile, are left out: where does the loop over tiles end, which rows does it bring?"
    yield "tile-skipped", said, _attend(q, k[:-size], v[:-size])
    said = f"the first {size} keys, a tile, are left out: does the loop over tiles reach tile 0?"
    yield "tile-skipped", said, _attend(q, k[size:], v[size:])
    s = q @ k.T / math.sqrt(q.shape[1])
    for order in (1, -1):
        tiles = list(zip(s.split(size, 1), v.split(size), strict=True))[::order]
        for lazy in (0.0, 8.0 * math.log(2)):  # what moves by less is not followed
            for scale_acc, scale_l, slug, sentence in _RESCALED + (_ALONE if lazy else ()):
                m, total, acc = torch.full((len(q), 1), -math.inf), torch.zeros(len(q), 1), torch.zeros_like(q)
                m, total, acc = m.double(), total.double(), acc.double()
                for part, values in tiles:
                    new = torch.maximum(m, part.amax(1, keepdim=True))
                    moved = (new - m > lazy).any()
                    correction = torch.exp(m - new) if moved else torch.ones_like(m)
                    m = new if moved or slug == "maximum-moved-alone" else m
                    p = torch.exp(part - m)
                    acc = acc * correction**scale_acc + p @ values
                    total = total * correction**scale_l + p.sum(1, keepdim=True)
                yield slug, sentence, acc / total


# (powers of the correction that acc and l are multiplied by, slug, sentence)
_RESCALED = (
    (0, 0, "o-not-rescaled", "when the maximum moves from tile to tile, neither acc nor l is rescaled"),
    (1, 0, "l-not-rescaled", "when the maximum moves from tile to tile, acc is rescaled and l is not"),
    (0, 1, "o-not-rescaled", "when the maximum moves from tile to tile, l is rescaled and acc is not"),
    (1, 2, "l-rescaled-twice", "when the maximum moves from tile to tile, l is rescaled twice"),
    (1, 8, "l-rescaled-twice", "when the maximum moves from tile to tile, l is rescaled 8 times, acc once"),
    (1, 16, "l-rescaled-twice", "when the maximum moves from tile to tile, l is rescaled 16 times, acc once"),
    (2, 1, "o-rescaled-twice", "when the maximum moves from tile to tile, acc is rescaled twice"),
)  # fmt: skip
_ALONE = (
    (1, 1, "maximum-moved-alone", "the maximum moves although nothing is rescaled: where it moves too little for that, "
     "m_i has to stay what acc and l are under"),
)  # fmt: skip


def _uneven_parts(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """16 queries and so many keys that they may be split; whatever the parts, they have different weights."""
    q, k, v = _tensors(16 * ROWS, head_dim, queries=16)
    q[..., 0] = math.sqrt(head_dim)
    k[..., 0] = 2 * torch.sin(torch.arange(16.0)).repeat_interleave(ROWS)
    return q, k, v


def _many_keys(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Wrong with many keys by more than a rounding: it is said, and no cause."""
    q, k, v = _uneven_parts(head_dim)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    truth = _attend(*(x[0, 0].double() for x in (q, k, v)))
    off = (o - truth).abs()
    if not off.max() > 0.1:
        return None
    common = pattern.observe(o, truth, 0.012)
    said = f"right with {ROWS} keys, and with {16 * ROWS} o is wrong by up to {off.max():.2g}, which no rounding does"
    said += f"{f' ({common})' if common else ''}: what happens only with several tiles of keys, or several parts?"
    return "wrong-with-many-keys", said


def _split(forward: Callable[..., tuple[Tensor, Tensor]], head_dim: int) -> tuple[str, str] | None:
    """Whether parts of the keys are averaged as if they weighed the same. (What else a merge gets wrong, 9.4 tells.)"""
    q, k, v = _uneven_parts(head_dim)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    one_q, one_k, one_v = (x[0, 0].double() for x in (q, k, v))
    for splits in (2, 4, 8, 16):
        parts = [_attend(one_q, a, b) for a, b in zip(one_k.chunk(splits), one_v.chunk(splits), strict=True)]
        if _near(o, torch.stack(parts).mean(0)):
            said = f"{splits} parts of the keys are averaged with equal weights: each counts by exp(its lse - the "
            said += "largest lse)"
            return "split-not-weighted", said
    return None
