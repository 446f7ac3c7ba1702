"""Builds shared by the emulator's tests: each kernel file is compiled once for each kind of build."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flashlab.cuda.toolchain import nvcc
from flashlab.kernels import PTX
from flashlab.simt import HostError, Module, Report, SimtError, compile_cuda, process, run
from flashlab.simt.build import INCLUDE

KERNELS = Path(__file__).parent / "kernels"


_modules: dict[str, Module] = {}


def module(name: str, check: bool = True, **options) -> Module:
    """A build of one of the files in kernels/."""
    key = repr((name, check, sorted(options.items())))
    if key not in _modules:
        _modules[key] = compile_cuda(KERNELS / name, check=check, **options)
    return _modules[key]


def both_builds(name: str):
    """A fixture: the fast build of a file, and the watched one."""
    return pytest.fixture(params=["fast", "check"])(lambda request: module(name, request.param == "check"))


def marked(name: str) -> dict[str, int]:
    """Line numbers of a file by what stands there behind `// <-`."""
    lines = enumerate((KERNELS / name).read_text().splitlines(), 1)
    return {m[1]: n for n, text in lines if (m := re.search(r"// <- (.*)$", text))}


def report_of(entry: Callable[..., Report], *args, **options) -> Report:
    """What a call reports, whether the launch was ended or not; the host part it may not end."""
    try:
        return entry(*args, **options)
    except SimtError as error:
        assert error.report is not None and not isinstance(error, HostError), error
        return error.report


def compile_for_hopper(name: str, out: Path, *options: str) -> str:
    """A file as nvcc compiles it for sm_90a; what ptxas said."""
    command = [nvcc(), "-std=c++17", "-I", str(INCLUDE), "-I", str(PTX), "-gencode=arch=compute_90a,code=sm_90a"]
    done = subprocess.run([*command, *options, "-o", str(out), str(KERNELS / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def little_patience(monkeypatch):
    """What never ends is given up after 2 s of its own work: a busy machine does not cut short what ends."""
    monkeypatch.setattr(run, "PATIENCE", 2.0)
    monkeypatch.setattr(process, "PATIENCE", 0.5)  # and killed that much later, where it does not end by itself
