"""Recorded results: JSON files beside this module, each naming its machine, versions, date; what every bench has.

A bench has a ``main(arguments)``, which takes ``--out FILE``, ``--quick`` and ``--json`` (``parser``) and ends with
``keep``: it writes the record, and prints its table last. What is timed is measured by flashlab.bench.harness.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.cuda import CudaError
from flashlab.cuda.toolchain import find_nvcc, nvcc_version
from flashlab.runtime.cache import write_whole
from flashlab.table import Table

RECORDED = Path(__file__).parent / "recorded"


class NoGpu(RuntimeError):
    """What is to be measured is native: it needs a GPU, and sometimes nvcc or a profiler; the message says which."""


# ---- files -----------------------------------------------------------------------------------------------------------
def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` whole or not at all."""
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())


def recorded(name: str) -> list[dict[str, Any]]:
    """Every recorded run of a bench, `recorded/<name>_*.json`, in the order of the files' names; [] where none is.

    What ran of each part of its rows stands under the part's name too: ``run["ladder"]``.
    """
    runs = [json.loads(path.read_text("utf-8")) for path in sorted(RECORDED.glob(f"{name}_*.json"))]
    for run in runs:
        for row in run.get("rows", []):
            if "part" in row and "unavailable" not in row:
                run.setdefault(row["part"], []).append(row)
    return runs


def default_path(name: str, gpu: str) -> Path:
    """Where a run on a GPU of this name is recorded: `recorded/walls_h200.json` for "NVIDIA H200"."""
    return RECORDED / f"{name}_{gpu.lower().removeprefix('nvidia ').replace(' ', '_')}.json"


# ---- the machine -----------------------------------------------------------------------------------------------------
def machine() -> dict[str, Any]:
    """What figures were measured on, with what, and when. What this machine does not have is None.

    The clock of the GPU is added by timing.measured, which samples it during the run.
    """
    gpu = runtime.limits() if torch.cuda.is_available() else None
    return {
        "gpu": gpu and gpu.name,
        "target": gpu and gpu.target,
        "sms": gpu and gpu.sms,
        "shared_per_block": gpu and gpu.shared_per_block,
        "driver": gpu and nvidia_smi("driver_version"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "nvcc": nvcc_version() if find_nvcc() else None,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "triton_kernels": "interpreted" if runtime.INTERPRETED else "compiled",
        "commit": commit(),
        "sources": sources(),
        "date": datetime.date.today().isoformat(),
    }


def version_of(package: str) -> str | None:
    """Of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit of this package's files; None where nobody can say.

    The environment's FLASHLAB_COMMIT, for whoever made a copy; `sources` can prove it right or wrong. Else, of a
    checkout, what git says, "-dirty" where the files differ from it.
    """
    here = Path(__file__)
    git = functools.partial(subprocess.run, capture_output=True, text=True, timeout=20)
    said = os.environ.get("FLASHLAB_COMMIT", "")
    if re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", said):
        return said
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        # A checkout around an installed package is not its own.
        if git(["git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name]).returncode == 0:
            describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
            return git(["git", "-C", str(here.parent), *describe]).stdout.strip() or None
    return None


def sources() -> str:
    """The first 12 digits of a hash of the package's code: the same files give the same, with git or without."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode())
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def this_gpu() -> str:
    """The current GPU as nvidia-smi and NVML name it: by its UUID, since CUDA_VISIBLE_DEVICES renumbers."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())


def nvidia_smi(query: str) -> str | None:
    """What nvidia-smi answers for the current GPU, "clocks.sm" or "driver_version"; None where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", this_gpu()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None  # its complaints are on stdout too


# ---- a bench as a program --------------------------------------------------------------------------------------------
def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every bench has. ``doc``: its module's docstring, whose first line is shown."""
    found = argparse.ArgumentParser(prog=f"flashlab bench {name}", description=(doc or "").partition("\n")[0])
    found.add_argument("--out", type=Path, metavar="FILE", help="the JSON file to write")
    found.add_argument("--quick", action="store_true", help="less of it; not recorded, unless --out says where")
    found.add_argument("--json", action="store_true", help="print the record as JSON instead of its table")
    return found


def place(name: str, given: argparse.Namespace) -> Path | None:
    """Where a result goes: to --out, or to the record of this GPU; a quick run's to None, nowhere."""
    return given.out or (None if given.quick else default_path(name, runtime.limits().name))


def keep(
    out: Path | None, result: dict[str, Any], table: Callable[[dict[str, Any]], Table], given: argparse.Namespace,
    where: str = "",
) -> None:  # fmt: skip
    """Writes a result, and prints its table or, with --json, all of it; where it is, is told last."""
    if out is not None:
        write_json(out, result)
    print(json.dumps(result, indent=1) if given.json else table(result))
    where = where or f"{result['machine']['gpu'] or 'a CPU'}, {result['machine']['date']}"
    said = f"{where}: " + (f"written to {out}" if out else "not written: a quick run")
    print(said, file=sys.stderr if given.json else sys.stdout)


def keep_compiled(path: Path, given: argparse.Namespace, target: str, facts: dict[str, Any], table: Table) -> None:
    """The same of what a compiler gives, which needs no GPU: the record is `path`, with the facts and which nvcc."""
    result = {"nvcc": nvcc_version(), "date": datetime.date.today().isoformat()} | facts
    out = given.out or (None if given.quick else path)
    keep(out, result, lambda _: table, given, f"nvcc {result['nvcc']}, {target}")


def entry(main: Callable[[], None]) -> None:
    """Runs a bench's `main` as a program: what is missing is one sentence and the exit status 1."""
    try:
        main()
    except (NoGpu, CudaError) as missing:
        raise SystemExit(str(missing)) from None
