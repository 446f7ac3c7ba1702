"""The bytes that a tiled forward pass asks of HBM, with slips in the count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flashlab.check.slips import Chosen, Slip, explain, right_where

Sizes = tuple[int, int, int, int, int]  # M, N, HEAD_DIM, BLOCK_M, itemsize

_BLOCKS: Mapping[str, tuple[Callable[[int, int, int], float], str]] = {
    "down": (lambda M, N, B: M // B, "M / BLOCK_M is rounded down: the last block counts too, where it is not full"),
    "more": (lambda M, N, B: M // B + 1, "M // BLOCK_M + 1 is one block too many where BLOCK_M divides M"),
    "less": (lambda M, N, B: math.ceil(M / B) - 1, "one block of queries is missing: there are ceil(M / BLOCK_M)"),
    "fraction": (lambda M, N, B: M / B, "there is no fraction of a block: round M / BLOCK_M up"),
    "nearest": (lambda M, N, B: round(M / B), "M / BLOCK_M is rounded to the nearest: it is rounded up"),
    "one": (lambda M, N, B: 1, "K and V are read once: every block of queries reads them"),
    "rows": (lambda M, N, B: M, "K and V are read once by each row: a block of BLOCK_M rows reads them once"),
    "of N": (lambda M, N, B: math.ceil(N / B), "the blocks are those of N rows: they are blocks of the M queries"),
    "of 64": (lambda M, N, B: math.ceil(M / 64), "every block is taken for 64 rows: it has BLOCK_M"),
    "BLOCK_M": (lambda M, N, B: B, "K and V are read BLOCK_M times: there are ceil(M / BLOCK_M) blocks"),
}
_QUERIES: Mapping[str, tuple[Callable[[int, int, int, float], float], str]] = {
    "none": (lambda M, N, B, P: 0, "Q is missing: each block reads its own rows of it"),
    "padded": (lambda M, N, B, P: math.ceil(M / B) * B, "rows of Q that do not exist are counted: they are not read"),
    "again": (lambda M, N, B, P: M * P, "all of Q is read by every block: each block reads its own rows only"),
    "one block": (lambda M, N, B, P: B, "Q has BLOCK_M rows there, one block of it: all of its M rows are read"),
    "twice": (lambda M, N, B, P: 2 * M, "M rows too many: O is written, not read"),
    "N": (lambda M, N, B, P: N, "Q is counted with N rows: it has M"),
    "blocks": (lambda M, N, B, P: P, "one row of Q is counted for each block: it has BLOCK_M"),
    "per key block": (lambda M, N, B, P: M * math.ceil(N / B), "Q is read again for every block of keys: each block "
                      "of queries reads its own rows once"),
}  # fmt: skip
_KEYS = {
    1: "one of K and V is counted: they are two matrices",
    3: "three matrices of N rows are counted: K and V are two",
    4: "four matrices of N rows are counted: K and V are two",
    0: "K and V are missing",
}
_ITEM = {
    1: "elements are counted, or itemsize is missing: an element has itemsize bytes",
    2: "every element is taken for 2 bytes: it has itemsize",
    4: "every element is taken for 4 bytes: it has itemsize",
    "bits": "bits are counted: a byte has 8",
    "KiB": "that is in KiB: bytes are wanted",
    "twice": "itemsize is there twice",
}
_COLUMNS = {
    1: "HEAD_DIM is missing: a row has HEAD_DIM elements",
    64: "every row is taken for 64 elements: it has HEAD_DIM",
    "twice": "HEAD_DIM is there twice",
}
_MORE: Mapping[str, tuple[Callable[[int, int, int, int, int], float], str]] = {
    "lse": (lambda M, N, D, B, e: 4 * M, "4 bytes for each row too many: lse is written, not read"),
    "O": (lambda M, N, D, B, e: M * D * e, "M rows too many: O is written, not read"),
    "scores": (lambda M, N, D, B, e: M * N * e, "the scores are counted: they never leave the chip"),
    "scores in float32": (lambda M, N, D, B, e: M * N * 4, "the scores are counted: they never leave the chip"),
    "scores twice": (lambda M, N, D, B, e: 2 * M * N * e, "the scores are counted: they never leave the chip"),
}
_OUT = {
    "lse once": (lambda M, N, D, B, e: M * D * e + 4, "lse has one number for each row: one is counted in all"),
    "lse per block": (lambda M, N, D, B, e: M * D * e + 4 * math.ceil(M / B), "lse has one number for each row: one "
                      "for each block is counted"),
    "lse per element": (lambda M, N, D, B, e: M * D * e + 4 * M * D, "lse has one number for each row, not HEAD_DIM"),
    "lse of N": (lambda M, N, D, B, e: M * D * e + 4 * N, "lse has a number for each of the M queries: N are counted"),
    "m and l": (lambda M, N, D, B, e: M * D * e + 8 * M, "two numbers are counted for each row beside O: lse is one"),
    "O of N rows": (lambda M, N, D, B, e: N * D * e + 4 * M, "O has a row for each of the M queries: N are counted"),
    "O padded": (lambda M, N, D, B, e: math.ceil(M / B) * B * D * e + 4 * M, "rows of O that do not exist are counted"),
    "both padded": (lambda M, N, D, B, e: math.ceil(M / B) * B * (D * e + 4), "rows that do not exist are counted"),
    "lse alone": (lambda M, N, D, B, e: 4 * M, "O is missing: M rows of it are written"),
    "bits": (lambda M, N, D, B, e: 8 * (M * D * e + 4 * M), "bits are counted: a byte has 8"),
    "lse times itemsize": (lambda M, N, D, B, e: M * D * e + 4 * M * e, "lse has 4 bytes for each row: they are "
                           "multiplied by itemsize"),
    "lse in 8 bytes": (lambda M, N, D, B, e: M * D * e + 8 * M, "lse is a float32, 4 bytes: 8 are counted"),
    "two matrices": (lambda M, N, D, B, e: 2 * M * D * e + 4 * M, "M rows too many: O alone is written, and lse"),
    "K and V": (lambda M, N, D, B, e: (M + 2 * N) * D * e + 4 * M, "K and V are counted: they are read, not written"),
}  # fmt: skip

READING = [
    *(Slip("blocks", name, why, "wrong-blocks") for name, (_, why) in _BLOCKS.items()),
    *(Slip("q", name, why, "wrong-rows-of-q") for name, (_, why) in _QUERIES.items()),
    *(Slip("kv", count, why, "wrong-rows-of-kv") for count, why in _KEYS.items()),
    *(Slip("itemsize", name, why, "wrong-itemsize") for name, why in _ITEM.items()),
    *(Slip("D", name, why, "wrong-head-dim") for name, why in _COLUMNS.items()),
    *(Slip("more", name, why, f"{name.split()[0]}-read") for name, (_, why) in _MORE.items()),
    Slip("kv rows", "M", "K and V are counted with M rows: they have N", "wrong-rows-of-kv"),
    Slip("D of K", 1, "HEAD_DIM multiplies Q alone: K and V have it too", "wrong-head-dim"),
    Slip("D of Q", 1, "HEAD_DIM multiplies K and V alone: Q has it too", "wrong-head-dim"),
    Slip("e of K", 1, "itemsize multiplies Q alone: K and V have it too", "wrong-itemsize"),
    Slip("e of Q", 1, "itemsize multiplies K and V alone: Q has it too", "wrong-itemsize"),
]


def bytes_read(sizes: Sizes, chosen: Chosen) -> float:
    """What the reading of Q, K and V comes to."""
    M, N, D, B, e = sizes
    blocks = _BLOCKS[str(chosen["blocks"])][0](M, N, B) if "blocks" in chosen else math.ceil(M / B)
    q = _QUERIES[str(chosen["q"])][0](M, N, B, blocks) if "q" in chosen else M
    kv = chosen.get("kv", 2) * (M if "kv rows" in chosen else N) * blocks
    name = chosen.get("itemsize", e)
    item: float = {"bits": 8 * e, "KiB": e / 1024, "twice": e * e}[name] if isinstance(name, str) else name
    d: int = D * D if chosen.get("D") == "twice" else chosen.get("D", D)
    of_q, of_k = (
        (1 if f"D of {x}" in chosen else d) * (1 if f"e of {x}" in chosen else item) for x in ("Q", "K")
    )  # fmt: skip
    more = _MORE[str(chosen["more"])][0](M, N, D, B, e) if "more" in chosen else 0
    return q * of_q + kv * of_k + more


def explain_bytes_read(
    cases: Sequence[Sizes], got: Sequence[float], fn: Callable[..., float]
) -> tuple[str, str] | None:
    """(slug, sentence) of one slip or two that give all of these numbers, or of where `fn(*sizes)` is right."""
    found = explain(lambda chosen: _same(got, [bytes_read(sizes, chosen) for sizes in cases]), READING)
    tried = [
        (M, N, D, B, e) for M in (32, 64, 100) for N in (32, 64, 100) for D in (8, 64) for B in (32, 64) for e in (2, 4)
    ]
    tried += [(B, N, D, B, 2) for N in (32, 64, 100) for D in (8, 64) for B in (32, 64)]
    return found or right_where(
        _SIZES, tried, lambda *sizes: abs(fn(*sizes) - bytes_read(sizes, {})) < 0.5, "the count"
    )


_SIZES: Mapping[str, Callable[..., bool]] = {
    "M = N": lambda M, N, D, B, e: M == N,
    "BLOCK_M divides M": lambda M, N, D, B, e: M % B == 0,
    "M = BLOCK_M, so that there is one block": lambda M, N, D, B, e: M == B,
    "there is one block of queries": lambda M, N, D, B, e: M <= B,
    "M = N = BLOCK_M": lambda M, N, D, B, e: M == N == B,
    "N = BLOCK_M": lambda M, N, D, B, e: N == B,
    "M = N and BLOCK_M divides M": lambda M, N, D, B, e: M == N and M % B == 0,
    "M = N and there is one block": lambda M, N, D, B, e: M == N and M <= B,
    "N = BLOCK_M and BLOCK_M divides M": lambda M, N, D, B, e: N == B and M % B == 0,
    "HEAD_DIM is 64": lambda M, N, D, B, e: D == 64,
    "itemsize is 2": lambda M, N, D, B, e: e == 2,
    "itemsize is 4": lambda M, N, D, B, e: e == 4,
}


def explain_bytes_written(cases: Sequence[Sizes], got: Sequence[float]) -> tuple[str, str] | None:
    """The same of O and lse."""
    slips = [Slip("written", name, why, f"{name.split()[0]}-miscounted") for name, (_, why) in _OUT.items()]
    return explain(lambda chosen: _same(got, [_OUT[str(chosen["written"])][0](*sizes) for sizes in cases]), slips)


def _same(got: Sequence[float], told: Sequence[float]) -> bool:
    return all(abs(a - b) < 0.5 for a, b in zip(got, told, strict=True))
