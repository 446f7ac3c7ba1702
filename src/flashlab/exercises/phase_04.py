"""Checks of 4.1 to 4.9: who computes what, which keys a block sees, padding, caps, offsets and sinks.

A formula is asked on many cases at once, and a known mistake is told only if it gives every answer. A kernel runs with
every address checked where kernels are interpreted; its inputs lie in wider buffers of NaN, so that what is read beside
them shows on a GPU too. Then the compiler is asked.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.check import expect
from flashlab.check.lookup import Row
from flashlab.check.mistakes.mask_rule import ALL, CAUSAL
from flashlab.exercises.kernel_rule import Keys, apart, empty, kernel_rule
from flashlab.exercises.phase_04_ladder import ALIGNED
from flashlab.exercises.rule import RULES, rule
from flashlab.exercises.tensor_rule import EMPTY_ROWS, copied, normal
from flashlab.exercises.triton_answers import compiles

Numbers = tuple[int, ...]


# ---- 4.1 ------------------------------------------------------------------------------------------------------------


def _grid(r: random.Random) -> Numbers:
    heads = r.randint(1, 4)
    group, blocks = r.randint(1, 4), r.randint(1, 6)
    return r.randrange(3 * heads * group * blocks), blocks, heads * group, heads


@rule(
    "4.1",
    title="Whose rows?", minutes=10, difficulty="Warm-up",
    hints=[
        "Take the number apart as you would seconds into hours, minutes and seconds: a remainder, and what is left.",
        "With group = heads // kv_heads, pid % group is the head within its group. pid // group counts blocks, of all "
        "key heads of all batches. The last block of a key head comes first.",
        "rest = pid // group; block = m_blocks - 1 - rest % m_blocks; rest // m_blocks counts the key heads of all "
        "batches, and head is kv_head * group + pid % group.",
    ],
    returns="batch, head, kv_head, block",
    strict=True,
    inputs=[
        (pid, blocks, heads, kv_heads)
        for batch, heads, kv_heads, blocks in ((2, 6, 2, 4), (3, 4, 4, 5), (2, 8, 1, 3), (2, 6, 3, 1), (1, 8, 2, 7))
        for pid in range(batch * heads * blocks)
    ],
    draw=_grid,
    rows=[
        Row("modulo-kv-heads", "head is dealt out like cards: the query heads that share a key head are neighbours",
            [("kv_head * group + pid % group", "pid % group * kv_heads + kv_head")]),
        *(Row("order-of-the-lecture", "that is the lecture's order, the blocks of a head side by side: here it is the "
              "heads of a group", [("m_blocks - 1 - rest % m_blocks", f"{first}pid % m_blocks"),
                                   ("kv_head * group + pid % group", "pid // m_blocks % heads")])
          for first in ("", "m_blocks - 1 - ")),
        Row("key-heads-first", "the key heads run before the blocks: here come first all blocks of a group, and then "
            "the next key head", [("rest % m_blocks\n", "rest // kv_heads % m_blocks\n"),
                                  ("rest // m_blocks % kv_heads", "rest % kv_heads")]),
        Row("group-for-kv-heads", "the key heads and the heads of a group are exchanged: heads // kv_heads heads share "
            "each of the kv_heads",
            [("rest = pid // group", "group, kv_heads = kv_heads, group\n    rest = pid // group")]),
        Row("kv-head-modulo", "kv_head is head % kv_heads: the query heads that share a key head are neighbours",
            [("pid % group, kv_head", "pid % group, (kv_head * group + pid % group) % kv_heads")]),
    ],
)  # fmt: skip
def whose(pid, m_blocks, heads, kv_heads):
    """(batch, head, kv_head, block) of program pid. m_blocks: blocks of queries of one head."""
    # BEGIN SOLUTION
    group = heads // kv_heads
    rest = pid // group
    block = m_blocks - 1 - rest % m_blocks
    batch, kv_head = rest // m_blocks // kv_heads, rest // m_blocks % kv_heads
    return batch, kv_head * group + pid % group, kv_head, block
    # END SOLUTION


# ---- 4.2 ------------------------------------------------------------------------------------------------------------


def _rows(r: random.Random) -> Numbers:
    """start, stop, seq_q, seq_k of a block of queries."""
    seq_q = r.randint(1, 90)
    start = r.randrange(seq_q)
    return start, r.randint(start + 1, min(seq_q, start + 40)), seq_q, r.randint(1, 120)


@rule(
    "4.2",
    title="How far a block sees", minutes=15,
    hints=[
        "Query i sees the keys j <= i + seq_k - seq_q, and those before prefix. So how many keys does query i see?",
        "`end`: the row that sees most is the last, stop - 1. `whole_end`: the row that sees least is the first. "
        "Neither can be below prefix or above seq_k.",
        "end = min(seq_k, max(prefix, stop + seq_k - seq_q)); whole_end = min(seq_k, max(prefix, start + 1 + seq_k - "
        "seq_q)) // BLOCK_N * BLOCK_N.",
    ],
    returns="whole_end, end",
    whole=True,
    inputs=[
        (start, min(start + block, seq_q), seq_q, seq_k, prefix, tile)
        for seq_q, seq_k, prefix, block, tile in (
            (64, 64, 0, 16, 16), (50, 130, 90, 16, 32), (100, 37, 5, 32, 16), (1, 147, 30, 16, 64), (40, 40, 20, 32, 8),
            (33, 35, 0, 8, 8), (33, 40, 40, 16, 8), (200, 90, 33, 64, 32),
            (16, 8, 0, 4, 16),
            *((24, 24 + offset, 8 - offset, 8, 8) for offset in range(1, 8)),  # any remainder of a tile
        )
        for start in range(0, seq_q, block)
    ],
    draw=lambda r: (lambda rows: (*rows, r.randint(0, rows[3]), r.choice((4, 8, 16, 32))))(_rows(r)),
    notes={
        "offset": "the last query sees the last key", "stop": "the last row, stop - 1, sees furthest",
        "start": "the first row sees least", "1": "row i sees the key i + seq_k - seq_q itself",
        "prefix": "every row sees the first `prefix` keys",
    },
    rows=[
        Row("whole-rounded-up", "whole_end is rounded up to a multiple of BLOCK_N: it is rounded down",
            [("start + 1 + offset)) // BLOCK_N", "start + 1 + offset) + BLOCK_N - 1) // BLOCK_N")]),
        Row("end-rounded", "end is rounded up to a tile: it is one past the last key that a row sees",
            [("return whole_end, end", "return whole_end, min(seq_k, -(-end // BLOCK_N) * BLOCK_N)")]),
        Row("whole-by-the-last-row", "whole_end is that of the last row: all rows see what the first sees, which sees "
            "least", [("start + 1 + offset", "stop + offset")]),
        *(Row("prefix-forgotten", f"the prefix is forgotten{where}: every row sees the first `prefix` keys",
              [(f"max(prefix, {row}", f"max(0, {row}") for row in rows])
          for where, rows in (("", ("stop", "start")), (" in end", ("stop",)), (" in whole_end", ("start",)))),
    ],
)  # fmt: skip
def prefix_edges(start, stop, seq_q, seq_k, prefix, BLOCK_N):
    """(whole_end, end), two numbers of keys, 0 to seq_k; prefix is at most seq_k."""
    # BEGIN SOLUTION
    offset = seq_k - seq_q
    end = min(seq_k, max(prefix, stop + offset))
    whole_end = min(seq_k, max(prefix, start + 1 + offset)) // BLOCK_N * BLOCK_N
    return whole_end, end
    # END SOLUTION


# ---- 4.3 ------------------------------------------------------------------------------------------------------------


def _of_a_tile(*tile: int) -> tuple[Any, ...]:
    """tile_mask_kernel's arguments, of a tile whose rows all exist."""
    return empty(16, 32, dtype=torch.int32), *tile, 16, 32


@kernel_rule(
    "4.3",
    title="The mask of a tile", minutes=15,
    hints=[
        "Row r of the tile is query start_m + r, column c is key start_n + c. Make these two as vectors first.",
        "Queries run down, so they get [:, None]; keys run across, so they get [None, :]. The comparison of the two is "
        "a tile.",
        "seen = (start_n + c[None, :] <= start_m + r[:, None] + N - M) | (start_n + c[None, :] < prefix)",
    ],
    writes="seen_ptr",
    returns="seen",
    inputs={
        f"queries from {m}, keys from {n}, M={M}, N={N}, prefix={prefix}": _of_a_tile(m, n, M, N, prefix)
        for m, n, M, N, prefix in (
            (0, 0, 64, 64, 0), (16, 16, 64, 64, 40), (32, 16, 64, 64, 20), (0, 32, 16, 50, 37), (16, 32, 32, 58, 0),
            (0, 0, 40, 10, 5), (24, 0, 40, 10, 10), (0, 0, 40, 10, 0), (24, 0, 40, 10, 0), (0, 128, 16, 147, 3),
            (48, 48, 64, 65, 50), (16, 16, 32, 46, 30))
    },
    draw=lambda r: (lambda M, N: _of_a_tile(r.randint(0, M - 16), r.randrange(N) // 32 * 32, M, N, r.randint(0, N)))(
        r.randint(16, 90), r.randint(1, 90)),
    words={"query": "(start_m + r)", "key": "(start_n + c)", "offs_n": "(start_n + c)"},  # the page has no such names
    also=[[("key = start_n + c[None, :]", "offs_n = start_n + c"), ("(key <=", "(offs_n[None, :] <="),
           ("(key <", "(offs_n[None, :] <"), ("+ N - M", "+ (N - M)")]],
    notes={
        "start_m": "the first row of the tile is number start_m, not 0",
        **dict.fromkeys(("N - M", "N", "M"), ALIGNED),
        "start_n": "the first column of the tile is number start_n, not 0", "r": "row r is query start_m + r",
        "prefix": "every query sees the first `prefix` keys", "c": "column c is key start_n + c",
        "key <= query + N - M": "a query sees the keys up to its own position, that one too",
    },
    rows=[
        Row("prefix-of-queries", "the first `prefix` keys are hidden from the queries from `prefix` on; every query "
            "sees them", [("(key < prefix)", "((key < prefix) & (query < prefix))")]),
        Row("one-too-many", "each query sees one key too many, the one behind its own position",
            [("+ N - M", "+ N - M + 1")]),
        Row("starts-exchanged", "start_m and start_n are exchanged: row 0 is query start_m, and column 0 key start_n",
            [("start_m + r", "start_n + r"), ("start_n + c", "start_m + c")]),
        Row("start-times-block", "start_m is multiplied by BLOCK_M; it is a row's number already", [
            ("start_m + r", "start_m * 16 + r")]),
        Row("start-times-block", "start_n is multiplied by BLOCK_N; it is a key's number already", [
            ("start_n + c", "start_n * 32 + c")]),
    ],
    then=lambda kernel: compiles(kernel, {
        "seen_ptr": torch.int32, "start_m": 16, "start_n": 16, "M": 50, "N": 60, "prefix": 9, "BLOCK_M": 16,
        "BLOCK_N": 32}),
)  # fmt: skip
@triton.jit
def tile_mask_kernel(seen_ptr, start_m, start_n, M, N, prefix, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    r = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    query = start_m + r[:, None]
    key = start_n + c[None, :]
    seen = (key <= query + N - M) | (key < prefix)
    # END SOLUTION
    tl.store(seen_ptr + r[:, None] * BLOCK_N + c[None, :], seen.to(tl.int32))


# ---- 4.4 ------------------------------------------------------------------------------------------------------------


def _of_scores(r: random.Random, M: int, N: int, D: int, BLOCK_D: int) -> tuple[Any, ...]:
    """scores_kernel's arguments: rows apart in memory, with room behind the last."""
    q, k = (apart(normal(r, rows + 3, D, dtype=torch.float16), gap)[:rows] for rows, gap in ((M, 96), (N, 112)))
    return q, k, empty(M, N), q.stride(0), k.stride(0), M, N, D, BLOCK_D, 16 if M <= 16 else 32, 32


def _tiles_of_block_d(kernel: Any) -> None:
    """CheckFailed where a tile of Q or K has more columns than BLOCK_D, or fewer."""
    given, traffic = RULES["4.4"].watched_on_first(kernel)  # type: ignore[attr-defined]
    HEAD_DIM, BLOCK_D = given["HEAD_DIM"], given["BLOCK_D"]
    tiles = 2 * -(-HEAD_DIM // BLOCK_D)
    said = f"right, but HEAD_DIM={HEAD_DIM} and BLOCK_D={BLOCK_D} make {tiles} tiles of Q and K, which {traffic.loads} "
    expect(traffic.loads >= tiles, f"{said}loads read: one is wider than BLOCK_D", diagnosis="tile-too-wide")
    expect(traffic.loads <= 2 * tiles, f"{said}loads read: tiles have BLOCK_D columns", diagnosis="tile-too-narrow")


@kernel_rule(
    "4.4",
    title="A head wider than a tile", minutes=20,
    hints=[
        "A score is a sum over HEAD_DIM columns. Split the sum: a loop over pieces of BLOCK_D columns, and one "
        "accumulator for all of them.",
        "Column offs_d of the piece at start_d is start_d + offs_d. A load needs two conditions: the row exists, and "
        "the column does. What must `other` be, so that a column that does not exist adds nothing to a product?",
        "In the loop: columns = start_d + offs_d[None, :]; q = tl.load(Q_ptr + offs_m[:, None] * stride_q + columns, "
        "mask=(offs_m[:, None] < M) & (columns < HEAD_DIM), other=0.0), k likewise with offs_n and N, and s = "
        "tl.dot(q, k.T, s). Before it: s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32).",
    ],
    writes="S_ptr",
    returns="s",
    inputs={
        f"M={M}, N={N}, HEAD_DIM={D}, BLOCK_D={block}, rows apart in memory":
            _of_scores(random.Random(M + D), M, N, D, block)
        for M, N, D, block in ((16, 32, 80, 32), (11, 20, 49, 16), (16, 32, 16, 16), (5, 32, 24, 32), (16, 9, 144, 64),
                               (3, 5, 1100, 64), (20, 32, 64, 64))
    },
    draw=lambda r: _of_scores(
        r, r.randint(1, 16), r.randint(1, 32), r.randint(1, 100), r.choice((16, 32, 64))),
    notes={"dtype": "products of float16 are added up in float32", "s": "each piece adds to the scores",
           "range": "a score is a sum over all HEAD_DIM columns"}
    | dict.fromkeys(("HEAD_DIM", "real"), "columns 0 to HEAD_DIM - 1 exist")
    | dict.fromkeys(("start_d", "BLOCK_D"), "the pieces begin BLOCK_D columns apart")
    | dict.fromkeys(("stride_q", "stride_k"), "each matrix has a stride of its own, from one row to the next"),
    words={"real": "(columns < HEAD_DIM)", "columns": "start_d + offs_d[None, :]"},  # the page has no such names
    nan={"": "not finite, though every address was right: inf or NaN comes in, from what the masked-off elements hold "
         "or from what s begins with"},
    then=lambda kernel: _tiles_of_block_d(kernel) if runtime.INTERPRETED else None,
    rows=[
        Row("mask-of-the-first-piece", "the mask asks `offs_d < HEAD_DIM` in every piece, whose columns are "
            "start_d + offs_d", [("columns < HEAD_DIM", "offs_d[None, :] < HEAD_DIM")]),
        Row("shifted-back", "the last piece is shifted back, so as to end with HEAD_DIM: columns that it shares with "
            "the one before count twice", [("= start_d +", "= tl.minimum(start_d, max(HEAD_DIM - BLOCK_D, 0)) +")]),
        *(Row("scaled", f"the scores are multiplied by {what}: Q K^T is asked as it stands",
              [("tl.dot(q, k.T, s)", f"s + tl.dot(q, k.T) * {factor}")]) for what, factor in (
            ("1 / sqrt(HEAD_DIM)", "HEAD_DIM**-0.5"), ("1 / HEAD_DIM", "(1 / HEAD_DIM)"),
            ("log2(e) / sqrt(HEAD_DIM)", "HEAD_DIM**-0.5 * 1.4426950408889634"))),
        *(Row("first-piece-of-one", f"{x} gives its first columns to every piece: those of Q and K go together",
              [(f"stride_{x.lower()} + columns", f"stride_{x.lower()} + offs_d[None, :]")]) for x in "QK"),
    ],
)  # fmt: skip
@triton.jit
def scores_kernel(
    Q_ptr, K_ptr, S_ptr, stride_q, stride_k, M, N,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    # BEGIN SOLUTION
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_d in range(0, HEAD_DIM, BLOCK_D):
        columns = start_d + offs_d[None, :]
        real = columns < HEAD_DIM
        q_ptrs = Q_ptr + offs_m[:, None] * stride_q + columns
        q = tl.load(q_ptrs, mask=(offs_m[:, None] < M) & real, other=0.0)
        k_ptrs = K_ptr + offs_n[:, None] * stride_k + columns
        k = tl.load(k_ptrs, mask=(offs_n[:, None] < N) & real, other=0.0)
        s = tl.dot(q, k.T, s)
    # END SOLUTION
    s_ptrs = S_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(s_ptrs, s, mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


# ---- 4.5 ------------------------------------------------------------------------------------------------------------


@rule(
    "4.5",
    title="Who sees these keys?", minutes=15,
    hints=[
        "Query i stands beside key p = i + seq_k - seq_q, and sees the keys p - left to p + right. Turn it round: "
        "which p see key j?",
        "Key j is seen from the positions j - right to j + left. The first key of the block gives `begin`, the last, "
        "stop - 1, gives `end`.",
        "begin = max(0, start - right - (seq_k - seq_q)); end = min(seq_q, stop + left - (seq_k - seq_q)). One past "
        "the last, so no - 1.",
    ],
    returns="begin, end",
    whole=True,
    inputs=[
        (start, min(start + block, seq_k), seq_q, seq_k, left, right)
        for seq_q, seq_k, block in ((64, 64, 16), (30, 90, 8), (90, 30, 16), (1, 50, 16))
        for left, right in ((0, 0), (10, 0), (25, 6), (3, 40), (7, 7))
        for start in range(0, seq_k, block)
    ],
    draw=lambda r: (lambda rows: (*rows[:2], rows[3], rows[2], r.randint(0, 30), r.randint(0, 30)))(_rows(r)),
    alike=lambda begin, end: (0, 0) if begin >= end else (begin, end),  # nobody sees them, however that is written
    notes={
        "offset": "query i stands beside key i + seq_k - seq_q", "left": "a key is seen from `left` positions after it",
        "right": "a key is seen from `right` positions before it", "start": "the first key is seen from furthest above",
        "stop": "the last key, stop - 1, is seen from furthest below",
    },
    rows=[
        *(Row("the-other-question", "that is which keys the *queries* start to stop - 1 see: asked is which queries "
              "see the *keys* start to stop - 1", [("start - right - offset", "start + offset - left"),
                                                   ("seq_q, stop + left - offset", f"{size}, stop + offset + right")])
          for size in ("seq_k", "seq_q")),
        Row("a-length", "the second number is how many queries there are: `end` is wanted, one past the last",
            [("return begin, end", "return begin, end - begin")]),
    ],
)  # fmt: skip
def seen_by(start, stop, seq_q, seq_k, left, right):
    """(begin, end) of the queries that see at least one of the keys start to stop - 1."""
    # BEGIN SOLUTION
    offset = seq_k - seq_q
    begin = max(0, start - right - offset)
    end = min(seq_q, stop + left - offset)
    return begin, end
    # END SOLUTION


# ---- 4.6 ------------------------------------------------------------------------------------------------------------


def _to_be_capped(r: random.Random, cap: float) -> tuple[Any, ...]:
    """cap_kernel's arguments: x around the cap, where an exponential overflows, and what is beyond everything."""
    edge = torch.tensor([0.0, 1e-3, -1e-3, 0.5, -0.5, 40.0, -40.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30, math.inf])
    times = torch.tensor([z * sign for z in (5, 12, 20, 30, 46, 60, 87, 90, 120, 200) for sign in (1, -1)])
    return torch.cat([normal(r, 94, dtype=torch.float32) * cap, times * cap, edge]), empty(128), cap, 128


def _where_wrong(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """Of a function of each x alone: for which x it is wrong."""
    for given in RULES["4.6"].tried:
        x, cap, y = given[0], given[2], learners(*(copied(x, True) for x in given)).cpu()
        wanted = cap * torch.tanh(x / cap)
        off = ~((y - wanted).abs() <= 1e-4 * max(1.0, cap))
        size, worst = x.abs() / cap, int(torch.where(off, x.abs(), math.inf).argmin())
        there = f"at x = {x[worst]:.4g} it is {y[worst]:.4g}, and should be {wanted[worst]:.4g}"
        if not off.any():
            continue
        if y[off].isnan().all() and not x[off & x.isfinite()].any():
            return "not-finite", f"with cap {cap:g} y is NaN where x is 0: what is divided by x, or by its size, there?"
        if y[off].isnan().all() and size[off].min() > size[~off & x.isfinite()].min():
            said = "an exponential is infinite where y is NaN, and inf / inf, inf - inf and inf * 0 are NaN: write the "
            said += (
                f"fraction so that only its denominator becomes infinite (from x = {x[worst]:.3g} with cap {cap:g} on)"
            )
            return "not-finite", said
        if not off.all() and size[off].min() > size[~off].max() > 0:
            at = float(size[~off].max())
            return "beyond", f"y is right as far as x is {at:.3g} times the cap, not beyond: {there} (cap {cap:g})"
        if not off[x != 0].all() and (x[off] > 0).all() != (x[off] < 0).all():
            which = "greater" if (x[off] > 0).all() else "less"
            return "one-sign", f"wrong are only x {which} than 0: {there} (cap {cap:g})"
    return _shape_told(learners)


_SLOPES = {math.log(2) ** 2: " = ln(2)^2", math.log(2): " = ln 2", 1 / math.log(2): " = log2(e)", 2.0: "", 0.5: ""}


def _shape_told(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """From where to where it runs, and how steeply through 0."""
    cap = 3.0
    x = torch.zeros(128)
    x[:4] = torch.tensor([-60.0, -1e-3, 1e-3, 60.0]) * cap
    y = learners(*(copied(x, True) for x in (x, empty(128), cap, 128))).cpu() / cap
    first, last, middle = (round(float(y[i]), 3) + 0.0 for i in (0, 3, 4))
    slope = float(y[2] - y[1]) / 2e-3
    name = next((said for value, said in _SLOPES.items() if abs(slope / value - 1) < 1e-3), "")
    if not y[:5].isfinite().all():
        return None
    there = f"is {middle:g} at 0 and has the slope {slope:.3g}{name} there"
    if abs(slope) > 10:
        there = f"jumps at 0 from {float(y[1]):.2g} to {float(y[2]):.2g}"
    said = f"in units of the cap y is {first:g} at x = -60 and {last:g} at 60, {there}"
    return "another-curve", f"{said}; tanh is -1, 1 and 0, and has the slope 1 at 0 (cap {cap:g})"


@kernel_rule(
    "4.6",
    title="A cap that does not overflow", minutes=15,
    hints=[
        "With t = e^(2z), tanh(z) is (t - 1) / (t + 1). What is that for z = 100 in float32? Rewrite the fraction so "
        "that infinity is harmless.",
        "(t - 1) / (t + 1) = 1 - 2 / (t + 1). For z = 100 that is 1 - 2 / inf = 1, and for z = -100 it is 1 - 2 / 1.",
        "z = x / cap, so y = cap * (1 - 2 / (1 + tl.exp(2 * x / cap))).",
    ],
    writes="y_ptr",
    returns="y",
    inputs={f"cap={cap}, x up to infinity": _to_be_capped(random.Random(cap), float(cap)) for cap in (2, 1, 3, 30)},
    draw=lambda r: _to_be_capped(r, r.choice((0.5, 1.0, 2.5, 50.0))),
    symptom=_where_wrong,
    also=[[("1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap))", "2.0 * tl.sigmoid(2.0 * x / cap) - 1.0")]],
    notes={
        "cap": "it is cap * tanh(x / cap)", "2.0": "tanh(z) has e^2z, or 2 sigmoid(2z) - 1",
        "tl.exp": "exp2(z * log2(e)) is exp(z)", "x": "it is cap * tanh(x / cap)",
    },
    rows=[
        Row("log2e-twice", "log2(e) is multiplied in, and then e is raised to the power: it belongs to exp2",
            [("2.0 * x / cap", "2.0 * x / cap * 1.4426950408889634")]),
        Row("clipped", "that is x, cut off at the cap; tanh bends it softly: near the cap it is well below x",
            [("cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap)))", "tl.minimum(tl.maximum(x, -cap), cap)")]),
        Row("x-times-tanh", "that is x * tanh(x / cap): it is cap * tanh(x / cap)", [("= cap *", "= x *")]),
    ],
    tol=6e-5,
)  # fmt: skip
@triton.jit
def cap_kernel(x_ptr, y_ptr, cap, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    # BEGIN SOLUTION
    y = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / cap)))
    # END SOLUTION
    tl.store(y_ptr + i, y)


# ---- 4.7 ------------------------------------------------------------------------------------------------------------


def _one_head(
    r: random.Random, M: int, N: int, *numbers: float, lse: bool = False, tile: tuple[int, int] = (16, 32)
) -> tuple[Any, ...]:
    """The arguments of a kernel for one head: contiguous, no two of its sizes alike, so that an axis mixed up shows."""
    q, k, v = (normal(r, rows, 64, dtype=torch.float16) + shift for rows, shift in ((M, 0), (N, 0), (N, 0.5)))
    return q, k, v, empty(M, 64, dtype=torch.float16), *([empty(M)] if lse else []), M, N, *numbers, 64, *tile


_CAP = "        s = capped(s, cap)\n"
_MASK = '        s = tl.where(seen, s, float("-inf"))\n'
_CAP_AND_MASK = '        s = tl.where(seen, capped(s, cap), float("-inf"))\n'
_LEAK = "a hidden key has the score -cap, and with it a share of the softmax"


@triton.jit
def capped(s, cap):
    """cap * tanh(s / cap): exercise 4.6's, for the kernel of 4.7."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / cap)))


@kernel_rule(
    "4.7",
    title="Nobody looks ahead", minutes=20, difficulty="Bug hunt",
    bug=Row(
        "capped-after-mask", f"{_LEAK}: only -inf silences it, and a cap after the mask makes -cap of that",
        [('tl.where(seen, capped(s, cap), float("-inf"))', 'capped(tl.where(seen, s, float("-inf")), cap)')],
    ),
    history="Dao-AILab/flash-attention, pull request 1025 (2024), where the review caught it; onnx/onnx, issue 7865 "
    "(2026), where the standard itself had it",
    hints=[
        "Which rows are right, if there are any? What do they have in common? Try a very large cap, too.",
        "Follow one hidden key through the loop. Its score is -inf after the mask. What is it one line later?",
        "cap * tanh(-inf / cap) is -cap, a number like any other. The scores have to be capped first, and masked then.",
    ],
    writes="O_ptr",
    returns="o",
    programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M),
    inputs={
        f"M={M}, N={N}, cap={cap:g}, scale={scale:g}": _one_head(random.Random(M + N), M, N, scale, cap)
        for M, N, cap, scale in ((20, 70, 2.0, 0.5), (40, 40, 50.0, 0.25), (48, 48, 1.0, 0.5), (33, 33, 3.0, 0.25),
                                 (50, 33, 2.0, 0.5), (55, 25, 20.0, 0.5), (60, 1, 2.0, 0.5), (18, 20, 1.0, 8.0),
                                 (32, 33, 50.0, 0.05))  # of two blocks, and the last key of its own tile
    } | {
        "M=70, N=130, cap=50, scale=0.5, BLOCK_M=64, BLOCK_N=16":  # many tiles, of which no side is the other's
            _one_head(random.Random(9), 70, 130, 0.5, 50.0, tile=(64, 16)),
    },
    draw=lambda r: _one_head(r, r.randint(1, 60), r.randint(1, 60), r.choice((0.25, 0.5)), r.choice((1.0, 2.0, 20.0))),
    keys=Keys(
        lambda M, N, BLOCK_M, BLOCK_N: _one_head(random.Random(0), M, N, 1.0, 20.0, tile=(BLOCK_M, BLOCK_N)),
        [{"M": m, "N": n, "BLOCK_M": b, "BLOCK_N": t} for m, n, b, t in (
            (16, 16, 16, 32), (33, 33, 16, 32), (20, 60, 16, 32), (50, 20, 16, 32), (40, 64, 16, 32), (32, 33, 16, 32),
            (130, 128, 64, 16))],
        "j <= i + N - M", CAUSAL,
    ),
    nan={EMPTY_ROWS: "the rows that see no key hold NaN: where is -inf - (-inf), or 0 / 0?",
         "scale=8": "NaN where scores are far above the cap: an exponential is infinite there, as in 4.6"},
    notes={
        "seen": "a hidden key has the score -inf", "scale": "the scale comes before the cap",
        "cap": "it is cap * tanh(score / cap)", "offs_n[None, :] < N": "keys from N on do not exist",
        "N": ALIGNED, "M": ALIGNED,
        "offs_n[None, :] <= offs_m[:, None] + N - M": "a query sees the keys up to its own position, that one too",
    },
    rows=[
        Row("capped-after-mask", f"{_LEAK}: the cap is applied before the mask now, and after it as well",
            [(_CAP_AND_MASK, _CAP + _MASK + _CAP)]),
        Row("tail-alone-silenced", f"{_LEAK}: the keys past the end are silenced after the cap, the others before it",
            [(_CAP_AND_MASK, _MASK + _CAP + _MASK.replace("seen", "offs_n[None, :] < N"))]),
        Row("hidden-in-the-sum", "a hidden key is not in the product with V, but its weight is in the sum that O is "
            "divided by", [(_CAP_AND_MASK, _MASK + _CAP), ("dot(p.to", "dot(tl.where(seen, p, 0.0).to")]),
        Row("capped-twice", "the scores are capped twice", [(_CAP_AND_MASK, _CAP + _CAP_AND_MASK)]),
        Row("top-left", f"the mask is aligned at the first key: {ALIGNED}", [(" + N - M", "")]),
        Row("scaled-after-cap", "the scale is multiplied in after the cap; it comes before",
            [("tl.dot(q, k.T) * scale", "tl.dot(q, k.T)"), ("capped(s, cap),", "capped(s, cap) * scale,")]),
        Row("clipped", "the scores are cut off at the cap; tanh bends them softly",
            [("capped(s, cap),", "tl.minimum(tl.maximum(s, -cap), cap),")]),
    ],
)  # fmt: skip
@triton.jit
def capped_causal_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, M, N, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    at_m = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(Q_ptr + at_m, mask=offs_m[:, None] < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        at_n = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(K_ptr + at_n, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.T) * scale
        seen = (offs_n[None, :] < N) & (offs_n[None, :] <= offs_m[:, None] + N - M)
        #: Repaired: the cap inside. Of a score of -inf it would make -cap, which has a share of the softmax.
        s = tl.where(seen, capped(s, cap), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - m_safe[:, None])
        correction = tl.exp(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v = tl.load(V_ptr + at_n, mask=offs_n[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(O_ptr + at_m, o.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)


# ---- 4.8 ------------------------------------------------------------------------------------------------------------


def _layout(heads: int, stride_b: int, stride_h: int, stride_n: int, block: int = 32) -> tuple[Any, ...]:
    """row_offsets_kernel's arguments, for three batches."""
    return empty(3 * heads, block, dtype=torch.int64), heads, stride_b, stride_h, stride_n, block


_WIDE = {name: (f"{name} = {old}.to(tl.int64)", f"{name} = {old}") for name, old in (
    ("batch", "(pid // heads)"), ("head", "(pid % heads)"), ("rows", "tl.arange(0, BLOCK)"))}  # fmt: skip
_OFFSETS = "batch * stride_b + head * stride_h + rows * stride_n"
_NARROW = [*_WIDE.values()]


def _still(*names: str) -> Row:
    said = " and ".join(f"{name} * stride_{'n' if name == 'rows' else name[0]}" for name in names)
    have = "have" if names[1:] else "has"
    return Row("-and-".join(names) + "-overflow", f"{said} still {have} 32 bits", [_WIDE[name] for name in names])


@kernel_rule(
    "4.8",
    title="Far apart in memory", minutes=15, difficulty="Bug hunt",
    bug=Row(
        "offset-overflow", "every offset is right up to a multiple of 2^32: products and sums of 32-bit numbers "
        "have 32 bits, and the conversion comes when they are already wrong",
        [("(pid // heads).to(tl.int64)", "pid // heads"), ("(pid % heads).to(tl.int64)", "pid % heads"),
         ("BLOCK).to(tl.int64)", "BLOCK)"), ("offsets)", "offsets.to(tl.int64))")],
    ),
    history="thu-ml/SageAttention, issue 386 (2026); fla-org/flash-linear-attention, issue 1080 (2026); "
    "pytorch/pytorch, issue 190857 (2026), in FlexAttention's backward",
    hints=[
        "Subtract what is stored from what should be stored. Which number is it always a multiple of?",
        "2^32. A sum or a product of 32-bit numbers has 32 bits, and is converted only when it is already wrong.",
        "Convert before multiplying: batch, head and rows each become .to(tl.int64), and everything after that has 64 "
        "bits.",
    ],
    writes="out_ptr",
    returns="the offset",
    programs=lambda heads, **_: 3 * heads,
    inputs={
        "a small tensor": _layout(3, 6144, 2048, 64), "blocks of 16": _layout(2, 4096, 2048, 64, 16),
        "rows far apart, as in a long sequence": _layout(2, 64, 16, 2**27),
        "batches far apart": _layout(2, 2**30, 2**20, 64), "heads far apart": _layout(8, 128, 2**29, 128),
        "everything far apart": _layout(4, 2**30 + 64, 2**29 + 32, 2**27 + 16),
    },
    draw=lambda r: _layout(r.randint(1, 8), r.randint(1, 2**30), r.randint(1, 2**30), r.randint(1, 2**28)),
    rows=[
        *(_still(*names) for n in (1, 2) for names in itertools.combinations(_WIDE, n)),
        Row("products-overflow", "the sums have 64 bits now, but each product still has 32: convert an index before it "
            "is multiplied", [*_NARROW, (_OFFSETS, "(batch * stride_b).to(tl.int64) + (head * stride_h).to(tl.int64) + "
                                         "(rows * stride_n).to(tl.int64)")]),
        Row("products-overflow", "only the last sum has 64 bits; the products, and batch and head together, have 32",
            [*_NARROW, (_OFFSETS, "(batch * stride_b + head * stride_h).to(tl.int64) + rows * stride_n")]),
        Row("unsigned", "no offset is negative, but each is right only up to a multiple of 2^32: unsigned, 32 bits "
            "hold one bit more, and 64 are needed", [*_NARROW, (_OFFSETS, f"({_OFFSETS}).to(tl.uint32)")]),
        Row("rows-of-the-program", "the rows count on from program to program; every program writes down the *first* "
            "BLOCK rows of its head", [("+ rows * stride_n", "+ (pid * BLOCK + rows) * stride_n")]),
    ],
    tol=0.5,
)  # fmt: skip
@triton.jit
def row_offsets_kernel(out_ptr, heads, stride_b, stride_h, stride_n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    #: Repaired: 64 bits before anything is multiplied. int64 times int32 is int64.
    batch = (pid // heads).to(tl.int64)
    head = (pid % heads).to(tl.int64)
    rows = tl.arange(0, BLOCK).to(tl.int64)
    offsets = batch * stride_b + head * stride_h + rows * stride_n
    tl.store(out_ptr + pid * BLOCK + tl.arange(0, BLOCK), offsets)


# ---- 4.9 ------------------------------------------------------------------------------------------------------------

_START = "m_i = tl.full([BLOCK_M], sink, tl.float32)"
_TERM = "l_i = tl.full([BLOCK_M], 1.0, tl.float32)  # exp(sink - m_i)"
_O, _LSE = "o = acc / l_i[:, None]", "lse = m_i + tl.log(l_i)"
_NO_SINK = [(_START, 'm_i = tl.full([BLOCK_M], float("-inf"), tl.float32)'),
            (_TERM, "l_i = tl.zeros([BLOCK_M], tl.float32)")]  # fmt: skip
_JOINED = """m_new = tl.maximum(m_i, sink)
    l_i = l_i * tl.exp(m_i - m_new) + tl.exp(sink - m_new)
    acc = acc * tl.exp(m_i - m_new)[:, None]
    o = acc / l_i[:, None]"""


def _taken_for(sink: str) -> list[tuple[str, str]]:
    return [(_START, f"m_i = tl.full([BLOCK_M], {sink}, tl.float32)")]


@kernel_rule(
    "4.9",
    title="An attention sink", minutes=30, difficulty="Stretch",
    hints=[
        "The sink is one more key, whose score is `sink` for every query, and whose value is a row of zeros. What does "
        "such a key change in m_i, in l_i, in acc?",
        "Imagine that the loop had already met it, alone, before the first tile. Then the state is m_i = sink, l_i = "
        "exp(0) = 1, acc = 0. (Do not compute the 0 as sink - m_i: for a sink of -inf that is NaN.)",
        "m_i = tl.full([BLOCK_M], sink, tl.float32), l_i = tl.full([BLOCK_M], 1.0, tl.float32), acc = 0, and the two "
        "lines at the end as ever. (Without a sink the first correction is exp(-inf), which forgets the 1.)",
    ],
    writes="O_ptr, LSE_ptr",
    returns="o, lse",
    programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M),
    inputs={
        f"M={M}, N={N}, scale={scale}, sink={sink:g}": _one_head(random.Random(M + N), M, N, scale, sink, lse=True)
        for M, N, scale, sink in (
            (5, 90, 0.2, 1.1), (20, 70, 0.3, 0.0), (16, 32, 0.2, 3.3), (33, 50, 0.1, -2.1), (32, 33, 0.2, 0.7),
            (20, 40, 0.2, -math.inf), (20, 40, 0.2, 200.0), (20, 40, 0.2, -200.0))
    },
    draw=lambda r: _one_head(r, r.randint(1, 40), r.randint(1, 90), r.choice((0.1, 0.2)), r.uniform(-3, 3), lse=True),
    keys=Keys(
        lambda M, N, BLOCK_M, BLOCK_N: _one_head(
            random.Random(0), M, N, 1.0, -math.inf, lse=True, tile=(BLOCK_M, BLOCK_N)),
        [{"M": m, "N": n, "BLOCK_M": 16, "BLOCK_N": 32} for m, n in ((16, 16), (33, 33), (20, 60), (50, 20), (40, 64))],
        "(j < N) & (i < M)", ALL,
    ),
    nan={
        "-inf": "not finite where the sink is -inf, which is ordinary attention: which difference is -inf - (-inf)?",
        "200": "not finite, though smaller sinks are right: relative to a maximum that the sink is part of, no "
        "exponent is above 0",
    },
    notes={
        "sink": "the sink is a score: its term is exp(sink - m_i)", "l_i": "l_i is relative to e^m_i",
        "tl.exp(sink - m_new)": "l_i has the sink's term too", "tl.log": "the natural logarithm is wanted",
        "m_i": "lse is m_i + log(l_i)",
    },
    also=[[*_NO_SINK, (_O, _JOINED), (_LSE, "lse = m_new + tl.log(l_i)")]],
    rows=[
        Row("sink-ignored", "the result is that without a sink: l_i begins at 1, and m_i at the sink, which keeps it",
            [_NO_SINK[1]]),
        Row("lse-without-sink", "lse is the logarithm of the sum without the sink",
            [*_NO_SINK, (_LSE, ""), (_O, f"{_LSE}\n    {_JOINED}")]),
        Row("o-without-sink", "o is that without a sink: the sum that it is divided by has the sink's term too",
            [*_NO_SINK, (_O, f"{_O}\n    " + _JOINED.rpartition("\n")[0]),
             (_LSE, "lse = m_new + tl.log(l_i)")]),
        *(Row(slug, said, _taken_for(sink)) for slug, said, sink in (
            ("sink-is-one", "the sink counts as 1, whatever it is: its term is exp(sink - m_i)", "1.0"),
            ("sink-scaled", "the sink is multiplied by the scale: it is a score already", "sink * scale"),
            ("sink-negated", "the sink counts with the wrong sign", "-sink"),
            ("sink-in-base-2", "the sink is multiplied by log2(e), and e is raised to it", "1.442695041 * sink"),
            ("sink-in-base-2", "2 is raised to the sink; its term is e^(sink - m_i)", "0.693147181 * sink"),
        )),
        *(Row("sink-in-every-tile", f"the sink is counted {how}: it is one key",
              [(_TERM, _TERM.replace("1.0,", f"{n},"))])
          for how, n in (("once in every tile", "1.0 * tl.cdiv(N, BLOCK_N)"), ("once for each key", "1.0 * N"),
                         ("before the loop and in every tile", "1.0 + tl.cdiv(N, BLOCK_N)"), ("twice", "2.0"))),
        Row("sink-in-every-tile", "o: the sink is counted twice in the sum that o is divided by: l_i has it already",
            [(_O, "o = acc / (l_i + tl.exp(sink - m_i))[:, None]")]),
        Row("sink-not-shifted", "the sink's term is exp(sink), those of the keys are relative to m_i: all need one m",
            [*_NO_SINK, (_O, "l_i = l_i + tl.exp(sink + 0.0 * m_i)\n    " + _O)]),
        Row("sink-term-one", "the sink's term is 1 beside those of the keys: it is exp(sink - m_i)",
            [*_NO_SINK, (_O, "l_i = l_i + 1.0\n    " + _O)]),
        Row("sink-not-exponential", "the sink itself is added to l_i; its term is exp(sink - m_i)",
            [*_NO_SINK, (_O, "l_i = l_i + sink\n    " + _O)]),
        Row("sink-has-a-value", "the sink's share is added to o: its value is a row of zeros",
            [(_LSE, _LSE + "\n    o += tl.exp(sink - lse)[:, None]")]),
        Row("sink-added-to-scores", "the sink is added to every score, which changes no softmax: it is a score itself",
            [*_NO_SINK, ("tl.dot(q, k.T) * scale", "tl.dot(q, k.T) * scale + sink")]),
    ],
)  # fmt: skip
@triton.jit
def sink_attention_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr, M, N, scale, sink,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    at_m = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(Q_ptr + at_m, mask=offs_m[:, None] < M, other=0.0)
    # m_i, l_i and acc before the first tile:
    # BEGIN SOLUTION
    m_i = tl.full([BLOCK_M], sink, tl.float32)
    l_i = tl.full([BLOCK_M], 1.0, tl.float32)  # exp(sink - m_i)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # END SOLUTION
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        at_n = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(K_ptr + at_n, mask=offs_n[:, None] < N, other=0.0)
        s = tl.dot(q, k.T) * scale
        s = tl.where(offs_n[None, :] < N, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        correction = tl.exp(m_i - m_new)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None]
        v = tl.load(V_ptr + at_n, mask=offs_n[:, None] < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    # o and lse:
    # BEGIN SOLUTION
    o = acc / l_i[:, None]
    lse = m_i + tl.log(l_i)
    # END SOLUTION
    tl.store(O_ptr + at_m, o.to(O_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(LSE_ptr + offs_m, lse, mask=offs_m < M)
