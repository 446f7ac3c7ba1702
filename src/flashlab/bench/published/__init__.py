"""Figures that earlier courses published, as they printed them; README.md beside this file says what was run where.

>>> rows = load("mma_stages_ada")
>>> rows[0]
{'batch': 1, 'heads': 1, 'seq_len': 1024, 'head_dim': 64, 'variant': 'naive_unfused', 'ms': 0.096726}
"""

import csv
from pathlib import Path

FOLDER = Path(__file__).parent

NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))  # the tables there are

Value = int | float | str | None


def load(name: str) -> list[dict[str, Value]]:
    """The rows of one table, by column name; ints and floats as such, an empty cell as None, "OOM" (it ran out of
    memory) and other words as text. Raises KeyError, naming the tables, for one that there is not."""
    if name not in NAMES:
        raise KeyError(f"no published table is called {name!r}; there are {', '.join(NAMES)}")
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [{column: _value(text) for column, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None
