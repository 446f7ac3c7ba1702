// Phase 7: the naive tensor-core kernel. One warp, one small tile at a time.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block is one warp. It owns
// 16 query rows and walks all their keys, 16 at a time: S is two MMA tiles, which are, rounded, the A fragment of P.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

constexpr int WARPS = 1, THREADS = WARPS * WARP_SIZE;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 16;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
constexpr int SHARED = Q_BYTES + 2 * KV_BYTES;
// endregion

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start: one row after the other.
__device__ __forceinline__ int at(int row, int column) { return (row * HEAD_DIM + column) * 2; }
// endregion

// region: copy a tile
// Copies a tile of ROWS rows from global to shared memory, a chunk per thread and pass. Only `rows` of them exist: the
// others become zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(char* tile_smem, const T* tile_gmem, int64_t row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        const int row = (i + threadIdx.x) / CHUNKS, column = (i + threadIdx.x) % CHUNKS * 8;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < rows) x = *(const uint4*)(tile_gmem + row * row_stride + column);
        *(uint4*)(tile_smem + at(row, column)) = x;
    }
}
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char* q_smem = shared;                                     // [BLOCK_M, HEAD_DIM]
    char* k_smem = q_smem + Q_BYTES;                           // [BLOCK_N, HEAD_DIM]
    char* v_smem = k_smem + KV_BYTES;                          // [BLOCK_N, HEAD_DIM]
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_row = warp * MMA_M;                         // the warp's first, in the tile
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);  // [BLOCK_M, HEAD_DIM]
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);        // [BLOCK_M, HEAD_DIM]
    // endregion

    // region: which keys
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int tiles = ceil_div(p.seq_k, BLOCK_N);
    if (p.causal) tiles = max(0, min(tiles, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));
    // endregion

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[O_TILES][4] = {};                                // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

    // region: main loop
    // region: loop head
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    for (int j = 0; j < tiles; j++) {
        const int n_start = j * BLOCK_N;                       // the tile's first key
        // endregion
        // region: load K and V
        __syncthreads();                                       // or one would overwrite tile j - 1 while another reads
        load_tile<BLOCK_N>(k_smem, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
        load_tile<BLOCK_N>(v_smem, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        __syncthreads();                                       // or a thread would read what another has not copied yet
        // endregion

        // region: one tile
        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[S_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
            uint32_t a[4];                                     // A: 16 rows x 16 columns of Q
            ldmatrix_x4(a, smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
#pragma unroll
            for (int n = 0; n < S_TILES; n++) {
                uint32_t b[2];                                 // B: 16 columns x 8 keys
                ldmatrix_x2(b, smem_u32(k_smem + at(n * MMA_N + lane % 8, k * MMA_K + lane / 8 % 2 * 8)));
                mma_m16n8k16<T>(s[n], a, b[0], b[1]);
            }
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
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = s[n][2 * r + e];
                    if (n_start + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;
                    x = fmaxf(x, c);
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
            for (int n = 0; n < O_TILES; n++) acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction;
        }
        // endregion

        // region: probabilities
        // P = exp(S - maximum), in place
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = s[n][2 * r + e];
                    c = exp2_approx(fmaf(c, scale_log2, -base));
                    l_i[r] += c;
                }
        }
        // endregion

        // region: output
        // O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            const float(&c)[4] = s[2 * k], (&d)[4] = s[2 * k + 1];
            const uint32_t a[4] = {pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(d[0], d[1]), pack<T>(d[2], d[3])};
#pragma unroll
            for (int n = 0; n < O_TILES; n++) {
                uint32_t b[2];                                 // B: 16 keys x 8 columns of V
                ldmatrix_x2_trans(b, smem_u32(v_smem + at(k * MMA_K + lane % 16, n * MMA_N)));
                mma_m16n8k16<T>(acc[n], a, b[0], b[1]);
            }
        }
        // endregion
        // endregion
    }
    // endregion

    // region: store
    // O and lse. Each lane stores its pairs of columns.
    const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;         // of lse [batch, heads, seq_q]
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) {
        const int row = warp_row + g + r * 8;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;     // a row that sees no key: 0; NaN stays NaN
        if (m_start + row < p.seq_q) {
            if (t == 0) p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + t * 2) =
                    pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
        }
    }
}
// endregion

// region: launch
extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    cudaFuncSetAttribute(flash_forward, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    flash_forward<<<grid, THREADS, SHARED, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// endregion
