"""Which assembler turns Triton's PTX into machine code, decided at import, before Triton.

The ptxas that Triton 3.6 and 3.7 bring (CUDA 12.8) makes wrong machine code of some kernels for a Hopper GPU: it
seems that a wgmma under way writes over the address of a load. Exercise 4.13's own solution was wrong with head_dim 40,
value_dim 24 and tiles of 64 keys; that of CUDA 13.0 has it right, from the same PTX, at the same speed.
notes/phase_04_experiments.md has the figures. So where there is a newer one, and a driver for it, Triton is told to
take it; who sets TRITON_PTXAS_PATH decides for themselves.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

NAME = "TRITON_PTXAS_PATH"


def release(ptxas: str | Path) -> tuple[int, int]:
    """(13, 0) of a ptxas of CUDA 13.0; (0, 0) if it does not run."""
    try:
        said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def newer(bundled: str | Path, others: list[str], driver: int) -> str | None:
    """The first of the others that is of CUDA 13 or later, where the bundled one is older and the driver new enough."""
    if driver < 13 or not (0, 0) < release(bundled) < (13, 0):
        return None
    return next((x for x in others if (13, 0) <= release(x) < (driver + 1, 0)), None)


def choose() -> None:
    """Sets TRITON_PTXAS_PATH for this process and its children. Does not begin CUDA: ranks choose their GPU later."""
    triton = importlib.util.find_spec("triton")
    if NAME in os.environ or triton is None:
        return
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    others = [shutil.which("ptxas") or "", *(f"{root}/bin/ptxas" for root in roots if root)]
    bundled = Path(str(triton.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas"
    driver = int((torch.version.cuda or "0").split(".")[0])  # PyTorch's CUDA runs, so the driver is as new as that
    if found := newer(bundled, [x for x in others if x], driver):
        os.environ[NAME] = found
