"""Phase 11's backward pass: kernels/p11_hopper/p11_backward.cu as a function on tensors.

    dq, dk, dv = hopper_backward(grad_o, q, k, v, o, lse, causal=True)

It runs on capability 9.0, or in the emulator.
"""

import ctypes
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from flashlab.attention.inputs import check_causal, check_qkv, check_results, scale_of
from flashlab.cuda.inline import CudaModule, load_inline, multiprocessors, new_output
from flashlab.cuda.toolchain import default_backend
from flashlab.kernels.problem import ELEMENTS, Strides, fitting
from flashlab.kernels.series import HALVES, path

HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
BLOCK = 128  # rows of a block in the source: its two numbers of each row have place for whole blocks
SOURCE = path("p11_backward")


class Backward(ctypes.Structure):
    """struct Backward of the source, field by field."""

    _fields_ = [
        *((f"{name}_stride", Strides) for name in ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "causal")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("sms", "launches")),
    ]


@functools.cache
def compiled(
    head_dim: int, dtype: torch.dtype, backend: str | None = None, check: bool = False,
    defines: tuple[tuple[str, int], ...] = (),
) -> CudaModule:  # fmt: skip
    """The compiled source. backend, check: as in `load_inline`; defines: its macros, as its head names them."""
    macros: dict[str, Any] = {"HEAD_DIM": head_dim, "ELEMENT": ELEMENTS[dtype], **dict(defines)}
    return load_inline(SOURCE, backend=backend or default_backend(), check=check, defines=macros)


def hopper_backward(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *,
    grad_lse: torch.Tensor | None = None, causal: bool = False, scale: float | None = None,
    backend: str | None = None, check: bool = False, defines: tuple[tuple[str, int], ...] = (),
    launches: int = 7, module: CudaModule | None = None, **launch: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of o = softmax(scale * q k^T) v. Two runs agree in every bit.

    Args:
        grad_o: like q. q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], fp16 or bf16, with
            a head_dim of HEAD_DIMS. Any strides: a tensor whose rows are not contiguous, or not on 16-byte boundaries,
            is copied first.
        o, lse: what a forward pass gave: like q, and [batch, heads, seq_q], float32, with -inf for a row without keys.
        grad_lse: like lse; None where no loss depends on lse.
        causal: query i sees the keys up to i + seq_k - seq_q. scale: head_dim ** -0.5, if None.
        backend, check, defines: of the build, see `compiled`. module: a build to take in its place.
        launches: which kernels, to time them: 1 for the rows' statistics + 2 for dk and dv, and the sums of dq + 4 for
            dq. launch: options of the emulator's launch, and sms, the multiprocessors that the kernel is told of.

    Returns:
        Each like its input. A key head's gradient is the sum over the query heads that read it; a row that sees no key
        has dq = 0.

    Raises:
        TypeError, ValueError: tensors that do not belong together, or that the kernel is not written for.
        LaunchError, Unavailable: as `CudaModule.forward`.
    """
    check_qkv(q, k, v, dtypes=HALVES, head_dims=HEAD_DIMS, same_v=True, no_grad=True)
    check_causal(causal)
    check_results(q, {"grad_o": grad_o, "o": o}, {"lse": lse, "grad_lse": grad_lse}, no_grad=True)
    built = module or compiled(q.shape[3], q.dtype, backend, check, defines)
    scale = scale_of(scale, q.shape[3])
    return gradients(built, grad_o, grad_lse, q, k, v, o, lse, causal, scale, launches, dict(defines), **launch)


def gradients(
    built: CudaModule, grad_o: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, launches: int = 7,
    defines: Mapping[str, int] = MappingProxyType({}), sms: int | None = None, **launch: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`hopper_backward` by a build, of arguments that were checked already: its checks take as long as the rest."""
    dq, dk, dv = (new_output(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    given = [fitting(x) for x in (q, k, v, o, grad_o)]
    shapes = Backward(
        *(Strides(*x.stride()[:3]) for x in (*given, dq, dk, dv)), *q.shape[:2], k.shape[1], q.shape[2], k.shape[2],
        int(causal), scale, sms or (132 if built.backend == "emulator" else multiprocessors(q.device.index)), launches,
    )  # fmt: skip
    rows = q.shape[0] * q.shape[1] * -(-q.shape[2] // BLOCK) * BLOCK
    statistics = torch.empty(2 * rows, device=q.device)
    # How many blocks have added to each tile of dq, behind how many parts are taken: `statistics` clears them
    turns = (torch.empty if launches & 1 else torch.zeros)(rows // 64 + 1, dtype=torch.int32, device=q.device)
    sums = None
    if q.shape[3] <= 128 and defines.get("PRODUCTS") != 7:  # those of 128 columns beyond D = 96
        sums = torch.empty(rows * (q.shape[3] if q.shape[3] <= 96 else 128), device=q.device)
        if defines.get("ORDERED") == 0:  # else the first block stores
            sums.zero_()
    grad_lse = grad_lse if grad_lse is None else grad_lse.contiguous()
    values = [*given, lse.contiguous(), grad_lse, dq, dk, dv, statistics, sums, turns, shapes]
    if built.backend == "emulator":
        unwritten = ["sums"] * (sums is not None and defines.get("ORDERED") != 0) + ["turns"] * (launches & 1)
        launch = {"unwritten": ("dq", "dk", "dv", "row_statistics", *unwritten), **launch}
    built.launch_checked("backward", values, **launch)
    return dq, dk, dv
