// The functions of wgmma.cuh for a host compiler: each calls the emulator where nvcc would see inline PTX.
// wgmma.cuh says what they do, and includes this file. The addresses of the accumulators and of the registers of A are
// what the emulator gets: it reads and writes them later, as the hardware does.
#pragma once
#include "wgmma_ops.h"

template <int PENDING>
SIMT_INLINE void wgmma_wait() {
    static_assert(PENDING >= 0 && PENDING <= 7, "wgmma_wait leaves 0 to 7 groups under way");
    simt_wgmma_wait(PENDING);
}

template <class T>
constexpr int SIMT_WGMMA_OPERANDS = std::is_same_v<T, __nv_bfloat16> ? SIMT_WGMMA_BF16 : 0;

template <int N, class T = __half, bool TRANS_A = false, bool TRANS_B = false>
SIMT_INLINE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool add = true) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8, up to 256");
    const SimtWgmmaIn in = {d, nullptr, a, b, add};
    simt_warp(SIMT_WGMMA, 0xffffffffu, &in, nullptr,
              N | SIMT_WGMMA_OPERANDS<T> | (TRANS_A ? SIMT_WGMMA_TRANS_A : 0) | (TRANS_B ? SIMT_WGMMA_TRANS_B : 0));
}
template <int N, class T = __half, bool TRANS_B = false>
SIMT_INLINE void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool add = true) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8, up to 256");
    const SimtWgmmaIn in = {d, a, 0, b, add};
    simt_warp(SIMT_WGMMA, 0xffffffffu, &in, nullptr,
              N | SIMT_WGMMA_OPERANDS<T> | SIMT_WGMMA_RS | (TRANS_B ? SIMT_WGMMA_TRANS_B : 0));
}
