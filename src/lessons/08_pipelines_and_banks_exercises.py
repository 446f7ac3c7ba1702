# %% [markdown]
# # Phase 8 · Pipelines and banks: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong; `hint("8.4")` gives the next hint, `progress()` shows where you are.
#
# The CUDA answers are a few lines of text in a Python string (8.8's is a whole file). The check puts them in the place of the same lines of a kernel of the
# series, builds the whole file twice for the emulator, and runs it. No GPU is needed. In CUDA text the mark is `// YOUR CODE HERE`:
# replace it, and leave the rest of the string as it is.

# %%
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_08 import parts, two_groups
from flashlab.figures import show
from flashlab.kernels import path

# %% [markdown]
# ## 8.1
#
# The oldest cure for bank conflicts is padding: make a row a little longer than it has to be. Shared memory has 32 banks of 4 bytes;
# address $a$ is in bank $a / 4 \bmod 32$. One 8×8 tile of an `ldmatrix` is eight rows of 16 bytes, row $r$ at address
# $r \cdot \mathrm{row\_bytes}$. A wavefront delivers each bank once. How many wavefronts does the tile need, when `row_bytes` is a multiple of 16?

# %% [markdown]
# Padding a row of `head_dim` 64 from 128 to 144 bytes would do. It costs an eighth of the tile's shared memory, and every address
# becomes a multiplication by 144. A swizzle costs neither.
#
# ## 8.2
#
# A row of `head_dim` 64 is eight chunks of 16 bytes, one of 128 is sixteen. `place(row, chunk)` says where in its row a chunk is kept, for rows
# of 8, 16 or 32 chunks alike. Two
# things must hold: in every row each place is used once; and the same chunk of the eight rows $8i \dots 8i + 7$ is in eight different groups
# of four banks (place $p$ is in group $p \bmod 8$). The lecture's
# two, $c \oplus (r \bmod 8)$ and $(c + r) \bmod 8$, are taken: find another.

# %% [markdown]
# ## 8.3
#
# Now in the kernel. `at(row, column)` is the byte at which element (row, column) of a tile lies, counted from the tile's start; `column`
# is a multiple of 8, an element has 2 bytes, a row `ROW_BYTES`. In `p8_4_swizzle.cu` all who write and all who read go through it. The lecture's
# line moves chunks. CUTLASS writes a swizzle as one XOR of the *byte offset*: do so. The check wants the right result, and as many wavefronts as
# the ideal.

# %% tags=["exercise"]
at = r"""
__device__ __forceinline__ int at(int row, int column) {
    const int offset = row * ROW_BYTES + column * 2;
# BEGIN STARTER
    return offset ^ // YOUR CODE HERE
# END STARTER
# BEGIN SOLUTION
    return offset ^ row % 8 * 16;
# END SOLUTION
}
"""

# %% [markdown]
# ## 8.4
#
# The lecture's pipeline has one group per tile. Here K and V of a tile are a group each, so that $S = QK^\top$ can begin
# before V has arrived. For 2, 3 or 4 stages:

# %%
show.source(two_groups())

# %% [markdown]
# Write both counts as expressions in `STAGES`: 2, 3 and 4 are tried, and no one number is right for all. Q's copy is in the group of the first K. Each wait has to be long enough that its tile has arrived, and no longer:
# the copies of later tiles should go on.

# %% tags=["exercise"]
in_flight = r"""
// BEGIN STARTER
constexpr int IN_FLIGHT_K = // YOUR CODE HERE
constexpr int IN_FLIGHT_V = // YOUR CODE HERE
// END STARTER
// BEGIN SOLUTION
constexpr int IN_FLIGHT_K = 2 * STAGES - 3;      // V_j, and K and V of STAGES - 2 later tiles
constexpr int IN_FLIGHT_V = 2 * STAGES - 2;  // STAGES - 1 later tiles: the refill is among them by now
// END SOLUTION
"""

# %% [markdown]
# ## 8.5
#
# These lines are what tile $j$'s round begins with in a kernel like `p8_3_stages.cu`, which has `STAGES` buffers for K and V, 2 or 3. Its `load_kv` closes **two
# groups**: K's, then V's. On a GPU the lines passed every test of the day on which they were written, and failed one run
# in some thousands. The emulator's values are right too; but it watches every access, and it objects. Run the check: **which two threads
# does it name, and are they of one warp?** Repair the lines. All copies of later tiles should still go on while tile $j$ is worked on.

# %% tags=["exercise"]
loop_head = r"""
        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
# BEGIN STARTER
        load_kv(j + STAGES - 1);
        cp_async_wait<2 * STAGES - 2>();
        __syncthreads();
# END STARTER
# BEGIN SOLUTION
        cp_async_wait<2 * STAGES - 4>();   // repaired: K and V of STAGES - 2 later tiles may be on their way
        __syncthreads();        // every thread's part of tile j is here, and nobody reads tile j - 1 any more
        load_kv(j + STAGES - 1);           // repaired: so only now may its stage be filled again
# END SOLUTION
"""

# %% [markdown]
# ## 8.6
#
# With `head_dim` 64 and 128 this line is right, and no bank is asked twice. Here the same `p8_4_swizzle.cu` is compiled with `head_dim` 32:
# `ROW_BYTES` is 64, a row has four chunks, and the 128 bytes of all banks hold two rows. Nearly every number is wrong. Repair the line for
# such rows, so that the result is right *and* no bank is asked twice: the first is not yet the second.

# %% tags=["exercise"]
short_rows = r"""
__device__ __forceinline__ int at(int row, int column) {
# BEGIN STARTER
    return row * ROW_BYTES + (column / 8 ^ row % 8) * 16;
# END STARTER
# BEGIN SOLUTION
    return row * ROW_BYTES + (column / 8 ^ row / 2 % 4) * 16;  // repaired: two rows are beside each other
# END SOLUTION
}
"""

# %% [markdown]
# ## 8.7
#
# The milestone of this phase: the lecture's parts, and another pipeline. There is **one** buffer for K and one for V, half of what
# two stages of them take. So K's next tile is copied while V is used, and V's while K is used.
#
# Below are the sixteen parts in no order, without their comments. A line `@K` in your text stands for part K. Every brace but your
# loop's stands in a part. No part starts a copy: `copy_q()`, `copy_k(j)` and `copy_v(j)` do, and close its group. Call them past the last tile too, for an empty group.
# Each tile is copied once.
#
# Yours are the order, the loop over the tiles, and each copy, `cp_async_wait<N>()` and `__syncthreads()` before the loop and in it.
# The check wants a copy under way during both products; only the last $O \mathrel{+}= PV$ has none left.

# %%
show.source("\n\n".join(f"// ---- part {letter} ----\n{code}" for letter, code in parts().items()))

# %% tags=["exercise"]
kernel = r"""
@K
// BEGIN SOLUTION: fifteen more parts, the loop, its copies, waits and barriers
@C
@N
@F
@P
@A
@J
@M
copy_q();
copy_k(0);
cp_async_wait<1>();          // Q is here, K_0 may be under way
__syncthreads();
@D
for (int j = 0; j < tiles; j++) {
    cp_async_wait<0>();
    __syncthreads();         // all of K_j is here, and nobody reads V_(j - 1) any more
    copy_v(j);               // behind S = Q K_j^T
    @Q
    cp_async_wait<0>();
    __syncthreads();         // all of V_j is here, and nobody reads K_j any more
    copy_k(j + 1);           // behind the softmax and O += P V_j
    @B
    @L
    @H
    @E
}
@O
@I
// END SOLUTION
"""

# %% [markdown]
# ## 8.8
#
# Write a whole forward kernel: launch, shared memory, copies, loop, store. The page is empty; the signature is all that is
# given:
#
# ```
# #include "problem.cuh"
# extern "C" int forward(const Problem* p, void* stream)
# ```
#
# It is compiled with `HEAD_DIM` 64 and 128, and `T` is `__half`. Any right kernel passes if it multiplies on the tensor
# cores, has no bank conflict in `ldmatrix`, keeps copies by `cp.async` under way during its MMAs, and stores full sectors. A row without a key has o = 0 and
# lse = `-INFINITY`; scores may be as low as a `float` can be.
#
# Do it in steps, and check after each: the check first says what is wrong, then what is slow. What the include gives you:

# %%
show.source(path("problem.cuh"))

# %% [markdown]
# It includes `ptx.cuh` (phase 7): `smem_u32(p)`, `cp_async<16>(smem, gmem, bytes)`, `cp_async_commit()`, `cp_async_wait<N>()`,
# `ldmatrix_x4(r, smem)` and `ldmatrix_x4_trans`, `mma_m16n8k16<T>(c, a, b0, b1)`, `pack<T>(low, high)`, `exp2_approx(x)`.
#
# Try it on a tiny case before the check. `printf` works in a kernel: `if (blockIdx.x == 0 && threadIdx.x == 5) printf(...)`.
#
# ```python
# import torch
# from flashlab.attention import reference
# from flashlab.cuda import load_inline
# module = load_inline(blank_page, check=True)            # head_dim=128 for the other size
# q, k, v = (torch.randn(1, 1, 64, 64).half() for _ in range(3))
# o, lse = module.forward(q, k, v, causal=False)
# print((o - reference.attention(q, k, v)[0]).abs().max(), module.report.findings)
# print(module.report.counters)                           # mma, wavefronts, bank conflicts, cp.async, ...
# ```

# %% tags=["exercise"]
blank_page = r"""
// BEGIN SOLUTION
#include "problem.cuh"

constexpr int ROWS = 64, THREADS = 128;      // queries per block, keys per tile; a warp has 16 of the queries
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2, TILE = ROWS * ROW_BYTES;

__device__ __forceinline__ int at(int row, int column) {
    return row * ROW_BYTES + (column / 8 ^ row % 8) * 16;
}

__device__ __forceinline__ void copy(char* smem, const T* gmem, int64_t stride, int rows) {      // one group
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * 8;
        const bool there = row < rows;
        const T* from = gmem + (there ? row : 0) * stride + column;
        cp_async<16>(smem_u32(smem + at(row, column)), from, there ? 16 : 0);
    }
    cp_async_commit();
}

__global__ void __launch_bounds__(THREADS) attention(const Problem p) {
    extern __shared__ __align__(128) char shared[];
    char *q_smem = shared, *k_smem = shared + TILE, *v_smem = shared + 2 * TILE;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 * 16;
    const int blocks = ceil_div(p.seq_q, ROWS);
    const int index = blockIdx.x / blocks, start = blockIdx.x % blocks * ROWS;
    const int batch = index / p.heads, head = index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* k = rows_of(p.k, p.k_stride, batch, kv_head, 0);
    const T* v = rows_of(p.v, p.v_stride, batch, kv_head, 0);
    T* o = rows_of(p.o, p.o_stride, batch, head, start);
    const int ahead = p.causal ? p.seq_k - p.seq_q : p.seq_k;         // query i sees the keys up to i + ahead
    const int tiles = ceil_div(max(0, min(p.seq_k, start + ROWS + ahead)), ROWS);
    const float scale = p.scale * LOG2E;

    uint32_t q[HEAD_DIM / 16][4];
    float acc[HEAD_DIM / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    copy(q_smem, rows_of(p.q, p.q_stride, batch, head, start), p.q_stride.row, p.seq_q - start);
    if (tiles) copy(k_smem, k, p.k_stride.row, p.seq_k);
    for (int j = 0; j < tiles; j++) {
        cp_async_wait<0>();
        __syncthreads();                        // K_j (and Q) is here for all; V_(j - 1) has been read by all
        copy(v_smem, v + j * ROWS * p.v_stride.row, p.v_stride.row, p.seq_k - j * ROWS); // behind S = Q K_j^T
        float s[ROWS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; d++) {
            if (j == 0) ldmatrix_x4(q[d], smem_u32(q_smem + at(own + lane % 16, d * 16 + lane / 16 * 8)));
#pragma unroll
            for (int n = 0; n < ROWS / 16; n++) {
                uint32_t b[4];
                const int key = n * 16 + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, smem_u32(k_smem + at(key, d * 16 + lane / 8 % 2 * 8)));
                mma_m16n8k16<T>(s[2 * n], q[d], b[0], b[1]);
                mma_m16n8k16<T>(s[2 * n + 1], q[d], b[2], b[3]);
            }
        }
        cp_async_wait<0>();
        __syncthreads();                           // V_j is here for all; K_j has been read by all
        if (j + 1 < tiles)                         // behind the softmax and O += P V_j
            copy(k_smem, k + (j + 1) * ROWS * p.k_stride.row, p.k_stride.row, p.seq_k - (j + 1) * ROWS);
#pragma unroll
        for (int r = 0; r < 2; r++) {              // rows g and g + 8 of the warp's 16
            const int last = min(p.seq_k - 1, start + own + g + 8 * r + ahead) - j * ROWS;
            float top = m[r];
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                float& x = s[i / 2][2 * r + i % 2];
                if (i / 2 * 8 + t * 2 + i % 2 > last) x = -INFINITY;
                top = fmaxf(top, x);
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == -INFINITY ? 0.f : top, correction = exp2_approx((m[r] - base) * scale);
            m[r] = top, l[r] *= correction;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction;
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                float& x = s[i / 2][2 * r + i % 2];
                l[r] += x = exp2_approx((x - base) * scale);
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS / 16; n++) {
            const float *c = s[2 * n], *d = s[2 * n + 1];
            const uint32_t a[4] = {pack<T>(c[0], c[1]), pack<T>(c[2], c[3]),
                                   pack<T>(d[0], d[1]), pack<T>(d[2], d[3])};
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, smem_u32(v_smem + at(n * 16 + lane % 16, i * 16 + lane / 16 * 8)));
                mma_m16n8k16<T>(acc[2 * i], a, b[0], b[1]);
                mma_m16n8k16<T>(acc[2 * i + 1], a, b[2], b[3]);
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();                     // Q of a block without keys: its copy ends before O is written there
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = own + g + 8 * r;
        l[r] += __shfl_xor_sync(~0u, l[r], 1);
        l[r] += __shfl_xor_sync(~0u, l[r], 2);
        const float inverse = l[r] == 0.f ? 0.f : 1.f / l[r];
        if (t == 0 && start + row < p.seq_q)
            p.lse[(int64_t)index * p.seq_q + start + row] =
                l[r] == 0.f ? -INFINITY : (m[r] * scale + log2f(l[r])) * LN2;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            *(uint32_t*)(q_smem + at(row, n * 8) + t * 4) =
                pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
    }
    __syncwarp();                                  // a warp reads back its own rows only
#pragma unroll
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int row = own + i / CHUNKS, column = i % CHUNKS * 8;
        if (start + row < p.seq_q)
            *(uint4*)(o + row * p.o_stride.row + column) = *(uint4*)(q_smem + at(row, column));
    }
}

extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, ROWS);
    cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, 3 * TILE);
    attention<<<grid, THREADS, 3 * TILE, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// END SOLUTION
"""

# %% [markdown]
# The course's own answer, in `solutions/`, is not the kernel of the series: it has 8.7's pipeline. It needs less shared memory, and one barrier more per
# tile.
#
# ## Where you are
#
# You can write a pipelined tensor-core kernel without bank conflicts. Phase 9 goes on from here, past FlashAttention-2:
# masks, addresses, 32 rows per warp, and fragments that are loaded ahead.
