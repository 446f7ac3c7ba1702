"""What the README is made of: `python docs/figures.py` draws its figures and writes its table of the phases again.

python docs/figures.py [FOLDER]      with a folder, only the figures, into it

Its results are written by `flashlab bench readme`, from the records.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from flashlab.bench.records import write_whole
from flashlab.course import PHASES, readme_table
from flashlab.figures.show import COLORS

STACKS = {
    "torch": ("PyTorch", COLORS["blue"]),
    "triton": ("Triton", COLORS["orange"]),
    "cuda": ("CUDA C++", COLORS["green"]),
    "profiler": ("profiler", COLORS["purple"]),
    "hopper": ("Hopper", COLORS["red"]),
    "distributed": ("many GPUs", COLORS["sky"]),
}


def box(ax, x, y, width, height, face, edge="white", line=1.0, **other):
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, linewidth=line, **other))


def text(ax, x, y, words, size, **other):
    ax.text(x, y, words, fontsize=size, **{"ha": "center", "va": "center"} | other)


def arrow(ax, start, end, color, **other):
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, linewidth=1.6, **other))


def tiles():
    """One step of the forward pass: what is in HBM, what is on chip, and what is never stored."""
    rows, columns = 6, 8
    row, column = 2, 4  # the tile being computed
    fig, ax = plt.subplots(figsize=(13, 5.6), dpi=150)
    ax.set(xlim=(-2.5, 23.4), ylim=(9.5, -2.35), aspect="equal")
    ax.axis("off")

    blue, orange, green, grey = COLORS["blue"], COLORS["orange"], COLORS["green"], COLORS["grey"]
    for j in range(columns):  # K above, V below: one pair of blocks is on chip
        for y in (-1.5, rows + 0.4):
            box(ax, j, y, 1, 1.1, orange if j == column else "#F7E3B5")
    for i in range(rows):
        box(ax, -1.5, i, 1.1, 1, blue if i == row else "#BBD9EC")
        box(ax, columns + 0.4, i, 1.1, 1, green if i < row else ("#BFE5D9" if i == row else "white"), "#9CCBBB")
        for j in range(columns):
            done = i < row or (i == row and j < column)
            if (i, j) == (row, column):
                box(ax, j, i, 1, 1, COLORS["red"])
            else:
                box(ax, j, i, 1, 1, "#DADADA" if done else "white", "white" if done else "#CFCFCF", 0.8)
    dashed = {"fill": False, "linewidth": 1.4, "linestyle": (0, (4, 3)), "zorder": 3}
    ax.add_patch(Rectangle((0, 0), columns, rows, edgecolor=grey, **dashed))
    text(ax, column + 0.5, row + 0.5, "S, P", 11, color="white", weight="bold")
    text(ax, -0.95, row + 0.5, r"$Q_i$", 13, color="white")
    text(ax, column + 0.5, -0.95, r"$K_j$", 13)
    text(ax, column + 0.5, rows + 0.95, r"$V_j$", 13)
    text(ax, columns + 0.95, row + 0.5, r"$O_i$", 13)
    text(ax, -0.95, -0.3, "Q", 13, va="baseline", weight="bold")
    text(ax, -0.25, -0.95, "K", 13, ha="right", weight="bold")
    text(ax, -0.25, rows + 0.95, "V", 13, ha="right", weight="bold")
    text(ax, columns + 0.95, -0.3, "O", 13, va="baseline", weight="bold")
    text(ax, -2.0, 3, "BLOCK_M rows a block", 9.5, rotation=90, color="#444444")
    text(ax, 4, -1.85, "BLOCK_N rows a block", 9.5, va="baseline", color="#444444")
    arrow(ax, (column + 1.05, -0.95), (columns - 0.1, -0.95), "#8A5F00")
    arrow(ax, (column + 1.05, rows + 0.95), (columns - 0.1, rows + 0.95), "#8A5F00")
    note = "seq_len × seq_len scores: used once and\nthrown away. This matrix is never stored."
    text(ax, 4, 8.15, note, 10, va="top", color="#333333")

    left, width = 11.0, 12.0
    style = {"boxstyle": "round,pad=0.15", "facecolor": "#FAFAFA", "edgecolor": "#555555"}
    ax.add_patch(FancyBboxPatch((left, -1.2), width, 8.6, **style))
    text(ax, left + width / 2, -0.75, "on chip, for query block $i$", 12, weight="bold")
    steps = [
        (r"$S = Q_i\,K_j^{\top}\cdot\mathrm{scale}$", "one tile of scores", COLORS["red"]),
        (r"$m_\mathrm{new} = \max(m,\ \mathrm{rowmax}\,S)$", "the maximum may move", "#222222"),
        (r"$\mathrm{correction} = e^{\,m - m_\mathrm{new}}$", "rescales what was summed", "#222222"),
        (r"$P = e^{\,S - m_\mathrm{new}}$", "never larger than 1", COLORS["red"]),
        (r"$l = l\cdot\mathrm{correction} + \mathrm{rowsum}\,P$", "state: BLOCK_M numbers", blue),
        (r"$acc = acc\cdot\mathrm{correction} + P\,V_j$", "state: BLOCK_M × HEAD_DIM", blue),
    ]
    for k, (formula, words, color) in enumerate(steps):
        y = 0.35 + k * 0.92
        text(ax, left + 0.2, y, formula, 12, ha="left", color=color)
        text(ax, left + width - 0.1, y, words, 9, ha="right", color="#555555")
    ax.plot([left + 0.1, left + width - 0.1], [5.55, 5.55], color="#BBBBBB", linewidth=1)
    text(ax, left + 0.2, 6.05, r"after the last block:  $O_i = acc\,/\,l$", 13, ha="left", color="#00674C")
    text(ax, left + 0.2, 6.9, r"$\mathrm{lse}_i = m + \log l$", 13, ha="left", color="#00674C")
    text(ax, left + width - 0.1, 6.9, "all that is left of a row", 9.5, ha="right", color="#555555")
    note = (
        "What is on chip does not grow with seq_len. K and V are read once\n"
        "for each query block, Q and O once; no score ever goes to memory."
    )
    text(ax, left + width / 2, 8.15, note, 10, va="top", color="#333333")
    return fig


def bricks(ax, x, y, width, height, color):
    """A wall: rows of bricks, each second one shifted by half a brick."""
    rows, columns = 7, 3
    h, w = height / rows, width / columns
    for r in range(rows):
        shift = -w / 2 if r % 2 else 0.0
        for c in range(columns + (r % 2)):
            begin, end = max(x, x + shift + c * w), min(x + width, x + shift + (c + 1) * w)
            box(ax, begin, y + r * h, end - begin, h, color, "white", 1.2, zorder=2)


def course_map():
    """The phases as stations of one road, and the two walls on it."""
    fig, ax = plt.subplots(figsize=(12, 5.0), dpi=150)
    ax.set(xlim=(-0.75, 13.1), ylim=(-3.25, 2.65), aspect="equal")
    ax.axis("off")
    # Phase: (x, y); two rows, so that the titles have room.
    upper, lower = 1.0, -1.35
    at = {0: (0.1, upper), 1: (2.0, upper), 2: (7.5, upper), 3: (9.5, upper), 4: (11.4, upper)}
    at.update({5 + k: (11.7 - 1.43 * k, lower) for k in range(9)})
    at["11b"], at["11c"] = (2.4, lower + 0.85), (2.4, lower - 1.1)
    road = "#C9C9C9"
    ax.plot([at[0][0], 12.1], [upper, upper], color=road, linewidth=7, solid_capstyle="round", zorder=0)
    bend = [(12.1, upper), (12.75, upper), (12.75, lower), (12.1, lower)]
    path = matplotlib.path.Path(bend, [1, 4, 4, 4])
    ax.add_patch(matplotlib.patches.PathPatch(path, fill=False, edgecolor=road, linewidth=7, zorder=0))
    ax.plot([12.1, at[13][0] - 0.5], [lower, lower], color=road, linewidth=7, solid_capstyle="round", zorder=0)

    for x, what, words, color in (
        (3.75, "physical wall", "K and V do not fit\ninto shared memory", COLORS["red"]),
        (5.75, "logical wall", "Triton does not\nslice a tensor", "#A6611A"),
    ):
        bricks(ax, x - 0.3, upper - 0.62, 0.6, 1.24, color)
        text(ax, x, upper + 0.82, what, 10.5, va="bottom", weight="bold", color=color)
        text(ax, x, upper - 0.72, words, 9, va="top", color="#444444", linespacing=1.15)

    names = {
        0: "Attention and\nonline softmax", 1: "Naive\nattention", 2: "Simulation in\nplain PyTorch",
        3: "Minimal\nTriton kernel", 4: "Industrial\nTriton", 5: "Backward\npass", 6: "Scalar\nCUDA C++",
        7: "Tensor\ncores", 8: "Pipelines\nand banks", 9: "Past Flash-\nAttention-2",
        10: "Profiling a\ntransformer", 11: "Hopper", "11b": "Gluon", "11c": "Tuned", 12: "Decoding", 13: "Many\nGPUs",
    }  # fmt: skip
    for phase in PHASES:
        x, y = at[phase.number]
        color = STACKS["triton" if phase.number == 1 or phase.kind == "gluon" else phase.kind][1]
        ax.add_patch(Circle((x, y), 0.36, facecolor=color, edgecolor=color, linewidth=2.6, zorder=3))
        number_color = "white" if phase.kind == "torch" else "black"
        text(ax, x, y, str(phase.number), 13, weight="bold", color=number_color, zorder=4)
        text(ax, x, y - 0.5, names[phase.number], 9.5, va="top", linespacing=1.15)
    for k, (name, color) in enumerate(STACKS.values()):
        x = 0.1 + 1.6 * k
        ax.add_patch(Circle((x, 2.42), 0.13, facecolor=color, edgecolor=color))
        ax.text(x + 0.24, 2.42, name, va="center", fontsize=9.5)
    return fig


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("tiles", tiles), ("course_map", course_map)):
        fig = draw()
        fig.savefig(folder / f"{name}.png", bbox_inches="tight", facecolor="white", metadata={"Software": None})
        plt.close(fig)


def write_phases(readme: Path) -> None:
    """Put the table of the phases, as flashlab.course has it, between the README's marks."""
    begin, end = "<!-- phases: written by docs/figures.py -->", "<!-- end of the phases -->"
    before, _, rest = readme.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    write_whole(readme, f"{before}{begin}\n\n{readme_table()}\n\n{end}{after}".encode())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        main(Path(__file__).resolve().parent)
        write_phases(Path(__file__).resolve().parents[1] / "README.md")
