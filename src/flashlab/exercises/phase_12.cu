// 12.6: attention of one row over its scores, in splits. A warp has 32 columns, and works for itself: of the warps that have
// the same columns of a row, one in each split, the last one to arrive merges their parts.
//   s [rows, N]; v [N, COLUMNS]; o [rows, COLUMNS]; part_o [splits, rows, COLUMNS]; part_lse [splits, rows, WARPS];
//   counters [rows, WARPS], 0 before the first launch
#include <cuda_runtime.h>
#include <math.h>

constexpr int COLUMNS = 64, WARPS = COLUMNS / 32;              // a thread per column

__global__ void __launch_bounds__(COLUMNS) decode(const float* s, const float* v, float* o, float* part_o,
                                                  float* part_lse, int* counters, int N, int splits) {
    const int row = blockIdx.x, split = blockIdx.y, rows = gridDim.x, d = threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = (N + splits - 1) / splits, end = min(N, (split + 1) * share);
    float m = -INFINITY, l = 0.f, acc = 0.f;
    for (int key = split * share; key < end; key++) {
        const float x = s[row * N + key], m_new = fmaxf(m, x), correction = __expf(m - m_new), p = __expf(x - m_new);
        l = l * correction + p, acc = acc * correction + p * v[key * COLUMNS + d], m = m_new;
    }
    part_o[(split * rows + row) * COLUMNS + d] = l > 0.f ? acc / l : 0.f;
    if (lane == 0) part_lse[(split * rows + row) * WARPS + warp] = l > 0.f ? m + __logf(l) : -INFINITY;

    int* counter = counters + row * WARPS + warp;
    bool last = false;
    // region: arrive
    __syncwarp();                                              // lane 0 is shown what its warp has written,
    int before = 0;
    if (lane == 0) {
        __threadfence();                                       // and shows it to all that see its count
        before = atomicAdd(counter, 1);
        __threadfence();                                       // sees what the counts before it show
        if (before == splits - 1) *counter = 0;                // for the next launch
    }
    last = __shfl_sync(~0u, before, 0) == splits - 1;
    __syncwarp();                                              // what lane 0 sees, all see
    // endregion

    if (!last) return;
    float largest = -INFINITY, sum = 0.f, merged = 0.f;
    for (int i = 0; i < splits; i++) largest = fmaxf(largest, part_lse[(i * rows + row) * WARPS + warp]);
    for (int i = 0; i < splits; i++) {
        const float weight = __expf(part_lse[(i * rows + row) * WARPS + warp] - largest);
        sum += weight, merged += weight * part_o[(i * rows + row) * COLUMNS + d];
    }
    o[row * COLUMNS + d] = merged / sum;
}

extern "C" int run(const float* s, const float* v, float* o, float* part_o, float* part_lse, int* counters, int rows,
                   int N, int splits, void* stream) {
    decode<<<dim3(rows, splits), COLUMNS, 0, (cudaStream_t)stream>>>(s, v, o, part_o, part_lse, counters, N, splits);
    return (int)cudaGetLastError();
}
