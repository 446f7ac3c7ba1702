"""CUDA C++ kernels as functions on tensors: how they are built, called and looked into.

inline      load_inline: a source becomes a function on tensors, on a GPU or in the emulator
operators   every step as an operator of PyTorch (torch.ops.flashlab), with its gradient
resources   registers, spills, shared memory and instructions of the compiled kernels
"""

from flashlab.cuda.inline import CompileError, CudaError, CudaModule, LaunchError, Unavailable, load_inline

__all__ = ["CompileError", "CudaError", "CudaModule", "LaunchError", "Unavailable", "load_inline"]
