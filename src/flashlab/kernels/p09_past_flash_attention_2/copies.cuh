// copies.cuh - phase 9, what its second step has built and no later one changes: the swizzle, and copies by a thread's
// own addresses. A step includes it behind its constants, which are used here.

// region: swizzle
// Element (row, column) of a tile of shared memory, in bytes from its start; column is a multiple of 8. Rows 8, 16 ...
// further are 8, 16 ... ROW_BYTES further; columns 16 k on of a row whose first column is below 16 are at
// (address ^ 32 k).
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }
// endregion

// region: copy a tile
// A thread copies the chunk at (chunk_row(), chunk_column()), and those ROWS_PER_PASS, 2 ROWS_PER_PASS ... rows
// below.
constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
static_assert(ROWS_PER_PASS % 8 == 0, "the swizzle of a thread's chunk is the same in every pass");
__device__ __forceinline__ int chunk_row() { return threadIdx.x / CHUNKS; }
__device__ __forceinline__ int chunk_column() { return threadIdx.x % CHUNKS * 8; }

// Copies a tile of ROWS rows, which exist; `to` and `from` are this thread's first chunk.
template <int ROWS> __device__ __forceinline__ void copy_tile(uint32_t to, const T* from, int64_t row_stride) {
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_PER_PASS, from += ROWS_PER_PASS * row_stride)
        cp_async<16>(to + i * ROW_BYTES, from);
}
// The same, of which only `rows` rows exist: the others become zeros. A copy of no bytes needs a valid address all the
// same.
template <int ROWS>
__device__ __forceinline__ void copy_part(uint32_t to, const T* from, int64_t row_stride, int rows) {
    const T* valid = from - chunk_row() * row_stride;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_PER_PASS, from += ROWS_PER_PASS * row_stride) {
        const bool exists = chunk_row() + i < rows;
        cp_async<16>(to + i * ROW_BYTES, exists ? from : valid, exists ? 16 : 0);
    }
}
// endregion
