"""verify_gradients: right attention passes, every mutant of the backward pass is rejected, the known ones by name."""

import pytest
import torch

from flashlab import runtime
from flashlab.attention import simulation_backward
from flashlab.attention.door import flash_attention
from flashlab.attention.full_reference import attention_low_precision
from flashlab.check import CheckFailed
from flashlab.check.training import verify_gradients
from flashlab.check.zoo.gradients import MUTANTS, attention_with


def test_the_simulation_passes():
    report = verify_gradients(attention_with(simulation_backward))
    assert report.cases == 26 and report.worst <= 1
    assert "26 cases, forward and backward" in repr(report)
    verify_gradients(attention_with(simulation_backward, 64, 16), dtypes=(torch.bfloat16,))


@pytest.mark.slow
def test_the_door_passes():
    verify_gradients(flash_attention)


def test_eager_attention_passes():
    """It errs more than any kernel should, and is the measure."""
    verify_gradients(attention_low_precision, dtypes=(torch.float32,))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_rejected(mutant):
    with pytest.raises(CheckFailed) as caught:
        verify_gradients(attention_with(mutant.module()))
    assert mutant.found in (None, caught.value.diagnosis), caught.value.sentence
    assert caught.value.case is not None
    if mutant.found is None:
        assert caught.value.diagnosis.startswith("wrong-") and caught.value.sentence[0] == "d"


def test_an_output_that_leads_nowhere():
    with pytest.raises(CheckFailed, match="the output has no gradient"):
        verify_gradients(lambda q, k, v, *, causal, scale: flash_attention(q.detach(), k.detach(), v.detach()))


def test_a_gradient_that_is_missing():
    def forward(q, k, v, *, causal, scale):
        return flash_attention(q, k.detach(), v, causal=causal, scale=scale, backend="reference")

    with pytest.raises(CheckFailed, match="dk is missing; it should be like its input"):
        verify_gradients(forward)


def test_nan_is_never_right():
    def forward(q, k, v, *, causal, scale):
        q = q * 1.0
        if q.requires_grad:
            q.register_hook(lambda gradient: gradient * float("nan"))
        return flash_attention(q, k, v, causal=causal, scale=scale, backend="reference")

    with pytest.raises(CheckFailed, match="dq is NaN"):
        verify_gradients(forward)


def test_the_device_is_that_of_the_kernels():
    seen = set()

    def forward(q, k, v, *, causal, scale):
        seen.add(q.device.type)
        return flash_attention(q, k, v, causal=causal, scale=scale, backend="reference")

    verify_gradients(forward, dtypes=(torch.float32,))
    assert seen == {runtime.device().type}
