"""The door and RoPE call their functions plainly where only autograd looks, and their operators elsewhere."""

from functools import partial

import pytest
import torch
from drawn import DEVICE, qkv
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import flashlab.cuda.operators  # noqa: F401  registers the series
from flashlab import flash_attention
from flashlab.attention import backends
from flashlab.models.rope import fused_rope, rope_table
from flashlab.runtime.dispatch import unwatched

inputs = partial(qkv, 1, 2, 2, 5, 5, 16)


class Names(TorchDispatchMode):
    """The operators that are called while it is on, and where the tensors lie that are made."""

    def __init__(self):
        super().__init__()
        self.seen, self.devices = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append(str(func))
        self.devices += [out.device.type] if "empty" in str(func) else []
        return out


@pytest.mark.parametrize("backend", ["reference", "simulation", "torch", "triton", "p6_1_fa1"])
def test_both_ways_compute_the_same_bits(backend):
    q, k, v = (torch.randn(1, 2, 40, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    grad_o = torch.randn(1, 2, 40, 64, device=DEVICE)
    found = []
    for call in (backends.attend, lambda name, *a: getattr(torch.ops.flashlab, name)(*a)):
        o, lse = call(backend, q, k, v, 0.125, None, 0, None)
        loss = (o * grad_o).sum() + lse.sum()
        found.append((o, lse, *torch.autograd.grad(loss, (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_operator_makes_no_tensor_that_it_does_not_return():
    """To compare orders in memory takes none: a fifth tensor was held beside o, dq, dk and dv."""
    x = torch.randn(1, 2, 5, 16, device=DEVICE)
    with Names() as mode:
        assert backends._ordered(x, x) is x and set(mode.devices) <= {"meta"}
        turned = backends._ordered(x.mT.contiguous().mT, x)
    assert turned.stride() == x.stride() and torch.equal(turned, x)


def test_without_lse_in_the_loss_and_where_some_inputs_want_no_gradient():
    q, k, v = inputs()
    for chosen in ({0}, {1, 2}):
        wanting = [x.requires_grad_(i in chosen) for i, x in enumerate((q, k, v))]
        loss = flash_attention(*wanting, backend="triton").sum()
        plain = torch.autograd.grad(loss, [x for x in wanting if x.requires_grad])
        o, _ = torch.ops.flashlab.triton(*wanting, 0.25, None, None, None)
        by_operator = torch.autograd.grad(o.sum(), [x for x in wanting if x.requires_grad])
        torch.testing.assert_close(plain, by_operator, rtol=0, atol=0)


def test_who_looks_sees_the_operator():
    q, k, v = inputs()
    cos, sin = rope_table(5, 16, device=DEVICE)
    assert unwatched(q, k, v) and unwatched(torch.nn.Parameter(q))
    with Names() as mode:
        flash_attention(q, k, v, backend="triton")
        fused_rope(q, k, cos, sin)
    assert {"flashlab.triton.default", "flashlab.fused_rope.default"} <= set(mode.seen)
    graph = make_fx(lambda *x: flash_attention(*x, backend="triton"))(q, k, v)
    assert "flashlab.triton" in graph.code and torch.equal(graph(q, k, v), flash_attention(q, k, v, backend="triton"))


def test_subclasses_and_tensors_without_memory_go_to_the_operator():
    q, _, _ = inputs()
    assert not unwatched(q, torch.empty(2, device="meta"))
    assert not unwatched(q.as_subclass(type("Subclass", (torch.Tensor,), {})))
