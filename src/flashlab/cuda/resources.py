"""What a compiled kernel uses: registers, spills, shared memory, and the instructions it is made of.

    resources(step("p6_4_registers"), target="sm_90", head_dim=64)

nvcc compiles for a GPU that need not be there; ptxas says registers, spills and static shared memory, cuobjdump lists
the instructions. Dynamic shared memory is chosen at the launch: the emulator's launches say how much. Where there is no
nvcc, ``flashlab.bench.resources`` has the figures of the series that were measured.
"""

import itertools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlab.cuda.builds import build
from flashlab.cuda.errors import Unavailable
from flashlab.cuda.inline import load_inline
from flashlab.cuda.sources import Text, macros, read
from flashlab.cuda.toolchain import arch_for, find_cuobjdump, find_nvcc, nvcc_flags
from flashlab.kernels.problem import ELEMENTS
from flashlab.kernels.series import Step

TARGETS = ("sm_80", "sm_89", "sm_90")
OPCODES = ("FFMA", "HMMA", "HGMMA", "LDS", "LDSM", "STS", "LDG", "LDGSTS", "STG", "MUFU", "SHFL", "BAR")
"""The instructions that tables show: arithmetic, shared memory, global memory, exponentials, shuffles, barriers."""


@dataclass(frozen=True)
class Resources:
    """What one kernel, compiled for one target, uses.

    instructions: how often an opcode stands in the code (not: is executed); without modifiers, MUFU.EX2 aside.
    stack_bytes: of local memory per thread: what is spilled, and arrays that are indexed while the kernel runs.
    """

    step: str
    kernel: str  # its name, template arguments included
    target: str
    head_dim: int
    element: str
    registers: int  # of 32 bits, per thread
    spill_bytes: int  # that a thread stores to local memory for want of registers
    static_shared_bytes: int  # of its ``__shared__`` arrays of fixed size
    dynamic_shared_bytes: int | None  # what its launch asks for beside them; None, where no launch of it was seen
    instructions: dict[str, int] = field(hash=False)
    stack_bytes: int = field(default=0, compare=False)  # not in every record

    @property
    def shared_bytes(self) -> int | None:
        """Of one block, in all."""
        return None if self.dynamic_shared_bytes is None else self.static_shared_bytes + self.dynamic_shared_bytes


def available() -> bool:
    """Whether this machine can measure: nvcc, its host compiler, and cuobjdump."""
    return find_nvcc() is not None and find_cuobjdump() is not None and shutil.which("g++") is not None


def _plain(mangled: Iterable[str]) -> dict[str, str]:
    """Mangled names as C++ writes them, without the parameters; as they are where there is no c++filt."""
    names = list(mangled)
    filter_ = shutil.which("c++filt") or shutil.which("cu++filt")
    if not filter_ or not names:
        return dict(zip(names, names, strict=True))
    text = subprocess.run([filter_], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    plain = [re.sub(r"^void ", "", re.sub(r"\((?:Problem|[^()]*)\)$", "", line)) for line in text]
    return dict(zip(names, (re.sub(r"\((?:int|bool)\)", "", p) for p in plain), strict=True))


def _opcodes(listing: str) -> Counter:
    """Opcodes of one function's listing: "/*0a30*/ @!P0 HMMA.16816.F32 R4, ..." is an HMMA."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(MUFU\.\w+|[A-Z][A-Z0-9_]*)", listing, re.MULTILINE)
    counts = Counter(found)
    counts["MUFU"] = sum(n for opcode, n in counts.items() if opcode.startswith("MUFU"))
    return counts


def resources(
    source: Step | Path | str,
    *,
    target: str = "sm_90",
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    launches: bool = True,
    **defines: Any,
) -> list[Resources]:
    """The kernels of a source, compiled for a target: by the very build that load_inline's "nvcc" makes.

    Args:
        source: a step of the series, the path of a ``.cu`` file, or its text.
        target: one of TARGETS, or another that nvcc knows.
        head_dim, dtype, defines: what the source is compiled for; its own defaults, if None.
        launches: whether to see, in the emulator, what dynamic shared memory small launches ask for.
    Raises:
        Unavailable: there is no nvcc, no host compiler or no cuobjdump here.
        flashlab.cuda.CompileError: nvcc refused the source.
    """
    if not available():
        raise Unavailable("resources are measured with nvcc, g++ and cuobjdump; recorded() has figures without them")
    text, variant, log, functions = _compiled(source, target, head_dim, dtype, defines)
    plain = _plain(functions)
    dynamic = _dynamic_shared(source, *variant, defines) if variant and launches else {}
    found = []
    for mangled, (registers, spills, static, stack) in _ptxas(log).items():
        counts = _opcodes(functions.get(mangled, ""))
        kept = {opcode: counts[opcode] for opcode in (*OPCODES, "MUFU.EX2") if counts[opcode]}
        name, kernel = text.name.removesuffix(".cu"), plain.get(mangled, mangled)
        head_dim, element = variant or (0, "")
        shared = (static, dynamic.get(kernel.replace(" ", "")))
        found.append(Resources(name, kernel, target, head_dim, element, registers, spills, *shared, kept, stack))
    return sorted(found, key=lambda r: r.kernel)


def _compiled(
    source: Step | Path | str, target: str, head_dim: int | None, dtype: torch.dtype | None, defines: dict[str, Any]
) -> tuple[Text, tuple[int, str] | None, str, dict[str, str]]:
    """The source as read, what it was compiled for, ptxas's log, and each function's instructions, by mangled name."""
    text = read(source)
    dtype = dtype or (source.dtypes[0] if isinstance(source, Step) else None)
    variant = text.variant(defines, head_dim, dtype)
    flags = nvcc_flags(arch_for(target, text.code), macros(defines, variant), text.folders())
    built = build(text, flags, "nvcc", folders=text.folders())
    command = [str(find_cuobjdump()), "-sass", str(built.library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = dict(re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function : |\Z)", listing, re.DOTALL))
    return text, variant, built.log, functions


def resources_listing(
    source: Step | Path | str, *, target: str = "sm_90", head_dim: int | None = None, **defines: Any
) -> dict[str, str]:
    """The instructions (SASS) of each kernel of a source, by its mangled name. Arguments and errors as `resources`."""
    if not available():
        raise Unavailable("a listing needs nvcc, g++ and cuobjdump")
    return _compiled(source, target, head_dim, None, defines)[3]


def _dynamic_shared(source: Step | Path | str, head_dim: int, element: str, defines: dict[str, Any]) -> dict[str, int]:
    """The dynamic shared memory of each kernel that some small problems launch, in the emulator.

    A launcher chooses among kernels by the mask, by how many blocks there are for each multiprocessor, by how many keys
    a block would have, and by the device's limit: these problems reach the choices that there are. Names are without
    spaces, which demanglers write differently.
    """
    dtype = next(t for t, name in ELEMENTS.items() if name == element)
    module = load_inline(source, backend="emulator", head_dim=head_dim, dtype=dtype, defines=defines)
    found: dict[str, int] = {}
    only_90 = arch_for("sm_90", read(source).code) != "sm_90"  # then no smaller limit is met
    for batch, seq_k, sms in ((2, 64, 1), (1, 512, 132), (1, 64, 132)):
        q, k = (torch.zeros(batch, 1, n, head_dim, dtype=dtype) for n in (64, seq_k))
        for limit, causal in itertools.product((227,) if only_90 else (227, 163, 99), (False, True)):
            module.forward(q, k, k, causal=causal, sms=sms, shared_limit=limit * 1024)
            assert module.report is not None, "every run in the emulator leaves a report"
            found |= {launch.kernel.replace(" ", ""): launch.shared_bytes for launch in module.report.launches}
    return found


def _ptxas(log: str) -> dict[str, tuple[int, int, int, int]]:
    """(registers, spilled bytes, static shared bytes, bytes of the stack) of each kernel of ``ptxas -v``."""
    found = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:

        def number(pattern: str, block: str = block) -> int:
            return int(m[1]) if (m := re.search(pattern, block)) else 0

        registers, spills = number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores")
        static, stack = number(r"(\d+) bytes smem"), number(r"(\d+) bytes stack frame")
        found[block.split("'")[1]] = (registers, spills, static, stack)
    return found
