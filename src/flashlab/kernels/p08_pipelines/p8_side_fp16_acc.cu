// Phase 8, beside the ladder: S and O accumulated in fp16.
//
// p8_6_store with mma...f16, whose accumulators are two registers instead of four. On GeForce these MMAs are twice as
// fast; on A100, H100 and H200 no faster. What it costs is shown by its error: a score and a sum of probabilities times
// values are rounded to 11 bits at every step, and beyond 65504 they overflow. fp16 only: bf16 has no such MMA.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half, -DSTAGES=1, 2 or 3.

// region: constants
#include "problem.cuh"
static_assert(std::is_same_v<T, __half>, "an mma with fp16 accumulators takes fp16 operands");        // New
#ifndef STAGES
#define STAGES 2
#endif

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
constexpr int SHARED = Q_BYTES + 2 * STAGES * KV_BYTES;
// endregion

    // region: state
    // New: c0 | c1 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8, two fp16 each
    uint32_t acc[O_TILES][2] = {};                             // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        uint32_t s[S_TILES][2] = {};                           // New
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 columns x 16 keys
                const int row = n * 16 + lane % 8 + lane / 16 * 8, column = k * MMA_K + lane / 8 % 2 * 8;
                ldmatrix_x4(b, smem_u32(k_smem + stage + at(row, column)));
                mma_m16n8k16_f16(s[2 * n], q_rmem[k], b[0], b[1]);
                mma_m16n8k16_f16(s[2 * n + 1], q_rmem[k], b[2], b[3]);
            }
        // endregion

        // region: row maxima
        float m_new[ROWS_PER_LANE];
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = m_start + warp_row + g + r * 8;
            const int last_key = p.causal ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = m_i[r];
#pragma unroll
            for (int n = 0; n < S_TILES; n++) {
                float2 c = unpack<T>(s[n][r]);                 // New
                if (n_start + n * MMA_N + t * 2 > last_key) c.x = -INFINITY;
                if (n_start + n * MMA_N + t * 2 + 1 > last_key) c.y = -INFINITY;
                s[n][r] = pack<T>(c.x, c.y);
                x = fmaxf(x, fmaxf(c.x, c.y));
            }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // a row lives in the four lanes of a quad
            m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        }
        // endregion

        // region: rescale
        // What was summed under the old maximum is brought under the new one
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];         // -inf - (-inf) would be NaN
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = m_new[r], l_i[r] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) {
                const float2 c = unpack<T>(acc[n][r]);
                acc[n][r] = pack<T>(c.x * correction, c.y * correction);
            }
        }
        // endregion

        // region: probabilities
        // P = exp(S - maximum), in place
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
#pragma unroll
            for (int n = 0; n < S_TILES; n++) {
                const float2 c = unpack<T>(s[n][r]);
                const float x = exp2_approx(fmaf(c.x, scale_log2, -base));
                const float y = exp2_approx(fmaf(c.y, scale_log2, -base));
                s[n][r] = pack<T>(x, y);
                l_i[r] += x + y;
            }
        }
        // endregion

        // region: output
        // O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            const uint32_t a[4] = {s[2 * k][0], s[2 * k][1], s[2 * k + 1][0], s[2 * k + 1][1]};
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 keys x 16 columns of V
                ldmatrix_x4_trans(b, smem_u32(v_smem + stage + at(k * MMA_K + lane % 16, n * 16 + lane / 16 * 8)));
                mma_m16n8k16_f16(acc[2 * n], a, b[0], b[1]);
                mma_m16n8k16_f16(acc[2 * n + 1], a, b[2], b[3]);
            }
        }
        // endregion

    // region: store
    // O and lse
    cp_async_wait<0>();
    __syncthreads();                                           // or a warp would write O over Q it still reads
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
        for (int n = 0; n < O_TILES; n++) {                    // into the tile of Q, by the swizzle
            const float2 c = unpack<T>(acc[n][r]);
            *(uint32_t*)(q_smem + at(row, n * MMA_N) + t * 4) = pack<T>(c.x * inverse, c.y * inverse);
        }
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
