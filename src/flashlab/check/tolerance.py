"""How far from the truth a right kernel may be: calibrated on the case itself, never a bare `atol`.

A kernel that keeps its statistics in float32 rounds P to the inputs' dtype before P @ V, and the output once at the
end. So against float64 it may err in each element by at most

    eps * (P |V|)  +  what float32 adds  (eps: the spacing of the inputs' dtype at 1)

which is small where the output is small. And its largest error may be at most twice that of an eager attention in the
same dtype (the rule of flash-attention's test suite), plus one rounding of the output and float32's share. Both must
hold: the first alone allows much on long rows; the second alone allows almost anything where the scores are large and
the eager twin itself is bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.attention.inputs import scale_of
from flashlab.check.cases import Case, make_inputs

FLOAT32 = 2.0**-24  # the rounding of float32


@dataclass(frozen=True)
class Truth:
    """What inputs should give, in float64, and how far from it a right kernel may be."""

    o: torch.Tensor  # [batch, heads, seq_q, head_dim]
    lse: torch.Tensor  # [batch, heads, seq_q], natural logarithm; -inf where a row may look at no key
    o_bound: torch.Tensor  # like o: allowed error of each element
    lse_bound: torch.Tensor  # like lse
    twin_error: float  # largest error of the eager low-precision attention; inf where it overflows
    rounding: float  # one rounding of the largest output in the inputs' dtype
    score_error: torch.Tensor  # like lse: the relative error of a row's P that float32 explains

    @property
    def unit(self) -> float:
        """The twin's error, or one rounding where the twin happens to be better than that."""
        return max(self.twin_error, self.rounding) if self.twin_error < float("inf") else self.rounding


def truth(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Truth:
    """The oracle, its twin and the bounds for CPU copies of a case's inputs."""
    # In the "huge" case every product and every sum is exact, and equal for all keys: nothing to forgive in P.
    return bounded(q, k, v, exact=case.content == "huge", causal=case.causal, scale=case.softmax_scale)


def bounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, exact: bool = False, **options: Any) -> Truth:
    """The oracle, its twin and the bounds for any inputs and options of `flashlab.attention.reference.attention`.

    exact: the scores are exact in float32.
    """
    o, lse = reference.attention(q, k, v, **options)
    average_v, _ = reference.attention(q, k, v.abs(), **options)
    twin, _ = reference.attention_low_precision(q, k, v, **options)
    twin_error = (twin.double() - o).abs().max().item() if o.numel() else 0.0
    twin_error = twin_error if twin_error == twin_error else float("inf")

    seq_k, head_dim = k.shape[2:]
    group = q.shape[1] // k.shape[1]
    size = q.double().abs() @ k.double().abs().repeat_interleave(group, 1).transpose(-1, -2)
    size = size.amax(-1) * abs(scale_of(options.get("scale"), head_dim)) if size.numel() else torch.zeros_like(lse)
    # A sum of head_dim products: as many roundings, in a random walk. exp turns it into a relative error.
    walk = max(8.0, head_dim**0.5) * FLOAT32
    score_error = 2 * walk * (8 + (torch.zeros_like(size) if exact else size))
    epsilon = torch.finfo(q.dtype).eps
    tiny = seq_k * torch.finfo(q.dtype).smallest_normal * epsilon * (v.abs().max().item() if v.numel() else 0)
    analytic = (epsilon + score_error[..., None]) * average_v + tiny

    rounding = epsilon / 2 * o.abs().max().item() if o.numel() else 0.0
    float32_error = (score_error[..., None] * average_v).max().item() if o.numel() else 0.0
    calibrated = 2 * twin_error + rounding + float32_error
    lse_bound = 1e-5 + walk * (size + lse.abs().nan_to_num(posinf=0.0))
    return Truth(o, lse, analytic.clamp(max=calibrated), lse_bound, twin_error, rounding, score_error)


@lru_cache(maxsize=256)
def truth_of(case: Case) -> Truth:
    """`truth` of a case's own inputs; kept, because a learner checks the same function many times."""
    return truth(case, *make_inputs(case, torch.device("cpu")))


def excess(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Error of each element as a multiple of its bound: at most 1 where it is right, NaN where `got` is NaN.

    An infinity is right only where the same infinity is wanted.
    """
    same = got == want
    error = torch.where(same, torch.zeros_like(want), (got - want).abs())
    return torch.where(same, error, error / bound)


def within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> bool:
    """`assert err <= bound` for all elements, in the form that a NaN fails."""
    return bool((excess(got, want, bound) <= 1).all())
