"""Triton kernels run on numpy arrays, some fifty times faster than interpreted: for thousands of changes of one text.

`Model` stands in the place of `triton.language` in a kernel's names: one program after the other, 32-bit integers that
wrap, float32 operands of `dot` as TF32 unless it says "ieee", and NaN where a load has a mask and no `other`. An access
to an element that a tensor does not have raises the sentence that the watched interpreter raises. What is not here
raises AttributeError; float16 and float32 alone, no bfloat16.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashlab.triton_tools.repairs import truncate_to_tf32
from flashlab.triton_tools.watch import OutOfBounds, Window

_MOST = 2**20  # elements of a tile


class Tile(np.ndarray):
    """An array with Triton's methods; a number is a tile without axes."""

    def to(self, dtype: Any, **_: Any) -> Any:
        return self.astype(dtype)

    def __floordiv__(self, other: Any) -> Any:  # as C does: towards 0
        return np.floor_divide(self - np.fmod(self, other), other)

    def __mod__(self, other: Any) -> Any:
        return np.fmod(self, other)


def _as_triton_promotes(name: str) -> Callable[[Any, Any], Any]:
    """An operator: of a float and a whole number the float's dtype; float32 of Python's, and of a quotient of two."""
    plain, divides = getattr(np.ndarray, name), "truediv" in name

    def operator(self: Any, other: Any) -> Any:
        kind = self.dtype.kind
        if isinstance(other, np.ndarray):
            theirs = other.dtype.kind
            if theirs != kind:
                if kind == "f":
                    other = other.astype(self.dtype)
                elif theirs == "f":
                    self, kind = self.astype(other.dtype), theirs
        elif kind in "iu" and isinstance(other, float):
            self, kind = self.astype(np.float32), "f"
        result = plain(self, other)
        return result.astype(np.float32) if divides and kind in "iu" else result

    return operator


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Tile, f"__{_name}__", _as_triton_promotes(f"__{_name}__"))
    setattr(Tile, f"__r{_name}__", _as_triton_promotes(f"__r{_name}__"))


def _tile(x: Any, dtype: Any = None) -> Any:
    return np.asarray(x, dtype).view(Tile)


class Buffer:
    """A tensor's memory: `data` is all of its storage, `where` says at which place each element is."""

    def __init__(self, name: str, index: int, x: torch.Tensor, written: bool):
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).cpu()
        self.name, self.first, self.written = name, int(x.storage_offset()), written
        self.data = flat.numpy().copy() if written else flat.numpy()
        places = torch.arange(len(flat)).as_strided(x.shape, x.stride(), self.first)
        self.where = places.numpy()
        self.exists = np.zeros(len(flat), bool)
        self.exists[self.where] = True
        self.window = Window(index, name, 0, x.element_size(), tuple(x.shape), x.stride())

    def result(self) -> torch.Tensor:
        return torch.from_numpy(self.data[self.where])


class Pointer:
    """Addresses into one buffer, as numbers of elements from the tensor's first."""

    def __init__(self, buffer: Buffer, at: Any):
        self.buffer, self.at = buffer, at

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.buffer.data.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.buffer, np.add(self.at, offsets, dtype=np.int64))

    def __sub__(self, offsets: Any) -> "Pointer":
        return Pointer(self.buffer, np.subtract(self.at, offsets, dtype=np.int64))

    __radd__ = __add__

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.buffer, self.at[key])

    @property
    def T(self) -> "Pointer":
        return Pointer(self.buffer, np.transpose(self.at))


def _of_single(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function, which takes Python's floats, as a launch's are, as float32."""
    return lambda x: f(np.float32(x)) if isinstance(x, float) else f(x)


class Model:
    """What a kernel calls `tl`, for one program at a time: `program` is its number along each axis."""

    float16, float32, float64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))
    int1, int8, int32, int64, uint32 = map(np.dtype, ("bool", "int8", "int32", "int64", "uint32"))
    constexpr = staticmethod(lambda x: x)
    exp, exp2, log, log2, sqrt, rsqrt, abs, floor, ceil, sin, cos = (staticmethod(_of_single(f)) for f in (
        np.exp, np.exp2, np.log, np.log2, np.sqrt, lambda x: 1 / np.sqrt(x), np.abs, np.floor, np.ceil, np.sin, np.cos)
    )  # fmt: skip
    multiple_of, max_contiguous, max_constancy = (staticmethod(lambda x, _: x),) * 3  # what a compiler may count on
    assume, debug_barrier, static_assert = (staticmethod(lambda *_: None),) * 3
    fma = staticmethod(lambda x, y, z: x * y + z)
    clamp = staticmethod(lambda x, min, max: np.fmin(np.fmax(x, min), max))
    ravel = staticmethod(np.ravel)
    maximum, minimum, trans = (staticmethod(f) for f in (np.fmax, np.fmin, np.transpose))
    range = static_range = staticmethod(range)
    zeros = staticmethod(lambda shape, dtype: np.zeros(shape, dtype).view(Tile))
    full = staticmethod(lambda shape, value, dtype: np.full(shape, value, dtype).view(Tile))
    where = staticmethod(lambda condition, a, b: _tile(np.where(condition, a, b)))
    reshape = staticmethod(lambda x, shape: np.reshape(x, shape))
    permute = staticmethod(lambda x, dims: np.transpose(x, dims))
    cdiv = staticmethod(lambda a, b: (a + b - 1) // b)
    cast = staticmethod(lambda x, dtype: _tile(x).to(dtype))
    sigmoid = staticmethod(lambda x: 1 / (1 + np.exp(-x)))
    max, min = (staticmethod(lambda x, axis=None, keep_dims=False, f=f: _tile(f(x, axis, keepdims=keep_dims)))
                for f in (np.max, np.min))  # fmt: skip
    expand_dims, broadcast_to = staticmethod(np.expand_dims), staticmethod(np.broadcast_to)

    @staticmethod
    def sum(x: Any, axis: int | None = None, keep_dims: bool = False) -> Any:
        return _tile(np.sum(x, axis, dtype=None if x.dtype != bool else np.int32, keepdims=keep_dims))

    @property
    def math(self) -> "Model":
        return self

    def __init__(self) -> None:
        self.program: tuple[int, ...] = (0, 0, 0)
        self.programs: tuple[int, ...] = (1, 1, 1)

    def program_id(self, axis: int) -> Any:
        if axis not in (0, 1, 2):
            raise ValueError("a grid has three axes")
        return _tile(self.program[axis], np.int32)

    def num_programs(self, axis: int) -> Any:
        return _tile(self.programs[axis], np.int32)

    def arange(self, begin: int, end: int) -> Any:
        if (end - begin) & (end - begin - 1) or not 0 < end - begin <= _MOST:
            raise ValueError("the length of arange is a power of 2, and not large")
        return np.arange(begin, end, dtype=np.int32).view(Tile)

    def split(self, x: Any) -> Any:
        if x.shape[-1] != 2:
            raise ValueError("the last axis of what is split has length 2")
        return x[..., 0], x[..., 1]

    def dot(self, a: Any, b: Any, acc: Any = None, input_precision: str = "tf32", **_: Any) -> Any:
        if a.dtype != b.dtype:
            raise ValueError("the operands of dot have two dtypes")
        single = a.dtype == np.float32
        a, b = (truncate_to_tf32(x) if single and input_precision == "tf32" else x.astype(np.float32) for x in (a, b))
        product = np.matmul(a, b)
        if acc is not None and (acc.shape != product.shape or acc.dtype != product.dtype):
            raise ValueError("the sum so far is of another shape or dtype")
        return product.view(Tile) if acc is None else (product + acc).astype(acc.dtype)

    # ---- memory

    def _places(self, pointer: Pointer, mask: Any, doing: str) -> tuple[Any, Any]:
        """Where in the storage each element lies, those that the mask leaves out anywhere; and the mask."""
        buffer = pointer.buffer
        at = np.asarray(np.add(pointer.at, buffer.first, dtype=np.int64))
        if mask is not None:
            mask = np.asarray(mask) != 0
            at = np.where(mask, at, buffer.first)
        # As numbers without a sign those below 0 are the largest.
        if at.size and (at.view(np.uint64).max() >= len(buffer.exists) or not buffer.exists[at].all()):
            used = (at if mask is None else at[np.broadcast_to(mask, at.shape)]) - buffer.first
            window, itemsize = buffer.window, buffer.data.itemsize
            bad = window.missing(used.reshape(-1).astype(np.int64) * itemsize)
            if bad.any():
                raise OutOfBounds(window.outside(doing, used.reshape(-1) * itemsize, bad, self.program))
        return at, mask

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Any:
        if other is not None and mask is None:
            raise ValueError("`other` without `mask`")
        at, mask = self._places(pointer, mask, "load")
        values = pointer.buffer.data[at]
        if mask is not None:
            missing = other if other is not None else math.nan if values.dtype.kind == "f" else 0
            values = np.where(mask, values, np.asarray(missing).astype(values.dtype))
        return _tile(values)

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        at, value, data = self._stored(pointer, value, mask, "store")
        data[at] = value

    def atomic_add(self, pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        at, value, data = self._stored(pointer, value, mask, "atomic operation")
        np.add.at(data, at, value)

    def _stored(self, pointer: Pointer, value: Any, mask: Any, doing: str) -> tuple[Any, Any, Any]:
        at, mask = self._places(pointer, mask, doing)
        if not pointer.buffer.written:
            raise ValueError(f"{pointer.buffer.name} is written to: it is an input")
        value = np.broadcast_to(np.asarray(value).astype(pointer.buffer.data.dtype), at.shape)
        if mask is None:
            return at, value, pointer.buffer.data
        mask = np.broadcast_to(mask, at.shape)
        return at[mask], value[mask], pointer.buffer.data


for _name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs", "floor", "ceil", "sin", "cos"):
    setattr(Tile, _name, getattr(Model, _name))


def launch(
    kernel: Callable[..., Any],
    tl: Model,
    programs: int | Sequence[int],
    arguments: Mapping[str, Any],
    outputs: tuple[str, ...],
    constants: Collection[str] = (),
    known: dict[int, tuple[torch.Tensor, Buffer]] | None = None,
) -> dict[str, torch.Tensor]:
    """Run a function whose `tl` is this model, over a grid of so many programs, along each axis; the tensors that it
    has written.

    constants: the arguments that are `tl.constexpr`; other whole numbers have 32 bits. known: buffers of inputs, kept.
    """
    known, buffers = {} if known is None else known, {}
    for i, (name, x) in enumerate(arguments.items()):
        if isinstance(x, torch.Tensor):
            written = name in outputs
            _, buffers[name] = (x, Buffer(name, i, x, True)) if written else known.setdefault(
                id(x), known.get(id(x)) or (x, Buffer(name, i, x, False)))  # fmt: skip
    given: list[Any] = []
    for name, x in arguments.items():
        whole = isinstance(x, int) and name not in constants and abs(x) < 2**31
        pointer = Pointer(buffers[name], _tile(0, np.int64)) if name in buffers else None
        given.append(pointer if pointer is not None else _tile(x, np.int32) if whole else x)
    grid = (programs,) if isinstance(programs, int) else tuple(programs)
    x, y, z = tl.programs = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for k, j, i in itertools.product(range(z), range(y), range(x)):
            tl.program = i, j, k
            kernel(*given)
    return {name: buffers[name].result() for name in outputs}
