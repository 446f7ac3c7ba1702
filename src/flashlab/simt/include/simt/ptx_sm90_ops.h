// The emulator's operations of Hopper: what ptx_sm90_emulated.h calls where nvcc would see inline PTX.
#pragma once
#include "ptx_ops.h"
#include "tensor_map_types.h"

extern "C" {
void simt_mbarrier_init(uint32_t bar, int arrivals);
void simt_mbarrier_inval(uint32_t bar);
void simt_mbarrier_arrive(uint32_t bar);
void simt_mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes);
void simt_mbarrier_expect_tx(uint32_t bar, uint32_t bytes);
int simt_mbarrier_test_wait(uint32_t bar, uint32_t parity);
int simt_mbarrier_wait(uint32_t bar, uint32_t parity, int may_give_up);
void simt_fence_mbarrier_init();
void simt_fence_proxy_async(int global);
void simt_tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int* at, int rank);
void simt_tma_store(const CUtensorMap* map, uint32_t src, const int* at, int rank, int add);
void simt_tma_prefetch(const CUtensorMap* map);
void simt_bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar);
void simt_bulk_store(void* dst, uint32_t src, uint32_t bytes);
void simt_bulk_commit();
void simt_bulk_wait(int groups_left, int read);  // read: only until shared memory has been read
void simt_setmaxnreg(int registers, int increase);
}
