"""What phase 11 shows: a tile as it lies in shared memory, the counts of a step, and who works when.

chunks(ax, held, "128-byte swizzle")
show.table([row("p11_1_tma")], COLUMNS)
timelines({"turns": replayed("p11_7_ping_pong")}, clocks=(2000, 6000))
"""

import functools
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from flashlab.cuda import load_inline
from flashlab.figures.ladder import counted
from flashlab.figures.show import COLORS
from flashlab.kernels.regions import numbered
from flashlab.kernels.series import step
from flashlab.simt.replay import Replay, replay

COLUMNS = [
    "step", "mma", "wgmma", "ldmatrix", "wavefronts", "KB read by wgmma", "copies", "KB by TMA", "barriers", "waits",
    "stores",
]  # fmt: skip


def row(name: str, **options: Any) -> list[Any]:
    """A step's counts under COLUMNS: one head of 384 queries and keys, unless the options (of `counted`) say otherwise.

    mma, ldmatrix, copies (loads from global memory and cp.async), stores (to global memory, TMA's too) and waits (at
    mbarriers) count once per warp, wgmma per warpgroup, barriers per block.
    """
    r = counted(name, **({"n": 384} | options))
    c = r.counters
    copies, stores = c["global_loads"] + c["cp_async"], c["global_stores"] + c["tma_stores"]
    reads = [c["ldmatrix"], c.wavefronts, c["wgmma_bytes"] // 1024]
    waits = [c["barriers"], c["mbarrier_waits"]]
    return [name, c["mma"], c["wgmma"], *reads, copies, c["tma_load_bytes"] // 1024, *waits, stores]


_HUES = [COLORS[name] for name in ("blue", "orange", "green", "red", "purple", "sky", "yellow", "grey")]


def chunks(ax: Axes, held: torch.Tensor, title: str) -> None:
    """Draws lines of 128 bytes of shared memory, eight chunks of 16 bytes each, coloured by their place in the row.
    held: [lines, 8], the number of the chunk that lies there: row of the tile * 8 + chunk of the row."""
    for line, places in enumerate(held.tolist()):
        for place, number in enumerate(places):
            row, chunk = divmod(number, 8)
            ax.add_patch(Rectangle((place, line), 0.94, 0.9, color=_HUES[chunk % len(_HUES)], alpha=0.55, lw=0))
            ax.text(place + 0.47, line + 0.45, f"{row}·{chunk}", ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, 8), ylim=(len(held), 0), xlabel="place in the line, 16 bytes each", ylabel="line of 128 bytes")
    ax.set_title(title)
    ax.set_xticks([x + 0.47 for x in range(8)], [str(x) for x in range(8)])
    ax.set_yticks([y + 0.45 for y in range(len(held))], [str(y) for y in range(len(held))])
    ax.grid(False)


# ---- who works when --------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=16)
def replayed(name: str) -> Replay:
    """One block of a step of phase 11, from p11_2_wgmma on, under the model of clocks of flashlab.simt.replay: one head
    of 64 columns, 1024 keys, as many queries as the block has rows."""
    module = load_inline(step(name), check=True, head_dim=64)
    q, k, v = (torch.zeros(1, 1, n, 64, dtype=torch.half) for n in (1, 1024, 1024))
    module.forward(q, k, v, causal=False, sms=1, echo=False, timeline=1)
    text = step(name).path.read_text(encoding="utf-8")
    return replay(module.report.launches[0], [line for line, _ in numbered(text, "scores")])


_GROUP_HUES = [COLORS[name] for name in ("blue", "orange", "green", "purple")]
# Kept apart from the consumers' hues, and from each other in grey: a wait for a stage is the palest.
_WAITS = {"bytes": ("red", "bytes"), "release": ("light", "a free stage"), "products": ("sky", "products"),
          "barrier": ("black", "its turn")}  # fmt: skip


def timelines(plots: Mapping[str, Replay], *, clocks: tuple[float, float]) -> Figure:
    """One panel for each: the copies, the producer, the tensor cores, and each consumer, over the model's clocks.

    A consumer has its colour on every line. On the tensor cores it is paler for the scores, full for the output; on its
    own line a bar is exponentials, and a thin line a wait, coloured by what for (never in a consumer's colour). Waits
    for a turn are a few clocks: they are high, and at least as wide as can be seen.
    """
    lines = {title: _lines(found) for title, found in plots.items()}
    visible = (clocks[1] - clocks[0]) / 300
    figure, axes = plt.subplots(
        len(plots), 1, figsize=(9, 0.9 * len(plots) + 0.27 * sum(map(len, lines.values()))), sharex=True,
        squeeze=False, height_ratios=[len(some) for some in lines.values()], layout="constrained",
    )  # fmt: skip
    for ax, (title, found) in zip(axes.flat, plots.items(), strict=True):
        consumers, at = _consumers(found), lines[title]
        for s in found.spans:
            hue = _GROUP_HUES[consumers.index(s.group) % len(_GROUP_HUES)] if s.group in consumers else COLORS["grey"]
            own = at.get("producer" if s.group not in consumers else f"consumer {consumers.index(s.group)}")
            bar: dict[str, Any] = {"left": s.begin, "width": s.end - s.begin, "height": 0.8, "edgecolor": "white"}
            if s.what == "copy":
                ax.barh(at["copies"], **bar, linewidth=0.4, color=COLORS["grey"], alpha=0.5)
            elif s.what in ("scores", "output"):
                pale = 0.45 if s.what == "scores" else 1.0
                ax.barh(at["tensor cores"], **bar, linewidth=0.4, color=hue, alpha=pale)
            elif s.what == "exponentials":
                ax.barh(own, **bar, linewidth=0.4, color=hue)
            else:
                turn = {"height": 1.0, "width": max(visible, s.end - s.begin), "zorder": 3}
                bar |= turn if s.what == "barrier" else {"height": 0.16}
                ax.barh(own, **bar, linewidth=0, color=COLORS[_WAITS[s.what][0]])
        ax.set(yticks=range(len(at)), yticklabels=list(at), xlim=clocks)
        ax.set_title(title, fontsize=10)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("clocks of the model")
    spans = [s for found in plots.values() for s in found.spans if s.end > clocks[0] and s.begin < clocks[1]]
    seen = {s.what for s in spans if s.end - s.begin > visible or s.what == "barrier"}
    # Boxes for bars, in a consumer's hue; thin lines for waits, as they are drawn
    hue = _GROUP_HUES[0]
    keys = [Patch(color=hue, alpha=0.45, label="pale: S = Q K^T"),
            Patch(color=hue, label="full: O += P V, exponentials"),
            *(Line2D([], [], color=COLORS[hue], linewidth=3, label=f"waits for {text}")
              for what, (hue, text) in _WAITS.items() if what in seen)]  # fmt: skip
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8, handlelength=1.2,
                  columnspacing=1.2)  # fmt: skip
    return figure


def _lines(found: Replay) -> dict[str, int]:
    """What a panel has lines for, by name."""
    consumers = _consumers(found)
    producer = ["producer"] if any(s.group not in consumers for s in found.of("copy")) else []
    names = ["copies", *producer, "tensor cores", *(f"consumer {i}" for i in range(len(consumers)))]
    return {name: i for i, name in enumerate(names)}


def _consumers(found: Replay) -> list[int]:
    return sorted({s.group for s in found.of("scores")})
