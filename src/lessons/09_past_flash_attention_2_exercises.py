# %% [markdown]
# # Phase 9 · Past FlashAttention-2: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong. `hint("9.2")` gives the next hint, `progress()` shows where you are.
#
# CUDA answers are text in a Python string. The check builds it for the emulator, twice, and runs it. No GPU is needed. In CUDA text the mark
# is `// YOUR CODE HERE`: delete it when your code is there. Two exercises begin with an empty page, 9.7 and 9.12. Those between, 9.8 to 9.11, are
# about what a fast kernel has beyond 9.7's.

# %%
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_09 import PARTS, part
from flashlab.figures import show
from flashlab.kernels import path

# %% [markdown]
# ## 9.1
#
# The lecture's blocks own queries of one head. Where `group` query heads share one head of K and V, a block can own queries of all of them, and read
# each key once. Its rows go through the heads first: row $r$ is query $\lfloor r / \text{group} \rfloor$ of head $r \bmod \text{group}$ (phase 12 needs this).
#
# A block owns the rows `m_start` to `m_start + block_m - 1`. Tile $j$ holds the keys `j * block_n` to `j * block_n + block_n - 1`. Keys
# from `seq_k` on do not exist. If `causal`, query $i$ sees the keys up to $i$ + `seq_k - seq_q`.
#
# Return `end`, one past the last tile of which some row sees a key, and `full`, the first tile that is not seen whole by every row.

# %% [markdown]
# ## 9.2
#
# Before you write a kernel, know how many of its blocks an SM will hold. Three things can end it:
#
# - **registers**: a warp takes 32 times a thread's registers, rounded up to a multiple of 256. An SM has 65 536, a quarter for each of its four
#   schedulers, and a warp takes its registers from one quarter;
# - **shared memory**: what the block asks for, and 1024 bytes more for the system;
# - **warps**: an SM holds `warps_per_sm` of them. (`threads` is a multiple of 32.)
#
# An A100 has 164 KiB of shared memory and 64 warps per SM, an RTX 4090 100 KiB and 48. All sizes that are given are bytes.

# %% [markdown]
# ## 9.3
#
# In `p9_3_rescale` a row that moves far takes its whole warp with it, so a row's last bits depend on its neighbours. Somebody made *rescale* lazy row by
# row: a row that has not moved far keeps its `m_i`, whatever the others do. It passed a thousand tests with `torch.randn`, and was shipped. Then some
# rows of a model's output looked as if their largest scores hardly counted, always rows whose large scores come late. Run the check: **in which cases is
# it right, and by which factor does what came before weigh too much?** Then repair the text. It has to stay lazy, row by row.
#
# `m_i` is a row's reference, `m_new` its maximum including this tile (both of raw scores), `moved` whether a row of this lane has moved far, `acc` and
# `l_i` what the earlier tiles have left.

# %% tags=["exercise"]
rescale = r"""
        // A row that has moved far is brought under its new maximum; the others keep their reference
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                const float before = m_i[r];
                if ((m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE) m_i[r] = m_new[r];
                const float base = m_i[r] == -INFINITY ? 0.f : m_i[r];         // -inf - (-inf) would be NaN
                const float correction = exp2_approx((before - base) * scale_log2); //: repaired: not m_i[r]
                l_i[r] *= correction;
#pragma unroll
                for (int n = 0; n < O_TILES; n++)
                    acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction;
            }
        }
"""

# %% [markdown]
# ## 9.4
#
# With few rows, several blocks share the keys (split-KV), and each leaves a part: `part_o`, normalised over its keys, and `part_lse`. A second
# kernel merges them, one warp per row; a lane holds `HEAD_DIM / 32` columns, in pairs. The lecture's walks the parts twice, because it wants the
# largest `part_lse` first. Write it in **one pass**: each part is merged into what there is, as phase 0's `merge` does, and may be forgotten. Such a
# loop could begin before the last part has come. Every number of a part is read once.
#
# A part may have seen no key (`part_lse` is `-INFINITY`), also the first ones, and so may all of them. `exp2_approx` is $2^x$; `LOG2E` is there. Below
# the loop `base`, `l_i` and `inverse` are what the kernel stores: keep them.

# %% tags=["exercise"]
merge_loop = r"""
    float m_i = -INFINITY, l_i = 0.f, acc[HEAD_DIM / 32] = {};     // of the parts so far
    for (int s = 0; s < splits; s++) {
        // BEGIN STARTER
        // YOUR CODE HERE: m_i and l_i with part s, and what acc needs for it
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i += 2) {
            const float2 x = *(const float2*)(part_o + (s * rows + row) * HEAD_DIM + i * 32 + lane * 2);
            // YOUR CODE HERE: acc[i] and acc[i + 1]
        // END STARTER
        // BEGIN SOLUTION
        const float lse = part_lse[s * rows + row], m_new = fmaxf(m_i, lse);
        const float reference = m_new == -INFINITY ? 0.f : m_new;  // -inf - (-inf) would be NaN
        const float correction = exp2_approx((m_i - reference) * LOG2E);
        const float weight = exp2_approx((lse - reference) * LOG2E);
        l_i = l_i * correction + weight;
        m_i = m_new;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i += 2) {
            const float2 x = *(const float2*)(part_o + (s * rows + row) * HEAD_DIM + i * 32 + lane * 2);
            acc[i] = acc[i] * correction + weight * x.x;
            acc[i + 1] = acc[i + 1] * correction + weight * x.y;
        // END SOLUTION
        }
    }
    const float base = m_i == -INFINITY ? 0.f : m_i;
    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;
"""

# %% [markdown]
# ## 9.5
#
# Here is `p9_5_prefetch.cu` for a sliding window, in 18 parts, in no order. Each begins with the line that stands for it. As in phase 4, row $i$ sees no
# key before $i$ + `diagonal - LEFT`. Three parts have been changed for it: F has `LEFT`, A masks at both borders, and K asks for tiles down to `begin`.

# %%
for letter in PARTS:
    show.source(part(letter))

# %% [markdown]
# Write the kernel: a line `// PART A` stands for the part A. Put each of them once, some inside of the loop; more than one order works. What is missing
# between them is yours:
#
# - `begin`, which several parts use: the first tile of which some row of the block sees a key, and behind it the first tile that the left border does not cut;
# - the loop. Its body is a lambda `tile(j, is_masked)` that is compiled twice, with `MASKED` as a constant in it. The tiles are walked backwards,
#   from `end - 1` to `begin`. With a window there are masked ones at both ends, and the full ones lie between.
#
# The window holds without `CAUSAL` too, and with `LEFT` 40, where no tile is full. The check looks at the walk: no tile is visited of which no row
# sees a key, and one that every row sees whole runs without a mask.

# %% tags=["exercise"]
kernel = r"""
// BEGIN STARTER
// PART A
// YOUR CODE HERE
// END STARTER
// BEGIN SOLUTION
// PART F
// PART N
// PART D
// PART Q
// PART I
// PART B
    // The first row sees furthest to the left; from tile `whole` on the last row sees all as well
    const int begin = max(0, m_start + diagonal - LEFT) / BLOCK_N;
    const int whole = ceil_div(max(0, m_start + BLOCK_M - 1 + diagonal - LEFT), BLOCK_N);
// PART L
// PART R
// PART G
// PART O
    auto tile = [&](int j, auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        // PART K
        // PART E
        // PART A
        // PART P
        // PART H
        // PART M
    };
    int j = end - 1;
    for (; j >= full; j--) tile(j, std::true_type{});
    for (; j >= whole; j--) tile(j, std::false_type{});
    for (; j >= begin; j--) tile(j, std::true_type{});
// PART C
// PART J
// END SOLUTION
"""

# %% [markdown]
# ## 9.6
#
# From `p9_1_masks` on the kernel walks its tiles backwards, from `end - 1` to 0, and has two stages. Give it three: two tiles are on their way while one
# is worked on. The check sets `STAGES = 3`, and the size of shared memory follows from it. What has to change is below: what is under way before the
# loop and when Q may be read (`before_loop`), what each round waits for (`IN_FLIGHT`), and which tile it asks for. The first wait is
# for Q alone, a round's for its own tile alone: neither waits for more.
#
# (Whether it pays is another question. At `head_dim` 128 three stages take 112 KiB with Q, two take 80. By 9.2 an A100 then holds one block per SM in place of two, an H200
# two as before, and an RTX 4090, which gives a block 99 KiB, none.)

# %% tags=["exercise"]
before_loop = r"""
    auto load_kv = [&](int j) {
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        if (j >= 0) {
            load_tile<BLOCK_N>(k_smem + stage, k_gmem + n_start * p.k_stride.row, p.k_stride.row,
                               p.seq_k - n_start);
            load_tile<BLOCK_N>(v_smem + stage, v_gmem + n_start * p.v_stride.row, p.v_stride.row,
                               p.seq_k - n_start);
        }
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();                                         // Q is a group of its own
    // BEGIN STARTER
    load_kv(end - 1);                                          // YOUR CODE HERE: the first tiles

    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<1>();                                        // YOUR CODE HERE: Q
    // END STARTER
    // BEGIN SOLUTION
    for (int i = 1; i < STAGES; i++) load_kv(end - i);         // tiles end - 1 and end - 2

    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<STAGES - 1>();                               // two groups are younger than Q's
    // END SOLUTION
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
"""
in_loop = r"""
        // BEGIN STARTER
        constexpr int IN_FLIGHT = 0;                           // YOUR CODE HERE
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        cp_async_wait<IN_FLIGHT>();
        __syncthreads();
        load_kv(j - 1);                                        // YOUR CODE HERE
        // END STARTER
        // BEGIN SOLUTION
        constexpr int IN_FLIGHT = STAGES - 2;                  // tile j - 1's group may still be under way
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        cp_async_wait<IN_FLIGHT>();
        __syncthreads();
        load_kv(j - STAGES + 1);                               // into the stage of tile j + 1
        // END SOLUTION
"""

# %% [markdown]
# ## 9.7
#
# An empty page. Write a whole source: it includes `problem.cuh`, and it has
#
#     extern "C" int forward(const Problem* p, void* stream)
#
# which launches what you like and returns `(int)cudaGetLastError()`. It computes attention for `HEAD_DIM` 64 in fp16: causal and not, grouped heads,
# any length, any strides, rows that see no key.
#
# Any right kernel is accepted that works on the tensor cores and keeps section 5's budget: at most 1.25 wavefronts per MMA, on one head of 256 rows
# without a mask. That takes 32 rows per warp, no bank conflicts, and copies by `cp.async`, which take no wavefronts in this count. Stages, lazy rescaling and the rest are up to you.

# %%
show.source(path("problem.cuh"))

# %% [markdown]
# Try it on a tiny case before the check, and after each step. `printf` works in a kernel; `check=True` builds with the watcher. This is also how to count:
#
# ```python
# import torch
# from flashlab.attention import reference
# from flashlab.cuda import load_inline
# module = load_inline(my_kernel, check=True)            # head_dim=128 for 9.12
# q, k, v = (torch.randn(1, 1, 128, 64).half() for _ in range(3))
# o, lse = module.forward(q, k, v, causal=False)
# print((o - reference.attention(q, k, v)[0]).abs().max(), module.report.findings)
# print(module.report.counters)                           # mma, wavefronts, bank conflicts, ...
# ```

# %% tags=["exercise"]
my_kernel = r"""
// BEGIN SOLUTION
#include "problem.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE, M_TILES = 2;
constexpr int BLOCK_M = WARPS * M_TILES * MMA_M, BLOCK_N = 64;
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2;
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N, ROWS_PER_LANE = 2 * M_TILES;
constexpr int SHARED = (BLOCK_M + 2 * BLOCK_N) * ROW_BYTES;            // Q, K and V: one stage

__device__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }

__device__ void copy(uint32_t to, const T* from, int64_t row_stride, int tile_rows, int rows) {
    for (int i = threadIdx.x; i < tile_rows * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * 8;
        const bool exists = row < rows;
        cp_async<16>(to + at(row, column), from + (exists ? row : 0) * row_stride + column, exists ? 16 : 0);
    }
}

__global__ void __launch_bounds__(THREADS) attention(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);
    const uint32_t k_smem = q_smem + BLOCK_M * ROW_BYTES, v_smem = k_smem + BLOCK_N * ROW_BYTES;
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int warp_row = threadIdx.x / WARP_SIZE * M_TILES * MMA_M;
    const int blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / blocks, m_start = blockIdx.x % blocks * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);
    const int diagonal = p.seq_k - p.seq_q;
    int end = ceil_div(p.seq_k, BLOCK_N);
    if (p.causal) end = max(0, min(end, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));

    float acc[M_TILES][O_TILES][4] = {}, m_i[ROWS_PER_LANE], l_i[ROWS_PER_LANE] = {};
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;

    copy(q_smem, rows_of(p.q, p.q_stride, batch, head, m_start), p.q_stride.row, BLOCK_M, p.seq_q - m_start);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();                                                   // Q is here
    uint32_t q_rmem[HEAD_DIM / MMA_K][M_TILES][4];
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        for (int m = 0; m < M_TILES; m++)
            ldmatrix_x4(q_rmem[k][m],
                        q_smem + at(warp_row + m * MMA_M + lane % 16, k * MMA_K + lane / 16 * 8));

    for (int j = 0; j < end; j++) {
        const int n_start = j * BLOCK_N;
        __syncthreads();                                               // nobody reads tile j - 1 any more
        copy(k_smem, k_gmem + n_start * p.k_stride.row, p.k_stride.row, BLOCK_N, p.seq_k - n_start);
        copy(v_smem, v_gmem + n_start * p.v_stride.row, p.v_stride.row, BLOCK_N, p.seq_k - n_start);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();                                              // K and V are here, every thread's part

        float s[M_TILES][S_TILES][4] = {};
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            for (int n = 0; n < S_TILES / 2; n++) {
                uint32_t b[4];
                ldmatrix_x4(b, k_smem + at(n * 16 + lane % 8 + lane / 16 * 8, k * MMA_K + lane / 8 % 2 * 8));
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(s[m][2 * n], q_rmem[k][m], b[0], b[1]);
                    mma_m16n8k16<T>(s[m][2 * n + 1], q_rmem[k][m], b[2], b[3]);
                }
            }

        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = m_start + warp_row + g + r * 8;
            const int last_key = p.causal ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = m_i[r];
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[r / 2][n][r % 2 * 2 + e];
                    if (n_start + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;
                    x = fmaxf(x, c);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float base = x == -INFINITY ? 0.f : x;
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = x, l_i[r] *= correction;
            for (int n = 0; n < O_TILES; n++)
                for (int e = 0; e < 2; e++) acc[r / 2][n][r % 2 * 2 + e] *= correction;
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[r / 2][n][r % 2 * 2 + e];
                    c = exp2_approx((c - base) * scale_log2);
                    l_i[r] += c;
                }
        }

        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            uint32_t a[M_TILES][4];
            for (int m = 0; m < M_TILES; m++)
                for (int i = 0; i < 4; i++) {
                    const float* c = s[m][2 * k + i / 2] + i % 2 * 2;
                    a[m][i] = pack<T>(c[0], c[1]);
                }
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v_smem + at(k * MMA_K + lane % 16, n * 16 + lane / 16 * 8));
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(acc[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;
        if (m_start + row >= p.seq_q) continue;
        if (t == 0)
            p.lse[(int64_t)head_index * p.seq_q + m_start + row] =
                sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        for (int n = 0; n < O_TILES; n++) {
            const float* c = acc[r / 2][n] + r % 2 * 2;
            *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + t * 2) =
                pack<T>(c[0] * inverse, c[1] * inverse);
        }
    }
}

extern "C" int forward(const Problem* p, void* stream) {
    cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    const int blocks = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);
    attention<<<blocks, THREADS, SHARED, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// END SOLUTION
"""

# %% [markdown]
# ## 9.8
#
# Section 3 took the addresses out of the main loop: an XOR and a constant were left. The store of `p9_2_addresses` still calls `at` for every element. Do there what was
# done for K and V: each lane calls `at` once before each of the two loops, and inside of them an address is that offset, an XOR with a constant, and a constant. It has to be
# right for `HEAD_DIM` 64 and 128. How many rows does a pass of the warp read, in each?

# %% tags=["exercise"]
store = r"""
    // O and lse
    cp_async_wait<0>();
    __syncthreads();                                       // or a warp would write O over Q it still reads
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
    // BEGIN STARTER
#pragma unroll
    // END STARTER
    // BEGIN SOLUTION
    const int o_lane = at(warp_row + g, 0) + t * 4;            // row g, columns 2t, 2t + 1
#pragma unroll
    // END SOLUTION
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (t == 0 && m_start + row < p.seq_q)
            p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
        // BEGIN STARTER
        for (int n = 0; n < O_TILES; n++)                      // YOUR CODE HERE: the address
            *(uint32_t*)(shared + at(row, n * MMA_N) + t * 4) =
                pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
    }
    __syncwarp();                                    // or a lane would read what another has not written
#pragma unroll
    for (int i = lane; i < MMA_M * CHUNKS; i += WARP_SIZE) {   // YOUR CODE HERE: the loop
        const int row = warp_row + i / CHUNKS, column = i % CHUNKS * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(shared + at(row, column));
        // END STARTER
        // BEGIN SOLUTION
        for (int n = 0; n < O_TILES; n++)                      // into the tile of Q, by the swizzle
            *(uint32_t*)(shared + (o_lane ^ n * 16) + r * 8 * ROW_BYTES) =
                pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
    }
    __syncwarp();                                    // or a lane would read what another has not written
    constexpr int ROWS = WARP_SIZE / CHUNKS;                   // per pass of the warp: 4, or 2
    const int first = lane / CHUNKS, column = lane % CHUNKS * 8, from = at(warp_row + first, column);
#pragma unroll
    for (int pass = 0; pass < MMA_M / ROWS; pass++) {          // a warp stores the rows that it wrote
        const int row = warp_row + first + pass * ROWS;
        const char* chunk = shared + (from ^ pass * ROWS % 8 * 16) + pass * ROWS * ROW_BYTES;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)chunk;
        // END SOLUTION
    }
}
"""

# %% [markdown]
# ## 9.9
#
# Section 6 loads K's fragments one step ahead. Do it for V, in `p9_5_prefetch`, and two steps ahead (as it is done where a step has too few MMAs to hide an `ldmatrix`). So when a step issues its MMAs,
# the `ldmatrix` of the next two steps have been issued. No fragment is loaded twice, and none behind the last one; the name `b` is taken, by K's. (One step gained nothing on an H200, as section 15 says: the compiler had done it.)

# %% tags=["exercise"]
output = r"""
        // O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs
        // another's numbers. B wants two keys of one column of V in a register, and they lie in two rows:
        // ldmatrix with trans.
        // BEGIN STARTER
#pragma unroll
        // END STARTER
        // BEGIN SOLUTION
        uint32_t v_rmem[3][4];                     // B twice: 16 keys x 16 columns of V; and the next two
        ldmatrix_x4_trans(v_rmem[0], v_lane + stage);
        ldmatrix_x4_trans(v_rmem[1], (v_lane ^ 32) + stage);
#pragma unroll
        // END SOLUTION
        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            uint32_t a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const float(&c)[4] = s[m][2 * k], (&d)[4] = s[m][2 * k + 1];
                a[m][0] = pack<T>(c[0], c[1]), a[m][1] = pack<T>(c[2], c[3]);
                a[m][2] = pack<T>(d[0], d[1]), a[m][3] = pack<T>(d[2], d[3]);
            }
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                // BEGIN STARTER
                uint32_t b[4];                                 // YOUR CODE HERE: this step's, and two more
                ldmatrix_x4_trans(b, (v_lane ^ (n * 32)) + stage + k * MMA_K * ROW_BYTES);
                // END STARTER
                // BEGIN SOLUTION
                const int step = k * (O_TILES / 2) + n;
                const int next_k = (step + 2) / (O_TILES / 2), next_n = (step + 2) % (O_TILES / 2);
                const uint32_t next = (v_lane ^ (next_n * 32)) + stage + next_k * MMA_K * ROW_BYTES;
                if (next_k < BLOCK_N / MMA_K) ldmatrix_x4_trans(v_rmem[(step + 2) % 3], next);
                const uint32_t(&b)[4] = v_rmem[step % 3];
                // END SOLUTION
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(acc[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
"""

# %% [markdown]
# ## 9.10
#
# Section 7 of the lecture counts *query* heads that are worked on together. But what has to fit into the L2 cache is K and V, so count *key* heads: `kv_together` of them at a time, each with
# the `group` query heads that read it, are a *portion*; the last one may have fewer. Query head h reads key head h // group. The launch has `m_blocks` · `heads` blocks. Within a portion the longest blocks, a head's last ones, go first: those of all the portion's heads, in their order; then the
# second longest, and so on.

# %% [markdown]
# ## 9.11
#
# Section 10's rule for the number of shares looks at the blocks alone. FlashAttention's looks at *rounds*: `places` blocks run at a time, and a round takes as long as its longest share of the `tiles` of keys.
# So with s shares the time is ⌈`blocks` · s / `places`⌉ · ⌈`tiles` / s⌉. Find the s with the least time; of several the smallest, since each part has to be merged. Shares should not get too short: s is at most `tiles` // 4, and
# s = 1 is always allowed.
#
# And the workspace: for each share and each of the launch's `rows` rows a part of O and its lse, in floats. Without a split, none.

# %% [markdown]
# ## 9.12
#
# Your kernel of 9.7 at `HEAD_DIM` 128 asks for more registers than a lane has: 128 for O, 64 for the scores, 64 for Q's fragments. So Q goes back to shared memory (section 5). Write the whole source once more, from
# 9.7 or from an empty page, for `HEAD_DIM` 128 in fp16.
#
# It is right if it passes the same cases, takes at most 1.5 wavefronts per MMA on one head of 256 queries and 512 keys without a mask, loads Q's fragments again in every tile, and leaves room for two blocks per SM of an H200: at most 113 KiB of shared memory
# each.

# %% tags=["exercise"]
# BEGIN STARTER
my_kernel_128 = r"""
// YOUR CODE HERE
"""
# END STARTER
# BEGIN SOLUTION
my_kernel_128 = my_kernel                            # 9.7's, less the fragments of Q that stayed in registers
for old, new in (
    ("""
    cp_async_wait<0>();
    __syncthreads();                                                   // Q is here
    uint32_t q_rmem[HEAD_DIM / MMA_K][M_TILES][4];
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        for (int m = 0; m < M_TILES; m++)
            ldmatrix_x4(q_rmem[k][m],
                        q_smem + at(warp_row + m * MMA_M + lane % 16, k * MMA_K + lane / 16 * 8));
""", "                               // waited for with the first tile of K and V\n"),
    ("""
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            for (int n = 0; n < S_TILES / 2; n++) {
""", """
        for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
            uint32_t a[M_TILES][4];                                    // Q again, in every tile
            for (int m = 0; m < M_TILES; m++)
                ldmatrix_x4(a[m], q_smem + at(warp_row + m * MMA_M + lane % 16, k * MMA_K + lane / 16 * 8));
            for (int n = 0; n < S_TILES / 2; n++) {
"""),
    ("q_rmem[k][m], b[0], b[1]);", "a[m], b[0], b[1]);"),
    ("""q_rmem[k][m], b[2], b[3]);
                }
            }
""", """a[m], b[2], b[3]);
                }
            }
        }
"""),
):  # fmt: skip
    assert my_kernel_128.count(old) == 1, old
    my_kernel_128 = my_kernel_128.replace(old, new)
# END SOLUTION

# %% tags=["check"]
# hint("9.12")
check("9.12", my_kernel_128)

# %% [markdown]
# ## Where you are
#
# You can write such a kernel, and say what each of its parts is worth. Phase 10 puts it into a transformer and looks at what is left with the
# profiler; phase 11 leaves `mma.sync` behind for Hopper's own instructions.
