"""The layer: the original form against float64, and every other form against both, forward and backward."""

import copy

import pytest
import torch
from drawn import DEVICE, draw

from flashlab.attention import reference
from flashlab.models.layer import ATTENTIONS, AttentionLayer
from flashlab.models.rope import rope, rope_table

FORMS = [(name, fused) for name in ATTENTIONS for fused in (False, True)]


def layer(attention="eager", fused_rope=False, *, kv_heads=2, causal=True, dtype=torch.float32):
    """Always the same weights, rounded to dtype."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = AttentionLayer(64, 4, kv_heads, attention=attention, causal=causal, fused_rope=fused_rope)
    return built.to(DEVICE, dtype)


def results(built, x, table, grad):
    """The output, the gradient of x, and those of the weights, by name."""
    x = x.detach().requires_grad_()
    y = built(x, *(t.to(x.dtype) if x.dtype == torch.float64 else t for t in table))
    weights = dict(built.named_parameters())
    gradients = torch.autograd.grad(y, [x, *weights.values()], grad)
    return dict(zip(("y", "x", *weights), (y.detach(), *gradients), strict=True))


def test_the_layer_is_its_projections_around_the_formula():
    cos, sin = (t.double() for t in rope_table(11, 16, device=DEVICE))
    built, x = layer(dtype=torch.float64), draw(2, 11, 64).double()
    want = torch.zeros_like(x)
    for head in range(4):  # one head after the other, from its own rows of the weights
        rows, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        q, k, v = ((x @ p.weight[r].T)[:, None] for p, r in (
            (built.to_q, rows), (built.to_k, shared), (built.to_v, shared)
        ))  # fmt: skip
        o, _ = reference.attention(rope(q, cos, sin), rope(k, cos, sin), v, causal=True)
        want += o[:, 0] @ built.out.weight[:, rows].T
    torch.testing.assert_close(built(x, cos, sin), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention, fused", FORMS[1:])
def test_every_form_gives_the_same(attention, fused, dtype):
    """Its largest error against float64 is at most 2 times that of the original form, 3 times for a gradient, and one
    rounding; the rule of flash-attention's test suite."""
    for kv_heads, seq, causal in ((2, 19, True), (4, 33, False), (1, 16, True)):
        x, grad = draw(2, seq, 64, dtype=dtype), draw(2, seq, 64, dtype=dtype, seed=1)
        table = rope_table(seq + 3, 16, device=DEVICE)
        twin = layer(kv_heads=kv_heads, causal=causal, dtype=dtype)
        right = results(copy.deepcopy(twin).double(), x.double(), table, grad.double())
        eager = results(twin, x, table, grad)
        ours = results(layer(attention, fused, kv_heads=kv_heads, causal=causal, dtype=dtype), x, table, grad)
        for name, want in right.items():
            allowed = (2 if name == "y" else 3) * (eager[name] - want).abs().max()
            allowed += torch.finfo(dtype).eps * want.abs().max()
            assert ours[name].dtype == dtype and (ours[name] - want).abs().max() <= allowed, name


def test_it_refuses():
    for arguments, sentence in (
        (dict(width=48, heads=5), "width is 48; 5 heads do not share it evenly"),
        (dict(width=48, heads=4, kv_heads=3), "kv_heads is 3; 4 query heads cannot share 3 key heads evenly"),
        (dict(width=48, heads=4, attention="Flash"), "attention is 'Flash'; it must be 'eager', 'sdpa' or 'flash'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            AttentionLayer(**arguments)
    with pytest.raises(ValueError, match="the tables have the positions from 0 up to, and without, 8"):
        layer()(draw(1, 9, 64), *rope_table(8, 16, device=DEVICE))
