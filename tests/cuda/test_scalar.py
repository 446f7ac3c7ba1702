"""Phase 6: no step does what it should not. (Lecture 6: the checker finds each right, and each costs what it says.)"""

import pytest
import torch
from drawn import drawn

from flashlab.cuda import load_inline, missing
from flashlab.cuda.operators import module
from flashlab.kernels import steps

STEPS = [s.name for s in steps(6)]


@pytest.mark.skipif(missing("nvcc") is not None, reason="no GPU with nvcc")
@pytest.mark.parametrize("name", STEPS)
def test_the_same_bits_every_time_on_a_gpu(name):
    q, k, v, _ = drawn(2, 4, 2, 500, 700, 64, layout="bnhd", device="cuda")
    first = module(name, dtype=torch.float32).forward(q, k, v, causal=True)
    for _ in range(20):
        again = module(name, dtype=torch.float32).forward(q, k, v, causal=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_no_step_needs_more_shared_memory_than_a_consumer_gpu_has():
    q = torch.zeros(1, 1, 8, 128)
    for s in steps(6):
        module = load_inline(s, backend="emulator")
        module.forward(q, q, q, shared_limit=99 * 1024)
        module.forward(*[q[..., :64]] * 3, sms=1, shared_limit=99 * 1024)
