"""The progress file: where it is, that it survives damage, and that kernels writing at once lose nothing."""

import json
import os
import subprocess
import sys

import pytest

from flashlab.exercises import record


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(tmp_path / "here" / "progress.jsonl"))
    monkeypatch.setattr(record, "_said", set())
    return tmp_path / "here" / "progress.jsonl"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_event_is_a_line(file):
    record.failed_try("2.3")
    record.saw_hints("2.3", 2)
    record.solved("2.3")
    tried, hint, solved = lines(file)
    assert set(tried) == {"id", "event", "when"} and tried["event"] == "tried"
    assert (hint["event"], hint["level"]) == ("hint", 2)
    assert (solved["id"], solved["event"]) == ("2.3", "solved") and solved["when"][:2] == "20"
    assert record.load() == {"2.3": record.Entry(tries=2, hints=2, solved=solved["when"])}


def test_a_solved_exercise_keeps_its_first_date(file):
    record.failed_try("2.3")
    record.solved("2.3")
    first = record.load()["2.3"]
    record.solved("2.3")
    record.failed_try("2.3")
    again = record.load()["2.3"]
    assert first.solved == again.solved and first.solved[:2] == "20"
    assert (first.tries, again.tries) == (2, 3)


GOOD = '{"id": "0.1", "event": "tried", "when": "2026-11-20T10:00:00+01:00"}\n'


@pytest.mark.parametrize(
    "damage",
    [
        "{", "[]", "null", '{"exercises": 7}', "\x00\xff" * 50, '{"id": 7, "event": "tried", "when": "2026-11-20"}',
        '{"id": "2.3", "event": "eaten", "when": "2026-11-20"}', '{"id": "2.3", "event": "tried"}',
        '{"id": "2.3", "event": "solved", "when": "yesterday"}', '{"id": "2.3", "event": "solved", "when": null}',
        '{"id": "2.3", "event": "hint", "level": Infinity, "when": "2026-11-20"}', "[" * 100_000,
        '{"id": "2.3", "event": "hint", "level": -1, "when": "2026-11-20"}',
        '{"exercises": {"2.3": {"tries": "many"}}}', GOOD[:40],
    ],
)  # fmt: skip
def test_a_damaged_line_is_skipped_and_said_once(file, damage, capsys):
    file.parent.mkdir()
    file.write_bytes((GOOD + damage + "\n" + GOOD).encode("latin-1"))
    assert record.load() == {"0.1": record.Entry(tries=2)}
    said = capsys.readouterr().out
    assert "is damaged: 1 line of it cannot be understood" in said and said.count("\n") == 1
    record.solved("0.2")
    assert set(record.load()) == {"0.1", "0.2"}
    assert capsys.readouterr().out == ""
    assert damage.encode("latin-1") in file.read_bytes()  # nothing is ever taken out of the file


def test_a_line_that_was_cut_short_spoils_no_other(file):
    file.parent.mkdir()
    file.write_text(GOOD + GOOD[:40])
    record.failed_try("0.2")
    record.failed_try("0.2")
    assert record.load() == {"0.1": record.Entry(tries=1), "0.2": record.Entry(tries=2)}


def test_a_place_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(blocked / "progress.jsonl"))
    record.solved("0.1")
    record.solved("0.2")
    said = capsys.readouterr().out
    assert said.count("could not be saved") == 1 and "going on without it" in said
    assert record.load() == {}


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "a folder", "a pipe"])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path, monkeypatch, capsys, place):
    place = place if place.startswith("/") else str(tmp_path / place)
    if place.endswith("a folder"):
        os.mkdir(place)
    if place.endswith("a pipe"):
        os.mkfifo(place)
    before = os.stat(place).st_mode
    monkeypatch.setenv("FLASHLAB_PROGRESS", place)
    record.solved("0.1")
    assert record.load() == {}
    said = capsys.readouterr().out
    assert "a file is needed; FLASHLAB_PROGRESS=off records nothing" in said
    assert os.stat(place).st_mode == before


def test_a_full_disk_is_said_and_leaves_what_was_there(file, monkeypatch, capsys):
    record.solved("0.1")
    monkeypatch.setattr(os, "write", lambda handle, data: 3)
    record.solved("0.2")
    assert "No space left" in capsys.readouterr().out
    monkeypatch.undo()
    assert "0.1" in file.read_text() and "0.2" not in file.read_text()


@pytest.mark.parametrize("there", ["a record", "no record yet"])
def test_a_link_is_followed_and_stays_a_link(file, tmp_path, there):
    file.parent.mkdir()
    target = tmp_path / "elsewhere" / "mine.jsonl"
    target.parent.mkdir()
    file.symlink_to(target)
    if there == "a record":
        target.write_text(GOOD)
    record.load()
    record.solved("0.2")
    assert file.is_symlink() and target.is_file() and not target.is_symlink()
    assert record.load()["0.2"].solved and ("0.1" in record.load()) == (there == "a record")


def test_no_home_and_no_folder_stop_no_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHLAB_PROGRESS", "~no-such-user/progress.jsonl")
    record.solved("0.1")
    assert record.load() == {}
    said = capsys.readouterr().out
    assert said.startswith("There is no place for your progress (") and said.count("\n") == 1
    monkeypatch.delenv("FLASHLAB_PROGRESS")
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    record.solved("0.1")
    assert "There is no place for your progress" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)


def test_kernels_writing_at_once_lose_nothing(file):
    # The module alone, without torch: processes that start fast enough to meet.
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
    assert record.path() == tmp_path / ".flashlab" / "progress.jsonl"
    monkeypatch.chdir(tmp_path / "solutions")
    assert record.path() is None
    monkeypatch.chdir(tmp_path / "exercises")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "solutions" / "02.ipynb"))
    assert record.path() is None
