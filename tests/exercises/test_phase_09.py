"""Phase 9's checks: right answers pass, and the mistakes that learners make are named."""

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

LESSON = Path(__file__).resolve().parents[2] / "src" / "lessons" / "09_past_flash_attention_2_exercises.py"
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
    "9.1": "merge_loop",
    "9.2": ("before_loop", "in_loop"),
}


@pytest.mark.parametrize("id", ANSWERS)
def test_the_solution_passes(id):
    names = ANSWERS[id]
    assert check(id, *map(solution, [names] if isinstance(names, str) else names))


@pytest.mark.parametrize("id", ANSWERS)
def test_text_is_wanted(id):
    assert diagnosis(id, *[3] * (1 if isinstance(ANSWERS[id], str) else 2)) == "wrong-type"


@pytest.mark.parametrize(
    "change, slug",
    [
        (("exp2_approx((part_lse[s * rows + row] - base) * LOG2E)", "1.f"), "split-not-weighted"),
        (("l_i += weight;", "l_i = 1.f;"), "split-not-normalised"),
        ((" - base", " - m_i"), "masked-rows-nan"),
        (("weight * x.y", "x.y"), "split-not-weighted"),
    ],
)
def test_a_wrong_merge(change, slug):
    got = diagnosis("9.1", solution("merge_loop", change))
    assert got == slug


@pytest.mark.parametrize(
    "change, slug",
    [
        (("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = 0"), "wrong-wait-count"),
        (("load_kv(j - STAGES + 1)", "load_kv(j - 1)"), "stage-overwritten"),
        (("cp_async_wait<STAGES - 1>", "cp_async_wait<STAGES>"), "read-before-wait"),
    ],
)
def test_a_wrong_third_stage(change, slug):
    texts = (solution(name, *[change] if change[0] in TEXTS[name]["SOLUTION"] else []) for name in ANSWERS["9.2"])
    got = diagnosis("9.2", *texts)
    assert got == slug or (slug == "stage-overwritten" and got == "read-before-wait")
