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

#include "p12_decoding/walk.cuh"
constexpr int ROOM = (225 << 10) / (WARPS * WARP_BYTES + 2048), BLOCKS_PER_SM = ROOM < 1 ? 1 : ROOM < 4 ? ROOM : 4;
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
struct Piece : Keys {
    int tiles, begin, all;
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

// region: queries
// A: 16 rows x HEAD_DIM columns of Q, straight from global memory; rows that do not exist are zeros. Lane 4 g + t.
__device__ __forceinline__ void load_q(const Cache& c, const Keys& p, uint32_t (&q_rmem)[HEAD_DIM / MMA_K][4]) {
    const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4, rows = c.group * c.queries;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = p.row_block * ROWS + g + r * 8;
        const T* q_gmem = q_row(c, p.b, p.kv_head, row < rows ? row : 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q_rmem[k][half * 2 + r] = row < rows ? *(const uint32_t*)(q_gmem + k * MMA_K + half * 8 + t * 2) : 0;
    }
}
// endregion

// region: shared memory
template <bool WHOLE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // [WARPS, STAGES, 2, TILE, HEAD_DIM], then before_smem
    __shared__ WarpSums sums;
    __shared__ int is_last, guess_smem[WARPS][STAGES];
    int* before_smem = (int*)(shared + WARPS * WARP_BYTES);    // [batch + 1]
    const int warp = threadIdx.x / WARP_SIZE, rows = c.group * c.queries, row_blocks = ceil_div(rows, ROWS);
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
    Copier<WHOLE> copier(c, next, WARPS, warp_smem);
    copier.ask_for_pages(0);
    copier.first_copies();
    for (bool more = true; more;) {
        const Piece p = next;
        const int first_row = p.row_block * ROWS, piece_rows = min(ROWS, rows - first_row);
        // The blocks that share these tiles. Each leaves two parts at most: of the piece that its share begins with,
        // and of the one that it ends with.
        const int first_block = shares.owner(p.begin), last_block = shares.owner(p.begin + p.tiles - 1);
        const bool whole = first_block == last_block, ends_with_it = shares.begin(first_block) < p.begin;
        State x = {};
        x.m_i[0] = x.m_i[1] = -INFINITY;
        uint32_t q_rmem[HEAD_DIM / MMA_K][4];
        load_q(c, p, q_rmem);
        walk(c, copier, x, q_rmem, warp_smem);
        more = p.begin + p.all < end;
        if (more) {                                            // copies go on while this piece is summed up
            next = piece_at(c, before_smem, row_blocks, p.begin + p.all, end);
            copier.ask_for_pages(0);
        }
        // endregion

        // region: sums of the warps
        leave(x, sums, shared, piece_rows);
        __syncthreads();                                       // or other warps' sums would be missing
        if (more) copier.first_copies();
        // endregion

        // region: store
        auto part_of = [&](int block) { return 2 * block + (block == first_block && ends_with_it); };
        for (int i = threadIdx.x; i < piece_rows * QUADS; i += THREADS) {
            const int row = i / QUADS, quad = i % QUADS;
            Sum sum = sum_of(sums, shared, row, quad);
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
