"""Every kernel of the series as an operator of PyTorch: torch.ops.flashlab.p6_1_fa1, ... p9_flash.

    o, lse = attention("p9_flash", q, k, v, causal=True)         # or torch.ops.flashlab.p9_flash(q, k, v, True)

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

from flashlab.attention.reference import attention_backward
from flashlab.cuda.inline import CudaModule, load_inline, new_output
from flashlab.cuda.toolchain import missing
from flashlab.kernels.series import SERIES, Step, step

_SCHEMA = "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> (Tensor, Tensor)"


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
    return load_inline(this, backend=backend, head_dim=head_dim, dtype=dtype)


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
    allowed = this.dtypes
    if q.dtype not in allowed:
        raise ValueError(f"q is {q.dtype}; {this.name} takes {' or '.join(map(str, allowed))}")
    if q.dim() == 4 and q.shape[-1] not in this.head_dims:
        raise ValueError(f"head_dim is {q.shape[-1]}; {this.name} takes {' or '.join(map(str, this.head_dims))}")
    return q.dtype


for _step in SERIES:
    _register(_step)

__all__ = ["attention", "module"]
