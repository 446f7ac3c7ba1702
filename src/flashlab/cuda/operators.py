"""Every kernel of the series as an operator of PyTorch: torch.ops.flashlab.p6_1_fa1, ... p8_flash.

    o, lse = attention("p8_flash", q, k, v, causal=True)         # or torch.ops.flashlab.p8_flash(q, k, v, True)

An operator that PyTorch knows nothing about ends a ``torch.compile`` graph, and autograd takes its result for a
constant. So each kernel is registered with three things: what it computes (the kernel: on the GPU built by nvcc, on CPU
tensors emulated), what shapes come out without computing (the *fake* implementation, for tracing), and its gradient.

The gradient is plain PyTorch for now: it computes the probabilities again from q, k and the log-sum-exp, as
FlashAttention's backward does (Dao et al. 2022, Algorithm 4), but with the whole N x N matrix in memory. Phase 5 writes
the kernels that need no such matrix.
"""

from __future__ import annotations

import functools
import math

import torch

from flashlab.cuda import problem as _problem
from flashlab.cuda.inline import CudaModule, load_inline, missing, new_output
from flashlab.cuda.problem import Step
from flashlab.cuda.scalar import SCALAR
from flashlab.reference import causal_mask

SERIES: tuple[Step, ...] = (*SCALAR, *_problem.SERIES)
"""All steps with a kernel that takes struct Problem, in the order of the course."""

_SCHEMA = "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> (Tensor, Tensor)"


def step(name: str) -> Step:
    """The step of that name. Raises KeyError, with the names there are."""
    for s in SERIES:
        if s.name == name:
            return s
    raise KeyError(f"no step {name!r} in the series; there are {', '.join(s.name for s in SERIES)}")


def dtypes(step: Step) -> tuple[torch.dtype, ...]:
    """What a step's kernel takes: float32 in phase 6, float16 and bfloat16 on the tensor cores."""
    return (torch.float32,) if step in SCALAR else (torch.float16, torch.bfloat16)


@functools.cache
def module(
    name: str, *, head_dim: int = 64, dtype: torch.dtype | None = None, on_gpu: bool | None = None
) -> CudaModule:
    """A step's source, loaded: for GPU tensors built by nvcc, for CPU tensors emulated.

    ``on_gpu`` None: on the GPU where this machine can. Raises Unavailable, CompileError; KeyError for an unknown name.
    """
    this = step(name)
    if on_gpu is None:
        on_gpu = missing("nvcc") is None
    backend = "nvcc" if on_gpu and missing("nvcc") is None else "emulator"
    return load_inline(this.path, backend=backend, head_dim=head_dim, dtype=dtype or dtypes(this)[0])


def attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v by one step of the series, with its gradient.

    Args:
        name: of the step, "p6_4_registers".
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim]; see CudaModule.forward.
        causal: query i sees the keys up to i + seq_k - seq_q.
        scale: head_dim ** -0.5, if None.

    Returns:
        o: like q; lse: [batch, heads, seq_q], float32.
    """
    step(name)
    return getattr(torch.ops.flashlab, name)(q, k, v, causal, scale)


def attention_backward(
    grad_o: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, lse: torch.Tensor, *, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv of attention, from its inputs and outputs; in float32, or float64 where q is.

    With P = exp(scale * q k^T - lse) and delta = rowsum(do * o):
        dv = P^T do,  dS = P * (do v^T - delta + dlse),  dq = scale * dS k,  dk = scale * dS^T q.
    A key head's gradient is the sum over the query heads that share it. Takes [seq_q, seq_k] floats a head.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, seq_q)
    qg, og, gg = (x.to(wide).reshape(*grouped, head_dim) for x in (q, o, grad_o))
    kg, vg = (x.to(wide).unsqueeze(2) for x in (k, v))
    lg = lse.to(wide).reshape(grouped)
    s = scale * (qg @ kg.transpose(-1, -2))
    p = torch.exp(s - lg.masked_fill(torch.isneginf(lg), 0.0)[..., None])
    hidden = torch.isneginf(lg)[..., None]  # rows that see no key
    if causal:
        hidden = hidden | ~causal_mask(seq_q, seq_k, device=q.device)
    p = p.masked_fill(hidden, 0.0)
    ds = gg @ vg.transpose(-1, -2) - (gg * og).sum(-1, keepdim=True)
    if grad_lse is not None:
        ds = ds + grad_lse.to(wide).reshape(grouped)[..., None]
    ds = p * ds
    dq = (scale * (ds @ kg)).reshape(q.shape)
    dk = (scale * (ds.transpose(-1, -2) @ qg)).sum(2)
    dv = (p.transpose(-1, -2) @ gg).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _register(this: Step) -> None:
    def run(q, k, v, causal=False, scale=None):
        loaded = module(
            this.name, head_dim=q.shape[-1] if q.dim() == 4 else 64, dtype=_known(this, q), on_gpu=q.is_cuda
        )
        return loaded.forward(q, k, v, causal=causal, scale=scale)

    operator = torch.library.custom_op(f"flashlab::{this.name}", run, mutates_args=(), schema=_SCHEMA)

    @operator.register_fake
    def _(q, k, v, causal=False, scale=None):
        return new_output(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def keep(ctx, inputs, output):
        q, k, v, causal, scale = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.causal, ctx.scale = causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    def backward(ctx, grad_o, grad_lse):
        grads = attention_backward(grad_o, grad_lse, *ctx.saved_tensors, causal=ctx.causal, scale=ctx.scale)
        return *grads, None, None

    operator.register_autograd(backward, setup_context=keep)


def _known(this: Step, q: torch.Tensor) -> torch.dtype:
    """q's dtype, if the step takes it."""
    allowed = dtypes(this)
    if q.dtype not in allowed:
        raise ValueError(f"q is {q.dtype}; {this.name} takes {' or '.join(map(str, allowed))}")
    if q.dim() == 4 and q.shape[-1] not in this.head_dims:
        raise ValueError(f"head_dim is {q.shape[-1]}; {this.name} takes {' or '.join(map(str, this.head_dims))}")
    return q.dtype


for _step in SERIES:
    _register(_step)

__all__ = ["SERIES", "attention", "attention_backward", "dtypes", "module", "step"]
