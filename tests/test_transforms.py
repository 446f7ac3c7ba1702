"""PyTorch's transforms on the door and on the raw operators: each computes what the formula does, or says that not."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from drawn import DEVICE, qkv
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import flashlab.cuda.operators  # noqa: F401  registers the series
from flashlab import flash_attention
from flashlab.attention import backends, door, reference
from flashlab.attention.triton_forward import flash_attention_forward
from flashlab.models.rope import fused_rope, rope, rope_table

inputs = partial(qkv, 1, 2, 1, 5, 5, 16)


def formula(q, k, v):
    return reference.attention(q, k, v, causal=True)[0].to(q.dtype)


def by_door(backend):
    return lambda q, k, v: flash_attention(q, k, v, causal=True, backend=backend)


def by_operator(name):
    return lambda q, k, v: getattr(torch.ops.flashlab, name)(q, k, v, q.shape[-1] ** -0.5, None, 0, None)[0]


# One that is registered later, and nothing but a forward pass: the refusals are the mechanism's, not a list's.
plain = backends.BACKENDS["reference"]
backends.register(backends.Backend("later", "a stand-in", plain.forward, plain.backward))
LATER = backends.BACKENDS.pop("later")
WAYS = {
    **{name: by_door(name) for name in ("auto", "reference", "simulation", "triton", "later")},
    **{f"operator {name}": by_operator(name) for name in ("reference", "triton")},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "later", LATER)


class Model(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.project = torch.nn.Linear(16, 16).to(DEVICE)

    def forward(self, q, k, v):
        return self.attention(self.project(q), k, v)


def model_of(attention):
    torch.manual_seed(0)
    return Model(attention)


def loss(attention, *x):
    return attention(*x).square().sum()


def leaf(x):
    return x.detach().clone().requires_grad_()


def trained(function, q, k, v):
    """The gradient with respect to q, by the ordinary way."""
    q = leaf(q)
    return torch.autograd.grad(function(q, k, v).square().sum(), q)[0]


def of_parameters(attention, q, k, v):
    model = model_of(attention)
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    return grad(lambda p: functional_call(model, p, (q, k, v)).square().sum())(parameters)["project.weight"]


def dual(attention, q, k, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)).tangent


def dual_of_the_output(attention, q, k, v):
    """Forward over reverse: the tangent is that of the gradient of o alone."""
    o = attention(leaf_q := leaf(q), k, v)
    with forward_ad.dual_level():
        given = forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
        return forward_ad.unpack_dual(torch.autograd.grad(o, leaf_q, given)[0]).tangent


def penalty(attention, q, k, v):
    """A gradient of a gradient's square. The first gradient has no grad_fn by itself: the loss is linear in o."""
    q = leaf(q)
    (first,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    assert first.requires_grad
    return torch.autograd.grad(first.square().sum(), q)[0]


def unused_graph(attention, q, k, v):
    q = leaf(q)
    return torch.autograd.grad(loss(attention, q, k, v), q, create_graph=True)[0].detach()


def batched_gradients(attention, q, k, v):
    q = leaf(q)
    o = attention(q, k, v)
    given = torch.stack([torch.ones_like(o), o.detach()])
    return torch.autograd.grad(o, q, given, is_grads_batched=True)[0]


def compiled_of(attention):
    torch._dynamo.reset()  # functions of one code share a limit of compilations
    return torch.compile(attention, fullgraph=True, backend="aot_eager")


def compiled(attention, q, k, v):
    return trained(attention if attention is formula else compiled_of(attention), q, k, v)


def exported(attention, q, k, v):
    return torch.export.export(model_of(attention), (q, k, v)).module()(q, k, v)


def copied(attention, q, k, v):
    return trained(copy.deepcopy(model_of(attention)), q, k, v)


RIGHT = {
    "grad": lambda f, q, k, v: grad(lambda *x: loss(f, *x), argnums=(0, 1, 2))(q, k, v),
    "vjp": lambda f, q, k, v: vjp(f, q, k, v)[1](torch.ones_like(q)),
    "jacrev": lambda f, q, k, v: jacrev(lambda *x: f(*x)[0, :, 2, :2], argnums=(0, 2))(q, k, v),
    "jacobian": lambda f, q, k, v: torch.autograd.functional.jacobian(
        lambda x: f(x, k, v)[0, :, 2, :2], q, vectorize=True
    ),
    "is_grads_batched": batched_gradients,
    "functional_call": of_parameters,
    "checkpoint": lambda f, *x: trained(lambda *y: checkpoint(f, *y, use_reentrant=False), *x),
    "compile": compiled,
    "export": exported,
    "deepcopy": copied,
    "create_graph": unused_graph,
}
NO_FORWARD = "has no forward-mode derivative .*reference.attention has every derivative"
NO_SECOND = "has no second derivative .*reference.attention has every derivative"
REFUSED = {
    "jvp": (lambda f, q, k, v: jvp(f, (q, k, v), (q, k, v)), NO_FORWARD),
    "jacfwd": (lambda f, q, k, v: jacfwd(f)(q, k, v), NO_FORWARD),
    "dual tensor": (dual, NO_FORWARD),
    "dual tensor, no_grad": (torch.no_grad()(dual), NO_FORWARD),
    "dual tensor, as the gradient of o": (dual_of_the_output, NO_FORWARD),
    "linearize": (lambda f, q, k, v: torch.func.linearize(lambda x: f(x, k, v), q)[1](q), NO_FORWARD),
    "hessian": (lambda f, q, k, v: hessian(lambda x: loss(f, x, k, v))(q), NO_FORWARD),
    "double backward": (penalty, NO_SECOND),
    "jacrev of grad": (lambda f, q, k, v: jacrev(grad(lambda x: f(x, k, v).sum()))(q), NO_SECOND),
    "hvp": (lambda f, q, k, v: torch.autograd.functional.hvp(lambda x: loss(f, x, k, v), q, q), NO_SECOND),
    "jvp of grad": (lambda f, q, k, v: jvp(grad(lambda x: f(x, k, v).sum()), (q,), (q,)), NO_FORWARD),
    "grad of jvp": (lambda f, q, k, v: grad(lambda x: jvp(f, (x, k, v), (q, k, v))[1].sum())(q), NO_FORWARD),
    "vmap": (lambda f, *x: vmap(f)(*(y[None] for y in x)), "not batched by torch.vmap: it has a batch dimension"),
    "vmap of grad": (
        lambda f, *x: vmap(grad(lambda *y: loss(f, *y)))(*(y[None] for y in x)), "not batched by torch.vmap"
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", RIGHT)
@pytest.mark.every(2)
def test_what_works_computes_what_the_formula_does(transform, way):
    got, want = (RIGHT[transform](f, *inputs()) for f in (WAYS[way], formula))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", [*WAYS, "p6_1_fa1"])
@pytest.mark.parametrize("transform", REFUSED)
def test_what_does_not_is_refused_in_a_sentence(transform, way):
    attention, (q, k, v) = WAYS.get(way) or by_door(way), inputs()
    if way == "p6_1_fa1":  # emulated: its smallest head
        if transform in ("hessian", "jacfwd"):
            pytest.skip("a call of the emulator takes its time")
        q, k, v = (x.repeat(1, 1, 1, 4) for x in (q, k, v))
    function, sentence = REFUSED[transform]
    with pytest.raises(NotImplementedError, match=sentence) as caught:
        function(attention, q, k, v)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("transform", REFUSED)
def test_the_formula_that_the_sentence_names_has_it(transform):
    if transform.startswith("vmap"):
        return
    found = REFUSED[transform][0](formula, *inputs())
    assert all(torch.isfinite(x).all() for x in torch.utils._pytree.tree_leaves(found))


@pytest.mark.parametrize("way", ["triton", "operator triton"])
def test_a_dual_tensor_into_a_compiled_function_is_refused(way):
    with pytest.raises(NotImplementedError, match=NO_FORWARD):
        dual(compiled_of(WAYS[way]), *inputs())


@pytest.mark.long
def test_a_bare_kernel_in_a_compiled_function_computes_and_has_no_tangent():
    def bare(q, k, v):
        return flash_attention_forward(q, k, v, causal=True)[0]

    torch._dynamo.reset()
    compiled_bare = torch.compile(bare, backend="eager")
    torch.testing.assert_close(compiled_bare(*inputs()), bare(*inputs()))
    with pytest.raises(ValueError, match="q has a tangent, and this kernel's result has none"):
        dual(compiled_bare, *inputs())


def test_the_doors_page_lists_each_transform():
    page, others = re.sub(r"\s+", " ", door.__doc__), ("autocast", "FakeTensor", "meta")
    assert [name for name in (*RIGHT, *REFUSED, *others) if name.split(",")[0] not in page] == []


def test_rope_has_reverse_mode_under_torch_func_and_refuses_forward_mode():
    q, k, _ = inputs()
    table = rope_table(5, 16, device=DEVICE)

    def by_kernel(x):
        return fused_rope(x, k, *table)[0][0, :, 2, ::7]

    got, want = (jacrev(f)(q) for f in (by_kernel, lambda x: rope(x, *table)[0, :, 2, ::7]))
    torch.testing.assert_close(got, want)
    for function in (lambda: jvp(by_kernel, (q,), (q,)), lambda: dual(lambda q, k, v: by_kernel(q), q, k, k)):
        with pytest.raises(NotImplementedError, match="fused_rope has no forward-mode derivative .*models.rope.rope"):
            function()
    cos, sin = (x.requires_grad_() for x in table)
    with pytest.raises(ValueError, match="cos requires a gradient, and the kernel computes none for it"):
        torch.ops.flashlab.fused_rope(q, k, cos, sin, 0, False)
