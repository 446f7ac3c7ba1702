"""Named parts of a source file: what a lecture shows of it, and compares with the same part of another file.

    // region: copy a tile
    ...
    // endregion

In Python `# region: name` and `# endregion`. Any indent; regions may nest; a name is used once in a file. The marker
lines are for the tools: nothing that is shown holds them, and the lines that are left keep the numbers of the file.
"""

import re
from dataclasses import dataclass

_BEGIN = re.compile(r"\s*(?://|#)\s*region:\s*(?P<name>.*?)\s*")
_END = re.compile(r"\s*(?://|#)\s*endregion\s*")


@dataclass(frozen=True)
class Region:
    """The lines first to last of a file, counted from 1, the markers left out."""

    first: int
    last: int


def regions(text: str) -> dict[str, Region]:
    """The regions of a source, by name, in the order in which they begin.

    Raises:
        ValueError: a region without a name, without an end or without a line, an end without a region, a name used
            twice; the message has the line.
    """
    found: dict[str, Region] = {}
    open_regions: list[tuple[str, int]] = []
    names: dict[str, int] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if begin := _BEGIN.fullmatch(line):
            name = begin["name"]
            if not name:
                raise ValueError(f"line {number}: a region needs a name, as in '// region: copy a tile'")
            if name in names:
                raise ValueError(f"line {number}: the region {name!r} has begun before, on line {names[name]}")
            names[name] = number
            open_regions.append((name, number))
        elif _END.fullmatch(line):
            if not open_regions:
                raise ValueError(f"line {number}: an endregion without a region before it")
            name, start = open_regions.pop()
            inside = [n for n in range(start + 1, number) if not _is_marker(lines[n - 1])]
            if not any(lines[n - 1].strip() for n in inside):
                raise ValueError(f"line {start}: the region {name!r} holds no line")
            found[name] = Region(inside[0], inside[-1])
    if open_regions:
        name, start = open_regions[-1]
        raise ValueError(f"line {start}: the region {name!r} has no endregion")
    return {name: found[name] for name in names}


def numbered(text: str, name: str | None = None) -> list[tuple[int, str]]:
    """The lines of a region, or of the whole source, each with its number in the file; no markers.

    Raises ValueError as `regions`; KeyError, with the names there are, where the source has no such region.
    """
    lines = text.splitlines()
    part = Region(1, len(lines))
    if name is not None:
        there = regions(text)
        if name not in there:
            listed = ", ".join(map(repr, there)) or "none"
            raise KeyError(f"the source has no region {name!r}; its regions: {listed}")
        part = there[name]
    kept = list(enumerate(lines, 1))[part.first - 1 : part.last]
    return [(number, line) for number, line in kept if not _is_marker(line)]


def region_text(text: str, name: str) -> str:
    """The text of one region, without the markers of those inside it. Raises as `numbered`."""
    return "\n".join(line for _, line in numbered(text, name)) + "\n"


def replace(text: str, name: str, new: str) -> tuple[str, Region]:
    """The source with the lines of one region replaced, those of the regions inside it too; and where the new ones are.

    Raises as `numbered`, and ValueError where the new text has no line.
    """
    region_text(text, name)
    lines, own = text.splitlines(), new.strip("\n").splitlines()
    if not own:
        raise ValueError(f"nothing to put in the place of the region {name!r}")
    first, last = _inside(lines, name)
    return "\n".join([*lines[:first], *own, *lines[last:]]) + "\n", Region(first + 1, first + len(own))


def edited(text: str, edits: str) -> str:
    """The source with its head, and some of its regions, as another one has them: all that an exhibit's file holds.

    What the source marks as new is not new in the other.
    Raises KeyError: a region of the edits is not in the source. Raises ValueError as `regions`.
    """
    lines, found = edits.splitlines(), regions(edits)
    text = re.sub(r"// New: ", "// ", re.sub(r" +// New$", "", text, flags=re.MULTILINE))
    head, old = (re.search(r"^ *// region:", x, re.MULTILINE) for x in (edits, text))
    text = edits[: head.start() if head else None] + text[old.start() if old else 0 :]
    for name, region in found.items():
        if not any(r.first < region.first <= region.last <= r.last for r in found.values()):
            first, last = _inside(lines, name)
            text, _ = replace(text, name, "\n".join(lines[first:last]))
    return text


def _inside(lines: list[str], name: str) -> tuple[int, int]:
    """Where the lines of a region begin and end, the markers inside it with them."""
    first = next(i for i, line in enumerate(lines) if (m := _BEGIN.fullmatch(line)) and m["name"] == name) + 1
    last, depth = first, 1
    while depth:
        depth += bool(_BEGIN.fullmatch(lines[last])) - bool(_END.fullmatch(lines[last]))
        last += 1
    return first, last - 1


def _is_marker(line: str) -> bool:
    return bool(_BEGIN.fullmatch(line) or _END.fullmatch(line))
