"""CUDA C++ kernels as functions on tensors: how they are built, called and looked into.

errors      what can go wrong, as sentences; a compiler's messages with the lines they are about
toolchain   the backends, nvcc and its flags, what this machine lacks
sources     a source as it is given and as it is compiled
binding     the C++ file of a PyTorch extension
builds      builds by nvcc and by PyTorch, and the one way to call them
inline      load_inline: a source becomes a function on tensors, on a GPU or in the emulator
operators   every step as an operator of PyTorch (torch.ops.flashlab), with its gradient
hopper_backward  phase 11's dQ, dK and dV
decoding    phase 12's kernels, on a cache
resources   registers, spills, shared memory and instructions of the compiled kernels
"""

from flashlab.cuda.errors import CompileError, CudaError, LaunchError, Unavailable
from flashlab.cuda.inline import CudaModule, load_inline
from flashlab.cuda.toolchain import BACKENDS, default_backend, missing
