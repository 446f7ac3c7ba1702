"""Phase 2's checks: right answers pass, and each part of the loop that is wrong is named."""

import pytest
import torch
from lesson_answers import answers_of, diagnosed, diagnosis, failure

from flashlab.attention import reference, simulation
from flashlab.attention.simulation import flash_attention_forward_sim
from flashlab.exercises import check


def test_the_right_answers_pass():
    for id in ("2.3", "2.6"):
        assert check(id, *answers_of(id, "solutions"))


test_each_part_of_the_loop_is_named = diagnosed(
    ("2.3", ("torch.exp(m_i - m_new)", "torch.exp(m_new - m_i).nan_to_num(posinf=0)"), "own-slip"),
    # The zero that guards a subtraction is not the maximum.
    ("2.6", ("        m_i = m_new\n", "        m_i = m_safe\n"), "guard-kept"),
)


def test_a_number_for_the_lse_is_called_that():
    right = flash_attention_forward_sim
    assert "lse is a int" in str(failure("2.3", lambda *args, **options: (right(*args, **options)[0], 0)))


@pytest.mark.parametrize("id, name", [("2.3", "forward"), ("2.4", "one_head"), ("2.9", "causal")])
def test_v_may_have_other_columns_than_q(id, name):
    right = getattr(simulation, f"flash_attention_{name}_sim")

    def head_dim_only(Q, K, V, *rest, **options):
        if V.shape[1] != K.shape[1]:
            raise RuntimeError("The size of tensor a must match the size of tensor b")
        return right(Q, K, V, *rest, **options)

    assert "the number of columns of O is V's" in str(failure(id, head_dim_only))


def test_the_causal_answer_uses_its_scale_and_leaves_its_inputs():
    def own_scale(Q, K, V, BLOCK_M, BLOCK_N, scale=None):
        return simulation.flash_attention_causal_sim(Q, K, V, BLOCK_M, BLOCK_N)

    def in_place(Q, K, V, BLOCK_M, BLOCK_N, scale=None):
        if Q.dtype == torch.float32:  # where .float() would be Q itself
            Q *= Q.shape[1] ** -0.5 if scale is None else scale
            scale = 1.0
        return simulation.flash_attention_causal_sim(Q, K, V, BLOCK_M, BLOCK_N, scale)

    assert diagnosis("2.9", own_scale) == "scale-ignored"
    assert diagnosis("2.9", in_place) == "input-modified"


def merged(Q, ks, vs, BLOCK_N, scale):
    parts = [flash_attention_forward_sim(Q, k, v, BLOCK_N, scale) for k, v in zip(ks, vs, strict=False)]
    lses = torch.stack([x for _, x in parts])
    o = sum(w[:, None] * o.float() for w, (o, _) in zip(torch.softmax(lses, 0), parts, strict=True))
    return o.to(vs[0].dtype), torch.logsumexp(lses, 0)


def test_the_number_of_parts_is_not_their_length():
    def split(Q, K, V, BLOCK_N, splits, scale=None):
        return merged(Q, K.split(splits), V.split(splits), BLOCK_N, scale)

    assert diagnosis("2.8", split) == "parts-too-short"


def test_keys_that_are_left_over_by_the_division():
    def split(Q, K, V, BLOCK_N, splits, scale=None):
        size = max(1, len(K) // splits)
        starts = range(0, len(K) // size * size, size)[:splits]
        return merged(Q, *([x[i : i + size] for i in starts] for x in (K, V)), BLOCK_N, scale)

    assert diagnosis("2.8", split) == "keys-dropped"


def whole_row(Q_block, K, V, BLOCK_N, scale=None):
    scale = Q_block.shape[1] ** -0.5 if scale is None else scale
    s = scale * (Q_block.float() @ K.float().T)
    return (torch.softmax(s, dim=1).to(V.dtype).float() @ V.float()).to(V.dtype), torch.logsumexp(s, dim=1)


def untiled(Q, K, V, BLOCK_M=64, BLOCK_N=64, scale=None):
    return whole_row(Q, K, V, BLOCK_N, scale)


def masks_everything(Q, K, V, BLOCK_M=64, BLOCK_N=64, scale=None):
    o, lse = reference.attention(Q[None, None], K[None, None], V[None, None], causal=True, scale=scale)
    K.float() @ K.float().T  # a matmul of full size, as a version that skips no tile would do
    return o[0, 0].to(Q.dtype), lse[0, 0].float()


@pytest.mark.parametrize(
    "id, fn, slug",
    [
        ("2.3", whole_row, "memory-grows-with-n"),
        ("2.4", untiled, "not-tiled"),
        ("2.9", masks_everything, "tiles-not-skipped"),
    ],
)
def test_right_values_that_cost_too_much(id, fn, slug):
    assert diagnosis(id, fn) == slug
