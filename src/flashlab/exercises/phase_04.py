"""Checks of phase 4: who computes what, which keys a block sees, padding, caps, offsets, and a kernel from nothing.

A formula is asked on many cases at once, and a known mistake is told only if it gives every answer. A kernel runs with
every address checked where kernels are interpreted; its inputs lie in wider buffers of NaN, so that what is read beside
them shows on a GPU too. Then the compiler is asked.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, Report, expect, expect_all_close, expect_close, running, verify
from flashlab.check.lookup import Row
from flashlab.check.symptoms import watched
from flashlab.exercises import phase_04_ladder as _ladder  # noqa: F401  4.11 to 4.13
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.exercises.tensor_rule import normal, tensor_rule
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


def _grid(r: random.Random) -> Numbers:
    heads = r.randint(1, 4)
    group, blocks = r.randint(1, 4), r.randint(1, 6)
    return r.randrange(3 * heads * group * blocks), blocks, heads * group, heads


@rule(
    "4.1",
    title="Whose rows?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Take the number apart as you would seconds into hours, minutes and seconds: a remainder, and what is left.",
        "With group = heads // kv_heads, pid % group is the head within its group. pid // group counts blocks, of all "
        "key heads of all batches. The last block of a key head comes first.",
        "rest = pid // group; block = m_blocks - 1 - rest % m_blocks; rest // m_blocks counts the key heads of all "
        "batches, and head is kv_head * group + pid % group.",
    ],
    returns="batch, head, kv_head, block",
    whole=True,
    inputs=[
        (pid, blocks, heads, kv_heads)
        for batch, heads, kv_heads, blocks in ((2, 6, 2, 4), (3, 4, 4, 5), (2, 8, 1, 3), (2, 6, 3, 1), (1, 8, 2, 7))
        for pid in range(batch * heads * blocks)
    ],
    draw=_grid,
    rows=[
        Row("modulo-kv-heads", "head is dealt out like cards: the query heads that share a key head are neighbours",
            [("kv_head * group + pid % group", "pid % group * kv_heads + kv_head")]),
        Row("order-of-the-lecture", "that is the lecture's order, the blocks of a head side by side: here it is the "
            "heads of a group", [("m_blocks - 1 - rest % m_blocks", "pid % m_blocks"),
                        ("kv_head * group + pid % group", "pid // m_blocks % heads")]),
        Row("first-block-first", "the blocks of a group come in the opposite order: the first program has the last",
            [("m_blocks - 1 - rest % m_blocks", "rest % m_blocks")]),
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
    title="How far a block sees",
    minutes=15,
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
        Row("prefix-forgotten", "the prefix is forgotten: every row sees the first `prefix` keys",
            [("max(prefix, stop", "max(0, stop"), ("max(prefix, start", "max(0, start")]),
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


def _mask_of(kernel: Any) -> Callable[..., Any]:
    kernel = kernel_of(kernel, ("seen_ptr", "start_m", "start_n", "M", "N", "prefix", "BLOCK_M", "BLOCK_N"))

    def launch(start_m: int, start_n: int, M: int, N: int, prefix: int) -> torch.Tensor:
        __tracebackhide__ = True
        case = f"queries from {start_m}, keys from {start_n}, M={M}, N={N}, prefix={prefix}"
        out = torch.full((16, 32), -9, dtype=torch.int32, device=runtime.device())
        with in_bounds(case, seen=out):
            kernel[(1,)](out, start_m, start_n, M, N, prefix, BLOCK_M=16, BLOCK_N=32)
        out = out[: max(0, min(16, M - start_m))]  # what a row that does not exist sees is nobody's business
        expect(not (out == -9).any(), "some of the tile is never stored", diagnosis="never-written", case=case)
        return out

    return launch


_ALIGNED = "the last query, M - 1, sees the last key, N - 1, so query i sees the keys j <= i + N - M"


@tensor_rule(
    "4.3",
    title="The mask of a tile",
    minutes=15,
    hints=[
        "Row r of the tile is query start_m + r, column c is key start_n + c. Make these two as vectors first.",
        "Queries run down, so they get [:, None]; keys run across, so they get [None, :]. The comparison of the two is "
        "a tile.",
        "seen = (offs_n[None, :] <= offs_m[:, None] + N - M) | (offs_n[None, :] < prefix)",
    ],
    answer="tile_mask_kernel",
    returns="seen",
    inputs={
        f"queries from {m}, keys from {n}, M={M}, N={N}, prefix={prefix}": (m, n, M, N, prefix)
        for m, n, M, N, prefix in (
            (0, 0, 64, 64, 0), (16, 16, 64, 64, 40), (32, 16, 64, 64, 20), (0, 32, 16, 50, 37), (16, 32, 24, 50, 0),
            (0, 0, 40, 10, 5), (32, 0, 40, 10, 10), (0, 128, 1, 147, 3), (48, 48, 50, 51, 50), (16, 16, 20, 34, 30))
    },
    draw=lambda r: (lambda M, N: (r.randrange(M) // 16 * 16, r.randrange(N) // 32 * 32, M, N, r.randint(0, N)))(
        r.randint(1, 90), r.randint(1, 90)),
    through=_mask_of,
    notes={
        "start_m": "the first row of the tile is number start_m, not 0",
        **dict.fromkeys(("N - M", "N", "M"), _ALIGNED),
        "start_n": "the first column of the tile is number start_n, not 0", "r": "row r is query start_m + r",
        "offs_n[None, :] < prefix": "every query sees the first `prefix` keys", "c": "column c is key start_n + c",
        "offs_n[None, :] <= offs_m[:, None] + (N - M)": "a query sees the keys up to its own position, that one too",
    },
    rows=[
        Row("one-too-many", "each query sees one key too many, the one behind its own position",
            [("+ (N - M)", "+ (N - M) + 1")]),
        Row("prefix-forgotten", "the prefix is forgotten: every query sees the first `prefix` keys",
            [(" | (offs_n[None, :] < prefix)", "")]),
        Row("both-wanted", "a key is seen if it is not later *or* in the prefix: & asks for both",
            [(" | (offs_n", " & (offs_n")]),
        Row("starts-forgotten", "row 0 of the tile is query start_m, and column 0 is key start_n",
            [("start_m + r", "r"), ("start_n + c", "c")]),
        Row("starts-exchanged", "start_m and start_n are exchanged: row 0 is query start_m, and column 0 key start_n",
            [("start_m + r", "start_n + r"), ("start_n + c", "start_m + c")]),
        Row("start-n-forgotten", "the comparison with the query uses c: the first column is number start_n, not 0",
            [("(offs_n[None, :] <=", "(c[None, :] <=")]),
        Row("start-times-block", "start_m is multiplied by BLOCK_M; it is a row's number already", [
            ("start_m + r", "start_m * 16 + r")]),
        Row("start-times-block", "start_n is multiplied by BLOCK_N; it is a key's number already", [
            ("start_n + c", "start_n * 32 + c")]),
    ],
    then=lambda kernel: compiles(kernel, {
        "seen_ptr": torch.int32, "start_m": 16, "start_n": 16, "M": 50, "N": 60, "prefix": 9, "BLOCK_M": 16,
        "BLOCK_N": 32}),
)  # fmt: skip
def mask_of_a_tile(start_m, start_n, M, N, prefix):
    r, c = torch.arange(16)[: max(0, M - start_m)], torch.arange(32)
    offs_m = start_m + r
    offs_n = start_n + c
    seen = (offs_n[None, :] <= offs_m[:, None] + (N - M)) | (offs_n[None, :] < prefix)
    return seen.int()


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


# ---- 4.5 ------------------------------------------------------------------------------------------------------------


@rule(
    "4.5",
    title="Who sees these keys?",
    minutes=15,
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
        Row("sides-exchanged", "left and right are exchanged: a query that looks `left` to a key stands after it",
            [("start - right", "start - left"), ("stop + left", "stop + right")]),
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


def _cap_of(kernel: Any) -> Callable[..., Any]:
    kernel = kernel_of(kernel, ("x_ptr", "y_ptr", "cap", "BLOCK"))

    def launch(x: torch.Tensor, cap: float) -> torch.Tensor:
        __tracebackhide__ = True
        y, case = torch.full_like(x, math.nan), f"cap={cap:g}, x up to infinity"
        with in_bounds(case, x=x, y=y):
            kernel[(1,)](x, y, cap, BLOCK=128)
        expect(not y.isnan().all(), "y is NaN everywhere, or never written", diagnosis="never-written", case=case)
        return y

    return launch


def _to_be_capped(r: random.Random, cap: float) -> tuple[torch.Tensor, float]:
    """128 numbers: some around the cap, some where an exponential overflows, and what is beyond everything."""
    edge = torch.tensor([0.0, 1e-3, -1e-3, 0.5, -0.5, 40.0, -40.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30, math.inf])
    times = torch.tensor([z * sign for z in (5, 12, 20, 30, 46, 60, 87, 90, 120, 200) for sign in (1, -1)])
    return torch.cat([normal(r, 94, dtype=torch.float32) * cap, times * cap, edge]), cap


@tensor_rule(
    "4.6",
    title="A cap that does not overflow",
    minutes=15,
    hints=[
        "With t = e^(2z), tanh(z) is (t - 1) / (t + 1). What is that for z = 100 in float32? Rewrite the fraction so "
        "that infinity is harmless.",
        "(t - 1) / (t + 1) = 1 - 2 / (t + 1). For z = 100 that is 1 - 2 / inf = 1, and for z = -100 it is 1 - 2 / 1.",
        "z = x / cap, so y = cap * (1 - 2 / (1 + tl.exp(2 * x / cap))).",
    ],
    answer="cap_kernel",
    returns="y",
    inputs={f"cap={cap:g}, x up to infinity": _to_be_capped(random.Random(int(cap)), cap) for cap in (2.0, 1.0, 3.0)},
    draw=lambda r: _to_be_capped(r, r.choice((0.5, 1.0, 2.5))),
    beside=1,
    also=["cap * torch.tanh(x / cap)", "cap * (2.0 * torch.sigmoid(2.0 * x / cap) - 1.0)"],
    through=_cap_of,
    on_device=True,
    nan={"": "an exponential is infinite where y is NaN, and inf / inf, inf - inf and inf * 0 are NaN: write the "
         "fraction so that only its denominator becomes infinite"},
    notes={
        "cap": "it is cap * tanh(x / cap)", "2.0": "the exponential in tanh is that of twice its argument",
        "torch.exp": "exp2(z * log2(e)) is exp(z)", "x": "it is cap * tanh(x / cap)",
    },
    rows=[
        Row("cap-not-restored", "y stays between -1 and 1: that is tanh(x / cap), and cap times it is wanted",
            instead="torch.tanh(x / cap)"),
        Row("log2e-twice", "log2(e) is multiplied in, and then e is raised to the power: it belongs to exp2",
            instead="cap * torch.tanh(x / cap * math.log2(math.e))"),
        Row("clipped", "that is x, cut off at the cap; tanh bends it softly: near the cap it is well below x",
            instead="x.clamp(-cap, cap)"),
        Row("not-capped", "y is x: nothing is capped", instead="x"),
        Row("wrong-sign", "every y has the wrong sign", instead="-cap * torch.tanh(x / cap)"),
        Row("sigmoid", "that is cap times the sigmoid, between 0 and cap; tanh(z) is 2 sigmoid(2z) - 1",
            instead="cap * torch.sigmoid(x / cap)"),
        Row("sign-lost", "y is right for x > 0; for x < 0 it has the sign of x > 0",
            instead="cap * torch.tanh((x / cap).abs())"),
        Row("x-times-tanh", "that is x * tanh(x / cap): it is cap * tanh(x / cap)", instead="x * torch.tanh(x / cap)"),
    ],
    tol=6e-5,
    then=lambda kernel: compiles(kernel, {"x_ptr": torch.float32, "y_ptr": torch.float32, "cap": 50.0, "BLOCK": 128}),
)  # fmt: skip
def softly_capped(x, cap):
    return cap * (1.0 - 2.0 / (1.0 + torch.exp(2.0 * x / cap)))


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
