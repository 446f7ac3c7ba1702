"""The checks of phase 2: the online-softmax simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.cost import Meter
from flashlab.check import (
    CheckFailed,
    Report,
    expect,
    expect_close,
    running,
    verification,
    verify_block,
    verify_one_head,
)
from flashlab.check.cases import LOWEST_SCALE, Case, case_list
from flashlab.check.lookup import Row
from flashlab.check.mistakes import weights
from flashlab.check.slips import Chosen, Slip, explain, explained
from flashlab.check.symptoms import watched
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule


def _oracle(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = reference.attention(Q[None, None], K[None, None], V[None, None], **options)
    return o[0, 0], lse[0, 0]


def _random(*shapes: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _run(fn: Callable[..., Any], *args: Any, case: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the learner's function; CheckFailed unless it returns two tensors."""
    __tracebackhide__ = True
    expect(callable(fn), "a function is expected: give its name, without calling it", diagnosis="wrong-type")
    given = [x for x in args if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in given]
    with running(case):
        result = fn(*args, **options)
    changed = not all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
    expect(not changed, "the function changes its inputs: work on copies", diagnosis="input-modified", case=case)
    if (
        not isinstance(result, (tuple, list))
        or len(result) != 2
        or not all(isinstance(x, torch.Tensor) for x in result)
    ):
        kind = "nothing: is a `return` missing?" if result is None else f"a {type(result).__name__}"
        if isinstance(result, (tuple, list)):
            kind = ", ".join("a tensor" if isinstance(x, torch.Tensor) else f"{x!r:.40}" for x in result)
            kind = f"{len(result)} things: {kind}" if result else "an empty tuple"
        raise CheckFailed(
            f"the function should return two tensors, (O, lse), but it returned {kind}",
            diagnosis="wrong-type",
            case=case,
        )
    return result[0], result[1]


def _from_scores(S: torch.Tensor, V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K, V whose scores, with scale 1, are S [M, N]: Q is the identity, and K is S transposed."""
    M = S.shape[0]
    return torch.eye(M, device=S.device), S.T.contiguous(), V


def _expect_flat_memory(fn: Callable[..., Any]) -> None:
    """The milestone's point: nothing in the loop may have N in its shape."""
    __tracebackhide__ = True
    BLOCK_M, HEAD_DIM = 256, 8  # many rows, few features: a copy of K is small beside a row of tiles
    peaks = []
    for N in (256, 1024):
        Q_block, K, V = _random((BLOCK_M, HEAD_DIM), (N, HEAD_DIM), (N, HEAD_DIM))
        with Meter() as meter:
            _run(fn, Q_block, K, V, 16, case=f"N={N}, BLOCK_N=16")
        peaks.append(meter.peak_bytes)
    expect(
        peaks[1] - peaks[0] < BLOCK_M * (1024 - 256) * 4 // 2,
        f"the values are right, the memory is not: with four times the keys your function held {peaks[1]} "
        f"bytes at once instead of {peaks[0]}, so some tensor in it is [BLOCK_M, N]; keep only m_i, l_i and "
        "acc between blocks",
        diagnosis="memory-grows-with-n",
    )


# ---- 2.1 ---------------------------------------------------------------------------------------------------


# Every number of 2.1 as its formula of pieces: what each is, and what a hand may have put in its place.
_LN_2, _LN_4, _LN_8 = (math.log(x) for x in (2, 4, 8))
_STEP: dict[str, tuple[Callable[..., float], dict[str, float]]] = {
    "m_new": (lambda m: m, {"m": _LN_8}),
    "correction": (lambda c: c, {"c": 0.25}),
    "l_i": (lambda c, old, p, p2: c * old + p + p2, {"c": 0.25, "old": 1.5, "p": 1.0, "p2": 0.5}),
    "acc": (
        lambda c, old, p, p2, v, v2: c * old + p * v + p2 * v2,
        {"c": 0.25, "old": 5.5, "p": 1.0, "p2": 0.5, "v": 1.0, "v2": 6.0},
    ),
    "O": (lambda acc, l: acc / l, {"acc": 5.375, "l": 1.875}),
}
_INSTEAD: dict[str, dict[float, str]] = {
    "m": {
        math.log(12): "that is ln(8 + 4), the log-sum-exp of the block; m_new is a maximum, the largest score",
        math.log(15): "that is the log-sum-exp of all four scores; m_new is a maximum, the largest score",
        math.log(10): "that is ln(2 + 8); m_new is the larger of the two maxima",
        math.log(16): "that is the sum of the two maxima; m_new is the larger one",
        math.log(32): "that is the sum of the block's scores; m_new is the largest score",
        _LN_2: "that is the old maximum, ln 2; the second block has a larger score",
        0.0: "that is the least score; m_new is the largest",
        math.log10(8): "that is a logarithm in base 10; scores are natural, ln 8",
    },
    "c": {
        0.5: "the correction is exp(ln 2 - ln 4) there; m_new is ln 8",
        1.0: "the correction is 1 there, as if the maximum had not moved; it is exp(ln 2 - ln 8)",
        0.125: "the correction is exp(-m_new) there; it is exp(m_i - m_new), and m_i is ln 2",
        2.0: "the correction is exp(m_i) there; it is exp(m_i - m_new)",
        4.0: "the correction is upside down there: exp(m_i - m_new) = 2/8",
        0.0625: "the correction is there twice",
        0.0: "what was there before the block is left out",
    },
    "correction": {
        0.75: "that is 1 - 2/8; the correction is exp(m_i - m_new), the quotient alone",
        _LN_8 - _LN_2: "that is m_new - m_i; the correction is exp(m_i - m_new)",
        1 / 3: "that is the quotient of the two maxima; the correction is the exponential of their difference",
        3.0: "that is the quotient of the two maxima; the correction is the exponential of their difference",
        6.0: "that is the difference 8 - 2; exp(ln 2 - ln 8) is the quotient 2/8",
        -6.0: "that is the difference 2 - 8; exp(ln 2 - ln 8) is the quotient 2/8",
        16.0: "that is 2 · 8; exp(ln 2 - ln 8) is the quotient 2/8",
        10.0: "that is 2 + 8; exp(ln 2 - ln 8) is the quotient 2/8",
        2 ** (_LN_2 - _LN_8): "that is 2 to the power of m_i - m_new; it is e to that power",
    },
    "old of l_i": {
        5.5: "the old acc stands where the old l_i belongs, 1.5",
        1.0: "the old l_i is 1 there; it is 1 + 1/2",
        2.0: "the old l_i is 2 there, a term of 1 for each key; it is 1 + 1/2",
        3.0: "the old l_i is exp(ln 2) + exp(0) = 3 there; relative to m_i = ln 2 it is 1 + 1/2",
        _LN_2: "the old l_i is the old maximum there",
    },
    "old of acc": {
        1.5: "the old l_i stands where the old acc belongs, 5.5",
        5.5 / 1.5: "the old acc is divided by l_i there; it stays unnormalised until the end",
        8.0: "the old acc is 3 + 5 there; it is 1 · 3 + 1/2 · 5",
        3.0: "the old acc is the first value alone there; it is 1 · 3 + 1/2 · 5",
        11.0: "the old acc is 2 · 3 + 5 there; relative to m_i = ln 2 it is 5.5",
        6.5: "the old acc is 1/2 · 3 + 5 there; it is 1 · 3 + 1/2 · 5",
    },
    "p": {
        0.0: "the key with the score ln 8 is left out; its p is exp(ln 8 - ln 8) = 1",
        8.0: "p of the score ln 8 is 8 there, exp(ln 8); it is exp(ln 8 - m_new)",
        4.0: "p of the score ln 8 is 4 there, relative to the old maximum; it is exp(ln 8 - m_new)",
        2.0: "p of the score ln 8 is 2 there, relative to the score ln 4; it is exp(ln 8 - m_new)",
        0.25: "p of the score ln 8 is multiplied by the correction; it is relative to m_new already",
        _LN_8: "p of the score ln 8 is the score itself there; it is exp(ln 8 - m_new)",
    },
    "p2": {
        0.0: "the key with the score ln 4 is left out; its p is exp(ln 4 - ln 8) = 1/2",
        4.0: "p of the score ln 4 is 4 there, exp(ln 4); it is exp(ln 4 - m_new)",
        2.0: "p of the score ln 4 is 2 there: exp(ln 4 - ln 8) is 4/8",
        1.0: "p of the score ln 4 is 1 there; only the largest score has p = 1, and exp(ln 4 - ln 8) is 1/2",
        0.25: "p of the score ln 4 is 1/4 there; exp(ln 4 - ln 8) is 1/2",
        0.125: "p of the score ln 4 is multiplied by the correction; it is relative to m_new already",
        -_LN_2: "p of the score ln 4 is ln 4 - ln 8 there, without exp",
        _LN_4: "p of the score ln 4 is the score itself there; it is exp(ln 4 - m_new)",
    },
    "v": {
        6.0: "the value of the key with the score ln 8 is 6 there; it is 1",
        3.0: "the value of the key with the score ln 8 is 3 there, one of the first block's; it is 1",
        8.0: "the value of the key with the score ln 8 is 8 there; it is 1",
    },
    "v2": {
        1.0: "the value of the key with the score ln 4 is 1 there; it is 6",
        5.0: "the value of the key with the score ln 4 is 5 there, one of the first block's; it is 6",
        4.0: "the value of the key with the score ln 4 is 4 there; it is 6",
    },
    "acc of O": {
        5.5: "O is the old acc divided by l_i there; it is the new one",
        4.0: "O has the second block's values alone in it; acc is the sum of both blocks'",
        1.375: "O has the first block's values alone in it; acc is the sum of both blocks'",
        9.5: "O is an acc that was not corrected divided by l_i",
        10.0: "O is 3 + 1 + 6 divided by l_i; acc has each value times its weight",
    },
    "l of O": {
        3.0: "O is acc divided by an l_i that was not corrected, 3; the new one is 0.25 · 1.5 + 1.5",
        2.0: "O is acc divided by 2, the number of blocks or of keys in one; it is divided by l_i",
        4.0: "O is acc divided by 4, the number of keys; it is divided by l_i",
        0.375: "O is acc divided by the first block's part of l_i alone",
        1 / 1.875: "O is acc times l_i; it is acc divided by l_i",
        15.0: "O is acc divided by 15, the sum of exp(score); acc is relative to m_new, and so is l_i",
    },
    "O itself": {
        5.5 / 1.5: "that is the first block's output alone",
        4.0 / 1.5: "that is the second block's output alone",
        5.5 / 1.5 + 4.0 / 1.5: "that is the sum of the two blocks' outputs; their acc and their l_i are added",
        (5.5 / 1.5 + 4.0 / 1.5) / 2: "that is the mean of the two blocks' outputs; their acc and l_i are added",
        5.5 / 1.5 * 0.25 + 4.0 / 1.5: "the two blocks' outputs are added, each divided by an l_i of its own",
        15 / 4: "that is the mean of the four values; each has its own weight",
        15.0: "that is the sum of the four values; each has its own weight",
        43 / 15 / 4: "O is multiplied by the correction once more",
    },
}  # fmt: skip


def _by_hand(name: str, mine: Any) -> tuple[str, str] | None:
    """Which piece of a number's formula would have to be another one to give it, or which terms it should have."""
    formula, right = _STEP[name]
    # A number with a meaning of its own has no pieces to search.
    whole = {"correction": "correction", "O": "O itself"}.get(name)
    for value, said in _INSTEAD.get(whole or "", {}).items():
        if abs(float(mine) - value) < 1e-3:
            return f"{name.lower()}-by-hand", f"{name}: {said}"
    choices = []
    for piece in right:
        instead = _INSTEAD.get(f"{piece} of {name}") or _INSTEAD.get(piece, {})
        choices += [Slip(piece, value, said, f"{name.lower()}-by-hand") for value, said in instead.items()]

    def fits(chosen: Chosen) -> bool:
        return abs(formula(**{**right, **chosen}) - float(mine)) < 1e-3

    if found := explain(fits, choices, most=1):
        return found[0], f"{name}: this number would come of one slip: {found[1]}"
    terms = {
        "l_i": "the old l_i times the correction, and exp(score - m_new) of each of the two new scores",
        "acc": "the old acc times the correction, and for each of the two new keys exp(score - m_new) times its value",
    }.get(name)
    if terms is None:
        return None
    off = float(mine) - formula(**right)
    how = f"{abs(off):.4g} too {'large' if off > 0 else 'small'}"
    return f"{name.lower()}-by-hand", f"{name} is {float(mine):.6g}, {how}. It has three terms: {terms}"


@exercise(
    "2.1",
    title="One step by hand",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Work relative to the maximum. What is the largest score of all four keys? Everything is `exp(score - that)`.",
        "The correction is `exp(m_i - m_new)` = exp(ln 2 - ln 8) = 2 / 8. Multiply the old `l_i` and the "
        "old `acc` by it.",
        "`p` of the second block is (8/8, 4/8). Add 1 + 1/2 to the corrected `l_i`, and 1 * 1 + 1/2 * 6 to "
        "the corrected `acc`.",
    ],
)
def _(one_step: Callable[[], dict[str, float]]) -> str:
    got = one_step()
    names = ["m_new", "correction", "l_i", "acc", "O"]
    expect(
        isinstance(got, dict) and set(got) == set(names),
        f"return a dictionary with the keys {', '.join(names)}",
        diagnosis="wrong-type",
    )
    ln = math.log
    with explained(partial(_by_hand, "m_new", got["m_new"])):
        expect_close(
            got["m_new"],
            ln(8),
            what="m_new",
            tol=1e-3,
            mistakes={
                "exponential-for-score": (8.0, "m_new is a score, ln 8; 8 is its exponential"),
                "block-maximum-only": (ln(4), "m_new is the largest score seen so far, in both blocks: ln 8"),
                "base-2": (3.0, "m_new is in natural units: ln 8, not log2 of it"),
            },
        )
    with explained(partial(_by_hand, "correction", got["correction"])):
        expect_close(
            got["correction"],
            0.25,
            what="correction",
            tol=1e-3,
            mistakes={
                "correction-inverted": (
                    4.0,
                    "the correction is upside down: a larger maximum must shrink the old sums, exp(m_i - "
                    "m_new), not exp(m_new - m_i)",
                ),
                "exponential-forgotten": (
                    ln(2) - ln(8),
                    "that is m_i - m_new; the correction is its exponential",
                ),
            },
        )
    with explained(partial(_by_hand, "l_i", got["l_i"])):
        expect_close(
            got["l_i"],
            1.875,
            what="l_i",
            tol=1e-3,
            mistakes={
                "l-not-rescaled": (
                    3.0,
                    "l_i: the old sum 1.5 is relative to the old maximum; correct it before you add",
                ),
                "l-forgotten": (1.5, "l_i: only one block is in it"),
                "p-not-shifted": (
                    0.375 + 12,
                    "l_i: p of the second block is relative to m_new: 8/8 and 4/8, not 8 and 4",
                ),
                "p-not-shifted-nor-l": (1.5 + 12, "l_i: both blocks' sums have to be relative to m_new"),
                "p-of-4": (1.625, "l_i: p of the score ln 4 is exp(ln 4 - ln 8)"),
                "l-of-the-old": (0.375, "l_i: the second block's sum is missing"),
            },
        )
    with explained(partial(_by_hand, "acc", got["acc"])):
        expect_close(
            got["acc"],
            5.375,
            what="acc",
            tol=1e-3,
            mistakes={
                "acc-not-rescaled": (
                    9.5,
                    "acc: the old 5.5 is relative to the old maximum; correct it before you add",
                ),
                "acc-forgotten": (4.0, "acc: only the second block is in it"),
                "acc-of-the-old": (1.375, "acc: the second block's values are missing"),
                "values-swapped": (1.375 + 6 + 0.5, "acc: each value goes with its own key's weight: 1 · 1 + 1/2 · 6"),
                "p-not-shifted": (1.375 + 8 + 24, "acc: p of the second block is relative to m_new: 8/8 and 4/8"),
                "normalised-early": (
                    5.5 / 1.5 * 0.25 + 4,
                    "acc: the old one was divided by l_i first; it stays unnormalised until the end",
                ),
            },
        )
    with explained(partial(_by_hand, "O", got["O"])):
        expect_close(
            got["O"],
            43 / 15,
            what="O",
            tol=1e-3,
            mistakes={
                "not-normalised": (5.375, "O is acc divided by l_i, once, at the end"),
                "old-l": (5.375 / 1.5, "O is acc divided by the new l_i, not by the one before the step"),
                "inverted": (15 / 43, "O is acc divided by l_i, not l_i by acc"),
            },
        )
    return "all five values right; O = 43/15, as the softmax over all four keys gives"


# ---- 2.2 ---------------------------------------------------------------------------------------------------


@exercise(
    "2.2",
    title="The state of one block",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Three lines. Each row of `s` is on its own: the maximum and the sum run along `dim=1`.",
        "`m = s.amax(dim=1)` has shape [BLOCK_M]; to subtract it from every column write `m[:, None]`.",
        "`p = torch.exp(s - m[:, None])`, then `l = p.sum(dim=1)` and `acc = p @ v`. No division.",
    ],
)
def _(block_state: Callable[[torch.Tensor, torch.Tensor], tuple]) -> str:
    device = runtime.device()
    s = torch.tensor([[1.0, 3, 2], [0, -1, -2]], device=device)
    v = torch.tensor([[1.0, 10], [2, 20], [4, 40]], device=device)
    for case, scores in [("a 2 x 3 tile", s), ("scores near 300", s + 300), ("scores near -300", s - 300)]:
        given = scores.clone()
        with running(case):
            result = block_state(given, v)
        changed = not torch.equal(given, scores)
        expect(not changed, "s was changed in place: write to a new tensor", diagnosis="inputs-changed", case=case)
        expect(
            isinstance(result, (tuple, list)) and len(result) == 3,
            "return three tensors: m, l, acc",
            diagnosis="wrong-type",
            case=case,
        )
        m, l, acc = result
        want = scores.amax(dim=1)
        p = torch.exp(scores - want[:, None])
        everywhere = torch.full_like(want, scores.max().item())
        expect_close(
            m,
            want,
            what="m",
            case=case,
            mistakes={
                "maximum-not-per-row": (
                    everywhere,
                    "m: each row has its own maximum; yours is that of the whole tile",
                ),
                "wrong-axis": (scores.amax(dim=0), "m: the maximum runs over the keys, so along dim=1"),
                "maximum-from-zero": (
                    want.clamp(min=0),
                    "m is 0 where all scores are negative: the maximum starts at -inf, not at 0",
                ),
                "minimum": (scores.amin(dim=1), "m: that is the smallest score of each row"),
            },
        )
        expect_close(
            l,
            p.sum(dim=1),
            what="l",
            case=case,
            mistakes={
                "no-max-subtraction": (
                    torch.exp(scores).sum(dim=1),
                    "l: subtract the row's maximum before the exponential; without it scores of 300 overflow",
                ),
                "log-for-l": (p.sum(dim=1).log(), "l: that is ln(l); return the sum itself"),
                "lse-for-l": (want + p.sum(dim=1).log(), "l: that is m + ln(l); return the sum itself"),
                "sum-of-scores": (scores.sum(dim=1), "l: the scores are summed, not their exponentials"),
                "mean-for-sum": (p.mean(dim=1), "l: that is the mean; it is the sum"),
                "base-2": (torch.exp2(scores - want[:, None]).sum(dim=1), "l: 2 is raised to s - m; use torch.exp"),
            },
        )
        expect_close(
            acc,
            p @ v,
            what="acc",
            case=case,
            mistakes={
                "normalised-too-early": (
                    (p / p.sum(dim=1, keepdim=True)) @ v,
                    "acc is divided by l already; leave it unnormalised, the division comes once, at the very end",
                ),
                "scores-for-p": (scores @ v, "acc: the scores are multiplied by v; it is their exponentials p"),
                "sum-of-v": (v.sum(0).expand(2, 2), "acc: v is summed without weights; it is p @ v"),
            },
        )
    return "m, l and acc right, also for scores near +300 and -300"


# ---- 2.3, 2.4: the milestones ------------------------------------------------------------------------------


@exercise(
    "2.3",
    title="flash_attention_forward_sim",
    minutes=30,
    difficulty="Core",
    hints=[
        "The state first: `m_i` all -inf, `l_i` all 0, `acc` all 0, in float32 (`q.new_full`, "
        "`q.new_zeros` put them on the right device). Then a loop `for start_n in range(0, N, BLOCK_N)`.",
        "In the loop, in this order: load k, scores s, m_new, p, correction, l_i, acc, and last m_i = "
        "m_new. `m_new = torch.maximum(m_i, s.amax(dim=1))`.",
        "`l_i = l_i * correction + p.sum(dim=1)` and `acc = acc * correction[:, None] + "
        "p.to(V.dtype).float() @ v`. After the loop: O = acc / l_i[:, None] in V's dtype, and lse = m_i + "
        "log(l_i).",
    ],
)
def _(flash_attention_forward_sim: Callable[..., Any]) -> Any:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    report = _verify_block(flash_attention_forward_sim, dtypes=dtypes, head_dims=(64, 20))
    _expect_value_columns(lambda q, k, v: flash_attention_forward_sim(q, k, v, 4))
    _expect_flat_memory(flash_attention_forward_sim)
    return report


def _verify_block(fn: Callable[..., Any], **options: Any) -> Any:
    """`verify_block`; where it cannot name the cause, an example of four keys may tell it from the numbers alone."""
    __tracebackhide__ = True
    try:
        return verify_block(fn, **options)
    except CheckFailed as failed:
        if failed.diagnosis in ("wrong-value", *weights.SLUGS):
            try:
                _expect_rescaled(fn)
            except CheckFailed as small:
                if small.diagnosis != "wrong-value" or failed.diagnosis == "wrong-value":
                    raise
        raise


def _expect_value_columns(fn: Callable[..., Any], **options: Any) -> None:
    """V may have another number of columns than Q and K."""
    __tracebackhide__ = True
    Q, K, V = _random((6, 16), (10, 16), (10, 24))
    case = "Q [6, 16], K [10, 16], V [10, 24]"
    want, _ = _oracle(Q, K, V, **options)
    told = "the number of columns of O is V's, which need not be HEAD_DIM; your function "
    try:
        O, _ = _run(fn, Q, K, V, case=case)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckFailed(f"{told}raises {type(error).__name__}", diagnosis="v-dim-ignored", case=case) from error
    same = O.shape == want.shape
    expect(same, f"{told}gives O the shape {list(O.shape)}", diagnosis="v-dim-ignored", case=case)
    expect_close(O, want, what="O", case=case, tol=1e-4, diagnosis="v-dim-ignored")


def _expect_rescaled(fn: Callable[..., Any]) -> None:
    """Two blocks of two keys; the maximum rises. Small enough to tell the mistake from the numbers alone."""
    __tracebackhide__ = True
    ln2, device = math.log(2), runtime.device()
    S = ln2 * torch.tensor([[1.0, 0, 3, 2], [2, 0, 1, 1]], device=device)
    V = torch.tensor([[4.0, 0], [0, 4], [8, 0], [0, 8]], device=device)
    case = "the lecture's 2 x 4 example, two keys a block"
    Q_block, K, V = _from_scores(S, V)
    O, lse = _run(fn, Q_block, K, V, 2, scale=1.0, case=case)
    want, want_lse = _oracle(Q_block, K, V, scale=1.0)
    one, two = ([1.5, 4, 2], [1.5, 8, 4])  # row 0: l and acc of each block, relative to its own maximum

    def row_0(c_l: float, c_acc: float) -> torch.Tensor:
        l = one[0] * c_l + two[0]
        o = torch.tensor([(one[1] * c_acc + two[1]) / l, (one[2] * c_acc + two[2]) / l])
        return torch.stack([o, want[1].float().cpu()])

    expect_close(
        O,
        want,
        what="O",
        case=case,
        tol=1e-4,
        mistakes={
            "correction-inverted": (
                row_0(4, 4),
                "where the row maximum rises, the old sums grow: the correction is upside down, it is exp(m_i - m_new)",
            ),
            "nothing-rescaled": (
                row_0(1, 1),
                "where the row maximum rises, l_i and acc keep their old scale: multiply both by exp(m_i - m_new)",
            ),
            "l-not-rescaled": (row_0(1, 0.25), "acc is corrected when the row maximum rises, l_i is not"),
            "o-not-rescaled": (row_0(0.25, 1), "l_i is corrected when the row maximum rises, acc is not"),
            "not-normalised": (
                want * torch.tensor([[1.875], [2.25]], device=device),
                "O is acc, not divided by l_i",
            ),
        },
    )
    expect_close(
        lse,
        want_lse,
        what="lse",
        case=case,
        tol=1e-4,
        mistakes={
            "lse-without-m": (
                torch.tensor([1.875, 2.25]).log(),
                "lse is log(l_i), but l_i is relative to m_i: add m_i",
            ),
            "lse-in-base-2": (want_lse / ln2, "lse is in base 2; it is the natural logarithm here"),
        },
    )


@exercise(
    "2.4",
    title="The whole matrix",
    minutes=10,
    difficulty="Core",
    hints=[
        "Allocate O [M, V_DIM] in Q's dtype and lse [M] in float32, then fill them BLOCK_M rows at a time.",
        "`for start_m in range(0, M, BLOCK_M)`: slice Q, call the simulation, assign to the same slice of "
        "O and of lse. The slice of the last block may be shorter; Python does the same to both sides.",
    ],
)
def _(flash_attention_one_head_sim: Callable[..., Any]) -> Any:
    report = None
    for BLOCK_M, BLOCK_N in [(16, 32), (48, 16), (64, 64)]:

        def one_head(q, k, v, *, scale=None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N):
            return flash_attention_one_head_sim(q, k, v, BLOCK_M, BLOCK_N, scale)

        report = verify_one_head(one_head, dtypes=(torch.float16, torch.float32), head_dims=(64, 20), max_tile=128)
    _expect_value_columns(lambda q, k, v: flash_attention_one_head_sim(q, k, v, 4, 4))
    _expect_blocks_not_exchanged(flash_attention_one_head_sim)
    Q, K, V = _random((300, 32), (256, 32), (256, 32), dtype=torch.float16)
    with Meter(Q, K, V) as meter:
        _run(flash_attention_one_head_sim, Q, K, V, 64, 32, case="M=300, N=256, BLOCK_M=64, BLOCK_N=32")
    expect(
        meter.peak_bytes < 300 * 256 * 2,
        f"the values are right, but your function held {meter.peak_bytes} bytes at once: as much as the "
        "whole score matrix; compute one block of BLOCK_M rows at a time",
        diagnosis="not-tiled",
    )
    return report


def _expect_blocks_not_exchanged(fn: Callable[..., Any]) -> None:
    """Products of 16 rows and 64 keys, not of 64 rows and 16 keys: told by how many there are."""
    __tracebackhide__ = True
    Q, K, V = _random((16, 32), (128, 32), (128, 32))
    case = "M=16, N=128, BLOCK_M=16, BLOCK_N=64"
    with Meter() as meter:
        _run(fn, Q, K, V, 16, 64, case=case)
    products = sum(op.name in ("mm", "addmm", "matmul", "bmm") for op in meter.ops)
    expect(
        products <= 4,
        f"the values are right, but {products} products were computed where one block of rows and two blocks of keys "
        "need 4: are BLOCK_M and BLOCK_N exchanged?",
        diagnosis="blocks-exchanged",
        case=case,
    )


# ---- 2.5, 2.6: bug hunts -----------------------------------------------------------------------------------


def _verify_causal(hunted: Callable[..., Any]) -> Report:
    """Every causal case of the checker, in tiles of 16 keys."""
    __tracebackhide__ = True

    def call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        __tracebackhide__ = True
        o, lse = _run(hunted, q[0, 0], k[0, 0], v[0, 0], 16, case.softmax_scale, case=str(case))
        return o[None, None], lse[None, None]

    cases = [case for case in case_list(causal=True, batched=False, strided=False, max_seq=200) if case.causal]
    # Below -1e30 too, so that no finite number passes for minus infinity.
    lowest = "every score near the lowest number of float32"
    huge = [replace(case, name=lowest, scale=LOWEST_SCALE) if case.content == "huge" else case for case in cases]
    return verification.run(call, [replace(case, block_n=16) for case in huge], one_head=True)


@exercise(
    "2.5",
    title="Right without a past",
    minutes=15,
    difficulty="Bug hunt",
    untouched="10cf5f0cbfe8",
    history="Dao-AILab/flash-attention, issue 282 (2023); its version 2.1 changed the alignment",
    hints=[
        "It is right wherever there are as many queries as keys. Take 2 queries and 5 keys: write down the mask that "
        "the code makes, as a 2 x 5 table of 0 and 1.",
        "The last query should see all 5 keys, and the one before it all but one. Which keys does the code let it see?",
        "Query i is at position i + N - M of the keys: mask where key > row + N - M.",
    ],
)
def _(hunted: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return _verify_causal(hunted)


@exercise(
    "2.6",
    title="The walk from the other end",
    minutes=20,
    difficulty="Bug hunt",
    untouched="3b7a9eee7ed5",
    history="flashinfer-ai/flashinfer, pull request 4401 (2026), and many before it",
    hints=[
        "With 32 queries, 32 keys and tiles of 16: which rows see a key of the tile 16 to 31, which the walk meets "
        "first? Which rows are NaN?",
        "Print s, m_new and p of row 0 in the first round. Every score of it is masked. What is m_new, and what is "
        "s - m_new?",
        "-inf - (-inf) is NaN. Where m_new is still -inf, subtract 0 instead, in p and in the correction: exp(-inf) is "
        "0, which is what a row without a key should add.",
    ],
)
def _(hunted: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    for keys, queries in ((32, 32), (40, 24)):
        case = f"{queries} queries, {keys} keys, tiles of 16, causal"
        Q, K, V = _random((queries, 16), (keys, 16), (keys, 16))
        O, lse = _run(hunted, Q, K, V, 16, case=case)
        if watched() is None and O.shape == Q.shape:
            late = (
                torch.arange(queries, device=Q.device) + keys - queries < (keys - 1) // 16 * 16
            )  # none of the last tile
            nan = O.isnan().any(1)
            expect(
                not (nan.any() and (nan <= late).all()),
                f"{int(nan.sum())} rows are NaN, and none of them sees a key of the tile in which the walk "
                "begins: m_new is still -inf there, and -inf - (-inf) is NaN. Guard both exponents",
                diagnosis="first-tile-masked",
                case=case,
            )
            low = f"{case}, all scores -1600"
            zero = (_run(hunted, torch.full_like(Q, 20.0), torch.full_like(K, -20.0), V, 16, case=low)[0] == 0).all(1)
            expect(
                bool((O == 0).all(1).any()) or not (zero.any() and (zero <= late).all()),
                f"where all scores are far below 0, {int(zero.sum())} rows are 0, and none of them sees a key of the "
                "tile in which the walk begins: the 0 that stands in for -inf there is kept as the maximum. m_i has to "
                "stay -inf; the 0 is for the subtraction only",
                diagnosis="guard-kept",
                case=low,
            )
    return _verify_causal(hunted)


# ---- 2.7 ---------------------------------------------------------------------------------------------------


@rule(
    "2.7",
    title="Count the bytes",
    minutes=10,
    hints=[
        "Who reads what how often? Q: each row belongs to one query block. K and V: each query block walks "
        "over all of them.",
        "The number of query blocks is M / BLOCK_M rounded *up*: `-(-M // BLOCK_M)`.",
        "read = (M + blocks * 2 * N) * HEAD_DIM * itemsize; written = M * HEAD_DIM * itemsize for O, and 4 "
        "* M for lse.",
    ],
    returns="bytes read, bytes written",
    inputs=[(192, 128, 64, 64, 2), (1024, 1024, 128, 64, 2), (1000, 1500, 64, 128, 2), (5, 7, 8, 64, 4)],
    draw=lambda r: (
        r.randint(1, 400), r.randint(1, 400), r.choice((8, 16, 64, 80)), r.choice((16, 32, 64, 128)), r.choice((2, 4))
    ),
    notes={
        "2": "K and V are two matrices", "q_blocks": "every block of queries reads K and V again",
        "itemsize": "an element has itemsize bytes", "bytes read: M": "each block reads its own rows of Q once",
        "HEAD_DIM": "a row has HEAD_DIM elements",
        "M * 4": "lse has a float32 for each row, 4 bytes", "4": "lse is float32, 4 bytes",
    }
    | dict.fromkeys(("-(-M // BLOCK_M)", "-M // BLOCK_M"), "there is no fraction of a block, and the last one counts"),
    rows=[
        Row("q-padded", "bytes read: the last query block has fewer rows, and only these are read",
            [("(M + q", "(q_blocks * BLOCK_M + q")]),
        Row("v-read-once", "bytes read: one of K and V is read once, and not by every block of queries",
            [("q_blocks * 2 * N", "(q_blocks + 1) * N")]),
        Row("scores-read", "bytes read: the scores never leave the chip, so nobody reads them",
            [("itemsize\n    written", "itemsize + M * N * itemsize\n    written")]),
        Row("scores-written", "bytes written: the scores never leave the chip",
            [("+ M * 4", "+ M * 4 + M * N * itemsize")]),
        Row("rows-padded", "bytes written: rows of O that do not exist are counted",
            [("written = M", "written = q_blocks * BLOCK_M")]),
        Row("lse-itemsize", "bytes written: lse is float32, 4 bytes, whatever the inputs are",
            [("M * 4", "M * itemsize")]),
    ],
)  # fmt: skip
def hbm_bytes(M, N, HEAD_DIM, BLOCK_M, itemsize):
    """Return (bytes read, bytes written)."""
    # BEGIN SOLUTION
    q_blocks = -(-M // BLOCK_M)
    read = (M + q_blocks * 2 * N) * HEAD_DIM * itemsize
    written = M * HEAD_DIM * itemsize + M * 4
    return read, written
    # END SOLUTION


# ---- 2.8 ---------------------------------------------------------------------------------------------------


@exercise(
    "2.8",
    title="Cut the keys among workers",
    minutes=25,
    difficulty="Stretch",
    hints=[
        "Cut K and V alike into `splits` parts (`torch.chunk` may give fewer: that is fine), run the "
        "simulation on each, and collect the O and lse of every part.",
        "A part's sum of exponentials is exp(lse_part), so in the whole softmax it has the weight "
        "exp(lse_part) / sum of exp(lse_part). Subtract a maximum before you take those exponentials.",
        "`lse = torch.logsumexp(lses, dim=0)`, weights `torch.exp(lses - lse)`, and O the weighted sum of "
        "the parts' O in float32.",
    ],
)
def _(split_kv_sim: Callable[..., Any]) -> str:
    with explained(lambda: _explain_parts(split_kv_sim)):
        _expect_parts(split_kv_sim)
    _expect_split(split_kv_sim)
    for shift in (+400.0, -400.0):
        case = f"every score near {shift:+.0f}"
        S = shift + _random((3, 12))[0]
        Q_block, K, V = _from_scores(S, _random((12, 4), seed=1)[0])
        want, want_lse = _oracle(Q_block, K, V, scale=1.0)
        O, lse = _run(split_kv_sim, Q_block, K, V, 2, 3, scale=1.0, case=case)
        if not (O.isfinite().all() and lse.isfinite().all()):
            raise CheckFailed(
                "exp(lse) left the range of float32 in the merge: subtract the largest lse first",
                diagnosis="merge-overflow",
                case=case,
            )
        expect_close(O, want, what="O", case=case, tol=1e-3)
        expect_close(lse, want_lse, what="lse", case=case, tol=1e-3)
    return "6 ways to cut 50 keys, and scores near +400 and -400: all equal to the undivided result"


def _explain_parts(fn: Callable[..., Any]) -> tuple[str, str] | None:
    """Each part's values are 1 in a column of its own, so that O holds the weights of the parts."""
    Q_block, K = _random((6, 16), (12, 16))
    V = torch.eye(3, device=K.device).repeat_interleave(4, 0)
    V = torch.cat([V, torch.zeros(12, 13, device=K.device)], 1)
    O, lse = fn(Q_block, K, V, 4, 3)
    weights, lses = (
        O[:, :3].double().cpu(),
        torch.stack([_oracle(Q_block, k, k)[1] for k in K.chunk(3)], 1).double().cpu(),
    )
    right = torch.softmax(lses, 1)
    if torch.allclose(weights, right, atol=1e-4):
        return None
    i = int((weights - right).abs().sum(1).argmax())
    mine, should = (", ".join(f"{x:.3g}" for x in w[i].tolist()) for w in (weights, right))
    said = f"in O the three parts of row {i} have the weights {mine}, and should have {should}"
    total = weights.sum(1)
    also = f"; they add up to {total[i]:.3g}" if abs(total[i].item() - 1) > 1e-3 else "; they add up to 1"
    if bool((weights > 0).all()):
        relative, of_lse = (x - x.mean(1, keepdim=True) for x in (weights.log(), lses))
        power = ((relative * of_lse).sum() / of_lse.square().sum()).item()
        if (relative - power * of_lse).abs().max() < 1e-3:
            base = {2: "2^lse", 10: "10^lse", 1: "exp(lse)"}.get(round(math.exp(power)) if power > 0.5 else 0)
            base = "exp(lse)" if abs(power - 1) < 1e-3 else base if base != "exp(lse)" else None
            also += f", and are to each other as {base or f'exp({power:.3g} · lse)'} of the parts"
    return "wrong-weights", said + also


def _left_over(Q_block: torch.Tensor, K: torch.Tensor, V: torch.Tensor, splits: int) -> dict[str, Any]:
    """O without the keys that are left where `splits` does not divide their number."""
    whole = len(K) // splits * splits
    said = f"the last {len(K) - whole} of {len(K)} keys are in no part: {splits} does not divide {len(K)}"
    return {"keys-dropped": (_oracle(Q_block, K[:whole], V[:whole])[0], said)} if 0 < whole < len(K) else {}


def _expect_parts(split_kv_sim: Callable[..., Any]) -> None:
    __tracebackhide__ = True
    shapes = [(6, 16), (50, 16), (50, 16)]
    Q_block, K, V = _random(*shapes)
    for splits in (1, 2, 3, 7, 50, 64):
        case = f"50 keys, {splits} splits"
        want, want_lse = _oracle(Q_block, K, V)
        O, lse = _run(split_kv_sim, Q_block, K, V, 4, splits, case=case)
        lses = torch.stack([_oracle(Q_block, k, v)[1] for k, v in zip(K.chunk(splits), V.chunk(splits), strict=True)])
        parts = [_oracle(Q_block, k, v) for k, v in zip(K.chunk(splits), V.chunk(splits), strict=True)]
        mean = torch.stack([o for o, _ in parts]).mean(dim=0)
        expect_close(
            O,
            want,
            what="O",
            case=case,
            tol=1e-4,
            mistakes={
                "plain-average": (
                    mean,
                    "the parts are averaged as if they weighed the same; a part weighs exp(its lse)",
                ),
                "weighted-by-lse": (
                    (torch.stack([o for o, _ in parts]) * (lses / lses.sum(dim=0))[..., None]).sum(dim=0),
                    "the parts are weighted by their lse; the weight is exp(lse)",
                ),
                **_merge_mistakes(parts, Q_block, K, V, splits),
                **_left_over(Q_block, K, V, splits),
                "parts-summed": (
                    mean * len(parts),
                    "the parts are added up; each is normalised by its own sum already: weigh them",
                ),
            },
        )
        expect_close(
            lse,
            want_lse,
            what="lse",
            case=case,
            tol=1e-4,
            mistakes={
                "lse-summed": (
                    torch.stack([x for _, x in parts]).sum(dim=0),
                    "lse: exponentials add up, logarithms do not: it is the log of the sum of exp(lse)",
                ),
                "keys-dropped": (
                    _oracle(Q_block, K[: max(1, 50 // splits * splits)], V[: max(1, 50 // splits * splits)])[1],
                    "lse: the keys left over by the division do not count: N need not be a multiple of splits",
                ),
                "first-and-last": (
                    torch.logaddexp(lses[0], lses[-1]),
                    "lse: only the first and the last part count (one part alone counts twice)",
                ),
                "lse-maximum": (
                    torch.stack([x for _, x in parts]).amax(dim=0),
                    "lse: that is the largest part's; the others have keys too",
                ),
            },
        )


def _merge_mistakes(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    Q_block: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    splits: int,
) -> dict[str, tuple[torch.Tensor, str]]:
    """O as a wrong merge of the parts would give it."""
    os, lses = torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts])
    top = lses.amax(0)

    def merged(weights: torch.Tensor) -> torch.Tensor:
        return (os * weights[..., None]).sum(0)

    kept = max(1, len(K) // splits * splits)
    first_last = torch.softmax(lses[[0, -1]], 0)
    return {
        "weights-inverted": (
            merged(torch.softmax(-lses, 0)),
            "the weights are upside down: a part with a larger lse weighs more",
        ),
        "weights-inverted-unnormalised": (
            merged(torch.exp(torch.logsumexp(lses, 0) - lses)),
            "the weights are upside down: a part weighs exp(its lse - the whole lse)",
        ),
        "softmax-over-rows": (
            merged(torch.softmax(lses, 1)),
            "the weights are normalised over the rows; each row's weights sum to 1 over the parts, dim=0",
        ),
        "not-normalised": (
            merged(torch.exp(lses - top)),
            "the weights do not sum to 1: they are exp(lse of the part - lse of the whole), not minus the largest lse",
        ),
        "keys-dropped": (
            _oracle(Q_block, K[:kept], V[:kept])[0],
            "the keys left over by the division do not count: N need not be a multiple of splits",
        ),
        "first-and-last": (
            (os[[0, -1]] * first_last[..., None]).sum(0),
            "only the first and the last part count",
        ),
        "last-part-lost": (
            (os[:-1] * torch.softmax(lses[:-1], 0)[..., None]).sum(0) if len(os) > 1 else os[0] * math.nan,
            "the last part does not count",
        ),
    }


def _expect_split(fn: Callable[..., Any]) -> None:
    """`splits` and `scale` are used, half precision goes in and comes out, and the merge itself is in float32."""
    __tracebackhide__ = True
    Q_block, K, V = _random((6, 16), (50, 16), (50, 16))
    case = "50 keys, BLOCK_N=64, 5 splits"
    with Meter() as meter:
        _run(fn, Q_block, K, V, 64, 5, case=case)
    products = sum(op.name in ("mm", "addmm", "matmul", "bmm") for op in meter.ops)
    expect(
        products >= 10,
        f"the values are right, but {products} products were computed: 5 parts need two each. Is `splits` used?",
        diagnosis="not-split",
        case=case,
    )
    expect(
        products < 20,
        f"the values are right, but {products} products were computed: 5 parts need two each. Is `splits` taken for "
        "the length of a part? It is their number",
        diagnosis="parts-too-short",
        case=case,
    )
    case = "50 keys, 5 splits, scale=0.7"
    want, want_lse = _oracle(Q_block, K, V, scale=0.7)
    ignored, ignored_lse = _oracle(Q_block, K, V)
    why = "the argument `scale` is ignored: hand it on to the simulation"
    O, lse = _run(fn, Q_block, K, V, 4, 5, scale=0.7, case=case)
    expect_close(O, want, what="O", case=case, tol=1e-4, mistakes={"scale-ignored": (ignored, why)})
    expect_close(lse, want_lse, what="lse", case=case, tol=1e-4, mistakes={"scale-ignored": (ignored_lse, why)})

    Q_block, K, V = _random((64, 16), (256, 16), (256, 16), dtype=torch.float16)
    case = "256 keys in float16, 64 splits"
    V = 1 + V / 64  # near 1: the parts' own rounding is small beside that of 64 rounded weights
    want, _ = _oracle(Q_block, K, V)
    O, lse = _run(fn, Q_block, K, V, 16, 64, case=case)
    expect(
        O.dtype == V.dtype, f"O is {O.dtype}; it should be of V's dtype, {V.dtype}", diagnosis="wrong-dtype", case=case
    )
    sentence = f"lse is {lse.dtype}; it should be torch.float32"
    expect(lse.dtype == torch.float32, sentence, diagnosis="wrong-dtype", case=case)
    error, allowed = (O.double() - want).square().mean().sqrt().item(), 2.0**-11
    expect(
        error <= allowed,
        f"O errs by {error:.1e} on average, where {allowed:.1e} is allowed: are the weights, or the sum, in V's dtype? "
        "Merge in float32, and round once at the end",
        diagnosis="merged-in-low-precision",
        case=case,
    )


# ---- 2.9 ---------------------------------------------------------------------------------------------------


@exercise(
    "2.9",
    title="Causal, and skipping tiles",
    minutes=35,
    difficulty="Stretch",
    hints=[
        "Query i sees key j if j <= i + N - M. With the rows' numbers `start_m + arange` and the keys' "
        "numbers `start_n + arange` that is one comparison of a column with a row: it gives the mask of "
        "the tile.",
        "A tile can be skipped when even the block's last row sees none of its keys: its first key is "
        "beyond `last row + N - M`. So the inner loop may simply end earlier.",
        "A row whose keys so far are all masked has m_new = -inf, and -inf - (-inf) is NaN. Subtract 0 "
        "instead of m_new in such a row. At the end, a row with l_i = 0 gets O = 0 and lse = -inf.",
    ],
)
def _(flash_attention_causal_sim: Callable[..., Any]) -> Any:
    report = None
    for BLOCK_M, BLOCK_N in [(16, 32), (64, 16)]:

        def one_head(q, k, v, *, scale=None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N):
            return flash_attention_causal_sim(q, k, v, BLOCK_M, BLOCK_N, scale)

        dtypes = (torch.float16, torch.float32)
        report = verify_one_head(one_head, always_causal=True, dtypes=dtypes, head_dims=(64, 20), max_tile=128)
    _expect_value_columns(lambda q, k, v: flash_attention_causal_sim(q, k, v, 4, 4), causal=True)
    M = N = 256
    D, BLOCK = 32, 32
    Q, K, V = _random((M, D), (N, D), (N, D))
    case = f"M=N={N}, tiles {BLOCK} x {BLOCK}"
    with Meter() as meter:
        _run(flash_attention_causal_sim, Q, K, V, BLOCK, BLOCK, case=case)
    blocks = N // BLOCK
    needed, all_of_them = blocks * (blocks + 1) // 2, blocks * blocks
    tiles = meter.matmul_flops / (4 * BLOCK * BLOCK * D)
    expect(
        tiles < needed + 0.5,
        f"the values are right, but {tiles:.0f} tiles of scores were computed where {needed} of the "
        f"{all_of_them} hold a visible key: skip the tiles that lie in every row's future",
        diagnosis="tiles-not-skipped",
        case=case,
    )
    return report
