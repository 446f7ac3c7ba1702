"""CUDA C++ kernels, phases 6 to 8: the sources of the series, and how they are built, called and looked into.

inline      load_inline: a source becomes a function on tensors, on a GPU or in the emulator
problem     struct Problem, the argument of every kernel of the series; the steps of phases 7 and 8
scalar      the steps of phase 6, and the bytes that FlashAttention-1 and -2 move
operators   every step as an operator of PyTorch (torch.ops.flashlab), with its gradient
resources   registers, spills, shared memory and instructions of the compiled kernels
"""

from pathlib import Path

from flashlab.cuda.inline import CompileError, CudaError, CudaModule, LaunchError, Unavailable, load_inline

FOLDER = Path(__file__).parent


def source(name: str) -> str:
    """The text of a file of the series: source("p6_1_fa1"), source("ptx.cuh")."""
    path = FOLDER / (name if name.endswith(".cuh") else f"{name.removesuffix('.cu')}.cu")
    if not path.exists():
        there = ", ".join(sorted(p.name for p in FOLDER.glob("*.cu*")))
        raise FileNotFoundError(f"there is no {path.name} in the series; there are {there}")
    return path.read_text(encoding="utf-8")


__all__ = ["FOLDER", "CompileError", "CudaError", "CudaModule", "LaunchError", "Unavailable", "load_inline", "source"]
