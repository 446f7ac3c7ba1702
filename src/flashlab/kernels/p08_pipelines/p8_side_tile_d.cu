// Phase 8, beside the ladder: Q, K and V in slices of 64 columns, so that shared memory does not grow with HEAD_DIM.
//
// p8_5_registers keeps whole rows of Q, K and V in shared memory, and Q in registers: beyond HEAD_DIM = 256 there is no
// room. Here S grows slice by slice: 64 columns of Q and of K are copied, multiplied, and given up. Then V passes by in
// slices, each of which makes 64 columns of O. Two stages of 16 KB serve any HEAD_DIM (LeetCUDA's "tiling along D"). Q
// is copied again for every tile of keys. O is still whole in registers: beyond 256 two warps share its columns, and
// both compute S.
//
// Compile with -DHEAD_DIM=64, 128, 256 or 512, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

// New: SLICE columns at a time; PARTS warps share 16 rows, and divide the columns of O
constexpr int SLICE = 64, SLICES = HEAD_DIM / SLICE, PARTS = HEAD_DIM > 256 ? 2 : 1, PART = SLICE / PARTS;
constexpr int BLOCK_M = 64, BLOCK_N = 64, WARPS = BLOCK_M / MMA_M * PARTS, THREADS = WARPS * WARP_SIZE, STAGES = 2;
constexpr int CHUNKS = SLICE / 8, ROW_BYTES = SLICE * 2;       // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N / PARTS;   // accumulators, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
constexpr int STAGE_BYTES = Q_BYTES + KV_BYTES, SHARED = STAGES * STAGE_BYTES;
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    // New: [STAGES] of Q [BLOCK_M, SLICE], then K or V [BLOCK_N, SLICE]
    extern __shared__ __align__(1024) char shared[];
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_row = warp / PARTS * MMA_M, part = warp % PARTS;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);  // [BLOCK_M, HEAD_DIM]
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);        // [BLOCK_M, HEAD_DIM]
    // endregion

    // region: first copies
    // New: the copies of slice i are one group: of Q and K for the first half of a tile's slices, of V for the other.
    auto load_slice = [&](int i) {
        const int n_start = i / (2 * SLICES) * BLOCK_N, column = i % SLICES * SLICE;
        char* stage = shared + i % STAGES * STAGE_BYTES;
        const bool is_v = i % (2 * SLICES) >= SLICES;
        const T* kv_gmem = is_v ? v_gmem + n_start * p.v_stride.row : k_gmem + n_start * p.k_stride.row;
        const int64_t row_stride = is_v ? p.v_stride.row : p.k_stride.row;
        if (i < tiles * 2 * SLICES) {
            if (!is_v) load_tile<BLOCK_M>(stage, q_gmem + column, p.q_stride.row, p.seq_q - m_start);
            load_tile<BLOCK_N>(stage + Q_BYTES, kv_gmem + column, row_stride, p.seq_k - n_start);
        }
        cp_async_commit();
    };
    load_slice(0);
    // endregion

    // region: Q in registers
    // It is not: a slice of it is read where it is needed, and then the next one takes its place.
    int slice = 0;                                             // New: that is worked on next
    auto next_stage = [&]() {
        cp_async_wait<0>();                                    // this thread's part of the slice is here
        __syncthreads();                                       // or others' would be missing, and the last slice in use
        load_slice(slice + 1);
        return shared + slice++ % STAGES * STAGE_BYTES;
    };
    // endregion

        // region: load K and V
        const int n_start = j * BLOCK_N;                       // the tile's first key
        // endregion

        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[S_TILES][4] = {};
        for (int c = 0; c < SLICES; c++) {                     // New
            const char *q_smem = next_stage(), *k_smem = q_smem + Q_BYTES;
#pragma unroll
            for (int k = 0; k < SLICE / MMA_K; k++) {
                uint32_t a[4];                                 // A: 16 rows x 16 columns of Q
                ldmatrix_x4(a, smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
#pragma unroll
                for (int n = 0; n < S_TILES / 2; n++) {
                    uint32_t b[4];                             // B twice: 16 columns x 16 keys
                    const int row = n * 16 + lane % 8 + lane / 16 * 8, column = k * MMA_K + lane / 8 % 2 * 8;
                    ldmatrix_x4(b, smem_u32(k_smem + at(row, column)));
                    mma_m16n8k16<T>(s[2 * n], a, b[0], b[1]);
                    mma_m16n8k16<T>(s[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        // endregion

        // region: output
        // O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int c = 0; c < SLICES; c++) {                     // New
            const char* v_smem = next_stage() + Q_BYTES;
#pragma unroll
            for (int k = 0; k < BLOCK_N / MMA_K; k++) {
                const float(&x)[4] = s[2 * k], (&y)[4] = s[2 * k + 1];
                const uint32_t a[4] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                       pack<T>(y[0], y[1]), pack<T>(y[2], y[3])};
#pragma unroll
                for (int n = 0; n < PART / 16; n++) {
                    uint32_t b[4];                             // B twice: 16 keys x 16 columns of V
                    const int o = c * (PART / MMA_N) + 2 * n, column = part * PART + n * 16 + lane / 16 * 8;
                    ldmatrix_x4_trans(b, smem_u32(v_smem + at(k * MMA_K + lane % 16, column)));
                    mma_m16n8k16<T>(acc[o], a, b[0], b[1]);
                    mma_m16n8k16<T>(acc[o + 1], a, b[2], b[3]);
                }
            }
        }
        // endregion

    // region: store
    // O and lse. Each lane stores its pairs of columns.
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (m_start + row < p.seq_q) {
            if (t == 0 && part == 0)
                p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) {
                const int column = n * MMA_N / PART * SLICE + part * PART + n * MMA_N % PART + t * 2;
                *(uint32_t*)(o_gmem + row * p.o_stride.row + column) =
                    pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
            }
        }
    }
}
// endregion
