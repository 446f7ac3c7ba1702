"""Exercise 10.9: a trace to be read, of a step that is simulated, so that what a change would gain can be computed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from flashlab.check.lookup import Row
from flashlab.exercises.rule import RULES, rule

_BACK = 20.0  # microseconds from the end of the work that is waited for until the CPU goes on
_CLEAR = 0.98  # of the time without any other operation: what the best one leaves


class Op(NamedTuple):
    """An operation: microseconds on the CPU, and those of the kernel that it launches."""

    name: str
    cpu: float
    kernel: float = 0.0


_LAYER = (
    Op("rms_norm", 11, 7), Op("aten::mm", 14, 34), Op("rope", 13, 6), Op("flash_attention", 18, 41),
    Op("aten::mm", 14, 24), Op("aten::add", 9, 6), Op("keep_residual", 10, 9), Op("all_finite", 0, 4),
    Op("rms_norm", 11, 7), Op("aten::mm", 14, 52), Op("silu_mul", 10, 9), Op("aten::mm", 14, 30),
    Op("aten::add", 9, 6), Op("statistics", 55),
)  # fmt: skip
_END = (Op("aten::mm", 14, 900), Op("cross_entropy", 20, 60), Op("next_batch", 700), Op("loss.item", 0, 2))
OPTIONAL = {
    "keep_residual": "copies what a layer has added, for a figure",
    "all_finite": "raises if there is a NaN or an infinity",
    "statistics": "writes a layer's times into a list, on the CPU",
    "next_batch": "reads and cuts the next texts, on the CPU; another process could do it",
}
"""The operations that the step can do without, and what they are there for."""

Step = tuple[Op, ...]


def _step(layers: int = 8, **other: tuple[float, float]) -> Step:
    """The step with so many layers. other: the times of an operation, where it has others."""
    return tuple(Op(op.name, *other.get(op.name, op[1:])) for op in (*layers * _LAYER, *_END))


def _bars(step: Step) -> list[tuple[str, str, float, float]]:
    """("CPU" or "GPU", name, begin, length) of each operation and each kernel."""
    bars, now, free = [], 0.0, 0.0
    for name, cpu, kernel in step:
        begin, now = now, now + cpu
        if kernel:
            bars.append(("GPU", name, max(now, free), kernel))
            free = max(now, free) + kernel
        if name in ("all_finite", "loss.item"):
            now = free + _BACK
        bars.append(("CPU", name, begin, now - begin))
    return bars


def _trace(step: Step) -> dict[str, Any]:
    kinds = {"CPU": "cpu_op", "GPU": "kernel"}
    return {
        "traceEvents": [
            {"ph": "X", "cat": kinds[unit], "name": name, "pid": 0, "tid": unit, "ts": begin, "dur": length}
            for unit, name, begin, length in _bars(step)
        ]
    }


def trace() -> dict[str, Any]:
    """The step as a Chrome trace, as `torch.profiler` writes it."""
    return _trace(_step())


@functools.cache
def _seen(step: Step) -> tuple[Any, ...]:
    from flashlab.figures.profiles import operations  # matplotlib comes with it

    return tuple(operations(_trace(step)))


def _without(step: Step) -> dict[str, float]:
    """Milliseconds of the step without each of the four."""
    steps = {out: tuple(op for op in step if op.name != out) for out in OPTIONAL}
    return {out: max(begin + length for _, _, begin, length in _bars(left)) / 1000 for out, left in steps.items()}


def _drawn(r: random.Random) -> Step:
    """A step of which one of the four is clearly the first to go."""
    while True:
        step = _step(
            r.randint(1, 6), statistics=(r.choice((20, 55, 300)), 0), next_batch=(r.choice((100, 700, 2500)), 0),
            keep_residual=(10, r.choice((9, 40, 120))), rope=(13, r.randint(4, 30)),
            flash_attention=(18, r.randint(10, 90)),
        )  # fmt: skip
        first, second, *_ = sorted(_without(step).values())
        if first < _CLEAR * second:
            return step


def _shown(step: Step) -> str:
    longest = {op.name: op for op in step}
    parts = [f"{name} {longest[name].cpu or longest[name].kernel:g} µs" for name in OPTIONAL]
    return f"a step of {sum(op.name == 'rope' for op in step)} layers: {', '.join(parts)}"


def _as_chosen(first_out: Callable[..., Any]) -> tuple[str, str] | None:
    """Of an answer that no slip explains: how the operation is chosen, if all names say so."""
    steps = [step for (step,) in RULES["10.9"].tried]
    got = [tuple(first_out([*_seen(step)])) for step in steps]
    if len({name for name, _ in got}) == 1:
        return "wrong-for-another-step", f"name is {got[0][0]!r} for every step: which one gains most differs"
    longest = [max(OPTIONAL, key=lambda name, step=step: sum(  # type: ignore[misc]
        length for unit, n, _, length in _seen(step) if (unit, n) == ("CPU", name))) for step in steps]  # fmt: skip
    if [name for name, _ in got] == longest:
        return "longest-bar", "name is what takes longest on the CPU: it may cost nothing, where the GPU has more to do"
    return None


_WAITED = "            if waits:\n                now = free + 20\n"
_GONE = "                continue\n            waits"
_ENDS = "max(begin + length for _, _, begin, length in bars) / 1000"


@rule(
    "10.9",
    title="Who keeps the GPU waiting?", minutes=40, difficulty="Stretch",
    hints=[
        "Look at the GPU's line, and not at the length of bars: where are its gaps? What runs on the CPU just before "
        "each of them, and does the gap end when that ends?",
        "An operation that takes long on the CPU costs nothing while the GPU has work. Beware of one that is long "
        "because it waits. Which one that is differs from step to step: run the step again without each of the four.",
        "Two clocks, `now` of the CPU and `free` of the GPU. For each bar on the CPU: now += length; with a kernel, "
        "free = max(now, free) + the kernel's length. Of one that waits: not the first, but now = free + 20 at last.",
    ],
    returns="name, milliseconds",
    inputs=[
        (_step(),), (_step(3),), (_step(5, statistics=(300, 0)),), (_step(2, next_batch=(2500, 0)),),
        (_step(4, keep_residual=(10, 120)),),
    ],
    draw=lambda r: (_drawn(r),),
    called=lambda fn, step: fn([*_seen(step)]),
    shown=_shown,
    tol=0.005,
    trials=300,
    tries=0,  # two slips of a simulation give too much by chance
    words={"free": "the end of the last kernel", "now": "the CPU's time", "out": "the operation", "waits": "waits"},
    notes={
        "20": "the result takes 20 µs back to the CPU", "free": "a kernel begins when the one before it is done",
        "now": "the CPU goes on until it has the loss", "1000": "bars are in microseconds",
    },
    also=[[("max(now, free) / 1000", "now / 1000")]],
    rows=[
        *(Row("bars-unchanged", "the CPU's bars keep their lengths, or one length is taken off the end: those of "
              "all_finite and loss.item get shorter or longer, as they wait for the GPU",
              [("now = free + 20", new), ("max(now, free) / 1000", end)])
          for new, end in (("now += length", "now / 1000"), ("now += length", "max(now, free) / 1000"),
                           ("now = max(free, now + length)", "now / 1000"))),
        Row("launched-too-late", "all_finite and loss.item launch at the end of their bar: it is its beginning",
            [("if not waits:", "if True:")]),
        Row("launched-too-early", "kernels are launched at the beginning of a bar: that is so of the two operations "
            "that wait, and the others launch at the end", [
            ("            if not waits:\n                now += length\n", ""),
            (_WAITED, "            now = free + 20 if waits else now + length\n")]),
        Row("way-back-as-a-bar", "the whole bar of an operation that waits comes after its kernel: 20 µs do",
            [("free + 20", "free + length")]),
        Row("all-at-once", "all four operations are taken out at once: it is one of them",
            [("name == out", "name in OPTIONAL")]),
        Row("kernels-alone", "the operation's kernels are taken out, and not its time on the CPU",
            [(_GONE, f"                now += length\n{_GONE}")]),
        Row("kernels-stay", "the operation's time on the CPU is taken out, and not its kernels",
            [(_GONE, f"                free = max(now, free) + kernel\n{_GONE}")]),
        Row("nothing-gained", "without any of the four the step takes as long as with it: kernels are kept where "
            "they were, or nothing is taken out", [("name == out", "False")]),
        Row("no-queue", "a kernel begins when it is launched: it waits until the one before it is done", [
            ("free = max(now, free) + kernel", "free = now + kernel if kernel else free")]),
        Row("length-by-name", "kernels of one name are taken to be equally long: each has a bar of its own",
            [("next(rest)[1] if name in launching else 0.0", "dict(kernels).get(name, 0.0)")]),
        Row("once-taken-out", "the operation is taken out once: the step runs it in every layer", [
            ("now = free = 0.0", "gone = now = free = 0.0"),
            ("            if name == out:\n", "            if name == out and not gone:\n                gone = 1\n")]),
        Row("sums-of-bars", "milliseconds is the larger of two sums, of the CPU's bars and of the GPU's: each waits "
            "for the other at times", [
            ("max(now, free) / 1000", "max(sum(x for unit, name, _, x in bars if unit == one and name != out) "
             "for one in ('CPU', 'GPU')) / 1000")]),
        Row("all-finite-always", "all_finite is taken out of every step: in another step another operation gains more",
            [("min(took, key=lambda name: took[name])", "'all_finite'")]),
        Row("kernels-added-up", "milliseconds is the sum of the kernels that are left: a step begins and ends on the "
            "CPU, and the GPU may wait for it", instead="'all_finite', sum(length for unit, name, _, length in bars if "
            "unit == 'GPU' and name != 'all_finite') / 1000"),
        Row("saved", "milliseconds is what is saved: the step's time is asked, without the operation",
            [("first, took[first]", f"first, {_ENDS} - took[first]")]),
        Row("time-as-it-is", "milliseconds is the time as it is now, with the operation",
            [("first, took[first]", f"first, {_ENDS}")]),
        Row("rounded", "milliseconds is rounded to one place: half a per cent is asked",
            [("first, took[first]", "first, round(took[first], 1)")]),
    ],
    symptom=_as_chosen,
)  # fmt: skip
def first_out(bars):
    """(name, milliseconds): the operation to take out, and what the step takes then."""
    # BEGIN SOLUTION
    # In the step above the GPU has a gap behind each all_finite; next_batch and statistics are hidden
    # behind kernels. In another step it may be the reverse. So run the step again without each of the four.
    kernels = [(name, length) for unit, name, _, length in bars if unit == "GPU"]
    launching = {name for name, _ in kernels}
    took = {}
    for out in OPTIONAL:
        now = free = 0.0  # until when the CPU, and the GPU, have something to do
        rest = iter(kernels)
        for unit, name, _, length in bars:
            if unit == "GPU":
                continue
            kernel = next(rest)[1] if name in launching else 0.0
            if name == out:
                continue
            waits = name in ("all_finite", "loss.item")
            if not waits:
                now += length
            free = max(now, free) + kernel
            if waits:
                now = free + 20
        took[out] = max(now, free) / 1000
    first = min(took, key=lambda name: took[name])
    return first, took[first]
    # END SOLUTION
