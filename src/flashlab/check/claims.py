"""Does what is said of a change of the right text fit a learner's? A sentence is told only where it may be true.

Changes in different places may give the same values, and a learner's formula may give those of a change by another way.
So a sentence that names a piece is compared with both texts: what it says is missing must not be there as often as in
the right text, what it says stands there must be there more often, and so on. Both are tokens, with blanks around each.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|\.\d\w*|//|\*\*|[-+*/%<>=!&|^]=|<<|>>|&&|\|\||\S")
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_COMPARISON = re.compile(r"(.*) (<=|>=|==|!=|<|>) (.*)")
_DIVIDED = {"division": ("//", "/"), "remainder": ("%",)}
_PLAIN = re.compile(r"[A-Za-z_][\w.]*")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?![\w(.])")
_NO_SIGN = "()[]{},.:="
_LEAST = 10  # that a number has to be for a factor of 1000 to come of it


def tokens(code: str) -> str:
    """A code's tokens with one blank between them, and blanks around it."""
    return f" {' '.join(map(_plainly, _TOKEN.findall(code.replace(chr(34), chr(39)))))} "


def _plainly(token: str) -> str:
    """1e9 as `ast.unparse` writes it."""
    return repr(float(token)) if re.fullmatch(r"\d+e\d+", token) else token


def tokens_of(source: str) -> str:
    """The tokens of a Python text, less its comments, docstrings and the heads and decorators of functions."""
    kept: list[str] = []
    depth: int | None = None  # of the brackets, within a head
    lines = iter(textwrap.dedent(source).splitlines(keepends=True))
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        for token in tokenize.generate_tokens(lambda: next(lines, "")):
            word = token.string
            if word in ("def", "lambda") or (word == "@" and not token.start[1]):
                depth = 0
            elif depth is not None:
                depth += (word in ("(", "[", "{")) - (word in (")", "]", "}"))
                depth = None if word == ":" and depth == 0 else depth
            elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER) or (
                token.type == tokenize.STRING and not word.startswith('"""')):  # fmt: skip
                kept.append(_plainly(word.replace(chr(34), chr(39))))
    return f" {' '.join(kept)} ".replace(" _tick ( ) ", " ")


def _words(code: str) -> Counter[str]:
    return Counter(code.replace(">", "<").split())


class Claims:
    """What can be seen to be untrue of a learner's text.

    right: the right one. words: what its names are called. own: names of the right text that mean nothing in another;
    params: those that both have.
    """

    def __init__(
        self, learners: str, right: str, words: Mapping[str, str] | None = None, own: Sequence[str] = (),
        params: Sequence[str] = (),
    ):  # fmt: skip
        self.learners, self.right, self.own, self.params = learners, right, own, params
        named = [(said, name) for name, said in (words or {}).items() if said != name]
        named += [(f"`{said[1:-1]}`", f"`{name}`") for said, name in named if said[:1] == "("]
        self.words = sorted(named, key=lambda x: -len(x[0]))

    def untrue(self, said: str, of_one: bool = False) -> bool:
        """of_one: it is said of one of several results, for which alone a piece may be missing."""
        for words, name in self.words:
            said = said.replace(words, name)
        forms = _FORMS[:-_OF_PRESENCE] if of_one else _FORMS
        return any(
            judge(self, *(x or "" for x in found.groups())) for form, judge in forms if (found := form.match(said))
        )

    def unlike(self, edits: Sequence[tuple[str, str]]) -> bool:
        """Whether one of these edits of the right text cannot be seen in the learner's: it has of every word and sign
        that goes as many as the right text, and of none that comes more.
        """
        both = [[_words(tokens_of(x)) for x in edit] for edit in edits]
        gone, come = (sum((edit[side] for edit in both), Counter[str]()) for side in (0, 1))
        for before, after in both:
            told = [x for x in self._steps(before, after) if gone[x] != come[x]]
            if told and not any(self._took(x, before[x] > after[x]) for x in told):
                return True
        return False

    def seen(self, changed: str) -> bool:
        """Whether the learner's text is this change of the right one, or has its every word and sign."""
        before, after = _words(self.right), _words(changed)
        told = self._steps(before, after)
        told = [x for x in told if x[0].isalnum()] or told  # signs are many
        # That a name is not there says little: another style may not want it.
        sure = any(x in self.params or x[0].isdigit() or after[x] > before[x] for x in told)
        same = self.learners.split() == changed.split()
        return same or (sure and all(self._took(x, before[x] > after[x]) for x in told))

    def _steps(self, before: Counter[str], after: Counter[str]) -> list[str]:
        """What tells one from the other: its own names mean nothing in another text."""
        return [x for x in (before - after) + (after - before) if x not in self.own and x not in _NO_SIGN]

    def _took(self, word: str, goes: bool) -> bool:
        mine, right = _words(self.learners)[word], _words(self.right)[word]
        return mine < right if goes else mine > right

    def no_number(self, said: str) -> bool:
        """Whether it says of a number that it stands somewhere, and it stands nowhere."""
        found = _NUMBER_STANDS.match(said)
        return bool(found) and not self._counts(found[1])[0]  # type: ignore[index]

    def _counts(self, piece: str, before: str = "", behind: str = "") -> tuple[int, int]:
        """How often a piece is in the learner's text, and in the right one."""
        found = re.compile(rf"(?<= ){before}{re.escape(tokens(piece).strip())}(?= ){behind}")
        return len(found.findall(self.learners)), len(found.findall(self.right))

    def _there(self, piece: str) -> bool:
        """Whether a piece of the right text is in the learner's as often: of a name or number that proves nothing,
        if it is in the right one more than once. a * b is not there in a * b * c.
        """
        simple = len(tokens(piece).split()) == 1
        ends = ("", "") if simple else (r"(?<! [*/%.] )(?<! // )", r"(?! ([*/%.(\[]|//|\*\*) )")
        mine, right = self._counts(piece, *ends)
        return mine >= right > 0 and not (simple and (right > 1 or piece[:1].isdigit() or piece in self.own))

    def _more(self, *pieces: str) -> bool:
        """Whether one of these is in the learner's text more often than in the right one."""
        return any(mine > right for mine, right in map(self._counts, pieces))

    def _no_more(self, piece: str) -> bool:
        return not self._more(piece)

    def _missing(self, what: str, piece: str, as_it_is: str, whole: str) -> bool:
        if as_it_is:
            signs = _DIVIDED.get(what, ())
            wholes = [f"{x} {sign} {piece}" for sign in signs for x in (as_it_is, f"({as_it_is})")]
            wholes = wholes or [f"{piece}({as_it_is})"]
            return any(map(self._there, wholes)) or (not signs and self._there(piece))
        around = {*_NAME.findall(whole or "")} & {*self.params} - {*_NAME.findall(piece)}
        if not all(self._counts(name)[0] for name in around) and any(self._counts(name)[0] for name in self.params):
            return True  # it is missing in something that is not there
        return self._there(whole) if whole else self._there(piece.lstrip("-") if what == "term" else piece)

    def _not_asked(self, piece: str) -> bool:
        found = _COMPARISON.fullmatch(piece)
        return self._there(piece) or (found is not None and self._there(f"{found[2]} {found[3]}"))

    def _instead(self, what: str, piece: str, whole: str) -> bool:
        if what.isdigit() and piece not in self.own:
            mine, right = self._counts(piece)
            return mine >= right > 0 and not self._more(what)
        if (self._unknown(what) and self._unknown(piece)) or (whole and self._there(whole)):
            return True
        if not _PLAIN.fullmatch(what) or what in self.own or not self._counts(what)[1]:
            return False  # a name that the right text has: of a number, or of what it makes, nothing is known
        if not self._counts(what)[0] or (piece.isdigit() and not self._more(what)):
            return True
        mine, right = self._counts(piece)
        return self._there(piece) or (mine >= right > 0 and not self._more(what))

    def _twice(self, piece: str) -> bool:
        mine, right = self._counts(piece)
        return (mine == 1 or mine <= right) if len(tokens(piece).split()) > 1 and mine else 0 < mine < 2

    def _sign(self, piece: str) -> bool:
        """The signs before it are those of the right text."""
        mine, right = self._counts(piece)
        signs = [self._counts(f"{sign} {piece}") for sign in "-+"]
        return mine >= right > 0 and all(a == b for a, b in signs)

    def _compared(self, left: str, sign: str, last: str) -> bool:
        if f" {sign} " not in self.learners and f" {_TURNED[sign]} " not in self.learners:
            return True
        own = self._counts(last)[0] > 0
        return own and not self._more(f"{sign} {last}", f"{last} {_TURNED[sign]}")

    def _one_off(self, piece: str) -> bool:
        """Of a name in a formula, without a 1 or anything that has an end."""
        ends = re.search(r" (1|range|len|arange|[<>]=?|-?1\.0) ", self.learners)
        absent = " " in piece and not self._counts(piece)[0]
        return absent or self._unknown(piece) or (bool(_PLAIN.fullmatch(piece)) and not ends)

    def of_a_stranger(self, said: str) -> bool:
        """Whether it says what is wrong with one of the right text's own names, and it is not there; what is missing
        need not be.
        """
        said = re.sub(r".* is missing: (?=.* as it stands)", "", said).partition(", in `")[0]
        pieces = " ".join(re.findall(r"`([^`]*)`", said))
        return " is missing" not in said and any(self._unknown(name) for name in _NAME.findall(pieces))

    def _unknown(self, name: str) -> bool:
        """Whether it is one of the right text's own names, and not in the learner's."""
        return name in self.own and not self._counts(name)[0]

    def _called(self, method: str) -> bool:
        mine, right = self._counts(method)
        return mine >= right > 0

    def _exchanged(self, called: str) -> bool:
        """Calls of it have the right text's arguments."""
        calls = re.findall(rf"(?<= ){called} \( [^()]* \)(?= )", self.right)
        return bool(calls) and all(self._counts(x)[0] >= n for x, n in Counter(calls).items())

    def _rounded(self, divisor: str) -> bool:
        """Nothing is divided by it there."""
        divided = rf" (//?|%) (\( )*{divisor} |(cdiv|divmod) \(.* , {divisor} \)"
        names_kept = all(self._counts(x)[0] for x in self.params if x != divisor)
        return names_kept and not re.search(divided, self.learners)

    def _factor(self, size: str) -> bool:
        numbers = re.findall(r"(?<= )\d[\w.]*(?= )", self.learners)
        return int(size) > _LEAST and not any(
            not self._counts(x)[1] and (re.search(r"\de", x) or len(x) > 1) for x in numbers)  # fmt: skip


_NUMBER_STANDS = re.compile(r"`?(\d[\w.]*)`? stands where")
_WHERE = r"(?:, in `([^`]*)`)?"
_FORMS: tuple[tuple[re.Pattern[str], Callable[..., bool]], ...] = tuple(
    (re.compile(form), judge)
    for form, judge in (
        (r"the factor `([^`]*)` is there twice", Claims._twice),
        (r"the arguments of `(\w+)` are exchanged", Claims._exchanged),
        (r"`(break|continue|pass)` stands where", Claims._no_more),
        (r"`([^`]*)` has the wrong sign", Claims._sign),
        (r"the comparison is `([^`]*) (<=|>=|==|!=|<|>) ([^`]*)`", Claims._compared),
        (r"`[^`]*//? (\w+)` is (?:not rounded|rounded )", Claims._rounded),
        (r"`([^`]*)` is one too (?:large|small)(?=$|,)", Claims._one_off),
        (r"`[^`]*` is (?:1 / )?(\d+) times what it should be", Claims._factor),
        (r"`\.(\w+)` is missing: ", Claims._called),
        (rf"the (term|factor|line|loop|condition) `([^`]*)` is missing(){_WHERE}", Claims._missing),
        (r"the (division|remainder) by `([^`]*)` is missing: it is `([^`]*)` as it stands()", Claims._missing),
        (r"()`([^`]*)` is missing: it is `([^`]*)` as it stands()", Claims._missing),
        (r"`([^`]*)` is not asked", Claims._not_asked),
        (rf"`([^`]*)` stands where `?([^` ,]+|[^`]*)`?(?:, rounded up,)? belongs{_WHERE}", Claims._instead),
    )
)
_OF_PRESENCE = 5  # of these, the last
