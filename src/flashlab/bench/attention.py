"""Attention alone, as a layer in training sees it: forward, backward, and the memory that is held between the two.

published/attention_memory.csv again, and further: batch 8, one head, no mask, d_model 16 ... 128 and N 256 ... 32768,
in float32 as published and in bf16: "eager" (softmax(q k^T * scale) v, PyTorch's operations one by one), "compiled
eager" (the same through torch.compile; `replaced`: it put a fused kernel in) and "ours" (backend="triton").

A row of the pass "forward" has, beside its time, the bytes that are held for the backward pass, twice: `held_bytes` as
the allocator counts them, inputs and output included, and `saved_bytes` as autograd names them. Each way is first tried
alone on an empty GPU: "out of memory" is then its own, not its neighbours'. The ways take turns while the scores are
small, and are timed one after the other where they are not.
"""

from collections.abc import Sequence

import torch

from flashlab.attention.door import flash_attention
from flashlab.bench import harness, peers, timing
from flashlab.bench.harness import Data, Row, Way, jobs_of
from flashlab.bench.rows import by, grid
from flashlab.models.memory import kept_bytes
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
    return jobs_of("attention", dtype=DTYPES, seq_len=LENGTHS, d_model=D_MODELS)


def quick_jobs() -> list[Row]:
    """Small sizes; smaller where Triton is interpreted."""
    lengths, d_models = ((256, 1024), (16, 64)) if harness.on_gpu() else ((64, 128), (16,))
    return jobs_of("attention", dtype=["float32"], seq_len=lengths, d_model=d_models)


def inputs(job: Row) -> list[torch.Tensor]:
    """q, k, v, which want a gradient, and the gradient of o: [batch, 1, seq_len, d_model]."""
    shape = (BATCH, 1, job["seq_len"], job["d_model"])
    return harness.draw(*[shape] * 4, dtype=DTYPES[job["dtype"]], seed=job["seq_len"] + job["d_model"], grad=3)


def way_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Way:
    """The forward pass of one of NAMES."""
    if name == "ours":
        return lambda: flash_attention(q, k, v, backend="triton")
    return (peers.unfused if name == "eager" else peers.compiled_unfused)(q, k, v)


def alone(name: str, job: Row) -> Row:
    """Both passes of one way once, with nothing else in memory: what it holds between them. Raises what it raises."""
    harness.emptied()
    q, k, v, grad_o = inputs(job)
    way = way_of(name, q, k, v)
    already = peers.replaced()
    torch.autograd.grad(way(), (q, k, v), grad_o)  # compiles, tunes
    about: Row = {"saved_bytes": kept_bytes(way)}
    if name == "compiled eager":
        about["replaced"] = peers.replaced() > already
    if harness.on_gpu():
        harness.emptied()
        before = torch.cuda.memory_allocated()  # a library's workspace is there by now
        o = way()
        torch.cuda.synchronize()
        about["held_bytes"] = torch.cuda.memory_allocated() - before + sum(x.nbytes for x in (q, k, v, grad_o))
        torch.autograd.grad(o, (q, k, v), grad_o)
        torch.cuda.synchronize()
    return about


def timed(names: Sequence[str], job: Row, which: str, graphs: bool) -> tuple[dict[str, Row], dict[str, str]]:
    """Rows of milliseconds of a pass by name, the ways in turns, and why others have none.

    Where several sets of tensors would still be in L2 together with one, they are gone through in turn.
    """

    def way(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_o: torch.Tensor) -> Way:
        forward = way_of(name, q, k, v)
        return harness.backward_of(forward, (q, k, v), grad_o) if which == "backward" else forward

    sets = harness.sets_of(inputs(job))
    return harness.times_of({name: [way(name, *one) for one in sets] for name in names}, graphs=graphs)


def measure(job: Row) -> list[Row]:
    about, reasons = timing.made(NAMES, lambda name: alone(name, job))
    harness.emptied()
    scores = BATCH * job["seq_len"] ** 2 * DTYPES[job["dtype"]].itemsize
    groups = [[name] for name in about] if scores >= APART else [list(about)]
    rows: list[Row] = []
    for which in PASSES:
        about_pass = job | {"pass": which}
        for group in groups:
            found, more = timed(group, job, which, graphs=scores < APART)
            harness.emptied()
            kept = {name: t | (about[name] if which == "forward" else {}) for name, t in found.items()}
            rows += harness.rows_of(about_pass, kept, more)
        rows += harness.rows_of(about_pass, {}, reasons)
    return rows


def table(data: Data) -> Table:
    """Milliseconds of both passes, and MiB held between them, of each way; a reason's first words where it has none."""
    lines = []
    for r in data["rows"]:
        name, which = (r["name"], r["pass"]) if "pass" in r else ("eager", "forward")  # all of a job failed
        lines.append(r | {"name": f"{name}, {which}", "said": f"{r['ms']:.3f}" if "ms" in r else harness.short(r)})
        if which == "forward" and "ms" in r:
            mib = r.get("held_bytes", r["saved_bytes"]) / 2**20
            lines.append(r | {"name": f"{name}, MiB", "said": f"{mib:.1f}"})
    at = dict(sorted(by(lines, "dtype", "d_model", "seq_len").items()))
    held = "held by the allocator" if any("held_bytes" in r for r in data["rows"]) else "saved for the backward pass"
    names = [f"{name}, {kind}" for name in NAMES for kind in (*PASSES, "MiB")]
    return grid(at, ("dtype", "D", "N"), lambda r: r["said"], names, f"ms forward and backward; MiB {held}")


BENCH = harness.Bench(
    __name__, "attention alone is", ("d_model", "seq_len", "dtype", "pass", "name"), minutes=8.0,
    facts={"batch": BATCH, "heads": 1},
)  # fmt: skip
main, recorded = BENCH.main, BENCH.recorded
