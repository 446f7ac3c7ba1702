"""FlashAttention's forward pass in plain torch, one tile at a time.

`flash_attention_forward_sim` is phase 2's milestone: one block of query rows, the keys and values one block
at a time, and a state of three things that never grows with the number of keys:

    m_i  [BLOCK_M]            the largest score seen so far in each row
    l_i  [BLOCK_M]            the sum of exp(score - m_i) over the keys seen so far
    acc  [BLOCK_M, HEAD_DIM]  the sum of exp(score - m_i) * v over the same keys

Each line of its loop has one line in phase 3's Triton kernel, under the same name. It uses the natural `exp`,
as the derivation does; phase 3 folds log2(e) into the scale and calls `exp2`, which is what the hardware has.

Sources: the online softmax is Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018);
tiling attention with it is Dao et al., "FlashAttention" (2022), Algorithm 1; dividing once at the end, and one
query block at a time on the outside, are Dao, "FlashAttention-2" (2023), Algorithm 1.
"""

import math
from typing import NamedTuple

import torch

from flashlab.attention.inputs import check_block, check_causal, check_qkv, scale_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Step(NamedTuple):
    """The state after one key block, and what led to it; every tensor is float32. Handed to `trace=`."""

    start_n: int  # first key of the block
    s: torch.Tensor  # [BLOCK_M, keys in this block]  scaled scores
    p: torch.Tensor  # [BLOCK_M, keys in this block]  exp(s - m_i)
    correction: torch.Tensor  # [BLOCK_M]  exp(m before - m_i)
    m_i: torch.Tensor  # [BLOCK_M]
    l_i: torch.Tensor  # [BLOCK_M]
    acc: torch.Tensor  # [BLOCK_M, HEAD_DIM]


def check_inputs(
    Q_block: torch.Tensor, K: torch.Tensor, V: torch.Tensor, BLOCK_N: int, scale: float | None = None,
    BLOCK_M: int | None = None,
) -> float:  # fmt: skip
    """Raise a clear error for inputs that the block functions cannot take; return `scale`, or its default.

    Raises:
        TypeError, ValueError: see `check_qkv`; no key at all; a block size that is not an int, or below 1.
    """
    check_qkv(Q_block, K, V, rank=2, dtypes=_DTYPES, keys_needed=True, names=("Q_block", "K", "V"))
    check_block("BLOCK_M", BLOCK_M)
    check_block("BLOCK_N", BLOCK_N)
    return scale_of(scale, Q_block.shape[1])


def flash_attention_forward_sim(
    Q_block: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    BLOCK_N: int,
    scale: float | None = None,
    trace=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q_block K^T) V for one block of query rows, BLOCK_N keys at a time.

    Args:
        Q_block: [BLOCK_M, HEAD_DIM], float16, bfloat16 or float32.
        K: [N, HEAD_DIM], V: [N, V_DIM], of the same dtype; N need not be a multiple of BLOCK_N.
        scale: defaults to 1 / sqrt(HEAD_DIM).
        trace: a function, called with a `Step` after each key block.
    Returns:
        O_block: [BLOCK_M, V_DIM] in V's dtype. lse: [BLOCK_M], float32, log(sum(exp(scores))), natural.
    Raises:
        ValueError, TypeError: see `check_inputs`; a row whose scores in the first block are all -inf.
    """
    scale = check_inputs(Q_block, K, V, BLOCK_N, scale)
    BLOCK_M, N = Q_block.shape[0], K.shape[0]

    # .float() is the load: from here on a tile is on chip. The product of two 16-bit numbers is exact in
    # float32, and in a tensor core too.
    q = Q_block.float()  # [BLOCK_M, HEAD_DIM]
    m_i = q.new_full([BLOCK_M], -math.inf)  # the largest score of each row so far
    l_i = q.new_zeros([BLOCK_M])  # the sum of exp(score - m_i) so far
    acc = q.new_zeros([BLOCK_M, V.shape[1]])  # the sum of exp(score - m_i) * v so far
    for start_n in range(0, N, BLOCK_N):
        k = K[start_n : start_n + BLOCK_N].float()  # the last block may be shorter: Python cuts the slice
        s = scale * (q @ k.T)  # [BLOCK_M, keys in this block]
        m_new = torch.maximum(m_i, s.amax(dim=1))
        p = torch.exp(s - m_new[:, None])  # like s, relative to the new maximum
        correction = torch.exp(m_i - m_new)  # exp(-inf) = 0 on the first block: nothing was there to correct
        l_i = l_i * correction + p.sum(dim=1)
        acc = acc * correction[:, None]
        v = V[start_n : start_n + BLOCK_N].float()
        acc = acc + p.to(V.dtype).float() @ v  # P is rounded to V's dtype: a tensor core needs it so
        m_i = m_new
        if trace is not None:
            trace(Step(start_n, s, p, correction, m_i, l_i, acc))
    if (l_i.isnan() & (m_i < math.inf)).any():  # -inf - (-inf)
        raise ValueError("a row's first scores are all -inf: masks are flash_attention_causal_sim's")
    O_block = (acc / l_i[:, None]).to(V.dtype)  # the one division
    lse = m_i + torch.log(l_i)
    return O_block, lse


def flash_attention_one_head_sim(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    BLOCK_M: int = 64,
    BLOCK_N: int = 64,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one head: `flash_attention_forward_sim` for each block of BLOCK_M query rows.

    Args:
        Q: [M, HEAD_DIM], K: [N, HEAD_DIM], V: [N, V_DIM], of one dtype (float16, bfloat16, float32).
    Returns:
        O: [M, V_DIM] in V's dtype. lse: [M], float32.
    Raises:
        ValueError, TypeError: see `check_inputs`.
    """
    scale = check_inputs(Q, K, V, BLOCK_N, scale, BLOCK_M)
    M = Q.shape[0]
    O = Q.new_empty([M, V.shape[1]])
    lse = Q.new_empty([M], dtype=torch.float32)
    for start_m in range(0, M, BLOCK_M):  # no iteration reads what another wrote: on a GPU, one program each
        Q_block = Q[start_m : start_m + BLOCK_M]
        O_block, lse_block = flash_attention_forward_sim(Q_block, K, V, BLOCK_N, scale)
        O[start_m : start_m + BLOCK_M] = O_block
        lse[start_m : start_m + BLOCK_M] = lse_block
    return O, lse


def flash_attention_causal_sim(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    BLOCK_M: int = 64,
    BLOCK_N: int = 64,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one head: tiles that no row may see are skipped, the others masked.

    Query i sees the keys j <= i + N - M (the last query sees the last key). A row that sees no key at all
    gets O = 0 and lse = -inf. Arguments, results and errors as for `flash_attention_one_head_sim`.
    """
    scale = check_inputs(Q, K, V, BLOCK_N, scale, BLOCK_M)
    M, N = Q.shape[0], K.shape[0]
    O = Q.new_empty([M, V.shape[1]])
    lse = Q.new_empty([M], dtype=torch.float32)
    for start_m in range(0, M, BLOCK_M):
        q = Q[start_m : start_m + BLOCK_M].float()
        last_key = torch.arange(start_m, start_m + q.shape[0], device=Q.device) + N - M  # that each row sees
        m_i = q.new_full([q.shape[0]], -math.inf)
        l_i = q.new_zeros([q.shape[0]])
        acc = q.new_zeros([q.shape[0], V.shape[1]])
        # The block's last row sees the most: from its last key on, every tile would be masked whole.
        for start_n in range(0, min(N, start_m + q.shape[0] + N - M), BLOCK_N):
            k = K[start_n : start_n + BLOCK_N].float()
            s = scale * (q @ k.T)
            key = torch.arange(start_n, start_n + k.shape[0], device=Q.device)
            s = s.masked_fill(key[None, :] > last_key[:, None], -math.inf)
            m_new = torch.maximum(m_i, s.amax(dim=1))
            m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)  # a row with no key yet: -inf - (-inf) is NaN
            p = torch.exp(s - m_safe[:, None])
            correction = torch.exp(m_i - m_safe)
            l_i = l_i * correction + p.sum(dim=1)
            acc = acc * correction[:, None]
            v = V[start_n : start_n + BLOCK_N].float()
            acc = acc + p.to(V.dtype).float() @ v
            m_i = m_new
        O[start_m : start_m + BLOCK_M] = acc / l_i.masked_fill(l_i == 0, 1.0)[:, None]
        lse[start_m : start_m + BLOCK_M] = m_i + torch.log(l_i)
    return O, lse


def flash_attention_sim(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    BLOCK_M: int = 64,
    BLOCK_N: int = 64,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The simulation on whole tensors: a Python loop over batch and heads around the one-head functions.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], heads a multiple of
            kv_heads (query head h reads key head h // (heads / kv_heads)). One dtype, as for `check_inputs`.
    Returns:
        o: [batch, heads, seq_q, head_dim] in v's dtype; lse: [batch, heads, seq_q], float32.
        With no key at all (seq_k = 0) o is 0 and lse -inf.
    Raises:
        ValueError, TypeError: see `check_qkv` and `check_inputs`.
    """
    check_qkv(q, k, v, dtypes=_DTYPES)
    check_causal(causal)
    check_block("BLOCK_M", BLOCK_M)
    check_block("BLOCK_N", BLOCK_N)
    scale = scale_of(scale, q.shape[3])
    one_head = flash_attention_causal_sim if causal else flash_attention_one_head_sim
    group = q.shape[1] // k.shape[1]
    o = q.new_zeros([*q.shape[:3], v.shape[3]])
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    if k.shape[2] == 0:
        return o, lse
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // group
            o[b, h], lse[b, h] = one_head(q[b, h], k[b, kv], v[b, kv], BLOCK_M, BLOCK_N, scale)
    return o, lse
