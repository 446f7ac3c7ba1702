"""What a source may look like: launches in macros and headers, overloads, names of CUDA as names of variables."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from flashlab import simt
from flashlab.simt import CompileError, LaunchError, compile_cuda, source

from .conftest import both_builds

dialect = both_builds("dialect.cu")


def floats() -> np.ndarray:
    return np.zeros(64, np.float32)


@pytest.mark.parametrize(
    "entry, want",
    [
        ("run_null", 1), ("run_null_deduced", 4), ("run_half_given", 6), ("run_braces", 12), ("run_pointer", 10),
        ("run_macro", 3), ("run_pasted", 1), ("run_header", 1), ("run_add_f32_kernel", 1), ("run_called", 5),
        ("run_arch", 900),
    ],
)  # fmt: skip
def test_launches(dialect, entry, want):
    p = floats()
    assert dialect.launch(entry, p).ok
    assert (p[:32] == want).all() and not p[32:].any()


def test_the_kernel_follows_from_the_arguments(dialect):
    p = np.zeros(32, np.int32)
    assert dialect.run_default(p).ok and (p == 14).all()
    assert dialect.run_half_default(p).ok and (p == 10).all()
    f, i = np.ones(32, np.float32), np.ones(32, np.int32)
    assert dialect.run_overloads(f, i).ok and (f == 2).all() and (i == 4).all()


def test_names_of_cuda_may_be_variables_of_the_host(dialect):
    p = floats()
    assert dialect.run_host_variables(p, 64).ok and (p == 2).all()


def test_bytes_are_shuffled(dialect):
    p = np.arange(32, dtype=np.int32)
    assert dialect.run_bytes(p).ok and p.tolist() == [100 + (i ^ 1) for i in range(32)]


def test_strings_are_no_launches(dialect):
    p = floats()
    assert dialect.run_text(p).ok and p[0] == 2


def test_numbers_of_every_kind_go_in_and_out(dialect):
    assert dialect.returns_long().returned == 1 << 40
    assert dialect.returns_float(1.5, 2.25, -3).returned == 0.75
    numbers = [1, 2.5, -40, 4.0, 5, 6.0, 7, 8, 9, 10, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, -17, True]
    got = dialect.many(*numbers, np.full(3, 100, np.float32), 0.5).returned
    assert got == sum(numbers) + 100.5


HEAD = '#include "simt.h"\n'
KERNEL = "__global__ void k(float* p) { p[threadIdx.x] = 1; }\n"


@pytest.mark.parametrize(
    "text, sentence",
    [
        (KERNEL, 'kernel.cu:1: error: __global__ is not known here: did you forget #include "simt.h"'),
        (HEAD + KERNEL + "void f(float* p) { k(p); }", "kernel.cu:3: error: k is a kernel: launch it with k<<<grid"),
        (HEAD + KERNEL + "int f(float* p) { return p ? (k(p), 1) : 0; }", "kernel.cu:3: error: k is a kernel"),
        (
            HEAD + "template <int N> __global__ void t(float* p) {}\nvoid f(float* p) {\n\n    t<64>(p);\n}",
            "kernel.cu:5: error: t is a kernel",
        ),
        (
            HEAD + '__device__ void f(unsigned d) {\n    asm volatile("cp.async.wait_all;" ::"r"(d));\n}',
            "kernel.cu:3: error: inline PTX is not emulated: call the functions of ptx.cuh",
        ),
        (
            HEAD + "#include <cooperative_groups.h>\n",
            "kernel.cu:2:10: error: cooperative_groups.h is not emulated",
        ),
        (HEAD + "#include <mma.h>\n", "mma.h is not emulated: use mma_m16n8k16"),
        (HEAD + "#include <cub/cub.cuh>\n", "cub/cub.cuh is not emulated: use a reduction"),
        (HEAD + "#include <torch/extension.h>\n", "torch/extension.h is not emulated: use an extern"),
        (HEAD + "#include <nowhere.h>\n", "kernel.cu:2:10: fatal error: nowhere.h: No such file"),
        (HEAD + "void f() { void* p; cudaHostAlloc(&p, 1, 0); }", "cudaHostAlloc is not emulated"),
        (HEAD + "__global__ void k() { cudaGridDependencySynchronize(); }", "a launch ends before the next one begins"),
    ],
)
def test_what_is_not_emulated_is_said(text, sentence):
    with pytest.raises(CompileError) as caught:
        compile_cuda(text)
    assert sentence in str(caught.value)


def test_kernels_that_are_declared_are_not_called():
    text = """#include "simt.h"
namespace deep {
template <int N> __global__ void t(float* p);
template __global__ void t<3>(float* p);
template <int N> __global__ void t(float* p) { p[threadIdx.x] = N; }
}
static __global__ void __launch_bounds__(32) k(float* p);
void __global__ k(float* p) { p[threadIdx.x] += 1; }
extern "C" int run(float* p) {
    void (*f)(float*) = &k;
    deep::t<3><<<dim3(1, 1),
                 32>>>(p);
    f<<<1, 32>>>(p);
    k<<<1, 32>>>(p);
    return cudaGetLastError();
}
"""
    p = floats()
    report = compile_cuda(text).run(p)
    assert (p[:32] == 5).all() and [x.kernel for x in report.launches] == ["deep::t<3>", "k", "k"]


@pytest.mark.parametrize("check", [False, True])
def test_a_launch_keeps_the_bounds_of_its_kernel(check):
    text = """#include "simt.h"
struct Tile { static constexpr int THREADS = 64; };
__global__ __launch_bounds__(32, 4) void small(float* p);
__global__ __launch_bounds__(32, 4) void small(float* p) { p[threadIdx.x] = 1; }
template <class T> __global__ void __launch_bounds__((T::THREADS / 2) * 2)
large(float* p)
{ p[threadIdx.x] = 2; }
extern "C" int run(float* p, int threads) { small<<<1, threads>>>(p); return cudaGetLastError(); }
extern "C" int run_large(float* p, int threads) { large<Tile><<<2, threads>>>(p); return cudaGetLastError(); }
"""
    built, p = compile_cuda(text, check=check), floats()
    assert built.run(p, 32).launches[0].kernel == "small" and p[:32].all()
    with pytest.raises(LaunchError, match="small.* a block of 33 threads; .*__launch_bounds__ promise at most 32"):
        built.run(p, 33)
    built.run_large(p, 32)  # two blocks of the same values: no finding of a fast build
    with pytest.raises(LaunchError, match="a block of 96 threads; .*__launch_bounds__ promise at most 64"):
        built.run_large(p, 96)


HOST_AND_DEVICE = """#include "simt.h"
static void reference(const float* x, float* y, int n) { for (int i = 0; i < n; i++) y[i] = x[i]; }
static int twice(int n) { return 2 * n; }
namespace here { template <class X> X* next(X* x, int by = 1) noexcept { return x + twice(by); } }
__device__ float square(float x) { return x * x; }
struct Tile { int n; __device__ int size() const { return n; } };
Tile::Tile() : n(1) { }
__global__ void kernel(float* x) { x[threadIdx.x] = square(x[threadIdx.x]) * twice(1); }
int in_a_lambda(int n) { return n; }
int lambda() { auto f = [](int n) { return in_a_lambda(n); }; return f(1); }
void helper(const float* x, float* y) { reference(x, y, 3); }
extern "C" int run(const float* x, float* y) { helper(x, here::next(y)); kernel<<<1, 32>>>(y); return 0; }
extern "C" { int other(int n) { return n; } }
"""


def test_functions_that_only_the_host_part_can_call():
    text = HOST_AND_DEVICE.replace("__global__", f"__attribute__(({source.KERNEL}))")
    found = source._host_functions(text, source.blank_comments(text))
    names = [re.match(r"\w+", text[at:])[0] for at in found]
    assert sorted(names) == ["helper", "next", "other", "reference", "run"]  # a kernel calls square and twice


def test_a_check_build_does_not_look_at_the_host_part():
    """And at what a kernel calls as ever: the same lines, once each."""
    text = HOST_AND_DEVICE.replace("Tile::Tile() : n(1) { }\n", "")
    built = simt.compile_cuda(text, check=True, name="host.cu")
    hooked = subprocess.run(["objdump", "-d", str(built.build.library)], capture_output=True, text=True).stdout
    of = {m[1]: m[2].count("__tsan_") for m in re.finditer(r"^\w+ <(\S+)>:\n((?:.+\n)*)", hooked, re.M)}
    assert of["run"] == 0 and of["_Z6kernelPf"] > 0
    assert all(n == 0 for name, n in of.items() if "reference" in name or "helper" in name)
