"""All records' rows in one schema, and questions to them.

found = rows.of(data)
rows.where(found, part="shapes", name={"p11", "cuDNN"})
rows.over(rows.by(found, "D", "N"), "p11", "cuDNN")  # how many times as fast, at each (D, N)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashlab.table import Table

Row = dict[str, Any]
Data = Mapping[str, Any]
At = dict[tuple, dict[str, Row]]  # rows by name, at each value of some keys
Lines = dict[str, tuple[list[int], list[float]]]
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "f32"}


class Missing(ValueError):
    """A question to which a record has no answer."""


def of(data: Data) -> list[Row]:
    """Every row of a record, whatever its bench calls things.

    Each has what its bench wrote, and: part, name, pass, causal, inputs, dtype (DTYPES' values, unless the row itself
    says it otherwise); shape, [batch, heads, N, D], with N, D and work, where there is one; seq_q, where there are
    not as many queries as keys; tflops, where a forward pass has a time.
    """
    default = {"causal": False, "inputs": "randn", "dtype": DTYPES.get(data.get("dtype", "float16"))}
    found = []
    for own in data.get("rows", ()):
        row: Row = default | {"pass": "backward" if own["part"] == "backward" else "forward"} | own
        row.setdefault("name", row.get("variant") or row["part"])
        shape = row.setdefault(
            "shape", [row.get("batch", 1), row.get("heads", 1), row.get("seq_len"), row.get("head_dim")]
        )
        if len(shape) == 4 and None not in shape:
            row |= {"N": shape[2], "D": shape[3], "work": math.prod(shape) * row.get("seq_q", shape[2])}
            if "ms" in row and row["pass"] == "forward":
                row.setdefault("tflops", 4 * row["work"] / (1 + row["causal"]) / row["ms"] / 1e9)
        found.append(row)
    return found


def where(some: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows whose items are the wanted ones: each a value, or a set of them."""

    def fits(value: Any, want: Any) -> bool:
        return value in want if isinstance(want, set | frozenset) else value == want

    return [r for r in some if all(fits(r.get(key), want) for key, want in wanted.items())]


def by(some: Iterable[Row], *keys: str) -> At:
    """At each value of the keys its rows by name; of two with the same name the last."""
    found: At = {}
    for r in some:
        values = (r[key] for key in keys)
        found.setdefault(tuple(tuple(x) if isinstance(x, list) else x for x in values), {})[r["name"]] = r
    return found


def lines(some: Iterable[Row], names: Iterable[str], column: str = "tflops", unit: float = 1.0) -> Lines:
    """By name, where it has any: the lengths N, rising, and a column of its rows in a unit."""
    found: Lines = {}
    for name in names:
        if points := sorted((r["N"], r[column] * unit) for r in where(some, name=name) if column in r):
            found[name] = [n for n, _ in points], [y for _, y in points]
    return found


def names_in(at: Mapping[Any, Mapping[str, Row]]) -> list[str]:
    """Every name, in the order in which they come."""
    return list(dict.fromkeys(name for rows in at.values() for name in rows))


def over(at: At, name: str, peer: str) -> dict[tuple, float]:
    """How many times as fast as a peer one is, wherever both have a time. Raises Missing where that is nowhere."""
    both = {key: (r[name], r[peer]) for key, r in at.items() if all("ms" in r.get(n, {}) for n in (name, peer))}
    if not both:
        raise Missing(f"{name} and {peer} were timed nowhere both")
    return {key: theirs["ms"] / ours["ms"] for key, (ours, theirs) in both.items()}


def grid(
    at: At, keys: Sequence[str], cell: Callable[[Row], str], names: Iterable[str] = (), caption: str = "",
    whole: str = "whole",
) -> Table:  # fmt: skip
    """A line for each key, a column for each name (by default for all in their order); "" where one has no row. whole:
    what a mask is called that is not causal."""
    names = list(names) or names_in(at)
    lines = [
        [*((whole, "causal")[x] if isinstance(x, bool) else x for x in key)]
        + [cell(rows[name]) if name in rows else "" for name in names]
        for key, rows in at.items()
    ]
    align = "".join("r" if key in ("D", "N") else "l" for key in keys) + "r" * len(names)
    return Table.of(lines, [*keys, *names], align=align, caption=caption)
