"""A case's numbers in float64, to compare a wrong output with."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import torch

from flashlab.attention import reference
from flashlab.check.cases import Case, make_inputs
from flashlab.check.tolerance import truth_of

INF = math.inf


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


@lru_cache(maxsize=64)
def problem(case: Case) -> Problem:
    return Problem(case)


def attend(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of the scores times v, and the lse; rows without a key give 0 and -inf."""
    m = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - m.masked_fill(m == -INF, 0.0))  # against m: beside -1e38 lse has no room for log(l)
    l = weights.sum(-1, keepdim=True)  # noqa: E741
    return (weights @ v) / l.masked_fill(l == 0, 1.0), torch.logsumexp(scores, -1)
