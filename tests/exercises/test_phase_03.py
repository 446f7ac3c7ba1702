"""Phase 3's checks: the mistakes that learners make are named, and a right answer passes in the time promised."""

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl
from lesson_answers import diagnosis, run

from flashlab.attention import triton_minimal
from flashlab.attention.triton_minimal import LOG2_E
from flashlab.check import CheckFailed, mend
from flashlab.check.changes import edited
from flashlab.exercises import check, phase_03
from flashlab.triton_tools.watch import watched

LECTURE = inspect.getsource(triton_minimal.flash_attention_forward_kernel.fn)
MILESTONE = inspect.getsource(phase_03.flash_attention_next_kernel.fn)


def kernel_from(text, *changes):
    """The kernel that `text` defines, with pieces of it replaced."""
    names, text = {"triton": triton, "tl": tl}, edited(text, changes)
    run(text, f"<kernel {hash(text)}>", names)
    return next(value for value in names.values() if hasattr(value, "fn"))


# The rest of what verify tells is in its catalogue (tests/check/test_check_mutants.py).
MISTAKES = {
    "own-slip": [("l_i = l_i * correction + tl.sum(p, axis=1)", "l_i = l_i + tl.sum(p, axis=1)")],
    "nan-everywhere": [("correction = tl.exp2(m_i - m_safe)", "correction = tl.exp2(m_safe - m_i)")],
    "l-starts-at-0": [("[BLOCK_M], 1.0", "[BLOCK_M], 0.0")],
    "no-key-yet": [
        ("[BLOCK_M], 1.0, tl.float32)", "[BLOCK_M], 0.0, tl.float32) + (m_i > -1e9)"),
        ("tl.where(l_i == 0.0, 1.0, l_i)", "l_i"),
    ],
    "wrong-parameters": [("scale_log2,  #", "scale,  #"), ('="ieee") * scale_log2', '="ieee") * scale')],
}
UNMASKED = {
    "k": ("k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0)", "k = tl.load(k_ptrs)"),
    "q": ("q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)", "q = tl.load(q_ptrs)"),
    "o": ("acc.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)", "acc.to(O_ptr.dtype.element_ty))"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.every(2)
def test_a_wrong_kernel_is_told_its_mistake(mistake):
    told = diagnosis("3.4", kernel_from(MILESTONE, *MISTAKES[mistake]))
    assert told in (mistake, "own-slip")  # a fast machine gets to a change that mends it


@pytest.mark.parametrize(("edit", "told"), [
    (("tl.full([BLOCK_M], 1.0, tl.float32)", "tl.exp2(m_i)"), "l_i begins with e^lse"),
    (("other=0.0).to(tl.float32)", "other=0.0).to(tl.float32) * 0.0"), "it starts from o"),
])  # fmt: skip
def test_what_a_mistake_does_is_told_behind_what_mends_it(edit, told):
    with pytest.raises(CheckFailed, match=rf"(?s)the rest is right.*{re.escape(told)}"):
        check("3.4", kernel_from(MILESTONE, edit))


@pytest.mark.skipif(
    not triton_minimal.runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted"
)
@pytest.mark.parametrize("tensor", UNMASKED)
def test_a_missing_mask_names_the_tensor(tensor):
    with pytest.raises(CheckFailed, match=rf"(?s)out of bounds: element \[16, 0\] of {tensor}, .*: it has no mask="):
        check("3.4", kernel_from(MILESTONE, UNMASKED[tensor]))


def test_the_lectures_kernel_does_not_go_on():
    assert check("3.4", phase_03.flash_attention_next_kernel)
    assert diagnosis("3.4", triton_minimal.flash_attention_forward_kernel) == "starts-anew"


def test_what_only_the_interpreter_accepts_does_not_pass():
    early_end = ("        m_i = m_new\n", "        m_i = m_new\n        if start_n > 100000:\n            break\n")
    kernel = kernel_from(MILESTONE, early_end)
    assert diagnosis("3.4", kernel) == "does-not-compile"


def test_the_two_bases():
    def right_scale(scale):
        return scale * LOG2_E

    def right_lse(m, l):  # noqa: E741
        return (m + torch.log2(l)) / LOG2_E

    assert check("3.2", right_scale, right_lse)
    assert diagnosis("3.2", lambda scale: scale / LOG2_E, right_lse) == "wrong-operator"


CAUSAL = [
    ("offs_n < N  #", "offs_n < N  #"),
    (
        's = tl.where(in_range[None, :], s, float("-inf"))',
        's = tl.where(in_range[None, :] & (offs_n[None, :] <= offs_m[:, None] + N - M), s, float("-inf"))',
    ),
]
SKIPPING = (
    "for start_n in range(0, N, BLOCK_N):",
    "for start_n in range(0, tl.minimum(N, (tl.program_id(0) + 1) * BLOCK_M + N - M), BLOCK_N):",
)


@pytest.mark.slow
@pytest.mark.long
def test_the_causal_kernel():
    assert check("3.8", kernel_from(LECTURE, *CAUSAL, SKIPPING))
    assert diagnosis("3.8", kernel_from(LECTURE, *CAUSAL)) == "causal-tiles-not-skipped"
    top_left = (CAUSAL[1][0], CAUSAL[1][1].replace(" + N - M", ""))
    slug = diagnosis("3.8", kernel_from(LECTURE, top_left))
    assert "causal" in slug or slug == "wrong-value"
    start, end = (("offs_n = start_n", "offs_n = start_n // BLOCK_N * BLOCK_M"), (SKIPPING[1], SKIPPING[1]))
    assert diagnosis("3.8", kernel_from(LECTURE, *CAUSAL, SKIPPING, start, end)) == "own-slip"


STRIDES = "offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd"
ONE_SIDE = "[:, None] * stride_kd + offs_d[None, :] * stride_kn"
V_PTRS = "        v_ptrs = V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd\n"
STEP = "        k_first += BLOCK_N * stride_kn\n"
LATE = ("range(0, tl.min", "range(tl.maximum(tl.program_id(0) * BLOCK_M + N - M, 0) // BLOCK_N * BLOCK_N, tl.min")
ON = (
    "    for start_n",
    "    v_ptrs = V_ptr + tl.arange(0, BLOCK_N)[:, None] * stride_vn + offs_d[None, :] * stride_vd\n    "
    "k_first = K_ptr + tl.arange(0, BLOCK_N)[:, None] * stride_kn + offs_d[None, :] * stride_kd\n    for start_n",
)


@pytest.mark.parametrize(("edits", "said"), [
    ([(STRIDES, f"offs_n{ONE_SIDE}")], "`stride_kd` and `stride_kn` are exchanged"),  # no loop comes to its end
    ([(SKIPPING[1], SKIPPING[1].replace(*LATE))], r"// BLOCK_N \* BLOCK_N` stands where `0` belongs"),
    ([ON, (f"K_ptr + {STRIDES}", "k_first"), (V_PTRS, ""), ("        m_i = m_new\n", f"        m_i = m_new\n{STEP}")],
     "`v_ptrs` is not moved on, as `k_first` is"),
])  # fmt: skip
def test_addresses_that_stray_or_stay_are_mended(edits, said, monkeypatch):
    monkeypatch.setattr(mend, "_SECONDS", 60.0)  # on a machine with other work
    with pytest.raises(CheckFailed, match=f"^[^\n]*{said}"):
        check("3.8", kernel_from(LECTURE, *CAUSAL, SKIPPING, *edits))


MASKED_COPY = """@triton.jit
def copy(x_ptr, y_ptr, N, E, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask={mask}, other=0.0)
    tl.store(y_ptr + o, x, mask=o < N)
"""


@pytest.mark.parametrize(
    "mask", ["(o < N) & (tl.program_id(0) < E)", "(o < N) & (E > 3)", "(o < N) & (o < E)", "(o < N) & (N - E > 0)"]
)
@pytest.mark.skipif(not triton_minimal.runtime.INTERPRETED, reason="only interpreted kernels can be watched")
def test_a_mask_of_a_tile_and_a_scalar_can_be_watched(mask):
    kernel = kernel_from(MASKED_COPY.format(mask=mask))
    x, y = torch.randn(40), torch.zeros(40)
    with watched() as traffic:
        kernel[(1,)](x, y, 40, 16, BLOCK=64)
    seen = 16 if "(o < E)" in mask else 40
    assert traffic.bytes_read == 4 * seen
    assert torch.equal(y[:seen], x[:seen])


# ---- the small kernels and formulas ---------------------------------------------------------------------------------


def test_the_natural_lse_is_computed_without_2_to_the_m():
    with pytest.raises(CheckFailed, match="overflows"):
        check("3.2", lambda scale: scale * LOG2_E, lambda m, l: torch.log(2.0**m * l))  # noqa: E741
