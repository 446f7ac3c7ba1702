"""The CUDA language in the emulator: every construct of kernels/language.cu, in both kinds of build."""

from __future__ import annotations

import re
import string
from pathlib import Path

import numpy as np
import pytest

from flashlab import kernels, simt
from flashlab.simt import LaunchError

from .conftest import both_builds

LANES = np.arange(32)
language = both_builds("language.cu")


def test_indices_in_three_dimensions(language):
    grid, block = (2, 3, 2), (4, 2, 3)
    out = np.full((12, 24, 6), -1, np.int32)
    assert language.run_indices(out, *grid, *block).ok
    want = [[[t % 4, t // 4 % 2, t // 8, b % 2, b // 2 % 3, b // 6] for t in range(24)] for b in range(12)]
    assert (out == want).all()


def test_static_shared_memory_of_a_template(language):
    a = np.arange(192, dtype=np.float32)
    out = np.zeros_like(a)
    assert language.run_reverse(a, out, 3).ok
    assert (out == a.reshape(3, 64)[:, ::-1].ravel()).all()


def test_dynamic_shared_and_constant_memory(language):
    a = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    out = np.zeros_like(a)
    assert language.run_dynamic(a, out, 96).ok
    want = 3 * np.roll(a, -1) + np.tile(np.float32([10, 20, 30, 40]), 24)
    assert np.allclose(out, want, rtol=1e-6)


def test_barriers_with_predicates(language):
    out = np.zeros(5, np.int32)
    report = language.run_predicates(out)
    assert report.ok and out.tolist() == [32, 1, 0, 1, 0]
    assert report.counters["barriers"] == 5


def shuffled(v, arg, width):
    """What CUDA's manual says of the four kinds."""
    base, end = LANES & ~(width - 1), (LANES & ~(width - 1)) + width
    index = base + (arg & (width - 1))
    xor = np.where((LANES ^ arg) < end, LANES ^ arg, LANES)
    up = np.where(LANES - arg >= base, LANES - arg, LANES)
    down = np.where(LANES + arg < end, LANES + arg, LANES)
    return np.stack([v[index], v[xor], v[up], v[down]])


@pytest.mark.parametrize("width", [32, 16, 8, 4, 1])
@pytest.mark.parametrize("arg", [0, 1, 3, 5, 16])
def test_shuffles(language, arg, width):
    for name, dtype in (("int", np.int32), ("double", np.float64), ("half", np.float16)):
        v = np.random.default_rng(arg).permutation(32).astype(dtype)
        out = np.zeros((4, 32), dtype)
        report = getattr(language, f"run_shuffle_{name}")(v, out, arg, width)
        assert report.ok and report.counters["shuffles"] == 4
        assert (out == shuffled(v, arg, width)).all()


def test_shuffles_of_part_of_a_warp(language):
    out = np.zeros(32, np.int32)
    assert language.run_shuffle_in_halves(out).ok
    assert (out == np.where(LANES < 16, LANES ^ 1, 31)).all()


def test_votes_matches_and_reductions(language):
    keys = (LANES % 5).astype(np.int32)
    out = np.zeros(15, np.uint32)
    assert language.run_votes(out, keys).ok
    bits = lambda chosen: int(sum(1 << int(lane) for lane in LANES[chosen]))  # noqa: E731
    assert out[0] == bits(LANES % 4 == 1)
    assert out[1:6].tolist() == [1, 0, 1, 0, 1]
    assert out[6] == bits(keys == keys[3])
    assert out[7:12].tolist() == [496, 2**32 - 5, 31, 2**32 - 1, 0]
    assert out[12] == bits(LANES % 2 == 1)  # the lanes that came to __activemask together
    assert out[13] == 2**32 - 1 and out[14] == 1


def test_atomics(language):
    i, f = np.zeros(4, np.int32), np.zeros(1, np.float32)
    h, u = np.zeros(2, np.float16), np.array([0, 0, 0, 1000], np.uint32)
    report = language.run_atomics(i, f, h, u)
    assert report.ok
    assert i[:3].tolist() == [256, 255, -63] and 1 <= i[3] <= 64
    assert f[0] == 128 and h.tolist() == [256, 512]
    assert u.tolist() == [2**32 - 1, 256 % 10, 77, 1000 - 256]
    # counted once for a warp: 8 warps; threads 0 alone still are an instruction of their warp
    assert report.counters["shared_atomics"] == 8
    assert report.counters["global_atomics"] == 8 * 8 + 2 * 4


def test_a_lock_within_a_warp(language):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    assert language.run_spin_lock(lock, total).ok
    assert total[0] == 64 and lock[0] == 0


def test_maths(language):
    x = np.float32([0.5, 2.0, -1.25, 3.5, 0.1, -0.7, 1.0, 10.0])
    out = np.zeros((12, 8), np.float32)
    assert language.run_maths(x, out, 8).ok
    d = x.astype(np.float64)
    ones = [bin(v).count("1") for v in x.view(np.uint32)]
    root, log = 1 / np.sqrt(abs(d)), np.log(abs(d))
    want = [np.exp(d), np.exp2(d), 1 / d, root, 1 / d, log, np.clip(d, 0, 1), np.maximum(d, 0.5)]
    want += [d * d + 1, np.rint(d), np.maximum(d, 0.25), ones]
    assert np.allclose(out, want, rtol=1e-6, atol=1e-7)


def test_bits(language):
    x = np.array([0x01234568, 0x89ABCDEF], np.uint32)
    out = np.zeros(8, np.uint32)
    assert language.run_bits(x, out).ok
    brev = int(f"{0x01234568:032b}"[::-1], 2)
    high = (0x01234568 * 0x89ABCDEF) >> 32
    funnel = ((0x89ABCDEF << 32 | 0x01234568) << 8 >> 32) & 0xFFFFFFFF
    # __byte_perm 0x7210: bytes 0, 1, 2 of x and byte 3 of y
    assert [hex(v) for v in out] == [hex(v) for v in (brev, 7, 4, 0x89234568, high, funnel, 3, 0xFFFFFFFF)]


def test_printf_comes_in_the_order_of_the_blocks(language, capsys):
    out = np.zeros(6, np.int32)
    report = language.run_talk(out, 6)
    assert report.ok and (out == 2 * np.arange(6)).all()
    assert report.printed == "".join(f"block {b} of 6\n" for b in range(6))
    assert capsys.readouterr().out == report.printed


def test_a_flag_between_warps(language):
    out = np.zeros(3, np.int32)
    language.run_handshake(out)
    assert out.tolist() == [42, 1, 43]


def test_barrier_of_the_threads_that_are_left(language):
    a = np.arange(64, dtype=np.int32)
    out = np.zeros_like(a)
    report = language.run_early_exit(a, out, 40)  # the hardware goes on without them; CUDA does not promise it
    assert [f.kind for f in report.findings] == ["exited-threads"]
    assert re.search("only 40 of 64 threads .* thread 40 has returned", report.findings[0].message)
    assert (out[:40] == a[:40][::-1]).all() and not out[40:].any()


def test_attributes_of_the_device(language):
    out = np.zeros(2, np.int32)
    language.launch("query", out, multiprocessors=78, shared_limit=101376)
    assert out.tolist() == [78, 101376]


@pytest.mark.parametrize(
    "grid, block, words",
    [
        ((1, 70000, 1), (32, 1, 1), "grid.y is 70000; the limit is 65535"),
        ((1, 1, 65536), (32, 1, 1), "grid.z is 65536"),
        ((0, 1, 1), (32, 1, 1), "no blocks"),
        ((1, 1, 1), (0, 1, 1), "no threads"),
        ((1, 1, 1), (33, 32, 1), "1056 threads; the limit is 1024"),
        ((1, 1, 1), (1, 1, 65), "block.z is 65"),
    ],
)
def test_launches_that_a_gpu_refuses(language, grid, block, words):
    with pytest.raises(LaunchError, match=words) as caught:
        language.run_indices(np.zeros(6, np.int32), *grid, *block)
    assert caught.value.report.findings[0].kind == "launch-configuration"
    assert "indices" in str(caught.value)


def test_shared_memory_limits(language):
    a = np.zeros(1024, np.float32)
    module_limit = 1024 * 2 * 4
    assert language.run_dynamic(a, a.copy(), 1024).ok
    with pytest.raises(LaunchError, match=f"{module_limit} bytes of dynamic shared memory a block; the limit is 4096"):
        language.launch("run_dynamic", a, a.copy(), 1024, shared_limit=4096)


EVERY_HEADER = "".join(
    f'#include "{name}"\n' for name in ("simt.h", "problem.cuh", "wgmma.cuh", "tensor_map.cuh", "ptx_cluster.cuh")
)


@pytest.mark.parametrize("how", ["defines", "#define"])
@pytest.mark.parametrize("check", [False, True])
def test_single_letters_are_the_readers(how, check):
    """Macros of every capital letter, given with the build or in the text, mean in the reader's code what they say."""
    macros = {letter: 8 + number for number, letter in enumerate(string.ascii_uppercase)} | {"T": "float"}
    macros |= dict.fromkeys(["BYTES", "PENDING", "TRANS_A", "TRANS_B", "TYPE", "Bits", "Closure", "H2", "V4", "V8"], 64)
    text = "".join(f"#define {k} {v}\n" for k, v in macros.items()) if how == "#define" else ""
    text += (
        EVERY_HEADER
        + """
__global__ void add(T* x) { atomicAdd(&x[threadIdx.x % N], T(M) + __shfl_xor_sync(~0u, threadIdx.x, 1) * 0); }
extern "C" int run(float* x) { add<<<A, 32>>>(x); return D; }
"""
    )
    folder = Path(kernels.__file__).parent
    built = simt.compile_cuda(text, check=check, defines=macros if how == "defines" else {}, include_dirs=[folder])
    x = np.zeros(32, np.float32)
    with pytest.raises(simt.LaunchError, match=f"run returned {macros['D']}"):
        built.run(x)
    assert not built.build.warnings
