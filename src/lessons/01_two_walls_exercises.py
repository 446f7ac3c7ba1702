# %% [markdown]
# # Phase 1 · Naive attention and the two walls: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong. `hint("1.4")` gives a hint for exercise 1.4, one more with each call; `progress()` shows where you are.
#
# Eight exercises. Without a GPU the kernels run in Triton's interpreter. It accepts more than a GPU does, so
# the checks also hand them to the real compiler, which needs no GPU.

# %%
import math

import torch

from flashlab import runtime
from flashlab.attention.cost import trace_ops
from flashlab.exercises import check, hint, progress
from flashlab.attention.schemes import launch, padded

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 1.1
#
# Attention with an additive mask, as many models run it:
#
#     scores = q @ k.T                          # q, k: [N, D]
#     scores = scores * scale
#     scores = scores + mask                    # mask: [N, N]
#     probabilities = softmax(scores)
#     o = probabilities @ v                     # v: [N, D]
#
# Each line reads its inputs from HBM and writes its result there. Every number has `itemsize` bytes. Count the bytes read, the bytes
# written and the FLOPs of all five lines. A multiply-add is 2 FLOPs; the softmax takes 5 per score.

# %% [markdown]
# ## 1.2
#
# What is the least time that a GPU can take for `flops` operations and `bytes_moved` bytes, if arithmetic and memory overlap perfectly?
# And which of the two is the bound, `"memory"` or `"compute"`?
#
# `gpu` is for instance `runtime.GPUS["H200"]`; `gpu.fp16_tflops` is in $10^{12}$ FLOP/s, `gpu.memory_gb_s` in $10^9$ byte/s.

# %% [markdown]
# ## 1.3
#
# `naive_attention` of the lecture holds two $N \times N$ matrices at its worst moment. Write the four lines in plain torch so that there
# is never more than one. Same result, `q`, `k` and `v` unchanged, scale $1/\sqrt D$, no overflow for large scores.
#
# Torch's methods with a trailing underscore work in place: `x.exp_()` overwrites `x`. The check counts every byte; to see what it sees, run
# `trace_ops(frugal_attention, q, k, v)`.

# %% [markdown]
# ## 1.4
#
# **The milestone of this phase.** One program takes `BLOCK_M` rows of Q and all the keys. The pointers are given: `stride_qm` is the step
# from one row of Q to the next, `stride_qd` that from one column to the next, and so on for K (`kn`, `kd`), V and O.
#
# Load the three tiles, compute the scores and the softmax in float32, and store `o` and `lse`. There are `M` queries and `N` keys, any
# numbers: mind the rows past `M` and the keys past `N`.
#
# To try it: `launch(scheme_a_kernel, q, k, v, BLOCK_N=padded(len(k)))` makes `o` and `lse`, starts one program per `BLOCK_M` rows, and returns
# both. `padded(n)` is the next power of two, at least 16.

# %% tags=["exercise"]
# RULE flashlab.attention.schemes: scheme_a_kernel
@triton.jit
def scheme_a_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M rows of q [M, HEAD_DIM] against all N <= BLOCK_N rows of k and v [N, HEAD_DIM]."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    k_ptrs = k_ptr + offs_n[None, :] * stride_kn + offs_d[:, None] * stride_kd  # axes swapped: this is K^T
    v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    # 1. Load q, k and v, masked.
    # 2. The scores, [BLOCK_M, BLOCK_N], scaled; padded keys get -inf.
    # 3. m_i, p, l_i; then o.
    # 4. Store o (in o_ptr's dtype) and lse = m_i + log(l_i), masked.
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# ## 1.5
#
# Scheme A keeps three tiles in shared memory: `BLOCK_M` rows of Q, and `BLOCK_N` rows each of K and V. A row has `HEAD_DIM` numbers, a
# number `itemsize` bytes. `BLOCK_N` is $N$ padded to a power of two, at least 16. A program may have `limit` bytes.
#
# Return the smallest number of keys $N$, **any integer from 1 on**, that scheme A cannot run. (Where it is not 1, it is no power of two. Why?)

# %% [markdown]
# ## 1.6
#
# `x` is a tile `[ROWS, COLUMNS]`. Get its quarter `J` (0 to 3): the columns `J * COLUMNS // 4` up to `(J + 1) * COLUMNS // 4`. Use
# `tl.reshape`, `tl.permute` and `tl.split`, as in appendix B of the lecture. No gather, no reduction, and no second load from `x_ptr`.
#
# `J` is a `tl.constexpr`, so Python's `if` works on it.

# %% [markdown]
# ## 1.7
#
# A colleague's scheme A. The tests at $N = 64$, 128 and 256 pass. A user reports that at $N = 100$ "the model got a bit worse". There is one
# bug. Tests that try only round numbers do not notice it. Find it, repair it.
#
# Somewhere to start: with V all ones, every output must be 1.

# %% tags=["exercise"]
@triton.jit
def masked_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    k_ptrs = k_ptr + offs_n[None, :] * stride_kn + offs_d[:, None] * stride_kd
    v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    k = tl.load(k_ptrs, mask=offs_n[None, :] < N, other=0.0)
    v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
    s = tl.dot(q, k) * scale
    #: The columns of s are keys: padded ones must get no weight. (The mask was on the other axis. It silenced
    #: rows that are never stored, and left the padded keys with a score of 0 and a share of every row.)
    s += tl.where(offs_n[None, :] < N, 0.0, float("-inf"))
    m_i = tl.max(s, axis=1)
    p = tl.exp(s - m_i[:, None])
    l_i = tl.sum(p, axis=1)
    o = tl.dot(p.to(v.dtype), v) / l_i[:, None]
    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_i), mask=offs_m < M)

# %% [markdown]
# ## 1.8
#
# The kernel of the lecture's section 10. K and V come in blocks of `BLOCK_N`, for any $N$. Pass 1 finds `m_i` and `l_i`, the maximum and the
# sum of each row (phase 0's recurrence, for a block instead of one key). Pass 2 computes the scores again and accumulates `o` in `acc`.
# No rescaling of `o`, no slice, and shared memory that does not depend on $N$. Scores may be of any size, 10³⁰ too: what fits beside them in a float32?
#
# Three functions that scheme A did not need: `tl.zeros([A, B], tl.float32)` makes a tile of zeros, `tl.full([A], value, tl.float32)` one of
# any value, and `tl.maximum(x, y)` takes the larger of two tiles, element by element.
#
# When it works, look at what is wasted. Which line of pass 2 could have run in pass 1, had you allowed its result to be corrected later?

# %% tags=["exercise"]
# RULE flashlab.attention.schemes: two_pass_kernel
@triton.jit
def two_pass_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Pass 1 finds the maximum and the sum of each row; pass 2 computes the scores again, for P @ V."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    # Pass 1: for each block of K, the scores; update m_i and l_i.
    # Pass 2: for each block of K and V, the scores again; p is final; acc += p @ v.
    # Store o and lse = m_i + log(l_i).
    # YOUR CODE HERE
    raise NotImplementedError
