// The functions of ptx_cluster.cuh for a host compiler: each calls the emulator where nvcc would see inline PTX.
// ptx_cluster.cuh says what they do, and includes this file.
#pragma once
#include "ptx_ops.h"

extern "C" {
uint32_t cluster_rank();
uint32_t cluster_size();
void simt_cluster_arrive(int release);
void cluster_wait();
uint32_t cluster_address(uint32_t shared_address, uint32_t rank);
void simt_cluster_store(uint32_t address, const void* from, int bytes);
void simt_cluster_load(uint32_t address, void* to, int bytes);
}

SIMT_INLINE void cluster_arrive() { simt_cluster_arrive(1); }
SIMT_INLINE void cluster_arrive_relaxed() { simt_cluster_arrive(0); }

#define SIMT_CLUSTER_ACCESS(type, load) \
    SIMT_INLINE void cluster_store(uint32_t address, type v) { simt_cluster_store(address, &v, sizeof v); } \
    SIMT_INLINE type load(uint32_t address) { \
        type v; \
        simt_cluster_load(address, &v, sizeof v); \
        return v; \
    }
SIMT_CLUSTER_ACCESS(float4, cluster_load4)
SIMT_CLUSTER_ACCESS(float2, cluster_load2)
SIMT_CLUSTER_ACCESS(float, cluster_load)
#undef SIMT_CLUSTER_ACCESS
