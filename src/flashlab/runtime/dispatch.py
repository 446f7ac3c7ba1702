"""A function with a gradient past PyTorch's dispatcher, where nothing but autograd would look at the call.

An operator (torch.library) can be traced, batched, and intercepted. Each call pays for that in Python: some 0.2 ms more
than the same functions in an autograd.Function, on a machine on which the kernels of a short sequence take 0.05 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["plain_function", "unwatched"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def unwatched(*tensors: torch.Tensor) -> bool:
    """Whether only autograd looks at a call with these tensors.

    Not so under torch.compile, torch.func, torch.jit.trace and a TorchDispatchMode (which counts FLOPs, or computes
    shapes alone), nor for a subclass of Tensor, or a tensor without memory.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
        or any(type(x) not in _PLAIN_TYPES or x.is_meta for x in tensors)
    )


def plain_function(
    name: str, forward: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """forward as an autograd.Function, from what torch.library.custom_op and register_autograd take.

    name: what the profiler calls it.
    """

    def forward_and_keep(ctx, *inputs):  # a setup_context of its own costs a look at forward's signature in each call
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward_and_keep), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    return function.apply
