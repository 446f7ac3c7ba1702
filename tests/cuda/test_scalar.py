"""Phase 6: every step is right, does nothing that it should not, and costs what the lecture says it costs."""

import pytest
import torch

from flashlab.attention import reference
from flashlab.attention.cost import FA1_BLOCK_N, FA2_BLOCK_M, fa1_cost, fa2_cost
from flashlab.cuda import load_inline, missing
from flashlab.cuda.operators import module
from flashlab.kernels import source, steps

STEPS = [s.name for s in steps(6)]
DEVICES = ["cpu", *(["cuda"] if missing("nvcc") is None else [])]
# batch, heads, kv_heads, seq_q, seq_k, causal: one, tails on both sides, more than one tile, rows that see nothing, GQA
CASES = (
    (1, 1, 1, 1, 1, False), (1, 2, 1, 100, 77, False), (2, 4, 2, 33, 130, True), (1, 1, 1, 70, 20, True),
    (1, 3, 3, 130, 129, True), (1, 1, 1, 2, 300, False),
)  # fmt: skip


def tensors(batch, heads, kv_heads, seq_q, seq_k, head_dim, device="cpu"):
    torch.manual_seed(seq_q)
    q = 2 * torch.randn(batch, seq_q, heads, head_dim).transpose(1, 2)  # [B, N, H, D] in memory
    k, v = (torch.randn(batch, kv_heads, seq_k, head_dim) for _ in range(2))
    # The last key is far the largest: the row maximum moves in the last tile.
    k[:, :, -1] *= 3
    return [x.to(device) for x in (q, k, v + 0.5)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(s, 64) for s in STEPS] + [pytest.param(s, 128, marks=[] if s == STEPS[-1] else pytest.mark.long) for s in STEPS],
)
def test_right_on_every_case(name, head_dim, device):
    loaded = module(name, head_dim=head_dim, dtype=torch.float32, on_gpu=device == "cuda")
    for *shape, causal in CASES:
        q, k, v = tensors(*shape, head_dim, device)
        o, lse = loaded.forward(q, k, v, causal=causal)
        want, want_lse = reference.attention(q, k, v, causal=causal)
        assert torch.isfinite(o).all()
        torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=0, msg=lambda m: f"{shape} causal={causal}: {m}")  # noqa: B023
        torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_and_nan_outside(device):
    # Scores of several hundred overflow exp() without the maximum; NaN beyond the last key must not be read.
    for name in STEPS:
        loaded = module(name, dtype=torch.float32, on_gpu=device == "cuda")
        q, k, v = (torch.full((1, 1, 96, 64), torch.nan, device=device)[:, :, :n] for n in (50, 70, 70))
        torch.manual_seed(0)
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape))
        q *= 30
        o, lse = loaded.forward(q, k, v)
        want, want_lse = reference.attention(q, k, v)
        torch.testing.assert_close(o.double(), want, atol=1e-3, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=0, rtol=1e-5)


@pytest.mark.skipif(len(DEVICES) == 1, reason="no GPU with nvcc")
@pytest.mark.parametrize("name", STEPS)
def test_the_same_bits_every_time_on_a_gpu(name):
    q, k, v = tensors(2, 4, 2, 500, 700, 64, "cuda")
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
        q, k, v = tensors(1, 2, 1, seq_q, seq_k, head_dim)
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
