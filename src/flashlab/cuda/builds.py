"""Builds of a CUDA source by nvcc, alone or through PyTorch: one key, one set of flags, one way to call what comes out.

Both make a shared library with the source's extern "C" functions as symbols, which ``Native`` calls through ctypes. The
one that PyTorch builds is a Python module too, with the functions bound to tensors (flashlab.cuda.binding).
"""

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashlab.cuda import toolchain
from flashlab.cuda.binding import binding_source
from flashlab.cuda.errors import LaunchError, compile_error, launch_error, messages, quoted
from flashlab.cuda.sources import GUARDED, Text
from flashlab.runtime import cache
from flashlab.simt import source as _source

_FORMAT = 3  # raise it when a build of the same sources changes
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH")  # nvcc's, gcc's


@dataclass(frozen=True)
class Build:
    """A shared library of a source: where it is, and what the compiler said of it."""

    library: Path
    log: str  # the compiler's own: warnings, and the registers of each kernel
    module: str  # the name that PyTorch gave it as a Python module; "" where nvcc built it alone
    from_cache: bool

    def warnings(self, text: Text) -> str:
        return "\n".join(quoted(messages(self.log, "warning"), text.name, text.text))


def build(text: Text, flags: Sequence[str], backend: str, *, folders: Sequence[Path], verbose: bool = False) -> Build:
    """Compiles a source with nvcc's flags by a backend, "nvcc" or "torch", or finds it compiled. Raises CompileError.

    folders: where its headers are, for the key: a changed header is a changed source. verbose: show PyTorch's build.
    """
    parts = [_FORMAT, backend, text.native, text.name, list(flags), _headers(text, folders), toolchain.nvcc_version()]
    parts += [[os.environ.get(name) for name in _VARIABLES], platform.machine(), platform.libc_ver()]
    make = functools.partial(_with_nvcc, text=text, flags=flags)
    if backend == "torch":
        binding = binding_source(text.entries.values(), text.name)
        parts += [binding, torch.__version__, sysconfig.get_config_var("SOABI")]
        make = functools.partial(_with_pytorch, text=text, flags=flags, binding=binding, verbose=verbose)
    found = cache.kept("cuda", cache.key(*parts), make)
    return Build(found.folder / "kernel.so", found.notes["log"], found.notes["module"], found.from_cache)


def _headers(text: Text, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """What the headers of a source hold, for the key. One that a macro names is not known: then every build is new."""
    more = [f for name in _VARIABLES[-2:] for f in os.environ.get(name, "").split(os.pathsep) if f]
    found = _source.includes(text.text, [*folders, *map(Path, more), Path("/")])
    texts = [text.text, *(p.read_text(encoding="utf-8", errors="replace") for p in found)]
    unknown = any(re.search(r"^[ \t]*#[ \t]*include[ \t]+[A-Za-z_]", given, re.M) for given in texts)
    return [*((str(p), cache.file_digest(p)) for p in found), *([("", uuid.uuid4().hex)] if unknown else [])]


def _compiler(flags: Sequence[str]) -> str:
    arch = next(f.rpartition("=")[2] for f in flags if f.startswith(("-arch=", "-gencode=")))
    return f"nvcc {toolchain.nvcc_version()}, {arch}"


def _with_nvcc(work: Path, text: Text, flags: Sequence[str]) -> dict[str, Any]:
    """Makes work/kernel.so; returns the notes of the build."""
    (work / "kernel.cu").write_text(text.native, encoding="utf-8")
    command = [toolchain.nvcc(), *flags, "-shared", "-Xcompiler", "-fPIC", "-o", "kernel.so", "kernel.cu"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise compile_error(text.name, text.text, done.stderr + done.stdout, _compiler(flags))
    return {"log": done.stderr, "module": ""}


def _with_pytorch(work: Path, text: Text, flags: Sequence[str], binding: str, verbose: bool) -> dict[str, Any]:
    """The same by torch.utils.cpp_extension.load_inline, with the binding; the module is in the process afterwards."""
    from torch.utils import cpp_extension

    # PyTorch takes a second build of one name in one process for a repetition, also after a failed one, and it waits
    # for a lock file that a killed process leaves behind. A name and a directory for each attempt avoid both.
    module = f"flashlab_{work.name}".replace("-", "_")
    # PyTorch's own flags forbid the arithmetic of __half and __nv_bfloat16, which kernels use.
    forbidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    allowed = [f"-U__CUDA_NO_{x}__" for x in forbidden]
    folders = [f.removeprefix("-I") for f in flags if f.startswith("-I")]  # PyTorch quotes these, and no others
    options = [shlex.quote(f) for f in flags if not f.startswith("-I") and f != "--expt-relaxed-constexpr"]
    log = work / "nvcc.log"  # PyTorch drops what nvcc says when it succeeds; the command is run by a shell
    try:
        sys.modules[module] = cpp_extension.load_inline(
            name=module, cpp_sources=[binding], cuda_sources=[text.native], no_implicit_headers=True,
            extra_cflags=["-O0"], extra_cuda_cflags=[*options, *allowed, f"2>{log.name}"],
            extra_include_paths=folders, build_directory=str(work), verbose=verbose,
        )  # fmt: skip
    except RuntimeError as error:
        said = log.read_text() if log.exists() else ""
        raise compile_error(text.name, text.text, said + str(error), _compiler(flags)) from None
    (work / f"{module}.so").rename(work / "kernel.so")
    for leftover in ("main.o", "cuda.cuda.o", ".ninja_deps", ".ninja_log"):
        (work / leftover).unlink(missing_ok=True)
    return {"log": log.read_text(), "module": module}


# ---- calling what was built --------------------------------------------------------------------------------------
class Native:
    """The functions of a build, called on a GPU at PyTorch's current stream.

    dll: the library, loaded. warnings: with the lines of the source. extension: the Python module that PyTorch made of
    it; None where nvcc built it alone.
    """

    def __init__(self, text: Text, built: Build):
        """Raises CacheError where the library cannot be loaded."""
        self.library, self.from_cache, self.warnings = built.library, built.from_cache, built.warnings(text)
        self._functions: dict[str, tuple[Callable[..., Any], list[int]]] = {}
        try:
            self.extension = _import(built.library, built.module) if built.module else None
            self.dll = ctypes.CDLL(str(built.library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            self.dll.flashlab_error_name.restype = self.dll.flashlab_thrown.restype = ctypes.c_char_p
        except (OSError, ImportError, AttributeError) as error:  # another machine's, or no library at all
            raise cache.CacheError(
                f"the build of {text.name} cannot be loaded ({error}): delete {built.library.parent}, "
                "or set FLASHLAB_CACHE to a folder of this machine alone"
            ) from None

    def _function(self, entry: _source.Entry) -> tuple[Callable[..., Any], list[int]]:
        """A function of the source, told once what it takes and returns; and which of that are streams."""
        function = getattr(self.dll, GUARDED + entry.name)
        function.restype = None if entry.returns == "void" else _source.C_TYPES.get(entry.returns, ctypes.c_int)
        function.argtypes = [_source.C_TYPES.get(p.kind, ctypes.c_void_p) for p in entry.parameters]
        found = function, [i for i, p in enumerate(entry.parameters) if _source.is_stream(p)]
        self._functions[entry.name] = found
        return found

    def call(self, entry: _source.Entry, arguments: Sequence[Any], device: int) -> int:
        """Calls a function of the source on a GPU and returns what it returns; 0 for one that returns nothing.

        arguments: one for each parameter: a tensor, an address or None for a pointer; what is given for the stream is
        not looked at. Raises LaunchError: a function that returns an int returned CUDA's code of an error; after one
        that returns nothing, CUDA's last error was one; or it threw a C++ exception, whose text is the error's.
        """
        function, of_streams = self._functions.get(entry.name) or self._function(entry)
        given = [_value(x) for x in arguments]
        with torch.cuda.device(device):
            self.dll.flashlab_set_device(device)
            for i in of_streams:
                given[i] = torch._C._cuda_getCurrentRawStream(device)
            returned = function(*given)
        if entry.returns != "int" or returned == -1:  # perhaps after an exception
            thrown = self.dll.flashlab_thrown().decode(errors="replace")
            if thrown:
                raise LaunchError(f"{entry.name}: {thrown}")
        if entry.returns not in ("void", "int"):
            return returned
        code = self.dll.flashlab_last_error() if entry.returns == "void" else returned
        if code:
            name = self.dll.flashlab_error_name(code).decode() if code > 0 else "its own error code"
            raise launch_error(entry.name, code, name, self.dll.flashlab_asked_shared())
        return 0


def _value(x: Any) -> Any:
    """An argument as ctypes takes it for a pointer or a number."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return ctypes.byref(x) if isinstance(x, ctypes.Structure) else x


def _import(library: Path, name: str) -> ModuleType:
    """The extension module in a file; one that is in the process already is not loaded twice."""
    if name not in sys.modules:
        loader = importlib.machinery.ExtensionFileLoader(name, str(library))
        spec = importlib.machinery.ModuleSpec(name, loader, origin=str(library))
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
