// Phase 11, step 12: some of the exponentials by arithmetic.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. The work falls into parts:
// 64 query rows of one head for each of a block's two or three consumers. A multiprocessor computes 16 exponentials per
// cycle, and 4096 operations of a product: with HEAD_DIM = 64, softmax takes as long as both products. Multiply-adds go
// eight times as fast. So one in POLYNOMIAL exponentials is computed by a polynomial (FlashAttention-4's idea).
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16, -DPING_PONG=1 or 0, -DDYNAMIC=1 or 0,
// -DPOLYNOMIAL=0 (none), 8 or 4.

// region: constants
#include "p11_hopper/tiles.cuh"
#include "p11_hopper/switches.cuh"
#ifndef POLYNOMIAL                                             // New: of how many MMA tiles of S one is computed so
#define POLYNOMIAL 0
#endif

// A warpgroup each, and the producer's after them
constexpr int CONSUMERS = HEAD_DIM == 64 ? 3 : 2, GROUP = 128, WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * GROUP;
// Per thread. At the launch 65536 / THREADS; then these: 65536 hold them again.
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
constexpr int STAGES = 2;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 128;          // query rows per block; keys at a time
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * COLUMNS * 2, KV_BYTES = BLOCK_N * COLUMNS * 2;     // per tile of shared memory
// How far the row maximum may lag behind, in log2 units: P stays below 2^8, far from fp16's 65504.
constexpr float RESCALE_ABOVE = 8.f;
constexpr int BARRIERS = 6 + 4 * STAGES;                       // 8 bytes each
constexpr int SHARED = Q_BYTES + 2 * STAGES * KV_BYTES + Q_BYTES + 8 * BARRIERS + 8;         // Q_BYTES for O
#include "p11_hopper/products.cuh"
#include "p11_hopper/store_output.cuh"
#include "p11_hopper/maxima.cuh"
// endregion

// region: exponential
// New: 2^x with a relative error of 1e-4, up to x = 127: a rounding to fp16 errs by up to 5e-4. 2^x = 2^n 2^f, where
// n is the nearest integer. Adding 1.5 * 2^23 rounds to it, and leaves it in the sum's last bits; shifted, they are the
// exponent of 2^n. n = -127 gives 0, n = 128 infinity, and n goes no further. NaN stays NaN, in f.
__device__ __forceinline__ float exp2_polynomial(float x) {
    x = x < -127.f ? -127.f : x;
    const float shifted = fminf(x, 128.f) + 12582912.f, f = x - (shifted - 12582912.f);
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    return fmaf(f, fmaf(f, fmaf(f, 0.0550089516f, 0.242211014f), 0.693282902f), 1.f) * power;
}
// endregion

// region: shared memory
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
flash_forward(const Problem p, int heads_together,             // and what TMA has to know of each tensor
              const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_BYTES;                  // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t o_smem = v_smem + STAGES * KV_BYTES;        // [BLOCK_M, HEAD_DIM]
    const uint32_t full_q = o_smem + Q_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES; // mbarriers
    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage
    const uint32_t empty_q = empty_v + 8 * STAGES, full_part = empty_q + 8, empty_part = full_part + 16;
    int* next_part = (int*)(shared + SHARED - 8);          // two of them
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int consumer = threadIdx.x / GROUP;
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), parts = m_blocks * p.batch * p.heads;
    const int warp_row = warp * MMA_M;                         // the warp's first, in the tile
    int head_index, m_start, end;                              // of the part that this thread is at
    auto begin_part = [&](int part) {
        const int group = part / (m_blocks * heads_together), in_group = part % (m_blocks * heads_together);
        const int group_heads = min(heads_together, p.batch * p.heads - group * heads_together);
        head_index = CAUSAL ? group * heads_together + in_group % group_heads : part / m_blocks;
        m_start = (CAUSAL ? m_blocks - 1 - in_group / group_heads : part % m_blocks) * BLOCK_M;
        end = ceil_div(p.seq_k, BLOCK_N);
        if (CAUSAL) end = max(0, min(end, ceil_div(m_start + BLOCK_M + p.seq_k - p.seq_q, BLOCK_N)));
    };
    // endregion

    // region: barriers
    if (threadIdx.x == 0) {                                    // a full one waits for one arrival, and for bytes
        for (int i = 0; i < BARRIERS - 4; i++) mbarrier_init(full_q + 8 * i, full_q + 8 * i < empty_k ? 1 : CONSUMERS);
        for (int i = 0; i < 2; i++)                            // every thread of the consumers reads the number
            mbarrier_init(full_part + 8 * i, 1), mbarrier_init(empty_part + 8 * i, WARPS * WARP_SIZE);
        fence_mbarrier_init();                                 // or the copy engine might not see them yet
    }
    __syncthreads();                                           // the last one
    // endregion

    // region: producer
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            for (int part = blockIdx.x, n = 0, nth = 0;; n++) {
                mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);
                next_part[n % 2] = part;
                mbarrier_arrive(full_part + 8 * (n % 2));      // the consumers see the number with the barrier's phase
                if (part >= parts) break;
                const int next = gridDim.x + (DYNAMIC ? atomicAdd((int*)p.workspace, 1) : part);
                begin_part(part);
                const int batch = head_index / p.heads, head = head_index % p.heads;
                const int kv_head = head / (p.heads / p.kv_heads);
                mbarrier_wait(empty_q, n & 1 ^ 1);
                load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
                for (int j = end - 1; j >= 0; j--, nth++) {
                    const int stage = nth % STAGES, phase = nth / STAGES & 1, key = j * BLOCK_N;
                    // Tile j + STAGES has left the stage: a new barrier passes this at once
                    mbarrier_wait(empty_k + 8 * stage, phase ^ 1);
                    load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, key, kv_head, batch);
                    mbarrier_wait(empty_v + 8 * stage, phase ^ 1);
                    load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, key, kv_head, batch);
                }
                part = next;
            }
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();                      // waits until there are so many
    // endregion

    // region: state
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float acc[O_TILES * 4];                                    // O, not yet divided by l_i
    float m_i[ROWS_PER_LANE];                                  // the rows' maxima, of the raw scores
    float l_i[ROWS_PER_LANE];                                  // their sums, over this lane's columns
    const uint32_t o_lane = o_smem + (warp_row + lane % 16) * SLAB_ROW;    // the row that it gives to stmatrix
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // endregion

    // region: operands of the scores
    const uint64_t q_operand = descriptor(q_smem + consumer * 64 * SLAB_ROW);          // its 64 rows of Q
    const bool first_thread = threadIdx.x % GROUP == 0;        // it says that its warpgroup is through
    // endregion

    // region: main loop
    int nth = 0;                                               // tiles so far
    // region: turns
    // Barrier 1 + c is consumer c's turn: its own 128 threads wait there, those of the one before it arrive.
    auto take_turn = [&] { if (PING_PONG) named_barrier_sync(1 + consumer, 2 * GROUP); };
    auto pass_turn = [&] { if (PING_PONG) named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * GROUP); };
    if (consumer == CONSUMERS - 1) pass_turn();                // consumer 0 begins
    // endregion

    uint32_t p_rmem[BLOCK_N / MMA_K][4];                       // P of the tile before
    auto add_output = [&] {                                    // issues O += P V of the tile before
        // region: output
        const int stage = (nth - 1) % STAGES, phase = (nth - 1) / STAGES & 1;
        mbarrier_wait(full_v + 8 * stage, phase);
        const uint64_t v_operand = descriptor_of_rows<BLOCK_N>(v_smem + stage * KV_BYTES);
        issue_output(acc, p_rmem, v_operand);
        // endregion
    };
    auto output_is_there = [&] {
        wgmma_wait<0>();
        if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));
    };
    auto tile = [&](int j, auto is_first, auto is_masked) {    // the body of the loop, compiled three times
        constexpr bool FIRST = decltype(is_first)::value, MASKED = decltype(is_masked)::value;
        // region: load K and V
        const int stage = nth % STAGES, phase = nth / STAGES & 1;  // each use of a stage is a phase
        mbarrier_wait(full_k + 8 * stage, phase);              // all of K_j is here, for every thread that waits
        // endregion

        // region: one tile
        // region: scores
        float s[S_TILES * 4];
        const uint64_t k_operand = descriptor(k_smem + stage * KV_BYTES);
        take_turn();
        issue_scores<BLOCK_M>(s, q_operand, k_operand);
        if (!FIRST) add_output();
        pass_turn();
        wgmma_wait<FIRST ? 0 : 1>();                           // s is ours again; acc and p_rmem are not
        if (first_thread) mbarrier_arrive(empty_k + 8 * stage);            // the warpgroup has read K_j
        // endregion

        float m_new[ROWS_PER_LANE];
        bool moved;
        row_maxima<CAUSAL, MASKED>(m_new, moved, s, m_i, p, m_start + warp_row + g, j * BLOCK_N, t, scale_log2);

        // region: rescale
        // What was summed under the old maximum is brought under the new one: O later, when it is there. All rows of
        // a warp together, so a row's bits depend on the 15 others
        moved = __any_sync(~0u, moved);
        float correction[ROWS_PER_LANE];
        if (moved) {
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];     // -inf - (-inf) would be NaN
                correction[r] = exp2_approx((m_i[r] - base) * scale_log2);
                m_i[r] = m_new[r], l_i[r] *= correction[r];
            }
        }
        // endregion

        // region: probabilities
        // P = exp(S - maximum), in place
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const float base = (m_i[r] == -INFINITY ? 0.f : m_i[r]) * scale_log2;
            float sum[2] = {};
#pragma unroll
            for (int n = 0; n < S_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = s[4 * n + 2 * r + e];
                    const float x = fmaf(c, scale_log2, -base);
                    const bool by_polynomial = POLYNOMIAL > 0 && n % max(1, POLYNOMIAL) == 0;          // New
                    c = by_polynomial ? exp2_polynomial(x) : exp2_approx(x);
                    sum[e] += c;                               // two chains
                }
            l_i[r] += sum[0] + sum[1];
        }
        // endregion

        // region: rescale O
        if (!FIRST) {
            output_is_there();
            if (moved) {
#pragma unroll
                for (int i = 0; i < O_TILES * 4; i++) acc[i] *= correction[i / 2 % 2];
            }
        }
        // Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's numbers.
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
        // endregion
        // endregion
        nth++;
    };
    for (int n = 0;; n++) {
        mbarrier_wait(full_part + 8 * (n % 2), n / 2 & 1);
        const int part = next_part[n % 2];
        mbarrier_arrive(empty_part + 8 * (n % 2));             // by every thread: it has read the number
        if (part >= parts) break;
        begin_part(part);
        int full = p.seq_k / BLOCK_N, j = end - 1;             // from tile `full` on, some row does not see every key
        if (CAUSAL) full = max(0, min(full, (m_start + consumer * 64 + 1 + p.seq_k - p.seq_q) / BLOCK_N));
        for (float& x : acc) x = 0.f;
        for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY, l_i[r] = 0.f;
        mbarrier_wait(full_q, n & 1);                          // a phase of it for each part
        if (end > 0) {
            tile(j--, std::true_type{}, std::true_type{});
            for (; j >= full; j--) tile(j, std::false_type{}, std::true_type{});       // the masked tiles
            for (; j >= 0; j--) tile(j, std::false_type{}, std::false_type{});         // the full ones
        }
        if (first_thread) mbarrier_arrive(empty_q);            // the next part's Q may come
        if (end > 0) {
            add_output();
            output_is_there();
        }
        // endregion

        // region: store
        // O and lse
        const int64_t first_row = (int64_t)head_index * p.seq_q + m_start;     // of lse [batch, heads, seq_q]
        float inverse[ROWS_PER_LANE];
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = warp_row + g + r * 8;
            float sum = l_i[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[r] = sum > 0.f ? 1.f / sum : sum;          // a row that sees no key: 0; NaN stays NaN
            if (t == 0 && m_start + row < p.seq_q)
                p.lse[first_row + row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        }
        store_output<BLOCK_M, CONSUMERS>(acc, inverse, o_map, o_smem, o_lane, lane, consumer, first_thread,
                                         m_start + consumer * 64, head_index % p.heads, head_index / p.heads);
    }
    if (first_thread) bulk_wait<0>();                          // the last O is written
    if (consumer == 0) take_turn();                            // the last turn that was passed on to it
}
// endregion

// region: launch
#include "p11_hopper/launch_parts.cuh"
extern "C" int64_t workspace_floats(const Problem* p) { return 1; }        // the counter
extern "C" int forward(const Problem* p, void* stream) {
    return launch(p->causal ? flash_forward<true> : flash_forward<false>, *p, stream);
}
// endregion
