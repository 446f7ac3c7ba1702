"""From addresses in a compiled module to lines of the source it came from."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from flashlab.simt.build import OWN


@dataclass(frozen=True)
class Place:
    """A line of source, and the lines it was inlined into, innermost first."""

    file: str
    line: int
    function: str = ""
    callers: tuple["Place", ...] = ()

    def __str__(self) -> str:
        return f"line {self.line}"


class Resolver:
    """Source lines of a library's addresses, asked of ``addr2line`` many at a time and remembered."""

    def __init__(self, library: str):
        self.library = library
        self.known: dict[int, Place | None] = {0: None}
        self.functions: dict[int, str] = {}
        self.note = "" if shutil.which("addr2line") else (
            "source lines are unknown, because addr2line was not found (on Debian: apt-get install binutils)"
        )  # fmt: skip

    def learn(self, addresses: Iterable[int]) -> None:
        todo = sorted({a for a in addresses if a not in self.known})
        if not todo or self.note:
            return
        command = ["addr2line", "-a", "-i", "-f", "-C", "-e", self.library]
        text = "\n".join(hex(a) for a in todo)
        output = subprocess.run(command, input=text, capture_output=True, text=True).stdout.splitlines()
        at = 0
        while at < len(output):
            address = int(output[at], 16)
            at += 1
            frames = []
            while at + 1 < len(output) and not re.fullmatch(r"0x[0-9a-f]+", output[at]):
                function, where = output[at], output[at + 1]
                file, _, line = where.split(" (")[0].rpartition(":")
                frames.append((file, int(line) if line.isdigit() else 0, function))
                at += 2
            self.functions[address] = frames[0][2] if frames else ""
            emulator = (*map(str, OWN), "/usr/", "??")
            places = [Place(_short(f), n, fn) for f, n, fn in frames if f and n and not f.startswith(emulator)]
            self.known[address] = (
                Place(places[0].file, places[0].line, places[0].function, tuple(places[1:])) if places else None
            )

    def place(self, address: int) -> Place | None:
        return self.known.get(address)


def _short(file: str) -> str:
    """Without the directory of the build, which is gone by now."""
    return re.sub(r"^.*/build-[^/]+/", "", file)


resolver = functools.lru_cache(maxsize=64)(Resolver)  # a library's, with all that it has learnt so far
