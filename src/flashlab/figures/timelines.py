"""What the units of a chip do at which time, as bars on a line for each unit.

units(ax, [("copies", "K0", 0, 1000), ("products", "S0", 1000, 1024)], "a title")
"""

from collections.abc import Sequence

from matplotlib.axes import Axes

from flashlab.figures.show import COLORS

Bar = tuple[str, str, int, int]  # unit, name, when it begins, how long it takes


def units(ax: Axes, bars: Sequence[Bar], title: str) -> None:
    """Draws a bar for each thing that is done, coloured by the first letter of its name; paler, if the last is b."""
    lines = list(dict.fromkeys(unit for unit, *_ in bars))
    kinds = sorted({name[0] for _, name, *_ in bars})
    hues = [COLORS[hue] for hue in ("grey", "green", "orange", "sky", "light", "purple")]
    end = max(start + length for *_, start, length in bars)
    for unit, name, start, length in bars:
        second = name.endswith("b")
        ax.barh(lines.index(unit), length, 0.78, left=start, color=hues[kinds.index(name[0]) % len(hues)],
                edgecolor="white", linewidth=1, alpha=0.55 if second else 1)  # fmt: skip
        if length > 0.012 * end:
            ax.text(start + length / 2, lines.index(unit), name, ha="center", va="center",
                    fontsize=8 if length > 0.03 * end else 6)  # fmt: skip
    ax.set(yticks=range(len(lines)), yticklabels=lines, xlabel="clocks", title=title)
    ax.invert_yaxis()
    ax.label_outer()
    ax.grid(axis="y", visible=False)
