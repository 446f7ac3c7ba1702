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
from flashlab.exercises.phase_11_ladder import PARTS, RING, TURNS, UNEVEN, launchless
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

# %% [markdown]
# ## 11.2
#
# A producer fills stages in a ring, consumers empty them. Each stage has two barriers: `full`, which the producer's copies complete,
# and `empty`, which the consumers complete when they are through with the tile. For each tile the consumer waits for
# `full` of its stage, reads, and arrives at `empty`; the producer waits for `empty`, then asks for the tile. A block takes one part of the work after the other, part n with
# `tiles[n]` tiles, and the ring runs on. Before the first tile every consumer arrives **once at each `empty`**, as in some kernels: their first round is like all others.

# %% [markdown]
# And how many bytes are announced for a tile of `tile_rows` rows? It comes in boxes of `box_rows` rows and 64 columns, as where a cluster's blocks share a copy.
# `rows_left` rows of the tensor are left, at least one; a box without a row of them is not asked for, and one with some
# counts whole; so does the last box of a row where `head_dim` is no multiple of 64. `tile_rows` is a multiple of `box_rows`.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: waits, tile_bytes

# %% [markdown]
# ## 11.3
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

# %% [markdown]
# ## 11.4
#
# Shared memory of a block holds Q, `block_m` rows; for each stage tiles of K and V, `block_n` rows each; and the barriers,
# 8 bytes each: one for Q, four a stage. Numbers have 16 bits. How many stages fit into `shared_bytes`?
#
# A block has `consumers` warpgroups and one for the producer, 128 threads each. At the launch every thread gets as many of
# 65536 registers as it can, a multiple of 8. The producer's warpgroup keeps `producer` registers per thread. How many can each
# consumer thread take with `setmaxnreg`? (The remainder is lost.)
#
# A consumer has 64 rows. O (`head_dim` columns, float), S of the next tile (`block_n` columns, float) and P of this tile (`block_n`
# columns, 16 bits) are in its 128 threads' registers, and each thread needs `others` more: it has `registers`. How large can `block_n`, a multiple
# of 16, be? (What `wgmma` allows is no limit here.)

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11: most_stages, consumer_registers, widest_tile

# %% [markdown]
# ## 11.5
#
# The emulator keeps a log of what each warp does. Here is that of a small pipeline with two stages: warps 0 and 1 consume, warp 2
# produces. An event is (warp, what it did, the barrier's address); an arrival is called `arrive`. Three events stand in a line, behind the number of the first.

# %%
events, arrivals = log(stages=2, consumers=2, tiles=3)
for i in range(0, len(events), 3):
    print(f"{i:2}", *events[i : i + 3])
print("arrivals per phase, of each barrier:", arrivals)

# %% [markdown]
# A wait is for one phase of a barrier, so for the warps whose arrivals make up this phase. (No warp arrives twice in one.) The log does not number
# phases, but it can be counted: so many arrivals as the barrier's number says make one, and a wait that passes was for the latest that was
# complete by then. Say for each wait that has passed (`mbarrier-passed`) which warps it was for. Where no phase is complete yet, as at a barrier that
# is new, it was for nobody: the empty set.
#
# The check has other logs too: in some, two or three producers take turns; in some, a warp arrives for the next phase before another one has passed,
# or waits for a phase to which it belongs. (The copies that a phase also waits for were asked for by one of
# these warps.)

# %% [markdown]
# ## 11.6
#
# In `p11_10_epilogue.cu` the warps wait until all of the O before has been read, and all of O leaves in one group. For `HEAD_DIM` 128 somebody
# made it leave **slab by slab**: each slab of 64 columns has its own part of the buffer, its own store and its own group. So the first slab of a part
# may be filled, as it should, while the second one of the part before is still being read. But there is a mistake. On a GPU it may never show. In the
# emulator it does. Run the check, look for what is wrong, repair it. Slabs should still leave one by one, and nobody should wait for more than has to be over.
# (`bulk_wait_read<n>` returns when of its thread's groups at most the n latest are still being read.)

# %% tags=["exercise"]
epilogue = r"""
#pragma unroll
        for (int slab = 0; slab < HEAD_DIM / SLAB; slab++) {
            const uint32_t slab_smem = slab * BLOCK_M * SLAB_ROW;      // where it lies, from o_smem on
            if (first_thread) bulk_wait_read<HEAD_DIM / SLAB - 1>();           //: repaired
            named_barrier_sync(1 + CONSUMERS + consumer, GROUP);
#pragma unroll
            for (int n = 0; n < SLAB / MMA_N; n += 2) {    // two MMA tiles, 16 rows x 16 columns, per warp
                const float* c = acc + 4 * (slab * SLAB / MMA_N + n);
                uint32_t o_rmem[4];
                for (int i = 0; i < 4; i++)
                    o_rmem[i] = pack<T>(c[2 * i] * inverse[i % 2], c[2 * i + 1] * inverse[i % 2]);
                stmatrix_x4(o_lane + slab_smem + (n + lane / 16 ^ lane % 8) * 16, o_rmem);
            }
            fence_proxy_async();
            named_barrier_sync(1 + CONSUMERS + consumer, GROUP);   // all 64 rows are stored
            if (first_thread) {
                tma_store(&o_map, o_smem + slab_smem + consumer * 64 * SLAB_ROW, slab * SLAB,
                          m_start + consumer * 64, head_index % p.heads, head_index / p.heads);
                bulk_commit();
            }
        }
"""

# %% [markdown]
# ## 11.7
#
# In `p11_6_ring.cu`, as the check calls it, K and V of step 6 share **one ring** of three slots: K of the nth tile is item 2 nth, V of it item 2 nth + 1, and item i lies in slot
# i % `SLOTS`. `empty_slot` has a barrier for each slot, at which every consumer arrives once for each item. The producer fills the slots in the ring's order. What is asked:
#
# - slots become free in this order, each as soon as its product has ended: V of the tile before, then K of this one, both by `first_thread`;
# - both products are under way together: nobody waits between the two. (O += P V is issued first, so that it ends first. In the first tile there is none.)

# %% [markdown]
# `slot` is that of this tile's K. `add_output()` waits for V of the tile before, issues O += P V and commits it. Below are the lines before the softmax.
# Every wait and every arrival of step 6 is there. Find out what is wrong all the same, and repair it.

# %% tags=["exercise"]
scores = r"""
        float s[S_TILES * 4];
        const uint64_t k_operand = descriptor(ring_smem + slot * KV_BYTES);
        if (!FIRST) add_output();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k),
                                 k > 0);
        wgmma_commit();
        wgmma_wait<1>();                                       //: O, the older group, is there
        if (!FIRST && first_thread) mbarrier_arrive(empty_slot + 8 * ((2 * nth - 1) % SLOTS));
        wgmma_wait<0>();                                       //: and the scores
        if (first_thread) mbarrier_arrive(empty_slot + 8 * slot);
"""

# %% [markdown]
# ## 11.8
#
# Here is `p11_5_consumers.cu` with **three stages for K and two for V**, up to the place where the roles part. What follows is the consumers'
# code: it begins with `setmaxnreg_inc<CONSUMER_REGISTERS>()`. Here and below `SLAB` is 64 columns, `SLAB_ROW` their 128 bytes, and `COLUMNS` is
# `HEAD_DIM` in whole slabs.

# %%
show.region(path("maps.cuh"), "copy a tile")
show.region(UNEVEN, "constants", "shared memory", "which rows", "which keys", "barriers")

# %% [markdown]
# The consumers wait for Q at `full_q`, phase 0. They walk the keys backwards, from tile `end - 1` to 0, and count them: K of the nth,
# n = 0, 1, ..., lies in stage n % K_STAGES, V of it in n % V_STAGES. They wait for `full_k`, then for `full_v` of the stage. One thread of each
# consumer arrives at `empty_k` when its warpgroup has read K, and at `empty_v` when it has read V.
#
# Write what the warps from `WARPS` on do. They give registers away, and one thread of them works. The check wants each tile to be asked for
# **as soon as there is room for it**. The lecture's order does not do that here: which copy waits for which place, and which place is free first?

# %% tags=["exercise"]
producer = r"""
// BEGIN SOLUTION
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
            for (int n = 0; n <= end; n++) {                   // K of tile n, then V of the tile before
                if (n < end) {
                    const int stage = n % K_STAGES;
                    mbarrier_wait(empty_k + 8 * stage, (n / K_STAGES + 1) % 2);   // that K has been read
                    load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage,
                                       (end - 1 - n) * BLOCK_N, kv_head, batch);
                }
                if (n > 0) {
                    const int stage = (n - 1) % V_STAGES;
                    mbarrier_wait(empty_v + 8 * stage, ((n - 1) / V_STAGES + 1) % 2);
                    load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage,
                                       (end - n) * BLOCK_N, kv_head, batch);
                }
            }
        }
        return;
    }
// END SOLUTION
"""

# %% [markdown]
# ## 11.9
#
# A model's projection gives Q, K and V in one tensor: `qkv[batch, seq, 3, heads, HEAD_DIM]`, fp16, dense, and `HEAD_DIM` is 128. Describe the K in
# it to the copy engine, so that
#
#     tma_load(tile, &map, barrier, column, row, head, batch)
#
# brings 32 rows of 64 columns (`SLAB`) of that head, with the 128-byte swizzle. Rows that the sequence does not have become zeros: the next batch
# begins right behind the last row.
#
# `tensor_map(base, type, rank, dims, strides_bytes, box, swizzle)` counts dimensions from the innermost one, in the order of `tma_load`'s
# coordinates, whatever lies next to what in memory; the type is
# `CU_TENSOR_MAP_DATA_TYPE_FLOAT16`, the swizzle `CU_TENSOR_MAP_SWIZZLE_128B`. The check reads the map's numbers, and says which of them is another one.

# %% tags=["exercise"]
map_of_k = r"""
CUtensorMap map_of_k(const T* qkv, int batch, int seq, int heads) {
    // BEGIN SOLUTION
    const uint64_t row_bytes = 3ull * heads * HEAD_DIM * 2;                // Q, K and V of all heads
    const uint64_t dims[] = {HEAD_DIM, (uint64_t)seq, (uint64_t)heads, (uint64_t)batch};
    const uint64_t strides[] = {row_bytes, HEAD_DIM * 2, seq * row_bytes};
    const uint32_t box[] = {SLAB, 32, 1, 1};
    return tensor_map(qkv + heads * HEAD_DIM, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, dims, strides, box,
                      CU_TENSOR_MAP_SWIZZLE_128B);
    // END SOLUTION
}
"""

# %% [markdown]
# ## 11.10
#
# Two or three consumers take turns, as in step 7, but from the last to the first: `CONSUMERS - 1`, ..., 1, 0, and again. Here is the kernel. Whoever
# has the turn writes its number into a list that nothing else guards.

# %%
show.region(TURNS, "kernel", whole_file=False)

# %% [markdown]
# Write the four functions. Barriers 1 to 3 are taken by others: turns use the numbers from 4 on. `named_barrier_sync(number, threads)` counts and
# waits, `named_barrier_arrive(number, threads)` counts and goes on. Who passes a turn on does not wait until the next has come for it. When the
# kernel ends, nobody may have arrived at a barrier at which nobody waits.

# %% tags=["exercise"]
# BEGIN STARTER
turns = r"""
__device__ void take_turn(int consumer) {
    // YOUR CODE HERE
}
__device__ void pass_turn(int consumer) {
    // YOUR CODE HERE
}
__device__ void begin(int consumer) {
    // YOUR CODE HERE
}
__device__ void end(int consumer) {
    // YOUR CODE HERE
}
"""
# END STARTER
# BEGIN SOLUTION
turns = r"""
// barrier 4 + c: consumer c's turn
__device__ void take_turn(int consumer) { named_barrier_sync(4 + consumer, 2 * GROUP); }
__device__ void pass_turn(int consumer) {
    named_barrier_arrive(4 + (consumer + CONSUMERS - 1) % CONSUMERS, 2 * GROUP);
}
__device__ void begin(int consumer) {
    if (consumer == 0) pass_turn(consumer);                    // the last consumer begins
}
__device__ void end(int consumer) {
    if (consumer == CONSUMERS - 1) take_turn(consumer);        // the turn that consumer 0 has passed on last
}
"""
# END SOLUTION

# %% [markdown]
# ## 11.11
#
# The blocks of this kernel stay, and take part after part, as in step 9. One thread of the producer takes the next number from a counter in global
# memory, and hands it on through one of three places in shared memory. All threads of the consumers read it there.

# %%
show.region(PARTS, "constants", "kernel", whole_file=False)

# %% [markdown]
# Write both sides, for the nth number, n = 0, 1, 2, ... `hand_on` takes a number from the counter, hands it on and returns it. `take` is called by
# every thread of every consumer: it returns the nth number, and says that the place is free again. All three places are used.

# %% tags=["exercise"]
hand = r"""
__device__ int hand_on(const Hand& h, int n) {
    // BEGIN STARTER
    // YOUR CODE HERE
}
__device__ int take(const Hand& h, int n) {
    // YOUR CODE HERE
    // END STARTER
    // BEGIN SOLUTION
    const int at = n % PLACES;
    mbarrier_wait(h.empty + 8 * at, (n / PLACES + 1) % 2);     // all threads have read what was there
    const int part = atomicAdd(h.counter, 1);
    h.place[at] = part;
    mbarrier_arrive(h.full + 8 * at);
    return part;
}
__device__ int take(const Hand& h, int n) {
    const int at = n % PLACES;
    mbarrier_wait(h.full + 8 * at, n / PLACES % 2);
    const int part = h.place[at];
    mbarrier_arrive(h.empty + 8 * at);
    return part;
    // END SOLUTION
}
"""

# %% [markdown]
# ## 11.12
#
# Here is step 5 without its kernel: what a block does is a function, and nothing calls it. Its shared memory is not its own: as in a library,
# all kernels of the file share one array, `pool`, and that begins at some multiple of 16 bytes.

# %%
show.region(launchless(), "constants", whole_file=False)
show.region(launchless(), "shared memory", whole_file=False)
show.region(path("maps.cuh"), "tensor maps", whole_file=False)
show.source(path("problem.cuh"))

# %% [markdown]
# Write the rest of the file. A kernel, for causal and not, which takes the problem and the three maps as its parameters, says how many
# threads a block has (`setmaxnreg` wants `__launch_bounds__` of just as many, and one block per SM), and calls the function with memory out of `pool`: no array of your own. Tiles are swizzled: where may they begin, and what has the launch to ask for? And
#
#     extern "C" int forward(const Problem* p, void* stream)
#
# which makes the maps, launches the kernel on that stream, on a grid of three dimensions (a head's rows on x, the heads on y, the batches on z), and returns `(int)cudaGetLastError()`. There is at least one query, and one key. The check compiles it for `HEAD_DIM` 64, where a block has 192 rows.

# %% tags=["exercise"]
launch = r"""
// BEGIN SOLUTION
constexpr int SHARED_BYTES = 1024 + Q_BYTES + 2 * STAGES * KV_BYTES + BARRIERS * 8;

template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
attention(const Problem p, const __grid_constant__ CUtensorMap q_map,
          const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
    char* shared = pool + -smem_u32(pool) % 1024;              // where a swizzle's pattern may begin
    flash_forward_block<CAUSAL>(p, q_map, k_map, v_map, shared, blockIdx.x, blockIdx.y, blockIdx.z);
}

extern "C" int forward(const Problem* p, void* stream) {
    const auto attend = p->causal ? attention<true> : attention<false>;
    cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    const dim3 blocks(ceil_div(p->seq_q, BLOCK_M), p->heads, p->batch);
    attend<<<blocks, THREADS, SHARED_BYTES, (cudaStream_t)stream>>>(
        *p, map_of(p->q, p->q_stride, p->batch, p->heads, p->seq_q, BLOCK_M),
        map_of(p->k, p->k_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N),
        map_of(p->v, p->v_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N));
    return (int)cudaGetLastError();
}
// END SOLUTION
"""

# %% [markdown]
# ## 11.13
#
# Here is a kernel without its consumers' loop. Its producer is another one than the lecture's: K and V share **one ring** of three slots, and the keys
# are walked forwards, 64 at a time. So the items K₀, V₀, K₁, V₁, ... lie in slots 0, 1, 2, 0, ...

# %%
show.region(RING, "constants", "shared memory", "producer", "state", whole_file=False)

# %% [markdown]
# Write the loop: for each tile wait, fence, issue, commit, wait, softmax, and give back what has been read. After it `acc`, `m_i` and `l_i` are what the
# store expects: `m_i` the rows' maxima of the raw scores, `l_i` each lane's part of the sums. `tiles` is the number of tiles, `last_key[r]` the last key
# that the lane's row r sees: row g for r = 0, row g + 8 for r = 1. As in every kernel, `g` is lane / 4 and `t` lane % 4.

# %% [markdown]
# One thread of each consumer says for its warpgroup, at `empty` of the slot, that an item has been read: as early as that is true. The lecture's helpers
# are there: `descriptor`, `columns_on`, `descriptor_of_rows`, `rows_on`, and those of phase 9, `exp2_approx` and `pack`.

# %%
show.region(path("tiles.cuh"), "operands", whole_file=False)
show.region(path("wgmma.cuh"), "wgmma order", "wgmma", whole_file=False)

# %% tags=["exercise"]
loop = r"""
// BEGIN SOLUTION
    for (int j = 0; j < tiles; j++) {
        // S = Q K^T
        int slot = 2 * j % SLOTS;
        mbarrier_wait(full + 8 * slot, 2 * j / SLOTS % 2);     // K of tile j is here
        const uint64_t k_tile = descriptor(ring_smem + slot * SLOT_BYTES);
        float s[S_TILES * 4];
        wgmma_fence();                                         // s belongs to the tensor cores from here on
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_tile + columns_on<BLOCK_N>(k),
                                 k > 0);
        wgmma_commit();
        wgmma_wait<0>();                                       // and to us again; nobody reads K any more
        if (first_thread) mbarrier_arrive(empty + 8 * slot);

        // softmax, row by row: c0 c1 of tile n are s[4 n], s[4 n + 1], row g; c2 c3 are row g + 8
        for (int r = 0; r < 2; r++) {
            float x = m_i[r];
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[4 * n + 2 * r + e];
                    if (j * BLOCK_N + n * MMA_N + 2 * t + e > last_key[r]) c = -INFINITY;
                    x = fmaxf(x, c);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // a row lies in four neighbouring lanes
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float base = x == -INFINITY ? 0.f : x;       // -inf - (-inf) would be NaN
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = x, l_i[r] *= correction;
            for (int n = 0; n < O_TILES; n++)
                for (int e = 0; e < 2; e++) acc[4 * n + 2 * r + e] *= correction;
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[4 * n + 2 * r + e];
                    c = exp2_approx((c - base) * scale_log2);
                    l_i[r] += c;
                }
        }
        uint32_t a[BLOCK_N / MMA_K][4];  // P: two neighbouring tiles of S are a fragment of A
        for (int i = 0; i < BLOCK_N / 4; i++) a[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);

        // O += P V
        slot = (2 * j + 1) % SLOTS;
        mbarrier_wait(full + 8 * slot, (2 * j + 1) / SLOTS % 2);
        const uint64_t v_tile = descriptor_of_rows<BLOCK_N>(ring_smem + slot * SLOT_BYTES);
        wgmma_fence();  // acc and a were written by ordinary instructions
        for (int k = 0; k < BLOCK_N / MMA_K; k++)
            wgmma_rs<HEAD_DIM, T, true>(acc, a[k], v_tile + rows_on(k));
        wgmma_commit();
        wgmma_wait<0>();
        if (first_thread) mbarrier_arrive(empty + 8 * slot);
    }
// END SOLUTION
"""

# %% [markdown]
# ## 11.14
#
# An empty page, and the lecture closed. Write a whole source that includes `p11_hopper/tiles.cuh` (with `load_tile`, `descriptor` and its kin, `map_of`; and
# by it `problem.cuh`), and has
#
#     extern "C" int forward(const Problem* p, void* stream)
#
# It computes O and lse for `HEAD_DIM` 64 in fp16: causal and not, grouped heads, any length, any strides. A row that sees no key has O = 0 and
# lse = $-\infty$. `Problem` stands at 11.12.

# %% [markdown]
# Any right kernel is accepted that is made as step 5 is: all tiles come by TMA; both products are `wgmma`; a producer of its own runs at least one
# tile ahead (a tile is asked for before the consumers are through with the one before); every tile of K and V serves two consumers, 128 rows, or more; and registers move from the producer to the consumers. Your answers to 11.8,
# 11.12 and 11.13 are parts of it. No turns, no parts, no store by TMA.

# %% tags=["exercise"]
my_kernel = r"""
// BEGIN SOLUTION
#include "p11_hopper/tiles.cuh"

constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), STAGES = 2;
constexpr int BLOCK_M = 64 * CONSUMERS, BLOCK_N = 128;
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2, TILE_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int SHARED = Q_BYTES + 2 * STAGES * TILE_BYTES + 8 * (1 + 4 * STAGES);

__global__ void __launch_bounds__(THREADS, 1)
attention(const Problem p, const __grid_constant__ CUtensorMap q_map,
          const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
    extern __shared__ __align__(1024) char memory[];
    const uint32_t q_smem = smem_u32(memory), k_smem = q_smem + Q_BYTES;
    const uint32_t v_smem = k_smem + STAGES * TILE_BYTES;
    const uint32_t full_q = v_smem + STAGES * TILE_BYTES;      // mbarriers; then four for each stage
    const auto full_k = [=](int stage) { return full_q + 8 + 32 * stage; };
    const auto full_v = [=](int stage) { return full_k(stage) + 8; };
    const auto empty_k = [=](int stage) { return full_k(stage) + 16; };
    const auto empty_v = [=](int stage) { return full_k(stage) + 24; };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int blocks = ceil_div(p.seq_q, BLOCK_M), head_index = blockIdx.x / blocks;
    const int m_start = blockIdx.x % blocks * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;
    int tiles = ceil_div(p.seq_k, BLOCK_N);
    if (p.causal) tiles = max(0, min(tiles, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));

    if (threadIdx.x == 0) {
        mbarrier_init(full_q, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full_k(i), 1), mbarrier_init(full_v(i), 1);
            mbarrier_init(empty_k(i), CONSUMERS), mbarrier_init(empty_v(i), CONSUMERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();                                           // the barriers are made

    if (warp >= 4 * CONSUMERS) {                               // the producer
        setmaxnreg_dec<24>();
        if (warp == 4 * CONSUMERS && elect_one()) {
            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
            for (int j = 0; j < tiles; j++) {
                const int stage = j % STAGES, free = j / STAGES % 2 ^ 1;
                mbarrier_wait(empty_k(stage), free);
                load_tile<BLOCK_N>(k_smem + stage * TILE_BYTES, k_map, full_k(stage), j * BLOCK_N, kv_head,
                                   batch);
                mbarrier_wait(empty_v(stage), free);
                load_tile<BLOCK_N>(v_smem + stage * TILE_BYTES, v_map, full_v(stage), j * BLOCK_N, kv_head,
                                   batch);
            }
        }
        return;
    }
    setmaxnreg_inc<240>();

    float acc[O_TILES * 4] = {}, m_i[2] = {-INFINITY, -INFINITY}, l_i[2] = {};
    const float scale_log2 = p.scale * LOG2E;
    const bool speaks = threadIdx.x % 128 == 0;                // for its warpgroup
    const uint64_t q_tile = descriptor(q_smem + threadIdx.x / 128 * 64 * SLAB_ROW);
    mbarrier_wait(full_q, 0);
    for (int j = 0; j < tiles; j++) {
        const int stage = j % STAGES, parity = j / STAGES % 2;
        float s[S_TILES * 4];
        mbarrier_wait(full_k(stage), parity);
        const uint64_t k_tile = descriptor(k_smem + stage * TILE_BYTES);
        wgmma_fence();
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
            wgmma_ss<BLOCK_N, T>(s, q_tile + columns_on<BLOCK_M>(k), k_tile + columns_on<BLOCK_N>(k),
                                 k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        if (speaks) mbarrier_arrive(empty_k(stage));

        for (int r = 0; r < 2; r++) {
            const int row = m_start + warp * MMA_M + g + 8 * r;
            const int last_key = p.causal ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = m_i[r];
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[4 * n + 2 * r + e];
                    if (j * BLOCK_N + n * MMA_N + 2 * t + e > last_key) c = -INFINITY;
                    x = fmaxf(x, c);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float base = x == -INFINITY ? 0.f : x;
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = x, l_i[r] *= correction;
            for (int n = 0; n < O_TILES; n++)
                for (int e = 0; e < 2; e++) acc[4 * n + 2 * r + e] *= correction;
            for (int n = 0; n < S_TILES; n++)
                for (int e = 0; e < 2; e++) {
                    float& c = s[4 * n + 2 * r + e];
                    c = exp2_approx((c - base) * scale_log2);
                    l_i[r] += c;
                }
        }
        uint32_t a[BLOCK_N / MMA_K][4];
        for (int i = 0; i < BLOCK_N / 4; i++) a[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);

        mbarrier_wait(full_v(stage), parity);
        const uint64_t v_tile = descriptor_of_rows<BLOCK_N>(v_smem + stage * TILE_BYTES);
        wgmma_fence();
        for (int k = 0; k < BLOCK_N / MMA_K; k++)
            wgmma_rs<HEAD_DIM, T, true>(acc, a[k], v_tile + rows_on(k));
        wgmma_commit();
        wgmma_wait<0>();
        if (speaks) mbarrier_arrive(empty_v(stage));
    }

    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);
    for (int r = 0; r < 2; r++) {
        const int row = warp * MMA_M + g + 8 * r;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;
        if (m_start + row >= p.seq_q) continue;
        if (t == 0)
            p.lse[(int64_t)head_index * p.seq_q + m_start + row] =
                sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        for (int n = 0; n < O_TILES; n++)
            *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + 2 * t) =
                pack<T>(acc[4 * n + 2 * r] * inverse, acc[4 * n + 2 * r + 1] * inverse);
    }
}

extern "C" int forward(const Problem* p, void* stream) {
    cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    attention<<<p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M), THREADS, SHARED, (cudaStream_t)stream>>>(
        *p, map_of(p->q, p->q_stride, p->batch, p->heads, p->seq_q, BLOCK_M),
        map_of(p->k, p->k_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N),
        map_of(p->v, p->v_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N));
    return (int)cudaGetLastError();
}
// END SOLUTION
"""

# %% [markdown]
# ## Where you are
#
# You can write a Hopper kernel from an empty page: a producer and its consumers, each wait with who ends it, each tile by its name. And you can
# find the mistakes that a GPU does not show.
