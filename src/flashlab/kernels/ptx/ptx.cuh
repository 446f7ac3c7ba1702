// ptx.cuh - the tensor-core and copy instructions as functions: each is one line of inline PTX.
//
// That is what nvcc compiles. g++ gets the same functions from simt/ptx_emulated.h, which hands them to the
// emulator; this file is the border between the two.
//
// Registers are uint32_t and hold two 16-bit numbers, the one with the lower index in the lower half. T is __half or
// __nv_bfloat16. Shared-memory operands are 32-bit addresses: smem_u32(pointer). Names and operand order follow the PTX
// ISA, "Warp-level matrix instructions" and "Asynchronous copy".
#pragma once
#include "simt/names.h"
#include "simt.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

// ---- addresses and numbers ------------------------------------------------------------------------------------------
// The 32-bit address of a byte of shared memory.
__device__ __forceinline__ uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// region: pack
// Two floats, rounded, in one register.
template <class T = __half>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t u;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
        memcpy(&u, &h, 4);
    } else {
        __half2 h = __floats2half2_rn(low, high);
        memcpy(&u, &h, 4);
    }
    return u;
}
// endregion
template <class T = __half>
__device__ __forceinline__ float2 unpack(uint32_t u) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        __nv_bfloat162 h;
        memcpy(&h, &u, 4);
        return __bfloat1622float2(h);
    } else {
        __half2 h;
        memcpy(&h, &u, 4);
        return __half22float2(h);
    }
}

#ifndef __CUDACC__
#include "simt/ptx_emulated.h"
#else

// ---- ldmatrix: 8x8 tiles of 16-bit numbers, shared memory -> registers ----------------------------------------------
// region: ldmatrix
// Lane 8 i + r gives the address of row r of tile i (16 bytes, 16-byte aligned). Register i of lane l receives elements
// (row l / 4, columns 2 (l % 4) and + 1) of tile i; with _trans, of the transposed tile. x1 uses the addresses of lanes
// 0-7, x2 of 0-15, x4 of all.
__device__ __forceinline__ void ldmatrix_x1(uint32_t (&r)[1], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
// region: ldmatrix x4
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// endregion
__device__ __forceinline__ void ldmatrix_x1_trans(uint32_t (&r)[1], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// endregion

// ---- stmatrix: the way back, sm_90 and later ------------------------------------------------------------------------
__device__ __forceinline__ void stmatrix_x1(uint32_t address, const uint32_t (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(address), "r"(r[0]) : "memory");
}
__device__ __forceinline__ void stmatrix_x2(uint32_t address, const uint32_t (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stmatrix_x1_trans(uint32_t address, const uint32_t (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" :: "r"(address), "r"(r[0]) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, const uint32_t (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// ---- mma: C += A B on the tensor cores, A row-major, B column-major -------------------------------------------------
// region: mma m16n8k16
// With g = lane / 4 and t = lane % 4 (the PTX ISA's groupID and threadID_in_group), m16n8k16 holds
//   A  a[0]: row g,     columns 2t, 2t+1        a[1]: row g + 8, the same columns
//      a[2]: row g,     columns 2t+8, 2t+9      a[3]: row g + 8, the same columns
//   B  b0: rows 2t, 2t+1, column g              b1: rows 2t+8, 2t+9, column g
//   C  c[0], c[1]: row g, columns 2t, 2t+1      c[2], c[3]: row g + 8, the same columns
// and m16n8k8 holds a[0], a[1] and b0 of these.
template <class T = __half>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// endregion
// region: mma m16n8k8
template <class T = __half>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b0) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
}
// endregion
// region: mma fp16 sums
// fp16 accumulators: c[0] holds row g, columns 2t and 2t+1; c[1] the same of row g + 8.
__device__ __forceinline__ void mma_m16n8k16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(c[0]), "+r"(c[1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// endregion
__device__ __forceinline__ void mma_m16n8k8_f16(uint32_t (&c)[2], const uint32_t (&a)[2], uint32_t b0) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
                 : "+r"(c[0]), "+r"(c[1]) : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// ---- cp.async: global -> shared memory, past the registers ----------------------------------------------------------
// BYTES is 4, 8 or 16; both addresses are aligned to it. 16 bytes bypass L1 (.cg). With src_bytes, the bytes from there
// on become zeros. A copy may be read after cp_async_wait of its group, and by other threads after a barrier that
// follows the wait. `src` points to global memory, so its generic address is the global one: asking for the conversion
// costs instructions.
template <int BYTES = 16>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst), "l"(src) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(dst), "l"(src), "n"(BYTES) : "memory");
}
template <int BYTES = 16>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src, int src_bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(dst), "l"(src), "r"(src_bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(dst), "l"(src), "n"(BYTES), "r"(src_bytes) : "memory");
}
// Closes the group of the copies issued since the last commit; a group may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups, the latest, are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
// Commits, and waits for every copy.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- barriers by number: for warps that do different work -----------------------------------------------------------
// `threads` (a multiple of 32) is how many sync or arrive in all; ids 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ---- one-instruction maths ------------------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_approx(float x) {        // 2^x; -inf gives 0; subnormal results flush to 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp_approx(float x) {         // 1 / x
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
#include "simt/names_end.h"
