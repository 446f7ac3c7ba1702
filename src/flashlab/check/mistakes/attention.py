"""The mistakes the checker knows by name: for each a slug, a sentence for the learner, and a model that predicts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashlab.check.models import INF, LN2, Prediction, Problem, attend, attended, online, rounded, tf32

# Contents whose exponentials stay in range: a model in float64 sees what the kernel sees.
CALM = ("plain", "late", "creeping")
TILES = (32, 64, 16, 128, 8, 256, 48, 80, 96)
PADDED = (0, *TILES)  # 0: one tile for all keys, padded to a power of two
TILE_PAIRS = tuple(1000 * m + n for m in (16, 32, 64, 128) for n in (16, 32, 64, 128))  # BLOCK_M and BLOCK_N


@dataclass(frozen=True)
class Hypothesis:
    """predict(problem, size) -> Prediction, or None where the model has no opinion on a case.

    sizes   the values of `size` to try: TILES for a mistake that depends on the tile (a block-level function's own
            BLOCK_N replaces them), other numbers where the sentence speaks of a count.
    close   True for a mistake that only shows in the rounding: the prediction must then explain the error itself.
    """

    slug: str
    sentence: str
    predict: Callable[[Problem, int], Prediction | None]
    sizes: Sequence[int] = (0,)
    close: bool = False


def scaled(factor: Callable[[Problem], float]) -> Callable[[Problem, int], Prediction]:
    """The softmax of q k^T times a factor that is not the scale."""
    return lambda p, _: attended(p.masked(p.dots * factor(p)), p.v)


def base_two(p: Problem, _: int) -> Prediction:
    o, lse = attend(p.scores * LN2, p.v)
    log_l = lse - p.maximum * LN2
    return Prediction((o,), (lse, lse / LN2, p.maximum + log_l))


def with_factors(correct_o: Callable, correct_l: Callable, **options) -> Callable[[Problem, int], Prediction]:
    def predict(p: Problem, block_n: int) -> Prediction:
        o, lse = online(p, block_n, correct_o=correct_o, correct_l=correct_l, **options)
        return Prediction((o,), (lse,))

    return predict


def keep(c, m_old, m_new):
    return c


def one(c, m_old, m_new):
    return torch.ones_like(c)


def inverse(c, m_old, m_new):
    return torch.exp((m_new - m_old).masked_fill(m_old == -INF, 0.0))


def first_kept(c, m_old, m_new):
    """exp(m_old - m_new), but 1 for the first block, where there is nothing to rescale."""
    return torch.where(m_old == -INF, 1.0, c)


def twice(c, m_old, m_new):
    return c * c


def nothing(c, m_old, m_new):
    return torch.zeros_like(c)


def old_unless_first(m_old, m_new):
    return torch.where(m_old == -INF, m_new, m_old)


def online_with(**options) -> Callable[[Problem, int], Prediction]:
    def predict(p: Problem, block_n: int) -> Prediction:
        o, lse = online(p, block_n, **options)
        return Prediction((o,), (lse, p.truth.lse))

    return predict


def against_block_maximum(p: Problem, block_n: int) -> Prediction:
    """A second pass whose P refers to the block's own maximum, divided by the l of the whole row."""
    l = torch.exp(log_l(p))  # noqa: E741
    o = torch.zeros_like(p.truth.o)
    for s, v in zip(p.scores.split(block_n, -1), p.v.split(block_n, 2), strict=True):
        o = o + torch.exp(s - s.amax(-1, keepdim=True)).nan_to_num() @ v
    return Prediction((o / l[..., None],), (p.truth.lse,))


def sum_not_shifted(p: Problem, _: int) -> Prediction:
    """l = sum of exp(s), P = exp(s - m)."""
    o = p.truth.o * torch.exp(-p.maximum)[..., None]
    return Prediction((o,), (p.maximum + p.truth.lse,))


def weights_not_scaled(p: Problem, _: int) -> Prediction:
    """A second pass without the scale: P = exp(q.k - m) / l."""
    return Prediction((torch.exp(p.masked(p.dots) - p.truth.lse[..., None]) @ p.v,), (p.truth.lse,))


def weights_from_lse(p: Problem, _: int) -> Prediction:
    """P = exp(s - lse) with lse in float32, which has no room for log(l) beside a large maximum."""
    m = p.maximum.masked_fill(p.maximum == -INF, 0.0)
    log_sum = torch.exp(p.scores - m[..., None]).sum(-1).log()
    m = m.float().double()
    lse = (m.float() + log_sum.float()).double()
    return Prediction((p.truth.o * torch.exp((m - lse) + log_sum)[..., None].nan_to_num(),), (p.truth.lse,))


def one_maximum(p: Problem, block_m: int) -> Prediction:
    """One maximum for all rows of a tile: the exponentials of a row far below it are 0 in float32."""
    tops = [s.amax((-1, -2), keepdim=True).expand(*s.shape[:-1], 1) for s in p.scores.split(block_m or 10**6, -2)]
    top = torch.cat(tops, -2)
    weights = torch.exp((p.scores - top.masked_fill(top == -INF, 0.0)).float()).double()
    l = weights.sum(-1)  # noqa: E741
    o = (weights @ p.v) / l[..., None]
    lse = top[..., 0] + torch.log(l)
    return Prediction((o, o.nan_to_num()), (lse, p.truth.lse))


def keys_of_the_same_rows(p: Problem, size: int) -> Prediction:
    i, j, _ = p.index()
    return attended(p.scores.masked_fill(i // size != j // size, -INF), p.v)


def keys_stepped_over(p: Problem, step: int) -> Prediction:
    """Blocks of BLOCK_N keys, but `step` keys from one to the next."""
    out = torch.arange(p.case.seq_k) % step >= (p.case.block_n or step)
    return attended(p.scores.masked_fill(out, -INF), p.v)


def limited_by_queries(p: Problem, block_n: int) -> Prediction:
    """The mask of the tail compares keys with seq_q."""
    more = min(max(p.case.seq_q - p.case.seq_k, 0), p.padding(block_n))
    scores = p.scores.masked_fill(torch.arange(p.case.seq_k) >= p.case.seq_q, -INF)
    return attended(torch.nn.functional.pad(scores, (0, more)), torch.nn.functional.pad(p.v, (0, 0, 0, more)))


def one_padded_key(p: Problem, block_n: int) -> Prediction:
    more = min(1, 0 if p.case.causal else p.padding(block_n))
    scores = torch.nn.functional.pad(p.scores, (0, more), value=0.0)
    return attended(scores, torch.nn.functional.pad(p.v, (0, 0, 0, more)))


def only_padding(p: Problem, block_n: int) -> Prediction | None:
    """The real keys hidden, the zeros that fill up the last tile seen."""
    if not (more := p.padding(block_n)):
        return None
    return Prediction((torch.zeros_like(p.truth.o),), (torch.full_like(p.truth.lse, math.log(more)),))


def k_tiles_reshaped(p: Problem, block_n: int) -> Prediction:
    """Each tile of K [BLOCK_N, D], filled up with zeros, read as [D, BLOCK_N]."""
    k = torch.nn.functional.pad(p.k, (0, 0, 0, p.padding(block_n)))
    tiles = k.unflatten(2, (-1, block_n)).reshape(*k.shape[:2], -1, k.shape[-1], block_n)
    dots = torch.cat([p.q @ tile for tile in tiles.unbind(2)], -1)[..., : p.case.seq_k]
    return attended(p.masked(dots * p.case.softmax_scale), p.v)


def rescaled_after(p: Problem, block_n: int) -> Prediction:
    o, lse = online(p, block_n, correct_o=first_kept, tail_first=True)
    emptied, _ = online(p, block_n, tail_first=True)
    return Prediction((o, emptied), (lse,))


def only_last_block(p: Problem, block_n: int) -> Prediction:
    last = (p.case.seq_k - 1) // block_n * block_n
    o, lse = attend(p.scores[..., last:], p.v[..., last:, :])
    return Prediction((o,), (torch.full_like(lse, -INF), lse))


def without_maximum(p: Problem, _: int) -> Prediction:
    """exp(s) in float32: it overflows to inf above 88, and in float16 above 11; it underflows to 0 below -103."""
    weights = torch.exp(p.scores.float())
    total = weights.sum(-1)
    o = [(w @ p.v.float()) / total[..., None] for w in (weights.to(p.case.dtype).float(), weights)]
    guarded = [x.masked_fill((total == 0)[..., None], 0.0) for x in o]
    lse = torch.log(total)
    return Prediction(
        tuple(x.double() for x in (*o, *guarded)), (lse.double(), torch.full_like(lse, math.nan).double())
    )


def maximum_from_zero(p: Problem, _: int) -> Prediction:
    weights = torch.exp((p.scores - p.maximum.clamp(min=0.0)[..., None]).float()).double()
    total = weights.sum(-1)
    o = (weights @ p.v) / total[..., None]
    lse = p.maximum.clamp(min=0.0) + torch.log(total)
    return Prediction((o, o.masked_fill((total == 0)[..., None], 0.0)), (lse, lse.nan_to_num(nan=-INF)))


def normalised_each_block(finally_too: bool) -> Callable[[Problem, int], Prediction]:
    def divide(acc, l):  # noqa: E741
        return acc / l.masked_fill(l == 0, 1.0)[..., None], l

    return with_factors(keep, keep, after=divide, normalise=finally_too)


def not_normalised(p: Problem, _: int) -> Prediction:
    shift = p.maximum.masked_fill(p.maximum == -INF, 0.0)
    return Prediction((torch.exp(p.scores - shift[..., None]) @ p.v,), None)


def softmax_over_queries(p: Problem, block_m: int) -> Prediction:
    size = block_m or p.case.seq_q
    weights = [torch.softmax(s, -2).nan_to_num() for s in p.scores.split(size, dim=-2)]
    return Prediction((torch.cat(weights, -2) @ p.v,), None)


def padded_tail(p: Problem, block_n: int) -> Prediction:
    """Scores of 0 against keys of 0 that are not there; a causal mask hides them again."""
    count = 0 if p.case.causal else p.padding(block_n)
    scores = torch.nn.functional.pad(p.scores, (0, count), value=0.0)
    return attended(scores, torch.nn.functional.pad(p.v, (0, 0, 0, count)))


def padded_tail_in_l(p: Problem, block_n: int) -> Prediction:
    more = torch.log1p(p.padding(block_n) * torch.exp(-p.truth.lse))
    return Prediction((p.truth.o * torch.exp(-more)[..., None],), (p.truth.lse + more,))


def past_the_end(p: Problem, block_n: int) -> Prediction | None:
    """NaN from behind the last key. Between two heads there is no guard, and other numbers are read: no opinion."""
    if p.case.batch * p.case.heads > 1:
        return None
    if p.padding(block_n) == 0:
        return Prediction()
    nan = torch.full_like(p.truth.lse, math.nan)
    return Prediction((torch.full_like(p.truth.o, math.nan),), (nan, p.truth.lse))


def keys_left_out(
    which: Callable[[torch.Tensor, int, int], torch.Tensor], only_some: bool = False
) -> Callable[[Problem, int], Prediction | None]:
    """Keys for which which(j, seq_k, size) holds do not count; only_some: no opinion where that would be all keys."""

    def predict(p: Problem, size: int) -> Prediction | None:
        out = which(torch.arange(p.case.seq_k), p.case.seq_k, size)
        if out.all() and (only_some or p.case.content not in CALM):
            return None  # an output of 0 under large scores has many causes
        wrong = attended(p.scores.masked_fill(out, -INF), p.v)
        if out.all():  # a loop that never runs may also have been given one block
            return Prediction((*(wrong.o or ()), p.truth.o), (*(wrong.lse or ()), p.truth.lse))
        return wrong

    return predict


def causal(mask: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]) -> Callable:
    """Another mask than j <= i + offset, on causal cases."""

    def predict(p: Problem, size: int) -> Prediction:
        if not p.case.causal:
            return Prediction()
        i, j, offset = p.index()
        hidden = ~(mask(i, j, offset, size) & torch.ones_like(p.visible))
        return attended((p.dots * p.case.softmax_scale).masked_fill(hidden, -INF), p.v)

    return predict


def visited(i: torch.Tensor, j: torch.Tensor, offset: int, pair: int) -> torch.Tensor:
    """The keys in tiles that a causal loop does not skip: those that some row of the query block may see."""
    block_m, block_n = divmod(pair, 1000)
    return j // block_n * block_n < (i // block_m + 1) * block_m + offset


def hidden_but_visited(counts: bool) -> Callable[[Problem, int], Prediction]:
    """Hidden keys of visited tiles have the score 0; counts: they keep their own in l, and have no part in P V."""

    def predict(p: Problem, pair: int) -> Prediction:
        if not p.case.causal:
            return Prediction()
        scores = p.dots * p.case.softmax_scale
        scores = scores if counts else scores.masked_fill(~p.visible, 0.0)
        i, j, offset = p.index()
        options = []
        for more in {0, p.padding(pair % 1000)}:  # the tail hidden rightly, or as the other keys
            s = torch.nn.functional.pad(scores, (0, more))
            v = torch.nn.functional.pad(p.v, (0, 0, 0, more))
            loop = visited(i, torch.arange(j.shape[1] + more)[None, :], offset, pair)
            for seen in (loop, torch.ones_like(loop)):  # a loop that skips tiles, and one that does not
                o, lse = attend(s.masked_fill(~seen, -INF), v)
                if counts:
                    o = torch.nan_to_num(torch.exp(p.scores - lse[..., None])) @ p.v
                options.append((o, lse))
        return Prediction(tuple(o for o, _ in options), tuple(lse for _, lse in options))

    return predict


def masked_with_zero(p: Problem, block_n: int) -> Prediction:
    if not p.case.causal:
        return Prediction()
    scores = (p.dots * p.case.softmax_scale).masked_fill(~p.visible, 0.0)
    o, lse = attend(scores, p.v)
    count = p.padding(block_n)
    padded = torch.nn.functional.pad(scores, (0, count), value=0.0)
    o_padded, lse_padded = attend(padded, torch.nn.functional.pad(p.v, (0, 0, 0, count)))
    return Prediction((o, o_padded), (lse, lse_padded))


def exchanged(a: str, b: str) -> Callable[[Problem, int], Prediction | None]:
    def predict(p: Problem, _: int) -> Prediction | None:
        if "q" in (a, b) and p.case.seq_q != p.case.seq_k:
            return None
        x = {"q": p.q, "k": p.k, "v": p.v}
        x[a], x[b] = x[b], x[a]
        return attended(p.masked(x["q"] @ x["k"].transpose(-1, -2) * p.case.softmax_scale), x["v"])

    return predict


def p_columns(p: Problem, distance: int) -> Prediction:
    """P[:, n ^ distance] meets V[n]; columns past the end are 0."""
    j = torch.arange(p.case.seq_k) ^ distance
    weights = torch.nan_to_num(torch.softmax(p.scores, -1))
    weights = torch.nn.functional.pad(weights, (0, 2 * distance))[..., j]
    return Prediction((weights @ p.v,), None)


def v_transposed(p: Problem, block_n: int) -> Prediction:
    """Each tile of V, filled up with zeros, transposed in its leading square."""
    side, v = min(block_n, p.case.head_dim), torch.nn.functional.pad(p.v, (0, 0, 0, p.padding(block_n)))
    tiles = v.unflatten(2, (-1, block_n)).clone()
    tiles[..., :side, :side] = tiles[..., :side, :side].transpose(-1, -2).clone()
    return attended(p.scores, tiles.flatten(2, 3)[:, :, : p.case.seq_k])


def k_reshaped(p: Problem, _: int) -> Prediction:
    """K [N, D] read as [D, N] without being transposed."""
    k = p.k.reshape(*p.k.shape[:2], p.case.head_dim, p.case.seq_k)
    return attended(p.masked(p.q @ k * p.case.softmax_scale), p.v)


def head_dim_cut(p: Problem, part: int) -> Prediction:
    used = p.case.head_dim // part
    return attended(p.masked(p.q[..., :used] @ p.k[..., :used].transpose(-1, -2) * p.case.softmax_scale), p.v)


def lse_is(*values: Callable[[Problem], torch.Tensor]) -> Callable[[Problem, int], Prediction]:
    """o is right, lse is another formula of m and log(l); rows without a key may still be right."""

    def predict(p: Problem, _: int) -> Prediction:
        empty = p.truth.lse == -INF
        wrong = [value(p) for value in values]
        return Prediction(None, (*wrong, *(torch.where(empty, p.truth.lse, x) for x in wrong)))

    return predict


def log_l(p: Problem) -> torch.Tensor:
    return p.truth.lse - p.maximum


def maximum_of_block(p: Problem, block_n: int) -> Prediction:
    """m_new is the block's own maximum: right as mathematics, but exp(m_old - m_new) overflows where it falls."""
    scores, v = p.scores.float(), p.v.float()
    m = torch.full_like(scores[..., 0], -INF)
    l, acc = torch.zeros_like(m), torch.zeros_like(p.q, dtype=torch.float32)  # noqa: E741
    for s, v_block in zip(scores.split(block_n, -1), v.split(block_n, -2), strict=True):
        m_new = s.amax(-1)
        shift = m_new.masked_fill(m_new == -INF, 0.0)
        weights, correction = torch.exp(s - shift[..., None]), torch.exp(m - shift)
        l = l * correction + weights.sum(-1)  # noqa: E741
        acc = acc * correction[..., None] + weights @ v_block
        m = m_new
    o, lse = acc / l.masked_fill(l == 0, 1.0)[..., None], m + torch.log(l)
    return Prediction((o.double(),), (lse.double(), p.truth.lse))


def rows_masked(p: Problem, block: int) -> Prediction | None:
    """The mask of the tail laid over the queries of a tile: start_n + (row within the tile) < seq_k."""
    if p.case.causal:
        return None
    count = p.padding(block)
    scores = torch.nn.functional.pad(p.scores, (0, count), value=0.0)
    row = torch.arange(p.case.seq_q)[:, None] % block
    start = torch.arange(scores.shape[-1])[None, :] // block * block
    hidden = start + row >= p.case.seq_k
    return attended(scores.masked_fill(hidden, -INF), torch.nn.functional.pad(p.v, (0, 0, 0, count)))


def not_advanced(moves_k: bool, moves_v: bool) -> Callable[[Problem, int], Prediction | None]:
    """Every block reads the first block of K, of V, or of both; the mask may be that of the first block too."""

    def predict(p: Problem, block_n: int) -> Prediction | None:
        if p.case.causal:
            return None
        j = torch.arange(p.case.seq_k)
        results = []
        for keys in (j, torch.arange(p.case.seq_k + (p.padding(block_n) if p.case.seq_k > block_n else 0))):
            first = keys % block_n
            k, v = p.k[:, :, first if not moves_k else keys.clamp(max=p.case.seq_k - 1)], p.v
            v = v[:, :, first if not moves_v else keys.clamp(max=p.case.seq_k - 1)]
            results.append(attend(p.q @ k.transpose(-1, -2) * p.case.softmax_scale, v))
        return Prediction(tuple(o for o, _ in results), tuple(lse for _, lse in results))

    return predict


def rounded_accumulator(p: Problem, block_n: int) -> Prediction:
    o, lse = online(p, block_n, after=lambda acc, l: (rounded(acc, p.case.dtype), l))
    return Prediction((o,), (lse,))


def rounded_sum(p: Problem, block_n: int) -> Prediction:
    o, lse = online(p, block_n, after=lambda acc, l: (acc, rounded(l, p.case.dtype)))
    return Prediction((o,), (lse,))


def rounded_p(p: Problem, block_n: int) -> Prediction:
    results = [
        online(p, block_n, exp_p=lambda x, d=d: rounded(torch.exp(x), d)) for d in (torch.bfloat16, torch.float16)
    ]
    return Prediction(tuple(o for o, _ in results), tuple(lse for _, lse in results))


def rounded_scores(p: Problem, _: int) -> Prediction:
    dtype, scale = p.case.dtype, p.case.softmax_scale
    k = p.k.transpose(-1, -2)
    ways = [
        rounded(p.dots * scale, dtype),
        rounded(rounded(p.dots, dtype) * scale, dtype),
        rounded(p.q * scale, dtype) @ k,
        rounded(p.q * (scale / LN2), dtype) @ k * LN2,
        rounded(p.dots * (scale / LN2), dtype) * LN2,
    ]
    results = [attend(p.masked(scores), p.v) for scores in ways]
    return Prediction(tuple(o for o, _ in results), tuple(lse for _, lse in results))


def tf32_operands(p: Problem, _: int) -> Prediction | None:
    if p.case.dtype != torch.float32:
        return Prediction()
    o, lse = [], []
    for nearest in (True, False):
        q, k, v = (tf32(x, nearest=nearest) for x in (p.q, p.k, p.v))
        scores = p.masked(q @ k.transpose(-1, -2) * p.case.softmax_scale)
        o_exact, row_lse = attend(scores, p.v)
        shift = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - shift.masked_fill(shift == -INF, 0.0))
        total = weights.sum(-1, keepdim=True).clamp(min=1e-30)
        # P V in TF32 too, with P divided by l afterwards, as a fused kernel does, or before, as an eager one does.
        o += [tf32(weights, nearest=nearest) @ v / total, tf32(weights / total, nearest=nearest) @ v, o_exact]
        lse.append(row_lse)
    return Prediction(tuple(o), tuple(lse))


HYPOTHESES: tuple[Hypothesis, ...] = (
    # The scale and the base of the exponential.
    Hypothesis(
        "scale-missing",
        "the scores are not scaled: q k^T has to be multiplied by scale before the softmax",
        scaled(lambda p: 1.0),
    ),
    Hypothesis(
        "scale-twice",
        "the scale is applied twice: once to q (or k), and again to the scores",
        scaled(lambda p: p.case.softmax_scale**2),
    ),
    Hypothesis(
        "scale-ignored",
        "the argument `scale` is ignored: the scores are always scaled by 1 / sqrt(head_dim)",
        scaled(lambda p: p.case.head_dim**-0.5),
    ),
    Hypothesis(
        "scale-one-over-d",
        "the scores are scaled by 1 / head_dim; it should be 1 / sqrt(head_dim)",
        scaled(lambda p: 1.0 / p.case.head_dim),
    ),
    Hypothesis(
        "scale-one-over-sqrt-n",
        "the scores are scaled by 1 / sqrt(seq_len); it should be 1 / sqrt(head_dim)",
        scaled(lambda p: p.case.seq_k**-0.5),
    ),
    Hypothesis(
        "scale-one-over-sqrt-n",
        "the scores are scaled by 1 / sqrt(seq_len); it should be 1 / sqrt(head_dim)",
        scaled(lambda p: p.case.seq_q**-0.5),
    ),
    Hypothesis(
        "scale-inverted",
        "the scores are divided by scale; they have to be multiplied by it",
        scaled(lambda p: 1.0 / p.case.softmax_scale),
    ),
    Hypothesis(
        "scale-missing",
        "the scores are not scaled: q k^T has to be multiplied by scale before the softmax",
        scaled(lambda p: LN2),  # in base 2, where scale and log2(e) come as one factor
    ),
    Hypothesis(
        "scale-twice",
        "the scale is applied twice: once to q (or k), and again to the scores",
        scaled(lambda p: p.case.softmax_scale**2 / LN2),
    ),
    Hypothesis(
        "exp2-without-log2e",
        "exp2 is used on scores that were not multiplied by log2(e): exp(x) is exp2(x * log2(e))",
        base_two,
    ),
    Hypothesis(
        "exp-with-log2e",
        "the scores are multiplied by log2(e) once too often: exp2 needs that factor once, exp not at all",
        scaled(lambda p: p.case.softmax_scale / LN2),
    ),
    # The online softmax.
    Hypothesis(
        "o-not-rescaled",
        "the rows are right until the row maximum moves: O is not rescaled; "
        "multiply acc by exp(m_old - m_new) before adding the new block",
        with_factors(one, keep),
        TILES,
    ),
    Hypothesis(
        "l-not-rescaled",
        "the rows are right until the row maximum moves: l is not rescaled; "
        "multiply l by exp(m_old - m_new) before adding the new block's sum",
        with_factors(keep, one),
        TILES,
    ),
    Hypothesis(
        "nothing-rescaled",
        "the rows are right until the row maximum moves: neither O nor l is rescaled; "
        "multiply both by exp(m_old - m_new) before adding the new block",
        with_factors(one, one),
        TILES,
    ),
    Hypothesis(
        "correction-inverted",
        "the correction is the wrong way round: exp(m_new - m_old) makes the old part grow "
        "where exp(m_old - m_new) has to shrink it",
        with_factors(inverse, inverse),
        TILES,
    ),
    Hypothesis(
        "correction-inverted",
        "the correction of O is the wrong way round: exp(m_new - m_old) makes the old part "
        "grow where exp(m_old - m_new) has to shrink it",
        with_factors(inverse, keep),
        TILES,
    ),
    Hypothesis(
        "correction-inverted",
        "the correction of l is the wrong way round: exp(m_new - m_old) makes the old part "
        "grow where exp(m_old - m_new) has to shrink it",
        with_factors(keep, inverse),
        TILES,
    ),
    *(
        Hypothesis(
            "corrected-twice",
            f"the correction of {what} is applied twice: multiply what was there before by it once",
            with_factors(*factors),
            TILES,
        )
        for what, factors in {"O and l": (twice, twice), "O": (twice, keep), "l": (keep, twice)}.items()
    ),
    Hypothesis(
        "overwritten",
        "only the last block of keys counts in O: acc is replaced by p @ v in each block, it has to be added to",
        with_factors(nothing, keep),
        TILES,
    ),
    Hypothesis(
        "overwritten",
        "only the last block of keys counts in l: l is replaced by the block's sum, it has to be added to",
        with_factors(keep, nothing),
        TILES,
    ),
    Hypothesis(
        "old-maximum-used",
        "p is made against the maximum before this block, m_old; it is exp(s - m_new)",
        online_with(against=old_unless_first),
        TILES,
    ),
    Hypothesis(
        "m-not-updated",
        "m is not set to m_new at the end of the loop, so that every block starts from the first block's maximum",
        online_with(next_m=old_unless_first),
        TILES,
    ),
    Hypothesis(
        "block-maximum-in-p",
        "p is made against the block's own maximum, and divided by an l that is relative to the whole row's",
        against_block_maximum,
        TILES,
    ),
    Hypothesis(
        "l-not-shifted", "l sums exp(s), while p is exp(s - m): both are relative to the same maximum", sum_not_shifted
    ),
    Hypothesis(
        "weights-not-scaled",
        "p is made from scores that were not scaled, with an m and l of scores that were",
        weights_not_scaled,
    ),
    Hypothesis(
        "weights-from-lse",
        "wrong where the scores are hugely negative: p is exp(s - lse), but beside so large an m there is no room in "
        "float32 for log(l), and it is lost; use exp(s - m), and divide by l",
        weights_from_lse,
    ),
    Hypothesis(
        "rescaled-after-the-sum",
        "the new block is rescaled too: only what was there before may be multiplied by the "
        "correction, so rescale acc first and add the block afterwards",
        rescaled_after,
        TILES,
    ),
    Hypothesis(
        "mixed-bases",
        "the exponentials do not agree: P is made with exp and the correction with exp2 of the same "
        "difference; use one base for both",
        with_factors(lambda c, a, b: c**LN2, lambda c, a, b: c**LN2),
        TILES,
    ),
    Hypothesis(
        "mixed-bases",
        "the exponentials do not agree: P is made with exp2 and the correction with exp of the same "
        "difference; use one base for both",
        with_factors(keep, keep, exp_p=torch.exp2),
        TILES,
    ),
    Hypothesis(
        "mixed-bases",
        "the exponentials do not agree: the correction is made with exp of a difference that P raises 2 to; use one "
        "base for both",
        with_factors(lambda c, a, b: c ** (1 / LN2), lambda c, a, b: c ** (1 / LN2)),
        TILES,
    ),
    Hypothesis(
        "exp-with-log2e",
        "the scores are multiplied by log2(e), but P is made with exp: that factor belongs with exp2",
        with_factors(keep, keep, exp_p=lambda x: torch.exp(x / LN2)),
        TILES,
    ),
    Hypothesis(
        "m-of-this-block-only",
        "right until the row maximum falls from one block to the next: m_new is the block's own maximum; it has to be "
        "the larger of that and m_old",
        maximum_of_block,
        TILES,
    ),
    Hypothesis(
        "m-not-updated",
        "only the last block of keys counts: m_i is not set to m_new at the end of the loop, so each "
        "block forgets the ones before it",
        only_last_block,
        TILES,
    ),
    Hypothesis(
        "normalised-in-the-loop",
        "acc is divided by l in every block and once more at the end: divide once, after the last block",
        normalised_each_block(True),
        TILES,
    ),
    Hypothesis(
        "normalised-in-the-loop-only",
        "acc is divided by l inside the loop, where l is not complete yet: divide once, after the last block",
        normalised_each_block(False),
        TILES,
    ),
    Hypothesis(
        "normalised-twice",
        "O is divided by l twice: p (or acc) is divided already",
        lambda p, _: Prediction((p.truth.o * torch.exp(-log_l(p))[..., None],), None),
    ),
    Hypothesis("not-normalised", "O is never divided by l: the last step is acc / l", not_normalised),
    Hypothesis(
        "no-max-subtraction",
        "right while the scores are small: the row maximum is not subtracted before exp, which "
        "overflows (or underflows to 0) where the scores are large",
        without_maximum,
    ),
    Hypothesis(
        "m-starts-at-zero",
        "wrong where all scores of a row are negative: the running maximum starts at 0; it has to "
        "start at minus infinity",
        maximum_from_zero,
    ),
    Hypothesis(
        "one-maximum",
        "one maximum is taken for all rows of a tile; a row far below it underflows: each row has its own",
        one_maximum,
        (0, *TILES),
    ),
    Hypothesis(
        "padding-in-the-maximum",
        "wrong where seq_k is no multiple of the tile and all scores are negative: the padded keys, with scores of 0, "
        "take part in the row maximum; mask the scores with minus infinity before the maximum",
        lambda p, b: maximum_from_zero(p, b) if p.padding(b) else Prediction(),
        PADDED,
    ),
    Hypothesis(
        "softmax-over-queries",
        "the softmax runs over the queries: maximum and sum of a row are taken along the keys",
        softmax_over_queries,
        (0, *TILES),
    ),
    # The tail and the loop over keys.
    Hypothesis(
        "tail-not-masked",
        "wrong where seq_k is no multiple of the tile: the keys that fill up the last tile are not "
        "masked; their scores of 0 count in m and l",
        padded_tail,
        PADDED,
    ),
    Hypothesis(
        "tail-in-l",
        "wrong where seq_k is no multiple of the tile: l counts the keys that fill up the last tile; mask "
        "the scores with minus infinity before P is summed",
        padded_tail_in_l,
        PADDED,
    ),
    Hypothesis(
        "read-past-the-end",
        "NaN where seq_k is no multiple of the tile: what fills up the last tile of K or V is not 0; masked-out rows "
        "must be loaded as 0, because 0 * NaN and 0 * inf are NaN",
        past_the_end,
        PADDED,
    ),
    Hypothesis(
        "mask-one-too-late",
        "wrong where seq_k is no multiple of the tile: the mask is off by one, and the padded key number seq_k counts",
        one_padded_key,
        PADDED,
    ),
    Hypothesis(
        "mask-uses-seq-q",
        "wrong where seq_q != seq_k: the mask of the tail compares the keys' numbers with the number of queries",
        limited_by_queries,
        PADDED,
    ),
    Hypothesis(
        "same-rows-only",
        "each block of queries meets the keys of the same rows only: K and V belong to all of them",
        keys_of_the_same_rows,
        (16, 48, 32, 64, 128),
    ),
    Hypothesis(
        "keys-stepped-over",
        "keys are left out: the loop goes on by {size} keys, but a block has BLOCK_N of them",
        keys_stepped_over,
        (32, 64, 128, 256, 16),
    ),
    Hypothesis(
        "tail-skipped",
        "wrong where seq_k is no multiple of the tile: the last, partly filled block is never visited",
        keys_left_out(lambda j, n, b: j >= n // b * b, only_some=True),
        TILES,
    ),
    Hypothesis(
        "mask-inverted",
        "wrong everywhere: the keys are hidden, and the padding of the last tile is seen; the mask is the wrong way "
        "round",
        only_padding,
        (0, *TILES),
    ),
    Hypothesis(
        "last-block-skipped",
        "the last block of keys is never visited: the loop ends one block early",
        keys_left_out(lambda j, n, b: (j >= (n - 1) // b * b) & torch.tensor(n > b)),
        TILES,
    ),
    Hypothesis(
        "last-block-skipped",
        "the last block of keys is never visited: the loop ends one block early",
        keys_left_out(lambda j, n, b: j >= (n - 1) // b * b),
        TILES,
    ),
    Hypothesis(
        "tail-mask-on-rows",
        "wrong where seq_k is no multiple of the tile: the mask of the tail lies on the rows of "
        "the scores, the queries; it belongs on their columns, the keys",
        rows_masked,
        TILES,
    ),
    Hypothesis(
        "kv-not-advanced",
        "every block reads the first block of K and of V: the addresses do not move with start_n",
        not_advanced(False, False),
        TILES,
    ),
    Hypothesis(
        "k-not-advanced",
        "every block reads the first block of K: its address does not move with start_n",
        not_advanced(False, True),
        TILES,
    ),
    Hypothesis(
        "v-not-advanced",
        "every block reads the first block of V: its address does not move with start_n",
        not_advanced(True, False),
        TILES,
    ),
    Hypothesis(
        "first-block-skipped", "the first block of keys is never visited", keys_left_out(lambda j, n, b: j < b), TILES
    ),
    Hypothesis(
        "last-keys-dropped",
        "the last {size} keys do not count",
        keys_left_out(lambda j, n, t: j >= n - t),
        (1, 2, 3, 4, 8, 16, 32, 64, 128),
    ),
    Hypothesis(
        "first-keys-dropped", "the first {size} keys do not count", keys_left_out(lambda j, n, t: j < t), (1, 2, 4, 8)
    ),
    # The causal mask.
    Hypothesis(
        "causal-missing", "the causal mask has no effect: every query sees every key", causal(lambda i, j, d, t: j >= 0)
    ),
    Hypothesis(
        "causal-without-diagonal",
        "causal is off by one: a query has to see its own key (<=, not <)",
        causal(lambda i, j, d, t: j < i + d),
    ),
    Hypothesis(
        "causal-one-too-far",
        "causal is off by one: every query sees one key of the future",
        causal(lambda i, j, d, t: j <= i + d + 1),
    ),
    Hypothesis(
        "causal-one-too-far",
        "causal is off by one: every query sees one key of the future",
        causal(lambda i, j, d, t: (j <= i + d + 1) & visited(i, j, d, t)),
        TILE_PAIRS,
    ),
    Hypothesis(
        "causal-loop-too-short",
        "the loop over the keys ends a block of queries too early: the last row of the block sees more keys",
        causal(lambda i, j, d, t: (j <= i + d) & visited(i - t // 1000, j, d, t)),
        TILE_PAIRS,
    ),
    Hypothesis(
        "causal-loop-top-left",
        "the loop over the keys ends in the right place for seq_q = seq_k only: query i sees the keys up to "
        "i + seq_k - seq_q",
        causal(lambda i, j, d, t: (j <= i + d) & visited(i, j, 0, t)),
        TILE_PAIRS,
    ),
    Hypothesis(
        "causal-top-left",
        "the causal mask is aligned top-left: with seq_q != seq_k query i sees the keys up to "
        "i + seq_k - seq_q, so that the last query sees the last key",
        causal(lambda i, j, d, t: j <= i),
    ),
    Hypothesis(
        "causal-offset-sign",
        "the causal offset has the wrong sign: query i sees the keys up to i + seq_k - seq_q",
        causal(lambda i, j, d, t: j <= i - d),
    ),
    Hypothesis(
        "causal-upside-down",
        "the causal mask is on the wrong axis: queries see the keys after them, not those before",
        causal(lambda i, j, d, t: j >= i + d),
    ),
    Hypothesis(
        "causal-upside-down",
        "the causal mask is on the wrong axis: queries see the keys after them, not those before",
        causal(lambda i, j, d, t: j >= i),
    ),
    Hypothesis(
        "causal-upside-down",
        "the causal mask hides what it should show: its condition is inverted",
        causal(lambda i, j, d, t: j > i + d),
    ),
    Hypothesis(
        "causal-first-tile-only",
        "causal is right in the first row of tiles only: the other rows of queries are not "
        "masked (does the condition use the row within the tile?)",
        causal(lambda i, j, d, t: (j <= i + d) | (i >= t)),
        TILES,
    ),
    Hypothesis(
        "causal-first-tile-only",
        "causal is right in the first row of tiles only: the mask uses the row within the "
        "tile, without the tile's own start",
        causal(lambda i, j, d, t: j <= i % t + d),
        TILES,
    ),
    Hypothesis(
        "causal-by-block",
        "causal is right for whole blocks only: inside the block on the diagonal each row still needs its own mask",
        causal(lambda i, j, d, t: j // t <= (i + d) // t),
        TILES,
    ),
    Hypothesis(
        "causal-by-block",
        "causal is right for whole blocks only: inside the block on the diagonal each row still needs its own mask",
        causal(lambda i, j, d, t: j < (i // t + 1) * t + d),
        TILES,
    ),
    Hypothesis(
        "causal-by-block",
        "causal is right for whole tiles only: inside a tile that some rows see in part, each row needs its own mask",
        causal(lambda i, j, d, t: j // (t % 1000) * (t % 1000) <= (i // (t // 1000) + 1) * (t // 1000) - 1 + d),
        TILE_PAIRS,
    ),
    Hypothesis(
        "causal-key-in-the-tile",
        "causal is right in the first tile of keys only: the mask uses the key's number within the tile, without the "
        "tile's own start",
        causal(lambda i, j, d, t: j % t <= i + d),
        TILES,
    ),
    Hypothesis(
        "causal-key-in-the-tile",
        "causal is right in the first tile of keys only: the mask uses the key's number within the tile, without the "
        "tile's own start",
        causal(lambda i, j, d, t: (j % (t % 1000) <= i + d) & visited(i, j, d, t)),
        TILE_PAIRS,
    ),
    Hypothesis(
        "l-counts-hidden-keys",
        "the causal mask comes too late: hidden keys have no part in O, but l counts them; mask the scores, before the "
        "maximum and the sum",
        hidden_but_visited(counts=True),
        TILE_PAIRS,
    ),
    Hypothesis(
        "masked-with-zero",
        "masked scores are set to 0, which exp turns into a weight: set them to minus infinity",
        masked_with_zero,
        TILES,
    ),
    Hypothesis(
        "masked-with-zero",
        "masked scores are set to 0, which exp turns into a weight: set them to minus infinity",
        hidden_but_visited(counts=False),
        TILE_PAIRS,
    ),
    # Operands.
    Hypothesis("k-and-v-exchanged", "K and V are exchanged", exchanged("k", "v")),
    Hypothesis(
        "q-and-k-exchanged",
        "Q and K are exchanged: the softmax runs along the wrong axis of the scores",
        exchanged("q", "k"),
    ),
    Hypothesis(
        "p-columns-exchanged",
        "O = P V with the columns of P in the wrong order: columns {size} apart are exchanged",
        p_columns,
        (1, 2, 4, 8, 16),
    ),
    Hypothesis(
        "v-transposed",
        "the tiles of V are transposed: P [BLOCK_M, BLOCK_N] has to meet V [BLOCK_N, HEAD_DIM]",
        v_transposed,
        TILES,
    ),
    Hypothesis(
        "k-not-transposed",
        "K is reshaped to [HEAD_DIM, BLOCK_N], not transposed: its elements are in the wrong places",
        k_reshaped,
    ),
    Hypothesis(
        "k-not-transposed",
        "K is reshaped to [HEAD_DIM, BLOCK_N], not transposed: its elements are in the wrong places",
        k_tiles_reshaped,
        TILES,
    ),
    Hypothesis("head-dim-cut", "only the first 1/{size} of head_dim enters the scores", head_dim_cut, (2, 4, 8)),
    # lse, where o is right.
    Hypothesis(
        "lse-in-base-2",
        "lse is in base 2: multiply by log(2), or undo the log2(e) in the scores",
        lse_is(lambda p: p.truth.lse / LN2),
    ),
    Hypothesis(
        "lse-mixed-bases",
        "lse mixes the bases: m and log(l) have to be in the same base, the natural one",
        lse_is(
            lambda p: p.maximum + log_l(p) / LN2,
            lambda p: p.maximum / LN2 + log_l(p),
            lambda p: p.maximum + log_l(p) * LN2,
            lambda p: p.maximum * LN2 + log_l(p),
        ),
    ),
    Hypothesis(
        "lse-log2e-for-ln2",
        "lse is multiplied by log2(e), from base 2 to base e it is multiplied by ln(2)",
        lse_is(lambda p: p.truth.lse / LN2**2),
    ),
    Hypothesis("lse-without-log-l", "lse is only the row maximum: it is m + log(l)", lse_is(lambda p: p.maximum)),
    Hypothesis("lse-without-m", "lse is only log(l): it is m + log(l)", lse_is(log_l)),
    Hypothesis(
        "lse-sign",
        "lse has a wrong sign: it is m + log(l)",
        lse_is(lambda p: -p.truth.lse, lambda p: p.maximum - log_l(p), lambda p: log_l(p) - p.maximum),
    ),
    Hypothesis("lse-l-for-log-l", "lse is m + l: it is m + log(l)", lse_is(lambda p: p.maximum + torch.exp(log_l(p)))),
    Hypothesis(
        "lse-m-not-scaled",
        "lse uses the maximum of the scores before they were scaled",
        lse_is(lambda p: p.maximum / p.case.softmax_scale + log_l(p)),
    ),
    Hypothesis("lse-is-l", "lse is l itself: it is m + log(l)", lse_is(lambda p: torch.exp(log_l(p)))),
    # Mistakes that only show in the rounding.
    Hypothesis(
        "o-accumulated-in-low-precision",
        "nearly right, and worse with every block: O is accumulated in the inputs' "
        "dtype; keep acc in float32 until the end",
        rounded_accumulator,
        TILES,
        close=True,
    ),
    Hypothesis(
        "l-in-low-precision",
        "nearly right, and worse with every block: l is kept in the inputs' dtype; keep it in float32",
        rounded_sum,
        TILES,
        close=True,
    ),
    Hypothesis(
        "p-rounded-before-the-sum",
        "nearly right: P is rounded to 16 bits before it is summed into l; sum it in "
        "float32, and round it only for P @ V",
        rounded_p,
        TILES,
        close=True,
    ),
    Hypothesis(
        "scores-in-low-precision",
        "nearly right: the scores are rounded to the inputs' dtype (or q is, after it was "
        "scaled); q k^T and its scaling belong in float32",
        rounded_scores,
        close=True,
    ),
    Hypothesis(
        "tf32",
        "nearly right: float32 inputs are multiplied in TF32, with ten bits; ask for full float32 products",
        tf32_operands,
        close=True,
    ),
)
