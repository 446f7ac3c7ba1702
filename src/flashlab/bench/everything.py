"""Every bench that times kernels, one after the other, each in a process of its own; what cannot run here says why.

flashlab bench all                       # the records of this GPU
flashlab bench all --quick               # a little of each, on whatever is there; `make bench`
flashlab bench all --minutes 25          # in all; run it again to go on
flashlab bench all --quick --out FOLDER  # FOLDER/mma.json, ...
flashlab bench all --compare A B         # two such folders, or two of records
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flashlab.bench import BENCHES, OF_ALL, harness, records


def why_not(name: str, quick: bool) -> str | None:
    """Why a bench cannot run on this machine, or None."""
    row = BENCHES[name]
    if not row.object:
        return harness.gpu_for(f"{name} is")(quick)
    bench: harness.Bench = getattr(importlib.import_module(f"flashlab.bench.{row.module or name}"), row.object)
    return bench.needs(quick)


def run_one(name: str, arguments: Sequence[str]) -> int:
    """A bench in a process of its own, so that a GPU that one leaves broken is whole for the next. Its exit status."""
    code = "import sys; from flashlab.cli import main; sys.argv[0] = 'flashlab'; main()"
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, "bench", name, *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}).returncode


def pairs(before: Path, after: Path) -> dict[str, tuple[Path, Path]]:
    """By bench: the two files of it, in two folders; NAME.json, or NAME_<gpu>.json where that is the only one."""

    def find(folder: Path, name: str) -> list[Path]:
        return [path for path in [folder / f"{name}.json"] if path.exists()] or sorted(folder.glob(f"{name}_*.json"))

    found = {name: (find(before, name), find(after, name)) for name in OF_ALL if BENCHES[name].object}
    return {name: (a[0], b[0]) for name, (a, b) in found.items() if len(a) == len(b) == 1}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = records.parser(__doc__, "all")
    parser.add_argument("--minutes", type=float, help="stop after about so many, in all; run it again to go on")
    parser.add_argument("--without", nargs="+", default=(), choices=OF_ALL, help="benches to leave out")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two folders: what is slower in B")
    given = parser.parse_args(arguments)
    if given.compare:
        found = pairs(*given.compare)
        if not found:
            raise SystemExit(f"no bench has a file in both {given.compare[0]} and {given.compare[1]}")
        results = {}
        for name, files in found.items():
            print(f"{name}", flush=True)
            results[name] = run_one(name, ["--compare", *map(str, files)])
        raise SystemExit(int(any(results.values())))
    end = time.monotonic() + 60 * (given.minutes or 0)
    failed = []
    for name in OF_ALL:
        if name in given.without:
            continue
        reason = why_not(name, given.quick)
        if reason is None and given.minutes and time.monotonic() > end:
            reason = "the time is up"
        if reason:
            print(f"{name}: left out: {reason}", flush=True)
            continue
        options = ["--quick"] if given.quick else []
        options += ["--json"] if given.json else []
        options += (
            ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"] if given.minutes and BENCHES[name].object else []
        )
        options += ["--out", str(given.out / f"{name}.json")] if given.out else []
        print(f"{name}", flush=True, file=sys.stderr)
        failed += [name] if run_one(name, options) else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
