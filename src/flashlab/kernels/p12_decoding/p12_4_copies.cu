// Phase 12, step 4: copies in flight.
//
// Until now a warp asked for one key and waited for it. By Little's law 4.8 TB/s times 700 ns are 3.4 MB that have to
// be on their way at any time, 25 KB per multiprocessor. So a warp has a ring of its own in shared memory, and copies
// tiles of 16 keys ahead of those it works on: cp.async needs no registers for them. No warp waits for another one.
//
// Compile with -DHEAD_DIM=64 or 128, -DELEMENT=__half or __nv_bfloat16, -DROWS=heads of a group.

// region: constants
#include "p12_decoding/lanes.cuh"
#ifndef ROWS
#define ROWS 4
#endif

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
// New: a tile is 16 keys of K and of V; a chunk is 16 bytes, 8 numbers
constexpr int TILE = 16, STAGES = HEAD_DIM == 128 ? 3 : 6, CHUNKS = HEAD_DIM / 8;
constexpr int TILE_BYTES = TILE * HEAD_DIM * 2, WARP_BYTES = STAGES * 2 * TILE_BYTES, SHARED = WARPS * WARP_BYTES;
static_assert(sizeof(float) * (COLUMNS + 2) * WARP_SIZE * ROWS <= WARP_BYTES, "a warp's sums go where its tiles were");
// endregion

// region: copy a tile
// New: a warp copies tiles of K and V. A lane copies the chunk in `column` of each ROWS_PER_PASS-th row.
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
            const uint32_t chunk = to + stage * 2 * TILE_BYTES + (row * HEAD_DIM + column) * 2;
            cp_async<16>(chunk, there ? k_from : (const T*)c.k, there ? 16 : 0);
            cp_async<16>(chunk + TILE_BYTES, there ? v_from : (const T*)c.v, there ? 16 : 0);
        }
    }
};
// endregion

// region: which keys
__global__ void __launch_bounds__(THREADS) decode_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // New: [WARPS, STAGES, 2, TILE, HEAD_DIM]
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int b = blockIdx.x / c.kv_heads, kv_head = blockIdx.x % c.kv_heads;
    const int length = length_of(c, b);
    const int split = blockIdx.y, share = ceil_div(length, c.splits);  // equal shares; the last ones may be empty
    const int begin = min(length, split * share), end = min(length, begin + share);
    // endregion

    // region: main loop
    float q[ROWS][COLUMNS];
    Sum sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) load(q[r], q_row(c, b, kv_head, r), lane), sums[r] = {-INFINITY, 0.f, {}};
    char* ring = shared + warp * WARP_BYTES;
    const Copier copier{c, b, kv_head, end, lane, smem_u32(ring)};
    constexpr int STEP = WARPS * TILE;                         // New: a warp takes every WARPS-th tile
    int start = begin + warp * TILE, stage = 0;
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
        const T* k_smem = (const T*)(ring + stage * 2 * TILE_BYTES);   // [TILE, HEAD_DIM]
        for (int key = 0; key < min(TILE, end - start); key++) {
            float k[COLUMNS], v[COLUMNS];
            load(k, k_smem + key * HEAD_DIM, lane);
            load(v, k_smem + (TILE + key) * HEAD_DIM, lane);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {                   // one key, for all heads of the group
                float s = 0.f;
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) s += q[r][i] * k[i];
#pragma unroll
                for (int mask = 16; mask; mask /= 2) s += __shfl_xor_sync(~0u, s, mask);
                add(sums[r], s * c.scale * LOG2E, 1.f, v);
            }
        }
        stage = (stage + 1) % STAGES;
    }
    // endregion

    // region: sums of the warps
    cp_async_wait<0>();
    __syncwarp();                                              // or sums would be stored over a tile in use
    auto sums_smem = [&](int w, int r) -> Sum& { return ((Sum*)(shared + w * WARP_BYTES))[r * WARP_SIZE + lane]; };
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums_smem(warp, r) = sums[r];
    __syncthreads();                                           // or other warps' sums would be missing
    for (int r = warp; r < ROWS; r += WARPS) {                 // a warp finishes a row
        Sum sum = {-INFINITY, 0.f, {}};
        for (int w = 0; w < WARPS; w++) {
            const Sum& part = sums_smem(w, r);
            add(sum, part.m, part.l, part.o);
        }
        // endregion

        // region: store
        // A part
        const int64_t rows = (int64_t)c.batch * c.kv_heads * ROWS, part = split * rows + lse_row(c, b, kv_head, r);
        const float lse = finish(sum);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) c.part_o[part * HEAD_DIM + i * WARP_SIZE + lane] = sum.o[i];
        if (lane == 0) c.part_lse[part] = lse;
    }
}
// endregion

// region: merge parts
// A warp merges the parts of a row. part_o [splits, rows, HEAD_DIM], part_lse [splits, rows]
__global__ void __launch_bounds__(THREADS) merge_kernel(const Cache c) {
    const int lane = threadIdx.x % WARP_SIZE, rows = c.batch * c.kv_heads * ROWS;
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE;
    if (row >= rows) return;
    Sum sum = {-INFINITY, 0.f, {}};
    for (int s = 0; s < c.splits; s++) {
        const int64_t part = (int64_t)s * rows + row;
        const float lse = c.part_lse[part];
        float o[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) o[i] = c.part_o[part * HEAD_DIM + i * WARP_SIZE + lane];
        add(sum, lse, lse == -INFINITY ? 0.f : 1.f, o);        // a part is divided by its own weights already
    }
    const int pair = row / ROWS;
    store(c, pair / c.kv_heads, pair % c.kv_heads, row % ROWS, lane, sum);
}
// endregion

// region: launch
// `shapes` is a Cache whose pointers are still empty.
extern "C" int decode(const void* q, const void* k, const void* v, const void* table, const int* lengths, void* o,
                      float* lse, float* part_o, float* part_lse, int* counters, const void* shapes, void* stream) {
    Cache c = *(const Cache*)shapes;
    c.q = q, c.k = k, c.v = v, c.table = (const int*)table, c.lengths = lengths, c.o = o, c.lse = lse;
    c.part_o = part_o, c.part_lse = part_lse, c.counters = counters;
    const int pairs = c.batch * c.kv_heads;
    cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    decode_kernel<<<dim3(pairs, c.splits), THREADS, SHARED, (cudaStream_t)stream>>>(c);
    merge_kernel<<<ceil_div(pairs * ROWS, WARPS), THREADS, 0, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
