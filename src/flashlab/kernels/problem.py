"""What the kernels of the series take: struct Problem of problem.cuh, and the tensors that fit in it.

A source is compiled with ``-DHEAD_DIM`` and ``-DELEMENT`` and called as ``forward(&problem, stream)``:
``flashlab.cuda.load_inline`` does both, and fills the struct with ``problem``.
"""

import ctypes

import torch

from flashlab.attention.inputs import check_causal, check_qkv, check_results, scale_of

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


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, head_dims: tuple[int, ...],
    causal: bool = False,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError, with what to do, where a kernel of the series cannot take these tensors.

    Strides and the sign of the scale are no matter: ``fitted`` makes of them what a kernel wants.

    Args:
        q: [batch, heads, seq_q, head_dim]
        k, v: [batch, kv_heads, seq_k, head_dim], of q's dtype and device.
        scale: of the scores; None is head_dim ** -0.5.
        head_dims: what the kernel can be compiled for.
    """
    check_qkv(q, k, v, dtypes=tuple(ELEMENTS), head_dims=head_dims, same_v=True, no_grad=True)
    check_causal(causal)
    scale_of(scale, q.shape[-1])
    check_rows(q, k)


def check_rows(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where there are more rows than a kernel's int can count."""
    batch, heads, seq_q, _ = q.shape
    if batch * heads * seq_q >= 2**31 or max(seq_q, k.shape[2]) >= 2**30:
        raise ValueError(f"{batch * heads * seq_q} query rows are too many for one launch (2^31): split the batch")


def check_out(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """Raises TypeError or ValueError where o cannot be stored in ``out``, which is like q, and its rows its own.

    With ``lse`` both are what a kernel adds to: float32, and lse contiguous.
    """
    check_results(q, {"out": out}, {} if lse is None else {"lse": lse}, dtypes=lse is None, no_grad=True)
    for name, x in {} if lse is None else {"out": out, "lse": lse}.items():
        if x.dtype != torch.float32:
            raise TypeError(f"{name} is {x.dtype}; what a kernel adds to is torch.float32")
    if lse is not None and not lse.is_contiguous():
        raise ValueError(f"lse has strides {lse.stride()}; it must be contiguous")
    shared = any(step == 0 for step, size in zip(out.stride(), out.shape, strict=True) if size > 1)
    if shared or not rows_fit(out) or out.data_ptr() % 16:
        raise ValueError(f"out has strides {out.stride()}; its rows must be contiguous, on 16 bytes, and each its own")
    if out.numel() and out.data_ptr() in (q.data_ptr(), k.data_ptr(), v.data_ptr()):
        raise ValueError("out is the memory of an input, which the kernel still reads while it stores: pass another")


def fitted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(q, k, v, scale) as the kernels take them: contiguous rows on 16-byte boundaries, and a positive scale.

    A tensor that is otherwise is copied. The kernels take the maximum of the scores before they scale them, so a scale
    that is not positive goes into q: its sign, which is exact, or 0. So does one that is 0 in their float32.
    """
    scale = scale_of(scale, q.shape[-1])
    if ctypes.c_float(scale).value == 0:
        q, scale = torch.zeros_like(q), 1.0
    elif scale < 0:
        q, scale = -q, -scale
    return fitting(q), fitting(k), fitting(v), scale


def fitting(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows are not contiguous, or not on 16-byte boundaries."""
    return x if rows_fit(x) and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def rows_fit(x: torch.Tensor) -> bool:
    """Whether the rows of a tensor [batch, heads, seq_len, head_dim] are contiguous, and 16-byte multiples apart."""
    if x.is_contiguous() and x.shape[3] * x.element_size() % 16 == 0:
        return True
    apart = (s * x.element_size() for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1)
    return (x.stride(3) == 1 or x.shape[3] == 1) and all(step % 16 == 0 for step in apart)


def problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
    causal: bool, scale: float, sms: int,
) -> Problem:  # fmt: skip
    """struct Problem of these tensors; its workspace is still empty.

    Args:
        q, k, v, scale: as ``fitted`` returns them.
        o: like q; lse: float32, [batch, heads, seq_q], contiguous. The kernel writes them.
        causal: query i sees the keys up to i + seq_k - seq_q.
        sms: multiprocessors of the GPU.
    """
    pointers = [x.data_ptr() for x in (q, k, v, o, lse)]
    strides = [Strides(*x.stride()[:3]) for x in (q, k, v, o)]
    return Problem(*pointers, None, *strides, *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
                   int(causal), scale, sms)  # fmt: skip
