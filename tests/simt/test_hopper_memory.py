"""Waits whose answer counts, where tensor maps lie, proxies, volatile, and equal stores: kernels/hopper_memory.cu.

The legal variants are as many as the mistakes, and nothing is objected to in them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashlab import simt

from .conftest import KERNELS, marked, module, report_of

TEXT = (KERNELS / "hopper_memory.cu").read_text().splitlines()
MARKED = marked("hopper_memory.cu")


def cases() -> dict[int, tuple[int, str]]:
    """mode -> the line of its comment, and what that says."""
    found, mode = {}, None
    for number, text in enumerate(TEXT, 1):
        if begin := re.match(r"    case (\d+):", text):
            mode = int(begin[1])
        if mode is not None and (said := re.search(r"// (expect: .*|right)$", text)):
            found[mode] = (number, said[1])
    return found


CASES = cases()
MISTAKES = {mode: (line, said) for mode, (line, said) in CASES.items() if said != "right"}
TWO_BLOCKS, ONE_BLOCK = (39, 46, 47, 60, 85, 86, 87, 89, 94), (*range(54), *range(67, 72))  # of others four


def findings(*args, check: bool = True, **options) -> list[simt.Finding]:
    return report_of(module("hopper_memory.cu", check).run_memory, *args, **options).findings


def run(mode: int, check: bool = True) -> list[simt.Finding]:
    blocks = 2 if mode in TWO_BLOCKS else 1 if mode in ONE_BLOCK else 4
    x, y, z = np.arange(128, dtype=np.float32), np.zeros(128, np.float32), np.zeros(64, np.int32)
    maps = np.zeros(4 * 128, np.uint8)
    found = findings(maps, x, y, z, mode, blocks, check=check, threads=2)
    if CASES[mode][1] == "right":
        if mode in (*range(3, 9), *range(16, 21)):
            np.testing.assert_array_equal(y[:64], x[:64])
        if mode == 60:
            assert z[1] == 2
    return found


def test_every_case_is_marked():
    assert len(CASES) == sum("    case " in text for text in TEXT) and len(CASES) - len(MISTAKES) >= 32


@pytest.mark.parametrize("mode", MISTAKES)
def test_a_mistake_is_found(mode):
    line, said = MISTAKES[mode]
    severity, kind, place, words = re.fullmatch(r"expect: (warning )?([\w-]+)(?: at (.*?))?; (.*)", said).groups()
    found = run(mode)
    assert found and found[0].kind == kind, found
    assert found[0].severity == ("warning" if severity else "error")
    assert found[0].line == (MARKED[place] if place else line) and words in found[0].message, found[0]


@pytest.mark.parametrize("mode", [mode for mode in CASES if mode not in MISTAKES])
@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
def test_what_is_legal_is_let_through(mode, check):
    assert not run(mode, check)


@pytest.mark.parametrize("mode", [39, 54, 63, 64, 65, 66, 72, 73, 75, 76, 77, 78, 79, *range(81, 96)])
def test_what_is_said_of_several_blocks_is_said_every_time(mode):
    """Whichever is faster."""
    first = [(f.kind, f.severity, f.line, f.other_line) for f in run(mode)]
    for _ in range(12):
        assert [(f.kind, f.severity, f.line, f.other_line) for f in run(mode)] == first


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_an_answer_that_is_not_looked_at_shows_in_a_fast_build(mode):
    """What is read is what was there before: nothing."""
    y = np.zeros(128, np.float32)
    x, z, maps = np.arange(128, dtype=np.float32), np.zeros(64, np.int32), np.zeros(512, np.uint8)
    findings(maps, x, y, z, mode, 1, check=False)
    assert np.isnan(y[:64]).all()


def test_an_answer_that_is_dropped_is_a_warning_of_the_compiler():
    source = '#include "ptx_sm90.cuh"\n__global__ void k() { mbarrier_try_wait(0, 0); }\nextern "C" void run() {}\n'
    assert re.search("nodiscard|unused-result", simt.compile_cuda(source).warnings)
