"""Every kernel of the series as an operator: shapes without computing, gradients."""

import pytest
import torch
from drawn import far_apart, needs_room, qkv, within

import flashlab
from flashlab.attention import reference
from flashlab.attention.backends import BACKENDS
from flashlab.check.training import wanted
from flashlab.cuda import missing, operators
from flashlab.cuda.hopper_backward import HEAD_DIMS
from flashlab.cuda.operators import attention
from flashlab.kernels import HOPPER, SERIES, step

DEVICES = ["cpu", *(["cuda"] if missing("nvcc") is None else [])]


def inputs_of(name, device, seq_k):
    """q, k, v; of p11_flash in a head size whose gradient is p11_backward's."""
    head_dim = 96 if name == "p11_flash" else 64
    return [x.requires_grad_() for x in qkv(1, 2, 1, 20, seq_k, head_dim, step(name).dtypes[0], device=device)]


def test_every_step_is_registered_with_all_that_pytorch_asks():
    assert [s.name for s in SERIES][:2] == ["p6_1_fa1", "p6_2_loop_order"] and SERIES[-1].name == "p9_flash"
    assert HOPPER[-1].name == "p11_flash" and HOPPER[-1].head_dims == HEAD_DIMS  # of its gradient
    for s in SERIES + HOPPER:
        operator = getattr(torch.ops.flashlab, s.name).default
        options = "float scale, SymInt? left, SymInt? right, float? softcap"
        assert str(operator._schema).endswith(f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)")
        assert s.path.exists() and s.name in BACKENDS
        with torch._subclasses.FakeTensorMode():
            q = torch.empty(2, 4, 10, 64, dtype=s.dtypes[0])
            o, lse = operator(q, q, q, 0.125, None, None, None)
        assert o.shape == q.shape and o.dtype == q.dtype and lse.shape == (2, 4, 10) and lse.dtype == torch.float32


def test_a_hopper_kernel_says_where_it_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    refusal = BACKENDS["p11_flash"].unfit(torch.device("cuda:0"))
    assert refusal == "it needs compute capability 9.0, and this GPU has 12.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(operators, "_has_nvcc", lambda: False)
    assert BACKENDS["p11_flash"].unfit(torch.device("cuda:0")).startswith("nvcc has to build it")
    monkeypatch.setattr(operators, "_has_nvcc", lambda: True)
    assert BACKENDS["p11_flash"].unfit(torch.device("cuda:0")) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_both_outputs(device, causal):
    # 20 queries and 12 keys: with a causal mask 8 rows see nothing, and have no gradient.
    tensors = inputs_of("p6_2_loop_order", device, 12)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    o, lse = attention("p6_2_loop_order", *tensors, causal=causal, scale=0.2)
    want, want_lse = reference.attention(*wide, causal=causal, scale=0.2)
    go, gl = torch.randn_like(want), torch.randn_like(want_lse)
    seen = torch.isfinite(want_lse)
    got = torch.autograd.grad((o * go.to(o.dtype)).sum() + (lse * gl.float())[seen].sum(), tensors)
    expected = torch.autograd.grad((want * go).sum() + (want_lse * gl)[seen].sum(), wide)
    for name, x, y in zip("qkv", got, expected, strict=True):
        assert torch.isfinite(x).all()
        torch.testing.assert_close(x.double(), y, atol=3e-5, rtol=1e-4, msg=lambda m, name=name: f"d{name}: {m}")


def test_what_no_step_takes():
    q = torch.zeros(1, 1, 4, 64)
    for bad, sentence in ((q.sum(), "q must be .* it has 0 dimensions"), (q[..., :0], "one key of one feature")):
        with pytest.raises(ValueError, match=sentence):
            attention("p6_1_fa1", bad, bad, bad)
    with pytest.raises(KeyError, match="no step 'p9_magic' in the series"):
        attention("p9_magic", q, q, q)


@needs_room
@pytest.mark.parametrize("name", ["p6_6_shapes", "p7_naive", "p9_flash"])
def test_tensors_of_more_than_2_to_the_31_elements(name):
    """Addresses in 32 bits wrap around and read wrong, finite values [flash-attention issues 767, 1500, 2611]."""
    inputs = qkv(1, 3, 3, 130, 130, 64, step(name).dtypes[0])
    far, near = (operators.attention(name, *x, causal=True) for x in (far_apart(inputs, 1), inputs))
    torch.testing.assert_close(far, near, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["p8_6_store", "p11_flash"])
def test_by_the_door(name, device, monkeypatch):
    """The forward pass is the kernel's; the gradient does not ask who computed lse, but p11_flash has its own."""
    if name == "p11_flash":
        if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs capability 9.0")
        monkeypatch.setattr(operators, "best_backward", None)
    inputs = inputs_of(name, device, 37)
    options = dict(causal=True, scale=-0.3)
    o = flashlab.flash_attention(*inputs, backend=name, **options)
    grad_o = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, inputs, grad_o)
    within(wanted(*inputs, grad_o, **options), o=o, dq=dq, dk=dk, dv=dv)
