"""What Hopper's memory model asks of a kernel (kernels/hopper_memory.cu: waits whose answer counts, where tensor maps
lie, proxies, volatile), and what else a kernel can do to the emulator (hopper_hostile.cu).

The legal variants are nearly as many as the mistakes, and nothing is objected to in them.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashlab import simt

from .conftest import KERNELS, marked, module, report_of

pytestmark = pytest.mark.usefixtures("little_patience")
MEMORY, HOSTILE = "hopper_memory.cu", "hopper_hostile.cu"


def cases(name: str) -> dict[tuple[str, int], tuple[int, str]]:
    """file and mode -> the line of its comment, and what that says."""
    found, mode = {}, None
    for number, text in enumerate((KERNELS / name).read_text().splitlines(), 1):
        if begin := re.match(r"    case (\d+):", text):
            mode = int(begin[1])
        if mode is not None and (said := re.search(r"// (expect: .*|right)$", text)):
            found[name, mode] = (number, said[1])
    return found


CASES = cases(MEMORY) | cases(HOSTILE)
MARKED = marked(MEMORY)
MISTAKES, RIGHT = ([case for case, (_, said) in CASES.items() if (said == "right") == right] for right in (0, 1))
TWO_BLOCKS = (39, 46, 47, 85, 86, 87, 89, 94, 122)
ONE_BLOCK = (*range(54), *range(67, 72), *range(96, 139))  # of others four


def run(name: str, mode: int, check: bool = True) -> list[simt.Finding]:
    if name == HOSTILE:
        x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
        return report_of(module(name, check).run_hostile, x, y, mode, 128).findings
    blocks = 2 if mode in TWO_BLOCKS else 1 if mode in ONE_BLOCK else 4
    x, y, z = np.arange(128, dtype=np.float32), np.zeros(128, np.float32), np.zeros(64, np.int32)
    maps = np.zeros(4 * 128, np.uint8)
    found = report_of(module(name, check).run_memory, maps, x, y, z, mode, blocks, threads=2).findings
    if mode in (*range(3, 9), *range(16, 21), *range(96, 102), 125):  # right, and loaded
        np.testing.assert_array_equal(y[:64], x[:64])
    elif mode < 3 and not check:  # an answer that is not looked at: what is read is what was there before, nothing
        assert np.isnan(y[:64]).all()
    return found


def test_every_case_is_marked():
    text = "".join((KERNELS / name).read_text() for name in (MEMORY, HOSTILE))
    assert len(CASES) == text.count("    case ") and len(RIGHT) >= 61


@pytest.mark.parametrize("name, mode", MISTAKES)
def test_a_mistake_is_found(name, mode):
    """As one of these kinds, in this line or that one."""
    line, said = CASES[name, mode]
    form = r"expect: (warning )?([\w -]+?)(?: at (.*?))?(?: from (.*?))?; (.*)"
    severity, kinds, place, other, words = re.fullmatch(form, said).groups()
    found = run(name, mode)
    assert found and found[0].kind in kinds.split(), found
    assert found[0].severity == ("warning" if severity else "error")
    assert words in found[0].message, found[0]
    if other:  # of two that race, either may be named first
        assert {found[0].line, found[0].other_line} == {line, MARKED[other]}, found[0]
    else:
        assert found[0].line == (MARKED[place] if place else line), found[0]


@pytest.mark.parametrize("name, mode", [case for case in MISTAKES if case[0] == HOSTILE])
def test_a_fast_build_survives_it_and_sees_all_but_loads_and_stores(name, mode):
    line, said = CASES[name, mode]
    found = run(name, mode, False)
    assert found or mode in (21, 22, 23, 58)
    for finding in found[:1]:
        assert finding.kind in (*re.findall(r"[\w-]+", said.partition(";")[0]), "never-waited") and finding.line == line


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_an_answer_that_is_not_looked_at_shows_in_a_fast_build(mode):
    run(MEMORY, mode, check=False)


@pytest.mark.parametrize("name, mode", RIGHT)
@pytest.mark.parametrize("check", [True, False], ids=["check", "fast"])
def test_what_is_legal_is_let_through(name, mode, check):
    assert not run(name, mode, check)


WAITS = pytest.param(94, marks=pytest.mark.long)  # each time a second


@pytest.mark.parametrize("mode", [39, 54, 63, 64, 65, 66, 72, 73, 75, 76, 77, 78, 79, *range(81, 94), WAITS, 95])
def test_what_is_said_of_several_blocks_is_said_every_time(mode):
    """Whichever is faster."""
    first = [(f.kind, f.severity, f.line, f.other_line) for f in run(MEMORY, mode)]
    for _ in range(12):
        assert [(f.kind, f.severity, f.line, f.other_line) for f in run(MEMORY, mode)] == first


def test_an_answer_that_is_dropped_is_a_warning_of_the_compiler():
    source = '#include "ptx_sm90.cuh"\n__global__ void k() { mbarrier_try_wait(0, 0); }\nextern "C" void run() {}\n'
    assert re.search("nodiscard|unused-result", simt.compile_cuda(source).build.warnings)
