"""The bench of attention alone, on a CPU: what it measures, what it holds in memory, what runs out of it."""

import pytest
import torch

from flashlab.bench import attention, peers

JOB = {"part": "attention", "d_model": 16, "seq_len": 40, "dtype": "float32"}


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
