"""A CUDA source as it is given, and as it is compiled: what is read from it, and what is put around it.

Nothing of the source is changed. After it comes, for a kernel of the series, a call with arrays in place of a struct of
pointers; for nvcc also what CUDA said of the launch.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlab.kernels import PTX, problem
from flashlab.kernels.series import FOLDER as KERNELS
from flashlab.kernels.series import Step
from flashlab.simt import source as _source
from flashlab.simt.build import INCLUDE
from flashlab.simt.source import Entry

_FORWARD_ENTRY = """
extern "C" int forward_arrays(const void* q, const void* k, const void* v, void* o, float* lse, float* workspace,
                              const void* problem, void* stream) {
    Problem p = *(const Problem*)problem;
    p.q = q, p.k = k, p.v = v, p.o = o, p.lse = lse, p.workspace = workspace;
    return forward(&p, stream);
}
"""
GUARDED = "flashlab_guarded_"  # how the name begins of a function that Python calls in place of the source's own
# For nvcc, before the source: a request for shared memory is looked at before the driver refuses it without a number.
_BEFORE = """#include <cuda_runtime.h>
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
# And after it. A library of nvcc's has a CUDA runtime of its own, which has to be told the device.
_AFTER = """#include <stdint.h>
extern "C" int64_t flashlab_set_device(int device) { return (int64_t)cudaSetDevice(device); }
extern "C" int64_t flashlab_last_error() { return (int64_t)cudaGetLastError(); }
extern "C" int64_t flashlab_asked_shared() { const int bytes = flashlab_asked; flashlab_asked = 0; return bytes; }
extern "C" const char* flashlab_error_name(int code) { return cudaGetErrorName((cudaError_t)code); }
// A C++ exception may not leave a function that Python calls: it would end the process.
#include <exception>
#include <string>
#include <type_traits>
static std::string flashlab_exception;
extern "C" const char* flashlab_thrown() { return flashlab_exception.c_str(); }
template <class R, class... P, class... A> static R flashlab_guarded(R (*function)(P...), A... arguments) {
    flashlab_exception.clear();
    try {
        return function((P)arguments...);
    } catch (const std::exception& e) {
        flashlab_exception = e.what();
    } catch (...) {
    }
    if (flashlab_exception.empty()) flashlab_exception = "a C++ exception was thrown";
    if constexpr (std::is_same_v<R, int>) return -1;           // no code of CUDA's
    else return R();
}
"""


def _guard(e: Entry) -> str:
    """The function that Python calls in place of this one."""
    takes = ", ".join(f"{'const void*' if p.kind == 'pointer' else p.kind} a{i}" for i, p in enumerate(e.parameters))
    gives = "".join(f", a{i}" for i in range(len(e.parameters)))
    return f'extern "C" {e.returns} {GUARDED}{e.name}({takes}) {{ return flashlab_guarded({e.name}{gives}); }}\n'


@dataclass(frozen=True)
class Text:
    """A source: its text, what messages call it, and the folder in which its own headers are (None: no folder)."""

    text: str
    name: str
    directory: Path | None = None

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Its extern "C" functions, by name."""
        return _source.entries(self.text)

    @functools.cached_property
    def every_entry(self) -> dict[str, Entry]:
        """Those that are put after it too."""
        return _source.entries(self.emulated)

    @property
    def takes_problem(self) -> bool:
        """Whether it is a kernel of the series: it defines forward(const Problem*, void* stream)."""
        return "forward" in self.entries and takes_problem(self.entries["forward"])

    @property
    def code(self) -> str:
        """The text without its comments."""
        return _source.blank_comments(self.text)

    @property
    def emulated(self) -> str:
        """What the emulator compiles."""
        return self.text + (_FORWARD_ENTRY if self.takes_problem else "")

    @property
    def native(self) -> str:
        """What nvcc compiles."""
        guards = "".join(map(_guard, self.every_entry.values()))
        after = (_FORWARD_ENTRY if self.takes_problem else "") + _AFTER + guards
        return f'{_BEFORE}#line 1 "{self.name}"\n{self.text}\n#line 1 "flashlab_call.cuh"\n{after}'

    def folders(self, include_dirs: Iterable[Path] = ()) -> list[Path]:
        """Where its headers are: its own folder, those given, then simt.h, ptx.cuh, problem.cuh."""
        return [*([self.directory] if self.directory else []), *include_dirs, INCLUDE, PTX, KERNELS]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """What a kernel can be compiled for, as its head says ("Compile with -DHEAD_DIM=64, 128 or 256")."""
        found = re.search(r"-DHEAD_DIM=([\d, or]+)", self.text)
        return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else (64, 128)

    def variant(
        self, defines: Mapping[str, Any], head_dim: int | None, dtype: torch.dtype | None
    ) -> tuple[int, str] | None:
        """The (HEAD_DIM, ELEMENT) that a kernel is compiled for; None for a source that is no kernel of the series.

        What is None here is what ``defines`` or else the source's own ``#define`` says. Raises ValueError for a dtype
        that no kernel takes.
        """
        if not self.takes_problem:
            return None
        if dtype is not None and dtype not in problem.ELEMENTS:
            raise ValueError(f"the kernels' element types are {', '.join(map(str, problem.ELEMENTS))}, not {dtype}")
        own = dict(re.findall(r"^\s*#\s*define\s+(HEAD_DIM|ELEMENT)\s+(\w+)", self.text, re.MULTILINE))
        head_dim = head_dim or defines.get("HEAD_DIM") or own.get("HEAD_DIM") or 64
        element = problem.ELEMENTS[dtype] if dtype else defines.get("ELEMENT") or own.get("ELEMENT") or "__half"
        return int(head_dim), str(element)


def read(source: str | os.PathLike | Step, name: str | None = None) -> Text:
    """A source given as its text, as the path of a ``.cu`` file, or as a step of the series."""
    if isinstance(source, Step):
        source = source.path
    if isinstance(source, os.PathLike) or ("\n" not in source and str(source).endswith((".cu", ".cuh"))):
        path = Path(source)
        return Text(path.read_text(encoding="utf-8"), name or path.name, path.resolve().parent)
    return Text(str(source), name or "kernel.cu")


def macros(defines: Mapping[str, Any], variant: tuple[int, str] | None) -> dict[str, Any]:
    """The macros of a build."""
    return dict(defines) | (dict(zip(("HEAD_DIM", "ELEMENT"), variant, strict=True)) if variant else {})


def takes_problem(entry: Entry) -> bool:
    """Whether its first argument is a struct Problem."""
    return bool(entry.parameters) and entry.parameters[0].element == "Problem"
