"""Programs as points below a roofline: what each reached, under what it could have reached.

draw(ax, 4.3, {"tensor cores": 714.0}, {"phase 8": ([2048], [305.0], "green", "o")}, {"p8_6_store": (2048, 305.0)})
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flashlab.figures.show import COLORS

Group = tuple[Sequence[float], Sequence[float], str, str]  # intensities, TFLOP/s, name of a colour, marker


def draw(
    ax: Axes, memory: float, units: Mapping[str, float], groups: Mapping[str, Group],
    names: Mapping[str, tuple[float, float]], **axes: Any,
) -> None:  # fmt: skip
    """Draw the slope of the memory, 10^12 bytes per second, a roof for each unit, 10^12 FLOP/s, and points by group.

    names: which points have their name beside them, and where they are. axes: what else `Axes.set` takes.
    """
    xs = [x for group in groups.values() for x in group[0]]
    left, right = min([10.0, *xs]) / 1.6, max([1000.0, *xs]) * 6
    x = np.logspace(np.log10(left), np.log10(right), 300)
    for name, top in units.items():
        ax.plot(x, np.minimum(top, memory * x), color=COLORS["grey"], linewidth=1.3)
        ax.annotate(f"{name}: {top:.0f}", (left, top), (4, 2), "data", "offset points", fontsize=8, va="bottom")
        ax.plot([left, top / memory], [top, top], color=COLORS["grey"], linewidth=0.7, linestyle=":")
    for name, (at, reached, color, marker) in groups.items():
        ax.plot(at, reached, marker, color=COLORS[color], label=name, markersize=6, linewidth=0)
    ax.set(xscale="log", yscale="log", xlim=(left, right), xlabel="FLOPs per byte that has to move",
           ylabel="TFLOP/s", **axes)  # fmt: skip
    _names(ax, names)
    ax.legend(fontsize=8, loc="lower right")


def _names(ax: Axes, names: Mapping[str, tuple[float, float]]) -> None:
    """Write names beside their points: in turns to the right and to the left, where points stand above each other."""
    top = dict[tuple[int, int], float]()  # of the last name, by column and side
    beside = dict[int, int]()
    for name, (x, y) in sorted(names.items(), key=lambda item: item[1][1]):
        column = int(np.log10(x) * 4)
        beside[column] = side = -beside.get(column, -1)  # 1: to the right
        at = top[column, side] = max(y, top.get((column, side), 0.0) * 1.27)
        ax.annotate(
            name, (x, y), (x * 1.25**side, at), fontsize=7.5, va="center", ha="left" if side > 0 else "right",
            arrowprops={"arrowstyle": "-", "color": COLORS["grey"], "linewidth": 0.5, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip
