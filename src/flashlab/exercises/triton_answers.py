"""What the checks of Triton exercises share: the answer must be a kernel, its addresses are watched, it must compile.

No answer may end the Python process: an interpreted kernel without a mask would write into the heap, so no check runs
one unwatched.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, expect, running
from flashlab.exercises.answers import place
from flashlab.triton_tools.compile_report import CompileReport, compile_report
from flashlab.triton_tools.watch import OutOfBounds, Traffic, watched


def kernel_of(answer: Any, parameters: Sequence[str] | None = None) -> Any:
    """The answer, if it is a Triton kernel (with these parameters); NotImplementedError while it is still a blank."""
    function: Any = getattr(answer, "fn", None)
    undecorated = inspect.isfunction(answer) and answer.__module__ != kernel_of.__module__
    expect(
        inspect.isfunction(function),
        "hand in the kernel itself, a function under @triton.jit"
        + (
            ": this is a Python function, or what a launch gives" if undecorated else f", not a {type(answer).__name__}"
        ),
        diagnosis="wrong-type",
    )
    # Compiled, a `raise` in a kernel is a compiler error and not the exception it names.
    if "raise NotImplementedError" in inspect.getsource(function):
        raise NotImplementedError
    foreign = _foreign(function)
    said = f"{foreign} is not for kernels: inside of one everything is Triton's, as tl.zeros and tl.float32 are"
    expect(foreign is None, said, diagnosis="not-triton")
    got = tuple(inspect.signature(function).parameters)
    said = f"the kernel's parameters should stay ({', '.join(parameters or ())}), they are ({', '.join(got)})"
    expect(parameters is None or got == tuple(parameters), said, diagnosis="wrong-parameters")
    return answer


def _foreign(function: Any) -> str | None:
    """The first name of torch's or numpy's in a kernel's body, or None."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    for node in itertools.chain.from_iterable(ast.walk(line) for line in getattr(body, "body", [])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = function.__globals__.get(node.value.id)
            if inspect.ismodule(module) and module.__name__ in ("torch", "numpy"):
                return f"{node.value.id}.{node.attr}"
    return None


@contextlib.contextmanager
def in_bounds(case: str | None, **tensors: torch.Tensor) -> Iterator[Traffic | None]:
    """Run with every address checked where kernels are interpreted; CheckFailed names the element.

    A NaN that came from a load with a mask and without `other` is told by `explain_undefined`.
    """
    try:
        with running(case), watched(**tensors) if runtime.INTERPRETED else contextlib.nullcontext() as traffic:
            yield traffic
    except OutOfBounds as error:
        raise stray(error, case) from None


def stray(error: OutOfBounds, case: str | None) -> CheckFailed:
    """What is said of an address outside of its tensor: where it is made, and whether a mask is missing."""
    frame = next((x for x in reversed(error.stack) if place(x.filename, x.lineno or 0, "")), None)
    code = (frame and frame.line) or ""
    where = f", {place(frame.filename, frame.lineno or 0, code)}" if frame else ""
    whole = code.count("(") == code.count(")") and len(re.findall(r"\btl\.(?:load|store)\(", code)) == 1
    why = _beyond(str(error)) or "look at what makes this address (indices, strides) and at the mask"
    none = "it has no mask=; where none is needed, an index or a stride is not its own"
    why = none if whole and "mask" not in code else why
    return CheckFailed(f"{error}{where}: {why}", diagnosis="out-of-bounds", case=case)


def _beyond(said: str) -> str:
    """Of an element of a matrix that is outside along one axis: what that says of the address; "" of others."""
    found = re.search(r"element \[(\d+), (\d+)\] of .* shape \[(\d+), (\d+)\].*?(\d+) of (\d+) elements", said)
    row, column, rows, columns, outside, elements = map(int, found.groups()) if found else (0,) * 6
    if row >= rows and column < columns:
        if outside == elements:
            return f"all of it is behind the last row, {rows - 1}: it is moved on too far, or by the wrong stride"
        return f"rows end at {rows - 1}, and nothing in its mask keeps it below that, or its index is too large"
    if row < rows and column >= columns:
        return f"that is behind the end of row {row}: columns that no mask keeps out, or a stride that is not its own"
    return ""


def explain_undefined(traffic: Traffic | None, o: torch.Tensor, case: str | None) -> None:
    """CheckFailed if `o` has a NaN, and a tensor was loaded with a mask, but without `other`."""
    if traffic is None or not traffic.undefined or not o.isnan().any():
        return
    name = sorted(traffic.undefined)[0]
    said = f"{name} is loaded with a mask, but without `other=`: what the masked-off elements hold is undefined (here "
    said += "it is NaN, on a GPU whatever the register held), and it reaches the result; 0 * NaN is NaN"
    raise CheckFailed(said, diagnosis="other-missing", case=case)


def compiles(kernel: Any, arguments: dict[str, Any], target: str = "sm_90", **options: Any) -> CompileReport:
    """compile_report of an answer that is already right when interpreted; CheckFailed with the compiler's sentence."""
    report = compile_report(kernel, arguments, target=target, **options)
    said = f"right when interpreted, but the compiler refuses it for {target}: {report.error_line}"
    expect(report.ok, said, diagnosis="does-not-compile")
    return report


def calls(kernel: Any) -> list[str]:
    """The names of the functions and methods that a kernel's text calls, in its order: ["program_id", "load", ...]."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    called = sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))
    return [str(getattr(n.func, "attr", None) or getattr(n.func, "id", "")) for n in called]
