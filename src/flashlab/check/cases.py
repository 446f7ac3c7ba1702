"""The inputs an attention kernel is tested with: small, many, and each made to break one way of being wrong.

Where the ideas come from: the shapes are flash-attention's own test list, cut to what an interpreted kernel does in
milliseconds; the contents answer bugs of public kernels (a late or moving row maximum, scores that overflow exp, logits
below a finite "minus infinity", ragged tails, strides, masked rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flashlab.check.poison import guarded

HUGE = -(2.0**24)  # q.k of the "huge" content: exact in float32, and below every finite "minus infinity" in use


# With this scale q.k = HUGE, a power of two, gives scores of -2.35e38 (in base 2 -3.39e38): below -1e30 and -3e38 too.
LOWEST_SCALE = 3.39e38 * math.log(2) / -HUGE


@dataclass(frozen=True)
class Case:
    """One input. `name` says in plain words what is special about it; `scale` None means 1 / sqrt(head_dim)."""

    name: str
    seq_q: int
    seq_k: int
    content: str = "plain"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    causal: bool = False
    scale: float | None = None
    layout: str = "contiguous"
    block_n: int | None = None  # the tile a block-level function is told to use
    omit_defaults: bool = False  # call without `scale` (and `causal`) where the function has defaults for them

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def __str__(self) -> str:
        size = f"seq_q={self.seq_q}, seq_k={self.seq_k}, head_dim={self.head_dim}"
        if self.batch * self.heads > 1:
            size = f"batch={self.batch}, heads={self.heads}, {size}"
        if self.kv_heads != self.heads:
            size = size.replace("seq_q", f"kv_heads={self.kv_heads}, seq_q", 1)
        if self.block_n is not None:
            size += f", BLOCK_N={self.block_n}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} ({size}, {dtype}{', causal' if self.causal else ''})"


def case_list(
    *,
    causal: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float16,),
    head_dims: Sequence[int] = (64,),
    gqa: bool = False,
    batched: bool = True,
    cross: bool = True,
    scaled: bool = True,
    strided: bool = True,
    empty: bool = False,
    max_seq: int | None = None,
    max_tile: int = 256,
    full: bool = False,
) -> list[Case]:
    """The cases for a kernel that can do what the arguments say, simplest first.

    batched: several batches and heads. cross: seq_q != seq_k. scaled: it takes `scale`. strided: any strides.
    empty: no keys, no queries, no batch. max_seq: the longest sequence. max_tile: 128 where no tile is larger, to save
    time. full: more and longer ones, for a GPU or CI.
    """
    first = Case("", 1, 1, dtype=dtypes[0], head_dim=head_dims[0])
    edges = [spec for tile in (128, 256) if tile <= max_tile for spec in _edges(tile)]
    cases = [replace(first, **changes) for changes in _BASE + edges]
    cases += [replace(first, **changes) for changes in (_LONG if full else []) + (_EMPTY if empty else [])]
    if causal:
        chosen = _CAUSAL + edges + (_LONG_CAUSAL if full else [])
        cases += [replace(first, causal=True, **changes) for changes in chosen]
    if gqa:
        cases += [replace(first, causal=causal, **changes) for changes in _GQA]
    for i, dtype in enumerate(dtypes):
        for j, head_dim in enumerate(head_dims):
            # Every dtype with the first head_dim, every head_dim with the first dtype; all pairs only when full.
            if i + j > 0 and (i == 0 or j == 0 or full):
                again = replace(first, dtype=dtype, head_dim=head_dim)
                cases += [replace(again, **changes) for changes in (_OTHER_DTYPE if i else _OTHER_HEAD_DIM)]
                if causal:
                    cases += [replace(again, causal=True, **changes) for changes in _OTHER_HEAD_DIM[:1]]
    if not batched:
        single = [c for c in cases if c.batch * c.heads == 1 or c.seq_q == 1]
        cases = [replace(c, heads=1, kv_heads=1) for c in single]
    if not cross:
        cases = [c for c in cases if c.content != "creeping"]  # a square of that length would be slow
        cases = [replace(c, seq_q=c.seq_k) if c.seq_q < c.seq_k else replace(c, seq_k=c.seq_q) for c in cases]
    cases = [c for c in cases if (scaled or c.scale is None) and (strided or c.layout == "contiguous")]
    if max_seq is not None:
        cases = [c for c in cases if max(c.seq_q, c.seq_k) <= max_seq]
    if not cases:
        raise ValueError(f"no case is as short as max_seq={max_seq}")
    return list(dict.fromkeys(cases))


def _spec(name: str, seq_q: int, seq_k: int, content: str = "plain", **rest) -> dict:
    return dict(name=name, seq_q=seq_q, seq_k=seq_k, content=content, **rest)


def _edges(tile: int) -> list[dict]:
    """Lengths that are a multiple of every power of two up to `tile`, one more, and one less; diagonals at -1, 0, 1."""
    return [
        _spec(f"{tile} keys, one query less", tile - 1, tile),
        _spec(f"{tile} queries, one key less", tile, tile - 1),
        _spec(f"one query and one key more than {tile}", tile + 1, tile + 1),
    ]


_BASE = [
    _spec("one small tile", 16, 16),
    _spec("a square of full tiles", 128, 128),
    _spec("a last block that is not full", 100, 100),
    _spec("fewer keys than a tile", 5, 5),
    _spec("one query and one key", 1, 1),
    _spec("several batches and heads", 40, 40, batch=2, heads=3, kv_heads=3),
    _spec("more keys than queries", 33, 130),
    _spec("more queries than keys", 130, 33),
    _spec("one query", 1, 147, heads=2, kv_heads=2),
    _spec("the defaults of scale and causal", 32, 48, omit_defaults=True),
    _spec("another scale", 32, 80, scale=0.3),
    _spec("several tiles of queries and of keys", 160, 288),
    _spec("the largest score in the last block", 40, 200, "late"),
    _spec("a row maximum that rises in every block", 40, 272, "rising"),
    _spec("a row maximum in the first block", 40, 200, "falling"),
    _spec("every score near +200", 40, 144, "near +200"),
    _spec("every score near -200", 40, 144, "near -200"),
    _spec("every score near -200, full tiles", 40, 128, "near -200"),
    _spec("scores of every size up to 100", 40, 200, "spread"),
    _spec("scores of every size, another scale", 40, 80, "spread", scale=0.3),
    _spec("every score hugely negative", 33, 72, "huge"),
    _spec("every score near the lowest number of float32", 33, 72, "huge", scale=LOWEST_SCALE),
    _spec("many small contributions after a large one", 16, 1024, "creeping"),
    _spec("heads interleaved in memory", 40, 72, batch=2, heads=2, kv_heads=2, layout="by token"),
    _spec("q, k and v each laid out in another way", 40, 72, heads=3, kv_heads=3, layout="each its own"),
    _spec("gaps between the heads in memory", 24, 72, batch=1, heads=2, kv_heads=2, layout="spaced"),
]

_EMPTY = [_spec("no keys", 16, 0), _spec("no queries", 0, 16), _spec("no batch", 16, 16, batch=0)]

_CAUSAL = [
    _spec("one small tile", 16, 16),
    _spec("a last block that is not full", 100, 100),
    _spec("a square of full tiles", 128, 128),
    _spec("one query and one key", 1, 1),
    _spec("more keys than queries", 50, 130),
    _spec("one query", 1, 147),
    _spec("queries that may look at no key", 130, 47),
    _spec("several batches and heads", 40, 40, batch=2, heads=3, kv_heads=3),
    _spec("another scale", 32, 80, scale=0.3),
    _spec("a row maximum that rises in every block", 144, 144, "rising"),
    _spec("every score near +200", 72, 72, "near +200"),
    _spec("every score hugely negative", 72, 72, "huge"),
]

_GQA = [
    _spec("grouped queries: 3 query heads to each of 2 key heads", 40, 72, batch=2, heads=6, kv_heads=2),
    _spec("one key head for 5 query heads", 33, 65, heads=5, kv_heads=1),
    _spec("grouped queries, interleaved in memory", 24, 40, batch=2, heads=4, kv_heads=2, layout="by token"),
]

_OTHER_DTYPE = [
    _spec("many small contributions after a large one", 16, 1024, "creeping"),
    _spec("a last block that is not full", 100, 100),
    _spec("a row maximum that rises in every block", 40, 272, "rising"),
    _spec("every score near +200", 40, 144, "near +200"),
    _spec("scores of every size up to 100", 40, 200, "spread"),
    _spec("scores of every size, another scale", 40, 80, "spread", scale=0.3),
]

_OTHER_HEAD_DIM = [
    _spec("a last block that is not full", 100, 100),
    _spec("several batches and heads", 40, 40, batch=2, heads=3, kv_heads=3),
]

_LONG = [
    _spec("a long sequence", 1024, 1024),
    _spec("a long sequence, one key short", 1023, 1024),
    _spec("a long sequence, one key more", 1024, 1023),
    _spec("a row maximum that rises in every block of a long sequence", 512, 1000, "rising"),
    _spec("the largest score in the last block of a long sequence", 500, 1025, "late"),
    _spec("many heads", 113, 203, batch=3, heads=7, kv_heads=7),
    _spec("hardly any queries, many keys", 3, 799),
    _spec("many queries, hardly any keys", 799, 3),
    _spec("one key", 239, 1),
    _spec("two queries and one key", 2, 1),
]

_LONG_CAUSAL = [
    _spec("a long sequence", 1024, 1024),
    _spec("a long sequence, one key short", 1024, 1023),
    _spec("a long sequence, one key more", 1023, 1024),
    _spec("most queries may look at no key", 799, 3),
    _spec("many heads", 113, 203, batch=3, heads=7, kv_heads=7),
]


# Three tensors, three layouts: a stride taken for another, or for 1, shows.
MIXED_LAYOUTS = {
    "each its own": ("rows apart", "by token", "spaced"),  # and o, made like q, is dense
    "q by columns": ("by columns", "rows apart", "contiguous"),
    "k by columns": ("contiguous", "by columns", "rows apart"),
    "v by columns": ("rows apart", "contiguous", "by columns"),
}


def make_inputs(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a case: views of buffers filled with NaN, drawn on the CPU so that every machine gets the same.

    V has mean 0.5, so that the outputs of long rows are not near zero, where nothing wrong would show.
    """
    generator = torch.Generator().manual_seed(7919 * case.seq_q + 104729 * case.seq_k + case.head_dim)

    def randn(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, rows, case.head_dim, generator=generator, dtype=torch.float64)

    q, k, v = randn(case.heads, case.seq_q), randn(case.kv_heads, case.seq_k), randn(case.kv_heads, case.seq_k) + 0.5
    if case.content in _ADDED:
        _add_scores(q, k, case.softmax_scale, _ADDED[case.content](torch.arange(case.seq_k, dtype=q.dtype)))
    elif case.content != "plain":
        {"spread": _spread, "huge": _huge, "creeping": _creeping}[case.content](q, k, v, case)
    layouts = MIXED_LAYOUTS.get(case.layout, (case.layout,) * 3)
    q, k, v = (guarded(x.to(case.dtype), layout, device) for x, layout in zip((q, k, v), layouts, strict=True))
    return q, k, v


def _add_scores(q: torch.Tensor, k: torch.Tensor, scale: float, added: torch.Tensor) -> None:
    """Add `added` [seq_k] to every row of scores, through the first component of q and k."""
    size = math.sqrt(added.abs().max().item() / scale) or 1.0
    q[..., 0] = size
    k[..., 0] = added / (size * scale)


# What is added to the score of each key.
_ADDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "late": lambda key: 7.0 * (key == len(key) - 1),
    "rising": lambda key: torch.linspace(0, 28, len(key), dtype=key.dtype),
    # Steep: a correction that has to undo a fall of the maximum overflows within any three blocks.
    "falling": lambda key: torch.linspace(len(key), 0, len(key), dtype=key.dtype),
    "near +200": lambda key: torch.full_like(key, 200.0),
    "near -200": lambda key: torch.full_like(key, -200.0),
}


def _spread(q, k, v, case):
    """Scores with a standard deviation near 33, whatever the head_dim."""
    size = math.sqrt(33 / (case.softmax_scale * math.sqrt(q.shape[-1])))
    q.mul_(size)
    k.mul_(size)


def _huge(q, k, v, case):
    """Every q.k is HUGE, exactly: a right kernel averages V, and no rounding of the scores is to be forgiven."""
    q.zero_()
    k.zero_()
    q[..., 0] = 4096.0  # one feature only: a sum would be rounded by its order, where the scale is no power of two
    k[..., 0] = HUGE / 4096.0


def _creeping(q, k, v, case):
    """One key with nearly all the weight, then many that each add less to O than half its spacing in 16 bits.

    Together they add about five spacings: an accumulator in float32 gathers them, one in the inputs' dtype never moves.
    """
    epsilon = max(torch.finfo(case.dtype).eps, torch.finfo(torch.float16).eps)
    k.zero_()
    added = torch.full((case.seq_k,), math.log(0.3 * epsilon / 64), dtype=q.dtype)
    added[0] = 0.0
    _add_scores(q, k, case.softmax_scale, added)
    v.mul_(0.02).add_(1.0)
