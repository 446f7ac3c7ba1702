"""What the kernels of the series take: struct Problem of problem.cuh, and the tensors that fit in it.

A source is compiled with ``-DHEAD_DIM`` and ``-DELEMENT`` and called as ``forward(&problem, stream)``:
``flashlab.cuda.load_inline`` does both, and fills the struct with ``problem``.
"""

from __future__ import annotations

import ctypes

import torch

from flashlab.attention.inputs import check_qkv, scale_of

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
    """Raises TypeError or ValueError, with what to do, where a kernel of the series cannot take these tensors.

    Args:
        q: [batch, heads, seq_q, head_dim]
        k, v: [batch, kv_heads, seq_k, head_dim], of q's dtype and device.
        scale: of the scores; positive, as the kernels take the maximum of the scores before they scale them.
        head_dims: what the kernel is compiled for.
    """
    check_qkv(q, k, v, dtypes=tuple(ELEMENTS), head_dims=head_dims, same_v=True, aligned=True)
    scale_of(scale, q.shape[-1], positive=True)


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
