"""The emulated GPU's global memory: copies of the caller's arrays, with gaps between that no one may touch.

A pointer that runs past the end of one array must not land in the next, as it would where the host's
allocator put them side by side. Each array's copy starts on a 256-byte boundary, as on a GPU, plus the offset
that the caller's view has in its storage: counts of sectors then do not depend on where the host happened to
allocate.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_GAP = 64 << 20  # of addresses, not of memory
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_NONE, _MAP_NORESERVE = 0, 0x4000


@dataclass(frozen=True)
class View:
    """An array as the emulator sees it: the bytes from its first element to its last, gaps included."""

    address: int
    bytes: int
    offset: int  # of the address in its storage
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    writable: bool


def view(array: Any) -> View | None:
    """The memory of a numpy array or a CPU tensor; None for anything else.

    Raises:
        TypeError: a tensor that is not on the CPU, or an array whose strides run backwards.
    """
    if isinstance(array, np.ndarray):
        if any(s < 0 for s in array.strides):
            raise TypeError("an array with negative strides cannot be passed to a kernel: copy it first")
        extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        address = array.ctypes.data
        extent = extent if array.size else 0
        offset = address - root.ctypes.data
        name, writable = array.dtype.name, array.flags.writeable
        return View(address, extent, offset, name, array.shape, array.itemsize, writable)
    if hasattr(array, "data_ptr") and hasattr(array, "untyped_storage"):
        if array.device.type != "cpu":
            raise TypeError(f"the emulator runs on CPU tensors, and this one is on {array.device}: pass tensor.cpu()")
        array = array.detach()
        size = array.element_size()
        extent = (sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True)) + 1) * size
        return View(array.data_ptr(), extent if array.numel() else 0, array.storage_offset() * size,
                    str(array.dtype).removeprefix("torch."), tuple(array.shape), size, True)  # fmt: skip
    return None


class GlobalMemory:
    """Copies of some arrays in one mapping; a context manager.

    Arrays that overlap in the caller's memory overlap here in the same way.
    """

    def __init__(self, views: list[View]):
        spans = sorted({(v.address, v.address + v.bytes, v.offset) for v in views if v.bytes})
        merged: list[list[int]] = []
        for low, high, offset in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high, offset])
        self._spans: list[tuple[int, int, int]] = []  # host low, host high, emulated address of low
        layout, at = [], _GAP
        for low, high, offset in merged:
            # The end lies just below a gap, as near as the alignment allows: a fast build has no other check.
            start = offset % 256
            room = -(-(start + high - low) // 256) * 256
            pages = -(-room // _PAGE) * _PAGE
            layout.append((low, high, at + pages - room + start, at, pages))
            at += pages + _GAP
        self._bytes = at
        base = _libc.mmap(None, at, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if base is None or base == ctypes.c_void_p(-1).value:
            raise MemoryError(f"no {at} bytes for the emulated global memory")
        self._base = base
        for low, high, where, page, pages in layout:
            _libc.mprotect(base + page, pages, mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.memset(base + page, 0xFF, pages)
            ctypes.memmove(base + where, low, high - low)
            self._spans.append((low, high, base + where))

    def address(self, v: View) -> int:
        """Where the copy of this view begins."""
        for low, high, where in self._spans:
            if low <= v.address < high:
                return where + v.address - low
        return self._base + _GAP // 2  # an empty array: somewhere that may not be touched

    def copy_back(self, v: View) -> None:
        """Brings what a kernel wrote to the caller's array."""
        if v.bytes:
            ctypes.memmove(v.address, self.address(v), v.bytes)

    def __enter__(self) -> GlobalMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        _libc.munmap(self._base, self._bytes)
