"""The checks of phase 5: the softmax's Jacobian, delta, the two walks of the backward pass, and its Triton kernels."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention.cost import Meter
from flashlab.attention.simulation_backward import key_block_sim
from flashlab.check import CheckFailed, expect, expect_all_close, expect_close, running
from flashlab.check.lookup import Row
from flashlab.check.mistakes.backward import BASES, MISTAKES, Head, added_up, gradients, statistics
from flashlab.exercises.registry import exercise
from flashlab.exercises.tensor_rule import normal, part, tensor_rule
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of
from flashlab.triton_tools import repairs


def _random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _call(fn: Callable[..., Any], case: str, *args: Any, count: int = 1, names: str = "") -> Any:
    """Call the learner's function; CheckFailed where it changes its inputs, or gives no tensor or not `count`."""
    __tracebackhide__ = True
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    with running(case):
        result = fn(*args)
    for x, old in zip(args, before, strict=True):
        same = not isinstance(x, torch.Tensor) or torch.equal(x, old)
        expect(same, "the function changes its inputs: write to new tensors", diagnosis="input-modified", case=case)
    expect(
        result is not None, "the function returns None: is a `return` missing?", diagnosis="returned-none", case=case
    )
    if count == 1:
        is_ = isinstance(result, torch.Tensor)
        expect(is_, f"a tensor should be returned, not a {type(result).__name__}", diagnosis="wrong-type", case=case)
        return result
    right = isinstance(result, (tuple, list)) and len(result) == count
    right = right and all(isinstance(x, torch.Tensor) for x in result)
    expect(right, f"{count} tensors should be returned: {names}", diagnosis="wrong-type", case=case)
    return result


# ---- 5.1 ------------------------------------------------------------------------------------------------------------


def _rows(r: random.Random, M: int, N: int, hidden: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """p and dp [M, N]; the last `hidden` keys have p = 0."""
    s, dp = normal(r, M, N, dtype=torch.float32), normal(r, M, N, dtype=torch.float32)
    s[:, N - hidden :] = -math.inf
    return torch.softmax(s, 1), dp + 0.5


def _by_the_jacobian(p, dp):
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return (jacobian @ dp[:, :, None])[:, :, 0]


_EXAMPLE = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[4.0, 0.0, 8.0]])


@tensor_rule(
    "5.1",
    title="Through the softmax",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "The Jacobian of a row is diag(p) - p pᵀ. Multiply it by dp on paper: which of the two products is a number?",
        "p · dp is one number per row, delta. Then ds_j = p_j (dp_j - delta).",
        "delta = (p * dp).sum(dim=1, keepdim=True); return p * (dp - delta).",
    ],
    returns="ds",
    inputs={
        "the lecture's row, p = (1/2, 1/4, 1/4)": _EXAMPLE, "3 rows of 5 keys": _rows(random.Random(1), 3, 5),
        "6 rows of 6 keys": _rows(random.Random(2), 6, 6),
        "4 rows, the last 3 of 9 keys hidden": _rows(random.Random(3), 4, 9, hidden=3),
    },
    draw=lambda r: _rows(r, r.randint(1, 5), r.randint(2, 9)),
    also=["p * dp - p * (p * dp).sum(dim=1, keepdim=True)", _by_the_jacobian],
    words={"delta": "delta", "jacobian": "the Jacobian"},
    notes={
        "delta": "it is dp - delta", "dp - delta": "it is p (dp - delta)", "dim=1": "each row has a delta of its own",
        "(p * dp).sum": "delta is the sum over the keys, weighted by p",
        "p[:, :, None] * p[:, None, :]": "a score also moves the other elements of its row",
    },
    on_device=True,
)  # fmt: skip
def softmax_backward(p, dp):
    # BEGIN SOLUTION
    delta = (p * dp).sum(dim=1, keepdim=True)
    return p * (dp - delta)
    # END SOLUTION


# ---- 5.2 ------------------------------------------------------------------------------------------------------------


def _tile(r: random.Random, M: int, N: int, D: int) -> dict[str, torch.Tensor]:
    (p, _), v, do = _rows(r, M, N), *(normal(r, rows, D, dtype=torch.float32) for rows in (N, M))
    return {"p": p, "dp": do @ v.T, "o": p @ v, "do": do}


_TILES = {f"{M} rows, {N} keys, {D} columns": _tile(random.Random(M), M, N, D) for M, N, D in (
    (3, 5, 4), (6, 6, 6), (9, 20, 16))}  # fmt: skip
_COLUMNS: dict[str, tuple[torch.Tensor, ...]] = {case: (x["o"], x["do"]) for case, x in _TILES.items()}
_COLUMNS["float16, 256 columns"] = tuple(normal(random.Random(7), 2, 5, 256, dtype=torch.float16))
_DELTA_NOTES = {"mean": "delta is the sum", "dtype": "convert before you multiply, or digits are lost"}


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


def _head(M: int, N: int, D: int, scale: float, block: int, *, dtype=torch.float32, causal=False, seed=0) -> Head:
    q, k, v, do = _random((M, D), (N, D), (N, D), (M, D), seed=seed, dtype=dtype)
    return Head(q, k, v + 0.5, do + 0.25, scale, block, causal)


def _saved(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """lse and delta as kernels get them: float32, on the device; lse is +inf in a row that sees no key."""
    _, lse, delta = statistics(head)
    lse = lse.masked_fill(torch.isneginf(lse), math.inf)
    return tuple(x.float().to(head.q.device) for x in (lse, delta))  # type: ignore[return-value]


Answer = tuple[str, Head, dict[str, torch.Tensor]]
Models = dict[str, tuple[Sequence[torch.Tensor], str]]


class _Given(Sequence[torch.Tensor]):
    """One gradient of every head, with a mistake or none; computed when asked for: most models fail on the first."""

    def __init__(self, heads: Sequence[Head], name: str, slug: str = ""):
        self._heads, self._name, self._slug = heads, name, slug
        self._known: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        if i not in self._known:
            self._known[i] = getattr(gradients(self._heads[i], self._slug), self._name)
        return self._known[i]


def _expect_gradients(
    answers: Sequence[Answer],
    names: Sequence[str],
    mistakes: Sequence[str],
    *,
    more: Callable[[str], Models] | None = None,
) -> None:
    """Compare the gradients of every case; a mistake is told if it gives all the cases of one gradient.

    more: further models, by the gradient's name.
    """
    __tracebackhide__ = True
    heads = [head for _, head, _ in answers]

    def values(name: str, slug: str = "") -> Sequence[torch.Tensor]:
        return _Given(heads, name, slug)

    for name in names:

        def models(name: str = name) -> Models:
            told = {slug: (values(name, slug), f"{name}: {MISTAKES[slug]}") for slug in (*mistakes, *_ALONE)}
            for other in names:
                if other != name:
                    told[f"exchanged {other}"] = (
                        values(other),
                        f"{name} holds the values of {other}: are they exchanged?",
                    )
            told |= more(name) if more else {}
            for a, b in itertools.combinations(mistakes, 2):  # a value is computed only if it is asked for
                words = f"{name}: two slips at once would give this: {MISTAKES[a]}; and {MISTAKES[b]}"
                told.setdefault(f"{a} {b}", (values(name, f"{a}+{b}"), words))
            return told

        right = [(case, got[name], want) for (case, _, got), want in zip(answers, values(name), strict=True)]
        expect_all_close(right, what=name, mistakes=models)


_ALONE = (*BASES, "gradient-times-log2e", "gradient-times-ln2")  # not tried together with another slip
_OF_DQ = (
    "delta-missing", "delta-added", "delta-of-the-tile", "p-missing", "dp-for-ds", "p-for-ds", "v-for-k", "k-for-v",
    "scale-missing",
    "scale-twice", "scores-not-scaled", "sign-inverted", "probabilities-not-normalised", "softmax-per-tile",
    "maximum-of-the-tile", "lse-ignored", "lse-added", "lse-scaled",
    "dp-scaled", "delta-scaled", "p-twice",
    "scores-scaled-twice", "scores-scaled-by-root", "exp2-for-exp", "lse-in-base-2", "scores-in-base-2",
    "lse-in-base-10", "delta-not-weighted", "first-block-only", "overwritten", "tail-dropped", "last-block-dropped",
    "scaled-in-every-block",
)  # fmt: skip
_OF_DKDV = (
    *(slug for slug in _OF_DQ if slug != "v-for-k" and not slug.endswith("-tile")), "ds-for-p",
    "do-for-q", "q-for-do", "dv-scaled", "statistics-of-the-first-rows", "delta-of-the-first-rows",
)  # fmt: skip
_CAUSAL = (
    "causal-always", "causal-mask-missing", "causal-aligned-top-left", "causal-shifted-back", "causal-off-by-one",
    "causal-one-too-many", "causal-from-the-block",
)  # fmt: skip


def _of_dq(M: int, N: int, D: int, scale: float, block: int, seed: int) -> tuple[Any, ...]:
    head = _head(M, N, D, scale, block, seed=seed)
    q, k, v, do, lse, delta = (x.cpu() for x in (*head[:4], *_saved(head)))
    return q, do, lse, delta, k, v, block, scale


def _grows(fn: Callable[..., Any], small: Sequence[Any], large: Sequence[Any], matrix: int) -> None:
    """CheckFailed where four times the keys take more bytes at once than half of what a row of each would."""
    __tracebackhide__ = True
    peaks = []
    for given in (small, large):
        with Meter() as meter:
            fn(*(x.to(runtime.device()) if isinstance(x, torch.Tensor) else x for x in given))
        peaks.append(meter.peak_bytes)
    expect(
        peaks[1] - peaks[0] < matrix // 2,
        f"the values are right, the memory is not: with four times the keys your function held {peaks[1]} bytes at "
        f"once instead of {peaks[0]}, so some tensor in it is [BLOCK_M, N]",
        diagnosis="memory-grows-with-n",
    )


def _dq_in_base_2(q, do, lse, delta, K, V, BLOCK_N, scale):
    dq = torch.zeros_like(q)
    for start_n in range(0, len(K), BLOCK_N):
        k, v = K[start_n : start_n + BLOCK_N], V[start_n : start_n + BLOCK_N]
        p = torch.exp2(scale * (q @ k.T) * math.log2(math.e) - lse[:, None] * math.log2(math.e))
        ds = p * (do @ v.T - delta[:, None])
        dq = dq + scale * (ds @ k)
    return dq


_WALK_NOTES = {
    "delta[:, None]": "dS is P (dP - delta)",
    "lse[:, None]": "P is exp(score - lse), both natural",
    "delta[rows, None]": "dS is P (dP - delta)",
    "scale": "the scores are scale · Q K^T, and the gradient has it once",
    "k": "the scores come from Q and K",
    "v": "the output is P times V",
    "v.T": "the output is P times V",
    "math.log2(math.e)": "under 2^x the scores and lse both have the factor log2(e)",
    "k.T": "the scores come from Q and K",
    "torch.exp": "the base is e",
    "p": "dS is P (dP - delta)",
    "dq": "each block adds to the sum",
    "range": "the walk takes every block, the last may be shorter",
}


@tensor_rule(
    "5.3",
    title="dQ of one block",
    minutes=20,
    hints=[
        "A loop over the keys as in phase 2, but without a state: lse is known, so each tile of P stands alone.",
        "Per tile: p = exp(scale * q @ k.T - lse[:, None]), then ds = p * (do @ v.T - delta[:, None]).",
        "dq starts at zeros; dq += ds @ k in each tile; return scale * dq.",
    ],
    returns="dq",
    inputs={f"{M} queries, {N} keys, BLOCK_N={block}, scale={scale}": _of_dq(M, N, D, scale, block, N)
            for M, N, D, scale, block in (
                (4, 12, 8, 0.3, 4), (5, 30, 8, 0.5, 8), (7, 7, 16, 0.2, 7), (3, 20, 8, 1.0, 64))},
    draw=lambda r: _of_dq(r.randint(1, 6), r.randint(1, 30), 8, r.choice((0.3, 0.5, 0.7)), r.choice((1, 4, 8)),
                          r.randrange(2**20)),
    also=[_dq_in_base_2],
    notes=_WALK_NOTES,
    rows=[
        Row("softmax-per-tile", "dq: P is a softmax over the keys of one tile; exp(score - lse) knows the whole row",
            [("torch.exp(scale * (q @ k.T) - lse[:, None])", "torch.softmax(scale * (q @ k.T), 1)")]),
        Row("maximum-of-the-tile", "dq: P is recomputed with the maximum of the tile's scores in the place of lse",
            [("lse[:, None]", "(scale * (q @ k.T)).amax(1, keepdim=True)")]),
        Row("delta-of-the-tile", "dq: delta is summed over the keys of one tile; it is a sum over all keys, and given",
            [("delta[:, None]", "(p * (do @ v.T)).sum(1, keepdim=True)")]),
        Row("delta-not-weighted", "dq: delta is subtracted from P · dP; it is subtracted from dP, before P multiplies",
            [("p * (do @ v.T - delta[:, None])", "p * (do @ v.T) - delta[:, None]")]),
        Row("lse-scaled", "dq: lse is multiplied by scale, as the scores are; lse is the log-sum-exp of scaled scores",
            [("scale * (q @ k.T) - lse[:, None]", "scale * (q @ k.T - lse[:, None])")]),
        Row("dp-for-ds", "dq: dP stands where dS belongs: it is P · (dP - delta)",
            [("p * (do @ v.T - delta[:, None])", "do @ v.T")]),
    ],
    on_device=True,
    then=lambda fn: _grows(fn, _of_dq(128, 256, 8, 0.3, 16, 0), _of_dq(128, 1024, 8, 0.3, 16, 0), 128 * 768 * 4),
)  # fmt: skip
def dq_block(q, do, lse, delta, K, V, BLOCK_N, scale):
    """dQ [BLOCK_M, HEAD_DIM] of a block of queries, no mask.

    q, do: [BLOCK_M, HEAD_DIM]; lse, delta: [BLOCK_M]; K, V: [N, HEAD_DIM]. All float32.
    """
    # BEGIN SOLUTION
    dq = torch.zeros_like(q)
    for start_n in range(0, len(K), BLOCK_N):
        k, v = K[start_n : start_n + BLOCK_N], V[start_n : start_n + BLOCK_N]
        p = torch.exp(scale * (q @ k.T) - lse[:, None])
        ds = p * (do @ v.T - delta[:, None])
        dq = dq + ds @ k
    return scale * dq
    # END SOLUTION


def _of_a_block_of_keys(
    M: int, N: int, block: int, start_n: int, scale: float, causal: bool, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    head = _head(M, N, 8, scale, block, causal=causal, seed=seed, dtype=dtype)
    q, k, v, do, lse, delta = (x.cpu() for x in (*head[:4], *_saved(head)))
    keys = slice(start_n, start_n + 8)
    return k[keys], v[keys], start_n, q, do, lse, delta, N, block, scale, causal


def _some_block_of_keys(r: random.Random) -> tuple[Any, ...]:
    N = r.randint(1, 30)
    return _of_a_block_of_keys(r.randint(1, 30), N, r.choice((1, 4, 8)), r.randrange(N), r.choice((0.3, 0.5)),
                               r.random() < 0.6, r.randrange(2**20))  # fmt: skip


def _key_block_with_a_mask(K_block, V_block, start_n, Q, dO, lse, delta, N, BLOCK_M, scale, causal):
    k, v = K_block.float(), V_block.float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    M = len(Q)
    begin = max(0, start_n + M - N) if causal else 0
    for start_m in range(begin, M, BLOCK_M):
        q, do = Q[start_m : start_m + BLOCK_M].float(), dO[start_m : start_m + BLOCK_M].float()
        lse_i, delta_i = lse[start_m : start_m + BLOCK_M], delta[start_m : start_m + BLOCK_M]
        p = torch.exp(scale * (q @ k.T) - lse_i[:, None])
        if causal:
            i, j = torch.arange(len(q)) + start_m, torch.arange(len(k)) + start_n
            p = p.masked_fill(j[None, :] > i[:, None] + N - M, 0.0)
        dv = dv + p.T @ do
        ds = p * (do @ v.T - delta_i[:, None])
        dk = dk + ds.T @ q
    return scale * dk, dv


def _rows_added_up(key_block_sim: Callable[..., Any]) -> tuple[str, str] | None:
    """Which queries dv adds up, as far as it can be told."""
    for given in _BLOCKS.values():
        start_n, q, N, block, scale, causal = (given[i] for i in (2, 3, 7, 8, 9, 10))
        head = _head(len(q), N, 8, scale, block, causal=causal)._replace(first_key=start_n)

        def run(head: Head) -> dict[str, torch.Tensor]:
            lse, delta = _saved(head)
            keys = slice(head.first_key, head.first_key + 8)
            dk, dv = key_block_sim(head.k[keys], head.v[keys], head.first_key, head.q, head.do, lse, delta, len(
                head.k), head.block, head.scale, head.causal)  # fmt: skip
            return {"dk": dk, "dv": dv}

        if said := added_up(run, head, "dv"):
            return "wrong-rows", said
    return None


def _of_few_tiles(key_block_sim: Callable[..., Any]) -> None:
    """CheckFailed where tiles are computed that no query sees."""
    __tracebackhide__ = True
    given = _of_a_block_of_keys(128, 128, 16, 64, 0.3, True, 0)
    keys = slice(64, 80)
    head = _head(128, 128, 8, 0.3, 16, causal=True)
    given = (*(x[keys].cpu() for x in (head.k, head.v)), *given[2:])
    with Meter() as meter:
        key_block_sim(*(x.to(runtime.device()) if isinstance(x, torch.Tensor) else x for x in given))
    tiles = meter.matmul_flops / (4 * 2 * 16 * 16 * 8)
    expect(
        tiles <= 4,
        f"right, but {tiles:g} tiles are computed for keys 64 to 79 of 128, causal, BLOCK_M=16, where 4 have a query "
        "that sees one of them: begin at the first query that does",
        diagnosis="causal-tiles-not-skipped",
    )


_BLOCKS = {
    f"{M} queries, {N} keys, keys {start} to {min(N, start + 8) - 1}, BLOCK_M={block}, causal={causal}":
        _of_a_block_of_keys(M, N, block, start, scale, causal, M)
    for M, N, block, start, scale, causal in (
        (12, 8, 4, 0, 0.3, False), (30, 20, 8, 8, 0.5, False), (17, 40, 4, 20, 0.2, False),
        (24, 24, 8, 8, 0.4, True), (10, 25, 4, 20, 0.6, True), (10, 25, 4, 8, 0.6, True), (25, 10, 4, 4, 0.6, True),
        (22, 17, 4, 5, 0.6, True), (15, 20, 4, 10, 0.6, True), (11, 18, 8, 6, 0.5, True), (4, 1, 8, 0, 0.3, True),
        (4, 27, 1, 19, 0.3, True), (5, 29, 1, 26, 0.3, False), (20, 2, 8, 1, 0.5, True),
    )
}  # fmt: skip
_SEES = "the last query sees the last key: query i sees key j if j <= i + N - M"
_BEGIN = "max(0, start_n - (N - M)) if causal else 0"
_DISTANCE = "start_m + N - M - start_n if causal else None"

tensor_rule(
    "5.4",
    title="key_block_sim",
    minutes=30,
    hints=[
        "Two accumulators, dk and dv, like K_block and V_block, in float32. The loop runs over blocks of BLOCK_M "
        "queries; it needs their rows of Q, dO, lse and delta.",
        "Causal: query i sees key j if j <= i + N - M. Which is the first query that sees start_n? Begin there. The "
        "tile's distance is that of its corner: start_m + N - M - start_n.",
        "In float32: q, do = Q[rows].float(), dO[rows].float(), and k, v likewise of the blocks. p = "
        "probabilities_sim(q, k, lse[rows], distance if causal else None, scale); dv += p.T @ do; ds = p * (do @ v.T - "
        "delta[rows, None]); dk += ds.T @ q. Return scale * dk, dv. (A distance of 0 is a mask too: the diagonal "
        "tile's.)",
        "p.to(dO.dtype).float() and ds.to(Q.dtype).float() round as a tensor core would.",
    ],
    returns="dk, dv",
    inputs=_BLOCKS | {"float16, 64 queries, 16 keys, BLOCK_M=8":
                      _of_a_block_of_keys(64, 16, 8, 0, 0.3, False, 1, torch.float16)},
    draw=_some_block_of_keys,
    also=[_key_block_with_a_mask, [(_BEGIN, f"({_BEGIN}) // BLOCK_M * BLOCK_M")]],
    words={"lse_i": "lse[rows]", "delta_i": "delta[rows]"},
    notes=_WALK_NOTES | {
        "max(0, start_n - (N - M))": "the first query that sees the block's first key is 0 at least",
        "start_n": _SEES, "start_m": _SEES, "N - M": _SEES, "start_n - (N - M)": "begin at the first query that sees "
        "the block's first key", "causal": "without `causal` there is no mask", "dk": "each block adds to the sum",
        "dv": "each block adds to the sum", "q": "the scores come from Q and K", "do": "the output is P times V",
        "dtype": "in which dtype are the sums kept?", "delta[rows": "each block has its own rows",
    },
    rows=[
        Row("ds-for-p", "dv: dS stands where P belongs: dV is P transposed times dO",
            [("dv = dv + p.to(dO.dtype).float().T @ do", "dv = dv + (p * (do @ v.T - delta[rows, None])).T @ do")]),
        Row("dp-for-ds", "dk: dP stands where dS belongs: it is P · (dP - delta)",
            [("ds = p * (do @ v.T - delta[rows, None])", "ds = do @ v.T")]),
        Row("delta-not-weighted", "dk: delta is subtracted from P · dP; it is subtracted from dP, before P multiplies",
            [("p * (do @ v.T - delta[rows, None])", "p * (do @ v.T) - delta[rows, None]")]),
        Row("delta-of-the-first-rows", "dk: delta is that of the first block's rows in every block",
            [("delta[rows, None]", "delta[: len(q), None]")]),
        Row("statistics-of-the-first-rows", "dk and dv: lse and delta are those of the first block's rows in "
            "every block", [("lse[rows]", "lse[: len(q)]"), ("delta[rows, None]", "delta[: len(q), None]")]),
        Row("causal-mask-missing", f"dk and dv: the tiles have no causal mask: {_SEES}", [(_DISTANCE, "None")]),
        Row("causal-mask-missing", f"dk and dv: the tiles have no causal mask: {_SEES}",
            [(_DISTANCE, "None"), (_BEGIN, f"({_BEGIN}) // BLOCK_M * BLOCK_M")]),
        Row("causal-shifted-back", f"dk and dv: the causal mask is shifted in the wrong direction: {_SEES}",
            [(_DISTANCE, "start_m - N + M - start_n if causal else None"), (_BEGIN, "0")]),
        Row("causal-aligned-top-left", f"dk and dv: the causal mask is aligned at the first key: {_SEES}", [
            (_DISTANCE, "start_m - start_n if causal else None"), (_BEGIN, "0")]),
        Row("begins-late", "dk and dv: the walk begins a block too late: the first queries that see these keys are "
            "left out", [(_BEGIN, f"-(-({_BEGIN}) // BLOCK_M) * BLOCK_M")]),
        Row("begins-at-its-row", "dk and dv: the walk begins at the query with the number of the block's first key; "
            f"{_SEES}", [(_BEGIN, "start_n if causal else 0")]),
    ],
    tol=2e-3,
    symptom=_rows_added_up,
    tries=500,
    on_device=True,
    then=_of_few_tiles,
)(key_block_sim)  # fmt: skip


# ---- 5.5 ------------------------------------------------------------------------------------------------------------

DELTA_PARAMETERS = (
    "O_ptr", "DO_ptr", "DELTA_ptr", "stride_om", "stride_od", "stride_dom", "stride_dod", "M", "HEAD_DIM", "BLOCK_M",
)  # fmt: skip


@exercise(
    "5.5",
    title="delta_kernel",
    minutes=20,
    difficulty="Core",
    hints=[
        "As 3.1: rows down, columns across, and each tensor with its own two strides.",
        "The last block reaches over the end: mask the loads and the store with offs_m < M, and say other=0.0.",
        "tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1), stored at DELTA_ptr + offs_m.",
    ],
)
def _(delta_kernel: Any) -> str:
    kernel = kernel_of(delta_kernel, DELTA_PARAMETERS)
    o, do = _random((50, 32), (50, 32), seed=3)
    one = torch.ones((), device=o.device).expand(50, 32)
    layouts = {
        "contiguous, float32": (o, do), "contiguous, float16": (o.half(), do.half()),
        "48 rows, a whole number of blocks": (o[:48], do[:48]),
        "dO stored by columns": (o, do.T.contiguous().T), "O stored by columns": (o.T.contiguous().T, do),
        "dO with strides of 0, as o.sum().backward() gives": (o, one),
    }  # fmt: skip
    answers = []
    for case, (x, y) in layouts.items():
        case = f"{case}, {len(x)} rows, BLOCK_M=16"
        out = torch.full((len(x),), math.nan, device=x.device)
        with in_bounds(case, o=x, do=y, delta=out) as traffic:
            kernel[(-(-len(x) // 16),)](x, y, out, *x.stride(), *y.stride(), len(x), HEAD_DIM=32, BLOCK_M=16)
        explain_undefined(traffic, out, case)
        missing = int(out.isnan().sum())
        expect(not missing, f"{missing} of {len(x)} rows of delta are never stored, or NaN",
               diagnosis="never-written", case=case)  # fmt: skip
        answers.append((case, out, (x.double() * y.double()).sum(1)))
    _expect_delta(answers, list(layouts.values()))
    strides = {"stride_om": 32, "stride_od": 1, "stride_dom": 32, "stride_dod": 1, "M": 50}
    pointers = {"O_ptr": torch.float16, "DO_ptr": torch.float16, "DELTA_ptr": torch.float32}
    compiles(kernel, {**pointers, **strides, "HEAD_DIM": 32, "BLOCK_M": 16})
    return f"{len(answers)} layouts, and it compiles"


def _expect_delta(answers: list[tuple[str, torch.Tensor, torch.Tensor]], inputs: Sequence[tuple]) -> None:
    """The first two answers are of contiguous tensors in float32 and float16, those from the fourth on of strided."""
    __tracebackhide__ = True

    def given(formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [formula(x.double(), y.double()) for x, y in inputs]

    def error(answer: tuple[str, torch.Tensor, torch.Tensor]) -> float:
        return (answer[1].cpu().double() - answer[2].cpu()).abs().max().item()

    wrong = {
        "mean-for-sum": (given(lambda x, y: (x * y).mean(1)), "that is the mean; delta is the sum"),
        "square": (given(lambda x, y: (x * x).sum(1)), "o is multiplied by itself: is dO loaded?"),
        "square 1": (given(lambda x, y: (y * y).sum(1)), "dO is multiplied by itself: is O loaded?"),
        "product-missing": (given(lambda x, y: x.sum(1)), "that is the sum of o alone"),
        "absolute-values": (given(lambda x, y: (x * y).abs().sum(1)), "the products keep their signs"),
        "sign-inverted": (given(lambda x, y: -(x * y).sum(1)), "every value has the other sign"),
        "maximum": (given(lambda x, y: (x * y).amax(1)), "that is the largest product; delta is the sum"),
        "first-block-again": (
            given(lambda x, y: (x * y).sum(1)[torch.arange(len(x)) % 16]),
            "every block has the rows of the first: does the address use the program's number?",
        ),
    }
    if error(answers[0]) <= 1e-3:
        if 1e-3 < error(answers[1]) < 5e-2:
            raise CheckFailed(
                "float32 is right, float16 to a few digits only: the products are rounded before they are summed",
                diagnosis="low-precision", case=answers[1][0],
            )  # fmt: skip
        for answer in answers[3:]:
            expect(
                error(answer) <= 1e-3,
                "right for contiguous tensors only: is each stride with its own tensor and its own index?",
                diagnosis="wrong-strides", case=answer[0],
            )  # fmt: skip
    expect_all_close(answers, what="delta", mistakes=wrong, tol=1e-3)


# ---- 5.6, 5.11 ------------------------------------------------------------------------------------------------------

DQ_PARAMETERS = (
    "Q_ptr", "K_ptr", "V_ptr", "DO_ptr", "LSE_ptr", "DELTA_ptr", "DQ_ptr", "stride_qm", "stride_kn", "stride_vn",
    "stride_dom", "stride_dqm", "scale", "M", "N", "HEAD_DIM", "BLOCK_M", "BLOCK_N",
)  # fmt: skip
DKDV_PARAMETERS = (
    "Q_ptr", "K_ptr", "V_ptr", "DO_ptr", "LSE_ptr", "DELTA_ptr", "DK_ptr", "DV_ptr", "stride_qm", "stride_kn",
    "stride_vn", "stride_dom", "stride_dkn", "stride_dvn", "scale", "M", "N", "HEAD_DIM", "BLOCK_M", "BLOCK_N",
)  # fmt: skip


_NOTHING = 12344.0  # what a result holds before the kernel writes it; no gradient here is as large


def _apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values, with `gap` elements of NaN behind every row."""
    wide = torch.full((len(x), x.shape[1] + gap), math.nan, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _launch(kernel: Any, head: Head, names: Sequence[str], case: str, grid: int, BLOCK_M: int, BLOCK_N: int):
    """Launch a kernel for one head, every address watched; the gradients by name."""
    __tracebackhide__ = True
    q, k, v, do = (_apart(x, gap) for x, gap in zip(head[:4], (0, 8, 16, 24), strict=True))
    lse, delta = _saved(head)
    out = {
        name: _apart(torch.full_like(head.q if name == "dq" else head.k, _NOTHING), gap)
        for name, gap in zip(names, (32, 40), strict=False)
    }
    strides = [x.stride(0) for x in (q, k, v, do, *out.values())]
    with in_bounds(case, q=q, k=k, v=v, do=do, lse=lse, delta=delta, **out) as traffic:
        kernel[(grid,)](
            q, k, v, do, lse, delta, *out.values(), *strides, head.scale, len(q), len(k),
            HEAD_DIM=q.shape[1], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        )  # fmt: skip
    for x in out.values():
        explain_undefined(traffic, x, case)
    return out


def _tell_rows(
    failed: CheckFailed, answers: Sequence[Answer], name: str, run: Callable[[str, Head], dict[str, torch.Tensor]]
) -> CheckFailed:
    """What was wrong, or which rows are added up, if that is what is wrong: `run` is given a case and other inputs."""
    if failed.diagnosis != "wrong-value":
        return failed
    for case, head, _ in answers:
        try:
            said = added_up(functools.partial(run, case), head, name)
        except (CheckFailed, RuntimeError, ValueError, IndexError):
            continue  # other inputs: what fails on them does not explain what failed before
        if said:
            return CheckFailed(said, diagnosis="wrong-rows", case=case)
    return failed


def _check_kernel(kernel: Any, names: Sequence[str], mistakes: Sequence[str]) -> str:
    """Run on float16, float32 and a row with a very negative lse; then compile."""
    __tracebackhide__ = True
    keeps_queries = names == ("dq",)
    answers: dict[torch.dtype, list] = {torch.float16: [], torch.float32: []}
    again: dict[str, functools.partial[dict[str, torch.Tensor]]] = {}
    shapes = ((48, 32, 16, 32), (32, 48, 32, 16), (40, 50, 16, 16), (7, 70, 16, 32), (70, 7, 32, 16))
    for dtype, found in answers.items():
        for M, N, BLOCK_M, BLOCK_N in shapes if dtype == torch.float16 else shapes[1:3]:
            block = BLOCK_N if keeps_queries else BLOCK_M
            head = _head(M, N, 16, 0.3, block, dtype=dtype, seed=M)
            case = f"{M} queries, {N} keys, BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, {str(dtype).removeprefix('torch.')}"
            grid = -(-M // BLOCK_M) if keeps_queries else -(-N // BLOCK_N)
            again[case] = functools.partial(_launch, kernel, head, names, case, grid, BLOCK_M, BLOCK_N)
            out = again[case]()
            for name, x in out.items():
                missing = int((x == _NOTHING).sum())
                expect(not missing, f"{missing} of {x.numel()} elements of {name} are never stored",
                       diagnosis="never-written", case=case)  # fmt: skip
            found.append((case, head, out))
    try:
        _expect_gradients(answers[torch.float16], names, mistakes)
    except CheckFailed as failed:

        def run(case: str, head: Head) -> dict[str, torch.Tensor]:
            return again[case].func(kernel, head, *again[case].args[2:])

        raise _tell_rows(failed, answers[torch.float16], "dq" if keeps_queries else "dv", run) from None
    for name in names:
        _expect_ieee(answers[torch.float32], name, again)
    for near, columns in ((120, slice(None)), (20000, slice(1, None))):
        _expect_tail(kernel, names, near, columns)
    pointers = {name: torch.float16 for name in kernel.fn.__code__.co_varnames[:8] if name.endswith("_ptr")}
    pointers |= {"LSE_ptr": torch.float32, "DELTA_ptr": torch.float32}
    parameters = DQ_PARAMETERS if keeps_queries else DKDV_PARAMETERS
    numbers = {name: 64 for name in parameters if name.startswith("stride")}
    compiles(kernel, {**pointers, **numbers, "scale": 0.125, "M": 512, "N": 512, "HEAD_DIM": 64, "BLOCK_M": 64,
                      "BLOCK_N": 64})  # fmt: skip
    return f"{sum(map(len, answers.values())) + 2} cases, and it compiles"


def _expect_ieee(
    answers: Sequence[Answer], name: str, again: dict[str, functools.partial[dict[str, torch.Tensor]]]
) -> None:
    """again: by case, launches the kernel once more. Without TF32 its digits come back, or something else cut them."""
    __tracebackhide__ = True
    for case, head, got in answers:
        want = getattr(gradients(head), name)

        def error(x: torch.Tensor, want: torch.Tensor = want) -> float:
            return (x.cpu().double() - want).abs().max().item() / want.abs().max().item()

        found = error(got[name])
        if 1e-5 < found < 1e-2:
            digits = f"{-math.log10(found):.0f} right digits, where 5 are expected"
            said = f"{name} is right in float16; in float32 it has {digits}"
            if runtime.INTERPRETED:
                with repairs.without_tf32():
                    is_tf32 = error(again[case]()[name]) <= 1e-5
                why = "tl.dot takes float32 operands as TF32 unless it is told input_precision='ieee'"
                why = (
                    why
                    if is_tf32
                    else "something on the way has fewer digits than float32: is it converted to 16 bits?"
                )
            else:
                is_tf32, why = False, "has every tl.dot input_precision='ieee', and is nothing converted to 16 bits?"
            raise CheckFailed(f"{said}: {why}", diagnosis="tf32" if is_tf32 else "low-precision", case=case)
        expect_close(got[name], want, what=name, case=case)


def _expect_tail(kernel: Any, names: Sequence[str], near: int, columns: slice) -> None:
    """Scores near -near: the exponential of a key or a query that is not there overflows.

    columns: those that are compared. Column 0 makes the scores, and with large ones it cannot be right.
    """
    __tracebackhide__ = True
    head = _head(20, 20, 16, 1.0, 16, seed=5)
    q, k = head.q.clone(), head.k.clone()
    q[:, 0], k[:, 0] = near / 12, -12.0
    head = head._replace(q=q, k=k)
    case = f"20 queries and keys, tiles of 16, every score near -{near}"
    out = _launch(kernel, head, names, case, 2, 16, 16)
    for name in names:
        expect(
            not out[name].isnan().any(),
            f"{name} has NaN where every lse is near -{near}: in the last tile, what is exp(score - lse) for a key or "
            "a query that is not there, and what is that times 0?",
            diagnosis="tail-overflows", case=case,
        )  # fmt: skip
        want = getattr(gradients(head), name)
        expect_close(out[name][:, columns], want[:, columns], what=name, case=case, tol=0.05)


@exercise(
    "5.6",
    title="dq_kernel",
    minutes=35,
    difficulty="Core",
    hints=[
        "Your dq_block of 5.3, line by line. What the program keeps is loaded already: q, do, lse, delta.",
        "Scores: tl.dot(q, k.T, input_precision='ieee') * scale. p = tl.exp(s - lse[:, None]); ds as in 5.3; "
        "dq = tl.dot(ds.to(k.dtype), k, dq, input_precision='ieee').",
        "A key that is not there has k = 0, so its score is 0 and its p is exp(-lse), which may be infinite. Set ds to "
        "0 there with tl.where(in_range[None, :], ds, 0.0).",
        "Store (dq * scale).to(DQ_ptr.dtype.element_ty), masked by offs_m[:, None] < M.",
    ],
)
def _(dq_kernel: Any) -> str:
    return _check_kernel(kernel_of(dq_kernel, DQ_PARAMETERS), ("dq",), _OF_DQ)


@exercise(
    "5.11",
    title="dkdv_kernel, from an empty page",
    minutes=60,
    difficulty="Stretch",
    hints=[
        "Program i keeps keys i * BLOCK_N ...: load its k and v once, masked. Two accumulators in float32. Then a loop "
        "over the queries, as in 5.4.",
        "Compute the tile transposed: s_t = tl.dot(k, q.T) is [BLOCK_N, BLOCK_M], and lse[None, :] belongs to its "
        "columns. Then dv = tl.dot(p_t.to(do.dtype), do, dv) needs no transposition.",
        "Load lse with other=float('inf') and delta with other=0.0: then p is 0 for queries that are not there.",
        "dp_t = tl.dot(v, do.T); ds_t = p_t * (dp_t - delta[None, :]); dk = tl.dot(ds_t.to(q.dtype), q, dk); at the "
        "end dk * scale. All four products with input_precision='ieee'.",
    ],
)
def _(dkdv_kernel: Any) -> str:
    return _check_kernel(kernel_of(dkdv_kernel, DKDV_PARAMETERS), ("dk", "dv"), _OF_DKDV)


# ---- 5.7 ------------------------------------------------------------------------------------------------------------


def _of_a_loss(r: random.Random, M: int, N: int, D: int) -> tuple[torch.Tensor, ...]:
    (p, _), v, do = _rows(r, M, N), *(normal(r, rows, D, dtype=torch.float32) for rows in (N, M))
    return p, v, p @ v, do, normal(r, M, dtype=torch.float32) + 0.5


@tensor_rule(
    "5.7",
    title="A loss that uses lse",
    minutes=15,
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
        Row("times-dlse", "dP - delta is multiplied by dlse; the two parts add up",
            [("- delta[:, None] + dlse[:, None])", "- delta[:, None]) * dlse[:, None]")]),
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


@tensor_rule(
    "5.8",
    title="The sum over a group",
    minutes=10,
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
        "float": "in float16, 2048 + 1 is 2048: add up in float32", "dtype": "dk should have its input's dtype",
        "h // group": "query head h reads key head h // group",
    },
    rows=[
        Row("heads-interleaved", "a group's heads are taken kv_heads apart; query head h reads key head h // group",
            [("(kv_heads, -1)", "(-1, kv_heads)"), ("dim=2", "dim=1")]),
        Row("last-head-only", "that is the gradient of the group's last head alone: all of them add up",
            [(".float().sum(dim=2).to(dk.dtype)", "[:, :, -1]")]),
        Row("first-head-only", "that is the gradient of the group's first head alone: all of them add up",
            [(".float().sum(dim=2).to(dk.dtype)", "[:, :, 0]")]),
        Row("times-group", "each gradient is counted `group` times",
            [(".sum(dim=2)", ".sum(dim=2).mul(dk.shape[1] // kv_heads)")]),
        Row("first-heads", "those are the first heads; nothing is summed", instead="dk[:, :kv_heads]"),
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


@exercise(
    "5.9",
    title="It was only ever asked for one",
    minutes=20,
    difficulty="Bug hunt",
    untouched="cf361babfb33",
    history="the tutorial of Triton: triton-lang/triton, issues 4541 (2024) and 5660 (2025), pull request 5241",
    hints=[
        "Which cases are right? What have they in common?",
        "There is an argument that says what was asked for. Where in the function is it used?",
        "Two lines depend on causal: where the walk over the queries begins, and whether the tile on the diagonal is "
        "masked. Without a mask every query sees every key.",
    ],
)
def _(hunted_9: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> str:
    answers = []
    for n, block, causal in ((16, 8, True), (16, 8, False), (21, 8, True), (21, 8, False), (5, 8, False)):
        head = _head(n, n, 8, 0.4, block, causal=causal, seed=n)
        case = f"{n} queries and keys, blocks of {block}, causal={causal}"
        lse, delta = _saved(head)
        got = _call(
            hunted_9, case, head.q, head.k, head.v, head.do, lse, delta, block, head.scale, causal,
            count=2, names="dk and dv",
        )  # fmt: skip
        answers.append((case, head, {"dk": got[0], "dv": got[1]}))

    def halves(name: str) -> Models:
        def given(left: str) -> list[torch.Tensor]:
            return [_half_causal(head, name, left) for _, head, _ in answers]

        return {
            "diagonal-masked": (
                given("mask"),
                f"{name}: without causal every tile is visited now, but those on the diagonal are still masked",
            ),
            "tiles-above-skipped": (
                given("range"),
                f"{name}: without causal no tile is masked now, but the queries before the block are never visited",
            ),
            "every-tile-masked": (
                given("every"),
                f"{name}: with causal every tile is cut along its diagonal; tiles below *the* diagonal are seen whole",
            ),
            "causal-tiles-visited": (
                given("unmasked"),
                f"{name}: with causal the tiles of earlier queries count as well, unmasked",
            ),
            "diagonal-always-masked": (
                given("both"),
                f"{name}: every tile is visited, and those on the diagonal are masked, whatever causal says",
            ),
        }

    _expect_gradients(answers, ("dv", "dk"), (*_CAUSAL, *_OF_DKDV), more=halves)
    return f"{len(answers)} cases"


def _half_causal(head: Head, name: str, left: str) -> torch.Tensor:
    """dk or dv where one of two lines alone is mended, the diagonal's mask or where the walk begins.

    left: what is still wrong without causal ("mask", "range"), with it ("unmasked", "every"), or in either case
    ("both").
    """
    q, k, v, do = (x.detach().cpu().double() for x in head[:4])
    _, lse, delta = statistics(head)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    tile_above, masked = i // head.block < j // head.block, (i // head.block == j // head.block) & (j > i)
    if head.causal:
        cut = (j > i) | (j % head.block > i % head.block)
        hidden = masked if left in ("unmasked", "both") else cut if left == "every" else j > i
    else:
        hidden = {"mask": masked, "both": masked, "range": tile_above}.get(left, torch.zeros_like(masked))
    p = torch.exp(head.scale * q @ k.T - lse[:, None]).masked_fill(hidden, 0.0)
    return p.T @ do if name == "dv" else head.scale * (p * (do @ v.T - delta[:, None])).T @ q


@exercise(
    "5.10",
    title="One grid for both",
    minutes=20,
    difficulty="Bug hunt",
    untouched="a64327b5c93b",
    history="the tutorial of Triton in 2023: its backward pass was launched with the forward pass's grid "
    "(triton-lang/triton, issue 1975)",
    hints=[
        "Which of the three gradients is wrong, and in which rows? What have the right cases in common?",
        "How many programs are there, and what is each of them to do? Count for 64 queries, 64 keys, BLOCK_M = 32, "
        "BLOCK_N = 16.",
        "There are ceil(M / BLOCK_M) blocks of queries and ceil(N / BLOCK_N) blocks of keys. Take the larger number of "
        "programs, or two loops.",
    ],
)
def _(hunted_10: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> str:
    shapes = ((32, 32, 16, 16), (64, 64, 32, 16), (40, 40, 8, 16), (20, 50, 16, 16), (50, 20, 16, 8), (64, 16, 8, 32))
    answers: list[Answer] = []
    for M, N, BLOCK_M, BLOCK_N in shapes:
        head = _head(M, N, 8, 0.3, BLOCK_M, seed=M)
        case = f"{M} queries, {N} keys, BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}"
        o, lse, _ = statistics(head)
        given = [x.float().to(head.q.device) for x in (o, lse)]
        got = _call(
            hunted_10, case, head.q, head.k, head.v, *given, head.do, BLOCK_M, BLOCK_N, head.scale,
            count=3, names="dq, dk and dv",
        )  # fmt: skip
        answers.append((case, head, dict(zip(("dq", "dk", "dv"), got, strict=True))))

    def grids(name: str) -> Models:
        def cut(programs: Callable[[int, int, int, int], float]) -> list[torch.Tensor]:
            """The gradients' first rows, those that so many programs (rounded up) compute: 0 from there on."""
            found = []
            for (_, head, _), (M, N, BLOCK_M, BLOCK_N) in zip(answers, shapes, strict=True):
                x = getattr(gradients(head), name)
                rows = math.ceil(programs(M, N, BLOCK_M, BLOCK_N)) * (BLOCK_M if name == "dq" else BLOCK_N)
                found.append(x * (torch.arange(len(x))[:, None] < rows))
            return found

        start = f"{name} is 0 from a row on: "
        return {
            "grid-of-the-queries": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: M / BLOCK_M),
                start + "there are more blocks of keys than of queries, and no program for the rest of them",
            ),
            "grid-of-the-keys": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: N / BLOCK_N),
                start + "there are more blocks of queries than of keys, and no program for the rest of them",
            ),
            "keys-by-block-m": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: max(M, N) / BLOCK_M),
                start + "the keys are counted in blocks of BLOCK_M; they are worked on in blocks of BLOCK_N",
            ),
            "queries-by-block-n": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: max(M, N) / BLOCK_N),
                start + "the queries are counted in blocks of BLOCK_N; they are worked on in blocks of BLOCK_M",
            ),
            "sizes-exchanged": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: max(math.ceil(M / BLOCK_N), N / BLOCK_M)),
                start + "BLOCK_M and BLOCK_N are exchanged in the number of programs",
            ),
            "rounded-down": (
                cut(lambda M, N, BLOCK_M, BLOCK_N: max(M // BLOCK_M, N // BLOCK_N)),
                start + "the number of programs is rounded down, and the last block is not full",
            ),
        }

    _expect_gradients(answers, ("dv", "dk", "dq"), ("first-block-only", *_OF_DKDV), more=grids)
    return f"{len(answers)} pairs of lengths and tiles"
