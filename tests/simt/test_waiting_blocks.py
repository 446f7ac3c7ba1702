"""Blocks that wait for each other: as many as a GPU has at a time go on, however few processors there are."""

from __future__ import annotations

import numpy as np
import pytest

from flashlab import simt

TEXT = """#include "simt.h"
__device__ void grid_barrier(int* count, int target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        FENCE;
        atomicAdd(count, 1);
        while (POLL < target) PAUSE;
        FENCE;
    }
    __syncthreads();
}
__global__ void reverse(int* a, int* b, int* count, int rounds) {
    const int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int r = 1; r <= rounds; r++) {
        a[i] = r * 1000 + i;
        grid_barrier(count, (2 * r - 1) * gridDim.x);
        b[i] = a[n - 1 - i];
        grid_barrier(count, 2 * r * gridDim.x);
    }
}
extern "C" int run(int* a, int* b, int* count, int blocks, int rounds) {
    reverse<<<blocks, 64>>>(a, b, count, rounds);
    return cudaGetLastError();
}
"""
POLLS = {
    "volatile": {"POLL": "*(volatile int*)count", "PAUSE": ""},
    "atomic": {"POLL": "atomicAdd(count, 0)", "PAUSE": ""},
    "asleep": {"POLL": "*(volatile int*)count", "PAUSE": "__nanosleep(20)"},
}


def module(how: str, check: bool, fence: str = "__threadfence()", missing: int = 0) -> simt.Module:
    text = TEXT.replace("POLL < target", f"POLL < target - {missing}")
    return simt.compile_cuda(text, name="barrier.cu", check=check, defines={**POLLS[how], "FENCE": fence})


def reversed_by(built: simt.Module, blocks: int, threads: int) -> tuple[simt.Report, bool]:
    a, b, count = np.zeros(blocks * 64, np.int32), np.zeros(blocks * 64, np.int32), np.zeros(1, np.int32)
    report = built.run(a, b, count, blocks, 2, threads=threads)
    return report, bool((b == 2000 + np.arange(len(b))[::-1]).all())


@pytest.mark.parametrize("how", POLLS)
@pytest.mark.parametrize("build", ["fast", "check"])
def test_a_right_grid_barrier_is_silent(build, how):
    built = module(how, build == "check")
    for blocks, threads in ((12, 1), (4, 2)):
        report, right = reversed_by(built, blocks, threads)
        assert right and report.findings == [], report


@pytest.mark.parametrize("how", ["volatile", "atomic", pytest.param("asleep", marks=pytest.mark.long)])
def test_a_barrier_one_arrival_short_is_found_every_time(how):
    """Whether or not the last block is late in this run."""
    built = module(how, True, missing=1)
    for blocks in (2, 4, 4, 4, 4, 6, 12):
        report, _ = reversed_by(built, blocks, 2)
        assert [(f.kind, f.line, f.other_line) for f in report.findings] == [("global-race", 15, 17)], report


LOST = """#include "simt.h"
__global__ void arrive(int* a, int* count) {
    const int before = *(volatile int*)a;
    atomicAdd(count, 1);
    while (atomicAdd(count, 0) < gridDim.x) {}  // so that all have read it
    *(volatile int*)a = before + 1;  // <- store
    while (*(volatile int*)a < gridDim.x) {}  // <- wait
}
extern "C" void run(int* a, int* count, int blocks) { arrive<<<blocks, 1>>>(a, count); }
"""


def test_who_waits_for_a_lost_update_and_for_which_word_is_told(little_patience):
    built = simt.compile_cuda(LOST, check=True)
    with pytest.raises(simt.KernelTimeout) as caught:
        built.run(np.zeros(1, np.int32), np.zeros(1, np.int32), 2, threads=2)
    late, race = caught.value.report.findings
    wait, store = (LOST[: LOST.index(f"<- {what}")].count("\n") + 1 for what in ("wait", "store"))
    assert (late.kind, late.line, late.other_line) == ("timeout", wait, store)
    assert "it waits for element 0 of a, which stays 1; the last to store it was thread 0 of block" in late.message
    assert (race.kind, race.line, race.other_line) == ("global-race", store, store) and "is lost" in race.message


def test_a_barrier_without_fences_orders_nothing():
    report, _ = reversed_by(module("atomic", True, fence=""), 6, 2)
    assert {f.kind for f in report.findings} == {"global-race"}
