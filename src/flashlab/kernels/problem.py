"""What the kernels of the series take: struct Problem of problem.cuh, and the tensors that fit in it.

A source is compiled with ``-DHEAD_DIM`` and ``-DELEMENT`` and called as ``forward(&problem, stream)``:
``flashlab.cuda.load_inline`` does both, and fills the struct with ``problem``.
"""

from __future__ import annotations

import ctypes
import math

import torch

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
