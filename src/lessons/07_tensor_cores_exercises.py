# %% [markdown]
# # Phase 7 · Tensor cores: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one
# sentence what is wrong; `hint("7.3")` gives the next hint, `progress()` shows where you are.
#
# The CUDA answers are text in a Python string. Replace the line `// YOUR CODE HERE` in it, and leave the rest as it is.
# The check builds the text for the emulator, so no GPU is needed: once fast, and once with every access to memory
# watched.

# %%
from flashlab.check.cuda_answer import region
from flashlab.exercises import check, hint, progress
from flashlab.figures import show
from flashlab.kernels import path, step

# %% [markdown]
# As in the lecture, `g = lane / 4` and `t = lane % 4`. A kernel may use these functions of `ptx.cuh`:
#
# | function | what it does |
# |:--|:--|
# | `smem_u32(pointer)` | the address of something in shared memory, for `ldmatrix` |
# | `ldmatrix_x1(r, address)`, `_x2`, `_x4`; `_x1_trans`, ... | 1, 2 or 4 tiles of 8 × 8 into the registers `r` |
# | `mma_m16n8k16<T>(c, a, b0, b1)` | c += A B, 16 × 8 += 16 × 16 · 16 × 8 |
# | `mma_m16n8k8<T>(c, a, b0)` | c += A B, 16 × 8 += 16 × 8 · 8 × 8 |
# | `pack<T>(low, high)` | two floats, rounded to 16 bits, in one register |

# %% [markdown]
# ## 7.1
#
# The lecture goes from an element of A to its lane. Do the same for the other two. `holder_of_b(row, column)` returns
# `(lane, register, half)` for an element of B, 16 × 8; `holder_of_c(row, column)` returns `(lane, register)` for one of
# C, 16 × 8. Use the lecture's figures of B and C; no loops, no search.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_07: holder_of_b, holder_of_c

# %% [markdown]
# ## 7.2
#
# One `ldmatrix.x4` loads two B fragments at once: half as many instructions, twice the width. Two tiles lie in shared
# memory, each of 16 keys × 16 dimensions, row by row.
#
# - K, without `.trans`: registers 0 and 1 should become `b0 b1` of keys 0–7 (dimensions 0–15), registers 2 and 3
#   `b0 b1` of keys 8–15.
# - V, with `.trans`: registers 0 and 1 should become `b0 b1` of dimensions 0–7 (keys 0–15), registers 2 and 3 `b0 b1`
#   of dimensions 8–15.
#
# Each lane names the element at which a row of 8 begins. Write the row and the column for lane 0 to 31.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_07: k_address, v_address

# %% [markdown]
# ## 7.3
#
# The first product of attention for 16 queries and 8 keys: $S = Q K^\mathsf{T}$, with D dimensions, D a multiple of 16.
# The tiles are in shared memory already. Sum over D with `ldmatrix_x4`, `ldmatrix_x2` and `mma_m16n8k16<T>`, then let
# each lane write its four floats to `s_gmem`, `[16, 8]`. The check runs D = 16, 48 and 64, fp16 and bf16, and counts
# the instructions.

# %% tags=["exercise"]
one_tile = r"""
#include "ptx.cuh"
using T = ELEMENT;                      // __half or __nv_bfloat16, the check says which
constexpr int D = HEAD_DIM;

__global__ void __launch_bounds__(32) one_tile(const T* q_gmem, const T* k_gmem, float* s_gmem) {
    __shared__ __align__(16) T q_smem[16 * D];      // [16, D]
    __shared__ __align__(16) T k_smem[8 * D];       // [8, D]
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 16 * D; i += 32) q_smem[i] = q_gmem[i];
    for (int i = lane; i < 8 * D; i += 32) k_smem[i] = k_gmem[i];
    __syncwarp();                                   // both tiles are here

    float c[4] = {};
    for (int d = 0; d < D; d += 16) {               // the product of 16 dimensions, added to c
        uint32_t a[4], b[2];
        // BEGIN SOLUTION
        ldmatrix_x4(a, smem_u32(q_smem + lane % 16 * D + d + lane / 16 * 8));
        ldmatrix_x2(b, smem_u32(k_smem + lane % 8 * D + d + lane / 8 % 2 * 8));
        mma_m16n8k16<T>(c, a, b[0], b[1]);
        // END SOLUTION
    }
    // BEGIN SOLUTION: s_gmem
    for (int i = 0; i < 4; i++) s_gmem[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
    // END SOLUTION
}

extern "C" int run(const T* q, const T* k, float* s, void* stream) {
    one_tile<<<1, 32, 0, (cudaStream_t)stream>>>(q, k, s);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 7.4
#
# This kernel takes a C tile of scores, 16 × 8, and returns each row's maximum and its sum of exponentials. The author
# knew that a row lives in four lanes, wrote the masks of the two exchanges as bits, and tested with scores that fall
# from left to right. On real scores about half of the maxima are wrong. It is a matter of one character. The same slip
# has been made in published kernels.
#
# Run the check first, for the symptoms. Of which elements is the maximum that is stored, and which lanes hold those?

# %% tags=["exercise"]
row_statistics = r"""
#include "ptx.cuh"
__global__ void __launch_bounds__(32) statistics(const float* s_gmem, float* max_gmem, float* sum_gmem) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = s_gmem[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
    for (int h = 0; h < 2; h++) {                                       // row g, row g + 8
        float m = fmaxf(c[2 * h], c[2 * h + 1]);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 0b01));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 0b10));             //: 2: 0x10 would be lane ^ 16, four rows away
        float l = expf(c[2 * h] - m) + expf(c[2 * h + 1] - m);
        l += __shfl_xor_sync(~0u, l, 0b01);
        l += __shfl_xor_sync(~0u, l, 0b10);
        if (t == 0) max_gmem[g + 8 * h] = m, sum_gmem[g + 8 * h] = l;
    }
}

extern "C" int run(const float* s, float* row_max, float* row_sum, void* stream) {
    statistics<<<1, 32, 0, (cudaStream_t)stream>>>(s, row_max, row_sum);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 7.5
#
# Two C tiles of P are in registers: `c` holds columns 0–7, `d` columns 8–15. Make the A fragment of the 16 × 16 matrix
# P, in four registers of two 16-bit numbers each. `pack<T>(low, high)` rounds two floats and packs them. No shuffles,
# no shared memory. There are three classic ways to get this wrong, and each gives numbers that look right; the check
# knows them all.

# %% tags=["exercise"]
second_product = r"""
#include "ptx.cuh"
using T = ELEMENT;

__global__ void __launch_bounds__(32) second_product(const float* p_gmem, const T* v_gmem, float* o_gmem) {
    __shared__ __align__(16) T v_smem[16 * 8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 128; i += 32) v_smem[i] = v_gmem[i];
    __syncwarp();                                                       // V is here
    float c[4], d[4];
    for (int i = 0; i < 4; i++) {
        c[i] = p_gmem[(g + i / 2 * 8) * 16 + t * 2 + i % 2];
        d[i] = p_gmem[(g + i / 2 * 8) * 16 + t * 2 + i % 2 + 8];
    }
    uint32_t a[4], b[2];
    // BEGIN SOLUTION: a[0] to a[3]
    a[0] = pack<T>(c[0], c[1]);          // row g,     columns 2t, 2t + 1
    a[1] = pack<T>(c[2], c[3]);          // row g + 8
    a[2] = pack<T>(d[0], d[1]);          // row g,     columns 2t + 8, 2t + 9
    a[3] = pack<T>(d[2], d[3]);          // row g + 8
    // END SOLUTION
    ldmatrix_x2_trans(b, smem_u32(v_smem + lane % 16 * 8));
    float o[4] = {};
    mma_m16n8k16<T>(o, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) o_gmem[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = o[i];
}

extern "C" int run(const float* p, const T* v, float* o, void* stream) {
    second_product<<<1, 32, 0, (cudaStream_t)stream>>>(p, v, o);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 7.6
#
# $O = P V$ for 16 queries and up to 16 keys, 64 dimensions. If there are fewer keys than 16, the columns of P that
# belong to none are 0, so that, the author says, it does not matter what stands in the missing rows of V. All tests
# passed: they were made with V = ones, and 16 keys. There are two bugs. One of them depends on how many keys there are,
# the other does not. Once you have changed something, the check tells what it makes of your change.

# %% tags=["exercise"]
pv = r"""
#include "ptx.cuh"
using T = ELEMENT;
constexpr int D = 64;

__global__ void __launch_bounds__(32) pv(const T* p_gmem, const T* v_gmem, float* o_gmem, int keys) {
    __shared__ __align__(16) T p_smem[16 * 16], v_smem[16 * D];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 16 * 16; i += 32) p_smem[i] = p_gmem[i];     // 0 from column `keys` on
    for (int i = lane; i < 16 * D; i += 32) v_smem[i] = i < keys * D ? v_gmem[i] : T(0.f);   //: 0 * NaN is NaN
    __syncwarp();                                                       // P and V are here
    uint32_t a[4];
    ldmatrix_x4(a, smem_u32(p_smem + lane % 16 * 16 + lane / 16 * 8));
    for (int n = 0; n < D / 8; n++) {                                   // 8 columns of O
        uint32_t b[2];
        ldmatrix_x2_trans(b, smem_u32(v_smem + lane % 16 * D + n * 8));  //: two keys of one column
        float o[4] = {};
        mma_m16n8k16<T>(o, a, b[0], b[1]);
        for (int i = 0; i < 4; i++) o_gmem[(g + i / 2 * 8) * D + n * 8 + t * 2 + i % 2] = o[i];
    }
}

extern "C" int run(const T* p, const T* v, float* o, int keys, void* stream) {
    pv<<<1, 32, 0, (cudaStream_t)stream>>>(p, v, o, keys);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 7.7
#
# **The milestone of this phase.** Write the inside of the loop of `p7_naive.cu`. The tiles of K and V are in shared
# memory. S, the maxima, the correction, P and O are yours. What stands before your lines:

# %%
for name in ("state", "loop head", "load K and V"):
    show.source(region(step("p7_naive"), name))

# %% [markdown]
# Names that you may use, besides those above:
#
# | name | meaning |
# |:--|:--|
# | `q_smem`, `k_smem`, `v_smem` | the tiles, 16 rows of HEAD_DIM each |
# | `at(row, column)` | the byte offset of an element: `smem_u32(q_smem + at(...))` is the address that `ldmatrix` wants |
# | `S_TILES`, `O_TILES` | 2 and HEAD_DIM / 8: C tiles of S and of O |
# | `m_start`, `warp_row` | the block's first row; 0, as there is one warp |
# | `p.causal`, `p.seq_k`, `diagonal` | causal: a row sees the keys up to `row + diagonal` |
# | `exp2_approx(x)` | $2^x$, and 0 for $-\infty$ |
#
# Keys from `p.seq_k` on do not exist: their scores are $-\infty$. A row that has seen no key yet has the maximum
# $-\infty$, and $-\infty - (-\infty)$ is NaN.
#
# What the code after the loop expects: `m_i` of the raw, unscaled scores; `l_i` of this lane's columns only; `acc` not
# divided yet.

# %% tags=["exercise"]
# BEGIN STARTER
loop = r"""
        // S = Q K^T
        float s[S_TILES][4] = {};
        // YOUR CODE HERE

        // The row maxima; a row lives in a quad

        // What was summed under the old maximum is brought under the new one

        // P = 2^(S - maximum), and its sum

        // O += P V
"""
# END STARTER
# BEGIN SOLUTION
from flashlab.exercises.phase_07 import naive_loop

loop = naive_loop()  # the lines of p7_naive.cu; section 10 of the lecture shows them, part by part
# END SOLUTION

# %% [markdown]
# ## 7.8
#
# The sum of P's rows costs an addition an element and shuffles at the end. A matrix product can do it:
# $P \cdot \mathbf{1}$, with a B that is all ones, has the sum of row $i$ in every column of row $i$. The A fragment is
# there anyway, and an operand of ones needs no load. Write each row's sum to `sum_gmem`, `[16]`, with one MMA, no
# shuffle, and no `ldmatrix` but the one that is given.
#
# Then think: which sum is it, of P before or after its rounding to 16 bits? Is that better or worse for $O = PV / l$?

# %% tags=["exercise"]
row_sums = r"""
#include "ptx.cuh"
using T = ELEMENT;                                                    // fp16, and bf16: a one looks different

__global__ void __launch_bounds__(32) row_sums(const T* p_gmem, float* sum_gmem) {
    __shared__ __align__(16) T p_smem[16 * 16];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 16 * 16; i += 32) p_smem[i] = p_gmem[i];
    __syncwarp();                                                       // P is here
    uint32_t a[4];
    ldmatrix_x4(a, smem_u32(p_smem + lane % 16 * 16 + lane / 16 * 8));
    // BEGIN SOLUTION
    const uint32_t ones = pack<T>(1.f, 1.f);
    float l[4] = {};
    mma_m16n8k16<T>(l, a, ones, ones);
    if (t == 0) sum_gmem[g] = l[0], sum_gmem[g + 8] = l[2];             // every column holds the sum
    // END SOLUTION
}

extern "C" int run(const T* p, float* sum, void* stream) {
    row_sums<<<1, 32, 0, (cudaStream_t)stream>>>(p, sum);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# <details><summary>Answer</summary>
#
# Of P after rounding, since that is what A holds. For $O$ it is, if anything, better: numerator and denominator then
# use the same weights, so that O is exactly a weighted average of rows of V, with weights that sum to 1. The
# log-sum-exp gets a rounding error of 16-bit terms in return, some $10^{-4}$ relative, which is why this course's
# kernels sum the unrounded floats. The MMA is not free either: at D = 64 it is one in 17.
#
# </details>

# %% [markdown]
# ## 7.9
#
# Some image models have heads of 40 dimensions. $40 = 16 + 16 + 8$, and for the last eight there is
# `mma_m16n8k8<T>(c, a, b0)`, with the A fragment `a[2]` (rows $g$ and $g + 8$, columns $2t$ and $2t + 1$) and one
# register of B. Padding with zeros to 48 would do too, at the price of a sixth of the arithmetic and of the memory.
# Write $S = Q K^\mathsf{T}$ for 16 queries, 8 keys and any D that is a multiple of 8: as many `m16n8k16` as fit, and
# one `m16n8k8` where eight dimensions are left.

# %% tags=["exercise"]
any_eight = r"""
#include "ptx.cuh"
using T = ELEMENT;
constexpr int D = HEAD_DIM;                                             // 8, 40, 64, 72, ...

__global__ void __launch_bounds__(32) any_eight(const T* q_gmem, const T* k_gmem, float* s_gmem) {
    __shared__ __align__(16) T q_smem[16 * D], k_smem[8 * D];           // [16, D], [8, D]
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 16 * D; i += 32) q_smem[i] = q_gmem[i];
    for (int i = lane; i < 8 * D; i += 32) k_smem[i] = k_gmem[i];
    __syncwarp();                                                       // both tiles are here
    float c[4] = {};
    // BEGIN SOLUTION
    for (int d = 0; d + 16 <= D; d += 16) {
        uint32_t a[4], b[2];
        ldmatrix_x4(a, smem_u32(q_smem + lane % 16 * D + d + lane / 16 * 8));
        ldmatrix_x2(b, smem_u32(k_smem + lane % 8 * D + d + lane / 8 % 2 * 8));
        mma_m16n8k16<T>(c, a, b[0], b[1]);
    }
    if (D % 16) {
        uint32_t a[2], b[1];
        ldmatrix_x2(a, smem_u32(q_smem + lane % 16 * D + D - 8));  // two tiles of A, one above the other
        ldmatrix_x1(b, smem_u32(k_smem + lane % 8 * D + D - 8));
        mma_m16n8k8<T>(c, a, b[0]);
    }
    // END SOLUTION
    for (int i = 0; i < 4; i++) s_gmem[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

extern "C" int run(const T* q, const T* k, float* s, void* stream) {
    any_eight<<<1, 32, 0, (cudaStream_t)stream>>>(q, k, s);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 7.10
#
# Write a whole FlashAttention forward pass on the tensor cores: launch, shared memory, copies, loop, store. You get the
# signature and nothing else. One warp and 16 query rows per block are enough. Any kernel that does the following is right:
#
# - O = softmax(scale · Q Kᵀ) V and the log-sum-exp, natural logarithm, `[batch, heads, seq_q]`, for any lengths;
# - `T` is `__half` or `__nv_bfloat16`, `HEAD_DIM` 64 or 128: macros that the check sets;
# - causal, if `p->causal`: query $i$ sees the keys up to $i + \text{seq\_k} - \text{seq\_q}$. Tiles that no row of the
#   block sees are not computed. A row that sees no key has O = 0 and lse = $-\infty$;
# - grouped heads: query head $h$ uses K and V of head $h / (\text{heads} / \text{kv\_heads})$;
# - both products on the tensor cores, each tile once.

# %% [markdown]
# What the include gives you:

# %%
show.source(path("problem.cuh"))

# %% [markdown]
# It is a lot for one evening. Go in small steps, and run the check after each: it always tells the first thing that is
# wrong. A good order: which rows and which head; the copies; S into the maxima; P and O; the store; causal last. `printf`
# works in the emulator: `if (blockIdx.x == 0 && threadIdx.x == 5) printf(...)`. To see your numbers, run a tiny case:
#
# ```python
# from flashlab.attention import reference
# from flashlab.cuda import load_inline
# import torch
# q, k, v = (torch.randn(1, 1, 16, 64).half() for _ in range(3))
# module = load_inline(kernel, check=True)
# o, lse = module.forward(q, k, v)
# print(o - reference.attention(q, k, v)[0], module.report.findings, module.report.counters)
# ```

# %% tags=["exercise"]
kernel = r"""
#include "problem.cuh"

// BEGIN SOLUTION
constexpr int PITCH = HEAD_DIM + 8;                  // of a row of shared memory: 16 bytes more, no conflicts

// 16 rows from global to shared memory; those from `exist` on become zeros.
__device__ void copy(T* smem, const T* gmem, int64_t stride, int exist) {
    for (int i = threadIdx.x; i < 16 * HEAD_DIM / 8; i += 32) {
        const int row = i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < exist) x = *(const uint4*)(gmem + row * stride + column);
        *(uint4*)(smem + row * PITCH + column) = x;
    }
}

// One warp: 16 rows of one head against all their keys, 16 at a time.
__global__ void __launch_bounds__(32) attention(const Problem p) {
    __shared__ __align__(16) T q_smem[16 * PITCH], k_smem[16 * PITCH], v_smem[16 * PITCH];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * 16, batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads), diagonal = p.seq_k - p.seq_q;
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);

    copy(q_smem, rows_of(p.q, p.q_stride, batch, head, first), p.q_stride.row, p.seq_q - first);
    __syncwarp();                                               // Q is here
    uint32_t q[HEAD_DIM / 16][4];                               // its A fragments, for all tiles
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++)
        ldmatrix_x4(q[d], smem_u32(q_smem + lane % 16 * PITCH + d * 16 + lane / 16 * 8));

    float o[HEAD_DIM / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    const int end = p.causal ? min(p.seq_k, first + 16 + diagonal) : p.seq_k;  // those of the last row
    for (int start = 0; start < end; start += 16) {
        __syncwarp();                                           // all lanes are done with the last tile
        copy(k_smem, k_gmem + start * p.k_stride.row, p.k_stride.row, p.seq_k - start);
        copy(v_smem, v_gmem + start * p.v_stride.row, p.v_stride.row, p.seq_k - start);
        __syncwarp();                                           // K and V are here

        float s[2][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            uint32_t b[4];                                      // b0 b1 of keys 0 to 7, and of 8 to 15
            ldmatrix_x4(b, smem_u32(k_smem + (lane % 8 + lane / 16 * 8) * PITCH + d * 16 + lane / 8 % 2 * 8));
            mma_m16n8k16<T>(s[0], q[d], b[0], b[1]);
            mma_m16n8k16<T>(s[1], q[d], b[2], b[3]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {                           // rows g and g + 8
            const int last = p.causal ? min(p.seq_k - 1, first + g + 8 * r + diagonal) : p.seq_k - 1;
            float x = m[r];
            for (int i = 0; i < 4; i++) {                    // this lane's columns: 2t, 2t + 1, and 8 further
                float& c = s[i / 2][2 * r + i % 2];
                c = start + i / 2 * 8 + t * 2 + i % 2 <= last ? c * p.scale : -INFINITY;
                x = fmaxf(x, c);
            }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float base = x == -INFINITY ? 0.f : x, correction = expf(m[r] - base);
            m[r] = x, l[r] *= correction;
            for (int n = 0; n < HEAD_DIM / 8; n++) o[n][2 * r] *= correction, o[n][2 * r + 1] *= correction;
            for (int i = 0; i < 4; i++) {
                float& c = s[i / 2][2 * r + i % 2];
                c = expf(c - base);
                l[r] += c;
            }
        }
        const uint32_t a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]),
                               pack<T>(s[1][0], s[1][1]), pack<T>(s[1][2], s[1][3])};
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            uint32_t b[2];
            ldmatrix_x2_trans(b, smem_u32(v_smem + lane % 16 * PITCH + n * 8));
            mma_m16n8k16<T>(o[n], a, b[0], b[1]);
        }
    }

    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, first);
    for (int r = 0; r < 2; r++) {
        const int row = g + 8 * r;
        float sum = l[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (first + row >= p.seq_q) continue;
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        for (int n = 0; n < HEAD_DIM / 8; n++)
            *(uint32_t*)(o_gmem + row * p.o_stride.row + n * 8 + t * 2) =
                pack<T>(o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse);
        if (t == 0) p.lse[(int64_t)blockIdx.y * p.seq_q + first + row] = m[r] + logf(sum);     // no key: -inf
    }
}
// END SOLUTION

extern "C" int forward(const Problem* p, void* stream) {
# BEGIN STARTER
    return (int)cudaGetLastError();                             // what a launch before it had to say
# END STARTER
# BEGIN SOLUTION
    const dim3 grid(ceil_div(p->seq_q, 16), p->batch * p->heads);
    attention<<<grid, 32, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
# END SOLUTION
}
"""

# %% [markdown]
# You can now read any kernel that is built on `mma.sync`, and you have written one. It is slow, and you know from the
# lecture's counts where the time goes. Phase 8 takes it back, one reason at a time.
