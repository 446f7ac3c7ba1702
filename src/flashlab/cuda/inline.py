"""CUDA C++ from a notebook cell to a function on tensors: one call, with a GPU or without.

    module = load_inline(source)                       # source: the text of a .cu file, or its path
    o, lse = module.forward(q, k, v, causal=True)      # a kernel of the series: problem.cuh, extern "C" forward
    module.launch("transpose", a, b, 1024)             # any extern "C" function; or module.transpose(a, b, 1024)

Three ways to build, all from the same source:

==========  =========================================================================================================
backend     what happens
==========  =========================================================================================================
"torch"     ``torch.utils.cpp_extension.load_inline``: the CUDA source, which needs no header of torch, and a small C++
            binding file written here (``module.binding_source``). The way an extension of PyTorch is built. The
            binding has to read PyTorch's headers, which takes most of the time.
"nvcc"      ``nvcc -shared``, called through ctypes: several times faster to build, for the loop of edit and try.
"emulator"  flashlab.simt: on the CPU, where there is no GPU or no nvcc, or on request.
==========  =========================================================================================================

The default is ``$FLASHLAB_CUDA_BACKEND``, else "torch" with a GPU ("nvcc" where ninja or Python's headers are missing),
else "emulator". Builds are kept in a directory of the user's (``cache_folder``), each under a name made from everything
that goes into it. A build is made in a directory of its own and moves to its name in one step: whoever shares the
cache gets a whole build or none, and a failed one leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlab.kernels import problem as _problem
from flashlab.kernels import series as _series
from flashlab.runtime import cache as _cache
from flashlab.simt import errors as _simt_errors
from flashlab.simt import source as _source
from flashlab.simt.run import _C_TYPES, _DTYPES

KERNELS = _series.FOLDER  # where problem.cuh is
INCLUDE = Path(__file__).parents[1] / "simt" / "include"  # simt.h and ptx.cuh
BACKENDS = ("torch", "nvcc", "emulator")
_FORMAT = 1  # of what is in the cache; raise it when a build of the same sources changes


# ---- errors ------------------------------------------------------------------------------------------------------
class CudaError(RuntimeError):
    """Base of what goes wrong between a CUDA source and its results. In a notebook it is its message, no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython calls this in place of its own traceback
        return [f"{type(self).__name__}: {self}"]


class CompileError(CudaError, _simt_errors.CompileError):
    """The compiler refused the source: its own messages, each with the line of the source that it is about.

    Attributes:
        log: everything the compiler wrote.
    """

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log
        self.report = None


class LaunchError(CudaError, _simt_errors.LaunchError):
    """A launch was refused, or failed. ``code`` and ``name`` are CUDA's (719, "cudaErrorLaunchFailure")."""

    def __init__(self, message: str, code: int | None = None, name: str | None = None):
        super().__init__(message)
        self.code, self.name, self.report = code, name, None


class Unavailable(CudaError):
    """This machine cannot build, or not run, what was asked for."""


# What to do about the codes that a launch gives. The sticky ones come back from every later call in the process.
_STICKY = "every later CUDA call of this process fails too, so restart Python, or the notebook's kernel"
_NAMES_THE_LINE = "load_inline(..., check=True) runs the same source in the emulator and names the line"
_ADVICE = {
    "cudaErrorInvalidValue": "an argument of the launch is wrong: most often more shared memory than the GPU has, more "
    "than 48 KB that were not asked for with cudaFuncSetAttribute, or more than 1024 threads a block",
    "cudaErrorMemoryAllocation": "the GPU's memory is full: free tensors, or torch.cuda.empty_cache()",
    "cudaErrorInvalidConfiguration": "the grid or the block is impossible: a block has 1 to 1024 threads, a grid at "
    "least one block, and at most 65535 in y and z",
    "cudaErrorLaunchOutOfResources": "a block needs more registers than a multiprocessor has: fewer threads, or "
    "__launch_bounds__",
    "cudaErrorNoKernelImageForDevice": "the code was compiled for another GPU: load it again, without arch=",
    "cudaErrorUnsupportedPtxVersion": "the driver is older than this nvcc: update the driver",
    "cudaErrorInsufficientDriver": "the driver is older than this nvcc: update the driver",
    "cudaErrorIllegalAddress": f"a thread touched memory that is not its own. {_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorMisalignedAddress": f"an address is no multiple of the access's size. {_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorLaunchTimeout": f"the kernel ran too long for a GPU that also drives a display; {_STICKY}",
    "cudaErrorLaunchFailure": "the kernel stopped, most often at an invalid address in shared memory. "
    f"{_NAMES_THE_LINE}; {_STICKY}",
    "cudaErrorAssert": f"an assert in the kernel failed; {_STICKY}",
}


def _launch_error(entry: str, code: int, name: str, asked: int, device: torch.device | None) -> LaunchError:
    if asked:
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        return LaunchError(
            f"{entry}: the kernel wants {asked} bytes of shared memory a block, and this GPU has {limit} at most: use "
            "smaller tiles, or fewer stages", code, name,
        )  # fmt: skip
    advice = _ADVICE.get(name)
    return LaunchError(f"{entry} returned {code}, {name}" + (f": {advice}" if advice else ""), code, name)


# ---- what this machine has ---------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1)
def find_nvcc() -> str | None:
    """nvcc's path: of $CUDA_HOME, of the PATH, of /usr/local/cuda, of the packages from PyPI; or None."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    candidates = [Path(f, "bin", "nvcc") for f in folders if f]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        candidates += sorted(Path(folder).glob("c*/bin/nvcc"), reverse=True)
    return next((str(c) for c in candidates if os.access(c, os.X_OK)), None)


@functools.lru_cache(maxsize=1)
def nvcc_version() -> str:
    """What nvcc calls itself, "13.0.88"."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise Unavailable("there is no nvcc on this machine")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "unknown"


def missing(backend: str) -> str | None:
    """Why a backend cannot be used here, as a sentence; None where it can."""
    if backend == "emulator":
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    if find_nvcc() is None:
        return "there is no nvcc (the CUDA toolkit has it)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler: install g++"
    if backend == "torch":
        from torch.utils import cpp_extension

        if cpp_extension.CUDA_HOME is None:
            return "PyTorch does not find the CUDA toolkit: set CUDA_HOME"
        if not cpp_extension.is_ninja_available():
            return "there is no ninja: pip install ninja"
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return "there are no headers of Python (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def default_backend() -> str:
    """The backend that load_inline takes if none is named; see the module's text."""
    wanted = os.environ.get("FLASHLAB_CUDA_BACKEND", "").strip()
    if wanted:
        if wanted not in BACKENDS:
            raise ValueError(f"FLASHLAB_CUDA_BACKEND is {wanted!r}; there are {', '.join(BACKENDS)}")
        return wanted
    return next(b for b in BACKENDS if missing(b) is None)


def cache_folder() -> Path:
    """Where builds are kept (see flashlab.runtime.cache). Safe to delete."""
    try:
        return _cache.folder("cuda")
    except _cache.CacheError as error:
        raise Unavailable(str(error)) from None


# ---- sources -----------------------------------------------------------------------------------------------------
# What is put after the learner's source: a call with arrays instead of a struct of pointers, and what CUDA said.
_FORWARD_ENTRY = """
extern "C" int forward_arrays(const void* q, const void* k, const void* v, void* o, float* lse, float* workspace,
                              const void* problem, void* stream) {
    Problem p = *(const Problem*)problem;
    p.q = q, p.k = k, p.v = v, p.o = o, p.lse = lse, p.workspace = workspace;
    return forward(&p, stream);
}
"""
# Before it, for nvcc: a request for shared memory is looked at before the driver refuses it without a number.
_PRELUDE = """#include <cuda_runtime.h>
static int flashlab_asked = 0;
template <class K> static cudaError_t flashlab_func_set_attribute(K kernel, cudaFuncAttribute what, int value) {
    int device = 0, limit = value;
    if (what == cudaFuncAttributeMaxDynamicSharedMemorySize && cudaGetDevice(&device) == cudaSuccess)
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (value > limit) {
        flashlab_asked = value;
        return cudaErrorInvalidValue;
    }
    return cudaFuncSetAttribute(kernel, what, value);
}
#define cudaFuncSetAttribute flashlab_func_set_attribute
"""
_POSTLUDE = """
extern "C" int64_t flashlab_set_device(int device) { return (int64_t)cudaSetDevice(device); }
extern "C" int64_t flashlab_last_error() { return (int64_t)cudaGetLastError(); }
extern "C" int64_t flashlab_asked_shared() { const int bytes = flashlab_asked; flashlab_asked = 0; return bytes; }
extern "C" const char* flashlab_error_name(int code) { return cudaGetErrorName((cudaError_t)code); }
"""

# Instructions that older GPUs lack, by the names of ptx.cuh.
_NEEDS = {
    r"stmatrix_x\d": ((9, 0), "stmatrix"),
    r"cp_async|__pipeline_memcpy_async": ((8, 0), "cp.async"),
    r"mma_m16n8k16|mma_m16n8k8": ((8, 0), "mma.m16n8k16"),
    r"ldmatrix_x\d": ((7, 5), "ldmatrix"),
}


@dataclass(frozen=True)
class _Text:
    """A learner's source, and what is known of it before it is compiled."""

    text: str
    name: str
    directory: Path | None
    takes_problem: bool  # it defines forward(const Problem*, void* stream)

    def define(self, macro: str) -> str | None:
        """The value in the source's own ``#define`` of a macro: its default."""
        found = re.search(rf"^\s*#\s*define\s+{macro}\s+(\w+)", self.text, re.MULTILINE)
        return found[1] if found else None

    @property
    def emulated(self) -> str:
        return self.text + (_FORWARD_ENTRY if self.takes_problem else "")

    @property
    def native(self) -> str:
        tail = (_FORWARD_ENTRY if self.takes_problem else "") + "#include <stdint.h>" + _POSTLUDE
        return f'{_PRELUDE}#line 1 "{self.name}"\n{self.text}\n#line 1 "flashlab_call.cuh"\n{tail}'


def _takes_problem(entry: _source.Entry) -> bool:
    return entry.name == "forward" and bool(entry.parameters) and entry.parameters[0].element == "Problem"


def _read(source: str | os.PathLike, name: str | None) -> _Text:
    if isinstance(source, os.PathLike) or ("\n" not in source and str(source).endswith((".cu", ".cuh"))):
        path = Path(source)
        text, name, directory = path.read_text(encoding="utf-8"), name or path.name, path.resolve().parent
    else:
        text, name, directory = str(source), name or "kernel.cu", None
    return _Text(text, name, directory, any(map(_takes_problem, _source.entries(text).values())))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


# ---- the compiler's messages -------------------------------------------------------------------------------------
_MESSAGE = re.compile(
    r"^(?P<file>[^\s:(][^:(]*)(?:\((?P<line>\d+)\)|:(?P<gline>\d+)(?::\d+)?): "
    r"(?:catastrophic |fatal )?error[^:]*: (?P<text>.*)$"
)


def _compile_error(text: _Text, log: str, compiler: str) -> CompileError:
    """The errors of a log, each with the line of the source it is about and a mark before it."""
    lines = text.text.splitlines()
    found = [m for m in map(_MESSAGE.match, log.splitlines()) if m]
    shown = [f"{text.name} does not compile ({compiler}):"]
    for m in found[:5]:
        number, file = int(m["line"] or m["gline"]), m["file"]
        own = Path(file).name == text.name
        shown.append(f"{Path(file).name}:{number}: {m['text'].strip()}")
        if own and 0 < number <= len(lines):
            shown += [f"  {number - 1:4} | {lines[number - 2]}"] if number > 1 else []
            shown.append(f"> {number:4} | {lines[number - 1]}")
    if len(found) > 5:
        shown.append(f"... and {len(found) - 5} more errors (the exception's .log has all)")
    if not found:
        shown += log.strip().splitlines()[-12:]
    return CompileError("\n".join(shown), log)


# ---- builds ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _workspace(cache: Path):
    """A directory for one build, on the cache's file system, that nobody else sees."""
    path = Path(tempfile.mkdtemp(prefix="build-", dir=cache))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _keep(work: Path, done: Path) -> None:
    """Moves a finished build to its name. Where another process was first, its build stays: they are the same."""
    if (done / "manifest.json").exists():
        return
    try:
        os.rename(work, done)
    except OSError:
        if not (done / "manifest.json").exists():
            raise


def _nvcc_flags(text: _Text, defines: dict[str, Any], include_dirs: Sequence[Path], arch: str) -> list[str]:
    folders = [*([text.directory] if text.directory else []), *include_dirs, INCLUDE, KERNELS]
    macros = [f"-D{k}={1 if v is True else v}" for k, v in defines.items() if v is not None and v is not False]
    return ["-O3", "-std=c++17", "-lineinfo", f"-arch={arch}", *macros, *[f"-I{Path(f).resolve()}" for f in folders]]


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, _changed: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _headers(text: _Text, include_dirs: Iterable[Path]) -> list[str]:
    """The digests of every header that the source could include: a header is part of what a build is made from."""
    folders = [*([text.directory] if text.directory else []), *include_dirs, INCLUDE, KERNELS]
    files = {p for f in folders for p in Path(f).glob("*.cuh")} | {p for f in include_dirs for p in Path(f).glob("*.h")}
    files |= {INCLUDE / "simt.h"}
    return [_file_digest(str(p), p.stat().st_mtime_ns) for p in sorted(files)]


def _build_nvcc(text: _Text, flags: list[str], key: str) -> tuple[Path, bool]:
    """(the shared library, whether it was built before)."""
    cache = cache_folder()
    done = cache / f"nvcc-{key}"
    library = done / "kernel.so"
    if (done / "manifest.json").exists():
        return library, True
    with _workspace(cache) as work:
        (work / "kernel.cu").write_text(text.native, encoding="utf-8")
        command = [find_nvcc(), *flags, "-shared", "-Xcompiler", "-fPIC", "-o", "kernel.so", "kernel.cu"]
        result = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if result.returncode:
            raise _compile_error(text, result.stderr + result.stdout, f"nvcc {nvcc_version()}, {_arch_of(flags)}")
        (work / "manifest.json").write_text(json.dumps({"name": text.name, "warnings": result.stderr}))
        _keep(work, done)
    return library, False


def _arch_of(flags: Iterable[str]) -> str:
    return next(f.removeprefix("-arch=") for f in flags if f.startswith("-arch="))


_attempts = itertools.count()


def _build_torch(text: _Text, flags: list[str], key: str, binding: str, verbose: bool) -> tuple[Path, str, bool]:
    """(the extension module's file, its name, whether it was built before)."""
    cache = cache_folder()
    done = cache / f"torch-{key}"
    with contextlib.suppress(OSError, ValueError, KeyError):
        name = json.loads((done / "manifest.json").read_text())["module"]
        return done / f"{name}.so", name, True
    from torch.utils import cpp_extension

    # PyTorch takes a second build of one name in one process for a repetition, also after a failed one, and it waits
    # for a lock file that a killed process leaves behind. A name and a directory for each attempt avoid both.
    name = f"flashlab_{key}_{os.getpid()}_{next(_attempts)}"
    # PyTorch's own flags forbid the arithmetic of __half and __nv_bfloat16, which kernels use.
    forbidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    allowed = [f"-U__CUDA_NO_{x}__" for x in forbidden]
    with _workspace(cache) as work:
        try:
            folders = [f.removeprefix("-I") for f in flags if f.startswith("-I")]  # PyTorch quotes these, and no others
            options = [shlex.quote(f) for f in flags if not f.startswith("-I")]
            built = cpp_extension.load_inline(
                name=name, cpp_sources=[binding], cuda_sources=[text.native], no_implicit_headers=True,
                extra_cflags=["-O0"], extra_cuda_cflags=[*options, *allowed], extra_include_paths=folders,
                build_directory=str(work), verbose=verbose,
            )  # fmt: skip
        except RuntimeError as error:
            raise _compile_error(text, str(error), f"nvcc {nvcc_version()}, {_arch_of(flags)}") from None
        for leftover in ("main.o", "cuda.cuda.o", ".ninja_deps", ".ninja_log"):
            (work / leftover).unlink(missing_ok=True)
        (work / "manifest.json").write_text(json.dumps({"name": text.name, "module": name}))
        _keep(work, done)
    kept = json.loads((done / "manifest.json").read_text())["module"]
    if kept == name:
        sys.modules[name] = built
    return done / f"{kept}.so", kept, False


def _import(path: Path, name: str):
    """The extension module in a file; an extension that is in the process already is not loaded twice."""
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader, origin=str(path)))
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def binding_source(entries: dict[str, _source.Entry], name: str = "kernel.cu") -> str:
    """The C++ file that makes extern "C" functions callable with tensors: what a PyTorch extension's binding does."""
    declared, bound, defined = [], [], []
    for e in entries.values():
        if e.name.startswith("flashlab_") or _takes_problem(e):
            continue  # called through ctypes; forward_arrays calls the latter
        c_types = [("const void*" if p.const else "void*") if p.kind == "pointer" else p.kind for p in e.parameters]
        declared.append(f'extern "C" {e.returns} {e.name}({", ".join(c_types)});')
        takes, gives = ["int device"], []
        for p in e.parameters:
            own = p.name + "_" if p.name in ("device", "stream") else p.name.replace(" ", "_")
            if _is_stream(p):
                gives.append("c10::cuda::getCurrentCUDAStream(device).stream()")
            elif p.kind == "pointer":
                takes.append(f"const py::object& {own}")
                gives.append(f"address({own})")
            else:
                takes.append(f"{p.kind} {own}")
                gives.append(own)
        call = f"{e.name}({', '.join(gives)})"
        body = f"{call};\n    return 0;" if e.returns == "void" else f"return {call};"
        head = textwrap.fill(f"static int64_t bound_{e.name}({', '.join(takes)}) {{", 116, subsequent_indent=" " * 8)
        body = textwrap.fill(body, 116, initial_indent=" " * 4, subsequent_indent=" " * 8, replace_whitespace=False)
        bound.append(f"{head}\n    const c10::cuda::CUDAGuard guard(device);\n{body}\n}}")
        defined.append(f'    m.def("{e.name}", &bound_{e.name});')
    newline = "\n"
    return f"""// The PyTorch binding of {name}: tensors in, a launch on their device and PyTorch's current stream.
#include <torch/csrc/utils/pybind.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

{newline.join(declared)}

static void* address(const py::object& x) {{             // of a tensor's data; None is a null pointer
    if (x.is_none()) return nullptr;
    if (py::isinstance<py::int_>(x)) return (void*)x.cast<uintptr_t>();
    return x.cast<at::Tensor>().data_ptr();
}}

{(newline * 2).join(bound)}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
{newline.join(defined)}
}}
"""


def _is_stream(p: _source.Parameter) -> bool:
    return p.kind == "pointer" and (p.element == "stream" or (p.name == "stream" and p.element == "void"))


# ---- what can be called ------------------------------------------------------------------------------------------
class _Native:
    """The entries of a build by nvcc: called with values, on a device, at PyTorch's current stream."""

    def __init__(self, call: Callable[..., int], last_error, asked, error_name, where: Path, from_cache: bool):
        self.call, self.last_error, self.asked, self.error_name = call, last_error, asked, error_name
        self.where, self.from_cache = where, from_cache


def _load_ctypes(library: Path, entries: dict[str, _source.Entry], from_cache: bool) -> _Native:
    dll = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    dll.flashlab_error_name.restype = ctypes.c_char_p

    def call(entry: _source.Entry, device: int, values: Sequence[Any]) -> int:
        function = getattr(dll, entry.name)
        function.restype = None if entry.returns == "void" else _C_TYPES.get(entry.returns, ctypes.c_int)
        with torch.cuda.device(device):
            dll.flashlab_set_device(device)
            stream = torch.cuda.current_stream(device).cuda_stream
            given, arguments = iter(values), []
            for p in entry.parameters:
                if _is_stream(p):
                    arguments.append(ctypes.c_void_p(stream))
                elif p.kind == "pointer":
                    x = next(given)
                    arguments.append(ctypes.c_void_p(x.data_ptr() if isinstance(x, torch.Tensor) else x))
                else:
                    arguments.append(_C_TYPES[p.kind](next(given)))
            return function(*arguments) or 0

    def name_of(code: int) -> str:
        return dll.flashlab_error_name(code).decode()

    return _Native(call, dll.flashlab_last_error, dll.flashlab_asked_shared, name_of, library, from_cache)


def _load_extension(path: Path, name: str, from_cache: bool) -> _Native:
    module = _import(path, name)
    dll = ctypes.CDLL(str(path))  # another handle to what is in the process already
    dll.flashlab_error_name.restype = ctypes.c_char_p

    def call(entry: _source.Entry, device: int, values: Sequence[Any]) -> int:
        return getattr(module, entry.name)(device, *values)

    def name_of(code: int) -> str:
        return dll.flashlab_error_name(code).decode()

    return _Native(call, dll.flashlab_last_error, dll.flashlab_asked_shared, name_of, path, from_cache)


class CudaModule:
    """A compiled CUDA source; see ``load_inline``.

    Attributes:
        backend: "torch", "nvcc" or "emulator".
        entries: the extern "C" functions of the source, by name.
        report: the emulator's report of the last call (findings and counters); None on a GPU.
        from_cache: the build was there already.
        binding_source: of the "torch" backend, the C++ file that binds the entries.
    """

    def __init__(self, text: _Text, *, backend: str, check: bool, defines: dict, include_dirs: Sequence[Path],
                 arch: str | None, functions: Sequence[str] | None, head_dim: int | None, dtype: torch.dtype | None,
                 verbose: bool, head_dims: tuple[int, ...] | None = None):  # fmt: skip
        self._text, self._check, self._defines, self._verbose = text, check, dict(defines), verbose
        self._include_dirs, self._arch = list(include_dirs), arch
        self.backend = backend
        self.report = None
        self._head_dims = head_dims
        parsed = _source.entries(text.text)
        unknown = [f for f in functions or () if f not in parsed]
        if unknown or not parsed:
            wanted = (unknown or ["at all"])[0]
            raise ValueError(f'{text.name} has no extern "C" function {wanted}; it has {", ".join(parsed) or "none"}')
        self.entries = {n: e for n, e in parsed.items() if functions is None or n in functions}
        self._every_entry = _source.entries(text.native)  # those that are put after the source too
        self._variants: dict[tuple, Any] = {}
        # A kernel of the series is compiled for one head_dim and one dtype. The first variant is built at once, so that
        # an error in the source shows here; others follow when tensors ask for them.
        self._built = self._variant(*self._first(head_dim, dtype))

    def _first(self, head_dim: int | None, dtype: torch.dtype | None) -> tuple[int | None, str | None]:
        if not self._text.takes_problem:
            return None, None
        if dtype is not None and dtype not in _problem.ELEMENTS:
            raise ValueError(f"the kernels' element types are {', '.join(map(str, _problem.ELEMENTS))}, not {dtype}")
        d = head_dim or self._defines.get("HEAD_DIM") or self._text.define("HEAD_DIM") or 64
        element = self._defines.get("ELEMENT") or self._text.define("ELEMENT") or "__half"
        return int(d), _problem.ELEMENTS[dtype] if dtype else str(element)

    def _variant(self, head_dim: int | None, element: str | None):
        key = (head_dim, element)
        if key not in self._variants:
            defines = dict(self._defines)
            if head_dim is not None:
                defines |= {"HEAD_DIM": head_dim, "ELEMENT": element}
            self._variants[key] = self._compile(defines)
        return self._variants[key]

    def _compile(self, defines: dict):
        text = self._text
        if self.backend == "emulator":
            from flashlab.simt.build import build
            from flashlab.simt.run import Module

            try:
                return Module(build(text.emulated, name=text.name, directory=text.directory, check=self._check,
                                    defines=defines, include_dirs=(*self._include_dirs, KERNELS)))  # fmt: skip
            except _simt_errors.CompileError as error:
                raise _compile_error(text, str(error), "the emulator's host compiler") from None
        arch = self._arch or _device_arch()
        flags = _nvcc_flags(text, defines, self._include_dirs, arch)
        headers = _headers(text, self._include_dirs)
        entries = self._every_entry
        if self.backend == "nvcc":
            key = _digest(_FORMAT, text.native, text.name, flags, headers, nvcc_version())
            library, cached = _build_nvcc(text, flags, key)
            return _load_ctypes(library, entries, cached)
        binding = binding_source(entries, text.name)
        key = _digest(_FORMAT, text.native, text.name, binding, flags, headers, nvcc_version(), torch.__version__,
                      sysconfig.get_config_var("SOABI"))  # fmt: skip
        return _load_extension(*_build_torch(text, flags, key, binding, self._verbose))

    @property
    def binding_source(self) -> str:
        """The C++ file that the "torch" backend compiles beside the source."""
        return binding_source(self._every_entry, self._text.name)

    @property
    def from_cache(self) -> bool:
        return self._built.build.from_cache if self.backend == "emulator" else self._built.from_cache

    def __repr__(self) -> str:
        kind = f"{self.backend}, check build" if self._check else self.backend
        return f"<{self._text.name}, {kind}: {', '.join(self.entries)}>"

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in self.__dict__.get("entries", {}):
            known = ", ".join(self.__dict__.get("entries", {})) or "none"
            raise AttributeError(f'the source has no extern "C" function {name!r}; it has {known}')
        return functools.partial(self.launch, name)

    # ---- any entry ------------------------------------------------------------------------------------------------
    def launch(self, entry: str, *args: Any, **options: Any) -> int:
        """Calls an extern "C" function of the source with tensors and numbers.

        Args:
            entry: the function's name.
            args: its arguments. A tensor for a pointer: contiguous, of the pointer's element type, on the GPU (with the
                emulator on any device); None for a null pointer; numbers for the rest. A last parameter named
                ``stream`` may be left out: it is PyTorch's current stream.
            options: of the emulator's launch: ``timeout``, ``shared_limit``, ``threads``, ``echo``.

        Returns:
            what the function returns; for one that returns an ``int`` that is 0.

        Raises:
            TypeError: an argument does not fit the signature.
            ValueError: a tensor that is not contiguous, or on another device than the first.
            LaunchError: the function returned a CUDA error; it carries CUDA's name for it and what to do.
            flashlab.simt.SimtError: what the emulator found to end the launch.
        """
        return self._launch(self._built, self._entry(entry), args, **options)

    def _entry(self, name: str) -> _source.Entry:
        if name not in self.entries:
            known = ", ".join(self.entries) or "none"
            raise TypeError(f'the source has no extern "C" function {name!r}; it has {known}')
        return self.entries[name]

    def _launch(self, built, entry: _source.Entry, args: Sequence[Any], **options: Any) -> int:
        parameters = [p for p in entry.parameters if not _is_stream(p)]
        if len(args) == len(entry.parameters) and len(parameters) < len(entry.parameters):
            at = next(i for i, p in enumerate(entry.parameters) if _is_stream(p))
            args = [*args[:at], *args[at + 1 :]]  # a stream was given: it is PyTorch's current one anyway
        if len(args) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise TypeError(f"{entry.name} takes {len(parameters)} arguments ({names}), not {len(args)}")
        values = [_argument(entry.name, p, x) for p, x in zip(parameters, args, strict=True)]
        tensors = {p.name: x for p, x in zip(parameters, args, strict=True) if isinstance(x, torch.Tensor)}
        first = next(iter(tensors.items()), None)
        for name, x in tensors.items():
            if x.device != first[1].device:
                raise ValueError(f"{entry.name}: {name} is on {x.device}, and {first[0]} is on {first[1].device}")
        if self.backend == "emulator":
            return self._emulate(built, entry, parameters, values, options)
        device = first[1].device if first else torch.device("cuda", torch.cuda.current_device())
        if device.type != "cuda":
            name = first[0]
            raise ValueError(f"{entry.name}: {name} is on {device}, and the kernel runs on a GPU: pass {name}.cuda()")
        code = built.call(entry, device.index, values)
        if entry.returns == "void":
            code = built.last_error()
        elif entry.returns != "int":
            return code
        if code:
            name = built.error_name(code) if code > 0 else "its own error code"
            raise _launch_error(entry.name, code, name, built.asked(), device)
        return 0

    def _emulate(
        self,
        built,
        entry: _source.Entry,
        parameters: Sequence[_source.Parameter],
        values: list,
        options: dict[str, Any],
    ) -> int:
        copies = {}  # tensors of a GPU work as well: the emulator gets copies
        for i, x in enumerate(values):
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                copies[i] = x
                values[i] = x.cpu()
        given = iter(values)
        arguments = [None if _is_stream(p) else next(given) for p in entry.parameters]
        try:
            self.report = built.launch(entry.name, *arguments, **options)
        except _simt_errors.SimtError as error:
            self.report = error.report
            returned = re.search(r"returned (\d+) \((\w+)\)", str(error))
            if returned and returned[2] in _ADVICE:
                raise _launch_error(entry.name, int(returned[1]), returned[2], 0, None) from None
            raise
        for i, x in copies.items():
            if not parameters[i].const:
                x.copy_(values[i])
        returned = self.report.returned
        return returned if isinstance(returned, int) else 0

    # ---- a kernel of the series -----------------------------------------------------------------------------------
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
        sms: int | None = None, **launch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """softmax(scale * q k^T) v, by a source that defines ``forward(const Problem*, void* stream)``.

        Args:
            q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], of one dtype and device. Any
                strides: a tensor whose rows are not contiguous, or not on 16-byte boundaries, is copied first.
            causal: query i sees the keys up to i + seq_k - seq_q.
            scale: head_dim ** -0.5, if None; zero or negative, q is multiplied by it first.
            sms: multiprocessors that the kernel is told of; the GPU's, or 132 in the emulator, if None.
            launch: options of the emulator's launch: ``timeout``, ``shared_limit``, ``threads``, ``echo``.

        Returns:
            o: like q. lse: [batch, heads, seq_q], float32. A row that sees no key has o = 0 and lse = -inf.

        Raises:
            ValueError: tensors that do not belong together, an unsupported dtype or head_dim, too many rows.
            LaunchError: CUDA's error, and what to do.
            Unavailable: the GPU lacks an instruction of the kernel.
        """
        if not self._text.takes_problem:
            raise TypeError(f"{self._text.name} does not define forward(const Problem*, void* stream): use launch")
        if any(x.dim() != 4 for x in (q, k, v)):
            _problem.check(q, k, v, scale=1.0, head_dims=(64, 128, 256))  # says which
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        o = new_output(q)
        if math.isfinite(scale) and scale <= 0:
            q, scale = q * scale, 1.0
        q, k, v = (x if _rows_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        _problem.check(q, k, v, scale=scale, head_dims=self.head_dims)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if o.numel() == 0:
            return o, lse
        if k.shape[2] == 0:
            return o.zero_(), lse.fill_(-math.inf)
        if lse.numel() >= 2**31 or max(k.shape[2], q.shape[2]) >= 2**30:
            raise ValueError(f"{lse.numel()} query rows are too many for one launch (2^31): split the batch")
        if self.backend != "emulator" and q.device.type != "cuda":
            raise ValueError(f"q is on {q.device}, and the kernel runs on a GPU: pass q.cuda(), k.cuda(), v.cuda()")
        built = self._variant(q.shape[-1], _problem.ELEMENTS[q.dtype])
        on_gpu = q.device.type == "cuda" and self.backend != "emulator"
        if sms is None:
            sms = torch.cuda.get_device_properties(q.device).multi_processor_count if on_gpu else 132
        p = _problem.problem(q, k, v, o, lse, causal=causal, scale=scale, sms=sms, head_dims=self.head_dims)
        workspace = torch.empty(max(1, self._workspace_floats(built, p, q.device)), device=q.device)
        arguments = [q, k, v, o, lse, workspace, p if self.backend == "emulator" else ctypes.addressof(p)]
        if self.backend == "emulator":
            launch = {"unwritten": ("o", "lse", "workspace"), **launch}
        self._launch(built, self._every_entry["forward_arrays"], arguments, **launch)
        return o, lse

    @functools.cached_property
    def head_dims(self) -> tuple[int, ...]:
        """What the source can be compiled for, as its head says ("Compile with -DHEAD_DIM=64, 128 or 256")."""
        fixed = self._defines.get("HEAD_DIM")
        if fixed:
            return (int(fixed),)
        if self._head_dims:
            return self._head_dims
        found = re.search(r"-DHEAD_DIM=([\d, or]+)", self._text.text)
        return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else (64, 128)

    def _workspace_floats(self, built, p: _problem.Problem, device: torch.device) -> int:
        entry = self._every_entry.get("workspace_floats")
        if entry is None:
            return 0
        if self.backend == "emulator":
            return built.launch("workspace_floats", p).returned
        return built.call(entry, device.index, [ctypes.addressof(p)])


def new_output(q: torch.Tensor) -> torch.Tensor:
    """An empty tensor for o: q's dtype and device, and its layout where that has contiguous, aligned rows."""
    o = torch.empty_like(q)
    if o.stride(3) == 1 and all(s * o.element_size() % 16 == 0 for s in o.stride()[:3]):
        return o
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _rows_aligned(x: torch.Tensor) -> bool:
    size = x.element_size()
    strides = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in strides)


def _argument(entry: str, p: _source.Parameter, x: Any):
    """The value for a parameter, checked: a tensor or None or an address for a pointer, a number for the rest."""
    if isinstance(x, torch.Tensor):
        if p.kind != "pointer":
            if x.numel() != 1:
                raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got a tensor of shape {tuple(x.shape)}")
            x = x.item()
        else:
            allowed = _DTYPES.get(p.element)
            if allowed and str(x.dtype).removeprefix("torch.") not in allowed:
                raise TypeError(f"{entry}: {p.name} points to {p.element}, and got a tensor of {x.dtype}")
            if not x.is_contiguous() and p.element != "void":
                raise ValueError(f"{entry}: {p.name} has strides {x.stride()}: pass {p.name}.contiguous()")
            return x.detach()
    if p.kind == "pointer":
        if x is None or isinstance(x, int | ctypes.Structure):
            return x
        raise TypeError(f"{entry}: {p.name} is a pointer: pass a tensor or None, not {type(x).__name__}")
    kind = _C_TYPES.get(p.kind)
    if kind is None:
        raise TypeError(f"{entry}: {p.name} has the type {p.kind}; an entry takes pointers and plain numbers")
    if kind in (ctypes.c_float, ctypes.c_double):
        return float(x)
    if isinstance(x, float) and not x.is_integer():
        raise TypeError(f"{entry}: {p.name} is declared {p.kind}, and got {x!r}")
    return bool(x) if kind is ctypes.c_bool else int(x)


def _device_arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _check_capability(text: _Text, capability: tuple[int, int], gpu: str) -> None:
    code = _source._blank_comments(text.text)
    for pattern, (needed, instruction) in _NEEDS.items():
        if re.search(rf"\b(?:{pattern})\b", code) and capability < needed:
            raise Unavailable(
                f"{gpu} has compute capability {capability[0]}.{capability[1]}, and {text.name} uses {instruction}, "
                f'which needs {needed[0]}.{needed[1]}: load_inline(..., backend="emulator") runs it on the CPU'
            )


def load_inline(
    source: str | os.PathLike | _series.Step,
    *,
    defines: dict[str, Any] | None = None,
    include_dirs: Sequence[str | os.PathLike] = (),
    functions: Sequence[str] | None = None,
    check: bool = False,
    backend: str | None = None,
    arch: str | None = None,
    name: str | None = None,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    verbose: bool = False,
) -> CudaModule:
    """Compiles CUDA C++ and returns its functions, callable with tensors.

    Args:
        source: the text, the path of a ``.cu`` file, or a step of the series. It needs no header of PyTorch; what is
            to be called from Python is an ``extern "C"`` function. One that returns an ``int`` returns CUDA's error
            code. ``simt.h``,
            ``ptx.cuh`` and ``problem.cuh`` are found.
        defines: macros, as ``{"BLOCK_M": 64}``; True defines a macro as 1, None leaves it undefined.
        include_dirs: where else to look for headers.
        functions: which extern "C" functions to offer; all of them, if None.
        check: a check build of the emulator, on any machine: it sees races, bad addresses and bank conflicts;
            ``module.report`` has what it found and counted.
        backend: "torch", "nvcc" or "emulator"; ``default_backend()``, if None.
        arch: nvcc's ``-arch``; this GPU's, if None.
        name: what the compiler's messages call a source given as text.
        head_dim, dtype: of a kernel of the series, the variant to build now (the defaults of its source, if None);
            others are built when tensors ask for them.
        verbose: show PyTorch's build.

    Raises:
        CompileError: with the compiler's messages against the lines of the source.
        Unavailable: the backend, or an instruction of the source, is not to be had on this machine.
        ValueError: an unknown backend, or a source without an extern "C" function.
    """
    step = source if isinstance(source, _series.Step) else None
    if step is not None:
        source, dtype = step.path, dtype or step.dtypes[0]
    text = _read(source, name)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")
    backend = "emulator" if check else backend or default_backend()
    reason = missing(backend)
    if reason:
        raise Unavailable(f'backend "{backend}" cannot be used here: {reason}. backend="emulator" runs on the CPU')
    if backend != "emulator":
        _check_capability(text, torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    folders = [Path(d).resolve() for d in include_dirs]
    return CudaModule(
        text, backend=backend, check=check, defines=defines or {}, include_dirs=folders,
        arch=arch, functions=functions, head_dim=head_dim, dtype=dtype, verbose=verbose,
        head_dims=step.head_dims if step else None,
    )  # fmt: skip


__all__ = [
    "BACKENDS", "CompileError", "CudaError", "CudaModule", "LaunchError", "Unavailable", "binding_source",
    "cache_folder", "default_backend", "find_nvcc", "load_inline", "missing", "new_output", "nvcc_version",
]  # fmt: skip
