// Phase 6, step 3: every tile in shared memory, and the block's threads share the work of a tile.
//
// A thread per row, as before, uses each number that it reads from shared memory once: one read per multiply-add. Now Q
// and S are tiles in shared memory too, and a thread computes 4 rows by 4 keys of S (and 4 rows by HEAD_DIM / 16
// columns of O) at a time: 8 numbers read serve 16 multiply-adds.
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
constexpr int BLOCK_M = 64, BLOCK_N = HEAD_DIM == 64 ? 64 : 32;
// New: LANES threads share ROWS rows, and the block has GROUPS such teams. A thread has the rows first_row + GROUPS i,
// the keys tx + LANES j and the chunks tx + LANES c of a row.
constexpr int LANES = 16, GROUPS = 16, THREADS = LANES * GROUPS, ROWS = BLOCK_M / GROUPS;
constexpr int KEYS = BLOCK_N / LANES, COLUMNS = CHUNKS / LANES;
// New: a row of Q or K is one float4 longer than its numbers: the same chunk of 8 neighbouring rows is then in 8
// different groups of banks. A row of S is one float longer, for the same reason.
struct Shared {
    float4 q[BLOCK_M][CHUNKS + 1], k[BLOCK_N][CHUNKS + 1], v[BLOCK_N][CHUNKS];
    float s[BLOCK_M][BLOCK_N + 1], correction[BLOCK_M], inverse[BLOCK_M];
};
#include "p06_scalar/arithmetic.cuh"
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
    extern __shared__ __align__(16) char shared_bytes[];
    auto& [q_smem, k_smem, v_smem, s_smem, correction_smem, inverse_smem] = *(Shared*)shared_bytes;
    // endregion

    // region: which rows
    // A block is one tile of Q. Causal: the last rows see the most keys, so they start first.
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
    const int row = threadIdx.x, first_row = threadIdx.x / LANES;
    const int tx = threadIdx.x % LANES;
    // endregion

    // region: state
    // New: the first BLOCK_M threads have a row each, and keep its statistics; O is spread over the registers of all.
    float m_i = -INFINITY, l_i = 0.f;
    float4 acc[ROWS][COLUMNS] = {};
    load_tile(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    // endregion

    // region: main loop
    // Causal: the loop ends with the last key that the tile's last row sees.
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
        // New: S_ij = Q_i K_j^T, ROWS x KEYS of it in each thread.
        float s_rmem[ROWS][KEYS] = {};
#pragma unroll 4
        for (int c = 0; c < CHUNKS; c++) {
            float4 k_rmem[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; j++) k_rmem[j] = k_smem[tx + LANES * j][c];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 q_rmem = q_smem[first_row + GROUPS * i][c];
#pragma unroll
                for (int j = 0; j < KEYS; j++) s_rmem[i][j] = dot(q_rmem, k_rmem[j], s_rmem[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < KEYS; j++) s_smem[first_row + GROUPS * i][tx + LANES * j] = s_rmem[i][j];
        __syncthreads();                                   // or a thread would read a row of S that is not whole yet
        // endregion

        // region: probabilities
        // New: a row of S per thread, in place.
        if (row < BLOCK_M) {
            float* s = s_smem[row];
            const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
            float m_new = m_i, l_tile = 0.f;
            // region: mask
            for (int n = 0; n < BLOCK_N; n++) {
                s[n] = n < keys ? s[n] * scale_log2 : -INFINITY;
                m_new = fmaxf(m_new, s[n]);
            }
            // endregion
            const float base = m_new == -INFINITY ? 0.f : m_new;
            const float correction = exp2_approx(m_i - base);
            for (int n = 0; n < BLOCK_N; n++) s[n] = exp2_approx(s[n] - base), l_tile += s[n];
            m_i = m_new, l_i = l_i * correction + l_tile;
            correction_smem[row] = correction;
        }
        __syncthreads();                                   // or a thread would use rows of P or corrections too early
        // endregion

        // region: output
        // New: O_i = correction * O_i + P_ij V_j, ROWS x COLUMNS chunks of it in each thread.
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[i][c] = scaled(correction_smem[first_row + GROUPS * i], acc[i][c]);
#pragma unroll 8
        for (int n = 0; n < BLOCK_N; n++) {
            float4 v_rmem[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) v_rmem[c] = v_smem[n][tx + LANES * c];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const float* p_smem = s_smem[first_row + GROUPS * i];
                    acc[i][c] = axpy(p_smem[n], v_rmem[c], acc[i][c]);
                }
        }
        // endregion
        // endregion
    }
    // endregion

    // region: store
    // New: a row's owner hands its sum to those that have the row's output.
    if (row < BLOCK_M) inverse_smem[row] = l_i > 0.f ? 1.f / l_i : l_i;      // no key seen: 0; NaN stays NaN
    if (row < BLOCK_M && m_start + row < p.seq_q)
        lse_gmem[row] = l_i == 0.f ? -INFINITY : (m_i + log2f(l_i)) * LN2;
    __syncthreads();                                       // or a thread would divide by a sum that is not there yet
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first_row + GROUPS * i;
        if (m_start + row >= p.seq_q) continue;
        float4* o = (float4*)(o_gmem + row * p.o_stride.row);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[tx + LANES * c] = scaled(inverse_smem[row], acc[i][c]);
    }
}
// endregion

// region: launch
extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);
    // New: more than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    cudaFuncSetAttribute(flash_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    flash_forward<<<grid, THREADS, sizeof(Shared), (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// endregion
