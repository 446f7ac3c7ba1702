"""Phase 13: who has which tokens, how much work a rank has in which step, what ranks did when.

dealt(ax, [[0, 7], [1, 6], ...], "zigzag")      tokens by rank
steps(ax, [[2, 2], [0, 4]], "a title")            work by step and rank
timeline(ax, events, "a title")                  from a trace: (rank, step, what, begin, end, amount)
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flashlab.figures.show import COLORS

HUES = ("blue", "orange", "green", "purple", "sky", "red", "light", "grey")


def dealt(ax: Axes, places: Sequence[Sequence[int]], title: str) -> None:
    """The tokens of a sequence in a row, each in its rank's colour and with its rank's number."""
    for rank, tokens in enumerate(places):
        for token in tokens:
            ax.barh(0, 1, 0.8, left=token, color=COLORS[HUES[rank]], edgecolor="white", linewidth=1)
            ax.text(token + 0.5, 0, str(rank), ha="center", va="center", fontsize=9)
    ax.set(xlim=(0, sum(map(len, places))), title=title)
    ax.axis("off")


def steps(ax: Axes, table: Sequence[Sequence[float]], title: str, unit: float = 1.0) -> None:
    """Work in units, a row per rank and a column per step; the busiest of each step is bold."""
    found = np.array(table, dtype=float).T / unit
    ax.imshow(found, cmap="Blues", vmin=0, vmax=1.6 * found.max(), aspect="auto")
    for rank, line in enumerate(found):
        for step, value in enumerate(line):
            heavy = value == found[:, step].max()
            ax.text(step, rank, f"{value:.3g}", ha="center", va="center", fontsize=9, weight="bold" if heavy else None)
    ax.set(xlabel="step", ylabel="rank", title=title, xticks=range(found.shape[1]), yticks=range(found.shape[0]))
    ax.tick_params(length=0)
    ax.grid(visible=False)


def timeline(ax: Axes, events: Sequence[tuple[int, int, str, float, float, int]], title: str) -> None:
    """A line per rank: blocks as bars with their step, sends (until they are asked for) below; white is idle."""
    start = min(begin for *_, begin, _, _ in events)
    for rank, step, what, begin, end, _ in events:
        left, width = 1e3 * (begin - start), 1e3 * (end - begin)
        if what == "block":
            ax.barh(rank - 0.12, width, 0.5, left=left, color=COLORS["sky"], edgecolor="white")
            ax.text(left + width / 2, rank - 0.12, str(step), ha="center", va="center", fontsize=8)
        elif what == "send":
            ax.barh(rank + 0.27, width, 0.16, left=left, color=COLORS["orange"], edgecolor="white")
    ax.set(yticks=sorted({e[0] for e in events}), ylabel="rank", xlabel="milliseconds", title=title)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    names = {"block, with its step": "sky", "send": "orange"}
    ax.legend(handles=[Patch(color=COLORS[hue], label=name) for name, hue in names.items()], fontsize=8, ncols=2,
              loc="lower center", bbox_to_anchor=(0.5, -0.42))  # fmt: skip
