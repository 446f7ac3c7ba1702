"""Lecture 5 reads the record of `flashlab bench industrial`: with none, with a part of one, and with a whole one.

The records here are a stand-in's: their times say nothing.
"""

from __future__ import annotations

import random

import matplotlib
import matplotlib.pyplot as plt
import pytest
from industrial_stand_in import record
from lesson_source import find_lessons, make_notebook, read_lesson
from pacing import ROOT

from flashlab.bench import industrial

WHOLE = record()
RECORDS = {
    "none": [],
    "whole": [WHOLE],
    "two": [WHOLE, record(["gluon"])],
    "half": [WHOLE | {"rows": [row for row in WHOLE["rows"] if random.Random(str(row)).random() < 0.5]}],
    **{part: [record([part])] for part in industrial.PARTS},
}


@pytest.fixture(scope="module")
def cells():
    """The cells of lecture 5 that read the record, after the imports."""
    (path,) = (p for p in find_lessons(ROOT, ["05"]) if not p.stem.endswith("_exercises"))
    notebook, _ = make_notebook(read_lesson(path), "notebooks", ROOT)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return code[0], [
        source
        for source in code
        if "industrial.recorded()" in source or "for run in runs:" in source or "in industrial.having(" in source
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_the_cells_that_read_the_record(cells, name, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.setattr(industrial, "recorded", lambda: RECORDS[name])
    imports, reading = cells
    assert len(reading) == 11
    shown: list = []
    space: dict = {"display": shown.append}
    exec(imports, space)
    monkeypatch.setattr(space["show"], "display", shown.append)
    for source in reading:
        exec(source, space)
    figures = plt.get_fignums()
    plt.close("all")
    assert capsys.readouterr().out.count(f"runs recorded: {len(RECORDS[name])}") == 2
    expected = {"none": (0, 0), "whole": (4, 5), "tune": (1, 1), "shapes": (4, 2)}
    if name in expected:
        assert (len(figures), len(shown)) == expected[name]
