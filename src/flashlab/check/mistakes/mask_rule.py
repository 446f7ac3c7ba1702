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


_UP_TO, _FROM = "query i counts the keys up to {}", "query i counts the keys from {} on"
FORMS = (
    Form(_UP_TO.format("i{}"), "j <= i + c"),
    Form(_FROM.format("i{}"), "j >= i + c"),
    Form(_UP_TO.format("{} - i"), "j <= c - i"),
    Form(_FROM.format("{} - i"), "j >= c - i"),
    Form("each query counts the keys before key {}, whichever query it is", "(j < c) | (i < 0)"),
    Form("the keys from key {} on are counted by no query", "right & (j < c)"),
    Form("the keys before key {} are counted by no query", "right & (j >= c)"),
    Form("the keys before key {} are counted by every query", "right | (j < c)"),
    Form("the keys from key {} on are counted by every query", "right | (j >= c)"),
    Form("the queries from query {} on count no key", "right & (i < c)"),
    Form("the queries before query {} count no key", "right & (i >= c)"),
    Form(_UP_TO.format("i * seq_k // seq_q{}"), "j <= i * seq_k // seq_q + c"),
    Form("query i counts the keys up to its own i, and every query those before key {}",
         "(j <= i) | (j < c)"),
    *(Form(f"a tile's start has the wrong sign: key j stands in the mask as j % {b} - j // {b} * {b}, up to i{{}}",
           f"j % {b} - j // {b} * {b} <= i + c") for b in _TILES),
    *(Form(f"the mask has no tile's start: key j stands in it as j % {b}, up to i{{}}",
           f"j % {b} <= i + c") for b in _TILES),
    *(Form(f"query i counts the keys before key i // {b} * {b}{{}}", f"j < i // {b} * {b} + c")
      for b in _TILES),
)  # fmt: skip


_BASE = (
    "seq_k - seq_q", "seq_k", "seq_q", "seq_q - seq_k", "max(seq_k - seq_q, 0)", "min(seq_k - seq_q, 0)",
    "abs(seq_k - seq_q)", "2 * (seq_k - seq_q)", "(seq_k - seq_q) % seq_k", "min(seq_q, seq_k)", "max(seq_q, seq_k)",
)  # fmt: skip
# What the open number may be, as Python; short ones first.
LENGTHS = (
    "0", *_BASE, "-1", "1", "-2", "2", *(f"{x} {by}" for by in ("- 1", "+ 1", "- 2", "+ 2") for x in _BASE),
    *map(str, _TILES), *(f"{x} // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "(seq_k - seq_q)")),
    *(f"({x} + {b - 1}) // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "seq_k - seq_q")),
)  # fmt: skip
_COMPILED = {text: compile(text, "<a length>", "eval") for text in LENGTHS}


def rule_of(seen: Sequence[Seen]) -> str | None:
    """Words for the rule by which queries count keys in all of these shapes, or None where none of those known fits.

    Args:
        seen: of several shapes, in some of which counted is not what should be visible.
    """
    wrong = [x for x in seen if not torch.equal(x.counted, x.visible)]
    if len(seen) < _FEWEST or not wrong:
        return None
    for form in FORMS:
        if (fits := _fitting(form, seen)) is None:
            continue
        sizes = [dict(zip(("seq_q", "seq_k"), x.counted.shape, strict=True)) for x in seen]
        for text, length in _COMPILED.items():
            if all(eval(length, size) in fit for size, fit in zip(sizes, fits, strict=True)):
                return f"in each of {len(seen)} shapes {form.words.format(_behind(form, text))}"
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
        names = {"i": torch.arange(m)[:, None], "j": torch.arange(n)[None], "right": visible, "c": c}
        same = (eval(form.mask, names | {"seq_q": m, "seq_k": n}) == counted).flatten(1).all(1).nonzero().flatten()
        if not len(same):
            return None
        fits.append(range(int(same[0]) - reach, int(same[-1]) - reach + 1))
    return fits
