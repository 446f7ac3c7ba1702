"""Answers in a style of their own that no single change mends: which value is wrong, and what belongs there."""

import math
from fractions import Fraction

import pytest
import torch

from flashlab.attention.simulation import flash_attention_forward_sim
from flashlab.check import CheckFailed
from flashlab.check.changes import Text
from flashlab.check.lookup import Index
from flashlab.check.mend import mended
from flashlab.exercises import check, exercises

exercises()


def hiding_length(tflops, gb_s, heads, kv_heads, itemsize, world):
    flops, bandwidth = tflops * 10**12, gb_s * 10**9
    of_a_rank = Fraction(flops * itemsize * (heads + 2 * kv_heads), bandwidth * heads)
    return math.ceil(of_a_rank * world / (2 * world)) * 2 * world


def by_ratio(Q_block, K, V, BLOCK_N, splits, scale=None):
    outs, lses = [], []
    for k, v in zip(K.chunk(splits), V.chunk(splits), strict=True):
        o, lse = flash_attention_forward_sim(Q_block, k, v, BLOCK_N, scale)
        outs.append(o.float())
        lses.append(lse)
    lses, outs = torch.stack(lses), torch.stack(outs)
    lse = torch.logsumexp(lses, dim=0)
    weights = lses / lse
    return (weights[:, :, None] * outs).sum(dim=0).to(V.dtype), lse


@pytest.mark.parametrize(
    ("exercise", "answer", "told"),
    [
        ("13.4", (hiding_length,), "`heads + 2 * kv_heads` stands where `kv_heads` belongs"),
        ("2.8", (by_ratio,), "`lses / lse` stands where `torch.exp(lses - lse)` belongs"),
    ],
)
def test_what_belongs_is_told_in_the_learners_names(exercise, answer, told):
    with pytest.raises(CheckFailed, match="the rest is right") as failed:
        check(exercise, *answer)
    assert told in failed.value.sentence


def norm(x, y):
    size = math.sqrt(x * x + y * y)
    return 3.0 * size + 1.0


def norm_in_turns(x, y):
    total = 0.0
    for z in (x, y):
        total = total + z * z
    return 3.0 * math.sqrt(total) + 1.0


def of_absolute_values(a, b):
    length = abs(a) + abs(b)
    return length * 3.0 + 1.0


def of_exponentials(a, b):
    squares = math.exp(a) + math.exp(b)
    return math.sqrt(squares) * 3.0 + 1.0


def beyond_floats(a, b):
    huge = 10**400 * int(a)
    return math.exp(huge // 10**400 + b) * 3.0 + 1.0


def of_brain_floats(a, b):
    length = torch.tensor(a, dtype=torch.bfloat16).abs() + abs(b)
    return float(length) * 3.0 + 1.0


def wrong_throughout(a, b):
    return (a + b) * 2.0


def index_of(right):
    given = [(3.0, 4.0), (1.0, 2.0), (5.0, 12.0), (0.5, 0.25)]
    return Index([Text(right)], given, ["norm"], lambda x: (x,), 1e-6, more=[(2.0, 7.0)], case=lambda x: f"x={x[0]}")


def test_a_value_is_told_as_an_expression_where_there_is_one():
    belongs = "`abs(a) + abs(b)` stands where `math.sqrt(a * a + b * b)` belongs"
    assert mended(index_of(norm), of_absolute_values) == (belongs, 1.0)


def test_a_value_is_told_as_a_number_where_its_names_are_missing():
    said, price = mended(index_of(norm_in_turns), of_exponentials)
    assert said == "`math.exp(a) + math.exp(b)`, or what it reads, is wrong: it is 74.684, and should be 25 [x=3.0]"
    assert price == 2.5


@pytest.mark.parametrize(("answer", "told"), [
    (beyond_floats, "`math.exp(huge // 10 ** 400 + b)` stands where"), (of_brain_floats, "`float(length)` "),
])  # fmt: skip
def test_values_of_any_kind_are_looked_at(answer, told):
    assert told in mended(index_of(norm), answer)[0]


def test_nothing_is_said_where_no_value_makes_it_right():
    assert mended(index_of(norm), wrong_throughout) == ("", 0.0)
