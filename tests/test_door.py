"""flash_attention: every backend, gradients, operators under torch.compile, autocast, vmap, clear refusals."""

import contextlib
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from drawn import DEVICE, qkv, within

from flashlab import choose_backend, flash_attention, runtime
from flashlab.attention import backends, blockwise, triton_forward
from flashlab.attention.backends import BACKENDS as ALL
from flashlab.attention.blockwise import attention_backward_blockwise, attention_blockwise
from flashlab.attention.cost import peak_bytes
from flashlab.attention.options import visible
from flashlab.check import verify
from flashlab.check.training import wanted
from flashlab.cuda import operators

BACKENDS = ("reference", "simulation", "torch", "triton")
SOME = [*(pytest.param(x, marks=pytest.mark.long) for x in BACKENDS[:2]), *BACKENDS[2:]]
QUICK = "torch" if runtime.INTERPRETED else "triton"
OPTIONS = [dict(), dict(causal=True), dict(window=(5, 3)), dict(causal=True, window=6, softcap=4.0), dict(scale=-0.2)]


def make(batch=1, heads=4, kv_heads=2, seq_q=12, seq_k=18, head_dim=16, dtype=torch.float32, grad=True):
    return tuple(x.requires_grad_(grad) for x in qkv(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype))


def backward(o, inputs, grad_o):
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, grad_o, retain_graph=True), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_backend_and_its_gradient(backend, options):
    if backend == "simulation" and ("window" in options or "softcap" in options):
        with pytest.raises(ValueError, match="backend is 'simulation', which .* neither window nor softcap"):
            flash_attention(*make(), backend=backend, **options)
        return
    for seq_q, seq_k in ((12, 18), (18, 12)):
        inputs = make(heads=2, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
        o = flash_attention(*inputs, backend=backend, **options)
        grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found = wanted(*inputs, grad_o, **options)
        within(found, o=o, **backward(o, inputs, grad_o))


def test_the_checkers_cases_by_pytorchs_own_products():
    """All of them, through autograd, with blocks so small that each case has several, of rows and of heads too."""
    options = dict(gqa=True, empty=True, dtypes=(torch.float32, torch.float16, torch.bfloat16), head_dims=(16, 300))

    def attention(q, k, v, *, causal, scale):
        return torch.ops.flashlab.torch(q, k, v, scale, None, 0 if causal else None, None)

    for scores in (blockwise.SCORES, 256):
        with mock.patch.object(blockwise, "SCORES", scores):
            verify(attention, causal=True, grads=True, **options)


@pytest.mark.parametrize("causal, window", [(True, None), (False, (3, 2)), (True, 4)], ids=str)
def test_a_nan_reaches_nobody_who_does_not_see_it(causal, window):
    """In a key or a value; by o, and by the gradients of those who see it."""
    seen = visible(12, 18, causal, window)
    for place in (1, 2):
        inputs = make(heads=2, kv_heads=1, grad=False)
        inputs[place][0, 0, 7, 3] = math.nan
        inputs = tuple(x.requires_grad_() for x in inputs)
        o = flash_attention(*inputs, causal=causal, window=window, backend="torch")
        struck = o.isnan().any(-1)[0, 0]
        assert torch.equal(struck.cpu(), seen[:, 7])
        dq, dk, dv = torch.autograd.grad(o.sum(), inputs)
        assert torch.equal(dq.isnan().any(-1)[0, 0], struck)
        beside = (seen & seen[:, 7:8]).any(0).to(DEVICE)  # keys of a row that sees it
        assert not dk[0, 0, ~beside].isnan().any() and not dv[0, 0, ~beside].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_memory_of_pytorchs_own_products_grows_with_the_length_alone(causal):
    """Forward and backward, beside the inputs and the results: not with its square, which is 16 times here."""
    most = []
    for seq in (512, 2048):
        q = torch.zeros(1, 2, seq, 8)
        options = dict(scale=1.0, left=None, right=0 if causal else None, softcap=None)
        o, lse = attention_blockwise(q, q, q, **options)
        most.append([
            peak_bytes(attention_blockwise, q, q, q, **options),
            peak_bytes(attention_backward_blockwise, o, None, q, q, q, o, lse, **options),
        ])  # fmt: skip
    for short, long in zip(*most, strict=True):
        assert long <= 6 * short


@pytest.mark.parametrize("backend", ["p6_1_fa1", "p9_flash", "p11_flash"])
def test_cuda_kernels_from_several_threads(backend):
    """Each thread on a stream of its own where there is a GPU; else the smallest kernel stands for all, emulated."""
    gpu, kernel = DEVICE.type == "cuda", ALL[backend]
    if not gpu and backend != "p6_1_fa1":
        pytest.skip("natively, on a GPU")
    dtype = torch.float32 if backend == "p6_1_fa1" else torch.float16
    calls, repeats = (8, 20) if gpu else (3, 1)
    if why := kernel.refusal(torch.empty(1, 2, 8, 64, dtype=dtype, device=DEVICE)):
        pytest.skip(why)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()) if gpu else contextlib.nullcontext():
            for _ in range(repeats):
                inputs = make(seq_q=16 * number + 5, seq_k=16 * number + 9, head_dim=64, dtype=dtype)
                o = flash_attention(*inputs, causal=True, backend=backend)
                grad_o = torch.ones_like(o)
                within(wanted(*inputs, grad_o, causal=True), o=o, **backward(o, inputs, grad_o))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(calls)))


@pytest.mark.parametrize("backend", SOME)
def test_pytorch_finds_nothing_wrong_with_the_operators(backend):
    operator = getattr(torch.ops.flashlab, backend).default
    sizes = dict(heads=2, kv_heads=1, seq_q=5, seq_k=7)
    torch.library.opcheck(operator, (*make(dtype=torch.float16, **sizes), 0.25, None, 0, None))
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in make(**sizes))
    torch.library.opcheck(operator, (q, k, v, 0.25, None, None, None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    """It converts the inputs, and nothing inside of a backend, forward or backward."""
    inputs, low = make(), make(dtype=torch.bfloat16)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        o = flash_attention(*inputs, causal=True, backend=backend)
        found = torch.autograd.grad(o.float().sum(), inputs)
    want = flash_attention(*low, causal=True, backend=backend)
    assert o.dtype == torch.bfloat16 and torch.equal(o, want)
    for a, b in zip(found, torch.autograd.grad(want.float().sum(), low), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_auto_takes_the_hopper_kernel_where_it_can(monkeypatch):
    """On tensors that only say that they are on a GPU."""
    capability = {"is": (9, 0), "nvcc": True}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability["is"])
    monkeypatch.setattr(operators, "_has_nvcc", lambda: capability["nvcc"])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 300, 128, dtype=torch.bfloat16, device="cuda")
        narrow = torch.empty(1, 2, 300, 40, dtype=torch.bfloat16, device="cuda")
        chosen = choose_backend(q, q, q, causal=True)
        assert chosen.backend == "p11_flash" and "fastest on this GPU, of capability 9.0" in chosen.reason
        other = torch.empty(1, 2, 300, 96, dtype=torch.bfloat16, device="cuda")
        assert choose_backend(other, other, other).backend == "p11_flash"
        others = [(q, {"window": (8, 0)}), (q, {"softcap": 5.0}), (q.float(), {}), (narrow, {})]
        assert {choose_backend(x, x, x, **options).backend for x, options in others} == {QUICK}
        capability["nvcc"] = False
        assert choose_backend(q, q, q).backend == QUICK
        capability |= {"nvcc": True, "is": (8, 0)}
        assert choose_backend(q, q, q).backend == QUICK


def test_torch_compile_asks_for_the_device_while_it_traces(monkeypatch):
    unfit = ALL["p11_flash"].unfit

    def shifted(x):
        return x + 1 if unfit(torch.device("cuda", 0)) is None else x

    monkeypatch.setattr(operators, "_has_nvcc", lambda: True)
    for capability, want in (((9, 0), 2.0), ((8, 0), 1.0)):
        torch._dynamo.reset()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, is_=capability: is_)
        assert torch.compile(shifted, backend="eager", fullgraph=True)(torch.ones(())) == want


def test_what_auto_takes_and_why():
    q, k, v = make(grad=False)
    interpreted = "Triton kernels are interpreted here, which is slow: backend='triton' asks for them"
    compiled = f"the Triton kernels take torch.float32 with a head_dim of 16; they are compiled for {q.device}"
    assert choose_backend(q, k, v) == (QUICK, interpreted if runtime.INTERPRETED else compiled)
    assert choose_backend(q, k, v, causal=True, window=3, softcap=2.0, scale=0.1).backend == QUICK
    wide = torch.zeros(1, 1, 2, 300, device=DEVICE)
    assert choose_backend(wide, wide, wide) == (
        "torch", "the backend triton does not take these inputs: it takes a head_dim up to 256, and q has 300"
    )  # fmt: skip
    assert choose_backend(q.double(), k.double(), v.double()).backend == "torch"
    assert choose_backend(q, k, v, backend="triton") == ("triton", "it was asked for")
    o = flash_attention(q.double(), k.double(), v.double())
    assert o.dtype == torch.float64


Q = torch.zeros(1, 4, 8, 16, device=DEVICE)
HALF = Q.half()


@pytest.fixture
def no_launch(monkeypatch):
    """Whoever comes as far as a computation fails."""

    def launched(*arguments, **options):
        raise AssertionError("launched")

    monkeypatch.setattr(triton_forward, "launch_arguments", launched)
    monkeypatch.setattr(backends.reference, "attention", launched)
    monkeypatch.setattr(backends, "flash_attention_sim", launched)
    monkeypatch.setattr(blockwise, "_wide", launched)
    monkeypatch.setattr(operators, "module", launched)


@pytest.mark.parametrize(
    "arguments, options, error, sentence",
    [
        ((Q.int(),) * 3, {}, TypeError, "q is torch.int32; .* or torch.float64 is taken"),  # and more in test_inputs
        ((torch.zeros(1, 1, 2, 257, device=DEVICE),) * 3, {"backend": "triton"}, ValueError, "256, and q has 257"),
        ((Q.double(),) * 3, {"backend": "triton"}, ValueError, "which does not take .* or float32, and q is .*64"),
        ((HALF,) * 3, {"backend": "p9_flash"}, ValueError, "takes a head_dim of 64, 128 or 256, and q has 16"),
        ((Q.expand(1, 4, 8, 16),) * 3, {"backend": "p9_flash"}, ValueError, "takes float16 or bfloat16, and q is .*32"),
        ((Q,) * 3, {"backend": "simulation", "softcap": 3}, ValueError, "it has neither window nor softcap"),
        ((Q,) * 3, {"backend": "cudnn"}, ValueError, "backend is 'cudnn'; it must be auto, reference, .*triton"),
        ((Q,) * 3, {"backend": None}, ValueError, "backend is None; it must be auto"),
        ((Q,) * 3, {"backend": ["triton"]}, ValueError, r"backend is \['triton'\]; it must be auto"),
        ((torch.zeros((), device=DEVICE).expand(2**16, 2**15, 1, 16),) * 3, {"backend": "triton"}, ValueError,
         "q has 2147483648 heads"),
        ((Q,) * 3, {"window": 1.5}, TypeError, "window is 1.5; it counts keys"),
        ((Q,) * 3, {"window": -2}, ValueError, "window is -2; a side is a number of keys"),
        ((Q,) * 3, {"softcap": -3}, ValueError, "softcap is -3.0; it must be positive"),
        ((Q,) * 3, {"is_causal": True}, TypeError, "no is_causal: say causal=, which is aligned at the end"),
        ((Q,) * 3, {"attn_mask": None}, TypeError, "no attn_mask: causal= and window= say which keys"),
        ((Q,) * 3, {"dropout_p": 0.0}, TypeError, "no dropout_p: there is no dropout: leave it out"),
        ((Q,) * 3, {"alibi_slopes": None}, TypeError, "no alibi_slopes"),
        ((Q,) * 3, {"mask": Q}, TypeError, "no mask: it takes causal, scale, window, softcap and backend"),
    ],
)  # fmt: skip
def test_each_bad_input_raises_a_sentence_before_any_launch(arguments, options, error, sentence, no_launch):
    with pytest.raises(error, match=sentence) as caught:
        flash_attention(*arguments, **options)
    assert "\n" not in str(caught.value)
    if options and "heads" not in sentence:  # its words are those of the door; a grid is the kernel's own matter
        with pytest.raises(error, match=sentence):
            choose_backend(*arguments, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_scale_gives_finite_numbers(backend):
    scale = 2.0**104 if runtime.INTERPRETED or backend != "triton" else 2.0**20  # see flash_attention
    for x in make(grad=False), [x.half() for x in make(grad=False)]:
        o, lse = backends.attend(backend, *x, scale, None, 0, None)
        assert torch.isfinite(o).all() and torch.isfinite(lse).all()


def test_the_raw_operator_checks_too():
    nested = torch.nested.nested_tensor([Q[0], Q[0]])
    jagged = torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged)
    for q, scale, sentence in ((Q, math.nan, "scale is nan"), (Q.to_sparse(), 1.0, "q is sparse_coo"),
                               (nested, 1.0, "q is a nested tensor"),
                               (jagged, 1.0, "q is a nested tensor"), (Q.sum(), 1.0, "it has 0 dim")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=sentence):
            torch.ops.flashlab.triton(q, q, q, scale, None, None, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "number, given, sentence",
    [
        (0, Q[:, :2], r"grad_o is \[1, 2, 8, 16\]; with this q it must be \[1, 4, 8, 16\]"),
        (0, Q.double(), "grad_o is torch.float64; it must be torch.float32"),
        (0, Q.to_sparse(), "grad_o is sparse_coo"),
        (1, Q[0, ..., 0], r"grad_lse is \[4, 8\]; with this q"),
        (5, Q[..., :8], "o is .*; with this q it must be"),
        (6, Q[..., 0].double(), "lse is torch.float64"),
        (7, math.nan, "scale is nan"),
        (10, -1.0, "softcap is -1.0|it has neither window nor softcap"),
    ],
)
def test_the_raw_operator_of_the_gradient_checks_too(backend, number, given, sentence):
    arguments = [Q, None, Q, Q, Q, Q, Q[..., 0], 1.0, None, 0, None]
    arguments[number] = given
    for device in (DEVICE, "meta") if number < 7 and not given.is_sparse else (DEVICE,):
        with pytest.raises((TypeError, ValueError), match=sentence):
            on = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
            getattr(torch.ops.flashlab, f"{backend}_backward")(*on)


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    unfit = ALL["triton"].unfit(torch.device("cuda"))
    assert unfit == "it needs compute capability 8.0, and this GPU has 7.5"
    assert ALL["triton"].unfit(torch.device("mps")) == "it runs on the CPU or a GPU of Nvidia, and q is on mps"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5), (2, 2, 1, 0, 5), (2, 2, 1, 5, 0)], ids=str)
def test_empty_inputs(backend, shape, monkeypatch):
    """No batch, no queries, no keys: nothing is launched, and gradients are zeros."""
    monkeypatch.setattr(triton_forward, "tile_for", None)
    batch, heads, kv_heads, seq_q, seq_k = shape
    if backend == "triton" and seq_k == 0:
        monkeypatch.undo()  # o has to be written
    inputs = make(batch, heads, kv_heads, seq_q, seq_k, 64, torch.float16)
    o = flash_attention(*inputs, backend=backend, causal=True)
    assert o.shape == inputs[0].shape and (o == 0).all()
    for gradient, x in zip(torch.autograd.grad(o.sum(), inputs), inputs, strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_rows_that_see_no_key_and_a_gradient_with_other_strides():
    """The first 9 of 20 rows see none of 11 keys. The gradient of a sum has strides of 0; others are not contiguous."""
    inputs = make(heads=2, kv_heads=1, seq_q=20, seq_k=11)
    o = flash_attention(*inputs, causal=True)
    assert (o[:, :, :9] == 0).all()
    for grad_o in (
        torch.ones((), device=DEVICE).expand(o.shape),
        torch._neg_view(torch.randn(o.shape, device=DEVICE)),
        torch.randn(1, 2, 16, 20, device=DEVICE).transpose(2, 3),
        torch.randn(1, 20, 2, 16, device=DEVICE).transpose(1, 2),  # by token
        torch.randn(o.numel() + 1, device=DEVICE)[1:].view(o.shape),  # off by one element
    ):
        gradients = backward(o, inputs, grad_o)
        assert (gradients["dq"][:, :, :9] == 0).all()
        within(wanted(*inputs, grad_o, causal=True), **gradients)


@pytest.mark.skipif(runtime.INTERPRETED, reason="interpreted kernels take CPU tensors")
def test_cpu_tensors_where_kernels_are_compiled():
    cpu = Q.cpu()
    assert choose_backend(cpu, cpu, cpu).backend == "torch"
    with pytest.raises(ValueError, match="its kernels are compiled for the GPU, and q is on cpu"):
        flash_attention(cpu, cpu, cpu, backend="triton")


def test_import_flashlab_is_quick_and_the_door_is_there():
    """And a call does not import torch._dynamo: 2.5 seconds in each process, and nobody traces anything."""
    code = """
import sys, torch, flashlab
assert not {"flashlab.attention.door", "flashlab.cuda", "flashlab.attention.triton_forward"} & set(sys.modules)
assert "flash_attention" in flashlab.__all__ and callable(flashlab.flash_attention)
assert "flashlab.cuda.operators" in sys.modules
try:
    flashlab.flash_atention
except AttributeError as error:
    assert str(error) == "module 'flashlab' has no attribute 'flash_atention'"
else:
    raise SystemExit(1)
q = torch.randn(1, 2, 16, 16, requires_grad=True)
flashlab.flash_attention(q, q, q).sum().backward()
assert q.grad is not None and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
