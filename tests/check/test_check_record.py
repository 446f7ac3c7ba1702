"""The progress file: where it is, that it survives damage, and that kernels writing at once lose nothing."""

import json
import os
import stat
import subprocess
import sys

import pytest

from flashlab.exercises import record


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(tmp_path / "here" / "progress.json"))
    monkeypatch.setattr(record, "_said", set())
    return tmp_path / "here" / "progress.json"


def test_a_solved_exercise_keeps_its_first_date(file):
    record.failed_try("2.3")
    record.solved("2.3")
    first = record.load()["2.3"]
    record.solved("2.3")
    record.failed_try("2.3")
    again = record.load()["2.3"]
    assert first.solved == again.solved and first.solved[:2] == "20"
    assert (first.tries, again.tries) == (2, 3)


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"exercises": 7}', "\x00\xff" * 50, '{"exercises": {"2.3": {"tries": "many"}}}']
)
def test_a_damaged_file_is_kept_aside_and_replaced(file, damage, capsys):
    file.parent.mkdir()
    file.write_bytes(damage.encode("latin-1"))
    record.solved("0.1")
    said = capsys.readouterr().out
    assert "is damaged" in said and said.count("\n") == 1
    assert list(record.load()) == ["0.1"]
    assert file.with_name("progress.json.damaged-1").read_bytes() == damage.encode("latin-1")
    assert capsys.readouterr().out == ""


def test_what_can_be_read_of_a_damaged_file_is_kept(file, capsys):
    good = {"tries": 1, "hints": 0, "solved": "2026-11-20T10:00:00+00:00"}
    file.parent.mkdir()
    file.write_text(json.dumps({"version": 1, "exercises": {"0.1": good, "0.2": {"tries": []}}}))
    record.failed_try("0.3")
    assert set(record.load()) == {"0.1", "0.3"}
    assert "keeping the 1 entries" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(blocked / "progress.json"))
    record.solved("0.1")
    record.solved("0.2")
    said = capsys.readouterr().out
    assert said.count("could not be saved") == 1 and "going on without it" in said
    assert record.load() == {}


def test_a_failed_write_leaves_the_old_file(file, monkeypatch, capsys):
    record.solved("0.1")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    record.solved("0.2")
    assert "No space left" in capsys.readouterr().out
    monkeypatch.undo()
    assert [p.name for p in file.parent.iterdir() if p.suffix == ".new"] == []
    assert "0.1" in file.read_text() and "0.2" not in file.read_text()


def test_kernels_writing_at_once_lose_nothing(file):
    # The module alone, without torch: eight processes that start fast enough to meet.
    script = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('record', sys.argv[1])\n"
        "record = sys.modules['record'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(record)\n"
        "for _ in range(20): record.failed_try('1.1'); record.failed_try('2.' + sys.argv[2])\n"
    )
    env = {**os.environ, "FLASHLAB_PROGRESS": str(file)}
    running = [subprocess.Popen([sys.executable, "-c", script, record.__file__, str(i)], env=env) for i in range(1, 5)]
    assert [process.wait(60) for process in running] == [0] * 4
    entries = record.load()
    assert entries["1.1"].tries == 80
    assert [entries[f"2.{i}"].tries for i in range(1, 5)] == [20] * 4


def test_where_it_is_kept(tmp_path, monkeypatch):
    for folder in ("notebooks", "exercises", "solutions"):
        (tmp_path / folder).mkdir()
    monkeypatch.delenv("FLASHLAB_PROGRESS")
    assert record.path() is None  # pytest is running
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.chdir(tmp_path / "exercises")
    assert record.path() == tmp_path / ".flashlab" / "progress.json"
    monkeypatch.chdir(tmp_path / "solutions")
    assert record.path() is None
    monkeypatch.chdir(tmp_path / "exercises")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "solutions" / "02.ipynb"))
    assert record.path() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_said(file, capsys):
    file.parent.mkdir()
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    record.solved("0.1")
    assert "could not be saved" in capsys.readouterr().out
