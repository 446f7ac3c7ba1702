"""From a CUDA source to a shared library that the CPU can run: compilers, flags, and the cache of builds.

A fast build is optimised code; only what goes through the runtime (collectives, copies, barriers) is checked
and counted. A watched build calls the runtime at each load and store as well. Builds are kept (flashlab.runtime.cache)
under a key made from all that goes into them: the source, the headers that it includes, compiler, flags and CPU.
"""

import contextlib
import dataclasses
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.kernels import PTX
from flashlab.runtime import cache
from flashlab.simt import elf, hints, source
from flashlab.simt.errors import CompileError, SimtError

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
DYNAMIC_SHARED = "simt_dynamic_shared"  # module.cpp: what `extern __shared__` names are linked to
CUDA_ARCH = 900  # of the GPU that the emulator stands for, unless the defines say otherwise
INDICES = ("threadIdx", "blockIdx", "blockDim", "gridDim")
LIBRARY = "libsimt.so"  # the runtime, as modules name it
# What the linker is to send to runtime/wrapped.cpp; and of modules, to device_calls.cpp and hooks.cpp.
WRAPPED = (
    "malloc", "calloc", "realloc", "free", "_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm",
    "exit", "_exit", "_Exit", "quick_exit", "abort", "__cxa_throw", "__cxa_allocate_exception",
)  # fmt: skip
WRAPPED_IN_MODULES = ("printf", "__assert_fail")
OWN = (INCLUDE, INCLUDE / "toolkit", PTX)  # where the headers are that it stands behind, and their border
SYSTEM = (Path("/usr/local/include"), Path("/usr/include"))  # and of the machine
# What kernels include of the emulator's, in sets that g++ is given as it has read them before; the largest first.
READ_AHEAD = (("ptx.cuh", "wgmma.cuh", "tensor_map.cuh"), ("ptx.cuh",), ("simt.h",))
PLACED = 1024  # bytes: an array of shared memory lies at its alignment beyond a multiple of this
RED_ZONE = 1024  # bytes behind each static __shared__ array of a watched build, which belong to nobody
STATIC_SHARED = 48 * 1024  # bytes: what a GPU gives a kernel that has not asked for more


@dataclass(frozen=True)
class Compiler:
    """A g++, and what it is told."""

    path: str  # the executable
    version: str  # its own first line
    target: tuple[str, ...]  # flags for this machine's CPU; part of every cache key, with the CPU's name

    @property
    def major(self) -> int:
        """The first number of its version; 0 where it does not say."""
        number = re.search(r"(\d+)\.\d+", self.version)
        return int(number[1]) if number else 0

    @property
    def language(self) -> tuple[str, ...]:
        # -ffp-contract=off: the same sums on every machine. -fno-gnu-unique: or a library could never be
        # unloaded, and two builds of a template kernel would share its arrays. Fortified functions would
        # bypass our printf. -fno-semantic-interposition: or g++ would inline no function that others could replace.
        # -fno-var-tracking: a fifth of g++'s time goes into where variables are, and only lines are asked for.
        common = "-fPIC -fno-semantic-interposition -fno-strict-aliasing -ffp-contract=off -U_FORTIFY_SOURCE"
        return (*common.split(), *self.target, "-g1", "-fno-gnu-unique", "-fno-var-tracking", "-gdwarf-4")

    @property
    def kernel(self) -> tuple[str, ...]:
        # -Werror=return-type: without its `return`, the host part runs on into whatever comes next.
        quiet = (
            "-Wall -Werror=return-type -Wno-unknown-pragmas -Wno-unused-variable -Wno-unused-function "
            "-Wno-unused-local-typedefs -Wno-unused-but-set-variable -Wno-unused-but-set-parameter -Wno-attributes "
            "-Wno-psabi"
        )
        # The runtime knows an instruction by its return address. So a call in tail position must stay a call,
        # and nothing may make two instructions of one in the source (jump threading) or one of two (merged
        # branches). -fno-extern-tls-init: `extern __shared__` arrays need no constructor.
        one_to_one = (
            "-fno-builtin-printf -fno-optimize-sibling-calls -fno-thread-jumps -fno-crossjumping -fno-tree-tail-merge "
            "-fno-code-hoisting -fno-ipa-icf -fno-extern-tls-init"
        )
        # A local that is never set holds a pattern (runtime/values.h); a large frame meets the guard of its stack; a
        # loop that never ends is not taken for one that has ended; an int that overflows wraps around, in the fast
        # build too, which would otherwise compute some offsets in 64 bits that the text has in 32.
        pattern = ("-ftrivial-auto-var-init=pattern",) if self.major >= 12 else ()
        others = "-fstack-clash-protection -fno-finite-loops -fwrapv"
        return (*self.language, *quiet.split(), *one_to_one.split(), *pattern, *others.split())

    @property
    def check(self) -> tuple[str, ...]:
        # The hooks of -fsanitize=thread are the runtime's own (hooks.cpp); the sanitizer's library is not
        # linked. Whatever would merge, split or repeat an access of the source is turned off: an access is to
        # be one instruction, as in the GPU's code. A float4 must stay one access of 16 bytes.
        return (
            "-O1", "-fsanitize=thread,bounds,alignment", "--param", "tsan-instrument-func-entry-exit=0",
            *(("--param", "tsan-distinguish-volatile=1") if self.major >= 11 else ()),
            "-fno-tree-sra", "-fno-store-merging", "-fno-tree-vectorize", "-fno-tree-slp-vectorize",
            "-fno-hoist-adjacent-loads", "-fdata-sections",
            "-fstack-reuse=none",  # what a wgmma under way still uses is nobody else's
        )  # fmt: skip

    @property
    def fast(self) -> tuple[str, ...]:
        return ("-O1",)  # -O2 takes half as long again to compile, and gains a tenth where a kernel runs for long


@functools.cache
def find_compiler() -> Compiler:
    """The g++ that ``$FLASHLAB_CXX`` names, or g++. Raises SimtError where there is none."""
    wanted = os.environ.get("FLASHLAB_CXX")
    for candidate in [wanted] if wanted else ["g++", "c++"]:
        path = shutil.which(candidate)
        if not path:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if "clang" in text:
            continue
        native = ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ()
        return Compiler(path, text.splitlines()[0] if text else candidate, native)
    raise SimtError(
        f"the C++ compiler {wanted!r} was not found, or is no g++" if wanted
        else "no g++ was found, which the emulator needs (on Debian: apt-get install g++)"
    )  # fmt: skip


@functools.cache
def _cpu() -> str:
    """The CPU that -march=native is about: a cache may be shared by machines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))}))
    return platform.processor()


def _run(command: list[str], where: Path, text: str | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(command, cwd=where, input=text, capture_output=True, text=True, env=environment)


@functools.cache
def _runtime_key(compiler: Compiler) -> str:
    how = [HERE / f"{name}.py" for name in ("build", "elf", "source")]
    files = sorted([*RUNTIME.glob("*"), *INCLUDE.rglob("*"), *PTX.glob("*"), *how])
    return cache.key(compiler, _cpu(), [(f.name, cache.file_digest(f)) for f in files if f.is_file()])


def runtime(compiler: Compiler) -> Path:
    """The folder of the runtime, compiled once for each compiler and CPU (some seconds).

    It has the library, which all modules use; module.o, which is a part of each; and the executable that runs them.
    """
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", *compiler.language, "-g0", "-DSIMT_RUNTIME"]

    def make(work: Path) -> dict[str, Any]:
        def compile_one(path: Path) -> str:
            result = _run([compiler.path, *flags, "-c", str(path), "-o", f"{path.stem}.o"], work)
            return result.stderr if result.returncode else ""

        parts = sorted(RUNTIME.glob("*.cpp"))
        # The parts are short, and C++'s own headers long: they are read once, and half of the time is saved. Where
        # that fails, each part reads them for itself.
        headers = {line for p in RUNTIME.iterdir() for line in re.findall(r"^#include <\w+>$", p.read_text(), re.M)}
        (work / "library.h").write_text("\n".join(sorted(headers)))
        _run([compiler.path, *flags, "-x", "c++-header", "library.h", "-o", "library.h.gch"], work)
        flags.extend(["-include", "library.h"])
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            errors = [e for e in pool.map(compile_one, parts) if e]
        if errors:
            raise SimtError(f"the emulator's runtime does not compile with {compiler.version}:\n" + "\n".join(errors))
        objects = [f"{p.stem}.o" for p in parts if p.stem not in ("module", "runner")]
        own = ["-static-libstdc++", "-static-libgcc", "-lpthread"]  # modules find its C++ library here too
        library = ["-shared", *objects, "-o", LIBRARY, f"-Wl,-soname,{LIBRARY}", "-Wl,-Bsymbolic", *_wraps(WRAPPED)]
        runner = ["runner.o", LIBRARY, "-o", "runner", "-Wl,-rpath,$ORIGIN", "-Wl,--as-needed", "-ldl"]
        for command in (library, runner):
            result = _run([compiler.path, *command, *own], work)
            if result.returncode:
                raise SimtError(f"the emulator's runtime cannot be linked with {compiler.version}:\n{result.stderr}")
        for name in (*objects, "runner.o", "library.h", "library.h.gch"):
            (work / name).unlink(missing_ok=True)
        return {}

    return cache.kept("simt", cache.key("runtime", _runtime_key(compiler)), make).folder


def _wraps(names: Sequence[str]) -> list[str]:
    return [f"-Wl,--wrap={f}" for f in names]


@functools.cache
def _closure(headers: tuple[str, ...], places: tuple[Path, ...]) -> tuple[Path, ...]:
    """These headers, and all that they include."""
    return tuple(source.includes("".join(f'#include "{h}"\n' for h in headers), places))


def read_ahead(cxx: Compiler, flags: Sequence[str], text: str, places: Sequence[Path]) -> list[str]:
    """Flags with which g++ finds the headers that a source includes read already: most of what it would read. Nothing
    where there are none, or it does not work; then each build reads them for itself.

    flags: without macros. places: where it looks for headers before it comes to the emulator's.
    """
    included = set(source.includes(text, [*places, *OWN]))
    headers = next((h for h in READ_AHEAD if included.issuperset(_closure(h, OWN))), None)
    return _read(cxx, tuple(flags), headers, cache.folder("simt")) if headers else []


@functools.cache
def _read(cxx: Compiler, flags: tuple[str, ...], headers: tuple[str, ...], _: Path) -> list[str]:
    def make(work: Path) -> dict[str, Any]:
        (work / "headers.h").write_text("".join(f'#include "{h}"\n' for h in headers))
        found = [word for folder in OWN for word in ("-I", str(folder))]
        command = [cxx.path, *flags, *found, "-w", "-x", "c++-header", "headers.h", "-o", "headers.h.gch"]
        return {"usable": _run(command, work).returncode == 0}

    # g++ does not see that a header of the machine has changed; and lines are told by the emulator's own paths.
    digests = [(str(p), cache.file_digest(p)) for p in _closure(headers, (*OWN, *SYSTEM))]
    kept = cache.kept("simt", cache.key("headers", _runtime_key(cxx), flags, digests), make)
    return ["-fpch-preprocess", "-include", str(kept.folder / "headers.h")] if kept.notes["usable"] else []


@dataclass(frozen=True)
class Build:
    """A compiled module: the library, and what its source says about its entries."""

    runner: Path  # the executable that runs it
    library: Path
    name: str  # of the source, as it appears in messages and line tables
    text: str  # the source as the learner wrote it
    check: bool
    entries: dict[str, source.Entry]
    warnings: str
    from_cache: bool
    shared: tuple[elf.Symbol, ...]  # the static __shared__ arrays, by their offset in the thread-local segment
    dynamic: int  # where `extern __shared__` begins in it
    dynamic_align: int  # the alignment, in bytes, that it is declared with


def macros(defines: Mapping[str, object] | None) -> list[str]:
    """As the compiler is given them: True defines one as 1, None and False leave it undefined."""
    told: dict[str, object] = {} if "__CUDA_ARCH__" in (defines or {}) else {"__CUDA_ARCH__": CUDA_ARCH}
    told |= {k: 1 if v is True else v for k, v in (defines or {}).items() if v is not None and v is not False}
    return [f"-D{name}={value}" for name, value in told.items()]


def searched(directory: str | Path | None, include_dirs: Iterable[str | Path]) -> list[str]:
    """Where headers are looked for, as the compiler is told."""
    first = ["-iquote", str(Path(directory).resolve())] if directory else []
    places = [*(str(Path(d).resolve()) for d in include_dirs), *map(str, OWN)]
    return first + [word for place in places for word in ("-I", place)]


def build(
    text: str,
    *,
    name: str = "kernel.cu",
    directory: Path | None = None,
    check: bool = False,
    defines: dict[str, object] | None = None,
    include_dirs: tuple[str | Path, ...] = (),
) -> Build:
    """Compiles a source, or finds it compiled.

    Args:
        text: CUDA C++. name: what to call it in messages. directory: where ``#include "..."`` looks first.
        defines: macros, as :func:`macros` takes them.
        check, include_dirs: as of :func:`flashlab.simt.run.compile_cuda`.

    Raises:
        CompileError: with the compiler's messages, against the lines of ``text``.
    """
    cxx = find_compiler()
    language = ["-std=c++17", *cxx.kernel, *(cxx.check if check else cxx.fast)]
    flags = [*language, *macros(defines), *searched(directory, include_dirs)]
    places = [*([directory] if directory else []), *(Path(d).resolve() for d in include_dirs)]
    digests = [(str(p), cache.file_digest(p)) for p in source.includes(text, [*places, *SYSTEM])]

    ran_by = runtime(cxx)

    def make(work: Path) -> dict[str, Any]:
        try:
            known = read_ahead(cxx, language, text, places)
            preprocessed, warnings = _compile(cxx, flags, text, name, work, check, known)
        except CompileError:  # in the words of a build without; and perhaps it is these headers that cannot be used
            preprocessed, warnings = _compile(cxx, flags, text, name, work, check, [])
        shared, dynamic = _link(cxx, ran_by, work, check, set(preprocessed.kernels))
        return {
            "warnings": warnings, "interface": source.interface(preprocessed), "dynamic": dynamic[0],
            "dynamic_align": dynamic[1],
            "shared": [dataclasses.astuple(s) for s in shared],
        }  # fmt: skip

    found = cache.kept("simt", cache.key(_runtime_key(cxx), flags, name, text, digests), make)
    notes = found.notes
    return Build(
        runner=ran_by / "runner", library=found.folder / "kernel.so", name=name, text=text, check=check,
        entries=source.entries(notes["interface"]), warnings=notes["warnings"],
        from_cache=found.from_cache, shared=tuple(elf.Symbol(*s) for s in notes["shared"]), dynamic=notes["dynamic"],
        dynamic_align=notes["dynamic_align"],
    )  # fmt: skip


def _compile(
    cxx: Compiler, flags: list[str], text: str, name: str, work: Path, check: bool, known: list[str]
) -> tuple[source.Preprocessed, str]:
    """Makes kernel.o; returns what was compiled, and the compiler's warnings. Raises CompileError."""
    printed = _run([cxx.path, "-x", "c++", *flags, *known, "-E", "-"], work, f'#line 1 "{name}"\n{text}')
    if printed.returncode:
        raise CompileError(hints.explained(printed.stderr, name))
    preprocessed = source.Preprocessed(printed.stdout, (*map(str, OWN), *known[-1:]))
    if not known and not any(f.startswith(tuple(map(str, OWN))) for f in preprocessed.included):
        hints.check_included(text, name)
    preprocessed.check()
    (work / "kernel.ii").write_text(preprocessed.rewritten(inline_all=check))
    compiled = _run([cxx.path, *flags, "-c", "kernel.ii", "-o", "kernel.o"], work)
    if compiled.returncode:
        raise CompileError(hints.explained(compiled.stderr, name) or f"{cxx.path} failed without a message")
    (work / "kernel.ii").unlink()
    return preprocessed, compiled.stderr


def _expect_static_fits(symbols: list[elf.Symbol]) -> None:
    """Raises CompileError where a function's static __shared__ arrays are more than a GPU gives, as ptxas would."""
    owners: dict[str, list[elf.Symbol]] = {}
    for symbol in symbols:
        if symbol.defined:  # _ZZ9transposePfE4tile: what stands before the array's own name is the function's
            owners.setdefault(symbol.name.rpartition(f"{len(symbol.array)}{symbol.array}")[0], []).append(symbol)
    for arrays in owners.values():
        size = sum(s.size for s in arrays)
        if size > STATIC_SHARED:
            names = [s.array for s in arrays]
            who = f"the array {names[0]} has" if len(names) == 1 else f"the arrays {', '.join(names)} have together"
            raise CompileError(
                f"{who} {size} bytes of static shared memory; the limit is {STATIC_SHARED} bytes: declare "
                "it `extern __shared__`, and ask at the launch"
            )


def _link(
    cxx: Compiler, runtime: Path, work: Path, check: bool, kernels: set[str]
) -> tuple[tuple[elf.Symbol, ...], tuple[int, int]]:
    """Makes kernel.so of kernel.o: the static ``__shared__`` arrays; where ``extern __shared__`` begins, its alignment.

    Each array lies where its declared alignment lets it lie, and at no better place: what needs more is found. Raises
    CompileError: too much static shared memory, or what the linker says.
    """
    symbols = elf.thread_local_symbols(work / "kernel.o")
    _expect_static_fits(symbols)
    asked = elf.place_thread_local(work / "kernel.o", PLACED, RED_ZONE if check else 0)
    aligned = [s.size for s in elf.variables(work / "kernel.o") if source.ALIGNED in s.name]
    align = max(aligned, default=PLACED)
    dynamic = DYNAMIC_SHARED + (f"_{align}" if align < PLACED else "")
    command = [cxx.path, "-shared", "kernel.o", str(runtime / "module.o"), str(runtime / LIBRARY), "-o", "kernel.so"]
    command += ["-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-static-libstdc++", "-static-libgcc", "-lpthread"]
    wanted = [s.name for s in symbols if not s.defined and s.name not in INDICES]
    command += [f"-Wl,--defsym,{s}={dynamic}" for s in wanted]
    command += _wraps([*WRAPPED, *WRAPPED_IN_MODULES])
    linked = _run([*command, "-Wl,-z,defs", "-lm", "-lc"], work)
    if linked.returncode:
        raise CompileError(linked.stderr.strip())
    (work / "kernel.o").unlink()
    own = {s.name for s in symbols if s.defined}
    there = elf.thread_local_symbols(work / "kernel.so")
    named = re.compile("|".join(map(re.escape, sorted(kernels))) or "$^")
    functions = elf.functions(work / "kernel.so").items() if own else ()
    owners = {n: at for n, at in functions if named.search(n) and elf.base_name(n) in kernels}
    arrays = {
        (s.offset, s.size): dataclasses.replace(s.owned(owners), align=asked.get(s.name, 0))
        for s in there
        if s.name in own and s.defined and s.size
    }
    return tuple(arrays.values()), (next(s.offset for s in there if s.name == dynamic), align)
