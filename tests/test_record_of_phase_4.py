"""Lecture 4 reads the record of `flashlab bench industrial`: with none, with a part of one, and with a whole one.

The records here are made up: their times say nothing.
"""

from __future__ import annotations

import itertools
import math
import random

import matplotlib
import matplotlib.pyplot as plt
import pytest
from lesson_source import find_lessons, make_notebook, read_lesson
from pacing import ROOT

from flashlab.attention import gluon_forward, tiles
from flashlab.bench import industrial
from flashlab.table import Table

MACHINE = {"gpu": "NVIDIA Made-up", "date": "2026-01-01", "torch": "2.11", "triton": "3.6", "target": "sm_90"}


def made_up(parts=industrial.PARTS, keep=lambda row: True):
    """A record with every row that the bench has, of times that grow with the work; some tiles do not fit."""
    draw = random.Random(0)
    rows = []
    for job in industrial.jobs(parts):
        if job["part"] == "tune":
            for i, tile in enumerate(tiles.SEARCH[job["kernel"]]):
                row = job | {"tile": list(tile)}
                rows.append(row | ({"unavailable": "too large"} if i % 11 == 5 else {"ms": draw.uniform(0.7, 3.0)}))
            continue
        names = {
            "shapes": [industrial.OURS, industrial.BOXES, industrial.GLUON, *industrial.PEERS],
            "options": [*industrial.OPTIONS],
            "gluon": [*gluon_forward.KERNELS, "specialised, persistent", "cuDNN"],
            "published": [industrial.OURS, "eager"],
        }[job["part"]]
        names = names if job["pass"] == "forward" else [n for n in names if n not in (industrial.BOXES, industrial.GLUON)]
        for name in names:
            _, _, n, d = job["shape"]
            if name == "eager" and n > 4096:
                rows.append(job | {"name": name, "unavailable": "not measured beyond N = 4096"})
                continue
            ms = draw.uniform(0.5, 1.5) * (n * 16384 * d * 1e-9 if job["part"] == "shapes" else 1.0)
            rows.append(job | {"name": name, "ms": ms, "tflops": draw.uniform(100, 700), "peak_bytes": n * d})
    return {"bench": "industrial", "machine": MACHINE, "rows": [r for r in rows if keep(r)]}


RECORDS = {
    "none": [],
    "whole": [made_up()],
    "two": [made_up(), made_up(["gluon"])],
    "nothing ran": [made_up(keep=lambda r: "ms" not in r)],
    "half": [made_up(keep=lambda r: random.Random(str(r)).random() < 0.5)],
    **{part: [made_up([part])] for part in industrial.PARTS},
}


@pytest.fixture(scope="module")
def cells():
    """The cells of lecture 4 that read the record, after the imports."""
    (path,) = (p for p in find_lessons(ROOT, ["04"]) if not p.stem.endswith("_exercises"))
    notebook, _ = make_notebook(read_lesson(path), "notebooks", ROOT)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return code[0], [source for source in code if "(runs, " in source]


@pytest.mark.parametrize("name", RECORDS)
def test_the_cells_that_read_the_record(cells, name, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.setattr(industrial, "recorded", lambda: RECORDS[name])
    imports, reading = cells
    assert len(reading) >= 8
    space: dict = {}
    exec(imports, space)
    shown: list = []
    space["display"] = shown.append
    monkeypatch.setattr(space["show"], "display", shown.append)
    for source in reading:
        exec(source, space)
    figures = plt.get_fignums()
    plt.close("all")
    assert f"runs recorded: {len(RECORDS[name])}" in capsys.readouterr().out
    if name == "none":
        assert not shown and not figures
    if name == "whole":
        assert len(figures) >= 4 and len(shown) >= 5 and "not measured" not in map(repr, shown)


def test_ratio_table():
    data = made_up()
    found = industrial.ratio_table(data, industrial.OURS, ["cuDNN", "eager"])
    assert isinstance(found, Table) and found.columns[3:] == ("512", "1024", "2048", "4096", "8192", "16384")
    assert len(found.rows) == 12 and found.rows[1][-1] == ""
    times = {r["name"]: r["ms"] for r in data["rows"] if r["part"] == "shapes" and r["pass"] == "forward"
             and r["shape"][2:] == [512, 64] and not r["causal"]}  # fmt: skip
    assert found.rows[0] == ("64", "whole", "cuDNN", f"{times['cuDNN'] / times[industrial.OURS]:.2f}", *found.rows[0][4:])


def test_times_by_option_and_by_step():
    data = made_up()
    assert list(industrial.option_times(data)) == [64, 128]
    assert all(set(ms) == set(industrial.OPTIONS) for ms in industrial.option_times(data).values())
    speeds = industrial.gluon_speeds(data)
    assert list(speeds) == list(itertools.product((64, 128, 256), (False, True)))
    assert all({*gluon_forward.KERNELS, "cuDNN"} <= set(row) for row in speeds.values())


def test_published_table():
    found = industrial.published_table(made_up(), "forward", 64, "bf16")
    assert [row[0] for row in found.rows[:2]] == ["128", "256"]
    (row,) = (row for row in found.rows if row[0] == "4 096")
    assert row[1:3] == ("0.347", "0.078") and math.isclose(float(row[3]), 0.347 / 0.078, abs_tol=0.06)
    assert "Made-up" in found.caption
