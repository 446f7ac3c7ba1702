"""Descriptors of wgmma operands, and where the numbers lie, from the PTX ISA's canonical layouts.

A layout is a shape and strides of the same nesting, and a swizzle of the byte address ("Strides", "Shared memory matrix
layout" in the PTX ISA; the same in the notation of CuTe). Nothing here looks at the address bits of a descriptor as the
emulator does: the shape is walked, number by number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

WIDTH = {0: 1, 1: 8, 2: 4, 3: 2}  # swizzle (none, 128, 64, 32 bytes) -> 16-byte pieces in a row of it
T = 8  # 16-bit numbers in 16 bytes
BYTES = 32 * 1024  # of the image that the descriptors look at


def descriptor(start: int, swizzle: int, leading: int, stride: int, base: int = 0) -> int:
    """The 64 bits; bytes throughout."""
    fields = ((start, 0), (leading, 16), (stride, 32))
    return sum(((value & 0x3FFFF) >> 4) << at for value, at in fields) | (base & 7) << 49 | swizzle << 62


def _walk(shape, strides, index: int) -> tuple[int, int]:
    """The offset of the index-th element of a nested shape (first mode fastest), and how many elements there are."""
    if isinstance(shape, int):
        return index % shape * strides, shape
    offset, size = 0, 1
    for part, stride in zip(shape, strides, strict=True):
        o, n = _walk(part, stride, index // size)
        offset, size = offset + o, size * n
    return offset, size


def k_major(swizzle: int, leading: int, stride: int) -> Callable[[int, int], int]:
    """((8, m), (T, 2)) : ((W T, SBO), (1, T)), and (1, LBO) without a swizzle. Bytes of (row, k)."""
    w = WIDTH[swizzle]
    rows, ks = ((8, 32), (w * T, stride // 2)), ((T, 2), (1, T if swizzle else leading // 2))
    return lambda row, k: 2 * (_walk(*rows, row)[0] + _walk(*ks, k)[0])


def mn_major(swizzle: int, leading: int, stride: int) -> Callable[[int, int], int]:
    """((T, W, m), (8, 2)) : ((1, T, LBO), (W T, SBO)), and ((1, T, SBO), (T, LBO)) without a swizzle."""
    w = WIDTH[swizzle]
    far, deep = (leading, stride) if swizzle else (stride, leading)
    rows, ks = ((T, w, 32), (1, T, far // 2)), ((8, 2), (w * T, deep // 2))
    return lambda row, k: 2 * (_walk(*rows, row)[0] + _walk(*ks, k)[0])


def image() -> tuple[np.ndarray, np.ndarray]:
    """Two images, whose float16 values together say which word is meant: its number modulo 2048, and divided by it."""
    number = np.arange(BYTES // 2)
    return (number % 2048).astype(np.float16), (number // 2048).astype(np.float16)


def cases() -> list[tuple[int, int, int, int, int]]:
    """Start, swizzle, leading and stride bytes, base: sensible ones, and those that make no sense."""
    rng = np.random.default_rng(0)
    found = []
    for swizzle, w in WIDTH.items():
        row = 16 * w
        for start in (0, 32, 64, 16, 1024, 128, 2048 + 272):
            for leading in (16, 128, 8 * row):
                for stride in (8 * row, 256, 1024, 0, 48):
                    found.append((start, swizzle, leading, stride, 0))
        for base in range(8):
            found.append((base * 128, swizzle, 16, 8 * row, base))
            found.append((512, swizzle, 1024, 8 * row, base))
    for _ in range(60):
        start, leading, stride = (int(x) * 16 for x in rng.integers(0, (256, 80, 80)))
        found.append((start, int(rng.integers(4)), leading, stride, int(rng.integers(8))))
    return found
