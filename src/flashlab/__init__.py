"""FlashAttention, wall by wall: the solution modules that every notebook imports.

The rooms, in the order in which they may import each other (a later one an earlier one, never the reverse):

    course          the phases of the course
    runtime         interpreted or compiled, the known GPUs, the cache
    triton_tools    Triton's interpreter repaired and watched; what the Triton compiler says of a kernel
    attention       the ideas in course order, from the formula to the Triton kernels
    kernels         the CUDA series: one .cu file a step
    simt            the emulator that runs CUDA C++ on a CPU
    cuda            load_inline, operators, compiled resources
    check           verify, diagnose, the mistakes it knows, the zoo of broken kernels
    figures         what notebooks show: source, diffs, tables, plots
    exercises       check, hint, progress, and each exercise's check
    bench           measurements, recorded and published figures
    doctor, cli     the `flashlab` command
"""

import sys as _sys

# First of all: it decides whether Triton interprets, before anything imports triton.
try:
    from flashlab import runtime as runtime
except (ImportError, OSError):
    # Without a torch that loads there is nothing to teach; but `flashlab doctor` is there to say just that.
    if not _sys.argv[0].endswith("/flashlab"):
        raise
else:
    if runtime.INTERPRETED:
        try:
            from flashlab.triton_tools import repairs as _repairs
        except ModuleNotFoundError as error:  # no Triton for this platform; only the Triton phases need it
            if error.name != "triton":
                raise
        else:
            _repairs.install_repairs()

__version__ = "0.1.0"
