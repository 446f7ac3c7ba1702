"""The symbol table of an ELF object: the ``__shared__`` arrays that it defines, and those it wants given."""

import dataclasses
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SYMTAB, _NOBITS = 2, 8  # sections
_OBJECT, _FUNC, _TLS = 1, 2, 6  # symbols
_TLS_FLAG = 0x400  # of a section


@dataclass(frozen=True)
class Symbol:
    """A thread-local variable, which is what the emulator makes of ``__shared__``."""

    name: str
    offset: int
    size: int
    defined: bool
    kernel: int = 0  # the address of the kernel whose own it is; 0: of a function that several may call
    align: int = 0  # of an array of shared memory: the alignment that it is declared with, in bytes; 0: not known

    def owned(self, kernels: dict[str, int]) -> "Symbol":
        """With its kernel, of these by mangled name."""
        for name, at in kernels.items():
            if self.name.startswith(f"_ZZ{name[2:]}E"):
                return dataclasses.replace(self, kernel=at)
        return self

    @property
    def array(self) -> str:
        """The variable's own name: ``tile`` of the mangled ``_ZZ9transposePfE4tile``."""
        for match in re.finditer(r"[EN](\d+)(?=[A-Za-z_])", self.name):
            length, rest = int(match[1]), self.name[match.end() :]
            if re.fullmatch(r"(E?_(\d|_\d+_)|E)?(\.\d+)?", rest[length:]):
                return rest[:length]
        return re.sub(r"\.\d+$", "", self.name)


def _sections(data: bytes, path: object) -> list[tuple]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    at, size, count = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58))
    return [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]


def _table(data: bytes | bytearray, sections: list[tuple], wanted: int) -> Iterator[tuple[int, str, int, int, int]]:
    """The symbols of a kind: where the entry is; name, number of its section (0: not defined), value, size."""
    for _, kind, _, _, offset, size, link, _, _, entry in sections:
        if kind != _SYMTAB:
            continue
        for at in range(offset, offset + size // entry * entry, entry):
            name, info, _, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == wanted:
                begin = sections[link][4] + name
                yield at, data[begin : data.index(b"\0", begin)].decode(), section, value, length


def _symbols(path: Path | str, wanted: int) -> list[Symbol]:
    data = Path(path).read_bytes()
    table = _table(data, _sections(data, path), wanted)
    found = (Symbol(name, value, length, section != 0) for _, name, section, value, length in table)
    return sorted(found, key=lambda s: (s.offset, s.name))


def thread_local_symbols(path: Path | str) -> list[Symbol]:
    """The thread-local symbols of a 64-bit little-endian ELF file, by offset. Raises ValueError for another file."""
    return _symbols(path, _TLS)


def functions(path: Path | str) -> dict[str, int]:
    """The functions that a file defines: mangled name -> address."""
    return {s.name: s.offset for s in _symbols(path, _FUNC) if s.defined}


def variables(path: Path | str) -> list[Symbol]:
    """The variables that a file defines, by address."""
    return [s for s in _symbols(path, _OBJECT) if s.defined and s.size]


def base_name(mangled: str) -> str:
    """``scale`` of ``_ZN4deep5scaleIfEEvPT_``; nothing where the name is not a function's."""
    at, last = 2, ""
    if not mangled.startswith("_Z"):
        return mangled
    if mangled[at : at + 1] == "N":
        at += 1
    while number := re.match(r"[KVL]*(\d+)", mangled[at:]):
        begin = at + number.end()
        at = begin + int(number[1])
        last = mangled[begin:at]
    return last


def place_thread_local(path: Path | str, within: int, extra: int) -> dict[str, int]:
    """Gives each thread-local variable of an object, in a section of its own, the alignment that it asks for, no more.

    A variable of alignment A then lies A bytes beyond a multiple of ``within``, whatever the linker does; those of this
    alignment, or a larger one, stay as they are. ``extra`` bytes are kept free behind each. The object is changed.
    Returns name -> alignment, in bytes.
    """
    data = bytearray(Path(path).read_bytes())
    (at,), (size, _) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    sections = _sections(bytes(data), path)
    found: dict[str, int] = {}
    shifts: dict[int, int] = {}
    for entry, name, number, value, _ in _table(data, sections, _TLS):
        if number:
            align = sections[number][8]
            found[name], shifts[number] = align, align if align < within else 0
            struct.pack_into("<Q", data, entry + 8, value + shifts[number])
    for i, (_, kind, flags, _, _, length, _, _, align, _) in enumerate(sections):
        if kind == _NOBITS and flags & _TLS_FLAG and length:
            struct.pack_into("<Q", data, at + i * size + 32, length + shifts.get(i, 0) + extra)
            struct.pack_into("<Q", data, at + i * size + 48, max(align, within))
    Path(path).write_bytes(data)
    return found
