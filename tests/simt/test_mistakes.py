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

N, BUILDS = 4096, ("check", "fast")
pytestmark = pytest.mark.usefixtures("little_patience")


def cases(name: str, expected: str) -> dict[str, tuple[re.Match, set[int]]]:
    """kernel -> what its comment says, and the lines that are marked in it or in what stands before it."""
    found, lines, waiting = {}, set(), None
    for number, line in enumerate(Path(KERNELS / name).read_text().splitlines(), 1):
        if match := re.search(expected, line):
            waiting, lines = match, set()
        if "// <-" in line:
            lines.add(number)
        if waiting and (entry := re.search(r"^(?:KERNEL|ENTRY)\((\w+)|^extern \"C\" int run_(\w+)", line)):
            found[entry[1] or entry[2]] = (waiting, lines)
            waiting = None
    return found


MISTAKES = cases("mistakes.cu", r"// expect: (?P<check>[^|]*) \| (?P<fast>[^;]*)(; (?P<words>.*))?$")
RIGHT = cases("right.cu", r"// out\[0\] = (?P<first>[\d.]+)")
HOST = cases("host.cu", r"// expect: (?P<error>\w+): (?P<words>.*)$")
CASES = [  # of those that are told in words of their own each one
    pytest.param(kernel, build, id=f"{kernel}-{build}", marks=[] if x["words"] else pytest.mark.every(3))
    for kernel, (x, _) in MISTAKES.items() for build in BUILDS
]  # fmt: skip
# Of what ends the launch. All else that does is an IllegalAccess.
ERRORS = {
    simt.DeadlockError: "divergent deadlock lanes-missing mask-without-self barrier-arguments",
    simt.KernelTrap: "assert trap division-by-zero host-call launch-in-kernel",
    simt.KernelTimeout: "timeout",
    simt.LaunchError: "launch-configuration",
    simt.SimtError: "copy-size",
}


def run(name: str, entry: str, check: bool) -> tuple[simt.Report, np.ndarray]:
    given, out = np.arange(1, N + 1, dtype=np.float32), np.zeros(N, np.float32)
    try:
        report = module(name, check).launch(f"run_{entry}", given, out, 64)
    except simt.SimtError as error:
        report = error.report
        kind = next((f.kind for f in report.findings if f.fatal), report.findings[0].kind)
        assert type(error) is next((e for e, kinds in ERRORS.items() if kind in kinds.split()), simt.IllegalAccess)
        assert not out.any()  # a launch that failed brings nothing back
    assert (given == np.arange(1, N + 1)).all()  # nor is a const array the caller's
    return report, out


@pytest.mark.parametrize("kernel, build", CASES)
def test_a_mistake_is_found_and_told(kernel, build, capfd):
    expected, lines = MISTAKES[kernel]
    report, _ = run("mistakes.cu", kernel, build == "check")
    wanted = expected[build].split()
    if not report.findings:
        assert "-" in wanted
        return
    finding = report.findings[0]
    assert finding.kind in wanted, report
    assert re.search(expected["words"] or "", finding.message), report
    if lines:
        assert finding.line in lines and finding.other_line in {None, *lines}, report
    assert capfd.readouterr().out == ""


def test_what_a_finding_holds():
    report, _ = run("mistakes.cu", "syncwarp_for_the_block", True)
    writes, reads, unset = report.findings
    assert (writes.line, writes.other_line) == (reads.other_line, reads.line) and unset.kind == "uninitialised-shared"
    assert reads.text.startswith("out[T] = s[127 - T]") and reads.thread[0] + reads.other_thread[0] == 127
    with pytest.raises(simt.KernelFindings, match="race") as caught:
        report.raise_if_findings()
    assert caught.value.report is report
    (finding,) = run("mistakes.cu", "a_buffer_of_the_block_before", True)[0].findings
    assert (finding.block, finding.thread, finding.times) == ((1, 0, 0), (0, 0, 0), 64)
    good, _ = run("right.cu", "neighbouring_bytes", True)
    assert good.raise_if_findings() is good


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
    assert len(MISTAKES) >= 72 and len(RIGHT) >= 8 and len(HOST) >= 22
