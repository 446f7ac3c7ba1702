"""Recorded results: JSON files beside this module, each naming its machine, versions, date; what every bench has.

A bench has a ``main(arguments)``, which takes ``--out FILE`` and ``--quick`` (``parser``) and ends with ``keep``: it
writes the record, and prints its table last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashlab import runtime
from flashlab.cuda import CudaError
from flashlab.cuda.toolchain import find_nvcc, nvcc_version
from flashlab.table import Table

RECORDED = Path(__file__).parent / "recorded"


class NoGpu(RuntimeError):
    """What is to be measured is native: it needs a GPU, and sometimes nvcc or a profiler; the message says which."""


# ---- files -----------------------------------------------------------------------------------------------------------
def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` whole or not at all: to a temporary file beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def recorded(name: str) -> list[dict[str, Any]]:
    """Every recorded run of a bench, `recorded/<name>_*.json`, in the order of the files' names; [] where none is."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob(f"{name}_*.json"))]


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
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "triton_kernels": "interpreted" if runtime.INTERPRETED else "compiled",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit of this package's files, "-dirty" where they differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def nvidia_smi(query: str) -> str | None:
    """What nvidia-smi answers for the current GPU, "clocks.sm" or "driver_version"; None where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    # By its UUID: CUDA_VISIBLE_DEVICES renumbers.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", which]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


# ---- a bench as a program --------------------------------------------------------------------------------------------
def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every bench has. ``doc``: its module's docstring, whose first line is shown."""
    found = argparse.ArgumentParser(prog=f"flashlab bench {name}", description=(doc or "").partition("\n")[0])
    found.add_argument("--out", type=Path, metavar="FILE", help="the JSON file to write")
    found.add_argument("--quick", action="store_true", help="less of it; not recorded, unless --out says where")
    return found


def keep(
    name: str, result: dict[str, Any], table: Callable[[dict[str, Any]], Table], given: argparse.Namespace
) -> None:
    """Writes a result, to --out or as the record of its GPU (of a quick run: nowhere), and prints its table."""
    gpu = result["machine"]["gpu"]
    out = given.out or (None if given.quick else default_path(name, gpu))
    if out is not None:
        write_json(out, result)
    print(table(result))
    print(f"{gpu}, {result['machine']['date']}: " + (f"written to {out}" if out else "not written: a quick run"))


def entry(main: Callable[[], None]) -> None:
    """Runs a bench's `main` as a program: what is missing is one sentence and the exit status 1."""
    try:
        main()
    except (NoGpu, CudaError) as missing:
        raise SystemExit(str(missing)) from None
