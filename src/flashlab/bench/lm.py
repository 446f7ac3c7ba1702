"""The language model: its steps timed pass by pass, its memory, the longest text that fits, and its loss.

Sizes of flashlab.models.language_model, 1024 tokens, batch 4; `attention` is of WAYS: "eager" (scores in memory),
"sdpa" (with the backend that PyTorch chooses), "flash" (ours), all with RoPE in PyTorch's small operations, and "flash,
fused RoPE". dtype is "float32", or "bfloat16" for autocast to it; the weights are float32 in both. A step is launched
from Python, as in training, so where the GPU waits for Python, that is in its time. "step" times one way after the
other. Ratios of two ways are read from "turns": one model in one process, whose attention and RoPE are exchanged from
step to step, in an order that is shuffled in each round.

step       size, attention, dtype, pass; ms, fastest, slowest, rounds: after WARM steps. pass is "forward", "backward",
           "optimizer", "step" for all three, or "forward only": without gradients. warm_up_ms: of the first WARM steps,
           one by one. Of "step" also peak_bytes, weights and optimizer included; held_bytes, between two steps; tokens
turns      size, dtype, what, batch, seq_len; attention, compiled; times of a whole step; warm_up_ms; graph_ms: the
           step as one CUDA graph, which never waits for Python, or graph_unavailable. what is "attention", "compiled":
           each as it is and through torch.compile (a model of its own; warm_up_ms has the compiler's time first);
           `replaced` says whether it put fused attention in the place of eager; or "lengths": longer texts, and "none",
           where o is v and nothing is computed: no attention, however fast, makes the step faster than that
memory     size, attention, dtype; one row: us and bytes, what is allocated during one step after warm-up, by Python's
           clock (SERIES points at most, of each its highest); ends {pass: us}; peak_bytes; drift, the bytes by which
           the sum misses what the allocator says at the end. On a CPU only what the step allocates
limit      attention, dtype, seq_len: one step of a small model that reads bytes; N is doubled until a step runs out of
           memory, or would take too long: peak_bytes, once_ms (not warmed up), or unavailable
training   attention, dtype, jitter; one row: losses, in nats per byte, one per step; seconds. jitter not 0: the first
           weights are changed by about a rounding; how far that curve is from eager's own is the noise
"""

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from flashlab import runtime
from flashlab.bench import harness, peers, timing
from flashlab.bench.harness import NOT_YET, Data, Row, jobs_of
from flashlab.bench.rows import by, names_in, where
from flashlab.models.language_model import BYTES, SIZES, Config, LanguageModel, config, make_optimizer, train_step
from flashlab.models.layer import RotaryAttention
from flashlab.models.train import distance, fit
from flashlab.table import Table


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads * 3


def no_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """o = v, without a kernel; and o's gradient for q, k and v, so that what comes before them works as ever."""
    return cast(torch.Tensor, _Passed.apply(q, k, v))


NONE = "none"
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "flash": {"attention": "flash"},
    "flash, fused RoPE": {"attention": "flash", "fused_rope": True},
}
TURNS = {
    "attention": {**WAYS, "sdpa, fused RoPE": {"attention": "sdpa", "fused_rope": True}},
    "compiled": {way: WAYS[way] for way in ("eager", "sdpa", "flash")},
    "lengths": {"sdpa": WAYS["sdpa"], "flash": WAYS["flash"], NONE: {"attention": no_attention}},
}
"""By what is asked: the ways that take turns."""
EXCHANGES = {
    "attention alone": ("sdpa", "flash"),
    "attention alone, RoPE fused in both": ("sdpa, fused RoPE", "flash, fused RoPE"),
    "attention and RoPE": ("sdpa", "flash, fused RoPE"),
}
"""What is exchanged: the way before, and the way after."""
PASSES = ("forward", "backward", "optimizer")
DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}  # what autocast is told
BATCH, SEQ_LEN = 4, 1024
LENGTHS = ((4, 1024), (4, 4096), (1, 16384), (1, 32768))
"""Texts and tokens of each: where the length of texts is asked for."""
WARM, ROUNDS = 5, 10
SECONDS = 2.0  # of steps after warm-up: then no more than 3 are done
TINY = Config(width=32, depth=2, heads=2, vocabulary=BYTES, positions=32)
TRAINED = Config(width=384, depth=6, heads=6, vocabulary=BYTES, positions=256)
STEPS = 300
JITTER = {"float32": 2.0**-23, "bfloat16": 2.0**-9}
"""By how much weights are changed at most, for a measure of noise: about a rounding of this dtype."""
NOISE = "eager, other roundings"
SERIES = 400
LONGEST = 2**20
STEP_SECONDS = 25.0  # a length at which a step would take longer, by four times the one before, is not tried
SIZE_NAMES = {"sm": "small", "md": "medium", "lg": "large"}  # of the published table


# ---- what is measured ------------------------------------------------------------------------------------------------
def jobs() -> list[Row]:
    """The most telling first."""
    low, full = ["bfloat16"], ["float32"]
    steps = functools.partial(jobs_of, "step")
    small, fused, but_eager = ["small"], "flash, fused RoPE", [way for way in WAYS if way != "eager"]
    sizes = ("small", "medium", "large", "xl")
    return [
        *steps(size=small, attention=WAYS, dtype=low),
        *steps(size=sizes[:3], attention=["eager"], dtype=full),  # the published ones
        *_training("float32"),
        *jobs_of("turns", size=sizes, dtype=low, what=["attention"]),
        *[
            job | {"batch": b, "seq_len": n}
            for b, n in LENGTHS
            for job in jobs_of("turns", size=("small", "medium"), dtype=low, what=["lengths"])
        ],
        *jobs_of("turns", size=("medium", "small"), dtype=low, what=["compiled"]),
        *jobs_of("memory", size=small, attention=("eager", "flash"), dtype=low),
        *jobs_of("limit", attention=("eager", "flash"), dtype=low),
        *steps(size=["xl"], attention=("eager", fused, "sdpa"), dtype=low),
        *_training("bfloat16"),
        *steps(size=("large", "medium"), attention=WAYS, dtype=low),
        *steps(size=["xl"], attention=["flash"], dtype=low),
        *steps(size=small, attention=but_eager, dtype=full),
        *jobs_of("memory", size=small, attention=["sdpa"], dtype=low),
        *jobs_of("limit", attention=["sdpa"], dtype=low),
        *steps(size=("medium", "large"), attention=but_eager, dtype=full),
        *steps(size=["xl"], attention=WAYS, dtype=full),
    ]


def _training(dtype: str) -> list[Row]:
    ways = (("eager", 0.0), ("flash", 0.0), ("eager", JITTER[dtype]))
    return [{"part": "training", "attention": way, "dtype": dtype, "jitter": jitter} for way, jitter in ways]


def quick_jobs() -> list[Row]:
    """Of every part something, with a tiny model; without torch.compile, which takes its time."""
    tiny, full, eager = ["tiny"], ["float32"], ["eager"]
    found = jobs_of("step", size=tiny, attention=("eager", "flash, fused RoPE"), dtype=full)
    found += jobs_of("turns", size=tiny, dtype=full, what=("attention", "lengths"))
    found += [job for part in ("memory", "limit") for job in jobs_of(part, size=tiny, attention=eager, dtype=full)]
    return found + jobs_of("training", attention=eager, dtype=full, jitter=[0.0], size=tiny)


def shape_of(size: str) -> Config:
    """The model of a size; "tiny" too."""
    return TINY if size == "tiny" else config(size)


def _batch(job: Row) -> int:
    return 1 if job.get("size") == "tiny" else BATCH


def measure(job: Row) -> list[Row]:
    steps = {"step": measure_step, "turns": measure_turns, "training": measure_training}
    return (steps | {"memory": measure_memory, "limit": measure_limit})[job["part"]](job)


# ---- steps -----------------------------------------------------------------------------------------------------------
class Training:
    """A model on the GPU (or CPU), its optimizer, and one batch of tokens drawn at random."""

    def __init__(self, shape: Config, dtype: str, batch: int, seq_len: int, compiled: bool = False) -> None:
        device = runtime.device()
        with torch.random.fork_rng(), device:
            torch.manual_seed(0)
            self.model = LanguageModel(shape)
        if compiled:
            peers.many_shapes()
            self.model.compile(**peers.COMPILE)
        self.optimizer = make_optimizer(self.model)
        self.autocast = DTYPES[dtype]
        drawn = torch.randint(shape.vocabulary, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
        self.tokens, self.targets = drawn[:, :-1].to(device), drawn[:, 1:].to(device)

    def attend(self, way: dict[str, Any]) -> "Training":
        """The same model, optimizer and tokens, with another attention and RoPE."""
        for module in self.model.modules():
            if isinstance(module, RotaryAttention):
                module.attention, module.fused_rope = way["attention"], way.get("fused_rope", False)
        return self

    def step(self, done: Any = lambda what: None) -> None:
        train_step(self.model, self.optimizer, self.tokens, self.targets, autocast=self.autocast, done=done)

    def forward_only(self, done: Any) -> None:
        on = self.autocast is not None
        with torch.no_grad(), torch.autocast(self.tokens.device.type, dtype=self.autocast, enabled=on):
            self.model(self.tokens, self.targets)
        done("forward only")


def timed(work: Callable[[Callable[[str], None]], None]) -> dict[str, float]:
    """Milliseconds between what some work tells of: by what has ended; by the GPU's clock where there is one."""
    marks: list[tuple[str, Any]] = []

    def mark(what: str) -> None:
        at: Any = torch.cuda.Event(enable_timing=True) if harness.on_gpu() else time.perf_counter()
        if harness.on_gpu():
            at.record()
        marks.append((what, at))

    mark("begin")
    work(mark)
    if harness.on_gpu():
        torch.cuda.synchronize()
    return {
        what: a.elapsed_time(b) if harness.on_gpu() else 1e3 * (b - a)
        for (_, a), (what, b) in itertools.pairwise(marks)
    }


def timed_step(training: Training) -> dict[str, float]:
    """Milliseconds of one step by pass, and of all of it: "step"."""
    found = timed(training.step)
    return found | {"step": sum(found.values())}


def measure_step(job: Row) -> list[Row]:
    """A row for each pass of one model."""
    harness.emptied()
    shape = replace(shape_of(job["size"]), **WAYS[job["attention"]])
    length = min(SEQ_LEN, shape.positions)
    training = Training(shape, job["dtype"], _batch(job), length)
    first, least, rounds = (WARM, 3, ROUNDS) if job["size"] != "tiny" else (2, 1, 1)
    rows: list[Row] = []
    for work in (timed_step, lambda one: timed(one.forward_only)):
        warm = [work(training) for _ in range(first)]
        samples: list[dict[str, float]] = []
        begin = time.monotonic()
        while len(samples) < rounds and (len(samples) < least or time.monotonic() - begin < SECONDS):
            samples.append(work(training))
        for which in samples[0]:
            row = timing.summary([sample[which] for sample in samples])
            rows.append(job | {"pass": which} | row | {"warm_up_ms": [one[which] for one in warm]})
            if which == "step":
                rows[-1] |= {"tokens": training.tokens.numel()}
                if harness.on_gpu():
                    rows[-1]["peak_bytes"] = torch.cuda.max_memory_allocated()
                    rows[-1]["held_bytes"] = torch.cuda.memory_allocated()
    del training
    harness.emptied()
    return rows


def measure_turns(job: Row) -> list[Row]:
    """A row for each way of the job: its steps in turns with those of the others, then alone as one CUDA graph."""
    harness.emptied()
    shape = shape_of(job["size"])
    length = job.get("seq_len", min(SEQ_LEN, shape.positions))
    shape = replace(shape, positions=max(shape.positions, length))
    options = (job["dtype"], job.get("batch", _batch(job)), length)
    first, rounds = (WARM, ROUNDS) if job["size"] != "tiny" else (2, 1)
    plain = Training(shape, *options)
    ways: dict[tuple[str, bool], Callable[[], Training]] = {}
    for name, way in TURNS[job["what"]].items():
        ways[name, False] = functools.partial(plain.attend, way)
        if job["what"] == "compiled":  # a model of its own, since to exchange its attention compiles it again
            own = Training(replace(shape, **way), *options, compiled=True)
            ways[name, True] = functools.partial(own.attend, way)  # as it is
    about: dict[tuple[str, bool], Row] = {}
    for key, training in ways.items():
        already = peers.replaced()
        try:
            about[key] = {"warm_up_ms": [timed_step(training())["step"] for _ in range(first)]}
            about[key] |= {"replaced": peers.replaced() > already} if key[1] else {}
        except Exception as error:
            about[key] = {"unavailable": timing.reason(error)}
    able = [key for key in ways if "unavailable" not in about[key]]
    samples: dict[tuple[str, bool], list[float]] = {key: [] for key in able}
    for i in range(rounds):
        for key in random.Random(i).sample(able, len(able)):
            samples[key].append(timed_step(ways[key]())["step"])
    for key in able:
        about[key] |= timing.summary(samples[key])
        if harness.on_gpu():
            about[key] |= _graph(ways[key]())
    if job["what"] == "compiled":
        torch.compiler.reset()
    return [job | {"attention": name, "compiled": how} | about[name, how] for name, how in about]


def _graph(training: Training) -> Row:
    """Milliseconds of a step as one CUDA graph, or why there is none."""
    harness.emptied()
    for group in training.optimizer.param_groups:
        group["capturable"] = True
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            training.step()
        samples = [timing.milliseconds(graph.replay, torch.cuda.current_stream()) for _ in range(WARM + ROUNDS)]
    except Exception as error:
        return {"graph_unavailable": timing.reason(error)}
    finally:  # its gradients lie in the graph's memory
        training.optimizer.zero_grad(set_to_none=True)
    return {"graph_ms": timing.summary(samples[WARM:])["ms"]}


# ---- memory over a step ----------------------------------------------------------------------------------------------
class Series(NamedTuple):
    """Allocated MiB over milliseconds of one step; where each pass ended."""

    ms: list[float]
    mib: list[float]
    ends: dict[str, float]


def measure_memory(job: Row) -> list[Row]:
    """One row: what is allocated during a step."""
    harness.emptied()
    shape = replace(shape_of(job["size"]), **WAYS[job["attention"]])
    training = Training(shape, job["dtype"], _batch(job), min(SEQ_LEN, shape.positions))
    for _ in range(3):
        training.step()
    marks: list[tuple[str, float]] = []

    def mark(what: str) -> None:
        marks.append((what, time.time_ns() / 1e3))

    def step() -> None:
        mark("begin")
        training.step(mark)

    if harness.on_gpu():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        changes = _of_the_gpu(step)
        after = torch.cuda.memory_allocated()
    else:
        before, changes = 0, _of_the_cpu(step)
        after = sum(size for _, size in changes)
    zero = marks[0][1]
    held = itertools.accumulate((size for _, size in changes), initial=before)
    points = list(zip((when - zero for when, _ in changes), itertools.islice(held, 1, None), strict=True))
    us, most = condensed(points)
    return [job | {
        "us": us, "bytes": most, "ends": {what: round(when - zero, 1) for what, when in marks[1:]},
        "peak_bytes": max(most, default=before), "drift": (points[-1][1] if points else before) - after,
    }]  # fmt: skip


def _of_the_gpu(step: Any) -> list[tuple[float, int]]:
    """(us, bytes more or less) of every allocation on the GPU during step(), by the clock of time.time_ns."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    try:
        step()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return [(float(e["time_us"]), signs[e["action"]] * e["size"]) for e in trace if e["action"] in signs]


def _of_the_cpu(step: Any) -> list[tuple[float, int]]:
    """The same on a CPU, as PyTorch's profiler sees it."""
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    kineto = found.profiler.kineto_results.events() if found.profiler else []
    return sorted((e.start_ns() / 1e3, e.nbytes()) for e in kineto if e.name() == "[memory]")


def condensed(points: Sequence[tuple[float, int]], most: int = SERIES) -> tuple[list[float], list[int]]:
    """At most so many points of a curve: of every group that follow each other the highest, so that no peak is lost."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    kept = [max(group, key=lambda point: point[1]) for group in groups]
    return [round(when, 1) for when, _ in kept], [held for _, held in kept]


# ---- the longest text ------------------------------------------------------------------------------------------------
def measure_limit(job: Row) -> list[Row]:
    """A row for each length, doubled until a step runs out of memory, or would take too long: its bytes at the most and
    its time, or why there is none."""
    harness.emptied()
    base = shape_of(job.get("size", "small"))
    longest = LONGEST if harness.on_gpu() else 64  # where too long a text would fill the machine's own memory
    rows: list[Row] = []
    seq_len = 1024 if harness.on_gpu() else 16
    while True:
        shape = replace(base, vocabulary=BYTES, positions=seq_len, **WAYS[job["attention"]])
        row = job | {"seq_len": seq_len}
        try:
            row["once_ms"] = timed_step(Training(shape, job["dtype"], _batch(job), seq_len))["step"]
            if harness.on_gpu():
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
        except Exception as error:  # memory most likely
            row["unavailable"] = timing.reason(error)
        harness.emptied()
        rows.append(row)
        if "unavailable" in row or 2 * seq_len > longest or 4 * row["once_ms"] / 1e3 > STEP_SECONDS:
            return rows
        seq_len *= 2


# ---- training --------------------------------------------------------------------------------------------------------
def measure_training(job: Row) -> list[Row]:
    """One row: the losses of a short run on the lessons' text."""
    tiny = job.get("size") == "tiny"
    shape = replace(TINY if tiny else TRAINED, **WAYS[job["attention"]])
    options: dict[str, Any] = {"steps": 5, "batch": 2} if tiny else {"steps": STEPS, "batch": 16}
    begin = time.monotonic()
    _, found = fit(shape, seq_len=shape.positions, autocast=DTYPES[job["dtype"]], jitter=job["jitter"], **options)
    seconds = time.monotonic() - begin
    return [job | {"losses": [round(loss, 6) for loss in found], "seconds": round(seconds, 2)}]


# ---- reading ---------------------------------------------------------------------------------------------------------
Lines = dict[str, tuple[list[str], list[float]]]


def _table(rows: Sequence[Any], columns: list[str], align: str, caption: str, data: Data, behind: str = "") -> Table:
    said = f"{caption}, {data['machine']['gpu'] or 'a CPU'}{behind}"
    return Table.of(rows, columns, align=align, caption=said if rows else NOT_YET)


def _all_sizes(data: Data) -> list[str]:
    return [size for size in ("tiny", *SIZES) if any(row.get("size") == size for row in data["rows"])]


def passes(data: Data, size: str, attention: str, dtype: str = "bfloat16") -> dict[str, Row]:
    """The rows of one model by pass; {} where it was not measured, or did not run."""
    found = where(data["rows"], part="step", size=size, attention=attention, dtype=dtype)
    return {row["pass"]: row for row in found if "ms" in row}


def step_table(data: Data, dtype: str = "bfloat16") -> Table:
    """Each size and attention: ms of each pass and of the step, tokens per second, GiB at the worst moment."""
    rows = []
    for size in _all_sizes(data):
        for way in WAYS:
            if found := passes(data, size, way, dtype):
                whole = found["step"]
                peak = f"{whole['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in whole else ""
                times = [f"{found[which]['ms']:.1f}" for which in (*PASSES, "step")]
                rows.append([size, way, *times, round(1e3 * whole["tokens"] / whole["ms"]), peak])
            elif why := where(data["rows"], part="step", size=size, attention=way, dtype=dtype):
                rows.append([size, way, harness.short(why[0]), "", "", "", "", ""])
    columns = ["size", "attention", *(f"{which}, ms" for which in (*PASSES, "step")), "tokens/s", "GiB"]
    return _table(rows, columns, "ll" + "r" * 6, f"{dtype}, {BATCH} texts of {SEQ_LEN} tokens", data)


def over_sizes(data: Data) -> Lines:
    """ms of a step in bfloat16 by attention: the sizes where it ran, and a value for each."""
    took = {way: {size: steps["step"]["ms"] for size in _all_sizes(data) if (steps := passes(data, size, way))}
            for way in WAYS}  # fmt: skip
    return {way: (list(ms), list(ms.values())) for way, ms in took.items() if ms}


def ratio(
    data: Data, size: str, attention: str, over: str = "eager", which: str = "step", dtype: str = "bfloat16"
) -> float | None:
    """How many times as fast as `over` an attention makes a pass; None where one has no time."""
    a, b = (passes(data, size, way, dtype).get(which) for way in (over, attention))
    return a["ms"] / b["ms"] if a and b else None


def turns(data: Data, size: str, what: str = "attention") -> dict[tuple[str, bool], Row]:
    """By attention and whether it was compiled: the rows of one job, which were timed in turns."""
    found = where(data["rows"], part="turns", size=size, what=what, dtype="bfloat16")
    return {(row["attention"], row["compiled"]): row for row in found if "attention" in row}


def exchanged(data: Data, size: str, column: str = "ms") -> dict[str, float]:
    """By EXCHANGES: how many times as fast a step gets; "graph_ms": the step as one CUDA graph."""
    took = {name: row[column] for (name, _), row in turns(data, size).items() if column in row}
    return {what: took[a] / took[b] for what, (a, b) in EXCHANGES.items() if a in took and b in took}


def exchanged_table(data: Data) -> Table:
    """How many times as fast as SDPA ours is, by what is exchanged: launched by Python, and as one CUDA graph."""
    rows = []
    for size in _all_sizes(data):
        by_python, alone = exchanged(data, size), exchanged(data, size, "graph_ms")
        for what, ratio in by_python.items():
            rows.append([size, what, f"{ratio:.2f}", f"{alone[what]:.2f}" if what in alone else ""])
    columns = ["size", "exchanged", "launched by Python", "one CUDA graph"]
    return _table(rows, columns, "llrr", "bfloat16", data, ": times as fast as SDPA")


def compiled_table(data: Data) -> Table:
    """ms of a step with torch.compile beside those without, launched by Python and as one CUDA graph; and of its first
    step, which compiles."""
    rows = []
    for size in _all_sizes(data):
        found = turns(data, size, "compiled")
        for way in TURNS["compiled"]:
            plain, with_it = found.get((way, False), {}), found.get((way, True), {})
            if "ms" in plain and "ms" in with_it:
                cells = [f"{row[c]:.1f}" if c in row else "" for row in (plain, with_it) for c in ("ms", "graph_ms")]
                put, begun = "yes" if with_it["replaced"] else "no", f"{with_it['warm_up_ms'][0] / 1e3:.1f}"
                rows.append([size, way, *cells, f"{plain['ms'] / with_it['ms']:.2f}", put, begun])
            elif "unavailable" in with_it:
                rows.append([size, way, "", "", harness.short(with_it), "", "", "", ""])
    columns = ["size", "attention", "step, ms", "its graph", "compiled, ms", "its graph", "times as fast", "replaced",
               "first step, s"]  # fmt: skip
    return _table(rows, columns, "ll" + "r" * 5 + "lr", "bfloat16", data)


def quickest(data: Data, size: str, column: str = "ms") -> tuple[str, bool, float] | None:
    """The fastest of the ways that were timed in turns with compiled ones: its attention, whether it is compiled, ms.
    None where none was timed."""
    found = [(name, how, row[column]) for (name, how), row in turns(data, size, "compiled").items() if column in row]
    return min(found, key=lambda one: one[2], default=None)


def by_length(data: Data, size: str) -> dict[tuple[int, int], dict[str, float]]:
    """By texts and tokens of each: ms of a step as one CUDA graph by attention, NONE too, where SDPA was timed."""
    found = where(data["rows"], part="turns", what="lengths", size=size)
    ms = {(b, n): {row["attention"]: row["graph_ms"] for row in where(found, batch=b, seq_len=n) if "graph_ms" in row}
          for b, n in LENGTHS}  # fmt: skip
    return {length: took for length, took in ms.items() if "sdpa" in took}


def lengths_table(data: Data) -> Table:
    """`by_length`; what share of SDPA's step its attention takes, how many times as fast ours is, and so the step."""
    rows = []
    for size in _all_sizes(data):
        for (batch, length), ms in by_length(data, size).items():
            times = [f"{ms[way]:.1f}" if way in ms else "" for way in TURNS["lengths"]]
            if len(ms) == len(TURNS["lengths"]):
                sdpa, ours = (ms[way] - ms[NONE] for way in ("sdpa", "flash"))
                times += [f"{sdpa / ms['sdpa']:.0%}", f"{sdpa / ours:.2f}", f"{ms['sdpa'] / ms['flash']:.2f}"]
            rows.append([size, f"{batch} × {length}", *times, *[""] * (6 - len(times))])
    columns = ["size", "tokens", "SDPA, ms", "ours, ms", "none, ms", "attention's share", "ours, times as fast",
               "the step"]  # fmt: skip
    return _table(rows, columns, "ll" + "r" * 6, "bfloat16, each step as one CUDA graph", data)


def graph_table(data: Data) -> Table:
    """ms of a step that Python launches, of the same as one CUDA graph, and how much of the first the GPU waits."""
    rows = []
    for size in _all_sizes(data):
        for (way, _), row in turns(data, size).items():
            if "graph_ms" in row:
                waits = max(0.0, 1 - row["graph_ms"] / row["ms"])
                rows.append([size, way, f"{row['ms']:.1f}", f"{row['graph_ms']:.1f}", f"{waits:.0%}"])
    columns = ["size", "attention", "launched by Python, ms", "one CUDA graph, ms", "the GPU waits"]
    return _table(rows, columns, "llrrr", "bfloat16", data)


def warm_up_table(data: Data) -> Table:
    """ms of a step, small, bfloat16: the first one, the mean of the first ones, the median after them; how far off that
    mean is."""
    rows = []
    for way in WAYS:
        if row := passes(data, "small", way).get("step"):
            first, ms = row["warm_up_ms"], row["ms"]
            mean = sum(first) / len(first)
            rows.append([way, f"{first[0]:.1f}", f"{mean:.1f}", f"{ms:.1f}", f"{mean / ms:.1f}"])
    columns = ["attention", "first step, ms", f"mean of {WARM}, no warm-up", "median after them", "times as long"]
    return _table(rows, columns, "lrrrr", "small, bfloat16", data)


def memory(data: Data) -> dict[str, Series]:
    """By attention: what was allocated during one step of the small model in bfloat16."""
    found = {}
    for row in where(data["rows"], part="memory", size="small", dtype="bfloat16"):
        if "us" in row:
            ms, mib = [us / 1e3 for us in row["us"]], [held / 2**20 for held in row["bytes"]]
            found[row["attention"]] = Series(ms, mib, {which: us / 1e3 for which, us in row["ends"].items()})
    return found


def runs_out(data: Data) -> dict[str, int | None]:
    """By attention: the first length whose step runs out of memory; None where none did, as far as was tried."""
    found: dict[str, int | None] = {}
    for row in where(data["rows"], part="limit"):
        if "seq_len" in row:
            out = row["seq_len"] if row.get("unavailable", "").startswith("out of memory") else None
            found[row["attention"]] = found.get(row["attention"]) or out
    return found


def limit_table(data: Data) -> Table:
    """GiB of a step at its worst moment, by length; "out of memory" where it was."""
    at = by([r | {"name": r["attention"]} for r in where(data["rows"], part="limit") if "seq_len" in r], "seq_len")
    names = [way for way in WAYS if way in names_in(at)]

    def cell(row: Row) -> str:
        return harness.short(row) if "unavailable" in row else f"{row.get('peak_bytes', 0) / 2**30:.1f}"

    rows = [[n, *(cell(line[way]) if way in line else "" for way in names)] for (n,), line in sorted(at.items())]
    caption = f"GiB, a small model that reads bytes, {BATCH} texts, bfloat16"
    return _table(rows, ["tokens", *names], "r" * (1 + len(names)), caption, data)


def losses(data: Data, dtype: str = "float32") -> dict[str, list[float]]:
    """The loss of each step by attention, in nats per byte; NOISE is eager with other roundings."""
    return {
        NOISE if row["jitter"] else row["attention"]: row["losses"]
        for row in where(data["rows"], part="training", dtype=dtype) if "losses" in row
    }  # fmt: skip


def apart(data: Data, dtype: str = "float32") -> dict[str, float]:
    """By name: the largest difference of a curve from that of eager, in nats per byte."""
    found = losses(data, dtype)
    if "eager" not in found:
        return {}
    return {name: distance(found["eager"], curve) for name, curve in found.items() if name != "eager"}


BENCH = harness.Bench(
    __name__, "the language model is",
    ("size", "attention", "dtype", "what", "batch", "seq_len", "compiled", "pass"), minutes=8.0,
    facts={"batch": BATCH, "seq_len": SEQ_LEN},
)  # fmt: skip
main, recorded, record = BENCH.main, BENCH.recorded, BENCH.record
