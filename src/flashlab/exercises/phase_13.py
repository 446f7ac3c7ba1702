"""Checks of phase 13: who has which tokens, merging along a ring, blocks, lengths, gradients that travel, heads."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from flashlab.check.lookup import Row
from flashlab.exercises.rule import rule
from flashlab.exercises.tensor_rule import normal, rows_of, tensor_rule

# ---- 13.1 ------------------------------------------------------------------------------------------------------------


def _row(r: random.Random) -> tuple[int, ...]:
    world, n = r.randint(1, 9), 2 * r.randint(1, 12)
    return r.randrange(n), r.randrange(world), n, world


@rule(
    "13.1",
    title="Where does a row stand?", minutes=10, difficulty="Warm-up",
    hints=[
        "Stripes are dealt out like cards. Which token does rank 1 of 4 get first, which one next?",
        "Zigzag: a rank's rows are two pieces of n // 2 tokens. The first n // 2 rows are piece number rank. Which "
        "number has the other piece, among 0 to 2 * world - 1?",
        "striped = row * world + rank. zigzag: piece = rank if row < n // 2 else 2 * world - 1 - rank, and the "
        "position is piece * (n // 2) + row % (n // 2).",
    ],
    returns="zigzag, striped",
    strict=True,
    inputs=[(row, rank, 4, 4) for row in range(4) for rank in range(4)] + [(0, 0, 2, 1), (1, 0, 2, 1), (5, 2, 8, 3)],
    draw=_row,
    words={"half": "n // 2", "piece": "the number of the piece"},
    notes={
        "2 * world - 1 - rank": "the late piece stands as far from the end as the early one from the start",
        "half": "a piece has n // 2 tokens",
        "row * world + rank": "stripes are dealt out one token to each rank in turn",
    },
    rows=[
        Row("neighbours", "zigzag: the second piece is number world + rank, which is as late for all: it is "
            "2 * world - 1 - rank", [("2 * world - 1 - rank", "world + rank")]),
        Row("one-piece-early", "zigzag: the late rows lie one piece too early: its number is 2 * world - 1 - rank",
            [("2 * world - 1 - rank", "2 * world - 2 - rank")]),
        Row("mirrored", "zigzag: the late piece is turned round: its tokens have the order that they had",
            [("row % half, row", "(row % half if row < half else n - 1 - row), row")]),
        Row("not-striped", "striped: these are whole shards, one behind the other: it is token by token, in turns",
            [("row * world + rank", "rank * n + row")]),
        Row("even-and-odd", "zigzag: even rows are taken for the early piece, odd ones for the late: it is the first "
            "half of the rows and the second", [("row < half", "row % 2 == 0"), ("row % half", "row // 2")]),
        Row("whole-shards", "zigzag: these are whole shards, one behind the other: a rank has a piece from the front "
            "and one from the back", [("piece * half + row % half", "rank * n + row")]),
        Row("last-of-the-first", "zigzag: row n // 2 is the first one of the late piece, not the last of the early one",
            [("row < half", "row <= half"), ("row % half", "(row if row <= half else row - half)")]),
    ],
)  # fmt: skip
def position(row, rank, n, world):
    """(zigzag, striped): where in the whole sequence a rank's row stands; n, even, is rows per rank."""
    # BEGIN SOLUTION
    half = n // 2
    piece = rank if row < half else 2 * world - 1 - rank
    return piece * half + row % half, row * world + rank
    # END SOLUTION


# ---- 13.2 ------------------------------------------------------------------------------------------------------------


def _parts(
    r: random.Random, parts: int, rows: int = 3, low: float = 0.0, wide: float = 2.0
) -> tuple[torch.Tensor, ...]:
    return 1 + normal(r, parts, rows, 2), low + wide * normal(r, parts, rows)


def _late(r: random.Random) -> tuple[torch.Tensor, ...]:
    """Keys that rows do not see: parts of lse -inf and o 0, but not the first, which is a rank's own."""
    o, lse = _parts(r, 5)
    hidden = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    return o.masked_fill(hidden[..., None], 0.0), lse.masked_fill(hidden, float("-inf"))


_R = random.Random(13)


@tensor_rule(
    "13.2",
    title="Merge along a ring", minutes=20,
    hints=[
        "The state has the weight exp(lse) of the sum, the part exp(lse_part). What is the part's share?",
        "exp(b) / (exp(a) + exp(b)) is 1 / (1 + exp(a - b)): a sigmoid of b - a, which cannot overflow. Then o moves "
        "toward the part by this share.",
        "share = torch.sigmoid(lse_part - lse)[:, None]; o = o + share * (o_part - o); "
        "lse = torch.logaddexp(lse, lse_part).",
    ],
    returns="o, lse",
    inputs={
        "1 part": _parts(_R, 1), "2 parts": _parts(_R, 2), "8 parts": _parts(_R, 8),
        "lse near 1000": _parts(_R, 4, low=1000.0), "lse near -1000": _parts(_R, 4, low=-1000.0),
        "lse far apart": _parts(_R, 6, wide=300.0), "lse further apart": _parts(_R, 4, wide=2000.0),
        "parts that saw no key": _late(_R),
    },
    draw=lambda r: _late(r) if r.random() < 0.3 else _parts(r, r.randint(1, 6), low=r.gauss(0, 3)),
    also=[
        [("share = torch.sigmoid(lse_part - lse)[:, None]",
          "m = torch.maximum(lse, lse_part)\n        a, b = torch.exp(lse - m), torch.exp(lse_part - m)"),
         ("o + share * (o_part - o)", "(o * a[:, None] + o_part * b[:, None]) / (a + b)[:, None]"),
         ("torch.logaddexp(lse, lse_part)", "m + torch.log(a + b)")],
        "((torch.softmax(lses, 0)[..., None] * os).sum(0), torch.logsumexp(lses, 0))",
    ],
    alone=rows_of(1),
    nan={
        "no key": "a part that saw no key has lse -inf: with the share as a sigmoid it counts for nothing, and no NaN "
        "arises",
        "": "a weight overflowed: into an exponential go differences of lse that are never above 0",
    },
    words={"share": "the part's share", **{name: name for name in ("o", "lse", "m", "a", "b")}},
    notes={
        "share": "o moves toward the part by the part's share of both sums",
        "lse_part - lse": "the share is the sigmoid of lse_part - lse: the heavier, the more",
        "torch.logaddexp": "lse of both is the logarithm of the sum of both exponentials",
        "o_part - o": "o moves by share * (o_part - o)",
    },
    rows=[
        Row("averaged", "o is the plain mean of the parts: each is as heavy as exp(lse)",
            instead="(os.mean(0), torch.logsumexp(lses, 0))"),
        Row("weighted-by-lse", "o: state and part are weighted by lse; each is as heavy as exp(lse)",
            [("torch.sigmoid(lse_part - lse)", "(lse_part / (lse + lse_part))")]),
        Row("half-and-half", "o is the mean of state and part, whatever their lse: the heavier counts for more",
            [("torch.sigmoid(lse_part - lse)", "torch.sigmoid(0 * lse)")]),
        Row("lse-first", "lse has the part in it already when the share is taken: o first, then lse", [
            ("        share", "        lse = torch.logaddexp(lse, lse_part)\n        share"),
            ("* (o_part - o)\n        lse = torch.logaddexp(lse, lse_part)", "* (o_part - o)")]),
        Row("weight-for-share", "the share is exp(lse_part - lse): that is the part's weight over the state's, not "
            "over the sum of both", [("torch.sigmoid", "torch.exp")]),
        Row("last-left-out", "the last part is left out", [("zip(os[1:], lses[1:]", "zip(os[1:-1], lses[1:-1]")]),
        Row("weighted-by-the-last", "lse does not move along: the next part is weighed against all parts before it",
            [("lse = torch.logaddexp(lse, lse_part)", "lse = lse_part")]),
    ],
)  # fmt: skip
def merge_along(os: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o [rows, D] and lse [rows] of all parts, in the order in which they come.

    os: [parts, rows, D]; lses: [parts, rows].
    """
    # BEGIN SOLUTION
    o, lse = os[0], lses[0]
    for o_part, lse_part in zip(os[1:], lses[1:], strict=True):
        share = torch.sigmoid(lse_part - lse)[:, None]
        o = o + share * (o_part - o)
        lse = torch.logaddexp(lse, lse_part)
    return o, lse
    # END SOLUTION


# ---- 13.3 ------------------------------------------------------------------------------------------------------------


def _step(r: random.Random) -> tuple[int, ...]:
    world = r.randint(1, 9)
    return r.randrange(world), r.randrange(world), 2 * r.randint(1, 20), world


@rule(
    "13.3",
    title="Which block is left?", minutes=20,
    hints=[
        "Draw 4 ranks and their pieces: 0 and 7, 1 and 6, 2 and 5, 3 and 4. Take rank 2 with the keys of rank 1, "
        "then with those of rank 3. Which piece sees which?",
        "Keys of a smaller rank: their early piece lies before both of mine, their late one behind both. Keys of a "
        "larger rank: both lie between my two.",
        "source < rank: all rows, the first half of the keys. source > rank: the second half of the rows, all keys. "
        "source = rank: all of both, causal.",
    ],
    returns="first_row, end_of_keys, causal",
    strict=True,
    inputs=[(rank, source, 8, 4) for rank in range(4) for source in range(4)] + [(0, 0, 2, 1), (1, 0, 6, 2)],
    draw=_step,
    notes={
        "source < rank": "a smaller rank's early piece lies before both of mine",
        "source > rank": "a larger rank's pieces lie between my two, so that only my late rows see them",
        "source == rank": "its own keys alone have a diagonal",
        "n // 2": "a piece is half of a shard",
    },
)  # fmt: skip
def zigzag_block(rank, source, n, world):
    """(first_row, end_of_keys, causal) of a step's block.

    The rank computes its rows from first_row on, of n, against the keys of `source` before end_of_keys;
    causal says whether that block has a mask (True or False).
    """
    # BEGIN SOLUTION
    first_row = n // 2 if source > rank else 0
    end_of_keys = n // 2 if source < rank else n
    return first_row, end_of_keys, source == rank
    # END SOLUTION


# ---- 13.4 ------------------------------------------------------------------------------------------------------------


def _link(r: random.Random) -> tuple[int, ...]:
    kv_heads = r.choice((1, 2, 4, 8))
    return (
        r.choice((100, 300, 700, 760)), r.choice((25, 50, 100, 450)), kv_heads * r.choice((1, 2, 4, 7)), kv_heads,
        r.choice((1, 2, 4)), r.randint(1, 64),
    )  # fmt: skip


@rule(
    "13.4",
    title="The shortest sequence that hides it", minutes=20,
    hints=[
        "Write both times with n tokens per rank: the bytes of K and V of a shard over the link's speed; the "
        "operations of a step over the GPU's. How many pairs does a zigzag step have, but for the first?",
        "n * n / 2 pairs, so 2 n² D heads operations; 2 n D kv_heads itemsize bytes. n and D cancel. From which n on "
        "is the first at least as long?",
        "n >= tflops * 1000 * itemsize * kv_heads / (gb_s * heads). A shard is two equal pieces: round n / 2 up, and "
        "the sequence has 2 * world of them.",
    ],
    returns="tokens",
    whole=True,
    inputs=[
        (700, 450, 32, 32, 2, 2), (700, 450, 32, 8, 2, 8), (700, 50, 32, 8, 2, 64), (760, 50, 64, 8, 2, 16),
        (300, 25, 16, 16, 4, 4), (760, 450, 32, 8, 4, 23), (100, 100, 8, 1, 1, 3), (100, 450, 28, 4, 2, 1),
        (700, 450, 56, 8, 2, 5),
    ],
    draw=_link,
    words={"bytes_per_flop": "bytes for each operation", "piece": "the tokens of a piece"},
    notes={
        "1000": "10^12 operations per second over 10^9 bytes per second", "itemsize": "each number has itemsize bytes",
        "2 * gb_s": "a shard is two pieces, and a step of zigzag computes half of the pairs of a shard",
        "2 * world": "the sequence has 2 * world pieces", "kv_heads": "K and V of the key heads are sent",
        "heads": "every query head computes",
    },
    rows=[
        Row("without-a-mask", "half of it: as without a mask, where a step computes n * n pairs; or K or V alone is "
            "sent", [("(2 * gb_s", "(4 * gb_s")]),
        Row("pieces-not-whole", "the whole is rounded up to a token, and each of 2 * world pieces has whole ones",
            [("math.ceil(tflops * 1000 * itemsize * kv_heads / (2 * gb_s * heads))",
              "-(-tflops * 1000 * itemsize * kv_heads * 2 * world // (2 * gb_s * heads))"),
             ("return piece * 2 * world", "return piece")]),
    ],
)  # fmt: skip
def hiding_length(tflops, gb_s, heads, kv_heads, itemsize, world):
    """The fewest tokens of a whole sequence, causal in zigzag, whose steps take at least their sends' time.

    tflops: 10^12 operations per second of a GPU; gb_s: 10^9 bytes per second that it sends; whole numbers.
    """
    # BEGIN SOLUTION
    piece = math.ceil(tflops * 1000 * itemsize * kv_heads / (2 * gb_s * heads))
    return piece * 2 * world
    # END SOLUTION


# ---- 13.5 ------------------------------------------------------------------------------------------------------------


def _saved(r: random.Random, world: int, n: int, size: float = 0.7) -> tuple[torch.Tensor, ...]:
    """q, k, v, do [world, n, 3], lse and delta [world, n] of a ring without a mask; scale 1."""
    q, k, v, do = (x * normal(r, world, n, 3) for x in (size, size, 0.7, 0.7))
    v = v + 0.5
    s = torch.einsum("wid,ujd->wiuj", q, k).flatten(2)
    p, lse = torch.softmax(s, -1), torch.logsumexp(s, -1)
    o = p @ v.flatten(0, 1)
    return q, k, v, do, lse, (o * do).sum(-1)


def _travelling(q, k, v, do, lse, delta):
    world = len(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for step in range(world):
        for rank in range(world):
            source = (rank - step) % world
            p = torch.exp(q[rank] @ k[source].T - lse[rank][:, None])
            dv[source] += p.T @ do[rank]
            dk[source] += (p * (do[rank] @ v[source].T - delta[rank][:, None])).T @ q[rank]
    return dk, dv


_SENT, _HOME = ("k", "v", "dk", "dv"), "return dk, dv"
_KEPT = ("q", "do", "lse", "delta")


def _sends(*names: str) -> tuple[str, str]:
    """The edit by which these go on to the next rank."""
    said = ", ".join(names)
    return "k, v, dk, dv = (x.roll(1, 0) for x in (k, v, dk, dv))", f"{said}, = (x.roll(1, 0) for x in ({said},))"


_SHARES = "what a rank finds is added to the gradients of the keys that it has"


def _shares_told(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """How often the queries of each rank count in the gradients of a rank's keys, where that is not once."""
    q, k, v, do, lse, delta = given = _saved(random.Random(5), 3, 8)
    pairs = [(r, s) for s in range(3) for r in range(3)]
    p = [torch.exp(q[r] @ k[s].T - lse[r][:, None]) for r, s in pairs]
    of_v = [p.T @ do[r] for p, (r, s) in zip(p, pairs, strict=True)]
    of_k = [(p * (do[r] @ v[s].T - delta[r][:, None])).T @ q[r] for p, (r, s) in zip(p, pairs, strict=True)]
    found = learners(*given)
    for name, got, parts in zip(("dk", "dv"), found, (of_k, of_v), strict=True):
        columns = torch.stack([x.flatten() for x in parts], 1)
        for rank in range(3) if got.shape == k.shape and got.isfinite().all() else ():
            counts = torch.linalg.lstsq(columns, got[rank].flatten()[:, None]).solution[:, 0]
            off = [
                (r, s, float(x)) for (r, s), x in zip(pairs, counts, strict=True) if abs(float(x) - (s == rank)) > 1e-6
            ]
            if not off or not torch.allclose(columns @ counts, got[rank].flatten(), atol=1e-8):
                continue
            off = sorted(((r, s, round(x, 3) + 0.0) for r, s, x in off), key=lambda x: -abs(x[2]))[:2]
            said = [f"rank {r}'s queries count {x:g} times for the keys of rank {s}" for r, s, x in off]
            return "shares", f"three ranks: in {name} of rank {rank} {' and '.join(said)}: once for its own, else never"
    return None


@tensor_rule(
    "13.5",
    title="Gradients that travel", minutes=30, difficulty="Stretch",
    hints=[
        "Index 0 of each tensor is the rank. Sending everything to the next rank is x.roll(1, 0). What has to go along "
        "with K and V?",
        "In each of len(q) steps all ranks do phase 5's lines with the keys that they have: P, dV += Pᵀ dO, "
        "dS = P ∘ (dO Vᵀ − δ), dK += dSᵀ Q. `x.mT` transposes the last two dimensions, `@` multiplies rank by rank.",
        "Then k, v, dk, dv = (x.roll(1, 0) for x in (k, v, dk, dv)). After len(q) steps with a roll each, all four are "
        "home.",
    ],
    returns="dk, dv",
    inputs={f"{world} ranks of {n} rows": _saved(_R, world, n) for world, n in ((1, 4), (2, 3), (3, 2), (4, 4))} | {
        "2 ranks of 3 rows, scores of some 1000": _saved(_R, 2, 3, 20.0)},
    draw=lambda r: _saved(r, r.randint(1, 4), r.randint(1, 5)),
    symptom=_shares_told,
    nan={"": "e^1000 is infinite: P is exp(score - lse), the difference first"},
    also=[_travelling],
    notes={
        "dk": _SHARES, "dv": _SHARES, "lse": "P is exp(score - lse), with lse of the whole row",
        "delta": "dS is P * (dO V^T - delta)", "q": "dK is dS^T Q", "do": "dV is P^T dO",
        "roll": "K, V, dK and dV all go on to the next rank",
    },
    rows=[
        *(Row("stays", f"{' and '.join(those)} {'stay' if those[1:] else 'stays'}: k, v, dk and dv of a key belong "
              "together, and go on together", [_sends(*[x for x in _SENT if x not in those])])
          for those in (("dk", "dv"), ("dk",), ("dv",), ("k", "v"), ("k",), ("v",))),
        *(Row("moves", f"{' and '.join(those)} {'are' if those[1:] else 'is'} of another rank than "
              f"{' and '.join(x for x in _KEPT if x not in those)}: q, do, lse and delta stay together",
              [_sends(*_SENT, *those)]) for n in (1, 2, 3) for those in itertools.combinations(_KEPT, n)),
        Row("moves", "q, do, lse and delta go on too: they stay with their rank", [_sends(*_SENT, *_KEPT)]),
        Row("softmax-of-a-block", "P is a softmax over the keys of a step: it is exp(score - lse), with lse of the "
            "whole row", [("torch.exp(q @ k.mT - lse[..., None])", "torch.softmax(q @ k.mT, -1)")]),
        *(Row("not-home", f"{said} on a neighbour: after the last step they go on once more",
              [(_HOME, f"return {what}")])
          for said, what in (("dk and dv end", "dk.roll(-1, 0), dv.roll(-1, 0)"), ("dv ends", "dk, dv.roll(-1, 0)"),
                             ("dk ends", "dk.roll(-1, 0), dv"))),
        Row("sent-once", "dk and dv go on once, in the end: they go on with their keys in every step",
            [_sends("k", "v"), (_HOME, "return dk.roll(1, 0), dv.roll(1, 0)")]),
        Row("keys-ahead", "dk and dv end on the next rank: k and v go on before a step's sums, or dk and dv once too "
            "often",
            [("    for _ in", "    k, v = k.roll(1, 0), v.roll(1, 0)\n    for _ in")]),
        *(Row("other-steps", f"there are {said}: a step for each rank is needed", [("len(q)", steps)])
          for said, steps in (("two steps", "2"), ("as many steps as a rank has rows", "q.shape[1]"))),
    ],
)  # fmt: skip
def backward_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv of every rank's own keys, [ranks, n, D], without a mask and with scale 1.

    q, k, v, do: [ranks, n, D], index 0 is the rank that has it; lse, delta: [ranks, n], of the whole rows.
    """
    # BEGIN SOLUTION
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for _ in range(len(q)):
        p = torch.exp(q @ k.mT - lse[..., None])
        dv = dv + p.mT @ do
        ds = p * (do @ v.mT - delta[..., None])
        dk = dk + ds.mT @ q
        k, v, dk, dv = (x.roll(1, 0) for x in (k, v, dk, dv))  # to the next rank
    return dk, dv
    # END SOLUTION


# ---- 13.6 ------------------------------------------------------------------------------------------------------------


def _heads(r: random.Random, world: int, each: int, n: int) -> tuple[torch.Tensor]:
    return (normal(r, world, world * each, n, 2),)


def _token_told(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """The first token that is in another's place."""
    for world, heads, n in ((2, 2, 2), (2, 4, 2), (3, 6, 2)):
        x = torch.arange(1.0 * world * heads * n).reshape(world, heads, n, 1)
        got, right = learners(x).float(), to_heads(x)
        for place in (got != right).nonzero().tolist()[:1]:
            came, wanted = (f"token {int(v) % n} of head {int(v) // n % heads} from rank {int(v) // n // heads}"
                            for v in (got[tuple(place)], right[tuple(place)]))  # fmt: skip
            rank, head, token, _ = place
            return "a-token", (f"{world} ranks, {heads} heads, {n} tokens each: on rank {rank} row {token} of its head "
                               f"{head} is {came}, and should be {wanted}")  # fmt: skip
    return None


@tensor_rule(
    "13.6",
    title="Heads for tokens", minutes=20,
    hints=[
        "Name all the axes first: [from, heads, n, D]. Which rank does head h go to? Split that axis in two.",
        "x.unflatten(1, (W, heads // W)) is [from, to, heads per rank, n, D]. On the rank `to` the tokens of all "
        "senders stand one after the other. Which order do the axes need?",
        "permute(1, 2, 0, 3, 4) is [to, heads per rank, from, n, D]; flatten(2, 3) joins the tokens.",
    ],
    returns="y",
    symptom=_token_told,
    inputs={
        f"{world} ranks, {world * each} heads, {n} tokens per rank": _heads(_R, world, each, n)
        for world, each, n in ((1, 2, 3), (2, 1, 3), (2, 2, 2), (4, 1, 2), (3, 2, 4))
    },
    draw=lambda r: _heads(r, r.randint(1, 4), r.randint(1, 3), r.randint(1, 4)),
    notes={
        "(world, -1)": "rank i gets heads i * heads / W and following, in a row",
        "permute": "the axes are [to, heads per rank, from, n, D] afterwards", "2": "the tokens of all ranks join",
    },
    rows=[
    ],
)  # fmt: skip
def to_heads(x: torch.Tensor) -> torch.Tensor:
    """Ulysses' first exchange: x [W, heads, n, D], index 0 the rank that has it, to [W, heads / W, W n, D].

    Rank i gets heads i * heads / W and following, of all tokens: those of rank 0 first.
    """
    # BEGIN SOLUTION
    world = len(x)
    return x.unflatten(1, (world, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    # END SOLUTION


# ---- 13.7 ------------------------------------------------------------------------------------------------------------


@tensor_rule(
    "13.7",
    title="It trained, but worse", minutes=20, difficulty="Bug hunt",
    bug=Row(
        "first-keys", "every step uses the keys and values with which the rank began: take those that are there",
        [("q @ there_k.mT", "q @ k.mT"), ("do @ there_v.mT", "do @ v.mT"), ("ds @ there_k", "ds @ k")],
    ),
    history="huggingface/diffusers, issue 14265: the backward pass of its ring used the first iteration's K and V",
    hints=[
        "With which number of ranks is dq right? What is the same there in all steps?",
        "List for rank 0 and each step which keys are there, and which ones the lines of the step use.",
        "`p` and `ds` of a step belong to the keys that are there in this step, not to the first ones.",
    ],
    rows=[
        Row("half-repaired", f"only {what} is of the keys that are there: {rest}",
            [(f"{a} @ there_{b}", f"{a} @ {b}") for a, b in left])
        for what, rest, left in (
            ("P", "dO V^T and dS K belong to them too", (("do", "v.mT"), ("ds", "k"))),
            ("dO V^T", "P and dS K belong to them too", (("q", "k.mT"), ("ds", "k"))),
            ("dS K", "P and dO V^T belong to them too", (("q", "k.mT"), ("do", "v.mT"))),
        )
    ] + [
        Row("one-step", "only the first step is there", [("range(world)", "range(1)")]),
        Row("dq-moves", "dq goes on too: it stays with its queries",
            [("to the next rank", "\n        dq = dq.roll(1, 0)")]),
        Row("q-moves", "q goes on too: queries stay", [("to the next rank", "\n        q = q.roll(1, 0)")]),
        Row("softmax-of-a-block", "P is a softmax over the keys of a step: it is exp(score - lse), with lse of the "
            "whole row", [("torch.exp(q @ there_k.mT - lse[..., None])", "torch.softmax(q @ there_k.mT, -1)")]),
    ],
    returns="dq",
    inputs={f"{world} ranks of {n} rows": _saved(_R, world, n) for world, n in ((1, 4), (2, 3), (3, 2), (4, 4))},
    draw=lambda r: _saved(r, r.randint(1, 4), r.randint(1, 5)),
    notes={
        "k": "the keys that are there in this step", "v": "the values that are there in this step",
        "roll": "K and V go on to the next rank", "lse": "P is exp(score - lse)",
        "delta": "dS is P * (dO V^T - delta)",
    },
)  # fmt: skip
def hunted_dq(q, k, v, do, lse, delta):
    """dq [ranks, n, D] of a ring without a mask, scale 1; arguments as in 13.5."""
    dq, world = torch.zeros_like(q), len(q)
    there_k, there_v = k, v
    for _ in range(world):
        p = torch.exp(q @ there_k.mT - lse[..., None])
        ds = p * (do @ there_v.mT - delta[..., None])
        dq = dq + ds @ there_k
        there_k, there_v = there_k.roll(1, 0), there_v.roll(1, 0)  # to the next rank
    return dq


# ---- 13.8 ------------------------------------------------------------------------------------------------------------


def _ring(r: random.Random, world: int, half: int, causal: bool, large: float = 1.0) -> tuple[Any, ...]:
    q, k, v = (normal(r, world, 2 * half, 2) for _ in range(3))
    return large * q, k, v + 0.5, causal


@tensor_rule(
    "13.8",
    title="Balanced, for images too", minutes=20, difficulty="Bug hunt",
    bug=Row(
        "balanced-without-mask", "the zigzag's blocks are taken without a mask too: then every step needs all rows and "
        "all keys", [("half if causal and source > rank else 0", "half if source > rank else 0"),
                     ("half if causal and source < rank else n", "half if source < rank else n")],
    ),
    history="pytorch/pytorch, issue 141429: context_parallel balanced its load whether there was a causal mask or not",
    hints=[
        "Which cases are right? What have they in common?",
        "Which pairs are left out, and why may they be? Does that reason hold in the cases that are wrong?",
        "Zigzag leaves out what a causal mask hides. Without a mask every step takes all rows and all keys.",
    ],
    returns="o",
    inputs={
        f"{world} ranks of {2 * half} rows, causal={causal}": _ring(_R, world, half, causal)
        for world, half in ((1, 2), (2, 1), (2, 3), (4, 2)) for causal in (False, True)
    } | {"scores of some 1000": _ring(_R, 2, 2, False, 1000.0)},
    draw=lambda r: _ring(r, r.randint(1, 4), r.randint(1, 3), r.random() < 0.5),
    notes={
        "causal": "only a causal mask hides pairs", "half": "a piece is half of a shard",
        "source == rank": "its own keys alone have a diagonal",
    },
    rows=[
        Row("nothing-left-out", "with a causal mask steps now take pairs that it hides: leave out halves there",
            [("half if causal and source > rank else 0", "0"), ("half if causal and source < rank else n", "n")]),
    ],
    tries=300,
)  # fmt: skip
def hunted_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """o [ranks, n, D], scale 1; q, k, v: [ranks, n, D], index 0 the rank that has it, dealt out in zigzag."""
    world, n, _ = q.shape
    half = n // 2
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], float("-inf"))
    for step in range(world):
        for rank in range(world):
            source = (rank - step) % world
            first = half if causal and source > rank else 0
            end = half if causal and source < rank else n
            s = q[rank, first:] @ k[source, :end].T
            if causal and source == rank:
                s = s.masked_fill(torch.ones_like(s).triu(1) > 0, float("-inf"))
            part, part_lse = torch.softmax(s, -1) @ v[source, :end], torch.logsumexp(s, -1)
            share = torch.sigmoid(part_lse - lse[rank, first:])[:, None]
            o[rank, first:] += share * (part - o[rank, first:])
            lse[rank, first:] = torch.logaddexp(lse[rank, first:], part_lse)
    return o


# ---- 13.9 ------------------------------------------------------------------------------------------------------------


def _window(r: random.Random) -> tuple[int, ...]:
    world, n = r.randint(1, 6), r.randint(1, 12)
    return r.randrange(world), world, n, r.randint(0, 40)


@rule(
    "13.9",
    title="A window on a ring", minutes=30, difficulty="Stretch",
    hints=[
        "The first row of rank r is token r * n. It sees `window` keys before its own. On how many ranks before r do "
        "they lie? There are not more than r of them.",
        "min(rank, window over n, rounded up). For the pairs: how many keys does token i see? Not more than window + "
        "1, and not more than there are.",
        "The sum of min(i, window) + 1 over i from rank * n to rank * n + n - 1.",
    ],
    returns="fetched, pairs",
    whole=True,
    inputs=[
        (rank, 4, n, window) for n in (1, 4, 6) for window in (0, 1, 3, 4, 5, 9, 30) for rank in (0, 1, 3)
    ],
    draw=_window,
    words={"fetched": "the number of ranks", "pairs": "the pairs"},
    notes={
        "rank": "no more ranks stand before this one", "window": "a query sees `window` keys before its own",
        "1": "a query sees its own key too",
    },
    rows=[
        Row("all-pairs", "pairs are those of whole blocks: mask and window hide some",
            [("return fetched, pairs", "return fetched, (fetched + 1) * n * n")]),
        Row("round-the-ring", "fetched is limited by world - 1: no more than `rank` ranks stand before this one",
            [("min(rank,", "min(world - 1,")]),
    ],
)  # fmt: skip
def with_window(rank, world, n, window):
    """(fetched, pairs) of a rank with n contiguous tokens, causal, when token i sees keys i - window to i.

    fetched: of how many other ranks it needs keys; pairs: of a query and a key that it computes.
    """
    # BEGIN SOLUTION
    fetched = min(rank, math.ceil(window / n))
    pairs = sum(min(i, window) + 1 for i in range(rank * n, rank * n + n))
    return fetched, pairs
    # END SOLUTION
