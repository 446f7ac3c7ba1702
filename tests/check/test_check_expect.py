"""expect and expect_close: what passes, what fails, and with which words."""

import math
from functools import partial

import pytest
import torch
from failing import failure_of

from flashlab.check import CheckFailed, expect, expect_close

failure = partial(failure_of, expect_close)


@pytest.mark.parametrize(
    "got, want",
    [
        (1.0, 1.0),
        (torch.tensor([1.0, -math.inf]), [1.0, -math.inf]),
        (torch.full((3,), 1.0), torch.full((3,), 1.0 + 1e-6)),
        (torch.full((3,), 100.0).half(), torch.full((3,), 100.05, dtype=torch.float64)),
        (torch.empty(0), torch.empty(0)),
        (torch.tensor(math.nan), math.nan),
    ],
)
def test_what_is_close_passes(got, want):
    assert expect_close(got, want, what="x") >= 0


@pytest.mark.parametrize(
    "got, want, words, diagnosis",
    [
        (None, 1.0, "is None", "returned-none"),
        ("four", 4.0, "not str", "wrong-type"),
        (torch.zeros(2), torch.zeros(3), "shape [2]", "wrong-shape"),
        (torch.tensor([1.0, math.nan]), [1.0, 2.0], "NaN at [1]", "wrong-value"),
        (torch.tensor([1.0, math.inf]), [1.0, 2.0], "it is inf", "wrong-value"),
        (torch.tensor([1.0, 2.0]), [1.0, math.inf], "should be inf", "wrong-value"),
        (torch.tensor([1.0, math.inf]), [1.0, -math.inf], "should be -inf", "wrong-value"),
        (torch.full((3,), 1.0), torch.full((3,), 1.001), "allowed error", "wrong-value"),
        (1.0, 1.0 + 1e-6, "allowed error", "wrong-value"),
    ],
)
def test_what_is_not_close_fails_with_a_sentence(got, want, words, diagnosis):
    failed = failure(got, want, what="x")
    assert words in str(failed) and failed.diagnosis == diagnosis
    assert "\n" not in str(failed)


def test_the_place_of_the_worst_element_is_named():
    got = torch.zeros(2, 3)
    got[1, 2] = 5.0
    assert "at [1, 2]: it is 5, it should be 0" in str(failure(got, torch.zeros(2, 3), what="P"))


def test_because_ends_the_sentence():
    assert str(failure(1.0, 2.0, what="x", because="look at the sign")).endswith("; look at the sign")


def test_expect_takes_tensors_as_conditions():
    expect(torch.tensor(True), "never", diagnosis="x")
    with pytest.raises(CheckFailed, match="not so"):
        expect(torch.tensor(False), "not so", diagnosis="x")
