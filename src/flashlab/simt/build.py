"""From a CUDA source to a shared library that the CPU can run: compilers, flags, and the cache of builds.

A fast build is optimised code; only what goes through the runtime (collectives, copies, barriers) is checked
and counted. A check build calls the runtime at each load and store as well. Builds are kept (flashlab.runtime.cache)
under a key made from all that goes into them: the source, the headers that it includes, compiler, flags and CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashlab.runtime import cache
from flashlab.simt import elf, source
from flashlab.simt.errors import CompileError, SimtError

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
DYNAMIC_SHARED = "simt_dynamic_shared"  # scheduler.cpp: what `extern __shared__` names are linked to


STATIC_SHARED = 48 * 1024  # bytes: what a GPU gives a kernel that has not asked for more


@dataclass(frozen=True)
class Compiler:
    """A host C++ compiler, and what it is told.

    Attributes:
        path: the executable.
        clang: clang++ rather than g++.
        version: its own first line.
        target: flags for this machine's CPU; part of every cache key, with the CPU's name.
    """

    path: str
    clang: bool
    version: str
    target: tuple[str, ...]

    @property
    def language(self) -> tuple[str, ...]:
        # -ffp-contract=off: the same sums on every machine. -fno-gnu-unique: or a library could never be
        # unloaded, and two builds of a template kernel would share its arrays. Fortified functions would
        # bypass our printf.
        common = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
        return (
            common
            + self.target
            + (("-gline-tables-only",) if self.clang else ("-g1", "-fno-gnu-unique"))
            + ("-gdwarf-4",)
        )

    @property
    def kernel(self) -> tuple[str, ...]:
        quiet: tuple[str, ...] = (
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Wno-unused-variable",
            "-Wno-unused-function",
            "-Wno-unused-local-typedefs",
        )
        if self.clang:
            quiet += ("-Wno-unused-const-variable", "-Wno-pass-failed")
        else:
            quiet += ("-Wno-unused-but-set-variable", "-Wno-unused-but-set-parameter", "-Wno-attributes")
        # The runtime knows an instruction by its return address. So a call in tail position must stay a call,
        # and nothing may make two instructions of one in the source (jump threading) or one of two (merged
        # branches).
        one_to_one: tuple[str, ...] = ("-fno-builtin-printf", "-fno-optimize-sibling-calls")
        if self.clang:
            for option in (
                "-jump-threading-threshold=0", "-disable-tail-duplicate", "-disable-early-taildup",
                "-tail-dup-placement=false", "-sink-common-insts=false", "-hoist-common-insts=false",
                "-enable-tail-merge=false",
            ):  # fmt: skip
                one_to_one += ("-mllvm", option)
        else:
            one_to_one += (
                "-fno-thread-jumps",
                "-fno-crossjumping",
                "-fno-tree-tail-merge",
                "-fno-code-hoisting",
            )
            one_to_one += ("-fno-extern-tls-init",)  # `extern __shared__` arrays need no constructor
        return self.language + quiet + one_to_one

    @property
    def check(self) -> tuple[str, ...]:
        # The hooks of -fsanitize=thread are the runtime's own (hooks.cpp); the sanitizer's library is not
        # linked. Whatever would merge, split or repeat an access of the source is turned off: an access is to
        # be one instruction, as in the GPU's code. A float4 must stay one access of 16 bytes.
        if self.clang:
            return (
                "-O1", "-fsanitize=thread,array-bounds", "-fno-vectorize", "-fno-slp-vectorize",
                "-mllvm", "-tsan-instrument-func-entry-exit=0",
                "-mllvm", "-tsan-instrument-read-before-write=1",
            )  # fmt: skip
        return (
            "-O1", "-fsanitize=thread", "-fsanitize=bounds", "--param", "tsan-instrument-func-entry-exit=0",
            "-fno-tree-sra", "-fno-store-merging", "-fno-tree-vectorize", "-fno-tree-slp-vectorize",
        )  # fmt: skip

    @property
    def fast(self) -> tuple[str, ...]:
        return ("-O2",)


@functools.cache
def find_compiler(name: str | None = None) -> Compiler:
    """The named compiler; else the one of ``$FLASHLAB_CXX``, g++, clang++, in this order.

    Raises:
        SimtError: there is none.
    """
    wanted = name or os.environ.get("FLASHLAB_CXX")
    for candidate in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(candidate)
        if not path:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        native = ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ()
        return Compiler(path, "clang" in text, text.splitlines()[0] if text else candidate, native)
    raise SimtError(
        f"the C++ compiler {wanted!r} was not found" if wanted
        else "no C++ compiler was found: the emulator needs g++ or clang++ (on Debian: apt-get install g++)"
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
def _runtime_key(compiler: Compiler, defines: tuple[str, ...]) -> str:
    files = sorted([*RUNTIME.glob("*"), *INCLUDE.rglob("*.h")])
    return cache.key(compiler, _cpu(), defines, [(f.name, cache.file_digest(f)) for f in files if f.is_file()])


def runtime(compiler: Compiler, defines: tuple[str, ...] = ()) -> Path:
    """The runtime, compiled: one relocatable object, built once for each compiler and CPU (some seconds)."""
    builds = cache.folder("simt")
    done = builds / f"runtime-{_runtime_key(compiler, defines)}.o"
    if done.exists():
        return done
    with cache.workspace(builds) as work:
        flags = ["-O3", "-Wall", "-Wextra", *compiler.language, "-g0", *[f"-D{d}" for d in defines]]

        def compile_one(path: Path) -> str:
            result = _run([compiler.path, *flags, "-c", str(path), "-o", f"{path.stem}.o"], work)
            return result.stderr if result.returncode else ""

        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            errors = [e for e in pool.map(compile_one, sorted(RUNTIME.glob("*.cpp"))) if e]
        if errors:
            raise SimtError(f"the emulator's runtime does not compile with {compiler.version}:\n" + "\n".join(errors))
        objects = sorted(str(p.name) for p in work.glob("*.o"))
        result = _run([compiler.path, "-r", "-nostdlib", *objects, "-o", "runtime.o"], work)
        if result.returncode:
            raise SimtError(f"the emulator's runtime cannot be linked with {compiler.version}:\n{result.stderr}")
        os.replace(work / "runtime.o", done)
    return done


@dataclass(frozen=True)
class Build:
    """A compiled module: the library, and what its source says about its entries."""

    library: Path
    name: str  # of the source, as it appears in messages and line tables
    text: str  # the source as the learner wrote it
    check: bool
    entries: dict[str, source.Entry]
    warnings: str
    compiler: Compiler
    from_cache: bool


def build(
    text: str,
    *,
    name: str = "kernel.cu",
    directory: Path | None = None,
    check: bool = False,
    defines: dict[str, object] | None = None,
    include_dirs: tuple[str | Path, ...] = (),
    compiler: str | None = None,
    runtime_defines: tuple[str, ...] = (),
) -> Build:
    """Compiles a source, or finds it compiled.

    Args:
        text: CUDA C++.
        name: what to call it in messages.
        directory: where ``#include "..."`` looks first.
        check: a check build.
        defines: macros; True defines a macro as 1, None or False leaves it undefined.
        include_dirs: more directories for headers.
        compiler: as in :func:`find_compiler`.
        runtime_defines: macros for the runtime itself (its tests use them).

    Raises:
        CompileError: with the compiler's messages, against the lines of ``text``.
    """
    cxx = find_compiler(compiler)
    macros = [f"-D{k}={1 if v is True else v}" for k, v in (defines or {}).items() if v is not None and v is not False]
    folders = [str(Path(d).resolve()) for d in include_dirs]
    flags = [*cxx.kernel, *(cxx.check if check else cxx.fast), *macros]
    if directory:
        flags += ["-iquote", str(Path(directory).resolve())]
    for folder in [*folders, str(INCLUDE), str(INCLUDE / "toolkit")]:
        flags += ["-I", folder]
    headers = source.includes(text, [*([directory] if directory else []), *map(Path, folders), INCLUDE])
    digests = [(str(p), cache.file_digest(p)) for p in headers]

    def make(work: Path) -> dict[str, str]:
        code = f'#line 1 "{name}"\n' + source.rewrite(text)
        compiled = _run([cxx.path, "-x", "c++", *flags, "-c", "-", "-o", "kernel.o"], work, code)
        if compiled.returncode:
            raise CompileError(compiled.stderr.strip() or f"{cxx.path} failed without a message")
        _link(cxx, runtime(cxx, runtime_defines), work, check)
        return {"warnings": compiled.stderr}

    key = cache.key(_runtime_key(cxx, runtime_defines), flags, name, text, digests)
    found = cache.kept("simt", key, make)
    library, warnings = found.folder / "kernel.so", found.notes["warnings"]
    return Build(library, name, text, check, source.entries(text), warnings, cxx, found.from_cache)


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


def _link(cxx: Compiler, runtime: Path, work: Path, check: bool) -> None:
    """Makes kernel.so of kernel.o and the runtime. Raises CompileError."""
    symbols = elf.thread_local_symbols(work / "kernel.o")
    _expect_static_fits(symbols)
    command = [cxx.path, "-shared", "kernel.o", str(runtime), "-o", "kernel.so"]
    command += ["-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-static-libstdc++", "-static-libgcc", "-lpthread"]
    command += [f"-Wl,--defsym,{s.name}={DYNAMIC_SHARED}" for s in symbols if not s.defined]
    if cxx.clang and check:  # it copies structs with memcpy, and its sanitizer looks at that from inside the function
        command += [f"-Wl,--wrap={f}" for f in ("memcpy", "memmove", "memset")]
    linked = _run([*command, "-Wl,-z,defs", "-lm", "-lc"], work)
    if linked.returncode:
        raise CompileError(linked.stderr.strip())
    (work / "kernel.o").unlink()
