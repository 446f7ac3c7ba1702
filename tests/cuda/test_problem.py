"""What the kernels of the series take: what is refused, and what goes into the struct."""

from functools import partial

import pytest
import torch
from drawn import qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from flashlab.attention.triton_forward import flash_attention_forward
from flashlab.cuda import inline, load_inline, sources
from flashlab.kernels import problem, step

tensors = partial(qkv, 1, 4, 2, 8, 9, 64, torch.float16, device="cpu")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (lambda q: q.float().clone(), "out is torch.float32; it must be torch.float16"),
        (lambda q: q[:, :, :4].clone(), r"out is \[1, 4, 4, 64\]; with this q it must be"),
        (lambda q: q.transpose(2, 3).contiguous().transpose(2, 3), "its rows must be contiguous"),
        (lambda q: torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), "on 16 bytes"),
        (lambda q: q[:, :1].clone().expand(q.shape), "each its own"),
        (lambda q: q, "out is the memory of an input"),
    ],
)
def test_where_o_cannot_be_stored(out, words):
    q, k, v = tensors()
    with pytest.raises((TypeError, ValueError), match=words):
        problem.check_out(out(q), q, k, v)
    module = load_inline(step("p7_naive"), backend="emulator")
    with pytest.raises((TypeError, ValueError), match=words):
        module.forward(q, k, v, out=out(q))


def test_a_tensor_without_memory_is_refused_where_a_kernel_would_read_it():
    module = load_inline(step("p7_naive"), backend="emulator")
    for x in (tensors()[0].to("meta"), FakeTensorMode().from_tensor(tensors()[0])):
        for kernel in (module.forward, flash_attention_forward):
            with pytest.raises(ValueError, match="q is (on meta|a FakeTensor), and a kernel reads memory"):
                kernel(x, x, x)
    with pytest.raises(ValueError, match="q is mapped by torch.vmap, and a kernel is not"):
        torch.func.vmap(lambda x: module.forward(x, x, x)[0])(tensors()[0][None])


def test_shapes_are_looked_at_before_anything_is_copied(monkeypatch):
    module, copies = object.__new__(inline.CudaModule), []
    monkeypatch.setattr(
        inline.CudaModule, "__getattr__", lambda self, name: (_ for _ in ()).throw(AttributeError(name))
    )
    module._text, module.head_dims = sources.read(step("p6_1_fa1")), (64,)
    huge = torch.zeros(1, dtype=torch.float32).expand(2**10, 64, 2**20, 64)  # 16 TiB, were it copied
    monkeypatch.setattr(problem, "fitted", lambda *_: copies.append("fitted"))
    monkeypatch.setattr(inline, "new_output", lambda *_: copies.append("o"))
    with pytest.raises(ValueError, match="one shape"):
        module.forward(huge, huge, huge[:, :, :5])
    with pytest.raises(ValueError, match="too many for one launch"):
        module.forward(huge, huge, huge)
    assert not copies


def test_what_fits_is_not_copied():
    q, k, v = tensors()
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)  # [B, N, H, D] in memory
    fitted = problem.fitted(apart, k, v, None)
    assert all(x is y for x, y in zip(fitted, (apart, k, v, None), strict=True) if y is not None)
    assert fitted[3] == 64**-0.5


@pytest.mark.parametrize(
    ("scale", "sign", "left"), [(0.0, 0, 1.0), (-0.5, -1, 0.5), (-1e5, -1, 1e5), (1e-46, 0, 1.0), (-1e-300, 0, 1.0)]
)
def test_a_scale_that_is_not_positive_goes_into_q_exactly(scale, sign, left):
    q, k, v = tensors()
    got, _, _, factor = problem.fitted(q, k, v, scale)
    assert factor == left and torch.equal(got, sign * q)


def test_the_struct_holds_addresses_strides_and_sizes():
    q, k, v = tensors()
    o, lse = torch.empty_like(q), torch.empty(1, 4, 8)
    p = problem.problem(q, k, v, o, lse, causal=True, scale=0.25, sms=7)
    assert (p.q, p.k, p.v, p.o, p.lse, p.workspace) == (*(x.data_ptr() for x in (q, k, v, o, lse)), None)
    assert (p.k_stride.batch, p.k_stride.head, p.k_stride.row) == k.stride()[:3]
    assert (p.batch, p.heads, p.kv_heads, p.seq_q, p.seq_k, p.head_dim) == (1, 4, 2, 8, 9, 64)
    assert (p.causal, p.scale, p.sms) == (1, 0.25, 7)
