"""`flashlab start` and `flashlab update`: a learner's folder without a clone, whose answers no update touches."""

import json

import pytest
from typer.testing import CliRunner

from flashlab import cli
from flashlab.exercises import folder


def notebook(*sources, outputs=()):
    return {"cells": [{"cell_type": "code", "source": [s], "outputs": list(outputs)} for s in sources], "metadata": {}}


@pytest.fixture
def source(tmp_path):
    """Notebooks as they come with a wheel: of the second version once `newer` is called."""
    files = {}
    for name in ("notebooks/00_a.ipynb", "exercises/00_a.ipynb", "exercises/01_b.ipynb"):
        files[name] = tmp_path / "wheel" / name
        files[name].parent.mkdir(parents=True, exist_ok=True)
        files[name].write_text(json.dumps(notebook(name, "# YOUR CODE HERE")))
    return files


def newer(source):
    for path in source.values():
        path.write_text(path.read_text().replace("YOUR CODE", "YOUR OWN CODE"))


def test_start_writes_all_and_refuses_a_second_time(tmp_path, source):
    home = tmp_path / "course"
    said = folder.start(home, source)
    assert "jupyter lab notebooks/00_a.ipynb" in said[-1]
    assert all((home / name).read_text() == path.read_text() for name, path in source.items())
    with pytest.raises(FileExistsError, match="flashlab update"):
        folder.start(home, source)


def test_an_update_renews_what_was_only_run_and_never_an_answer(tmp_path, source):
    home = tmp_path / "course"
    folder.start(home, source)
    ran, answered, broken = (home / name for name in source)
    has = notebook("notebooks/00_a.ipynb", "# YOUR CODE HERE", "", outputs=["ran"])  # JupyterLab adds an empty cell
    ran.write_text(json.dumps(has))
    answered.write_text(answered.read_text().replace("# YOUR CODE HERE", "answer = 42"))
    broken.write_text(broken.read_text()[:-20])
    mine = [path.read_bytes() for path in (answered, broken)]
    assert folder.update(home, source)[-1] == "0 written, 1 up to date, 2 yours"
    newer(source)
    *named, last = folder.update(home, source)
    assert last == "1 written, 0 up to date, 2 yours" and "YOUR OWN CODE" in ran.read_text()
    assert [path.read_bytes() for path in (answered, broken)] == mine
    assert len(named) == 2 and all("there is a newer one" in line for line in named)


def test_without_a_record_what_differs_is_taken_for_an_answer(tmp_path, source):
    home = tmp_path / "course"
    folder.start(home, source)
    (home / ".flashlab" / "written.json").unlink()
    newer(source)
    assert folder.update(home, source)[-1] == "0 written, 0 up to date, 3 yours"


def test_a_clone_says_that_it_has_the_notebooks(tmp_path):
    with pytest.raises(FileNotFoundError, match="make lab"):
        folder.shipped()
    done = CliRunner().invoke(cli.app, ["start", str(tmp_path / "course")])
    assert done.exit_code == 1 and "belongs to a clone" in done.output


def test_the_notebooks_of_an_installed_package_are_found(monkeypatch, tmp_path):
    class File:
        suffix, name = ".ipynb", "00_a.ipynb"

        def __init__(self, kind):
            self.parent = tmp_path / kind

        def locate(self):
            return self.parent / self.name

    monkeypatch.setattr(folder, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "folder.py"))
    monkeypatch.setattr(folder.importlib.metadata, "files", lambda name: [File("exercises"), File("elsewhere")])
    assert folder.shipped() == {"exercises/00_a.ipynb": tmp_path / "exercises" / "00_a.ipynb"}
    monkeypatch.setattr(folder.importlib.metadata, "files", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no notebooks came with"):
        folder.shipped()
