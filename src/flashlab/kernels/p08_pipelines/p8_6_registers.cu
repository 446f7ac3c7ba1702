// Phase 8, step 6: Q stays in registers, and every ldmatrix loads four 8x8 tiles.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns 64 query rows
// and walks their keys 64 at a time; a warp owns 16 of the rows and all their keys. Tile j + STAGES - 1 is copied while
// tile j is worked on. Q is the same for every tile: its fragments are loaded once. Those of K and V are loaded two at
// a time, with ldmatrix.x4.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16, -DSTAGES=1, 2 or 3.
#include "ptx.cuh"
#include "problem.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef ELEMENT
#define ELEMENT __half
#endif
#ifndef STAGES
#define STAGES 2
#endif
using T = ELEMENT;

constexpr int D = HEAD_DIM, BLOCK_M = 64, BLOCK_N = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int S_TILES = BLOCK_N / 8, O_TILES = D / 8;          // accumulator tiles of 16 x 8
constexpr int Q_TILE = BLOCK_M * D * 2, KV_TILE = BLOCK_N * D * 2;     // bytes
constexpr int SHARED = Q_TILE + 2 * STAGES * KV_TILE;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8.
__device__ __forceinline__ int at(int row, int column) {
    return row * D * 2 + (column / 8 ^ row % 8) * 16;          // the XOR. Writer and reader both go through here
}

// Copies a tile of ROWS rows from global to shared memory in pieces of 16 bytes. Only `rows` rows exist: the rest is 0.
template <int ROWS>
__device__ __forceinline__ void load_tile(char* tile_smem, const T* tile_gmem, int64_t row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS * D / 8; i += THREADS) {
        const int row = (i + threadIdx.x) / (D / 8), column = (i + threadIdx.x) % (D / 8) * 8;
        // 0 bytes are read of a row that does not exist; but its address has to be a valid one all the same.
        const bool exists = row < rows;
        const T* from = tile_gmem + (exists ? row : 0) * row_stride + column;
        cp_async<16>(smem_u32(tile_smem + at(row, column)), from, exists ? 16 : 0);
    }
}

__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char *q_smem = shared;                                     // [BLOCK_M, D]
    char *k_smem = q_smem + Q_TILE;                            // [STAGES, BLOCK_N, D]
    char *v_smem = k_smem + STAGES * KV_TILE;                  // [STAGES, BLOCK_N, D]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

    // Which rows
    const int m_blocks = (p.seq_q + BLOCK_M - 1) / BLOCK_M;
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M, warp_row = warp * 16;
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
    float acc[O_TILES][4] = {};                                // O, not yet divided by the sum
    float row_max[2] = {-INFINITY, -INFINITY};                 // of row g, of row g + 8: of the raw scores
    float row_sum[2] = {0.f, 0.f};                             // of this lane's columns only
    const float scale_log2 = p.scale * LOG2E;

    // The copies of one tile are one group. Past the last tile it is an empty one, so that the count goes on.
    auto load_kv = [&](int j) {
        const int key = j * BLOCK_N, stage = j % STAGES * KV_TILE;
        if (j < tiles) {
            load_tile<BLOCK_N>(k_smem + stage, k_gmem + key * p.k_stride.row, p.k_stride.row, p.seq_k - key);
            load_tile<BLOCK_N>(v_smem + stage, v_gmem + key * p.v_stride.row, p.v_stride.row, p.seq_k - key);
        }
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();                                         // New: Q is a group of its own
    for (int j = 0; j < STAGES - 1; j++) load_kv(j);

    uint32_t q_rmem[D / 16][4];                                // New: A: 16 rows x D columns of Q
    cp_async_wait<STAGES - 1>();
    __syncthreads();                                           // every thread's part of Q is here
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * 16 + lane / 16 * 8)));

    for (int j = 0; j < tiles; j++) {
        const int key = j * BLOCK_N, stage = j % STAGES * KV_TILE;     // the tile's first key; where it lies
        if (STAGES == 1) {
            __syncthreads();                                   // nobody reads tile j - 1 any more
            load_kv(j);
        }
        cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();         // this thread's part of K_j and V_j is here
        __syncthreads();                                       // every thread's is; nobody reads tile j - 1 any more
        if (STAGES > 1) load_kv(j + STAGES - 1);               // into the stage of tile j - 1

        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[S_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                uint32_t b[4];                                 // New: B twice: 16 columns x 16 keys
                const int row = n * 16 + lane % 8 + lane / 16 * 8, column = k * 16 + lane / 8 % 2 * 8;
                ldmatrix_x4(b, smem_u32(k_smem + stage + at(row, column)));
                mma_m16n8k16<T>(s[2 * n], q_rmem[k], b[0], b[1]);
                mma_m16n8k16<T>(s[2 * n + 1], q_rmem[k], b[2], b[3]);
            }

        // The row maxima
        float new_max[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {                          // row g + 8 h
            const int row = m_start + warp_row + g + h * 8;
            const int last_key = p.causal ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = row_max[h];
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (key + n * 8 + t * 2 + e > last_key) s[n][2 * h + e] = -INFINITY;
                    x = fmaxf(x, s[n][2 * h + e]);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // a row lives in the four lanes of a quad
            new_max[h] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        }

        // What was summed under the old maximum is brought under the new one
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float base = new_max[h] == -INFINITY ? 0.f : new_max[h];     // -inf - (-inf) would be NaN
            const float correction = exp2_approx((row_max[h] - base) * scale_log2);
            row_max[h] = new_max[h];
            row_sum[h] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) acc[n][2 * h] *= correction, acc[n][2 * h + 1] *= correction;
        }

        // P = 2^(S - maximum)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float base = (row_max[h] == -INFINITY ? 0.f : row_max[h]) * scale_log2;
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    s[n][2 * h + e] = exp2_approx(fmaf(s[n][2 * h + e], scale_log2, -base));
                    row_sum[h] += s[n][2 * h + e];
                }
        }

        // O += P V. Two neighbouring accumulator tiles of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) {
            const float(&c)[4] = s[2 * k], (&d)[4] = s[2 * k + 1];
            const uint32_t a[4] = {pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(d[0], d[1]), pack<T>(d[2], d[3])};
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];                                 // New: B twice: 16 keys x 16 columns of V
                ldmatrix_x4_trans(b, smem_u32(v_smem + stage + at(k * 16 + lane % 16, n * 16 + lane / 16 * 8)));
                mma_m16n8k16<T>(acc[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(acc[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    // O and lse. Each lane stores its pairs of columns.
    const int64_t lse_row = (int64_t)head_index * p.seq_q + m_start;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = row_sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        const int row = warp_row + g + h * 8;
        if (m_start + row < p.seq_q) {
            if (t == 0) p.lse[lse_row + row] = sum == 0.f ? -INFINITY : (row_max[h] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                *(uint32_t*)(o_gmem + row * p.o_stride.row + n * 8 + t * 2) =
                    pack<T>(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
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
