"""What the kernels are measured against: PyTorch's fused attention with its backend forced, and unfused attention.

Each returns a function without arguments, for flashlab.bench.timing: what it needs beside q, k and v is made before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> Callable[[], torch.Tensor]:
    """scaled_dot_product_attention by one backend: "FLASH_ATTENTION" (which is FlashAttention-2), "CUDNN_ATTENTION",
    "EFFICIENT_ATTENTION" or "MATH" (unfused). It raises RuntimeError where it cannot run; no other takes its place.
    """
    chosen = getattr(SDPBackend, backend)

    def run() -> torch.Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Callable[[], torch.Tensor]:
    """softmax(q k^T * scale) v in PyTorch's operations, with the scores in memory."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None

    def run() -> torch.Tensor:
        s = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            s.masked_fill_(mask, -math.inf)
        return s.softmax(-1) @ v

    return run
