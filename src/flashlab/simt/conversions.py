"""Numbers that lose something where they are stored, as g++ sees it: 64 bits into 32, a fraction into an integer.

No run shows an offset that wraps around, unless a tensor has more than 2^31 elements.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.simt import source
from flashlab.simt.build import OWN, _run, find_compiler, macros, read_ahead, searched

_WIDE = re.compile(r"\b(long int|long long int|long unsigned int|long long unsigned int)\b")
_FRACTION = re.compile(r"\b(float|double)\b")
_WHOLE = re.compile(r"\b(int|unsigned int|short int|short unsigned int|long int|long unsigned int|char)\b")


class Conversion(NamedTuple):
    """`expression` in `line`. kind: "offset", a product of 64 bits into 32; "fraction", a float into an integer."""

    line: int
    kind: str
    expression: str


def conversions(
    text: str, *, name: str, directory: Path | None = None, defines: Mapping[str, Any] | None = None,
    include_dirs: Iterable[Path] = (),
) -> list[Conversion]:  # fmt: skip
    """Those of a source's own lines, in their order. Nothing where g++ does not take it.

    Args:
        text, name, directory, defines, include_dirs: as of `flashlab.simt.build.build`.
    """
    cxx = find_compiler()
    language = ["-std=c++17", *cxx.kernel, *cxx.fast]
    flags = [*language, *macros(defines), *searched(directory, include_dirs)]
    places = [*([Path(directory)] if directory else []), *map(Path, include_dirs)]
    for known in (read_ahead(cxx, language, text, places), []):  # as in build.py: without it, where it cannot be used
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            printed = _run([cxx.path, "-x", "c++", *flags, *known, "-w", "-E", "-"], work, f'#line 1 "{name}"\n{text}')
            if printed.returncode:
                return []
            rewritten = source.Preprocessed(printed.stdout, (*map(str, OWN), *known[-1:])).rewritten(inline_all=False)
            (work / "kernel.ii").write_text(rewritten)
            options = ["-fsyntax-only", "-fdiagnostics-format=json", "-Wconversion", "-Wno-sign-conversion"]
            said = _run([cxx.path, *flags, *options, "kernel.ii"], work)
        if not said.returncode:
            break
    try:
        told = json.loads(said.stderr.splitlines()[0])
    except (IndexError, ValueError):
        return []
    lines = _own_lines(rewritten, name)
    found = (_read(diagnostic, lines, name) for diagnostic in told)
    return sorted({x for x in found if x is not None})


def _own_lines(preprocessed: str, name: str) -> dict[int, str]:
    """The preprocessed lines of the file `name`, by number."""
    lines: dict[int, str] = {}
    file, number = "", 0
    for line in preprocessed.splitlines():
        marker = re.match(r'#(?:line)? (\d+) "(.*?)"', line)
        if marker:
            number, file = int(marker[1]), marker[2]
            continue
        if file == name:
            lines[number] = line
        number += 1
    return lines


def _read(diagnostic: Mapping[str, Any], lines: Mapping[int, str], name: str) -> Conversion | None:
    types = re.search(r"conversion from (.*) to (.*) may change", diagnostic.get("message", ""))
    spans = diagnostic.get("locations") or []
    if types is None or not spans:
        return None
    start, end = spans[0].get("start", spans[0]["caret"]), spans[0].get("finish", spans[0]["caret"])
    line = start["line"]
    if start.get("file") != name or end["line"] != line or line not in lines:
        return None
    expression = lines[line].encode()[start["byte-column"] - 1 : end["byte-column"]].decode(errors="replace").strip()
    of, to = types[1], types[2]
    narrow = not _WIDE.search(to) and _WHOLE.search(to)
    if _WIDE.search(of) and "*" in expression and narrow:
        return Conversion(line, "offset", expression)
    if _FRACTION.search(of) and _WHOLE.search(to):
        return Conversion(line, "fraction", expression)
    return None
