"""The mistakes of an attention: each is one row, an edit of one right text, with a slug and a sentence.

What the edited text gives on a case is the prediction that a wrong output is compared with, and the edited text is
itself the wrong answer on which the checker is tested (`tests/check/test_check_mutants.py`). A newly met bug is first
added here. Numbers behind a row are issues of the project named: public kernels have been wrong in this way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from flashlab.check.cases import Case
from flashlab.check.changes import edited_function
from flashlab.check.lookup import Row
from flashlab.check.models import problem

inf, LN2 = math.inf, math.log(2.0)

# Contents whose exponentials stay in range: what is computed in float64 is what the kernel computes.
CALM = ("plain", "late", "creeping")

# What a mistake depends on: (BLOCK_M, BLOCK_N, COUNT). BLOCK_M 0: a causal loop skips no tiles; BLOCK_N 0: as many as
# there are keys, -1: a power of two; COUNT: of what the sentence speaks.
Size = tuple[int, int, int]
ONE: tuple[Size, ...] = ((0, 0, 0),)
TILES: tuple[Size, ...] = tuple((0, n, 0) for n in (32, 64, 16, 128, 8, 256, 48, 80, 96))
COARSE = tuple(size for size in TILES if size[1] in (16, 32, 64, 128, 256))  # where each costs much, and tells little
PADDED: tuple[Size, ...] = ((0, -1, 0), *TILES)
PAIRS: tuple[Size, ...] = tuple((m, n, 0) for m in (16, 32, 64, 128) for n in (16, 32, 64, 128))
BLOCKS: tuple[Size, ...] = tuple((m, 0, 0) for m in (10**6, 32, 64, 16, 128, 48))


def _counts(*numbers: int, steps: bool = False) -> tuple[Size, ...]:
    return tuple((0, steps, n) for n in numbers)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x, where float32 has it: beyond that infinite, or 0."""
    return torch.exp(x).float().to(x.dtype)


def flash_forward(q, k, v, *, causal=False, scale=None, dtype=None, BLOCK_M=32, BLOCK_N=32, COUNT=0):
    """A right forward pass, tile by tile of keys: the text that every row edits.

    q [batch, heads, seq_q, head_dim], k, v [batch, kv_heads, seq_k, head_dim] -> o like q, lse [batch, heads, seq_q].
    dtype: in which a kernel would round, where q has a wider one.
    """
    M, N, D = q.shape[2], k.shape[2], q.shape[3]
    group = q.shape[1] // k.shape[1]
    scale = D**-0.5 if scale is None else scale
    BLOCK_N = BLOCK_N or max(1, N)
    low, dtype, wide = q.dtype, dtype or q.dtype, torch.promote_types(q.dtype, torch.float32)
    o, lse = torch.empty(q.shape, dtype=low), torch.empty(q.shape[:3], dtype=wide)
    q, k, v = q.to(wide), k.to(wide).repeat_interleave(group, 1), v.to(wide).repeat_interleave(group, 1)
    k, v = pad(k, (0, 0, 0, -N % BLOCK_N)), pad(v, (0, 0, 0, -N % BLOCK_N))
    i = torch.arange(M)[:, None]
    m_i = q.new_full(q.shape[:3], -inf)
    l_i = q.new_zeros(q.shape[:3])
    acc = torch.zeros_like(q)
    for start_n in range(0, N, BLOCK_N):
        j = start_n + torch.arange(BLOCK_N)
        k_j = k[:, :, start_n : start_n + BLOCK_N]
        v_j = v[:, :, start_n : start_n + BLOCK_N]
        s = q @ k_j.mT * scale
        s = torch.where(j < N, s, -inf)
        if causal:
            s = torch.where(j <= i + N - M, s, -inf)
        if causal and BLOCK_M:  # a tile is visited if some row of the block of queries sees one of its keys
            s = torch.where(start_n < (i // BLOCK_M + 1) * BLOCK_M + N - M, s, -inf)
        m_new = torch.maximum(m_i, s.amax(-1))
        m_safe = torch.where(m_new == -inf, 0.0, m_new)
        p = exp(s - m_safe[..., None])
        correction = exp(m_i - m_safe)
        l_i = l_i * correction + p.sum(-1)
        acc = acc * correction[..., None] + p.to(low).to(wide) @ v_j
        m_i = m_new
    o[:] = (acc / torch.where(l_i == 0, 1.0, l_i)[..., None]).to(low)
    lse[:] = torch.where(l_i == 0, -inf, m_i + torch.log(l_i))
    return o, lse


@dataclass(frozen=True)
class Mistake(Row):
    """A row of attention. Without a sentence it is a test alone: the diagnosis is read off the output in another way.

    sizes: those to try; where a case has a BLOCK_N of its own, that stands in the place of the size's.
    close: it shows in the rounding alone: the prediction must then explain the error itself.
    where: says of which cases it predicts anything.
    """

    sizes: Sequence[Size] = ONE
    close: bool = False
    where: Callable[[Case], bool] | None = None

    def build(self, **options: Any) -> Callable[..., Any]:
        """The function with the mistake."""
        return functools.partial(build(*self.edits), **options)

    def predict(self, case: Case, size: Size) -> tuple[torch.Tensor, torch.Tensor] | None:
        """o and lse in float64 that a function with this mistake gives; None: no opinion."""
        if self.where is not None and not self.where(case):
            return None
        block_m, block_n, count = size
        block_n = case.block_n if case.block_n is not None and block_n else block_n
        block_n = max(16, 1 << (case.seq_k - 1).bit_length()) if block_n == -1 else block_n
        given = problem(case)
        fn = self.build(dtype=case.dtype, BLOCK_M=block_m, BLOCK_N=block_n, COUNT=count)
        try:
            o, lse = fn(given.q, given.k, given.v, causal=case.causal, scale=case.softmax_scale)
        except RuntimeError:  # shapes that do not fit
            return None
        lost = self.slug.endswith(("skipped", "dropped", "inverted")) and bool((lse == -inf).all())
        if lost and case.content not in CALM:
            return None  # an output of 0 under large scores has many causes
        return o, lse


@functools.cache
def build(*edits: tuple[str, str]) -> Callable[..., Any]:
    """`flash_forward` with pieces of its text replaced; ValueError when a piece does not occur exactly once."""
    names = dict(globals())
    exec(edited_function(flash_forward, edits), names)
    return names["flash_forward"]


# ---- what the edits call --------------------------------------------------------------------------------------------


def read(x, strides):
    """x, read with other strides than its own, wherever that leads, as a kernel does that is told wrong ones."""
    everything = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    at = sum(torch.arange(n).view([-1] + [1] * (3 - a)) * step for a, (n, step) in enumerate(
        zip(x.shape, strides, strict=True)))  # fmt: skip
    return everything[(at + x.storage_offset()).clamp(0, everything.numel() - 1)]


def tf32(x, half=0x1000):
    """Cut to TF32's ten bits. half: what is added before the cut; 0x1000 rounds to nearest, 0 cuts."""
    return ((x.float().contiguous().view(torch.int32) + half) & ~0x1FFF).view(torch.float32).to(x.dtype)


def turned(v):
    """A tile of V, transposed in its leading square."""
    n, v = min(v.shape[-2:]), v.clone()
    v[..., :n, :n] = v[..., :n, :n].mT.clone()
    return v


def of_the_block(s, BLOCK_M):
    """The maximum of all rows of a block, for each of its rows."""
    return torch.cat([x.amax((-1, -2))[..., None].expand(x.shape[:-1]) for x in s.split(BLOCK_M, -2)], -1)


# ---- the rows -------------------------------------------------------------------------------------------------------

_LOAD = "q.to(wide), k.to(wide)"
_S = "s = q @ k_j.mT * scale"
_TAIL = "s = torch.where(j < N, s, -inf)"
_SEEN, _VISITED = "j <= i + N - M, s", "start_n < (i // BLOCK_M + 1) * BLOCK_M + N - M"
_CAUSAL = f"s = torch.where({_SEEN}, -inf)"
_M_NEW, _SAFE = "m_new = torch.maximum(m_i, s.amax(-1))", "m_safe = torch.where(m_new == -inf, 0.0, m_new)"
_P, _C = "p = exp(s - m_safe[..., None])", "correction = exp(m_i - m_safe)"
_L = "l_i = l_i * correction + p.sum(-1)"
_ACC, _PV = "acc = acc * correction[..., None] + p.to(low).to(wide) @ v_j", "p.to(low).to(wide) @ v_j"
_LOW = (_PV, "p.to(dtype).to(wide) @ v_j")  # a P that 16 bits do not hold is infinite, or 0
_NEXT = "        m_i = m_new\n"
_O, _DIVIDED = "o[:] = (acc / torch.where(l_i == 0, 1.0, l_i)[..., None]).to(low)", " / torch.where(l_i == 0, 1.0, l_i)"
_LSE = "m_i + torch.log(l_i))"
_LOOP = "range(0, N, BLOCK_N)"
_START, _PADDING = "m_i = q.new_full(q.shape[:3], -inf)", "pad(v, (0, 0, 0, -N % BLOCK_N))"
_K_J, _V_J = (f"{x}_j = {x}[:, :, start_n : start_n + BLOCK_N]" for x in "kv")
_INVERTED = "torch.where(m_i == -inf, 0.0, exp(m_safe - m_i))"
_IN_LOOP = f"{_NEXT}        acc = acc / torch.where(l_i == 0, 1.0, l_i)[..., None]\n"

Edits = Sequence[tuple[str, str]]


def _rows(slug: str, sentence: str, *ways: Edits, sizes: Sequence[Size] = ONE, **more: Any) -> list[Mistake]:
    """A row for each of these ways to make one mistake."""
    return [Mistake(slug, sentence, tuple(edits), sizes=sizes, **more) for edits in ways]


def _scaled(slug: str, sentence: str, *factors: str) -> list[Mistake]:
    """The scores times something else than the scale."""
    return _rows(slug, sentence, *([(_S, f"s = q @ k_j.mT * ({factor})")] for factor in factors))


def _corrected(slug: str, sentence: str, of_acc: str, of_l: str, **more: Any) -> list[Mistake]:
    """acc and l multiplied by something else than the correction."""
    edits = [(_ACC, f"acc = acc * ({of_acc})[..., None] + {_PV}"), (_L, f"l_i = l_i * ({of_l}) + p.sum(-1)")]
    return _rows(slug, sentence, [e for e in edits if "(correction)" not in e[1]], sizes=TILES, **more)


def _causal(slug: str, sentence: str, *seen: str, sizes: Sequence[Size] = ONE) -> list[Mistake]:
    """Another mask."""
    return _rows(slug, sentence, *([(_SEEN, f"{x}, s")] for x in seen), sizes=sizes)


def _of_lse(slug: str, sentence: str, *values: str) -> list[Mistake]:
    return _rows(slug, sentence, *([(_LSE, f"{value})")] for value in values))


def _float32(case: Case) -> bool:
    return case.dtype == torch.float32


_WHERE_IT_MOVES = "the rows are right until the row maximum moves: "
_AROUND = "is the wrong way round: exp(m_new - m_old) makes the old part grow where exp(m_old - m_new) has to shrink it"
_RAGGED = "wrong where seq_k is no multiple of the tile: "
_LAST_LOST = "the last block of keys is never visited: the loop ends one block early"
_ONE_FURTHER = "causal is off by one: every query sees one key of the future"
_FIRST_ROW = "causal is right in the first row of tiles only: "
_WHOLE = "inside the block on the diagonal each row still needs its own mask"
_AS_ZERO = "masked scores are set to 0, which exp turns into a weight: set them to minus infinity"
_NEARLY = "nearly right, and worse with every block: "
_NONE = "torch.ones_like(m_i)"

ROWS: tuple[Mistake, ...] = (
    # The scale and the base of the exponential.
    *_scaled("scale-missing", "the scores are not scaled: q k^T has to be multiplied by scale before the softmax",
             "1.0", "LN2"),  # LN2: in base 2, where scale and log2(e) come as one factor
    *_scaled("scale-twice", "the scale is applied twice: once to q (or k), and again to the scores",
             "scale * scale", "scale * scale / LN2"),
    *_scaled("scale-ignored", "the argument `scale` is ignored: the scores are always scaled by 1 / sqrt(head_dim)",
             "D**-0.5"),
    *_scaled("scale-one-over-d", "the scores are scaled by 1 / head_dim; it should be 1 / sqrt(head_dim)", "1 / D"),
    *_scaled("scale-one-over-sqrt-n", "the scores are scaled by 1 / sqrt(seq_len); it should be 1 / sqrt(head_dim)",
             "N**-0.5", "M**-0.5"),
    *_scaled("scale-inverted", "the scores are divided by scale; they have to be multiplied by it", "1 / scale"),
    *_rows("exp2-without-log2e", "exp2 is used on scores that were not multiplied by log2(e): exp(x) is "
           "exp2(x * log2(e))", [(_S, _S + " * LN2"), (_LSE, "m_i / LN2 + torch.log(l_i))")]),
    *_scaled("exp-with-log2e", "the scores are multiplied by log2(e) once too often: exp2 needs that factor once, exp "
             "not at all", "scale / LN2"),
    # The online softmax.
    *_corrected("o-not-rescaled", f"{_WHERE_IT_MOVES}O is not rescaled; multiply acc by exp(m_old - m_new) before "
                "adding the new block", _NONE, "correction"),
    *_corrected("l-not-rescaled", f"{_WHERE_IT_MOVES}l is not rescaled; multiply l by exp(m_old - m_new) before adding "
                "the new block's sum", "correction", _NONE),
    *_corrected("nothing-rescaled", f"{_WHERE_IT_MOVES}neither O nor l is rescaled; multiply both by exp(m_old - "
                "m_new) before adding the new block", _NONE, _NONE),
    *_corrected("correction-inverted", f"the correction {_AROUND}", _INVERTED, _INVERTED),
    *_corrected("correction-inverted", f"the correction of O {_AROUND}", _INVERTED, "correction"),
    *_corrected("correction-inverted", f"the correction of l {_AROUND}", "correction", _INVERTED),
    *(row for what, of_acc, of_l in (("O and l", 2, 2), ("O", 2, 1), ("l", 1, 2)) for row in _corrected(
        "corrected-twice", f"the correction of {what} is applied twice: multiply what was there before by it once",
        *("correction * correction" if n == 2 else "correction" for n in (of_acc, of_l)))),
    *_corrected("overwritten", "only the last block of keys counts in O: acc is replaced by p @ v in each block, it "
                "has to be added to", "0.0 * correction", "correction"),
    *_corrected("overwritten", "only the last block of keys counts in l: l is replaced by the block's sum, it has to "
                "be added to", "correction", "0.0 * correction"),
    *_rows("old-maximum-used", "p is made against the maximum before this block, m_old; it is exp(s - m_new)",
           [(_P, "p = exp(s - torch.where(m_i == -inf, m_safe, m_i)[..., None])")], sizes=TILES),
    *_rows("m-not-updated", "m is not set to m_new at the end of the loop, so that every block starts from the first "
           "block's maximum", [(_NEXT, "        m_i = torch.where(m_i == -inf, m_new, m_i)\n")], sizes=TILES),
    *_rows("block-maximum-in-p", "p is made against the block's own maximum, and divided by an l that is relative to "
           "the whole row's", [(_ACC, "acc = acc + exp(s - s.amax(-1, keepdim=True)).nan_to_num() @ v_j")],
           sizes=TILES),
    *_rows("l-not-shifted", "l sums exp(s), while p is exp(s - m): both are relative to the same maximum",
           [(_L, "l_i = l_i + exp(s).sum(-1)")]),
    *_rows("weights-not-scaled", "p is made from scores that were not scaled, with an m and l of scores that were",
           [(_PV, "exp(s / scale - m_safe[..., None]) @ v_j")]),
    *_rows("weights-from-lse", "wrong where the scores are hugely negative: p is exp(s - lse), but beside so large an "
           "m there is no room in float32 for log(l), and it is lost; use exp(s - m), and divide by l",
           [(_DIVIDED, " * exp(m_i.float() - (m_i.float() + l_i.log().float())).nan_to_num()")]),
    *_rows("rescaled-after-the-sum", "the new block is rescaled too: only what was there before may be multiplied by "
           "the correction, so rescale acc first and add the block afterwards",
           [(_ACC, f"acc = (acc + {_PV}) * torch.where(m_i == -inf, 1.0, correction)[..., None]")],
           [(_ACC, f"acc = (acc + {_PV}) * correction[..., None]")], sizes=TILES),
    *_rows("mixed-bases", "the exponentials do not agree: P is made with exp and the correction with exp2 of the same "
           "difference; use one base for both", [(_C, "correction = exp(LN2 * (m_i - m_safe))")], sizes=TILES),
    *_rows("mixed-bases", "the exponentials do not agree: P is made with exp2 and the correction with exp of the same "
           "difference; use one base for both", [(_P, "p = exp(LN2 * (s - m_safe[..., None]))")], sizes=TILES),
    *_rows("mixed-bases", "the exponentials do not agree: the correction is made with exp of a difference that P "
           "raises 2 to; use one base for both", [(_C, "correction = exp((m_i - m_safe) / LN2)")], sizes=TILES),
    *_rows("exp-with-log2e", "the scores are multiplied by log2(e), but P is made with exp: that factor belongs with "
           "exp2", [(_P, "p = exp((s - m_safe[..., None]) / LN2)")], sizes=TILES),
    *_rows("m-of-this-block-only", "right until the row maximum falls from one block to the next: m_new is the block's "
           "own maximum; it has to be the larger of that and m_old", [(_M_NEW, "m_new = s.amax(-1)")], sizes=TILES),
    *_rows("m-not-updated", "only the last block of keys counts: m_i is not set to m_new at the end of the loop, so "
           "each block forgets the ones before it", [(_NEXT, "")], sizes=TILES),
    *_rows("normalised-in-the-loop", "acc is divided by l before the end (in every block?) and once more at the end: "
           "divide once, after the last block", [(_NEXT, _IN_LOOP)], sizes=TILES),
    *_rows("normalised-in-the-loop-only", "acc is divided by l inside the loop, where l is not complete yet: divide "
           "once, after the last block", [(_NEXT, _IN_LOOP), (_O, "o[:] = acc.to(low)")], sizes=TILES),
    *_rows("normalised-twice", "O is divided by l twice: p (or acc) is divided already",
           [("(acc / torch", "(acc / torch.where(l_i == 0, 1.0, l_i)[..., None] / torch")]),
    *_rows("not-normalised", "O is never divided by l: the last step is acc / l", [(_O, "o[:] = acc.to(low)")]),
    *_rows("no-max-subtraction", "right while the scores are small: the row maximum is not subtracted before exp, "
           "which overflows (or underflows to 0) where the scores are large",
           *([(_SAFE, "m_new = m_safe = torch.zeros_like(m_i)"), *more] for more in (
               [], [_LOW]))),
    *_rows("m-starts-at-zero", "wrong where all scores of a row are negative: the running maximum starts at 0; it has "
           "to start below every score", [(_START, "m_i = q.new_zeros(q.shape[:3])")]),
    *_rows("one-maximum", "one maximum is taken for all rows of a tile; a row far below it underflows: each row has "
           "its own", [(_M_NEW, "m_new = torch.maximum(m_i, of_the_block(s, BLOCK_M))")], sizes=BLOCKS),
    *_rows("padding-in-the-maximum", f"{_RAGGED[:-2]} and all scores are negative: the padded keys, with scores of 0, "
           "take part in the row maximum; mask the scores with minus infinity before the maximum",
           [(_M_NEW, "m_new = torch.maximum(m_i, torch.where(j < N, s, 0.0).amax(-1))")], sizes=PADDED),
    *_rows("softmax-over-queries", "the softmax runs over the queries: maximum and sum of a row are taken along the "
           "keys", *([(_P, f"p = torch.cat([x.softmax(-2) for x in s.split({rows}, -2)], -2).nan_to_num()"),
                      (_C, "correction = torch.ones_like(m_i)"), (_O, "o[:] = acc.to(low)")] for rows in (
                          "max(1, M)", "BLOCK_M or max(1, M)")), sizes=BLOCKS, where=lambda case: not case.causal),
    # The tail and the loop over keys.
    *_rows("tail-not-masked", f"{_RAGGED}the keys that fill up the last tile are not masked; their scores of 0 count "
           "in m and l", [(_TAIL, "pass")], sizes=PADDED),
    *_rows("tail-not-masked", f"{_RAGGED}the keys that fill up the last tile count: what is added to their scores is a "
           "small negative number, and has to be minus infinity",
           *([(_TAIL, f"s = torch.where(j < N, s, s - {by})")] for by in (1, 10, 100)), sizes=PADDED),
    *_rows("n-start-forgotten", "right in the first tile; in the last, the keys that do not exist count as keys of "
           "zeros, with a score of 0. Key n of a tile is key start_n + n: is start_n in the comparison?",
           [(_TAIL, _TAIL.replace("j <", "j - start_n <"))], sizes=TILES),
    *_rows("tail-in-l", f"{_RAGGED}l counts the keys that fill up the last tile; mask the scores with minus infinity "
           "before P is summed", [(_L, _L + " + (j >= N).sum() * exp(-m_safe)")], sizes=PADDED),
    *_rows("read-past-the-end", f"NaN {_RAGGED[6:-2]}: what fills up the last tile of K or V is not 0; masked-out rows "
           "must be loaded as 0, because 0 * NaN and 0 * inf are NaN",
           [(_PADDING, _PADDING[:-1] + ", value=math.nan)")], sizes=PADDED,
           where=lambda case: case.batch * case.heads == 1),  # behind the others lie the numbers of the next
    *_rows("mask-one-too-late", f"{_RAGGED}the mask is off by one, and the padded key number seq_k counts",
           [(_TAIL, _TAIL.replace("<", "<="))], sizes=PADDED),
    *_rows("mask-uses-seq-q", "wrong where seq_q != seq_k: the mask of the tail, or the end of the keys, goes by the "
           "number of queries", [(_TAIL, _TAIL.replace("N", "M"))], sizes=PADDED),
    *_rows("same-rows-only", "each block of queries meets the keys of the same rows only: K and V belong to all of "
           "them", [(_TAIL, _TAIL.replace("j < N", "(j < N) & (j // BLOCK_M == i // BLOCK_M)"))], sizes=BLOCKS[1:]),
    *_rows("keys-stepped-over", "keys are left out: the loop goes on by {size} keys, but a block has BLOCK_N of them",
           [(_TAIL, _TAIL.replace("j < N", "(j < N) & (j % COUNT < BLOCK_N)"))],
           sizes=_counts(32, 64, 128, 256, 16, steps=True), where=lambda case: case.block_n is not None),
    *_rows("tail-skipped", f"{_RAGGED}the last, partly filled block is never visited",
           [(_LOOP, "range(0, N // BLOCK_N * BLOCK_N, BLOCK_N)")], sizes=TILES, where=lambda case: case.seq_k > 15),
    *_rows("mask-inverted", "wrong everywhere: no key counts, at most the padding of the last tile: the mask is the "
           "wrong way round, nothing is added up, or what was is lost in the end", [(_TAIL, _TAIL.replace("<", ">="))],
           sizes=PADDED),
    *_rows("last-block-skipped", _LAST_LOST, *([(_LOOP, f"range(0, N - BLOCK_N{kept}, BLOCK_N)")] for kept in (
        " if N > BLOCK_N else N", "")), sizes=TILES),
    *_rows("tail-mask-on-rows", f"{_RAGGED}the mask of the tail lies on the rows of the scores, the queries; it "
           "belongs on their columns, the keys", [(_TAIL, _TAIL.replace("j <", "start_n + i % BLOCK_N <"))],
           sizes=TILES, where=lambda case: not case.causal),
    *(row for slug, what, edits in (
        ("kv-not-advanced", "of K and of V: the addresses do not move", [_K_J, _V_J]),
        ("k-not-advanced", "of K: its address does not move", [_K_J]),
        ("v-not-advanced", "of V: its address does not move", [_V_J])) for row in _rows(
            slug, f"every block reads the first block {what} with start_n",
            *([*((x, x.replace("start_n : start_n + BLOCK_N", ":BLOCK_N")) for x in edits), *mask] for mask in (
                [], [(_TAIL, _TAIL.replace("j <", "j - start_n <"))])),
            sizes=TILES, where=lambda case: not case.causal)),
    *_rows("first-block-skipped", "the first block of keys is never visited",
           [(_LOOP, "range(BLOCK_N, N, BLOCK_N)")], sizes=TILES),
    *_rows("last-keys-dropped", "the last {size} keys do not count", [(_TAIL, _TAIL.replace("N", "N - COUNT"))],
           sizes=_counts(1, 2, 3, 4, 8, 16, 32, 64, 128)),
    *_rows("first-keys-dropped", "the first {size} keys do not count",
           [(_TAIL, _TAIL.replace("j < N", "(j < N) & (j >= COUNT)"))], sizes=_counts(1, 2, 4, 8)),
    # The causal mask.
    *_causal("causal-missing", "the causal mask has no effect: every query sees every key", "j >= 0"),
    *_causal("causal-without-diagonal", "causal is off by one: a query has to see its own key (<=, not <)",
             "j < i + N - M"),
    *_causal("causal-one-too-far", _ONE_FURTHER, "j <= i + N - M + 1"),
    *_causal("causal-one-too-far", _ONE_FURTHER, "j <= i + N - M + 1", sizes=PAIRS),
    *_rows("causal-loop-too-short", "the loop over the keys ends a block of queries too early: the last row of the "
           "block sees more keys", [(_VISITED, _VISITED.replace("// BLOCK_M + 1", "// BLOCK_M"))], sizes=PAIRS),
    *_rows("causal-loop-top-left", "the loop over the keys ends in the right place for seq_q = seq_k only: query i "
           "sees the keys up to i + seq_k - seq_q", [(_VISITED, _VISITED.replace(" + N - M", ""))], sizes=PAIRS),
    *_causal("causal-top-left", "the causal mask is aligned top-left: with seq_q != seq_k query i sees the keys up to "
             "i + seq_k - seq_q, so that the last query sees the last key", "j <= i"),
    *_causal("causal-offset-sign", "the causal offset has the wrong sign: query i sees the keys up to i + seq_k - "
             "seq_q", "j <= i - N + M"),
    *_rows("always-causal", "the causal mask is applied where none is asked for: is `causal` looked at?",
           [(f"if causal:\n            {_CAUSAL}", _CAUSAL)]),
    *_causal("causal-upside-down", "the causal mask is turned round: queries see the keys after them, not those "
             "before", "j >= i + N - M", "j >= i"),
    *_causal("causal-upside-down", "the causal mask hides what it should show: its condition is inverted",
             "j > i + N - M"),
    *_causal("causal-first-tile-only", f"{_FIRST_ROW}the other rows of queries are not masked (does the condition use "
             "the row within the tile?)", "(j <= i + N - M) | (i >= BLOCK_N)", sizes=TILES),
    *_causal("causal-first-tile-only", f"{_FIRST_ROW}the mask uses the row within the tile, without the tile's own "
             "start", "j <= i % BLOCK_N + N - M", sizes=TILES),
    *_causal("causal-by-block", f"causal is right for whole blocks only: {_WHOLE}",
             "j // BLOCK_N <= (i + N - M) // BLOCK_N", "j < (i // BLOCK_N + 1) * BLOCK_N + N - M", sizes=TILES),
    *_causal("causal-by-block", "causal is right for whole tiles only: inside a tile that some rows see in part, each "
             "row needs its own mask", "j >= 0", sizes=PAIRS),
    *(row for sizes in (TILES, PAIRS) for row in _causal(
        "causal-key-in-the-tile", "causal is right in the first tile of keys only: the mask uses the key's number "
        "within the tile, without the tile's own start", "j - start_n <= i + N - M", sizes=sizes)),
    *_rows("l-counts-hidden-keys", "the causal mask comes too late: hidden keys have no part in O, but l counts them; "
           "mask the scores, before the maximum and the sum",
           *([(_CAUSAL, "pass"), (_ACC, f"p = torch.where(j <= i + N - M, p, 0.0) if causal else p; {_ACC}"), *more]
             for more in ([], [(_TAIL, "pass")])), sizes=(*TILES[:4], *PAIRS)),
    *_rows("masked-with-zero", _AS_ZERO, [(_CAUSAL, _CAUSAL.replace("-inf", "0.0"))],
           [(_CAUSAL, _CAUSAL.replace(_SEEN, "(j <= i + N - M) | (j >= N), s").replace("-inf", "0.0"))],
           sizes=(*TILES, *PAIRS)),
    # Operands.
    *_rows("k-and-v-exchanged", "K and V are exchanged",
           [(_K_J, _K_J.replace("= k", "= v")), (_V_J, _V_J.replace("= v", "= k"))]),
    *_rows("q-and-k-exchanged", "Q and K are exchanged: the softmax runs along the wrong axis of the scores",
           [(_S, "s = (q @ k_j.mT).mT * scale")]),
    *_rows("p-columns-exchanged", "O = P V with the columns of P in the wrong order: columns {size} apart are "
           "exchanged", [(_PV, "pad(p, (0, 2 * COUNT))[..., torch.arange(BLOCK_N) ^ COUNT].to(low).to(wide) @ v_j")],
           sizes=_counts(1, 2, 4, 8, 16)),
    *_rows("v-transposed", "the tiles of V are transposed: P [BLOCK_M, BLOCK_N] has to meet V [BLOCK_N, HEAD_DIM]",
           [(_PV, _PV.replace("v_j", "turned(v_j)"))], sizes=TILES),
    *_rows("k-not-transposed", "K is reshaped to [HEAD_DIM, BLOCK_N], not transposed: its elements are in the wrong "
           "places", [(_S, "s = q @ k_j.reshape(*k.shape[:2], D, BLOCK_N) * scale")], sizes=(*ONE, *TILES)),
    *_rows("head-dim-cut", "only the first 1/{size} of head_dim enters the scores",
           [(_S, "s = q[..., : D // COUNT] @ k_j[..., : D // COUNT].mT * scale")], sizes=_counts(2, 4, 8)),
    # lse, where o is right.
    *_of_lse("lse-in-base-2", "lse is in base 2: multiply by log(2), or undo the log2(e) in the scores",
             "(m_i + torch.log(l_i)) / LN2"),
    *_of_lse("lse-mixed-bases", "lse mixes the bases: m and log(l) have to be in the same base, the natural one",
             "m_i + torch.log2(l_i)", "m_i / LN2 + torch.log(l_i)", "m_i + torch.log(l_i) * LN2",
             "m_i * LN2 + torch.log(l_i)"),
    *_of_lse("lse-log2e-for-ln2", "lse is multiplied by log2(e), from base 2 to base e it is multiplied by ln(2)",
             "(m_i + torch.log(l_i)) / LN2**2"),
    *_of_lse("lse-without-log-l", "lse is only the row maximum: it is m + log(l)", "m_i"),
    *_of_lse("lse-without-m", "lse is only log(l): it is m + log(l)", "torch.log(l_i)"),
    *_of_lse("lse-sign", "lse has a wrong sign: it is m + log(l)", "-m_i - torch.log(l_i)", "m_i - torch.log(l_i)",
             "torch.log(l_i) - m_i"),
    *_of_lse("lse-l-for-log-l", "lse is m + l: it is m + log(l)", "m_i + l_i"),
    *_of_lse("lse-m-not-scaled", "lse uses the maximum of the scores before they were scaled",
             "m_i / scale + torch.log(l_i)"),
    *_of_lse("lse-is-l", "lse is l itself: it is m + log(l)", "l_i"),
    *_of_lse("exp-of-lse", "lse is e^lse, the sum itself: it is the logarithm, m + log(l)", "l_i * exp(m_i)"),
    # Mistakes that only show in the rounding.
    *_rows("o-accumulated-in-low-precision", f"{_NEARLY}O is accumulated in the inputs' dtype; keep acc in float32 "
           "until the end", [(_ACC, f"{_ACC.replace('= ', '= (', 1)}).to(dtype).to(wide)")], sizes=COARSE, close=True),
    *_rows("l-in-low-precision", f"{_NEARLY}l is kept in the inputs' dtype; keep it in float32",
           [(_L, "l_i = (l_i * correction + p.sum(-1)).to(dtype).to(wide)")], sizes=COARSE, close=True),
    *_rows("p-rounded-before-the-sum", "nearly right: P is rounded to 16 bits before it is summed into l; sum it in "
           "float32, and round it only for P @ V",
           *([(_P, f"p = exp(s - m_safe[..., None]).to(torch.{kind}).to(wide)")] for kind in ("bfloat16", "float16")),
           sizes=COARSE, close=True),
    *_rows("scores-in-low-precision", "nearly right: the scores are rounded to the inputs' dtype (or q is, after it "
           "was scaled); q k^T and its scaling belong in float32",
           *([(_S, f"s = {way}")] for way in (
               "(q @ k_j.mT * scale).to(dtype).to(wide)",
               "((q @ k_j.mT).to(dtype).to(wide) * scale).to(dtype).to(wide)",
               "(q * scale).to(dtype).to(wide) @ k_j.mT", "(q * (scale / LN2)).to(dtype).to(wide) @ k_j.mT * LN2",
               "(q @ k_j.mT * (scale / LN2)).to(dtype).to(wide) * LN2")), close=True),
    *_rows("tf32", "nearly right: float32 inputs are multiplied in TF32, with ten bits; ask for full float32 products",
           *([(_S, f"s = tf32(q, {half}) @ tf32(k_j, {half}).mT * scale"), (_PV, values)] for half in (0x1000, 0)
             for values in (f"tf32(p, {half}) @ tf32(v_j, {half})", f"p @ tf32(v_j, {half})", _PV)),
           [(_PV, "tf32(p, 0) @ tf32(v_j, 0)")],
           close=True, where=_float32),
)  # fmt: skip


def _to(old: str, *changes: tuple[str, str]) -> tuple[str, str]:
    new = old
    for before, after in changes:
        new = new.replace(before, after)
    return old, new


_STORE, _BY_HEADS = "o[:] = (acc", "repeat_interleave(group, 1)"
_FINITE = [_to(_START, ("-inf", "{0}")), _to(_TAIL, ("-inf", "{0}")), _to(_CAUSAL, ("-inf", "{0}"))]


def _only_told(slug: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(slug, "", edits, sizes=TILES)


# What is read off the output by other means than a prediction.
READ_OFF: tuple[Mistake, ...] = (
    _only_told("wrong-value", (_M_NEW, "m_new = torch.maximum(m_i, s.amin(-1))")),
    *(_only_told("finite-sentinel", *((old, new.format(value)) for old, new in _FINITE)) for value in (
        "-1e4", "-1e6")),  # FlashInfer 4267
    _only_told("masked-rows-nan", (_SAFE, "m_safe = m_new")),  # FlashAttention 1778, PyTorch 41508: -inf - (-inf)
    _only_told("masked-rows-not-zero", _to(_CAUSAL, ("-inf", "-1e30"))),  # FlashInfer 4452
    _only_told("wrong-kv-head", (f"k.to(wide).{_BY_HEADS}, v.to(wide).{_BY_HEADS}",
                                 "k.to(wide).repeat(1, group, 1, 1), v.to(wide).repeat(1, group, 1, 1)")),
    _only_told("wrong-batch", (_LOAD, "q.to(wide), k[:1].to(wide).expand(len(q), -1, -1, -1)"),
               ("v.to(wide)", "v[:1].to(wide).expand(len(q), -1, -1, -1)")),
    _only_told("wrong-stride", (_LOAD, "q.to(wide), read(k, (k.stride(1), k.stride(0), *k.stride()[2:])).to(wide)")),
    _only_told("strides-ignored", (_LOAD, "q.to(wide), read(k, torch.empty(k.shape).stride()).to(wide)"),
               ("v.to(wide)", "read(v, torch.empty(v.shape).stride()).to(wide)")),  # FlashAttention 355, fla 1138
    _only_told("wrong-head-stored", ("    return", "    o = o[:, [h - h % 2 for h in range(o.shape[1])]]\n    return")),
    _only_told("o-columns-exchanged", ("    return", "    o = o[..., torch.arange(D) ^ 2]\n    return")),
    _only_told("o-rows-exchanged", ("    return", "    o = o.unflatten(2, (-1, 1)).flip(2)[:, :, :, 0]\n    return")),
    _only_told("output-scaled", (_STORE, "o[:] = (0.8 * acc")),
    *(_only_told("rows-not-written", (_STORE, f"o[:, :, :{kept}] = (acc[:, :, :{kept}]"),
                 ("1.0, l_i)", f"1.0, l_i)[:, :, :{kept}]"))
      for kept in ("max(M - 32, 1)", "M // BLOCK_N * BLOCK_N")),
    _only_told("input-modified", ("    o, lse =", "    q.mul_(scale)\n    o, lse =")),
    _only_told("input-modified", ("o[:] = (acc", "q0[:] = (acc"), ("    o, lse =", "    q0 = q\n    o, lse =")),
    _only_told("wrong-dtype", ("torch.empty(q.shape, dtype=low)", "torch.empty(q.shape, dtype=wide)")),
    _only_told("wrong-dtype", ("return o, lse", "return o, lse.to(low)")),
    _only_told("wrong-shape", ("return o, lse", "return o.transpose(1, 2), lse")),
    _only_told("wrong-type", ("return o, lse", "return o")),
    _only_told("returned-none", ("return o, lse", "pass")),
)  # fmt: skip
