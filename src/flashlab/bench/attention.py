"""Attention alone, as a layer in training sees it: forward, backward, and the memory that is held between the two.

    flashlab bench attention             # recorded/attention_<gpu>.json; --minutes 8: how long at most
    flashlab bench attention --quick     # small sizes, on a CPU too, where Triton is interpreted

published/attention_memory.csv again, and further: batch 8, one head, no mask, d_model 16 ... 128 and N 256 ... 32768,
in float32 as published and in bf16.

eager            softmax(q k^T * scale) v, PyTorch's operations one by one
compiled eager   the same through torch.compile. Its compiler may recognise attention and call a fused kernel instead;
                 a row's `replaced` says whether it did
ours             flash_attention(q, k, v, backend="triton")

A row of the pass "forward" has, beside its time, the bytes that are held for the backward pass, twice: `held_bytes` as
the allocator counts them, inputs and output included, and `saved_bytes` as autograd names them. Each way is first tried
alone on an empty GPU: "out of memory" is then its own, not its neighbours'. The ways take turns while the scores are
small, and are timed one after the other where they are not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention.door import flash_attention
from flashlab.bench import harness, peers, records, timing
from flashlab.bench.harness import Row, Way
from flashlab.table import Table

NAMES = ("eager", "compiled eager", "ours")
PASSES = ("forward", "backward")
D_MODELS = (16, 32, 64, 128)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCH = 8  # by the published figures of memory
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
APART = 2**28
"""Bytes of scores from which the ways are timed one after the other, in plain launches: a graph would hold them all."""


def jobs() -> list[Row]:
    """The published dtype first, and short before long."""
    return [_job(d, n, dtype) for dtype in DTYPES for n in LENGTHS for d in D_MODELS]


def quick_jobs() -> list[Row]:
    """Small sizes; smaller where Triton is interpreted."""
    lengths, d_models = ((256, 1024), (16, 64)) if harness.on_gpu() else ((64, 128), (16,))
    return [_job(d, n, "float32") for n in lengths for d in d_models]


def _job(d_model: int, seq_len: int, dtype: str) -> Row:
    return {"part": "attention", "d_model": d_model, "seq_len": seq_len, "dtype": dtype}


def inputs(job: Row) -> list[torch.Tensor]:
    """q, k, v, which want a gradient, and the gradient of o: [batch, 1, seq_len, d_model]."""
    generator = torch.Generator(runtime.device()).manual_seed(job["seq_len"] + job["d_model"])
    shape = (BATCH, 1, job["seq_len"], job["d_model"])
    drawn = [
        torch.randn(shape, device=runtime.device(), generator=generator).to(DTYPES[job["dtype"]]) for _ in range(4)
    ]
    for x in drawn[:3]:
        x.requires_grad_()
    return drawn


def way_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Way:
    """The forward pass of one of NAMES."""
    if name == "ours":
        return lambda: flash_attention(q, k, v, backend="triton")
    return (peers.unfused if name == "eager" else peers.compiled_unfused)(q, k, v)


def saved_bytes(way: Way) -> int:
    """Bytes of all that a forward pass saves for its backward pass: each storage once, the inputs too if saved."""
    found: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # alive, so that no address comes twice

    def note(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()  # with its graph, what is saved would keep alive the graph that saves it: neither is ever freed
        kept.append(x)
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        o = way()
    del o
    return sum(found.values())


def alone(name: str, job: Row) -> Row:
    """Both passes of one way once, with nothing else in memory: what it holds between them. Raises what it raises."""
    _empty()
    q, k, v, grad_o = inputs(job)
    way = way_of(name, q, k, v)
    already = peers.replaced()
    torch.autograd.grad(way(), (q, k, v), grad_o)  # compiles, tunes
    about: Row = {"saved_bytes": saved_bytes(way)}
    if name == "compiled eager":
        about["replaced"] = peers.replaced() > already
    if harness.on_gpu():
        _empty()
        before = torch.cuda.memory_allocated()  # a library's workspace is there by now
        o = way()
        torch.cuda.synchronize()
        about["held_bytes"] = torch.cuda.memory_allocated() - before + sum(x.nbytes for x in (q, k, v, grad_o))
        torch.autograd.grad(o, (q, k, v), grad_o)
        torch.cuda.synchronize()
    return about


def _empty() -> None:
    gc.collect()
    if harness.on_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def timed(names: Sequence[str], job: Row, which: str, graphs: bool) -> tuple[dict[str, Row], dict[str, str]]:
    """Rows of milliseconds of a pass by name, the ways in turns, and why others have none.

    Where several sets of tensors would still be in L2 together with one, they are gone through in turn.
    """
    q, k, v, grad_o = inputs(job)
    sets: list[tuple[torch.Tensor, ...]] = [(q, k, v, grad_o)]
    if harness.on_gpu():
        most = timing.input_sets(4 * q.numel() * q.element_size())
        sets += [tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in sets[0]) for _ in range(most - 1)]
    ways = {name: [_pass(way_of(name, *one[:3]), which, one[:3], one[3]) for one in sets] for name in names}
    return harness.times_of(ways, **({"graphs": graphs} if harness.on_gpu() else {}))


def _pass(way: Way, which: str, qkv: Sequence[torch.Tensor], grad_o: torch.Tensor) -> Callable[[], Any]:
    if which == "forward":
        return way
    kept: list[torch.Tensor] = []

    def backward() -> Any:
        if not kept:
            kept.append(way())
        return torch.autograd.grad(kept[0], tuple(qkv), grad_o, retain_graph=True)

    return backward


def measure(job: Row) -> list[Row]:
    """A row for each way and pass."""
    about: dict[str, Row] = {}
    reasons: dict[str, str] = {}
    for name in NAMES:
        try:
            about[name] = alone(name, job)
        except Exception as error:
            reasons[name] = timing.reason(error)
    _empty()
    scores = BATCH * job["seq_len"] ** 2 * DTYPES[job["dtype"]].itemsize
    groups = [[name] for name in about] if scores >= APART else [list(about)]
    rows: list[Row] = []
    for which in PASSES:
        for group in groups:
            found, more = timed(group, job, which, graphs=scores < APART)
            _empty()
            rows += [
                _row(job, which, name, t | (about[name] if which == "forward" else {})) for name, t in found.items()
            ]
            rows += [_row(job, which, name, {"unavailable": why}) for name, why in more.items()]
        rows += [_row(job, which, name, {"unavailable": why}) for name, why in reasons.items()]
    return rows


def _row(job: Row, which: str, name: str, more: Row) -> Row:
    return job | {"pass": which, "name": name} | more


def recorded() -> list[dict[str, Any]]:
    """Every recorded run there is, in the order of their file names; [] where none is."""
    return records.recorded("attention")


def table(data: dict[str, Any]) -> Table:
    """Milliseconds of both passes, and MiB held between them, of each way; a reason's first words where it has none."""
    cells: dict[tuple[str, int, int], dict[tuple[str, str], str]] = {}
    for r in data["rows"]:
        line = cells.setdefault((r["dtype"], r["d_model"], r["seq_len"]), {})
        if "pass" not in r:
            line["eager", "forward"] = _short(r["unavailable"])
            continue
        line[r["name"], r["pass"]] = f"{r['ms']:.3f}" if "ms" in r else _short(r["unavailable"])
        if r["pass"] == "forward" and "ms" in r:
            line[r["name"], "MiB"] = f"{r.get('held_bytes', r['saved_bytes']) / 2**20:.1f}"
    kinds = (*PASSES, "MiB")
    rows = [[*key, *(line.get((n, kind), "") for n in NAMES for kind in kinds)] for key, line in sorted(cells.items())]
    columns = ["dtype", "D", "N", *(f"{n}, {kind}" for n in NAMES for kind in kinds)]
    held = "held by the allocator" if any("held_bytes" in r for r in data["rows"]) else "saved for the backward pass"
    return Table.of(rows, columns, align="lrr" + "r" * 9, caption=f"ms forward and backward; MiB {held}")


def _short(reason: str) -> str:
    return reason.partition(":")[0][:20]


BENCH = harness.Bench(
    "attention", __doc__, jobs=jobs, measure=measure, table=table, keys=("d_model", "seq_len", "dtype", "pass", "name"),
    quick=quick_jobs, needs=harness.gpu_for("attention alone is", quick_too=False), facts={"batch": BATCH, "heads": 1},
    minutes=8.0,
)  # fmt: skip
main = BENCH.main
