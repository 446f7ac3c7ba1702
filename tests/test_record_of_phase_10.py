"""Lecture 10 reads the records of layer, lm and attention: with none, with whole ones, and with a half of each.

The records here are a stand-in's: their times say nothing.
"""

from __future__ import annotations

import math
import random

import matplotlib
import matplotlib.pyplot as plt
import pytest
from lesson_source import find_lessons, make_notebook, read_lesson
from pacing import ROOT

from flashlab.bench import attention, layer, lm, roofline

MACHINE = {"gpu": "NVIDIA Stand-in", "target": "sm_90", "date": "2000-01-01"}
TIMED = {"ms": 2.0, "fastest": 1.9, "slowest": 2.1, "rounds": 9}
OOM = {"unavailable": "out of memory: Tried to allocate 1 TiB"}
READS = ("layers.", "lm.", "model_data", "attention_runs", "roofline.", "roofs", "points[gpu]")


def of_the_layer(job):
    if job["part"] in ("time", "compiled"):
        names = layer.names_of(job["part"], job["scope"])
        rows = [job | {"name": n} | TIMED | {"peak_bytes": 2**30, "difference": 0.0, "replaced": False} for n in names]
        return [*rows[:-1], {k: v for k, v in rows[-1].items() if k not in TIMED} | OOM]
    if job["part"] == "timeline":
        events = [["void softmax<float>", 0.0, 5.0, "stream 7"], ["rope_kernel", 6.0, 2.0, "stream 7"]]
        return [
            job | {"span_us": 9.0, "kernels": 2, "left_out": 0, "events": [*events, ["aten::mm", 0, 3, "thread 1"]]}
        ]
    rows = [("aten::bmm", False), ("ampere_sgemm_128x128_nn", True), ("aten::softmax", False)]
    numbers = dict.fromkeys(("device_ms", "self_device_ms", "cpu_ms", "self_cpu_ms"), 3.0)
    numbers |= dict.fromkeys(("device_bytes", "self_device_bytes", "cpu_bytes"), 2**20)
    about = {"runs": 100, "calls": 200, "flops": None, "total_ms": 9.0}
    return [job | {"op": op, "kernel": kernel} | numbers | about for op, kernel in rows]


def of_the_model(job):
    if job["part"] == "step":
        if job["size"] == "xl" and job["attention"] == "eager":
            return [job | {"name": "all"} | OOM]
        more = {"warm_up_ms": [90.0, 3.0, 2.0, 2.0, 2.0], "fresh": False, "replaced": False, "tokens": 4096}
        passes = (*lm.PASSES, "step", "forward only")
        return [job | {"pass": which} | TIMED | more | {"peak_bytes": 2**33, "held_bytes": 2**31} for which in passes]
    if job["part"] == "turns":
        more = {"graph_ms": 1.5, "warm_up_ms": [90.0, 3.0], "replaced": False}
        both = (False, True) if job["what"] == "compiled" else (False,)
        ways = [(way, how) for way in lm.TURNS[job["what"]] for how in both]
        return [job | {"attention": way, "compiled": how} | TIMED | more for way, how in ways]
    if job["part"] == "memory":
        curve = {"us": [0.0, 1e3, 2e3], "bytes": [2**30, 2**32, 2**30], "ends": {"forward": 1e3, "backward": 2e3}}
        return [job | curve | {"peak_bytes": 2**32, "drift": 0}]
    if job["part"] == "limit":
        rows = [job | {"seq_len": n, "peak_bytes": n * 2**20, "once_ms": 1.0} for n in (1024, 2048)]
        return [*rows, job | {"seq_len": 4096} | OOM]
    return [job | {"losses": [5.5 - 0.01 * i + job["jitter"] for i in range(lm.STEPS)], "seconds": 9.0}]


def of_attention(job):
    if job["seq_len"] > 8192:
        return [job | {"pass": which, "name": "eager"} | OOM for which in attention.PASSES]
    held = {"held_bytes": job["seq_len"] * 2**12, "saved_bytes": 1}
    return [
        job | {"pass": which, "name": name} | TIMED | (held if which == "forward" else {})
        for which in attention.PASSES for name in attention.NAMES
    ]  # fmt: skip


def record(bench, rows_of, keep=1.0):
    done = [job for job in bench.jobs() if random.Random(str(job)).random() < keep]
    return {
        "machine": MACHINE,
        "left": len(bench.jobs()) - len(done),
        "rows": [row for j in done for row in rows_of(j)],
    }


def records(keep):
    made = ((layer, of_the_layer), (lm, of_the_model), (attention, of_attention))
    return {bench: record(bench, rows_of, keep) for bench, rows_of in made}


@pytest.fixture(scope="module")
def cells():
    """The imports of lecture 10, and the cells that read a record."""
    (path,) = (p for p in find_lessons(ROOT, ["10"]) if not p.stem.endswith("_exercises"))
    notebook, _ = make_notebook(read_lesson(path), "notebooks", ROOT)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    needed = [source for source in code if source.startswith("def ms(")]  # reads a profile's times
    return [code[0], *needed], [source for source in code[1:] if any(word in source for word in READS)]


@pytest.mark.parametrize("keep", [None, 1.0, 0.5])
def test_the_cells_that_read_the_record(cells, keep, monkeypatch, capsys):
    matplotlib.use("Agg")
    made = {} if keep is None else records(keep)
    for bench in (layer, lm):
        monkeypatch.setattr(bench, "record", lambda b=bench: made.get(b, {"rows": [], "machine": {"gpu": None}}))
    monkeypatch.setattr(attention, "recorded", lambda: [made[attention]] if made else [])
    first, reading = cells
    assert len(reading) >= 15
    space: dict = {}
    shown: list = []
    rows = layer.published.load("gqa_layer_profile")
    space["profile_of"] = {which: [r for r in rows if r["layer"] == which] for which in ("original", "flash")}
    for source in first:
        exec(source, space)
        if "show" in space and not shown:
            monkeypatch.setattr(space["show"], "display", shown.append)
            space["display"] = lambda *tables: shown.extend(tables)
    for source in reading:
        exec(source, space)
    figures = len(plt.get_fignums())
    plt.close("all")
    out = capsys.readouterr().out
    rooflines = len(roofline.recorded())
    if keep is None:
        assert figures == rooflines and "not measured yet" in out and "times as fast" not in out
    elif keep == 1.0:
        # the layer's timeline, steps by size, the memory of a step, two loss curves, two of attention alone
        assert figures == rooflines + 7 and "ours is not measured yet" not in out
        assert "times as fast as original" in out.replace("(", "") and "out of memory at 4096" in out
    assert all(repr(table) for table in shown)


def test_what_the_page_says_of_python_and_of_graphs_is_in_the_record():
    data = lm.record()
    by_python, graph = ([lm.exchanged(data, size, column) for size in lm.SIZES] for column in ("ms", "graph_ms"))
    assert all(
        waiting[what] < kernels[what] for waiting, kernels in zip(by_python, graph, strict=True) for what in waiting
    )
    assert all(0.97 < found["attention alone"] < 1 < 1.05 < found["attention and RoPE"] for found in graph)
    for column in ("ms", "graph_ms"):
        assert lm.quickest(data, "medium", column)[:2] == ("sdpa", True)
    compiled = lm.turns(data, "medium", "compiled")
    by_python, graph = ({way: row[c] for (way, how), row in compiled.items() if how} for c in ("ms", "graph_ms"))
    assert by_python["eager"] < by_python["flash"] and graph["eager"] > max(graph["flash"], graph["sdpa"])


def test_the_roofline_has_every_kernel_below_its_ceiling():
    for run in roofline.recorded():
        ceilings, found = roofline.ceilings(run), roofline.points(run)
        names = [p.name for p in found]
        assert {"naive PyTorch", "minimal Triton kernel", "p6_1_fa1", "p7_naive", "p9_flash"} <= set(names)
        phases = [p.phase or 99 for p in found]
        assert len(names) == len(set(names)) and phases == sorted(phases)
        for p in found:
            assert 0 < p.share(ceilings) < 1, p
        if run["machine"]["gpu"] == "NVIDIA H200":  # all roofs at one clock: the documented rate is the H100's 989
            assert ceilings.units[roofline.WGMMA] == pytest.approx(989 * 1980 / 1830, rel=2e-3)  # TFLOP/s at 1830 MHz
            assert 0.6 < ceilings.units[roofline.MMA] / ceilings.units[roofline.WGMMA] < 0.7
            assert 0.8 < ceilings.memory / 4.8 < 1  # of the datasheet's


def test_a_point_counts_what_has_to_move():
    row = {"part": "ladder", "name": "p9_flash", "shape": [2, 3, 1024, 64], "dtype": "fp16", "ms": 1.0}
    fused = roofline._point("mma", row, {"p9": (9, "a")}, roofline.WGMMA)
    assert fused.unit == roofline.MMA
    assert fused.tflops == pytest.approx(4 * 6 * 1024**2 * 64 / 1e9) and fused.intensity == 1024 / 2
    whole = roofline._point("scalar", row | {"shape": [1, 1, 1024, 64], "dtype": "f32"}, {"p9": (6, "b")}, "")
    assert whole.intensity == 1024 / 4
    slow = roofline.Ceilings("gpu", 2.0, {roofline.MMA: 100.0}, ())
    assert slow.at(10, roofline.MMA) == 20 and slow.at(1000, roofline.MMA) == 100
    assert math.isclose(fused.share(slow), fused.tflops / 100)
