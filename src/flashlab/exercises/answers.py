"""A learner's answers on their way into a check, and what comes back from them when something is not as it should be.

A function is handed to the check in a wrapper that refuses a call which its parameters do not take, and remembers what
it was last called with and what it gave. An exception is then told as one sentence: with the learner's line if it came
out of their code, else with what their function returned, since the check could do nothing with it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import io
import linecache
import re
import sysconfig
import textwrap
import tokenize
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flashlab.check.expect import expect
from flashlab.check.failed import CheckFailed
from flashlab.check.running import ran_on
from flashlab.simt.source import blank_comments

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONGEST = 160  # characters of an exception's own words
_LINE = 80  # characters of a line of code


class Called:
    """The learner's functions in one check: the last call, and the kind of what it returned."""

    def __init__(self) -> None:
        self.call = ""
        self.returned = ""

    def wrap(self, answer: Any, name: str) -> Any:
        """The answer, if it is no plain callable; else a function that does the same and is watched."""
        if not callable(answer) or isinstance(answer, type) or hasattr(answer, "fn"):  # .fn: a Triton kernel
            return answer
        try:
            signature = inspect.signature(answer)
        except (TypeError, ValueError):  # some built-in functions
            signature = None
        name = str(getattr(answer, "__name__", "") or name)
        name = name if name.isidentifier() else "your function"

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [in_words(x) for x in args] + [f"{k}={in_words(x)}" for k, x in kwargs.items()]
            self.call = f"{name}({', '.join(given)})"
            self.returned = ""
            ran_on(f"the call {self.call}")
            if signature is not None:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    said = f"{name}{signature} cannot be called as this exercise calls it, {self.call}: {error}"
                    raise CheckFailed(said, diagnosis="wrong-signature") from None
            result = answer(*args, **kwargs)
            self.returned = in_words(result, article=True)  # not the result: a check may count what stays alive
            return result

        try:
            return functools.wraps(answer)(call)
        except (AttributeError, TypeError, ValueError):
            return call


def in_words(x: Any, article: bool = False) -> str:
    """A value in a few words: 'tensor [3, 4] float32', '0.5', 'a list of 3'."""
    try:
        if x is None or type(x) in (bool, int, float):
            return repr(x)
        if type(x) is str:
            return repr(x) if len(x) <= 20 else ("a text" if article else "text")
        if isinstance(x, torch.Tensor):
            return f"{'a ' * article}tensor {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        if isinstance(x, (tuple, list, dict, set)):
            return f"{'a ' * article}{type(x).__name__} of {len(x)}"
        if isinstance(x, (torch.dtype, torch.device)):
            return str(x)
        if isinstance(x, type):
            return f"the class {x.__name__}"
    except Exception:  # a learner's own class may raise from anywhere
        pass
    name = type(x).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}" if article else name


def expect_kinds(id: str, run: Callable[..., Any], answers: tuple[Any, ...]) -> None:
    """CheckFailed where a function is wanted and something else is handed in. Kernels and texts: by their checks."""
    for parameter, answer in zip(inspect.signature(run).parameters.values(), answers, strict=False):
        if parameter.annotation in ("str", "Any", str, Any):
            continue
        if callable(answer) and not isinstance(answer, type):
            said = f"{parameter.name} should be an ordinary Python function, and this is a Triton kernel: is there an "
            said += "@triton.jit too many, or is the function meant that launches it?"
            expect(not hasattr(answer, "fn") or not hasattr(answer, "run"), said, diagnosis="wrong-type")
            continue
        raise CheckFailed(
            f"{parameter.name} should be a function, and this is {in_words(answer, article=True)}: hand in its name, "
            f'without brackets behind it, as in check("{id}", {parameter.name})',
            diagnosis="wrong-type",
        )


# ---- exceptions -----------------------------------------------------------------------------------------------------


def told(error: BaseException, run: Callable[..., Any], called: Called, case: str | None) -> CheckFailed:
    """The exception as a sentence for the learner."""
    for raised in reversed(chain(error)):
        if hasattr(raised, "node") and hasattr(raised, "src"):  # Triton's CompilationError; interpreted, none is raised
            why = getattr(raised, "error_message", None) or raised.__cause__ or type(raised).__name__
            why = " ".join(str(why).split())[:_LONGEST]
            line = raised.src.splitlines()[raised.node.lineno - 1].strip()[:_LINE]
            sentence = f"the compiler refuses your kernel: {why}, in its line {raised.node.lineno}, `{line}`"
            return CheckFailed(sentence, diagnosis="does-not-compile", case=case)
        if where := learners_line(raised.__traceback__, run):
            more = [note for note in getattr(raised, "__notes__", ()) if not note.startswith("This happened in")]
            sentence = "\n".join([*more, f"your code raised {_words(raised)}, {where}{_shapes(raised)}"])
            return CheckFailed(sentence, diagnosis="exception", case=case)
    wanted = _wanted(run)
    if called.returned:
        sentence = f"your function returned {called.returned}, and the check could do nothing with it"
    elif called.call:
        sentence = f"{called.call} could not be called"
    else:
        sentence = "the check could do nothing with this answer"
    sentence += f": {wanted} is wanted" if wanted and called.returned else ""
    return CheckFailed(f"{sentence} ({_words(error)})", diagnosis="wrong-type", case=case)


def chain(error: BaseException) -> list[BaseException]:
    """The exception and what it was raised from, as Triton's interpreter wraps a kernel's own."""
    found: list[BaseException] = []
    while error is not None and error not in found and len(found) < 8:
        found.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return found


def _words(error: BaseException) -> str:
    try:
        said = " ".join(str(error).split())
    except Exception:  # a learner's own exception class
        said = ""
    said = said if len(said) <= _LONGEST else said[:_LONGEST].rstrip() + " …"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, *_LIBRARIES, "<frozen")) or "site-packages" in file


def place(file: str, number: int, code: str) -> str:
    """'in line 3 of the cell, `x = y[0]`'; '' of a library's line."""
    if _is_library(file):
        return ""
    code = code.strip()
    code = code if len(code) <= _LINE else code[:_LINE].rstrip() + " …"
    # What IPython runs is a cell, called <ipython-input-3-...> or .../ipykernel_123/456.py.
    where = "the cell" if re.search(r"ipykernel_\d+|<ipython-input|^<", file) else Path(file).name
    return f"in line {number} of {where}" + (f", `{code}`" if code else "")


def learners_line(traceback: TracebackType | None, run: Callable[..., Any]) -> str:
    """'in line 3 of the cell, `x = y[0]`': the innermost frame that is neither the check's nor a library's, or ''."""
    found = ""
    while traceback is not None:
        file, number = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if not _is_library(file) and traceback.tb_frame.f_code is not getattr(run, "__code__", None):
            found = place(file, number, linecache.getline(file, number, traceback.tb_frame.f_globals))
        traceback = traceback.tb_next
    return found


def _shapes(error: BaseException) -> str:
    """'; there x is [4, 8], y[:, None] [4, 1]': the tensors of the line, where an exception is about their shapes."""
    if not re.search(r"shape|size|dimension|broadcast", str(error)) or (traceback := error.__traceback__) is None:
        return ""
    found: dict[str, str] = {}
    while traceback is not None:
        frame, number = traceback.tb_frame, traceback.tb_lineno
        if not _is_library(frame.f_code.co_filename):
            found = {}
            with contextlib.suppress(Exception):  # one of several lines; a learner's own class may raise from anywhere
                line = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()
                for node in ast.walk(ast.parse(line)):
                    if shape := _shape_of(node, frame.f_locals):
                        found[ast.unparse(node)] = shape
        traceback = traceback.tb_next
    bare = [name for name in found if any(other.startswith(f"{name}[") for other in found)]
    listed = [f"{name} {'is ' * (i == 0)}{found[name]}" for i, name in enumerate(x for x in found if x not in bare)]
    return f"; there {', '.join(listed)}" if len(listed) > 1 else ""


def _shape_of(node: ast.AST, known: Mapping[str, Any]) -> str:
    """The shape of a tensor that a name stands for, perhaps with new dimensions, as in x[:, None]; or ''."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        whole, places = _shape_of(node.value, known), [ast.unparse(x) for x in node.slice.elts]
        sizes = whole[1:-1].split(", ")
        if not whole or set(places) != {"None", ":"} or places.count(":") != len(sizes):
            return ""
        return f"[{', '.join('1' if x == 'None' else sizes.pop(0) for x in places)}]"
    value = known.get(node.id) if isinstance(node, ast.Name) else None
    shape = [getattr(x, "value", x) for x in getattr(value, "shape", ())]
    return str(shape) if shape and all(isinstance(x, int) for x in shape) else ""


# ---- what a function should return ----------------------------------------------------------------------------------

_PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", torch.Tensor: "a tensor"}


def _wanted(run: Callable[..., Any]) -> str:
    """In words what the check's annotation says that the learner's function returns, or ''."""
    try:
        hints = typing.get_type_hints(run)
    except Exception:
        return ""
    for parameter in inspect.signature(run).parameters:
        arguments = typing.get_args(hints.get(parameter))
        if len(arguments) == 2 and arguments[1] is not Any:
            return _type_in_words(arguments[1])
    return ""


def _type_in_words(kind: Any) -> str:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and parts and Ellipsis not in parts:
        listed = "" if Any in parts else f" ({', '.join(map(_type_in_words, parts))})"
        return f"a tuple of {len(parts)}{listed}"
    name = str(getattr(typing.get_origin(kind) or kind, "__name__", kind))
    return _PLAIN.get(kind, f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}")


# ---- has it been touched? -------------------------------------------------------------------------------------------


def fingerprint(*answers: Any) -> str:
    """A short digest of the answers' texts, whatever their comments and blank space; "" where there is no text."""
    texts = []
    for answer in answers:
        if isinstance(answer, str):
            texts.append(re.sub(r"\s+", "", blank_comments(answer)))
            continue
        try:
            texts.append(_python_tokens(inspect.getsource(inspect.unwrap(getattr(answer, "fn", answer)))))
        except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
            return ""
    return _digest(texts)


def python_fingerprint(source: str) -> str:
    """The `fingerprint` of a Python function with this text."""
    return _digest([_python_tokens(source)])


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _python_tokens(source: str) -> str:
    """The tokens that mean something; where a block begins and ends is among them."""
    out = []
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            out.append(tokenize.tok_name[token.type])
        else:
            out.append(token.string)
    return " ".join(out)
