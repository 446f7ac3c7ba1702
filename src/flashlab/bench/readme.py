"""What the kernels reach, from the records of one GPU: README.md's part, the page docs/results.md, and the figure.

    flashlab bench readme                   # writes README.md, between its marks, docs/results.md and docs/results.svg
    flashlab bench readme --check           # writes nothing; exit status 1 and a sentence where they are out of date

The text is in docs/results.md.jinja and docs/readme.md.jinja, and every number in it is looked up here. What has not
been measured is a dash in a table; a paragraph that speaks of it is left out. So run it after a record has changed.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2  # torch needs it, so it is there

from flashlab.bench import decode, hopper_inputs, hopper_jobs, hopper_results, layer, lm, mma, peers, records, ring
from flashlab.bench.harness import Data, Row
from flashlab.bench.hopper_results import Standing
from flashlab.bench.rows import At, Missing, by, of, over, where
from flashlab.table import Table

ROOT = Path(__file__).parents[3]
GPU = "h200"
RECORDS = ("walls", "triton", "industrial", "scalar", "mma", "ablation", "validation", "layer", "lm", "hopper",
           "decode")  # fmt: skip
RINGS = ("ring", "ring_x4")  # of several GPUs, each with machines of its own
BEGIN, END = "<!-- results: written by `flashlab bench readme` -->", "<!-- end of the results -->"
COMMAND = "flashlab bench readme"

LENGTHS, HEAD_DIMS = (1024, 4096, 16384), (64, 128)
SHAPE = [4, 16, 4096, 128]  # of the ladder, wherever it was measured there
PASSES = {"forward": "Forward pass", "backward": "Backward pass"}
ALONE = {name: name for name in ("cuDNN", "FlashAttention-4", "FlashAttention-2")}
COLUMNS = {"triton": "Triton, ours", "gluon": "Gluon, ours", "CUDA": "CUDA, ours ¹"}
COLUMNS |= {name: name for name in ("FlashAttention-2", "cuDNN", "FlexAttention")} | {"eager": "eager PyTorch"}
HOPPER = {hopper_jobs.OURS: "phase 11, ours", **ALONE}
BEST = {hopper_jobs.OURS: "phase 11, ours", "triton": "Triton, ours", "p9_flash": "phase 9, ours", **ALONE}
RING = (ring.GATHER, ring.ULYSSES, ring.PAIRS, ring.CUDNN)
DECODE = (decode.OURS, "Triton, pages of 16", decode.FLASHINFER, *(f"{x}, pages of 128" for x in ("FlashAttention-4",
          "FlexAttention")), decode.CUDNN, "FlashAttention-2, contiguous")  # fmt: skip
All = Mapping[str, Data]


def load(folder: Path | None = None) -> dict[str, Data]:
    """The records of the README's GPU by the name of their bench, their rows in one schema; no rows where none is."""
    files = {name: name.replace("_", f"_{GPU}_") if "_" in name else f"{name}_{GPU}" for name in RECORDS + RINGS}
    paths = {name: (folder or records.RECORDED) / f"{file}.json" for name, file in files.items()}
    found = {name: json.loads(path.read_text("utf-8")) if path.exists() else {} for name, path in paths.items()}
    return {name: data | {"rows": of(data)} for name, data in found.items()}


# ---- what was measured -----------------------------------------------------------------------------------------------
def speeds(found: All) -> At:
    """Who was measured at every (pass, D, causal, N) of phases 4 and 5; and the last CUDA kernel of phase 9 there."""
    rows = where(found["industrial"]["rows"], part="shapes")
    flex = [r for r in where(found["industrial"]["rows"], part="flex", name=set(peers.FLEX)) if "ms" in r]
    at = by(rows, "pass", "D", "causal", "N")
    for r in flex:
        here = at.setdefault((r["pass"], r["D"], r["causal"], r["N"]), {})
        here["FlexAttention"] = max(r, here.get("FlexAttention", r), key=lambda r: r.get("tflops", 0.0))
    for r in where(found["mma"]["rows"], part="final", table="big", inputs="randn", name="p9_flash"):
        batch, heads, n, d = r["shape"]
        if (batch * n, heads * d) == (16384, 2048):  # the same work as in the part "shapes"
            at.setdefault((r["pass"], d, r["causal"], n), {})["CUDA"] = r
    return at


class Rung(NamedTuple):
    """One bar of the ladder: its phase (0 for a peer), in words, whose colour it has, what was measured, and how.

    tflops is None where it does not run, or was not measured: then `how` says why.
    """

    phase: int
    words: str
    look: str
    tflops: float | None
    how: str


OURS = "this course"
_AT = {"shape": SHAPE, "causal": False, "inputs": "randn"}
_STANDARD = _AT | {"part": "shapes", "kind": "standard", "dtype": "bf16"}
_LADDER: tuple[tuple[int, str, str, str, dict[str, Any]], ...] = (
    (1, "naive attention, eager PyTorch", "eager", "walls", {"name": "naive", "N": SHAPE[2]}),
    (3, "minimal Triton kernel, one head", OURS, "triton", {"name": "minimal kernel", "D": 128}),
    (4, "Triton kernel", "triton", "industrial", {}),
    (4, "Gluon kernel", "gluon", "industrial", {}),
    *((0, name, name, "industrial", {}) for name in ("FlashAttention-2", "cuDNN", "FlexAttention")),
    (6, "FlashAttention-1, scalar CUDA, float32", OURS, "scalar", {"variant": "p6_1_fa1", "causal": False}),
    (6, "the last scalar kernel, float32", OURS, "scalar", {"variant": "p6_6_shapes", "causal": False}),
    *((int(name[1]), words, OURS, "mma", _AT | {"part": "ladder", "name": name}) for name, words in {
        "p7_naive": "first tensor-core kernel",
        "p8_1_split_q": "tiles and four warps",
        "p8_4_swizzle": "copies in flight, no bank conflicts",
        "p8_6_store": "Q in registers, wide stores",
        "p9_4_warp_tiles": "32 rows per warp",
        "p9_flash": "the last CUDA kernel",
    }.items()),
    *((11, words, OURS, "hopper", _AT | {"part": "ladder", "name": name}) for name, words in {
        "p11_1_tma": "tiles by TMA",
        "p11_3_operands": "both products by wgmma",
        "p11_7_ping_pong": "a producer, consumers in turns",
    }.items()),
    (11, "the last Hopper kernel", OURS, "hopper", _STANDARD | {"name": hopper_jobs.OURS}),
    (0, "FlashAttention-4", "FlashAttention-2", "hopper", _STANDARD | {"name": "FlashAttention-4"}),
)  # fmt: skip
"""Phase, words, whose colour, record, and which rows: of several the one with the most work."""
_LONG = {"fp16": "float16", "bf16": "bfloat16", "f32": "float32"}


def ladder(found: All) -> list[Rung]:
    """The course's kernels and the peers, the slowest first; what does not run, or was not measured, before them."""
    rungs = []
    for phase, words, look, name, wanted in _LADDER:
        rows = where(found[name]["rows"], **wanted)
        if name == "industrial":
            rows = [speeds(found).get(("forward", SHAPE[3], False, SHAPE[2]), {}).get(look, {})]
        row: Row = max((r for r in rows if "tflops" in r), key=lambda r: r["work"], default={})
        how = f"{' × '.join(map(str, row['shape']))}, {_LONG[row['dtype']]}" if row else "not measured yet"
        if row and wanted.get("part") == "shapes":
            beside = where(found[name]["rows"], **wanted | {"name": "cuDNN"})
            how += f"; cuDNN in that run: {cell(beside[0] if beside else None)}"
        rungs.append(Rung(phase, words, look, row.get("tflops"), how))
    for r in where(found["walls"]["rows"], part="scheme_a", ok=False)[:1]:
        why = f"{r['required'] / 1024:.0f} KiB of {r['resource']}, and there are {r['limit'] / 1024:.0f}"
        how = f"at {r['seq_len']} keys it needs {why}"
        rungs.append(Rung(1, "scheme A: all of K and V on chip", OURS, None, how))
    return sorted(rungs, key=lambda r: r.tflops or 0.0)


# ---- tables ----------------------------------------------------------------------------------------------------------
def cell(row: Row | None) -> str:
    """TFLOP/s, "out of memory", or a dash."""
    if row and "tflops" in row:
        return f"{row['tflops']:.0f}"
    return "out of memory" if row and row.get("unavailable", "").startswith("out of memory") else "–"


def _cells(rows: Mapping[str, Row], names: Iterable[str]) -> list[str]:
    """The speeds of some; the fastest is bold."""
    here = [rows.get(name, {}) for name in names]
    best = max((r["tflops"] for r in here if "tflops" in r), default=None)
    return [f"**{cell(r)}**" if best and r.get("tflops") == best else cell(r) for r in here]


def speed_table(at: At, keys: Sequence[str], titles: Mapping[str, str]) -> str:
    """The speeds of whom `titles` names at each key, in Markdown; who has no row at all has no column."""
    names = [name for name in titles if any(name in rows for rows in at.values())]
    if not names:
        return "Not measured yet."
    lines = [[*(("none", "causal")[x] if isinstance(x, bool) else str(x) for x in key), *_cells(rows, names)]
             for key, rows in at.items()]  # fmt: skip
    align = "".join("r" if key in ("D", "N") else "l" for key in keys) + "r" * len(names)
    return Table.of(lines, [*keys, *(titles[name] for name in names)], align=align)._repr_markdown_()


def table(found: All, which: str) -> str:
    """Phases 4, 5 and 9 beside their peers, of one pass."""
    at = {key[1:]: rows for key, rows in sorted(speeds(found).items()) if key[0] == which}
    shown = {key: rows for key, rows in at.items() if key[0] in HEAD_DIMS and key[2] in LENGTHS}
    return speed_table(shown, ("D", "mask", "N"), COLUMNS)


def hopper_table(found: All) -> str:
    """Phase 11's kernel beside its peers, who took turns in one run."""
    rows = where(found["hopper"]["rows"], part="shapes", kind="standard", dtype="bf16", N={512, *LENGTHS})
    return speed_table(dict(sorted(by(rows, "D", "causal", "N").items())), ("D", "mask", "N"), HOPPER)


def best_table(found: All) -> str:
    """The README's: the course's kernels beside all peers at D = 128, forward and backward, out of phase 11's run."""
    rows = where(found["hopper"]["rows"], part={"shapes", "backward"}, kind={"standard", None}, dtype="bf16",
                 D=SHAPE[3], N=set(LENGTHS))  # fmt: skip
    at = sorted(by(rows, "pass", "causal", "N").items(), key=lambda pair: (pair[0][0] == "backward", pair[0]))
    return speed_table(dict(at), ("pass", "mask", "N"), BEST)


def input_table(found: All) -> str:
    """Phase 11's kernel on inputs that are not random, beside its peers."""
    at = hopper_results.input_rows(found["hopper"])
    lines = []
    for (kind, d, causal), rows in at.items():
        if not causal and hopper_results.best_of(rows):
            ours = rows[hopper_jobs.OURS]
            ratios = (Standing({}, some).ratio for some in (rows, at.get((kind, d, True), {})))
            errors = [ours["error"], min(rows[n]["error"] for n in ALONE if n in rows)]
            lines.append([kind, d, f"{hopper_results.doubted(ours):.1%}", *_cells(rows, HOPPER),
                          *(f"{x:.2f}" if x else "–" for x in ratios), *(f"{x:.1e}" for x in errors)])  # fmt: skip
    columns = ["scores", "D", "doubted", *HOPPER.values(), "over the best", "causal", "error, ours", "peers"]
    return Table.of(lines, columns, align="l" + "r" * (len(columns) - 1))._repr_markdown_()


def decode_table(found: All) -> str:
    """Phase 12's kernels beside their peers: microseconds of one query per sequence."""
    rows = decode.side_by_side(found["decode"])
    lines = [[work, *(f"{us[n]:.1f}" if n in us else "–" for n in DECODE)] for work, us in rows.items()]
    return Table.of(lines, ["sequences x keys, heads, D", *DECODE], align="l" + "r" * len(DECODE))._repr_markdown_()


def ring_table(found: All) -> str:
    """Phase 13's ring beside other ways to use several GPUs: shares of one GPU's time over their number."""
    lines = []
    for data in (found.get(name, {}) for name in RINGS):
        for case in ring.MANY if data.get("ranks", 2) > 2 else ring.CASES:
            rows = ring.of(data, case) if "rows" in data else {}
            share = {name: f"{row['of_ideal']:.2f}" for name, row in rows.items() if "of_ideal" in row}
            if ring.OURS[case.causal] in share:
                heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads}/{case.kv_heads}"
                lines.append([data["ranks"], heads, case.n, "causal" if case.causal else "none", case.which,
                              *(share.get(name, "–") for name in (ring.OURS[case.causal], *RING))])  # fmt: skip
    if not lines:
        raise Missing("no ring is recorded")
    columns = ["GPUs", "heads", "tokens", "mask", "pass", "ring", *RING]
    return Table.of(lines, columns, align="rrrll" + "r" * (1 + len(RING)))._repr_markdown_()


def ladder_table(found: All) -> str:
    lines = [[r.phase or "peer", r.words, "–" if r.tflops is None else f"{r.tflops:.0f}", r.how] for r in ladder(found)]
    columns = ["Phase", "Kernel", "TFLOP/s", "Measured at (batch × heads × N × D)"]
    return Table.of(lines, columns, align="llrl")._repr_markdown_()


# ---- what the text asks ----------------------------------------------------------------------------------------------
def some(values: Iterable[Any]) -> list[Any]:
    """The values, but None; Missing where there is none."""
    if not (found := [x for x in values if x is not None]):
        raise Missing("nothing is recorded")
    return found


def listed(names: Iterable[Any]) -> str:
    *before, last = map(str, some(names))
    return " and ".join([", ".join(before)] * bool(before) + [last])


def span(values: Iterable[float | None]) -> str:
    """ "0.98 to 1.03", or one number where both look the same."""
    found = some(values)
    return " to ".join(dict.fromkeys(f"{x:.2f}" for x in (min(found), max(found))))


def share(few: int, all_: int) -> str:
    return f"all {all_}" if few == all_ else f"{few or 'none'} of {all_}"


def speed_of(at: At, name: str, peer: str, than: str = "slower") -> str:
    """ "0.60 to 0.92 times its speed (median 0.75), slower at 20 of 22 shapes"; than: "slower" or "faster"."""
    v = sorted(over(at, name, peer).values())
    counted = share(sum(x < 1 if than == "slower" else x > 1 for x in v), len(v))
    return f"{v[0]:.2f} to {v[-1]:.2f} times its speed (median {statistics.median(v):.2f}), {than} at {counted} shapes"


def faster_than_ours(ratios: Mapping[tuple, float]) -> str:
    """ "is faster than ours at 4 of 24 shapes, up to 1.5 times as fast"; Missing where it never is."""
    slow = some(x for x in ratios.values() if x < 1)
    return f"is faster than ours at {share(len(slow), len(ratios))} shapes, up to {1 / min(slow):.1f} times as fast"


class Questions:
    """What the templates ask of the records: every public method, by its name; Missing where there is no answer."""

    def __init__(self, found: All) -> None:
        self.found, self.speeds = found, speeds(found)
        self.rows = {name: data["rows"] for name, data in found.items()}

    def one_pass(self, which: str) -> At:
        return {key: rows for key, rows in self.speeds.items() if key[0] == which}

    def speed(self, which: str, who: str, peer: str, than: str = "slower") -> str:
        return speed_of(self.one_pass(which), who, peer, than)

    def spans(self) -> str:
        sizes, lengths = (sorted({key[i] for key in self.speeds}) for i in (1, 3))
        return f" (N from {lengths[0]} to {lengths[-1]}; D {', '.join(map(str, sizes))})" if lengths else ""

    def short(self) -> str:
        """The Triton kernels against each fused peer, in one sentence a pass."""
        said: dict[str, list[str]] = {}
        for which in PASSES:
            for peer in ("cuDNN", "FlexAttention", "FlashAttention-2"):
                with contextlib.suppress(Missing):
                    v = over(self.one_pass(which), "triton", peer).values()
                    text = f"{statistics.median(v):.2f} times that of {peer} (slower at"
                    said.setdefault(which, []).append(f"{text} {share(sum(x < 1 for x in v), len(v))} shapes)")
        parts = "; ".join(some(f"{which} it is {listed(x)}" for which, x in said.items()))
        best = [row["FlexAttention"].get("name") for row in self.one_pass("forward").values() if "FlexAttention" in row]
        flash = share(sum(name == "FlexAttention, FLASH" for name in best), len(best))
        return (
            f"**In short**, the speed of our Triton kernels at the median shape: {parts}. FlexAttention is taken at "
            f"its best: forward, at {flash} shapes, that is its backend FLASH, the kernel of FlashAttention-4."
        )

    def one_head(self) -> list[tuple[str, list[str]]]:
        """Of the shapes of published/triton_vs_torch.csv: dtype, and in which pass eager PyTorch is faster."""
        rows = where(self.rows["industrial"], part="published")
        said: dict[str, list[str]] = {}
        for dtype in ("f32", "bf16"):
            for which in PASSES:
                with contextlib.suppress(Missing):
                    at = by(where(rows, dtype=dtype, **{"pass": which}), "D", "N")
                    text = f"{which} it {faster_than_ours(over(at, 'triton', 'eager'))}"
                    said.setdefault(_LONG[dtype], []).append(text)
        return some(said.items())

    def sizes_below(self, ratios: Mapping[tuple, float]) -> list[int]:
        return sorted({key[1] for key, x in ratios.items() if x < 1})

    def fa2_twice(self) -> list[float]:
        """FlashAttention-2's speed beside the last CUDA kernel, over that in the tables."""
        wanted: Row = {"part": "final", "table": "big", "inputs": "randn", "N": set(LENGTHS), "D": set(HEAD_DIMS)}
        at = by(where(self.rows["mma"], name="fa2", **wanted), "pass", "D", "causal", "N")
        both = ((at[key]["fa2"], self.speeds.get(key, {}).get("FlashAttention-2", {})) for key in at)
        return some(a["tflops"] / b["tflops"] for a, b in both if "tflops" in b)

    def ablations(self) -> list[Row]:
        """The kernel without one idea, the slowest first."""
        rows = [r for r in where(self.rows["ablation"], **_AT) if r["name"] not in ("fa2", "p9_flash")]
        return some(sorted(rows, key=lambda r: r["vs_whole"]))

    # ---- phase 11
    def hopper_means(self) -> Row:
        data = self.found["hopper"]
        held = some(s for s in hopper_results.standings(data) if s.ratio)
        worst = min(held, key=lambda s: s.ratio)
        without = [s for s in held if "ms" not in s.rows.get(hopper_jobs.FA4, {})]
        beside = [s.ratio for s in held if s not in without]
        mean = f"{hopper_results.geometric_mean(beside):.2f}" if beside else ""
        counts = zip(("n", "ahead", "beyond", "behind"), hopper_results.against_best(data), strict=True)
        means = hopper_results.mean_table(data)
        return dict(
            zip(means.columns, means.rows[-1], strict=True), **dict(counts), worst=worst.said, without=len(without),
            sizes=sorted({s.job["shape"][3] for s in without}), beside=beside, mean_beside=mean,
        )  # fmt: skip

    def hopper_goals(self) -> list[bool]:
        some(self.rows["hopper"])
        return [verdict.said.startswith("met") for verdict in hopper_results.verdicts(self.found["hopper"])]

    def costs(self) -> tuple[list[str], list[float], list[float]]:
        """The inputs on which it is behind the best peer somewhere; its speed over that one there, and elsewhere."""
        at = hopper_results.input_rows(self.found["hopper"])
        made = {key: x for key, rows in at.items() if (x := Standing({}, rows).ratio)}
        kinds = list(dict.fromkeys(kind for (kind, _, _), x in made.items() if x < 1))
        slow, fast = ([x for (kind, _, _), x in made.items() if (kind in kinds) == held] for held in (True, False))
        return [f"*{kind}*" for kind in kinds], slow, fast

    def widest_error(self) -> tuple[float, str, int, bool]:
        """Our largest error over that of the best peer, and where; Missing where it is nowhere much larger."""
        wide = [
            (1 / accuracy, *key)
            for part in ("inputs", "captured")
            for key, rows in hopper_results.input_rows(self.found["hopper"], part).items()
            if (accuracy := Standing({}, rows).accuracy)
        ]
        return max(some(x for x in wide if x[0] > 1.2))

    def captured(self) -> list[tuple[str, list[float], list[float], list[float], list[float]]]:
        """Of each model: the share of doubted tiles of each layer; of the layers that were timed, our speed over the
        best peer's, the same by single rounds, and over our kernel's that does not trust."""
        at = hopper_results.input_rows(self.found["hopper"], "captured")
        said = []
        for model in hopper_inputs.LAYERS:
            layers = [rows for key, rows in at.items() if key[0].startswith(model)]
            timed = [(r, r[hopper_jobs.OURS], r[best]) for r in layers if (best := hopper_results.best_of(r))]
            rounds = [x for _, ours, best in timed for x in hopper_results.spread(ours, best)]
            looks = [r[n]["ms"] / ours["ms"] for r, ours, _ in timed for n in r if n.endswith("TRUST=0")]
            doubts = [hopper_results.doubted(r[hopper_jobs.OURS]) for r in layers]
            said.append((model, doubts, [best["ms"] / ours["ms"] for _, ours, best in timed], rounds, looks))
        return some(each for each in said if each[1])

    def clocks(self) -> tuple[list[str], float, dict[str, str]]:
        """Of each kernel alone: clock and speed on random numbers and on zeros; the highest clock; the watts."""
        rows = [r for r in where(self.rows["hopper"], part="clock", D=SHAPE[3]) if r.get("clock")]
        words = {hopper_jobs.OURS: "our kernel", "cuDNN": "cuDNN", "matmul": "a product of matrices"}
        at = {(r["name"], r["inputs"]): (f"{r['clock']['median']:.0f} MHz", f"{r['tflops']:.0f}") for r in rows}
        said = []
        for name, what in words.items():
            if {(name, "random"), (name, "zeros")} <= at.keys():
                (mhz, speed), (still, most) = at[name, "random"], at[name, "zeros"]
                said.append(f"{what} at {mhz} ({speed} TFLOP/s; on zeros {still}, {most})")
        drawn = {kind: [r["clock"]["watts"] for r in where(rows, inputs=kind)] for kind in ("random", "zeros")}
        ends = {kind: dict.fromkeys(f"{x:.0f}" for x in (min(some(w)), max(w))) for kind, w in drawn.items()}
        watts = {kind: " to ".join(both) for kind, both in ends.items()}
        return said, max(some(r["clock"]["max"] for r in rows)), watts

    def forms(self) -> tuple[int, list[int]]:
        """Of how many shapes more forms of FlexAttention than one were timed, and their head sizes."""
        rows = [r for r in where(self.rows["industrial"], part="flex") if "ms" in r]
        return len({(*r["shape"], r["causal"]) for r in rows}), sorted({r["shape"][3] for r in rows})

    # ---- phase 10
    def layer_ms(self, scope: str) -> list[str]:
        words = {layer.OURS: "with our kernels", layer.APART: "with our attention alone, and RoPE as PyTorch's",
                 layer.SDPA: "with PyTorch's SDPA", layer.ORIGINAL: "with the scores in memory"}  # fmt: skip
        took = layer.times(self.found["layer"], "present", scope, "both")
        return [f"{took[name]:.1f} ms {what}" for name, what in words.items() if name in took]

    def compiled_layer(self) -> float:
        return some([layer.ratio(self.found["layer"], "present", "SDPA, compiled", layer.OURS, which="both")])[0]

    def training(self, peer: str, dtype: str) -> list[float | None]:
        return [lm.ratio(self.found["lm"], size, LM, peer, dtype=dtype) for size in lm.SIZES]

    def largest_steps(self) -> str:
        data = self.found["lm"]
        size = some(size for size in lm.SIZES if lm.passes(data, size, LM))[-1]
        steps = {words: lm.passes(data, size, way) for way, words in ((LM, ""), ("sdpa", " with SDPA"))}
        return f"{size}: " + listed(f"{x['step']['ms']:.0f} ms{words}" for words, x in steps.items() if x)

    def exchanged(self) -> list[str]:
        """What was exchanged for ours in turns in one process, and the step's speed over SDPA's."""
        said = []
        for what in ("attention and RoPE", "attention alone"):
            spans = []
            for column, how in (("ms", "launched by Python"), ("graph_ms", "as one CUDA graph")):
                with contextlib.suppress(Missing):
                    ratios = [lm.exchanged(self.found["lm"], size, column).get(what) for size in lm.SIZES]
                    spans.append(f"{span(ratios)} {how}")
            said += [f"{what} {listed(spans)}"] if spans else []
        return some(said)

    def by_length(self, way: str) -> list[str]:
        """How many times as fast as SDPA's a step is as one CUDA graph with this attention, by length of the texts."""
        of_sizes = [lm.by_length(self.found["lm"], size) for size in lm.SIZES]
        gains = {n: [of[n]["sdpa"] / of[n][way] for of in of_sizes if way in of.get(n, {})] for n in lm.LENGTHS}
        return some(f"{span(found)} with {b} × {n} tokens" for (b, n), found in gains.items() if found)

    def runs_out(self) -> list[str]:
        called = {"eager": "eager attention", "sdpa": "SDPA", "flash": "ours"}
        return [f"{n} tokens with {called[way]}" for way, n in lm.runs_out(self.found["lm"]).items() if n]

    def counters(self) -> list[bool]:
        """Of each counter of the emulator that was set beside Nsight Compute's: whether the two are equal."""
        return some(a == b for r in where(self.rows["validation"], part="kernels") for a, b in r["counters"].values())


LM = "flash, fused RoPE"


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
                when += f", commit{'s' * (len(commits) > 1)} {listed([f'`{c}`' for c in commits])}"
            kinds.setdefault(what, {}).setdefault(when, []).append(name)
    if not kinds:
        return "Nothing is recorded yet."
    lines = [
        f"{versions}. Records: {'; '.join(f'{listed(names)} of {when}' for when, names in whens.items())}."
        for versions, whens in kinds.items()
    ]
    said = "Measured on " + " And on ".join(lines)
    if clocks:
        said += f" Over whole runs, pauses included, the median of the SM clock was {min(clocks):.0f} to "
        said += f"{max(clocks):.0f} MHz; under a kernel that runs for long it is lower."
    left = [f"{n} of {name}" for name in RECORDS if (n := found[name].get("left"))]
    return said + (f" Measurements that are still to be made: {listed(left)}." if left else "")


# ---- the figure ------------------------------------------------------------------------------------------------------
def drawn(found: All) -> dict[str, Any]:
    """All that the figure shows: bars, lines by panel, and titles."""
    bars = [
        [f"{r.phase} · {r.words}" if r.phase else r.words, r.look, round(r.tflops, 3)]
        for r in ladder(found) if r.tflops is not None
    ]  # fmt: skip
    plots = {}
    for which, title in PASSES.items():
        at = [(key[3], rows) for key, rows in sorted(speeds(found).items()) if key[:3] == (which, SHAPE[3], True)]
        lines = {who: [[n, round(rows[who]["tflops"], 3)] for n, rows in at if "tflops" in rows.get(who, {})]
                 for who in COLUMNS if who != "CUDA"}  # fmt: skip
        plots[f"{title}, D = {SHAPE[3]}, causal"] = {who: line for who, line in lines.items() if line}
    gpu = next((found[name]["machine"]["gpu"] for name in RECORDS if found[name]["rows"]), "no GPU yet")
    title = f"Forward pass on one {gpu}, D = {SHAPE[3]}"
    return {"bars": bars, "plots": plots, "names": COLUMNS, "title": title}


def digest(data: Mapping[str, Any]) -> str:
    """What the figure's file says of what it shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def draw(data: Mapping[str, Any]) -> bytes:
    """The figure as SVG, with the digest of its data in it."""
    import matplotlib
    import matplotlib.pyplot as plt

    from flashlab.figures import panels, show

    with matplotlib.rc_context({"svg.hashsalt": "flashlab", "svg.fonttype": "path"}):
        show.style()
        figure = panels.results(data["bars"], data["plots"], data["names"], data["title"])
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


# ---- the pages -------------------------------------------------------------------------------------------------------
CAPTION = """*More is better. Left: the rungs of the course, each with the number of its phase, and the peers; blue and
pink are the course's kernels. Most are measured at batch 4, 16 heads, N = 4096. Phase 11 and FlashAttention-4 were
measured in another run than the other peers. Right: from short sequences to long ones.*"""


def laid(name: str, found: All) -> str:
    """docs/NAME.jinja with its numbers, in lines that a diff can show; a paragraph that lacks one, or asks for what is
    not recorded, is left out."""
    questions = Questions(found)
    asked = {key: getattr(questions, key) for key in dir(Questions) if key[0] != "_"}
    tables = (best_table, decode_table, hopper_table, input_table, ladder_table, ring_table, table)
    asked |= {make.__name__: functools.partial(make, found) for make in tables}
    asked |= {
        f.__name__: f for f in (mma.summary, span, share, speed_of, faster_than_ours, where, by, over, some, min, max)
    }
    asked |= {"machine": lambda: machine_words(found), "alternative": alternative(drawn(found)), "caption": CAPTION}
    asked |= {"found": found, "rows": questions.rows, "fa4": found["hopper"].get("flash_attention_4", "not there")}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters["listed"] = listed
    text = ""
    for part in (ROOT / "docs" / f"{name}.jinja").read_text("utf-8").strip().split("\n\n"):
        with contextlib.suppress(Missing, jinja2.UndefinedError):
            if not (said := _wrapped(environment.from_string(part).render(asked).strip())):
                continue
            text += ("\n" if said.startswith("- ") and text.rsplit("\n\n")[-1].startswith("- ") else "\n\n") + said
    return text.strip()


def _wrapped(part: str) -> str:
    """A paragraph, or each line of a list, in lines that a diff can show; tables, pictures and headings as they are."""
    if part[:1] in "|!<#":
        return part
    fill = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in re.split(r"\n(?=- )", part):
        fill.subsequent_indent = "  " if line.startswith("- ") else ""
        lines.append(fill.fill(" ".join(line.split())))
    return "\n".join(lines)


def made(root: Path, found: All) -> dict[str, str]:
    """The two pages, by their path in the checkout. Raises ValueError where README.md lacks the marks."""
    text = (root / "README.md").read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md must have the lines {BEGIN} and {END} once each, in this order")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    readme = f"{before}{BEGIN}\n\n{laid('readme.md', found)}\n\n{END}{after}"
    return {"README.md": readme, "docs/results.md": laid("results.md", found) + "\n"}


def stale(root: Path = ROOT, folder: Path | None = None) -> list[str]:
    """What does not agree with the records: a sentence for each file, which names the command; [] if all does."""
    found, said = load(folder), []
    for name, new in made(root, found).items():
        text = (root / name).read_text("utf-8") if (root / name).exists() else ""
        if new != text:
            line = next((a for a, b in zip(text.splitlines(), new.splitlines(), strict=False) if a != b), "its end")
            said.append(f"{name} is not what the records say, from the line {line[:90]!r} on: run `{COMMAND}`")
    figure = root / "docs" / "results.svg"
    held = re.search(r"data ([0-9a-f]{16})", figure.read_text("utf-8")) if figure.exists() else None
    if held is None or held[1] != digest(drawn(found)):
        said.append(f"docs/results.svg was not drawn from the records as they are: run `{COMMAND}`")
    return said


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, folder: Path | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where they are out of date")
    given = parser.parse_args(arguments)
    if not (root / "README.md").exists():
        raise SystemExit(f"there is no README.md in {root}: this command belongs to a checkout of the course")
    if given.check:
        raise SystemExit("\n".join(stale(root, folder)) or None)
    found = load(folder)
    pages = {name: text.encode() for name, text in made(root, found).items()}
    pages["docs/results.svg"] = draw(drawn(found))  # all of them, before one is written
    for name, content in pages.items():
        records.write_whole(root / name, content)
        print(f"written: {name}")
