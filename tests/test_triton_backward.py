"""Phase 5: the simulation and the kernels (phase 4's too) against float64; determinism. (Short lengths: lecture 5.)"""

from functools import partial

import pytest
import torch
from drawn import DEVICE, DTYPES, drawn, far_apart, needs_room, within
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_forward import expect as expect_forward

from flashlab import runtime
from flashlab.attention import reference, triton_backward
from flashlab.attention.simulation_backward import flash_attention_backward_sim
from flashlab.attention.tiles import Tile
from flashlab.attention.triton_backward import Tiles, flash_attention_backward
from flashlab.attention.triton_forward import flash_attention_forward, flash_attention_kernel
from flashlab.check.training import wanted, worst
from flashlab.triton_tools.watch import watched

SMALL = Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2))


def gradients(q, k, v, do, tiles=SMALL, concurrent=None, **options):
    o, lse = flash_attention_forward(q, k, v, **options)
    return flash_attention_backward(do, q, k, v, o, lse, tiles=tiles, concurrent=concurrent, **options)


def expect(q, k, v, do, tiles=SMALL, **options):
    dq, dk, dv = gradients(q, k, v, do, tiles, **options)
    for got, x in ((dq, q), (dk, k), (dv, v)):
        assert got.shape == x.shape and got.dtype == x.dtype
    within(wanted(q, k, v, do, **options), dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", [(1, 1), (5, 17), (17, 5), (40, 40), (33, 70)])
def test_the_simulation(seq_q, seq_k, causal):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, do = (x.cpu() for x in drawn(1, 2, 1, seq_q, seq_k, 16, dtype))
        o, lse = reference.attention(q, k, v, causal=causal)
        dq, dk, dv = flash_attention_backward_sim(do, q, k, v, o.to(dtype), lse.float(), 16, 32, causal=causal)
        within(wanted(q, k, v, do, causal=causal), dq=dq, dk=dk, dv=dv)


WINDOWS = st.one_of(
    st.none(), st.integers(0, 40), st.tuples(st.none() | st.integers(0, 40), st.none() | st.integers(0, 40))
)


@settings(max_examples=24, deadline=None)
@given(st.data())
def test_drawn_shapes_masks_and_layouts(data):
    """Of the forward pass too."""
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 2), "kv_heads"), draw(st.integers(1, 2), "group")
    seq_q, seq_k = draw(st.integers(1, 40), "seq_q"), draw(st.integers(1, 50), "seq_k")
    dtype, layout = draw(st.sampled_from(DTYPES), "dtype"), draw(st.sampled_from(["bhnd", "bnhd", "bhdn"]), "layout")
    head_dim = draw(st.sampled_from([8, 16, 40, 59]), "head_dim")
    batch = 4 if seq_q * seq_k < 100 else 1  # the rule is calibrated on a twin, which may be lucky with a few numbers
    inputs = drawn(batch, kv_heads * group, kv_heads, seq_q, seq_k, head_dim, dtype, layout=layout)
    sides = st.sampled_from([16, 32])
    forward, *blocks = (Tile(draw(sides, "BLOCK_M"), draw(sides, "BLOCK_N"), 4, 2) for _ in range(3))
    options = dict(
        causal=draw(st.booleans(), "causal"),
        window=draw(WINDOWS, "window"),
        softcap=draw(st.sampled_from([None, 2.0, 30.0]), "softcap"),
        scale=draw(st.sampled_from([None, -0.3, 0.0, 1.0]), "scale"),
    )
    run = partial(flash_attention_forward, split=draw(st.booleans(), "split"))
    expect_forward(*inputs[:3], run=run, tile=forward, **options)
    expect(*inputs, Tiles(*blocks), **options)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256])
def test_flash_attentions_list_of_head_sizes(head_dim):
    sizes = 1, 7 if head_dim == 8 else 2, 1, 37, 50, head_dim
    expect_forward(*drawn(*sizes, torch.bfloat16)[:3], tile=None, causal=True)
    expect(*drawn(*sizes, torch.float16), None, causal=True)


def test_two_runs_agree_in_every_bit():
    inputs = drawn(2, 2, 1, 20, 33, 16, torch.float16)
    for options in (dict(), dict(causal=True, softcap=20.0)):
        first = gradients(*inputs, **options)
        for run in range(2 if runtime.INTERPRETED else 50):
            again = gradients(*inputs, **options, concurrent=run % 2 == 0)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_room
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batches", "heads", "rows"])
def test_offsets_past_32_bits(axis):
    """Of the forward pass too: these gradients are of its o and lse."""
    shape = [1, 1, 20, 16]
    shape[axis] = 3
    q, k, v, do = drawn(shape[0], shape[1], shape[1], shape[2], shape[2], 16, torch.float16)
    want = gradients(q, k, v, do)
    torch.testing.assert_close(gradients(*far_apart((q, k, v, do), axis)), want, rtol=0, atol=0)


def test_batches_and_heads_are_on_grid_x(monkeypatch):
    """y and z end at 65535 blocks. Interpreted, so many programs would take minutes: there the grids alone are seen."""
    grids = []

    def recorded(kernel):
        class Kernel:
            def __getitem__(self, grid):
                grids.append(grid)
                return (lambda *args, **options: None) if runtime.INTERPRETED else kernel[grid]

        return Kernel()

    for name in ("delta_kernel", "dkdv_kernel", "dq_kernel"):
        monkeypatch.setattr(triton_backward, name, recorded(getattr(triton_backward, name)))
    q, k, v, do = drawn(70, 1000, 1000, 3, 3, 8, torch.float16)
    o, lse = flash_attention_forward(q, k, v, kernel=recorded(flash_attention_kernel))
    dq, dk, dv = flash_attention_backward(do, q, k, v, o, lse)
    assert grids == [(70_000,)] * 4
    if not runtime.INTERPRETED:
        within(wanted(q, k, v), o=o, lse=lse)
        assert dq.isfinite().all() and dk.isfinite().all() and (dv[-1, -1] != 0).any()


def test_float32_is_float32_unless_tf32_is_asked_for():
    inputs = drawn(1, 1, 1, 40, 40, 32)
    expect(*inputs)
    dq, dk, dv = gradients(*inputs, allow_tf32=True)
    assert worst(wanted(*inputs), dq=dq, dk=dk, dv=dv)[1] > 3


def test_rows_and_keys_that_see_nothing_have_no_gradient():
    dq, dk, dv = expect(*drawn(1, 2, 1, 40, 17, 16), causal=True)
    assert (dq[:, :, :23] == 0).all()
    dq, dk, dv = expect(*drawn(1, 2, 1, 10, 80, 16), window=(5, 0))
    assert (dk[:, :, :65] == 0).all() and (dv[:, :, :65] == 0).all()


def test_scores_far_from_zero():
    """exp(0 - lse) overflows for keys that are not there; what is masked must not turn into NaN."""
    q, k, v, do = drawn(1, 1, 1, 20, 37, 16)
    q[..., 0], k[..., 0] = 20.0, -40.0
    for options in (dict(), dict(causal=True), dict(window=(4, 4))):
        found, right = gradients(q, k, v, do, **options), reference.attention_backward(do, q, k, v, **options)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=2e-3, check_dtype=False)


def test_the_gradient_of_the_log_sum_exp():
    q, k, v, do = drawn(1, 2, 1, 20, 30, 16)
    o, lse = flash_attention_forward(q, k, v, causal=True)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = flash_attention_backward(do, q, k, v, o, lse, grad_lse=dlse, causal=True, tiles=SMALL)
    right = reference.attention_backward(do, q, k, v, causal=True, grad_lse=dlse)
    sim = flash_attention_backward_sim(do, q, k, v, o, lse, causal=True, grad_lse=dlse)
    torch.testing.assert_close(got, right, rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(sim, right, rtol=0, atol=1e-5, check_dtype=False)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
def test_no_access_out_of_bounds_and_each_result_written_once():
    q, k, v, do = drawn(1, 4, 2, 33, 50, 24, torch.float16)
    o, lse = flash_attention_forward(q, k, v, causal=True)
    with watched() as traffic:
        flash_attention_backward(do, q, k, v, o, lse, causal=True, tiles=SMALL)
    assert traffic.written_to["DK_ptr"] == traffic.written_to["DV_ptr"] == k.numel() * 2
    assert traffic.written_to["DQ_ptr"] == q.numel() * 2 and traffic.written_to["DELTA_ptr"] == lse.numel() * 4
    assert not traffic.undefined
