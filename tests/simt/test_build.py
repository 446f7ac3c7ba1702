"""Building: the cache, compile errors, other compilers, a machine with less on it."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from flashlab import simt
from flashlab.simt import CompileError, SimtError, build, compile_cuda, elf, lines, memory, process, source

from .conftest import KERNELS

ADD = """#include "simt.h"
__global__ void add(const float* a, float* b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) b[i] += a[i] * FACTOR;
}
extern "C" int run_add(const float* a, float* b, int n) {
    add<<<(n + 63) / 64, 64>>>(a, b, n);
    return cudaGetLastError();
}
"""


def add_with(text: str, **options) -> float:
    a, b = np.ones(100, np.float32), np.zeros(100, np.float32)
    built = compile_cuda(text, **options)
    built.run_add(a, b, 100)
    assert (b == b[0]).all()
    return float(b[0])


def test_an_unchanged_source_comes_from_the_cache(tmp_path, monkeypatch):
    unique = ADD + f"// {os.urandom(8).hex()}\n"
    first = compile_cuda(unique, defines={"FACTOR": 3})
    second = compile_cuda(unique, defines={"FACTOR": 3})
    other = compile_cuda(unique, defines={"FACTOR": 4})
    assert not first.build.from_cache and second.build.from_cache and not other.build.from_cache
    assert first.build.library == second.build.library != other.build.library
    assert add_with(unique, defines={"FACTOR": 3}) == 3 and add_with(unique, defines={"FACTOR": 4}) == 4


def test_a_changed_header_is_noticed(tmp_path):
    header, path = tmp_path / "factor.cuh", tmp_path / f"add_{os.urandom(4).hex()}.cu"
    header.write_text("#define FACTOR 5\n")
    path.write_text('#include "factor.cuh"\n' + ADD)
    assert add_with(path) == 5
    header.write_text("#define FACTOR 6\n")
    assert add_with(path) == 6
    header.write_text("#define FACTOR 5\n")
    assert add_with(path) == 5
    inside = tmp_path / "include"
    inside.mkdir()
    (inside / "factor2.cuh").write_text("#define FACTOR 7\n")
    assert add_with('#include "factor2.cuh"\n' + ADD, include_dirs=[inside]) == 7


def test_builds_at_the_same_time():
    texts = [ADD.replace("FACTOR", str(i)) + f"// {os.urandom(4).hex()}" for i in (1, 1, 2, 2)]
    with ThreadPoolExecutor(4) as pool:
        builds = list(pool.map(compile_cuda, texts))
    a = np.ones(64, np.float32)
    for built, want in zip(builds, (1, 1, 2, 2), strict=True):
        b = np.zeros(64, np.float32)
        built.run_add(a, b, 64)
        assert b[0] == want


def test_an_error_in_a_launch_has_the_learners_line():
    launch = ADD.replace("add<<<(n + 63) / 64, 64>>>(a, b, n);", "add<<<(n + 63) / 64, 64>>>(a, b);")
    with pytest.raises(CompileError, match="kernel.cu:7"):
        compile_cuda(launch, defines={"FACTOR": 1})
    assert add_with(ADD, defines={"FACTOR": 2}) == 2  # the next build is clean


def test_static_shared_memory_has_a_limit():
    text = """#include "simt.h"
__global__ void k(float* p) { __shared__ float tile[FLOATS]; tile[threadIdx.x] = 1; p[0] = tile[0]; }
extern "C" int run(float* p) { k<<<1, 1>>>(p); return cudaGetLastError(); }
"""
    assert compile_cuda(text, defines={"FLOATS": 12288}).run(np.zeros(1, np.float32)).ok
    with pytest.raises(CompileError, match="array tile has 49156 bytes of static shared memory; the limit is 49152"):
        compile_cuda(text, defines={"FLOATS": 12289})


def test_no_compiler(monkeypatch):
    simt.find_compiler.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("FLASHLAB_CXX", raising=False)
    try:
        with pytest.raises(SimtError, match="no g\\+\\+ was found"):
            simt.find_compiler()
        monkeypatch.setenv("FLASHLAB_CXX", "mycc")
        with pytest.raises(SimtError, match="'mycc' was not found"):
            simt.find_compiler()
    finally:
        simt.find_compiler.cache_clear()


def test_without_addr2line(monkeypatch):
    monkeypatch.setattr(lines, "shutil", SimpleNamespace(which=lambda name: None))
    lines.resolver.cache_clear()
    try:
        built = compile_cuda(KERNELS / "mistakes.cu", check=True)
        got = built.run_two_warps_one_word(np.ones(4096, np.float32), np.zeros(4096, np.float32), 64)
    finally:
        lines.resolver.cache_clear()
    assert got.notes and "addr2line was not found" in got.notes[0]
    assert got.findings and got.findings[0].line is None and "thread" in got.findings[0].message
    assert got.counters["barriers"] == 1


@pytest.mark.long  # the whole runtime is compiled again
def test_any_cpu_can_run_it(monkeypatch):
    """The portable context switch: the same results, and the same findings."""
    usual, out = compile_cuda(KERNELS / "language.cu", check=True), np.zeros(5, np.int32)
    compiler = simt.find_compiler()
    flagged = dataclasses.replace(compiler, target=(*compiler.target, "-DSIMT_PORTABLE_FIBERS"))
    monkeypatch.setattr(build, "find_compiler", lambda: flagged)
    portable = compile_cuda(KERNELS / "language.cu", check=True)
    own = "x86-64" if os.uname().machine == "x86_64" else "ucontext"
    for built, fibers in ((usual, own), (portable, "ucontext")):
        assert built.run_predicates(out).ok and out.tolist() == [32, 1, 0, 1, 0]
        assert process._processes[str(built.build.library)].fiber_kind == fibers
    v, shuffled = np.arange(32, dtype=np.int32), np.zeros((4, 32), np.int32)
    assert portable.run_shuffle_int(v, shuffled, 1, 32).ok and (shuffled[1] == v ^ 1).all()
    with pytest.raises(simt.IllegalAccess):
        portable.run_reverse(np.zeros(64, np.float32), np.zeros(64, np.float32), 2)


# ---- the pieces ----------------------------------------------------------------------------------
def test_entries_are_read():
    text = """
extern "C" int one(const float* __restrict__ a, __half *b, int n = 3, unsigned long long big,
                   cudaStream_t stream) { return 0; }
extern "C" void declared(int x);  // no definition
// extern "C" int commented(int x) { return 0; }
extern "C" { void two(void) {} static int x;
bool three(const void* const p, std::int64_t n) { return f(n); } }
"""
    got = source.entries(text)
    assert list(got) == ["one", "two", "three"]
    assert [(p.name, p.kind, p.element, p.const) for p in got["one"].parameters] == [
        ("a", "pointer", "float", True), ("b", "pointer", "__half", False), ("n", "int", "", False),
        ("big", "unsigned long long", "", False), ("stream", "pointer", "stream", False),
    ]  # fmt: skip
    assert got["two"].parameters == () and got["two"].returns == "void"
    assert [(p.name, p.kind) for p in got["three"].parameters] == [("p", "pointer"), ("n", "int64_t")]


def test_shared_arrays_in_the_symbol_table():
    built = compile_cuda(KERNELS / "mistakes.cu", check=True).build
    arrays = {(s.array, s.size) for s in built.shared}
    assert {("bins", 32), ("last", 4), ("mine", 128)} <= arrays
    for name in ("_ZZ1kvE4tile", "_ZZ1kvE4tile_0", "_ZZ1kvE4tile__11_"):  # and those of one name in one function
        assert elf.Symbol(name, 0, 4, True).array == "tile"
    with pytest.raises(ValueError, match="no 64-bit"):
        elf.thread_local_symbols(__file__)


def test_global_memory_keeps_arrays_apart():
    a = np.arange(100, dtype=np.float32)
    part, whole = memory.view(a[10:20:2]), memory.view(a)
    assert (part.bytes, part.offset, part.shape) == (36, 40, (5,)) and whole.bytes == 400
    with memory.GlobalMemory([part, whole]) as m:
        assert m.address(part) == m.address(whole) + 40  # overlapping arrays overlap there too
        assert m.address(whole) % 256 == 0
    b = np.zeros(8, np.float32)
    with memory.GlobalMemory([whole, memory.view(b)]) as m:
        assert abs(m.address(whole) - m.address(memory.view(b))) > 1 << 20
    assert memory.view(3) is None and memory.view(None) is None
    with pytest.raises(TypeError, match="negative strides"):
        memory.view(a[::-1])
