"""Checks of 9.7 to 9.12: a first kernel of one's own, addresses, prefetch, order, splits, and D = 128."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashlab.check import expect
from flashlab.check.cuda_answer import (
    VAGUE,
    Source,
    built,
    examine,
    expect_any_base,
    expect_variant,
    expect_wide,
    probe,
    ran,
    replaced,
    text_of,
    whole_kernel,
)
from flashlab.check.cuda_index import Trials, all_found, explained, forwards
from flashlab.check.lookup import Row
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import RULES, rule
from flashlab.kernels.series import step
from flashlab.simt import Report


def said_by(whole: Source, before: str, after: str, seq_q: int, seq_k: int, head_dim: int = 64) -> str:
    """What the learner's lines print on one head, between two texts that define macros around them."""
    lines, first, last = whole.text.splitlines(), whole.first or 1, whole.last or 0
    own = [before, *lines[first - 1 : last], after]
    text = "\n".join([*lines[: first - 1], *own, *lines[last:], ""])
    module = built(Source(text, whole.name), check=False, head_dim=head_dim)
    q, k = (torch.zeros(1, 1, n, head_dim).half() for n in (seq_q, seq_k))
    ran(module, whole, None, partial(module.forward, q, k, k, causal=False, echo=False))
    assert module.report is not None, "every run in the emulator leaves a report"
    return module.report.printed


_FEEDS = "With 16 rows per warp one of K or V feeds two MMAs, with 32 rows four"


def expect_budget(report: Report, budget: float, case: str, feeds: str = _FEEDS) -> float:
    """The wavefronts that a right kernel takes per MMA. CheckFailed where they are more, or it issues no MMA."""
    c = report.counters
    sentence = "the result is right, but no MMA was issued: use the tensor cores"
    expect(c["mma"] > 0, sentence, diagnosis="no-tensor-cores", case=case)
    spent, conflicts = c.wavefronts / c["mma"], c.bank_conflicts / c["mma"]
    loaded = min(4 * c["ldmatrix"] / c["mma"], spent - conflicts)
    other = spent - conflicts - loaded
    if loaded > budget:
        diagnosis, why = "too-few-rows-per-warp", f". {feeds}"
    elif conflicts > other:
        diagnosis, why = "bank-conflicts", ""
    else:
        diagnosis, why = "other-accesses", ". What cp.async brings takes none"
    parts = f"{conflicts:.2f} are bank conflicts, {loaded:.2f} of ldmatrix, {other:.2f} of other loads and stores"
    sentence = (
        f"the result is right, but it takes {spent:.2f} wavefronts per MMA, where {budget} are the budget: {parts}"
    )
    expect(spent <= budget, sentence + why, diagnosis=diagnosis, case=case)
    return spent


# ---- 9.7 -------------------------------------------------------------------------------------------------------------
PAST_THE_LAST = dict.fromkeys(
    ("above `p.seq_k - 1`", "the term `-1` is missing"), "no row that exists sees a key past the last one"
) | dict.fromkeys(("above `end`", "above `tiles`"), "the last block alone has a tile more, of which it sees nothing")
PAST_THE_LAST["below `0`"] = "a negative number of tiles is none"
_OWN_WORDS = ("diagonal", "end", "base", "correction", "last_key", "row", "kv_head", "warp_row", "m_start", "exists")
OWN_KERNEL = Trials(
    "9.7", partial(built, check=True), tol=1e-3, most=170,
    runs=[forwards(shape, dtype=torch.float16) for shape in ((1, 2, 1, 70, 90, True), (1, 1, 1, 40, 24, True))],
    words={x: x for x in _OWN_WORDS},
    notes={"base": "-inf - (-inf) would be NaN", "scale_log2": "2^x is taken of scores times the scale and log2(e)"},
    equal=PAST_THE_LAST | dict.fromkeys(
        ("BLOCK_M * ROW_BYTES`", "in `k_smem + BLOCK_N * ROW_BYTES`"),
        "Q is in registers before K and V are copied, so they may lie where it lay",
    ) | {"`t == 0` is not asked": "the four lanes of a row have one lse"},
)  # fmt: skip


@exercise(
    "9.7",
    title="A kernel of your own",
    minutes=120,
    difficulty="Stretch",
    hints=[
        "Make it right before you make it fast: one warp, 16 rows, no mask; then causal, lengths, four warps. Between "
        "two steps run the check: it says what is wrong first.",
        "Its parts: at(), the swizzle; a copy with cp.async that makes rows past the end zeros; in the kernel the "
        "block's rows and keys; Q's fragments; a loop of copy, wait, barrier, scores, maxima, probabilities, output; "
        "the division by the sums; the store. A barrier before the next copy, too.",
        "32 rows per warp: s[2][...][4] and acc[2][...][4], and for each ldmatrix_x4 of K or V a loop over two "
        "fragments of Q or P. Phase 9's section 16 has every line of a larger kernel.",
        "The scores: for (int k = 0; k < HEAD_DIM / 16; k++) for (int n = 0; n < S_TILES / 2; n++) { uint32_t b[4]; "
        "ldmatrix_x4(b, k_smem + at(n * 16 + lane % 8 + lane / 16 * 8, k * 16 + lane / 8 % 2 * 8)); for (int m = 0; "
        "m < 2; m++) mma_m16n8k16<T>(s[m][2 * n], q[k][m], b[0], b[1]), mma_m16n8k16<T>(s[m][2 * n + 1], q[k][m], "
        "b[2], b[3]); }. Row r of a lane is s[r / 2][n][r % 2 * 2 + e], and stands in the tile at g + r * 8.",
    ],
)
def own_kernel(my_kernel: str) -> str:
    whole = whole_kernel(my_kernel, "my_kernel")
    with explained(lambda: built(whole, check=True), OWN_KERNEL, vague=VAGUE):
        verdict = examine(whole)
    report = probe(built(whole, check=True), whole, (1, 1, 1, 256, 256, False), sms=1)
    # Wavefronts per MMA: 1 for K and V with 32 rows per warp, and room for Q, the store and small things
    spent = expect_budget(report, 1.25, "seq_q=256, seq_k=256, head_dim=64, float16")
    expect_wide(whole)
    expect_any_base(whole)
    return f"{verdict.cases} cases right, {spent:.2f} wavefronts per MMA"


# ---- 9.8 ------------------------------------------------------------------------------------------------------------


_WRITTEN, _READ_BACK = "(o_lane ^ n * 16)", "(from ^ pass * ROWS % 8 * 16)"
STORE = Trials(
    "9.8", partial(built, check=True, head_dim=128), region=True, tol=1e-3,
    runs=[all_found(forwards((1, 2, 1, 70, 70, False), 128, torch.float16))],
    most=250, read=lambda text: text.rstrip().removesuffix("}"),  # that of the kernel
    unread=lambda text: text + "}", place=lambda text: _storing(text).text,
    notes={"n * 16": "column 8 n is chunk n: the swizzle's XOR takes it", "ROWS": "a pass of the warp is ROWS rows",
           "pass * ROWS % 8 * 16": "the swizzle looks at row % 8 too"},
    equal={"t == 0": "the four lanes of a row have one lse", "`t ": "the four lanes of a row have one lse",
           "`sum <= 0`": "no sum is below 0", "`sum == 0` is not asked": "log2(0) is -inf",
           "`cp_async_wait<0>()` comes": "nothing is under way behind the loop"},
    rows=[
        Row("columns-moved", "the passes forget that the swizzle looks at row % 8: rows of a later pass have another",
            [(_READ_BACK, "from")]),
        Row("columns-moved", "the passes' XOR is that of head_dim 64, where a pass is 4 rows: at 128 it is 2",
            [(_READ_BACK, "(from ^ pass % 2 * 64)")]),
        Row("rows-left-out", "a pass is taken for 4 rows at any head_dim: it is WARP_SIZE / CHUNKS",
            [("ROWS = WARP_SIZE / CHUNKS", "ROWS = 4")]),
        Row("columns-moved", "the passes begin where a row lies without the swizzle: at() says where its chunk is",
            [("from = at(warp_row + first, column)", "from = (warp_row + first) * ROW_BYTES + column * 2")]),
        *(Row("columns-moved", f"O is written at n * {step}: column 8 n is chunk n, {why}",
              [(_WRITTEN, f"(o_lane ^ n * {step})")])
          for step, why in ((32, "and 32 bytes are a step of K or V, 16 columns"), (8, "16 bytes each"))),
        Row("wrong-stride", "a row is taken to have HEAD_DIM bytes: it has ROW_BYTES",
            [("r * 8 * ROW_BYTES", "r * 8 * HEAD_DIM")]),
        Row("columns-moved", "O is written at `+ n * 16`, where the swizzle's XOR belongs",
            [(_WRITTEN, "(o_lane + n * 16)")]),
        Row("columns-moved", "the passes add where the swizzle's XOR belongs",
            [(_READ_BACK, "(from + pass * ROWS % 8 * 16)")]),
    ],
)  # fmt: skip


def _storing(text: str) -> Source:
    return replaced(step("p9_2_addresses"), "store", text)


@exercise(
    "9.8",
    title="Addresses of the store",
    minutes=30,
    hints=[
        "Of each of the two loops ask: what does the address of its first turn depend on, and what changes from turn "
        "to turn? The swizzle looks at row % 8 and column / 8, and an XOR of the two parts may be taken one by one.",
        "Writing: row g + 8 r has row % 8 == g for every r, so r adds r * 8 * ROW_BYTES. Column 8 n has column / 8 == "
        "n: an XOR of n * 16. Reading: a pass of the warp is WARP_SIZE / CHUNKS rows; lane and pass fill different "
        "bits of row % 8.",
        "const int o_lane = at(warp_row + g, 0) + t * 4; and then shared + (o_lane ^ n * 16) + r * 8 * ROW_BYTES. "
        "With ROWS = WARP_SIZE / CHUNKS and from = at(warp_row + lane / CHUNKS, lane % CHUNKS * 8): "
        "shared + (from ^ pass * ROWS % 8 * 16) + pass * ROWS * ROW_BYTES.",
    ],
)
def addresses_of_the_store(store: str) -> str:
    whole = _storing(text_of(store, "store"))
    with explained(lambda: built(whole, check=True, head_dim=128), STORE):
        verdict = examine(whole)
        wide = examine(whole, head_dim=128, probes=((1, 1, 1, 70, 70, False),), fast=False, max_seq=70)
    expect_variant(whole, head_dim=64)
    count = '#define at(...) ((void)printf("a"), at(__VA_ARGS__))'
    for head_dim in (64, 128):
        calls = said_by(whole, count, "#undef at", 64, 64, head_dim).count("a") / 128
        said = f"right, but each lane calls `at` {calls:.3g} times where it stores O: one call before each loop will "
        said += "do, and constants inside of it"
        expect(calls <= 2, said, diagnosis="addresses-in-the-loop", case=f"head_dim={head_dim}, 64 query rows")
    return f"{verdict.cases + wide.cases} cases right, head_dim 64 and 128"


# ---- 9.9 ------------------------------------------------------------------------------------------------------------


def _putting_out(text: str) -> Source:
    return replaced(step("p9_5_prefetch"), "output", f"{{{text}}}")  # its b is not that of the scores


OUTPUT = Trials(
    "9.9", partial(built, check=True), [all_found(forwards((1, 2, 1, 70, 90, False), dtype=torch.float16))],
    region=True, place=lambda text: _putting_out(text).text, tol=1e-3, most=250,
    notes={"step + 2": "a fragment is loaded two steps ahead", "O_TILES / 2": "k has O_TILES / 2 steps"},
    equal={"a[m], b[0], b[1])` comes too late": "they add to two accumulators",
           "v_lane + stage)` comes too late": "neither of the first two fragments waits for the other"},
    rows=[
        Row("wrong-buffer", "with two places a load lands on the fragment that its step multiplies: one in use and two "
            "under way want three", [("(step + 2) % 3", "step % 2"), ("v_rmem[step % 3]", "v_rmem[step % 2]")]),
        Row("wrong-buffer", "a step multiplies the fragment of the next one: three places take turns",
            [("= v_rmem[step % 3]", "= v_rmem[(step + 1) % 3]")]),
        Row("wrong-buffer", "a step multiplies the fragment that it has just asked for: its own is two places before",
            [("= v_rmem[step % 3]", "= v_rmem[(step + 2) % 3]")]),
        Row("keys-of-this-k", "the fragment that is asked for is always of this step's k: at the end of a k the next "
            "16 keys begin", [("next_k * MMA_K", "k * MMA_K")]),
        Row("not-transposed", "V is loaded without trans: B wants two keys of one column in a register",
            [("ldmatrix_x4_trans(v_rmem[0]", "ldmatrix_x4(v_rmem[0]"),
             ("ldmatrix_x4_trans(v_rmem[1]", "ldmatrix_x4(v_rmem[1]"),
             ("ldmatrix_x4_trans(v_rmem[(step", "ldmatrix_x4(v_rmem[(step")]),
    ],
)  # fmt: skip
_ORDER = (
    '#define ldmatrix_x4_trans(...) ((void)(threadIdx.x == 0 && printf("L")), ldmatrix_x4_trans(__VA_ARGS__))\n'
    '#define mma_m16n8k16 (void)(threadIdx.x == 0 && printf("m")), mma_m16n8k16'
)


@exercise(
    "9.9",
    title="V two steps ahead",
    minutes=20,
    hints=[
        "Number the steps: step = k * (O_TILES / 2) + n, through both loops. Which k and n has step + 2? How many "
        "fragments does a lane hold when a step issues its MMAs?",
        "b becomes b[3][4]. Before the loops the first two fragments are loaded into b[0] and b[1]; in step i that of "
        "step i + 2 goes into b[(i + 2) % 3], before the MMAs of step i are issued with b[i % 3].",
        "if (next_k < BLOCK_N / MMA_K) ldmatrix_x4_trans(b[(step + 2) % 3], (v_lane ^ (next_n * 32)) + stage + next_k "
        "* MMA_K * ROW_BYTES); with next_k = (step + 2) / (O_TILES / 2), next_n = (step + 2) % (O_TILES / 2).",
    ],
)
def v_ahead(output: str) -> str:
    whole = _putting_out(text_of(output, "output"))
    with explained(lambda: built(whole, check=True), OUTPUT):
        verdict = examine(whole)
    expect_variant(whole, head_dim=128)
    said = said_by(whole, _ORDER, "#undef ldmatrix_x4_trans\n#undef mma_m16n8k16", 128, 64)
    loads, case = said.count("L"), "seq_q=128, seq_k=64, head_dim=64: one tile, as thread 0 goes through it"
    sentence = f"right, but a tile of V takes {loads} ldmatrix, and 16 before: each fragment is loaded once"
    expect(loads == 16, sentence, diagnosis="fragments-loaded-again", case=case)
    mmas = 0
    for at, letter in enumerate(said):
        mmas += letter == "m"
        ahead = said[:at].count("L")
        wanted = min((mmas - 1) // 4 + 3, 16)
        expect(
            letter != "m" or ahead <= wanted + 1,
            f"right, but step {(mmas - 1) // 4} issues its MMAs when {ahead} fragments of V have been asked for, and "
            f"{wanted} would do, its own and the next two: each takes four registers until its MMAs are issued",
            diagnosis="too-far-ahead",
            case=case,
        )
        expect(
            letter != "m" or ahead >= wanted,
            f"right, but step {(mmas - 1) // 4} issues its MMAs when {ahead} fragments of V have been asked for: it "
            f"should be {wanted}, its own and the next two",
            diagnosis="not-ahead",
            case=case,
        )
    return f"{verdict.cases} cases right, every fragment asked for two steps before its MMAs"


# ---- 9.10 -----------------------------------------------------------------------------------------------------------


def _launch(m_blocks: int, kv_heads: int, group: int, together: int) -> list[tuple[int, ...]]:
    return [(n, m_blocks, kv_heads * group, group, together) for n in range(m_blocks * kv_heads * group)]


def _some_block(r: random.Random) -> tuple[int, ...]:
    return r.choice(_launch(r.randint(1, 6), r.randint(1, 7), r.randint(1, 4), r.randint(1, 4)))


def _order(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """Which blocks of a launch come twice or never, or in which order they come, of the smallest that is wrong."""
    for sizes in sorted([(1, 3, 2, 1), (2, 3, 3, 2), (3, 4, 2, 2), (4, 5, 1, 2), (3, 4, 1, 3)]):
        launch = _launch(*sizes)
        got, want = ([tuple(fn(*x)) for x in launch] for fn in (answer, RULES["9.10"].fn))
        m_blocks, heads, group, together = launch[0][1:]
        case = f"with m_blocks={m_blocks}, heads={heads}, group={group}, kv_together={together}"
        if missing := sorted({*want} - {*got}):
            head, m_block = missing[0]
            said = f"{case} block {m_block} of head {head} is nobody's"
            twice = next(((n, x) for n, x in enumerate(got) if x not in want or x in got[:n]), None)
            if twice:
                n, (head, m_block) = twice
                of = f"number {got.index(twice[1])} has that too" if twice[1] in want else "which does not exist"
                said += f"; number {n} has block {m_block} of head {head}, {of}"
            return "wrong-order", said
        for i, what in ((0, "heads"), (1, "blocks of rows")):
            mine, right = ([x[i] for x in order] for order in (got, want))
            if mine != right:
                listed, should = (", ".join(map(str, x[:12])) + ", ..." * (len(x) > 12) for x in (mine, right))
                return "wrong-order", f"{case} the {what} come as {listed}; they should as {should}"
    return None


@rule(
    "9.10",
    title="Long blocks first", minutes=15,
    hints=[
        "How many query heads are worked on together? How many blocks have they? So to which portion of heads does a "
        "number belong, and which is its place in the portion?",
        "In a portion the last blocks of rows of all its heads come first, then the last but one. So the place modulo "
        "the portion's heads is the head, and the quotient counts blocks from the end.",
        "The last portion may be smaller: share = min(kv_together * group, heads - first), where first is the "
        "portion's first head. head = first + place % share, m_block = m_blocks - 1 - place // share.",
    ],
    returns="head, m_block",
    strict=True,
    inputs=_launch(3, 4, 2, 2) + _launch(4, 5, 1, 2) + _launch(2, 3, 3, 2) + _launch(5, 2, 2, 4) + _launch(1, 3, 2, 1),
    draw=_some_block,
    symptom=_order,
    words={"together": "kv_together * group"},
    notes={
        "group": "K and V have to fit in the cache: key heads are counted, and each has `group` query heads",
        "m_blocks - 1": "the last rows see the most keys, so their blocks go first",
        "heads": "the last portion may have fewer heads",
    },
    rows=[
        Row("short-first", "the order is turned around: the last rows see the most keys, so their blocks go first",
            [("m_blocks - 1 - place // share", "place // share")]),
        Row("key-head-by-key-head", "a portion's key heads come one behind the other, each with all of its blocks: the "
            "long ones of all go first", [("together = kv_together * group", "together = group")]),
        Row("key-heads-left", "the last portion's heads are counted as key heads: heads - first query heads are left",
            [("heads - first)", "(heads - first) // group)")]),
    ],
)  # fmt: skip
def block_of(number, m_blocks, heads, group, kv_together):
    """(head, m_block) of block `number` of a causal launch: the query head, and which block of its rows."""
    # BEGIN SOLUTION
    together = kv_together * group
    first = number // (m_blocks * together) * together
    share = min(together, heads - first)
    place = number - first * m_blocks
    return first + place % share, m_blocks - 1 - place // share
    # END SOLUTION


# ---- 9.11 -----------------------------------------------------------------------------------------------------------


def _few_rows(r: random.Random) -> tuple[int, ...]:
    return r.randint(1, 200), r.randint(1, 300), r.choice((132, 264, 108, 8)), r.randint(1, 9000), r.choice((64, 128))


_TIME = "-(-blocks * {0} // places) * -(-tiles // {0})"
_BEST = f"min(range(1, most + 1), key=lambda s: {_TIME.format('s')})"


@rule(
    "9.11",
    title="How many shares?", minutes=20,
    hints=[
        "With s shares there are blocks * s blocks. How many rounds do they take, if `places` run at a time? And how "
        "many tiles has the longest share?",
        "The time is rounds times tiles: ceil(blocks * s / places) * ceil(tiles / s). s goes from 1 to tiles // 4, and "
        "1 is always allowed.",
        "min(range(1, max(1, tiles // 4) + 1), key=...) takes the first of the best, so the smallest. A part has "
        "head_dim floats of O and one of lse for each row; without a split there is none.",
    ],
    returns="splits, floats",
    whole=True,
    inputs=[(1, 64, 264, 128, 64), (5, 9, 2, 64, 64), (1, 8, 2, 64, 64), (8, 16, 132, 1024, 64),
            (264, 64, 264, 4096, 128), (300, 64, 264, 4096, 128),
            (100, 7, 132, 100, 64), (3, 90, 8, 100, 64), (5, 3, 132, 70, 128), (40, 128, 132, 640, 128),
            (131, 200, 132, 9000, 64), (1, 4096, 1056, 64, 64)]
    + [_few_rows(random.Random(i)) for i in range(40)],
    draw=_few_rows,
    notes={
        "places": "so many blocks run at a time: count whole rounds", "tiles": "the longest share decides",
        "head_dim + 1": "a part has O and its lse", "4": "a share has at least four tiles",
        "splits > 1": "without a split nothing is kept",
    },
    rows=[
        Row("fill-the-places", "splits: as many shares as fill the places. That a round more costs as much as "
            "the shares save is not looked at",
            [(_BEST, "max(1, min(most, places // blocks))")]),
        Row("too-few-tried", "splits: no more shares are tried than fill the places once: more rounds of shorter "
            "shares may take less", [("max(1, tiles // 4)", "max(1, min(tiles // 4, places // blocks))")]),
        Row("real-share", "splits: the longest share is not rounded up: it is a whole number of tiles",
            [("-(-tiles // s)", "tiles / s")]),
        Row("first-rise", "splits: the search ends where one share more is not better: a later one may be, up to tiles "
            "// 4", [(_BEST, f"next((s for s in range(1, most) if {_TIME.format('(s + 1)')} >= {_TIME.format('s')}), "
                        "most)")]),
        Row("some-left-out", "splits: only shares that divide tiles are looked at: the last one may have fewer",
            [("range(1, most + 1)", "[s for s in range(1, most + 1) if tiles % s == 0]")]),
        Row("some-left-out", "splits: only powers of 2 are looked at",
            [("range(1, most + 1)", "[s for s in range(1, most + 1) if s & (s - 1) == 0]")]),
        Row("largest-of-several", "splits: of several shares with the least time the largest is taken, and not the "
            "smallest", [("* -(-tiles // s))", "* -(-tiles // s) - s / 1e6)")]),
    ],
)  # fmt: skip
def splits_of(blocks, tiles, places, rows, head_dim):
    """(splits, floats): the fewest shares with the least time, and the floats that their parts need."""
    # BEGIN SOLUTION
    most = max(1, tiles // 4)
    splits = min(range(1, most + 1), key=lambda s: -(-blocks * s // places) * -(-tiles // s))
    return splits, splits * rows * (head_dim + 1) if splits > 1 else 0
    # END SOLUTION


# ---- 9.12 -----------------------------------------------------------------------------------------------------------

_ROOM = 113 * 1024  # bytes of shared memory per block, so that two fit in an SM of an H100 or H200


@exercise(
    "9.12",
    title="A kernel of your own, at D = 128",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "Begin with your kernel of 9.7, and compile it for HEAD_DIM 128: it is right, and wants 64 registers for Q "
        "beside 128 for O and 64 for S. A lane has 255.",
        "Q stays in shared memory. In the loop over k load its fragments, one for each MMA tile of rows, and use them "
        "for all fragments of K: uint32_t a[M_TILES][4]; inside of the loop over k, before the one over n.",
        "for (int k ...) { uint32_t a[M_TILES][4]; for (int m ...) ldmatrix_x4(a[m], q_smem + at(warp_row + m * MMA_M "
        "+ lane % 16, k * MMA_K + lane / 16 * 8)); for (int n ...) { ... mma_m16n8k16<T>(s[m][2 * n], a[m], b[0], "
        "b[1]); ... } }. Nothing may write over the tile of Q until the last tile of keys is done.",
        "Shared memory: Q takes 32 KiB, a stage of K and V 32 KiB. One stage or two leave room for two blocks, three "
        "do not. If two stages hurt, begin with one, as in 9.7.",
    ],
)
def own_kernel_128(my_kernel_128: str) -> str:
    whole = whole_kernel(my_kernel_128, "my_kernel_128")
    module = built(whole, check=True, head_dim=128)
    # At 64 too the kernel is the right one of 9.7, but for Q's fragments
    with explained(lambda: built(whole, check=True), OWN_KERNEL, vague=VAGUE):
        verdict = examine(whole, head_dim=128, max_seq=200)
    shorter, report = (probe(module, whole, (1, 1, 1, 256, seq_k, False), head_dim=128, sms=1) for seq_k in (256, 512))
    case = "seq_q=256, seq_k=512, head_dim=128, float16"
    # Wavefronts per MMA: 1 for K and V, 1/4 for Q again in each tile, and room for the store
    feeds = f"{_FEEDS}; one of Q, loaded once per k, and not for each of K, feeds an MMA for each eight keys of a tile"
    spent = expect_budget(report, 1.5, case, feeds)
    more = [report.counters[name] - shorter.counters[name] for name in ("ldmatrix", "mma")]
    said = "right, but Q's fragments stay in registers: 64 beside the 128 of O and the 64 of S, where a lane has 255. "
    said += "Load them again in every tile"
    expect(more[0] > 0.27 * more[1], said, diagnosis="q-in-registers", case=case)
    bytes_ = report.launches[0].shared_bytes
    said = f"right, but a block asks for {bytes_} bytes of shared memory: with more than {_ROOM} an SM holds one "
    said += "block, and has nothing to do while that one waits"
    expect(bytes_ <= _ROOM, said, diagnosis="one-block-per-sm", case=case)
    expect_wide(whole, head_dim=128)
    return f"{verdict.cases} cases right, {spent:.2f} wavefronts per MMA, {bytes_ // 1024} KiB per block"
