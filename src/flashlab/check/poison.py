"""Memory that gives itself away: inputs surrounded by NaN, and fresh output that carries a mark until it is written.

A kernel that reads past the end of K finds NaN there, not a friendly zero; one that forgets a row of its output leaves
the mark in it. The mark is a NaN with a payload of our own: arithmetic makes other NaN, so a row that
was computed wrongly is told from a row that was never written.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

GUARD_ROWS = 256  # rows of NaN before and after each tensor, more than any tile reaches over the end

# The same ten leading mantissa bits in every format, so that a conversion of unwritten memory keeps the mark.
_MARK = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FCB),
    torch.float32: (torch.int32, 0x7FCB4000),
    torch.float64: (torch.int64, 0x7FF9680000000000),
}

_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


def mark_unwritten(x: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point tensor with the mark of unwritten memory, in place."""
    if x.dtype in _MARK and x.numel():
        integer, bits = _MARK[x.dtype]
        x.view(integer).fill_(bits)
    return x


def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Boolean, the shape of `x`: True where an element still carries the mark."""
    if x.dtype not in _MARK:
        return torch.zeros_like(x, dtype=torch.bool)
    integer, bits = _MARK[x.dtype]
    return x.contiguous().view(integer) == bits


class MarkedEmpty(TorchFunctionMode):
    """While active, `torch.empty` and its kin return memory that carries the mark instead of old zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(result, torch.Tensor):
            mark_unwritten(result)
        return result


def guarded(x: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    """A copy of `x` [batch, heads, seq_len, head_dim] on `device`, as a view of a larger buffer filled with NaN.

    layout "contiguous": dense, with NaN before and after the whole tensor. "by token": memory order [batch, seq_len,
    heads, head_dim], as a projection layer leaves it. "spaced": NaN rows between one head and the next. "rows apart":
    each row followed by as much NaN, as in a buffer that holds several tensors side by side. "by columns": transposed,
    the elements of a column side by side.
    """
    batch, heads, rows, dim = x.shape
    if layout == "contiguous":
        guard = GUARD_ROWS * dim
        flat = torch.full((2 * guard + x.numel(),), float("nan"), dtype=x.dtype, device=device)
        view = flat[guard : guard + x.numel()].view(x.shape)
    elif layout == "by token":
        buffer = torch.full((batch, rows + GUARD_ROWS, heads, dim), float("nan"), dtype=x.dtype, device=device)
        view = buffer[:, :rows].transpose(1, 2)
    elif layout == "spaced":
        shape = (batch, heads, rows + GUARD_ROWS, dim)
        view = torch.full(shape, float("nan"), dtype=x.dtype, device=device)[:, :, :rows]
    elif layout == "rows apart":
        shape = (batch, heads, rows + GUARD_ROWS, 2 * dim)
        view = torch.full(shape, float("nan"), dtype=x.dtype, device=device)[:, :, :rows, :dim]
    elif layout == "by columns":
        shape = (batch, heads, dim, rows + GUARD_ROWS)
        view = torch.full(shape, float("nan"), dtype=x.dtype, device=device)[..., :rows].mT
    else:
        raise ValueError(f"layout is contiguous, by token, spaced, rows apart or by columns, not {layout!r}")
    view.copy_(x)
    return view


def carried(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy of `x` on a device, with its strides and what lies between its rows: `x.to` would lay it out anew."""
    if x.is_contiguous():
        return x.to(device, copy=True)
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return storage.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def memory(x: torch.Tensor) -> torch.Tensor:
    """A copy of all the bytes behind `x`, guard included, to tell later whether anything was written there."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()
