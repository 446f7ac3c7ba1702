"""Lecture 4 reads the record of `flashlab bench industrial`: with none, with a part of one, and with a whole one.

The records here are a stand-in's: their times say nothing.
"""

from __future__ import annotations

import itertools
import math
import random

import matplotlib
import matplotlib.pyplot as plt
import pytest
from industrial_stand_in import record
from lesson_source import find_lessons, make_notebook, read_lesson
from pacing import ROOT

from flashlab.attention import gluon_forward
from flashlab.bench import industrial
from flashlab.table import Table


def rows_of(data, keep):
    return data | {"rows": [row for row in data["rows"] if keep(row)]}


WHOLE = record()
RECORDS = {
    "none": [],
    "whole": [WHOLE],
    "two": [WHOLE, record(["gluon"])],
    "nothing ran": [rows_of(WHOLE, lambda row: "ms" not in row)],
    "half": [rows_of(WHOLE, lambda row: random.Random(str(row)).random() < 0.5)],
    **{part: [record([part])] for part in industrial.PARTS},
}


@pytest.fixture(scope="module")
def cells():
    """The cells of lectures 4 and 11b that read the record, after their imports."""
    paths = [p for p in find_lessons(ROOT, ["04", "11b"]) if not p.stem.endswith("_exercises")]
    notebooks = [make_notebook(read_lesson(path), "notebooks", ROOT)[0] for path in paths]
    code = [[cell.source for cell in notebook.cells if cell.cell_type == "code"] for notebook in notebooks]
    reading = [source for sources in code for source in sources if "(runs, " in source]
    return "\n".join(sources[0] for sources in code), reading


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
    found = industrial.ratio_table(WHOLE, industrial.OURS, ["cuDNN", "eager"])
    assert isinstance(found, Table) and found.columns[3:] == ("512", "1024", "2048", "4096", "8192", "16384")
    assert len(found.rows) == 10 and found.rows[1][-1] == ""
    times = {r["name"]: r["ms"] for r in WHOLE["rows"] if r["part"] == "shapes" and r["pass"] == "forward"
             and r["shape"][2:] == [512, 64] and not r["causal"]}  # fmt: skip
    assert found.rows[0] == (
        "64",
        "whole",
        "cuDNN",
        f"{times['cuDNN'] / times[industrial.OURS]:.2f}",
        *found.rows[0][4:],
    )


def test_times_by_option_and_by_step():
    assert list(industrial.option_times(WHOLE)) == [64, 128]
    assert all(set(ms) == set(industrial.OPTIONS) for ms in industrial.option_times(WHOLE).values())
    speeds = industrial.gluon_speeds(WHOLE)
    assert list(speeds) == list(itertools.product((64, 128, 256), (False, True)))
    assert all({*gluon_forward.KERNELS} <= set(row) for row in speeds.values())


def test_published_table():
    found = industrial.published_table(WHOLE, "forward", 64, "bf16")
    assert [row[0] for row in found.rows[:2]] == ["128", "256"]
    (row,) = (row for row in found.rows if row[0] == "4 096")
    assert row[1:3] == ("0.347", "0.078") and math.isclose(float(row[3]), 0.347 / 0.078, abs_tol=0.06)
    assert "Stand-in" in found.caption
