# %% [markdown]
# # Phase 11c · Optional: tuned on an H200, exercises
#
# An answer is a function, or a few lines of CUDA in a Python string, which the emulator compiles and runs: no GPU is needed. A check that fails says in one
# sentence what is wrong. `hint("11c.1")` gives the next hint, `progress("11c")` shows where you are.

# %%
from flashlab.exercises import check, hint, progress

# %% [markdown]
# ## 11c.1
#
# Exponentials have units of their own, and few of them: with `head_dim` 64 they take as long as both products. Multiply-adds go eight
# times as fast. Compute $2^x$ with multiply-adds and integer operations for any $x$. The lecture's polynomial (section 3) errs by
# $2^{-13}$, and with it the rule refuses the kernel's `lse` (section 9). Yours errs by at most $2^{-16}$ of the value, from −126 to 126. Below that the result is from 0 to $2^{-120}$, for $-\infty$ too. Above 126 it is $2^{126}$ or
# more, or infinity: with trust (step 14) the maximum may be far too low, and a huge number is what tells. NaN stays NaN. You may use +, −, ×, `fmaf`,
# `fminf`, `fmaxf`, `rintf`, comparisons, `__float_as_uint`, `__uint_as_float`, conversions.

# %% tags=["exercise"]
exp2_polynomial = r"""
__device__ __forceinline__ float exp2_polynomial(float x) {
    // BEGIN SOLUTION
    x = x < -127.f ? -127.f : x > 128.f ? 128.f : x;           // NaN stays NaN
    const float n = rintf(x), f = x - n;                       // 2^x = 2^n 2^f
    const float power = __uint_as_float((uint32_t)((int)n + 127) << 23);
    float y = 0.00133335581f;                                  // ln(2)^k / k!, k = 5 first
    y = fmaf(f, fmaf(f, y, 0.00961812911f), 0.0555041087f);
    return fmaf(f, fmaf(f, fmaf(f, y, 0.240226507f), 0.693147181f), 1.f) * power;
    // END SOLUTION
}
"""

# %% [markdown]
# ## 11c.2
#
# Blocks of BLOCK_N keys add to dQ's tiles of BLOCK_M queries. Each tile has a *turn*: how many blocks have added to it. In the lecture block $j$ waits for
# turn $j$. Under a sliding window query i sees `window` keys, the last of them key i + N − M (fewer where that begins before key 0). So a block adds only to the tiles in which a query sees one of its keys. A
# kernel of 2025 kept turn $j$, and waited for ever (pytorch/FBGEMM, pull request 4982).

# %% [markdown]
# Write down what one block does: (tile, turn) in the order in which it adds. The check lets the grid run:
#
# - An addition takes a step. It is done when exactly `turn` blocks have added to the tile; until then its block stands still.
# - Blocks begin in the order of their numbers, as many as have room, perhaps one at a time.
# - The order of each sum has to be the same in every run. With all blocks at a time the grid should take as few steps as any order of the tiles allows.

# %% [markdown]
# ## 11c.3
#
# In `p11_backward.cu` with `HEAD_DIM` 128 a tile has `TILE` = 64 queries. These lines compute its dQ and hand it on; `end_step`, in the lecture, calls
# them. (The file has these lines: leave it, and the lecture's fold with all of it, closed.) Issue the product, by
# `wgmma_ss<N, T, TRANS_A, TRANS_B>`, between a fence and a commit; `end_step` waits for it. `CONSUMERS` is 2, `GROUP` its 128 threads; `consumer`,
# `warp` (0 to 7, of the block) and `lane` are set. Barriers 1 and 2 (`named_barrier_sync(id, threads)`) belong to one consumer each; 3 is free.

# %% [markdown]
# | address | what lies there |
# |---|---|
# | `ds_smem + nth % 2 * DS_BYTES` | dS of the nth tile, [TILE, BLOCK], in slabs of 64 keys; both consumers store and fence |
# | `k_smem` | K [BLOCK, HEAD_DIM], in slabs of 64 columns |
# | `dq_smem + nth % 2 * DQ_BYTES` | two squares, `DQ_BYTES / CONSUMERS` bytes each: consumer c's has columns 64 c and on |
# | `dq_full + 8 * (nth % 2)` | each of 8 warps arrives when its numbers lie there |
# | `dq_empty + 8 * (nth % 2)` | the thread that adds arrives when it has been read; before the first two tiles nobody does |
#
# A square holds MMA tile after MMA tile: of each the 128 threads' accumulators, a `float4` each. `shared + (address - k_smem)` is a pointer there.

# %% [markdown]
# For an operand whose inner dimension lies along its rows: `descriptor(address)`, and on to its kth 16 columns by `+ columns_on<ROWS>(k)`, where ROWS is
# the tile's height. For one whose inner dimension is its rows, with that operand's `TRANS` set: `descriptor_of_rows<ROWS>(address)`, and
# `+ rows_on(k)`.

# %% tags=["exercise"]
dq_of_a_square = r"""
    float dq[32];                                          // 64 queries, 64 columns: over the block's keys
    auto multiply_dq = [&](int nth) {                          // dq = dS K
# BEGIN STARTER
        // 1. Who has to have stored dS? 2. A is dS, B is K: which descriptor has each? 3. Issue it.
        // YOUR CODE HERE
    };
    auto hand_dq_on = [&](int nth) {                           // dq is there
        // 4. When may the square be written? 5. Write it. 6. What does the copy engine need? Who tells it?
    };
# END STARTER
# BEGIN SOLUTION
        named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);
        const uint64_t ds = descriptor(ds_smem + nth % 2 * DS_BYTES);
        const uint64_t k_rows = descriptor_of_rows<BLOCK>(k_smem + consumer * BLOCK * SLAB_ROW);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK / MMA_K; k++)
            wgmma_ss<64, T, false, true>(dq, ds + columns_on<TILE>(k), k_rows + rows_on(k), k > 0);
        wgmma_commit();
    };
    auto hand_dq_on = [&](int nth) {                           // dq is there
        const int which = nth % 2;
        const uint32_t square_smem = dq_smem + which * DQ_BYTES + consumer * (DQ_BYTES / CONSUMERS);
        float4* square = (float4*)(shared + (square_smem - k_smem));
        mbarrier_wait(dq_empty + 8 * which, nth / 2 % 2 ^ 1);  // the one before the last has been read
#pragma unroll
        for (int n = 0; n < 64 / MMA_N; n++)
            square[n * GROUP + threadIdx.x % GROUP] =
                make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(dq_full + 8 * which);
    };
# END SOLUTION
"""

# %% [markdown]
# ## 11c.4
#
# The end of the same kernel. A consumer has dK and dV of 64 of the block's 128 keys in its registers. Behind the loop it writes dV over V
# and dK over K in shared memory, and TMA takes them from there. (Here a block has one part; in the kernel they leave from where dS was, so that
# the next K and V may come.) The lines of `store` come from `PRODUCTS=7`, where another kernel computes dQ, and were right there.
# Here every gradient is right too, in every run we saw. But the check build objects. Find the mistake and repair it.
#
# `store_tile` writes the consumer's own 64 rows, fences, lets its 128 threads meet, and stores them by TMA. `begin_step`
# and `end_step` compute all five products. Barriers 1 and 2 are a consumer's own, 3 is both's (in `multiply_dq`), from 4 on they skew.

# %% tags=["exercise"]
main_loop = r"""
    mbarrier_wait(full_kept, 0);
    for (int nth = 0; nth < tiles * group; nth++)              // of every query head that reads this key head
#pragma unroll
        for (int first = 0; first < TILE; first += STEP) begin_step(nth, first), end_step(nth, first);
"""
store = r"""
    wgmma_wait<0>();
    named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);  //: dQ of both has read all rows of K
    store_tile(dv, 1.f, v_smem, dv_map, n_start, kv_head, batch);
    store_tile(dk, p.scale, k_smem, dk_map, n_start, kv_head, batch);
    if (first_thread) bulk_wait<0>();                          // they are written
"""

# %% [markdown]
# ## Where you are
#
# You can trade one unit of the chip for another, and say what that costs in digits. You can order the sums of many blocks so that nobody waits for ever,
# hand a product on to the copy engine, and say who still reads a tile that is about to be overwritten.
