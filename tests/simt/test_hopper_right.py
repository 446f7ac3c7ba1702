"""Right kernels for Hopper in styles that the series does not use (kernels/hopper_right.cu): nothing is objected to."""

from __future__ import annotations

import re

import numpy as np
import pytest

from .conftest import KERNELS, module

TEXT = (KERNELS / "hopper_right.cu").read_text()
STYLES = re.findall(r"\w+", re.search(r"enum Style {(.*?)}", TEXT, re.S)[1])


@pytest.fixture(scope="module")
def right():
    return module("hopper_right.cu")


def expect_clean(report) -> None:
    assert report.ok and not report.findings, report


@pytest.mark.parametrize("style", STYLES)
def test_a_tile(right, style):
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-3, 4, (rows, 64)).astype(np.float16) for rows in (64, 24))
    out = np.full((64, 24), np.nan, np.float32)
    expect_clean(right.run_style(a, b, out, STYLES.index(style)))
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
