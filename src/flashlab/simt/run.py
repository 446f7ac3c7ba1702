"""Calling the entries of a compiled CUDA source on arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

from flashlab.simt.build import Build, build
from flashlab.simt.errors import (
    DeadlockError,
    IllegalAccess,
    KernelTimeout,
    KernelTrap,
    LaunchError,
    SimtError,
)
from flashlab.simt.memory import GlobalMemory, View, view
from flashlab.simt.narrator import Narrator, static_arrays
from flashlab.simt.report import Report
from flashlab.simt.source import C_TYPES, DTYPES, Entry, Parameter, to_number

_one_at_a_time = threading.Lock()
_ERRORS = {
    "launch-configuration": LaunchError,
    "deadlock": DeadlockError,
    "divergent": DeadlockError,
    "lanes-missing": DeadlockError,
    "mask-without-self": DeadlockError,
    "barrier-arguments": DeadlockError,
    "global-out-of-bounds": IllegalAccess,
    "shared-out-of-bounds": IllegalAccess,
    "misaligned": IllegalAccess,
    "not-shared": IllegalAccess,
    "stack-overflow": IllegalAccess,
    "timeout": KernelTimeout,
    "trap": KernelTrap,
    "assert": KernelTrap,
    "division-by-zero": KernelTrap,
}


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    library.simt_reset.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.simt_buffer.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.simt_static_array.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    for name in ("simt_records", "simt_findings", "simt_printed", "simt_fiber_kind", "simt_error_name"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


class Module:
    """A compiled CUDA source.

    Its entries, the ``extern "C"`` functions, are called by name: ``module.launch("transpose", a, b, n)`` or
    ``module.transpose(a, b, n)``.

    Attributes:
        build: the compiled library and the source it came from.
        entries: the signatures, by name.
    """

    def __init__(self, built: Build):
        self.build = built
        self.entries: dict[str, Entry] = built.entries
        self._library = _load(str(built.library))
        if not getattr(self._library, "_simt_arrays", False):
            for symbol in static_arrays(built):
                self._library.simt_static_array(symbol.offset, symbol.size)
            self._library._simt_arrays = True  # type: ignore[attr-defined]

    @property
    def warnings(self) -> str:
        """What the compiler warned about."""
        return self.build.warnings

    @property
    def fiber_kind(self) -> str:
        """How the emulator switches threads: "x86-64" or, on any CPU, "ucontext"."""
        return self._library.simt_fiber_kind().decode()

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in self.__dict__.get("entries", {}):
            raise AttributeError(
                f'the source has no extern "C" function {name!r}; it has {", ".join(self.entries) or "none"}'
            )
        return functools.partial(self.launch, name)

    def __repr__(self) -> str:
        kind = "check" if self.build.check else "fast"
        return f"<{kind} build of {self.build.name}: {', '.join(self.entries)}>"

    def launch(
        self,
        entry: str,
        *args: object,
        threads: int | None = None,
        timeout: float = 120.0,
        shared_limit: int = 227 * 1024,
        capability: int = 90,
        multiprocessors: int = 132,
        echo: bool = True,
    ) -> Report:
        """Calls an entry of the source, and waits for the kernels that it launches.

        The kernels work on copies of the arrays, each with room around it that may not be touched; what they
        wrote to arguments that are not ``const`` is copied back when the call succeeds.

        Args:
            entry: an ``extern "C"`` function of the source.
            args: for a pointer a numpy array, a CPU tensor or None (or a ctypes structure, for the host part
                of the entry to read, or an address); for the rest numbers.
            threads: OS threads that run blocks; all the machine has by default. Results and counts do not
                depend on it.
            timeout: seconds after which the launch is given up.
            shared_limit: bytes of dynamic shared memory that a block may ask for (227 KB: H100, H200; 99 KB:
                RTX 30, 40, 50).
            capability: compute capability that cudaDeviceGetAttribute reports, times 10.
            multiprocessors: the number of SMs that it reports.
            echo: print what the kernels printed.

        Returns:
            The findings, if any, and the counts.

        Raises:
            TypeError: an argument does not fit the entry's signature.
            LaunchError: the launch was refused, or the entry returned something other than 0.
            IllegalAccess, DeadlockError, KernelTrap, KernelTimeout: the launch ended there. The error carries
                the report.
        """
        if entry not in self.entries:
            raise TypeError(
                f'the source has no extern "C" function {entry!r}; it has {", ".join(self.entries) or "none"}'
            )
        signature = self.entries[entry]
        if len(args) != len(signature.parameters):
            wanted = ", ".join(p.name for p in signature.parameters)
            raise TypeError(f"{entry} takes {len(signature.parameters)} arguments ({wanted}), not {len(args)}")
        views: dict[int, View] = {}
        for number, (p, arg) in enumerate(zip(signature.parameters, args, strict=True)):
            v = view(arg)
            if v is not None:
                _check_array(entry, p, v)
                views[number] = v
        with _one_at_a_time, GlobalMemory(list(views.values())) as memory:
            library = self._library
            library.simt_cancel(0)
            library.simt_reset(threads or _default_threads(), shared_limit, multiprocessors, capability)
            values, buffers = [], {}
            for number, (p, arg) in enumerate(zip(signature.parameters, args, strict=True)):
                if number in views:
                    v = views[number]
                    address = memory.address(v)
                    library.simt_buffer(address, v.bytes, int(not p.const), number)
                    buffers[number] = (p.name, v.bytes, v.shape, v.itemsize)
                    values.append(ctypes.c_void_p(address))
                else:
                    values.append(_scalar(entry, p, arg))
            function = getattr(library, entry)
            function.restype = None if signature.returns == "void" else ctypes.c_int
            function.argtypes = [type(x) for x in values]
            begin = time.perf_counter()
            returned = _call(library, function, values, timeout)
            seconds = time.perf_counter() - begin
            report = Narrator(self.build, buffers).report(
                library.simt_records().decode(errors="replace"),
                library.simt_findings().decode(errors="replace"),
                library.simt_printed().decode(errors="replace"),
                seconds,
                returned,
            )
            if echo and report.printed:
                print(report.printed, end="")
            error = library.simt_last_error(0)
            _raise_if_failed(report, entry, error, returned, library)
            for number, v in views.items():
                if not signature.parameters[number].const:
                    memory.copy_back(v)
        return report


def _default_threads() -> int:
    wanted = os.environ.get("FLASHLAB_SIMT_THREADS")
    return (
        int(wanted)
        if wanted
        else len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _check_array(entry: str, p: Parameter, v: View) -> None:
    if p.kind != "pointer":
        raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got an array")
    allowed = DTYPES.get(p.element)
    if allowed and v.dtype not in allowed:
        raise TypeError(
            f"{entry}: {p.name} points to {p.element}, which is {allowed[0]}, and got an array of {v.dtype}"
        )
    if not p.const and not v.writable:
        raise TypeError(f"{entry}: {p.name} is not declared const, and got an array that may not be written")


def _scalar(entry: str, p: Parameter, value: Any) -> Any:
    if p.kind == "pointer":
        if value is None:
            return ctypes.c_void_p(None)
        if isinstance(value, int):
            return ctypes.c_void_p(value)
        if isinstance(value, ctypes.Structure | ctypes.Array):
            return ctypes.c_void_p(ctypes.addressof(value))
        raise TypeError(
            f"{entry}: {p.name} is a pointer: pass a numpy array, a CPU tensor or None, not {type(value).__name__}"
        )
    given: Any = to_number(entry, p, value)  # which refuses a type that is none of these
    return C_TYPES[p.kind](given)


def _call(library: ctypes.CDLL, function, values: list, timeout: float):
    """Calls in another thread, so that this one can give up on time and hear the user's interrupt."""
    result: list = []
    done = threading.Event()

    def work() -> None:
        try:
            result.append(function(*values))
        finally:
            done.set()

    thread = threading.Thread(target=work, name="simt", daemon=True)
    thread.start()
    interrupted = None
    try:
        reason = 0 if done.wait(timeout) else 1
    except KeyboardInterrupt as e:
        reason, interrupted = 2, e
    while not done.is_set():
        library.simt_cancel(reason)
        done.wait(0.01)
    thread.join()
    if interrupted:
        raise interrupted
    return result[0] if result else None


def _raise_if_failed(report: Report, entry: str, error: int, returned: object, library: ctypes.CDLL) -> None:
    fatal = next((f for f in report.findings if f.fatal), None)
    if fatal is None and (error or returned):
        fatal = next((f for f in report.findings if f.kind in _ERRORS), None)
    if fatal is not None:
        raise _ERRORS.get(fatal.kind, SimtError)(str(fatal), report)
    if isinstance(returned, int) and returned:
        name = library.simt_error_name(returned).decode() if returned > 0 else "its own error code"
        raise LaunchError(f"{entry} returned {returned} ({name})", report)
    if error:
        raise LaunchError(f"{entry}: {library.simt_error_name(error).decode()}", report)


def compile_cuda(
    source: str | Path,
    *,
    check: bool = False,
    defines: dict[str, object] | None = None,
    include_dirs: tuple[str | Path, ...] | list[str | Path] = (),
    compiler: str | None = None,
    name: str | None = None,
    runtime_defines: tuple[str, ...] = (),
) -> Module:
    """Compiles CUDA C++ for the CPU.

    Args:
        source: the text, or the path of a ``.cu`` file.
        check: a check build sees every load and store: it finds races, uninitialised and out-of-bounds
            accesses, and counts bank conflicts and sectors. A fast build is faster, and sees collectives,
            copies and barriers.
        defines: macros, as ``{"BLOCK_M": 64}``.
        include_dirs: where else to look for headers. ``simt.h``, ``ptx.cuh``, ``cuda_fp16.h`` and
            ``cuda_bf16.h`` are found anyway.
        compiler: "g++", "clang++" or a path; ``$FLASHLAB_CXX``, or the first one found, by default.
        name: what messages call a source given as text.
        runtime_defines: for tests of the runtime.

    Raises:
        CompileError: the compiler's messages.
    """
    if isinstance(source, Path) or ("\n" not in source and source.endswith((".cu", ".cuh"))):
        path = Path(source)
        text, name, directory = path.read_text(), name or path.name, path.resolve().parent
    else:
        text, name, directory = source, name or "kernel.cu", None
    return Module(
        build(
            text,
            name=name,
            directory=directory,
            check=check,
            defines=defines,
            include_dirs=tuple(include_dirs),
            compiler=compiler,
            runtime_defines=runtime_defines,
        )
    )
