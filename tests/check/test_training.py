"""verify(fn, grads=True): right attention passes, every mutant of the backward pass is rejected, the known by name."""

import types

import pytest
import torch
from failing import failure_of

from flashlab import flash_attention, runtime
from flashlab.attention import simulation_backward
from flashlab.attention.reference import attention, attention_low_precision
from flashlab.check import CheckFailed, verify
from flashlab.check.mistakes.gradients import MUTANTS, attention_with

BOTH = (torch.float32, torch.float16)


def verify_gradients(fn, *, dtypes=BOTH, max_seq=70, **options):
    """With the shorter cases of the forward pass, whose own tests are elsewhere."""
    options = dict(causal=True, gqa=True, lse=False, head_dims=(16,), max_seq=max_seq) | options
    return verify(fn, grads=True, dtypes=dtypes, **options)


def by_reference(q, k, v, **options):
    return flash_attention(q, k, v, backend="reference", **options)


def test_the_simulation_passes():
    report = verify_gradients(attention_with(simulation_backward))
    assert report.gradients.cases == 26 and report.gradients.worst <= 1 and report.cases >= 10
    assert "26 cases of the gradient, worst error 0." in repr(report)
    assert report.verdict == f"{report.cases} cases and 26 of the gradient, all within their bounds"
    verify_gradients(attention_with(simulation_backward, 64, 16), dtypes=(torch.bfloat16,), max_seq=60)


def test_the_formula_passes_with_every_option():
    report = verify_gradients(by_reference, empty=True, deterministic=True, head_dims=(16, 40))
    assert report.gradients.cases == 26 + 3 + 2


def test_what_is_not_asked_for_is_not_tested():
    def plain(q, k, v):
        assert q.shape == k.shape == v.shape and q.is_contiguous()
        return by_reference(q, k, v)

    report = verify_gradients(plain, causal=False, gqa=False, cross=False, strided=False)
    assert 10 < report.gradients.cases < 26
    assert verify(by_reference, lse=False, max_seq=40, head_dims=(16,)).gradients is None


@pytest.mark.slow
def test_the_door_passes():
    verify_gradients(flash_attention)


@pytest.mark.gpu
@pytest.mark.skipif(runtime.INTERPRETED, reason="long cases are for a GPU")
def test_the_door_passes_on_a_gpu():
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    verify_gradients(
        flash_attention, dtypes=dtypes, head_dims=(64, 128, 40, 256), max_seq=None, full=True, empty=True,
        deterministic=True,
    )  # fmt: skip


def test_eager_attention_passes():
    """It errs more than any kernel should, and is the measure."""

    def eager(q, k, v, *, causal, scale):
        return attention_low_precision(q, k, v, causal=causal, scale=scale)[0]

    verify_gradients(eager, dtypes=(torch.float32,))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.every(2)
def test_every_mutant_is_rejected(mutant):
    failed = failure_of(verify_gradients, attention_with(mutant.module()), max_seq=70)
    assert mutant.found in (None, failed.diagnosis), failed.sentence
    assert failed.case is not None
    if mutant.found is None:
        assert failed.diagnosis.startswith("wrong-") and failed.sentence[0] == "d"


def test_an_output_that_leads_nowhere():
    with pytest.raises(CheckFailed, match="the output has no gradient"):
        verify_gradients(lambda q, k, v, **options: by_reference(q.detach(), k.detach(), v.detach(), **options))


def test_a_gradient_that_is_missing():
    with pytest.raises(CheckFailed, match="dk is missing; it should be like its input"):
        verify_gradients(lambda q, k, v, **options: by_reference(q, k.detach(), v, **options))


def test_nan_is_never_right():
    def forward(q, k, v, **options):
        q = q * 1.0
        if q.requires_grad:
            q.register_hook(lambda gradient: gradient * float("nan"))
        return by_reference(q, k, v, **options)

    with pytest.raises(CheckFailed, match="dq is NaN"):
        verify_gradients(forward)


def test_a_gradient_that_changes_from_run_to_run():
    runs = []

    def forward(q, k, v, **options):
        runs.append(None)
        jitter = 1 + 1e-7 * len(runs)
        if q.requires_grad:
            q = q * 1.0
            q.register_hook(lambda gradient: gradient * jitter)
        return by_reference(q, k, v, **options)

    verify_gradients(forward, dtypes=(torch.float32,))
    with pytest.raises(CheckFailed, match="dq of two runs on the same input differ in their last bits"):
        verify_gradients(forward, dtypes=(torch.float32,), deterministic=True)


def test_a_wrong_forward_pass_is_told_first():
    def forward(q, k, v, *, causal, scale):
        return 2 * attention(q, k, v, causal=causal, scale=scale)[0].to(q.dtype)

    diagnosis = failure_of(verify_gradients, forward).diagnosis
    assert diagnosis != "no-gradient" and not diagnosis.startswith("wrong-d")


def test_the_device_is_that_of_the_kernels():
    seen = set()

    def forward(q, k, v, **options):
        seen.add(q.device.type)
        return by_reference(q, k, v, **options)

    verify_gradients(forward, dtypes=(torch.float32,))
    assert seen == {runtime.device().type}


def in_turn(dO, Q, K, V, O, lse, *sizes, **options):
    """dq as if query head h read key head h % kv_heads."""
    found = simulation_backward.flash_attention_backward_sim(dO, Q, K, V, O, lse, *sizes, **options)
    turned = [x.repeat(1, Q.shape[1] // x.shape[1], 1, 1) for x in (K, V)]
    return simulation_backward.flash_attention_backward_sim(dO, Q, *turned, O, lse, *sizes, **options)[0], *found[1:]


def exchanged(*given, **options):
    dq, dk, dv = simulation_backward.flash_attention_backward_sim(*given, **options)
    return dq, dv, dk


@pytest.mark.parametrize("backward, slug", [(in_turn, "wrong-kv-head"), (exchanged, "dk-dv-exchanged")])
def test_gradients_of_another_head_or_of_another_tensor_are_known(backward, slug):
    fn = attention_with(types.SimpleNamespace(flash_attention_backward_sim=backward))
    assert failure_of(verify_gradients, fn, dtypes=(torch.float16,)).diagnosis == slug
