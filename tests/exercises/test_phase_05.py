"""Phase 5's checks: right answers in every style pass, and the mistakes that learners make are named."""

import pytest
import torch
from lesson_answers import accepted, changed, diagnosis, said, told

from flashlab import runtime

# ---- 5.2 ------------------------------------------------------------------------------------------------------------


def keys(p, dp):
    return (p * dp).sum(1)


def columns(o, do):
    return (o.float() * do.float()).sum(1)


def test_delta_of_16_bit_inputs():
    assert diagnosis("5.2", keys, lambda o, do: (o * do).sum(1)) == "wrong-dtype"
    assert diagnosis("5.2", keys, lambda o, do: (o * do).float().sum(1)) == "low-precision"
    assert "digits" not in said("5.2", keys, lambda o, do: (o.double() * do.double()).sum(1))


# ---- 5.3 ------------------------------------------------------------------------------------------------------------


P, DP = "torch.exp(scale * (q @ k.T) - lse[:, None])", "kept * (do @ v.T) / keep"
test_dq_in_several_styles = accepted(
    ("5.3", ("range(0, len(K), BLOCK_N)", "reversed(range(0, len(K), BLOCK_N))")),
    ("5.3", [("p * (kept", "p.double() * (kept"), ("dq + ds @ k", "dq + ds.float() @ k")]),
    ("5.3", (DP, "torch.where(kept, do @ v.T / keep, 0)")),
)
test_dq_by_a_quotient_of_exponentials = told(
    ("5.3", (P, "torch.exp(scale * (q @ k.T)) / torch.exp(lse)[:, None]"), "infinite in float32")
)


def test_dq_without_tiles():
    def whole(q, do, lse, delta, K, V, KEPT, keep, BLOCK_N, scale):
        p = torch.exp(scale * q @ K.T - lse[:, None])
        return scale * (p * (KEPT * (do @ V.T) / keep - delta[:, None])) @ K

    assert diagnosis("5.3", whole) == "memory-grows-with-n"


# ---- 5.4 ------------------------------------------------------------------------------------------------------------


BEGIN, END = "max(0, start_n - (N - M))", "min(M, start_n + len(k) - 1 - (N - M) + window)"
LOWER = "p = torch.triu(p, distance - window + 1)"
SEEN = "torch.ones_like(p).cumsum(1) > torch.ones_like(p).cumsum(0) + distance - window"


test_window_blocks_in_several_styles = accepted(
    ("5.4", [("p.to(dO.dtype).float()", "p"), ("ds.to(Q.dtype).float()", "ds")]),
    ("5.4", (BEGIN, f"{BEGIN} // BLOCK_M * BLOCK_M")),
    ("5.4", (LOWER, f"p = torch.where({SEEN}, p, 0.0)")),
)
IN_16_BITS = "dk, dv = dk.to(Q.dtype).float(), dv.to(Q.dtype).float()"
test_what_is_said_of_window_blocks = told(
    ("5.4", ("        q, do =", f"        {IN_16_BITS}\n        q, do ="), "16 bits in each turn"),
    ("5.4", (LOWER, f"p = p * ({SEEN})"), "inf · 0 is NaN"),
    ("5.4", (END, "M"), "end behind the last"),
    ("5.4", (END, f"{END[:-1]} + 1)"), "where 2 have a query"),
    ("5.4", (BEGIN, "0"), "begin at the first query"),
    marks=[pytest.mark.long],
)


# ---- 5.5, 5.6, 5.11: kernels ----------------------------------------------------------------------------------------


INTERPRETED = pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
IEEE = ', input_precision="ieee"'
CUT = ".to(k.dtype).to(tl.float32)"
MASKED = "ds = tl.where(in_range[None, :], p * (dp - delta[:, None]), 0.0)"


HIDDEN = 's = tl.where(in_range[None, :], s, float("-inf"))'
KERNELS = [pytest.mark.slow, INTERPRETED]
test_dq_kernel_in_several_styles = accepted(
    ("5.6", [("p = tl.exp(s - lse[:, None])", "p = tl.where(in_range[None, :], tl.exp(s - lse[:, None]), 0.0)"),
             (MASKED, "ds = p * (dp - delta[:, None])")]),
    ("5.6", ("* scale\n        p =", f"* scale\n        {HIDDEN}\n        p =")),
    every=4, marks=KERNELS,
)  # fmt: skip
test_dc_kernel_in_several_styles = accepted(
    ("5.11", [("s_t = tl.dot(c, q.T", "s = tl.dot(q, c.T"),
              ("p_t = tl.exp(s_t - lse[None, :])", "p_t = tl.exp(s - lse[:, None]).T")]),
    ("5.11", [("    for start_m", "    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)\n    for start_m"),
             ("dc = tl.dot(p_t.to(do.dtype), do, dc", "dv = tl.dot(p_t.to(do.dtype), do, dv"),
             ("ds_t = scale * p_t", "ds_t = p_t"), ("dc.to(DC", "(dc * scale + dv).to(DC")]),
    ("5.11", [('other=float("inf")', "other=0.0")]),  # p is 1 for queries that are not there, and their do is 0
    every=3, marks=KERNELS,
)  # fmt: skip


test_what_is_said_of_kernels = told(
    ("5.6", (MASKED, "p = tl.exp(tl.where(in_range[None, :], s, -1.0e6) - lse[:, None])\n        ds = p * (dp - "
             "delta[:, None])"), "NaN in the last tile"),
    ("5.6", ("        s = tl.dot(", f"        dq = dq{CUT}\n        s = tl.dot("), "16 bits in each turn"),
    ("5.11", ("dc = tl.dot(ds", "dc += tl.dot(ds"), "the rest is right"),
    ("5.6", ("dq = tl.dot(ds.to(k.dtype), k, dq,", "dq = tl.dot(ds.to(k.dtype), k,"), "`=` stands where `+=` belongs"),
    ("5.6", ('k, dq, input_precision="ieee"', "k, dq"), "is missing in `tl.dot(ds.to(k.dtype), k, dq)`: float32 is"),
    ("5.12", ("p_t = tl.where(offs_n[:, None] <= offs_m[None, :] + N - M, p_t, 0.0)",
             "p_t = p_t * (offs_n[:, None] <= offs_m[None, :] + N - M)"), "inf · 0 is NaN"),
    ("5.13", ("t = 2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0",
             "t = (tl.exp(2.0 * s / softcap) - 1.0) / (tl.exp(2.0 * s / softcap) + 1.0)"), "inf / inf"),
    ("5.13", ("ds = tl.where(seen, ds, 0.0)", "ds = ds * seen"), "inf · 0 is NaN"),
    ("5.13", ("seen = offs_n[None, :] < N", "seen = offs_n[None, :] >= 0"), "a key that is not there has a P"),
    ("5.12", ("tl.store(dk_ptrs, (dk", "dk, dv = dv / scale, dk * scale\n    tl.store(dk_ptrs, (dk"),
     "(dv / scale, dk * scale)` is one too many"),
    ("5.5", ("tl.load(o_ptrs, mask=offs_m[:, None]", "tl.load(o_ptrs, mask=offs_d[None, :]"),
     "`offs_d[None, :]` stands where `offs_m[:, None]`"),
    ("5.5", ("g * dg", "dg"), "dO = g · dY"),
    ("5.13", ("        if SOFTCAP:\n            ds = ds * (1.0 - t * t)",
             "        ds = ds * (1.0 - (s / softcap) * (s / softcap))"), "no soft-cap and nothing is hidden"),
    every=9, marks=KERNELS,
)  # fmt: skip


# ---- 5.8 ------------------------------------------------------------------------------------------------------------


def one_by_one(dk, n):
    group = dk.shape[1] // n
    total = dk[:, ::group].clone()
    for i in range(1, group):
        total = total + dk[:, i::group]
    return total


def test_group_sums_in_16_bit():
    assert diagnosis("5.8", one_by_one) == "low-precision" and "2048" in said("5.8", one_by_one)


# ---- 5.9, 5.10 ------------------------------------------------------------------------------------------------------


GRID = "max(math.ceil(M / BLOCK_M), math.ceil(N / BLOCK_N))"


def test_of_programs_too_few_it_says_which_blocks_have_none():
    bug = changed("5.10", (GRID, "math.ceil(len(q) / BLOCK_M)"))
    assert "each block of keys needs a program" in said("5.10", *bug)


@pytest.mark.long
def test_causes_that_contradict_each_other_are_not_told_together():
    assert "exchanged" not in said("5.10", *changed("5.10", (GRID, "math.ceil(N / BLOCK_M)")))
