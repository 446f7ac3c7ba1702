"""The README's figure: the rungs of a ladder as bars, and lines over the sequence length beside them.

results([["8 · swizzle", "this course", 240.8]], {"Forward": {"cuDNN": [[512, 500.0]]}}, {}, "Forward pass on one H200")
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashlab.figures import curves
from flashlab.figures.implementations import look
from flashlab.figures.show import COLORS

Bar = Sequence[Any]  # words, the implementation whose colour it has, TFLOP/s


def results(
    bars: Sequence[Bar],
    plots: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    names: Mapping[str, str],
    title: str,
) -> Figure:
    """Bars on the left, the slowest at the top; a panel for each of `plots` on the right, with one legend.

    plots: for each title the points (sequence length, TFLOP/s) of each implementation. names: what the legend calls an
    implementation, where that is not its name. title: of the bars.
    """
    figure = plt.figure(figsize=(11, 5.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    grid = figure.add_gridspec(len(plots), 2, width_ratios=[1.25, 1])
    left = figure.add_subplot(grid[:, 0])
    _bars(left, bars, title)
    handles: dict[str, Any] = {}
    top = max((y for lines in plots.values() for points in lines.values() for _, y in points), default=1.0)
    for i, (name, lines) in enumerate(plots.items()):
        ax = figure.add_subplot(grid[i, 1])
        for who, points in lines.items():
            (handles[who],) = ax.plot(*zip(*points, strict=True), color=COLORS[look(who).color], label=who,
                                      marker=look(who).marker, markersize=4.5, linewidth=1.5)  # fmt: skip
        ax.set(title=name, xscale="log", ylabel="TFLOP/s", ylim=(0, 1.08 * top))
        lengths = sorted({n for points in lines.values() for n, _ in points})
        curves.ticks(ax, x=lengths)
        ax.set_xticks(lengths, [f"{n / 1024:g}k" if n >= 1024 else f"{n:g}" for n in lengths])
        if i == len(plots) - 1:
            ax.set_xlabel("sequence length N")
    if handles:
        said = [names.get(who, who) for who in handles]
        figure.legend(handles.values(), said, loc="outside lower right", ncols=len(said), fontsize=9, handlelength=1.6)
    return figure


def _bars(ax: Axes, bars: Sequence[Bar], title: str) -> None:
    top = max((speed for _, _, speed in bars), default=1.0)
    for i, (_, who, speed) in enumerate(bars):
        ax.barh(i, speed, color=COLORS[look(who).color], height=0.74)
        ax.text(speed + 0.012 * top, i, f"{speed:.0f}", va="center", fontsize=9)
    ax.set_yticks(range(len(bars)), [words for words, _, _ in bars])
    ax.set(title=title, xlabel="TFLOP/s", xlim=(0, 1.1 * top))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
