// wide_keys.cuh - phase 11, the way back: `keys` where a row has more than 128 columns.
//
// dK and dV of 64 keys are then 256 registers for each thread of a warpgroup. So a block keeps 64 keys; its first
// consumer has their dV, its second their dK. Each computes the scores that it needs itself: the first S^T, the second
// dP^T. P^T goes from the first to the second through shared memory, in fp32: so nothing is computed twice. The
// fragments of K and V stay in registers, and shared memory is all for stages. No two blocks write to one place.
#include "simt/names.h"

// region: shared memory of wide keys
static_assert(KEYS == QUERIES && GROUP == 2 * KEYS, "K and V take a stage like any other");
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
keys(const Backward p, int heads_together, const float* lse_log2, const float* delta,
     const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
     const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_o_map,
     const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map,
     const __grid_constant__ CUtensorMap, int* counter, int*) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t stages = smem_u32(shared);                  // Q [QUERIES, HEAD_DIM], dO, lse [QUERIES], delta
    const uint32_t full = stages + STAGES * STAGE + BESIDE, empty = full + 8 * STAGES, full_p = empty + 8 * STAGES;
    const uint32_t empty_p = full_p + 16, full_part = empty_p + 16, empty_part = full_part + 16;
    Part* next_part = (Part*)(shared + (empty_part + 16 - stages));        // two of them
    // endregion

    // region: which wide keys
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int consumer = __shfl_sync(~0u, threadIdx.x / GROUP, 0);     // one number for a warp: so are its descriptors
    const int blocks = ceil_div(p.seq_k, KEYS), group = p.heads / p.kv_heads;
    // Queries are taken by tiles: begin .. end - 1. Causal: key j is seen from query j - diagonal on.
    const int diagonal = p.seq_k - p.seq_q, end = ceil_div(p.seq_q, QUERIES);
    int batch, kv_head, n_start, begin, tiles;                 // of the part under way: each role follows by itself
    auto take = [&](Part part) {
        batch = part.head_index / p.kv_heads, kv_head = part.head_index % p.kv_heads;
        n_start = part.block * KEYS, begin = CAUSAL ? max(0, n_start - diagonal) / QUERIES : 0;
        tiles = max(0, end - begin);
    };
    // endregion

    // region: barriers of wide keys
    if (threadIdx.x == 0) {                                    // a full one waits for one arrival, and for bytes
        for (int i = 0; i < STAGES; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, WARPS);
        for (int i = 0; i < 4; i++) mbarrier_init(full_p + 8 * i, WARPS / CONSUMERS);
        for (int i = 0; i < 4; i++) mbarrier_init(full_part + 8 * i, i < 2 ? 1 : CONSUMERS * GROUP);
        tma_prefetch(&q_map), tma_prefetch(&k_map), tma_prefetch(&v_map), tma_prefetch(&grad_o_map);
        fence_mbarrier_init();                                 // or the copy engine might not see them yet
    }
    __syncthreads();                                           // the last one
    // endregion

    // region: producer of wide keys
    // A part takes a stage for K and V, one for each tile of Q and dO, and one from which dV and dK leave.
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            const int heads = p.batch * p.kv_heads, parts = blocks * heads;
            int nth = 0;                                       // stages so far
            auto next_stage = [&](int bytes) {
                mbarrier_wait(empty + 8 * (nth % STAGES), nth / STAGES & 1 ^ 1);       // a new one passes this at once
                mbarrier_arrive_expect_tx(full + 8 * (nth % STAGES), bytes);
                return nth++ % STAGES;
            };
            auto ask = [&](int stage, const CUtensorMap& a, const CUtensorMap& b, int row, int head) {
                copy_tile<QUERIES>(stages + stage * STAGE, a, full + 8 * stage, row, head, batch);
                copy_tile<QUERIES>(stages + stage * STAGE + Q_BYTES, b, full + 8 * stage, row, head, batch);
            };
            for (int number = blockIdx.x, n = 0;; n++) {
                mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);
                const Part part =
                    number < parts ? part_of<CAUSAL>(number, blocks, heads, heads_together) : Part{-1, 0};
                next_part[n % 2] = part;
                mbarrier_arrive(full_part + 8 * (n % 2));
                if (number >= parts) break;
                take(part);
                ask(next_stage(2 * Q_BYTES), k_map, v_map, n_start, kv_head);
                for (int i = 0; i < tiles * group; i++) {      // of every query head that reads this key head
                    const int head = kv_head * group + i / tiles, m_start = (begin + i % tiles) * QUERIES;
                    const int64_t row = (int64_t)(batch * p.heads + head) * padded(p.seq_q) + m_start;
                    const int stage = next_stage(2 * Q_BYTES + 8 * QUERIES);
                    const uint32_t lse_smem = stages + stage * STAGE + 2 * Q_BYTES;
                    ask(stage, q_map, grad_o_map, m_start, head);
                    bulk_load(lse_smem, lse_log2 + row, 4 * QUERIES, full + 8 * stage);
                    bulk_load(lse_smem + 4 * QUERIES, delta + row, 4 * QUERIES, full + 8 * stage);
                }
                next_stage(0);
                number = gridDim.x + atomicAdd(counter, 1);
            }
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();                      // waits until there are so many
    // endregion

    // region: state of wide keys
    auto consume = [&](auto has_v) {                           // what a consumer does, with dV or with dK
        constexpr bool HAS_V = decltype(has_v)::value;
        float acc[HEAD_DIM / 2], s[STEP / 2];                  // dV or dK; S^T, then P^T, or dP^T, then dS^T
        uint32_t kept[HEAD_DIM / MMA_K][4], s_rmem[STEP / MMA_K][4];       // K or V; P^T or dS^T, rounded
        constexpr int OF_SCORES = HAS_V ? 0 : Q_BYTES, OF_SUM = Q_BYTES - OF_SCORES;       // in a stage: Q or dO
        const int g = lane / 4, t = lane % 4;
        const float scale_log2 = p.scale * LOG2E;
        int nth = 0, steps = 0, first_key, row;                // so far; the lane's key, and 8 further; the first query
        auto stage = [&] { return stages + nth % STAGES * STAGE; };
        auto wait_for_stage = [&] { mbarrier_wait(full + 8 * (nth % STAGES), nth / STAGES & 1); };
        auto free_stage = [&] {                                // and go on to the next
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + 8 * (nth % STAGES));
            nth++;
        };
        // endregion

        // region: scores of wide keys
        // S^T = K Q^T, or dP^T = V dO^T: rows are keys, columns are queries: STEP of a stage, from `first` on.
        auto step = [&](int first) {
            const uint32_t here = stage() + first * SLAB_ROW;
            const float* numbers = (const float*)(shared + (stage() + 2 * Q_BYTES - stages)) + (HAS_V ? 0 : QUERIES);
            float of_lane[STEP / WARP_SIZE];                   // of a query: lse or delta, which others get from here
#pragma unroll
            for (int i = 0; i < STEP / WARP_SIZE; i++) of_lane[i] = numbers[first + i * WARP_SIZE + lane];
            auto of_query = [&](int i) {
                return __shfl_sync(~0u, of_lane[i / 16], i / 4 % 4 * MMA_N + t * 2 + i % 2);
            };
            scores<STEP, QUERIES>(s, kept, descriptor(here + OF_SCORES));
            wgmma_wait<0>();
            // endregion

            // region: P goes over
            // Thread by thread, as it lies in registers: the two consumers hold the same keys and queries
            const int place = steps % 2, turn = steps++ / 2 & 1;
            float4* p_smem = (float4*)(shared + STAGES * STAGE + place * P_BYTES) + threadIdx.x % GROUP;
            if constexpr (HAS_V) {                             // P^T = exp(S^T - lse)
#pragma unroll
                for (int i = 0; i < STEP / 2; i++) s[i] = exp2_approx(fmaf(s[i], scale_log2, -of_query(i)));
                if (CAUSAL && row + first + diagonal < n_start + KEYS - 1)
#pragma unroll
                    for (int i = 0; i < STEP / 2; i++) {
                        const int query = row + first + i / 4 * MMA_N + t * 2 + i % 2;
                        if (query + diagonal < first_key + i / 2 % 2 * 8) s[i] = 0.f;
                    }
                mbarrier_wait(empty_p + 8 * place, turn ^ 1);
#pragma unroll
                for (int n = 0; n < STEP / MMA_N; n++)
                    p_smem[n * GROUP] = make_float4(s[4 * n], s[4 * n + 1], s[4 * n + 2], s[4 * n + 3]);
            } else {                                           // dS^T = P^T * (dP^T - delta)
                mbarrier_wait(full_p + 8 * place, turn);
#pragma unroll
                for (int n = 0; n < STEP / MMA_N; n++) {
                    const float4 weights = p_smem[n * GROUP];
                    const float delta_0 = of_query(4 * n), delta_1 = of_query(4 * n + 1);
                    s[4 * n] = weights.x * (s[4 * n] - delta_0), s[4 * n + 1] = weights.y * (s[4 * n + 1] - delta_1);
                    s[4 * n + 2] = weights.z * (s[4 * n + 2] - delta_0);
                    s[4 * n + 3] = weights.w * (s[4 * n + 3] - delta_1);
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive((HAS_V ? full_p : empty_p) + 8 * place);
            // endregion

            // region: dV or dK
            // dV += P^T dO, or dK += dS^T Q. With the next scores behind it at once, registers would run out
            round_to<STEP>(s_rmem, s);
            add_product<STEP>(acc, s_rmem, descriptor_of_rows<QUERIES>(here + OF_SUM));
            wgmma_wait<0>();
        };
        // endregion

        // region: main loop of wide keys
        for (int n = 0;; n++) {                                // part after part
            mbarrier_wait(full_part + 8 * (n % 2), n / 2 & 1);
            const Part part = next_part[n % 2];
            mbarrier_arrive(empty_part + 8 * (n % 2));         // by every thread: it has read it
            if (part.head_index < 0) break;
            take(part);
            first_key = n_start + warp % 4 * MMA_M + g, row = begin * QUERIES;
            wait_for_stage();
#pragma unroll
            for (int k = 0; k < HEAD_DIM / MMA_K; k++)
                ldmatrix_x4(kept[k], fragment_at<SLAB, KEYS>(stage() + OF_SCORES, k));
            fence_proxy_async();                               // or a tile might come before all of it has been read
            free_stage();
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; i++) acc[i] = 0.f;
            for (int last = nth + tiles * group; nth != last;) {
                wait_for_stage();
#pragma unroll
                for (int first = 0; first < QUERIES; first += STEP) step(first);
                free_stage();
                row = row == (end - 1) * QUERIES ? begin * QUERIES : row + QUERIES;    // the next head begins
            }
            // endregion

            // region: store dV or dK
            wait_for_stage();                                  // nobody reads what was there before
            store_tile<KEYS>(acc, HAS_V ? 1.f : p.scale, stage() + OF_SCORES, HAS_V ? dv_map : dk_map, n_start, kv_head,
                             batch);
            if (threadIdx.x % GROUP == 0) bulk_wait_read<0>();
            free_stage();
        }
        if (threadIdx.x % GROUP == 0) bulk_wait<0>();          // it is written
    };
    consumer == 0 ? consume(std::true_type{}) : consume(std::false_type{});
}
// endregion
#include "simt/names_end.h"
