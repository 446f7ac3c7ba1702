"""What a compiled kernel uses: registers, spills, shared memory, and the instructions it is made of.

    resources(step("p6_4_registers").path, target="sm_90", head_dim=64, dtype=torch.float32)

nvcc compiles for a GPU that need not be there; ptxas says registers, spills and static shared memory, cuobjdump lists
the instructions. Dynamic shared memory is chosen at the launch: the emulator's launches say how much. Where there is no
nvcc, ``flashlab.bench.resources`` has the figures of the series that were measured.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlab.cuda.inline import (
    INCLUDE,
    KERNELS,
    Unavailable,
    _compile_error,
    _read,
    _Text,
    find_nvcc,
    load_inline,
    nvcc_version,
)
from flashlab.kernels import problem as _problem

TARGETS = ("sm_80", "sm_90")
OPCODES = ("FFMA", "HMMA", "LDS", "LDSM", "STS", "LDG", "LDGSTS", "STG", "MUFU", "SHFL", "BAR")
"""The instructions that tables show: arithmetic, shared memory, global memory, exponentials, shuffles, barriers."""


@dataclass(frozen=True)
class Resources:
    """What one kernel, compiled for one target, uses.

    Attributes:
        kernel: its name, template arguments included.
        registers: 32-bit registers per thread.
        spill_bytes: bytes that a thread stores to local memory for want of registers.
        static_shared_bytes: of its ``__shared__`` arrays of fixed size.
        dynamic_shared_bytes: what its launch asks for beside them; None, where no launch of it was seen.
        instructions: how often an opcode stands in the code (not: is executed); without modifiers, MUFU.EX2 aside.
    """

    step: str
    kernel: str
    target: str
    head_dim: int
    element: str
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int | None
    instructions: dict[str, int] = field(hash=False)

    @property
    def shared_bytes(self) -> int | None:
        """Of one block, in all."""
        return None if self.dynamic_shared_bytes is None else self.static_shared_bytes + self.dynamic_shared_bytes


def find_cuobjdump() -> str | None:
    """cuobjdump's path: nvcc's neighbour, of the PATH, or the one that comes with Triton; or None."""
    nvcc = find_nvcc()
    places = [Path(nvcc).resolve().parent / "cuobjdump"] if nvcc else []
    on_path = shutil.which("cuobjdump")
    places += [Path(on_path)] if on_path else []
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or []) if triton else []:
        places.append(Path(folder, "backends", "nvidia", "bin", "cuobjdump"))
    return next((str(p) for p in places if p.exists()), None)


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
    source: Path | str, *, target: str = "sm_90", head_dim: int = 64, dtype: torch.dtype = torch.float16, **defines: Any
) -> list[Resources]:
    """The kernels of a source, compiled for a target.

    Args:
        source: a ``.cu`` file, or its text.
        target: "sm_80", "sm_90".
        head_dim, dtype, defines: what the source is compiled for.

    Raises:
        Unavailable: there is no nvcc, no host compiler or no cuobjdump here.
        flashlab.cuda.CompileError: nvcc refused the source.
    """
    if not available():
        raise Unavailable("resources are measured with nvcc, g++ and cuobjdump; recorded() has figures without them")
    text = _read(source, None)
    element = _problem.ELEMENTS[dtype]
    macros = [f"-D{k}={v}" for k, v in {"HEAD_DIM": head_dim, "ELEMENT": element, **defines}.items()]
    with tempfile.TemporaryDirectory(prefix="flashlab-resources-") as folder:
        cubin = Path(folder, "kernel.cubin")
        Path(folder, "kernel.cu").write_text(f'#line 1 "{text.name}"\n{text.text}', encoding="utf-8")
        folders = [*([text.directory] if text.directory else []), INCLUDE, KERNELS]
        command = [find_nvcc(), "-O3", "-std=c++17", f"-arch={target}", *macros, *[f"-I{f}" for f in folders]]
        command += ["-Xptxas", "-v", "-cubin", "-o", str(cubin), "kernel.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise _compile_error(text, done.stderr, f"nvcc {nvcc_version()}, {target}")
        listing = subprocess.run([find_cuobjdump(), "-sass", str(cubin)], capture_output=True, text=True, check=True)
    functions = dict(re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function : |\Z)", listing.stdout, re.DOTALL))
    plain = _plain(functions)
    dynamic = _dynamic_shared(text, head_dim, dtype, defines) if text.takes_problem else {}
    found = []
    for mangled, figures in _ptxas(done.stderr).items():
        counts = _opcodes(functions.get(mangled, ""))
        kept = {opcode: counts[opcode] for opcode in (*OPCODES, "MUFU.EX2") if counts[opcode]}
        name = text.name.removesuffix(".cu")
        kernel = plain.get(mangled, mangled)
        shared = dynamic.get(_key(kernel))
        found.append(Resources(name, kernel, target, head_dim, element, *figures, shared, kept))
    return sorted(found, key=lambda r: r.kernel)


def _key(kernel: str) -> str:
    """A kernel's name without what demanglers write differently: spaces."""
    return kernel.replace(" ", "")


def _dynamic_shared(text: _Text, head_dim: int, dtype: torch.dtype, defines: dict[str, Any]) -> dict[str, int]:
    """The dynamic shared memory of each kernel that some small problems launch, in the emulator.

    A launcher chooses among kernels by the mask, by how many blocks there are for each multiprocessor, by how many keys
    a block would have, and by the device's limit: these problems reach the choices that there are.
    """
    module = load_inline(text.text, backend="emulator", head_dim=head_dim, dtype=dtype, defines=defines)
    found: dict[str, int] = {}
    for batch, seq_k, sms in ((2, 64, 1), (1, 512, 132), (1, 64, 132)):
        q, k = (torch.zeros(batch, 1, n, head_dim, dtype=dtype) for n in (64, seq_k))
        for limit, causal in itertools.product((227, 163, 99), (False, True)):
            module.forward(q, k, k, causal=causal, sms=sms, shared_limit=limit * 1024)
            found |= {_key(launch.kernel): launch.shared_bytes for launch in module.report.launches}
    return found


def _ptxas(log: str) -> dict[str, tuple[int, int, int]]:
    """(registers, spilled bytes, static shared bytes) of each kernel of ``ptxas -v``."""
    found = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\S+?)'", block)[1]
        number = {
            key: int(m[1]) if (m := re.search(pattern, block)) else 0
            for key, pattern in {
                "registers": r"Used (\d+) registers",
                "spills": r"(\d+) bytes spill stores",
                "shared": r"(\d+) bytes smem",
            }.items()
        }
        found[name] = (number["registers"], number["spills"], number["shared"])
    return found


__all__ = ["OPCODES", "TARGETS", "Resources", "available", "resources"]
