"""flash_attention: every backend, gradients, operators under torch.compile, autocast, vmap, clear refusals."""

import pytest
import torch
import torch.nn.functional as F

from flashlab import runtime
from flashlab.attention import door
from flashlab.attention.door import BACKENDS, choose_backend, flash_attention
from flashlab.check import verify
from flashlab.check.training import wanted, worst

DEVICE = runtime.device()
OPTIONS = [dict(), dict(causal=True), dict(window=(5, 3)), dict(causal=True, window=6, softcap=4.0), dict(scale=-0.2)]


def make(batch=1, heads=4, kv_heads=2, seq_q=20, seq_k=26, head_dim=16, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
    drawn = (torch.randn(batch, count, rows, head_dim, generator=generator) for count, rows in shapes)
    return tuple(x.to(DEVICE, dtype).requires_grad_(grad) for x in drawn)


def backward(o, inputs, grad_o):
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, grad_o), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_backend_and_its_gradient(backend, options):
    if backend == "simulation" and ("window" in options or "softcap" in options):
        with pytest.raises(
            ValueError, match="backend is 'simulation', which does not take .* neither window nor softcap"
        ):
            flash_attention(*make(), backend=backend, **options)
        return
    for seq_q, seq_k in ((20, 26), (26, 20)):
        inputs = make(seq_q=seq_q, seq_k=seq_k)
        o = flash_attention(*inputs, backend=backend, **options)
        grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found = wanted(*inputs, grad_o, **options)
        assert worst(found, o=o, **backward(o, inputs, grad_o))[1] <= 1


def test_the_checkers_cases_by_the_door():
    verify(
        flash_attention,
        causal=True,
        gqa=True,
        lse=False,
        max_seq=130,
        dtypes=(torch.float16, torch.float32),
        empty=True,
    )


def test_beside_pytorchs_own():
    """Square and causal, where both conventions agree; gradients too."""
    inputs = make(seq_q=24, seq_k=24)
    o = flash_attention(*inputs, causal=True)
    want = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o, want, rtol=0, atol=2e-6)
    ours, theirs = (torch.autograd.grad(x.sum(), inputs) for x in (o, want))  # the gradient of o is an expanded 1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_only_some_inputs_want_a_gradient():
    q, k, v = make()
    (dk,) = torch.autograd.grad(flash_attention(q.detach(), k, v.detach()).sum(), (k,))
    want = torch.autograd.grad(flash_attention(q, k, v, backend="reference").sum(), (k,))[0]
    torch.testing.assert_close(dk, want, rtol=0, atol=1e-5)
    assert not flash_attention(*(x.detach() for x in (q, k, v))).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile_takes_it_as_one_graph(backend):
    options = dict(causal=True) if backend == "simulation" else dict(causal=True, window=6, softcap=4.0)

    def model(q, k, v):
        return flash_attention(q * 2, k, v, backend=backend, **options).relu()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = make()
    got, want = compiled(*inputs), model(*inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_torch_compile_with_lengths_that_change():
    compiled = torch.compile(
        lambda *x: flash_attention(*x, causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for seq in (16, 33, 50):
        inputs = make(seq_q=seq, seq_k=seq, grad=False)
        torch.testing.assert_close(compiled(*inputs), flash_attention(*inputs, causal=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pytorch_finds_nothing_wrong_with_the_operators(backend):
    operator = getattr(torch.ops.flashlab, f"{backend}_attention").default
    torch.library.opcheck(operator, (*make(dtype=torch.float16), 0.25, None, 0, None))
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in make())
    torch.library.opcheck(operator, (q, k, v, 0.25, None, None, None))


def test_autocast():
    inputs = make()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        o = flash_attention(*inputs, causal=True)
    assert o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.float().sum(), inputs))
    low = tuple(x.detach().bfloat16() for x in inputs)
    assert torch.equal(o, flash_attention(*low, causal=True))


@pytest.mark.parametrize("grad", [False, True])
def test_vmap_is_refused_in_a_sentence(grad):
    with pytest.raises(NotImplementedError, match="not batched by torch.vmap: it has a batch dimension of its own"):
        torch.vmap(flash_attention)(*(x[None] for x in make(grad=grad)))


def test_what_auto_takes_and_why():
    q, k, v = make(grad=False)
    assert choose_backend(q, k, v).backend == "triton"
    assert "interpreted" in choose_backend(q, k, v).reason or "compiled for cuda" in choose_backend(q, k, v).reason
    wide = torch.zeros(1, 1, 2, 300, device=DEVICE)
    assert choose_backend(wide, wide, wide) == (
        "reference", "the backend triton does not take these inputs: it takes a head_dim up to 256, and q has 300"
    )  # fmt: skip
    assert choose_backend(q.double(), k.double(), v.double()).backend == "reference"
    assert choose_backend(q, k, v, backend="simulation") == ("simulation", "it was asked for")
    o = flash_attention(q.double(), k.double(), v.double())
    assert o.dtype == torch.float64


Q = torch.zeros(1, 4, 8, 16, device=DEVICE)


@pytest.mark.parametrize(
    "arguments, options, error, sentence",
    [
        (([1.0], Q, Q), {}, TypeError, "q is a list; a torch.Tensor is needed"),
        ((Q[0], Q, Q), {}, ValueError, "q must be .* but it has 3 dimensions"),
        ((Q, Q.half(), Q), {}, TypeError, "one dtype for all three"),
        ((Q.int(),) * 3, {}, TypeError, "q is torch.int32; attention needs floating point"),
        ((Q, Q[:, :3], Q[:, :3]), {}, ValueError, "4 query heads cannot share 3 key heads evenly"),
        ((Q, Q.to("meta"), Q), {}, ValueError, "one device for all three"),
        ((Q, Q, Q[..., :8]), {}, ValueError, "they must have one shape"),
        ((Q, Q, Q), {"backend": "cudnn"}, ValueError, "backend is 'cudnn'; it must be auto, reference, .* or triton"),
        (
            (Q.double(),) * 3,
            {"backend": "triton"},
            ValueError,
            "which does not take .* bfloat16 and float32, and q is .*64",
        ),
        ((Q, Q, Q), {"window": 1.5}, TypeError, "window is 1.5; it counts keys"),
        ((Q, Q, Q), {"softcap": -3}, ValueError, "softcap is -3.0; it must be positive"),
        ((Q, Q, Q), {"scale": "big"}, TypeError, "scale is 'big'; it must be a number"),
    ],
)
def test_clear_errors(arguments, options, error, sentence):
    with pytest.raises(error, match=sentence):
        flash_attention(*arguments, **options)


@pytest.mark.skipif(runtime.INTERPRETED, reason="interpreted kernels take CPU tensors")
def test_cpu_tensors_where_kernels_are_compiled():
    cpu = Q.cpu()
    assert choose_backend(cpu, cpu, cpu).backend == "reference"
    with pytest.raises(ValueError, match="its kernels are compiled for the GPU, and q is on cpu"):
        flash_attention(cpu, cpu, cpu, backend="triton")


def test_bad_inputs_are_refused_while_a_graph_is_traced_too():
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="4 query heads cannot share 3 key heads evenly"):
        compiled(Q, Q[:, :3], Q[:, :3])


def test_the_operators_have_names():
    for backend in door.BACKENDS:
        assert hasattr(torch.ops.flashlab, f"{backend}_attention_backward")
