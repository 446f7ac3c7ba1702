"""The counts, against what can be worked out by hand and against what Nsight Compute read from an H200."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flashlab.simt import compile_cuda, process

from .conftest import KERNELS, marked, module

LINES = marked("counting.cu")


def run(entry: str, *args, **options):
    report = getattr(module("counting.cu"), entry)(*args, **options)
    assert report.ok, report
    return report


@pytest.mark.parametrize("pad", [0, 1])
def test_transpose_with_and_without_padding(pad):
    n = 64
    a, out = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32), np.zeros((n, n), np.float32)
    report = run("run_transpose", a, out, n, pad)
    assert (out == a.T).all()
    c = report.counters
    warps = n * n // 32  # one store and one load a warp for each 32 floats
    assert c["shared_stores"] == c["shared_store_wavefronts"] == c["shared_store_ideal"] == warps
    assert c["shared_loads"] == c["shared_load_ideal"] == warps
    assert c["shared_load_wavefronts"] == (warps if pad else 32 * warps)
    assert c.bank_conflicts == (0 if pad else 31 * warps)
    # 128 contiguous bytes are 4 sectors
    for kind in ("load", "store"):
        assert c[f"global_{kind}s"] == warps
        assert c[f"global_{kind}_sectors"] == c[f"global_{kind}_ideal"] == 4 * warps
        assert c[f"global_{kind}_bytes"] == 4 * n * n
    assert c["barriers"] == 4  # once a block
    assert report.by_line[LINES["out"]].bank_conflicts == c.bank_conflicts
    assert report.by_line[LINES["in"]].bank_conflicts == 0


@pytest.mark.parametrize("swizzle", [0, 1])
def test_ldmatrix_with_and_without_the_swizzle(swizzle):
    tile = np.random.default_rng(0).integers(0, 65536, (16, 64), dtype=np.uint16)
    out = np.zeros(32, np.uint32)
    report = run("run_fragments", tile, out, swizzle)
    c = report.by_line[LINES["fragments"]]
    # 4 ldmatrix.x4, each 4 tiles; the 8 rows of a tile start in the same bank, or each 16 bytes further
    assert c["ldmatrix"] == 4 and c["ldmatrix_ideal"] == 16 and c["ldmatrix_bytes"] == 2048
    assert c["ldmatrix_wavefronts"] == (16 if swizzle else 128)
    copies = report.by_line[LINES["copies"]]
    assert copies["cp_async"] == 4 and copies["cp_async_bytes"] == 2048 and copies["cp_async_sectors"] == 64


@pytest.mark.parametrize(
    "entry, dtype, per_lane, stride, lanes, sectors",
    [
        ("run_strided_float", np.float32, 1, 0, 32, 1),
        ("run_strided_float", np.float32, 1, 1, 9, 2),
        ("run_strided_half", np.float16, 1, 1, 32, 2),
        ("run_strided_half", np.float16, 1, 16, 32, 32),
        ("run_strided_float4", np.float32, 4, 1, 32, 16),
        ("run_strided_float4", np.float32, 4, 2, 32, 32),
    ],
)
def test_sectors_of_strided_loads(entry, dtype, per_lane, stride, lanes, sectors):
    data, out = np.zeros(32 * 32 * per_lane, dtype), np.zeros(32 * per_lane, dtype)
    c = run(entry, data, out, stride, lanes).counters
    size = per_lane * data.itemsize
    assert c["global_loads"] == c["global_stores"] == 1
    assert c["global_load_sectors"] == sectors
    assert c["global_load_bytes"] == c["global_store_bytes"] == lanes * size
    assert c["global_store_sectors"] == -(-lanes * size // 32)


def test_a_view_that_does_not_start_on_a_sector():
    data, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    assert run("run_strided_float", data[1:], out, 1, 32).counters["global_load_sectors"] == 5
    assert run("run_strided_float", data[8:], out, 1, 32).counters["global_load_sectors"] == 4


def test_lanes_that_leave_a_loop_early():
    data, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    c = run("run_ragged", data, out).counters
    assert (out == np.cumsum(data)).all()
    assert c["global_loads"] == 32 and c["global_load_bytes"] == 4 * 32 * 33 // 2
    assert c["global_load_sectors"] == 32  # each a broadcast to the lanes that are left


def test_counts_by_kernel_and_by_line():
    data, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    report = run("run_two", data, out)
    assert [x.kernel for x in report.launches] == ["first", "second"]
    assert [x.grid for x in report.launches] == [(3, 1, 1), (1, 1, 1)]
    assert [x.counters["global_loads"] for x in report.launches] == [6, 1]
    assert [x.counters["barriers"] for x in report.launches] == [0, 2]
    assert report.by_line[LINES["helper"]]["global_loads"] == 6
    total = {}
    for counters in report.by_line.values():
        for name, value in counters.items():
            total[name] = total.get(name, 0) + value
    assert total == dict(report.counters)


def test_a_fast_build_counts_what_the_runtime_sees():
    n = 64
    a, out = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
    report = module("counting.cu", False).run_transpose(a, out, n, 1)
    assert not report.check and dict(report.counters) == {"barriers": 4}
    report = module("counting.cu", False).run_fragments(np.zeros((16, 64), np.float16), np.zeros(32, np.uint32), 0)
    assert report.counters["ldmatrix_wavefronts"] == 128 and report.counters["cp_async_sectors"] == 64


RECORDED = json.loads((KERNELS.parent / "data" / "bank_probe_h200.json").read_text())


def test_wavefronts_are_those_of_an_h200():
    """273 patterns of addresses: the emulator and Nsight Compute agree on each, conflicts included."""
    probe = module("bank_probe.cu")
    names = {0: "shared_load", 1: "shared_store", 2: "ldmatrix", 3: "stmatrix"}
    wrong = []
    for row in RECORDED["rows"]:
        operation, size, _, *recorded, offsets = row
        report = probe.probe(operation, size, np.array(offsets, np.int32), np.zeros(512, np.uint8), None)
        c, name = report.counters, names[operation]
        wavefronts, ideal = c[f"{name}_wavefronts"], c[f"{name}_ideal"]
        if [wavefronts, wavefronts - ideal] != recorded:
            wrong.append((row, wavefronts, wavefronts - ideal))
    assert len(RECORDED["rows"]) == 273 and not wrong


@pytest.mark.long
def test_a_lane_far_ahead_fills_no_memory():
    """What it asks for is not kept for the lanes that never come there."""
    loads = 500_000
    built = compile_cuda("""#include "simt.h"
__global__ void alone(int* p, int loads) {
    if (threadIdx.x == 0) for (int i = 0; i < loads; i++) p[32] += p[i & 31];
    __syncwarp();
    p[33 + threadIdx.x] = 1;
}
extern "C" void run(int* p, int loads) { alone<<<1, 32>>>(p, loads); }
""", check=True)  # fmt: skip
    report = built.run(np.zeros(96, np.int32), loads)
    status = Path(f"/proc/{process._processes[str(built.build.library)]._popen.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) < 300 << 10
    assert report.ok and report.counters["global_loads"] == 2 * loads
