"""A learner's CUDA, tried: the emulator looks for what it does, the checker at what it gives, and one sentence says it.

    Answer(text, "add_bias").run(x, bias, y, rows, cols, case="rows=4")    # any extern "C" function; its counters
    examine(step("p8_4_swizzle"))                               # a Verdict
    examine(replaced(step("p8_3_stages"), "load K and V", text))   # with somebody's own lines in a named region
    examine(whole_kernel(text, "kernel"))                       # from an empty page

Whatever goes wrong is raised as ``flashlab.check.CheckFailed``: its diagnosis is the emulator's slug ("race",
"stage-overwritten"), or the checker's ("tail-not-masked", "o-not-rescaled"), or "does-not-compile".
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect, expect_close, verification, verify
from flashlab.check.cases import Case, case_list
from flashlab.check.diagnose import RIGHT_AS_WRITTEN
from flashlab.check.mistakes import weights
from flashlab.check.mistakes.kernels import explain
from flashlab.check.poison import MarkedEmpty, carried, guarded, unwritten
from flashlab.check.running import Blank, compiler_can_be_asked, compiler_warned
from flashlab.check.symptoms import watched
from flashlab.cuda import CompileError, CudaModule, load_inline
from flashlab.cuda.sources import takes_problem
from flashlab.kernels import regions
from flashlab.kernels.problem import ELEMENTS
from flashlab.kernels.series import FOLDER as KERNELS
from flashlab.kernels.series import Step
from flashlab.simt import Counters, Finding, Report, SimtError
from flashlab.simt.conversions import conversions
from flashlab.simt.source import blank_comments, entries, matching

HOLE = "YOUR CODE HERE"

# (batch, heads, kv_heads, seq_q, seq_k, causal): ragged tails, several tiles, rows that see no key, grouped heads.
PROBES = ((1, 2, 1, 200, 200, True), (1, 1, 1, 64, 330, False), (2, 1, 1, 70, 24, True))
# Diagnoses that a mistake of a fragment, a lane or a merge may hide behind.
_ROUNDING = ("l-in-low-precision", "o-accumulated-in-low-precision")
VAGUE = (
    "wrong-value", "nan-everywhere", "output-scaled", "rows-scaled", "p-columns-exchanged", "low-precision",
    "wrong-weights", "all-zero", "rows-not-written", *_ROUNDING, *weights.SLUGS,
)  # fmt: skip
_QUOTED = 64  # characters of a line

# Causal, more queries than keys: a warp's rows with a key and without one. In the last one, a row may also see keys of
# one tile and none of the next.
_FEW_KEYS = tuple(
    Case("rows that see no key beside rows that do, in one warp", seq_q, seq_k, causal=True)
    for seq_q, seq_k in ((70, 64), (70, 24), (140, 130))
)
# By how much a row's maximum moves from one tile to the next, in powers of two. P = 2^16 is too large for fp16.
_MOVES = (9, 12, 15, 16.25, 17, 18, 20)
_MOVED_AT = 128  # the key from which the scores are higher, or lower: a multiple of any tile


def text_of(answer: Any, name: str) -> str:
    """The answer called ``name``, if it is CUDA text that has been filled in.

    Raises:
        Blank: a mark is left.
        CheckFailed: it is no text.
    """
    said = f"{name} should be the CUDA text, a string, not a {type(answer).__name__}"
    expect(isinstance(answer, str), said, diagnosis="wrong-type")
    if HOLE in answer:
        line = answer[: answer.index(HOLE)].lstrip("\n").count("\n") + 1
        raise Blank(f"`// {HOLE}` still stands in line {line} of {name}: delete it when your code is there")
    return answer


def lines_of(answer: Any, name: str) -> str:
    """The same of lines that may all have been deleted, which is a blank too."""
    text = text_of(answer, name)
    if not text.strip():
        raise NotImplementedError
    return text


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Source:
    """A kernel's text. Lines ``first`` to ``last`` are somebody's own; the rest is a file of the series.

    Attributes:
        text: all of it.
        name: the file's, without ``.cu``.
        first, last: 1-based, inclusive; None if nobody's lines are special.
        called: what each line is called, where it is put together of pieces.
    """

    text: str
    name: str
    first: int | None = None
    last: int | None = None
    called: tuple[str, ...] = ()

    def own(self, line: int) -> bool:
        """Whether it is one of somebody's own lines."""
        return self.first is not None and self.first <= line <= (self.last or 0)

    def place(self, line: int) -> str:
        """How a line is called in a sentence: with its number in the learner's text, and what stands there."""
        lines = self.text.splitlines()
        code = lines[line - 1].split("//")[0].strip() if 0 < line <= len(lines) else ""
        code = code if len(code) <= _QUOTED else f"{code[: _QUOTED - 2].rstrip()} …"
        if self.called and code:
            where = self.called[line - 1]
        elif self.own(line):
            where = f"line {line - (self.first or 1) + 1} of your code"
        else:
            where = f"line {line} of {self.name}.cu" if self.first is not None else f"line {line}"
        return f"{where}, `{code}`," if code else where

    def told(self, finding: Finding) -> str:
        """A finding's sentence, with the lines quoted. Who called a line is left out, unless it was the learner."""

        def caller(m: re.Match[str]) -> str:
            return m[0] if self.first is None or self.own(int(m[1])) else ""

        quoted: set[str] = set()

        def place(m: re.Match[str]) -> str:  # a line is quoted once
            told = self.place(int(m[1]))
            again = told in quoted
            quoted.add(told)
            return told.split(",")[0] if again else told

        message = re.sub(r" \(called from line (\d+)\)", caller, finding.message)
        sentence = re.sub(r"\bline (\d+)\b", place, message)
        return re.sub(r"`,([,:.;)]| \(|$)", r"`\1", sentence)  # behind a quotation, not in it


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


# ---- a kernel from an empty page -----------------------------------------------------------------------------------
SIGNATURE = 'extern "C" int forward(const Problem* p, void* stream)'


def whole_kernel(answer: Any, name: str) -> Source:
    """A learner's whole file, if it has the one function that is asked for.

    Raises:
        NotImplementedError: it is still empty.
        CheckFailed: it is no text, or has no ``forward`` of that signature.
    """
    text = lines_of(answer, name)
    forward = entries(text).get("forward")
    fits = forward is not None and len(forward.parameters) == 2 and takes_problem(forward) and forward.returns == "int"
    expect(fits, f"the text should define `{SIGNATURE}`", diagnosis="wrong-entry")
    return Source(text, name, 1, len(text.splitlines()))


def expect_defined(text: str, *names: str) -> None:
    """Raises CheckFailed where a function that the text was given with is gone."""
    for name in names:
        there = re.search(rf"\b{name}\s*\(", text)
        expect(there, f"the text should still define `{name}`", diagnosis="wrong-entry")


def expect_launched(report: Report) -> None:
    """Raises CheckFailed where a call launched nothing: its output is what was in memory before."""
    expect(bool(report.launches), "forward returned, but it launched no kernel", diagnosis="no-launch")


_RACES = ("race", "global-race", "stage-overwritten")
DIVERGENT = "some threads wait at the barrier"
_CAUSES = ("wgmma-registers",)  # who does not wait for the sums releases their stage too early as well


# ---- what is wrong with it, as a sentence --------------------------------------------------------------------------
def failure(findings: Sequence[Finding], whole: Source, case: str | None = None) -> CheckFailed:
    """The one finding that is told, of those that a run made.

    First what ended the launch: nothing came after it. Then a race: what another thread has not written yet looks
    uninitialised, and a stage that is overwritten looks as if its copy had not been waited for; these are consequences
    of the race and not its cause. So are an arrival too many, of a tile that was not waited for, and an address out of
    bounds, of an index that was read from shared memory too early. Then the rest, in the order it was seen; last a
    launch in another stream, which does no harm here.
    """

    misread = any(f.kind in ("race", "uninitialised-shared") for f in findings)

    def rank(f: Finding) -> tuple[bool, ...]:
        follows = f.kind == "mbarrier-arrivals" or (f.kind == "global-out-of-bounds" and misread)
        ended = f.fatal and not follows
        causes = f.kind not in _CAUSES, f.kind not in _RACES
        return f.kind == "wrong-stream", not ended, f.severity != "error", *causes, follows

    first = min(findings, key=rank)
    sentence = whole.told(first)
    if first.kind == "uninitialised-shared":
        # A plain load is noted: a store to the same place that no barrier keeps apart from it would be a race.
        unsure = "ldmatrix" in sentence or any(
            f.kind in (*_RACES, "read-before-wait", "exited-threads") for f in findings
        )
        sentence += (
            "; if another thread writes it, a barrier between the two is missing, or that thread has returned before"
            if unsure
            else "; no thread does so up to the next barrier: is an index another one, here or where it should be "
            "filled, or does a loop, or what it may not exceed, leave that out?"
        )
    skipped = next((f for f in findings if f.kind == "exited-threads"), None)
    if first.kind in _RACES and skipped is not None:  # who has gone past a barrier races with those who wait in it
        at = re.search(r"\bline (\d+)", skipped.message)
        where = f" in {whole.place(int(at[1])).split(',')[0]}" if at else ""
        said = f"{DIVERGENT}{where} when others have ended: it may not stand in a branch that some do not take"
        sentence = f"{said}\n{sentence}"
    own = "\n".join(whole.text.splitlines()[(whole.first or 1) - 1 : whole.last])
    met = re.search(r"\bline (\d+)", skipped.message) if first.kind in _RACES and skipped is not None else None
    waits = "in __syncthreads" in sentence or (met is not None and "__syncthreads" in whole.place(int(met[1])))
    if waits and "consumer" in whole.text and "__syncthreads" in blank_comments(own):
        said = "__syncthreads counts all threads of the block, and some never come to this one: a consumer's threads "
        sentence = f"{said}meet at a named barrier\n{sentence}"
    if first.kind == "proxy-fence" and "fence_proxy_async" in blank_comments(own):
        sentence += ". The fence that there is does not order this store: a fence is for what its own thread has "
        sentence += "stored before it, or has been shown by a barrier before it. So each thread that stores fences "
        sentence += "after its last store, and then comes the barrier"
    return CheckFailed(sentence, diagnosis=first.kind, case=case)


def does_not_compile(error: CompileError, whole: Source) -> CheckFailed:
    """The compiler's first error, with the learner's line."""
    if not error.messages:
        said = next((line for line in error.log.splitlines() if line.strip()), str(error))
    else:
        first = error.messages[0]
        own = first.line is not None and first.file == f"{whole.name}.cu"
        said = f"{whole.place(first.line or 0) if own else Path(first.file or '').name} error: {first.text}"
    return CheckFailed(f"it does not compile: {said}", diagnosis="does-not-compile")


def built(
    kernel: Step | Source | str, *, check: bool, head_dim: int | None = None, dtype: torch.dtype | None = None,
    **defines: Any,
) -> CudaModule:  # fmt: skip
    """Compiles a source for the emulator. Raises CheckFailed with the compiler's first error."""
    whole = source_of(kernel)
    source = kernel if isinstance(kernel, Step) else whole.text
    try:
        module = load_inline(source, name=f"{whole.name}.cu", backend="emulator", check=check, head_dim=head_dim,
                             dtype=dtype, defines=defines)  # fmt: skip
    except CompileError as error:
        raise does_not_compile(error, whole) from None
    _heed_warnings(module.warnings, whole)
    macros = {"HEAD_DIM": head_dim or 64, "ELEMENT": ELEMENTS[dtype or torch.float16]} | defines
    compiler_can_be_asked(whole.text, partial(_conversions, whole, macros))
    return module


def _conversions(whole: Source, macros: dict[str, Any], passed: bool) -> list[str]:
    """Offsets of which 32 bits are kept; where values are wrong, also fractions that are cut off."""
    own = whole.text.splitlines()[(whole.first or 1) - 1 : whole.last or 0]
    if whole.first is None or (passed and not any("stride" in line for line in own)):
        return []
    told = []
    for line, kind, expression in conversions(
        whole.text, name=f"{whole.name}.cu", directory=KERNELS, defines=macros, include_dirs=[KERNELS]
    ):
        if not whole.own(line) or (kind == "offset" and "smem" in expression):  # shared memory is small
            continue
        if kind == "offset":
            told.append(
                f"{whole.place(line)} computes `{expression}` in 64 bits and keeps 32 of them: in a tensor of more "
                "than 2^31 elements it wraps around"
            )
        elif not passed:
            told.append(f"{whole.place(line)} makes an integer of `{expression}`, and its fraction is lost")
    return told


# ---- what nobody has set ---------------------------------------------------------------------------------------------
_DECLARED = re.compile(r"(?:^|(?<=[;{}]))[ \t]*(?:T|float[234]?|half2?|__half2?|__nv_bfloat162?)\s+(\w[^;]*);", re.M)
_FILL = (
    "template <class T> inline void flashlab_unset(T& x) { for (unsigned i = 0; i + 2 <= sizeof(T); i += 2) ((unsigned "
    "short*)&x)[i / 2] = 0x7fc0; } "
)


NOT_SET = (
    "right in the emulator, but a local variable is read before it is set: with NaN in all that are declared without a "
    "value"
)


def with_nan(text: str) -> str:
    """CUDA text with NaN in every local variable that is declared without a value; lines keep their numbers.

    Not in members of a struct.
    """
    code = blank_comments(text)
    members = [
        range(m.end(), matching(code, m.end() - 1)) for m in re.finditer(r"\b(?:struct|union|class)\b[^;{}()]*{", code)
    ]
    found = []
    for m in _DECLARED.finditer(code):
        local = code[: m.start(1)].count("{") > code[: m.start(1)].count("}")
        if local and not any(m.start(1) in body for body in members):
            found.append((m.end(), "".join(f" flashlab_unset({name});" for name in _without_value(m[1]))))
    for at, fill in reversed(found):
        text = text[:at] + fill + text[at:]
    return _FILL + text if found else text


def _without_value(declared: str) -> list[str]:
    """The names in "a[4], b = f(1, 2), c" that get no value: a and c."""
    before = ""
    while before != declared:  # what is in brackets has commas of its own
        before, declared = declared, re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", declared)
    return [name for part in declared.split(",") if re.fullmatch(r"\w+", name := part.strip())]


def expect_set(whole: Source, *, head_dim: int = 64, dtype: torch.dtype = torch.float16) -> None:
    """Raises CheckFailed where a result depends on what was in a local variable before the kernel began.

    Of a kernel that is right. g++ fills what is not set with a finite number, and a finite number times a correction
    of 0 is 0; on a GPU a register may hold NaN.
    """
    filled = with_nan(whole.text)
    if filled == whole.text:
        return
    try:
        module = built(replace(whole, text=filled), check=False, head_dim=head_dim, dtype=dtype)
    except CheckFailed:  # a declaration that was not understood
        return
    outputs = module.forward(*normal(3, 1, 1, 200, head_dim).to(dtype), causal=True, echo=False)
    for name, x in zip(("o", "lse"), outputs, strict=True):
        at = x.isnan().nonzero()[:1].flatten().tolist()
        said = f"{NOT_SET}, {name} is NaN at {at}. On a GPU a register may hold anything"
        case = f"{spelled(dtype)}, seq_q=200, seq_k=200, causal"
        expect(not at, said, diagnosis="uninitialised-local", case=case)


# ---- tensors of more than 2^31 elements ------------------------------------------------------------------------------
# (axis, its length, how far apart it is laid out, words): the last of it begins beyond 2^31 elements.
_FAR_APART = ((2, 129, 2**24 + 64, "row"), (1, 3, 2**30 + 128, "head"), (0, 3, 2**30 + 128, "batch"))


def expect_wide(whole: Source, *, head_dim: int = 64, dtype: torch.dtype = torch.float16) -> None:
    """Raises CheckFailed where a right kernel is wrong in a tensor of more than 2^31 elements.

    Each of q, k, v and o in turn has its rows, heads or batches far apart, in addresses that have no memory behind
    them. Nothing is said where the machine has no room for so many addresses.
    """
    module = built(whole, check=True, head_dim=head_dim, dtype=dtype)
    for axis, length, apart, name in _FAR_APART:
        shape = [1, 1, 16, head_dim]
        shape[axis] = length
        values = [*normal(3, *shape).to(dtype)]
        want = module.forward(*values, causal=False, echo=False)[0]
        for far in range(4):
            case = f"{'qkvo'[far]} with its {name}s {apart} elements apart, seq_q={shape[2]}, seq_k={shape[2]}"
            given = [*values, torch.zeros(shape, dtype=dtype)]
            try:
                given[far] = _laid_out(given[far], axis, apart)
                o = _far_run(module, whole, case, given)
            except (MemoryError, OSError):
                return
            except CheckFailed as failed:
                raise _of_32_bits("qkvo"[far], name, length, case, f": {failed.sentence}") from None
            if not torch.equal(o, want):
                raise _of_32_bits("qkvo"[far], name, length, case, ", and o is another then")


def _far_run(module: CudaModule, whole: Source, case: str, given: Sequence[torch.Tensor]) -> torch.Tensor:
    *operands, out = given
    return ran(module, whole, case, lambda: module.forward(*operands, causal=False, out=out, echo=False))[0].clone(
        memory_format=torch.contiguous_format
    )


def _laid_out(x: torch.Tensor, axis: int, apart: int) -> torch.Tensor:
    """A copy of x with so many elements from one row, head or batch to the next; pages between have no memory."""
    strides = list(x.contiguous().stride())
    strides[axis] = apart
    size = (1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))) * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    buffer = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=x.dtype)
    return buffer.as_strided(x.shape, strides).copy_(x)


def _of_32_bits(tensor: str, name: str, length: int, case: str, what: str) -> CheckFailed:
    said = f"right in small tensors, but not where {name} {length - 1} of {tensor} begins more than 2^31 elements "
    said += f"behind the first{what}. Some offset is computed, or kept, in 32 bits: the strides are int64_t, and so "
    said += "has to be "
    return CheckFailed(f"{said}whatever they are multiplied to", diagnosis="offset-in-32-bits", case=case)


# Of a right kernel too. What is left is worth a look: a variable that is used before it is set, a missing return.
_NOISE = ("sign-compare", "unused", "comment", "unknown-pragmas", "reorder", "attributes", "misleading-indentation")


def _heed_warnings(said: str, whole: Source) -> None:
    """Note the warnings about somebody's own lines, but for those that are noise."""
    for m in re.finditer(rf"^{re.escape(whole.name)}\.cu:(\d+): (.*?)(?: \[-W([\w=-]+)\])?$", said, re.M):
        if whole.own(int(m[1])) and not (m[3] or "").startswith(_NOISE) and "parentheses around arith" not in m[2]:
            compiler_warned(f"{whole.place(int(m[1]))} {m[2]}")


def ran(module: CudaModule, whole: Source, case: str | None, call: Callable[[], Any]) -> Any:
    """call(), which runs something of the module. Raises CheckFailed with what the emulator found, but for warnings."""
    try:
        result = call()
    except CompileError as error:  # of another head_dim
        raise does_not_compile(error, whole) from None
    except SimtError as error:
        if error.report is None or not error.report.findings:
            raise CheckFailed(str(error), diagnosis="launch-failed", case=case) from None
        raise failure(error.report.findings, whole, case) from None
    if module.report is not None and not module.report.ok:
        if (seen := watched()) is None:
            raise failure(module.report.findings, whole, case)
        seen.remark(_hazards(module.report))
    return result


def _hazards(report: Report) -> str:
    """Findings without their kinds and lines: all that a bug hunt tells before it has begun."""
    found = [f for f in report.findings if f.severity == "error"]
    first = next((f for f in found if f.other_thread is not None), found[0])
    who = f"threads {first.other_thread[0]} and {first.thread[0]}" if first.other_thread and first.thread else (
        f"thread {first.thread[0]}" if first.thread else "the launch"
    )  # fmt: skip
    return (
        f"the check build, which sees every access to memory, objects {sum(f.times for f in found)} times, first to "
        f"{who} of block {first.block[0]}; the numbers above are those of one order of the threads"
    )


# ---- any extern "C" function ---------------------------------------------------------------------------------------
class Answer:
    """A learner's whole source with an extern "C" function `run`: built when it is run, once for each set of macros.

    Args:
        answer: what the learner gave; see ``text_of`` for what it raises.
        name: of the answer, for sentences.
    """

    def __init__(self, answer: Any, name: str):
        text = text_of(answer, name)
        self.whole = Source(text, name, 1, len(text.splitlines()))
        self._modules: dict[Any, CudaModule] = {}

    def module(self, *, check: bool, **defines: Any) -> CudaModule:
        """The source, built. Raises CheckFailed: it does not compile, or its function is gone."""
        key = (check, *sorted(defines.items()))
        if key not in self._modules:
            said = 'the source has lost its extern "C" function `run`'
            expect("run" in entries(self.whole.text), said, diagnosis="wrong-entry")
            self._modules[key] = built(self.whole, check=check, **defines)
        return self._modules[key]

    def run(
        self, *arguments: Any, case: str, check: bool, dtype: torch.dtype | None = None, **defines: Any
    ) -> Counters:
        """Calls the function and returns what the emulator counted.

        Args:
            arguments: of the function; the stream is left out.
            case: what it is run on, for the sentence.
            check: the build that sees every access, or the fast one.
            dtype: ELEMENT, where the source has one.
            defines: further macros.

        Raises:
            CheckFailed: with the compiler's error, or what the emulator found.
        """
        module = self.module(check=check, **({"ELEMENT": ELEMENTS[dtype]} if dtype else {}), **defines)
        try:
            ran(module, self.whole, case, lambda: module.launch("run", *arguments, echo=False))
        except TypeError as error:
            sentence = f"the parameters of `run` should stay as they are: {error}"
            raise CheckFailed(sentence, diagnosis="wrong-entry") from None
        assert module.report is not None, "every run in the emulator leaves a report"
        return module.report.counters


# ---- a kernel of the series ----------------------------------------------------------------------------------------
def probe(
    module: CudaModule, whole: Source, shape: Sequence[Any] = PROBES[0], *, head_dim: int = 64,
    dtype: torch.dtype = torch.float16, **options: Any,
) -> Report:  # fmt: skip
    """One run of a check build on random tensors. Raises CheckFailed with what was found."""
    batch, heads, kv_heads, seq_q, seq_k, causal = shape
    sizes = (heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)
    q, k, v = (normal(batch, *size, head_dim, seed=i).to(dtype) for i, size in enumerate(sizes))
    case = f"heads={heads}, kv_heads={kv_heads}, seq_q={seq_q}, seq_k={seq_k}{', causal' if causal else ''}"
    ran(module, whole, case, lambda: module.forward(q, k, v, causal=causal, echo=False, **options))
    assert module.report is not None, "every run in the emulator leaves a report"
    return module.report


def examine(
    kernel: Step | Source | str, *, head_dim: int = 64, dtype: torch.dtype = torch.float16, fast: bool = True,
    probes: Sequence[Any] = PROBES, max_seq: int = 300, max_tile: int = 128, sms: int = 132, **defines: Any,
) -> Verdict:  # fmt: skip
    """Runs a kernel of the series' interface (``forward`` and ``workspace_floats``) in the emulator.

    First a check build on a few shapes: races, copies not waited for, addresses out of bounds. Then the checker's
    cases: causal, grouped heads, ragged and empty lengths, strides, nasty scores.

    Args:
        kernel: a step, a text, or ``replaced``'s result.
        head_dim, dtype: it is compiled for.
        fast: a fast build for the checker's cases; False saves its compilation and takes the check build.
        probes: shapes for the check build, as in PROBES.
        max_seq, max_tile: the longest of the checker's cases, and the largest tile whose edges they have.
        sms: multiprocessors that the kernel is told the GPU has.
        defines: macros.

    Raises:
        CheckFailed: with the finding, or the checker's diagnosis.
    """
    try:
        return _examined(kernel, head_dim, dtype, fast, probes, max_seq, max_tile, sms, **defines)
    except CheckFailed as failed:
        if failed.diagnosis not in ("global-out-of-bounds", "strides-ignored") or watched() is not None:
            raise
        for slug, look in (("wrong-stride", _by_layouts), ("wrong-kv-head", _by_heads)):
            if (more := look(failed.sentence, kernel, head_dim, dtype, sms, **defines)) is not None:
                said = f"{more[0].lower()}{more[1:]}\n{failed.sentence}"
                raise CheckFailed(said, diagnosis=slug, case=failed.case) from None
        raise


def _by_layouts(
    said: str, kernel: Step | Source | str, head_dim: int, dtype: torch.dtype, sms: int, **defines: Any
) -> str | None:
    """Which tensors' strides are taken for each other, told by the layouts that are right and those that are not.

    Each of q, k and v is dense or has its rows twice as far apart; o is dense.
    """
    whole, values = source_of(kernel), normal(3, 2, 2, 40, head_dim).to(dtype)
    module = built(kernel, check=False, head_dim=head_dim, dtype=dtype, **defines)
    want, right = reference.attention(*values)[0], {}
    for apart in itertools.product((False, True), repeat=3):
        layouts = ["rows apart" if far else "contiguous" for far in apart]
        given = [guarded(x, layout, x.device) for x, layout in zip(values, layouts, strict=True)]
        right[apart] = False
        with contextlib.suppress(CheckFailed):
            o = ran(module, whole, None, partial(module.forward, *given, sms=sms, echo=False))[0]
            right[apart] = bool(((o.double() - want).abs() < 0.03).all())
    if not right[False, False, False] or all(right.values()):
        return None
    if all(ok != apart[0] for apart, ok in right.items()):
        owner = next((x for x in ("q", "o") if f" of {x} (shape" in said), "one of the two")
        same = "It is right where q and o have the same strides, and wrong where not"
        return f"{same}: {owner} is addressed with the other's"
    for i, name in ((1, "k"), (2, "v")):
        if all(ok != apart[i] for apart, ok in right.items()):
            return (
                f"It is right where {name} is dense, and wrong where its rows lie further apart: are its strides used?"
            )
    for i, j in itertools.combinations(range(3), 2):
        if all(ok == (apart[i] == apart[j]) for apart, ok in right.items()):
            same = f"It is right where {'qkv'[i]} and {'qkv'[j]} have the same strides, and wrong where not"
            return f"{same}: one of them is addressed with the other's"
    return None


# (batch, heads, kv_heads): one of each, several batches, several heads, grouped heads in several ways.
_GROUPS = ((1, 1, 1), (2, 1, 1), (1, 3, 3), (1, 2, 1), (1, 6, 3), (1, 6, 2), (2, 2, 2), (2, 4, 2))


def _by_heads(
    said: str, kernel: Step | Source | str, head_dim: int, dtype: torch.dtype, sms: int, **defines: Any
) -> str | None:
    """Where some numbers of heads are right and others are not: which, and whose K and V a head of Q has used.

    V is one number per head, so O says whose V it is.
    """
    if not re.search(r" of [kv] \(shape", said):
        return None
    whole = source_of(kernel)
    module = built(kernel, check=False, head_dim=head_dim, dtype=dtype, **defines)
    wrong: dict[tuple[int, int, int], str] = {}  # and what the heads of Q have used
    for batch, heads, kv_heads in _GROUPS:
        q, k = (torch.zeros(batch, h, 40, head_dim, dtype=dtype) for h in (heads, kv_heads))
        number = torch.arange(float(batch * kv_heads)).reshape(batch, kv_heads)
        v = number[..., None, None].expand(batch, kv_heads, 40, head_dim).to(dtype).contiguous()
        want = (number.repeat_interleave(heads // kv_heads, 1)).flatten().tolist()
        try:
            o = ran(module, whole, None, partial(module.forward, q, k, v, sms=sms, echo=False))[0]
        except CheckFailed:
            wrong[batch, heads, kv_heads] = ""
            continue
        got = o.float().round()
        if (got - o.float()).abs().max() > 0.02 or not torch.equal(got, got[..., :1, :1].expand_as(got)):
            return None  # not one head's values for one head
        if (used := got[..., 0, 0].flatten().tolist()) != want:
            mine, right = (", ".join(f"{x:g}" for x in numbers) for numbers in (used, want))
            wrong[batch, heads, kv_heads] = f"heads {mine} of K and V, and should use {right}"
    if (1, 1, 1) in wrong or not wrong:
        return None
    for (batch, heads, kv_heads), used_heads in wrong.items():
        if used_heads and batch == 1:
            return f"With heads={heads}, kv_heads={kv_heads} the heads of Q use {used_heads}"
    if all(batch > 1 for batch, _, _ in wrong):
        return "It is right with one batch: is the batch counted twice, in the number of the head of K and V too?"
    if all(heads != kv_heads for _, heads, kv_heads in wrong):
        return "It is right with as many heads of K as of Q: which head of K and V does the last head of Q take?"
    return None


def _examined(
    kernel: Step | Source | str, head_dim: int, dtype: torch.dtype, fast: bool, probes: Sequence[Any], max_seq: int,
    max_tile: int, sms: int, **defines: Any,
) -> Verdict:  # fmt: skip
    whole = source_of(kernel)
    variant: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype}
    module = built(kernel, check=True, **variant, **defines)
    reports = [probe(module, whole, shape, sms=sms, **variant) for shape in probes]
    runs = built(kernel, check=False, **variant, **defines) if fast else module

    def forward(q, k, v, *, causal, scale):
        given, options = [carried(x, "cpu") for x in (q, k, v)], {"causal": causal, "scale": scale, "sms": sms}
        o, lse = ran(runs, whole, None, lambda: runs.forward(*given, **options, echo=False))
        return o.to(q.device), lse.to(q.device)

    try:
        checked = verify(
            forward, causal=True, gqa=True, dtypes=(dtype,), head_dims=(head_dim,), max_seq=max_seq, max_tile=max_tile
        )
    except CheckFailed as failed:
        # The emulator's findings stand as they are; of the numbers, fragments and lanes may tell more.
        vague = failed.diagnosis in VAGUE and dtype != torch.float32
        if failed.diagnosis == "no-max-subtraction":
            _expect_in_range(forward, head_dim, dtype)
        if failed.diagnosis == "rows-not-written" and RIGHT_AS_WRITTEN in failed.sentence:
            raise _rows_twice(failed, module, whole, head_dim, dtype, sms) from None
        if failed.diagnosis == "low-precision":  # a key too few in a row's many may look like a rounding
            _expect_last_key(forward, head_dim, dtype)
        known = explain(forward, head_dim, partial(_simpler, forward, head_dim, dtype, max_tile)) if vague else None
        if known is None or (known[0] == "wrong-with-many-keys" and failed.diagnosis in weights.SLUGS):
            raise _honest(failed) from None
        raise CheckFailed(known[1], diagnosis=known[0], case=failed.case) from None
    _expect_last_key(forward, head_dim, dtype)
    _expect_few_keys(forward, head_dim, dtype)
    _expect_moving_maxima(forward, head_dim, dtype)
    _expect_any_scale(forward, head_dim, dtype)
    return Verdict(checked.cases + len(reports), reports[0].counters)


def _simpler(forward: Callable[..., Any], head_dim: int, dtype: torch.dtype, max_tile: int) -> tuple[str, str] | None:
    """The slug and the sentence of what is wrong with one head and no mask, where a cause of that is known."""
    options: dict[str, Any] = {"dtypes": (dtype,), "head_dims": (head_dim,), "batched": False, "strided": False}
    every = (replace(x, seq_q=min(x.seq_q, 16)) for x in case_list(max_seq=300, max_tile=max_tile, **options))
    cases = [*{(x.content, x.scale, x.seq_k % 16 == 0, x.seq_k < 16): x for x in every}.values()]  # one of each kind
    try:
        verification.run(lambda case, *qkv: forward(*qkv, causal=False, scale=case.softmax_scale), cases)
    except CheckFailed as failed:
        if failed.diagnosis not in (*VAGUE, "no-max-subtraction"):
            return failed.diagnosis, f"with one head and no mask: {_honest(failed).sentence}"
    return None


def expect_variant(whole: Source, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raises CheckFailed where a kernel that is right as it was compiled, in float16, is not with these."""
    q, (k, v) = normal(1, 2, 77, head_dim, seed=7), normal(2, 1, 2, 200, head_dim, seed=8)
    q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
    q[..., ::2, 0], k[..., :100, 0] = -math.sqrt(head_dim), 12.0  # maxima move far, whatever the way
    case = f"{spelled(dtype)}, head_dim={head_dim}, seq_q=77, seq_k=200, causal"

    def compared(dtype: torch.dtype) -> None:
        given, module = [x.to(dtype) for x in (q, k, v)], built(whole, check=False, head_dim=head_dim, dtype=dtype)
        o, lse = ran(module, whole, case, lambda: module.forward(*given, causal=True, echo=False))
        want, want_lse = reference.attention(*given, causal=True)
        # Rounding of P and of the output, to 8 bits each.
        expect_close(o, want, what="o", tol=2e-2, case=case)
        expect_close(lse, want_lse, what="lse", tol=1e-4, case=case)

    try:
        compared(dtype)
    except CheckFailed as failed:
        raise of_a_variant(failed, head_dim, lambda: compared(torch.float16)) from None


def expect_any_base(whole: Source) -> None:
    """Raises CheckFailed where shared memory is addressed as if it began at 0, which on a GPU it does not."""
    before = "\n__global__ void flashlab_before() { __shared__ volatile char first[1024]; first[threadIdx.x] = 0; }\n"
    q, k, v = normal(3, 1, 1, 150, 64, seed=9).half()
    try:
        module = built(replace(whole, text=whole.text + before), check=False)
        o, _ = ran(module, whole, None, lambda: module.forward(q, k, v, echo=False))
        expect_close(o, reference.attention(q, k, v)[0], what="o", tol=4e-3)
    except CheckFailed as failed:
        said = "right where dynamic shared memory begins at address 0, and wrong where it does not, as on a GPU: "
        said += f"smem_u32 says where it is; is each address made of that? ({failed})"
        raise CheckFailed(said, diagnosis="shared-at-0", case="seq_q=seq_k=150") from None


def of_a_variant(failed: CheckFailed, head_dim: int, in_fp16: Callable[[], Any]) -> CheckFailed:
    """What fails in bf16 with this head_dim, and is right in fp16 with the other: which of the two is it?"""
    case = failed.case or f"bfloat16, head_dim={head_dim}"
    try:
        in_fp16()
    except CheckFailed as again:
        if failed.diagnosis == "does-not-compile" and again.diagnosis != failed.diagnosis:
            return failed
        sentence = f"right with head_dim={192 - head_dim}, wrong with {head_dim}, in either dtype ({failed}): is "
        sentence += f"there a number that should follow HEAD_DIM, {192 - head_dim}, or {24 - head_dim // 8} for "
        sentence += f"HEAD_DIM / 8, or {12 - head_dim // 16} for HEAD_DIM / 16, or a name for another that is the "
        sentence += f"same with {192 - head_dim}?"
        return CheckFailed(sentence, diagnosis=f"head-dim-{192 - head_dim}-alone", case=case)
    sentence = f"wrong in bfloat16, the same case is right in float16 ({failed}): is T used everywhere, as in "
    sentence += "pack<T>, or __half somewhere?"
    return CheckFailed(sentence, diagnosis="fp16-alone", case=case)


WALKED = 330  # keys: several tiles of any size, and the last one is not full


def walk(whole: Source) -> list[str] | None:
    """The words that a kernel prints for one block of 64 queries; None where it does not compile or run."""
    try:
        module = built(whole, check=False)
        q, k = torch.zeros(1, 1, 64, 64).half(), torch.zeros(1, 1, WALKED, 64).half()
        ran(module, whole, None, lambda: module.forward(q, k, k, causal=False, echo=False))
    except CheckFailed:
        return None
    return module.report.printed.split() if module.report is not None else None


def listed(words: Sequence[str]) -> str:
    """ "0, 1, 2": the first of some words."""
    if not words:
        return "none at all, there is no round"
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")


_FAR = 4  # times what is allowed: no rounding errs by so much


def _honest(failed: CheckFailed) -> CheckFailed:
    """The checker's verdict on a kernel: a rounding is blamed only for an error that a rounding can make."""
    sentence, slug = failed.sentence.replace("start_n", "n_start"), failed.diagnosis  # as the series calls it
    times = re.match(r"nearly right, but (\w+) errs by ([\d.e+]+) times", sentence)
    if slug == "low-precision" and times and float(times[2]) > _FAR:
        sentence, slug = f"close, but {times[1]} errs by {float(times[2]):.0f} times what is allowed", "wrong-weights"
        sentence += ", more than any rounding does"
    return CheckFailed(sentence, diagnosis=slug, case=failed.case)


def _expect_in_range(forward: Callable[..., Any], head_dim: int, dtype: torch.dtype) -> None:
    """For a kernel that is not finite where scores are large: raises CheckFailed where it does subtract a maximum."""
    q = torch.full((1, 1, 16, head_dim), 5.0).to(dtype)  # scores of 200 and more, all the same
    if forward(q, q, q, causal=False, scale=None)[0].isfinite().all():
        _expect_moving_maxima(forward, head_dim, dtype)


def _expect_any_scale(forward: Callable[..., Any], head_dim: int, dtype: torch.dtype) -> None:
    """Raises CheckFailed where the same scores come of a large scale, and moving maxima are not followed.

    A reference that changes by 1 from tile to tile spoils the next one there; with a scale of 1 / 8 it takes thousands
    of keys.
    """
    try:
        _expect_moving_maxima(forward, head_dim, dtype, scale=128.0)
    except CheckFailed as failed:
        said = "wrong where the scale is 128 and q is small, so that scores are as usual: does a maximum that does not "
        said += f"move stay what it is, and is whatever it is compared with a score times the scale? ({failed})"
        raise CheckFailed(said, diagnosis="wrong-with-a-large-scale", case=failed.case) from None


def _rows_twice(
    failed: CheckFailed, module: CudaModule, whole: Source, head_dim: int, dtype: torch.dtype, sms: int
) -> CheckFailed:
    """Rows of o that nobody writes, though as many numbers are stored as o has: others are stored twice."""
    q = normal(2, 2, 256, head_dim).to(dtype)
    with MarkedEmpty():
        o, lse = ran(module, whole, None, lambda: module.forward(q, q, q, causal=False, sms=sms, echo=False))
    assert module.report is not None, "every run in the emulator leaves a report"
    stored = module.report.counters["global_store_bytes"]
    if not unwritten(o).any() or stored < o.nbytes + lse.nbytes:
        return failed
    said = f"{failed.sentence}. Yet as many numbers are stored as there are in o, so some rows are stored twice: do "
    said += "two warps, or two blocks, have rows in common? The first row of a warp is the rows per warp times its "
    said += "number"
    return CheckFailed(said, diagnosis="rows-in-common", case=failed.case)


def _expect_last_key(forward: Callable[..., Any], head_dim: int, dtype: torch.dtype) -> None:
    """Raises CheckFailed where a block's last row alone sees a tile, one key of it, and that tile is left out."""
    rows = 128
    q, k, v = (normal(1, 1, n, head_dim, seed=n) for n in (rows, rows + 1, rows + 1))
    q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
    k[:, :, -1, 0], v[:, :, -1] = 4.0, 4.0  # the last key shows among many others
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o = forward(q, k, v, causal=True, scale=None)[0][0, 0].double().cpu()
    off = ~((o - reference.attention(q, k, v, causal=True)[0][0, 0].double()).abs() < 0.03).all(1)
    if not off.any():
        return
    row, slug, case = int(off.nonzero()[-1]), "wrong-value", f"seq_q={rows}, seq_k={rows + 1}, causal"
    said = f"{int(off.sum())} of {rows} rows of o are wrong, causal with seq_k = seq_q + 1; the last one is row {row}"
    one_q, one_k, one_v = (x.double()[0, 0] for x in (q, k, v))
    if row == rows - 1 and _near_row(o[row], one_q[row], one_k[:rows], one_v[:rows]):
        slug, said = (
            "causal-loop-too-short",
            f"causal with seq_q={rows} and seq_k={rows + 1}: row {row} does not see key ",
        )
        said += f"{rows}, its last one, and the only one that the block sees of its tile. How many keys does the "
        said += "block's last row see, and does the loop over tiles reach the last of them?"
    raise CheckFailed(said, diagnosis=slug, case=case)


def _near_row(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a row of o is that of these keys."""
    return bool((got - torch.softmax(k @ q / math.sqrt(len(q)), 0) @ v).abs().max() < 0.03)


def _expect_few_keys(forward: Callable[..., Any], head_dim: int, dtype: torch.dtype) -> None:
    """Raises CheckFailed where a row that sees no key spoils, or is spoiled by, the others of its warp."""
    *first, last = (replace(case, head_dim=head_dim, dtype=dtype) for case in _FEW_KEYS)

    def call(case, q, k, v):
        return forward(q, k, v, causal=case.causal, scale=case.softmax_scale)

    verification.run(call, first)
    try:
        verification.run(call, [last])
    except CheckFailed as failed:
        said = f"wrong only where a tile has keys for some rows of a warp and none for others: {failed}; what does a "
        said += "row give whose maximum is still -inf after a tile?"
        raise CheckFailed(said, diagnosis="masked-rows-nan", case=str(last)) from None


def _expect_moving_maxima(
    forward: Callable[..., Any], head_dim: int, dtype: torch.dtype, scale: float | None = None
) -> None:
    """Raises CheckFailed where a maximum that moves by 2^9 to 2^20 from tile to tile is not followed.

    A head for each of the moves, upwards from the first keys to the last; and as many downwards.
    """
    up = (*_MOVES, *[400] * bool(scale))  # by more than 1, before the scale
    moves = torch.tensor([*up, *(-x for x in up)], dtype=torch.float32) * math.log(2)
    q = 0.05 * normal(1, len(moves), 16, head_dim)
    k, v = normal(2, 1, len(moves), 2 * _MOVED_AT, head_dim, seed=1)
    q[..., 0] = math.sqrt(head_dim)
    k[..., 0] = 0.0
    k[:, :, _MOVED_AT:, 0] = moves[:, None]
    q /= math.sqrt(head_dim) * scale if scale else 1
    q, k, v = q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)
    o, lse = (x.cpu().double() for x in forward(q, k, v, causal=False, scale=scale))
    want_o, want_lse = (x.double() for x in reference.attention(q, k, v, scale=scale))
    # Twice the spacing of the dtype, for P and for O; wrong is wrong by much more here.
    off = ((o - want_o).abs().flatten(2).amax(2) > 8 * torch.finfo(dtype).eps + 1e-4) | ~o.isfinite().flatten(2).all(2)
    off |= ~((lse - want_lse).abs().amax(2) < 1e-2)
    wrong = off[0].nonzero().flatten().tolist()
    if not wrong:
        return
    at = wrong[0]
    move, way = up[at % len(up)], "the keys from 128 on" if at < len(up) else "the keys before 128"
    case = f"seq_q=16, seq_k={2 * _MOVED_AT}, the scores of {way} higher by {move:g} in powers of two"
    said = f"where a row's maximum rises by {move:g} (powers of two) from one tile to the next, o is "
    said += f"{o[0, at, 0, 0].item():.3g} instead of {want_o[0, at, 0, 0].item():.3g}: "
    if all(up[i % len(up)] > 15 for i in wrong) and dtype == torch.float16:
        said += f"P reaches 2^{move:g} under the old maximum, and fp16 ends at 65504, below 2^16; rescale before the "
        raise CheckFailed(f"{said}maximum lags so far behind", diagnosis="p-overflows", case=case)
    said += "what was summed under it, acc and l, has to be multiplied by exp(old - new) whenever the maximum that P "
    raise CheckFailed(f"{said}uses changes", diagnosis="o-not-rescaled", case=case)
