// ptx_cluster.cuh - thread block clusters (sm_90): blocks that run at the same time on neighbouring multiprocessors, a
// barrier of all of them, and each other's shared memory ("distributed shared memory").
//
// That is what nvcc compiles. g++ gets the same functions from simt/ptx_cluster_emulated.h.
//
// A launch with cudaLaunchAttributeClusterDimension makes clusters of blocks that follow each other in x; without it a
// cluster is one block. Names and operand order follow the PTX ISA.
#pragma once
#include "simt/names.h"
#include "ptx.cuh"

#ifndef __CUDACC__
#include "simt/ptx_cluster_emulated.h"
#else

// ---- the cluster, and its barrier -----------------------------------------------------------------------------------
// region: cluster barrier
__device__ __forceinline__ uint32_t cluster_rank() {  // of this block in its cluster
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {  // blocks
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
// Every thread of every block arrives, then waits: the wait passes when all have arrived. What a thread has done before
// its arrival is visible to all behind their wait. The relaxed arrival promises nothing of the kind.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// endregion

// ---- distributed shared memory --------------------------------------------------------------------------------------
// region: distributed shared memory
// The address of the byte that lies in the block of this rank where `shared_address` lies in this one. That block has
// begun once a cluster barrier has been passed, and must not end before the last access: another one stands behind it.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared_address, uint32_t rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
    return address;
}
__device__ __forceinline__ void cluster_store(uint32_t address, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void cluster_store(uint32_t address, float2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void cluster_store(uint32_t address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ float4 cluster_load4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float2 cluster_load2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float cluster_load(uint32_t address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
// endregion

#endif
#include "simt/names_end.h"
