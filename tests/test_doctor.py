"""The doctor and the command line: they have to work exactly where something else does not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from typer.testing import CliRunner

from flashlab import bench, cli, doctor
from flashlab.exercises import record

ROOT = Path(__file__).resolve().parents[1]


def run_doctor(*flags, options=(), **variables):
    """doctor.py by its path, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *flags, doctor.__file__, *options],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout


def package(folder, name, source):
    """A package of that name that shadows the real one when `folder` is on PYTHONPATH."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    return str(folder)


GPU = {
    "name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132, "shared_memory_per_block": 232448,
    "memory": 150_000_000_000,
}  # fmt: skip


def machine(**software):
    """A report of a well-equipped machine without a GPU, before it is judged; `software` changes some of it."""
    return {
        "machine": {"system": "Linux", "cores": 8, "memory": 16e9, "disk_free": 50e9},
        "software": {
            "python": "3.12.4",
            "environment": "/env",
            "torch": {"version": "2.13.0+cpu", "built_for_cuda": None, "gpu_usable": False, "gpus": []},
            "triton": {"version": "3.7.1"},
            "numpy": {"version": "2.4.6"},
            "jupyterlab": "4.6.6",
            "compiler": "g++",
            "python_headers": True,
            "nvcc": None,
            "ptxas": True,
            "driver_cuda": None,
            **software,
        },
        "gpus": [],
        "interpret": None,
    }


def gpu_machine(gpu=GPU, **software):
    torch = {"version": "2.13.0+cu130", "built_for_cuda": "13.0", "gpu_usable": True, "gpus": [gpu]}
    report = machine(**{"torch": torch, "nvcc": "13.0", "driver_cuda": "13.0", **software})
    report["gpus"] = [gpu]
    return report


INTERPRETING = gpu_machine() | {"interpret": True}
OLD_DRIVER = gpu_machine(driver_cuda="12.2")
OLD_DRIVER["software"]["torch"] |= {"gpu_usable": False, "gpus": []}


def modes(report):
    return {phase.number: doctor.phase_report(phase, report)["mode"] for phase in doctor.PHASES}


# ---- what is asked


def test_the_report_of_this_machine_is_json_and_complete():
    report = json.loads(run_doctor(options=["--json"]))
    assert report["software"]["torch"]["version"] == torch.__version__
    assert report["software"]["triton"]["version"] == triton.__version__
    assert report["software"]["torch"]["gpu_usable"] == torch.cuda.is_available()
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory"] > 1e8
    assert [phase["number"] for phase in report["phases"]] == [phase.number for phase in doctor.PHASES]
    assert all(phase["mode"] != "cannot run" for phase in report["phases"][:4])


@pytest.mark.long
def test_the_json_holds_what_pytorch_collects_and_no_home_folder():
    text = run_doctor(options=["--json"], HOME=str(ROOT.parent), FLASHLAB_INTERPRET="")
    collected = json.loads(text)["collect_env"]
    assert collected["torch_version"] == torch.__version__
    assert {"os", "gcc_version", "python_platform", "nvidia_driver_version", "cpu_info", "pip_packages"} <= set(
        collected
    )
    assert f"{ROOT.parent}/" not in text
    assert "collect_env" not in run_doctor()


@pytest.mark.parametrize(
    "name, source, words",
    [("torch", "raise OSError('libbroken.so.1: no such file')", "libbroken.so.1"),
     pytest.param("triton", "import os; os.abort()", "ended the process", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_package_that_does_not_load_is_one_sentence(tmp_path, name, source, words):
    report = json.loads(run_doctor(options=["--json"], PYTHONPATH=package(tmp_path, name, source)))
    assert words in report["software"][name]["broken"]
    modes = [phase["mode"] for phase in report["phases"]]
    assert modes[3] == "cannot run" and (modes[2] == "native") == (name == "triton")
    assert any(text.startswith(f"{name} is installed but does not load") for text in report["advice"])


def test_an_import_that_hangs_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", package(tmp_path, "slowpoke", "import time; time.sleep(60)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.ask_package("slowpoke", timeout=0.5) == {"broken": "importing it took more than 0 s"}


def test_without_any_package_it_says_so_in_plain_text():
    text = run_doctor("-S")  # no site-packages: no torch, no rich
    assert "torch, triton and numpy are not installed" in text
    assert "`make lab` installs everything" in text
    assert "Minimal".lower() in text.lower()


def test_the_command_survives_a_broken_torch(tmp_path):
    command = Path(sys.executable).with_name("flashlab")
    if not command.exists():
        pytest.skip("flashlab is not installed in this environment")
    variables = {**os.environ, "PYTHONPATH": package(tmp_path, "torch", "raise ImportError('no libtorch')")}
    done = subprocess.run([command, "doctor"], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert "no libtorch" in done.stdout
    done = subprocess.run([command, "progress"], capture_output=True, text=True, env=variables)
    assert done.returncode == 1
    assert "`flashlab doctor` says why" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    done = subprocess.run([sys.executable, "-c", "import flashlab"], capture_output=True, text=True, env=variables)
    assert "ImportError: no libtorch" in done.stderr  # everybody else gets the real error


# ---- what is made of it


def test_without_a_gpu_triton_is_interpreted_and_cuda_emulated():
    found = modes(machine())
    assert {found[n] for n in (0, 2, 10)} == {"native"}
    assert {found[n] for n in (1, 3, 4, 5)} == {"interpreted"}
    assert {found[n] for n in (6, 7, 8, 9, 11)} == {"emulated"}
    assert doctor.advice(machine()) == []


def test_with_a_gpu_everything_is_native():
    assert {mode for number, mode in modes(gpu_machine()).items() if number not in (12, 13)} == {"native"}
    assert doctor.advice(gpu_machine()) == []
    ampere = gpu_machine({**GPU, "name": "NVIDIA A100", "capability": [8, 0]})
    assert modes(ampere)[11] == "emulated"  # TMA and wgmma are Hopper's
    assert modes(ampere)[8] == "native" and modes(ampere)["11b"] == "interpreted"
    assert modes(INTERPRETING)[3] == modes(OLD_DRIVER)[3] == "interpreted"  # a wish wins over the GPU


@pytest.mark.parametrize(
    "variables, want",
    [
        ({}, None),
        ({"TRITON_INTERPRET": "1"}, True),
        ({"FLASHLAB_INTERPRET": "0", "TRITON_INTERPRET": "1"}, False),
        ({"FLASHLAB_INTERPRET": "1"}, True),
        ({"TRITON_INTERPRET": "0"}, None),
    ],
)
def test_the_wish_is_read_as_the_runtime_reads_it(monkeypatch, variables, want):
    for name in ("FLASHLAB_INTERPRET", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert doctor._wish_to_interpret() is want


@pytest.mark.parametrize(
    "report, words",
    [
        (machine(triton={"missing": True}), "triton is not installed in /env"),
        (machine(torch={"missing": True}, triton={"missing": True}), "torch and triton are not installed"),
        (machine(triton={"version": "3.9.0"}), "was not tried with"),
        (machine(jupyterlab=None), "JupyterLab is not installed"),
        (machine(driver_cuda="12.4"), "this torch is a CPU build"),
        (machine(compiler=None), "no C++ compiler"),
        (machine(python="3.9.1"), "outside 3.10 to 3.14"),
        (INTERPRETING, "FLASHLAB_INTERPRET"),
        (OLD_DRIVER, "built for CUDA 13.0 and cannot use the GPU (driver: CUDA 12.2)"),
        (gpu_machine({**GPU, "name": "Tesla T4", "capability": [7, 5]}), "compute capability 7.5"),
        (gpu_machine(python_headers=False), "python3.12-dev"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_advice_names_what_is_missing_or_cannot_be_used(report, words):
    (said,) = doctor.advice(report)
    assert words in said and said.endswith(".")


def test_every_row_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    report = gpu_machine()
    report["phases"] = [doctor.phase_report(phase, report) for phase in doctor.PHASES]
    report["advice"] = ["Do this."]
    doctor.print_report(report)
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "NVIDIA H200, compute capability 9.0",
        "232448 bytes of shared memory per block",
        "built for CUDA 13.0",
        "Do this.",
    ):
        assert words in text
    for phase in doctor.PHASES:
        assert phase.title.split(":")[0] in text


# ---- the other commands


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def test_progress_shows_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(tmp_path / "progress.jsonl"))
    record.solved("0.1")
    result = invoke("progress")
    assert result.exit_code == 0, result.output
    assert "solved" in result.output


def test_check_goes_on_after_a_failure_and_ends_with_status_1(monkeypatch):
    def broken():
        raise RuntimeError("it is broken")

    monkeypatch.setattr(cli, "CHECKS", (("first", broken), ("second", lambda: "it works")))
    result = invoke("check")
    assert result.exit_code == 1
    assert "✗ first" in result.output and "it is broken" in result.output
    assert "✓ second" in result.output and "it works" in result.output
    monkeypatch.setattr(cli, "CHECKS", (("second", lambda: "it works"),))
    assert invoke("check").exit_code == 0


@pytest.mark.parametrize("name", [name for name, _ in cli.CHECKS])
@pytest.mark.every(2)
def test_the_course_works_on_this_machine(name):
    assert dict(cli.CHECKS)[name]()


def test_every_bench_has_a_row_and_options_of_its_own():
    found = re.compile(r"^(def main\(|main(, \w+)* = )", re.M)
    modules = {
        p.stem for p in Path(bench.__file__).parent.glob("*.py")
        if found.search(p.read_text()) and p.stem != "harness"  # the others' own
    }  # fmt: skip
    assert modules == set(cli.BENCHES)
    for name in cli.BENCHES:
        help_ = invoke("bench", name, "--help").output
        assert f"flashlab bench {name}" in help_
        assert name == "readme" or ("--out FILE" in help_ and "--quick" in help_)  # which measures nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [name for name, (_, needs) in cli.BENCHES.items() if "GPU" in needs])
def test_a_bench_that_needs_a_gpu_says_so(name):
    result = invoke("bench", name)
    assert result.exit_code == 1
    assert "GPU" in result.output and "Traceback" not in result.output
