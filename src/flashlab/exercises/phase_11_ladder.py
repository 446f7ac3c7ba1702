"""Checks of 11.6 to 11.14: CUDA texts in the place of a part of a kernel, or of all of it.

What the emulator finds comes first, then what the numbers say. A change of the right text that gives all of that, in
the order of the barriers too, is told before either.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import (
    PROBES,
    VAGUE,
    Source,
    built,
    examine,
    expect_any_base,
    expect_defined,
    expect_launched,
    expect_variant,
    probe,
    ran,
    replaced,
    source_of,
    text_of,
    whole_kernel,
)
from flashlab.check.cuda_index import Outputs, Trials, explained, forwards, traced
from flashlab.check.lookup import Row
from flashlab.check.poison import MarkedEmpty
from flashlab.cuda import CudaModule
from flashlab.exercises.phase_09_ladder import PAST_THE_LAST
from flashlab.exercises.registry import exercise
from flashlab.kernels import step
from flashlab.simt.report import Event
from flashlab.simt.source import blank_comments

_HERE = Path(__file__).parent
RING = _HERE / "phase_11_ring.cu"
"""The kernel of exercise 11.13, but for the consumers' loop."""
TURNS = _HERE / "phase_11_turns.cu"
"""The kernel of exercise 11.10, but for the turns."""
PARTS = _HERE / "phase_11_parts.cu"
"""The kernel of exercise 11.11, but for the two functions between producer and consumers."""
_MAP = _HERE / "phase_11_map.cu"

_SHORT = PROBES[:2]
_HEAD_DIM = 128
_LONG = (1, 1, 1, 64, 700, False)
_NO_KEYS = (2, 1, 1, 200, 24, True)  # a block none of whose rows sees a key


def _filled_in(answer: Any, name: str) -> str:
    """The text, if it is one and holds more than comments."""
    text = text_of(answer, name)
    if not blank_comments(text).strip():
        raise NotImplementedError
    return text


def _in_file(path: Path, region: str, text: str) -> Source:
    return replaced(Source(path.read_text(encoding="utf-8"), path.stem), region, text)


def _changed(whole: Source, old: str, new: str) -> Source:
    """The source with one line of it changed; the learner's own lines stay where they are if the lines do."""
    assert whole.text.count(old) == 1, f"{old!r} occurs {whole.text.count(old)} times in {whole.name}.cu"
    return replace(whole, text=whole.text.replace(old, new))


def _watched(head_dim: int = 64, **defines: Any) -> Callable[[Any], CudaModule]:
    return functools.partial(built, check=True, head_dim=head_dim, **defines)


def _halves(*shape: Any, head_dim: int = 64, **options: Any) -> Callable[[CudaModule], Outputs]:
    return forwards(shape, head_dim, torch.float16, timeline=1, **options)


def _ran(module: CudaModule, whole: Source, case: str, entry: str, *arguments: Any, **options: Any) -> None:
    """Calls a function of the module; a refusal by the host's part names the learner's line too."""
    try:
        ran(
            module, whole, case, functools.partial(module.launch, entry, *arguments, echo=False, timeout=3.0, **options)
        )
    except CheckFailed as failed:
        if failed.diagnosis != "launch-failed":
            raise
        said = re.sub(r"\bline (\d+)", lambda m: whole.place(int(m[1])).rstrip(","), failed.sentence)
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=case) from None


def _events(whole: Source, shape: Sequence[Any], head_dim: int = 64) -> list[Event]:
    """What each warp of the first block did; of a run that goes wrong, as far as it went."""
    module = built(whole, check=True, head_dim=head_dim)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, shape, head_dim=head_dim, timeline=1)
    launches = module.report.launches if module.report is not None else []
    return launches[0].events if launches else []


@contextlib.contextmanager
def _by_name(name: Callable[[int], str | None]) -> Any:
    """Failures with `bytes 8 to 15 of the dynamic shared memory` by the name of what lies there."""

    def named(found: re.Match[str]) -> str:
        byte = int(found[1])
        of = name(byte) or found[0]
        return of if byte % 8 == 0 or of == found[0] else f"byte {byte % 8} of {of}, which begins at its byte 0"

    try:
        yield
    except CheckFailed as failed:
        said = re.sub(r"bytes (\d+) to \d+ of the dynamic shared memory", named, failed.sentence)
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=failed.case) from None


def _expect_given_back(events: Sequence[Event], case: str, items: Callable[[int], int] = int) -> None:
    """CheckFailed where a consumer does not give back items(0), items(1), ... of the ring, nor 0, 1, ..."""
    given: dict[int, list[int]] = {}
    for e in events:
        if e.did == "arrive" and not e.values[1]:
            given.setdefault(e.warp // 4, []).append(e.values[0])
    places = sorted({bar for bars in given.values() for bar in bars})
    for group, order in given.items() if len(places) == _SLOTS else ():
        got = [places.index(bar) for bar in order]
        right = [[item(n) % _SLOTS for n in range(len(got))] for item in (items, int)]
        said = f"consumer {group} gives back slots {_listed(got)} of the ring, and what it has read lies in "
        said += f"{_listed(right[0])}"
        expect(got in right, said, diagnosis="wrong-slot", case=case)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


# ---- 11.6 -----------------------------------------------------------------------------------------------------------


def _with_epilogue(text: str) -> Source:
    """Step 10 with a learner's lines from the first wait of the epilogue to where its last brace closes."""
    whole = source_of(step("p11_10_epilogue"))
    lines = whole.text.splitlines()
    begin = next(i for i, line in enumerate(lines) if "if (first_thread) bulk_wait_read<0>();" in line)
    end = next(i for i in range(begin, len(lines)) if "bulk_commit();" in lines[i])
    while (cut := "".join(lines[begin : end + 1])).count("{") > cut.count("}"):
        end += 1
    own = text.strip("\n").splitlines()
    return Source("\n".join([*lines[:begin], *own, *lines[end + 1 :]]) + "\n", whole.name, begin + 1, begin + len(own))


def _own_barriers(module: CudaModule) -> None:
    """CheckFailed where the last run met at one barrier in two numbers of threads: one of the turns' is taken."""
    threads: dict[int, set[int]] = {}
    for e in (e for x in (module.report.launches if module.report is not None else []) for e in x.events):
        if e.did in ("barrier", "barrier-arrive"):
            threads.setdefault(e.values[0], set()).add(e.values[1])
    for number, several in threads.items():
        said = f"barrier {number} is met at by {' and by '.join(map(str, sorted(several)))} threads: it is one of the "
        said += "consumers' turns, 1 to CONSUMERS, which may come at any time. Those behind them are free"
        expect(len(several) == 1, said, diagnosis="barrier-of-the-turns")


_TWO_PARTS = (1, 2, 1, 130, 70, False)
EPILOGUE = Trials(
    "11.6", _watched(_HEAD_DIM), [traced(_halves(*_TWO_PARTS, head_dim=_HEAD_DIM, sms=1))], region=True,
    place=lambda text: _with_epilogue(text).text, tol=1e-3, most=130, then=_own_barriers,
    rows=[
        # So it looks with a wait behind the barrier, without one, or with one group for both slabs.
        Row("not-read-yet", "a slab is filled while the store that reads its place may still be under way: has each "
            "slab its place, each store a commit behind it? A wait for that group comes before, then a barrier of all",
            [("SLAB - 1>", "SLAB>")]),
        Row("same-place", "two stores go to one place of O: a coordinate of tma_store is not what it should be",
            [("slab * SLAB,", "0,")]),
        # Without a fence, with one too early or of threads, it looks the same: what is said is true of all.
        Row("proxy-fence", "each thread that has stored has to fence by itself, after its last store",
            [("fence_proxy_async()", "if (first_thread) fence_proxy_async()")]),
    ],
    equal={"in `n < SLAB / MMA_N`": "n goes up by two, to an even number",
           "`first_thread` is not": "a thread that has committed no group waits for none",
           "`BLOCK_N`": "where there are two slabs both are 128"},
)  # fmt: skip


def _expect_one_under_way(text: str, case: str) -> None:
    """Raises CheckFailed where a wait leaves no group under way: the compiler knows what its number is."""
    sentence = "the result is right, and no slab is filled too early; but"
    said = f"{sentence} bulk_wait waits until O is written: bulk_wait_read is over when the slab has been read"
    expect(not re.search(r"\bbulk_wait\b", blank_comments(text)), said, diagnosis="no-overlap", case=case)
    spied = re.sub(r"\b(bulk_wait(?:_read)?)\s*<([^;]*?)>\s*\(", r"\1<(1 / ((\2) > 0))>(", blank_comments(text))
    try:
        built(_with_epilogue(spied), check=True, head_dim=_HEAD_DIM)
    except CheckFailed:
        sentence += " a wait for 0 groups under way waits for the other slab's store too, whose place is not needed yet"
        raise CheckFailed(sentence, diagnosis="no-overlap", case=case) from None


@exercise(
    "11.6",
    title="The last mile of O",
    minutes=20,
    difficulty="Bug hunt",
    bug=[("bulk_wait_read<HEAD_DIM / SLAB - 1>", "bulk_wait_read<HEAD_DIM / SLAB>")],
    untouched="62e00a752b1d",
    history="a common mistake where a ring of buffers is stored: one group too many may be under way",
    hints=[
        "Shared memory is handed over twice: from the threads that store O to the copy engine, and back. "
        "Who tells whom, each time? The emulator says at which of the two somebody comes too early.",
        "Write down the groups that the first thread has committed: slab 0 and slab 1 of a part, slab 0 and slab 1 of "
        "the next. At the wait for slab 0 of a part, which one has to be over, and how many are younger?",
        "bulk_wait_read<N>() leaves the N youngest groups under way. At each slab's wait one group is younger than the "
        "store that still reads its place: that of the other slab. So N = HEAD_DIM / SLAB - 1.",
    ],
)
def last_mile(epilogue: str) -> str:
    text = text_of(epilogue, "epilogue")
    said = "no store is committed: bulk_commit makes a group of those before it, and bulk_wait_read counts groups"
    expect("bulk_commit" in blank_comments(text), said, diagnosis="never-committed")
    whole, case = _with_epilogue(text), "heads=2, kv_heads=1, seq_q=200, seq_k=200, causal, head_dim=128"
    with explained(lambda: _watched(_HEAD_DIM)(whole), EPILOGUE):
        # One block, which uses its buffer again
        verdict = examine(whole, head_dim=_HEAD_DIM, fast=False, probes=_SHORT, max_seq=150, sms=1)
    expect_variant(whole, head_dim=64)
    EPILOGUE.runs[0](module := _watched(_HEAD_DIM)(whole))
    _own_barriers(module)
    sentence = "the result is right, but no O leaves by tma_store: the copy engine should do it"
    expect(verdict.counters["tma_stores"] > 0, sentence, diagnosis="no-tma-store", case=case)
    _expect_one_under_way(text, case)
    return f"{verdict.cases} cases right, nothing found by the emulator"


# ---- 11.7 -----------------------------------------------------------------------------------------------------------
# Step 6 with K and V in one ring of three slots: K of the nth tile is item 2 nth, V of it is item 2 nth + 1.
_IN_A_RING = (
    ("STAGES = 2;", "SLOTS = 3;"),
    ("1 + 4 * STAGES;", "1 + 2 * SLOTS;"),
    ("2 * STAGES * KV_BYTES + 8", "SLOTS * KV_BYTES + 8"),
    ("k_smem = q_smem", "ring_smem = q_smem"),
    ("    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]\n", ""),
    ("v_smem + STAGES * KV_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES;",
     "ring_smem + SLOTS * KV_BYTES, full_slot = full_q + 8;"),
    ("empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;", "empty_slot = full_slot + 8 * SLOTS;"),
    ("< empty_k ?", "< empty_slot ?"),
    ("int j = end - 1, nth = 0; j >= 0; j--, nth++", "int i = 0; i < 2 * end; i++"),
    ("const int stage = nth % STAGES, phase = nth / STAGES & 1;\n", "const int slot = i % SLOTS;\n"),
    ("mbarrier_wait(empty_k + 8 * stage, phase ^ 1);", "mbarrier_wait(empty_slot + 8 * slot, i / SLOTS & 1 ^ 1);"),
    ("load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, j * BLOCK_N, kv_head, batch);",
     "load_tile<BLOCK_N>(ring_smem + slot * KV_BYTES, i % 2 ? v_map : k_map, full_slot + 8 * slot,\n"
     "                                   (end - 1 - i / 2) * BLOCK_N, kv_head, batch);"),
    ("                mbarrier_wait(empty_v + 8 * stage, phase ^ 1);\n", ""),
    ("                load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, j * BLOCK_N, kv_head, "
     "batch);\n", ""),
    ("const int stage = (nth - 1) % STAGES, phase = (nth - 1) / STAGES & 1;",
     "const int slot = (2 * nth - 1) % SLOTS, phase = (2 * nth - 1) / SLOTS & 1;"),
    ("full_v + 8 * stage", "full_slot + 8 * slot"),
    ("v_smem + stage * KV_BYTES", "ring_smem + slot * KV_BYTES"),
    ("\n        if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));", ""),
    ("const int stage = nth % STAGES, phase = nth / STAGES & 1;  // each use of a stage is a phase",
     "const int slot = 2 * nth % SLOTS, phase = 2 * nth / SLOTS & 1;"),
    ("full_k + 8 * stage", "full_slot + 8 * slot"),
    ("            output_is_there();\n#pragma", "#pragma"),
)  # fmt: skip


def _overlapping(scores: str) -> Source:
    base = functools.reduce(lambda whole, edit: _changed(whole, *edit), _IN_A_RING, source_of(step("p11_6_overlap")))
    return replaced(replace(base, name="p11_6_ring"), "scores", scores)


def _late(n: int) -> int:
    """The nth item that step 6 gives back: K of a tile, then V of the tile before."""
    return n and n + n % 2 * 2 - 1


def _expect_in_order(events: Sequence[Event], case: str) -> None:
    """CheckFailed where V is not given back before K of the next tile, and before the scores are waited for."""
    mine = [e for e in events if e.warp < 4]
    arrivals = [e for e in mine if e.did == "arrive" and not e.values[1]]
    sentence = "the result is right, and nothing is released too early; but "
    one = {e.warp for e in arrivals}
    said = f"{sentence}K and V are given back by threads of different warps, which keep no order: one thread does both"
    expect(len(one) < 2, said, diagnosis="out-of-order", case=case)
    given = [e.values[0] for e in arrivals]
    places = sorted(set(given))
    order = [places.index(bar) for bar in given]
    late = [_late(n) % _SLOTS for n in range(len(order))]
    said = f"{sentence}V of a tile is given back after K of the next, and the producer, which fills the slots in the "
    said += "ring's order, waits for V's"
    expect(order != late or len(order) < 3, said, diagnosis="out-of-order", case=case)
    _expect_given_back(events, case)
    # Groups since K was given back: the scores' first, O's last; the last that was waited for; arrivals
    scores, added, over, number = None, None, 0, 0
    for e in mine:
        if e.warp not in one:
            continue
        apart = False
        if e.did == "wait":
            over = max(over, e.values[0])
        elif e.did == "wgmma" and e.values[1] < 128:  # columns: O has 64
            added = e.values[0]
        elif e.did == "wgmma" and scores is None:
            scores, apart = e.values[0], added is not None and added <= over
        elif e.did == "arrive" and not e.values[1]:
            number += 1
            if number % 2:  # K
                scores = added = None
                continue
            apart = scores is None
            expect(
                scores is None or scores > over,
                f"{sentence}V of the tile before is given back when the scores are there too: O += P V is to be issued "
                "first, and waited for alone",
                diagnosis="released-late",
                case=case,
            )
        expect(
            not apart,
            f"{sentence}O += P V is waited for before the scores are issued: both are to be under way together",
            diagnosis="one-after-the-other",
            case=case,
        )


_GIVEN_V = "        if (!FIRST && first_thread) mbarrier_arrive(empty_slot + 8 * ((2 * nth - 1) % SLOTS));\n"
_GIVEN_K = "        if (first_thread) mbarrier_arrive(empty_slot + 8 * slot);\n"
_ADDED, _FOR_O = "        if (!FIRST) add_output();\n", "        wgmma_wait<1>();"
ROOM = Trials(
    "11.7", _watched(), [traced(_halves(*_LONG))], region=True, tol=1e-3, most=170,
    place=lambda text: _overlapping(text).text,
    equal={"slot * KV_BYTES` is one too large": "a descriptor leaves out the lowest four bits of an address",
           "8 stands where 2 belongs, in `2 * nth`": "of three slots 8 nth - 1 is the same one",
           "where it is negative": "nothing is given back at the first tile"},
    rows=[
        Row("released-too-early", "K is given back while the scores still read it: wgmma_wait<1> has waited for the "
            "older group, which is O += P V", [(_GIVEN_V, "V\n"), (_GIVEN_K, _GIVEN_V), ("V\n", _GIVEN_K)]),
        *(Row("released-too-early", "K is given back before its product has been waited for",
              [(_GIVEN_K, ""), (wait, _GIVEN_K + wait)]) for wait in (_FOR_O, "        wgmma_wait<0>();")),
        Row("released-too-early", "V is given back while O += P V of its tile is still under way",
            [(_GIVEN_V, ""), (_FOR_O, _GIVEN_V + _FOR_O)]),
        Row("released-too-early", "V is given back while O += P V of its tile is still under way: the scores are the "
            "older group", [(_ADDED, ""), (_FOR_O, _ADDED + _FOR_O)]),
        Row("never-released", "nobody gives K back: each consumer arrives at its slot when the scores are there",
            [(_GIVEN_K, "")]),
        Row("never-released", "nobody gives V back: each consumer arrives at its slot when O += P V of a tile is there",
            [(_GIVEN_V, "")]),
        Row("released-twice", "V of a tile is given back twice", [(_GIVEN_V, 2 * _GIVEN_V)]),
        Row("released-at-the-first", "V is given back at the first tile too, where there is no tile before",
            [("!FIRST && first_thread", "first_thread")]),
        Row("k-for-v", "the slot of this tile's K is given back a second time, and that of V never",
            [(_GIVEN_V, "        if (!FIRST) {\n" + _GIVEN_K + "        }\n")]),
        Row("k-at-the-second", "K of the first tile is never given back: nothing is, where FIRST holds",
            [(_GIVEN_K, _GIVEN_K.replace("(first", "(!FIRST && first"))]),
        # Of (2 nth + 1) % SLOTS and (2 nth - 2) % SLOTS too: all end at the second tile.
        Row("as-if-apart", "the slot of another item is given back: V of the tile before is item 2 nth - 1, and K and "
            "V share the ring", [("(2 * nth - 1) % SLOTS", "(nth - 1) % SLOTS")]),
        *(Row("wrong-slot", "behind the scores another slot is given back than that of their K, which is `slot`",
              [("8 * slot)", f"8 * ((slot + {n}) % SLOTS))")]) for n in (1, 2)),
    ],
)  # fmt: skip


@exercise(
    "11.7",
    title="Room for the next tile",
    minutes=25,
    difficulty="Bug hunt",
    bug=[
        ("!FIRST && first_thread) mbarrier_arrive(empty_slot + 8 * ((2 * nth - 1) % SLOTS))", "K"),
        (
            "first_thread) mbarrier_arrive(empty_slot + 8 * slot)",
            "!FIRST && first_thread) mbarrier_arrive(empty_slot + 8 * ((2 * nth - 1) % SLOTS))",
        ),
        ("(K;", "(first_thread) mbarrier_arrive(empty_slot + 8 * slot);"),
    ],
    untouched="cc29bac12d7c",
    history="a common mistake where the order of two products under way is changed",
    hints=[
        "Two groups are committed in a round. Which is the older one here? Which of them has wgmma_wait<1> waited for, "
        "and which is still under way?",
        "Who arrives at empty_slot says: nobody reads what lies in this slot any more, the producer may fill it again, "
        "with K or with V. From which line on is that true of each of the two?",
        "Groups end in the order in which they were committed: O += P V first, so V, at slot (2 * nth - 1) % SLOTS, is "
        "free behind wgmma_wait<1>, and K behind wgmma_wait<0>.",
    ],
)
def room_for_a_tile(scores: str) -> str:
    whole, case = _overlapping(text_of(scores, "scores")), "seq_q=64, seq_k=700"
    with explained(lambda: _watched()(whole), ROOM):
        try:
            verdict = examine(whole, fast=False, probes=(PROBES[0], _LONG), max_seq=150)
        finally:  # another slot than that which was read is a cause; what is found comes of it
            events = _events(whole, _LONG)
            _expect_given_back(events, case, _late)  # told below
    _expect_in_order(events, case)
    expect_variant(whole, head_dim=128)
    return f"{verdict.cases} cases right, nothing found by the emulator"


# ---- 11.8 -----------------------------------------------------------------------------------------------------------
# Step 5 with a stage more for K than for V.
_K_STAGES, _V_STAGES, _CONSUMERS, _BLOCK_N = 3, 2, 2, 128
_UNEVEN = (
    ("STAGES = 2;", f"K_STAGES = {_K_STAGES}, V_STAGES = {_V_STAGES};"),
    ("1 + 4 * STAGES;                       //", "1 + 2 * (K_STAGES + V_STAGES);         //"),
    ("2 * STAGES * KV_BYTES", "(K_STAGES + V_STAGES) * KV_BYTES"),
    ("+ Q_BYTES;                  // [STAGES,", "+ Q_BYTES;                  // [K_STAGES,"),
    ("k_smem + STAGES * KV_BYTES;        // [STAGES,", "k_smem + K_STAGES * KV_BYTES;      // [V_STAGES,"),
    ("v_smem + STAGES * KV_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES; // mbarriers",
     "v_smem + V_STAGES * KV_BYTES, full_k = full_q + 8;       // mbarriers"),
    ("    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage",
     "    const uint32_t full_v = full_k + 8 * K_STAGES, empty_k = full_v + 8 * V_STAGES;    // of every stage\n"
     "    const uint32_t empty_v = empty_k + 8 * K_STAGES;"),
    ("const int stage = nth % STAGES, phase = nth / STAGES & 1;  // each use of a stage is a phase",
     "const int k_stage = nth % K_STAGES, v_stage = nth % V_STAGES;      // each use of a stage is a phase"),
    ("mbarrier_wait(full_k + 8 * stage, phase);  ", "mbarrier_wait(full_k + 8 * k_stage, nth / K_STAGES & 1);"),
    ("descriptor(k_smem + stage", "descriptor(k_smem + k_stage"),
    ("mbarrier_arrive(empty_k + 8 * stage)", "mbarrier_arrive(empty_k + 8 * k_stage)"),
    ("mbarrier_wait(full_v + 8 * stage, phase);", "mbarrier_wait(full_v + 8 * v_stage, nth / V_STAGES & 1);"),
    ("descriptor_of_rows<BLOCK_N>(v_smem + stage", "descriptor_of_rows<BLOCK_N>(v_smem + v_stage"),
    ("mbarrier_arrive(empty_v + 8 * stage)", "mbarrier_arrive(empty_v + 8 * v_stage)"),
)  # fmt: skip
_AFTER = "    setmaxnreg_inc<CONSUMER_REGISTERS>();\n"
# Stages that are used three times and more; a causal block's few tiles; a block without a key.
_PRODUCED = ((1, 1, 1, 64, 1000, False), PROBES[0], (1, 1, 1, 200, 24, True))
_K_PLACE, _V_PLACE = "empty_k + 8 * stage", "empty_v + 8 * stage"
_OF_K = f"mbarrier_wait({_K_PLACE}, (n / K_STAGES + 1) % 2);"
_OF_V = f"mbarrier_wait({_V_PLACE}, ((n - 1) / V_STAGES + 1) % 2);"
_OF_Q = "load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);"
_K_KEYS, _V_KEYS = "(end - 1 - n) * BLOCK_N, kv_head", "(end - n) * BLOCK_N, kv_head"


def _with_producer(text: str) -> Source:
    base = replaced(step("p11_5_consumers"), "producer", text.strip("\n") + "\n" + _AFTER)
    whole = functools.reduce(lambda whole, edit: _changed(whole, *edit), _UNEVEN, base)
    return replace(whole, last=(whole.last or 0) - 1)  # _AFTER is not the learner's


UNEVEN = _with_producer("    // ...").text
"""The kernel of exercise 11.8, but for the producer."""


def _stage_at(byte: int) -> str | None:
    """What lies at this byte of the dynamic shared memory of `_with_producer`."""
    barrier = (byte - (64 * _CONSUMERS + (_K_STAGES + _V_STAGES) * _BLOCK_N) * _HEAD_DIM * 2) // 8
    kinds = {"full_k": _K_STAGES, "full_v": _V_STAGES, "empty_k": _K_STAGES, "empty_v": _V_STAGES}
    names = ["`full_q`", *(f"`{kind}` of stage {stage}" for kind, stages in kinds.items() for stage in range(stages))]
    return names[barrier] if 0 <= barrier < len(names) else None


PRODUCER = Trials(
    "11.8", _watched(_HEAD_DIM), region=True, place=lambda text: _with_producer(text).text, tol=1e-3, most=230,
    lies=_stage_at,
    runs=[traced(_halves(*_PRODUCED[0], head_dim=_HEAD_DIM), (8, 9, 10, 11)),
          traced(_halves(2, 2, 1, 130, 200, True, head_dim=_HEAD_DIM), (8, 9, 10, 11))],
    notes={
        "n / K_STAGES": "each use of a stage is a phase, and the parity is the phase's last bit",
        "n / K_STAGES + 1": "a place that nobody has used is free: the first round's parity is 1",
        "(n - 1) / V_STAGES + 1": "a place that nobody has used is free: the first round's parity is 1",
        "stage": "the nth tile of K lies in stage n % K_STAGES, that of V in n % V_STAGES",
        "kv_head": "tiles of K and V come from kv_head", "end - 1 - n": "the consumers take tile end - 1 first",
        "end - n": "the consumers take tile end - 1 first", "KV_BYTES": "a stage is KV_BYTES long",
    },
    equal={"`warp <= WARPS`": "a warp below WARPS does not come there",
           "`1` has the wrong sign": "of two stages n + 1 and n - 1 take the same"},
    rows=[
        Row("waits-for-itself", "the producer waits at `full`, for its own copies: where there is room for a tile, "
            "`empty` says", [(_K_PLACE, _K_PLACE.replace("empty", "full")),
                             (_V_PLACE, _V_PLACE.replace("empty", "full"))]),
        Row("waits-for-itself", "before K of a tile the producer waits at `full`, for its own copy: where there is "
            "room for a tile, `empty` says", [(_K_PLACE, _K_PLACE.replace("empty", "full"))]),
        Row("q-with-every-tile", "Q is asked for with every tile: it is one tile, and comes once",
            [(_OF_Q, ""), (_OF_K, f"{_OF_Q}\n{_OF_K}")]),
        Row("half-a-stage", "the stages of K and V are half as long as a tile: two tiles lie one on the other",
            [("k_smem + stage * KV_BYTES", "k_smem + stage * KV_BYTES / 2"),
             ("v_smem + stage * KV_BYTES", "v_smem + stage * KV_BYTES / 2")]),
        Row("one-warp", "one warp of the producer's warpgroup gives its registers back and returns: all four have to",
            [("warp >= WARPS", "warp == WARPS")]),
        *(Row("tiles-upwards", f"the tiles{of} are asked for upwards, and the consumers go from end - 1 down to 0",
              [(keys, keys.replace("end - 1 - n", "n").replace("end - n", "n - 1")) for keys in which])
          for of, which in (("", (_K_KEYS, _V_KEYS)), (" of K", (_K_KEYS,)), (" of V", (_V_KEYS,)))),
        *(Row("kv-head", f"the tiles of {of} come from `head`: heads of Q share those of kv_head",
              [(keys, keys.replace("kv_head", "head")) for keys in which])
          for of, which in (("K and of V", (_K_KEYS, _V_KEYS)), ("V", (_V_KEYS,)), ("K", (_K_KEYS,)))),
        Row("no-waits", "nothing is waited for: a stage is filled again while the consumers read it",
            [(_OF_K, ""), (_OF_V, "")]),
        Row("stage-from-the-end", "the stage is counted from the last tile: the nth tile that comes lies in n % "
            "K_STAGES, of V in n % V_STAGES",
            [("= n % K_STAGES", "= (end - 1 - n) % K_STAGES"), ("= (n - 1) % V_STAGES", "= (end - n) % V_STAGES")]),
        Row("two-stages", "two stages of K are used, and there are K_STAGES",
            [("n % K_STAGES", "n % V_STAGES"), ("n / K_STAGES", "n / V_STAGES")]),
        Row("parity-of-v", "K's parity is not that of its stage: K of tile n is the stage's use n / K_STAGES",
            [("n / K_STAGES", "n / V_STAGES")]),
        Row("nobody-returns", "the producer's warps go on to the consumers' code: they return when all is asked for",
            [("    return;\n", "")]),
        Row("q-comes-last", "Q is asked for when all other tiles are, and the consumers begin with it",
            [(_OF_Q, ""), ("    return;\n", f"    if (warp == WARPS && elect_one()) {_OF_Q}\n    return;\n")]),
        *(Row("not-announced", f"nobody announces the bytes of {of}: copy_tile only copies, load_tile announces too",
              [(f"load_tile<{tile}", f"copy_tile<{tile}")])
          for of, tile in (("K", "BLOCK_N>(k"), ("V", "BLOCK_N>(v"), ("Q", "BLOCK_M"))),
        Row("three-stages", "V is put into K_STAGES stages, and there are V_STAGES",
            [("(n - 1) % V_STAGES", "(n - 1) % K_STAGES"), ("(n - 1) / V_STAGES", "(n - 1) / K_STAGES")]),
    ],
)  # fmt: skip


@exercise(
    "11.8",
    title="The producer, from a blank page",
    minutes=60,
    difficulty="Stretch",
    hints=[
        "Warps WARPS and later are the producer's warpgroup. All of its threads give their registers back; one thread "
        "of one warp does the rest; and none of them may go on to the consumers' code.",
        "Q first, to full_q: one tile, for which nobody has to make room. Then the tiles of keys in the order in which "
        "the consumers take them: from end - 1 down to 0. The nth K, n = 0, 1, ..., goes to stage n % K_STAGES, the "
        "nth V to n % V_STAGES. Before each: a wait at `empty` of its stage; a new barrier lets the first use pass.",
        "In which order become places free? K of tile n when K of tile n - 3 has been read, V of tile n - 1 when V of "
        "tile n - 3 has: just after it. So K is asked for one tile ahead of V.",
        "for (int n = 0; n <= end; n++) { if (n < end) K of tile n; if (n > 0) V of tile n - 1; }",
    ],
)
def producer_of_tiles(producer: str) -> str:
    whole = _with_producer(_filled_in(producer, "producer"))
    case = f"seq_q=64, seq_k=1000, head_dim={_HEAD_DIM}"
    with explained(lambda: _watched(_HEAD_DIM)(whole), PRODUCER), _by_name(_stage_at):
        verdict = examine(whole, head_dim=_HEAD_DIM, fast=False, probes=_PRODUCED, max_seq=150)
        sentence = "the result is right, but no tile comes by tma_load: the copy engine should bring them"
        expect(verdict.counters["tma_loads"] > 0, sentence, diagnosis="no-tma-load", case=case)
        _expect_early(_events(whole, _PRODUCED[0], _HEAD_DIM), case)
    expect_variant(whole, head_dim=64)
    return f"{verdict.cases} cases right, and each tile is asked for as soon as there is room"


def _expect_early(events: Sequence[Event], case: str) -> None:
    """CheckFailed where the producer waits for more than the stage that it fills next: each slab is a load."""
    slabs, stages = _HEAD_DIM // 64, (_K_STAGES, _V_STAGES)
    producers = [e for e in events if e.warp >= 4 * _CONSUMERS]
    released = sorted({e.values[0] for e in events if e.did == "arrive" and e.warp < 4 * _CONSUMERS})  # K's, then V's
    places = sorted({e.values[0] for e in producers if e.did == "load"})[-sum(stages) * slabs :: slabs]  # the same
    arrivals = Counter[int]()
    asked, waited = [0, 0], [-1, -1]  # of K, of V: tiles asked for, the last one whose release was waited for
    said = "the result is right, but"
    for e in events:
        at = e.values[0]
        if e.warp < 4 * _CONSUMERS:
            arrivals[at] += e.did == "arrive"
        elif e.did == "mbarrier-passed":
            expect(at in released, f"{said} the producer waits for its own copies: that is the consumers' wait",
                   diagnosis="no-overlap", case=case)  # fmt: skip
            kind, stage = divmod(released.index(at), _K_STAGES)
            if arrivals[at] >= _CONSUMERS:
                waited[kind] = max(waited[kind], (arrivals[at] // _CONSUMERS - 1) * stages[kind] + stage)
        elif e.did == "load" and at in places:
            kind = int(at >= places[_K_STAGES])
            n = asked[kind]
            asked[kind] += 1
            free = n - stages[kind]  # the tile whose release makes room
            # V of a tile is read after K of it, and before K of the next
            late = max(waited[kind] - free, waited[1 - kind] - free + (kind == 0))
            of = kind if waited[kind] > max(free, -1) else 1 - kind
            expect(
                late <= 0 or max(waited) < 0,
                f"{said} {'KV'[kind]} of tile {n} (from 0) is asked for only when {'KV'[of]} of tile {waited[of]} has "
                f"been read: its place is free "
                + (f"when {'KV'[kind]} of tile {free} has been read" if free >= 0 else "from the beginning"),
                diagnosis="no-overlap",
                case=case,
            )


# ---- 11.9 -----------------------------------------------------------------------------------------------------------
_PACKED_DIM, _PACKED = 128, (3, 14, 4)  # (batch, seq, heads): no two sizes alike
_ROW = "Q, K and V of all heads lie in a row, 3 * heads * HEAD_DIM numbers of 2 bytes"
_FIELDS = (  # of each number of a map: what it is, and why it is another
    ("it begins {} bytes behind qkv", "K lies behind Q of the first row, behind heads * HEAD_DIM numbers"),
    ("there are {} columns", "a head has HEAD_DIM, of which the box is a slab"),
    ("there are {} rows", "each batch has seq"),
    ("there are {} heads", "the map is of K alone, which has heads"),
    ("there are {} batches", "it is the last dimension, and qkv has batch"),
    ("from one row to the next it is {} bytes", _ROW),
    ("from one head to the next it is {} bytes", "the heads of K lie side by side, HEAD_DIM numbers each"),
    ("from one batch to the next it is {} bytes", f"there are seq rows between, and {_ROW}"),
    *((f"the box has {{}} {what}", "it is a slab of 64 columns, of 32 rows, of one head")
      for what in ("columns", "rows", "heads", "batches")),
    ("the map has {} dimensions", "they are those of the coordinates: column, row, head, batch"),
    ("the type is another", "the numbers are fp16: CU_TENSOR_MAP_DATA_TYPE_FLOAT16"),
    ("the swizzle is another", "the tile is read with that of 128 bytes: CU_TENSOR_MAP_SWIZZLE_128B"),
)  # fmt: skip


@exercise(
    "11.9",
    title="A map of your own",
    minutes=25,
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
def own_map(map_of_k: str) -> str:
    text = _filled_in(map_of_k, "map_of_k")
    expect_defined(text, "map_of_k")
    module = _watched(HEAD_DIM=_PACKED_DIM)(whole := _in_file(_MAP, "map", text))
    for batch, seq, heads in (_PACKED, (2, 90_000, 32)):  # the second has strides that 32 bits do not hold
        case, out = f"batch={batch}, seq={seq}, heads={heads}", torch.zeros(15).long()
        _ran(module, whole, case, "k_map", torch.zeros(64).half(), out, batch, seq, heads)
        row, head, found = 3 * heads * _PACKED_DIM * 2, _PACKED_DIM * 2, out.tolist()
        want = [heads * head, _PACKED_DIM, seq, heads, batch, row, head, seq * row, 64, 32, 1, 1, 4, 1, 1]
        if found[1:5] != want[1:5] and sorted(found[1:5]) == sorted(want[1:5]):
            said = "the dimensions come in another order than tma_load's coordinates: column, row, head, batch"
            raise CheckFailed(f"{said}, whatever lies next to what", diagnosis="order-of-dimensions", case=case)
        off = [f"{said.format(x)}{f', and should be {y}' if '{' in said else ''}: {why}"
               for (said, why), x, y in zip(_FIELDS, found, want, strict=True) if x != y]  # fmt: skip
        more = f"\n{len(off) - 1} more of the map's numbers are wrong" if len(off) > 1 else ""
        more += "\nThis one does not fit into 32 bits" if batch == 2 else ""
        expect(not off, "".join(off[:1]) + more, diagnosis="wrong-map", case=case)
    return "all numbers of the map, of two tensors"


# ---- 11.10 ----------------------------------------------------------------------------------------------------------


def _none_left(module: CudaModule, case: str | None = None) -> Counter[int]:
    """Threads at each barrier that was used, none of which waits there; CheckFailed where a turn is left over."""
    came = Counter[int]()
    for e in module.report.launches[0].events if module.report else ():
        if e.did in ("barrier", "barrier-arrive") and e.values[0]:
            came[e.values[0]] = (came[e.values[0]] + 32) % e.values[1]
    left = ", ".join(f"{threads} threads at barrier {number}" for number, threads in came.items() if threads)
    said = f"the order is right, but a turn is left over at the end, which nobody takes: {left}"
    expect(not left, said, diagnosis="turn-left-over", case=case)
    return came


def _turns(module: CudaModule) -> Outputs:
    order = torch.full((12,), -1, dtype=torch.int32)
    module.launch("run", order, 3, echo=False, timeline=1, timeout=1.0)
    return [order.float()]


_PASS, _TAKE = "if (consumer == 0) pass_turn(consumer);", "if (consumer == CONSUMERS - 1) take_turn(consumer);"
_TO = "named_barrier_arrive(4 + (consumer + CONSUMERS - 1) % CONSUMERS, 2 * GROUP);"
OWN_TURNS = Trials(
    "11.10", _watched(CONSUMERS=4), [traced(_turns)], then=_none_left,
    place=lambda text: _in_file(TURNS, "turns", text).text,
    notes={
        "consumer == 0": "the last consumer begins, so consumer 0 passes on, as if its turn had just been",
        "2 * GROUP": "two consumers meet at a barrier: who waits, and who arrives",
        "consumer == CONSUMERS - 1": "consumer 0's last turn was passed on to consumer CONSUMERS - 1",
    },
    equal={
        "consumer <= 0": "consumers are 0 to CONSUMERS - 1", "consumer >=": "consumers are 0 to CONSUMERS - 1",
        "it is negative": "it never is", "`CONSUMERS` is counted twice": "the remainder by CONSUMERS is the same",
    },
    rows=[
        Row("forwards", "the turns go forwards: consumer c passes on to c + 1, and they go backwards", [
            (_TO, _TO.replace("consumer + CONSUMERS - 1", "consumer + 1"))]),
        Row("two-alone", "a turn is passed on to 1 - consumer: that is right where there are two consumers",
            [(_TO, _TO.replace("(consumer + CONSUMERS - 1) % CONSUMERS", "(1 - consumer)"))]),
        Row("all-are-counted", "the barriers count all consumers: two meet there, who waits and who arrives",
            [("sync(4 + consumer, 2 *", "sync(4 + consumer, CONSUMERS *"),
             (_TO, _TO.replace("2 * GROUP", "CONSUMERS * GROUP"))]),
        Row("waits-to-pass", "who passes a turn on waits until the next has come for it: arriving counts, and goes on",
            [("named_barrier_arrive(", "named_barrier_sync(")]),
        Row("one-barrier", "all turns are taken at one barrier: each consumer has one of its own",
            [("sync(4 + consumer", "sync(4"), (_TO, "named_barrier_arrive(4, 2 * GROUP);")]),
        Row("barrier-zero", "barrier 0 is that of __syncthreads: turns need barriers of their own, from 4 on",
            [("sync(4 + consumer", "sync(consumer"), (_TO, _TO.replace("4 + ", ""))]),
        Row("nobody-begins", "nobody passes the first turn on: begin has nothing to do here", [(_PASS, "")]),
        Row("turn-left-over", "the last turn is passed on, and nobody takes it: consumer CONSUMERS - 1 has to", [
            (_TAKE, "")]),
        Row("last-passes-on", "begin: consumer CONSUMERS - 1 passes a turn on, as if it had had one: it is to have the "
            "first, which consumer 0 passes on", [(_PASS, _PASS.replace("== 0", "== CONSUMERS - 1"))]),
        Row("first-takes", "end: consumer 0 takes a turn, and the one left over is that of consumer CONSUMERS - 1",
            [(_TAKE, _TAKE.replace("CONSUMERS - 1", "0"))]),
        Row("one-thread", "one thread of a consumer passes the turn on: the barrier waits for all 128",
            [("    named_barrier_arrive(", "    if (threadIdx.x % GROUP == 0) named_barrier_arrive(")]),
    ],
)  # fmt: skip


@exercise(
    "11.10",
    title="Turns, backwards",
    minutes=20,
    hints=[
        "A barrier for each consumer: its own 128 threads wait there (sync), those of the consumer whose turn is "
        "before it arrive, and go on. So each of these barriers counts 2 * GROUP threads, in sync and in arrive alike.",
        "Turns go CONSUMERS - 1, ..., 1, 0, CONSUMERS - 1, ... So consumer c passes on to (c + CONSUMERS - 1) % "
        "CONSUMERS. Nobody has passed a turn to the first one when it begins: who would have?",
        "begin: consumer 0 passes on, as if its turn had just been. end: the last pass, consumer 0's, was for consumer "
        "CONSUMERS - 1, which takes that turn and does nothing with it.",
    ],
)
def turns_backwards(turns: str) -> str:
    text = _filled_in(turns, "turns")
    expect_defined(text, "begin", "take_turn", "pass_turn", "end")
    whole = _in_file(TURNS, "turns", text)
    with explained(lambda: _watched(CONSUMERS=4)(whole), OWN_TURNS):
        for consumers in (2, 3):
            _expect_turns(_watched(CONSUMERS=consumers)(whole), whole, consumers)
    return "2 and 3 consumers take their turns, and none is left over"


_LEFT_OVER = r"Barrier (\d+) has \d+ of the \d+ threads that it waits for: (warps? [\d, -]+ and )?(\d+) that did not"


def _expect_turns(module: CudaModule, whole: Source, consumers: int) -> None:
    for rounds in (3, 1):
        case = f"CONSUMERS={consumers}, {rounds} round{'s' * (rounds > 1)}"
        order, goes = torch.full((consumers * rounds,), -1, dtype=torch.int32), [*range(consumers)][::-1] * rounds
        try:
            _ran(module, whole, case, "run", order, rounds, timeline=1)
        except CheckFailed as failed:
            events = module.report.launches[0].events if module.report and module.report.launches else []
            went = [e.warp // 4 for e in events if e.did == "barrier-passed" and e.values[0] and e.warp % 4 == 0]
            said = f"turns were taken by {_listed(went) or 'nobody'}, and should be by {_listed(goes)}"
            for number, waits, came in re.findall(_LEFT_OVER, failed.sentence):
                said += f": of a group's 128 threads {came} came to barrier {number}"
                said += "" if waits else ", where nobody waits"
            raise CheckFailed(f"{said}\n{failed.sentence}", diagnosis=failed.diagnosis, case=case) from None
        said = f"the turns went {_listed(order.tolist())}; they should go {_listed(goes)}"
        expect(order.tolist() == goes, said, diagnosis="wrong-order", case=case)
        assert module.report is not None, "every run in the emulator leaves a report"
        events, came = module.report.launches[0].events, _none_left(module, case)
        taken = _listed(sorted({1, 2, 3} & {*came}))
        expect(not taken, f"the order is right, but these barriers are in use: {taken}. Turns begin at 4",
               diagnosis="barrier-taken", case=case)  # fmt: skip
        said = "the order is right, but who passes a turn on waits until the next has come for it"
        passed = sum(e.did == "barrier-arrive" for e in events)  # of four warps each
        expect(passed >= 4 * (rounds * consumers - 1) > 0, said, diagnosis="waits-to-pass", case=case)


# ---- 11.11 ----------------------------------------------------------------------------------------------------------
_PLACES, _PRODUCER = 3, 8  # places; the producer's first warp


def _part_runs(parts: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return torch.zeros(1, dtype=torch.int32), torch.zeros(max(1, parts), 2, dtype=torch.int32), parts, blocks


def _hand_out(parts: int, blocks: int) -> Callable[[CudaModule], Outputs]:
    def run(module: CudaModule) -> Outputs:
        given = _part_runs(parts, blocks)
        given[0][0] = 2  # the number that comes is not n, as where there are several blocks
        module.launch("run", *given, echo=False, timeline=1, timeout=1.0)
        return [given[0].float(), given[1].float()]

    return run


def _place_named(byte: int) -> str:
    """The mbarrier at this byte of theirs."""
    number = byte // 8
    return f"`{'full' if number < _PLACES else 'empty'}` of place {number % _PLACES}"


_STORED = "    h.place[at] = part;\n    mbarrier_arrive(h.full + 8 * at);"
_READ = "    const int part = h.place[at];\n    mbarrier_arrive(h.empty + 8 * at);\n    return part;"
HAND = Trials(
    "11.11", _watched(), [traced(_hand_out(15, 1))], most=200, equal={"`at` multiplies `h.full`": "h.full is 8 there"},
    lies=lambda byte: _place_named(byte - 8),
    unless={"arrives-before-it-reads": r"place\[0\]|\*h\.place"},
    place=lambda text: _in_file(PARTS, "hand", text).text,
    notes={
        "n / PLACES": "each use of a place is a phase, and the parity is the phase's last bit",
        "n / PLACES + 1": "a place that nobody has used is free: the first wait's parity is 1",
    },
    rows=[
        Row("arrives-before-it-stores", "hand_on arrives before it stores the number: the arrival shows what came "
            "before it", [(_STORED, "\n".join(_STORED.splitlines()[::-1]))]),
        Row("arrives-before-it-reads", "a place is filled that somebody still reads: take arrives at `empty` before it "
            "has read the number, or hand_on stores one before its wait",
            [(_READ, "    mbarrier_arrive(h.empty + 8 * at);\n    return h.place[at];")]),
        Row("one-thread", "one thread of a consumer says that the place is free: `empty` waits for all 128",
            [("    mbarrier_arrive(h.empty", "    if (threadIdx.x % GROUP == 0) mbarrier_arrive(h.empty")]),
        Row("parity-of-n", "the parity is that of n: each use of a place is a phase, and the parity is that of "
            "n / PLACES", [("(n / PLACES + 1) % 2", "(n + 1) % 2"), ("n / PLACES % 2", "n % 2")]),
        Row("not-from-the-counter", "the number is n, and not the counter's: blocks would work on the same parts",
            [("atomicAdd(h.counter, 1)", "n")]),
        Row("returns-n", "hand_on returns n: the caller asks of the number that was handed on whether it is the last",
            [(_STORED + "\n    return part;", _STORED + "\n    return n;")]),
        Row("stores-n", "n is stored in the place, and not the number that came from the counter",
            [("h.place[at] = part", "h.place[at] = n")]),
        Row("barriers-exchanged", "take waits at `empty`, and arrives at `full`: `full` says that there is a number",
            [("wait(h.full", "wait(h.empty"), ("arrive(h.empty", "arrive(h.full")]),
        Row("one-place", "every number goes through place 0: there are PLACES of them", [
            ("on(const Hand& h, int n) {\n    const int at = n % PLACES;", "on(const Hand& h, int n) {\n    "
             "const int at = 0;")]),
    ],
)  # fmt: skip


@exercise(
    "11.11",
    title="Who hands on the parts",
    minutes=30,
    hints=[
        "A place is a stage, and a part's number is what lies in it: the producer waits for `empty`, fills it, arrives "
        "at `full`; a consumer's thread waits for `full`, reads it, arrives at `empty`. Place n % PLACES, use "
        "n / PLACES.",
        "hand_on: the parity of the producer's first wait is 1: nobody has arrived. The number comes from "
        "atomicAdd(h.counter, 1); it is stored in the place before the arrival, which is what makes it visible.",
        "A thread reads the place into a variable, and only then arrives. Numbers of `parts` and more are handed on "
        "like the others: they tell the consumers to stop.",
    ],
)
def hands_on(hand: str) -> str:
    text = _filled_in(hand, "hand")
    expect_defined(text, "hand_on", "take")
    whole = _in_file(PARTS, "hand", text)
    module = _watched()(whole)
    with explained(lambda: module, HAND):
        for parts, blocks in ((17, 1), (20, 3), (1, 2), (0, 1)):
            _expect_parts(module, whole, parts, blocks)
    return "every part once, by every consumer, with 1 to 3 blocks"


def _expect_parts(module: CudaModule, whole: Source, parts: int, blocks: int) -> None:
    case = f"{parts} parts, {blocks} block{'s' * (blocks > 1)}"
    counter, done, *sizes = _part_runs(parts, blocks)
    try:
        _ran(module, whole, case, "run", counter, done, *sizes, timeline=1)
    except CheckFailed as failed:
        said = re.sub(r"barriers at byte (\d+)", lambda m: _place_named(int(m[1])), failed.sentence)
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=case) from None
    wrong = (done[:parts] != 1).nonzero()
    part, consumer = wrong[0].tolist() if len(wrong) else (0, 0)
    said = f"consumer {consumer} works {int(done[part, consumer])} times on part {part}, and should once "
    said += f"({len(wrong)} of {2 * parts} counts are wrong)"
    expect(not len(wrong), said, diagnosis="wrong-parts", case=case)
    taken = parts + blocks
    said = f"the counter ends at {int(counter)}, and should at {taken}: {parts} parts, and a number more per producer"
    expect(int(counter) == taken, f"the parts are right, but {said}", diagnosis="wrong-count", case=case)
    assert module.report is not None, "every run in the emulator leaves a report"
    used = {e.values[0] for e in module.report.launches[0].events if e.did == "arrive" and e.warp >= _PRODUCER}
    said = f"the parts are right, but {len(used)} of the {_PLACES} places are used: so many parts may be handed on "
    said += "ahead"
    expect(blocks > 1 or parts < _PLACES or len(used) == _PLACES, said, diagnosis="too-few-places", case=case)


# ---- 11.12 ----------------------------------------------------------------------------------------------------------
_BLOCK_M = 192  # of step 5 with HEAD_DIM 64
_LAUNCHED = ((1, 1, 1, 400, 130, False), (1, 2, 1, 200, 200, True), (2, 1, 1, 260, 24, True))
# Has a launch end as one does that asks for too much.
_REFUSED = "".join(f"#define cuda{x}LastError() cudaErrorInvalidValue\n" for x in ("Get", "PeekAt"))
_BLOCK = """extern __shared__ __align__(16) char pool[];                   // shared memory, of every kernel of the file

// What a block does for BLOCK_M rows of a head, from row m_block * BLOCK_M on; `shared` is its memory.
template <bool CAUSAL>
__device__ __forceinline__ void flash_forward_block(const Problem& p, const CUtensorMap& q_map,
                                                    const CUtensorMap& k_map, const CUtensorMap& v_map, char* shared,
                                                    int m_block, int head, int batch) {
    const uint32_t q_smem = smem_u32(shared);                  // [BLOCK_M, HEAD_DIM]
    const uint32_t k_smem = q_smem + Q_BYTES;                  // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t v_smem = k_smem + STAGES * KV_BYTES;        // [STAGES, BLOCK_N, HEAD_DIM]
    const uint32_t full_q = v_smem + STAGES * KV_BYTES, full_k = full_q + 8, full_v = full_k + 8 * STAGES; // mbarriers
    const uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;      // of every stage
"""


def launchless() -> str:
    """Step 5 of the ladder as a block's work, without a kernel that calls it and without a launch: 11.12's text."""
    text = replaced(step("p11_5_consumers"), "shared memory", _BLOCK).text
    text = text.replace("blockIdx.x % m_blocks", "m_block")
    text = text.replace("blockIdx.x / m_blocks", "batch * p.heads + head")
    text = re.sub(r"(?m)^ *const int m_blocks = .*\n|batch = head_index.*, (?=kv_head)", "", text)
    text = re.sub(r"constexpr int SHARED = .*\n", "", text)
    return replaced(text, "launch", "// The kernel and its launch:").text


_MAPS = (
    "p->batch, p->heads, p->seq_q, BLOCK_M)",
    "map_of(p->k, p->k_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N)",
    "map_of(p->v, p->v_stride, p->batch, p->kv_heads, p->seq_k, BLOCK_N)",
)
LAUNCH = Trials(
    "11.12", _watched(), [traced(_halves(2, 4, 1, 400, 40, False)), _halves(1, 2, 1, 200, 200, True)], tol=1e-3,
    place=lambda text: launchless() + text,
    notes={"ceil_div(p->seq_q, BLOCK_M)": "a block has BLOCK_M rows of one head of one batch",
           "1024": "a swizzle's pattern begins at a multiple of 1024, up to 1008 bytes behind the pool's beginning"},
    equal={"`cudaFuncSetAttribute(attend": "its value is not used",
           "it is `1024` where `smem_u32(pool)`": "1024 bytes more are asked for"} | dict.fromkeys(
        ("`cudaGetLastError()` has", "`cudaGetLastError()` is counted"), "any number but 0 is an error"),
    rows=[
        Row("no-attribute", "above 48 KB of dynamic shared memory a kernel has to be allowed as many bytes as its "
            "launch takes, by cudaFuncSetAttribute",
            [("    cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);\n", "")]),
        Row("wrong-attribute", "a kernel is launched whose attribute is not set, or not yet, where it is causal",
            [("cudaFuncSetAttribute(attend", "cudaFuncSetAttribute(attention<false>")]),
        Row("box-of-q", "a box of Q has BLOCK_M rows, as many as its tile",
            [(_MAPS[0], _MAPS[0].replace("BLOCK_M", "BLOCK_N"))]),
        Row("boxes-of-k", "boxes of K and V have BLOCK_N rows, as many as their tiles",
            [(x, x.replace("BLOCK_N", "BLOCK_M")) for x in _MAPS[1:]]),
        *(Row("rows-of-k", f"{who} seq_k rows, Q alone has seq_q", [(x, x.replace("seq_k", "seq_q")) for x in maps])
          for who, maps in (("K and V have", _MAPS[1:]), ("K has", _MAPS[1:2]), ("V has", _MAPS[2:]))),
        Row("no-producer", "the launch has no warps for the producer: a block has THREADS threads",
            [("<<<blocks, THREADS,", "<<<blocks, 128 * CONSUMERS,")]),
        Row("host-pointer", "the kernel gets a pointer to the host's Problem, which a GPU cannot read: by value it "
            "gets a copy", [("const Problem p,", "const Problem* p,"), ("(p, q_map", "(*p, q_map"),
                            ("*p, map_of", "p, map_of")]),
        Row("not-aligned", "the pool's beginning is not rounded up: a swizzle's pattern begins at a multiple of 1024",
            [(" + -smem_u32(pool) % 1024", "")]),
        Row("a-fixed-distance", "1024 bytes behind the pool's beginning is no nearer to a multiple of 1024",
            [("-smem_u32(pool) % 1024", "1024")]),
        Row("rounded-down", "the pool's beginning is rounded down: what lies before it is not the block's",
            [("pool + -smem_u32(pool) % 1024", "pool - smem_u32(pool) % 1024")]),
        Row("k-and-v", "the maps of K and V are exchanged", [("p->k, p->k_stride", "p->v, p->k_stride"),
                                                             ("p->v, p->v_stride", "p->k, p->v_stride")]),
        Row("always-causal", "the causal kernel is launched whether it is asked for or not",
            [("p->causal ? attention<true> : attention<false>", "attention<true>")]),
        Row("never-causal", "the kernel without a mask is launched where a causal one is asked for",
            [("p->causal ? attention<true> : attention<false>", "attention<false>")]),
        *(Row("too-small", "the shared memory is too small: Q, STAGES tiles of K and as many of V, and BARRIERS "
              "barriers of 8 bytes have to fit behind up to 1008 bytes that rounding up leaves out", [edit])
          for edit in (("= 1024 + ", "= "), ("2 * STAGES * KV_BYTES", "2 * KV_BYTES"))),
    ],
)  # fmt: skip


@exercise(
    "11.12",
    title="The launch",
    minutes=25,
    hints=[
        "How many bytes does a block need? Q, STAGES tiles of K and as many of V, BARRIERS barriers of 8 bytes. A "
        "swizzled tile begins at a multiple of 1024, and the pool at one of 16: how far behind the pool's beginning is "
        "the next multiple of 1024, at most?",
        "Three maps, by map_of. A box has as many rows as the tile that it fills; K and V have kv_heads heads, seq_k "
        "rows. The kernel, behind __launch_bounds__(THREADS, 1), takes them as const __grid_constant__ CUtensorMap, "
        "and Problem by value.",
        "A block for each BLOCK_M rows (x) of each head (y) of each batch (z), THREADS threads. It asks for 1024 bytes "
        "more than it needs, and begins at pool + -smem_u32(pool) % 1024. More than 48 KB of it need "
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), for whichever of the two "
        "kernels is launched. The stream is a parameter.",
    ],
)
def launch_of_a_kernel(launch: str) -> str:
    text, before = whole_kernel(_filled_in(launch, "launch"), "launch").text, launchless()
    lines = len(before.splitlines())
    whole = Source(before + text, "p11_5_consumers", lines + 1, lines + len(text.splitlines()))
    said = "the shared memory is `pool`, which begins at a multiple of 16: declare no array beside it, and round its "
    said += "address up to a multiple of 1024 by hand"
    expect("__shared__" not in blank_comments(text), said, diagnosis="own-array")
    with explained(lambda: _watched()(whole), LAUNCH):
        try:
            verdict = examine(whole, fast=False, probes=_LAUNCHED, max_seq=100)
        except CheckFailed as failed:
            story = _grid_story(whole) if failed.diagnosis not in ("does-not-compile", "wrong-entry") else None
            if story is None:
                raise
            raise CheckFailed(f"{story}\n{failed.sentence}", diagnosis="wrong-grid", case=failed.case) from None
    story = _grid_story(whole)
    expect(story is None, f"the result is right, but {story}", diagnosis="wrong-grid", case="seq_q=384, heads=4")
    said = f"m_block is 0, 1, 2 ..., and block m_block has the rows from m_block * {_BLOCK_M} on"
    _expect_all_blocks(whole, _LAUNCHED[:2], said)
    _expect_few_heads(whole)
    _expect_bounds(whole)
    _expect_any_pool(whole)
    try:
        probe(built(replace(whole, text=before + _REFUSED + text), check=False), whole, _LAUNCHED[0])
    except CheckFailed:
        return f"{verdict.cases} cases right, nothing found by the emulator"
    said = "the result is right, but `forward` does not return cudaGetLastError(): nobody hears of a launch refused"
    raise CheckFailed(said, diagnosis="error-not-returned")


def _expect_bounds(whole: Source) -> None:
    """CheckFailed where the compiler does not know how many threads a block has, or a thread has too few registers."""
    module = built(whole, check=True)
    probe(module, whole, _ALONE)
    launches = module.report.launches if module.report is not None else []
    said = f"the result is right, but the kernel is launched {len(launches)} times: each of them does all of the work"
    expect(len({x.kernel for x in launches}) == len(launches), said, diagnosis="launched-twice")  # but split keys merge
    code = blank_comments(whole.text)
    said = "a kernel's parameter cannot be a reference: nvcc refuses it, and a GPU could not read the host's Problem"
    expect(not re.search(r"__global__[^{;]*Problem *&", code), said, diagnosis="host-reference")
    if "setmaxnreg" not in code:
        return
    threads = launches[0].block[0]
    said = f"a block has {threads} threads: that is no whole number of warpgroups, and setmaxnreg is of whole ones"
    expect(threads % 128 == 0, said, diagnosis="no-whole-warpgroup")
    bounds = re.search(r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)", code)
    said = "the result is right, but no __launch_bounds__(THREADS, 1) says how many threads a block has. A thread may "
    said += "get more registers than a launch of so many has for it, and ptxas leaves setmaxnreg out (C7508)"
    if bounds is None:
        raise CheckFailed(said, diagnosis="no-launch-bounds")
    most, _, blocks = bounds[1].partition(",")
    said = f"the result is right, but __launch_bounds__({bounds[1]}) does not say that an SM has one block: so ptxas "
    said += "does not know how many registers a thread begins with, and leaves setmaxnreg out (C7508). Add `, 1`"
    expect(blocks.strip(), said, diagnosis="no-launch-bounds")
    said = f"the result is right, but __launch_bounds__({bounds[1]}) promises room for more than one block of "
    said += f"{threads} threads: each thread then begins with fewer registers, and setmaxnreg asks for more than "
    said += "there are"
    asked = f"({most}) == {threads} && ({blocks}) == 1"
    known, equal = (_compiles(whole, f"static_assert({x});") for x in (f"({asked}) < 2", asked))
    expect(equal or not known, said, diagnosis="two-blocks-per-sm")


def _compiles(whole: Source, more: str) -> bool:
    with contextlib.suppress(CheckFailed):
        return built(replace(whole, text=f"{whole.text}\n{more}\n"), check=True) is not None
    return False


def _expect_all_blocks(whole: Source, shapes: Sequence[Sequence[int]], rule: str) -> None:
    """CheckFailed where a block behind the first of a head has other rows than its own; rule: which it has."""
    for batch, heads, kv_heads, seq_q, seq_k, causal in shapes:
        generator = torch.Generator().manual_seed(seq_q)
        q, k, v = (torch.randn(batch, h, n, 64, generator=generator).half()
                   for h, n in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)))  # fmt: skip
        with MarkedEmpty():
            o, _ = built(whole, check=True).forward(q, k, v, causal=bool(causal), echo=False)
        off = (o.double() - reference.attention(q, k, v, causal=bool(causal))[0]).abs().amax((0, 1, 3))
        wrong = (~(off < 4e-3)).nonzero().flatten().tolist()
        said = f"rows {wrong[0]} to {wrong[-1]} of {seq_q} are wrong: " if wrong else ""
        expect(not wrong, said + rule, diagnosis="wrong-rows", case=f"seq_q={seq_q}, seq_k={seq_k}")


def _expect_any_pool(whole: Source) -> None:
    """CheckFailed where the memory begins at a multiple of 1024 only if the pool begins at 16, or never."""
    before = "__global__ void flashlab_before() { __shared__ volatile char first[2048]; first[threadIdx.x] = 0; }\n"
    text = whole.text.replace("__align__(16) char pool", "__align__(32) char pool") + before
    first = "    const uint32_t q_smem = smem_u32(shared);"
    text = text.replace(first, f'    if (threadIdx.x == 0) printf("%u ", smem_u32(shared) % 1024);{first}')
    module, failed = built(replace(whole, text=text), check=True), ""
    try:
        probe(module, whole, _LAUNCHED[0])
    except CheckFailed as error:
        failed = f" ({error.sentence})"
    beyond = max(map(int, module.report.printed.split()), default=0) if module.report is not None else 0
    said = f"begins {beyond} bytes beyond a multiple of 1024" if beyond else f"is not the block's own{failed}"
    said = f"the memory {said}, where the pool begins at 2080: smem_u32(pool) says how far the next multiple of 1024 is"
    expect(not beyond and not failed, said, diagnosis="bulk-misaligned")


def _expect_few_heads(whole: Source) -> None:
    """CheckFailed where K and V with one head, whose head stride means nothing, are refused."""
    q, k, v = torch.zeros(1, 2, 40, 64, dtype=torch.float16), *torch.zeros(2, 1, 1, 40, 64, dtype=torch.float16)
    k, v = (x.as_strided(x.shape, (x.stride(0), 4, 64, 1)) for x in (k, v))
    module, case = built(whole, check=True), "heads=2, kv_heads=1, seq_q=40, seq_k=40"
    try:
        ran(module, whole, case, lambda: module.forward(q, k, v, causal=False, echo=False))
    except CheckFailed as failed:
        said = "the result is right; but where K and V have one head, its stride means nothing (here it is 8 bytes), "
        said += f"and the map is refused. map_of leaves it out where it is told of kv_heads heads ({failed.sentence})"
        raise CheckFailed(said, diagnosis="heads-of-a-map", case=case) from None


def _expect_zeros(whole: Source) -> None:
    """CheckFailed where a block none of whose rows sees a key leaves O or lse as they were."""
    q, k = torch.ones(1, 1, 200, 64, dtype=torch.float16), torch.ones(1, 1, 24, 64, dtype=torch.float16)
    with MarkedEmpty():
        o, lse = built(whole, check=True).forward(q, k, k, causal=True, echo=False)
    wrong = ((o != 0).any(-1) | (lse != -torch.inf))[0, 0, :176].sum()
    said = f"{wrong} of the first 176 rows have another O or lse: they see no key, so they are 0 and -infinity"
    expect(not wrong, said, diagnosis="rows-without-keys", case="seq_q=200, seq_k=24, causal")


def _grid_story(whole: Source) -> str | None:
    """What is wrong with the grid of a launch for two batches of four heads, 384 rows each; None where nothing is."""
    module = built(whole, check=True)
    with contextlib.suppress(CheckFailed):
        probe(module, whole, (2, 4, 2, 384, 16, False))
    launches = module.report.launches if module.report is not None else []
    wanted = 384 // _BLOCK_M, 4, 2
    if not launches or launches[0].grid == wanted:
        return None
    return (
        f"the grid is {launches[0].grid} for 2 batches of 4 heads of 384 rows, and should be {wanted}: a block has "
        f"{_BLOCK_M} rows of one head of one batch"
    )


# ---- 11.13 ----------------------------------------------------------------------------------------------------------
_SLOTS, _KEYS = 3, 64  # slots of the ring; keys of a tile
_SEVERAL = (1, 1, 1, 128, 330, False)  # several tiles; the last one is not full


def _slot_at(byte: int) -> str | None:
    """What lies at this byte of the dynamic shared memory of the ring's kernel."""
    slot, behind = divmod(byte - 64 * _CONSUMERS * _HEAD_DIM * 2, _KEYS * _HEAD_DIM * 2)
    if 0 <= slot < _SLOTS:
        return f"slot {slot} of the ring"
    number = behind // 8 - 1  # behind full_q
    if slot != _SLOTS or not -1 <= number < 2 * _SLOTS:
        return None
    return f"`{('full', 'empty')[number // _SLOTS]}` of slot {number % _SLOTS}" if number >= 0 else "`full_q`"


_GIVE_K, _GIVE = "        if (first_thread) mbarrier_arrive(empty + 8 * slot);\n\n", "mbarrier_arrive(empty + 8 * slot)"
_Q_STEP, _K_STEP = "columns_on<BLOCK_M>(k),", "k_tile + columns_on<BLOCK_N>(k)"
_C = "float& c = s[4 * n + 2 * r + e];"
_OF_S = "        wgmma_wait<0>();                                       // and to us"
LOOP = Trials(
    "11.13", _watched(_HEAD_DIM), region=True, place=lambda text: _in_file(RING, "loop", text).text, tol=1e-3, most=230,
    lies=_slot_at,
    runs=[traced(_halves(*_SEVERAL, head_dim=_HEAD_DIM), (0, 4)), _halves(1, 2, 1, 40, 24, True, head_dim=_HEAD_DIM)],
    notes={
        "2 * j": "K of tile j is item 2 j of the ring", "2 * j + 1": "V of tile j is item 2 j + 1",
        "SLOTS": "item i lies in slot i % SLOTS, and is use i / SLOTS of it", "base": "-inf - (-inf) would be NaN",
        "last_key[r]": "a row sees the keys up to its last one",
    },
    rows=[
        Row("released-too-early", "K is given back before its product has been waited for",
            [(_GIVE_K, "\n"), (_OF_S, f"        if (first_thread) {_GIVE};\n{_OF_S}")]),
        Row("k-kept", "K is never given back: each consumer arrives once for each item of the ring", [(_GIVE_K, "\n")]),
        Row("by-every-warp", "K is given back by each of a consumer's four warps: one thread of it arrives",
            [(_GIVE_K, _GIVE_K.replace("first_thread", "lane == 0"))]),
        Row("k-released-late", "K is given back after O += P V: nobody reads it after the scores",
            [(_GIVE_K, "\n"), (f"if (first_thread) {_GIVE};\n    }}", f"if (first_thread) {_GIVE}, mbarrier_arrive("
              "empty + 8 * (2 * j % SLOTS));\n    }")]),
        Row("no-maximum", "m_i stays -infinity: the new maximum is not kept, or no score enters it",
            [("m_i[r] = x, l_i[r] *= correction;", "l_i[r] *= correction;")]),
        Row("v-transposed", "V is multiplied as K is, by columns: its rows are k, so wgmma_rs wants TRANS_B, true",
            [("T, true>", "T>")]),
        # Of each: with j, j / SLOTS, and the other's item the run ends at the same place.
        *(Row("parity-of-j", f"{of}'s parity is not that of its item: {of} of tile j is item {item}, use ({item}) / "
              "SLOTS of its slot", [(right, "j / SLOTS % 2")])
          for of, item, right in (("V", "2 j + 1", "(2 * j + 1) / SLOTS % 2"), ("K", "2 j", "2 * j / SLOTS % 2"))),
        Row("v-by-its-columns", "V's step is columns_on(k): its rows are the keys, and 16 of them on is rows_on(k)",
            [("rows_on(k)", "columns_on<BLOCK_N>(k)")]),
        Row("scaled-maximum", "m_i is kept times scale_log2: it is the maximum of the raw scores",
            [("m_i[r] = x,", "m_i[r] = x * scale_log2,")]),
        Row("rows-of-q", "K's step is columns_on<BLOCK_M>: its tile has BLOCK_N rows",
            [("k_tile + columns_on<BLOCK_N>", "k_tile + columns_on<BLOCK_M>")]),
        Row("v-by-columns", "V's descriptor is that of K: its rows are the keys, so it is descriptor_of_rows",
            [("descriptor_of_rows<BLOCK_N>(ring", "descriptor(ring")]),
        Row("rows-of-k", "Q's step is columns_on<BLOCK_N>: its tile has BLOCK_M rows",
            [(_Q_STEP, "columns_on<BLOCK_N>(k),")]),
        Row("steps-in-bytes", "32 * k is a step in bytes: a descriptor counts 16 of them, and columns_on knows where "
            "the next slab begins", [(_Q_STEP, "32 * k,"), (_K_STEP, "k_tile + 32 * k")]),
        Row("one-slab", "2 * k leaves the slab behind its 64 columns: columns_on knows where the next one begins",
            [(_Q_STEP, "2 * k,"), (_K_STEP, "k_tile + 2 * k")]),
        Row("rescaled-late", "l is rescaled when P of this tile is in it: what was there before is, and at the first "
            "tile the correction is 0",
            [(", l_i[r] *= correction;", ";"),
             ("l_i[r] += c;\n                }",
              "l_i[r] += c;\n                }\n            l_i[r] *= correction;")]),
        Row("tiles-from-the-end", "the mask counts tiles from the end: the ring brings them from tile 0 on",
            [("j * BLOCK_N + n", "(tiles - 1 - j) * BLOCK_N + n")]),
        Row("rows-for-columns", "rows and columns of a fragment are exchanged: s[4 * n + 2 * r + e] is row g + 8 r, "
            "column e", [(f"{_C}{then}", f"{_C.replace('2 * r + e', '2 * e + r')}{then}")
                         for then in ("\n                    if", "\n                    c")]),
        Row("p-by-columns", "a register of P has two rows: it has neighbours of one row, s[2 * i] and s[2 * i + 1]",
            [("s[2 * i], s[2 * i + 1]", "s[4 * (i / 2) + i % 2], s[4 * (i / 2) + i % 2 + 2]")]),
        Row("fragments-mixed", "P's registers are in the wrong fragments: fragment k holds tiles 2 k and 2 k + 1 of S",
            [("a[i / 4][i % 4]", "a[i % (BLOCK_N / MMA_K)][i / (BLOCK_N / MMA_K)]")]),
    ],
)  # fmt: skip


def _expect_given_back_early(events: Sequence[Event]) -> None:
    """Raises CheckFailed where scores have been waited for, and K has not been given back when more is done with them.

    Asked of the warp that gives back, for only its own events are in order. Exponentials are marked by a wait for Q.
    """
    given_back = [e for e in events if e.did == "arrive" and not e.values[1]]
    empty, givers = sorted({e.values[0] for e in given_back}), sorted({e.warp for e in given_back})
    for warp in givers:
        if sum(other // 4 == warp // 4 for other in givers) > 1:
            continue
        mine, given = [e for e in events if e.warp == warp], Counter[int]()
        full_q = next(e.values[0] for e in mine if e.did == "mbarrier-passed")
        scores, over = list[int](), 0  # numbers of wgmma; the last one that was waited for
        for e in mine:
            given[e.values[0]] += e.did == "arrive"
            over = max(over, e.values[0]) if e.did == "wait" else over
            if e.did == "wgmma" and e.values[1] == _KEYS:
                scores.append(e.values[0])
            j = sum(x <= over for x in scores) // (_HEAD_DIM // 16) - 1  # the last tile whose scores are there
            softmax = e.did == "mbarrier-passed" and e.values[0] == full_q
            product = e.did == "wgmma" and e.values[1] == _HEAD_DIM
            expect(
                not (softmax or product) or j < 0 or given[empty[2 * j % _SLOTS]] > 2 * j // _SLOTS,
                f"the result is right, but when the {'softmax' if softmax else 'product with V'} of tile {j} begins, "
                "K of the tile has not been given back: nobody reads it after the scores",
                diagnosis="released-late",
                case="seq_q=128, seq_k=330",
            )


def _marked(loop: str) -> str:
    """The text with a wait for Q, which is there, before each exponential."""
    return re.sub(
        r"\b(exp2_approx|exp2f|__expf|expf)(?=\s*\()", r"(mbarrier_wait(full_q, 0), \1)", blank_comments(loop)
    )


@exercise(
    "11.13",
    title="The consumer, from a blank page",
    minutes=90,
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
def consumer_of_a_ring(loop: str) -> str:
    whole = _in_file(RING, "loop", _filled_in(loop, "loop"))
    with explained(lambda: _watched(_HEAD_DIM)(whole), LOOP), _by_name(_slot_at):
        try:
            probes = (_SEVERAL, PROBES[0], _NO_KEYS)
            verdict = examine(whole, head_dim=_HEAD_DIM, fast=False, probes=probes, max_seq=150)
        except CheckFailed:
            _expect_given_back(_events(whole, _SEVERAL, _HEAD_DIM), "seq_q=128, seq_k=330")
            raise
        _expect_given_back_early(_events(_in_file(RING, "loop", _marked(loop)), _SEVERAL, _HEAD_DIM))
    expect_variant(whole, head_dim=64)
    return f"{verdict.cases} cases right, nothing found by the emulator"


# ---- 11.14 ----------------------------------------------------------------------------------------------------------
_ALONE = (1, 1, 1, 384, 1024, False)
_ROWS_PER_TILE = 128  # two consumers

HOPPER_KERNEL = Trials(
    "11.14", _watched(), [_halves(1, 2, 1, 130, 200, True), _halves(1, 1, 1, 40, 24, True)], tol=1e-3, most=120,
    words={x: x for x in ("diagonal", "tiles", "stage", "base", "correction", "last_key", "row", "kv_head")},
    equal=PAST_THE_LAST | {"`t == 0`": "each lane of a quad has the row's lse"},
)  # fmt: skip


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
        "The store: the sum of a row is l_i[r] of its four lanes (shuffles 1 and 2). Where it is 0, O is 0 and lse "
        "-INFINITY; else O is acc / sum, and lse (m_i[r] * scale_log2 + log2f(sum)) * LN2, at head_index * seq_q + "
        "row. Only rows before seq_q are stored.",
    ],
)
def hopper_kernel(my_kernel: str) -> str:
    whole = whole_kernel(_filled_in(my_kernel, "my_kernel"), "my_kernel")
    with explained(lambda: _watched()(whole), HOPPER_KERNEL, vague=VAGUE):
        verdict = examine(whole, fast=False, probes=(*_SHORT, _NO_KEYS), max_seq=150)
    said = "each block of a head has rows of its own, and so have its Q, its mask and the last key that it sees"
    _expect_all_blocks(whole, [(1, 1, 1, 400, 400, True)], said)
    _expect_few_heads(whole)
    _expect_zeros(whole)
    _expect_bounds(whole)
    expect_any_base(whole)
    report = probe(built(whole, check=True), whole, _ALONE, timeline=2)
    expect_launched(report)
    _expect_as_step_5(report.counters, report.launches[0].events)
    return f"{verdict.cases} cases right, {report.counters['wgmma']} wgmma, nothing found by the emulator"


def _asked_late(events: Sequence[Event], producers: Collection[int], places: Counter[int]) -> int:
    """How often K or V was asked for after a wait for a consumer that had issued all products with what came before."""
    rows = {place for place, times in places.items() if 2 * times > max(places.values())}  # of keys: not Q
    products, all_tiles = Counter(e.warp for e in events if e.did == "wgmma"), sum(places[x] for x in rows)
    issued, reached, through, asked, late = Counter[int](), defaultdict[int, float](float), 0.0, 0, 0
    for e in events:
        if e.did == "wgmma":
            issued[e.warp] += 1
        elif e.did == "arrive" and e.warp in products:
            reached[e.values[0]] = max(reached[e.values[0]], issued[e.warp] * all_tiles / products[e.warp])
        elif e.did == "mbarrier-passed" and e.warp in producers:
            through = max(through, reached[e.values[0]])
        elif e.did == "load" and e.values[0] in rows:
            late += 0 < asked <= through
            asked += 1
    return late


def _expect_as_step_5(c: Any, events: Sequence[Event]) -> None:
    """That both products are wgmma, TMA brings the tiles, for two consumers, ahead, and registers move."""
    (n, m, d), kb = (_ALONE[4], _ALONE[3], 64), c["tma_load_bytes"] // 1024
    least, most = (m + 2 * n) * d * 2 // 1024, (m + m // _ROWS_PER_TILE * 2 * n) * d * 2 // 1024
    issue, ask = ({(e.block, e.warp) for e in events if e.did == did} for did in ("wgmma", "load"))
    moved = {e.warp // 4 for e in events if e.did == "registers" and e.block == 0}
    places = Counter(e.values[0] for e in events if e.did == "load" and e.block == events[0].block)
    again = sum(times > 1 for times in places.values())
    late = _asked_late([e for e in events if e.block == events[0].block], {w for _, w in ask}, places)
    for holds, sentence, slug in (
        (c["wgmma"] > 0, "no wgmma was issued", "no-wgmma"),
        (c["mma"] == 0, f"{c['mma']} of the products are mma.sync: both should be wgmma", "no-wgmma"),
        (kb >= least, f"TMA brings {kb} KB, and Q, K and V have {least}: all three should come by it", "no-tma"),
        (kb <= most, f"TMA brings {kb} KB: where every tile of K and V serves {_ROWS_PER_TILE} rows, two consumers, "
         f"{most} are enough", "too-few-rows-per-tile"),
        (not issue & ask, "a warp both asks for tiles and multiplies: the producer should be a warpgroup of its own, "
         "which can run ahead", "no-producer"),
        (moved >= {w // 4 for _, w in issue | ask}, "registers do not move: the producer's warpgroup gives some back "
         "(setmaxnreg_dec), and each consumer takes more (setmaxnreg_inc)", "registers-kept"),
        (again == 0 or again > 2, f"the producer does not run ahead: K and V of all tiles are brought to {again} "
         "places. With two stages the next tiles come while the consumers read these", "one-stage"),
        (late < 3, f"the producer does not run ahead: {late} times it asks for a tile only when a consumer is through "
         "with all that was asked for before", "never-ahead"),
    ):  # fmt: skip
        said = f"the result is right, but {sentence}"
        expect(holds, said, diagnosis=slug, case="seq_q=384, seq_k=1024, head_dim=64, float16")
