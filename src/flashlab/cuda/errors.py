"""What can go wrong between a CUDA source and its results, each as a sentence that says what to do.

A compiler's message is shown with the line of the source that it is about, in the same form for nvcc and for the
emulator's host compiler.
"""

import re
from dataclasses import dataclass

from flashlab import runtime
from flashlab.simt import errors as _simt


class CudaError(RuntimeError):
    """Base of what goes wrong between a CUDA source and its results. In a notebook it is its message, no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython calls this in place of its own traceback
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Message:
    """A compiler's message: what it says, and of which line of which file, where it says that."""

    text: str
    file: str = ""
    line: int | None = None


class CompileError(CudaError, _simt.CompileError):
    """The compiler refused the source: its own messages, each with the line of the source that it is about.

    Attributes:
        messages: the errors, in the compiler's order.
        log: everything the compiler wrote.
    """

    def __init__(self, message: str, messages: list[Message], log: str):
        super().__init__(message)
        self.messages, self.log = messages, log
        self.report = None


class LaunchError(CudaError, _simt.LaunchError):
    """A launch was refused, or failed. ``code`` and ``name`` are CUDA's (719, "cudaErrorLaunchFailure")."""

    def __init__(self, message: str, code: int | None = None, name: str | None = None):
        super().__init__(message)
        self.code, self.name, self.report = code, name, None


class Unavailable(CudaError):
    """This machine cannot build, or not run, what was asked for."""


# ---- what a compiler says --------------------------------------------------------------------------------------------
# kernel.cu(4): error: ...   kernel.cu(4): warning #177-D: ...   kernel.cu:4:33: error: ...   ptxas error   : ...
_MESSAGE = re.compile(
    r"^(?:(?P<file>[^\s:(][^:(]*)[(:](?P<line>\d+)(?:\)|:\d+)?: |ptxas )"
    r"(?:catastrophic |fatal )?(?P<kind>error|fatal|warning)[^:]*: (?P<text>.*)$"
)


def messages(log: str, kind: str = "error") -> list[Message]:
    """The errors, or the warnings, of a compiler's log."""
    kinds = ("error", "fatal") if kind == "error" else (kind,)
    found = [m for m in map(_MESSAGE.match, log.splitlines()) if m and m["kind"] in kinds]
    return [Message(m["text"].strip(), m["file"] or "ptxas", int(m["line"]) if m["line"] else None) for m in found]


def quoted(found: list[Message], name: str, source: str) -> list[str]:
    """Lines that show messages: each with the line of the source that it is about, a mark, and the line before it."""
    lines, shown = source.splitlines(), []
    for m in found:
        file = m.file.rpartition("/")[2]
        shown.append(f"{file}:{m.line}: {m.text}" if m.line else f"{file}: {m.text}")
        if file == name and m.line and m.line <= len(lines):
            shown += [f"  {m.line - 1:4} | {lines[m.line - 2]}"] if m.line > 1 else []
            shown.append(f"> {m.line:4} | {lines[m.line - 1]}")
    return shown


def compile_error(name: str, source: str, log: str, compiler: str) -> CompileError:
    """What a compiler that failed has said of a source of that name."""
    found = messages(log)
    shown = [f"{name} does not compile ({compiler}):", *quoted(found[:5], name, source)]
    if len(found) > 5:
        shown.append(f"... and {len(found) - 5} more errors (the exception's .log has all)")
    if not found:
        shown += log.strip().splitlines()[-12:]
    return CompileError("\n".join(shown), found, log)


# ---- what a launch returns -------------------------------------------------------------------------------------------
# What to do about the codes. The sticky ones come back from every later call in the process.
_STICKY = "every later CUDA call of this process fails too, so restart Python, or the notebook's kernel"
_NAMES_THE_LINE = "load_inline(..., check=True) runs the same source in the emulator and names the line"
ADVICE = {
    "cudaErrorInvalidValue": "an argument of the launch is wrong: most often more shared memory than the GPU has, more "
    "than 48 KB that were not asked for with cudaFuncSetAttribute, or more than 1024 threads per block",
    "cudaErrorMemoryAllocation": "the GPU's memory is full: free tensors, or torch.cuda.empty_cache()",
    "cudaErrorInvalidConfiguration": "the grid or the block is impossible: a block has 1 to 1024 threads, a grid at "
    "least one block, and at most 65535 in y and z",
    "cudaErrorLaunchOutOfResources": "a block needs more registers than a multiprocessor has: fewer threads, or "
    "__launch_bounds__",
    "cudaErrorNoKernelImageForDevice": "the code was compiled for another GPU: load it again",
    "cudaErrorUnsupportedPtxVersion": "the driver is older than this nvcc: update the driver",
    "cudaErrorInsufficientDriver": "the driver is older than this nvcc: update the driver",
    "cudaErrorIllegalAddress": f"a thread touched memory that is not its own. {_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorMisalignedAddress": f"an address is no multiple of the access's size. {_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorLaunchTimeout": f"the kernel ran too long for a GPU that also drives a display; {_STICKY}",
    "cudaErrorLaunchFailure": "the kernel stopped, most often at an invalid address in shared memory. "
    f"{_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorAssert": f"an assert in the kernel failed; {_STICKY}",
}


def launch_error(entry: str, code: int, name: str, asked: int = 0) -> LaunchError:
    """The error for CUDA's code. ``asked``: bytes of shared memory that were more than the device has, or 0."""
    if asked:
        limit = runtime.limits().shared_per_block
        return LaunchError(
            f"{entry}: the kernel wants {asked} bytes of shared memory per block, and this GPU has {limit} at most: "
            "use smaller tiles, or fewer stages", code, name,
        )  # fmt: skip
    advice = ADVICE.get(name)
    return LaunchError(f"{entry} returned {code}, {name}" + (f": {advice}" if advice else ""), code, name)
