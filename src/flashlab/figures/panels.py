"""Several small plots of the same kind side by side, with one legend: what was measured over sequence lengths.

panels({"D = 64": {"triton": ([512, 1024], [90, 140])}}, ylabel="TFLOP/s", log="x")
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from flashlab.figures import curves
from flashlab.figures.implementations import look, looks
from flashlab.figures.show import COLORS

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def panels(
    plots: Mapping[str, Lines], *, columns: int = 3, ylabel: str, log: str = "x", level: float | None = None,
    level_text: str = "", pairs: bool = False, title: str = "",
) -> Figure | None:  # fmt: skip
    """A plot for each title, of lines over the sequence length; None where there is nothing to draw.

    An implementation has its own colour (flashlab.figures.implementations); other names take what is left.

    plots: for each title its lines by name, as (lengths, values); one without a line says so. log: the logarithmic
    axes, "x" or "xy". level, level_text: a dashed line in each plot, named in the first. pairs: the names come in twos
    of one colour, the second of each dashed.
    """
    names = list(dict.fromkeys(name for lines in plots.values() for name in lines))
    lengths = sorted({x for lines in plots.values() for xs, _ in lines.values() for x in xs})
    if not names:
        return None
    hues = looks(names[::2] if pairs else names)
    if pairs:
        hues |= {second: hues[first] for first, second in zip(names[::2], names[1::2], strict=False)}
    rows = math.ceil(len(plots) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(8.6, 0.75 + 2.3 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for i, (ax, (name, lines)) in enumerate(zip(axes.flat, plots.items(), strict=False)):
        for line, (xs, ys) in lines.items():
            dashed = pairs and names.index(line) % 2
            ax.plot(xs, ys, "--" if dashed else "-", color=COLORS[hues[line].color], marker=hues[line].marker,
                    markersize=4, linewidth=1.4, label=line)  # fmt: skip
        ax.set_title(name, fontsize=10)
        ax.set(**{f"{axis}scale": "log" for axis in log})
        if not lines:
            ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=COLORS["grey"])
        if level is not None:
            curves.level(ax, level, level_text if i == 0 else "", below=True)
    for ax in axes.flat[len(plots) :]:
        ax.axis("off")
    for ax in axes.flat:
        curves.ticks(ax, x=lengths)
        ax.set_xticks(lengths, [_short(x) for x in lengths], fontsize=8)
        if "y" in log:
            ax.margins(y=0.12)
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        else:
            ax.set_ylim(0, 1.12 * max(y for lines in plots.values() for _, ys in lines.values() for y in ys))
        if ax.get_subplotspec().is_last_row():
            ax.set_xlabel("sequence length N", fontsize=9)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(ylabel, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = min(len(names), 6)
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def _short(length: float) -> str:
    """512, 1k, 16k: as lengths are spoken of."""
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"


# ---- the README's ----------------------------------------------------------------------------------------------------
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
    most = max((speed for _, _, speed in bars), default=1.0)
    for i, (_, who, speed) in enumerate(bars):
        left.barh(i, speed, color=COLORS[look(who).color], height=0.74)
        left.text(speed + 0.012 * most, i, f"{speed:.0f}", va="center", fontsize=9)
    left.set_yticks(range(len(bars)), [words for words, _, _ in bars])
    left.set(title=title, xlabel="TFLOP/s", xlim=(0, 1.1 * most))
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
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
        ax.set_xticks(lengths, [_short(n) for n in lengths])
        if i == len(plots) - 1:
            ax.set_xlabel("sequence length N")
    if handles:
        said = [names.get(who, who) for who in handles]
        figure.legend(handles.values(), said, loc="outside lower right", ncols=len(said), fontsize=9, handlelength=1.6)
    return figure
