// What does a matrix descriptor name? Shared memory is filled with bytes that the caller gives, and a wgmma with a unit
// matrix on the other side copies an operand to global memory as the hardware sees it. The emulator and a real GPU are
// asked the same (tests/simt/descriptor_probe.py), also for descriptors that make no sense.
#include "ptx.cuh"
#include "wgmma.cuh"

// A descriptor whose start is an offset into shared memory.
__device__ uint64_t placed(uint64_t descriptor, uint32_t base) {
    return (descriptor & ~0x3fffull) | ((descriptor + (base >> 4)) & 0x3fff);
}
template <class T>
__device__ T number(float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16(x);
    else return __float2half(x);
}
template <int N>
__device__ void dump(const float (&d)[N / 2], float* out) {  // out [64, N]
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < N / 2; i++) out[(row + i / 2 % 2 * 8) * N + column + i / 4 * 8 + i % 2] = d[i];
}

// One block a case. image [bytes / 2] goes to shared memory; out [cases, 64, N].
template <int N, class T, bool TRANS>
__global__ void __launch_bounds__(128) decode_b(const uint16_t* image, int bytes, const uint64_t* descriptors, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int i = threadIdx.x; i < bytes / 2; i += 128) ((uint16_t*)memory)[i] = image[i];
    fence_proxy_async();
    __syncthreads();
    // Row m of A is 1 at k = m % 16.
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    uint32_t a[4];
    for (int i = 0; i < 4; i++) {
        const int row = g + i % 2 * 8, column = t + i / 2 * 8;
        a[i] = pack<T>(row == column, row == column + 1);
    }
    float d[N / 2];
    wgmma_fence();
    wgmma_rs<N, T, TRANS>(d, a, placed(descriptors[blockIdx.x], smem_u32(memory)), false);
    wgmma_commit();
    wgmma_wait<0>();
    dump<N>(d, out + blockIdx.x * 64 * N);
}
template <class T, bool TRANS>
__global__ void __launch_bounds__(128) decode_a(const uint16_t* image, int bytes, const uint64_t* descriptors, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int i = threadIdx.x; i < bytes / 2; i += 128) ((uint16_t*)memory)[i] = image[i];
    // The unit matrix, K-major, without a swizzle: piece (n, half) at n * 16 + half * 256.
    T* unit = (T*)(memory + bytes);
    for (int i = threadIdx.x; i < 256; i += 128) unit[i] = number<T>(i / 128 * 8 + i % 8 == i % 128 / 8);
    fence_proxy_async();
    __syncthreads();
    float d[8];
    wgmma_fence();
    wgmma_ss<16, T, TRANS>(d, placed(descriptors[blockIdx.x], smem_u32(memory)),
                           smem_descriptor(smem_u32(unit), SWIZZLE_NONE, 256, 128), false);
    wgmma_commit();
    wgmma_wait<0>();
    dump<16>(d, out + blockIdx.x * 64 * 16);
}

template <class Kernel>
int allow(Kernel kernel, int bytes) {
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

#ifndef PROBE_N  // of decode_b
#define PROBE_N 64
#endif

#define DECODE(kernel, extra, ...)                                                             \
    if (int error = allow(kernel, bytes + extra)) return error;                                \
    kernel<<<cases, 128, bytes + extra>>>(image, bytes, descriptors, out);                     \
    return (int)cudaGetLastError();

// trans: the operand is MN-major. bf16: of the numbers.
extern "C" int run_decode_b(const uint16_t* image, int bytes, const uint64_t* descriptors, float* out, int cases,
                            int trans, int bf16) {
    if (trans && bf16) { DECODE((decode_b<PROBE_N, __nv_bfloat16, true>), 0) }
    if (trans) { DECODE((decode_b<PROBE_N, __half, true>), 0) }
    if (bf16) { DECODE((decode_b<PROBE_N, __nv_bfloat16, false>), 0) }
    DECODE((decode_b<PROBE_N, __half, false>), 0)
}
extern "C" int run_decode_a(const uint16_t* image, int bytes, const uint64_t* descriptors, float* out, int cases,
                            int trans, int bf16) {
    if (trans && bf16) { DECODE((decode_a<__nv_bfloat16, true>), 512) }
    if (trans) { DECODE((decode_a<__half, true>), 512) }
    if (bf16) { DECODE((decode_a<__nv_bfloat16, false>), 512) }
    DECODE((decode_a<__half, false>), 512)
}
