"""A rule with one or two of its pieces replaced: which slips give all of a learner's answers?

A check writes its rule once, as a function of its pieces (what is added up, what it is multiplied by, where a loop
ends), and lists what a learner may have put in the place of each. No slip is told unless the rule with it gives every
answer, and none if several explain them: then the answers do not say which it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashlab.check.failed import CheckFailed

Chosen = Mapping[str, Any]


@dataclass(frozen=True)
class Slip:
    """Another choice for one piece of a rule, and the sentence that says so."""

    piece: str
    choice: Any
    sentence: str
    slug: str = ""


def explain(
    fits: Callable[[Chosen], bool], slips: list[Slip], most: int = 2, paired: Callable[[Slip], bool] = lambda slip: True
) -> tuple[str, str] | None:
    """(slug, sentence) of the fewest slips with which the rule gives every answer, or None.

    Args:
        fits: whether the rule with these choices, {piece: choice}, gives all of the learner's answers.
        slips: in the order in which they are tried; two of one piece are never tried together.
        most: how many slips at once.
        paired: which of them are tried together with another one; what is rare alone need not be.
    """
    for count in range(1, most + 1):
        pool = slips if count == 1 else [slip for slip in slips if paired(slip)]
        found = []
        for several in itertools.combinations(pool, count):
            if len({slip.piece for slip in several}) == count and fits({slip.piece: slip.choice for slip in several}):
                found.append(several)
        sentences = list(dict.fromkeys(_said(x) for x in found))
        if len(sentences) > 2:  # of one piece: several ways to write what it does
            if len({tuple(slip.piece for slip in several) for several in found}) > 1:
                return None
            sentences = sentences[:1]
        if sentences:
            return found[0][0].slug or found[0][0].piece, ". Or: ".join(sentences)
    return None


def _said(slips: tuple[Slip, ...]) -> str:
    """Two slips may give what a third one gives that nobody thought of: it is said that they would."""
    return ("two slips at once would give this: " if len(slips) > 1 else "") + "; and ".join(x.sentence for x in slips)


def right_where(
    conditions: Mapping[str, Callable[..., bool]],
    inputs: Sequence[tuple[Any, ...]],
    is_right: Callable[..., bool],
    what: str,
) -> tuple[str, str] | None:
    """(slug, sentence) of the condition on the inputs that tells the right answers from the wrong ones, or None.

    Args:
        conditions: {words: whether it holds for an input}; the words go on after "right where".
        inputs: tried one by one. is_right: whether the answer is right for one; what raises is wrong.
        what: what is right there, as the sentence calls it.
    """

    def verdict(one: tuple[Any, ...]) -> bool:
        try:
            return bool(is_right(*one))
        except Exception:
            return False

    verdicts = [verdict(one) for one in inputs]
    if all(verdicts) or not any(verdicts):
        return None
    best: tuple[float, str] | None = None
    for words, holds in conditions.items():
        held = [bool(holds(*one)) for one in inputs]
        inside = [right for right, x in zip(verdicts, held, strict=True) if x]
        outside = [right for right, x in zip(verdicts, held, strict=True) if not x]
        if not outside or len(inside) < 2 or not all(inside) or sum(outside) > 0.4 * len(outside):
            continue
        score = sum(outside) / len(outside)
        if best is None or score < best[0] - 1e-9:
            wrong = len(outside) - sum(outside)
            count = (
                "in every other case tried" if wrong == len(outside) else f"in {wrong} of {len(outside)} other cases"
            )
            best = score, f"{what} is right where {words}, and wrong {count}"
    return ("right-where", best[1]) if best else None


@contextlib.contextmanager
def explained(explain: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """Have `explain()` asked for a cause if a comparison inside fails and no cause is known otherwise."""
    __tracebackhide__ = True
    try:
        yield
    except CheckFailed as failed:
        failed.explain = failed.explain or explain
        raise
