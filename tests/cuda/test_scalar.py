"""Phase 6: no step does what it should not; each costs what the lecture says, whose checker finds them right."""

import pytest
import torch
from drawn import drawn

from flashlab.attention import reference
from flashlab.attention.cost import FA1_BLOCK_N, FA2_BLOCK_M, fa1_cost, fa2_cost
from flashlab.cuda import load_inline, missing
from flashlab.cuda.operators import module
from flashlab.kernels import source, steps

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


# ---- what the steps cost ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("seq_q", "seq_k"), [(128, 128), (200, 77), (256, 512)])
def test_the_bytes_of_both_loop_orders_are_the_formulas(seq_q, seq_k):
    q, k = torch.randn(1, 1, seq_q, 64), torch.randn(1, 1, seq_k, 64)
    for step, formula in ((steps(6)[0], fa1_cost), (steps(6)[1], fa2_cost)):
        module, expected = load_inline(step, check=True), formula(seq_q, seq_k, 64)
        module.forward(q, k, k)
        assert module.report.counters["global_load_bytes"] == expected.bytes_read
        assert module.report.counters["global_store_bytes"] == expected.bytes_written


def test_the_formulas_block_sizes_are_the_kernels():
    for name in STEPS[:2]:
        assert f"BLOCK_M = {FA2_BLOCK_M}, BLOCK_N = {FA1_BLOCK_N}," in source(name)
    # N = 1024, D = 64: FlashAttention-1 asks for 26.5 MB, FlashAttention-2 for 4.7 MB
    assert (fa1_cost(1024, 1024, 64).bytes, fa2_cost(1024, 1024, 64).bytes) == (26_497_024, 4_722_688)
