// Phase 6, step 5: the next tile is on its way while this one is worked on.
//
// cp.async copies from global to shared memory past the registers, and nobody waits for it. K's next tile arrives while
// P V is computed, V's while Q K^T is: no second buffer is needed.
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
constexpr int BLOCK_M = HEAD_DIM == 64 ? 128 : 64, BLOCK_N = HEAD_DIM == 64 ? 64 : 48;
// LANES neighbouring lanes share ROWS rows, and a warp has GROUPS such teams. Lane (ty, tx) of warp w has the rows
// WARP_ROWS w + ty + GROUPS i, the keys tx + LANES j and the chunks tx + LANES c of a row.
constexpr int LANES = HEAD_DIM == 64 ? 8 : 16, GROUPS = 32 / LANES, ROWS = 8, WARP_ROWS = GROUPS * ROWS;
constexpr int WARPS = BLOCK_M / WARP_ROWS, THREADS = 32 * WARPS, KEYS = BLOCK_N / LANES, COLUMNS = CHUNKS / LANES;
// A row of Q or K is one float4 longer than its numbers: the same chunk of 8 neighbouring rows is then in 8 different
// groups of banks.
struct Shared {
    float4 q[BLOCK_M][CHUNKS + 1], k[BLOCK_N][CHUNKS + 1], v[BLOCK_N][CHUNKS];
    float p[WARPS][WARP_ROWS][LANES];                      // LANES keys of P at a time, a warp's own
};

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
__device__ __forceinline__ float4 scaled(float a, float4 b) { return make_float4(a * b.x, a * b.y, a * b.z, a * b.w); }
__device__ __forceinline__ float4 axpy(float a, float4 b, float4 c) {
    return make_float4(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y), fmaf(a, b.z, c.z), fmaf(a, b.w, c.w));
}

// New: starts the copy of a tile of ROWS rows; only `rows` of them exist, the others become zeros. A copy of no bytes
// still needs a valid address.
template <int ROWS, int PITCH>
__device__ __forceinline__ void start_tile(float4 (&tile_smem)[ROWS][PITCH], const float* tile_gmem, int64_t row_stride,
                                           int rows) {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const float4* from = (const float4*)(tile_gmem + (row < rows ? row : 0) * row_stride) + chunk;
        cp_async<16>(smem_u32(&tile_smem[row][chunk]), from, row < rows ? 16 : 0);
    }
}

__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(16) char shared_bytes[];
    Shared& shared = *(Shared*)shared_bytes;
    const int warp = threadIdx.x / 32, ty = threadIdx.x % 32 / LANES, tx = threadIdx.x % LANES;
    const int first_row = warp * WARP_ROWS + ty;           // this thread's rows of the tile: first_row + GROUPS i

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

    // A row's maximum in every lane that shares the row; of its sum, each lane has the part of its own keys.
    float m_i[ROWS], l_i[ROWS] = {};
    float4 acc[ROWS][COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) m_i[i] = -INFINITY;

    // Causal: the loop ends with the last key that the tile's last row sees.
    const int n_end = p.causal ? min(p.seq_k, m_start + BLOCK_M + diagonal) : p.seq_k;
    // New: Q, K_0 and V_0 set out.
    if (n_end > 0) {
        start_tile(shared.q, q_gmem, p.q_stride.row, p.seq_q - m_start);
        start_tile(shared.k, k_gmem, p.k_stride.row, p.seq_k);
        cp_async_commit();
        start_tile(shared.v, v_gmem, p.v_stride.row, p.seq_k);
        cp_async_commit();
        cp_async_wait<1>();                                // this thread's part of Q and K_0 is here: the older group
        __syncthreads();                                   // everybody's is
    }
    for (int n_start = 0; n_start < n_end; n_start += BLOCK_N) {
        const int n_next = n_start + BLOCK_N;

        // S_ij = Q_i K_j^T, ROWS x KEYS of it in each thread.
        float s[ROWS][KEYS] = {};
#pragma unroll 2
        for (int c = 0; c < CHUNKS; c++) {
            float4 k_rmem[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; j++) k_rmem[j] = shared.k[tx + LANES * j][c];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 q_rmem = shared.q[first_row + GROUPS * i][c];
#pragma unroll
                for (int j = 0; j < KEYS; j++) s[i][j] = dot(q_rmem, k_rmem[j], s[i][j]);
            }
        }

        // New: K_j has been read; the next one sets out to take its place.
        cp_async_wait<0>();                                // this thread's part of V_j is here
        __syncthreads();                                   // everybody's is, and nobody reads K_j any more
        if (n_next < n_end) start_tile(shared.k, k_gmem + n_next * p.k_stride.row, p.k_stride.row, p.seq_k - n_next);
        cp_async_commit();

        // The mask, in the tiles that some row sees only a part of.
        if (n_start + BLOCK_N > p.seq_k || (p.causal && n_start + BLOCK_N > m_start + diagonal + 1)) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int row = first_row + GROUPS * i;
                const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
#pragma unroll
                for (int j = 0; j < KEYS; j++) s[i][j] = tx + LANES * j < keys ? s[i][j] : -INFINITY;
            }
        }

        // The maximum by shuffles; then the probabilities, the statistics, and O brought to the new maximum.
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float m_tile = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS; j++) m_tile = fmaxf(m_tile, s[i][j]);
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) m_tile = fmaxf(m_tile, __shfl_xor_sync(~0u, m_tile, step));
            const float m_new = fmaxf(m_i[i], m_tile * scale_log2), base = m_new == -INFINITY ? 0.f : m_new;
            const float correction = exp2_approx(m_i[i] - base);
            m_i[i] = m_new, l_i[i] *= correction;
#pragma unroll
            for (int j = 0; j < KEYS; j++) s[i][j] = exp2_approx(fmaf(s[i][j], scale_log2, -base)), l_i[i] += s[i][j];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[i][c] = scaled(correction, acc[i][c]);
        }

        // O_i += P_ij V_j, LANES keys at a time: each lane brings the column of P that it holds.
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            __syncwarp();                                  // nobody reads the last columns any more
#pragma unroll
            for (int i = 0; i < ROWS; i++) shared.p[warp][ty + GROUPS * i][tx] = s[i][j];
            __syncwarp();                                  // the columns are complete
#pragma unroll
            for (int n = 0; n < LANES; n += 4) {
                float4 v_rmem[4][COLUMNS];
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) v_rmem[e][c] = shared.v[LANES * j + n + e][tx + LANES * c];
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const float4 p_rmem = *(const float4*)&shared.p[warp][ty + GROUPS * i][n];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        acc[i][c] = axpy(p_rmem.x, v_rmem[0][c], acc[i][c]);
                        acc[i][c] = axpy(p_rmem.y, v_rmem[1][c], acc[i][c]);
                        acc[i][c] = axpy(p_rmem.z, v_rmem[2][c], acc[i][c]);
                        acc[i][c] = axpy(p_rmem.w, v_rmem[3][c], acc[i][c]);
                    }
                }
            }
        }

        // New: V_j has been read, and so on.
        cp_async_wait<0>();                                // this thread's part of the next K is here
        __syncthreads();                                   // everybody's is, and nobody reads V_j any more
        if (n_next < n_end) start_tile(shared.v, v_gmem + n_next * p.v_stride.row, p.v_stride.row, p.seq_k - n_next);
        cp_async_commit();
    }

    // The lanes that share a row add up their parts of its sum. Then the division, and the only store.
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float sum = l_i[i];
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int row = first_row + GROUPS * i;
        if (m_start + row >= p.seq_q) continue;
        const float inverse = sum > 0.f ? 1.f / sum : sum; // no key seen: 0; NaN stays NaN
        if (tx == 0) lse_gmem[row] = sum == 0.f ? -INFINITY : (m_i[i] + log2f(sum)) * LN2;
        float4* o = (float4*)(o_gmem + row * p.o_stride.row);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) o[tx + LANES * c] = scaled(inverse, acc[i][c]);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------
extern "C" int64_t workspace_floats(const Problem*) { return 0; }

extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ((p->seq_q + BLOCK_M - 1) / BLOCK_M);
    // A kernel that wants more than 48 KB of shared memory has to ask for it.
    const int bytes = sizeof(Shared);
    if (int error = (int)cudaFuncSetAttribute(flash_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    flash_forward<<<grid, THREADS, bytes, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
