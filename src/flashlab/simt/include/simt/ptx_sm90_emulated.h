// The functions of ptx_sm90.cuh for a host compiler: each is the emulator where nvcc would see inline PTX.
// ptx_sm90.cuh says what they do, and includes this file.
#pragma once
#include "ptx_ops.h"
#include "tensor_map_types.h"

extern "C" {
void mbarrier_init(uint32_t bar, int arrivals);
void mbarrier_inval(uint32_t bar);
void mbarrier_arrive(uint32_t bar);
void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes);
void mbarrier_expect_tx(uint32_t bar, uint32_t bytes);
[[nodiscard]] bool mbarrier_test_wait(uint32_t bar, uint32_t parity);
int simt_mbarrier_wait(uint32_t bar, uint32_t parity, int may_give_up);
void fence_mbarrier_init();
void simt_fence_proxy_async(int global);
void simt_tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int* at, int rank);
void simt_tma_store(const CUtensorMap* map, uint32_t src, const int* at, int rank, int add);
void tma_prefetch(const CUtensorMap* map);
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar);
void bulk_store(void* dst, uint32_t src, uint32_t bytes);
void bulk_commit();
void simt_bulk_wait(int groups_left, int read);  // read: only until shared memory has been read
void simt_setmaxnreg(int registers, int increase);
}

// ---- mbarrier -----------------------------------------------------------------------------------
[[nodiscard]] SIMT_INLINE bool mbarrier_try_wait(uint32_t bar, uint32_t parity, uint32_t = 0) {
    return simt_mbarrier_wait(bar, parity, 1);
}
SIMT_INLINE void mbarrier_wait(uint32_t bar, uint32_t parity) { simt_mbarrier_wait(bar, parity, 0); }

// ---- fences -------------------------------------------------------------------------------------
SIMT_INLINE void fence_proxy_async() { simt_fence_proxy_async(0); }
SIMT_INLINE void fence_proxy_async_global() { simt_fence_proxy_async(1); }

// ---- TMA ----------------------------------------------------------------------------------------
// The coordinates, as an array: overloads of one to five.
template <class... C>
SIMT_INLINE void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, C... c) {
    static_assert(sizeof...(C) <= 4, "a tensor has one to five dimensions");
    const int at[] = {c0, (int)c...};
    simt_tma_load(dst, map, bar, at, 1 + sizeof...(C));
}
template <class... C>
SIMT_INLINE void tma_store(const CUtensorMap* map, uint32_t src, int c0, C... c) {
    static_assert(sizeof...(C) <= 4, "a tensor has one to five dimensions");
    const int at[] = {c0, (int)c...};
    simt_tma_store(map, src, at, 1 + sizeof...(C), 0);
}
template <class... C>
SIMT_INLINE void tma_reduce_add(const CUtensorMap* map, uint32_t src, int c0, C... c) {
    static_assert(sizeof...(C) <= 4, "a tensor has one to five dimensions");
    const int at[] = {c0, (int)c...};
    simt_tma_store(map, src, at, 1 + sizeof...(C), 1);
}

// ---- bulk copies --------------------------------------------------------------------------------
template <int N>
SIMT_INLINE void bulk_wait() {
    simt_bulk_wait(N, 0);
}
template <int N>
SIMT_INLINE void bulk_wait_read() {
    simt_bulk_wait(N, 1);
}

// ---- one lane, and registers --------------------------------------------------------------------
SIMT_INLINE bool elect_one() {
    unsigned mine;
    simt_warp(SIMT_ELECT, 0xffffffffu, nullptr, &mine, 0);
    return mine;
}
template <int N>
SIMT_INLINE void setmaxnreg_inc() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8, from 24 to 256");
    simt_setmaxnreg(N, 1);
}
template <int N>
SIMT_INLINE void setmaxnreg_dec() {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8, from 24 to 256");
    simt_setmaxnreg(N, 0);
}
