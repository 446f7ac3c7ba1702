"""Why an output is wrong: compare it with what every known mistake gives, then describe what is left.

Three steps, each only if the one before found nothing: what can be read from the output's structure (rows nobody
wrote, another head's result, NaN where a row sees no key); the hypotheses, which must explain the cases that fail and
not contradict those that pass; and, honestly, where the output is wrong and where it is still right. Nothing here is
random or timed: the same wrong output always gets the same sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from flashlab.check import pattern
from flashlab.check.cases import Case, make_inputs
from flashlab.check.failed import CheckFailed
from flashlab.check.mistakes.attention import CALM, ROWS, Mistake, Size
from flashlab.check.models import Problem, attend, problem
from flashlab.check.observation import Observation
from flashlab.check.symptoms import spans
from flashlab.check.tolerance import excess

ENOUGH = 0.7  # the share of failing cases that a hypothesis has to explain
PERFECT = 1.01 - 1e-9  # the score of a mistake that explains each o and each lse
PROBED = 3  # failing cases on which all hypotheses are tried; all others only for those that fit


def diagnose(observations: Sequence[Observation]) -> CheckFailed:
    """The exception to raise when at least one observation is not right."""
    full = [seen for seen in observations if seen.o.numel() and seen.case.seq_k]
    if not all(seen.ok for seen in full):
        observations = full  # what happens without keys is then a consequence
    wrong = [seen for seen in observations if not seen.ok]
    for step in (
        _structure, _heads, _hypotheses, _contents, _permuted, _scaled_output, _parts_of_lse, _nearly_right,
        _rows_by_factors,
    ):  # fmt: skip
        try:
            found = step(observations, wrong)
        except (RuntimeError, ValueError, IndexError):  # a model that does not fit: the learner still gets an answer
            continue
        if found:
            slug, sentence, seen = found
            return CheckFailed(sentence, diagnosis=slug, case=str(seen.case))
    return _describe(observations, wrong)


Found = tuple[str, str, Observation]


# ---- what the structure of the output says --------------------------------------------------------------------------


def _structure(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    first = wrong[0]
    for seen in wrong:
        if seen.unwritten.any():
            columns, rows = seen.unwritten.flatten(0, -2).any(0), seen.unwritten.any(-1)
            where = _rows(rows)
            if not columns.all():
                where = f"{spans(columns.nonzero().flatten().tolist(), 'columns', len(columns))}, in {where}"
            sentence = f"nothing is ever written to {where} of o"
            return "rows-not-written", sentence + _stored_over(seen), seen
    if all(seen.lse_unwritten for seen in wrong):
        return "lse-not-written", "nothing is ever written to lse", first
    if all(_nothing_finite(seen.o) for seen in observations):
        if all(seen.lse is not None and seen.lse.isnan().all() for seen in observations):
            said = "everything is NaN from the first block on: is the correction upside down? At the start, where m "
            said += "is -inf (is it?), exp(m_old - m_new) is 0, but exp(m_new - m_old) is infinite, and inf * 0 is NaN"
            return "correction-inverted", said, first
        said = "no output is finite: with m = -inf at the start, which difference becomes -inf - (-inf), or which "
        said += "product inf * 0?"
        return "nan-everywhere", said, first
    masked = [seen for seen in wrong if _only_masked_rows(seen)]
    if len(masked) == len(wrong):
        return _masked_rows(masked[0])
    lost = [seen for seen in wrong if _rows_of_zeros(seen)]
    if len(lost) == len(wrong):
        none = _rows(_wrong_rows(lost[0]) & (lost[0].truth.lse != -math.inf))
        if all(s.lse is not None and bool(s.lse[_wrong_rows(s)].isnan().all()) for s in lost):
            sentence = f"{none} of o are 0, and their lse is NaN, the others right: something turned a NaN into 0. "
            sentence += "Where does the NaN arise? -inf - (-inf), inf * 0, or 0 / 0"
            return "nan-hidden", sentence, lost[0]
        return "rows-not-computed", f"{none} of o are 0, the others right: never computed, or made 0", lost[0]
    layouts = {seen.case.layout for seen in wrong}
    if "contiguous" not in layouts and any(s.ok and s.case.layout == "contiguous" for s in observations):
        said = "right for contiguous inputs only: the addresses have to use each tensor's own strides"
        return "strides-ignored", said, first
    others = [seen for seen in wrong if seen not in masked]
    if {seen.case.content for seen in others} == {"huge"} and all(_as_a_sentinel_gives(seen) for seen in others):
        said = "wrong where the scores are hugely negative: a mask, or what a maximum begins or ends with, is a finite "
        said += "number (0, -1e4, ...), and real scores are below it; use -inf"
        return "finite-sentinel", said, others[0]
    return None


RIGHT_AS_WRITTEN = "; the rows that are written are right"


def _stored_over(seen: Observation) -> str:
    """Of rows that nobody has written: whether the others are right, or hold what belongs in the missing ones."""
    missing, right, bound = seen.unwritten.any(-1), seen.truth.o, 4 * seen.truth.o_bound
    wrong = ~(excess(seen.o, right, seen.truth.o_bound) <= 1).all(-1) & ~missing
    if not bool((~missing).any()):
        return ""
    if not wrong.any():
        return RIGHT_AS_WRITTEN
    at = None
    for b, h, row in wrong.nonzero().tolist():
        fits = ((seen.o[b, h, row] - right[b, h]).abs() <= bound[b, h]).all(-1).nonzero().flatten().tolist()
        if len(fits) != 1 or not bool(missing[b, h, fits[0]]):
            return ""
        at = at or (row, fits[0])
    assert at is not None, "some row is wrong"
    return f"; row {at[0]} of o holds what belongs in row {at[1]}, stored over its own: which row is it stored in?"


def _as_a_sentinel_gives(seen: Observation) -> bool:
    """Whether each wrong row has an output of 0 or NaN, or an lse that is far off: nothing that rounding does."""
    rows = _wrong_rows(seen)
    strange = ~seen.o.isfinite().all(-1) | (seen.o.abs().amax(-1) < 1e-3)
    if seen.lse is not None:
        strange |= ~((seen.lse - seen.truth.lse).abs() <= 1e-3 * seen.truth.lse.abs())
    return bool(strange[rows].all())


def _nothing_finite(x: torch.Tensor) -> bool:
    return x.numel() == 0 or not bool(x.isfinite().any())


def _wrong_rows(seen: Observation) -> torch.Tensor:
    """Boolean [batch, heads, seq_q]: rows of which o or lse is wrong."""
    rows = ~(excess(seen.o, seen.truth.o, seen.truth.o_bound) <= 1).all(-1)
    if seen.lse is not None:
        rows |= ~(excess(seen.lse, seen.truth.lse, seen.truth.lse_bound) <= 1)
    return rows


def _rows_of_zeros(seen: Observation) -> bool:
    """Some rows right, and the wrong ones, which see keys, all 0."""
    rows = _wrong_rows(seen) & (seen.truth.lse != -math.inf)
    return bool(rows.any()) and not bool(rows.all()) and bool((seen.o[rows] == 0).all())


def _only_masked_rows(seen: Observation) -> bool:
    return bool((_wrong_rows(seen) & (seen.truth.lse != -math.inf)).sum() == 0)


def _masked_rows(seen: Observation) -> Found:
    rows = seen.truth.lse == -math.inf
    if seen.o_ok:
        said = "rows that may look at no key have the wrong lse: it is -inf, the logarithm of an empty sum"
        return "masked-rows-lse", said, seen
    if seen.o[rows].isnan().any():
        if seen.lse is not None and not seen.lse[rows].isnan().any():
            lse = seen.lse[rows].flatten()[0].item()
            sentence = f"rows that may look at no key give NaN, and an lse of {lse:.3g}; o has to be 0 there, lse -inf"
            if lse != -math.inf:
                sentence += ". Does a finite number stand for minus infinity?"
            return "masked-rows-nan", sentence, seen
        said = "rows that may look at no key give NaN: -inf - (-inf) or 0 / 0; o has to be 0 there, and lse -inf"
        return "masked-rows-nan", said, seen
    said = "rows that may look at no key are not 0: o has to be 0 there, and lse -inf"
    v = make_inputs(seen.case, torch.device("cpu"))[2].double()[0, 0]
    means = v.cumsum(0) / torch.arange(1.0, len(v) + 1)[:, None]  # of the values of the first keys
    if bool(((means[len(v) > 1 :] - seen.o[rows][0]).abs().amax(1) < 1e-2).any()):
        said += "; does a finite number stand for minus infinity, so that their masked keys all get the same weight?"
    return "masked-rows-not-zero", said, seen


# ---- which head was computed ----------------------------------------------------------------------------------------


def _heads(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """Whether the wrong heads are right results of other heads; only where single heads are right."""
    if any(s.case.batch * s.case.heads == 1 for s in wrong):
        return None
    for seen in wrong:
        found = _lse_of_other_heads(seen) if seen.o_ok else _other_heads(seen, problem(seen.case))
        if found:
            return (*found, seen)
    return None


def _lse_of_other_heads(seen: Observation) -> tuple[str, str] | None:
    """o right; where lse is wrong it is that of another head."""
    assert seen.lse is not None, "a case whose o is right is wrong in lse"
    got, right, bound = seen.lse.flatten(0, 1), seen.truth.lse.flatten(0, 1), seen.truth.lse_bound.flatten(0, 1)
    fits = (excess(got[:, None], right[None], bound[:, None]) <= 4).all(-1)  # [got, right]
    source = fits.int().argmax(1)
    if not fits.any(1).all() or bool((source == torch.arange(len(source))).all()):
        return None
    at = int((source != torch.arange(len(source))).nonzero()[0])
    (b, h), (b_other, h_other) = (divmod(x, seen.case.heads) for x in (at, int(source[at])))
    said = f"o is right, but batch {b}, head {h} of lse holds that of batch {b_other}, head {h_other}: where is lse "
    said += "stored?"
    return "wrong-head-stored", said


def _other_heads(seen: Observation, p: Problem) -> tuple[str, str] | None:
    case = seen.case
    pairs = [(b, h) for b in range(case.batch) for h in range(case.heads)]
    group = case.heads // case.kv_heads
    bad = [at for at in pairs if not bool((excess(seen.o, seen.truth.o, seen.truth.o_bound)[at] <= 1).all())]
    bad = [at for at in bad if seen.o[at].isfinite().all()] or bad

    def is_it(at: tuple[int, int], q: tuple[int, int], k: tuple[int, int], v: tuple[int, int]) -> bool:
        scores = p.q[q] @ p.k[k].T * case.softmax_scale
        o, _ = attend(scores.masked_fill(~p.visible, -math.inf), p.v[v])
        return bool(((seen.o[at] - o).abs() <= 4 * seen.truth.o_bound.max()).all())

    kinds: tuple[tuple[str, Callable], ...] = (
        ("K and V", lambda at, other: (at, other, other)),
        ("K", lambda at, other: (at, other, at)),
        ("V", lambda at, other: (at, at, other)),
        ("Q", lambda at, other: (other, at, at)),
        ("everything", lambda at, other: (other, other, other)),
    )
    for what, operands in kinds:
        firsts = ((at, next((o for o in pairs if o != at and is_it(at, *operands(at, o))), None)) for at in bad)
        others = {at: other for at, other in firsts if other is not None}
        if not others or len(others) < len(bad) / 2:
            continue
        (b, h), (b_other, h_other) = next(iter(others.items()))
        if what == "everything":
            said = f"batch {b}, head {h} holds the result of batch {b_other}, head {h_other}: look at where o is "
            said += "stored"
            return "wrong-head-stored", said
        source = f"batch {b}, head {h} was computed with {what} of batch {b_other}, head "
        source += f"{h_other // group if what != 'Q' else h_other}"
        if case.kv_heads != case.heads and what != "Q" and all(a[0] == o[0] for a, o in others.items()):
            return "wrong-kv-head", f"{source}; it belongs to K/V head {h // group} (query head // group size)"
        if all(a[0] == o[0] for a, o in others.items()):
            rule = "" if what == "Q" else f"; of K and V it is head {h // group}, query head // group size"
            return "wrong-kv-head" if rule else "wrong-head", f"{source}: the head's offset is wrong{rule}"
        if all(a[1] // group == o[1] // group for a, o in others.items()):
            return "wrong-batch", f"{source}: the batch's offset is missing"
        return "wrong-stride", f"{source}: the strides of batch and head are mixed up"
    return None


# ---- the hypotheses -------------------------------------------------------------------------------------------------


def _hypotheses(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    calm = [s for s in wrong if s.case.content in CALM]
    lse_alone = all(s.o_ok for s in wrong)
    # Lengths of a few tiles tell the most mistakes apart for the least work.
    probes = sorted(calm or wrong, key=lambda s: abs(s.case.seq_k - 120) + abs(s.case.seq_q - 40))[:PROBED]
    clear = [s for s in calm or wrong if _clearly_wrong(s)][:PROBED]
    cheap = sorted(wrong, key=lambda s: s.o.numel() * s.case.seq_k)
    nearly = all(_is_nearly_right(s) for s in calm or wrong)
    best, best_score, best_size = None, 0.0, (0, 0, 0)
    for row in ROWS:
        if (row.close and not nearly) or (_is_of_lse(row) and not lse_alone):
            continue
        # Where each case says its own BLOCK_N, the sizes differ in the rest alone.
        given = observations[0].case.block_n is not None
        for size in dict.fromkeys((m, bool(n) if given else n, count) for m, n, count in row.sizes):
            verdicts = (_explains(row, size, s, lse_alone) for s in (clear if row.close else probes))
            fits = any(verdicts) if row.close or not calm else all(v != 0 for v in verdicts)
            score = _score(row, size, observations, cheap, best_score) if fits else 0.0
            if score > best_score + 1e-9:
                best, best_score, best_size = row, score, size
        if best_score >= PERFECT:
            break
    if best is None:
        return None
    seen = next(s for s in wrong if _explains(best, best_size, s))
    return best.slug, best.sentence.format(size=best_size[2]), seen


def _is_of_lse(row: Mistake) -> bool:
    """Whether it makes lse wrong, and nothing else."""
    return row.slug.startswith("lse-")


def _score(
    row: Mistake, size: Size, observations: Sequence[Observation], wrong: Sequence[Observation], best: float
) -> float:
    """The share of failing cases that are explained; 0 when that is too little, or no better than the best so far, or
    when a right case contradicts it."""
    explained = opinions = agreeing_lse = 0
    lse_alone = all(s.o_ok for s in wrong)
    for left, seen in zip(range(len(wrong), 0, -1), wrong, strict=True):
        most = (explained + left) / (opinions + left)
        if most < ENOUGH or most + 0.01 <= best:
            return 0.0
        verdict = _explains(row, size, seen, lse_alone)
        if verdict is None or (row.close and not _clearly_wrong(seen)):
            continue
        opinions += 1
        explained += bool(verdict)
        agreeing_lse += verdict == 2
        if not verdict and seen.case.content in CALM and not row.close:
            return 0.0
    if not opinions or explained / opinions < ENOUGH:
        return 0.0
    contradicted = sum(seen.ok and _visibly_wrong(row, size, seen) for seen in observations)
    if contradicted and not (row.close and contradicted < explained):
        return 0.0
    return explained / opinions + 0.01 * agreeing_lse / opinions


@lru_cache(maxsize=1024)  # of some 50 KB: asked for twice in a diagnosis, and again when the learner tries again
def _predictions(row: Mistake, size: Size, case: Case) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """o and lse, and the same with NaN in rows that see no key; nothing where there is no opinion."""
    found = row.predict(case, size)
    if found is None:
        return ()
    o, lse = found
    empty = (lse == -math.inf) & (o == 0).all(-1)
    if not empty.any():
        return (found,)
    return found, (o.masked_fill(empty[..., None], math.nan), lse.masked_fill(empty, math.nan))


def _explains(row: Mistake, size: Size, seen: Observation, lse_alone: bool = False) -> int | None:
    """2: o and lse are as predicted; 1: a wrong o is; 0: not; None: no opinion.

    lse_alone: o is right in every case, so that a mistake has lse to explain, and nothing else.
    """
    predicted = _predictions(row, size, seen.case)
    if not predicted:
        return None
    truth, close = seen.truth, row.close
    if seen.o_ok:
        # In a matter of rounding, an error that stays below the bound says nothing.
        o_match = close or any(bool((excess(seen.o, o, truth.o_bound) <= 4).all()) for o, _ in predicted)
    else:
        o_match = any(_same(seen.o, o, truth.o, truth.o_bound, seen.case.dtype, close) for o, _ in predicted)
    if not o_match:
        return 0
    if seen.lse is None:
        lse_match = True
    elif seen.lse_ok:
        lse_match = close or any(bool((excess(seen.lse, x, truth.lse_bound) <= 4).all()) for _, x in predicted)
    else:
        lse_match = any(_same(seen.lse, x, truth.lse, truth.lse_bound, torch.float32, close) for _, x in predicted)
    if lse_match:
        return 2
    if close or lse_alone:
        return 0
    # Where o is as predicted, lse may be computed in a way the row does not know; a right o, or NaN, proves nothing.
    return 1 if not seen.o_ok and bool(seen.o[_wrong_rows(seen)].isfinite().any()) else None


def _same(
    got: torch.Tensor,
    predicted: torch.Tensor,
    right: torch.Tensor,
    bound: torch.Tensor,
    dtype: torch.dtype,
    close: bool,
) -> bool:
    """Whether a wrong `got` is what was predicted, and much nearer to it than to what is right.

    What overflows in the kernel may still be finite, but large, in the float64 model.
    """
    predicted = predicted.to(torch.float32 if dtype == torch.float64 else dtype).double()
    as_it_should = ~got.isfinite() & (got == right)  # the lse of a row without a key: tells nothing
    got, predicted, right = (x.masked_fill(as_it_should & (got == predicted), 0.0) for x in (got, predicted, right))
    if not close and bool((excess(got, predicted, bound) <= 1).all()):
        # As near to the prediction as a right answer has to be to the truth; but a right prediction explains nothing.
        return not bool((excess(predicted, right, bound) <= 0.5).all())
    away = (got - predicted).square().sum()
    if away > 0.25 * (got - right).square().sum():  # false where either is NaN or infinite: the rest decides then
        return False
    finite = got.isfinite()
    largest = right[right.isfinite()].abs().amax().clamp(min=1) if right.isfinite().any() else torch.ones(())
    overflows = ~predicted.isfinite() | (predicted.abs() > 1e4 * largest)
    if not (finite | overflows | (got == predicted)).all() or (finite & ~predicted.isfinite()).any():
        return False
    if not finite.any():
        return True
    residue, error = (got - predicted)[finite], (got - right)[finite]
    error = error[error.isfinite()]
    size = error.square().mean().sqrt() if error.numel() else torch.tensor(math.inf)
    if not finite.all() and bool(residue.abs().le(4 * bound.expand_as(got)[finite]).all()):
        return True  # the infinities and NaN already tell it from what is right
    part = residue.square().mean().sqrt() / size
    tight = bool((residue.abs() <= 4 * bound.expand_as(got)[finite]).all())
    return bool(part <= 0.5) if close or tight else bool(part <= 0.1)


def _visibly_wrong(row: Mistake, size: Size, seen: Observation) -> bool:
    """Whether all that is predicted is far outside the bounds: then a right output contradicts it."""
    predicted = _predictions(row, size, seen.case)
    bounds, truth = (seen.truth.o_bound, seen.truth.lse_bound), (seen.truth.o, seen.truth.lse)
    of = int(_is_of_lse(row))
    pairs = [(both[of], truth[of], bounds[of]) for both in predicted]
    return bool(pairs) and all(not bool((excess(*pair) <= 4).all()) for pair in pairs)


# ---- which contents, which order, which factor ----------------------------------------------------------------------


def _contents(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """Overflow: calm scores are right, large ones are not finite, or 0."""
    if any(s.case.content in CALM for s in wrong) or not any(s.ok for s in observations):
        return None
    broken = [s for s in wrong if not s.o.isfinite().all() or (s.lse is not None and s.lse.isnan().any())]
    if broken and all(_far_below_zero(s) for s in wrong) and not all(_far_below_zero(s) for s in observations):
        said = "wrong where every score of a row is far below 0, right elsewhere: does m start at minus infinity, and "
        said += "is the padding masked in all scores that exp is taken of?"
        return "m-starts-too-high", said, broken[0]
    if broken:
        said = "right while the scores are small, not finite where they are large: is the row maximum, of the same "
        said += "scores, scaled and masked, subtracted before exp?"
        return "no-max-subtraction", said, broken[0]
    if all(_underflows(s) for s in wrong):
        said = "right while the scores are small; where they are large, o is 0 and lse -inf: every exp(s - m) is 0, "
        said += "so m lies far above each score that counts. Is it the maximum of the same scores, scaled and masked?"
        return "maximum-too-high", said, wrong[0]
    return None


def _underflows(seen: Observation) -> bool:
    if seen.lse is None:
        return False
    rows = _wrong_rows(seen)
    zero = (seen.o == 0).all(-1) & (seen.lse == -math.inf)
    return bool(zero[rows].any()) and bool((seen.o.isfinite().all(-1) & ~seen.lse.isnan())[rows].all())


def _far_below_zero(seen: Observation) -> bool:
    return bool(problem(seen.case).maximum.max() < -80)


def _permuted(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """The right numbers in the wrong rows or columns of o."""
    for seen in wrong:
        if seen.case.content not in CALM or min(seen.case.seq_q, seen.case.head_dim) < 8 or not seen.o.isfinite().all():
            continue
        got, right = seen.o[0, 0], seen.truth.o[0, 0]
        close = 4 * seen.truth.o_bound.max()
        for axis, name in ((1, "columns"), (0, "rows")):
            a, b = (got.T, right.T) if axis else (got, right)
            if seen.case.seq_q < 8 and not axis:
                continue
            distance = (a[:, None] - b[None]).abs().amax(-1)  # [wrong one, right one]
            source = distance.argmin(1)
            moved = source != torch.arange(len(source))
            if bool((distance.amin(1) <= close).all()) and bool(moved.any()):
                at = int(moved.nonzero()[0])
                if len(set(source.tolist())) < len(source):
                    # No two places have nearly the same, and no line is one number: zeros belong in any place.
                    alone = bool(((distance <= 2 * close).sum(1) == 1).all())
                    alone &= bool((a[moved].amax(1) - a[moved].amin(1) > 4 * close).all())
                    if not alone or len(moved) < 16 or int(moved.sum()) < 4 or bool(moved.all()):
                        continue
                    holds = f"{name[:-1]} {at} of o holds what belongs in {name[:-1]} {int(source[at])}"
                    return f"o-{name}-repeated", f"{holds}, and so on, for {int(moved.sum())} of {len(moved)}", seen
                far = int((source - torch.arange(len(source))).abs().max()) >= 64  # farther than a fragment is wide
                hint = " (the accumulator's fragments?)" if axis and not far else ""
                sentence = f"the {name} of o are in the wrong order{hint}: "
                sentence += f"{name[:-1]} {at} holds {name[:-1]} {int(source[at])}"
                return f"o-{name}-exchanged", sentence, seen
    return None


def _scaled_output(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """Every output the same multiple of the right one."""
    if all(seen.o_ok and seen.lse is not None for seen in wrong):
        return _scaled_lse(wrong)
    factors = []
    for seen in wrong:
        if seen.o_ok or not seen.o.isfinite().all():
            return None
        got, right = seen.o.flatten(), seen.truth.o.flatten()
        factor = (got @ right / (right @ right)).item()
        if not bool(((got - factor * right).abs() <= 4 * seen.truth.o_bound.flatten()).all()):
            return None
        factors.append(factor)
    if len(factors) < 2 or max(factors) - min(factors) > 0.01 * abs(factors[0]):
        return None
    if abs(factors[0] - 1) < 0.02:
        return None
    return "output-scaled", f"every output is {factors[0]:.3g} times what it should be", wrong[0]


_OF_LSE = {
    1 / math.log(10): ", log10(e): there is a logarithm to base 10 in it",
    math.log(10): ", ln(10): there is a logarithm to base 10 in it",
}


def _scaled_lse(wrong: Sequence[Observation]) -> Found | None:
    """o right, and every lse the same multiple of the right one."""
    got = torch.cat([s.lse.flatten() for s in wrong if s.lse is not None])
    right, bound = (torch.cat([getattr(s.truth, x).flatten() for s in wrong]) for x in ("lse", "lse_bound"))
    finite = right.isfinite()
    if not torch.equal(got[~finite], right[~finite]) or not got[finite].isfinite().all():
        return None
    got, right, bound = got[finite], right[finite], bound[finite]
    factor = (got @ right / (right @ right)).item()
    if len(got) < 8 or abs(factor - 1) < 1e-4 or bool(((got - factor * right).abs() > 2 * bound + 1e-5).any()):
        return None
    near = next((said for x, said in _OF_LSE.items() if abs(factor / x - 1) < 1e-3), "")
    rounded = ": is a constant rounded?" if abs(factor - 1) < 0.01 else ""
    said = f"o is right, and every lse is {factor:.5g} times what it should be{near or rounded}"
    return "lse-scaled", said, wrong[0]


def _parts_of_lse(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """o right, and lse so much of the row's maximum and so much of ln(l), the same for all rows."""
    if not all(s.o_ok and s.lse is not None for s in wrong):
        return None
    fits = []
    for seen in wrong:
        if seen.case.content not in CALM or seen.lse is None:
            continue
        p = problem(seen.case)
        finite = seen.truth.lse.isfinite()
        m, got, bound = p.maximum[finite], seen.lse[finite], seen.truth.lse_bound[finite]
        log_l = seen.truth.lse[finite] - m
        if len(got) < 16 or not got.isfinite().all():
            continue
        design = torch.stack([m, log_l], 1)
        most, least = torch.linalg.svdvals(design).tolist()
        if least < 0.01 * most:
            continue  # m and ln(l) go together here: which of them is wrong cannot be told
        parts = torch.linalg.lstsq(design, got[:, None]).solution
        if bool(((design @ parts)[:, 0] - got).abs().gt(8 * bound + 1e-5).any()):
            return None
        fits.append((seen, *parts[:, 0].tolist()))
    if len(fits) < 2:
        return None
    seen, of_m, of_log = fits[0]
    if abs(of_m - 1) < 0.01 and abs(of_log - 1) < 0.01:
        return None
    scales = [s.case.softmax_scale for s, _, _ in fits]
    # How often m, or ln(l), is in it: the same everywhere, so often the scale, or so often one scale less.
    ways = ((0, "{:.4g} {}"), (-1, "{:.4g} scale {}"), (1, "{:.4g} {} / scale"))
    parts = []
    for name, values in (("m", [a for _, a, _ in fits]), ("ln(l)", [b for _, _, b in fits])):
        for power, words in ways:
            each = [value * scale**power for value, scale in zip(values, scales, strict=True)]
            if max(each) - min(each) < 0.01 * max(1.0, abs(each[0])):
                parts.append(words.format(each[0], name))
                break
    if len(parts) < 2:
        return None
    said = f"o is right, but lse is {' + '.join(parts)}, where m is the row's largest score and l the sum of "
    said += "exp(score - m): it should be m + ln(l)"
    return "lse-parts", said, seen


def _scaled_rows(wrong: Sequence[Observation]) -> Found | None:
    """Each row of o the right one but for a factor, and the factors on one side of 1: no rounding does that."""
    factors = []
    for seen in wrong:
        rows = ~(excess(seen.o, seen.truth.o, seen.truth.o_bound) <= 1).all(-1)
        if not rows.any():
            continue
        got, right = seen.o[rows], seen.truth.o[rows]
        factor = (got * right).sum(-1) / right.square().sum(-1)
        if bool(((got - factor[..., None] * right).abs() > seen.truth.o_bound[rows]).any()):
            return None
        factors.append(factor)
    if not factors:
        return None
    all_of = torch.cat(factors)
    if not (bool((all_of < 1).all()) or bool((all_of > 1).all())) or not all_of.isfinite().all():
        return None
    least, most = all_of.min().item(), all_of.max().item()
    how = f"{least:.6g} times" if most - least < 1e-6 else f"{least:.6g} to {most:.6g} times"
    said = f"the wrong rows of o are right but for one factor per row, {how} what they should be, and a rounding errs "
    said += "both ways: what is each row divided by?"
    return "rows-scaled", said, wrong[0]


# ---- small errors ---------------------------------------------------------------------------------------------------


def _is_nearly_right(seen: Observation) -> bool:
    """The error is a few percent of the values at most: a matter of rounding."""
    error = (seen.o - seen.truth.o).abs().max()
    size = seen.truth.o.abs().max().clamp(min=1e-6)
    lse_off = torch.zeros(()) if seen.lse is None else _lse_error(seen.lse, seen.truth.lse)
    loud = seen.case.content not in ("plain", "late")  # in "creeping", roundings add up
    return bool(error <= (0.2 if loud else 0.03) * size) and bool(lse_off <= (1.0 if loud else 0.03))


def _clearly_wrong(seen: Observation) -> bool:
    """Far enough outside of its bound for the pattern of the error to stand out from ordinary rounding."""
    return not bool((_worst_excess(seen) <= 1.5).all())


def _worst_excess(seen: Observation) -> torch.Tensor:
    """The largest excess of o and of lse; NaN where there is one."""
    parts = [excess(seen.o, seen.truth.o, seen.truth.o_bound).max()]
    if seen.lse is not None:
        parts.append(excess(seen.lse, seen.truth.lse, seen.truth.lse_bound).max())
    return torch.stack(parts)


def _lse_error(lse: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    error = torch.where(lse == truth, torch.zeros_like(truth), (lse - truth).abs())
    return (error / truth.abs().nan_to_num(posinf=0.0).clamp(min=1.0)).max()


def _rows_by_factors(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    """Each wrong row of o the right one but for a factor, in the calm cases."""
    calm = [s for s in wrong if s.case.content in CALM]
    if not calm:
        return None
    factors, of_lse = [], []
    for seen in calm:
        rows = _wrong_rows(seen)
        got, right, bound = seen.o[rows], seen.truth.o[rows], seen.truth.o_bound[rows]
        if seen.o_ok or not got.isfinite().all() or got.shape[-1] < 16:
            return None
        factor = (got * right).sum(-1) / right.square().sum(-1)
        room = 2 * bound * factor.abs().clamp(min=1.0)[..., None]
        if bool(((got - factor[..., None] * right).abs() > room).any()) or bool((factor.abs() < 0.01).any()):
            return None
        factors.append(factor)
        if seen.lse is not None:
            of_lse.append(((seen.lse - seen.truth.lse)[rows], factor))
    each = torch.cat(factors)
    why = ": what is each row divided by, and does its sum go with it?"
    if of_lse and all(bool((off + factor.log()).abs().max() < 0.02) for off, factor in of_lse):
        why = ". o times exp(lse) is right, so acc is, and l alone is not: what is in it, and is it rescaled as acc is?"
    elif of_lse and all(bool(off.abs().max() < 0.005) for off, _ in of_lse):
        why = ". lse is right, so l is; acc has this factor: is it rescaled as l is, and only so?"
    rows = _wrong_rows(calm[0])
    what = "every row of o" if bool(rows.all()) else f"{_rows(rows)} of o"
    said = f"{_difference(observations, wrong)}{what}: right but for one factor per row, {each.min():.3g} to "
    said += f"{each.max():.3g} in all of them{why}"
    return "rows-scaled", said, calm[0]


def _nearly_right(observations: Sequence[Observation], wrong: Sequence[Observation]) -> Found | None:
    calm = [seen for seen in wrong if seen.case.content in CALM]
    if not all(_is_nearly_right(seen) for seen in calm or wrong):
        return None
    seen = max(calm or wrong, key=lambda s: _worst_excess(s).nan_to_num().max().item())
    errors = _worst_excess(seen)
    name = "o" if not seen.o_ok else "lse"
    times = errors[0 if name == "o" else 1].item()
    if name == "o" and not _rounded_to_16_bits(wrong) and (found := _scaled_rows(wrong)):
        return found
    if name == "o" and _rounded_to_16_bits(wrong):
        sentence = "nearly right: every element of o is a 16-bit number, though the inputs are float32; store it as "
        sentence += "it is"
        return "o-in-16-bit", sentence, seen
    if name == "lse" and all(s.o_ok for s in wrong):
        return "low-precision", _nearly_lse(calm or wrong, times), seen
    rows = _wrong_rows(seen)
    why = "is something rounded that should stay in float32 (the scores, m, l or acc)?"
    if 8 * rows.sum() < rows.numel():
        why = f"{_rows(rows)} alone err: do they see a key too many or too few? Or {why}"
    sentence = f"nearly right, but {name} errs by {times:.3g} times what is allowed: {why}"
    return "low-precision", sentence, seen


def _nearly_lse(wrong: Sequence[Observation], times: float) -> str:
    errors = torch.cat([(s.lse - s.truth.lse)[s.truth.lse.isfinite()] for s in wrong if s.lse is not None])
    least, most = errors.min().item(), errors.max().item()
    size = f"by up to {errors.abs().max().item():.2g}"
    if least > 0 or most < 0:
        size = f"and is always too {'large' if least > 0 else 'small'}, {size}"
    return (
        f"o is right in every case; lse alone errs, {size}, at most {times:.3g} times what is allowed: is m, the sum "
        "or the logarithm rounded, or computed in another way than with float32's digits?"
    )


def _rounded_to_16_bits(wrong: Sequence[Observation]) -> bool:
    if any(seen.case.dtype != torch.float32 for seen in wrong):
        return False
    return any(
        all(torch.equal(s.o, s.o.to(dtype).double()) for s in wrong) for dtype in (torch.float16, torch.bfloat16)
    )


# ---- an honest description ------------------------------------------------------------------------------------------


def _lse_never_set(seen: Observation) -> bool:
    return seen.lse is not None and bool((seen.lse == -math.inf).all())


def _describe(observations: Sequence[Observation], wrong: Sequence[Observation]) -> CheckFailed:
    """No known mistake: how the failing cases differ from the passing ones, and which rows of the first are wrong."""
    seen = wrong[0]
    name, x, right, bound = ("o", seen.o, seen.truth.o, seen.truth.o_bound)
    if seen.o_ok and seen.lse is not None:
        name, x, right, bound = ("lse", seen.lse, seen.truth.lse, seen.truth.lse_bound)
    ratio = excess(x, right, bound)
    bad = ~(ratio <= 1)
    rows = bad if name == "lse" else bad.any(-1)
    at = tuple(int(i) for i in bad.nonzero()[0])
    where = f"{name}{list(at[2:] if seen.case.batch * seen.case.heads == 1 else at)}"
    value = f"{where} is {x[at].item():.4g} instead of {right[at].item():.4g}"
    share = "every row is wrong" if rows.all() else f"{_rows(rows)} are wrong, the others right"
    columns = bad.flatten(0, 2).any(0) if name == "o" and rows.all() else torch.ones(1, dtype=torch.bool)
    if not columns.all() and _stay_right(wrong, ~columns):
        share = f"{pattern.runs(columns, 'column')} of o are wrong in every row, the others right"
    if seen.o.shape[2] == 1:
        share = "its only row is wrong"
    difference = _difference(observations, wrong)
    finer = seen.lse is not None and name == "o" and all(s.lse_ok for s in wrong)
    # Of huge scores lse is right within a bound that tells nothing of a sum.
    finer = finer and any(bool((s.truth.lse_bound < 0.1).all()) for s in wrong)
    end = ". lse is right in every case, so the maxima and the sums are" if finer else ""
    if name == "lse" and all(_lse_never_set(s) for s in wrong if s.case.content in CALM):
        end = ", and -inf in every row. o is right here, so the sums are not 0: something that lse is made of is "
        end += "-inf: a maximum as it began, the old lse, or the logarithm of a sum that is 0?"
        return CheckFailed(f"{difference}{share}: {value}{end}", diagnosis="maximum-never-set", case=str(seen.case))
    return CheckFailed(f"{difference}{share}: {value}{end}", diagnosis="wrong-value", case=str(seen.case))


def _stay_right(wrong: Sequence[Observation], columns: torch.Tensor) -> bool:
    """Whether these columns of o are right in every case of that head_dim."""
    alike = [s for s in wrong if s.o.shape[-1] == len(columns)]
    return all(bool((excess(s.o, s.truth.o, s.truth.o_bound)[..., columns] <= 1).all()) for s in alike)


def _difference(observations: Sequence[Observation], wrong: Sequence[Observation]) -> str:
    """Words for a property that all failing cases have and no passing one."""
    right = [s for s in observations if s.ok]
    if not right:
        return "every case fails; in the first "
    properties: tuple[tuple[str, Callable[[Observation], bool]], ...] = (
        ("only causal cases fail; in the first ", lambda s: s.case.causal),
        ("only cases with several batches or heads fail; in the first ", lambda s: s.case.batch * s.case.heads > 1),
        ("only cases with grouped queries fail; in the first ", lambda s: s.case.heads != s.case.kv_heads),
        ("only cases with seq_q != seq_k fail; in the first ", lambda s: s.case.seq_q != s.case.seq_k),
        ("only another scale than the default fails; in the first such case ", lambda s: s.case.scale is not None),
        ("it fails where scale and causal have their defaults; there ", lambda s: s.case.omit_defaults),
        ("only large scores fail; in the first such case ", lambda s: s.case.content not in CALM),
        ("only 16-bit inputs fail, float32 is right; in the first ", lambda s: s.case.dtype != torch.float32),
        ("only this dtype fails; in its first case ", lambda s: s.case.dtype == wrong[0].case.dtype),
        ("only this head_dim fails; in its first case ", lambda s: s.case.head_dim == wrong[0].case.head_dim),
    )
    for words, has in properties:
        if all(has(s) for s in wrong) and not any(has(s) for s in right):
            return words
    for multiple in (16, 32, 64, 128):
        if all(s.case.seq_k % multiple for s in wrong) and not any(s.case.seq_k % multiple for s in right):
            return f"only cases fail where seq_k is no multiple of {multiple}; in the first "
        if all(s.case.seq_q > multiple for s in wrong) and not any(s.case.seq_q > multiple for s in right):
            return f"only cases with more than {multiple} queries fail; in the first "
        if all(s.case.seq_k > multiple for s in wrong) and not any(s.case.seq_k > multiple for s in right):
            return f"only cases with more than {multiple} keys fail; in the first "
    return f"{len(wrong)} of {len(observations)} cases fail; in the first "


def _rows(bad: torch.Tensor) -> str:
    """Words for a boolean [batch, heads, seq_q(, head_dim)]: "rows 64 to 99", "rows of head 1"."""
    bad = bad.any(-1) if bad.ndim == 4 else bad
    heads = bad.flatten(0, 1).any(-1)
    rows = bad.flatten(0, 1).any(0).nonzero().flatten().tolist()
    first, last = rows[0], rows[-1]
    words = f"rows {first} to {last}" if last > first else f"row {first}"
    if len(rows) < last - first + 1:
        words = f"{len(rows)} rows between {first} and {last}"
    if len(heads) > 1 and not heads.all():
        b, h = divmod(int(heads.nonzero()[0]), bad.shape[1])
        words += f" of {int(heads.sum())} of {len(heads)} heads (first: batch {b}, head {h})"
    return words
