"""A rule with one or two of its pieces replaced: which slips give all of a learner's answers?

A check writes its rule once, as a function of its pieces (what is added up, what it is multiplied by, where a loop
ends), and lists what a learner may have put in the place of each. No slip is told unless the rule with it gives every
answer, and none if several explain them: then the answers do not say which it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

from flashlab.check.failed import CheckFailed

Chosen = Mapping[str, Hashable]


@dataclass(frozen=True)
class Slip:
    """Another choice for one piece of a rule, and the sentence that says so."""

    piece: str
    choice: Hashable
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
                if len({_said(x) for x in found}) > 2:
                    return None
        sentences = list(dict.fromkeys(_said(x) for x in found))
        if sentences:
            return found[0][0].slug or found[0][0].piece, ". Or: ".join(sentences)
    return None


def _said(slips: tuple[Slip, ...]) -> str:
    return "; and ".join(slip.sentence for slip in slips)


@contextlib.contextmanager
def explained(explain: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """Have `explain()` asked for a cause if a comparison inside fails and no cause is known otherwise."""
    __tracebackhide__ = True
    try:
        yield
    except CheckFailed as failed:
        failed.explain = failed.explain or explain
        raise
