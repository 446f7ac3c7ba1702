"""How fast the emulator is: the rebuild of an edited kernel, and one head of FlashAttention.

    python -m flashlab.bench.simt_speed [--json FILE]

Nothing is asserted: a test that times is a test that fails on a busy machine. ``AIMS`` are for two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from flashlab.simt import compile_cuda, find_compiler

AIMS = {
    "rebuild, fast": 2.0,
    "rebuild, check": 2.0,
    "N=1024 D=64, fast": 0.5,
    "N=1024 D=64, check": 1.0,
}  # seconds


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "best": min(seconds), "worst": max(seconds)}


def measure(source: Path, *, repeats: int = 5, n: int = 1024, head_dim: int = 64) -> dict[str, dict[str, float]]:
    """Seconds for each of ``AIMS``: median, best and worst of ``repeats``.

    Args:
        source: a kernel file with the entry
            ``flash(q, k, v, o, lse, heads, n, head_dim, scale, causal, stream)``.
        repeats: how often each is measured, after one that is not.
        n, head_dim: the shape of the one head, [n, head_dim] float16.
    """
    text = source.read_text()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, head_dim)).astype(np.float16) for _ in range(3))
    o, lse = np.empty_like(q), np.empty((1, n), np.float32)
    results = {}
    for kind, check in (("fast", False), ("check", True)):
        builds, runs = [], []
        module = compile_cuda(text, name=source.name, check=check, include_dirs=[source.parent])
        for i in range(repeats):
            edited = f"{text}\n// edit {i} of {time.time_ns()}\n"  # a source that no cache has seen
            begin = time.perf_counter()
            module = compile_cuda(edited, name=source.name, check=check, include_dirs=[source.parent])
            builds.append(time.perf_counter() - begin)
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            module.flash(q, k, v, o, lse, 1, n, head_dim, head_dim**-0.5, 0, None).raise_if_findings()
            runs.append(time.perf_counter() - begin)
        results[f"rebuild, {kind}"] = _spread(builds)
        results[f"N={n} D={head_dim}, {kind}"] = _spread(runs[1:])
    return results


def main() -> None:
    """Prints the table, and writes it as JSON where asked to."""
    default = Path(__file__).resolve().parents[3] / "tests" / "simt" / "kernels" / "flash_forward.cu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, default=default, help="a file with the entry `flash`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = measure(arguments.source, repeats=arguments.repeats)
    print(f"{find_compiler().version}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':22}{'median':>9}{'best':>9}{'worst':>9}{'aim':>9}   seconds")
    for name, t in results.items():
        aim = f"{AIMS[name]:9.1f}" if name in AIMS else " " * 9
        print(f"{name:22}{t['median']:9.3f}{t['best']:9.3f}{t['worst']:9.3f}{aim}")
    if arguments.json:
        record = {"compiler": find_compiler().version, "cpus": os.cpu_count()}
        record |= {"seconds": results, "aims": AIMS}
        with tempfile.NamedTemporaryFile("w", dir=arguments.json.parent, delete=False) as f:
            json.dump(record, f, indent=1)
        os.replace(f.name, arguments.json)


if __name__ == "__main__":
    main()
