// ptx_sm90.cuh - what Hopper (sm_90) adds for copies: barriers in shared memory that count arrivals and bytes, the
// tensor memory accelerator (TMA) that fills them, and the instructions around these. Each is one line of inline PTX.
//
// That is what nvcc compiles. g++ gets the same functions from simt/ptx_sm90_emulated.h.
//
// An mbarrier is 8 bytes of shared memory, 8-byte aligned, named by its 32-bit address. Bytes are copied by the async
// proxy, another way into memory than loads and stores: see fence_proxy_async. A cluster is one block here: nothing
// is multicast, and no other block's shared memory is reached. Names and operand order follow the PTX ISA.
#pragma once
#include "simt/names.h"
#include "ptx.cuh"
#include <cuda.h>

#ifndef __CUDACC__
#include "simt/ptx_sm90_emulated.h"
#else

// ---- mbarrier -------------------------------------------------------------------------------------------------------
// region: mbarrier
// A phase ends when `arrivals` threads have arrived and as many bytes have come as were expected; the next begins at
// once. Phases are numbered from 0; a wait names the parity of the phase that it waits for, and passes when that phase
// has ended. So a wait for parity 1 passes at a new barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_inval(uint32_t bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
// Arrives, and announces copies: the phase waits for so many bytes more.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// Announces them without arriving.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// Has the phase of this parity ended? test_wait looks once; try_wait may sleep for a while first, and then say no as well.
[[nodiscard]] __device__ __forceinline__ bool mbarrier_test_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
[[nodiscard]] __device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {}
}
// endregion
// try_wait that sleeps for so many nanoseconds at most.
[[nodiscard]] __device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity, uint32_t nanoseconds) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity), "r"(nanoseconds) : "memory");
    return done;
}

// ---- fences between the two ways into memory ------------------------------------------------------------------------
// region: fences
// After mbarrier_init, by the thread that did it: copies may signal the barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread has stored to shared memory becomes visible to the async proxy: to TMA, bulk copies and wgmma. Each
// thread that has stored executes it, after its last store and before the barrier behind which one thread issues the
// copy. (The PTX ISA, "Causality order", asks for a proxy fence on the way from the store to the copy; one behind the
// barrier is on that way too.)
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same of what has been stored to global memory, before a copy that reads it or writes there.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// endregion

// ---- TMA: boxes of a tensor -----------------------------------------------------------------------------------------
// One thread copies the whole box that the tensor map describes (tensor_map.cuh), with its corner at the coordinates:
// c0 is of the innermost dimension. They may be negative, or beyond the end: a load brings zeros for what lies outside
// of the tensor, a store skips it. `map` is a kernel parameter `const __grid_constant__ CUtensorMap`. The shared
// address is 128-byte aligned; a swizzled box repeats its pattern every 1024 bytes (128B), 512 (64B) or 256 (32B), and
// the pattern starts where the address is a multiple of that.
// region: tma_load
// The bytes come at any time, and count at the barrier: the whole box, with the zeros.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0) {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                         int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                         int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// endregion
// Stores, and reductions (global += shared), belong to the open bulk group of the thread.
#define SIMT_TMA_STORE(name, instruction)                                                                             \
    __device__ __forceinline__ void name(const CUtensorMap* map, uint32_t src, int c0) {                              \
        asm volatile(instruction(1) " [%0, {%2}], [%1];" :: "l"(map), "r"(src), "r"(c0) : "memory");                  \
    }                                                                                                                 \
    __device__ __forceinline__ void name(const CUtensorMap* map, uint32_t src, int c0, int c1) {                      \
        asm volatile(instruction(2) " [%0, {%2, %3}], [%1];"                                                          \
                     :: "l"(map), "r"(src), "r"(c0), "r"(c1) : "memory");                                             \
    }                                                                                                                 \
    __device__ __forceinline__ void name(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2) {              \
        asm volatile(instruction(3) " [%0, {%2, %3, %4}], [%1];"                                                      \
                     :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");                                    \
    }                                                                                                                 \
    __device__ __forceinline__ void name(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {      \
        asm volatile(instruction(4) " [%0, {%2, %3, %4, %5}], [%1];"                                                  \
                     :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");                           \
    }                                                                                                                 \
    __device__ __forceinline__ void name(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3,        \
                                         int c4) {                                                                    \
        asm volatile(instruction(5) " [%0, {%2, %3, %4, %5, %6}], [%1];"                                              \
                     :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");                  \
    }
#define SIMT_STORE_INSTRUCTION(d) "cp.async.bulk.tensor." #d "d.global.shared::cta.bulk_group"
#define SIMT_REDUCE_INSTRUCTION(d) "cp.reduce.async.bulk.tensor." #d "d.global.shared::cta.add.bulk_group"
SIMT_TMA_STORE(tma_store, SIMT_STORE_INSTRUCTION)
SIMT_TMA_STORE(tma_reduce_add, SIMT_REDUCE_INSTRUCTION)
#undef SIMT_TMA_STORE
#undef SIMT_STORE_INSTRUCTION
#undef SIMT_REDUCE_INSTRUCTION
// Fetches the map itself, before its first use.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}

// ---- bulk copies: bytes in a row, without a map ---------------------------------------------------------------------
// Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}

// ---- the groups of stores: TMA's and bulk ---------------------------------------------------------------------------
// region: bulk groups
// Closes the group of this thread's stores since the last commit.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups, the latest, are still under way.
template <int N>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}
// The same, but only until they have read shared memory: it may be written again.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}
// endregion

// ---- one lane, and registers ----------------------------------------------------------------------------------------
// True for one lane of the warp, always the same; all 32 come here.
__device__ __forceinline__ bool elect_one() {
    uint32_t mine;
    asm volatile("{\n.reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(mine) :: "memory");
    return mine;
}
// How many registers each thread has from here on: a multiple of 8, from 24 to 256. All four warps of a warpgroup
// execute it. inc waits until the block has that many left, of those that other warpgroups gave back with dec.
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8, from 24 to 256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8, from 24 to 256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N) : "memory");
}

#endif
#include "simt/names_end.h"
