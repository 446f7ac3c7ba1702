"""A small table that reads well in a notebook (HTML) and in a terminal (text, or rich where rich prints it)."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

_NUMERIC = set("0123456789.e+-×∞ ")


@dataclass(frozen=True)
class Table:
    """Rows of strings under `columns`, and a caption below; columns of numbers are set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def _right(self, column: int) -> bool:
        cells = [row[column] for row in self.rows]
        return any(cells) and all(set(cell) <= _NUMERIC for cell in cells)

    def __repr__(self) -> str:
        if not self.rows:
            return self.caption
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def text(line: tuple[str, ...]) -> str:
            sized = enumerate(zip(line, widths, strict=True))
            return "  ".join(x.rjust(w) if self._right(i) else x.ljust(w) for i, (x, w) in sized).rstrip()

        rule = "  ".join("─" * width for width in widths)
        return "\n".join([text(self.columns), rule, *map(text, self.rows), *([self.caption] if self.caption else [])])

    def __rich__(self) -> Any:
        import rich.table  # only where a rich console prints the table

        table = rich.table.Table(caption=self.caption, caption_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if self._right(i) else "left")
        for row in self.rows:
            table.add_row(*row)
        return table if self.rows else self.caption

    def _repr_html_(self) -> str:
        caption = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        if not self.rows:
            return caption

        def line(cells: tuple[str, ...], tag: str) -> str:
            sides = ("right" if self._right(i) else "left" for i in range(len(cells)))
            styled = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for cell, side in styled)

        head, body = line(self.columns, "th"), "".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{caption}"
