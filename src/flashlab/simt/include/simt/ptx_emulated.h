// The functions of ptx.cuh for a host compiler: each calls the emulator where nvcc would see inline PTX.
// ptx.cuh says what they do; it includes this file, and declares smem_u32 and pack before it.
#pragma once
#include "ptx_ops.h"
#include <type_traits>

// ---- ldmatrix, stmatrix -------------------------------------------------------------------------
#define SIMT_MATRICES(n) \
    SIMT_INLINE void ldmatrix_x##n(uint32_t (&r)[n], uint32_t address) { \
        simt_warp(SIMT_LDMATRIX, 0xffffffffu, &address, r, n); \
    } \
    SIMT_INLINE void ldmatrix_x##n##_trans(uint32_t (&r)[n], uint32_t address) { \
        simt_warp(SIMT_LDMATRIX, 0xffffffffu, &address, r, n | SIMT_MATRIX_TRANS); \
    } \
    SIMT_INLINE void stmatrix_x##n(uint32_t address, const uint32_t (&r)[n]) { simt_stmatrix(address, r, n, 0); } \
    SIMT_INLINE void stmatrix_x##n##_trans(uint32_t address, const uint32_t (&r)[n]) { \
        simt_stmatrix(address, r, n, SIMT_MATRIX_TRANS); \
    }
SIMT_MATRICES(1)
SIMT_MATRICES(2)
SIMT_MATRICES(4)
#undef SIMT_MATRICES

// ---- mma ----------------------------------------------------------------------------------------
template <class T>
constexpr int SIMT_MMA_OPERANDS = std::is_same_v<T, __nv_bfloat16> ? SIMT_MMA_BF16 : SIMT_MMA_F16;

template <int VARIANT, class C>
SIMT_INLINE void simt_multiply(C& c, SimtMmaIn in) {
    uint32_t d[4];
    memcpy(in.c, c, sizeof c);
    simt_warp(SIMT_MMA, 0xffffffffu, &in, d, VARIANT);
    memcpy(c, d, sizeof c);
}
template <class T = __half>
SIMT_INLINE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    simt_multiply<SIMT_M16N8K16 | SIMT_MMA_ACC_F32 | SIMT_MMA_OPERANDS<T>>(c, {{a[0], a[1], a[2], a[3]}, {b0, b1}, {}});
}
template <class T = __half>
SIMT_INLINE void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b0) {
    simt_multiply<SIMT_M16N8K8 | SIMT_MMA_ACC_F32 | SIMT_MMA_OPERANDS<T>>(c, {{a[0], a[1]}, {b0}, {}});
}
SIMT_INLINE void mma_m16n8k16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    simt_multiply<SIMT_M16N8K16 | SIMT_MMA_ACC_F16 | SIMT_MMA_F16>(c, {{a[0], a[1], a[2], a[3]}, {b0, b1}, {}});
}
SIMT_INLINE void mma_m16n8k8_f16(uint32_t (&c)[2], const uint32_t (&a)[2], uint32_t b0) {
    simt_multiply<SIMT_M16N8K8 | SIMT_MMA_ACC_F16 | SIMT_MMA_F16>(c, {{a[0], a[1]}, {b0}, {}});
}

// ---- cp.async -----------------------------------------------------------------------------------
template <int BYTES = 16>
SIMT_INLINE void cp_async(uint32_t dst, const void* src, int src_bytes = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    simt_cp_async(dst, src, BYTES, src_bytes);
}
template <int N>
SIMT_INLINE void cp_async_wait() {
    simt_cp_async_wait(N);
}
SIMT_INLINE void cp_async_wait_all() { simt_cp_async_wait(-1); }

// ---- barriers by number -------------------------------------------------------------------------
SIMT_INLINE void named_barrier_sync(int id, int threads) { simt_named_barrier(id, threads, 1); }
SIMT_INLINE void named_barrier_arrive(int id, int threads) { simt_named_barrier(id, threads, 0); }

// ---- one-instruction maths ----------------------------------------------------------------------
SIMT_INLINE float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.f : y;
}
SIMT_INLINE float rcp_approx(float x) { return 1.f / x; }
