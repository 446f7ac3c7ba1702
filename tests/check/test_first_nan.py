"""The line that makes a NaN, among those that make harmless ones."""

import linecache
import textwrap

import pytest
import torch

from flashlab.check.first_nan import where_made

INF = float("inf")


def _made(text, name="<a cell>"):
    """What is said of a function `answer` with this text; its lines are known, as a notebook's are."""
    text = textwrap.dedent(text)
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    names = {"torch": torch, "INF": INF, "__name__": "a cell"}
    exec(compile(text, name, "exec"), names)
    return where_made(names["answer"])


@pytest.mark.parametrize(
    "lines, said",
    [
        ("m = torch.full((2,), -INF)\n    return m - m", "`return m - m`: -inf - (-inf)"),
        ("l = torch.zeros(2)\n    l = l * torch.exp(torch.full((2,), INF))\n    return l",
         "`l = l * torch.exp(torch.full((2,), INF))`: inf * 0"),
        ("l = torch.zeros(2)\n    c = torch.exp(torch.full((2,), 1e4))\n    l *= c\n    return l",
         "`l *= c`: inf * 0, where inf comes from `c = torch.exp(torch.full((2,), 1e4))`"),
        ("l = torch.zeros(2)\n    return l / l", "`return l / l`: 0 / 0"),
        # One NaN that is dropped, and one that a maximum hides:
        ("z = torch.zeros(2)\n    x = torch.where(z > 0, z / z, 1.0)\n    return x * torch.log(-x)",
         "`return x * torch.log(-x)`: in log"),
        ("z = torch.zeros(2)\n    x = z / z\n    return torch.nan_to_num(x) + 1", None),
        ("z = torch.zeros(2)\n    x = (z - 1).sqrt()\n    return torch.nan_to_num(x, nan=5.0)",
         "`x = (z - 1).sqrt()`: in sqrt"),
        ("return torch.ones(2) + 1", None),
        ("return torch.tensor([float('nan')]) * 2", "`return torch.tensor([float('nan')]) * 2`: in tensor"),
    ],
)  # fmt: skip
def test_the_line_that_makes_it(lines, said):
    assert _made(f"def answer():\n    {lines}\n") == said
