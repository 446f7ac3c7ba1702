"""What a profiler saw: its Chrome trace as bars in time, and the memory that was in use.

operations(trace)          the events of a trace that no other one holds
timeline(ax, events, ...)  them as bars
allocated(trace)           bytes in use over time
units(ax, bars, title)     what the units of a chip do at which time, from a model of it
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flashlab.figures.show import COLORS

Event = tuple[str, str, float, float]  # "CPU" or "GPU", its name, when it begins, how long it takes; microseconds

KERNEL_KINDS = {
    "attention in one kernel": ("green", ("flash", "fmha", "attention", "cudnn")),
    "products": ("blue", ("gemm", "nvjet", "cutlass", "xmma")), "softmax": ("orange", ("softmax",)),
    "RoPE in one kernel": ("purple", ("rope_kernel",)),
    "operations on single numbers": ("red", ("elementwise", "CatArray")),
}  # fmt: skip
"""What the names of a GPU's kernels tell of them, for `timeline`."""

_UNITS = {"cpu_op": "CPU", "kernel": "GPU", "gpu_memcpy": "GPU", "gpu_memset": "GPU"}


def operations(trace: Mapping[str, Any]) -> list[Event]:
    """The outermost operations on the CPU, and the kernels on the GPU, in a Chrome trace; time begins at 0.

    Args:
        trace: as torch.profiler's export_chrome_trace writes it, read by json.
    """
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in _UNITS]
    begin = min((e["ts"] for e in found), default=0.0)
    kept, until = [], dict[tuple[Any, Any], float]()
    for e in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
        line = (e["pid"], e["tid"])
        if e["cat"] == "cpu_op" and e["ts"] < until.get(line, -1.0):
            continue  # inside of another one
        until[line] = e["ts"] + e["dur"]
        kept.append((_UNITS[e["cat"]], e["name"], e["ts"] - begin, float(e["dur"])))
    return kept


def timeline(ax: Axes, events: Sequence[Event], kinds: Mapping[str, tuple[str, Iterable[str]]], title: str) -> None:
    """Draw events as bars on a line for the CPU and, where there is one, for the GPU. kinds: (name of a colour, parts
    of names) by what is said in the legend; the first that fits counts, and what fits none is grey."""
    units = [unit for unit in ("CPU", "GPU") if any(e[0] == unit for e in events)]
    used = dict[str, str]()
    for unit, name, start, length in events:
        kind, (color, _) = next(
            ((k, v) for k, v in kinds.items() if any(part in name for part in v[1])), ("other", ("grey", ()))
        )
        used[kind] = color
        ax.barh(units.index(unit), length, 0.7, left=start, color=COLORS[color], edgecolor="white", linewidth=0.3)
    ax.set(yticks=range(len(units)), yticklabels=units, title=title, ylim=(len(units) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    named = [k for k in [*kinds, "other"] if k in used]
    ax.legend([Patch(color=COLORS[used[k]]) for k in named], named, fontsize=8, ncols=len(named),
              loc="upper left", bbox_to_anchor=(0, -0.16), columnspacing=1.1, handlelength=1.2)  # fmt: skip


def allocated(trace: Mapping[str, Any], *, device: bool = False) -> tuple[list[float], list[int]]:
    """Times in milliseconds, and bytes in use since the trace began, after each allocation and each release.

    Args:
        trace: of a profile with profile_memory=True. device: of the GPU's memory, else of the CPU's.
    """
    found = [e for e in trace["traceEvents"] if e.get("name") == "[memory]"]
    found = sorted((e for e in found if (e["args"]["Device Type"] != 0) == device), key=lambda e: e["ts"])
    begin = found[0]["ts"] if found else 0.0
    times = [(e["ts"] - begin) / 1e3 for e in found]
    return times, list(itertools.accumulate(int(e["args"]["Bytes"]) for e in found))


Bar = tuple[str, str, int, int]  # unit, name, when it begins, how long it takes


def units(ax: Axes, bars: Sequence[Bar], title: str) -> None:
    """Draws a bar for each thing that is done, coloured by the first letter of its name; paler, if the last is b."""
    lines = list(dict.fromkeys(unit for unit, *_ in bars))
    kinds = sorted({name[0] for _, name, *_ in bars})
    hues = [COLORS[hue] for hue in ("grey", "green", "orange", "sky", "light", "purple")]
    end = max(start + length for *_, start, length in bars)
    for unit, name, start, length in bars:
        second = name.endswith("b")
        ax.barh(lines.index(unit), length, 0.78, left=start, color=hues[kinds.index(name[0]) % len(hues)],
                edgecolor="white", linewidth=1, alpha=0.55 if second else 1)  # fmt: skip
        if length > 0.012 * end:
            ax.text(start + length / 2, lines.index(unit), name, ha="center", va="center",
                    fontsize=8 if length > 0.03 * end else 6)  # fmt: skip
    ax.set(yticks=range(len(lines)), yticklabels=lines, xlabel="clocks", title=title)
    ax.invert_yaxis()
    ax.label_outer()
    ax.grid(axis="y", visible=False)
