"""The house: what agrees with what, the two commands, and the papers at the door."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tools import run_tests

from flashlab import course, doctor
from flashlab.exercises import folder as folder_of_a_learner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where Python has none

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# ---- what agrees with what


def test_conda_gets_the_same_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["project"]["name"]
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (section,) = [entry for entry in environment["dependencies"] if isinstance(entry, dict)]
    # The pins stand in pyproject.toml alone: nothing of pip's is repeated here.
    assert section == {"pip": ["--editable ."]}
    names = {re.split(r"[=<> ]", entry)[0] for entry in plain}
    assert names == {"python", "pip", "make", "cxx-compiler"}
    (python,) = [entry for entry in plain if entry.startswith("python=")]
    assert python.removeprefix("python=") + ".0" in SpecifierSet(PROJECT["project"]["requires-python"])


def test_every_place_names_the_same_pythons():
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    (_, oldest), (_, newest) = doctor.PYTHONS
    assert [minor for minor in range(30) if f"3.{minor}.0" in allowed] == list(range(oldest, newest + 1))
    shell = (ROOT / "tools" / "bootstrap.sh").read_text()
    assert re.findall(r"^(?:oldest|newest)=(\d+)", shell, re.M) == [str(oldest), str(newest)]
    assert f"Python 3.{oldest} to 3.{newest}" in (ROOT / "README.md").read_text()
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{oldest}"


def test_the_pinned_pair_is_one_that_was_tried():
    short = tuple(".".join(pins()[name].split(".")[:2]) for name in ("torch", "triton"))
    assert short in doctor.TRIED
    text = (ROOT / "README.md").read_text()
    for torch, triton in doctor.TRIED:
        assert re.search(rf"torch {re.escape(torch)}\s+(and|with)\s+triton {re.escape(triton)}", text)


def test_every_python_gets_exactly_one_version_of_a_package():
    for minor in range(doctor.PYTHONS[0][1], doctor.PYTHONS[1][1] + 1):
        names = []
        for line in PROJECT["project"]["dependencies"]:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or marker.evaluate({"python_version": f"3.{minor}", "platform_system": "Linux"}):
                names.append(requirement.name)
        assert len(names) == len(set(names))
        assert {"torch", "triton", "ipykernel", "jupyterlab"} <= set(names)


def test_the_makefile_has_every_part_and_help_lists_every_target():
    names = [part.name for part in run_tests.parts()]
    assert sorted(re.search(r"^PARTS := (.+)$", MAKEFILE, re.M)[1].split()) == sorted(set(names) - {"quick", "long"})
    targets = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M)
    assert {"help", "lab", "test", "build", "doctor", "clean"} | {f"test-{name}" for name in names} <= set(targets)
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in targets:
        assert f"make {target} " in listed
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    assert re.search(r"^export CI=true", text, re.M)
    assert text.rstrip().endswith("exec make test")


def pins():
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    return {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in requirements}


def test_the_workflow_runs_the_two_commands_on_the_oldest_and_the_newest_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    test = workflow["jobs"]["test"]
    assert test["strategy"]["matrix"]["python"] == ["{}.{}".format(*version) for version in doctor.PYTHONS]
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {"make test", "make test-lint", "make test-sync", "make lab-browser-check"} <= set(commands)
    assert any(
        "make setup" in command and "flashlab check" in command and "make lab" in command for command in commands
    )
    assert workflow["env"]["CI"] == "true" and workflow["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    for target in re.findall(r"make ([a-z-]+)", " ".join(commands)):
        assert re.search(rf"^{target}:", MAKEFILE, re.M), target


def test_colab_keeps_its_own_torch():
    notebook = nbformat.read(ROOT / "docs" / "colab.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    (install,) = re.findall(r"^.*pip install.*$", "\n".join(cells), re.M)
    assert "--no-deps" in install and "torch" not in install
    (run,) = re.findall(r"^%run course/(.*)$", "\n".join(cells), re.M)
    assert (ROOT / run).exists()


def test_the_wheel_carries_every_notebook():
    for folder, patterns in PROJECT["tool"]["setuptools"]["data-files"].items():
        kind = folder.removeprefix("share/flashlab/")
        carried = {path for pattern in patterns for path in ROOT.glob(pattern)}
        ours = {ROOT / kind / f"{p.name}.ipynb" for p in course.PHASES if list((ROOT / kind).glob(f"{p.name}.ipynb"))}
        assert ours and ours <= carried
    assert {x.split("/")[-1] for x in PROJECT["tool"]["setuptools"]["data-files"]} == set(folder_of_a_learner.KINDS)
    group = {Requirement(line).name for line in PROJECT["dependency-groups"]["site"]}
    browser = PROJECT["project"]["optional-dependencies"]["browser"]
    assert {"sphinx", "myst-nb", "furo"} <= group and set(browser) <= set(PROJECT["dependency-groups"]["site"])


# ---- README and its like


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/results.md", "docs/glossary.md"]
)
def test_what_a_page_names_is_there(name):
    path = ROOT / name
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            assert (path.parent / target.split("#")[0]).exists(), f"{target} leads nowhere"
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M)) | {f"test-{part.name}" for part in run_tests.parts()}
    for target in re.findall(r"`make ([a-z][a-z-]*)", text):
        assert target in targets, f"make {target}"
    for path in re.findall(r"`((?:src|tests|tools|docs)/[\w./-]+)`", text):
        assert "NN" in path or (ROOT / path).exists(), f"{path} is not there"
    commands = {"doctor", "progress", "next", "check", "bench", "start", "update"}
    assert set(re.findall(r"`flashlab (\w+)", text)) <= commands


def test_the_phase_map_is_that_of_the_course():
    assert course.readme_table() in (ROOT / "README.md").read_text(), "python docs/figures.py writes it"
    names = {p.name for p in course.PHASES}
    for path in (ROOT / "src" / "lessons").glob("[0-9]*.py"):
        assert path.stem.removesuffix("_exercises") in names


@pytest.mark.slow
def test_the_figures_are_drawn_from_the_committed_script(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", tmp_path], check=True)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs").glob("*.png")}
    assert all(path.stat().st_size > 20_000 for path in tmp_path.iterdir())


# ---- test


def test_the_runner_goes_on_and_names_what_failed(monkeypatch, capfd):
    def say(text, status=0):
        return ((sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"),)

    parts = [
        run_tests.Part("lint", "first", say("one")),
        run_tests.Part("unit", "second", say("two", 3)),
        run_tests.Part("lectures", "third", say("three")),
        run_tests.Part("quick", "by name only", say("five"), only_by_name=True),
    ]
    monkeypatch.setattr(run_tests, "parts", lambda: parts)
    assert run_tests.main([]) == 1
    said = capfd.readouterr().out
    for words in ("[1/3] first", "one", "two", "three", "[2/3] FAILED"):
        assert words in said
    assert said.rstrip().endswith("To run again only what failed: make test-unit")
    assert "five" not in said
    assert run_tests.main(["lint"]) == 0
    assert run_tests.main(["quick"]) == 0 and "five" in capfd.readouterr().out
    assert run_tests.main(["lunch"]) == 2


def test_no_part_looks_at_a_learners_answers():
    for part in run_tests.parts():
        words = [word for command in part.commands for word in command]
        assert not any("exercises/" in word or word == "exercises" for word in words)
