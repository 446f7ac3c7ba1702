"""The one validator of q, k and v: each mistake gets one sentence that names the argument, and what to do."""

import ast
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from flashlab import choose_backend, flash_attention, runtime
from flashlab.attention import reference
from flashlab.attention.gluon_forward import flash_attention_gluon
from flashlab.attention.inputs import TILE_SIDES, check_block, check_qkv, scale_of
from flashlab.attention.options import softcap_of
from flashlab.attention.simulation import flash_attention_sim
from flashlab.attention.simulation_backward import flash_attention_backward_sim
from flashlab.attention.triton_backward import flash_attention_backward
from flashlab.attention.triton_forward import flash_attention_forward
from flashlab.cuda import operators
from flashlab.cuda.hopper_backward import hopper_backward

X = torch.zeros(2, 4, 6, 16)
K = torch.zeros(2, 2, 9, 16)
ONE = torch.zeros(6, 16)
NESTED = torch.nested.nested_tensor([K[0], K[1]])
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "flashlab"


def test_what_belongs_together_passes():
    check_qkv(X, K, K)
    check_qkv(X, K, K[..., :5])  # v_dim is v's own
    check_qkv(X, K[:, :, :0], K[:, :, :0])  # no key at all
    check_qkv(X[:, :, :0], K, K)
    check_qkv(X.double(), K.half(), K)  # any floating dtypes, where none is asked for
    check_qkv(ONE, ONE[:2], ONE[:2, :3], rank=2)
    check_qkv(X.half(), K.half(), K.half(), dtypes=(torch.float16,), head_dims=TILE_SIDES, same_v=True)


@pytest.mark.parametrize(
    ("qkv", "options", "error", "sentence"),
    [
        ((X.tolist(), K, K), {}, TypeError, "q is a list; a torch.Tensor is needed"),
        ((X, K, np.zeros(3)), {}, TypeError, "v is a ndarray; a torch.Tensor is needed"),
        ((X, K[0], K), {}, ValueError,
         "k must be [batch, heads, seq_len, head_dim], but it has 3 dimensions; add the missing ones, k[None]"),
        ((X, K, ONE), {}, ValueError, "2 dimensions; add the missing ones, v[None, None]"),
        ((X, ONE, ONE), {"rank": 2}, ValueError,
         "q must be [rows, head_dim], one head, but it has 4 dimensions; take one head, q[batch, head]"),
        ((ONE, ONE[0], ONE), {"rank": 2}, ValueError, "k must be [rows, head_dim], one head, but it has 1 dimensions"),
        ((X, K, K.int()), {}, TypeError, "v is torch.int32; attention needs floating point: convert with v.float()"),
        ((X, K.half(), K), {"dtypes": (torch.float32,)}, TypeError, "one dtype for all three, please: q is torch."),
        ((X, K, K), {"dtypes": (torch.float16, torch.bfloat16)}, TypeError,
         "q is torch.float32; torch.float16 or torch.bfloat16 is taken: convert with .to(torch.float16)"),
        ((X, K.to("meta"), K), {}, ValueError, "one device for all three, please: q is on cpu, k is on meta"),
        ((X, K, K), {"on_gpu": True}, ValueError, "q is on cpu, but kernels are compiled for the GPU: move it to cuda"),
        ((X, K[..., :8], K), {}, ValueError, "q has head_dim 16, but k has 8: no dot product between them"),
        ((X, K[:1], K), {}, ValueError, "one batch size for all three, please: q has 2, k has 1, v has 2"),
        ((X[:, :3], K, K), {}, ValueError, "3 query heads cannot share 2 key heads evenly: take a multiple of them"),
        ((X, K[:, :0], K[:, :0]), {}, ValueError, "4 query heads cannot share 0 key heads"),
        ((X, K, K[:, :1]), {}, ValueError, "k has 2 heads, but v has 1: they go in pairs"),
        ((X, K, K[:, :, :5]), {}, ValueError, "k has 9 rows, but v has 5: each key needs one value"),
        ((X, K, K[..., :5]), {"same_v": True}, ValueError,
         "k is [2, 2, 9, 16] and v is [2, 2, 9, 5]; they must have one shape"),
        ((X, K[:, :, :0], K[:, :, :0]), {"keys_needed": True}, ValueError,
         "k is [2, 2, 0, 16]: a softmax needs at least one key of one feature"),
        ((X[..., :0], K[..., :0], K), {}, ValueError, "at least one key of one feature"),
        ((X.to_sparse(), K, K), {}, TypeError,
         "q is sparse_coo, and a kernel reads rows in memory: pass q.to_dense()"),
        ((X, K.to_mkldnn(), K), {}, TypeError, "k is mkldnn, and a kernel reads rows in memory: pass k.to_dense()"),
        ((X, K, NESTED), {}, TypeError,
         "v is a nested tensor, and a kernel takes rows of one length: call it for each x[None] of v.unbind()"),
        ((X, torch._neg_view(K), K), {}, ValueError,
         "k is a view that PyTorch negates when it reads it: pass k.resolve_neg()"),
        ((X, K, torch.randn(2, 2, 9, 16, dtype=torch.complex64).conj().imag), {}, ValueError, "pass v.resolve_neg()"),
        ((X, K, K.clone().requires_grad_()), {"no_grad": True}, ValueError,
         "v requires a gradient, and this kernel's result has none: pass v.detach(), or call it under torch.no_grad(); "
         "flashlab.flash_attention has a gradient"),
        ((X[..., :12], K[..., :12], K), {"head_dims": (16, 32)}, ValueError,
         "head_dim is 12; this kernel is compiled for 16 or 32, because a tile's sides are powers of two: pad the last "
         "dimension with zeros, and pass scale=12**-0.5"),
        ((X, K, K), {"head_dims": (8,)}, ValueError, "head_dim is 16; this kernel is compiled for 8"),
    ],
)  # fmt: skip
def test_each_mistake_gets_its_sentence(qkv, options, error, sentence):
    with pytest.raises(error) as caught:
        check_qkv(*qkv, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sentence_uses_the_callers_names():
    with pytest.raises(ValueError, match="Q_block has head_dim 16, but K has 8"):
        check_qkv(ONE, ONE[:, :8], ONE, rank=2, names=("Q_block", "K", "V"))


@pytest.mark.parametrize("scale", [None, 1, 0.5, -2.0, 0, np.float32(0.25), torch.tensor(0.125), 1e-300, 2.0**104])
def test_a_scale_that_float32_holds_is_taken_as_it_is(scale):
    assert scale_of(scale, 64) == (0.125 if scale is None else float(scale))
    assert math.isfinite(torch.tensor(scale_of(scale, 64) * 1.4426950408889634, dtype=torch.float32).item())


@pytest.mark.parametrize(
    ("scale", "error", "sentence"),
    [
        ("0.5", TypeError, "scale is '0.5'; it must be a number"),
        (True, TypeError, "scale is True; it must be a number"),
        (np.True_, TypeError, "it must be a number"),
        (torch.tensor(True), TypeError, "scale is tensor(True); it must be a number"),
        ([1.0], TypeError, "scale is a list; it must be one number"),
        (torch.ones(2), TypeError, "scale is a Tensor; it must be one number"),
        (1j, TypeError, "scale is a complex"),
        (math.nan, ValueError, "scale is nan; it must be a finite number"),
        (-math.inf, ValueError, "scale is -inf; it must be a finite number"),
        (1e38, ValueError, "up to 2^104, so that float32 can hold the scores: leave it out for 1 / sqrt(head_dim)"),
        (torch.nn.Parameter(torch.ones(1)), ValueError, "scale requires a gradient, and none is computed for it: mult"),
        (10**400, ValueError, "scale is inf"),
    ],
)
def test_a_scale_that_is_refused(scale, error, sentence):
    with pytest.raises(error) as caught:
        scale_of(scale, 64)
    assert sentence in str(caught.value)


def test_blocks():
    check_block("BLOCK_M", None, power_of_two=True)
    check_block("BLOCK_M", 3)
    check_block("BLOCK_M", 64, power_of_two=True)
    for rows, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"BLOCK_N is .*{rows}"):
            check_block("BLOCK_N", rows)
    for rows in (8, 48):
        with pytest.raises(ValueError, match=f"BLOCK_N is {rows}: a block is a power of two of at least 16 rows"):
            check_block("BLOCK_N", rows, power_of_two=True)


@pytest.mark.parametrize(
    "module",
    ["attention/reference", "attention/online_softmax", "attention/simulation", "attention/schemes",
     "attention/triton_minimal", "attention/simulation_backward", "attention/triton_forward", "attention/door",
     "attention/triton_plain", "kernels/problem"],
)  # fmt: skip
def test_everybody_asks_the_one_validator(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert {"check_qkv", "scale_of"} <= called


def test_a_scale_that_wants_a_derivative():
    wanted = torch.tensor(0.5, requires_grad=True)
    with torch.no_grad():
        assert scale_of(wanted, 64) == 0.5
    with pytest.raises(ValueError, match="scale has a tangent, and none is computed for it"):
        torch.func.jvp(lambda x: X * scale_of(x, 64), (torch.ones(()),), (torch.ones(()),))
    with pytest.raises(ValueError, match="softcap requires a gradient, and none is computed for it"):
        softcap_of(wanted)


def _calls():
    """Every function of the package that takes q, k and v and a causal mask."""
    on_cpu = torch.zeros(1, 1, 4, 64)
    q = on_cpu.to(runtime.device())
    half, lse = q.half(), torch.zeros(1, 1, 4, device=q.device)
    kernel = operators.module("p6_1_fa1", head_dim=64, dtype=torch.float32, on_gpu=False)
    for function in (flash_attention, choose_backend, reference.attention, reference.attention_low_precision,
                     flash_attention_sim, flash_attention_forward):  # fmt: skip
        yield function.__name__, function, q
    yield "CudaModule.forward", kernel.forward, on_cpu
    yield "operators.attention", partial(operators.attention, "p6_1_fa1"), q
    yield "gluon", flash_attention_gluon, half
    yield "attention_backward", partial(reference.attention_backward, q), q
    for function, x in ((flash_attention_backward_sim, q), (flash_attention_backward, q), (hopper_backward, half)):
        yield function.__name__, lambda q, k, v, f=function, x=x, **named: f(x, q, k, v, x, lse, **named), x


CALLS = {name: (function, x) for name, function, x in _calls()}


@pytest.mark.parametrize("name", CALLS)
def test_every_door_refuses_what_it_would_misread(name):
    function, x = CALLS[name]
    for causal in ("False", None, 1, torch.ones(4, 4), torch.tensor(True)):
        with pytest.raises(TypeError, match="causal is .*; it must be True or False"):
            function(x, x, x, causal=causal)
    for other in (x.to_sparse(), x.float().cpu().to_mkldnn(), torch.nested.nested_tensor([x[0]])):
        with pytest.raises(TypeError, match="v is (sparse_coo|mkldnn|a nested tensor), and a kernel"):
            function(x, x, other)
    if name != "gluon":  # which asks for Hopper first
        with pytest.raises(ValueError, match="scale requires a gradient"):
            function(x, x, x, scale=torch.tensor(1.0, requires_grad=True))


@pytest.mark.parametrize("name", ["flash_attention_forward", "gluon", "flash_attention_backward", "hopper_backward"])
def test_a_bare_kernel_refuses_who_wants_a_derivative(name):
    function, x = CALLS[name]
    with pytest.raises(ValueError, match="k requires a gradient, and this kernel's result has none"):
        function(x, x.clone().requires_grad_(), x)
    with pytest.raises(ValueError, match="q has a tangent, and this kernel's result has none"):
        torch.func.jvp(lambda q: function(q, x, x), (x,), (x,))
