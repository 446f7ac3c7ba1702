"""The checks of phase 10: profiles, Amdahl's law, timing, the memory of training, rotary embedding, tiles, a layer."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, no_type_check

import torch
import triton
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlab import runtime
from flashlab.check import CheckFailed, expect, expect_all_close, expect_close, running
from flashlab.check.lookup import Row
from flashlab.check.symptoms import watched
from flashlab.exercises import phase_10_trace as _trace  # noqa: F401  10.9
from flashlab.exercises.answers import in_words
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.exercises.simulated_gpu import SimulatedGpu
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of
from flashlab.models.layer import eager_attention
from flashlab.models.rope import rope, rope_table


def _random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _number(value: Any, what: str, case: str) -> float:
    """A learner's number as a float; CheckFailed where it is none."""
    __tracebackhide__ = True
    expect(value is not None, f"{what} is None: is a `return` missing?", diagnosis="returned-none", case=case)
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        sentence = f"{what} should be a number, and it is {in_words(value, article=True)}"
        raise CheckFailed(sentence, diagnosis="wrong-type", case=case) from None


def _several(value: Any, names: Sequence[str], case: str) -> tuple[Any, ...]:
    """A learner's tuple; CheckFailed where it has not as many elements as there are names."""
    __tracebackhide__ = True
    expect(value is not None, "the function returns None: is a `return` missing?", diagnosis="returned-none", case=case)
    right = isinstance(value, (tuple, list)) and len(value) == len(names)
    expect(
        right,
        f"({', '.join(names)}) should be returned, and this is {in_words(value, article=True)}",
        diagnosis="wrong-type", case=case,
    )  # fmt: skip
    return tuple(value)


# ---- 10.1 -----------------------------------------------------------------------------------------------------------

_PARTS = {
    "aten::bmm": "products", "aten::_softmax": "softmax", "aten::div": "scaling",
    "aten::mul": "rotary embedding", "aten::sub": "rotary embedding", "aten::add": "rotary embedding",
    "aten::cat": "rotary embedding", "aten::ones": "mask", "aten::triu": "mask",
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
    title="Name the bottleneck",
    minutes=15,
    difficulty="Warm-up",
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
    ],
    draw=_lines,
    given=_profile,
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
        Row("total-times", "share: the part's own time is divided by the largest cpu_time_total of a row: the whole is "
            "the sum of all own times", [("sum(times.values())", "max(row.cpu_time_total for row in rows)")]),
        Row("times-count", "the times are multiplied by count: a row's time is that of all its calls already",
            [("+ row.self_cpu_time_total", "+ row.self_cpu_time_total * row.count")]),
        Row("one-call", "the times are divided by count: the part with the most time in all its calls is wanted",
            [("+ row.self_cpu_time_total", "+ row.self_cpu_time_total / row.count")]),
        Row("other-left-out", 'operations that `parts` does not have are left out: they are the part "other"',
            [('        part = parts.get(row.key, "other")\n',
              '        if row.key not in parts:\n            continue\n        part = parts[row.key]\n')]),
        Row("other-left-out", 'the part "other" is never the answer: it is a part like the others',
            [("max(times, key=times.get)", 'max((p for p in times if p != "other"), key=times.get)')]),
        Row("other-left-out", "share: the operations that `parts` does not have are missing in the whole",
            [("sum(times.values())", '(sum(t for p, t in times.items() if p != "other") or 1)')]),
        Row("one-operation", "of each part only its last operation counts: each replaces the one before, and they add "
            "up", [("times.get(part, 0.0) + row", "row"), ("calls.get(part, 0) + row", "row")]),
        Row("one-operation", "chosen by the slowest operation: add up the operations of each part first",
            [("max(times, key=times.get)",
              'parts.get(max(rows, key=lambda row: row.self_cpu_time_total).key, "other")')]),
        Row("one-operation", "of each part only its slowest operation counts: its operations add up",
            [("times.get(part, 0.0) + row.self_cpu_time_total",
              "max(times.get(part, 0.0), row.self_cpu_time_total)")]),
        Row("one-operation", "share: it is that of the part's slowest operation alone: the part has others",
            [("return slowest, times[slowest]", 'return slowest, max(row.self_cpu_time_total for row in rows if '
              'parts.get(row.key, "other") == slowest)')]),
        Row("most-calls", "chosen by the calls: the part with the most time is wanted",
            [("max(times, key=times.get)", "max(calls, key=calls.get)")]),
        Row("rows-for-calls", "calls: it is how many rows the part has: a row says in `count` how often it was called",
            [("+ row.count", "+ 1")]),
        Row("all-calls", "calls: it is the calls of the whole profile: those of the part are wanted",
            [("calls[slowest]", "sum(calls.values())")]),
        Row("share-of-the-calls", "share: it is the part's share of the calls: its share of the time is wanted",
            [("times[slowest] / sum(times.values())", "calls[slowest] / sum(calls.values())")]),
        Row("share-of-the-rest", "share: it is the share of all the other parts",
            [("times[slowest] / sum(times.values())", "1 - times[slowest] / sum(times.values())")]),
        Row("part-by-rest", "share: the part's time is divided by that of the others: the whole has the part in it too",
            [("sum(times.values()),", "((sum(times.values()) - times[slowest]) or 1),")]),
        Row("time-for-calls", "calls: it is the part's time: how often was it called?",
            [("calls[slowest]\n", "times[slowest]\n")]),
        Row("least", "it is the part with the least time", [("max(times", "min(times")]),
    ],
    tol=0.006,  # two decimals will do
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


def _of_a_factor(name: str, share: str) -> list[Row]:
    """The mistakes of one of the two factors, whose share of the time gets faster."""
    wrong = {
        "time-for-factor": (f"1 - {share} + {share} / faster", "is the new time as a share of the old one: it is its "
                            "inverse"),
        "share-times-factor": (f"{share} * faster", "is the share times `faster`"),
        "weighted-mean": (f"1 - {share} + {share} * faster", "is a weighted mean of 1 and `faster`: times add up, "
                          "factors do not"),
        "faster": ("faster", "is `faster` itself: all the rest keeps its time"),
        "time-saved": (f"{share} * (1 - 1 / faster)", "is the share of the time that is saved: the factor is old by "
                       "new time"),
        "the-rest-faster": (f"1 / ({share} + (1 - {share}) / faster)", "has everything but attention get faster: it is "
                            "attention that does"),
    }  # fmt: skip
    if name == "step":
        wrong |= {
            "factor-in-the-share": ("1 / (1 - layers + layers / faster)", "has the layers get faster as a whole: only "
                                    "attention does"),
            "layer-again": ("layer", "is that of the layer: of the step attention has the share attention · layers"),
            "product-of-factors": ("layer / (1 - layers + layers / faster)", "multiplies two factors: attention is one "
                                   "share of the step, attention · layers"),
            "factors-averaged": ("1 - layers + layers * layer", "is a weighted mean of factors: times add up, factors "
                                 "do not"),
            "factor-of-a-share": ("layer * layers", "is layer · layers: times add up, factors do not"),
            "shares-averaged": ("2 / (2 - attention - layers + (attention + layers) / faster)", "has the mean of the "
                                "two shares: a share of a share is a product"),
        }  # fmt: skip
    old = f"1 / (1 - {share} + {share} / faster)"
    return [Row(slug, f"{name} {said}", [(old, new)]) for slug, (new, said) in wrong.items()]


@rule(
    "10.2",
    title="What is an attention eight times faster worth?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Let the old time be 1. Which piece of it stays as it was, and what becomes of the other one?",
        "The layer's new time is (1 - attention) + attention / faster. The factor is the old time by the new one.",
        "In the step attention has the share attention * layers. The limit is what is left where that share takes no "
        "time at all.",
    ],
    returns="layer, step, limit",
    inputs=[(0.5, 0.5, 2.0), (0.8, 0.5, 8.0), (0.9, 0.25, 8.53), (1.0, 1.0, 8.0), (0.0, 0.4, 8.0), (0.6, 0.7, 1.0),
            (0.7, 0.9, 0.5), (1.0, 0.3, 4.0)],
    draw=lambda r: (r.choice((0.0, 1.0, r.random(), r.random())), r.choice((1.0, r.uniform(0.1, 1), r.uniform(0.1, 1))),
                    r.choice((1.0, r.uniform(0.3, 20), r.uniform(0.3, 20)))),
    words={"layer": "layer", "step": "step", "limit": "limit"},
    notes={"of_step": "attention has the share attention · layers of the step", "faster": "attention alone is faster"},
    rows=[
        *_of_a_factor("layer", "attention"), *_of_a_factor("step", "of_step"),
        Row("time-for-factor", "limit is the time that is left as a share of the old one: the factor is its inverse",
            [("1 / (1 - of_step) if of_step < 1 else math.inf", "1 - of_step")]),
        Row("layers-for-the-limit", "limit has the layers take no time at all: only attention does",
            [("1 / (1 - of_step) if of_step < 1", "1 / (1 - layers) if layers < 1")]),
        Row("attention-for-the-limit", "limit is that of a layer: of the step attention has attention · layers",
            [("1 / (1 - of_step) if of_step < 1", "1 / (1 - attention) if attention < 1")]),
        Row("limit-finite", "limit is right but where attention is the whole step: no time is left then, math.inf",
            [("math.inf", "1e9")]),
        Row("limit-finite", "limit is right but where attention is the whole step: no time is left then, math.inf",
            [("math.inf", "1e12")]),
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

_TIMING = 0.03  # of a time: launches, and reading the clock, cost a little
Programs = dict[str, dict[str, Any]]
# (what is wrong, sentence) where a timing function gets it right on a GPU without the first calls' time, or on one
# whose launches wait.
_FIRST_CALLS = (
    "first-calls",
    "with programs whose first calls take no longer than the others, your function gives the right times: so what the "
    "first calls take longer is in the time of {name}",
)
_NOT_WAITED = (
    "not-waited-for",
    "on a GPU whose launches wait for their kernels, your function gives the right times; a launch comes back at once, "
    "so look at what the GPU still has to do whenever gpu.clock() is read",
)
_BOTH = (
    "first-calls-and-not-waited-for",
    "two things are wrong: your function gives the right times only if first calls take no longer than the others, and "
    "launches wait for their kernels",
)


def _timed(
    answer: Callable[..., Any], case: str, programs: Programs, options: dict[str, int], *,
    single: bool, blocking: bool = False, warm: bool = False,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """{name: (time told, right time)} of one case on a GPU of this kind."""
    __tracebackhide__ = True
    gpu = SimulatedGpu(blocking=blocking, warm=warm)
    runs = {name: gpu.program(name, **how) for name, how in programs.items()}
    with running(case):
        given = answer(next(iter(runs.values())) if single else dict(runs), gpu, **options)
    if watched() is None and gpu.readings == 0 and given is not None:
        sentence = "gpu.clock() is never read: other clocks do not know what the simulated GPU does"
        raise CheckFailed(sentence, diagnosis="clock-not-read", case=case)
    if single:
        given = {next(iter(runs)): given}
    expect(given is not None, "the function returns None: is a `return` missing?", diagnosis="returned-none", case=case)
    expect(
        isinstance(given, dict) and set(given) == set(runs),
        f"{{name: time}} for each of {', '.join(runs)} should be returned, and this is "
        + (
            f"a dict of {', '.join(map(repr, list(given)[:4]))}"
            if isinstance(given, dict) and all(isinstance(x, (str, int)) for x in given)
            else in_words(given, article=True)
        ),
        diagnosis="wrong-type", case=case,
    )  # fmt: skip
    steady = {n: gpu.steady_ms(how["kernel_ms"], how.get("kernels", 1)) for n, how in programs.items()}
    return {n: (_number(given[n], f"the time of {n}" if not single else "the time", case), steady[n]) for n in runs}


def _expect_times(answer: Callable[..., Any], cases: Mapping[str, tuple[Programs, dict]], *, single: bool) -> None:
    """CheckFailed unless every time is right; the reason is found by trying the same on other kinds of GPU."""
    __tracebackhide__ = True

    def times(**world: bool) -> dict[tuple[str, str], tuple[float, float]]:
        return {
            (case, name): both
            for case, (programs, options) in cases.items()
            for name, both in _timed(answer, case, programs, options, single=single, **world).items()
        }

    def is_right(got: float, want: float) -> bool:
        return abs(got - want) <= _TIMING * want

    seen = times()
    if watched() is None and not all(is_right(*both) for both in seen.values()):
        case, name = next(at for at, both in seen.items() if not is_right(*both))
        for world, (slug, why) in (
            ({"warm": True}, _FIRST_CALLS), ({"blocking": True}, _NOT_WAITED),
            ({"warm": True, "blocking": True}, _BOTH),
        ):  # fmt: skip
            if all(is_right(*both) for both in times(**world).values()):
                raise CheckFailed(why.format(name=name), diagnosis=slug, case=case)
        _explain_arithmetic(times(warm=True, blocking=True), cases)
    for (case, name), (got, want) in seen.items():
        what = "the time of a call" if single else f"the time of {name}"
        expect_close(got, want, what=f"{what} in milliseconds", case=case, tol=_TIMING * want)


def _explain_arithmetic(
    seen: Mapping[tuple[str, str], tuple[float, float]], cases: Mapping[str, tuple[Programs, dict]]
) -> None:
    """CheckFailed if every time is wrong by a known factor, where neither first calls nor waiting matter."""
    __tracebackhide__ = True
    factors: dict[str, tuple[Callable[[int, int], float], str]] = {
        "sum-for-mean": (
            lambda r, w: r,
            "each time is `rounds` times too large: that is all the rounds together",
        ),
        "seconds": (lambda r, w: 0.001, "the times are 1000 times too small: gpu.clock() is in milliseconds already"),
        "microseconds": (lambda r, w: 1000, "the times are 1000 times too large: gpu.clock() is in milliseconds"),
        "warmup-divided": (
            lambda r, w: r / (r + w),
            "the time of the rounds is divided by the rounds and the warm-up together",
        ),
        "warmup-in-the-time": (
            lambda r, w: (r + w) / r,
            "the warm-up is in the time, which is divided by the rounds alone: read the clock after the warm-up",
        ),
        "warmup-for-rounds": (lambda r, w: r / w, "the time is divided by `warmup`; it is that of `rounds` calls"),
        "rounds-too-small": (
            lambda r, w: 1 / r,
            "each time is `rounds` times too small: how many calls are timed, and what is it divided by?",
        ),
        "one-start": (
            lambda r, w: (r + 1) / 2,
            "each time is (rounds + 1) / 2 times too large, as if every round were timed from the first one's start",
        ),
        "a-round-not-run": (lambda r, w: (r - 1) / r, "the time of rounds - 1 calls is divided by rounds"),
        "one-round-less": (lambda r, w: r / (r - 1) if r > 1 else math.nan, "the time is divided by rounds - 1"),
        "one-round-more": (lambda r, w: r / (r + 1), "the time is divided by rounds + 1"),
        "negative": (lambda r, w: -1, "the times are negative: the later reading minus the earlier one"),
    }
    for slug, (factor, why) in factors.items():
        expected = [
            factor(cases[case][1].get("rounds", 20), cases[case][1].get("warmup", 10)) * want
            for (case, _), (_, want) in seen.items()
        ]
        if all(abs(got - x) <= _TIMING * abs(x) for (got, _), x in zip(seen.values(), expected, strict=True)):
            case, _ = next(iter(seen))
            raise CheckFailed(why, diagnosis=slug, case=case)
    if all(abs(got) < 1e-4 * want for got, want in seen.values()):
        case, _ = next(iter(seen))
        sentence = "the times are nearly 0: nothing runs between the two readings of the clock"
        raise CheckFailed(sentence, diagnosis="nothing-timed", case=case)
    sums: dict[str, float] = {}
    for (case, _), (_, want) in seen.items():
        sums[case] = sums.get(case, 0.0) + want
    if max(len(programs) for programs, _ in cases.values()) > 1 and all(
        abs(got - sums[case]) <= _TIMING * sums[case] for (case, _), (got, _) in seen.items()
    ):
        case = next(case for case, (programs, _) in cases.items() if len(programs) > 1)
        sentence = "each function is given the time of all of them: read the clock before and after each"
        raise CheckFailed(sentence, diagnosis="all-together", case=case)


@exercise(
    "10.3",
    title="The first one wins",
    minutes=15,
    difficulty="Bug hunt",
    untouched="829079d2aa27",
    history="a common mistake: a benchmark warms up the GPU, or the first of its peers, and the others carry the time "
    "of their compilation",
    hints=[
        "Which times are right? Where do those functions stand in the list?",
        "What do the first calls of a function cost, and when does each of them happen?",
        "Warm up each function, and wait for the GPU, before the clock is read for it.",
    ],
)
def _(compare: Callable[..., dict]) -> str:
    eager = {"kernel_ms": 8.0, "first_calls_ms": (40.0,)}
    flash = {"kernel_ms": 1.0, "first_calls_ms": (300.0, 80.0, 20.0)}
    graph = {"kernel_ms": 0.05, "kernels": 30, "first_calls_ms": (900.0, 200.0, 60.0)}
    cases: dict[str, tuple[Programs, dict]] = {
        "one function": ({"flash": flash}, {"warmup": 10, "rounds": 20}),
        "eager, flash": ({"eager": eager, "flash": flash}, {"warmup": 10, "rounds": 20}),
        "flash, eager": ({"flash": flash, "eager": eager}, {"warmup": 10, "rounds": 20}),
        "three functions, 3 rounds": ({"eager": eager, "compiled": graph, "flash": flash}, {"warmup": 4, "rounds": 3}),
        "two functions with the same kernel": ({"a": flash, "b": dict(flash)}, {"warmup": 5, "rounds": 7}),
    }
    _expect_times(compare, cases, single=False)
    return f"{len(cases)} lists, in any order"


@exercise(
    "10.4",
    title="Two milliseconds in five microseconds",
    minutes=15,
    difficulty="Bug hunt",
    untouched="9f419c915389",
    history="a common mistake; PyTorch's notes on CUDA semantics warn of it, under asynchronous execution",
    hints=[
        "Who is working while the clock is read, the CPU or the GPU? What does the CPU do in run()?",
        "A launch takes 0.005 ms and comes back. Up to 1024 launches may be under way; the next one waits for a place.",
        "Between run() and the second reading of the clock the GPU has to end its work: gpu.synchronize().",
    ],
)
def _(milliseconds: Callable[..., float]) -> str:
    small = {"kernel_ms": 0.05, "kernels": 300, "first_calls_ms": (50.0,)}
    cases: dict[str, tuple[Programs, dict]] = {
        "a kernel of 2 ms": ({"run": {"kernel_ms": 2.0, "first_calls_ms": (200.0,)}}, {"warmup": 5, "rounds": 20}),
        "a step of 300 kernels of 0.05 ms, 20 rounds": ({"run": small}, {"warmup": 5, "rounds": 20}),
        "the same step, 3 rounds": ({"run": small}, {"warmup": 2, "rounds": 3}),
        "4 kernels of 0.4 ms": (
            {"run": {"kernel_ms": 0.4, "kernels": 4, "first_calls_ms": (100.0, 30.0)}}, {"warmup": 4, "rounds": 5},
        ),
        "100 kernels of 0.001 ms, each shorter than its launch": (
            {"run": {"kernel_ms": 0.001, "kernels": 100}}, {"warmup": 3, "rounds": 9},
        ),
    }  # fmt: skip
    _expect_times(milliseconds, cases, single=True)
    _expect_median(milliseconds)
    return f"{len(cases) + 1} programs"


def _expect_median(milliseconds: Callable[..., float]) -> None:
    """CheckFailed unless a program whose calls differ is given the median of its times."""
    __tracebackhide__ = True
    calls = (2.0, 1.6, 2.0, 9.0)
    case = "a kernel whose calls take 2, 1.6, 2 and 9 ms in turn, 20 rounds"
    options = {"warmup": 4, "rounds": 20}
    ((got, want),) = _timed(milliseconds, case, {"run": {"kernel_ms": calls}}, options, single=True).values()
    others = {"mean": statistics.mean(calls), "smallest": min(calls), "largest": max(calls)}
    for name, value in others.items():
        expect(
            abs(got - value) > _TIMING * value,
            f"{got:.3g} ms is returned, the {name} of the calls' times; their median is {want:g}",
            diagnosis="not-the-median", case=case,
        )  # fmt: skip
    expect_close(got, want, what="the time of a call in milliseconds", case=case, tol=_TIMING * want)


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
    title="The memory of training, by hand",
    minutes=25,
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
        Row("mask-in-numbers", "activations: the mask counts 4 bytes for each pair: it is one byte",
            [("+ seq_len * seq_len", "+ 4 * seq_len * seq_len")]),
        Row("not-repeated", "activations: the original repeats K and V for every query head",
            [("(x + q + q + q + P + q)", "(x + q + kv + kv + P + q)")]),
        Row("all-heads", "parameters and gradients and optimizer: keys and values are projected to `heads` heads: "
            "there are `kv_heads` of each", [("2 * heads + 2 * kv_heads", "4 * heads")]),
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

_TURN = (
    "X_ptr", "Y_ptr", "COS_ptr", "SIN_ptr", "stride_xb", "stride_xh", "stride_xm", "stride_xd",
    "stride_yb", "stride_yh", "stride_ym", "stride_yd", "heads", "M", "offset", "HALF", "BLOCK_M",
)  # fmt: skip


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int, mistake: str = "") -> torch.Tensor:
    """`rope` in float64, with a mistake or none. x: [batch, heads, M, 2 HALF]."""
    M, half = x.shape[2], x.shape[3] // 2
    rows = torch.arange(M, device=x.device)
    position = rows + offset
    if mistake == "offset-forgotten":
        position = rows
    elif mistake == "offset-subtracted":
        position = (rows - offset).clamp(min=0)
    elif mistake == "first-position":
        position = torch.full_like(rows, offset)
    elif mistake == "block-start-forgotten":
        position = rows % 16 + offset
    elif mistake == "one-position-on":
        position = (position + 1).clamp(max=len(cos) - 1)
    c, s = cos.double()[position], sin.double()[position]
    if mistake == "table-stride":
        flat = torch.arange(half, device=x.device) + position[:, None] * 2 * half
        c, s = (t.double().flatten()[flat.clamp(max=t.numel() - 1)] for t in (cos, sin))
    elif mistake == "cos-and-sin-exchanged":
        c, s = s, c
    elif mistake == "first-angle":
        c, s = c[:, :1], s[:, :1]
    elif mistake == "angle-negative":
        s = -s
    x1, x2 = x.double().chunk(2, -1)
    if mistake == "neighbours":
        x1, x2 = x.double()[..., ::2], x.double()[..., 1::2]
    elif mistake == "halves-exchanged":
        x1, x2 = x2, x1
    y1, y2 = x1 * c - x2 * s, x1 * s + x2 * c
    if mistake == "both-minus":
        y2 = x1 * s - x2 * c
    elif mistake == "both-plus":
        y1 = x1 * c + x2 * s
    elif mistake == "second-half-unturned":
        y2 = x2
    elif mistake == "first-half-unturned":
        y1 = x1
    elif mistake == "second-from-the-first":
        y2 = y1 * s + x2 * c
    elif mistake == "own-half-only":
        y1, y2 = x1 * c, x2 * c
    elif mistake == "sin-for-both":
        y1, y2 = x1 * c - x2 * s, x1 * c + x2 * s
    elif mistake == "second-is-the-first":
        y2 = y1
    elif mistake == "results-exchanged":
        y1, y2 = y2, y1
    elif mistake == "not-turned":
        y1, y2 = x1, x2
    if mistake == "neighbours":
        return torch.stack((y1, y2), -1).flatten(-2)
    return torch.cat((y1, y2), -1)


_TURN_MISTAKES = {
    "not-turned": "Y is X: nothing is turned",
    "angle-negative": "every pair is turned by the negative angle: look at the signs before sin",
    "neighbours": "neighbouring numbers are paired, as in the paper; here pair i is x[i] and x[i + HALF]",
    "both-minus": "y2 has a minus: it is x1 sin + x2 cos",
    "both-plus": "y1 has a plus: it is x1 cos - x2 sin",
    "second-from-the-first": "y2 is computed from y1; it needs the x1 that was loaded",
    "second-half-unturned": "the second half of each row is as it was",
    "first-half-unturned": "the first half of each row is as it was",
    "cos-and-sin-exchanged": "cos and sin are exchanged",
    "sin-for-both": "y2 is x1 cos + x2 sin; it is x1 sin + x2 cos",
    "second-is-the-first": "y2 is x1 cos - x2 sin, as y1 is; it is x1 sin + x2 cos",
    "first-angle": "every pair is turned by the angle of pair 0",
    "own-half-only": "each number is multiplied by cos, and the other of its pair is missing",
    "results-exchanged": "y1 is stored where y2 belongs, and y2 where y1 does",
    "halves-exchanged": "x1 is taken from the second half of the row, and x2 from the first",
    "offset-forgotten": "offset is ignored: row m stands at position offset + m",
    "offset-subtracted": "offset is subtracted; row m stands at position offset + m",
    "first-position": "every row is turned as the first one is: its position has to move with the row",
    "block-start-forgotten": "right in the first BLOCK_M rows: after them the angles begin again at the block's start",
    "one-position-on": "every row is turned as if it stood one position further on",
    "table-stride": "the tables are read with rows of 2 · HALF numbers; they have HALF",
}


def _layouts(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """x and a tensor of its shape to write to, with strides of three kinds."""
    return {
        "contiguous": (x, torch.empty_like(x)),
        "[batch, M, heads, D] in memory": (
            x.transpose(1, 2).contiguous().transpose(1, 2), torch.empty_like(x).transpose(-1, -2).contiguous().mT,
        ),
        "every second column of a wider tensor": (
            torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2],
            torch.empty_like(x.transpose(0, 1).contiguous()).transpose(0, 1),
        ),
    }  # fmt: skip


def _turn(
    kernel: Any,
    case: str,
    source: torch.Tensor,
    target: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offset: int,
) -> None:
    """CheckFailed unless the kernel fills all of `target` and nothing else."""
    __tracebackhide__ = True
    batch, heads, M, width = source.shape
    target.fill_(math.nan)
    before = source.clone()
    with in_bounds(case, X=source, Y=target, COS=cos, SIN=sin) as traffic:
        kernel[(triton.cdiv(M, 16), batch * heads)](
            source, target, cos, sin, *source.stride(), *target.stride(), heads, M, offset,
            HALF=width // 2, BLOCK_M=16,
        )  # fmt: skip
    same = torch.equal(before, source)
    expect(same, "X was overwritten: load from X, store to Y", diagnosis="input-modified", case=case)
    explain_undefined(traffic, target, case)
    missing = int(target.isnan().sum())
    expect(
        not missing,
        "nothing is ever stored to Y" if missing == target.numel()
        else f"{missing} of {target.numel()} numbers of Y are never stored",
        diagnosis="never-written", case=case,
    )  # fmt: skip


@exercise(
    "10.6",
    title="Rotary embedding in one kernel",
    minutes=30,
    difficulty="Core",
    hints=[
        "Five tiles of [BLOCK_M, HALF]: cos, sin, x1, x2, and the mask that says which rows there are.",
        "An address of X: X_ptr + batch * stride_xb + head * stride_xh + rows[:, None] * stride_xm + pairs[None, :] * "
        "stride_xd; x2 is HALF * stride_xd further on. An angle: (rows[:, None] + offset) * HALF + pairs[None, :].",
        "Load x1 and x2 with mask=rows[:, None] < M, other=0.0 and .to(tl.float32). Store with the same mask, "
        "(x1 * cos - x2 * sin).to(Y_ptr.dtype.element_ty) and (x1 * sin + x2 * cos) HALF * stride_yd further on.",
    ],
)
def _(turn_kernel: Any) -> str:
    kernel = kernel_of(turn_kernel, _TURN)
    shapes = (
        (1, 1, 16, 8, 0, torch.float32), (2, 3, 37, 16, 5, torch.float32), (1, 4, 20, 32, 40, torch.float32),
        (2, 2, 33, 16, 3, torch.float16),
    )  # fmt: skip
    answers, inputs = [], []
    for batch, heads, M, half, offset, dtype in shapes:
        cos, sin = rope_table(2 * (M + offset) + 3, 2 * half, device=runtime.device())
        (x,) = _random((batch, heads, M, 2 * half), seed=M, dtype=dtype)
        for words, (source, target) in _layouts(x).items():
            case = (
                f"batch {batch}, {heads} heads, {M} rows, HALF={half}, offset {offset}, "
                f"{str(dtype).removeprefix('torch.')}, {words}"
            )
            _turn(kernel, case, source, target, cos, sin, offset)
            answers.append((case, target, _turned(source, cos, sin, offset)))
            inputs.append((source, cos, sin, offset))

    def models(which: slice) -> dict[str, tuple[list[torch.Tensor], str]]:
        return {s: ([_turned(*one, s) for one in inputs[which]], why) for s, why in _TURN_MISTAKES.items()}

    exact = sum(case.find("float32") > 0 for case, *_ in answers)
    off = [case for case, got, want in answers[:exact] if (got.double() - want).abs().max().item() > 3e-6]
    expect(
        not off or any(case.endswith(", contiguous") for case in off),
        "right where X and Y are contiguous, wrong where they are not: which strides are used, and which are taken for "
        "granted?",
        diagnosis="contiguous-only", case=off[0] if off else None,
    )  # fmt: skip
    try:
        expect_all_close(answers[:exact], what="Y", mistakes=lambda: models(slice(exact)), tol=3e-6)
    except CheckFailed as failed:
        failed.explain = failed.explain or (lambda: _explain_turn(kernel))
        raise
    for case, got, want in answers[exact:]:
        rounding = (want.half().double() - want).abs().max().item()
        expect(
            (got.double() - want).abs().max().item() <= 1.3 * rounding or watched() is not None,
            "the values of float16 rows are right to fewer digits than one rounding leaves: is everything computed in "
            "float32, and rounded when it is stored?",
            diagnosis="low-precision", case=case,
        )  # fmt: skip
    pointers = {"X_ptr": torch.float16, "Y_ptr": torch.float16, "COS_ptr": torch.float32, "SIN_ptr": torch.float32}
    strides = {name: 64 for name in _TURN if name.startswith("stride_")} | {"stride_xd": 1, "stride_yd": 1}
    compiles(kernel, pointers | strides | {"heads": 4, "M": 100, "offset": 3, "HALF": 32, "BLOCK_M": 16})
    return f"{len(answers)} tensors, and it compiles"


def _explain_turn(kernel: Any) -> tuple[str, str] | None:
    """What of X, and what of the tables, reaches a number of Y: known tables first, then X of ones."""
    batch, heads, M, half, offset = 2, 3, 20, 8, 4
    shape, positions = (batch, heads, M, 2 * half), 3 * (M + offset) + 3
    # From 1 to 2, so that no sum or difference of two of them is a third.
    numbers = torch.linspace(1, 2, math.prod(shape), device=runtime.device()).view(shape)
    ones, zeros = (torch.full((positions, half), float(x), device=numbers.device) for x in (1, 0))
    table = torch.linspace(1, 2, positions * half, device=numbers.device).view(positions, half)

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = torch.full(shape, math.nan, device=x.device)
        x = x.contiguous()
        kernel[(triton.cdiv(M, 16), batch * heads)](
            x, y, cos, sin, *x.stride(), *y.stride(), heads, M, offset, HALF=half, BLOCK_M=16
        )
        return y

    def place(value: float, of: Sequence[int]) -> list[int] | None:
        at = (abs(value) - 1) * (math.prod(of) - 1)
        if abs(at - round(at)) > 0.01 or not 0 <= round(at) < math.prod(of):
            return None
        at = round(at)
        return [int(i) for i in torch.unravel_index(torch.tensor(at), tuple(of))]

    x1, x2 = numbers.chunk(2, -1)
    for words, cos, sin, want in (
        ("where every cosine is 1 and every sine 0", ones, zeros, numbers),
        ("where every cosine is 0 and every sine 1", zeros, ones, torch.cat((-x2, x1), -1)),
    ):
        y = run(numbers, cos, sin)
        if (at := _first_off(y, want)) is None:
            continue
        mine, right = y[tuple(at)].item(), place(want[tuple(at)].item(), shape)
        held, sign = place(mine, shape), "-" if mine < 0 else ""
        wanted = f"{'-' if want[tuple(at)] < 0 else ''}X{right}"
        if mine == 0:
            return "wrong-place", f"Y{at} is 0 {words}; it should be {wanted}"
        if held is None:
            pair = [x[tuple(at[:-1] + [at[-1] % half])].item() for x in (x1, x2)]
            sums = {"x1 + x2": sum(pair), "x1 - x2": pair[0] - pair[1], "x2 - x1": pair[1] - pair[0]}
            said = next((name for name, x in sums.items() if abs(mine - x) < 1e-5), "no single number of X")
            return "wrong-terms", f"Y{at} is {said} {words}; it should be {wanted}"
        return "wrong-place", f"Y{at} is {sign}X{held} {words}; it should be {wanted}"
    for name, cos, sin in (("COS", table, zeros), ("SIN", zeros, table)):
        position = torch.arange(M, device=table.device) + offset
        half_turned = table[position].expand(batch, heads, M, half)
        first, second = (half_turned, half_turned) if name == "COS" else (-half_turned, half_turned)
        want = torch.cat((first, second), -1)
        y = run(torch.ones(shape, device=table.device), cos, sin)
        if (at := _first_off(y, want)) is None:
            continue
        held, right = place(y[tuple(at)].item(), table.shape), place(want[tuple(at)].item(), table.shape)
        if held is None:
            return "wrong-angle", f"Y{at} takes no number of {name} as it is; it should take {name}{right}"
        return "wrong-angle", f"Y{at} takes {name}{held} of the table; it should take {name}{right}"
    return None


def _first_off(y: torch.Tensor, want: torch.Tensor) -> list[int] | None:
    off = ((y - want).abs() > 1e-5).nonzero() if bool(y.isfinite().all()) else (~y.isfinite()).nonzero()
    return off[0].tolist() if len(off) else None


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
    (110 * 10**12, 10**12, 122880), (6 * 10**12, 10**12, 36864), (32 * 10**12, 10**12, 98304),
)  # fmt: skip


@rule(
    "10.7",
    title="A tile from the roofline",
    minutes=25,
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
        Row("scores-in-shared", "BLOCK_N: a tile of scores counts in the shared memory: it stays in registers",
            [("* HEAD_DIM * itemsize <=", "* HEAD_DIM * itemsize + BLOCK_M * B * itemsize <=")]),
        Row("kv-only", "BLOCK_M and BLOCK_N: the bytes are those of K and V alone: Q is read and O is written as well",
            [("M + N + N + M", "N + N")]),
        Row("q-left-out", "BLOCK_M and BLOCK_N: the reading of Q, or the writing of O, is missing in the bytes",
            [("M + N + N + M", "M + N + N")]),
        Row("one-of-kv", "BLOCK_M and BLOCK_N: the bytes have one of K and V: both are read",
            [("M + N + N + M", "M + N + M")]),
        Row("o-in-shared", "BLOCK_N: O counts in the shared memory: it stays in registers",
            [("(BLOCK_M + 2 *", "(2 * BLOCK_M + 2 *")]),
        Row("one-tile", "BLOCK_N: the shared memory has STAGES tiles of one of K and V: both have them",
            [("2 * STAGES * B", "STAGES * B")]),
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
_WAITS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose",
    "is_nonzero", "unique", "masked_select", "argwhere",
}  # fmt: skip


class _Seen(TorchDispatchMode):
    """The operations that make or change a tensor, with the tensors made; a view is none. waits: a value was read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[torch.Tensor]]] = []
        self.waits = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        made = [x for x in outputs if x.untyped_storage()._cdata not in known]
        name = func.overloadpacket.__name__
        self.waits |= name == "_local_scalar_dense"
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
        if name in _WAITS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _attention(q, k, v, cos, sin, mistake: str = "") -> torch.Tensor:
    """Causal attention with rotary embedding in float64, with a mistake or none."""
    q, k, v, cos, sin = (x.detach().cpu().double() for x in (q, k, v, cos, sin))
    N, D, group = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    if mistake == "positions-shifted":
        q, k = rope(q, cos, sin, offset=1), rope(k, cos, sin)
    elif mistake == "cos-and-sin-exchanged":
        q, k = rope(q, sin, cos), rope(k, sin, cos)
    elif mistake == "angle-negative-of-k":
        q, k = rope(q, cos, sin), rope(k, cos, -sin)
    elif mistake == "neighbours":
        q, k = (_turned(x, cos, sin, 0, "neighbours") for x in (q, k))
    else:
        q = q if mistake in ("q-not-turned", "not-turned") else rope(q, cos, sin)
        k = k if mistake in ("k-not-turned", "not-turned") else rope(k, cos, sin)
    if mistake == "v-turned":
        v = rope(v, cos, sin)
    if mistake == "heads-interleaved":
        k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
    elif mistake == "first-key-head":
        k, v = k[:, :1], v[:, :1]
    if mistake == "scale-missing":
        q = q * math.sqrt(D)
    elif mistake == "scale-twice":
        q = q / math.sqrt(D)
    if mistake == "k-and-v-exchanged":
        k, v = v, k
    if mistake in ("strictly-causal", "one-key-too-many"):
        group = q.shape[1] // k.shape[1]
        s = q @ k.repeat_interleave(group, 1).mT / math.sqrt(D)
        s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(0 if mistake == "strictly-causal" else 2), -math.inf)
        return torch.softmax(s, -1).nan_to_num() @ v.repeat_interleave(group, 1)
    o = eager_attention(q, k, v, causal=mistake != "not-causal")
    return o.transpose(1, 2) if mistake == "transposed" else o


_LAYER_MISTAKES = {
    "not-causal": "queries see the keys that come after them: slow_attention is causal",
    "strictly-causal": "a query does not see the key at its own position; it should",
    "one-key-too-many": "a query sees the key after its own position",
    "k-and-v-exchanged": "k and v are exchanged in the attention",
    "cos-and-sin-exchanged": "q and k are turned with cos and sin exchanged",
    "not-turned": "q and k are not turned: the rotary embedding is missing",
    "q-not-turned": "q is not turned: its rotary embedding is missing",
    "k-not-turned": "k is not turned: its rotary embedding is missing",
    "v-turned": "v is turned as well; only q and k are",
    "angle-negative-of-k": "k is turned by the negative angle; q is not",
    "positions-shifted": "q stands one position further on than k: both begin at 0",
    "neighbours": "neighbouring numbers are paired; `rope` pairs x[i] with x[i + D / 2]",
    "heads-interleaved": "the query heads read the key heads in another order: head h reads key head h // group",
    "first-key-head": "every query head reads the first key head; head h reads key head h // group",
    "scale-missing": "the scores are not divided by the square root of D",
    "scale-twice": "the scores are divided by the square root of D twice",
}  # fmt: skip


@exercise(
    "10.8",
    title="Make the layer faster",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Go through slow_attention line by line. Which lines do not depend on q, k and v? Which make a tensor that "
        "only the next line reads?",
        "rope_table belongs into prepare. F.scaled_dot_product_attention keeps the scores to itself; is_causal=True is "
        "its mask, and enable_gqa=True its repetition. Drop the test for NaN.",
        "q, k = fused_rope(q, k, cos, sin); "
        "return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).",
    ],
)
def _(prepare: Callable[..., Any], fast_attention: Callable[..., torch.Tensor]) -> str:
    dtype = torch.float32 if runtime.INTERPRETED else torch.float16
    shapes = (
        (1, 2, 2, 5, 16, 8),
        (2, 8, 2, 33, 16, 64),
        (2, 4, 1, 20, 32, 20),
        (1, 6, 3, 1, 16, 4),
        (1, 3, 3, 40, 16, 50),
    )
    answers, inputs = [], []
    for batch, heads, kv_heads, N, D, positions in shapes:
        case = f"batch {batch}, {heads} query heads, {kv_heads} key heads, N={N}, D={D}, positions={positions}"
        q, k, v = _random(
            (batch, heads, N, D), (batch, kv_heads, N, D), (batch, kv_heads, N, D), seed=N, dtype=dtype
        )  # fmt: skip
        before = [x.clone() for x in (q, k, v)]
        with running(case):
            o = fast_attention(q, k, v, prepare(positions, D, q.device))
        same = all(map(torch.equal, before, (q, k, v)))
        expect(same, "q, k or v is written to: they are inputs", diagnosis="input-modified", case=case)
        words = f"a tensor should be returned, and this is {in_words(o, article=True)}"
        expect(isinstance(o, torch.Tensor), words, diagnosis="returned-none" if o is None else "wrong-type", case=case)
        tables = rope_table(max(positions, N + 1), D)
        inputs.append((q, k, v, *tables))
        answers.append((case, o, _attention(*inputs[-1])))
    shaped = all(o.shape == want.shape for _, o, want in answers)
    if shaped and dtype == torch.float32:
        errors = [(o.double().cpu() - want).abs().max().item() for _, o, want in answers]
        expect(
            not 2e-5 < max(errors) < 0.05,
            f"o is right to within {max(errors):.1g} only, and float32 gives more digits",
            diagnosis="low-precision", case=answers[errors.index(max(errors))][0],
        )  # fmt: skip
    expect_all_close(
        answers, what="o", tol=2e-5 if dtype == torch.float32 else 1e-2,
        mistakes=lambda: {s: ([_attention(*one, s) for one in inputs], why) for s, why in _LAYER_MISTAKES.items()},
    )  # fmt: skip
    for case, o, _ in answers:
        expect(o.dtype == dtype, f"o should be {dtype} as q is, it is {o.dtype}", diagnosis="wrong-dtype", case=case)
    _expect_lean(prepare, fast_attention, dtype)
    return f"{len(shapes)} layers, and a call runs no more than it needs"


def _expect_lean(prepare: Callable[..., Any], fast: Callable[..., Any], dtype: torch.dtype) -> None:
    """CheckFailed where a call runs what it need not."""
    __tracebackhide__ = True
    batch, heads, kv_heads, N, D = 2, 8, 2, 72, 16
    case = f"what a call runs with {heads} query heads, {kv_heads} key heads, N={N}, D={D}"
    q, k, v = _random((batch, heads, N, D), (batch, kv_heads, N, D), (batch, kv_heads, N, D), dtype=dtype)
    prepared = prepare(128, D, q.device)
    with running(case), torch.no_grad():
        fast(q, k, v, prepared)  # a first call may fill a cache
        with _Waiting() as waiting, _Seen() as seen:
            fast(q, k, v, prepared)
    count, size = len(seen.made), q.element_size() * (q.numel() + k.numel())
    moved = sum(x.numel() * x.element_size() for _, made in seen.made for x in made) / size
    ran = f"{count} operations, whose results take {moved:.1f} times the bytes of q and k"
    waits = [*waiting.names, *(["item"] if seen.waits else [])]
    for name, made in seen.made:
        for x in made:
            expect(
                list(x.shape).count(N) < 2,
                f"`{name}` makes a tensor {list(x.shape)}: a number for each pair of query and key ({ran})",
                diagnosis="scores-in-memory", case=case,
            )  # fmt: skip
    expect(
        not waits,
        f"`{(waits or [''])[0]}` hands a value of a tensor to Python: there the CPU waits for the GPU",
        diagnosis="waits", case=case,
    )  # fmt: skip
    trigonometry = [name for name, _ in seen.made if name in ("cos", "sin", "polar", "cos_", "sin_", "tan")]
    expect(
        not trigonometry,
        f"`{(trigonometry or [''])[0]}` is computed in each call: prepare is called once, and its result is handed in",
        diagnosis="tables-rebuilt", case=case,
    )  # fmt: skip
    cos, sin = rope_table(128, D, device=q.device)
    for word, x in (("K", k), ("K", rope(k, cos, sin)), ("V", v)):
        copies = [y.repeat_interleave(heads // kv_heads, 1).float().flatten() for y in (x, x.transpose(-1, -2))]
        for name, made in seen.made:
            whole = [y.float().flatten() for y in made if y.numel() == q.numel() and y.is_floating_point()]
            if any(torch.allclose(y, copy, atol=1e-2) for y in whole for copy in copies):
                raise CheckFailed(
                    f"`{name}` copies {word} for every query head ({ran})", diagnosis="kv-repeated", case=case
                )
    names = sorted({name for name, _ in seen.made})
    expect(
        count <= _MOST_OPERATIONS,
        f"a call runs {count} operations, {_MOST_OPERATIONS} are allowed: {', '.join(names)[:120]}",
        diagnosis="too-many-operations", case=case,
    )  # fmt: skip
    expect(
        moved <= _MOST_BYTES,
        f"the results of a call's operations take {moved:.1f} times the bytes of q and k, {_MOST_BYTES} are allowed",
        diagnosis="too-many-bytes", case=case,
    )  # fmt: skip
