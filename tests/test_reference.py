"""The oracle against PyTorch's own attention in float64, and its conventions for masks and empty rows."""

import math
from functools import partial

import drawn
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlab.attention import reference

qkv = partial(drawn.qkv, dtype=torch.float64, device="cpu")


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    seq_q=st.integers(1, 20),
    extra=st.integers(0, 20),
    head_dim=st.integers(1, 24),
    causal=st.booleans(),
    sides=st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
)
def test_equals_sdpa(batch, kv_heads, group, seq_q, extra, head_dim, causal, sides):
    q, k, v = qkv(batch, kv_heads * group, kv_heads, seq_q, seq_q + extra, head_dim)
    o, lse = reference.attention(q, k, v, causal=causal, window=sides)
    left, right = (99 if side is None else side for side in sides or (None, None))
    # The last query stands beside the last key.
    distance = torch.arange(seq_q + extra)[None, :] - torch.arange(seq_q)[:, None] - extra
    mask = (distance >= -left) & (distance <= (0 if causal else right))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    scores = (head_dim**-0.5 * q @ k.repeat_interleave(group, 1).mT).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fn", [reference.attention, reference.attention_low_precision])
def test_a_row_that_sees_no_key_is_zero_with_lse_minus_infinity(fn):
    q, k, v = qkv(1, 2, 2, 5, 3, 8, dtype=torch.float32)
    o, lse = fn(q, k, v, causal=True)
    assert (o[:, :, :2] == 0).all() and torch.isneginf(lse[:, :, :2]).all()
    assert torch.isfinite(o).all() and torch.isfinite(lse[:, :, 2:]).all()
    o, lse = fn(q, k[:, :, :0], v[:, :, :0])
    assert (o == 0).all() and torch.isneginf(lse).all()


def test_nan_behind_the_mask_does_not_spread():
    q, k, v = qkv(1, 1, 1, 4, 4, 8)
    k[..., 3, :] = math.nan
    o, _ = reference.attention(q[..., :3, :], k[..., :3, :], v[..., :3, :], causal=True)
    masked = v.clone()
    masked[..., 3, :] = math.nan
    # Bottom-right alignment: with 3 queries on 4 keys the last key is seen by the last query only.
    o2, _ = reference.attention(q[..., :3, :], k, v, causal=True)
    assert torch.isfinite(o).all() and torch.isfinite(o2[..., :2, :]).all() and torch.isnan(o2[..., 2, :]).all()


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.float32, 2e-6)])
def test_the_low_precision_twin_errs_by_its_dtype(dtype, bound):
    q, k, v = qkv(2, 4, 2, 33, 65, 32, dtype=dtype)
    o, lse = reference.attention_low_precision(q, k, v, causal=True)
    want, want_lse = reference.attention(q, k, v, causal=True)
    error = (o - want).abs().max().item()
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert 0 < error < bound
    assert (lse - want_lse).abs().max() < 4 * bound


OPTIONS = [
    dict(), dict(causal=True), dict(window=(3, 2)), dict(softcap=1.5), dict(causal=True, window=4, softcap=3.0),
    dict(scale=-0.7),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seq_q, seq_k", [(3, 5), (5, 3)])
@pytest.mark.every(2)
def test_the_gradient_is_the_derivative_of_the_formula(options, seq_q, seq_k):
    """Of both outputs; 5 causal queries on 3 keys have rows that see nothing."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = reference.attention(q, k, v, **options)
            ctx.save_for_backward(q, k, v)
            return o, torch.where(lse.isneginf(), 0.0, lse)

        @staticmethod
        def backward(ctx, grad_o, grad_lse):
            return reference.attention_backward(grad_o, *ctx.saved_tensors, grad_lse=grad_lse, **options)

    inputs = [x.requires_grad_() for x in qkv(2, 4, 2, seq_q, seq_k, 3)]
    assert torch.autograd.gradcheck(Attention.apply, inputs)


def test_a_soft_cap_bounds_the_scores():
    q, k, v = qkv(1, 1, 1, 4, 6, 8)
    s = 3 * torch.tanh(8**-0.5 * (q @ k.transpose(-1, -2)) / 3)
    torch.testing.assert_close(reference.attention(q, k, v, softcap=3)[0], torch.softmax(s, -1) @ v)
    o, _ = reference.attention(1e3 * q, k, v, softcap=1e-2)
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand_as(o), rtol=0, atol=0.02)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_low_precision_gradient_is_near_the_right_one(options):
    q, k, v, grad_o = drawn.drawn(1, 4, 2, 6, 4, 8, device="cpu")
    right = reference.attention_backward(grad_o, q, k, v, **options)
    found = reference.low_precision_backward(grad_o, q, k, v, **options)
    torch.testing.assert_close(found, right, rtol=0, atol=2e-5, check_dtype=False)
