// Exercise 11.3: a tile as wgmma reads it through a descriptor. The functions in "operands" are the learner's.

#include "tensor_map.cuh"
#include "wgmma.cuh"

using T = __half;

// region: operands
__device__ uint64_t k_columns(uint32_t tile, int k);
__device__ uint64_t v_rows(uint32_t tile, int k);
__device__ uint64_t narrow_columns(uint32_t tile, int k);
// endregion

// B of one wgmma after the other, multiplied by the identity: its 16 rows come out as the first 16 rows of D.
//   out [steps, 16, N]; descriptors [steps + 1]: as given, and at the end where the tile lies
constexpr int BEFORE = 4096, AROUND = 40960;                   // bytes of shared memory before the tile, and in all
template <int WHICH, int N, int STEPS, bool BY_ROWS>
__global__ void __launch_bounds__(128) look(const __grid_constant__ CUtensorMap map, int bytes, int slab_bytes,
                                            int slabs, float* out, int64_t* descriptors) {
    __shared__ __align__(1024) char memory[AROUND];
    __shared__ __align__(8) uint64_t barrier_smem;
    const uint32_t tile = smem_u32(memory + BEFORE), barrier = smem_u32(&barrier_smem);
    for (int i = threadIdx.x; i < AROUND / 2; i += 128) ((T*)memory)[i] = (T)-1.f;
    fence_proxy_async();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, bytes);
        for (int i = 0; i < slabs; i++) tma_load(tile + i * slab_bytes, &map, barrier, 64 * i, 0);
    }
    mbarrier_wait(barrier, 0);
    const int g = threadIdx.x / 4 % 8, t = threadIdx.x % 4;
    const uint32_t one = threadIdx.x < 32 ? pack<T>(g == 2 * t, g == 2 * t + 1) : 0;
    const uint32_t identity[4] = {one, 0, 0, one};
    for (int k = 0; k < STEPS; k++) {
        const uint64_t operand = WHICH == 0 ? k_columns(tile, k) : WHICH == 1 ? v_rows(tile, k) : narrow_columns(tile, k);
        float d[N / 2];
        wgmma_fence();
        wgmma_rs<N, T, BY_ROWS>(d, identity, operand, false);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x < 32)
            for (int i = 0; i < N / 2; i++) out[(k * 16 + g + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = d[i];
        if (threadIdx.x == 0) descriptors[k] = (int64_t)operand;
    }
    if (threadIdx.x == 0) descriptors[STEPS] = tile;
}
static CUtensorMap map_of(const T* matrix, int rows, int columns, int box_columns, CUtensorMapSwizzle swizzle) {
    const uint64_t sizes[2] = {(uint64_t)columns, (uint64_t)rows}, strides[1] = {(uint64_t)columns * 2};
    const uint32_t box[2] = {(uint32_t)box_columns, (uint32_t)rows};
    return tensor_map(matrix, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, sizes, strides, box, swizzle);
}
extern "C" int read_tile(const T* matrix, float* out, int64_t* descriptors, int which, void* stream) {
    const auto s = (cudaStream_t)stream;
    if (which == 0)
        look<0, 64, 4, false><<<1, 128, 0, s>>>(map_of(matrix, 64, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B), 8192, 8192, 1,
                                                out, descriptors);
    else if (which == 1)
        look<1, 192, 4, true><<<1, 128, 0, s>>>(map_of(matrix, 64, 192, 64, CU_TENSOR_MAP_SWIZZLE_128B), 24576, 8192, 3,
                                                out, descriptors);
    else
        look<2, 64, 2, false><<<1, 128, 0, s>>>(map_of(matrix, 64, 32, 32, CU_TENSOR_MAP_SWIZZLE_64B), 4096, 4096, 1,
                                                out, descriptors);
    return (int)cudaGetLastError();
}
