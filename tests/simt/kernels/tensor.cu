// ldmatrix, stmatrix and mma: who holds what, and what comes out.
#include "ptx.cuh"

#define ENTRY extern "C" void

// ---- ldmatrix: each lane's registers ------------------------------------------------------------
#define OF_COUNT(op, ...) \
    if constexpr (COUNT == 1 && !TRANS) op##_x1(__VA_ARGS__); \
    if constexpr (COUNT == 2 && !TRANS) op##_x2(__VA_ARGS__); \
    if constexpr (COUNT == 4 && !TRANS) op##_x4(__VA_ARGS__); \
    if constexpr (COUNT == 1 && TRANS) op##_x1_trans(__VA_ARGS__); \
    if constexpr (COUNT == 2 && TRANS) op##_x2_trans(__VA_ARGS__); \
    if constexpr (COUNT == 4 && TRANS) op##_x4_trans(__VA_ARGS__);
template <int COUNT, bool TRANS>
__global__ void load(const __half* in, uint32_t* out) {  // in [COUNT, 8, 8], out [32, COUNT]
    __shared__ __align__(16) __half tile[COUNT * 64];
    for (int i = threadIdx.x; i < COUNT * 64; i += 32) tile[i] = in[i];
    __syncwarp();
    const uint32_t row = smem_u32(tile + threadIdx.x % (8 * COUNT) * 8);
    uint32_t r[COUNT];
    OF_COUNT(ldmatrix, r, row)
    for (int i = 0; i < COUNT; i++) out[threadIdx.x * COUNT + i] = r[i];
}
template <int COUNT, bool TRANS>
__global__ void store(const uint32_t* in, __half* out) {  // in [32, COUNT], out [COUNT, 8, 8]
    __shared__ __align__(16) __half tile[COUNT * 64];
    const uint32_t row = smem_u32(tile + threadIdx.x % (8 * COUNT) * 8);
    uint32_t r[COUNT];
    for (int i = 0; i < COUNT; i++) r[i] = in[threadIdx.x * COUNT + i];
    OF_COUNT(stmatrix, row, r)
    __syncwarp();
    for (int i = threadIdx.x; i < COUNT * 64; i += 32) out[i] = tile[i];
}
#define CASE(kernel, n, t) \
    if (count == n && trans == t) kernel<n, t><<<1, 32>>>(in, out);
#define CASES(kernel) \
    CASE(kernel, 1, 0) CASE(kernel, 2, 0) CASE(kernel, 4, 0) CASE(kernel, 1, 1) CASE(kernel, 2, 1) CASE(kernel, 4, 1)
ENTRY run_load(const __half* in, uint32_t* out, int count, int trans) { CASES(load) }
ENTRY run_store(const uint32_t* in, __half* out, int count, int trans) { CASES(store) }

// ---- mma on plain row-major arrays: A [16, K], B [K, 8], C and D [16, 8] ------------------------
__device__ __forceinline__ uint32_t two(const uint16_t* low, const uint16_t* high) {
    return *low | (uint32_t)*high << 16;
}
template <class T, int K, class ACC>  // ACC: float, or uint16_t: halves, two in a register
__global__ void multiply(const uint16_t* a, const uint16_t* b, const ACC* c, ACC* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
    uint32_t fa[K / 4], fb[K / 8];
    for (int i = 0; i < K / 4; i++) fa[i] = *(const uint32_t*)(a + (g + i % 2 * 8) * K + t + i / 2 * 8);
    for (int i = 0; i < K / 8; i++) fb[i] = two(b + (t + i * 8) * 8 + g, b + (t + i * 8 + 1) * 8 + g);
    union {
        ACC one[4];
        uint32_t pairs[2];
    } acc;
    for (int i = 0; i < 4; i++) acc.one[i] = c[(g + i / 2 * 8) * 8 + t + i % 2];
    if constexpr (sizeof(ACC) == 2 && K == 16) mma_m16n8k16_f16(acc.pairs, fa, fb[0], fb[1]);
    else if constexpr (sizeof(ACC) == 2) mma_m16n8k8_f16(acc.pairs, fa, fb[0]);
    else if constexpr (K == 16) mma_m16n8k16<T>(acc.one, fa, fb[0], fb[1]);
    else mma_m16n8k8<T>(acc.one, fa, fb[0]);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + t + i % 2] = acc.one[i];
}
ENTRY run_mma(const uint16_t* a, const uint16_t* b, const float* c, float* d, int k, int bf16) {
    if (k == 16 && !bf16) multiply<__half, 16><<<1, 32>>>(a, b, c, d);
    if (k == 16 && bf16) multiply<__nv_bfloat16, 16><<<1, 32>>>(a, b, c, d);
    if (k == 8 && !bf16) multiply<__half, 8><<<1, 32>>>(a, b, c, d);
    if (k == 8 && bf16) multiply<__nv_bfloat16, 8><<<1, 32>>>(a, b, c, d);
}
ENTRY run_mma_f16(const uint16_t* a, const uint16_t* b, const uint16_t* c, uint16_t* d, int k) {
    if (k == 16) multiply<__half, 16><<<1, 32>>>(a, b, c, d);
    if (k == 8) multiply<__half, 8><<<1, 32>>>(a, b, c, d);
}

// ---- cp.async: sizes, zero fill, groups ---------------------------------------------------------
template <int BYTES>
__global__ void copies(const unsigned char* in, unsigned char* out, int source_bytes) {
    __shared__ __align__(16) unsigned char tile[32 * BYTES];
    cp_async<BYTES>(smem_u32(tile + threadIdx.x * BYTES), in + threadIdx.x * BYTES, source_bytes);
    cp_async_wait_all();
    for (int i = 0; i < BYTES; i++) out[threadIdx.x * BYTES + i] = tile[threadIdx.x * BYTES + i];
}
ENTRY run_copies(const unsigned char* in, unsigned char* out, int bytes, int source_bytes) {
    if (bytes == 4) copies<4><<<1, 32>>>(in, out, source_bytes);
    if (bytes == 8) copies<8><<<1, 32>>>(in, out, source_bytes);
    if (bytes == 16) copies<16><<<1, 32>>>(in, out, source_bytes);
}
// Four groups, and what has landed after waiting for all but `LEFT` of them: out [4, 32]; NaN is "not yet".
template <int LEFT>
__global__ void groups(const float* in, float* out) {
    __shared__ __align__(16) float tile[4][32];
    for (int g = 0; g < 4; g++) {
        if (g != 2)
            cp_async<4>(smem_u32(&tile[g][threadIdx.x]),
                        in + g * 32 + threadIdx.x);  // the third group is empty
        cp_async_commit();
    }
    cp_async_wait<LEFT>();
    for (int g = 0; g < 4; g++) out[g * 32 + threadIdx.x] = tile[g][threadIdx.x];
    cp_async_wait_all();
}
ENTRY run_groups(const float* in, float* out, int left) {
    if (left == 0) groups<0><<<1, 32>>>(in, out);
    if (left == 1) groups<1><<<1, 32>>>(in, out);
    if (left == 2) groups<2><<<1, 32>>>(in, out);
    if (left == 3) groups<3><<<1, 32>>>(in, out);
    if (left == 4) groups<4><<<1, 32>>>(in, out);
}

// ---- one-instruction maths and packing ----------------------------------------------------------
__global__ void small(float* out) {
    out[0] = exp2_approx(3.f), out[1] = exp2_approx(-INFINITY), out[2] = exp2_approx(-140.f),
    out[3] = rcp_approx(4.f);
    const float2 h = unpack(pack(1.5f, -2.f)), b = unpack<__nv_bfloat16>(pack<__nv_bfloat16>(0.25f, 3.f));
    out[4] = h.x, out[5] = h.y, out[6] = b.x, out[7] = b.y;
}
ENTRY run_small(float* out) { small<<<1, 1>>>(out); }
