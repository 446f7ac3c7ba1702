"""The gradients of one head of attention in float64, right or with one mistake, as a learner may make it.

A function of tiles is told its mistake by the numbers it gives: on every case they are those of one of these models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from flashlab.attention.reference import Gradients
from flashlab.check import pattern

__all__ = ["BASES", "MISTAKES", "Head", "added_up", "gradients", "statistics"]


class Head(NamedTuple):
    """One head: q and do [M, HEAD_DIM], k and v [N, HEAD_DIM].

    block: how many rows a walk takes at once; first_key: where the block of keys begins whose gradients are asked for.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    scale: float
    block: int
    causal: bool = False
    first_key: int = 0


def _made(mistake: str) -> set[str]:
    return set(mistake.split("+")) - {""}


def _one(values: Mapping[str, float], made: set[str], otherwise: float) -> float:
    """The value of the mistake that is made, or the right one."""
    return next((value for slug, value in values.items() if slug in made), otherwise)


def _hidden(head: Head, mistake: str) -> torch.Tensor:
    """Boolean [M, N]: the keys that a query does not see, aligned at the end."""
    M, N, made = len(head.q), len(head.k), _made(mistake)
    shift = {"causal-aligned-top-left": 0, "causal-shifted-back": M - N, "causal-one-too-many": N - M + 1}
    shift |= {"causal-off-by-one": N - M - 1, "causal-from-the-block": N - M + head.first_key}
    if "causal-mask-missing" in made or (not head.causal and "causal-always" not in made):
        return torch.zeros(M, N, dtype=torch.bool)
    return torch.arange(N)[None, :] > torch.arange(M)[:, None] + _one(shift, made, N - M)


def statistics(head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o [M, HEAD_DIM], lse and delta [M], in float64 on the CPU. lse is -inf in a row that sees no key."""
    q, k, v, do = (x.detach().cpu().double() for x in head[:4])
    s = (head.scale * q @ k.T).masked_fill(_hidden(head, ""), -torch.inf)
    lse = torch.logsumexp(s, 1)
    o = torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0.0)[:, None]) @ v
    return o, lse, (o * do).sum(1)


def gradients(head: Head, mistake: str = "") -> Gradients:
    """dq, dk and dv in float64 on the CPU; mistake: one of `MISTAKES`, two of them as "one+other", or none."""
    made = _made(mistake)
    q, k, v, do = (x.detach().cpu().double() for x in head[:4])
    _, lse, delta = statistics(head)
    lse = lse.masked_fill(torch.isneginf(lse), torch.inf)
    if made & {"statistics-of-the-first-rows", "delta-of-the-first-rows"}:
        first = torch.arange(len(q)) % head.block
        delta = delta[first]
        lse = lse[first] if "statistics-of-the-first-rows" in made else lse
    hidden = _hidden(head, mistake)
    of_scores = {
        "scores-not-scaled": 1.0,
        "scores-scaled-twice": head.scale**2,
        "scores-scaled-by-root": head.scale**0.5,
    }
    s = _one(of_scores, made, head.scale) * q @ k.T
    if "probabilities-not-normalised" in made:
        p = torch.exp(s - s.masked_fill(hidden, -torch.inf).amax(1, keepdim=True))
    elif "softmax-per-tile" in made:
        p = torch.cat([torch.softmax(tile, 1) for tile in s.masked_fill(hidden, -torch.inf).split(head.block, 1)], 1)
    elif "maximum-of-the-tile" in made:
        tiles = s.masked_fill(hidden, -torch.inf).split(head.block, 1)
        p = torch.cat([torch.exp(tile - tile.amax(1, keepdim=True)) for tile in tiles], 1)
    elif "lse-ignored" in made:
        p = torch.exp(s)
    else:
        in_base_2 = 1 / math.log(2)
        times = {
            "lse-in-base-2": in_base_2,
            "scores-in-base-2": 1.0,
            "lse-in-base-10": 1 / math.log(10),
            "lse-added": -1.0,
            "lse-scaled": head.scale,
        }
        s = s * in_base_2 if "scores-in-base-2" in made else s
        exponential = torch.exp2 if made & {"exp2-for-exp", "scores-in-base-2"} else torch.exp
        of_s, of_lse = next((x[:2] for slug, x in BASES.items() if slug in made), (1.0, _one(times, made, 1.0)))
        p = exponential(of_s * s - of_lse * lse[:, None])
    p = p.masked_fill(hidden | torch.isinf(lse)[:, None], 0.0)
    p = p * p if "p-twice" in made else p
    dp = (head.scale if "dp-scaled" in made else 1.0) * do @ (k if "k-for-v" in made else v).T
    weight = torch.ones_like(p) if "p-missing" in made else p
    shift = _one({"delta-missing": 0.0, "delta-added": -1.0, "delta-scaled": head.scale}, made, 1.0)
    rows_of_delta = delta[:, None]
    if "delta-of-the-tile" in made:
        sums = [x.sum(1, keepdim=True).expand(x.shape) for x in (p * dp).split(head.block, 1)]
        rows_of_delta = torch.cat(sums, 1)
    ds = weight * dp - (1.0 if "delta-not-weighted" in made else weight) * shift * rows_of_delta
    factors = {"scale-missing": 1.0, "scale-twice": head.scale**2, "sign-inverted": -head.scale}
    factors |= {"gradient-times-log2e": head.scale / math.log(2), "gradient-times-ln2": head.scale * math.log(2)}
    scale = _one(factors, made, head.scale)
    left = p if "p-for-ds" in made else dp if "dp-for-ds" in made else ds
    keys, queries = _taken(len(k), head.block, mistake), _taken(len(q), head.block, mistake)
    if "scaled-in-every-block" in made:  # `scale`, once, is in the factor already
        keys, queries = (x * head.scale ** _later_blocks(len(x), head.block) for x in (keys, queries))
    dq = scale * (left * keys) @ (v if "v-for-k" in made else k)
    dk = scale * (left * queries[:, None]).T @ (do if "do-for-q" in made else q)
    of_v = head.scale if "dv-scaled" in made else 1.0
    dv = of_v * ((ds if "ds-for-p" in made else p) * queries[:, None]).T @ (q if "q-for-do" in made else do)
    return Gradients(dq, dk, dv)


def _taken(length: int, block: int, mistake: str) -> torch.Tensor:
    """1.0 for the rows of a walk that count, else 0.0."""
    made = _made(mistake)
    rows = torch.arange(length)
    taken = rows >= 0
    if "first-block-only" in made:
        taken &= rows < block
    elif "overwritten" in made:
        taken &= rows >= (length - 1) // block * block
    elif "tail-dropped" in made:
        taken &= rows < length // block * block
    elif "last-block-dropped" in made:
        taken &= rows < (length - 1) // block * block
    return taken.double()


def _later_blocks(length: int, block: int) -> torch.Tensor:
    """How many blocks of a walk come after that of each row."""
    return (length - 1) // block - torch.arange(length) // block


_LN_2 = math.log(2)
# P = e^(a * score - b * lse) as it is where a base, or a factor of one, is another's: a, b, and what has been done.
BASES = {
    "log2e-under-e": (
        1 / _LN_2, 1 / _LN_2, "scores and lse are multiplied by log2(e), but P is e^x: that factor goes with 2^x",
    ),
    "scores-times-log2e": (
        1 / _LN_2, 1.0, "the scores are multiplied by log2(e), but P is e^(score - lse), and lse is natural",
    ),
    "ln2-for-log2e": (
        _LN_2**2, _LN_2**2, "scores and lse are multiplied by ln 2 under 2^x: it is log2(e) = 1 / ln 2",
    ),
    "lse-times-ln2": (
        1.0, _LN_2**2, "lse is multiplied by ln 2 under 2^x: it is log2(e) = 1 / ln 2",
    ),
    "scores-times-ln2": (
        _LN_2**2, 1.0, "the scores are multiplied by ln 2 under 2^x: it is log2(e) = 1 / ln 2",
    ),
    "lse-alone-in-base-2": (_LN_2, 1.0, "P is 2^x, with lse times log2(e), and the scores are not: both, or neither"),
}  # fmt: skip
_OF_P_ALONE = "has the factor {}: a base belongs to P alone, and the gradient is scale times a sum of dS"
MISTAKES = {
    **{slug: sentence for slug, (_, _, sentence) in BASES.items()},
    "gradient-times-log2e": _OF_P_ALONE.format("log2(e) = 1 / ln 2"),
    "gradient-times-ln2": _OF_P_ALONE.format("ln 2"),
    "delta-missing": "these are the values of dS = P · dP: delta is not subtracted from dP",
    "delta-added": "delta is added to dP; it is subtracted",
    "delta-not-weighted": "delta is subtracted from P · dP; it is subtracted from dP, before P multiplies",
    "p-missing": "dP - delta is not multiplied by P",
    "dp-for-ds": "dP stands where dS belongs: it is P · (dP - delta)",
    "p-for-ds": "P stands where dS belongs",
    "ds-for-p": "dS stands where P belongs: dV is P transposed times dO",
    "v-for-k": "dS is multiplied by V; the scores come from Q and K",
    "do-for-q": "dS is multiplied by dO; the scores come from Q and K",
    "q-for-do": "P is multiplied by Q; the output is P times V, so dV has dO in it",
    "k-for-v": "dP is dO times K transposed; the output is P times V",
    "delta-of-the-tile": "delta is summed over the keys of one tile; it is a sum over all keys, and given",
    "scaled-in-every-block": "the sum is multiplied by scale in every block, so earlier blocks get that factor again",
    "scale-missing": "right but for the factor scale: the scores are scale · Q K^T",
    "scale-twice": "the factor scale is there twice",
    "dv-scaled": "the factor scale is in it; it belongs to the scores alone, and V is not in them",
    "scores-not-scaled": "P is recomputed from Q K^T without the scale",
    "scores-scaled-twice": "P is recomputed from scores that have the factor scale twice",
    "scores-scaled-by-root": "P is recomputed from scores that have the square root of scale as their factor",
    "sign-inverted": "every value has the other sign",
    "probabilities-not-normalised": "P is recomputed with the row's maximum in the place of lse",
    "maximum-of-the-tile": "P is recomputed with the maximum of the tile's scores in the place of lse",
    "softmax-per-tile": "P is a softmax over the keys of one tile; exp(score - lse) knows the whole row",
    "lse-added": "lse is added to the scores; it is subtracted",
    "lse-in-base-2": "lse is multiplied by log2(e), but P is e^(score - lse): both are natural",
    "scores-in-base-2": "P is 2^x with the scores times log2(e), but lse is still a natural logarithm",
    "lse-in-base-10": "lse is divided by log(10), but P is e^(score - lse): both are natural",
    "lse-scaled": "lse is multiplied by scale, as the scores are; lse is the log-sum-exp of scaled scores",
    "dp-scaled": "dP is multiplied by the scale, and delta is not; the scale is a factor of dQ and dK",
    "delta-scaled": "delta is multiplied by the scale, and dP is not; the scale is a factor of dQ and dK",
    "p-twice": "dP - delta, or dO, is multiplied by P twice",
    "lse-ignored": "P is exp(score): lse is not subtracted",
    "exp2-for-exp": "P is 2^(score - lse), and these are natural logarithms: exp, or both times log2(e)",
    "first-block-only": "only the first block of the walk counts",
    "overwritten": "only the last block of the walk counts: is the sum overwritten by each block?",
    "tail-dropped": "the last block is left out where it is not full",
    "last-block-dropped": "the last block of the walk is left out",
    "statistics-of-the-first-rows": "lse and delta are those of the first block's rows in every block",
    "delta-of-the-first-rows": "delta is that of the first block's rows in every block",
    "causal-always": "there is a causal mask where none was asked for",
    "causal-mask-missing": "the causal mask is missing",
    "causal-aligned-top-left": "the causal mask is aligned at the first key; the last query sees the last key",
    "causal-off-by-one": "a query does not see its own position: the mask hides one key too many",
    "causal-one-too-many": "a query sees one key too many: the mask is one off",
    "causal-shifted-back": "the causal mask is shifted in the wrong direction; the last query sees the last key",
    "causal-from-the-block": "the causal mask counts the keys from the first of their block, not from key 0",
}


# ---- which rows a gradient adds up -----------------------------------------------------------------------------------


def added_up(run: Callable[[Head], Mapping[str, torch.Tensor]], head: Head, name: str) -> str | None:
    """Which queries dv of a key adds up, or which keys dq of a query, where others than it should: words, or None.

    One row at a time of what is summed gets a 1 in a column of its own, so that each shows how often it is counted.

    Args:
        run: the gradients of a head, by name; those of keys may begin at `head.first_key`.
        name: "dv" or "dq".
    """
    rows, columns = (len(head.q), head.q.shape[1]) if name == "dv" else (len(head.k), head.q.shape[1])
    q, k, v = (x.detach().cpu().double() for x in head[:3])
    shown, clear, seen = [], [], ~_hidden(head, "")
    for first in range(0, rows, columns):
        ones = torch.zeros_like(head.do if name == "dv" else head.k)
        mine = torch.arange(first, min(first + columns, rows))
        ones[mine, mine - first] = 1
        told = head._replace(do=ones) if name == "dv" else head._replace(k=ones)
        got = run(told)[name].detach().cpu().double()
        _, lse, delta = statistics(told)
        lse = lse.masked_fill(torch.isneginf(lse), torch.inf)
        p = torch.exp(told.scale * q @ told.k.detach().cpu().double().T - lse[:, None])
        if name == "dv":
            weight = p.T[head.first_key : head.first_key + len(got)][:, mine]  # [keys, queries]
        else:
            ds = p * (told.do.detach().cpu().double() @ v.T - delta[:, None])
            weight = told.scale * ds[: len(got)][:, mine]  # [queries, keys]
        part = got[:, : len(mine)] / weight
        little = (weight.abs() < 0.01) & (got[:, : len(mine)].abs() < 0.02)  # too little to tell
        right = seen.T[head.first_key : head.first_key + len(got)] if name == "dv" else seen[: len(got)]
        clear.append(~little)
        shown.append(torch.where(little, right[:, mine].double(), part))
    times, should = torch.cat(shown, 1), right
    whole = times.round()
    if not times.isfinite().all() or ((times - whole).abs() > 0.1)[should | (whole != 0)].any():
        return None
    wrong = ((whole != should) & (should | (whole != 0))).any(1)
    if not wrong.any():
        return None
    certain = torch.cat(clear, 1)
    row = int((wrong * certain.sum(1)).argmax())
    beside = certain[row].nonzero().flatten()  # what cannot be told of a row is said to be as the nearest that can
    whole[row] = whole[row, beside[(torch.arange(rows)[:, None] - beside).abs().argmin(1)]]
    of, what = ("key", "query") if name == "dv" else ("query", "key")
    has, wanted = (pattern.runs(x[row], "row") if x[row].any() else "no row" for x in (whole != 0, should))
    twice = (whole[row] > 1).nonzero().flatten().tolist()
    again = f" ({what} {twice[0]} {int(whole[row, twice[0]])} times)" if twice else ""
    summed = "dO" if name == "dv" else "K"
    number = row + (head.first_key if name == "dv" else 0)
    return f"{name} of {of} {number} adds up {has} of {summed}{again}, and should add up {wanted}"
