"""What an attention function with a known mistake would return: models in float64, to compare a wrong output with.

Each model is a sentence of mathematics, not a kernel: the online softmax is one loop over blocks of a score matrix that
is already there. A model returns a `Prediction`; where a mistake shows in more than one way (0 / 0 guarded or not), it
lists the alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from flashlab.attention import reference
from flashlab.check.cases import Case, make_inputs
from flashlab.check.tolerance import truth_of

INF = math.inf
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Prediction:
    """Alternatives for o [batch, heads, seq_q, head_dim] and lse [batch, heads, seq_q]; None: as it should be."""

    o: tuple[torch.Tensor, ...] | None = None
    lse: tuple[torch.Tensor, ...] | None = None


class Problem:
    """A case's inputs in float64, K and V repeated for every query head, and what can be computed from them once."""

    def __init__(self, case: Case):
        self.case, self.truth = case, truth_of(case)
        q, k, v = make_inputs(case, torch.device("cpu"))
        group = case.heads // case.kv_heads
        self.q = q.double()
        self.k = k.double().repeat_interleave(group, 1)
        self.v = v.double().repeat_interleave(group, 1)

    @cached_property
    def dots(self) -> torch.Tensor:
        """q k^T, not scaled and not masked, [batch, heads, seq_q, seq_k]."""
        return self.q @ self.k.transpose(-1, -2)

    @cached_property
    def visible(self) -> torch.Tensor:
        """Boolean [seq_q, seq_k]."""
        seq_q, seq_k = self.case.seq_q, self.case.seq_k
        return reference.causal_mask(seq_q, seq_k) if self.case.causal else torch.ones(seq_q, seq_k, dtype=torch.bool)

    @cached_property
    def scores(self) -> torch.Tensor:
        return self.masked(self.dots * self.case.softmax_scale)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~self.visible, -INF)

    @cached_property
    def maximum(self) -> torch.Tensor:
        return self.scores.amax(-1)

    def index(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Query rows i [seq_q, 1], keys j [1, seq_k], and the offset seq_k - seq_q of the causal diagonal."""
        seq_q, seq_k = self.case.seq_q, self.case.seq_k
        return torch.arange(seq_q)[:, None], torch.arange(seq_k)[None, :], seq_k - seq_q

    def padding(self, block_n: int) -> int:
        """How many keys the last tile lacks; block_n 0 is one tile, padded to a power of two from 16 on."""
        return -self.case.seq_k % (block_n or max(16, 1 << (self.case.seq_k - 1).bit_length()))


@lru_cache(maxsize=64)
def problem(case: Case) -> Problem:
    return Problem(case)


def attend(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of the scores times v, and the lse; rows without a key give 0 and -inf."""
    m = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - m.masked_fill(m == -INF, 0.0))  # against m: beside -1e38 lse has no room for log(l)
    l = weights.sum(-1, keepdim=True)  # noqa: E741
    return (weights @ v) / l.masked_fill(l == 0, 1.0), torch.logsumexp(scores, -1)


def attended(scores: torch.Tensor, v: torch.Tensor) -> Prediction:
    """`attend` where empty rows may as well have become NaN."""
    o, lse = attend(scores, v)
    empty = lse == -INF
    if not empty.any():
        return Prediction((o,), (lse,))
    nan = o.masked_fill(empty[..., None], math.nan)
    return Prediction((o, nan), (lse, lse.masked_fill(empty, math.nan)))


def online(
    problem: Problem,
    block_n: int,
    *,
    correct_o: Callable = lambda c, m_old, m_new: c,
    correct_l: Callable = lambda c, m_old, m_new: c,
    exp_p: Callable = torch.exp,
    against: Callable = lambda m_old, m_new: m_new,
    next_m: Callable = lambda m_old, m_new: m_new,
    tail_first: bool = False,
    after: Callable = lambda acc, l: (acc, l),
    normalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The online softmax over blocks of the scores, with its parts open to change; returns o and lse.

    correct_o, correct_l   (correction, m_old, m_new) -> the factor that acc and l are really multiplied by
    exp_p                  what P is made with
    against                (m_old, m_new) -> the maximum that P is made against
    next_m                 (m_old, m_new) -> the m that the next block starts from
    tail_first             the factor is applied after the block was added
    after                  (acc, l) -> (acc, l) at the end of each block
    """
    scores, v = problem.scores, problem.v
    m = torch.full_like(problem.maximum, -INF)
    l = torch.zeros_like(m)  # noqa: E741 (the field's name for it)
    acc = torch.zeros_like(problem.q)
    for start in range(0, scores.shape[-1], block_n):
        s, v_block = scores[..., start : start + block_n], v[..., start : start + block_n, :]
        m_new = torch.maximum(m, s.amax(-1))
        shift = m_new.masked_fill(m_new == -INF, 0.0)
        p = exp_p(s - against(m, shift)[..., None])
        correction = torch.exp(m - shift)
        factor_o, factor_l = correct_o(correction, m, m_new), correct_l(correction, m, m_new)
        l = l * factor_l + p.sum(-1)  # noqa: E741
        added = p @ v_block
        acc = (acc + added) * factor_o[..., None] if tail_first else acc * factor_o[..., None] + added
        acc, l = after(acc, l)  # noqa: E741
        m = next_m(m, m_new)
    divisor = l.masked_fill(l == 0, 1.0)
    return (acc / divisor[..., None] if normalise else acc), torch.where(l == 0, -INF, m + torch.log(l))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


def tf32(x: torch.Tensor, *, nearest: bool) -> torch.Tensor:
    """Cut to the ten bits of mantissa that a TF32 operand has: to nearest, or by dropping the rest."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000 if nearest else bits) & ~0x1FFF).view(torch.float32).double()
