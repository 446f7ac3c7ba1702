// Phase 12, step 1: a block per sequence and key head.
//
// O = softmax(scale * q K^T) V for one query per sequence, over a contiguous cache. The ROWS heads of a group read the
// same keys: one block has them all, and reads each key once. That makes ROWS FLOP for each byte, far below the ridge
// of any GPU: what counts from here on is how fast the cache is read. A warp takes every WARPS-th key, a lane some of
// its columns.
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
    const int begin = 0, end = c.page;                         // a sequence fills its one page
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
        store(c, b, kv_head, r, lane, sum);
    }
}
// endregion

// region: launch
// `shapes` is a Cache whose pointers are still empty.
extern "C" int decode(const void* q, const void* k, const void* v, const void* table, const int* lengths, void* o,
                      float* lse, float* part_o, float* part_lse, int* counters, const void* shapes, void* stream) {
    Cache c = *(const Cache*)shapes;
    c.q = q, c.k = k, c.v = v, c.table = (const int*)table, c.lengths = lengths, c.o = o, c.lse = lse;
    c.part_o = part_o, c.part_lse = part_lse, c.counters = counters;
    decode_kernel<<<c.batch * c.kv_heads, THREADS, 0, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
