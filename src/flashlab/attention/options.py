"""What an attention may be asked for besides q, k and v: causal, a window, a soft-cap; checked, and put one way.

Both masks say the same kind of thing: query i sees the keys from i + first to i + last. Positions are aligned at the
end (bottom-right): the last query stands beside the last key. So a kernel needs two numbers, and no mask in memory.
"""

import math
from typing import NamedTuple, SupportsFloat

import torch

from flashlab.attention.inputs import check_causal, number_of

Window = int | tuple[int | None, int | None] | None
"""None: no window. (left, right): a query sees `left` keys before its own position and `right` after it; None or -1 is
no bound. A number n is (n, n)."""


class Band(NamedTuple):
    """Query i sees the keys i + first ... i + last; None is no bound."""

    first: int | None
    last: int | None


def window_of(window: Window, causal: bool = False) -> tuple[int | None, int | None]:
    """The window as (left, right), each at least 0, or None for no bound; causal makes right 0.

    Raises:
        TypeError: neither a number nor two; a causal that is no bool. ValueError: a negative one other than -1.
    """
    check_causal(causal)
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise TypeError(f"window is {window!r}; it must be (left, right), one number, or None")
        sides = tuple(window)
    else:
        sides = (window, window)
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window is {window!r}; it counts keys: one int, (left, right), or None")
        if side is not None and side < -1:
            raise ValueError(f"window is {window!r}; a side is a number of keys, or None for no bound")
    left, right = (None if side == -1 else side for side in sides)
    return left, 0 if causal else right


def band(seq_q: int, seq_k: int, causal: bool = False, window: Window = None) -> Band:
    """Which keys a query sees, relative to its own number. A bound that hides nothing is none: a kernel without it is
    quicker, and what is left fits 32 bits whatever the window."""
    left, right = window_of(window, causal)
    beside = seq_k - seq_q  # the key beside query 0
    first = None if left is None or beside - left <= 1 - seq_q else beside - left
    last = None if right is None or beside + right >= seq_k - 1 else beside + right
    return Band(first, last)


def visible(
    seq_q: int, seq_k: int, causal: bool = False, window: Window = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """Boolean [seq_q, seq_k], True where query i sees key j."""
    first, last = band(seq_q, seq_k, causal, window)
    distance = torch.arange(seq_k, device=device)[None, :] - torch.arange(seq_q, device=device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if first is not None:
        seen &= distance >= first
    if last is not None:
        seen &= distance <= last
    return seen


def softcap_of(softcap: SupportsFloat | None) -> float | None:
    """The bound on the scores, softcap * tanh(score / softcap), as a float; None and 0 stand for none.

    Raises:
        TypeError: no number. ValueError: negative, NaN, or beyond 2^10: float32 would lose the scores below such a cap;
            a tensor that wants a gradient.
    """
    if softcap is None:
        return None
    value = number_of("softcap", softcap, "None for no cap", "pass softcap.item()")
    if not (value == 0 or 2.0**-10 <= value <= 2.0**10) or math.isnan(value):
        raise ValueError(f"softcap is {value}; it must be positive (2^-10 to 2^10), or None for no cap")
    return value or None
