"""What is said to be common to the errors of a wrong tensor is true of all of them."""

from __future__ import annotations

import re

import pytest
import torch

from flashlab.check import CheckFailed, expect_close, pattern

X = torch.randn(24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def shown(actual: torch.Tensor, expected: torch.Tensor = X) -> str | None:
    return pattern.observe(actual, expected, 1e-6)


def changed(rows=slice(None), columns=slice(None), by: float = 1.0) -> torch.Tensor:
    y = X.clone()
    y[rows, columns] += by + y[rows, columns].cos()
    return y


@pytest.mark.parametrize(
    "actual, sentence",
    [
        (2.5 * X, "every value is 2.5 times what it should be"),
        (X - 0.25, "every value is 0.25 too small"),
        (changed(rows=slice(4, 8)), "wrong: rows 4 to 7; all of the others are right"),
        (changed(rows=[3]), "wrong: row 3; all of the others are right"),
        (changed(columns=slice(1, None, 2)), "wrong: the odd columns; all of the others are right"),
        (changed(rows=[0, 5, 9]), "wrong: rows 0, 5, 9; all of the others are right"),
        (changed(rows=slice(4, 8), columns=slice(4, 8)), None),
        (changed(), None),
        (X * torch.nan, None),
    ],
    ids=str,
)
def test_what_is_observed(actual, sentence):
    assert shown(actual) == sentence


def test_exchanged_axes():
    assert shown(X[:, :24].T, X[:, :24]) == "rows and columns are exchanged"


@pytest.mark.parametrize("axis", [0, 1])
def test_right_values_in_wrong_places(axis):
    said = shown(X.roll(1, axis))
    *here, a, b = map(int, re.findall(r"\d+", said))
    there = (a, b)
    assert (here[axis] - 1) % X.shape[axis] == there[axis] and here[1 - axis] == there[1 - axis]


def test_a_column_in_place_of_another():
    got = X.clone()
    got[:, 1::2] = X[:, ::2]
    assert shown(got).startswith("column 1 holds what belongs in column 0, as well as that one; so for the odd columns")


def test_fewer_digits():
    assert "off by at most" in shown(X.half().double()) and "fewer digits" in shown(X.half().double())
    assert shown(X.sign() * X.abs() ** 0.9) is None


def test_zeros_are_not_called_right_values_of_another_place():
    want = X.clone()
    want[0] = 0.0  # a key that no query sees
    got = want.clone()
    got[4:8] = 0.0
    assert shown(got, want) == "wrong: rows 4 to 7, and are 0 everywhere; all of the others are right"


def test_what_says_nothing_is_not_said():
    scattered = X.clone()
    scattered[[0, 1, 2, 4, 5, 7, 9]] += torch.arange(1.0, 8.0)[:, None] * X[0]
    assert shown(scattered) is None  # no run of rows
    assert "times what" not in (pattern.observe(1.006 * X, X, 0.01) or "")  # most of them are within the bound
    mask = torch.ones(4, 6, dtype=torch.float64).tril()
    assert shown(mask.index_fill(1, torch.tensor([3]), 0.0), mask) is None  # row 3 is then like row 2, by chance


def test_zeros_that_are_right_by_themselves_are_no_sign():
    want = X.clone()
    want[:, 6:] = 0.0  # keys that are hidden
    assert shown(want + want.cos() * want, want) is None
    small = torch.zeros(4, 6, dtype=torch.float64)
    small[1] = 2146.0
    assert shown(0.98 * small, small) is None  # one number is some multiple of any other


def test_a_few_values_may_be_near_others_by_chance():
    y = X.clone()
    y[2, 3] = X[7, 7]
    assert shown(y, X.round(decimals=1)) is None


def test_it_is_said_with_the_comparison():
    with pytest.raises(CheckFailed, match=r"y is wrong at .*; every value is 3 times what it should be"):
        expect_close(3 * X, X, what="y")


def test_a_factor_of_each_row_that_is_made_of_something_known():
    lse = X[:, 0].clone()
    known = {"delta": X[:, 1].abs() + 1, "lse": lse}

    def said(factors):
        return pattern.observe(factors[:, None] * X, X, 1e-9, known)

    assert said(torch.exp(0.5 * lse)).endswith("which is exp(0.5 * lse)")
    assert said(torch.exp(1 - lse)).endswith("which is exp(-1 * lse +1)")
    assert said(3 / known["delta"]).endswith("which is 3 * 1 / delta")
    assert "What is it multiplied" in said(torch.exp(lse * lse))
