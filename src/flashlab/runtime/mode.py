"""Whether Triton interprets or compiles its kernels in this process, and the device that they run on.

Import this module (or anything of flashlab) before Triton. Triton reads ``TRITON_INTERPRET`` when it is imported and
decides then, once for the process, whether ``@triton.jit`` makes kernels that are interpreted on the CPU or compiled
for the GPU. So the decision is taken here, at import:

    the machine, the environment            what this process does
    ------------------------------------    --------------------------------------------------------------------
    no GPU                                  interprets
    a GPU                                   compiles
    FLASHLAB_INTERPRET=1                    interprets, GPU or not
    FLASHLAB_INTERPRET=0                    compiles, GPU or not (without one, kernels can be compiled, not run)
    TRITON_INTERPRET=1                      interprets, unless FLASHLAB_INTERPRET=0
"""

import os
import sys

import torch


class WrongMode(RuntimeError):
    """Triton was imported before flashlab, and in the mode that this process cannot use."""


def _choose_mode() -> bool:
    """Whether this process interprets Triton kernels; sets TRITON_INTERPRET accordingly."""
    wish = os.environ.get("FLASHLAB_INTERPRET", "").strip().lower()
    if wish not in ("", "0", "1"):
        raise ValueError(f"FLASHLAB_INTERPRET is {wish!r}: set it to 1 (interpret) or 0 (compile), or unset it")
    if wish:
        interpret = wish == "1"
    else:
        asked = os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")
        interpret = asked or not torch.cuda.is_available()
    standard = sys.modules.get("triton.language.standard")  # None: Triton is not imported yet
    loaded = standard and type(standard.sum).__name__ == "InterpretedFunction"  # tl.sum is itself a @jit function
    if loaded is not None and loaded != interpret:
        if interpret:
            raise WrongMode(
                "triton was imported before flashlab and will compile, but kernels have to be interpreted here "
                "(no GPU, or FLASHLAB_INTERPRET=1). Restart Python, or the notebook's kernel, and import "
                "flashlab first."
            )
        if wish:
            raise WrongMode(
                "triton was imported before flashlab with TRITON_INTERPRET=1, but FLASHLAB_INTERPRET=0 asks to "
                "compile. Restart Python, or the notebook's kernel, and import flashlab first."
            )
        interpret = True  # imported interpreting, on a GPU machine, and nobody asked otherwise: go on like that
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    return interpret


INTERPRETED: bool = _choose_mode()  # Triton kernels are interpreted on the CPU in this process


def device() -> torch.device:
    """The device to create a Triton kernel's tensors on: the current GPU, or the CPU where kernels are interpreted."""
    if INTERPRETED or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
