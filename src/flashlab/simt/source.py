"""What the emulator reads from a CUDA source before the compiler does.

Two things of the language cannot be said in C++ at all, and are rewritten without moving a line: the launch
``kernel<<<grid, block>>>(args)``, and the keyword ``__noinline__`` (a name that the C++ library uses for
itself). And the signatures of the ``extern "C"`` entries are read, so that Python can call them with the
right types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def _blank_comments(text: str) -> str:
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
    blanked = _blank_comments(source)
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
    element: str = ""  # of a pointer: "float", "__half", "void", "float*" ...
    const: bool = False


@dataclass(frozen=True)
class Entry:
    """An ``extern "C"`` function that Python may call."""

    name: str
    returns: str
    parameters: tuple[Parameter, ...]


_NUMBERS = {
    "bool", "char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned",
    "unsigned int", "long", "unsigned long", "long long", "unsigned long long", "float", "double", "size_t",
    "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "ptrdiff_t",
}  # fmt: skip


def _parameter(text: str, number: int) -> Parameter:
    text = re.sub(r"\b__restrict__\b|\b__restrict\b", " ", text.split("=")[0]).strip()
    match = re.fullmatch(r"(.*?[\s*&])(\w+)", text, re.S)
    type_, name = (match[1], match[2]) if match and match[2] not in _NUMBERS else (text, f"argument {number}")
    if "*" in type_:
        element = re.sub(r"\bconst\b|\bstruct\b", " ", type_.split("*")[0]).split()
        deeper = "*" * (type_.count("*") - 1)
        return Parameter(name, "pointer", " ".join(element) + deeper, "const" in type_.split("*")[0].split())
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
    text = _blank_comments(source).replace('extern " "', 'extern "C"')
    shorthands = dict(re.findall(r'^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(.*extern[ \t]+"C".*)$', text, re.M))
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.M)
    for name, body in shorthands.items():
        text = re.sub(rf"\b{name}\b", lambda _, body=body: body, text)
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
