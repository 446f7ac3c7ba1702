"""What is read off an answer's results, where no change of a text explains them; and inputs that show what is rare."""

import math

import pytest
import torch
from lesson_answers import failure

from flashlab.attention.online_softmax import shifted_exp
from flashlab.attention.simulation import flash_attention_forward_sim


def padded_to_nothing(limit, HEAD_DIM, BLOCK_M, itemsize):
    n = 16
    while (BLOCK_M + 2 * n) * HEAD_DIM * itemsize <= limit:
        n += 1
    return n


def portions_in_turn(number, m_blocks, heads, group, kv_together):
    together = kv_together * group
    first = number // (m_blocks * together) * together
    share = min(together, heads - first)
    place = number - first * m_blocks
    return first // together + place % share * -(-heads // together), m_blocks - 1 - place // share


def short_last_portion_forgotten(number, m_blocks, heads, group, kv_together):
    head = number // (m_blocks * kv_together * group) * kv_together * group
    m, rest = divmod(number - head * m_blocks, min(kv_together, heads - head) * group)
    return head + rest, m_blocks - 1 - m


def logarithm_of_a_product(m, l):
    return torch.log(m * l)


def logarithm_of_the_scale(scale):
    return math.log2(scale)


def tiles_in_turn(lengths, block_n, programs, p):
    tiles = [(s, i) for s, n in enumerate(lengths) for i in range(0, n, block_n)]
    return [(s, i, min(i + block_n, lengths[s])) for s, i in tiles[p::programs]]


def tiles_apart(lengths, block_n, programs, p):
    tiles = [(s, i) for s, n in enumerate(lengths) for i in range(0, n, block_n)]
    share = -(-len(tiles) // programs)
    return [(s, i, min(i + block_n, lengths[s])) for s, i in tiles[p * share : (p + 1) * share]]


def whole_sequences(lengths, block_n, programs, p):
    return [(s, 0, n) for s, n in enumerate(lengths) if n and s % programs == p and s < 2]


def natural(m, l):
    return (m + torch.log2(l)) * math.log(2)


@pytest.mark.parametrize(
    "id, answers, words",
    [
        (
            "1.5",
            [padded_to_nothing],
            "a length of 129 is padded to 256, and the three tiles take 270336 bytes: that does",
        ),
        ("12.8", [tiles_in_turn], "each key is read once, but program 0 has other tiles than the run that is its own"),
        ("12.8", [tiles_apart], "the keys are right, in 3 pieces for 1"),
        ("12.8", [whole_sequences], "key 0 of sequence 2 is read by nobody"),
        ("3.2", [lambda s: s / math.log(2), logarithm_of_a_product], "where m is 1 larger, 2^m is twice as much"),
        ("3.2", [logarithm_of_the_scale, natural], "for a scale of 0.5 it is -1, for one of 1 0: it should be twice"),
        ("9.10", [portions_in_turn], "the heads come as 0, 3, 1, 4, 2, 5; they should as 0, 1, 2, 3, 4, 5"),
        ("9.10", [short_last_portion_forgotten], "has block 1 of head 9, which does not exist"),
    ],
)
def test_what_no_change_explains(id, answers, words):
    assert words in failure(id, *answers).sentence


def test_a_running_maximum_that_starts_at_0():
    def attention(scores, v, BLOCK_N):
        m, l, o = scores.new_zeros(()), scores.new_zeros(()), v.new_zeros(v.shape[1])
        for x, block in zip(scores.split(BLOCK_N), v.split(BLOCK_N), strict=True):
            m_new = torch.maximum(m, x.max())
            p, fade = (x - m_new).exp(), (m - m_new).exp()
            m, l, o = m_new, fade * l + p.sum(), fade * o + p @ block
        return o / l

    assert "[scores around -1000, blocks of 4]" in failure("0.5", attention).sentence


@pytest.mark.parametrize("top", [lambda a, b: a, lambda a, b: b, lambda a, b: torch.maximum(a, b).max()])
def test_a_merge_that_overflows_where_parts_or_rows_lie_far_apart(top):
    def split(Q, K, V, BLOCK_N, splits, scale=None):
        parts = [flash_attention_forward_sim(Q, k, v, BLOCK_N, scale=scale)
                 for k, v in zip(K.chunk(splits), V.chunk(splits), strict=True)]  # fmt: skip
        o, lse = parts[0][0].float(), parts[0][1]
        for other, other_lse in parts[1:]:
            m = top(lse, other_lse)
            a, b = shifted_exp(lse, m), shifted_exp(other_lse, m)
            o, lse = (a[:, None] * o + b[:, None] * other) / (a + b)[:, None], m + (a + b).log()
        return o.to(V.dtype), lse

    assert "120 from part to part" in failure("2.8", split).sentence
