"""Triton's interpreter, repaired, so that it computes what compiled kernels do.

Without a GPU, ``TRITON_INTERPRET=1`` makes Triton run a kernel's Python body once for each program, with numpy arrays
for tensors (triton/runtime/interpreter.py). It is the semantics of the language, but for a few points.
``install_repairs()`` makes it agree with compiled kernels in bfloat16 (it computes on the bit patterns), in float32
``tl.dot`` (TF32 unless ``input_precision="ieee"``), and in maximum and minimum of NaN; makes Triton 3.6 work with
numpy >= 2.4; keeps numpy's warnings off; and halves its time. Importing flashlab installs them. Launches
from several threads run one after the other.
"""

import functools
import inspect
import math
import sys
import threading
import traceback
import types
import warnings
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from triton._C.libtriton import ir

from flashlab.runtime.untraced import untraced
from flashlab.triton_tools.watch import OutOfBounds, WatchedMemory

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


def truncate_to_tf32(values: np.ndarray) -> np.ndarray:
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

    def create_fma(self, x, y, z):
        return _result(_float(x) * _float(y) + _float(z), _is_bf16(z), z.dtype.scalar)

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
            left, right = truncate_to_tf32(left), truncate_to_tf32(right)
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
    """Reductions that numpy does in one call see float32, and round their result. (Triton itself widens for scans.)"""
    original = ti.ReduceOps.apply_impl

    def apply_impl(self, input):
        quick = self.combine_fn in (
            tl.standard._argmin_combine_tie_break_left, tl.standard._argmax_combine_tie_break_left,
            tl.standard._elementwise_max, tl.standard._elementwise_min, tl.standard._sum_combine,
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

    ti.ReduceOps.apply_impl = apply_impl


# ---- launches -------------------------------------------------------------------------------------------------------


def _repair_warnings() -> None:
    original_call = ti.GridExecutor.__call__

    def call(self, *args, **kwargs):
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy on NaN and overflow; a GPU says nothing
            return original_call(self, *args, **kwargs)

    ti.GridExecutor.__call__ = call


def _one_number(tensor):
    """The number in an interpreted scalar; TypeError for a tile, as a compiler would refuse it."""
    data = tensor.handle.data
    if data.size != 1:
        raise TypeError(
            f"a tile of shape {list(data.shape)} where one number is wanted: for tiles there are & | ~ and tl.where, "
            "and not `and`, `or`, `not`, `if`, a < b < c"
        )
    return data.reshape(-1)[0]


def _repair_index() -> None:
    """Scalars are arrays of one element here, and `range(0, n, BLOCK)` of a kernel argument wants an int of them."""
    original_patch_tensor = ti._patch_lang_tensor

    def truth(self):
        # Triton's own says True for every tile, so that `a and b` is b and `a <= b < c` is `b < c`, silently. It
        # counts on that itself, in `if mask`.
        library = sys._getframe(1).f_globals.get("__name__", "").startswith("triton.")
        return True if library and self.handle.data.size != 1 else bool(_one_number(self))

    def patch_lang_tensor(tensor, scope):
        original_patch_tensor(tensor, scope)
        # numpy >= 2.4 does not convert such an array with int(array), which is what Triton 3.6 does.
        scope.set_attr(tensor, "__index__", lambda self: int(_one_number(self)))
        scope.set_attr(tensor, "__bool__", truth)

    ti._patch_lang_tensor = patch_lang_tensor


_MATHS = ("exp", "exp2", "log", "log2", "sqrt", "sqrt_rn", "rsqrt", "sin", "cos", "floor", "ceil", "erf")


def _repair_members() -> None:
    """x.exp() is tl.exp(x), which alone is patched for a launch: the method would still ask for a compiler."""
    original_patch_tensor = ti._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        original_patch_tensor(tensor, scope)
        for name in _MATHS:
            scope.set_attr(tensor, name, lambda self, name=name: getattr(tl, name)(self))

    ti._patch_lang_tensor = patch_lang_tensor


def _repair_patching() -> None:
    """Triton patches its language module again for every call of tl.max, tl.sum and the like, which takes more time
    than the arithmetic. Once a launch, for the two modules that functions see, is enough."""
    original_patch_lang = ti._patch_lang
    language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    under_way = False  # triton.language is patched for a launch

    def patch_lang(fn):
        nonlocal under_way
        scope = ti._LangPatchScope()
        if not under_way:
            scope = original_patch_lang(language)
            restore = scope.restore

            def restore_once():
                nonlocal under_way
                restore()
                under_way = False

            scope.restore = restore_once
            under_way = True
        return scope

    ti._patch_lang = patch_lang


def _repair_types() -> None:
    """Triton describes the type of every intermediate tile anew, its shape as a tuple that has a type too: that takes a
    third of a launch's time. Nobody changes a shape, so tiles of one shape share its description."""
    core, np_dtype = tl.core, functools.cache(ti._get_np_dtype)

    @functools.cache
    def of_type(shape):
        described = core.tuple(shape)
        return described, core.validate_block_shape(shape), str(described)

    @functools.cache
    def of_tensor(shape):
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def block_type(self, element_ty, shape):
        shape = core._unwrap_if_constexpr(shape)
        shape = tuple(core._unwrap_if_constexpr(n) for n in shape)
        if not shape:
            raise TypeError("0d block_type is forbidden")
        if not all(isinstance(n, int) for n in shape):
            core.validate_block_shape(shape)  # raises
        self.element_ty, (self.shape, self.numel, said) = element_ty, of_type(shape)
        self.name = f"<{said}, {element_ty}>"

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    ti._get_np_dtype = lambda type: np_dtype(tl.uint64 if isinstance(type.scalar, tl.pointer_type) else type.scalar)


def _watch_launches() -> None:
    """Not a repair: what `flashlab.triton_tools.watch` sees of loads and stores, and its errors without a wrapper."""
    original_call = ti.GridExecutor.__call__

    def call(self, *args, **kwargs):
        try:
            with WatchedMemory.launch(self, args, kwargs):
                return original_call(self, *args, **kwargs)
        except ti.InterpreterError as error:
            cause: Any = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is not None:
                cause.stack = traceback.StackSummary.extract(traceback.walk_tb(cause.__traceback__), lookup_lines=False)
                raise cause.with_traceback(None) from None
            raise

    original_load = ti.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *options, **named):  # a descriptor's load names its options
        WatchedMemory.no_other = other is None
        try:
            return original_load(self, ptrs, mask, other, *options, **named)
        finally:
            WatchedMemory.no_other = False

    ti.InterpreterBuilder.create_masked_load = create_masked_load
    ti.GridExecutor.__call__ = call
    ti._interpreter = WatchedMemory(ti._interpreter)


def _one_launch_at_a_time() -> None:
    """Not a repair either. There is one place for the grid of a launch and where it is in it, and one language to
    patch, for all threads: a launch waits for the one before. But one by the grid of another, in its thread, may go on.
    """
    under_way = threading.RLock()
    original_run = ti.InterpretedFunction.run

    @functools.wraps(original_run)
    def run(self, *args, **kwargs):
        with under_way:
            return original_run(self, *args, **kwargs)

    ti.InterpretedFunction.run = untraced(run)  # nothing in it is for torch.compile to trace


_METHODS = {name: method for name, method in vars(_RepairedBuilder).items() if inspect.isfunction(method)}
_OTHERS = {
    "reductions": _repair_reductions, "warnings": _repair_warnings, "index": _repair_index, "members": _repair_members,
    "patching": _repair_patching, "types": _repair_types,
}  # fmt: skip
REPAIRS = (*_METHODS, *_OTHERS)
"""The repairs by name. For each, tests/test_interpreter.py has a canary that says when Triton does without it."""


def install_repairs() -> None:
    """Repair Triton's interpreter (see the module's docstring). Calling it again does nothing.

    Tried with Triton 3.6.0 and 3.7.1, numpy 2.3 to 2.5. Compiled kernels stay what they are.
    """
    if getattr(ti, "_repaired_by_flashlab", False):
        return
    for name, method in _METHODS.items():
        _RepairedBuilder.original[name] = getattr(ti.InterpreterBuilder, name, None)
        setattr(ti.InterpreterBuilder, name, method)
    for repair in _OTHERS.values():
        repair()
    _watch_launches()
    _one_launch_at_a_time()
    ti._repaired_by_flashlab = True
