"""The steps of the series side by side: what the emulator counts for each, and how fast each is.

r = counted("p8_4_swizzle")                 # a Report of the watched build, one head, N = 256, compared with float64
grow(table, "p8_4_swizzle")                 # adds its row to a table that grows through the lecture
ladder_figure(run, (4, 16, 4096, 128), causal=False)
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashlab.attention import reference
from flashlab.cuda import load_inline
from flashlab.figures import show
from flashlab.figures.implementations import look, looks
from flashlab.figures.show import COLORS
from flashlab.kernels.series import step
from flashlab.simt import Report


# ---- counted ---------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=128)
def counted(
    name: str, *, n: int = 256, head_dim: int = 64, heads: int = 1, causal: bool = False, sms: int = 1,
    shared_limit: int | None = None, **defines: int,
) -> Report:  # fmt: skip
    """Runs a step's watched build on [1, heads, n, head_dim] in fp16; the report has the counters.

    sms: multiprocessors that the kernel is told of: with 1 the last steps take the tiles of a large grid. shared_limit:
    bytes that a block may ask for, of the device that is played. defines: macros of the step. Raises AssertionError
    where the result is not that of the oracle, or the emulator found something.
    """
    module = load_inline(step(name), check=True, head_dim=head_dim, defines=defines)
    options = {"sms": sms} | ({"shared_limit": shared_limit} if shared_limit else {})
    return run(module, n=n, head_dim=head_dim, heads=heads, causal=causal, **options)


def run(
    module: Any, *, n: int = 256, head_dim: int = 64, heads: int = 1, causal: bool = False, sms: int = 1,
    tensors: Sequence[torch.Tensor] | None = None, **options: Any,
) -> Report:  # fmt: skip
    """Runs an emulated kernel on [1, heads, n, head_dim] in fp16, compares it with the oracle, returns its report.
    tensors: q, k and v; random ones of that shape, if None."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = tensors or (torch.randn(1, heads, n, head_dim, generator=generator).half() for _ in range(3))
    o, lse = module.forward(q, k, v, causal=causal, sms=sms, echo=False, **options)
    report = module.report
    want, want_lse = reference.attention(q, k, v, causal=causal)
    assert report.ok, report
    assert (o - want).abs().max() < 2e-3, f"o is off by {(o - want).abs().max():.2g}"
    assert (lse - want_lse).abs().max() < 1e-4, f"lse is off by {(lse - want_lse).abs().max():.2g}"
    return report


def prepare(names: Iterable[str]) -> None:
    """Compiles the steps' watched builds, two at a time; ``counted`` then finds them in the cache."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: load_inline(step(name), check=True), names))


COLUMNS = ["step", "mma", "ldmatrix", "shared wavefronts", "conflicts", "barriers", "copies", "sectors read", "stores"]


def row(name: str, **options: Any) -> list[Any]:
    """A step's row of the growing table, under COLUMNS.

    copies: instructions that bring something from global memory, a warp's; stores: a warp's, to global memory.
    """
    r = counted(name, **options)
    c = r.counters
    label = " ".join([name, *(f"{k}={v}" for k, v in options.items() if k.isupper())])
    copies, sectors = c["global_loads"] + c["cp_async"], c["global_load_sectors"] + c["cp_async_sectors"]
    instructions = [c["mma"], c["ldmatrix"], c.wavefronts, c.bank_conflicts, c["barriers"]]
    return [label, *instructions, copies, sectors, c["global_stores"]]


def grow(table: list[list[Any]], name: str, **options: Any) -> None:
    """Adds a step's row to the table, and shows it under the row before."""
    table.append(row(name, **options))
    show.table(table[-2:], COLUMNS)


def conflicts_and_ideal(table: Sequence[Sequence[Any]], prices: Mapping[str, float]) -> Figure:
    """Wavefronts per MMA of each step of the growing table, rows under COLUMNS: bank conflicts, and what is left. Two
    panels, as the first are ten times the second. prices: by GPU the clocks that an MMA takes there, drawn as lines."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.9), sharey=True, width_ratios=[1, 1.25])
    y = range(len(table))
    for ax, values, color, title in (
        (left, [r[4] / r[1] for r in table], "red", "bank conflicts"),
        (right, [(r[3] - r[4]) / r[1] for r in table], "blue", "all other wavefronts"),
    ):
        ax.barh(y, values, color=COLORS[color])
        for i, value in enumerate(values):
            ax.text(value, i, f" {value:.1f}" if value else " 0", va="center", fontsize=8)
        ax.set(xlabel="shared wavefronts per MMA", title=title, xlim=(0, 1.12 * max(values)))
        ax.grid(axis="y", visible=False)
    for (gpu, clocks), color in zip(prices.items(), ("green", "purple", "orange"), strict=False):
        right.axvline(clocks, color=COLORS[color], linestyle="--", linewidth=1.4, label=gpu)
    right.legend(title="clocks per MMA", loc="lower right", fontsize=8, title_fontsize=8, frameon=True)
    left.set_yticks(y, [r[0] for r in table])
    left.invert_yaxis()
    return figure


# ---- timed -----------------------------------------------------------------------------------------------------------
def ladder_figure(run: dict[str, Any], shape: Sequence[int], causal: bool) -> Figure | None:
    """Bars of TFLOP/s by step from a recorded run (flashlab.bench.mma), FlashAttention-2 as a line.

    None, where the run has nothing at this shape.
    """
    rows = _at(run, shape, causal)
    peer = next((r for r in rows if r["name"] == "fa2"), None)
    rows = [r for r in rows if r["name"] != "fa2" and "=" not in r["name"]]
    if not rows or peer is None:
        return None
    figure, ax = plt.subplots(figsize=(7.8, 4.6))
    y = range(len(rows))
    ax.barh(y, [r["tflops"] for r in rows], color=COLORS[look("this course").color])
    errors = [[r["tflops"] * abs(r["ms"] / r[which] - 1) for r in rows] for which in ("slowest", "fastest")]
    speeds = [r["tflops"] for r in rows]
    ax.errorbar(speeds, list(y), xerr=errors, fmt="none", ecolor=COLORS["black"], elinewidth=1)
    top = max(r["tflops"] for r in [*rows, peer])
    for i, r in enumerate(rows):
        inside = r["tflops"] > 0.3 * top
        ax.text((0 if inside else r["tflops"]) + 0.02 * top, i, f"{r['tflops']:.0f}  ({r['vs_fa2']:.2f})", va="center",
                color="white" if inside else "black", fontsize=8)  # fmt: skip
    hue = COLORS[look(peer["name"]).color]
    ax.axvline(peer["tflops"], color=hue)
    ax.annotate(f"FlashAttention-2: {peer['tflops']:.0f}", (peer["tflops"], 1), (-6, 0), ("data", "axes fraction"),
                "offset points", ha="right", va="top", color=hue, fontsize=9, fontweight="bold")  # fmt: skip
    ax.set_yticks(list(y), [r["name"] for r in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.08 * top)
    b, h, n, d = shape
    ax.set(xlabel="TFLOP/s (in brackets: of FlashAttention-2)",
           title=f"B {b}, H {h}, N {n}, D {d}{', causal' if causal else ''}: {run['machine']['gpu']}")  # fmt: skip
    return figure


def gains(run: dict[str, Any], shape: Sequence[int], causal: bool, inputs: str = "randn") -> dict[str, float]:
    """Of a recorded run: each step's speed over the step's before, by name; {} where the run has not this shape."""
    rows = [r for r in _at(run, shape, causal, inputs) if r["name"] != "fa2" and "=" not in r["name"]]
    return {b["name"]: b["tflops"] / a["tflops"] for a, b in zip(rows, rows[1:], strict=False)}


def speeds(run: dict[str, Any], shape: Sequence[int], causal: bool, inputs: str = "randn") -> dict[str, dict[str, Any]]:
    """The rows of a recorded ladder at a shape, by name: "tflops", "vs_fa2", "registers", "spill_bytes"."""
    return {r["name"]: r for r in _at(run, shape, causal, inputs)}


def _at(run: dict[str, Any], shape: Sequence[int], causal: bool, inputs: str = "randn") -> list[dict[str, Any]]:
    """The rows of a recorded ladder at a shape, measured on inputs of that kind."""
    wanted = (list(shape), causal, inputs)
    return [r for r in run.get("ladder", []) if (r["shape"], r["causal"], r.get("inputs", "randn")) == wanted]


Key = tuple[int, int, int, str]  # batch, heads, seq_len, variant


def _shapes(ms: Mapping[Key, float]) -> list[tuple[int, int, int]]:
    return sorted({key[:3] for key in ms}, key=lambda s: (s[2], s[0] * s[1], s))


def _joined(shapes: Sequence[tuple[int, int, int]], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Positions and values of shapes in a row, for a line that joins those of one N and breaks before the next."""
    found: list[tuple[float, float]] = []
    for i, value in enumerate(y):
        if i and shapes[i][2] != shapes[i - 1][2]:
            found.append((i - 0.5, math.nan))
        found.append((i, value))
    return [x for x, _ in found], [value for _, value in found]


def times(ax: Axes, ms: Mapping[Key, float], names: Mapping[str, tuple[str, str]], title: str) -> None:
    """Times in ms by shape, the small shapes on the left. names: by variant (label, name of a colour; "" for that of
    the implementation)."""
    shapes = _shapes(ms)
    for variant, (label, color) in names.items():
        ax.plot(
            *_joined(shapes, [ms[(*s, variant)] for s in shapes]), "o-", markersize=3.5, linewidth=1.4,
            color=COLORS[color or look(variant).color], label=label,
        )  # fmt: skip
    ax.set_xticks(range(len(shapes)), [f"{b}·{h}\n{n}" for b, h, n in shapes], fontsize=7)
    ax.set(yscale="log", ylabel="ms (log scale)", xlabel="batch · heads, below it N", title=title)
    ax.legend(fontsize=8)


def small_multiples(
    ms: Mapping[Key, float], steps: Mapping[str, str], base: tuple[str, str], also: tuple[str, str], title: str
) -> Figure:
    """One panel a step: its speed over a peer's, by shape, the other steps in grey, another peer dashed.

    ms: milliseconds. steps: labels by variant. base, also: (variant, label): what speeds are relative to, and the other
    peer.
    """
    shapes, hues = _shapes(ms), {n: COLORS[one.color] for n, one in looks(["this course", base[0], also[0]]).items()}
    speed = {v: _joined(shapes, [ms[(*s, base[0])] / ms[(*s, v)] for s in shapes]) for v in (*steps, also[0])}
    figure, axes = plt.subplots(-(-len(steps) // 3), 3, figsize=(9, 5), sharex=True, sharey=True, squeeze=False)
    for ax, (variant, label) in zip(axes.flat, steps.items(), strict=False):
        for other in steps:
            ax.plot(*speed[other], color=COLORS["light"], linewidth=1.2)
        ax.axhline(1, color=hues[base[0]], linewidth=1.3)
        ax.plot(*speed[also[0]], "--", color=hues[also[0]], linewidth=1.3, label=also[1])
        ax.plot(*speed[variant], "o-", color=hues["this course"], markersize=3.5, linewidth=1.6)
        ax.set_title(label, fontsize=10)
        ax.set(yscale="log")
    first = {n: i for i, (_, _, n) in reversed(list(enumerate(shapes)))}  # of each length
    for ax in axes[-1]:
        labels = [f"{b * h}" + (f"\nN = {n}" if first[n] == i else "") for i, (b, h, n) in enumerate(shapes)]
        ax.set_xticks(range(len(shapes)), labels, fontsize=7)
        ax.set_xlabel("heads in all", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"speed / {base[1]}", fontsize=9)
    values = [v for _, series in speed.values() for v in series if v == v]
    marks = [m for m in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if min(values) * 0.8 <= m <= max(values) * 1.3]
    axes[0, 0].set_yticks(marks, [f"{m:g}" for m in marks])
    axes[0, 0].minorticks_off()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper right", fontsize=9)
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    return figure
