"""Forward and gradients over ranks against the formula of the whole sequence, in float64; parts, precision, counts."""

import pytest
import torch
from ranks import formula, furthest, inputs, over_ranks

from flashlab import runtime
from flashlab.attention.online_softmax import merge_finished
from flashlab.attention.reference import attention
from flashlab.cuda.hopper_backward import hopper_backward
from flashlab.distributed import LAYOUTS, all_gather_attention, ring_attention, run, shard, ulysses_attention, unshard
from flashlab.distributed.parts import block_backward, block_forward, merged
from flashlab.distributed.ring import _together, plan_of, ring_forward
from flashlab.distributed.scaling import sent_bytes

RING = [(world, layout) for world in (1, 2, 3, 4) for layout in LAYOUTS] + [(8, "zigzag")]


@pytest.mark.parametrize(("world", "layout"), RING)
@pytest.mark.parametrize("causal", [False, True])
def test_the_ring_is_exact(world, layout, causal):
    whole = inputs(48)
    found, _ = over_ranks(world, whole, ring_attention, causal=causal, layout=layout)
    assert furthest(found, formula(*whole, causal)) < 1e-13


@pytest.mark.parametrize("function", [all_gather_attention, ulysses_attention])
@pytest.mark.parametrize(("causal", "layout"), [(False, "striped"), (True, "contiguous"), (True, "zigzag")])
def test_the_other_ways_are_exact(function, causal, layout):
    whole = inputs(48, heads=8, kv_heads=4, seed=1)
    found, _ = over_ranks(4, whole, function, causal=causal, layout=layout)
    assert furthest(found, formula(*whole, causal)) < 1e-13


@pytest.mark.parametrize(("world", "heads"), [(4, 2), (2, 2), (8, 2)])
def test_a_mesh_of_both_is_exact(world, heads):
    whole = inputs(48, seed=2)
    found, _ = over_ranks(world, whole, heads=heads, causal=True)
    assert furthest(found, formula(*whole, True)) < 1e-13


@pytest.mark.parametrize(("function", "layout"), [(ring_attention, x) for x in LAYOUTS] + [
    (all_gather_attention, "zigzag")])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_do_not_see_each_other(function, layout, causal):
    whole, documents = inputs(48, seed=3), (8, 24, 16)
    found, _ = over_ranks(4, whole, function, layout=layout, causal=causal, documents=documents)
    assert furthest(found, formula(*whole, causal, documents)) < 1e-13


def test_strides_batches_many_heads_and_a_shard_of_one_row():
    whole = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(24, heads=6, kv_heads=1, batch=3)]
    found, _ = over_ranks(2, whole, ring_attention, causal=True, overlap=False, scale=0.7)
    want = formula(whole[0] * 0.7 * 8**0.5, *whole[1:], True)
    want[1] = want[1] * 0.7 * 8**0.5
    assert furthest(found, want) < 1e-13
    tiny = inputs(4, seed=4)
    found, _ = over_ranks(4, tiny, ring_attention, causal=True, layout="striped")
    assert furthest(found, formula(*tiny, True)) < 1e-13


@pytest.mark.parametrize("backend", ["torch", "reference", "simulation", "triton"])
def test_any_backend_does_a_block_and_its_part_is_wide(backend):
    if backend == "triton" and not runtime.INTERPRETED:
        pytest.skip("on CPU tensors kernels are interpreted")
    whole = inputs(32, head_dim=16, dtype=torch.bfloat16, seed=6)
    o, lse = block_forward(backend, *whole[:3], causal=True, scale=0.25)
    assert o.dtype == lse.dtype == torch.float32 and (o != o.bfloat16()).any(), "a part that was rounded"
    found, _ = over_ranks(2, whole, ring_attention, causal=True, backend=backend)
    one, _ = over_ranks(1, whole, ring_attention, causal=True, backend=backend)
    want = formula(*whole, True)
    assert found[0].dtype == torch.bfloat16
    for many, few, right in zip(found, one, want, strict=True):
        assert furthest([many], [right]) <= 1.5 * furthest([few], [right]) + 1e-6


@pytest.mark.long
def test_a_kernel_of_phase_11_does_the_blocks_and_its_parts_are_merged_where_they_lie():
    whole = inputs(128, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, seed=12)

    def rank(link, q, k, v):
        return ring_forward(link, q, k, v, plan_of(link, q, k, v, causal=True, backend="p11_flash"))[0]

    found = run(2, rank, *([shard(x, r, 2) for r in range(2)] for x in whole[:3]))
    assert found[0].dtype == torch.float32, "the kernel adds to a state that is wide"
    assert (unshard(found).double() - attention(*whole[:3], causal=True)[0]).abs().max() < 1e-3


def test_the_merge_kernel_is_phase_0s_merge():
    if not runtime.INTERPRETED:
        pytest.skip("CPU tensors")
    g = torch.Generator().manual_seed(0)
    o, part = (torch.randn(2, 3, 37, 24, generator=g) for _ in range(2))
    lse, lse_part = (20 * torch.randn(2, 3, 37, generator=g) for _ in range(2))
    rows = slice(5, 30)
    pieces = (part, part.bfloat16(), part.transpose(2, 3).contiguous().transpose(2, 3))
    for piece, first, last in [(x, torch.float32, False) for x in pieces] + [(part, torch.float16, x) for x in (0, 1)]:
        mine = piece[:, :, rows], lse_part[:, :, rows]
        before = o.to(first)
        got = merged((before.clone(), lse.clone()), rows, mine, last=bool(last), by_kernel=True)
        want = merge_finished(before[:, :, rows].float(), lse[:, :, rows], mine[0].float(), mine[1])
        assert got[0].dtype == (first if last else torch.float32)
        assert torch.equal(got[0][:, :, :5], before[:, :, :5].to(got[0].dtype))
        assert torch.equal(got[1][:, :, 30:], lse[:, :, 30:])
        off = 1e-3 if last and first == torch.float16 else 1e-5
        torch.testing.assert_close(got[0][:, :, rows].float(), want[0], rtol=off, atol=off / 10)
        torch.testing.assert_close(got[1][:, :, rows], want[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton", "p11_backward"])
def test_gradients_of_parts_of_the_keys_add_up(backend):
    """With o and lse of whole rows, whatever kernel computes the probabilities again."""
    if backend != "torch" and not runtime.INTERPRETED:
        pytest.skip("CPU tensors")
    q, k, v, grad_o = inputs(64, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, seed=9)
    o, lse = attention(q, k, v)
    want = formula(q, k, v, grad_o, False)[1:]
    dq, dk, dv = torch.zeros(q.shape), [], []
    for keys in (slice(0, 40), slice(40, 64)):
        given = (grad_o, q, k[:, :, keys].contiguous(), v[:, :, keys].contiguous(), o.half(), lse.float())
        if backend == "p11_backward":
            found = hopper_backward(*given)
        else:
            found = block_backward(backend, *given, causal=False, scale=64**-0.5)
        dq += found[0]
        dk.append(found[1])
        dv.append(found[2])
    assert furthest([dq, torch.cat(dk, 2), torch.cat(dv, 2)], want) < 4e-3


@pytest.mark.parametrize("way", [ring_attention, all_gather_attention, ulysses_attention])
@pytest.mark.parametrize("world", [1, 4])
def test_every_rank_sends_what_the_formula_says(way, world):
    whole = inputs(64, heads=8, kv_heads=4, dtype=torch.bfloat16, seed=10)
    _, sent = over_ranks(world, whole, way, causal=True)
    name = {ring_attention: "ring", all_gather_attention: "gather", ulysses_attention: "ulysses"}[way]
    shape = dict(heads=8, kv_heads=4, head_dim=8)
    want = tuple(sent_bytes(name, world, 64 // world, backward=backward, **shape) for backward in (False, True))
    assert set(sent) == {want}


def test_few_heads_at_a_time_give_the_same_result():
    whole = inputs(256, heads=8, kv_heads=4, head_dim=16, seed=12)
    want, sent = over_ranks(2, whole, ring_attention, causal=True)
    found, again = over_ranks(2, whole, ring_attention, causal=True, together=1)
    assert furthest(found, want) < 1e-13 and sent == again
    x = [shard(whole[1], r, 2) for r in range(2)]
    with pytest.raises(ValueError, match="together is 3; it must divide the 4 key heads"):
        run(2, lambda link, x: ring_attention(x, x, x, group=link, together=3), x)


@pytest.mark.parametrize(("n", "heads", "kv_heads", "few"), [
    (2**10, 16, 16, 16), (2**15, 16, 16, 16), (2**17, 16, 16, 2), (2**18, 16, 16, 1), (2**17, 32, 8, 1)])  # fmt: skip
def test_only_long_sequences_go_round_by_few_heads(n, heads, kv_heads, few):
    assert _together(heads * n * n * 128, kv_heads) == few
