"""The environment of the kernels that run our notebooks: the same in the build and under nbval."""

import os
from pathlib import Path


def kernel_environment(root: Path, scratch: str | Path) -> dict[str, str]:
    """Environment variables for the kernel of a notebook of the course at `root`.

    flashlab is found without being installed, figures are drawn inline, and neither the user's IPython profile nor a
    learner's progress meets an execution of ours: IPython's own files go to the directory `scratch`.
    """
    threads = str(min(2, os.cpu_count() or 1))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")])),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(scratch),
        "FLASHLAB_PROGRESS": "off",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "PYTHONHASHSEED": "0",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the debugger's warning about frozen modules
    }
