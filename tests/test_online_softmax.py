"""The state (m, l, o): its laws, its edge cases, its errors."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlab.attention.online_softmax import (
    State,
    attention_by_loops,
    block_state,
    finish,
    identity,
    merge,
    merge_finished,
    online_softmax,
    require_mergeable,
    shifted_exp,
    softmax_safe,
)

INF = math.inf


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def oracle(scores, v):
    """(o, lse) of one row, in exact sums of correctly rounded float64 exponentials."""
    m = max(scores, default=-INF)
    if m == -INF:
        return [0.0, 0.0], -INF
    p = [math.exp(s - m) for s in scores]
    l = math.fsum(p)  # noqa: E741
    return [math.fsum(p_j * v_j[d] for p_j, v_j in zip(p, v, strict=True)) / l for d in range(2)], m + math.log(l)


def test_the_loops_agree_with_pytorch():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    for scale in (None, 0.3):
        want = torch.nn.functional.scaled_dot_product_attention(
            q[None].double(), k[None].double(), v[None].double(), scale=scale
        )
        torch.testing.assert_close(attention_by_loops(q, k, v, scale=scale), want[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softmax", [softmax_safe, online_softmax])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_the_safe_ones_are_right_at_any_height(softmax, dtype, shift):
    torch.manual_seed(1)
    x = (torch.randn(3, 4, 17, dtype=torch.float64) * 4 + shift).to(dtype)
    got = softmax(x)
    assert got.dtype == dtype and got.shape == x.shape
    error = (got.double() - torch.softmax(x.double(), dim=-1)).abs().max().item()
    assert error <= 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("softmax", [softmax_safe, online_softmax])
def test_masked_rows_and_empty_rows(softmax):
    assert softmax(t([-INF, -INF], [-INF, 3.0])).tolist() == [[0, 0], [0, 1]]
    assert softmax(torch.empty(2, 0)).shape == (2, 0)
    assert softmax(t(7.0)).tolist() == [1.0]


def test_shifted_exp_takes_minus_infinity_as_nothing():
    assert shifted_exp(t(-INF, -INF, 1.0), t(-INF, 2.0, 1.0)).tolist() == [0, 0, 1]
    assert shifted_exp(t(math.nan), t(0.0)).isnan().all()  # a NaN in the scores is not hidden


def test_rows_with_leading_axes_are_independent():
    torch.manual_seed(2)
    scores, v = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    o, lse = finish(merge(block_state(scores[..., :2], v[..., :2, :]), block_state(scores[..., 2:], v[..., 2:, :])))
    torch.testing.assert_close(o, torch.softmax(scores, -1) @ v)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))
    one = finish(block_state(scores[1, 2, 3], v[1, 2]))
    torch.testing.assert_close(one[0], o[1, 2, 3])
    assert one[1].shape == ()


score = st.one_of(st.floats(-1e4, 1e4), st.floats(-5, 5), st.just(-INF))
value = st.floats(-100, 100)
rows = st.lists(st.tuples(score, st.tuples(value, value)), max_size=24)


def state_of(pairs, dtype=torch.float64):
    scores = torch.tensor([s for s, _ in pairs], dtype=dtype)
    v = torch.tensor([w for _, w in pairs], dtype=dtype).reshape(len(pairs), 2)
    return block_state(scores, v)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_is_result(state, pairs):
    want_o, want_lse = oracle([s for s, _ in pairs], [w for _, w in pairs])
    o, lse = finish(state)
    assert not o.isnan().any()
    for got, want in zip(o.tolist(), want_o, strict=True):
        assert abs(got - want) <= 1e-10 * max(1.0, *(abs(x) for _, w in pairs for x in w))
    assert lse.item() == want_lse or abs(lse.item() - want_lse) <= 1e-12 * max(1.0, abs(want_lse))


@settings(max_examples=200, deadline=None)
@given(pairs=rows.filter(len), data=st.data())
def test_any_order_any_split_any_bracketing(pairs, data):
    order = data.draw(st.permutations(pairs))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=6)))
    edges = [0, *cuts, len(pairs)]
    states = [state_of(order[a:b]) for a, b in itertools.pairwise(edges)]  # some of them of no key at all
    while len(states) > 1:  # merge any two neighbours, on either side: every bracketing and order can come up
        i = data.draw(st.integers(0, len(states) - 2))
        a, b = states[i], states[i + 1]
        states[i : i + 2] = [merge(a, b) if data.draw(st.booleans()) else merge(b, a)]
    assert_is_result(states[0], pairs)


@settings(max_examples=100, deadline=None)
@given(a=rows, b=rows, dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]))
def test_commutative_and_identity_bit_for_bit(a, b, dtype):
    x, y = state_of(a, dtype), state_of(b, dtype)
    nothing = identity(head_dim=2, dtype=dtype)
    assert same_bits(merge(x, y), merge(y, x))
    assert same_bits(merge(x, nothing), x) and same_bits(merge(nothing, x), x)
    assert same_bits(state_of([], dtype), nothing) and same_bits(state_of([(-INF, (1.0, 2.0))] * 2, dtype), nothing)


@settings(max_examples=100, deadline=None)
@given(a=rows, b=rows)
def test_finished_results_merge_like_states(a, b):
    if not a + b:
        return
    o, lse = merge_finished(*finish(state_of(a)), *finish(state_of(b)))
    assert_is_result(State(lse, (lse > -INF).double(), o), a + b)


def test_a_finished_result_of_lower_precision_keeps_its_dtype():
    o1, o2 = torch.tensor([1.0], dtype=torch.float16), torch.tensor([3.0], dtype=torch.float16)
    o, lse = merge_finished(o1, torch.tensor(900.0), o2, torch.tensor(900.0))
    assert (o.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert o.item() == 2 and abs(lse.item() - 900 - math.log(2)) < 1e-4


def test_merging_does_not_change_its_inputs():
    a, b = block_state(t(1.0, 2.0), t([1], [2])), block_state(t(5.0), t([3]))
    before = [x.clone() for x in (*a, *b)]
    merge(a, b), finish(a), merge_finished(*finish(a), *finish(b))
    assert same_bits([*a, *b], before)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: attention_by_loops(t(1, 2), t([1, 2]), t([1])), ValueError, "q must be [rows, head_dim], one head"),
        (lambda: attention_by_loops(t([1e4]), t([1]), t([1])), OverflowError, "math range"),
        (lambda: block_state(t(1, 2), t(1, 2)), ValueError, "but they have 1 and 1 dimensions"),
        (lambda: block_state(t(1, 2), t([1], [2], [3])), ValueError, "(3, 1) do not fit together"),
        (lambda: block_state(t([1, 2]), torch.ones(4, 2, 1)), ValueError, "leading axes"),
        (lambda: block_state(t(1, 2), t([1], [2]).half()), TypeError, "scores is float64, v is float16"),
        (lambda: block_state(torch.tensor([1]), torch.tensor([[1]])), TypeError, "scores is int64"),
        (lambda: merge(identity(3, head_dim=2), identity(4, head_dim=2)), ValueError, "(3, 2), b.o is (4, 2)"),
        (lambda: merge(identity(head_dim=2), State(t(0), t(0), t(0))), ValueError, "b: m and l"),
        (lambda: merge(identity(head_dim=2), state_of([])), TypeError, "a.m is float32, b.m is float64"),
        (lambda: finish(State(t(1.0), t(1.0), t(1.0))), ValueError, "state: m and l must have one shape"),
        (lambda: finish(State(torch.tensor(1.0), t(1.0)[0], t(1.0))), TypeError, "state.m is float32"),
        (lambda: merge_finished(t(1.0), t(1.0)[0], t(1.0).half(), t(1.0)[0]), TypeError, "o2 is float16"),
        (lambda: merge_finished(t(1.0), t(1.0)[0], t(1.0), t(1.0)[0].float()), TypeError, "lse2 is float32"),
        (lambda: merge_finished(t(1.0), t(1.0), t(1.0), t(1.0)), ValueError, "a: m and l must have one shape"),
        (lambda: require_mergeable(identity(3, head_dim=2), identity(3, head_dim=4)), ValueError, "head_dim"),
    ],
)
def test_wrong_inputs_get_a_sentence(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
