"""The steps of the online softmax of one row, each of which can be another one: what a wrong recurrence computes.

Where `row.py` has the mistakes with a name of their own, here is each factor and each exponent that a learner may have
written instead, by the formula that it is. Plain Python floats: a search tries hundreds of them.
"""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flashlab.check.slips import Chosen, Slip

INF = math.inf


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else INF


def _exp2(x: float) -> float:
    return 2.0**x if x < 1023 else INF


# Of the old maximum m, the new one, and the block's own.
_FACTORS: Mapping[str, Callable[[float, float, float], float]] = {
    "1": lambda m, new, top: 1.0,
    "0": lambda m, new, top: 0.0,
    "exp(m_new - m)": lambda m, new, top: _exp(new - m),
    "exp(top - m_new)": lambda m, new, top: _exp(top - new),
    "exp(m - top)": lambda m, new, top: _exp(m - top),
    "exp(top - m)": lambda m, new, top: _exp(top - m),
    "exp(m_new - top)": lambda m, new, top: _exp(new - top),
    "exp(m)": lambda m, new, top: _exp(m),
    "exp(-m)": lambda m, new, top: _exp(-m),
    "exp(m_new)": lambda m, new, top: _exp(new),
    "exp(-m_new)": lambda m, new, top: _exp(-new),
    "m - m_new, without exp": lambda m, new, top: m - new,
    "m_new - m, without exp": lambda m, new, top: new - m,
    "2^(m - m_new)": lambda m, new, top: _exp2(m - new),
    "exp(m - m_new) twice": lambda m, new, top: _exp(2 * (m - new)),
}
# Of the score x, the old maximum, the new one, the block's own, and the first score of the block.
_TERMS: Mapping[str, Callable[[float, float, float, float], float]] = {
    "0": lambda x, m, new, top: 0.0,
    "1": lambda x, m, new, top: 1.0,
    "x": lambda x, m, new, top: x,
    "x - m_new, without exp": lambda x, m, new, top: x - new,
    "exp(x)": lambda x, m, new, top: _exp(x),
    "exp(x - m), with the old m": lambda x, m, new, top: _exp(x - m) if m > -INF else _exp(x - new),
    "exp(x - top), with the block's own maximum top": lambda x, m, new, top: _exp(x - top),
    "exp(m_new - x)": lambda x, m, new, top: _exp(new - x),
    "2^(x - m_new)": lambda x, m, new, top: _exp2(x - new),
    "exp(x - m_new) times the correction": lambda x, m, new, top: _exp(x - new) * (_exp(m - new) if m > -INF else 1.0),
    "exp(x - m_new) divided by the correction": lambda x, m, new, top: (
        _exp(x - new) * _exp(min(new - m, 708.0)) if m > -INF else _exp(x - new)
    ),
}
_RIGHT_WHILE_M_STAYS = (
    "exp(m_new - m)", "2^(m - m_new)", "exp(m - m_new) twice", "exp(x - m), with the old m",
    "exp(x - m_new) times the correction", "exp(x - m_new) divided by the correction",
)  # fmt: skip
_WHEN = {"": "", "moves": "where the maximum moves, ", "stays": "where the maximum does not move, "}
_KEPT = {"both": "what is kept", "l": "l, as it was,", "o": "o, as it was,"}


def slips(of: Sequence[str] = ("both", "l", "o")) -> list[Slip]:
    """Each other factor and each other term, of l, of o or of both, in all blocks or only where the maximum moves."""
    found = []
    for target in of:
        for when in ("", "moves", "stays"):
            for name in _FACTORS:
                if when and name in ("1", *_RIGHT_WHILE_M_STAYS):
                    continue
                is_ = "should be exp(m - m_new)" + (", which is 1" if when == "stays" else "")
                said = f"{_WHEN[when]}{_KEPT[target]} is multiplied by {name}: it {is_}"
                found.append(Slip(f"{target}-factor", (name, when), said, "wrong-correction"))
            for name in _TERMS:
                if when and name in _RIGHT_WHILE_M_STAYS:
                    continue
                into = {"both": "", "l": " in l", "o": " in o"}[target]
                said = f"{_WHEN[when]}the term of a new score x{into} is {name}: it should be exp(x - m_new)"
                found.append(Slip(f"{target}-term", (name, when), said, "wrong-term"))
    lower = "m becomes the block's own maximum, also where that is lower: it should be the larger of the two"
    found.append(Slip("m", "top", lower, "m-of-this-block-only"))
    found.append(Slip("m", "kept", "m is never set to m_new", "m-not-updated"))
    return found


def row_gives(
    rows: Sequence[tuple[Sequence[float], int]], got: Sequence[Sequence[float]],
    of: Callable[[float, Sequence[float], Sequence[float]], Sequence[float]], tol: float = 1e-7, largest: float = 1e300,
) -> Callable[[Chosen], bool]:  # fmt: skip
    """A `fits` for `slips.explain`: whether the recurrence gives every answer, as far as nothing overflows.

    Args:
        rows: (scores, how many at a time) of each answer. got: the numbers of each.
        of: those numbers from m, the weights in l and the weights in o.
        tol: relative to the largest number of an answer. largest: what is beyond it has overflowed.
    """

    def fits(chosen: Chosen) -> bool:
        return any(_gives(chosen, later) for later in (False, True))

    def _gives(chosen: Chosen, later: bool) -> bool:
        compared = 0
        for (x, n), mine in zip(rows, got, strict=True):
            try:
                told = of(*weights(x, n, chosen, later))
            except (OverflowError, ValueError, ZeroDivisionError):
                continue
            if len(told) != len(mine):
                return False
            for a, b in zip(mine, told, strict=True):
                if abs(a) < largest and abs(b) < largest:  # neither NaN nor infinite
                    compared += 1
                    if abs(a - b) > tol * max(1.0, abs(a), abs(b)):
                        return False
        return 2 * compared >= sum(map(len, got))

    return fits


def usual(slip: Slip) -> bool:
    """Whether a slip is tried together with another one: hundreds are rare enough alone."""
    whole = slip.piece in ("both-factor", "both-term", "m")
    return whole and not (isinstance(slip.choice, tuple) and slip.choice[1])


def weights(x: Sequence[float], n: int, chosen: Chosen, later: bool = False) -> tuple[float, list[float], list[float]]:
    """m, the weight of each score in l, and its weight in the unnormalised o, `n` scores at a time.

    later: the first block stands before the loop, and is right.
    """
    m, of_l, of_o = -INF, [], []

    def pick(piece: str, target: str, moves: bool) -> str | None:
        for of in (target, "both"):
            name, when = chosen.get(f"{of}-{piece}", (None, ""))
            if name is not None and when in ("", "moves" if moves else "stays"):
                return name
        return None

    for start in range(0, len(x), n):
        block = x[start : start + n]
        top = max(block)
        new = max(m, top)
        if new == -INF:
            of_l += [0.0] * len(block)
            of_o += [0.0] * len(block)
            continue
        first, moves = m == -INF, new > m
        for target, kept in (("l", of_l), ("o", of_o)):
            name = pick("factor", target, moves)
            factor = 0.0 if first else _FACTORS[name](m, new, top) if name else _exp(m - new)
            kept[:] = [w * factor if w else 0.0 for w in kept]
            name = None if first and later else pick("term", target, moves)
            term = _TERMS[name] if name else None
            kept += [0.0 if a == -INF else term(a, m, new, top) if term else _exp(a - new) for a in block]
        m = top if chosen.get("m") == "top" else m if chosen.get("m") == "kept" and not first else new
    return m, of_l, of_o


# ---- a reference that may be stale -----------------------------------------------------------------------------------

_LAZY: Mapping[str, Mapping[str, Callable[..., float]]] = {
    "correction": {  # of the reference m, the one it moves to, the block's maximum and the threshold
        "exp(-threshold)": lambda m, new, top, t: _exp(-t),
        "exp(threshold)": lambda m, new, top, t: _exp(t),
        "exp(m - top + threshold)": lambda m, new, top, t: _exp(m - new + t),
        "exp(m - top - threshold)": lambda m, new, top, t: _exp(m - new - t),
        "exp(-top)": lambda m, new, top, t: _exp(-top),
        "exp(-m)": lambda m, new, top, t: _exp(-m),
        "exp(m)": lambda m, new, top, t: _exp(m),
        "exp(top - m)": lambda m, new, top, t: _exp(new - m),
        "1": lambda m, new, top, t: 1.0,
        "0": lambda m, new, top, t: 0.0,
        "2^(m - top)": lambda m, new, top, t: _exp2(m - new),
        "m - top, without exp": lambda m, new, top, t: m - new,
    },
    "term": {  # of the score, the reference after and before it moved, the block's maximum, the largest score so far
        "exp(x - top), with the block's own maximum": lambda x, m, old, top, seen: _exp(x - top),
        "exp(x - max), with the largest score so far": lambda x, m, old, top, seen: _exp(x - seen),
        "exp(x - m), with the m before it moved": lambda x, m, old, top, seen: _exp(x - old),
        "exp(x - m), with the larger of the block's maximum and the reference": lambda x, m, old, top, seen: _exp(
            x - max(top, m)
        ),
        "exp(x)": lambda x, m, old, top, seen: _exp(x),
        "2^(x - m)": lambda x, m, old, top, seen: _exp2(x - m),
    },
    "moved to": {
        "top - threshold": lambda m, top, t, seen: top - t,
        "top + threshold": lambda m, top, t, seen: top + t,
        "m + threshold": lambda m, top, t, seen: m + t,
        "the mean of m and top": lambda m, top, t, seen: (m + top) / 2,
    },
    "rule": {  # whether the reference moves
        "top >= m + threshold": lambda m, top, t, seen, before: top >= m + t,
        "top > m": lambda m, top, t, seen, before: top > m,
        "top > threshold": lambda m, top, t, seen, before: top > t,
        "top > m - threshold": lambda m, top, t, seen, before: top > m - t,
        "top > m + threshold / ln 2": lambda m, top, t, seen, before: top > m + t / math.log(2),
        "top > m + threshold * ln 2": lambda m, top, t, seen, before: top > m + t * math.log(2),
        "|top - m| > threshold": lambda m, top, t, seen, before: abs(top - m) > t,
        "top - (the last block's maximum) > threshold": lambda m, top, t, seen, before: top - before > t,
        "top - (the largest score so far) > threshold": lambda m, top, t, seen, before: top - seen > t,
        "|top| > |m| + threshold": lambda m, top, t, seen, before: abs(top) > abs(m) + t,
        "top > m + threshold / 2": lambda m, top, t, seen, before: top > m + t / 2,
        "top > m + 2 threshold": lambda m, top, t, seen, before: top > m + 2 * t,
        "m > top + threshold": lambda m, top, t, seen, before: m > top + t,
    },
    "lse": {
        "max + ln(l), with the largest score": lambda m, l, seen, last: seen + math.log(l),
        "the last block's maximum + ln(l)": lambda m, l, seen, last: last + math.log(l),
        "ln(l)": lambda m, l, seen, last: math.log(l),
        "m + l": lambda m, l, seen, last: m + l,
        "m + log2(l)": lambda m, l, seen, last: m + math.log2(l),
        "m - ln(l)": lambda m, l, seen, last: m - math.log(l),
        "m": lambda m, l, seen, last: m,
    },
}
_LAZY_RIGHT = {
    "correction": ("what is kept is multiplied by {0}", "it should be exp(m - top), old reference minus new"),
    "l-correction": ("l is multiplied by {0}", "it should be exp(m - top), old reference minus new"),
    "o-correction": ("o is multiplied by {0}", "it should be exp(m - top), old reference minus new"),
    "term": ("the new terms are {0}", "they should be exp(x - m), with the reference m as it is now"),
    "l-term": ("the new terms of l are {0}", "they should be exp(x - m), with the reference m as it is now"),
    "o-term": ("the new terms of o are {0}", "they should be exp(x - m), with the reference m as it is now"),
    "moved to": ("the reference moves to {0}", "it should move to the block's maximum, top"),
    "rule": ("the reference moves where {0}", "it should move where top > m + threshold"),
    "lse": ("lse is {0}", "it should be m + ln(l), with the reference m"),
}


def lazy_slips() -> list[Slip]:
    """The slips of attention with a reference m that moves only where a block's maximum, top, is far above it."""
    found = []
    for piece, (is_, should) in _LAZY_RIGHT.items():
        for name in _LAZY[piece.split("-")[-1]]:
            found.append(Slip(piece, name, f"{is_.format(name)}: {should}", f"wrong-{piece.replace(' ', '-')}"))
    first = "the first block sets the reference; no correction to count yet"
    found.append(Slip("first", "counted", f"a correction too many is counted: {first}", "start-counted"))
    found.append(Slip("first", "zero", "the reference starts at 0: it should start at -inf", "starts-at-zero"))
    found.append(Slip("count", "every new maximum", "every new maximum is counted: only a move of the reference is a "
                      "correction", "wrong-count"))  # fmt: skip
    found.append(Slip("count", "every block", "every block is counted: only a move of the reference is a correction",
                      "wrong-count"))  # fmt: skip
    return found


def lazily(
    x: Sequence[float], v: Sequence[Sequence[float]], n: int, threshold: float, chosen: Chosen
) -> tuple[list[float], float, int]:
    """o, lse and the number of corrections of a row, `n` scores at a time; lse is -inf in a row without a score."""

    def pick(piece: str) -> Callable[..., float] | None:
        for name in (piece, piece.split("-")[-1]):
            if name in chosen:
                return _LAZY[piece.split("-")[-1]][str(chosen[name])]
        return None

    first = chosen.get("first")
    m, l, seen, last, corrections = 0.0 if first == "zero" else -INF, 0.0, -INF, -INF, 0
    o = [0.0] * len(v[0])
    for start in range(0, len(x), n):
        block = x[start : start + n]
        top = max(block)
        if top == -INF:
            continue
        old = m
        rule = pick("rule")
        moves = rule(m, top, threshold, seen, last) if rule and m > -INF else top > m + threshold
        if chosen.get("count") == "every block" or (chosen.get("count") == "every new maximum" and top > seen > -INF):
            corrections += 1
        if m == -INF:
            m = old = top
            corrections += first == "counted"
        elif moves:
            to = pick("moved to")
            new = to(m, top, threshold, seen) if to else top
            by = [
                f(m, new, top, threshold) if f else _exp(m - new) for f in (pick("l-correction"), pick("o-correction"))
            ]
            l, o, m = l * by[0], [a * by[1] for a in o], new
            corrections += "count" not in chosen
        seen, last = max(seen, top), top
        of_l, of_o = (
            [0.0 if a == -INF else f(a, m, old, top, seen) if f else _exp(a - m) for a in block]
            for f in (pick("l-term"), pick("o-term"))
        )
        l += sum(of_l)
        o = [a + sum(w * row[i] for w, row in zip(of_o, v[start : start + n], strict=True)) for i, a in enumerate(o)]
    if seen == -INF:
        return o, -INF, corrections
    if l <= 0:
        return [INF for _ in o], INF, corrections
    lse = pick("lse")
    return [a / l for a in o], lse(m, l, seen, last) if lse else m + math.log(l), corrections
