"""Rotary position embedding: the formula as models write it, and one Triton kernel for q and k together.

Attention itself does not know where a key stands: it sums over keys in any order. Rotary embedding turns each query and
each key by an angle that grows with its position. The product of two turned vectors then depends on the difference of
the two positions, and on nothing else about them.

A head's vector is taken as head_dim / 2 pairs of numbers. Pair i of position p is turned by the angle
p * base^(-2 i / head_dim):

    y1 = x1 cos - x2 sin
    y2 = x1 sin + x2 cos

The pair is (x[i], x[i + head_dim / 2]), the two halves of the vector, as in GPT-NeoX and Llama. The paper pairs
neighbours, (x[2 i], x[2 i + 1]): the same idea with the columns in another order, so weights of one do not fit the
other.

`rope` is seven small operations of PyTorch per tensor (four products, a difference, a sum, and `cat`), and each reads
and writes memory. `fused_rope` reads q and k once and writes them once. A rotation is undone by the negative angle, and
that is also its gradient: the backward pass is the same kernel with -sin.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv 2104.09864.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention.inputs import check_qkv
from flashlab.attention.triton_forward import DTYPES, current_device
from flashlab.runtime.dispatch import operator

HEADS_PER_PROGRAM = 4  # they share one reading of cos and sin
PAIRS_PER_PROGRAM = 1024  # of one head at a time: 8 per thread


def rope_table(
    positions: int, head_dim: int, *, base: float = 10_000.0, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of every angle: each [positions, head_dim / 2], float32.

    The angles are computed in float64: in float32 an angle of 100000 radians is off by up to 0.004.

    Raises:
        ValueError: an odd head_dim, or a size below 1.
    """
    if positions < 1 or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"positions is {positions} and head_dim is {head_dim}; a table needs at least one position, and a head_dim "
            "that is even, because numbers are turned in pairs"
        )
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [head_dim / 2]
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """Turn each row of x by the angle of its position; small operations of PyTorch, as models have them.

    Args:
        x: [batch, heads, seq_len, head_dim], any floating dtype. Row n stands at position offset + n.
        cos, sin: [positions, head_dim / 2], as `rope_table` makes them; they are rounded to the dtype of x.
    Returns:
        like x.
    Raises:
        TypeError, ValueError: an odd head_dim, tables of another head_dim or device, or positions past their end.
    """
    check_table(x, cos, sin, offset)
    cos, sin = (table[offset : offset + x.shape[2]].to(x.dtype) for table in (cos, sin))
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)


@triton.jit
def rotate_heads(
    X_ptr,  # [batch, heads, M, 2 * HALF], of one batch
    Y_ptr,  # like X
    heads, part, parts,
    stride_xh, stride_xm, stride_xd,
    stride_yh, stride_ym, stride_yd,
    rows, pairs,  # int64 [BLOCK_M, 1] and [1, BLOCK_HALF]
    cos, sin,  # float32 [BLOCK_M, BLOCK_HALF]
    inside,
    HALF: tl.constexpr,
):  # fmt: skip
    """Turn these rows of the heads part, part + parts, part + 2 parts, ..."""
    for head in tl.range(part, heads, parts):
        x_ptrs = X_ptr + head * tl.cast(stride_xh, tl.int64) + rows * stride_xm
        y_ptrs = Y_ptr + head * tl.cast(stride_yh, tl.int64) + rows * stride_ym
        x1 = tl.load(x_ptrs + pairs * stride_xd, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptrs + (pairs + HALF) * stride_xd, mask=inside, other=0.0).to(tl.float32)
        y1 = x1 * cos - x2 * sin
        y2 = x1 * sin + x2 * cos
        tl.store(y_ptrs + pairs * stride_yd, y1.to(Y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptrs + (pairs + HALF) * stride_yd, y2.to(Y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "offset"])  # one kernel for all lengths
def rope_kernel(
    Q_ptr,  # [batch, heads, M, 2 * HALF]
    K_ptr,  # [batch, kv_heads, M, 2 * HALF]
    TURNED_Q_ptr,  # like Q
    TURNED_K_ptr,  # like K
    COS_ptr,  # [positions, HALF]
    SIN_ptr,  # [positions, HALF]
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_km, stride_kd,
    stride_tqb, stride_tqh, stride_tqm, stride_tqd,
    stride_tkb, stride_tkh, stride_tkm, stride_tkd,
    stride_cosm, stride_cosd,
    stride_sinm, stride_sind,
    M, offset,
    heads, kv_heads,
    parts,  # so many programs share the heads of a block of rows
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,  # BLOCK_HALF: the next power of two
    BLOCK_M: tl.constexpr,
    BACK: tl.constexpr,  # turn by the negative angle
):  # fmt: skip
    # One program: BLOCK_M positions of one batch, for every parts-th head of q and of k.
    blocks = tl.cdiv(M, BLOCK_M)
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts % blocks
    batch = (tl.program_id(0) // parts // blocks).to(tl.int64)

    # int64: an offset in memory may pass 2^31 elements.
    rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    pairs = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, :]
    inside = (rows < M) & (pairs < HALF)
    position = rows + offset
    cos_ptrs = COS_ptr + position * stride_cosm + pairs * stride_cosd
    sin_ptrs = SIN_ptr + position * stride_sinm + pairs * stride_sind
    cos = tl.load(cos_ptrs, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptrs, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    rotate_heads(
        Q_ptr + batch * stride_qb, TURNED_Q_ptr + batch * stride_tqb, heads, part, parts,
        stride_qh, stride_qm, stride_qd, stride_tqh, stride_tqm, stride_tqd,
        rows, pairs, cos, sin, inside, HALF,
    )  # fmt: skip
    rotate_heads(
        K_ptr + batch * stride_kb, TURNED_K_ptr + batch * stride_tkb, kv_heads, part, parts,
        stride_kh, stride_km, stride_kd, stride_tkh, stride_tkm, stride_tkd,
        rows, pairs, cos, sin, inside, HALF,
    )  # fmt: skip


def fused_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q and k in one kernel launch; with a gradient for q and k, which is one launch too.

    Args:
        q: [batch, heads, seq_len, head_dim]; k: [batch, kv_heads, seq_len, head_dim], heads a multiple of kv_heads. All
            float16, all bfloat16 or all float32, with any strides; any length, 0 too. Row n stands at position
            offset + n.
        cos, sin: [positions, head_dim / 2] of any floating dtype, as `rope_table` makes them. They are constants: the
            kernel computes no gradient for them.
    Returns:
        q and k turned, like q and k. The kernel computes in float32, and rounds once at the end.
    Raises:
        TypeError, ValueError: a sentence that names the argument, before any launch.
    """
    if not torch.compiler.is_compiling():  # then the operator's fake checks
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"offset is {offset!r}; it is a number of positions, an int")
        _check(q, k, cos, sin, offset)
    return _fused_rope(q, k, cos, sin, offset, False)


def launch_arguments(
    q: torch.Tensor, k: torch.Tensor, turned_q: torch.Tensor, turned_k: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, offset: int, back: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is told beside the pointers, by parameter name."""
    four = {"q": q, "k": k, "tq": turned_q, "tk": turned_k}
    strides = {
        f"stride_{name}{axis}": step
        for name, x, axes in [*((n, x, "bhmd") for n, x in four.items()), ("cos", cos, "md"), ("sin", sin, "md")]
        for axis, step in zip(axes, x.stride(), strict=True)
    }
    half = q.shape[3] // 2
    width = triton.next_power_of_2(half)
    return strides | {
        "M": q.shape[2], "offset": offset, "heads": q.shape[1], "kv_heads": k.shape[1],
        "parts": triton.cdiv(q.shape[1], HEADS_PER_PROGRAM),
        "HALF": half, "BLOCK_HALF": width, "BLOCK_M": max(1, PAIRS_PER_PROGRAM // width), "BACK": back,
    }  # fmt: skip


def check_table(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int) -> None:
    """Raise TypeError or ValueError, a sentence, unless the tables have the angles of x's rows."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, torch.Tensor):
            raise TypeError(f"{name} is a {type(table).__name__}; a torch.Tensor is needed")
        if not table.dtype.is_floating_point:
            raise TypeError(f"{name} is {table.dtype}; it has to be floating point")
        if table.device != x.device:
            raise ValueError(f"the rows are on {x.device}, but {name} is on {table.device}: one device for all, please")
    if x.shape[-1] % 2:
        raise ValueError(f"head_dim is {x.shape[-1]}; numbers are turned in pairs, so it has to be even")
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[1] != x.shape[-1] // 2:
        raise ValueError(
            f"cos is {list(cos.shape)} and sin is {list(sin.shape)}; for a head_dim of {x.shape[-1]} both are "
            f"[positions, {x.shape[-1] // 2}]"
        )
    if offset < 0 or offset + x.shape[2] > cos.shape[0]:
        raise ValueError(
            f"the offset is {offset} and there are {x.shape[2]} rows; the tables have the positions from 0 up to, "
            f"and without, {cos.shape[0]}"
        )


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int) -> None:
    """Raise TypeError or ValueError, a sentence, unless the kernel takes these inputs."""
    check_qkv(q, k, k, dtypes=DTYPES, on_gpu=not runtime.INTERPRETED, names=("q", "k", "k"))
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} rows and k has {k.shape[2]}; row n of both stands at one position")
    check_table(q, cos, sin, offset)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise ValueError(f"{name} requires a gradient, and the kernel computes none for it")


# ---- as an operator of PyTorch: with a gradient, and under torch.compile ---------------------------------------------

_SCHEMA = "(Tensor q, Tensor k, Tensor cos, Tensor sin, SymInt offset, bool back) -> (Tensor, Tensor)"


def _checked_turn(q, k, cos, sin, offset, back):
    _check(q, k, cos, sin, offset)
    return _turn(q, k, cos, sin, offset, back)


def _turn(q, k, cos, sin, offset, back):
    turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
    if q.numel() == 0:
        return turned_q, turned_k  # a grid of 0 programs cannot be launched
    arguments = launch_arguments(q, k, turned_q, turned_k, cos, sin, offset, back)
    grid = (q.shape[0] * triton.cdiv(q.shape[2], arguments["BLOCK_M"]) * arguments["parts"],)
    with current_device(q):
        rope_kernel[grid](q, k, turned_q, turned_k, cos, sin, **arguments)
    return turned_q, turned_k


def _fake_turn(q, k, cos, sin, offset, back):
    _check(q, k, cos, sin, offset)
    return torch.empty_like(q), torch.empty_like(k)


def _keep(ctx, inputs, output):
    _, _, cos, sin, ctx.offset, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx, grad_q, grad_k):
    return *_fused_rope(grad_q, grad_k, *ctx.saved_tensors, ctx.offset, not ctx.back), None, None, None, None


_fused_rope = operator(
    "fused_rope", _SCHEMA, _checked_turn, fake=_fake_turn, compute=_turn, keep=_keep, backward=_turn_back, tensors=4,
    who="fused_rope", instead="flashlab.models.rope.rope has it, the formula in operations of PyTorch",
)  # fmt: skip
