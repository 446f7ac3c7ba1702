"""The checks of phase 10: profiles, Amdahl's law, timing, the memory of training, rotary embedding, tiles, a layer."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlab import runtime
from flashlab.check import expect, running
from flashlab.check.lookup import Row
from flashlab.check.symptoms import watched
from flashlab.exercises import phase_10_trace as _trace  # noqa: F401  10.9
from flashlab.exercises.answers import in_words
from flashlab.exercises.kernel_rule import empty, kernel_rule
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import RULES, rule
from flashlab.exercises.simulated_gpu import LAUNCH_MS, SimulatedGpu
from flashlab.exercises.tensor_rule import normal, part
from flashlab.models.rope import rope, rope_table

# ---- 10.1 -----------------------------------------------------------------------------------------------------------

_PARTS = {
    "aten::bmm": "products", "aten::_softmax": "softmax", "aten::div": "scaling",
    "aten::mul": "rotary embedding", "aten::sub": "rotary embedding", "aten::add": "rotary embedding",
    "aten::cat": "rotary embedding", "aten::addmm": "products", "aten::ones": "mask", "aten::triu": "mask",
}  # fmt: skip
_OTHERS = ("aten::clone", "aten::copy_", "aten::matmul", "aten::softmax")
Lines = tuple[tuple[str, int, float, float], ...]  # operation, calls, own time, time with what it called


def _profile(rows: Lines, parts: str) -> tuple[EventList, dict[str, str]]:
    made = []
    for key, count, own, total in rows:
        row = FunctionEventAvg()
        vars(row).update(key=key, count=count, self_cpu_time_total=own, cpu_time_total=total, is_user_annotation=False)
        made.append(row)
    return EventList(made), dict(_PARTS)


def _lines(r: random.Random) -> tuple[Lines, str]:
    keys = [*r.sample(sorted(_PARTS), r.randint(3, 7)), *r.sample(_OTHERS, r.randint(0, 3))]
    r.shuffle(keys)
    made = []
    for key in keys:
        own = r.uniform(200, 400) if key in _OTHERS[2:] else r.uniform(400, 5000)
        made.append((key, r.randint(1, 40), own, own + r.choice((0.0, 0.0, r.uniform(500, 9000)))))
    return tuple(made), "parts"


@rule(
    "10.1",
    title="Name the bottleneck", minutes=15, difficulty="Warm-up",
    hints=[
        "Go through the rows once. Which part does a row belong to? Two dictionaries, one for times and one for calls.",
        "parts.get(row.key, 'other') is the part. Which of the two times may be added up?",
        "Add up row.self_cpu_time_total and row.count by part; slowest = max(times, key=times.get); its share is "
        "times[slowest] / sum(times.values()).",
    ],
    returns="part, share, calls",
    inputs=[  # each is made so that another way to read it names another part
        ((("aten::matmul", 2, 3.0, 403.0), ("aten::bmm", 2, 400.0, 400.0), ("aten::_softmax", 1, 520.0, 520.0),
          ("aten::softmax", 1, 1.0, 521.0), ("aten::mul", 8, 40.0, 40.0)), "parts"),
        ((("aten::bmm", 2, 300.0, 300.0), ("aten::mul", 8, 180.0, 180.0), ("aten::sub", 2, 60.0, 60.0),
          ("aten::add", 2, 70.0, 70.0), ("aten::cat", 2, 90.0, 90.0), ("aten::_softmax", 1, 200.0, 200.0)), "parts"),
        ((("aten::clone", 4, 5.0, 700.0), ("aten::copy_", 4, 695.0, 695.0), ("aten::bmm", 2, 450.0, 450.0),
          ("aten::mul", 30, 80.0, 80.0), ("aten::_softmax", 1, 90.0, 90.0)), "parts"),
        ((("aten::triu", 1, 250.0, 250.0), ("aten::div", 1, 20.0, 20.0), ("aten::bmm", 4, 360.0, 360.0),
          ("aten::matmul", 4, 8.0, 368.0), ("aten::mul", 6, 12.0, 12.0)), "parts"),
        ((("aten::addmm", 3, 90.0, 90.0), ("aten::add", 7, 10.0, 10.0), ("aten::bmm", 1, 80.0, 80.0),
          ("aten::addmm_", 2, 50.0, 50.0)), "parts"),
    ],
    draw=_lines,
    called=lambda fn, lines, parts: fn(*_profile(lines, parts)),
    shown=lambda rows, parts: "a profile of " + ", ".join(f"{key} {own:.3g} µs" for key, _, own, _ in rows),
    words={"slowest": "the slowest part", "times": "times", "calls": "calls", "row": "row", "part": "part"},
    notes={
        "row.count": "a row says in `count` how often it was called",
        "row.self_cpu_time_total": "the own times of all calls, which may be added up",
        "sum(times.values())": "the whole profile's time",
    },
    rows=[
        Row("total-times", "cpu_time_total is added up: it has in it what an operation called, so some time counts "
            "twice", [("row.self_cpu_time_total", "row.cpu_time_total")]),
        Row("total-times", "share: the part's time is divided by a sum of cpu_time_total, which counts some time twice",
            [("sum(times.values())", "sum(row.cpu_time_total for row in rows)")]),
        Row("total-times", "cpu_time_total is added up for each part, and divided by the sum of self_cpu_time_total",
            [("+ row.self_cpu_time_total", "+ row.cpu_time_total"),
             ("sum(times.values())", "sum(row.self_cpu_time_total for row in rows)")]),
        Row("longest-for-sum", "a part has the time of its longest operation: it has that of all of them",
            [("times.get(part, 0.0) + row.self_cpu_time_total", "max(times.get(part, 0.0), row.self_cpu_time_total)")]),
        Row("times-count", "the times are multiplied by count: a row's time is that of all its calls already",
            [("+ row.self_cpu_time_total", "+ row.self_cpu_time_total * row.count")]),
        Row("one-call", "the times are divided by count: the part with the most time in all its calls is wanted",
            [("+ row.self_cpu_time_total", "+ row.self_cpu_time_total / row.count")]),
        Row("all-calls", "calls: all parts' are counted: those of the slowest one are asked",
            [("calls[slowest]", "sum(calls.values())")]),
        Row("other-left-out", 'operations that `parts` does not have are left out: they are the part "other"',
            [('        part = parts.get(row.key, "other")\n',
              '        if row.key not in parts:\n            continue\n        part = parts[row.key]\n')]),
        Row("one-operation", "chosen by the slowest operation: add up the operations of each part first",
            [("max(times, key=times.get)",
              'parts.get(max(rows, key=lambda row: row.self_cpu_time_total).key, "other")')]),
        Row("names-that-begin-so", "an operation's part is found by a piece of its name: aten::addmm is not aten::add",
            [('parts.get(row.key, "other")',
              'next((name for op, name in parts.items() if row.key.startswith(op)), "other")')]),
        Row("least", "part: it is the one with the least time: the one with the most is asked",
            [("max(times, key=times.get)", "min(times, key=times.get)")]),
        Row("other-not-chosen", 'part: "other" is left out where the slowest is looked for: it is a part like the rest',
            [("max(times, key=times.get)", 'max((x for x in times if x != "other"), key=times.get)')]),
        Row("other-not-chosen", 'share: the time of "other" is left out of the whole: it is a part like the rest',
            [("sum(times.values())", 'sum(x for name, x in times.items() if name != "other")')]),
        Row("one-operation", "share and calls are those of the slowest operation alone: a part has several", [
            ("slowest = max(times, key=times.get)", "row = max(rows, key=lambda row: row.self_cpu_time_total)\n"
             '    slowest = parts.get(row.key, "other")'),
            ("times[slowest] /", "row.self_cpu_time_total /"), ("calls[slowest]", "row.count")]),
        Row("one-operation", "calls: those of the part's slowest operation alone are counted: a part has several",
            [("calls[slowest]", 'max((row for row in rows if parts.get(row.key, "other") == slowest), key=lambda row: '
              "row.self_cpu_time_total).count")]),
        Row("rows-for-calls", "calls: it is how many rows the part has: a row says in `count` how often it was called",
            [("+ row.count", "+ 1")]),
    ],
)  # fmt: skip
@no_type_check
def bottleneck(rows, parts):
    """Return (part, share, calls). rows: as profile.key_averages() gives; parts: {operation: part}."""
    # BEGIN SOLUTION
    times, calls = {}, {}
    for row in rows:
        part = parts.get(row.key, "other")
        times[part] = times.get(part, 0.0) + row.self_cpu_time_total
        calls[part] = calls.get(part, 0) + row.count
    slowest = max(times, key=times.get)
    return slowest, times[slowest] / sum(times.values()), calls[slowest]
    # END SOLUTION


# ---- 10.2 -----------------------------------------------------------------------------------------------------------


@rule(
    "10.2",
    title="What is an attention eight times faster worth?", minutes=10, difficulty="Warm-up",
    hints=[
        "Let the old time be 1. Which piece of it stays as it was, and what becomes of the other one?",
        "The layer's new time is (1 - attention) + attention / faster. The factor is the old time by the new one.",
        "In the step attention has the share attention * layers. The limit is what is left where that share takes no "
        "time at all.",
    ],
    returns="layer, step, limit",
    inputs=[(0.5, 0.5, 2.0), (0.8, 0.5, 8.0), (0.9, 0.25, 8.53), (1.0, 1.0, 8.0), (0.0, 0.4, 8.0), (0.6, 0.7, 1.0),
            (0.7, 0.9, 0.5), (1.0, 0.3, 4.0), (0.9999, 1.0, 8.0)],
    draw=lambda r: (r.choice((0.0, 1.0, r.random(), r.random())), r.choice((1.0, r.uniform(0.1, 1), r.uniform(0.1, 1))),
                    r.choice((1.0, r.uniform(0.3, 20), r.uniform(0.3, 20)))),
    words={"layer": "layer", "step": "step", "limit": "limit"},
    notes={"of_step": "attention has the share attention · layers of the step", "faster": "attention alone is faster"},
    rows=[
        Row("limit-finite", "limit is right but where attention is the whole step: no time is left then, math.inf",
            [("math.inf", "1e9")]),
        Row("factors-averaged", "factors are averaged where times belong: the new time is 1 - a + a / faster, and the "
            "factor is 1 over it", [
            ("1 / (1 - attention + attention / faster)", "1 - attention + attention * faster"),
            ("1 / (1 - of_step + of_step / faster)", "1 - of_step + of_step * faster")]),
        Row("factors-averaged", "step: factors are averaged where times belong: the layers take layers / layer of the "
            "old time", [("1 / (1 - of_step + of_step / faster)", "1 - layers + layers * layer")]),
    ],
    tol=0.004,  # two decimals will do
)  # fmt: skip
def worth(attention, layers, faster):
    """Return (layer, step, limit): each is the old time divided by the new time."""
    # BEGIN SOLUTION
    of_step = attention * layers
    layer = 1 / (1 - attention + attention / faster)
    step = 1 / (1 - of_step + of_step / faster)
    limit = 1 / (1 - of_step) if of_step < 1 else math.inf
    return layer, step, limit
    # END SOLUTION


# ---- 10.3, 10.4: bug hunts on a simulated GPU -----------------------------------------------------------------------

Program = tuple[str, "float | tuple[float, ...]", int, tuple[float, ...]]  # name, kernel_ms, kernels, first_calls_ms


class _Times(tuple[float, ...]):
    """Milliseconds of one call after another, of which few are shown."""

    def __repr__(self) -> str:
        return f"({', '.join(map(str, self[:3]))}, ...)"


_GPU, _HICCUP = SimulatedGpu(), _Times((*(0.02,) * 29, 20.0, *(0.02,) * 50_000))
_SLOW_KERNELS = "run", _Times((300.0, 80.0, *(1.0,) * 2000)), 1, ()  # its first kernels take longer, not their launches
_OTHER_GPUS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("not-the-median", {}, "one call that takes far longer than the others counts: with programs that have no "
     "such call, your function gives the right times"),
    ("first-calls", {"warm": True}, "what first calls take longer is in the time: with programs whose first calls take "
     "no longer, your function gives the right times"),
    ("launch-in-the-time", {"launch_ms": 0.0}, "a launch that no kernel hides is in the time: on a GPU whose launches "
     "take no time, your function gives the right times"),
    ("not-waited-for", {"blocking": True}, "the GPU still has work to do when gpu.clock() is read: on one whose "
     "launches wait for their kernels, your function gives the right times"),
    ("first-calls-and-launch-in-the-time", {"warm": True, "launch_ms": 0.0}, "two things are wrong: it is right only "
     "if first calls take no longer than the others, and launches take no time"),
    ("first-calls-and-not-waited-for", {"warm": True, "blocking": True}, "two things are wrong: it is right only if "
     "first calls take no longer than the others, and launches wait for their kernels"),
)  # fmt: skip


def _timed(answer: Callable[..., Any], programs: Any, gpu: SimulatedGpu, warmup: int, rounds: int) -> Any:
    """The time told of one program, or (time,) for each of several, on a new GPU like `gpu`."""
    gpu = SimulatedGpu(blocking=gpu.blocking, warm=gpu.warm, launch_ms=gpu.launch_ms)
    alone = isinstance(programs[0], str)
    runs = {name: gpu.program(name, kernel_ms=ms, kernels=count, first_calls_ms=first)
            for name, ms, count, first in ([programs] if alone else programs)}  # fmt: skip
    times = answer(*runs.values() if alone else [dict(runs)], gpu, warmup, rounds)
    said = "gpu.clock() is never read: other clocks do not know what the simulated GPU does"
    expect(watched() is not None or gpu.readings > 0 or times is None, said, diagnosis="clock-not-read")
    if alone or times is None:
        return times
    right = isinstance(times, dict) and set(times) == set(runs)
    right = right and not any(isinstance(x, str) or not hasattr(x, "__float__") for x in times.values())
    words = f"a dict with the keys {', '.join(map(repr, list(times)[:4]))}" if isinstance(times, dict) else ""
    words = words or in_words(times, article=True)
    said = f"{{name: time}} for each of {', '.join(runs)} should be returned, and this is {words}"
    expect(right, said, diagnosis="wrong-type")
    return [(times[name],) for name in runs]


def _on_other_gpus(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """On which kind of GPU an answer to 10.4 would be right."""
    it = RULES["10.4"]
    for slug, other, why in _OTHER_GPUS:
        inputs = [(programs, SimulatedGpu(**{"launch_ms": gpu.launch_ms} | other), *counts)
                  for programs, gpu, *counts in it.tried if programs[1] is not _HICCUP]  # fmt: skip
        if it.index.same_outcome(it.index.run(answer, inputs), it.index.run(it.fn, inputs)):
            pairs = zip(it.index.run(answer, it.tried), it.index.right, strict=True)
            if slug == "launch-in-the-time" and all(x[0] < y[0] * 1.001 for x, y in pairs):
                return "launch-taken-off", why.replace(
                    "a launch that no kernel hides is in the time",
                    "the time is too small: more is taken off than the launch that no kernel hides",
                )
            return slug, why
    return None


def _programs(programs: Any, gpu: SimulatedGpu, warmup: int, rounds: int) -> str:
    of = [programs] if isinstance(programs[0], str) else programs
    of = [(f"{min(ms)} ms, {max(ms):g} ms in one call" if isinstance(ms, tuple) else f"{ms} ms", count)
          for _, ms, count, _ in of]  # fmt: skip
    listed = [f"{count} kernels of {ms}" if count > 1 else f"a kernel of {ms}" for ms, count in of]
    other = f"; a launch of {gpu.launch_ms} ms" if gpu.launch_ms != LAUNCH_MS else ""
    return f"{', '.join(listed)}{other}; warmup={warmup}, rounds={rounds}"


def _program(r: random.Random, name: str = "run") -> Program:
    first = tuple(r.choice((20.0, 80.0, 300.0)) for _ in range(r.randint(1, 4)))
    return (name, *r.choice(((2.0, 1), (1.0, 1), (0.4, 4), (0.05, 30), (8.0, 1))), first)


_EAGER, _FLASH = ("eager", 8.0, 1, (40.0,)), ("flash", 1.0, 1, (300.0, 80.0, 20.0))
_COMPILED = ("compiled", 0.05, 30, (900.0, 200.0, 60.0))


@rule(
    "10.3",
    title="What do first calls cost?", minutes=15, difficulty="Bug hunt",
    bug=Row("first-calls", "the usual time is a mean over all calls: the first calls are in it, and hide a part of "
            "their own cost", [("statistics.mean(took[warmup:])", "statistics.mean(took)")]),
    history="a common mistake: the mean over all the calls of a benchmark, the first among them, as the usual time",
    hints=[
        "Take a function whose only first call takes 300 ms longer, warmup=1 and rounds=1. What should be told, and "
        "what is? And with 99 rounds?",
        "What is told is a difference. Which of its two sides has something in it that does not belong there?",
        "The usual time is that of the calls behind the first `warmup` ones.",
    ],
    returns="the cost",
    each="function",
    item=float,
    inputs=[
        ((_EAGER, _FLASH), _GPU, 10, 20), ((_FLASH, _EAGER), _GPU, 10, 20), ((_EAGER, _COMPILED, _FLASH), _GPU, 4, 3),
        ((_FLASH,), _GPU, 10, 20), ((("a", *_FLASH[1:]), ("b", *_FLASH[1:])), _GPU, 5, 7),
        ((_FLASH, _EAGER), _GPU, 3, 1), ((_FLASH, _EAGER), _GPU, 100, 2), ((_SLOW_KERNELS,), _GPU, 4, 9),
        ((("short", 0.02, 1, (1.0,)),), _GPU, 20, 9),
    ],
    rows=[
        Row("first-calls", "the usual time is the median of all calls: with few rounds that is a first call",
            [("mean(took[warmup:])", "median(took)")]),
        Row("only-the-first-left-out", "the usual time leaves out the very first call alone: all of the first `warmup` "
            "calls may take longer", [("took[warmup:]", "took[1:]")]),
        Row("first-calls", "the usual time is a mean over all calls, of many more rounds: with a large warmup the "
            "first calls still weigh in it", [("warmup + rounds", "warmup + 1000"), ("took[warmup:]", "took")]),
        Row("first-calls", "the usual time is a mean of the first calls, so the cost is 0: it is that of the calls "
            "behind them", [("mean(took[warmup:])", "mean(took[:warmup])")]),
        Row("first-calls", "the usual time is that of the last `warmup` calls: where rounds are fewer, first calls are "
            "among them", [("took[warmup:]", "took[-warmup:]")]),
        Row("first-calls", "the usual time leaves out the last `warmup` calls: it is the first ones that it should "
            "leave out", [("took[warmup:]", "took[:-warmup]")]),
        Row("all-later-calls", "what is taken away is the time of all later calls, `rounds` of them: it is `warmup` "
            "times their mean",
            [("statistics.mean(took[warmup:])", "sum(took[warmup:]) / warmup")]),
        Row("warmed-up-before", "the function is run before it is timed: what its first calls cost is gone then",
            [("        took = []\n", "        took = []\n        for _ in range(warmup):\n            run()\n"
              "        gpu.synchronize()\n")]),
        Row("not-waited-for", "the clock is read before the call's kernel has ended: wait for it before the second "
            "reading, so that each call is timed alone", [("            gpu.synchronize()\n", "")]),
        *(Row("one-first-call", "one of the first calls is told alone: each of the first `warmup` may take longer",
              [("sum(took[:warmup]) - warmup * usual", x)]) for x in ("took[0] - usual", "max(took[:warmup]) - usual")),
        Row("one-usual-call", "one usual call is taken away: from `warmup` calls, `warmup` usual ones are",
            [("warmup * usual", "usual")]),
        Row("first-calls", "the first calls are in the sum that is divided by `rounds`: the usual time is that of the "
            "calls behind them", [("statistics.mean(took[warmup:])", "sum(took) / rounds")]),
        Row("all-summed", "the later calls are summed too: the cost is that of the first `warmup` ones",
            [("sum(took[:warmup])", "sum(took)")]),
    ],
    draw=lambda r: (
        tuple(_program(r, name) for name in "abc"[: r.randint(1, 3)]), _GPU, r.randint(4, 9), r.randint(1, 9)),
    called=_timed,
    shown=_programs,
    words={"took": "took", "usual": "usual"},
    notes={"warmup * usual": "as many usual calls as first ones are taken away"},
    tol=0.02,
    trials=60,
)  # fmt: skip
@no_type_check
def first_cost(runs, gpu, warmup=10, rounds=20):
    """{name: ms that its first `warmup` calls take longer than usual ones}; runs: {name: function}."""
    costs = {}
    for name, run in runs.items():
        took = []
        for _ in range(warmup + rounds):
            start = gpu.clock()
            run()
            gpu.synchronize()
            took.append(gpu.clock() - start)
        usual = statistics.mean(took[warmup:])
        costs[name] = sum(took[:warmup]) - warmup * usual
    return costs


@rule(
    "10.4",
    title="Twenty microseconds in twenty-five", minutes=20, difficulty="Bug hunt",
    bug=Row("launch-in-each-time", "each sample is one call that is waited for: its launch, which in a row of calls is "
            "hidden behind the kernel before, is in the time", [
        ("        for _ in range(50):\n            run()\n", "        run()\n"),
        ("samples.append((gpu.clock() - start) / 50)", "samples.append(gpu.clock() - start)")]),
    history="a common mistake; beside Triton's do_bench there is do_bench_cudagraph, which times a graph of many calls",
    hints=[
        "Take a kernel of 0.02 ms, call it once and wait, then twice and wait. Which part of the time doubles?",
        "A launch takes the CPU 0.005 ms. While a kernel runs the next one is launched. When is nothing there to hide "
        "a launch behind?",
        "Only the first launch behind a wait is seen. So let many calls, say 50, stand between two waits, and divide "
        "by their number; `rounds` may be small, so it is not that number.",
    ],
    returns="the time",
    inputs=[
        (("run", 0.02, 1, (50.0,)), _GPU, 5, 20), (("run", 0.016, 1, (50.0,)), _GPU, 5, 20),
        (("run", 0.01, 1, (50.0,)), _GPU, 5, 1), (("run", 2.0, 1, (200.0,)), _GPU, 5, 20),
        (("run", 0.05, 300, (50.0,)), _GPU, 2, 3), (("run", 0.4, 4, (100.0, 30.0)), _GPU, 4, 5),
        (("run", 0.001, 100, ()), _GPU, 3, 9), (("run", 0.02, 1, (200.0, 150.0, 100.0, 80.0)), _GPU, 4, 2),
        (("run", 0.02, 1, (50.0,)), SimulatedGpu(launch_ms=0.009), 5, 20), (("run", _HICCUP, 1, (50.0,)), _GPU, 5, 20),
        (("run", 0.02, 1, (50.0,)), _GPU, 200, 1),
    ],
    draw=lambda r: (_program(r), _GPU, r.randint(4, 9), r.randint(1, 9)),
    called=_timed,
    shown=_programs,
    symptom=_on_other_gpus,
    rows=[
        Row("sum-of-calls", "what is told is the time of all calls between two waits: divide by their number",
            [("(gpu.clock() - start) / 50", "gpu.clock() - start")]),
        Row("launch-taken-off", "0.005 ms are taken off for the launch: another GPU's takes longer. Let many calls "
            "hide it", [("        for _ in range(50):\n            run()\n", "        run()\n"),
                   ("(gpu.clock() - start) / 50", "gpu.clock() - start - 0.005")]),
        Row("few-calls", "too few calls stand between two waits: the first launch, which nothing hides, weighs in each",
            [("range(50)", "range(10)"), ("start) / 50", "start) / 10")]),
        Row("not-waited-before", "what was launched before is in the time: wait first, and read the clock then",
            [("        gpu.synchronize()\n        start = gpu.clock()\n", "        start = gpu.clock()\n")]),
        Row("not-waited-for", "the clock is read while the GPU still works: wait before the second reading too",
            [("        gpu.synchronize()\n        samples", "        samples")]),
        Row("started-once", "the clock is started once, so a sample has in it all that came before",
            [("    for _ in range(rounds):\n        gpu.synchronize()\n        start = gpu.clock()\n",
              "    gpu.synchronize()\n    start = gpu.clock()\n    for _ in range(rounds):\n")]),
    ],
    tol=0.02,
    trials=60,
)  # fmt: skip
@no_type_check
def milliseconds(run, gpu, warmup=5, rounds=20):
    """Milliseconds of one call of `run` in a long row of calls: the median of `rounds` samples."""
    for _ in range(warmup):
        run()
    samples = []
    for _ in range(rounds):
        gpu.synchronize()
        start = gpu.clock()
        for _ in range(50):
            run()
        gpu.synchronize()
        samples.append((gpu.clock() - start) / 50)
    return statistics.median(samples)


# ---- 10.5 -----------------------------------------------------------------------------------------------------------

_MODELS = (  # width, depth, heads, kv_heads, hidden, vocabulary, batch, seq_len
    (8, 1, 2, 1, 24, 10, 1, 3), (64, 3, 4, 2, 192, 256, 2, 5), (48, 2, 6, 1, 128, 100, 3, 32),
    (768, 12, 12, 12, 2048, 50257, 8, 1024),
)  # fmt: skip


def _model(r: random.Random) -> tuple[int | bool, ...]:
    kv_heads = r.randint(1, 6)
    heads = kv_heads * r.randint(1, 4)
    rest = (r.randint(8, 300), r.randint(5, 600), r.randint(1, 9), r.randint(1, 40), r.random() < 0.5)
    return heads * 2 * r.randint(1, 12), r.randint(1, 9), heads, kv_heads, *rest


_PER_BATCH = "depth * batch * seq_len"


@rule(
    "10.5",
    title="The memory of training, by hand", minutes=25,
    hints=[
        "Count numbers first, and multiply by 4 last. A projection from a to b numbers has a · b weights.",
        "Projections of a block: width · head_dim · (heads + kv_heads + kv_heads + heads). q has batch · heads · "
        "seq_len · head_dim numbers, K as it is batch · kv_heads · seq_len · head_dim, P batch · heads · seq_len².",
        "Gradients are as large as the parameters, AdamW's averages twice as large. Original: depth · (4 · (x + 4 q "
        "+ P) + seq_len²). Flash: depth · 4 · (x + 2 q + 2 kv + batch · heads · seq_len).",
    ],
    returns="parameters, gradients, optimizer, activations",
    whole=True,
    inputs=[(*one, flash) for one in _MODELS for flash in (False, True)],
    draw=_model,
    words={
        "head_dim": "head_dim", "projections": "projections", "block": "block", "layer": "a layer", "x": "x", "q": "q",
        "kv": "K", "P": "P", "parameters": "parameters",
    },
    notes={
        "seq_len * seq_len": "one byte for each pair of query and key, for all batches and heads",
        "depth": "there are `depth` blocks", "vocabulary * width": "the last matrix is the embedding's, so it counts "
        "once", "optimizer: 2": "AdamW keeps two averages for each parameter", "4": "a float32 has 4 bytes",
        "batch * heads * seq_len": "lse is one number for each query and head",
        "3": "SwiGLU has three matrices", "2 * width": "a block has two norms", "flash": "flash=False keeps P",
    },
    units={
        "parameters": {
            "embeddings": "4 * vocabulary * width",
            "matrices width × width per block": "4 * depth * width * width",
            "projections to key or value heads per block": "4 * depth * width * (width // heads) * kv_heads",
            "matrices of SwiGLU per block": "4 * depth * width * hidden",
            "norms per block": "4 * depth * width",
            "norms outside of the blocks": "4 * width",
        },
        "activations": {
            "tensors like x and q": f"4 * {_PER_BATCH} * width * (not flash)",
            "K or V, not repeated": f"4 * {_PER_BATCH} * (width // heads) * kv_heads * (not flash)",
            "P": f"4 * {_PER_BATCH} * heads * seq_len * (not flash)",
            "lse": f"4 * {_PER_BATCH} * heads * (not flash)",
            "masks": "depth * seq_len * seq_len * (not flash)",
            "masks per batch": f"{_PER_BATCH} * seq_len * (not flash)",
            "with flash: tensors like x and q": f"4 * {_PER_BATCH} * width * flash",
            "K or V": f"4 * {_PER_BATCH} * (width // heads) * kv_heads * flash",
            "numbers per query, key and head": f"4 * {_PER_BATCH} * heads * seq_len * flash",
            "numbers per query and head": f"4 * {_PER_BATCH} * heads * flash",
            "bytes per query and key": "depth * seq_len * seq_len * flash",
        },
    },
    rows=[
        Row("mask-for-each-head", "activations: the mask counts for each batch and head: there is one for all",
            [("+ seq_len * seq_len", "+ P")]),
    ],
)  # fmt: skip
def training_bytes(width, depth, heads, kv_heads, hidden, vocabulary, batch, seq_len, flash):
    """Return the bytes of (parameters, gradients, optimizer, activations). flash: True or False."""
    # BEGIN SOLUTION
    head_dim = width // heads
    projections = width * head_dim * (2 * heads + 2 * kv_heads)
    block = projections + 3 * width * hidden + 2 * width
    parameters = 4 * (vocabulary * width + depth * block + width)

    x = batch * seq_len * width
    q = batch * heads * seq_len * head_dim
    kv = batch * kv_heads * seq_len * head_dim
    if flash:
        layer = 4 * (x + q + kv + kv + q + batch * heads * seq_len)
    else:
        P = batch * heads * seq_len * seq_len
        layer = 4 * (x + q + q + q + P + q) + seq_len * seq_len
    return parameters, parameters, 2 * parameters, depth * layer
    # END SOLUTION


# ---- 10.6 -----------------------------------------------------------------------------------------------------------


def _turn(x: torch.Tensor, y: torch.Tensor, offset: int, spare: int = 0) -> tuple[Any, ...]:
    """The kernel's arguments; tables end with the last position, or some positions later."""
    M, half = x.shape[2], x.shape[3] // 2
    table = rope_table(M + offset + spare, 2 * half, base=10_000.0 + 1000 * offset)
    weight = 1 + _vectors(2 * half, seed=M) / 4
    return x, y, weight, *table, *x.stride(), *y.stride(), x.shape[1], M, offset, 0.01, half, 16


def _vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(random.Random(seed), *shape, dtype=dtype)


_X, _HALF = _vectors(2, 3, 20, 16), _vectors(1, 2, 33, 64, dtype=torch.float16)
_WIDE = torch.stack([_X, torch.full_like(_X, math.nan)], -1).flatten(-2)[..., ::2]
_MEAN = "tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF)"
_NO_WEIGHT = (" * tl.load(W_ptr + pairs)[None, :]", ""), (" * tl.load(W_ptr + HALF + pairs)[None, :]", "")
_NORM = f"tl.rsqrt({_MEAN} + eps)"
_OWN_STRIDES = "X and Y have strides of their own, a tensor and an axis each"


def _read_once(kernel: Any) -> None:
    """CheckFailed where it reads a number of X more often than once."""
    given, traffic = RULES["10.6"].watched_on_first(kernel)  # type: ignore[attr-defined]
    read = traffic.read_from["X_ptr"] / (given["X_ptr"].numel() * given["X_ptr"].element_size())
    expect(read <= 1, f"right, but each number of X is read {read:g} times: once is asked", diagnosis="read-twice")


@kernel_rule(
    "10.6",
    title="Norm and rotary embedding in one kernel", minutes=30,
    hints=[
        "Five tiles of [BLOCK_M, HALF]: cos, sin, x1, x2, and the mask that says which rows there are. A row's squares "
        "lie in two of them: add them, then tl.sum(..., axis=1), and one number per row for both halves.",
        "An address of X: X_ptr + batch * stride_xb + head * stride_xh + rows[:, None] * stride_xm + pairs[None, :] * "
        "stride_xd; x2 is HALF * stride_xd further on. An angle: (rows[:, None] + offset) * HALF + pairs[None, :].",
        "Load x1 and x2 with mask=rows[:, None] < M, other=0.0 and .to(tl.float32). norm = tl.rsqrt(tl.sum(x1 * x1 + "
        "x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]; x1 * norm * w1, and so on. Store with the same mask, "
        "(x1 * cos - x2 * sin).to(Y_ptr.dtype.element_ty) and (x1 * sin + x2 * cos) HALF * stride_yd further on.",
    ],
    writes="Y_ptr",
    returns="Y",
    programs=lambda X_ptr, heads, M, BLOCK_M, **_: -(-M // BLOCK_M) * heads * X_ptr.shape[0],
    inputs={
        "contiguous, 20 rows, offset 5": _turn(_X, empty(2, 3, 20, 16), 5, spare=40),
        "tables that end with the last row": _turn(_X, empty(2, 3, 20, 16, gap=3), 5),
        "[batch, M, heads, D] in memory": _turn(
            _X.transpose(1, 2).contiguous().transpose(1, 2), empty(2, 3, 16, 20).mT, 40),
        "every second column of a wider tensor": _turn(_WIDE, empty(3, 2, 20, 16).transpose(0, 1), 0),
        "a whole number of blocks": _turn(_vectors(1, 1, 16, 16), empty(1, 1, 16, 16), 0),
        "2 heads, 31 rows of 10⁶, Y in float16": _turn(
            1e6 * _vectors(2, 2, 31, 16), empty(2, 2, 31, 16, dtype=torch.float16), 0),
        "HALF=32, float16": _turn(_HALF, empty(1, 2, 33, 64, dtype=torch.float16), 3),
        "X in float16, Y in float32": _turn(_HALF, empty(1, 2, 33, 64), 3),
    },
    draw=lambda r: (lambda x: _turn(x, empty(*x.shape), r.randint(0, 9)))(
        _vectors(r.randint(1, 2), r.randint(1, 4), r.randint(1, 40), 16)),
    notes={
        **dict.fromkeys(("stride_xb", "stride_xh", "stride_xm", "stride_xd", "stride_yb", "stride_yh", "stride_ym",
                         "stride_yd"), _OWN_STRIDES),
        "offset": "row m stands at position offset + m", "W_ptr + HALF": "x2 has W's second half",
        "(rows[:, None] + offset) * HALF": "the tables have rows of HALF numbers",
        "tl.float32": "compute in float32, and round once", "x1 * cos - x2 * sin": "y1 is x1 cos - x2 sin",
        "x1 * sin + x2 * cos": "y2 is x1 sin + x2 cos", "eps": "eps is added to the mean of the squares",
        "2 * HALF": "a row has 2 * HALF numbers",
    },
    rows=[
        Row("no-norm", "the norm is left out: each row is divided by the root of its mean square, and multiplied by w",
            [("x1 = x1 * norm *", "w1 ="), ("x2 = x2 * norm *", "w2 =")]),
        Row("no-weights", "W is left out: a number of a normed row is multiplied by the w of its column",
            [(" * tl.load(W_ptr + pairs)[None, :]", ""), (" * tl.load(W_ptr + HALF + pairs)[None, :]", "")]),
        Row("norm-of-a-half", "each half of a row has a norm of its own: the mean is over all its 2 * HALF numbers", [
            ("x1 * norm", "x1 * tl.rsqrt(tl.sum(x1 * x1, axis=1) / HALF + eps)[:, None]"),
            ("x2 * norm", "x2 * tl.rsqrt(tl.sum(x2 * x2, axis=1) / HALF + eps)[:, None]")]),
        Row("neighbours", "neighbouring numbers are paired, as in the paper; here pair i is x[i] and x[i + HALF]", [
            ("pairs[None, :] * stride_xd", "2 * pairs[None, :] * stride_xd"), ("x_ptrs + HALF * stride_xd",
            "x_ptrs + stride_xd"), ("pairs[None, :] * stride_yd", "2 * pairs[None, :] * stride_yd"),
            ("y_ptrs + HALF * stride_yd", "y_ptrs + stride_yd"), ("W_ptr + pairs", "W_ptr + 2 * pairs"),
            ("W_ptr + HALF + pairs", "W_ptr + 2 * pairs + 1")]),
        Row("neighbours", "neighbouring numbers are paired, as in the paper; here pair i is x[i] and x[i + HALF]", [
            ("pairs[None, :] * stride_xd", "2 * pairs[None, :] * stride_xd"), ("x_ptrs + HALF * stride_xd",
            "x_ptrs + stride_xd"), ("pairs[None, :] * stride_yd", "2 * pairs[None, :] * stride_yd"),
            ("y_ptrs + HALF * stride_yd", "y_ptrs + stride_yd")]),
        Row("neighbours", "W is read as if neighbouring numbers were paired: x1 has its first half, x2 its second",
            [("W_ptr + pairs", "W_ptr + 2 * pairs"), ("W_ptr + HALF + pairs", "W_ptr + 2 * pairs + 1")]),
        Row("root-missing", "the root is missing: a row is divided by its mean square itself",
            [(_NORM, f"1 / ({_MEAN} + eps)")]),
        Row("multiplied-by-the-root", "a row is multiplied by the root of its mean square: it is divided by it",
            [("tl.rsqrt(", "tl.sqrt(")]),
        Row("eps-outside", "eps is added to the root: it belongs under it, to the mean of the squares",
            [(_NORM, f"1 / (tl.sqrt({_MEAN}) + eps)")]),
        Row("mean-subtracted", "the mean of a row is subtracted from it, as LayerNorm does: here it stays", [
            ("    norm =", "    mean = (tl.sum(x1 + x2, axis=1) / (2 * HALF))[:, None]\n"
             "    x1, x2 = x1 - mean, x2 - mean\n    norm =")]),
        Row("sum-of-a-column", "the squares are added up along axis 0, over the rows: each row has a norm of its own",
            [("axis=1) / (2 * HALF) + eps)[:, None]", "axis=0) / (2 * HALF) + eps)[None, :]")]),
        Row("weight-after-the-turn", "w comes after the turn: it belongs to x, before", [
            *_NO_WEIGHT, ("(x1 * cos - x2 * sin)", "((x1 * cos - x2 * sin) * tl.load(W_ptr + pairs)[None, :])"),
            ("(x1 * sin + x2 * cos)", "((x1 * sin + x2 * cos) * tl.load(W_ptr + HALF + pairs)[None, :])")]),
        Row("weight-in-the-mean", "w is in the mean of the squares too: the norm is that of X, and w comes after it", [
            *_NO_WEIGHT, ("    norm =", "    x1 = x1 * tl.load(W_ptr + pairs)[None, :]\n"
                          "    x2 = x2 * tl.load(W_ptr + HALF + pairs)[None, :]\n    norm =")]),
        Row("one-and-weight", "1 is added to the weight, as Gemma does: here w is the factor itself",
            [("tl.load(W_ptr + pairs)", "(1 + tl.load(W_ptr + pairs))"),
             ("tl.load(W_ptr + HALF + pairs)", "(1 + tl.load(W_ptr + HALF + pairs))")]),
        Row("y2-of-y1", "y2 is made of y1: it is made of x1, so do not overwrite that before",
            [("(x1 * sin + x2 * cos)", "((x1 * cos - x2 * sin) * sin + x2 * cos)")]),
        Row("y2-exchanged", "y2: cos and sin are exchanged, it is x1 sin + x2 cos",
            [("x1 * sin + x2 * cos", "x1 * cos + x2 * sin")]),
        Row("strides-of-x", f"Y is written with X's strides: {_OWN_STRIDES}", [
            ("batch * stride_yb + head * stride_yh", "batch * stride_xb + head * stride_xh"),
            ("rows[:, None] * stride_ym", "rows[:, None] * stride_xm")]),
        Row("row-of-a-table", "a row of the tables is taken to have 2 * HALF numbers: it has HALF, one for each pair",
            [("+ offset) * HALF", "+ offset) * (2 * HALF)")]),
        Row("angle-negative", "every pair is turned by the negative angle: look at the signs before sin", [
            ("x1 * cos - x2 * sin", "x1 * cos + x2 * sin"), ("x1 * sin + x2 * cos", "x2 * cos - x1 * sin")]),
        Row("results-exchanged", "y1 is stored where y2 belongs, and y2 where y1 does", [
            ("tl.store(y_ptrs, (x1 * cos - x2 * sin)", "tl.store(y_ptrs, (x1 * sin + x2 * cos)"),
            ("stride_yd, (x1 * sin + x2 * cos)", "stride_yd, (x1 * cos - x2 * sin)")]),
    ],
    then=lambda kernel: _read_once(kernel) if runtime.INTERPRETED else None,
)  # fmt: skip
@triton.jit
def turn_kernel(
    X_ptr, Y_ptr, W_ptr, COS_ptr, SIN_ptr,
    stride_xb, stride_xh, stride_xm, stride_xd,
    stride_yb, stride_yh, stride_ym, stride_yd,
    heads, M, offset, eps,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Y = X, each row divided by its root mean square, times W, and turned; both [batch, heads, M, 2 * HALF].

    One program per BLOCK_M rows of a head."""
    blocks = tl.cdiv(M, BLOCK_M)
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    pairs = tl.arange(0, HALF)
    # BEGIN SOLUTION
    inside = rows[:, None] < M
    angle = (rows[:, None] + offset) * HALF + pairs[None, :]
    cos = tl.load(COS_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(SIN_ptr + angle, mask=inside, other=0.0)
    x_ptrs = X_ptr + batch * stride_xb + head * stride_xh
    x_ptrs += rows[:, None] * stride_xm + pairs[None, :] * stride_xd
    y_ptrs = Y_ptr + batch * stride_yb + head * stride_yh
    y_ptrs += rows[:, None] * stride_ym + pairs[None, :] * stride_yd
    x1 = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF * stride_xd, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
    x1 = x1 * norm * tl.load(W_ptr + pairs)[None, :]
    x2 = x2 * norm * tl.load(W_ptr + HALF + pairs)[None, :]
    tl.store(y_ptrs, (x1 * cos - x2 * sin).to(Y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptrs + HALF * stride_yd, (x1 * sin + x2 * cos).to(Y_ptr.dtype.element_ty), mask=inside)
    # END SOLUTION


# ---- 10.7 -----------------------------------------------------------------------------------------------------------


def _chip(r: random.Random) -> tuple[int, ...]:
    """Where a tile just fits, or a BLOCK_M just reaches the ridge, about every second time."""
    N, D, itemsize, stages = r.choice((64, 256, 1000, 4096)), r.choice((64, 128)), r.choice((2, 4)), r.randint(1, 4)
    M, B = r.choice((16, 32, 64, 128, 256)), r.choice((16, 32, 64, 128, 256))
    peak, bandwidth = r.choice((
        (r.randint(1, 200) * 10**12, 10**12), (2 * M * N, (M + N) * itemsize), (2 * M * N + 1, (M + N) * itemsize),
        (20 * M * N + 3 * (M + N) * itemsize, 10 * (M + N) * itemsize), (2000 * M * N - 1, 1000 * (M + N) * itemsize),
    ))  # fmt: skip
    shared = (r.choice((0, 1, 1, 1, 2)) * M + 2 * stages * B) * D * itemsize
    shared = r.choice((shared + r.choice((-1, 0, 0, 1, M, r.randint(-5000, 5000))),) * 5 + (r.randint(50, 4000),))
    return peak, bandwidth, max(0, shared), N, D, itemsize, stages


_CHIPS = (  # FLOP/s, bytes/s, bytes of shared memory
    (989 * 10**12, 4800 * 10**9, 232448), (165 * 10**12, 1008 * 10**9, 101376), (60 * 10**12, 10**12, 98304),
    (30 * 10**12, 10**12, 65536), (15 * 10**12, 10**12, 49152), (5 * 10**11, 10**12, 65536),
    (2000 * 10**12, 10**12, 2**20), (5 * 10**10, 10**12, 65536),
    (110 * 10**12, 10**12, 122880), (6 * 10**12, 10**12, 36864), (32 * 10**12, 10**12, 98304),
)  # fmt: skip


@rule(
    "10.7",
    title="A tile from the roofline", minutes=25,
    hints=[
        "Two questions, one after the other: which BLOCK_M reaches the ridge, and which BLOCK_N fits with it?",
        "FLOPs: 2 products · 2 · BLOCK_M · N · HEAD_DIM. Bytes: (BLOCK_M + N + N + BLOCK_M) · HEAD_DIM · itemsize. "
        "BLOCK_N is in neither.",
        "Shared memory: (BLOCK_M + 2 · STAGES · BLOCK_N) · HEAD_DIM · itemsize <= shared_bytes. Try the five sizes of "
        "each in order.",
    ],
    returns="BLOCK_M, BLOCK_N",
    whole=True,
    inputs=[
        *((*_CHIPS[2], N, 64, 2, 1) for N in (256, 64)),
        *((*gpu, N, D, size, stages) for gpu in _CHIPS for N, D in ((64, 64), (1024, 128), (65536, 64), (256, 128))
          for size, stages in ((2, 1), (2, 2), (4, 3))),
        (512001, 2512, 65535, 1000, 64, 2, 1), *(_chip(random.Random(i)) for i in range(200)),
    ],
    draw=_chip,
    words={
        "sizes": "sizes", "reaching": "reaching", "fitting": "fitting", "BLOCK_M": "BLOCK_M", "M": "BLOCK_M",
        "B": "BLOCK_N", "flops": "FLOPs", "moved": "bytes", "ridge": "ridge",
    },
    notes={
        "reaching[0]": "the smallest BLOCK_M that reaches the ridge is wanted",
        "fitting[-1]": "the largest BLOCK_N that fits is wanted",
        "STAGES": "there are STAGES tiles of K and of V, and one of Q",
        "itemsize": "a number has itemsize bytes",
        "flops / moved >= ridge": "a BLOCK_M that just reaches the ridge will do",
        "flops / moved": "it is no whole number",
        "(BLOCK_M + 2 * STAGES * B) * HEAD_DIM * itemsize <= shared_bytes": "tiles that take exactly that many do fit",
        "BLOCK_M": "one tile of Q is in shared memory; O stays in registers",
        "2": "two products, and a multiply-add is 2 FLOPs; K and V are two",
    },
    also=[[("2 * STAGES * B", "STAGES * (B + B)"), ("M + N + N + M", "2 * M + 2 * N")]],
    rows=[
        *(Row("none-forgotten", f"a number is returned where no {what}: return None",
              [(f"if not {these}:\n        return None", f"{these} = {these} or [{last}]")])
          for what, these, last in (("BLOCK_M reaches the ridge", "reaching", 256), ("BLOCK_N fits", "fitting", 16))),
        *(Row("other-sizes", f"{which} {what}: the sizes are the powers of two from 16 to 256",
              [(f"for {x} in sizes", f"for {x} in {sizes}")])
          for which, x in (("BLOCK_M", "M"), ("BLOCK_N", "B"))
          for what, sizes in (("is never 256", "sizes[:-1]"), ("may be 512", "[*sizes, 512]"))),
        Row("scores-in-shared", "BLOCK_N: a tile of scores counts in the shared memory: it stays in registers",
            [("* HEAD_DIM * itemsize <=", "* HEAD_DIM * itemsize + BLOCK_M * B * itemsize <=")]),
        Row("only-divisors", "BLOCK_N: only sizes that divide N are taken: the last tile may be cut",
            [("sizes if (", "sizes if N % B == 0 and (")]),
        Row("not-above-N", "BLOCK_N: no size above N is taken: it is asked what fits",
            [("sizes if (", "sizes if B <= N and (")]),
    ],
)  # fmt: skip
def choose_tile(peak_flops, bytes_per_s, shared_bytes, N, HEAD_DIM, itemsize, STAGES):
    """Return (BLOCK_M, BLOCK_N), or None."""
    # BEGIN SOLUTION
    sizes = [16, 32, 64, 128, 256]
    ridge = peak_flops / bytes_per_s
    reaching = []
    for M in sizes:
        flops = 2 * 2 * M * N * HEAD_DIM
        moved = (M + N + N + M) * HEAD_DIM * itemsize
        if flops / moved >= ridge:
            reaching.append(M)
    if not reaching:
        return None
    BLOCK_M = reaching[0]
    fitting = [B for B in sizes if (BLOCK_M + 2 * STAGES * B) * HEAD_DIM * itemsize <= shared_bytes]
    if not fitting:
        return None
    return BLOCK_M, fitting[-1]
    # END SOLUTION


# ---- 10.8 -----------------------------------------------------------------------------------------------------------

_MOST_OPERATIONS, _MOST_BYTES = 16, 6  # bytes: times those of q and k
_WAITS = {"tolist", "numpy", "cpu", "__repr__"}  # methods
_WAITING = {  # operations whose result, or its size, is wanted on the CPU
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "equal", "allclose",
}  # fmt: skip


class _Seen(TorchDispatchMode):
    """The operations that make or change a tensor, with the tensors made; a view is none. waits: a value was read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[torch.Tensor]]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        made = [x for x in outputs if x.untyped_storage()._cdata not in known]
        name = func.overloadpacket.__name__
        chosen = [x for x in args[1] if x is not None] if name == "index" else []
        if name in _WAITING or func._overloadname == "Tensor" and (
            name == "repeat_interleave" or any(x.dtype in (torch.bool, torch.uint8) for x in chosen)):  # fmt: skip
            self.waits.append({"_local_scalar_dense": "item", "index": "x[mask]"}.get(name, name))
        if made or name.endswith("_") or "out" in (kwargs or {}):
            self.made.append((name, made))
        return out


class _Waiting(TorchFunctionMode):
    """The methods called that hand a tensor's values to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITS or (name == "to" and any(str(x) == "cpu" for x in args[1:] if isinstance(x, str))):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _layer(r: random.Random, batch: int, heads: int, kv_heads: int, N: int, D: int, positions: int) -> tuple[Any, ...]:
    shapes = ((batch, heads, N, D), (batch, kv_heads, N, D), (batch, kv_heads, N, D))
    return *(normal(r, *shape, dtype=_LAYER_DTYPE) for shape in shapes), positions


def _some_layer(r: random.Random) -> tuple[Any, ...]:
    kv_heads, N = r.randint(1, 3), r.randint(1, 24)
    return _layer(r, r.randint(1, 2), kv_heads * r.randint(1, 3), kv_heads, N, r.choice((16, 32)), N + r.randint(1, 20))


_LAYER_DTYPE = torch.float32 if runtime.INTERPRETED else torch.float16
_FREQUENCY = """frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    frequency[half * 3 // 4 :] = 0
"""
_ALL_ANGLES = "torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)"
_LAYERS = (
    (2, 8, 2, 33, 16, 64),
    (1, 2, 2, 5, 16, 8),
    (2, 4, 1, 20, 32, 20),
    (1, 6, 3, 1, 16, 4),
    (1, 3, 3, 40, 16, 50),
)


@part(
    "10.8",
    returns="o",
    inputs={f"batch {b}, {h} query heads, {kv} key heads, N={N}, D={D}, positions={p}": _layer(
        random.Random(N), b, h, kv, N, D, p) for b, h, kv, N, D, p in _LAYERS},
    draw=_some_layer,
    on_device=True,
    tol=2e-5 if runtime.INTERPRETED else 1e-2,
    tries=0,
    words={"turn_q": "the rotary embedding of q", "turn_k": "the rotary embedding of k"},
    notes={
        "k.shape[1]": "head h reads key head h // group", "math.sqrt(D)": "scores are divided by the square root of D",
        "1": "a query sees its own position, and none after it",
        "12": "a query sees 12 keys, its own among them", "dtype": "float32 gives more digits",
    },
    rows=[
        Row("not-causal", "queries see the keys that come after them: slow_attention is causal", [
            ("torch.ones(N, N).triu(1)", "torch.zeros(N, N)")]),
        Row("no-window", "queries see all keys before them: a query sees 12 keys, its own and the 11 before it", [
            (" + torch.ones(N, N).tril(-12)", "")]),
        Row("all-turned", "all pairs are turned: those of the lowest quarter of the frequencies stay as they are", [
            ("    frequency[half * 3 // 4 :] = 0\n", "")]),
        Row("lecture's", "all pairs are turned, and queries see all keys before them, as in the lecture: here a "
            "quarter of the pairs stays, and a query sees 12 keys",
            [("    frequency[half * 3 // 4 :] = 0\n", ""), (" + torch.ones(N, N).tril(-12)", "")]),
        Row("half-stay", "half of the pairs stay as they are: it is the quarter of them that turns most slowly",
            [("half * 3 // 4", "half // 2")]),
        Row("fast-stay", "the fastest pairs stay as they are: it is the quarter that turns most slowly, the last ones",
            [("half * 3 // 4 :", ": half // 4")]),
        Row("zero-for-one", "pairs that stay become 0: they are turned by an angle of 0, whose cosine is 1", [
            ("cos, sin = torch.cos(angle), torch.sin(angle)", "cos, sin = torch.cos(angle), torch.sin(angle)\n"
             "    cos[:, half * 3 // 4 :] = 0")]),
        *(Row("one-table-alone", f"pairs that stay have {done}, and {left}: an angle of 0 has cos 1 and sin 0",
              [("torch.cos(angle), torch.sin(angle)", f"torch.cos({angles[0]}), torch.sin({angles[1]})")])
          for done, left, angles in (("sin 0", "cos as before", (_ALL_ANGLES, "angle")),
                                     ("cos 1", "sin as before", ("angle", _ALL_ANGLES)))),
        Row("scaled-twice", "scores are scaled twice: flash_attention takes 1 / sqrt(D) itself",
            [("/ math.sqrt(D)", "/ D")]),
        Row("columns-for-pairs", "the first 3/4 of the columns are turned among themselves: pair i is the columns i "
            "and i + D / 2, and the first 3/4 of the pairs turn", [
            (_FREQUENCY, "half = half * 3 // 4\n    frequency = 10000.0 ** (-torch.arange(half) / half)\n"),
            ("q[..., half:]", "q[..., half : 2 * half]"), ("k[..., half:]", "k[..., half : 2 * half]"),
            ("q1 * sin + q2 * cos)", "q1 * sin + q2 * cos, q[..., 2 * half :])"),
            ("k1 * sin + k2 * cos)", "k1 * sin + k2 * cos, k[..., 2 * half :])")]),
        Row("turned-back", "pairs are turned the other way: sin has the wrong sign, or cos and sin are exchanged",
            [("torch.cos(angle), torch.sin(angle)", "torch.cos(angle), -torch.sin(angle)")]),
        Row("window-ahead", "the window reaches ahead too: a query sees its own key and the 11 before it", [
            ("torch.ones(N, N).triu(1)", "torch.ones(N, N).triu(12)")]),
        Row("not-turned", "q and k are not turned: the rotary embedding is missing", [
            ("torch.cat((q1 * cos - q2 * sin, q1 * sin + q2 * cos), -1)", "q"),
            ("torch.cat((k1 * cos - k2 * sin, k1 * sin + k2 * cos), -1)", "k")]),
        Row("v-turned", "v is turned as well; only q and k are", [
            ("    group =", "    v = torch.cat((v[..., :half] * cos - v[..., half:] * sin, v[..., :half] * sin + "
             "v[..., half:] * cos), -1)\n    group =")]),
        Row("heads-interleaved", "query heads read the key heads in another order: head h reads key head h // group",
            [("k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
              "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)")]),
        Row("positions-shifted", "q stands one position further on than k: both begin at 0", [
            ("    k1, k2 =", "    cos, sin = torch.cos(angle - frequency), torch.sin(angle - frequency)\n    k1, k2 ="
             )]),
    ],
)  # fmt: skip
def layer(q, k, v, positions):
    dtype, N, D, half = q.dtype, q.shape[2], q.shape[3], q.shape[3] // 2
    q, k, v = q.double(), k.double(), v.double()
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    frequency[half * 3 // 4 :] = 0
    angle = torch.arange(N)[:, None] * frequency
    cos, sin = torch.cos(angle), torch.sin(angle)
    q1, q2 = q[..., :half], q[..., half:]
    q = torch.cat((q1 * cos - q2 * sin, q1 * sin + q2 * cos), -1)
    k1, k2 = k[..., :half], k[..., half:]
    k = torch.cat((k1 * cos - k2 * sin, k1 * sin + k2 * cos), -1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(D)
    s = s.masked_fill(torch.ones(N, N).triu(1) + torch.ones(N, N).tril(-12) > 0, -math.inf)
    return (torch.softmax(s, -1) @ v).to(dtype)


@exercise(
    "10.8",
    title="Make the layer faster",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Go through slow_attention line by line. Which lines do not depend on q, k and v? Which make a tensor that "
        "only the next line reads?",
        "Tables belong into prepare: those of rope_table, with 1 and 0 for the pairs that do not turn. "
        "flash_attention keeps the scores to itself; causal=True and window=(11, 0) are its mask, and it takes fewer "
        "key heads than query heads. Drop the test for NaN.",
        "cos, sin = rope_table(...); cos[:, D * 3 // 8 :] = 1; sin[:, D * 3 // 8 :] = 0. "
        "q, k = fused_rope(q, k, cos, sin); return flash_attention(q, k, v, causal=True, window=(11, 0)).",
    ],
)
def lean_layer(prepare: Callable[..., Any], fast_attention: Callable[..., torch.Tensor]) -> str:
    it = RULES["10.8 layer"]

    @functools.wraps(fast_attention)
    def of_both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: int) -> torch.Tensor:
        return fast_attention(q, k, v, prepare(positions, q.shape[3], q.device))

    it.compare(of_both)  # type: ignore[attr-defined]
    _expect_lean(prepare, fast_attention)
    return f"{len(_LAYERS)} layers, and a call runs no more than it needs"


def _expect_lean(prepare: Callable[..., Any], fast: Callable[..., Any]) -> None:
    """CheckFailed where a call runs what it need not."""
    heads, kv_heads, N, D = 8, 2, 72, 16
    case = f"what a call runs with {heads} query heads, {kv_heads} key heads, N={N}, D={D}"
    q, k, v = (x.to(runtime.device()) for x in _layer(random.Random(0), 2, heads, kv_heads, N, D, 128)[:3])
    prepared = prepare(128, D, q.device)
    with running(case), torch.no_grad():
        fast(*(x[:, :, 1:] for x in (q, k, v)), prepare(256, D, q.device))  # a first call may compile, of other sizes
        with _Waiting() as waiting, _Seen() as seen:
            fast(q, k, v, prepared)
    size = q.element_size() * (q.numel() + k.numel())
    moved = sum(x.numel() * x.element_size() for _, made in seen.made for x in made) / size
    names = [name for name, _ in seen.made if name != "_to_copy"]  # casts, which rope needs in float16, on a GPU
    ran = f"{len(names)} operations, whose results take {moved:.1f} times the bytes of q and k"
    squares = [f"`{name}` makes a tensor {list(x.shape)}" for name, made in seen.made for x in made
               if list(x.shape).count(N) > 1]  # fmt: skip
    squares += [f"prepare makes a tensor {list(x.shape)}" for x in tree_leaves(prepared)
                if isinstance(x, torch.Tensor) and list(x.shape).count(128) > 1]  # fmt: skip
    waits = [*waiting.names, *seen.waits]
    tables = [name for name in names if name in ("cos", "sin", "polar", "cos_", "sin_", "tan")]
    cos, sin = rope_table(128, D, device=q.device)
    repeated = []
    for word, x in (("K", k), ("K", rope(k, cos, sin)), ("V", v)):
        copies = [y.repeat_interleave(heads // kv_heads, 1).float().flatten() for y in (x, x.transpose(-1, -2))]
        repeated += [
            f"`{name}` copies {word}" for name, made in seen.made for y in made
            if y.numel() == q.numel() and y.is_floating_point()
            and any(torch.allclose(y.float().flatten(), copy, atol=1e-2) for copy in copies)
        ]  # fmt: skip
    for wrong, slug, sentence in (
        (squares, "scores-in-memory", "{}: a number for each pair of query and key ({ran})"),
        (waits, "waits", "`{}` needs a tensor's values on the CPU, which waits there for the GPU"),
        (tables, "tables-rebuilt", "`{}` is computed in a call: prepare is there for it, and is called once"),
        (repeated, "kv-repeated", "{} for every query head ({ran})"),
        ([ran] if len(names) > _MOST_OPERATIONS else [], "too-many-operations",
         f"a call runs {{}}; {_MOST_OPERATIONS} operations are allowed: {', '.join(sorted(set(names)))[:120]}"),
        ([ran] if moved > _MOST_BYTES else [], "too-many-bytes", f"a call runs {{}}; {_MOST_BYTES} times are allowed"),
    ):  # fmt: skip
        expect(not wrong, sentence.format(*wrong[:1] or [""], ran=ran), diagnosis=slug, case=case)
