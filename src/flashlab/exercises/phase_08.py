"""Checks of phase 8: banks, swizzles, stages, and the whole kernel: from its parts, and from a blank page.

CUDA answers are text: a few lines, which take the place of the same lines of a file of the series. The whole file is
then built for the emulator, twice (checked and fast), and run: a race or a copy that was not waited for is told with
the learner's line; a wrong result with the checker's diagnosis; a right result that costs too much with the counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from flashlab.check import CheckFailed, expect, running
from flashlab.check.changes import edited
from flashlab.check.cuda_answer import (
    PROBES,
    WALKED,
    Source,
    Verdict,
    built,
    examine,
    expect_wide,
    listed,
    probe,
    region,
    replaced,
    source_of,
    text_of,
    walk,
    whole_kernel,
)
from flashlab.check.cuda_index import Trials, examined, explained, forwards
from flashlab.check.lookup import Row
from flashlab.check.symptoms import watched
from flashlab.cuda import CudaModule
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.kernels.series import step
from flashlab.simt import Counters
from flashlab.simt.source import blank_comments

BANK_BYTES, ROW_BYTES = 128, 16  # all 32 banks; what one address of ldmatrix stands for


def _without_conflicts(verdict: Verdict, head_dim: int) -> None:
    """Raises CheckFailed where ldmatrix has bank conflicts."""
    c = verdict.counters
    if c["ldmatrix_wavefronts"] == c["ldmatrix_ideal"]:
        return
    raise CheckFailed(
        f"the result is right, but ldmatrix takes {c['ldmatrix_wavefronts']} wavefronts where "
        f"{c['ldmatrix_ideal']} would do: two rows of one 8 x 8 tile share their banks",
        diagnosis="bank-conflicts",
        case=f"head_dim={head_dim}",
    )


@contextlib.contextmanager
def _beside(first: str, here: int, second: bool) -> Iterator[None]:
    """second: what fails in it is right with the first size, which is told."""
    try:
        yield
    except CheckFailed as failed:
        if not second:
            raise
        sentence = f"right with {first}, and not with {here}: {failed.sentence}"
        raise CheckFailed(sentence, diagnosis=failed.diagnosis, case=failed.case) from None


# ---- 8.1 ------------------------------------------------------------------------------------------------------------


@rule(
    "8.1",
    title="Count the wavefronts of a padded tile", minutes=10, difficulty="Warm-up",
    hints=[
        "Address a is in bank a / 4 % 32. Sixteen bytes are four neighbouring banks, so there are eight groups of "
        "four.",
        "The group of row r is r * row_bytes // 16 % 8. A group that is asked for by three of the eight rows needs "
        "three wavefronts, and the others wait.",
        "Count how many of the eight rows fall into each group; the answer is the largest count.",
    ],
    returns="wavefronts",
    whole=True,
    inputs=[(16 * n,) for n in (8, *range(1, 13), 16, 17, 18, 20, 24, 33)],
    draw=lambda r: (16 * r.randint(1, 100),),
    words={"groups": "groups"},
    notes={
        "row * row_bytes // 16 % 8": "there are 8 groups of 16 bytes",
        "row * row_bytes // 16": "a group is 16 bytes wide", "8": "there are 8 rows, and 8 groups of 16 bytes",
    },
    rows=[
        Row("counts-groups", "it is the number of groups that are asked for: the group that is asked for most often "
            "decides", [("max(groups.count(g) for g in groups)", "len(set(groups))")]),
        Row("words-for-chunks", "it tells two groups of banks apart, not eight: a group is 16 bytes wide",
            [("row * row_bytes // 16 % 8", "row * row_bytes // 4 % 8")]),
        Row("half-the-banks", "it tells four groups of banks apart, not eight: all 32 banks are 128 bytes",
            [("row * row_bytes // 16 % 8", "row * row_bytes // 16 % 4")]),
        Row("two-groups-a-row", "a row is counted in two groups: it asks for 16 bytes, one group",
            [("max(groups.count(g) for", "max(groups.count(g) + groups.count((g - 1) % 8) for")]),
        Row("whole-lines-alone", "rows may meet without lying whole lines of 128 bytes apart: at 64, every second row "
            "begins at the same bank", instead="8 if row_bytes % 128 == 0 else 1"),
    ],
)  # fmt: skip
def wavefronts(row_bytes):
    """Wavefronts of eight 16-byte rows at 0, row_bytes, ..., 7 * row_bytes: 1 (no conflict) to 8."""
    # BEGIN SOLUTION
    groups = [row * row_bytes // 16 % 8 for row in range(8)]  # of four banks
    return max(groups.count(g) for g in groups)
    # END SOLUTION


# ---- 8.2 ------------------------------------------------------------------------------------------------------------


def _expect_a_swizzle(place: Callable[[int, int], int]) -> str:
    """CheckFailed where two chunks meet; any swizzle without a conflict is right, but for the lecture's two."""
    for chunks in (8, 16, 32):
        case = f"head_dim={8 * chunks}"
        table = []
        for row in range(64):
            with running(f"{case}, row {row}"):
                places = [place(row, chunk) for chunk in range(chunks)]
                once = sorted(places) == list(range(chunks))
            if not once:
                raise CheckFailed(_not_once(row, places), diagnosis="not-a-permutation", case=case)
            table.append(places)
        for first, chunk in itertools.product(range(0, 64, 8), range(chunks)):
            groups = [table[first + i][chunk] % 8 for i in range(8)]
            shared = next((g for g in groups if groups.count(g) > 1), None)
            if shared is not None:
                rows = ", ".join(str(first + i) for i in range(8) if groups[i] == shared)
                said = f"chunk {chunk} of rows {rows} is in the same four banks, {4 * shared} to {4 * shared + 3}: in "
                said += f"rows {first} to {first + 7} its places % 8 are {groups}, and eight different ones are wanted"
                raise CheckFailed(said, diagnosis="bank-conflicts", case=case)
    xor, rotated = (
        [[f(row, chunk) for chunk in range(chunks)] for row in range(64)]
        for f in (lambda row, chunk: chunk ^ row % 8, lambda row, chunk: chunk // 8 * 8 + (chunk + row) % 8)
    )
    expect(table not in (xor, rotated), "no two chunks of it meet", diagnosis="of-the-lecture")
    return "no conflict in any ldmatrix, head_dim 64, 128 and 256"


def _not_once(row: int, places: Sequence[int]) -> str:
    """What is wrong with the places of a row's chunks, where some meet or do not exist."""
    chunk = next((c for c, x in enumerate(places) if x // 8 != c // 8), -1)
    if chunk < 0:  # each in its group of eight
        chunk = next(c for c, x in enumerate(places) if x in places[:c])
        said = f"chunks {places.index(places[chunk])} and {chunk} at one place, {places[chunk]}: its number within the "
        return f"row {row} puts {said}group of eight is to be rotated (a sum, % 8) or XORed by what the row says"
    where = "in another group of eight" if 0 <= places[chunk] < len(places) else f"which is none of {len(places)}"
    said = f"row {row} puts chunk {chunk} at place {places[chunk]}, {where}: chunk // 8 * 8 stays as it is"
    return f"{said}, and the number within the group is to stay below 8 (% 8, or an XOR by less than 8)"


_TAKEN = "it is one of the lecture's two: find another"


@rule(
    "8.2",
    title="A swizzle of your own", minutes=15,
    hints=[
        "Unswizzled, chunk c is at place c in every row: eight rows, one group of banks. What must differ from row to "
        "row?",
        "Rotating by row works, inside each group of eight places. Rotate by a multiple of row: with which multiples "
        "do eight rows have eight different rotations?",
        "return chunk // 8 * 8 + (chunk + 3 * row) % 8. Of an odd multiple all eight remainders by 8 differ. So "
        "chunk - row will do, and chunk ^ 3 * row % 8.",
    ],
    returns="place",
    whole=True,
    inputs=[(row, chunk) for row in range(64) for chunk in range(32)],
    draw=lambda r: (r.randrange(64), r.randrange(32)),
    also=["chunk ^ 3 * row % 8", "chunk // 8 * 8 + (chunk - row) % 8"],
    rows=[
        Row("of-the-lecture", _TAKEN, instead="chunk ^ row % 8"),
        Row("of-the-lecture", _TAKEN, instead="chunk // 8 * 8 + (chunk + row) % 8"),
        *(Row("not-a-permutation", "the term `chunk // 8 * 8` is missing: a chunk stays in its group of eight",
              instead=x) for x in ("(chunk + row) % 8", "(chunk ^ row) % 8")),
    ],
    notes={
        "3 * row % 8": "a number below 8 keeps a chunk inside its group of eight", "chunk // 8 * 8": "a chunk stays in "
        "its group of eight", "8": "there are eight groups of banks",
        "3": "of an odd multiple all eight remainders differ",
        "(chunk + 3 * row) % 8": "a chunk stays in its group of eight",
    },
    judged=_expect_a_swizzle,
)  # fmt: skip
def place(row, chunk):
    """The place, 0 to chunks - 1, of `chunk` in `row`; for 8, 16 and 32 chunks a row."""
    # BEGIN SOLUTION
    return chunk // 8 * 8 + (chunk + 3 * row) % 8
    # END SOLUTION


# ---- 8.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "8.3",
    title="The swizzle in CUDA",
    minutes=10,
    hints=[
        "offset is a number of bytes. Its bits 0 to 3 say where in a chunk of 16 bytes, bits 4 to 6 which chunk of "
        "eight. Which of them must change from row to row?",
        "Bits 4 to 6: eight rows have eight different values of row % 8. How far to the left must its three bits move?",
        "By four: a chunk has 16 bytes. In C++, ^ binds less tightly than + and *.",
    ],
)
def swizzle(at: str) -> str:
    return _swizzled(text_of(at, "at"), AT, 64, 128)


def _swizzled(text: str, trials: Trials, *head_dims: int) -> str:
    """Raises CheckFailed where p8_4_swizzle with this text is wrong, or has bank conflicts."""
    source = replaced(step("p8_4_swizzle"), "swizzle", text)
    source = replace(source, text=source.text.replace("-DHEAD_DIM=64", "-DHEAD_DIM=32, 64"))
    for head_dim in head_dims:
        only_here = _beside("head_dim 64", head_dim, head_dim > 64)
        with only_here, explained(lambda: trials.build(_calling(source, _CALLED)), trials):
            try:
                if watched() is None:
                    _expect_places(source, head_dim)
                _without_conflicts(examine(source, head_dim=head_dim, fast=False, max_seq=150), head_dim)
            except CheckFailed as failed:
                if failed.diagnosis not in (*_WRONG_PLACES, "bank-conflicts") or not (said := _xored(source, head_dim)):
                    raise
                sentence = f"{said}; {failed.sentence.splitlines()[-1]}"
                raise CheckFailed(sentence, diagnosis=failed.diagnosis, case=failed.case) from None
    return f"head_dim {' and '.join(map(str, head_dims))}: right, and no bank conflict"


_CALLED = """
extern "C" void places(int* n, int rows) {
    for (int i = 0; i < rows * HEAD_DIM / 8; i++) n[i] = at(i / (HEAD_DIM / 8), i % (HEAD_DIM / 8) * 8);
}
"""


def _calling(source: Source, *functions: str) -> Source:
    """The source with more functions behind it."""
    return replace(source, text="".join((source.text, *functions)))


def _all_places(module: CudaModule) -> list[torch.Tensor]:
    n = torch.zeros(512, dtype=torch.int32)
    module.launch("places", n, 64, echo=False)
    return [n.float()]


_EIGHT_ROWS = "the chunks of eight rows lie in eight groups of banks"
_NOTES = {
    "row % 8": _EIGHT_ROWS, "row * ROW_BYTES": "rows lie ROW_BYTES apart", "16": "a chunk has 16 bytes",
    "column / 8": "a chunk has 8 columns",
}  # fmt: skip
AT = Trials(
    "8.3", partial(built, check=True), [_all_places], tol=1e-5, words={"offset": "offset"},
    place=lambda text: replaced(step("p8_4_swizzle"), "swizzle", text).text + _CALLED,
    notes=_NOTES | {"column * 2": "an element has 2 bytes"}, equal={"-8 stands": "row is not negative"},
)  # fmt: skip


_WRONG_PLACES = ("misaligned", "not-a-permutation", "outside-the-tile")


def _xored(source: Source, head_dim: int) -> str:
    """Words for what at() XORs to the offset of a chunk, where it is not one of its own for each of eight rows."""
    row_bytes = 2 * head_dim
    byte = torch.tensor(_places(source, head_dim)).unflatten(0, (64, -1))
    bits = byte ^ (torch.arange(64)[:, None] * row_bytes + torch.arange(head_dim // 8) * 16)  # [row, chunk]
    if (unlike := (bits != bits[:, :1]).nonzero()).numel():
        row, chunk = unlike[0].tolist()
        return (
            f"at() XORs {bits[row, 0]} to the offset of at({row}, 0), and {bits[row, chunk]} to that of at({row}, "
            f"{8 * chunk}): it has to be one number for all columns of a row"
        )
    beside = max(1, BANK_BYTES // row_bytes)  # rows that lie in one 128 bytes
    for first in range(0, 64, 8):
        mine = bits[first : first + 8, 0]
        whole = bool(((mine % 16 == 0) & (mine >= 0) & (mine < min(BANK_BYTES, row_bytes))).all())
        if not whole or len((mine + torch.arange(8) % beside * row_bytes).unique()) < 8:
            need = (
                "each of the eight needs another"
                if beside == 1
                else "each pair, which lies in one 128 bytes, needs another"
            )
            listed = ", ".join(map(str, mine.tolist()))
            return (
                f"at() XORs {listed} to the offsets of rows {first} to {first + 7}: {need} of 0, 16, ..., "
                f"{min(BANK_BYTES, row_bytes) - 16}, or they share banks"
            )
    return ""


def _expect_places(source: Source, head_dim: int) -> None:
    """Raises CheckFailed where at(), called alone, is no place of its own for each chunk of a tile."""
    chunks, case, room = head_dim // 8, f"head_dim={head_dim}", 64 * head_dim * 2
    taken: dict[int, str] = {}
    for i, byte in enumerate(_places(source, head_dim)):
        name = f"at({i // chunks}, {i % chunks * 8})"
        wrong = (
            (byte % ROW_BYTES, "; sixteen bytes that ldmatrix reads begin at a multiple of 16"),
            (byte in taken, f", and so is {taken.get(byte)}: two chunks of a tile in one place"),
            (not 0 <= byte < room, f"; a tile of 64 rows has {room} bytes, and no room for more"),
        )
        for slug, (holds, sentence) in zip(_WRONG_PLACES, wrong, strict=True):
            expect(not holds, f"{name} is byte {byte}{sentence}", diagnosis=slug, case=case)
        taken[byte] = name


def _places(source: Source, head_dim: int) -> list[int]:
    """at(row, column) of each chunk of a tile of 64 rows, row by row."""
    n = torch.zeros(8 * head_dim, dtype=torch.int32)
    built(_calling(source, _CALLED), check=False, head_dim=head_dim).places(n, 64)
    return n.tolist()


# ---- 8.4 ------------------------------------------------------------------------------------------------------------

_LOAD_KV = """    auto load_kv = [&](int j) {
        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
        if (j < tiles)
            load_tile<BLOCK_N>(k_smem + stage, k_gmem + n_start * p.k_stride.row, p.k_stride.row, p.seq_k - n_start);
        cp_async_commit();                                     // K_j is a group
        if (j < tiles)
            load_tile<BLOCK_N>(v_smem + stage, v_gmem + n_start * p.v_stride.row, p.v_stride.row, p.seq_k - n_start);
        cp_async_commit();                                     // V_j is the next group
    };
    load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);     // Q belongs to K_0's group
    for (int j = 0; j < STAGES - 1; j++) load_kv(j);
"""
_WAIT_K = """        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
        cp_async_wait<IN_FLIGHT_K>();                          // this thread's part of K_j is here
        __syncthreads();                                       // or others' parts would be missing, tile j - 1 in use
        load_kv(j + STAGES - 1);
"""
_WAIT_V = """        cp_async_wait<IN_FLIGHT_V>();                          // this thread's part of V_j is here
        __syncthreads();                                       // or others' parts would be missing
"""


def two_groups() -> str:
    """The pipeline of exercise 8.4: p8_3_stages, with K and V of a tile in a group each."""
    loop = f"    for (int j = 0; j < tiles; j++) {{\n{_WAIT_K}        // S = Q K_j^T, softmax\n{_WAIT_V}"
    return f"{_LOAD_KV}{loop}        // O += P V_j\n    }}\n"


def _younger(groups: int) -> str:
    return f"{groups} younger group{'s' * (groups != 1)}"


@exercise(
    "8.4",
    title="How many groups may be in flight?",
    minutes=20,
    hints=[
        "cp_async_wait<N> returns when at most N of this thread's groups, the latest, are still in flight. Take STAGES "
        "= 2, and write down which groups have been committed when round j comes to each of its two waits.",
        "At the wait for K_j, tiles 0 to j + STAGES - 2 have been committed, two groups each. Which of these groups "
        "are younger than K_j's? At the wait for V_j the refill of this round has been committed too.",
        "Younger than K_j at its wait: V_j, and the two groups of each of STAGES - 2 tiles. Younger than V_j at its "
        "wait: the two groups of each of STAGES - 1 tiles.",
    ],
)
def groups_in_flight(in_flight: str) -> str:
    text = text_of(in_flight, "in_flight")
    for name in ("IN_FLIGHT_K", "IN_FLIGHT_V"):
        expect(f"int {name}" in text, f"the text should still define `{name}`", diagnosis="wrong-type")
    whole = step("p8_3_stages")
    ours = replaced(replaced(whole, "first copies", _LOAD_KV), "load K and V", _WAIT_K)
    ours = replaced(ours, "output", _WAIT_V + region(whole, "output"))
    # The learner's definitions stand before the region of the swizzle.
    ours = replaced(ours, "swizzle", text.strip("\n") + "\n" + region(whole, "swizzle"))
    ours = _calling(ours, '\nextern "C" void in_flight(int* n) { n[0] = IN_FLIGHT_K, n[1] = IN_FLIGHT_V; }\n')
    for stages in (2, 3, 4):
        module, said, case = built(ours, check=True, STAGES=stages), torch.zeros(2).int(), f"STAGES={stages}"
        module.in_flight(said)
        for which, got, want in zip("KV", said.tolist(), (2 * stages - 3, 2 * stages - 2), strict=True):
            name, (wanted, more) = f"with {stages} stages IN_FLIGHT_{which} is {got}", map(_younger, (want, want - got))
            expect(got >= 0, f"{name}; a count of groups is not negative", diagnosis="wrong-value", case=case)
            sentence = f"{name}: the result is right, but the wait for {which}_j also waits for {more}, "
            sentence += "which nobody needs yet; the copies overlap with less work than they could"
            expect(got >= want, sentence, diagnosis="waits-too-long", case=case)
            sentence = f"{name}, and {which}_j's group has {wanted} behind it at this wait: {which}_j itself may "
            sentence += "still be on its way when it is read"
            expect(got <= want, sentence, diagnosis="read-before-wait", case=case)
        probe(module, ours)
    return "2, 3 and 4 stages"


# ---- 8.5 ------------------------------------------------------------------------------------------------------------

_SHAPES = ((1, 2, 1, 70, 200, True), (1, 1, 1, 16, 100, False), (1, 1, 1, 70, 40, True))
_FALLS = forwards((1, 1, 1, 16, 200, False), dtype=torch.float16, fall=150)
_RUNS = [*(forwards(x, dtype=torch.float16) for x in _SHAPES), _FALLS]
_V_IS_LOADED = "            load_tile<BLOCK_N>(v_smem"


def _with_head(text: str | None = None) -> Source:
    """Step 3, whose load_kv closes a group for K and one for V, with a learner's lines at the head of its loop."""
    whole = source_of(step("p8_3_stages"))
    apart = f"        }}\n        cp_async_commit();\n        if (j < tiles) {{\n{_V_IS_LOADED}"
    whole = replace(whole, text=whole.text.replace(_V_IS_LOADED, apart))
    if text is None:  # the right ones
        whole = replace(whole, text=whole.text.replace("STAGES - 2>();", "2 * STAGES - 4>();"))
    return whole if text is None else replaced(whole, "load K and V", text)


LOOP_HEAD = Trials(
    "8.5", partial(built, check=True, STAGES=3), _RUNS, region=True, tol=1e-3,
    words={"n_start": "n_start", "stage": "stage"},
    place=lambda text: _with_head(text).text,
    rows=[
        Row("read-before-wait", "tile j is not waited for, or not by each thread in each round: before load_kv at "
            "most 2 * STAGES - 2 groups are under way, tile j's two among them",
            [("2 * STAGES - 4", "2 * STAGES - 2")]),
        Row("v-not-there", "K of the tile is waited for, V of it is not: nothing waits for it later",
            [("2 * STAGES - 4", "2 * STAGES - 3")]),
        Row("commit-skipped", "past the last tile load_kv is not called, so it closes no empty groups either, and the "
            "wait counts as if it had: the last tiles may be on their way still",
            [("load_kv(j + STAGES - 1);", "if (j + STAGES - 1 < tiles) load_kv(j + STAGES - 1);")]),
    ],
    notes={"STAGES": "tile j's stage is j % STAGES", "load_kv": "the stage of tile j - 1 is filled again"},
    equal={
        "`BLOCK_M`": "both are 64", "is taken as positive": "it is not negative", "cut off at 0": "it is not negative",
        "0.5 stands": "load_kv takes the whole number",
    },
)  # fmt: skip


@exercise(
    "8.5",
    title="One run in some thousands",
    minutes=15,
    difficulty="Bug hunt",
    untouched="4be0e8039114",
    history="a common mistake in pipelines written by hand",
    hints=[
        "The message names two lines: one reads a tile, the other fills the same bytes with the next copy. Which tile "
        "is in the stage that load_kv(j + STAGES - 1) fills?",
        "It is tile j - 1's. A warp that is ahead comes to round j while a slower one still works on tile j - 1. What "
        "keeps the fast one from starting the copy?",
        "The barrier of round j says that every warp is through with tile j - 1. Start the copies after it; the wait "
        "then has one tile fewer to leave in flight, and a tile is two groups.",
    ],
)
def head_of_the_loop(loop_head: str) -> str:
    source, cases = _with_head(text_of(loop_head, "loop_head")), 0
    for stages in (2, 3):
        with _beside("2 stages", stages, stages == 3), explained(lambda: LOOP_HEAD.build(source), LOOP_HEAD):
            verdict = examine(source, STAGES=stages, max_seq=300)
        c, want = verdict.counters, probe(built(_with_head(), check=True, STAGES=stages), _with_head()).counters
        case, right = f"STAGES={stages}", "no race, and the result is right; but"
        sentence = f"{right} no copy is under way during any MMA: the block waits for every copy that it starts"
        expect(c["mma_during_copies"] > 0, sentence, diagnosis="no-overlap", case=case)
        mine, could = (x["mma_copy_groups"] / x["mma"] for x in (c, want))
        sentence = f"{right} during an MMA {mine:.2f} groups are under way on average, where it could be {could:.2f}: "
        sentence += "the wait also waits for a tile that is not needed yet"
        expect(mine >= could, sentence, diagnosis="waits-too-long", case=case)
        cases += verdict.cases
    return f"{cases} cases with 2 and 3 stages, no race, and every copy under way during work"


# ---- 8.6 ------------------------------------------------------------------------------------------------------------


def _any_swizzle(module: CudaModule) -> bool:
    """Whether each chunk of 64 rows of 64 bytes has a place of its own, and no ldmatrix meets a conflict."""
    places = _all_places(module)[0].int()[:256]
    banks = places.view(8, 8, 4).div(16, rounding_mode="floor") % 8
    own = places.sort().values == torch.arange(256) * 16
    return bool(own.all() and (banks.sort(1).values == torch.arange(8)[:, None]).all())


AT_64_BYTES = replace(
    AT, id="8.6", build=partial(built, check=True, head_dim=32), judged=_any_swizzle, words={},
    notes=_NOTES | {"row / 2": "two rows of 64 bytes share 128", "row / 2 % 4": "four pairs of rows, four places"},
    equal={"-4 stands": "row is not negative", "7 stands": "the columns are 0, 8, 16 and 24"},
)  # fmt: skip


@exercise(
    "8.6",
    title="A row of 64 bytes",
    minutes=15,
    difficulty="Bug hunt",
    untouched="c59c5ae3bff1",
    history="a swizzle taken along to shorter rows; CUTLASS has Swizzle<3, 4, 3> for 128 bytes, <2, 4, 3> for 64",
    hints=[
        "A row has four chunks now, so four places. Where does the XOR put chunk 0 of row 4, and whose place is that?",
        "With row % 4 a chunk stays in its row, and the result is right. But 128 bytes are two rows now. Write down "
        "the banks of chunk 0 of the rows 0 to 7: which two rows meet?",
        "Rows 2i and 2i + 1 lie beside each other, and never meet. The four pairs need four different places: what "
        "must the XOR change with, the row or the pair?",
    ],
)
def swizzle_of_short_rows(short_rows: str) -> str:
    return _swizzled(text_of(short_rows, "short_rows"), AT_64_BYTES, 32)


# ---- 8.7 ------------------------------------------------------------------------------------------------------------

_BEFORE = ("constants", "swizzle", "copy a tile", "shared memory", "which rows", "which keys", "state", "first copies",
           "Q in registers")  # fmt: skip
_LOOP = ("scores", "row maxima", "rescale", "probabilities", "output")
_AFTER = ("store", "launch")
_LETTERS = dict(zip((*_BEFORE, *_LOOP, *_AFTER), "KCNFPAJMDQBLHEOI", strict=True))
_PART = re.compile(r"\s*@(\w+)\s*(?://.*)?")

# (what comes first, what comes later, why). The first that an answer breaks is told.
_ORDER = (
    ("constants", "swizzle", "{b} uses ROW_BYTES, which {a} defines"),
    ("constants", "copy a tile", "{b} uses CHUNKS, which {a} defines"),
    ("swizzle", "copy a tile", "{b} calls at(), which {a} defines"),
    ("copy a tile", "shared memory", "{b} begins the kernel, and {a} is a function of its own"),
    ("shared memory", "which rows", "{a} begins the kernel, and {b} is a part of it"),
    ("which rows", "which keys", "{b} uses m_start, which {a} defines"),
    ("which rows", "first copies", "{b} copies from q_gmem, which {a} defines"),
    ("which keys", "first copies", "{b} asks how many `tiles` there are, which {a} says"),
    ("shared memory", "state", "{a} begins the kernel, and {b} is a part of it"),
    ("first copies", "Q in registers", "{b} reads Q's tile, and {a} says how it is copied"),
    ("Q in registers", "scores", "{b} is done for each tile, and {a} once for all"),
    ("state", "scores", "{b} is done for each tile, and {a} starts the sums from zero"),
    ("scores", "row maxima", "{b} takes the maxima of `s`, which {a} computes"),
    ("row maxima", "rescale", "{b} needs m_new, which {a} computes"),
    ("rescale", "probabilities", "{b} subtracts m_i, which is this tile's maximum only after {a}"),
    ("probabilities", "output", "{b} multiplies P by V, and until {a} `s` still holds the scores"),
    ("output", "store", "{b} divides and stores O, and {a} still adds to it"),
    ("store", "launch", "{b} is a function of its own, and the kernel ends with {a}"),
)


_COPIES = """    auto copy_q = [&] {
        load_tile<BLOCK_M>(q_smem, q_gmem, p.q_stride.row, p.seq_q - m_start);
        cp_async_commit();
    };
    auto copy_k = [&](int j) {
        const int first = j * BLOCK_N;
        if (j < tiles) load_tile<BLOCK_N>(k_smem, k_gmem + first * p.k_stride.row, p.k_stride.row, p.seq_k - first);
        cp_async_commit();
    };
    auto copy_v = [&](int j) {
        const int first = j * BLOCK_N;
        if (j < tiles) load_tile<BLOCK_N>(v_smem, v_gmem + first * p.v_stride.row, p.v_stride.row, p.seq_k - first);
        cp_async_commit();
    };
"""
_ONE_BUFFER_EACH = [
    ("#ifndef STAGES\n#define STAGES 2\n#endif\n", ""), ("2 * STAGES * KV_BYTES", "2 * KV_BYTES"),
    ("k_smem + STAGES * KV_BYTES", "k_smem + KV_BYTES"), ("k_smem + stage + at", "k_smem + at"),
    ("v_smem + stage + at", "v_smem + at"), ("n_start + n * MMA_N", "j * BLOCK_N + n * MMA_N"),
]  # fmt: skip


@functools.cache
def one_buffer_each() -> Source:
    """p8_6_store with a buffer of K and one of V, and none of the lines that start a copy or wait for one."""
    text = edited(step("p8_6_store").path.read_text(), _ONE_BUFFER_EACH)
    waits = re.compile(r" *(?:cp_async_wait<STAGES - 1>|__syncthreads)\(\);.*\n")
    whole = replaced(Source(text, "kernel"), "Q in registers", waits.sub("", region(text, "Q in registers")))
    return replaced(whole, "first copies", _COPIES)


def parts() -> dict[str, str]:
    """The parts of that kernel, each under a letter that says nothing, in the order of the letters; no comments."""
    found = {}
    for name, letter in sorted(_LETTERS.items(), key=lambda item: item[1]):
        lines = (re.sub(r"\s*//.*", "", line).rstrip() for line in region(one_buffer_each(), name).split("\n"))
        found[letter] = "\n".join(line for line in lines if line)
    return found


def _put_together(text: str) -> Source:
    """The text with its lines @A, @B ... replaced by the parts. Raises CheckFailed, with what is out of place."""
    letters, out, called = parts(), [], []
    places: dict[str, int] = {}
    depths: dict[str, int] = {}
    depth = 0  # of the learner's own braces
    for number, line in enumerate(text.split("\n"), 1 - text.startswith("\n")):
        found = _PART.fullmatch(line)
        if not found:
            called.append(f"line {number} of your code")
            own = line.split("//")[0]
            depth += own.count("{") - own.count("}")
            out.append(line)
            continue
        letter = found[1]
        known = f"there is no part {letter!r}; the parts are {', '.join(letters)}"
        expect(letter in letters, known, diagnosis="unknown-part")
        expect(letter not in places, f"part {letter} is there twice", diagnosis="part-twice")
        places[letter], depths[letter] = len(places), depth
        out.append(letters[letter])
        called += [f"part {letter}"] * len(letters[letter].split("\n"))
    more = "more { than }" if depth > 0 else "more } than {"
    sentence = f"the braces of your own lines do not match, {more}: the loop needs one of each, and the parts their own"
    expect(depth == 0, sentence, diagnosis="braces")
    missing = [letter for letter in letters if letter not in places]
    expect(not missing, f"part {' and part '.join(missing[:2])} is not there yet", diagnosis="part-missing")
    for first, later, why in _ORDER:
        a, b = _LETTERS[first], _LETTERS[later]
        sentence = f"part {a} has to come before part {b}: " + why.format(a=f"part {a}", b=f"part {b}")
        expect(places[a] < places[b], sentence, diagnosis="out-of-order")
    for name, letter in _LETTERS.items():
        inside = name in _LOOP
        sentence = f"part {letter} is done for every tile of keys: it belongs between the braces of the loop"
        if not inside:
            sentence = f"part {letter} is done once: it does not belong between the braces of the loop"
        expect((depths[letter] > 0) == inside, sentence, diagnosis="outside-the-loop" if inside else "inside-the-loop")
    return Source("\n".join(out), "kernel", called=tuple(called))


@exercise(
    "8.7",
    title="One buffer for K, one for V",
    minutes=40,
    hints=[
        "Begin with what is outside of the kernel. One part has the constants, two are functions of the device, one "
        "begins with __global__, and one with extern.",
        "The part with __global__ opens the kernel's brace, and the part with p.lse closes it. Before the loop: which "
        "rows, how many tiles, the state, how to copy, the fragments of Q. In the loop: S, maxima, rescale, P, O. Of "
        "the two ldmatrix the one with trans reads V.",
        "When is K's buffer free? When all warps have computed S: a barrier says so. Then K_(j + 1) may set out, while "
        "V_j is used. When is V's free? At the barrier of the next round, and V_j has all of S to arrive.",
        "Before the loop: copy_q(), copy_k(0), a wait that leaves one group under way, a barrier, Q's fragments. In "
        "the loop, twice: cp_async_wait<0>(); __syncthreads(); and a copy. First copy_v(j) and S, then copy_k(j + 1) "
        "and all the rest.",
    ],
)
def put_together(kernel: str) -> str:
    text = text_of(kernel, "kernel")
    whole = _put_together(text)
    loop = re.search(r"\b(for|while)\b", blank_comments(text))
    expect(loop, "there is no loop: what stands between the braces is done once", diagnosis="no-loop")
    _expect_walk(text)
    verdict = examine(whole, max_seq=150)
    _without_conflicts(verdict, 64)
    *_, keys, _ = _COUNTED
    c, tiles = probe(built(whole, check=True), whole, _COUNTED).counters, 2 * keys // 64
    during, most = c["mma_during_copies"], c["mma"] * (tiles - 1) // tiles
    sentence = f"the result is right, but a copy is under way during {during} of {c['mma']} MMAs, and it could be "
    sentence += f"{most}: V_j's during S = Q K_j^T, K_(j + 1)'s during O += P V_j"
    expect(during >= most, sentence, diagnosis="no-overlap", case=f"head_dim=64, N={keys}")
    return f"{len(_LETTERS)} parts, {verdict.verdict}; a copy is under way during {during} of {c['mma']} MMAs"


def _expect_walk(text: str) -> None:
    """Raises CheckFailed where the loop does not walk the tiles upwards or downwards, each once, where a product finds
    another tile in its buffer than its own, or where a tile is copied twice.
    """
    say = 'if (threadIdx.x == 0) printf("{} ", (int)j);'.format
    copies = "auto copy_q = [] {};\n" + "".join(f"auto copy_{x} = [](int j) {{ {say(f'{x}%d')} }};\n" for x in "kv")
    letters = parts() | {_LETTERS[name]: "" for name in _LOOP} | {_LETTERS["first copies"]: copies}
    products = _LETTERS["scores"], _LETTERS["output"]
    letters |= {letter: say(f"{letter}%d") for letter in products}
    found = ((line, _PART.fullmatch(line)) for line in text.split("\n"))
    words = walk(Source("\n".join(letters[part[1]] if part else line for line, part in found), "kernel"))
    if words is None:
        return
    case, tiles = f"seq_q=64, seq_k={WALKED}, head_dim=64, float16", -(-WALKED // 64)
    walked, upwards = [x[1:] for x in words if x[0] == products[0]], [str(j) for j in range(tiles)]
    sentence = f"with {tiles} tiles of keys the j of your loop is {listed(walked)}. It has to be 0 to {tiles - 1}, "
    expect(walked in (upwards, upwards[::-1]), f"{sentence}each once", diagnosis="wrong-walk", case=case)
    held: dict[str, str] = {}
    for word in words:
        kind, j = word[0], word[1:]
        if kind in products:
            copy = "kv"[products.index(kind)]
            last = f"the last copy before it is copy_{copy}({held.get(copy)})"
            last = last if copy in held else "there is no copy before it"
            sentence = f"where j is {j}, part {kind} wants tile {j} of {copy.upper()}, and {last}"
            expect(held.get(copy) == j, sentence, diagnosis="wrong-tile", case=case)
        elif j in upwards:
            held[kind] = j
    twice = next((x for x in words if x[0] in "kv" and x[1:] in upwards and words.count(x) > 1), "")
    sentence = f"copy_{twice[:1]}({twice[1:]}) is called twice, and once is enough"
    expect(not twice, sentence, diagnosis="copied-twice", case=case)


# ---- 8.8 ------------------------------------------------------------------------------------------------------------

PIPELINED = Trials(
    "8.8", partial(built, check=True), _RUNS, tol=1e-3,
    words={x: x for x in ("lane", "g", "t", "start", "head", "base", "top", "ahead")},
    equal={
        "below `0`": "fewer tiles than none are none", "above `p.seq_k`": "keys past the last one are masked",
        **dict.fromkeys(("tiles` is not asked", "`1` is missing, in `j + 1", "`j` is missing, in `j + 1`"),
                        "a tile past the last one is zeros, and not used"),
        "`j == 0` is not asked": "the registers of Q get the same numbers again",
        "`TILE` is missing, in `3 * TILE`": "48 KB are there without being asked for",
        "factor `3`": "48 KB are there without being asked for",
        "`p.seq_k` is taken": "the page does not ask to leave out tiles that nobody sees",
        **dict.fromkeys(("by `p.heads`", "`p->batch`"), "the check runs two batches"),
        "by `p.kv_heads`": "the check runs 2 heads of K for 6 of Q", "`start` is": "the check runs more causal rows",
    },
)  # fmt: skip
_COUNTED = (1, 1, 1, 512, 512, False)  # the shape for the counts: several tiles for any tile up to 128 keys


@exercise(
    "8.8",
    title="A pipelined kernel, from a blank page",
    minutes=180,
    difficulty="Stretch",
    hints=[
        "Get it right before you get it fast. 1: a launch, a block per 64 query rows, plain copies, one buffer each "
        "for Q, K and V; check. The check says what is wrong first, and only then what is slow.",
        "2: at(row, column) with the XOR, used by every writer and every reader. 3: cp_async<16>, with 0 bytes for "
        "rows that do not exist; commit; wait; barrier. Check after each of them.",
        "4: the overlap. With one buffer of K and one of V: start V_j's copy before S = Q K_j^T, and K_(j+1)'s after "
        "it. Each needs a wait and a barrier before it is read; that barrier also says that the other buffer is free.",
        "5: the store. Each warp writes its 16 rows of O, rounded, over its rows of Q by at(), then __syncwarp, then "
        "16 bytes per lane go out. Before the launch, where it may ask for more than 48 KB: "
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes).",
        "Stuck in one place? Section 10 of the lecture has the whole kernel of the series. Close it again before you "
        "write.",
    ],
)
def blank_page(kernel: str) -> str:
    whole = whole_kernel(kernel, "kernel")
    cases = examined(whole, PIPELINED).cases
    cases += examine(whole, head_dim=128, fast=False, probes=PROBES[:1], max_seq=150).cases
    for head_dim in (64, 128):
        c = probe(built(whole, check=True, head_dim=head_dim), whole, _COUNTED, head_dim=head_dim).counters
        _well_made(c, head_dim)
    expect_wide(whole)
    return f"{cases} cases right at head_dim 64 and 128, no conflict, copies under way, full sectors"


_PLURAL = {"shared_load": "loads from shared memory", "shared_store": "stores to shared memory",
           "ldmatrix": "its ldmatrix instructions", "stmatrix": "its stmatrix instructions"}  # fmt: skip


def _well_made(c: Counters, head_dim: int) -> None:
    """Raises CheckFailed where a right kernel does not do what phase 8 is about. c: of one head, _COUNTED."""
    *_, n, _, _ = _COUNTED
    case, right = f"head_dim={head_dim}, N={n}", "the result is right, but"
    mma, least = c["mma"], 4 * n * n * head_dim // 4096
    expect(mma > 0, f"{right} there is no MMA in it: use the tensor cores", diagnosis="no-mma", case=case)
    expect(mma <= 1.5 * least, f"{right} it takes {mma} MMAs where {least} suffice", diagnosis="wrong-count", case=case)
    names = ("shared_load", "shared_store", "ldmatrix", "stmatrix")
    passes = sum(c[f"{name}_wavefronts"] for name in names)
    for name in names:
        taken, ideal = c[f"{name}_wavefronts"], c[f"{name}_ideal"]
        sentence = f"{right} {_PLURAL[name]} take {taken} wavefronts where {ideal} would do: rows share their banks"
        few = taken - ideal <= (0 if name == "ldmatrix" else passes // 20)  # once per block, a few do no harm
        expect(few, sentence, diagnosis="bank-conflicts", case=case)
    sentence = f"{right} nothing is copied by cp.async: loads and stores hold up their thread"
    expect(c["cp_async"] > 0, sentence, diagnosis="no-cp-async", case=case)
    sentence = f"{right} a copy is under way during {c['mma_during_copies']} of {mma} MMAs: start the next copy "
    sentence += "before you work on what has arrived, and wait for what the next product reads alone"
    expect(c["mma_during_copies"] >= mma / 3, sentence, diagnosis="no-overlap", case=case)
    sectors, fewest = c["global_store_sectors"], n * (head_dim * 2 + 4) // 32
    sentence = f"{right} the stores touch {sectors} sectors of 32 bytes where {fewest} hold O and lse: a lane should "
    sentence += "store 16 bytes of a row, beside its neighbours"
    expect(sectors <= 1.2 * fewest, sentence, diagnosis="part-sectors", case=case)
