"""What phase 11 shows: a tile as it lies in shared memory, and the counts of a step.

chunks(ax, held, "128-byte swizzle")
show.table([row("p11_1_tma")], COLUMNS)
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashlab.figures.ladder import counted, wavefronts
from flashlab.figures.show import COLORS

__all__ = ["COLUMNS", "chunks", "row"]

COLUMNS = [
    "step", "mma", "wgmma", "ldmatrix", "wavefronts", "KB read by wgmma", "copies", "KB by TMA", "barriers", "waits", "stores",
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
