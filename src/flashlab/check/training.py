"""What an attention should give, forward and backward, with every option of the door; and how far off it may be.

The bounds follow `flashlab.check.tolerance`: each element's error may be at most what its own terms allow after one
rounding of P, of dS and of the result to the inputs' dtype, and the largest at most a multiple of what an eager
attention in that dtype errs by: twice for o, three times for gradients (flash-attention's test suite).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashlab.attention import full_reference as reference
from flashlab.attention.inputs import scale_of
from flashlab.check.tolerance import FLOAT32, excess

__all__ = ["Wanted", "worst", "wanted"]


class Wanted(NamedTuple):
    """A right result, float64 on the CPU, and the allowed error of each element."""

    value: torch.Tensor
    bound: torch.Tensor

    def excess(self, got: torch.Tensor) -> float:
        """The largest error as a multiple of its bound: at most 1 where it is right; NaN where `got` has a NaN."""
        if got.shape != self.value.shape:
            raise ValueError(f"the result is {list(got.shape)}; {list(self.value.shape)} is wanted")
        return excess(got.detach().cpu().double(), self.value, self.bound).max().item() if got.numel() else 0.0


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_o: torch.Tensor | None = None, **options: Any
) -> dict[str, Wanted]:
    """o and lse of an attention, and dq, dk and dv where `grad_o` is given, with their bounds.

    options: causal, scale, window, softcap, as `flashlab.attention.full_reference.attention` takes them.
    """
    q, k, v = (x.detach().cpu() for x in (q, k, v))
    o, lse = reference.attention(q, k, v, **options)
    twin = reference.attention_low_precision(q, k, v, **options)
    epsilon, tiny = torch.finfo(q.dtype).eps, torch.finfo(q.dtype).smallest_normal
    factor = abs(scale_of(options.get("scale"), q.shape[3]))
    group = q.shape[1] // max(1, k.shape[1])

    def shared(x: torch.Tensor) -> torch.Tensor:  # a key head's rows for each query head that reads them
        return x.double().abs().repeat_interleave(group, 1)

    # A sum of head_dim products in float32: as many roundings, in a random walk. exp turns it into a relative error.
    walk = max(8.0, q.shape[3] ** 0.5) * FLOAT32
    sizes = factor * (q.double().abs() @ shared(k).transpose(-1, -2))
    size = sizes.amax(-1) if sizes.shape[-1] else torch.zeros_like(lse)
    score_error = 2 * walk * (8 + size)
    average_v, _ = reference.attention(q, k, v.abs(), **options)
    o_bound = (epsilon + score_error[..., None]) * average_v + tiny * k.shape[2]
    found = {
        "o": _calibrated(o, o_bound, twin, 2),
        "lse": Wanted(lse, 1e-5 + walk * (size + lse.abs().nan_to_num(posinf=0.0))),
    }
    if grad_o is None:
        return found

    grad_o = grad_o.detach().cpu()
    right = reference.attention_backward(grad_o, q, k, v, **options)
    eager = reference.low_precision_backward(grad_o, q, k, v, **options)
    do = grad_o.double().abs()
    zeros = torch.zeros_like(sizes)
    p = zeros if not sizes.numel() else _probabilities(q, k, **options)
    terms = p * (do @ shared(v).transpose(-1, -2) + (do * o.abs()).sum(-1, keepdim=True))  # of dS, without their signs
    allowed = 2 * epsilon + score_error[..., None]
    bounds = {
        "dq": factor * (allowed * terms) @ shared(k),
        "dk": _shared_sum(factor * (allowed * terms).transpose(-1, -2) @ q.double().abs(), group),
        "dv": _shared_sum((allowed * p).transpose(-1, -2) @ do, group),
    }
    for name, value, twin in zip(bounds, right, eager, strict=True):
        found[name] = _calibrated(value, bounds[name] + 64 * tiny * epsilon * max(q.shape[2], k.shape[2]), twin, 3)
    return found


def _calibrated(value: torch.Tensor, analytic: torch.Tensor, twin: torch.Tensor, times: int) -> Wanted:
    """The analytic bound, cut at `times` the largest error of the eager twin and one rounding of the largest result."""
    if not value.numel():
        return Wanted(value, analytic)
    error = (twin.double() - value).abs().max().nan_to_num(nan=float("inf")).item()
    rounding = torch.finfo(twin.dtype).eps * value.abs().max().item()
    floor = 8 * FLOAT32 * analytic.max().item() / torch.finfo(twin.dtype).eps
    return Wanted(value, analytic.clamp(max=times * error + rounding + floor))


def _probabilities(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    """P [batch, heads, seq_q, seq_k] in float64: attention to the rows of the unit matrix."""
    unit = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return reference.attention(q, k, unit, **options)[0]


def _shared_sum(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.unflatten(1, (-1, group)).sum(2) if x.numel() else x[:, ::group]


def worst(found: dict[str, Wanted], **got: torch.Tensor) -> tuple[str, float]:
    """The result that is furthest off, and its error as a multiple of its bound; NaN counts as infinite."""
    errors = {name: found[name].excess(x) for name, x in got.items()}
    return max(errors.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])
