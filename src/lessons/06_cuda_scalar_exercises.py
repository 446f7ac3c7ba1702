# %% [markdown]
# # Phase 6 · Scalar CUDA C++: exercises
#
# You write CUDA here, in a string. Replace the line `// YOUR CODE HERE`, run the cell, then run the check below it. While that line is there,
# the check says "not solved yet". `hint("6.3")` gives the next hint, `progress()` shows where you are.
#
# A check builds your source twice in the emulator, on any machine. The check build watches every load and store, and tells you about races
# and bad addresses, with the line. The fast build runs more inputs. To look for yourself: `module = load_inline(source, check=True)`, run it, and
# read `module.report`. `printf` works in a kernel.

# %%
import torch

from flashlab import kernels
from flashlab.check.cuda_answer import region
from flashlab.cuda import load_inline
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_06 import two_lanes
from flashlab.figures import show

# %% [markdown]
# ## 6.1
#
# `y = x + bias` for a matrix `x [rows][cols]`, stored row by row, and a `bias [cols]`. The launch is given: blocks of 32 × 4 threads, and a
# grid that covers the matrix and, at its edges, more. Write the body: this thread's row and column, the guard, the sum. Neighbouring threads
# (`threadIdx.x`) should have neighbouring columns.

# %% tags=["exercise"]
add_bias = r"""
#include "simt.h"

__global__ void add_bias(const float* x, const float* bias, float* y, int rows, int cols) {
    // BEGIN SOLUTION
    const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || col >= cols) return;
    y[row * cols + col] = x[row * cols + col] + bias[col];
    // END SOLUTION
}
extern "C" int run(const float* x, const float* bias, float* y, int rows, int cols, void* stream) {
    const dim3 threads(32, 4), blocks((cols + 31) / 32, (rows + 3) / 4);
    add_bias<<<blocks, threads, 0, (cudaStream_t)stream>>>(x, bias, y, rows, cols);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 6.2
#
# A block of 128 threads divides 128 numbers by their sum. It computes the sum in a tree: 64 threads add the upper half to the lower, then 32.
# The 32 sums that are left are one warp's, so it adds them without the block's barrier. On the GPUs of 2007 the result was always
# right. Run the check and read the symptoms: **are the quotients too large or too small, so which numbers are in the sum?** Then repair the
# kernel. Keep the tree.

# %% tags=["exercise"]
block_sum = r"""
#include "simt.h"

__global__ void fractions(const float* x, float* y) {      // x and y [blocks][128]
    __shared__ float part_smem[128];
    const float value = x[blockIdx.x * 128 + threadIdx.x];
    part_smem[threadIdx.x] = value;
    __syncthreads();
    for (int half = 64; half > 16; half /= 2) {
        if (threadIdx.x < half) {
            part_smem[threadIdx.x] += part_smem[threadIdx.x + half];
        }
        __syncthreads();                         // this round is written; outside of the if: all 128 get here
    }
    if (threadIdx.x < 32) {                      // 32 sums are left
        for (int half = 16; half > 0; half /= 2) {
            const float other = part_smem[threadIdx.x + half];
            __syncwarp();                        //: all lanes have read, before one writes
            part_smem[threadIdx.x] += other;
            __syncwarp();                        //: all have written, before one reads
        }
    }
    __syncthreads();                             // the sum is there
    y[blockIdx.x * 128 + threadIdx.x] = value / part_smem[0];
}
extern "C" int run(const float* x, float* y, int blocks, void* stream) {
    fractions<<<blocks, 128, 0, (cudaStream_t)stream>>>(x, y);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 6.3
#
# `y [cols][rows]` is the transpose of `x [rows][cols]`. Straight from `x` to `y`, either the loads or the stores of a warp have the stride of a
# row. So go through shared memory: a block of 32 × 8 threads brings in a tile of 32 × 32 numbers along the rows of `x`, and writes it out along the
# rows of `y`. The launch is given; the tile's declaration is yours to change.
#
# The check wants the right result on any size, no sector more than needed, no race, and no bank conflict.

# %% tags=["exercise"]
transpose = r"""
#include "simt.h"

// Block (bx, by): rows 32 by to 32 by + 31, columns 32 bx to 32 bx + 31.
__global__ void transpose(const float* x, float* y, int rows, int cols) {
# BEGIN STARTER
    __shared__ float tile_smem[32][32];
    // YOUR CODE HERE
# END STARTER
# BEGIN SOLUTION
    __shared__ float tile_smem[32][33];                    // one word of padding: a column lies in 32 banks
    const int row = 32 * blockIdx.y, col = 32 * blockIdx.x, lane = threadIdx.x;
    for (int i = threadIdx.y; i < 32; i += 8)
        if (row + i < rows && col + lane < cols) tile_smem[i][lane] = x[(row + i) * cols + col + lane];
    __syncthreads();                                       // the tile is complete
    for (int i = threadIdx.y; i < 32; i += 8)
        if (col + i < cols && row + lane < rows) y[(col + i) * rows + row + lane] = tile_smem[lane][i];
# END SOLUTION
}
extern "C" int run(const float* x, float* y, int rows, int cols, void* stream) {
    const dim3 threads(32, 8), blocks((cols + 31) / 32, (rows + 31) / 32);
    transpose<<<blocks, threads, 0, (cudaStream_t)stream>>>(x, y, rows, cols);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 6.4
#
# A warp has a row of `n` numbers, any `n`. Lane $t$ takes the elements $t, t + 32, t + 64, \ldots$ and keeps its own state $(m, \ell)$, updated
# online: the row is read **once**. Then five rounds of `__shfl_xor_sync` merge the 32 states, by phase 0's merge. No shared memory. At the end every
# lane has the row's $m$ and $\ell$, and the last line stores the log-sum-exp.
#
# Mind the lanes that got no element: what is $-\infty - (-\infty)$?

# %% tags=["exercise"]
row_lse = r"""
#include "simt.h"

__global__ void row_lse(const float* x, float* lse, int n) {      // x [rows][n]; a block is one warp, one row
    const float* row = x + blockIdx.x * n;
    float m = -INFINITY, l = 0.f;                          // this lane's state
    // BEGIN SOLUTION
    for (int i = threadIdx.x; i < n; i += 32) {
        const float value = row[i], m_new = fmaxf(m, value);
        l = l * expf(m - m_new) + expf(value - m_new);
        m = m_new;
    }
    for (int step = 1; step < 32; step *= 2) {
        const float m_other = __shfl_xor_sync(~0u, m, step), l_other = __shfl_xor_sync(~0u, l, step);
        const float m_new = fmaxf(m, m_other), base = m_new == -INFINITY ? 0.f : m_new;
        l = l * expf(m - base) + l_other * expf(m_other - base);
        m = m_new;
    }
    // END SOLUTION
    if (threadIdx.x == 0) lse[blockIdx.x] = m + logf(l);
}
extern "C" int run(const float* x, float* lse, int rows, int n, void* stream) {
    row_lse<<<rows, 32, 0, (cudaStream_t)stream>>>(x, lse, n);
    return (int)cudaGetLastError();
}
"""

# %% [markdown]
# ## 6.5
#
# These are the lines of the lecture's step 2 in which a block finds out what is its own. Somebody wrote them anew. Models with as many heads
# of K and V as of Q: every test passed. Models with a single head of K and V: every test passed. Then came a model with 8 heads of Q and 2 of K
# and V, and its texts made no sense.
#
# The check puts the lines into `p6_2_loop_order.cu` and runs it. It shows which heads of which case are wrong. Whose keys do they see?

# %% tags=["exercise"]
#: Neighbouring heads of Q share a head of K and V: with 8 and 2, heads 0 to 3 have the first; % took turns.
which_rows = r"""
    // A block is one tile of Q. Causal: the last rows see the most keys, so they start first.
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), head_index = blockIdx.x / m_blocks;
    const int m_block = blockIdx.x % m_blocks;
    const int m_start = (p.causal ? m_blocks - 1 - m_block : m_block) * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;                // causal: row i sees the keys up to i + diagonal
    const float scale_log2 = p.scale * LOG2E;              // exp(x) is computed as exp2(x * log2(e))
    const float* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);    // [BLOCK_M, HEAD_DIM]
    const float* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    const float* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    float* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);          // [BLOCK_M, HEAD_DIM]
    float* lse_gmem = p.lse + (int64_t)head_index * p.seq_q + m_start;       // [BLOCK_M]
    const int row = threadIdx.x;                           // this thread's, of the tile
"""

# %% [markdown]
# ## 6.6
#
# Step 2 has a thread per row, and at head_dim 128 it spills: Q and O of a row are 256 registers. Here **two neighbouring lanes share a row**. Each
# has every second chunk of Q and of O; lanes `2i` and `2i + 1` of a warp have row `i`. The frame is given, and tile $j$ of K and V has just
# arrived in shared memory. Write what happens with the tile. With your lines it is FlashAttention-2 in float32: any length, causal or not,
# grouped heads.

# %%
for name in ("state", "store"):
    show.source(region(two_lanes(), name))

# %% [markdown]
# Two neighbours read two neighbouring chunks of a key: different banks, one wavefront. (Halves of a row would lie in the same banks.) What you have:
#
# | | |
# |---|---|
# | `k_smem[n][c]`, `v_smem[n][c]` | chunk `c` (a `float4`) of key `n`, `n < BLOCK_N`, `c < CHUNKS` |
# | `q_rmem[c]`, `acc[c]` | chunk `2 * c + odd` of your row, `c < OWN` |
# | `m_i`, `l_i` | the row's state, the same in both lanes; `m_i` is of scores times `scale_log2` |
# | `row`, `odd` | of the tile of Q; 0 or 1, which lane of the two |
# | `m_start`, `n_start` | the first row, the first key of a tile |
# | `scale_log2`, `exp2_approx(x)` | the scale times $\log_2 e$; $2^x$ |
# | `dot(a, b, sum)` | `sum` plus the product of two chunks |
# | `axpy(x, b, c)`, `scaled(x, b)` | $x\,b + c$ and $x\,b$, `b` and `c` chunks |

# %% [markdown]
# A causal mask and the tail are one thing: how many keys of this tile does the row see? Key `n` of the tile is key `n_start + n`. Row `m_start +
# row` sees the keys up to `m_start + row + diagonal` if `p.causal` (`diagonal` is `seq_k - seq_q`), and never more than `p.seq_k`.

# %% tags=["exercise"]
inner_loop = r"""
        // 1. How many keys of this tile does this row see?
# BEGIN STARTER
        // 2. S_ij: BLOCK_N whole scores in a float s[BLOCK_N]; unseen ones become -INFINITY. Their maximum.
        // 3. The new maximum and the correction. A row that has seen no key has -INFINITY: no NaN, please.
        // 4. The probabilities, and their sum. Then m_i and l_i.
        // 5. acc = correction * acc + P_ij V_j.
        // YOUR CODE HERE
# END STARTER
# BEGIN SOLUTION
        const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
        // 2. S_ij: of each score a lane has half, and its neighbour the other half
        float s[BLOCK_N] = {};
#pragma unroll
        for (int c = 0; c < OWN; c++) {
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) s[n] = dot(q_rmem[c], k_smem[n][2 * c + odd], s[n]);
        }
        float m_new = m_i, l_tile = 0.f;
#pragma unroll
        for (int n = 0; n < BLOCK_N; n++) {
            s[n] += __shfl_xor_sync(~0u, s[n], 1);         // all lanes take part
            s[n] = n < keys ? s[n] * scale_log2 : -INFINITY;
            m_new = fmaxf(m_new, s[n]);
        }
        // 3. and 4. The statistics and the probabilities
        const float base = m_new == -INFINITY ? 0.f : m_new;
        const float correction = exp2_approx(m_i - base);
#pragma unroll
        for (int n = 0; n < BLOCK_N; n++) s[n] = exp2_approx(s[n] - base), l_tile += s[n];
        m_i = m_new, l_i = l_i * correction + l_tile;
        // 5. O_i
#pragma unroll
        for (int c = 0; c < OWN; c++) {
            acc[c] = scaled(correction, acc[c]);
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) acc[c] = axpy(s[n], v_smem[n][2 * c + odd], acc[c]);
        }
# END SOLUTION
"""

# %% [markdown]
# ## 6.7
#
# With a causal mask ($N$ queries, $N$ keys, one head, float32) both kernels skip what nobody sees.
#
# - Step 1's order: in the round of a K/V tile, a row that sees none of its keys does nothing.
# - Step 2's order: a block stops before the first tile that its last row does not see.
#
# How many bytes do the two orders **read**? Tiles have `BLOCK_M` rows and `BLOCK_N` keys. `BLOCK_M` is a multiple of `BLOCK_N`; $N$ need be a
# multiple of neither.

# %% [markdown]
# Section 7 of the lecture has the table to start from. In step 1's order K and V are still loaded whole, and `lse` is still made from $m$ and
# $\ell$ at the end. The check compares with the formula and with what the emulator counts.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_06: causal_bytes_read

# %% [markdown]
# Which of the two orders profits more from the mask, in the limit of long sequences?
#
# <details><summary>Answer</summary>
#
# Neither: both sums become half of what they were, $N^2 / (2\,\text{BLOCK})$ in place of $N^2 / \text{BLOCK}$. For short ones FA1's order
# saves a little more. It skips row by row, FA2's order tile by tile: of its diagonal tiles of 128 × 32 scores, the upper part is loaded for
# nothing.
#
# </details>

# %% [markdown]
# ## 6.8
#
# Write a whole float32 FlashAttention: launch, shared memory, copy, loop, store. All you get is the signature,
#
# ```cpp
# extern "C" int forward(const Problem* p, void* stream)
# ```
#
# and the file that defines `Problem`, `#include "problem.cuh"`. What has to hold:
#
# - any lengths, also `seq_q` different from `seq_k`; causal or not; grouped K/V heads; any strides; head_dim 64;
# - `lse` is the natural logarithm of a row's sum of exponentials; a row that sees no key has `o` = 0 and `lse` = $-\infty$;
# - the rows of a block share what they load: each number of K and V serves at least 8 rows. Any tile size will do;
# - neighbouring threads load neighbouring numbers, of Q, K and V alike: sectors are counted.

# %% [markdown]
# Close the lecture. Begin with something that launches and stores zeros, and let the check say what comes next: it first runs the check build
# on three shapes, then compares many cases, then counts. To try things yourself:
#
# ```python
# module = load_inline(flash_attention, check=True, dtype=torch.float32)
# o, lse = module.forward(*torch.randn(3, 1, 1, 40, 64))
# print(module.report.findings)
# ```
#
# The struct, its helpers and constants:

# %%
show.source(kernels.path("problem.cuh"))

# %% tags=["exercise"]
# BEGIN STARTER
flash_attention = r"""
// YOUR CODE HERE
"""
# END STARTER
# BEGIN SOLUTION
# Step 2 of the lecture: one of many right answers. The whole text:
flash_attention = kernels.source("p6_2_loop_order")
show.source(flash_attention)
# END SOLUTION

# %% [markdown]
# You have written FlashAttention in CUDA, and you can say what it costs before it runs. Phase 7 gives the two products to the tensor cores.
# `progress()` shows what is left.
