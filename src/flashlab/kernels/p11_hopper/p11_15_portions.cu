// Phase 11, step 15: a tile's exponentials in three portions.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. P of a full tile was rounded
// when all its exponentials had been computed, and O of the tile before had come. Now that has come long before: the
// first portions are rounded while the last one's exponentials are computed.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16, -DPING_PONG=1 or 0, -DDYNAMIC=1 or 0,
// -DTRUST=1 or 0, -DPOLYNOMIAL=0 (none), 8 or 4.

// region: constants
#include "p11_hopper/tiles.cuh"
#include "p11_hopper/switches.cuh"
#ifndef TRUST                                                  // a full tile's maxima are looked at only in need
#define TRUST (HEAD_DIM < 256)
#endif
#ifndef LATE_TURN                                              // New: 1: the turn is passed on after the first portion
#define LATE_TURN (HEAD_DIM == 64)
#endif

// A warpgroup each, and the producer's after them
constexpr int CONSUMERS = HEAD_DIM == 64 ? 3 : 2, GROUP = 128, WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * GROUP;
// Per thread. At the launch 65536 / THREADS; then these: 65536 hold them again.
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
constexpr int STAGES = 2;
constexpr int BLOCK_M = WARPS * MMA_M, BLOCK_N = 128;          // query rows per block; keys at a time
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int Q_BYTES = BLOCK_M * COLUMNS * 2, KV_BYTES = BLOCK_N * COLUMNS * 2;     // per tile of shared memory
// How far the row maximum may lag behind, in log2 units, where it is looked at; and the most that a lane's part of
// a row of P may add up to, where it is not: far from fp16's 65504.
constexpr float RESCALE_ABOVE = TRUST ? 0.f : 8.f, MOST = 16384.f;
constexpr int SECOND = S_TILES / (HEAD_DIM == 64 ? 8 : 2), THIRD = S_TILES * 3 / 4;    // New: portions, in MMA tiles
constexpr int Q_STAGES = 2, BARRIERS = 4 + 2 * Q_STAGES + 4 * STAGES;
struct __align__(16) Part { int batch, head, m_start, end; };  // a head's rows, and tiles that some of them see
constexpr int BARRIERS_AT = (Q_STAGES + 1) * Q_BYTES + 2 * STAGES * KV_BYTES;          // Q_BYTES for O
constexpr int SHARED = BARRIERS_AT + 8 * BARRIERS + 2 * sizeof(Part);
#include "p11_hopper/products.cuh"
#include "p11_hopper/store_output.cuh"
#include "p11_hopper/maxima.cuh"
#include "p11_hopper/exponential.cuh"
#include "p11_hopper/scores_again.cuh"
// endregion

// region: shared memory
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
flash_forward(const Problem p, int heads_together,             // and what TMA has to know of each tensor
              const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // New: [Q_STAGES, BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_STAGES * Q_BYTES;       // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t o_smem = v_smem + STAGES * KV_BYTES;        // [BLOCK_M, HEAD_DIM]
    const uint32_t full_q = q_smem + BARRIERS_AT;              // mbarriers
    const uint32_t full_k = full_q + 8 * Q_STAGES, full_v = full_k + 8 * STAGES;
    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage
    const uint32_t empty_q = empty_v + 8 * STAGES, full_part = empty_q + 8 * Q_STAGES, empty_part = full_part + 16;
    Part* next_part = (Part*)(shared + SHARED - 2 * sizeof(Part));                     // two of them
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    // Of a shuffle the compiler sees that it is one for the whole warp, and needs no register of each lane
    const int consumer = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), parts = m_blocks * p.batch * p.heads;
    const int warp_row = warp * MMA_M;                         // the warp's first, in the tile
    auto end_of = [&](int row) {                               // tiles that some row before this one sees
        const int tiles = ceil_div(p.seq_k, BLOCK_N);
        return CAUSAL ? max(0, min(tiles, ceil_div(row + p.seq_k - p.seq_q, BLOCK_N))) : tiles;
    };
    auto part_of = [&](int part) {                             // for the producer: divisions take long
        const int group = part / (m_blocks * heads_together), in_group = part % (m_blocks * heads_together);
        const int group_heads = min(heads_together, p.batch * p.heads - group * heads_together);
        const int head = CAUSAL ? group * heads_together + in_group % group_heads : part / m_blocks;
        const int m_start = (CAUSAL ? m_blocks - 1 - in_group / group_heads : part % m_blocks) * BLOCK_M;
        return Part{head / p.heads, head % p.heads, m_start, end_of(m_start + BLOCK_M)};
    };
    // endregion

    // region: barriers
    if (threadIdx.x == 0) {                                    // a full one waits for one arrival, and for bytes
        // A warp may read Q and K for itself, so each says when it is through with them
        for (int i = 0; i < Q_STAGES + 2 * STAGES; i++) mbarrier_init(full_q + 8 * i, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(empty_k + 8 * i, WARPS);
            mbarrier_init(empty_v + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(empty_q + 8 * i, WARPS);
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
                const Part here = part < parts ? part_of(part) : Part{0, 0, 0, -1};
                mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);
                next_part[n % 2] = here;
                mbarrier_arrive(full_part + 8 * (n % 2));      // the consumers see it with the barrier's phase
                if (part >= parts) break;
                const int next = gridDim.x + (DYNAMIC ? atomicAdd((int*)p.workspace, 1) : part);
                const int kv_head = here.head / (p.heads / p.kv_heads), q_stage = n % Q_STAGES;
                auto load_q = [&] {                            // after the first K, which need not wait for it
                    mbarrier_wait(empty_q + 8 * q_stage, n / Q_STAGES & 1 ^ 1);
                    load_tile<BLOCK_M>(q_smem + q_stage * Q_BYTES, q_map, full_q + 8 * q_stage, here.m_start, here.head,
                                       here.batch);
                };
                if (here.end == 0) load_q();
                for (int j = here.end - 1; j >= 0; j--, nth++) {
                    const int stage = nth % STAGES, phase = nth / STAGES & 1, key = j * BLOCK_N;
                    // Tile j + STAGES has left the stage: a new barrier passes this at once
                    mbarrier_wait(empty_k + 8 * stage, phase ^ 1);
                    load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, key, kv_head, here.batch);
                    if (j == here.end - 1) load_q();
                    mbarrier_wait(empty_v + 8 * stage, phase ^ 1);
                    load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, key, kv_head, here.batch);
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
    Part at;                                                   // the part that the consumer is at
    uint64_t q_operand;                                        // its 64 rows of Q
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
    auto pass_by = [&] {                                       // a tile that no row of this consumer's sees
        const int stage = nth % STAGES, phase = nth / STAGES & 1;
        mbarrier_wait(full_k + 8 * stage, phase);              // or it would say so of the tile before
        take_turn(), pass_turn();
        mbarrier_wait(full_v + 8 * stage, phase);
        if (lane == 0) mbarrier_arrive(empty_k + 8 * stage);
        if (first_thread) mbarrier_arrive(empty_v + 8 * stage);
        nth++;
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
        constexpr bool TRUSTED = TRUST && !FIRST && !MASKED;   // New
        take_turn();
        issue_scores<BLOCK_M>(s, q_operand, k_operand);
        if (!FIRST) add_output();
        if (!TRUSTED || !LATE_TURN) pass_turn();               // New
        wgmma_wait<FIRST ? 0 : 1>();                           // s is ours again; acc and p_rmem are not
        // endregion

        float m_new[ROWS_PER_LANE], sums[ROWS_PER_LANE];
        bool moved = false;
        auto maxima = [&] {
            row_maxima<CAUSAL, MASKED>(m_new, moved, s, m_i, p, at.m_start + warp_row + g, j * BLOCK_N, t, scale_log2);
        };

        // region: rescale
        // What was summed under the old maximum is brought under the new one: O later, when it is there. All rows of
        // a warp together, so a row's bits depend on the 15 others
        float correction[ROWS_PER_LANE];
        auto rescale = [&] {
            moved = __any_sync(~0u, moved);
            if (!moved) return;
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];     // -inf - (-inf) would be NaN
                correction[r] = exp2_approx((m_i[r] - base) * scale_log2);
                m_i[r] = m_new[r], l_i[r] *= correction[r];
            }
        };
        // endregion

        // region: probabilities
        // New: P = exp(S - maximum), in place, of the MMA tiles from one to before another
        auto probabilities = [&](int from, int to) {
            if (from == 0) sums[0] = sums[1] = 0.f;
            float sum[ROWS_PER_LANE][2] = {{sums[0]}, {sums[1]}};
#pragma unroll
            for (int n = from; n < to; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& c = s[4 * n + i];
                    const float base = (m_i[i / 2] == -INFINITY ? 0.f : m_i[i / 2]) * scale_log2;
                    const float x = fmaf(c, scale_log2, -base);
                    const bool by_polynomial = POLYNOMIAL > 0 && n % max(1, POLYNOMIAL) == 0;
                    c = by_polynomial ? exp2_polynomial(x) : exp2_approx(x);
                    sum[i / 2][i % 2] += c;                    // two chains
                }
            for (int r = 0; r < ROWS_PER_LANE; r++) sums[r] = sum[r][0] + sum[r][1];
        };
        // Two neighbouring accumulators of S, rounded, are the A fragment of P: no lane needs another's numbers.
        auto round_p = [&](int from, int to) {                 // New
#pragma unroll
            for (int i = 2 * from; i < 2 * to; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
        };
        // endregion

        // region: trust
        // P of a full tile is computed under the maximum of the tiles before. Most often that is right, or too low
        // by little. If not, a sum tells: S has been overwritten by then, and the warp computes it again.
        // Where none does, a tile adds up to 4 MOST |V| to O: it is finite if |V| < 2^112 / tiles, as all of fp16 is.
        auto doubtful = [&] {                                  // New: may be asked of a portion too
            bool found = false;
            for (int r = 0; r < ROWS_PER_LANE; r++) found |= !(sums[r] <= MOST) || m_i[r] == -INFINITY;  // NaN too
            return __any_sync(~0u, found);
        };
        bool in_doubt = true;
        if constexpr (TRUSTED) {
            probabilities(0, SECOND);
            in_doubt = doubtful();                             // New: no exponential is computed before its portion
            if (LATE_TURN) pass_turn();
            if (!in_doubt) {
                probabilities(SECOND, THIRD);
                output_is_there();                             // New: so P may be written,
                round_p(0, THIRD);                             // New: while the third portion is computed
                probabilities(THIRD, S_TILES);
                in_doubt = doubtful();
            } else output_is_there();
            if (in_doubt) scores_again<BLOCK_M>(s, (uint32_t)q_operand % 16384 * 16, k_smem + stage * KV_BYTES);
        }
        if (in_doubt) maxima(), rescale(), probabilities(0, S_TILES);
        for (int r = 0; r < ROWS_PER_LANE; r++) l_i[r] += sums[r];
        if (lane == 0) mbarrier_arrive(empty_k + 8 * stage);   // this warp has read K_j
        // endregion

        // region: rescale O
        if (!FIRST) {
            if (!TRUSTED) output_is_there();                   // New
            if (moved) {
#pragma unroll
                for (int i = 0; i < O_TILES * 4; i++) acc[i] *= correction[i / 2 % 2];
            }
        }
        if (in_doubt) round_p(0, THIRD);                       // New
        round_p(THIRD, S_TILES);
        // endregion
        // endregion
        nth++;
    };
    for (int n = 0;; n++) {
        mbarrier_wait(full_part + 8 * (n % 2), n / 2 & 1);
        at = next_part[n % 2];
        mbarrier_arrive(empty_part + 8 * (n % 2));             // by every thread: it has read it
        if (at.end < 0) break;
        int full = p.seq_k / BLOCK_N, j = at.end - 1;          // from tile `full` on, some row does not see every key
        if (CAUSAL) full = max(0, min(full, (at.m_start + consumer * 64 + 1 + p.seq_k - p.seq_q) / BLOCK_N));
        for (float& x : acc) x = 0.f;
        for (int r = 0; r < ROWS_PER_LANE; r++) m_i[r] = -INFINITY, l_i[r] = 0.f;
        // The last tiles may be seen by the other consumers' rows only
        const int first_row = at.m_start + consumer * 64, q_stage = n % Q_STAGES;
        const int mine = !CAUSAL ? at.end : first_row < p.seq_q ? min(at.end, end_of(first_row + 64)) : 0;
        if (CAUSAL) for (; j >= mine; j--) pass_by();
        mbarrier_wait(full_q + 8 * q_stage, n / Q_STAGES & 1); // each use of Q's place is a phase
        q_operand = descriptor(q_smem + q_stage * Q_BYTES + consumer * 64 * SLAB_ROW);
        if (mine > 0) {
            tile(j--, std::true_type{}, std::true_type{});
            for (; j >= full; j--) tile(j, std::false_type{}, std::true_type{});       // the masked tiles
            for (; j >= 0; j--) tile(j, std::false_type{}, std::false_type{});         // the full ones
        }
        if (lane == 0) mbarrier_arrive(empty_q + 8 * q_stage);         // a Q may come
        if (mine > 0) {
            add_output();
            output_is_there();
        }
        // endregion

        // region: store
        // O and lse
        float* lse = p.lse + ((int64_t)at.batch * p.heads + at.head) * p.seq_q + at.m_start;   // [batch, heads, seq_q]
        float inverse[ROWS_PER_LANE];
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int row = warp_row + g + r * 8;
            float sum = l_i[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            inverse[r] = sum > 0.f ? 1.f / sum : sum;          // a row that sees no key: 0; NaN stays NaN
            if (t == 0 && at.m_start + row < p.seq_q)
                lse[row] = sum == 0.f ? -INFINITY : (m_i[r] * scale_log2 + log2f(sum)) * LN2;
        }
        store_output<BLOCK_M, CONSUMERS>(acc, inverse, o_map, o_smem, o_lane, lane, consumer, first_thread,
                                         first_row, at.head, at.batch);
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
