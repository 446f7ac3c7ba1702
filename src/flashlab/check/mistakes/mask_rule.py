"""The rule behind a wrong mask, found in which keys each query counts, whatever the code looks like.

A form leaves one number open, such as "query i counts the keys up to i + c". Which c fit is read off in each shape; the
rule is the first short expression in the lengths that fits in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor
_TILES = (8, 16, 32, 64, 128)
_SIDES = (64, 32, 128, 16)  # of a tile, the likelier first
_FEWEST = 4  # shapes in which a rule is to fit


class Seen(NamedTuple):
    """Which keys each query counts, and should count: [seq_q, seq_k], bool; numbers that the mask depends on."""

    counted: Tensor
    visible: Tensor
    numbers: Mapping[str, int] = {}


class Form(NamedTuple):
    """A way to be wrong. mask: Python for which keys count, of queries i [M, 1], keys j [1, N], `right` and c."""

    words: str
    mask: str
    right: str = ""  # where it is not the mask's own
    B: int = 0  # queries of a block, keys of a tile; -1: as each shape's numbers say
    T: int = 0


class Mask(NamedTuple):
    """What should be counted, in words; before which key a block's walk ends, too; forms and numbers of its own."""

    words: str
    end: str = "LAST + seq_k - seq_q"
    end_words: str = "m_end + seq_k - seq_q"
    forms: tuple[Form, ...] = ()
    numbers: tuple[str, ...] = ()


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
    Form("where seq_q = seq_k query i counts the keys up to i{}, elsewhere all", "(j <= i + c) | (seq_q != seq_k)"),
    Form("query i counts the keys up to its own i, and every query those before key {}", "(j <= i) | (j < c)"),
)
# In masks of blocks of B queries and tiles of T keys: the first query of a block and the one behind it, the key behind
# a tile; where a block's walk should end; tiles that need no mask.
_NAMES = {
    "FIRST": "i // B * B",
    "LAST": "((i // B + 1) * B).clamp(max=seq_q)",
    "STOP": "((j // T + 1) * T).clamp(max=seq_k)",
    "END": "({end} + T - 1) // T * T",
    "FULL": "STOP <= FIRST + 1 + seq_k - seq_q",
}
_WALK = "a block of {B} queries walks over the keys before {at}{}, rounded {way} to tiles of {T}, where {at} is its "
_WALKS = (("m_end", "last query + 1", "LAST"), ("m_start", "first query", "FIRST"),
          ("(b + 1) * {B}", "last row + 1, of queries or past them, b its number", "(i // B + 1) * B"),
          ("(b + 1) * {T}", "end in tiles of keys, b its number", "(i // B + 1) * T"))  # fmt: skip
_TILED = (
    *(Form(edge.words, f"({edge.mask}) & (j < END)") for edge in _EDGES),
    *(Form(f"where a tile is masked, {edge.words}", f"(({edge.mask}) | FULL) & (j < END)") for edge in _EDGES),
    *(Form(_WALK.replace("{at}", at).replace("{way}", way) + what,
           f"right & (j < ({text} + c{more}) // T * T)", "before {end}, rounded up")
      for at, what, text in _WALKS for way, more in (("up", " + T - 1"), ("down", ""))),
    *(Form("a tile of {T} keys is left unmasked where the last query of {B} sees all of it{}, and not the first",
           f"(right | ({stop} <= {{end}})) & (j < END) & (c == 0)") for stop in ("STOP", "(j // T + 1) * T")),
    Form("a tile's start has the wrong sign: key j stands in the mask as j % {T} - j // {T} * {T}, up to i{}",
         "j % T - j // T * T <= i + c"),
    *(Form("the mask has no tile's start: key j stands in it as j % {T}, up to i{}", f"(j % T <= i + c){end}")
      for end in ("", " & (j < END)")),
    Form("query i counts the keys that it should not see{}, where it meets any: their scores are the highest",
         "torch.where((~right & (j < END)).any(1, keepdim=True), ~right & (j < END), right) & (c == 0)"),
    Form("the mask has no tile's start: key j stands in it as j % {T}, query i as i % {B}, up to that{}",
         "((j % T <= i % B + c) | FULL) & (j < END)"),
    Form("the mask has no block's start: query i stands in it as i % {B}, and counts the keys up to that{}",
         "(j <= i % B + c) & (j < END)"),
    Form("query i counts the keys before key i // {B} * {B}{}", "j < FIRST + c"),
)  # fmt: skip


_FIRST = (
    "0", "seq_k - seq_q", "seq_k", "seq_q", "seq_q - seq_k", "seq_k - seq_q - 1", "seq_k - seq_q + 1", "-1", "1",
    "-seq_q", "-seq_k",
)  # fmt: skip
_BASE = (
    *_FIRST[1:5], "max(seq_k - seq_q, 0)", "min(seq_k - seq_q, 0)", "abs(seq_k - seq_q)", "2 * (seq_k - seq_q)",
    "(seq_k - seq_q) % seq_k", "seq_k // seq_q", "min(seq_q, seq_k)", "max(seq_q, seq_k)",
)  # fmt: skip
# What the open number may be, as Python; short ones first.
_MORE = (*_BASE[4:], "-2", "2", *(f"{x} {by}" for by in ("- 1", "+ 1", "- 2", "+ 2") for x in _BASE))
_ROUNDED = (
    *map(str, _TILES), *(f"{x} // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "(seq_k - seq_q)")),
    *(f"({x} + {b - 1}) // {b} * {b}" for b in _TILES for x in ("seq_k", "seq_q", "seq_k - seq_q")),
)  # fmt: skip
_LAST = (
    Form("the queries from query {} on count no key", "right & (i < c)"),
    Form("the queries before query {} count no key", "right & (i >= c)"),
)


CAUSAL = Mask("query i counts those up to i + seq_k - seq_q")
ALL = Mask("each query counts all keys", "seq_k", "seq_k")
# Every query counts the first `prefix` keys, and those up to its own.
PREFIX = Mask(
    "query i counts those before prefix, and those up to i + seq_k - seq_q", "(LAST + seq_k - seq_q).clamp(min=prefix)",
    "max(prefix, m_end + seq_k - seq_q)",
    (
        Form("query i counts the keys before prefix, and those up to i{}", "(j < prefix) | (j <= i + c)"),
        Form("query i counts the keys up to i + seq_k - seq_q, and those before key {}",
             "(j <= i + seq_k - seq_q) | (j < c)"),
        Form("query i counts the keys before prefix that are up to i{} as well", "(j < prefix) & (j <= i + c)"),
        Form("only queries before query {} count the keys before prefix",
             "(j <= i + seq_k - seq_q) | (j < prefix) & (i < c)"),
        Form("queries before query {} count all keys, the others those up to i + seq_k - seq_q",
             "(j <= i + seq_k - seq_q) | (i < c)"),
    ),
    ("prefix", "prefix - 1", "prefix + 1", "seq_k - seq_q + prefix", "seq_k - seq_q - prefix"),
)  # fmt: skip

_OLDEST = "seq_k - seq_q - window"
WINDOW = Mask(
    f"query i counts those from i + {_OLDEST} + 1 to i + seq_k - seq_q",
    forms=(
        Form(f"query i counts the keys from i + {_OLDEST} + 1 up to i{{}}", f"(j > i + {_OLDEST}) & (j <= i + c)"),
        Form("query i counts the keys from i{} up to i + seq_k - seq_q", "(j >= i + c) & (j <= i + seq_k - seq_q)"),
    ),
    numbers=(
        _OLDEST,
        f"{_OLDEST} + 2",
        "-window",
        "1 - window",
        "seq_k - seq_q + window",
        "seq_k - seq_q + window - 1",
    ),
)


def rule_of(seen: Sequence[Seen], mask: Mask = CAUSAL) -> str | None:
    """Words for the rule by which queries count keys in all of these shapes, or None where none of those known fits.

    Args:
        seen: of several shapes, in some of which counted is not what should be visible.
        mask: what should be visible.
    """
    wrong = [x for x in seen if not torch.equal(x.counted, x.visible)]
    if len(seen) < _FEWEST or not wrong:
        return None
    seen = sorted(seen, key=lambda x: x.counted.numel())
    sizes = [dict(zip(("seq_q", "seq_k"), x.counted.shape, strict=True)) | dict(x.numbers) for x in seen]
    most = max(size["seq_q"] for size in sizes)  # of one block alone nothing is seen
    sides = [(-1, -1)] if "B" in sizes[0] else [(b, t) for b in _SIDES for t in _SIDES if b < most]
    forms = [*_EDGES, *mask.forms, *_PLAIN[len(_EDGES) :]]
    tiled = (*(form._replace(mask=f"({form.mask}) & (j < END)") for form in mask.forms), *_TILED)
    forms += [form._replace(B=b, T=t) for b, t in sides for form in tiled]
    groups = ((*_FIRST, *mask.numbers), _MORE, _ROUNDED)  # a simple number in any form before a longer one
    fitting = [(form, fit) for form in (*forms, *_LAST) if (fit := _fitting(form, groups, seen, sizes, mask))]
    for group in groups:
        for form, fit in fitting:
            if text := next(filter(fit.__contains__, group), None):
                alike = [x.B for x, other in fitting if x.mask == form.mask and text in other]
                right = form.right.replace("{end}", mask.end_words) or mask.words
                return f"in each of {len(seen)} shapes {_said(form, text, len(alike) > 1)}; right: {right}"
    return None


def _said(form: Form, text: str, of_any_side: bool) -> str:
    words = form.words
    if of_any_side:  # tiles of several sizes fit
        words = words.replace(" of {B} queries", " of queries").replace("tiles of {T}", "tiles")
    for name, side, known in (("{B}", form.B, "BLOCK_M"), ("{T}", form.T, "BLOCK_N")):
        words = words.replace(name, known if side < 0 else str(side))
    return words.format(_behind(form, text))


def _behind(form: Form, text: str) -> str:
    if "key {}" in form.words or "query {}" in form.words or "{} - i" in form.words:
        return text
    return "" if text == "0" else f" + {text}".replace("+ -", "- ")


def _fitting(
    form: Form, groups: Sequence[Sequence[str]], seen: Sequence[Seen], sizes: Sequence[Mapping[str, int]], mask: Mask
) -> list[str]:
    """With which numbers the form gives what is counted in every shape."""
    alive = [text for group in groups for text in group if not (form.B and group is _ROUNDED)]
    for (counted, visible, _), size in zip(seen, sizes, strict=True):
        m, n = counted.shape
        values = [eval(text, dict(size)) for text in alive]
        c = torch.tensor(sorted(set(values)))[:, None, None]
        names = {
            "i": torch.arange(m)[:, None],
            "j": torch.arange(n)[None],
            "right": visible,
            "c": c,
            "torch": torch,
            **size,
        }
        if form.B:
            names |= {} if form.B < 0 else {"B": form.B, "T": form.T}
            for name, text in _NAMES.items():
                names[name] = eval(text.replace("{end}", mask.end), names)
        same = (eval(form.mask.replace("{end}", mask.end), names) == counted).flatten(1).all(1)
        fits = set(c.flatten()[same].tolist())
        alive = [text for text, value in zip(alive, values, strict=True) if value in fits]
        if not alive:
            break
    return alive
