"""Triton's interpreter, repaired, with bounds checks and memory counters.

Without a GPU, ``TRITON_INTERPRET=1`` makes Triton run a kernel's Python body once for each program, with numpy arrays
for tensors (triton/runtime/interpreter.py). It is the semantics of the language, and three things are missing:

- ``install_repairs()`` makes it agree with compiled kernels in bfloat16 (it computes on the bit patterns), in float32
  ``tl.dot`` (TF32 unless ``input_precision="ieee"``), and in maximum and minimum of NaN; makes Triton 3.6 work with
  numpy >= 2.4; keeps numpy's warnings off; and takes a quarter off its time. Importing flashlab installs them.
- ``watched()`` stops a kernel that reads or writes outside its tensors, which the interpreter would do silently, and
  counts the bytes that the kernel moves between HBM (global memory) and the chip.
- ``hbm_traffic(fn, ...)`` counts on a GPU machine as well, in a child process that interprets.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as ti
from torch.utils._pytree import tree_map
from triton._C.libtriton import ir

from flashlab import runtime
from flashlab.portable import importable_as, module_source

SECTOR_BYTES = 32
"""HBM and L2 move whole sectors of this size, aligned to it."""

# ---- bfloat16 -------------------------------------------------------------------------------------------------------


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32: the same value, since bfloat16 is float32's upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 bit patterns (uint16), to nearest, ties to even, as the hardware's cvt.rn does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)  # adding 0x7FFF could turn a NaN into inf


def _is_bf16(handle) -> bool:
    # The dtype alone is not enough: the interpreter labels a comparison's result with the operands' dtype.
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _float(handle) -> np.ndarray:
    return widen(handle.data) if _is_bf16(handle) else handle.data


def _result(data: np.ndarray, was_bf16: bool, dtype):
    if was_bf16 and data.dtype.kind == "f":
        data = narrow(data)
    return ti.TensorHandle(data, dtype)


def _truncate_to_tf32(values: np.ndarray) -> np.ndarray:
    """What the tensor cores see of a float32: they ignore the low 13 bits of the mantissa."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


class _RepairedBuilder:
    """Methods that replace those of Triton's InterpreterBuilder; ``original`` holds the replaced ones."""

    original: dict = {}

    def cast_impl(self, src, dst_type):
        source, wanted = src.dtype.scalar, dst_type.scalar
        if not _is_bf16(src) and wanted != tl.bfloat16:
            return _RepairedBuilder.original["cast_impl"](self, src, dst_type)
        values = _float(src)
        if wanted == tl.bfloat16:
            data = src.data if source == tl.bfloat16 else narrow(values.astype(np.float32))
        else:
            data = values.astype(ti._get_np_dtype(dst_type))
        return ti.TensorHandle(data, wanted)

    def binary_op(self, lhs, rhs, op):
        if not (_is_bf16(lhs) and _is_bf16(rhs)):
            return _RepairedBuilder.original["binary_op"](self, lhs, rhs, op)
        return _result(op(_float(lhs), _float(rhs)), True, lhs.dtype.scalar)

    def unary_op(self, arg, op):
        return _result(op(_float(arg)), _is_bf16(arg), arg.dtype.scalar)

    def ternary_op(self, lhs, rhs, other, op):
        if op is np.where or not _is_bf16(other):  # choosing between bit patterns is right as it is
            return _RepairedBuilder.original["ternary_op"](self, lhs, rhs, other, op)
        return _result(op(_float(lhs), _float(rhs), _float(other)), True, tl.bfloat16)

    def create_fma(self, x, y, z):
        return _result(_float(x) * _float(y) + _float(z), _is_bf16(z), z.dtype.scalar)

    def create_rsqrt(self, arg):
        return _result(1 / np.sqrt(_float(arg)), _is_bf16(arg), arg.dtype.scalar)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)  # of a number and a NaN: the number, as max.f32 does

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        kinds = (a.dtype.scalar, b.dtype.scalar)
        if not all(kind in (tl.float16, tl.bfloat16, tl.float32) for kind in kinds):
            return _RepairedBuilder.original["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)
        left, right = _float(a).astype(np.float32), _float(b).astype(np.float32)
        if kinds == (tl.float32, tl.float32) and input_precision == ir.INPUT_PRECISION.TF32:
            left, right = _truncate_to_tf32(left), _truncate_to_tf32(right)
        product = np.matmul(left, right) + _float(d)
        was_bf16 = _is_bf16(d)
        return _result(product if was_bf16 else product.astype(d.data.dtype), was_bf16, d.dtype.scalar)

    def create_atomic_rmw(self, operation, ptr, val, mask, sem, scope):
        if not _is_bf16(val):
            return _RepairedBuilder.original["create_atomic_rmw"](self, operation, ptr, val, mask, sem, scope)
        if operation != ir.ATOMIC_OP.FADD:
            raise ValueError("Triton has atomic_add for bfloat16, and no other atomic")
        # One lane after the other: two lanes may add to one address.
        before = np.zeros(ptr.data.shape, np.uint16)
        active = np.broadcast_to(mask.data, ptr.data.shape)
        for index in zip(*np.nonzero(active), strict=True):
            address, one = ptr.data[index].reshape(1), np.ones(1, bool)
            old = ti._interpreter.load(address, one, np.zeros(1, np.uint16), np.dtype(np.uint16))
            before[index] = old[0]
            new = narrow(widen(old) + widen(val.data[index].reshape(1)))
            ti._interpreter.store(address, new, one)
        return ti.TensorHandle(before, tl.bfloat16)

    def get_bf16(self, value):
        return ti.TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)


def _repair_reductions() -> None:
    """Reductions and scans that numpy does in one call see float32, and round their result."""

    def repaired(original):
        def apply_impl(self, input):
            quick = self.combine_fn in (
                tl.standard._argmin_combine_tie_break_left, tl.standard._argmax_combine_tie_break_left,
                tl.standard._elementwise_max, tl.standard._elementwise_min,
                tl.standard._sum_combine, tl.standard._prod_combine,
            )  # fmt: skip
            if not quick or not any(_is_bf16(tensor.handle) for tensor in input):
                return original(self, input)
            wide = tuple(
                self.to_tensor(widen(tensor.handle.data), tl.float32) if _is_bf16(tensor.handle) else tensor
                for tensor in input
            )
            outputs = original(self, wide)
            outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
            for output in outputs:
                if output.dtype == tl.float32:
                    output.handle = ti.TensorHandle(narrow(output.handle.data), tl.bfloat16)
                    shape = output.type.shape if output.type.is_block() else None
                    output.type = tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16
                    output.dtype = tl.bfloat16
            return outputs

        return apply_impl

    for kind in (ti.ReduceOps, ti.ScanOps):
        kind.apply_impl = repaired(kind.apply_impl)


# ---- launches -------------------------------------------------------------------------------------------------------


class _Launches:
    """Replaces pieces of the interpreter that work around a launch."""

    patched = False  # triton.language is patched for a launch that is under way

    @classmethod
    def repair(cls) -> None:
        original_call = ti.GridExecutor.__call__
        original_patch_lang, original_patch_tensor = ti._patch_lang, ti._patch_lang_tensor
        language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

        def patch_lang_tensor(tensor, scope):
            original_patch_tensor(tensor, scope)
            # Scalars are arrays of one element here. numpy >= 2.4 does not convert those with int(array), which is how
            # Triton 3.6 makes `range(0, n, BLOCK)` of a kernel argument work.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

        def patch_lang(fn):
            # Triton patches its language module again for every call of tl.max, tl.sum and the like, which takes
            # more time than the arithmetic. Once a launch, for the two modules that functions see, is enough.
            scope = ti._LangPatchScope()
            if not cls.patched:
                scope = original_patch_lang(language)
                restore = scope.restore

                def restore_once():
                    restore()
                    cls.patched = False

                scope.restore = restore_once
                cls.patched = True
            return scope

        def call(self, *args, **kwargs):
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings(), _Memory.launch(self, args, kwargs):
                    warnings.simplefilter("ignore", RuntimeWarning)  # numpy on NaN and overflow; a GPU says nothing
                    return original_call(self, *args, **kwargs)
            except ti.InterpreterError as error:
                cause = error
                while cause is not None and not isinstance(cause, OutOfBounds):
                    cause = cause.__cause__
                if cause is not None:
                    raise cause.with_traceback(None) from None
                raise

        ti._patch_lang_tensor, ti._patch_lang, ti.GridExecutor.__call__ = patch_lang_tensor, patch_lang, call


def install_repairs() -> None:
    """Repair Triton's interpreter (see the module's docstring). Calling it again does nothing.

    Tried with Triton 3.6.0 and 3.7.1, numpy 2.3 to 2.5. It has no effect on compiled kernels.
    """
    if getattr(ti, "_repaired_by_flashlab", False):
        return
    for name, method in vars(_RepairedBuilder).items():
        if inspect.isfunction(method):
            _RepairedBuilder.original[name] = getattr(ti.InterpreterBuilder, name, None)
            setattr(ti.InterpreterBuilder, name, method)
    _repair_reductions()
    _Launches.repair()
    ti._interpreter = _Memory(ti._interpreter)
    ti._repaired_by_flashlab = True


# ---- bounds and traffic ---------------------------------------------------------------------------------------------


class OutOfBounds(IndexError):
    """A kernel read or wrote an element that its tensor does not have; the access was not carried out."""


@dataclass
class Traffic:
    """What kernels moved between global memory and the chip, with no cache in between.

    bytes_read, bytes_written   bytes of the elements loaded and stored; masked-off elements do not count
    loads, stores               tile-wide operations executed (a ``tl.load`` counts once a program and iteration);
                                an atomic counts as both
    sectors                     32-byte sectors touched, each operation for itself: what DRAM really moves. Scattered
                                elements touch more sectors than ``(bytes_read + bytes_written) / 32``
    read_from, written_to       bytes by tensor: the name given to ``watched``, else the kernel's parameter
    """

    bytes_read: int = 0
    bytes_written: int = 0
    loads: int = 0
    stores: int = 0
    sectors: int = 0
    read_from: Counter = field(default_factory=Counter)
    written_to: Counter = field(default_factory=Counter)

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
class _Window:
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
        dims = sorted((d for d in range(len(self.shape)) if self.shape[d] > 1 and self.strides[d]), key=self._stride)
        if 0 in self.shape:
            return np.ones_like(bad)
        if self._overlaps(dims):
            last = sum((self.shape[d] - 1) * self.strides[d] for d in dims)
            return bad | (rest > last)
        for d in reversed(dims):
            bad |= rest // self.strides[d] >= self.shape[d]
            rest = rest % self.strides[d]
        return bad | (rest != 0)

    def _stride(self, d: int) -> int:
        return self.strides[d]

    def _overlaps(self, dims: list[int]) -> bool:
        reach = 0
        for d in dims:
            if self.strides[d] <= reach:
                return True
            reach += (self.shape[d] - 1) * self.strides[d]
        return False

    def place(self, offset: int) -> str:
        """Where a byte offset points, in the tensor's own indices."""
        element, rest = divmod(offset, self.itemsize)
        if element < 0:
            return f"{-element} elements before the first"
        index = [0] * len(self.shape)
        for d in sorted((d for d in range(len(self.shape)) if self.strides[d]), key=self._stride, reverse=True):
            index[d], element = divmod(element, self.strides[d])
        if element:
            return f"{element} elements beyond [{', '.join(map(str, index))}], between two elements"
        return f"element [{', '.join(map(str, index))}]" + (f" and {rest} bytes" if rest else "")


_FLAG = 1 << 62  # no address of this machine has this bit
_WINDOW_BITS = 40


class _Memory:
    """Stands before the interpreter's memory operations.

    While something is watched, a launch's tensors get made-up addresses, each in a window of its own, 1 TiB wide. So
    every pointer says which argument it was computed from, and running over the end of K cannot pass for reading V.
    """

    watchers: list["_Watcher"] = []
    windows: list[_Window] = []
    names: dict[int, list[str]] = {}  # of the launch under way: address -> parameters

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    @classmethod
    @contextlib.contextmanager
    def launch(cls, executor, args, kwargs):
        if not cls.watchers:
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
        cls.windows.clear()
        try:
            yield
        finally:
            ti._implicit_cvt = original

    @classmethod
    def window(cls, parameter: str, given: torch.Tensor, tensor: torch.Tensor) -> _Window:
        """given: the caller's tensor; tensor: the interpreter's view of it, another one if it came from a GPU."""
        name = parameter
        for watcher in reversed(cls.watchers):
            name = watcher.names.get((given.data_ptr(), str(given.device)), name)
        window = _Window(
            len(cls.windows), name, tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()
        )
        cls.windows.append(window)
        return window

    def _resolve(self, pointers, mask, read: bool, write: bool):
        """Real addresses for made-up ones; raises OutOfBounds before anything is touched."""
        if not self.watchers:
            return pointers
        active = np.broadcast_to(mask, pointers.shape)
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
                raise OutOfBounds(
                    f"{doing} out of bounds: {window.place(int(offsets[bad][0]))} of {window.name}, which has shape "
                    f"{list(window.shape)}; program {grid}, {int(bad.sum())} of {offsets.size} elements outside"
                )
            addresses = offsets + window.data_ptr
            real[mine] = addresses.astype(np.uint64)
            size = offsets.size * window.itemsize
            sectors = np.unique(addresses // SECTOR_BYTES).size  # an aligned element lies in one sector
            for watcher in self.watchers:
                for happens, is_read in ((read, True), (write, False)):
                    if happens:
                        watcher.traffic._count(window.name, is_read, size, sectors)
        return real

    def load(self, pointers, mask, other, dtype):
        return self._real.load(self._resolve(pointers, mask, True, False), mask, other, dtype)

    def store(self, pointers, data, mask):
        return self._real.store(self._resolve(pointers, mask, False, True), data, mask)

    def atomic_rmw(self, operation, pointers, data, mask, sem):
        return self._real.atomic_rmw(operation, self._resolve(pointers, mask, True, True), data, mask, sem)

    def atomic_cas(self, pointers, compare, data, sem):
        mask = np.ones(pointers.shape, bool)
        return self._real.atomic_cas(self._resolve(pointers, mask, True, True), compare, data, sem)


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
    """Check and count the memory accesses of every kernel launched inside; yields a Traffic.

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
    install_repairs()
    watcher = _Watcher(tensors)
    _Memory.watchers.append(watcher)
    try:
        yield watcher.traffic
    finally:
        _Memory.watchers.remove(watcher)


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
    origin = importable_as(fn)
    with tempfile.TemporaryDirectory(prefix="flashlab-traffic-") as folder:
        if origin is None:
            name = fn.__name__
            Path(folder, "launcher_source.py").write_text(module_source(fn), encoding="utf-8")
        else:
            name = ":".join(origin)
        try:
            torch.save((args, kwargs), Path(folder, "arguments.pt"))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TypeError(
                f"an argument of {fn.__name__} cannot be taken to the process that interprets ({error}); arguments are "
                "tensors and plain values: put the rest, a kernel for instance, into a function around the launcher"
            ) from error
        paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
        environment = os.environ | {
            "FLASHLAB_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        program = "import sys; from flashlab import interpreter; interpreter._child(*sys.argv[1:])"
        command = [sys.executable, "-c", program, folder, name]
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        result = Path(folder, "result.json")
        if not result.exists():
            raise RuntimeError(f"the interpreting process failed: {ended.stderr.strip()[-2000:]}")
        answer = json.loads(result.read_text())
    if "out_of_bounds" in answer:
        raise OutOfBounds(answer["out_of_bounds"])
    if "error" in answer:
        raise RuntimeError(f"interpreting {fn.__name__} raised {answer['error']}")
    counters = {name: Counter(answer.pop(name)) for name in ("read_from", "written_to")}
    return Traffic(**answer, **counters)


def _child(folder: str, name: str) -> None:
    """The child process: load the function and its arguments, run it watched, write the result."""
    if ":" in name:
        module_name, name = name.split(":")
        module = importlib.import_module(module_name)
    else:
        spec = importlib.util.spec_from_file_location("launcher_source", Path(folder, "launcher_source.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["launcher_source"] = module
        spec.loader.exec_module(module)
    args, kwargs = torch.load(Path(folder, "arguments.pt"), weights_only=False)
    try:
        answer = vars(hbm_traffic(getattr(module, name), *args, **kwargs))
    except OutOfBounds as error:
        answer = {"out_of_bounds": str(error)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, "result.json").write_text(json.dumps(answer))


if runtime.INTERPRETED:
    install_repairs()
