// Phase 9, step 5: a fragment is loaded one step before its MMAs.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns 128 query rows
// and walks their keys backwards, 64 at a time; a warp owns 32 of the rows and all their keys. In Q K^T every ldmatrix
// used to be followed at once by the MMAs that wait for it; now the fragments of the next step are on their way while
// this step's MMAs are issued.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE, STAGES = 2;
constexpr int M_TILES = 2, BLOCKS_PER_SM = 2;                  // MMA tiles of 16 rows per warp
constexpr bool Q_IN_REGISTERS = M_TILES * HEAD_DIM <= 128;     // there is room for no more
constexpr int BLOCK_M = WARPS * M_TILES * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2 * M_TILES;                     // g, g + 8, g + 16 ...: row r % 2 of tile r / 2
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
// How far the row maximum may lag behind, in log2 units: P stays below 2^8, far from fp16's 65504.
constexpr float RESCALE_ABOVE = 8.f;
constexpr int SHARED = Q_BYTES + 2 * STAGES * KV_BYTES;
#include "p09_past_flash_attention_2/copies.cuh"
// endregion

// region: shared memory
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_BYTES;                  // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_row = warp * M_TILES * MMA_M;               // the warp's first, in the tile
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const T* q_gmem = rows_of(p.q, p.q_stride, batch, head, m_start);  // [BLOCK_M, HEAD_DIM]
    const T* k_gmem = rows_of(p.k, p.k_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    const T* v_gmem = rows_of(p.v, p.v_stride, batch, kv_head, 0);     // [seq_k, HEAD_DIM]
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);        // [BLOCK_M, HEAD_DIM]
    // endregion

    // region: which keys
    // Tiles 0 .. end - 1; from tile `full` on, some row of the block does not see every key.
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int end = ceil_div(p.seq_k, BLOCK_N), full = p.seq_k / BLOCK_N;
    if (CAUSAL) {
        end = max(0, min(end, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));
        full = max(0, min(full, (m_start + 1 + diagonal) / BLOCK_N));
    }
    // endregion

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[M_TILES][O_TILES][4] = {};                       // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

    // region: addresses
    // What this lane gives to ldmatrix, of the first 16 rows and columns
    const uint32_t q_lane = q_smem + at(warp_row + lane % 16, lane / 16 * 8);
    const uint32_t k_lane = k_smem + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const uint32_t v_lane = v_smem + at(lane % 16, lane / 16 * 8);

    // This thread's chunk of the tiles to copy, from and to
    const int64_t key = (int64_t)(end - 1) * BLOCK_N + chunk_row();
    const T* q_from = q_gmem + chunk_row() * p.q_stride.row + chunk_column();
    const T* k_next = k_gmem + key * p.k_stride.row + chunk_column();
    const T* v_next = v_gmem + key * p.v_stride.row + chunk_column();
    const uint32_t chunk = at(chunk_row(), chunk_column()), k_to = k_smem + chunk, v_to = v_smem + chunk;
    // endregion

    // region: first copies
    copy_part<BLOCK_M>(q_smem + chunk, q_from, p.q_stride.row, p.seq_q - m_start);
    if (end > 0) {
        copy_part<BLOCK_N>(k_to, k_next, p.k_stride.row, p.seq_k - (end - 1) * BLOCK_N);
        copy_part<BLOCK_N>(v_to, v_next, p.v_stride.row, p.seq_k - (end - 1) * BLOCK_N);
    }
    cp_async_commit();
    // endregion

    // region: Q in registers
    // A: 16 M_TILES rows x HEAD_DIM, or twice 16, columns of Q
    uint32_t q_rmem[Q_IN_REGISTERS ? HEAD_DIM / MMA_K : 2][M_TILES][4];
    auto load_q = [&](uint32_t(&a)[M_TILES][4], int k) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) ldmatrix_x4(a[m], (q_lane ^ (k * 32)) + m * MMA_M * ROW_BYTES);
    };
    cp_async_wait<0>();                                        // this thread's part of Q is here
    __syncthreads();                                           // or others' parts would be missing
#pragma unroll
    for (int k = 0; Q_IN_REGISTERS && k < HEAD_DIM / MMA_K; k++) load_q(q_rmem[k], k);
    // endregion

    // region: main loop
    auto tile = [&](int j, auto is_masked) {                   // the body of the loop, compiled twice
        constexpr bool MASKED = decltype(is_masked)::value;
        // region: load K and V
        const uint32_t stage = (end - 1 - j) & 1 ? KV_BYTES : 0;
        cp_async_wait<0>();                                    // this thread's part of K_j and V_j is here
        __syncthreads();                                       // or others' parts would be missing, tile j + 1 in use
        if (j > 0) {                                           // into the stage of tile j + 1, by running pointers
            k_next -= BLOCK_N * p.k_stride.row, v_next -= BLOCK_N * p.v_stride.row;
            copy_tile<BLOCK_N>(k_to + (KV_BYTES - stage), k_next, p.k_stride.row);
            copy_tile<BLOCK_N>(v_to + (KV_BYTES - stage), v_next, p.v_stride.row);
        }
        cp_async_commit();
        // endregion

        // region: one tile
        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[M_TILES][S_TILES][4] = {};
        uint32_t b[2][4];                                      // New: B twice: 16 columns x 16 keys; and the next ones
        if (!Q_IN_REGISTERS) load_q(q_rmem[0], 0);
        ldmatrix_x4(b[0], k_lane + stage);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
            const auto& a = q_rmem[Q_IN_REGISTERS ? k : k % 2];
            if (!Q_IN_REGISTERS && k + 1 < HEAD_DIM / MMA_K) load_q(q_rmem[(k + 1) % 2], k + 1);
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                const int step = k * (S_TILES / 2) + n;        // New
                const int next_k = (step + 1) / (S_TILES / 2), next_n = (step + 1) % (S_TILES / 2);
                const uint32_t next = (k_lane ^ (next_k * 32)) + stage + next_n * 16 * ROW_BYTES;
                if (next_k < HEAD_DIM / MMA_K) ldmatrix_x4(b[(step + 1) % 2], next);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {            // one fragment of K, M_TILES of Q
                    mma_m16n8k16<T>(s[m][2 * n], a[m], b[step % 2][0], b[step % 2][1]);
                    mma_m16n8k16<T>(s[m][2 * n + 1], a[m], b[step % 2][2], b[step % 2][3]);
                }
            }
        }
        // endregion

        // region: row maxima
        float m_new[ROWS_PER_LANE];
        bool moved = false;
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = m_start + warp_row + g + r * 8;
            const int last_key = CAUSAL ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
            float x = m_i[r];
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = s[r / 2][n][r % 2 * 2 + e];
                    if (MASKED && j * BLOCK_N + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;
                    x = fmaxf(x, c);
                }
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));          // a row lives in the four lanes of a quad
            m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            moved |= (m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE;         // (NaN is not above)
        }
        // endregion

        // region: rescale
        // When some row needs it, what was summed under the old maximum is brought under the new one
        if (__any_sync(~0u, moved)) {
            // region: correction
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];     // -inf - (-inf) would be NaN
                const float correction = exp2_approx((m_i[r] - base) * scale_log2);
                m_i[r] = m_new[r], l_i[r] *= correction;
#pragma unroll
                for (int n = 0; n < O_TILES; n++)
                    acc[r / 2][n][r % 2 * 2] *= correction, acc[r / 2][n][r % 2 * 2 + 1] *= correction;
            }
            // endregion
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
                    float& c = s[r / 2][n][r % 2 * 2 + e];
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
            uint32_t a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                const float(&c)[4] = s[m][2 * k], (&d)[4] = s[m][2 * k + 1];
                a[m][0] = pack<T>(c[0], c[1]), a[m][1] = pack<T>(c[2], c[3]);
                a[m][2] = pack<T>(d[0], d[1]), a[m][3] = pack<T>(d[2], d[3]);
            }
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 keys x 16 columns of V
                ldmatrix_x4_trans(b, (v_lane ^ (n * 32)) + stage + k * MMA_K * ROW_BYTES);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(acc[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
        // endregion
        // endregion
    };
    int j = end - 1;
    for (; j >= full; j--) tile(j, std::true_type{});          // the masked tiles
    for (; j >= 0; j--) tile(j, std::false_type{});            // the full ones
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
            const float x = acc[r / 2][n][r % 2 * 2] * inverse, y = acc[r / 2][n][r % 2 * 2 + 1] * inverse;
            *(uint32_t*)(shared + at(row, n * MMA_N) + t * 4) = pack<T>(x, y);
        }
    }
    __syncwarp();                                              // or a lane would read what another has not written
#pragma unroll
    for (int i = lane; i < M_TILES * MMA_M * CHUNKS; i += WARP_SIZE) {     // a warp stores the rows that it wrote
        const int row = warp_row + i / CHUNKS, column = i % CHUNKS * 8;
        if (m_start + row < p.seq_q)
            *(uint4*)(o_gmem + row * p.o_stride.row + column) = *(const uint4*)(shared + at(row, column));
    }
}
// endregion

// region: launch
extern "C" int forward(const Problem* p, void* stream) {
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    const auto kernel = p->causal ? flash_forward<true> : flash_forward<false>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    kernel<<<grid, THREADS, SHARED, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
// endregion
