"""Phase 2's animation: which tiles of Q, K, V, S and O are where, while the simulation runs.

The figures are drawn from the `Step`s of a real run, so the numbers in them are the simulation's own.
"""

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashlab.attention.simulation import Step, flash_attention_forward_sim
from flashlab.figures.show import COLORS

_TILE = {"Q": COLORS["blue"], "K": COLORS["orange"], "V": COLORS["green"], "S": COLORS["purple"], "O": COLORS["red"]}
_EMPTY = "#FFFFFF"
_GRID, _SIDE = (3.4, 2.3), 7.6  # lower left corner and side of S
_CHIP = 15.0  # where the chip begins


def tile_frames(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, BLOCK_M: int, BLOCK_N: int) -> Iterator[Figure]:
    """Run the simulation on one head, Q [M, HEAD_DIM], K and V [N, HEAD_DIM], and draw a figure after each key block
    and each store of O. M and N of at most 8 are legible, with two rows a block."""
    sizes = Q.shape[0], K.shape[0], BLOCK_M, BLOCK_N
    read, written = 0, 0
    size = Q.element_size()
    for start_m in range(0, len(Q), BLOCK_M):
        Q_block = Q[start_m : start_m + BLOCK_M]
        steps: list[Step] = []
        O_block, lse = flash_attention_forward_sim(Q_block, K, V, BLOCK_N, trace=steps.append)
        read += Q_block.numel() * size
        for step in steps:
            keys = step.s.shape[1]
            read += keys * (K.shape[1] + V.shape[1]) * size
            yield _frame(sizes, start_m, step, (read, written))
        written += O_block.numel() * size + 4 * lse.numel()
        yield _frame(sizes, start_m, steps[-1], (read, written), (O_block, lse))


def tile_figure(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, BLOCK_M: int, BLOCK_N: int, frame: int) -> Figure:
    """One figure of `tile_frames`, by its number; the others are closed."""
    for i, figure in enumerate(tile_frames(Q, K, V, BLOCK_M, BLOCK_N)):
        if i == frame:
            return figure
        plt.close(figure)
    raise IndexError(f"there is no frame {frame}: the animation has {i + 1}")


Sizes = tuple[int, int, int, int]  # M, N, BLOCK_M, BLOCK_N
Stored = tuple[torch.Tensor, torch.Tensor]  # O and lse of a block of queries


def _frame(sizes: Sizes, start_m: int, step: Step, moved: tuple[int, int], stored: Stored | None = None) -> Figure:
    figure, ax = plt.subplots(figsize=(8.4, 4.0), layout="none")
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99)
    ax.set(xlim=(0, 27.6), ylim=(0, 13.1), aspect="equal")
    ax.axis("off")
    _hbm(ax, sizes, start_m, step.start_n, stored is not None)
    _chip(ax, step, stored)
    what = ": divide by l_i, store O and lse" if stored else f", key block {step.start_n // sizes[3]}"
    _text(ax, 0.2, 12.6, f"query block {start_m // sizes[2]}{what}", 12, ha="left", weight="bold")
    _text(ax, 0.5, 0.6, f"HBM bytes so far: {moved[0]} read, {moved[1]} written", 10, ha="left")
    return figure


def _text(ax: Axes, x: float, y: float, words: str, size: float, **style: Any) -> None:
    ax.text(x, y, words, fontsize=size, va="center", **{"ha": "center"} | style)


def _box(ax: Axes, x: float, y: float, w: float, h: float, color: str, **style: object) -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=style.pop("edgecolor", "#666666"), lw=0.8, **style))


def _hbm(ax: Axes, sizes: Sizes, start_m: int, start_n: int, storing: bool) -> None:
    M, N, BLOCK_M, BLOCK_N = sizes
    _box(ax, 0.15, 0.1, 14.2, 11.9, "#D6E4F0", edgecolor="none")
    _text(ax, 0.4, 11.4, "HBM", 11, ha="left", weight="bold", color="#44586A")
    left, low = _GRID
    top = low + _SIDE
    row, col = _SIDE / M, _SIDE / N

    def across(name: str, y: float, h: float, label_y: float) -> None:
        for n in range(0, N, BLOCK_N):
            live = n == start_n and not storing
            _box(ax, left + n * col, y, min(BLOCK_N, N - n) * col, h, _TILE[name] if live else _EMPTY)
        _text(ax, left - 0.35, label_y, name, 11, ha="right", color=_TILE[name], weight="bold")

    def down(name: str, x: float, done: bool) -> None:
        for m in range(0, M, BLOCK_M):
            live = m == start_m and (name == "Q" or storing)
            color = _TILE[name] if live else "#F0C2B8" if done and m < start_m else _EMPTY
            h = min(BLOCK_M, M - m) * row
            _box(ax, x, top - m * row - h, 0.9, h, color)
        _text(ax, x + 0.45, top + 0.45, name, 11, color=_TILE[name], weight="bold")

    across("K", top + 0.95, 0.8, top + 1.35)
    across("V", low - 1.05, 0.8, low - 0.65)
    down("Q", left - 1.6, False)
    down("O", left + _SIDE + 0.7, True)
    for m in range(0, M, BLOCK_M):
        for n in range(0, N, BLOCK_N):
            w, h = min(BLOCK_N, N - n) * col, min(BLOCK_M, M - m) * row
            x, y = left + n * col, top - m * row - h
            live = (m, n) == (start_m, start_n) and not storing
            gone = m < start_m or (m == start_m and (n < start_n or storing))
            _box(ax, x, y, w, h, _TILE["S"] if live else "none", edgecolor="#999999", ls="-" if live else ":")
            if gone:
                _text(ax, x + w / 2, y + h / 2, "gone", 8, color="#555555")
    _text(ax, left + _SIDE / 2, top + 0.45, "S and P: one tile at a time, never stored", 9, color="#555555")


def _chip(ax: Axes, step: Step, stored: Stored | None) -> None:
    _box(ax, _CHIP, 0.1, 12.4, 11.9, "#FFEFC2", edgecolor="none")
    brown = {"ha": "left", "color": "#7A5C00"}
    _text(ax, _CHIP + 0.3, 11.4, "on chip", 11, weight="bold", **brown)
    for i, (name, kind) in enumerate((("q", "Q"), ("k", "K"), ("v", "V"), ("s, then p", "S"))):
        x = _CHIP + 0.6 + 3.0 * i
        live = stored is None or kind == "Q"
        _box(ax, x, 8.6, 2.0, 1.5, _TILE[kind] if live else _EMPTY)
        _text(ax, x + 1.0, 10.5, name, 10)
    _text(ax, _CHIP + 0.3, 7.6, "the state, one line for each query row", 9, **brown)
    heads, rule = ["m_i", "correction", "l_i", "acc"], "l_i, acc: old times correction, plus new"
    vectors, wide = [step.m_i, step.correction, step.l_i], step.acc
    if stored is not None:
        heads, rule = ["m_i", "lse", "l_i", "O = acc / l_i"], "O = acc / l_i,  lse = m_i + log(l_i)"
        vectors, wide = [step.m_i, stored[1], step.l_i], stored[0].float()
    at = [_CHIP + x for x in (1.3, 3.9, 6.2, 9.8)]
    for x, head in zip(at, heads, strict=True):
        _text(ax, x, 6.6, head, 10, weight="bold")
    _text(ax, _CHIP + 0.3, 0.6, rule, 10, **brown)
    for r in range(step.m_i.shape[0]):
        y = 5.3 - 1.3 * r
        for x, vector in zip(at, vectors, strict=False):
            _text(ax, x, y, f"{vector[r].item():.2f}", 10)
        color = _TILE["O"] if stored else "black"
        _text(ax, at[3], y, "  ".join(f"{a:.2f}" for a in wide[r].tolist()), 10, color=color)


def walk(ax: Axes, rows: int, columns: int, keeps: str, number: int, *, causal: bool = False) -> None:
    """The tiles that one program visits, numbered in its order, among all the tiles of P, rows of queries and columns
    of keys. keeps: "keys" walks down the column `number`, "queries" along the row `number`."""
    step = 0
    for i in range(rows):
        for j in range(columns):
            hidden = causal and j > i
            mine = (j if keeps == "keys" else i) == number and not hidden
            color = _TILE["S"] if mine else "#FFFFFF" if hidden else COLORS["light"]
            ax.add_patch(Rectangle((j, i), 0.94, 0.94, facecolor=color, edgecolor=COLORS["grey"], linewidth=0.6))
            if mine:
                step += 1
                ax.text(j + 0.47, i + 0.47, str(step), ha="center", va="center", fontsize=10)
    ax.set(xlim=(-0.1, columns), ylim=(rows, -0.1), aspect="equal", xticks=[], yticks=[])
    ax.set(xlabel="blocks of keys", ylabel="blocks of queries")
    ax.grid(visible=False)
    ax.spines[["left", "bottom"]].set_visible(False)
