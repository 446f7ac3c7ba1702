// Phase 6, step 2: the loops swapped, FlashAttention-2's order (Dao 2023).
//
// The outer loop walks Q, the inner loop K and V. A query row now stays with its thread from the first key to the last:
// its output and its statistics live in registers and reach global memory once. And the tiles of Q do not depend on
// each other: each is a block of its own, where step 1 had one block for a whole head.
//
// Compile with -DHEAD_DIM=64 or 128 and -DELEMENT=float.

// region: constants
#ifndef ELEMENT
#define ELEMENT float
#endif
#include "problem.cuh"
static_assert(sizeof(T) == 4, "the kernels of phase 6 work on float32");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM must be 64 or 128");

constexpr int CHUNKS = HEAD_DIM / 4;                       // per row; a chunk is a float4, 16 bytes
constexpr int BLOCK_M = 128, BLOCK_N = 32, THREADS = BLOCK_M;
// endregion

// region: arithmetic
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
__device__ __forceinline__ float4 scaled(float a, float4 b) { return make_float4(a * b.x, a * b.y, a * b.z, a * b.w); }
__device__ __forceinline__ float4 axpy(float a, float4 b, float4 c) {
    return make_float4(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y), fmaf(a, b.z, c.z), fmaf(a, b.w, c.w));
}
// endregion

// region: copy a tile
// A tile of ROWS rows into shared memory; only `rows` of them exist, the others become zeros. Neighbouring threads copy
// neighbouring chunks.
template <int ROWS, int PITCH>
__device__ __forceinline__ void load_tile(float4 (&tile_smem)[ROWS][PITCH], const float* tile_gmem, int64_t row_stride,
                                          int rows) {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const float4* from = (const float4*)(tile_gmem + row * row_stride) + chunk;
        // region: copy a chunk
        tile_smem[row][chunk] = row < rows ? *from : make_float4(0, 0, 0, 0);
        // endregion
    }
}
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    __shared__ float4 k_smem[BLOCK_N][CHUNKS], v_smem[BLOCK_N][CHUNKS];
    // endregion

    // region: which rows
    // New: a block is one tile of Q. Causal: the last rows see the most keys, so they start first.
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), head_index = blockIdx.x / m_blocks;
    const int m_block = blockIdx.x % m_blocks, m_start = (p.causal ? m_blocks - 1 - m_block : m_block) * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;                // causal: row i sees the keys up to i + diagonal
    const float scale_log2 = p.scale * LOG2E;              // exp(x) is computed as exp2(x * log2(e))
    const float* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);    // [BLOCK_M, HEAD_DIM]
    const float* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    const float* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    float* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);          // [BLOCK_M, HEAD_DIM]
    float* lse_gmem = p.lse + (int64_t)head_index * p.seq_q + m_start;       // [BLOCK_M]
    const int row = threadIdx.x;                           // New: this thread's, of the tile
    // endregion

    // region: state
    // New: the row's state, in registers. Threads past the last row compute on zeros and store nothing.
    const float4* q = (const float4*)(q_gmem + row * p.q_stride.row);
    float m_i = -INFINITY, l_i = 0.f;
    float4 q_rmem[CHUNKS], acc[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        q_rmem[c] = m_start + row < p.seq_q ? q[c] : make_float4(0, 0, 0, 0);
        acc[c] = make_float4(0, 0, 0, 0);
    }
    // endregion

    // region: main loop
    // New: causal: the loop ends with the last key that the tile's last row sees.
    const int n_end = p.causal ? min(p.seq_k, m_start + BLOCK_M + diagonal) : p.seq_k;
    for (int n_start = 0; n_start < n_end; n_start += BLOCK_N) {
        // region: load K and V
        __syncthreads();                                   // or a thread would overwrite tiles that another still reads
        load_tile(k_smem, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
        load_tile(v_smem, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        __syncthreads();                                   // or a thread would read what another has not copied yet
        // endregion

        // region: one tile
        // region: scores
        // S_ij = Q_i K_j^T: this thread's row of it.
        float s[BLOCK_N] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) s[n] = dot(q_rmem[c], k_smem[n][c], s[n]);
        }
        // endregion

        // region: probabilities
        // The row's maximum with this tile's scores; a key that the row does not see scores -inf.
        const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
        float m_new = m_i, l_tile = 0.f;
#pragma unroll
        // region: mask
        for (int n = 0; n < BLOCK_N; n++) {
            s[n] = n < keys ? s[n] * scale_log2 : -INFINITY;
            m_new = fmaxf(m_new, s[n]);
        }
        // endregion
        // The tile's probabilities against that maximum, and the new statistics. A row that has seen no key yet has the
        // maximum -inf; -inf - (-inf) would be NaN.
        const float base = m_new == -INFINITY ? 0.f : m_new;
        const float correction = exp2_approx(m_i - base);
#pragma unroll
        for (int n = 0; n < BLOCK_N; n++) s[n] = exp2_approx(s[n] - base), l_tile += s[n];
        m_i = m_new, l_i = l_i * correction + l_tile;
        // endregion

        // region: output
        // New: O_i = correction * O_i + P_ij V_j, never divided on the way.
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            acc[c] = scaled(correction, acc[c]);
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) acc[c] = axpy(s[n], v_smem[n][c], acc[c]);
        }
        // endregion
        // endregion
    }
    // endregion

    // region: store
    // New: the division, and the only time that the row is written.
    if (m_start + row >= p.seq_q) return;
    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;     // no key seen: 0; NaN stays NaN
    float4* o = (float4*)(o_gmem + row * p.o_stride.row);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) o[c] = scaled(inverse, acc[c]);
    lse_gmem[row] = l_i == 0.f ? -INFINITY : (m_i + log2f(l_i)) * LN2;
}
// endregion

// region: launch
extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);         // New: and no workspace
    flash_forward<<<grid, THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// endregion
