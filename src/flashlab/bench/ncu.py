"""Nsight Compute, asked from Python: which counters the kernels of a process leave behind.

    rows = profile(harness.calling(hardware.launch, "naive"), {"read": "dram__bytes_read.sum"})

The profiled process may announce what it is about to launch: a line that begins with ``LAUNCH `` and goes on in JSON is
handed back with the rows of the kernels that came after it.
"""

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flashlab.bench.records import NoGpu


def available() -> bool:
    """Whether this machine has the profiler."""
    return shutil.which("ncu") is not None


def known(metrics: Mapping[str, str]) -> dict[str, str]:
    """Those of the metrics that this ncu can count on this GPU: it refuses all where it does not know one."""
    if not available():
        return dict(metrics)
    said = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=120).stdout
    names = {line.split()[0] for line in said.splitlines() if line.strip()}
    # What it reads of the launch is in no list.
    kept = {n: m for n, m in metrics.items() if m.partition(".")[0] in names or m.startswith("launch__")}
    return kept if names else dict(metrics)


def profile(
    arguments: Sequence[str], metrics: Mapping[str, str], *, kernels: str | None = None, only_marked: bool = False,
    keep_caches: bool = False, timeout: float = 400,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs `python ARGUMENTS` under ncu; one row per kernel launch, in order.

    Args:
        metrics: name -> ncu's metric. kernels: a regular expression that a kernel's name has to match.
        only_marked: only what is launched between torch.cuda.profiler.start() and stop().
        keep_caches: a kernel finds in L2 what the one before it left; else ncu empties the caches before each kernel.
            The metrics must then be few enough for one pass (ncu restores memory between passes, through the L2).
    Returns:
        rows: {"kernel": its name, "launch": what was announced last before it or None, and each metric's value}.

    Raises:
        NoGpu: there is no ncu here, or it gave no counters; the message has its words.
    """
    if not available():
        raise NoGpu("counters need Nsight Compute (ncu), and there is none on the PATH")
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(metrics.values())]
    command += ["-k", f"regex:{kernels}"] if kernels else []
    command += ["--profile-from-start", "off"] if only_marked else []
    command += ["--cache-control", "none"] if keep_caches else []
    done = subprocess.run([*command, sys.executable, *arguments], capture_output=True, text=True, timeout=timeout)
    if not (rows := parse(done.stdout, metrics)):
        raise NoGpu(f"ncu gave no counters: {(done.stderr or done.stdout).strip()[-400:]}")
    return rows


def parse(text: str, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of what ``ncu --csv --page raw`` printed; [] where there is no table."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    # ncu prints its table at the end, and in front of it what the process printed, with a line for each launch.
    announced: list[Any] = []
    launches: list[Any] = []
    for line in lines[:start]:
        if line.startswith("LAUNCH "):
            announced.append(json.loads(line.removeprefix("LAUNCH ")))
        elif line.startswith("==PROF== Profiling "):
            launches.append(announced[-1] if announced else None)
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]  # the first row holds the units
    if len(launches) != len(table):  # its lines went elsewhere: one kernel for each, or nothing is known
        launches = announced if len(announced) == len(table) else [None] * len(table)
    return [
        {"kernel": row["Kernel Name"], "launch": launch} | {name: _number(row.get(m)) for name, m in metrics.items()}
        for launch, row in zip(launches, table, strict=True)
    ]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
