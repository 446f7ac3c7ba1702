"""Checks of phase 11: mbarriers by hand, parities, descriptors, budgets, a log of events, and the producer warp.

What the Python answers say is compared with the emulator: phase_11.cu has the kernels. CUDA answers take the place of
the same lines of a kernel of the ladder, as in phases 8 and 9.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import PROBES, Source, built, examine, probe, ran, replaced, source_of, text_of
from flashlab.check.lookup import Row
from flashlab.cuda import CudaModule
from flashlab.exercises import phase_11_ladder as _ladder  # noqa: F401  11.9 to 11.14
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels import step
from flashlab.simt.report import Counters, Event
from flashlab.simt.sentences import KINDS
from flashlab.simt.source import blank_comments

_HERE = Path(__file__).parent


def _source(name: str) -> Source:
    return Source((_HERE / f"{name}.cu").read_text(), name)


@functools.cache
def _module(check: bool) -> CudaModule:
    return built(_source("phase_11"), check=check)


# ---- 11.1 -----------------------------------------------------------------------------------------------------------

Operation = tuple[str, int]
OPERATIONS = ("arrive", "arrive_expect_tx", "expect_tx", "copy")
"""What a script is made of, each with a number of bytes: 0 for "arrive"; of "copy" those that have been delivered."""

_STEPS = 12


def _script(r: random.Random) -> tuple[tuple[Operation, ...], int]:
    """A script that a barrier may be given: no copy that was not announced, no arrival that a phase has no room for."""
    arrivals = r.randint(1, 3)
    script: list[Operation] = []
    pending, tx = arrivals, 0
    while len(script) < _STEPS:
        choices = ["arrive", "arrive_expect_tx", "expect_tx"] if pending else []
        name = r.choice([*choices, *["copy"] * (2 if tx else 0)])
        number = 16 * r.randint(1, 8)
        if name == "copy":
            number = tx if r.random() < 0.5 else 16 * r.randint(1, tx // 16)
            tx -= number
        pending -= name in ("arrive", "arrive_expect_tx")
        tx += number if name in ("expect_tx", "arrive_expect_tx") else 0
        script.append((name, 0 if name == "arrive" else number))
        if not pending and not tx:
            pending = arrivals
    return tuple(script), arrivals


def _in_words(script: Sequence[Operation], arrivals: int) -> str:
    said = ", ".join(name if name == "arrive" else f"{name} {number}" for name, number in script)
    return f"{arrivals} arrival{'s' if arrivals > 1 else ''} per phase; {said}"


_PAIR = "(latest % 2 == 0, latest % 2 == 1)"
_STAYS = (
    "a parity that was complete once stays complete: when the next phase of the same parity begins, it is not "
    "complete any more"
)
_STANDS = (
    "after its first phase the barrier stands still: the next phase begins at once, and waits for as many arrivals "
    "again"
)


@rule(
    "11.1",
    title="An mbarrier by hand",
    minutes=15,
    difficulty="Warm-up",
    hints=[
        "Three numbers are the whole state: the phase under way (0, 1, 2 ...), the arrivals that it still misses, and "
        "the bytes that are announced and have not come.",
        "After every operation, whichever it is: if no arrival and no byte is missing, the phase is complete. The next "
        "one begins, with all its arrivals missing.",
        "While phase n is under way, n - 1 is the latest complete one. So parity 0 is complete where n is odd, parity "
        "1 where n is even, from the beginning.",
    ],
    returns="parity 0, parity 1",
    each="operation",
    inputs=[
        ((("arrive", 0),) * 3, 1),
        ((("arrive", 0),) * 5, 2),
        ((("arrive_expect_tx", 64), ("copy", 64), ("arrive", 0)), 1),
        ((("arrive", 0), ("arrive_expect_tx", 32), ("copy", 16), ("copy", 16), ("arrive", 0)), 2),
        ((("expect_tx", 32), ("expect_tx", 32), ("copy", 32), ("arrive", 0), ("copy", 32)), 1),
    ],
    draw=_script,
    called=lambda fn, script, arrivals: fn(list(script), arrivals),
    shown=_in_words,
    also=[[("missing == 0 and bytes_under_way == 0", "missing <= 0 and bytes_under_way <= 0")]],
    notes={
        "missing == 0 and bytes_under_way == 0": "a phase waits for its arrivals, and for the bytes announced",
        "operation in ('arrive', 'arrive_expect_tx')": "arrive_expect_tx announces bytes, and arrives",
        "operation in ('expect_tx', 'arrive_expect_tx')": "both announce bytes",
        "operation == 'copy'": "a copy delivers bytes, and nobody arrives",
        "arrivals": "the next phase waits for as many arrivals again",
    },
    rows=[
        Row("parities-exchanged", "the two parities are exchanged: a new barrier is in phase 0, which is not complete; "
            "the phase before it counts as complete, and its parity is 1",
            [(_PAIR, "(latest % 2 == 1, latest % 2 == 0)")]),
        Row("nothing-before", "before the first phase has ended neither parity is complete here: the phase before it, "
            "-1, counts as complete on a new barrier, and its parity is 1",
            [(_PAIR, "(latest >= 0 and latest % 2 == 0, latest >= 0 and latest % 2 == 1)")]),
        *(Row("never-restarts", _STANDS, [("phase + 1, arrivals", f"phase + 1, {left}")])
          for left in ("1 << 30", "-1", "missing")),
        Row("stays-complete", _STAYS, [(_PAIR, "(latest >= 0, latest % 2 == 1)")]),
        Row("stays-complete", _STAYS, [(_PAIR, "(latest >= 0, latest != 0)")]),
        Row("stays-complete", "both parities are complete from the end of the first phase on: one of them belongs to "
            "the phase that is under way, and is not complete", [(_PAIR, "(latest >= 0, True)")]),
        Row("phase-0-alone", "parity 0 is complete while phase 1 is under way, and never again: every second phase has "
            "parity 0", [(_PAIR, "(latest == 0, latest != 0)")]),
        Row("one-copy-for-all", "a copy takes off all the bytes that are announced: it takes off its own, and others "
            "are still under way", [("bytes_under_way -= n", "bytes_under_way = 0")]),
        Row("not-ended-by-bytes", "a phase ends only when somebody arrives: where the arrivals are there already, the "
            "last bytes end it", [("if missing == 0 and", 'if operation != "copy" and missing == 0 and')]),
        Row("bytes-again", "each phase waits for as many bytes as were announced before: arrivals come back by "
            "themselves, announced bytes do not",
            [("arrivals, 0, []", "arrivals, 0, []\n    announced = 0"), ("+= n", "+= n\n            announced += n"),
             ("phase, missing = phase + 1, arrivals",
              "phase, missing, bytes_under_way = phase + 1, arrivals, announced")]),
        Row("one-operation-late", "each pair says how it was before its operation: it should say how it is after it",
            [("return seen", "return [(False, True), *seen[:-1]]")]),
        Row("arrives-before-it-announces", "arrive_expect_tx arrives before it announces its bytes: where it is the "
            "last arrival, the phase ends without them. It announces first",
            [("missing -= 1\n", "missing -= 1\n            if missing == 0 and bytes_under_way == 0:\n"
              "                phase, missing = phase + 1, arrivals\n")]),
    ],
)  # fmt: skip
def complete(script, arrivals):
    """One pair for each operation: (is parity 0 complete?, is parity 1 complete?) after it."""
    # BEGIN SOLUTION
    phase, missing, bytes_under_way, seen = 0, arrivals, 0, []
    for operation, n in script:
        if operation in ("arrive", "arrive_expect_tx"):
            missing -= 1
        if operation in ("expect_tx", "arrive_expect_tx"):
            bytes_under_way += n
        if operation == "copy":
            bytes_under_way -= n
        if missing == 0 and bytes_under_way == 0:
            phase, missing = phase + 1, arrivals
        latest = phase - 1  # the latest complete phase; -1 for a new barrier
        seen.append((latest % 2 == 0, latest % 2 == 1))
    return seen
    # END SOLUTION


# ---- 11.2 -----------------------------------------------------------------------------------------------------------

_EACH = "return i % stages, use % 2, (use - 1) % 2"
_PRODUCERS = "(use - 1) % 2"


@rule(
    "11.2",
    title="Which parity, how many bytes?",
    minutes=15,
    hints=[
        "Iteration i uses stage i % stages. How often has that stage been used before? Each use is one phase of its "
        "two barriers, `full` and `empty`, counted from 0.",
        "Use number n: the consumer waits until phase n of `full` is complete. The producer waits until use n - 1 has "
        "been released: phase n - 1 of `empty`. For n = 0 that is the phase -1 of a new barrier, whose parity is 1.",
        "tile_bytes: the copy engine fills the whole box, with zeros for rows that do not exist, and the zeros count. "
        "An element has 2 bytes; all slabs of a row belong to the tile.",
    ],
    returns="stage, consumer's parity, producer's parity",
    whole=True,
    strict=True,
    inputs=[(i, stages) for stages in (1, 2, 3, 4, 5) for i in range(13)],
    draw=lambda r: (r.randint(0, 60), r.randint(1, 8)),
    words={"use": "i // stages"},
    notes={
        "i % stages": "iteration i uses stage i % stages",
        "use % 2": "a wait takes the phase's parity, its last bit",
        _PRODUCERS: "the stage was used `stages` iterations before: use - 1, whose parity a new barrier has complete",
    },
    rows=[
        Row("same-parity", "producer's parity: it is the consumer's. In iteration 0 nobody has used the stage: phase 0 "
            "of `empty` ends with a tile that never comes", [(_PRODUCERS, "use % 2")]),
        Row("parities-exchanged", "the two parities are exchanged: the consumer waits for the first tile, phase 0 of "
            "`full`; the producer has nobody to wait for in the first round",
            [("use % 2, (use - 1) % 2", "(use - 1) % 2, use % 2")]),
        Row("parity-of-the-iteration", "these parities change with every iteration: a stage is used once in `stages` "
            "iterations, and each use is one phase", [(_EACH, "return i % stages, i % 2, (i - 1) % 2")]),
        Row("parity-of-the-stage", "these parities depend on the stage alone: a stage is used again and again, and its "
            "parity changes each time", [(_EACH, "return i % stages, i % stages % 2, (i % stages - 1) % 2")]),
        *(Row("phase-not-parity", "these are the numbers of phases: a wait takes a phase's parity, its last bit",
              [(_EACH, f"return i % stages, use, {other}")]) for other in ("1 - use", "use ^ 1", "use - 1")),
        *(Row("iteration-before", "producer's parity: it is that of iteration i - 1: the stage was used `stages` "
              "iterations before", [(_PRODUCERS, f"{before} // stages % 2")])
          for before in ("(i - 1)", "max(i - 1, 0)")),
        Row("first-round-waits", "producer's parity: in the first round it waits for phase 0 of `empty`. Nobody has "
            "used the stage: it is phase -1, parity 1", [(_PRODUCERS, "max(use - 1, 0) % 2")]),
        Row("always-parity-1", "producer's parity: it is 1 each time: in the second round it waits until the consumers "
            "are through with the tile of the first, phase 0 of `empty`", [(_PRODUCERS, "1")]),
        Row("negative", "producer's parity: it is -1 in the first round: a parity is 0 or 1",
            [(_PRODUCERS, "use % 2 - 1")]),
    ],
)  # fmt: skip
def waits(i, stages):
    """(the stage of iteration i, the parity a consumer waits for, the parity the producer waits for)."""
    # BEGIN SOLUTION
    use = i // stages  # how often the stage has been used before: each use is a phase
    return i % stages, use % 2, (use - 1) % 2
    # END SOLUTION


@rule(
    "11.2",
    returns="bytes",
    whole=True,
    strict=True,
    inputs=[(rows, d, left) for rows in (64, 128) for d in (64, 128, 256) for left in (rows, 300, 50, 1)],
    draw=lambda r: (r.choice((8, 64, 128, 176)), r.choice((16, 64, 80, 128, 256)), r.randint(1, 300)),
    notes={
        "box_rows": "a copy brings one box, and what it fills with zeros counts", "2": "an element has 2 bytes",
        "head_dim": "all slabs of the tile count at the same barrier",
    },
    rows=[
        Row("zeros-not-counted", "rows that do not exist are left out: the copy engine fills the whole box, with "
            "zeros there, and counts all of it", [("box_rows * head", "min(box_rows, rows_left) * head")]),
        Row("bits", "these are bits: expect_tx takes bytes", [("head_dim * 2", "head_dim * 16")]),
        Row("floats", "an element has 2 bytes, and here it has 4", [("head_dim * 2", "head_dim * 4")]),
    ],
)  # fmt: skip
def tile_bytes(box_rows, head_dim, rows_left):
    """Bytes to announce for a tile of `box_rows` rows of 16-bit numbers, of which `rows_left` exist."""
    # BEGIN SOLUTION
    return box_rows * head_dim * 2  # the zeros count
    # END SOLUTION


# ---- 11.3 -----------------------------------------------------------------------------------------------------------

# (function, rows and columns of the matrix, steps, N, rows of the matrix are rows of B, swizzle, stride, leading)
_TILE_KINDS = (
    ("k_columns", 64, 64, 4, 64, False, 1, 1024, None),
    ("v_rows", 64, 192, 4, 192, True, 1, 1024, 8192),
    ("narrow_columns", 64, 32, 2, 64, False, 2, 512, None),
)
_SWIZZLES = ("no swizzle", "the 128-byte swizzle", "the 64-byte swizzle", "the 32-byte swizzle")


@exercise(
    "11.3",
    title="Name the tile",
    minutes=30,
    difficulty="Core",
    hints=[
        "smem_descriptor(address, swizzle, leading_bytes, stride_bytes). In K-major and in MN-major swizzled tiles "
        "alike, the stride leads to the next 8 lines of the tile. How long is a line, in bytes, in each of the three?",
        "Which 16 of K? In a K-major tile they are columns, 32 bytes further in the same line. In an MN-major tile "
        "they are lines: 16 lines further. Both are added to the address.",
        "Only v_rows uses the leading distance: from one slab of 64 columns to the next. A slab has 64 lines of 128 "
        "bytes.",
    ],
)
def _(descriptors: str) -> str:
    text = text_of(descriptors, "descriptors")
    for name, *_ in _TILE_KINDS:
        expect(f"{name}(" in text, f"the text should still define `{name}`", diagnosis="wrong-entry")
    whole = replaced(_source("phase_11_tile"), "operands", text)
    module = built(whole, check=False)
    for which, (name, rows, columns, steps, n, *_) in enumerate(_TILE_KINDS):
        row = torch.arange(rows)[:, None].expand(rows, columns)
        column = torch.arange(columns).expand(rows, columns)
        given = torch.zeros(steps + 1, dtype=torch.int64)
        seen = []
        for numbers in (row, column):
            out = torch.zeros(steps, 16, n)
            arguments = (numbers.half().contiguous(), out, given, which)
            try:
                ran(module, whole, name, functools.partial(module.launch, "read_tile", *arguments, echo=False))
            except CheckFailed as failed:
                slips = [(step, _descriptor_slip(which, step, given.tolist())) for step in range(steps)]
                step, slip = next(((step, slip) for step, slip in slips if given[step] and slip), (0, None))
                if slip is None or failed.diagnosis == "does-not-compile":
                    raise
                sentence = f"{failed.sentence}. In {name}(tile, {step}) {slip[0]}"
                raise CheckFailed(sentence, diagnosis=f"wrong-{slip[1]}", case=name) from None
            seen.append(out.int())
        _expect_tile(which, seen[0], seen[1], given.tolist())
    return "three tiles, read through your descriptors and multiplied by the identity"


def _descriptor_slip(which: int, step: int, given: list[int]) -> tuple[str, str] | None:
    """What is wrong with the descriptor of this step, and a word for it."""
    _, _, _, _, _, by_rows, swizzle, stride, leading = _TILE_KINDS[which]
    bits = given[step] & (1 << 64) - 1
    start, its_leading, its_stride, base = (
        (bits & 0x3FFF) << 4,
        (bits >> 16 & 0x3FFF) << 4,
        (bits >> 32 & 0x3FFF) << 4,
        (bits >> 49 & 7),
    )
    tile, line = given[-1], (128, 128, 64)[which]
    if bits >> 62 != swizzle:
        said = f"the descriptor says {_SWIZZLES[bits >> 62]}; the tile was written with {_SWIZZLES[swizzle]}"
        return said, "swizzle"
    if its_stride != stride:
        return f"the stride is {its_stride} bytes, and 8 lines of this tile are {8 * line}", "stride"
    if leading is not None and its_leading != leading:
        return (
            f"the leading distance is {its_leading} bytes; the next 64 columns lie a slab further, and a slab is 64 "
            "lines of 128 bytes"
        ), "leading"
    if start - tile != step * (2048 if by_rows else 32):
        kind = "columns: 32 bytes further in each line" if not by_rows else "rows: 16 lines further"
        return (
            f"the address is {start - tile} bytes behind the tile's beginning in step {step}; 16 of K are 16 {kind}. "
            "(A finished descriptor counts it in units of 16 bytes)"
        ), "address"
    return (f"base_offset is {base}; the tile begins where the pattern begins", "base-offset") if base else None


def _expect_tile(which: int, row: torch.Tensor, column: torch.Tensor, given: list[int]) -> None:
    """row, column [steps, 16, n]: where in the matrix what was read as B[k, n] comes from; given: the descriptors."""
    __tracebackhide__ = True
    name, _, _, steps, n, by_rows, *_ = _TILE_KINDS[which]
    k = torch.arange(16 * steps).reshape(steps, 16, 1).expand(steps, 16, n)
    of_n = torch.arange(n).expand(steps, 16, n)
    want_row, want_column = (k, of_n) if by_rows else (of_n, k)
    off = ((row != want_row) | (column != want_column)).nonzero().tolist()
    if not off:
        return
    step, i, j = off[0]
    found = int(row[step, i, j]), int(column[step, i, j])
    wanted = int(want_row[step, i, j]), int(want_column[step, i, j])
    place = (
        f"what lies at row {found[0]}, column {found[1]} of the tile" if found[0] >= 0 else "bytes outside of the tile"
    )
    said = (
        f"read through {name}(tile, {step}), the element of row {wanted[0]}, column {wanted[1]} is {place} "
        f"({len(off)} of {row.numel()} elements are wrong)"
    )
    slip = _descriptor_slip(which, step, given)
    raise CheckFailed(
        f"{said}: {slip[0]}" if slip else said, diagnosis=f"wrong-{slip[1] if slip else 'base-offset'}", case=name
    )


# ---- 11.4 -----------------------------------------------------------------------------------------------------------


def _stages(r: random.Random) -> tuple[int, ...]:
    """Where the barriers decide, about every second time."""
    m, n, d = r.choice((64, 128, 192)), 16 * r.randint(1, 16), r.choice((64, 128, 256))
    fit = r.randint(0, 5)
    exact = m * d * 2 + fit * n * d * 4 + 8 + 32 * fit
    return m, n, d, max(0, r.choice((exact, exact - 1, exact - 8 * r.randint(0, 4 * fit), r.randint(0, 233472))))


@rule(
    "11.4",
    title="Three budgets",
    minutes=25,
    hints=[
        "most_stages: what is there once (Q and its barrier), what is there for each stage (a tile of K, one of V, "
        "four barriers)? The number of stages is what is left, divided by what a stage takes.",
        "consumer_registers: at the launch every thread has 65536 / threads registers, rounded down to a multiple of "
        "8; all together that is the pool. The producer's whole warpgroup, 128 threads, keeps its own; the consumers' "
        "128 threads each share the rest, in multiples of 8, at most 256.",
        "widest_tile: 64 rows by 128 threads. A float accumulator of 64 x N takes N / 2 registers per thread. P in "
        "16-bit numbers, two to a register, takes N / 4.",
    ],
    returns="stages",
    whole=True,
    inputs=[
        *((*tile, limit) for tile in ((128, 128, 64), (192, 128, 64), (128, 176, 128), (128, 80, 256), (64, 64, 64))
          for limit in (232448, 101376, 166912, 16384)),
        (192, 32, 128, 31461), *(_stages(random.Random(i)) for i in range(150)),
    ],
    draw=_stages,
    words={"once": "once", "per_stage": "per_stage"},
    notes={
        "2 * block_n": "a stage has a tile of K and one of V", "4 * 8": "a stage has four barriers of 8 bytes",
        "8": "a barrier has 8 bytes: one for Q, four for a stage", "0": "where not even Q fits, no stage does",
        "block_m * head_dim * 2": "Q's tile stays in shared memory",
        "once": "Q's tile stays in shared memory", "4": "a stage has four barriers",
        "2": "an element has 2 bytes; a stage has a tile of K and one of V",
    },
    rows=[
        Row("barriers-forgotten", "the tiles are right, the barriers are missing: 8 bytes each, one for Q and four for "
            "a stage", [("* 2 + 8", "* 2"), (" + 4 * 8", "")]),
        Row("elements-not-bytes", "an element has 2 bytes, and here it has 1",
            [("head_dim * 2 + 8", "head_dim + 8"), ("head_dim * 2 + 4", "head_dim + 4")]),
        Row("floats", "an element has 2 bytes, and here it has 4",
            [("head_dim * 2 + 8", "head_dim * 4 + 8"), ("head_dim * 2 + 4", "head_dim * 4 + 4")]),
    ],
)  # fmt: skip
def most_stages(block_m, block_n, head_dim, shared_bytes):
    """How many stages fit; 0 if none does."""
    # BEGIN SOLUTION
    once = block_m * head_dim * 2 + 8
    per_stage = 2 * block_n * head_dim * 2 + 4 * 8
    return max(0, (shared_bytes - once) // per_stage)
    # END SOLUTION


@rule(
    "11.4",
    returns="registers",
    whole=True,
    inputs=[(consumers, producer) for consumers in (2, 1, 3, 4, 5) for producer in (24, 32, 40)],
    draw=lambda r: (r.randint(1, 7), 8 * r.randint(3, 8)),
    notes={
        "256": "a thread has at most 256 registers", "128 * producer": "the producer keeps registers too, all four "
        "warps of it", "producer": "the producer keeps registers too", "at_launch * threads": "what the launch's "
        "rounding leaves over belongs to nobody",
    },
    rows=[
        Row("rounded-at-the-launch", "all 65536 are dealt out: the launch gives each thread a multiple of 8, and what "
            "that rounding leaves over belongs to nobody", [("at_launch * threads", "65536")]),
        Row("as-at-the-launch", "it is the registers at the launch: the consumers can take those too that the producer "
            "gives away", instead="65536 // (128 * (consumers + 1)) // 8 * 8"),
        Row("a-warp-for-the-producer", "the producer counts as one warp: setmaxnreg is an instruction of a warpgroup, "
            "and all four warps have those registers", [("128 * producer", "32 * producer")]),
        Row("not-a-multiple-of-8", "it is no multiple of 8 everywhere: setmaxnreg takes multiples of 8 only",
            [("(128 * consumers) // 8 * 8", "(128 * consumers)")]),
    ],
)  # fmt: skip
def consumer_registers(consumers, producer):
    """Registers per thread of a consumer, a multiple of 8 and at most 256."""
    # BEGIN SOLUTION
    threads = 128 * (consumers + 1)
    at_launch = 65536 // threads // 8 * 8
    left = at_launch * threads - 128 * producer
    return min(256, left // (128 * consumers) // 8 * 8)
    # END SOLUTION


@rule(
    "11.4",
    returns="block_n",
    whole=True,
    inputs=[(d, r, others) for d, r in ((64, 160), (64, 240), (128, 168), (128, 240), (256, 240))
            for others in (20, 40, 56)],
    draw=lambda r: (r.choice((64, 128)), 8 * r.randint(20, 31), r.randint(10, 60)),
    words={"left": "left"},
    notes={
        "others": "they are in the registers too", "16": "keys are the K of the second product, which goes by 16",
        "head_dim // 2": "64 rows are shared by 128 threads: O takes head_dim / 2 registers per thread",
        "head_dim": "64 rows are shared by 128 threads", "4": "a key takes 1/2 register for S and 1/4 for P",
        "3": "a key takes 1/2 register for S and 1/4 for P",
    },
    rows=[
        Row("p-forgotten", "P of the tile before is not counted: it is kept while S is computed",
            [("left * 4 // 3", "left * 2")]),
        Row("p-as-floats", "P counts as floats: it has 16-bit numbers, two of them in a register",
            [("left * 4 // 3", "left")]),
        Row("s-a-row-per-thread", "S takes a register per key: 64 rows are shared by 128 threads, so it takes half of "
            "one", [("left * 4 // 3", "left * 4 // 5")]),
        Row("a-row-per-thread", "each accumulator is that of a whole row: 64 rows are shared by 128 threads, half a "
            "row for each", [("head_dim // 2", "head_dim"), ("left * 4 // 3", "left * 2 // 3")]),
        Row("not-a-multiple-of-16", "it is no multiple of 16 everywhere: keys are the K of the second product, which "
            "goes by 16", [("// 16 * 16", "")]),
        Row("multiple-of-8", "it is a multiple of 8: keys are the K of the second product, which goes by 16",
            [("// 16 * 16", "// 8 * 8")]),
    ],
)  # fmt: skip
def widest_tile(head_dim, registers, others):
    """The largest block_n, a multiple of 16."""
    # BEGIN SOLUTION
    left = registers - others - head_dim // 2
    return left * 4 // 3 // 16 * 16  # a key takes 1/2 register for S and 1/4 for P
    # END SOLUTION


# ---- 11.5 -----------------------------------------------------------------------------------------------------------


@functools.cache
def _log(
    stages: int, consumers: int, tiles: int, seed: int, producers: int
) -> tuple[tuple[Event, ...], tuple[tuple[int, int], ...]]:
    """A pipeline's events, and (address, arrivals per phase) of its barriers."""
    table = torch.tensor([waits(i, stages) for i in range(tiles)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    pauses = torch.randint(0, 4, (consumers, tiles), generator=generator, dtype=torch.int32)
    source, out = torch.zeros(tiles * 32, dtype=torch.int32), torch.zeros(consumers, tiles, dtype=torch.int32)
    module = _module(True)
    arguments = (table, pauses, source, out, tiles, stages, consumers, producers)
    module.launch("pipeline", *arguments, echo=False, timeline=1)
    assert module.report is not None, "every run in the emulator leaves a report"
    events = [e for e in module.report.launches[0].events if e.did in LOGGED]
    count = {e.values[0]: 1 if e.warp >= consumers else consumers for e in events if e.did == "arrive"}
    count |= {e.values[0]: consumers for e in events if e.did == "mbarrier-passed" and e.warp >= consumers}
    return tuple(events), tuple(sorted(count.items()))


LOGGED = ("arrive", "mbarrier-wait", "mbarrier-passed")


def log(
    stages: int = 2, consumers: int = 2, tiles: int = 6, seed: int = 0, producers: int = 1
) -> tuple[list[tuple[int, str, int]], dict[int, int]]:
    """What the warps of a small pipeline did at its barriers, as the emulator saw it; and each barrier's arrivals.

    Warps 0 to consumers - 1 consume, warp `consumers` produces; of several producers each asks for a tile in its
    turn, and with fewer than two stages they would lose count. An event is (warp, what, barrier): whose phase it is,
    the order alone says.
    """
    events, count = _log(stages, consumers, tiles, seed, producers)
    return [(e.warp, e.did, e.values[0]) for e in events], dict(count)


# (stages, consumers, producers). With two producers and an odd number of stages the phases of one barrier are made up
# by different warps; with three and four stages, the phases of one parity too.
_PIPELINES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 3, 2), (3, 2, 2), (4, 2, 3))
_TURNS = "phase = len(arrived[bar]) // arrivals[bar] - 1"
_ADDED = "arrived[bar].append(warp)"
_WHO = "set(arrived[bar][first : first + arrivals[bar]]) if phase >= 0 else set()"
_BY_TURNS = (
    "you take a warp's first wait at a barrier for phase 0, its second for phase 1, and so on. The producer's first "
    "wait is for nobody, and of several producers none waits for every phase"
)


def _pipeline(r: random.Random) -> tuple[tuple[int, ...], None]:
    stages, consumers, producers = r.choice(_PIPELINES)
    return (stages, consumers, 3 * stages + 1, r.randrange(12), producers), None


def _pipeline_in_words(of: Sequence[int], _: None) -> str:
    stages, consumers, _tiles, _seed, producers = of
    return f"{stages} stages, {consumers} consumers, {producers} producer{'s' * (producers > 1)}"


@rule(
    "11.5",
    title="Who waits for whom?",
    minutes=25,
    difficulty="Core",
    hints=[
        "Keep, for each barrier, the list of the warps that have arrived there so far. With n arrivals per phase, the "
        "first n of the list are phase 0, the next n phase 1.",
        "When a wait has passed, the phase that it waited for is the latest complete one: the next phase needs an "
        "arrival of the one who still waits, or of somebody who waits for that one.",
        "phase = len(arrived) // n - 1. Below 0, the wait was for nobody; else it was for "
        "arrived[phase * n : (phase + 1) * n].",
    ],
    returns="warp, warps",
    each="wait",
    item=lambda x: frozenset(map(int, x)) if hasattr(x, "__iter__") else int(x),
    inputs=[((s, c, 3 * s + 1, seed, p), None) for seed, (s, c, p) in enumerate(_PIPELINES)],
    draw=_pipeline,
    called=lambda fn, of, _: fn(*log(*of)),
    shown=_pipeline_in_words,
    notes={
        _TURNS.removeprefix("phase = "): "the wait was for the latest phase that has all its arrivals",
        "arrivals[bar]": "each barrier has its own number of arrivals per phase",
    },
    rows=[
        Row("last-arrival", "you name the warp whose arrival was the latest before the wait passed. A phase of several "
            "arrivals waits for all who make it up", [(_WHO, "set(arrived[bar][-1:])")]),
        Row("everybody", "you name everybody who ever arrives at the barrier. The producer's first waits pass at a new "
            "barrier: nobody has arrived, and it waits for nobody",
            [(_WHO, "{w for w, d, b in events if d == 'arrive' and b == bar}")]),
        Row("so-far", "you name everybody who has arrived at the barrier so far. A wait is for one phase: where "
            "producers take turns, each phase of `full` has the arrival of one of them", [(_WHO, "set(arrived[bar])")]),
        Row("between", "you name who arrived between the beginning of the wait and its end. Who arrived before the "
            "wait began belongs to the phase as well",
            [("found = []", "found, began = [], {}"),
             (_ADDED, _ADDED + "\n        if did == 'mbarrier-wait':\n            began[warp] = len(arrived[bar])"),
             (_WHO, "set(arrived[bar][began[warp] :])")]),
        Row("under-way", "every wait is for nobody here. In the phase that is under way when a wait has passed, nobody "
            "has arrived yet. The wait was for the one before, the latest complete one", [(_WHO, "set()")]),
        Row("at-its-beginning", "you look at the barrier when the wait begins. Its phase may end only while it waits: "
            "look when it has passed", [('did == "mbarrier-passed"', 'did == "mbarrier-wait"')]),
        Row("used-up", "you take a phase's arrivals away when the first warp has passed. All consumers wait for the "
            "same phase, and the second one finds nobody there",
            [(_TURNS, "phase = 0 if len(arrived[bar]) >= arrivals[bar] else -1"),
             ("else set()))", "else set()))\n            del arrived[bar][: (phase + 1) * arrivals[bar]]")]),
        Row("same-count", "every barrier has the same number of arrivals per phase here. `arrivals` has one for each: "
            "those of `full` and of `empty` differ",
            [("found = []", "found, arrivals = [], dict.fromkeys(arrivals, max(arrivals.values()))")]),
        Row("by-turns", _BY_TURNS,
            [("found = []", "found, turn = [], {}"),
             (_TURNS, "phase = turn[warp, bar] = turn.get((warp, bar), -1) + 1")]),
        Row("by-turns", _BY_TURNS,
            [("found = []", "found, turn = [], {}\n    later = {b: [w for w, d, at in events if d == 'arrive' and "
              "at == b] for b in arrivals}"),
             (_TURNS, "phase = turn[warp, bar] = turn.get((warp, bar), -1) + 1"),
             ("set(arrived[bar][first :", "set(later[bar][first :")]),
    ],
)  # fmt: skip
def waited_for(events, arrivals):
    """For each "mbarrier-passed", in order: (its warp, the set of the warps it was for)."""
    # BEGIN SOLUTION
    arrived: dict[int, list[int]] = {bar: [] for bar in arrivals}
    found = []
    for warp, did, bar in events:
        if did == "arrive":
            arrived[bar].append(warp)
        if did == "mbarrier-passed":
            phase = len(arrived[bar]) // arrivals[bar] - 1  # the latest complete one
            first = phase * arrivals[bar]
            found.append((warp, set(arrived[bar][first : first + arrivals[bar]]) if phase >= 0 else set()))
    return found
    # END SOLUTION


# ---- kernels of the ladder ------------------------------------------------------------------------------------------


def _changed(whole: Source, old: str, new: str) -> Source:
    """The source with one line of it changed; the learner's own lines stay where they are if the lines do."""
    assert whole.text.count(old) == 1, f"{old!r} occurs {whole.text.count(old)} times in {whole.name}.cu"
    return Source(whole.text.replace(old, new), whole.name, whole.first, whole.last)


def _replaced_lines(whole: Source, first: str, last: str, text: str) -> Source:
    """The source with the lines from that with `first` to that with `last` replaced by a learner's.

    And some more, to where all braces are closed that were opened there.
    """
    lines = whole.text.splitlines()
    begin = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i in range(begin, len(lines)) if last in lines[i])
    while (cut := "".join(lines[begin : end + 1])).count("{") > cut.count("}"):
        end += 1
    own = text.strip("\n").splitlines()
    return Source("\n".join([*lines[:begin], *own, *lines[end + 1 :]]) + "\n", whole.name, begin + 1, begin + len(own))


# ---- 11.6 -----------------------------------------------------------------------------------------------------------

_EPILOGUE = ("if (first_thread) bulk_wait_read<0>();", "bulk_commit();")


@exercise(
    "11.6",
    title="The last mile of O",
    minutes=20,
    difficulty="Bug hunt",
    untouched="06c44aff40ae",
    history="a common mistake where threads store what TMA or wgmma reads",
    hints=[
        "Follow one number of O: a lane stores it to shared memory with stmatrix; then the copy engine reads it. Both "
        "see the same memory, but they come to it on two different ways.",
        "The barrier orders the threads: all have stored when the first thread goes on. Does it also say that the "
        "other way, the async proxy, sees what they have stored?",
        "fence_proxy_async(), by each thread that has stored, after its last stmatrix and before the barrier.",
    ],
)
def _(epilogue: str) -> str:
    text = text_of(epilogue, "epilogue")
    whole = _replaced_lines(source_of(step("p11_10_epilogue")), *_EPILOGUE, text)
    verdict = examine(whole, fast=False, probes=_SHORT, max_seq=150, sms=1)  # one block, which uses its buffer again
    stores = verdict.counters["tma_stores"]
    case = "heads=2, kv_heads=1, seq_q=200, seq_k=200, causal"
    sentence = "the result is right, but no O leaves by tma_store: the copy engine should do it"
    expect(stores > 0, sentence, diagnosis="no-tma-store", case=case)
    return f"{verdict.cases} cases right, nothing found by the emulator"


_SHORT = PROBES[:2]

# ---- 11.7 -----------------------------------------------------------------------------------------------------------

_RELEASE = """
        if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));
    };"""


@exercise(
    "11.7",
    title="Room for the next tile",
    minutes=25,
    difficulty="Bug hunt",
    untouched="7d7ce3738bf0",
    history="a common mistake in kernels that have two products under way",
    hints=[
        "Two groups are committed in a round: the scores of this tile, then O += P V of the tile before. Which of them "
        "has wgmma_wait<1> waited for, and which is still under way?",
        "Who arrives at empty_v says: nobody reads this tile of V any more, the producer may fill its stage again. "
        "From which line on is that true?",
        "The arrival at empty_v belongs behind wgmma_wait<0>, which is in output_is_there(). The one at empty_k may "
        "stay: the scores have been waited for.",
    ],
)
def _(scores: str, after_probabilities: str) -> str:
    texts = text_of(scores, "scores"), text_of(after_probabilities, "after_probabilities")
    base = _changed(source_of(step("p11_6_overlap")), _RELEASE, "\n    };")
    whole = replaced(base, "rescale O", texts[1])
    whole = replaced(whole, "scores", texts[0])
    try:
        verdict = examine(whole, fast=False, probes=_LONG, max_seq=150)
    except CheckFailed as failed:
        if failed.diagnosis in ("stage-overwritten", "deadlock"):
            events = _events(whole)
            _expect_released_once(events, _CASE)
            _expect_its_stage(events, _CASE)
        if failed.diagnosis == "stage-overwritten" and "wgmma" in failed.sentence:
            raise CheckFailed(failed.sentence, diagnosis="released-too-early", case=failed.case) from None
        if failed.diagnosis == "deadlock" and (why := _why_no_place(failed.sentence)) is not None:
            raise CheckFailed(f"{why}\n{failed.sentence}", diagnosis="deadlock", case=failed.case) from None
        raise
    events = _events(whole)
    _expect_released_once(events, _CASE)
    _expect_its_stage(events, _CASE)
    expect(
        any(e.did == "wait" and e.values[1] > 0 for e in events),
        "the result is right, and nothing is released too early; but each wait waits for all products. The softmax "
        "should run while O += P V of the tile before is under way",
        diagnosis="no-overlap",
        case=_CASE,
    )
    expect(
        "output_is_there" not in blank_comments(texts[0]),
        "the result is right, and nothing is released too early; but output_is_there() is called before the softmax, "
        "and waits until O += P V of the tile before is done. The softmax should run while it is under way",
        diagnosis="no-overlap",
        case=_CASE,
    )
    return f"{verdict.cases} cases right, nothing found by the emulator"


def _why_no_place(deadlock: str) -> str | None:
    """Why the producer waits for ever: nobody arrives at V's barrier, or too many do at K's; None for others."""
    phases = [int(x) for x in re.findall(r"phase (\d+) is under way", deadlock)]  # of the consumers, of the producer
    if "mbarrier_wait(empty_v" in deadlock and deadlock.endswith("no phase has ended yet"):
        return "no consumer has said yet that a tile of V has been read"
    if "mbarrier_wait(empty_k" in deadlock and len(phases) == 2 and phases[1] > phases[0]:
        return (
            f"{phases[1]} phases of that barrier of K have ended, where {phases[0]} of its tiles have come: "
            "somebody arrives there who means another one. Which is empty_v + 8 * ((nth - 1) % STAGES) at the first "
            "tile, where there is no tile before?"
        )
    return None


_LONG = (PROBES[0], (1, 1, 1, 64, 700, False))
_CASE = "seq_q=64, seq_k=700"  # the second


def _events(whole: Source) -> Sequence[Event]:
    """What each warp issued and waited for with several tiles; of a run that goes wrong, as far as it went."""
    module = built(whole, check=True)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, _LONG[1], timeline=1)
    assert module.report is not None, "every run in the emulator leaves a report"
    return module.report.launches[0].events


def _expect_released_once(events: Sequence[Event], case: str) -> None:
    """Raises CheckFailed where a warp says of one tile more than once that it has been read."""
    __tracebackhide__ = True
    arrivals = Counter((e.warp, e.values[0]) for e in events if e.did == "arrive" and not e.values[1])
    filled = max(Counter(e.values[0] for e in events if e.did == "arrive" and e.values[1]).values())
    most = max(arrivals.values())
    since: set[tuple[int, int]] = set()  # arrivals of a warp since it has last waited for a copy
    twice = False
    for e in events:
        if e.did == "mbarrier-passed":
            since = {(warp, bar) for warp, bar in since if warp != e.warp}
        elif e.did == "arrive" and not e.values[1]:
            twice |= (e.warp, e.values[0]) in since
            since.add((e.warp, e.values[0]))
    seen = f"{most} times at a barrier of a stage that is filled {filled} times" if most > filled else (
        "twice at a barrier of a stage, and waits for no copy between the two"
    )  # fmt: skip
    expect(
        most <= filled and not twice,
        f"a warpgroup arrives {seen}: it releases a tile more than once. A phase then ends without the others, and the "
        "parity that the producer waits for runs away",
        diagnosis="released-twice",
        case=case,
    )


def _expect_its_stage(events: Sequence[Event], case: str) -> None:
    """Raises CheckFailed where a warp gives a stage back that is not the one of the tile which it has read."""
    __tracebackhide__ = True
    given = [(e.warp, e.values[0]) for e in events if e.did == "arrive" and not e.values[1]]
    places = sorted({bar for _, bar in given})  # K's, then V's
    if len(places) % 2:
        return
    stages = len(places) // 2
    for kind, bars in (("K", places[:stages]), ("V", places[stages:])):
        for warp in sorted({warp for warp, _ in given}):
            order = [bars.index(bar) for w, bar in given if w == warp and bar in bars]
            at = next((i for i, stage in enumerate(order) if stage != i % stages), None)
            expect(
                at is None,
                f"the {kind} of another stage is given back: warp {warp} releases stages "
                f"{', '.join(map(str, order[:4]))}, ... of {kind}, and has read tiles 0, 1, 2, ..., which lie in "
                f"stages {', '.join(str(i % stages) for i in range(4))}, ...",
                diagnosis="wrong-stage",
                case=case,
            )


# ---- 11.8 -----------------------------------------------------------------------------------------------------------

_AFTER = "    setmaxnreg_inc<CONSUMER_REGISTERS>();\n"
# Stages that are used three times and more; a causal block's few tiles; a block without a key.
_PRODUCED = ((1, 1, 1, 64, 1000, False), PROBES[0], (1, 1, 1, 200, 24, True))
_HEAD_DIM, _STAGES, _CONSUMERS, _BLOCK_N = 128, 3, 2, 128


def _with_producer(text: str) -> Source:
    whole = replaced(step("p11_5_consumers"), "producer", text.strip("\n") + "\n" + _AFTER)
    return _changed(whole, "STAGES = 2;", f"STAGES = {_STAGES};")


def _expect_early(events: Sequence[Event], stages: int, consumers: int, slabs: int, case: str) -> None:
    """Raises CheckFailed where the producer waits for more than the stage that it fills next.

    events: of a run with so many slabs, each a load of its own, in a tile.
    """
    __tracebackhide__ = True
    producers = [e for e in events if e.warp >= 4 * consumers]
    released = sorted({e.values[0] for e in events if e.did == "arrive" and e.warp < 4 * consumers})  # K's, then V's
    places = sorted({e.values[0] for e in producers if e.did == "load"})[-2 * stages * slabs :: slabs]  # K's, then V's
    arrivals = dict.fromkeys(released, 0)
    asked, waited = [0, 0], [-1, -1]  # of K, of V
    for e in events:
        if e.warp < 4 * consumers:
            if e.did == "arrive":
                arrivals[e.values[0]] += 1
        elif e.did == "mbarrier-passed":
            expect(
                e.values[0] in arrivals,
                "the result is right, but the producer waits for its own copies. The consumers do that: it can ask for "
                "the next tile at once",
                diagnosis="no-overlap",
                case=case,
            )
            kind, stage = divmod(released.index(e.values[0]), stages)
            if arrivals[e.values[0]] >= consumers:
                tile = (arrivals[e.values[0]] // consumers - 1) * stages + stage
                waited[kind] = max(waited[kind], tile)
        elif e.did == "load" and e.values[0] in places:
            kind = int(e.values[0] >= places[stages])
            n = asked[kind]
            asked[kind] += 1
            last = max(waited[kind], waited[1] if kind == 0 else waited[0] - 1)  # K of the next tile may come before V
            expect(
                kind == 1 or waited[1] < max(0, n - stages),
                f"the result is right, but before K of tile {n} (counted from 0) is asked for, the producer has waited "
                f"for V's place too, until V of tile {waited[1]} was read. K has a place of its own, which is free "
                "earlier",
                diagnosis="no-overlap",
                case=case,
            )
            expect(
                last <= max(-1, n - stages),
                f"the result is right, but before {'KV'[kind]} of tile {n} (counted from 0) is asked for, the producer "
                f"has waited until tile {last} was read. With {stages} stages there is room as soon as "
                + (f"tile {n - stages} has been read" if n >= stages else "the block begins"),
                diagnosis="no-overlap",
                case=case,
            )


@exercise(
    "11.8",
    title="The producer, from a blank page",
    minutes=60,
    difficulty="Stretch",
    hints=[
        "Warps WARPS and later are the producer's warpgroup. All of its threads give their registers back; one thread "
        "of one warp does the rest; and none of them may go on to the consumers' code.",
        "Q first, to full_q: one tile, for which nobody has to make room. Then the tiles of keys in the order in which "
        "the consumers take them: from end - 1 down to 0. The nth of them, n = 0, 1, ..., goes to stage n % STAGES.",
        "Before K of the nth tile: mbarrier_wait(empty_k + 8 * stage, ...), with the producer's parity of exercise "
        "11.2. Then load_tile, which announces the bytes itself. Then the same for V, with empty_v and full_v.",
        "if (warp >= WARPS) { setmaxnreg_dec<PRODUCER_REGISTERS>(); if (warp == WARPS && elect_one()) { Q; the loop } "
        "return; }",
    ],
)
def _(producer: str) -> str:
    text = text_of(producer, "producer")
    if not blank_comments(text).strip():
        raise NotImplementedError
    whole = _with_producer(text)
    try:
        verdict = examine(whole, head_dim=_HEAD_DIM, fast=False, probes=_PRODUCED, max_seq=150)
    except CheckFailed as failed:
        told = _told(failed, text, whole)
        if told.diagnosis == "wrong-tile" and (known := _tiles_held(whole)) is not None:
            told = CheckFailed(known, diagnosis="wrong-tile", case=failed.case)
        raise told from None
    case = f"seq_q=64, seq_k=1000, head_dim={_HEAD_DIM}, STAGES={_STAGES}"
    _expect_well_asked(verdict.counters, case)
    report = probe(built(whole, check=True, head_dim=_HEAD_DIM), whole, _PRODUCED[0], head_dim=_HEAD_DIM, timeline=1)
    _expect_early(report.launches[0].events, _STAGES, _CONSUMERS, _HEAD_DIM // 64, case)
    return f"{verdict.cases} cases right with {_STAGES} stages, and each tile is asked for as soon as there is room"


def _expect_well_asked(c: Counters, case: str) -> None:
    __tracebackhide__ = True
    sentence = "the result is right, but no tile comes by tma_load: the copy engine should bring them"
    expect(c["tma_loads"] > 0, sentence, diagnosis="no-tma-load", case=case)


def _tiles_held(whole: Source) -> str | None:
    """Which keys' values the consumers' first tile holds, with several numbers of tiles.

    Every weight is the same, and of the last tile, which is taken first, one key is seen. Row j of V has its 1 in the
    column of its tile, so a row of O counts how many keys of each tile have been taken.
    """
    module, held = built(whole, check=False, head_dim=_HEAD_DIM), {}
    for tiles in (2, 3, 4, 5):
        seq_k = (tiles - 1) * _BLOCK_N + 1
        q, k, v = (torch.zeros(1, 1, n, _HEAD_DIM).half() for n in (64, seq_k, seq_k))
        v[0, 0, torch.arange(seq_k), torch.arange(seq_k) // _BLOCK_N] = 1
        o = ran(module, whole, None, functools.partial(module.forward, q, k, v, echo=False))[0][0, 0].double() * seq_k
        counts = o[0, :tiles].round()
        if not o.isfinite().all() or (o[0, :tiles] - counts)[counts < 2].abs().max() > 0.1:
            return None
        # The tile of one key counts once wherever it lies; that in the first place counts once too.
        if (absent := (counts == 0).nonzero().flatten().tolist()) and tiles > 2:
            return f"with {tiles} tiles of keys, 0 to {tiles - 1}, the values of tile {absent[0]} are in no stage"
        small = (counts == 1).nonzero().flatten().tolist()
        others = [t for t in small if t != tiles - 1]
        if small[-1:] != [tiles - 1] or len(others) > 1:
            return None
        held[tiles] = others[0] if others else tiles - 1
    wrong = {tiles: t for tiles, t in held.items() if t != tiles - 1}
    if not wrong:
        return None
    tiles, first = next(iter(wrong.items()))
    said = f"with {tiles} tiles of keys the consumers take tile {tiles - 1} first, and find tile {first} there"
    if set(held.values()) == {0}:
        return (
            f"{said}; so with any number: the tiles are asked for upwards, and the consumers go from end - 1 down to 0"
        )
    right = [str(n) for n, t in held.items() if t == n - 1]
    well = f", and with {' or '.join(right)} tiles it is right" if right else ""
    return f"{said}{well}: the nth tile asked for, n = 0, 1, ..., is tile end - 1 - n, and lies in stage n % STAGES"


# The barriers of `_with_producer`, in the order in which they lie behind its tiles.
_WAITS = re.compile(r"Warps? (\d+)[-\d, ]* waits? in line .*? \(bytes (\d+) to \d+ of the dynamic shared memory\): "
                    r"phase (\d+) is under way")  # fmt: skip


def _who_waits_for_whom(deadlock: str) -> str | None:
    """The emulator's finding in terms of tiles and stages, and what follows of it; None where that says nothing."""
    first = (64 * _CONSUMERS + 2 * _STAGES * _BLOCK_N) * _HEAD_DIM * 2 + 8  # behind full_q
    names = [(what, kind, s) for what in ("full", "empty") for kind in "KV" for s in range(_STAGES)]
    waits = {}
    for warp, at, phase in _WAITS.findall(deadlock):
        number = (int(at) - first) // 8
        if number == -1 and "Warp 8" not in deadlock:
            return "nobody has asked for Q: the consumers wait for it in every block, in one without a key too"
        if not 0 <= number < len(names):
            return None
        waits["consumers" if int(warp) < 4 * _CONSUMERS else "producer"] = (*names[number], int(phase))
    if list(waits) == ["consumers"] and waits["consumers"][0] == "full":
        _, kind, stage, phase = waits["consumers"]
        return f"the consumers wait for {kind} in stage {stage}, and the producer has ended: it asks for too few tiles"
    if len(waits) != 2 or waits["consumers"][0] != "full" or waits["producer"][0] != "empty":
        return None
    (_, kind, stage, _), (_, room, at, phase) = waits["consumers"], waits["producer"]
    said = f"the consumers wait for {kind} in stage {stage}, and the producer for room for {room} in stage {at}"
    if (kind, stage) == (room, at):
        return (
            "the producer waits for the release of the very tile that it is about to bring. "
            + ("A place that nobody has used yet is free: the first round's parity is 1" if not phase else
               "It should wait for the release of the tile that was there before: the other parity")
        )  # fmt: skip
    return (
        f"{said}. Nobody has brought what they wait for: the nth tile, n = 0, 1, ..., has its place in stage "
        f"n % STAGES, and there are {_STAGES} stages"
        if kind == room
        else said
    )


def _told(failed: CheckFailed, text: str, whole: Source) -> CheckFailed:
    """What the producer does wrong, where the emulator's words do not say it; its finding below."""
    code = blank_comments(text)
    slug, kind = failed.diagnosis, failed.diagnosis
    if slug == "registers-missing" and "setmaxnreg_dec" not in code:
        kind = "registers-kept"
        said = (
            "the producer's warps have not given their registers back: setmaxnreg_dec<PRODUCER_REGISTERS>, by all four"
        )
    elif slug == "registers-missing" and "return" not in code:
        kind, said = "no-return", "the producer's warps run on into the consumers' code; they should return, all four"
    elif slug == "mbarrier-arrivals" and "elect_one" not in code and "threadIdx" not in code:
        kind, said = "asked-by-all", "each lane of the producer asks for the tile: one thread alone should"
    elif slug in ("deadlock", "stage-overwritten", "mbarrier-arrivals") and (seen := _seen(whole)) is not None:
        kind, said = seen
    elif slug == "deadlock" and (where := _who_waits_for_whom(failed.sentence)) is not None:
        said = where
    elif slug == "stage-overwritten":
        said = (
            f"a stage is filled again before it is free: the nth tile, n = 0, 1, ..., has its place in stage n % "
            f"STAGES, of {_STAGES}, and has to wait for the release of tile n - {_STAGES}"
        )
    elif slug in (*KINDS, "does-not-compile", "launch-failed"):
        return failed
    else:
        # What the checker knows of wrong numbers are mistakes of whole kernels; the consumers' masks are right.
        kind = "wrong-tile"
        said = (
            "a tile holds other numbers than its consumers take it for. Where several heads of Q share one of K and V, "
            "those tiles come from kv_head"
            if "only cases with grouped queries fail" in failed.sentence
            else "a tile holds other numbers than its consumers take it for: which rows of which head should it hold, "
            "and in which order do they come?"
        )
        if slug != "wrong-value":
            return CheckFailed(said, diagnosis=kind, case=failed.case)
    return CheckFailed(f"{said}\n{failed.sentence}", diagnosis=kind, case=failed.case)


def _seen(whole: Source) -> tuple[str, str] | None:
    """(slug, sentence) of what the producer's waits and loads show, or None."""
    module = built(whole, check=True, head_dim=_HEAD_DIM)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, _PRODUCED[0], head_dim=_HEAD_DIM, timeline=1)
    launches = module.report.launches if module.report is not None else []
    own = [e for e in (launches[0].events if launches else []) if e.warp >= 4 * _CONSUMERS]
    waited = {e.values[0] for e in own if e.did in ("mbarrier-wait", "mbarrier-passed")}
    if not waited.isdisjoint(e.values[0] for e in own if e.did == "arrive" and e.values[1]):
        return "waits-for-itself", (
            "the producer waits at a `full` barrier, for its own copies: room for a tile is what `empty` says, where "
            "the consumers arrive"
        )
    places, slab = sorted({e.values[0] for e in own if e.did == "load"}), _BLOCK_N * 128
    apart = min((b - a for a, b in itertools.pairwise(places)), default=slab)
    if apart < slab:
        return "stages-overlap", (
            f"two tiles lie one on the other: copies of {slab} bytes begin {apart} bytes apart. A stage of K, or of V, "
            "is KV_BYTES long"
        )
    return None


# ---- 11.9 -----------------------------------------------------------------------------------------------------------

# What may be called or used as a function; whatever else the text does not define itself is by somebody else's hand.
_BY_HAND = re.compile(
    r"(?:if|for|while|switch|return|sizeof|decltype|__launch_bounds__|exp2_polynomial|f(?:abs|min|max|ma)f?|"
    r"(?:rint|nearbyint|round|floor|ceil|trunc|copysign)f?|l?l?rintf|l?l?roundf|min|max|abs|u?int(?:8|16|32|64)?(?:_t)?|"
    r"unsigned|float|double|bool|long|short|(?:static|reinterpret|const|bit)_cast|memcpy|is(?:nan|inf|finite)|signbit|"
    r"__(?:float|double|u?int|u?ll)(?:_as_|2)\w+|__f(?:ma|mul|add|sub|maf)\w*)"
)
_ALLOWED = 2.0**-12  # half of what P's rounding to fp16 does


@exercise(
    "11c.1",
    title="2 to the x, by multiplications",
    minutes=30,
    difficulty="Core",
    hints=[
        "2^x = 2^n * 2^f, with n the nearest whole number and f = x - n in [-0.5, 0.5]. 2^n needs no arithmetic: a "
        "float keeps its exponent, with 127 added, in bits 23 to 30.",
        "2^f by a polynomial, Horner's way: fmaf(f, fmaf(f, fmaf(f, c3, c2), c1), 1.f). Taylor's coefficients, ln 2, "
        "ln(2)^2 / 2, ln(2)^3 / 6, are best at 0 only: at -0.5 they err by 8e-4 of the value, where 2.4e-4 is "
        "allowed. One term more, or coefficients that spread the error: 0.6932829, 0.2422110, 0.0550090.",
        "n = rintf(x) and (int) n work. So does a trick without a conversion: x + 12582912.f rounds x to a whole "
        "number, and leaves it in the lowest bits; __float_as_uint(that) << 23 has it where the exponent is.",
        "Below -127 there is no such float: take the maximum of x and -127 first, so that -infinity does no harm. "
        "Which maximum keeps NaN? fmaxf(x, y) does not; x < -127.f ? -127.f : x does. From n = 128 on the exponent "
        "would run over as well: n = 128 itself has the bits of infinity, so cut there, and keep NaN.",
    ],
)
def _(exp2_polynomial: str) -> str:
    text = text_of(exp2_polynomial, "exp2_polynomial")
    expect("exp2_polynomial(" in text, "the text should still define `exp2_polynomial`", diagnosis="wrong-entry")
    code = blank_comments(text)
    own = set(re.findall(r"(?:\b(?:float|int|u?int\d+_t|unsigned|bool|double|void|auto)|#define)\s+(\w+)\s*[(=]", code))
    called = re.findall(
        r"(\w+)\s*(?:<[^<>();]*>)?\s*\(|\b(asm|__asm__|_*(?:exp|exp2|exp10|expm1|pow)f?|exp2_approx)\b|(##)", code
    )
    foreign = [n for names in called for n in names if n and n not in own and not _BY_HAND.fullmatch(n)]
    expect(
        not foreign,
        f"`{foreign[0] if foreign else ''}` is what this function should do without: multiplications, additions and "
        "integer operations only",
        diagnosis="not-by-hand",
    )
    whole = replaced(_source("phase_11_exp"), "operands", text)
    module = built(whole, check=False)
    x = torch.cat([torch.linspace(-126, 8, 9000), torch.arange(-126.0, 9), torch.linspace(-1, 1, 3001)])
    y = _powers(module, whole, x)
    error = ((y.double() - (want := torch.exp2(x.double()))) / want).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    worst = int(error.argmax())
    said = f"exp2_polynomial({x[worst]:.6g}) is {y[worst]:.6g}, and 2^x is {want[worst]:.6g}"
    for words, power in (("e^x: x is to be split as it is, without a factor", x.double().exp()),
                         ("2^-x: a sign is wrong", torch.exp2(-x.double()))):  # fmt: skip
        near = (x.abs() < 8) & (((y - power) / power).abs() < 1e-2)
        expect(near.sum() < 0.9 * (x.abs() < 8).sum(), f"it is {words}.\n{said}", diagnosis="other-power")
    if float(error.max()) > _ALLOWED and (other := _other_coefficients(module, whole)):
        raise CheckFailed(f"{other[1]}.\n{said}", diagnosis=other[0])
    if float(error.max()) > 0.25:
        at_whole = error[9000:9135].max() < _ALLOWED
        if float(error.median()) < _ALLOWED or at_whole:
            why = "right at whole numbers" if at_whole else "right for most numbers"
            raise CheckFailed(f"{said}: it is {why}, and wrong where x is split: is f = x - n in [-0.5, 0.5], or in "
                              "[0, 1), for negative x too?", diagnosis="wrong-split")  # fmt: skip
        raise CheckFailed(
            f"{said}. The exponent of a float is in bits 23 to 30, with 127 added: for 2^0 it is 0x3f800000",
            diagnosis="wrong-power",
        )
    below = x - x.round()  # of negative x: where n = ceil and n = floor part company
    fine = [float(error[(x < 0) & side].max()) <= _ALLOWED for side in (below <= 0, below >= 0)]
    expect(
        fine[0] == fine[1],
        f"{said}: right where x is just {'below' if fine[0] else 'above'} a whole number. So x is not split at the "
        "nearest one: with n = rintf(x), f = x - n stays in [-0.5, 0.5], for negative x too",
        diagnosis="wrong-split",
    )
    expect(
        float(error.max()) <= _ALLOWED,
        f"{said}: an error of {float(error.max()):.1e}, where {_ALLOWED:.1e} is allowed. P is rounded to 11 bits "
        "anyway, but this is more: better coefficients, or a term more",
        diagnosis="not-exact-enough",
    )
    low = torch.tensor([-torch.inf, -1e30, -1000.0, -300.0, -200.0, -150.0, -129.0])
    y = _powers(module, whole, low)
    bad = ((y < 0) | (y > 2.0**-120) | y.isnan()).nonzero().flatten().tolist()
    at = bad[0] if bad else 0
    expect(
        not bad,
        f"right from -126 on, but exp2_polynomial({low[at]:g}) is {y[at]:.4g}, and should be 0, or next to it: a "
        "masked score is -infinity, and an exponent below -127 runs over into the sign",
        diagnosis="wrong-below",
    )
    high = torch.cat([torch.linspace(8, 126, 2000), torch.tensor([127.4, 127.6, 128, 129, 200, 255, 256, 300])])
    high = torch.cat([high, torch.tensor([1000, 2.0**22 + 0.5, 1e10, 1e30, torch.inf])])
    y, least = _powers(module, whole, high), torch.exp2(high.double().clamp(max=126))
    good = (y >= least * (1 - _ALLOWED)) & ((high > 126) | (y <= least * (1 + _ALLOWED)))
    bad = (~good).nonzero().flatten().tolist()
    at = bad[0] if bad else 0
    expect(
        not bad,
        f"right from -infinity to 8, but exp2_polynomial({high[at]:g}) is {y[at]:.4g}, and should be "
        f"{'2^126 or more' if high[at] > 126 else f'{least[at]:.4g}'}: under a maximum that is too low a score may be "
        "any number, an exponent from 129 on runs over into the sign, and then no sum tells",
        diagnosis="wrong-above",
    )
    y = _powers(module, whole, torch.tensor([torch.nan]))
    sentence = f"exp2_polynomial(NaN) is {y[0]:g}: a NaN among the scores should be seen in the result, not hidden"
    expect(bool(y.isnan()), sentence, diagnosis="nan-hidden")
    return f"{len(x)} numbers, the largest error {_ALLOWED:.1e} or less; both infinities and NaN too"


def _other_coefficients(module: CudaModule, whole: Source) -> tuple[str, str] | None:
    """What polynomial the function computes where x is split rightly, if it is far from that of 2^f."""
    f = torch.linspace(-0.498, 0.498, 1001).double()
    y = torch.stack([_powers(module, whole, f.float() + n).double() / 2.0**n for n in (-3, -2, 2)])
    if not y.isfinite().all() or not torch.allclose(y[0], y[1], atol=1e-5):
        return None
    if (y[:, 500].abs().clamp(min=1e-30).log2().abs() > 4).any():
        return None  # at whole numbers: that is the exponent's doing
    if not torch.allclose(y[0], y[2], atol=1e-5):
        return "wrong-split", (
            "x is split otherwise where it is negative than where it is positive. A conversion to int cuts towards 0; "
            "with n = rintf(x), f = x - n stays in [-0.5, 0.5] on both sides"
        )
    powers = f[:, None] ** torch.arange(6)
    found = torch.linalg.lstsq(powers, y[0]).solution
    shift = math.log2(abs(found[0]) + 1e-9)
    if (powers @ found - y[0]).abs().max() > 1e-5 or (
        abs(shift) > 0.5 and (abs(shift) > 4 or abs(shift % 1 - 0.5) > 0.499)
    ):
        return None  # no polynomial; or one times a power of 2, which is the exponent's doing
    right = torch.tensor([math.log(2) ** n / math.factorial(n) for n in range(6)], dtype=torch.float64)
    if (found - right)[:3].abs().max() < 0.05:
        return None
    if (found - right * (-1.0) ** torch.arange(6))[:3].abs().max() < 0.05:
        return "wrong-split", "it is 2^(n - f) for x = n + f: f has the wrong sign, it is x - n"
    of_e = torch.tensor([1 / math.factorial(n) for n in range(6)], dtype=torch.float64)
    why = ". That is e^f: each power of f needs a factor ln 2 more" if (found - of_e)[:3].abs().max() < 0.05 else ""

    def written(c: torch.Tensor) -> str:
        return " ".join(f"{x:+.3f} f^{n}" for n, x in enumerate(c.tolist()) if n).replace("f^1", "f")

    return "wrong-coefficients", (
        f"x is split well, and with f = x - n your polynomial is {found[0]:.3f} {written(found[:4])}; 2^f is about "
        f"1 {written(right[:4])}{why}"
    )


def _powers(module: CudaModule, whole: Source, x: torch.Tensor) -> torch.Tensor:
    x, y = x.float().contiguous(), torch.zeros(len(x))
    ran(module, whole, None, lambda: module.launch("run", x, y, len(x), echo=False))
    return y
