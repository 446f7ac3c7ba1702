"""Recorded results: JSON files beside this module, each naming its machine, versions and date."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"


class NoGpu(RuntimeError):
    """What is to be measured is native: it needs a GPU, and sometimes nvcc or a profiler; the message says which."""


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


def recorded(prefix: str) -> list[dict[str, Any]]:
    """Every recorded run whose file is `recorded/<prefix>_*.json`, in the order of the names; [] where none is."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob(f"{prefix}_*.json"))]


def default_path(prefix: str, gpu: str) -> Path:
    """Where a run on a GPU of this name is recorded: `recorded/walls_h200.json` for "NVIDIA H200"."""
    return RECORDED / f"{prefix}_{gpu.lower().removeprefix('nvidia ').replace(' ', '_')}.json"


def entry(main: Callable[[], None]) -> None:
    """Run a bench's `main` as a program: what is missing is one sentence and the exit status 1."""
    try:
        main()
    except NoGpu as missing:
        raise SystemExit(str(missing)) from None
