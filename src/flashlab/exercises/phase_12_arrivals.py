"""12.6: what the warps of a learner's text do when they arrive, read from a run in which each thread notes it."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import Source, built
from flashlab.check.cuda_index import KINDS
from flashlab.simt import SimtError
from flashlab.simt.source import blank_comments

_EVENTS = 32  # for each thread: how many there are, the events, and `last`
_COUNTS = ("atomicAdd", "atomicInc")
_OUT_OF_SIGHT = re.compile(r"\b(asm|atomicCAS|atomicMax|atomicOr|cuda::|goto)\b")
_FIRST = 1000  # from here on an event is what an atomic found in the counter
_WATCH = f"""
    int* const noted_ = told + ((row * splits + split) * COLUMNS + d) * {_EVENTS};
    auto note_ = [&](int event) {{ if (noted_[0] < {_EVENTS - 2}) noted_[++noted_[0]] = event; }};
    auto found_ = [&](auto x, auto n) {{ if (n) note_({_FIRST} + (int)x); return x; }};
#define __syncwarp(...) (note_('S'), (__syncwarp)(__VA_ARGS__))
#define __threadfence() (note_('F'), (__threadfence)())
#define __threadfence_system() (note_('F'), (__threadfence_system)())
""" + "".join(f"#define {name}(word, n) found_(({name})(word, n), n)\n" for name in _COUNTS)


class _Arrival(NamedTuple):
    """Of one warp: what each lane noted, and whether `last` was true in it."""

    events: list[list[int]]
    last: list[bool]

    @property
    def counted(self) -> list[tuple[int, int]]:
        """(lane, what it found in the counter), of each count."""
        return [(lane, e - _FIRST) for lane, seen in enumerate(self.events) for e in seen if e >= _FIRST]


@contextlib.contextmanager
def arrivals_told(whole: Source, given: Sequence[Any]) -> Iterator[None]:
    """Have what the warps did wrong when they arrived be told first, and below it what was found.

    given: the arguments of `run`.
    """
    try:
        yield
    except CheckFailed as failed:
        unordered = failed.diagnosis in (*KINDS, "merged-too-early")
        if said := said_of_arrivals(whole, given, unordered):
            both = f"{said}\n{failed.sentence}" if unordered else said
            raise CheckFailed(both, diagnosis=failed.diagnosis, case=failed.case) from None
        raise


def said_of_arrivals(whole: Source, given: Sequence[Any], unordered: bool) -> str:
    """What is wrong with the counts, with `last`, or (if unordered) with what orders the parts; "" where nothing is."""
    own = blank_comments(whole.text.split("// region: arrive")[1].split("// endregion")[0])
    if _OUT_OF_SIGHT.search(own):
        return ""
    if not re.search(r"\bcounter\b", own):
        return "nothing is counted: which of a row's blocks comes last is not known before they have come"
    if not re.search(r"\batomic\w+", own):
        return "the counter is read and then written: two warps may find the same number; atomicAdd does both in one"
    if not any(name in own for name in _COUNTS):
        return ""
    counters, rows, _, splits = given[5:9]
    counters.zero_()
    told = torch.zeros(rows, splits, 2, 32, _EVENTS, dtype=torch.int32)
    try:
        built(_watched(whole), check=False).launch("run", *given, told, echo=False, threads=1, timeout=2.0)
    except (CheckFailed, SimtError):
        return ""
    for warp in (0, 1):
        arrivals = [
            _Arrival([lane[1 : 1 + lane[0]] for lane in split], [bool(lane[-1]) for lane in split])
            for split in told[0, :, warp].tolist()
        ]
        said = _counts(arrivals) or _last(arrivals) or (_order(arrivals) if unordered else "")
        if said:
            return f"threads {32 * warp} to {32 * warp + 31} of a block: {said}" if warp else said
    return ""


def _watched(whole: Source) -> Source:
    text = whole.text.replace("int N, int splits", "int N, int splits, int* told")
    text = text.replace("counters, N, splits)", "counters, N, splits, told)")
    text = text.replace("// region: arrive\n", f"// region: arrive\n{_WATCH}", 1)
    return replace(whole, text=text.replace("// endregion", f"noted_[{_EVENTS - 1}] = last;\n// endregion", 1))


def _counts(warps: list[_Arrival]) -> str:
    """Whether each warp counts once, and finds a number of its own."""
    counts = [len(warp.counted) for warp in warps]
    found = sorted(old for warp in warps for _, old in warp.counted)
    if not any(counts):
        return "no warp counts: is there a lane in which atomicAdd is reached, and is its counter this one?"
    if (most := max(counts)) > 1:
        lanes = _lanes([lane for lane, _ in warps[counts.index(most)].counted])
        return f"a warp counts {most} times, in {lanes}: one lane counts for all"
    if min(counts) == 0:
        return f"{counts.count(0)} of {len(warps)} warps do not count: each does, whatever it has found"
    if found != [*range(len(warps))]:
        numbers = ", ".join(map(str, found))
        why = "it is put back to 0 before all have counted" if found.count(0) > 1 else "each adds 1"
        return f"the warps find {numbers} in the counter, and should find 0 to {len(warps) - 1}: {why}"
    return ""


def _last(warps: list[_Arrival]) -> str:
    """Whether `last` is true in all lanes of the warp that counted last, and in no other."""
    right = f"with {len(warps)} split{'s' * (len(warps) > 1)} the last is the one that finds {len(warps) - 1}"
    true = [warp for warp in warps if any(warp.last)]
    if not true:
        lane = next((lane for warp in warps for lane, old in warp.counted if old == len(warps) - 1), 0)
        said = (
            f"`last` is true in no warp, though lane {lane} of one found {len(warps) - 1}, as the last of {len(warps)}"
        )
        return f"{said}: is that the number that is compared, with splits - 1, and in every lane?"
    if len(true) > 1:
        return f"`last` is true in {len(true)} of {len(warps)} warps: {right} in the counter"
    (old,) = (old for _, old in true[0].counted)
    if old != len(warps) - 1:
        return f"`last` is true in the warp that finds {old} in the counter: {right}"
    if not all(true[0].last):
        lanes = _lanes([i for i, is_last in enumerate(true[0].last) if is_last])
        return f"`last` is true in {lanes} alone of the last warp: all of them merge, and have to hear what one found"
    return ""


def _order(warps: list[_Arrival]) -> str:
    """What is missing between the parts and the count, or between the count and the parts of the others.

    A fence orders what its lane has written, and what a barrier before it has shown to it: so one will do behind a
    barrier, or one of each lane before it. On the way back as well.
    """
    ((lane, _),) = warps[-1].counted
    events = warps[-1].events
    at = next(i for i, event in enumerate(events[lane]) if event >= _FIRST)
    before, behind = (_marks(x) for x in (events[lane][:at], events[lane][at + 1 :]))
    barriers = before.count("S")
    if "F" not in before:
        return (
            f"no __threadfence() stands before the count: lane {lane} counts, and nobody is shown what its warp wrote"
        )
    if not barriers:
        return f"no __syncwarp() stands before the count: lane {lane} counts while others may still store"
    others = [_marks(x).split("S") for i, x in enumerate(events) if i != lane]
    if "S" not in before[: before.rindex("F")] and not all("F" in "".join(x[:barriers]) for x in others):
        return (
            f"the fence of lane {lane} stands before the __syncwarp(): so it shows what lane {lane} wrote, and no other"
        )
    each = "S" in behind and all("F" in "".join(x[barriers + 1 :]) for x in (*others, _marks(events[lane]).split("S")))
    if "F" not in behind and not each:
        return f"no __threadfence() stands behind the count: lane {lane} may still see the parts as they were before"
    if not each and "S" not in behind[behind.index("F") :]:
        return f"no __syncwarp() stands behind the second fence: what lane {lane} sees, the others may not see yet"
    return ""


def _marks(events: Sequence[int]) -> str:
    return "".join(chr(event) for event in events if event < _FIRST)


def _lanes(lanes: list[int]) -> str:
    if len(lanes) == 32:
        return "all lanes"
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"{len(lanes)} lanes, {lanes[0]} to {lanes[-1]}"
