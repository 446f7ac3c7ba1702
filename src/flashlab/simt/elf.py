"""The symbol table of an ELF object: the ``__shared__`` arrays that it defines, and those it wants given."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

_SYMTAB, _TLS = 2, 6


@dataclass(frozen=True)
class Symbol:
    """A thread-local variable, which is what the emulator makes of ``__shared__``."""

    name: str
    offset: int
    size: int
    defined: bool

    @property
    def array(self) -> str:
        """The variable's own name: ``tile`` of the mangled ``_ZZ9transposePfE4tile``."""
        for match in re.finditer(r"[EN](\d+)(?=[A-Za-z_])", self.name):
            length, rest = int(match[1]), self.name[match.end() :]
            if re.fullmatch(r"(E?_\d+|E)?(\.\d+)?", rest[length:]):
                return rest[:length]
        return re.sub(r"\.\d+$", "", self.name)


def thread_local_symbols(path: Path | str) -> list[Symbol]:
    """The thread-local symbols of a 64-bit little-endian ELF file, by offset.

    Raises:
        ValueError: the file is no such ELF file.
    """
    data = Path(path).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    sections_at, section_bytes, sections = (
        *struct.unpack_from("<Q", data, 40),
        *struct.unpack_from("<HH", data, 58),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * section_bytes) for i in range(sections)]
    found = []
    for _, kind, _, _, offset, size, link, _, _, entry in headers:
        if kind != _SYMTAB:
            continue
        names = headers[link][4]
        for at in range(offset, offset + size, entry):
            name, info, _, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == _TLS:
                text = data[names + name : data.index(b"\0", names + name)].decode()
                found.append(Symbol(text, value, length, section != 0))
    return sorted(found, key=lambda s: (s.offset, s.name))
