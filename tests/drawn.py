"""Inputs of a forward and a backward pass, for the tests of the kernels."""

import pytest
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.check.training import worst

DEVICE = runtime.device()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
needs_room = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_properties(DEVICE).total_memory < 16 * 2**30,
    reason="a GPU has to have this memory; on the CPU an untouched page has none",
)
ORDERS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3), "bhdn": (0, 1, 3, 2)}


def drawn(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype=torch.float32, layout="bhnd", seed=0, device=DEVICE):
    """q, k, v and the gradient of o. layout: the order in memory; in bhdn head_dim is not the last."""
    generator, order = torch.Generator().manual_seed(seed), ORDERS[layout]
    each = (heads, seq_q, 0), (kv_heads, seq_k, 0), (kv_heads, seq_k, 0.5), (heads, seq_q, 0.1)
    found = [torch.randn(batch, count, rows, head_dim, generator=generator) + mean for count, rows, mean in each]
    return tuple(x.to(device, dtype).permute(order).contiguous().permute(order) for x in found)


def qkv(*sizes, **options):
    """q, k and v alone."""
    return drawn(*sizes, **options)[:3]


def one_head(M, N, D, dtype=torch.float32, seed=0):
    """q, k and v of one head, [rows, head_dim]."""
    return tuple(x[0, 0] for x in qkv(1, 1, 1, M, N, D, dtype, seed=seed))


def one_heads_attention(q, k, v, **options):
    """o and lse of one head, in float64."""
    return tuple(x[0, 0] for x in reference.attention(*(x[None, None] for x in (q, k, v)), **options))


def within(right, **got):
    """Asserts that each of these results is within its bound."""
    name, error = worst(right, **got)
    assert error <= 1, f"{name} is off by {error:.3g} times its bound"


def draw(*shape, dtype=torch.float32, seed=0):
    """One tensor, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def far_apart(tensors, axis):
    """The same numbers, the third along an axis more than 2^31 elements behind the first; one buffer of 4 GB.

    Addresses in 32 bits wrap around and read wrong numbers.
    """
    apart = 2**30 + 128
    buffer = torch.empty(2 * apart + 2**20, dtype=tensors[0].dtype, device=DEVICE)
    far = []
    for number, x in enumerate(tensors):
        strides = list(x.contiguous().stride())
        strides[axis] = apart
        far.append(buffer.as_strided(x.shape, strides, number * 2**16).copy_(x))
    return far
