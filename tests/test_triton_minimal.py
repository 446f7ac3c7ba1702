"""Phase 3's kernel at any length, tile, stride; special values. (The checker's cases, and compiled: lecture 3.)"""

import math

import pytest
import torch
from drawn import DEVICE, DTYPES, one_head, one_heads_attention

from flashlab.attention.triton_minimal import default_block, flash_attention_forward


def expect(found, q, k, v):
    torch.testing.assert_close(found, one_heads_attention(q, k, v), rtol=0, atol=5e-6, check_dtype=False)


@pytest.mark.parametrize("M, N", [(1, 1), (1, 147), (63, 65), (64, 64), (65, 63), (113, 203), (200, 17)])
@pytest.mark.parametrize("blocks", [(16, 64), (64, 16), (32, 32)])
def test_any_lengths_and_tiles(M, N, blocks):
    q, k, v = one_head(M, N, 32)
    o, lse = flash_attention_forward(q, k, v, None, *blocks)
    assert o.shape == (M, 32) and o.dtype == torch.float32 and lse.shape == (M,) and lse.dtype == torch.float32
    expect((o, lse), q, k, v)


def test_any_strides():
    q, k, v = one_head(70, 90, 32)
    want = flash_attention_forward(q, k, v)
    apart = torch.zeros(90, 3, 64, device=DEVICE)
    apart[:, 1, ::2] = v
    got = flash_attention_forward(q.T.contiguous().T, k.flip(0).contiguous().flip(0), apart[:, 1, ::2])
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)  # another layout may have another order of sums


def test_nan_stays_in_its_row():
    q, k, v = one_head(40, 70, 16)
    clean, clean_lse = flash_attention_forward(q, k, v)
    q[7, 3] = math.nan
    o, lse = flash_attention_forward(q, k, v)
    assert o[7].isnan().all() and lse[7].isnan()
    others = torch.arange(40, device=DEVICE) != 7
    assert torch.equal(o[others], clean[others]) and torch.equal(lse[others], clean_lse[others])
    q[7, 3] = 0.0
    k[69] = math.nan
    assert flash_attention_forward(q, k, v)[0].isnan().all()


def test_minus_infinity_in_one_key_is_a_mask():
    q, k, v = one_head(30, 50, 16)
    q[:, 0] = q[:, 0].abs() + 0.1
    k[10:20, 0] = -math.inf
    seen = [*range(10), *range(20, 50)]
    expect(flash_attention_forward(q, k, v), q, k[seen], v[seen])


def test_default_blocks_are_tiles_of_16_kib_at_most():
    for dtype in DTYPES:
        for head_dim in (16, 32, 64, 128, 256):
            rows = default_block(head_dim, dtype)
            assert 16 <= rows <= 64 and rows * head_dim * dtype.itemsize <= 16 * 1024
    for size, sentence in (
        (8, "head_dim is 8; this kernel is compiled for 16"),
        (16, "BLOCK_M is 48: a block is"),
    ):
        with pytest.raises(ValueError, match=sentence):
            flash_attention_forward(*one_head(8, 8, size), None, 48)
