"""Thread block clusters: sums over a cluster come out right, and what goes wrong between its blocks is found."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from flashlab import simt

from .conftest import report_of

TEXT = """#include "simt.h"
#include "ptx_cluster.cuh"
#include "ptx_sm90.cuh"
#define PEER(p, rank) cluster_address(smem_u32(p), rank)
#define SYNC cluster_arrive(), cluster_wait()
__global__ void push(float* out, int rounds) {  // each block gives its number to all, again and again
    __shared__ float box[16];
    const uint32_t i = threadIdx.x, n = cluster_size(), rank = cluster_rank();
    float sum = 0;
    cluster_arrive_relaxed();  // all have begun
    for (int t = 0; t < rounds; t++) {
        cluster_wait();
        if (i < n) cluster_store(PEER(&box[rank], i), (float)blockIdx.x);
        SYNC;
        for (int r = 0; r < n; r++) sum += box[r];
        cluster_arrive();  // it may be written again
    }
    cluster_wait();
    out[blockIdx.x * blockDim.x + i] = sum / rounds;
}
__global__ void pull(float* out, int rounds) {  // the same, from one place
    extern __shared__ __align__(16) float4 mine[];
    const uint32_t i = threadIdx.x, n = cluster_size();
    float sum = 0;
    for (int t = 0; t < rounds; t++) {
        mine[i] = make_float4(0, t, blockIdx.x, 0);
        SYNC;
        cluster_arrive_relaxed(), cluster_wait();  // takes nothing back
        for (int r = 0; r < n; r++) sum += cluster_load4(PEER(&mine[i ^ 1], r)).z;
        SYNC;
    }
    out[blockIdx.x * blockDim.x + i] = sum / rounds;
}
__global__ void turns(float* out, int never) {  // the last block goes first: it is waited for in global memory
    __shared__ float2 box;
    const uint32_t n = cluster_size(), rank = cluster_rank();
    int* const flag = (int*)out + gridDim.x * blockDim.x + blockIdx.x / n;
    if (threadIdx.x == 0) {
        while (atomicAdd(flag, 0) != n - 1 - rank + never) {}
        atomicAdd(flag, 1);
        box = make_float2(blockIdx.x, 0);
    }
    cluster_arrive();
    if (threadIdx.x < 32) cluster_wait();
    __syncthreads();  // the others know of it
    float sum = 0;
    for (int r = 0; r < n; r++) sum += cluster_load2(PEER(&box, r)).x;
    if (threadIdx.x >= 32) cluster_wait();
    cluster_arrive();
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    cluster_wait();
}
#define CASE(number) if (which == number)
__global__ void mistake(float* out, int which) {  // two blocks of 64 threads
    __shared__ __align__(16) float box[64];
    __shared__ float other[64];
    __shared__ __align__(16) float4 tile[16];
    __shared__ uint64_t mbarrier;
    const uint32_t i = threadIdx.x, rank = cluster_rank(), peer = rank ^ 1;
    float got = 0;
    CASE(0) got = cluster_load(PEER(&box[i], peer));  // <- 0 cluster-begin; block 1 (rank 1 of its cluster), which
    box[i] = i;
    CASE(1) cluster_wait();  // <- 1 cluster-barrier; with no arrival to wait
    CASE(2) cluster_arrive();
    if (which == 3 && rank && i < 32) {
        __syncthreads();  // <- 3 deadlock; The cluster barrier waits for 32 threads of block 1
    } else if (which == 4) {
        cluster_arrive_relaxed(), cluster_wait();
    } else {
        cluster_arrive();  // <- 2 cluster-barrier; again, with no cluster_wait since its last arrival
        cluster_wait();
    }
    CASE(4) got = cluster_load(PEER(&box[i], peer));  // <- 4 race; block 1 wrote in line -11: no cluster
    CASE(5) { if (rank) cluster_store(PEER(other, 0), i); }  // <- 5 race; wrote with cluster_store in line +0: no b
    CASE(6) got = cluster_load(PEER(&other[i], peer));  // <- 6 uninitialised-shared; other at byte 0 of block 1
    CASE(7) got = cluster_load(PEER(&box[i], peer + 2));  // <- 7 cluster-rank; memory of rank 2, in a cluster of 2
    CASE(8) cluster_store(PEER(box, peer) + 256, 1.f);  // <- 8 shared-out-of-bounds; 4 bytes beyond
    CASE(9) got = cluster_load2(PEER(&box[i + 1], peer)).x;  // <- 9 misaligned; 8 bytes of shared memory
    CASE(10) { if (!rank) got = cluster_load(PEER(&box[i], 1)); }  // <- 10 cluster-end; memory of block 1 (rank 1 of
    CASE(11) { if (rank) cluster_store(PEER(&box[i], 0), 1.f); }  // <- 11 cluster-end; memory of block 0 (rank 0 of
    CASE(12) got = cluster_load(PEER(&box[i], peer));  // <- 12 race; thread 0 of block 1 wrote in line +1: no
    CASE(12) box[i] = 1;
    CASE(13) cluster_store(PEER(&other[0], rank * 1000000), 1.f);  // <- 13 cluster-rank; in a cluster of 2
    CASE(14) { if (i == 0) cluster_store(PEER(&other[0], 0), 1.f); }  // <- 14 race; thread 0 of block 1 writes with cl
    CASE(15) { if (i == 0 && rank) cluster_store(PEER(&other[0], 0), 1.f); }  // <- 15 race; thread 1 of block 0 read
    CASE(15) { if (i == 1 && !rank) got = other[0]; }
    if (which == 16) {
        if (rank) cluster_store(PEER(&other[i], 0), 1.f);  // <- 16 race; of block 0 read in line +2: no cluster
        cluster_arrive_relaxed(), cluster_wait();
        if (!rank) got = other[i];
    }
    if (which == 17 || which == RIGHT) {
        const uint32_t bar = smem_u32(&mbarrier);
        if (i == 0) {
            mbarrier_init(bar, 1), fence_mbarrier_init(), mbarrier_arrive_expect_tx(bar, 256);
            bulk_load(smem_u32(tile), out + 128, 256, bar);
        }
        __syncthreads();
        if (which == RIGHT) mbarrier_wait(bar, 0);
        SYNC;
        got = cluster_load4(PEER(&tile[i % 16], peer)).x;  // <- 17 race; filled with bulk_load in line -5: no wait
        mbarrier_wait(bar, 0);
    }
    out[blockIdx.x * blockDim.x + i] = got;
    if (which != 10 && which != 11) SYNC;
}
extern "C" int run(float* out, int kernel, int given, int blocks, int threads, int size, int wide, int y) {
    void (*const kernels[])(float*, int) = {push, pull, turns, mistake};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = 16 * threads;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = size, attribute[0].val.clusterDim.y = y, attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute, config.numAttrs = size ? 1 : 0;
    cudaFuncSetAttribute(kernels[kernel], cudaFuncAttributeNonPortableClusterSizeAllowed, wide);
    int clusters = 0;
    cudaOccupancyMaxActiveClusters(&clusters, kernels[kernel], &config);
    if (clusters != 132 / (size ? size : 1)) return 1;
    return cudaLaunchKernelEx(&config, kernels[kernel], out, given);
}
"""
PUSH, PULL, TURNS, MISTAKE, RIGHT = *range(4), 18
MISTAKES = {  # number -> kind, line, and what is said; another line is marked by how far it is from there
    int(m[1]): (m[2], line, re.sub(r"line ([+-]\d+)", lambda other, at=line: f"line {at + int(other[1])}", m[3]))
    for line, text in enumerate(TEXT.splitlines(), 1)
    if (m := re.search(r"// <- (\d+) ([\w-]+); (.*)", text))
}
WATCHED = {"race", "uninitialised-shared"}  # kinds that a fast build does not find here
REFUSED = {
    "grid.x is 12, which is no multiple of the 5 blocks of a cluster": (5, 0, 1),
    "a cluster of 12 blocks: above 8 a kernel has to be allowed to": (12, 0, 1),
    "a cluster of 17 blocks; it has 1 to 16": (17, 1, 1),
    "a cluster of 2 blocks in y and 1 in z; the emulator has clusters along x only": (2, 0, 2),
}


@functools.cache
def built(check: bool) -> simt.Module:
    return simt.compile_cuda(TEXT, name="clusters.cu", check=check, defines={"RIGHT": RIGHT})


def findings(mode: int, check: bool = True, **options) -> list[simt.Finding]:
    return report_of(built(check).run, np.zeros(192, np.float32), MISTAKE, mode, 2, 64, 2, 0, 1, **options).findings


@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
@pytest.mark.parametrize("kernel, given", [(PUSH, 3), (PULL, 3), (TURNS, 0)], ids=["push", "pull", "turns"])
@pytest.mark.parametrize("size, clusters", [(0, 3), (1, 3), (3, 4), (8, 2), (16, 2)])
def test_sums_over_a_cluster_are_right(check, kernel, given, size, clusters):
    threads, blocks = 48, max(size, 1) * clusters
    sums = np.arange(blocks).reshape(clusters, -1).sum(1)
    for workers in (1, 3):
        out = np.zeros(blocks * threads + clusters, np.float32)
        report = built(check).run(out, kernel, given, blocks, threads, size, int(size > 8), 1, threads=workers)
        assert report.findings == []
        np.testing.assert_array_equal(out[: blocks * threads], np.repeat(sums, blocks // clusters * threads))


@pytest.mark.parametrize("mode", MISTAKES)
def test_a_mistake_is_found(mode):
    kind, line, words = MISTAKES[mode]
    found = findings(mode)
    assert [(f.kind, f.line) for f in found] == [(kind, line)] and words in found[0].message, found
    assert str(findings(mode, threads=1)) == str(found)  # it depends on no luck
    assert [(f.kind, f.line) for f in findings(mode, False)] == ([] if kind in WATCHED else [(kind, line)])


@pytest.mark.parametrize("words", REFUSED)
def test_a_launch_is_refused(words):
    size, wide, y = REFUSED[words]
    with pytest.raises(simt.LaunchError, match=re.escape(words)):
        built(False).run(np.zeros(12 * 32, np.float32), PUSH, 0, 12, 32, size, wide, y)


@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
def test_time_ends_a_cluster(check):
    with pytest.raises(simt.KernelTimeout, match="waits for element 144 of out, which stays 0"):
        built(check).run(np.zeros(3 * 48 + 1, np.float32), TURNS, 9, 3, 48, 3, 0, 1, timeout=1)
    assert not findings(RIGHT)  # and the next call is as ever
