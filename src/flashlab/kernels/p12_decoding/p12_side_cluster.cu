// Phase 12, beside the ladder: one sequence, whose parts meet in a thread block cluster (compute capability 9.0).
//
// p12_decode's parts go through memory: store, fence, count, load, each a latency, and a short cache is all latency.
// Here the blocks of a key head are one cluster. They run at the same time, and each can write to the shared memory of
// the others. So each sends its sums to the blocks that finish them, and one barrier of the cluster stands for all of
// that. With one sequence there is nothing to balance either: a warp's first tile is the same for every length, so its
// copy need not wait for the length.
//
// Compile with -DHEAD_DIM=64, 128 or 256, -DELEMENT=__half or __nv_bfloat16; -DWARPS=, -DSTAGES= to try others.

// region: constants
#include "p12_decoding/cache.cuh"
#include "ptx_cluster.cuh"
#ifndef WARPS
#define WARPS (HEAD_DIM == 256 ? 4 : 8)
#endif
#ifndef STAGES
#define STAGES (HEAD_DIM == 64 ? 4 : 3)
#endif
#include "p12_decoding/walk.cuh"
constexpr int LARGEST = AT_ONCE;                               // blocks of a cluster: more than 8 must be allowed
constexpr int SHARED = WARPS * WARP_BYTES + (ROWS * QUADS + LARGEST) * (int)(sizeof(float4) + sizeof(float2));
// endregion

// region: first tile
// It was copied before the length was known: rows of V that the length leaves out may be NaN, and become zeros.
template <bool WHOLE>
__device__ __forceinline__ void clean(const Copier<WHOLE>& copier, char* v_smem) {
#pragma unroll
    for (int row = copier.lane_row; row < TILE; row += ROWS_PER_PASS)
        if (copier.tile(0) * TILE + row >= copier.p.length) *(float4*)(v_smem + at(row, copier.column)) = float4{};
}
// endregion

// region: tiles
template <bool WHOLE>
__global__ void __launch_bounds__(THREADS, 1) cluster_kernel(const Cache c) {
    extern __shared__ __align__(1024) char shared[];           // [WARPS, STAGES, 2, TILE, HEAD_DIM], then the parts
    __shared__ __align__(1024) T q_smem[ROWS * HEAD_DIM];
    __shared__ WarpSums sums;
    cluster_arrive_relaxed();                                  // this block has begun: others may write to its memory
    const int rows = c.group * c.queries, row_blocks = ceil_div(rows, ROWS), readers = c.kv_heads * row_blocks;
    const int rank = cluster_rank(), size = cluster_size(), reader = blockIdx.y % readers;
    char* warp_shared = shared + threadIdx.x / WARP_SIZE * WARP_BYTES;
    Keys p;
    p.b = blockIdx.y / readers, p.kv_head = reader / row_blocks, p.row_block = reader % row_blocks;
    const int length = c.lengths[p.b], room = c.page * c.width;                // on its way until it is needed
    p.first = rank * WARPS, p.last = ceil_div(room, TILE);
    Copier<WHOLE> copier(c, p, size * WARPS, smem_u32(warp_shared));
    copier.ask_for_pages(0);
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {               // Q, once for all warps
        const int row = i / CHUNKS, column = i % CHUNKS * 8, r = p.row_block * ROWS + row;
        const T* from = q_row(c, p.b, p.kv_head, r < rows ? r : 0) + column;
        cp_async<16>(smem_u32(q_smem) + at(row, column), from, r < rows ? 16 : 0);
    }
    cp_async_commit();
    copier.later_pages = min((unsigned)copier.later_pages, c.pages - 1u);      // there may be no such page
    if (copier.tile(0) < p.last) copier.copy(0, 0, room);
    cp_async_commit();
    p.length = clamped(c, length), p.last = tiles_of(c, length);
    copier.first_copies(1);
    if (copier.tile(0) < p.last && copier.tile(0) * TILE + TILE > p.length) {
        cp_async_wait<STAGES - 2>();
        clean(copier, warp_shared + TILE_BYTES);
    }
    cp_async_wait<STAGES - 1>();
    __syncthreads();                                           // or other threads' parts of Q would be missing
    uint32_t q_rmem[HEAD_DIM / MMA_K][4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / MMA_K; k++)
        ldmatrix_x4(q_rmem[k], smem_u32(q_smem) + (at(copier.lane % 16, copier.lane / 16 * 8) ^ k * 32));
    State x = {};
    x.m_i[0] = x.m_i[1] = -INFINITY;
    walk(c, copier, x, q_rmem, smem_u32(warp_shared));
    const int first_row = p.row_block * ROWS, piece_rows = min(ROWS, rows - first_row);
    leave(x, sums, shared, piece_rows);
    __syncthreads();                                           // or other warps' sums would be missing
    // endregion

    // region: send
    // Four columns of a row are finished by block number i / each. It gets them from all blocks, and keeps them in
    // places of their own: others may send while it still computes.
    const int items = piece_rows * QUADS, each = ceil_div(items, size);
    float4* part_o = (float4*)(shared + WARPS * WARP_BYTES);   // [size, each]
    float2* part_ml = (float2*)(part_o + size * each);
    cluster_wait();                                            // all blocks have begun
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const Sum sum = sum_of(sums, shared, i / QUADS, i % QUADS);
        const int owner = i / each, place = rank * each + i % each;
        cluster_store(cluster_address(smem_u32(part_o + place), owner), sum.o);
        cluster_store(cluster_address(smem_u32(part_ml + place), owner), make_float2(sum.m, sum.l));
    }
    cluster_arrive();
    cluster_wait();                                            // all parts are here; nobody writes to others any more
    // endregion

    // region: finish
    for (int j = threadIdx.x; j < each && rank * each + j < items; j += THREADS) {
        const int i = rank * each + j;
        Sum sum = {-INFINITY, 0.f, {}};
        float m[LARGEST], l[LARGEST];
        float4 o[LARGEST];
#pragma unroll
        for (int from = 0; from < LARGEST; from++) {
            const float2 ml = from < size ? part_ml[from * each + j] : make_float2(-INFINITY, 0.f);
            m[from] = ml.x, l[from] = ml.y, o[from] = from < size ? part_o[from * each + j] : float4{};
        }
        add(sum, m, l, o);
        store(c, p.b, p.kv_head, first_row + i / QUADS, i % QUADS, sum);
    }
}
// endregion

// region: launch
typedef void (*Kernel)(const Cache);
static Kernel kernel_for(const Cache& c, bool paged) {
    return !paged || c.page % TILE == 0 ? cluster_kernel<true> : cluster_kernel<false>;
}
static cudaLaunchConfig_t configure(const Cache& c, Kernel kernel, cudaLaunchAttribute* cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = c.splits, cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(c.splits, c.batch * c.kv_heads * ceil_div(c.group * c.queries, ROWS));
    config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED, config.attrs = cluster, config.numAttrs = 1;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return config;
}
// Clusters of c.splits blocks that this GPU runs at once. A cluster lies within a GPC, some 16 of the SMs.
extern "C" int64_t at_once(const void* shapes) {
    const Cache& c = *(const Cache*)shapes;
    cudaLaunchAttribute cluster;
    int clusters = 0;
    const Kernel kernel = kernel_for(c, true);
    const cudaLaunchConfig_t config = configure(c, kernel, &cluster);
    return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess ? clusters : 0;
}
// As decode of p12_decode; c.splits is the size of the clusters. There are no parts in memory, and no counters.
extern "C" int decode(const void* q, const void* k, const void* v, const void* table, const int* lengths, void* o,
                      float* lse, float* part_o, float* part_lse, int* counters, const void* shapes, void* stream) {
    Cache c = *(const Cache*)shapes;
    c.q = q, c.k = k, c.v = v, c.table = (const int*)table, c.lengths = lengths, c.o = o, c.lse = lse;
    cudaLaunchAttribute cluster;
    const Kernel kernel = kernel_for(c, table);
    cudaLaunchConfig_t config = configure(c, kernel, &cluster);
    config.stream = (cudaStream_t)stream;
    return (int)cudaLaunchKernelEx(&config, kernel, (const Cache)c);
}
// endregion
