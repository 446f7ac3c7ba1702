// Phase 6, step 1: FlashAttention-1 in float32, looped as its paper loops (Dao et al. 2022, Algorithm 1).
//
// O = softmax(scale * Q K^T) V. The outer loop walks K and V, the inner loop Q: a tile of K and V is brought on chip
// once, and every query row passes by. A row's output and its statistics m and l wait in global memory between two
// visits. One block per head, one thread per query row.
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
    const int head_index = blockIdx.x;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;                // causal: row i sees the keys up to i + diagonal
    const float scale_log2 = p.scale * LOG2E;              // exp(x) is computed as exp2(x * log2(e))
    const float* q_gmem = rows_of(p.q, p.q_stride, batch, head, 0);          // [seq_q, HEAD_DIM]
    const float* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    const float* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);       // [seq_k, HEAD_DIM]
    float* o_gmem = rows_of(p.o, p.o_stride, batch, head, 0);                // [seq_q, HEAD_DIM]
    float* lse_gmem = p.lse + (int64_t)head_index * p.seq_q;                 // [seq_q]
    float* m_gmem = p.workspace + (int64_t)head_index * 2 * p.seq_q;         // [seq_q]
    float* l_gmem = m_gmem + p.seq_q;                                        // [seq_q]
    // endregion

    // region: state
    for (int row = threadIdx.x; row < p.seq_q; row += BLOCK_M) {
        m_gmem[row] = -INFINITY, l_gmem[row] = 0.f;
        float4* o = (float4*)(o_gmem + row * p.o_stride.row);
        for (int c = 0; c < CHUNKS; c++) o[c] = make_float4(0, 0, 0, 0);
    }
    // endregion

    // region: main loop
    for (int n_start = 0; n_start < p.seq_k; n_start += BLOCK_N) {           // outer loop: K_j and V_j
        // region: load K and V
        __syncthreads();                                   // or a thread would overwrite tiles that another still reads
        load_tile(k_smem, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
        load_tile(v_smem, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        __syncthreads();                                   // or a thread would read what another has not copied yet
        // endregion

        for (int m_start = 0; m_start < p.seq_q; m_start += BLOCK_M) {       // inner loop: Q_i
            const int row = m_start + threadIdx.x;
            const int keys = p.causal ? min(p.seq_k, row + diagonal + 1) - n_start : p.seq_k - n_start;  // that it sees
            if (row >= p.seq_q || keys <= 0) continue;

            // region: scores
            // S_ij = Q_i K_j^T: this thread's row of it. "unroll 1" keeps the loop over the chunks a loop: unrolled,
            // the compiler would try to hold the whole tile of K in registers while the rows pass by.
            const float4* q = (const float4*)(q_gmem + row * p.q_stride.row);
            float s[BLOCK_N] = {};
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++) {
                const float4 q_rmem = q[c];
#pragma unroll
                for (int n = 0; n < BLOCK_N; n++) s[n] = dot(q_rmem, k_smem[n][c], s[n]);
            }
            // endregion

            // region: probabilities
            // The tile's maximum; a key that the row does not see scores -inf.
            float m_new = -INFINITY, l_tile = 0.f;
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) {
                s[n] = n < keys ? s[n] * scale_log2 : -INFINITY;
                m_new = fmaxf(m_new, s[n]);
            }
            // The tile's probabilities against the new maximum, and the new statistics. A row that has seen no key yet
            // has the maximum -inf; -inf - (-inf) would be NaN.
            const float m_i = m_gmem[row], l_i = l_gmem[row];
            m_new = fmaxf(m_i, m_new);
            const float base = m_new == -INFINITY ? 0.f : m_new;
            const float correction = exp2_approx(m_i - base);
#pragma unroll
            for (int n = 0; n < BLOCK_N; n++) s[n] = exp2_approx(s[n] - base), l_tile += s[n];
            const float l_new = l_i * correction + l_tile, inverse = l_new > 0.f ? 1.f / l_new : l_new;
            // endregion

            // region: output
            // O_i = (l_i * correction * O_i + P_ij V_j) / l_new, read from and written back to global memory.
            float4* o = (float4*)(o_gmem + row * p.o_stride.row);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++) {
                float4 acc = scaled(l_i * correction, o[c]);
#pragma unroll
                for (int n = 0; n < BLOCK_N; n++) acc = axpy(s[n], v_smem[n][c], acc);
                o[c] = scaled(inverse, acc);
            }
            m_gmem[row] = m_new, l_gmem[row] = l_new;
            // endregion
        }
    }
    // endregion

    // region: store
    for (int row = threadIdx.x; row < p.seq_q; row += BLOCK_M)
        lse_gmem[row] = l_gmem[row] == 0.f ? -INFINITY : (m_gmem[row] + log2f(l_gmem[row])) * LN2;
}
// endregion

// region: launch
extern "C" int64_t workspace_floats(const Problem* p) { return (int64_t)p->batch * p->heads * 2 * p->seq_q; }  // m, l

extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads;
    flash_forward<<<grid, THREADS, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// endregion
