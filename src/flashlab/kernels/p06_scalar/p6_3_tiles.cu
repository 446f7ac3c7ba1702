// Phase 6, step 3: every tile in shared memory, and the block's threads share the work of a tile.
//
// A thread a row, as before, uses each number that it reads from shared memory once: one read a multiply-add. Now Q and
// S are tiles in shared memory too, and a thread computes 4 rows by 4 keys of S (and 4 rows by HEAD_DIM / 16 columns of
// O) at a time: 8 numbers read serve 16 multiply-adds.
//
// Compile with -DHEAD_DIM=64 or 128 and -DELEMENT=float.
#include "ptx.cuh"
#include "problem.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef ELEMENT
#define ELEMENT float
#endif
static_assert(sizeof(ELEMENT) == 4, "the kernels of phase 6 work on float32");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "HEAD_DIM must be 64 or 128");

constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;
constexpr int CHUNKS = HEAD_DIM / 4;                       // float4s in a row
constexpr int BLOCK_M = 64, BLOCK_N = HEAD_DIM == 64 ? 64 : 32;
// New: 16 x 16 threads. Thread (ty, tx) has the rows ty + 16 i, the keys tx + 16 j and the chunks tx + 16 c of a row.
constexpr int SIDE = 16, THREADS = SIDE * SIDE;
constexpr int ROWS = BLOCK_M / SIDE, KEYS = BLOCK_N / SIDE, COLUMNS = CHUNKS / SIDE;
// New: a row of Q or K is one float4 longer than its numbers: the same chunk of 8 neighbouring rows is then in 8
// different groups of banks. A row of S is one float longer, for the same reason.
struct Shared {
    float4 q[BLOCK_M][CHUNKS + 1], k[BLOCK_N][CHUNKS + 1], v[BLOCK_N][CHUNKS];
    float s[BLOCK_M][BLOCK_N + 1], correction[BLOCK_M], l[BLOCK_M];
};

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
__device__ __forceinline__ float4 scaled(float a, float4 b) { return make_float4(a * b.x, a * b.y, a * b.z, a * b.w); }
__device__ __forceinline__ float4 axpy(float a, float4 b, float4 c) {
    return make_float4(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y), fmaf(a, b.z, c.z), fmaf(a, b.w, c.w));
}

// A tile of ROWS rows into shared memory; only `rows` of them exist, the others become zeros. Neighbouring threads copy
// neighbouring chunks.
template <int ROWS, int PITCH>
__device__ __forceinline__ void load_tile(float4 (&tile_smem)[ROWS][PITCH], const float* tile_gmem, int64_t row_stride,
                                          int rows) {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const float4* from = (const float4*)(tile_gmem + row * row_stride) + chunk;
        tile_smem[row][chunk] = row < rows ? *from : make_float4(0, 0, 0, 0);
    }
}

__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(16) char shared_bytes[];
    Shared& shared = *(Shared*)shared_bytes;
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;

    // A block is one tile of Q. Causal: the last rows see the most keys, so they start first.
    const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M, head_index = blockIdx.x / m_blocks;
    const int m_block = blockIdx.x % m_blocks, m_start = (p.causal ? m_blocks - 1 - m_block : m_block) * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;                // causal: row i sees the keys up to i + diagonal
    const float scale_log2 = p.scale * LOG2E;              // exp(x) is computed as exp2(x * log2(e))
    const float* q_gmem = rows_of((const float*)p.q, p.q_stride, batch, head, m_start);   // [BLOCK_M, HEAD_DIM]
    const float* k_gmem = rows_of((const float*)p.k, p.k_stride, batch, kv_head, 0);      // [seq_k, HEAD_DIM]
    const float* v_gmem = rows_of((const float*)p.v, p.v_stride, batch, kv_head, 0);      // [seq_k, HEAD_DIM]
    float* o_gmem = rows_of((float*)p.o, p.o_stride, batch, head, m_start);               // [BLOCK_M, HEAD_DIM]
    float* lse_gmem = p.lse + (int64_t)head_index * p.seq_q + m_start;                    // [BLOCK_M]

    // New: the first BLOCK_M threads own a row's statistics; O is spread over the registers of all.
    float m_i = -INFINITY, l_i = 0.f;
    float4 acc[ROWS][COLUMNS] = {};
    load_tile(shared.q, q_gmem, p.q_stride.row, p.seq_q - m_start);

    // Causal: the loop ends with the last key that the tile's last row sees.
    const int n_end = p.causal ? min(p.seq_k, m_start + BLOCK_M + diagonal) : p.seq_k;
    for (int n_start = 0; n_start < n_end; n_start += BLOCK_N) {
        __syncthreads();                                   // nobody reads the last tiles any more
        load_tile(shared.k, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
        load_tile(shared.v, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        __syncthreads();                                   // the tiles are complete

        // New: S_ij = Q_i K_j^T, ROWS x KEYS of it in each thread.
        float s[ROWS][KEYS] = {};
#pragma unroll 4
        for (int c = 0; c < CHUNKS; c++) {
            float4 k_rmem[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; j++) k_rmem[j] = shared.k[tx + SIDE * j][c];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 q_rmem = shared.q[ty + SIDE * i][c];
#pragma unroll
                for (int j = 0; j < KEYS; j++) s[i][j] = dot(q_rmem, k_rmem[j], s[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < KEYS; j++) shared.s[ty + SIDE * i][tx + SIDE * j] = s[i][j];
        __syncthreads();                                   // S is complete

        // New: the tile's probabilities, in place, and the statistics: a row a thread.
        if (threadIdx.x < BLOCK_M) {
            const int row = threadIdx.x;
            const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
            float m_new = m_i, l_tile = 0.f;
            for (int n = 0; n < BLOCK_N; n++) {
                const float x = n < keys ? shared.s[row][n] * scale_log2 : -INFINITY;
                shared.s[row][n] = x, m_new = fmaxf(m_new, x);
            }
            const float base = m_new == -INFINITY ? 0.f : m_new;
            for (int n = 0; n < BLOCK_N; n++) {
                const float x = exp2_approx(shared.s[row][n] - base);
                shared.s[row][n] = x, l_tile += x;
            }
            const float correction = exp2_approx(m_i - base);
            m_i = m_new, l_i = l_i * correction + l_tile, shared.correction[row] = correction;
        }
        __syncthreads();                                   // P and the corrections are complete

        // New: O_i = correction * O_i + P_ij V_j, ROWS x COLUMNS chunks of it in each thread.
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[i][c] = scaled(shared.correction[ty + SIDE * i], acc[i][c]);
#pragma unroll 8
        for (int n = 0; n < BLOCK_N; n++) {
            float4 v_rmem[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) v_rmem[c] = shared.v[n][tx + SIDE * c];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) acc[i][c] = axpy(shared.s[ty + SIDE * i][n], v_rmem[c], acc[i][c]);
        }
    }

    // New: a row's owner tells its sum to those that have the row's output.
    if (threadIdx.x < BLOCK_M) {
        shared.l[threadIdx.x] = l_i;
        if (m_start + threadIdx.x < p.seq_q)
            lse_gmem[threadIdx.x] = l_i == 0.f ? -INFINITY : (m_i + log2f(l_i)) * LN2;
    }
    __syncthreads();                                       // the sums are complete
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = ty + SIDE * i;
        if (m_start + row >= p.seq_q) continue;
        const float sum = shared.l[row], inverse = sum > 0.f ? 1.f / sum : sum;    // no key seen: 0; NaN stays NaN
        float4* o = (float4*)(o_gmem + row * p.o_stride.row);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[tx + SIDE * c] = scaled(inverse, acc[i][c]);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------
extern "C" int64_t workspace_floats(const Problem*) { return 0; }

extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ((p->seq_q + BLOCK_M - 1) / BLOCK_M);
    // New: A kernel that wants more than 48 KB of shared memory has to ask for it.
    const int bytes = sizeof(Shared);
    if (int error = (int)cudaFuncSetAttribute(flash_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    flash_forward<<<grid, THREADS, bytes, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
