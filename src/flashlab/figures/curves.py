"""Lines and bars of what was measured or predicted, with axes that read as numbers.

curves(ax, [("formula", n, bytes, "blue", "-"), ("counted", n, seen, "orange", "o")], log="xy", xticks=n)
level(ax, 99, "RTX cards")
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flashlab.figures.implementations import look
from flashlab.figures.show import COLORS

Line = tuple[str, Sequence[float], Sequence[float], str, str]


def _hue(color: str, label: str) -> str:
    """The colour of that name; for "" that of the implementation with this label. Raises KeyError."""
    return COLORS[color or look(label).color]


_DARK = ("blue", "red", "black")  # on these a text is white


def curves(
    ax: Axes,
    lines: Iterable[Line],
    *,
    log: str = "",
    xticks: Sequence[float] = (),
    yticks: Sequence[float] = (),
    legend: str | tuple[float, float] | None = "best",
    size: float | None = None,
    **axes: Any,
) -> None:
    """Draws lines, points or both.

    Args:
        lines: (label, x, y, name of a colour, matplotlib's format: "o-", "--", "s"); a label of "" is left out of the
            legend; a colour of "" is that of the implementation with this label.
        log: "x", "y", "xy": the logarithmic axes.
        xticks, yticks: see `ticks`.
        legend: where it goes, as matplotlib calls it, or its lower left corner in the axes; None for no legend.
        size: of the markers, in points.
        axes: title, xlabel, ylabel, ylim and whatever else `Axes.set` takes.
    """
    for label, x, y, color, form in lines:
        width = 1.4 if size else None
        ax.plot(x, y, form, color=_hue(color, label), label=label or None, markersize=size, linewidth=width)
    ax.set(**{f"{axis}scale": "log" for axis in log})
    ax.set(**axes)
    ticks(ax, xticks, yticks)
    if legend is not None:
        ax.legend(loc=legend, fontsize=8 if size else 9)


def ticks(ax: Axes, x: Sequence[float] = (), y: Sequence[float] = ()) -> None:
    """Marks these values, and no others, on an axis (logarithmic or not), written as plain numbers."""
    for values, axis in ((x, ax.xaxis), (y, ax.yaxis)):
        if len(values):
            axis.set_ticks(list(values), [f"{v:g}" if v < 1e6 else str(v) for v in values])
            axis.set_ticks([], minor=True)


def level(ax: Axes, value: float, text: str, color: str = "grey", *, below: bool = False) -> None:
    """A dashed horizontal line, with its name above (or below) it at the right edge."""
    ax.axhline(value, color=COLORS[color], linewidth=1.3, linestyle="--")
    ax.annotate(text, (1, value), (-2, -3 if below else 2), ("axes fraction", "data"), "offset points",
                color=COLORS[color], fontsize=9, ha="right", va="top" if below else "bottom")  # fmt: skip


def roofline(ax: Axes, roofs: Mapping[str, Callable[[float], float]], points: Mapping[str, float], **axes: Any) -> None:
    """The attainable speed of machines over arithmetic intensity, and where some programs are.

    roofs: for each machine TFLOP/s as a function of FLOP per byte. points: each program's; a name may have two lines.
    """
    x = np.logspace(0.5, 4, 200)
    for (name, attainable), hue in zip(roofs.items(), ("blue", "sky", "green", "orange", "red"), strict=False):
        ax.plot(x, [attainable(i) for i in x], color=COLORS[hue], label=name)
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP per byte)", **axes)
    top = ax.get_ylim()[1]
    for (name, intensity), side in zip(points.items(), ("right", "left", "center"), strict=False):
        ax.axvline(intensity, color=COLORS["grey"], linestyle="--", linewidth=1.2)
        ax.annotate(name, (intensity, top), (0, 3), "data", "offset points", ha=side, va="bottom", fontsize=9)
    ax.legend(loc="lower right")


Group = tuple[Sequence[float], Sequence[float], str, str]  # intensities, TFLOP/s, name of a colour, marker


def reached(
    ax: Axes, memory: float, units: Mapping[str, float], groups: Mapping[str, Group],
    names: Mapping[str, tuple[float, float]], **axes: Any,
) -> None:  # fmt: skip
    """Programs as points below what a machine can do: the slope of the memory, 10^12 bytes per second, a roof for each
    unit, 10^12 FLOP/s, and points by group.

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


def stacked(ax: Axes, bars: Mapping[str, Sequence[tuple[str, float, str]]], **axes: Any) -> None:
    """Horizontal bars that are made of parts, each from left to right (text, size, name of a colour); in a thin part
    there is room for one letter."""
    longest = max(sum(size for _, size, _ in parts) for parts in bars.values())
    for y, parts in enumerate(bars.values()):
        left = 0.0
        for text, size, color in parts:
            ax.barh(y, size, left=left, color=COLORS[color], edgecolor="white", linewidth=1.2)
            size_of_text = 9 if size > 0.05 * longest else 7
            ax.text(left + size / 2, y, text, ha="center", va="center", fontsize=size_of_text,
                    color="white" if color in _DARK else "black")  # fmt: skip
            left += size
    ax.set(yticks=range(len(bars)), yticklabels=list(bars), ylim=(len(bars) - 0.5, -0.62), **axes)
    ax.grid(axis="y", visible=False)


def columns(
    ax: Axes, names: Sequence[str], bars: Mapping[str, tuple[Sequence[float], str]], *, fmt: str = "", **axes: Any
) -> None:
    """Upright bars, side by side where there are several for a name.

    bars: for each kind (values, name of a colour; "" for that of the implementation of this name). fmt: how a value is
    written on its bar ("%.2g"); "" for not at all.
    """
    width = 0.8 / len(bars)
    for i, (label, (values, color)) in enumerate(bars.items()):
        at = [x + width * (i - (len(bars) - 1) / 2) for x in range(len(names))]
        drawn = ax.bar(at, values, 0.93 * width, color=_hue(color, label), label=label)
        if fmt:
            ax.bar_label(drawn, fmt=fmt, fontsize=8)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set(**axes)
    ax.grid(axis="x", visible=False)
    if len(bars) > 1:
        ax.legend(ncols=len(bars), loc="upper left")


def ratio_columns(ax: Axes, names: Sequence[str], bars: Mapping[str, tuple[Sequence[float], str]], **axes: Any) -> None:
    """`columns` of ratios, with a line at 1; what is not known is NaN, and has no bar."""
    columns(ax, names, bars, fmt="%.2f", **axes)
    ax.axhline(1, color=COLORS["black"], linewidth=1)
    if ax.get_legend():
        ax.legend(ncols=len(bars), loc="lower right", bbox_to_anchor=(1, 1))


def matrix(
    ax: Axes, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str], float], title: str
) -> None:
    """Ratios by row and column, written and coloured, 1 white and 2 or more dark; a dash where there is none."""
    found = np.array([[values.get((row, column), np.nan) for column in columns] for row in rows])
    ax.imshow(np.clip(found, 1, 2), cmap="Blues", vmin=1, vmax=2.6, aspect="auto")
    for i, line in enumerate(found):
        for j, value in enumerate(line):
            text = "–" if np.isnan(value) else f"{value:.2f}" if value < 9.995 else f"{value:.0f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7.5, fontweight="bold" if value == 1 else "normal")
    ax.set(title=title)
    ax.set_xticks(range(len(columns)), columns, fontsize=8)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.tick_params(length=0)
    ax.grid(visible=False)


def dots(ax: Axes, groups: Mapping[str, Sequence[float]], **axes: Any) -> None:
    """Every value of each group as a dot, spread sideways so that equal ones are seen."""
    for i, values in enumerate(groups.values()):
        ax.plot(i + np.linspace(-0.3, 0.3, len(values)), values, ".", markersize=4)
    ax.axhline(0, color=COLORS["grey"], linewidth=0.8)
    ax.set(xticks=range(len(groups)), xticklabels=list(groups), **axes)
