"""Checks of phase 12: intensity, places in pages, empty parts, splits, packed rows, a fence, forks, a kernel."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.check import CheckFailed, expect
from flashlab.check.cuda_answer import Source, built, ran, replaced, text_of
from flashlab.check.cuda_index import Trials, explained
from flashlab.check.lookup import Row
from flashlab.check.poison import mark_unwritten, unwritten
from flashlab.cuda import CudaModule
from flashlab.exercises.kernel_rule import empty, kernel_rule
from flashlab.exercises.phase_12_arrivals import arrivals_told, said_of_arrivals
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import RULES, rule
from flashlab.exercises.tensor_rule import normal, rows_of, tensor_rule
from flashlab.exercises.triton_answers import in_bounds
from flashlab.simt.source import blank_comments

# ---- 12.1 ------------------------------------------------------------------------------------------------------------


def _model(r: random.Random) -> tuple[int, ...]:
    kv_heads, itemsize = r.choice((1, 2, 4, 8)), r.choice((1, 2, 4))
    return kv_heads * r.randint(1, 16), kv_heads, r.randint(1, 8), itemsize, r.randint(50, 2000), r.randint(300, 8000)


@rule(
    "12.1",
    title="Where is the ridge?", minutes=15, difficulty="Warm-up",
    hints=[
        "Take one key head and N keys. How many bytes are its K and V? How many products do they go into, of how many "
        "query rows?",
        "A row costs 4 · N · D operations: two products, each a multiplication and an addition. K and V are 2 · N · D "
        "numbers. N and D cancel.",
        "intensity = 2 * rows / itemsize with rows = heads / kv_heads * queries. The ridge is tflops * 1000 / gb_s; "
        "divide it by the intensity of one query, and round up.",
    ],
    returns="intensity, ridge_queries",
    inputs=[
        (32, 8, 1, 2, 989, 4800), (32, 8, 4, 2, 989, 4800), (32, 32, 1, 2, 989, 4800), (64, 8, 1, 1, 1979, 4800),
        (16, 1, 2, 2, 312, 1555), (8, 8, 1, 4, 100, 1000), (128, 1, 1, 2, 989, 3350),
        (8, 8, 1, 2, 989, 3), (8, 4, 1, 2, 1, 9000),
    ],
    draw=_model,
    words={"rows": "the rows that read a key head", "of_one": "the intensity of one query"},
    notes={
        "itemsize": "the cache has numbers of itemsize bytes", "heads // kv_heads": "all heads of a group read one key",
        "queries": "each query of a sequence reads the same keys", "1000": "TFLOP/s and GB/s are a factor of 1000 "
        "apart",
        "2": "4 operations per row, key and column, and 2 numbers, one of K and one of V",
    },
    rows=[
        Row("queries-counted-twice", "ridge_queries: the intensity of `queries` queries is taken: it is asked how many "
            "there have to be", [("/ of_one", "/ (of_one * queries)")]),
        Row("ridge-itself", "ridge_queries: this is the ridge, in operations per byte: asked is how many queries "
            "reach it", [("math.ceil(tflops * 1000 / gb_s / of_one)", "tflops * 1000 / gb_s")]),
        Row("upside-down", "ridge_queries: the ridge is upside down: it is operations per second over bytes per second",
            [("tflops * 1000 / gb_s", "gb_s / (tflops * 1000)")]),
    ],
)  # fmt: skip
def wall_of(heads, kv_heads, queries, itemsize, tflops, gb_s):
    """(intensity, ridge_queries) of attention over a long cache, of which each byte is read once.

    intensity: operations per byte of K and V, with `queries` queries per sequence. ridge_queries: the fewest
    queries per sequence at which a chip of so many 10^12 operations and 10^9 bytes per second is not bound by
    its memory.
    """
    # BEGIN SOLUTION
    rows = heads // kv_heads * queries
    of_one = 2 * (heads // kv_heads) / itemsize
    return 2 * rows / itemsize, math.ceil(tflops * 1000 / gb_s / of_one)
    # END SOLUTION


# ---- 12.2 ------------------------------------------------------------------------------------------------------------


def _paged(r: random.Random) -> tuple[Any, ...]:
    page, kv_heads, head_dim = r.choice((1, 2, 3, 16)), r.randint(1, 4), r.choice((2, 5, 64))
    length = r.randint(1, 4 * page)
    table = tuple(r.sample(range(40), -(-length // page) + r.randint(0, 2)))
    return table, length, r.randrange(length), r.randrange(kv_heads), page, kv_heads, head_dim


_SEEN = random.Random(12)


@rule(
    "12.2",
    title="Where does a key lie?", minutes=15,
    hints=[
        "Key j is in entry j // page of the table, and there in row j % page. A page holds the rows of every key head: "
        "in which order, says the layout.",
        "[pages, kv_heads, page, head_dim]: the stride of the last axis is 1. The others from right to left: head_dim, "
        "page * head_dim, kv_heads * page * head_dim.",
        "offset = ((table[j // page] * kv_heads + kv_head) * page + j % page) * head_dim. The last page is filled up "
        "to a multiple of page: -length % page rows are empty.",
    ],
    returns="offset, unused",
    strict=True,
    inputs=[((5, 2, 9), 40, j, 1, 16, 2, 64) for j in (0, 15, 16, 17, 39)]
    + [((3,), 4, 3, 0, 4, 1, 8), ((3, 1), 5, 4, 2, 4, 3, 8), ((7, 6, 5), 3, 2, 1, 1, 2, 2)],
    draw=_paged,
    notes={
        "page": "a page has room for `page` keys of each head", "kv_heads": "a page holds the rows of all key heads",
        "table": "the table says which page it is", "kv_head": "the rows of a head stand together within a page",
        "-length": "what is missing to a whole number of pages",
    },
    rows=[
        Row("reserved-table", "unused: the whole table is counted: entries behind the last page belong to nobody yet",
            [("-length % page", "len(table) * page - length")]),
    ],
)  # fmt: skip
def place_of(table, length, j, kv_head, page, kv_heads, head_dim):
    """(offset, unused): of key j of a sequence in a cache [pages, kv_heads, page, head_dim], all of it in one
    piece.

    table: the numbers of its pages, in order; there may be more than `length` keys need. offset: in elements
    from the cache's first. unused: rows per key head in the pages that hold the sequence's keys which no key
    of it takes.
    """
    # BEGIN SOLUTION
    number = table[j // page]
    offset = ((number * kv_heads + kv_head) * page + j % page) * head_dim
    return offset, -length % page
    # END SOLUTION


# ---- 12.3 ------------------------------------------------------------------------------------------------------------


def _parts(r: random.Random, splits: int, rows: int, empty_at: float, low: float = 0.0) -> tuple[torch.Tensor, ...]:
    """os and lses; a part without keys has lse -inf, and o is what was in memory: NaN."""
    os, lses = 1 + normal(r, splits, rows, 2), low + 2 * normal(r, splits, rows)
    none = torch.tensor([[r.random() < empty_at for _ in range(rows)] for _ in range(splits)])
    return os.masked_fill(none[..., None], math.nan), lses.masked_fill(none, -math.inf)


def _by_weights(os, lses):
    m = lses.amax(0)
    m_safe = m.masked_fill(m == -math.inf, 0.0)
    weight = torch.exp(lses - m_safe)
    total = weight.sum(0)
    o = (os.masked_fill(lses[..., None] == -math.inf, 0.0) * weight[..., None]).sum(0)
    return o / total.masked_fill(total == 0, 1.0)[..., None], m + torch.log(total)


@tensor_rule(
    "12.3",
    title="Parts of which all are empty", minutes=20,
    hints=[
        "A part's share of a row is exp(lse_part - lse). What is it of an empty part? And of an empty part in an empty "
        "row, where lse is -inf too?",
        "-inf - (-inf) is NaN: subtract 0 there. Nor does a share of 0 help against an o that nobody wrote, for 0 * "
        "NaN is NaN: put 0 in place of o first.",
        "lse = torch.logsumexp(lses, 0); share = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0)); "
        "os.masked_fill((lses == -math.inf)[..., None], 0.0).",
    ],
    returns="o, lse",
    inputs={
        "1 split": _parts(_SEEN, 1, 3, 0), "4 splits": _parts(_SEEN, 4, 3, 0),
        "4 splits, some empty": _parts(_SEEN, 4, 6, 0.5), "3 splits, all empty": _parts(_SEEN, 3, 4, 1.0),
        "lse near 1000": _parts(_SEEN, 3, 2, 0.2, low=1000.0), "lse near -1000": _parts(_SEEN, 3, 2, 0.2, low=-1000.0),
        "rows far apart": tuple(torch.cat(x, 1) for x in zip(
            _parts(_SEEN, 3, 2, 0.2), _parts(_SEEN, 3, 2, 0.2, low=1000.0), strict=True)),
    },
    draw=lambda r: _parts(r, r.randint(1, 5), r.randint(1, 4), r.choice((0, 0.4, 1.0)), low=r.gauss(0, 3)),
    also=[_by_weights],
    alone=rows_of(1),
    nan={
        "empty": "an empty part has lse -inf and an o that nobody wrote: its share has to be 0 where all are empty "
        "too, and 0 * NaN is NaN",
        "": "a weight overflowed: into an exponential go differences of lse that are never above 0",
    },
    words={"share": "the part's share", "there": "whether the part has keys"},
    notes={
        "share": "each part counts with its share of the sum, exp(lse_part - lse)", "lses - ": "a share is of the sum",
        "sum": "the parts are added, weighted", "0.0": "of an empty part nothing is taken",
    },
    rows=[
        Row("averaged", "o is the plain mean of the parts that have keys: each is as heavy as exp(lse)",
            [("share = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))",
              "share = (lses > -math.inf).double()\n    share = share / share.sum(0).clamp(min=1)")]),
        Row("weighted-by-lse", "o: the parts are weighted by lse; each is as heavy as exp(lse)",
            [("torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))", "lses / lses.sum(0)")]),
        Row("empty-lse-zero", "lse of a row without a key is 0: no key is a sum of 0, and its logarithm is -inf",
            [("return (share", "lse = lse.masked_fill(lse == -math.inf, 0.0)\n    return (share")]),
    ],
)  # fmt: skip
def merge_parts(os: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o [rows, D] and lse [rows] of all splits together; a row without a key gives 0 and -inf.

    os: [splits, rows, D]; lses: [splits, rows]. Of a part without keys lse is -inf, and o has never been
    written.
    """
    # BEGIN SOLUTION
    lse = torch.logsumexp(lses, 0)
    share = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))
    os = os.masked_fill((lses == -math.inf)[..., None], 0.0)
    return (share[..., None] * os).sum(0), lse
    # END SOLUTION


# ---- 12.4 ------------------------------------------------------------------------------------------------------------


@rule(
    "12.4",
    title="A split rule of one wave", minutes=20,
    hints=[
        "How many splits can each program have, so that all blocks are on the chip at once? And how many, so that none "
        "has fewer than `least` tiles? Both are rounded down, and 1 is always allowed.",
        "The smaller of the two. Its share is tiles / splits, rounded up.",
        "With 13 splits of 20 tiles the share is 2, and 10 splits take all: ceil(tiles / share) are not empty.",
    ],
    returns="splits, share",
    whole=True,
    inputs=[
        (8, 64, 132, 2), (8, 20, 108, 1), (1, 20, 13, 1), (1, 3, 132, 2), (132, 40, 132, 2), (133, 40, 132, 2),
        (67, 40, 132, 4), (66, 40, 132, 4), (4, 1, 132, 1), (4, 1, 132, 3), (10, 7, 132, 2), (5, 50, 264, 3),
        (2, 38, 13, 5), (1, 520, 264, 2), (1, 300, 132, 1),
    ],
    draw=lambda r: (r.randint(1, 70), r.choice((r.randint(1, 60), r.randint(60, 600))),
                    r.choice((13, 64, 108, 132, 264)), r.randint(1, 5)),
    words={"most": "the number of splits", "share": "the share"},
    notes={
        "slots // programs": "all blocks run at once", "tiles // least": "a split has at least `least` tiles",
        "max": "there is always one split", "math.ceil(tiles / share)": "splits that would be empty are not begun",
        "1": "there is always one split",
    },
    rows=[
        Row("empty-splits", "splits that get no tile are begun too: the shares are rounded up, so that fewer take all",
            [("return math.ceil(tiles / share)", "return most")]),
        *(Row("share-raised", "the longest share is raised to `least`, and the splits follow from it: asked is first "
              "how many splits leave `least` tiles each on average", [
                  ("min(slots // programs, tiles // least)", "slots // programs"),
                  ("math.ceil(tiles / most)\n", f"max(least, math.ceil(tiles / most)){x}\n")])
          for x in ("", " if most > 1 else tiles")),
        Row("longest-not-average", "splits and share: here the longest share has `least` tiles at least: asked is the "
            "average, tiles / splits",
            [("tiles // least", "max(n for n in range(1, tiles + 1) if math.ceil(tiles / n) >= least or n == 1)")]),
    ],
)  # fmt: skip
def one_wave(programs, tiles, slots, least):
    """(splits, share): as many splits as fit at once, and the tiles of the longest.

    programs: blocks without a split, each with `tiles` tiles of keys; slots: so many blocks run at once. With
    more than one split tiles / splits is to be `least` or more. The shares are equal, rounded up, and then no
    split is to be empty.
    """
    # BEGIN SOLUTION
    most = max(1, min(slots // programs, tiles // least))
    share = math.ceil(tiles / most)
    return math.ceil(tiles / share), share
    # END SOLUTION


# ---- 12.5 ------------------------------------------------------------------------------------------------------------


def _packed(r: random.Random) -> tuple[int, ...]:
    group, queries = r.randint(1, 9), r.randint(1, 9)
    return r.randrange(group * queries), r.randint(0, 5), group, queries, r.randint(0, 30)


@rule(
    "12.5",
    title="Whose row is it?", minutes=15,
    hints=[
        "The heads of a query stand together: row 0 is head 0 of query 0, row 1 head 1 of query 0. After `group` rows "
        "comes query 1.",
        "The last query stands beside the last key, so query i sees length - (queries - 1 - i) keys, and no fewer than "
        "0. MMA rows come in sixteens.",
        "head = kv_head * group + r % group; query = r // group; seen = max(0, length - queries + 1 + query); idle = "
        "-(group * queries) % 16.",
    ],
    returns="head, query, seen, idle",
    strict=True,
    inputs=[(r, 3, 4, 3, 20) for r in range(12)]
    + [(r, 1, 8, 1, 7) for r in (0, 5, 7)] + [(r, 0, 2, 4, 2) for r in range(8)]
    + [(0, 2, 1, 1, 0), (15, 1, 4, 4, 9), (16, 0, 17, 1, 9)],
    draw=_packed,
    notes={
        "group": "a group has so many query heads for one key head", "seen: queries": "the last query sees all keys",
        "16": "an MMA has 16 rows", "query": "each query sees one key more than the one before it", "length": "keys",
    },
    rows=[
        Row("by-heads", "the queries of a head stand together here: in this tile it is the heads of a query",
            [("r % group", "r // queries"), ("r // group", "r % queries")]),
        Row("aligned-at-the-start", "seen: query i is taken for the sequence's token i: the last query is its last one",
            [("max(0, length - queries + 1 + query)", "min(length, query + 1)")]),
        Row("padded-by-query", "idle: the heads of each query are filled up to 16 rows: here all rows are packed",
            [("-(group * queries) % 16", "queries * (-group % 16)")]),
    ],
)  # fmt: skip
def packed_row(r, kv_head, group, queries, length):
    """(head, query, seen, idle) of row r of a tile in which all that reads one key head is packed.

    The rows go through the `group` heads of query 0, then through those of query 1, and so on. seen: how many
    of the sequence's `length` keys the row sees, causal at the end. idle: rows of the tile's MMAs (16 rows
    each) that nobody has.
    """
    # BEGIN SOLUTION
    query = r // group
    seen = max(0, length - queries + 1 + query)
    return kv_head * group + r % group, query, seen, -(group * queries) % 16
    # END SOLUTION


# ---- 12.6 ------------------------------------------------------------------------------------------------------------


def _arriving(text: str) -> Source:
    return replaced(Source((Path(__file__).parent / "phase_12.cu").read_text(), "phase_12"), "arrive", text)


def _launched(rows: int, N: int, splits: int) -> list[Any]:
    """The arguments of a launch: scores and V of random numbers; NaN where nothing has been written."""
    r = random.Random(N)
    s, v = 3 * normal(r, rows, N, dtype=torch.float32), normal(r, N, 64, dtype=torch.float32)
    empty_ones = (torch.full(shape, math.nan) for shape in ((rows, 64), (splits, rows, 64), (splits, rows, 2)))
    return [s, v, *empty_ones, torch.zeros(rows, 2, dtype=torch.int32), rows, N, splits]


def _thrice(module: CudaModule) -> list[torch.Tensor]:
    outputs = []
    for given in 2 * [_launched(2, 37, 4)] + [_launched(1, 9, 5)]:
        given[2].fill_(math.nan)
        module.launch("run", *given, echo=False, timeout=2.0)
        outputs += [given[2].clone(), given[5].float()]
    return outputs


_SHOWN = "every warp's lane 0 shows what its warp has written, to all that see its count"
ARRIVE = Trials(
    "12.6", lambda text: built(text, check=True), [_thrice], region=True, place=lambda text: _arriving(text).text,
    words={"before": "before"},
    notes={"splits - 1": "the last of `splits` warps sees splits - 1 before it", "lane == 0": "one lane counts"},
    equal={
        "`lane <= 0`": "no lane is below 0", ">= splits - 1": "no warp sees more", "it is negative": "it never is",
        "where `before` is made": "lane 0 sets it, and no other is asked",
        "comes too late, after `__syncwarp()`": "the lanes have waited for each other before the exchange, too",
    },
    rows=[
        Row("no-fence", f"no fence stands between the parts and the count: {_SHOWN}",
            [(f"__threadfence();{' ' * 39}// and", "// and")]),
        Row("counted-too-early", "lane 0 counts before all lanes of its warp have stored: a __syncwarp() comes first",
            [(f"__syncwarp();{' ' * 46}// lane 0", "// lane 0")]),
        Row("counter-not-reset", "nobody puts the counter back to 0 for the next launch",
            [("if (before == splits - 1) *counter = 0;", "")]),
        Row("nobody-merges", "`last` is true in no warp: what lane 0 finds decides in every lane, beside splits - 1",
            [("if (before == splits - 1)", "if (before == -1)"), ("0) == splits - 1", "0) == -1")]),
    ],
)  # fmt: skip


@exercise(
    "12.6",
    title="The last one to arrive",
    minutes=30,
    hints=[
        "Who counts? One lane for its warp. When may it, so that the other 31 have stored? And how do the others "
        "hear what it found?",
        "A fence orders what its own thread has written, or has been shown by a barrier before it. So the fence of the "
        "lane that counts stands between __syncwarp() and the count.",
        "The same on the way back: the count, a fence, then __syncwarp(). __shfl_sync(~0u, before, 0) tells all "
        "lanes what lane 0 found. And who puts the counter back to 0?",
        "__syncwarp(); int before = 0; if (lane == 0) { __threadfence(); before = atomicAdd(counter, 1); "
        "__threadfence(); if (before == splits - 1) *counter = 0; } last = __shfl_sync(~0u, before, 0) == splits - "
        "1; __syncwarp();",
    ],
)
def last_to_arrive(arrive: str) -> str:
    code = blank_comments(text_of(arrive, "arrive"))
    if not code.strip():
        raise NotImplementedError
    said = "it waits at a barrier of the block: its other warps have nothing to do with this counter"
    expect("__syncthreads" not in code, said, diagnosis="barrier-of-the-block")
    whole = _arriving(text_of(arrive, "arrive"))
    with explained(lambda: built(whole, check=True), ARRIVE):
        for check in (False, True):
            module = built(whole, check=check)
            for rows, N, splits in ((2, 37, 4), (1, 5, 1), (3, 9, 5)):
                with arrivals_told(whole, _launched(rows, N, splits)):
                    _expect_merged(module, whole, rows, N, splits)
    said = said_of_arrivals(whole, _launched(2, 37, 4), unordered=True)
    expect(not said, f"the numbers are right, but {said}", diagnosis="not-acquired")
    return "three launches and each again with the same counters, nothing found by the emulator"


def _expect_merged(module: CudaModule, whole: Source, rows: int, N: int, splits: int) -> None:
    """Two launches, one after the other, as in a CUDA graph that is replayed."""
    given = _launched(rows, N, splits)
    s, v, o, *parts, counters = given[:6]
    for launch in ("first", "second"):
        case = f"rows={rows}, N={N}, splits={splits}, {launch} launch"
        for x in (o, *parts):
            x.fill_(math.nan)
        mark_unwritten(o)
        ran(module, whole, case, functools.partial(module.launch, "run", *given, echo=False, timeout=3.0))
        untouched = int(o.isnan().unflatten(1, (2, 32)).all(2).any(1).sum())
        said = f"right in the first launch, but in the second nobody merges {untouched} of {rows} rows: their "
        said += f"counters are {counters.tolist()} after it, and have to be 0 again"
        expect(not untouched or launch == "first", said, diagnosis="counter-not-reset", case=case)
        said = f"nobody merges {untouched} of {rows} rows: where each of {splits} warps counts once, the last sees "
        expect(not untouched, f"{said}{splits - 1}", diagnosis="nobody-is-last", case=case)
        said = f"the counters are {counters.tolist()} behind the {launch} launch, and have to be 0 again: the next one "
        said += "may have other splits"
        expect(not counters.any(), said, diagnosis="counter-not-reset", case=case)
        blank = int(unwritten(o).sum())
        said = f"{blank} of {o.numel()} elements of o are never written: is `last` true in every lane that merges?"
        expect(not blank, said, diagnosis="last-in-one-lane", case=case)
        error = (o - torch.softmax(s, 1) @ v).abs()
        if not bool((error <= 1e-4).all()):
            said = f"o is wrong at {int((~(error <= 1e-4)).sum())} of {error.numel()} elements: were parts read "
            said += "before they were there?"
            raise CheckFailed(said, diagnosis="merged-too-early", case=case)


# ---- 12.7 ------------------------------------------------------------------------------------------------------------


def _script(r: random.Random) -> tuple[Any, ...]:
    """Operations on sequences that are there; a sequence keeps its number, and none is freed twice."""
    script: list[tuple[str, int]] = [("new", 0)]
    there, count = [0], 1
    for _ in range(r.randint(1, 16)):
        what = r.choice(("append", "append", "append", "fork", "free", "new"))
        if what == "new" or not there:
            script.append(("new", 0))
            there, count = [*there, count], count + 1
            continue
        s = r.choice(there)
        script.append((what, s))
        if what == "fork":
            there, count = [*there, count], count + 1
        if what == "free":
            there.remove(s)
    return tuple(script), r.randint(1, 4)


_Script = tuple[tuple[str, int], ...]


def _short_scripts() -> Iterator[tuple[_Script, int]]:
    """All scripts of up to six operations, the shortest first, each with pages of one, two and three tokens."""
    # With each: how many sequences have begun, and which are there
    longer: list[tuple[_Script, int, tuple[int, ...]]] = [((("new", 0),), 1, (0,))]
    for _ in range(6):
        shorter, longer = longer, []
        for script, count, there in shorter:
            yield from ((script, page_size) for page_size in (2, 1, 3))
            for s in there:
                longer.append(((*script, ("append", s)), count, there))
                longer.append(((*script, ("fork", s)), count + 1, (*there, count)))
                longer.append(((*script, ("free", s)), count, tuple(x for x in there if x != s)))
            longer.append(((*script, ("new", 0)), count + 1, (*there, count)))


def _why(script: _Script, page_size: int, raises: bool) -> str:
    """What the last operation of a script has to do."""
    what, s = script[-1]
    begun = sum(x in ("new", "fork") for x, _ in script)
    if raises:
        return f"sequences are numbered from 0 in the order in which they begin, and {begun} have begun"
    if what == "new":
        return "a new sequence has no page yet"
    if what == "fork":
        return "a fork shares all pages, and takes or copies none"
    before, after = (pager(x, page_size)[-1] for x in (script[:-1], script))
    if what == "free":
        stay = before[0] - after[0]
        return f"{stay} of its pages {'is' if stay == 1 else 'are'} nobody else's" if stay else (
            "all of its pages are another's too, or it has none")  # fmt: skip
    if after[1]:
        return (
            f"the last page of sequence {s} has room, but another sequence refers to it: it is copied, and in use too"
        )
    if after[0] > before[0]:
        return f"sequence {s} has no page with room: it takes a new one, which is no copy"
    return f"the last page of sequence {s} has room, and no other sequence refers to it (any more): it is written to"


def _told(script: _Script, page_size: int, found: str) -> tuple[str, str]:
    said = ", ".join(what if what == "new" else f"{what} {s}" for what, s in script)
    return "a-script", f"page_size {page_size}: {said} {found}: {_why(script, page_size, found[:6] == 'raises')}"


def _smallest_script(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """The shortest script whose last operation goes wrong, and what that has to do; None where none does."""
    for script, page_size in itertools.islice(_short_scripts(), 4000):
        right = pager(script, page_size)[-1]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                got = tuple(map(int, learners(script, page_size)[-1]))
        except Exception as error:
            return _told(script, page_size, f"raises {type(error).__name__}")
        if got != right and _adds_up(learners):
            return "running-total", "copied is a running total: it is how many pages this operation copies, 0 or 1"
        if got != right:
            return _told(script, page_size, f"gives {got}, and should give {right}")
    return None


def _adds_up(learners: Callable[..., Any]) -> bool:
    """Whether the second number counts all copies so far, and the first is right."""
    for script, page_size in RULES["12.7"].drawn(20):
        with contextlib.redirect_stdout(io.StringIO()):
            got = [tuple(map(int, x)) for x in learners(script, page_size)]
        in_use, copied = zip(*pager(script, page_size), strict=True)
        if got != [*zip(in_use, itertools.accumulate(copied), strict=True)]:
            return False
    return True


def _every_short_script(learners: Callable[..., Any]) -> None:
    """CheckFailed for what 46 scripts do not tell from right."""
    found = _smallest_script(learners)
    for script, page_size in () if found else RULES["12.7"].drawn(300):
        with contextlib.redirect_stdout(io.StringIO()):
            results = [tuple(map(int, x)) for x in learners(script, page_size)]
        right = pager(script, page_size)
        if wrong := [i for i, (x, y) in enumerate(zip(results, right, strict=False)) if x != y]:
            at = wrong[0]
            found = _told(script[: at + 1], page_size, f"gives {results[at]}, and should give {right[at]}")
            break
    if found:
        raise CheckFailed(found[1], diagnosis=found[0])


_IN_USE = "sum(n > 0 for n in users.values())"
_COPY = "table[s][-1] = next(fresh)\n                users[table[s][-1]] = 1"
_FORKED = (("new", 0), *[("append", 0)] * 5, ("fork", 0), ("append", 1), ("append", 0), ("fork", 1), ("append", 2),
           ("free", 0), ("append", 1), ("free", 2), ("free", 1))  # fmt: skip


@rule(
    "12.7",
    title="The pager's fork", minutes=35,
    hints=[
        "Keep for each sequence a list of its pages and its length, and for each page how many sequences refer to it. "
        "A page's number can be a count that goes up.",
        "An append to a sequence whose length is a multiple of page_size takes a new page. Else it writes into its "
        "last page: may it, if another sequence refers to that page too?",
        "A shared last page that is not full: references of it less by one, a new page in its place, copied = 1. A "
        "fork copies the list and the length, and adds one to the references of each page.",
        "In use are the pages with references above 0. free takes one from each page of the sequence.",
    ],
    returns="in_use, copied",
    symptom=_smallest_script,
    then=_every_short_script,
    each="operation",
    item=int,
    inputs=[
        (_FORKED, 4), (_FORKED, 2), (_FORKED, 1), (_FORKED, 16),
        ((("new", 0), ("fork", 0), ("append", 0), ("append", 1), ("free", 0), ("free", 1)), 4),
        ((("new", 0), ("append", 0), ("fork", 0), ("free", 0), ("append", 1)), 4),
        ((("new", 0), ("append", 0), ("append", 0), ("fork", 0), ("fork", 1), ("append", 2), ("append", 1),
          ("append", 0)), 3),
    ],
    draw=_script,
    words={"table": "the pages", "length": "the length", "users": "the references of each page"},
    notes={
        "page_size": "a page is full after page_size tokens", "users": "a page is in use while a sequence refers to it",
        "> 1": "a page of one's own is written to", "list": "a fork goes its own way from here on",
    },
    rows=[
        Row("copied-at-once", "a fork takes pages at once: it shares all of them, and a page is copied when somebody "
            "appends to it", [("table.append(list(table[s]))", "table.append([next(fresh) for _ in table[s]])"),
                              ("users.update(table[s])", "users.update(table[-1])")]),
        Row("fork-without-references", "a fork adds no reference to its pages, and they are in use while anybody "
            "refers to them", [("users.update(table[s])", "pass")]),
        Row("fork-without-tokens", "a fork begins without tokens: it has all tokens of its sequence, and its length",
            [("length.append(length[s])", "length.append(0)")]),
        *(Row("counted-otherwise", f"in_use: {said}", [(_IN_USE, how)]) for said, how in (
            ("a page is counted once for each sequence: one that several refer to is one page", "sum(users.values())"),
            ("pages that nobody refers to any more are counted too", "len(users)"))),
        *(Row("copied-otherwise", f"copied: {said} are counted: the last page is copied, one page",
              [("copied = 1", f"copied = {n}")])
          for said, n in (("all pages of the sequence", "len(table[s])"), ("tokens", "length[s] % page_size"))),
        *(Row("behind-the-old-page", f"the copy {what}: it takes the place of the page that it is made of",
              [(_COPY, how)])
          for what, how in (
              ("comes behind the old page", _COPY.replace("[-1] = next(fresh)", ".append(next(fresh))", 1)),
              ("is counted, and the sequence keeps the old page", "users[next(fresh)] = 1"))),
    ],
)  # fmt: skip
def pager(script, page_size):
    """A list of (in_use, copied), one for each operation: pages that sequences refer to behind it,
    pages that it copied.

    script: ("new", s) begins the next sequence, without tokens, whatever s is; ("fork", s) begins the
    next one with all tokens of sequence s; ("append", s) adds one token to s; ("free", s) ends it.
    Sequences are numbered from 0, in the order in which they begin. A part-filled page that is shared
    is copied before it is written to.
    """
    # BEGIN SOLUTION
    table: list[list[int]] = []
    users: Counter[int] = Counter()
    length, fresh, results = [], itertools.count(), []
    for what, s in script:
        copied = 0
        if what == "new":
            table.append([])
            length.append(0)
        elif what == "fork":
            table.append(list(table[s]))
            length.append(length[s])
            users.update(table[s])
        elif what == "append":
            if length[s] % page_size == 0:
                table[s].append(next(fresh))
                users[table[s][-1]] = 1
            elif users[table[s][-1]] > 1:
                users[table[s][-1]] -= 1
                table[s][-1] = next(fresh)
                users[table[s][-1]] = 1
                copied = 1
            length[s] += 1
        else:
            users.subtract(table[s])
        results.append((sum(n > 0 for n in users.values()), copied))
    return results
    # END SOLUTION


# ---- 12.8 ------------------------------------------------------------------------------------------------------------


def _ragged(r: random.Random) -> tuple[Any, ...]:
    programs = r.randint(1, 7)
    lengths = tuple(r.choice((0, 1, r.randint(0, 40), r.randint(0, 200))) for _ in range(r.randint(1, 6)))
    return lengths, r.choice((1, 16, 32)), programs, r.randrange(programs)


def _dealt(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """Who reads which keys: nobody, several, or another program than should."""
    for lengths, block_n, programs in (((9, 4, 6), 4, 2), ((40, 3, 0, 18), 4, 4), ((17, 0, 16, 15), 16, 3)):
        read, right = ([[(s, key) for s, first, end in fn(lengths, block_n, programs, p) for key in range(first, end)]
                        for p in range(programs)] for fn in (answer, pieces_of))  # fmt: skip
        case = f"lengths={lengths}, block_n={block_n}, programs={programs}"
        often = Counter(itertools.chain(*read))
        for s, key in [*itertools.chain(*right), *sorted(often)]:
            if often[s, key] != 1 or key >= lengths[s]:
                who = "nobody" if not often[s, key] else f"{often[s, key]} programs" if often[s, key] > 1 else "one"
                behind = ", which has no such key" if key >= lengths[s] else ""
                return "not-read-once", f"key {key} of sequence {s} is read by {who}{behind} [{case}]"
        for p, (mine, wanted) in enumerate(zip(read, right, strict=True)):
            if {*mine} != {*wanted}:
                tiles = [len({(s, key // block_n) for s, key in keys}) for keys in (mine, wanted)]
                said = f"each key is read once, but program {p} has {tiles[0]} tiles, and should have {tiles[1]}"
                if tiles[0] == tiles[1]:
                    said = f"each key is read once, but program {p} has other tiles than the run that is its own"
                return "dealt-otherwise", f"{said} [{case}]: runs are of equal length, rounded up, one behind the other"
        counts = [len(fn(lengths, block_n, programs, 0)) for fn in (answer, pieces_of)]
        if counts[0] != counts[1]:
            said = f"the keys are right, in {counts[0]} pieces for {counts[1]}"
            return "not-joined", f"{said} [{case}]: what follows each other in a sequence is one piece"
    return None


@rule(
    "12.8",
    title="Equal shares of ragged lengths", minutes=40, difficulty="Stretch",
    hints=[
        "Lay the tiles of all sequences behind one another on one line. Program p has the tiles from p * share on; "
        "where on this line does sequence s begin?",
        "share = all tiles / programs, rounded up. Walk through the sequences, with `before` the tiles that came "
        "before: the piece is what [p * share, (p + 1) * share) and [before, before + tiles) have in common.",
        "first = max(p * share - before, 0); end = min((p + 1) * share - before, tiles). There is a piece where "
        "first < end. Its keys: first * block_n to min(end * block_n, length).",
    ],
    returns="sequence, first, end",
    each="piece",
    item=int,
    inputs=[((8192 // 64, 64 // 64, 20, 0, 33), 4, 5, p) for p in range(5)]
    + [((100, 3, 50), 16, 3, p) for p in range(3)]
    + [((0, 0), 16, 2, 0), ((5,), 16, 4, 0), ((5,), 16, 4, 1), ((17, 0, 16, 15), 16, 2, 0),
       ((17, 0, 16, 15), 16, 2, 1)],
    draw=_ragged,
    words={"before": "the tiles before this sequence", "share": "the share", "tiles": "the sequence's tiles"},
    symptom=_dealt,
    notes={
        "block_n": "tiles have block_n keys", "length": "the last tile ends where the sequence ends",
        "share": "every program gets the same number of tiles", "before": "the tiles of earlier sequences come first",
        "math.ceil": "a part of a tile is a tile",
    },
    rows=[
        Row("whole-sequences", "whole sequences are dealt, as many to each program: it is tiles that are",
            instead="[(s, 0, n) for s, n in enumerate(lengths) if n and s // math.ceil(len(lengths) / programs) == p]"),
        Row("each-by-itself", "each sequence is dealt among all programs by itself: all tiles stand on one line",
            [("before += tiles", "before = 0"), ("share = math.ceil(sum(math.ceil(n / block_n) for n in lengths) / "
              "programs)\n    ", ""),
             ("        first, end =", "        share = math.ceil(tiles / programs)\n        first, end =")]),
        Row("a-line-of-keys", "it is keys that are dealt, whose tiles go on from one sequence into the next: a tile "
            "has keys of one sequence, and its last tile may be shorter",
            [("sum(math.ceil(n / block_n) for n in lengths) / programs)",
              "math.ceil(sum(lengths) / block_n) / programs) * block_n"),
             ("tiles = math.ceil(length / block_n)", "tiles = length"),
             ("first * block_n, min(end * block_n, length)", "first, end")]),
        Row("share-of-keys", "the share is computed from the number of all keys: each sequence has its own last tile",
            [("sum(math.ceil(n / block_n) for n in lengths) / programs", "sum(lengths) / programs / block_n")]),
        Row("passed-by", "sequences of which this program has no piece are not counted among the tiles before",
            [("min(end * block_n, length)))\n", "min(end * block_n, length)))\n    ")]),
        *(Row("from-the-first-sequence", "first and end are counted from the first sequence's beginning: take off the "
              "tiles before this one",
              [("first * block_n, min(end * block_n, length)", f"(first + before) * block_n, {x}")])
          for x in ("(end + before) * block_n", "min((end + before) * block_n, length)")),
    ],
)  # fmt: skip
def pieces_of(lengths, block_n, programs, p):
    """A list of (sequence, first, end): the keys, from first to end - 1, that program p of a persistent grid
    reads.

    The tiles of block_n keys of all sequences, one after the other, are dealt out in runs of equal length,
    rounded up; a sequence's last tile may be shorter. Later programs may have fewer tiles, or none. A run has
    at most one piece of a sequence, and none that is empty.
    """
    # BEGIN SOLUTION
    share = math.ceil(sum(math.ceil(n / block_n) for n in lengths) / programs)
    pieces, before = [], 0
    for sequence, length in enumerate(lengths):
        tiles = math.ceil(length / block_n)
        first, end = max(p * share - before, 0), min((p + 1) * share - before, tiles)
        if first < end:
            pieces.append((sequence, first * block_n, min(end * block_n, length)))
        before += tiles
    return pieces
    # END SOLUTION


# ---- 12.9 ------------------------------------------------------------------------------------------------------------


def _cache_launch(
    r: random.Random, lengths: tuple[int, ...], *, kv_heads: int = 1, group: int = 2, page: int = 4, splits: int = 2,
    D: int = 16, spare: int = 1, scale: float = 0.3,
) -> tuple[Any, ...]:  # fmt: skip
    """part_kernel's arguments: pages in any order, NaN in what no key has, entries of -1 behind the last
    page."""
    batch, width = len(lengths), -(-max(lengths) // page) + spare
    order = list(range(batch * width + 1))
    r.shuffle(order)
    table = torch.full((batch, width), -1, dtype=torch.int32)
    k, v = (torch.full((len(order), page, kv_heads, D), math.nan) for _ in "kv")
    for b, length in enumerate(lengths):
        for j in range(length):
            if j % page == 0:
                table[b, j // page] = order.pop()
            for cache in (k, v):
                cache[table[b, j // page], j % page] = normal(r, kv_heads, D, dtype=torch.float32)
    q = normal(r, batch, kv_heads * group, D, dtype=torch.float32)
    heads = kv_heads * group
    part_o, part_lse = empty(batch, heads, splits, D), empty(batch, heads, splits)
    of_lengths = torch.tensor(lengths, dtype=torch.int32)
    return (q, k, v, table, of_lengths, part_o, part_lse, width, splits, kv_heads, group, scale / math.log(2), page, D,
            16, 16)  # fmt: skip


def _of_far_pages(kernel: Any) -> None:
    """CheckFailed where an address has 32 bits: page 2^23 begins 2^31 elements from the first. The file is empty."""
    if not runtime.INTERPRETED:
        return
    near, case = list(_cache_launch(random.Random(0), (20,), group=1, page=16, splits=1)), "a page 2^31 elements away"
    found = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            far = torch.from_file(f"{folder}/far", shared=True, size=2**31 + 2**13, dtype=torch.float32)
        except (RuntimeError, OSError):
            return  # no room for it here
        given = list(near)
        given[3] = near[3].clone()
        given[3][0, 0], given[3][0, 1] = 2**23, 0
        for i in (1, 2):
            given[i] = far.as_strided((2**23 + 1, 16, 1, 16), (256, 16, 16, 1), 2**12 * (i - 1))
            given[i][2**23], given[i][0] = near[i][near[3][0, 0]], near[i][near[3][0, 1]]
        try:
            for arguments in (near, given):
                arguments[5], arguments[6] = (torch.full_like(x, math.nan) for x in near[5:7])
                with in_bounds(case):
                    kernel[(1,)](*arguments)
                found.append(arguments[5])
            said = "part_o is wrong"
            expect(torch.allclose(found[0], found[1], atol=1e-4), said, diagnosis="offset-overflow", case=case)
        except CheckFailed as failed:
            said = f"{failed.sentence}. Right in a small cache; here offsets reach 2^31: which products have 32 bits?"
            raise CheckFailed(said, diagnosis="offset-overflow", case=case) from None


@kernel_rule(
    "12.9",
    title="The decode kernel, from an empty page", minutes=75, difficulty="Stretch",
    hints=[
        "Begin with one split and pages of one tile: phase 3's loop, with the group's heads as rows. Run the check: it "
        "says which case fails first.",
        "The program's number: split = pid % splits, then kv_head, then batch. Rows r >= group do not exist: mask the "
        "loads of q and all stores.",
        "A share: tiles = cdiv(length, BLOCK_N), per split cdiv(tiles, splits) * BLOCK_N keys. Key j lies in page "
        "table[j // PAGE], row j % PAGE; load the table with the mask j < length, other=0, and make it int64.",
        "A split without keys ends with l_i = 0: divide by 1 there. Scores of keys that are not there are -inf, and "
        "k and v are loaded with other=0.0, because 0 * NaN is NaN.",
        "tl.dot(q, k.T, input_precision='ieee') * scale_log2; lse is (m_i + tl.log2(l_i)) * 0.6931471805599453.",
    ],
    writes="PART_O_ptr, PART_LSE_ptr",
    returns="part_o, part_lse",
    programs=lambda Q_ptr, kv_heads, splits, **_: Q_ptr.shape[0] * kv_heads * splits,
    inputs={
        "1 sequence of 49 keys, 1 split": _cache_launch(_SEEN, (49,), splits=1, scale=0.6),
        "lengths 32 and 70, 2 splits": _cache_launch(_SEEN, (32, 70), kv_heads=2, group=1),
        "2 key heads of 3 heads, 3 splits": _cache_launch(_SEEN, (33, 16), kv_heads=2, group=3, splits=3),
        "pages of 1 key, an empty sequence": _cache_launch(_SEEN, (0, 18), page=1),
        "pages of 32 keys, more splits than tiles": _cache_launch(_SEEN, (40, 3), page=32, group=1, splits=4),
        "1 sequence of 9 keys, 1 split": _cache_launch(_SEEN, (9,), kv_heads=1, group=1, splits=1),
    },
    draw=lambda r: _cache_launch(
        r, tuple(r.randint(0, 40) for _ in range(r.randint(1, 2))), kv_heads=r.randint(1, 2), group=r.randint(1, 4),
        page=r.choice((1, 3, 4, 16)), splits=r.randint(1, 3), spare=r.randint(1, 2)),
    nan={
        "": "what no key has is NaN in this cache: is a key behind the length loaded, or -inf - (-inf) or 0 / 0 "
        "computed where a share is empty?",
    },
    notes={
        "group": "the group's heads are the rows", "splits": "a split has an equal share of the tiles",
        "PAGE": "a page has PAGE keys", "kv_heads": "a page's rows have all key heads side by side",
        "length": "keys from the length on do not exist", "width": "a row of the table has `width` entries",
        "BLOCK_N": "shares are whole tiles",
    },
    tries=100,
    then=_of_far_pages,
)  # fmt: skip
@triton.jit
def part_kernel(
    Q_ptr,  # [batch, heads, HEAD_DIM]
    K_ptr, V_ptr,  # [pages, PAGE, kv_heads, HEAD_DIM]
    TABLE_ptr, LENGTHS_ptr,  # [batch, width]; [batch], int32
    PART_O_ptr, PART_LSE_ptr,  # [batch, heads, splits, HEAD_DIM]; [batch, heads, splits], float32
    width, splits, kv_heads, group, scale_log2,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BEGIN SOLUTION
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(0) // splits % kv_heads
    batch = tl.program_id(0) // splits // kv_heads
    rows, keys, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    head = (batch * kv_heads + kv_head) * group + rows
    real = rows < group
    q = tl.load(Q_ptr + head[:, None] * HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)

    length = tl.load(LENGTHS_ptr + batch)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    first = split * share
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(first, tl.minimum(first + share, length), BLOCK_N):
        key = start + keys
        there = key < length
        page = tl.load(TABLE_ptr + batch * width + key // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + key % PAGE) * kv_heads + kv_head)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(K_ptr + at, mask=there[:, None], other=0.0)
        v = tl.load(V_ptr + at, mask=there[:, None], other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        s = tl.where(there[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        correction = tl.exp2(m_i - m_new)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = tl.dot(p, v, acc * correction[:, None], input_precision="ieee")
        m_i = m_new
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453

    part = head * splits + split
    tl.store(PART_O_ptr + part[:, None] * HEAD_DIM + d[None, :], o, mask=real[:, None])
    tl.store(PART_LSE_ptr + part, lse, mask=real)
    # END SOLUTION


# ---- 12.10 -----------------------------------------------------------------------------------------------------------


def _places(pages: tuple[int, ...], stride_page: int, stride_slot: int, page: int) -> tuple[Any, ...]:
    table = torch.tensor(pages, dtype=torch.int32)
    out = torch.full((16 * -(-len(pages) * page // 16),), 7, dtype=torch.int64)
    return out, table, len(pages) * page, stride_page, stride_slot, page, 16


_FEW_BITS = "the page's number has 32 bits, as the table has: every offset is right up to a multiple of 2^32"


@kernel_rule(
    "12.10",
    title="The cache grew", minutes=15, difficulty="Bug hunt",
    bug=Row("page-overflow", _FEW_BITS, [(").to(tl.int64)\n    slot", ")\n    slot")]),
    history="vllm-project/vllm, pull request 47671 (2026), in its Triton decode kernels; issue 50427 (2026), in "
    "FlexAttention's",
    hints=[
        "Subtract what is stored from what should be stored. Of which number is it a multiple?",
        "2^32. Which factors make the large product, and how many bits has each? What is an entry of the table?",
        "The page's number is loaded from an int32 table: .to(tl.int64) behind the load, before it is multiplied.",
    ],
    writes="OUT_ptr",
    returns="the offset",
    programs=lambda keys, BLOCK, **_: -(-keys // BLOCK),
    inputs={
        "a small cache": _places((2, 0, 1), 512, 32, 16), "pages of 1 key": _places((5, 3, 9, 4), 64, 64, 1),
        "a stride of 276480, pages to 9000": _places((7766, 7767, 9000, 12), 276480, 576, 8),
        "an odd stride": _places((9001, 7), 276481, 576, 8),
        "many pages": _places((163000, 1, 40000), 131072, 1024, 16),
    },
    draw=lambda r: _places(tuple(r.randrange(200_000) for _ in range(r.randint(1, 4))), r.randint(1, 2**19),
                           r.randint(1, 4096), r.choice((1, 3, 16))),
    tol=0.5,
)  # fmt: skip
@triton.jit
def key_offsets_kernel(
    OUT_ptr, TABLE_ptr, keys, stride_page, stride_slot, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    #: Repaired: 64 bits before it is multiplied.
    page = tl.load(TABLE_ptr + key // PAGE, mask=key < keys, other=0).to(tl.int64)
    slot = key % PAGE
    tl.store(OUT_ptr + key, page * stride_page + slot * stride_slot, mask=key < keys)


# ---- 12.11 -----------------------------------------------------------------------------------------------------------


def _padded(r: random.Random, splits: int, queries: tuple[int, ...]) -> tuple[Any, ...]:
    """Parts of sequences of some numbers of queries, padded to the most; where each sequence begins in o."""
    most = max(queries)
    os, lses = 1 + normal(r, splits, len(queries), most, 3), normal(r, splits, len(queries), most)
    return os, lses, [0, *itertools.accumulate(queries)]


def _row_told(learners: Callable[..., Any]) -> tuple[str, str] | None:
    """Whose query stands in the first row of o that is wrong: with one part, of numbers that say where they are."""
    queries = 2, 1, 3
    parts = torch.arange(9.0).reshape(1, 3, 3, 1).expand(1, 3, 3, 3).clone()
    starts = [0, *itertools.accumulate(queries)]
    got, right = (fn(parts, torch.zeros(1, 3, 3), starts)[:, 0].tolist() for fn in (learners, hunted_merge))
    for row, (mine, wanted) in enumerate(zip(got, right, strict=False)):
        if mine != wanted:
            known = mine == mine and mine in range(9)
            here = f"has query {int(mine) % 3} of sequence {int(mine) // 3}" if known else "was never written"
            where = f"query {int(wanted) % 3} of sequence {int(wanted) // 3}"
            return "a-row", f"with 2, 1 and 3 queries row {row} of o {here}, and is for {where}"
    return None


@tensor_rule(
    "12.11",
    title="A single one is always right", minutes=20, difficulty="Bug hunt",
    bug=Row("all-on-the-first", "every sequence is written from row 0 on: the last one stays there, and later rows are "
            "never written",
            [(": torch.Tensor, part_lse: torch.Tensor, starts: list[int]) -> torch.Tensor", ", part_lse, starts)"),
             ("row_stride = o.stride(0)", "sequence_stride = o.stride(0) if o.ndim == 3 else 0"),
             ("starts[b] * row_stride", "b * sequence_stride")]),
    history="pytorch/pytorch, issue 194167 (2026): with split keys, a stride that was left at 0 let every sequence "
    "write over the first; also Dao-AILab/flash-attention, pull requests 2542 and 2812",
    hints=[
        "With one sequence all is right. With several, which rows have a number in them, and whose is it?",
        "NaN is what o held before: those rows were never written. So where did the later sequences write?",
        "o is packed: it has no axis of sequences, and a stride of 0 for it. Sequence b begins at row starts[b].",
    ],
    returns="o",
    symptom=_row_told,
    inputs={
        "1 sequence": _padded(_SEEN, 2, (3,)), "2 sequences of 1 query": _padded(_SEEN, 2, (1, 1)),
        "4 sequences of 1 query": _padded(_SEEN, 3, (1, 1, 1, 1)), "queries 2, 1, 3": _padded(_SEEN, 2, (2, 1, 3)),
        "queries 1, 0, 2": _padded(_SEEN, 4, (1, 0, 2)),
    },
    draw=lambda r: _padded(r, r.randint(1, 4), tuple(r.randint(0, 3) for _ in range(r.randint(1, 4))) + (1,)),
    notes={
        "starts[b]": "sequence b begins at row starts[b]", "row_stride": "rows are `row_stride` elements apart",
        "weight": "a part counts with its share of the sum", "rows": "a sequence has so many rows",
    },
    rows=[
        *(Row("one-row-each", f"sequence b is written {said}: it begins at row starts[b]",
              [("starts[b] * row_stride", first)])
          for said, first in (
              ("from row b on, which is right where each has one query", "b * row_stride"),
              ("from row b * queries on, as if all had the most queries", "b * queries * head_dim"),
              ("from row b times its own queries on", "b * rows * head_dim"),
              ("from element starts[b] on", "starts[b]"))),
        Row("plain-mean", "all splits count the same: a split's share is its exp(lse) of the sum of all",
            [("(weight[:, :, None] * part_o[:, b, :rows]).sum(dim=0)", "part_o[:, b, :rows].mean(dim=0)")]),
        Row("not-divided", "the splits' shares do not sum to 1: of exp(lse) each has its part of the sum",
            [("torch.softmax(part_lse[:, b, :rows], dim=0)", "torch.exp(part_lse[:, b, :rows])")]),
    ],
)  # fmt: skip
def hunted_merge(part_o: torch.Tensor, part_lse: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """o [rows, D] of all sequences, packed: sequence b has rows starts[b] to starts[b + 1] - 1.

    part_o: [splits, batch, queries, D], part_lse: [splits, batch, queries], padded to the most queries.
    """
    _, batch, queries, head_dim = part_o.shape
    o = torch.full((starts[-1], head_dim), float("nan"), dtype=part_o.dtype)  # whatever was in memory
    row_stride = o.stride(0)
    for b in range(batch):
        rows = starts[b + 1] - starts[b]
        weight = torch.softmax(part_lse[:, b, :rows], dim=0)
        merged = (weight[:, :, None] * part_o[:, b, :rows]).sum(dim=0)
        first = starts[b] * row_stride  #: repaired: o has no axis of sequences
        o.view(-1)[first : first + merged.numel()] = merged.flatten()
    return o
