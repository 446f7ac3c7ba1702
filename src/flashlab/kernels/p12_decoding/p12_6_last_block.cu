// Phase 12, step 6: the last block to arrive merges the parts.
//
// A second kernel cannot begin before the first has ended, and has to be launched, for the sake of a few kilobytes. So
// each block counts itself when its part is stored, and whoever is last merges them all. What it reads has to be what
// the others wrote: a fence on either side of the count says so.
//
// Compile with -DHEAD_DIM=64 or 128, and -DELEMENT=__half or __nv_bfloat16.

// region: constants
#include "p12_decoding/cache.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int ROWS = MMA_M, TILE = 16;                         // rows of a block, of which `group` exist; keys
constexpr int STAGES = HEAD_DIM == 128 ? 3 : 6, CHUNKS = HEAD_DIM / 8, ROW_BYTES = HEAD_DIM * 2;
constexpr int TILE_BYTES = TILE * ROW_BYTES, WARP_BYTES = STAGES * 2 * TILE_BYTES, SHARED = WARPS * WARP_BYTES;
constexpr int O_TILES = HEAD_DIM / MMA_N, QUADS = HEAD_DIM / 4;        // accumulators; a quad is 4 columns
constexpr int SUM_ROW = HEAD_DIM + 8;                          // floats: rows 32 bytes apart in the banks
static_assert(ROWS * SUM_ROW * 4 <= WARP_BYTES, "a warp's sums go where its tiles were");
// endregion

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8.
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }
// endregion

// region: merge
// Four columns of a row and what they weigh: m is the maximum in log2 units, l the sum, of parts that were merged.
struct Sum {
    float m, l;
    float4 o;
};
__device__ __forceinline__ void add(Sum& sum, float m, float l, const float4& o) {
    const float most = fmaxf(sum.m, m), base = most == -INFINITY ? 0.f : most;     // -inf - (-inf) would be NaN
    const float old = exp2_approx(sum.m - base), now = exp2_approx(m - base);
    sum.m = most, sum.l = sum.l * old + l * now;
    sum.o.x = sum.o.x * old + o.x * now, sum.o.y = sum.o.y * old + o.y * now;
    sum.o.z = sum.o.z * old + o.z * now, sum.o.w = sum.o.w * old + o.w * now;
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

// region: state
struct State {                                                 // c0 c1 | c2 c3: columns 2t, 2t + 1 of row g | g + 8
    float acc[O_TILES][4];                                     // O, not yet divided by l_i
    float m_i[2], l_i[2];                                      // of rows g, g + 8: maxima in log2 units; a lane's sums
};
// endregion

// region: one tile
// 16 keys for 16 rows, from shared memory by ldmatrix
__device__ __forceinline__ void take(State& x, const uint32_t (&q_rmem)[HEAD_DIM / MMA_K][4], uint32_t k_lane,
                                     uint32_t v_lane, int start, int end, float scale_log2, int t) {
    // region: scores
    float s[2][4] = {};                                        // 16 rows x 16 keys
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++) {
        uint32_t b[4];                                         // B twice: 16 columns x 16 keys
        ldmatrix_x4(b, k_lane ^ (k * 32));
        mma_m16n8k16<T>(s[0], q_rmem[k], b[0], b[1]);
        mma_m16n8k16<T>(s[1], q_rmem[k], b[2], b[3]);
    }
    // endregion
    // region: row maxima
    float m_new[2];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m_new[r] = x.m_i[r];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float& e = s[n / 2][r * 2 + n % 2];
            e = start + n / 2 * MMA_N + t * 2 + n % 2 < end ? e * scale_log2 : -INFINITY;
            m_new[r] = fmaxf(m_new[r], e);
        }
        m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 1));         // a row lives in four lanes
        m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 2));
        moved |= m_new[r] > x.m_i[r];
    }
    // endregion
    // region: rescale
    if (__any_sync(~0u, moved)) {                              // seldom, after the first tiles
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float base = m_new[r] == -INFINITY ? 0.f : m_new[r];         // -inf - (-inf) would be NaN
            const float correction = exp2_approx(x.m_i[r] - base);
            x.m_i[r] = m_new[r], x.l_i[r] *= correction;
#pragma unroll
            for (int n = 0; n < O_TILES; n++) x.acc[n][r * 2] *= correction, x.acc[n][r * 2 + 1] *= correction;
        }
    }
    // endregion
    // region: probabilities
    // P = exp(S - maximum), in place. Two neighbouring accumulators, rounded, are the A fragment of P.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = x.m_i[r] == -INFINITY ? 0.f : x.m_i[r];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float& e = s[n / 2][r * 2 + n % 2];
            e = exp2_approx(e - base), x.l_i[r] += e;
        }
    }
    const uint32_t a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]),
                           pack<T>(s[1][2], s[1][3])};
    // endregion
    // region: output
#pragma unroll
    for (int n = 0; n < O_TILES / 2; n++) {
        uint32_t b[4];                                         // B twice: 16 keys x 16 columns of V
        ldmatrix_x4_trans(b, v_lane ^ (n * 32));
        mma_m16n8k16<T>(x.acc[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(x.acc[2 * n + 1], a, b[2], b[3]);
    }
    // endregion
}
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
    // A, 16 rows x HEAD_DIM columns of Q, straight from global memory; rows that do not exist are zeros
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
    const uint32_t k_lane = ring + at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);     // as in phase 8
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
        take(x, q_rmem, k_lane + stage_at, v_lane + stage_at, start, end, c.scale * LOG2E, t);
        stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();
    __syncwarp();                                              // or sums would be stored over a tile in use
    // endregion

    // region: sums of the warps
    // each leaves its sums where its tiles were.
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
    // endregion

    // region: last to arrive
    // New: the barrier hands the block's parts to thread 0; its fence and its count publish them. What the last one to
    // count has seen, its second fence and the barrier hand on. atomicInc begins again at 0: for the next launch.
    __shared__ int is_last;
    __syncthreads();                                           // every thread has stored its parts
    if (threadIdx.x == 0) {
        __threadfence();
        const unsigned others = c.splits - 1;
        is_last = atomicInc((unsigned*)c.counters + blockIdx.x, others) == others;
        __threadfence();
    }
    __syncthreads();                                           // or is_last would not be known
    for (int i = threadIdx.x; is_last && i < group * QUADS; i += THREADS) {
        const int row = i / QUADS, quad = i % QUADS;
        Sum sum = {-INFINITY, 0.f, {}};
        for (int s = 0; s < c.splits; s++) {
            const int64_t part = s * rows + first_row + row;
            const float lse = c.part_lse[part];
            add(sum, lse, lse == -INFINITY ? 0.f : 1.f, *(const float4*)(c.part_o + part * HEAD_DIM + quad * 4));
        }
        store(c, b, kv_head, row, quad, sum);
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
    const int pairs = c.batch * c.kv_heads;
    cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    decode_kernel<<<dim3(pairs, c.splits), THREADS, SHARED, (cudaStream_t)stream>>>(c);
    return (int)cudaGetLastError();
}
// endregion
