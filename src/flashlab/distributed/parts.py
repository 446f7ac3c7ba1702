"""One block of the ring by any kernel of the door, and the merge of its part into what is there already.

A *part* is a finished result over some of the keys: o and lse. The state of a rank is one more of them, and the merge
is phase 0's. A part is in float32, and float64 for float64: one that was rounded to 16 bits adds its rounding to the
result's. PyTorch's products and the Triton kernels give it so. Beside phase 11's last kernel stands an exhibit that
merges while it stores, p11_side_part: a ring runs it where p11_flash is asked for. The other CUDA kernels write o in
the dtype of q, and are wrong by that rounding, once per block.

The gradient of a block needs o and lse of the *whole* row: p = exp(score - lse) is then the probability among all keys,
and what the block's keys are due of the gradient comes out without the other blocks.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention import triton_forward
from flashlab.attention.backends import BACKENDS, quick
from flashlab.attention.blockwise import attention_backward_blockwise
from flashlab.attention.door import HOPPER
from flashlab.attention.online_softmax import merge_finished
from flashlab.attention.triton_forward import current_device
from flashlab.cuda import operators  # noqa: F401  (the CUDA series among the backends)
from flashlab.cuda.hopper_backward import compiled, gradients
from flashlab.cuda.inline import CudaModule, load_inline
from flashlab.kernels import step

Part = tuple[torch.Tensor, torch.Tensor]
"""o [batch, heads, rows, head_dim] and lse [batch, heads, rows], of some of the keys."""
_WIDE = ("reference", "simulation", "torch")  # float32 costs them nothing, or they take it anyway


def block_forward(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> Part:
    """The part of these keys, causal aligned at the end."""
    options: dict[str, Any] = dict(scale=scale, left=None, right=0 if causal else None, softcap=None)
    if backend == "triton":
        wide = torch.float32  # the kernel has acc in float32, and rounds where it stores
        return triton_forward.flash_attention_forward(q, k, v, causal=causal, scale=scale, out_dtype=wide)
    if backend in _WIDE and q.dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    o, lse = BACKENDS[backend].forward(q, k, v, **options)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return o.to(wide) if backend in _WIDE else o, lse.to(wide)


def block_backward(
    backend: str, grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, *, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What a block adds to dq, dk and dv, from o and lse of the whole rows; float32 where the kernel gives it."""
    right = 0 if causal else None
    if backend == HOPPER and q.is_cuda and q.dtype != torch.float32:
        grad_o = grad_o.resolve_neg()  # the kernel reads memory
        return gradients(compiled(q.shape[-1], q.dtype, "nvcc"), grad_o, None, q, k, v, o, lse, causal, scale)
    options: dict[str, Any] = dict(scale=scale, left=None, right=right, softcap=None)
    if backend in _WIDE or (backend != "triton" and quick(q, None, right, None) == "torch"):
        if q.dtype != torch.float64:
            grad_o, q, k, v, o = (x.float() for x in (grad_o, q, k, v, o))
        return attention_backward_blockwise(grad_o, None, q, k, v, o, lse, partial=True, **options)
    dq, dk, dv = BACKENDS["triton"].backward(grad_o, None, q, k, v, o, lse, **options)
    return dq, dk, dv


@functools.cache
def adding(head_dim: int, dtype: torch.dtype, on_gpu: bool) -> CudaModule:
    """p11_side_part, compiled. Its blocks take part after part, causal or not: those whose multiprocessor is sending
    when they begin then take fewer."""
    backend = "nvcc" if on_gpu else "emulator"
    return load_inline(step("p11_side_part"), backend=backend, head_dim=head_dim, dtype=dtype, defines={"DYNAMIC": 2})


# region: add
def added(
    state: Part | None, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice, keys: slice, *,
    causal: bool, scale: float, first: bool, last: bool,
) -> Part:  # fmt: skip
    """The state with the part of these keys merged into these rows, in place. first: they are the rank's own."""
    some = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    if backend != HOPPER:
        part = block_forward(backend, *some, causal=causal, scale=scale)
        return begun(state, q, rows, part) if first else merged(state, rows, part, last=last)
    if state is None:
        lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
        state = torch.empty(q.shape, dtype=torch.float32, device=q.device), lse
    o, lse = state
    lse_rows = lse[:, :, rows]
    together = lse_rows.contiguous()
    kernel = adding(q.shape[-1], q.dtype, q.is_cuda)
    kernel.compute(*some, causal=causal, scale=scale, into=(o[:, :, rows], together))
    if together is not lse_rows:
        lse_rows.copy_(together)
    return state


# endregion


# region: merge
def begun(state: Part | None, q: torch.Tensor, rows: slice, part: Part) -> Part:
    """The state with the part of the rank's own keys in these rows; for all rows that part is the state."""
    if rows == slice(0, q.shape[2]):
        return part
    if state is None:
        state = part[0].new_empty(q.shape), part[1].new_empty(q.shape[:3])
    state[0][:, :, rows], state[1][:, :, rows] = part
    return state


def merged(state: Part | None, rows: slice, part: Part, *, last: bool, by_kernel: bool | None = None) -> Part:
    """The state with a part of other keys merged into these rows, in place: phase 0's `merge_finished`.

    Until the last merge the state is as wide as lse: what is rounded once is rounded at the end. Every row of it has
    seen a key. by_kernel: in one launch; None is where kernels are compiled.
    """
    assert state is not None, "the rank's own keys come first"
    o, lse = state
    if not last:
        o = o.to(lse.dtype)
    if by_kernel is None:
        by_kernel = o.is_cuda and not runtime.INTERPRETED
    if by_kernel:
        _merge_by_kernel(o[:, :, rows], lse[:, :, rows], *part)
    else:
        wide = [x.to(lse.dtype) for x in (o[:, :, rows], lse[:, :, rows], *part)]
        o[:, :, rows], lse[:, :, rows] = merge_finished(*wide)
    return o, lse


# endregion


@triton.jit
def merge_kernel(
    O_ptr, LSE_ptr, P_ptr, PLSE_ptr, stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_pb, stride_ph,
    stride_pn, stride_qb, stride_qh, heads, n, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """o and lse of some rows, merged with a part: each is read and written once."""
    blocks = tl.cdiv(n, BLOCK_M)
    block, both = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    offs_n, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    rows = offs_n < n
    inside = rows[:, None] & (offs_d < HEAD_DIM)[None, :]
    o_ptrs = O_ptr + batch * stride_ob + head * stride_oh + offs_n[:, None].to(tl.int64) * stride_on + offs_d[None, :]
    p_ptrs = P_ptr + batch * stride_pb + head * stride_ph + offs_n[:, None].to(tl.int64) * stride_pn + offs_d[None, :]
    lse_ptrs = LSE_ptr + batch * stride_lb + head * stride_lh + offs_n
    lse = tl.load(lse_ptrs, mask=rows, other=0.0)
    lse_part = tl.load(PLSE_ptr + batch * stride_qb + head * stride_qh + offs_n, mask=rows, other=0.0)
    top = tl.maximum(lse, lse_part)
    a, b = tl.exp(lse - top), tl.exp(lse_part - top)
    o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(p_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(o_ptrs, (o * a[:, None] + part * b[:, None]) / (a + b)[:, None], mask=inside)
    tl.store(lse_ptrs, top + tl.log(a + b), mask=rows)


def _merge_by_kernel(o: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, lse_part: torch.Tensor) -> None:
    batch, heads, n, head_dim = o.shape
    if part.stride(-1) != 1:
        part = part.contiguous()
    lse_part = lse_part.contiguous()
    block = 16
    with current_device(o):
        merge_kernel[(triton.cdiv(n, block) * batch * heads,)](
            o, lse, part, lse_part, *o.stride()[:3], *lse.stride()[:2], *part.stride()[:3], *lse_part.stride()[:2],
            heads, n, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=block,
        )  # fmt: skip
