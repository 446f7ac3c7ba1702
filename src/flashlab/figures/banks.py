"""Which banks of shared memory the rows of one ldmatrix tile ask for.

bank_map(ax, addresses("p8_3_stages"), "before")
"""

import functools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashlab.figures.show import COLORS
from flashlab.figures.traces import printed

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
