"""The checks of phase 1: right answers pass, and each typical wrong answer is told what is wrong with it.

The solutions are the ones of the lesson; most wrong answers are a solution with one piece of its text replaced.
"""

import pytest
import torch
from lesson_answers import changed, diagnosis, failure

from flashlab import runtime
from flashlab.attention import schemes
from flashlab.attention.naive import naive_attention
from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.figures import show

# ---- one matrix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacements", "slug"),
    [
        ([("    scores -= scores.amax(dim=-1, keepdim=True)\n", "")], "not-finite"),
        ([("scores.exp_()", "scores = scores.exp()")], "second-matrix-alive"),
        ([("(q / math.sqrt(q.shape[-1]))", "q.div_(math.sqrt(q.shape[-1]))")], "inputs-changed"),
        ([("scores.amax(dim=-1, keepdim=True)", "scores.amax()")], "not-finite"),
    ],
)
def test_frugal_attention(replacements, slug):
    assert diagnosis("1.3", *changed("1.3", *replacements)) == slug


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

KEYS_MASKED = '    s = tl.where(offs_n[None, :] < N, s, float("-inf"))  # a padded key gets no weight\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replacements", "diagnoses"),
    [
        ([(KEYS_MASKED, "")], {"tail-not-masked"}),
        ([("tl.dot(q, k) * scale", "tl.dot(q, k)")], {"scale-missing", "scale-not-applied", "no-scale"}),
        ([(" / l_i[:, None]", "")], {"not-normalised"}),
        ([("m_i + tl.log(l_i)", "tl.log(l_i)")], {"lse-without-m"}),
        ([("s - m_i[:, None]", "s")], {"no-max-subtraction", "max-not-subtracted"}),
    ],
)
@pytest.mark.every(3)
def test_scheme_a_s_mistakes_are_told(replacements, diagnoses):
    got = diagnosis("1.4", *changed("1.4", *replacements))
    assert got in diagnoses, got


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replacements", "diagnoses"),
    [
        ([("l_i * tl.exp(m_i - m_new) + ", "l_i + ")], {"l-not-rescaled"}),
        ([("tl.exp(s - m_i[:, None]) / l_i[:, None]", "tl.exp(s - m_i[:, None])")], {"not-normalised"}),
        ([("        p = tl", "        s = tl.dot(q, k) * scale\n        p = tl")], {"m-starts-too-high"}),  # not masked
        ([("        m_i = m_new\n", "")], {"m-not-updated", "nan-everywhere"}),
    ],
)
@pytest.mark.every(4)
def test_two_pass_mistakes_are_told(replacements, diagnoses):
    got = diagnosis("1.8", *changed("1.8", *replacements))
    assert got in diagnoses, got


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


# ---- what the checks once accepted, or refused ----------------------------------------------------------------------


def test_a_second_load_is_no_slice():
    again = ("    x = tl.load(", "    again = tl.load(x_ptr)\n    x = tl.load(")
    assert diagnosis("1.6", *changed("1.6", again)) == "loaded-again"
    quarter = ("tl.arange(0, COLUMNS)[None, :])", "J * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :])")
    halves = (
        "left, right = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))",
        "left, right = x, x",
    )
    quarters = ("first, second = tl.split(tl.permute(tl.reshape(half, [ROWS, 2, COLUMNS // 4]), (0, 2, 1)))",
                "first, second = half, half")  # fmt: skip
    assert diagnosis("1.6", *changed("1.6", quarter, halves, quarters)) == "not-cut"


@pytest.mark.slow
def test_a_finite_sentinel_is_found_however_low():
    assert diagnosis("1.4", *changed("1.4", ('float("-inf")', "-1e30"))) == "finite-sentinel"


def test_an_lse_that_is_never_stored_and_padding_in_the_maximum_are_told():
    store = next(line for line in show.source_text(schemes.scheme_a_kernel).splitlines() if "tl.store(lse_ptr" in line)
    assert diagnosis("1.4", *changed("1.4", (store, ""))) == "lse-not-written"


def test_a_reduction_is_no_slice():
    summed = ("left, right = tl.split(", "tl.sum(x)\n    left, right = tl.split(")
    assert diagnosis("1.6", *changed("1.6", summed)) == "sum-used"


MASKED = "s += tl.where(offs_n[None, :] {} N, 0.0, float('-inf'))".replace("'", '"')
LOADED = "k = tl.load(k_ptrs, mask=offs_n[None, :] < N, other={})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ([(MASKED.format("<"), MASKED.format("<="))], "mask-one-too-late"),
        ([(MASKED.format("<"), ""), (LOADED.format("0.0"), LOADED.format('float("-inf")'))], "wrong-value"),  # all NaN
    ],
)
def test_the_padding_of_one_tile_is_told(change, slug):
    assert diagnosis("1.7", *changed("1.7", *change)) == slug


@pytest.mark.slow
@pytest.mark.long
def test_p_from_the_lse_is_no_finite_sentinel():
    change = ("p = tl.exp(s - m_i[:, None]) / l_i[:, None]", "p = tl.exp(s - (m_i + tl.log(l_i))[:, None])")
    assert diagnosis("1.8", *changed("1.8", change)) == "weights-from-lse"
