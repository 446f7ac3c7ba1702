"""What an extern "C" function is called with, checked against its signature before anything is launched."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from flashlab.simt.source import DTYPES, Entry, Parameter, is_stream, to_number


def checked(entry: Entry, given: Sequence[Any]) -> list[Any]:
    """A value for each parameter: a tensor, an address, a structure or None for a pointer, a number for the rest.

    The stream may be left out of ``given``. Its value is None: it is PyTorch's current one.

    Raises:
        TypeError: an argument does not fit the signature.
        ValueError: a tensor that is not contiguous, on another device than the first, or a lazily negated one that the
            function writes; a number that its parameter's type does not hold.
    """
    wanted = [p for p in entry.parameters if not is_stream(p)]
    if len(given) == len(entry.parameters):
        given = [x for p, x in zip(entry.parameters, given, strict=True) if not is_stream(p)]
    if len(given) != len(wanted):
        names = ", ".join(p.name for p in wanted)
        raise TypeError(f"{entry.name} takes {len(wanted)} arguments ({names}), not {len(given)}")
    values = {p.name: _value(entry.name, p, x) for p, x in zip(wanted, given, strict=True)}
    tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
    for first in list(tensors)[:1]:
        for name, x in tensors.items():
            if x.device != tensors[first].device:
                raise ValueError(f"{entry.name}: {name} is on {x.device}, and {first} is on {tensors[first].device}")
    return [None if is_stream(p) else values[p.name] for p in entry.parameters]


def gpu(entry: Entry, values: Sequence[Any]) -> int:
    """The number of the GPU that the tensors among the values are on; the current one where there are none.

    Raises:
        ValueError: they are on the CPU.
    """
    for p, x in zip(entry.parameters, values, strict=True):
        if isinstance(x, torch.Tensor):
            if x.device.type != "cuda":
                where = f"{p.name} is on {x.device}, and the kernel runs on a GPU"
                raise ValueError(f"{entry.name}: {where}: pass {p.name}.cuda()")
            return x.device.index
    return torch.cuda.current_device()


def _value(entry: str, p: Parameter, x: Any) -> Any:
    if p.kind != "pointer":
        if isinstance(x, torch.Tensor) and x.numel() != 1:
            raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got a tensor of shape {tuple(x.shape)}")
        return to_number(entry, p, x)
    if x is None or isinstance(x, ctypes.Structure) or (isinstance(x, int) and not isinstance(x, bool)):
        if isinstance(x, int) and not 0 <= x < 2**64:
            raise ValueError(f"{entry}: {p.name} is a pointer, and {x} is no address")
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{entry}: {p.name} is a pointer: pass a tensor or None, not {type(x).__name__}")
    allowed = DTYPES.get(p.element)
    if allowed and str(x.dtype).removeprefix("torch.") not in allowed:
        raise TypeError(f"{entry}: {p.name} points to {p.element}, and got a tensor of {x.dtype}")
    if x.is_neg() or x.is_conj():  # its memory holds other numbers
        if not p.const:
            resolved = f"{p.name}.resolve_conj().resolve_neg()"
            raise ValueError(f"{entry}: {p.name} is a view that PyTorch negates or conjugates: pass {resolved}")
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous() and p.element != "void":
        raise ValueError(f"{entry}: {p.name} has strides {x.stride()}: pass {p.name}.contiguous()")
    return x.detach()
