"""Checks of phase 8: banks, swizzles, stages, and the merge of split keys.

CUDA answers are text: a few lines, which take the place of the same lines of a file of the series. The whole file is
then built for the emulator, twice (checked and fast), and run: a race or a copy that was not waited for is told with
the learner's line; a wrong result with the checker's diagnosis; a right result that costs too much with the counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashlab.check import CheckFailed, expect, running
from flashlab.check.cuda_answer import Source, Verdict, built, examine, probe, region, replaced, text_of
from flashlab.exercises.registry import exercise
from flashlab.kernels.series import step

BANK_BYTES, ROW_BYTES = 128, 16  # all 32 banks; what one address of ldmatrix stands for


def _without_conflicts(verdict: Verdict, head_dim: int) -> None:
    __tracebackhide__ = True
    c = verdict.counters
    expect(
        c["ldmatrix_wavefronts"] == c["ldmatrix_ideal"],
        f"the result is right, but ldmatrix takes {c['ldmatrix_wavefronts']} wavefronts where "
        f"{c['ldmatrix_ideal']} would do: "
        "two rows of one 8 x 8 tile still share their banks",
        diagnosis="bank-conflicts",
        case=f"head_dim={head_dim}",
    )


# ---- 8.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.1",
    title="Count the wavefronts of a padded tile",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Address a is in bank a / 4 % 32. Sixteen bytes are four neighbouring banks, so there are eight "
        "groups of four.",
        "The group of row r is r * row_bytes // 16 % 8. A group that is asked for by three of the eight "
        "rows needs three "
        "wavefronts, and the others wait.",
        "Count how many of the eight rows fall into each group; the answer is the largest count.",
    ],
)
def _(wavefronts: Callable[[int], int]) -> str:
    widths = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, 264 // 8 * 16, 272, 288, 384, 512]
    for width in widths:
        groups = [row * width // ROW_BYTES % 8 for row in range(8)]
        want = max(groups.count(g) for g in set(groups))
        with running(f"row_bytes={width}"):
            got = wavefronts(width)
        why = f"the eight rows begin at {', '.join(str(r * width % BANK_BYTES) for r in range(8))} modulo 128"
        expect(
            got == want,
            f"wavefronts({width}) is {want}, not {got}: {why}",
            diagnosis="wrong-value",
            case=f"row_bytes={width}",
        )
    return f"{len(widths)} widths"


# ---- 8.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.2",
    title="A swizzle of your own",
    minutes=15,
    difficulty="Core",
    hints=[
        "Unswizzled, chunk c is at place c in every row: eight rows, one group of banks. What must "
        "differ from row to row?",
        "Rotating works: (chunk + row) % 8 inside each group of eight places. So does XOR, which costs "
        "one instruction.",
        "return chunk ^ (row % 8). XOR with a number below 8 changes only the lowest three bits: a chunk "
        "stays inside its "
        "group of eight places, and no two chunks of a row meet.",
    ],
)
def _(place: Callable[[int, int], int]) -> str:
    for chunks in (8, 16, 32):
        case = f"head_dim={8 * chunks}"
        table = []
        for row in range(64):
            with running(f"{case}, row {row}"):
                places = [place(row, chunk) for chunk in range(chunks)]
            expect(
                sorted(places) == list(range(chunks)),
                f"row {row} puts its {chunks} chunks at places {places}: each place from 0 to "
                f"{chunks - 1} has to be used once",
                diagnosis="not-a-permutation",
                case=case,
            )
            table.append(places)
        for first in range(0, 64, 8):
            for chunk in range(chunks):
                groups = [table[first + i][chunk] % 8 for i in range(8)]
                shared = next((g for g in groups if groups.count(g) > 1), None)
                if shared is None:
                    continue
                rows = [first + i for i in range(8) if groups[i] == shared]
                raise CheckFailed(
                    f"chunk {chunk} of rows {', '.join(map(str, rows))} is in the same four banks, "
                    f"{4 * shared} to {4 * shared + 3}",
                    diagnosis="bank-conflicts",
                    case=case,
                )
    return "no conflict in any ldmatrix, head_dim 64, 128 and 256"


# ---- 8.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.3",
    title="The swizzle in CUDA",
    minutes=10,
    difficulty="Core",
    hints=[
        "A row is ROW_BYTES bytes, a chunk 16 bytes and 8 columns. Where does chunk column / 8 of this row go?",
        "In C++, ^ binds less tightly than + and *: put the XOR in parentheses.",
        "return row * ROW_BYTES + (column / 8 ^ row % 8) * 16;",
    ],
)
def _(at: str) -> str:
    text = text_of(at, "at")
    source = replaced(step("p8_4_swizzle"), "swizzle", text)
    for head_dim in (64, 128):
        _without_conflicts(examine(source, head_dim=head_dim, fast=False, max_seq=150), head_dim)
    return "head_dim 64 and 128: right, and no bank conflict"


# ---- 8.4 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.4",
    title="How many groups may be in flight?",
    minutes=15,
    difficulty="Core",
    hints=[
        "cp_async_wait<N> returns when at most N of this thread's groups, the latest, are still in "
        "flight. Write down which "
        "groups have been committed when the loop comes to the wait for tile j.",
        "With STAGES > 1 tiles 0 to j + STAGES - 2 have been committed by then (the refill of this round "
        "comes later). How many "
        "of those are later than j?",
        "STAGES - 2 groups are younger than tile j's. With one stage tile j is the last group committed: "
        "none is younger.",
    ],
)
def _(in_flight: str) -> str:
    text = text_of(in_flight, "in_flight")
    name = "constexpr int IN_FLIGHT"
    expect(name in text, f"the text should still define `{name}`", diagnosis="wrong-type")
    wait = "cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();"
    # The learner's definition stands before the region of the swizzle.
    step3 = step("p8_3_stages")
    whole = replaced(step3, "swizzle", text.strip("\n") + "\n" + region(step3, "swizzle"))
    whole = Source(
        whole.text.replace(wait, "cp_async_wait<IN_FLIGHT>();")
        + '\nextern "C" void in_flight(int* n) { *n = IN_FLIGHT; }\n',
        whole.name,
        whole.first,
        whole.last,
    )
    for stages in (1, 2, 3, 4):
        module = built(whole, check=True, STAGES=stages)
        said = torch.zeros(1, dtype=torch.int32)
        module.in_flight(said)
        got, want = int(said), max(0, stages - 2)
        case = f"STAGES={stages}"
        expect(got >= 0, f"IN_FLIGHT is {got}; a count of groups is not negative", diagnosis="wrong-value", case=case)
        expect(
            got >= want,
            f"IN_FLIGHT is {got}: right results, but the wait also waits for tile{'s' if want - got > 1 else ''} "
            f"{' and '.join(f'j + {i}' for i in range(1 + got, 1 + want))}, which nobody needs yet; the "
            "copies no longer overlap "
            "with work as they could",
            diagnosis="waits-too-long",
            case=case,
        )
        probe(module, whole)
        if got > want:  # the emulator should have seen it; say it all the same
            sentence = f"IN_FLIGHT is {got}, so tile j may still be on its way"
            raise CheckFailed(sentence, diagnosis="read-before-wait", case=case)
    return "1 to 4 stages"


# ---- 8.5 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.5",
    title="A stage that is overwritten",
    minutes=15,
    difficulty="Bug hunt",
    hints=[
        "The message names two lines: one reads a tile, the other fills the same bytes with the next "
        "copy. Which tile is in the "
        "stage that load_kv(j + STAGES - 1) fills?",
        "It is tile j - 1's. A warp that is ahead comes to round j while a slower one still works on "
        "tile j - 1. What keeps the "
        "fast one from starting the copy?",
        "The barrier of round j says that every warp is through with tile j - 1. Start the copy after "
        "it; the wait then has "
        "one group fewer to leave in flight.",
    ],
)
def _(loop_head: str) -> str:
    text = text_of(loop_head, "loop_head")
    source = replaced(step("p8_3_stages"), "load K and V", text)
    cases = [examine(source, STAGES=stages, max_seq=300).cases for stages in (2, 3)]
    return f"{sum(cases)} cases with 2 and 3 stages, no race"


# ---- 8.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.6",
    title="Right threads, wrong numbers",
    minutes=15,
    difficulty="Bug hunt",
    hints=[
        "The emulator finds no race and no address out of bounds. Follow one chunk: row 1, columns 0 to "
        "7. At which byte does "
        "load_tile write it, and at which does ldmatrix look for it?",
        "load_tile writes it at byte 128 + 16 (head_dim 64), at(1, 0) is 128: the swizzle is on the store only.",
        "Either both swizzle or neither; only the first has no bank conflicts. Let at() do it, and call at() in both.",
    ],
)
def _(tile_addresses: str) -> str:
    text = text_of(tile_addresses, "tile_addresses")
    source = replaced(replaced(step("p8_4_swizzle"), "copy a tile", "// (above)"), "swizzle", text)
    for head_dim in (64, 128):
        _without_conflicts(examine(source, head_dim=head_dim, fast=head_dim == 64, max_seq=150), head_dim)
    return "head_dim 64 and 128: right, and no bank conflict"
