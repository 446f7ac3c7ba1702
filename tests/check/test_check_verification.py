"""verify and its fronts: right implementations pass, whatever their tiles; the form of an answer is checked too."""

from functools import partial

import pytest
import torch
from failing import failure_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.triton_minimal import flash_attention_forward
from flashlab.check import diagnose, verify, verify_block, verify_one_head
from flashlab.check.cases import Case, case_list, make_inputs
from flashlab.check.mistakes.attention import flash_forward
from flashlab.check.poison import MarkedEmpty, carried, guarded, memory, unwritten
from flashlab.check.tolerance import excess, truth, within
from flashlab.check.verification import run

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def in_float32(q, k, v, *, causal=False, scale=None):
    """The oracle's mathematics in float32, for any shape and dtype: right, and written by nobody here."""
    o, lse = reference.attention_low_precision(q.float(), k.float(), v.float(), causal=causal, scale=scale)
    return o.to(q.dtype), lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_eager_attention_in_float32_passes(dtype):
    report = verify(in_float32, causal=True, gqa=True, dtypes=(dtype,), head_dims=(64, 16, 40, 128), deterministic=True)
    assert report.cases > 35 and report.worst < 2.5 and report.lse_error < 1e-5


def test_the_full_list_passes():
    report = verify(in_float32, causal=True, gqa=True, dtypes=DTYPES, head_dims=(64, 128), full=True)
    assert report.cases > 70


def test_the_low_precision_twin_is_not_good_enough():
    # Its scores are rounded to 16 bits: that is why it is the yardstick, not the goal.
    assert failure_of(verify, reference.attention_low_precision).diagnosis == "scores-in-low-precision"


def test_the_triton_kernel_passes():
    assert verify_one_head(flash_attention_forward, dtypes=DTYPES, head_dims=(64, 16, 128)).cases > 25


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seq_q=st.integers(1, 90),
    seq_k=st.integers(1, 130),
    head_dim=st.sampled_from([16, 32, 40, 64, 80]),
    block_m=st.sampled_from([16, 32, 64]),
    block_n=st.sampled_from([16, 32, 48, 128]),
    dtype=st.sampled_from(DTYPES),
    content=st.sampled_from(
        ["plain", "late", "rising", "falling", "near +200", "near -200", "spread", "huge", "creeping"]
    ),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
)
def test_no_right_answer_is_rejected(on_cpu, seq_q, seq_k, head_dim, block_m, block_n, dtype, content, causal, heads):
    case = Case(
        "drawn", seq_q, seq_k, content, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype, causal=causal
    )
    forward = partial(flash_forward, BLOCK_M=block_m, BLOCK_N=block_n)
    run(lambda c, q, k, v: forward(q, k, v, causal=c.causal, scale=c.softmax_scale), [case])


@pytest.mark.parametrize(
    "change, diagnosis, words",
    [
        (lambda o, lse: None, "returned-none", "return"),
        (lambda o, lse: o, "wrong-type", "(o, lse)"),
        (lambda o, lse: (o, lse, o), "wrong-type", "of 3 values"),
        (lambda o, lse: (o, 3.0), "wrong-type", "lse is a float"),
        (lambda o, lse: (o[:, :, :-1], lse), "wrong-shape", "[1, 1, 15, 64]"),
        (lambda o, lse: (o, lse[..., None]), "wrong-shape", "lse has shape"),
        (lambda o, lse: (o.float(), lse), "wrong-dtype", "torch.float16"),
        (lambda o, lse: (o, lse.half()), "wrong-dtype", "torch.float32"),
        (lambda o, lse: (o.to("meta"), lse), "wrong-device", "meta"),
    ],
)
def test_the_form_of_the_answer_is_checked(change, diagnosis, words):
    failed = failure_of(
        verify, lambda q, k, v, *, causal, scale: change(*in_float32(q, k, v, causal=causal, scale=scale))
    )
    assert failed.diagnosis == diagnosis and words in str(failed), str(failed)


def test_shapes_are_told_in_the_learners_terms():
    failed = failure_of(verify_one_head, lambda q, k, v: (q[:-1], q[:, 0].float()))
    assert "o has shape [15, 64]; it should be [16, 64]" in str(failed)


def test_an_output_that_is_used_again_is_found():
    kept = torch.empty(200_000, dtype=torch.float16, device=runtime.device())

    def reuse(q, k, v, *, causal, scale):
        o, lse = in_float32(q, k, v, causal=causal, scale=scale)
        shared = kept[: o.numel()].view(o.shape)
        shared.copy_(o)
        return shared, lse

    assert failure_of(verify, reuse).diagnosis == "output-reused"


def test_a_kernel_that_writes_past_its_inputs_is_found():
    def spill(q, k, v, *, causal, scale):
        k.as_strided((k.numel() + 1,), (1,))[-1] = 0.0  # one element behind K
        return in_float32(q, k, v, causal=causal, scale=scale)

    assert failure_of(verify, spill, strided=False).diagnosis == "input-modified"


def test_an_output_that_depends_on_the_call_is_found():
    calls = []

    def drifting(q, k, v, *, causal, scale):
        calls.append(1)
        o, lse = in_float32(q, k, v, causal=causal, scale=scale)
        return o * (1 + 2e-7 * (len(calls) % 2)), lse  # the last bit, far below what is allowed

    assert verify(drifting, dtypes=(torch.float32,)).cases > 19
    assert failure_of(verify, drifting, deterministic=True, dtypes=(torch.float32,)).diagnosis == "not-deterministic"


def test_a_learners_exception_names_the_case():
    def breaks(q, k, v, *, causal, scale):
        if q.shape[2] == 5:
            raise ZeroDivisionError("mine")
        return in_float32(q, k, v, causal=causal, scale=scale)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        verify(breaks)
    if hasattr(caught.value, "__notes__"):
        assert "fewer keys than a tile" in caught.value.__notes__[0]


def test_a_function_without_causal_or_scale_is_called_without_them():
    assert verify(lambda q, k, v: in_float32(q, k, v)).cases >= 19
    assert failure_of(verify, lambda q, k, v: in_float32(q, k, v), causal=True).diagnosis == "wrong-call"
    assert failure_of(verify, "not a function").diagnosis == "wrong-type"


def test_a_report_says_what_was_found(on_cpu):
    report = verify(flash_forward, max_seq=100)
    assert repr(report).startswith(f"✓ {report.cases} cases · worst error ") and "lse error" in repr(report)
    assert report.verdict == f"{report.cases} cases, all within their bounds"
    assert len(report.details.rows) == report.cases and "| Case |" in report.details._repr_markdown_()


def test_max_seq_bounds_the_lengths():
    assert all(max(c.seq_q, c.seq_k) <= 64 for c in case_list(causal=True, max_seq=64))
    assert all(c.seq_q == c.seq_k for c in case_list(causal=True, cross=False))
    with pytest.raises(ValueError, match="max_seq=0"):
        case_list(max_seq=0)


# ---- the tolerance --------------------------------------------------------------------------------------------------


def test_nan_and_a_wrong_infinity_are_never_within():
    want, bound = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0])
    assert within(torch.tensor([2.0, 3.0]), want, bound)
    assert not within(torch.tensor([float("nan"), 2.0]), want, bound)
    assert not within(torch.tensor([float("inf"), 2.0]), want, bound)
    empty = torch.tensor([-float("inf")])
    assert within(empty, empty, torch.tensor([1e-5]))
    assert not within(-empty, empty, torch.tensor([1e-5]))
    assert excess(torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([0.25])).item() == 2.0


@pytest.mark.parametrize("wrong", [lambda o: o * 0.98, lambda o: o.roll(1, -2), lambda o: o + 0.01])
def test_long_rows_with_small_outputs_are_not_let_through(wrong):
    """At this length the outputs differ by less than atol=1e-2 from their mean; the bound is far below that."""
    case = Case("long", 16, 4096, head_dim=64)
    q, k, v = make_inputs(case, torch.device("cpu"))
    want = truth(case, q, k, v)
    assert want.o_bound.max() < 2e-3
    assert not within(wrong(want.o), want.o, want.o_bound)


def test_a_prediction_that_is_right_explains_nothing():
    right, bound = torch.randn(8, 8, dtype=torch.float64), torch.full((8, 8), 1e-3, dtype=torch.float64)
    got, predicted = right + 1.05e-3, right + 1e-4  # just outside; one tile, so that no correction matters
    assert not diagnose._same(got, predicted, right, bound, torch.float64, False)


def test_large_scores_do_not_widen_the_bound_to_the_twins_error():
    case = Case("large", 40, 200, "spread")
    want = truth(case, *make_inputs(case, torch.device("cpu")))
    assert want.twin_error > 0.03
    assert want.o_bound.max() < 0.01


# ---- inputs and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "by token", "spaced", "rows apart", "by columns"])
def test_inputs_are_surrounded_by_nan(layout):
    case = Case("x", 8, 8, heads=2, kv_heads=2, head_dim=16, layout=layout)
    for x in make_inputs(case, torch.device("cpu")):
        assert x.shape == (1, 2, 8, 16) and x.isfinite().all()
        assert x.is_contiguous() == (layout == "contiguous")
        start = x.storage_offset() + x.stride(1) + 7 * x.stride(2)
        behind = start + (16 if layout == "rows apart" else x.stride(2))
        everything = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        last = 1 + x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        assert everything.numel() - last >= 256 * x.stride(2)  # a tile that runs over the end stays in our memory
        assert everything[behind].isnan()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_memory_that_nobody_wrote_is_recognised(dtype):
    with MarkedEmpty():
        fresh = torch.empty(3, 4, dtype=dtype)
        assert unwritten(torch.empty_like(fresh)).all() and unwritten(fresh.new_empty(2)).all()
    fresh[1] = float("nan")
    assert unwritten(fresh).tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert unwritten(fresh.to(torch.float16))[0].all() or dtype == torch.bfloat16


# ---- no keys, no queries, no batch ----------------------------------------------------------------------------------


def test_empty_inputs_can_be_asked_for():
    assert verify(in_float32, causal=True, empty=True).cases == verify(in_float32, causal=True).cases + 3

    def nan_without_keys(q, k, v, *, causal, scale):
        o, lse = in_float32(q, k, v, causal=causal, scale=scale)
        return (o if k.shape[2] else torch.full_like(o, float("nan"))), lse

    failed = failure_of(verify, nan_without_keys, empty=True)
    assert failed.diagnosis == "masked-rows-nan" and "no keys" in failed.case


# ---- the classes of lengths -----------------------------------------------------------------------------------------


def classes(lengths: list[int], tile: int) -> set[str]:
    """What a kernel with this tile can get wrong about a length."""
    found = set()
    for length in lengths:
        words = {0: "full", 1: "one more", tile - 1: "one less"}.get(length % tile, "ragged")
        found |= {words} if length < tile or words != "one more" else {f"{words}, several tiles"}
    return found


@pytest.mark.parametrize("tile", [16, 32, 64, 128, 256])
def test_every_class_of_length_and_diagonal_is_among_the_cases(tile):
    plain = [c for c in case_list() if c.content == "plain"]
    causal = [c for c in case_list(causal=True) if c.causal and c.content == "plain"]
    for cases in (plain, causal):
        for lengths in ([c.seq_q for c in cases], [c.seq_k for c in cases]):
            assert {"full", "one less", "one more, several tiles", "ragged"} <= classes(lengths, tile)
    shifts = {c.seq_k - c.seq_q for c in causal if max(c.seq_q, c.seq_k) > min(tile, 128)}
    assert {-1, 0, 1} <= shifts
    assert any(s < -1 and s % tile for s in shifts)  # rows that see no key and rows that do, in one tile
    assert any(s > 1 and s % tile for s in shifts)


def test_every_head_dim_that_is_asked_for_meets_ragged_lengths_and_several_heads():
    for causal in (False, True):
        asked = (64, 20, 59, 128, 256)
        cases = case_list(causal=causal, head_dims=asked)
        for head_dim in asked:
            mine = [c for c in cases if c.head_dim == head_dim and c.causal == causal]
            assert any(c.seq_q % 16 and c.seq_k % 16 for c in mine)
            assert causal or any(c.heads > 1 and c.batch > 1 for c in mine)


def test_the_oracle_stands_beside_the_lowest_numbers():
    case = next(c for c in case_list() if c.scale is not None and c.scale > 1e30)
    q, k, v = make_inputs(case, torch.device("cpu"))
    o, lse = reference.attention(q, k, v, scale=case.softmax_scale)
    assert torch.allclose(o, v.double().mean(2, keepdim=True).expand(o.shape), rtol=1e-12)
    assert bool((lse < -2.3e38).all()) and bool((lse * 1.4427 > torch.finfo(torch.float32).min).all())


@pytest.mark.parametrize("block_n", [16, 64, 128])
def test_scaling_q_or_the_scores_is_right_at_any_height(on_cpu, block_n):
    def scaled_q(Q, K, V, BLOCK_N, scale=None):
        q = Q.float() * (Q.shape[1] ** -0.5 if scale is None else scale)
        m, l, acc = q.new_full([len(q)], -float("inf")), q.new_zeros([len(q)]), q.new_zeros(len(q), V.shape[1])  # noqa: E741
        for start in range(0, len(K), BLOCK_N):
            s = q @ K[start : start + BLOCK_N].float().T
            m_new = torch.maximum(m, s.amax(1))
            p, c = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
            l, m = l * c + p.sum(1), m_new  # noqa: E741
            acc = acc * c[:, None] + p.to(V.dtype).float() @ V[start : start + BLOCK_N].float()
        return (acc / l[:, None]).to(V.dtype), m + torch.log(l)

    assert verify_block(scaled_q, block_sizes=(block_n,), head_dims=(64, 20))


def test_the_scale_is_tested_under_the_causal_mask_too(on_cpu):
    def ignores(q, k, v, *, causal, scale):
        return flash_forward(q, k, v, causal=causal, scale=None if causal else scale)

    assert "causal" in (failure_of(verify, ignores, causal=True).case or "")


@pytest.mark.parametrize("layout", ["contiguous", "by token", "rows apart", "by columns"])
def test_a_copy_on_another_device_keeps_its_strides_and_what_lies_between(layout):
    x = guarded(torch.randn(2, 3, 5, 8), layout, torch.device("cpu"))
    y = carried(x, "cpu")
    assert torch.equal(x, y) and x.stride() == y.stride() and x.data_ptr() != y.data_ptr()
    if layout != "contiguous":
        assert torch.equal(memory(x).view(torch.float32).isnan(), memory(y).view(torch.float32).isnan())
