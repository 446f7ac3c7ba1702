"""The emulator's own cuda_fp16.h and cuda_bf16.h: bit for bit what numpy and torch say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .conftest import module

EVERY = np.arange(65536, dtype=np.uint16)


@pytest.fixture(params=["vector unit", "plain C++"])
def halves(request):
    """With the CPU's conversion instructions, where it has them, and without."""
    options = {} if request.param == "vector unit" else {"defines": {"SIMT_NO_F16C": 1}}
    return module("halves.cu", check=False, **options)


def same(got, want):
    """Equal bits, and NaN equal to any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    number = {2: np.uint16, 4: np.uint32}[got.itemsize]
    return bool(((got.view(number) == want.view(number)) | (np.isnan(got) & np.isnan(want))).all())


def as_bf16(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def test_every_half_and_bfloat16_as_float(halves):
    out = np.zeros(65536, np.float32)
    halves.half_to_float(EVERY, out, 65536)
    assert same(out, EVERY.view(np.float16).astype(np.float32))
    halves.bf16_to_float(EVERY, out, 65536)
    assert same(out, (EVERY.astype(np.uint32) << 16).view(np.float32))


def near_ties() -> np.ndarray:
    """Floats at, just below and just above the midpoints of all neighbouring halves; and the specials."""
    h = EVERY[:0x7C00].view(np.float16).astype(np.float32)
    mid = (h[:-1] + h[1:]) / 2
    top = np.float32([65504, 65519.996, 65520, 65536, 1e30, 3.4e38, np.inf, np.nan, 0, 2**-24, 2**-25, 2**-26, 1e-40])
    x = np.concatenate([h, mid, np.nextafter(mid, np.float32(0)), np.nextafter(mid, np.float32(np.inf)), top])
    return np.concatenate([x, -x]).astype(np.float32)


def test_float_to_half_rounds_to_nearest_even(halves):
    x = near_ties()
    out = np.zeros(len(x), np.float16)
    halves.float_to_half(x, out, len(x))
    with np.errstate(over="ignore"):
        assert same(out, x.astype(np.float16))


def test_float_to_bfloat16_rounds_to_nearest_even(halves):
    high = np.arange(0, 65536, 1, dtype=np.uint32) << 16
    x = np.concatenate([high + low for low in np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])]).view(np.float32)
    out = np.zeros(len(x), np.uint16)
    halves.float_to_bf16(x, out, len(x))
    want = as_bf16(torch.from_numpy(x.copy()).bfloat16())
    nan = np.isnan(x)
    assert (out[~nan] == want[~nan]).all() and (out[nan] == 0x7FFF).all()


def test_double_is_rounded_once(halves):
    h = EVERY[:0x7C00].view(np.float16).astype(np.float64)
    mid = (h[:-1] + h[1:]) / 2
    x = np.concatenate([mid, mid * (1 + 2**-40), mid * (1 - 2**-40), -mid * (1 + 2**-40)])
    out = np.zeros(len(x), np.float16)
    halves.double_to_half(x, out, len(x))
    assert same(out, x.astype(np.float16))


def pairs(seed: int, n: int = 200_000):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 65536, n, dtype=np.uint16) for _ in range(3)]


def rounded_to_odd(a, b, c):
    """a * b + c in float64, the last bit 1 where it is not exact: one more rounding is then the only one."""
    with np.errstate(all="ignore"):
        p = a * b  # exact, for 16-bit numbers
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)  # of the sum (Knuth, 1969)
        off = np.isfinite(s) & (error != 0) & (s.view(np.uint64) & 1 == 0)
        return np.where(off, np.nextafter(s, np.copysign(np.inf, error)), s)


def test_fma_where_two_roundings_would_be_wrong(halves):
    """A product half way between two halves, and an addend far below that tips it."""
    x = np.float16([1 + 2**-10, 1.5, 3.0, -(1 + 2**-10)])
    y = np.float16([1 + 2**-1, 1 + 2**-10, 1 + 2**-10, 1 + 2**-1])
    a, b = np.repeat(x, 3), np.repeat(y, 3)
    c = np.tile(np.float16([2**-24, 0, -(2**-24)]), 4)
    out = np.zeros((9, 12), np.float16)
    halves.half_arithmetic(a, b, c, out, 12)
    assert (out[4] == rounded_to_odd(*(v.astype(np.float64) for v in (a, b, c))).astype(np.float16)).all()
    assert len({*out[4][:3].tolist()}) == 2  # the addend does tip it


def test_half_arithmetic(halves):
    a, b, c = (x.view(np.float16) for x in pairs(0))
    n = len(a)
    out = np.zeros((9, n), np.float16)
    halves.half_arithmetic(a, b, c, out, n)
    with np.errstate(all="ignore"):
        f = a.astype(np.float64), b.astype(np.float64)
        want = [f[0] + f[1], f[0] - f[1], f[0] * f[1], f[0] / f[1]]
        for i, w in enumerate(want):
            assert same(out[i], w.astype(np.float16)), i
        assert same(out[4], rounded_to_odd(*f, c.astype(np.float64)).astype(np.float16))
        assert same(out[5] + np.float16(0), np.fmax(a, b) + np.float16(0))
        assert same(out[6] + np.float16(0), np.fmin(a, b) + np.float16(0))
        assert same(out[7], -np.abs(a)) and same(out[8], np.sqrt(np.abs(a.astype(np.float64))).astype(np.float16))


def test_bfloat16_arithmetic(halves):
    a, b, c = pairs(1)
    n = len(a)
    out = np.zeros((9, n), np.uint16)
    halves.bf16_arithmetic(a, b, c, out, n)
    with np.errstate(invalid="ignore"):  # signalling NaN
        f = [(x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b, c)]

    def rounded(x):
        """float64 to bfloat16 in one rounding: to odd in float32 first."""
        with np.errstate(all="ignore"):
            y = np.where(np.isnan(x), 0, x).astype(np.float32)
            inexact = np.isfinite(x) & (y.astype(np.float64) != x)
            u = y.view(np.uint32).copy()
            away = np.abs(y.astype(np.float64)) < np.abs(x)
            fix = inexact & (u & 1 == 0)
            u[fix & away] += 1
            u[fix & ~away] -= 1
        return as_bf16(torch.from_numpy(u.view(np.float32).copy()).bfloat16())

    with np.errstate(all="ignore"):
        want = [f[0] + f[1], f[0] - f[1], f[0] * f[1], f[0] / f[1], rounded_to_odd(*f)]
    for i, w in enumerate(want):
        good = ~np.isnan(w) & (np.abs(w) > 2.0**-126)  # subnormal results: float is not wider than bfloat16 there
        assert (out[i][good] == rounded(w)[good]).all(), i
        assert ((out[i][np.isnan(w)] & 0x7FFF) > 0x7F80).all()


def test_names_of_half_and_bfloat16(halves):
    out = np.zeros(24, np.float32)
    assert halves.run_half_names(out).ok
    e = float(np.float16(np.exp(1)))
    want = [3.75, -4, 3, 2, -2, 1, 0, 1, 0, e, 8, 0.5, 0x3C00, -2, 2, 1, -1, 51.5, 58, 5, 0.25, 7, 1.5, 0]
    assert out.tolist() == want
    assert halves.run_bf16_names(out).ok
    assert out[:9].tolist() == [4.75, 3, 3, 2.5, 0x3F80, 2, -2, 1, 1]
