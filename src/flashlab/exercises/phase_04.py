"""Checks of phase 4: who computes what, which keys a block sees, padding, caps, offsets, and a kernel from nothing.

A formula is asked on many cases at once, and a known mistake is told only if it gives every answer. A kernel runs with
every address checked where kernels are interpreted; its inputs lie in wider buffers of NaN, so that what is read beside
them shows on a GPU too. Then the compiler is asked.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, Report, expect, expect_all_close, expect_close, running, verify
from flashlab.check.mistakes import weights
from flashlab.check.slips import Chosen, Slip, explain, explained
from flashlab.check.symptoms import watched
from flashlab.exercises.answers import in_words
from flashlab.exercises.registry import exercise
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kept, kernel_of
from flashlab.triton_tools.watch import watched as watched_memory

Numbers = tuple[int, ...]
Answer = tuple[str, Any, Any]  # case, what the learner gave, what is right


def _random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _apart(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x [rows, n] in a buffer of NaN that is `columns` wide, with room behind the last row."""
    buffer = torch.full((len(x) + 64, columns), math.nan, dtype=x.dtype, device=x.device)
    view = buffer[: len(x), : x.shape[1]]
    view.copy_(x)
    return view


def _whole_numbers(got: Any, names: Sequence[str], case: str) -> Numbers:
    """The learner's tuple as whole numbers, or CheckFailed."""
    __tracebackhide__ = True
    wanted = f"({', '.join(names)})"
    expect(got is not None, f"nothing is returned; return {wanted}", diagnosis="returned-none", case=case)
    got = got.tolist() if hasattr(got, "tolist") else got  # a tensor, an array
    expect(
        isinstance(got, (tuple, list)) and len(got) == len(names),
        f"{in_words(got, article=True)} is returned; return {len(names)} numbers, {wanted}",
        diagnosis="wrong-type",
        case=case,
    )
    found = []
    for name, value in zip(names, got, strict=True):
        number = _whole_number(value)
        if number is None:
            raise CheckFailed(
                f"{name} is {value!r:.40}, which is no whole number"
                + (": division by // gives one" if isinstance(value, float) and math.isfinite(value) else ""),
                diagnosis="no-whole-number",
                case=case,
            )
        found.append(number)
    return tuple(found)


def _whole_number(value: Any) -> int | None:
    """The value as an int, also from a tensor or from 16.0; None where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(number) if number.is_integer() else None


def _expect_all(
    answers: Sequence[Answer],
    mistakes: Mapping[str, tuple[Sequence[Any], str]] | Callable[[], Mapping[str, tuple[Sequence[Any], str]]],
    *,
    what: str,
    tol: float = 0.01,
) -> None:
    """Every answer right, or the mistake that gives them all; a hunt's untouched code is only looked at."""
    __tracebackhide__ = True
    if watched() is not None:
        for case, got, want in answers:
            expect_close(got, want, what=what, case=case, tol=tol)
    else:
        expect_all_close(answers, what=what, tol=tol, mistakes=mistakes)


def _expect_numbers(
    answers: Sequence[tuple[str, Numbers, Numbers]],
    names: Sequence[str],
    mistakes: Mapping[str, tuple[Sequence[Any], str]],
    parts: Mapping[str, Mapping[str, tuple[Sequence[int], str]]] | None = None,
) -> None:
    """Every tuple of whole numbers right, or what is known of the first number that is not.

    parts: {name: {slug: (that number of every answer, sentence)}}, for a mistake in one number, whatever the others.
    """
    __tracebackhide__ = True
    wrong = [answer for answer in answers if tuple(answer[1]) != tuple(answer[2])]
    if not wrong:
        return
    got, want = ([tuple(answer[i]) for answer in answers] for i in (1, 2))
    for slug, (values, sentence) in mistakes.items():
        if [tuple(x) for x in values] == got:
            raise CheckFailed(sentence, diagnosis=slug.partition(" ")[0], case=wrong[0][0])
    for order in itertools.permutations(range(len(names))):
        if [tuple(x[i] for i in order) for x in want] == got:
            came = ", ".join(names[i] for i in order)
            sentence = f"the numbers are right, but they come as ({came}): return ({', '.join(names)})"
            raise CheckFailed(sentence, diagnosis="exchanged", case=wrong[0][0])
    off = {name for i, name in enumerate(names) if any(x[i] != y[i] for x, y in zip(got, want, strict=True))}
    for i, name in enumerate(names):
        for slug, (column, sentence) in (parts or {}).get(name, {}).items():
            if name in off and list(column) == [x[i] for x in got]:
                case = next(case for case, x, y in answers if x[i] != y[i])
                raise CheckFailed(sentence, diagnosis=slug.partition(" ")[0], case=case)
    i = next(i for i, name in enumerate(names) if name in off)
    case, mine, right = next(answer for answer in answers if answer[1][i] != answer[2][i])
    well = [name for name in names if name not in off]
    raise CheckFailed(
        f"{names[i]} is {mine[i]}, it should be {right[i]}"
        + (f"; {' and '.join(well)} {'are' if len(well) > 1 else 'is'} right everywhere" if well else ""),
        diagnosis="wrong-value",
        case=case,
    )


def _one_or_two(
    changes: Sequence[tuple[str, Mapping[str, Any], str]], given: Callable[..., Sequence[Any]]
) -> dict[str, tuple[Sequence[Any], str]]:
    """{slug: (answers, sentence)} for each change of a right formula's options, then for each two of them."""
    found: dict[str, tuple[Sequence[Any], str]] = {}
    for slug, options, sentence in changes:
        found[f"{slug} {len(found)}"] = (given(**options), sentence)
    for (slug, one, first), (_, two, second) in itertools.combinations(changes, 2):
        if not one.keys() & two.keys():
            found[f"{slug} {len(found)}"] = (given(**one, **two), f"two things: {first}; and {second}")
    return found


# ---- 4.1 ------------------------------------------------------------------------------------------------------------

_GRIDS = ((2, 6, 2, 4), (3, 4, 4, 5), (2, 8, 1, 3), (2, 6, 3, 1), (1, 8, 2, 7))  # batch, heads, kv_heads, m_blocks
_WHOSE = ("batch", "head", "kv_head", "block")


@exercise(
    "4.1",
    title="Whose rows?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Take the number apart as you would seconds into hours, minutes and seconds: a remainder, and what is left.",
        "The block is pid % m_blocks. What is left, pid // m_blocks, counts the heads of all batches.",
        "kv_head: `heads // kv_heads` query heads share one, so it is head // (heads // kv_heads).",
    ],
)
def _(whose: Callable[..., tuple[int, int, int, int]]) -> str:
    got, want = [], []
    for batch, heads, kv_heads, blocks in _GRIDS:
        for pid in range(batch * heads * blocks):
            case = f"pid={pid}, m_blocks={blocks}, heads={heads}, kv_heads={kv_heads}"
            with running(case):
                result = whose(pid, blocks, heads, kv_heads)
            got.append((case, _whole_numbers(result, _WHOSE, case)))
        want += _programs(batch, heads, kv_heads, blocks)

    def given(change: Callable[[int, int, int, int, int, int, int], Any]) -> list[Any]:
        """change(pid, batch_head, heads, kv_heads, group, m_blocks, batches)"""
        return [change(i, i // m, h, kv, h // kv, m, b) for b, h, kv, m in _GRIDS for i in range(b * h * m)]

    mistakes = {
        "heads-fastest": (
            given(lambda i, bh, h, kv, g, m, b: (i // h // m, i % h, i % h // g, i // h % m)),
            "neighbouring programs are neighbouring heads here; they should be neighbouring blocks of one head",
        ),
        "quotient-for-remainder": (
            given(lambda i, bh, h, kv, g, m, b: (i % m // h, i % m % h, i % m % h // g, i // m)),
            "quotient and remainder are exchanged: the block is pid % m_blocks",
        ),
        "batch-and-head-exchanged": (
            given(lambda i, bh, h, kv, g, m, b: (bh % h, bh // h, bh % h // g, i % m)),
            "batch and head are exchanged: the heads of one batch are neighbours",
        ),
        "batch-and-head-exchanged 2": (
            given(lambda i, bh, h, kv, g, m, b: (bh % h, bh // h, bh // h // g, i % m)),
            "batch and head are exchanged, and kv_head is the wrong one's: the heads of one batch are neighbours, "
            "so the quotient by `heads` is the batch and the remainder the head",
        ),
        "batches-fastest": (
            given(lambda i, bh, h, kv, g, m, b: (bh % b, bh // b, bh // b // g, i % m)),
            "neighbouring heads are of different batches here; the heads of one batch are neighbours",
        ),
    }
    cards = "deals the key heads out like cards; the query heads that share a key head are neighbours"
    reduced = "head counts on through the batches; in each batch it begins at 0: what is the remainder?"
    parts = {
        "batch": {
            "batch-not-divided": (
                given(lambda i, bh, h, kv, g, m, b: bh),
                "batch counts heads: divide it by the heads of a batch",
            ),
            "head-for-batch": (
                given(lambda i, bh, h, kv, g, m, b: bh % h),
                "batch is what head should be, the remainder by `heads`; the batch is the quotient",
            ),
            "batch-by-group": (given(lambda i, bh, h, kv, g, m, b: bh // g), "batch counts groups of heads"),
            "batch-by-blocks": (
                given(lambda i, bh, h, kv, g, m, b: i // m // m),
                "batch is divided by m_blocks twice; once by `heads`",
            ),
            "batch-from-pid": (
                given(lambda i, bh, h, kv, g, m, b: i // h),
                "batch is pid // heads: the blocks of a head are in pid too",
            ),
            "batch-of-kv-heads": (
                given(lambda i, bh, h, kv, g, m, b: bh // kv),
                "batch is counted in key heads; a batch has `heads` query heads, and each has its own programs",
            ),
        },
        "head": {
            "head-not-reduced": (given(lambda i, bh, h, kv, g, m, b: bh), reduced),
            "batch-for-head": (
                given(lambda i, bh, h, kv, g, m, b: bh // h),
                "head is what batch should be, the quotient by `heads`; the head is the remainder",
            ),
            "head-by-kv-heads": (
                given(lambda i, bh, h, kv, g, m, b: bh % kv),
                "head is the remainder by kv_heads; a batch has `heads` query heads",
            ),
            "head-by-group": (
                given(lambda i, bh, h, kv, g, m, b: bh % g),
                "head is the remainder by heads // kv_heads; a batch has `heads` query heads",
            ),
            "head-by-blocks": (
                given(lambda i, bh, h, kv, g, m, b: bh % m),
                "head is the remainder by m_blocks; it is that by `heads`",
            ),
            "head-zero": (given(lambda i, bh, h, kv, g, m, b: 0), "head is 0 for every program"),
            "head-from-pid": (
                given(lambda i, bh, h, kv, g, m, b: i % h),
                "head is pid % heads: the blocks of a head are in pid too",
            ),
        },
        "kv_head": {
            "modulo-kv-heads": (
                given(lambda i, bh, h, kv, g, m, b: bh % h % kv),
                f"kv_head is head % kv_heads: {cards}",
            ),
            "modulo-group": (
                given(lambda i, bh, h, kv, g, m, b: bh % h % g),
                "kv_head is the number of the query head within its group; the number of the group is wanted",
            ),
            "divided-by-kv-heads": (
                given(lambda i, bh, h, kv, g, m, b: bh % h // kv),
                "kv_head is head // kv_heads; divide by how many query heads share a key head",
            ),
            "query-head-used": (
                given(lambda i, bh, h, kv, g, m, b: bh % h),
                "kv_head is the query head; there are fewer key heads, and several query heads share one",
            ),
            "kv-head-over-batches": (
                given(lambda i, bh, h, kv, g, m, b: bh // g),
                "kv_head counts on through the batches; in each batch it begins at 0",
            ),
            "kv-head-of-the-batch": (
                given(lambda i, bh, h, kv, g, m, b: bh // h // g),
                "kv_head is computed from the batch; it is the group of the head",
            ),
            "kv-head-reduced-later": (
                given(lambda i, bh, h, kv, g, m, b: bh % kv),
                "kv_head is pid // m_blocks % kv_heads: it is the group of the head, head // (heads // kv_heads)",
            ),
            "kv-head-zero": (given(lambda i, bh, h, kv, g, m, b: 0), "kv_head is 0 for every head"),
            "turned-round": (
                given(lambda i, bh, h, kv, g, m, b: bh % h * h // kv),
                "kv_head is head * heads // kv_heads, which is larger than head; there are fewer key heads",
            ),
        },
        "block": {
            "blocks-backwards": (
                given(lambda i, bh, h, kv, g, m, b: m - 1 - i % m),
                "the blocks of a head come in the opposite order; here the first program has the first block",
            ),
            "block-from-one": (given(lambda i, bh, h, kv, g, m, b: i % m + 1), "block counts from 1; it begins at 0"),
            "block-not-reduced": (given(lambda i, bh, h, kv, g, m, b: i), "block is pid; each head begins at 0 again"),
            "block-quotient": (
                given(lambda i, bh, h, kv, g, m, b: bh),
                "block is pid // m_blocks; it is the remainder, pid % m_blocks",
            ),
            "block-of-heads": (
                given(lambda i, bh, h, kv, g, m, b: i % h),
                "block is pid % heads; a head has m_blocks of them",
            ),
        },
    }
    answers = [(case, x, y) for (case, x), y in zip(got, want, strict=True)]
    _expect_numbers(answers, _WHOSE, mistakes, parts)
    return f"{len(want)} programs of {len(_GRIDS)} grids"


def _programs(batch: int, heads: int, kv_heads: int, blocks: int) -> list[Numbers]:
    """The right answer as nested loops would give it."""
    group = heads // kv_heads
    loops = itertools.product(range(batch), range(heads), range(blocks))
    return [(b, h, h // group, m) for b, h, m in loops]


# ---- 4.2 ------------------------------------------------------------------------------------------------------------

_BLOCKS = tuple(
    (start, min(start + block, seq_q), seq_q, seq_k, tile)
    for seq_q, seq_k, block, tile in (
        (64, 64, 16, 16), (50, 130, 16, 32), (100, 37, 32, 16), (1, 147, 16, 64), (40, 40, 32, 8), (33, 35, 8, 8),
        (33, 40, 16, 8),
        (200, 90, 64, 32),
        *((24, 24 + offset, 8, 8) for offset in range(1, 8)),  # a row may see any remainder of a tile
    )
    for start in range(0, seq_q, block)
)  # fmt: skip


@exercise(
    "4.2",
    title="How far a block sees",
    minutes=15,
    difficulty="Core",
    hints=[
        "Query i sees the keys j <= i + seq_k - seq_q. So how many keys does query i see, if there are enough?",
        "`end`: the row that sees most is the last, stop - 1. `whole_end`: the row that sees least is the first. "
        "Neither can be below 0 or above seq_k.",
        "end = max(0, min(seq_k, stop + seq_k - seq_q)); whole_end = max(0, min(seq_k, start + 1 + seq_k - seq_q)) "
        "// BLOCK_N * BLOCK_N.",
    ],
)
def _(causal_edges: Callable[..., tuple[int, int]]) -> str:
    got = []
    for start, stop, seq_q, seq_k, tile in _BLOCKS:
        case = f"rows {start} to {stop - 1} of {seq_q}, {seq_k} keys, BLOCK_N={tile}"
        with running(case):
            result = causal_edges(start, stop, seq_q, seq_k, tile)
        got.append((case, _whole_numbers(result, ("whole_end", "end"), case)))

    def given(formula: Callable[[int, int, int, int, int], Numbers]) -> list[Numbers]:
        """formula(start, stop, diagonal, seq_k, BLOCK_N)"""
        return [formula(a, z, n - m, n, t) for a, z, m, n, t in _BLOCKS]

    def cut(x: int, n: int) -> int:
        return max(0, min(n, x))

    def right(a: int, z: int, d: int, n: int, t: int) -> Numbers:
        return cut(a + 1 + d, n) // t * t, cut(z + d, n)

    def whole(f: Callable[[int, int, int, int, int], int]) -> list[Numbers]:
        return given(lambda a, z, d, n, t: (f(a, z, d, n, t), right(a, z, d, n, t)[1]))

    def end(f: Callable[[int, int, int, int, int], int]) -> list[Numbers]:
        return given(lambda a, z, d, n, t: (right(a, z, d, n, t)[0], f(a, z, d, n, t)))

    top_left = [(cut(a + 1, n) // t * t, cut(z, n)) for a, z, m, n, t in _BLOCKS]
    mistakes: dict[str, tuple[Sequence[Any], str]] = {
        "top-left": (top_left, "both are those of a mask that begins at the first key; the last query sees the last "
                     "key, so query i sees j <= i + seq_k - seq_q"),
        "offset-sign": (
            [(cut(a + 1 - n + m, n) // t * t, cut(z - n + m, n)) for a, z, m, n, t in _BLOCKS],
            "the offset has the wrong sign: with more keys than queries a row sees more, i + seq_k - seq_q",
        ),
        "exchanged": (given(lambda *x: right(*x)[::-1]), "the two are exchanged: return (whole_end, end)"),
        "negative": (
            given(lambda a, z, d, n, t: (min(n, a + 1 + d) // t * t, min(n, z + d))),
            "an edge is negative where a row sees no key; there is no key before 0",
        ),
        "negative-end": (end(lambda a, z, d, n, t: min(n, z + d)), "end is negative where no row sees a key"),
        "negative-whole-end": (
            whole(lambda a, z, d, n, t: min(n, a + 1 + d) // t * t),
            "whole_end is negative where the first row sees no key: it is 0 there",
        ),
        "end-of-the-first-row": (
            end(lambda a, z, d, n, t: cut(a + 1 + d, n)),
            "end is where the first row stops seeing; the last row of the block sees further",
        ),
        "end-one-too-early": (
            end(lambda a, z, d, n, t: cut(z - 1 + d, n)),
            "end is one key too early: it is one *past* the last key that row stop - 1 sees",
        ),
        "end-one-too-late": (
            end(lambda a, z, d, n, t: cut(z + 1 + d, n)),
            "end is one key too late: the last row is stop - 1, and end is one past the last key that it sees",
        ),
        "no-causal-end": (end(lambda a, z, d, n, t: n), "end is seq_k for every block: which keys does no row see?"),
        "end-rounded": (
            end(lambda a, z, d, n, t: min(n, -(-cut(z + d, n) // t) * t)),
            "end is rounded to a tile; it is one past the last key that a row sees (the loop's step rounds by itself)",
        ),
        "end-rounded 2": (
            end(lambda a, z, d, n, t: -(-cut(z + d, n) // t) * t),
            "end is rounded to a tile; it is one past the last key that a row sees (the loop's step rounds by itself)",
        ),
        "whole-of-the-last-row": (
            whole(lambda a, z, d, n, t: cut(z + d, n) // t * t),
            "whole_end is computed from the last row; a tile needs no mask if *every* row sees all of it",
        ),
        "whole-one-too-early": (
            whole(lambda a, z, d, n, t: cut(a + d, n) // t * t),
            "whole_end leaves out a tile: row `start` sees the key start + seq_k - seq_q too, so start + 1 + seq_k - "
            "seq_q keys",
        ),
        "whole-rounded-up": (
            whole(lambda a, z, d, n, t: -(-cut(a + 1 + d, n) // t) * t),
            "whole_end is rounded up, so its last tile is not seen whole",
        ),
        "whole-not-rounded": (
            whole(lambda a, z, d, n, t: cut(a + 1 + d, n)),
            "whole_end is no multiple of BLOCK_N: the tile that it cuts is not seen whole",
        ),
        "tiles-counted": (
            whole(lambda a, z, d, n, t: cut(a + 1 + d, n) // t),
            "whole_end is a number of tiles; it should be a number of keys",
        ),
        "end-ignores-seq-k": (end(lambda a, z, d, n, t: max(0, z + abs(d))),
                              "end goes past seq_k: there is no key from seq_k on"),
    }  # fmt: skip
    answers = [(case, x, y) for (case, x), y in zip(got, given(right), strict=True)]
    shifts = {
        "top-left": (lambda d: 0, "begins at the first key; the last query sees the last key"),
        "offset-sign": (lambda d: -d, "has an offset of the wrong sign: it is seq_k - seq_q"),
        "offset-not-negative": (abs, "takes the offset seq_k - seq_q as positive; with fewer keys it is negative"),
        "offset-cut": (lambda d: max(0, d), "cuts the offset seq_k - seq_q off at 0; with fewer keys it is negative"),
    }
    moved = {
        slug: (
            [right(a, z, f(n - m), n, t) for a, z, m, n, t in _BLOCKS],
            f"the mask of these edges {why}",
        )
        for slug, (f, why) in shifts.items()
        if slug.startswith("offset-")
    }
    parts: dict[str, dict[str, tuple[list[int], str]]] = {"whole_end": {}, "end": {}}
    for i, name in enumerate(parts):
        for slug, (f, why) in shifts.items():
            column = [right(a, z, f(n - m), n, t)[i] for a, z, m, n, t in _BLOCKS]
            parts[name][slug] = (column, f"the mask that gives {name} {why}")
        for slug, (values, why) in mistakes.items():  # the same mistake, whatever the other number is
            column = [x[i] for x in values]
            if column != [right(a, z, n - m, n, t)[i] for a, z, m, n, t in _BLOCKS] and name.split("_")[0] in slug:
                parts[name][slug] = (column, why)
    parts["whole_end"]["whole-too-late"] = (
        [x[0] for x in whole(lambda a, z, d, n, t: cut(a + 2 + d, n) // t * t)],
        "whole_end is a tile too far for some blocks: row `start` sees start + 1 + seq_k - seq_q keys, and no more",
    )
    parts["whole_end"]["whole-zero"] = ([0] * len(_BLOCKS), "whole_end is 0 for every block: no tile is seen whole?")
    parts["end"]["end-rounded-down"] = (
        [right(a, z, n - m, n, t)[1] // t * t for a, z, m, n, t in _BLOCKS],
        "end is rounded down to a tile: the keys after it are seen too",
    )

    def slipped() -> tuple[str, str] | None:
        return _explain_edges(
            [(a, z, m, n, t, 0) for a, z, m, n, t in _BLOCKS], [x for _, x, _ in answers], [x for _, _, x in answers],
            {"whole_end": ("start", 1, True), "end": ("stop", 0, False)},
        )  # fmt: skip

    with explained(slipped):
        _expect_numbers(answers, ("whole_end", "end"), mistakes | moved, parts)
    return f"{len(_BLOCKS)} blocks of queries"


# ---- 4.3 ------------------------------------------------------------------------------------------------------------

_TILES = (  # start_m, start_n, M, N
    (0, 0, 64, 64), (16, 16, 64, 64), (32, 16, 64, 64), (0, 32, 16, 50), (16, 32, 24, 50), (0, 0, 40, 10),
    (32, 0, 40, 10), (0, 128, 1, 147), (48, 48, 50, 51), (16, 16, 20, 34),
)  # fmt: skip


@exercise(
    "4.3",
    title="The mask of a tile",
    minutes=15,
    difficulty="Core",
    hints=[
        "Row r of the tile is query start_m + r, column c is key start_n + c. Make these two as vectors first.",
        "Queries run down, so they get [:, None]; keys run across, so they get [None, :]. The comparison of the two is "
        "a tile.",
        "seen = (offs_n[None, :] <= offs_m[:, None] + N - M) & (offs_n[None, :] < N)",
    ],
)
def _(tile_mask_kernel: Any) -> str:
    names = ("seen_ptr", "start_m", "start_n", "M", "N", "BLOCK_M", "BLOCK_N")
    kernel = kernel_of(tile_mask_kernel, names)
    answers, values = [], []
    for start_m, start_n, M, N in _TILES:
        case = f"queries from {start_m}, keys from {start_n}, M={M}, N={N}"
        out = torch.full((16, 32), -9, dtype=torch.int32, device=runtime.device())
        with in_bounds(case, seen=out):
            kernel[(1,)](out, start_m, start_n, M, N, BLOCK_M=16, BLOCK_N=32)
        rows = max(0, min(16, M - start_m))  # what a row that does not exist sees is nobody's business
        expect(not (out[:rows] == -9).any(), "some of the tile is never stored", diagnosis="never-written", case=case)
        r, c = torch.arange(16)[:rows, None], torch.arange(32)[None, :]
        values.append((r, c, start_m, start_n, M, N))
        i, j = start_m + r, start_n + c
        answers.append((case, out[:rows], ((j <= i + N - M) & (j < N)).int()))

    def given(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """f(r, c, start_m, start_n, M, N)"""
        return [f(*x).expand(len(x[0]), 32).int() for x in values]

    def tile(m: str = "", n: str = "", offset: str = "", compare: str = "", tail: str = "") -> list[torch.Tensor]:
        def of(r, c, a, b, M, N):
            i = {"": a, "none": 0, "times": a * 16, "other": b}[m] + r
            j = {"": b, "none": 0, "times": b * 32, "other": a}[n] + c
            edge = (
                i + {"": N - M, "none": 0, "sign": M - N, "abs": abs(N - M), "cut": max(0, N - M), "tile": 16}[offset]
            )
            seen = {"": j <= edge, "strict": j < edge, "one": j <= edge + 1, "back": j >= edge, "all": j == j + 0 * i}
            real = {"": j < N, "none": j == j, "M": j < M, "short": j < N - 1}[tail]
            return seen[compare] & real

        return given(of)

    changes: list[tuple[str, Mapping[str, Any], str]] = [
        ("top-left", {"offset": "none"}, "aligned at the first key: with N != M query i sees the keys j <= i + N - M"),
        (
            "offset-sign",
            {"offset": "sign"},
            "the offset has the wrong sign: the last query, M - 1, sees the last key, N - 1",
        ),
        ("offset-not-negative", {"offset": "abs"}, "the offset N - M is taken as positive; with fewer keys it is not"),
        ("offset-not-negative", {"offset": "cut"}, "the offset N - M is cut off at 0; with fewer keys it is negative"),
        ("offset-of-the-tile", {"offset": "tile"}, "the offset is that of the tile's sides; it is N - M"),
        ("diagonal-missing", {"compare": "strict"}, "a query sees its own position too: <=, not <"),
        ("one-too-many", {"compare": "one"}, "each query sees one key too many, the one behind its own position"),
        (
            "future-seen",
            {"compare": "back"},
            "the comparison is turned round: a query sees the keys up to its own position",
        ),
        (
            "tail-only",
            {"compare": "all"},
            "only the keys past the end are hidden; a causal query does not see later keys either",
        ),
        ("start-m-forgotten", {"m": "none"}, "the first row of the tile is number start_m, not 0"),
        ("start-n-forgotten", {"n": "none"}, "the first column of the tile is number start_n, not 0"),
        ("start-times-block", {"m": "times"}, "start_m is multiplied by BLOCK_M; it is a row's number already"),
        ("start-times-block", {"n": "times"}, "start_n is multiplied by BLOCK_N; it is a key's number already"),
        ("tail-not-masked", {"tail": "none"}, "keys from N on, which do not exist, are seen"),
        ("compared-with-m", {"tail": "M"}, "keys are compared with M, the number of queries; there are N keys"),
        ("last-key-lost", {"tail": "short"}, "the last key, N - 1, is hidden from every query"),
    ]

    def mistakes() -> dict[str, tuple[Sequence[Any], str]]:
        starts = "row 0 of the tile is query start_m, and column 0 is key start_n"
        return {
            "starts-forgotten": (tile(m="none", n="none"), starts),
            "starts-exchanged": (tile(m="other", n="other"), f"start_m and start_n are exchanged: {starts}"),
            "inverted": (given(lambda r, c, a, b, M, N: ~((b + c <= a + r + N - M) & (b + c < N))),
                         "1 and 0 are exchanged: 1 where the key is seen"),
            "start-n-forgotten": (given(lambda r, c, a, b, M, N: (c <= a + r + N - M) & (b + c < N)),
                                  "the first column of the tile is number start_n, not 0: the comparison with the "
                                  "query uses it without"),
            **_one_or_two(changes, tile),
        }  # fmt: skip

    _expect_all(answers, mistakes, what="seen")
    compiles(kernel, {"seen_ptr": torch.int32, "start_m": 16, "start_n": 16, "M": 50, "N": 60, "BLOCK_M": 16,
                      "BLOCK_N": 32})  # fmt: skip
    return f"{len(_TILES)} tiles, and it compiles"


# ---- 4.4 ------------------------------------------------------------------------------------------------------------

_SIZES = ((16, 32, 40, 64), (11, 20, 40, 64), (16, 32, 16, 16), (5, 32, 24, 32), (16, 9, 80, 128))  # M, N, D, BLOCK_D


@exercise(
    "4.4",
    title="A head size of 40",
    minutes=20,
    difficulty="Core",
    hints=[
        "A tile has BLOCK_D columns, the matrix HEAD_DIM. So a load needs two conditions: the row exists, and the "
        "column does.",
        "mask=(offs_m[:, None] < M) & (offs_d[None, :] < HEAD_DIM). What must `other` be, so that a column that does "
        "not exist adds nothing to a product?",
        "q = tl.load(Q_ptr + offs_m[:, None] * stride_q + offs_d[None, :], mask=..., other=0.0), k likewise with "
        "offs_n and N, and s = tl.dot(q, k.T).",
    ],
)
def _(scores_kernel: Any) -> str:
    names = ("Q_ptr", "K_ptr", "S_ptr", "stride_q", "stride_k", "M", "N", "HEAD_DIM", "BLOCK_D", "BLOCK_M", "BLOCK_N")
    kernel = kernel_of(scores_kernel, names)
    answers, operands = [], []
    for M, N, D, block in _SIZES:
        case = f"M={M}, N={N}, HEAD_DIM={D}, BLOCK_D={block}, rows apart in memory"
        q, k = _random((M, D), (N, D), seed=D + M)
        wide_q, wide_k = _apart(q, 136), _apart(k, 152)
        s = torch.full((M, N), math.nan, device=q.device)
        with kept(case, Q=wide_q, K=wide_k), in_bounds(case, q=wide_q, k=wide_k, s=s) as traffic:
            kernel[(1,)](wide_q, wide_k, s, 136, 152, M, N, HEAD_DIM=D, BLOCK_D=block, BLOCK_M=16, BLOCK_N=32)
        explain_undefined(traffic, s, case)
        if not s.isfinite().all() and runtime.INTERPRETED:
            raise CheckFailed(
                "some scores are NaN or infinite, though every address was right: what do the masked-off elements "
                "hold? -inf times 0 is NaN, and so is inf - inf",
                diagnosis="nan-from-padding",
                case=case,
            )
        operands.append((q.cpu().double(), k.cpu().double(), D, block))
        answers.append((case, s, q.double() @ k.double().T))

    def given(f: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]) -> list[torch.Tensor]:
        return [f(*x) for x in operands]

    mistakes = {
        "padded-with-ones": (
            given(lambda q, k, d, b: q @ k.T + (b - d)),
            "the columns that do not exist are 1 in both tiles, and add 1 each to every score: other=0.0",
        ),
        "scaled": (given(lambda q, k, d, b: q @ k.T / math.sqrt(d)), "these are the scaled scores; no scale here"),
        "scaled 2": (given(lambda q, k, d, b: q @ k.T / math.sqrt(b)), "these are the scaled scores; no scale here"),
        "last-column-lost": (
            given(lambda q, k, d, b: q[:, :-1] @ k[:, :-1].T),
            "the last column is left out: columns 0 to HEAD_DIM - 1 exist",
        ),
        "half-the-columns": (
            given(lambda q, k, d, b: q[:, : b // 2] @ k[:, : b // 2].T),
            "only the first BLOCK_D / 2 columns count; HEAD_DIM of them exist",
        ),
        "summed": (
            given(lambda q, k, d, b: q.sum(1)[:, None] * k.sum(1)[None, :]),
            "sums are multiplied here; a score is a sum of products",
        ),
        "added": (
            given(lambda q, k, d, b: q.sum(1)[:, None] + k.sum(1)[None, :]),
            "sums are added here; a score is a sum of products",
        ),
        "distance": (given(lambda q, k, d, b: torch.cdist(q, k) ** 2), "these are squared distances, not products"),
        "q-for-k": (
            given(lambda q, k, d, b: q @ torch.cat([q, q.new_zeros(32, d)])[: len(k)].T),
            "these are products of Q with itself: are k's addresses made from K_ptr?",
        ),
        "negative": (given(lambda q, k, d, b: -(q @ k.T)), "every score has the wrong sign"),
        "first-column-only": (
            given(lambda q, k, d, b: q[:, :1] * k[:, :1].T * d),
            "every column is the first one here: is offs_d in the addresses?",
        ),
        "first-column-only 2": (
            given(lambda q, k, d, b: q[:, :1] * k.sum(1)[None, :]),
            "every column of Q is its first one here: is offs_d in its addresses?",
        ),
        "first-column-only 3": (
            given(lambda q, k, d, b: q.sum(1)[:, None] * k[:, :1].T),
            "every column of K is its first one here: is offs_d in its addresses?",
        ),
    }
    _expect_all(answers, mistakes, what="s", tol=0.06)
    pointers = {"Q_ptr": torch.float16, "K_ptr": torch.float16, "S_ptr": torch.float32}
    sizes = {"M": 11, "N": 20, "HEAD_DIM": 40, "BLOCK_D": 64, "BLOCK_M": 16, "BLOCK_N": 32}
    compiles(kernel, pointers | {"stride_q": 136, "stride_k": 152} | sizes)
    return f"{len(_SIZES)} sizes, and it compiles"


_OFFSETS: Mapping[str, tuple[Callable[[int], int], str]] = {
    "none": (lambda d: 0, "is without the offset seq_k - seq_q: the last query stands beside the last key"),
    "negative": (lambda d: -d, "has the offset with the wrong sign: it is seq_k - seq_q"),
    "positive": (abs, "takes the offset seq_k - seq_q as positive: with fewer keys than queries it is negative"),
    "cut": (lambda d: max(0, d), "cuts the offset seq_k - seq_q off at 0: with fewer keys than queries it is negative"),
    "twice": (lambda d: 2 * d, "has the offset seq_k - seq_q twice"),
}
_EDGE_ROWS: Mapping[str, Callable[[int, int, int], int]] = {
    "start": lambda a, z, m: a, "stop": lambda a, z, m: z, "stop - 1": lambda a, z, m: z - 1,
    "the number of rows, stop - start,": lambda a, z, m: z - a, "seq_q - stop": lambda a, z, m: m - z,
    "seq_q - start": lambda a, z, m: m - a, "the middle of start and stop": lambda a, z, m: (a + z) // 2,
    "seq_q": lambda a, z, m: m, "0": lambda a, z, m: 0,
}  # fmt: skip


def _edge_slips(row: str, one: int, rounded: bool, window: str) -> list[Slip]:
    """The slips of one number of `_explain_edges`; each sentence goes on after that number's name."""
    found = [
        Slip("row", name, f"is computed from {name}: it should be computed from {row}", "wrong-row")
        for name in _EDGE_ROWS if name != row
    ] + [Slip("offset", name, why, f"offset-{name}") for name, (_, why) in _OFFSETS.items()]  # fmt: skip
    for more in (-2, -1, 0, 1, 2):
        if more != one:
            count = f"{abs(more - one)} too {'small' if more < one else 'large'}"
            why = f"is computed from a number of keys that is {count}, before it is " + (
                "rounded" if rounded else "cut off at 0 and seq_k"
            )
            found.append(Slip("one", more, why, "off-by-one" if abs(more - one) == 1 else "off-by-two"))
    found += [
        Slip("low", False, "is not cut off at 0, where no key is before that", "below-zero"),
        Slip("high", False, "is not cut off at seq_k: there is no key from there on", "beyond-the-keys"),
        Slip("high", "seq_q", "is cut off at seq_q, the number of queries: there are seq_k keys", "cut-at-seq-q"),
        Slip("high", "last", "is cut off at seq_k - 1: seq_k itself is one past the last key", "cut-too-early"),
        Slip("low", 1, "is cut off at 1: it can be 0", "cut-at-one"),
    ]
    if window:
        other = "right" if window == "left" else "left"
        found += [
            Slip("window", "0", f"does not have {window} in it", "window-ignored"),
            Slip("window", other, f"has {other} where {window} belongs", "sides-exchanged"),
            Slip("window", "sign", f"has {window} with the wrong sign", "wrong-sign"),
            Slip("window", "both", "has left + right where one of them belongs", "both-sides"),
        ]
        return found
    found += [
        Slip("round", "up", "is rounded up to a multiple of BLOCK_N" + (": it is rounded down" if rounded else ""),
             "rounded-up"),
        Slip("round", "up, cut", "is rounded up to a multiple of BLOCK_N" + (": it is rounded down" if rounded else ""),
             "rounded-up"),
        Slip("round", "tiles", "is a number of tiles: a number of keys is wanted", "tiles-for-keys"),
        Slip("round", "first", "is rounded to a multiple of BLOCK_N before it is cut off at 0 and seq_k: cut off first",
             "rounded-before-cut"),
        Slip("round", "row", "has its row rounded to BLOCK_N before the offset is added: round the number of keys",
             "row-rounded"),
        Slip("round", "one less", "is one tile less than it should be", "one-tile-less"),
        Slip("round", "one more", "is one tile more than it should be", "one-tile-more"),
    ]  # fmt: skip
    words = "has its row rounded to BLOCK_N before the offset is added: round the number of keys alone"
    found.append(Slip("row rounded", True, words, "row-rounded"))
    if rounded:
        found.append(Slip("round", "not", "is not rounded down to a multiple of BLOCK_N", "not-rounded"))
    else:
        found.append(Slip("round", "down", "is rounded down to a multiple of BLOCK_N: it is one past the last key that "
                          "a row sees", "rounded-down"))  # fmt: skip
    return found


def _explain_edges(
    blocks: Sequence[tuple[int, ...]], got: Sequence[Numbers], want: Sequence[Numbers],
    numbers: Mapping[str, tuple[str, int, bool]],
) -> tuple[str, str] | None:  # fmt: skip
    """(slug, sentence) of the slips in the first wrong one of two numbers.

    blocks: (start, stop, seq_q, seq_k, BLOCK_N, 0), or with (left, right) at the end. numbers: {name: (the row that it
    is computed from, what is added to it, whether it is rounded down to BLOCK_N)}.
    """
    for i, (name, (row, one, rounded)) in enumerate(numbers.items()):
        if all(x[i] == y[i] for x, y in zip(got, want, strict=True)):
            continue
        window = {"begin": "left", "end": "right"}[name] if "begin" in numbers else ""

        def edge(block: tuple[int, ...], chosen: Chosen, row=row, one=one, rounded=rounded, window=window) -> int:
            start, stop, seq_q, seq_k, tile, right = block
            at = _EDGE_ROWS[str(chosen.get("row", row))](start, stop, seq_q)
            d = seq_k - seq_q
            d = _OFFSETS[str(chosen["offset"])][0](d) if "offset" in chosen else d
            if "row rounded" in chosen or chosen.get("round") == "row":
                at = at // tile * tile
            x = at + d + int(chosen.get("one", one))
            if window:
                left = tile
                sides = {"0": 0, "both": left + right, "left": left, "right": right}
                side = sides[window] * (-1 if chosen.get("window") == "sign" else 1)
                side = sides.get(str(chosen.get("window")), side)
                x += -side if window == "left" else side
            how = chosen.get("round", "down" if rounded else "not")
            if how == "first":
                x = x // tile * tile
            low, high = chosen.get("low", 0), chosen.get("high", True)
            top = {"seq_q": seq_q, "last": seq_k - 1}.get(str(high), seq_k)
            if high is not False and window != "left":
                x = min(x, top)
            if low is not False and window != "right":
                x = max(x, int(low))
            if window:
                return x
            ways = {
                "down": x // tile * tile, "up": -(-x // tile) * tile, "up, cut": min(top, -(-x // tile) * tile),
                "tiles": x // tile, "one less": (x // tile - 1) * tile, "one more": (x // tile + 1) * tile,
            }  # fmt: skip
            return ways.get(str(how), x)

        found = explain(
            lambda chosen, i=i, edge=edge: all(  # type: ignore[misc]
                x[i] == edge(block, chosen) for x, block in zip(got, blocks, strict=True)
            ),
            [replace(slip, sentence=f"{name} {slip.sentence}") for slip in _edge_slips(row, one, rounded, window)],
        )
        return found
    return None


# ---- 4.5 ------------------------------------------------------------------------------------------------------------

_WINDOWS = tuple(
    (start, min(start + block, seq_q), seq_q, seq_k, left, right)
    for seq_q, seq_k, block in ((64, 64, 16), (30, 90, 8), (90, 30, 16), (1, 50, 16))
    for left, right in ((0, 0), (10, 0), (25, 6), (3, 40), (7, 7))
    for start in range(0, seq_q, block)
)


@exercise(
    "4.5",
    title="The keys of a window",
    minutes=15,
    difficulty="Core",
    hints=[
        "Query i stands beside key p = i + seq_k - seq_q. It sees the keys p - left to p + right, its own among them.",
        "The first row of the block sees furthest to the left, the last row, stop - 1, furthest to the right.",
        "begin = max(0, start + seq_k - seq_q - left); end = min(seq_k, stop + seq_k - seq_q + right). One past the "
        "last, so no - 1.",
    ],
)
def _(window_keys: Callable[..., tuple[int, int]]) -> str:
    def right_answer(a: int, z: int, d: int, n: int, left: int, right: int) -> Numbers:
        return max(0, a + d - left), min(n, z + d + right)

    def empty(edges: Numbers) -> bool:
        return edges[0] >= edges[1]

    def given(f: Callable[..., Numbers]) -> list[Numbers]:
        """f(start, stop, offset, seq_k, left, right); what is empty is one answer, however it is written."""
        found = [f(a, z, n - m, n, lo, hi) for a, z, m, n, lo, hi in _WINDOWS]
        return [(0, 0) if empty(x) else x for x in found]

    answers = []
    for x, want in zip(_WINDOWS, given(right_answer), strict=True):
        start, stop, seq_q, seq_k, left, right = x
        case = f"rows {start} to {stop - 1} of {seq_q}, {seq_k} keys, window ({left}, {right})"
        with running(case):
            got = _whole_numbers(window_keys(*x), ("begin", "end"), case)
        answers.append((case, (0, 0) if empty(got) else got, want))

    def begin(f: Callable[..., int]) -> list[Numbers]:
        return given(lambda *x: (f(*x), right_answer(*x)[1]))

    def end(f: Callable[..., int]) -> list[Numbers]:
        return given(lambda *x: (right_answer(*x)[0], f(*x)))

    mistakes = {
        "top-left": (
            given(lambda a, z, d, n, lo, hi: (max(0, a - lo), min(n, z + hi))),
            "query i stands beside key i here; positions are aligned at the end: i + seq_k - seq_q",
        ),
        "offset-sign": (
            given(lambda a, z, d, n, lo, hi: (max(0, a - d - lo), min(n, z - d + hi))),
            "the offset has the wrong sign: query i stands beside key i + seq_k - seq_q",
        ),
        "sides-exchanged": (
            given(lambda a, z, d, n, lo, hi: (max(0, a + d - hi), min(n, z + d + lo))),
            "left and right are exchanged",
        ),
        "negative-begin": (
            begin(lambda a, z, d, n, lo, hi: a + d - lo),
            "begin is negative where the window reaches past the first key: there is no key before 0",
        ),
        "begin-of-the-last-row": (
            begin(lambda a, z, d, n, lo, hi: max(0, z - 1 + d - lo)),
            "begin is where the last row begins to see; the first row sees further to the left",
        ),
        "own-key-counted": (
            begin(lambda a, z, d, n, lo, hi: max(0, a + d - lo + 1)),
            "begin is one key too late: `left` keys *before* the query's own position are seen",
        ),
        "one-key-too-many": (
            begin(lambda a, z, d, n, lo, hi: max(0, a + d - lo - 1)),
            "begin is one key too early: `left` keys before the query's own position are seen, and no more",
        ),
        "left-ignored": (begin(lambda a, z, d, n, lo, hi: 0), "begin is 0 for every block: which keys are too far?"),
        "end-of-the-first-row": (
            end(lambda a, z, d, n, lo, hi: min(n, a + 1 + d + hi)),
            "end is where the first row stops seeing; the last row sees further",
        ),
        "end-one-too-early": (
            end(lambda a, z, d, n, lo, hi: min(n, z - 1 + d + hi)),
            "end is one key too early: it is one past the last key that row stop - 1 sees",
        ),
        "end-one-too-late": (
            end(lambda a, z, d, n, lo, hi: min(n, z + 1 + d + hi)),
            "end is one key too late: the last row is stop - 1, and end is one past the last key that it sees",
        ),
        "end-past-the-keys": (
            end(lambda a, z, d, n, lo, hi: z + d + hi),
            "end goes past seq_k: there is no key from seq_k on",
        ),
        "right-ignored": (
            end(lambda a, z, d, n, lo, hi: min(n, z + d)),
            "end is that of a causal mask: `right` keys behind the query's own position are seen too",
        ),
        "no-end": (end(lambda a, z, d, n, lo, hi: n), "end is seq_k for every block: which keys are too far?"),
    }
    for slug, f, why in (
        ("offset-not-negative", abs, "takes the offset seq_k - seq_q as positive; with fewer keys it is negative"),
        ("offset-cut", lambda d: max(0, d), "is cut off at 0; with fewer keys than queries it is negative"),
    ):
        mistakes[slug] = (
            given(lambda a, z, d, n, lo, hi, f=f: right_answer(a, z, f(d), n, lo, hi)),
            f"the offset seq_k - seq_q {why}" if "cut" in slug else f"the position {why}",
        )
    mistakes |= {
        "begin-top-left": (
            begin(lambda a, z, d, n, lo, hi: max(0, a - lo)),
            "begin is computed from key `start`; row `start` stands beside key start + seq_k - seq_q",
        ),
        "end-top-left": (
            end(lambda a, z, d, n, lo, hi: min(n, z + hi)),
            "end is computed from key `stop`; row stop - 1 stands beside key stop - 1 + seq_k - seq_q",
        ),
        "left-added": (
            begin(lambda a, z, d, n, lo, hi: max(0, a + d + lo)),
            "begin lies after the query's position: `left` keys *before* it are seen",
        ),
        "right-subtracted": (
            end(lambda a, z, d, n, lo, hi: min(n, z + d - hi)),
            "end lies before the query's position: `right` keys *after* it are seen",
        ),
        "own-key-only": (
            begin(lambda a, z, d, n, lo, hi: max(0, a + d)),
            "begin is the query's own position: `left` keys before it are seen too",
        ),
        "first-row-missing": (
            given(lambda a, z, d, n, lo, hi: (max(0, z - 1 + d - lo), min(n, a + 1 + d + hi))),
            "these are the keys that *every* row of the block sees; the keys that *some* row sees are wanted",
        ),
        "exchanged": (
            given(lambda *x: right_answer(*x)[::-1]),
            "the two are exchanged: return (begin, end)",
        ),
        "a-length": (
            given(lambda a, z, d, n, lo, hi: (max(0, a + d - lo), min(n, z + d + hi) - max(0, a + d - lo))),
            "the second number is how many keys there are; `end` is wanted, one past the last",
        ),
        "cut-at-seq-q": (
            given(lambda a, z, d, n, lo, hi: (max(0, a + d - lo), min(n - d, z + d + hi))),
            "end is cut off at seq_q, the number of queries; there are seq_k keys",
        ),
        "last-key-lost": (
            end(lambda a, z, d, n, lo, hi: min(n - 1, z + d + hi)),
            "end is never seq_k: it is one *past* the last key",
        ),
    }
    unseen = [(case, got) for case, got, want in answers if want == (0, 0) and got != want]
    if unseen and all(got == want for _, got, want in answers if want != (0, 0)):
        case, got = unseen[0]
        sentence = f"it is {got}, and no row of this block sees a key: begin >= end is wanted there"
        raise CheckFailed(sentence, diagnosis="nothing-is-seen", case=case)

    def slipped() -> tuple[str, str] | None:
        seen = [i for i, (_, got, want) in enumerate(answers) if got != (0, 0) != want]
        return _explain_edges(
            [(*_WINDOWS[i][:4], _WINDOWS[i][4], _WINDOWS[i][5]) for i in seen],
            [answers[i][1] for i in seen], [answers[i][2] for i in seen],
            {"begin": ("start", 0, False), "end": ("stop", 0, False)},
        )  # fmt: skip

    with explained(slipped):
        _expect_numbers(answers, ("begin", "end"), mistakes)
    return f"{len(_WINDOWS)} blocks of queries"


# ---- 4.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "4.6",
    title="A cap that does not overflow",
    minutes=15,
    difficulty="Core",
    hints=[
        "With t = e^(2z), tanh(z) is (t - 1) / (t + 1). What is that for z = 100 in float32? Rewrite the fraction so "
        "that infinity is harmless.",
        "(t - 1) / (t + 1) = 1 - 2 / (t + 1). For z = 100 that is 1 - 2 / inf = 1, and for z = -100 it is 1 - 2 / 1.",
        "z = x / cap, so y = cap * (1 - 2 / (1 + tl.exp(2 * x / cap))).",
    ],
)
def _(cap_kernel: Any) -> str:
    kernel = kernel_of(cap_kernel, ("x_ptr", "y_ptr", "cap", "BLOCK"))
    edge = [0.0, 1e-3, -1e-3, 0.5, -0.5, 3.0, -3.0, 40.0, -40.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30, math.inf]
    times = [z * sign for z in (5, 12, 20, 30, 46, 60, 87, 90, 120, 200) for sign in (1, -1)]  # where exp overflows
    got, inputs, stored = [], [], []
    for cap in (50.0, 1.0, 3.0):
        (x,) = _random((128 - len(edge) - len(times),), seed=int(cap), dtype=torch.float32)
        x = torch.cat([x * cap, torch.tensor(times, device=x.device) * cap, torch.tensor(edge, device=x.device)])
        y = torch.full_like(x, math.nan)
        case = f"cap={cap:g}, x up to infinity"
        with kept(case, x=x), in_bounds(case, x=x, y=y):
            kernel[(1,)](x, y, cap, BLOCK=128)
        inputs.append((x.cpu().double(), cap))
        got.append((case, (y / cap).clamp(-10, 10)))  # far beyond any right one
        stored.append(y.cpu().double())
    right = [torch.tanh(x / cap) for x, cap in inputs]
    for (case, y), want, (x, cap) in zip(got, right, inputs, strict=True):
        lost = y.cpu().isnan()
        expect(not lost.all(), "y is NaN everywhere, or never written", diagnosis="never-written", case=case)
        calm = (x / cap).abs() < 20
        if lost.any() and not lost[calm].any() and bool(((y.cpu() - want)[calm].abs() < 1e-4).all()):
            first = x[lost].abs().min().item()
            raise CheckFailed(
                f"right for small x, NaN from |x| = {first:g} on: an exponential is infinite there, and inf / inf, "
                "inf - inf and inf * 0 are NaN; write the fraction so that only its denominator becomes infinite",
                diagnosis="overflow",
                case=case,
            )

    def given(f: Callable[[torch.Tensor, float], torch.Tensor]) -> list[torch.Tensor]:
        return [(f(x, cap) / cap).clamp(-10, 10) for x, cap in inputs]

    log2e = math.log2(math.e)
    mistakes = {
        "cap-not-restored": (
            given(lambda x, c: torch.tanh(x / c)),
            "y stays between -1 and 1: that is tanh(x / cap), and cap times it is wanted",
        ),
        "not-divided": (given(lambda x, c: c * torch.tanh(x)), "that is cap * tanh(x): x is not divided by the cap"),
        "multiplied": (
            given(lambda x, c: c * torch.tanh(x * c)),
            "that is cap * tanh(x * cap): x is divided by the cap, not multiplied",
        ),
        "two-missing": (
            given(lambda x, c: c * torch.tanh(x / c / 2)),
            "that is cap * tanh(x / (2 cap)): the exponential in tanh is that of *twice* its argument",
        ),
        "exp2-for-exp": (
            given(lambda x, c: c * torch.tanh(x / c / log2e)),
            "2 is raised to the power where e is meant: exp2(z * log2(e)) is exp(z)",
        ),
        "log2e-twice": (
            given(lambda x, c: c * torch.tanh(x / c * log2e)),
            "log2(e) is multiplied in, and then e is raised to the power: it belongs to exp2",
        ),
        "clipped": (
            given(lambda x, c: x.clamp(-c, c)),
            "that is x, cut off at the cap; tanh bends it softly: near the cap it is well below x",
        ),
        "not-capped": (given(lambda x, c: x), "y is x: nothing is capped"),
        "wrong-sign": (given(lambda x, c: -c * torch.tanh(x / c)), "every y has the wrong sign"),
        "sigmoid": (
            given(lambda x, c: c * torch.sigmoid(x / c)),
            "that is cap times the sigmoid, between 0 and cap; tanh(z) is 2 sigmoid(2z) - 1",
        ),
        "sigmoid 2": (
            given(lambda x, c: c * torch.sigmoid(2 * x / c)),
            "that is cap times the sigmoid, between 0 and cap; tanh(z) is 2 sigmoid(2z) - 1",
        ),
        "sign-lost": (
            given(lambda x, c: c * torch.tanh((x / c).abs())),
            "y is right for x > 0; for x < 0 it has the sign of x > 0",
        ),
        "divided-by-cap": (
            given(lambda x, c: torch.tanh(x / c) / c),
            "tanh(x / cap) is divided by the cap; cap times it is wanted",
        ),
        "halved": (given(lambda x, c: c * torch.tanh(x / c) / 2), "every y is half of what it should be"),
        "log2e-divided": (
            given(lambda x, c: c * torch.tanh(x / c / log2e**2)),
            "exp2(z / log2(e)) is not exp(z): the exponent is multiplied by log2(e)",
        ),
        "x-times-tanh": (
            given(lambda x, c: x * torch.tanh(x / c)),
            "that is x * tanh(x / cap): it is cap * tanh(x / cap)",
        ),
    }
    answers = [(case, y, want) for (case, y), want in zip(got, right, strict=True)]
    try:
        _expect_all(answers, mistakes, what="y / cap", tol=2e-5)
    except CheckFailed as failed:
        if failed.diagnosis in ("wrong-value", *weights.SLUGS):
            _tell_smallest(answers, inputs, stored)
        raise
    compiles(kernel, {"x_ptr": torch.float32, "y_ptr": torch.float32, "cap": 50.0, "BLOCK": 128})
    return "3 caps, from 0 to infinity, and it compiles"


def _tell_smallest(
    answers: Sequence[Answer], inputs: Sequence[tuple[torch.Tensor, float]], stored: Sequence[torch.Tensor]
) -> None:
    """CheckFailed with the wrong y of the smallest |x|, which says most."""
    __tracebackhide__ = True
    for (case, y, want), (x, cap), mine in zip(answers, inputs, stored, strict=True):
        wrong = ~((y.cpu() - want).abs() <= 2e-5)
        if wrong.any():
            at = int(torch.where(wrong, x.abs(), math.nan).nan_to_num(math.inf, posinf=1e38).argmin())
            raise CheckFailed(
                f"y is wrong for {int(wrong.sum())} of {len(x)} numbers; that of the smallest |x| is x = {x[at]:.6g}: "
                f"there y is {mine[at]:.6g}, it should be {want[at] * cap:.6g}",
                case=case,
            )


# ---- 4.7 ------------------------------------------------------------------------------------------------------------

_CAPPED = (  # M, N, cap, scale
    (40, 40, 50.0, 0.25), (48, 48, 1.0, 0.5), (20, 70, 2.0, 0.5), (50, 33, 2.0, 0.5), (33, 33, 3.0, 0.25),
)  # fmt: skip
_ONE_HEAD = {"HEAD_DIM": 64, "BLOCK_M": 16, "BLOCK_N": 32}  # no two alike: an axis that is mixed up shows


@exercise(
    "4.7",
    title="Nobody looks ahead",
    minutes=20,
    difficulty="Bug hunt",
    untouched="46c8718cd8b4",
    history="Dao-AILab/flash-attention, pull request 1025 (2024), where the review caught it; onnx/onnx, issue 7865 "
    "(2026), where the standard itself had it",
    hints=[
        "Which rows are right, if there are any? What do they have in common? Try a very large cap, too.",
        "Follow one hidden key through the loop. Its score is -inf after the mask. What is it one line later?",
        "cap * tanh(-inf / cap) is -cap, a number like any other. The scores have to be capped first, and masked then.",
    ],
)
def _(capped_causal_kernel: Any) -> str:
    names = ("Q_ptr", "K_ptr", "V_ptr", "O_ptr", "M", "N", "scale", "cap", "HEAD_DIM", "BLOCK_M", "BLOCK_N")
    kernel = kernel_of(capped_causal_kernel, names)
    answers, operands = [], []
    for M, N, cap, scale in _CAPPED:
        case = f"M={M}, N={N}, cap={cap:g}, scale={scale:g}"
        q, k, v = _random((M, 64), (N, 64), (N, 64), seed=M + N)
        v = v + 0.5
        o = torch.full_like(q, math.nan)
        with kept(case, q=q, k=k, v=v), in_bounds(case, q=q, k=k, v=v, o=o):
            kernel[(-(-M // 16),)](q, k, v, o, M, N, scale, cap, **_ONE_HEAD)
        operands.append((q.cpu().double(), k.cpu().double(), v.cpu().double(), cap, scale))
        answers.append((case, o, _capped(*operands[-1])))

    def given(**changes: Any) -> list[torch.Tensor]:
        return [_capped(*x, **changes) for x in operands]

    leak = "a hidden key has the score -cap, and with it a share of the softmax"
    changes: list[tuple[str, Mapping[str, Any], str]] = [
        ("capped-after-mask", {"hidden": "capped"},
         f"{leak}: only -inf silences it, and a cap after the mask makes -cap of that"),
        ("hidden-is-zero", {"hidden": "zero"},
         "a hidden key has the score 0, and with it a share of the softmax: only -inf silences a key"),
        ("tail-alone-silenced", {"hidden": "capped but the tail"},
         f"{leak}: the keys past the end are silenced after the cap, those that the causal mask hides before it"),
        ("hidden-in-the-sum", {"hidden": "capped", "behind_sum": True},
         "a hidden key is no longer in the product with V, but its weight is still in the sum that O is divided by"),
        ("not-capped", {"cap_it": False}, "the scores are not capped at all"),
        ("capped-twice", {"twice": True}, "the scores are capped twice"),
        ("cap-not-restored", {"outer": 1.0}, "tanh(score / cap) is used as it is: times the cap it is the score"),
        ("two-missing", {"inner": 0.5}, "that is tanh(score / (2 cap)): the exponential in tanh is that of twice its "
         "argument"),
        ("not-masked", {"mask": "none"}, "no key is hidden: the mask does nothing any more"),
        ("tail-only", {"mask": "tail"}, "only the keys past the end are hidden; the causal mask is lost"),
        ("top-left", {"mask": "top-left"}, "the mask is aligned at the first key; query i sees j <= i + N - M"),
        ("diagonal-missing", {"mask": "strict"}, "a query does not see its own position any more: <=, not <"),
        ("one-too-many", {"mask": "one"}, "each query sees one key too many, the one behind its own position"),
        ("offset-sign", {"mask": "sign"}, "the offset of the mask has the wrong sign: it is N - M"),
        ("future-seen", {"mask": "back"}, "the comparison of the mask is turned round"),
        ("scale-missing", {"scaled": 0}, "the scores are not multiplied by the scale any more"),
        ("scaled-twice", {"scaled": 2}, "the scale is multiplied in twice"),
        ("scaled-after-cap", {"scaled": 0, "after": 1}, "the scale is multiplied in after the cap; it comes before"),
        ("scaled-twice", {"after": 1}, "the scale is multiplied in before the cap, and after it once more"),
        ("clipped", {"clip": True}, "the scores are cut off at the cap; tanh bends them softly"),
    ]  # fmt: skip

    def mistakes() -> dict[str, tuple[Sequence[Any], str]]:
        after_too = given(hidden="capped", twice=True)
        return {
            "capped-after-mask": (given(hidden="capped"), changes[0][2]),
            "capped-after-mask 2": (after_too, f"{leak}: the cap is applied before the mask now, and after it as well"),
            **_one_or_two(changes, given),
        }

    if watched() is None:
        for case, o, want in answers:
            _explain_masked(o.cpu(), want, case)
    _expect_all(answers, mistakes, what="o", tol=0.01)
    pointers = dict.fromkeys(("Q_ptr", "K_ptr", "V_ptr", "O_ptr"), torch.float16)
    compiles(kernel, pointers | {"M": 48, "N": 48, "scale": 0.25, "cap": 4.0} | _ONE_HEAD)
    return f"{len(_CAPPED)} cases, and it compiles"


def _explain_masked(o: torch.Tensor, want: torch.Tensor, case: str) -> None:
    """CheckFailed where a row that sees no key is not 0, and the others are right."""
    __tracebackhide__ = True
    none = (want == 0).all(1)
    wrong = ~((o.double() - want).abs() <= 0.01).all(1)
    if wrong.any() and not wrong[~none].any():
        mean = bool(o[none].isfinite().all())
        raise CheckFailed(
            "the rows that see no key are not 0, all others are right: "
            + (
                "they hold numbers, as if some key counted; every score of such a row should be -inf"
                if mean
                else "they hold NaN; where is -inf - (-inf), or 0 / 0?"
            ),
            diagnosis="masked-rows",
            case=case,
        )


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, scale: float, *, hidden: str = "-inf",
    mask: str = "causal", cap_it: bool = True, twice: bool = False, outer: float | None = None, inner: float = 1.0,
    scaled: int = 1, after: int = 0, clip: bool = False, behind_sum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Causal attention with capped scores, in tiles of 32 keys, the last filled up; right or with a mistake."""
    M, N = len(q), len(k)
    more = -N % 32
    k, v = (torch.cat([x, x.new_zeros(more, x.shape[1])]) for x in (k, v))

    def capped(s: torch.Tensor) -> torch.Tensor:
        return s.clamp(-cap, cap) if clip else (cap if outer is None else outer) * torch.tanh(inner * s / cap)

    s = q @ k.T * scale**scaled
    i, j = torch.arange(M)[:, None], torch.arange(N + more)[None, :]
    causal = {
        "causal": j <= i + N - M, "top-left": j <= i, "strict": j < i + N - M, "one": j <= i + N - M + 1,
        "sign": j <= i + M - N, "back": j >= i + N - M,
    }.get(mask, j == j)  # fmt: skip
    seen = causal & (j < N) if mask != "none" else causal & (j == j)
    value = {"-inf": -math.inf, "zero": 0.0}.get(hidden, -cap)
    s = capped(s) if cap_it else s
    if twice:
        s = capped(s)
    s = (s * scale**after).masked_fill(~seen, value)
    if hidden == "capped but the tail":
        s[:, N:] = -math.inf
    lse = torch.logsumexp(s, 1, keepdim=True)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0))
    return (p.masked_fill(~seen, 0.0) if behind_sum else p) @ v


# ---- 4.8 ------------------------------------------------------------------------------------------------------------

_LAYOUTS = {  # heads, stride_b, stride_h, stride_n
    "a small tensor": (3, 6144, 2048, 64),
    "rows far apart, as in a long sequence": (2, 64, 16, 2**27),
    "batches far apart": (2, 2**30, 2**20, 64),
    "heads far apart": (8, 128, 2**29, 128),
    "everything far apart": (4, 2**30 + 64, 2**29 + 32, 2**27 + 16),
}


@exercise(
    "4.8",
    title="Far apart in memory",
    minutes=15,
    difficulty="Bug hunt",
    untouched="90c7a4e9a493",
    history="thu-ml/SageAttention, issue 386 (2026); fla-org/flash-linear-attention, issue 1080 (2026); "
    "pytorch/pytorch, issue 190857 (2026), in FlexAttention's backward",
    hints=[
        "Subtract what is stored from what should be stored. Which number is it always a multiple of?",
        "2^32. A sum or a product of 32-bit numbers has 32 bits, and is converted only when it is already wrong.",
        "Convert before multiplying: batch, head and rows each become .to(tl.int64), and everything after that has 64 "
        "bits.",
    ],
)
def _(row_offsets_kernel: Any) -> str:
    kernel = kernel_of(row_offsets_kernel, ("out_ptr", "heads", "stride_b", "stride_h", "stride_n", "BLOCK"))
    answers, terms = [], []
    for case, (heads, stride_b, stride_h, stride_n) in _LAYOUTS.items():
        out = torch.full((3 * heads, 32), -1, dtype=torch.int64, device=runtime.device())
        with in_bounds(case, out=out):
            kernel[(len(out),)](out, heads, stride_b, stride_h, stride_n, BLOCK=32)
        pid, rows = torch.arange(3 * heads)[:, None], torch.arange(32)[None, :]
        parts = (pid // heads * stride_b, pid % heads * stride_h, rows * stride_n)
        terms.append(parts)
        answers.append((case, out, sum(parts)))

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return (x + 2**31) % 2**32 - 2**31

    def given(f: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [f(*x) for x in terms]

    mistakes = {
        "offset-overflow": (
            given(lambda b, h, n: wrapped(b + h + n)),
            "every offset is right up to a multiple of 2^32: products and sums of 32-bit numbers have 32 bits, and the "
            "conversion comes when they are already wrong",
        ),
        "products-overflow": (
            given(lambda b, h, n: wrapped(b) + wrapped(h) + wrapped(n)),
            "the sums have 64 bits now, but each product still has 32: convert an index before it is multiplied",
        ),
        "products-overflow 2": (
            given(lambda b, h, n: wrapped(b + h) + wrapped(n)),
            "only the last sum has 64 bits; the products, and batch and head together, still have 32",
        ),
        "batch-and-head-overflow": (
            given(lambda b, h, n: wrapped(b + h) + n),
            "the rows have 64 bits now; the begin of batch and head still has 32",
        ),
        "batch-and-head-overflow 2": (
            given(lambda b, h, n: wrapped(b) + wrapped(h) + n),
            "the rows have 64 bits now; batch * stride_b and head * stride_h still have 32",
        ),
        "batch-overflows": (
            given(lambda b, h, n: wrapped(b) + h + n),
            "batch * stride_b still has 32 bits; head and rows have 64",
        ),
        "head-overflows": (
            given(lambda b, h, n: b + wrapped(h) + n),
            "head * stride_h still has 32 bits; batch and rows have 64",
        ),
        "rows-overflow": (
            given(lambda b, h, n: b + h + wrapped(n)),
            "rows * stride_n still has 32 bits; batch and head have 64",
        ),
        "head-and-rows-overflow": (
            given(lambda b, h, n: b + wrapped(h) + wrapped(n)),
            "batch has 64 bits now; head * stride_h and rows * stride_n still have 32",
        ),
        "batch-and-rows-overflow": (
            given(lambda b, h, n: wrapped(b) + h + wrapped(n)),
            "head has 64 bits now; batch * stride_b and rows * stride_n still have 32",
        ),
        "unsigned": (
            given(lambda b, h, n: (b + h + n) % 2**32),
            "no offset is negative any more, but each is right only up to a multiple of 2^32: unsigned, 32 bits hold "
            "one bit more, and 64 are needed",
        ),
    }
    layout = [(pid, h, b, hs, n) for pid, (h, b, hs, n) in zip(
        (torch.arange(3 * x[0])[:, None] for x in _LAYOUTS.values()), _LAYOUTS.values(), strict=True)]  # fmt: skip
    rows = torch.arange(32)[None, :]
    mistakes |= {
        "strides-exchanged": (
            [p // h * hs + p % h * b + rows * n for p, h, b, hs, n in layout],
            "batch is multiplied by the heads' stride, and head by the batches'",
        ),
        "batch-and-head-exchanged": (
            [p % h * b + p // h * hs + rows * n for p, h, b, hs, n in layout],
            "batch and head are exchanged: program pid has head pid % heads",
        ),
        "row-stride-missing": (given(lambda b, h, n: b + h + rows), "the rows are not multiplied by their stride"),
        "head-missing": (given(lambda b, h, n: b + n), "the head's offset is missing"),
        "batch-missing": (given(lambda b, h, n: h + n), "the batch's offset is missing"),
        "rows-of-the-program": (
            [p // h * b + p % h * hs + (p * 32 + rows) * n for p, h, b, hs, n in layout],
            "the rows count on from program to program; every program writes down the *first* BLOCK rows of its head",
        ),
    }
    if watched() is None:
        _explain_rounded(answers)
    _expect_all(answers, mistakes, what="the offset", tol=0.5)
    compiles(kernel, {"out_ptr": torch.int64, "heads": 4, "stride_b": 2**30 + 64, "stride_h": 2**29 + 32,
                      "stride_n": 2**27 + 16, "BLOCK": 32})  # fmt: skip
    return f"{len(_LAYOUTS)} layouts, and it compiles"


def _explain_rounded(answers: Sequence[Answer]) -> None:
    """CheckFailed where every offset is nearly right."""
    __tracebackhide__ = True
    for case, got, want in answers:
        off = (got.cpu() - want).abs()
        if bool((off <= 1e-6 * want).all()) and off.any():
            raise CheckFailed(
                f"the offsets are rounded: the largest is off by {int(off.max())}; an address needs every bit, and "
                "float32 has 24 of them",
                diagnosis="float-offsets",
                case=case,
            )


# ---- 4.9 ------------------------------------------------------------------------------------------------------------

_SINKS = ((20, 70, 0.0), (16, 32, 3.0), (33, 50, -2.0), (5, 90, 1.0))  # M, N, sink
_EXTREME_SINKS = ((20, 40, -math.inf), (20, 40, 200.0), (20, 40, -200.0))  # tried once the others are right


@exercise(
    "4.9",
    title="An attention sink",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "The sink is one more key, whose score is `sink` for every query, and whose value is a row of zeros. What does "
        "such a key change in m_i, in l_i, in acc?",
        "Imagine that the loop had already met it, alone, before the first tile. Then the state is m_i = sink, l_i = "
        "exp(0) = 1, acc = 0. (Do not compute the 0 as sink - m_i: for a sink of -inf that is NaN.)",
        "m_i = tl.full([BLOCK_M], sink, tl.float32), l_i = tl.full([BLOCK_M], 1.0, tl.float32), acc = 0, and the two "
        "lines at the end as ever. (Without a sink the first correction is exp(-inf), which forgets the 1.)",
    ],
)
def _(sink_attention_kernel: Any) -> str:
    names = ("Q_ptr", "K_ptr", "V_ptr", "O_ptr", "LSE_ptr", "M", "N", "scale", "sink", "HEAD_DIM", "BLOCK_M", "BLOCK_N")
    kernel = kernel_of(sink_attention_kernel, names)
    operands = []

    def answers_for(cases: Sequence[tuple[int, int, float]]) -> tuple[list[Answer], list[Answer]]:
        o_answers, lse_answers = [], []
        for M, N, sink in cases:
            case = f"M={M}, N={N}, sink={sink:g}"
            q, k, v = _random((M, 64), (N, 64), (N, 64), seed=M + N)
            v = v + 0.5
            o, lse = torch.full_like(q, math.nan), torch.full((M,), math.nan, device=q.device)
            with kept(case, q=q, k=k, v=v), in_bounds(case, q=q, k=k, v=v, o=o, lse=lse):
                kernel[(-(-M // 16),)](q, k, v, o, lse, M, N, 0.2, sink, **_ONE_HEAD)
            s = q.cpu().double() @ k.cpu().double().T * 0.2
            operands.append((s, v.cpu().double(), sink))
            want_o, want_lse = _with_sink(*operands[-1])
            o_answers.append((case, o, want_o))
            lse_answers.append((case, lse, want_lse))
        return o_answers, lse_answers

    o_answers, lse_answers = answers_for(_SINKS)
    sums = [_sums(*x) for x in operands]  # acc, l, m and the sink's term, of one maximum; m of the keys alone

    def given(which: int, f: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [f(*x)[which] for x in operands[: len(_SINKS)]]

    def without(s, v, sink):
        return _with_sink(s, v, -math.inf)

    def times(factor: float):
        return lambda s, v, sink: _with_sink(s, v, sink * factor)

    def per_tile(s, v, sink):
        return _with_sink(s, v, sink + math.log(-(-s.shape[1] // 32)))

    def per_tile_too(s, v, sink):
        return _with_sink(s, v, sink + math.log(1 - (-s.shape[1] // 32)))

    def unshifted(s, v, sink):  # exp(sink) is added as it is, and the others are relative to the maximum
        m = s.amax(1, keepdim=True)
        return _with_sink(s, v, sink, weight=torch.exp(sink + 0 * m), m=m)

    def a_value(s, v, sink):
        o, lse = _with_sink(s, v, sink)
        return o + torch.exp(sink - lse)[:, None], lse

    def of_every_score(s, v, sink):
        return _with_sink(s + sink, v, -math.inf)

    told = {
        "sink-ignored": (without, "the result is that without a sink: does l_i hold its term, exp(sink - m_i)?"),
        "sink-is-zero": (times(0.0), "the sink counts as 0, whatever it is: its term is exp(sink - m_i)"),
        "sink-is-one": (lambda s, v, sink: _with_sink(s, v, 1.0), "the sink counts as 1, whatever it is"),
        "sink-doubled": (times(2.0), "twice the sink counts: its term is exp(sink - m_i)"),
        "sink-halved": (times(0.5), "half of the sink counts: its term is exp(sink - m_i)"),
        "sink-for-each-key": (lambda s, v, sink: _with_sink(s, v, sink + math.log(s.shape[1])),
                              "the sink is counted once for each key: it is one key"),
        "sink-term-one": (lambda s, v, sink: _with_sink(s, v, sink, 0 * s[:, :1] + 1.0, s.amax(1, keepdim=True)),
                          "the sink's term is 1 beside those of the keys: it is exp(sink - m_i)"),
        "sink-scaled": (times(0.2), "the sink is multiplied by the scale: it is a score already"),
        "sink-negated": (times(-1.0), "the sink counts with the wrong sign"),
        "sink-in-base-2": (times(math.log2(math.e)), "the sink is multiplied by log2(e), and e is raised to the power"),
        "sink-in-base-2 2": (times(math.log(2)), "2 is raised to the power of the sink; its term is e^(sink - m_i)"),
        "sink-in-every-tile": (per_tile, "the sink is counted once in every tile; it is one key"),
        "sink-in-every-tile 2": (per_tile_too, "the sink is counted before the loop and in every tile; it is one key"),
        "sink-not-shifted": (unshifted,
                             "the sink's term is exp(sink), those of the keys are relative to m_i: all need one m"),
        "sink-has-a-value": (a_value, "the sink's share is added to o: its value is a row of zeros"),
        "sink-added-to-scores": (of_every_score, "the sink is added to every score, which changes no softmax: it is a "
                                 "score of its own"),
    }  # fmt: skip
    mistakes = {slug: (given(0, f), why) for slug, (f, why) in told.items() if slug != "sink-added-to-scores"}
    for slug, f, why in (
        ("not-normalised", lambda acc, l, t, c: acc, "o is acc as it is; it has to be divided by l_i"),
        ("multiplied-by-l", lambda acc, l, t, c: acc * l, "acc is multiplied by l_i, and should be divided by it"),
        ("sink-twice", lambda acc, l, t, c: acc / (l + t), "the sink is counted twice"),
        ("acc-not-rescaled", lambda acc, l, t, c: acc / c / l,
         "where the sink is the new maximum, l_i is rescaled and acc is not"),
        ("l-not-rescaled", lambda acc, l, t, c: acc / ((l - t) / c + t),
         "where the sink is the new maximum, acc is rescaled and l_i is not"),
        ("correction-inverted", lambda acc, l, t, c: acc / c**2 / ((l - t) / c**2 + t),
         "the correction is turned round: what was summed for the old maximum is multiplied by exp(old - new)"),
    ):  # fmt: skip
        columns = [f(acc, l, t, torch.exp(old - m)) for acc, l, m, t, old in sums]
        mistakes[f"{slug} {len(mistakes)}"] = (columns, why)
    plus = [acc / (l - t + x[2]) for (acc, l, m, t, _), x in zip(sums, operands, strict=True)]
    mistakes["sink-not-exponential"] = (plus, "the sink itself is added to l_i; its term is exp(sink - m_i)")
    keys = [_sums(x[0], x[1], -math.inf) for x in operands]
    plus = [acc / (l + x[2]) for (acc, l, *_), x in zip(keys, operands, strict=True)]
    mistakes["sink-not-exponential 2"] = (plus, "the sink itself is added to l_i; its term is exp(sink - m_i)")
    plus = [(acc + x[2] * t) / l for (acc, l, m, t, _), x in zip(sums, operands, strict=True)]
    mistakes["acc-holds-the-sink"] = (plus, "acc begins with the sink; the sink's value is a row of zeros")
    _expect_all(o_answers, mistakes, what="o", tol=0.01)
    lse_mistakes = {slug: (given(1, f), f"o is right, lse is not: {why}") for slug, (f, why) in told.items()}
    without_sink = (given(1, without), "o is right; lse is the logarithm of the sum without the sink")
    lse_mistakes = {"lse-without-sink": without_sink} | lse_mistakes
    for slug, lse_of, why in (
        ("lse-no-logarithm", lambda l, m, t, old, sink: m + l, "m_i + l_i: the logarithm is missing"),
        ("lse-in-base-2", lambda l, m, t, old, sink: m + l.log2(), "m_i + log2(l_i): the natural logarithm is wanted"),
        ("lse-without-m", lambda l, m, t, old, sink: l.log(), "log(l_i): l_i is relative to e^m_i"),
        ("lse-multiplied", lambda l, m, t, old, sink: m * l.log(), "m_i times log(l_i): it is their sum"),
        ("lse-sign", lambda l, m, t, old, sink: m - l.log(), "m_i - log(l_i): it is their sum"),
        ("sink-twice", lambda l, m, t, old, sink: m + l.log() + sink, "right plus the sink, which is in l_i already"),
        ("sink-twice", lambda l, m, t, old, sink: m + (l + t).log(), "the logarithm of a sum that has the sink twice"),
        ("lse-of-the-old-m", lambda l, m, t, old, sink: old + l.log(),
         "the old maximum, without the sink, plus log(l_i), and l_i is relative to the new one"),
    ):  # fmt: skip
        columns = [
            lse_of(l[:, 0], m[:, 0], t[:, 0], old[:, 0], x[2])
            for (_, l, m, t, old), x in zip(sums, operands, strict=True)
        ]
        lse_mistakes[f"{slug} {len(lse_mistakes)}"] = (columns, f"o is right; lse is {why}")
    _expect_all(lse_answers, lse_mistakes, what="lse", tol=2e-3)
    for (case, o, want_o), (_, lse, want_lse) in zip(*answers_for(_EXTREME_SINKS), strict=True):
        _explain_sink(o, lse, case)
        expect_close(o, want_o, what="o", case=case, tol=0.01)
        expect_close(lse, want_lse, what="lse", case=case, tol=2e-3)
    pointers = dict.fromkeys(("Q_ptr", "K_ptr", "V_ptr", "O_ptr"), torch.float16) | {"LSE_ptr": torch.float32}
    compiles(kernel, pointers | {"M": 20, "N": 70, "scale": 0.2, "sink": 1.5} | _ONE_HEAD)
    return f"{len(_SINKS) + len(_EXTREME_SINKS)} cases, and it compiles"


def _sums(s: torch.Tensor, v: torch.Tensor, sink: float) -> tuple[torch.Tensor, ...]:
    """acc, l, m and the sink's term, all of the maximum m of keys and sink; and the maximum of the keys alone."""
    old = s.amax(1, keepdim=True)
    m = old.clamp(min=sink)
    term = torch.exp(sink - m)
    p = torch.exp(s - m)
    return p @ v, p.sum(1, keepdim=True) + term, m, term, old


def _with_sink(
    s: torch.Tensor, v: torch.Tensor, sink: float, weight: torch.Tensor | None = None, m: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of scores s with one more key of score `sink` and value 0; its term may be given, relative to m."""
    if weight is None or m is None:
        m = s.amax(1, keepdim=True).clamp(min=sink)
        weight = torch.exp(sink - m)
    p = torch.exp(s - m)
    total = p.sum(1, keepdim=True) + weight
    return p @ v / total, (m + total.log())[:, 0]


def _explain_sink(o: torch.Tensor, lse: torch.Tensor, case: str) -> None:
    """CheckFailed where a result is not finite, though those of smaller sinks are right."""
    __tracebackhide__ = True
    finite = bool(o.isfinite().all() and lse.isfinite().all())
    if "inf" in case:
        expect(
            finite,
            "not finite where the sink is -inf, which is ordinary attention: which difference is -inf - (-inf)?",
            diagnosis="no-sink-is-nan",
            case=case,
        )
    expect(
        finite,
        "not finite, though smaller sinks are right: of which number is an exponential or a logarithm taken here? "
        "Relative to a maximum that the sink is part of, no exponent is above 0",
        diagnosis="sink-overflows",
        case=case,
    )


# ---- 4.10 -----------------------------------------------------------------------------------------------------------


@exercise(
    "4.10",
    title="From an empty page",
    minutes=75,
    difficulty="Stretch",
    hints=[
        "Begin with phase 3's kernel, and with one program for each block of each head of each batch, as in 4.1. Run "
        "the check: it says which case fails first.",
        "Four strides per tensor. The pointer of a head is Q_ptr + batch * stride_qb + head * stride_qh; from there on "
        "it is phase 3.",
        "head_dim: BLOCK_D = triton.next_power_of_2(head_dim), and a second condition in every load and store (4.4). "
        "Causal: the mask of 4.3, and range(0, end, BLOCK_N) with the end of 4.2.",
        "A row that sees no key: m_safe = tl.where(m_new == float('-inf'), 0.0, m_new), and a division by 1 where l_i "
        "is 0.",
    ],
)
def _(my_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Report:
    with running("batch=2, heads=6, kv_heads=2, seq_q=20, seq_k=50, head_dim=40"):
        q, k, v = (x * 0.5 for x in _random((2, 6, 20, 40), (2, 2, 50, 40), (2, 2, 50, 40)))
        if runtime.INTERPRETED:
            with in_bounds(None, q=q, k=k, v=v) as traffic:
                result = my_attention(q, k, v, causal=False, scale=0.1)
            expect(
                traffic is not None and traffic.loads > 0,
                "no Triton kernel reads anything here: the work should be done in a kernel of yours",
                diagnosis="no-kernel",
            )
            if isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor):
                explain_undefined(traffic, result[0], None)
    report = verify(my_attention, causal=True, gqa=True, head_dims=(64, 40), max_seq=150, max_tile=128)
    _expect_scales(my_attention)
    if runtime.INTERPRETED:
        _expect_tiles_skipped(my_attention)
    return report


def _expect_scales(fn: Callable[..., Any]) -> None:
    """The default scale at a head_dim that is no power of two, and a scale of 0."""
    __tracebackhide__ = True
    q, k, v = _random((1, 2, 20, 40), (1, 1, 30, 40), (1, 1, 30, 40))

    def o(**scale: float) -> torch.Tensor:
        return fn(q, k, v, **scale)[0].float().cpu()

    def near(x: torch.Tensor, y: torch.Tensor) -> bool:
        return bool((x - y).abs().max() < 0.01)

    default, zero = o(), o(scale=0.0)
    if not near(default, o(scale=40**-0.5)):
        raise CheckFailed(
            "right where a scale is given; without one o is not that of scale = 1 / sqrt(head_dim)"
            + (": it is that of 1 / sqrt(64), the padded head_dim" if near(default, o(scale=64**-0.5)) else ""),
            diagnosis="default-scale",
            case="head_dim=40, no scale given",
        )
    if not near(zero, v.float().cpu().mean(2, keepdim=True).expand_as(zero)):
        raise CheckFailed(
            "with scale=0 every key counts the same, and o is the mean of v"
            + ("; here o is that of the default scale: 0 is a scale, and not None" if near(zero, default) else ""),
            diagnosis="scale-zero",
            case="head_dim=40, scale=0",
        )


def _expect_tiles_skipped(fn: Callable[..., Any]) -> None:
    """A causal mask has to save reads of K."""
    __tracebackhide__ = True
    q, k, v = _random((1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16))
    read = []
    for causal in (False, True):
        with watched_memory(q=q, k=k, v=v) as traffic:
            fn(q, k, v, causal=causal, scale=0.25)
        read.append(sum(traffic.read_from.values()))
    expect(
        read[1] < 0.85 * read[0],
        f"right, but with the causal mask it reads {read[1]} bytes of {read[0]} for 512 queries and keys: end the loop "
        "where the block's last row stops seeing keys",
        diagnosis="causal-tiles-not-skipped",
        case="seq_q=512, seq_k=512, causal",
    )
