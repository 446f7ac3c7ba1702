"""Which rows of published tables have been measured here too, and theirs beside ours.

A published figure is one number of one row. Its counterpart is what a record of this package has of the same function
on the same shape: a number, or in words why there is none. UNLIKE names the tables where it is not the same work.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flashlab.bench import layer, lm, published, records
from flashlab.bench.mma import STAGES_ADA
from flashlab.bench.rows import Row, where
from flashlab.table import Table


class Figure(NamedTuple):
    """A published figure: which one of its row it is, and its value: ms, 10^6 bytes where `label` says mb, "OOM"."""

    label: str
    value: Any


class Ours(NamedTuple):
    """Its counterpart: the value in the same unit, or why there is none; the record; the first outputs where kept."""

    value: float | str
    record: str
    gpu: str
    first: tuple[float, ...] = ()


Found = tuple[Figure, "Ours | None"]


class Asked(NamedTuple):
    """Where a counterpart is: in the first row of a part with these items, its column times a unit, or `instead`."""

    bench: str
    part: str
    wanted: Row
    column: str = "ms"
    unit: float = 1.0
    instead: str = ""


def _found(asked: Asked, runs: Iterable[Row]) -> Ours | None:
    """The counterpart, or why it has none, in one of the runs."""
    for data in runs:
        gpu = data["machine"]["gpu"]
        for row in where(data["rows"], part=asked.part, **asked.wanted):
            value = row[asked.column] * asked.unit if asked.column in row else None
            said = row.get("unavailable") if value is None else asked.instead or value
            if said is not None:
                return Ours(said, records.default_path(asked.bench, gpu).name, gpu, tuple(row.get("first", ())))
    return None


# ---- a rule for each table: of a row its figures: a label, the value, and where its counterpart is -------------------
Figures = Iterator[tuple[str, Any, list[Asked]]]
_SHAPE = ("batch", "heads", "seq_len", "head_dim")


def _mma_stages_ada(row: Row) -> Figures:
    shape, variant = [row[c] for c in _SHAPE], str(row["variant"])
    wanted = {"shape": shape, "name": STAGES_ADA[variant]}
    asked = [Asked("mma", "published", wanted)]
    if variant in ("naive_unfused", "flash_official"):  # measured beside the last step too
        asked.append(Asked("mma", "final", wanted | {"table": "mma_stages_ada"}))
    yield f"{'x'.join(map(str, shape))} {variant}", row["ms"], asked


def _fa1_f32_fa2_mma_ada(row: Row) -> Figures:
    float32 = {"fa1_f32": "p6_1_fa1", "torch_naive_f32": "torch_naive_f32"}
    float16 = {"fa2_mma_f16": "p9_flash", "torch_naive_f16": "unfused"}
    about, variant = {c: row[c] for c in _SHAPE} | {"causal": False}, str(row["variant"])
    shape = [row[c] for c in _SHAPE]
    wanted = {"shape": shape, "causal": False, "inputs": "randn", "table": "fa1_f32_fa2_mma_ada"}
    yield f"{'x'.join(map(str, shape))} {variant}", row["ms"], [
        Asked("scalar", "shapes", about | {"variant": float32[variant]}) if variant in float32
        else Asked("mma", "final", wanted | {"name": float16[variant]})
    ]  # fmt: skip


def _triton_vs_torch(row: Row) -> Figures:
    about = {"shape": [1, 1, row["seq_len"], row["d_model"]], "dtype": row["precision"]}
    for who, name in (("torch", "eager"), ("triton", "triton")):
        for short, which in (("fwd", "forward"), ("bwd", "backward"), ("fwd_bwd", "both")):
            label = f"N {row['seq_len']} D {row['d_model']} {row['precision']} {who} {which}"
            asked = Asked("industrial", "published", about | {"pass": which, "name": name})
            yield label, row[f"{who}_{short}_ms"], [asked]


def _attention_memory(row: Row) -> Figures:
    wanted = {"d_model": row["d_model"], "seq_len": row["seq_len"], "dtype": "float32", "name": "eager"}
    for kind, which, column, unit in (
        ("fwd_ms", "forward", "ms", 1.0), ("bwd_ms", "backward", "ms", 1.0),
        ("mem_before_mb", "forward", "held_bytes", 1e-6),
    ):  # fmt: skip
        asked = Asked("attention", "attention", wanted | {"pass": which}, column, unit)
        yield f"D {row['d_model']} N {row['seq_len']} {kind}", row[kind], [asked]


def _lm_forward_backward(row: Row) -> Figures:
    for column in ("forward", "backward"):
        if (seconds := row[f"avg_{column}_s"]) is not None:
            model = {"size": lm.SIZE_NAMES[str(row["model"])], "attention": "eager", "dtype": "float32"}
            asked = Asked("lm", "step", model | {"pass": "forward only" if row["run"] == "forward_only" else column})
            yield f"{row['run']} {row['model']} {column}", 1e3 * float(seconds), [asked]


def _gqa_layer_profile(row: Row) -> Figures:
    """Totals of 100 runs, there and here. An operation that our profile does not have was not called; a kernel of
    another GPU or compiler has another name, and then it is our kernels that answer it."""
    profile = {"case": "published", "pass": "forward", "layer": layer.PUBLISHED_LAYERS[str(row["layer"])]}
    op = layer.OUR_KERNEL if row["op"] == "flash_attentionv2_kernel" else str(row["op"])
    called = op.startswith(("aten::", "cuda"))
    other = "not called" if called else "by other kernels"
    yield (
        f"{row['layer']} {row['op']}",
        layer.milliseconds(row["cuda_total"]),
        [
            Asked("layer", "profile", profile | {"op": op}, "device_ms"),
            Asked("layer", "profile", profile | {"kernel": not called}, "runs", instead=other),
        ],
    )


RULES: dict[str, Callable[[Row], Figures]] = {
    "mma_stages_ada": _mma_stages_ada,
    "fa1_f32_fa2_mma_ada": _fa1_f32_fa2_mma_ada,
    "triton_vs_torch": _triton_vs_torch,
    "attention_memory": _attention_memory,
    "lm_forward_backward": _lm_forward_backward,
    "gqa_layer_profile": _gqa_layer_profile,
}
"""By table: the figures of one of its rows."""
UNLIKE = {
    "fa1_f32_fa2_mma_ada": "fa2_mma_f16 is answered by p9_flash, a later kernel than theirs",
    "triton_vs_torch": "their triton backward pass is compiled PyTorch, ours is Triton",
    "attention_memory": "their batch is not told; ours is 8, which explains their memory",
    "lm_forward_backward": "their batch, length and vocabulary are not told",
    "gqa_layer_profile": "their heads are not told; ours explain their memory",
}
"""By table: what is not the same on both sides, or not known, beside the GPU. Else function, shape and dtype are."""


def counterparts(name: str) -> list[Found]:
    """Every figure of a published table, with its counterpart in the records or None. Raises KeyError."""
    runs = functools.cache(records.recorded)
    return [
        (Figure(label, value), next(filter(None, (_found(a, runs(a.bench)) for a in several)), None))
        for row in published.load(name)
        for label, value, several in RULES[name](row)
    ]


# ---- told ------------------------------------------------------------------------------------------------------------
def overview() -> Table:
    """Of each table: its figures, those that have a counterpart, those whose counterpart is a number, in which records,
    and what is not the same; the last row is all of them."""
    rows: list[list[Any]] = []
    for name in RULES:
        found = counterparts(name)
        ours = [o for _, o in found if o is not None]
        files = ", ".join(sorted({o.record for o in ours})) or "none yet"
        rows.append(
            [name, len(found), len(ours), sum(not isinstance(o.value, str) for o in ours), files, UNLIKE.get(name, "")]
        )
    rows.append(["all", *(sum(row[i] for row in rows) for i in (1, 2, 3)), "", ""])
    columns = ["published table", "figures", "answered", "by a number", "records", "not the same"]
    return Table.of(rows, columns, align="lrrrll")


def beside(name: str) -> Table:
    """A table's figures, theirs beside ours, with the first values of our output where the record has them."""
    rows = []
    for figure, ours in counterparts(name):
        first = " ".join(f"{x:.4f}" for x in ours.first) if ours else ""
        rows.append([figure.label, _text(figure.value), "not measured" if ours is None else _text(ours.value), first])
    gpus = sorted({ours.gpu for _, ours in counterparts(name) if ours})
    caption = f"there: see published/README.md; here: {', '.join(gpus) or 'nothing yet'}"
    columns = ["what", "there", "here", "first outputs here"]
    if not any(row[3] for row in rows):
        rows, columns = [row[:3] for row in rows], columns[:3]
    return Table.of(rows, columns, align="lrrl"[: len(columns)], caption=caption)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).partition(":")[0]
