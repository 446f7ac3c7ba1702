"""Bounds checks and memory counters for interpreted Triton kernels.

- ``watched()`` stops a kernel that reads or writes outside its tensors, which the interpreter would do silently, and
  counts the bytes that the kernel moves between HBM (global memory) and the chip.
- ``hbm_traffic(fn, ...)`` counts on a GPU machine as well, in a child process that interprets.
"""

import contextlib
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import triton.runtime.interpreter as ti
from torch.utils._pytree import tree_map

from flashlab import runtime
from flashlab.triton_tools.portable import importable_as, module_source

SECTOR_BYTES = 32  # HBM and L2 move whole sectors of this size, aligned to it


class OutOfBounds(IndexError):
    """A kernel read or wrote an element that its tensor does not have; the access was not carried out.

    stack: the calls that led to it, the innermost last.
    """

    stack: Sequence[traceback.FrameSummary] = ()


@dataclass
class Traffic:
    """What kernels moved between global memory and the chip, with no cache in between.

    bytes_read, bytes_written   bytes of the elements loaded and stored; masked-off elements do not count
    loads, stores               tile-wide operations executed (a ``tl.load`` counts once a program and iteration);
                                an atomic counts as both
    sectors                     32-byte sectors touched, each operation for itself: what DRAM really moves. Scattered
                                elements touch more sectors than ``(bytes_read + bytes_written) / 32``
    read_from, written_to       bytes by tensor: the name given to ``watched``, else the kernel's parameter
    undefined                   tensors of which masked-off elements were loaded without ``other``: their value is
                                undefined on a GPU, and NaN here
    """

    bytes_read: int = 0
    bytes_written: int = 0
    loads: int = 0
    stores: int = 0
    sectors: int = 0
    read_from: Counter = field(default_factory=Counter)
    written_to: Counter = field(default_factory=Counter)
    undefined: set = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def _count(self, name: str, read: bool, size: int, sectors: int) -> None:
        if read:
            self.loads, self.bytes_read = self.loads + 1, self.bytes_read + size
            self.read_from[name] += size
        else:
            self.stores, self.bytes_written = self.stores + 1, self.bytes_written + size
            self.written_to[name] += size
        self.sectors += sectors

    def __repr__(self) -> str:
        return (
            f"{self.bytes_read:,} bytes read by {self.loads:,} loads, "
            f"{self.bytes_written:,} bytes written by {self.stores:,} stores, {self.sectors:,} sectors"
        )


@dataclass
class Window:
    """A launch's tensor argument, and the range of made-up addresses that stands for it."""

    index: int
    name: str
    data_ptr: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def address(self) -> int:
        return _FLAG + (self.index << _WINDOW_BITS) + (1 << (_WINDOW_BITS - 1)) + self.data_ptr % 4096

    def missing(self, offsets: np.ndarray) -> np.ndarray:
        """Which byte offsets from the first element are no element of the tensor."""
        bad = offsets % self.itemsize != 0
        rest = offsets // self.itemsize
        bad |= rest < 0
        dims = sorted(
            (d for d in range(len(self.shape)) if self.shape[d] > 1 and self.strides[d]), key=self.strides.__getitem__
        )
        if 0 in self.shape:
            return np.ones_like(bad)
        if self._overlaps(dims):
            last = sum((self.shape[d] - 1) * self.strides[d] for d in dims)
            return bad | (rest > last)
        for d in reversed(dims):
            bad |= rest // self.strides[d] >= self.shape[d]
            rest = rest % self.strides[d]
        return bad | (rest != 0)

    def _overlaps(self, dims: list[int]) -> bool:
        reach = 0
        for d in dims:
            if self.strides[d] <= reach:
                return True
            reach += (self.shape[d] - 1) * self.strides[d]
        return False

    def outside(self, doing: str, offsets: np.ndarray, bad: np.ndarray, grid: tuple[int, ...]) -> str:
        """What is said of an access to these byte offsets, of which some are `bad`."""
        return (
            f"{doing} out of bounds: {self.place(int(offsets[bad][0]))} of {self.name}, which has shape "
            f"{list(self.shape)}; program {grid}, {int(bad.sum())} of {offsets.size} elements outside"
        )

    def place(self, offset: int) -> str:
        """Where a byte offset points, in the tensor's own indices."""
        element, rest = divmod(offset, self.itemsize)
        if element < 0:
            return f"{-element} elements before the first"
        index = [0] * len(self.shape)
        for d in sorted(
            (d for d in range(len(self.shape)) if self.strides[d]), key=self.strides.__getitem__, reverse=True
        ):
            index[d], element = divmod(element, self.strides[d])
        if element:
            return f"{element} elements beyond [{', '.join(map(str, index))}], between two elements"
        return f"element [{', '.join(map(str, index))}]" + (f" and {rest} bytes" if rest else "")


_FLAG = 1 << 62  # no address of this machine has this bit
_WINDOW_BITS = 40


class WatchedMemory:
    """Stands before the interpreter's memory operations.

    While something is watched, a launch's tensors get made-up addresses, each in a window of its own, 1 TiB wide. So
    every pointer says which argument it was computed from, and running over the end of K cannot pass for reading V.
    """

    watchers: ContextVar[tuple["_Watcher", ...]] = ContextVar("flashlab_watchers", default=())  # of this thread
    watching: tuple["_Watcher", ...] = ()  # the launch under way
    windows: list[Window] = []
    no_other = False  # the load under way has a mask, but says nothing about what it leaves out

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    @classmethod
    @contextlib.contextmanager
    def launch(cls, executor, args, kwargs):
        watching = cls.watchers.get()
        if not watching:
            yield
            return
        known = inspect.signature(executor.fn).parameters
        bound = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in known})
        queue = iter([pair for name, value in bound.items() for pair in _tensors_in(name, value)])
        original = ti._implicit_cvt

        def convert(arg):
            converted = original(arg)
            tensor = getattr(arg, "base", arg)
            if isinstance(tensor, torch.Tensor) and hasattr(arg, "data_ptr"):
                name, given = next(queue, ("a tensor", tensor))
                converted.handle.data = np.array([cls.window(name, given, tensor).address], dtype=np.uint64)
            return converted

        ti._implicit_cvt = convert
        before = cls.windows, cls.watching
        cls.windows, cls.watching = [], watching
        try:
            yield
        finally:
            ti._implicit_cvt = original
            cls.windows, cls.watching = before

    @classmethod
    def window(cls, parameter: str, given: torch.Tensor, tensor: torch.Tensor) -> Window:
        """given: the caller's tensor; tensor: the interpreter's view of it, another one if it came from a GPU."""
        name = parameter
        for watcher in reversed(cls.watching):
            name = watcher.names.get((given.data_ptr(), str(given.device)), name)
        window = Window(
            len(cls.windows), name, tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()
        )
        cls.windows.append(window)
        return window

    def _resolve(self, pointers, mask, read: bool, write: bool):
        """Real addresses for made-up ones; raises OutOfBounds before anything is touched."""
        if not self.watching:
            return pointers
        # A mask of a tile & a scalar comes as integers, with which numpy would index instead of choose.
        active = np.broadcast_to(np.asarray(mask, bool), pointers.shape)
        real = pointers.copy()
        used = pointers[active]
        doing = "load" if read and not write else "store" if not read else "atomic operation"
        if np.any(used < _FLAG):
            raise OutOfBounds(f"{doing} through an address that was not computed from a tensor argument")
        for number in np.unique((used - np.uint64(_FLAG)) >> np.uint64(_WINDOW_BITS)):
            if number >= len(self.windows):
                raise OutOfBounds(f"{doing} through an address far outside of every tensor")
            window = self.windows[int(number)]
            mine = active & ((pointers - np.uint64(_FLAG)) >> np.uint64(_WINDOW_BITS) == number)
            offsets = pointers[mine].astype(np.int64) - window.address
            bad = window.missing(offsets)
            if bad.any():
                grid = tuple(getattr(ti.interpreter_builder, "grid_idx", None) or ())
                raise OutOfBounds(window.outside(doing, offsets, bad, grid))
            addresses = offsets + window.data_ptr
            real[mine] = addresses.astype(np.uint64)
            size = offsets.size * window.itemsize
            sectors = np.unique(addresses // SECTOR_BYTES).size  # an aligned element lies in one sector
            for watcher in self.watching:
                for happens, is_read in ((read, True), (write, False)):
                    if happens:
                        watcher.traffic._count(window.name, is_read, size, sectors)
        return real

    def load(self, pointers, mask, other, dtype):
        left_out = ~np.broadcast_to(np.asarray(mask, bool), pointers.shape)
        if self.watching and self.no_other and left_out.any():
            numbers = np.unique((pointers[left_out] - np.uint64(_FLAG)) >> np.uint64(_WINDOW_BITS))
            for window in (self.windows[int(n)] for n in numbers if n < len(self.windows)):
                for watcher in self.watching:
                    watcher.traffic.undefined.add(window.name)
            other = undefined_like(other)
        return self._real.load(self._resolve(pointers, mask, True, False), mask, other, dtype)

    def store(self, pointers, data, mask):
        return self._real.store(self._resolve(pointers, mask, False, True), data, mask)

    def atomic_rmw(self, operation, pointers, data, mask, sem):
        return self._real.atomic_rmw(operation, self._resolve(pointers, mask, True, True), data, mask, sem)

    def atomic_cas(self, pointers, compare, data, sem):
        mask = np.ones(pointers.shape, bool)
        return self._real.atomic_cas(self._resolve(pointers, mask, True, True), compare, data, sem)


def undefined_like(zeros: np.ndarray) -> np.ndarray:
    """NaN in the place of the interpreter's zeros; bfloat16 comes as uint16, and other integers stay as they are."""
    if zeros.dtype.kind == "f":
        return np.full_like(zeros, np.nan)
    return np.full_like(zeros, 0x7FC0) if zeros.dtype == np.uint16 else zeros


def _tensors_in(name: str, value):
    """(name, tensor) for a kernel's argument: itself, a descriptor's base, or those in a tuple, in order."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", item)
    elif isinstance(tensor := getattr(value, "base", value), torch.Tensor):
        yield name, tensor


class _Watcher:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"watched() takes tensors by name; {name} is a {type(tensor).__name__}")
        self.tensors = tensors  # kept alive, so that an address keeps meaning the same tensor
        self.names = {(tensor.data_ptr(), str(tensor.device)): name for name, tensor in tensors.items()}
        self.traffic = Traffic()


@contextlib.contextmanager
def watched(**tensors: torch.Tensor):
    """Check and count the memory accesses of every kernel that this thread launches inside; yields a Traffic.

    An access to an element that a launch's tensor does not have raises OutOfBounds, and nothing is read or written.
    All tensor arguments of a launch are checked, those allocated inside too; ``tensors`` only gives names to them
    (``watched(q=q)``), where the kernel's parameter names would not say enough. Raises RuntimeError where kernels are
    compiled: there use ``hbm_traffic``.
    """
    if not runtime.INTERPRETED:
        raise RuntimeError(
            "kernels are compiled in this process, and only interpreted ones can be watched: use hbm_traffic(fn, ...), "
            "or set FLASHLAB_INTERPRET=1 before Python starts"
        )
    watcher = _Watcher(tensors)
    before = WatchedMemory.watchers.set((*WatchedMemory.watchers.get(), watcher))
    try:
        yield watcher.traffic
    finally:
        WatchedMemory.watchers.reset(before)


def hbm_traffic(fn, *args, **kwargs) -> Traffic:
    """The memory traffic of ``fn(*args, **kwargs)``, a function that launches Triton kernels, run interpreted.

    The tensors among the arguments are copied to the CPU first; the originals stay as they are. Where kernels are
    compiled in this process, a child process does it: fn must be importable, or written in a notebook cell or a file,
    and work on CPU tensors. Names in the result are fn's own parameter names where a kernel gets these tensors. Raises
    OutOfBounds as ``watched`` does; whatever else fn raises comes through (a child's as RuntimeError).
    """
    args, kwargs = tree_map(_cpu_copy, (args, kwargs))
    if not runtime.INTERPRETED:
        return _traffic_in_child(fn, args, kwargs)
    with watched(**_named_tensors(fn, args, kwargs)) as traffic:
        fn(*args, **kwargs)
    return traffic


def _cpu_copy(value):
    """A tensor's copy on the CPU with the same strides; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.detach().untyped_storage()
    copy = torch.empty(0, dtype=value.dtype)
    return copy.set_(storage.cpu().clone(), value.storage_offset(), value.shape, value.stride())


def _named_tensors(fn, args, kwargs) -> dict[str, torch.Tensor]:
    try:
        named = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _traffic_in_child(fn, args, kwargs) -> Traffic:
    with tempfile.TemporaryDirectory(prefix="flashlab-traffic-") as folder:
        if (origin := importable_as(fn)) is None:
            origin = "flashlab_launcher", fn.__name__
            Path(folder, f"{origin[0]}.py").write_text(module_source(fn), encoding="utf-8")
        try:
            torch.save((args, kwargs), Path(folder, "arguments.pt"))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TypeError(
                f"an argument of {fn.__name__} cannot be taken to the process that interprets ({error}); arguments are "
                "tensors and plain values: put the rest, a kernel for instance, into a function around the launcher"
            ) from error
        paths = [folder, *(os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path)]
        environment = os.environ | {
            "FLASHLAB_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        program = "import sys; from flashlab.triton_tools import watch; watch._child(*sys.argv[1:])"
        command = [sys.executable, "-c", program, folder, *origin]
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        result = Path(folder, "result.pt")
        if not result.exists():
            raise RuntimeError(f"the interpreting process failed: {ended.stderr.strip()[-2000:]}")
        answer = torch.load(result, weights_only=False)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _child(folder: str, module: str, name: str) -> None:
    """The child process: load the function and its arguments, run it watched, write the result."""
    fn = getattr(importlib.import_module(module), name)
    args, kwargs = torch.load(Path(folder, "arguments.pt"), weights_only=False)
    answer: Traffic | Exception
    try:
        answer = hbm_traffic(fn, *args, **kwargs)
    except OutOfBounds as error:
        answer = OutOfBounds(str(error))
    except Exception as error:
        answer = RuntimeError(f"interpreting {name} raised {type(error).__name__}: {error}")
    torch.save(answer, Path(folder, "result.pt"))
