// tiles.cuh - phase 11, what its first four steps have built and no later one changes: tiles as TMA brings them and
// wgmma reads them. HEAD_DIM and T are problem.cuh's.
#pragma once
#include "simt/names.h"
#include "problem.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "p11_hopper/maps.cuh"

// region: operands
// A tile of ROWS rows lies in slabs [ROWS, 64], side by side in shared memory: 128 bytes are as wide as TMA swizzles.
// Within a slab it is phase 8's XOR: the copy engine has the writer's half of it, the tensor cores the reader's.
// (Slabs of 32 columns have two rows in 128 bytes, and an XOR of four.)
//
// How wgmma finds a tile in shared memory: a descriptor, 64 bits. Rows of 128 bytes, swizzled as TMA does it; 8
// rows further are 1024 bytes further. (The leading offset is of no use in this layout.)
constexpr Swizzle SWIZZLE = SLAB == 64 ? SWIZZLE_128 : SWIZZLE_64;
__device__ __forceinline__ uint64_t descriptor(uint32_t tile_smem) {
    return smem_descriptor(tile_smem, SWIZZLE, 16, 8 * SLAB_ROW);
}
// What is added to it for MMA_K columns further, k times. Addresses in a descriptor count 16 bytes.
template <int ROWS> __device__ __forceinline__ constexpr uint64_t columns_on(int k) {
    const int column = k * MMA_K;
    return (column / SLAB * ROWS * SLAB_ROW + column % SLAB * 2) / 16;
}
// A tile whose rows are the products' inner dimension, 16 rows at a time. Its columns run over all slabs: the
// leading offset leads from one to the next. MMA_K rows further, k times, is 2048 k bytes further.
template <int ROWS> __device__ __forceinline__ uint64_t descriptor_of_rows(uint32_t tile_smem) {
    return smem_descriptor(tile_smem, SWIZZLE, ROWS * SLAB_ROW, 8 * SLAB_ROW);
}
__device__ __forceinline__ constexpr uint64_t rows_on(int k) { return k * MMA_K * SLAB_ROW / 16; }
// endregion

// region: heads together
// As many heads as have two tensors of so many rows in half of a 50 MB L2: step 8's, for the steps from 11 on.
inline int fit_together(int rows, int heads) {
    return (int)min((int64_t)heads, max((int64_t)1, 24000000 / ((int64_t)rows * HEAD_DIM * 4 + 1)));
}
// endregion
#include "simt/names_end.h"
