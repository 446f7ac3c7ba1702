"""The emulated GPU's global memory: copies of the caller's arrays, with gaps between that no one may touch.

A pointer that runs past the end of one array must not land in the next, as it would where the host's
allocator put them side by side. Each array's copy starts on a 256-byte boundary, as on a GPU, plus the offset
that the caller's view has in its storage: counts of sectors then do not depend on where the host happened to
allocate. The copies lie in a file in memory, which the emulator's process maps too (process.py).
"""

import ctypes
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_GAP = 64 << 20  # of addresses, not of memory
_SPARSE = 1 << 30  # bytes from which on a piece is copied without its gaps: they may be more than there is memory


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
    strides: tuple[int, ...] = ()  # in bytes; of a structure there are none

    def runs(self) -> list[tuple[int, int]]:
        """(start, bytes) of what lies together, from the first element on."""
        dense, whole = self.itemsize, list(zip(self.shape, self.strides, strict=False))
        while whole and whole[-1][1] == dense:
            dense *= whole.pop()[0]
        starts = np.zeros(1, np.int64)
        for n, stride in whole:
            starts = (starts[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
        return [(int(start), dense) for start in starts]


def view(array: Any) -> View | None:
    """The memory of a numpy array, a CPU tensor or a ctypes structure; None for anything else.

    Raises:
        TypeError: memory that a kernel cannot work on: of another device, with strides that run backwards, of Python
            objects, in another byte order, sparse.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject or not array.dtype.isnative:
            raise TypeError(f"an array of {array.dtype} cannot be passed to a kernel: it takes plain numbers")
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
        return View(address, extent, offset, name, array.shape, array.itemsize, writable, array.strides)
    if hasattr(array, "data_ptr") and hasattr(array, "untyped_storage"):
        if array.device.type != "cpu":
            raise TypeError(f"the emulator runs on CPU tensors, and this one is on {array.device}: pass tensor.cpu()")
        if "strided" not in str(array.layout) or array.is_quantized:
            raise TypeError(f"a tensor of layout {array.layout} cannot be passed to a kernel: pass a dense one")
        if array.is_neg() or array.is_conj():
            raise TypeError(
                "a negated or conjugated view cannot be passed to a kernel, as its memory holds the other values: pass "
                "tensor.resolve_neg().resolve_conj()"
            )
        array = array.detach()
        size = array.element_size()
        extent = (sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True)) + 1) * size
        return View(array.data_ptr(), extent if array.numel() else 0, array.storage_offset() * size,
                    str(array.dtype).removeprefix("torch."), tuple(array.shape), size, True,
                    tuple(s * size for s in array.stride()))  # fmt: skip
    if isinstance(array, ctypes.Structure | ctypes.Array):
        size = ctypes.sizeof(array)
        return View(ctypes.addressof(array), size, 0, "struct", (), size, True)
    return None


@dataclass(frozen=True)
class _Piece:
    low: int  # the caller's bytes from here
    high: int  # to here
    start: int  # where `low` is in the piece
    file: int  # where the piece is in the file
    at: int  # and in the emulated memory
    pages: int  # its bytes


class GlobalMemory:
    """Copies of some arrays in a file, whose first page is for the process to say how far it is; a context manager.

    Arrays that overlap in the caller's memory overlap here in the same way. Addresses are relative to where the
    emulator's process puts the memory: so many `bytes` of them, and `pieces`: (place in the file, bytes, address).
    """

    def __init__(self, views: list[View]):
        spans = sorted({(v.address, v.address + v.bytes, v.offset) for v in views if v.bytes})
        merged: list[list[int]] = []
        for low, high, offset in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high, offset])
        self._pieces: list[_Piece] = []
        at, file = _GAP, _PAGE
        for low, high, offset in merged:
            # The end lies just below a gap, as near as the alignment allows: a fast build has no other check.
            start = offset % 256
            room = -(-(start + high - low) // 256) * 256
            pages = -(-room // _PAGE) * _PAGE
            self._pieces.append(_Piece(low, high, pages - room + start, file, at, pages))
            at, file = at + pages + _GAP, file + pages
        self.bytes = at
        self.pieces = [(p.file, p.pages, p.at) for p in self._pieces]
        self.file, self._mapped = _memory_file(file)
        self._base = base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        for p in self._pieces:
            ctypes.memset(base + p.file, 0xFF, p.start)
            mine = [v for v in views if v.bytes and p.low <= v.address < p.high]
            if p.high - p.low < _SPARSE or not all(v.strides for v in mine):
                ctypes.memmove(base + p.file + p.start, p.low, p.high - p.low)
            for v in mine if p.high - p.low >= _SPARSE else ():
                for start, count in v.runs() if v.strides else ():
                    ctypes.memmove(base + p.file + p.start + v.address - p.low + start, v.address + start, count)
            end = p.start + p.high - p.low
            ctypes.memset(base + p.file + end, 0xFF, p.pages - end)

    def _piece(self, v: View) -> _Piece | None:
        return next((p for p in self._pieces if p.low <= v.address < p.high), None) if v.bytes else None

    def address(self, v: View) -> int:
        """Where the copy of this view begins."""
        p = self._piece(v)
        if p is None:
            return _GAP // 2  # an empty array: somewhere that may not be touched
        return p.at + p.start + v.address - p.low

    def copy_back(self, v: View) -> None:
        """Brings what a kernel wrote to the caller's array."""
        p = self._piece(v)
        if p is not None:
            for start, count in v.runs() if v.bytes >= _SPARSE and v.strides else [(0, v.bytes)]:
                ctypes.memmove(v.address + start, self._base + p.file + p.start + v.address - p.low + start, count)

    @property
    def progress(self) -> tuple[int, int, int, str]:
        """Of the call that runs: launches begun; blocks of the last, and how many are done; its kernel."""
        page = self._mapped[: 24 + 128]
        return (*struct.unpack_from("QQQ", page), page[24:].partition(b"\0")[0].decode(errors="replace"))

    def __enter__(self) -> "GlobalMemory":
        return self

    def __exit__(self, *exception: object) -> None:
        self._mapped.close()
        os.close(self.file)


def _memory_file(size: int) -> tuple[int, mmap.mmap]:
    try:
        file = os.memfd_create("flashlab", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # forbidden here
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.ftruncate(file, size)
        return file, mmap.mmap(file, size)
    except OSError as error:
        os.close(file)
        raise MemoryError(f"no {size} bytes for the emulated global memory: {error}") from None
