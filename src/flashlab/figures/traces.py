"""What a kernel does in which order: print statements in a copy of its source, run in the emulator, and drawn.

timeline(ax, events(2), "two stages")     # which copies are under way while a tile is worked on
"""

import functools
import re
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes

from flashlab.cuda import load_inline
from flashlab.figures.ladder import run
from flashlab.figures.show import COLORS
from flashlab.kernels.regions import numbered, regions
from flashlab.kernels.series import step


def printed(
    name: str, *edits: tuple[str, str], n: int = 256, causal: bool = False,
    tensors: Sequence[torch.Tensor] | None = None, **defines: int,
) -> str:  # fmt: skip
    """What a step prints with more statements in it, on one head of n rows, head_dim 64.

    edits: (region, statement): the statement is put in front of that region; KeyError where there is none. tensors: q,
    k and v, in fp16; random ones, if None. defines: macros of the step.
    """
    text = step(name).path.read_text(encoding="utf-8")
    for region, statement in edits:
        lines = text.split("\n")
        lines.insert(numbered(text, region)[0][0] - 1, statement)
        text = "\n".join(lines)
    module = load_inline(text, backend="emulator", defines=defines)
    return run(module, n=n, causal=causal, tensors=tensors).printed


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


def rescales(name: str, n: int = 256, tensors: Sequence[torch.Tensor] | None = None) -> tuple[int, int]:
    """How often a warp of this step rescales its accumulator, and how many tiles the warps work on together.

    On one head of n rows, in blocks of 64 rows; ``tensors`` as in `printed`.
    """
    where = "correction" if "correction" in regions(step(name).path.read_text(encoding="utf-8")) else "rescale"
    said = printed(name, (where, 'if (lane == 0) printf("r\\n");'), n=n, tensors=tensors)
    return len(re.findall("r", said)), n // 64 * (n // 64) * 4


def timeline(ax: Axes, order: Sequence[tuple[str, int]], title: str) -> list[int]:
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
        ax.barh(tile, arrived - begin, left=begin, height=-0.34, align="edge", color=COLORS["orange"],
                label="copy under way" if tile == 0 else None)  # fmt: skip
        ax.barh(tile, done - arrived, left=arrived, height=0.34, align="edge", color=COLORS["blue"],
                label="tile worked on" if tile == 0 else None)  # fmt: skip
        under_way = [t for t in tiles if at["copy", t] < done and at["arrived", t] > arrived]
        overlapping.append(len(under_way))
    ax.set(yticks=tiles, yticklabels=[f"tile {t}" for t in tiles], xlabel="events of thread 0, in order", title=title)
    ax.set_xticks(range(0, len(order) + 1, 2))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return overlapping
