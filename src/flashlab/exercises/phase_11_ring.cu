// Exercise 11.13: two consumers and a producer, who share one ring of slots for K and V. The loop is the learner's.

// region: constants
#include "p11_hopper/tiles.cuh"

constexpr int CONSUMERS = 2, GROUP = 128, WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * GROUP;
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 64;           // query rows per block; keys at a time
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int SLOTS = 3;                                       // of the ring; each holds a tile of K, or one of V
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2, SLOT_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int SHARED = Q_BYTES + SLOTS * SLOT_BYTES + 8 * (1 + 2 * SLOTS);
// endregion

template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
flash_forward(const Problem p, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map) {
    // region: shared memory
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t ring_smem = q_smem + Q_BYTES;               // [SLOTS, BLOCK_N, HEAD_DIM]
    const uint32_t full_q = ring_smem + SLOTS * SLOT_BYTES;    // mbarriers, 8 bytes each: of Q; then of every slot
    const uint32_t full = full_q + 8, empty = full + 8 * SLOTS;
    // endregion

    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int consumer = threadIdx.x / GROUP;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M);
    const int head_index = blockIdx.x / m_blocks, m_start = blockIdx.x % m_blocks * BLOCK_M;
    const int batch = head_index / p.heads, head = head_index % p.heads, kv_head = head / (p.heads / p.kv_heads);
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int tiles = ceil_div(p.seq_k, BLOCK_N);
    if (CAUSAL) tiles = max(0, min(tiles, ceil_div(m_start + BLOCK_M + diagonal, BLOCK_N)));

    // region: producer
    if (threadIdx.x == 0) {
        mbarrier_init(full_q, 1);
        for (int i = 0; i < SLOTS; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
            for (int i = 0; i < 2 * tiles; i++) {              // K of tile 0, V of tile 0, K of tile 1, V of tile 1 ...
                const int slot = i % SLOTS;
                mbarrier_wait(empty + 8 * slot, (i / SLOTS + 1) % 2);
                load_tile<BLOCK_N>(ring_smem + slot * SLOT_BYTES, i % 2 ? v_map : k_map, full + 8 * slot,
                                   i / 2 * BLOCK_N, kv_head, batch);
            }
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    // endregion

    // region: state
    float acc[O_TILES * 4] = {};                               // O, not yet divided by l_i
    float m_i[2] = {-INFINITY, -INFINITY}, l_i[2] = {};        // of the lane's two rows; l_i over its own columns
    int last_key[2];                                           // the last one that these rows see
    for (int r = 0; r < 2; r++) {
        last_key[r] = p.seq_k - 1;
        if (CAUSAL) last_key[r] = min(last_key[r], m_start + warp * MMA_M + g + 8 * r + diagonal);
    }
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    const bool first_thread = threadIdx.x % GROUP == 0;        // of its consumer
    const uint64_t q_operand = descriptor(q_smem + consumer * 64 * SLAB_ROW);          // its 64 rows of Q
    mbarrier_wait(full_q, 0);
    // endregion

    // region: loop
    // ...                                                     // the consumers' loop: the learner's
    // endregion

    // region: store
    T* o_gmem = rows_of(p.o, p.o_stride, batch, head, m_start);
    for (int r = 0; r < 2; r++) {
        const int row = warp * MMA_M + g + 8 * r;
        float sum = l_i[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : sum;
        if (m_start + row >= p.seq_q) continue;
        if (t == 0)
            p.lse[(int64_t)head_index * p.seq_q + m_start + row] =
                sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        for (int n = 0; n < O_TILES; n++)
            *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + t * 2) =
                pack<T>(acc[4 * n + 2 * r] * inverse, acc[4 * n + 2 * r + 1] * inverse);
    }
    // endregion
}

extern "C" int forward(const Problem* p, void* stream) {
    const CUtensorMap q_map = map_of(p->q, p->q_stride, p->batch, p->heads, p->seq_q, BLOCK_M);
    const CUtensorMap k_map = map_of(p->k, p->k_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N);
    const CUtensorMap v_map = map_of(p->v, p->v_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N);
    const unsigned grid = p->batch * p->heads * ceil_div(p->seq_q, BLOCK_M);
    const auto kernel = p->causal ? flash_forward<true> : flash_forward<false>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    kernel<<<grid, THREADS, SHARED, (cudaStream_t)stream>>>(*p, q_map, k_map, v_map);
    return (int)cudaGetLastError();
}
