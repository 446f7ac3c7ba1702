// Phase 12, the last step: equal shares of all keys for a grid that stays, and several queries per sequence.
//
// O = softmax(scale * Q K^T) V of a few queries per sequence over a long cache, contiguous or in pages. The queries of
// all heads that read a key head are the rows of an MMA. All the time goes into reading the cache once: so each warp
// has its own tiles of 16 keys, its own copies in flight and its own softmax, and waits for no other warp. All
// tiles of all sequences and key heads stand in one row, which is cut into equal shares, one per block. Where a cut
// falls into a sequence, its blocks leave parts, and the last one to arrive merges them. The lengths are read on the
// device: a CUDA graph of a step stays right while sequences grow.
//
// Compile with -DHEAD_DIM=64, 128 or 256, -DELEMENT=__half or __nv_bfloat16; -DWARPS=, -DSTAGES=, -DLEAST_TILES=,
// -DPIECE_TILES= to try others.

// region: constants
#include "p12_decoding/cache.cuh"
#ifndef WARPS
#define WARPS (HEAD_DIM == 256 ? 4 : 8)
#endif
#ifndef STAGES                                                 // 128 KB in all: one block on an SM of Hopper
#define STAGES (HEAD_DIM == 64 ? 4 : 2)
#endif
#ifndef LEAST_TILES                                            // of a share: a part costs more than some tiles
#define LEAST_TILES 16
#endif
#ifndef PIECE_TILES                                            // a piece costs as much: to begin, and to merge
#define PIECE_TILES 24
#endif

constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = MMA_M, TILE = 16;                         // rows of a block; keys of a tile
constexpr int ROW_BYTES = HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8; // a chunk is 16 bytes, 8 numbers
constexpr int TILE_BYTES = TILE * ROW_BYTES, WARP_BYTES = STAGES * 2 * TILE_BYTES;     // K and V
constexpr int O_TILES = HEAD_DIM / MMA_N, QUADS = HEAD_DIM / 4;                        // a quad is 4 columns
static_assert(ROWS * HEAD_DIM * 4 == 2 * TILE_BYTES && STAGES > 1, "a warp's sums take the place of a stage");
constexpr int ROOM = (225 << 10) / (WARPS * WARP_BYTES + 2048), BLOCKS_PER_SM = ROOM < 1 ? 1 : ROOM < 4 ? ROOM : 4;
constexpr int AT_ONCE = 16;                                    // parts that are loaded before one is added
#include "p12_decoding/one_tile.cuh"
// endregion

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8.
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }
// The same of a warp's sums [ROWS, HEAD_DIM], in floats; any column.
__device__ __forceinline__ int sum_at(int row, int column) {
    return row * HEAD_DIM + (column / 8 ^ row % 8) * 8 + column % 8;
}
// endregion

// region: merge
// Four columns of a row and what they weigh: m is the maximum in log2 units, l the sum, of parts that were merged.
struct Sum {
    float m, l;
    float4 o;
};
// Adds N parts. One maximum of all and then the weights: none waits for the one before.
template <int N>
__device__ __forceinline__ void add(Sum& sum, const float (&m)[N], const float (&l)[N], const float4 (&o)[N]) {
    float most = sum.m;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, m[i]);
    const float base = most == -INFINITY ? 0.f : most;         // -inf - (-inf) would be NaN
    const float old = exp2_approx(sum.m - base);
    sum.m = most, sum.l *= old, sum.o.x *= old, sum.o.y *= old, sum.o.z *= old, sum.o.w *= old;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float w = exp2_approx(m[i] - base);
        sum.l += l[i] * w, sum.o.x += o[i].x * w, sum.o.y += o[i].y * w, sum.o.z += o[i].z * w, sum.o.w += o[i].w * w;
    }
}
// Divided by its weight; and its lse, in log2 units. A row that saw no key is 0 and -inf.
__device__ __forceinline__ float finish(Sum& sum) {
    const float inverse = sum.l == 0.f ? 0.f : 1.f / sum.l;
    sum.o.x *= inverse, sum.o.y *= inverse, sum.o.z *= inverse, sum.o.w *= inverse;
    return sum.m + log2f(sum.l);
}
__device__ __forceinline__ void store(const Cache& c, int b, int kv_head, int r, int quad, Sum& sum) {
    const float lse = finish(sum);
    const uint2 o = make_uint2(pack<T>(sum.o.x, sum.o.y), pack<T>(sum.o.z, sum.o.w));
    *(uint2*)(o_row(c, b, kv_head, r) + quad * 4) = o;
    if (quad == 0) c.lse[lse_row(c, b, kv_head, r)] = lse * LN2;
}
// endregion

// region: shares
// All tiles in a row, in shares as equal as can be, of LEAST_TILES at least: few tiles are not cut into many parts, and
// some blocks have none. Half as many will do while all parts of a piece are merged at once. Where all pieces are
// `even`, as many shares as cut each of them alike, if they are not many fewer than blocks: a cut within a piece costs
// parts, one between two pieces costs nothing.
struct Shares {
    int all, blocks, tiles, longer;
    unsigned inverse;                                          // 2^32 / blocks, rounded up: a product for a division
    __device__ Shares(int all, int grid, int pieces, bool even) : all(all) {
        blocks = max(1, min(grid, max(all / LEAST_TILES, min(2 * all / LEAST_TILES, AT_ONCE * pieces))));
        const int alike = pieces <= blocks ? blocks / pieces * pieces : ceil_div(pieces, ceil_div(pieces, blocks));
        if (even && alike * 8 >= blocks * 7) blocks = alike;
        tiles = all / blocks, longer = all % blocks, inverse = ~0u / blocks + 1;
    }
    __device__ int begin(int block) const { return block * tiles + __umulhi(block * longer, inverse); }
    __device__ int owner(int tile) const {                     // the block in whose share a tile is
        int block = min(blocks - 1, (int)((float)tile / (float)all * blocks));
        while (begin(block) > tile) block--;
        while (begin(block + 1) <= tile) block++;
        return block;
    }
};
// endregion

// region: count the tiles
// Of a sequence. One without keys has a tile too, in which nothing is seen: so somebody stores its 0 and -inf.
__device__ __forceinline__ int tiles_of(const Cache& c, int length) {
    return max(1, ceil_div(clamped(c, length), TILE));
}

// before_smem[b]: the tiles of the sequences before b, for b = 0 ... batch. Each thread adds up neighbours; of so few
// that one is all, `early` is its length. True: all have as many. Where they have not, a piece counts as PIECE_TILES
// more, which is what it costs to begin and to merge.
__device__ __forceinline__ bool count_tiles(const Cache& c, int* before_smem, int early) {
    __shared__ int warp_sums[WARPS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int each = ceil_div(c.batch, THREADS);
    const int first = min(c.batch, (int)threadIdx.x * each), last = min(c.batch, first + each);
    const int of_first = tiles_of(c, c.lengths[0]);
    int sum = 0, unlike = 0;
#pragma unroll 1
    for (int b = first; b < last; b++) {
        const int tiles = tiles_of(c, each == 1 ? early : c.lengths[b]);
        sum += tiles, unlike |= tiles ^ of_first;
    }
    int up_to = sum;                                           // and of the lanes before
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
    }
    if (lane == WARP_SIZE - 1) warp_sums[warp] = up_to;
    const bool even = !__syncthreads_or(unlike);               // or the sums of other warps would be missing
    const int more = even ? 0 : PIECE_TILES;
    int count = up_to - sum + first * more;
#pragma unroll
    for (int w = 0; w < WARPS - 1; w++) count += w < warp ? warp_sums[w] : 0;
#pragma unroll 1
    for (int b = first; b < last; b++) {
        before_smem[b] = count;
        count += (each == 1 ? sum : tiles_of(c, c.lengths[b])) + more;
    }
    if (threadIdx.x == THREADS - 1) before_smem[c.batch] = count;
    __syncthreads();                                           // or other threads' counts would be missing
    return even;
}
// endregion

// region: guess
// Asks for the pages that this warp needs first if every sequence fills its row of the table. So they come while the
// lengths do; where the guess is right, reading them again is no way to memory.
__device__ __forceinline__ void guess(const Cache& c, int row_blocks, int* guess_smem) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int all = ceil_div(c.page * c.width, TILE), readers = c.kv_heads * row_blocks;
    const Shares shares(c.batch * readers * all, gridDim.x, c.batch * readers, true);
    const int at = shares.begin(blockIdx.x);
    const int b = at / (readers * all), tile = at % all + warp + lane * WARPS;
    if (c.table && lane < STAGES && blockIdx.x < shares.blocks && tile < all)
        cp_async<4>(smem_u32(guess_smem + lane), c.table + b * c.table_stride + column_of(c, tile * TILE));
}
// endregion

// region: which keys
// Tiles first ... last - 1 of the `tiles` of one sequence, for one block of rows of one key head; `begin` is where tile
// 0 of them stands in the row of all tiles, and `all` is how much room they have there.
struct Piece {
    int b, kv_head, row_block, length, first, last, tiles, begin, all;
};
__device__ __forceinline__ Piece piece_at(const Cache& c, const int* before_smem, int row_blocks, int at, int end) {
    const int readers = c.kv_heads * row_blocks;               // of a sequence's tiles
    int low = 0, high = c.batch;                               // the last sequence that begins at or before `at`
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (before_smem[middle] * readers <= at ? low : high) = middle;
    }
    Piece p;
    p.b = low, p.length = length_of(c, low), p.all = before_smem[low + 1] - before_smem[low];
    const int reader = (unsigned)(at - before_smem[low] * readers) / (unsigned)p.all;
    p.begin = before_smem[low] * readers + reader * p.all;
    p.kv_head = row_blocks == 1 ? reader : reader / row_blocks, p.row_block = reader - p.kv_head * row_blocks;
    p.tiles = tiles_of(c, c.lengths[low]), p.first = at - p.begin, p.last = min(p.tiles, end - p.begin);
    return p;
}
// endregion

// region: copy a tile
// A warp copies tiles of K and V. A lane copies the chunk in `column` of each ROWS_PER_PASS-th row. With WHOLE a page
// holds whole tiles, and one number of a page will do; without, lane r of the first 16 knows that of row r.
constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
template <bool WHOLE> struct Copier {
    const Cache& c;
    const Piece& p;
    int lane_row, column;
    uint32_t to;                                               // this lane's first chunk, in the warp's stage 0

    __device__ Copier(const Cache& c, const Piece& p, uint32_t warp_smem, int lane) : c(c), p(p) {
        lane_row = lane / CHUNKS, column = lane % CHUNKS * 8, to = warp_smem + at(lane_row, column);
    }
    // Read one tile ahead: a copy whose page is still on its way would wait for two latencies.
    __device__ int page(int tile, int lane) const {
        const int key = tile * TILE + (WHOLE ? 0 : lane % TILE);
        return tile < p.last && key < p.length ? page_of(c, p.b, key) : 0;
    }
    // Row `row` + lane_row of a tile: what is not there becomes zeros, NaN or not.
    __device__ void copy_row(uint32_t to_tile, int row, const T* from, const void* cache, int start) const {
        const bool there = start + row + lane_row < p.length;
        cp_async<16>((to_tile ^ row % 8 * 16) + row * ROW_BYTES, there ? from : (const T*)cache, there ? 16 : 0);
    }
    __device__ void copy(int stage, int tile, int lane, int page) const {
        const int start = tile * TILE, slot = slot_of(c, start + (WHOLE ? 0 : lane % TILE));
        const uint32_t to_k = to + stage * 2 * TILE_BYTES, to_v = to_k + TILE_BYTES;
        if constexpr (WHOLE) {                                 // one run of memory after the other
            const T* k_from = key_row(c.k, c.k_stride, page, p.kv_head, slot + lane_row) + column;
            const T* v_from = key_row(c.v, c.v_stride, page, p.kv_head, slot + lane_row) + column;
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_PER_PASS, k_from += ROWS_PER_PASS * c.k_stride.row)
                copy_row(to_k, row, k_from, c.k, start);
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_PER_PASS, v_from += ROWS_PER_PASS * c.v_stride.row)
                copy_row(to_v, row, v_from, c.v, start);
        } else {
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_PER_PASS) {
                const int of_page = __shfl_sync(~0u, page, row + lane_row);
                const int in_page = __shfl_sync(~0u, slot, row + lane_row);
                copy_row(to_k, row, key_row(c.k, c.k_stride, of_page, p.kv_head, in_page) + column, c.k, start);
                copy_row(to_v, row, key_row(c.v, c.v_stride, of_page, p.kv_head, in_page) + column, c.v, start);
            }
        }
    }
    // region: first copies
    // The first copies of a piece: all pages that they need, and then, when these are here, the copies.
    __device__ void first_pages(int (&pages)[STAGES], int tile, int lane) const {
#pragma unroll
        for (int s = 0; s < STAGES; s++) pages[s] = page(tile + s * WARPS, lane);
    }
    __device__ void first_copies(const int (&pages)[STAGES], int tile, int lane) const {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (tile + s * WARPS < p.last) copy(s, tile + s * WARPS, lane, pages[s]);
            cp_async_commit();
        }
    }
    // endregion
};
// endregion

// region: main loop
// One warp, its tiles of a piece: every WARPS-th. The first are being copied; next_page is that of the one behind them.
template <bool WHOLE>
__device__ __forceinline__ void walk(const Cache& c, const Piece& p, const Copier<WHOLE>& copier, int next_page,
                                     State& x, uint32_t warp_smem, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, rows = c.group * c.queries;
    // region: Q in registers
    // A: 16 rows x HEAD_DIM columns of Q, straight from global memory; rows that do not exist are zeros
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];
    int last_key[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = p.row_block * ROWS + g + r * 8;
        const T* q_gmem = q_row(c, p.b, p.kv_head, row < rows ? row : 0);
        last_key[r] = p.length - c.queries + query_of(c, row);  // of all queries the last one sees every key
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q_rmem[k][half * 2 + r] = row < rows ? *(const uint32_t*)(q_gmem + k * MMA_K + half * 8 + t * 2) : 0;
    }
    // endregion
    const uint32_t k_lane = warp_smem + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const uint32_t v_lane = warp_smem + TILE_BYTES + at(lane % 16, lane / 16 * 8);
    for (int tile = p.first + warp, stage = 0; tile < p.last; tile += WARPS) {
        cp_async_wait<STAGES - 2>();                           // this lane's part of the tile is here
        __syncwarp();                                          // or others' parts would be missing, tile - 1 in use
        const int ahead = tile + (STAGES - 1) * WARPS;
        if (ahead < p.last) copier.copy(stage == 0 ? STAGES - 1 : stage - 1, ahead, lane, next_page);
        cp_async_commit();
        next_page = copier.page(ahead + WARPS, lane);
        const uint32_t stage_at = stage * 2 * TILE_BYTES;
        take(x, q_rmem, k_lane + stage_at, v_lane + stage_at, tile * TILE, last_key, c.scale * LOG2E, t);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();                                        // of a guess, where there was no tile
    __syncwarp();                                              // or the sums would be stored over a tile in use
}
// endregion

// region: shared memory
template <bool WHOLE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // [WARPS, STAGES, 2, TILE, HEAD_DIM], then before_smem
    __shared__ float m_smem[WARPS][ROWS], l_smem[WARPS][ROWS];
    __shared__ int is_last, guess_smem[WARPS][STAGES];
    int* before_smem = (int*)(shared + WARPS * WARP_BYTES);    // [batch + 1]
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int rows = c.group * c.queries, row_blocks = ceil_div(rows, ROWS);
    // endregion

    // region: pieces
    const uint32_t warp_smem = smem_u32(shared + warp * WARP_BYTES);
    const int early = c.lengths[min((int)threadIdx.x, c.batch - 1)];       // on its way during the guess
    guess(c, row_blocks, guess_smem[warp]);
    const bool even = count_tiles(c, before_smem, early);
    const int readers = c.kv_heads * row_blocks;
    const Shares shares(before_smem[c.batch] * readers, gridDim.x, c.batch * readers, even);
    const int begin = shares.begin(blockIdx.x), end = min(shares.all, shares.begin(blockIdx.x + 1));
    Piece next = piece_at(c, before_smem, row_blocks, min(begin, shares.all - 1), end);
    if (next.first >= next.tiles && next.begin + next.all < end)               // only room is left there
        next = piece_at(c, before_smem, row_blocks, next.begin + next.all, end);
    if (blockIdx.x >= shares.blocks || next.first >= next.last) {              // no share, or one of room alone
        cp_async_wait_all();                                   // of a guess
        return;
    }
    const Copier<WHOLE> copier(c, next, warp_smem, lane);
    int pages[STAGES];
    copier.first_pages(pages, next.first + warp, lane);
    copier.first_copies(pages, next.first + warp, lane);
    for (bool more = true; more;) {
        const Piece p = next;
        const int first_row = p.row_block * ROWS, piece_rows = min(ROWS, rows - first_row);
        // The blocks that share these tiles. Each leaves two parts at most: of the piece that its share begins with,
        // and of the one that it ends with.
        const int first_block = shares.owner(p.begin), last_block = shares.owner(p.begin + p.tiles - 1);
        const bool whole = first_block == last_block, ends_with_it = shares.begin(first_block) < p.begin;
        State x = {};
        x.m_i[0] = x.m_i[1] = -INFINITY;
        walk<WHOLE>(c, p, copier, pages[STAGES - 1], x, warp_smem, warp, lane);
        more = p.begin + p.all < end;
        if (more) {                                            // copies go on while this piece is summed up
            next = piece_at(c, before_smem, row_blocks, p.begin + p.all, end);
            copier.first_pages(pages, next.first + warp, lane);
        }
        // endregion

        // region: sums of the warps
        // Each leaves its sums in the last stage, which the first copies leave alone.
        constexpr int LAST_STAGE = (STAGES - 1) * 2 * TILE_BYTES;
        float* sums = (float*)(shared + warp * WARP_BYTES + LAST_STAGE);       // [ROWS, HEAD_DIM]
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float l = x.l_i[r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const int row = g + r * 8;
            if (row < piece_rows) {
                if (t == 0) m_smem[warp][row] = x.m_i[r], l_smem[warp][row] = l;
#pragma unroll
                for (int n = 0; n < O_TILES; n++)
                    *(float2*)(sums + sum_at(row, n * MMA_N + t * 2)) =
                        make_float2(x.acc[n][r * 2], x.acc[n][r * 2 + 1]);
            }
        }
        __syncthreads();                                       // or other warps' sums would be missing
        if (more) copier.first_copies(pages, next.first + warp, lane);
        // endregion

        // region: store
        auto part_of = [&](int block) { return 2 * block + (block == first_block && ends_with_it); };
        for (int i = threadIdx.x; i < piece_rows * QUADS; i += THREADS) {
            const int row = i / QUADS, quad = i % QUADS;
            Sum sum = {-INFINITY, 0.f, {}};
            float m[WARPS], l[WARPS];
            float4 o[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float* of_warp = (const float*)(shared + w * WARP_BYTES + LAST_STAGE);
                m[w] = m_smem[w][row], l[w] = l_smem[w][row], o[w] = *(const float4*)(of_warp + sum_at(row, quad * 4));
            }
            add(sum, m, l, o);
            if (whole) {
                store(c, p.b, p.kv_head, first_row + row, quad, sum);
            } else {
                const int64_t part = (int64_t)part_of(blockIdx.x) * ROWS + row;
                const float lse = finish(sum);
                *(float4*)(c.part_o + part * HEAD_DIM + quad * 4) = sum.o;
                if (quad == 0) c.part_lse[part] = lse;
            }
        }
        __syncthreads();                                       // all have stored, and nobody reads the sums any more
        if (whole) continue;
        // endregion

        // region: last to arrive
        // The barrier has handed the block's parts to thread 0; its fence and its count publish them. What the last
        // one to count sees, its second fence and the barrier hand on. atomicInc goes back to 0: for the next launch.
        if (threadIdx.x == 0) {
            __threadfence();
            const unsigned others = last_block - first_block;
            const int reader = (p.b * c.kv_heads + p.kv_head) * row_blocks + p.row_block;
            is_last = atomicInc((unsigned*)c.counters + reader, others) == others;
            __threadfence();
        }
        __syncthreads();                                       // or is_last would be an old one
        for (int i = threadIdx.x; is_last && i < piece_rows * QUADS; i += THREADS) {
            const int row = i / QUADS, quad = i % QUADS;
            Sum sum = {-INFINITY, 0.f, {}};
            for (int from = first_block; from <= last_block; from += AT_ONCE) {
                const int64_t part_0 = (int64_t)part_of(from) * ROWS + row, begin = (int64_t)2 * from * ROWS + row;
                float lse[AT_ONCE], l[AT_ONCE];
                float4 o[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {            // many loads, one latency
                    const bool there = from + j <= last_block;
                    const int64_t part = j == 0 ? part_0 : begin + 2 * j * ROWS;
                    lse[j] = there ? c.part_lse[part] : -INFINITY, l[j] = 1.f;
                    o[j] = there ? *(const float4*)(c.part_o + part * HEAD_DIM + quad * 4) : float4{};
                }
                add(sum, lse, l, o);
            }
            store(c, p.b, p.kv_head, first_row + row, quad, sum);
        }
    }
}
// endregion

// region: launch
// `shapes` is a Cache whose pointers are still empty. part_o [8 sms, 16, HEAD_DIM], part_lse [8 sms, 16].
extern "C" int decode(const void* q, const void* k, const void* v, const void* table, const int* lengths, void* o,
                      float* lse, float* part_o, float* part_lse, int* counters, const void* shapes, void* stream) {
    Cache c = *(const Cache*)shapes;
    c.q = q, c.k = k, c.v = v, c.table = (const int*)table, c.lengths = lengths, c.o = o, c.lse = lse;
    c.part_o = part_o, c.part_lse = part_lse, c.counters = counters;
    // Contiguous: a sequence's one page is whole, however long.
    const auto kernel = !table || c.page % TILE == 0 ? decode_kernel<true> : decode_kernel<false>;
    const int bytes = WARPS * WARP_BYTES + (c.batch + 1) * 4;
    int device = 0, room = 0;                                  // as many blocks as this device runs at once
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int blocks = c.sms * max(1, min(BLOCKS_PER_SM, room / (bytes + 1024)));        // the system adds 1 KB to each
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<blocks, THREADS, bytes, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
