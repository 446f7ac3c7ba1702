"""`CheckFailed`: the one exception of the checker, one plain sentence for the learner."""

from __future__ import annotations


class CheckFailed(Exception):
    """A learner's answer is not right yet.

    `str(error)` is one plain sentence. `diagnosis` is a stable slug that names the mistake ("tail-not-masked",
    "not-solved-yet", "wrong-value", ...) and `case` names the input on which it showed, or is None. In a notebook it is
    rendered as one short line (the symptoms of a
    bug hunt: as some) instead of a traceback, because the traceback would only show the checker's own code.
    """

    def __init__(self, sentence: str, *, diagnosis: str = "wrong-value", case: str | None = None):
        super().__init__(sentence)
        self.sentence = sentence
        self.diagnosis = diagnosis
        self.case = case
        self.unexplained = False  # one comparison of several said where the values differ, and nothing more
        self.what = ""  # what was compared

    def _render_traceback_(self) -> list[str]:  # IPython calls this in place of its own traceback
        where = f" [case: {self.case}]" if self.case else ""
        return f"✗ {self.sentence}{where} ({self.diagnosis})".split("\n")
