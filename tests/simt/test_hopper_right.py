"""Right kernels for Hopper in styles that the series does not use (kernels/hopper_right.cu): nothing is objected to."""

from __future__ import annotations

import re

import numpy as np
import pytest

from .conftest import KERNELS, module

TEXT = (KERNELS / "hopper_right.cu").read_text()
STYLES, RELEASES = (
    re.findall(r"\w+", re.search(rf"enum {name} {{(.*?)}}", TEXT, re.S)[1]) for name in ("Style", "Release")
)


@pytest.fixture(scope="module")
def right():
    return module("hopper_right.cu")


def operands(rows: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(n)
    return tuple(draw.integers(-3, 4, (r, k)).astype(np.float16) for r in (rows, n))


def expect_clean(report) -> None:
    assert report.ok and not report.findings, report


@pytest.mark.parametrize("style", STYLES)
def test_a_tile(right, style):
    a, b = operands(128, 24, 64)
    rows = 128 if style == "TWO_WARPGROUPS" else 64
    out = np.full((rows, 24), np.nan, np.float32)
    expect_clean(right.run_style(a, b, out, STYLES.index(style)))
    np.testing.assert_array_equal(out, a[:rows].astype(np.float32) @ b.T.astype(np.float32))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("tiles", [1, 2, 7])
def test_a_ring_of_stages(right, release, tiles):
    a, b = operands(64, 16, 64 * tiles)
    out = np.full((64, 16), np.nan, np.float32)
    expect_clean(right.run_ring(a, b, out, tiles, RELEASES.index(release)))
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.T.astype(np.float32))


def test_an_mbarrier_between_threads(right):
    out = np.zeros(128, np.float32)
    expect_clean(right.run_passed_on(out, 5))
    wanted = np.arange(128, dtype=np.float32)
    for _ in range(5):
        wanted = wanted + 1 + wanted[::-1]
    np.testing.assert_array_equal(out, wanted)


def test_stores_from_two_buffers(right):
    y = np.full((40, 32), np.nan, np.float32)
    expect_clean(right.run_two_buffers(y, 5))
    np.testing.assert_array_equal(y.ravel(), np.arange(1280))
