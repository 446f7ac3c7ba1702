"""Softmax in one pass, and the state (m, l, o) that makes attention mergeable.

For any set of keys, three things about one query row are enough: the largest score `m`, the sum `l` of
exp(score - m), and the sum `o` of exp(score - m) * v. Two such states of disjoint sets merge into the state of their
union, so the keys may be taken in any order and in any grouping. FlashAttention takes them one block after another;
split-KV decoding and ring attention take them at the same time and merge at the end.

Everything is plain PyTorch in the dtype of the inputs, so that one can watch what a dtype does to it.
Sources: Milakov & Gimelshein 2018 (the one-pass sum), Rabe & Staats 2021 (the state with o), Dao et al. 2022.
"""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

import math
from typing import NamedTuple

import torch

from flashlab.attention.inputs import check_qkv, scale_of


def attention_by_loops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q k^T) v, one number at a time, as the formula is written (Vaswani et al. 2017).

    Args:
        q: [M, D]. k: [N, D]. v: [N, Dv]. Any floating dtype; every number becomes a Python float (float64).
        scale: defaults to 1 / sqrt(D).
    Returns:
        [M, Dv], float64.
    Raises:
        TypeError, ValueError: see `flashlab.attention.inputs.check_qkv`.
        OverflowError: a scaled score above 709.78; `math.exp` refuses where a tensor would hold inf.
    """
    check_qkv(q, k, v, rank=2)
    scale = scale_of(scale, q.shape[1])
    Q, K, V = q.tolist(), k.tolist(), v.tolist()
    out = []
    for q_i in Q:
        s = [scale * sum(a * b for a, b in zip(q_i, k_j, strict=True)) for k_j in K]  # scores of row i
        e = [math.exp(s_j) for s_j in s]
        p = [e_j / sum(e) for e_j in e]  # they sum to 1
        out.append([sum(p_j * v_j[d] for p_j, v_j in zip(p, V, strict=True)) for d in range(len(V[0]))])
    return torch.tensor(out, dtype=torch.float64)


def softmax_naive(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) along the last axis, in the dtype of x: zeros or NaN once a row's sum overflows.

    Args:
        x: [..., N], floating.
    Returns:
        [..., N], dtype of x.
    """
    e = torch.exp(x)
    return e / e.sum(dim=-1, keepdim=True)


def row_max(x: torch.Tensor) -> torch.Tensor:
    """The maximum along the last axis, -inf where that axis is empty (`amax` would raise)."""
    return x.amax(dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)


def shifted_exp(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """exp(x - m) for x <= m, where -inf counts as "no score at all": exp(-inf - (-inf)) is 0 here, not NaN.

    Args:
        x: scores, or the maximum of an older state. m: the maximum to refer to, broadcastable to x.
    Returns:
        In [0, 1], shape of x, dtype of x.
    """
    return torch.exp(x - m.masked_fill(torch.isneginf(m), 0.0))


def softmax_safe(x: torch.Tensor) -> torch.Tensor:
    """Softmax along the last axis, the row maximum subtracted first: no exponent above 0, no row sum below 1.

    Args:
        x: [..., N], floating; -inf masks a score.
    Returns:
        [..., N], dtype of x. A row of nothing but -inf gives zeros (`torch.softmax` gives NaN).
    """
    p = shifted_exp(x, row_max(x)[..., None])
    l = p.sum(dim=-1, keepdim=True)
    return p / l.masked_fill(l == 0, 1.0)  # l is 0 only where the whole row is masked


def online_normalizer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row maximum and the sum of exp(x - maximum) along the last axis, reading each score once.

    Algorithm 3 of Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".

    Args:
        x: [..., N], floating.
    Returns:
        m, l: [...], dtype of x. An empty or fully masked row gives (-inf, 0).
    """
    m = x.new_full(x.shape[:-1], -math.inf)
    l = x.new_zeros(x.shape[:-1])
    for x_j in x.unbind(dim=-1):
        m_new = torch.maximum(m, x_j)
        l = l * shifted_exp(m, m_new) + shifted_exp(x_j, m_new)
        m = m_new
    return m, l


def online_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax along the last axis in two readings of x: one for (m, l), one to write the result.

    Args:
        x: [..., N], floating.
    Returns:
        [..., N], dtype of x; zeros for a fully masked row, as in `softmax_safe`.
    """
    m, l = online_normalizer(x)
    return shifted_exp(x, m[..., None]) / l.masked_fill(l == 0, 1.0)[..., None]


class State(NamedTuple):
    """What is known of some query rows after some set of keys.

    m: [...], the largest score. l: [...], the sum of exp(score - m). o: [..., D], the sum of
    exp(score - m) * v, not yet divided by l. All of one floating dtype.
    """

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor


def identity(
    *rows: int, head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> State:
    """The state of no keys at all, (-inf, 0, 0): merging it with a state gives that state back, bit for bit.

    Args:
        rows: the shape of m and l, for instance `identity(batch, heads, seq_len, head_dim=64)`.
    """
    m = torch.full(rows, -math.inf, dtype=dtype, device=device)
    return State(m, torch.zeros_like(m), torch.zeros(*rows, head_dim, dtype=dtype, device=device))


def block_state(scores: torch.Tensor, v: torch.Tensor) -> State:
    """The state of one block of keys.

    Args:
        scores: [..., N], scaled, masked with -inf, N >= 0.
        v: [N, D], or [..., N, D] with the leading axes of scores [..., M, N]. It must be finite, at masked keys
            too: 0 * NaN is NaN.
    Returns:
        m, l: [...]; o: [..., D]; dtype of the scores.
    Raises:
        ValueError: ranks or shapes that do not belong together. TypeError: different or non-floating dtypes.
    """
    require_block(scores, v)
    m = row_max(scores)
    p = shifted_exp(scores, m[..., None])
    return State(m, p.sum(dim=-1), p @ v)


def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of keys together: associative, commutative, `identity` is its identity.

    All three are exact in real numbers. In floating point it is still commutative bit for bit (no product
    here is fused with the addition), `identity` still is exact, and it is associative up to rounding.

    Raises:
        ValueError: states of different shapes. TypeError: different dtypes.
    """
    require_mergeable(a, b)
    m = torch.maximum(a.m, b.m)
    correction_a, correction_b = shifted_exp(a.m, m), shifted_exp(b.m, m)  # one of the two is 1
    l = a.l * correction_a + b.l * correction_b
    o = a.o * correction_a[..., None] + b.o * correction_b[..., None]
    return State(m, l, o)


def finish(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise once, at the end: the attention output, and the log of the sum of exp(score).

    Args:
        state: m, l [...]; o [..., D].
    Returns:
        o: [..., D], o / l. lse: [...], m + log(l), natural logarithm. A row that saw no key gives 0 and -inf.
    Raises:
        ValueError, TypeError: m, l and o do not belong together.
    """
    require_state(state, "state")
    m, l, o = state
    return o / l.masked_fill(l == 0, 1.0)[..., None], m + torch.log(l)


def merge_finished(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two finished results over disjoint keys: a finished result is itself a state, m = lse and l = 1.

    Used where parts of a row are finished apart: split-KV decoding, ring attention, a cached prefix
    (FlashInfer's `merge_state`). The arithmetic is in the dtype of lse; o may be of a lower precision.

    Args:
        o1, o2: [..., D], of one dtype. lse1, lse2: [...], of one dtype.
    Returns:
        o: [..., D], dtype of o1. lse: [...], dtype of lse1.
    Raises:
        ValueError: shapes that do not belong together. TypeError: different or non-floating dtypes.
    """
    require_one_dtype(o1=o1, o2=o2)
    require_one_dtype(lse1=lse1, lse2=lse2)
    first = State(lse1, torch.ones_like(lse1), o1.to(lse1.dtype))
    second = State(lse2, torch.ones_like(lse2), o2.to(lse2.dtype))
    o, lse = finish(merge(first, second))
    return o.to(o1.dtype), lse


def require_block(scores: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError (shapes) or TypeError (dtypes) unless scores [..., N] and v [..., N, D] are of the same keys."""
    if scores.ndim < 1 or v.ndim < 2:
        raise ValueError(
            f"scores must be [..., N] and v [..., N, D], but they have {scores.ndim} and {v.ndim} dimensions"
        )
    if v.shape[-2] != scores.shape[-1] or v.shape[:-2] not in ((), scores.shape[:-2]):
        raise ValueError(
            f"scores {tuple(scores.shape)} and v {tuple(v.shape)} do not fit together: v must hold one row for "
            "each of the N scores, as [N, D] or with the leading axes of scores [..., M, N]"
        )
    require_one_dtype(scores=scores, v=v)


def require_mergeable(a: State, b: State) -> None:
    """Raise ValueError (shapes) or TypeError (dtypes) unless `a` and `b` are states of the same rows."""
    require_state(a, "a")
    require_state(b, "b")
    if a.o.shape != b.o.shape:
        raise ValueError(
            f"the two states differ in rows or head_dim: a.o is {tuple(a.o.shape)}, b.o is {tuple(b.o.shape)}"
        )
    require_one_dtype(**{"a.m": a.m, "b.m": b.m})


def require_state(state: State, name: str) -> None:
    """Raise ValueError (shapes) or TypeError (dtypes) unless m, l and o are of the same rows."""
    m, l, o = state
    if o.ndim < 1 or m.shape != l.shape or m.shape != o.shape[:-1]:
        shapes = f"m is {tuple(m.shape)}, l is {tuple(l.shape)}, o is {tuple(o.shape)}"
        raise ValueError(f"{name}: m and l must have one shape, and o that shape and head_dim, but {shapes}")
    require_one_dtype(**{f"{name}.m": m, f"{name}.l": l, f"{name}.o": o})


def require_one_dtype(**tensors: torch.Tensor) -> None:
    """Raise TypeError, naming the tensors, unless they are all of one floating dtype."""
    dtypes = {name: x.dtype for name, x in tensors.items()}
    if len(set(dtypes.values())) > 1 or not all(d.is_floating_point for d in dtypes.values()):
        listed = ", ".join(f"{name} is {str(d).removeprefix('torch.')}" for name, d in dtypes.items())
        raise TypeError(f"one floating dtype is needed throughout, but {listed}")
