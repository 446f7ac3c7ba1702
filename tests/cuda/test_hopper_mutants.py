"""Every broken Hopper kernel of the zoo is found, in words that name its mistake; the kernels they come from pass."""

from __future__ import annotations

import pytest

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import examine
from flashlab.check.mistakes.hopper import MUTANTS
from flashlab.check.mistakes.joint import CHOICE, joint
from flashlab.check.mistakes.series import Mutant
from flashlab.kernels.series import whole

JOINT = joint(MUTANTS)


def told(mutant: Mutant) -> CheckFailed:
    """What is said of it, in the build that it shares with others."""
    source, number = JOINT[mutant.name]
    options = {"max_seq": 150, "sms": 132} | mutant.options
    options["sms"] += number * CHOICE
    with pytest.raises(CheckFailed) as caught:
        examine(source, fast=False, **options)
    return caught.value


def test_the_zoo_is_large_and_its_names_are_its_own():
    assert len(MUTANTS) >= 24
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
@pytest.mark.every(6)
def test_a_broken_kernel_is_told_its_mistake(mutant):
    said = told(mutant)
    assert said.diagnosis in mutant.found, str(said)
    for words in mutant.words:
        assert words in str(said)


@pytest.mark.parametrize("file", sorted({m.file for m in MUTANTS}))
def test_the_kernels_they_come_from_pass(file):
    """In the build of their mutants, of which none is chosen."""
    first = next(m for m in MUTANTS if m.file == file and JOINT[m.name][1])
    source, _ = JOINT[first.name]
    assert examine(source, fast=False, max_seq=150, sms=first.options.get("sms", 132)).cases > 30


def test_a_joint_source_keeps_the_lines_of_its_step():
    for mutant in MUTANTS:
        source, _ = JOINT[mutant.name]
        lines = whole(mutant.file).count("\n")
        assert source.text.count("\n") == lines
        assert "chosen" not in "".join(source.place(n) for n in range(lines)), mutant.name


def test_a_mutant_that_no_longer_fits_is_told():
    with pytest.raises(ValueError, match="'no such line' occurs 0 times in p11_4_producer.cu, gone"):
        joint([Mutant("gone", "p11_4_producer", (("no such line", ""),), ())])
