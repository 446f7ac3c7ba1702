"""The exercises between a phase's fill-ins and a kernel from an empty page: what their checks alone tell."""

import pytest
from lesson_answers import changed, diagnosed, diagnosis, told

from flashlab import runtime
from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.exercises import phase_10_trace as traced

pytestmark = pytest.mark.slow


test_gradients_that_are_lost_on_the_way = diagnosed(
    ("5.14", (" - dlse", ""), "dlse-dropped"),
    ("5.14", (" - dlse", " + dlse"), "dlse-sign"),
    ("5.14", ("        return o, lse\n", "        ctx.mark_non_differentiable(lse)\n        return o, lse\n"),
     "lse-not-differentiable"),
    ("5.14", ("    return Attention.apply(", "    q = q.detach()\n    return Attention.apply("), "wrong-shape"),
    ("5.14", ("causal, q.shape[3]", "False, q.shape[3]"), "causal-missing"),
    ("5.14", ("q.shape[3] ** -0.5", "q.shape[2] ** -0.5"), "scale-not-its-default"),
    ("5.14", ("options), None, None", "options), None"), "wrong-gradients"),
    ("5.14", ("        return o, lse\n", "        ctx.s = q @ k[:, :1].mT\n        return o, lse\n"),
     "memory-quadratic"),
    ("5.14", [("ctx.options =", "Attention.options ="), ("*ctx.options)", "*Attention.options)")], "state-shared"),
    every=9,
)  # fmt: skip


test_what_a_launcher_lacks_is_told = told(
    ("5.14", ("triton.cdiv(N, BLOCK), batch", "triton.cdiv(M, BLOCK), batch"), "`M` stands where `N` belongs"),
    ("5.14", ("batch * heads * triton.cdiv(M", "heads * triton.cdiv(M"), "the factor `batch` is missing in `heads"),
    ("5.14", (".contiguous() for x", " for x"), "`.contiguous()` is missing behind"),
    every=2,
)  # fmt: skip


def longest(bars):
    took = {n: sum(length for u, name, _, length in bars if (u, name) == ("CPU", n)) for n in traced.OPTIONAL}
    return max(took, key=took.get), 1.0 + max(took.values())


@pytest.mark.parametrize(
    ("answer", "slug"),
    [
        (longest, "longest-bar"), (lambda bars: ("all_finite", 2.848), "wrong-for-another-step"),
        (lambda bars: ("mm", 1.0), "wrong-word"), (lambda bars: "all_finite", "wrong-type"),
    ],
)  # fmt: skip
def test_what_is_found_in_a_trace(answer, slug):
    assert diagnosis("10.9", answer) == slug


test_what_a_slip_of_one_result_is_called = told(
    ("9.11", ("(head_dim + 1)", "(head_dim + 2)"), "`2` stands where `1` belongs, in `head_dim + 2`"),
    ("9.1", ("min(seq_k, last + 1 + diagonal)", "last + 1 + diagonal"), "going above `seq_k`"),
    ("9.2", ("min(by_registers, by_shared", "min(by_shared"), "warps, by_registers)` belongs"),
)
test_what_a_result_depends_on = told(
    ("7.1", ("row // 8, row % 2", "column // 4, row % 2"), "register changes with `column` and never with `row`"),
    ("7.1", ("4 * column + row % 8 // 2, row", "4 * (row % 8) + column // 2, row"), "should be in `holder_of_c`"),
)
NONE = ("if scale is None else scale", "if not scale else scale")
test_a_scale_of_0_is_a_scale = diagnosed(
    *((id, NONE, "scale-zero") for id in ("4.11", "4.10", "4.12", "4.13", "5.14")), every=5
)


test_an_address_of_32_bits_is_told = diagnosed(
    ("12.9", (".to(tl.int64)", ""), "offset-overflow"),
    marks=[pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")],
)


@pytest.mark.parametrize(
    ("id", "change"),
    [
        ("5.1", ("p * (dp - delta)", "p * (dp.clamp(-30, 30) - delta)")),
        ("5.3", ("    p = torch.exp(scale * (q @ k.T) - lse[:, None])",
                 "    p = torch.exp((scale * (q @ k.T) - lse[:, None]).clamp(min=-50))")),
        ("5.3", ("        ds = p", "        if p.max() < 1e-12:\n            continue\n        ds = p")),
        ("5.3", ("    dq = torch.zeros_like(q)\n", "    dq = torch.zeros_like(q)\n    BLOCK_N = 64\n")),
        ("5.4", ("        dv = dv", "        if p.max() < 1e-4:\n            break\n        dv = dv")),
    ],
)  # fmt: skip
def test_what_only_far_values_and_memory_show(id, change):
    with pytest.raises(CheckFailed):
        check(id, *changed(id, change))
