"""Rotary embedding against complex numbers in float64: formula and kernel, both ways. (Its bytes: lecture 10.)"""

import pytest
import torch
from drawn import DEVICE, DTYPES, draw, far_apart, needs_room

from flashlab.models.rope import fused_rope, rope, rope_table


def layouts(batch, heads, kv_heads, seq, head_dim, dtype):
    """q and k in each of the orders in memory that models have, and some that none has."""
    q, k = draw(batch, heads, seq, head_dim, dtype=dtype), draw(batch, kv_heads, seq, head_dim, dtype=dtype, seed=1)
    yield "heads first", q, k
    yield "tokens first", *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    packed = draw(batch, seq, heads + kv_heads, head_dim, dtype=dtype)
    yield "in one tensor", packed[:, :, :heads].transpose(1, 2), packed[:, :, heads:].transpose(1, 2)
    yield "every second column", draw(*q.shape[:3], 2 * head_dim, dtype=dtype)[..., ::2], k
    yield "columns first", q.transpose(-1, -2).contiguous().transpose(-1, -2), k
    yield "one batch for all", q[:1].expand_as(q), k


def turned(x, cos, sin, offset=0):
    """The oracle: x1 + i x2, times cos + i sin. And what each element may be off: float32 inside, rounded once."""
    half = x.shape[-1] // 2
    cos, sin = (table[offset : offset + x.shape[2]].double() for table in (cos, sin))
    y = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(cos, sin)
    size = torch.cat([x.double().abs()[..., :half] + x.double().abs()[..., half:]] * 2, -1)
    value, info = torch.cat((y.real, y.imag), -1), torch.finfo(x.dtype)
    return value, info.eps / 2 * value.abs() + 2.0**-22 * size + info.smallest_normal * info.eps


def expect(got, x, cos, sin, offset=0, factor=1.0):
    value, bound = turned(x, cos, sin, offset)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert bool(((got.double() - value).abs() <= factor * bound).all())


def test_the_formula():
    cos, sin = rope_table(40, 16, device=DEVICE)
    x = draw(2, 3, 21, 16).double()
    torch.testing.assert_close(rope(x, cos, sin, offset=7), turned(x, cos, sin, 7)[0], rtol=1e-13, atol=1e-13)
    for dtype in DTYPES:  # each of its steps is rounded, and cos and sin are first
        low = x.to(dtype)
        value, _ = turned(low, cos, sin)
        room = 4 * torch.finfo(dtype).eps * low.abs().amax().item()
        assert rope(low, cos, sin).dtype == dtype and bool(((rope(low, cos, sin) - value).abs() <= room).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, seq, head_dim", [(1, 1, 1, 2), (4, 2, 17, 16), (6, 1, 33, 6), (5, 5, 37, 64), (9, 3, 3, 160)]
)
@pytest.mark.every(6)
def test_the_kernel_and_its_gradient(heads, kv_heads, seq, head_dim, dtype):
    cos, sin = rope_table(seq + 5, head_dim, device=DEVICE)
    for name, q, k in layouts(2, heads, kv_heads, seq, head_dim, dtype):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        got = fused_rope(q, k, cos, sin, offset=5)
        for y, x in zip(got, (q, k), strict=True):
            expect(y.detach(), x.detach(), cos, sin, 5)
            assert y.stride() == torch.empty_like(x).stride(), name
        grad_q = draw(*q.shape, dtype=dtype, seed=2).transpose(1, 2).contiguous().transpose(1, 2)
        grad_k = draw(*k.shape, dtype=dtype, seed=3)[:, :, :1].expand_as(k)
        for dx, grad in zip(torch.autograd.grad(got, (q, k), (grad_q, grad_k)), (grad_q, grad_k), strict=True):
            expect(dx, grad, cos, -sin, 5)


def test_the_gradient_is_that_of_the_formula():
    cos, sin = rope_table(9, 12, device=DEVICE)
    q, k = (draw(2, heads, 9, 12, seed=heads).requires_grad_() for heads in (4, 2))
    weights = draw(2, 4, 9, 12, seed=7), draw(2, 2, 9, 12, seed=8)
    by = []
    for y in (fused_rope(q, k, cos, sin), (rope(q, cos, sin), rope(k, cos, sin))):
        loss = sum((x**2 * w).sum() for x, w in zip(y, weights, strict=True))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        by.append((*first, *torch.autograd.grad(sum((x**2).sum() for x in first), (q, k))))  # and the second
    torch.testing.assert_close(*by, rtol=1e-5, atol=1e-5)
    (only_q,) = torch.autograd.grad(fused_rope(q, k.detach(), cos, sin)[0].sum(), q)
    expect(only_q, torch.ones_like(q), cos, -sin)


def test_tables_of_any_layout_and_of_the_inputs_dtype():
    cos, sin = (x.bfloat16().T.contiguous().T for x in rope_table(10, 16, device=DEVICE))
    q = draw(1, 2, 10, 16, dtype=torch.bfloat16)
    for y in fused_rope(q, q, cos, sin):
        expect(y, q, cos, sin)


@needs_room
@pytest.mark.parametrize("axis", range(4))
def test_addresses_past_2_to_the_31(axis):
    shape = [3 if n == axis else size for n, size in enumerate((1, 1, 2))] + [2]
    q = draw(*shape, dtype=torch.float16)
    cos, sin = rope_table(shape[2], 2, device=DEVICE)
    if axis == 3:  # the two numbers of a pair
        buffer = torch.empty(2**31 + 8, dtype=q.dtype, device=DEVICE)
        far = buffer.as_strided(q.shape, (4, 4, 2, 2**31)).copy_(q)
    else:
        (far,) = far_apart((q,), axis)
    torch.testing.assert_close(fused_rope(far, far, cos, sin), fused_rope(q, q, cos, sin), rtol=0, atol=0)


X = torch.zeros(1, 2, 8, 16, device=DEVICE)
TABLE = torch.zeros(8, 8, device=DEVICE)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        (dict(q=X[0]), ValueError, "q must be .*it has 3 dimensions"),
        (dict(q=X.double(), k=X.double()), TypeError, "q is torch.float64"),
        (dict(k=X[:, :, :5]), ValueError, "q has 8 rows and k has 5; row n of both stands at one position"),
        (dict(q=X[..., :15], k=X[..., :15]), ValueError, "head_dim is 15; numbers are turned in pairs"),
        (dict(cos=TABLE[:, :4]), ValueError, r"cos is \[8, 4\] and sin is \[8, 8\]; for a head_dim of 16 both are"),
        (dict(cos=TABLE[0], sin=TABLE[0]), ValueError, r"cos is \[8\] and sin is \[8\]"),
        (dict(cos=TABLE.int()), TypeError, "cos is torch.int32; it has to be floating point"),
        (dict(cos=TABLE.to("meta"), sin=TABLE.to("meta")), ValueError, "cos is on meta: one device for all"),
        (dict(offset=1), ValueError, "the offset is 1 and there are 8 rows; the tables have the positions from 0 up"),
        (dict(offset=-1), ValueError, "the offset is -1"),
        (dict(offset=1.0), TypeError, "offset is 1.0; it is a number of positions, an int"),
        (dict(sin=2.0), TypeError, "sin is a float; a torch.Tensor is needed"),
        (dict(sin=TABLE.clone().requires_grad_()), ValueError, "sin requires a gradient, and the kernel computes none"),
    ],
)
def test_it_refuses(changes, error, sentence):
    arguments = dict(q=X, k=X, cos=TABLE, sin=TABLE, offset=0) | changes
    offset = arguments.pop("offset")
    with pytest.raises(error, match=sentence):
        fused_rope(*arguments.values(), offset=offset)


def test_pytorch_finds_nothing_wrong_with_the_operator():
    cos, sin = rope_table(9, 8, device=DEVICE)
    q, k = draw(1, 4, 5, 8).requires_grad_(), draw(1, 5, 2, 8).transpose(1, 2).requires_grad_()
    for back in (False, True):
        torch.library.opcheck(torch.ops.flashlab.fused_rope.default, (q, k, cos, sin, 3, back))


def test_torch_compile_takes_it_as_one_graph():
    cos, sin = rope_table(40, 8, device=DEVICE)

    def model(q, k):
        return sum(x.relu().sum() for x in fused_rope(q * 2, k, cos, sin))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq in (16, 21):
        q, k = (draw(1, heads, seq, 8).requires_grad_() for heads in (4, 2))
        torch.testing.assert_close(*(torch.autograd.grad(f(q, k), (q, k)) for f in (compiled, model)))
