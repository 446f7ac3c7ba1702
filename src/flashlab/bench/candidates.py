"""Phase 5's backward pass with other tiles and other texts: which is the fastest, and by how much?

    flashlab bench candidates                       # recorded/candidates_<gpu>.json beside this file
    flashlab bench candidates --quick               # one head size; what is found is the same in kind

For each head_dim, causal or not, bf16: first every tile of TILES in the kernels as they are, one kernel at a time; then
the best LEFT of them in every text of TEXTS, which is the kernels' own with one thing changed. What wins in dkdv and
what wins in dq is put together, compared with float64, and takes turns with today's kernels and FlashAttention-2 at
every length of LENGTHS: `factor` is how many times as fast as today's it is. Nothing is chosen by this bench: a text
that pays goes into flashlab.attention.triton_backward, a tile into tiles.json.

`input_precision` is no candidate: 16-bit products have one. Nor is dq in dkdv's kernel, by atomics: the same bits each
time are promised.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashlab.attention import tiles, triton_backward, triton_forward
from flashlab.attention.triton_backward import Tiles
from flashlab.bench import harness, industrial, peers
from flashlab.bench.harness import Row, Way
from flashlab.check.training import wanted, worst
from flashlab.runtime import cache
from flashlab.table import Table

LENGTHS, TUNED_AT, LEFT = (4096, 1024, 16384), 4096, 3
FA2 = "FlashAttention-2"
TILES = {
    "dkdv": tiles._product((32, 64, 128), (64, 128), (2, 3)),
    "dq": tiles._product((64, 128), (32, 64, 128), (2, 3)),
}
Edits = tuple[tuple[str, str], ...]
_Q = "q = load_tile(q_tile, offs_m, offs_d, edges[3], HEAD_DIM, BLOCK_D, CUT)"
_DO = "do = load_tile(do_tile, offs_m, offs_d, edges[3], HEAD_DIM, BLOCK_D, CUT)"
_HEAD = "        for CUT in tl.static_range(2):"
_KEY = "k = load_tile(k_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)"
_VALUE = "v = load_tile(v_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)"
_WALK = "    for part in tl.static_range(3):\n        for start_n in tl.range(edges[part], edges[part + 1], BLOCK_N):\n"
_DP_T = "                dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # computed while the exponentials are\n"
_DV = "                dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)\n"
_P = "            p = tl.exp2(s * scale_log2 - lse[:, None])\n"
_DP = "            dp = tl.dot(do, v.T, input_precision=PRECISION)\n"


def _box(name: str, tensor: str, head: str, rows: str, stride: str, block: str, indent: int) -> str:
    place = f"{tensor}_ptr + batch * stride_{stride}b + {head} * stride_{stride}h"
    shape = f"[{rows}, HEAD_DIM], [stride_{stride}{rows.lower()}, 1], [{block}, BLOCK_D]"
    return f"{' ' * indent}{name} = tl.make_tensor_descriptor({place}, {shape})\n"


TEXTS: dict[str, dict[str, Edits]] = {
    "dkdv": {
        "cut tiles pipelined too": (("num_stages=1 if CUT else None", "num_stages=None"),),
        "descriptors": (
            (_HEAD, _box("q_box", "Q", "head", "M", "q", "BLOCK_M", 8)
             + _box("do_box", "DO", "head", "M", "do", "BLOCK_M", 8) + _HEAD),
            (_Q, f"if CUT:\n                    {_Q}\n                else:\n"
                 "                    q = q_box.load([start_m, 0])"),
            (_DO, f"if CUT:\n                    {_DO}\n                else:\n"
                  "                    do = do_box.load([start_m, 0])"),
        ),
        "dV before dP": ((_DP_T, ""), (_DV, _DV + _DP_T)),
    },
    "dq": {
        "cut tiles not pipelined": (
            (_WALK, _WALK.replace("BLOCK_N):", "BLOCK_N, num_stages=None if part == 1 else 1):")),
        ),
        "descriptors": (
            (_WALK, _box("k_box", "K", "kv_head", "N", "k", "BLOCK_N", 4)
             + _box("v_box", "V", "kv_head", "N", "v", "BLOCK_N", 4) + _WALK),
            (_KEY, f"if part != 1:\n                {_KEY}\n            else:\n"
                   "                k = k_box.load([start_n, 0])"),
            (_VALUE, f"if part != 1:\n                {_VALUE}\n            else:\n"
                     "                v = v_box.load([start_n, 0])"),
        ),
        "dP before P": ((_P, ""), (_DP, _DP + _P)),
        "one loop, every tile masked": ((_WALK, _WALK.replace("static_range(3)", "static_range(1)")
                                         .replace("edges[part], edges[part + 1]", "edges[0], edges[3]")),),
    },
}  # fmt: skip
"""By kernel: pieces of triton_backward.py, each of which stands there once, and what takes their place."""
AS_IT_IS = "as it is"


@functools.cache
def module(dkdv: str = AS_IT_IS, dq: str = AS_IT_IS) -> ModuleType:
    """flashlab.attention.triton_backward with these texts. Raises ValueError where a piece is not there once."""
    if (dkdv, dq) == (AS_IT_IS, AS_IT_IS):
        return triton_backward
    text = Path(str(triton_backward.__file__)).read_text(encoding="utf-8")
    for old, new in (*TEXTS["dkdv"].get(dkdv, ()), *TEXTS["dq"].get(dq, ())):
        if text.count(old) != 1:
            raise ValueError(f"triton_backward.py has {text.count(old)} times: {old.strip()}")
        text = text.replace(old, new)
    key = cache.key("triton_backward", text)

    def write(place: Path) -> dict[str, Any]:
        (place / "edited.py").write_text(text, encoding="utf-8")
        return {}

    spec = importlib.util.spec_from_file_location(
        f"triton_backward_{key[:12]}", cache.kept("texts", key, write).folder / "edited.py"
    )
    assert spec is not None and spec.loader is not None, "a file that was written just now"
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


# ---- what is measured ------------------------------------------------------------------------------------------------
def jobs() -> list[Row]:
    return [{"part": "candidates", "head_dim": d, "causal": c} for d in (128, 64, 256) for c in (True, False)]


@functools.lru_cache(2)
def given(length: int, head_dim: int, causal: bool) -> tuple[torch.Tensor, ...]:
    """grad_o, q, k, v, o and lse, as all candidates take them."""
    q, k, v, grad_o = industrial.make([max(1, 16384 // length), 2048 // head_dim, length, head_dim])
    return grad_o, q, k, v, *triton_forward.flash_attention_forward(q, k, v, causal=causal)


def way(job: Row, length: int, texts: dict[str, str], chosen: Mapping[str, Sequence[int]]) -> Way:
    """The backward pass by these texts, and these tiles where one is given."""
    causal = job["causal"]
    inputs = given(length, job["head_dim"], causal)
    if "descriptors" in texts.values():
        triton_forward.check_boxes(**dict(zip(("grad_o", "q", "k", "v"), inputs, strict=False)))
    both: dict[str, Any] = {name: tiles.Tile(*chosen[name]) if name in chosen else None for name in TILES}
    run = module(**texts).flash_attention_backward
    return functools.partial(run, *inputs, causal=causal, tiles=Tiles(**both), concurrent=False)


def compile_one(job: Row, texts: dict[str, str], chosen: Mapping[str, Sequence[int]]) -> None:
    """In a process of its own: into the cache on disk."""
    way(job, 512, texts, chosen)()
    torch.cuda.synchronize()


@functools.cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn"))


Candidate = tuple[str, str, tuple[int, ...]]  # kernel, text, tile


def _first(job: Row) -> list[Candidate]:
    return [
        (kernel, AS_IT_IS, tuple(tile))
        for kernel in TILES
        for tile in tiles.search(kernel, job["head_dim"], among=TILES[kernel])
    ]


def _arguments(candidate: Candidate) -> tuple[dict[str, str], dict[str, Sequence[int]]]:
    kernel, text, tile = candidate
    return {kernel: text}, {kernel: tile}


def _compile(tasks: Sequence[tuple[Row, Candidate]], seconds: float = 120.0) -> None:
    try:
        wait([_pool().submit(compile_one, job, *_arguments(c)) for job, c in tasks], timeout=seconds)
    except BrokenExecutor:  # a worker crashed with the compiler: what is left is compiled when it is measured
        _pool.cache_clear()


def prepare(todo: Sequence[Row], until: float, **options: Any) -> None:
    del until, options
    _compile([(job, candidate) for job in todo for candidate in _first(job)])


def _timed(job: Row, candidates: Sequence[Candidate]) -> dict[Candidate, Row]:
    """A row for each that can be launched."""
    named = {repr(c): c for c in candidates}
    ways = {name: way(job, TUNED_AT, *_arguments(c)) for name, c in named.items()}
    found, _ = harness.times_of(ways, rounds=3)
    return {named[name]: row for name, row in found.items()}


def best(found: dict[Candidate, Row], kernel: str, most: int = 1) -> list[Candidate]:
    """The fastest of a kernel, the fastest first."""
    return sorted((c for c in found if c[0] == kernel), key=lambda c: found[c]["ms"])[:most]


def off(job: Row, texts: dict[str, str], chosen: Mapping[str, Sequence[int]]) -> float:
    """The largest error of a gradient as a part of its bound: 300 queries and keys, groups of two heads."""
    q, _, _, grad_o = industrial.make([1, 4, 300, job["head_dim"]])
    _, k, v, _ = industrial.make([1, 2, 300, job["head_dim"]])
    o, lse = triton_forward.flash_attention_forward(q, k, v, causal=job["causal"])
    both = Tiles(**{name: tiles.Tile(*tile) for name, tile in chosen.items()})
    run = module(**texts).flash_attention_backward
    found = run(grad_o, q, k, v, o, lse, causal=job["causal"], tiles=both)
    named = dict(zip(("dq", "dk", "dv"), found, strict=True))
    return worst(wanted(q, k, v, grad_o, causal=job["causal"]), **named)[1]


def measure(job: Row) -> list[Row]:
    """A row for each candidate, and of what won a row for each length."""
    found = _timed(job, _first(job))
    left = [c for kernel in TILES for c in best(found, kernel, LEFT)]
    more = [(kernel, text, tile) for kernel, _, tile in left for text in TEXTS[kernel]]
    _compile([(job, candidate) for candidate in more])
    found |= _timed(job, more)
    rows = [
        job | {"name": f"{kernel}, {text}", "tile": list(tile)} | row for (kernel, text, tile), row in found.items()
    ]
    won = {kernel: best(found, kernel)[0] for kernel in TILES}
    texts, chosen = {k: c[1] for k, c in won.items()}, {k: c[2] for k, c in won.items()}
    error, causal = off(job, texts, chosen), job["causal"]
    about = {"texts": texts, "tiles": {kernel: list(tile) for kernel, tile in chosen.items()}}
    for length in LENGTHS:
        grad_o, q, k, v = (x.detach().requires_grad_() for x in given(length, job["head_dim"], causal)[:4])
        fa2: dict[str, Way] = {FA2: peers.sdpa("FLASH_ATTENTION", q, k, v, causal)}
        ways = {"today": way(job, length, {}, {}), "best": way(job, length, texts, chosen)}
        times, _ = harness.times_of(ways | industrial.passes("backward", fa2, (q, k, v), grad_o.detach()))
        for name, row in times.items():
            more_of_it = {"factor": times["today"]["ms"] / row["ms"]} if "today" in times else {}
            if name == "best":
                more_of_it |= {"of_bound": error if math.isfinite(error) else None}
            rows.append(job | {"name": name, "length": length} | about | row | more_of_it)
    return rows


def table(data: Row) -> Table:
    """What won, and how many times as fast as today's kernels, and as FlashAttention-2, it is at each length."""
    ends = [r for r in data["rows"] if "length" in r]
    cells = []
    for r in (r for r in ends if r["name"] == "best"):
        at = {x["name"]: x["ms"] for x in ends if all(x[key] == r[key] for key in ("head_dim", "causal", "length"))}
        won = [f"{r['texts'][kernel]} {tuple(r['tiles'][kernel])}" for kernel in TILES]
        over = f"{at[FA2] / r['ms']:.2f}" if FA2 in at else ""
        cells.append([r["head_dim"], "causal" if r["causal"] else "", r["length"], *won, f"{r['factor']:.3f}", over,
                      "" if (r["of_bound"] or math.inf) <= 1 else "wrong"])  # fmt: skip
    columns = ["D", "", "N", "dkdv (M, N, warps, stages)", "dq", "/ today", f"/ {FA2}", ""]
    return Table.of(cells, columns, align="rlrllrrl", caption=f"{data['machine']['gpu']}, backward, bf16")


BENCH = harness.Bench(
    "candidates", __doc__, jobs=jobs, measure=measure, table=table,
    keys=("head_dim", "causal", "name", "tile", "length"),
    quick=lambda: jobs()[:1], needs=harness.gpu_for("these are"), facts={"dtype": "bfloat16"}, prepare=prepare,
    minutes=8.0,
)  # fmt: skip
main = BENCH.main
