"""Every kernel of the series as a backend of the one door, and as an operator of PyTorch: p6_1_fa1, ... p11_flash.

    o = flashlab.flash_attention(q, k, v, causal=True, backend="p9_flash")
    o, lse = attention("p9_flash", q, k, v, causal=True)          # with the log-sum-exp; torch.ops.flashlab.p9_flash

The forward pass is the kernel's: on the GPU built by nvcc, on CPU tensors emulated. p11_flash has a backward pass of
its own (flashlab.cuda.hopper_backward). Of the others the gradient is that of phase 5's Triton kernels, or of PyTorch's
own products in blocks of queries where those are interpreted, or do not take the inputs. Phase 12's last kernel is a
backend of `flash_attention_with_cache`.
"""

import functools

import torch

from flashlab.attention.backends import DTYPES, Backend, best_backward, register
from flashlab.attention.cache_door import CACHE_BACKENDS, CacheBackend
from flashlab.attention.inputs import check_qkv, scale_of
from flashlab.attention.options import window_of
from flashlab.cuda import decoding
from flashlab.cuda.hopper_backward import compiled, gradients
from flashlab.cuda.inline import CudaModule, load_inline
from flashlab.cuda.toolchain import find_nvcc, missing
from flashlab.kernels.series import DECODING, HOPPER, SERIES, Step, step


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
        o: like q; lse: [batch, heads, seq_q], float32. From p11_14_trust on, where a row's reference may lag behind its
        maximum, o may be infinite where |v| reaches 2^112 / ceil(seq_k / 128), which only bfloat16 can.
    Raises:
        TypeError, ValueError: as `flashlab.flash_attention`. KeyError: for an unknown name, or a step of phase 12.
    """
    if step(name) in DECODING:
        raise KeyError(f"{name} reads a cache: flashlab.cuda.decoding.decode, or flash_attention_with_cache")
    if not torch.compiler.is_compiling():  # then the operator's fake checks
        check_qkv(q, k, v, dtypes=DTYPES, same_v=True)
    options = scale_of(scale, q.shape[-1]), *window_of(None, causal), None
    return getattr(torch.ops.flashlab, name)(q, k, v, *options)


def _backend(this: Step) -> Backend:
    def forward(q, k, v, *, left, right, softcap, scale):
        loaded = module(this.name, head_dim=q.shape[-1], dtype=q.dtype, on_gpu=q.is_cuda)
        return loaded.compute(q, k, v, causal=right == 0, scale=scale)

    hopper = this in HOPPER
    return Backend(
        this.name,
        f"the CUDA kernel of phase {this.phase}",
        forward,
        _hopper_backward if this is HOPPER[-1] else best_backward,
        dtypes=this.dtypes,
        head_dims=this.head_dims,
        masks=False,
        unfit=_unfit_but_hopper if hopper else _unfit,
    )


def _hopper_backward(grad_o, grad_lse, q, k, v, o, lse, *, left, right, softcap, scale):
    built = compiled(q.shape[-1], q.dtype, "nvcc" if q.is_cuda else "emulator")
    return gradients(built, grad_o, grad_lse, q, k, v, o, lse, right == 0, scale)


def _unfit(device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"it runs on a GPU of Nvidia, or emulated on the CPU, and q is on {device}"
    return None


def _unfit_but_hopper(device: torch.device) -> str | None:
    return (_no_hopper(device.index) if device.type == "cuda" else None) or _unfit(device)


def _no_hopper(index: int | None) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return f"it needs compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    return None if _has_nvcc() else "nvcc has to build it, and there is none on this machine"


# A graph of torch.compile may not look at the device: so it is asked while that traces, once. What
# torch.compiler.assume_constant_result does, which would import torch._dynamo: seconds.
_no_hopper.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _has_nvcc() -> bool:
    return find_nvcc() is not None


for _step in SERIES + HOPPER:
    register(_backend(_step))
CACHE_BACKENDS["p12_decode"] = CacheBackend(decoding.decode, decoding.append, decoding.refusal)
