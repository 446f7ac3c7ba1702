// fragments.cuh - phase 12, steps 5 to 7: the heads of a group are the rows of an MMA. A tile, and how a warp takes it.
#pragma once
#include "simt/names.h"
#include "p12_decoding/cache.cuh"

// region: constants
constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = MMA_M, TILE = 16;                         // rows of a block, of which `group` exist; keys
constexpr int STAGES = HEAD_DIM == 128 ? 3 : 6, CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2;
constexpr int TILE_BYTES = TILE * ROW_BYTES, WARP_BYTES = STAGES * 2 * TILE_BYTES, SHARED = WARPS * WARP_BYTES;
constexpr int O_TILES = HEAD_DIM / MMA_N, QUADS = HEAD_DIM / 4;        // accumulators; a quad is 4 columns
constexpr int SUM_ROW = HEAD_DIM + 8;                          // floats: rows 32 bytes apart in the banks
static_assert(ROWS * SUM_ROW * 4 <= WARP_BYTES, "a warp's sums go where its tiles were");
// endregion

#include "p12_decoding/one_tile.cuh"

// region: merge
// Adds a part, or a warp.
__device__ __forceinline__ void add(Sum& sum, float m, float l, const float4& o) {
    const float most = fmaxf(sum.m, m), base = most == -INFINITY ? 0.f : most;     // -inf - (-inf) would be NaN
    const float old = exp2_approx(sum.m - base), now = exp2_approx(m - base);
    sum.m = most, sum.l = sum.l * old + l * now;
    sum.o.x = sum.o.x * old + o.x * now, sum.o.y = sum.o.y * old + o.y * now;
    sum.o.z = sum.o.z * old + o.z * now, sum.o.w = sum.o.w * old + o.w * now;
}
// endregion

// region: copy a tile
// A warp copies tiles of K and V. A lane copies the chunk in `column` of each ROWS_PER_PASS-th row.
constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
struct Copier {
    const Cache& c;
    int b, kv_head, end, lane;                                 // keys before `end` are asked for
    uint32_t to;                                               // the warp's stage 0

    // Of key `lane` of a tile. Read one tile ahead: a copy whose page is on its way would wait for two latencies.
    __device__ int page(int start) const {
        const int key = start + lane % TILE;
        return key < end ? page_of(c, b, key) : 0;
    }
    __device__ void copy(int stage, int start, int page) const {
        const int slot = slot_of(c, start + lane % TILE), column = lane % CHUNKS * 8;
#pragma unroll
        for (int pass = 0; pass < TILE; pass += ROWS_PER_PASS) {
            const int row = pass + lane / CHUNKS;
            const int of_page = __shfl_sync(~0u, page, row), in_page = __shfl_sync(~0u, slot, row);
            const bool there = start + row < end;              // what is not becomes zeros
            const T* k_from = key_row(c.k, c.k_stride, of_page, kv_head, in_page) + column;
            const T* v_from = key_row(c.v, c.v_stride, of_page, kv_head, in_page) + column;
            const uint32_t chunk = to + stage * 2 * TILE_BYTES + at(row, column);      // swizzled
            cp_async<16>(chunk, there ? k_from : (const T*)c.k, there ? 16 : 0);
            cp_async<16>(chunk + TILE_BYTES, there ? v_from : (const T*)c.v, there ? 16 : 0);
        }
    }
};
// endregion

#include "simt/names_end.h"
