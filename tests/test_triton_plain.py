"""Phase 4's plain kernel: right on the checker's cases, refuses what it cannot do; and visits every tile."""

import pytest
import torch

from flashlab import runtime
from flashlab.attention.triton_plain import plain_attention
from flashlab.check import verify
from flashlab.triton_tools.watch import hbm_traffic


def make(*shape, kv_heads=None, seq_k=None, dtype=torch.float16):
    batch, heads, seq_q, head_dim = shape
    kv = (batch, kv_heads or heads, seq_k or seq_q, head_dim)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(runtime.device(), dtype) for s in (shape, kv, kv)]


def test_the_checkers_cases():
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    assert verify(plain_attention, causal=True, gqa=True, dtypes=dtypes, head_dims=(64, 40, 8), empty=True, max_seq=150)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
def test_every_tile_is_loaded():
    """What the rest of the phase saves is there to be saved."""
    x = make(1, 2, 64, 40, kv_heads=1, seq_k=96)
    for causal in (False, True):
        read = hbm_traffic(plain_attention, *x, causal=causal, BLOCK_M=16, BLOCK_N=32).read_from["k"]
        assert read == 2 * 4 * 96 * 40 * 2


def test_bad_input_is_refused():
    q, k, v = make(1, 3, 20, 32, kv_heads=2)
    with pytest.raises(ValueError, match="heads"):
        plain_attention(q, k, v)
