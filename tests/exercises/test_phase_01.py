"""The checks of phase 1: right answers pass, and each typical wrong answer is told what is wrong with it.

The solutions are the ones of the lesson; most wrong answers are a solution with one piece of its text replaced.
"""

import pytest
import torch
from lesson_answers import changed, diagnosed, diagnosis, failure

from flashlab import runtime
from flashlab.attention import schemes
from flashlab.attention.naive import naive_attention
from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.figures import show

# ---- one matrix ---------------------------------------------------------------------------------------------------


SECOND_LOAD = ("    x = tl.load(", "    again = tl.load(x_ptr)\n    x = tl.load(")
QUARTERS = [
    ("tl.arange(0, COLUMNS)[None, :])", "J * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :])"),
    ("left, right = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))", "left, right = x, x"),
    (
        "first, second = tl.split(tl.permute(tl.reshape(half, [ROWS, 2, COLUMNS // 4]), (0, 2, 1)))",
        "first, second = half, half",
    ),
]
STORE_LSE = next(x for x in show.source_text(schemes.scheme_a_kernel).splitlines() if "tl.store(lse_ptr" in x)

test_what_is_told = diagnosed(
    ("1.3", ("    scores -= scores.amax(dim=-1, keepdim=True)\n", ""), "not-finite"),
    ("1.3", ("scores.exp_()", "scores = scores.exp()"), "second-matrix-alive"),
    ("1.3", ("(q / math.sqrt(q.shape[-1]))", "q.div_(math.sqrt(q.shape[-1]))"), "inputs-changed"),
    ("1.3", ("scores.amax(dim=-1, keepdim=True)", "scores.amax()"), "own-slip"),
    ("1.4", (STORE_LSE, ""), "lse-not-written"),
    ("1.6", SECOND_LOAD, "loaded-again"),
    ("1.6", QUARTERS, "not-cut"),
    ("1.6", ("left, right = tl.split(", "tl.sum(x)\n    left, right = tl.split("), "sum-used"),
)
KEYS_MASKED = '    s = tl.where(offs_n[None, :] < N, s, float("-inf"))  # a padded key gets no weight\n'
MASKED = 's += tl.where(offs_n[None, :] {} N, 0.0, float("-inf"))'
LOADED = "k = tl.load(k_ptrs, mask=offs_n[None, :] < N, other={})"
test_what_is_told_of_whole_kernels = diagnosed(
    ("1.4", (KEYS_MASKED, ""), "tail-not-masked"),
    ("1.7", [(MASKED.format("<"), ""), (LOADED.format("0.0"), LOADED.format('float("-inf")'))], "not-finite"),
    ("1.8", ("        p = tl", "        s = tl.dot(q, k) * scale\n        p = tl"), "own-slip"),
    ("1.8", ("        m_i = m_new\n", ""), "own-slip"),
    every=3,
    marks=[pytest.mark.slow],
)


def test_the_naive_way_is_not_frugal_and_blocks_are():
    assert diagnosis("1.3", naive_attention) == "second-matrix-alive"

    def row_by_row(q, k, v):
        return torch.cat([naive_attention(row[None], k, v) for row in q])

    def divided_late(q, k, v):
        s = (q / q.shape[1] ** 0.5) @ k.T
        s -= s.amax(1, keepdim=True)
        s.exp_()
        o = s @ v
        return o / s.sum(1, keepdim=True)

    assert check("1.3", row_by_row) and check("1.3", divided_late)


# ---- kernels --------------------------------------------------------------------------------------------------------


def test_what_only_the_interpreter_accepts_is_not_enough():
    early = (
        "    m_i = tl.max(s, axis=1)\n",
        "    m_i = tl.max(s, axis=1)\n    kept = [m_i]\n    m_i = kept[0]\n    kept = {}\n",
    )
    if runtime.INTERPRETED:
        assert diagnosis("1.4", *changed("1.4", early)) == "does-not-compile"


def test_a_kernel_must_be_a_kernel():
    for id in ("1.4", "1.6", "1.7", "1.8"):
        assert diagnosis(id, lambda *_: None) == "wrong-type"


# ---- no answer ends the Python process: addresses are watched -------------------------------------------------------

O_MASK = ("(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)", "(o_ptr.dtype.element_ty))")
LSE_MASK = ("tl.log(l_i), mask=offs_m < M)", "tl.log(l_i))")


@pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
@pytest.mark.parametrize("id", ["1.4", "1.7", "1.8"])
@pytest.mark.parametrize(("mask", "tensor"), [(O_MASK, "o"), (LSE_MASK, "lse")])
def test_a_store_without_its_mask_is_told_and_never_carried_out(id, mask, tensor):
    with pytest.raises(CheckFailed, match=f"store out of bounds: element .* of {tensor}, ") as caught:
        check(id, *changed(id, mask))
    assert caught.value.diagnosis == "out-of-bounds" and caught.value.case


@pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
@pytest.mark.parametrize(
    ("load", "slug", "tensor"),
    [
        (("tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)", "tl.load(q_ptrs)"), "out-of-bounds", "of q,"),
        (("tl.load(k_ptrs, mask=offs_n[None, :] < N, other=0.0)", "tl.load(k_ptrs)"), "out-of-bounds", "of k,"),
        (("tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)", "tl.load(v_ptrs)"), "out-of-bounds", "of v,"),
        (("v_ptrs, mask=offs_n[:, None] < N, other=0.0)", "v_ptrs, mask=offs_n[:, None] < N)"), "other-missing",
         "v is"),
    ],
)  # fmt: skip
def test_a_load_without_mask_or_other_is_told(load, slug, tensor):
    failed = failure("1.4", *changed("1.4", load))
    assert failed.diagnosis == slug and tensor in str(failed)
