"""The set-up: what it says when something is missing, what it never touches, and that it survives being cut short."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools import bootstrap

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "tools" / "bootstrap.py").read_text()
VERSION = "{}.{}".format(*sys.version_info[:2])

MARK = "flashlab-setup-begun"

# ---- finding a Python, in plain sh


def tool_box(folder, there):
    """A PATH with sh's own tools, and with programs that answer the question for their version (None: that do not run),
    and otherwise say that they were chosen, and what for."""
    folder.mkdir()
    for name in ("sh", "dirname", "uname", "env"):
        (folder / name).symlink_to(shutil.which(name))
    for name, version in there.items():
        path = folder / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = f'if [ "$1" = -c ]; then echo {version}; else echo chosen {version} "$@"; fi'
        path.write_text("#!/bin/sh\n" + {None: "exit 127", "Darwin": "echo Darwin"}.get(version, answer) + "\n")
        path.chmod(0o755)
    return folder


def run(*command, **variables):
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def find(path, **variables):
    named = {"PATH": str(path), "VENV": "no-such-environment", **variables}
    return run("/bin/sh", ROOT / "tools" / "bootstrap.sh", "setup", **named)


def one_sentence(done):
    """The one line that a set-up that cannot go on says."""
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("stopped: ")
    assert line.endswith(".")
    assert "Traceback" not in done.stderr
    return line


SUITABLE = "and the course needs 3.10 to 3.14"


@pytest.mark.parametrize(
    "there, variables, said",
    [
        ({}, {}, "there is no python3 on this machine: install"),
        ({"apt-get": ""}, {}, "apt install python3 python3-venv"),
        ({"python3": "3.9"}, {}, f"this machine has Python 3.9, {SUITABLE}"),
        ({"python3": "3.15"}, {}, f"this machine has Python 3.15, {SUITABLE}"),
        ({"python3": "2.7"}, {}, f"this machine has Python 2.7, {SUITABLE}"),
        ({"python3": "3.11", "mine": "3.9"}, {"PYTHON": "mine"}, f"PYTHON=mine is Python 3.9, {SUITABLE}"),
        ({"python3": "3.11"}, {"PYTHON": "no-such-python"}, "is not a Python 3 that runs"),
        ({"python3": "3.11", "uname": "Darwin"}, {}, "the course runs on Linux"),
    ],
)
def test_without_a_suitable_python_one_sentence(tmp_path, there, variables, said):
    assert said in one_sentence(find(tool_box(tmp_path / "bin", there), **variables))


@pytest.mark.parametrize(
    "there, variables, chosen",
    [
        ({"python3": "3.11", "python3.13": "3.13"}, {}, "3.11"),  # python3, where it is suitable
        ({"python3": "3.8", "python3.10": "3.10", "python3.12": "3.12"}, {}, "3.12"),  # else the newest that is
        ({"python3": "3.8", "python3.10": "3.10", "python3.15": "3.15"}, {}, "3.10"),
        ({"python3": None, "python3.12": "3.12"}, {}, "3.12"),  # one that does not run is passed over
        ({"python3": "3.11", "my python": "3.12"}, {"PYTHON": "my python"}, "3.12"),
        ({"made/bin/python": "3.12"}, {"VENV": "{bin}/made"}, "3.12"),  # an environment made earlier is enough
    ],
)
def test_which_python_is_taken(tmp_path, there, variables, chosen):
    path = tool_box(tmp_path / "bin", there)
    done = find(path, **{name: value.format(bin=path) for name, value in variables.items()})
    assert done.stdout.startswith(f"chosen {chosen} ") and done.stdout.endswith("tools/bootstrap.py setup\n")


# ---- what a machine lacks, and why pip failed


def test_no_compiler(tmp_path):
    variables = {"PATH": str(tool_box(tmp_path / "bin", {})), "VENV": str(tmp_path / "venv")}
    done = run(sys.executable, ROOT / "tools" / "bootstrap.py", **variables)
    assert "there is no C++ compiler (g++): install one" in one_sentence(done)
    assert not (tmp_path / "venv").exists()


def test_no_venv_module_and_no_disk_space(monkeypatch):
    assert bootstrap.missing() == []
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100e9, 99e9, 1e9))
    venv, disk = bootstrap.missing()
    assert venv.startswith(f"python{VERSION} cannot make virtual environments: install")
    assert disk.startswith("only 1.0 GB are free") and disk.endswith(".")


@pytest.mark.parametrize(
    "log, words",
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying ... NewConnectionError(': Failed to establish a new connection: [Errno 111]')", "reached"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "cannot be reached"),
        ("Max retries exceeded ... SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))", "certificate"),
        ("ERROR: No matching distribution found for torch==2.13.0", "found for torch==2.13.0."),
        ("ERROR: No matching distribution found for setuptools>=77", "cannot be reached"),
        ("ModuleNotFoundError: No module named 'triton'\n", "No module named 'triton'."),
        ("", "pip does not say why."),
        ("error: Failed to fetch: `https://pypi.org/simple/`\n  Caused by: dns error", "cannot be reached"),
        ("  × No solution found:\n  ╰─▶ Because there is no version of torch==9", "there is no version of torch==9."),
        ("  Caused by: invalid peer certificate: UnknownIssuer", "certificate was refused"),
    ],
)
def test_why_pip_or_uv_failed_in_one_sentence(log, words):
    said = bootstrap.explain(log)
    assert words in said
    assert said.endswith((".", ")")) and ".." not in said
    assert "\n" not in said


# ---- a small course whose set-up takes a third of a second


FAKE_PIP = """
import pathlib, sys, sysconfig, time
root = pathlib.Path(sys.argv[-1])
with open(root / "pip-was-run", "a") as file:
    file.write(sys.prefix + "\\n")
assert sys.prefix != sys.base_prefix, "this is the base's Python"
print("Installing collected packages: pieces", flush=True)
for i in range(10):
    piece = pathlib.Path(sysconfig.get_path("purelib"), f"piece{i}")
    if not piece.exists():  # pip believes what it finds, were it half copied
        piece.write_text("half")
        time.sleep(float((root / "seconds").read_text()))
        piece.write_text("whole")
if (root / "offline").exists():
    sys.exit("ERROR: socket.gaierror: Temporary failure in name resolution")
"""


class Course:
    """A folder with the real tools/, but a pip that copies ten files, slowly."""

    def __init__(self, root, seconds=0.01):
        self.root, self.venv = root, root / ".venv"
        shutil.copytree(ROOT / "tools", root / "tools")
        text = SOURCE
        for name, value in {
            "MAKE_VENV": ["-m", "venv", "--without-pip"],
            "PIP": [str(root / "pip.py")],
            "PROBE": ["-c", "pass"],
        }.items():
            text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.M)
            assert count == 1
        (root / "tools" / "bootstrap.py").write_text(text)
        (root / "pip.py").write_text(FAKE_PIP)
        (root / "seconds").write_text(str(seconds))
        (root / "pip-was-run").touch()
        (root / "pyproject.toml").write_text("[project]\n")
        (root / "hello.py").write_text("import sys; print('hello from', sys.prefix)")

    def start(self, *arguments, **variables):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "PYTHONPATH")}
        environment["PATH"] = os.pathsep.join(
            place for place in environment["PATH"].split(os.pathsep) if not Path(place, "uv").exists()
        )
        return subprocess.Popen(
            [sys.executable, str(self.root / "tools" / "bootstrap.py"), *arguments], cwd=self.root,
            env={**environment, **variables}, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments, **variables):
        process = self.start(*arguments, **variables)
        process.stdout, process.stderr = map(str, process.communicate())
        return process

    def pip_runs(self):
        return (self.root / "pip-was-run").read_text().splitlines()

    def assert_right(self):
        (purelib,) = self.venv.glob("lib/python*/site-packages")
        assert [(purelib / f"piece{i}").read_text() for i in range(10)] == ["whole"] * 10
        assert set(self.pip_runs()) == {str(self.venv.resolve())}
        assert not (self.venv / MARK).exists()


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path / "my course")


def test_a_set_up_what_it_runs_and_that_the_next_starts_at_once(course):
    done = course.run("hello.py")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"making {course.venv}: there is none yet"
    assert second == f"hello from {course.venv}"
    course.assert_right()
    assert course.run("hello.py").stdout == f"hello from {course.venv}\n" and len(course.pip_runs()) == 1
    assert course.run("setup").stdout == f"ready: {course.venv}/bin/python\n"


HOW_IT_ENDS = {
    "kill -9 of all": lambda process: os.killpg(process.pid, signal.SIGKILL),
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
    "kill -9 of make's child": lambda process: process.kill(),  # pip goes on, alone
    "SIGTERM": lambda process: os.killpg(process.pid, signal.SIGTERM),
}


@pytest.mark.long
def test_cut_short_at_any_moment_and_resumed(tmp_path):
    begun = time.monotonic()
    assert Course(tmp_path / "whole", seconds=0.03).run().returncode == 0
    whole, marked = time.monotonic() - begun, 0
    for number, (how, kill) in enumerate(HOW_IT_ENDS.items()):
        course = Course(tmp_path / str(number), seconds=0.03)
        for _ in range(1 + number % 2):  # some are cut short twice
            process = course.start()
            while number and not (course.venv / MARK).exists() and process.poll() is None:
                time.sleep(0.001)  # most are to have begun, however busy the machine
            time.sleep(whole * (number + 0.5) / len(HOW_IT_ENDS))
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                kill(process)
            said, complaint = process.communicate()
            assert "Traceback" not in complaint or how == "Ctrl-C", complaint
            if "ready: " in said:  # it may have been ended right behind that
                course.assert_right()
            marked += course.venv.exists()
        done = course.run()
        assert done.returncode == 0 and "ready: " in done.stdout, done.stderr
        course.assert_right()
    assert marked > len(HOW_IT_ENDS) // 2


def test_two_at_once_wait_for_each_other(course):
    both = [course.start("hello.py") for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(text.endswith(f"hello from {course.venv}\n") for text in said)
    assert sum("waiting for another set-up" in text for text in said) == 1
    assert len(course.pip_runs()) == 1
    course.assert_right()


# ---- what is never touched


def contents(folder):
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*")}


@pytest.mark.parametrize("how", ["absolute", "relative", "a link"])
def test_a_folder_with_something_in_it_is_left_alone(course, tmp_path, how):
    mine = tmp_path / "envs"
    (mine / "bin").mkdir(parents=True)
    (mine / "bin" / "thesis.tex").write_text("ten years of work")
    (tmp_path / "link").symlink_to(mine)
    place = {"absolute": str(mine), "relative": "../envs", "a link": str(tmp_path / "link")}[how]
    before = contents(mine)
    for _ in range(2):
        said = one_sentence(course.run("setup", VENV=place))
        assert f"{mine} was not made by this set-up: move it away, or say VENV=/another" in said
    assert contents(mine) == before
    assert course.pip_runs() == []


def cut_short(course):
    (course.root / "offline").touch()
    done = course.run()
    sentence, log = done.stderr.splitlines()
    assert done.returncode == 1 and sentence.startswith("stopped: the package index cannot be reached")
    assert str(course.root / ".flashlab" / "setup.log") in log
    (course.root / "offline").unlink()


def test_a_stale_mark_makes_nothing_deletable_but_an_environment(course):
    """What has an environment's names in a folder that holds none stays; of one, what goes is said first."""
    course.venv.mkdir()
    (course.venv / MARK).touch()
    for name in ("bin", "lib"):
        (course.venv / name / "deep").mkdir(parents=True)
        (course.venv / name / "deep" / "thesis.tex").write_text("ten years of work")
    before = contents(course.venv)
    assert "no environment: move away its bin, lib, or delete" in one_sentence(course.run())
    assert contents(course.venv) == before
    (course.venv / "pyvenv.cfg").touch()
    assert "clearing it of bin, lib, pyvenv.cfg\n" in course.run().stdout
    course.assert_right()


@pytest.mark.parametrize("place", ["here", "here/below"])
def test_a_file_where_the_environment_would_be(course, place):
    (course.root / "here").write_text("ten years of work")
    said = one_sentence(course.run(VENV=place))
    assert "/here is a file, and the environment needs a folder: say VENV=/another" in said
    assert (course.root / "here").read_text() == "ten years of work"


@pytest.mark.parametrize("was", ["cut short", "ready, and then the course moved"])
def test_what_is_no_part_of_an_environment_survives_even_where_one_is_made_afresh(course, tmp_path, was):
    mine, elsewhere = course.venv / "my other environment" / "bin", tmp_path / "a big disk"
    if was == "cut short":
        cut_short(course)
    else:
        course.run()
        (course.venv / "flashlab-ready.json").write_text('{"folder": "/somewhere/else"}')
    mine.mkdir(parents=True)
    elsewhere.mkdir()
    for folder in (mine, elsewhere):
        (folder / "thesis.tex").write_text("ten years of work")
    shutil.rmtree(course.venv / "include", ignore_errors=True)
    (course.venv / "include").symlink_to(elsewhere)
    assert ("was cut short" if was == "cut short" else "it was moved or copied") in course.run().stdout
    course.assert_right()
    assert (mine / "thesis.tex").exists() and (elsewhere / "thesis.tex").exists()


def test_without_its_pyvenv_cfg_nothing_goes_into_the_base(course):
    course.run()
    (course.venv / "pyvenv.cfg").unlink()  # from here on bin/python is the base's
    done = course.run()
    assert "its Python does not run" in done.stdout
    course.assert_right()


# ---- repairs


def test_new_pins(course):
    """They are installed over the old; what cannot be fetched leaves what was there; cut short, all is made afresh."""
    course.run()
    project = course.root / "pyproject.toml"
    (course.venv / "mine").touch()
    project.write_text('[project]\ndependencies = ["torch==8"]\n')
    assert course.run("hello.py").stdout.startswith(f"bringing {course.venv} up to date")
    assert len(course.pip_runs()) == 2 and (course.venv / "mine").exists()
    old = project.read_text()
    project.write_text('[project]\ndependencies = ["torch==9"]\n')
    (course.root / "pip.py").write_text("raise SystemExit('ERROR: No matching distribution found for torch==9')")
    done = course.run()
    assert done.returncode == 1 and "No matching distribution found for torch==9." in done.stderr
    (course.root / "pip.py").write_text(FAKE_PIP)
    project.write_text(old)
    assert course.run("hello.py").stdout == f"hello from {course.venv}\n"
    project.write_text('[project]\ndependencies = ["torch==9"]\n')
    cut_short(course)
    assert "an earlier set-up was cut short" in course.run().stdout
    course.assert_right()


def test_the_doctor_needs_no_set_up_and_none_is_made_where_none_is_wanted(course):
    (course.root / "doctor.py").write_text("import sys; print('seen by', sys.prefix)")
    assert course.run("doctor.py").stdout == f"seen by {sys.prefix}\n"
    assert course.run("hello.py", VENV="none").stdout == f"hello from {sys.prefix}\n"
    assert not course.venv.exists()
    course.run()
    assert course.run("doctor.py").stdout == f"seen by {course.venv}\n"


def test_what_leads_astray_stays_out(course):
    (course.root / "hello.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    done = course.run("hello.py", PYTHONPATH="/somewhere", PIP_TARGET="/somewhere", PIP_USER="1")
    variables = json.loads(done.stdout.splitlines()[-1])
    assert not {"PYTHONPATH", "PIP_TARGET"} & set(variables)
    assert variables["PIP_USER"] == "0" and variables["PIP_REQUIRE_VIRTUALENV"] == "1"
    assert variables["VIRTUAL_ENV"] == str(course.venv)
    assert variables["PATH"].startswith(f"{course.venv}/bin:")


# ---- uv


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An environment whose Python is this one, and a uv on the PATH."""
    path = str(tool_box(tmp_path / "bin", {"uv": ""}))
    monkeypatch.setenv("PATH", path)
    environment = bootstrap.Environment(tmp_path)
    environment.python = Path(sys.executable)
    keep = {"PATH": path, "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    monkeypatch.setattr(bootstrap, "VARIABLES", keep)
    return environment


def test_uv_is_told_what_pip_is_told(here, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url = https://b/simple\n  https://c/simple\n"
    )
    bootstrap.VARIABLES.update(PIP_INDEX_URL="https://d/simple", PIP_FIND_LINKS="/wheels")
    words = [str(word) for word in here.uv()]
    assert words[:5] == [str(tmp_path / "bin" / "uv"), "pip", "install", "--python", sys.executable]
    pairs = list(zip(words, words[1:], strict=False))
    assert ("--default-index", "https://d/simple") in pairs  # the variable wins over the file
    assert ("--index", "https://b/simple") in pairs and ("--index", "https://c/simple") in pairs
    assert ("-f", "/wheels") in pairs


def test_pip_it_is_without_uv_or_without_an_index(here, monkeypatch):
    bootstrap.VARIABLES.update(PIP_NO_INDEX="1")
    assert here.uv() == []
    bootstrap.VARIABLES.pop("PIP_NO_INDEX")
    assert here.uv() != []
    monkeypatch.setenv("PATH", "/nowhere")
    assert here.uv() == []
