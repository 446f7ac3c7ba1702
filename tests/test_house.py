"""The house: set-up and its error sentences, the two commands, and the papers at the door."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flashlab import course, doctor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where Python has none

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def load(path):
    """A script of tools/ or docs/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


bootstrap = load(ROOT / "tools" / "bootstrap.py")
run_tests = load(ROOT / "tools" / "run_tests.py")


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
    (_, oldest), (_, newest) = bootstrap.PYTHONS
    assert [minor for minor in range(30) if f"3.{minor}.0" in allowed] == list(range(oldest, newest + 1))
    assert doctor.PYTHONS == bootstrap.PYTHONS
    shell = (ROOT / "tools" / "bootstrap.sh").read_text()
    assert re.findall(r"^(?:oldest|newest)=(\d+)", shell, re.M) == [str(oldest), str(newest)]
    assert f"Python 3.{oldest} to 3.{newest}" in (ROOT / "README.md").read_text()
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{oldest}"


def test_the_pinned_pair_is_one_that_was_tried():
    pins = {}
    for line in PROJECT["project"]["dependencies"]:
        requirement = Requirement(line)
        pins[requirement.name] = str(requirement.specifier).removeprefix("==")
    short = tuple(".".join(pins[name].split(".")[:2]) for name in ("torch", "triton"))
    assert short in doctor.TRIED
    text = (ROOT / "README.md").read_text()
    for torch, triton in doctor.TRIED:
        assert re.search(rf"torch {re.escape(torch)}\s+(and|with)\s+triton {re.escape(triton)}", text)


def test_every_python_gets_exactly_one_version_of_a_package():
    for minor in range(bootstrap.PYTHONS[0][1], bootstrap.PYTHONS[1][1] + 1):
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
    assert sorted(re.search(r"^PARTS := (.+)$", MAKEFILE, re.M)[1].split()) == sorted(names)
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


# ---- README and its like


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_a_page_names_is_there(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            assert (ROOT / target.split("#")[0]).exists(), f"{target} leads nowhere"
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M)) | {f"test-{part.name}" for part in run_tests.parts()}
    for target in re.findall(r"`make ([a-z][a-z-]*)", text):
        assert target in targets, f"make {target}"
    for path in re.findall(r"`((?:src|tests|tools|docs)/[\w./-]+)`", text):
        assert "NN" in path or (ROOT / path).exists(), f"{path} is not there"
    assert set(re.findall(r"`flashlab (\w+)", text)) <= {"doctor", "progress", "check", "bench"}


def test_the_phase_map_is_that_of_the_course():
    written = {p.number for p in course.PHASES if list((ROOT / "src" / "lessons").glob(f"{p.number:02d}_*.py"))}
    assert course.readme_table(written) in (ROOT / "README.md").read_text(), "python docs/figures.py writes it"
    for path in (ROOT / "src" / "lessons").glob("[0-9]*.py"):
        assert path.stem.removesuffix("_exercises") == course.phase(int(path.stem[:2])).name


def test_the_figures_are_drawn_from_the_committed_script(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "docs" / "figures.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs").glob("*.png")}
    assert all(path.stat().st_size > 20_000 for path in tmp_path.iterdir())


# ---- finding a Python, in plain sh


def tool_box(folder, *names):
    """A PATH with sh's own tools and nothing else, but for `names`."""
    folder.mkdir(exist_ok=True)
    for name in ("sh", "dirname", "id", "env", *names):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def fake_python(path, version, says="chosen"):
    """Answers the question for its version, and otherwise says that it was chosen, and what for."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; else echo {says} {version} "$@"; fi\n')
    path.chmod(0o755)


def find(path, root=ROOT, **variables):
    return subprocess.run(
        ["/bin/sh", str(root / "tools" / "bootstrap.sh"), "setup"],
        capture_output=True, text=True, env={"PATH": str(path), "VENV": "no-such-environment", **variables},
    )  # fmt: skip


def one_sentence(done):
    """The one line that a set-up that cannot go on says."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("stopped: ")
    assert line.endswith(".")
    assert "Traceback" not in done.stderr
    return line


def test_no_python_at_all(tmp_path):
    assert "there is no python3 on this machine: install" in one_sentence(find(tool_box(tmp_path / "bin")))


def test_no_python_where_apt_is(tmp_path):
    path = tool_box(tmp_path / "bin")
    fake_python(path / "apt-get", "")
    assert "apt install python3 python3-venv" in one_sentence(find(path))


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.15", "2.7"])
def test_no_python_that_is_suitable(tmp_path, version):
    path = tool_box(tmp_path / "bin")
    fake_python(path / "python3", version)
    assert f"this machine has Python {version}, and the course needs 3.10 to 3.14" in one_sentence(find(path))


@pytest.mark.parametrize("others, chosen", [(["3.10", "3.12"], "3.12"), (["3.10", "3.15"], "3.10"), (["3.14"], "3.14")])
def test_the_newest_suitable_python_is_taken_when_python3_is_not(tmp_path, others, chosen):
    path = tool_box(tmp_path / "bin")
    fake_python(path / "python3", "3.8")
    for version in others:
        fake_python(path / f"python{version}", version)
    done = find(path)
    assert done.stdout.startswith(f"chosen {chosen} ")
    assert done.stdout.rstrip().endswith("tools/bootstrap.py setup")


def test_python3_is_taken_when_it_is_suitable(tmp_path):
    path = tool_box(tmp_path / "bin")
    fake_python(path / "python3", "3.11")
    fake_python(path / "python3.13", "3.13")
    assert find(path).stdout.startswith("chosen 3.11 ")


def test_a_python_that_does_not_run_is_passed_over(tmp_path):
    path = tool_box(tmp_path / "bin")
    (path / "python3").write_text("#!/bin/sh\necho 'python3: command not found' >&2\nexit 127\n")
    (path / "python3").chmod(0o755)
    fake_python(path / "python3.12", "3.12")
    assert find(path).stdout.startswith("chosen 3.12 ")


def test_python_by_name(tmp_path):
    path = tool_box(tmp_path / "bin")
    fake_python(path / "python3", "3.11")
    other = tmp_path / "my python"
    fake_python(other, "3.12")
    assert find(path, PYTHON=str(other)).stdout.startswith("chosen 3.12 ")
    fake_python(other, "3.9")
    assert "is Python 3.9, and the course needs 3.10 to 3.14" in one_sentence(find(path, PYTHON=str(other)))
    assert "is not a Python 3 that runs" in one_sentence(find(path, PYTHON="no-such-python"))


def test_an_environment_made_earlier_is_enough(tmp_path):
    path = tool_box(tmp_path / "bin")
    (tmp_path / "made" / "bin").mkdir(parents=True)
    fake_python(tmp_path / "made" / "bin" / "python", "3.12")
    assert find(path, VENV=str(tmp_path / "made")).stdout.startswith("chosen 3.12 ")


def test_a_path_with_spaces(tmp_path):
    root = tmp_path / "my course"
    shutil.copytree(ROOT / "tools", root / "tools")
    path = tool_box(tmp_path / "bin")
    fake_python(path / "python3", "3.11")
    assert find(path, root).stdout == f"chosen 3.11 {root}/tools/bootstrap.py setup\n"


# ---- what a machine lacks


def set_up(tmp_path, path, **variables):
    """The real set-up with a PATH of our own; the environment would be made at tmp_path/venv."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bootstrap.py"), "setup"],
        capture_output=True, text=True, timeout=300,
        env={"PATH": str(path), "VENV": str(tmp_path / "venv"), "HOME": str(tmp_path), **variables},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def test_no_compiler(tmp_path):
    done = set_up(tmp_path, tool_box(tmp_path / "bin"))
    assert "there is no C++ compiler (g++ or clang++): install one with" in one_sentence(done)
    assert not (tmp_path / "venv").exists()


def test_a_compiler_that_cannot_compile(tmp_path):
    path = tool_box(tmp_path / "bin")
    (path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (path / "g++").chmod(0o755)
    assert "cannot build a C++ program" in one_sentence(set_up(tmp_path, path))
    assert not (tmp_path / "venv").exists()


def test_the_compiler_of_this_machine_works():
    assert bootstrap.compiler_works(bootstrap.find_compiler())


def test_no_venv_module(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
    (said,) = bootstrap.missing(fresh=True)
    assert f"python3.{sys.version_info.minor} cannot make virtual environments" in said
    assert bootstrap.missing(fresh=False) == []  # an environment that exists needs no ensurepip


def test_no_disk_space(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100e9, 99e9, 1e9))
    (said,) = bootstrap.missing(fresh=True)
    assert "only 1.0 GB are free" in said
    assert bootstrap.missing(fresh=False) == []


def test_another_system_or_python(monkeypatch):
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    said = bootstrap.missing(fresh=False)
    assert len(said) == 2
    assert "the course runs on Linux" in said[0]
    assert "this is Python 3.15" in said[1]


@pytest.mark.parametrize(
    "log, words",
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying ... NewConnectionError(': Failed to establish a new connection: [Errno 111]')", "reached"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "cannot be reached"),
        ("Max retries exceeded ... SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))", "certificate"),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no torch==2.13.0 for Python"),
        ("ERROR: No matching distribution found for setuptools>=77", "cannot be reached"),
        ("ERROR: something else happened\n", "something else happened."),
        ("", "without saying why"),
    ],
)
def test_why_pip_failed_in_one_sentence(log, words):
    said = bootstrap.explain_pip(log)
    assert words in said
    assert said.endswith(".") and ".." not in said
    assert "\n" not in said


def test_no_network(tmp_path):
    path = tool_box(tmp_path / "bin")
    (path / "g++").symlink_to(bootstrap.find_compiler())
    for name in ("as", "ld"):
        (path / name).symlink_to(shutil.which(name))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    done = set_up(tmp_path, path, **nowhere)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0].startswith("stopped: the package index cannot be reached")
    assert len(said) == 2 and str(tmp_path / "venv" / bootstrap.LOG) in said[1]
    assert "127.0.0.1" in (tmp_path / "venv" / bootstrap.LOG).read_text()
    assert not (tmp_path / "venv" / bootstrap.STAMP).exists()
    # pip touched nothing, so the next run builds upon what is there
    assert bootstrap.Environment(tmp_path / "venv").why_unusable() is None


# ---- when the environment counts as ready


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A stamped environment of a small course at tmp_path."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.delenv("PYTHON", raising=False)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    environment = bootstrap.Environment(tmp_path / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.folder], check=True)
    version = "{}.{}".format(*sys.version_info[:2])
    bootstrap.write_atomically(environment.folder / bootstrap.STAMP, json.dumps(bootstrap.fingerprint(version)))
    return environment


def test_a_stamped_environment_is_used_as_it_is(ready, monkeypatch):
    assert ready.is_ready()
    monkeypatch.setattr(bootstrap, "missing", lambda fresh: pytest.fail("nothing is examined again"))
    ready.ready()


def test_a_change_of_the_pins_is_noticed(ready):
    (bootstrap.ROOT / "pyproject.toml").write_text('[project]\ndependencies = ["torch==9"]\n')
    assert not ready.is_ready()


def test_an_interrupted_set_up_is_made_afresh(ready):
    (ready.folder / bootstrap.INSTALLING).touch()
    assert not ready.is_ready()
    assert ready.why_unusable() == "an earlier set-up was cut short"


def test_an_environment_that_was_moved_is_made_afresh(ready, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "pyproject.toml", tmp_path / "elsewhere")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "elsewhere")
    assert not ready.is_ready()
    assert ready.why_unusable() == "the course was moved or copied"


def test_an_environment_without_its_python_is_made_afresh(ready):
    ready.python.unlink()
    ready.python.symlink_to("/nonexistent/python3")
    assert not ready.is_ready()
    assert ready.why_unusable() == "its Python does not run"


def test_another_python_by_name_makes_it_afresh(ready, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    assert ready.is_ready()  # not asked for: what is there serves
    monkeypatch.setenv("PYTHON", "python3.13")
    assert not ready.is_ready()
    assert "it is of Python" in ready.why_unusable()


def test_an_environment_made_by_hand_is_built_upon_if_it_has_pip(ready):
    (ready.folder / bootstrap.STAMP).unlink()
    assert not ready.is_ready()
    assert ready.why_unusable() == "it has no pip"
    assert bootstrap.Environment(bootstrap.ROOT / "nothing").why_unusable() is None


def test_a_damaged_stamp_is_no_stamp(ready):
    (ready.folder / bootstrap.STAMP).write_text('{"pyproject": ')
    assert not ready.is_ready()


def test_packages_from_elsewhere_stay_out(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_USER", "1")
    variables = bootstrap.clean_environment()
    assert "PYTHONPATH" not in variables
    assert variables["PIP_USER"] == "0"


def test_two_set_ups_do_not_meet(tmp_path):
    # Each appends a line in one write, so that what `locked` itself prints to stdout cannot come between.
    code = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); import bootstrap; from pathlib import Path\n"
        "said = os.open(Path(sys.argv[2], 'said'), os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "with bootstrap.locked(Path(sys.argv[2])):\n"
        "    os.write(said, b'in\\n'); time.sleep(0.5); os.write(said, b'out\\n')"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(tmp_path)]
    for process in [subprocess.Popen(command) for _ in range(2)]:
        assert process.wait() == 0
    assert (tmp_path / "said").read_text().split() == ["in", "out", "in", "out"]


# ---- lab


@pytest.fixture
def a_course(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in ("00_first.ipynb", "02_third.ipynb", "Untitled.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    return tmp_path


def test_lab_opens_at_the_phase(a_course, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = bootstrap.lab_command("python", "0", ["--no-browser", "--port=1"])
    assert command[:3] == ["python", "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={a_course}" in command
    assert "--LabApp.default_url=/lab/tree/notebooks/00_first.ipynb" in command
    assert command[-2:] == ["--no-browser", "--port=1"]
    assert "--allow-root" not in command
    assert "--LabApp.default_url=/lab/tree/notebooks/02_third.ipynb" in bootstrap.lab_command("python", "2", [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-root" in bootstrap.lab_command("python", "0", [])


def test_lab_says_which_phases_there_are(a_course):
    for phase in ("1", "two", "-1"):
        with pytest.raises(bootstrap.Stop, match="choose PHASE from 0, 2"):
            bootstrap.lab_command("python", phase, [])
    for path in (a_course / "notebooks").iterdir():
        path.unlink()
    with pytest.raises(bootstrap.Stop, match="make build"):
        bootstrap.lab_command("python", "0", [])


# ---- test


def test_the_runner_goes_on_and_names_what_failed(monkeypatch, capfd, tmp_path):
    def say(text, status=0):
        return (sys.executable, "-c", f"print({text!r}); raise SystemExit({status})")

    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    (tmp_path / "here").touch()
    parts = [
        run_tests.Part("lint", "first", say("one"), "here"),
        run_tests.Part("unit", "second", say("two", 3), "here"),
        run_tests.Part("sync", "third", say("three"), "no-such-file"),
        run_tests.Part("lectures", "fourth", say("four")),
    ]
    monkeypatch.setattr(run_tests, "parts", lambda: parts)
    assert run_tests.main([]) == 1
    said = capfd.readouterr().out
    for words in ("[1/4] first", "one", "two", "four", "[2/4] FAILED", "there is no no-such-file"):
        assert words in said
    assert "three" not in said  # a part with nothing to run fails, it does not pass
    assert said.rstrip().endswith("To run again only what failed: make test-unit, make test-sync")
    kept = json.loads((tmp_path / ".flashlab" / "test-times.json").read_text())
    assert {name: entry["passed"] for name, entry in kept.items()} == {
        "lint": True, "unit": False, "sync": False, "lectures": True,
    }  # fmt: skip
    assert run_tests.main(["lint"]) == 0
    assert run_tests.main(["lunch"]) == 2


def test_no_part_looks_at_a_learners_answers():
    for part in run_tests.parts():
        assert not any("exercises/" in word or word == "exercises" for word in part.command)


@pytest.mark.parametrize("seconds, text", [(4.21, "4.2 s"), (59.9, "59.9 s"), (187, "3 min 07 s")])
def test_times_are_legible(seconds, text):
    assert run_tests.clock(seconds) == text
