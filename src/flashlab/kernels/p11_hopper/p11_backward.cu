// Phase 11, the way back: dQ, dK and dV by TMA, mbarriers and wgmma.
//
// With P = exp(scale * Q K^T - lse) and delta = rowsum(dO * O), the gradients of O = P V are
//   dV = P^T dO,  dS = P * (dO V^T - delta),  dK = scale * dS^T Q,  dQ = scale * dS K.
// fp16 or bf16 in and out, fp32 accumulators. Three kernels: `statistics` makes of each row the two numbers that P and
// dS need. `keys` keeps 128 keys in a block and walks over the queries that see them, those of every head that shares
// the keys. Its consumers bring dS to shared memory, and compute what their 128 keys give to dQ. Threads beside the
// producer add that to fp32 sums in memory, by TMA: at each tile the blocks of keys in their order, so the bits are the
// same each time; -DORDERED=0 adds in any order, to see what order costs. `convert` makes dQ of the sums.
//
// A block has two consumers of 64 rows each, and a producer. In `keys` the scores are computed transposed, K Q^T: so
// P^T and dS^T lie in registers as the A operands of dV and dK, and only for dQ dS is stored, transposed back. Its
// second consumer is some products behind the first: -DSKEWED=0 to see what that is for.
//
// Up to D = 96 the fragments of K and V stay in registers: shared memory is what the products wait for.
//
// With -DPRODUCTS=7 `queries` keeps 128 queries in a block and walks over the keys that they see: nobody adds to what
// another block writes. The price is that P and dO V^T are computed twice. Beyond D = 128 that is the only way, and
// `keys` another one (wide_keys.cuh).
//
// Compile with -DHEAD_DIM=64, 80, 96, 112, 128, 160, 192 or 256, and -DELEMENT=__half or __nv_bfloat16,
// -DQUERY_STEP=queries at a time in `keys`, -DMOST_STAGES=2 or more; for seven products -DKEY_STEP=keys at a time in
// `queries`.

// region: options
#ifndef SLAB
#define SLAB 64                                                // a square of dQ has so many columns
#endif
#include "p11_hopper/tiles.cuh"
#ifndef QUERY_STEP
#define QUERY_STEP (HEAD_DIM > 192 ? 32 : 64)
#endif
#ifndef KEY_STEP
#define KEY_STEP (HEAD_DIM > 192 ? 48 : HEAD_DIM > 128 ? 64 : 128)
#endif
#ifndef MOST_STAGES
#define MOST_STAGES 3
#endif
#ifndef PRODUCTS
#define PRODUCTS (HEAD_DIM > 128 ? 7 : 5)
#endif
#ifndef SKEWED
#define SKEWED (PRODUCTS == 5)                               // the barrier of dS keeps it in step
#endif
#ifndef ORDERED
#define ORDERED 1
#endif
// endregion

// region: constants
constexpr bool FIVE = PRODUCTS == 5;
constexpr int GROUP = 128, CONSUMERS = 2;                      // threads of a warpgroup; the producer's is the third
constexpr int WARPS = 4 * CONSUMERS, THREADS = (CONSUMERS + 1) * GROUP;
constexpr int GO_ON = 2 + CONSUMERS;                           // named barriers from here on: the first to the second
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;       // per thread
constexpr int BLOCK = WARPS * MMA_M;                           // rows that a block keeps: keys in `keys`, else queries
constexpr int ROWS_PER_LANE = 2;                               // of an accumulator: g and g + 8
constexpr int KEPT_BYTES = BLOCK * COLUMNS * 2;                // of a tile that stays
constexpr bool ROOMY = FIVE && HEAD_DIM <= 96;                 // there are registers for the fragments of K and V
// Queries of a stage of `keys`. Five products: of its dQ each consumer has a square, 64 queries and SQUARE columns.
constexpr int SQUARE = ROOMY && HEAD_DIM > SLAB ? HEAD_DIM / 2 : 64;
constexpr int QUERIES = FIVE ? CONSUMERS * 64 * SLAB / COLUMNS : 64;
constexpr int DQ_BYTES = CONSUMERS * 64 * SQUARE * 4, DS_BYTES = QUERIES * BLOCK * 2;
constexpr int SUMMED = DQ_BYTES / 4 / QUERIES;                 // columns of dQ that are summed
constexpr int SUMS_BYTES = FIVE ? 2 * (DQ_BYTES + DS_BYTES) : 0;       // those of a tile, while the next is computed
// A stage of `keys` holds two tiles of queries, and two numbers a row. Beside stages: kept tiles, and sums; where rows
// have more than 128 columns, P instead, twice, STEP queries at a time.
constexpr bool WIDE = HEAD_DIM > 128;
constexpr int KEYS = WIDE ? 64 : BLOCK;                        // that a block of `keys` keeps
constexpr int STEP = QUERY_STEP, P_BYTES = KEYS * STEP * 4;
constexpr int Q_BYTES = QUERIES * COLUMNS * 2, STAGE = 2 * Q_BYTES + 1024;     // a multiple of 1024
constexpr int BESIDE = WIDE ? 2 * P_BYTES : 2 * KEPT_BYTES + SUMS_BYTES;
// As many stages as there is room for; then the barriers, 8 bytes each
constexpr int ROOM = ((226 << 10) - BESIDE) / STAGE, STAGES = ROOM < MOST_STAGES ? ROOM : MOST_STAGES;
constexpr int BARRIERS = 2 * STAGES + 11;
constexpr int SHARED = BESIDE + STAGES * STAGE + 8 * BARRIERS + 16;
// dK and dV leave from where dS was, as far as there is room: so the next K and V may come meanwhile.
constexpr bool K_LEAVES = FIVE, V_LEAVES = FIVE && KEPT_BYTES <= DS_BYTES;
static_assert(!FIVE || !WIDE, "beyond 128 columns dQ has no room in `keys`");
static_assert(!FIVE || KEPT_BYTES <= 2 * DS_BYTES, "dK needs as much room as K");
static_assert(STAGES > 1, "a stage is free when the next is in use");
static_assert(FIVE || !SKEWED, "without the barrier of dS one consumer may run a turn ahead");
static_assert(BLOCK % QUERIES == 0 && QUERIES <= 128, "two numbers for each of so many queries are 1024 bytes");
static_assert(QUERIES % QUERY_STEP == 0 && (!FIVE || 64 % QUERY_STEP == 0), "a stage is taken in equal steps");
// endregion

// region: shapes
// What the host hands over beside the tensors. Rows are contiguous; the strides are in elements.
struct Backward {
    Strides q_stride, k_stride, v_stride, o_stride, grad_o_stride, dq_stride, dk_stride, dv_stride;
    int batch, heads, kv_heads, seq_q, seq_k;
    int causal;                                                // query i sees the keys up to i + seq_k - seq_q
    float scale;                                               // P = softmax(scale * q k^T): of any sign
    int sms;                                                   // multiprocessors of the device
    int launches;                                              // 1 statistics + 2 keys + 4 queries: 7, but to time them
};
// Rows of a head in row_statistics, which holds lse and then delta: as many as whole blocks have. So they begin where
// bulk copies may, and rows that do not exist need no mask: their P is 0.
__host__ __device__ __forceinline__ constexpr int padded(int rows) { return ceil_div(rows, BLOCK) * BLOCK; }
// endregion

// region: products
// c = A B^T, with 64 rows of a tile of BLOCK rows, and N rows of a tile of ROWS. Issued, not waited for.
template <int N, int ROWS = N> __device__ __forceinline__ void scores(float (&c)[N / 2], uint64_t a, uint64_t b) {
    wgmma_fence();                                             // the registers of c are the tensor cores' from here on
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)                 // the first one overwrites c
        wgmma_ss<N, T>(c, a + columns_on<BLOCK>(k), b + columns_on<ROWS>(k), k > 0);
    wgmma_commit();
}
// The same with A in registers.
template <int N, int ROWS>
__device__ __forceinline__ void scores(float (&c)[N / 2], const uint32_t (&a)[HEAD_DIM / MMA_K][4], uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++) wgmma_rs<N, T>(c, a[k], b + columns_on<ROWS>(k), k > 0);
    wgmma_commit();
}
// acc += A B, with A in registers, and a tile of N rows.
template <int N>
__device__ __forceinline__ void add_product(float (&acc)[HEAD_DIM / 2], const uint32_t (&a)[N / MMA_K][4], uint64_t b) {
    wgmma_fence();                                             // acc and a were written by their lanes
#pragma unroll
    for (int k = 0; k < N / MMA_K; k++) wgmma_rs<HEAD_DIM, T, true>(acc, a[k], b + rows_on(k));
    wgmma_commit();
}
// Two neighbouring accumulators, rounded, are an A fragment: no lane needs another's numbers.
template <int N> __device__ __forceinline__ void round_to(uint32_t (&a)[N / MMA_K][4], const float (&c)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) a[i / 4][i % 4] = pack<T>(c[2 * i], c[2 * i + 1]);
}
// endregion

// region: store a tile
// Where 16 rows x 16 columns, an A fragment of a warp, lie among its rows of a tile of BLOCK rows: columns 16 k and on.
template <int WIDTH = SLAB, int ROWS = BLOCK>
__device__ __forceinline__ uint32_t fragment_at(uint32_t tile_smem, int k) {
    const int lane = threadIdx.x % WARP_SIZE, warp = (ROWS < BLOCK ? threadIdx.x % GROUP : threadIdx.x) / WARP_SIZE;
    const int column = k * MMA_K + lane / 16 * 8, chunk = column % WIDTH / 8 ^ lane % 8 / LINE;
    return tile_smem + (column / WIDTH * ROWS + warp * MMA_M + lane % 16) * SLAB_ROW + chunk * 16;
}
// Writes it transposed, into a tile of ROWS rows and BLOCK columns: the warp's 16 columns, rows 16 k and on.
template <int ROWS>
__device__ __forceinline__ void place_transposed(uint32_t tile_smem, int k, const uint32_t (&a)[4]) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int row = k * MMA_K + lane / 16 * 8 + lane % 8, column = warp * MMA_M + lane / 8 % 2 * 8;
    stmatrix_x4_trans(tile_smem + (column / 64 * ROWS + row) * 128 + (column % 64 / 8 ^ lane % 8) * 16, a);
}
// Writes factor * acc, the 64 rows of a consumer, into its rows of a tile that nobody else reads, and from there to
// memory by TMA. To be called by all of its threads, after their last product.
template <int ROWS = BLOCK>
__device__ __forceinline__ void store_tile(const float (&acc)[HEAD_DIM / 2], float factor, uint32_t tile_smem,
                                           const CUtensorMap& map, int row, int head, int batch) {
    const int consumer = threadIdx.x / GROUP, first = ROWS < BLOCK ? 0 : consumer * 64;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
        uint32_t rounded[4];
        for (int i = 0; i < 4; i++)
            rounded[i] = pack<T>(acc[8 * k + 2 * i] * factor, acc[8 * k + 2 * i + 1] * factor);
        stmatrix_x4(fragment_at<SLAB, ROWS>(tile_smem, k), rounded);
    }
    fence_proxy_async();                                       // or the copy engine might not see what was stored
    named_barrier_sync(1 + consumer, GROUP);
    if (threadIdx.x % GROUP == 0) {                            // rows that do not exist are not written
        for (int column = 0; column < HEAD_DIM; column += SLAB)
            tma_store(&map, tile_smem + (column / SLAB * ROWS + first) * SLAB_ROW, column, row + first, head, batch);
        bulk_commit();
    }
}
// endregion

// region: statistics
// delta = rowsum(dO * O), less what a loss of lse adds to each dS of the row, and lse as exp2 wants it. Of a row eight
// lanes take 16 bytes at a time. One that does not exist, or sees no key, has an lse of inf: its P is exp2(-inf) = 0.
// And what counts is set to 0: which part is next, and the turns.
constexpr int LANES_PER_ROW = 8, STATISTICS_ROWS = 256 / LANES_PER_ROW;        // they divide BLOCK
__global__ void __launch_bounds__(256)
statistics(const Backward p, const void* o, const void* grad_o, const float* lse, const float* grad_lse,
           float* lse_log2, float* delta, int* counter, int* turns) {
    const int lane = threadIdx.x % LANES_PER_ROW, blocks = padded(p.seq_q) / STATISTICS_ROWS;
    const int head_index = blockIdx.x / blocks;
    const int row = blockIdx.x % blocks * STATISTICS_ROWS + threadIdx.x / LANES_PER_ROW;
    float sum = 0.f, x = INFINITY;
    if (row < p.seq_q) {
        const int batch = head_index / p.heads, head = head_index % p.heads;
        const T* of_o = rows_of(o, p.o_stride, batch, head, row);
        const T* of_grad_o = rows_of(grad_o, p.grad_o_stride, batch, head, row);
#pragma unroll
        for (int column = 8 * lane; column < HEAD_DIM; column += 8 * LANES_PER_ROW) {
            const uint4 a = *(const uint4*)(of_o + column), b = *(const uint4*)(of_grad_o + column);
            const uint32_t a_pairs[] = {a.x, a.y, a.z, a.w}, b_pairs[] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 u = unpack<T>(a_pairs[i]), v = unpack<T>(b_pairs[i]);
                sum += u.x * v.x + u.y * v.y;
            }
        }
        const int64_t index = (int64_t)head_index * p.seq_q + row;
        if (grad_lse && lane == 0) sum -= grad_lse[index];
        x = lse[index] == -INFINITY ? INFINITY : lse[index] * LOG2E;
    }
    for (int other = LANES_PER_ROW / 2; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane > 0) return;
    const int64_t index = (int64_t)head_index * padded(p.seq_q) + row;
    lse_log2[index] = x, delta[index] = x == INFINITY ? 0.f : sum;
    if (FIVE && index % QUERIES == 0) turns[index / QUERIES] = 0;
    if (index == 0) *counter = 0;
}
// endregion

// region: parts
// Which block of which head the n-th part is. Causal ones differ in length: the longest begin, of as many heads as fit
// in L2 together.
struct Part {
    int head_index, block;
};
template <bool CAUSAL> __device__ __forceinline__ Part part_of(int n, int blocks, int heads, int heads_together) {
    if (!CAUSAL) return {n / blocks, n % blocks};
    const int group = n / (blocks * heads_together), in_group = n % (blocks * heads_together);
    const int group_heads = min(heads_together, heads - group * heads_together);
    return {group * heads_together + in_group % group_heads, in_group / group_heads};
}
// endregion

#if HEAD_DIM > 128
#include "p11_hopper/wide_keys.cuh"
#else

// region: shared memory of keys
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
keys(const Backward p, int heads_together, const float* lse_log2, const float* delta,
     const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
     const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_o_map,
     const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map,
     const __grid_constant__ CUtensorMap sums_map, int* counter, int* turns) {
    constexpr int TILE = QUERIES;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t k_smem = smem_u32(shared);                  // [BLOCK, HEAD_DIM], and at last dK
    const uint32_t v_smem = k_smem + KEPT_BYTES;               // [BLOCK, HEAD_DIM], and at last dV
    const uint32_t stages = v_smem + KEPT_BYTES;               // Q [TILE, HEAD_DIM], dO, lse [TILE], delta [TILE]
    const uint32_t ds_smem = stages + STAGES * STAGE;          // five products: twice dS [TILE, BLOCK],
    const uint32_t dq_smem = ds_smem + 2 * DS_BYTES;           // and twice dQ, a square for each consumer
    const uint32_t full_kept = ds_smem + SUMS_BYTES, full = full_kept + 8, empty = full + 8 * STAGES;
    const uint32_t dq_full = empty + 8 * STAGES, dq_empty = dq_full + 16, empty_k = dq_empty + 16;
    const uint32_t empty_v = empty_k + 8, full_part = empty_v + 8, empty_part = full_part + 16;
    Part* next_part = (Part*)(shared + (empty_part + 16 - k_smem));    // two of them
    // endregion

    // region: which keys
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int consumer = __shfl_sync(~0u, threadIdx.x / GROUP, 0);     // one number for a warp: so are its descriptors
    const int blocks = ceil_div(p.seq_k, BLOCK), group = p.heads / p.kv_heads;
    // Queries are taken by tiles: begin .. end - 1. Causal: key j is seen from query j - diagonal on.
    const int diagonal = p.seq_k - p.seq_q, end = ceil_div(p.seq_q, TILE);
    Part part;                                                 // the one under way: each role follows by itself
    int batch, kv_head, n_start, begin, tiles;
    auto take = [&](Part taken) {
        part = taken, batch = part.head_index / p.kv_heads, kv_head = part.head_index % p.kv_heads;
        n_start = part.block * BLOCK, begin = CAUSAL ? max(0, n_start - diagonal) / TILE : 0;
        tiles = max(0, end - begin);
    };
    // Five products: from the last tile to the first. All blocks see the last one, so they walk side by side, each
    // behind the block whose turn is before its own; causal too, where the first blocks have most to do.
    auto tile_of = [&](int nth) { return FIVE ? end - 1 - nth % tiles : begin + nth % tiles; };
    auto row_of = [&](int nth) {                               // its first row, of all heads' in row_statistics
        const int head_index = batch * p.heads + kv_head * group + nth / tiles;
        return (int64_t)head_index * padded(p.seq_q) + tile_of(nth) * TILE;
    };
    auto next = [&](int n) {                                   // waits for the producer's word: whether there is one
        mbarrier_wait(full_part + 8 * (n % 2), n / 2 & 1);
        take(next_part[n % 2]);
        mbarrier_arrive(empty_part + 8 * (n % 2));             // by every thread: it has read it
        return part.head_index >= 0;
    };
    // endregion

    // region: barriers of keys
    if (threadIdx.x == 0) {                                    // a full one waits for one arrival, and for bytes
        // Every warp says that it has read lse and delta, every thread that it has read which part is next
        for (int i = 0; i < 1 + 2 * STAGES; i++) mbarrier_init(full_kept + 8 * i, i < 1 + STAGES ? 1 : WARPS);
        for (int i = 0; i < 4; i++) mbarrier_init(dq_full + 8 * i, i < 2 ? WARPS : 1);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(empty_k + 8 * i, CONSUMERS), mbarrier_init(full_part + 8 * i, 1);
            mbarrier_init(empty_part + 8 * i, CONSUMERS * GROUP + (FIVE ? 2 : 0));
        }
        tma_prefetch(&q_map), tma_prefetch(&k_map), tma_prefetch(&v_map), tma_prefetch(&grad_o_map);
        fence_mbarrier_init();                                 // or the copy engine might not see them yet
    }
    __syncthreads();                                           // the last one
    // endregion

    // region: producer of keys
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            const int parts = blocks * p.batch * p.kv_heads;
            for (int number = blockIdx.x, n = 0, done = 0;; n++) {
                mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);    // a new barrier passes this at once
                const Part here = number < parts ? part_of<CAUSAL || FIVE>(number, blocks, p.batch * p.kv_heads,
                                                                           heads_together) : Part{-1, 0};
                next_part[n % 2] = here;
                mbarrier_arrive(full_part + 8 * (n % 2));
                if (number >= parts) break;
                take(here);
                auto load_kept = [&] {
                    mbarrier_wait(empty_k, n & 1 ^ 1);
                    mbarrier_arrive_expect_tx(full_kept, 2 * KEPT_BYTES);
                    for (int slab = 0; slab < COLUMNS / SLAB; slab++)
                        tma_load(k_smem + slab * BLOCK * SLAB_ROW, &k_map, full_kept, slab * SQUARE, n_start, kv_head,
                                 batch);
                    mbarrier_wait(empty_v, n & 1 ^ 1);
                    copy_tile<BLOCK>(v_smem, v_map, full_kept, n_start, kv_head, batch);
                };
                if (n == 0 || tiles == 0) load_kept();
                for (int i = 0; i < tiles * group; i++) {
                    const int nth = done + i, stage = nth % STAGES, m_start = tile_of(i) * TILE;
                    const int head = kv_head * group + i / tiles;
                    const uint32_t bar = full + 8 * stage, q_smem = stages + stage * STAGE;
                    const uint32_t lse_smem = q_smem + 2 * Q_BYTES;
                    mbarrier_wait(empty + 8 * stage, nth / STAGES & 1 ^ 1);
                    mbarrier_arrive_expect_tx(bar, 2 * Q_BYTES + 8 * TILE);
                    copy_tile<TILE>(q_smem, q_map, bar, m_start, head, batch);
                    copy_tile<TILE>(q_smem + Q_BYTES, grad_o_map, bar, m_start, head, batch);
                    bulk_load(lse_smem, lse_log2 + row_of(i), 4 * TILE, bar);
                    bulk_load(lse_smem + 4 * TILE, delta + row_of(i), 4 * TILE, bar);
                    if (i == 0 && n > 0) load_kept();          // the first tile need not wait for them
                }
                done += tiles * group;
                number = gridDim.x + atomicAdd(counter, 1);    // not before: others wait for who has taken it
            }
        }
        // endregion

        // region: sum dQ
        // Two threads, one for every other tile, add a tile's squares to the sums, after the blocks of smaller numbers.
        // Those parts were taken before, and wait for none that was taken later: so the first of all that are not done
        // goes on, however few blocks there are, and nobody waits for ever.
        if (FIVE && warp > WARPS && warp <= WARPS + 2 && elect_one()) {
            const int which = warp - WARPS - 1;
            const uint32_t from = dq_smem + which * DQ_BYTES;
            int nth = which;                                   // of all tiles of all parts
            for (int n = 0, done = 0; next(n); done += tiles * group, n++)
                for (; nth < done + tiles * group; nth += 2) {
                    const int index = (int)(row_of(nth - done) / TILE), to = index * (DQ_BYTES / 1024);
                    volatile int* turn = turns + index;        // how many blocks have added to this tile
                    if (ORDERED) {
                        while (*turn != part.block) {}
                        fence_proxy_async_global();            // their sums come before what is copied now
                    }
                    mbarrier_wait(dq_full + 8 * which, nth / 2 & 1);
                    if (ORDERED && part.block == 0) tma_store(&sums_map, from, 0, to);     // over what lies there
                    else tma_reduce_add(&sums_map, from, 0, to);
                    bulk_commit();
                    bulk_wait_read<0>();
                    mbarrier_arrive(dq_empty + 8 * which);
                    if (ORDERED) {
                        bulk_wait<0>();                        // it is added
                        __threadfence();
                        *turn = part.block + 1;
                    }
                }
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();                      // waits until there are so many
    // endregion

    // region: state of keys
    // c0 c1 | c2 c3 of an accumulator: columns 2t, 2t + 1 of row g | of row g + 8
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
    uint32_t p_rmem[STEP / MMA_K][4], ds_rmem[STEP / MMA_K][4];        // P^T and dS^T, rounded
    const uint64_t k_operand = descriptor(k_smem + consumer * 64 * SLAB_ROW);
    const uint64_t v_operand = descriptor(v_smem + consumer * 64 * SLAB_ROW);
    const bool first_thread = threadIdx.x % GROUP == 0;        // it says that its warpgroup is through
    const float scale_log2 = p.scale * LOG2E;                  // exp(x) is computed as exp2(x * log2(e))
    // The first query of the tile under way: counted, since a division in each tile costs 4 %
    int first_tile, last_tile, row, first_row, last_row;       // queries; of the lane's and the consumer's keys
    auto begin_part = [&](int n) {                             // whether there is one
        if (!next(n)) return false;
        first_tile = (FIVE ? end - 1 : begin) * TILE, last_tile = (FIVE ? begin : end - 1) * TILE, row = first_tile;
        first_row = n_start + warp * MMA_M + g, last_row = n_start + consumer * 64 + 63;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.f;
        return true;
    };
    // endregion

    // region: dQ of a square
    float dq[SQUARE / 2];                                      // 64 queries: over all keys of the block
    // dQ = dS K: D = 64 has 128 queries in a stage, 64 for each consumer; else each has 64 columns, and all queries
    const uint64_t ds_operand = descriptor(ds_smem + (TILE > 64 ? consumer * 64 * SLAB_ROW : 0));
    const uint64_t dq_operand = descriptor_of_rows<BLOCK>(k_smem + (TILE > 64 ? 0 : consumer * BLOCK * SLAB_ROW));
    auto multiply_dq = [&](int nth) {
        named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);  // dS of both consumers is there
        const uint64_t ds = ds_operand + nth % 2 * DS_BYTES / 16;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK / MMA_K; k++)
            wgmma_ss<SQUARE, T, false, true>(dq, ds + columns_on<TILE>(k), dq_operand + rows_on(k), k > 0);
        wgmma_commit();
    };
    auto hand_dq_on = [&](int nth) {                           // as it lies in registers: `convert` knows
        const uint32_t square_smem = dq_smem + nth % 2 * DQ_BYTES + consumer * (DQ_BYTES / CONSUMERS);
        float4* square = (float4*)(shared + (square_smem - k_smem)) + threadIdx.x % GROUP;
        mbarrier_wait(dq_empty + nth % 2 * 8, nth / 2 & 1 ^ 1);            // the one before the last has been read
#pragma unroll
        for (int n = 0; n < SQUARE / MMA_N; n++)
            square[n * GROUP] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(dq_full + nth % 2 * 8);
    };
    // endregion

    // region: transposed scores
    float s[STEP / 2], dp[STEP / 2];
    // Of a step: Q's rows, and its lse; dO is behind Q, and delta behind lse.
    auto q_of = [&](int nth, int first) { return stages + nth % STAGES * STAGE + first * SLAB_ROW; };
    auto lse_of = [&](int nth, int first) {
        return (const float*)(shared + (stages - k_smem) + nth % STAGES * STAGE + 2 * Q_BYTES) + first;
    };
    // P and dS of a key that its query does not see, or (what dQ must not have) that does not exist, are 0. Not while a
    // product is under way: with A in registers, ptxas 13.0 makes of that branch a kernel whose results are wrong.
    auto hide = [&](int row) {
        if (!(CAUSAL && row < last_row - diagonal) && !(FIVE && last_row >= p.seq_k)) return;
#pragma unroll
        for (int i = 0; i < STEP / 2; i++) {
            const int key = first_row + i / 2 % 2 * 8, query = row + i / 4 * MMA_N + t * 2 + i % 2;
            if ((CAUSAL && query + diagonal < key) || (FIVE && key >= p.seq_k)) s[i] = dp[i] = 0.f;
        }
    };
    uint32_t k_rmem[HEAD_DIM / MMA_K][4], v_rmem[HEAD_DIM / MMA_K][4];     // if ROOMY
    auto product = [&](float (&c)[STEP / 2], const auto& a_rmem, uint64_t a, uint64_t b) {
        if constexpr (ROOMY) scores<STEP, TILE>(c, a_rmem, b);
        else scores<STEP, TILE>(c, a, b);
    };
    // Two numbers for each n of a lane, loaded before the next products keep shared memory busy. Where there are no
    // registers for all, a lane loads those of one n, and the others get them from there.
    float2 numbers[STEP / MMA_N], of_g;
    auto load_numbers = [&](const float* row) {
#pragma unroll
        for (int n = 0; n < STEP / MMA_N; n++) numbers[n] = *(const float2*)(row + n * MMA_N + t * 2);
    };
    // S^T = K Q^T and dP^T = V dO^T: rows are keys, columns are queries: STEP of a stage, from `first` on. The second
    // consumer waits until the first has its P: so one has exponentials to compute while the other multiplies.
    // (The barrier of dS keeps the first from being a step ahead: it never arrives twice.)
    auto begin_step = [&](int nth, int first) {
        const float* lse_row = lse_of(nth, first);
        if (first == 0) mbarrier_wait(full + 8 * (nth % STAGES), nth / STAGES & 1);    // for every thread that waits
        if (SKEWED && consumer == 1) named_barrier_sync(GO_ON + first / STEP, CONSUMERS * GROUP);
        product(s, k_rmem, k_operand, descriptor(q_of(nth, first)));
        load_numbers(lse_row);
        if (!ROOMY) of_g = *(const float2*)(lse_row + TILE + g % (STEP / MMA_N) * MMA_N + t * 2);
        product(dp, v_rmem, v_operand, descriptor(q_of(nth, first) + Q_BYTES));
        wgmma_wait<1>();                                       // S^T is ours
        // endregion

        // region: transposed probabilities
        // P^T = exp(S^T - lse), in place, while dP^T is computed
#pragma unroll
        for (int n = 0; n < STEP / MMA_N; n++) {
            const float2 lse = numbers[n];
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[4 * n + i] = exp2_approx(fmaf(s[4 * n + i], scale_log2, i % 2 ? -lse.y : -lse.x));
        }
        if (ROOMY) load_numbers(lse_row + TILE);
    };
    // endregion

    // region: dV and dK
    // dS^T = P^T * (dP^T - delta); then all products in one row: dV += P^T dO, dQ = dS K, dK += dS^T Q.
    auto end_step = [&](int nth, int first) {
        if (SKEWED && consumer == 0) named_barrier_arrive(GO_ON + first / STEP, CONSUMERS * GROUP);   // it may begin
        wgmma_wait<0>();                                       // dP^T is ours
#pragma unroll
        for (int n = 0; n < STEP / MMA_N; n++) {
            const int from = n * 4 + t;
            const float delta[] = {ROOMY ? numbers[n].x : __shfl_sync(~0u, of_g.x, from),
                                   ROOMY ? numbers[n].y : __shfl_sync(~0u, of_g.y, from)};
#pragma unroll
            for (int i = 0; i < 4; i++) dp[4 * n + i] = s[4 * n + i] * (dp[4 * n + i] - delta[i % 2]);
        }
        hide(row + first);
        if (first + STEP == TILE) row = row == last_tile ? first_tile : row + (FIVE ? -TILE : TILE);
        round_to<STEP>(p_rmem, s), round_to<STEP>(ds_rmem, dp);
        if constexpr (FIVE)                                    // both have dQ of the tile before last: it is read
#pragma unroll
            for (int k = 0; k < STEP / MMA_K; k++)
                place_transposed<TILE>(ds_smem + nth % 2 * DS_BYTES, first / MMA_K + k, ds_rmem[k]);
        add_product<STEP>(dv, p_rmem, descriptor_of_rows<TILE>(q_of(nth, first) + Q_BYTES));
        if (FIVE) fence_proxy_async();                         // or the tensor cores might not see dS
        const bool dq_too = FIVE && first + STEP == TILE;      // dS of the whole stage is there
        if (dq_too) multiply_dq(nth), wgmma_wait<1>();         // dV is summed
        add_product<STEP>(dk, ds_rmem, descriptor_of_rows<TILE>(q_of(nth, first)));
        if (dq_too) wgmma_wait<1>(), hand_dq_on(nth);          // while dK is computed
        wgmma_wait<0>();
        __syncwarp();                                          // lse and delta have been read too
        if (first + STEP == TILE && lane == 0) mbarrier_arrive(empty + 8 * (nth % STAGES));
    };
    // endregion

    // region: main loop of keys
    for (int n = 0, nth = 0, all = 0; begin_part(n); n++) {          // part after part
        mbarrier_wait(full_kept, n & 1);
        if (K_LEAVES) {                                        // dK of the part before has been read: dS may come
            if (first_thread) bulk_wait_read<0>();
            named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);
        }
        if constexpr (ROOMY)
#pragma unroll
            for (int k = 0; k < HEAD_DIM / MMA_K; k++)
                ldmatrix_x4(k_rmem[k], fragment_at<SQUARE>(k_smem, k)), ldmatrix_x4(v_rmem[k], fragment_at(v_smem, k));
        for (all += tiles * group; nth < all; nth++)           // of every query head that reads this key head
#pragma unroll
            for (int first = 0; first < TILE; first += STEP) begin_step(nth, first), end_step(nth, first);
        // endregion

        // region: store dK and dV
        // Of K and V a consumer reads its own 64 rows alone, and they may become dK and dV. But dQ is of all rows of K
        named_barrier_sync(1 + (FIVE ? CONSUMERS : consumer), (FIVE ? CONSUMERS : 1) * GROUP);     // all have waited
        if (K_LEAVES && first_thread) mbarrier_arrive(empty_k);
        if (V_LEAVES && first_thread) mbarrier_arrive(empty_v);
        store_tile(dv, 1.f, V_LEAVES ? ds_smem + KEPT_BYTES : v_smem, dv_map, n_start, kv_head, batch);
        store_tile(dk, p.scale, K_LEAVES ? ds_smem : k_smem, dk_map, n_start, kv_head, batch);
        if (!V_LEAVES && first_thread) bulk_wait_read<K_LEAVES>(), mbarrier_arrive(empty_v);
        if (!K_LEAVES && first_thread) bulk_wait_read<0>(), mbarrier_arrive(empty_k);
    }
    if (first_thread) bulk_wait<0>();                          // they are written
}
// endregion
#endif

#if PRODUCTS == 5
// region: convert
// dQ, scaled and rounded: a warpgroup takes 64 rows. Their squares lie one after the other, and in each what the lanes
// of a warpgroup had in registers: MMA tile after MMA tile, 16 bytes per lane.
__global__ void __launch_bounds__(CONSUMERS * GROUP)
convert(const Backward p, const float* sums, const __grid_constant__ CUtensorMap dq_map) {
    extern __shared__ __align__(1024) char shared[];           // [BLOCK, HEAD_DIM]
    const int blocks = padded(p.seq_q) / BLOCK, head_index = blockIdx.x / blocks;
    const int m_start = blockIdx.x % blocks * BLOCK, first_row = m_start + threadIdx.x / GROUP * 64;
    const int64_t in_sums = (int64_t)head_index * padded(p.seq_q) + first_row;
    const float4* rows = (const float4*)(sums + in_sums * SUMMED) + threadIdx.x % GROUP;
    // Tiles that see no key at all, or are behind the last row, have no sums
    const int begin = p.causal ? (p.seq_q - p.seq_k) / QUERIES * QUERIES : 0;
    const bool summed = first_row >= begin && first_row < p.seq_q;
    float dq[HEAD_DIM / 2];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / MMA_N; n++) {
        const float4 c = summed ? rows[n * GROUP] : make_float4(0, 0, 0, 0);
        dq[4 * n] = c.x, dq[4 * n + 1] = c.y, dq[4 * n + 2] = c.z, dq[4 * n + 3] = c.w;
    }
    const int batch = head_index / p.heads, head = head_index % p.heads;
    store_tile(dq, p.scale, smem_u32(shared), dq_map, m_start, head, batch);
    if (threadIdx.x % GROUP == 0) bulk_wait<0>();
}
// endregion
#else

// region: shared memory of queries
// K of tile j is the 2j-th copy, V the next: a place is free as soon as its own tensor has been read.
constexpr int K_BYTES = KEY_STEP * COLUMNS * 2, FIT = ((226 << 10) - 2 * KEPT_BYTES) / K_BYTES;
constexpr int PLACES = FIT < 2 * MOST_STAGES ? FIT : 2 * MOST_STAGES;
constexpr int QUERIES_SHARED = 2 * KEPT_BYTES + PLACES * K_BYTES + 8 * (1 + 2 * PLACES);
static_assert(PLACES > 2, "the next tile's K comes while this one is in use");
template <bool CAUSAL>
__global__ void __launch_bounds__(THREADS, 1)
queries(const Backward p, int heads_together, const float* lse_log2, const float* delta,
        const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
        const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap grad_o_map,
        const __grid_constant__ CUtensorMap dq_map) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK, HEAD_DIM], and at last dQ
    const uint32_t grad_o_smem = q_smem + KEPT_BYTES;          // [BLOCK, HEAD_DIM]
    const uint32_t places = grad_o_smem + KEPT_BYTES;          // K or V [KEY_STEP, HEAD_DIM], by turns
    const uint32_t full_kept = places + PLACES * K_BYTES, full = full_kept + 8, empty = full + 8 * PLACES;
    // endregion

    // region: which queries
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int consumer = __shfl_sync(~0u, threadIdx.x / GROUP, 0), m_blocks = ceil_div(p.seq_q, BLOCK);
    const Part part = part_of<CAUSAL>(blockIdx.x, m_blocks, p.batch * p.heads, heads_together);
    const int batch = part.head_index / p.heads, head = part.head_index % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int m_start = (CAUSAL ? m_blocks - 1 - part.block : part.block) * BLOCK;     // the last rows see most
    // Keys are taken by tiles: 0 .. end - 1. From `whole` on, some row of the consumer does not see every key.
    const int diagonal = p.seq_k - p.seq_q;                    // causal: row i sees the keys up to i + diagonal
    int end = ceil_div(p.seq_k, KEY_STEP), whole = p.seq_k / KEY_STEP;
    if (CAUSAL) {
        end = max(0, min(end, ceil_div(m_start + BLOCK + diagonal, KEY_STEP)));
        whole = max(0, min(whole, (m_start + consumer * 64 + 1 + diagonal) / KEY_STEP));
    }
    // endregion

    // region: barriers of queries
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1 + 2 * PLACES; i++) mbarrier_init(full_kept + 8 * i, i < 1 + PLACES ? 1 : CONSUMERS);
        tma_prefetch(&q_map), tma_prefetch(&k_map), tma_prefetch(&v_map), tma_prefetch(&grad_o_map);
        fence_mbarrier_init();
    }
    __syncthreads();                                           // the last one
    // endregion

    // region: producer of queries
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            mbarrier_arrive_expect_tx(full_kept, 2 * KEPT_BYTES);
            copy_tile<BLOCK>(q_smem, q_map, full_kept, m_start, head, batch);
            copy_tile<BLOCK>(grad_o_smem, grad_o_map, full_kept, m_start, head, batch);
            for (int i = 0; i < 2 * end; i++) {
                const int place = i % PLACES;
                mbarrier_wait(empty + 8 * place, i / PLACES & 1 ^ 1);
                load_tile<KEY_STEP>(places + place * K_BYTES, i % 2 ? v_map : k_map, full + 8 * place, i / 2 * KEY_STEP,
                                kv_head, batch);
            }
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    // endregion

    // region: state of queries
    float dq[HEAD_DIM / 2] = {};
    float row_lse[ROWS_PER_LANE], row_delta[ROWS_PER_LANE];
    const int first_row = m_start + warp * MMA_M + g;          // and 8 further
    const int64_t in_head = (int64_t)part.head_index * padded(p.seq_q) + first_row;
#pragma unroll
    for (int r = 0; r < ROWS_PER_LANE; r++)
        row_lse[r] = lse_log2[in_head + 8 * r], row_delta[r] = delta[in_head + 8 * r];
    uint32_t ds_rmem[KEY_STEP / MMA_K][4];                         // dS, rounded
    const uint64_t q_operand = descriptor(q_smem + consumer * 64 * SLAB_ROW);
    const uint64_t grad_o_operand = descriptor(grad_o_smem + consumer * 64 * SLAB_ROW);
    const bool first_thread = threadIdx.x % GROUP == 0;
    const float scale_log2 = p.scale * LOG2E;
    auto wait_for = [&](int i) {                               // where the i-th copy is
        mbarrier_wait(full + 8 * (i % PLACES), i / PLACES & 1);
        return places + i % PLACES * K_BYTES;
    };
    auto free_place = [&](int i) {
        if (first_thread) mbarrier_arrive(empty + 8 * (i % PLACES));
    };
    mbarrier_wait(full_kept, 0);
    // endregion

    // region: main loop of queries
    auto tile = [&](int j, auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        // region: scores
        // S = Q K^T and dP = dO V^T
        float s[KEY_STEP / 2], dp[KEY_STEP / 2];
        const uint32_t k_smem = wait_for(2 * j);
        scores<KEY_STEP>(s, q_operand, descriptor(k_smem));
        wgmma_wait<1>();                                       // dQ of the tile before is summed
        if (j > 0) free_place(2 * j - 2);
        scores<KEY_STEP>(dp, grad_o_operand, descriptor(wait_for(2 * j + 1)));
        wgmma_wait<1>();                                       // S is ours
        // endregion

        // region: dQ
        // P = exp(S - lse) while dP is computed; then dS = P * (dP - delta), and dQ += dS K
#pragma unroll
        for (int i = 0; i < KEY_STEP / 2; i++) s[i] = exp2_approx(fmaf(s[i], scale_log2, -row_lse[i / 2 % 2]));
        wgmma_wait<0>();
        free_place(2 * j + 1);
#pragma unroll
        for (int r = 0; r < ROWS_PER_LANE; r++) {
            const int last_key = CAUSAL ? min(p.seq_k - 1, first_row + 8 * r + diagonal) : p.seq_k - 1;
#pragma unroll
            for (int n = 0; n < KEY_STEP / MMA_N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& c = dp[4 * n + 2 * r + e];
                    c = s[4 * n + 2 * r + e] * (c - row_delta[r]);
                    if (MASKED && j * KEY_STEP + n * MMA_N + t * 2 + e > last_key) c = 0.f;
                }
        }
        round_to<KEY_STEP>(ds_rmem, dp);
        add_product<KEY_STEP>(dq, ds_rmem, descriptor_of_rows<KEY_STEP>(k_smem));
        // endregion
    };
    int j = 0;
    for (; j < min(end, whole); j++) tile(j, std::false_type{});       // the full tiles
    for (; j < end; j++) tile(j, std::true_type{});            // the masked ones
    // endregion

    // region: store dQ
    wgmma_wait<0>();
    named_barrier_sync(1 + consumer, GROUP);                   // all of its warps have waited
    store_tile(dq, p.scale, q_smem, dq_map, m_start, head, batch);
    if (first_thread) bulk_wait<0>();
}
// endregion

#endif

// region: launch
// For five products, sums: what dQ is summed in, zeros if they are not ORDERED; turns: a counter, and one of each tile.
extern "C" int backward(const void* q, const void* k, const void* v, const void* o, const void* grad_o,
                        const float* lse, const float* grad_lse, void* dq, void* dk, void* dv, float* row_statistics,
                        float* sums, int* turns, const void* shapes, void* stream) {
    const Backward p = *(const Backward*)shapes;
    const auto map = [&](const void* x, const Strides& stride, bool of_queries, int box_rows) {
        return map_of(x, stride, p.batch, of_queries ? p.heads : p.kv_heads, of_queries ? p.seq_q : p.seq_k, box_rows);
    };
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t rows = (int64_t)p.batch * p.heads * padded(p.seq_q);
    float* delta = row_statistics + rows;
    const int blocks = (int)(rows / STATISTICS_ROWS), parts = p.batch * p.kv_heads * ceil_div(p.seq_k, KEYS);
    int* counter = turns++;                                    // of the parts that are taken
    if (p.launches & 1)
        statistics<<<blocks, 256, 0, s>>>(p, o, grad_o, lse, grad_lse, row_statistics, delta, counter, turns);
    CUtensorMap sums_map{};                                    // squares one after the other, as rows of 1 KB
    if constexpr (FIVE) {
        const uint64_t dims[] = {256, (uint64_t)rows * SUMMED / 256}, strides[] = {1024};
        const uint32_t box[] = {256, DQ_BYTES / 1024};
        sums_map = tensor_map(sums, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    }
    // Blocks that wait for one another walk over the same tiles side by side: the fewer of a head, the less they wait.
    // On long rows that counts for little, and tiles that many share come from L2.
    const int heads = p.batch * p.kv_heads, apart = min(heads, max(2, min(16, (1 << 18) / p.seq_q)));
    const int together = max(FIVE ? apart : 1, fit_together(p.seq_q, heads));
    // More than 48 KB of shared memory have to be asked for. A refusal is what cudaGetLastError then returns.
    const auto of_keys = p.causal ? keys<true> : keys<false>;
    cudaFuncSetAttribute(of_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (p.launches & 2) of_keys<<<min(p.sms, parts), THREADS, SHARED, s>>>(
        p, together, row_statistics, delta, map(q, p.q_stride, true, QUERIES),
        map(k, p.k_stride, false, KEYS), map(v, p.v_stride, false, KEYS), map(grad_o, p.grad_o_stride, true, QUERIES),
        map(dk, p.dk_stride, false, 64), map(dv, p.dv_stride, false, 64), sums_map, counter, turns);
#if PRODUCTS == 5
    if (p.launches & 4)
        convert<<<(int)(rows / BLOCK), CONSUMERS * GROUP, KEPT_BYTES, s>>>(p, sums, map(dq, p.dq_stride, true, 64));
#else
    const auto of_queries = p.causal ? queries<true> : queries<false>;
    cudaFuncSetAttribute(of_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, QUERIES_SHARED);
    if (p.launches & 4) of_queries<<<p.batch * p.heads * ceil_div(p.seq_q, BLOCK), THREADS, QUERIES_SHARED, s>>>(
        p, fit_together(p.seq_k, p.batch * p.heads), row_statistics, delta,
        map(q, p.q_stride, true, BLOCK), map(k, p.k_stride, false, KEY_STEP), map(v, p.v_stride, false, KEY_STEP),
        map(grad_o, p.grad_o_stride, true, BLOCK), map(dq, p.dq_stride, true, 64));
#endif
    return (int)cudaGetLastError();
}
// endregion
