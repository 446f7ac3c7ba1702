# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 9 · Past FlashAttention-2: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong; `hint("9.2")` gives the next hint, `progress()` shows where you are.
#
# The CUDA answers are a few lines of text in a Python string. The check puts them in the place of the same lines of a kernel of the
# series, builds the whole file twice for the emulator, and runs it. No GPU is needed. In CUDA text the mark is `// YOUR CODE HERE`:
# replace it, and leave the rest of the string as it is.

# %%
from flashlab.figures import show
from flashlab.exercises import check, hint, progress
from flashlab.kernels.series import step

# %% [markdown]
# ## 9.1 Merge the parts
#
# *Core · 25 min*
#
# With few rows, several blocks share the keys (split-KV), and each leaves a part: `part_o`, normalised over its keys, and `part_lse`. A second
# kernel merges them, one warp per row; a lane holds `HEAD_DIM / 32` columns, in pairs. Phase 0 called this operation `merge`. Fill in the loop over
# the parts. A part may have seen no key (`part_lse` is `-INFINITY`), and so may all of them. `exp2_approx` is $2^x$; `LOG2E` is there.

# %% tags=["exercise"]
# BEGIN STARTER
merge_loop = r"""
    float m_i = -INFINITY, l_i = 0.f, acc[HEAD_DIM / 32] = {};
    for (int s = 0; s < splits; s++) m_i = fmaxf(m_i, part_lse[s * rows + row]);
    const float base = m_i == -INFINITY ? 0.f : m_i;
    for (int s = 0; s < splits; s++) {
        // YOUR CODE HERE: the weight of part s; l_i
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i += 2) {
            const float2 x = *(const float2*)(part_o + (s * rows + row) * HEAD_DIM + i * 32 + lane * 2);
            // YOUR CODE HERE: acc[i] and acc[i + 1]
        }
    }
    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;
"""
# END STARTER
# BEGIN SOLUTION
merge_loop = r"""
    float m_i = -INFINITY, l_i = 0.f, acc[HEAD_DIM / 32] = {};
    for (int s = 0; s < splits; s++) m_i = fmaxf(m_i, part_lse[s * rows + row]);
    const float base = m_i == -INFINITY ? 0.f : m_i;
    for (int s = 0; s < splits; s++) {
        const float weight = exp2_approx((part_lse[s * rows + row] - base) * LOG2E);
        l_i += weight;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i += 2) {
            const float2 x = *(const float2*)(part_o + (s * rows + row) * HEAD_DIM + i * 32 + lane * 2);
            acc[i] += weight * x.x, acc[i + 1] += weight * x.y;
        }
    }
    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;
"""
# END SOLUTION

# %% tags=["check"]
# hint("9.1")
check("9.1", merge_loop)

# %% [markdown]
# ## 9.2 A third stage, backwards
#
# *Stretch · 30 min*
#
# From `p9_1_masks` on the kernel walks its tiles backwards, from `end - 1` to 0, and has two stages. Give it three: two tiles are on their way while one
# is worked on. The check sets `STAGES = 3`, and the size of shared memory follows from it. What has to change is below: what is under way before the
# loop and when Q may be read (`before_loop`), what each round waits for (`IN_FLIGHT`, again no smaller than it has to be), and which tile it asks for.
#
# (Whether it pays is another question. Three stages of K and V at `head_dim` 128 take 112 KB with Q: one block per SM fewer.)

# %% tags=["exercise"]
# BEGIN STARTER
before_loop = r"""
    auto load_kv = [&](int j) {
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        if (j >= 0) {
            load_tile<BLOCK_N>(k_smem + stage, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
            load_tile<BLOCK_N>(v_smem + stage, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        }
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();                                         // Q is a group of its own
    load_kv(end - 1);                                          // YOUR CODE HERE: the first tiles

    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<1>();                                        // YOUR CODE HERE: Q
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
"""
in_loop = r"""
        constexpr int IN_FLIGHT = 0;                           // YOUR CODE HERE
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        cp_async_wait<IN_FLIGHT>();
        __syncthreads();
        load_kv(j - 1);                                        // YOUR CODE HERE
"""
# END STARTER
# BEGIN SOLUTION
before_loop = r"""
    auto load_kv = [&](int j) {
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        if (j >= 0) {
            load_tile<BLOCK_N>(k_smem + stage, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
            load_tile<BLOCK_N>(v_smem + stage, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        }
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();                                         // Q is a group of its own
    for (int i = 1; i < STAGES; i++) load_kv(end - i);         // tiles end - 1 and end - 2

    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<STAGES - 1>();                               // two groups are younger than Q's
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
"""
in_loop = r"""
        constexpr int IN_FLIGHT = STAGES - 2;                  // tile j - 1's group may still be under way
        const int n_start = j * BLOCK_N, stage = (end - 1 - j) % STAGES * KV_BYTES;
        cp_async_wait<IN_FLIGHT>();
        __syncthreads();
        load_kv(j - STAGES + 1);                               // into the stage of tile j + 1
"""
# END SOLUTION

# %% tags=["check"]
# hint("9.2")
check("9.2", before_loop, in_loop)

# %% [markdown]
# ## Where you are
#
# You have the whole kernel. Phase 9 puts it into a transformer and looks at what is left with the profiler; phase 10 leaves `mma.sync` behind for
# Hopper's own instructions.

# %% tags=["nbval-ignore-output"]
progress(9)
