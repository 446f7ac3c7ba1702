// ptx.cuh - the tensor-core and copy instructions as functions: inline PTX under nvcc, the emulator under g++
// and clang++.
//
// Registers are uint32_t and hold two 16-bit numbers, the one with the lower index in the lower half. T is
// __half or __nv_bfloat16. Shared-memory operands are 32-bit addresses: smem_u32(pointer).
// Names and operand order follow the PTX ISA, "Warp-level matrix instructions" and "Asynchronous copy".
#pragma once
#include "simt.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// ---- addresses ----------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- ldmatrix: 8x8 tiles of 16-bit numbers, shared memory -> registers --------------------------
// Lane 8 i + r gives the address of row r of tile i (16 bytes, 16-byte aligned). Register i of lane l
// receives elements (row l / 4, columns 2 (l % 4) and + 1) of tile i; with _trans, of the transposed tile. x1
// uses the addresses of lanes 0-7, x2 of 0-15, x4 of all.
#ifdef __CUDACC__
#define PTX_LDMATRIX(name, modifier, N, registers, operands, ...)                                          \
    __device__ __forceinline__ void name(uint32_t(&r)[N], uint32_t address) {                              \
        asm volatile("ldmatrix.sync.aligned.m8n8." modifier ".shared.b16 {" registers "}, [" operands "];" \
                     : __VA_ARGS__                                                                         \
                     : "r"(address)                                                                        \
                     : "memory");                                                                          \
    }
#define PTX_OUT1 "=r"(r[0])
#define PTX_OUT2 "=r"(r[0]), "=r"(r[1])
#define PTX_OUT4 "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
PTX_LDMATRIX(ldmatrix_x1, "x1", 1, "%0", "%1", PTX_OUT1)
PTX_LDMATRIX(ldmatrix_x2, "x2", 2, "%0, %1", "%2", PTX_OUT2)
PTX_LDMATRIX(ldmatrix_x4, "x4", 4, "%0, %1, %2, %3", "%4", PTX_OUT4)
PTX_LDMATRIX(ldmatrix_x1_trans, "x1.trans", 1, "%0", "%1", PTX_OUT1)
PTX_LDMATRIX(ldmatrix_x2_trans, "x2.trans", 2, "%0, %1", "%2", PTX_OUT2)
PTX_LDMATRIX(ldmatrix_x4_trans, "x4.trans", 4, "%0, %1, %2, %3", "%4", PTX_OUT4)
#else
__device__ __forceinline__ void ldmatrix_x1(uint32_t (&r)[1], uint32_t address) {
    simt_ldmatrix(r, address, 1, 0);
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) {
    simt_ldmatrix(r, address, 2, 0);
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    simt_ldmatrix(r, address, 4, 0);
}
__device__ __forceinline__ void ldmatrix_x1_trans(uint32_t (&r)[1], uint32_t address) {
    simt_ldmatrix(r, address, 1, SIMT_MATRIX_TRANS);
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
    simt_ldmatrix(r, address, 2, SIMT_MATRIX_TRANS);
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    simt_ldmatrix(r, address, 4, SIMT_MATRIX_TRANS);
}
#endif

// ---- stmatrix: the way back, sm_90 and later ----------------------------------------------------
#ifdef __CUDACC__
#define PTX_STMATRIX(name, modifier, N, registers, ...)                                     \
    __device__ __forceinline__ void name(uint32_t address, const uint32_t(&r)[N]) {         \
        asm volatile("stmatrix.sync.aligned.m8n8." modifier ".shared.b16 [%0], {" registers \
                     "};" ::"r"(address),                                                   \
                     __VA_ARGS__                                                            \
                     : "memory");                                                           \
    }
#define PTX_IN1 "r"(r[0])
#define PTX_IN2 "r"(r[0]), "r"(r[1])
#define PTX_IN4 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
PTX_STMATRIX(stmatrix_x1, "x1", 1, "%1", PTX_IN1)
PTX_STMATRIX(stmatrix_x2, "x2", 2, "%1, %2", PTX_IN2)
PTX_STMATRIX(stmatrix_x4, "x4", 4, "%1, %2, %3, %4", PTX_IN4)
PTX_STMATRIX(stmatrix_x1_trans, "x1.trans", 1, "%1", PTX_IN1)
PTX_STMATRIX(stmatrix_x2_trans, "x2.trans", 2, "%1, %2", PTX_IN2)
PTX_STMATRIX(stmatrix_x4_trans, "x4.trans", 4, "%1, %2, %3, %4", PTX_IN4)
#else
__device__ __forceinline__ void stmatrix_x1(uint32_t address, const uint32_t (&r)[1]) {
    simt_stmatrix(address, r, 1, 0);
}
__device__ __forceinline__ void stmatrix_x2(uint32_t address, const uint32_t (&r)[2]) {
    simt_stmatrix(address, r, 2, 0);
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    simt_stmatrix(address, r, 4, 0);
}
__device__ __forceinline__ void stmatrix_x1_trans(uint32_t address, const uint32_t (&r)[1]) {
    simt_stmatrix(address, r, 1, SIMT_MATRIX_TRANS);
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, const uint32_t (&r)[2]) {
    simt_stmatrix(address, r, 2, SIMT_MATRIX_TRANS);
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    simt_stmatrix(address, r, 4, SIMT_MATRIX_TRANS);
}
#endif

// ---- mma: C += A B on the tensor cores, A row-major, B column-major -----------------------------
// With g = lane / 4 and t = lane % 4 (the PTX ISA's groupID and threadID_in_group), m16n8k16 holds
//   A  a[0]: row g,     columns 2t, 2t+1        a[1]: row g + 8, the same columns
//      a[2]: row g,     columns 2t+8, 2t+9      a[3]: row g + 8, the same columns
//   B  b0: rows 2t, 2t+1, column g              b1: rows 2t+8, 2t+9, column g
//   C  c[0], c[1]: row g, columns 2t, 2t+1      c[2], c[3]: row g + 8, the same columns
// and m16n8k8 holds a[0], a[1] and b0 of these.
#ifdef __CUDACC__
#define PTX_MMA_K16_F32(type)                                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type            \
                 ".f32 "                                                           \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define PTX_MMA_K8_F32(type)                                           \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type \
                 ".f32 "                                               \
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])      \
                 : "r"(a[0]), "r"(a[1]), "r"(b0))
#endif

template <class T>
struct PtxIsBf16 {
    static constexpr bool value = false;
};
template <>
struct PtxIsBf16<__nv_bfloat16> {
    static constexpr bool value = true;
};

template <class T = __half>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#ifdef __CUDACC__
    if constexpr (PtxIsBf16<T>::value) PTX_MMA_K16_F32("bf16");
    else PTX_MMA_K16_F32("f16");
#else
    SimtMmaIn in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {}};
    uint32_t d[4];
    memcpy(in.c, c, sizeof in.c);
    simt_mma(d, in, SIMT_M16N8K16 | SIMT_MMA_ACC_F32 | (PtxIsBf16<T>::value ? SIMT_MMA_BF16 : SIMT_MMA_F16));
    memcpy(c, d, sizeof d);
#endif
}
template <class T = __half>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[2], uint32_t b0) {
#ifdef __CUDACC__
    if constexpr (PtxIsBf16<T>::value) PTX_MMA_K8_F32("bf16");
    else PTX_MMA_K8_F32("f16");
#else
    SimtMmaIn in = {{a[0], a[1]}, {b0}, {}};
    uint32_t d[4];
    memcpy(in.c, c, sizeof in.c);
    simt_mma(d, in, SIMT_M16N8K8 | SIMT_MMA_ACC_F32 | (PtxIsBf16<T>::value ? SIMT_MMA_BF16 : SIMT_MMA_F16));
    memcpy(c, d, sizeof d);
#endif
}
// fp16 accumulators: c[0] holds row g, columns 2t and 2t+1; c[1] the same of row g + 8.
__device__ __forceinline__ void mma_m16n8k16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
#ifdef __CUDACC__
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    SimtMmaIn in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1]}};
    uint32_t d[4];
    simt_mma(d, in, SIMT_M16N8K16 | SIMT_MMA_ACC_F16 | SIMT_MMA_F16);
    c[0] = d[0], c[1] = d[1];
#endif
}
__device__ __forceinline__ void mma_m16n8k8_f16(uint32_t (&c)[2], const uint32_t (&a)[2], uint32_t b0) {
#ifdef __CUDACC__
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
                 : "+r"(c[0]), "+r"(c[1])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
#else
    SimtMmaIn in = {{a[0], a[1]}, {b0}, {c[0], c[1]}};
    uint32_t d[4];
    simt_mma(d, in, SIMT_M16N8K8 | SIMT_MMA_ACC_F16 | SIMT_MMA_F16);
    c[0] = d[0], c[1] = d[1];
#endif
}

// ---- cp.async: global -> shared memory, past the registers --------------------------------------
// BYTES is 4, 8 or 16; both addresses are aligned to it. 16 bytes bypass L1 (.cg). With src_bytes, the bytes
// from there on become zeros. A copy may be read after cp_async_wait of its group, and by other threads after
// a barrier that follows the wait. `src` points to global memory, so its generic address is the global one:
// asking for the conversion costs instructions.
template <int BYTES = 16>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef __CUDACC__
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(BYTES) : "memory");
#else
    simt_cp_async(dst, src, BYTES, BYTES);
#endif
}
template <int BYTES = 16>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src, int src_bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef __CUDACC__
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES),
                     "r"(src_bytes)
                     : "memory");
#else
    simt_cp_async(dst, src, BYTES, src_bytes);
#endif
}
// Closes the group of the copies issued since the last commit; a group may be empty.
__device__ __forceinline__ void cp_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    simt_cp_async_commit();
#endif
}
// Waits until at most N of this thread's groups, the latest, are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
    simt_cp_async_wait(N);
#endif
}
// Commits, and waits for every copy.
__device__ __forceinline__ void cp_async_wait_all() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_all;" ::: "memory");
#else
    simt_cp_async_wait(-1);
#endif
}

// ---- barriers by number: for warps that do different work ---------------------------------------
// `threads` (a multiple of 32) is how many sync or arrive in all; ids 1 to 15 (0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    simt_named_barrier(id, threads, 1);
#endif
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
#ifdef __CUDACC__
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    simt_named_barrier(id, threads, 0);
#endif
}

// ---- one-instruction maths ----------------------------------------------------------------------
__device__ __forceinline__ float exp2_approx(float x) {  // 2^x; -inf gives 0; subnormal results flush to 0
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.f : y;
#endif
}
__device__ __forceinline__ float rcp_approx(float x) {
#ifdef __CUDACC__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / x;
#endif
}

// ---- packing: two floats -> one register --------------------------------------------------------
template <class T = __half>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t u;
    if constexpr (PtxIsBf16<T>::value) {
        __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
        memcpy(&u, &h, 4);
    } else {
        __half2 h = __floats2half2_rn(low, high);
        memcpy(&u, &h, 4);
    }
    return u;
}
template <class T = __half>
__device__ __forceinline__ float2 unpack(uint32_t u) {
    if constexpr (PtxIsBf16<T>::value) {
        __nv_bfloat162 h;
        memcpy(&h, &u, 4);
        return __bfloat1622float2(h);
    } else {
        __half2 h;
        memcpy(&h, &u, 4);
        return __half22float2(h);
    }
}
