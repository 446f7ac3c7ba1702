"""Checks of 11.1 to 11.5: mbarriers by hand, parities, descriptors, budgets, a log of events.

What the Python answers say is compared with the emulator: phase_11.cu has the kernels.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import Source, built, expect_defined, ran, replaced, text_of
from flashlab.check.lookup import Row
from flashlab.cuda import CudaModule
from flashlab.exercises import phase_11_ladder as _ladder  # noqa: F401  11.6 to 11.14
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.simt.report import Event

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
    title="An mbarrier by hand", minutes=15, difficulty="Warm-up",
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
        "operation in ('arrive', 'arrive_expect_tx')": "arrive and arrive_expect_tx arrive, the two others do not",
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
        Row("never-ends", "no phase ever ends: it does when no arrival and no byte is missing, and who arrives is one "
            "arrival, whatever number of bytes stands beside it", [("missing -= 1", "missing -= n")]),
        Row("stays-complete", _STAYS, [(_PAIR, "(latest >= 0, latest % 2 == 1)")]),
        Row("stays-complete", _STAYS, [(_PAIR, "(latest >= 0, latest != 0)")]),
        Row("stays-complete", "both parities are complete from the end of the first phase on: one of them belongs to "
            "the phase that is under way, and is not complete", [(_PAIR, "(latest >= 0, True)")]),
        Row("phase-0-alone", "parity 0 is complete while phase 1 is under way, and never again: every second phase has "
            "parity 0", [(_PAIR, "(latest == 0, latest != 0)")]),
        Row("bytes-not-counted", "bytes do not count here: a phase ends when all arrivals are there and all bytes have "
            "come that were announced", [("missing == 0 and bytes_under_way == 0", "missing == 0")]),
        Row("one-copy-for-all", "a copy takes off all the bytes that are announced: it takes off its own, and others "
            "are still under way", [("bytes_under_way -= n", "bytes_under_way = 0")]),
        Row("not-ended-by-bytes", "a phase ends only when somebody arrives: where the arrivals are there already, the "
            "last bytes end it", [("if missing == 0 and", 'if operation != "copy" and missing == 0 and')]),
        Row("ended-by-a-copy", "a copy that brings the last bytes ends the phase, though arrivals are missing: it "
            "waits for both", [("if missing == 0 and bytes_under_way == 0",
                      'if bytes_under_way == 0 and (missing == 0 or operation == "copy")')]),
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

_BOTH, _COUNTED = "use % 2, use % 2", "sum(tiles[:part]) + i"
_PARTS = (3, 1, 0, 4)


def _some_tile(r: random.Random) -> tuple[tuple[int, ...], int, int, int]:
    part = r.randint(0, 3)
    tiles = [r.randint(0, 9) + (n == part) for n in range(4)]
    return tuple(tiles), part, r.randrange(tiles[part]), r.randint(1, 8)


@rule(
    "11.2",
    title="Which parity, how many bytes?", minutes=20,
    hints=[
        "How many tiles have gone through the ring before this one, in all parts? How often has its stage been used "
        "before? Each use is one phase of `full`, counted from 0: the consumer of use n waits for phase n.",
        "Write down what completes phase 0 of `empty`, and what phase 1. The producer of use n needs the arrivals for "
        "use n - 1, or for n = 0 those before the loop: which phase of `empty` are they?",
        "tile_bytes: how many boxes have a row that exists? Each of them counts whole, zeros too: box_rows rows of 64 "
        "numbers of 2 bytes. And how many boxes lie side by side in head_dim columns?",
    ],
    returns="stage, consumer's parity, producer's parity",
    strict=True,
    inputs=[(_PARTS, part, i, stages) for stages in (1, 2, 3, 4, 5) for part in (0, 1, 3) for i in range(_PARTS[part])]
    + [((13, 2), 0, i, stages) for stages in (2, 3) for i in range(13)],
    draw=_some_tile,
    words={"use": "nth // stages"},
    notes={
        "nth % stages": "the nth tile of all parts uses stage nth % stages",
        "nth // stages": "a stage is used once in `stages` tiles, and each use is one phase",
        "sum(tiles[:part])": "the ring runs on from part to part",
        "use % 2": "a wait takes the phase's parity, its last bit",
    },
    rows=[
        Row("new-barrier", "producer's parity: it is that of a ring at whose `empty` nobody arrives before the loop. "
            "Here those arrivals are phase 0, so use n waits for phase n", [(_BOTH, "use % 2, (use - 1) % 2")]),
        Row("begins-again", "each part begins at stage 0 with use 0, in a ring at whose `empty` nobody arrives before "
            "the loop: it runs on", [(_COUNTED, "i"), (_BOTH, "use % 2, (use - 1) % 2")]),
        Row("equal-parts", "the parts before count as long as this one: each has tiles of its own",
            [(_COUNTED, "part * tiles[part] + i")]),
        Row("equal-parts", "all parts count as long as the first: each has tiles of its own",
            [(_COUNTED, "part * tiles[0] + i")]),
        Row("iteration-before", "producer's parity: it is that of the tile before: the stage was used `stages` tiles "
            "before", [(_BOTH, "use % 2, (nth - 1) // stages % 2")]),
        Row("first-round-free", "producer's parity: it is 1 in the first round, as where nobody has arrived before the "
            "loop", [(_BOTH, "use % 2, (use % 2 if use else 1)")]),
    ],
)  # fmt: skip
def waits(tiles, part, i, stages):
    """(the stage of tile i of a part, the parity a consumer waits for, the parity the producer waits for)."""
    # BEGIN SOLUTION
    nth = sum(tiles[:part]) + i  # of all tiles that go through the ring
    use = nth // stages  # how often the stage has been used before
    return nth % stages, use % 2, use % 2
    # END SOLUTION


_ROWS, _WIDE = "-(-min(tile_rows, rows_left) // box_rows) * box_rows", "-(-head_dim // 64) * 64"


@rule(
    "11.2",
    returns="bytes",
    strict=True,
    inputs=[(128, box, d, left) for box in (128, 64, 32) for d in (64, 80, 128, 256) for left in (128, 300, 50, 64, 1)],
    draw=lambda r: (64 * r.randint(1, 3), r.choice((16, 32, 64)), r.choice((16, 64, 80, 128, 256)), r.randint(1, 300)),
    notes={
        "box_rows": "a copy brings whole boxes, and what they fill with zeros counts", "2": "an element has 2 bytes",
        "64": "a box has 64 columns, and what it fills with zeros counts",
        "rows_left": "a box none of whose rows exists is not asked for", "tile_rows": "a tile has tile_rows rows",
        "head_dim": "all boxes of the tile count at the same barrier",
    },
    rows=[
        Row("boxes-not-asked-for", "the whole tile counts, by head_dim: a box that nobody asks for brings nothing, and "
            "one that is asked for has 64 columns", [(_ROWS, "tile_rows"), (_WIDE, "head_dim")]),
        Row("zeros-not-counted", "rows that do not exist are left out: the copy engine fills the whole box, with "
            "zeros there, and counts all of it", [(_ROWS, "min(tile_rows, rows_left)")]),
        Row("zeros-not-counted", "columns that do not exist are left out: a box has 64, with zeros there, and all of "
            "it counts", [(_WIDE, "head_dim")]),
        Row("zeros-not-counted", "what does not exist is left out: the copy engine fills the whole box, with zeros "
            "there, and counts all of it", [(_ROWS, "min(tile_rows, rows_left)"), (_WIDE, "head_dim")]),
        Row("one-box", "one box counts, of head_dim columns: a tile has several, and each has 64 columns",
            [(_ROWS, "box_rows"), (_WIDE, "head_dim")]),
        Row("bits", "these are bits: expect_tx takes bytes", [("* 64 * 2", "* 64 * 16")]),
    ],
)  # fmt: skip
def tile_bytes(tile_rows, box_rows, head_dim, rows_left):
    """Bytes to announce for a tile of 16-bit numbers, in boxes of `box_rows` rows; `rows_left` rows exist."""
    # BEGIN SOLUTION
    rows = -(-min(tile_rows, rows_left) // box_rows) * box_rows  # zeros count
    return rows * -(-head_dim // 64) * 64 * 2
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
    expect_defined(text, *(name for name, *_ in _TILE_KINDS))
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
                sentence = f"in {name}(tile, {step}) {slip[0]}\n{failed.sentence}"
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
    said = f"read through {name}(tile, {step}), the element of row {wanted[0]}, column {wanted[1]} is {place} "
    said += f"({len(off)} of {row.numel()} elements are wrong)"
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
    near = (exact, exact + 4, exact - 1, exact - 8 * r.randint(0, 4 * fit), r.randint(0, 233472))
    return m, n, d, max(0, r.choice(near))


@rule(
    "11.4",
    title="Three budgets", minutes=25,
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
        (192, 32, 128, 31461), (64, 64, 64, 40996), *(_stages(random.Random(i)) for i in range(150)),
    ],
    draw=_stages,
    words={"once": "once", "per_stage": "per_stage"},
    notes={
        "2 * block_n": "a stage has a tile of K and one of V", "4 * 8": "a stage has four barriers of 8 bytes",
        "8": "a barrier has 8 bytes: one for Q, four for a stage", "0": "where not even Q fits, no stage does",
        "block_m * head_dim * 2": "Q's tile stays in shared memory",
        "once": "Q's tile stays in shared memory", "shared_bytes": "what fits exactly fits",
        "4": "a stage has four barriers", "2": "an element has 2 bytes; a stage has a tile of K and one of V",
    },
    rows=[
        Row("barriers-forgotten", "the tiles are right, the barriers are missing: 8 bytes each, one for Q and four for "
            "a stage", [("* 2 + 8", "* 2"), (" + 4 * 8", "")]),
        Row("elements-not-bytes", "an element has 2 bytes, and here it has 1",
            [("head_dim * 2 + 8", "head_dim + 8"), ("head_dim * 2 + 4", "head_dim + 4")]),
        Row("floats", "an element has 2 bytes, and here it has 4",
            [("head_dim * 2 + 8", "head_dim * 4 + 8"), ("head_dim * 2 + 4", "head_dim * 4 + 4")]),
        Row("five-barriers", "there are five barriers here, whatever the stages: a stage has four of its own",
            [("* 2 + 8", "* 2 + 5 * 8"), (" + 4 * 8", "")]),
        Row("half-a-stage", "a stage has one tile here, and two barriers: it has a tile of K and one of V, with two "
            "barriers each", [("2 * block_n * head_dim * 2 + 4 * 8", "block_n * head_dim * 2 + 2 * 8")]),
        Row("q-in-every-stage", "each stage has a tile of Q here: there is one, and it stays",
            [("(shared_bytes - once) // per_stage", "(shared_bytes - 8) // (per_stage + once - 8)")]),
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
        "256": "a thread has at most 256 registers", "1": "the producer's warpgroup is launched too",
        "128 * producer": "the producer keeps registers too, all four warps of it",
        "8": "registers come in multiples of 8",
        "producer": "the producer keeps registers too, all four warps of it",
        "at_launch * threads": "what the launch's rounding leaves over belongs to nobody",
    },
    rows=[
        Row("rounded-at-the-launch", "all 65536 are dealt out: the launch gives each thread a multiple of 8, and what "
            "that rounding leaves over belongs to nobody", [("at_launch * threads", "65536")]),
        Row("not-rounded-at-the-launch", "the launch's registers are not rounded: each thread gets a multiple of 8",
            [("// threads // 8 * 8", "// threads")]),
        Row("fewer-than-256", "at most 248 registers are taken here: 256 is a multiple of 8 too, and a thread may "
            "have so many", [("min(256,", "min(248,")]),
        Row("as-at-the-launch", "it is the registers at the launch: the consumers can take those too that the producer "
            "gives away", instead="65536 // (128 * (consumers + 1)) // 8 * 8"),
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
    inputs=[(64, 248, 10), *((d, r, others) for d, r in ((64, 160), (64, 240), (128, 168), (128, 240), (256, 240))
                             for others in (20, 40, 56))],
    draw=lambda r: (r.choice((64, 128)), 8 * r.randint(20, 31), r.randint(10, 60)),
    words={"left": "left"},
    notes={
        "others": "they are in the registers too", "16": "keys are the K of the second product, which goes by 16",
        "head_dim // 2": "64 rows are shared by 128 threads: O takes head_dim / 2 registers per thread",
        "head_dim": "64 rows are shared by 128 threads", "4": "a key takes 1/2 register for S and 1/4 for P",
        "3": "a key takes 1/2 register for S and 1/4 for P",
    },
    rows=[
        Row("p-as-floats", "P counts as floats: it has 16-bit numbers, two of them in a register",
            [("left * 4 // 3", "left")]),
        Row("s-a-row-per-thread", "S takes a register per key: 64 rows are shared by 128 threads, so it takes half of "
            "one", [("left * 4 // 3", "left * 4 // 5")]),
        Row("a-row-per-thread", "each accumulator is that of a whole row: 64 rows are shared by 128 threads, half a "
            "row for each", [("head_dim // 2", "head_dim"), ("left * 4 // 3", "left * 2 // 3")]),
        Row("power-of-two", "block_n is a power of two here: any multiple of 16 will do",
            [("left * 4 // 3 // 16 * 16", "2 ** ((left * 4 // 3).bit_length() - 1)")]),
        Row("exact-fit", "what fits exactly is left out: all the registers may be used",
            [("left * 4 // 3", "(left - 1) * 4 // 3")]),
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
    uses = [i // stages for i in range(tiles)]
    table = torch.tensor([(i % stages, n % 2, (n - 1) % 2) for i, n in enumerate(uses)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    pauses = torch.randint(0, 4, (consumers, tiles), generator=generator, dtype=torch.int32)
    source, out = torch.zeros(tiles * 32, dtype=torch.int32), torch.zeros(consumers, tiles, dtype=torch.int32)
    module = _module(True)
    arguments = (table, pauses, source, out, tiles, stages, consumers, producers, 0)
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
# What the pipeline's warps do not do: arrive for the next phase before somebody has passed, wait for their own phase,
# pass at a new barrier where one of two has arrived.
_BY_HAND = (
    (
        [(0, "arrive", 8), (3, "mbarrier-wait", 8), (1, "arrive", 8), (2, "arrive", 8), (3, "mbarrier-passed", 8)],
        {8: 2},
    ),
    ([(0, "arrive", 8), (0, "mbarrier-wait", 8), (1, "arrive", 8), (0, "mbarrier-passed", 8)], {8: 2}),
    ([(0, "arrive", 8), (1, "mbarrier-wait", 8), (1, "mbarrier-passed", 8)], {8: 2}),
)
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
    stages, consumers, tiles, nth, producers = of
    if not tiles:
        return f"the log {_BY_HAND[nth][0]}, 2 arrivals per phase"
    return f"{stages} stages, {consumers} consumers, {producers} producer{'s' * (producers > 1)}"


@rule(
    "11.5",
    title="Who waits for whom?", minutes=25,
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
    inputs=[
        *(((s, c, 3 * s + 1, seed, p), None) for seed, (s, c, p) in enumerate(_PIPELINES)),
        *(((1, 1, 0, nth, 1), None) for nth, _ in enumerate(_BY_HAND)),
    ],
    draw=_pipeline,
    called=lambda fn, of, _: fn(*(log(*of) if of[2] else copy.deepcopy(_BY_HAND[of[3]]))),
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
        Row("unfinished", "you take the latest arrivals, of a phase too that is not complete: the wait was for the one "
            "before", [(_WHO, "set(arrived[bar][-arrivals[bar] :]) if phase >= 0 else set()")]),
        Row("phase-0-alone", "every wait is for phase 0 here: a barrier's second wait is for the phase after it",
            [(_TURNS, "phase = min(len(arrived[bar]) // arrivals[bar], 1) - 1")]),
        Row("itself", "you name the warp that waits too: it was for others", [(_WHO, f"{{warp}} | ({_WHO})")]),
        Row("between", "you name who arrived between the beginning of the wait and its end. Who arrived before the "
            "wait began belongs to the phase as well",
            [("found = []", "found, began = [], {}"),
             (_ADDED, _ADDED + "\n        if did == 'mbarrier-wait':\n            began[warp] = len(arrived[bar])"),
             (_WHO, "set(arrived[bar][began[warp] :])")]),
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
