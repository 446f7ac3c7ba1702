"""The checks of phase 10: profiles, Amdahl's law, timing, the memory of training, rotary embedding, tiles, a layer."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import triton
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlab import runtime
from flashlab.check import CheckFailed, expect, expect_all_close, expect_close, running
from flashlab.check.lookup import Row
from flashlab.check.slips import Chosen, Slip, explain, explained
from flashlab.check.symptoms import watched
from flashlab.exercises.answers import in_words
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.exercises.simulated_gpu import SimulatedGpu
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of
from flashlab.models.layer import RotaryAttention, eager_attention
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
    "aten::cat": "rotary embedding", "aten::ones": "mask", "aten::triu": "mask", "aten::masked_fill": "mask",
    "aten::masked_fill_": "mask",
}  # fmt: skip


def _rows(*rows: tuple[str, int, float, float]) -> EventList:
    """A profile from (operation, calls, own time, time with what it called)."""
    made = []
    for key, count, own, total in rows:
        row = FunctionEventAvg()
        vars(row).update(key=key, count=count, self_cpu_time_total=own, cpu_time_total=total, is_user_annotation=False)
        made.append(row)
    return EventList(made)


def _live_rows(heads: int, kv_heads: int, N: int, D: int) -> EventList:
    """A profile of the original layer, made here and now."""
    q, k, v = (torch.randn(1, h, N, D) for h in (heads, kv_heads, kv_heads))
    layer, tables = RotaryAttention("eager"), rope_table(N, D)
    layer(q, k, v, *tables)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(q, k, v, *tables)
    return seen.key_averages()


def _by_part(rows: EventList, parts: Mapping[str, str], of: Callable[[Any], float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        part = parts.get(row.key, "other")
        sums[part] = sums.get(part, 0.0) + of(row)
    return sums


def _most(sums: Mapping[str, float]) -> str:
    return max(sums, key=lambda name: sums[name])


def _own(row: Any) -> float:
    return row.self_cpu_time_total


def _total(row: Any) -> float:
    return row.cpu_time_total


def _calls(row: Any) -> float:
    return row.count


@exercise(
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
)
def _(bottleneck: Callable[..., tuple[str, float, int]]) -> str:
    # Each is made so that another way to read it names another part.
    profiles = {
        "a profile with matmul around bmm": _rows(
            ("aten::matmul", 2, 3.0, 403.0), ("aten::bmm", 2, 400.0, 400.0), ("aten::_softmax", 1, 520.0, 520.0),
            ("aten::softmax", 1, 1.0, 521.0), ("aten::mul", 8, 40.0, 40.0),
        ),
        "a profile with many small operations": _rows(
            ("aten::bmm", 2, 300.0, 300.0), ("aten::mul", 8, 180.0, 180.0), ("aten::sub", 2, 60.0, 60.0),
            ("aten::add", 2, 70.0, 70.0), ("aten::cat", 2, 90.0, 90.0), ("aten::_softmax", 1, 200.0, 200.0),
        ),
        "a profile with operations that no part has": _rows(
            ("aten::clone", 4, 5.0, 700.0), ("aten::copy_", 4, 695.0, 695.0), ("aten::bmm", 2, 450.0, 450.0),
            ("aten::mul", 30, 80.0, 80.0), ("aten::_softmax", 1, 90.0, 90.0),
        ),
        "a profile with one long call": _rows(
            ("aten::triu", 1, 250.0, 250.0), ("aten::div", 1, 20.0, 20.0), ("aten::bmm", 4, 360.0, 360.0),
            ("aten::matmul", 4, 8.0, 368.0), ("aten::mul", 6, 12.0, 12.0),
        ),
        "a live profile, 128 tokens": _live_rows(4, 2, 128, 32),
        "a live profile, 16 tokens": _live_rows(8, 2, 16, 64),
    }  # fmt: skip
    got = {}
    for case, rows in profiles.items():
        with running(case):
            got[case] = _several(bottleneck(rows, dict(_PARTS)), ("part", "share", "calls"), case)
    _expect_parts(got, profiles)

    def told(share: Callable[[EventList], float]) -> list[float]:
        return [share(rows) for rows in profiles.values()]

    def right(rows: EventList, of: Callable[[Any], float]) -> tuple[float, float]:
        """(the bottleneck's, all)"""
        slowest = _most(_by_part(rows, _PARTS, _own))
        return _by_part(rows, _PARTS, of)[slowest], sum(map(of, rows))

    def top(rows: EventList) -> Any:
        """The slowest operation of the bottleneck."""
        slowest = _most(_by_part(rows, _PARTS, _own))
        return max((row for row in rows if _PARTS.get(row.key, "other") == slowest), key=_own)

    def listed(rows: EventList) -> float:
        own, _ = right(rows, _own)
        return own / (sum(_own(row) for row in rows if row.key in _PARTS) or math.nan)

    shares = [(case, _number(x[1], "the share", case), right(profiles[case], _own)) for case, x in got.items()]
    quotient = explained(lambda: _quotient([(profiles[case], x) for case, x, _ in shares]))
    quotient(expect_all_close)(
        [(case, x, a / b) for case, x, (a, b) in shares],
        what="the share",
        tol=0.006,  # two decimals will do
        mistakes={
            "percent": (told(lambda r: 100 * right(r, _own)[0] / right(r, _own)[1]), "that is in percent; 1 is all"),
            "total-times": (
                told(lambda r: right(r, _total)[0] / right(r, _total)[1]),
                "these are the times with the operations that were called inside: their sum counts some time twice",
            ),
            "total-times whole": (
                told(lambda r: right(r, _own)[0] / right(r, _total)[1]),
                "the part's own time is divided by a sum of cpu_time_total, which counts some time twice",
            ),
            "total-times part": (
                told(lambda r: right(r, _total)[0] / right(r, _own)[1]),
                "the part's time is a sum of cpu_time_total, which counts some time twice",
            ),
            "one-operation": (
                told(lambda r: _own(top(r)) / right(r, _own)[1]),
                "that is the share of the part's slowest operation alone; the part has others",
            ),
            "other-left-out": (told(listed), "the operations that `parts` does not have are missing in the whole"),
            "share-of-the-calls": (
                told(lambda r: right(r, _calls)[0] / right(r, _calls)[1]),
                "that is the part's share of the calls; it is the share of the time",
            ),
            "time-for-share": (told(lambda r: right(r, _own)[0]), "that is the part's time; divide it by the whole"),
            "inverse": (told(lambda r: right(r, _own)[1] / right(r, _own)[0]), "that is the whole divided by the part"),
            "share-of-the-rest": (
                told(lambda r: 1 - right(r, _own)[0] / right(r, _own)[1]), "that is the share of all the other parts",
            ),
            "exchanged": (told(lambda r: right(r, _calls)[0]), "share holds the calls: are the two exchanged?"),
            "part-by-rest": (
                told(lambda r: right(r, _own)[0] / (right(r, _own)[1] - right(r, _own)[0])),
                "the part's time is divided by that of the others; the whole has the part in it too",
            ),
        },
    )  # fmt: skip
    expect_all_close(
        [(case, _number(x[2], "calls", case), right(profiles[case], _calls)[0]) for case, x in got.items()],
        what="the calls",
        mistakes={
            "time-for-calls": (told(lambda r: right(r, _own)[0]), "that is the part's time; how often was it called?"),
            "all-calls": (told(lambda r: right(r, _calls)[1]), "those are the calls of the whole profile"),
            "rows-for-calls": (
                told(lambda r: _by_part(r, _PARTS, lambda row: 1)[_most(_by_part(r, _PARTS, _own))]),
                "that is how many rows the part has; a row says in `count` how often it was called",
            ),
            "last-of-a-part": (
                told(
                    lambda r: [
                        row.count for row in r if _PARTS.get(row.key, "other") == _most(_by_part(r, _PARTS, _own))
                    ][-1]
                ),
                "those are the calls of the part's last row alone; the counts of its rows add up",
            ),
            "one-operation": (
                told(lambda r: top(r).count),
                "those are the calls of the part's slowest operation alone; the part has others",
            ),
        },
    )
    return f"{len(profiles)} profiles, two of them made on this machine"


def _quotient(shares: Sequence[tuple[EventList, float]]) -> tuple[str, str] | None:
    """The two numbers of a profile whose quotient each share is, if just one pair gives them all."""
    found: list[str] = []
    of_each = [_numbers_of(rows) for rows, _ in shares]
    for a, b in itertools.permutations(of_each[0], 2):
        if all(x[b] and abs(x[a] / x[b] - share) <= 0.003 for x, (_, share) in zip(of_each, shares, strict=True)):
            found.append(f"the share is a quotient of other numbers: {a}, divided by {b}")
    whole = "It should be the part's own time, divided by the own times of all rows"
    return ("wrong-quotient", f"{found[0]}. {whole}") if len(found) == 1 else None


def _numbers_of(rows: EventList) -> dict[str, float]:
    """What may be divided by what, of one profile."""
    own, calls, totals = (_by_part(rows, _PARTS, of) for of in (_own, _calls, _total))
    slowest = _most(own)
    in_order = sorted(own.values())
    mine = [row for row in rows if _PARTS.get(row.key, "other") == slowest]
    return {
        "the part's own time": own[slowest],
        "the part's cpu_time_total": totals[slowest],
        "the part's own time per call": own[slowest] / calls[slowest],
        "the part's own time times its calls": own[slowest] * calls[slowest],
        "the part's calls": calls[slowest],
        "the part's rows": len(mine),
        "the time of the part's first row": _own(mine[0]),
        "the time of the part's last row": _own(mine[-1]),
        "the own times of all rows": sum(in_order),
        "the cpu_time_total of all rows": sum(totals.values()),
        "the largest cpu_time_total of a row": max(map(_total, rows)),
        "the largest own time of a row": max(map(_own, rows)),
        "the calls of all rows": sum(calls.values()),
        "the number of rows": len(rows),
        "the number of parts": len(own),
        "the time of the second slowest part": in_order[-2],
        "the times of the two slowest parts": in_order[-1] + in_order[-2],
        "the time of the fastest part": in_order[0],
        "the mean time of a part": sum(in_order) / len(own),
        "the mean time of a row": sum(in_order) / len(rows),
        'the time of "other"': own.get("other", 0.0),
        "the sum of the parts' times per call": sum(t / calls[p] for p, t in own.items()),
        "the sum of each part's time times its calls": sum(t * calls[p] for p, t in own.items()),
        "the time of the first row": _own(rows[0]),
        "the time of the last row": _own(rows[-1]),
        "the times of all rows but the first": sum(in_order) - _own(rows[0]),
        "the times of all rows but the last": sum(in_order) - _own(rows[-1]),
    }


def _expect_parts(got: Mapping[str, tuple[Any, ...]], profiles: Mapping[str, EventList]) -> None:
    """CheckFailed unless every answer names the right part."""
    __tracebackhide__ = True
    names = {case: x[0] for case, x in got.items()}
    want = {case: _most(_by_part(rows, _PARTS, _own)) for case, rows in profiles.items()}
    for case, name in names.items():
        keys = [row.key for row in profiles[case]]
        expect(
            isinstance(name, str),
            f"the part should be a text, and it is {in_words(name, article=True)}", diagnosis="wrong-type", case=case,
        )  # fmt: skip
        expect(
            name not in keys,
            f"{name!r} is an operation; the name of the part that it belongs to is wanted",
            diagnosis="operation-for-part", case=case,
        )  # fmt: skip
        known = {*_PARTS.values(), "other"}
        expect(name in known, f"{name!r} is none of the parts", diagnosis="unknown-part", case=case)

    def part_of(choose: Callable[[EventList], str]) -> dict[str, str]:
        return {case: choose(rows) for case, rows in profiles.items()}

    def among(rows: EventList) -> dict[str, float]:
        return {part: x for part, x in _by_part(rows, _PARTS, _own).items() if part != "other"}

    told = {
        "total-times": (
            part_of(lambda r: _most(_by_part(r, _PARTS, _total))),
            "chosen by cpu_time_total, which has in it what an operation called: some time counts twice",
        ),
        "most-calls": (
            part_of(lambda r: _most(_by_part(r, _PARTS, _calls))),
            "that is the part with the most calls; the one with the most time is wanted",
        ),
        "one-operation": (
            part_of(lambda r: _PARTS.get(max(r, key=_own).key, "other")),
            "that is the part of the slowest operation; add up the operations of each part first",
        ),
        "one-operation total": (
            part_of(lambda r: _PARTS.get(max(r, key=_total).key, "other")),
            "that is the part of the operation with the largest cpu_time_total; add up the own times of each part",
        ),
        "one-call": (
            part_of(lambda r: _PARTS.get(max(r, key=lambda row: _own(row) / row.count).key, "other")),
            "that is the part of the operation whose single call is longest; all the calls of a part add up",
        ),
        "one-call part": (
            part_of(lambda r: _most({
                p: t / _by_part(r, _PARTS, _calls)[p] for p, t in _by_part(r, _PARTS, _own).items()
            })),
            "that is the part whose mean call is longest; all its calls add up",
        ),
        "other-left-out": (
            part_of(lambda r: _most(among(r))),
            'the part "other" is never the answer: it holds the operations that `parts` does not have',
        ),
        "times-count": (
            part_of(lambda r: _most(_by_part(r, _PARTS, lambda row: _own(row) * row.count))),
            "self_cpu_time_total is multiplied by count; it is the time of all the calls already",
        ),
        "times-count total": (
            part_of(lambda r: _most(_by_part(r, _PARTS, lambda row: _total(row) * row.count))),
            "cpu_time_total is multiplied by count; self_cpu_time_total, of all the calls already, is to be added up",
        ),
        "one-call sum": (
            part_of(lambda r: _most(_by_part(r, _PARTS, lambda row: _own(row) / row.count))),
            "the times of single calls are added up; self_cpu_time_total, of all the calls, is to be added up",
        ),
        "children-only": (
            part_of(lambda r: _most(_by_part(r, _PARTS, lambda row: _total(row) - _own(row)))),
            "chosen by the time of what the operations called; their own time is wanted",
        ),
        "most-operations": (
            part_of(lambda r: _most(_by_part(r, _PARTS, lambda row: 1))),
            "that is the part with the most rows; the one with the most time is wanted",
        ),
        "never-other total": (
            part_of(lambda r: _most({p: x for p, x in _by_part(r, _PARTS, _total).items() if p != "other"})),
            'chosen by cpu_time_total, and the part "other" is never the answer',
        ),
        "last-of-a-part": (
            part_of(lambda r: _most({_PARTS.get(row.key, "other"): _own(row) for row in r})),
            "of each part only its last operation counts: each row replaces the one before, and they add up",
        ),
        "first-of-a-part": (
            part_of(lambda r: _most({_PARTS.get(row.key, "other"): _own(row) for row in reversed(r)})),
            "of each part only its first operation counts: the others add up with it",
        ),
        "least": (
            part_of(lambda r: min((s := _by_part(r, _PARTS, _own)), key=lambda name: s[name])),
            "that is the part with the least time",
        ),
        "first-row": (part_of(lambda r: _PARTS.get(r[0].key, "other")), "that is the part of the first row"),
    }  # fmt: skip
    wrong = next((case for case in names if names[case] != want[case]), None)
    if wrong is None:
        return
    for slug, (parts, why) in told.items():
        if parts == names:
            raise CheckFailed(why, diagnosis=slug.partition(" ")[0], case=wrong)
    raise CheckFailed(
        f"the part is {names[wrong]!r}, and {want[wrong]!r} takes longer: its own times have the larger sum",
        diagnosis="wrong-part", case=wrong,
    )  # fmt: skip


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

_MODELS = [  # width, depth, heads, kv_heads, hidden, vocabulary, batch, seq_len
    (8, 1, 2, 1, 24, 10, 1, 3), (64, 3, 4, 2, 192, 256, 2, 5), (48, 2, 6, 1, 128, 100, 3, 32),
    (32, 5, 4, 4, 64, 77, 2, 16),
    (96, 4, 8, 2, 256, 300, 5, 7), (40, 7, 10, 5, 104, 513, 1, 64), (36, 2, 3, 3, 100, 33, 4, 11),
    (80, 6, 5, 1, 216, 129, 7, 9),
    (56, 3, 14, 2, 120, 91, 2, 13), (60, 2, 4, 2, 160, 65, 9, 6), (44, 3, 11, 11, 96, 201, 3, 17),
    (72, 5, 9, 3, 190, 45, 5, 5), (768, 12, 12, 12, 2048, 50257, 8, 1024), (24, 3, 12, 4, 72, 50, 6, 21),
]  # fmt: skip


def _fit(got: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[Fraction] | None:
    """The coefficients with which pieces [cases][pieces] add up to `got` exactly, or None.

    They are worth a word only if they are simple numbers, which chance does not give.
    """
    matrix = torch.tensor([[float(x) for x in row] for row in pieces], dtype=torch.float64)
    size = matrix.norm(dim=1, keepdim=True)  # each case counts alike
    scale = (matrix / size).norm(dim=0)
    solution = torch.linalg.lstsq(
        matrix / size / scale, torch.tensor(got, dtype=torch.float64)[:, None] / size
    ).solution
    found = [Fraction(x).limit_denominator(8) for x in (solution[:, 0] / scale).tolist()]
    exact = all(sum(c * x for c, x in zip(found, row, strict=True)) == y for row, y in zip(pieces, got, strict=True))
    return found if exact else None


def _times(count: Fraction) -> str:
    return "never" if count == 0 else "once" if count == 1 else f"{count} times"


def _expect_sum(
    got: Sequence[tuple[str, float]], names: Mapping[str, int], pieces: Sequence[Sequence[int]], *,
    what: str, slug: str, unit: Sequence[int] | None = None, others: Mapping[str, tuple[Sequence[float], str]],
) -> None:  # fmt: skip
    """CheckFailed unless each value is the sum of its pieces; says which piece is counted how often.

    names: {piece: how often it should count}, in numbers of 4 bytes (`unit` where a number has others). others: {slug:
    (a value for each case, sentence)}, what known mistakes give.
    """
    __tracebackhide__ = True
    bytes_each = list(unit or [4] * len(names))
    right = [n * b for n, b in zip(names.values(), bytes_each, strict=True)]
    want = [sum(c * x for c, x in zip(right, row, strict=True)) for row in pieces]
    wrong = next((i for i, (_, x) in enumerate(got) if x != want[i]), None)
    if wrong is None:
        return
    case, values = got[wrong][0], [x for _, x in got]
    for factor, words, name in (
        (Fraction(1, 4), "is the count of numbers, or of bytes of one each: a float32 has 4 bytes", "bytes-forgotten"),
        (Fraction(1, 2), "is half of it: a float32 has 4 bytes", "two-bytes"),
        (Fraction(2), "is twice as much: a float32 has 4 bytes", "eight-bytes"),
        (Fraction(8), "is 8 times as much: bytes are wanted", "bits"),
        (Fraction(1, 1024), "is in KiB: bytes are wanted", "unit"),
        (Fraction(1, 1024**2), "is in MiB: bytes are wanted", "unit"),
        (Fraction(1, 1024**3), "is in GiB: bytes are wanted", "unit"),
    ):
        if all(abs(x - factor * y) <= abs(factor * y) * 1e-9 for x, y in zip(values, want, strict=True)):
            raise CheckFailed(f"{what} {words}", diagnosis=name, case=case)
    for name, (known, words) in others.items():
        if values == list(known):
            raise CheckFailed(f"{what}: {words}", diagnosis=name, case=case)
    if all(x == int(x) for x in values) and (found := _fit([int(x) for x in values], pieces)) is not None:
        counts = [c / b for c, b in zip(found, bytes_each, strict=True)]
        alike = {
            count / n for n, count, b in zip(names.values(), counts, bytes_each, strict=True) if n and b == 4
        }  # fmt: skip
        if len(alike) == 1 and (factor := alike.pop()) not in (0, 1):
            raise CheckFailed(
                f"{what}: a number counts as {float(4 * factor):g} bytes; a float32 has 4",
                diagnosis="bytes-forgotten", case=case,
            )  # fmt: skip
        off = [
            f"{name} counts {_times(count)}, it should count {_times(Fraction(n))}"
            for (name, n), count in zip(names.items(), counts, strict=True) if count != n
        ]  # fmt: skip
        if 1 <= len(off) <= 2:
            raise CheckFailed(f"{what}: {'; '.join(off)}", diagnosis=slug, case=case)
    raise CheckFailed(
        f"{what} is {values[wrong]:g}, it should be {want[wrong]}"
        + (f", {values[wrong] / want[wrong]:.4g} times as much" if want[wrong] else ""),
        diagnosis="wrong-value", case=case,
    )  # fmt: skip


@exercise(
    "10.5",
    title="The memory of training, by hand",
    minutes=25,
    difficulty="Core",
    hints=[
        "Count numbers first, and multiply by 4 last. A projection from a to b numbers has a · b weights.",
        "Projections of a block: width · head_dim · (heads + kv_heads + kv_heads + heads). q has batch · heads · "
        "seq_len · head_dim numbers, K as it is batch · kv_heads · seq_len · head_dim, P batch · heads · seq_len².",
        "Gradients are as large as the parameters, AdamW's averages twice as large. Original: depth · (4 · (x + 4 q "
        "+ P) + seq_len²). Flash: depth · 4 · (x + 2 q + 2 kv + batch · heads · seq_len).",
    ],
)
def _(training_bytes: Callable[..., tuple[int, int, int, int]]) -> str:
    names = ("parameters", "gradients", "optimizer", "activations")
    got: dict[tuple[int, bool], list[float]] = {}
    cases = {}
    for i, one in enumerate(_MODELS):
        width, depth, heads, kv_heads, _, _, batch, N = one
        for flash in (False, True):
            case = (
                f"width {width}, depth {depth}, {heads} heads, {kv_heads} key heads, batch {batch}, seq_len {N}, "
                f"flash={flash}"
            )
            cases[i, flash] = case
            with running(case):
                given = _several(training_bytes(*one, flash), names, case)
            got[i, flash] = [_number(x, name, case) for x, name in zip(given, names, strict=True)]
    for (i, flash), four in got.items():
        for x, name in zip(four, names, strict=True):
            words = f"{name} is {x:g}, and bytes are counted in whole numbers, 0 or more"
            expect(math.isfinite(x) and x >= 0, words, diagnosis="wrong-value", case=cases[i, flash])

    weights = []
    for width, depth, heads, kv_heads, hidden, vocabulary, _, _ in _MODELS:
        head_dim = width // heads
        weights.append([vocabulary * width, depth * width * width, depth * width * head_dim * kv_heads,
                        depth * width * hidden, depth * width, width])  # fmt: skip
    of_weights = {
        "the embedding": 1, "a matrix width × width (the projections to q and out of the heads)": 2,
        "a projection to the key heads or value heads": 2, "a matrix of SwiGLU": 3,
        "a vector of width numbers in a block (its norms)": 2,
        "the last norm": 1,
    }  # fmt: skip
    right = [4 * sum(n * x for n, x in zip(of_weights.values(), row, strict=True)) for row in weights]
    outside = [4 * (row[0] + row[5]) for row in weights]
    one_block = [(x - out) // one[1] + out for x, out, one in zip(right, outside, _MODELS, strict=True)]
    models = {"depth-forgotten": (one_block, "one block counts; there are `depth` of them")}
    for flash in (False, True):
        said = [(cases[i, flash], got[i, flash][0]) for i in range(len(_MODELS))]
        _expect_sum(said, of_weights, weights, what="parameters", slug="parameters", others=models)
    for (i, flash), four in got.items():
        parameters, gradients, optimizer, _ = four
        case = cases[i, flash]
        expect(
            gradients == parameters,
            f"gradients is {gradients / parameters:.4g} times parameters; each parameter has one gradient",
            diagnosis="gradients", case=case,
        )  # fmt: skip
        expect(
            optimizer == 2 * parameters,
            f"optimizer is {optimizer / parameters:.4g} times parameters; AdamW keeps two averages for each parameter",
            diagnosis="optimizer", case=case,
        )  # fmt: skip

    of_layers: dict[bool, dict[str, int]] = {
        flash: {
            "a tensor of batch · seq_len · width numbers (x, q, o"
            + ("" if flash else ", repeated K, repeated V") + ")": 3 if flash else 5,
            "K or V, not repeated": 2 if flash else 0,
            "a number for each batch, head and pair (P)": 0 if flash else 1,
            "a number for each batch, head and query (lse)": 1 if flash else 0,
            "a byte for each pair (the mask)": 0 if flash else 1,
            "a byte for each batch and pair": 0,
            "a byte for each head and pair": 0,
            "a number for each batch, key head and pair": 0,
            "a number for each batch and head": 0,
            "a number for each batch and query": 0,
        }
        for flash in (False, True)
    }  # fmt: skip
    unit = (4, 4, 4, 4, 1, 1, 1, 4, 4, 4)
    pieces = []
    for width, depth, heads, kv_heads, _, _, batch, N in _MODELS:
        sizes = [batch * N * width, batch * N * (width // heads) * kv_heads, batch * heads * N * N, batch * N * heads]
        pieces.append(
            [
                depth * x
                for x in (
                    *sizes,
                    N * N,
                    batch * N * N,
                    heads * N * N,
                    batch * kv_heads * N * N,
                    batch * heads,
                    batch * N,
                )
            ]
        )
    rights = {
        flash: [sum(n * b * x for n, b, x in zip(of_layers[flash].values(), unit, row, strict=True)) for row in pieces]
        for flash in (False, True)
    }
    for flash in (False, True):
        depths = list(zip(rights[flash], [one[1] for one in _MODELS], strict=True))
        each_mask = [x + row[2] - row[4] for x, row in zip(rights[flash], pieces, strict=True)]
        _expect_sum(
            [(cases[i, flash], got[i, flash][3]) for i in range(len(_MODELS))], of_layers[flash], pieces,
            what=f"activations, {'flash' if flash else 'original'}", slug="activations", unit=unit,
            others={
                "depth-forgotten": ([x // d for x, d in depths], "one block counts; there are `depth` of them"),
                "depth-twice": ([x * d for x, d in depths], "`depth` is a factor twice"),
                "the-other-attention": (rights[not flash], f"flash={flash} gives the bytes of flash={not flash}"),
                "mask-for-each-head": (each_mask, "the mask counts for each batch and head; there is one for all"),
            },
        )  # fmt: skip
    return f"{len(_MODELS)} models, original and flash"


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
        layouts = {
            "contiguous": (x, torch.empty_like(x)),
            "[batch, M, heads, D] in memory": (
                x.transpose(1, 2).contiguous().transpose(1, 2), torch.empty_like(x).transpose(-1, -2).contiguous().mT,
            ),
            "every second column of a wider tensor": (
                torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2],
                torch.empty_like(x.transpose(0, 1).contiguous()).transpose(0, 1),
            ),
        }  # fmt: skip
        for words, (source, target) in layouts.items():
            case = (
                f"batch {batch}, {heads} heads, {M} rows, HALF={half}, offset {offset}, "
                f"{str(dtype).removeprefix('torch.')}, {words}"
            )
            target.fill_(math.nan)
            before = source.clone()
            with in_bounds(case, X=source, Y=target, COS=cos, SIN=sin) as traffic:
                kernel[(triton.cdiv(M, 16), batch * heads)](
                    source, target, cos, sin, *source.stride(), *target.stride(), heads, M, offset,
                    HALF=half, BLOCK_M=16,
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
    with explained(lambda: _explain_turn(kernel)):
        expect_all_close(answers[:exact], what="Y", mistakes=lambda: models(slice(exact)), tol=3e-6)
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

_SIZES = (16, 32, 64, 128, 256)


def _tile(
    peak: float, bandwidth: float, shared: int, N: int, D: int, itemsize: int, stages: int, mistake: str = ""
) -> tuple[int, int] | None:
    """The tile, with a mistake or none."""
    ridge = bandwidth / peak if mistake == "ridge-too-low" else peak / bandwidth

    def intensity(M: int) -> float:
        flops = {"one-product": 2, "multiply-add-is-one": 2, "six": 6}.get(mistake, 4) * M * N * D
        q, o, k, v = M, M, N, N
        if mistake in ("q-left-out", "kv-only"):
            q = 0
        if mistake in ("o-left-out", "kv-only"):
            o = 0
        if mistake == "one-of-kv":
            v = 0
        if mistake == "kv-left-out":
            k = v = 0
        if mistake == "scores-written":
            o += 2 * M * N // D
        return flops / ((q + o + k + v) * D * (1 if mistake == "numbers-for-bytes" else itemsize))

    reaching = [M for M in _SIZES if intensity(M) >= ridge]
    if mistake == "below-the-ridge":
        reaching = [M for M in _SIZES if intensity(M) <= ridge]
    if not reaching:
        return None
    M = reaching[-1] if mistake == "largest-m" else reaching[0]

    def bytes_shared(B: int) -> int:
        rows = {
            "stages-forgotten": M + 2 * B, "q-in-stages": stages * (M + 2 * B), "one-tile": M + stages * B,
            "o-in-shared": 2 * M + 2 * stages * B, "q-not-in-shared": 2 * stages * B,
        }.get(mistake, M + 2 * stages * B)  # fmt: skip
        extra = M * B * itemsize if mistake == "scores-in-shared" else 0
        return rows * D * (1 if mistake == "shared-in-numbers" else itemsize) + extra

    fitting = [B for B in _SIZES if bytes_shared(B) < shared or (bytes_shared(B) == shared and mistake != "not-quite")]
    if not fitting:
        return None
    return M, fitting[0] if mistake == "smallest-n" else fitting[-1]


_TILE_MISTAKES = {
    "ridge-too-low": "BLOCK_M is 16 for every tile, as if the ridge were near 0: it is peak_flops / bytes_per_s",
    "one-product": "the FLOPs are half of them: there are two products, and a multiply-add is 2 FLOPs",
    "q-left-out": "either the reading of Q or the writing of O is missing in the bytes",
    "kv-only": "the bytes are those of K and V alone; Q is read and O is written as well",
    "one-of-kv": "the bytes have one of K and V; both are read",
    "kv-left-out": "K and V are missing in the bytes: each program reads all of their rows",
    "numbers-for-bytes": "FLOPs are divided by numbers, not by bytes: a number has itemsize bytes",
    "below-the-ridge": "BLOCK_M is below the ridge; the intensity has to reach it",
    "largest-m": "BLOCK_M is the largest one that reaches the ridge; the smallest is wanted",
    "stages-forgotten": "STAGES is not in the shared memory: there are STAGES tiles of K and of V",
    "q-in-stages": "Q counts STAGES times in the shared memory; there is one tile of it",
    "one-tile": "the shared memory has STAGES tiles of one of K and V; both have them",
    "o-in-shared": "O counts in the shared memory; it stays in registers",
    "q-not-in-shared": "the tile of Q is missing in the shared memory",
    "shared-in-numbers": "the shared memory is counted in numbers; shared_bytes is in bytes, itemsize for each number",
    "smallest-n": "BLOCK_N is the smallest one that fits; the largest is wanted",
    "not-quite": "tiles that take exactly shared_bytes do fit",
    "scores-in-shared": "a tile of scores counts in the shared memory; it stays in registers",
}


@exercise(
    "10.7",
    title="A tile from the roofline",
    minutes=25,
    difficulty="Core",
    hints=[
        "Two questions, one after the other: which BLOCK_M reaches the ridge, and which BLOCK_N fits with it?",
        "FLOPs: 2 products · 2 · BLOCK_M · N · HEAD_DIM. Bytes: (BLOCK_M + N + N + BLOCK_M) · HEAD_DIM · itemsize. "
        "BLOCK_N is in neither.",
        "Shared memory: (BLOCK_M + 2 · STAGES · BLOCK_N) · HEAD_DIM · itemsize <= shared_bytes. Try the five sizes of "
        "each in order.",
    ],
)
def _(choose_tile: Callable[..., tuple[int, int] | None]) -> str:
    h200, rtx = runtime.GPUS["H200"], runtime.GPUS["RTX 4090"]
    gpus = {
        "H200": ((h200.fp16_tflops or 0) * 1e12, (h200.memory_gb_s or 0) * 1e9, h200.shared_per_block),
        "RTX 4090": ((rtx.fp16_tflops or 0) * 1e12, (rtx.memory_gb_s or 0) * 1e9, rtx.shared_per_block),
        "a chip of 60 TFLOP/s and 1 TB/s": (60e12, 1e12, 98304),
        "a chip of 30 TFLOP/s and 1 TB/s": (30e12, 1e12, 65536),
        "a chip of 15 TFLOP/s and 1 TB/s": (15e12, 1e12, 49152),
        "a chip of 0.5 TFLOP/s and 1 TB/s": (0.5e12, 1e12, 65536),
        "a chip of 110 TFLOP/s and 1 TB/s": (110e12, 1e12, 122880),
        "a chip of 6 TFLOP/s and 1 TB/s": (6e12, 1e12, 36864),
        "a chip of 32 TFLOP/s and 1 TB/s": (32e12, 1e12, 98304),  # N=64: BLOCK_M=64 just reaches its ridge
    }
    shapes = itertools.product((64, 256, 1024, 4096, 65536), (64, 128), (2, 4), (1, 2, 3))
    inputs = [
        (f"{name}, N={N}, HEAD_DIM={D}, itemsize={size}, STAGES={stages}", (*gpu, N, D, size, stages))
        for N, D, size, stages in shapes for name, gpu in gpus.items()
    ]  # fmt: skip
    want = [_tile(*one) for _, one in inputs]
    got: list[tuple[int, int] | None] = []
    for case, one in inputs:
        with running(case):
            tile = choose_tile(*one)
        if tile is None:
            got.append(None)
            continue
        M, N = _several(tile, ("BLOCK_M", "BLOCK_N"), case)
        got.append((int(_number(M, "BLOCK_M", case)), int(_number(N, "BLOCK_N", case))))
    wrong = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    if wrong is None:
        return f"{len(inputs)} shapes on {len(gpus)} chips"
    expect(
        any(got), "None is returned for every chip: is a `return` missing?", diagnosis="returned-none",
        case=inputs[wrong][0],
    )  # fmt: skip
    for slug, why in _TILE_MISTAKES.items():
        if got == [_tile(*one, slug) for _, one in inputs]:
            raise CheckFailed(why, diagnosis=slug, case=inputs[wrong][0])
    if all(a == (b[::-1] if b else None) for a, b in zip(got, want, strict=True)):
        raise CheckFailed("BLOCK_M and BLOCK_N are exchanged", diagnosis="exchanged", case=inputs[wrong][0])
    for first, second in itertools.product(_OF_BLOCK_M, [x for x in _TILE_MISTAKES if x not in _OF_BLOCK_M]):
        if got == [_two_mistakes(one, first, second) for _, one in inputs]:
            why = f"{_TILE_MISTAKES[first]}; and {_TILE_MISTAKES[second]}"
            raise CheckFailed(why, diagnosis=first, case=inputs[wrong][0])
    slips = [
        Slip(piece, name, words, "wrong-tile") for piece, choices in _TILE_SLIPS.items() for name, words in choices
    ]
    few = inputs[:: max(1, len(inputs) // 60)]
    given = [got[i] for i in range(0, len(inputs), max(1, len(inputs) // 60))]

    def fits(chosen: Chosen) -> bool:
        return all(x == _sloppy_tile(*one, chosen) for x, (_, one) in zip(given, few, strict=True)) and all(
            x == _sloppy_tile(*one, chosen) for x, (_, one) in zip(got, inputs, strict=True)
        )

    with explained(lambda: explain(fits, slips)):
        _explain_tile(got, want, inputs)
    return ""


_TILE_SLIPS = {
    "q": [
        ("0", "the reading of Q, or the writing of O, is missing in the bytes"),
        ("N", "the bytes of Q, or of O, are those of N rows: there are BLOCK_M"),
        ("twice", "Q and O count more than once in the bytes"),
    ],
    "kv": [
        ("1", "one of K and V is missing in the bytes"),
        ("M", "K and V count with BLOCK_M rows in the bytes: they have N"),
        ("0", "K and V are missing in the bytes"),
    ],
    "flops": [
        ("1", "the FLOPs are a quarter: two products, and a multiply-add is 2"),
        ("2", "the FLOPs are half of them: two products, and a multiply-add is 2"),
        ("8", "the FLOPs are twice what they are"),
        ("NN", "the FLOPs have N · N where BLOCK_M · N belongs"),
    ],
    "e": [
        ("1", "the bytes do not have itemsize"),
        ("2", "every number is taken for 2 bytes in the intensity"),
    ],
    "ridge": [
        ("GB", "the ridge is in other units than FLOPs per byte: peak_flops / bytes_per_s"),
        (">", "a BLOCK_M that just reaches the ridge is refused"),
    ],
    "which": [
        ("last", "BLOCK_M is the largest one that reaches the ridge: the smallest is wanted"),
    ],
    "shared q": [
        ("0", "the tile of Q is missing in the shared memory"),
        ("B", "the tile of Q has BLOCK_N rows in the shared memory: it has BLOCK_M"),
        ("stages", "the tile of Q counts STAGES times in the shared memory"),
        ("two", "two tiles of BLOCK_M rows are in the shared memory: O stays in registers"),
    ],
    "shared kv": [
        ("1", "one of K and V is missing in the shared memory"),
        ("no stages", "STAGES is not in the shared memory"),
        ("one stage more", "the shared memory has one tile of K and of V too many"),
        ("one tile more", "the shared memory has a tile of BLOCK_N rows too many"),
        ("V once", "STAGES multiplies one of K and V alone"),
        ("M", "the tiles of K and V have BLOCK_M rows in the shared memory: they have BLOCK_N"),
    ],
    "shared e": [
        ("1", "itemsize is missing in the shared memory"),
        ("2", "every number is taken for 2 bytes in the shared memory"),
        ("4", "every number is taken for 4 bytes in the shared memory"),
    ],
    "fit": [
        ("<", "tiles that take exactly shared_bytes do fit"),
        ("first", "BLOCK_N is the smallest one that fits: the largest is wanted"),
    ],
    "sizes": [
        ("128", "the sizes end at 128: 256 is one of them"),
        ("32", "the sizes begin at 32: 16 is one of them"),
    ],
}  # fmt: skip


def _sloppy_tile(
    peak: float, bandwidth: float, shared: int, N: int, D: int, itemsize: int, stages: int, chosen: Chosen
) -> tuple[int, int] | None:
    """The tile with slips, as `_TILE_SLIPS` names them."""
    ridge = peak / bandwidth * (1e3 if chosen.get("ridge") == "GB" else 1)
    sizes = {"128": _SIZES[:-1], "32": _SIZES[1:]}.get(str(chosen.get("sizes")), _SIZES)

    def intensity(M: int) -> float:
        q = {"0": M, "N": M + N, "twice": 4 * M}.get(str(chosen.get("q")), 2 * M)
        kv = {"1": N, "M": 2 * M, "0": 0}.get(str(chosen.get("kv")), 2 * N)
        flops = {"1": M, "2": 2 * M, "8": 8 * M, "NN": 4 * N}.get(str(chosen.get("flops")), 4 * M) * N * D
        return flops / ((q + kv) * D * {"1": 1, "2": 2}.get(str(chosen.get("e")), itemsize))

    reaching = [M for M in sizes if (intensity(M) > ridge if chosen.get("ridge") == ">" else intensity(M) >= ridge)]
    if not reaching:
        return None
    M = reaching[-1 if "which" in chosen else 0]

    def needed(B: int) -> int:
        q = {"0": 0, "B": B, "stages": M * stages, "two": 2 * M}.get(str(chosen.get("shared q")), M)
        kv = {"1": stages * B, "no stages": 2 * B, "one stage more": 2 * (stages + 1) * B,
              "one tile more": (2 * stages + 1) * B, "V once": (stages + 1) * B,
              "M": 2 * stages * M}.get(str(chosen.get("shared kv")), 2 * stages * B)  # fmt: skip
        return (q + kv) * D * {"1": 1, "2": 2, "4": 4}.get(str(chosen.get("shared e")), itemsize)

    fitting = [B for B in sizes if (needed(B) < shared if chosen.get("fit") == "<" else needed(B) <= shared)]
    return (M, fitting[0 if chosen.get("fit") == "first" else -1]) if fitting else None


_OF_BLOCK_M = (
    "ridge-too-low", "one-product", "q-left-out", "kv-only", "one-of-kv", "kv-left-out", "numbers-for-bytes",
    "below-the-ridge", "largest-m",
)  # fmt: skip


def _two_mistakes(one: tuple, first: str, second: str) -> tuple[int, int] | None:
    """The tile whose BLOCK_M comes from one mistake and whose BLOCK_N, for that BLOCK_M, from the other."""
    peak, bandwidth, shared, N, D, itemsize, stages = one
    tile = _tile(peak, bandwidth, 1 << 60, N, D, itemsize, stages, first)
    if tile is None:
        return None
    # A chip on which this BLOCK_M, and no smaller one, reaches the ridge.
    M = tile[0]
    ridge = 4 * M * N * D / ((2 * M + 2 * N) * D * itemsize)
    return _tile(ridge, 1.0, shared, N, D, itemsize, stages, second)


def _explain_tile(
    got: Sequence[tuple[int, int] | None], want: Sequence[tuple[int, int] | None], inputs: Sequence[tuple[str, tuple]]
) -> None:
    """CheckFailed with what the first wrong tile costs, in figures."""
    __tracebackhide__ = True
    i = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    case, (peak, bandwidth, shared, N, D, itemsize, stages) = inputs[i]
    ridge = peak / bandwidth

    def intensity(M: int) -> float:
        return 4 * M * N * D / ((2 * M + 2 * N) * D * itemsize) if M > 0 else 0.0

    def needed(M: int, B: int) -> int:
        return (M + 2 * stages * B) * D * itemsize

    def fail(sentence: str, slug: str) -> None:
        __tracebackhide__ = True
        raise CheckFailed(sentence, diagnosis=slug, case=case)

    tile, right = got[i], want[i]
    if tile is None:
        assert right is not None, "a tile is right where None is wrong"
        fail(
            f"None is returned; BLOCK_M={right[0]} gives {intensity(right[0]):.1f} FLOPs per byte, the ridge is "
            f"{ridge:.1f}, and {right} needs {needed(*right)} of {shared} bytes of shared memory",
            "tile-not-found",
        )
        return
    M, B = tile
    if M not in _SIZES or B not in _SIZES:
        fail(f"{tile} is returned, and these are not two powers of two from 16 to 256", "not-a-size")
    if intensity(M) < ridge:
        also = "; so does no other, and None is wanted" if intensity(_SIZES[-1]) < ridge else ""
        word = "does not reach" if also else "is below"
        fail(f"BLOCK_M={M} gives {intensity(M):.1f} FLOPs per byte, which {word} the ridge of {ridge:.1f}{also}",
             "below-the-ridge")  # fmt: skip
    smallest = next(size for size in _SIZES if intensity(size) >= ridge)
    if M != smallest:
        fail(f"BLOCK_M={M} reaches the ridge of {ridge:.1f} FLOPs per byte, and so does {smallest}", "not-the-smallest")
    if needed(M, B) > shared:
        fail(f"{tile} needs {needed(M, B)} bytes of shared memory, and there are {shared}", "too-large")
    assert right is not None, "a tile that fits and reaches the ridge is wrong only beside a larger one"
    fail(f"with BLOCK_M={M}, BLOCK_N={B} fits into {shared} bytes, and so does {right[1]}", "not-the-largest")


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
