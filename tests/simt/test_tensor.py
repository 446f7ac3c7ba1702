"""The instructions of ptx.cuh: matrix fragments, products and asynchronous copies, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .conftest import both_builds, module

LANE = np.arange(32)


tensor = both_builds("tensor.cu")


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(tensor, count, trans):
    tiles = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    out = np.zeros((32, count), np.uint32)
    report = tensor.run_load(tiles, out, count, trans)
    assert report.ok
    assert report.counters["ldmatrix"] == report.counters["syncwarps"] == 1
    assert report.counters["ldmatrix_wavefronts"] == count
    seen = tiles.transpose(0, 2, 1) if trans else tiles
    for i in range(count):
        low, high = seen[i, LANE // 4, LANE % 4 * 2], seen[i, LANE // 4, LANE % 4 * 2 + 1]
        assert (out[:, i] == low + (high.astype(np.uint32) << 16)).all()
    back = np.zeros_like(tiles)
    report = tensor.run_store(out, back, count, trans)
    assert report.ok and report.counters["stmatrix"] == 1 and report.counters["stmatrix_wavefronts"] == count
    assert (back == tiles).all()


def random_16(rng, shape, bf16):
    """Bits, and the float64 values they stand for."""
    x = torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16 if bf16 else torch.float16)
    return x.view(torch.int16).numpy().view(np.uint16).copy(), x.double().numpy()


@pytest.mark.parametrize("bf16", [0, 1])
@pytest.mark.parametrize("k", [8, 16])
def test_mma_with_float_accumulators(tensor, k, bf16):
    rng = np.random.default_rng(k + bf16)
    (a, wide_a), (b, wide_b) = random_16(rng, (16, k), bf16), random_16(rng, (k, 8), bf16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = np.zeros_like(c)
    report = tensor.run_mma(a, b, c, d, k, bf16)
    assert report.ok
    assert report.counters["mma"] == report.counters[f"mma_m16n8k{k}"] == 1
    assert report.counters["mma_flops"] == 2 * 16 * 8 * k
    assert np.allclose(d, wide_a @ wide_b + c, rtol=0, atol=k * 2**-22 * np.abs(wide_a).max() * np.abs(wide_b).max())


@pytest.mark.parametrize("k", [8, 16])
def test_mma_with_half_accumulators(tensor, k):
    rng = np.random.default_rng(k)
    (a, wide_a), (b, wide_b), (c, wide_c) = (random_16(rng, s, 0) for s in ((16, k), (k, 8), (16, 8)))
    d = np.zeros_like(c)
    assert tensor.run_mma_f16(a, b, c, d, k).ok
    want = wide_a @ wide_b + wide_c
    assert np.allclose(d.view(np.float16).astype(np.float64), want, rtol=2**-10, atol=2**-10)


def test_mma_of_infinities_nan_and_subnormals(tensor):
    a, b = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16)
    c, d = np.zeros((16, 8), np.float32), np.ones((16, 8), np.float32)
    a[0, 0], a[1, 0], a[2, 0], a[3, 0], a[4, 0], a[4, 1] = np.inf, np.nan, 2**-24, 65504, np.inf, -np.inf
    b[0, :] = 1
    b[1, :] = 1
    b[0, 1] = 2**-24
    c[5, 0] = np.inf
    tensor.run_mma(a.view(np.uint16), b.view(np.uint16), c, d, 16, 0)
    assert d[0, 0] == np.inf and d[0, 1] == np.inf
    assert np.isnan(d[1]).all()
    assert d[2, 0] == 2**-24 and d[2, 1] == 2.0**-48  # subnormals take part
    assert d[3, 0] == 65504
    assert np.isnan(d[4]).all()  # inf - inf
    assert d[5, 0] == np.inf and not d[6:].any()
    half = np.zeros((16, 8), np.uint16)
    a[3, 1] = 65504
    tensor.run_mma_f16(a.view(np.uint16), b.view(np.uint16), half.copy(), half, 16)
    assert half.view(np.float16)[3, 0] == np.inf  # 131008 does not fit


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_with_zeros(tensor, size):
    data = np.arange(1, 32 * size + 1, dtype=np.uint32).astype(np.uint8) | 1
    for source in (size, size - 1, 1, 0):
        out = np.full(32 * size, 99, np.uint8)
        report = tensor.run_copies(data, out, size, source)
        assert report.ok
        want = data.reshape(32, size).copy()
        want[:, source:] = 0
        assert (out.reshape(32, size) == want).all()
        assert report.counters["cp_async"] == 1 and report.counters["cp_async_bytes"] == (32 * size if source else 0)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
def test_cp_async_groups(left):
    data, out = np.arange(128, dtype=np.float32), np.zeros((4, 32), np.float32)
    module("tensor.cu", False).run_groups(data, out, left)
    landed = [g < 4 - left and g != 2 for g in range(4)]  # group 2 is empty, but it counts
    for g in range(4):
        assert (out[g] == data.reshape(4, 32)[g]).all() if landed[g] else np.isnan(out[g]).all()
    report = module("tensor.cu", True).run_groups(data, out, left)
    early = [f for f in report.findings if f.kind == "read-before-wait"]
    assert bool(early) == (left > 0)


def test_small_instructions(tensor):
    out = np.ones(8, np.float32)
    assert tensor.run_small(out).ok
    assert out.tolist() == [8, 0, 0, 0.25, 1.5, -2, 0.25, 3]
