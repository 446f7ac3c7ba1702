"""What a kernel does in which order: print statements in a copy of its source, run in the emulator, and drawn.

timeline(ax, events(2), "two stages")                # which copies are under way while a tile is worked on
bank_map(ax, addresses("p8_3_stages"), "before")     # which banks the rows of one ldmatrix tile ask for
"""

import functools
import re
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

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
def events(stages: int) -> tuple[tuple[str, int], ...]:
    """What thread 0 of block 0 of p8_3_stages does, in order: ("copy", tile), ("arrived", tile), ("done", tile)."""
    one = "if (blockIdx.x == 0 && threadIdx.x == 0) "
    said = printed(
        "p8_3_stages",
        ("copy K and V", one + 'printf("copy %d\\n", j);'),
        ("one tile", one + 'printf("arrived %d\\n", j);'),
        ("output", one + 'printf("done %d\\n", j);'),
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


# ---- banks -----------------------------------------------------------------------------------------------------------
BANKS = 32


@functools.lru_cache(maxsize=8)
def addresses(name: str) -> tuple[int, ...]:
    """Byte addresses that lanes 0 to 7 give to the first ldmatrix of K, from the tile's start: one 8 x 8 tile."""
    said = printed(name, ("scores", 'if (blockIdx.x == 0 && warp == 0 && j == 0 && lane < 8) '
                                    'printf("%d %d\\n", lane, at(lane % 8, lane / 8 % 2 * 8));'))  # fmt: skip
    pairs = dict(tuple(map(int, line.split())) for line in said.splitlines())
    return tuple(pairs[lane] for lane in range(8))


def bank_map(ax: Axes, rows: Sequence[int], title: str) -> int:
    """Draws which banks eight rows of 16 bytes ask for; returns the wavefronts they need.

    One line a row, one column a bank. Blue: asked for once; red: by several rows, which have to wait for each other.
    """
    asked = [[(address + 4 * i) // 4 % BANKS for i in range(4)] for address in rows]
    times = [sum(bank in banks for banks in asked) for bank in range(BANKS)]
    for line, banks in enumerate(asked):
        for bank in range(BANKS):
            here = bank in banks
            color = COLORS["light"] if not here else COLORS["red" if times[bank] > 1 else "blue"]
            ax.add_patch(Rectangle((bank, line), 0.92, 0.86, color=color))
        ax.text(banks[0] + 2, line + 0.46, f"row {line}", ha="center", va="center", color="white", fontsize=7)
    ax.set(xlim=(0, BANKS), ylim=(8, 0), xlabel="bank (4 bytes each)", ylabel="row (lane 0 to 7)", title=title)
    ax.set_xticks([x + 0.46 for x in range(0, BANKS, 4)], [str(x) for x in range(0, BANKS, 4)])
    ax.set_yticks([y + 0.43 for y in range(8)], [str(y) for y in range(8)])
    ax.grid(False)
    return max(times)
