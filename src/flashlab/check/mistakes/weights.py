"""Which keys a wrong attention counts, and how much: read off from values of which each belongs to one key.

With row j of V all zeros but for a 1 in column j, row i of O holds the weights of query i. So whatever a function does
wrong, what it does to single keys can be said: a key too many, weights that do not add up to 1, dimensions that are
missing from the scores. Nothing here guesses at a line of code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from flashlab import runtime
from flashlab.check import pattern
from flashlab.check.cases import Case
from flashlab.check.mistakes.mask_rule import ALL, CAUSAL, Seen, rule_of

Tensor = torch.Tensor
Call = Callable[[Case, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Found = tuple[str, str]

# (seq_q, seq_k): a tile or less, ragged, several tiles of 16; shifts of the diagonal either way; then several tiles of
# 64 and of 128.
SHAPES = ((16, 16), (16, 13), (40, 40), (16, 40), (40, 16), (13, 29), (45, 33), (1, 40), (20, 150), (16, 300))
# What is told here. A check that knows more of its exercise tries that first.
SLUGS = (
    "values-exchanged", "wrong-keys", "wrong-dimensions", "weights-not-normalised", "value-not-added",
    "tiles-not-joined", "wrong-scores", "acc-not-rescaled",
)  # fmt: skip
_SLICE = 8  # dimensions of the scores that are told apart
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of a weight, relative


def explain(call: Call, like: Case) -> tuple[str, str, str] | None:
    """The slug, the sentence and the case in which something can be read off, or None.

    Args:
        call: as of `flashlab.check.verification.run`.
        like: a case that is wrong; dtype, head_dim, mask, scale and tile are taken from it.
    """
    shapes = [s for s in SHAPES if s[1] <= 8 * like.head_dim and (s[0] != 1 or like.seq_q == 1)]
    first = _plain(like, *shapes[0])
    for seq_q, seq_k in shapes:
        case = _plain(like, seq_q, seq_k)
        columns = torch.arange(seq_k) % like.head_dim
        last = like.head_dim - 1
        found = _read(call, case, columns)
        again = found and _read(call, case, last - columns)
        if found is None and (found := _picked(call, case, columns)):
            again = _picked(call, case, last - columns)
        if found and found == again:  # else it is about columns of o, not keys
            if found[0] == "wrong-keys" and (rule := _rule(call, like, case)):
                return found[0], rule + found[1], str(case)
            return found[0], found[1] + (_right_before(call, like, shapes[0]) if case != first else ""), str(case)
        if found:
            return None
    return None


def _plain(like: Case, seq_q: int, seq_k: int) -> Case:
    return replace(
        like, name="values that show the weights", seq_q=seq_q, seq_k=seq_k, content="plain", batch=1, heads=1,
        kv_heads=1, layout="contiguous", omit_defaults=False,
    )  # fmt: skip


def _rule(call: Call, like: Case, wrong: Case) -> str:
    """Words for the rule by which the mask is wrong, if it is one, from `wrong` and the shapes of few keys."""
    sizes = [s for s in (*SHAPES, (40, 60)) if s[1] <= min(like.head_dim, 63)]  # the last: several blocks, N > M
    seen = []
    for seq_q, seq_k in dict.fromkeys([*sizes, (wrong.seq_q, wrong.seq_k)]):
        case = _plain(like, seq_q, seq_k)
        with contextlib.suppress(Exception):  # where it raises, it may be for the same reason
            if read := _weights(call, case, *_spread(case), torch.arange(seq_k) % case.head_dim):
                seen.append(Seen(read[0] > 1e-3 / seq_k, _visible(case)))
    rule = rule_of(seen, CAUSAL if like.causal else ALL)
    return f"{rule}. " if rule else ""


def _visible(case: Case) -> Tensor:
    """[queries, keys]"""
    rows, keys = torch.arange(case.seq_q)[:, None], torch.arange(case.seq_k)[None, :]
    whole = torch.ones(case.seq_q, case.seq_k, dtype=torch.bool)
    return keys <= rows + case.seq_k - case.seq_q if case.causal else whole


def _spread(case: Case) -> tuple[Tensor, Tensor]:
    """q and k with scores of a standard deviation of one half."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(case.seq_q, case.head_dim, generator=generator)
    return 0.5 / (case.softmax_scale * math.sqrt(case.head_dim)) * q, torch.randn(
        case.seq_k, case.head_dim, generator=generator
    )


def _right_before(call: Call, like: Case, shape: tuple[int, int]) -> str:
    """Words that the weights are right in a smaller case, if they are; where they cannot be read they may not be."""
    case, generator = _plain(like, *shape), torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, case.head_dim, generator=generator) for n in shape)
    read = _weights(call, case, q, k, torch.arange(case.seq_k) % case.head_dim)
    if read is None:
        return ""
    scores = case.softmax_scale * q.to(case.dtype).double() @ k.to(case.dtype).double().T
    right = _near(read[0], _softmax(scores, _visible(case)), _TOLERANCE.get(case.dtype, 1e-4))
    return f"; right with seq_q={shape[0]} and seq_k={shape[1]}" if right else ""


def _read(call: Call, case: Case, columns: Tensor) -> Found | None:
    """columns: [seq_k], in which column of V each key has its 1; more keys than columns take several calls."""
    q, k = _spread(case)
    read = _weights(call, case, q, k, columns)
    if read is None:
        return None
    weights, lse = read
    if lse is not None and bool(lse.isnan().any()):
        return None
    parts = case.softmax_scale * q.to(case.dtype).double()[:, None] * k.to(case.dtype).double()[None]
    scores = parts.sum(2)
    if scores.numel() > 100 and scores.std() < 0.1:  # q is lost in the dtype: as many zeros would make up for any key
        return None
    visible, tolerance = _visible(case), _TOLERANCE.get(case.dtype, 1e-4)
    if _near(weights, _softmax(scores, visible), tolerance):
        return None
    if found := _rows_taken(
        weights, _softmax(scores, visible), lse, scores.masked_fill(~visible, -math.inf), tolerance
    ):
        return found
    counted = weights > 1e-3 / case.seq_k
    if not torch.equal(counted, visible):
        return _wrong_keys(weights, scores, counted, visible, lse, tolerance)
    sums = weights.sum(1, keepdim=True)
    some = visible.any(1)
    if _near(weights[some] / sums[some], _softmax(scores, visible)[some], tolerance):
        least, most = sums[some].min().item(), sums[some].max().item()
        how = f"to {least:.3g}" if most - least < tolerance * most else f"to between {least:.3g} and {most:.3g}"
        sentence = f"the weights that a row gives to its keys are right up to a factor, but they add up {how}, not to 1"
        if most < 1 or least > 1:
            sentence += f": against acc, the sum that it is divided by is too {'large' if most < 1 else 'small'}"
        return "weights-not-normalised", sentence + _zeros_counted(
            scores.masked_fill(~visible, -math.inf), lse, tolerance
        )
    if found := _tiles(weights, _softmax(scores, visible), tolerance):
        return found
    logs = weights.log()
    if lse is None or not lse.isfinite().all():
        return _moved(weights, _softmax(scores, visible), tolerance)
    used = logs + lse.detach().cpu().double()[0, 0, :, None]  # the scores that it has used
    if not visible.all():
        return None
    wide = (case.softmax_scale * q.to(case.dtype).double(), k.to(case.dtype).double())
    return (
        _moved(used, scores, 5 * tolerance)
        or _dimensions(used, parts, 5 * tolerance)
        or _crossed(used, *wide, 5 * tolerance)
        or _some_scores(used, scores, lse.detach().cpu().double()[0, 0], 5 * tolerance)
    )


def _zeros_counted(scores: Tensor, lse: Tensor | None, tolerance: float) -> str:
    """Words for keys of zeros that are in a sum too many, [queries, keys], if just that is what lse has too much."""
    if lse is None:
        return ""
    got, want = lse.detach().cpu().double()[0, 0], scores.logsumexp(1)
    some = want.isfinite() & got.isfinite()
    more = (got[some].exp() - want[some].exp()) if some.any() else torch.zeros(1)
    count = int(more[0].round())
    if count < 1 or bool((more - count).abs().gt(0.02 + tolerance * want[some].exp()).any()):
        return ""
    keys = "one key" if count == 1 else f"{count} keys"
    return (
        f". It has {keys} with a score of 0 too many, as of rows of zeros past the last key: how far does the mask let?"
    )


def _weights(call: Call, case: Case, q: Tensor, k: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """[queries, keys] and lse; None where o is not finite, or not made of these keys' values."""
    device, parts = runtime.device(), []
    row_lse: Tensor | None = None
    for first in range(0, case.seq_k, case.head_dim):
        mine = columns[first : first + case.head_dim]
        v = torch.zeros(case.seq_k, case.head_dim)
        v[first + torch.arange(len(mine)), mine] = 1
        o, lse = call(case, *(x.to(case.dtype)[None, None].to(device) for x in (q, k, v)))
        got = o.detach().cpu().double()[0, 0]
        rest = got[:, ~torch.isin(torch.arange(case.head_dim), mine)]
        if not got.isfinite().all() or bool((rest != 0).any()) or bool((got < 0).any()):
            return None
        parts.append(got[:, mine])
        row_lse = lse if first == 0 else row_lse
    return torch.cat(parts, 1), row_lse


def _picked(call: Call, case: Case, columns: Tensor) -> Found | None:
    """Query i has all of its weight on key i: whose value does it get?"""
    n = case.seq_k
    if case.seq_q != n or n > case.head_dim:
        return None
    unit, score = torch.eye(n, case.head_dim), 14.0
    both = []
    for order in (torch.arange(n), torch.arange(n).flip(0)):  # query i asks for key order[i]
        read = _weights(call, case, unit[order] * score / case.softmax_scale, unit, columns)
        if read is None:
            return None
        lse = read[1]
        if lse is not None and not bool(((lse.detach().cpu().double() - score).abs() < 0.1).all()):
            return None  # the weights are not on one key each
        times = read[0].round()
        if (read[0] - times).abs().max() > 0.05 or torch.equal(times, torch.eye(n).double()[order]):
            return None
        both.append(times[order])  # of the query that asks for key 0, 1, ...: the second order is its own inverse
    if not torch.equal(*both):
        return None  # it goes with the queries, or with the rows of o, and not with the keys
    times = both[0]
    wrong = (times != torch.eye(n)).any(1).nonzero().flatten().tolist()
    if len(wrong) == n:
        return None  # nothing is as it should be: not a few keys that are taken for others
    row = wrong[0]
    gets = "no value at all" if not times[row].any() else f"the value of {pattern.runs(times[row] != 0, 'key')}"
    said = f"a query that has all of its weight on key {row} gets {gets}, and so on, for {len(wrong)} of {n} keys: "
    before = times.tril(-1)
    if not times.triu(1).any() and torch.equal(before, before.cummin(1).values):
        said += "when the maximum rises, what is in acc has to be multiplied by exp(old - new)"
        return "acc-not-rescaled", said
    return "values-exchanged", said + "a row of K, of V or a column of P is taken for another"


def _rows_taken(weights: Tensor, right: Tensor, lse: Tensor | None, scores: Tensor, tolerance: float) -> Found | None:
    """Rows of o that hold what belongs in another row, [queries, keys], where every lse is right."""
    if lse is None or len(right) < 16:
        return None
    want = scores.logsumexp(1)
    got = lse.detach().cpu().double()[0, 0]
    if not bool(((got == want) | ((got - want).abs() <= 5 * tolerance)).all()):
        return None
    apart = (right[:, None] - right[None]).abs().amax(2)
    distance = (weights[:, None] - right[None]).abs().amax(2)  # [row, row that it may be]
    near = distance <= 2 * tolerance
    wrong = ~near.diagonal()
    source = distance.argmin(1)
    alone = (apart[source] <= 6 * tolerance).sum(1) == 1
    if not wrong.any() or wrong.all() or not bool(near.any(1).all()) or not bool(alone[wrong].all()):
        return None
    at = int(wrong.nonzero()[0])
    said = f"row {at} of o holds what belongs in row {int(source[at])}, and so on, for {int(wrong.sum())} of "
    said += f"{len(wrong)}; lse is right in every row"
    return "o-rows-repeated", said


def _tiles(weights: Tensor, right: Tensor, tolerance: float) -> Found | None:
    """Right weights within each tile of keys, and wrong ones between tiles, [queries, keys]."""
    some = (right > 0).all(1) & (weights > 0).all(1)
    if some.sum() < 2:
        return None
    ratio = weights[some] / right[some]
    step = (ratio[:, 1:] / ratio[:, :-1] - 1).abs().amax(0)
    slack = max(0.01, 4 * tolerance)
    ends = [0, *((step > slack).nonzero().flatten() + 1).tolist(), weights.shape[1]]
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if len(sizes) < 2 or sizes[0] < 8 or any(size % sizes[0] for size in sizes[:-1]):
        return None
    means = torch.stack([ratio[:, a:b].mean(1) for a, b in itertools.pairwise(ends)], 1)
    flat = torch.cat([ratio[:, a:b] / means[:, [i]] for i, (a, b) in enumerate(itertools.pairwise(ends))], 1)
    if (flat - 1).abs().max() > slack:
        return None
    apart = means[:, 0] / means[:, -1]
    row = int((apart.log().abs()).argmax())
    times = apart[row].item()
    if abs(times - 1) < 0.05:
        return None
    query = int(some.nonzero().flatten()[row])
    said = f"the weights of keys 0 to {ends[1] - 1} are right beside each other, and so are those of each later tile; "
    said += f"but beside the last tile's, those of the first are up to {times:.3g} times what they should be (query "
    said += f"{query}): not all of the tiles are taken against the same maximum in the end"
    return "tiles-not-joined", said


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf).softmax(1).nan_to_num(0.0)


def _near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool(((got - want).abs() <= tolerance * want.clamp(min=0.02)).all())


def _wrong_keys(
    weights: Tensor, scores: Tensor, counted: Tensor, visible: Tensor, lse: Tensor | None, tolerance: float
) -> Found | None:
    """A mask or a loop that ends elsewhere, or values that are left out where their weights are not."""
    if visible.all() and not counted.any(1).all() and weights.shape == SHAPES[0]:
        return None  # nothing in the simplest case: that is no matter of a mask
    row = int((counted != visible).any(1).nonzero()[0])
    has, should = (pattern.runs(x[row], "key") if x[row].any() else "no key" for x in (counted, visible))
    if _near(weights, _softmax(scores, counted), tolerance) and _same_sums(lse, scores, counted, tolerance):
        if not counted[row].any():
            sentence = f"o is 0 and lse -inf for query {row}, as if it counted no key; it should count {should}"
            return "wrong-keys", sentence
        said = f"o and lse are those of other keys than they should be: query {row} counts {has}, and should count "
        said += f"{should}{_as_another_row(counted, visible)}"
        return "wrong-keys", said
    lost = (visible & ~counted).any(0)
    added = _near(weights, _softmax(scores, visible) * counted, tolerance) and not bool((counted & ~visible).any())
    if added and _same_sums(lse, scores, visible, tolerance):
        empty = visible.any(1) & ~counted.any(1)
        if not torch.equal(counted, visible & ~lost):  # some of their values are added for other queries
            if not torch.equal(counted, visible & ~empty[:, None]):
                return None
            said = f"o is 0 for {pattern.runs(empty, 'query').replace('querys', 'queries')}, and lse is right there: "
            said += "nothing is added to acc for them, or another row is stored"
            return "value-not-added", said
        return "value-not-added", (
            f"the value of {pattern.runs(lost, 'key')} is not in o, though the sum has its weight: it is left out "
            "where P is multiplied by V, or acc is multiplied by 0 after it, as by the correction of the first tile"
        )
    return None


def _as_another_row(counted: Tensor, visible: Tensor) -> str:
    """Words, where every query that is wrong has the mask of the one that is so many rows before or behind it."""
    wrong = (counted != visible).any(1).nonzero().flatten()
    for shift in (*range(1, len(visible)), *range(-1, -len(visible), -1)):
        source = wrong - shift
        inside = (source >= 0) & (source < len(visible))
        if inside.all() and torch.equal(counted[wrong], visible[source]):
            where = "before" if shift > 0 else "behind"
            return (
                f": what query {int(source[0])} should; each wrong row has the mask of the one {abs(shift)} {where} it"
            )
    same = (counted[wrong][:, None] == visible[None]).all(-1)  # [wrong row, row]
    if len(wrong) >= 3 and bool((same.sum(1) == 1).all()):
        sources = zip(wrong.tolist(), same.int().argmax(1).tolist(), strict=True)
        listed = ", ".join(f"query {r} that of query {s}" for r, s in itertools.islice(sources, 3))
        return f". So each wrong row has another one's mask: {listed}"
    return ""


def _same_sums(lse: Tensor | None, scores: Tensor, counted: Tensor, tolerance: float) -> bool:
    """Whether lse [1, 1, queries], if there is one, is that of these keys."""
    if lse is None:
        return True
    got, want = lse.detach().cpu().double()[0, 0], scores.masked_fill(~counted, -math.inf).logsumexp(1)
    return bool(((got == want) | ((got - want).abs() <= tolerance)).all())


def _moved(got: Tensor, want: Tensor, bound: float) -> Found | None:
    """The score or the weight of one key on the value of another, [queries, keys]."""
    if len(got) < 8:
        return None
    distance = (got.T[:, None] - want.T[None]).abs().amax(-1)  # [value, key]
    source = distance.argmin(1)
    moved = (source != torch.arange(len(source))).nonzero().flatten().tolist()
    if not moved or bool((distance.amin(1) > bound).any()):
        return None
    said = f"the value of key {moved[0]} gets the weight of key {int(source[moved[0]])}, and so on, for {len(moved)} "
    said += f"of {len(source)} keys: a row of K, of V or a column of P is taken for another"
    return "values-exchanged", said


def _some_scores(used: Tensor, scores: Tensor, lse: Tensor, bound: float) -> Found | None:
    """Right scores of some keys, or of some queries, beside wrong ones of the others, [queries, keys]."""
    off = (used - scores).abs()
    # exp(used) / exp(lse) are the weights. That they add up to 1, and lse errs, says that it is the scores.
    whole = (used.logsumexp(1) - lse).abs() <= bound
    errs = (scores.logsumexp(1) - lse).abs() > bound
    if len(used) < 8 or not whole.all() or errs.double().mean() < 0.5:
        return None
    for axis, name in ((0, "key"), (1, "query")):
        right, clear = (off <= bound).all(axis), (off > 4 * bound).any(axis)
        if right.sum() >= 4 and clear.sum() >= 1 and bool((right | clear).all()):
            some = pattern.runs(~right, name).replace("querys", "queries")
            said = f"o and lse are of scores that are right but for {some}: there the score is not the scaled "
            said += (
                f"product of that {name}{' with the queries' if name == 'key' else ' with the keys'}. Which rows of Q "
            )
            said += "and of K are multiplied for them, and is it scaled like the others?"
            return "wrong-scores", said
    return None


def _dimensions(used: Tensor, parts: Tensor, bound: float) -> Found | None:
    """Scores in which some dimensions are missing, or count more than once, of parts [queries, keys, dimensions]."""
    for width in (_SLICE, _SLICE // 2):
        if parts.shape[2] % width == 0:
            slices = parts.unflatten(2, (-1, width)).sum(3)
            if said := counted(slices.flatten(0, 1), used.flatten(), bound, width):
                return "wrong-dimensions", f"the softmax is one of other scores: {said}"
    return None


def _crossed(used: Tensor, q: Tensor, k: Tensor, bound: float) -> Found | None:
    for width in (_SLICE, _SLICE // 2):
        if q.shape[1] % width == 0 and (said := crossed(q, k, used, bound, width)):
            return "wrong-dimensions", f"the softmax is one of other scores: {said}"
    return None


def crossed(q: Tensor, k: Tensor, got: Tensor, bound: float, width: int = _SLICE) -> str | None:
    """Which dimensions of Q meet which of K in a product: words, or None where that does not make it up.

    Args:
        q: [queries, dimensions]; k: [keys, dimensions]. got: [queries, keys], the product. bound: the largest error.
        width: of a slice of dimensions.
    """
    a, b = (x.double().unflatten(1, (-1, width)) for x in (q, k))  # [rows, slices, 8]
    count = a.shape[1]
    design = torch.einsum("iad,jbd->ijab", a, b).flatten(2).flatten(0, 1)
    if len(design) < 1.5 * count * count:
        return None
    times = torch.linalg.lstsq(design, got.double().flatten()[:, None]).solution[:, 0]
    whole = times.round()
    if (times - whole).abs().max() > 0.1 or (design @ whole - got.double().flatten()).abs().max() > bound:
        return None
    met = whole.unflatten(0, (count, count))  # [of Q, of K]
    wrong = (met != torch.eye(count, dtype=met.dtype)).any(0).nonzero().flatten().tolist()
    if not wrong:
        return None
    at, several = wrong[0], met[:, wrong[0]].nonzero().flatten().tolist()
    with_ = " and ".join(_dims(i, width) for i in several) + " of Q" if several else "nothing of Q"
    return (
        f"{_dims(at, width)} of K are multiplied with {with_}{', and others are wrong too' if len(wrong) > 1 else ''}"
    )


def _dims(at: int, width: int) -> str:
    return f"dimensions {at * width} to {at * width + width - 1}"


def counted(design: Tensor, got: Tensor, bound: float, slice_width: int = _SLICE) -> str | None:
    """How often each slice of the dimensions is in a sum: words, or None where they do not make it up.

    Args:
        design: [values, slices], what each slice of dimensions, in order, adds to each value.
        got: [values], the sums.
        bound: the largest error.
        slice_width: of a slice of dimensions.
    """
    if len(got) < 2 * design.shape[1]:
        return None
    times = torch.linalg.lstsq(design, got[:, None]).solution[:, 0]
    if (design @ times - got).abs().max() > bound:
        return None
    whole = times.round()
    if (times - whole).abs().max() > 0.05:
        mean = times.mean().item()
        return f"every sum is {mean:.4g} times what it should be" if (times - mean).abs().max() < 0.02 else None
    if bool((whole == 1).all()):
        return None
    if bool((whole == whole[0]).all()):  # 0: it is no dimension that is missing
        return f"every sum is {int(whole[0])} times what it should be" if whole[0] else "every sum is 0"
    wrong = [i for i, x in enumerate(whole.tolist()) if x != 1]
    begin, count = wrong[0], whole[wrong[0]].item()
    end = next((i for i in range(begin, len(whole)) if whole[i] != count), len(whole))
    width = f"dimensions {begin * slice_width} to {end * slice_width - 1}"
    more = ", and others are wrong too" if len(wrong) > end - begin else ""
    if count == 0:
        return f"{width} are missing from the sum{more}"
    return f"{width} count {int(count)} times in the sum{more}"
