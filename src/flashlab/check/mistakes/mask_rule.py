"""The rule behind a wrong mask, found in which keys each query counts, whatever the code looks like.

A form leaves one number open, such as "query i counts the keys up to i + c". Which c fit is read off in each shape; the
rule is the first short expression in the lengths that fits in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor
_TILES = (8, 16, 32, 64, 128)
_FEWEST = 4  # shapes in which a rule is to fit


class Seen(NamedTuple):
    """Which keys each query counts, and should count: [seq_q, seq_k], bool."""

    counted: Tensor
    visible: Tensor


class Form(NamedTuple):
    """A way to be wrong. mask: Python for which keys count, of queries i [M, 1], keys j [1, N], `right` and c."""

    words: str
    mask: str
    right: str = "query i counts those up to i + seq_k - seq_q"
    B: int = 0  # queries of a block, keys of a tile
    T: int = 0


_UP_TO, _FROM = "query i counts the keys up to {}", "query i counts the keys from {} on"
_EDGES = (
    Form(_UP_TO.format("i{}"), "j <= i + c"),
    Form(_FROM.format("i{}"), "j >= i + c"),
)  # fmt: skip
_PLAIN = (
    *_EDGES,
    Form(_UP_TO.format("{} - i"), "j <= c - i"),
    Form(_FROM.format("{} - i"), "j >= c - i"),
    Form("each query counts the keys before key {}, whichever query it is", "(j < c) | (i < 0)"),
    Form("the keys from key {} on are counted by no query", "right & (j < c)"),
    Form("the keys before key {} are counted by no query", "right & (j >= c)"),
    Form("the keys before key {} are counted by every query", "right | (j < c)"),
    Form("the keys from key {} on are counted by every query", "right | (j >= c)"),
    Form(_UP_TO.format("i * seq_k // seq_q{}"), "j <= i * seq_k // seq_q + c"),
    Form("query i counts the keys up to its own i, and every query those before key {}", "(j <= i) | (j < c)"),
)
# In masks of blocks of B queries and tiles of T keys: the query behind a block, the key behind a tile; where the walk
# of a block should end; tiles that need no mask.
_NAMES = {
    "LAST": "((i // B + 1) * B).clamp(max=seq_q)",
    "STOP": "((j // T + 1) * T).clamp(max=seq_k)",
    "END": "(LAST + seq_k - seq_q + T - 1) // T * T",
    "FULL": "STOP <= i // B * B + 1 + seq_k - seq_q",
}
_TILED = (
    *(Form(edge.words, f"({edge.mask}) & (j < END)") for edge in _EDGES),
    *(Form(f"where a tile is masked, {edge.words}", f"(({edge.mask}) | FULL) & (j < END)") for edge in _EDGES),
    *(Form(f"a block of {{B}} queries walks over the keys before m_end{{}}, rounded {way} to tiles of {{T}}, where "
           "m_end is its last query + 1", f"right & (j < (LAST + c{more}) // T * T)",
           "before m_end + seq_k - seq_q, rounded up") for way, more in (("up", " + T - 1"), ("down", ""))),
    Form("a tile of {T} keys is left unmasked where the last query of {B} sees all of it{}, and not the first",
         "(right | (STOP <= LAST + seq_k - seq_q)) & (j < END) & (c == 0)"),
    Form("a tile's start has the wrong sign: key j stands in the mask as j % {T} - j // {T} * {T}, up to i{}",
         "j % T - j // T * T <= i + c"),
    Form("the mask has no tile's start: key j stands in it as j % {T}, up to i{}", "j % T <= i + c"),
    Form("the mask has no tile's start: key j stands in it as j % {T}, query i as i % {B}, up to that{}",
         "((j % T <= i % B + c) | FULL) & (j < END)"),
    Form("query i counts the keys before key i // {B} * {B}{}", "j < i // B * B + c"),
)  # fmt: skip


_FIRST = ("0", "seq_k - seq_q", "seq_k", "seq_q", "seq_q - seq_k", "seq_k - seq_q - 1", "seq_k - seq_q + 1", "-1", "1")
_BASE = (
    *_FIRST[1:5], "max(seq_k - seq_q, 0)", "min(seq_k - seq_q, 0)", "abs(seq_k - seq_q)", "2 * (seq_k - seq_q)",
    "(seq_k - seq_q) % seq_k", "min(seq_q, seq_k)", "max(seq_q, seq_k)",
)  # fmt: skip
# What the open number may be, as Python; short ones first.
_LATER = (
    *_BASE[4:], "-2", "2", *(f"{x} {by}" for by in ("- 1", "+ 1", "- 2", "+ 2") for x in _BASE),
    *map(str, _TILES), *(f"{x} // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "(seq_k - seq_q)")),
    *(f"({x} + {b - 1}) // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "seq_k - seq_q")),
)  # fmt: skip


FORMS = (
    *_PLAIN,
    *(form._replace(words=form.words.replace("{B}", str(b)).replace("{T}", str(t)), B=b, T=t)
      for form in _TILED for b in _TILES[1:] for t in _TILES[1:]),
    Form("the queries from query {} on count no key", "right & (i < c)"),
    Form("the queries before query {} count no key", "right & (i >= c)"),
)  # fmt: skip
_ALL = "each query counts all keys"


def rule_of(seen: Sequence[Seen], causal: bool = True) -> str | None:
    """Words for the rule by which queries count keys in all of these shapes, or None where none of those known fits.

    Args:
        seen: of several shapes, in some of which counted is not what should be visible.
        causal: what should be visible is so.
    """
    wrong = [x for x in seen if not torch.equal(x.counted, x.visible)]
    if len(seen) < _FEWEST or not wrong:
        return None
    sizes = [dict(zip(("seq_q", "seq_k"), x.counted.shape, strict=True)) for x in seen]
    most = max(size["seq_q"] for size in sizes)  # of one block alone nothing is seen
    fitting = [(form, fits) for form in FORMS if form.B < most and (fits := _fitting(form, seen))]
    for lengths in (_FIRST, _LATER):  # a simple one in any form before a longer one
        for form, fits in fitting:
            for text in lengths:
                if all(eval(text, size) in fit for size, fit in zip(sizes, fits, strict=True)):
                    rule = form.words.format(_behind(form, text))
                    return f"in each of {len(seen)} shapes {rule}; right: {form.right if causal else _ALL}"
    return None


def _behind(form: Form, text: str) -> str:
    if "key {}" in form.words or "query {}" in form.words or "{} - i" in form.words:
        return text
    return "" if text == "0" else f" + {text}".replace("+ -", "- ")


def _fitting(form: Form, seen: Sequence[Seen]) -> list[range] | None:
    """For each shape the numbers with which the form gives what is counted; ends that cannot be told are open."""
    fits = []
    for counted, visible in seen:
        m, n = counted.shape
        reach = 2 * (m + n) + 3
        c = torch.arange(-reach, reach + 1)[:, None, None]
        names = {
            "i": torch.arange(m)[:, None],
            "j": torch.arange(n)[None],
            "right": visible,
            "c": c,
            "seq_q": m,
            "seq_k": n,
        }
        if form.B:
            names |= {"B": form.B, "T": form.T}
            for name, text in _NAMES.items():
                names[name] = eval(text, names)
        same = (eval(form.mask, names) == counted).flatten(1).all(1).nonzero().flatten()
        if not len(same):
            return None
        fits.append(range(int(same[0]) - reach, int(same[-1]) - reach + 1))
    return fits
