"""What the emulator reads from a CUDA source, and rewrites, before the compiler does.

The source is preprocessed first, so that a launch may stand in a macro, under a pasted name, in a header. What cannot
be said in C++ at all is then rewritten without moving a line: the launch ``kernel<<<grid, block>>>(args)``, and the
keyword ``__noinline__`` (a name that the C++ library uses for itself). And the signatures of the ``extern "C"``
entries are read, so that Python can call them with the right types.
"""

import bisect
import ctypes
import itertools
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.simt.errors import CompileError

KERNEL = 'annotate("simt_kernel")'  # what `__global__` has become (language.h)
_BOUNDS = r"__simt_bounds__\s*\((?:[^;{}()]|\((?:[^;{}()]|\([^;{}()]*\))*\))*\)"  # and `__launch_bounds__(...)`
ALIGNED = "simt_aligned_"  # begins the names of variables as large as what an `extern __shared__` array is aligned to
_ALIGNAS = r"(?:\balignas\s*\(|__attribute__\s*\(\()[^;]*?\)(?!\s*\))"
_COPYING = r"(?<!\w)(?:(?:\bstd\s*|(?<![\w\s]))::\s*)?\b(memcpy|memmove|memset)(?=\s*\()"
GRID_CONSTANT = 'annotate("simt_grid_constant")'  # and `__grid_constant__`


def blank_comments(text: str) -> str:
    """The text with comments and string contents replaced by spaces, of the same length and lines."""
    pattern = re.compile(
        r'R"([^\s()\\]{0,16})\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S
    )

    def blank(match: re.Match) -> str:
        kept = match[0][0] if match[0][0] in "\"'" else " "
        return kept + re.sub(r"[^\n]", " ", match[0][1:-1]) + (kept if len(match[0]) > 1 else "")

    return pattern.sub(blank, text)


# ---- preprocessed text -----------------------------------------------------------------------------
_MARKER = re.compile(r'^# (\d+) "((?:[^"\\]|\\.)*)"((?: \d)*)\n', re.M)


@dataclass(frozen=True)
class _Region:
    """Lines of one file in the preprocessor's output."""

    file: str
    line: int  # of the first
    system: bool
    begin: int
    end: int


def _regions(text: str) -> Iterator[_Region]:
    markers = list(_MARKER.finditer(text))
    for i, m in enumerate(markers):
        end = markers[i + 1].start() if i + 1 < len(markers) else len(text)
        file = re.sub(r"\\(.)", r"\1", m[2]) if "\\" in m[2] else m[2]
        yield _Region(file, int(m[1]), "3" in m[3], m.end(), end)


class Preprocessed:
    """The learner's part of what the compiler printed for ``-E``: all but files in `own` folders and the system's."""

    def __init__(self, text: str, own: tuple[str, ...]):
        self.text = text
        every = list(_regions(text))
        self.included = {r.file for r in every if not r.file.startswith("<")}  # the files that went into it
        self.regions = [r for r in every if not (r.system or r.file.startswith("<") or r.file.startswith(own))]
        # These two are short: most of the text is the system's headers. Positions are those of these two.
        parts = [text[r.begin : r.end] for r in self.regions]
        self.starts = list(itertools.accumulate((len(p) + 1 for p in parts), initial=0))
        self.learners, self.blanked = " ".join(parts), " ".join(map(blank_comments, parts))
        self.kernels = _kernels(self.learners, self.blanked)

    def in_text(self, at: int) -> int:
        """The same position in the whole text."""
        number = bisect.bisect_right(self.starts, at, hi=len(self.regions)) - 1
        return self.regions[number].begin + at - self.starts[number]

    def error(self, at: int, sentence: str) -> CompileError:
        number = bisect.bisect_right(self.starts, at, hi=len(self.regions)) - 1
        line = self.regions[number].line + self.learners.count("\n", self.starts[number], at)
        return CompileError(f"{self.regions[number].file}:{line}: error: {sentence}")

    def check(self) -> None:
        """Raises CompileError for what would compile, or nearly so, and not mean what it means on a GPU."""
        if match := re.search(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__)?\s*\(", self.blanked):
            raise self.error(
                match.start(),
                "inline PTX is not emulated: call the functions of ptx.cuh (cp_async, ldmatrix_x4, mma_m16n8k16 ...)",
            )
        for kernel in self.kernels.values():
            for at in kernel.declared:
                self._check_parameters(at)
        for name, kernel in self.kernels.items():
            if kernel.overloaded:
                continue
            call = re.compile(rf"(?<![\w.>])(?:\w+\s*::\s*)*{name}\s*(?:<(?:(?!<<)[^;{{}}()])*?>\s*)?\(")
            for match in call.finditer(self.blanked):
                before = re.search(r"(\w+|\S)\s*$", self.blanked[max(0, match.start() - 200) : match.start()])
                word = before[1] if before else ";"
                if word in ("return", "else", "do") or not (word[-1].isalnum() or word[-1] in "_*&>"):
                    if match.end() - 1 not in kernel.declared:
                        raise self.error(
                            match.start(), f"{name} is a kernel: launch it with {name}<<<grid, block>>>(...)"
                        )

    def _check_parameters(self, at: int) -> None:
        """Raises CompileError for a kernel's parameters, which begin here, that nvcc or TMA would not take."""
        for p in _split(self.learners[at + 1 : matching(self.blanked, at) - 1]):
            constant = GRID_CONSTANT in p
            if constant and not re.search(r"\bconst\b", p):
                raise self.error(at, "a __grid_constant__ parameter is const")
            if not constant and re.search(r"\bCUtensorMap\b(?!\s*(?:const\s*)?\*)", p):
                raise self.error(
                    at,
                    "a tensor map goes to a kernel as `const __grid_constant__ CUtensorMap`: without that the kernel "
                    "gets a copy in local memory, where TMA does not find it",
                )

    def _by_reference(self, at: int) -> Iterator[tuple[int, int, str]]:
        """Edits that make references of a kernel's __grid_constant__ parameters, to the launch's own copy."""
        begin = at + 1
        for p in _split(self.learners[begin : matching(self.blanked, at) - 1]):
            begin = self.learners.index(p, begin)
            plain = re.sub(r"\bconst\b|__attribute__\(\(annotate\(\S*\)\)\)", lambda m: " " * len(m[0]), p)
            name = re.search(r"\S\s+(\w+)\s*(?:=.*)?$", plain, re.S)
            if GRID_CONSTANT in p and name:
                yield begin + name.start(1), begin + name.start(1), "&"
            begin += len(p)

    def _shared_arrays(self) -> Iterator[tuple[int, int, str]]:
        """Edits for the alignment of shared memory: an array has its declared one, not what a compiler likes better."""
        declared = r"\bextern\b[^;{}]*\bthread_local\b[^;{}]*?(\w+)\s*\[[^;]*;"
        for number, m in enumerate(re.finditer(declared, self.blanked)):
            whole = self.blanked[1 + max(self.blanked.rfind(c, 0, m.start()) for c in ";{}") : m.end()]
            given = " ".join(sorted(re.findall(_ALIGNAS, whole), reverse=True))  # alignas comes first
            size = f"struct {{ {given} char c[__alignof__({m[1]})]; }}"
            yield m.end(), m.end(), f" static {size} {ALIGNED}{number} __attribute__((used));"
        for m in re.finditer(r"\bthread_local\s+(alignas\s*\()", self.blanked):  # nvcc takes it there, g++ does not
            close = matching(self.blanked, m.end() - 1)
            yield m.start(1), m.end(), "__attribute__((aligned("
            yield close - 1, close, ")))"
        # g++ likes arrays to have 16 bytes and more, but for those that ask for something: for what their type has.
        for m in re.finditer(r"__constinit thread_local\b([^;{}]*);", self.blanked):
            plain = re.sub(_ALIGNAS, lambda spec: " " * len(spec[0]), m[1])
            outside = plain
            while outside != (outside := re.sub(r"<[^<>]*>", lambda inside: "_" * len(inside[0]), outside)):
                pass
            name = re.search(r"\w+\s*(?=[\[,=]|$)", outside)
            extern = re.search(r"\bextern\b[^;{}]*$", self.blanked[max(0, m.start() - 200) : m.start()])
            if name and not extern and plain[: name.start()].strip():
                yield m.start(), m.start(), f"__attribute__((aligned(alignof({plain[: name.start()].strip()})))) "

    def rewritten(self, *, inline_all: bool = False) -> str:
        """The whole text, with its launches in C++, line for line.

        ``kernel<<<grid, block, bytes>>>(args)`` becomes ``simt_configure("kernel", kernel, grid, ...)(args)``. Where
        the kernel's name alone does not say which function is meant, or with which defaults, its call is wrapped in a
        lambda.

        Args:
            inline_all: ``__noinline__`` is dropped; a watched build sees more of what it can inline. It looks at no
                load or store of a function that no kernel can call.
        """
        blanked, edits = self.blanked, []  # (begin, end, text)
        noinline = "" if inline_all else "__attribute__((__noinline__))"
        if inline_all:
            for m in re.finditer(r"__attribute__\s*\(\(\s*(?:__)?noinline(?:__)?\s*\)\)", blanked):
                edits.append((m.start(), m.end(), ""))
            unseen = '__attribute__((no_sanitize("thread"))) '
            edits += [(at, at, unseen) for at in _host_functions(self.learners, blanked)]
            for m in re.finditer(_COPYING, blanked):
                edits.append((m.start(), m.end(), f"simt_{m[1]}"))  # g++ lets no watched build look at these
        edits += [(m.start(), m.end(), noinline) for m in re.finditer(r"(?<![(,\w])(?<![(,] )__noinline__\b", blanked)]
        edits += [(m.start(), m.end(), "noinline") for m in re.finditer(re.escape(KERNEL), self.learners)]
        edits += _bounds(blanked)
        edits += self._shared_arrays()
        edits += [e for k in self.kernels.values() for at in k.declared for e in self._by_reference(at)]
        for match in re.finditer(r"<<\s*<", blanked):
            close = re.compile(r">>\s*>").search(blanked, match.end())
            if not close:
                continue
            begin = _kernel_before(blanked, match.start())
            kernel = self.learners[begin : match.start()].strip()
            quoted = re.sub(r"\s+", " ", kernel).replace("\\", "\\\\").replace('"', '\\"')
            base = re.split(r"[^\w:\s]", kernel)[0].replace(" ", "").rpartition(":")[2]
            known = self.kernels.get(base)
            if known is not None and known.needs_call(kernel):
                head = f'simt_configure_deduced("{quoted}", [](const auto&... a) {{ {kernel}(a...); }}, '
                edits += _null_pointers(blanked, close.end())
            else:
                head = f'simt_configure("{quoted}", {kernel}, '
            edits += [(begin, match.end(), head), (close.start(), close.end(), ")")]
        parts, done = [], 0
        for begin, end, new in sorted(edits):
            first, behind = self.in_text(begin), self.in_text(end - 1) + 1
            if first < done:
                continue
            parts += [self.text[done:first], new]
            done = behind
        return "".join(parts) + self.text[done:]


@dataclass
class _Kernel:
    """What the preprocessed text says of the kernels of one name."""

    signatures: set[str]
    declared: set[int]  # where the parameter lists begin
    defaults: bool = False
    parameters: int = 0  # of the template, without those that have a default
    template: bool = False
    overloaded: bool = False  # with a function that is no kernel

    def needs_call(self, launched: str) -> bool:
        """Its name (``k``, ``k<64>``) alone is no function."""
        if self.defaults or self.overloaded or len(self.signatures) > 1:
            return True
        if not self.template:
            return False
        given = re.search(r"<(.*)>\s*$", launched, re.S)
        return not given or len(_split(given[1])) < self.parameters


def matching(text: str, at: int) -> int:
    """Just behind the bracket that closes the one at ``at``."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if not depth:
            return i + 1
    return len(text)


def _kernels(text: str, blanked: str) -> dict[str, _Kernel]:
    found: dict[str, _Kernel] = {}
    attribute = r"__attribute__\s*\(\([^;{}]*?\)\)"
    head = re.compile(
        rf"(?:\s|\bvoid\b|\bstatic\b|\binline\b|\bextern\b|\"[^\"]*\"|{attribute}|{_BOUNDS})*(\w+)\s*(?:<[^;{{}}()]*>\s*)?\("
    )
    for m in re.finditer(re.escape(KERNEL) + r"[^;{}]*?\)\)", text):
        declarator = head.match(blanked, m.end())
        if not declarator:
            continue
        open_ = declarator.end() - 1
        parameters = _split(blanked[open_ + 1 : matching(blanked, open_) - 1])
        kernel = found.setdefault(declarator[1], _Kernel(set(), set()))
        kernel.defaults |= any("=" in p for p in parameters)
        types = (re.sub(r"(?<=[\s*&>])\w+(\[\d*\])?$", "", p.split("=")[0].strip()) for p in parameters)
        kernel.signatures.add(",".join(re.sub(r"\s", "", t) for t in types))
        kernel.declared.add(open_)
        before = blanked[max(blanked.rfind(c, 0, m.start()) for c in ";{}") + 1 : m.start()]
        if template := re.search(r"\btemplate\s*<(.*)>", before, re.S):
            kernel.template = True
            kernel.parameters = sum("=" not in p and "..." not in p for p in _split(template[1]))
    for name, kernel in found.items():
        for m in re.finditer(rf"(?<=[\w*&>\s])\b{name}\s*\(", blanked):
            if m.end() - 1 in kernel.declared:
                continue
            before = blanked[: m.start()].rstrip()[-1:]
            after = blanked[matching(blanked, m.end() - 1) :].lstrip()[:1]
            kernel.overloaded |= after == "{" and bool(before) and (before.isalnum() or before in "_*&>")
    return found


def _host_functions(text: str, blanked: str) -> list[int]:
    """Where the names of those functions stand, of what is defined in no class, that only the host part can call.

    Neither a kernel names them, nor a class, a variable, a declaration, a lambda, or another function that these name.
    """
    functions: dict[str, list[tuple[int, str]]] = {}  # where the name stands, and the whole text
    outside, at, last = [], 0, 0
    for brace in re.finditer(r"[{};]", blanked):
        if brace.start() < at:
            continue
        head, begin, at = blanked[at : brace.start()], at, brace.end()
        if brace[0] != "{" or re.search(r"\bnamespace\b[\w\s:]*$|\bextern\s*\"\s*\"\s*$", head):
            continue
        at = matching(blanked, brace.start())
        declarator = re.search(r"(\w+)\s*(\((?:[^()]|\([^()]*\))*\))\s*(?:noexcept\s*)?$", head)
        before = head[: declarator.start()] if declarator else ""
        if declarator is None or re.search(r"[=:]|\boperator\b", before.replace("::", "")) or KERNEL in text[begin:at]:
            continue
        if re.search(r"(?<![\w\])])\s*\[[^\[\]]*\]\s*[({]", blanked[begin:at]):  # a lambda
            continue
        outside.append(blanked[last:begin])
        last = at
        functions.setdefault(declarator[1], []).append((begin + declarator.start(1), blanked[begin:at]))
    named = set(re.findall(r"\w+", " ".join([*outside, blanked[last:]])))
    while reached := named & functions.keys():
        for _, body in (found for name in reached for found in functions.pop(name)):
            named.update(re.findall(r"\w+", body))
    return [place for found in functions.values() for place, _ in found]


def _bounds(blanked: str) -> list[tuple[int, int, str]]:
    """Edits that make of a kernel's bounds the first statement of its body: there all of its names are known."""
    edits = []
    for m in re.finditer(_BOUNDS, blanked):
        edits.append((m.start(), m.end(), "\n" * m[0].count("\n")))
        declarator = re.compile(rf"(?:\s|\bvoid\b|{_BOUNDS})*\w+\s*(?:<[^;{{}}()]*>\s*)?(?=\()").match(blanked, m.end())
        if declarator is None:
            continue
        end = matching(blanked, declarator.end())
        body = re.compile(r"\s*\{").match(blanked, end)
        if body is not None:
            given = " ".join(m[0].partition("(")[2].split())
            edits.append((body.end(), body.end(), f" simt_bounds({given};"))
    return edits


def _null_pointers(blanked: str, at: int) -> list[tuple[int, int, str]]:
    """The arguments of a call that are NULL, which a lambda would take for a number."""
    open_ = blanked.find("(", at)
    if open_ < 0 or blanked[at:open_].strip():
        return []
    inside = blanked[open_ : matching(blanked, open_)]
    return [
        (open_ + m.start(1), open_ + m.end(1), "nullptr") for m in re.finditer(r"[(,]\s*(__null)(?=\s*[,)])", inside)
    ]


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
        while at and text[at - 1].isspace():
            at -= 1
    while at and (text[at - 1].isalnum() or text[at - 1] in "_:"):
        at -= 1
    return at


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
    text: str = ""  # its head, on one line


C_TYPES: dict[str, Any] = {
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
    """A value as the parameter's type wants it. Raises TypeError: no such number; ValueError: it cannot be held."""
    kind: Any = C_TYPES.get(p.kind)
    if kind is None:
        raise TypeError(f"{entry}: {p.name} has the type {p.kind}; an entry takes pointers and plain numbers")
    try:
        given = value.item() if hasattr(value, "item") else value
        if kind in (ctypes.c_float, ctypes.c_double):
            if math.isinf(kind(float(given)).value) and math.isfinite(given):
                raise OverflowError
            return float(given)
        number = int(given) if isinstance(given, float) and given.is_integer() else operator.index(given)
    except OverflowError:
        raise ValueError(f"{entry}: {p.name} is {value!r}, which a {p.kind} cannot hold") from None
    except (TypeError, ValueError):
        raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got {value!r}") from None
    bits = 1 if kind is ctypes.c_bool else 8 * ctypes.sizeof(kind)
    signed = kind(-1).value == -1
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if not low <= number <= high:
        raise ValueError(f"{entry}: {p.name} is {number}, and its type, {p.kind}, goes from {low} to {high}")
    return bool(number) if kind is ctypes.c_bool else number


def is_stream(p: Parameter) -> bool:
    """Whether a parameter is the CUDA stream."""
    return p.kind == "pointer" and (p.element == "stream" or (p.name == "stream" and p.element == "void"))


def _parameter(text: str, number: int) -> Parameter:
    text = re.sub(r"\b__restrict__\b|\b__restrict\b", " ", text.split("=")[0]).strip()
    match = re.fullmatch(r"(.*?[\s*&])(\w+)", text, re.S)
    type_, name = (match[1], match[2]) if match and match[2] not in C_TYPES else (text, f"argument {number}")
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
    """The ``extern "C"`` functions that the source defines, by name.

    Args:
        source: as it was written, in which no macro but one for ``extern "C" ...`` is understood; or preprocessed.
    """
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
        start = begin + match.end()
        at = matching(text, start - 1)
        if not re.match(r"\s*(noexcept\s*)?\{", text[at:]):
            continue
        parameters = [p for p in _split(text[start : at - 1]) if p.strip() != "void"]
        returns = " ".join(w for w in match[1].split() if w not in ("static", "inline", "__host__"))
        head = re.sub(r"\s+", " ", text[begin:at]).strip()
        named = tuple(_parameter(p, i) for i, p in enumerate(parameters, 1))
        found[match[2]] = Entry(match[2], returns, named, head)
    return found


def interface(source: Preprocessed) -> str:
    """The heads of a preprocessed source's ``extern "C"`` functions, for ``entries`` to read again."""
    return "".join(f'extern "C" {e.text} {{}}\n' for e in entries(source.learners).values())


def includes(text: str, folders: Sequence[Path]) -> list[Path]:
    """The headers that a source includes, and those that they include, where they are in one of these folders.

    Conditions of the preprocessor are not looked at: what is named in an ``#include`` counts.
    """
    found: dict[Path, None] = {}
    todo = [(text, list(folders))]
    while todo:
        given, places = todo.pop()
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', given, re.M):
            path = next((p.resolve() for p in (Path(f, name) for f in places) if p.is_file()), None)
            if path is not None and path not in found:
                found[path] = None
                todo.append((path.read_text(encoding="utf-8", errors="replace"), [path.parent, *folders]))
    return sorted(found)
