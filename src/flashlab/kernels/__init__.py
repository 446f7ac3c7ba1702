"""The CUDA series, phases 6 on: one ``.cu`` file per step, one folder per phase.

series       the steps, in the order of the course, and the exhibits beside them
regions      the named parts of a source
problem      struct Problem of problem.cuh, the argument of every kernel, and the tensors that fit in it
"""

from flashlab.kernels.series import (
    ALL,
    DECODING,
    FOLDER,
    HOPPER,
    HOPPER_SIDE,
    PTX,
    SERIES,
    SIDE,
    Step,
    path,
    source,
    step,
    steps,
    whole,
)
