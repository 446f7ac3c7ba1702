"""A function with a gradient as an operator of PyTorch, and a shorter way to it where only autograd looks.

An operator (torch.library) can be traced, batched, and intercepted. Each call pays for that in Python: some 0.2 ms more
than the same functions in an autograd.Function, on a machine on which the kernels of a short sequence take 0.05 ms.

Reverse mode works, once: a kernel computes the gradient of a loss, and has no derivative itself. Forward mode and a
second derivative raise NotImplementedError, on both ways. torch.library.custom_op drops a tangent in silence, and
refuses every transform of torch.func; so the operators are defined here by the means below it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.nested._internal.nested_tensor import NestedTensor

from flashlab.runtime.untraced import untraced

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_KEYS = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")  # nested ones, for run to refuse them
_LIBRARY = torch.library.Library("flashlab", "FRAGMENT")


def unwatched(*tensors: torch.Tensor | None) -> bool:
    """Whether only autograd looks at a call with these tensors.

    Not so under torch.compile, torch.func, torch.jit.trace and a TorchDispatchMode (which counts FLOPs, or computes
    shapes alone), nor for a subclass of Tensor, a tensor without memory, or one of autograd's is_grads_batched.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
    ):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_meta or is_legacy_batchedtensor(x)):
            return False
    return True


def operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    compute: Callable[..., Any] | None = None,
    keep: Callable[..., None] = lambda ctx, inputs, output: None,
    backward: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
    tensors: int,
    who: str,
    instead: str,
) -> Callable[..., Any]:
    """Define torch.ops.flashlab.<name>; return a function that computes the same, by the shorter way where it can.

    Args:
        run, fake, keep, backward, vmap: what torch.library asks for: the computation, its shapes, setup_context, the
            gradient (None: there is none, because this is one), the rule under vmap (None: a call for each element).
        compute: as run, of inputs that were checked, in any order in memory; run, if None.
        tensors: so many inputs are tensors or None, the first ones.
        who, instead: for the sentence of a derivative that there is not: what has none, and what has it.
    """
    compute = compute or run
    overload = _defined(name, schema, run, fake, vmap)

    # A setup_context of its own would cost a look at forward's signature in each call.
    def plain_forward(ctx: Any, *inputs: Any) -> Any:
        output = compute(*inputs)
        keep(ctx, inputs, output)
        return output

    def operator_forward(ctx: Any, keyset: Any, *inputs: Any) -> Any:
        output = _below_autograd(overload, keyset, inputs)
        keep(ctx, inputs, output)
        return output

    gradient, no_jvp = backward or _no_second(who, instead), no_forward_mode(who, instead)
    plain = _function(name, plain_forward, gradient, no_jvp)
    # None: of the keyset
    watched = _function(name, operator_forward, lambda ctx, *grads: (None, *gradient(ctx, *grads)), no_jvp)

    def autograd_kernel(keyset: Any, *inputs: Any) -> Any:
        # As PyTorch's own kernels: this level of torch.func alone. Function.apply would begin again at the top one.
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, watched).apply(keyset, *inputs)

    _LIBRARY.impl(name, autograd_kernel, "Autograd", with_keyset=True)

    def call(*inputs: Any) -> Any:
        if not unwatched(*inputs[:tensors]):
            return overload(*inputs)
        if backward is None and not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return compute(*inputs)
        return plain.apply(*inputs)

    return call


def _defined(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], vmap: Any) -> Any:
    """The operator, as yet without a derivative."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _KEYS:
        _LIBRARY.impl(name, untraced(run), key)
    # A jagged one is a subclass of Tensor, which knows no such operator: run refuses it as it does the others.
    torch.library.register_torch_dispatch(
        f"flashlab::{name}", NestedTensor, lambda cls, func, types, args, kwargs: run(*args, **kwargs), lib=_LIBRARY
    )
    torch.library.register_fake(f"flashlab::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.flashlab, name).default
    torch.library.register_vmap(f"flashlab::{name}", vmap or _each_alone(overload), lib=_LIBRARY)
    return overload


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any], jvp: Callable[..., Any]) -> Any:
    """A class of torch.autograd.Function with these methods."""
    methods = {"forward": forward, "backward": backward, "jvp": jvp}
    return type(f"flashlab::{name}", (torch.autograd.Function,), {key: staticmethod(f) for key, f in methods.items()})


def once(who: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for the backward of an autograd.Function, which is computed without a graph.

    PyTorch's once_differentiable gives gradients that look like constants where grad_o is one, as that of a sum: a
    penalty on them would be lost without a word. Here they have a derivative, which raises NotImplementedError.
    """
    refused = _function(
        who, lambda ctx, witness, *found: found, _no_second(who, instead), no_forward_mode(who, instead)
    )

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        def first(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            return refused.apply(torch.empty(0, requires_grad=True), *found) if torch.is_grad_enabled() else found

        return first

    return decorate


def no_forward_mode(who: str, instead: str) -> Callable[..., NoReturn]:
    """The jvp of an autograd.Function that has none."""
    return _refused(f"{who} has no forward-mode derivative (jvp, jacfwd, hessian, a dual tensor): {instead}")


def _no_second(who: str, instead: str) -> Callable[..., NoReturn]:
    return _refused(f"{who} has no second derivative (of a gradient penalty, jacrev of jacrev): {instead}")


def _refused(sentence: str) -> Callable[..., NoReturn]:
    def refuse(ctx: Any, *given: Any) -> NoReturn:
        raise NotImplementedError(sentence)

    return refuse


def _below_autograd(overload: Any, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():  # the next level's derivatives are on again
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _each_alone(overload: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *inputs: Any) -> Any:
        found = [
            overload(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(x) for x in zip(*found, strict=True)), (0,) * len(found[0])

    return rule
