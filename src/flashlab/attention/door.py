"""The one door: `flash_attention(q, k, v)`, with its gradient, for a model to call.

    o = flash_attention(q, k, v, causal=True)

Behind it stand several implementations, the *backends*: the formula in float64 ("reference"), the loops in plain torch
("simulation"), and the Triton kernels ("triton"). `backend="auto"` takes the fastest that takes the inputs, and
`choose_backend` says which that is and why.

Each backend is registered as an operator of PyTorch, with three things beside the computation itself: what shapes
come out (the *fake* implementation, with which torch.compile traces without computing), the gradient, and what happens
under vmap. So a model with this attention compiles as one graph, and trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashlab import runtime
from flashlab.attention import full_reference, triton_backward, triton_forward
from flashlab.attention.inputs import check_qkv, scale_of
from flashlab.attention.options import Window, softcap_of, window_of
from flashlab.attention.simulation import flash_attention_sim
from flashlab.attention.simulation_backward import flash_attention_backward_sim

__all__ = ["BACKENDS", "Chosen", "choose_backend", "flash_attention"]

BACKENDS = ("reference", "simulation", "triton")


class Chosen(NamedTuple):
    """A backend, and why it is the one."""

    backend: str
    reason: str


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(scale * q k^T + mask) v, with its gradient.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim]; heads is a multiple of kv_heads,
            and query head h reads key head h // (heads / kv_heads). One dtype and one device. Any strides, no copies.
        causal: query i sees the keys j <= i + seq_k - seq_q: aligned at the end, as in FlashAttention-2 (PyTorch's
            ``is_causal`` is aligned at the beginning).
        scale: 1 / sqrt(head_dim) unless given.
        window: (left, right), how many keys before and after its own position a query sees; None is no bound, a number
            n is (n, n). With causal the right side is 0.
        softcap: scores become softcap * tanh(score / softcap).
        backend: one of `BACKENDS`, or "auto".
    Returns:
        o: like q. A row that sees no key is 0, and has no gradient.
    Under torch.autocast, inputs are converted to its dtype first, as for a matrix product.
    Raises:
        TypeError, ValueError: a sentence that names the argument. NotImplementedError: under torch.vmap.
    """
    q, k, v = _autocast(q, k, v)
    if not torch.compiler.is_compiling():  # then the operator's fake checks
        check_qkv(q, k, v, same_v=True)
    chosen, _ = _choose(q, window, softcap, backend)
    left, right = window_of(window, causal)
    operator = getattr(torch.ops.flashlab, f"{chosen}_attention")
    return operator(q, k, v, scale_of(scale, q.shape[-1]), left, right, softcap_of(softcap))[0]


def choose_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: Window = None, softcap: float | None = None,
    backend: str = "auto",
) -> Chosen:  # fmt: skip
    """The backend that `flash_attention` takes for these inputs, and why.

    Raises:
        ValueError: no backend of that name, or one that does not take the inputs; the message says why not.
    """
    chosen, refusal = _choose(q, window, softcap, backend)
    if backend != "auto":
        return Chosen(chosen, "it was asked for")
    if refusal:
        return Chosen(chosen, f"the backend triton does not take these inputs: {refusal}")
    how = "interpreted on the CPU, which is slow" if runtime.INTERPRETED else f"compiled for {q.device}"
    return Chosen(chosen, f"the Triton kernels take {q.dtype} with a head_dim of {q.shape[-1]}; they are {how}")


def _choose(q: torch.Tensor, window: Window, softcap: float | None, backend: str) -> tuple[str, str | None]:
    """The backend, and why it is not Triton's where "auto" had to take another one."""
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {backend!r}; it must be auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    refusal = _refusal("triton" if backend == "auto" else backend, q, window, softcap)
    if backend == "auto":
        return ("reference" if refusal else "triton"), refusal
    if refusal:
        raise ValueError(f"backend is {backend!r}, which does not take these inputs: {refusal}")
    return backend, None


def _refusal(backend: str, q: torch.Tensor, window: Window, softcap: float | None) -> str | None:
    """Why a backend does not take these inputs, as a clause; None where it does."""
    if backend == "simulation":
        if window is not None or softcap_of(softcap) is not None:
            return "it has neither window nor softcap"
        if q.dtype not in triton_forward.DTYPES:
            return f"it takes float16, bfloat16 and float32, and q is {q.dtype}"
    if backend == "triton":
        if q.dtype not in triton_forward.DTYPES:
            return f"it takes float16, bfloat16 and float32, and q is {q.dtype}"
        if q.shape[-1] > triton_forward.MAX_HEAD_DIM:
            return f"it takes a head_dim up to {triton_forward.MAX_HEAD_DIM}, and q has {q.shape[-1]}"
        if not runtime.INTERPRETED and not q.is_cuda:
            return f"its kernels are compiled for the GPU, and q is on {q.device}"
        if runtime.INTERPRETED and q.device.type not in ("cpu", "cuda"):
            return f"it runs on the CPU or a GPU, and q is on {q.device}"
        # torch.compile may not look at the device; what it generates needs a newer one anyway.
        if q.is_cuda and not torch.compiler.is_compiling() and torch.cuda.get_device_capability(q.device) < (8, 0):
            major, minor = torch.cuda.get_device_capability(q.device)
            return f"it needs compute capability 8.0, and this GPU has {major}.{minor}"
    return None


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype where it is on for their device; float64 stays, as with every such operator."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


# ---- the operators ---------------------------------------------------------------------------------------------------

_OPTIONS = "float scale, SymInt? left, SymInt? right, float? softcap"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _register(backend: str, check: Callable[..., None], forward: Forward, backward: Backward) -> None:
    """Register a backend as torch.ops.flashlab.<backend>_attention, with its gradient, an operator too.

    check(q, k, v, left, right, softcap) raises for what the backend does not take; when torch.compile traces as well.
    forward(q, k, v, **options) gives (o, lse), backward(grad_o, grad_lse, q, k, v, o, lse, **options) dq, dk and dv.
    Outputs of operators must have the order in memory that the fakes promise: that of torch.empty_like.
    """

    def run(q, k, v, scale, left, right, softcap):
        check(q, k, v, left, right, softcap)
        o, lse = forward(q, k, v, scale=scale, left=left, right=right, softcap=softcap)
        return _ordered(o, q), lse.to(torch.float32)

    def run_backward(grad_o, grad_lse, q, k, v, o, lse, scale, left, right, softcap):
        options = dict(scale=scale, left=left, right=right, softcap=softcap)
        found = backward(grad_o, grad_lse, q, k, v, o, lse, **options)
        return tuple(_ordered(x, like) for x, like in zip(found, (q, k, v), strict=True))

    operator = torch.library.custom_op(f"flashlab::{backend}_attention", run, mutates_args=(), schema=_FORWARD)
    gradient = torch.library.custom_op(
        f"flashlab::{backend}_attention_backward", run_backward, mutates_args=(), schema=_BACKWARD
    )

    @operator.register_fake
    def _(q, k, v, scale, left, right, softcap):
        check(q, k, v, left, right, softcap)
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    @gradient.register_fake
    def _(grad_o, grad_lse, q, k, v, o, lse, scale, left, right, softcap):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def keep(ctx, inputs, output):
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)  # lse is seldom part of a loss

    def gradients(ctx, grad_o, grad_lse):
        q, k, v, o, lse = ctx.saved_tensors
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        return *gradient(grad_o, grad_lse, q, k, v, o, lse, *ctx.options), None, None, None, None

    operator.register_autograd(gradients, setup_context=keep)
    operator.register_vmap(_refuse_vmap)
    gradient.register_vmap(_refuse_vmap)


def _ordered(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x in the dtype of `like` and in the order in memory of torch.empty_like(like)."""
    out = torch.empty_like(like)
    return x if (x.dtype, x.stride()) == (out.dtype, out.stride()) else out.copy_(x)


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "flash_attention is not batched by torch.vmap: it has a batch dimension of its own, the first; "
        "fold the mapped dimension into that"
    )


def _check_triton(q, k, v, left, right, softcap) -> None:
    triton_forward.check_inputs(q, k, v)


def _triton_forward(q, k, v, *, left, right, **options):
    with torch.no_grad():
        return triton_forward.flash_attention_forward(q, k, v, window=(left, right), **options)


def _triton_backward(grad_o, grad_lse, *saved, left, right, **options):
    window = (left, right)
    return triton_backward.flash_attention_backward(grad_o, *saved, grad_lse=grad_lse, window=window, **options)


def _check_reference(q, k, v, left, right, softcap) -> None:
    check_qkv(q, k, v, same_v=True)


def _reference_forward(q, k, v, *, left, right, **options):
    return full_reference.attention(q, k, v, window=(left, right), **options)


def _reference_backward(grad_o, grad_lse, q, k, v, o, lse, *, left, right, **options):
    options |= dict(window=(left, right), grad_lse=grad_lse)
    return full_reference.attention_backward(grad_o, q, k, v, **options)


def _check_simulation(q, k, v, left, right, softcap) -> None:
    check_qkv(q, k, v, same_v=True, dtypes=triton_forward.DTYPES)
    if left is not None or right not in (None, 0) or softcap is not None:
        raise ValueError("the simulation has neither window nor softcap: take another backend")


def _simulation_forward(q, k, v, *, left, right, softcap, scale):
    return flash_attention_sim(q, k, v, scale=scale, causal=right == 0)


def _simulation_backward(grad_o, grad_lse, q, k, v, o, lse, *, left, right, softcap, scale):
    options = dict(scale=scale, causal=right == 0, grad_lse=grad_lse)
    return flash_attention_backward_sim(grad_o, q, k, v, o, lse, **options)


_register("reference", _check_reference, _reference_forward, _reference_backward)
_register("simulation", _check_simulation, _simulation_forward, _simulation_backward)
_register("triton", _check_triton, _triton_forward, _triton_backward)
