"""What phase 11 shows: a tile as it lies in shared memory, the counts of a step, and who works when.

chunks(ax, held, "128-byte swizzle")
show.table([row("p11_1_tma")], COLUMNS)
timelines({"turns": replayed("p11_7_ping_pong")}, clocks=(2000, 6000))
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flashlab.cuda import load_inline
from flashlab.figures.ladder import counted, wavefronts
from flashlab.figures.show import COLORS
from flashlab.kernels.regions import numbered
from flashlab.kernels.series import step
from flashlab.simt.replay import Replay, replay

__all__ = ["COLUMNS", "chunks", "replayed", "row", "timelines"]

COLUMNS = [
    "step", "mma", "wgmma", "ldmatrix", "wavefronts", "KB read by wgmma", "copies", "KB by TMA", "barriers", "waits",
    "stores",
]  # fmt: skip


def row(name: str, **options: Any) -> list[Any]:
    """A step's counts under COLUMNS: one head of 384 queries and keys, unless the options (of `counted`) say otherwise.

    mma, ldmatrix, copies (loads from global memory and cp.async), stores (to global memory, TMA's too) and waits (at
    mbarriers) count once per warp, wgmma per warpgroup, barriers per block.
    """
    r = counted(name, **({"n": 384} | options))
    c = r.counters
    copies, stores = c["global_loads"] + c["cp_async"], c["global_stores"] + c["tma_stores"]
    reads = [c["ldmatrix"], wavefronts(r), c["wgmma_bytes"] // 1024]
    waits = [c["barriers"], c["mbarrier_waits"]]
    return [name, c["mma"], c["wgmma"], *reads, copies, c["tma_load_bytes"] // 1024, *waits, stores]


_HUES = [COLORS[name] for name in ("blue", "orange", "green", "red", "purple", "sky", "yellow", "grey")]


def chunks(ax: Axes, held: torch.Tensor, title: str, *, row_chunks: int = 8) -> None:
    """Draws lines of 128 bytes of shared memory, eight chunks of 16 bytes each.

    Args:
        held: [lines, 8], the number of the chunk that lies there: row of the tile * row_chunks + chunk of the row.
        row_chunks: chunks per row of the tile; the colour says which.
    """
    for line, places in enumerate(held.tolist()):
        for place, number in enumerate(places):
            row, chunk = divmod(number, row_chunks)
            ax.add_patch(Rectangle((place, line), 0.94, 0.9, color=_HUES[chunk % len(_HUES)], alpha=0.55, lw=0))
            ax.text(place + 0.47, line + 0.45, f"{row}·{chunk}", ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, 8), ylim=(len(held), 0), xlabel="place in the line, 16 bytes each", ylabel="line of 128 bytes")
    ax.set_title(title)
    ax.set_xticks([x + 0.47 for x in range(8)], [str(x) for x in range(8)])
    ax.set_yticks([y + 0.45 for y in range(len(held))], [str(y) for y in range(len(held))])
    ax.grid(False)


# ---- who works when --------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=16)
def replayed(name: str, *, head_dim: int = 64, keys: int = 1024) -> Replay:
    """One block of a step of phase 11, from p11_2_wgmma on, under the model of clocks of flashlab.simt.replay.

    One head; as many queries as the block has rows.
    """
    module = load_inline(step(name), check=True, head_dim=head_dim)
    q, k, v = (torch.zeros(1, 1, n, head_dim, dtype=torch.half) for n in (1, keys, keys))
    module.forward(q, k, v, causal=False, sms=1, echo=False, timeline=1)
    text = step(name).path.read_text(encoding="utf-8")
    return replay(module.report.launches[0], [line for line, _ in numbered(text, "scores")])


_GROUP_HUES = [COLORS[name] for name in ("blue", "orange", "green", "purple")]


def timelines(plots: Mapping[str, Replay], *, clocks: tuple[float, float]) -> Figure:
    """One panel for each: the copies, the tensor cores, and each warpgroup that multiplies, over the model's clocks.

    A consumer has its colour on every line: paler on the tensor cores for the scores, full for the output. Where a
    consumer's line has none, it waits or has nothing to do.
    """
    sizes = [2 + len(_consumers(found)) for found in plots.values()]
    figure, axes = plt.subplots(
        len(plots), 1, figsize=(9, 0.9 * len(plots) + 0.27 * sum(sizes)), sharex=True, squeeze=False,
        height_ratios=sizes, layout="constrained",
    )  # fmt: skip
    for ax, (title, found) in zip(axes.flat, plots.items(), strict=True):
        consumers = _consumers(found)
        for s in found.spans:
            hue = _GROUP_HUES[consumers.index(s.group) % len(_GROUP_HUES)] if s.group in consumers else COLORS["grey"]
            bar = {"left": s.begin, "width": s.end - s.begin, "height": 0.8, "edgecolor": "white", "linewidth": 0.4}
            if s.what == "copy":
                ax.barh(0, **bar, color=COLORS["grey"], alpha=0.5)
            elif s.what in ("scores", "output"):
                ax.barh(1, **bar, color=hue, alpha=0.45 if s.what == "scores" else 1.0)
            elif s.what == "exponentials":
                ax.barh(2 + consumers.index(s.group), **bar, color=hue)
        lines = ["copies", "tensor cores", *(f"consumer {i}" for i in range(len(consumers)))]
        ax.set(yticks=range(len(lines)), yticklabels=lines, xlim=clocks)
        ax.set_title(title, fontsize=10)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("clocks of the model")
    black = COLORS["black"]
    keys = [Patch(color=black, alpha=0.4, label="tensor cores: S = Q K^T"), Patch(color=black, label="O += P V"),
            Patch(color=black, alpha=0.75, label="consumers: exponentials (blank: waits)")]  # fmt: skip
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _consumers(found: Replay) -> list[int]:
    return sorted({s.group for s in found.of("scores")})
