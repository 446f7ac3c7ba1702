"""Naive attention: the formula, one line of PyTorch at a time (Algorithm 0 of Dao et al., "FlashAttention", 2022)."""

import math

import torch


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v as PyTorch runs it line by line, every intermediate in memory and in q's dtype.

    q [..., M, HEAD_DIM], k and v [..., N, HEAD_DIM]; scale defaults to 1 / sqrt(HEAD_DIM). Returns [..., M, HEAD_DIM].
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-1, -2)
    scores = scores * scale
    probabilities = torch.softmax(scores, dim=-1)
    return probabilities @ v
