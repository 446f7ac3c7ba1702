"""mbarriers, TMA and bulk copies: kernels/hopper_copies.cu against numpy, and what kernels/hopper_broken.cu does wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashlab.simt import CompileError, HostError, compile_cuda

from .conftest import module
from .tma_model import SWIZZLES, Box

UINT8, UINT16, UINT32, UINT64, FLOAT16, FLOAT32, BFLOAT16 = 0, 1, 2, 4, 6, 7, 9
ITEMS = {UINT8: 1, UINT16: 2, UINT32: 4, UINT64: 8, FLOAT16: 2, FLOAT32: 4, BFLOAT16: 2}


@pytest.fixture(params=["fast", "check"], scope="module")
def copies(request):
    return module("hopper_copies.cu", request.param == "check")


# ---- boxes -----------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("seed", range(60))
def test_a_box_lies_in_shared_memory_as_the_manual_says(copies, seed):
    box, other, kind, shift = random_box(seed)
    x = memory_of(box, seed)
    out = np.zeros(box.bytes, np.uint8)
    report = copies.run_box(x, x.copy(), out.view(np.uint32), numbers(box, other, kind, shift, 0))
    assert not report.findings, report
    wanted = box.load(x, shift)
    np.testing.assert_array_equal(out, wanted)
    assert report.counters["tma_load_bytes"] == box.bytes


@pytest.mark.parametrize("seed", range(60, 90))
def test_a_store_takes_it_back_and_skips_what_lies_outside(copies, seed):
    box, other, kind, shift = random_box(seed)
    x, y = memory_of(box, seed), memory_of(box, seed + 1000)
    wanted = y.copy()
    report = copies.run_box(x, y, np.zeros(4, np.uint32), numbers(box, other, kind, shift, 1))
    assert not report.findings, report
    Box(box.item, box.sizes, box.strides, box.spans, box.every, other, box.swizzle).store(
        box.load(x, shift), shift, wanted
    )
    np.testing.assert_array_equal(y, wanted)


def test_the_swizzle_of_128_bytes_is_the_table_of_the_manual(copies):
    """Which 16-byte chunk of the row lies where: the first rows of the table, chunk numbers from left to right."""
    table = {0: "01234567", 1: "10325476", 2: "23016745", 3: "32107654", 7: "76543210"}
    box = Box(4, (32, 8), (128,), (32, 8), (1, 1), (0, 0), 3)
    x = np.arange(256, dtype=np.uint32)
    out = np.zeros(256, np.uint32)
    copies.run_box(x.view(np.uint8), np.zeros(1024, np.uint8), out, numbers(box, (0, 0), UINT32, 0, 0))
    rows = out.reshape(8, 8, 4)[:, :, 0] // 4 - 8 * np.arange(8)[:, None]
    for row, chunks in table.items():
        assert "".join(map(str, rows[row])) == chunks


@pytest.mark.parametrize(("kind", "dtype"), [(FLOAT32, "float32"), (FLOAT16, "float16"), (BFLOAT16, "bfloat16")])
def test_a_reduction_adds_in_the_type_of_the_map(copies, kind, dtype):
    item = ITEMS[kind]
    box = Box(item, (24, 9), (64,), (16, 6), (1, 1), (-3, -2), 0) if item == 2 else \
        Box(item, (13, 9), (64,), (8, 6), (1, 1), (-3, -2), 0)  # fmt: skip
    other = (box.sizes[0] - 6, 5)
    kind_of = getattr(torch, dtype)
    torch.manual_seed(0)
    x, y = (torch.randn(9 * 64 // item).to(kind_of) for _ in range(2))
    there = np.zeros(9 * 64, np.uint8)
    Box(item, box.sizes, box.strides, box.spans, box.every, other, 0).store(
        box.load(x.view(torch.uint8).numpy(), 0), 0, there
    )
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
    assert report.counters["tma_loads"] == 2 * tiles
    assert report.counters["mbarrier_waits"] == 2 * 3 * tiles  # of the producer and of two consumer warps
    assert 4 * tiles <= report.counters["mbarrier_waits_under_way"] <= report.counters["mbarrier_waits"]


def test_stores_from_one_buffer(copies):
    y = np.full(5 * 256, np.nan, np.float32)
    report = copies.run_staged_store(y, 5)
    assert not report.findings, report
    np.testing.assert_array_equal(y, np.arange(5 * 256))


def test_an_mbarrier_in_place_of_syncthreads(copies):
    out = np.zeros(96, np.int32)
    report = copies.run_as_barrier(out, 5)
    assert not report.findings, report
    assert (out == 15).all()
