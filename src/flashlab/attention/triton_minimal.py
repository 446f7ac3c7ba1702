"""Phase 3: FlashAttention's forward pass as a Triton kernel, in its smallest honest form.

One head, q [M, HEAD_DIM] against k and v [N, HEAD_DIM], any M and N, any strides. One program computes BLOCK_M rows of
the output; it walks over K and V, BLOCK_N rows at a time, and keeps m_i, l_i and acc on chip. The loop is that of
simulation.flash_attention_forward_sim, line for line and under the same names. What it adds: pointers and
masks in place of slices, and exp2 in place of exp. What it leaves out (batch, heads, causal masks, other head sizes,
autotuning) is phase 4.

Sources: Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023), Algorithm 1 of each; exp2 with log2(e)
folded into the scale is the FlashAttention-2 paper's and everybody's since; the Triton tutorial "Fused Attention" has
the same loop.
"""

import contextlib

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention.inputs import TILE_SIDES, check_block, check_qkv, scale_of

LOG2_E = 1.4426950408889634  # exp(x) == exp2(x * LOG2_E)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def flash_attention_forward_kernel(
    Q_ptr,  # [M, HEAD_DIM]
    K_ptr,  # [N, HEAD_DIM]
    V_ptr,  # [N, HEAD_DIM]
    O_ptr,  # [M, HEAD_DIM]
    LSE_ptr,  # [M], float32
    stride_qm,
    stride_qd,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    stride_om,
    stride_od,
    scale_log2,  # scale * log2(e): the scores come out in units of log 2
    M,
    N,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # This program's rows of Q. int64, because a row times its stride may pass 2^31 elements.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM).to(tl.int64)
    q_ptrs = Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)  # rows past M are zeros, and never stored

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score of each row so far
    l_i = tl.zeros([BLOCK_M], tl.float32)  # the sum of exp2(score - m_i) so far
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)  # the sum of exp2(score - m_i) * v so far
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        in_range = offs_n < N  # false only in the last block, and only if BLOCK_N does not divide N
        k_ptrs = K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        s = tl.where(in_range[None, :], s, float("-inf"))  # a zero in K is a score of 0, and exp2(0) is 1
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no score yet: -inf - (-inf) is NaN
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)  # at most 1: what was added so far, relative to the new maximum
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=in_range[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")  # acc + p @ v; p in v's dtype
        m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # l_i is 0 where every score was -inf: o is 0
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # times ln 2: a natural logarithm again
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(LSE_ptr + offs_m, lse, mask=offs_m < M)


def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    BLOCK_M: int | None = None,
    BLOCK_N: int | None = None,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    kernel=flash_attention_forward_kernel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v for one head, in one kernel launch.

    Args:
        q: [M, HEAD_DIM]; k, v: [N, HEAD_DIM]; all float16, all bfloat16 or all float32, with any strides, on the device
            that kernels run on (``runtime.device()``). HEAD_DIM is 16, 32, 64, 128 or 256; M and N are anything, 0 too.
        scale: 1 / sqrt(HEAD_DIM) unless given.
        BLOCK_M, BLOCK_N: query and key rows per tile, powers of two from 16 on; by default 64, or as many as fill
            16 KiB if that is fewer (``default_block``).
        num_warps, num_stages: as in any Triton launch; more stages hold more tiles of K and V in shared memory.
        kernel: another kernel with the same parameters; the exercises launch theirs with it.
    Returns:
        o: [M, HEAD_DIM] in the inputs' dtype, contiguous. lse: [M], float32: log(sum(exp(scores))), natural.
        Scores and statistics are float32 throughout; float32 inputs are multiplied in float32, not in TF32.
    Special values:
        No key (N = 0), or only scores of -inf in a row: o is 0 and lse -inf there. A NaN or +inf among a row's scores
        makes the row NaN. A NaN in row j of v makes every row NaN, since 0 * NaN is NaN.
    Raises:
        TypeError, ValueError: see `flashlab.attention.inputs.check_qkv`, `check_block` and `scale_of`.
    """
    on_gpu = not runtime.INTERPRETED
    check_qkv(q, k, v, rank=2, dtypes=DTYPES, head_dims=TILE_SIDES, same_v=True, on_gpu=on_gpu, no_grad=True)
    check_block("BLOCK_M", BLOCK_M, power_of_two=True)
    check_block("BLOCK_N", BLOCK_N, power_of_two=True)
    M, HEAD_DIM = q.shape
    N = k.shape[0]
    BLOCK_M = BLOCK_M or default_block(HEAD_DIM, q.dtype)
    BLOCK_N = BLOCK_N or default_block(HEAD_DIM, q.dtype)
    scale = scale_of(scale, HEAD_DIM)
    o = torch.empty((M, HEAD_DIM), dtype=q.dtype, device=q.device)
    lse = torch.empty((M,), dtype=torch.float32, device=q.device)
    if M == 0:
        return o, lse  # a grid of 0 programs cannot be launched
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        kernel[(triton.cdiv(M, BLOCK_M),)](
            q, k, v, o, lse,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            scale * LOG2_E, M, N,
            HEAD_DIM=HEAD_DIM, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return o, lse


def default_block(HEAD_DIM: int, dtype: torch.dtype) -> int:
    """Rows per tile: 64, fewer where 64 rows are more than 16 KiB, so that three stages fit every GPU since 2020."""
    return min(64, 16 * 1024 // (HEAD_DIM * dtype.itemsize))


def compile_arguments(
    dtype: torch.dtype, HEAD_DIM: int, N: int = 1024, BLOCK_M: int | None = None, BLOCK_N: int | None = None
) -> dict[str, object]:
    """What a compile report needs for a launch on contiguous q, k, v [N, HEAD_DIM] of this dtype."""
    check_block("BLOCK_M", BLOCK_M, power_of_two=True)
    check_block("BLOCK_N", BLOCK_N, power_of_two=True)
    block = default_block(HEAD_DIM, dtype)
    strides = {f"stride_{tensor}": HEAD_DIM for tensor in ("qm", "kn", "vn", "om")}
    strides |= {f"stride_{tensor}d": 1 for tensor in "qkvo"}
    pointers = {f"{tensor}_ptr": dtype for tensor in "QKVO"} | {"LSE_ptr": torch.float32}
    sizes = {"M": N, "N": N, "HEAD_DIM": HEAD_DIM, "BLOCK_M": BLOCK_M or block, "BLOCK_N": BLOCK_N or block}
    return pointers | strides | {"scale_log2": HEAD_DIM**-0.5 * LOG2_E} | sizes


def hbm_bytes(M: int, N: int, HEAD_DIM: int, itemsize: int, BLOCK_M: int = 64) -> tuple[int, int]:
    """Bytes (read, written) by one launch: Q once, all of K and V once for each block of queries; O and lse once."""
    check_block("BLOCK_M", BLOCK_M, power_of_two=True)
    programs = triton.cdiv(M, BLOCK_M)
    return (M + 2 * N * programs) * HEAD_DIM * itemsize, M * HEAD_DIM * itemsize + 4 * M
