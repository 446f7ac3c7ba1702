"""Phase 8's measurements and figures: what the emulator counts for a step of the series; pictures of banks and copies.

r = counted("p8_4_swizzle")                 # a Report of the check build, one head, N = 256, compared with float64
bank_map(ax, addresses("p8_3_stages"))      # which banks the eight rows of one ldmatrix tile ask for
timeline(ax, events(2))                     # which copies are under way while a tile is worked on
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference
from flashlab.cuda import load_inline
from flashlab.figures import show
from flashlab.kernels import regions
from flashlab.kernels.series import step
from flashlab.simt import Report

BANKS = 32
SHARED = ("shared_load", "shared_store", "ldmatrix", "stmatrix")


# ---- counts ----------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=128)
def counted(
    name: str, *, n: int = 256, head_dim: int = 64, heads: int = 1, causal: bool = False, sms: int = 1, **defines: int
) -> Report:
    """Runs a step's check build on [1, heads, n, head_dim] in fp16; the report has the counters.

    Args:
        name: of a step of flashlab.kernels.SERIES.
        sms: multiprocessors that the kernel is told of. With 1 the last steps take the tiles of a large grid.
        defines: macros of the step.

    Raises:
        AssertionError: the result is not that of the oracle, or the emulator found something.
    """
    module = load_inline(step(name), check=True, head_dim=head_dim, defines=defines)
    return _run(module, n, head_dim, heads, causal, sms)


def _run(module: Any, n: int, head_dim: int, heads: int, causal: bool, sms: int) -> Report:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, head_dim, generator=generator).half() for _ in range(3))
    o, lse = module.forward(q, k, v, causal=causal, sms=sms, echo=False)
    report = module.report
    want, want_lse = reference.attention(q, k, v, causal=causal)
    assert report.ok, report
    assert (o - want).abs().max() < 2e-3 and (lse - want_lse).abs().max() < 1e-4
    return report


def prepare(names: Iterable[str]) -> None:
    """Compiles the steps' check builds, two at a time; ``counted`` then finds them in the cache."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: load_inline(step(name), check=True), names))


def wavefronts(report: Report) -> int:
    """Passes through shared memory, of loads, stores and ldmatrix together."""
    return sum(report.counters[f"{kind}_wavefronts"] for kind in SHARED)


COLUMNS = ["step", "mma", "ldmatrix", "shared wavefronts", "conflicts", "barriers", "copies", "sectors read", "stores"]


def row(name: str, **options: Any) -> list[Any]:
    """A step's row of the growing table, under COLUMNS.

    copies: instructions that bring something from global memory, a warp's; stores: a warp's, to global memory.
    """
    r = counted(name, **options)
    c = r.counters
    label = " ".join([name, *(f"{k}={v}" for k, v in options.items() if k.isupper())])
    copies, sectors = c["global_loads"] + c["cp_async"], c["global_load_sectors"] + c["cp_async_sectors"]
    instructions = [c["mma"], c["ldmatrix"], wavefronts(r), c.bank_conflicts, c["barriers"]]
    return [label, *instructions, copies, sectors, c["global_stores"]]


def grow(table: list[list[Any]], name: str, **options: Any) -> None:
    """Adds a step's row to the table, and shows it under the row before."""
    table.append(row(name, **options))
    show.table(table[-2:], COLUMNS)


# ---- looking inside: a print statement in a copy of the source -------------------------------------------------------
def printed(name: str, *edits: tuple[str, str], n: int = 256, causal: bool = False, **defines: int) -> str:
    """What a step prints when each (region, statement) of ``edits`` puts a statement where that region begins.

    Raises KeyError: the source has no such region; the message has the names there are.
    """
    text = step(name).path.read_text()
    for region, statement in edits:
        first, _ = regions.numbered(text, region)[0]
        lines = text.splitlines(keepends=True)
        text = "".join([*lines[: first - 1], f"{statement}\n", *lines[first - 1 :]])
    module = load_inline(text, backend="emulator", defines=defines)
    return _run(module, n, 64, 1, causal, 1).printed


@functools.lru_cache(maxsize=8)
def addresses(name: str) -> tuple[int, ...]:
    """Byte addresses that lanes 0 to 7 give to the first ldmatrix of K, from the tile's start: one 8 x 8 tile."""
    said = printed(name, ("scores", 'if (blockIdx.x == 0 && warp == 0 && j == 0 && lane < 8) '
                                    'printf("%d %d\\n", lane, at(lane % 8, lane / 8 % 2 * 8));'))  # fmt: skip
    pairs = dict(tuple(map(int, line.split())) for line in said.splitlines())
    return tuple(pairs[lane] for lane in range(8))


@functools.lru_cache(maxsize=8)
def events(stages: int, n: int = 256) -> tuple[tuple[str, int], ...]:
    """What thread 0 of block 0 of p8_3_stages does, in order: ("copy", tile), ("arrived", tile), ("done", tile)."""
    one = "if (blockIdx.x == 0 && threadIdx.x == 0) "
    said = printed(
        "p8_3_stages",
        ("copy K and V", one + 'printf("copy %d\\n", j);'),
        ("one tile", one + 'printf("arrived %d\\n", j);'),
        ("output", one + 'printf("done %d\\n", j);'),
        n=n,
        STAGES=stages,
    )
    return tuple((what, int(tile)) for what, tile in (line.split() for line in said.splitlines()))


def rescales(name: str, n: int = 256) -> tuple[int, int]:
    """How often a warp of this step rescales its accumulator, and how many tiles the warps work on together."""
    where = "correction" if "correction" in regions.regions(step(name).path.read_text()) else "rescale"
    said = printed(name, (where, 'if (lane == 0) printf("r\\n");'), n=n)
    return len(re.findall("r", said)), n // 64 * (n // 64) * 4


# ---- pictures --------------------------------------------------------------------------------------------------------
def bank_map(ax: plt.Axes, rows: Sequence[int], title: str) -> int:
    """Draws which banks eight rows of 16 bytes ask for; returns the wavefronts they need.

    One line a row, one column a bank. Blue: asked for once; red: by several rows, which have to wait for each other.
    """
    asked = [[(address + 4 * i) // 4 % BANKS for i in range(4)] for address in rows]
    times = [sum(bank in banks for banks in asked) for bank in range(BANKS)]
    for line, banks in enumerate(asked):
        for bank in range(BANKS):
            here = bank in banks
            color = show.COLORS["light"] if not here else show.COLORS["red" if times[bank] > 1 else "blue"]
            ax.add_patch(plt.Rectangle((bank, line), 0.92, 0.86, color=color))
        ax.text(banks[0] + 2, line + 0.46, f"row {line}", ha="center", va="center", color="white", fontsize=7)
    ax.set(xlim=(0, BANKS), ylim=(8, 0), xlabel="bank (4 bytes each)", ylabel="row (lane 0 to 7)", title=title)
    ax.set_xticks([x + 0.46 for x in range(0, BANKS, 4)], [str(x) for x in range(0, BANKS, 4)])
    ax.set_yticks([y + 0.43 for y in range(8)], [str(y) for y in range(8)])
    ax.grid(False)
    return max(times)


def timeline(ax: plt.Axes, order: Sequence[tuple[str, int]], title: str) -> list[int]:
    """Draws copies (from their issue to their wait) and work (from then to its end) over the order of the events.

    Returns, for each tile, how many copies are under way while it is worked on.
    """
    at: dict[tuple[str, int], int] = {}
    for i, event in enumerate(order):
        at.setdefault(event, i)
    tiles = sorted({tile for what, tile in order if what == "done"})
    overlapping = []
    for tile in tiles:
        begin, arrived, done = at["copy", tile], at["arrived", tile], at["done", tile]
        ax.barh(tile, arrived - begin, left=begin, height=-0.34, align="edge", color=show.COLORS["orange"],
                label="copy under way" if tile == 0 else None)  # fmt: skip
        ax.barh(tile, done - arrived, left=arrived, height=0.34, align="edge", color=show.COLORS["blue"],
                label="tile worked on" if tile == 0 else None)  # fmt: skip
        under_way = [t for t in tiles if at["copy", t] < done and at["arrived", t] > arrived]
        overlapping.append(len(under_way))
    ax.set(yticks=tiles, yticklabels=[f"tile {t}" for t in tiles], xlabel="events of thread 0, in order", title=title)
    ax.set_xticks(range(0, len(order) + 1, 2))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return overlapping


def ladder_figure(run: dict[str, Any], shape: Sequence[int], causal: bool) -> plt.Figure | None:
    """Bars of TFLOP/s by step from a recorded run (flashlab.bench.mma), FlashAttention-2 as a line.

    None, where the run has nothing at this shape.
    """
    rows = [r for r in run.get("ladder", []) if r["shape"] == list(shape) and r["causal"] == causal]
    peer = next((r for r in rows if r["name"] == "fa2"), None)
    rows = [r for r in rows if r["name"] != "fa2" and "=" not in r["name"]]
    if not rows or peer is None:
        return None
    figure, ax = plt.subplots(figsize=(7.8, 4.6))
    y = range(len(rows))
    ax.barh(y, [r["tflops"] for r in rows], color=show.COLORS["blue"])
    spread = [[flops(r, "slowest") for r in rows], [flops(r, "fastest") for r in rows]]
    errors = [[max(0.0, r["tflops"] - s) for r, s in zip(rows, spread[0], strict=True)],
              [max(0.0, s - r["tflops"]) for r, s in zip(rows, spread[1], strict=True)]]  # fmt: skip
    speeds = [r["tflops"] for r in rows]
    ax.errorbar(speeds, list(y), xerr=errors, fmt="none", ecolor=show.COLORS["black"], elinewidth=1)
    top = max(r["tflops"] for r in [*rows, peer])
    for i, r in enumerate(rows):
        inside = r["tflops"] > 0.3 * top
        ax.text((0 if inside else r["tflops"]) + 0.02 * top, i, f"{r['tflops']:.0f}  ({r['vs_fa2']:.2f})", va="center",
                color="white" if inside else "black", fontsize=8)  # fmt: skip
    ax.axvline(peer["tflops"], color=show.COLORS["orange"], label=f"FlashAttention-2: {peer['tflops']:.0f}")
    ax.set_yticks(list(y), [r["name"] for r in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.08 * top)
    b, h, n, d = shape
    ax.set(xlabel="TFLOP/s (in brackets: of FlashAttention-2)",
           title=f"B {b}, H {h}, N {n}, D {d}{', causal' if causal else ''}: {run['machine']['gpu']}")  # fmt: skip
    ax.legend(loc="upper right", bbox_to_anchor=(0.77, 1.0))
    return figure


def gains(run: dict[str, Any], shape: Sequence[int], causal: bool) -> dict[str, float]:
    """Of a recorded run: each step's speed over the step's before, by name; {} where the run has not this shape."""
    rows = [r for r in run.get("ladder", []) if r["shape"] == list(shape) and r["causal"] == causal]
    rows = [r for r in rows if r["name"] != "fa2" and "=" not in r["name"]]
    return {b["name"]: b["tflops"] / a["tflops"] for a, b in zip(rows, rows[1:], strict=False)}


def flops(r: dict[str, Any], which: str) -> float:
    """A recorded row's TFLOP/s in its fastest or slowest round."""
    return r["tflops"] * r["ms"] / r[which] if r.get(which) else r["tflops"]
