// Phase 11, step 3: P from registers, V as it lies.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. A block owns 64 query rows
// and walks their keys backwards, 64 at a time; a warp owns 16 of the rows and all their keys. O += P V is computed by
// wgmma too. Its first operand may come from registers: the accumulators of S, rounded, are P as it wants it. Its other
// operand is V, whose keys lie in different rows: wgmma reads it in that order (MN-major), and nothing is transposed.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "problem.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE, STAGES = 2;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2, KV_BYTES = BLOCK_N * HEAD_DIM * 2;     // per tile of shared memory
constexpr int BARRIERS = 1 + 2 * STAGES;                       // 8 bytes each: of Q; of K and V in every stage
constexpr int SHARED = Q_BYTES + 2 * STAGES * KV_BYTES + 8 * BARRIERS;
#include "p11_hopper/maps.cuh"
#include "p11_hopper/softmax.cuh"
// endregion

// region: operands
// A tile of ROWS rows lies in slabs [ROWS, 64], side by side in shared memory: 128 bytes are as wide as TMA swizzles.
// Within a slab it is phase 8's XOR: the copy engine has the writer's half of it, the tensor cores the reader's.
//
// How wgmma finds a tile in shared memory: a descriptor, 64 bits. Rows of 128 bytes, swizzled as TMA does it; 8
// rows further are 1024 bytes further. (The leading offset is of no use in this layout.)
__device__ __forceinline__ uint64_t descriptor(uint32_t tile_smem) {
    return smem_descriptor(tile_smem, SWIZZLE_128, 16, 8 * SLAB_ROW);
}
// What is added to it for MMA_K columns further, k times. Addresses in a descriptor count 16 bytes.
template <int ROWS> __device__ __forceinline__ constexpr uint64_t columns_on(int k) {
    const int column = k * MMA_K;
    return (column / SLAB * ROWS * SLAB_ROW + column % SLAB * 2) / 16;
}
// New: a tile whose rows are the products' inner dimension, 16 rows at a time. Its columns run over all slabs: the
// leading offset leads from one to the next. MMA_K rows further, k times, is 2048 k bytes further.
template <int ROWS> __device__ __forceinline__ uint64_t descriptor_of_rows(uint32_t tile_smem) {
    return smem_descriptor(tile_smem, SWIZZLE_128, ROWS * SLAB_ROW, 8 * SLAB_ROW);
}
__device__ __forceinline__ constexpr uint64_t rows_on(int k) { return k * MMA_K * SLAB_ROW / 16; }
// endregion

// region: shared memory
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 2)
flash_forward(const Problem p,                                 // and what TMA has to know of each tensor
              const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_BYTES;                  // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t full_q = v_smem + STAGES * KV_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES; // mbarriers
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int warp_row = warp * MMA_M;                         // the warp's first, in the tile
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
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
    float acc[O_TILES * 4] = {};                               // New: O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE] = {};                             // their sums, over this lane's columns
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY;
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

    // region: first copies
    if (threadIdx.x == 0) {                                    // each barrier waits for one arrival, and for bytes
        for (int i = 0; i < BARRIERS; i++) mbarrier_init(full_q + 8 * i, 1);
        fence_mbarrier_init();                                 // or the copy engine might not see them yet
    }
    __syncthreads();
    auto load_kv = [&](int j) {
        const int stage = (end - 1 - j) % STAGES;
        load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, j * BLOCK_N, kv_head, batch);
        load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, j * BLOCK_N, kv_head, batch);
    };
    if (threadIdx.x == 0) {
        load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
        if (end > 0) load_kv(end - 1);
    }
    // endregion

    // region: operands of the scores
    const uint64_t q_operand = descriptor(q_smem);
    mbarrier_wait(full_q, 0);                                  // its phase 0 is over when all of Q is here
    // endregion

    // region: main loop
    auto last_key = [&](int r) {                               // that the lane's row r sees
        const int row = m_start + warp_row + g + r * 8;
        return CAUSAL ? min(p.seq_k - 1, row + diagonal) : p.seq_k - 1;
    };
    auto tile = [&](int j, auto is_masked) {                   // the body of the loop, compiled twice
        constexpr bool MASKED = decltype(is_masked)::value;
        // region: load K and V
        // Each use of a stage is one phase of its barriers: 0, 1, 0, 1 ...
        const int use = (end - 1 - j) / STAGES, stage = (end - 1 - j) % STAGES, phase = use & 1;
        __syncthreads();                                       // tile j + 1 is in use no more
        if (threadIdx.x == 0 && j > 0) load_kv(j - 1);         // into its stage
        mbarrier_wait(full_k + 8 * stage, phase);              // all of K_j is here, for every thread that waits
        // endregion

        // region: one tile
        // region: scores
        // S = Q K^T. The rows of K are the columns of K^T. Lanes hold it as MMA tiles side by side: c0 c1 c2 c3 of
        // tile n are s[4 n] ... s[4 n + 3].
        float s[S_TILES * 4];
        const uint64_t k_operand = descriptor(k_smem + stage * KV_BYTES);
        wgmma_fence();                                         // the registers of s are the tensor cores' from here on
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)             // the first one overwrites s
            wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k), k > 0);
        wgmma_commit();
        wgmma_wait<0>();                                       // and ours again
        // endregion

        float m_new[ROWS_PER_LANE];
        row_maxima<MASKED>(m_new, m_i, s, j * BLOCK_N, t, last_key);

        // region: rescale
        // What was summed under the old maximum is brought under the new one
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];         // -inf - (-inf) would be NaN
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = m_new[r], l_i[r] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)                  // New
                acc[4 * n + 2 * r] *= correction, acc[4 * n + 2 * r + 1] *= correction;
        }
        // endregion

        probabilities(s, l_i, m_i, scale_log2);

        // region: output
        // New: O += P V. Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's
        // numbers.
        uint32_t p_rmem[BLOCK_N / MMA_K][4];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
        mbarrier_wait(full_v + 8 * stage, phase);
        const uint64_t v_operand = descriptor_of_rows<BLOCK_N>(v_smem + stage * KV_BYTES);
        wgmma_fence();                                         // acc and p_rmem were written by their lanes
#pragma unroll
        for (int k = 0; k < BLOCK_N / MMA_K; k++)
            wgmma_rs<HEAD_DIM, T, true>(acc, p_rmem[k], v_operand + rows_on(k));
        wgmma_commit();
        wgmma_wait<0>();
        // endregion
        // endregion
    };
    int j = end - 1;
    for (; j >= full; j--) tile(j, std::true_type{});          // the masked tiles
    for (; j >= 0; j--) tile(j, std::false_type{});            // the full ones
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
                    pack<T>(acc[4 * n + 2 * r] * inverse, acc[4 * n + 2 * r + 1] * inverse);
        }
    }
}
// endregion

// region: launch
#include "p11_hopper/launch.cuh"
extern "C" int forward(const Problem* p, void* stream) {
    return launch(p->causal ? flash_forward<true> : flash_forward<false>, *p, stream);
}
// endregion
