"""What TMA does, written from the text of the PTX ISA and of cuTensorMapEncodeTiled, element by element in numpy.

Nothing here is shared with the emulator. Dimension 0 is the innermost, as in a tensor map.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

SWIZZLES = {0: 1, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> bytes of a row that is permuted


@dataclass(frozen=True)
class Box:
    """A tensor in an array of bytes, and one box of it.

    Attributes:
        item: bytes of an element.
        sizes: of the tensor, in elements.
        strides: bytes from one element to the next in dimensions 1, 2 ...
        spans: of the box, in elements of the tensor.
        every: the element strides; dimension 0's is ignored.
        corner: coordinates of the box's first element.
        swizzle: CUtensorMapSwizzle.
    """

    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    spans: tuple[int, ...]
    every: tuple[int, ...]
    corner: tuple[int, ...]
    swizzle: int

    @property
    def counts(self) -> list[int]:
        """Elements of the box in each dimension: ceil(span / element stride)."""
        steps = (1, *self.every[1:])
        return [-(-span // step) for span, step in zip(self.spans, steps, strict=True)]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.counts)) * self.item

    def elements(self, address: int):
        """Of each element of the box: its address in shared memory, and its offset in the tensor (None outside)."""
        steps = (1, *self.every[1:])
        for number, index in enumerate(itertools.product(*[range(n) for n in reversed(self.counts)])):
            at = [c + i * step for c, i, step in zip(self.corner, reversed(index), steps, strict=True)]
            inside = all(0 <= a < size for a, size in zip(at, self.sizes, strict=True))
            offset = at[0] * self.item + sum(a * s for a, s in zip(at[1:], self.strides, strict=True))
            yield self.swizzled(address + number * self.item), offset if inside else None

    def swizzled(self, address: int) -> int:
        """The 16-byte chunk's number within the row is xored with the number of the row's 128-byte line."""
        chunks = SWIZZLES[self.swizzle] // 16
        if not chunks:
            return address
        chunk, line = address // 16 % chunks, address // 128 % chunks
        return address + (chunk ^ line) * 16 - chunk * 16

    def load(self, memory: np.ndarray, address: int) -> np.ndarray:
        """The bytes of shared memory from `address` on."""
        shared = np.zeros(self.bytes, np.uint8)
        for to, offset in self.elements(address):
            if offset is not None:
                shared[to - address : to - address + self.item] = memory[offset : offset + self.item]
        return shared

    def store(self, shared: np.ndarray, address: int, memory: np.ndarray) -> None:
        """Writes what lies in shared memory from `address` on into the tensor's bytes."""
        for at, offset in self.elements(address):
            if offset is not None:
                memory[offset : offset + self.item] = shared[at - address : at - address + self.item]
