"""What the kernels reach, from the records of one GPU: README.md's part, the page docs/results.md, and the figure.

    flashlab bench readme                   # writes README.md, between its marks, docs/results.md and docs/results.svg
    flashlab bench readme --check           # writes nothing; exit status 1 and a sentence where they are out of date
    flashlab bench readme --records FOLDER  # from other records than recorded/
    flashlab bench readme --json            # only what the figure shows; --out FILE writes it there

Every number is looked up here, and what has not been measured is a dash. So run it after a record has changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.bench import hopper_inputs, hopper_jobs, hopper_results, layer, lm, peers, records, scalar, timing
from flashlab.bench.harness import Data, Row
from flashlab.kernels.series import SERIES

ROOT = Path(__file__).parents[3]
GPU = "h200"
RECORDS = ("walls", "triton", "industrial", "scalar", "mma", "ablation", "validation", "layer", "lm", "hopper")
BEGIN, END = "<!-- results: written by `flashlab bench readme` -->", "<!-- end of the results -->"
COMMAND = "flashlab bench readme"

LENGTHS, HEAD_DIMS = (1024, 4096, 16384), (64, 128)
SHAPE = [4, 16, 4096, 128]  # of the ladder, wherever it was measured there
PASSES = {"forward": "Forward pass", "backward": "Backward pass"}
COLUMNS = {
    "triton": "Triton, ours",
    "gluon": "Gluon, ours",
    "CUDA": "CUDA, ours ¹",
    "FlashAttention-2": "FlashAttention-2",
    "cuDNN": "cuDNN",
    "FlexAttention": "FlexAttention",
    "eager": "eager PyTorch",
}
OURS = ("triton", "gluon")
CAPTION = """
*More is better. Left: the rungs of the course, each with the number of its phase, and the peers; blue and pink are the
course's kernels. Most are measured at batch 4, 16 heads, N = 4096. Phase 11 and FlashAttention-4 were measured in
another run than the other peers. Right: from short sequences to long ones.*"""
HOW = """
All numbers are TFLOP/s: the work of the formula, divided by the median time. The work of a head is 4 N² D forward, 2.5
times that backward, and half of it under a causal mask. Times are of the kernels alone, without their launches from
Python; all of a row ran in turns. The inputs are random normal numbers in bfloat16, unless a table says otherwise, with
as many rows at every N: batch 16384 / N, 2048 / D heads. FlashAttention-2 and cuDNN are those in PyTorch, forced;
FlexAttention is compiled{flex}. The fastest of a row is bold. A dash: not measured."""
FLEX = """, with its own tiles, with max-autotune and with its FLASH backend: the best of them, partly from a run of its
own"""
Key = tuple[str, int, int, bool, str]  # pass, head_dim, seq_len, causal, who
All = Mapping[str, Data]


def load(folder: Path | None = None) -> dict[str, Data]:
    """The records of the README's GPU by the name of their bench; {} for one that is not there."""
    paths = {name: (folder or records.RECORDED) / f"{name}_{GPU}.json" for name in RECORDS}
    return {name: json.loads(path.read_text("utf-8")) if path.exists() else {} for name, path in paths.items()}


# ---- what was measured -----------------------------------------------------------------------------------------------
def speeds(found: All) -> dict[Key, Row]:
    """Every row of the two tables, and those that they have no room for: the part "shapes", and the CUDA kernel."""
    rows: dict[Key, Row] = {}
    for row in found["industrial"].get("rows", []):
        if row["part"] == "shapes" and "name" in row:
            rows[row["pass"], row["shape"][3], row["shape"][2], row["causal"], row["name"]] = row
    for row in found["industrial"].get("rows", []):
        key = (row.get("pass"), *row.get("shape", ())[:1:-1], row.get("causal"), "FlexAttention")
        if row["part"] == "flex" and row["name"] in peers.FLEX and "tflops" in row:
            rows[key] = max(row, rows.get(key, row), key=lambda r: r.get("tflops", 0.0))
    for row in found["mma"].get("final", []):
        batch, heads, n, d = row["shape"]
        same_work = (batch * n, heads * d) == (16384, 2048)  # as in the part "shapes"
        if (row["table"], row["inputs"]) == ("big", "randn") and same_work and row["name"] == "p9_flash":
            rows["forward", d, n, row["causal"], "CUDA"] = row
    return rows


def ratios(rows: Mapping[Key, Row], which: str, name: str, peer: str) -> dict[Key, float]:
    """How many times as fast as a peer it is, at every shape at which both ran; by the peer's key."""
    pairs = {key: rows.get((*key[:4], name), {}) for key in rows if (key[0], key[4]) == (which, peer)}
    return {
        key: mine["tflops"] / rows[key]["tflops"]
        for key, mine in pairs.items()
        if "tflops" in mine and "tflops" in rows[key]
    }


class Rung(NamedTuple):
    """One bar of the ladder: its phase (0 for a peer), in words, whose colour it has, what was measured, and how.

    tflops is None where it does not run, or was not measured: then `how` says why.
    """

    phase: int
    words: str
    look: str
    tflops: float | None
    how: str


CUDA_RUNGS = {
    "p7_naive": "first tensor-core kernel",
    "p8_1_split_q": "tiles and four warps",
    "p8_4_swizzle": "copies in flight, no bank conflicts",
    "p8_6_store": "Q in registers, wide stores",
    "p9_4_warp_tiles": "32 rows per warp",
    "p9_flash": "the last CUDA kernel",
}
HOPPER_RUNGS = {
    "p11_1_tma": "tiles by TMA",
    "p11_3_operands": "both products by wgmma",
    "p11_7_ping_pong": "a producer, consumers in turns",
}
SCALAR_RUNGS = {"p6_1_fa1": "FlashAttention-1, scalar CUDA", "p6_6_shapes": "the last scalar kernel"}


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def ladder(found: All) -> list[Rung]:
    """The course's kernels and the peers, the slowest first; what does not run, or was not measured, before them."""
    missing = "not measured yet"
    rungs = []
    walls = found["walls"]
    about = walls.get("shape", {})
    naive = next((r for r in walls.get("naive", []) if r["seq_len"] == SHAPE[2] and "ms" in r), None)
    if naive:
        shape = (about["batch"], about["heads"], SHAPE[2], about["head_dim"])
        tflops = timing.attention_flops(*shape) / (naive["ms"] * 1e9)
        rungs.append(Rung(1, "naive attention, eager PyTorch", "eager", tflops, f"{_shape(shape)}, {about['dtype']}"))
    else:
        rungs.append(Rung(1, "naive attention, eager PyTorch", "eager", None, missing))
    refused = next((r for r in walls.get("scheme_a", []) if not r["ok"]), None)
    if refused:
        why = (
            f"at {refused['seq_len']} keys it needs {refused['required'] / 1024:.0f} KiB of {refused['resource']}, "
            f"and there are {refused['limit'] / 1024:.0f}"
        )
        rungs.append(Rung(1, "scheme A: all of K and V on chip", "this course", None, why))
    minimal = [r for r in found["triton"].get("rows", []) if (r["name"], r["head_dim"]) == ("minimal kernel", 128)]
    longest: Row = max(minimal, key=lambda r: r["seq_len"], default={})
    how = f"{_shape((1, 1, longest['seq_len'], 128))}, {found['triton']['dtype']}" if longest else missing
    rungs.append(Rung(3, "minimal Triton kernel, one head", "this course", longest.get("tflops"), how))

    rows = speeds(found)
    names = {"triton": "Triton kernel", "gluon": "Gluon kernel"} | {n: n for n in list(COLUMNS)[3:-1]}
    for name, words in names.items():
        row = rows.get(("forward", SHAPE[3], SHAPE[2], False, name), {})
        how = f"{_shape(SHAPE)}, {found['industrial']['dtype']}" if "tflops" in row else missing
        rungs.append(Rung(4 if name in OURS else 0, words, name, row.get("tflops"), how))

    most = max((_scalar_shape(r) for r in found["scalar"].get("rows", []) if not r["causal"]), default=())
    by_variant = {r["variant"]: r for r in found["scalar"].get("rows", []) if _scalar_shape(r) == most}
    for name, words in SCALAR_RUNGS.items():
        row = by_variant.get(name, {})
        how = f"{_shape(most[1:])}, float32" if "tflops" in row else missing
        rungs.append(Rung(6, f"{words}, float32", "this course", row.get("tflops"), how))
    at = {r["name"]: r for r in found["mma"].get("ladder", [])
          if (r["shape"], r["causal"], r["inputs"]) == (SHAPE, False, "randn")}  # fmt: skip
    for name, words in CUDA_RUNGS.items():
        row = at.get(name, {})
        how = f"{_shape(SHAPE)}, float16" if "tflops" in row else missing
        phase = next(s.phase for s in SERIES if s.name == name)
        rungs.append(Rung(phase, words, "this course", row.get("tflops"), how))
    at = {part: {r["name"]: r for r in found["hopper"].get("rows", []) if r["part"] == part and r["shape"] == SHAPE
                 and (r["causal"], r.get("kind", "standard"), r.get("dtype", "bf16")) == (False, "standard", "bf16")}
          for part in ("ladder", "shapes")}  # fmt: skip
    last = at["shapes"].get(hopper_jobs.OURS, {})
    hopper = [(11, words, "this course", at["ladder"].get(name, {}), "") for name, words in HOPPER_RUNGS.items()]
    beside = f"; cuDNN in that run: {cell(at['shapes'].get('cuDNN'))}"
    hopper.append((11, "the last Hopper kernel", "this course", last, beside))
    hopper.append((0, "FlashAttention-4", "FlashAttention-2", at["shapes"].get("FlashAttention-4", {}), beside))
    for phase, words, look, row, more in hopper:
        how = f"{_shape(SHAPE)}, bfloat16{more}" if "tflops" in row else missing
        rungs.append(Rung(phase, words, look, row.get("tflops"), how))
    return sorted(rungs, key=lambda r: r.tflops or 0.0)


def _scalar_shape(row: Row) -> tuple[int, ...]:
    """Its work, then its shape; () for a causal one: the largest is the one to show."""
    shape = (row["batch"], row["heads"], row["seq_len"], row["head_dim"])
    return () if row["causal"] else (math.prod(shape) * row["seq_len"], *shape)


# ---- in words --------------------------------------------------------------------------------------------------------
def cell(row: Row | None) -> str:
    """TFLOP/s, "out of memory", or a dash."""
    if row and "tflops" in row:
        return f"{row['tflops']:.0f}"
    return "out of memory" if row and row.get("unavailable", "").startswith("out of memory") else "–"


def table(found: All, which: str) -> str:
    """The Markdown table of a pass; the fastest of a row is bold. Who has no row at all has no column."""
    rows = speeds(found)
    names = [name for name in COLUMNS if any(key[0] == which and key[4] == name for key in rows)]
    if not names:
        return "Not measured yet."
    lines = ["| D | mask | N | " + " | ".join(COLUMNS[name] for name in names) + " |"]
    lines.append("|--:|---|--:|" + "--:|" * len(names))
    for d in HEAD_DIMS:
        for causal in (False, True):
            for n in LENGTHS:
                here = [rows.get((which, d, n, causal, name)) for name in names]
                best = max((r["tflops"] for r in here if r and "tflops" in r), default=None)
                cells = [f"**{cell(r)}**" if r and best and r.get("tflops") == best else cell(r) for r in here]
                lines.append(f"| {d} | {'causal' if causal else 'none'} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hopper_table(found: All) -> str:
    """Phase 11's kernel beside its peers, who took turns in one run; "" where nothing is recorded."""
    at: dict[tuple[int, bool, int], dict[str, Row]] = {}
    for r in found["hopper"].get("rows", []):
        if r["part"] == "shapes" and (r["kind"], r["dtype"]) == ("standard", "bf16"):
            at.setdefault((r["shape"][3], r["causal"], r["shape"][2]), {})[r["name"]] = r
    titles = {hopper_jobs.OURS: "phase 11, ours", "cuDNN": "cuDNN", "FlashAttention-4": "FlashAttention-4",
              "FlashAttention-2": "FlashAttention-2"}  # fmt: skip
    lines = [f"| D | mask | N | {' | '.join(titles.values())} |", "|--:|---|--:|" + "--:|" * len(titles)]
    for (d, causal, n), rows in sorted(at.items()):
        if n in (512, *LENGTHS):
            best = max((r["tflops"] for r in rows.values() if "tflops" in r), default=0.0)
            here = [rows.get(name) for name in titles]
            cells = [f"**{cell(r)}**" if r and r.get("tflops") == best else cell(r) for r in here]
            lines.append(f"| {d} | {'causal' if causal else 'none'} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if at else ""


def best_table(found: All) -> str:
    """The README's: the course's kernels beside all peers at D = 128, forward and backward, out of phase 11's run."""
    at: dict[tuple[str, bool, int], dict[str, Row]] = {}
    for r in found["hopper"].get("rows", []):
        forward = r["part"] == "shapes" and r["kind"] == "standard"
        if (forward or r["part"] == "backward") and (r["dtype"], r["shape"][3]) == ("bf16", SHAPE[3]):
            at.setdefault(("forward" if forward else "backward", r["causal"], r["shape"][2]), {})[r["name"]] = r
    titles = {hopper_jobs.OURS: "phase 11, ours", "triton": "Triton, ours", "p9_flash": "phase 9, ours"}
    titles |= {name: name for name in ("cuDNN", "FlashAttention-4", "FlashAttention-2")}
    lines = [f"| pass | mask | N | {' | '.join(titles.values())} |", "|---|---|--:|" + "--:|" * len(titles)]
    for which in PASSES:
        for causal in (False, True):
            for n in LENGTHS:
                rows = at.get((which, causal, n), {})
                best = max((rows[name].get("tflops", 0) for name in titles if name in rows), default=0)
                here = [rows.get(name) for name in titles]
                cells = [f"**{cell(r)}**" if r and r.get("tflops") == best else cell(r) for r in here]
                lines.append(f"| {which} | {'causal' if causal else 'none'} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hopper_words(found: All) -> list[str]:
    """What the record of phase 11 says of all shapes, its goals, and the backward pass; [] where there is none."""
    if not found["hopper"]:
        return []
    ours, said = hopper_jobs.OURS, []
    worst = min((s for s in hopper_results.standings(found["hopper"]) if s.ratio is not None),
                key=lambda s: s.ratio or 0.0, default=None)  # fmt: skip
    n, ahead, beyond, behind = hopper_results.against_best(found["hopper"])
    means = hopper_results.mean_table(found["hopper"])
    if worst and means.rows:
        row = dict(zip(means.columns, means.rows[-1], strict=True))
        peers = [n for n in ("cuDNN", "FlashAttention-4", "FlashAttention-2") if row.get(f"/ {n}")]
        parts = [f"{row[f'/ {n}']} times that of {n}" for n in peers]
        said.append(
            f"Forward, on random numbers, the geometric mean over {row['shapes']} shapes (N from 512 to 32768, grouped "
            f"heads and odd lengths too) is {_listed(parts)}, and {row['/ best']} times that of the best peer of each "
            f"shape. It is ahead of that one at {share(ahead, n)} shapes by the medians, and at {beyond} beyond the "
            f"spread of both; it is behind at {n - ahead}, at {behind} of them beyond the spread. At worst it is "
            f"{worst.said.replace('(', 'times as fast (')}."
        )
    goals = hopper_results.goal_table(found["hopper"])
    met = sum(row[-1].startswith("met") for row in goals.rows)
    said.append(
        f"Of the {len(goals.rows)} goals that were set before it was measured, {met} are met: lecture 11 lists them."
    )
    by_shape: dict[tuple, dict[str, float]] = {}
    for r in found["hopper"].get("rows", []):
        if r["part"] == "backward" and r.get("tflops"):
            by_shape.setdefault((*r["shape"], r["causal"]), {})[r["name"]] = r["tflops"]
    names = {"cuDNN": "cuDNN", "FlashAttention-2": "FlashAttention-2", "our Triton kernels": "triton"}
    parts = [
        f"against {words} {speed_of(values, 'slower')}" for words, name in names.items()
        if (values := [row[ours] / row[name] for row in by_shape.values() if ours in row and name in row])
    ]  # fmt: skip
    return [*said, f"Backward (D 64 and 128): {'; '.join(parts)}."] if parts else said


def input_table(found: All) -> str:
    """Phase 11's kernel on inputs that are not random, beside its peers; "" where nothing is recorded."""
    at = hopper_results.input_rows(found["hopper"]) if found["hopper"] else {}
    titles = {hopper_jobs.OURS: "phase 11, ours", **{n: n for n in ("cuDNN", "FlashAttention-4", "FlashAttention-2")}}
    lines = [f"| scores | D | doubted | {' | '.join(titles.values())} | over the best | causal | error, ours | peers |",
             "|---|--:|" + "--:|" * (len(titles) + 5)]  # fmt: skip
    for (kind, d, causal), rows in at.items():
        if causal or not hopper_results.best_of(rows):
            continue
        best = max(rows[n]["tflops"] for n in titles if n in rows)
        cells = [f"**{cell(rows[n])}**" if rows[n]["tflops"] == best else cell(rows[n]) for n in titles if n in rows]
        over = [_over_best(some) for some in (rows, at.get((kind, d, True), {}))]
        errors = [rows[hopper_jobs.OURS]["error"], min(rows[n]["error"] for n in list(titles)[1:] if n in rows)]
        lines.append(
            f"| {kind} | {d} | {hopper_results.doubted(rows[hopper_jobs.OURS]):.1%} | {' | '.join(cells)} | "
            f"{' | '.join(f'{x:.2f}' if x else '–' for x in over)} | {' | '.join(f'{x:.1e}' for x in errors)} |"
        )
    return "\n".join(lines) if at else ""


def _over_best(rows: Mapping[str, Row]) -> float | None:
    best = hopper_results.best_of(rows)
    return rows[best]["ms"] / rows[hopper_jobs.OURS]["ms"] if best else None


def input_words(found: All) -> list[str]:
    """Where trust pays and where it costs, how rare that is in models, how far its results are off, and at which clock;
    [] where nothing is recorded."""
    data, said = found["hopper"] or {"rows": []}, []
    made = [(at, r, x) for at, r in hopper_results.input_rows(data).items() if (x := _over_best(r))]
    if made:
        costs = sorted({at[0] for at, _, x in made if x < 1})
        said.append(
            "**Trust.** The kernel computes most tiles of keys under the maximum of those before, and again where a "
            "sum says that this was too low (*doubted*). In the table scores *rise* by 12 from one tile to the next; a "
            f"*sink* is a first key 30 above all others. It costs where {_listed(costs) or 'nothing'}: "
            f"{min(x for *_, x in made):.2f} times the best peer's speed at worst, "
            f"{max(x for *_, x in made):.2f} times at best."
        )
        wide = [
            (r[hopper_jobs.OURS]["error"] / min(p["error"] for n, p in r.items() if n in hopper_jobs.PEERS), at)
            for at, r, _ in made
        ]
        most, at = max(wide)
        if most > 1.2:
            said.append(
                f"**Accuracy.** Against float64 its largest error is at most {most:.1f} times that of the best peer "
                f"({at[0]}, D {at[1]}{', causal' * at[2]}): a key that dominates its row has a weight of "
                "exactly 1 only under the true maximum."
            )
    for model in hopper_inputs.LAYERS:
        layers = {at: r for at, r in hopper_results.input_rows(data, "captured").items() if at[0].startswith(model)}
        if not layers:
            continue
        doubts = [hopper_results.doubted(r[hopper_jobs.OURS]) for r in layers.values()]
        over = [x for r in layers.values() if (x := _over_best(r))]
        speed = f" It is {min(over):.2f} to {max(over):.2f} times as fast there as the best peer." if over else ""
        said.append(
            f"**Scores of a model**, {model} ({len(layers)} layers, 4096 tokens, causal): {max(doubts):.1%} of the "
            f"trusted tiles are doubted in the worst layer, less than 0.1 % in "
            f"{share(sum(x < 0.001 for x in doubts), len(doubts))}.{speed}"
        )
    clocks = {
        (r["shape"][3], r["inputs"], r["name"]): r for r in data["rows"] if r["part"] == "clock" and r.get("clock")
    }
    parts = []
    for name, words in {hopper_jobs.OURS: "our kernel", "cuDNN": "cuDNN", "matmul": "a product of matrices"}.items():
        pair = [clocks.get((SHAPE[3], kind, name)) for kind in ("random", "zeros")]
        if all(pair):
            mhz, zeros = ([r["clock"]["median"], r["tflops"]] for r in pair if r)
            parts.append(
                f"{words} at {mhz[0]:.0f} MHz ({mhz[1]:.0f} TFLOP/s; on zeros {zeros[0]:.0f} MHz, {zeros[1]:.0f})"
            )
    if parts:
        most = max(r["clock"]["max"] for r in clocks.values())
        said.append(
            f"**The clock.** Alone for seconds, D 128, {_listed(parts)}: the power cap sets it, of {most:.0f} MHz."
        )
    return said


def ladder_table(found: All) -> str:
    lines = ["| Phase | Kernel | TFLOP/s | Measured at (batch × heads × N × D) |", "|---|---|--:|---|"]
    for r in ladder(found):
        speed = "–" if r.tflops is None else f"{r.tflops:.0f}"
        lines.append(f"| {r.phase or 'peer'} | {r.words} | {speed} | {r.how} |")
    return "\n".join(lines)


def share(some: int, all_: int) -> str:
    return f"all {all_}" if some == all_ else f"{some or 'none'} of {all_}"


def speed_of(values: Iterable[float], than: str) -> str:
    """ "0.60 to 0.92 times its speed (median 0.75), slower at 20 of 22 shapes"; than: "slower" or "faster"."""
    v = sorted(values)
    counted = share(sum(x < 1 if than == "slower" else x > 1 for x in v), len(v))
    return f"{v[0]:.2f} to {v[-1]:.2f} times its speed (median {statistics.median(v):.2f}), {than} at {counted} shapes"


def short(found: All) -> str:
    """The Triton kernels against each fused peer, in one sentence a pass; "" where none was measured."""
    said = []
    for which in PASSES:
        parts = []
        for peer in ("cuDNN", "FlexAttention", "FlashAttention-2"):
            if values := list(ratios(speeds(found), which, "triton", peer).values()):
                behind = share(sum(x < 1 for x in values), len(values))
                parts.append(f"{statistics.median(values):.2f} times that of {peer} (slower at {behind} shapes)")
        if parts:
            said.append(f"{which} it is {_listed(parts)}")
    return f"**In short**, the speed of our Triton kernels at the median shape: {'; '.join(said)}." if said else ""


def losses(found: All) -> list[str]:
    """The lines on where ours is behind, then on where it is ahead, computed; [] where nothing is recorded."""
    rows, said = speeds(found), []
    for which, title in PASSES.items():
        parts = [
            f"our {name.title()} kernel{'s' * (which == 'backward')} reach{'es' * (which == 'forward')} "
            + speed_of(values.values(), "slower")
            for name in OURS if (values := ratios(rows, which, name, "cuDNN"))
        ]  # fmt: skip
        if parts:
            said.append(f"**{title}, against cuDNN:** {'; '.join(parts)}.")
    eager = ratios(rows, "backward", "triton", "eager")
    if slow := {key: r for key, r in eager.items() if r < 1}:
        sizes = _listed([str(d) for d in sorted({key[1] for key in slow})])
        said.append(
            f"**Backward pass, against eager PyTorch:** it is faster than ours at {share(len(slow), len(eager))} "
            f"shapes, up to {1 / min(slow.values()):.1f} times as fast, all of them at D = {sizes}."
        )
    said += _one_head(found)
    if found["scalar"].get("rows"):
        last = list(SCALAR_RUNGS)[-1]
        peers = {"memory-efficient attention": "sdpa_efficient_f32", "unfused PyTorch": "torch_naive_f32"}
        parts = [
            f"against {words} {speed_of(values.values(), 'slower')}"
            for words, peer in peers.items() if (values := scalar.ratios(found["scalar"], last, peer))
        ]  # fmt: skip
        said += [f"**The last scalar CUDA kernel, float32:** {'; '.join(parts)}."] if parts else []
    ahead = [
        f"{which} the Triton kernel{'s' * (which == 'backward')} reach{'es' * (which == 'forward')} "
        + speed_of(values.values(), "faster")
        for which in PASSES if (values := ratios(rows, which, "triton", "FlashAttention-2"))
    ]  # fmt: skip
    if ahead:
        said.append(f"**Against FlashAttention-2**, which does not use Hopper's own instructions: {'; '.join(ahead)}.")
    return said


def _spans(found: All) -> str:
    lengths, sizes = ({key[i] for key in speeds(found)} for i in (2, 1))
    if not lengths:
        return ""
    return f" (N from {min(lengths)} to {max(lengths)}; D {', '.join(map(str, sorted(sizes)))})"


def _one_head(found: All) -> list[str]:
    """The shapes of published/triton_vs_torch.csv: one head, causal, ours against eager PyTorch."""
    speed: dict[tuple[str, str], dict[tuple[int, int], dict[str, float]]] = {}
    for r in found["industrial"].get("rows", []):
        if r["part"] == "published" and "ms" in r:
            at = speed.setdefault((r["dtype"], r["pass"]), {}).setdefault((r["shape"][3], r["shape"][2]), {})
            at[r["name"]] = r["ms"]
    said = []
    for dtype, words in (("f32", "float32"), ("bf16", "bfloat16")):
        parts = []
        for which in PASSES:
            pairs = {k: at["eager"] / at["triton"] for k, at in speed.get((dtype, which), {}).items() if len(at) == 2}
            behind = [r for r in pairs.values() if r < 1]
            if behind:
                parts.append(
                    f"{which} it is faster than ours at {share(len(behind), len(pairs))} shapes, "
                    f"up to {1 / min(behind):.1f} times as fast"
                )
        if parts:
            said.append(f"**One head alone, {words}, against eager PyTorch** (causal, D up to 64): {'; '.join(parts)}.")
    return said


def cuda_words(found: All) -> list[str]:
    """What else was measured of the last CUDA kernel, and how its fp16 run lies beside the tables'."""
    rows, mma, said = speeds(found), found["mma"], []
    fa2 = [r["tflops"] / rows[key]["tflops"] for r in mma.get("final", [])
           if (r["name"], r.get("table"), r["inputs"]) == ("fa2", "big", "randn")
           and (key := ("forward", r["shape"][3], r["shape"][2], r["causal"], "FlashAttention-2")) in rows
           and "tflops" in rows[key] and r["shape"][2] in LENGTHS and r["shape"][3] in HEAD_DIMS]  # fmt: skip
    if any(key[4] == "CUDA" for key in rows):
        text = "¹ The last kernel of phase 9, `mma.sync`, in float16 and in a run of its own."
        if fa2:
            text += (
                f" FlashAttention-2 was in that run too, with {min(fa2):.2f} to {max(fa2):.2f} times what stands here."
            )
        said.append(text)
    else:
        said.append("")
    sums = mma.get("summary", {})
    if {"mma_stages_ada", "fa1_f32_fa2_mma_ada"} <= sums.keys():
        a, b = sums["mma_stages_ada"], sums["fa1_f32_fa2_mma_ada"]
        text = (
            "The last CUDA kernel's geometric mean against FlashAttention-2, in float16, is "
            f"{a['geomean_vs_fa2']:.2f} over {a['shapes']} published shapes, small ones included, and "
            f"{b['geomean_vs_fa2']:.2f} over {b['shapes']} others."
        )
        moving = [r["vs_fa2"] for r in mma["final"] if (r["name"], r["inputs"]) == ("p9_flash", "moving")]
        if moving:
            text += (
                " It rescales its output only when a row's maximum moves far, and random inputs never make it. Where "
                f"the maxima move in every tile, it is {min(moving):.2f} to {max(moving):.2f} times as fast."
            )
        said.append(text)
    without = [
        r for r in found["ablation"].get("rows", [])
        if (r["shape"], r["causal"], r["inputs"]) == (SHAPE, False, "randn") and r["name"] not in ("fa2", "p9_flash")
    ]  # fmt: skip
    if without:
        most = min(without, key=lambda r: r["vs_whole"])
        least = sum(r["vs_whole"] > 0.99 for r in without)
        said.append(
            f"It was also measured {len(without)} times with one idea taken out. Without *{most['name']}* "
            f"{most['vs_whole']:.2f} of its speed is left, the least of all; {share(least, len(without))} times less "
            "than 1 % was lost."
        )
    return said


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [names[-1]])


def machine_words(found: All) -> str:
    """Which machine, versions, commits and dates the numbers have."""
    kinds: dict[str, dict[str, list[str]]] = {}
    clocks = []
    for name in RECORDS:
        if m := found[name].get("machine"):
            cudnn = m.get("cudnn") and f"{m['cudnn'] // 10000}.{m['cudnn'] % 10000 // 100}.{m['cudnn'] % 100}"
            versions = {"one": m["gpu"], "driver": m.get("driver"), "torch": m["torch"], "triton": m.get("triton"),
                        "CUDA": m.get("nvcc") or m.get("cuda"), "cuDNN": cudnn}  # fmt: skip
            what = ", ".join(f"{part} {version}" for part, version in versions.items() if version)
            clocks += [clock for clock in [(m.get("sm_clock_mhz") or {}).get("median")] if clock]
            sessions = [*m.get("earlier", []), m]
            dates, commits = ([*dict.fromkeys(x[k] for x in sessions if x.get(k))] for k in ("date", "commit"))
            when = " and ".join(dates)
            if commits:
                when += f", commit{'s' * (len(commits) > 1)} {_listed([f'`{c}`' for c in commits])}"
            kinds.setdefault(what, {}).setdefault(when, []).append(name)
    if not kinds:
        return "Nothing is recorded yet."
    lines = [
        f"{versions}. Records: {'; '.join(f'{_listed(names)} of {when}' for when, names in whens.items())}."
        for versions, whens in kinds.items()
    ]
    said = "Measured on " + " And on ".join(lines)
    if clocks:
        said += f" Over whole runs, pauses included, the median of the SM clock was {min(clocks):.0f} to "
        said += f"{max(clocks):.0f} MHz; under a kernel that runs for long it is lower."
    left = found["industrial"].get("left", 0)
    return said + (f" In the record industrial {left} measurements are still to be made." if left else "")


def emulator_words(found: All) -> str:
    pairs = [pair for r in found["validation"].get("rows", []) for pair in r["counters"].values()]
    if not pairs:
        return ""
    return (
        f"The emulator was set beside that GPU too: of {len(pairs)} counters of all kernels' launches, "
        f"{sum(a == b for a, b in pairs)} are equal to Nsight Compute's; "
        "[the notes](../notes/emulator.md) say where the others differ."
    )


def model_words(found: All) -> list[str]:
    """What the kernels are worth in a layer of today, and in a training step; [] where neither is recorded."""
    said = []
    if found["layer"].get("rows"):
        parts = []
        words = {layer.OURS: "with our kernels", layer.APART: "with our attention alone, and RoPE as PyTorch's",
                 layer.SDPA: "with PyTorch's SDPA",
                 layer.ORIGINAL: "with the scores in memory"}  # fmt: skip
        for scope, text in (("layer", "the layer takes"), ("attention", "attention alone")):
            took = layer.times(found["layer"], "present", scope, "both")
            cells = [f"{took[name]:.1f} ms {what}" for name, what in words.items() if name in took]
            parts += [f"{text} {_listed(cells)}"] if cells else []
        if faster := layer.ratio(found["layer"], "present", "SDPA, compiled", layer.OURS, which="both"):
            parts.append(f"in turns with ours, SDPA's layer through `torch.compile` is {faster:.2f} times as fast")
        if parts:
            said.append(
                "**A layer of today**, forward and backward (batch 4, 32 query heads, 8 key heads, N = 4096, D = 128, "
                f"causal, bfloat16, with projections and rotary embedding): {'; '.join(parts)}."
            )
    steps = found["lm"] if found["lm"].get("rows") else {"rows": []}
    ours, called = "flash, fused RoPE", {"eager": "eager attention", "sdpa": "SDPA", "flash": "ours"}
    parts = []
    for dtype in lm.DTYPES:
        cells = []
        for peer in ("eager", "sdpa"):
            able = [r for size in lm.SIZES if (r := lm.ratio(steps, size, ours, peer, dtype=dtype))]
            if able:
                span = " to ".join(dict.fromkeys(f"{r:.2f}" for r in (min(able), max(able))))
                cells.append(f"{span} times as fast as with {called[peer]}")
        parts += [f"in {dtype} {_listed(cells)}"] if cells else []
    if parts:
        largest = [size for size in lm.SIZES if lm.passes(steps, size, ours)][-1:]
        of_way = {way: lm.passes(steps, size, way) for size in largest for way in (ours, "sdpa")}
        cells = [f"{by_pass['step']['ms']:.0f} ms{' with SDPA' if way == 'sdpa' else ''}"
                 for way, by_pass in of_way.items() if by_pass]  # fmt: skip
        text = f"**A training step** of a language model, 4 texts of 1024 tokens, with our kernels: {'; '.join(parts)}"
        text += f" ({largest[0]}: {_listed(cells)})" if cells else ""
        alone = [r for size in lm.SIZES if (r := lm.exchanged(steps, size).get("attention alone"))]
        if alone:
            span = " to ".join(dict.fromkeys(f"{r:.2f}" for r in (min(alone), max(alone))))
            text += (
                ". That exchanges RoPE too: with PyTorch's RoPE on both sides, in bfloat16, a step with our attention "
                f"is {span} times as fast as with SDPA"
            )
        out = [f"{n} tokens with {called[way]}" for way, n in lm.runs_out(steps).items() if n]
        text += f". A small model's memory runs out at {_listed(out)}" if out else ""
        said.append(f"{text}. [Phase 10](../notebooks/10_profiling_a_transformer.ipynb) looks for the reasons.")
    return said


# ---- the figure ------------------------------------------------------------------------------------------------------
def drawn(found: All) -> dict[str, Any]:
    """All that the figure shows: bars, lines by panel, and titles."""
    bars = [
        [f"{r.phase} · {r.words}" if r.phase else r.words, r.look, round(r.tflops, 3)]
        for r in ladder(found) if r.tflops is not None
    ]  # fmt: skip
    rows, plots = speeds(found), {}
    for which, title in PASSES.items():
        lines: dict[str, list[list[float]]] = {}
        for (name, d, n, causal, who), row in sorted(rows.items()):
            if (name, d, causal) == (which, SHAPE[3], True) and "tflops" in row and who != "CUDA":
                lines.setdefault(who, []).append([n, round(row["tflops"], 3)])
        plots[f"{title}, D = {SHAPE[3]}, causal"] = {who: lines[who] for who in COLUMNS if who in lines}
    gpu = next((found[name]["machine"]["gpu"] for name in RECORDS if found[name]), "no GPU yet")
    title = f"Forward pass on one {gpu}, D = {SHAPE[3]}"
    return {"bars": bars, "plots": plots, "names": COLUMNS, "title": title}


def digest(data: Mapping[str, Any]) -> str:
    """What the figure's file says of what it shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def draw(data: Mapping[str, Any]) -> bytes:
    """The figure as SVG, with the digest of its data in it."""
    import matplotlib
    import matplotlib.pyplot as plt

    from flashlab.figures import results, show

    with matplotlib.rc_context({"svg.hashsalt": "flashlab", "svg.fonttype": "path"}):
        show.style()
        figure = results.results(data["bars"], data["plots"], data["names"], data["title"])
        file = io.BytesIO()
        told = {"Date": None, "Creator": None, "Title": data["title"], "Description": f"data {digest(data)}"}
        figure.savefig(file, format="svg", facecolor="white", metadata=told)
        plt.close(figure)
    return file.getvalue()


def alternative(data: Mapping[str, Any]) -> str:
    """The figure's alternative text."""
    if not data["bars"]:
        return "Nothing is recorded yet."
    (slow, _, low), (fast, _, high) = data["bars"][0], data["bars"][-1]
    ours = [(words, speed) for words, _, speed in data["bars"] if words[0].isdigit()]
    course = f"; the fastest of the course is {ours[-1][0]} with {ours[-1][1]:.0f}" if ours else ""
    return (
        f"Left: {len(data['bars'])} bars of TFLOP/s, from {slow} with {low:.0f} to {fast} with {high:.0f}{course}. "
        "Right: TFLOP/s over the sequence length, forward and backward, of the course's kernels and its peers."
    )


# ---- the page --------------------------------------------------------------------------------------------------------
def block(found: All) -> str:
    """What stands between the README's marks, in Markdown: the figure, one table, and where the rest is."""
    return _laid(
        f"![{alternative(drawn(found))}](docs/results.svg)",
        " ".join(CAPTION.split()),
        "TFLOP/s at D = 128 in bfloat16, all of a row measured in turns; the fastest is bold:",
        best_table(found),
        short(found),
        "[docs/results.md](docs/results.md) has everything: every shape, where our kernels lose, other inputs, "
        "accuracy, clocks, a layer and a language model, and on what it was measured.",
    )


def results(found: All) -> str:
    """The page docs/results.md."""
    lost, cuda, models = losses(found), cuda_words(found), model_words(found)
    hopper, inputs = hopper_table(found), input_table(found)
    flex = any(row["part"] == "flex" and "ms" in row for row in found["industrial"].get("rows", []))
    return (
        "# What the kernels reach\n\n"
        + _laid(
            f"<!-- written by `{COMMAND}` -->",
            f"![{alternative(drawn(found))} The tables below have the numbers.](results.svg)",
            " ".join(CAPTION.split()),
            short(found),
            " ".join(HOW.format(flex=FLEX if flex else "").split()),
            "## Forward pass",
            table(found, "forward"),
            "## Backward pass alone",
            table(found, "backward"),
            *cuda[:1],
            "## Phase 11: Hopper's own instructions" if hopper else "",
            "Forward, beside its peers in a run of its own." if hopper else "",
            hopper,
            "\n".join(f"- {line}" for line in hopper_words(found)),
            "**The same kernel on other inputs**, forward, N = 4096, no mask (behind *over the best*: with a causal "
            "mask)"
            if inputs
            else "",
            inputs,
            "\n".join(f"- {line}" for line in input_words(found)),
            "## Where it loses, and where it wins",
            f"Over every recorded shape{_spans(found)}:" if lost else "",
            "\n".join(f"- {line}" for line in lost),
            " ".join(cuda[1:]),
            "## In a layer, and in a model" if models else "",
            "\n".join(f"- {line}" for line in models),
            "## The ladder in numbers",
            "Every rung with its shape, the slowest first. Forward, no mask.",
            ladder_table(found),
            "## On what it was measured",
            machine_words(found),
            emulator_words(found),
            "The steps that did not help are told too: in the lectures and in [the notes](../notes/). Every number is "
            "in [the records](../src/flashlab/bench/recorded), with its spread. `flashlab bench --help` lists what "
            "measures them again on your GPU.",
        )
        + "\n"
    )


def _laid(*parts: str) -> str:
    return "\n\n".join(_wrapped(part) for part in parts if part)


def _wrapped(part: str) -> str:
    """A paragraph, or each line of a list, in lines that a diff can show; tables, pictures and folds as they are."""
    if part[0] in "|!<#":
        return part
    fill = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in part.split("\n"):
        fill.subsequent_indent = "  " if line.startswith("- ") else ""
        lines.append(fill.fill(line))
    return "\n".join(lines)


def page(text: str, found: All) -> str:
    """The README's text with its results written anew. Raises ValueError where the marks are not there."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must have the lines {BEGIN} and {END} once each, in this order")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{block(found)}\n\n{END}{after}"


def stale(root: Path = ROOT, folder: Path | None = None) -> list[str]:
    """What does not agree with the records: a sentence for each file, which names the command; [] if all does."""
    found, said = load(folder), []
    text = (root / "README.md").read_text("utf-8")
    shown = root / "docs" / "results.md"
    pages = {"README.md": (text, page(text, found))}
    pages["docs/results.md"] = (shown.read_text("utf-8") if shown.exists() else "", results(found))
    for name, (old, new) in pages.items():
        if new != old:
            line = next((a for a, b in zip(old.splitlines(), new.splitlines(), strict=False) if a != b), "its end")
            said.append(f"{name} is not what the records say, from the line {line[:90]!r} on: run `{COMMAND}`")
    figure = root / "docs" / "results.svg"
    held = re.search(r"data ([0-9a-f]{16})", figure.read_text("utf-8")) if figure.exists() else None
    if held is None or held[1] != digest(drawn(found)):
        said.append(f"docs/results.svg was not drawn from the records as they are: run `{COMMAND}`")
    return said


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    parser = records.parser(__doc__, "readme")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where they are out of date")
    parser.add_argument("--records", type=Path, metavar="FOLDER", help="where the records are")
    given = parser.parse_args(arguments)
    if not (root / "README.md").exists():
        raise SystemExit(f"there is no README.md in {root}: this command belongs to a checkout of the course")
    if given.check:
        raise SystemExit("\n".join(stale(root, given.records)) or None)
    found = load(given.records)
    if given.out:
        records.write_json(given.out, drawn(found))
    if given.json:
        print(json.dumps(drawn(found), indent=1))
    if given.out or given.json:
        return
    made = {  # all, before one is written
        root / "README.md": page((root / "README.md").read_text("utf-8"), found).encode(),
        root / "docs" / "results.md": results(found).encode(),
        root / "docs" / "results.svg": draw(drawn(found)),
    }
    for path, content in made.items():
        records.write_whole(path, content)
        print(f"written: {path.relative_to(root)}")


if __name__ == "__main__":
    main()
