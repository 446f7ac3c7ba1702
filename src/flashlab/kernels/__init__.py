"""The CUDA series, phases 6 on: one ``.cu`` file a step, a folder a phase.

series       the steps, in the order of the course
problem      struct Problem of problem.cuh, the argument of every kernel, and the tensors that fit in it
"""

from flashlab.kernels.series import FOLDER, SERIES, Step, path, source, step, steps

__all__ = ["FOLDER", "SERIES", "Step", "path", "source", "step", "steps"]
