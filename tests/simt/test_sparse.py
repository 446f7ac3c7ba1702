"""Views of which rows lie 2^31 elements apart: of their memory only the pages that are touched exist."""

import mmap

import numpy as np
import pytest

from flashlab.simt import IllegalAccess, compile_cuda

APART = 2**31 + 64  # elements from one row to the next
ROWS, COLS = 2, 32

SOURCE = """
#include "simt.h"
template <class Offset>
__global__ void copy(const float* x, float* y, long long from, long long to) {
    const long long row = blockIdx.x;
    const int col = threadIdx.x;
    y[(Offset)(row * to) + col] = x[(Offset)(row * from) + col];
}
extern "C" int run(const float* x, float* y, long long from, long long to, int bits) {
    if (bits == 64) copy<long long><<<2, 32>>>(x, y, from, to);
    else copy<int><<<2, 32>>>(x, y, from, to);
    return (int)cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def copy():
    return compile_cuda(SOURCE, check=True).run


def far():
    """Zeros [2, 32] in 8 GiB of addresses, private and without memory behind them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        buffer = mmap.mmap(-1, 4 * (APART + COLS), flags=flags)
    except OSError:
        pytest.skip("no room for 8 GiB of addresses")
    return np.lib.stride_tricks.as_strided(np.frombuffer(buffer, np.float32), (ROWS, COLS), (4 * APART, 4))


def numbers():
    return np.arange(ROWS * COLS, dtype=np.float32).reshape(ROWS, COLS)


def test_rows_far_apart_are_read_and_written(copy):
    x, y, z = numbers(), far(), np.zeros((ROWS, COLS), np.float32)
    copy(x, y, COLS, APART, 64)
    assert np.array_equal(y, x)
    copy(y, z, APART, COLS, 64)
    assert np.array_equal(z, x)


@pytest.mark.parametrize("reads", [True, False])
def test_an_offset_of_which_32_bits_are_kept_is_found(copy, reads):
    near, there = np.zeros((ROWS, COLS), np.float32), far()
    arguments = (there, near, APART, COLS) if reads else (near, there, COLS, APART)
    with pytest.raises(IllegalAccess, match="belongs to no argument"):
        copy(*arguments, 32)
    assert not copy(*arguments, 64).findings


def test_only_touched_pages_have_memory(copy):
    there = far()
    copy(numbers(), there, COLS, APART, 64)
    with open("/proc/self/statm") as pages:
        resident = int(pages.read().split()[1]) * mmap.PAGESIZE
    assert resident < 4 * APART // 2
