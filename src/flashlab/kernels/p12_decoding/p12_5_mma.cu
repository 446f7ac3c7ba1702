// Phase 12, step 5: the heads of a group are the rows of an MMA.
//
// What a warp does for a key grew with the group: from 8 heads on arithmetic and shuffles take longer than the copies.
// Tensor cores multiply 16 rows at once, whether they are there or not: 2 * HEAD_DIM / 16 MMAs are the scores of 16
// keys for up to 16 heads, and as many again their part of O. Each warp still works on tiles of its own.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "p12_decoding/fragments.cuh"
// endregion

// region: which keys
__global__ void __launch_bounds__(THREADS, 2) decode_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // [WARPS, STAGES, 2, TILE, HEAD_DIM]
    __shared__ float m_smem[WARPS][ROWS], l_smem[WARPS][ROWS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int b = blockIdx.x / c.kv_heads, kv_head = blockIdx.x % c.kv_heads, group = c.group;
    const int length = length_of(c, b);
    const int split = blockIdx.y, share = ceil_div(length, c.splits);  // equal shares; the last ones may be empty
    const int begin = min(length, split * share), end = min(length, begin + share);
    // endregion

    // region: Q in registers
    // New: A, 16 rows x HEAD_DIM columns of Q, straight from global memory; rows that do not exist are zeros
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = g + r * 8;
        const T* q_gmem = q_row(c, b, kv_head, row < group ? row : 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / MMA_K; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q_rmem[k][half * 2 + r] = row < group ? *(const uint32_t*)(q_gmem + k * MMA_K + half * 8 + t * 2) : 0;
    }
    // endregion

    // region: main loop
    State x = {};
    x.m_i[0] = x.m_i[1] = -INFINITY;
    const uint32_t ring = smem_u32(shared + warp * WARP_BYTES);
    const uint32_t k_lane = ring + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);     // New: as in phase 8
    const uint32_t v_lane = ring + TILE_BYTES + at(lane % 16, lane / 16 * 8);
    const Copier copier{c, b, kv_head, end, lane, ring};
    constexpr int STEP = WARPS * TILE;                         // a warp takes every WARPS-th tile
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
        const uint32_t stage_at = stage * 2 * TILE_BYTES;
        take(x, q_rmem, k_lane + stage_at, v_lane + stage_at, start, {end - 1, end - 1}, c.scale * LOG2E, t);
        stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();
    __syncwarp();                                              // or sums would be stored over a tile in use
    // endregion

    // region: sums of the warps
    // New: each leaves its sums where its tiles were.
    float* sums = (float*)(shared + warp * WARP_BYTES);        // [ROWS, SUM_ROW]
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = x.l_i[r];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (g + r * 8 >= group) continue;
        if (t == 0) m_smem[warp][g + r * 8] = x.m_i[r], l_smem[warp][g + r * 8] = l;
#pragma unroll
        for (int n = 0; n < O_TILES; n++)
            *(float2*)(sums + (g + r * 8) * SUM_ROW + n * MMA_N + t * 2) =
                make_float2(x.acc[n][r * 2], x.acc[n][r * 2 + 1]);
    }
    __syncthreads();                                           // or other warps' sums would be missing
    // endregion

    // region: store
    const int64_t rows = (int64_t)c.batch * c.kv_heads * group;        // part_o [splits, rows, HEAD_DIM]
    const int64_t first_row = lse_row(c, b, kv_head, 0);
    for (int i = threadIdx.x; i < group * QUADS; i += THREADS) {
        const int row = i / QUADS, quad = i % QUADS;
        Sum sum = {-INFINITY, 0.f, {}};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float* of_warp = (const float*)(shared + w * WARP_BYTES) + row * SUM_ROW + quad * 4;
            add(sum, m_smem[w][row], l_smem[w][row], *(const float4*)of_warp);
        }
        const int64_t part = split * rows + first_row + row;
        const float lse = finish(sum);
        *(float4*)(c.part_o + part * HEAD_DIM + quad * 4) = sum.o;
        if (quad == 0) c.part_lse[part] = lse;
    }
}
// endregion

// region: merge parts
// A thread merges four columns of a row.
__global__ void __launch_bounds__(THREADS) merge_kernel(const Cache c) {
    const int i = blockIdx.x * THREADS + threadIdx.x, rows = c.batch * c.kv_heads * c.group;
    const int row = i / QUADS, quad = i % QUADS, pair = row / c.group;
    if (row >= rows) return;
    Sum sum = {-INFINITY, 0.f, {}};
    for (int s = 0; s < c.splits; s++) {
        const int64_t part = (int64_t)s * rows + row;
        const float lse = c.part_lse[part];
        add(sum, lse, lse == -INFINITY ? 0.f : 1.f, *(const float4*)(c.part_o + part * HEAD_DIM + quad * 4));
    }
    store(c, pair / c.kv_heads, pair % c.kv_heads, row % c.group, quad, sum);
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
    merge_kernel<<<ceil_div(pairs * c.group * QUADS, THREADS), THREADS, 0, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
