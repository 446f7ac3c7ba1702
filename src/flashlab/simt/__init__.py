"""CUDA C++ kernels on a CPU: run them, see what they do wrong, count what they cost.

from flashlab.simt import compile_cuda

module = compile_cuda("transpose.cu", check=True)
report = module.transpose(a, b, n)         # an extern "C" function of the source; a and b are arrays
report.findings                            # races, out-of-bounds accesses ... with lines, block and thread
report.counters["shared_load_wavefronts"]  # and report.by_line
"""

from flashlab.simt.build import Build, Compiler, find_compiler
from flashlab.simt.errors import (
    CompileError,
    DeadlockError,
    HostError,
    IllegalAccess,
    KernelFindings,
    KernelTimeout,
    KernelTrap,
    LaunchError,
    SimtError,
)
from flashlab.simt.report import Counters, Finding, Launch, Report
from flashlab.simt.run import Module, compile_cuda
