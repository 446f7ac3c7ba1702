"""The bench of attention alone, on a CPU: what it measures, what it holds in memory, what runs out of it."""

import pytest
import torch

from flashlab.attention import reference
from flashlab.bench import attention, peers

JOB = {"part": "attention", "d_model": 16, "seq_len": 40, "dtype": "float32"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(attention, "BATCH", 1)
    monkeypatch.setattr(peers, "compiled_unfused", peers.unfused)  # compiling takes seconds


def test_every_way_computes_attention(small):
    q, k, v, grad_o = attention.inputs(JOB)
    o, _ = reference.attention(q.double(), k.double(), v.double())
    grads = torch.autograd.grad(o, (q, k, v), grad_o.double())
    for name in attention.NAMES:
        got = attention.way_of(name, q, k, v)()
        torch.testing.assert_close(got.double(), o, atol=1e-5, rtol=0)
        for a, b in zip(torch.autograd.grad(got, (q, k, v), grad_o), grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_a_job_that_failed_is_in_the_table():
    assert "no room" in repr(attention.table({"rows": [JOB | {"name": "all", "unavailable": "no room: 1"}]}))


@pytest.mark.slow
@pytest.mark.long
def test_compiled_eager_is_the_same_and_its_backward_pass_can_be_repeated():
    q, k, v, grad_o = attention.inputs(JOB)
    o = peers.compiled_unfused(q, k, v)()
    torch.testing.assert_close(o, peers.unfused(q, k, v)(), atol=1e-5, rtol=0)
    first, second = (torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert peers.replaced() >= 0
