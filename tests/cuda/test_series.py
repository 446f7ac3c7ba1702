"""The kernel series of phases 7 and 8: every step is right, clean under the checks, and one idea away from the last."""

from __future__ import annotations

import difflib
import itertools
import re

import pytest
import torch

from flashlab.attention import reference
from flashlab.cuda import load_inline
from flashlab.kernels import Step, step, steps

SERIES = steps(7, 8)

STEPS = pytest.mark.parametrize("step", SERIES, ids=lambda s: s.name)
# heads, kv_heads, seq_q, seq_k, causal: ragged, both ways unequal, rows that see no key, several tiles
CASES = ((2, 1, 100, 130, True), (2, 2, 70, 33, True), (1, 1, 1, 147, False), (1, 1, 130, 300, False))
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def run(step: Step, case, *, head_dim=64, dtype=torch.float16, check=False, sms=132, **defines):
    heads, kv_heads, seq_q, seq_k, causal = case
    generator = torch.Generator().manual_seed(seq_q)
    q = torch.randn(1, seq_q, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)  # [B, N, H, D] strides
    k, v = (torch.randn(1, kv_heads, seq_k, head_dim, generator=generator).to(dtype) for _ in range(2))
    v = v + 0.5
    module = load_inline(step, backend="emulator", head_dim=head_dim, dtype=dtype, check=check, defines=defines)
    o, lse = module.forward(q, k, v, causal=causal, sms=sms)
    report = module.report
    want, want_lse = reference.attention(q, k, v, causal=causal)
    assert o.isfinite().all()
    assert (o - want).abs().max() <= BOUND[dtype]
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert (lse - want_lse).abs().nan_to_num(0.0).max() <= 1e-4
    assert not report.findings, report.findings[0]
    return report


@STEPS
def test_right_in_the_fast_build(step):
    for case in CASES:
        run(step, case)
    run(step, CASES[0], dtype=torch.bfloat16)
    run(step, CASES[0], head_dim=128)


@STEPS
def test_clean_in_the_check_build(step):
    for case in CASES[:2]:
        run(step, case, check=True)


@pytest.mark.parametrize(
    ("step", "define", "value"),
    [(s, d, v) for s in SERIES for d, values in s.defines.items() for v in values[1:]],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_every_define(step, define, value):
    run(step, CASES[0], check=True, **{define: value})


@pytest.mark.parametrize("sms", [1, 132], ids=["large grid", "small grid"])
def test_the_last_step_chooses_its_blocks(sms):
    report = run(SERIES[-1], (1, 1, 100, 700, True), sms=sms, head_dim=256)
    assert any("merge" in launch.kernel for launch in report.launches) == (sms == 132)


def test_large_scores_and_a_late_maximum():
    generator = torch.Generator().manual_seed(0)
    q = 20 * torch.randn(1, 1, 64, 64, generator=generator)
    k, v = (torch.randn(1, 1, 300, 64, generator=generator) for _ in range(2))
    k[:, :, 0] *= 4  # the last steps walk backwards: it is their last tile
    k[:, :, -1] *= 4
    q, k, v = q.half(), k.half(), v.half()
    want, want_lse = reference.attention(q, k, v)
    for name in ("p7_naive", "p8_1_split_kv", "p8_10_rescale", "p8_flash"):
        o, lse = load_inline(step(name), backend="emulator").forward(q, k, v)
        assert (o - want).abs().max() <= BOUND[torch.float16], name
        assert (lse - want_lse).abs().max() <= 1e-3, name


def code(text: str) -> list[str]:
    """The lines without comments and indentation."""
    return [line for line in (re.sub(r"//.*", "", line).strip() for line in text.splitlines()) if line]


@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(SERIES)), ids=lambda s: s.name)
def test_a_step_is_small_and_marked(before, after):
    old, new = before.path.read_text(), after.path.read_text()
    diff = difflib.ndiff(code(old), code(new))
    added = [line[2:] for line in diff if line.startswith("+ ") and line[2:] not in code(old)]
    assert 0 < len(added) <= 60, f"{len(added)} lines are new in {after.name}"
    assert "New:" in new or "// New" in new, f"nothing is marked in {after.name}"
    assert max(map(len, new.splitlines())) <= 120


def test_the_counts_that_the_steps_are_for():
    """One head, 128 queries and keys, D = 64."""
    case = (1, 1, 128, 128, False)
    counted = {name: run(step(name), case, check=True, sms=1).counters for name in (
        "p7_naive", "p8_1_split_kv", "p8_2_split_q", "p8_4_stages", "p8_5_swizzle", "p8_6_registers", "p8_7_store",
        "p8_11_warp_tiles")}  # fmt: skip

    def get(name, counter):
        return counted[name][counter]

    assert len({get(name, "mma") for name in counted}) == 1  # all of them do the same work
    assert get("p8_2_split_q", "global_load_sectors") * 3 < get("p7_naive", "global_load_sectors")
    assert get("p8_2_split_q", "barriers") < get("p8_1_split_kv", "barriers")
    assert get("p8_4_stages", "ldmatrix_wavefronts") == 8 * get("p8_4_stages", "ldmatrix_ideal")
    assert get("p8_5_swizzle", "ldmatrix_wavefronts") == get("p8_5_swizzle", "ldmatrix_ideal")
    assert get("p8_6_registers", "ldmatrix") * 2 <= get("p8_5_swizzle", "ldmatrix")
    assert get("p8_6_registers", "global_store_sectors") > get("p8_6_registers", "global_store_ideal")
    assert get("p8_7_store", "global_store_sectors") == get("p8_7_store", "global_store_ideal")
    q_fragments = 128 // 16 * 64 // 16  # loaded once by both; those of K and V feed twice as many MMAs
    assert 2 * (get("p8_11_warp_tiles", "ldmatrix") - q_fragments) == get("p8_7_store", "ldmatrix") - q_fragments


def test_no_rows_is_no_work():
    q, k = torch.zeros(1, 1, 0, 64).half(), torch.zeros(1, 1, 8, 64).half()
    for s in (SERIES[0], SERIES[-1]):
        o, lse = load_inline(s, backend="emulator").forward(q, k, k)
        assert o.shape == q.shape and lse.shape == (1, 1, 0)
