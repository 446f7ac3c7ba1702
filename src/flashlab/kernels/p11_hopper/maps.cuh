// maps.cuh - phase 11, what its first step has built and no later one changes: copies of tiles, and tensor maps. In the
// form of the last step, which takes every HEAD_DIM.

// region: slabs
#ifndef SLAB                                                   // columns of a slab: 64, or 32 where those fit better
#define SLAB (HEAD_DIM == 80 || HEAD_DIM == 96 || HEAD_DIM == 160 ? 32 : 64)
#endif
constexpr int SLAB_ROW = SLAB * 2, LINE = 128 / SLAB_ROW;      // bytes of a row of it; rows of it in 128 bytes
// Columns of a tile in shared memory: whole slabs. What TMA fills with zeros behind HEAD_DIM, no product reads.
constexpr int COLUMNS = (HEAD_DIM + SLAB - 1) / SLAB * SLAB;
// endregion

// region: copy a tile
// Asks for a tile of ROWS rows, to be called by one thread. `bar` was told of its bytes.
template <int ROWS>
__device__ __forceinline__ void copy_tile(uint32_t tile_smem, const CUtensorMap& map, uint32_t bar, int row, int head,
                                          int batch) {
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += SLAB)
        tma_load(tile_smem + column / SLAB * ROWS * SLAB_ROW, &map, bar, column, row, head, batch);
}
// And tells it: `bar` expects the bytes of rows and columns that do not exist too; they become zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(uint32_t tile_smem, const CUtensorMap& map, uint32_t bar, int row, int head,
                                          int batch) {
    mbarrier_arrive_expect_tx(bar, ROWS * COLUMNS * 2);
    copy_tile<ROWS>(tile_smem, map, bar, row, head, batch);
}
// endregion

// region: tensor maps
// [batch, heads, rows, HEAD_DIM], as TMA counts: the innermost dimension first. A copy takes a box of one slab's
// columns and `box_rows` rows of one head, so rows beyond the head's last do not exist, whatever lies there in memory.
inline CUtensorMap map_of(const void* tensor, const Strides& stride, int batch, int heads, int rows, int box_rows) {
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const uint64_t dims[] = {HEAD_DIM, (uint64_t)rows, (uint64_t)heads, (uint64_t)batch};
    // In bytes. Of a dimension of size 1 it is no matter: it may be what TMA does not take.
    const auto bytes = [](int64_t elements, int size) { return (uint64_t)(size > 1 ? elements : HEAD_DIM) * 2; };
    const uint64_t strides[] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
    const uint32_t box[] = {SLAB, (uint32_t)box_rows, 1, 1};
    return tensor_map(tensor, type, 4, dims, strides, box,
                      SLAB == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}
// endregion
