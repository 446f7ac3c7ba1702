// wgmma.cuh - the matrix product of Hopper (sm_90a): D += A B by the four warps of a warpgroup, which go on meanwhile.
//
// That is what nvcc compiles. g++ gets the same functions from simt/wgmma_emulated.h.
//
// A is 64 x 16, B 16 x N, D 64 x N, for every N that is a multiple of 8 up to 256; T is __half or __nv_bfloat16, the sums
// are float. B lies in shared memory, A there (wgmma_ss) or in registers (wgmma_rs). A warpgroup is four warps whose first
// has a number that is a multiple of 4; all of its threads execute each function of this file. Names and operand order
// follow the PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once
#include "simt/names.h"
#include "ptx_sm90.cuh"

// ---- where a tile lies: the matrix descriptor -----------------------------------------------------------------------
// region: descriptor
// Shared memory is read in pieces of 16 bytes, of 8 numbers each. A matrix is K-major where the numbers of a piece follow
// each other along K, as in the rows of A; else (TRANS_A, TRANS_B) along M or N. With W the pieces of a row of the swizzle
// (128, 64 or 32 bytes are W = 8, 4, 2), piece by piece the address is `address` plus
//
//   K-major,  no swizzle   row % 8 * 16     + row / 8 * stride_bytes + (k / 8) * leading_bytes
//   K-major,  swizzled     row % 8 * W * 16 + row / 8 * stride_bytes + (k / 8) * 16       (leading_bytes is not used)
//   else,     no swizzle   k % 8 * 16       + k / 8 * leading_bytes  + (row / 8) * stride_bytes
//   else,     swizzled     k % 8 * W * 16   + k / 8 * stride_bytes   + (row / 8) % W * 16 + (row / 8) / W * leading_bytes
//
// for row of M or N, and k. Then the swizzle exchanges pieces: bits 4, 5, 6 of the address (W = 4: 4, 5; W = 2: 4) are
// XORed with bits 7, 8, 9. So the pattern begins where the address is a multiple of 128 * W bytes; where it begins
// elsewhere, base_offset says at which of 8 lines of 128 bytes.
//
// The next 16 columns of a K-major tile: add 32 bytes to the address, or 2 to the descriptor, which counts in 16 bytes.
enum Swizzle { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, Swizzle swizzle, uint32_t leading_bytes,
                                                    uint32_t stride_bytes, uint32_t base_offset = 0) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)((leading_bytes & 0x3ffff) >> 4) << 16 |
           (uint64_t)((stride_bytes & 0x3ffff) >> 4) << 32 | (uint64_t)(base_offset & 7) << 49 | (uint64_t)swizzle << 62;
}
// endregion

#ifndef __CUDACC__
#include "simt/wgmma_emulated.h"
#else
#include "wgmma_shapes.h"

// ---- order ----------------------------------------------------------------------------------------------------------
// region: wgmma order
// Registers that the threads have written (accumulators, A) may be used by the wgmma that follow. Needed before the first
// one, and whenever these registers have been touched in between.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of the wgmma issued since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups, the latest, are still under way. Until then nobody touches their accumulators, their
// registers of A and what they read in shared memory.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    static_assert(PENDING >= 0 && PENDING <= 7, "wgmma_wait leaves 0 to 7 groups under way");
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// endregion

// ---- the product ----------------------------------------------------------------------------------------------------
// region: wgmma
// With w the warp of the warpgroup, g = lane / 4 and t = lane % 4, a thread holds of D
//   d[4 j], d[4 j + 1]       row 16 w + g,     columns 8 j + 2 t, + 1
//   d[4 j + 2], d[4 j + 3]   row 16 w + g + 8, the same columns
// and of A the registers a[0] to a[3] of mma.m16n8k16 (ptx.cuh), in the 16 rows of its warp: they are kept until the wait.
// add = false: D = A B.
template <int N, class T = __half, bool TRANS_A = false, bool TRANS_B = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool add = true) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8, up to 256");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) WgmmaShape<N>::template ss_bf16<TRANS_A, TRANS_B>(d, a, b, add);
    else WgmmaShape<N>::template ss_f16<TRANS_A, TRANS_B>(d, a, b, add);
}
template <int N, class T = __half, bool TRANS_B = false>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool add = true) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8, up to 256");
    if constexpr (std::is_same_v<T, __nv_bfloat16>) WgmmaShape<N>::template rs_bf16<TRANS_B>(d, a, b, add);
    else WgmmaShape<N>::template rs_f16<TRANS_B>(d, a, b, add);
}
// endregion

#endif
#include "simt/names_end.h"
