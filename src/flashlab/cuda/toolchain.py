"""What this machine can build CUDA with: the backends, nvcc and its flags, cuobjdump, and what is missing.

==========  =========================================================================================================
backend     what happens
==========  =========================================================================================================
"torch"     ``torch.utils.cpp_extension.load_inline``: the CUDA source, which needs no header of torch, and a small C++
            file that binds its functions (flashlab.cuda.binding). The way an extension of PyTorch is built. The
            binding has to read PyTorch's headers, which takes most of the time.
"nvcc"      ``nvcc -shared``: the same source and flags, without the binding, several times faster; for the loop of
            edit and try, and for the benches.
"emulator"  flashlab.simt: on the CPU, where there is no GPU or no nvcc, or on request.
==========  =========================================================================================================
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from flashlab.cuda.errors import Unavailable

BACKENDS = ("torch", "nvcc", "emulator")


def _packages(name: str) -> list[Path]:
    """The folders of an installed package; none where it is not installed."""
    found = importlib.util.find_spec(name)
    return [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []


@functools.lru_cache(maxsize=1)
def find_nvcc() -> str | None:
    """nvcc's path: of $CUDA_HOME, of the PATH, of /usr/local/cuda, of the packages from PyPI; or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home, "bin", "nvcc") for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for folder in _packages("nvidia"):
        candidates += sorted(folder.glob("c*/bin/nvcc"), reverse=True)
    return next((str(c) for c in candidates if os.access(c, os.X_OK)), None)


def nvcc() -> str:
    """nvcc's path. Raises Unavailable where there is none."""
    found = find_nvcc()
    if found is None:
        raise Unavailable("there is no nvcc on this machine")
    return found


def find_cuobjdump() -> str | None:
    """cuobjdump's path: nvcc's neighbour, of the PATH, or the one that comes with Triton; or None."""
    compiler, on_path = find_nvcc(), shutil.which("cuobjdump")
    places = [Path(compiler).resolve().parent / "cuobjdump"] if compiler else []
    places += [Path(on_path)] if on_path else []
    places += [folder / "backends" / "nvidia" / "bin" / "cuobjdump" for folder in _packages("triton")]
    return next((str(p) for p in places if p.exists()), None)


@functools.lru_cache(maxsize=1)
def nvcc_version() -> str:
    """What nvcc calls itself, "13.0.88". Raises Unavailable where there is none."""
    text = subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def missing(backend: str) -> str | None:
    """Why a backend cannot be used here, as a sentence; None where it can."""
    if backend == "emulator":
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    if find_nvcc() is None:
        return "there is no nvcc (the CUDA toolkit has it)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler: install g++"
    if backend == "torch":
        from torch.utils import cpp_extension

        if cpp_extension.CUDA_HOME is None:
            return "PyTorch does not find the CUDA toolkit: set CUDA_HOME"
        if not cpp_extension.is_ninja_available():
            return "there is no ninja: pip install ninja"
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return "there are no headers of Python (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def default_backend() -> str:
    """The backend that load_inline takes if none is named.

    ``$FLASHLAB_CUDA_BACKEND``; else "torch" with a GPU ("nvcc" where ninja or Python's headers are missing); else
    "emulator". Raises ValueError for an unknown name in the variable.
    """
    wanted = os.environ.get("FLASHLAB_CUDA_BACKEND", "").strip()
    if wanted:
        if wanted not in BACKENDS:
            raise ValueError(f"FLASHLAB_CUDA_BACKEND is {wanted!r}; there are {', '.join(BACKENDS)}")
        return wanted
    return next(b for b in BACKENDS if missing(b) is None)


def device_arch() -> str:
    """nvcc's name for this GPU, "sm_90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def arch_for(arch: str, code: str) -> str:
    """`arch`; for a source, without its comments, that uses what capability 9.0 alone has, "sm_90a" for "sm_90"."""
    return "sm_90a" if arch == "sm_90" and _ONLY_90.search(code) else arch


def nvcc_flags(arch: str, macros: Mapping[str, Any], folders: Iterable[Path]) -> list[str]:
    """What nvcc is told, by whichever backend. arch: "sm_90"; "sm_90a" has wgmma and setmaxnreg too, and its code runs
    on that GPU alone. macros: True defines one as 1; None and False leave it undefined. folders: where headers are."""
    defines = [f"-D{k}={1 if v is True else v}" for k, v in sorted(macros.items()) if v is not None and v is not False]
    # ptxas says what registers a kernel takes and what it spills; PyTorch's extensions relax constexpr too.
    flags = ["-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    # In full: some releases of nvcc compile for sm_90 too when they are told -arch=sm_90a, and refuse.
    number = arch.removeprefix("sm_")
    flags.append(f"-gencode=arch=compute_{number},code=sm_{number}" if arch.endswith("a") else f"-arch={arch}")
    return [*flags, *defines, *[f"-I{Path(f).resolve()}" for f in folders]]


# ---- what a GPU has ----------------------------------------------------------------------------------------------
# Instructions that older GPUs lack, by the names of ptx.cuh.
_NEEDS = {
    r"tma_\w+|bulk_(?:load|store)|mbarrier_\w+": ((9, 0), "TMA"),
    r"stmatrix_x\d": ((9, 0), "stmatrix"),
    r"cp_async|__pipeline_memcpy_async": ((8, 0), "cp.async"),
    r"mma_m16n8k16|mma_m16n8k8": ((8, 0), "mma.m16n8k16"),
    r"ldmatrix_x\d": ((7, 5), "ldmatrix"),
}

_ONLY_90 = re.compile(r"\b(?:wgmma|setmaxnreg)_\w+\b")


def check_capability(name: str, code: str, capability: tuple[int, int], gpu: str) -> None:
    """Raises Unavailable if a source, given without its comments, uses an instruction that the GPU lacks."""
    lacks = []
    if (found := _ONLY_90.search(code)) and capability != (9, 0):
        lacks.append(f"{found[0].split('_')[0]}, which 9.0 alone has")
    for pattern, (needed, instruction) in _NEEDS.items():
        if re.search(rf"\b(?:{pattern})\b", code) and capability < needed:
            lacks.append(f"{instruction}, which needs {needed[0]}.{needed[1]}")
    if lacks:
        raise Unavailable(
            f"{gpu} has compute capability {capability[0]}.{capability[1]}, and {name} uses {lacks[0]}: "
            'load_inline(..., backend="emulator") runs it on the CPU'
        )
