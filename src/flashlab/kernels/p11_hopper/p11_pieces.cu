// Phase 11: the three new machines of Hopper, each alone: an mbarrier, a TMA copy, a wgmma. For looking at.

// region: constants
#include "tensor_map.cuh"
#include "wgmma.cuh"

#ifndef ELEMENT
#define ELEMENT __half
#endif
using T = ELEMENT;
constexpr int WARPGROUP = 128;
constexpr int TILE = 64;                                       // rows of a tile, and elements per row: 128 bytes
constexpr int TILE_BYTES = TILE * TILE * 2;
constexpr int ATOM_BYTES = 1024;                               // 8 rows of 128 bytes: what the swizzle permutes
// endregion

// region: an mbarrier
// One thread works through a list of operations on one mbarrier. After each it looks at both parities; but not after a
// copy has begun: its bytes come when they come.
//   script [steps, 2]: operation and its argument; seen [steps, 2]: is the phase of parity 0, of parity 1, complete?
enum { ARRIVE, ARRIVE_EXPECT_TX, BULK_LOAD, WAIT };
__global__ void __launch_bounds__(32)
look_mbarrier(const int* script, int* seen, const T* source_gmem, int steps, int arrivals) {
    __shared__ __align__(128) char buffer_smem[1024];
    __shared__ __align__(8) uint64_t barrier_smem;
    if (threadIdx.x > 0) return;
    const uint32_t barrier = smem_u32(&barrier_smem);
    mbarrier_init(barrier, arrivals);
    fence_mbarrier_init();
    for (int i = 0; i < steps; i++) {
        const int operation = script[2 * i], argument = script[2 * i + 1];
        if (operation == ARRIVE) mbarrier_arrive(barrier);
        if (operation == ARRIVE_EXPECT_TX) mbarrier_arrive_expect_tx(barrier, argument);
        if (operation == BULK_LOAD) bulk_load(smem_u32(buffer_smem), source_gmem, argument, barrier);
        if (operation == WAIT) mbarrier_wait(barrier, argument);
        if (operation == BULK_LOAD) continue;
        seen[2 * i] = mbarrier_test_wait(barrier, 0);
        seen[2 * i + 1] = mbarrier_test_wait(barrier, 1);
    }
}
// endregion

// region: a TMA load
// One thread asks for a box of a matrix; all threads wait for it, and write out shared memory byte by byte as it lies.
__global__ void __launch_bounds__(WARPGROUP)
look_tma(const __grid_constant__ CUtensorMap map, int column, int row, int bytes, uint16_t* out_gmem) {
    extern __shared__ __align__(1024) char tile_smem[];
    __shared__ __align__(8) uint64_t barrier_smem;
    const uint32_t barrier = smem_u32(&barrier_smem);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    __syncthreads();                                           // or a thread would wait at a barrier that is none yet
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, bytes);
        tma_load(smem_u32(tile_smem), &map, barrier, column, row);
    }
    mbarrier_wait(barrier, 0);                                 // or the tile would be read before it is there
    for (int i = threadIdx.x; i < bytes / 2; i += WARPGROUP) out_gmem[i] = ((const uint16_t*)tile_smem)[i];
}
// endregion

// region: descriptors
// A tile of 64-element rows, 128-byte swizzle. K-major: a row is a row of the operand, and 16 of K are 32 bytes of it.
__device__ __forceinline__ uint64_t k_major(uint32_t tile) {
    return smem_descriptor(tile, SWIZZLE_128, 16, ATOM_BYTES);
}
// MN-major: a row is one k, and holds 64 of M or N. `next` bytes further lie the next 64 of M or N.
__device__ __forceinline__ uint64_t mn_major(uint32_t tile, uint32_t next) {
    return smem_descriptor(tile, SWIZZLE_128, next, ATOM_BYTES);
}
// endregion

// region: two tiles
// Brings one tile of each matrix to shared memory, by TMA.
__device__ __forceinline__ void load_two(uint32_t a_smem, uint32_t b_smem, uint32_t barrier, const CUtensorMap* a,
                                         const CUtensorMap* b) {
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, 2 * TILE_BYTES);
        tma_load(a_smem, a, barrier, 0, 0);
        tma_load(b_smem, b, barrier, 0, 0);
    }
    mbarrier_wait(barrier, 0);
}
// endregion

// region: a product
// D = A B, [64, 64]: A [64, 64] by rows, B as its transpose (rows of B^T) or as it is (rows of B).
//   d_gmem [128 threads, 32 registers]
template <bool B_AS_IT_IS>
__global__ void __launch_bounds__(WARPGROUP)
product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float* d_gmem) {
    __shared__ __align__(1024) T a_smem[TILE * TILE], b_smem[TILE * TILE];
    __shared__ __align__(8) uint64_t barrier_smem;
    load_two(smem_u32(a_smem), smem_u32(b_smem), smem_u32(&barrier_smem), &a, &b);
    const uint64_t a_tile = k_major(smem_u32(a_smem));
    const uint64_t b_tile = B_AS_IT_IS ? mn_major(smem_u32(b_smem), TILE_BYTES) : k_major(smem_u32(b_smem));
    constexpr int B_STEP = B_AS_IT_IS ? 2 * ATOM_BYTES : 32;   // bytes from 16 of K to the next 16
    float d[TILE / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        wgmma_ss<TILE, T, false, B_AS_IT_IS>(d, a_tile + k * 32 / 16, b_tile + k * B_STEP / 16, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) d_gmem[threadIdx.x * (TILE / 2) + i] = d[i];
}
// endregion

// region: P in registers
// out = (X Y^T) Z, two products of [64, 64]: the first one's D becomes the second one's A, without a byte of shared
// memory.   out_gmem [128 threads, 32 registers]
__global__ void __launch_bounds__(WARPGROUP)
d_to_a(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap y,
       const __grid_constant__ CUtensorMap z, float* out_gmem) {
    __shared__ __align__(1024) T x_smem[TILE * TILE], y_smem[TILE * TILE], z_smem[TILE * TILE];
    __shared__ __align__(8) uint64_t barriers_smem[2];
    if (threadIdx.x == 0) {
        mbarrier_init(smem_u32(&barriers_smem[1]), 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(smem_u32(&barriers_smem[1]), TILE_BYTES);
        tma_load(smem_u32(z_smem), &z, smem_u32(&barriers_smem[1]), 0, 0);
    }
    load_two(smem_u32(x_smem), smem_u32(y_smem), smem_u32(&barriers_smem[0]), &x, &y);
    mbarrier_wait(smem_u32(&barriers_smem[1]), 0);

    float s[TILE / 2], out[TILE / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        wgmma_ss<TILE, T>(s, k_major(smem_u32(x_smem)) + k * 2, k_major(smem_u32(y_smem)) + k * 2, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    // region: pack P
    uint32_t p[TILE / 4];                                      // two numbers each: 4 registers for 16 columns
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    wgmma_fence();                                             // p has been written by ordinary instructions
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        wgmma_rs<TILE, T, true>(out, p + 4 * k, mn_major(smem_u32(z_smem), TILE_BYTES) + k * 2 * ATOM_BYTES / 16,
                                k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    // endregion
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) out_gmem[threadIdx.x * (TILE / 2) + i] = out[i];
}
// endregion

// region: launch
constexpr CUtensorMapDataType TYPE =
    std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// region: a tensor map
// The map of a matrix [rows, columns] of 16-bit numbers, that is copied in boxes of box_rows x box_columns.
static CUtensorMap matrix_map(const void* matrix, int rows, int columns, int box_rows, int box_columns,
                              CUtensorMapSwizzle swizzle) {
    const uint64_t sizes[2] = {(uint64_t)columns, (uint64_t)rows}, strides[1] = {(uint64_t)columns * 2};  // inner first
    const uint32_t box[2] = {(uint32_t)box_columns, (uint32_t)box_rows};
    return tensor_map(matrix, TYPE, 2, sizes, strides, box, swizzle);
}
// endregion
static CUtensorMap tile_map(const void* matrix) {
    return matrix_map(matrix, TILE, TILE, TILE, TILE, CU_TENSOR_MAP_SWIZZLE_128B);
}

extern "C" int mbarrier(const int* script, int* seen, const T* source, int steps, int arrivals, void* stream) {
    look_mbarrier<<<1, 32, 0, (cudaStream_t)stream>>>(script, seen, source, steps, arrivals);
    return (int)cudaGetLastError();
}
extern "C" int tma(const uint16_t* matrix, uint16_t* out, int rows, int columns, int box_rows, int box_columns,
                   int swizzle, int column, int row, void* stream) {
    const CUtensorMap map = matrix_map(matrix, rows, columns, box_rows, box_columns, (CUtensorMapSwizzle)swizzle);
    const int bytes = box_rows * box_columns * 2;
    look_tma<<<1, WARPGROUP, bytes, (cudaStream_t)stream>>>(map, column, row, bytes, out);
    return (int)cudaGetLastError();
}
extern "C" int wgmma(const T* a, const T* b, float* d, int b_as_it_is, void* stream) {
    if (b_as_it_is)
        product<true><<<1, WARPGROUP, 0, (cudaStream_t)stream>>>(tile_map(a), tile_map(b), d);
    else
        product<false><<<1, WARPGROUP, 0, (cudaStream_t)stream>>>(tile_map(a), tile_map(b), d);
    return (int)cudaGetLastError();
}
extern "C" int reuse(const T* x, const T* y, const T* z, float* out, void* stream) {
    d_to_a<<<1, WARPGROUP, 0, (cudaStream_t)stream>>>(tile_map(x), tile_map(y), tile_map(z), out);
    return (int)cudaGetLastError();
}
// endregion
