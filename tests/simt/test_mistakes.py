"""Broken kernels and broken host parts, and right ones that look like them: kernels/mistakes.cu, host.cu, right.cu.

Each runs in a watched build and in a fast one. What a build can see is found, named by its kind and line. Whatever a
source does, Python goes on, and the same module can be called again.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from flashlab import simt

from .conftest import KERNELS, module

N = 4096
pytestmark = pytest.mark.usefixtures("little_patience")


def cases(name: str, expected: str) -> dict[str, tuple[re.Match, set[int]]]:
    """kernel -> what its comment says, and the lines that are marked in it or in what stands before it."""
    found, lines, waiting = {}, set(), None
    for number, line in enumerate(Path(KERNELS / name).read_text().splitlines(), 1):
        if match := re.search(expected, line):
            waiting, lines = match, set()
        if "// <-" in line:
            lines.add(number)
        if waiting and (entry := re.search(r"^(?:RUN|ENTRY)\((\w+)|^extern \"C\" int run_(\w+)", line)):
            found[entry[1] or entry[2]] = (waiting, lines)
            waiting = None
    return found


MISTAKES = cases("mistakes.cu", r"^// expect: (?P<check>[^|]*) \| (?P<fast>.*)$")
RIGHT = cases("right.cu", r"^// out\[0\] = (?P<first>[\d.]+)")
HOST = cases("host.cu", r"^// expect: (?P<error>\w+): (?P<words>.*)$")


def run(name: str, entry: str, check: bool) -> tuple[simt.Report, np.ndarray]:
    given, out = np.arange(1, N + 1, dtype=np.float32), np.zeros(N, np.float32)
    return module(name, check).launch(f"run_{entry}", given, out, 64), out


@pytest.mark.parametrize("build", ["check", "fast"])
@pytest.mark.parametrize("kernel", MISTAKES)
@pytest.mark.every(3)
def test_a_mistake_is_found(kernel, build):
    expected, lines = MISTAKES[kernel]
    wanted = expected[build].split()
    try:
        report, _ = run("mistakes.cu", kernel, build == "check")
    except simt.SimtError as error:
        assert not isinstance(error, simt.HostError), error
        report = error.report
    if not report.findings:
        assert "-" in wanted
        return
    finding = report.findings[0]
    assert finding.kind in wanted, report
    if lines:
        assert finding.line in lines and finding.other_line in {None, *lines}, report


@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
@pytest.mark.parametrize("kernel", RIGHT)
def test_what_is_right_is_let_through(kernel, check):
    report, out = run("right.cu", kernel, check)
    assert report.ok, report
    assert out[0] == float(RIGHT[kernel][0]["first"])


@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
@pytest.mark.parametrize("entry", HOST)
@pytest.mark.every(6)
def test_python_survives_the_host_part(entry, check):
    expected, lines = HOST[entry]
    built, p = module("host.cu", check), np.zeros(64, np.float32)
    with pytest.raises(getattr(simt, expected["error"])) as caught:
        built.launch(f"run_{entry}", p, 64, echo=False)
    message = str(caught.value)
    assert re.search("|".join(map(re.escape, expected["words"].split("|"))), message), message
    if lines and "in line" in message:
        assert any(f"in line {n}" in message for n in lines), message
    assert not p.any()  # a call that failed brings nothing back
    with pytest.raises(simt.LaunchError, match="returned -7"):
        built.run_an_error_code(p, 64)


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 100 and len(RIGHT) >= 20 and len(HOST) >= 28
