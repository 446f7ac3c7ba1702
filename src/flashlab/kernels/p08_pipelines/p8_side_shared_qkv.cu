// Phase 8, beside the ladder: Q, K and V take turns in one buffer.
//
// p8_side_shared_kv, and Q's tile goes too (LeetCUDA's "shared QKV"): its fragments are in registers before the first
// tile of K sets out. Shared memory for one tile, 8 or 16 KB, is all that a block has; registers then limit how many
// blocks an SM holds.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
static_assert(Q_BYTES == KV_BYTES);
constexpr int SHARED = KV_BYTES;                               // New
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char *q_smem = shared, *kv_smem = shared;                  // New: [BLOCK_N, HEAD_DIM]: Q; K_j, then V_j; O
    // endregion

    // region: first copies
    auto load = [&](const T* gmem, int64_t row_stride, int n_start) {          // K or V
        load_tile<BLOCK_N>(kv_smem, gmem + n_start * row_stride, row_stride, p.seq_k - n_start);
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();
    // endregion

    // region: Q in registers
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<0>();                                        // this thread's part of Q is here
    __syncthreads();                                           // or others' parts would be missing
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
    __syncthreads();                                           // New: or K_0 would be written over Q too early
    if (tiles > 0) load(k_gmem, p.k_stride.row, 0);
    // endregion

    // region: store
    // O and lse
    cp_async_wait<0>();
    __syncthreads();                                           // or one would write O over what another still reads
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (t == 0 && m_start + row < p.seq_q)
            p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
        for (int n = 0; n < O_TILES; n++)                      // into the tile of Q, by the swizzle
            *(uint32_t*)(q_smem + at(row, n * MMA_N) + t * 4) =
                pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
    }
    __syncwarp();                                              // or a lane would read what another has not written
#pragma unroll
    for (int i = lane; i < MMA_M * CHUNKS; i += WARP_SIZE) {   // a warp stores the rows that it wrote
        const int row = warp_row + i / CHUNKS, column = i % CHUNKS * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(q_smem + at(row, column));
    }
}
// endregion
