// lanes.cuh - phase 12, steps 1 to 4: a row lies in the lanes of a warp, and so do sums and their merge.
#pragma once
#include "simt/names.h"
#include "p12_decoding/cache.cuh"

constexpr int COLUMNS = HEAD_DIM / WARP_SIZE;                  // of a lane: 2 lane, 2 lane + 1, and 64, 128 ... further

// region: merge
// What keys of a row add up to: m is the maximum of their scores in log2 units, l the sum of their weights.
struct Sum {
    float m, l, o[COLUMNS];
};
__device__ __forceinline__ void add(Sum& sum, float m, float l, const float (&o)[COLUMNS]) {
    const float most = fmaxf(sum.m, m), base = most == -INFINITY ? 0.f : most;     // -inf - (-inf) would be NaN
    const float old = exp2_approx(sum.m - base), now = exp2_approx(m - base);
    sum.m = most, sum.l = sum.l * old + l * now;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) sum.o[i] = sum.o[i] * old + o[i] * now;
}
// Divided by its weights; and its lse, in log2 units. A row that saw no key is 0 and -inf.
__device__ __forceinline__ float finish(Sum& sum) {
    const float inverse = sum.l == 0.f ? 0.f : 1.f / sum.l;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) sum.o[i] *= inverse;
    return sum.m + log2f(sum.l);
}
__device__ __forceinline__ void store(const Cache& c, int b, int kv_head, int row, int lane, Sum& sum) {
    const float lse = finish(sum);
    T* o_gmem = o_row(c, b, kv_head, row);                     // [HEAD_DIM]
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2)
        *(uint32_t*)(o_gmem + i * WARP_SIZE + lane * 2) = pack<T>(sum.o[i], sum.o[i + 1]);
    if (lane == 0) c.lse[lse_row(c, b, kv_head, row)] = lse * LN2;
}
// endregion

// region: load a row
// A lane's columns: a warp's loads are of 128 bytes that lie together.
__device__ __forceinline__ void load(float (&x)[COLUMNS], const T* row, int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
        const float2 two = unpack<T>(*(const uint32_t*)(row + i * WARP_SIZE + lane * 2));
        x[i] = two.x, x[i + 1] = two.y;
    }
}
// endregion
#include "simt/names_end.h"
