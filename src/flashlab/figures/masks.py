"""Which program computes what, and which tiles of a mask it visits.

tile_map(ax, seen, walks, BLOCK_M, title)   a mask, and the tiles that a run visited: masked, whole, or never loaded
programs(ax, found, title)                  programs by the head and the rows that they computed
"""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from flashlab.figures.show import COLORS

_KINDS = {"whole, no mask": "sky", "masked": "orange", "never loaded": "light"}
_HEADS = ("sky", "orange", "green", "purple", "yellow", "grey")


def tile_map(
    ax: Axes, seen: torch.Tensor, walks: Sequence[Sequence[tuple[int, int, bool]]], BLOCK_M: int, title: str,
    *, legend: bool = False, order: bool = False,
) -> None:  # fmt: skip
    """Draws each visited tile in the colour of its kind, and a dot for each pair of query and key that is seen.

    seen: boolean [queries, keys]. walks: for each block of BLOCK_M queries the tiles that it visits, (first key, end,
    is masked). order: number the tiles of a block in the order of its walk.
    """
    rows, keys = seen.shape
    ax.add_patch(Rectangle((-0.5, -0.5), keys, rows, facecolor=COLORS["light"], edgecolor="none"))
    for block, walk in enumerate(walks):
        top = block * BLOCK_M
        for number, (start, end, masked) in enumerate(walk, 1):
            size = (end - start, min(BLOCK_M, rows - top))
            hue = COLORS["orange" if masked else "sky"]
            ax.add_patch(Rectangle((start - 0.5, top - 0.5), *size, facecolor=hue, edgecolor="white", linewidth=1.2))
            if order:
                middle = (start + size[0] / 2 - 0.5, top + size[1] / 2 - 0.5)
                box = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                ax.text(*middle, str(number), ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    i, j = seen.nonzero(as_tuple=True)
    ax.plot(j, i, ".", color="black", markersize=2.2)
    ax.set(xlim=(-0.5, keys - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal", xlabel="key", ylabel="query", title=title)
    ax.grid(visible=False)
    if legend:
        handles = [Patch(facecolor=COLORS[color], label=kind) for kind, color in _KINDS.items()]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8)


def programs(ax: Axes, found: Sequence[tuple[int, int, int, int]], title: str) -> None:
    """A box for each program with its number: a line for each head of each batch, coloured by the K/V head it reads.
    found: by program number (batch, head, key head, block of queries)."""
    lines = sorted({(batch, head) for batch, head, _, _ in found})
    for number, (batch, head, kv_head, block) in enumerate(found):
        y = lines.index((batch, head))
        hue = COLORS[_HEADS[kv_head % len(_HEADS)]]
        ax.add_patch(Rectangle((block - 0.46, y - 0.42), 0.92, 0.84, facecolor=hue, edgecolor="none"))
        ax.text(block, y, str(number), ha="center", va="center", fontsize=9)
    blocks = 1 + max(block for *_, block in found)
    kv_heads = sorted({kv_head for _, _, kv_head, _ in found})
    handles = [Patch(facecolor=COLORS[_HEADS[h % len(_HEADS)]], label=f"reads K/V head {h}") for h in kv_heads]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    ax.set(xlim=(-0.6, blocks - 0.4), ylim=(len(lines) - 0.4, -0.6), title=title, xlabel="block of queries")
    ax.set_xticks(range(blocks))
    ax.set_yticks(range(len(lines)), [f"batch {batch}, head {head}" for batch, head in lines], fontsize=8)
    ax.grid(visible=False)
