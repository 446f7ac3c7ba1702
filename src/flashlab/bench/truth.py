"""Whether what a kernel gives is right: compared with float64, by the checker's rule (flashlab.check.tolerance).

error, rms: of o, the largest and the root of the mean square. of_bound, lse_of_bound: the largest error as a part of
what is allowed, so that right is at most RULE; None where something is NaN.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from flashlab.bench.harness import Row, draw
from flashlab.check.poison import MarkedEmpty
from flashlab.check.tolerance import Truth, bounded, excess

RULE = 1.0
WHOLE, SPAN = 1024, 64
"""Up to so many queries all rows are compared; of more, three spans of so many: the first, the last, and amid."""


def right(row: Row) -> bool:
    """Whether a row's result is within the rule, o and, where there is one, lse."""
    return all(row[name] is not None and row[name] <= RULE for name in ("of_bound", "lse_of_bound") if name in row)


class Piece(NamedTuple):
    """Some rows of some heads, and what they should be."""

    batches: slice
    heads: slice
    rows: slice
    truth: Truth


def pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, whole: int | None = None) -> list[Piece]:
    """The first key head of the first batch and the last of the last, with the query heads that share them. Of more
    rows than `whole` (WHOLE if None) a sample.

    Causal queries up to a row see no key behind it: the rest of K is cut off, and the rule is that of a smaller case.
    """
    batch, heads, rows = q.shape[:3]
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    middle = rows // 2 - SPAN // 3  # across the border of two tiles
    spans = [(0, rows)] if rows <= (whole or WHOLE) else [(0, SPAN), (middle, middle + SPAN), (rows - SPAN, rows)]
    found = []
    for b, h in sorted({(0, 0), (batch - 1, kv_heads - 1)}):
        mine = slice(h * group, (h + 1) * group)
        for first, last in spans:
            end = max(0, last + keys - rows) if causal else keys
            some = (q[b : b + 1, mine, first:last], k[b : b + 1, h : h + 1, :end], v[b : b + 1, h : h + 1, :end])
            found.append(Piece(slice(b, b + 1), mine, slice(first, last), bounded(*some, causal=causal)))
    return found


def judged(out: Any, wanted: Sequence[Piece]) -> Row:
    """How far o, or (o, lse), is from what is wanted."""
    o, lse = out if isinstance(out, tuple) else (out, None)
    found: Row = {"error": 0.0, "of_bound": 0.0} | ({} if lse is None else {"lse_of_bound": 0.0})

    def note(name: str, x: torch.Tensor) -> None:
        worst = x.max().item() if x.numel() else 0.0
        found[name] = None if found[name] is None or not math.isfinite(worst) else max(found[name], worst)

    squares, count = 0.0, 0
    for p in wanted:
        part = o[p.batches, p.heads, p.rows].double()
        off = part - p.truth.o
        squares, count = squares + off.square().sum().item(), count + off.numel()
        note("error", off.abs())
        note("of_bound", excess(part, p.truth.o, p.truth.o_bound))
        if lse is not None:
            part = lse[p.batches, p.heads, p.rows].double()
            note("lse_of_bound", excess(part, p.truth.lse, p.truth.lse_bound))
    return found | {"rms": math.sqrt(squares / max(1, count)) if math.isfinite(squares) else None}


Case = tuple[int, int, int, int, int]  # batch, heads, key heads, queries, keys


def compared(
    forward: Callable[..., Any], cases: Iterable[Case], head_dim: int, dtype: torch.dtype, causal: bool
) -> Row:
    """cases: how many. wrong: which are not within the rule. of_bound, lse_of_bound: the worst."""
    worst: Row = {"of_bound": 0.0, "lse_of_bound": 0.0}
    wrong, number = [], 0
    for number, (batch, heads, kv_heads, rows, keys) in enumerate(cases, 1):
        shapes = [(batch, heads, rows, head_dim), *[(batch, kv_heads, keys, head_dim)] * 2]
        if by_token := number % 2 == 0:
            shapes = [(b, n, h, d) for b, h, n, d in shapes]
        drawn = draw(*shapes, dtype=dtype, seed=batch + heads + rows + head_dim)
        q, k, v = (x.transpose(1, 2) if by_token else x for x in drawn)
        v = v + 0.5  # an output near zero hides much
        with MarkedEmpty():
            out = forward(q, k, v, causal=causal)
        every = slice(None)
        small = batch * heads * rows * keys <= 2**26
        wanted = [Piece(every, every, every, bounded(q, k, v, causal=causal))] if small else pieces(q, k, v, causal)
        found = judged(out, wanted)
        if not right(found):
            wrong.append(f"batch {batch}, heads {heads} of {kv_heads}, {rows} queries, {keys} keys")
        for name in worst:
            a, b = worst[name], found[name]
            worst[name] = None if a is None or b is None else max(a, b)
    return {"cases": number, "wrong": wrong} | worst
