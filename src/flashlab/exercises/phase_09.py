"""Checks of phase 9: the merge of split keys, and a third stage of the backward walk.

Answers are CUDA text, as in phase 8.
"""

from __future__ import annotations

import torch

from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import PROBES, Source, built, examine, probe, replaced, text_of
from flashlab.exercises.registry import exercise
from flashlab.kernels.series import step

# ---- 9.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "9.1",
    title="Merge the parts",
    minutes=25,
    difficulty="Core",
    hints=[
        "Part s is a finished attention over its share of the keys: o_s is normalised, lse_s = log of the sum of its "
        "exponentials. With which weight does o_s enter the whole?",
        "Its share of the total sum: exp(lse_s) / sum of exp(lse_s'). Subtract the largest lse first, as "
        "in any softmax; a part "
        "without a key has lse = -inf, and if all have, -inf - (-inf) must not arise.",
        "weight = exp2_approx((part_lse[s * rows + row] - base) * LOG2E) with base = m_i, or 0 where m_i "
        "is -inf; l_i += weight; "
        "acc[i] += weight * the part's element.",
    ],
)
def _(merge_loop: str) -> str:
    text = text_of(merge_loop, "merge_loop")
    whole = replaced(step("p9_flash"), "weighted sum", text)
    probes = ((1, 1, 1, 16, 1024, False), (1, 2, 1, 70, 700, True))
    verdict = examine(whole, probes=probes, fast=False, max_seq=1100)
    _rows_without_a_key(whole)
    return f"{verdict.cases} cases, split keys among them"


def _rows_without_a_key(whole: Source) -> None:
    """Split keys, causal, and more queries than keys: the first rows have no key in any part."""
    __tracebackhide__ = True
    q, k = torch.ones(1, 1, 640, 64).half(), torch.ones(1, 1, 520, 64).half()
    o, lse = built(whole, check=True).forward(q, k, k, causal=True)
    expect(
        o[0, 0, :120].eq(0).all() and lse[0, 0, :120].eq(-torch.inf).all(),
        "rows that no part has seen a key for should be o = 0 and lse = -inf: mind -inf - (-inf)",
        diagnosis="masked-rows-nan",
        case="seq_q=640, seq_k=520, causal",
    )


# ---- 9.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "9.2",
    title="A third stage, backwards",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Before the loop Q and the first STAGES - 1 tiles have to be on their way: end - 1, end - 2, "
        "... Past the first tile "
        "load_kv commits an empty group, so that the count goes on.",
        "Q may be read when all but the latest STAGES - 1 groups have arrived; tile j when all but "
        "STAGES - 2 have. Which tile "
        "goes into the stage that tile j + 1 has left?",
        "for (int i = 1; i < STAGES; i++) load_kv(end - i); wait for Q with STAGES - 1; IN_FLIGHT = "
        "STAGES - 2; after the "
        "barrier load_kv(j - STAGES + 1).",
    ],
)
def _(before_loop: str, in_loop: str) -> str:
    whole = replaced(step("p9_1_masks"), "first copies", text_of(before_loop, "before_loop"))
    whole = replaced(replaced(whole, "Q in registers", "// (above)"), "load K and V", text_of(in_loop, "in_loop"))
    lines = whole.text.splitlines()
    test = 'static_assert(IN_FLIGHT == STAGES - 2, "IN_FLIGHT");'
    text = "\n".join([*lines[: whole.last], f"        {test}", *lines[whole.last or 0 :]]) + "\n"
    whole = Source(text.replace("STAGES = 2;", "STAGES = 3;"), whole.name, whole.first, whole.last)
    try:
        verdict = examine(whole)
    except CheckFailed as failed:
        if failed.diagnosis == "does-not-compile" and "static assertion" in str(failed):
            raise CheckFailed(
                "IN_FLIGHT should leave the copies of all later tiles in flight, and wait for tile j's: "
                "with three stages "
                "that is one group",
                diagnosis="wrong-wait-count",
            ) from None
        raise
    shared = built(whole, check=True)
    report = probe(shared, whole, PROBES[1])
    bytes_ = report.launches[0].shared_bytes
    expect(
        bytes_ == (64 + 6 * 64) * 64 * 2,
        f"the kernel asks for {bytes_} bytes of shared memory; Q and three stages of K and V are {(64 + 6 * 64) * 128}",
        diagnosis="wrong-shared-size",
    )
    return f"{verdict.cases} cases, {bytes_} bytes of shared memory"
