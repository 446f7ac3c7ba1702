"""Trying a kernel that may be wrong: the emulator looks for what it does, the checker at what it gives.

    examine(step("p8_4_swizzle"))                               # a Verdict
    examine(replaced(step("p8_3_stages"), "load K and V", text))   # with somebody's own lines in a named region

``examine`` raises ``flashlab.check.CheckFailed``: its diagnosis is the emulator's slug ("race", "stage-overwritten"),
or the checker's ("tail-not-masked", "o-not-rescaled"), or "does-not-compile".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlab.check import CheckFailed, verify
from flashlab.check.mistakes.kernels import explain
from flashlab.cuda import CompileError, CudaModule, load_inline
from flashlab.kernels import regions
from flashlab.kernels.series import Step
from flashlab.simt import Counters, Finding, Report, SimtError

# (batch, heads, kv_heads, seq_q, seq_k, causal): ragged tails, several tiles, rows that see no key, grouped heads.
PROBES = ((1, 2, 1, 200, 200, True), (1, 1, 1, 64, 330, False), (2, 1, 1, 70, 24, True))
# Diagnoses that a mistake of a fragment, a lane or a merge may hide behind.
_ROUNDING = ("l-in-low-precision", "o-accumulated-in-low-precision")
_VAGUE = ("wrong-value", "nan-everywhere", "p-columns-exchanged", *_ROUNDING)
_QUOTED = 64  # characters of a line


@dataclass(frozen=True)
class Source:
    """A kernel's text. Lines ``first`` to ``last`` are somebody's own; the rest is a file of the series.

    Attributes:
        text: all of it.
        name: the file's, without ``.cu``.
        first, last: 1-based, inclusive; None if nobody's lines are special.
    """

    text: str
    name: str
    first: int | None = None
    last: int | None = None

    def place(self, line: int) -> str:
        """How a line is called in a sentence: with its number in the learner's text, and what stands there."""
        lines = self.text.splitlines()
        code = lines[line - 1].split("//")[0].strip() if 0 < line <= len(lines) else ""
        code = code if len(code) <= _QUOTED else f"{code[: _QUOTED - 2].rstrip()} …"
        if self.first is not None and self.first <= line <= (self.last or 0):
            where = f"line {line - self.first + 1} of your code"
        else:
            where = f"line {line} of {self.name}.cu" if self.first is not None else f"line {line}"
        return f"{where}, `{code}`," if code else where

    def told(self, finding: Finding) -> str:
        """A finding's sentence, with the lines quoted."""
        sentence = re.sub(r"\bline (\d+)\b", lambda m: self.place(int(m[1])), finding.message)
        return re.sub(r",([,:.;)]| \(|$)", r"\1", sentence)


@dataclass(frozen=True)
class Verdict:
    """A kernel that is right: how many cases, and what the emulator counted on the first of the probes."""

    cases: int
    counters: Counters = field(repr=False)

    @property
    def verdict(self) -> str:
        return f"{self.cases} cases right, nothing found by the emulator"

    def __repr__(self) -> str:
        return f"✓ {self.verdict}"


def source_of(kernel: Step | Source | str) -> Source:
    """A step's file, or a text, as a Source."""
    if isinstance(kernel, Source):
        return kernel
    return Source(kernel.path.read_text(), kernel.name) if isinstance(kernel, Step) else Source(kernel, "kernel")


def region(kernel: Step | Source | str, name: str) -> str:
    """The text of a named region of a kernel (see flashlab.kernels.regions).

    Raises KeyError where there is none; the message has the names there are.
    """
    return regions.region_text(source_of(kernel).text, name)


def replaced(kernel: Step | Source | str, name: str, text: str) -> Source:
    """The kernel with the lines of a named region replaced by ``text``.

    Raises KeyError where there is no such region; the message has the names there are.
    """
    whole = source_of(kernel)
    joined, own = regions.replace(whole.text, name, text)
    return Source(joined, whole.name, own.first, own.last)


def built(
    kernel: Step | Source | str, *, check: bool, head_dim: int = 64, dtype: torch.dtype | None = None, **defines: Any
) -> CudaModule:
    """Compiles it for the emulator. Raises CheckFailed with the compiler's first error."""
    __tracebackhide__ = True
    whole = source_of(kernel)
    try:
        return load_inline(whole.text, backend="emulator", check=check, head_dim=head_dim, dtype=dtype, defines=defines)
    except CompileError as error:
        message = next((x for x in error.log.splitlines() if "error" in x), error.log.splitlines()[0])
        message = re.sub(r"^.*?kernel\.cu:(\d+)(:\d+)?: ", lambda m: f"{whole.place(int(m[1]))} ", message)
        raise CheckFailed(f"it does not compile: {message}", diagnosis="does-not-compile") from None


def probe(module: CudaModule, whole: Source, shape: Sequence[Any] = PROBES[0], **options: Any) -> Report:
    """One run of a check build on random tensors. Raises CheckFailed with the first finding."""
    __tracebackhide__ = True
    batch, heads, kv_heads, seq_q, seq_k, causal = shape
    head_dim = int(options.pop("head_dim", 64))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, h, n, head_dim, generator=generator).half()
        for h, n in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
    )
    case = f"heads={heads}, kv_heads={kv_heads}, seq_q={seq_q}, seq_k={seq_k}{', causal' if causal else ''}"
    try:
        module.forward(q, k, v, causal=causal, **options)
        report = module.report
    except SimtError as error:
        found = getattr(error, "report", None)
        if found is None or not found.findings:
            raise CheckFailed(str(error), diagnosis="launch-failed", case=case) from None
        report = found
    if report.findings:
        # What ended the launch says more than what had been seen before it.
        first = next((f for f in report.findings if f.fatal), report.findings[0])
        raise CheckFailed(whole.told(first), diagnosis=first.kind, case=case)
    return report


def examine(
    kernel: Step | Source | str, *, head_dim: int = 64, fast: bool = True, probes: Sequence[Any] = PROBES,
    max_seq: int = 300, sms: int = 132, **defines: Any,
) -> Verdict:  # fmt: skip
    """Runs a kernel of the series' interface (``forward`` and ``workspace_floats``) in the emulator.

    First a check build on a few shapes: races, copies not waited for, addresses out of bounds. Then the checker's
    cases: causal, grouped heads, ragged and empty lengths, strides, nasty scores.

    Args:
        kernel: a step, a text, or ``replaced``'s result.
        head_dim: it is compiled for.
        fast: a fast build for the checker's cases; False saves its compilation and takes the check build.
        probes: shapes for the check build, as in PROBES.
        max_seq: the longest of the checker's cases.
        sms: multiprocessors that the kernel is told the GPU has.
        defines: macros.

    Raises:
        CheckFailed: with the finding, or the checker's diagnosis.
    """
    __tracebackhide__ = True
    whole = source_of(kernel)
    module = built(whole, check=True, head_dim=head_dim, **defines)
    reports = [probe(module, whole, shape, head_dim=head_dim, sms=sms) for shape in probes]
    runs = built(whole, check=False, head_dim=head_dim, **defines) if fast else module

    def forward(q, k, v, *, causal, scale):
        __tracebackhide__ = True
        try:
            o, lse = runs.forward(q.cpu(), k.cpu(), v.cpu(), causal=causal, scale=scale, sms=sms)
        except SimtError as error:
            raise _failed(error, whole) from None
        if runs.report is not None and runs.report.findings:
            raise CheckFailed(whole.told(runs.report.findings[0]), diagnosis=runs.report.findings[0].kind)
        return o.to(q.device), lse.to(q.device)

    try:
        checked = verify(forward, causal=True, gqa=True, head_dims=(head_dim,), max_seq=max_seq)
    except CheckFailed as failed:
        # The emulator's findings stand as they are; of the numbers, fragments and lanes may tell more.
        known = explain(forward, head_dim) if failed.diagnosis in _VAGUE else None
        if known is None:
            raise
        raise CheckFailed(known[1], diagnosis=known[0], case=failed.case) from None
    return Verdict(checked.cases + len(reports), reports[0].counters)


def _failed(error: SimtError, whole: Source) -> CheckFailed:
    report = getattr(error, "report", None)
    if report is None or not report.findings:
        return CheckFailed(str(error), diagnosis="launch-failed")
    first = next((f for f in report.findings if f.fatal), report.findings[0])
    return CheckFailed(whole.told(first), diagnosis=first.kind)
