"""What the notebooks show: source code, diffs between kernel steps, tables, figures, animations.

Everything here returns or displays standard Jupyter output (Markdown, PNG, GIF), so that a notebook reads the same
in JupyterLab, on a code host and in print. Nothing here knows any one kernel.
"""

from __future__ import annotations

import difflib
import inspect
import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from flashlab.table import Table

__all__ = ["COLORS", "diff", "gif", "source", "source_text", "style", "table"]

# Okabe & Ito's palette: told apart by colour-blind readers, and in grey by their lightness.
COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#8C8C8C",
    "light": "#E6E6E6",
}
_CYCLE = ["blue", "orange", "green", "red", "purple", "sky", "black"]


def style() -> None:
    """Set the course's look for every figure drawn after it: size, type, grid, colours."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "lines.linewidth": 2.0,
            "axes.prop_cycle": plt.cycler(color=[COLORS[c] for c in _CYCLE]),
        }
    )


def source_text(obj: Any) -> str:
    """The source of a function, class, Triton kernel (its decorators too) or file, as text.

    Raises:
        TypeError: `obj` has no source that Python can find (it was typed at a prompt, or is built in).
    """
    if isinstance(obj, Path):
        return obj.read_text()
    # A Triton kernel wraps the Python function; what a reader wants to see is the function.
    target = getattr(obj, "fn", obj)
    try:
        return textwrap.dedent(inspect.getsource(target))
    except (OSError, TypeError) as error:
        raise TypeError(f"{obj!r} has no source text that Python can find") from error


def source(obj: Any, *, start: str | None = None, end: str | None = None) -> None:
    """Show the source of `obj` (see `source_text`) as highlighted code.

    Args:
        start: show from the first line that contains this text ...
        end: ... up to and including the next line that contains this one.
    Raises:
        ValueError: `start` or `end` is not in the source.
    """
    lines = source_text(obj).rstrip("\n").split("\n")
    first, last = 0, len(lines) - 1
    if start is not None:
        first = _line_with(lines, start, 0)
    if end is not None:
        last = _line_with(lines, end, first)
    language = "cpp" if isinstance(obj, Path) and obj.suffix in (".cu", ".cuh", ".h", ".cpp") else "python"
    body = textwrap.dedent("\n".join(lines[first : last + 1]))
    display(Markdown(f"```{language}\n{body}\n```"))


def _line_with(lines: Sequence[str], text: str, after: int) -> int:
    for i in range(after, len(lines)):
        if text in lines[i]:
            return i
    raise ValueError(f"no line after line {after + 1} of the source contains {text!r}")


def diff(old: Any, new: Any, *, context: int = 3) -> None:
    """Show what changes from `old` to `new` (anything `source_text` takes, or plain text) as a unified diff."""
    texts = [x if isinstance(x, str) else source_text(x) for x in (old, new)]
    lines = difflib.unified_diff(*(t.splitlines() for t in texts), lineterm="", n=context)
    body = "\n".join(list(lines)[2:])  # without the two lines of file names
    display(Markdown(f"```diff\n{body}\n```"))


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str], *, align: str | None = None) -> None:
    """Show rows as a table (see `flashlab.table.Table.of`)."""
    display(Table.of(rows, columns, align=align))


def gif(figures: Iterable[Figure], *, seconds_a_frame: float = 0.8, hold_last: float = 2.0, dpi: int = 80) -> Image:
    """Turn figures into an animated GIF, shown in the notebook; each figure is closed once drawn.

    Args:
        figures: one a frame, all of one size; a generator keeps only one of them alive at a time.
        seconds_a_frame: how long each frame stays, the last one `hold_last` longer.
    Raises:
        ValueError: no figure at all.
    """
    from PIL import Image as Picture

    frames = []
    for figure in figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
        plt.close(figure)
        frames.append(Picture.open(buffer).convert("RGB").quantize(64, dither=Picture.Dither.NONE))
    if not frames:
        raise ValueError("an animation needs at least one figure")
    durations = [int(1000 * seconds_a_frame)] * len(frames)
    durations[-1] += int(1000 * hold_last)
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    # Labelled PNG on purpose: exporters and code hosts drop image/gif from a notebook, and every browser looks at the
    # bytes, not at the label. In JupyterLab, in exported HTML and on a code host it plays.
    return Image(data=out.getvalue(), format="png")
