"""What the compiled kernels of the series use: registers, spills, shared memory, and the instructions they are made of.

    print(table("sm_90"))                     # recorded figures; measured where there is an nvcc
    resources(step("p6_4_registers").path, target="sm_90", head_dim=64, dtype=torch.float32)

nvcc compiles for a GPU that need not be there; ptxas says registers, spills and static shared memory, cuobjdump lists
the instructions. Dynamic shared memory is chosen at the launch: the emulator's launches say how much. Where there is no
nvcc, ``recorded()`` has the figures that were measured, with the versions they belong to.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlab.cuda import problem as _problem
from flashlab.cuda.inline import (
    FOLDER,
    INCLUDE,
    Unavailable,
    _compile_error,
    _read,
    _Text,
    find_nvcc,
    nvcc_version,
)
from flashlab.cuda.problem import Step

TARGETS = ("sm_80", "sm_90")
RECORDED = FOLDER.parent / "bench" / "recorded" / "resources.json"
OPCODES = ("FFMA", "HMMA", "LDS", "LDSM", "STS", "LDG", "LDGSTS", "STG", "MUFU", "SHFL", "BAR")
"""The instructions that tables show: arithmetic, shared memory, global memory, exponentials, shuffles, barriers."""


@dataclass(frozen=True)
class Resources:
    """What one kernel, compiled for one target, uses.

    Attributes:
        kernel: its name, template arguments included.
        registers: 32-bit registers a thread.
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
        folders = [*([text.directory] if text.directory else []), INCLUDE, FOLDER]
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
    module = _problem.emulated(text.text, head_dim=head_dim, dtype=dtype, **defines)
    found: dict[str, int] = {}
    for batch, seq_k, sms, limit in ((2, 64, 1, 227), (1, 512, 132, 227), (1, 64, 132, 99)):
        for causal in (False, True):
            q, k = (torch.zeros(batch, 1, n, head_dim, dtype=dtype) for n in (64, seq_k))
            _, _, report = _problem.emulate(module, q, k, k, causal=causal, sms=sms, shared_limit=limit * 1024)
            found |= {_key(launch.kernel): launch.shared_bytes for launch in report.launches}
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


def measure(targets: Sequence[str] = TARGETS, steps: Sequence[Step] | None = None) -> list[Resources]:
    """Every step of the series, each head_dim it takes up to 128, each target; two at a time."""
    from flashlab.cuda.operators import SERIES, dtypes

    jobs = [(s, d, t) for s in (SERIES if steps is None else steps) for d in s.head_dims if d <= 128 for t in targets]
    with ThreadPoolExecutor(2) as pool:
        one = lambda job: resources(job[0].path, target=job[2], head_dim=job[1], dtype=dtypes(job[0])[0])  # noqa: E731
        return [r for found in pool.map(one, jobs) for r in found]


def recorded() -> dict[str, Any]:
    """The recorded figures: {"nvcc": ..., "date": ..., "kernels": [Resources, ...]}."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    return data | {"kernels": [Resources(**row) for row in data["kernels"]]}


def table(
    target: str = "sm_90", *, steps: Sequence[str] | None = None, head_dim: int | None = 64,
    opcodes: Sequence[str] = ("FFMA", "HMMA", "LDS", "LDSM", "LDGSTS", "MUFU"), live: bool = False,
) -> Table:  # fmt: skip
    """The kernels of the series beside each other, from the recorded figures (``live``: measured now).

    Args:
        target: "sm_80" or "sm_90".
        steps: names of steps; all of them, if None.
        head_dim: 64 or 128; both, if None.
        opcodes: which instructions to count.
    """
    rows = measure([target], _chosen(steps)) if live else recorded()["kernels"]
    rows = [r for r in rows if r.target == target and (head_dim is None or r.head_dim == head_dim)]
    if steps is not None:
        rows = [r for name in steps for r in rows if r.step == name]
    if not rows:
        raise ValueError(f"no figures for {target}, head_dim {head_dim}, {steps}; targets are {', '.join(TARGETS)}")
    return Table(tuple(rows), tuple(opcodes))


def _chosen(steps: Sequence[str] | None) -> list[Step] | None:
    from flashlab.cuda.operators import step

    return None if steps is None else [step(name) for name in steps]


@dataclass(frozen=True)
class Table:
    """Rows of Resources, shown as text or, in a notebook, as a table."""

    rows: tuple[Resources, ...]
    opcodes: tuple[str, ...]

    @property
    def cells(self) -> list[list[str]]:
        several = len({r.head_dim for r in self.rows}) > 1
        figures = ("registers", "spilled bytes", "shared bytes")
        head = ["step", "kernel", *(["D"] if several else []), *figures, *self.opcodes]
        body = [
            [r.step, r.kernel, *([str(r.head_dim)] if several else []), str(r.registers), str(r.spill_bytes)]
            + ["?" if r.shared_bytes is None else str(r.shared_bytes)]
            + [str(r.instructions.get(opcode, 0)) for opcode in self.opcodes]
            for r in self.rows
        ]
        return [head, *body]

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in self.cells) for i in range(len(self.cells[0]))]
        return "\n".join(
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in self.cells
        )

    def _repr_markdown_(self) -> str:
        head, *body = self.cells
        rule = ["---" if i < 2 else "---:" for i in range(len(head))]
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def record(path: Path = RECORDED) -> Path:
    """Measures every step and writes the recorded figures, in one step."""
    from flashlab.bench.records import write_json

    rows = [asdict(r) for r in measure()]
    data = {
        "nvcc": nvcc_version(),
        "date": datetime.date.today().isoformat(),
        "targets": list(TARGETS),
        "kernels": rows,
    }
    write_json(path, data)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the compiled kernels' resources with nvcc, and record them.")
    parser.add_argument("--out", type=Path, default=RECORDED)
    path = record(parser.parse_args(arguments).out)
    print(f"written: {path.name}, {len(recorded()['kernels'])} kernels, nvcc {nvcc_version()}")


__all__ = ["OPCODES", "RECORDED", "TARGETS", "Resources", "Table", "available", "measure", "record", "recorded",
           "resources", "table"]  # fmt: skip

if __name__ == "__main__":
    main()
