// Phase 12, step 2: the keys of a sequence in several parts, and a second kernel that merges them.
//
// One long sequence with 8 key heads is 8 blocks, and the chip has 132 multiprocessors. So several blocks divide the
// keys of a sequence: the host says into how many parts (flashlab.attention.decode.splits_for). A part is an output and
// its lse, float32, and parts are merged as phase 0 merges them: weighted by 2^lse.
//
// Compile with -DHEAD_DIM=64 or 128, -DELEMENT=__half or __nv_bfloat16, -DROWS=heads of a group.

// region: constants
#include "p12_decoding/lanes.cuh"
#ifndef ROWS
#define ROWS 4
#endif

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
// endregion

// region: which keys
__global__ void __launch_bounds__(THREADS) decode_kernel(const Cache c) {
    __shared__ Sum sums_smem[WARPS][ROWS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int b = blockIdx.x / c.kv_heads, kv_head = blockIdx.x % c.kv_heads;
    const int length = c.page;                                 // a sequence fills its one page
    const int split = blockIdx.y, share = ceil_div(length, c.splits);  // New: equal shares; the last ones may be empty
    const int begin = min(length, split * share), end = min(length, begin + share);
    // endregion

    // region: main loop
    float q[ROWS][COLUMNS];
    Sum sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) load(q[r], q_row(c, b, kv_head, r), lane), sums[r] = {-INFINITY, 0.f, {}};
    for (int key = begin + warp; key < end; key += WARPS) {
        float k[COLUMNS], v[COLUMNS];
        load(k, key_row(c.k, c.k_stride, b, kv_head, key), lane);
        load(v, key_row(c.v, c.v_stride, b, kv_head, key), lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {                       // one key, for all heads of the group
            float s = 0.f;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) s += q[r][i] * k[i];
#pragma unroll
            for (int mask = 16; mask; mask /= 2) s += __shfl_xor_sync(~0u, s, mask);
            add(sums[r], s * c.scale * LOG2E, 1.f, v);
        }
    }
    // endregion

    // region: sums of the warps
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums_smem[warp][r][lane] = sums[r];
    __syncthreads();                                           // or other warps' sums would be missing
    for (int r = warp; r < ROWS; r += WARPS) {                 // a warp finishes a row
        Sum sum = {-INFINITY, 0.f, {}};
        for (int w = 0; w < WARPS; w++) {
            const Sum& part = sums_smem[w][r][lane];
            add(sum, part.m, part.l, part.o);
        }
        // endregion

        // region: store
        // New: a part, instead of the row
        const int64_t rows = (int64_t)c.batch * c.kv_heads * ROWS, part = split * rows + lse_row(c, b, kv_head, r);
        const float lse = finish(sum);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) c.part_o[part * HEAD_DIM + i * WARP_SIZE + lane] = sum.o[i];
        if (lane == 0) c.part_lse[part] = lse;
    }
}
// endregion

// region: merge parts
// New: a warp merges the parts of a row. part_o [splits, rows, HEAD_DIM], part_lse [splits, rows]
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
    decode_kernel<<<dim3(pairs, c.splits), THREADS, 0, (cudaStream_t)stream>>>(c);
    merge_kernel<<<ceil_div(pairs * ROWS, WARPS), THREADS, 0, (cudaStream_t)stream>>>(c);      // New
    return (int)cudaGetLastError();
}
// endregion
