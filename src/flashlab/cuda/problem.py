"""What the kernels of this folder take: struct Problem of problem.cuh, and the arrays that fit in it.

    step = SERIES[-1]                                     # or step("p8_5_swizzle")
    module = emulated(step, head_dim=64)                  # compiled for the CPU
    o, lse, report = emulate(module, q, k, v, causal=True)

On a GPU the source is compiled by nvcc with ``-DHEAD_DIM`` and ``-DELEMENT``, loaded with ctypes, and called as
``forward(byref(problem), stream)``; ``problem`` builds the struct from CUDA tensors.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashlab.simt import Module, Report

FOLDER = Path(__file__).parent
ELEMENTS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}


class Strides(ctypes.Structure):
    """Of one tensor, in elements; a row is contiguous."""

    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


class Problem(ctypes.Structure):
    """struct Problem, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "workspace")),
        *((name, Strides) for name in ("q_stride", "k_stride", "v_stride", "o_stride")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal")),
        ("scale", ctypes.c_float),
        ("sms", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Step:
    """One file of the series.

    Attributes:
        name: the file's, without ``.cu``.
        idea: in one phrase, what is new.
        head_dims: which the file can be compiled for.
        defines: macros it knows besides HEAD_DIM and ELEMENT, with the values to try; the first is the default.
    """

    name: str
    idea: str
    head_dims: tuple[int, ...] = (64, 128)
    defines: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.cu"


SERIES = (
    Step("p7_naive", "one warp, one 16 x 16 tile at a time"),
    Step("p8_1_split_kv", "64 x 64 tiles, four warps that divide the keys"),
    Step("p8_2_split_q", "four warps that divide the query rows"),
    Step("p8_3_cp_async", "copies that go past the registers"),
    Step("p8_4_stages", "the next tile is copied while this one is worked on", defines={"STAGES": (2, 1, 3)}),
    Step("p8_5_swizzle", "no bank conflicts: the XOR swizzle", defines={"STAGES": (2, 1, 3)}),
    Step("p8_6_registers", "Q in registers, ldmatrix.x4", defines={"STAGES": (2, 1, 3)}),
    Step("p8_7_store", "16-byte stores of O", defines={"STORE": (2, 1, 0)}),
    Step("p8_8_masks", "masked tiles first, then a loop without a mask"),
    Step("p8_9_addresses", "addresses out of the loop"),
    Step("p8_10_rescale", "O is rescaled only when the maximum has moved far"),
    Step("p8_11_warp_tiles", "32 query rows a warp"),
    Step("p8_12_prefetch", "a fragment is loaded one step before its MMAs"),
    Step("p8_13_order", "causal: the long blocks first"),
    Step("p8_14_tiles", "lower tiles for small grids; D = 256", head_dims=(64, 128, 256)),
    Step("p8_flash", "several blocks share the keys, when rows are few", head_dims=(64, 128, 256)),
)


def step(name: str) -> Step:
    """The step of that name. Raises KeyError, with the names there are."""
    for s in SERIES:
        if s.name == name:
            return s
    raise KeyError(f"no step {name!r} in the series; there are {', '.join(s.name for s in SERIES)}")


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, head_dims: tuple[int, ...]) -> None:
    """Raises ValueError, in a sentence that says what to do, where a kernel of the series cannot take these tensors.

    Args:
        q: [batch, heads, seq_q, head_dim]
        k, v: [batch, kv_heads, seq_k, head_dim], of q's dtype and device.
        scale: of the scores; positive, as the kernels take the maximum of the scores before they scale them.
        head_dims: what the kernel is compiled for.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; it must be [batch, heads, seq_len, head_dim]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}; they must agree")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"the rows of {name} are not contiguous (stride {x.stride(3)}): call {name}.contiguous()")
        size = x.element_size()
        steps = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
        if x.numel() and (x.data_ptr() % 16 or any(s * size % 16 for s in steps)):
            raise ValueError(f"a row of {name} does not start on 16 bytes, which the copies need: pass {name}.clone()")
    batch, heads, seq_q, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v is {tuple(v.shape)}; they must have one shape")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"q is {tuple(q.shape)} and k is {tuple(k.shape)}: batch and head_dim must agree")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"{heads} query heads cannot share {k.shape[1]} key heads evenly")
    if q.dtype not in ELEMENTS:
        raise ValueError(f"q is {q.dtype}; the kernels take {', '.join(str(t) for t in ELEMENTS)}")
    if head_dim not in head_dims:
        raise ValueError(f"head_dim is {head_dim}; this kernel is compiled for {' or '.join(map(str, head_dims))}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be a positive number")


def problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
    causal: bool = False, scale: float | None = None, sms: int = 132, head_dims: tuple[int, ...] = (64, 128, 256),
) -> Problem:  # fmt: skip
    """struct Problem of these tensors, checked; its workspace is still empty.

    Args:
        q, k, v: see ``check``.
        o: like q; lse: float32, [batch, heads, seq_q], contiguous. The kernel writes them.
        causal: query i sees the keys up to i + seq_k - seq_q.
        scale: head_dim ** -0.5, if None.
        sms: multiprocessors of the GPU.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check(q, k, v, scale=scale, head_dims=head_dims)
    if o.shape != q.shape or o.dtype != q.dtype or (o.stride(3) != 1 and o.shape[3] > 1):
        like = f"{q.dtype} {tuple(q.shape)}"
        raise ValueError(f"o is {o.dtype} {tuple(o.shape)}; it must be like q, {like}, with contiguous rows")
    if lse.dtype != torch.float32 or lse.shape != q.shape[:3] or not lse.is_contiguous():
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; it must be contiguous float32 {tuple(q.shape[:3])}")
    pointers = [x.data_ptr() for x in (q, k, v, o, lse)]
    strides = [Strides(*x.stride()[:3]) for x in (q, k, v, o)]
    return Problem(*pointers, None, *strides, *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
                   int(causal), scale, sms)  # fmt: skip


# ---- the emulator: its entries take arrays, not a struct of pointers ------------------------------------------------
_ENTRY = """
extern "C" int forward_arrays(const void* q, const void* k, const void* v, void* o, float* lse, float* workspace,
                              const void* problem) {
    Problem p = *(const Problem*)problem;
    p.q = q, p.k = k, p.v = v, p.o = o, p.lse = lse, p.workspace = workspace;
    return forward(&p, nullptr);
}
"""


def emulated(
    step: Step | Path | str, *,
    head_dim: int = 64, dtype: torch.dtype = torch.float16, check: bool = False, **defines: Any,
) -> Module:  # fmt: skip
    """A step, or a source text of one, compiled for the CPU; ``defines`` are macros. See flashlab.simt.compile_cuda."""
    from flashlab.simt import compile_cuda

    path = step.path if isinstance(step, Step) else step if isinstance(step, Path) else None
    text = path.read_text() if path else str(step)
    return compile_cuda(text + _ENTRY, name=path.name if path else "kernel.cu", check=check, include_dirs=[FOLDER],
                        defines={"HEAD_DIM": head_dim, "ELEMENT": ELEMENTS[dtype], **defines})  # fmt: skip


def emulate(
    module: Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    causal: bool = False, scale: float | None = None, sms: int = 132, o: torch.Tensor | None = None, **launch: Any,
) -> tuple[torch.Tensor, torch.Tensor, Report]:  # fmt: skip
    """Runs a module of ``emulated`` on CPU tensors.

    Returns:
        o, like q; lse [batch, heads, seq_q], float32; what the emulator counted and found.
    """
    o = torch.empty_like(q) if o is None else o
    lse = torch.empty(q.shape[:3])
    p = problem(q, k, v, o, lse, causal=causal, scale=scale, sms=sms)
    floats = ctypes.CDLL(str(module.build.library)).workspace_floats
    floats.restype = ctypes.c_int64
    workspace = torch.empty(max(1, floats(ctypes.byref(p))))
    report = module.launch("forward_arrays", q, k, v, o, lse, workspace, ctypes.addressof(p), **launch)
    return o, lse, report
