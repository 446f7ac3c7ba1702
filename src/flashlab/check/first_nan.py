"""The line of an answer in which a NaN is made that its result shows, found by running the answer again.

Every operation of torch and of Triton's interpreter is watched, and a NaN is new where no operand has one. Many are
harmless, such as one that a `where` drops, so each line that makes some is judged by what it changes: with 0 for the
NaN of all lines but this one, is the result another one than with 0 for all of them?
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as ti
from torch.overrides import TorchFunctionMode

_NOT_THE_ANSWER = ("torch", "triton", "numpy", "contextlib", "flashlab.check", "flashlab.triton_tools")
_MOST = 8  # lines that make NaN, of which each is run for
_WAYS = {"sub": "inf - inf", "add": "inf - inf", "mul": "inf * 0", "div": "0 / 0 or inf / inf"}


@dataclass
class _Trace:
    """What the lines of one run made; where a line is in `left`, its NaN stay, else they become 0, if any is given."""

    left: set[str] | None = None
    made: dict[str, str] = field(default_factory=dict)  # line: the operation
    infinite: dict[str, None] = field(default_factory=dict)  # lines that first make +inf

    def see(self, name: str, out: np.ndarray, operands: Sequence[np.ndarray]) -> np.ndarray | None:
        """Which elements of an operation's result are to become 0."""
        if out.dtype.kind != "f" or not out.size:
            return None
        if np.isposinf(out).any() and not any(np.isposinf(x).any() for x in operands) and (line := _line()):
            self.infinite.setdefault(line)
        if not np.isnan(out).any():
            return None
        new = np.isnan(out)
        for x in operands:
            lost = np.isnan(x)
            try:
                new = new & ~np.broadcast_to(lost, out.shape)
            except ValueError:  # a product, a sum: any operand's may come through
                new = new & (not lost.any())
        line = _line() if new.any() else None
        if line is None:
            return None
        self.made.setdefault(line, _in_words(name, new, operands))
        return new if self.left is not None and line not in self.left else None


def _in_words(name: str, new: np.ndarray, operands: Sequence[np.ndarray]) -> str:
    way = next((way for way in _WAYS if way in name), None)
    if way is None or len(operands) != 2:
        return "inf * 0 or inf - inf within a product" if name in ("matmul", "dot", "mm", "einsum") else f"in {name}"
    at = tuple(x[0] for x in new.nonzero())
    a, b = (float(np.broadcast_to(x, new.shape)[at]) for x in operands)
    if way == "div":
        return "0 / 0" if a == 0 else "inf / inf"
    if way == "sub":
        return "-inf - (-inf)" if a < 0 else "inf - inf"
    return _WAYS[way] if not (way == "mul" and min(a, b) < 0) else "-inf * 0"


def _line() -> str | None:
    """The line of the answer that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not any(module == x or module.startswith(f"{x}.") for x in _NOT_THE_ANSWER):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).split("  #")[0].strip() or None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _array(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().double().numpy().copy() if x.is_floating_point() else np.zeros(())
    return np.asarray(float(x)) if isinstance(x, (int, float)) and not isinstance(x, bool) else np.zeros(())


class _OfTorch(TorchFunctionMode):
    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        operands = [_array(x) for x in args if isinstance(x, (torch.Tensor, int, float))]  # it may change them
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and "empty" not in name:
            drop = self.trace.see(name, _array(out), operands)
            if drop is not None:
                out.masked_fill_(torch.from_numpy(drop).to(out.device), 0.0)
        return out


@contextlib.contextmanager
def _of_triton(trace: _Trace) -> Iterator[None]:
    builder = ti.InterpreterBuilder
    kept = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_dot", "create_fma")}

    def seen(name: str, out: Any, operands: Sequence[Any]) -> Any:
        drop = trace.see(name, out.data, [x.data for x in operands])
        if drop is not None:
            out.data = np.where(drop, 0, out.data).astype(out.data.dtype)
        return out

    def operation(self: Any, *given: Any, of: str) -> Any:
        operands = [x for x in given if isinstance(x, ti.TensorHandle)]
        name = getattr(given[-1], "__name__", "") if of.endswith("_op") else of.removeprefix("create_")
        return seen(name, kept[of](self, *given), operands)

    try:
        for name in kept:
            setattr(builder, name, lambda self, *given, of=name: operation(self, *given, of=of))
        yield
    finally:
        for name, method in kept.items():
            setattr(builder, name, method)


def _run(run: Callable[[], Any], left: set[str] | None) -> tuple[_Trace, list[np.ndarray]]:
    trace = _Trace(left)
    with _of_triton(trace), _OfTorch(trace), np.errstate(all="ignore"):
        got = run()
    return trace, [_array(x) for x in (got if isinstance(got, (tuple, list)) else [got]) if isinstance(x, torch.Tensor)]


def where_made(run: Callable[[], Any]) -> str | None:
    """Words for the lines in which NaN are made that change what `run` returns, tensors; None where none is found."""
    trace, shown = _run(run, None)
    lines = list(trace.made)
    if not 0 < len(lines) <= _MOST:
        return None
    without = _run(run, set())[1]
    if any(np.isnan(x).any() for x in without) or all(map(_same, shown, without)):
        return None
    guilty = [line for line in lines if not all(map(_same, _run(run, {line})[1], without))]
    if not guilty:
        return None
    said = f"`{guilty[0]}`: {trace.made[guilty[0]]}"
    source = next((x for x in trace.infinite if x not in guilty), None)
    if source and "inf *" in trace.made[guilty[0]] and not trace.made[guilty[0]].startswith("-"):
        said += f", where inf comes from `{source}`"
    return said


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and bool(((x == y) | (np.isnan(x) & np.isnan(y))).all())
