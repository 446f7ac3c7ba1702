"""Who sees which memory, what one load fetches, and which tile is on chip when."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashlab.figures.show import COLORS
from flashlab.runtime import GpuLimits


def _box(ax: Axes, x: float, y: float, w: float, h: float, color: str, text: str = "", size: float = 9) -> None:
    ax.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor="white", linewidth=1.5))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size,
            color="white" if color == COLORS["blue"] else "black")  # fmt: skip


def machine(gpu: GpuLimits) -> Figure:
    """A GPU from its threads to its main memory: what each kind of memory is called, and how large it is on `gpu`."""
    figure, ax = plt.subplots(figsize=(8.5, 4.4))
    _box(ax, 0, 1.0, 12, 5.1, "#F6F6F6")
    ax.text(0.15, 5.9, f"the chip: {gpu.sms} multiprocessors (SM)", va="center", fontsize=9, fontweight="bold")
    for i, name in enumerate(("multiprocessor 0", "multiprocessor 1 ...")):
        x = 0.15 + 5.9 * i
        _box(ax, x, 2.0, 5.8, 3.65, COLORS["light"])
        ax.text(x + 0.15, 5.4, name, va="center", fontsize=9)
        for w in range(4):
            y = 4.75 - 0.42 * w
            ax.text(x + 0.15, y + 0.16, f"warp {w}" if w < 3 else "...", va="center", fontsize=8)
            for t in range(32):
                ax.add_patch(Rectangle((x + 0.9 + 0.094 * t, y), 0.075, 0.34, facecolor=COLORS["blue"]))
        ax.text(x + 4.05, 4.33, f"threads, 32 per warp,\neach with its registers\n"
                f"({gpu.registers_per_sm * 4 // 1024} KiB in all)", va="center", fontsize=8)  # fmt: skip
        _box(ax, x + 0.15, 2.8, 5.5, 0.5, COLORS["green"], "tensor cores: multiply tiles")
        shared = f"shared memory: up to {gpu.shared_per_block // 1024} KiB per program"
        _box(ax, x + 0.15, 2.15, 5.5, 0.5, COLORS["orange"], shared)
    _box(ax, 0.15, 1.15, 11.7, 0.6, COLORS["sky"], f"L2 cache, for all multiprocessors: {gpu.l2_bytes // 2**20} MiB")
    size = gpu.memory_bytes // 2**30  # the datasheet's GB
    hbm = f"HBM: {size} GB, {gpu.memory_gb_s or 0:.0f} GB/s (datasheet). Q, K, V and O lie here"
    _box(ax, 0, 0, 12, 0.75, COLORS["yellow"], hbm)
    ax.set(xlim=(0, 12), ylim=(0, 6.15), title=f"Where numbers can be ({gpu.name})")
    ax.axis("off")
    return figure


def hierarchy(global_memory: str, shared_memory: str, threads: str) -> Figure:
    """Global memory, blocks with their shared memory, and the warps of a block; each text names one of them."""
    figure, ax = plt.subplots(figsize=(8.5, 3.7))
    _box(ax, 0, 0, 12, 0.7, COLORS["yellow"], global_memory)
    for b in range(3):
        x = 4.05 * b
        _box(ax, x, 0.95, 3.9, 3.2, COLORS["light"])
        ax.text(x + 0.1, 3.95, f"block {b}" if b < 2 else "block 2 ...", va="center", fontsize=9, fontweight="bold")
        _box(ax, x + 0.15, 1.1, 3.6, 0.6, COLORS["orange"], shared_memory, 8)
        for w in range(2):
            y = 2.9 - 0.95 * w
            for t in range(8):
                _box(ax, x + 0.95 + 0.35 * t, y, 0.32, 0.7, COLORS["blue"])
            ax.text(x + 0.15, y + 0.35, f"warp {w}", va="center", fontsize=8)
    ax.text(6, -0.35, threads, ha="center", fontsize=9)
    ax.set(xlim=(0, 12), ylim=(-0.6, 4.3), title="Who sees which memory")
    ax.axis("off")
    return figure


def on_chip(ax: Axes, title: str, *, v: float = 1.0) -> None:
    """Q, K^T, V and S of one program that has a block of rows of Q: blue and orange are on the chip at one time; v: the
    share of V that is there."""
    blue, light, orange = COLORS["blue"], COLORS["light"], COLORS["orange"]
    for x, y, w, h in ((0, 0, 1, 4), (1.3, 4.3, 4, 1), (5.6, 0, 1, 4)):
        _box(ax, x, y, w, h, light)
    _box(ax, 0, 2, 1, 1, blue, "Q")
    _box(ax, 1.3, 4.3, 4, 1, blue, "Kᵀ")
    _box(ax, 5.6, 4 - 4 * v, 1, 4 * v, blue, "V")
    ax.add_patch(Rectangle((1.3, 0), 4, 4, fill=False, edgecolor=COLORS["grey"], linestyle="--"))  # nowhere now
    _box(ax, 1.3, 2, 4, 1, orange, "S, P: BLOCK_M × N")
    ax.set(xlim=(-0.1, 6.8), ylim=(-0.1, 5.5), aspect="equal", title=title)
    ax.axis("off")


def sectors(ax: Axes, stride: int, *, lanes: int = 32, shown: int = 80) -> None:
    """The floats that a warp asks for with this stride (dark), and those that come along in their sectors (light)."""
    for word in range(shown):
        fetched = word // 8 in {lane * stride // 8 for lane in range(lanes)}
        wanted = word % stride == 0 and word < lanes * stride
        shade = COLORS["blue"] if wanted else COLORS["sky"] if fetched else COLORS["light"]
        ax.add_patch(Rectangle((word, 0), 1, 1, facecolor=shade, edgecolor="white", linewidth=0.5))
    for sector in range(shown // 8 + 1):
        ax.axvline(8 * sector, color="black", linewidth=1.2)
    ax.set(xlim=(0, shown), ylim=(0, 1), yticks=[], xticks=range(0, shown + 1, 8), ylabel=f"stride {stride}")
    ax.grid(False)


def loop_order(ax: Axes, title: str, *, keys_outside: bool) -> None:
    """Which tile is on chip in which iteration of two nested loops; a number where it arrives."""
    hues = [COLORS[name] for name in ("blue", "orange", "green", "purple")]
    tiles = len(hues)
    before: tuple[int, ...] = ()
    for t in range(tiles * tiles):
        outer, inner = divmod(t, tiles)
        n, m = (outer, inner) if keys_outside else (inner, outer)
        now = (n, m, m)
        for row, (y, tile) in enumerate(zip((2, 1, 0), now, strict=True)):
            ax.add_patch(Rectangle((t, y + 0.1), 1, 0.8, facecolor=hues[tile]))
            if not before or before[row] != tile:
                ax.text(t + 0.5, y + 0.5, f"{tile}", ha="center", va="center", color="white", fontsize=9)
                ax.plot([t, t], [y + 0.1, y + 0.9], color="white", linewidth=2.5)
        before = now
    ax.set(xlim=(0, tiles * tiles), ylim=(0, 3), xlabel="inner iterations", title=title)
    ax.set_yticks([2.5, 1.5, 0.5], ["K, V", "Q", "O, m, l"])
    ax.grid(False)
