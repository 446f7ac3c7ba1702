"""Arrays of shared memory: what counts is the alignment that is declared, not the address that the linker had left."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from flashlab import simt

from .conftest import report_of

HEAD = """#include "tensor_map.cuh"
#include "ptx_sm90.cuh"
constexpr int WIDE = 16;
__device__ void use(float* tile, const float* x, float* y, int mode) {
    const int i = threadIdx.x;
    if (mode == 0 && i < 16) ((float4*)tile)[i] = ((const float4*)x)[i];
    if (mode == 1 && i < 16) cp_async<16>(smem_u32(tile + 4 * i), x + 4 * i), cp_async_commit(), cp_async_wait<0>();
    if (mode > 1) tile[i] = tile[i + 32] = 1;
    __syncthreads();
    if (mode == 2) { uint32_t r[1]; ldmatrix_x1(r, smem_u32(tile + i % 8 * 4)); y[i] = (float)r[0]; }
    if (mode == 3) fence_proxy_async(), __syncthreads();
    if (mode == 3 && i == 0) bulk_store(y, smem_u32(tile), 256), bulk_commit(), bulk_wait<0>();
    if (mode == 4) { const float2 v = ((const float2*)tile)[i]; y[i] = v.x + v.y; }
    if (mode == 5) y[i] = tile[i] + tile[i + 32];
    if (mode == 6) atomicAdd((unsigned long long*)tile, 1ull);
}
"""
KERNEL = """__global__ void k{0}(const float* x, float* y, int mode) {{ {1}; use((float*)tile, x, y, mode); }}
extern "C" void run{0}(const float* x, float* y, int mode) {{ k{0}<<<1, 32, 256>>>(x, y, mode); }}
"""
# declaration -> the alignment that it asks for
STATIC = {
    "__shared__ float tile[64]": 4,
    "__shared__ double tile[32]": 8,
    "__shared__ __align__(8) float tile[8][8]": 8,
    "__shared__ __half other[3]; __shared__ float tile[64]": 4,
    "__shared__ float4 tile[16]": 16,
    "__shared__ __align__(16) float tile[64]": 16,
    "__shared__ __align__(WIDE) float tile[64]": 16,
    "__shared__ alignas(16) float tile[64]": 16,
    "alignas(32) __shared__ float tile[64]": 32,
    "static __shared__ __align__(128) float other[3], tile[64]": 128,
    "struct S { char c; float4 v[16]; }; __shared__ S s; float* tile = (float*)s.v": 16,
    "struct __align__(16) S { float v[64]; }; __shared__ S s; float* tile = s.v": 16,
}
DYNAMIC = {
    "extern __shared__ float tile[]": 4,
    "extern __shared__ unsigned char tile[]": 1,
    "extern __shared__ float4 tile[]": 16,
    "extern __shared__ __align__(16) unsigned char tile[]": 16,
    "extern __shared__ alignas(WIDE) float tile[]": 16,
    "__align__(1024) extern __shared__ float tile[]": 1024,
}
NEEDED = (16, 16, 16, 16, 8, 4, 8)  # by mode


def told(module: simt.Module, entry: str, mode: int) -> str:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    report = report_of(getattr(module, entry), x, y, mode)
    return report.findings[0].message if report.findings else ""


def expect(message: str, needed: int, align: int) -> None:
    if align >= needed:
        assert not message
    else:
        assert re.search(rf"is aligned to {align} bytes? only. Declare it with __align__\(16\)", message), message


@pytest.mark.parametrize("declared", STATIC)
def test_static_arrays(declared):
    module = static()
    for mode, needed in enumerate(NEEDED):
        expect(told(module, f"run{[*STATIC].index(declared)}", mode), needed, STATIC[declared])


@functools.cache
def static() -> simt.Module:
    """All of them in one source."""
    return simt.compile_cuda(HEAD + "".join(KERNEL.format(i, d) for i, d in enumerate(STATIC)), check=True)


@pytest.mark.parametrize("declared", DYNAMIC)
def test_dynamic_arrays(declared):
    kernel = "template <int N> " + KERNEL.format(0, declared).replace("k0<<<", "k0<3><<<")
    module = simt.compile_cuda(HEAD + kernel, check=True)
    assert module.build.dynamic_align == DYNAMIC[declared]
    for mode, needed in enumerate(NEEDED):
        expect(told(module, "run0", mode), needed, DYNAMIC[declared])


@pytest.mark.parametrize("declared", ["__shared__ float tile[64]", "extern __shared__ float tile[]"])
def test_a_fast_build_sees_what_copies_and_fragments_need(declared):
    module = simt.compile_cuda(HEAD + KERNEL.format(0, declared))
    for mode in (1, 2, 3):
        assert "Declare it with __align__(16)" in told(module, "run0", mode)
