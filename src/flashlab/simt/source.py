"""What is read from a CUDA source before the compiler does.

Two things of the language cannot be said in C++ at all, and are rewritten for the emulator without moving a line: the
launch ``kernel<<<grid, block>>>(args)``, and the keyword ``__noinline__`` (a name that the C++ library uses for
itself). The signatures of the ``extern "C"`` entries are read, so that Python can call them with the right types; and
the ``#include`` lines, so that a build knows what it is made from.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def blank_comments(text: str) -> str:
    """The text with comments and string contents replaced by spaces, of the same length and lines."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)

    def blank(match: re.Match) -> str:
        kept = match[0][0] if match[0][0] in "\"'" else " "
        return kept + re.sub(r"[^\n]", " ", match[0][1:-1]) + (kept if len(match[0]) > 1 else "")

    return pattern.sub(blank, text)


def _kernel_before(text: str, end: int) -> int:
    """Where the expression that names a kernel begins: ``name``, ``ns::name<64, true>``, ``(expression)``."""
    at = end
    while at and text[at - 1].isspace():
        at -= 1
    pairs = {")": "(", ">": "<"}
    if at and text[at - 1] in pairs:
        depth, close, open_ = 0, text[at - 1], pairs[text[at - 1]]
        while at:
            at -= 1
            depth += (text[at] == close) - (text[at] == open_)
            if not depth:
                break
        if close == ")":
            return at
    while at and (text[at - 1].isalnum() or text[at - 1] in "_:"):
        at -= 1
    return at


def rewrite(source: str) -> str:
    """The source with its launches in C++, line for line.

    ``kernel<<<grid, block, bytes>>>(args)`` becomes ``simt_configure("kernel", kernel, grid, ...)(args)``;
    where the kernel is a template whose arguments are left to be deduced, its call is wrapped in a lambda.
    """
    source = re.sub(r"\b__noinline__\b", "__attribute__((__noinline__))", source)
    blanked = blank_comments(source)
    templates = set(
        re.findall(
            r"\btemplate\s*<[^;{]*?>\s*__global__[^;{(]*?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(",
            blanked,
        )
    )
    parts, done = [], 0
    for match in re.finditer(r"<<<", blanked):
        close = blanked.find(">>>", match.end())
        if close < 0:
            continue
        begin = _kernel_before(blanked, match.start())
        kernel = source[begin : match.start()].strip()
        text = re.sub(r"\s+", " ", kernel).replace("\\", "\\\\").replace('"', '\\"')
        if kernel in templates:
            head = f'simt_configure_deduced("{text}", [](auto... a) {{ {kernel}(a...); }}, '
        else:
            head = f'simt_configure("{text}", {kernel}, '
        parts += [source[done:begin], head, source[match.end() : close], ")"]
        done = close + 3
    return "".join(parts) + source[done:]


@dataclass(frozen=True)
class Parameter:
    """One parameter of an entry: ``kind`` is "pointer", or the name of a C number type."""

    name: str
    kind: str
    element: str = ""  # of a pointer: "float", "__half", "void" ...
    const: bool = False


@dataclass(frozen=True)
class Entry:
    """An ``extern "C"`` function that Python may call."""

    name: str
    returns: str
    parameters: tuple[Parameter, ...]


C_TYPES = {
    "bool": ctypes.c_bool, "char": ctypes.c_int8, "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8, "short": ctypes.c_short, "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int, "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint, "long": ctypes.c_long, "unsigned long": ctypes.c_ulong,
    "long long": ctypes.c_longlong, "unsigned long long": ctypes.c_ulonglong, "float": ctypes.c_float,
    "double": ctypes.c_double, "size_t": ctypes.c_size_t, "int8_t": ctypes.c_int8, "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16, "uint16_t": ctypes.c_uint16, "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "ptrdiff_t": ctypes.c_ssize_t,
}  # fmt: skip
"""The number types that an entry may take and return."""
DTYPES = {
    "float": ("float32",), "double": ("float64",), "int": ("int32",), "unsigned": ("uint32", "int32"),
    "__half": ("float16", "uint16", "int16"), "half": ("float16", "uint16", "int16"),
    "__nv_bfloat16": ("bfloat16", "uint16", "int16"), "nv_bfloat16": ("bfloat16", "uint16", "int16"),
    "int64_t": ("int64",), "long long": ("int64",), "int32_t": ("int32",), "uint8_t": ("uint8", "bool"),
}  # fmt: skip
"""What an array passed for a pointer to such elements may hold; other element types take anything."""


def to_number(entry: str, p: Parameter, value: Any) -> bool | int | float:
    """A value as the parameter's type wants it. Raises TypeError where it is no such number."""
    kind = C_TYPES.get(p.kind)
    if kind is None:
        raise TypeError(f"{entry}: {p.name} has the type {p.kind}; an entry takes pointers and plain numbers")
    try:
        given = value.item() if hasattr(value, "item") else value
        if kind in (ctypes.c_float, ctypes.c_double):
            return float(given)
        if isinstance(given, float) and not given.is_integer():
            raise TypeError
        return bool(given) if kind is ctypes.c_bool else int(given)
    except (TypeError, ValueError):
        raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got {value!r}") from None


def _parameter(text: str, number: int) -> Parameter:
    text = re.sub(r"\b__restrict__\b|\b__restrict\b", " ", text.split("=")[0]).strip()
    match = re.fullmatch(r"(.*?[\s*&])(\w+)", text, re.S)
    type_, name = (match[1], match[2]) if match and match[2] not in C_TYPES else (text, f"argument {number}")
    if "*" in type_:
        element = re.sub(r"\bconst\b|\*|\bstruct\b", " ", type_.split("*")[0]).split()
        return Parameter(name, "pointer", " ".join(element), "const" in type_.split("*")[0].split())
    kind = " ".join(w for w in type_.split() if w not in ("const", "std::")).removeprefix("std::")
    if kind == "cudaStream_t":
        return Parameter(name, "pointer", "stream")
    return Parameter(name, kind)


def _split(text: str) -> list[str]:
    """The text split at its outermost commas."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and not depth:
            parts.append(text[last:i])
            last = i + 1
    return [p for p in [*parts, text[last:]] if p.strip()]


def entries(source: str) -> dict[str, Entry]:
    """The ``extern "C"`` functions that the source defines, by name."""
    text = blank_comments(source).replace('extern " "', 'extern "C"')
    shorthands = dict(re.findall(r'^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*extern[ \t]+"C".*)$', text, re.M))
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.M)
    for name, body in shorthands.items():
        text = re.sub(rf"\b{name}\b", body.replace("\\", r"\\"), text)
    found = {}
    heads = [m.end() for m in re.finditer(r'extern\s+"C"\s*(?!\s*\{)', text)]
    spans = []
    for m in re.finditer(r'extern\s+"C"\s*\{', text):
        depth, at = 1, m.end()
        while at < len(text) and depth:
            if depth == 1 and (f := re.match(r"(?:[\w:]+[\s*]+)+\w+\s*\(", text[at:])) and not text[at - 1].isalnum():
                spans.append(at)
                at += f.end() - 1
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
    for begin in heads + spans:
        match = re.match(r"\s*((?:[\w:]+[\s*]+)+?)(\w+)\s*\(", text[begin:])
        if not match:
            continue
        at = start = begin + match.end()
        depth = 1
        while at < len(text) and depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        if not re.match(r"\s*(noexcept\s*)?\{", text[at:]):
            continue
        parameters = [p for p in _split(text[start : at - 1]) if p.strip() != "void"]
        returns = " ".join(w for w in match[1].split() if w not in ("static", "inline", "__host__"))
        found[match[2]] = Entry(match[2], returns, tuple(_parameter(p, i) for i, p in enumerate(parameters, 1)))
    return found


def includes(text: str, folders: Sequence[Path]) -> list[Path]:
    """The headers that a source includes, and those that they include, where they are in one of these folders.

    Conditions of the preprocessor are not looked at: what is named in an ``#include`` counts.
    """
    found: dict[Path, None] = {}
    todo = [(text, list(folders))]
    while todo:
        given, places = todo.pop()
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', given, re.M):
            path = next((p for p in (Path(f, name).resolve() for f in places) if p.is_file()), None)
            if path is not None and path not in found:
                found[path] = None
                todo.append((path.read_text(encoding="utf-8", errors="replace"), [path.parent, *folders]))
    return sorted(found)
