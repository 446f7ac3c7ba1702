"""Phase 8's checks: right answers pass, and the mistakes that learners make are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.simt import SimtError, find_compiler

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)

LESSON = Path(__file__).resolve().parents[2] / "src" / "lessons" / "08_pipelines_and_banks_exercises.py"
TEXTS = {}  # name -> {"STARTER": text, "SOLUTION": text}
for kind, cell in re.findall(r"# BEGIN (STARTER|SOLUTION)\n(.*?)# END", LESSON.read_text(), re.S):
    for name, text in re.findall(r'^(\w+) = r"""(.*?)"""', cell, re.S | re.M):
        TEXTS.setdefault(name, {})[kind] = text


def solution(name, *changes):
    text = TEXTS[name]["SOLUTION"]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def diagnosis(id, *answers):
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers)
    assert len(str(caught.value)) > 20
    return caught.value.diagnosis


ANSWERS = {
    "8.3": "at",
    "8.4": "in_flight",
    "8.5": "loop_head",
    "8.6": "tile_addresses",
}


@pytest.mark.parametrize("id", ANSWERS)
def test_the_solution_passes(id):
    names = ANSWERS[id]
    assert check(id, *map(solution, [names] if isinstance(names, str) else names))


@pytest.mark.parametrize("id", ANSWERS)
def test_text_is_wanted(id):
    assert diagnosis(id, *[3] * (1 if isinstance(ANSWERS[id], str) else 2)) == "wrong-type"


def test_wavefronts():
    assert check("8.1", lambda w: max([r * w // 16 % 8 for r in range(8)].count(g) for g in range(8)))
    assert diagnosis("8.1", lambda w: 8 if w % 128 == 0 else 1) == "wrong-value"
    assert diagnosis("8.1", lambda w: len({r * w // 16 % 8 for r in range(8)})) == "wrong-value"


@pytest.mark.parametrize(
    "place, slug",
    [
        (lambda row, chunk: chunk, "bank-conflicts"),
        (lambda row, chunk: chunk ^ (row // 2 % 8), "bank-conflicts"),
        (lambda row, chunk: (chunk + row) % 8, "not-a-permutation"),  # at 16 chunks
        (lambda row, chunk: chunk ^ row, "not-a-permutation"),
    ],
)
def test_a_wrong_swizzle(place, slug):
    assert diagnosis("8.2", place) == slug


def test_other_swizzles_are_welcome():
    assert check("8.2", lambda row, chunk: chunk ^ (row % 8))
    assert check("8.2", lambda row, chunk: chunk // 8 * 8 + (chunk + row) % 8)
    assert check("8.3", solution("at", ("(column / 8 ^ row % 8)", "(column / 64 * 8 + (column / 8 + row) % 8)")))


@pytest.mark.parametrize(
    "formula, slug",
    [
        ("row * ROW_BYTES + column * 2", "bank-conflicts"),
        ("row * ROW_BYTES + (column / 8 ^ row / 2 % 8) * 16", "bank-conflicts"),
        ("row * HEAD_DIM + (column / 8 ^ row % 8) * 16", None),  # rows overlap: one race or another
        ("row * ROW_BYTES + column / 8 ^ row % 8 * 16", None),
        ("rows * ROW_BYTES", "does-not-compile"),
    ],
)
def test_a_wrong_address(formula, slug):
    got = diagnosis("8.3", solution("at", ("row * ROW_BYTES + (column / 8 ^ row % 8) * 16", formula)))
    assert got == slug or (slug is None and got not in ("does-not-compile", "not-solved-yet"))


@pytest.mark.parametrize(
    "formula, slug", [("0", "waits-too-long"), ("STAGES - 1", "read-before-wait"), ("STAGES - 2", "wrong-value")]
)
def test_a_wrong_count_of_groups(formula, slug):
    assert diagnosis("8.4", solution("in_flight", ("STAGES == 1 ? 0 : STAGES - 2", formula))) == slug


def test_the_bug_hunts_begin_with_their_bug():
    assert diagnosis("8.5", TEXTS["loop_head"]["STARTER"]) == "stage-overwritten"
    assert diagnosis("8.6", TEXTS["tile_addresses"]["STARTER"]) == "swizzle-one-side"


def test_other_wrong_repairs():
    no_barrier = solution("loop_head", ("        __syncthreads();", "        //"))
    assert diagnosis("8.5", no_barrier) in ("read-before-wait", "race", "uninitialised-shared")
    unswizzled = solution("tile_addresses", ("(column / 8 ^ row % 8) * 16", "column * 2"))
    assert diagnosis("8.6", unswizzled) == "bank-conflicts"
