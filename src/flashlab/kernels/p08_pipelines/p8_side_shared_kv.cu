// Phase 8, beside the ladder: K and V take turns in one buffer.
//
// p8_6_store with 2/5 of its shared memory (LeetCUDA's "shared KV"): room for Q and one tile. V_j sets out when every
// warp has read K_j, K_(j + 1) when every warp has read V_j. V's copy is hidden behind the softmax, K's behind nothing,
// and a tile has four barriers instead of one.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2; // per row of a tile; a chunk is 16 bytes, 8 numbers
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES, KV_BYTES = BLOCK_N * ROW_BYTES;           // per tile of shared memory
constexpr int SHARED = Q_BYTES + KV_BYTES;                     // New
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS) flash_forward(const Problem p) {
    extern __shared__ __align__(1024) char shared[];
    char* q_smem = shared;                                     // [BLOCK_M, HEAD_DIM]
    char* kv_smem = q_smem + Q_BYTES;                          // New: [BLOCK_N, HEAD_DIM]: K_j, then V_j
    // endregion

    // region: first copies
    auto load = [&](const T* gmem, int64_t row_stride, int n_start) {          // New: K or V
        load_tile<BLOCK_N>(kv_smem, gmem + n_start * row_stride, row_stride, p.seq_k - n_start);
        cp_async_commit();
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
    cp_async_commit();                                         // Q is a group of its own
    load(k_gmem, p.k_stride.row, 0);
    // endregion

    // region: Q in registers
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];                      // A: 16 rows x HEAD_DIM columns of Q
    cp_async_wait<1>();                                        // this thread's part of Q is here
    __syncthreads();                                           // or others' parts would be missing
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem + at(warp_row + lane % 16, k * MMA_K + lane / 16 * 8)));
    // endregion

        // region: load K and V
        const int n_start = j * BLOCK_N;                       // the tile's first key
        cp_async_wait<0>();                                    // this thread's part of K_j is here
        __syncthreads();                                       // or others' parts would be missing
        // endregion

        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T: ldmatrix without trans gives the B fragment.
        float s[S_TILES][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int n = 0; n < S_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 columns x 16 keys
                const int row = n * 16 + lane % 8 + lane / 16 * 8, column = k * MMA_K + lane / 8 % 2 * 8;
                ldmatrix_x4(b, smem_u32(kv_smem + at(row, column)));
                mma_m16n8k16<T>(s[2 * n], q_rmem[k], b[0], b[1]);
                mma_m16n8k16<T>(s[2 * n + 1], q_rmem[k], b[2], b[3]);
            }

        // region: V in K's place
        __syncthreads();                                       // New: or V_j would be written over K_j too early
        load(v_gmem, p.v_stride.row, n_start);
        // endregion
        // endregion

        // region: output
        cp_async_wait<0>();                                    // New: this thread's part of V_j is here
        __syncthreads();                                       // New: or others' parts would be missing
        // O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's
        // numbers. B wants two keys of one column of V in a register, and they lie in two rows: ldmatrix with trans.
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; k++) {
            const float(&c)[4] = s[2 * k], (&d)[4] = s[2 * k + 1];
            const uint32_t a[4] = {pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(d[0], d[1]), pack<T>(d[2], d[3])};
#pragma unroll
            for (int n = 0; n < O_TILES / 2; n++) {
                uint32_t b[4];                                 // B twice: 16 keys x 16 columns of V
                ldmatrix_x4_trans(b, smem_u32(kv_smem + at(k * MMA_K + lane % 16, n * 16 + lane / 16 * 8)));
                mma_m16n8k16<T>(acc[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(acc[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();                                       // New: or K_(j + 1) would be written over V_j too early
        if (j + 1 < tiles) load(k_gmem, p.k_stride.row, n_start + BLOCK_N);
        // endregion
