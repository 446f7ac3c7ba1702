"""Checks of 11.9 to 11.14, the ladder to a Hopper kernel from an empty page.

A CUDA answer takes the place of a named region of a kernel beside this file, which runs in the emulator: first what the
emulator finds, then what the numbers say. Where a wait or a release is wrong, the order in which the warps came to the
barriers says which.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import (
    PROBES,
    SIGNATURE,
    Source,
    built,
    examine,
    expect_launched,
    probe,
    ran,
    replaced,
    text_of,
    whole_kernel,
)
from flashlab.cuda import CudaModule
from flashlab.exercises.registry import exercise
from flashlab.kernels import step
from flashlab.simt.report import Event
from flashlab.simt.source import blank_comments

RING = Path(__file__).parent / "phase_11_ring.cu"
"""The kernel of exercise 11.13, but for the consumers' loop."""


def _filled_in(answer: Any, name: str) -> str:
    """The text, if it is one and holds more than comments."""
    __tracebackhide__ = True
    text = text_of(answer, name)
    if not blank_comments(text).strip():
        raise NotImplementedError
    return text


def _ran(module: CudaModule, whole: Source, case: str, entry: str, *arguments: Any, **options: Any) -> None:
    """Calls a function of the module; a refusal by the host's part names the learner's line too."""
    __tracebackhide__ = True
    try:
        ran(module, whole, case, functools.partial(module.launch, entry, *arguments, echo=False, **options))
    except CheckFailed as failed:
        if failed.diagnosis != "launch-failed":
            raise
        said = re.sub(r"\bline (\d+)", lambda m: whole.place(int(m[1])).rstrip(","), failed.sentence)
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=case) from None


def _events(whole: Source, shape: Sequence[Any], head_dim: int) -> list[Event]:
    """What each warp of the first block did; of a run that goes wrong, as far as it went."""
    module = built(whole, check=True, head_dim=head_dim)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, shape, head_dim=head_dim, timeline=1)
    launches = module.report.launches if module.report is not None else []
    return launches[0].events if launches else []


# ---- 11.9 -----------------------------------------------------------------------------------------------------------
_MAP = Path(__file__).parent / "phase_11_map.cu"
_BOX_ROWS, _PACKED_DIM = 32, 128
# (batch, seq, heads): no two sizes alike; rows that are no multiple of the box.
_PACKED = (2, 26, 3)


def _where(number: int, shape: Sequence[int]) -> str:
    """Which element of qkv [batch, seq, 3, heads, 128] has this number."""
    batch, seq, heads = shape
    rest, column = divmod(number - 1, _PACKED_DIM)
    rest, head = divmod(rest, heads)
    rest, which = divmod(rest, 3)
    b, row = divmod(rest, seq)
    return f"{'QKV'[which]}, batch {b}, head {head}, row {row}, column {column}"


def _boxes(module: CudaModule, whole: Source, shape: Sequence[int], corners: torch.Tensor) -> torch.Tensor:
    """What the boxes at these corners hold: [corners, rows, columns], numbers of 16 bits, -1 where nothing came."""
    __tracebackhide__ = True
    batch, seq, heads = shape
    count = batch * seq * 3 * heads * _PACKED_DIM
    assert count < 2**16 - 1, "each element has a number of its own, from 1"
    numbers = torch.arange(1, count + 1).to(torch.uint16)  # 0 is what does not exist
    numbers = numbers.view(torch.float16)
    out = torch.full((len(corners), _BOX_ROWS, 64), -1, dtype=torch.int16)
    case = f"batch={batch}, seq={seq}, heads={heads}"
    _ran(module, whole, case, "boxes", numbers, corners, out, *shape, len(corners))
    return out.view(torch.uint16).long()


@exercise(
    "11.9",
    title="A map of your own",
    minutes=25,
    difficulty="Core",
    hints=[
        "Four dimensions, in the order of the coordinates: columns, rows, heads, batches. Of each: how many are "
        "there, and how many bytes is it from one to the next? The first has no stride: its elements are neighbours.",
        "From one row to the next lie Q, K and V of all heads: 3 * heads * HEAD_DIM elements. From one head to the "
        "next HEAD_DIM, from one batch to the next seq rows. K begins behind Q of the first row, heads * HEAD_DIM "
        "elements further.",
        "dims {HEAD_DIM, seq, heads, batch}; strides_bytes {3 * heads * HEAD_DIM * 2, HEAD_DIM * 2, seq * 3 * heads * "
        "HEAD_DIM * 2}; box {SLAB, 32, 1, 1}; base qkv + heads * HEAD_DIM; CU_TENSOR_MAP_SWIZZLE_128B.",
    ],
)
def _(map_of_k: str) -> str:
    text = _filled_in(map_of_k, "map_of_k")
    expect("map_of_k(" in text, "the text should still define `map_of_k`", diagnosis="wrong-entry")
    whole = replaced(Source(_MAP.read_text(encoding="utf-8"), _MAP.stem), "map", text)
    module = built(whole, check=True, HEAD_DIM=_PACKED_DIM)
    batch, seq, heads = _PACKED
    corners = torch.tensor(
        [(c, r, h, b) for b in range(batch) for h in range(heads) for r in (0, 16, -8) for c in (0, 64)],
        dtype=torch.int32,
    )
    got = _boxes(module, whole, _PACKED, corners)
    row = corners[:, 1, None, None] + torch.arange(_BOX_ROWS)[:, None]
    column = corners[:, 0, None, None] + torch.arange(64)
    head, b = corners[:, 2, None, None], corners[:, 3, None, None]
    want = (((b * seq + row) * 3 + 1) * heads + head) * _PACKED_DIM + column + 1
    want = torch.where((row >= 0) & (row < seq), want, 0)
    off = (got != want).nonzero()
    if len(off):
        box, line, place = off[0].tolist()
        c, r, h, n = corners[box].tolist()
        found, wanted = int(got[box, line, place]), int(want[box, line, place])
        what = "zeros" if found == 0 else "nothing that came" if found == 2**16 - 1 else _where(found, _PACKED)
        right = _where(wanted, _PACKED) if wanted else "0: that row does not exist"
        raise CheckFailed(
            f"tma_load at column {c}, row {r}, head {h}, batch {n}: element [{line}, {place}] of the box is {what}, "
            f"and should be {right} ({len(off)} of {got.numel()} elements are wrong)",
            diagnosis="wrong-element",
            case=f"batch={batch}, seq={seq}, heads={heads}",
        )
    return f"{len(corners)} boxes of 32 rows, of them {2 * batch * heads * 2} beyond an end"


# ---- 11.10 ----------------------------------------------------------------------------------------------------------
TURNS = Path(__file__).parent / "phase_11_turns.cu"
"""The kernel of exercise 11.10, but for the turns."""


@exercise(
    "11.10",
    title="Turns, backwards",
    minutes=20,
    difficulty="Core",
    hints=[
        "A barrier for each consumer: its own 128 threads wait there (sync), those of the consumer whose turn is "
        "before it arrive, and go on. So each of these barriers counts 2 * GROUP threads, in sync and in arrive alike.",
        "Turns go CONSUMERS - 1, ..., 1, 0, CONSUMERS - 1, ... So consumer c passes on to (c + CONSUMERS - 1) % "
        "CONSUMERS. Nobody has passed a turn to the first one when it begins: who would have?",
        "begin: consumer 0 passes on, as if its turn had just been. end: the last pass, consumer 0's, was for consumer "
        "CONSUMERS - 1, which takes that turn and does nothing with it.",
    ],
)
def _(turns: str) -> str:
    text = _filled_in(turns, "turns")
    for name in ("begin", "take_turn", "pass_turn", "end"):
        expect(f"{name}(" in text, f"the text should still define `{name}`", diagnosis="wrong-entry")
    whole = replaced(Source(TURNS.read_text(encoding="utf-8"), TURNS.stem), "turns", text)
    for consumers in (2, 3):
        module = built(whole, check=True, CONSUMERS=consumers)
        for rounds in (3, 1):
            case = f"CONSUMERS={consumers}, {rounds} round{'s' * (rounds > 1)}"
            order = torch.full((consumers * rounds,), -1, dtype=torch.int32)
            failed = None
            try:
                _ran(module, whole, case, "run", order, rounds, timeline=1)
            except CheckFailed as found:
                failed = found
            launches = module.report.launches if module.report is not None else []
            events = launches[0].events if launches else []
            goes = [*range(consumers)][::-1] * rounds
            if failed is not None:
                raise _turns_failed(failed, events, goes)
            went = order.tolist()
            expect(
                went == goes,
                f"the turns went {_numbers(went)}; they should go {_numbers(goes)}",
                diagnosis="wrong-order",
                case=case,
            )
            expect(
                any(e.did == "barrier-arrive" for e in events),
                "the order is right, but who passes a turn on waits until the next has come for it: "
                "named_barrier_arrive counts, and goes on",
                diagnosis="waits-to-pass",
                case=case,
            )
            _expect_none_left(module, case)
    return "2 and 3 consumers take their turns, and none is left over"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _turns_failed(failed: CheckFailed, events: Sequence[Event], goes: Sequence[int]) -> CheckFailed:
    """What the consumers had done at the named barriers by the time when the run failed; the finding below."""
    if any(e.did == "barrier-arrive" and e.values[0] == 0 for e in events):
        said = "barrier 0 is that of __syncthreads: turns need barriers of their own, of 1 to 15"
        return CheckFailed(f"{said}\n{failed.sentence}", diagnosis="barrier-zero", case=failed.case)
    if failed.diagnosis == "race":
        said = "two consumers had their turn at the same time"
    elif failed.diagnosis == "deadlock":
        went = [e.warp // 4 for e in events if e.did == "barrier-passed" and e.values[0] and e.warp % 4 == 0]
        if not went and any(e.did == "barrier-arrive" for e in events):
            said = (
                "nobody has had a turn, though one was passed on: to which barrier, and how many threads does it count?"
            )
        elif not went:
            said = "nobody has had a turn: the first one has to be passed on by somebody, before the first round"
        elif went[: len(goes)] == list(goes):
            said = "all turns went right; then somebody waits for one that nobody passes on"
        else:
            said = f"the turns that were taken: {_numbers(went)}; they should go {_numbers(goes)}"
    else:
        return failed
    return CheckFailed(f"{said}\n{failed.sentence}", diagnosis=failed.diagnosis, case=failed.case)


def _expect_none_left(module: CudaModule, case: str) -> None:
    """Raises CheckFailed where threads have arrived at a named barrier that nobody has waited for."""
    __tracebackhide__ = True
    assert module.report is not None, "every run in the emulator leaves a report"
    came: dict[int, int] = {}
    for e in module.report.launches[0].events:
        if e.did in ("barrier", "barrier-arrive") and e.values[0]:
            came[e.values[0]] = (came.get(e.values[0], 0) + 32) % e.values[1]
    left = {number: threads for number, threads in came.items() if threads}
    expect(
        not left,
        "the order is right, but when the block ends a turn is left over: "
        + ", ".join(f"{threads} threads have arrived at barrier {number}" for number, threads in left.items())
        + ", and nobody takes that turn",
        diagnosis="turn-left-over",
        case=case,
    )


# ---- 11.11 ----------------------------------------------------------------------------------------------------------
PARTS = Path(__file__).parent / "phase_11_parts.cu"
"""The kernel of exercise 11.11, but for the two functions between producer and consumers."""


_PLACES = 3


def _barrier(byte: int) -> str:
    """The name of the mbarrier at this byte of `barriers`."""
    number = byte // 8
    return f"`{'full' if number < _PLACES else 'empty'}` of place {number % _PLACES}"


@exercise(
    "11.11",
    title="Who hands on the parts",
    minutes=30,
    difficulty="Core",
    hints=[
        "A place is a stage, and a part's number is what lies in it: the producer waits for `empty`, fills it, arrives "
        "at `full`; a consumer's thread waits for `full`, reads it, arrives at `empty`. Place n % PLACES, use "
        "n / PLACES.",
        "hand_on: the parity of the producer's first wait is 1 (exercise 11.2). The number comes from "
        "atomicAdd(h.counter, 1); it is stored in the place before the arrival, which is what makes it visible.",
        "A thread reads the place into a variable, and only then arrives. Numbers of `parts` and more are handed on "
        "like the others: they tell the consumers to stop.",
    ],
)
def _(hand: str) -> str:
    text = _filled_in(hand, "hand")
    for name in ("hand_on", "take"):
        expect(f"{name}(" in text, f"the text should still define `{name}`", diagnosis="wrong-entry")
    whole = replaced(Source(PARTS.read_text(encoding="utf-8"), PARTS.stem), "hand", text)
    module = built(whole, check=True)
    for parts, blocks in ((7, 1), (20, 3), (1, 2), (0, 1)):
        case = f"{parts} parts, {blocks} block{'s' * (blocks > 1)}"
        counter, done = torch.zeros(1, dtype=torch.int32), torch.zeros(max(1, parts), 2, dtype=torch.int32)
        try:
            _ran(module, whole, case, "run", counter, done, parts, blocks)
        except CheckFailed as failed:
            said = re.sub(r"barriers at byte (\d+)", lambda m: _barrier(int(m[1])), failed.sentence)
            raise CheckFailed(said, diagnosis=failed.diagnosis, case=case) from None
        wrong = (done[:parts] != 1).nonzero()
        if len(wrong):
            part, consumer = wrong[0].tolist()
            times = int(done[part, consumer])
            raise CheckFailed(
                f"consumer {consumer} works {times} times on part {part}, and should once ({len(wrong)} of {2 * parts} "
                "counts are wrong). Is a number handed on as it came from the counter, and is a place filled again "
                "only when all threads have read it?",
                diagnosis="wrong-parts",
                case=case,
            )
        taken = parts + blocks
        expect(
            int(counter) == taken,
            f"the parts are right, but the counter ends at {int(counter)}: {blocks} producer{'s' * (blocks > 1)} "
            f"should take {parts} parts, and each one number more, which says that there are none: {taken}",
            diagnosis="wrong-count",
            case=case,
        )
    return "every part once, by every consumer, with 1 to 3 blocks"


# ---- 11.12 ----------------------------------------------------------------------------------------------------------
_BLOCK_M = 192  # of step 5 with HEAD_DIM 64
_LAUNCHED = ((1, 1, 1, 400, 130, False), (1, 2, 1, 200, 200, True), (2, 1, 1, 260, 24, True))
_BLOCK = """// What a block does; `shared` is its dynamic shared memory.
template <bool CAUSAL>
__device__ __forceinline__ void flash_forward_block(const Problem& p, const CUtensorMap& q_map,
                                                    const CUtensorMap& k_map, const CUtensorMap& v_map, char* shared) {
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_BYTES;                  // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t full_q = v_smem + STAGES * KV_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES; // mbarriers
    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage
"""


def launchless() -> str:
    """Step 5 of the ladder as a block's work, without a kernel that calls it and without a launch: 11.12's text."""
    text = replaced(step("p11_5_consumers"), "shared memory", _BLOCK).text
    text = re.sub(r"constexpr int SHARED = .*\n", "", text)
    return replaced(text, "launch", "// The kernel and its launch:").text


@exercise(
    "11.12",
    title="The launch",
    minutes=25,
    difficulty="Core",
    hints=[
        "How many bytes does a block need? Q, STAGES tiles of K and as many of V, BARRIERS barriers of 8 bytes. A "
        "swizzled tile begins at a multiple of 1024: the declaration of the dynamic array can say so, extern "
        "__shared__ __align__(1024) char shared[].",
        "Three maps, by map_of. A box has as many rows as the tile that it fills; K and V have kv_heads heads, seq_k "
        "rows. The kernel takes them as const __grid_constant__ CUtensorMap, and Problem by value.",
        "A block for each BLOCK_M rows of each head of each batch, all on x, THREADS threads. More than 48 KB of "
        "dynamic shared memory need cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "
        "for whichever of the two kernels is launched. The stream is a parameter.",
    ],
)
def _(launch: str) -> str:
    text = _filled_in(launch, "launch")
    before = launchless()
    lines = len(before.splitlines())
    whole = Source(before + text, "p11_5_consumers", lines + 1, lines + len(text.splitlines()))
    expect(SIGNATURE in re.sub(r"\s+", " ", text), f"the text should define `{SIGNATURE}`", diagnosis="wrong-entry")
    try:
        verdict = examine(whole, fast=False, probes=_LAUNCHED, max_seq=100)
    except CheckFailed as failed:
        if failed.diagnosis in ("rows-in-common", "rows-not-written", "global-out-of-bounds", "launch-configuration"):
            story = _grid_story(whole)
            if story is not None:
                below = failed.sentence.partition(". Yet as many")[0]
                raise CheckFailed(f"{story}\n{below}", diagnosis="wrong-grid", case=failed.case) from None
        raise
    story = _grid_story(whole)
    expect(story is None, f"the result is right, but {story}", diagnosis="wrong-grid", case="seq_q=200, heads=2")
    return f"{verdict.cases} cases right, nothing found by the emulator"


def _grid_story(whole: Source) -> str | None:
    """What is wrong with the grid of a launch for two batches of four heads, 200 rows each; None where nothing is."""
    module = built(whole, check=True)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, (2, 4, 2, 200, 64, False))
    launches = module.report.launches if module.report is not None else []
    if not launches:
        return None
    x, y, z = launches[0].grid
    if y * z > 1:
        return f"the block takes its head and its rows from blockIdx.x alone, and the grid is ({x}, {y}, {z})"
    wanted = 2 * 4 * -(-200 // _BLOCK_M)
    if x == wanted:
        return None
    return (
        f"{x} blocks are launched for 2 batches of 4 heads of 200 rows. A block has {_BLOCK_M} rows of one head of one "
        f"batch, so there should be {wanted}"
    )


# ---- 11.13 ----------------------------------------------------------------------------------------------------------
_HEAD_DIM, _SLOTS, _CONSUMERS, _BLOCK_N = 128, 3, 2, 64
_LONG = (1, 1, 1, 128, 330, False)  # several tiles; the last one is not full
_NO_KEYS = (2, 1, 1, 200, 24, True)  # a block none of whose rows sees a key
_ITEMS = 2 * -(-_LONG[4] // _BLOCK_N)  # tiles of K and of V that come
_FULL = (64 * _CONSUMERS + _SLOTS * _BLOCK_N) * _HEAD_DIM * 2 + 8  # where the barriers `full` begin, then `empty`


def _item(i: int) -> str:
    return f"{'KV'[i % 2]} of tile {i // 2}"


def _slots(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


class _Walk:
    """What the consumers' first warps did at the ring's barriers, in terms of slots."""

    def __init__(self, events: Sequence[Event]):
        at = sorted({e.values[0] for e in events if e.did in ("mbarrier-wait", "arrive")})
        loads = sorted({e.values[0] for e in events if e.did == "load"})
        self.base = loads[0] if loads else 0  # where Q lies: the shared memory's begin
        self.known = bool(at) and bool(loads)
        self.events = events

    def slot(self, address: int) -> tuple[str, int] | None:
        number = (address - self.base - _FULL) // 8
        if not 0 <= number < 2 * _SLOTS:
            return None
        return ("full", "empty")[number // _SLOTS], number % _SLOTS

    def waits(self, warp: int) -> list[tuple[str, int, int]]:
        """(barrier, slot, parity) of each wait of a warp."""
        found = [(self.slot(e.values[0]), e.values[1]) for e in self.events
                 if e.warp == warp and e.did == "mbarrier-wait"]  # fmt: skip
        return [(*where, parity) for where, parity in found if where is not None]

    def arrivals(self, consumer: int) -> list[tuple[str, int]]:
        """(barrier, slot) of each arrival of a consumer's warps."""
        mine = range(4 * consumer, 4 * consumer + 4)
        found = [self.slot(e.values[0]) for e in self.events if e.warp in mine and e.did == "arrive"]
        return [where for where in found if where is not None]


def _ring_story(walk: _Walk) -> str | None:
    """What a consumer's waits or releases say, where they are not those of the ring; None where they are."""
    waits = walk.waits(0)
    wrong = next((w for w in waits if w[0] == "empty"), None)
    if wrong is not None:
        return "a consumer waits at `empty`. That is the producer's wait; a consumer waits for bytes, at `full`"
    for i, (_, slot, parity) in enumerate(waits[:_ITEMS]):
        if (slot, parity) == (i % _SLOTS, i // _SLOTS % 2):
            continue
        seen = f"a consumer's wait number {i} (from 0) is for slot {slot}, parity {parity}"
        return (
            f"{seen}. Item {i} of the ring, {_item(i)}, is in slot {i} % {_SLOTS} = {i % _SLOTS}, and that is use "
            f"{i // _SLOTS} of the slot: parity {i // _SLOTS % 2}"
        )
    for consumer in range(_CONSUMERS):
        arrivals = walk.arrivals(consumer)
        name = f"consumer {consumer}"
        if any(what == "full" for what, _ in arrivals):
            return f"{name} arrives at `full`. A slot is given back at `empty`: there the producer waits"
        if not arrivals and len(waits) > 1:
            return f"{name} gives no slot back: each consumer arrives once at `empty` for each item that it has read"
        per_slot = Counter(slot for _, slot in arrivals)
        for slot, times in per_slot.items():
            if times > len(range(slot, _ITEMS, _SLOTS)):
                return (
                    f"{name} arrives {times} times at `empty` of slot {slot}, which holds "
                    f"{len(range(slot, _ITEMS, _SLOTS))} items: one thread of a consumer arrives, once for each item"
                )
        for i, (_, slot) in enumerate(arrivals):
            if slot != i % _SLOTS:
                return (
                    f"{name} gives back, in this order, slots {_slots([s for _, s in arrivals])}. The items K, V, K, "
                    f"V, ... lie in slots {_slots([n % _SLOTS for n in range(_ITEMS)])}"
                )
    return None


def _in_the_ring(sentence: str) -> str:
    """The sentence, with what lies at an offset in the dynamic shared memory by its name."""

    def name(m: re.Match[str]) -> str:
        byte = int(m[1])
        if byte >= _FULL:
            number = (byte - _FULL) // 8
            return f"`{('full', 'empty')[number // _SLOTS % 2]}` of slot {number % _SLOTS}"
        slot = (byte - 64 * _CONSUMERS * _HEAD_DIM * 2) // (_BLOCK_N * _HEAD_DIM * 2)
        return m[0] if slot < 0 or byte >= _FULL - 8 else f"slot {slot} of the ring"

    return re.sub(r"bytes (\d+) to \d+ of the dynamic shared memory", name, sentence)


_OF_THE_RING = ("deadlock", "stage-overwritten", "read-before-wait", "mbarrier-arrivals", "never-waited",
                "uninitialised-shared", "race")  # fmt: skip


def _expect_given_back_early(walk: _Walk) -> None:
    """Raises CheckFailed where a consumer keeps K's slot until its tile's product with V has been issued."""
    __tracebackhide__ = True
    for consumer in range(_CONSUMERS):
        given, issued = Counter[int](), 0
        for e in walk.events:
            if e.warp // 4 != consumer:
                continue
            where = walk.slot(e.values[0]) if e.did == "arrive" else None
            if where is not None:
                given[where[1]] += 1
            if e.did == "wgmma" and e.values[1] == _HEAD_DIM and e.warp == 4 * consumer:
                j, issued = issued // (_BLOCK_N // 16), issued + 1
                item = 2 * j
                expect(
                    given[item % _SLOTS] > item // _SLOTS,
                    f"the result is right, but when the product with V of tile {j} is issued, K of the tile has not "
                    "been given back. Nobody reads it after the scores: the producer could bring the next tile there "
                    "during the softmax",
                    diagnosis="released-late",
                    case="seq_q=128, seq_k=330",
                )


@exercise(
    "11.13",
    title="The consumer, from a blank page",
    minutes=75,
    difficulty="Stretch",
    hints=[
        "One round of the loop is one tile of keys: wait for K; S; give K back; the softmax; wait for V; O += P V; "
        "give V back. K of tile j is item 2 j of the ring, V is item 2 j + 1. Item i lies in slot i % SLOTS, and its "
        "phase of `full` has the parity i / SLOTS % 2.",
        "A product: wgmma_fence(); HEAD_DIM / MMA_K times wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), "
        "k_tile + columns_on<BLOCK_N>(k), k > 0), with k_tile = descriptor(address of the slot); wgmma_commit(); "
        "wgmma_wait<0>(). Then if (first_thread) mbarrier_arrive(empty + 8 * slot).",
        "The softmax is phase 9's. Of the lane's row r = 0, 1 the scores are s[4 n + 2 r + e], e = 0, 1, n < S_TILES, "
        "of key j * BLOCK_N + n * MMA_N + 2 t + e. Mask, maximum over the row's four lanes (shuffles 1 and 2), "
        "correction = exp2_approx((m_i[r] - base) * scale_log2) with base 0 where the maximum is -infinity, rescale "
        "l_i[r] and acc[4 n + 2 r + e], then the probabilities in place, and their sum.",
        "uint32_t a[BLOCK_N / MMA_K][4]; for i < BLOCK_N / 4: a[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]). Then "
        "wgmma_fence(); BLOCK_N / MMA_K times wgmma_rs<HEAD_DIM, T, true>(acc, a[k], v_tile + rows_on(k)), with v_tile "
        "= descriptor_of_rows<BLOCK_N>(address of the slot); commit, wait.",
    ],
)
def _(loop: str) -> str:
    text = _filled_in(loop, "loop")
    whole = replaced(Source(RING.read_text(encoding="utf-8"), RING.stem), "loop", text)
    try:
        verdict = examine(whole, head_dim=_HEAD_DIM, fast=False, probes=(_LONG, PROBES[0], _NO_KEYS), max_seq=150)
    except CheckFailed as failed:
        said = _in_the_ring(failed.sentence)
        if failed.diagnosis in _OF_THE_RING:
            walk = _Walk(_events(whole, _LONG, _HEAD_DIM))
            if walk.known and (story := _ring_story(walk)) is not None:
                said = f"{story}\n{said}"
        if failed.diagnosis == "values-moved":
            said += " Or have P's fragments another order: a[k] is that of keys 16 k to 16 k + 15?"
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=failed.case) from None
    _expect_given_back_early(_Walk(_events(whole, _LONG, _HEAD_DIM)))
    return f"{verdict.cases} cases right, nothing found by the emulator"


# ---- 11.14 ----------------------------------------------------------------------------------------------------------
_ALONE = (1, 1, 1, 384, 1024, False)
_ROWS_PER_TILE = 128  # two consumers
_SLOW = "[&] { for (int late = 0; late < 50 && threadIdx.x / 128 == 1; late++) __nanosleep(1000); }(), wgmma_wait<"


def _expect_to_wait_for_the_slow(whole: Source) -> None:
    """Raises CheckFailed where a stage is filled again though one of the consumers, which is slow, still reads it."""
    __tracebackhide__ = True
    slow = replace(whole, text=re.sub(r"\bwgmma_wait\s*<", _SLOW, whole.text))
    try:
        probe(built(slow, check=True), whole, (1, 1, 1, 128, 700, False))  # every stage is filled often
    except CheckFailed as failed:
        raise CheckFailed(
            "right as long as the consumers are equally fast; wrong where one comes late to its wgmma_wait. How many "
            f"arrivals does `empty` wait for?\n{failed.sentence}",
            diagnosis=failed.diagnosis,
            case=failed.case,
        ) from None


@exercise(
    "11.14",
    title="The whole kernel, from a blank page",
    minutes=150,
    difficulty="Stretch",
    hints=[
        "In this order, and after each the check: constants and the launcher with three maps; the barriers; the "
        "producer (11.8); the consumers' loop (11.13); the store. Begin without a causal mask: end = "
        "ceil_div(p.seq_k, BLOCK_N).",
        "THREADS = (CONSUMERS + 1) * 128. Shared memory, dynamic, __align__(1024): Q [CONSUMERS * 64, HEAD_DIM], "
        "STAGES tiles of K, as many of V, then 8 bytes for each barrier: full_q, and full and empty of each stage of K "
        "and of V. `full` is made for 1 arrival, `empty` for CONSUMERS.",
        "The kernel's first lines: lane, warp, consumer = threadIdx.x / 128; blockIdx.x / m_blocks is the head, "
        "blockIdx.x % m_blocks the block of rows. One thread makes the barriers, fence_mbarrier_init(), "
        "__syncthreads(). Then the roles part: the last warpgroup gives its registers back with "
        "setmaxnreg_dec<24>(), one thread of it loads, and all of it returns; the others take setmaxnreg_inc<240>().",
        "The launcher: map_of(p->q, p->q_stride, p->batch, p->heads, p->seq_q, BLOCK_M), and of K and V with kv_heads, "
        "seq_k and BLOCK_N; cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED); "
        "kernel<<<blocks, THREADS, SHARED, (cudaStream_t)stream>>>(*p, q_map, k_map, v_map).",
    ],
)
def _(my_kernel: str) -> str:
    whole = whole_kernel(_filled_in(my_kernel, "my_kernel"), "my_kernel")
    verdict = examine(whole, fast=False, probes=(*PROBES[:2], _NO_KEYS), max_seq=150)
    _expect_to_wait_for_the_slow(whole)
    report = probe(built(whole, check=True), whole, _ALONE, timeline=2)
    expect_launched(report)
    c, case = report.counters, "seq_q=384, seq_k=1024, head_dim=64, float16"
    wrong = functools.partial(expect, case=case)
    wrong(c["wgmma"] > 0, "the result is right, but no wgmma was issued", diagnosis="no-wgmma")
    wrong(
        c["mma"] == 0,
        f"the result is right, but {c['mma']} of the products are mma.sync: both should be wgmma",
        diagnosis="no-wgmma",
    )
    n, m, d = _ALONE[4], _ALONE[3], 64
    wrong(
        c["tma_load_bytes"] >= (m + 2 * n) * d * 2,
        f"the result is right, but TMA brings {c['tma_load_bytes'] // 1024} KB, where Q, K and V have "
        f"{(m + 2 * n) * d * 2 // 1024}: all three should come by it",
        diagnosis="no-tma",
    )
    most = (m + m // _ROWS_PER_TILE * 2 * n) * d * 2
    wrong(
        c["tma_load_bytes"] <= most,
        f"the result is right, but TMA brings {c['tma_load_bytes'] // 1024} KB. Where every tile of K and V serves "
        f"{_ROWS_PER_TILE} rows, two consumers, {most // 1024} are enough",
        diagnosis="too-few-rows-per-tile",
    )
    events = report.launches[0].events
    issue = {(e.block, e.warp) for e in events if e.did == "wgmma"}
    ask = {(e.block, e.warp) for e in events if e.did == "load"}
    wrong(
        not issue & ask,
        f"the result is right, but warp {min(w for _, w in issue & ask) if issue & ask else 0} both asks for tiles and "
        "multiplies: the producer should be a warpgroup of its own, which can run ahead",
        diagnosis="no-producer",
    )
    moved = {(e.warp // 4, e.values[0]) for e in events if e.did == "registers" and e.block == 0}
    groups = {w // 4 for _, w in issue | ask}
    wrong(
        {group for group, _ in moved} >= groups,
        "the result is right, but registers do not move: the producer's warpgroup gives some back (setmaxnreg_dec), "
        "and each consumer takes more (setmaxnreg_inc)",
        diagnosis="registers-kept",
    )
    places = Counter(e.values[0] for e in events if e.did == "load" and e.block == events[0].block)
    again = sum(times > 1 for times in places.values())
    wrong(
        again == 0 or again > 2,
        f"the result is right, but the producer does not run ahead: K and V of all tiles are brought to {again} "
        "places. With two stages the next tiles come while the consumers read these",
        diagnosis="one-stage",
    )
    return f"{verdict.cases} cases right, {c['wgmma']} wgmma, nothing found by the emulator"
