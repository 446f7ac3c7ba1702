"""mbarriers, TMA and bulk copies: kernels/hopper_copies.cu against numpy, and the mistakes of hopper_broken.cu."""

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
def test_a_box_begins_at_a_multiple_of_16_bytes(copies, how):
    """As an H200 wants it, which stops with "illegal instruction"."""
    box, other, kind, shift = random_box(2)
    crooked = dataclasses.replace(box, corner=(box.corner[0] - (how == 0), *box.corner[1:]))
    x, out = memory_of(box, 2), np.zeros(box.bytes, np.uint8)
    with pytest.raises(IllegalAccess, match="corner that lies (14|2) bytes beyond a multiple of 16 in dimension 0"):
        copies.run_box(x, x.copy(), out.view(np.uint32), numbers(crooked, (other[0] + 1, *other[1:]), kind, shift, how))


def test_a_store_does_not_begin_before_the_tensor(copies):
    """As an H200 wants it, which stops with "illegal instruction"."""
    box, other, kind, shift = random_box(2)
    x = memory_of(box, 2)
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
    report = copies.run_ring(x.reshape(-1, 32), sums, 2, tiles)
    assert not report.findings, report
    weights = np.arange(1, tiles + 1, dtype=np.float32)[:, None, None, None]
    np.testing.assert_allclose(sums, (x * weights).sum((1, 2)), rtol=1e-5)
    assert (report.counters["tma_loads"], report.counters["tma_load_bytes"]) == (2 * tiles, 4096 * tiles)
    assert report.counters["mbarrier_waits"] == 2 * 3 * tiles  # of the producer and of two consumer warps
    assert 4 * tiles <= report.counters["mbarrier_waits_under_way"] <= report.counters["mbarrier_waits"]


# ---- what is wrong is found ------------------------------------------------------------------------
LINES = marked("hopper_broken.cu")
X = np.arange(48 * 32, dtype=np.float32)


def findings_of(entry: str, mode: int, check: bool = True, y: np.ndarray | None = None) -> list:
    """Of a kernel of hopper_broken.cu."""
    y = np.zeros(256, np.float32) if y is None else y
    return report_of(getattr(module("hopper_broken.cu", check), f"run_{entry}"), X, y, mode).findings


UNWAITED = "reads in line .* that a tma_load of thread 0 in line .* fills, without having waited"
IN_USE = "the stage is still in use"  # released before it is read; by lane 0, before the other lanes have read
NO_FENCE = "with no fence_proxy_async between"  # none; and one that comes before the writes
# entry, mode, kind, line, the other line, words
WATCHED = [
    ("load", 0, "read-before-wait", "no wait", "load", UNWAITED),
    ("load", 1, "read-before-wait", "only lane 0 waits", "load", UNWAITED),
    ("load", 4, "read-before-wait", "the phase before", "load", UNWAITED + " for the phase"),
    ("load", 5, "read-before-wait", "load", "nobody told this warp", "has read in line"),
    ("load", 5, "uninitialised-shared", "nobody told this warp", None, ""),
    ("load", 6, "stage-overwritten", "store over a load", "load", "writes in line .* without having"),
    ("load", 10, "stage-overwritten", "second load", "load", "fills with tma_load .* a tma_load of"),
    ("ring", 1, "stage-overwritten", "refill", "consumer reads", IN_USE),
    ("ring", 2, "stage-overwritten", "refill", "consumer reads", IN_USE),
    ("ring", 4, "read-before-wait", "consumer reads", "refill", "without having waited for the phase"),
    ("setup", 0, "mbarrier-fence", "load of setup", None, "no fence_mbarrier_init since thread 0 made it"),
    ("setup", 1, "mbarrier-too-early", "wait of setup", None, "with no barrier since thread 0 made it"),
    ("setup", 2, "mbarrier-missing", "wait of setup", None, "no mbarrier at that place: full at byte 0"),
    ("setup", 6, "mbarrier-missing", "after inval", None, "there is no mbarrier"),
    ("setup", 11, "tensor-map", "no map", None, "something that is no tensor map"),
    ("setup", 12, "shared-out-of-bounds", "beyond the array", None, "the last 128 of 1024 lie beyond the end of tile"),
    ("setup", 14, "bulk-misaligned", "off by 4", None, "of global memory 4 bytes beyond a multiple of 16"),
    ("store", 0, "proxy-fence", "store", "fill", NO_FENCE),
    ("store", 1, "proxy-fence", "store", "fill", NO_FENCE),
    ("store", 3, "race", "fill", "store", "read with tma_store in line .*, with no barrier between"),
    ("store", 4, "never-waited", "store", None, "was never committed"),
    ("store", 5, "never-waited", "store", None, "was never waited for .bulk_wait_read."),
    ("store", 6, "stage-overwritten", "too early", "store", "still be reading: only after bulk_wait_read is it free"),
    ("store", 7, "read-before-wait", "read of y", "store",
     "reads in line .* element 40 of y, where a tma_store of thread 0 .* bulk_wait<0> for all groups"),
    ("store", 9, "global-race", "store", "store", "thread 0 of block 1 .* nothing orders two blocks"),
    ("store", 10, "read-only", "store", None, "x, which the entry declares const"),
    ("zeros_first", 0, "proxy-fence", "over zeros", "zero", "nor come after it"),
    ("wrong_type", 0, "reduce-type", "reduce", None, "type that it cannot add"),
    ("beyond", 0, "global-out-of-bounds", "beyond the end", None,
     r"reads with tma_load .* element 1536 of x \(shape \[1536\]\), 128 bytes past its end"),
]  # fmt: skip
BOTH = [  # the phase's numbers
    ("load", 2, "mbarrier-bytes", "load", None,
     r"bring 1024 bytes to a phase of the mbarrier of line \d+ \(full at byte 0\) .* expects 1008"),
    ("load", 3, "deadlock", "wait", None,
     r"Warps 0-1 wait in line \d+ for parity 0 of the mbarrier of line \d+ \(full at byte 0\): phase 0 is under "
     "way, 1040 bytes expected, 1024 brought"),
    ("load", 7, "mbarrier-arrivals", "one too many", None, "has its one arrival already and waits for 1024 bytes"),
    ("load", 8, "deadlock", "wait", None, "phase 0 is under way, 1 of 3 arrivals missing"),
    ("load", 9, "never-waited", "load", None, "nobody has waited for its mbarrier"),
    ("load", 11, "mbarrier-number", "wait", None, "with the parity 2; it is 0 or 1"),
    ("load", 12, "deadlock", "another phase", None,
     "nobody has arrived at it .1 arrival missing., and phase 0, of parity 0, has ended"),
    ("ring", 0, "deadlock", "producer waits", "consumer waits",
     rf"Warp 0 waits in line .* the mbarrier of line {LINES['init empty']} \(empty at byte 0\).* nobody has arrived at "
     rf"it .*, and no phase has ended yet.*Warp 1 waits in line {LINES['consumer waits']} for parity 0"),
    ("ring", 3, "deadlock", "producer waits", None, "1 of 2 arrivals missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "check"),
    [pytest.param(x, check, id=f"{x[0]}-{x[1]}-{check}") for check in (True, False) for x in BOTH + WATCHED * check],
)
def test_a_mistake_is_found(expected, check):
    """A finding of that kind names these lines, and says that."""
    entry, mode, kind, line, other, words = expected
    found = findings_of(entry, mode, check)
    wanted = [f for f in found if f.kind == kind and f.line == LINES[line]]
    assert wanted, (kind, LINES[line], [str(f) for f in found])
    assert wanted[0].other_line == (LINES[other] if other else wanted[0].other_line), wanted[0]
    assert re.search(words, wanted[0].message), wanted[0].message
    assert expected != WATCHED[0] or len(wanted) == 1


@pytest.mark.parametrize("mode", [0, 1])
def test_what_comes_after_an_arrival_is_not_released(mode):
    races = [f for f in findings_of("after_arrival", mode) if f.kind == "race"]
    assert [{f.line, f.other_line} for f in races] == [{LINES["not released"], LINES["after the arrival"]}]


@pytest.mark.parametrize("mode", [2, 8])
def test_a_proxy_fence_by_the_one_who_stores_or_by_those_who_wrote(mode):
    assert not findings_of("store", mode)


def test_a_load_over_zeros_behind_a_proxy_fence():
    y = np.zeros(64, np.float32)
    assert not findings_of("zeros_first", 1, y=y) and (y == X[:64]).all()


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
    broken = module("hopper_broken.cu", False)
    x = np.zeros(4096, np.float32)
    broken.run_map(x, np.array([*GOOD.values()], np.int64))
    with pytest.raises(HostError, match=f"throws an exception in line .*the tensor map is refused: {says}"):
        broken.run_map(x, np.array([*{**GOOD, **change}.values()], np.int64))
