"""Calling the entries of a compiled CUDA source on arrays."""

import ctypes
import functools
import operator
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.simt import process as processes
from flashlab.simt.build import PLACED, Build, build
from flashlab.simt.errors import RAISED, HostError, KernelTimeout, LaunchError, SimtError
from flashlab.simt.memory import GlobalMemory, View, view
from flashlab.simt.narrator import Narrator
from flashlab.simt.process import Reply
from flashlab.simt.report import Report
from flashlab.simt.source import C_TYPES, DTYPES, Entry, Parameter, is_stream, to_number

PATIENCE = 10.0  # seconds of work in which a block has to end, where the caller sets no limit
LONGEST = 600.0  # and what the whole call may take then
MAX_TIMEOUT = 86400
MAX_SHARED = 227 * 1024  # machine.h
ERROR_NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    9: "cudaErrorInvalidConfiguration",
    98: "cudaErrorInvalidDeviceFunction",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    710: "cudaErrorAssert",
    716: "cudaErrorMisalignedAddress",
    719: "cudaErrorLaunchFailure",
    912: "cudaErrorInvalidClusterSize",
}


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

    def _process(self, entry: str, timeout: float | None):
        description = f"dynamic {self.build.dynamic_align % PLACED}\n"
        description += "".join(f"array {s.offset} {s.size} {s.kernel}\n" for s in self.build.shared)
        watch = _Watch(entry or "loading", None, timeout)
        return processes.process(self.build.runner, self.build.library, description, watch)

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in self.__dict__.get("entries", {}):
            raise AttributeError(self._unknown(name))
        return functools.partial(self.launch, name)

    def _unknown(self, entry: str) -> str:
        return f'the source has no extern "C" function {entry!r}; it has {", ".join(self.entries) or "none"}'

    def __repr__(self) -> str:
        kind = "watched" if self.build.check else "fast"
        return f"<{kind} build of {self.build.name}: {', '.join(self.entries)}>"

    def launch(
        self,
        entry: str,
        *args: object,
        threads: int | None = None,
        timeout: float | None = None,
        shared_limit: int = 227 * 1024,
        multiprocessors: int = 132,
        unwritten: tuple[str, ...] | list[str] = (),
        echo: bool = True,
        timeline: int = 0,
    ) -> Report:
        """Calls an entry of the source, and waits for the kernels that it launches.

        It runs in a process of its own, on copies of the arrays, each with room around it that may not be touched;
        what was written to arguments that are not ``const`` is copied back when the call succeeds.

        Args:
            entry: an ``extern "C"`` function of the source.
            args: for a pointer a numpy array, a CPU tensor or None (or a ctypes structure, for the host part of the
                entry); for the rest numbers.
            threads: OS threads that run blocks; all the machine has by default. Results and counts do not depend
                on it.
            timeout: seconds after which the call is given up. Without it that is after 10 s in which no block has
                ended, and after 10 minutes; time that other programs keep the processors from it is not among the
                10 s. After 2 s a line on stderr says how far it is.
            shared_limit: bytes of dynamic shared memory that a block may ask for (227 KB: H100, H200; 99 KB:
                RTX 30, 40, 50).
            multiprocessors: the number of SMs that cudaDeviceGetAttribute reports.
            unwritten: names of arguments that hold nothing yet: a watched build finds reads of what no kernel has
                written. An array that is NaN throughout holds nothing either.
            echo: print what the source printed.
            timeline: of how many blocks, the first of each launch, the events are kept (``report.launches[0].events``):
                what each warp issued and what it waited for.

        Returns:
            The findings, if any, and the counts.

        Raises:
            TypeError, ValueError: an argument does not fit the entry's signature, or an option is out of range.
            LaunchError: the launch was refused, or the entry returned an error code (an ``int`` other than 0).
            IllegalAccess, DeadlockError, KernelTrap, KernelTimeout: the launch ended there. The error carries
                the report, unless the module was still being loaded.
            HostError: the host part, or the constructor of a global variable, ended the process.
        """
        signature = self._signature(entry, args)
        threads = len(os.sched_getaffinity(0)) if threads is None else _within("threads", threads, 1, 4096)
        shared_limit = _within("shared_limit", shared_limit, 0, MAX_SHARED)
        multiprocessors = _within("multiprocessors", multiprocessors, 1, 1 << 20)
        timeline = _within("timeline", timeline, 0, 1 << 31)
        number = timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool))
        if not number or not (timeout is None or 0 < timeout <= MAX_TIMEOUT):
            raise ValueError(f"timeout is {timeout!r}; it is a number of seconds above 0, up to {MAX_TIMEOUT}, or None")
        settings = (threads, shared_limit, multiprocessors, int(self.build.check), timeline)
        empty = _numbers_of(signature, unwritten)
        return self._call(signature, args, self._views(signature, args, empty), empty, settings, timeout, echo)

    def _views(self, signature: Entry, args: tuple[object, ...], empty: set[int]) -> dict[int, View]:
        """The arrays among the arguments, by their number; that of one that holds nothing yet goes to `empty`."""
        entry, views = signature.name, dict[int, View]()
        for number, (p, arg) in enumerate(zip(signature.parameters, args, strict=True)):
            try:
                v = view(arg)
            except TypeError as error:
                raise TypeError(f"{entry}: {p.name}: {error}") from None
            if v is not None:
                _check_array(entry, p, v)
                views[number] = v
                if self.build.check and not p.const and _holds_nothing(arg):
                    empty.add(number)
        return views

    def _call(
        self, signature: Entry, args: tuple[object, ...], views: dict[int, View], empty: set[int],
        settings: tuple[int, ...], timeout: float | None, echo: bool,
    ) -> Report:  # fmt: skip
        entry = signature.name
        request = [f"call {entry}", f"settings {' '.join(map(str, settings))}"]
        if signature.returns in ("float", "double"):
            request.append("float")
        with self._process(entry, timeout) as process, GlobalMemory(list(views.values())) as memory:
            request.append(f"memory {memory.bytes}")
            request += [f"piece {file} {pages} {at}" for file, pages, at in memory.pieces]
            buffers = {}
            for number, (p, arg) in enumerate(zip(signature.parameters, args, strict=True)):
                v = views.get(number)
                if v is None:
                    request.append(_scalar(entry, p, arg))
                    continue
                at = memory.address(v)
                request.append(f"array {at}")
                if v.dtype != "struct":
                    request.append(
                        f"buffer {at} {v.bytes} {int(not p.const)} {int(number in empty)} {v.itemsize} {number}"
                    )
                    buffers[number] = (p.name, v.bytes, v.shape, v.itemsize)
            begin = time.perf_counter()
            watch = _Watch(entry, memory, timeout)
            reply = process.call("\n".join(request), memory.file, watch)
            seconds = time.perf_counter() - begin
            if echo:
                print(reply.printed, end="")
                print(reply.complained, end="", file=sys.stderr)
            if reply.interrupt is not None:
                raise reply.interrupt
            returned = _value(signature.returns, reply.returned)
            narrator = Narrator(self.build, buffers)
            report = narrator.report(reply.records, reply.findings, reply.printed, seconds, returned)
            _raise_if_failed(report, signature, reply, narrator, timeout or round(watch.seconds))
            for number, v in views.items():
                if not signature.parameters[number].const:
                    memory.copy_back(v)
        return report

    def _signature(self, entry: str, args: tuple) -> Entry:
        if entry not in self.entries:
            raise TypeError(self._unknown(entry))
        signature = self.entries[entry]
        if len(args) != len(signature.parameters):
            wanted = ", ".join(p.name for p in signature.parameters)
            raise TypeError(f"{entry} takes {len(signature.parameters)} arguments ({wanted}), not {len(args)}")
        return signature


class _Watch:
    """Says when a call is to be given up, and, after two seconds and then now and again, on stderr how far it is.

    Without ``memory`` the module is being loaded. seconds: that it has taken.
    """

    def __init__(self, entry: str, memory: GlobalMemory | None, timeout: float | None):
        self.entry, self.memory, self.timeout = entry, memory, timeout
        self.seconds = 0.0
        self._last, self._since = (0, 0), 0.0
        self._next = 2.0

    def __call__(self, seconds: float, worked: float) -> float:
        """In how many seconds it is to be given up; process.py says what the arguments are."""
        self.seconds = seconds
        launches, blocks, done, kernel = self.memory.progress if self.memory else (0, 0, 0, "")
        if (launches, done) != self._last:
            self._last, self._since = (launches, done), worked
        left = self.timeout - seconds if self.timeout else min(self._since + PATIENCE - worked, LONGEST - seconds)
        if self._next <= seconds and left > 0:
            self._next = max(10.0, 2 * self._next)
            where = f"{kernel} has run {done} of its {blocks} blocks" if launches else "no kernel has been launched yet"
            where = where if self.memory else "the module is still being loaded"
            rule = f"{self.timeout:g} s" if self.timeout else f"{PATIENCE:g} s in which no block ends"
            print(
                f"{self.entry}: {seconds:.0f} s so far, {where}; it is given up after {rule} (timeout=...)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return left


def _holds_nothing(array: Any) -> bool:
    """NaN throughout."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array).all())
    if isinstance(array, ctypes.Structure | ctypes.Array) or not array.is_floating_point():
        return False
    return array.numel() > 0 and bool(array.isnan().all())


def _numbers_of(signature: Entry, names: tuple[str, ...] | list[str]) -> set[int]:
    known = {p.name: number for number, p in enumerate(signature.parameters)}
    for name in names:
        if name not in known:
            raise ValueError(f"unwritten names {name!r}; the parameters of {signature.name} are {', '.join(known)}")
    return {known[name] for name in names}


def _within(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= operator.index(value) <= high:
        raise ValueError(f"{name} is {value!r}; it is an integer from {low} to {high}")
    return operator.index(value)


def _check_array(entry: str, p: Parameter, v: View) -> None:
    if p.kind != "pointer":
        raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got an array")
    if p.element.endswith("*"):
        raise TypeError(
            f"{entry}: {p.name} is a pointer to pointers ({p.element}*), and the emulator passes arrays only: pass "
            "each as an argument of its own"
        )
    allowed = DTYPES.get(p.element)
    if allowed and v.dtype not in (*allowed, "struct"):
        raise TypeError(
            f"{entry}: {p.name} points to {p.element}, which is {allowed[0]}, and got an array of {v.dtype}"
        )
    if not p.const and not v.writable:
        raise TypeError(f"{entry}: {p.name} is not declared const, and got an array that may not be written")


def _scalar(entry: str, p: Parameter, value: Any) -> str:
    """An argument that is no array, as serve.cpp reads it: its kind, and its 8 bytes as an integer."""
    if p.kind == "pointer":
        if value is None or (isinstance(value, int) and not value):
            return "stream" if is_stream(p) else "i 0"
        if isinstance(value, int):
            raise TypeError(
                f"{entry}: {p.name} got an address. The source runs in a process of its own, where it means nothing: "
                "pass the array, the tensor or the ctypes structure itself"
            )
        raise TypeError(
            f"{entry}: {p.name} is a pointer: pass a numpy array, a CPU tensor or None, not {type(value).__name__}"
        )
    number = to_number(entry, p, value)
    if p.kind in ("float", "double"):
        return f"f {int.from_bytes(bytes(C_TYPES[p.kind](number)), 'little')}"
    return f"i {int(number) & 0xFFFFFFFFFFFFFFFF}"


def _value(kind: str, word: int) -> int | float | None:
    """What an entry returned, of the 8 bytes of its register."""
    if kind == "void":
        return None
    c_type: Any = ctypes.c_uint64 if "*" in kind else C_TYPES.get(kind, ctypes.c_int)
    return c_type.from_buffer_copy(word.to_bytes(8, "little")).value


def _raise_if_failed(report: Report, entry: Entry, reply: Reply, narrator: Narrator, seconds: float) -> None:
    fatal = next((f for f in report.findings if f.fatal), None)
    code = int(report.returned or 0) if entry.returns in ("int", "cudaError_t") else 0
    if fatal is None and (reply.error or code):
        fatal = next((f for f in report.findings if f.kind in RAISED), None)
    host = narrator.host_sentence(entry.name, reply, seconds)
    if fatal is not None:
        after = f"; after that, {host}" if host and reply.ending.kind != "stuck" else ""
        raise RAISED.get(fatal.kind, SimtError)(f"{fatal}{after}", report)
    if host:
        raise (KernelTimeout if reply.ending.kind == "stuck" else HostError)(host, report)
    if code:
        name = ERROR_NAMES.get(code, "an unknown CUDA error") if code > 0 else "its own error code"
        raise LaunchError(f"{entry.name} returned {code} ({name})", report)
    if reply.error:
        raise LaunchError(f"{entry.name}: {ERROR_NAMES.get(reply.error, 'an unknown CUDA error')}", report)


def compile_cuda(
    source: str | Path,
    *,
    check: bool = False,
    defines: dict[str, object] | None = None,
    include_dirs: tuple[str | Path, ...] | list[str | Path] = (),
    name: str | None = None,
) -> Module:
    """Compiles CUDA C++ for the CPU.

    Args:
        source: the text, or the path of a ``.cu`` file.
        check: a watched build sees every load and store: it finds races, uninitialised and out-of-bounds
            accesses, and counts bank conflicts and sectors. A fast build is faster, and sees collectives,
            copies and barriers.
        defines: macros, as ``{"BLOCK_M": 64}``.
        include_dirs: where else to look for headers. ``simt.h``, ``ptx.cuh``, ``cuda_fp16.h`` and
            ``cuda_bf16.h`` are found anyway.
        name: what messages call a source given as text.

    Raises:
        CompileError: the compiler's messages.
    """
    if isinstance(source, Path) or ("\n" not in source and source.endswith((".cu", ".cuh"))):
        path = Path(source)
        text, name, directory = path.read_text(), name or path.name, path.resolve().parent
    else:
        text, name, directory = source, name or "kernel.cu", None
    built = build(text, name=name, directory=directory, check=check, defines=defines, include_dirs=tuple(include_dirs))
    return Module(built)
