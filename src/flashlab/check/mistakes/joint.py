"""Several mutants of one kernel in one source, so that they are compiled once: a number says which one runs.

    for source, number in joint(mutants): examine(source, sms=number * CHOICE + 132)

An edit of whole statements becomes ``if (chosen == 3) { new } else { old }``, one of an expression
``(chosen == 3 ? new : old)``; lines keep their numbers. The number comes with the multiprocessors of the Problem.
What cannot be joined (other macros, edits that overlap, half a block) is compiled alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flashlab.check.cuda_answer import Source
from flashlab.check.mistakes.series import Mutant
from flashlab.kernels.series import whole

CHOICE = 1000
_FORWARD = 'extern "C" int forward(const Problem* p, void* stream) {'


@dataclass(frozen=True)
class Chosen(Source):
    """A joint source, of which sentences quote the lines of one mutant.

    Attributes:
        shown: the mutant's own text.
    """

    shown: str = field(default="", kw_only=True)

    def place(self, line: int) -> str:
        return Source(self.shown, self.name).place(line)


def joint(mutants: Iterable[Mutant]) -> dict[str, tuple[Source, int]]:
    """The sources by the name of the mutant, and its number; 0 where it is compiled alone.

    Raises ValueError where an edit no longer fits its file.
    """
    groups: dict[str, list[Mutant]] = {}
    for m in mutants:
        m.source()  # says what does not fit
        macros = {k: v for k, v in m.options.items() if k not in ("probes", "max_seq", "sms")}
        groups.setdefault(f"{m.file} {sorted(macros.items())}", []).append(m)
    found: dict[str, tuple[Source, int]] = {}
    for group in groups.values():
        together, alone = _split(group)
        text = _joined(whole(group[0].file), together)
        for m in group:
            number = 0 if m in alone else together.index(m) + 1
            shown = _padded(m)
            found[m.name] = (Chosen(text, m.file, shown=shown) if number else Source(shown, m.file), number)
    return found


def _split(group: Sequence[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """Those that can be joined, and the others."""
    together: list[Mutant] = []
    alone: list[Mutant] = []
    taken: set[tuple[int, int]] = set()
    for m in group:
        spans = {_span(whole(m.file), old) for old, _ in m.edits}
        free = all(s in taken or all(s[1] <= t[0] or t[1] <= s[0] for t in taken) for s in spans)
        fits = all(_balanced(old) and _balanced(new) for old, new in m.edits)
        (together if free and fits else alone).append(m)
        if free and fits:
            taken |= spans
    return (together, alone) if len(together) > 1 else ([], list(group))


def _span(text: str, old: str) -> tuple[int, int]:
    """Where it stands; to the end of the line, where it ends within a comment."""
    begin = text.index(old)
    end = begin + len(old)
    if "//" in old.rsplit("\n", 1)[-1]:
        end = text.index("\n", end)
    return begin, end


def _bare(text: str) -> str:
    """Without comments, in one line."""
    return " ".join(re.sub(r"//[^\n]*", "", text).split())


def _balanced(text: str) -> bool:
    code = _bare(text)
    return all(code.count(a) == code.count(b) for a, b in ("()", "[]", "{}"))


def _padded(m: Mutant) -> str:
    """The mutant's text, its lines with the numbers that they have in the step."""
    text = whole(m.file)
    for old, new in m.edits:
        begin, end = _span(text, old)
        rest = text[begin + len(old) : end]
        text = text[:begin] + new + rest + "\n" * (old.count("\n") - new.count("\n")) + text[end:]
    return text


def _joined(text: str, mutants: Sequence[Mutant]) -> str:
    edits: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for number, m in enumerate(mutants, 1):
        for old, new in m.edits:
            edits.setdefault(_span(text, old), []).append((number, _bare(new)))
    for (begin, end), choices in sorted(edits.items(), reverse=True):
        old = text[begin:end]
        if _bare(old).endswith(";"):
            joined = "".join(f"if (chosen == {n}) {{ {new} }} else " for n, new in choices)
            joined = f"{{ {joined}{{ {_bare(old)} }} }}"
        else:
            joined = "".join(f"chosen == {n} ? {new} : " for n, new in choices)
            joined = f"({joined}{_bare(old)})"
        text = text[:begin] + joined + "\n" * old.count("\n") + text[end:]
    text = re.sub(r"\bp(->|\.)sms\b", rf"(p\1sms % {CHOICE})", text)
    return "static int chosen; " + text.replace(_FORWARD, f"{_FORWARD} chosen = p->sms / {CHOICE};")
