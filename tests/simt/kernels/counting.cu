// Kernels whose cost can be worked out by hand: tests/simt/test_counters.py.
#include "ptx.cuh"
#define ENTRY extern "C" void

// A 32x32 tile read along rows and written along columns. PAD 0: the 32 floats of a column lie in one bank.
template <int PAD> __global__ void transpose(const float* in, float* out, int n) {
    __shared__ float tile[32][32 + PAD];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * n + x];  // <- in
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8) out[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];  // <- out
}
ENTRY run_transpose(const float* in, float* out, int n, int pad) {
    if (pad) transpose<1><<<dim3(n / 32, n / 32), dim3(32, 8)>>>(in, out, n);
    else transpose<0><<<dim3(n / 32, n / 32), dim3(32, 8)>>>(in, out, n);
}
// ldmatrix.x4 of a 16 x 64 tile of halves (rows of 128 bytes), all of it
template <bool SWIZZLE> __global__ void fragments(const __half* in, uint32_t* out) {
    __shared__ __align__(128) __half tile[16 * 64];
    const int lane = threadIdx.x;
    for (int i = lane; i < 128; i += 32) {
        const int row = i / 8, chunk = i % 8, column = (SWIZZLE ? chunk ^ row % 8 : chunk) * 8;
        cp_async<16>(smem_u32(tile + row * 64 + column), in + i * 8);  // <- copies
    }
    cp_async_wait_all();
    __syncwarp();
    uint32_t sum = 0;
    for (int k = 0; k < 4; k++) {
        const int row = lane % 16, chunk = 2 * k + lane / 16;
        uint32_t r[4];
        ldmatrix_x4(r, smem_u32(tile + row * 64 + (SWIZZLE ? chunk ^ row % 8 : chunk) * 8));  // <- fragments
        sum += r[0] + r[1] + r[2] + r[3];
    }
    out[lane] = sum;
}
ENTRY run_fragments(const __half* in, uint32_t* out, int swizzle) {
    if (swizzle) fragments<true><<<1, 32>>>(in, out);
    else fragments<false><<<1, 32>>>(in, out);
}

// Loads and stores of some lanes, at a stride, of 1 to 16 bytes
template <class T> __global__ void strided(const T* in, T* out, int stride, int lanes) {
    if ((int)threadIdx.x < lanes) out[threadIdx.x] = in[threadIdx.x * stride];
}
ENTRY run_strided_float(const float* in, float* out, int stride, int lanes) { strided<<<1, 32>>>(in, out, stride, lanes); }
ENTRY run_strided_half(const __half* in, __half* out, int stride, int lanes) { strided<<<1, 32>>>(in, out, stride, lanes); }
ENTRY run_strided_float4(const void* in, void* out, int stride, int lanes) { strided<<<1, 32>>>((const float4*)in, (float4*)out, stride, lanes); }

// A loop that each lane leaves at another time: requests with fewer and fewer lanes
__global__ void ragged(const int* in, int* out) {
    int sum = 0;
    for (int i = 0; i <= (int)threadIdx.x; i++) sum += in[i];
    out[threadIdx.x] = sum;
}
ENTRY run_ragged(const int* in, int* out) { ragged<<<1, 32>>>(in, out); }

// Two kernels in one call, and a helper that is called from two lines
__device__ __forceinline__ float helper(const float* p, int i) { return p[i]; }  // <- helper
__global__ void first(const float* in, float* out) {
    out[threadIdx.x] = helper(in, threadIdx.x) + helper(in, 31 - threadIdx.x);
}
__global__ void second(float* out) {
    __syncthreads();
    out[threadIdx.x] *= 2;
    __syncthreads();
}
ENTRY run_two(const float* in, float* out) {
    first<<<3, 32>>>(in, out);
    second<<<1, 32>>>(out);
}
