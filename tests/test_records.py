"""Recorded figures: written whole or not at all, found by their prefix."""

import json

import pytest

from flashlab.bench import records


def test_figures_are_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "figures.json"
    records.write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        records.write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_run_is_recorded_under_its_gpus_name():
    assert records.default_path("walls", "NVIDIA H200").name == "walls_h200.json"
    assert records.default_path("walls", "NVIDIA GeForce RTX 4090").name == "walls_geforce_rtx_4090.json"


def test_every_recorded_file_names_its_machine_versions_and_date():
    files = sorted(records.RECORDED.glob("*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text())
        if "nvcc" in content:  # what a compiler said: no machine takes part
            assert content["date"], file.name
        else:
            assert {"gpu", "torch", "date"} <= set(content["machine"]), file.name
