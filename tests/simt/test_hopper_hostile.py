"""What a kernel for Hopper can do to the emulator (kernels/hopper_hostile.cu): each a sentence, and Python goes on."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashlab import simt

from .conftest import KERNELS, module, report_of

THREADS = 128
pytestmark = pytest.mark.usefixtures("little_patience")
# number -> line, kinds of which any will do, words
CASES = {
    int(found[1]): (line, found[2].split(), found[3] or "")
    for line, text in enumerate((KERNELS / "hopper_hostile.cu").read_text().splitlines(), 1)
    if (found := re.search(r"case (\d+):.*// expect: ([^;]*)(?:; (.*))?$", text))
}


def run(case: int, check: bool) -> simt.Report:
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    return report_of(module("hopper_hostile.cu", check).launch, "run_hostile", x, y, case, THREADS)


@pytest.mark.parametrize("case", CASES)
def test_a_check_build_says_what_is_wrong(case):
    line, kinds, words = CASES[case]
    findings = run(case, True).findings
    if "-" in kinds:
        assert not findings, findings
        return
    assert findings and findings[0].kind in kinds, findings
    assert findings[0].line == line
    assert words in findings[0].message


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(3)
def test_a_fast_build_survives_it(case):
    line, kinds, _ = CASES[case]
    for finding in run(case, False).findings[:1]:
        assert finding.kind in (*kinds, "never-waited") and finding.line == line
