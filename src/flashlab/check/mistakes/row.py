"""The online softmax of one row in plain steps, right or with a known mistake: for the checks of its recurrence."""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

from __future__ import annotations

import math

import torch

INF = math.inf

NOT_RESCALED = (
    "was not rescaled when the maximum moved: the old terms must be multiplied by exp(m - m_new), "
    "computed before m is overwritten"
)
INVERTED = "the correction is inverted: it is exp(m - m_new), old minus new, and never above 1"

# What a known mistake changes in the recurrence, in words.
ROW_MISTAKES = {
    "not-rescaled": f"what is kept {NOT_RESCALED}",
    "l-not-rescaled": f"l {NOT_RESCALED}",
    "o-not-rescaled": f"o {NOT_RESCALED}",
    "correction-inverted": INVERTED,
    "l-correction-inverted": f"of l, {INVERTED}",
    "o-correction-inverted": f"of o, {INVERTED}",
    "corrected-twice": "the old terms are corrected twice: multiply them by exp(m - m_new) once",
    "corrected-by-half": "the correction is the square root of the right one: it is exp(m - m_new)",
    "new-term-rescaled": "the correction belongs to the old terms only; the new ones already refer to the new maximum",
    "first-term-lost": "the correction belongs to the old terms only: at the start, where m is -inf, it is 0, and "
    "takes the new terms with it",
    "new-term-lost": "a new maximum must be counted too: its own term is exp(0) = 1",
    "old-maximum-used": "the new terms are taken against the old maximum: they are exp(x - m_new)",
    "overwritten": "the new sum replaces the old one: what was there before has to be kept, times the correction",
    "m-not-updated": "m is never set to m_new, so that each step starts from the first maximum again",
    "base-2": "2 is raised to the difference: the exponential is e^x, math.exp or torch.exp",
    "normalised-early": "o is divided by l in every block: divide once, at the end",
    "normalised-each-block": "o is divided by l in every block, and again at the end: divide once, at the end",
    "normalised-in-the-loop": "o is divided by l in every block but the first, and again at the end: divide once",
    "not-normalised": "o is not divided by l at the end",
    "tail-lost": "the last, shorter block is left out",
    "first-block-lost": "the first block is left out",
    "last-block-lost": "the last block is left out",
    "first-block-twice": "the first block is counted twice",
}
OF_THE_OUTPUT = (
    "o-not-rescaled",
    "o-correction-inverted",
    "tail-lost",
    *(slug for slug in ROW_MISTAKES if "normalised" in slug),
)


def walk(
    x: torch.Tensor, v: torch.Tensor, n: int, mistake: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l and o of the online softmax of a row x [N], `n` keys at a time; o [D] is divided by l.

    Right, or with one of `ROW_MISTAKES`, or with two, "one+other".
    """
    made = set(mistake.split("+")) - {""}
    m, l, o = x.new_tensor(-INF), x.new_zeros(()), x.new_zeros(v.shape[-1])
    powers = {"corrected-twice": 2.0, "corrected-by-half": 0.5, "correction-inverted": -1.0}
    power = math.prod(powers[x] for x in made & set(powers))
    exp = torch.exp2 if "base-2" in made else torch.exp
    blocks = list(range(0, len(x) // n * n if "tail-lost" in made else len(x), n))
    if made & {"first-block-lost", "last-block-lost"}:
        blocks = blocks[1:] if "first-block-lost" in made else blocks[:-1]
    if "first-block-twice" in made:
        blocks = blocks[:1] + blocks
    for start in blocks:
        x_j, v_j = x[start : start + n], v[start : start + n]
        m_new = torch.maximum(m, x_j.max())
        if m_new == -INF:
            continue
        first = bool(m == -INF)
        correction = torch.zeros_like(m) if first else exp(power * (m - m_new))
        p = exp(x_j - (m if "old-maximum-used" in made and not first else m_new))
        if "first-term-lost" in made or "new-term-rescaled" in made and not first:
            p = p * correction
        if "new-term-lost" in made and m_new > m and not first:
            p = p * 0.0
        if "overwritten" in made:
            l, o = l * 0.0, o * 0.0
        for_l, for_o = (
            1.0
            if made & {"not-rescaled", f"{x}-not-rescaled"}
            else exp(m_new - m)
            if f"{x}-correction-inverted" in made and not first
            else correction
            for x in "lo"
        )
        l, o = l * for_l + p.sum(), o * for_o + p @ v_j
        if made & {"normalised-early", "normalised-each-block"} or "normalised-in-the-loop" in made and start:
            o = o / l
        m = m if "m-not-updated" in made and not first else m_new
    divided = made & {"normalised-early", "not-normalised"} or l == 0
    return m, l, (o if divided else o / l)
