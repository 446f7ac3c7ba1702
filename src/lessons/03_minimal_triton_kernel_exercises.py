# %% [markdown]
# # Phase 3 · Minimal Triton kernel: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("3.4")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# You write kernels here; the check launches them, on a GPU if there is one and in Triton's interpreter if not. Interpreted, it
# also watches every address. A kernel that passes is compiled for a real GPU at the end.
#
# | name | what it is |
# |:--|:--|
# | `x_ptr` | address of the first element of `x` |
# | `stride_qm`, `stride_qd` | elements from one row of Q to the next, from one column to the next; likewise K, V, O |
# | `M`, `N` | rows of Q; rows of K and V |
# | `BLOCK_M`, `BLOCK_N`, `HEAD_DIM` | sides of the tiles, known when the kernel is compiled |
# | `offs_m`, `offs_n`, `offs_d` | the rows of Q, the rows of K and V, and the columns of this tile |
# | `scale_log2` | the softmax scale times $\log_2 e$ |

# %%
import math

import torch

from flashlab.exercises import check, hint, progress

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 3.1
#
# Copy the ROWS × COLS matrix `x` to `y`. It is `stride_xr` elements from one row of x to the next, and `stride_xc` from one column
# to the next; likewise for y. One program, no masks: the tile is exactly the matrix.

# %% [markdown]
# ## 3.2
#
# The kernel works with $2^x$. Write the two conversions at its borders, in plain Python and torch:
#
# - `scale_log2(scale)`: the factor for $q \cdot k$ so that $2^{\mathrm{scale\_log2} \cdot (q \cdot k)} = e^{\text{scale} \cdot (q \cdot k)}$.
# - `natural_lse(m, l)`: the natural log-sum-exp of each row, from the base-2 maximum `m` and the sum `l` of $2^{s - m}$: tensors, of scores $s$ that have
#   been multiplied by `scale_log2`.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_03: scale_log2, natural_lse

# %% [markdown]
# ## 3.3
#
# Program `row` computes $\log \sum_j e^{x_j}$ of its row of N elements, BLOCK at a time. N is anything, so the last block may reach
# over the end. This is the online softmax without V: the state is two numbers, `m` and `l`. The base is $e$ here.

# %% [markdown]
# ## 3.4
#
# **The milestone of this phase**: the lecture's kernel, for keys that do not all come at once. Of the keys before, `o` and `lse` have been
# computed, and stand in O and LSE. The kernel takes its N keys into account as well, and leaves `o` and `lse` of all. Where no key came before, O is 0
# and lse $-\infty$. (So the last phase sends keys from GPU to GPU, with the state of phase 0's `merge_finished`.)
#
# The addresses, and the loads of Q, K and V, are written; the state, the loop's body and the end are yours. Translate phase 2's loop. The scores are in base 2, so use
# `tl.exp2`; lse is natural.
#
# The check runs lengths that no tile divides, maxima that rise in every block, scores near ±200, and three dtypes. In float32
# `tl.dot` needs `input_precision="ieee"`, or it multiplies in TF32.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_03: flash_attention_next_kernel

# %% [markdown]
# ## 3.5
#
# The outputs of this kernel were compared with PyTorch's for every length and dtype, and they agree. For a year nobody used what
# else it returns. Then the keys were cut among two GPUs, and the two results merged by their `lse` (phase 0): the merged output was
# wrong, although both halves were right.
#
# Read the symptoms: what is the quotient of what it stores and what it should store, row by row? Repair the kernel. It should go on
# working with `exp2`, which is what the hardware has.

# %% tags=["exercise"]
@triton.jit
def half_right_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    scale_log2, M, N,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_ptrs = K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.T) * scale_log2
        s = tl.where(offs_n[None, :] < N, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        correction = tl.exp2(m_i - m_new)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, (acc / l_i[:, None]).to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    #: m_i and log2(l_i) are in base 2, because the scores are; times ln 2 the sum is a natural logarithm.
    tl.store(LSE_ptr + offs_m, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=offs_m < M)

# %% [markdown]
# ## 3.6
#
# "Infinities lead to NaN", wrote the author of this one, and used a large negative number instead. The kernel passes on random
# inputs of any length. Then came a model whose scores are hugely negative. Whole rows of the output are wrong, without a NaN, and
# all of these rows have the same `lse`. Find the mistake and repair it.

# %% tags=["exercise"]
@triton.jit
def no_infinity_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    scale_log2, M, N,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  #: repaired: below every score, so never the maximum
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_ptrs = K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.T) * scale_log2
        s = tl.where(offs_n[None, :] < N, s, float("-inf"))  #: repaired: padding must lose against any score
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  #: the one place where -inf - (-inf) could arise
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, o.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(LSE_ptr + offs_m, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=offs_m < M)

# %% [markdown]
# ## 3.7
#
# How many bytes does one launch of your kernel of 3.4 ask to *read* from HBM? Q and O are `[M, HEAD_DIM]`, K and V are
# `[N, HEAD_DIM]`, with `itemsize` bytes per element; lse is in float32. The check compares with what the interpreter counts.

# %% [markdown]
# ## 3.8
#
# Causal: query i sees the keys $j \le i + N - M$, so the last query sees the last key. Write the kernel for that, in two parts:
#
# - inside a tile, mask what must not be seen;
# - do not visit the tiles in which nothing is seen. The check counts the bytes of K that are read.
#
# Mind M > N, where the first rows see no key at all: `o = 0`, `lse = -inf`.

# %% tags=["exercise"]
@triton.jit
def flash_attention_causal_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    scale_log2, M, N,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    start_m = tl.program_id(0) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # BEGIN SOLUTION
    end_n = tl.minimum(N, start_m + BLOCK_M + N - M)  # the last row of this program sees no key from here on
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_ptrs = K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.T) * scale_log2
        visible = (offs_n[None, :] < N) & (offs_n[None, :] <= offs_m[:, None] + N - M)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    # END SOLUTION
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, o.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(LSE_ptr + offs_m, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=offs_m < M)

# %% [markdown]
# ## Where you are
#
# Next, phase 4 gives this kernel batch, heads, grouped queries, causal masks and any head size, and tunes it.
