"""Which change of the right CUDA text gives all that a learner's gives? Looked up in what was computed ahead.

    python tools/cuda_changes.py 6.1      # computes it anew; a test says when that is due

All changes of a text (`flashlab.check.cuda_text`) go into one watched build, and run one after the other on a few
inputs, the `Trials`. What came out is kept in `changes/ID.json`: for each input a finding, or some sums of the outputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from flashlab.check import cuda_text
from flashlab.check.changes import Change, changes, edited
from flashlab.check.claims import Claims, tokens
from flashlab.check.cuda_answer import DIVERGENT, VAGUE, Source, Verdict, examine
from flashlab.check.cuda_mend import mended
from flashlab.check.cuda_text import CHOSEN, PRELUDE, CudaText
from flashlab.check.failed import CheckFailed
from flashlab.check.lookup import Row
from flashlab.check.poison import MarkedEmpty, mark_unwritten, unwritten
from flashlab.cuda import CompileError, CudaModule
from flashlab.simt import SimtError
from flashlab.simt.report import Event
from flashlab.simt.sentences import KINDS
from flashlab.simt.source import blank_comments

FOLDER = Path(__file__).parent / "changes"
_SHOWN = 60  # characters of a line
_MARK = "flashlab_answer;"
_HEDGED = "it gives just what a right kernel gives in which "
_SECONDS = 2.0  # that a change may take on one input
_LONGEST = 200  # characters of two causes
_ALMOST = 0.35  # costs so near say nothing about which is likelier
# What needs no cause, or is its own.
_PLAIN = (
    "does-not-compile", "wrong-type", "wrong-entry", "no-launch", "launch-failed", "nothing-stored",
    "barrier-arguments", "wrong-stream",
)  # fmt: skip
# What is seen in a kernel's results, and may have several causes: nothing but what mends the answer is told before it.
_SEEN = (
    "maximum-never-set", "corrected-twice", "nothing-rescaled", "o-columns-exchanged", "o-columns-repeated",
    "o-rows-exchanged", "o-rows-repeated", "masked-rows-nan", "causal-by-block", "mask-inverted",
)  # fmt: skip
# Findings that may come of another mistake: the outputs behind them are kept too.
_EQUAL = {"<= -INFINITY`: it is `==`": "nothing is below -inf"}  # of every text
# Findings of a place in shared memory, which many mistakes have in common.
_PLACES = ("shared-out-of-bounds", "stage-overwritten", "read-before-wait", "uninitialised-shared")
_HAZARDS = ("race", "stage-overwritten", "read-before-wait", "uninitialised-shared", "never-waited")
TRIALS: dict[str, Trials] = {}
Seen = list[Any]  # for each input: a finding, or the sums of its outputs, behind a hazard that was found
Outputs = Sequence[torch.Tensor]
_ACCESS = re.compile(r"\b(?:reads?|writes?|wrote|fills?)\b(?: with \w+)?")  # of a race: which came first
_MISSING = re.compile(r"(?:bytes|parity|phase|Barrier) \d+|\d+(?: of \d+)? arrivals? missing|has \d+ of the \d+")
# What is told beside a right answer's: where, and the number that comes with it.
_BESIDE = {
    "mbarrier-wait": ("waits for {}", "asks for parity {1} of {0}"),
    "arrive": ("arrives at {}", "announces {1} bytes at {0}"),
    "load": ("fills {}", "fills {1} bytes of {0}"),
    "barrier": ("comes to barrier {}", "meets {1} threads at barrier {0}"),
    "barrier-arrive": ("arrives at barrier {}", "is one of {1} threads at barrier {0}"),
}
_DONE = ("arrive", "mbarrier-wait", "load", "store", "barrier", "barrier-arrive", "wgmma", "wait", "registers")


def _limit(module: CudaModule) -> dict[str, Any]:
    """The seconds of a launch: fewer where many changes are tried."""
    return {"timeout": min(_SECONDS, module.timeout or _SECONDS)}


def calls(entry: str, *given: Any, out: Sequence[int], **options: Any) -> Callable[[CudaModule], Outputs]:
    """A run of an extern "C" function. given: its arguments, None for a float32 output of the shape `out`."""

    def run(module: CudaModule) -> Outputs:
        outputs = [mark_unwritten(torch.empty(*out)) for x in given if x is None]
        fresh = iter(outputs)
        module.launch(entry, *(next(fresh) if x is None else x for x in given), echo=False, **_limit(module), **options)
        return outputs

    return run


def forwards(
    shape: tuple[int, int, int, int, int, bool], head_dim: int = 64, dtype: torch.dtype = torch.float32,
    fall: float = 0.0, **options: Any,
) -> Callable[[CudaModule], Outputs]:  # fmt: skip
    """A run of a kernel of the series: (batch, heads, kv_heads, seq_q, seq_k, causal); from key 40 on scores fall, and
    rows side by side lie far apart. Of several heads Q and K lie row by row, and V head by head.
    """
    batch, heads, kv_heads, seq_q, seq_k, causal = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)
    q, k, v = (torch.randn(batch, h, n, head_dim, generator=generator) for h, n in sizes)
    if fall:
        q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
        k[:, :, 40:, 0] = -fall
        q[..., 1], k[..., 1] = math.sqrt(head_dim) / 8 * (torch.arange(seq_q) % 8), -fall
    q, k, v = (x.to(dtype) for x in (q, k, v + 0.5))
    if heads > 1:  # no strides are alike
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))

    def run(module: CudaModule) -> Outputs:
        with MarkedEmpty():
            return module.forward(q, k, v, causal=causal, echo=False, **_limit(module), **options)

    return run


def traced(run: Callable[[CudaModule], Outputs], warps: Collection[int] = range(64)) -> Callable[[CudaModule], Any]:
    """A run, with timeline=1, of which is kept: the finding, what some warps of the first block did, and its outputs.

    It tells changes apart that end in a finding. Each warp by itself: in which order they are run does not count.
    """

    def kept(module: CudaModule) -> list[Any]:
        outputs: Outputs = []
        with contextlib.suppress(SimtError):
            outputs = run(module)
        report = module.report
        found = [f for f in report.findings if f.severity == "error"] if report is not None else []
        errors = [" ".join((f.kind, *_ACCESS.findall(f.message * (f.kind == "race")))) for f in found[:1]]
        events = report.launches[0].events if report is not None and report.launches else []
        did = [[e.did, *e.values] for w in warps for e in events if e.warp == w and e.did in _DONE]
        return _marked(errors, did, [] if errors else outputs)

    kept.traced = run  # type: ignore[attr-defined]
    return kept


def events_of(module: CudaModule, run: Callable[[CudaModule], Outputs]) -> list[Event]:
    """What the warps of the first block did; of a run that goes wrong, as far as it went."""
    with contextlib.suppress(SimtError):
        run(module)
    launches = [x.events for x in module.report.launches] if module.report is not None else []
    return [e for e in max(launches, key=len, default=[]) if not e.block and e.did in _BESIDE]


def all_found(run: Callable[[CudaModule], Outputs], ended: bool = False) -> Callable[[CudaModule], Any]:
    """A run of which, where threads met, is kept how often each hazard was seen, and what the warps did.

    ended: so with all findings; and where the run broke off, which barriers lacked whom.
    A hazard spoils the numbers. By its kind alone one mistake would be told for another.
    """

    def kept(module: CudaModule) -> Any:
        outputs: Outputs = []
        with contextlib.suppress(*[SimtError] * ended):
            outputs = run(module)
        report = module.report
        hazards = [(f.kind, f.thread, f.times) for f in report.findings if f.severity == "error"] if report else []
        if report is None or not hazards or (not ended and hazards[0][0] not in _HAZARDS):
            return outputs
        if not outputs:
            found = next(f for f in report.findings if f.severity == "error")
            return _marked([found.kind], _MISSING.findall(found.message), [])
        did = [(name, report.counters[name]) for name in ("cp_async", "mma_during_copies", "mma_copy_groups")]
        return _marked(hazards, did, outputs)

    kept.traced = run  # type: ignore[attr-defined]
    return kept


def _marked(found: Sequence[Any], did: Sequence[Any], outputs: Outputs) -> list[Any]:
    """What is kept of a run, in the shape of an output's sums: two marks, and the sums."""
    marks = [zlib.crc32(repr(x).encode()) for x in (found, did)]
    return [*marks, 0, 0, 1.0, 0.0, 0.0, *(n for x in outputs for n in _sums(x))]


@dataclass(frozen=True)
class Trials:
    """What an exercise's answers are run on where a cause is looked for.

    Attributes:
        id: of the exercise. build: makes a watched build of an answer's text, to be run by each of `runs`.
        region: the text is statements. words: what the right text's names are called. tol: relative, of the outputs.
        rows: mistakes that no single change makes. place: makes a whole file of an answer.
        notes: {piece of the right text: why it is there}, told with a change of it. most: changes, the likeliest.
        equal: {piece of what is said of a change: why it is as right}.
        read: the statements of an answer, where it is not these alone; unread: the answer of such statements.
        unless: {slug of a row: a pattern}, of what an answer has to which the row does not speak.
        lies: what is at a byte of the dynamic shared memory, in words, where that is known.
        then: what is asked of a build beside its outputs; raises CheckFailed.
        judged: of many right answers, whether a build is one.
    """

    id: str
    build: Callable[..., CudaModule]
    runs: Sequence[Callable[[CudaModule], Outputs]]
    region: bool = False
    words: dict[str, str] = field(default_factory=dict)
    tol: float = 1e-4
    rows: Sequence[Row] = ()
    place: Callable[[str], str] = str
    notes: Mapping[str, str] = field(default_factory=dict)
    most: int = 250
    equal: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], str] = str
    unread: Callable[[str], str] = str
    unless: Mapping[str, str] = field(default_factory=dict)
    lies: Callable[[int], str | None] = lambda byte: None
    then: Callable[[CudaModule], Any] = lambda module: None
    judged: Callable[[CudaModule], bool] | None = None

    def __post_init__(self) -> None:
        TRIALS[self.id] = self

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.id}.json"

    @cached_property
    def kept(self) -> Mapping[str, Any]:
        return json.loads(self.path.read_text())

    # ---- a learner's -----------------------------------------------------------------------------------------------
    def seen(self, module: CudaModule) -> Seen:
        seen: Seen = []
        for run in self.runs:
            endless = seen and str(seen[-1]).startswith("timeout")
            seen.append(seen[-1] if endless else self._one(module, run))
        return seen

    def _one(self, module: CudaModule, run: Callable[[CudaModule], Outputs]) -> Any:
        try:
            outputs = run(module)
        except SimtError as error:
            return _found(error.report) or type(error).__name__
        if outputs and not isinstance(outputs[0], torch.Tensor):
            return list(outputs)  # a run that says by itself what is kept of it
        found, sums = _found(module.report), [number for x in outputs for number in _sums(x)]
        return (sums if not found else [found, *sums] if found.startswith(_HAZARDS) else found) or [0]

    def explain(self, module: CudaModule) -> tuple[str, str] | None:
        """(slug, sentence) of the likeliest change that gives all of this, and of another one that is as likely."""
        got, right = self.seen(module), self.kept.get("right", ())
        if self._same(right, [x[1:] if _hazard(x) else x for x in got]):
            return None  # the values are right
        code, right_text = module.code, self.kept.get("text", "")
        right_code = blank_comments(self.place(right_text))
        claims = Claims(tokens(code), tokens(right_code)) if right_text else None
        fitting = [x for x in self.kept["changes"] if self._same(x[3], got) and not (
            x[2] and (_of_another(x[1], code) or (claims and claims.untrue(x[1]))
                      or _elsewhere(x[1], blank_comments(code), right_code)))]  # fmt: skip
        lines = module.code.splitlines()
        own = {x for i in self.own_lines(module.code) for x in re.findall(r"\w+", lines[i])}
        named = {x[1]: {*re.findall(r"`([A-Za-z_]\w*)`|^(\d+) stands", x[1])[:1]} for x in fitting}
        fitting = [x for x in fitting if not x[2] or {"".join(y) for y in named[x[1]]} <= own]
        fitting = [x for x in fitting if not (x[0] in self.unless and self._own(self.unless[x[0]], code))]
        if any(map(_of_a_place, got)):
            fitting = [x for x in fitting if not self._own(_piece(x[1]), code)]
        if not fitting:
            return None
        slug, said, cost, _ = fitting[0]
        if not cost:
            return slug, said
        if fitting[1:] and all(isinstance(x, str) or self._alike(y, x) for x, y in zip(got, right, strict=False)):
            return None  # several end at one place, in the runs that they end: the finding says more
        numbers = [n for x in got if (n := _numbers_of(x))]
        if numbers and not any(any(x[4::_KEPT]) for x in numbers):
            return None  # NaN or 0 everywhere, as of many changes
        said = f"{_HEDGED}{said}"
        near = (x[1] for x in fitting[1:] if x[0] != slug and x[2] <= cost + _ALMOST)
        other = next((x for x in near if x.partition(":")[0] != fitting[0][1].partition(":")[0]), None)
        return slug, f"{said}. Or: {other}" if other and len(said + other) < _LONGEST else said

    @property
    def parts(self) -> int:
        """Of how many texts an answer is."""
        return len(parted(self.kept["text"]))

    def own_lines(self, code: str) -> range:
        """Which lines of a file, from 0, stand where the right text does."""
        lines, frame = code.splitlines(), self.place(joined([_MARK] * self.parts)).splitlines()
        marked = [i for i, line in enumerate(frame) if _MARK in line]
        return range(marked[0], len(lines) - len(frame) + marked[-1] + 1)

    def own_text(self, code: str) -> str:
        """The text, or texts, of a file which stand where the right ones do."""
        lines, own = code.splitlines(), self.own_lines(code)
        if self.parts == 1:
            return "\n".join(lines[own.start : own.stop])
        frame = self.place(joined([f"{_MARK}\n"] * self.parts)).splitlines()
        marked, texts, begin = [i for i, line in enumerate(frame) if _MARK in line], [], own.start
        for here, there in itertools.pairwise([*marked, len(frame)]):
            behind = frame[here + 1 : there]
            first = begin if there < len(frame) else len(lines) - len(behind)
            end = next(i for i in range(first, len(lines)) if lines[i : i + len(behind)] == behind)
            texts.append("\n".join(lines[begin:end]))
            begin = end + len(behind)
        return joined(texts)

    def gives(self, module: CudaModule, number: int) -> bool:
        """Whether a build gives on this run what is right, whatever its warps do on the way."""
        run, right = self.runs[number], self.kept["right"][number]
        plain = getattr(run, "traced", None)
        return self._alike(_numbers_of(right) if plain else right, self._one(module, plain or run))

    def is_one(self, module: CudaModule) -> bool:
        """Whether a build is another right answer, where there are many."""
        with contextlib.suppress(SimtError):
            return self.judged is not None and self.judged(module)
        return False

    def well(self, module: CudaModule) -> bool:
        """Whether a build that gives what is right is also right in what is asked beside that."""
        with contextlib.suppress(CheckFailed):
            self.then(module)
            return True
        return False

    def beside(self, module: CudaModule) -> str:
        """In words, the first thing that a line of the answer does otherwise than a right answer, of runs with a trace:
        a warp's waits, arrivals and copies come in one order each, whatever the answer's style.
        """
        lines, right = module.code.splitlines(), None
        own = self.own_lines(module.code)
        for run in (x.traced for x in self.runs if hasattr(x, "traced")):
            if not (mine := events_of(module, run)):
                continue
            right = right or self.build(self.place(self.kept["text"]))
            theirs = events_of(right, run)
            numbers = _numbering(mine, theirs)
            wanted, own_of = _by_warp(_less_idle(theirs, mine)), _by_warp(mine)
            done, times = Counter[tuple[int, str]](), Counter[tuple[int, int]]()
            more = Counter(e.warp for e in mine if e.did.startswith("barrier"))
            more.subtract(e.warp for e in theirs if e.did.startswith("barrier"))
            anywhere = Counter(x.values[0] for x in theirs if x.did == "barrier-arrive")
            anywhere.subtract(numbers(x)[0] for x in mine if x.did == "barrier-arrive")
            for at, e in enumerate(mine):
                of = wanted.get((e.warp, e.did), [])
                nth = done[e.warp, e.did]
                if e.did == "barrier" and nth < len(of) and e.values[1] < (threads := of[nth].values[1]):
                    later = (x for x in mine[at + 1 :] if x.did == "barrier" and x.warp == e.warp)
                    if more[e.warp] > 0 or any(x.values[1] == threads for x in later):
                        continue  # one more, of its own group: it does no harm
                done[e.warp, e.did] += 1
                times[e.warp, e.line or 0] += 1
                if nth < len(of) and of[nth].values == numbers(e):
                    continue
                if e.did == "barrier-arrive" and anywhere[numbers(e)[0]] >= 0:
                    continue  # another warp's arrival, perhaps
                if e.line is None or e.line - 1 not in own:
                    break  # another thing before it was otherwise, or it cannot be said where
                code = lines[e.line - 1].split("//")[0].strip()
                code = code if len(code) < _SHOWN else f"{code[:_SHOWN]} …"
                nth_time = f"`{code}`, the {_nth(times[e.warp, e.line])} time"
                rest, due = [*map(numbers, own_of[e.warp, e.did][nth:])], [x.values for x in of[nth:]]
                other = of[nth] if nth < len(of) else None
                fewer = e.did.startswith("barrier") and due[1:2] == rest[:1] and due.count(due[0]) > rest.count(due[0])
                if other is not None and (fewer or rest == due[1 : len(rest) + 1]):  # less than in a right answer
                    return self._said_beside(nth_time, e, other, missing=True)
                if due and rest[1:] and rest[1 : len(due) + 1] == due[: len(rest) - 1]:  # one more
                    return self._said_beside(nth_time, e, None)
                if other is not None and e.did.startswith("barrier"):
                    other = replace(other, values=_numbering(theirs, mine)(other))
                return self._said_beside(nth_time, e, other)
        return ""

    def _said_beside(self, said: str, e: Event, other: Event | None, missing: bool = False) -> str:
        where, number = _BESIDE[e.did]
        named = [str(x.values[0]) if "barrier {}" in where else self.lies(x.values[0]) or f"byte {x.values[0]} of the "
                 "shared memory" for x in (e, other) if x]  # fmt: skip
        if other is None:
            return f"{said}, {where.format(named[0])}: a right answer's warp does not, or not so often"
        if missing and named[0] != named[1]:
            said = f"before {said}, {where.format(named[0])}"
            return f"a right answer's warp {where.format(named[1])} {said}: that is missing"
        if e.values[0] != other.values[0]:
            return f"{said}, {where.format(named[0])}, where a right answer {where.format(named[1])}"
        right = number.format(named[1], other.values[1]).partition(" of ")[0].partition(" at ")[0]
        return f"{said}, {number.format(named[0], e.values[1])}, where a right answer {right}"

    def _own(self, pattern: str, code: str) -> bool:
        """Whether the learner's part of the code has this pattern, spaces or not."""
        mine, frame = (re.sub(r"\s", "", blank_comments(x)) for x in (code, self.place(joined([";", ";"]))))
        return bool(pattern) and len(re.findall(pattern, mine)) > len(re.findall(pattern, frame))

    def _same(self, a: Seen, b: Seen) -> bool:
        return len(a) == len(b) and all(self._alike(x, y) for x, y in zip(a, b, strict=True))

    def _alike(self, x: Any, y: Any) -> bool:
        if _hazard(x) and _hazard(y):  # of another thread, where the kernel is laid out in another way
            return x[0].split()[0] == y[0].split()[0] and self._alike(x[1:], y[1:])
        if isinstance(x, str) and _hazard(y):
            return bool(x == y[0])
        if isinstance(x, str) or isinstance(y, str) or _hazard(x) or _hazard(y) or len(x) != len(y):
            return bool(x == y)
        for i in range(0, len(x), _KEPT):
            (marks, nan, up, down, size, *sums), mine = x[i : i + _KEPT], y[i : i + _KEPT]
            if [marks, nan, up, down] != mine[:4] or abs(size - mine[4]) > self.tol * size:
                return False
            if any(abs(s - m) > self.tol * max(size, 1e-6) for s, m in zip(sums, mine[5:], strict=True)):
                return False
        return True

    # ---- computed ahead ----------------------------------------------------------------------------------------------
    def digest(self, text: str) -> str:
        """Of the text and of what is said of it: what is kept is in sync while it is the same. A further kind of change
        makes nothing of it wrong.
        """
        said = [f"{x.slug} {x.sentence} {x.edits}" for x in self.rows]
        of = [text, str(self.region), *map(str, (*self.words.items(), *self.notes.items())), *said]
        return hashlib.sha256("\n".join(of).encode()).hexdigest()[:16]

    def answer(self, whole: CudaText, *changes: Change) -> str:
        """The text with these changes, as a learner would have it."""
        with whole.changed(*changes):
            return self.unread(whole.all_in_one([]))

    def _changes(self, text: str) -> tuple[CudaText, list[Change]]:
        whole = CudaText(self.read(text), self.region, self.words)
        made: dict[str, Change] = {whole.all_in_one([]): Change("", "", 0.0, ())}  # by the text that it makes
        for change in sorted(changes(whole, None, cuda_text), key=lambda x: x.cost):
            with contextlib.suppress(cuda_text.UnreadableError, KeyError, RecursionError), whole.changed(change):
                made.setdefault(whole.all_in_one([]), change)
            if len(made) > self.most:
                break
        return whole, [replace(x, said=x.said + whole.line_of(x)) for x in [*made.values()][1:]]

    def compute(self, text: str) -> dict[str, Any]:
        """What is kept: the right text's outcome; [slug, sentence, cost, outcome] of the changes that show; and of
        those that do not [what is said, ""].
        """
        right = self.seen(self.build(self.place(text)))
        found: list[Any] = []
        for row in self.rows:
            wrong = self.place(edited(text, row.edits, self.id))
            found.append((row.slug, row.sentence, 0.0, self.seen(self.build(wrong))))
            assert not self._same(found[-1][3], right), f"{self.id}: nothing shows {row.slug}"
        whole, made = self._changes(text)
        module, refused = self._built(whole, made)
        assert self._same(self.seen(module), right), f"{self.id}: taken apart, the text is another one"
        same = []
        for number, change in enumerate(made, 1):
            if number in refused:
                continue
            module.launch("flashlab_choose", number)
            got = self.seen(module)
            if self._same(got, right):
                same.append((change.said, ""))
            else:
                found.append((change.slug, self._noted(change), round(change.cost, 2), got))
        found = sorted(found, key=lambda x: x[2])
        ends = Counter(str(x[3]) for x in found if all(isinstance(y, str) for y in x[3]))
        found = [x for x in found if ends[str(x[3])] < 2]  # several that end at one place: the finding says more
        found = [x for i, x in enumerate(found) if not any(self._told(y, x) for y in found[:i])]
        return {"digest": self.digest(text), "right": right, "same": same, "changes": found, "text": text}

    def why_equal(self, said: str) -> str:
        """Why a change is as right, or nothing."""
        return next((why for piece, why in {**_EQUAL, **self.equal}.items() if piece in said), "")

    def survivors(self, kept: Mapping[str, Any]) -> dict[str, str]:
        """{what is said of a change: why it does not show}; nothing where that is open: a hole in the check?"""
        return {said: self.why_equal(said) or verdict for said, verdict in kept.get("same", ())}

    def judge(self, text: str, kept: dict[str, Any], verdict: Callable[[str], str]) -> None:
        """Notes what the whole check says of the texts that these few inputs do not tell from the right one."""
        whole, made = self._changes(text)
        texts: dict[str, list[str]] = {}  # the same may be said of several, one of which shows
        for change in made:
            texts.setdefault(change.said, []).append(self.answer(whole, change))
        refused = verdict(self.answer(whole))
        assert not refused, f"{self.id}: taken apart and put together, the right text is refused: {refused}"
        kept["same"] = [(x, "" if self.why_equal(x) else min(map(verdict, texts[x]))) for x, _ in kept["same"]]

    def _noted(self, change: Change) -> str:
        """What is said of a change, and why that piece is there."""
        note = next((self.notes[x] for x in change.about if x in self.notes), "")
        return f"{change.said}: {note}" if note else change.said

    def _told(self, before: Any, other: Any) -> bool:
        """Whether what is likelier hides another one."""
        near = before[2] and other[2] <= before[2] + _ALMOST and before[0] != other[0]
        return not near and self._same(before[3], other[3])

    def _built(self, whole: CudaText, made: Sequence[Any], until: float = math.inf) -> tuple[CudaModule, set[int]]:
        """One build of all the changes, and the numbers of those that do not compile; until: the time to give up."""
        refused: set[int] = set()
        while True:
            text = PRELUDE + self.place(self.unread(whole.all_in_one(made, refused)))
            try:
                return self.build(text), refused
            except CheckFailed as failed:
                error = failed.__context__
                assert isinstance(error, CompileError), failed
                more = {n for m in error.messages if m.line for n in _numbers(text, m.line)} - refused
                if not more or time.monotonic() > until:
                    raise
                refused |= more


_OTHER = "flashlab_other text;"  # between two texts of one answer: a declaration, which stays as it is


def joined(answers: Sequence[str]) -> str:
    """The texts of an answer as one, of which `parted` makes them again."""
    return f"\n{_OTHER}\n".join(answers)


def parted(text: str) -> list[str]:
    return re.split(r"\s*".join(map(re.escape, re.findall(r"\w+|;", _OTHER))), text)


def _less_idle(events: Sequence[Event], others: Sequence[Event]) -> list[Event]:
    """Without the waits for a phase before the first, which pass at once, at barriers where others do without them: at
    which they wait for the first one when they have arrived at two, or to which they have not come yet.
    """
    begun, first, arrived = set[Any](), dict[Any, int](), Counter[int]()
    for e in others:
        if e.did == "mbarrier-wait":
            first.setdefault((e.warp, e.values[0]), e.values[1] if arrived[e.warp] > 1 else 1)
        arrived[e.warp] += e.did == "arrive"
    late = {warp for (warp, _), parity in first.items() if parity == 0}
    kept = []
    for e in events:
        at = (e.warp, e.values[0])
        if e.did == "mbarrier-wait" and at not in begun:
            begun.add(at)
            if e.values[1] == 1 and e.warp in late and not first.get(at):
                continue
        kept.append(e)
    return kept


def _by_warp(events: Sequence[Event]) -> dict[tuple[int, str], list[Event]]:
    found: dict[tuple[int, str], list[Event]] = {}
    for e in events:
        found.setdefault((e.warp, e.did), []).append(e)
    return found


def _numbering(mine: Sequence[Event], theirs: Sequence[Event]) -> Callable[[Event], tuple[int, int]]:
    """What an event says, with the barriers numbered as in the other's: each is that one with which it comes most often
    in the same place. An answer may number them as it likes.
    """
    there, pairs = _by_warp(theirs), Counter[tuple[int, int]]()
    for of, events in _by_warp(mine).items():
        if of[1].startswith("barrier"):
            pairs.update((x.values[0], y.values[0]) for x, y in zip(events, there.get(of, []), strict=False))
    named: dict[int, int] = {}
    for (x, y), _ in sorted(pairs.items(), key=lambda z: (-z[1], z[0][0] != z[0][1], z[0])):
        if x not in named and y not in named.values():
            named[x] = y
    return lambda e: (named.get(e.values[0], e.values[0]), e.values[1]) if e.did.startswith("barrier") else e.values


def _of_another(said: str, code: str) -> bool:
    """Whether it says that something stands somewhere which the text has nowhere: this is not what was written."""
    found = re.match(r"`([A-Za-z_][\w.]*)` stands where", said)
    found = found or re.match(r"`INFINITY` has the wrong sign, in `.* (\W+) -(INFINITY)`", said)
    found = found or re.match(r"`([^`.]+)` is the other way round", said)
    return found is not None and re.sub(r"\s", "", "".join(found.groups())) not in re.sub(r"\s", "", code)


def _elsewhere(said: str, code: str, right: str) -> bool:
    """Whether it says that a name is missing which the answer has as often, or whose call it has not; that a number is
    there twice; that something stands where the answer has what belongs.
    """
    mine, theirs = (re.sub(r"\s", "", x) for x in (code, right))
    if found := re.match(r"`([^`]*)` stands where `([^`]*)` belongs", said):
        stands, belongs = (re.sub(r"\s", "", x) for x in found.groups())
        return stands not in mine and mine.count(belongs) >= theirs.count(belongs) > 0
    if found := re.match(r"the line `([^`]*)` is missing", said):
        line = re.sub(r"\s", "", found[1])
        asked = [len(re.findall(r"\bif\b", x)) for x in (code, right)] if line.startswith("if(") else (0, 1)
        return mine.count(line) >= theirs.count(line) or asked[0] >= asked[1]
    if not (found := re.match(r"the (?:factor|term) `(\w+)` is missing", said)):
        return re.match(r"`\d+` is counted twice", said) is not None
    own, of_right = (Counter(re.findall(r"[A-Za-z_]\w*", x)) for x in (code, right))
    lines = "".join(line for line in right.splitlines() if found[1] in line)
    calls = {*re.findall(r"(\w+)\s*\(", lines)} - {"if", "for", "while"}
    return own[found[1]] >= of_right[found[1]] or bool(calls and all(own[x] < of_right[x] for x in calls))


def _piece(said: str) -> str:
    """A pattern of the text of which something is said to be missing: where it stands as it should, it is not."""
    found = re.search(r"is missing.*?, in `([^`.]+)`", said) or re.search(r"the term `([^`]+)` is missing", said)
    return re.escape(re.sub(r"\s", "", found[1])) if found else ""


_KEPT = 7  # numbers of an output: unwritten, NaN, inf, -inf, the size, two sums


def _nth(n: int) -> str:
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


def _sums(x: torch.Tensor) -> list[Any]:
    blank = unwritten(x)
    x = x.detach().double().flatten()
    missing = int(blank.sum())
    counts = [missing, int(x.isnan().sum()) - missing, int((x == math.inf).sum()), int((x == -math.inf).sum())]
    kept = torch.where(x.isfinite(), x, 0.0)
    at = torch.arange(1, len(x) + 1, dtype=torch.float64)
    size = kept.norm()
    return counts + [float(f"{v:.6g}") for v in (size, kept @ torch.sin(3 * at), kept @ torch.cos(5 * at * at))]


def _hazard(x: Any) -> bool:
    return isinstance(x, list) and isinstance(x[0], str)


def _of_a_place(x: Any) -> bool:
    """Whether all that is kept of a run is a finding of a place."""
    marks = [zlib.crc32(repr([kind]).encode()) for kind in _PLACES]
    return x.startswith(_PLACES) if isinstance(x, str) else len(x) == _KEPT and x[0] in marks


def _numbers_of(x: Any) -> list[Any]:
    """The sums of the outputs in what is kept of a run, without its marks; where it has nothing else, these."""
    x = x[1:] if _hazard(x) else [] if isinstance(x, str) else x
    return x[_KEPT:] or x if x[2:_KEPT] == [0, 0, 1.0, 0.0, 0.0] else x


def _found(report: Any) -> str:
    findings = [f for f in report.findings if f.severity == "error"] if report is not None else []
    if not findings:
        return ""
    first = findings[0]
    said = re.sub(r"\[[-\d, ]+\], number (\d+),", r"\1", first.message)  # an element by its number alone
    where = re.search(r"(?:element \d+|\d+ bytes \w+ the \w+) of \w+", said)
    return f"{first.kind} {first.block} {first.thread} {where[0] if where else ''}"


def _numbers(text: str, line: int) -> list[int]:
    lines = text.splitlines()
    return [int(n) for n in re.findall(rf"{CHOSEN} == (\d+)", lines[line - 1])[:1]] if line <= len(lines) else []


@contextlib.contextmanager
def explained(module: Callable[[], CudaModule], *trials: Trials, vague: Sequence[str] = ()) -> Iterator[None]:
    """Have a change of a right text that gives all that an answer gives be told first, and below it what was found.

    vague: the diagnoses that say no cause, where others do; findings never do.
    """

    def known(said: str) -> bool:
        return any(row.sentence == said for x in trials for row in x.rows)

    try:
        yield
    except CheckFailed as failed:
        if failed.sentence.startswith(DIVERGENT):
            raise
        found = None
        plain = (*_PLAIN, "deadlock") if vague else _PLAIN  # of a whole kernel no trace is kept
        if vague and failed.diagnosis in _SEEN:
            with contextlib.suppress(CheckFailed):
                found = (failed.diagnosis, said) if (said := mended(trials[0], module().text)) else None
        elif failed.diagnosis not in plain and (not vague or failed.diagnosis in (*vague, *KINDS)):
            with contextlib.suppress(CheckFailed):  # it does not compile as it is looked at
                found = next(filter(None, (x.explain(module()) for x in trials)), None)
                if not (found and known(found[1])) and (said := mended(trials[0], module().text)):
                    found = found[0] if found else failed.diagnosis, said
            beside = (x.beside(module()) for x in trials if found is None and failed.diagnosis in KINDS)
            if said := next(filter(None, beside), ""):
                raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis=failed.diagnosis, case=failed.case) from None
        if found is None:
            raise
        slug, said = found
        if failed.diagnosis in KINDS and not known(said):
            if failed.diagnosis == "uninitialised-local" and said.startswith(_HEDGED):
                raise
            slug = failed.diagnosis
        raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis=slug, case=failed.case) from None


def examined(source: Source | str, *trials: Trials, **options: Any) -> Verdict:
    """`cuda_answer.examine` of a kernel; where it finds no cause, the change of a right text that gives the same."""
    with explained(lambda: trials[0].build(source), *trials, vague=VAGUE):
        return examine(source, **options)
