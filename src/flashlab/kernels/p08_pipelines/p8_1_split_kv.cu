// Phase 8, step 1: tile MMA and tile warps, the keys divided over the warps (split-KV, as in FlashAttention-1).
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns 64 query
// rows and walks their keys 64 at a time. Each of its four warps multiplies all 64 rows by 16 of the keys. So a row is
// spread over the warps: its maximum and P go through shared memory. Then each warp computes a quarter of O's columns.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.
#include "ptx.cuh"
#include "problem.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef ELEMENT
#define ELEMENT __half
#endif
using T = ELEMENT;

constexpr int D = HEAD_DIM, BLOCK_M = 64, BLOCK_N = 64, WARPS = 4, THREADS = 32 * WARPS;
// New: a warp's accumulator tiles of 16 x 8: all rows, its quarter of the keys (S) and of the columns (O)
constexpr int M_TILES = BLOCK_M / 16, S_TILES = BLOCK_N / 8 / WARPS, O_TILES = D / 8 / WARPS;
constexpr int Q_TILE = BLOCK_M * D * 2, KV_TILE = BLOCK_N * D * 2;     // bytes
constexpr int P_TILE = BLOCK_M * BLOCK_N * 2, SHARED = Q_TILE + 2 * KV_TILE + P_TILE + WARPS * BLOCK_M * 4;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// Element (row, column) of a tile of shared memory, in bytes from its start: one row after the other.
__device__ __forceinline__ int at(int row, int column) { return (row * D + column) * 2; }

// Copies a tile of ROWS rows from global to shared memory in pieces of 16 bytes. Only `rows` rows exist: the rest is 0.
template <int ROWS>
__device__ __forceinline__ void load_tile(char* tile_smem, const T* tile_gmem, int64_t row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS * D / 8; i += THREADS) {
        const int row = (i + threadIdx.x) / (D / 8), column = (i + threadIdx.x) % (D / 8) * 8;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < rows) x = *(const uint4*)(tile_gmem + row * row_stride + column);
        *(uint4*)(tile_smem + at(row, column)) = x;
    }
}

__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char *q_smem = shared;                                     // [BLOCK_M, D]
    char *k_smem = q_smem + Q_TILE;                            // [BLOCK_N, D]
    char *v_smem = k_smem + KV_TILE;                           // [BLOCK_N, D]
    // New: what the warps exchange
    T* p_smem = (T*)(v_smem + KV_TILE);                        // [BLOCK_M, BLOCK_N]
    float* rows_smem = (float*)((char*)p_smem + P_TILE);       // [WARPS, BLOCK_M]: each warp's maximum, or sum
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

    // Which rows
    const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_key = warp * 8 * S_TILES, warp_column = warp * 8 * O_TILES;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of((const T*)p.q, p.q_stride, batch, head, m_start);        // [BLOCK_M, D]
    const T* k_gmem = rows_of((const T*)p.k, p.k_stride, batch, kv_head, 0);   // [seq_k, D]
    const T* v_gmem = rows_of((const T*)p.v, p.v_stride, batch, kv_head, 0);   // [seq_k, D]
    T* o_gmem = rows_of((T*)p.o, p.o_stride, batch, head, m_start);    // [BLOCK_M, D]

    // Which keys
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int tiles = (p.seq_k + BLOCK_N - 1) / BLOCK_N;
    if (p.causal) tiles = max(0, min(tiles, (m_start + BLOCK_M + diagonal + BLOCK_N - 1) / BLOCK_N));

    // c0 c1 | c2 c3: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[M_TILES][O_TILES][4] = {};                       // O, not yet divided by the sum
    float row_max[M_TILES][2], row_sum[M_TILES][2] = {};       // of the raw scores; of this lane's columns only
#pragma unroll
    for (int m = 0; m < M_TILES; m++) row_max[m][0] = row_max[m][1] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;

    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    for (int j = 0; j < tiles; j++) {
        __syncthreads();                                       // nobody reads tile j - 1 any more
        const int key = j * BLOCK_N;                           // the tile's first
        load_tile<BLOCK_N>(k_smem, k_gmem + key * p.k_stride.row, p.k_stride.row, p.seq_k - key);
        load_tile<BLOCK_N>(v_smem, v_gmem + key * p.v_stride.row, p.v_stride.row, p.seq_k - key);
        __syncthreads();                                       // every thread's part of Q, K_j and V_j is here

        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[M_TILES][S_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t b[S_TILES][2];                            // New: a B fragment feeds M_TILES MMAs
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
                ldmatrix_x2(b[n], smem_u32(k_smem + at(warp_key + n * 8 + lane % 8, k * 16 + lane / 8 % 2 * 8)));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                uint32_t a[4];                                 // A: 16 rows x 16 columns of Q
                ldmatrix_x4(a, smem_u32(q_smem + at(m * 16 + lane % 16, k * 16 + lane / 16 * 8)));
#pragma unroll
                for (int n = 0; n < S_TILES; n++) mma_m16n8k16<T>(s[m][n], a, b[n][0], b[n][1]);
            }
        }

        // The row maxima
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {                      // row g + 8 h
                const int row = m * 16 + g + h * 8;
                const int last_key = p.causal ? min(p.seq_k - 1, m_start + row + diagonal) : p.seq_k - 1;
                float x = -INFINITY;
#pragma unroll
                for (int n = 0; n < S_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (key + warp_key + n * 8 + t * 2 + e > last_key) s[m][n][2 * h + e] = -INFINITY;
                        x = fmaxf(x, s[m][n][2 * h + e]);
                    }
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));      // the warp's part of a row lives in a quad of lanes
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                if (t == 0) rows_smem[warp * BLOCK_M + row] = x;       // New: one part of four
            }
        __syncthreads();                                       // New: every warp's maxima are here

        // What was summed under the old maximum is brought under the new one; P = 2^(S - maximum)
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = m * 16 + g + h * 8;
                float new_max = row_max[m][h];
#pragma unroll
                for (int w = 0; w < WARPS; w++) new_max = fmaxf(new_max, rows_smem[w * BLOCK_M + row]);
                const float base = new_max == -INFINITY ? 0.f : new_max;       // -inf - (-inf) would be NaN
                const float correction = exp2_approx((row_max[m][h] - base) * scale_log2);
                row_max[m][h] = new_max;
                row_sum[m][h] *= correction;
#pragma unroll
                for (int n = 0; n < O_TILES; n++) acc[m][n][2 * h] *= correction, acc[m][n][2 * h + 1] *= correction;
#pragma unroll
                for (int n = 0; n < S_TILES; n++) {
                    const float x = exp2_approx(fmaf(s[m][n][2 * h], scale_log2, -base * scale_log2));
                    const float y = exp2_approx(fmaf(s[m][n][2 * h + 1], scale_log2, -base * scale_log2));
                    row_sum[m][h] += x + y;
                    *(uint32_t*)(p_smem + row * BLOCK_N + warp_key + n * 8 + t * 2) = pack<T>(x, y);
                }
            }
        __syncthreads();                                       // New: every warp's part of P is here

        // O += P V. Now a warp needs all keys: P comes back from shared memory.
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) {
            uint32_t b[O_TILES][2];                            // B: 16 keys x 8 columns of V
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                ldmatrix_x2_trans(b[n], smem_u32(v_smem + at(k * 16 + lane % 16, warp_column + n * 8)));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                uint32_t a[4];                                 // New: A: 16 rows x 16 keys of P
                ldmatrix_x4(a, smem_u32(p_smem + (m * 16 + lane % 16) * BLOCK_N + k * 16 + lane / 16 * 8));
#pragma unroll
                for (int n = 0; n < O_TILES; n++) mma_m16n8k16<T>(acc[m][n], a, b[n][0], b[n][1]);
            }
        }
    }

    // O and lse. Each lane stores its pairs of columns.
    const int64_t lse_row = (int64_t)head_index * p.seq_q + m_start;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 1);
            row_sum[m][h] += __shfl_xor_sync(~0u, row_sum[m][h], 2);
            if (t == 0) rows_smem[warp * BLOCK_M + m * 16 + g + h * 8] = row_sum[m][h];
        }
    __syncthreads();                                           // New: every warp's sums are here
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = m * 16 + g + h * 8;
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += rows_smem[w * BLOCK_M + row];
            const float inverse = sum > 0.f ? 1.f / sum : sum;         // a row that sees no key: 0; NaN stays NaN
            if (m_start + row < p.seq_q) {
                if (t == 0 && warp == 0)
                    p.lse[lse_row + row] = sum == 0.f ? -INFINITY : (row_max[m][h] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
                for (int n = 0; n < O_TILES; n++)
                    *(uint32_t*)(o_gmem + row * p.o_stride.row + warp_column + n * 8 + t * 2) =
                        pack<T>(acc[m][n][2 * h] * inverse, acc[m][n][2 * h + 1] * inverse);
            }
        }
}

// ---- host -----------------------------------------------------------------------------------------------------------
extern "C" int64_t workspace_floats(const Problem* p) { return 0; }

// 0, or a cudaError
extern "C" int forward(const Problem* p, void* stream) {
    const int64_t blocks = (int64_t)p->batch * p->heads * ((p->seq_q + BLOCK_M - 1) / BLOCK_M);
    if (blocks == 0) return 0;
    const int error = (int)cudaFuncSetAttribute(flash_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error) return error;
    LAUNCH(flash_forward, (unsigned)blocks, THREADS, SHARED, stream, *p);
    return (int)cudaGetLastError();
}
