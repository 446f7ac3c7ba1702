"""mbarriers, TMA and bulk copies: kernels/hopper_copies.cu against numpy; mistakes in a ring; maps that are refused."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from flashlab.simt import CompileError, HostError, IllegalAccess, compile_cuda

from .conftest import both_builds, marked, module, report_of

UINT8, UINT16, UINT32, UINT64, FLOAT16, FLOAT32, BFLOAT16 = 0, 1, 2, 4, 6, 7, 9
ITEMS = {UINT8: 1, UINT16: 2, UINT32: 4, UINT64: 8, FLOAT16: 2, FLOAT32: 4, BFLOAT16: 2}
SWIZZLES = {0: 1, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> bytes of a row that is permuted

copies = both_builds("hopper_copies.cu")


# ---- boxes: what loads and stores give is compared with an H200 by test_hopper_probe.py -------------
@dataclasses.dataclass(frozen=True)
class Box:
    """A tensor in an array of bytes, and one box of it. Dimension 0 is the innermost, as in a tensor map."""

    item: int  # bytes of an element
    sizes: tuple[int, ...]  # of the tensor, in elements
    strides: tuple[int, ...]  # bytes from one element to the next in dimensions 1, 2 ...
    spans: tuple[int, ...]  # of the box, in elements of the tensor
    every: tuple[int, ...]  # the element strides; dimension 0's is ignored
    corner: tuple[int, ...]  # coordinates of the box's first element
    swizzle: int  # CUtensorMapSwizzle

    @property
    def bytes(self) -> int:
        counts = (-(-span // step) for span, step in zip(self.spans, (1, *self.every[1:]), strict=True))
        return math.prod(counts) * self.item


def random_box(seed: int) -> tuple[Box, tuple[int, ...], int, int]:
    """A box of any rank, type and swizzle; another corner; the type; how far behind a multiple of 1024 it goes."""
    draw = np.random.default_rng(seed)
    rank = 1 + seed % 5
    swizzle = int(draw.integers(0, 4))
    kind = int(draw.choice([UINT8, UINT16, UINT32, UINT64]))
    item = ITEMS[kind]
    width = SWIZZLES[swizzle] // item if swizzle else 16 // item * int(draw.integers(1, 5))
    room = 8192 // (width * item)
    spans, every = [width], [int(draw.integers(1, 9))]
    for _ in range(1, rank):
        every.append(int(draw.choice([1, 1, 1, 2, 3])))
        span = int(draw.integers(1, min(room * every[-1], 12) + 1))
        spans.append(span)
        room = max(1, room // -(-span // every[-1]))
    sizes = [int(draw.integers(max(1, width - 3), 2 * width + 4)), *(int(draw.integers(1, 9)) for _ in range(1, rank))]
    strides, step = [], -(-sizes[0] * item // 16) * 16
    for size in sizes[1:]:
        step += 16 * int(draw.integers(0, 3))  # a gap
        strides.append(step)
        step *= size
    corner, other = (tuple(int(draw.integers(-s, n + 2)) for s, n in zip(spans, sizes, strict=True)) for _ in range(2))
    piece = max(1, 16 // item)  # a GPU takes a box that begins at a multiple of 16 bytes, no other
    corner, other = ((at[0] // piece * piece, *at[1:]) for at in (corner, other))
    box = Box(item, tuple(sizes), tuple(strides), tuple(spans), tuple(every), corner, swizzle)
    return box, other, kind, 128 * int(draw.integers(0, 9))


def numbers(box: Box, other: tuple[int, ...], kind: int, shift: int, how: int) -> np.ndarray:
    def five(values) -> list[int]:
        return [*values, *[1] * (5 - len(values))]

    rows = (box.sizes, box.strides, box.spans, box.every, box.corner, other)
    return np.array([len(box.sizes), box.swizzle, kind, *[n for row in rows for n in five(row)], shift, how], np.int32)


def memory_of(box: Box, seed: int) -> np.ndarray:
    end = box.sizes[0] * box.item + sum((n - 1) * s for n, s in zip(box.sizes[1:], box.strides, strict=True))
    return np.random.default_rng(seed).integers(0, 256, -(-end // 256) * 256, dtype=np.uint8)


@pytest.mark.parametrize("how", [0, 1])
def test_a_box_begins_at_a_multiple_of_16_bytes_and_where_it_is_stored_not_before_the_tensor(copies, how):
    """As an H200 wants it, which stops with "illegal instruction"."""
    box, other, kind, shift = random_box(2)
    crooked = dataclasses.replace(box, corner=(box.corner[0] - (how == 0), *box.corner[1:]))
    x, out = memory_of(box, 2), np.zeros(box.bytes, np.uint8)
    with pytest.raises(IllegalAccess, match="corner that lies (14|2) bytes beyond a multiple of 16 in dimension 0"):
        copies.run_box(x, x.copy(), out.view(np.uint32), numbers(crooked, (other[0] + 1, *other[1:]), kind, shift, how))
    with pytest.raises(IllegalAccess, match="store-corner: .* gives tma_store .* coordinate -3 in dimension 2"):
        copies.run_box(x, x.copy(), np.zeros(4, np.uint32), numbers(box, (0, 0, -3), kind, shift, 1))


@pytest.mark.parametrize(("kind", "dtype"), [(FLOAT32, "float32"), (FLOAT16, "float16"), (BFLOAT16, "bfloat16")])
def test_a_reduction_adds_in_the_type_of_the_map(copies, kind, dtype):
    item = ITEMS[kind]
    box = Box(item, (24, 9), (64,), (16, 6), (1, 1), (-8, -2), 0) if item == 2 else \
        Box(item, (12, 9), (64,), (8, 6), (1, 1), (-4, -2), 0)  # fmt: skip
    other = (4, 5) if item == 4 else (8, 5)
    kind_of = getattr(torch, dtype)
    torch.manual_seed(0)
    x, y = (torch.randn(9 * 64 // item).to(kind_of) for _ in range(2))
    there = np.zeros(9 * 64, np.uint8)
    copies.run_box(x.view(torch.uint8), there, np.zeros(4, np.uint32), numbers(box, other, kind, 0, 1))
    wanted = y + torch.from_numpy(there).view(kind_of)  # what lies outside adds 0
    report = copies.run_box(x.view(torch.uint8), y.view(torch.uint8), np.zeros(4, np.uint32),
                            numbers(box, other, kind, 0, 2))  # fmt: skip
    assert not report.findings, report
    assert (there != 0).any() and torch.equal(y, wanted)
    assert report.counters["tma_reduces"] == 1


# ---- bytes in a row, stages, barriers --------------------------------------------------------------
def test_bytes_in_a_row(copies):
    x, y = np.arange(1024, dtype=np.float32), np.full(1024, np.nan, np.float32)
    report = copies.run_rows(x, y, 1024)
    assert not report.findings, report
    np.testing.assert_array_equal(y, 2 * x)
    counters = report.counters
    assert (counters["bulk_loads"], counters["bulk_load_bytes"]) == (8, 4096)
    assert (counters["bulk_stores"], counters["bulk_store_global_bytes"]) == (4, 4096)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 11])
def test_a_ring_of_stages(copies, tiles):
    x = np.random.default_rng(tiles).random((2, tiles, 8, 2, 32), np.float32)
    sums = np.full((2, 2, 32), np.nan, np.float32)
    report = copies.run_ring(x.reshape(-1, 32), sums, 2, tiles, 0)
    assert not report.findings, report
    weights = np.arange(1, tiles + 1, dtype=np.float32)[:, None, None, None]
    np.testing.assert_allclose(sums, (x * weights).sum((1, 2)), rtol=1e-5)
    assert (report.counters["tma_loads"], report.counters["tma_load_bytes"]) == (2 * tiles, 4096 * tiles)
    assert report.counters["mbarrier_waits"] == 2 * 3 * tiles  # of the producer and of two consumer warps
    assert 4 * tiles <= report.counters["mbarrier_waits_under_way"] <= report.counters["mbarrier_waits"]


# ---- what is wrong is found ------------------------------------------------------------------------
LINES = marked("hopper_copies.cu")
IN_USE = "the stage is still in use"
# mistake, kind, line, the other line, words
WATCHED = [
    (2, "stage-overwritten", "refill", "consumer reads", IN_USE),
    (3, "stage-overwritten", "refill", "consumer reads", IN_USE),
    (5, "read-before-wait", "consumer reads", "refill", "without having waited for the phase"),
]
BOTH = [  # the phase's numbers
    (1, "deadlock", "producer waits", "consumer waits",
     rf"Warp 0 waits in line .* the mbarrier of line {LINES['init empty']} \(empty at byte 0\).* nobody has arrived at "
     rf"it .*, and no phase has ended yet.*Warps 1-2 wait in line {LINES['consumer waits']} for parity 0"),
    (4, "deadlock", "producer waits", None, "1 of 3 arrivals missing"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "check"), [(x, check) for check in (True, False) for x in BOTH + WATCHED * check])
def test_a_mistake_in_a_ring_is_found(expected, check):
    """A finding of that kind names these lines, and says that. Other mistakes: test_hopper_memory.py."""
    mistake, kind, line, other, words = expected
    x, sums = np.zeros((11 * 16, 32), np.float32), np.zeros((2, 32), np.float32)
    found = report_of(module("hopper_copies.cu", check).run_ring, x, sums, 1, 11, mistake).findings
    wanted = next(f for f in found if f.kind == kind and f.line == LINES[line])
    assert wanted.other_line == (LINES[other] if other else wanted.other_line) and re.search(words, wanted.message)


LOADING = """#include "ptx_sm90.cuh"
__global__ void k(const float* x, float* sums, int how) {
    __shared__ __align__(128) char tile[512];
    __shared__ uint64_t bars[2];
    const uint32_t full = smem_u32(bars), empty = full + 8;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mbarrier_init(full, 1), mbarrier_init(empty, 1), fence_mbarrier_init();
    __syncthreads();
    float c[4] = {};
    for (int i = 0; i < 3; i++) {
        if (threadIdx.x == 32) {
            mbarrier_wait(empty, i % 2 ^ 1);
            mbarrier_arrive_expect_tx(full, 512);
            bulk_load(smem_u32(tile), x + 128 * i, 512, full);  // refill
        }
        if (threadIdx.x >= 32) continue;
        mbarrier_wait(full, i % 2);
        uint32_t r[4];
        ldmatrix_x4(r, smem_u32(tile) + lane * 16);  // read
        if (how == 1) fence_proxy_async();
        if (how == 2) mma_m16n8k16(c, r, r[0], r[1]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty);
        if (how < 2) mma_m16n8k16(c, r, r[0], r[1]);
    }
    if (threadIdx.x < 32) sums[threadIdx.x] = c[0];
}
extern "C" void run(const float* x, float* sums, int how) { k<<<1, 64>>>(x, sums, how); }
"""


@pytest.mark.parametrize("how", [0, 1, 2])
def test_an_arrival_does_not_wait_for_ldmatrix(how):
    """0: the registers are used behind the arrival; 1: so, but with a fence before it; 2: they are used before it."""
    x, sums = np.zeros(3 * 128, np.float32), np.zeros(32, np.float32)
    report = report_of(compile_cuda(LOADING, check=True).run, x, sums, how)
    assert [f.kind for f in report.findings] == ["stage-overwritten"] * (how == 0)
    for f in report.findings:
        lines = LOADING.splitlines()
        assert "// refill" in lines[f.line - 1] and "// read" in lines[f.other_line - 1]
        assert "an arrival at an mbarrier does not" in f.message


def test_a_map_that_is_no_grid_constant_is_refused():
    kernel = """#include "ptx_sm90.cuh"
__global__ void k(int n, PLACE CUtensorMap map) { tma_prefetch(&map); }
extern "C" void run() {}
"""
    compile_cuda(kernel.replace("PLACE", "const __grid_constant__"))
    wrong = {"const": "copy in local memory", "__grid_constant__": "a __grid_constant__ parameter is const"}
    for place, says in wrong.items():
        with pytest.raises(CompileError, match=f"kernel.cu:2: error: .*{says}"):
            compile_cuda(kernel.replace("PLACE", place))


# ---- tensor maps -----------------------------------------------------------------------------------
GOOD = {"rank": 2, "type": FLOAT16, "swizzle": 3, "shift": 0, "n0": 64, "n1": 64, "stride": 128, "_": 0,
        "box0": 64, "box1": 64, "every0": 1, "every1": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shift": 8}, "its base is 8 bytes beyond a multiple of 16"),
        ({"rank": 6}, "its rank is 6; a tensor has 1 to 5 dimensions"),
        ({"type": 11}, "its data type 11 is none of"),
        ({"swizzle": 5}, "its swizzle 5 is none of"),
        ({"n1": 0}, "the size of dimension 1 is 0"),
        ({"stride": 120}, "the stride of dimension 1 is 120 bytes; it has to be a multiple of 16"),
        ({"stride": 1 << 40}, "the stride of dimension 1 is 1099511627776 bytes; it has to be less than 2.40"),
        ({"box1": 257}, "the box of dimension 1 is 257; it is 1 to 256"),
        ({"box1": 0}, "the box of dimension 1 is 0"),
        ({"every1": 9}, "the element stride of dimension 1 is 9; it is 1 to 8"),
        ({"box0": 12, "swizzle": 0}, "the box is 24 bytes wide in dimension 0; that has to be a multiple of 16"),
        ({"box0": 128}, "the box is 256 bytes wide in dimension 0; with a 128-byte swizzle"),
        ({"swizzle": 2}, "the box is 128 bytes wide in dimension 0; with a 64-byte swizzle"),
        ({"box0": 32}, "the box is 64 bytes wide in dimension 0; with a 128-byte swizzle it has to be as wide as that"),
    ],
)
def test_a_map_that_is_refused(change, says):
    copies = module("hopper_copies.cu", False)
    x = np.zeros(4096, np.float32)
    copies.run_map(x, np.array([*GOOD.values()], np.int64))
    with pytest.raises(HostError, match=f"throws an exception in line .*the tensor map is refused: {says}"):
        copies.run_map(x, np.array([*{**GOOD, **change}.values()], np.int64))
