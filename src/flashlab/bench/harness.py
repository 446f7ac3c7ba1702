"""One harness for every bench that times something: what to measure is a Bench, and all the rest is here.

    BENCH = Bench(__name__, "things are", keys=("shape", "name"))
    main = BENCH.main

A job is a dict that names one measurement: its part, a shape, what else it needs. ``measure(job)`` returns rows: the
job's own items, the name of who was timed, and milliseconds, or ``unavailable`` with the reason. A run writes its
record after every job, whole or not at all. So a run that is killed, or whose time is up, is gone on with by the next
one. What runs out of memory, or fails, is a row; the other jobs do not notice. A reason that begins "out of memory: "
is memory's. What reads a record takes `recorded()` or `record()`; where that has nothing, it gives nothing or NOT_YET.

    flashlab bench things                     # goes on where the record ends; writes recorded/things_<gpu>.json
    flashlab bench things --help              # --minutes, --only, --quick, --compare, --merge
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.bench import records, timing
from flashlab.bench.records import NoGpu
from flashlab.table import Table

Row = dict[str, Any]
Data = dict[str, Any]
Way = Callable[[], Any]

ATTEMPTS = 2  # how often a job is begun that ends the whole process: once may be the user, twice is the job
NOT_YET = "not measured yet"
LEAST_CHANGE = 0.01  # medians that differ by less are the same, however small the spread of either


def on_gpu() -> bool:
    """Whether times are of a GPU here, with Triton compiled."""
    return torch.cuda.is_available() and not runtime.INTERPRETED


@dataclass(frozen=True)
class Bench:
    """What one bench measures: its functions are those of its module.

    jobs(): every measurement, in the order in which they are done; a run may end before the last. quick_jobs(): those
    of --quick, where these are not the first `quick`. measure(job): the rows of one job. table(record): what is printed
    of a record, where that is not `times_table`.
    prepare(jobs, until), where there is one: before the jobs, on a GPU: builds and checks, until a time of
    time.monotonic(); more facts.

    what: "the layer is", for the sentence that it is measured on a GPU; quick_too: --quick as well.
    keys: the items of a row that say which one it is, for --compare; of those it has.
    facts: what the record says beside the machine and the rows.
    options: arguments of `measure` and `prepare` that the command line offers, as argparse wants them.
    minutes: the default of --minutes.
    """

    module: str
    what: str
    keys: Sequence[str]
    quick_too: bool = False
    quick: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    minutes: float = math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[self.module], name)

    def quick_jobs(self) -> list[Row]:
        """The module's own, or the first of all."""
        own = getattr(sys.modules[self.module], "quick_jobs", None)
        return own() if own else self.jobs()[: self.quick]

    def table(self, data: Data) -> Table:
        """The module's own, or all times."""
        own = getattr(sys.modules[self.module], "table", None)
        return own(data) if own else times_table(self, data)

    @property
    def name(self) -> str:
        """Of the command, and of its record."""
        return self.module.rpartition(".")[2]

    def needs(self, quick: bool) -> str | None:
        """Why it cannot be measured on this machine, or None."""
        if on_gpu() or (quick and not self.quick_too):
            return None
        found = "PyTorch sees none" if not torch.cuda.is_available() else "Triton interprets in this process"
        return f"{self.what} measured on a CUDA GPU, and {found}" + ("" if self.quick_too else "; --quick runs here")

    def recorded(self) -> list[Data]:
        """Every recorded run there is, in the order of their file names; [] where none is."""
        return records.recorded(self.name)

    def record(self) -> Data:
        """The first of them, or one without rows: every reader takes it."""
        return next(iter(self.recorded()), {"rows": [], "machine": {"gpu": None}})

    def run(self, jobs: Sequence[Row]) -> Data:
        """The record of some jobs, measured here and now. Raises NoGpu."""
        if reason := self.needs(False):
            raise NoGpu(reason)
        return run(self, jobs)

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure, or compare, as the arguments say. Raises NoGpu, SystemExit."""
        given = parser(self).parse_args(arguments)
        if given.compare:
            before, after = (read(self, path) for path in given.compare)
            table, worse = compare(self, before, after)
            print(json.dumps(changes(self, before, after)) if given.json else table)
            raise SystemExit(int(worse))
        if given.merge:
            new = read(self, given.merge)
            path = given.out or records.default_path(self.name, new["machine"]["gpu"])
            records.keep(path, merged(self, read(self, path), new), self.table, given)
            return
        only = getattr(given, "only", None)
        todo = [job for job in (self.quick_jobs() if given.quick else self.jobs()) if not only or job["part"] in only]
        if reason := self.needs(given.quick):
            raise NoGpu(reason)
        path = records.place(self.name, given)
        known = None if given.quick or path is None else known_rows(self, path, todo, given)
        if known and not waiting(todo, known["rows"]):
            print(f"{path} has all of it; --anew measures it again", file=sys.stderr)
            records.keep(path, known, self.table, given)
            return
        options = {name: getattr(given, name) for name in self.options}
        save = (lambda data: records.write_json(path, data)) if path else (lambda data: None)
        result = run(self, todo, known, minutes=given.minutes, save=save, **options)
        if result["left"]:
            print(f"the time is up: {result['left']} measurements are left; run it again to go on", file=sys.stderr)
        records.keep(path, result, self.table, given)


# ---- rows and records ------------------------------------------------------------------------------------------------
def is_of(row: Row, job: Row) -> bool:
    """Whether a row is of a job: it says all that the job says."""
    return all(key in row and row[key] == value for key, value in job.items())


def record_of(bench: Bench, machine: Data, rows: Sequence[Row], old: Data, todo: Sequence[Row]) -> Data:
    """The record of some rows, with the facts of an old one; `left`: how many of the jobs wait."""
    facts = {k: v for k, v in old.items() if k not in ("bench", "machine", "rows", "left")}
    left = len(waiting(todo, rows))
    return {"bench": bench.name, "machine": machine, **bench.facts, **facts, "left": left, "rows": list(rows)}


def waiting(todo: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The jobs that have no row; and those during which a process ended, up to ATTEMPTS times."""
    over = [row for row in rows if row.get("attempts", ATTEMPTS) >= ATTEMPTS]
    done: dict[tuple[str, ...], set[str]] = {}  # by the items that a job has: comparing all with all takes seconds
    for keys in {tuple(job) for job in todo}:
        done[keys] = {json.dumps([row[k] for k in keys]) for row in over if all(k in row for k in keys)}
    return [job for job in todo if json.dumps(list(job.values())) not in done[tuple(job)]]


def failed(job: Row, reason: str, **more: Any) -> Row:
    """The row of a job that has no other."""
    return job | {"name": "all", "unavailable": reason} | more


def _unlike(a: Data, b: Data, names: Sequence[str] = ("gpu", "torch", "triton")) -> list[str]:
    """In which of these names two machines differ: rows of two GPUs, or of two versions, are never mixed."""
    return [name for name in names if a.get(name) != b.get(name)]


def merged(bench: Bench, old: Data, new: Data) -> Data:
    """The record `old`, with the rows of `new` in the place of those of the same jobs; a job that failed in `new`
    leaves the old rows. Raises SystemExit where the two are of other machines or versions."""
    if unlike := _unlike(old["machine"], new["machine"]):
        raise SystemExit(f"the two records are of another {', '.join(unlike)}: rows of both cannot stand in one record")
    done = [job for job in bench.jobs() if any(is_of(r, job) and r.get("name") != "all" for r in new["rows"])]

    def of_them(row: Row) -> bool:
        return any(is_of(row, job) for job in done)

    found = [*(r for r in old["rows"] if not of_them(r)), *filter(of_them, new["rows"])]
    earlier = _earlier(old["machine"], len(old["rows"]))
    earlier += [x for x in new["machine"].get("earlier", []) if x not in earlier]
    return record_of(bench, new["machine"] | {"earlier": earlier}, found, old | new, bench.jobs())


# ---- what a bench is made of -----------------------------------------------------------------------------------------
def jobs_of(part: str, **axes: Iterable[Any]) -> list[Row]:
    """A job for each combination of the axes' values; the last axis is the fastest."""
    return [{"part": part} | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def rows_of(job: Row, found: Mapping[str, Row], reasons: Mapping[str, str], work: float = 0.0) -> list[Row]:
    """The rows of a job: of who has a time, with TFLOP/s where the FLOPs of a call are given, and of who has none."""
    rows = [job | {"name": name} | row for name, row in found.items()]
    if work:
        rows = [row | {"tflops": work / (row["ms"] * 1e9)} for row in rows]
    return rows + [job | {"name": name, "unavailable": why} for name, why in reasons.items()]


def work_of(job: Row) -> float:
    """FLOPs of a forward pass of a job's shape: two products of 2 Nq Nk D for each head, half of that if causal."""
    batch, heads, rows, head_dim = job["shape"]
    return 4.0 * batch * heads * rows * job.get("keys", rows) * head_dim / (2 if job["causal"] else 1)


def draw(
    *shapes: Sequence[int], dtype: torch.dtype, seed: int | None = None, device: Any = None, grad: int = 0
) -> list[torch.Tensor]:
    """Tensors of random numbers, the same each time; the first `grad` of them want a gradient. They have a generator of
    their own: a recording of a CUDA graph that failed leaves PyTorch's unusable."""
    device = runtime.device() if device is None else device
    generator = torch.Generator(device).manual_seed(sum(shapes[0]) if seed is None else seed)
    drawn = [torch.randn(tuple(x), device=device, dtype=dtype, generator=generator) for x in shapes]
    return [x.requires_grad_(i < grad) for i, x in enumerate(drawn)]


def sets_of(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, and as many copies as exceed the L2 cache together with them; none without a GPU."""
    most = timing.input_sets(sum(x.nbytes for x in tensors)) if on_gpu() else 1
    copies = [[x.detach().clone().requires_grad_(x.requires_grad) for x in tensors] for _ in range(most - 1)]
    return [list(tensors), *copies]


def backward_of(way: Way, inputs: Sequence[torch.Tensor], grad_o: torch.Tensor) -> Way:
    """The backward pass alone: the forward pass is run when it is first called."""
    kept: list[torch.Tensor] = []

    def run() -> Any:
        if not kept:
            kept.append(way())
        return torch.autograd.grad(kept[0], inputs, grad_o, retain_graph=True)

    return run


def at_once(build: Callable[..., Any], wanted: Iterable[Any], threads: int | None = None) -> list[Any]:
    """build(x) of each, by so many threads, as many as there are cores if None: they wait for a compiler."""
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        return list(pool.map(build, wanted))


def emptied() -> None:
    """What nobody holds is given back to the GPU, and its peak counted anew."""
    gc.collect()
    if on_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def short(row: Row) -> str:
    """Why a row has no time, in a word or two."""
    return str(row["unavailable"]).partition(":")[0][:20]


def compiled_by(workers: int, compile_one: Callable[..., None], tasks: Iterable[tuple[Any, ...]], until: float) -> int:
    """Runs tasks in processes of their own, until a time of time.monotonic(). Returns how many were done.

    What is not, be it that its process crashed with the compiler, is compiled when it is measured. Who still runs then
    is ended: it would disturb the clocks.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, *task) for task in tasks]
        done, late = wait(futures, timeout=min(3600.0, max(1.0, until - time.monotonic())))
        if late:
            processes = [*(pool._processes or {}).values()]  # before the pool forgets them
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
    return sum(1 for future in done if not future.exception())


def times_of(ways: Mapping[str, timing.Work], rounds: int = 9, **options: Any) -> tuple[dict[str, Row], dict[str, str]]:
    """Rows of milliseconds by name, in turns, and why the others have none; on a CPU by the clock on the wall.

    options: of timing.interleaved. Where something cannot be recorded into a CUDA graph, none is, and the rows say so.
    """
    able, reasons = timing.able(ways)
    if not on_gpu():
        return timing.on_cpu(able, rounds=min(rounds, 3)), reasons
    try:
        return timing.interleaved(able, rounds=rounds, **options), reasons
    except RuntimeError as error:
        print(f"  without CUDA graphs: {str(error).strip().splitlines()[0][:120]}", file=sys.stderr)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    drawn = torch.cuda.default_generators[torch.cuda.current_device()]
    drawn.graphsafe_set_state(drawn.clone_state())  # a recording that failed leaves it as if one still went on
    plain = timing.interleaved(able, rounds=rounds, **options | {"graphs": False})
    return {name: row | {"graph": False} for name, row in plain.items()}, reasons


def again(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """This Python with these arguments, in a process of its own that finds this package. options: of subprocess.run."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": paths}, **options)


def calling(function: Callable[..., Any], *words: str) -> tuple[str, ...]:
    """The arguments of a Python that calls a function of this package: for `again`, a profiler, a sanitizer."""
    code = f"import sys; from {function.__module__} import {function.__name__} as call; call(*sys.argv[1:])"
    return ("-c", code, *words)


def trial(*arguments: str, seconds: float) -> str | None:
    """Why what a Python program tries is not to be done in this process, or None; it is run in one of its own.

    For kernels whose barriers are set by hand: one that waits for ever, or writes where it should not, would take the
    whole run with it. A result that is wrong, "ValueError: at ...", is no reason: that is measured.
    """
    try:
        done = again(*arguments, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"its trial had not ended after {seconds:.0f} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    print(f"  {' '.join(arguments[-2:])}: {last}", file=sys.stderr)
    return None if last.startswith("ValueError: at ") else f"its trial failed: {last[:200]}"


@contextlib.contextmanager
def _watched() -> Iterator[Data]:
    """The machine, its clock watched. Autograd computes a gradient on the stream of its forward pass, and a CUDA graph
    is recorded on one stream that is not the default: so all is done on one."""
    if not on_gpu():
        yield records.machine()
        return
    with timing.measured() as machine, torch.cuda.stream(torch.cuda.Stream()):
        yield machine


# ---- a run -----------------------------------------------------------------------------------------------------------
def run(
    bench: Bench, todo: Sequence[Row], known: Data | None = None, *, minutes: float = math.inf,
    save: Callable[[Data], None] = lambda data: None, **options: Any,
) -> Data:  # fmt: skip
    """Measure the jobs that the record `known` has no rows of, until the time is up; save(record) around each.

    Before a job is begun, the record says that the process ended during it: until it has ended, that is so.
    Raises RuntimeError where a kernel has left the GPU in a state in which nothing runs: a new process is needed.
    """
    end = time.monotonic() + 60 * minutes
    rows = list(known["rows"]) if known else []
    facts = dict(known or {})
    with _watched() as machine:
        if known and rows:
            machine["earlier"] = _earlier(known["machine"], len(rows))

        def data() -> Data:
            return record_of(bench, machine, rows, facts, todo)

        left = waiting(todo, rows)
        if left and on_gpu() and hasattr(bench, "prepare"):
            facts |= bench.prepare(left, time.monotonic() + (end - time.monotonic()) / 2, **options) or {}
        for number, job in enumerate(left, 1):
            if time.monotonic() > end:
                break
            rows = _measured(bench, job, rows, lambda now: save(data() | {"rows": now}), options)
            save(data())
            said = _said(bench, [row for row in rows if is_of(row, job)])
            print(f"{number}/{len(left)}  {describe(job)}: {said}", file=sys.stderr, flush=True)
        found = data()
    return found | {"machine": machine}  # with its clock


def _earlier(machine: Data, rows: int) -> list[Data]:
    """What a record has from earlier sessions: how many rows in all, by which commit, when, at which clock, with
    which driver, which does not compile the kernels."""
    names = ("date", "commit", "sources", "driver", "sm_clock_mhz")
    return [*machine.get("earlier", []), {"rows": rows} | {n: machine[n] for n in names if n in machine}]


def _measured(
    bench: Bench, job: Row, rows: list[Row], attempt: Callable[[list[Row]], None], options: Mapping[str, Any]
) -> list[Row]:
    """All rows, with those of the job, which had none or only attempts."""
    tried = max((row.get("attempts", 0) for row in rows if is_of(row, job)), default=0)
    others = [row for row in rows if not is_of(row, job)]
    ended = failed(job, "the process ended while this was measured", attempts=tried + 1)
    attempt([*others, ended])
    try:
        found = bench.measure(job, **options)
    except KeyboardInterrupt:
        attempt(rows)
        raise
    except Exception as error:  # one that fails does not cost the others
        found = [failed(job, timing.reason(error))]
    if on_gpu():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            why = f"after it nothing ran on the GPU: {str(error).splitlines()[0]}"
            attempt([*others, failed(job, why)])
            raise RuntimeError(
                f"after {describe(job)} nothing runs on this GPU in this process ({str(error).splitlines()[0]}); "
                "run it again to go on behind it"
            ) from error
    return others + found


def describe(job: Row) -> str:
    """A job in a few words."""

    def word(key: str, value: Any) -> str:
        if isinstance(value, bool):
            return key if value else f"not {key}"
        if isinstance(value, list | tuple):
            return "x".join(map(str, value))
        return value if isinstance(value, str) else f"{key} {value}"

    return " ".join(word(key, value) for key, value in job.items())


def _said(bench: Bench, rows: Sequence[Row]) -> str:
    """What a job gave, in a few words."""
    if fast := min((r for r in rows if "ms" in r), key=lambda r: r["ms"], default=None):
        who = next((fast[k] for k in ("name", "variant", "tile") if k in fast), bench.name)
        return f"fastest {who}, {1e3 * fast['ms']:.1f} us"
    return next((f"none runs: {row['unavailable']}" for row in rows if "unavailable" in row), f"{len(rows)} rows")


def read(bench: Bench, path: Path) -> Data:
    """A record of this bench. Raises SystemExit, with one sentence, where the file is missing or no such record."""
    try:
        data: Data = json.loads(path.read_text(encoding="utf-8"))
        if {"machine", "rows"} <= data.keys():
            return data
        why = "it has no machine and no rows"
    except (OSError, ValueError, AttributeError) as error:
        why = str(error)
    raise SystemExit(f"{path} is no record of `flashlab bench {bench.name}`: {why}")


def times_table(bench: Bench, data: Data) -> Table:
    """Of each measurement everyone's microseconds, the fastest first; then who has none, and why in a word."""
    who = next(key for key in ("name", "variant", "attention") if key in bench.keys)
    found: dict[str, list[Row]] = {}
    for row in data["rows"]:
        if who in row and ("ms" in row or "unavailable" in row):
            what = describe({k: row[k] for k in ("part", *bench.keys) if k in row and k != who})
            found.setdefault(what, []).append(row)
    said = {
        what: "; ".join(
            f"{row[who]} {1e3 * row['ms']:.1f}" if "ms" in row else f"{row[who]}: {short(row)}"
            for row in sorted(rows, key=lambda row: row.get("ms", math.inf))
        )
        for what, rows in found.items()
    }
    return Table.of([*said.items()], ["what", "microseconds"], caption="" if said else NOT_YET)


# ---- two records -----------------------------------------------------------------------------------------------------
def changes(bench: Bench, before: Data, after: Data) -> list[tuple[str, str, float | None, float | None]]:
    """(what it is, "slower" | "faster" | "gone" | "back", ms before, ms after) of the rows that both records have.

    Slower: its fastest round is slower than the slowest before, and its median by LEAST_CHANGE at least. Gone: what
    ran before cannot run now.
    """
    old, new = (_by_label(bench, data) for data in (before, after))
    found = []
    for label in old.keys() & new.keys():
        a, b = old[label], new[label]
        if "ms" in a and "ms" in b:
            slower, faster = b["fastest"] > a["slowest"], b["slowest"] < a["fastest"]
            if abs(b["ms"] / a["ms"] - 1) >= LEAST_CHANGE and (slower or faster):
                found.append((label, "slower" if slower else "faster", a["ms"], b["ms"]))
        elif "ms" in a or "ms" in b:
            found.append((label, "gone" if "ms" in a else "back", a.get("ms"), b.get("ms")))
    order = ("gone", "slower", "faster", "back")
    return sorted(found, key=lambda c: (order.index(c[1]), -abs(math.log((c[3] or 1.0) / (c[2] or 1.0))), c[0]))


def _by_label(bench: Bench, data: Data) -> dict[str, Row]:
    keys = ("part", *bench.keys)
    return {describe({k: row[k] for k in keys if k in row}): row for row in data["rows"]}


def compare(bench: Bench, before: Data, after: Data) -> tuple[Table, bool]:
    """A table of `changes`, and whether something got slower, or no longer runs. Raises SystemExit without any row."""
    found = changes(bench, before, after)
    both = len(_by_label(bench, before).keys() & _by_label(bench, after).keys())
    if not both:
        raise SystemExit("no row is in both records, so nothing is compared")
    rows = [
        [label, what, *("" if ms is None else f"{1e3 * ms:.1f}" for ms in (a, b)), f"{b / a:.2f}" if a and b else ""]
        for label, what, a, b in found
    ]
    worse = any(what in ("slower", "gone") for _, what, _, _ in found)
    caption = f"{len(found)} of {both} rows that both have differ beyond their spread."
    a, b = before["machine"], after["machine"]
    unlike = [f"{n} {a.get(n)} and {b.get(n)}" for n in _unlike(a, b, ("gpu", "driver", "torch", "triton"))]
    caption += f" Not the same machine: {', '.join(unlike)}." if unlike else ""
    columns = ["what", "is", "us before", "us after", "times as long"]
    return Table.of(rows, columns, align="llrrr", caption=caption), worse


# ---- as a program ----------------------------------------------------------------------------------------------------
def parser(bench: Bench) -> argparse.ArgumentParser:
    found = records.parser(sys.modules[bench.module].__doc__, bench.name)
    parts = list(dict.fromkeys(job["part"] for job in bench.jobs()))
    if len(parts) > 1:
        found.add_argument("--only", nargs="+", choices=parts, help="what to measure; everything by default")
    found.add_argument(
        "--minutes", type=float, default=bench.minutes, help="stop after about so many; run it again to go on"
    )
    found.add_argument("--anew", action="store_true", help="measure again what the record already has")
    found.add_argument("--retry", action="store_true", help="measure again where all failed, or the process ended")
    found.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="measure nothing: what is slower or faster in record B than in A; exit status 1 if something is slower",
    )  # fmt: skip
    found.add_argument(
        "--merge", type=Path, metavar="FILE",
        help="measure nothing: the rows of that record take the place of this GPU's record's, or of --out's",
    )  # fmt: skip
    for name, how in bench.options.items():
        found.add_argument(f"--{name}", **how)
    return found


def known_rows(bench: Bench, path: Path, todo: Sequence[Row], given: argparse.Namespace) -> Data | None:
    """The record to go on with: of the same GPU and versions, without what is to be measured again."""
    if not path.exists():
        return None
    data = read(bench, path)
    if unlike := _unlike(data["machine"], records.machine()):
        print(f"{path} is of another {', '.join(unlike)}: everything is measured anew", file=sys.stderr)
        return None

    def again(row: Row) -> bool:
        return (given.anew and any(is_of(row, job) for job in todo)) or (given.retry and row.get("name") == "all")

    return data | {"rows": [row for row in data["rows"] if not again(row)]}
