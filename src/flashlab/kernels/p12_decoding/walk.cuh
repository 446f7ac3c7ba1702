// walk.cuh - phase 12, what p12_decode and p12_side_cluster do alike: a warp's way through its tiles of keys, the
// copies that run ahead of it, and how parts are merged. A kernel includes it behind WARPS and STAGES.
#pragma once
// region: constants
constexpr int THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = MMA_M, TILE = 16;                         // rows of a block; keys of a tile
constexpr int ROW_BYTES = HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8; // a chunk is 16 bytes, 8 numbers
constexpr int TILE_BYTES = TILE * ROW_BYTES, WARP_BYTES = STAGES * 2 * TILE_BYTES;     // K and V
constexpr int O_TILES = HEAD_DIM / MMA_N, QUADS = HEAD_DIM / 4;                        // a quad is 4 columns
static_assert(ROWS * HEAD_DIM * 4 == 2 * TILE_BYTES && STAGES > 1, "a warp's sums take the place of a stage");
constexpr int AT_ONCE = 16;                                    // parts that are loaded before one is added
#include "p12_decoding/one_tile.cuh"
// endregion

// region: merge
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
// endregion

// region: keys
// Tiles first ... last - 1 of one sequence, which a block reads for one block of rows of one key head.
struct Keys {
    int b, kv_head, row_block, length, first, last;
};
// Of a sequence. One without keys has a tile too, in which nothing is seen: so somebody stores its 0 and -inf.
__device__ __forceinline__ int tiles_of(const Cache& c, int length) {
    return max(1, ceil_div(clamped(c, length), TILE));
}
// endregion

// region: copy a tile
// A warp copies tiles of K and V: its i-th is number first + warp + i * step of the sequence. A lane copies the chunk
// in `column` of each ROWS_PER_PASS-th row. With WHOLE a page holds whole tiles, and one load brings the pages of 32
// tiles to the warp, one to a lane; without, those of the rows of two. The next load is always on its way.
constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
template <bool WHOLE> struct Copier {
    const Cache& c;
    const Keys& p;
    int warp, step, lane, lane_row, column, pages, later_pages;
    uint32_t to;                                               // this lane's first chunk, in the warp's stage 0

    __device__ Copier(const Cache& c, const Keys& p, int step, uint32_t warp_smem) : c(c), p(p), step(step) {
        warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
        lane_row = lane / CHUNKS, column = lane % CHUNKS * 8, to = warp_smem + at(lane_row, column);
    }
    __device__ int tile(int i) const { return p.first + warp + i * step; }
    // From the i-th tile on, and whatever the table has room for: pages behind the last key are never used.
    __device__ void ask_for_pages(int i) {
        const int key = tile(WHOLE ? i + lane : i + lane / TILE) * TILE + (WHOLE ? 0 : lane % TILE);
        later_pages = key < c.page * c.width ? page_of(c, p.b, key) : 0;
    }
    // The i-th tile, when its turn has come. Rows from key `limit` on become zeros: what is not there may be NaN.
    __device__ void copy(int stage, int i, int limit) {
        constexpr int BATCH = WHOLE ? WARP_SIZE : 2;
        if (i % BATCH == 0) {
            pages = later_pages;
            if (tile(i + BATCH) < p.last) ask_for_pages(i + BATCH);
        }
        const int start = tile(i) * TILE, slot = slot_of(c, start + (WHOLE ? 0 : lane % TILE));
        const int left = limit - start - lane_row, from_lane = i % BATCH * (WHOLE ? 1 : TILE);
        const uint32_t to_k = to + stage * 2 * TILE_BYTES, to_v = to_k + TILE_BYTES;
        if constexpr (WHOLE) {                                 // two runs of memory
            const int page = __shfl_sync(~0u, pages, from_lane);
            copy_run(to_k, c.k, c.k_stride, page, slot, left);
            copy_run(to_v, c.v, c.v_stride, page, slot, left);
        } else {
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_PER_PASS) {
                const int page = __shfl_sync(~0u, pages, from_lane + row + lane_row);
                const int of_row = __shfl_sync(~0u, slot, row + lane_row);
                copy_row(to_k, row, key_row(c.k, c.k_stride, page, p.kv_head, of_row) + column, c.k, left);
                copy_row(to_v, row, key_row(c.v, c.v_stride, page, p.kv_head, of_row) + column, c.v, left);
            }
        }
    }
    __device__ void copy_run(uint32_t to_tile, const void* cache, const Strides& stride, int page, int slot,
                             int left) const {
        const T* from = key_row(cache, stride, page, p.kv_head, slot + lane_row) + column;
#pragma unroll
        for (int row = 0; row < TILE; row += ROWS_PER_PASS, from += ROWS_PER_PASS * stride.row)
            copy_row(to_tile, row, from, cache, left);
    }
    __device__ void copy_row(uint32_t to_tile, int row, const T* from, const void* cache, int left) const {
        const bool there = row < left;
        cp_async<16>((to_tile ^ row % 8 * 16) + row * ROW_BYTES, there ? from : (const T*)cache, there ? 16 : 0);
    }
    // The first copies of a piece, from tile number `from` on. Each is a group, if an empty one.
    __device__ void first_copies(int from = 0) {
#pragma unroll
        for (int i = from; i < STAGES - 1; i++) {
            if (tile(i) < p.last) copy(i, i, p.length);
            cp_async_commit();
        }
    }
};
// endregion

// region: main loop
// One warp, its tiles. The first STAGES - 1 are being copied.
template <bool WHOLE>
__device__ __forceinline__ void walk(const Cache& c, Copier<WHOLE>& copier, State& x,
                                     const uint32_t (&q_rmem)[HEAD_DIM / MMA_K][4], uint32_t warp_smem) {
    const Keys& p = copier.p;
    const int lane = copier.lane, first_row = p.row_block * ROWS + lane / 4;
    int last_key[2];                                           // of all queries the last one sees every key
#pragma unroll
    for (int r = 0; r < 2; r++) last_key[r] = p.length - c.queries + query_of(c, first_row + r * 8);
    const uint32_t k_lane = warp_smem + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    const uint32_t v_lane = warp_smem + TILE_BYTES + at(lane % 16, lane / 16 * 8);
    for (int i = 0, stage = 0; copier.tile(i) < p.last; i++) {
        cp_async_wait<STAGES - 2>();                           // this lane's part of the tile is here
        __syncwarp();                                          // or others' parts would be missing, tile i - 1 in use
        const int ahead = i + STAGES - 1;
        if (copier.tile(ahead) < p.last) copier.copy(stage == 0 ? STAGES - 1 : stage - 1, ahead, p.length);
        cp_async_commit();
        const uint32_t stage_at = stage * 2 * TILE_BYTES;
        take(x, q_rmem, k_lane + stage_at, v_lane + stage_at, copier.tile(i) * TILE, last_key, c.scale * LOG2E,
             lane % 4);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    cp_async_wait<0>();                                        // of a guess, where there was no tile
    __syncwarp();                                              // or the sums would be stored over a tile in use
}
// endregion

// region: sums of the warps
// Element (row, column) of a warp's sums [ROWS, HEAD_DIM], in floats; any column. Swizzled as tiles are.
__device__ __forceinline__ int sum_at(int row, int column) {
    return row * HEAD_DIM + (column / 8 ^ row % 8) * 8 + column % 8;
}
// Each leaves its sums in the last stage of its own, which the first copies leave alone.
struct WarpSums {
    float m[WARPS][ROWS], l[WARPS][ROWS];
};
constexpr int LAST_STAGE = (STAGES - 1) * 2 * TILE_BYTES;
__device__ __forceinline__ void leave(State& x, WarpSums& sums, char* shared, int rows) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    float* acc = (float*)(shared + warp * WARP_BYTES + LAST_STAGE);            // [ROWS, HEAD_DIM]
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = x.l_i[r];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        const int row = g + r * 8;
        if (row < rows) {
            if (t == 0) sums.m[warp][row] = x.m_i[r], sums.l[warp][row] = l;
#pragma unroll
            for (int n = 0; n < O_TILES; n++)
                *(float2*)(acc + sum_at(row, n * MMA_N + t * 2)) = make_float2(x.acc[n][r * 2], x.acc[n][r * 2 + 1]);
        }
    }
}
// Four columns of a row, of all warps. Behind a barrier.
__device__ __forceinline__ Sum sum_of(const WarpSums& sums, const char* shared, int row, int quad) {
    Sum sum = {-INFINITY, 0.f, {}};
    float m[WARPS], l[WARPS];
    float4 o[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float* acc = (const float*)(shared + w * WARP_BYTES + LAST_STAGE);
        m[w] = sums.m[w][row], l[w] = sums.l[w][row], o[w] = *(const float4*)(acc + sum_at(row, quad * 4));
    }
    add(sum, m, l, o);
    return sum;
}
// endregion
