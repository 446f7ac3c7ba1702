"""The checks of phase 0: right answers pass in several styles, and what no change of a right text says is told too."""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

import math
from functools import reduce

import pytest
import torch
from lesson_answers import cell_of, diagnosis, namespace

from flashlab.attention import online_softmax
from flashlab.attention.online_softmax import State, finish, identity, merge, shifted_exp, softmax_safe
from flashlab.check import CheckFailed
from flashlab.exercises import check

INF = math.inf


def merge_as_tree(states, merge, nothing):
    names = dict(namespace(0, "solutions")[0])
    exec(cell_of("0.7", "solutions"), names)
    return names["merge_as_tree"](states, merge, nothing)


def answers(id, answer):
    return id, answer, *([shifted_exp] if id == "0.2" else [])


def recursive(states, merge, nothing):
    if len(states) <= 1:
        return states[0] if states else nothing
    half = len(states) // 2
    return merge(recursive(states[:half], merge, nothing), recursive(states[half:], merge, nothing))


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("0.2", online_softmax.online_softmax),
        ("0.7", merge_as_tree),
        ("0.7", recursive),
    ],
)
def test_right_answers_pass_in_several_styles(id, answer):
    assert check(*answers(id, answer))


def test_a_row_that_is_taken_at_once_is_told():
    assert diagnosis("0.5", lambda x, v, n: torch.softmax(x, 0) @ v) == "not-in-blocks"


def test_a_row_that_is_kept_as_a_whole_is_told():
    def whole(xs):
        return tuple(map(float, online_softmax.online_normalizer(torch.tensor(list(xs), dtype=torch.float64))))

    assert diagnosis("0.3", whole) == "row-kept"


def tree_dropping_the_odd_one(states, merge, nothing):
    while len(states) > 1:
        states = [merge(states[i], states[i + 1]) for i in range(0, len(states) - 1, 2)]
    return states[0] if states else nothing


def tree_from_both_ends(states, merge, nothing):
    while len(states) > 1:
        n = len(states)
        middle = [states[n // 2]] if n % 2 else []
        states = [merge(states[i], states[n - 1 - i]) for i in range(n // 2)] + middle
    return states[0] if states else nothing


def tree_padded(states, merge, nothing):
    states = states + [nothing] * (2 ** math.ceil(math.log2(max(1, len(states)))) - len(states))
    while len(states) > 1:
        states = [merge(states[i], states[i + 1]) for i in range(0, len(states), 2)]
    return states[0]


def tree_in_place(states, merge, nothing):
    while len(states) > 1:
        for i in range(len(states) // 2):
            states[i : i + 2] = [merge(*states[i : i + 2])]
    return states[0] if states else nothing


def tree_with_overlap(states, merge, nothing):
    while len(states) > 1:
        states = [merge(states[i], states[min(i + 1, len(states) - 1)]) for i in range(0, len(states), 2)]
    return states[0] if states else nothing


wrong_07 = [
    ("not-a-tree", lambda states, merge, nothing: reduce(merge, states) if states else nothing),
    ("not-a-tree", lambda states, merge, nothing: reduce(merge, states, nothing)),
    ("state-lost", tree_dropping_the_odd_one),
    ("reordered", tree_from_both_ends),
    ("merged-twice", tree_with_overlap),
    ("extra-merges", tree_padded),
    ("empty-list", lambda states, merge, nothing: merge_as_tree(states, merge, None)),
    ("inputs-changed", tree_in_place),
    ("returned-none", lambda states, merge, nothing: None),
]


@pytest.mark.parametrize(("slug", "answer"), wrong_07)
def test_a_tree_gone_wrong(slug, answer):
    assert diagnosis("0.7", answer) == slug


def in_place(a, b):
    got = merge(a, b)
    a.l.copy_(got.l)
    return got


def unguarded(a, b):
    if b.l.sum() == 0:
        return a
    m = torch.maximum(a.m, b.m)
    ca, cb = torch.exp(a.m - m), torch.exp(b.m - m)
    return State(m, a.l * ca + b.l * cb, a.o * ca[..., None] + b.o * cb[..., None])


@pytest.mark.parametrize(
    ("id", "answer", "slug"),
    [
        ("0.2", online_softmax.softmax_naive, "not-finite"),
        ("0.2", lambda x: torch.softmax(x, -1), "not-finite"),
        ("0.2", lambda x: torch.exp(x - x.max()) / torch.exp(x - x.max()).sum(-1, keepdim=True), "not-finite"),
        ("0.2", lambda x: x.sub_(1.0), "inputs-changed"),
        ("0.2", lambda x: softmax_safe(x.double()), "wrong-dtype"),
        ("0.2", lambda x: softmax_safe(x).sum(-1), "wrong-shape"),
        ("0.4", in_place, "inputs-changed"),
        ("0.4", unguarded, "not-finite"),
        ("0.4", lambda a, b: State(*(x.float() for x in merge(a, b))), "wrong-dtype"),
        ("0.4", lambda a, b: tuple(merge(a, b)), "wrong-type"),
        ("0.6", lambda o1, s1, o2, s2: o1, "wrong-type"),
    ],
)
def test_what_is_no_number(id, answer, slug):
    assert diagnosis(*answers(id, answer)) == slug


def test_the_identity_of_the_wrong_dtype_does_not_slip_through():
    with pytest.raises(TypeError):
        finish(merge(identity(head_dim=2), identity(head_dim=2, dtype=torch.float64)))


def test_shifted_exp_is_checked_too():
    with pytest.raises(CheckFailed, match=r"exp\(-inf - \(-inf\)\)"):
        check("0.2", softmax_safe, lambda x, m: torch.exp(x - m))
