# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 11 · Hopper: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong; `hint("11.3")` gives the next hint, `progress()` shows where you are.
#
# The first exercises are Python. The CUDA answers are a few lines of text in a Python string: in CUDA text the mark is
# `// YOUR CODE HERE`. Everything runs in the emulator, which knows Hopper's instructions. No GPU is needed.

# %%
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_11 import log
from flashlab.figures import show
from flashlab.kernels import path

# %% [markdown]
# ## 11.1
#
# Write a model of an mbarrier. A script is a list of operations on a new barrier, each with a number of bytes:
#
# | operation | what happens |
# |:--|:--|
# | `("arrive", 0)` | a thread arrives |
# | `("expect_tx", n)` | n bytes are announced |
# | `("arrive_expect_tx", n)` | n bytes are announced, then a thread arrives |
# | `("copy", n)` | n bytes, announced before, have been delivered |
#
# A phase wants `arrivals` arrivals, and all bytes that were announced. After *each* operation, say of parity 0 and of parity 1
# whether a wait for it would pass.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: complete

# %% tags=["check"]
# hint("11.1")
check("11.1", complete)

# %% [markdown]
# ## 11.2
#
# A producer fills stages in a ring, consumers empty them. Each stage has two barriers: `full`, which the producer's copies complete,
# and `empty`, which the consumers complete when they are through with the tile. In iteration `i` (0, 1, 2 ...) the consumer waits for
# `full` of its stage, reads, and arrives at `empty`. The producer waits for `empty`, then asks for tile `i`. Both run the same loop,
# and nobody arrives at `empty` before it.
#
# And how many bytes does the producer announce for a tile? `rows_left` rows of the tensor are left: at least one, and perhaps
# fewer than the box has.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: waits, tile_bytes

# %% tags=["check"]
# hint("11.2")
check("11.2", waits, tile_bytes)

# %% [markdown]
# ## 11.3 Name the tile
#
# *Core · 30 min*
#
# Three tiles of 16-bit numbers lie in shared memory, as TMA has written them. Each begins at `tile`, a multiple of 1024 bytes.
#
# | function | tile | swizzle | role as B |
# |:--|:--|:--|:--|
# | `k_columns` | 64 rows of 64 columns | 128 bytes | K-major: a row is one n, its columns are k |
# | `v_rows` | 64 rows of 192 columns, as three slabs [64, 64], one behind the other | 128 bytes | MN-major: a row is one k, its columns are n |
# | `narrow_columns` | 64 rows of 32 columns: a row has 64 bytes | 64 bytes | K-major |
#
# Each function returns the descriptor of step `k`: the operand whose K are 16k to 16k + 15. Distances are in bytes; swizzles are
# `SWIZZLE_128`, `_64`, `_32` and `_NONE`. The check multiplies it by the identity:
# it sees what you have named.

# %% tags=["exercise"]
# BEGIN STARTER
descriptors = r"""
// smem_descriptor(address, swizzle, leading_bytes, stride_bytes)
__device__ uint64_t k_columns(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
__device__ uint64_t v_rows(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
__device__ uint64_t narrow_columns(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
"""
# END STARTER
# BEGIN SOLUTION
descriptors = r"""
// smem_descriptor(address, swizzle, leading_bytes, stride_bytes)
__device__ uint64_t k_columns(uint32_t tile, int k) {
    return smem_descriptor(tile + 32 * k, SWIZZLE_128, 16, 8 * 128);
}
__device__ uint64_t v_rows(uint32_t tile, int k) {
    return smem_descriptor(tile + 16 * 128 * k, SWIZZLE_128, 64 * 128, 8 * 128);
}
__device__ uint64_t narrow_columns(uint32_t tile, int k) {
    return smem_descriptor(tile + 32 * k, SWIZZLE_64, 16, 8 * 64);
}
"""
# END SOLUTION

# %% tags=["check"]
# hint("11.3")
check("11.3", descriptors)

# %% [markdown]
# ## 11.4
#
# Shared memory of a block holds Q, `block_m` rows; for each stage a tile of K and a tile of V, `block_n` rows each; and the barriers,
# 8 bytes each: one for Q, four a stage. Numbers have 16 bits. How many stages fit into `shared_bytes`?
#
# A block has `consumers` warpgroups and one for the producer, 128 threads each. At the launch every thread gets as many of
# 65536 registers as it can, a multiple of 8. Then the producer's warpgroup keeps `producer` registers per thread. How many can each
# consumer thread take with `setmaxnreg`? (What the launch leaves over is lost.)
#
# A consumer has 64 rows. O (`head_dim` columns, float), S of the next tile (`block_n` columns, float) and P of this tile (`block_n`
# columns, 16 bits) are in its 128 threads' registers together, and `others` more per thread. How large can `block_n`, a multiple
# of 16, be? (Not more than fits. What `wgmma` allows is no limit here.)

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: most_stages, consumer_registers, widest_tile

# %% tags=["check"]
# hint("11.4")
check("11.4", most_stages, consumer_registers, widest_tile)

# %% [markdown]
# ## 11.5
#
# The emulator keeps a log of what each warp does. Here is that of a small pipeline with two stages: warps 0 and 1 consume, warp 2
# produces. An event is (warp, what it did, the barrier's address, the parity it waits for). An arrival has in the last place the
# bytes that it announces. Two events stand in a line, behind the number of the first.

# %%
events, arrivals = log(stages=2, consumers=2, tiles=3)
for i in range(0, len(events), 2):
    print(f"{i:2}", *events[i : i + 2])
print("arrivals per phase, of each barrier:", arrivals)

# %% [markdown]
# A wait is for one phase of a barrier, so for the warps whose arrivals make up this phase. (No warp arrives twice in one.) Say it for each wait that has passed.
# The check has other logs too: in some, two or three producers take turns.
# (The copies that such a phase also waits for were asked for by one of these warps. A wait that passes at a barrier that is new was
# for nobody: the empty set.)

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: waited_for

# %% tags=["check"]
# hint("11.5")
check("11.5", waited_for)

# %% [markdown]
# ## 11.6 The last mile of O
#
# *Bug hunt · 20 min*
#
# These lines of `p11_10_epilogue.cu` bring a consumer's 64 rows of O to global memory: `stmatrix` into shared memory, from there by TMA.
# On a GPU the kernel passed all its tests. The emulator gives the right numbers too, but it objects. Run the check, look for
# what is wrong, repair it.

# %% tags=["exercise"]
# BEGIN STARTER
epilogue = r"""
        if (first_thread) bulk_wait_read<0>();                 // the O before it has been read
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
#pragma unroll
        for (int n = 0; n < O_TILES; n += 2) {     // two MMA tiles, 16 rows x 16 columns, per warp
            uint32_t o_rmem[4];
            for (int i = 0; i < 4; i++)
                o_rmem[i] = pack<T>(acc[4 * n + 2 * i] * inverse[i % 2],
                                    acc[4 * n + 2 * i + 1] * inverse[i % 2]);
            const int column = n * MMA_N + lane / 16 * 8;
            stmatrix_x4(o_lane + column / SLAB * BLOCK_M * SLAB_ROW + (column % SLAB / 8 ^ lane % 8) * 16,
                        o_rmem);
        }
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);   // all 64 rows are stored
        if (first_thread) {
            for (int column = 0; column < HEAD_DIM; column += SLAB)
                tma_store(&o_map, o_smem + (column / SLAB * BLOCK_M + consumer * 64) * SLAB_ROW, column,
                          m_start + consumer * 64, head_index % p.heads, head_index / p.heads);
            bulk_commit();
        }
"""
# END STARTER
# BEGIN SOLUTION
epilogue = r"""
        if (first_thread) bulk_wait_read<0>();                 // the O before it has been read
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
#pragma unroll
        for (int n = 0; n < O_TILES; n += 2) {     // two MMA tiles, 16 rows x 16 columns, per warp
            uint32_t o_rmem[4];
            for (int i = 0; i < 4; i++)
                o_rmem[i] = pack<T>(acc[4 * n + 2 * i] * inverse[i % 2],
                                    acc[4 * n + 2 * i + 1] * inverse[i % 2]);
            const int column = n * MMA_N + lane / 16 * 8;
            stmatrix_x4(o_lane + column / SLAB * BLOCK_M * SLAB_ROW + (column % SLAB / 8 ^ lane % 8) * 16,
                        o_rmem);
        }
        fence_proxy_async();                                   // repaired
        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);   // all 64 rows are stored
        if (first_thread) {
            for (int column = 0; column < HEAD_DIM; column += SLAB)
                tma_store(&o_map, o_smem + (column / SLAB * BLOCK_M + consumer * 64) * SLAB_ROW, column,
                          m_start + consumer * 64, head_index % p.heads, head_index / p.heads);
            bulk_commit();
        }
"""
# END SOLUTION

# %% tags=["check"]
# hint("11.6")
check("11.6", epilogue)

# %% [markdown]
# ## 11.7 Room for the next tile
#
# *Bug hunt · 25 min*
#
# In `p11_6_overlap.cu` two products are under way at once: the scores of this tile, and O of the tile before, which runs on during the
# softmax. `add_output()` waits for V of the tile before, issues O += P V and commits it. `output_is_there()` is
# `wgmma_wait<0>()`. Here are the lines before the softmax and those after it. Somebody made room for the producer, and the
# kernel became a little faster. Find out at what price, and repair it. The softmax should still run while O is under way.

# %% tags=["exercise"]
# BEGIN STARTER
scores = r"""
        float s[S_TILES * 4];
        const uint64_t k_operand = descriptor(k_smem + stage * KV_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k),
                                 k > 0);
        wgmma_commit();
        if (!FIRST) add_output();
        wgmma_wait<FIRST ? 0 : 1>();
        if (first_thread) {
            mbarrier_arrive(empty_k + 8 * stage);
            if (!FIRST) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));
        }
"""
after_probabilities = r"""
        if (!FIRST) {
            output_is_there();
#pragma unroll
            for (int i = 0; i < O_TILES * 4; i++) acc[i] *= correction[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
"""
# END STARTER
# BEGIN SOLUTION
scores = r"""
        float s[S_TILES * 4];
        const uint64_t k_operand = descriptor(k_smem + stage * KV_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k),
                                 k > 0);
        wgmma_commit();
        if (!FIRST) add_output();
        wgmma_wait<FIRST ? 0 : 1>();                           // the scores are there, O is still under way
        if (first_thread) mbarrier_arrive(empty_k + 8 * stage);
"""
after_probabilities = r"""
        if (!FIRST) {
            output_is_there();
            if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));     // repaired
#pragma unroll
            for (int i = 0; i < O_TILES * 4; i++) acc[i] *= correction[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
"""
# END SOLUTION

# %% tags=["check"]
# hint("11.7")
check("11.7", scores, after_probabilities)

# %% [markdown]
# ## 11.8 The producer, from a blank page
#
# *Stretch · 60 min*
#
# Here is `p11_5_consumers.cu` up to the place where the roles part. What follows is the consumers' code: it begins with
# `setmaxnreg_inc<CONSUMER_REGISTERS>()`.

# %%
show.region(path("tiles.cuh"), "copy a tile")
show.region(path("p11_5_consumers"), "constants", "shared memory", "which rows", "which keys", "barriers")

# %% [markdown]
# The consumers wait for Q at `full_q`, phase 0. They walk the keys backwards, from tile `end - 1` to 0, and count them: the nth,
# n = 0, 1, ..., lies in stage n % STAGES. They wait for `full_k`, then for `full_v` of the stage. One thread of each consumer arrives at
# `empty_k` when its warpgroup has read K, and at `empty_v` when it has read V.
#
# Close the lecture first: it shows such a producer. Write what the warps from `WARPS` on do. They give registers away, and one thread
# of them works. The check compiles it for `HEAD_DIM` 128, with 3 stages instead of 2. It wants each tile to
# be asked for as soon as there is room for it: no K waits for the place of the V of its own tile.

# %% tags=["exercise"]
# BEGIN STARTER
producer = r"""
// YOUR CODE HERE
"""
# END STARTER
# BEGIN SOLUTION
producer = r"""
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
            for (int n = 0; n < end; n++) {
                const int stage = n % STAGES, free = (n / STAGES + 1) % 2, key = (end - 1 - n) * BLOCK_N;
                mbarrier_wait(empty_k + 8 * stage, free);      // all consumers have read the K that was there
                load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, key, kv_head, batch);
                mbarrier_wait(empty_v + 8 * stage, free);
                load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, key, kv_head, batch);
            }
        }
        return;
    }
"""
# END SOLUTION

# %% tags=["check"]
# hint("11.8")
check("11.8", producer)

# %% [markdown]
# ## Where you are
#
# You can divide a kernel into a producer and consumers, say at each barrier who waits for whom, name a tile for the tensor cores, and
# find the mistakes that a GPU does not show.

# %% tags=["nbval-ignore-output"]
progress(11)
