"""What a record of the bench of phase 11 says: speeds, ratios, means, the ladder, and which goals are met."""

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashlab.bench import harness, hopper_jobs, records
from flashlab.bench.harness import Row
from flashlab.bench.hopper_inputs import LAYERS, MADE
from flashlab.bench.hopper_jobs import CUDNN, FA4, KINDS, OURS, P9, PEERS, jobs
from flashlab.bench.roofline import TENSOR_FLOPS
from flashlab.bench.rows import At, Lines, by, grid, names_in, of, where
from flashlab.bench.rows import lines as lines_of
from flashlab.bench.truth import right
from flashlab.table import Table


@dataclass(frozen=True)
class Standing:
    """A shape of a record: ours beside the best of its peers.

    ratio: how many times as fast, by medians; 0 where ours is wrong, None where one of the two has no time.
    """

    job: Row
    rows: dict[str, Row]

    @property
    def best(self) -> str | None:
        return best_of(self.rows)

    @property
    def ratio(self) -> float | None:
        if not self.best:
            return None
        return self.rows[self.best]["ms"] / self.rows[OURS]["ms"] if right(self.rows[OURS]) else 0.0

    @property
    def span(self) -> tuple[float, float]:
        """The ratio of the best peer's fastest round to our slowest, and of its slowest to our fastest; 0 where there
        is no ratio."""
        return spread(self.rows[OURS], self.rows[self.best]) if self.ratio and self.best else (0.0, 0.0)

    @property
    def said(self) -> str:
        """ "1.03 (1.01 to 1.05)": the ratio and its span; "" where there is none."""
        return "" if self.ratio is None else f"{self.ratio:.2f} ({self.span[0]:.2f} to {self.span[1]:.2f})"

    @property
    def label(self) -> str:
        j = self.job
        kv_heads, keys = j.get("kv_heads", j["shape"][1]), j.get("keys", j["shape"][2])
        of_heads = f", {j['shape'][1]} heads of {kv_heads}" if kv_heads != j["shape"][1] else ""
        of_keys = f", {keys} keys" if keys != j["shape"][2] else ""
        inputs = f"{j['inputs']}{', layer ' + str(j['layer']) if 'layer' in j else ''}, " if "inputs" in j else ""
        mask = ", causal" if j["causal"] else ""
        return f"{inputs}D {j['shape'][3]}, N {j['shape'][2]}{of_keys}{of_heads}{mask}, {j['dtype']}"

    @property
    def accuracy(self) -> float | None:
        """The largest error of the best peer over ours."""
        errors = [self.rows[n]["error"] for n in (*PEERS, OURS) if self.rows.get(n, {}).get("error")]
        return min(errors[:-1]) / errors[-1] if self.ratio and len(errors) > 1 else None


SHAPES = ("shapes", "sizes")
_JOB = ("part", "kind", "inputs", "layer", "shape", "kv_heads", "keys", "causal", "dtype")


def _job(row: Row) -> Row:
    """Without the inputs that `rows.of` says of a row which says none."""
    return {key: row[key] for key in _JOB if key in row and row[key] != "randn"}


def spread(ours: Row, peer: Row) -> tuple[float, float]:
    """How many times as fast ours is at least and at most, by the fastest and the slowest round of both."""
    return peer["fastest"] / ours["slowest"], peer["slowest"] / ours["fastest"]


def standings(data: Row, parts: Sequence[str] = SHAPES) -> list[Standing]:
    """Every shape of these parts of a record, in its order."""
    found: dict[str, Standing] = {}
    for r in where(data["rows"], part=set(parts)):
        if "name" in r:
            found.setdefault(json.dumps(_job(r)), Standing(_job(r), {})).rows[r["name"]] = r
    return list(found.values())


def geometric_mean(values: Iterable[float]) -> float:
    """0 if one of them is."""
    found = list(values)
    return statistics.geometric_mean(found) if all(found) else 0.0


class Goal(NamedTuple):
    """A bound for how many times as fast as the best peer the kernel is, at the jobs where these items are wanted.
    mean: of all shapes; else of each of them. accuracy: not how fast, but the best peer's largest error over ours."""

    text: str
    least: float
    wanted: Row
    mean: bool = False
    accuracy: bool = False

    def of(self, s: Standing) -> float | None:
        return s.accuracy if self.accuracy else s.ratio


RISING = {kind for kind in MADE if kind.startswith("every tile")}
_RANDOM = {"part": "shapes"}
GOALS = (
    Goal("geometric mean of all shapes", 1.12, _RANDOM, mean=True),
    Goal("each of them", 0.97, _RANDOM),
    Goal("N = 512, 1024", 1.03, _RANDOM | {"kind": "standard", "N": {512, 1024}}),
    Goal("D = 96, 192", 1.00, {"part": "sizes", "D": {96, 192}}),
    Goal("D = 80, 112, 160", 1.00, {"part": "sizes", "D": {80, 112, 160}}),
    Goal("every tile raises every maximum", 0.95, {"inputs": RISING}),
    Goal("other inputs, and captured", 1.05, {"part": {"inputs", "captured"}, "inputs": {*MADE, *LAYERS} - RISING}),
    Goal("the best peer's error on them, over ours", 1 / 1.2, {"part": "inputs"}, accuracy=True),
    Goal("backward, D = 64, 128", 1.00, {"part": "backward", "D": {64, 128}}),
    Goal("backward, D = 256", 0.95, {"part": "backward", "D": {256}}),
)


class Verdict(NamedTuple):
    """What a record says of a goal, as goal_table has it. said: "met", "missed", "met so far", "not measured"; without
    FlashAttention-4 that is added. value: the smallest ratio, or the mean."""

    goal: str
    least: str
    value: str
    at: str
    measured: str
    said: str


def verdicts(data: Row) -> list[Verdict]:
    """The goals, each by what the record holds."""
    parts = (*SHAPES, "inputs", "captured", "backward")
    known = {json.dumps(s.job): s for s in standings(data, parts)}
    every = [job | {"N": job["shape"][2], "D": job["shape"][3]} for job in where(jobs(), part=set(parts))]
    found = []
    for goal in GOALS:
        wanted = where(every, **goal.wanted)
        there = [s for job in wanted if (s := known.get(json.dumps(_job(job)))) and goal.of(s) is not None]
        ratios = [goal.of(s) or 0.0 for s in there]
        if not ratios:
            found.append(Verdict(goal.text, f"{goal.least:.2f}", "", "", f"0 of {len(wanted)}", "not measured"))
            continue
        worst = min(there, key=lambda s: goal.of(s) or 0.0)
        value = geometric_mean(ratios) if goal.mean else min(ratios)
        said = _said(value >= goal.least, len(there) == len(wanted), goal.mean)
        if not any("ms" in s.rows.get(FA4, {}) for s in there):
            said += f", without {FA4}"
        wrong = "wrong at " if worst.ratio == 0 else ""
        at = f"{wrong}{worst.label}" + (f" (beside {worst.best})" if worst.ratio else "")
        is_ = f"{value:.2f}" if goal.mean or goal.accuracy else worst.said
        found.append(Verdict(goal.text, f"{goal.least:.2f}", is_, at, f"{len(there)} of {len(wanted)}", said))
    return found + [_validated(data, *about) for about in _VALIDATED]


def _said(good: bool, whole: bool, mean: bool = False) -> str:
    if not good:
        return "missed" if whole or not mean else "missed so far"
    return "met" if whole else "met so far"


def _clean(row: Row) -> bool:
    """Of compute-sanitizer's last line: "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (...)"."""
    return "SUMMARY: 0 " in row["said"]


_VALIDATED: tuple[tuple[str, Row, Callable[[Row], bool]], ...] = (
    ("the same bits again", {"what": "repeats"}, lambda row: row["different"] == 0),
    ("within the rule", {"what": {"shapes", "cases"}}, lambda row: not row["wrong"]),
    ("compute-sanitizer finds nothing", {"part": "sanitizer"}, _clean),
)


def _validated(data: Row, text: str, wanted: Row, good: Callable[[Row], bool]) -> Verdict:
    todo = where(jobs(), **wanted)
    rows = [r for job in todo for r in data["rows"] if harness.is_of(r, job) and "unavailable" not in r]
    bad = [r for r in rows if not good(r)]
    told = ("what", "tool", "shape", "head_dim", "dtype", "causal")
    at = harness.describe({k: bad[0][k] for k in told if k in bad[0]}) if bad else ""
    said = _said(not bad, len(rows) >= len(todo)) if rows else "not measured"
    return Verdict(text, "", "", at, f"{len(rows)} of {len(todo)}", said)


def goal_table(data: Row) -> Table:
    columns = ["goal", "at least", "is", "worst", "measured", ""]
    return Table.of(verdicts(data), columns, align="lrrlrl", caption=f"{_where(data)}: times as fast as the best peer")


def _where(data: Row) -> str:
    return data["machine"]["gpu"] or "a CPU, by the clock on the wall, which says nothing of a GPU"


def mean_table(data: Row) -> Table:
    """Geometric means of the speed over each peer's and over the best one's, by class; in brackets at how many shapes,
    where that peer was not at all."""
    classes: dict[tuple[str, str, str, str], list[Standing]] = {}
    for s in standings(data):
        if s.ratio is not None:
            j = s.job
            mask = "causal" if j["causal"] else "whole"
            classes.setdefault((j["kind"], j["dtype"], str(j["shape"][3]), mask), []).append(s)
            classes.setdefault((j["kind"], "all", "", ""), []).append(s)
            classes.setdefault(("all", "", "", ""), []).append(s)
    last = {"all": len(KINDS)}
    rows = []
    for key in sorted(classes, key=lambda c: (last.get(c[0]) or KINDS.index(c[0]), c[1] == "all", c)):
        some = classes[key]
        cells = [_mean_over(some, peer) for peer in PEERS]
        rows.append([*key, len(some), *cells, f"{geometric_mean(s.ratio or 0.0 for s in some):.2f}"])
    columns = ["", "dtype", "D", "mask", "shapes", *(f"/ {peer}" for peer in PEERS), "/ best"]
    caption = f"{_where(data)}: geometric means of how many times as fast {OURS} is"
    return Table.of(rows, columns, align="llrlr" + "r" * (len(PEERS) + 1), caption=caption if rows else "no mean yet")


def _mean_over(some: Sequence[Standing], peer: str) -> str:
    pairs = [(s.rows[peer]["ms"], s.rows[OURS]) for s in some if "ms" in s.rows.get(peer, {})]
    if not pairs:
        return ""
    mean = geometric_mean(theirs / ours["ms"] if right(ours) else 0.0 for theirs, ours in pairs)
    return f"{mean:.2f}" + f" ({len(pairs)})" * (len(pairs) < len(some))


def ladder_speeds(data: Row, part: str = "ladder") -> At:
    """By shape and mask: the rows that have a time, by name; the steps in their order, then who stands beside them."""
    return by([r for r in where(data["rows"], part=part) if "ms" in r], "shape", "causal")


def _label(shape: Sequence[int], causal: bool) -> str:
    return f"D {shape[3]}, N {shape[2]}{', causal' if causal else ''}"


def _cell(row: Row | None, old: Row | None = None) -> str:
    """TFLOP/s, and in brackets how many times as fast as the old; "!" for a result beyond its bound, "≠" for one whose
    bits differ from run to run."""
    if row is None:
        return ""
    speed = f"{row['tflops']:.0f}" if "tflops" in row else f"{1e3 * row['ms']:.0f} us"
    faster = f" ({old['ms'] / row['ms']:.2f})" if old else ""
    return speed + faster + ("" if right(row) else " !") + (" ≠" if row.get("different") else "")


def _speed_table(found: At, lines: Sequence[Sequence[str]], over: Row, heads: list[str], said: str) -> Table:
    """A line for each of the lines, which begin with a name, and a column for each shape; over: whom it is set over."""
    cells = [
        [*line, *(_cell(rows.get(line[0]), rows.get(over.get(line[0], ""))) for rows in found.values())]
        for line in lines
    ]
    shapes = [_label(*key) for key in found]
    return Table.of(cells, [*heads, *shapes], align="l" * len(heads) + "r" * len(shapes), caption=said)


def ladder_table(data: Row) -> Table:
    """TFLOP/s of each step at each shape, and in brackets how many times as fast as the step before it is there."""
    found = ladder_speeds(data)
    steps = [one for one in hopper_jobs.ladder() if one.name in names_in(found)]
    before = {new.name: old.name for old, new in itertools.pairwise(steps)}
    lines = [(one.name, one.idea) for one in steps] + [(P9, ""), (CUDNN, "")] * bool(found)
    said = f"{_where(data)}, bf16: TFLOP/s, in brackets over the step before" if found else "no step is measured"
    return _speed_table(found, lines, before, ["step", "new"], said)


def variant_table(data: Row) -> Table:
    """TFLOP/s of each variant at each shape, and in brackets how many times as fast as the kernel as it is."""
    found = ladder_speeds(data, "variants")
    names = names_in(found)
    base = min((n for n in names if n not in (P9, CUDNN)), key=len, default="")
    over = {name: base for name in names if name not in (base, P9, CUDNN)}
    said = f"{_where(data)}, bf16: TFLOP/s, in brackets over {base}" if found else "no variant is measured"
    return _speed_table(found, [[name] for name in names], over, ["kernel"], said)


def input_rows(data: Row, part: str = "inputs") -> At:
    """By what the inputs are like, of "captured" by layer too, head_dim and mask: the rows of everyone, by name."""
    rows = [r for r in where(of(data), part=part) if "unavailable" not in r]
    layered = [r | {"inputs": f"{r['inputs']}, layer {r['layer']}"} if "layer" in r else r for r in rows]
    return by(layered, "inputs", "D", "causal")


def best_of(rows: Mapping[str, Row]) -> str | None:
    """The name of the fastest peer; None without ours or without a peer."""
    able = [n for n in PEERS if "ms" in rows.get(n, {})]
    return min(able, key=lambda n: rows[n]["ms"]) if able and "ms" in rows.get(OURS, {}) else None


def doubted(row: Row) -> float:
    """The share of the trusted tiles that a kernel computes again which forgets its doubts."""
    return row["doubted"] / max(1, row["trusted"])


def input_table(data: Row, part: str = "inputs") -> Table:
    """TFLOP/s of everyone by what the inputs are like, how many tiles are doubted, and ours over the best peer."""
    found = {at: s for at, rows in input_rows(data, part).items() if (s := Standing({}, rows)).best}
    names = names_in({at: s.rows for at, s in found.items()})
    cells = [
        [kind, d, "causal" if causal else "", f"{doubted(s.rows[OURS]):.1%}"]
        + [*(_cell(s.rows.get(n)) for n in names), s.best, s.said]
        for (kind, d, causal), s in found.items()
    ]
    columns = ["inputs", "D", "", "doubted", *names, "best peer", f"{OURS} / best"]
    caption = f"{_where(data)}, bf16, N = 4096: TFLOP/s; doubted: of the tiles that are trusted" if cells else ""
    return Table.of(cells, columns, align="lrlr" + "r" * len(names) + "lr", caption=caption)


def error_table(data: Row) -> Table:
    """The largest error of o against float64, and in brackets the root of the mean square, of the part "inputs"."""
    found = input_rows(data)
    said = lambda r: f"{r['error']:.2g} ({r['rms']:.1e})" if r.get("rms") else ""  # noqa: E731
    caption = f"{_where(data)}, bf16, N = 4096: the largest error of o over two heads (rms)" if found else ""
    return grid(found, ("inputs", "D", ""), said, caption=caption, whole="")


def clock_table(data: Row) -> Table:
    """Each kernel alone for seconds: TFLOP/s, the SM clock and the power meanwhile, and of the tensor cores' peak at
    that clock and at the highest, what it reached."""
    cells = []
    for r in where(data["rows"], part="clock"):
        if not (clock := r.get("clock")):
            continue
        at_1_mhz = TENSOR_FLOPS * data["machine"]["sms"] / 1e6
        shares = [f"{r['tflops'] / (at_1_mhz * mhz):.0%}" for mhz in (clock["median"], clock["max"])]
        mhz = f"{clock['median']:.0f} ({clock['lowest']:.0f} to {clock['highest']:.0f})"
        watts = f"{clock['watts']:.0f}" if "watts" in clock else ""
        cells.append([r["shape"][3], r["inputs"], r["name"], f"{r['tflops']:.0f}", mhz, watts, *shares])
    columns = ["D", "inputs", "alone for seconds", "TFLOP/s", "MHz", "watts"]
    columns += ["of the peak at that clock", "at the highest"]
    caption = f"{_where(data)}, bf16, N = 4096, no mask" if cells else ""
    return Table.of(cells, columns, align="rllrrrrr", caption=caption)


def against_best(data: Row) -> tuple[int, int, int, int]:
    """Of so many shapes: at how many ours is ahead of the best peer by medians, at how many beyond both spreads, and
    at how many it is behind beyond both spreads."""
    found = [s for s in standings(data) if s.ratio is not None]
    return (
        len(found), sum((s.ratio or 0) > 1 for s in found), sum(s.span[0] > 1 for s in found),
        sum(s.span[1] < 1 for s in found),
    )  # fmt: skip


def backward_table(data: Row) -> Table:
    """TFLOP/s of everyone's backward pass, and ours over the best peer."""
    found = ladder_speeds(data, "backward")
    names, cells = [name for name in names_in(found) if ":" not in name], []  # a kernel by itself is none
    for at, rows in found.items():
        over = Standing({}, rows).said.partition(" ")[0]
        cells.append([_label(*at), *(_cell(rows.get(n)) for n in names), over])
    columns = ["backward", *names, f"{OURS} / best"]
    caption = f"{_where(data)}, bf16: TFLOP/s, by 2.5 times the forward pass" if found else "no gradient is measured"
    return Table.of(cells, columns, align="l" + "r" * (len(names) + 1), caption=caption)


def planted_rows(data: Row) -> dict[str, Row]:
    """Of each mistake that was planted: "result" of the broken kernel, and what each tool of the sanitizer "said"."""
    return {r["what"]: r for r in where(data["rows"], part="planted") if "said" in r}


def gains(data: Row) -> dict[str, list[float]]:
    """How many times as fast each step of the ladder is as the one before it, at each shape where both have a time."""
    names = [one.name for one in hopper_jobs.ladder()]
    found: dict[str, list[float]] = {}
    for rows in ladder_speeds(data).values():
        for old, new in itertools.pairwise(names):
            if old in rows and new in rows:
                found.setdefault(new, []).append(rows[old]["ms"] / rows[new]["ms"])
    return {name: found[name] for name in names if name in found}


def lines(data: Row, names: Sequence[str], dtype: str = "bf16") -> dict[str, Lines]:
    """TFLOP/s over the length, by head_dim and mask and then by who: the standard shapes, results that are right."""
    some = where(of(data), part="shapes", kind="standard", dtype=dtype, name=set(names))
    able = [r for r in some if "ms" in r and right(r)]
    at = sorted({(r["causal"], r["D"]) for r in able})
    return {f"D = {d}{', causal' * c}": lines_of(where(able, D=d, causal=c), names) for c, d in at}


recorded = functools.partial(records.recorded, "hopper")
