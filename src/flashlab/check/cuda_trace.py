"""A run by what its warps did at their barriers: how changes that end in a finding are told apart (see cuda_index)."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from flashlab.check.cuda_index import Outputs, Trials, _sums
from flashlab.check.failed import CheckFailed
from flashlab.check.mistakes import weights
from flashlab.cuda import CudaModule
from flashlab.simt import SimtError
from flashlab.simt.sentences import KINDS

# Diagnoses of a whole kernel's numbers that say no cause.
VAGUE = (
    "wrong-value", "nan-everywhere", "low-precision", "wrong-weights", "rows-scaled", "output-scaled", *weights.SLUGS,
)  # fmt: skip
_ACCESS = re.compile(r"\b(?:reads?|writes?|wrote|fills?)\b(?: with \w+)?")  # of a race: which came first
_LONGEST = 200  # characters of a conclusion
# What needs no cause, or is its own.
_TOLD = ("does-not-compile", "wrong-type", "wrong-entry", "no-launch", "launch-failed", "barrier-arguments")
_DONE = ("arrive", "mbarrier-wait", "load", "store", "barrier", "barrier-arrive", "wgmma", "wait", "registers")


def traced(run: Callable[[CudaModule], Outputs], warps: Collection[int] = range(64)) -> Callable[[CudaModule], Any]:
    """A run, with timeline=1, of which is kept: the finding, what some warps of the first block did, and its outputs.

    Of each warp by itself, so that the order in which the emulator runs them does not count.
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
        marks = [zlib.crc32(repr(x).encode()) for x in (errors, did)]
        return [*marks, 0, 0, 1.0, 0.0, 0.0, *(n for x in outputs if not errors for n in _sums(x))]

    return kept


@contextlib.contextmanager
def told_first(module: Callable[[], CudaModule], *trials: Trials, vague: Sequence[str] = ()) -> Iterator[None]:
    """Have a change of the right text that gives all that an answer gives be told first, and below it what was found.

    vague: the diagnoses that say no cause, where others do; findings always are.
    """
    __tracebackhide__ = True
    try:
        yield
    except CheckFailed as failed:
        told = (*_TOLD, "deadlock") if vague else _TOLD  # of a whole kernel no trace is kept
        if failed.diagnosis in told or (vague and failed.diagnosis not in (*vague, *KINDS)):
            raise
        found = None
        with contextlib.suppress(CheckFailed):  # it does not compile as it is looked at
            found = next(filter(None, (x.explain(module()) for x in trials)), None)
        if found is None:
            raise
        slug, said = found
        if failed.diagnosis in KINDS and not any(row.sentence == said for x in trials for row in x.rows):
            if failed.diagnosis == "uninitialised-local":
                raise
            slug = failed.diagnosis
        said = said if len(said) <= _LONGEST else said.partition(". Or: ")[0]
        raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis=slug, case=failed.case) from None
