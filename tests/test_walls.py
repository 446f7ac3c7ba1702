"""Phase 1: what naive attention costs, the schemes' kernels, and what the compiler says of them."""

import itertools
import math

import pytest
import torch
from drawn import one_head, one_heads_attention
from torch.utils.flop_counter import FlopCounterMode

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import attainable_tflops, naive_cost, naive_peak_bytes, peak_bytes, trace_ops
from flashlab.attention.naive import naive_attention
from flashlab.bench import published
from flashlab.check import verify_one_head


def test_naive_attention_is_the_oracle():
    q, k, v = torch.randn(3, 2, 3, 50, 16, dtype=torch.float64)
    for scale in (None, 0.3):
        want, _ = reference.attention(q, k, v, scale=scale)
        torch.testing.assert_close(naive_attention(q, k, v, scale=scale), want)


@pytest.mark.parametrize(("heads", "m", "n", "d"), [(1, 64, 64, 16), (6, 40, 96, 32), (1, 1, 300, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_cost_is_what_pytorch_does(heads, m, n, d, dtype):
    q = torch.randn(heads, m, d, dtype=dtype)
    k, v = torch.randn(2, heads, n, d, dtype=dtype)
    size = dict(seq_q=m, heads=heads, itemsize=dtype.itemsize)
    cost, ops = naive_cost(n, d, **size), trace_ops(naive_attention, q, k, v)
    assert [(op.bytes_read, op.bytes_written) for op in ops] == [line[1:3] for line in cost.lines]
    assert max(op.live_bytes for op in ops) == naive_peak_bytes(n, d, **size)
    with FlopCounterMode(display=False) as counter:
        naive_attention(q, k, v)
    assert counter.get_total_flops() == cost.lines[0].flops + cost.lines[3].flops


def test_the_roofline_has_a_slope_and_a_roof():
    gpu = runtime.GPUS["A100"]
    assert attainable_tflops(10, gpu) == pytest.approx(10 * gpu.memory_gb_s / 1000)
    assert attainable_tflops(10_000, gpu) == gpu.fp16_tflops
    assert attainable_tflops(gpu.ridge, gpu) == pytest.approx(gpu.fp16_tflops)


def test_the_trace_sees_frees_and_skips_views():
    def fn(x):
        y = x + 1
        y = (y * 2).T  # the first y is gone once the product is there
        z = y.reshape(-1)[:10]
        return z.exp()

    ops = trace_ops(fn, torch.ones(100, 100).T.contiguous())
    assert [op.name for op in ops if op.name in ("add", "mul", "exp")] == ["add", "mul", "exp"]
    by_name = {op.name: op for op in ops}
    assert by_name["add"].live_bytes == 40_000 and by_name["mul"].live_bytes == 80_000
    assert "t" not in by_name and "slice" not in by_name


def test_in_place_work_counts_as_traffic_and_not_as_memory():
    x = torch.ones(100)
    ops = trace_ops(lambda: x.mul_(2))
    assert [(op.name, op.bytes_written, op.live_bytes) for op in ops] == [("mul", 400, 0)]
    assert peak_bytes(lambda: None) == 0


@pytest.mark.parametrize("how", schemes.ESCAPE_HATCHES)
def test_every_escape_hatch_is_right(how):
    max_seq = 300 if runtime.INTERPRETED else 130  # compiled, each length is a compilation of seconds
    verify_one_head(lambda q, k, v, *, scale=None: schemes.scheme_b(q, k, v, how=how, scale=scale), max_seq=max_seq)


def test_two_passes_are_right():
    verify_one_head(schemes.two_pass, max_seq=300)
    q, k, v = one_head(33, 1000, 64, torch.float16)
    want, want_lse = one_heads_attention(q, k, v)
    o, lse = schemes.two_pass(q, k, v, BLOCK_N=128)
    assert (o - want).abs().max() < 1e-3 and (lse - want_lse).abs().max() < 1e-5


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_the_variants_of_scheme_a_compute_the_same(flags):
    q, k, v = one_head(70, 100, 64, torch.float16)
    constants = dict(zip(("K_BY_ROWS", "V_LATE", "P_FLOAT32"), flags, strict=True))
    o, lse = schemes.launch(schemes.scheme_a_variant_kernel, q, k, v, BLOCK_N=128, **constants)
    want, want_lse = one_heads_attention(q, k, v)
    assert (o - want).abs().max() < 2e-3 and (lse - want_lse).abs().max() < 1e-4


WALLS = (schemes.scheme_a, schemes.scheme_b, schemes.two_pass)


@pytest.mark.parametrize("fn", WALLS)
def test_rows_without_a_finite_score_are_a_sentence(fn):
    q, k, v = one_head(20, 130, 16, torch.float16)
    q[:, 0], q[3, 0] = 1.0, -1.0
    k[:, 0] = math.inf
    with pytest.raises(ValueError, match=r"row 3 of q has scores of -inf and, in a block of keys, no other"):
        fn(q, k, v)
    k[:, 0] = math.nan  # a NaN is no sentence: it is the answer
    assert fn(q, k, v)[0].isnan().all()


@pytest.mark.parametrize("fn", WALLS)
def test_offsets_past_32_bits_are_a_sentence(fn):
    q, k, v = one_head(40, 40, 16, torch.float16)
    apart = torch.empty(0, dtype=torch.float16, device="meta").as_strided((40, 16), (2**26, 1))
    assert 39 * 2**26 + 15 >= 2**31
    for far in ((apart, k, v), (q, apart, v), (q, k, apart)):
        meta = [x.to("meta") if x is not apart else x for x in far]
        with pytest.raises(ValueError, match=r"ends 2617245711 elements behind .* count in 32 bits, to 2\^31"):
            fn(*meta)
    many = q[:1].expand(2**28, 16)
    with pytest.raises(ValueError, match="the output ends 4294967295 elements behind"):
        fn(many, k, v)


def test_the_launcher_asks_the_compiler_first():
    q, k, v = one_head(16, 256, 128, torch.float16)
    with pytest.raises(schemes.OutOfSharedMemory, match="147456 bytes .* sm_120 has 101376"):
        schemes.scheme_a(q, k, v, as_if_on="RTX 5060 Ti")


def test_a_slice_is_refused_interpreted_too():  # compiled, lecture 1 has it
    with pytest.raises(Exception, match="unsupported tensor index"):
        schemes.scheme_b(*one_head(16, 128, 64, torch.float16), how="slice")


def test_published_tables_load():
    assert len(published.load("mma_stages_ada")) == 180
    assert published.load("lm_forward_backward")[0]["avg_backward_s"] is None
    with pytest.raises(KeyError, match="attention_memory"):
        published.load("nothing")
    readme = (published.FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in published.NAMES)
