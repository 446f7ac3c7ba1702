// Phase 12, step 7: equal shares of all keys, for a grid that stays.
//
// With one number of parts for all sequences, the longest one decides when the launch is over: of lengths 8192, 64, 64
// and so on most blocks have next to nothing. So all tiles of all sequences and key heads stand in one row. It is cut
// into equal shares, one per block of a grid that just fills the GPU. Where a cut falls into a sequence, its blocks
// leave parts; a sequence that lies within one share leaves none.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "p12_decoding/fragments.cuh"

constexpr int BLOCKS_PER_SM = 2, LEAST_TILES = 8;              // New: of a share: a part costs more than some tiles
constexpr int AT_ONCE = 16;                                    // New: parts that are loaded before one is added
// endregion

// region: shares
// New: all tiles in a row, in shares as equal as can be: the first `longer` have one tile more than the others. A share
// has LEAST_TILES at least, so that few tiles are not cut into many parts; then some blocks have none.
struct Shares {
    int blocks, tiles, longer;
    __device__ Shares(int all, int grid) : blocks(max(1, min(grid, all / LEAST_TILES))) {
        tiles = all / blocks, longer = all % blocks;
    }
    __device__ int begin(int block) const { return block * tiles + min(block, longer); }
    __device__ int owner(int tile) const {                     // the block in whose share a tile is
        const int in_longer = longer * (tiles + 1);
        return tile < in_longer ? tile / (tiles + 1) : longer + (tile - in_longer) / tiles;
    }
};
// Of a sequence. One without keys has a tile too, in which nothing is seen: so somebody stores its 0 and -inf.
__device__ __forceinline__ int tiles_of(const Cache& c, int b) { return max(1, ceil_div(length_of(c, b), TILE)); }

// before_smem[b]: the tiles of the sequences before b, for b = 0 ... batch. Each thread adds up neighbours.
__device__ __forceinline__ void count_tiles(const Cache& c, int* before_smem) {
    __shared__ int warp_sums[WARPS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int each = ceil_div(c.batch, THREADS);
    const int first = min(c.batch, (int)threadIdx.x * each), last = min(c.batch, first + each);
    int sum = 0;
    for (int b = first; b < last; b++) sum += tiles_of(c, b);
    int up_to = sum;                                           // and of the lanes before
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
    }
    if (lane == WARP_SIZE - 1) warp_sums[warp] = up_to;
    __syncthreads();                                           // or the sums of other warps would be missing
    int count = up_to - sum;
    for (int w = 0; w < warp; w++) count += warp_sums[w];
    for (int b = first; b < last; b++) before_smem[b] = count, count += tiles_of(c, b);
    if (threadIdx.x == THREADS - 1) before_smem[c.batch] = count;
    __syncthreads();                                           // or other threads' counts would be missing
}
// endregion

// region: which keys
// New: tiles first ... last - 1 of one sequence, for one key head; `begin` is where tile 0 of them stands in the row of
// all tiles, and `all` is how many they are.
struct Piece {
    int b, kv_head, length, first, last, begin, all;
};
__device__ __forceinline__ Piece piece_at(const Cache& c, const int* before_smem, int at, int end) {
    int low = 0, high = c.batch;                               // the last sequence that begins at or before `at`
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (before_smem[middle] * c.kv_heads <= at ? low : high) = middle;
    }
    Piece p;
    p.b = low, p.length = length_of(c, low), p.all = before_smem[low + 1] - before_smem[low];
    p.kv_head = (at - before_smem[low] * c.kv_heads) / p.all;
    p.begin = before_smem[low] * c.kv_heads + p.kv_head * p.all;
    p.first = at - p.begin, p.last = min(p.all, end - p.begin);
    return p;
}
// endregion

// region: main loop
// One warp, its tiles of a piece: every WARPS-th.
__device__ __forceinline__ void walk(const Cache& c, const Piece& p, State& x, uint32_t ring, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const int end = min(p.length, p.last * TILE);
// region: Q in registers
    // A, 16 rows x HEAD_DIM columns of Q, straight from global memory; rows that do not exist are zeros
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = g + r * 8;
        const T* q_gmem = q_row(c, p.b, p.kv_head, row < c.group ? row : 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q_rmem[k][half * 2 + r] = row < c.group ? *(const uint32_t*)(q_gmem + k * MMA_K + half * 8 + t * 2) : 0;
    }
    // endregion
    const uint32_t k_lane = ring + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);     // as in phase 8
    const uint32_t v_lane = ring + TILE_BYTES + at(lane % 16, lane / 16 * 8);
    const Copier copier{c, p.b, p.kv_head, end, lane, ring};
    constexpr int STEP = WARPS * TILE;                         // a warp takes every WARPS-th tile
    int start = (p.first + warp) * TILE, stage = 0;
    for (int s = 0; s < STAGES - 1; s++) {                     // an empty group counts as well
        if (start + s * STEP < end) copier.copy(s, start + s * STEP, copier.page(start + s * STEP));
        cp_async_commit();
    }
    int next_page = copier.page(start + (STAGES - 1) * STEP);
    for (; start < end; start += STEP) {
        cp_async_wait<STAGES - 2>();                           // this lane's part of the tile is here
        __syncwarp();                                          // or others' parts would be missing, the last one in use
        const int ahead = start + (STAGES - 1) * STEP;
        if (ahead < end) copier.copy((stage + STAGES - 1) % STAGES, ahead, next_page);
        cp_async_commit();
        next_page = copier.page(ahead + STEP);
        const uint32_t stage_at = stage * 2 * TILE_BYTES;
        take(x, q_rmem, k_lane + stage_at, v_lane + stage_at, start, {end - 1, end - 1}, c.scale * LOG2E, t);
        stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();
    __syncwarp();                                              // or sums would be stored over a tile in use
}
// endregion

// region: shared memory
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // [WARPS, STAGES, 2, TILE, HEAD_DIM], then before_smem
    __shared__ float m_smem[WARPS][ROWS], l_smem[WARPS][ROWS];
    __shared__ int is_last;
    int* before_smem = (int*)(shared + SHARED);                // New: [batch + 1]
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    // endregion

    // region: pieces
    count_tiles(c, before_smem);
    const Shares shares(before_smem[c.batch] * c.kv_heads, gridDim.x);
    if (blockIdx.x >= shares.blocks) return;
    const int begin = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
    for (int at = begin; at < end;) {
        const Piece p = piece_at(c, before_smem, at, end);
        at = p.begin + p.last;
        State x = {};
        x.m_i[0] = x.m_i[1] = -INFINITY;
        walk(c, p, x, smem_u32(shared + warp * WARP_BYTES), warp, lane);
        // endregion

        // region: sums of the warps
        // Each leaves its sums where its tiles were.
        float* sums = (float*)(shared + warp * WARP_BYTES);    // [ROWS, SUM_ROW]
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float l = x.l_i[r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            if (g + r * 8 < c.group) {
                if (t == 0) m_smem[warp][g + r * 8] = x.m_i[r], l_smem[warp][g + r * 8] = l;
#pragma unroll
                for (int n = 0; n < O_TILES; n++)
                    *(float2*)(sums + (g + r * 8) * SUM_ROW + n * MMA_N + t * 2) =
                        make_float2(x.acc[n][r * 2], x.acc[n][r * 2 + 1]);
            }
        }
        __syncthreads();                                       // or other warps' sums would be missing
        // endregion

        // region: store
        // The blocks that share these tiles. Each leaves two parts at most: of the piece that its share begins with,
        // and of the one that it ends with.
        const int first_block = shares.owner(p.begin), last_block = shares.owner(p.begin + p.all - 1);
        const bool whole = first_block == last_block;
        auto part_of = [&](int block) { return 2 * block + (shares.begin(block) < p.begin); };
        for (int i = threadIdx.x; i < c.group * QUADS; i += THREADS) {
            const int row = i / QUADS, quad = i % QUADS;
            Sum sum = {-INFINITY, 0.f, {}};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float* of_warp = (const float*)(shared + w * WARP_BYTES) + row * SUM_ROW + quad * 4;
                add(sum, m_smem[w][row], l_smem[w][row], *(const float4*)of_warp);
            }
            if (whole) {
                store(c, p.b, p.kv_head, row, quad, sum);
            } else {
                const int64_t part = (int64_t)part_of(blockIdx.x) * ROWS + row;
                const float lse = finish(sum);
                *(float4*)(c.part_o + part * HEAD_DIM + quad * 4) = sum.o;
                if (quad == 0) c.part_lse[part] = lse;
            }
        }
        // endregion

        // region: last to arrive
        // The barrier hands the block's parts to thread 0; its fence and its count publish them. What the last one to
        // count has seen, its second fence and the barrier hand on. atomicInc begins again at 0: for the next launch.
        __syncthreads();                                       // all have stored, and nobody reads the sums any more
        if (whole) continue;
        if (threadIdx.x == 0) {
            __threadfence();
            const unsigned others = last_block - first_block;
            is_last = atomicInc((unsigned*)c.counters + p.b * c.kv_heads + p.kv_head, others) == others;
            __threadfence();
        }
        __syncthreads();                                       // or is_last would be an old one
        for (int i = threadIdx.x; is_last && i < c.group * QUADS; i += THREADS) {
            const int row = i / QUADS, quad = i % QUADS;
            Sum sum = {-INFINITY, 0.f, {}};
            for (int from = first_block; from <= last_block; from += AT_ONCE) {
                float lse[AT_ONCE];
                float4 o[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {            // many loads, one latency
                    const int64_t part = (int64_t)part_of(min(from + j, last_block)) * ROWS + row;
                    lse[j] = from + j <= last_block ? c.part_lse[part] : -INFINITY;
                    o[j] = *(const float4*)(c.part_o + part * HEAD_DIM + quad * 4);
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) add(sum, lse[j], lse[j] == -INFINITY ? 0.f : 1.f, o[j]);
            }
            store(c, p.b, p.kv_head, row, quad, sum);
        }
    }
}
// endregion

// region: launch
// `shapes` is a Cache whose pointers are still empty. part_o [4 sms, 16, HEAD_DIM], part_lse [4 sms, 16].
extern "C" int decode(const void* q, const void* k, const void* v, const void* table, const int* lengths, void* o,
                      float* lse, float* part_o, float* part_lse, int* counters, const void* shapes, void* stream) {
    Cache c = *(const Cache*)shapes;
    c.q = q, c.k = k, c.v = v, c.table = (const int*)table, c.lengths = lengths, c.o = o, c.lse = lse;
    c.part_o = part_o, c.part_lse = part_lse, c.counters = counters;
    const int bytes = SHARED + (c.batch + 1) * 4;
    cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    decode_kernel<<<c.sms * BLOCKS_PER_SM, THREADS, bytes, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
