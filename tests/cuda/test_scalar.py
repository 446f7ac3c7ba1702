"""Phase 6: no step does what it should not. (Lecture 6: the checker finds each right, and each costs what it says.)"""

import pytest
import torch
from drawn import drawn

from flashlab.attention import reference
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


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("step", steps(6), ids=STEPS)
@pytest.mark.every(2)
def test_the_emulator_finds_nothing(step, head_dim):
    checked = load_inline(step, head_dim=head_dim, check=True)
    for seq_q, seq_k, causal, sms in ((70, 100, False, 132), (130, 150, True, 1)):  # both tile shapes of the last step
        q, k, v, _ = drawn(1, 2, 1, seq_q, seq_k, head_dim, layout="bnhd", device="cpu")
        o, _ = checked.forward(q, k, v, causal=causal, sms=sms)
        assert checked.report.ok, checked.report
        torch.testing.assert_close(o.double(), reference.attention(q, k, v, causal=causal)[0], atol=2e-5, rtol=0)


def test_no_step_needs_more_shared_memory_than_a_consumer_gpu_has():
    q = torch.zeros(1, 1, 8, 128)
    for s in steps(6):
        module = load_inline(s, backend="emulator")
        module.forward(q, q, q, shared_limit=99 * 1024)
        module.forward(*[q[..., :64]] * 3, sms=1, shared_limit=99 * 1024)
