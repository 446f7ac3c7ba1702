"""One table of colours: an implementation of attention looks the same in every figure of the course.

look("cuDNN").color       # the name of a colour of show.COLORS
looks(["triton", "x"])    # of several lines of one figure; names that the table has not get what is left
"""

from collections.abc import Sequence
from typing import NamedTuple


class Look(NamedTuple):
    """color: a name of show.COLORS; marker: of matplotlib, so that colour is not all there is to tell lines apart."""

    color: str
    marker: str


LOOKS: dict[Look, tuple[str, ...]] = {
    Look("blue", "o"): ("triton", "ours", "minimal kernel", "this course"),
    Look("sky", "P"): ("triton, descriptors",),
    Look("purple", "s"): ("gluon", "specialised"),
    Look("orange", "^"): ("FlashAttention-2", "FlashAttention-2 (torch)", "fa2"),
    Look("green", "D"): ("cuDNN", "cudnn"),
    Look("red", "v"): ("FlexAttention",),
    Look("grey", "x"): ("eager", "unfused", "unfused PyTorch", "unfused torch", "torch_naive_f32"),
    Look("yellow", "<"): ("compiled eager",),
    Look("black", "*"): ("memory-efficient attention", "sdpa_efficient_f32"),
}
"""Each look with the names that have it: of one implementation, as records and pages call it."""

_BY_NAME = {name: one for one, names in LOOKS.items() for name in names}
_OTHERS = [_BY_NAME[n] for n in ("triton", "fa2", "cuDNN", "gluon", "eager", "FlexAttention", "triton, descriptors")]


def look(name: str) -> Look:
    """The look of an implementation. Raises KeyError with a sentence."""
    if name not in _BY_NAME:
        raise KeyError(
            f"no implementation is called {name!r}: flashlab.figures.implementations.LOOKS has {[*_BY_NAME]}"
        )
    return _BY_NAME[name]


def looks(names: Sequence[str]) -> dict[str, Look]:
    """The looks of the lines of one figure, by name: those of the table, and for the others what those leave over."""
    known = {name: _BY_NAME[name] for name in names if name in _BY_NAME}
    left = [one for one in _OTHERS if one not in known.values()]
    others = dict.fromkeys(name for name in names if name not in known)
    return known | {name: left[i % len(left)] for i, name in enumerate(others)}
