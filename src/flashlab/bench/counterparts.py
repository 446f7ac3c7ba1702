"""Which rows of published tables have been measured here too, and theirs beside ours.

A published figure is one number of one row. Its counterpart is what a record of this package has of the same function
on the same shape: a number, or in words why there is none. UNLIKE names the tables where it is not the same work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.bench import layer, lm, published, records
from flashlab.bench.mma import STAGES_ADA
from flashlab.bench.rows import where
from flashlab.table import Table

Row = dict[str, Any]


class Figure(NamedTuple):
    """A published figure: its table, which one it is, and its value: ms, 10^6 bytes where `label` says mb, "OOM"."""

    table: str
    label: str
    value: Any


class Ours(NamedTuple):
    """Its counterpart: the value in the same unit, or why there is none; the record; the first outputs where kept."""

    value: float | str
    record: str
    gpu: str
    first: tuple[float, ...] = ()


Found = tuple[Figure, "Ours | None"]
_OF_ROWS = ("name", "variant", "pass", "op", "kernel")  # what the rows of one job differ in


class Records:
    """The records of a folder, read once each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[str, list[tuple[str, Row]]]()

    def of(self, name: str) -> list[tuple[str, Row]]:
        """(file, record) of every run of a bench."""
        if name not in self._read:
            paths = sorted(self._folder.glob(f"{name}_*.json"))
            self._read[name] = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        return self._read[name]

    def find(self, bench: str, part: str, wanted: Row, column: str = "ms", unit: float = 1.0) -> Ours | None:
        """Of the first row with the items `wanted`: its `column` times `unit`, or why it has none."""
        for file, data in self.of(bench):
            for row in where(data["rows"], part=part):
                whole = row.get("name") == "all"  # a job that failed stands for all that it would have measured
                if all(
                    row.get(k) == v or (whole and k in _OF_ROWS and row.get(k) in (None, "all"))
                    for k, v in wanted.items()
                ):
                    said = row[column] * unit if column in row else row.get("unavailable")
                    if said is not None:
                        return Ours(said, file, data["machine"]["gpu"] or "a CPU", tuple(row.get("first", ())))
        return None


# ---- a rule for each table -------------------------------------------------------------------------------------------
def _mma_stages_ada(found: Records) -> Iterator[Found]:
    for row in published.load("mma_stages_ada"):
        shape = [row[c] for c in ("batch", "heads", "seq_len", "head_dim")]
        variant = str(row["variant"])
        wanted = {"shape": shape, "name": STAGES_ADA[variant]}
        ours = found.find("mma", "published", wanted)
        if ours is None and variant in ("naive_unfused", "flash_official"):  # measured beside the last step too
            ours = found.find("mma", "final", wanted | {"table": "mma_stages_ada"})
        yield Figure("mma_stages_ada", f"{'x'.join(map(str, shape))} {variant}", row["ms"]), ours


def _fa1_f32_fa2_mma_ada(found: Records) -> Iterator[Found]:
    float32 = {"fa1_f32": "p6_1_fa1", "torch_naive_f32": "torch_naive_f32"}
    float16 = {"fa2_mma_f16": "p9_flash", "torch_naive_f16": "unfused"}
    for row in published.load("fa1_f32_fa2_mma_ada"):
        about = {c: row[c] for c in ("batch", "heads", "seq_len", "head_dim")}
        shape, variant = list(about.values()), str(row["variant"])
        if variant in float32:
            ours = found.find("scalar", "shapes", about | {"causal": False, "variant": float32[variant]})
        else:
            wanted = {"shape": shape, "causal": False, "inputs": "randn", "name": float16[variant]}
            ours = found.find("mma", "final", wanted | {"table": "fa1_f32_fa2_mma_ada"})
        yield Figure("fa1_f32_fa2_mma_ada", f"{'x'.join(map(str, shape))} {variant}", row["ms"]), ours


def _triton_vs_torch(found: Records) -> Iterator[Found]:
    passes = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "both"}
    for row in published.load("triton_vs_torch"):
        shape = [1, 1, row["seq_len"], row["d_model"]]
        for who, name in (("torch", "eager"), ("triton", "triton")):
            for short, which in passes.items():
                wanted = {"shape": shape, "dtype": row["precision"], "pass": which, "name": name}
                label = f"N {row['seq_len']} D {row['d_model']} {row['precision']} {who} {which}"
                ours = found.find("industrial", "published", wanted)
                yield Figure("triton_vs_torch", label, row[f"{who}_{short}_ms"]), ours


def _attention_memory(found: Records) -> Iterator[Found]:
    kinds = {"fwd_ms": ("forward", "ms", 1.0), "bwd_ms": ("backward", "ms", 1.0),
             "mem_before_mb": ("forward", "held_bytes", 1e-6)}  # fmt: skip
    for row in published.load("attention_memory"):
        for kind, (which, column, unit) in kinds.items():
            wanted = {"d_model": row["d_model"], "seq_len": row["seq_len"], "dtype": "float32", "name": "eager"}
            ours = found.find("attention", "attention", wanted | {"pass": which}, column, unit)
            yield Figure("attention_memory", f"D {row['d_model']} N {row['seq_len']} {kind}", row[kind]), ours


def _lm_forward_backward(found: Records) -> Iterator[Found]:
    for row in published.load("lm_forward_backward"):
        for column in ("forward", "backward"):
            if row[f"avg_{column}_s"] is not None:
                size, which = lm.SIZE_NAMES[str(row["model"])], lm.PUBLISHED_PASSES[str(row["run"]), column]
                model = {"size": size, "attention": "eager", "dtype": "float32"}
                ours = found.find("lm", "step", model | {"pass": which})
                label = f"{row['run']} {row['model']} {column}"
                yield Figure("lm_forward_backward", label, 1e3 * float(str(row[f"avg_{column}_s"]))), ours


def _gqa_layer_profile(found: Records) -> Iterator[Found]:
    """Totals of 100 runs, there and here. An operation that our profile does not have was not called; a kernel of
    another GPU or compiler has another name, and then it is our kernels that answer it."""
    for row in published.load("gqa_layer_profile"):
        profile = {"case": "published", "pass": "forward", "layer": layer.PUBLISHED_LAYERS[str(row["layer"])]}
        op = str(row["op"])
        if op == "flash_attentionv2_kernel":
            op = layer.OUR_KERNEL
        ours = found.find("layer", "profile", profile | {"op": op}, "device_ms")
        if ours is None:
            ours = found.find("layer", "profile", profile | {"kernel": not op.startswith(("aten::", "cuda"))}, "runs")
            other = "not called" if op.startswith(("aten::", "cuda")) else "by other kernels"
            ours = ours and (ours if isinstance(ours.value, str) else ours._replace(value=other))
        label = f"{row['layer']} {row['op']}"
        yield Figure("gqa_layer_profile", label, layer.milliseconds(row["cuda_total"])), ours


RULES: dict[str, Callable[[Records], Iterable[Found]]] = {
    "mma_stages_ada": _mma_stages_ada,
    "fa1_f32_fa2_mma_ada": _fa1_f32_fa2_mma_ada,
    "triton_vs_torch": _triton_vs_torch,
    "attention_memory": _attention_memory,
    "lm_forward_backward": _lm_forward_backward,
    "gqa_layer_profile": _gqa_layer_profile,
}
"""By table: every figure of it with its counterpart, or None."""
UNLIKE = {
    "fa1_f32_fa2_mma_ada": "fa2_mma_f16 is answered by p9_flash, a later kernel than theirs",
    "triton_vs_torch": "their triton backward pass is compiled PyTorch, ours is Triton",
    "attention_memory": "their batch is not told; ours is 8, which explains their memory",
    "lm_forward_backward": "their batch, length and vocabulary are not told",
    "gqa_layer_profile": "their heads are not told; ours explain their memory",
}
"""By table: what is not the same on both sides, or not known, beside the GPU. Else function, shape and dtype are."""


def counterparts(name: str, folder: Path | None = None) -> list[Found]:
    """Every figure of a published table, with its counterpart in the records or None. Raises KeyError."""
    return list(RULES[name](Records(folder or records.RECORDED)))


# ---- told ------------------------------------------------------------------------------------------------------------
def overview() -> Table:
    """Of each table: its figures, those that have a counterpart, those whose counterpart is a number, in which records,
    and what is not the same; the last row is all of them."""
    rows: list[list[Any]] = []
    for name in RULES:
        found = counterparts(name)
        ours = [o for _, o in found if o is not None]
        files = ", ".join(sorted({o.record for o in ours})) or "none yet"
        rows.append([name, len(found), len(ours), sum(map(is_number, ours)), files, UNLIKE.get(name, "")])
    rows.append(["all", *(sum(row[i] for row in rows) for i in (1, 2, 3)), "", ""])
    columns = ["published table", "figures", "answered", "by a number", "records", "not the same"]
    return Table.of(rows, columns, align="lrrrll")


def is_number(ours: Ours | None) -> bool:
    """Whether a counterpart is a measured number, not the reason why there is none."""
    return ours is not None and not isinstance(ours.value, str)


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
