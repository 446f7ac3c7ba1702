"""What a lane holds of the operands of mma.m16n8k16, as formulas and as figures.

A is [16, 16], B is [16, 8], C and D are [16, 8]. A register of A or B holds two 16-bit elements, its halves 0 (lower)
and 1 (upper); a register of C holds one float. A fragment is a tensor [32 lanes, registers, halves], of C [32, 4].
Every function takes numbers or tensors of them. With g = lane // 4 and t = lane % 4 these are the figures of the PTX
ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from flashlab.figures.show import COLORS

A_SHAPE, B_SHAPE, C_SHAPE = (16, 16), (16, 8), (16, 8)
_REGISTERS = {"a": 4, "b": 2, "c": 4}
_HUES = [COLORS[name] for name in ("sky", "orange", "green", "purple")]


def a_position(lane: Any, register: Any, half: Any) -> tuple[Any, Any]:
    """The (row, column) of A that this half of a0 .. a3 holds."""
    g, t = lane // 4, lane % 4
    return g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)


def b_position(lane: Any, register: Any, half: Any) -> tuple[Any, Any]:
    """The (row, column) of B that this half of b0, b1 holds."""
    g, t = lane // 4, lane % 4
    return 2 * t + half + 8 * register, g


def c_position(lane: Any, register: Any) -> tuple[Any, Any]:
    """The (row, column) of C that c0 .. c3 holds."""
    g, t = lane // 4, lane % 4
    return g + 8 * (register // 2), 2 * t + register % 2


_POSITION: dict[str, Callable[..., tuple[Any, Any]]] = {"a": a_position, "b": b_position, "c": c_position}


def slots(operand: str) -> list[torch.Tensor]:
    """All (lane, register, half) of "a" or "b", all (lane, register) of "c": tensors of the fragment's shape."""
    halves = [] if operand == "c" else [torch.arange(2)]
    return list(torch.meshgrid(torch.arange(32), torch.arange(_REGISTERS[operand]), *halves, indexing="ij"))


def fragment(matrix: torch.Tensor, operand: str) -> torch.Tensor:
    """What the lanes hold of a matrix that is the operand "a", "b" or "c"."""
    rows, columns = _POSITION[operand](*slots(operand))
    return matrix[rows, columns].contiguous()


def matrix(held: torch.Tensor, operand: str) -> torch.Tensor:
    """The matrix whose fragment this is."""
    rows, columns = _POSITION[operand](*slots(operand))
    out = torch.full((16, 16 if operand == "a" else 8), float("nan"), dtype=torch.float64)
    out[rows, columns] = held.double().cpu()
    return out


def draw(
    ax: Axes,
    held: torch.Tensor,
    shape: Sequence[int],
    names: str | Sequence[str],
    *,
    outlined: Sequence[int] = (),
    hues: Sequence[int] = (0, 1, 2, 3),
    fontsize: float = 6.0,
) -> None:
    """Draws who holds which element of a matrix of this shape, (rows, columns).

    held: a fragment of the matrix of indices, row * columns + column; [32, registers, halves] or [32, registers].
    names: of the registers, or one letter, which they are numbered after. outlined: lanes whose registers get a black
    frame. hues: which of four colours a register has.
    """
    rows, columns = shape
    held = held.reshape(32, held.shape[1], -1)
    for lane in range(32):
        for register in range(held.shape[1]):
            places = [divmod(int(index), columns) for index in held[lane, register]]
            # The halves of a register are neighbours; a layout in which they are not would be drawn as a large box.
            top, left = min(r for r, _ in places), min(c for _, c in places)
            height, width = max(r for r, _ in places) - top + 1, max(c for _, c in places) - left + 1
            framed = lane in outlined
            ax.add_patch(Rectangle((left, top), width, height, facecolor=_HUES[hues[register]], alpha=0.45, lw=0))
            ax.add_patch(Rectangle((left, top), width, height, fill=False, ec="black" if framed else "white",
                                   lw=1.6 if framed else 0.8, zorder=3 if framed else 2))  # fmt: skip
            name = f"{names}{register}" if isinstance(names, str) else names[register]
            between = "\n" if height > width else " "
            ax.text(left + width / 2, top + height / 2, f"T{lane}{between}{name}", ha="center", va="center",
                    fontsize=fontsize, zorder=4)  # fmt: skip
    _frame(ax, shape)


def addresses(
    ax: Axes, rows: torch.Tensor, columns: torch.Tensor, shape: Sequence[int], *, fontsize: float = 6.5
) -> None:
    """Draws which lane of an ldmatrix names which row of 8 elements of a matrix of this shape, coloured by the register
    that it is for. rows, columns: of the element at which the row begins that lane 0, 1, ... names."""
    for lane, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        hue = _HUES[lane // 8]
        ax.add_patch(Rectangle((column, row), 8, 1, facecolor=hue, alpha=0.45, ec="white", lw=0.8))
        ax.text(column + 4, row + 0.5, f"lane {lane}", ha="center", va="center", fontsize=fontsize)
    _frame(ax, shape)


def _frame(ax: Axes, shape: Sequence[int]) -> None:
    """The axes of a matrix: a number for each row and each column, which is written above."""
    rows, columns = shape
    ax.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal")
    ax.set_xticks([c + 0.5 for c in range(columns)], range(columns), fontsize=7)
    ax.set_yticks([r + 0.5 for r in range(rows)], range(rows), fontsize=7)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)


def quads(ax: Axes, values: torch.Tensor, final: torch.Tensor, title: str) -> None:
    """What the lanes hold, a line for each quad: dark where it is the final value already; both [8, 4], lane 4 g + t at
    [g, t]."""
    ax.imshow((values == final).numpy(), cmap="Blues", vmin=-0.3, vmax=2.2, aspect="auto")
    for n, value in enumerate(values.flatten().tolist()):
        ax.text(n % 4, n // 4, f"{value:.0f}", ha="center", va="center", fontsize=9)
    ax.set(title=title, xlabel="t = lane % 4", xticks=range(4), yticks=range(8))
    ax.grid(False)


Holders = Mapping[tuple[int, int], tuple[int, int]]  # by (row, column) of a tile: the warp and the lane that hold it


def warps(ax: Axes, holder: Holders, shape: Sequence[int], title: str) -> None:
    """A tile of this shape in the colours of the warps that hold its elements."""
    rows, columns = shape
    warp = [[holder[row, column][0] for column in range(columns)] for row in range(rows)]
    ax.imshow(warp, cmap=ListedColormap(_HUES), vmin=-0.5, vmax=len(_HUES) - 0.5, alpha=0.6, aspect="auto")
    for number in sorted({w for line in warp for w in line}):
        mine = [(r, c) for r in range(rows) for c in range(columns) if warp[r][c] == number]
        row, column = (sum(place) / len(mine) for place in zip(*mine, strict=True))
        ax.text(column, row, f"warp {number}", ha="center", va="center")
    ax.set(title=title, xlabel="column", ylabel="row")
    ax.grid(False)


def lanes(ax: Axes, holder: Holders, shape: Sequence[int], title: str, *, marked: int | None = None) -> None:
    """The first rows and columns of a tile, each element with the lane that holds it; one lane's are dark."""
    rows, columns = shape
    for row in range(rows):
        for column in range(columns):
            lane = holder[row, column][1]
            dark = lane == marked
            hue = COLORS["black"] if dark else _HUES[lane // 4 % 4]
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=hue, alpha=1 if dark else 0.45, ec="white", lw=0.8))
            ax.text(column + 0.5, row + 0.5, str(lane), ha="center", va="center", fontsize=7,
                    color="white" if dark else "black")  # fmt: skip
    _frame(ax, shape)
    ax.set(title=title)
