"""Phase 4, first: phase 3's kernel for the tensors of a model, as one would write it, with its launcher.

Batch and heads on the grid, key heads shared by several query heads, any strides, any lengths, a head_dim that is no
power of two, a causal mask. One loop over all of K, and every tile is masked. What that costs, and how the package's
kernel (triton_forward) does not pay it, is the rest of the phase.

Sources: those of triton_minimal; grouped queries: Ainslie et al., "GQA" (2023).
"""

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention.inputs import check_qkv, scale_of

LOG2_E = 1.4426950408889634  # exp(x) == exp2(x * LOG2_E)


@triton.jit
def plain_attention_kernel(
    Q_ptr,  # [batch, heads, M, HEAD_DIM]
    K_ptr,  # [batch, heads / group, N, HEAD_DIM]
    V_ptr,  # like K
    O_ptr,  # like Q
    LSE_ptr,  # [batch, heads, M], float32, contiguous
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    scale_log2, M, N, heads, group,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D: the next power of two
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    # region: programs
    m_blocks = tl.cdiv(M, BLOCK_M)
    block_m, batch_head = tl.program_id(0) % m_blocks, tl.program_id(0) // m_blocks
    batch_head = batch_head.to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    # endregion

    # region: tiles
    offs_m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    real_d = offs_d[None, :] < HEAD_DIM
    q_ptrs = Q_ptr + batch * stride_qb + head * stride_qh + offs_d[None, :] * stride_qd
    k_ptrs = K_ptr + batch * stride_kb + kv_head * stride_kh + offs_d[None, :] * stride_kd
    v_ptrs = V_ptr + batch * stride_vb + kv_head * stride_vh + offs_d[None, :] * stride_vd
    q = tl.load(q_ptrs + offs_m[:, None] * stride_qm, mask=(offs_m[:, None] < M) & real_d, other=0.0)
    # endregion

    # region: loop
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score of each row so far
    l_i = tl.zeros([BLOCK_M], tl.float32)  # the sum of exp2(score - m_i) so far
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # the sum of exp2(score - m_i) * v so far
    for start_n in range(0, N, BLOCK_N):
        # endregion
        # region: tile
        offs_n = (start_n + tl.arange(0, BLOCK_N)).to(tl.int64)
        real = (offs_n[:, None] < N) & real_d
        k = tl.load(k_ptrs + offs_n[:, None] * stride_kn, mask=real, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        seen = offs_n[None, :] < N
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + N - M)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no score yet: -inf - (-inf) is NaN
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)  # at most 1: what was added so far, for the new maximum
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v = tl.load(v_ptrs + offs_n[:, None] * stride_vn, mask=real, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")  # acc + p @ v; p in v's dtype
        m_i = m_new
        # endregion

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # l_i is 0 in a row that sees no key: o is 0
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # times ln 2: a natural logarithm
    o_ptrs = O_ptr + batch * stride_ob + head * stride_oh + offs_d[None, :] * stride_od
    o = acc.to(O_ptr.dtype.element_ty)
    tl.store(o_ptrs + offs_m[:, None] * stride_om, o, mask=(offs_m[:, None] < M) & real_d)
    tl.store(LSE_ptr + batch_head * M + offs_m, lse, mask=offs_m < M)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    BLOCK_M: int = 64, BLOCK_N: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v in one launch of `plain_attention_kernel`.

    q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], heads a multiple of kv_heads; fp16,
    bf16 or fp32, with any strides, on the current device. causal: aligned at the end. scale: 1 / sqrt(head_dim) unless
    given. Returns o, like q, and lse [batch, heads, seq_q], float32; a row that sees no key gives 0 and -inf.
    Raises TypeError or ValueError: see `flashlab.attention.inputs`.
    """
    check_qkv(q, k, v, same_v=True, on_gpu=not runtime.INTERPRETED, no_grad=True)
    batch, heads, M, head_dim = q.shape
    kv_heads, N = k.shape[1], k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(M, BLOCK_M) * batch * heads,)
    if q.numel() > 0:  # a grid of 0 programs cannot be launched
        plain_attention_kernel[grid](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            scale_of(scale, head_dim) * LOG2_E, M, N, heads, heads // kv_heads,
            HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=causal, num_warps=4, num_stages=2,
        )  # fmt: skip
    return o, lse
