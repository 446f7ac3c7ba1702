"""Inputs of a forward and a backward pass, for the tests of the kernels."""

import torch

from flashlab import runtime
from flashlab.check.training import worst

DEVICE = runtime.device()
ORDERS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3), "bhdn": (0, 1, 3, 2)}


def drawn(batch, heads, kv_heads, seq_q, seq_k, d, dtype=torch.float32, layout="bhnd", seed=0, device=DEVICE):
    """q, k, v and the gradient of o. layout: the order in memory; in bhdn head_dim is not the last."""
    generator, order = torch.Generator().manual_seed(seed), ORDERS[layout]
    each = (heads, seq_q, 0), (kv_heads, seq_k, 0), (kv_heads, seq_k, 0.5), (heads, seq_q, 0.1)
    found = [torch.randn(batch, count, rows, d, generator=generator) + mean for count, rows, mean in each]
    return tuple(x.to(device, dtype).permute(order).contiguous().permute(order) for x in found)


def qkv(*sizes, **options):
    """q, k and v alone."""
    return drawn(*sizes, **options)[:3]


def within(right, **got):
    """Asserts that each of these results is within its bound."""
    name, error = worst(right, **got)
    assert error <= 1, f"{name} is off by {error:.3g} times its bound"


def draw(*shape, dtype=torch.float32, seed=0):
    """One tensor, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
