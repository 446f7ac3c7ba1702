// Phase 7: what a lane holds. Three small kernels of one warp, for looking at.
//
// Tiles are 16-bit patterns here: nothing is computed with them, so any uint16_t will do, an index for example.

// region: constants
#include "ptx.cuh"

#ifndef ELEMENT
#define ELEMENT __half
#endif
using T = ELEMENT;
constexpr int WARP_SIZE = 32;
// endregion

// region: ldmatrix
// ldmatrix, `count` 8x8 tiles (1, 2, 4), of a tile that lies in shared memory as it does in global memory.
//   tile_gmem [rows, columns], rows and columns multiples of 8; out_gmem [32 lanes, count registers, 2 halves]
// Lane l gives the address of row first_row[l], at column first_column[l].
__global__ void __launch_bounds__(WARP_SIZE)
look_ldmatrix(const uint16_t* tile_gmem, const int* first_row, const int* first_column, uint16_t* out_gmem,
              int rows, int columns, int count, int trans) {
    extern __shared__ __align__(16) uint16_t tile_smem[];              // [rows, columns]
    const int lane = threadIdx.x;
    for (int i = lane; i < rows * columns; i += WARP_SIZE) tile_smem[i] = tile_gmem[i];
    __syncwarp();                                                      // or a lane would read what another has to copy
    const uint32_t address = smem_u32(tile_smem + first_row[lane] * columns + first_column[lane]);
    uint32_t r1[1], r2[2], r4[4];
    if (count == 1) trans ? ldmatrix_x1_trans(r1, address) : ldmatrix_x1(r1, address);
    if (count == 2) trans ? ldmatrix_x2_trans(r2, address) : ldmatrix_x2(r2, address);
    if (count == 4) trans ? ldmatrix_x4_trans(r4, address) : ldmatrix_x4(r4, address);
    for (int i = 0; i < count; i++) {
        const uint32_t r = count == 1 ? r1[0] : count == 2 ? r2[i] : r4[i];
        out_gmem[(lane * count + i) * 2] = (uint16_t)r;                // the lower half
        out_gmem[(lane * count + i) * 2 + 1] = (uint16_t)(r >> 16);    // the upper half
    }
}
// endregion

// region: one MMA
// One MMA, m16n8k16: the fragments go in as they are, and C comes out as it is.
//   a_gmem [32 lanes, 4 registers, 2 halves], b_gmem [32, 2, 2], c_gmem [32, 4]: C in, A B + C out
__global__ void __launch_bounds__(WARP_SIZE) one_mma(const T* a_gmem, const T* b_gmem, float* c_gmem) {
    const int lane = threadIdx.x;
    uint32_t a[4], b[2];
    float c[4];
    for (int i = 0; i < 4; i++) a[i] = ((const uint32_t*)a_gmem)[lane * 4 + i];
    for (int i = 0; i < 2; i++) b[i] = ((const uint32_t*)b_gmem)[lane * 2 + i];
    for (int i = 0; i < 4; i++) c[i] = c_gmem[lane * 4 + i];
    mma_m16n8k16<T>(c, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) c_gmem[lane * 4 + i] = c[i];
}
// endregion

// region: C becomes A
// C becomes A: out = (x y^T) z, two products, and no lane hands anything to another in between.
//   x_gmem [16, 16], y_gmem [16, 16] (rows are the columns of y^T), z_gmem [16, 8], out_gmem [16, 8]
__global__ void __launch_bounds__(WARP_SIZE)
c_to_a(const T* x_gmem, const T* y_gmem, const T* z_gmem, float* out_gmem) {
    __shared__ __align__(16) T x_smem[16 * 16], y_smem[16 * 16], z_smem[16 * 8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += WARP_SIZE) x_smem[i] = x_gmem[i], y_smem[i] = y_gmem[i];
    for (int i = lane; i < 128; i += WARP_SIZE) z_smem[i] = z_gmem[i];
    __syncwarp();                                                      // or a lane would read what another has to copy

    // region: two products
    uint32_t x[4], y[4], z[2];
    ldmatrix_x4(x, smem_u32(x_smem + lane % 16 * 16 + lane / 16 * 8));                         // A
    ldmatrix_x4(y, smem_u32(y_smem + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8));     // B, of 8 columns, twice
    ldmatrix_x2_trans(z, smem_u32(z_smem + lane % 16 * 8));                                    // B
    float s[2][4] = {};                                                // S = x y^T: columns 0-7, columns 8-15
    mma_m16n8k16<T>(s[0], x, y[0], y[1]);
    mma_m16n8k16<T>(s[1], x, y[2], y[3]);
    // c0 c1 | c2 c3 of the two tiles lie where a0 .. a3 of S as a 16 x 16 operand are wanted.
    const uint32_t a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]),
                           pack<T>(s[1][0], s[1][1]), pack<T>(s[1][2], s[1][3])};
    float c[4] = {};
    mma_m16n8k16<T>(c, a, z[0], z[1]);
    // endregion
    for (int i = 0; i < 4; i++) out_gmem[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}
// endregion

// region: launch
extern "C" int ldmatrix(const uint16_t* tile, const int* first_row, const int* first_column, uint16_t* out,
                        int rows, int columns, int count, int trans, void* stream) {
    const int bytes = rows * columns * 2;
    look_ldmatrix<<<1, WARP_SIZE, bytes, (cudaStream_t)stream>>>(tile, first_row, first_column, out, rows, columns,
                                                                count, trans);
    return (int)cudaGetLastError();
}
extern "C" int mma(const T* a, const T* b, float* c, void* stream) {
    one_mma<<<1, WARP_SIZE, 0, (cudaStream_t)stream>>>(a, b, c);
    return (int)cudaGetLastError();
}
extern "C" int reuse(const T* x, const T* y, const T* z, float* out, void* stream) {
    c_to_a<<<1, WARP_SIZE, 0, (cudaStream_t)stream>>>(x, y, z, out);
    return (int)cudaGetLastError();
}
// endregion
