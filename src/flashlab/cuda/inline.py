"""CUDA C++ from a notebook cell to a function on tensors: one call, with a GPU or without.

    module = load_inline(source)                       # source: a step of the series, a .cu file's text, or its path
    o, lse = module.forward(q, k, v, causal=True)      # a kernel of the series: problem.cuh, extern "C" forward
    module.launch("transpose", a, b, 1024)             # any extern "C" function; or module.transpose(a, b, 1024)

The same source is built by PyTorch, by nvcc alone, or for the emulator: flashlab.cuda.toolchain says when. Builds are
kept (flashlab.runtime.cache), each under a key made from everything that goes into it.
"""

import ctypes
import functools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashlab.attention.inputs import scale_of
from flashlab.cuda import arguments, toolchain
from flashlab.cuda.binding import binding_source
from flashlab.cuda.builds import Native, build
from flashlab.cuda.errors import ADVICE, Unavailable, compile_error, launch_error, messages, quoted
from flashlab.cuda.sources import KERNELS, Text, macros, read
from flashlab.cuda.toolchain import BACKENDS, default_backend, missing
from flashlab.kernels import problem as _problem
from flashlab.kernels.series import Step
from flashlab.simt import errors as _simt_errors
from flashlab.simt import source as _source
from flashlab.simt.build import build as _build_emulated
from flashlab.simt.report import Report
from flashlab.simt.run import Module


class CudaModule:
    """A compiled CUDA source; see ``load_inline``.

    Attributes:
        backend: "torch", "nvcc" or "emulator".
        entries: the extern "C" functions of the source, by name.
        head_dims: of a kernel of the series: what it can be compiled for.
        report: the emulator's report of the last call (findings and counters); None on a GPU.
    """

    def __init__(
        self, text: Text, *, backend: str, check: bool = False, defines: dict[str, Any] | None = None,
        include_dirs: Sequence[Path] = (), head_dim: int | None = None, dtype: torch.dtype | None = None,
        head_dims: tuple[int, ...] = (), adds: bool = False, verbose: bool = False,
    ):  # fmt: skip
        self._text, self._check, self._defines, self._verbose = text, check, dict(defines or {}), verbose
        self._include_dirs, self._adds = list(include_dirs), adds
        self.backend = backend
        self.report: Report | None = None
        self.timeout: float | None = None  # of the emulator's launches that are given none
        if not text.entries:
            raise ValueError(f'{text.name} has no extern "C" function at all')
        self.entries = text.entries
        fixed = self._defines.get("HEAD_DIM")
        self.head_dims = (int(fixed),) if fixed else head_dims or text.head_dims
        # A kernel of the series is compiled for one head_dim and one dtype. The first variant is built at once, so that
        # an error in the source shows here; others follow when tensors ask for them.
        self._variants: dict[tuple[int, str] | None, Native | Module] = {}
        self._built = self._variant(text.variant(self._defines, head_dim, dtype))

    def _variant(self, variant: tuple[int, str] | None) -> Native | Module:
        if variant not in self._variants:
            compile_ = self._emulated if self.backend == "emulator" else self._native
            self._variants[variant] = compile_(macros(self._defines, variant))
        return self._variants[variant]

    def _native(self, defines: dict[str, Any]) -> Native:
        folders = self._text.folders(self._include_dirs)
        arch = toolchain.arch_for(toolchain.device_arch(), self._text.code)
        flags = toolchain.nvcc_flags(arch, defines, folders)
        return Native(self._text, build(self._text, flags, self.backend, folders=folders, verbose=self._verbose))

    def _emulated(self, defines: dict[str, Any]) -> Module:
        text = self._text
        try:
            return Module(_build_emulated(text.emulated, name=text.name, directory=text.directory, check=self._check,
                                          defines=defines, include_dirs=(*self._include_dirs, KERNELS)))  # fmt: skip
        except _simt_errors.CompileError as error:
            raise compile_error(text.name, text.text, str(error), "the emulator's host compiler") from None

    @property
    def text(self) -> str:
        """The source."""
        return self._text.text

    @property
    def code(self) -> str:
        """The source without its comments and strings."""
        return self._text.code

    @property
    def warnings(self) -> str:
        """What the compiler warned about, with the lines of the source; "" for nothing."""
        if isinstance(self._built, Native):
            return self._built.warnings
        return "\n".join(quoted(messages(self._built.build.warnings, "warning"), self._text.name, self._text.text))

    @property
    def from_cache(self) -> bool:
        """Whether the build was there already."""
        return self._built.from_cache if isinstance(self._built, Native) else self._built.build.from_cache

    @property
    def binding_source(self) -> str:
        """The C++ file that the "torch" backend compiles beside the source."""
        return binding_source(self._text.entries.values(), self._text.name)

    @property
    def extension(self) -> ModuleType | None:
        """With the "torch" backend, the Python module that PyTorch made: ``module.extension.transpose(a, b, 1024)``."""
        return getattr(self._built, "extension", None)

    def __repr__(self) -> str:
        kind = f"{self.backend}, watched build" if self._check else self.backend
        return f"<{self._text.name}, {kind}: {', '.join(self.entries)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.__dict__.get("entries", {}):
            known = ", ".join(self.__dict__.get("entries", {})) or "none"
            raise AttributeError(f'the source has no extern "C" function {name!r}; it has {known}')
        return functools.partial(self.launch, name)

    # ---- any entry ------------------------------------------------------------------------------------------------
    def launch(self, entry: str, *args: Any, **options: Any) -> Any:
        """Calls an extern "C" function of the source with tensors and numbers.

        Args:
            entry: the function's name.
            args: its arguments. A tensor for a pointer: contiguous, of the pointer's element type, on the GPU (with the
                emulator on any device); None for a null pointer; numbers for the rest. A parameter named ``stream`` may
                be left out: it is PyTorch's current stream.
            options: of the emulator's launch: ``timeout``, ``shared_limit``, ``threads``, ``echo``.
        Returns:
            what the function returns; for one that returns an ``int`` that is 0.

        Raises:
            TypeError: an argument does not fit the signature.
            ValueError: a tensor that is not contiguous, or on another device than the first.
            LaunchError: the function returned a CUDA error; it carries CUDA's name for it and what to do.
            flashlab.simt.SimtError: what the emulator found to end the launch.
        """
        if entry not in self.entries:
            known = ", ".join(self.entries) or "none"
            raise TypeError(f'the source has no extern "C" function {entry!r}; it has {known}')
        return self._launch(self._built, self.entries[entry], args, options)

    def _launch(
        self, built: Native | Module, entry: _source.Entry, args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        values = arguments.checked(entry, args)
        if isinstance(built, Module):
            return self._emulate(built, entry, values, options)
        return built.call(entry, values, arguments.gpu(entry, values))

    def launch_checked(self, entry: str, args: Sequence[Any], **options: Any) -> Any:
        """`launch`, of arguments that fit, the first one a tensor of the GPU, and the stream left out as the last."""
        if isinstance(self._built, Module):
            return self.launch(entry, *args, **options)
        return self._built.call(self.entries[entry], [*args, None], args[0].device.index)

    def _emulate(self, built: Module, entry: _source.Entry, values: list[Any], options: dict[str, Any]) -> Any:
        """Tensors of a GPU work as well: the emulator gets copies."""
        copies = {i: x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.device.type != "cpu"}
        values = [x.cpu() if i in copies else x for i, x in enumerate(values)]
        try:
            self.report = built.launch(entry.name, *values, **{"timeout": self.timeout} | options)
        except _simt_errors.SimtError as error:
            self.report = error.report
            returned = re.search(r"returned (\d+) \((\w+)\)", str(error))
            if returned and returned[2] in ADVICE:
                raise launch_error(entry.name, int(returned[1]), returned[2]) from None
            raise
        for i, x in copies.items():
            if not entry.parameters[i].const:
                x.copy_(values[i])
        code = self.report.returned
        return code if isinstance(code, int) else 0

    # ---- a kernel of the series -----------------------------------------------------------------------------------
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
        sms: int | None = None, out: torch.Tensor | None = None,
        into: tuple[torch.Tensor, torch.Tensor] | None = None, **launch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """softmax(scale * q k^T) v, by a source that defines ``forward(const Problem*, void* stream)``.

        Args:
            q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], of one dtype and device. Any
                strides: a tensor whose rows are not contiguous, or not on 16-byte boundaries, is copied first.
            causal: query i sees the keys up to i + seq_k - seq_q.
            scale: head_dim ** -0.5, if None; zero or negative, q is multiplied by it first.
            sms: multiprocessors that the kernel is told of; the GPU's, or 132 in the emulator, if None.
            out: where o is stored, shaped like q, its rows as the kernels want them; a new tensor, if None.
            into: of p11_side_part alone: o, shaped like q, and lse, contiguous, both float32, into which it merges what
                it finds; where lse is -inf, o need not hold anything.
            launch: options of the emulator's launch: ``timeout``, ``shared_limit``, ``threads``, ``echo``.
        Returns:
            o: like q. lse: [batch, heads, seq_q], float32. A row that sees no key has o = 0 and lse = -inf.

        Raises:
            ValueError: tensors that do not belong together, an unsupported dtype or head_dim, too many rows; one that
                requires a gradient, which ``flashlab.cuda.operators.attention`` has.
            LaunchError: CUDA's error, and what to do.
            Unavailable: the GPU lacks an instruction of the kernel.
        """
        if not self._text.takes_problem:
            raise TypeError(f"{self._text.name} does not define forward(const Problem*, void* stream): use launch")
        _problem.check(q, k, v, scale=scale, head_dims=self.head_dims, causal=causal)
        if sms is not None and not (type(sms) is int and 0 < sms < 2**31):
            raise ValueError(f"sms is {sms!r}; it is a number of multiprocessors, at least 1")
        if self.backend != "emulator" and q.device.type != "cuda":
            raise ValueError(f"q is on {q.device}, and the kernel runs on a GPU: pass q.cuda(), k.cuda(), v.cuda()")
        if self._adds != (into is not None):
            raise ValueError(f"{self._text.name} {'adds: pass `into`' if self._adds else 'adds to nothing: no `into`'}")
        if into is not None:
            _problem.check_out(into[0], q, k, v, into[1])
        elif out is not None:
            _problem.check_out(out, q, k, v)
        scale = scale_of(scale, q.shape[-1])
        return self.compute(q, k, v, causal=causal, scale=scale, sms=sms, into=into, out=out, **launch)

    def compute(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, sms: int | None = None,
        out: torch.Tensor | None = None, into: tuple[torch.Tensor, torch.Tensor] | None = None, **launch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`forward`, of arguments that were checked already: its checks take as long as the rest."""
        _problem.check_rows(q, k)
        o = into[0] if into else new_output(q) if out is None else out
        lse = into[1] if into else torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        if o.numel() == 0 or (into and k.shape[2] == 0):
            return o, lse
        if k.shape[2] == 0:
            return o.zero_(), lse.fill_(-math.inf)
        emulated = self.backend == "emulator"
        sms = sms or (132 if emulated else multiprocessors(q.device.index))
        q, k, v, factor = _problem.fitted(q, k, v, scale)
        p = _problem.problem(q, k, v, o, lse, causal=causal, scale=factor, sms=sms)
        built = self._variant((q.shape[-1], _problem.ELEMENTS[q.dtype]))
        workspace = torch.empty(max(1, self._workspace_floats(built, p)), device=q.device)
        entry, given = self._text.every_entry["forward_arrays"], [q, k, v, o, lse, workspace, p]
        if isinstance(built, Module):
            self._launch(built, entry, given, {"unwritten": ("o", "lse", "workspace")[2 if into else 0 :], **launch})
        else:
            built.call(entry, [*given, None], q.device.index)  # the stream is the last
        return o, lse

    def _workspace_floats(self, built: Native | Module, p: _problem.Problem) -> int:
        """What the source's function of that name says; it runs on the CPU, whatever the backend."""
        if "workspace_floats" not in self._text.entries:
            return 0
        if isinstance(built, Module):
            return int(built.launch("workspace_floats", p).returned or 0)
        function = built.dll.workspace_floats
        function.restype = ctypes.c_int64
        return function(ctypes.byref(p))


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU, by its number."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def new_output(q: torch.Tensor) -> torch.Tensor:
    """An empty tensor for o: q's dtype and device, and its layout where that has contiguous, aligned rows."""
    o = torch.empty_like(q)
    return o if _problem.rows_fit(o) else torch.empty(q.shape, dtype=q.dtype, device=q.device)


def load_inline(
    source: str | os.PathLike | Step,
    *,
    defines: dict[str, Any] | None = None,
    include_dirs: Sequence[str | os.PathLike] = (),
    check: bool = False,
    backend: str | None = None,
    name: str | None = None,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    verbose: bool = False,
) -> CudaModule:
    """Compiles CUDA C++ and returns its functions, callable with tensors.

    Args:
        source: the text, the path of a ``.cu`` file, or a step of the series. It needs no header of PyTorch; what is
            to be called from Python is an ``extern "C"`` function. One that returns an ``int`` returns CUDA's error
            code. ``simt.h``, ``ptx.cuh`` and ``problem.cuh`` are found.
        defines: macros, as ``{"BLOCK_M": 64}``; True defines a macro as 1, None leaves it undefined.
        include_dirs: where else to look for headers.
        check: a watched build of the emulator, on any machine: it sees races, bad addresses and bank conflicts;
            ``module.report`` has what it found and counted.
        backend: "torch", "nvcc" or "emulator"; ``default_backend()``, if None.
        name: what the compiler's messages call the source; "kernel.cu", or the file's own name, if None.
        head_dim, dtype: of a kernel of the series, the variant to build now (the defaults of its source, if None);
            others are built when tensors ask for them.
        verbose: show PyTorch's build.
    Raises:
        CompileError: with the compiler's messages against the lines of the source.
        Unavailable: the backend, or an instruction of the source, is not to be had on this machine.
        ValueError: an unknown backend, or a source without an extern "C" function.
        flashlab.runtime.cache.CacheError: builds cannot be kept.
    """
    step = source if isinstance(source, Step) else None
    text = read(source, name)
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")
    backend = "emulator" if check else backend or default_backend()
    reason = missing(backend)
    if reason:
        raise Unavailable(f'backend "{backend}" cannot be used here: {reason}. backend="emulator" runs on the CPU')
    if backend != "emulator":
        gpu = torch.cuda.get_device_name()
        toolchain.check_capability(text.name, text.code, torch.cuda.get_device_capability(), gpu)
    return CudaModule(
        text, backend=backend, check=check, defines=defines, include_dirs=[Path(d).resolve() for d in include_dirs],
        head_dim=head_dim, dtype=dtype or (step.dtypes[0] if step else None), head_dims=step.head_dims if step else (),
        adds=bool(step and step.adds), verbose=verbose,
    )  # fmt: skip
