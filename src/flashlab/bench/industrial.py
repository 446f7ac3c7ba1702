"""Phases 4 and 5: forward, backward and both against FlashAttention-2, cuDNN, FlexAttention and eager PyTorch.

tune        every tile of the search space of each Triton kernel; the best go to attention/tiles.json, which it reads
one head    the same for one head, bf16 and float32; with 2048 rows large tiles would leave most multiprocessors idle
shapes      16384 queries and 2048 columns in all heads together, bf16: N 512 ... 16384, D 64, 128, 256, causal and
            not; forward, backward, both, and for both the memory that they need at their worst moment
flex        FlexAttention in each form of peers.FLEX, beside cuDNN; first the shapes that "shapes" has not of it
streams     the Triton backward with dq's kernel behind dkdv's, and beside it on a stream of its own; causal
options     the Triton forward with one thing more or less: masks, split, descriptors, soft-cap, at N = 4096
gluon       the three Gluon kernels and some of their tiles, forward at N = 4096
published   the rows of published/triton_vs_torch.csv again: causal, one head; ours and eager

TFLOP/s count 4 N^2 D for each head forward, half if causal, and 2.5 times that backward.
"""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import gluon_forward, tiles, triton_backward, triton_forward
from flashlab.attention.door import flash_attention
from flashlab.attention.gluon_forward import GluonTile, flash_attention_gluon
from flashlab.bench import harness, peers, published, records, timing, truth
from flashlab.bench.harness import Data, Row, Way, backward_of, draw, jobs_of, times_of
from flashlab.bench.rows import Lines, by, grid, lines, of, where
from flashlab.table import Table

KERNELS = ("forward", "dkdv", "dq")
TUNED = ("tune", "one head")
PASSES = ("forward", "backward", "both")
WORK_OF = {"forward": 1.0, "backward": 2.5, "both": 3.5}
OURS, BOXES, GLUON = "triton", "triton, descriptors", "gluon"
PEERS = ("FlashAttention-2", "cuDNN", "FlexAttention", "eager")
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, descriptors": {"tma": True},
    "whole, soft-cap": {"softcap": 30.0},
    "causal": {"causal": True},
    "causal, every tile masked": {"causal": True, "split": False},
    "causal, descriptors": {"causal": True, "tma": True},
    "window of 1024": {"window": (1023, 0)},
    "window of 128": {"window": (127, 0)},
}
"""Of `flash_attention_forward`: what each costs or gains."""
STREAMS = ("one stream", "two streams")
OTHER_GLUON_TILES = {
    64: (GluonTile(2, 128, 2), GluonTile(2, 128, 3, turns=True), GluonTile(3, 128, 2), GluonTile(3, 64, 4)),
    128: (GluonTile(2, 128, 2), GluonTile(2, 64, 4, turns=True)),
    256: (GluonTile(2, 64, 2, turns=True),),
}
FEW = 2048  # rows of one head: with large tiles fewer programs than multiprocessors
EAGER_MOST = 4096  # longer, its scores do not fit, or take the time of all the others
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


# ---- what is measured ------------------------------------------------------------------------------------------------
def jobs() -> list[Row]:
    """Every measurement, as what its rows will say of themselves; the most telling lengths first: a run may end before
    the last."""
    masks, lengths = (False, True), (4096, 1024, 16384, 2048, 8192, 512)
    shapes = [[16384 // n, 2048 // d, n, d] for n in lengths for d in (128, 64, 256)]
    # "shapes" has FlexAttention at N = 512, 8192, 1024 and 4096 (not D = 256), 2048 (D = 256), 16384 (D = 128)
    without = [s for s in shapes if (s[2] in (1024, 4096) and s[3] == 256) or (s[2] == 16384 and s[3] != 128)
               or (s[2] == 2048 and s[3] != 256)]  # fmt: skip
    flex = {"shape": sorted(shapes, key=lambda s: s not in without), "causal": masks}
    one_head = [
        {"part": "one head", "kernel": kernel, "head_dim": d, "shape": [1, 1, n, d], "causal": causal, "dtype": dtype}
        for dtype, n in (("bf16", FEW), ("f32", FEW), ("f32", 16384))
        for d in ((16, 32, 64, 128) if dtype == "f32" else (16, 32, 64))
        for kernel in KERNELS for causal in masks
    ]  # fmt: skip
    small = [[1, 1, 1024, 64], [1, 1, 4096, 64], [1, 16, 1024, 128], [4, 16, 4096, 128]]
    large = [[4, 2048 // d, 4096, d] for d in (128, 64, 256)]
    published_jobs = [
        {"part": "published", "shape": [1, 1, r["seq_len"], r["d_model"]], "causal": True, "dtype": r["precision"],
         "pass": name}
        for r in published.load("triton_vs_torch") for name in PASSES
    ]  # fmt: skip
    return [
        *jobs_of("tune", kernel=KERNELS, head_dim=(128, 64, 256), causal=masks),
        *one_head,
        *jobs_of("shapes", shape=shapes, causal=masks, **{"pass": PASSES}),
        *(job | {"pass": name} for name in PASSES[:2] for job in jobs_of("flex", **flex)),
        *jobs_of("options", shape=large[:2], **{"pass": ["forward"]}),
        *jobs_of("streams", shape=small, causal=[True], **{"pass": ["backward"]}),
        *jobs_of("gluon", shape=large, causal=masks, **{"pass": ["forward"]}),
        *published_jobs,
    ]


def quick_jobs() -> list[Row]:
    """A few small measurements, of every part that this machine can run."""
    n = 64 if runtime.INTERPRETED else 1024
    found = jobs_of("shapes", shape=[[1, 2, n, 64]], causal=(False, True), **{"pass": PASSES})
    found += jobs_of("published", shape=[[1, 1, 128, 16]], causal=[True], dtype=["f32"], **{"pass": PASSES})
    if not runtime.INTERPRETED:
        found += jobs_of("gluon", shape=[[1, 16, n, 128]], causal=[True], **{"pass": ["forward"]})
    return found


def make(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> list[torch.Tensor]:
    """q, k, v and the gradient of o, drawn anew, and the same each time."""
    return draw(*[shape] * 4, dtype=dtype, grad=3 * grad)


def forward_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Way:
    """The forward pass of an implementation, with a gradient where q wants one. Raises RuntimeError: it is left out."""
    if name == OURS and q.requires_grad:
        return lambda: flash_attention(q, k, v, causal=causal, backend="triton")
    if name in (OURS, BOXES):
        return lambda: triton_forward.flash_attention_forward(q, k, v, causal=causal, tma=name == BOXES)[0]
    if name == GLUON:
        return lambda: flash_attention_gluon(q, k, v, causal=causal)[0]
    if name == "eager" and q.shape[2] > EAGER_MOST and q.shape[0] * q.shape[1] > 1:
        raise RuntimeError(f"not measured beyond N = {EAGER_MOST}")
    return peers.attention(name, q, k, v, causal)


def passes(name: str, forward: dict[str, Way], inputs: Sequence[torch.Tensor], grad_o: torch.Tensor) -> dict[str, Way]:
    """The functions to time for a pass, from those that compute o with a gradient."""
    if name == "forward":
        return forward
    if name == "backward":
        return {key: backward_of(way, inputs, grad_o) for key, way in forward.items()}
    both = lambda way: torch.autograd.grad(way(), inputs, grad_o)  # noqa: E731
    return {key: functools.partial(both, way) for key, way in forward.items()}


# ---- is Gluon fit to be measured? ------------------------------------------------------------------------------------
def try_out(step: str) -> None:
    """Launches a Gluon kernel at a few shapes. Raises AssertionError where a result is wrong."""
    forward = functools.partial(flash_attention_gluon, step=step)
    for d, n, causal in ((64, 300, False), (128, 1000, True), (128, 4096, False), (256, 520, True)):
        found = truth.compared(forward, [(2, 16, 16, n, n)], d, torch.bfloat16, causal)
        assert truth.right(found), f"at D = {d}, N = {n}, {'causal' if causal else 'whole'} it is wrong: {found}"


@functools.cache
def trial(step: str) -> str | None:
    """Why a Gluon kernel is not to be launched here, or None: it is tried in a process of its own."""
    return gluon_forward.why_not(runtime.device()) or harness.trial(*harness.calling(try_out, step), seconds=120.0)


# ---- measuring -------------------------------------------------------------------------------------------------------
def rows_of(job: Row, found: dict[str, Row], reasons: dict[str, str]) -> list[Row]:
    return harness.rows_of(job, found, reasons, harness.work_of(job) * WORK_OF[job["pass"]])


def measure(job: Row) -> list[Row]:
    """The rows of one job. Its inputs are its own, and gone afterwards."""
    own = {"gluon": measure_gluon, "streams": measure_streams} | dict.fromkeys(TUNED, tune)
    if job["part"] in own:
        return own[job["part"]](job)
    if job["part"] == "options":  # without TFLOP/s, since they compute different numbers of scores
        return harness.rows_of(job, *times_of(option_ways(*make(job["shape"])[:3])))
    dtype = DTYPES[job.get("dtype", "bf16")]
    with_grad = job["pass"] != "forward"
    q, k, v, grad_o = make(job["shape"], dtype, with_grad)
    names: list[str] = [OURS, "eager"]
    if job["part"] == "shapes" and torch.cuda.is_available() and not runtime.INTERPRETED:
        hopper = [BOXES] + ([GLUON] if trial("specialised") is None else [])
        hopper = hopper if torch.cuda.get_device_capability(q.device) >= (9, 0) else []
        names = [OURS, *([] if with_grad else hopper), *PEERS]
    if job["part"] == "flex":
        names = ["cuDNN", *peers.FLEX]
    forward, left_out = timing.made(names, lambda name: forward_of(name, q, k, v, job["causal"]))
    ways = passes(job["pass"], forward, (q, k, v), grad_o)
    found, reasons = times_of(ways)
    if job["part"] == "flex" and not with_grad and "cuDNN" in found:
        want = ways["cuDNN"]().float()
        for name in found:
            found[name]["difference_to_cudnn"] = (ways[name]().float() - want).abs().max().item()
    if job["pass"] == "both" and q.is_cuda:
        for name in found:
            found[name]["peak_bytes"] = timing.allocated(ways[name])
    return rows_of(job, found, reasons | left_out)


def option_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Way]:
    forward = triton_forward.flash_attention_forward
    return {name: functools.partial(forward, q, k, v, **options) for name, options in OPTIONS.items()}


def measure_streams(job: Row) -> list[Row]:
    """Two rows: STREAMS, of the backward pass without autograd."""
    q, k, v, grad_o = make(job["shape"])
    o, lse = triton_forward.flash_attention_forward(q, k, v, causal=True)
    backward = functools.partial(triton_backward.flash_attention_backward, grad_o, q, k, v, o, lse, causal=True)
    ways = {name: functools.partial(backward, concurrent=name == STREAMS[1]) for name in STREAMS}
    return rows_of(job, *times_of(ways))


def gluon_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Way]:
    """The steps, and the last with other grids and tiles."""
    options: dict[str, dict[str, Any]] = {step: {"step": step} for step in gluon_forward.KERNELS}
    options["specialised, persistent"] = {"persistent": True}
    options["specialised, a program a block"] = {"persistent": False}
    for tile in OTHER_GLUON_TILES[q.shape[3]]:
        name = f"{tile.warpgroups} warpgroups, {tile.BLOCK_N} keys, {tile.STAGES} stages{', in turn' * tile.turns}"
        options[f"specialised, {name}"] = {"tile": tile}
    return {n: functools.partial(flash_attention_gluon, q, k, v, causal=causal, **o) for n, o in options.items()}


def measure_gluon(job: Row) -> list[Row]:
    """Beside cuDNN, and with their largest difference to it."""
    q, k, v, _ = make(job["shape"])
    causal = job["causal"]
    ways = {n: way for n, way in gluon_ways(q, k, v, causal).items() if trial(n.partition(",")[0]) is None}
    ways |= {"cuDNN": peers.attention("cuDNN", q, k, v, causal)}
    found, reasons = times_of(ways)
    reasons |= {step: str(trial(step)) for step in gluon_forward.KERNELS if trial(step) is not None}
    if "cuDNN" in found:
        want = ways["cuDNN"]().float()
        for name in found.keys() - {"cuDNN"}:
            found[name]["difference_to_cudnn"] = (ways[name]()[0].float() - want).abs().max().item()
    return rows_of(job, found, reasons)


# ---- tuning ----------------------------------------------------------------------------------------------------------
def launcher(job: Row, length: int | None = None) -> Callable[[tiles.Tile], Way]:
    """What a launch of one kernel with a tile is, on new inputs; the backward kernels come in pairs.

    length: fewer rows than the job's, where it is only compiled."""
    kernel, d, causal = job["kernel"], job["head_dim"], job["causal"]
    shape = job.get("shape") or [4, 2048 // d, 4096, d]
    q, k, v, grad_o = make(shape if length is None else [1, shape[1], length, d], DTYPES[job.get("dtype", "bf16")])
    if kernel == "forward":
        return lambda tile: lambda: triton_forward.flash_attention_forward(q, k, v, causal=causal, tile=tile)
    o, lse = triton_forward.flash_attention_forward(q, k, v, causal=causal)
    recorded_tiles: dict[str, Any] = {"dkdv": None, "dq": None}

    def way(tile: tiles.Tile) -> Way:
        both = triton_backward.Tiles(**recorded_tiles | {kernel: tile})
        options: dict[str, Any] = {"causal": causal, "tiles": both, "concurrent": False}  # one would hide the other
        return lambda: triton_backward.flash_attention_backward(grad_o, q, k, v, o, lse, **options)

    return way


def tiles_of(job: Row) -> tuple[tiles.Tile, ...]:
    return tiles.search(job["kernel"], job["head_dim"], job["part"] == "one head")


def tune(job: Row) -> list[Row]:
    """A row for each tile of the search space; the fastest is taken from then on, by what is measured later too. Those
    of the backward hold delta and the other kernel, for all alike."""
    way = launcher(job)
    found, reasons = times_of({json.dumps(list(tile)): way(tile) for tile in tiles_of(job)}, rounds=5)
    rows = [row | {"tile": json.loads(row.pop("name"))} for row in harness.rows_of(job, found, reasons)]
    write_choices(rows, runtime.limits().target)
    return rows


def choices(rows: Sequence[Row], chip: str) -> dict[tuple[str, int], list[int]]:
    """By the name under which tiles are kept, and head_dim: the fastest tile."""
    found: dict[tuple[str, int], list[tuple[float, list[int]]]] = {}
    for r in rows:
        if r["part"] in TUNED and "ms" in r:
            few = r["part"] == "one head" and r["shape"][2] == FEW
            name = tiles.name_of(r["kernel"], chip, r.get("dtype") == "f32", r["causal"], few)
            found.setdefault((name, r["head_dim"]), []).append((r["ms"], r["tile"]))
    return {key: min(times)[1] for key, times in found.items()}


def write_choices(rows: Sequence[Row], target: str) -> None:
    """Put the fastest tiles where flashlab.attention.tiles reads them, for this class of chips."""
    path = tiles.MEASURED
    kept: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    chip = tiles.chip_class((int(target[3:]) // 10, int(target[3:]) % 10))
    for (name, head_dim), tile in choices(rows, chip).items():
        kept[name] = sorted([[head_dim, tile], *(old for old in kept.get(name, []) if old[0] != head_dim)])
    records.write_json(path, dict(sorted(kept.items())))
    tiles._measured.cache_clear()
    tiles.recorded.cache_clear()


# ---- compiling beforehand, on all cores ------------------------------------------------------------------------------
def compile_one(job: Row, tile: Sequence[int] | None = None) -> None:
    """In a process of its own: compile what a job will launch, into the caches on disk. Same arguments, fewer rows."""
    if job["part"] in TUNED:
        timing.able({"": launcher(job, 512)(tiles.Tile(*tile or ()))})
        return
    if job["part"] in ("options", "gluon"):
        q, k, v, _ = make([1, *job["shape"][1:]])
        timing.able(option_ways(q, k, v) if job["part"] == "options" else gluon_ways(q, k, v, job["causal"]))
        return
    q, k, v, grad_o = make(job["shape"], DTYPES[job.get("dtype", "bf16")], grad=job["pass"] != "forward")
    names = [OURS, *(["FlexAttention"] if job["part"] == "shapes" else [])]
    if job["part"] == "flex":  # max-autotune measures while it compiles: not beside others
        names = ["FlexAttention", "FlexAttention, FLASH"]
    forward = {name: forward_of(name, q, k, v, job["causal"]) for name in names}
    timing.able(passes(job["pass"], forward, (q, k, v), grad_o))


def prepare(todo: Sequence[Row], until: float) -> None:
    """Compile for all the jobs at once, as far as the time goes."""
    tasks: dict[str, tuple[Any, ...]] = {}
    for job in todo:
        if job["part"] in TUNED:
            for tile in tiles_of(job):
                tasks[f"{harness.describe(job)} {tile}"] = (job, list(tile))
        elif job.get("pass") != "backward" or job["part"] == "flex":  # elsewhere "both" compiles it
            # A Triton kernel is the same for all lengths; FlexAttention is compiled for each.
            every = job["part"] in ("shapes", "flex")
            tasks[harness.describe(job if every else job | {"shape": job["shape"][3]})] = (job,)
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    start = time.monotonic()
    done = harness.compiled_by(workers, compile_one, tasks.values(), until)
    print(f"compiled {done} of {len(tasks)} beforehand in {time.monotonic() - start:.0f} s", flush=True)


def having(runs: Sequence[Data], part: str) -> list[Data]:
    """The recorded runs in which something of a part was measured."""
    return [run for run in runs if timed(run, part=part)]


def timed(data: Data, **wanted: Any) -> list[Row]:
    """The rows, in the schema of flashlab.bench.rows, that have a time."""
    return [r for r in where(of(data), **wanted) if "ms" in r]


def gluon_speeds(data: Data) -> dict[tuple[int, bool], dict[str, float]]:
    """By (head_dim, causal), rising: TFLOP/s of each row of the part "gluon", the steps, other tiles and cuDNN."""
    at = sorted(by(timed(data, part="gluon"), "D", "causal").items())
    return {(d, causal): {name: r["tflops"] for name, r in rows.items()} for (d, causal), rows in at}


def option_times(data: Data) -> dict[int, dict[str, float]]:
    """By head_dim, rising: milliseconds of each of OPTIONS, where it ran."""
    at = sorted(by(timed(data, part="options"), "D").items())
    return {d: {name: r["ms"] for name, r in rows.items()} for (d,), rows in at}


def flex_table(data: Data) -> Table:
    """TFLOP/s of the part "flex"; a dash where one has no time, and the reasons in the caption."""
    names = ["cuDNN", *peers.FLEX]
    rows = where(of(data), part="flex", name=set(names), **{"pass": "forward"})
    why: dict[str, str] = {}
    for r in rows:
        if "ms" not in r:
            why.setdefault(r["name"], r["unavailable"])
    caption = f"{data['machine']['gpu']}, forward: TFLOP/s" + "".join(f"; {n}: {x}" for n, x in why.items())
    at = dict(sorted(by(rows, "D", "causal", "N").items()))
    said = lambda r: f"{r['tflops']:.0f}" if "ms" in r else "–"  # noqa: E731
    return grid(at, ("D", "mask", "N"), said, names, caption if rows else "not measured")


def stream_table(data: Data) -> Table:
    """Microseconds of the backward pass, causal, bf16, with one stream and with two."""
    at = by([r | {"heads": math.prod(r["shape"][:2])} for r in timed(data, part="streams")], "heads", "N", "D")
    both = {key: [rows[name]["ms"] for name in STREAMS] for key, rows in at.items() if rows.keys() >= set(STREAMS)}
    rows = [[*key, *(f"{1e3 * x:.1f}" for x in ms), f"{ms[0] / ms[1]:.2f}"] for key, ms in both.items()]
    columns = ["heads in all", "N", "D", *(f"{name}, us" for name in STREAMS), "times as fast"]
    caption = f"{data['machine']['gpu']}, backward, causal, bf16" if rows else "not measured"
    return Table.of(rows, columns, align="rrrrrr", caption=caption)


def ratio_table(data: Data, name: str, others: Sequence[str]) -> Table:
    """How many times as fast as each of the others it is, forward, by head_dim, mask and length."""
    rows: list[Row] = [
        {"D": d, "mask": causal, "beside": other, "name": str(n), "N": n, "ratio": ratio}
        for other in others
        for (d, n, causal), ratio in ratios(data, name, other, "forward").items()
    ]
    at = by(sorted(rows, key=lambda r: (r["D"], r["mask"])), "D", "mask", "beside")
    lengths = map(str, sorted({r["N"] for r in rows}))
    caption = (
        f"{data['machine']['gpu']}, forward: how many times as fast {name} is, at these N" if rows else "not measured"
    )
    return grid(at, ("D", "mask", "beside"), lambda r: f"{r['ratio']:.2f}", lengths, caption)


def published_table(data: Data, which: str, head_dim: int, dtype: str) -> Table:
    """Milliseconds of triton_vs_torch.csv beside those of the same rows in this record, by length."""
    lines = beside_published(data, which, head_dim, dtype)
    found = {name: dict(zip(*line, strict=True)) for name, line in lines.items()}
    pairs = (("eager, beside it", "published"), ("eager, beside ours", "ours"))
    rows = []
    for n in sorted(found.get("ours", {})):
        row: list[Any] = [n]
        for slow, fast in pairs:
            a, b = (found.get(name, {}).get(n) for name in (slow, fast))
            row += [f"{x:.3f}" if x else "" for x in (a, b)] + [f"{a / b:.1f}" if a and b else ""]
        rows.append(row)
    columns = ["N", "there: eager", "Triton", "times as fast", "here: eager", "Triton", "times as fast"]
    where = f"ms, {which}, D = {head_dim}, {dtype}. There: a machine without a name. Here: {data['machine']['gpu']}."
    return Table.of(rows, columns, align="r" * 7, caption=where if rows else "not measured")


def eager_table(data: Data, least: int = 1) -> Table:
    """The part "published" at lengths from `least` on: how many times as fast as eager attention the kernels are."""
    at = by(timed(data, part="published"), "dtype", "D", "pass", "N")
    rows = [
        r[OURS] | {"name": f"N = {r[OURS]['N']}", "ratio": r["eager"]["ms"] / r[OURS]["ms"]}
        for (*_, n), r in at.items()
        if n >= least and {"eager", OURS} <= r.keys()
    ]
    rows.sort(key=lambda r: (r["dtype"], r["D"], PASSES.index(r["pass"])))
    names = [f"N = {n}" for n in sorted({r["N"] for r in rows})]
    caption = f"{data['machine']['gpu']}, one head, causal: how many times as fast as eager attention"
    keys = ("dtype", "D", "pass")
    return grid(by(rows, *keys), keys, lambda r: f"{r['ratio']:.2f}", names, caption if rows else "not measured")


def ratios(data: Data, name: str, peer: str, which: str) -> dict[tuple[int, int, bool], float]:
    """By (head_dim, seq_len, causal): how many times as fast as the peer it is in a pass of the part "shapes"."""
    at = by(timed(data, part="shapes", **{"pass": which}), "D", "N", "causal")
    return {key: r[peer]["ms"] / r[name]["ms"] for key, r in at.items() if {name, peer} <= r.keys()}


# ---- reading: the backward pass --------------------------------------------------------------------------------------
def over_lengths(
    data: Data, which: str, head_dim: int, causal: bool, names: Sequence[str] = (OURS, *PEERS), column: str = "tflops",
    unit: float = 1.0,
) -> Lines:  # fmt: skip
    """TFLOP/s (or another column in a unit) in a pass of the part "shapes"; who has no row there has no line."""
    return lines(timed(data, part="shapes", D=head_dim, causal=causal, **{"pass": which}), names, column, unit)


def peak_over_lengths(data: Data, head_dim: int, causal: bool) -> Lines:
    """MiB that forward and backward together had allocated at their worst moment, beside their inputs."""
    return over_lengths(data, "both", head_dim, causal, column="peak_bytes", unit=2**-20)


def ratios_over_lengths(data: Data, peer: str, which: str) -> Lines:
    """How many times as fast as the peer ours is in a pass; the names are "D = 64, whole", "D = 64, causal", ...."""
    found: Lines = {}
    for (d, n, causal), ratio in sorted(ratios(data, OURS, peer, which).items()):
        lengths, values = found.setdefault(f"D = {d}, {'causal' if causal else 'whole'}", ([], []))
        lengths.append(n)
        values.append(ratio)
    return found


def backward_of_forward(data: Data, name: str) -> dict[tuple[int, int, bool], float]:
    """By (head_dim, seq_len, causal), from seq_len 1024 on: how many times as long as its forward pass an
    implementation's backward pass takes."""
    took = {(r["D"], r["N"], r["causal"], r["pass"]): r["ms"] for r in timed(data, part="shapes", name=name)}
    forward = {key[:3]: ms for key, ms in took.items() if key[3] == "forward" and key[1] >= 1024}
    both = [key for key in sorted(forward) if key + ("backward",) in took]
    return {key: took[key + ("backward",)] / forward[key] for key in both}


def tile_times(data: Data, kernel: str) -> dict[tuple[int, bool], list[tuple[tiles.Tile, float]]]:
    """By (head_dim, causal): each tile that ran in the part "tune" and its ms, the fastest first.

    A time of "dkdv" or "dq" is that of the whole backward pass, in which the other kernel keeps its tile.
    """
    found: dict[tuple[int, bool], list[tuple[tiles.Tile, float]]] = {}
    for r in data["rows"]:
        if r["part"] == "tune" and r["kernel"] == kernel and "ms" in r:
            found.setdefault((r["head_dim"], r["causal"]), []).append((tiles.Tile(*r["tile"]), r["ms"]))
    return {key: sorted(found[key], key=lambda pair: pair[1]) for key in sorted(found)}


def beside_published(data: Data, which: str, head_dim: int, dtype: str) -> Lines:
    """Milliseconds in a pass of published/triton_vs_torch.csv and in the same rows of this record: kernels and eager.

    What ran out of memory, there or here, has no point.
    """
    column = {"forward": "fwd", "backward": "bwd", "both": "fwd_bwd"}[which]
    names = {OURS: "ours", "eager": "eager, beside ours", "triton_": "published", "torch_": "eager, beside it"}
    points: dict[str, list[tuple[int, Any]]] = {name: [] for name in names.values()}
    for r in timed(data, part="published", D=head_dim, dtype=dtype, **{"pass": which}):
        points[names[r["name"]]].append((r["N"], r["ms"]))
    for p in published.load("triton_vs_torch"):
        for name in ("triton_", "torch_") if (p["d_model"], p["precision"]) == (head_dim, dtype) else ():
            points[names[name]].append((int(str(p["seq_len"])), p[f"{name}{column}_ms"]))
    kept = {name: sorted((n, y) for n, y in found if isinstance(y, int | float)) for name, found in points.items()}
    return {name: ([n for n, _ in found], [y for _, y in found]) for name, found in kept.items() if found}


def span(values: Iterable[float]) -> str:
    """ "0.93 to 1.21": the smallest and the largest; "" for none."""
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}" if found else ""


BENCH = harness.Bench(
    __name__, "phases 4 and 5 are", ("kernel", "head_dim", "shape", "causal", "pass", "dtype", "name", "tile"),
    minutes=8.0, facts={"dtype": "bfloat16"},
)  # fmt: skip
main, recorded = BENCH.main, BENCH.recorded
