"""What stands behind the one door: each implementation, what it takes, and its registration with PyTorch.

A `Backend` says of itself which dtypes, head sizes, options and devices it takes. From that come its sentence
(`accepts`), the reason why it does not take an input (`refusal`), and the check before every launch: one source.

`register` makes of it an operator of PyTorch, torch.ops.flashlab.<name>, with three things beside the computation
itself: what shapes come out (the *fake* implementation, with which torch.compile traces without computing), the
gradient, and what happens under vmap. So a model with this attention compiles as one graph, and trains. `attend`
computes by it, or by the same functions without it.

Five backends are here. Later rooms register their own: flashlab.cuda.operators every step of the CUDA series.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference, triton_backward, triton_forward
from flashlab.attention.blockwise import attention_backward_blockwise, attention_blockwise
from flashlab.attention.inputs import check_qkv, check_results, one_of, scale_of
from flashlab.attention.options import softcap_of
from flashlab.attention.simulation import flash_attention_sim
from flashlab.attention.simulation_backward import flash_attention_backward_sim
from flashlab.runtime.dispatch import operator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Tensors = tuple[torch.Tensor, ...]


def anywhere(device: torch.device) -> str | None:
    """Of a backend that runs on every device."""
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of attention and of its gradient.

    Attributes:
        what: it is, in a few words.
        forward: (q, k, v, *, scale, left, right, softcap) -> o, lse: a query sees `left` keys before its own position
            and `right` after it, None is no bound; a causal mask is right = 0. softcap None is none.
        backward: (grad_o, grad_lse, q, k, v, o, lse, *, scale, left, right, softcap) -> dq, dk, dv; grad_lse may be
            None.
        dtypes, head_dims: which it takes; one number is the largest head_dim, None is any.
        masks: whether it has windows and soft-caps beside the causal mask.
        unfit: why it cannot run on a device, as a clause; None where it can.
    """

    name: str
    what: str
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    head_dims: int | tuple[int, ...] | None = None
    masks: bool = True
    unfit: Callable[[torch.device], str | None] = anywhere

    def refusal(
        self, q: torch.Tensor, left: int | None = None, right: int | None = None, softcap: float | None = None
    ) -> str | None:
        """Why it does not take inputs like q with these options, as a clause; None where it does."""
        if q.dtype not in self.dtypes:
            taken = one_of([str(dtype).removeprefix("torch.") for dtype in self.dtypes])
            return f"it takes {taken}, and q is {q.dtype}"
        if others := self._other_head_dims(q.shape[-1]):
            return f"it takes a head_dim {others}, and q has {q.shape[-1]}"
        if not self.masks and (left is not None or right not in (None, 0) or softcap is not None):
            return "it has neither window nor softcap"
        return None if q.device.type == "meta" else self.unfit(q.device)  # no memory, no kernel: shapes alone

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left, right, softcap) -> None:
        """Raise, before any launch, for inputs that it does not take: TypeError or ValueError, a sentence."""
        check_qkv(q, k, v, dtypes=DTYPES, same_v=True)
        if why := self.refusal(q, left, right, softcap):
            raise ValueError(f"backend is {self.name!r}, which does not take these inputs: {why}")

    def _other_head_dims(self, head_dim: int) -> str | None:
        """Which it takes, where this is none of them."""
        if isinstance(self.head_dims, int):
            return None if head_dim <= self.head_dims else f"up to {self.head_dims}"
        if self.head_dims is None or any(head_dim == taken for taken in self.head_dims):
            return None
        return f"of {one_of([str(n) for n in self.head_dims])}"


BACKENDS: dict[str, Backend] = {}  # every backend by its name; `register` adds to it
_CALLS: dict[str, Callable[..., Tensors]] = {}
INSTEAD = "flashlab.attention.reference.attention has every derivative, the formula in operations of PyTorch"

_OPTIONS = "float scale, SymInt? left, SymInt? right, float? softcap"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _checks(backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of the arguments of a backend's two operators; each gives the options as the backend takes them."""

    def check(q, k, v, scale, left, right, softcap):
        backend.check(q, k, v, left, right, softcap)
        return scale_of(scale, q.shape[-1]), left, right, softcap_of(softcap)

    def check_backward(grad_o, grad_lse, q, k, v, o, lse, *options):
        checked = check(q, k, v, *options)
        check_results(q, {"grad_o": grad_o, "o": o}, {"lse": lse, "grad_lse": grad_lse})
        return checked

    return check, check_backward


def register(backend: Backend) -> None:
    """Offer a backend at the door, and as torch.ops.flashlab.<name>; its gradient is an operator too, <name>_backward.

    Outputs of operators must have the order in memory that the fakes promise: that of torch.empty_like.
    """
    if backend.name in BACKENDS:
        raise ValueError(f"there is a backend {backend.name!r} already")

    def compute(q, k, v, scale, left, right, softcap):
        with torch.no_grad(), _as_given(q.device):
            o, lse = backend.forward(q, k, v, scale=scale, left=left, right=right, softcap=softcap)
        return o.to(q.dtype), lse.to(torch.float32)

    def compute_backward(grad_o, grad_lse, q, k, v, o, lse, scale, left, right, softcap):
        options = dict(scale=scale, left=left, right=right, softcap=softcap)
        grad_o, grad_lse = grad_o.resolve_neg(), grad_lse if grad_lse is None else grad_lse.resolve_neg()
        with torch.no_grad(), _as_given(q.device):
            found = backend.backward(grad_o, grad_lse, q, k, v, o, lse, **options)
        return tuple(x.to(like.dtype) for x, like in zip(found, (q, k, v), strict=True))

    check, check_backward = _checks(backend)

    def run(q, k, v, *options):
        o, lse = compute(q, k, v, *check(q, k, v, *options))
        return _ordered(o, q), lse

    def run_backward(*arguments):
        found = compute_backward(*arguments[:7], *check_backward(*arguments))
        return tuple(_ordered(x, like) for x, like in zip(found, arguments[2:5], strict=True))

    def fake(q, k, v, *options):
        check(q, k, v, *options)
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def fake_backward(*arguments):
        check_backward(*arguments)
        return tuple(map(torch.empty_like, arguments[2:5]))

    def keep(ctx, inputs, output):
        q, k, v, *others, softcap = inputs
        ctx.options = *others, softcap or None
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)  # lse is seldom part of a loss

    def gradients(ctx, grad_o, grad_lse):
        q, k, v, o, lse = ctx.saved_tensors
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        return *gradient(grad_o, grad_lse, q, k, v, o, lse, *ctx.options), None, None, None, None

    sentence: Any = {"who": f"flash_attention by {backend.name!r}", "instead": INSTEAD}
    gradient = operator(
        f"{backend.name}_backward", _BACKWARD, run_backward, fake=fake_backward, compute=compute_backward,
        tensors=7, **sentence,
    )  # fmt: skip
    _CALLS[backend.name] = operator(
        backend.name, _FORWARD, run, fake=fake, compute=compute, keep=keep, backward=gradients, vmap=_refuse_vmap,
        tensors=3, **sentence,
    )  # fmt: skip
    BACKENDS[backend.name] = backend


def attend(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Tensors:
    """o and lse by a backend, of inputs that were checked; options: scale, left, right, softcap.

    By its operator, or without PyTorch's dispatcher where nobody would see the difference: that takes half the time,
    and a small model waits for it (notes/phase_10_experiments.md).
    """
    return _CALLS[name](q, k, v, *options)


def _as_given(device: torch.device) -> contextlib.AbstractContextManager:
    """No autocast inside of a backend: it would round what the backend computes in float32 on purpose."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def _ordered(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x in the order in memory of torch.empty_like(like)."""
    wanted = torch.empty_like(like, device="meta").stride()  # without memory: there may be none for one tensor more
    return x if x.stride() == wanted else torch.empty_like(like).copy_(x)


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "flash_attention is not batched by torch.vmap: it has a batch dimension of its own, the first; "
        "fold the mapped dimension into that"
    )


# ---- five of them ---------------------------------------------------------------------------------------------------


def _windowed(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Of a forward pass whose options say left and right as a window."""
    return lambda q, k, v, *, left, right, **options: function(q, k, v, window=(left, right), **options)


def _reference_backward(grad_o, grad_lse, q, k, v, o, lse, *, left, right, **options):
    return reference.attention_backward(grad_o, q, k, v, window=(left, right), grad_lse=grad_lse, **options)


def _simulation_forward(q, k, v, *, left, right, softcap, scale):
    return flash_attention_sim(q, k, v, scale=scale, causal=right == 0)


def _simulation_backward(grad_o, grad_lse, *saved, left, right, softcap, scale):
    return flash_attention_backward_sim(grad_o, *saved, scale=scale, causal=right == 0, grad_lse=grad_lse)


def _triton_backward(grad_o, grad_lse, *saved, left, right, **options):
    window = (left, right)
    return triton_backward.flash_attention_backward(grad_o, *saved, grad_lse=grad_lse, window=window, **options)


def _triton_unfit(device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"it runs on the CPU or a GPU of Nvidia, and q is on {device}"
    if device.type == "cpu":
        return None if runtime.INTERPRETED else f"its kernels are compiled for the GPU, and q is on {device}"
    # torch.compile may not look at the device; what it generates needs a newer one anyway.
    if not torch.compiler.is_compiling() and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


def best_backward(grad_o, grad_lse, q, k, v, o, lse, *, left, right, softcap, scale):
    """The gradient for a backend that has none of its own, by the backend that is `quick`.

    From lse it computes the forward pass's probabilities again, whoever computed that.
    """
    options = dict(left=left, right=right, softcap=softcap, scale=scale)
    return BACKENDS[quick(q, left, right, softcap)].backward(grad_o, grad_lse, q, k, v, o, lse, **options)


def quick(q: torch.Tensor, left: int | None, right: int | None, softcap: float | None) -> str:
    """The backend for such inputs: the Triton kernels, compiled, where they take them; else PyTorch's products."""
    return "torch" if runtime.INTERPRETED or BACKENDS["triton"].refusal(q, left, right, softcap) else "triton"


_OURS, _MOST = triton_forward.DTYPES, triton_forward.MAX_HEAD_DIM
_triton_forward = _windowed(triton_forward.flash_attention_forward)
for _backend in (
    Backend("reference", "the formula in float64", _windowed(reference.attention), _reference_backward),
    Backend("simulation", "the loops in plain PyTorch", _simulation_forward, _simulation_backward, _OURS, masks=False),
    Backend("torch", "PyTorch's own products, in blocks of queries", attention_blockwise, attention_backward_blockwise),
    Backend("triton", "the Triton kernels", _triton_forward, _triton_backward, _OURS, _MOST, unfit=_triton_unfit),
):
    register(_backend)
