"""The process and the machine: interpreted or compiled, which device, which limits, where caches are kept.

mode        whether Triton interprets its kernels here; decided at import, before Triton
ptxas       which assembler Triton uses; decided then too
gpus        the known GPUs and their limits
cache       the one folder that builds and reports are kept in
"""

from flashlab.runtime.gpus import GPUS, SHARED_MEMORY, GpuLimits, UnknownGpu, limits
from flashlab.runtime.mode import INTERPRETED, WrongMode, device

if not INTERPRETED:
    from flashlab.runtime import ptxas

    ptxas.choose()


def describe() -> str:
    """One line: what this process runs Triton kernels on."""
    if INTERPRETED:
        return "Triton kernels are interpreted on the CPU"
    return f"Triton kernels are compiled for {limits()}"
