// Phase 11, the last step: tiles for every shape, HEAD_DIM = 256 too.
//
// O = softmax(scale * Q K^T) V, fp16 or bf16 in and out, fp32 accumulators and statistics. The work falls into parts:
// 64 query rows of one head for each of a block's one, two or three consumers. One block per multiprocessor takes part
// after part. A producer asks for tiles by TMA; the consumers take turns at the tensor cores, with S of one tile and O
// of the tile before in flight. Where parts would be too few to fill the GPU, a block has one consumer, and its parts
// 64 rows.
//
// Compile with -DHEAD_DIM=64, 80, 96, 112, 128, 160, 192 or 256, and -DELEMENT=__half or __nv_bfloat16, -DPING_PONG=1
// or 0, -DDYNAMIC=0, 1 or 2, -DTRUST=1 or 0, -DPOLYNOMIAL=0 (none), 8 or 4, -DBLOCK_N=keys at a time, -DSLAB=64 or 32.

// region: constants
#include "p11_hopper/tiles.cuh"
#include "p11_hopper/switches.cuh"
#ifndef TRUST                                                  // New: not where HEAD_DIM is 256: it gains nothing there
#define TRUST (HEAD_DIM < 256)
#endif
#ifndef LATE_TURN                                              // 1: the turn is passed on after the first portion
#define LATE_TURN (HEAD_DIM == 64)
#endif
#ifndef TALL                                                   // New: consumers of a block, where there are several
#define TALL (HEAD_DIM <= 96 ? 3 : 2)
#endif
#ifndef BLOCK_N                                                // New: keys at a time
#define BLOCK_N (HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 192 ? 96 : HEAD_DIM < 192 ? 128 : 64)
#endif
constexpr int GROUP = 128;                                     // threads of a warpgroup
constexpr int STAGES = 2;
constexpr int S_TILES = BLOCK_N / MMA_N, O_TILES = HEAD_DIM / MMA_N;   // accumulators of a warp, [MMA_M, MMA_N] each
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int KV_BYTES = BLOCK_N * COLUMNS * 2;      // per tile of shared memory
// How far the row maximum may lag behind, in log2 units, where it is looked at; and the most that a lane's part of
// a row of P may add up to, where it is not: far from fp16's 65504.
constexpr float RESCALE_ABOVE = TRUST ? 0.f : 8.f, MOST = 16384.f;
// How far a doubt lifts the reference above the maximum, in log2 units: room for the tiles to come. P in bf16 is
// as exact at 2^-64 as at 1; fp16 has no such room. And how large P may be to be lowered by a float that is not 0.
constexpr float ROOM = std::is_same_v<T, __half> ? 0.f : 64.f, LOWERED = ROOM > 0.f ? 0x1p56f : 0x1p120f;
constexpr int SECOND = S_TILES / (HEAD_DIM == 64 ? 8 : 2), THIRD = S_TILES * 3 / 4;    // portions, in MMA tiles
constexpr int Q_STAGES = HEAD_DIM > 128 ? 1 : 2, BARRIERS = 4 + 2 * Q_STAGES + 4 * STAGES;     // New; 8 bytes each
// New: beside a wide Q, K and V all of O has no room: it leaves by slabs, which take turns at what is left
constexpr int O_COLUMNS = HEAD_DIM <= 128 ? COLUMNS : SLAB == 32 ? 96 : 128;
constexpr int O_STEP = HEAD_DIM <= 128 ? HEAD_DIM : SLAB;
// region: part
struct __align__(16) Part { int batch, head, m_start, end; };  // a head's rows, and tiles of keys that some of them see
// endregion
#include "p11_hopper/products.cuh"
#include "p11_hopper/store_output.cuh"
#include "p11_hopper/maxima.cuh"
#include "p11_hopper/exponential.cuh"
#include "p11_hopper/scores_again.cuh"
#include "p11_hopper/edges.cuh"                                // New
template <int CONSUMERS_> struct Tile {                        // New: what depends on the number of consumers
    // A warpgroup each, and the producer's after them
    static constexpr int CONSUMERS = CONSUMERS_, WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * GROUP;
    // Per thread. At the launch 65536 / THREADS; then these. With one consumer that is enough for both: none moves.
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232, PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
    static constexpr int BLOCK_M = WARPS * MMA_M, Q_BYTES = BLOCK_M * COLUMNS * 2, TURNS = PING_PONG && CONSUMERS > 1;
    static constexpr int BARRIERS_AT = Q_STAGES * Q_BYTES + 2 * STAGES * KV_BYTES + BLOCK_M * O_COLUMNS * 2;
    static constexpr int SHARED = BARRIERS_AT + 8 * BARRIERS + 2 * sizeof(Part);
    static __host__ __device__ int parts(const Problem& p) { return p.batch * p.heads * ceil_div(p.seq_q, BLOCK_M); }
};
// endregion

// region: scheduler
// New: whether blocks ask the counter for their next part. Without a mask parts are equal, unless the last of a head
// leaves a consumer without rows; then it pays where parts are many.
template <class Tile> __host__ __device__ __forceinline__ bool asks(const Problem& p) {
    const bool unequal = (p.seq_q - 1) % Tile::BLOCK_M < Tile::BLOCK_M - 64 && Tile::parts(p) > 4 * p.sms;
    return DYNAMIC + (p.causal || unequal) > 1 && Tile::parts(p) > p.sms;
}
// endregion

// region: shared memory
template <class Tile, bool CAUSAL>                             // New
__global__ void __launch_bounds__(Tile::THREADS, 1)
flash_forward(const Problem p, int heads_together, int groups, // and what TMA has to know of each tensor
              const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map) {
    constexpr int CONSUMERS = Tile::CONSUMERS, WARPS = Tile::WARPS, BLOCK_M = Tile::BLOCK_M, Q_BYTES = Tile::Q_BYTES;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [Q_STAGES, BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_STAGES * Q_BYTES;       // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t o_smem = v_smem + STAGES * KV_BYTES;        // [BLOCK_M, O_COLUMNS]
    const uint32_t full_q = q_smem + Tile::BARRIERS_AT;         // New: mbarriers, 8 bytes each
    const uint32_t full_k = full_q + 8 * Q_STAGES, full_v = full_k + 8 * STAGES;
    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage
    const uint32_t empty_q = empty_v + 8 * STAGES, full_part = empty_q + 8 * Q_STAGES, empty_part = full_part + 16;
    Part* next_part = (Part*)(shared + Tile::SHARED - 2 * sizeof(Part));               // two of them
    // endregion

    // region: which rows
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    // One for the whole warp, as the compiler sees of a shuffle: what follows from it needs no register of each lane
    const int consumer = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    // region: parts
    const int m_blocks = ceil_div(p.seq_q, BLOCK_M), parts = m_blocks * p.batch * p.heads;
    // endregion
    const int warp_row = warp * MMA_M;                         // the warp's first, in the tile
    auto end_of = [&](int row) {                               // tiles that some row before this one sees
        const int tiles = ceil_div(p.seq_k, BLOCK_N);
        return CAUSAL ? max(0, min(tiles, ceil_div(row + p.seq_k - p.seq_q, BLOCK_N))) : tiles;
    };
    auto part_of = [&](int part) {                             // for the producer: divisions take long
        // New: groups of heads that share L2; behind them all others are one group
        const int group = min(groups, part / (m_blocks * heads_together));
        const int in_group = part - group * m_blocks * heads_together;
        const int group_heads = group < groups ? heads_together : p.batch * p.heads - groups * heads_together;
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
        tma_prefetch(&q_map), tma_prefetch(&k_map), tma_prefetch(&v_map), tma_prefetch(&o_map);        // New
        fence_mbarrier_init();                                 // or the copy engine might not see them yet
    }
    __syncthreads();                                           // the last one
    // endregion

    // region: producer
    if (warp >= WARPS) {
        if constexpr (CONSUMERS > 1) setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            for (int part = blockIdx.x, n = 0, nth = 0;; n++) {
                // region: next part
                const Part here = part < parts ? part_of(part) : Part{0, 0, 0, -1};
                // endregion
                mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);
                next_part[n % 2] = here;
                mbarrier_arrive(full_part + 8 * (n % 2));      // the consumers see it with the barrier's phase
                if (part >= parts) break;
                const int next = gridDim.x + (asks<Tile>(p) ? atomicAdd((int*)p.workspace, 1) : part);
                const int kv_head = here.head / (p.heads / p.kv_heads), q_stage = n % Q_STAGES;
                auto load_q = [&] {                            // after the first K, which need not wait for it
                    mbarrier_wait(empty_q + 8 * q_stage, n / Q_STAGES & 1 ^ 1);
                    load_tile<BLOCK_M>(q_smem + q_stage * Q_BYTES, q_map, full_q + 8 * q_stage, here.m_start, here.head,
                                       here.batch);
                };
                if (here.end == 0) load_q();
                // region: tiles of a part
                for (int j = here.end - 1; j >= 0; j--, nth++) {
                    // endregion
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
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();   // waits until there are so many
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
    bool doubted;                                              // the part has had a doubt
    // region: turns
    // Barrier 1 + c is consumer c's turn: its own 128 threads wait there, those of the one before it arrive.
    auto take_turn = [&] { if (Tile::TURNS) named_barrier_sync(1 + consumer, 2 * GROUP); };
    auto pass_turn = [&] { if (Tile::TURNS) named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * GROUP); };
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
        constexpr bool TRUSTED = TRUST && !FIRST && !MASKED;
        take_turn();
        issue_scores<BLOCK_M>(s, q_operand, k_operand);
        if (!FIRST) add_output();
        if (!TRUSTED || !LATE_TURN) pass_turn();
        wgmma_wait<FIRST ? 0 : 1>();                           // s is ours again; acc and p_rmem are not
        // endregion

        float m_new[ROWS_PER_LANE], sums[ROWS_PER_LANE];
        bool moved = false;
        auto maxima = [&] {
            // New: by bits, and not where a first tile is full
            const bool is_full = FIRST && !CAUSAL && (j + 1) * BLOCK_N <= p.seq_k;
            if (MASKED && !is_full) hide<CAUSAL>(s, p, at.m_start + warp_row + g, j * BLOCK_N + t * 2);
            row_maxima<CAUSAL, false>(m_new, moved, s, m_i, p, at.m_start + warp_row + g, j * BLOCK_N, t, scale_log2);
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
        // P = exp(S - maximum), in place, of the MMA tiles from one to before another
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
        auto round_p = [&](int from, int to) {
#pragma unroll
            for (int i = 2 * from; i < 2 * to; i++) p_rmem[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
        };
        // endregion

        // region: lower
        // Under too low a reference P is too large, but right. It is lowered while that rises: S is not needed
        auto lower = [&] {
#pragma unroll
            for (int r = 0; r < ROWS_PER_LANE; r++) {
                float most = 0.f;
                for (int n = 0; n < S_TILES; n++) most = fmaxf(most, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                m_new[r] = m_i[r] + fmaxf(0.f, log2f(most) + ROOM) / scale_log2;
            }
            moved = true, rescale();
            for (int i = 0; i < S_TILES * 4; i++) s[i] *= correction[i / 2 % 2];
            for (int r = 0; r < ROWS_PER_LANE; r++) sums[r] *= correction[r];
        };
        // endregion

        // region: trust
        // P of a full tile is computed under the maximum of the tiles before. Most often that is right, or too low
        // by little. If not, a sum tells.
        // Where none does, a tile adds up to 4 MOST |V| to O: it is finite if |V| < 2^112 / tiles, as all of fp16 is.
        auto doubtful = [&](bool found) {                      // May be asked of a portion too
            for (int r = 0; r < ROWS_PER_LANE; r++) found |= !(sums[r] <= MOST) || m_i[r] == -INFINITY;  // NaN too
            return __any_sync(~0u, found);
        };
        if constexpr (TRUSTED) {
            probabilities(0, SECOND);
            // At the last tile that is a doubt too: a key that dominates its row there gets an exact weight
            bool in_doubt = doubtful(doubted && j == 0);       // No exponential is computed before its portion
            if (LATE_TURN) pass_turn();
            if (!in_doubt) {
                probabilities(SECOND, THIRD);
                output_is_there();                             // So P may be written,
                round_p(0, THIRD);                             // while the third portion is computed
                probabilities(THIRD, S_TILES);
                in_doubt = doubtful(false);
            } else output_is_there(), probabilities(SECOND, S_TILES);
            if (in_doubt) {
                bool lost = false;                             // Only if P is too large, or a row had seen no key,
                for (int r = 0; r < ROWS_PER_LANE; r++) lost |= !(sums[r] < LOWERED) || m_i[r] == -INFINITY;
                if (__any_sync(~0u, lost)) {                   // S is computed again
                    scores_again<BLOCK_M>(s, (uint32_t)q_operand % 16384 * 16, k_smem + stage * KV_BYTES);
                    maxima();
                    for (int r = 0; r < ROWS_PER_LANE; r++)
                        m_new[r] += (m_new[r] - m_i[r]) * scale_log2 > 0.f ? ROOM / scale_log2 : 0.f;
                    rescale(), probabilities(0, S_TILES);
                } else lower();
                round_p(0, THIRD), doubted = true;
            }
        } else maxima(), rescale(), probabilities(0, S_TILES);
        for (int r = 0; r < ROWS_PER_LANE; r++) l_i[r] += sums[r];
        if (lane == 0) mbarrier_arrive(empty_k + 8 * stage);   // this warp has read K_j
        // endregion

        // region: rescale O
        if (!FIRST) {
            if (!TRUSTED) output_is_there();
            if (moved) {
#pragma unroll
                for (int i = 0; i < O_TILES * 4; i++) acc[i] *= correction[i / 2 % 2];
            }
        }
        if (!TRUSTED) round_p(0, THIRD);
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
        doubted = false;                                       // or the bits would depend on who had which part
        // The last tiles may be seen by the other consumers' rows only
        const int first_row = at.m_start + consumer * 64, q_stage = n % Q_STAGES;
        // region: mine
        const int mine = first_row < p.seq_q ? min(at.end, end_of(first_row + 64)) : 0;
        // endregion
        for (; j >= mine; j--) pass_by();                      // New: without a mask too, where it has no rows
        mbarrier_wait(full_q + 8 * q_stage, n / Q_STAGES & 1); // each use of Q's place is a phase
        q_operand = descriptor(q_smem + q_stage * Q_BYTES + consumer * 64 * SLAB_ROW);
        if (mine > 0) {
            tile(j--, std::true_type{}, std::true_type{});
            for (; j >= full; j--) tile(j, std::false_type{}, std::true_type{});       // the masked tiles
            // region: full tiles
            for (; j >= 0; j--) tile(j, std::false_type{}, std::false_type{});         // the full ones
            // endregion
        }
        if (lane == 0) mbarrier_arrive(empty_q + 8 * q_stage); // a Q may come
        if (mine > 0) {
            add_output();
            output_is_there();
        }
        // endregion

        // region: store
        // region: last sums
        float inverse[ROWS_PER_LANE];
        last_sums(inverse, l_i);                               // New
        // endregion
        store_output<BLOCK_M, CONSUMERS, O_STEP, O_COLUMNS / O_STEP>(         // New: by slabs, where O is wide
            acc, inverse, o_map, o_smem, o_lane, lane, consumer, first_thread, first_row, at.head, at.batch);
        store_lse(p, at, l_i, m_i, warp_row + g, t, scale_log2);       // New: behind O
    }
    if (first_thread) bulk_wait<0>();                          // the last O is written
    if (consumer == 0) take_turn();                            // the last turn that was passed on to it
}
// endregion

// region: launch
#include "p11_hopper/start.cuh"
// region: workspace
extern "C" int64_t workspace_floats(const Problem* p) { return 1; }        // the counter
// endregion
// New
template <class Tile> static int launch(const Problem& p, void* stream) {
    // New: the longest part is not to begin last. So the last group has several parts for each block, long and short
    const int heads = p.batch * p.heads, grid = min(p.sms, Tile::parts(p)), m_blocks = max(1, Tile::parts(p) / heads);
    const int each = m_blocks < 8 ? 2 : m_blocks < 32 ? 3 : 4, last = min(heads, ceil_div(each * p.sms, m_blocks));
    const int together = fit_together(p.seq_k, heads), groups = (heads - last) / together;
    if (asks<Tile>(p))
        // region: clear the counter
        cudaMemsetAsync(p.workspace, 0, sizeof(int), (cudaStream_t)stream);
        // endregion
    return start(p.causal ? flash_forward<Tile, true> : flash_forward<Tile, false>, grid, Tile::THREADS, Tile::SHARED,
                 Tile::BLOCK_M, p, stream, together, groups);
}

extern "C" int forward(const Problem* p, void* stream) {
    // New: with one consumer, where that fills more blocks
    return 2 * Tile<TALL>::parts(*p) <= p->sms ? launch<Tile<1>>(*p, stream) : launch<Tile<TALL>>(*p, stream);
}
// endregion
