"""Phase 0: small matrices to check by hand, and a row of scores that is read key by key or block by block."""

from collections.abc import Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from flashlab.attention.online_softmax import State, shifted_exp
from flashlab.figures.show import COLORS


def matrices(named: Mapping[str, torch.Tensor], *, rows: Mapping[str, int]) -> Figure:
    """Matrices of as many rows side by side, by title, number by number. rows: by title the row to be highlighted."""
    figure, axes = plt.subplots(1, len(named), figsize=(9, 2.1), width_ratios=[x.shape[1] for x in named.values()])
    for ax, (name, x) in zip(axes, named.items(), strict=True):
        for (i, j), value in zip(torch.cartesian_prod(*map(torch.arange, x.shape)).tolist(), x.flatten(), strict=True):
            hot = rows.get(name) == i
            face = COLORS["orange"] if hot else COLORS["light"]
            ax.add_patch(plt.Rectangle((j, i), 0.94, 0.9, facecolor=face, alpha=0.8 if hot else 1))
            ax.text(j + 0.47, i + 0.47, f"{value.item():.4g}", ha="center", va="center")
        ax.set(title=name, xlim=(0, x.shape[1]), ylim=(x.shape[0], 0), aspect="equal")
        ax.axis("off")
    return figure


def read_once(
    scores: torch.Tensor, running_max: torch.Tensor, correction: torch.Tensor, l: torch.Tensor, title: str
) -> Figure:
    """What the one-pass softmax keeps after each key of a row: scores and their maximum, the correction, the sum; each
    [N], one entry a key."""
    keys = range(len(scores))
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1.6, 1.6])
    top.plot(scores, ".", color=COLORS["grey"], label="score")
    top.step(keys, running_max, where="post", color=COLORS["red"], label="running maximum m")
    room = 0.3 * (scores.max() - scores.min())  # for the legend
    top.set(ylabel="score", title=title, ylim=(scores.min() - 0.5, scores.max() + room))
    top.legend(ncols=2, loc="upper left")
    middle.stem(keys, correction.tolist(), linefmt=COLORS["blue"], markerfmt=" ", basefmt=" ")
    middle.set(ylabel="correction", ylim=(0, 1.1))
    bottom.plot(l, color=COLORS["green"])
    bottom.set(ylabel="sum l", xlabel="key j")
    return figure


def block_frames(scores: torch.Tensor, states: Sequence[State]) -> Iterator[Figure]:
    """A row that is read in blocks, one figure a block: scores [N] with the maximum, the sum l, the output so far.
    states: of the row before the first block (the identity), and after each block; o is [2]."""
    blocks, final = len(states) - 1, states[-1].o / states[-1].l
    block, low, high = len(scores) // blocks, scores.min().item() - 1, scores.max().item() + 0.6
    for b, (old, new) in enumerate(zip(states, states[1:], strict=False)):
        seen, correction = b * block, shifted_exp(old.m, new.m).item()
        kept = old.l.item() * correction
        figure, axes = plt.subplot_mosaic([["x", "x"], ["l", "o"]], figsize=(7, 4.4), height_ratios=[1.3, 1])
        colors = ["blue"] * seen + ["orange"] * block + ["light"] * (len(scores) - seen - block)
        axes["x"].bar(range(len(scores)), (scores - low).tolist(), bottom=low, color=[COLORS[name] for name in colors])
        axes["x"].hlines(new.m.item(), -0.5, seen + block - 0.5, color=COLORS["red"])
        axes["x"].set(ylim=(low, high), xlim=(-0.7, len(scores) - 0.3), xlabel="key", ylabel="score",
                      title=f"block {b + 1} of {blocks}   m = {new.m:.2f}   correction = {correction:.2f}")  # fmt: skip
        axes["l"].barh([0], [kept], color=COLORS["blue"], label="old l × correction")
        axes["l"].barh([0], [new.l.item() - kept], left=[kept], color=COLORS["orange"], label="this block")
        axes["l"].barh([0], [old.l.item()], fill=False, linestyle=":", edgecolor=COLORS["black"], label="old l")
        widest = 1.05 * max(state.l.item() for state in states)
        axes["l"].set(xlim=(0, widest), ylim=(-0.6, 1.2), yticks=[], xlabel="sum l", title=f"l = {new.l:.2f}")
        axes["l"].legend(loc="upper right", ncols=3, fontsize=7, columnspacing=1, handlelength=1.2)
        axes["o"].bar([0, 1], (new.o / new.l).tolist(), color=COLORS["green"], width=0.6)
        for d in (0, 1):
            axes["o"].hlines(final[d].item(), d - 0.4, d + 0.4, color=COLORS["black"], linestyle="--")
        axes["o"].axhline(0, color=COLORS["grey"], linewidth=0.8)
        axes["o"].set(ylim=(-2, 2), xticks=[0, 1], xlabel="component d", ylabel="o / l", title="output so far")
        yield figure
