"""A small table that reads well in a notebook (Markdown) and in a terminal (text, or rich where rich prints it)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_RULE = {"l": ":--", "c": ":-:", "r": "--:"}


@dataclass(frozen=True)
class Table:
    """Rows of text under `columns`, and a caption below.

    align: one letter for each column, `l`, `c` or `r`. heads: the rows that head a group of rows.
    Make one from values with `Table.of`.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    align: str = ""
    heads: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[Any]], columns: Sequence[str], *, align: str | None = None, caption: str = ""
    ) -> "Table":
        """A table of values: floats with four significant digits, integers in groups of three.

        Args:
            rows: each as long as `columns`.
            align: by default numbers to the right, the rest to the left.
        Raises:
            ValueError: a row, or `align`, is not as long as `columns`.
        """
        kept = [list(row) for row in rows]
        for row in kept:
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} cells, but the table has {len(columns)} columns: {row!r}")
        if align is None:
            numeric = [
                bool(kept) and all(isinstance(row[i], (int, float)) for row in kept) for i in range(len(columns))
            ]
            align = "".join("r" if n else "l" for n in numeric)
        if len(align) != len(columns):
            raise ValueError(f"align={align!r} has {len(align)} letters for {len(columns)} columns")
        return cls(tuple(columns), tuple(tuple(map(_cell, row)) for row in kept), caption, align)

    def _side(self, column: int) -> str:
        return self.align[column] if self.align else "l"

    def __repr__(self) -> str:
        if not self.rows:
            return self.caption
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        turn = {"l": str.ljust, "c": str.center, "r": str.rjust}

        def text(line: Sequence[str]) -> str:
            return "  ".join(turn[self._side(i)](x, widths[i]) for i, x in enumerate(line)).rstrip()

        rule = "  ".join("─" * width for width in widths)
        body = [line for i, row in enumerate(self.rows) for line in ([""] * (i > 0 and i in self.heads) + [text(row)])]
        return "\n".join([text(self.columns), rule, *body, *([self.caption] if self.caption else [])])

    def _repr_markdown_(self) -> str:
        if not self.rows:
            return self.caption
        rule = [_RULE[self._side(i)] for i in range(len(self.columns))]
        lines = [self.columns, rule]
        for i, row in enumerate(self.rows):
            cells = [x.replace("|", "\\|") for x in row]
            lines.append([f"**{x}**" if x and i in self.heads else x for x in cells])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{table}\n\n{self.caption}" if self.caption else table

    def __rich__(self) -> Any:
        import rich.table  # only where a rich console prints the table

        if not self.rows:
            return self.caption
        table = rich.table.Table(caption=self.caption, caption_justify="left")
        sides: dict[str, Any] = {"l": "left", "c": "center", "r": "right"}
        for i, column in enumerate(self.columns):
            table.add_column(column, justify=sides[self._side(i)])
        for i, row in enumerate(self.rows):
            if i in self.heads:
                table.add_section()
            table.add_row(*row, style="bold" if i in self.heads else None)
        return table


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.4g}"
    if isinstance(x, int) and not isinstance(x, bool):
        return f"{x:,}".replace(",", " ")
    return str(x)
