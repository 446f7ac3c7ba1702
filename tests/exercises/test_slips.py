"""Answers with a slip that no list of mistakes has: what is told is the piece of the rule, or what the answer does."""

import math

import torch
from lesson_answers import diagnosed, told

test_a_slip_is_told_by_the_piece_that_it_is_in = told(
    ("0.4", [("State(m, l, o)", "State(m, l, o / l.masked_fill(l == 0, 1.0)[..., None])")],
     "the divisor `l.masked_fill(l == 0, 1.0)[..., None]` is one too many"),
    ("0.5", [("torch.maximum(m, x.max())", "x.max()")], "exp overflowed"),
    ("0.6", [("State(lse1, torch.ones_like(lse1), o1.to(lse1.dtype))", "State(*(x.to(o1.dtype) for x in (lse1, "
      "torch.ones_like(lse1), o1)))"), ("State(lse2, torch.ones_like(lse2), o2.to(lse2.dtype))", "State(*(x.to("
      "o2.dtype) for x in (lse2, torch.ones_like(lse2), o2)))"), ("return o.to(o1.dtype), lse",
      "return o, lse.to(lse1.dtype)")], "the arithmetic is in the dtype of lse"),
    ("2.8", [("K.chunk(splits), V.chunk(splits)", "K.split(splits), V.split(splits)")], "not as their length?"),
    ("3.3", [("tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)", "tl.exp2(m - m_new) + tl.sum(tl.exp2(x - "
      "m_new), axis=0)"), ("tl.log(l)", "tl.log2(l)")], "base 2 stands where base e belongs, everywhere"),
    ("4.9", [("m_i = tl.full([BLOCK_M], sink, tl.float32)", "m_i = tl.full([BLOCK_M], 0.0, tl.float32)")],
     "`0.0` stands where `sink` belongs"),
    ("11b.1", [("column % 2 + row // 8 % 2 * 2", "column % 2 * 2 + row // 8 % 2")],
     "`column % 2 * 2 + row // 8 % 2` stands where `column % 2 + row // 8 % 2 * 2` belongs"),
    ("12.2", [("table[j // page]", "j // page")], "`j // page` itself stands where `table[j // page]` belongs"),
    ("12.3", [("torch.logsumexp(lses, 0)", "lses.exp().sum(0).log()")], "`torch.logsumexp(lses, 0)` belongs"),
    ("12.6", [("    if (lane == 0) {", "    {")], "in all lanes: one lane counts for all"),
    ("12.6", [("__shfl_sync(~0u, before, 0) == splits - 1", "before == splits - 1")], "`last` is true in lane 0 alone"),
    ("12.7", [("users.subtract(table[s])", "users.update(dict.fromkeys(table[s], -9))")],
     "operation 12, ('free', 0), it should be"),
    ("1.4", [("offs_n[:, None] * stride_vn", "offs_n[:, None] * stride_kn")], "where `stride_vn` belongs"),
    ("1.8", [("tl.exp(s - m_i[:, None]) / l_i", "tl.exp(s - m_i[:, None]) / m_i")], "`m_i` stands where `l_i` belongs"),
    ("2.4", [("K, V, BLOCK_N, scale)\n", "K, V, BLOCK_N, scale / 2)\n")], "the divisor `2` is one too many"),
    ("2.9", [("key[None, :] > last", "key[None, :] >= last")], "`key[None, :] > last_key[:, None]` belongs"),
    ("2.9", [("last_key[:, None], -math.inf", "last_key[:, None], -1e4")], "where `-math.inf` belongs"),
    ("3.4", [("offs_n[:, None] * stride_vn", "offs_n[:, None] * stride_kn")], "where `stride_vn` belongs"),
    ("3.8", [("offs_n[:, None] * stride_vn", "offs_n[:, None] * stride_kn")], "where `stride_vn` belongs"),
    ("11c.3", [("consumer * BLOCK * SLAB_ROW", "consumer * 64")], "hold dS of queries 0 to 7 and keys 32 to 39"),
    every=3,
)  # fmt: skip


# ---- causes that are not said ----------------------------------------------------------------------------------------


MOVED = "            correction = torch.exp(m - top)\n            l, o, m = l * correction, o * correction, top\n"
LESS = MOVED.replace("m - top", "-m.new_tensor(threshold)").replace(", top", ", m + threshold")
ONE = "m_i = tl.max(tl.max(s, axis=1), axis=0) + tl.zeros([BLOCK_M], tl.float32)"
test_what_agrees_by_chance_is_no_cause = diagnosed(
    # One result agrees with that of a change which does other things to the rest.
    ("0.8", (MOVED, LESS), "not-finite"),
    ("10.7", ("if not fitting:\n        return None", "if not fitting:\n        return BLOCK_M, 16"), "none-forgotten"),
    # Rows past the end have scores of 0, which hold up the maximum of a tile as a start at 0 does.
    ("1.4", ("m_i = tl.max(s, axis=1)", ONE), "one-maximum"),
    every=2,
)


def test_one_factor_in_all_cases_is_told_with_the_constant_that_it_is():
    from flashlab.check.symptoms import Symptoms

    seen, want = Symptoms(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for scale in (1.0, 7.0):
        seen.compared_with.append(("lse", scale * want * math.log(2), scale * want, 1e-9))
    assert seen.everywhere("lse") == "lse is 0.693147 (ln 2) times what it should be, in every case"
    seen.compared_with.append(("lse", want, want, 1e-9))
    assert seen.everywhere("lse") is None
