"""Exercise 10.9: a trace to be read, of a step that is simulated, so that what a change would gain can be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashlab.check import CheckFailed, expect
from flashlab.exercises.registry import exercise

_NEAR = 0.005  # of the time: what a right answer may be off by
_COPY_BACK = 20.0  # microseconds from the end of the work that is waited for until the CPU goes on


class _Op(NamedTuple):
    """An operation: microseconds on the CPU, those of the kernel that it launches, and whether it waits for the GPU."""

    name: str
    cpu: float
    kernel: float = 0.0
    waits: bool = False


_LAYER = (
    _Op("rms_norm", 11, 7), _Op("aten::mm", 14, 34), _Op("rope", 13, 6), _Op("flash_attention", 18, 41),
    _Op("aten::mm", 14, 24), _Op("aten::add", 9, 6), _Op("keep_residual", 10, 9), _Op("all_finite", 12, 4, waits=True),
    _Op("rms_norm", 11, 7), _Op("aten::mm", 14, 52), _Op("silu_mul", 10, 9), _Op("aten::mm", 14, 30),
    _Op("aten::add", 9, 6), _Op("statistics", 55),
)  # fmt: skip
_END = (
    _Op("aten::mm", 14, 900), _Op("cross_entropy", 20, 60), _Op("next_batch", 700), _Op("loss.item", 10, 2, waits=True),
)  # fmt: skip
_LAYERS = 8
OPTIONAL = {
    "keep_residual": "copies what a layer has added, for a figure",
    "all_finite": "raises if there is a NaN or an infinity",
    "statistics": "writes a layer's times into a list, on the CPU",
    "next_batch": "reads and cuts the next texts, on the CPU; another process could do it",
}
"""The operations that the step can do without, and what they are there for."""


def _bars(without: str | None = None, layers: int = _LAYERS) -> list[tuple[str, str, float, float]]:
    """("CPU" or "GPU", name, begin, length) of each operation and each kernel."""
    bars, now, free = [], 0.0, 0.0
    for op in (*layers * _LAYER, *_END):
        if op.name == without:
            continue
        begin = now
        now += op.cpu
        if op.kernel:
            start = max(now, free)
            free = start + op.kernel
            bars.append(("GPU", op.name, start, op.kernel))
        if op.waits:
            now = max(now, free) + _COPY_BACK
        bars.append(("CPU", op.name, begin, now - begin))
    return bars


def _milliseconds(without: str | None = None, layers: int = _LAYERS) -> float:
    return max(begin + length for _, _, begin, length in _bars(without, layers)) / 1000


def trace(layers: int = _LAYERS) -> dict[str, Any]:
    """The step as a Chrome trace, as `torch.profiler` writes it."""
    kinds = {"CPU": "cpu_op", "GPU": "kernel"}
    return {
        "traceEvents": [
            {"ph": "X", "cat": kinds[unit], "name": name, "pid": 0, "tid": unit, "ts": begin, "dur": length}
            for unit, name, begin, length in _bars(layers=layers)
        ]
    }


def _time_of(unit: str, name: str) -> float:
    """Milliseconds of an operation's bars on one line."""
    return sum(length for u, n, _, length in _bars() if (u, n) == (unit, name)) / 1000


def _busy_during(name: str) -> float:
    """The part of an operation's time on the CPU in which some kernel runs."""
    kernels = [(begin, begin + length) for unit, _, begin, length in _bars() if unit == "GPU"]
    own = [(begin, begin + length) for unit, n, begin, length in _bars() if (unit, n) == ("CPU", name)]
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in own for c, d in kernels)
    return both / sum(b - a for a, b in own)


def _answer(first_out: Callable[..., Any], layers: int) -> tuple[Any, float]:
    """What is found in the trace of so many layers. Raises CheckFailed where it is not a name and a number."""
    from flashlab.figures.profiles import operations  # matplotlib comes with it

    result = first_out(operations(trace(layers)))
    pair = isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], (int, float))
    expect(pair, "return two things: a name, and a number of milliseconds", diagnosis="wrong-type")
    return result[0], result[1]


@exercise(
    "10.9",
    title="Who keeps the GPU waiting?",
    minutes=40,
    difficulty="Stretch",
    hints=[
        "Look at the GPU's line, and not at the length of bars: where are its gaps? What runs on the CPU just before "
        "each of them, and does the gap end when that ends?",
        "An operation that takes long on the CPU costs nothing while the GPU has work. For each of the four: how much "
        "of its time is the GPU idle? Beware of an operation that is long because it waits.",
        "Without the one that waits in every layer the CPU runs ahead, and the GPU has no gaps. Then the step takes as "
        "long as its kernels, one behind the other, and what stands before the first and behind the last.",
    ],
)
def first_to_go(first_out: Callable[..., tuple[str, float]]) -> str:
    first, milliseconds = _answer(first_out, _LAYERS)
    named = f"the name should be one of {', '.join(OPTIONAL)}, it is {first!r:.40}"
    expect(first in tuple(OPTIONAL), named, diagnosis="wrong-word")
    whole, gone = _milliseconds(), {name: _milliseconds(name) for name in OPTIONAL}
    best = min(gone, key=lambda name: gone[name])
    if first != best:
        said = f"without {first} the step takes {gone[first]:.2f} ms, with it {whole:.2f}: another one gains more"
        why = f"while {first} is on the CPU, the GPU works in {_busy_during(first):.0%} of the time"
        why += f"; its kernels take {_time_of('GPU', first):.2f} ms"
        raise CheckFailed(f"{said}.\n{why}", diagnosis="not-the-first")
    wanted = gone[best]
    if abs(milliseconds - wanted) > _NEAR * wanted:
        ways = {
            "that is the time as it is now": whole,
            f"that is the step less all that {best} takes on the CPU: part of it is waiting for kernels that remain":
                whole - _time_of("CPU", best),
            f"that is the step less {best}'s kernels: the gaps go too": whole - _time_of("GPU", best),
        }  # fmt: skip
        near = min(ways, key=lambda said: abs(milliseconds - ways[said]))
        unit = "are they microseconds?" if abs(milliseconds / 1000 - wanted) < _NEAR * wanted else ""
        what = unit or "what does the GPU's line look like without it? Redraw it on paper"
        if abs(milliseconds - ways[near]) < 0.01 * wanted:
            what = near
        raise CheckFailed(
            f"{best} is right. The step takes {whole:.2f} ms now, and {milliseconds:.4g} ms is not what it takes "
            f"without it: {what}",
            diagnosis="wrong-time",
        )
    shorter, left = _answer(first_out, 3), _milliseconds(best, 3)
    same = shorter[0] == best and abs(shorter[1] - left) <= _NEAR * left
    said = f"right for this step; one of three layers would take {left:.2f} ms, and of it first_out(bars) returns "
    expect(same, f"{said}{shorter!r:.60}: compute it from the bars", diagnosis="wrong-for-another-step")
    return f"{whole:.2f} ms become {wanted:.2f}, {whole / wanted:.2f} times as fast"
