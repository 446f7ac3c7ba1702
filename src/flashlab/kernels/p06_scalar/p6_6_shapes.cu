// Phase 6, step 6: the tile's shape follows the problem and the device.
//
// A multiprocessor hides the latency of one warp behind the work of others. Step 5 has 4 warps per block. At
// HEAD_DIM 64, where its grid has less than 1.5 blocks per multiprocessor, 16 lanes share a row: blocks of 64 rows,
// and twice as many.
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
// New: the tile's shape is a parameter. LANES neighbouring lanes share ROWS rows, and a warp has GROUPS such teams. A
// lane has the rows first_row + GROUPS i, the keys tx + LANES j and the chunks tx + LANES c of a row.
template <int LANES_, int BLOCK_M_, int BLOCK_N_> struct Tile {
    static constexpr int LANES = LANES_, GROUPS = WARP_SIZE / LANES, BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_;
    static constexpr int ROWS = 8, WARP_ROWS = GROUPS * ROWS, WARPS = BLOCK_M / WARP_ROWS, THREADS = WARPS * WARP_SIZE;
    static constexpr int KEYS = BLOCK_N / LANES, COLUMNS = CHUNKS / LANES;
    // A row of Q or K is one float4 longer than its numbers: the same chunk of 8 neighbouring rows is then in 8
    // different groups of banks.
    struct Shared {
        float4 q[BLOCK_M][CHUNKS + 1], k[BLOCK_N][CHUNKS + 1], v[BLOCK_N][CHUNKS];
        float p[WARPS][WARP_ROWS][LANES];                  // LANES keys of P at a time; a warp has its own rows
    };
};
#include "p06_scalar/arithmetic.cuh"
// endregion

// region: copy a tile
// Starts the copy of a tile of ROWS rows; only `rows` of them exist, the others become zeros. A copy of no bytes
// still needs a valid address.
template <int ROWS, int PITCH>
__device__ __forceinline__ void start_tile(float4 (&tile_smem)[ROWS][PITCH], const float* tile_gmem, int64_t row_stride,
                                           int rows) {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += blockDim.x) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const float4* from = (const float4*)(tile_gmem + (row < rows ? row : 0) * row_stride) + chunk;
        // region: copy a chunk
        cp_async<16>(smem_u32(&tile_smem[row][chunk]), from, row < rows ? 16 : 0);
        // endregion
    }
}
// endregion

// region: shared memory
template <class Tile> __global__ void __launch_bounds__(Tile::THREADS) flash_forward(const Problem p) {
    constexpr int LANES = Tile::LANES, GROUPS = Tile::GROUPS, ROWS = Tile::ROWS, WARP_ROWS = Tile::WARP_ROWS;
    constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N, KEYS = Tile::KEYS, COLUMNS = Tile::COLUMNS;
    extern __shared__ __align__(16) char shared_bytes[];
    auto& [q_smem, k_smem, v_smem, p_smem] = *(typename Tile::Shared*)shared_bytes;
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
    const int warp = threadIdx.x / WARP_SIZE, ty = threadIdx.x % WARP_SIZE / LANES;
    const int first_row = warp * WARP_ROWS + ty;           // this thread's rows of the tile: first_row + GROUPS i
    const int tx = threadIdx.x % LANES;
    // endregion

    // region: state
    // A row's maximum in every lane that shares the row; of its sum, each lane has the part of its own keys.
    float m_i[ROWS], l_i[ROWS] = {};
    float4 acc[ROWS][COLUMNS] = {};
    for (int i = 0; i < ROWS; i++) m_i[i] = -INFINITY;
    // endregion

    // region: main loop
    // Causal: the loop ends with the last key that the tile's last row sees.
    const int n_end = p.causal ? min(p.seq_k, m_start + BLOCK_M + diagonal) : p.seq_k;
    // region: first copies
    // Q, K_0 and V_0 set out. V_0 is a group of its own: it may arrive later.
    if (n_end > 0) {
        start_tile(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
        start_tile(k_smem, k_gmem, p.k_stride.row, p.seq_k);
        cp_async_commit();
        start_tile(v_smem, v_gmem, p.v_stride.row, p.seq_k);
        cp_async_commit();
        cp_async_wait<1>();                                // this thread's part of Q and K_0 is here: the older group
        __syncthreads();                                   // or a thread would read another's part that is still coming
    }
    // endregion
    for (int n_start = 0; n_start < n_end; n_start += BLOCK_N) {
        const int n_next = n_start + BLOCK_N;

        // region: one tile
        // region: scores
        // S_ij = Q_i K_j^T, ROWS x KEYS of it in each thread.
        float s_rmem[ROWS][KEYS] = {};
#pragma unroll 2
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
        // endregion

        // region: next K
        // K_j has been read; the next one sets out to take its place.
        cp_async_wait<0>();                                // this thread's part of V_j is here
        __syncthreads();                                   // or others' parts of V_j would be missing, and K_j in use
        if (n_next < n_end) start_tile(k_smem, k_gmem + n_next * p.k_stride.row, p.k_stride.row, p.seq_k - n_next);
        cp_async_commit();
        // endregion

        // region: mask
        // In the tiles that some row sees only a part of.
        if (n_start + BLOCK_N > p.seq_k || (p.causal && n_start + BLOCK_N > m_start + diagonal + 1)) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const int row = first_row + GROUPS * i;
                const int keys = p.causal ? min(p.seq_k, m_start + row + diagonal + 1) - n_start : p.seq_k - n_start;
#pragma unroll
                for (int j = 0; j < KEYS; j++) s_rmem[i][j] = tx + LANES * j < keys ? s_rmem[i][j] : -INFINITY;
            }
        }
        // endregion

        // region: probabilities
        // The maximum by shuffles; then the probabilities, the statistics, and O brought to the new maximum.
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float m_tile = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS; j++) m_tile = fmaxf(m_tile, s_rmem[i][j]);
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) m_tile = fmaxf(m_tile, __shfl_xor_sync(~0u, m_tile, step));
            const float m_new = fmaxf(m_i[i], m_tile * scale_log2), base = m_new == -INFINITY ? 0.f : m_new;
            const float correction = exp2_approx(m_i[i] - base);
            m_i[i] = m_new, l_i[i] *= correction;
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                s_rmem[i][j] = exp2_approx(fmaf(s_rmem[i][j], scale_log2, -base)), l_i[i] += s_rmem[i][j];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) acc[i][c] = scaled(correction, acc[i][c]);
        }
        // endregion

        // region: output
        // O_i += P_ij V_j, LANES keys at a time: each lane brings the column of P that it holds.
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            __syncwarp();                                  // or a lane would overwrite columns that another still reads
#pragma unroll
            for (int i = 0; i < ROWS; i++) p_smem[warp][ty + GROUPS * i][tx] = s_rmem[i][j];
            __syncwarp();                                  // or a lane would read columns that are not written yet
#pragma unroll
            for (int n = 0; n < LANES; n += 4) {
                float4 v_rmem[4][COLUMNS];
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) v_rmem[e][c] = v_smem[LANES * j + n + e][tx + LANES * c];
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const float4 p_rmem = *(const float4*)&p_smem[warp][ty + GROUPS * i][n];
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
        // endregion

        // region: next V
        // V_j has been read, and so on.
        cp_async_wait<0>();                                // this thread's part of the next K is here
        __syncthreads();                                   // or others' parts of it would be missing, and V_j in use
        if (n_next < n_end) start_tile(v_smem, v_gmem + n_next * p.v_stride.row, p.v_stride.row, p.seq_k - n_next);
        cp_async_commit();
        // endregion
        // endregion
    }
    // endregion

    // region: store
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
// endregion

// region: launch
template <class Tile> static int launch(const Problem& p, void* stream) {    // New: for one tile
    const unsigned grid = p.batch * p.heads * ceil_div(p.seq_q, Tile::BLOCK_M);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    const auto kernel = flash_forward<Tile>;
    const int bytes = sizeof(typename Tile::Shared);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, Tile::THREADS, bytes, (cudaStream_t)stream>>>(p);
    return (int)cudaGetLastError();
}

// New: which tile. Wide outer products need the fewest reads from shared memory. At HEAD_DIM 64 a grid with less than
// 1.5 such blocks per multiprocessor gets smaller ones, at 128 a device with too little shared memory for a large one.
extern "C" int forward(const Problem* p, void* stream) {
#if HEAD_DIM == 64
    const int blocks = p->batch * p->heads * ceil_div(p->seq_q, 128);
    return 2 * blocks >= 3 * p->sms ? launch<Tile<8, 128, 64>>(*p, stream) : launch<Tile<16, 64, 64>>(*p, stream);
#else
    int device = 0, most = 0;                              // bytes of shared memory that a block may have
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    using Large = Tile<16, 128, 64>;
    return most >= (int)sizeof(Large::Shared) ? launch<Large>(*p, stream) : launch<Tile<16, 64, 48>>(*p, stream);
#endif
}
// endregion
