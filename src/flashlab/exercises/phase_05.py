"""The checks of phase 5: the softmax's Jacobian, delta, the two walks of the backward pass, and its Triton kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention import simulation_backward as lecture
from flashlab.attention.cost import Meter
from flashlab.check import expect, pattern
from flashlab.check.lookup import Row
from flashlab.check.mistakes.mask_rule import WINDOW, Seen, rule_of
from flashlab.exercises.kernel_rule import apart, empty, kernel_rule
from flashlab.exercises.phase_02 import expect_flat_memory, peak_bytes
from flashlab.exercises.phase_05_ladder import CUT, NOTES, OF_KERNELS, TAIL, in_small_steps, mixed_bases, rounded_sums
from flashlab.exercises.tensor_rule import normal, part, tensor_rule

# ---- 5.1 ------------------------------------------------------------------------------------------------------------


def _rows(
    r: random.Random, M: int, N: int, hidden: int = 0, sink: float = -math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and dp [M, N]; the last `hidden` keys have p = 0."""
    s, dp = normal(r, M, N, dtype=torch.float32), normal(r, M, N, dtype=torch.float32)
    s[:, N - hidden :] = -math.inf
    return torch.softmax(torch.cat([s, torch.full((M, 1), sink)], 1), 1)[:, :N], dp + 0.5


def _by_one_more_column(p, dp):
    p_sink = 1 - p.sum(dim=1, keepdim=True)
    p, dp = torch.cat([p, p_sink], dim=1), torch.cat([dp, torch.zeros_like(p_sink)], dim=1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    ds = (jacobian @ dp[:, :, None])[:, :, 0]
    return ds[:, :-1], ds[:, -1].sum()


_EXAMPLE = torch.tensor([[0.5, 0.25, 0.125]]), torch.tensor([[4.0, 0.0, 8.0]])


@tensor_rule(
    "5.1",
    title="Through a softmax with a sink", minutes=15, difficulty="Warm-up",
    hints=[
        "Think of the sink as one more key. What is its p, from the others of its row? What is its dp, if its value is "
        "zero?",
        "p · dp is one number per row, delta, and ds_j = p_j (dp_j - delta), also for the sink. Which terms of delta "
        "does the sink change?",
        "delta = (p * dp).sum(dim=1, keepdim=True), as ever. The sink has p = 1 - p.sum(dim=1, keepdim=True) and "
        "dp = 0. All rows share it: their gradients add up.",
    ],
    returns="ds, dsink",
    inputs={
        "one row, p = (1/2, 1/4, 1/8)": _EXAMPLE, "3 rows of 5 keys": _rows(random.Random(1), 3, 5, sink=0.5),
        "6 rows of 6 keys": _rows(random.Random(2), 6, 6, sink=1.5),
        "4 rows, the last 3 of 9 keys hidden": _rows(random.Random(3), 4, 9, hidden=3, sink=0.0),
        "dp of some thousands": (_rows(random.Random(4), 3, 5, sink=1.0)[0], 4096 * _rows(random.Random(4), 3, 5)[1]),
    },
    draw=lambda r: _rows(r, r.randint(1, 5), r.randint(2, 9), sink=r.uniform(-1, 2)),
    also=["(p * dp - p * (p * dp).sum(dim=1, keepdim=True), ((p.sum(dim=1) - 1) * (p * dp).sum(dim=1)).sum())",
          _by_one_more_column],
    words={"delta": "delta", "jacobian": "the Jacobian"},
    notes={
        "dp - delta": "it is p (dp - delta)", "dim=1": "each row has a delta of its own",
        "(p * dp).sum": "delta is the sum over the keys, weighted by p",
        "p[:, :, None] * p[:, None, :]": "a score also moves the other elements of its row",
        "p_sink": "what is missing in a row's sum to 1 is the sink's p, and its ds is p (0 - delta)",
        "(p_sink * delta).sum": "all rows share one sink: its gradient is the sum over them",
    },
    rows=[
        Row("mean-of-dp", "ds and dsink: delta is taken as the plain mean of dp: it is the sum over the keys, weighted "
            "by p", [("(p * dp).sum(", "dp.mean(")]),
        Row("p-made-to-sum-to-1", "ds and dsink: p is divided by its row's sum: it is right as given, the sink has "
            "the rest", [("delta = ", "all_p, p = p, p / p.sum(dim=1, keepdim=True)\n    delta = "),
                         ("1 - p.sum", "1 - all_p.sum")]),
    ],
    on_device=True,
)  # fmt: skip
def softmax_backward(p, dp):
    # BEGIN SOLUTION
    delta = (p * dp).sum(dim=1, keepdim=True)
    p_sink = 1 - p.sum(dim=1, keepdim=True)  # its dp is 0
    return p * (dp - delta), -(p_sink * delta).sum()
    # END SOLUTION


# ---- 5.2 ------------------------------------------------------------------------------------------------------------


def _tile(r: random.Random, M: int, N: int, D: int) -> dict[str, torch.Tensor]:
    (p, _), v, do = _rows(r, M, N), *(normal(r, rows, D, dtype=torch.float32) for rows in (N, M))
    return {"p": p, "dp": do @ v.T, "o": p @ v, "do": do}


_TILES = {f"{M} rows, {N} keys, {D} columns": _tile(random.Random(M), M, N, D) for M, N, D in (
    (3, 5, 4), (6, 6, 6), (9, 20, 16))}  # fmt: skip
_COLUMNS: dict[str, tuple[torch.Tensor, ...]] = {case: (x["o"], x["do"]) for case, x in _TILES.items()}
_COLUMNS["float16, 256 columns"] = tuple(normal(random.Random(7), 2, 5, 256, dtype=torch.float16))
_DELTA_NOTES = {"mean": "delta is the sum", "digits": "convert before you multiply, or digits are lost"}


@part(
    "5.2",
    returns="delta_over_columns",
    inputs=_COLUMNS,
    draw=lambda r: (lambda x: (x["o"], x["do"]))(_tile(r, r.randint(1, 6), r.randint(2, 6), r.randint(2, 9))),
    notes=_DELTA_NOTES | dict.fromkeys(("o.float", "do.float"), "the products are rounded before they are summed"),
    tol=2e-5,
    on_device=True,
)
def delta_over_columns(o, do):
    # BEGIN SOLUTION
    return (o.float() * do.float()).sum(dim=1)
    # END SOLUTION


@tensor_rule(
    "5.2",
    title="delta, two ways",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Both are a product and a sum along a row: over the keys for P and dP, over the columns for O and dO.",
        "16-bit inputs: convert with .float() before you multiply, or the products are rounded.",
        "(p * dp).sum(dim=1) and (o.float() * do.float()).sum(dim=1).",
    ],
    returns="delta_over_keys",
    inputs={case: (x["p"], x["dp"]) for case, x in _TILES.items()},
    draw=lambda r: _rows(r, r.randint(1, 6), r.randint(2, 9)),
    notes=_DELTA_NOTES,
    parts=["delta_over_columns"],
    on_device=True,
)
def delta_over_keys(p, dp):
    # BEGIN SOLUTION
    return (p * dp).sum(dim=1)
    # END SOLUTION


# ---- the walks ------------------------------------------------------------------------------------------------------


def _head(
    M: int, N: int, D: int, scale: float, *, window: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0,
    change: Callable[..., None] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v, do, o, lse and delta of one head; o and the statistics in float32. lse is +inf where no key is seen.

    window: how many keys a query sees, up to its own; 0: all. change: writes into q, k, v and do before the rest is
    made of them.
    """
    r = random.Random(seed)
    q, k, v, do = (normal(r, rows, D, dtype=dtype) + shift for rows, shift in ((M, 0), (N, 0), (N, 0.5), (M, 0.25)))
    if change:
        change(q, k, v, do)
    o, lse, delta = _statistics(q, k, v, do, scale, window)
    return q, k, v, do, o.float(), lse.float(), delta.float()


def _statistics(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, ...]:
    q, k, v, do = (x.double() for x in (q, k, v, do))
    s = scale * q @ k.T
    if window:
        before = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        s = s.masked_fill((before < 0) | (before >= window), -math.inf)
    lse = torch.logsumexp(s, 1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    o = torch.exp(s - lse[:, None]) @ v
    return o, lse, (o * do).sum(1)


def _near(score: float) -> Callable[..., None]:
    """Every score near this one."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> None:
        q[:, 0], k[:, 0] = abs(score), math.copysign(1.0, score)
        do *= 0.25

    return change


def _faint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> None:
    """The last tile of keys has scores of -60 beside the others, and V so large that it counts all the same."""
    q[:, 0], k[:, 0] = 4.0, 0.0
    k[8:, 0], v[8:] = -15.0, v[8:] * 1e25


def _of_dq(
    M: int, N: int, D: int, scale: float, block: int, seed: int, change: Callable[..., None] | None = None
) -> tuple[Any, ...]:
    """dq_block's arguments. Of P some two thirds are kept."""
    q, k, v, do, _, lse, _ = _head(M, N, D, scale, seed=seed, change=change)
    kept, keep = normal(random.Random(seed), M, N) < 0.4, 0.5 if seed % 2 else 0.75
    p = torch.exp(scale * q.double() @ k.double().T - lse.double()[:, None])
    delta = (p * kept / keep * (do.double() @ v.double().T)).sum(1)
    return q, do, lse, delta.float(), k, v, kept, keep, block, scale


def _of_tiles(fn: Callable[..., Any]) -> None:
    """CheckFailed where a tile is as wide as K is long, or not as wide as BLOCK_N says."""
    expect_flat_memory(fn, _of_dq(128, 256, 8, 0.3, 16, 0), _of_dq(128, 1024, 8, 0.3, 16, 0), 128 * 768 * 4)
    narrow, wide = (peak_bytes(fn, _of_dq(128, 1024, 8, 0.3, block, 0)) for block in (16, 512))
    said = f"the values are right, but BLOCK_N does not count: {wide} bytes are held at once with tiles of 512 keys, "
    said += f"and {narrow} with tiles of 16"
    expect(wide - narrow >= 128 * 496 * 4 // 2, said, diagnosis="block-ignored")


@tensor_rule(
    "5.3",
    title="dQ under dropout", minutes=25,
    hints=[
        "Write the forward pass for one element: o_i has p_ij z_ij v_j in it, with z = KEPT / keep. How does the loss "
        "change with p_ij? That is dp_ij.",
        "dp has the factor z. The softmax knows nothing of the dropout: behind dp all is as without, with the whole P, "
        "and delta is given.",
        "Per tile: p = exp(scale * q @ k.T - lse[:, None]), dp = KEPT[:, keys] * (do @ v.T) / keep, then "
        "ds = p * (dp - delta[:, None]). dq starts at zeros; dq += ds @ k in each tile; return scale * dq.",
    ],
    returns="dq",
    inputs={f"{M} queries, {N} keys, BLOCK_N={block}, scale={scale}": _of_dq(M, N, D, scale, block, N)
            for M, N, D, scale, block in (
                (4, 12, 8, 0.3, 4), (5, 30, 8, 0.5, 8), (7, 7, 16, 0.2, 7), (3, 20, 8, 1.0, 64),
                (4, 10, 8, -0.4, 4))}
    | {"every score near 120": _of_dq(4, 12, 8, 1.0, 4, 0, _near(120.0)),
       "every score near -120": _of_dq(4, 14, 8, 1.0, 4, 1, _near(-120.0)),
       "a tile whose P is 1e-26 and whose V is 1e25": _of_dq(4, 12, 8, 1.0, 4, 2, _faint)},
    draw=lambda r: _of_dq(r.randint(1, 6), r.randint(1, 30), 8, r.choice((0.3, 0.5, 0.7)), r.choice((1, 4, 8)),
                          r.randrange(2**20)),
    also=[[  # in base 2
        ("torch.exp(scale * (q @ k.T) - lse[:, None])",
         "torch.exp2(scale * (q @ k.T) * math.log2(math.e) - lse[:, None] * math.log2(math.e))"),
        ("dq + ds @ k", "dq + scale * (ds @ k)"), ("return scale * dq", "return dq")]],
    nan={"-120": TAIL, "120": "exp(120) is infinite in float32: subtract lse, then take the exponential"},
    notes=NOTES | {
        **dict.fromkeys(("kept", "keep"), "O is P · KEPT / keep times V, so dP has both factors"),
        "kept * (do @ v.T) / keep": "O is P · KEPT / keep times V, so dP has both factors",
        "KEPT[:, start_n : start_n + BLOCK_N]": "each tile has columns of its own",
    },
    rows=[
        Row("dropout-ignored", "dq: the dropout is left out: O is P · KEPT / keep times V, so dP has both factors",
            [("kept * (do @ v.T) / keep", "do @ v.T")]),
        Row("dropout-of-ds", "dq: the dropout multiplies delta's part too: in dS = P (dP - delta), dP alone has it",
            [("kept * (do @ v.T) / keep - delta[:, None]", "kept * (do @ v.T - delta[:, None]) / keep")]),
        Row("zero-where-dropped", "dq: dS is 0 where P was dropped: dP is 0 there, P is whole, and dS is P (0 - delta)",
            [("p * (kept", "p * kept * (kept")]),
        Row("dropout-of-p", "dq: P has the dropout in dS too: the softmax came before, so P is whole; dP alone has it",
            [("p * (kept", "p * kept / keep * (kept")]),
        Row("rate-for-keep", "dq: dP is divided by 1 - keep: `keep` is the probability of being kept",
            [("/ keep", "/ (1 - keep)")]),
        Row("scale-positive", "dq: the scale of the scores is taken as positive: it may be negative",
            [("scale * (q @ k.T)", "abs(scale) * (q @ k.T)")]),
        Row("softmax-per-tile", "dq: P is a softmax over the keys of one tile; exp(score - lse) knows the whole row",
            [("torch.exp(scale * (q @ k.T) - lse[:, None])", "torch.softmax(scale * (q @ k.T), 1)")]),
        Row("maximum-of-the-tile", "dq: P is recomputed with the maximum of the tile's scores in the place of lse",
            [("lse[:, None]", "(scale * (q @ k.T)).amax(1, keepdim=True)")]),
        Row("delta-of-the-tile", "dq: delta is summed over the keys of one tile; it is a sum over all keys, and given",
            [("delta[:, None]", "(p * kept * (do @ v.T) / keep).sum(1, keepdim=True)")]),
        Row("dp-for-ds", "dq: dP stands where dS belongs: it is P · (dP - delta)",
            [("p * (kept * (do @ v.T) / keep - delta[:, None])", "kept * (do @ v.T) / keep")]),
    ],
    on_device=True,
    then=_of_tiles,
)  # fmt: skip
def dq_block(q, do, lse, delta, K, V, KEPT, keep, BLOCK_N, scale):
    """dQ [BLOCK_M, HEAD_DIM] of a block of queries, no mask.

    q, do: [BLOCK_M, HEAD_DIM]; lse, delta: [BLOCK_M]; K, V: [N, HEAD_DIM]; float32. KEPT: [BLOCK_M, N], bool.
    """
    # BEGIN SOLUTION
    dq = torch.zeros_like(q)
    for start_n in range(0, len(K), BLOCK_N):
        k, v = K[start_n : start_n + BLOCK_N], V[start_n : start_n + BLOCK_N]
        kept = KEPT[:, start_n : start_n + BLOCK_N]
        p = torch.exp(scale * (q @ k.T) - lse[:, None])
        ds = p * (kept * (do @ v.T) / keep - delta[:, None])
        dq = dq + ds @ k
    return scale * dq
    # END SOLUTION


def _of_a_block_of_keys(
    M: int, N: int, block: int, start_n: int, scale: float, window: int, seed: int,
    dtype: torch.dtype = torch.float32, rows: int = 8, change: Callable[..., None] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v, do, _, lse, delta = _head(M, N, 8, scale, window=window, seed=seed, dtype=dtype, change=change)
    keys = slice(start_n, start_n + rows)
    return k[keys], v[keys], start_n, q, do, lse, delta, N, block, scale, window


def _some_block_of_keys(r: random.Random) -> tuple[Any, ...]:
    N = r.randint(1, 30)
    return _of_a_block_of_keys(r.randint(1, 30), N, r.choice((1, 4, 8)), r.randrange(N), r.choice((0.3, 0.5)),
                               r.randint(1, 40), r.randrange(2**20))  # fmt: skip


def _far_too_old(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> None:
    """P of key 4 overflows for the queries that do not see it any more; queries 8 to 11 hardly see keys 4 to 7."""
    q[16:, 0], k[4, 0] = 16.0, 64.0
    q[8:12, 1], k[:, 1], k[4:8, 1] = 4.0, 8.0, -8.0


def _weights_told(window_block_sim: Callable[..., Any]) -> tuple[str, str] | None:
    """Which keys count for which queries, where all scores and lse are 0: then P is 1 where a query sees a key."""
    seen, odd, device = [], "", runtime.device()
    for M, N, block, window in ((16, 16, 4, 5), (12, 20, 4, 6), (20, 12, 4, 7), (16, 24, 8, 40), (30, 30, 8, 9)):
        q, keys, lse = (torch.zeros(*shape, device=device) for shape in ((M, M), (N, M), (M,)))
        parts = []
        for start in range(0, N, 8):
            k = keys[start : start + 8]
            given = k, k, start, q, torch.eye(M, device=device), lse, lse, N, block, 1.0, window
            parts.append(window_block_sim(*given)[1].detach().cpu())
        p = torch.cat(parts).T
        distance = torch.arange(M)[:, None] + N - M - torch.arange(N)
        now = Seen(p != 0, (distance >= 0) & (distance < window), {"window": window})
        seen.append(now)
        where = f" ({M} queries, {N} keys, BLOCK_M={block}, window={window}, scores and lse 0)"
        if torch.equal(now.counted, now.visible) and (off := ((p - p.round()).abs() > 1e-3).nonzero()).numel():
            i, j = off[0].tolist()
            return "wrong-weights", f"P of query {i} and key {j} is {p[i, j]:.4g}, and exp(0 - 0) = 1 is right{where}"
        for i in (now.counted != now.visible).any(1).nonzero().flatten().tolist() if not odd else ():
            here, there = (pattern.runs(x[i], "key") if x[i].any() else "no key" for x in (now.counted, now.visible))
            odd = odd or f"query {i} counts for {here}, and it sees {there}{where}"
    rule = rule_of(seen, WINDOW)
    said = rule.replace("seq_q", "M").replace("seq_k", "N") if rule else odd
    return ("wrong-keys", said) if said else None


def _of_few_tiles(window_block_sim: Callable[..., Any]) -> None:
    """CheckFailed where tiles are computed that no query sees."""
    for window, few in ((20, 3), (17, 2)):  # the second ends with a block of queries
        given = _of_a_block_of_keys(128, 128, 16, 32, 0.3, window, 0, rows=16)
        with Meter() as meter:
            window_block_sim(*(x.to(runtime.device()) if isinstance(x, torch.Tensor) else x for x in given))
        tiles = meter.matmul_flops / (4 * 2 * 16 * 16 * 8)
        said = f"right, but {tiles:g} tiles are computed for keys 32 to 47 of 128, window {window}, BLOCK_M=16, where "
        said += f"{few} have a query that sees one of them: begin at the first query that does, end behind the last"
        expect(tiles <= few, said, diagnosis="hidden-tiles-not-skipped")


_BLOCKS = {
    f"{M} queries, {N} keys, keys {start} to {min(N, start + 8) - 1}, BLOCK_M={block}, window={window}":
        _of_a_block_of_keys(M, N, block, start, scale, window, M)
    for M, N, block, start, scale, window in (
        (24, 24, 8, 8, 0.4, 99), (30, 30, 4, 8, 0.4, 6), (30, 30, 8, 0, 0.5, 1), (10, 25, 4, 20, 0.6, 9),
        (10, 25, 4, 8, 0.6, 25), (25, 10, 4, 4, 0.6, 5), (22, 17, 4, 5, 0.6, 3), (15, 20, 4, 10, -0.6, 30),
        (11, 18, 8, 6, 0.5, 11), (4, 1, 8, 0, 0.3, 2), (4, 27, 1, 19, 0.3, 7), (4, 27, 4, 0, 0.3, 5),
        (20, 2, 8, 1, 0.5, 40),
    )
} | {
    "float16, 64 queries, 64 keys, BLOCK_M=8, window=40": _of_a_block_of_keys(64, 64, 8, 8, 0.3, 40, 1, torch.float16),
    "float16, 64 blocks of 16 queries: 2048, then 62 times 1":
        in_small_steps(_of_a_block_of_keys(1024, 1025, 16, 0, 0.3, 2000, 1, torch.float16, rows=2), (2, 3)),
    "28 queries and keys, window 12, key 4 far too large for the queries from 16 on, which do not see it":
        _of_a_block_of_keys(28, 28, 4, 4, 0.5, 12, 3, rows=4, change=_far_too_old),
}  # fmt: skip
_SEES = "query i sees key j if i + N - M - window < j <= i + N - M"
_BEGIN = "max(0, start_n - (N - M))"
_END = "min(M, start_n + len(k) - 1 - (N - M) + window)"
_DISTANCE = "start_m + N - M - start_n"
_UPPER, _LOWER = f"distance = {_DISTANCE}", "p = torch.triu(p, distance - window + 1)"
_ROWS_OF_A_TILE = "Q[rows].float(), dO[rows].float()"
_WITH_A_MASK = [
    (_BEGIN, "max(0, start_n + M - N)"), (_END, "min(M, start_n + len(k) - 1 + M - N + window)"),
    ("        rows = slice(start_m, min(start_m + BLOCK_M, M))\n", ""),
    (_ROWS_OF_A_TILE, _ROWS_OF_A_TILE.replace("rows", "start_m : start_m + BLOCK_M")),
    (_UPPER, "lse_i, delta_i = lse[start_m : start_m + BLOCK_M], delta[start_m : start_m + BLOCK_M]"),
    ("lecture.probabilities_sim(q, k, lse[rows], distance, scale)", "torch.exp(scale * (q @ k.T) - lse_i[:, None])"),
    (_LOWER, "i = torch.arange(len(q), device=q.device)[:, None] + start_m + N - M\n"
     "        j = torch.arange(len(k), device=q.device)[None, :] + start_n\n"
     "        p = torch.where((j <= i) & (j > i - window), p, 0.0)"),
    ("p.to(dO.dtype).float().T", "p.T"), ("ds.to(Q.dtype).float().T", "ds.T"),
    ("delta[rows, None]", "delta_i[:, None]"),
]  # fmt: skip


@tensor_rule(
    "5.4",
    title="A block of keys under a window", minutes=35,
    hints=[
        "The lecture's key_block_sim, causal, has the walk, one edge of the mask and the four products. Two things are "
        "new: where the walk ends, and the other edge of the mask.",
        "Key j is seen by `window` queries: the first is j - (N - M), the last j - (N - M) + window - 1. Begin at the "
        "first that sees the block's first key; end behind the last that sees its last key, and at M.",
        "The tile's distance is that of its corner: start_m + N - M - start_n. Row i of the tile sees its columns "
        "i + distance - window < j <= i + distance. Set p to 0 in the others: torch.triu, torch.where or masked_fill. "
        "A product with a mask of zeros is NaN where p is infinite.",
        "p = torch.triu(probabilities_sim(q, k, lse[rows], distance, scale), distance - window + 1); dv += p.T @ do; "
        "ds = p * (do @ v.T - delta[rows, None]); dk += ds.T @ q. All in float32; return scale * dk, dv.",
    ],
    returns="dk, dv",
    inputs=_BLOCKS,
    draw=_some_block_of_keys,
    also=[_WITH_A_MASK, [(_BEGIN, f"{_BEGIN} // BLOCK_M * BLOCK_M")]],
    words={"lse_i": "lse[rows]", "delta_i": "delta[rows]", "j": "j"},
    nan={"far too large": "P of a hidden pair may be infinite, and inf · 0 is NaN: set P to 0 there, do not multiply"},
    notes=NOTES | {
        "start_n": _SEES, "start_m": _SEES, "N - M": _SEES, "window": _SEES, "distance": _SEES,
        "start_n - (N - M)": "begin at the first query that sees the block's first key",
        _BEGIN: "the first query that sees the block's first key is 0 at least",
        _END: "the walk ends behind the last query that sees the block's last key",
        "dk": "each block adds to the sum", "dv": "each block adds to the sum", "q": "the scores come from Q and K",
        "do": "the output is P times V", "dtype": "in which dtype are the sums kept?",
        "delta[rows": "each block has its own rows",
    },
    rows=[
        Row("ds-for-p", "dv: dS stands where P belongs: dV is P transposed times dO",
            [("dv = dv + p.to(dO.dtype).float().T @ do", "dv = dv + (p * (do @ v.T - delta[rows, None])).T @ do")]),
        Row("dp-for-ds", "dk: dP stands where dS belongs: it is P · (dP - delta)",
            [("ds = p * (do @ v.T - delta[rows, None])", "ds = do @ v.T")]),
        Row("delta-of-the-first-rows", "dk: delta is that of the first block's rows in every block",
            [("delta[rows, None]", "delta[: len(q), None]")]),
        Row("statistics-of-the-first-rows", "dk and dv: lse and delta are those of the first block's rows in "
            "every block", [("lse[rows]", "lse[: len(q)]"), ("delta[rows, None]", "delta[: len(q), None]")]),
        Row("window-edge-missing", f"dk and dv: keys that are too old are not hidden: {_SEES}", [(_LOWER, "pass")]),
        Row("window-edge-missing", f"dk and dv: keys that are too old are not hidden, and the walk goes on to the last "
            f"query: {_SEES}", [(_LOWER, "pass"), (_END, "M")]),
        Row("causal-mask-missing", f"dk and dv: later keys are not hidden: {_SEES}",
            [("lse[rows], distance", "lse[rows], None")]),
        Row("causal-aligned-top-left", f"dk and dv: both edges of the mask are aligned at the first key: {_SEES}",
            [(_UPPER, "distance = start_m - start_n")]),
        Row("causal-aligned-top-left", f"dk and dv: mask and walk are aligned at the first key: {_SEES}",
            [(_UPPER, "distance = start_m - start_n"), (_BEGIN, "start_n"), (_END, _END.replace(" - (N - M)", ""))]),
        Row("causal-aligned-top-left", f"dk and dv: the mask's upper edge is aligned at the first key: {_SEES}",
            [("lse[rows], distance", "lse[rows], start_m - start_n")]),
        *rounded_sums(dk=("dk = dk + ", "dk = dk.to(Q.dtype).float() + "),
                      dv=("dv = dv + ", "dv = dv.to(dO.dtype).float() + ")),
        Row("block-counted-from-0", "dk and dv: the lower edge counts the block's keys from 0, not from start_n",
            [("distance - window + 1", "distance + start_n - window + 1")]),
        Row("begins-late", "dk and dv: the walk begins a block too late: the first queries that see these keys are "
            "left out", [(_BEGIN, f"-(-{_BEGIN} // BLOCK_M) * BLOCK_M")]),
        Row("begins-at-its-row", "dk and dv: the walk begins at the query with the number of the block's first key; "
            f"{_SEES}", [(_BEGIN, "start_n")]),
        Row("ends-with-the-first-key", "dk and dv: the walk ends behind the last query that sees the block's first "
            "key; its last key is seen by later ones", [("start_n + len(k) - 1 - (N - M)", "start_n - (N - M)")]),
    ],
    tol=2e-3,
    tries=500,
    on_device=True,
    symptom=_weights_told,
    then=_of_few_tiles,
)  # fmt: skip
def window_block_sim(K_block, V_block, start_n, Q, dO, lse, delta, N, BLOCK_M, scale, window):
    """dK and dV of the block of keys that begins at row start_n of N; float32 [rows, HEAD_DIM] each.

    K_block, V_block: [rows, HEAD_DIM]; Q, dO: [M, HEAD_DIM]; lse, delta: [M].
    """
    # 1. Two accumulators. Where does the walk over the queries begin, and where does it end?
    # 2. For each block of queries: q, do, a tile of p with both edges of the window.
    # 3. dv, then ds, then dk. (P and dS may be rounded to the inputs' dtype before they are multiplied.)
    # BEGIN SOLUTION
    k, v = K_block.float(), V_block.float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    M = len(Q)
    begin = max(0, start_n - (N - M))  # the first query that sees the block's first key
    end = min(M, start_n + len(k) - 1 - (N - M) + window)  # behind the last one that sees its last key
    for start_m in range(begin, end, BLOCK_M):
        rows = slice(start_m, min(start_m + BLOCK_M, M))
        q, do = Q[rows].float(), dO[rows].float()
        distance = start_m + N - M - start_n
        p = lecture.probabilities_sim(q, k, lse[rows], distance, scale)
        p = torch.triu(p, distance - window + 1)
        dv = dv + p.to(dO.dtype).float().T @ do
        ds = p * (do @ v.T - delta[rows, None])
        dk = dk + ds.to(Q.dtype).float().T @ q
    return scale * dk, dv
    # END SOLUTION


# ---- 5.5 ------------------------------------------------------------------------------------------------------------


def _rows_of(o: torch.Tensor, dy: torch.Tensor) -> tuple[Any, ...]:
    """gated_delta_kernel's arguments."""
    g = normal(random.Random(len(o)), len(o), dtype=torch.float32)
    return o, dy, g, empty(len(o)), empty(len(o)), *o.stride(), *dy.stride(), len(o), o.shape[1], 16


def _some_rows(r: random.Random) -> tuple[Any, ...]:
    M, D = r.randint(1, 60), r.choice((16, 32))
    o, dy = (normal(r, M, D, dtype=torch.float32) for _ in "od")
    return _rows_of(r.choice((o, o.T.contiguous().T, apart(o, 5))), r.choice((dy, dy.T.contiguous().T, apart(dy, 3))))


_O, _DY = (normal(random.Random(seed), 50, 32, dtype=torch.float32) for seed in (3, 4))
_OWN = "each tensor has its own strides, and each stride its own index"


@kernel_rule(
    "5.5",
    title="delta behind a gate", minutes=25,
    hints=[
        "On paper first. y = g · o, so dO is g · dY. And a row's g is in every column of y: what is dg?",
        "dg is the sum of o · dY along the row, delta the sum of o · dO. How do the two differ?",
        "The last block reaches over the end: mask the loads and the stores with offs_m < M, and say other=0.0. Each "
        "matrix has its own two strides.",
        "dg = tl.sum(o.to(tl.float32) * dy.to(tl.float32), axis=1), stored at DG_ptr + offs_m, and g * dg at DELTA_ptr "
        "+ offs_m.",
    ],
    writes="DELTA_ptr, DG_ptr",
    returns="delta, dg",
    programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M),
    inputs={
        f"{case}, {len(o)} rows of {o.shape[1]}, BLOCK_M=16": _rows_of(o, dy) for case, o, dy in (
            ("contiguous, float32", _O, _DY), ("contiguous, float16", _O.half(), _DY.half()),
            ("a whole number of blocks", _O[:48], _DY[:48]), ("half of the columns", _O[:17, :16], _DY[:17, 16:]),
            ("dY stored by columns", _O, _DY.T.contiguous().T), ("O stored by columns", _O.T.contiguous().T, _DY),
            ("dY with strides of 0, as y.sum().backward() gives", _O, torch.ones(()).expand(50, 32)))
    },
    draw=_some_rows,
    notes={
        "stride_om": _OWN, "stride_od": _OWN, "stride_dym": _OWN, "stride_dyd": _OWN,
        "g": "the attention gave O, so its delta is the sum of o · dO, and dO = g · dY",
        "to": "the products are rounded before they are summed", "tl.float32": "the products would be rounded",
        "digits": "are the products, or their sum, rounded to 16 bits?",
    },
    rows=[
        Row("strides-of-o", f"dY is read with O's strides: {_OWN}", [
            ("offs_m[:, None] * stride_dym + offs_d[None, :] * stride_dyd",
             "offs_m[:, None] * stride_om + offs_d[None, :] * stride_od")]),
        Row("gate-in-dg", "dg has a factor g: that is delta; y = g · o, so dg is the sum of o · dY alone",
            [("DG_ptr + offs_m, dg", "DG_ptr + offs_m, g * dg")]),
    ],
)  # fmt: skip
@triton.jit
def gated_delta_kernel(
    O_ptr, DY_ptr, G_ptr, DELTA_ptr, DG_ptr, stride_om, stride_od, stride_dym, stride_dyd, M,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    # BEGIN SOLUTION
    o_ptrs = O_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    dy_ptrs = DY_ptr + offs_m[:, None] * stride_dym + offs_d[None, :] * stride_dyd
    o = tl.load(o_ptrs, mask=offs_m[:, None] < M, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=offs_m[:, None] < M, other=0.0).to(tl.float32)
    g = tl.load(G_ptr + offs_m, mask=offs_m < M, other=0.0)
    dg = tl.sum(o * dy, axis=1)
    tl.store(DELTA_ptr + offs_m, g * dg, mask=offs_m < M)
    tl.store(DG_ptr + offs_m, dg, mask=offs_m < M)
    # END SOLUTION


# ---- 5.6, 5.11 ------------------------------------------------------------------------------------------------------


def _launch_of(
    kernel: str, M: int, N: int, BLOCK_M: int, BLOCK_N: int, D: int = 16, scale: float = 0.3, seed: int = 0,
    dtype: torch.dtype = torch.float16, change: Callable[..., None] | None = None, apart_by: int = 4,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of dq_kernel, or of dc_kernel, whose K and V are one, with rows apart in memory.

    apart_by: 0 where rows are contiguous: tensors exchanged give other values there than strides exchanged, which are
    one stray address elsewhere.
    """

    def as_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> None:
        if change:
            change(q, k, v, do)
        if kernel == "dc":
            v.copy_(k)

    q, k, v, do, _, lse, delta = _head(M, N, D, scale, dtype=dtype, seed=seed, change=as_one)
    tensors = (q, k, v, do) if kernel == "dq" else (q, k, do)
    read = [apart(x, apart_by * gap) for x, gap in zip(tensors, (1, 2, 3, 5), strict=False)]
    result = empty(M if kernel == "dq" else N, D, gap=apart_by * 8, dtype=dtype)
    strides = [x.stride(0) for x in (*read, result)]
    return *read, lse, delta, result, *strides, scale, M, N, D, BLOCK_M, BLOCK_N


def _launches(kernel: str) -> dict[str, tuple[Any, ...]]:
    found = {}
    for M, N, BLOCK_M, BLOCK_N, D, scale, dtype in (
        (7, 20, 16, 32, 16, 0.3, torch.float32), (20, 7, 32, 16, 16, 0.5, torch.float16),
        (17, 33, 16, 16, 16, 0.3, torch.float16),
        (32, 48, 32, 16, 16, 0.3, torch.float16), (48, 32, 16, 32, 32, 0.2, torch.float16),
        (40, 50, 16, 16, 16, -0.4, torch.float32), (7, 70, 16, 32, 64, 0.3, torch.float16),
        (70, 7, 32, 16, 64, 0.3, torch.float16), (5, 7, 16, 16, 16, 0.3, torch.float16),
    ):  # fmt: skip
        case = f"{M} queries, {N} keys, BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, {str(dtype).removeprefix('torch.')}"
        found[case] = _launch_of(kernel, M, N, BLOCK_M, BLOCK_N, D, scale, M, dtype)
    found["20 queries and keys, tiles of 16, contiguous"] = _launch_of(kernel, 20, 20, 16, 16, apart_by=0)
    found["16 queries and keys, one full tile, every score near -120"] = _launch_of(
        kernel, 16, 16, 16, 16, scale=1.0, change=_near(-120.0))  # fmt: skip
    # The second is lower than what some write for -inf.
    for score, dtype in ((-120.0, torch.float16), (-(2.0**100), torch.float32)):
        case = f"20 queries and keys, tiles of 16, every score near {score:.3g}"
        found[case] = _launch_of(kernel, 20, 20, 16, 16, scale=1.0, dtype=dtype, change=_near(score))
    M, N, walked, delta = (1, 1600, (1,), 5) if kernel == "dq" else (1600, 2, (0, 2), 4)
    found[f"{M} queries, {N} keys, 100 tiles: 2048, then 98 times 1"] = in_small_steps(
        _launch_of(kernel, M, N, 16, 16, scale=1.0), walked, delta)  # fmt: skip
    return found


def _some_launch(kernel: str) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda r: _launch_of(
        kernel, r.randint(1, 60), r.randint(1, 60), r.choice((16, 32)), r.choice((16, 32)), r.choice((16, 32)),
        r.choice((0.2, 0.5)), r.randrange(2**20), r.choice((torch.float16, torch.float32)),
    )  # fmt: skip


def _tail(what: str) -> dict[str, str]:
    """What is said of NaN where scores are far below 0. what: of what the last tile has too many."""
    return {
        "full tile": "NaN where tiles are full: exp(score) and exp(lse) are 0 there, each by itself, and not "
        "exp(score - lse)",
        "near": f"NaN in the last tile alone: P of a {what} that is not there is not 0: where lse is lower than "
        "the score it gets, exp(score - lse) is infinite, and that times 0 is NaN",
    }


@kernel_rule(
    "5.6",
    title="dq_kernel", minutes=35,
    hints=[
        "The walk of 5.3, less the dropout. What the program keeps is loaded already: q, do, lse, delta.",
        "Scores: tl.dot(q, k.T, input_precision='ieee') * scale. p = tl.exp(s - lse[:, None]); ds = p * (dp - "
        "delta[:, None]); dq = tl.dot(ds.to(k.dtype), k, dq, input_precision='ieee').",
        "A key that is not there has k = 0, so its score is 0 and its p is exp(-lse), which may be infinite. Set ds to "
        "0 there with tl.where(in_range[None, :], ds, 0.0).",
        "Store (dq * scale).to(DQ_ptr.dtype.element_ty), masked by offs_m[:, None] < M.",
    ],
    writes="DQ_ptr",
    returns="dq",
    programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M),
    inputs=_launches("dq"),
    draw=_some_launch("dq"),
    nan=_tail("key"),
    notes=OF_KERNELS,
    rows=[mixed_bases("dq", "s", "lse[:, None]"), *rounded_sums(dq=(", dq, input", f", dq{CUT}, input"))],
)  # fmt: skip
@triton.jit
def dq_kernel(
    Q_ptr, K_ptr, V_ptr, DO_ptr, LSE_ptr, DELTA_ptr, DQ_ptr,
    stride_qm, stride_kn, stride_vn, stride_dom, stride_dqm,
    scale, M, N, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    rows = offs_m[:, None] < M
    q = tl.load(Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :], mask=rows, other=0.0)
    do = tl.load(DO_ptr + offs_m[:, None] * stride_dom + offs_d[None, :], mask=rows, other=0.0)
    lse = tl.load(LSE_ptr + offs_m, mask=offs_m < M, other=float("inf"))
    delta = tl.load(DELTA_ptr + offs_m, mask=offs_m < M, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_range = offs_n < N
        k = tl.load(K_ptr + offs_n[:, None] * stride_kn + offs_d[None, :], mask=in_range[:, None], other=0.0)
        v = tl.load(V_ptr + offs_n[:, None] * stride_vn + offs_d[None, :], mask=in_range[:, None], other=0.0)
        # BEGIN SOLUTION
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        p = tl.exp(s - lse[:, None])
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = tl.where(in_range[None, :], p * (dp - delta[:, None]), 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_ptrs = DQ_ptr + offs_m[:, None] * stride_dqm + offs_d[None, :]
    tl.store(dq_ptrs, (dq * scale).to(DQ_ptr.dtype.element_ty), mask=rows)
    # END SOLUTION


_TWO_SUMS = (  # as the lecture has them
    ("dc = tl.zeros", "dk = dc = tl.zeros"), ("ds_t = scale * p_t", "ds_t = p_t"),
    ("dc = tl.dot(ds_t.to(q.dtype), q, dc", "dk = tl.dot(ds_t.to(q.dtype), q, dk"),
    ("dc.to(DC", "(dc + scale * dk).to(DC"),
)  # fmt: skip


@kernel_rule(
    "5.11",
    title="K and V in one, from an empty page", minutes=60, difficulty="Stretch",
    hints=[
        "It is the lecture's walk of a block of keys over the queries, as in 5.4: load the tile of C once, masked. It "
        "is k and v. C is used twice, and the gradient of C is the sum over its uses: one accumulator in float32.",
        "Compute the tile transposed: s_t = tl.dot(c, q.T) is [BLOCK_N, BLOCK_M], and lse[None, :] belongs to its "
        "columns. Then dc = tl.dot(p_t.to(do.dtype), do, dc) needs no transposition.",
        "Load lse with other=float('inf') and delta with other=0.0: then p is 0 for queries that are not there.",
        "dp_t = tl.dot(c, do.T); ds_t = scale * p_t * (dp_t - delta[None, :]); dc = tl.dot(ds_t.to(q.dtype), q, dc). "
        "What P gives has no scale, so the scale cannot wait for the end. All four products with "
        "input_precision='ieee'.",
    ],
    writes="DC_ptr",
    returns="dc",
    programs=lambda N, BLOCK_N, **_: -(-N // BLOCK_N),
    inputs=_launches("dc"),
    draw=_some_launch("dc"),
    nan=_tail("query"),
    notes=OF_KERNELS,
    rows=[
        mixed_bases("dc", "s_t", "lse[None, :]"),
        *rounded_sums(dc=("do, dc, input", "do, dc.to(c.dtype).to(tl.float32), input")),
        Row("other-of-lse", "NaN from queries that are not there: their lse should be inf, so that p is 0, and delta 0",
            [("M, other=0.0)\n        s_t", "M, other=float('inf'))\n        s_t")]),
        *(Row("scores-unscaled", "the scores that P is made of lack the scale: P is exp(scale * Q C^T - lse)",
              [(" * scale  # transposed", "  # transposed"), *sums]) for sums in ((), _TWO_SUMS)),
        Row("lse-scaled", "lse is multiplied by the scale, with the scores: it has it already", [
            (" * scale  # transposed", "  # transposed"), ("s_t - lse[None, :]", "(s_t - lse[None, :]) * scale")]),
        Row("c-scaled", "C is scaled where it is loaded, and so dP too: the scale belongs to the scores alone", [
            ("mask=keys, other=0.0)", "mask=keys, other=0.0)\n    c = (c * scale).to(c.dtype)"),
            (" * scale  # transposed", "  # transposed")]),
        Row("own-softmax", "P is normalised over the tile's keys: lse has all keys, and P is exp(score - lse)", [
            ("p_t = tl.exp(s_t - lse[None, :])", "p_t = tl.exp(s_t - tl.max(s_t, axis=0)[None, :])\n"
             "        p_t = p_t / tl.sum(p_t, axis=0)[None, :]")]),
        Row("causal", "a causal mask hides keys: here every query sees every key", [
            ("p_t = tl.exp(s_t - lse[None, :])", "p_t = tl.where(offs_m[None, :] + N - M >= offs_n[:, None], "
             "tl.exp(s_t - lse[None, :]), 0.0)")]),
        Row("begins-at-the-block", "the walk begins at the block's own rows, as behind a causal mask: here every query "
            "sees every key", [("range(0, M, BLOCK_M)", "range(tl.program_id(0) * BLOCK_N, M, BLOCK_M)")]),
        Row("ds-unscaled", "dc: what dS gives lacks the scale: C has the gradient P^T dO + scale * dS^T Q",
            [("scale * p_t", "p_t")]),
        Row("ds-subtracted", "dc: what dS gives has the wrong sign: dS is P (dP - delta), and is added",
            [("(dp_t - delta[None, :])", "(delta[None, :] - dp_t)")]),
        Row("keys-alone", "dc: that is C's gradient as keys alone: C is the values too, and P^T dO adds to it",
            [('dc = tl.dot(p_t.to(do.dtype), do, dc, input_precision="ieee")', "pass")]),
        Row("values-alone", "dc: that is C's gradient as values alone: C is the keys too, and dS^T Q adds to it",
            [('dc = tl.dot(ds_t.to(q.dtype), q, dc, input_precision="ieee")', "pass")]),
        Row("scale-of-both", "dc: the whole sum is multiplied by scale: it belongs to what dS gives, not to P^T dO",
            [("ds_t = scale * p_t", "ds_t = p_t"), ("dc.to(DC", "(dc * scale).to(DC")]),
        Row("ds-for-p", "dc: dS stands where P belongs: as values C has the gradient P transposed times dO",
            [("tl.dot(p_t.to(do.dtype), do", "tl.dot((p_t * (tl.dot(c, do.T, input_precision='ieee') - "
              "delta[None, :])).to(do.dtype), do")]),
    ],
)  # fmt: skip
@triton.jit
def dc_kernel(
    Q_ptr, C_ptr, DO_ptr, LSE_ptr, DELTA_ptr, DC_ptr,
    stride_qm, stride_cn, stride_dom, stride_dcn,
    scale, M, N, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BEGIN SOLUTION
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    keys = offs_n[:, None] < N
    c = tl.load(C_ptr + offs_n[:, None] * stride_cn + offs_d[None, :], mask=keys, other=0.0)
    dc = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    for start_m in range(0, M, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None] < M
        q = tl.load(Q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :], mask=rows, other=0.0)
        do = tl.load(DO_ptr + offs_m[:, None] * stride_dom + offs_d[None, :], mask=rows, other=0.0)
        lse = tl.load(LSE_ptr + offs_m, mask=offs_m < M, other=float("inf"))
        delta = tl.load(DELTA_ptr + offs_m, mask=offs_m < M, other=0.0)
        s_t = tl.dot(c, q.T, input_precision="ieee") * scale  # transposed: keys down, queries across
        p_t = tl.exp(s_t - lse[None, :])
        dc = tl.dot(p_t.to(do.dtype), do, dc, input_precision="ieee")
        dp_t = tl.dot(c, do.T, input_precision="ieee")
        ds_t = scale * p_t * (dp_t - delta[None, :])  # scaled here: what P gives has no scale
        dc = tl.dot(ds_t.to(q.dtype), q, dc, input_precision="ieee")
    dc_ptrs = DC_ptr + offs_n[:, None] * stride_dcn + offs_d[None, :]
    tl.store(dc_ptrs, dc.to(DC_ptr.dtype.element_ty), mask=keys)
    # END SOLUTION


# ---- 5.7 ------------------------------------------------------------------------------------------------------------


def _of_a_loss(r: random.Random, M: int, N: int, D: int) -> tuple[torch.Tensor, ...]:
    (p, _), v, do = _rows(r, M, N), *(normal(r, rows, D, dtype=torch.float32) for rows in (N, M))
    return p, v, p @ v, do, normal(r, M, dtype=torch.float32) + 0.5


@tensor_rule(
    "5.7",
    title="A loss that uses lse", minutes=15,
    hints=[
        "Two ways lead from a score to the loss: through P and O, and through lse. Their gradients add up.",
        "d lse_i / d s_ij = p_ij. So the second part is p * dlse[:, None].",
        "delta = (o * do).sum(1); return p * (do @ v.T - delta[:, None] + dlse[:, None]).",
    ],
    returns="ds",
    inputs={f"{M} queries, {N} keys, {D} columns": _of_a_loss(random.Random(M), M, N, D) for M, N, D in (
        (3, 5, 4), (6, 6, 6), (4, 20, 8))},
    draw=lambda r: _of_a_loss(r, r.randint(2, 6), r.randint(2, 8), r.randint(2, 8)),
    also=[
        "p * (do @ v.T) - p * (o * do).sum(dim=1)[:, None] + p * dlse[:, None]",
        "p * (do @ v.T - (p * (do @ v.T)).sum(dim=1, keepdim=True) + dlse[:, None])",
    ],
    notes={
        "dlse[:, None]": "the gradient of lse reaches the scores too, weighted by p",
        "delta[:, None]": "it is dP - delta", "p": "each score of a row weighs p",
        "(o * do).sum": "delta is the sum of o · dO",
    },
    rows=[
        Row("dp-times-dlse", "dP is multiplied by dlse; dlse is added to dP - delta",
            [("do @ v.T - delta[:, None] + dlse[:, None]", "do @ v.T * dlse[:, None] - delta[:, None]")]),
    ],
    on_device=True,
)  # fmt: skip
def scores_gradient(p, v, o, do, dlse):
    """p: [M, N]; v: [N, HEAD_DIM]; o, do: [M, HEAD_DIM]; dlse: [M]."""
    # BEGIN SOLUTION
    delta = (o * do).sum(dim=1)
    return p * (do @ v.T - delta[:, None] + dlse[:, None])
    # END SOLUTION


# ---- 5.8 ------------------------------------------------------------------------------------------------------------


def _grouped(r: random.Random) -> tuple[torch.Tensor, int]:
    kv_heads = r.randint(1, 3)
    heads = kv_heads * r.randint(1, 4)
    return normal(r, r.randint(1, 2), heads, r.randint(1, 4), r.randint(1, 4), dtype=torch.float32), kv_heads


def _by_loops(dk, kv_heads):
    heads = dk.shape[1]
    group = heads // kv_heads
    out = torch.zeros(dk.shape[0], kv_heads, dk.shape[2], dk.shape[3])
    for h in range(heads):
        out[:, h // group] += dk[:, h].float()
    return out.to(dk.dtype)


_MANY_SMALL = torch.ones(1, 8, 1, 1, dtype=torch.float16)
_MANY_SMALL[0, 0] = 2048.0
_IN_16_BITS = "in float16, 2048 + 1 is 2048: add up in float32"


@tensor_rule(
    "5.8",
    title="The sum over a group", minutes=10,
    hints=[
        "Query head h reads key head h // group: the heads of one group lie side by side.",
        "x.unflatten(1, (kv_heads, group)) has the group in dimension 2. Sum over it.",
        "dk.unflatten(1, (kv_heads, -1)).float().sum(2).to(dk.dtype).",
    ],
    returns="dk",
    inputs={
        **{f"batch {b}, {h} query heads, {n} key heads": (normal(random.Random(h), b, h, N, D, dtype=torch.float32), n)
           for b, h, n, N, D in ((1, 4, 2, 3, 5), (2, 6, 3, 4, 2), (2, 6, 1, 3, 3), (1, 3, 3, 2, 2))},
        "float16: 2048, and seven times 1": (_MANY_SMALL, 1),
    },
    draw=_grouped,
    also=[_by_loops],
    words={"h": "head", "group": "group"},
    notes={
        "float": _IN_16_BITS, "digits": _IN_16_BITS, "dtype": "dk should have its input's dtype",
        "h // group": "query head h reads key head h // group",
    },
    rows=[
        Row("heads-interleaved", "a group's heads are taken kv_heads apart; query head h reads key head h // group",
            [("(kv_heads, -1)", "(-1, kv_heads)"), ("dim=2", "dim=1")]),
        Row("first-head-only", "that is the gradient of the group's first head alone: all of them add up",
            [(".float().sum(dim=2).to(dk.dtype)", "[:, :, 0]")]),
        Row("last-head-only", "that is the gradient of the group's last head alone: all of them add up",
            [(".float().sum(dim=2).to(dk.dtype)", "[:, :, -1]")]),
        Row("all-heads", "every key head has the sum over all query heads; it has that of its own group",
            instead="dk.sum(1, keepdim=True).expand(-1, kv_heads, -1, -1)"),
    ],
    tol=1e-4,
    on_device=True,
)  # fmt: skip
def group_sum(dk, kv_heads):
    # BEGIN SOLUTION
    return dk.unflatten(1, (kv_heads, -1)).float().sum(dim=2).to(dk.dtype)
    # END SOLUTION


# ---- 5.9, 5.10: bug hunts -------------------------------------------------------------------------------------------


def _of_a_hunt(n: int, block: int, causal: bool, scale: float = 0.4) -> tuple[Any, ...]:
    q, k, v, do, _, lse, delta = _head(n, n, 8, scale, window=n if causal else 0, seed=n)
    return q, k, v, do, lse, delta, block, scale, causal


@tensor_rule(
    "5.9",
    title="It was only ever asked for one", minutes=20, difficulty="Bug hunt",
    bug=Row(
        "causal-always", "without causal a query still sees its own and earlier keys alone: walk, mask or both "
        "are as with it",
        [("start_n if causal else 0", "start_n"), ("causal and start_m == start_n", "start_m == start_n")],
    ),
    history="the tutorial of Triton: triton-lang/triton, issues 4541 (2024) and 5660 (2025), pull request 5241",
    hints=[
        "Which cases are right? What have they in common?",
        "There is an argument that says what was asked for. Where in the function is it used?",
        "Two lines depend on causal: where the walk over the queries begins, and whether the tile on the diagonal is "
        "masked. Without a mask every query sees every key.",
    ],
    returns="dk, dv",
    inputs={f"{n} queries and keys, blocks of {block}, causal={causal}": _of_a_hunt(n, block, causal, scale)
            for n, block, causal, scale in ((16, 8, True, 0.4), (16, 8, False, 0.4), (21, 8, True, 0.3),
                                            (21, 8, False, 0.4), (5, 8, False, 0.5), (30, 4, True, -0.4))},
    draw=lambda r: _of_a_hunt(r.randint(1, 30), r.choice((4, 8)), r.random() < 0.5, r.choice((0.3, 0.5))),
    notes=NOTES | {
        "causal": "without a mask every query sees every key, and nothing is masked",
        "start_n": "without a mask the walk begins at query 0",
        "start_m == start_n": "tiles below the diagonal are seen whole",
    },
    rows=[
        Row("diagonal-left-out", "the tiles on the diagonal are left out: causal, the walk begins a block too late",
            [("start_n if causal else 0", "start_n + BLOCK if causal else 0")]),
        Row("causal-off-by-one", "a query does not see its own position", [("torch.tril(p)", "torch.tril(p, -1)")]),
        Row("causal-off-by-one", "a query sees one key behind its own", [("torch.tril(p)", "torch.tril(p, 1)")]),
        Row("mask-inverted", "on the diagonal what a query sees is hidden, and what it does not see counts: tril keeps "
            "j <= i", [("torch.tril(p)", "torch.triu(p)")]),
        Row("diagonal-always-masked", "all tiles are visited, those on the diagonal are masked, whatever causal says",
            [("start_n if causal else 0", "0"), ("causal and start_m == start_n", "start_m == start_n")]),
    ],
    on_device=True,
)  # fmt: skip
def hunted_9(q, k, v, do, lse, delta, BLOCK, scale, causal):
    """dk, dv of one head, as many queries as keys. q, k, v, do: [N, HEAD_DIM]; lse, delta: [N]; float32."""
    N = len(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start_n in range(0, N, BLOCK):
        keys = slice(start_n, start_n + BLOCK)
        for start_m in range(start_n if causal else 0, N, BLOCK):  #: repaired: without a mask all see them
            rows = slice(start_m, start_m + BLOCK)
            p = torch.exp(scale * (q[rows] @ k[keys].T) - lse[rows, None])
            if causal and start_m == start_n:  #: repaired: and nothing is masked
                p = torch.tril(p)
            dv[keys] += p.T @ do[rows]
            ds = p * (do[rows] @ v[keys].T - delta[rows, None])
            dk[keys] += scale * (ds.T @ q[rows])
    return dk, dv


def _of_a_grid(M: int, N: int, BLOCK_M: int, BLOCK_N: int, scale: float = 0.3) -> tuple[Any, ...]:
    q, k, v, do, o, lse, _ = _head(M, N, 8, scale, seed=M)
    return q, k, v, o, lse, do, BLOCK_M, BLOCK_N, scale


def _never_computed(hunted: Callable[..., Any]) -> tuple[str, str] | None:
    """The first rows of a result that no program computes."""
    for M, N, m, n in ((17, 50, 16, 16), (50, 17, 16, 8), (33, 16, 16, 16)):
        results = hunted(*_of_a_grid(M, N, m, n))
        for name, of, x, block in zip(("dq", "dk"), ("queries", "keys"), results, (m, n), strict=False):
            if (nothing := (x == 0).all(dim=1)).any():
                said = f"{pattern.runs(nothing, 'row')} of {name} are never computed: no program has these {of}"
                return "never-computed", f"{said} (with {M} queries, {N} keys and blocks of {block} {of})"
    return None


_QUERIES, _KEYS = (f"each block of {x} needs a program" for x in ("queries", "keys"))


@tensor_rule(
    "5.10",
    title="One grid for both", minutes=20, difficulty="Bug hunt",
    bug=Row(
        "limit-missing", f"the number of programs is that of the blocks of queries: {_KEYS} too",
        [("max(math.ceil(M / BLOCK_M), math.ceil(N / BLOCK_N))", "math.ceil(M / BLOCK_M)")],
    ),
    history="the tutorial of Triton in 2023: its backward pass was launched with the forward pass's grid "
    "(triton-lang/triton, issue 1975)",
    hints=[
        "Which of the three gradients is wrong, and in which rows? What do the right cases have in common?",
        "How many programs are there, and what is each of them to do? Count for 64 queries, 64 keys, BLOCK_M = 32, "
        "BLOCK_N = 16.",
        "There are ceil(M / BLOCK_M) blocks of queries and ceil(N / BLOCK_N) blocks of keys. Take the larger number of "
        "programs, or two loops.",
    ],
    returns="dq, dk, dv",
    inputs={f"{M} queries, {N} keys, BLOCK_M={m}, BLOCK_N={n}": _of_a_grid(M, N, m, n) for M, N, m, n in (
        (32, 32, 16, 16), (64, 64, 32, 16), (40, 40, 8, 16), (17, 50, 16, 16), (50, 17, 16, 8), (64, 16, 8, 32),
        (33, 16, 16, 16), (16, 33, 16, 16))},
    draw=lambda r: _of_a_grid(r.randint(1, 60), r.randint(1, 60), r.choice((8, 16, 32)), r.choice((8, 16, 32)), 0.5),
    notes=NOTES | {"math.ceil(M / BLOCK_M)": _QUERIES, "math.ceil(N / BLOCK_N)": _KEYS},
    rows=[
        Row("sizes-exchanged", "BLOCK_M and BLOCK_N are exchanged in the number of programs",
            [("max(math.ceil(M / BLOCK_M), math.ceil(N / BLOCK_N))",
              "max(math.ceil(M / BLOCK_N), math.ceil(N / BLOCK_M))")]),
    ],
    symptom=_never_computed,
    walks=False,  # more programs than there are blocks do no harm
    on_device=True,
)  # fmt: skip
def hunted_10(q, k, v, o, lse, do, BLOCK_M, BLOCK_N, scale):
    """dq, dk and dv of one head, no mask. q, o, do: [M, HEAD_DIM]; k, v: [N, HEAD_DIM]; lse: [M]; float32."""
    M, N = len(q), len(k)
    delta = lecture.delta_sim(o, do)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    #: Repaired: enough programs for the blocks of queries and for the blocks of keys.
    for program in range(max(math.ceil(M / BLOCK_M), math.ceil(N / BLOCK_N))):
        start_m, start_n = program * BLOCK_M, program * BLOCK_N
        rows, keys = slice(start_m, start_m + BLOCK_M), slice(start_n, start_n + BLOCK_N)
        if start_m < M:
            dq[rows] = lecture.query_block_sim(
                q[rows], do[rows], start_m, k, v, lse[rows], delta[rows], M, BLOCK_N, scale, False
            )
        if start_n < N:
            dk[keys], dv[keys] = lecture.key_block_sim(
                k[keys], v[keys], start_n, q, do, lse, delta, N, BLOCK_M, scale, False
            )
    return dq, dk, dv
