"""Phase 1: what naive attention costs, the schemes' kernels, and what the compiler says of them."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.errors import OutOfResources

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import attainable_tflops, naive_cost, naive_peak_bytes, peak_bytes, trace_ops
from flashlab.attention.naive import naive_attention
from flashlab.bench import published, walls
from flashlab.check import verify_one_head
from flashlab.triton_tools.compile_report import TARGETS, compile_report, compile_reports
from flashlab.triton_tools.watch import hbm_traffic


def one_head(m, n, d, dtype=torch.float16):
    generator = torch.Generator().manual_seed(m * 1000 + n)
    return [torch.randn(rows, d, generator=generator).to(runtime.device(), dtype) for rows in (m, n, n)]


# ---- cost -----------------------------------------------------------------------------------------------------------


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


# ---- trace_ops ------------------------------------------------------------------------------------------------------


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


# ---- the kernels ----------------------------------------------------------------------------------------------------


def test_scheme_a_is_right():
    report = verify_one_head(schemes.scheme_a, dtypes=(torch.float16, torch.bfloat16), max_seq=256)
    assert report.cases >= 15


@pytest.mark.parametrize("how", schemes.ESCAPE_HATCHES)
def test_every_escape_hatch_is_right(how):
    max_seq = 300 if runtime.INTERPRETED else 130  # compiled, each length is a compilation of seconds
    verify_one_head(lambda q, k, v, *, scale=None: schemes.scheme_b(q, k, v, how=how, scale=scale), max_seq=max_seq)


def test_two_passes_are_right():
    verify_one_head(schemes.two_pass, max_seq=300)
    q, k, v = one_head(33, 1000, 64)
    want, want_lse = reference.attention(*(x[None, None] for x in (q, k, v)))
    o, lse = schemes.two_pass(q, k, v, BLOCK_N=128)
    assert (o - want[0, 0]).abs().max() < 1e-3 and (lse - want_lse[0, 0]).abs().max() < 1e-5


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_the_variants_of_scheme_a_compute_the_same(flags):
    q, k, v = one_head(70, 100, 64)
    constants = dict(zip(("K_BY_ROWS", "V_LATE", "P_FLOAT32"), flags, strict=True))
    o, lse = schemes.launch(schemes.scheme_a_variant_kernel, q, k, v, BLOCK_N=128, **constants)
    want, want_lse = reference.attention(*(x[None, None] for x in (q, k, v)))
    assert (o - want[0, 0]).abs().max() < 2e-3 and (lse - want_lse[0, 0]).abs().max() < 1e-4


def test_scheme_a_moves_no_n_squared():
    q, k, v = one_head(200, 150, 64)
    traffic = hbm_traffic(schemes.scheme_a, q, k, v)
    assert traffic.bytes_read == (200 + 4 * 2 * 150) * 64 * 2
    assert traffic.bytes_written == 200 * 64 * 2 + 200 * 4


WALLS = (schemes.scheme_a, schemes.scheme_b, schemes.two_pass)


@pytest.mark.parametrize("fn", WALLS)
def test_rows_without_a_finite_score_are_a_sentence(fn):
    q, k, v = one_head(20, 130, 16)
    q[:, 0], q[3, 0] = 1.0, -1.0
    k[:, 0] = math.inf
    with pytest.raises(ValueError, match=r"row 3 of q has scores of -inf and, in a block of keys, no other"):
        fn(q, k, v)
    k[:, 0] = math.nan  # a NaN is no sentence: it is the answer
    assert fn(q, k, v)[0].isnan().all()


@pytest.mark.parametrize("fn", WALLS)
def test_offsets_past_32_bits_are_a_sentence(fn):
    q, k, v = one_head(40, 40, 16)
    apart = torch.empty(0, dtype=torch.float16, device="meta").as_strided((40, 16), (2**26, 1))
    assert 39 * 2**26 + 15 >= 2**31
    for far in ((apart, k, v), (q, apart, v), (q, k, apart)):
        meta = [x.to("meta") if x is not apart else x for x in far]
        with pytest.raises(ValueError, match=r"ends 2617245711 elements behind .* count in 32 bits, to 2\^31"):
            fn(*meta)
    many = q[:1].expand(2**28, 16)
    with pytest.raises(ValueError, match="the output ends 4294967295 elements behind"):
        fn(many, k, v)


# ---- the physical wall ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [TARGETS[-1:], pytest.param(TARGETS, marks=pytest.mark.long)], ids=["one", "all"])
@pytest.mark.long
def test_the_compiler_agrees_with_the_formula(targets):
    for n, d in ((32, 64), (128, 128)):
        for report in schemes.scheme_a_reports([n], d, targets):
            assert report.shared_bytes == schemes.scheme_a_shared_bytes(n, d), report


@pytest.mark.long
def test_scheme_a_dies_where_the_limit_says():
    def dies_at(target):
        limit = runtime.limits(target).shared_per_block
        return schemes.first_failing_seq_len(limit, lambda n: schemes.scheme_a_shared_bytes(n, 128))

    assert {target: dies_at(target) for target in TARGETS} == {
        "sm_80": 512, "sm_86": 256, "sm_89": 256, "sm_90": 512, "sm_120": 256,
    }  # fmt: skip
    assert not schemes.scheme_a_report(256, 128, "RTX 5060 Ti").fits
    assert schemes.scheme_a_report(256, 128, "H200").fits


def test_the_launcher_asks_the_compiler_first():
    q, k, v = one_head(16, 256, 128)
    with pytest.raises(schemes.OutOfSharedMemory, match="147456 bytes .* sm_120 has 101376"):
        schemes.scheme_a(q, k, v, as_if_on="RTX 5060 Ti")


@pytest.mark.long
def test_the_published_byte_count_is_one_way_to_write_scheme_a():
    ways = [(False, False, False), (True, False, False), (True, True, True)]
    arguments = [
        schemes.kernel_arguments(256, 128, BLOCK_N=256, K_BY_ROWS=a, V_LATE=b, P_FLOAT32=c) for a, b, c in ways
    ]
    reports = compile_reports(schemes.scheme_a_variant_kernel, arguments, targets=["sm_120"], num_stages=1)
    assert [report.shared_bytes for report in reports] == [147456, 98304, 131072]


# ---- the logical wall -----------------------------------------------------------------------------------------------


def scheme_b_arguments(how, d=64):
    return schemes.kernel_arguments(128, d, BLOCK_N=64, HALVINGS=1, HOW=how)


def test_a_slice_is_refused_compiled_and_interpreted():
    report = compile_report(schemes.scheme_b_kernel, scheme_b_arguments("slice"), target="sm_120", num_stages=1)
    assert not report.ok and "unsupported tensor index" in report.error
    with pytest.raises(Exception, match="unsupported tensor index"):
        schemes.scheme_b(*one_head(16, 128, 64), how="slice")


@pytest.mark.long
def test_the_hatches_compile_and_need_q_and_k():
    arguments = [scheme_b_arguments(how) for how in schemes.ESCAPE_HATCHES]
    for report in compile_reports(schemes.scheme_b_kernel, arguments, targets=["sm_90", "sm_120"], num_stages=1):
        assert report.ok and report.shared_bytes == schemes.scheme_b_shared_bytes(128, 64), report


@pytest.mark.long
def test_two_passes_fit_everywhere():
    for report in compile_reports(
        schemes.two_pass_kernel,
        [schemes.kernel_arguments(4096, 128, BLOCK_N=64)],
        targets=["sm_90", "sm_120"],  # the most shared memory, and the least
        num_stages=1,
    ):
        assert report.fits and report.shared_bytes == 3 * 64 * 128 * 2


# ---- recorded and published figures ---------------------------------------------------------------------------------


def test_published_tables_load():
    assert set(published.NAMES) >= {"attention_memory", "mma_stages_ada", "triton_vs_torch"}
    rows = published.load("mma_stages_ada")
    assert len(rows) == 180 and rows[0]["head_dim"] == 64 and isinstance(rows[0]["ms"], float)
    assert published.load("attention_memory")[4]["mem_before_mb"] == "OOM"
    assert published.load("lm_forward_backward")[0]["avg_backward_s"] is None
    with pytest.raises(KeyError, match="attention_memory"):
        published.load("nothing")
    readme = (published.FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in published.NAMES)


def test_the_published_memory_table_follows_the_formula():
    rest = [
        row["mem_before_mb"] - 8 * (row["seq_len"] ** 2 + 4 * row["seq_len"] * row["d_model"]) * 4 / 1e6
        for row in published.load("attention_memory")
        if row["mem_before_mb"] != "OOM"
    ]
    assert len(rest) == 16 and max(rest) - min(rest) < 2


def test_triton_s_figures_are_read():
    want = {"resource": "shared memory", "required": 278528, "limit": 232448}
    assert walls.out_of_resources(OutOfResources(278528, 232448, "shared memory")) == want
    assert walls.out_of_resources(ValueError("out of resource")) is None


def test_what_is_recorded_can_be_drawn():
    for run in walls.recorded():
        assert {"gpu", "torch", "triton", "date"} <= set(run["machine"])
        assert {"lengths", "scheme_a", "scheme_b"} <= set(run)
