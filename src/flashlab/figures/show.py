"""What the notebooks show: named regions of a source, diffs between two, tables, animations; and the look of figures.

Everything here returns or displays standard Jupyter output (Markdown, PNG, SVG, GIF), so that a notebook reads the same
in JupyterLab, on a code host and in print. Nothing here knows any one kernel.

    show.region(step, "main loop")         a named region of a file, the whole file one fold away
    show.diff(before, after, "main loop")  how a region changes, the whole diff one fold away
    show.table(rows, columns)
"""

import ast
import difflib
import html
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.core.pylabtools import print_figure
from IPython.display import Image, Markdown, display
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from flashlab.kernels import regions
from flashlab.table import Table

# Okabe & Ito's palette, but for red: theirs is an orange to most eyes, and this one, Paul Tol's, is called red by all.
# Told apart by colour-blind readers, and in grey by their lightness.
COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#CC3311",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
    "grey": "#8C8C8C",
    "light": "#E6E6E6",
}
MOST_SVG = 40_000  # characters of a figure as SVG: every clone carries them
_CYCLE = ["blue", "orange", "green", "red", "purple", "sky", "black"]


def style() -> None:
    """Set the course's look for every figure drawn after it: size, type, grid, colours; and have it told in words."""
    plt.style.use(Path(__file__).with_name("course.mplstyle"))
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=[COLORS[c] for c in _CYCLE])
    if shell := get_ipython():
        plt.switch_backend(plt.get_backend())  # which says how figures are shown when it is first loaded
        formats = shell.display_formatter.formatters
        if Figure in formats["image/png"]:
            formats["image/png"].for_type(Figure, partial(_told, formats["image/png"].lookup_by_type(Figure)))
            formats["image/svg+xml"].for_type(Figure, _lines)


def _told(draw: Callable[[Figure], Any], figure: Figure) -> tuple[Any, dict[str, Any]]:
    data = draw(figure)
    data, metadata = data if isinstance(data, tuple) else (data, {})  # a tuple: retina, or `style` ran before
    return data, metadata | {"alt": in_words(figure)}


def _lines(figure: Figure) -> str | None:
    """Line art as SVG, sharp at any size, beside the PNG, which JupyterLab shows of a notebook that it does not trust.

    None of a figure that has an image in it, or whose lines would weigh more than MOST_SVG.
    """
    parts = figure.findobj()
    if len(parts) > 1500 or any(isinstance(part, (AxesImage, QuadMesh)) for part in parts):
        return None
    told = {"Title": in_words(figure), "Creator": None, "Date": None}
    with plt.rc_context({"svg.hashsalt": "flashlab"}):  # the same names in it at each drawing
        lines = re.sub(r"\s*\n\s*", " ", print_figure(figure, "svg", metadata=told))  # a line has its cost
    return lines if len(lines) <= MOST_SVG else None


def in_words(figure: Figure) -> str:
    """What a figure says of itself, for those who do not see it: titles, axes, legends, else what is written in it."""
    parts = [figure.get_suptitle()]
    for ax in figure.axes:
        title = " ".join(filter(None, (ax.get_title(loc=place) for place in ("left", "center", "right"))))
        across, up = (label if ax.axison else "" for label in (ax.get_xlabel(), ax.get_ylabel()))
        axes = f"{up} over {across}" if up and across else up or across
        keys = ", ".join(text.get_text() for text in legend.get_texts()) if (legend := ax.get_legend()) else ""
        parts.append("; ".join(filter(None, (title, axes, keys))))
    parts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    if not any(parts):
        parts = [text.get_text() for ax in figure.axes for text in ax.texts]
    told = ". ".join(dict.fromkeys(" ".join(part.split()) for part in parts if part.strip()))
    return textwrap.shorten(told, 400, placeholder=" ...")


# ---- source, regions, diffs ------------------------------------------------------------------------------------------
WIDTH = 110  # characters of a shown line, its number included: what a page has room for
_ADDED, _REMOVED = "rgba(0,158,115,0.18)", "rgba(204,51,17,0.15)"  # light on white, dark on black
_BEHIND = re.compile(r"(.*?\S)( {2,})((?://|#).*)")  # a comment behind code

Line = tuple[int, str]  # its number in the file, and the text


def source_text(obj: Any) -> str:
    """The source of a function, class, Triton kernel (its decorators too), step of the series or file, as text.

    Raises:
        TypeError: `obj` has no source that Python can find (it was typed at a prompt, or is built in).
    """
    return textwrap.dedent("\n".join(text for _, text in _read(obj, whole_file=False).lines())) + "\n"


def source(obj: Any) -> None:
    """Show a Python function, class or Triton kernel, or a whole file, highlighted and with its line numbers.

    For a part of a file there is `region`, for code that the reader should also run a cell that the build fills.
    """
    read = _read(obj, whole_file=False)
    lines = read.lines()
    _show(read.caption([("", lines)]), _listing([lines], read.language))


def region(source: Any, *names: str, whole_file: bool = True) -> None:
    """Show named regions of a source, highlighted and with the file's line numbers; the whole file in a fold.

    Args:
        source: a step of the series, a path, a module or function (its file is meant), or text.
        names: of one or more regions, shown in this order.
        whole_file: False: of a function or kernel only its own lines are read, and are in the fold.
    Raises:
        KeyError: the source has no such region; the message has the names there are.
        ValueError: no name, or the source's region markers do not pair.
    """
    if not names:
        raise ValueError("name a region to show, or use show.source for the whole")
    read = _read(source, whole_file)
    pieces = [(name, read.lines(name)) for name in names]
    whole = read.lines()
    kind = "file" if whole_file else "function"
    fold = _fold(f"the whole {kind}, {len(whole)} lines", _listing([whole], read.language))
    _show(read.caption(pieces), _listing([lines for _, lines in pieces], read.language), fold)


def diff(old: Any, new: Any, *names: str, context: int = 3) -> None:
    """Show what changes from one source to another: the lines that go, those that come, and some around them.

    Numbers are those of the new file. With names only these regions are compared, and the whole diff is in a fold; a
    region that only one of the two has is all new, or all gone. Without names the whole of both is compared, and the
    new file is in the fold. Indentation that all lines of a region share is no difference.

    old, new: as the source of `region`; "" for nothing. context: how many unchanged lines are shown around a change.
    Raises KeyError where neither has a region of a name.
    """
    before, after = _read(old), _read(new)
    pieces = []
    for name in names:
        if not before.has(name):
            after.lines(name)  # where neither has it, this says which there are
        pieces.append(_changes(*(x.lines(name) if x.has(name) else [] for x in (before, after)), context))
    whole = _changes(before.lines(), after.lines(), context)
    shown_pieces = pieces or [whole]
    counts = [sum(change.sign == sign for p in shown_pieces for change in p if change) for sign in "+-"]
    title = " → ".join(filter(None, (before.title, after.title)))
    named = " and ".join(f"*{name}*" for name in names)
    caption = f"{': '.join(filter(None, (title, named)))} (lines: {counts[0]} new, {counts[1]} gone)"
    if names:
        fold = _fold("the whole diff", _marked([whole]))
    else:
        fold = _fold(f"the whole new file, {len(after.lines())} lines", _listing([after.lines()], after.language))
    _show(caption, _marked(shown_pieces) if any(counts) else "No line changes.", fold)


def shown(markdown: str) -> list[str]:
    """The lines of code that an output of `region`, `diff` or `source` shows, those that a diff takes away and the
    fold left out: for the test that a lecture shows its kernel."""
    text = re.sub(r"<details>.*?</details>", "", markdown, flags=re.S)
    lines: list[str] = []
    for block in re.findall(r"^```[\w+]+\n(.*?)\n```$|<pre><code>(.*?)</code></pre>", text, re.M | re.S):
        rows = html.unescape(re.sub(r"</?span[^>]*>", "", block[1])).splitlines() or block[0].splitlines()
        if not any(re.match(r"[ +]? *\d+(  |$)", line) for line in rows):
            lines += rows  # a fence of another hand
            continue
        gone = False
        for line in rows:
            if numbered := re.fullmatch(r"[ +]? *\d+(?:  (.*))?", line):
                lines.append(numbered[1] or "")
                gone = False
            elif line.startswith("-"):
                gone = True
            elif not gone and lines and line.strip() not in ("", "⋮"):
                lines[-1] += " " + line.lstrip("+").strip()  # the rest of a line that was too long
    return lines


@dataclass(frozen=True)
class _Source:
    """A source with where it is from: `first` is the file's number of its first line."""

    text: str
    file: str = ""
    first: int = 1

    @property
    def title(self) -> str:
        return f"`{self.file}`" if self.file else ""

    @property
    def language(self) -> str:
        if self.file:
            return "python" if self.file.endswith(".py") else "c++"
        try:
            ast.parse(textwrap.dedent(self.text))
        except SyntaxError:
            return "c++"
        return "python"

    def has(self, name: str) -> bool:
        return name in regions.regions(self.text)

    def lines(self, name: str | None = None) -> list[Line]:
        """The numbered lines of a region, or of all, without blank ones at the ends."""
        lines = [(number + self.first - 1, text.rstrip()) for number, text in regions.numbered(self.text, name)]
        full = [i for i, (_, text) in enumerate(lines) if text]
        return lines[full[0] : full[-1] + 1] if full else []

    def caption(self, pieces: Sequence[tuple[str, list[Line]]]) -> str:
        where = [
            f"lines {lines[0][0]} to {lines[-1][0]}{f', *{name}*' if name else ''}" for name, lines in pieces if lines
        ]
        return ": ".join(filter(None, (self.title, "; ".join(where))))


def _read(obj: Any, whole_file: bool = True) -> _Source:
    if isinstance(obj, str):
        return _Source(obj)
    path = obj if isinstance(obj, Path) else getattr(obj, "path", None)  # of a step
    if isinstance(path, Path):
        return _Source(path.read_text(encoding="utf-8"), path.name)
    # A Triton kernel wraps the Python function; what a reader wants to see is the function.
    target = getattr(obj, "fn", obj)
    try:
        file = Path(inspect.getsourcefile(target) or "")
        if file.suffix == ".py" and file.is_file() and (whole_file or inspect.ismodule(target)):
            return _Source(file.read_text(encoding="utf-8"), file.name)
        lines, first = inspect.getsourcelines(target)
    except (OSError, TypeError) as error:
        raise TypeError(f"{obj!r} has no source text that Python can find") from error
    return _Source("".join(lines), file.name if file.suffix == ".py" and file.is_file() else "", max(first, 1))


def _show(*parts: str) -> None:
    display(Markdown("\n\n".join(parts)))


def _fold(summary: str, body: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def _monospaced(block: str) -> str:
    # nbconvert gives a fence in an output the font of its parent, so the parent has a monospaced one; in JupyterLab
    # it also takes away the fence's wide margins.
    return f"<samp>\n\n{block}\n\n</samp>"


def _listing(pieces: Sequence[list[Line]], language: str) -> str:
    """Numbered lines as a highlighted block, pieces apart by an ellipsis."""
    digits = len(str(max((number for lines in pieces for number, _ in lines), default=1)))
    blocks = []
    for lines in pieces:
        kept = _dedented(lines)
        texts = _closed_up([text for _, text in kept], WIDTH - digits - 2)
        heads = [f"{number:{digits}}  " for number, _ in kept]
        blocks.append("\n".join(row for pair in zip(heads, texts, strict=True) for row in _rows(*pair)))
    separator = f"\n{'⋮':>{digits}}\n"
    # Not "cpp": JupyterLab highlights C++ under its own name only; all the others know both.
    return _monospaced(f"```{language}\n{separator.join(blocks)}\n```")


@dataclass(frozen=True)
class _Change:
    sign: str  # "+", "-" or " "
    number: int | None  # in the new file
    text: str


def _changes(old: list[Line], new: list[Line], context: int) -> list[_Change | None]:
    """The changed lines and `context` around them; None stands between places that are apart."""
    before, after = _dedented(old), _dedented(new)
    keys = [[_meaning(text) for _, text in lines] for lines in (before, after)]
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    out: list[_Change | None] = []
    for group in matcher.get_grouped_opcodes(context):
        if out:
            out.append(None)
        for tag, a, b, c, d in group:
            if tag != "equal":
                out += [_Change("-", None, text) for _, text in before[a:b]]
            out += [_Change(" " if tag == "equal" else "+", number, text) for number, text in after[c:d]]
    return out


def _meaning(text: str) -> str:
    """What of a line is compared: not the word `New:`, with which a step of the series marks what it adds, nor the
    column in which a comment stands."""
    code, mark, comment = text.partition("//")
    if not mark:
        return text
    return f"{code.rstrip()} // {comment.strip().removeprefix('New:').strip().lower()}"


def _marked(pieces: Sequence[Sequence[_Change | None]]) -> str:
    """Changes as a block in which what comes and what goes has a background.

    No diff fence: JupyterLab and nbconvert give that no colours. Where a host drops the style, the signs are left.
    """
    numbers = [change.number or 0 for piece in pieces for change in piece if change]
    digits = len(str(max(numbers, default=1)))
    rows: list[str] = []
    for piece in pieces:
        if rows and piece:
            rows.append(f"{'⋮':>{digits + 2}}")
        texts = _closed_up([change.text if change else "" for change in piece], WIDTH - digits - 4)
        for change, code in zip(piece, texts, strict=True):
            if change is None:
                rows.append(f"{'⋮':>{digits + 2}}")
                continue
            head = f"{change.sign} {change.number or '':>{digits}}  "
            color = {"+": _ADDED, "-": _REMOVED}.get(change.sign)
            for row in _rows(head, code, change.sign):
                text = html.escape(row, quote=False)
                rows.append(f'<span style="background-color: {color}">{text}</span>' if color else text)
    return _monospaced(f"<pre><code>{chr(10).join(rows)}</code></pre>")


def _dedented(lines: list[Line]) -> list[Line]:
    """Without the indentation that all share; a preprocessor line, which has none, is not asked."""
    indents = [len(text) - len(text.lstrip()) for _, text in lines if text.strip() and not text.startswith("#")]
    shared = min(indents, default=0)
    return [(number, text if text.startswith("#") else text[shared:]) for number, text in lines]


def _closed_up(texts: Sequence[str], room: int) -> list[str]:
    """Comments that stand in a column behind the code, moved to the left together as far as the longest line needs."""
    too_long = max((len(text) - room for text in texts if _BEHIND.match(text)), default=0)
    if too_long <= 0:
        return list(texts)
    return [_BEHIND.sub(lambda m: m[1] + " " * max(2, len(m[2]) - too_long) + m[3], text) for text in texts]


def _rows(head: str, text: str, sign: str = "") -> Iterator[str]:
    """A line of code behind its number, in as many rows of at most WIDTH characters as it takes."""
    room = WIDTH - len(head)
    if len(text) > room and text.endswith("----"):
        text = text[: max(room, len(text.rstrip("-")))]  # a rule across the page
    at = _cut(text, room, len(text) - len(text.lstrip()))
    yield f"{head}{text[:at]}".rstrip()
    rest = text[at:].strip()
    comment = re.match(r" *(//|#(?= )) ?", text)
    indent = comment[0] if comment else " " * min(len(text) - len(text.lstrip()) + 4, room // 2)
    while rest:
        at = _cut(indent + rest, room, len(indent))
        yield f"{sign}{' ' * (len(head) - len(sign))}{(indent + rest)[:at]}".rstrip()
        rest = (indent + rest)[at:].strip()


def _cut(text: str, room: int, indent: int) -> int:
    """Where to break a line: before a comment, else at the last space that leaves `room` characters."""
    if len(text) <= room:
        return len(text)
    comment = _BEHIND.match(text)
    if comment and comment.end(1) <= room:
        return comment.end(1)
    space = text.rfind(" ", indent + 1, room + 1)
    return space if space > 0 else room


# ---- tables and animations -------------------------------------------------------------------------------------------
def table(rows: Iterable[Sequence[Any]], columns: Sequence[str], *, align: str | None = None) -> None:
    """Show rows as a table (see `flashlab.table.Table.of`)."""
    display(Table.of(rows, columns, align=align))


def folded(shown: Table, summary: str) -> None:
    """Show a long table as one line, `summary`, which opens it."""
    display(Markdown(_fold(summary, shown._repr_markdown_())))


def gif(figures: Iterable[Figure], *, seconds_a_frame: float = 0.8, dpi: int = 80) -> Image:
    """Turn figures into an animated GIF, shown in the notebook; each figure is closed once drawn.

    figures: one a frame, all of one size; a generator keeps only one of them alive at a time. seconds_a_frame: how long
    each stays, the last one 2 longer. Raises ValueError without a figure.
    """
    from PIL import Image as Picture

    frames, words = [], ""
    for figure in figures:
        words = in_words(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
        plt.close(figure)
        frames.append(Picture.open(buffer).convert("RGB").quantize(64, dither=Picture.Dither.NONE))
    if not frames:
        raise ValueError("an animation needs at least one figure")
    durations = [int(1000 * seconds_a_frame)] * len(frames)
    durations[-1] += 2000
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    # Labelled PNG on purpose: exporters and code hosts drop image/gif from a notebook, and every browser looks at the
    # bytes, not at the label. In JupyterLab, in exported HTML and on a code host it plays.
    return Image(data=out.getvalue(), format="png", alt=f"Animation: {words}")
