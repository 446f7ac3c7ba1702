"""The simulation against the oracle; the meter. (Its costs: lecture 2.)"""

import math

import pytest
import torch
from drawn import DTYPES, one_head, one_heads_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from flashlab.attention.cost import Meter, flash_cost
from flashlab.attention.simulation import (
    flash_attention_causal_sim,
    flash_attention_forward_sim,
    flash_attention_one_head_sim,
    flash_attention_sim,
)
from flashlab.check import verify, verify_block, verify_one_head
from flashlab.figures.tiles import tile_figure, tile_frames


@pytest.mark.long
def test_the_checker_accepts_the_simulation():
    verify_block(flash_attention_forward_sim, dtypes=DTYPES, head_dims=(64, 40))
    verify_one_head(flash_attention_one_head_sim, dtypes=DTYPES)
    verify(flash_attention_sim, causal=True, gqa=True, dtypes=DTYPES, head_dims=(64, 16), full=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 45), st.integers(0, 2**31), st.floats(0.0, 8.0))
def test_any_block_size_gives_the_oracles_answer(M, N, BLOCK_N, seed, spread):
    Q, K, V = one_head(M, N, 8, seed=seed)
    V = V[:, :5]
    O, lse = flash_attention_forward_sim(Q, K, V, BLOCK_N, scale=spread)
    want, want_lse = one_heads_attention(Q, K, V, scale=spread)
    assert (O - want).abs().max() <= 1e-5 * (1 + spread) * V.abs().max()
    assert (lse - want_lse).abs().max() <= 1e-5 * (1 + spread * 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_the_results(dtype):
    Q, K, V = one_head(4, 21, 8, dtype)
    for O, lse in (flash_attention_forward_sim(Q, K, V, 8), flash_attention_causal_sim(Q, K, V, 2, 8)):
        assert O.dtype == dtype and lse.dtype == torch.float32


def test_query_blocks_do_not_depend_on_each_other():
    Q, K, V = one_head(50, 30, 16)
    want = flash_attention_one_head_sim(Q, K, V, 50, 8)
    for BLOCK_M in (1, 7, 16, 64):
        got = flash_attention_one_head_sim(Q, K, V, BLOCK_M, 8)
        assert torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[1], want[1], atol=1e-5)


def test_causal_ignores_what_is_in_skipped_tiles():
    Q, K, V = one_head(64, 64, 16)
    K[48:], V[48:] = math.nan, math.nan  # the last 16 keys: only the last 16 queries see any of them
    O, lse = flash_attention_causal_sim(Q, K, V, 16, 16)
    assert O[:48].isfinite().all() and lse[:48].isfinite().all() and O[48:].isnan().any()


@pytest.mark.parametrize("BLOCK_N", [2, 5, 21])
def test_rows_of_minus_infinity_are_a_sentence_and_masks_are_not(BLOCK_N):
    Q, K, V = one_head(4, 21, 8)
    Q[:, 0], Q[2, 0] = 1.0, -1.0
    for first in (21, BLOCK_N):  # all of the row; its first block alone
        far = K.clone()
        far[:first, 0] = math.inf
        far[first:, 0] = 0.0
        with pytest.raises(ValueError, match="first scores are all -inf: masks are flash_attention_causal_sim's"):
            flash_attention_forward_sim(Q[2:3], far, V, BLOCK_N)
        with pytest.raises(ValueError, match="all -inf"):
            flash_attention_one_head_sim(Q[2:3], far, V, 2, BLOCK_N)
        O, lse = flash_attention_causal_sim(Q[2:3], far, V, 2, BLOCK_N)
        want, want_lse = one_heads_attention(Q[2:3], far, V)
        assert torch.allclose(O.double(), want, atol=1e-5) and torch.allclose(lse.double(), want_lse, atol=1e-5)
    V[20, 0], K[20, 1] = math.nan, math.nan  # what is NaN for another reason stays so
    assert flash_attention_forward_sim(Q, K, V, BLOCK_N)[0].isnan().all()


def test_bad_blocks():
    """What else is wrong with inputs: test_inputs.py."""
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match="BLOCK_N is .*an int"):
        flash_attention_forward_sim(x[0, 0], x[0, 0], x[0, 0], BLOCK_N=2.0)
    for causal in (False, True):
        with pytest.raises(ValueError, match="BLOCK_M is 0"):
            flash_attention_sim(x, x, x, BLOCK_M=0, causal=causal)


def test_meter_follows_tensors_from_birth_to_death():
    outside = torch.zeros(1000)
    with Meter(outside) as meter:
        a = outside + 1  # 4000 bytes
        b = a * 2  # 8000
        view = b[10:20]  # shares b
        del a, b  # 4000: the view keeps b's storage
        c = outside[:500].exp()  # 6000
        del view, c
        torch.zeros(1)
    assert meter.peak_bytes == 8000 and meter.now_bytes == 4
    assert meter.bytes_read == 4000 + 2000 and meter.bytes_written == 0
    assert meter.operations == {"add": 1000, "mul": 1000, "exp": 500}


def test_meter_counts_matmuls():
    a, b, x = torch.zeros(3, 5), torch.zeros(5, 7), torch.zeros(2, 3, 5)
    for fn, flops in [(lambda: a @ b, 2 * 3 * 5 * 7), (lambda: torch.addmm(torch.zeros(3, 7), a, b), 210),
                      (lambda: a @ b[:, 0], 30),
                      (lambda: torch.bmm(x, x.mT), 2 * 2 * 3 * 3 * 5), (lambda: a[0] @ b[:, 0], 10)]:  # fmt: skip
        with Meter() as meter:
            fn()
        assert meter.matmul_flops == flops


def test_tile_frames_are_one_for_each_tile_and_each_store():
    Q, K, V = (torch.randn(n, 2) for n in (6, 8, 8))
    figures = list(tile_frames(Q, K, V, 2, 2))
    assert len(figures) == 3 * (4 + 1)
    cost = flash_cost(6, 8, 2, 2, 2, itemsize=4)
    texts = [text.get_text() for text in figures[-1].axes[0].texts]
    assert f"HBM bytes so far: {cost.bytes_read} read, {cost.bytes_written} written" in texts
    plt.close("all")
    with pytest.raises(IndexError, match="15"):
        tile_figure(Q, K, V, 2, 2, frame=15)
    assert not plt.get_fignums()
