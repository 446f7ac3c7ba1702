// Phase 8, beside the ladder: the keys divided over the warps (split-KV inside a block).
//
// What another public ladder tries first (LeetCUDA's split-KV), on p8_4_swizzle. A block owns 64 query rows and walks
// their keys 64 at a time. Each of its four warps multiplies all 64 rows by 16 of the keys. So a row is spread over the
// warps: its maximum and P go through shared memory, P by the same swizzle as the other tiles. Then each warp computes
// a quarter of O's columns. A fragment of K or V serves 64 rows; two more barriers per tile are what it costs.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16, -DSTAGES=1, 2 or 3.

// region: constants
#include "problem.cuh"
#ifndef STAGES
#define STAGES 2
#endif

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
// New: accumulators of a warp, [MMA_M, MMA_N] each: all rows, its quarter of the keys (S) and of the columns (O)
constexpr int M_TILES = BLOCK_M / MMA_M, S_TILES = BLOCK_N / MMA_N / WARPS, O_TILES = HEAD_DIM / MMA_N / WARPS;
constexpr int ROWS_PER_LANE = 2 * M_TILES;                     // g, g + 8, g + 16 ...: row r % 2 of tile r / 2
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
constexpr int P_BYTES = BLOCK_M * BLOCK_N * 2, SHARED = Q_BYTES + 2 * STAGES * KV_BYTES + P_BYTES + WARPS * BLOCK_M * 4;
// endregion

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8.
template <int COLUMNS = HEAD_DIM> __device__ __forceinline__ int at(int row, int column) {     // New: of any tile
    return row * COLUMNS * 2 + (column / 8 ^ row % 8) * 16;      // the XOR. Writer and reader both go through here
}
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char* q_smem = shared;                                     // [BLOCK_M, HEAD_DIM]
    char* k_smem = q_smem + Q_BYTES;                           // [STAGES, BLOCK_N, HEAD_DIM]
    char* v_smem = k_smem + STAGES * KV_BYTES;                 // [STAGES, BLOCK_N, HEAD_DIM]
    char* p_smem = v_smem + STAGES * KV_BYTES;                 // New: [BLOCK_M, BLOCK_N]
    float* rows_smem = (float*)(p_smem + P_BYTES);             // New: [WARPS, BLOCK_M]: each warp's maximum, or sum
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_key = warp * S_TILES * MMA_N, warp_column = warp * O_TILES * MMA_N;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);  // [BLOCK_M, HEAD_DIM]
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);        // [BLOCK_M, HEAD_DIM]
    // endregion

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[M_TILES][O_TILES][4] = {};                       // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[M_TILES][S_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
            uint32_t b[S_TILES][2];                            // New: B: 16 columns x 8 keys, each for M_TILES MMAs
#pragma unroll
            for (int n = 0; n < S_TILES; n++) {
                const int row = warp_key + n * MMA_N + lane % 8, column = k * MMA_K + lane / 8 % 2 * 8;
                ldmatrix_x2(b[n], smem_u32(k_smem + stage + at(row, column)));
            }
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                uint32_t a[4];                                 // A: 16 rows x 16 columns of Q
                ldmatrix_x4(a, smem_u32(q_smem + at(m * MMA_M + lane % 16, k * MMA_K + lane / 16 * 8)));
#pragma unroll
                for (int n = 0; n < S_TILES; n++) mma_m16n8k16<T>(s[m][n], a, b[n][0], b[n][1]);
            }
        }
        // endregion

        // region: row maxima
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = m_start + g + r * 8;
            const int last_key = p.causal ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = s[r / 2][n][r % 2 * 2 + e];
                    if (n_start + warp_key + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;
                    x = fmaxf(x, c);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // the warp's part of a row lives in a quad of lanes
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            if (t == 0) rows_smem[warp * BLOCK_M + g + r * 8] = x;     // New: one part of four
        }
        __syncthreads();                                       // New: or a warp would miss another's maxima
        // endregion

        // region: rescale
        // What was summed under the old maximum is brought under the new one
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            float m_new = m_i[r];
            for (int w = 0; w < WARPS; w++) m_new = fmaxf(m_new, rows_smem[w * BLOCK_M + g + r * 8]);
            const float base = m_new == -INFINITY ? 0.f : m_new;               // -inf - (-inf) would be NaN
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = m_new, l_i[r] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                acc[r / 2][n][r % 2 * 2] *= correction, acc[r / 2][n][r % 2 * 2 + 1] *= correction;
        }
        // endregion

        // region: probabilities
        // P = exp(S - maximum), rounded, to shared memory
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
#pragma unroll
            for (int n = 0; n < S_TILES; n++) {
                const float x = exp2_approx(fmaf(s[r / 2][n][r % 2 * 2], scale_log2, -base));
                const float y = exp2_approx(fmaf(s[r / 2][n][r % 2 * 2 + 1], scale_log2, -base));
                l_i[r] += x + y;
                *(uint32_t*)(p_smem + at<BLOCK_N>(g + r * 8, warp_key + n * MMA_N) + t * 4) = pack<T>(x, y);
            }
        }
        __syncthreads();                                       // New: or a warp would miss another's part of P
        // endregion

        // region: output
        // O += P V. New: a warp needs all keys now, so P comes back from shared memory.
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            uint32_t b[O_TILES][2];                            // B: 16 keys x 8 columns of V
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                ldmatrix_x2_trans(b[n], smem_u32(v_smem + stage + at(k * MMA_K + lane % 16, warp_column + n * MMA_N)));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                uint32_t a[4];                                 // New: A: 16 rows x 16 keys of P
                ldmatrix_x4(a, smem_u32(p_smem + at<BLOCK_N>(m * MMA_M + lane % 16, k * MMA_K + lane / 16 * 8)));
#pragma unroll
                for (int n = 0; n < O_TILES; n++) mma_m16n8k16<T>(acc[m][n], a, b[n][0], b[n][1]);
            }
        }
        // endregion

    // region: store
    cp_async_wait_all();                                       // Q's copy, of a block that sees no key
    // O and lse. Each lane stores its pairs of columns.
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == 0) rows_smem[warp * BLOCK_M + g + r * 8] = sum;
    }
    __syncthreads();                                           // New: or a warp would miss another's sums
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = g + r * 8;
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += rows_smem[w * BLOCK_M + row];
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (m_start + row < p.seq_q) {
            if (t == 0 && warp == 0)
                p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                *(uint32_t*)(o_gmem + row * p.o_stride.row + warp_column + n * MMA_N + t * 2) =
                    pack<T>(acc[r / 2][n][r % 2 * 2] * inverse, acc[r / 2][n][r % 2 * 2 + 1] * inverse);
        }
    }
}
// endregion
