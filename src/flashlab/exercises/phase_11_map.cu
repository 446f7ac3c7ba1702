// Exercise 11.9: boxes of a packed tensor, copied through the learner's tensor map, written out as the rows that a
// reader of the swizzled tile finds.

#include "p11_hopper/tiles.cuh"

constexpr int BOX_ROWS = 32;

// region: map
CUtensorMap map_of_k(const T* qkv, int batch, int seq, int heads);
// endregion

//   corners [blocks, 4]: column, row, head and batch of each box; out [blocks, BOX_ROWS, SLAB]
__global__ void __launch_bounds__(128)
look(const __grid_constant__ CUtensorMap map, const int* corners, uint16_t* out) {
    extern __shared__ __align__(1024) char tile_smem[];
    __shared__ __align__(8) uint64_t barrier_smem;
    const uint32_t barrier = smem_u32(&barrier_smem);
    for (int i = threadIdx.x; i < BOX_ROWS * SLAB; i += 128) ((uint16_t*)tile_smem)[i] = 0xffff;       // nobody's
    fence_proxy_async();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int* corner = corners + 4 * blockIdx.x;
    // region: load
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, BOX_ROWS * SLAB * 2);
        tma_load(smem_u32(tile_smem), &map, barrier, corner[0], corner[1], corner[2], corner[3]);
    }
    // endregion
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < BOX_ROWS * SLAB; i += 128) {
        const int row = i / SLAB, column = i % SLAB;
        out[blockIdx.x * BOX_ROWS * SLAB + i] =
            ((const uint16_t*)tile_smem)[row * SLAB + ((column / 8 ^ row % 8) * 8 | column % 8)];
    }
}

extern "C" int boxes(const T* qkv, const int* corners, uint16_t* out, int batch, int seq, int heads, int blocks,
                     void* stream) {
    const CUtensorMap map = map_of_k(qkv, batch, seq, heads);
    look<<<blocks, 128, BOX_ROWS * SLAB * 2, (cudaStream_t)stream>>>(map, corners, out);
    return (int)cudaGetLastError();
}
