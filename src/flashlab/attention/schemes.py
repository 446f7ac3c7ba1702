"""The two walls that stand between naive attention and FlashAttention, each met by a Triton kernel.

    scheme_a                a block of queries against the whole of K and V: the physical wall, shared memory
    scheme_b                V in blocks, K still whole: the logical wall, Triton does not slice a tensor
    two_pass                K in blocks too, by computing the scores twice: no wall, at half as many FLOPs again

The kernels take one head, q [M, HEAD_DIM], k and v [N, HEAD_DIM], in float16 or bfloat16. They are written to show what
stops them; `flashlab.attention.triton_minimal` (phase 3) is the one to use.

Source of the two-pass kernel's first pass: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flashlab import runtime  # before triton: it decides whether kernels are interpreted
from flashlab.attention.inputs import TILE_SIDES, check_block, check_no_gradient, check_qkv, scale_of
from flashlab.triton_tools.compile_report import CompileReport, compile_reports

import triton  # isort: skip
import triton.language as tl  # isort: skip

BLOCK_ROWS = 64  # queries of a program

# ---- scheme A: a block of queries against the whole of K and V ------------------------------------------------------


@triton.jit
def scheme_a_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of q [M, HEAD_DIM] against all N <= BLOCK_N rows of k and v [N, HEAD_DIM]."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)  # BLOCK_N is a power of two: the keys past N are padding
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    k_ptrs = k_ptr + offs_n[None, :] * stride_kn + offs_d[:, None] * stride_kd  # axes swapped: this is K^T
    v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)  # [BLOCK_M, HEAD_DIM]
    k = tl.load(k_ptrs, mask=offs_n[None, :] < N, other=0.0)  # [HEAD_DIM, BLOCK_N]
    v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)  # [BLOCK_N, HEAD_DIM]

    s = tl.dot(q, k) * scale  # [BLOCK_M, BLOCK_N], float32
    s = tl.where(offs_n[None, :] < N, s, float("-inf"))  # a padded key gets no weight
    m_i = tl.max(s, axis=1)
    p = tl.exp(s - m_i[:, None])
    l_i = tl.sum(p, axis=1)
    o = tl.dot(p.to(v.dtype), v) / l_i[:, None]

    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_i), mask=offs_m < M)


def scheme_a(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, as_if_on: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one head with scheme_a_kernel: right for any M and N, as long as K and V fit into shared memory.

    q [M, HEAD_DIM], k and v [N, HEAD_DIM], float16 or bfloat16, HEAD_DIM a power of two from 16 to 256. Returns o
    [M, HEAD_DIM] in q's dtype and lse [M] in float32. `as_if_on` ("sm_120", "RTX 4090") asks the compiler first whether
    that GPU could run it; the interpreter itself has no shared memory to run out of.
    Raises ValueError or TypeError for tensors it cannot take; OutOfSharedMemory when `as_if_on` could not launch it;
    triton's own OutOfResources when the GPU it runs on cannot.
    """
    check_one_head(q, k, v)
    if as_if_on is not None and len(k):
        (report,) = scheme_a_reports([len(k)], q.shape[1], [as_if_on], dtype=q.dtype)
        if report.ok and not report.fits:
            raise OutOfSharedMemory(
                f"{report.kernel} needs {report.shared_bytes} bytes of shared memory a block, and a block on "
                f"{report.target} has {report.shared_limit} at most"
            )
    return launch(scheme_a_kernel, q, k, v, scale=scale, BLOCK_N=padded(len(k)))


class OutOfSharedMemory(RuntimeError):
    """The compiler says that a kernel needs more shared memory a block than the GPU has."""


def padded(n: int) -> int:
    """The tile for n keys: the next power of two (tl.arange takes no other), at least 16 (tl.dot takes no less)."""
    return max(16, 1 << max(n - 1, 0).bit_length())


def scheme_a_shared_bytes(seq_len: int, head_dim: int) -> int:
    """Shared memory of a block of scheme_a_kernel, in bytes: the tiles of q, k and v lie there at the same time."""
    return (BLOCK_ROWS + 2 * padded(seq_len)) * head_dim * 2


def first_failing_seq_len(shared_limit: int, shared_bytes: Callable[[int], int]) -> int:
    """The smallest power of two N >= 16 with shared_bytes(N) > shared_limit (both in bytes)."""
    n = 16
    while shared_bytes(n) <= shared_limit:
        n *= 2
    return n


def kernel_arguments(
    seq_len: int, head_dim: int, *, dtype: torch.dtype = torch.float16, **constants: Any
) -> dict[str, Any]:
    """The arguments of this module's kernels on contiguous tensors, in the form that compile_report takes."""
    strides = {f"stride_{axis}": head_dim for axis in ("qm", "kn", "vn", "om")}
    strides |= {f"stride_{axis}": 1 for axis in ("qd", "kd", "vd", "od")}
    pointers = {name: dtype for name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr")} | {"lse_ptr": torch.float32}
    tiles = {"HEAD_DIM": head_dim, "BLOCK_M": BLOCK_ROWS}
    return pointers | strides | {"M": seq_len, "N": seq_len, "scale": 0.125} | tiles | constants


def scheme_a_reports(
    seq_lens: Iterable[int],
    head_dim: int,
    targets: Sequence[str],
    *,
    dtype: torch.dtype = torch.float16,
    shared_only: bool = True,
) -> list[CompileReport]:
    """compile_reports of scheme_a_kernel: [length 0 on each target or GPU, length 1, ...]."""
    targets = [runtime.limits(target).target for target in targets]
    arguments = [kernel_arguments(n, head_dim, dtype=dtype, BLOCK_N=padded(n)) for n in seq_lens]
    return compile_reports(scheme_a_kernel, arguments, targets=targets, num_stages=1, shared_only=shared_only)


def check_one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError or TypeError, with a sentence, unless q, k and v are one head that the kernels here can take.

    They count in 32 bits, and take the maximum of scores of which one at least is finite; see `require_finite_rows`.
    """
    dtypes = (torch.float16, torch.bfloat16)
    check_qkv(q, k, v, rank=2, dtypes=dtypes, head_dims=TILE_SIDES, same_v=True)
    for name, x in (("q", q), ("k", k), ("v", v), ("the output", torch.empty(q.shape, device="meta"))):
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        if last >= 2**31:
            raise ValueError(
                f"{name} ends {last} elements behind its first, and these kernels count in 32 bits, to 2^31: pass "
                "fewer rows, or contiguous ones (flash_attention_forward of phase 3 counts in 64)"
            )
    check_no_gradient(q=q, k=k, v=v)


def require_finite_rows(q: torch.Tensor, k: torch.Tensor, scale: float, lse: torch.Tensor) -> None:
    """Raise ValueError where a row is NaN for want of a finite score: the kernels here compute -inf - (-inf) for it."""
    rows = lse.isnan().nonzero()[:64, 0]
    scores = scale * (q[rows].float() @ k.float().T)
    blind = scores.isneginf().any(1) & ~scores.logsumexp(1).isnan()
    if blind.any():
        raise ValueError(
            f"row {rows[blind][0].item()} of q has scores of -inf and, in a block of keys, no other: the kernels of "
            "this phase compute -inf - (-inf) there, which is NaN (flash_attention_forward of phase 3 takes such rows)"
        )


def launch(
    kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    BLOCK_M: int = BLOCK_ROWS,
    **constants: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel with this module's argument list, one program for each BLOCK_M rows of q; return (o, lse).

    q [M, HEAD_DIM], k and v [N, HEAD_DIM], o [M, HEAD_DIM] in q's dtype, lse [M] in float32. `constants` are the
    kernel's constexpr arguments beside HEAD_DIM and BLOCK_M. With no query or no key nothing is launched: o is 0 and
    lse -inf. Four warps and one stage: without a pipeline, shared memory holds just what the kernel's tiles need.
    Raises as check_one_head and require_finite_rows do.
    """
    check_one_head(q, k, v)
    scale = scale_of(scale, q.shape[1])
    check_block("BLOCK_M", BLOCK_M, power_of_two=True)
    check_block("BLOCK_N", constants.get("BLOCK_N"), power_of_two=True)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((len(q),), -math.inf, dtype=torch.float32, device=q.device)
    if len(q) and len(k):
        kernel[(triton.cdiv(len(q), BLOCK_M),)](
            q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), len(q), len(k), scale,
            HEAD_DIM=q.shape[1], BLOCK_M=BLOCK_M, **constants, num_warps=4, num_stages=1,
        )  # fmt: skip
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph being captured waits for nothing
            require_finite_rows(q, k, scale, lse)
    return o, lse


@triton.jit
def scheme_a_variant_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_BY_ROWS: tl.constexpr, V_LATE: tl.constexpr, P_FLOAT32: tl.constexpr,
):  # fmt: skip
    """scheme_a_kernel written differently, the same mathematics: what shared memory holds depends on these choices.

    K_BY_ROWS loads K as it lies and transposes the tile; V_LATE loads V after the softmax; P_FLOAT32 keeps the
    probabilities in float32 and widens V for the second product.
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    if K_BY_ROWS:
        k_ptrs = k_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
        k = tl.trans(tl.load(k_ptrs, mask=offs_n[:, None] < N, other=0.0))
    else:
        k_ptrs = k_ptr + offs_n[None, :] * stride_kn + offs_d[:, None] * stride_kd
        k = tl.load(k_ptrs, mask=offs_n[None, :] < N, other=0.0)
    if not V_LATE:
        v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
    s = tl.where(offs_n[None, :] < N, tl.dot(q, k) * scale, float("-inf"))
    m_i = tl.max(s, axis=1)
    p = tl.exp(s - m_i[:, None])
    l_i = tl.sum(p, axis=1)
    if V_LATE:
        v = tl.load(v_ptrs, mask=offs_n[:, None] < N, other=0.0)
    if P_FLOAT32:
        o = tl.dot(p, v.to(tl.float32)) / l_i[:, None]
    else:
        o = tl.dot(p.to(v.dtype), v) / l_i[:, None]
    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_i), mask=offs_m < M)


# ---- scheme B: V in blocks, K whole ---------------------------------------------------------------------------------


@triton.jit
def slice_by_split(p, J: tl.constexpr, HALVINGS: tl.constexpr):
    """Block J of the 2**HALVINGS blocks of columns of p: reshape to [rows, 2, columns / 2], permute, split, again."""
    part = p
    for level in tl.static_range(HALVINGS):
        halves = tl.permute(tl.reshape(part, [part.shape[0], 2, part.shape[1] // 2]), (0, 2, 1))
        left, right = tl.split(halves)  # split takes the last axis, which must have length 2
        if (J >> (HALVINGS - 1 - level)) & 1:  # the bits of J, highest first, say which half
            part = right
        else:
            part = left
    return part


@triton.jit
def slice_by_gather(p, j, BLOCK_N: tl.constexpr):
    """p[:, j * BLOCK_N : (j + 1) * BLOCK_N] by tl.gather, which takes any column from anywhere. j may be a variable."""
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.gather(p, tl.broadcast_to(columns[None, :], [p.shape[0], BLOCK_N]), axis=1)


@triton.jit
def slice_by_reduction(p, j, BLOCK_N: tl.constexpr):
    """p[:, j * BLOCK_N : (j + 1) * BLOCK_N] as a sum over all blocks, all but block j zeroed. j may be a variable."""
    BLOCKS: tl.constexpr = p.shape[1] // BLOCK_N
    blocks = tl.reshape(p, [p.shape[0], BLOCKS, BLOCK_N])
    chosen = tl.arange(0, BLOCKS)[None, :, None] == j
    return tl.sum(tl.where(chosen, blocks, 0.0), axis=1)


@triton.jit
def scheme_b_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVINGS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """K whole, padded to BLOCK_N * 2**HALVINGS keys, V in blocks of BLOCK_N; HOW says how block j of P is made."""
    KEYS: tl.constexpr = BLOCK_N << HALVINGS
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, KEYS)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    k_ptrs = k_ptr + offs_k[None, :] * stride_kn + offs_d[:, None] * stride_kd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)
    k = tl.load(k_ptrs, mask=offs_k[None, :] < N, other=0.0)
    s = tl.where(offs_k[None, :] < N, tl.dot(q, k) * scale, float("-inf"))  # [BLOCK_M, KEYS]
    m_i = tl.max(s, axis=1)
    p = tl.exp(s - m_i[:, None])
    l_i = tl.sum(p, axis=1)
    p = (p / l_i[:, None]).to(v_ptr.dtype.element_ty)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # region: V in blocks, P whole
    if HOW == "slice" or HOW == "split":
        for j in tl.static_range(KEYS // BLOCK_N):  # unrolled by the compiler: j is a constant in each copy
            rows = j * BLOCK_N + offs_n
            v_ptrs = v_ptr + rows[:, None] * stride_vn + offs_d[None, :] * stride_vd
            v = tl.load(v_ptrs, mask=rows[:, None] < N, other=0.0)
            if HOW == "slice":
                p_j = p[:, j * BLOCK_N : (j + 1) * BLOCK_N]
            else:
                p_j = slice_by_split(p, j, HALVINGS)
            acc = tl.dot(p_j, v, acc)
    # endregion
    else:
        for j in range(KEYS // BLOCK_N):
            rows = j * BLOCK_N + offs_n
            v_ptrs = v_ptr + rows[:, None] * stride_vn + offs_d[None, :] * stride_vd
            v = tl.load(v_ptrs, mask=rows[:, None] < N, other=0.0)
            if HOW == "gather":
                p_j = slice_by_gather(p, j, BLOCK_N)
            elif HOW == "reduction":
                p_j = slice_by_reduction(p, j, BLOCK_N)
            else:  # "recompute": the row's m and l are known, so any block of P can be made again from Q and K
                kj_ptrs = k_ptr + rows[None, :] * stride_kn + offs_d[:, None] * stride_kd
                k_j = tl.load(kj_ptrs, mask=rows[None, :] < N, other=0.0)
                s_j = tl.where(rows[None, :] < N, tl.dot(q, k_j) * scale, float("-inf"))
                p_j = (tl.exp(s_j - m_i[:, None]) / l_i[:, None]).to(v.dtype)
            acc = tl.dot(p_j, v, acc)

    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_i), mask=offs_m < M)


ESCAPE_HATCHES = ("split", "gather", "reduction", "recompute")
"""What scheme_b takes for `how`: the ways to a block of P that the compiler accepts."""


def scheme_b(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, how: str = "split", scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one head with scheme_b_kernel; tensors and result as scheme_a's.

    how "slice" is the line one would like to write, p[:, start:stop], which Triton refuses: its CompilationError or,
    interpreted, InterpreterError is raised. ESCAPE_HATCHES are accepted. A block of V has 64 rows.
    """
    if how != "slice" and how not in ESCAPE_HATCHES:
        raise ValueError(f"how is 'slice' or one of {', '.join(ESCAPE_HATCHES)}, not {how!r}")
    halvings = (max(64, padded(len(k))) // 64).bit_length() - 1
    return launch(scheme_b_kernel, q, k, v, scale=scale, BLOCK_N=64, HALVINGS=halvings, HOW=how)


def scheme_b_shared_bytes(seq_len: int, head_dim: int) -> int:
    """Shared memory of a block of scheme_b_kernel, in bytes: q and the whole of K at once (blocks of V come later)."""
    return (BLOCK_ROWS + padded(seq_len)) * head_dim * 2


# ---- K in blocks too, without rescaling: two passes -----------------------------------------------------------------


@triton.jit
def two_pass_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qm, stride_qd, stride_kn, stride_kd, stride_vn, stride_vd, stride_om, stride_od,
    M, N, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pass 1 finds the maximum and the sum of each row; pass 2 computes the scores again, for P @ V."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < M, other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + offs_n
        k_ptrs = k_ptr + rows[None, :] * stride_kn + offs_d[:, None] * stride_kd
        k = tl.load(k_ptrs, mask=rows[None, :] < N, other=0.0)
        s = tl.where(rows[None, :] < N, tl.dot(q, k) * scale, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        l_i = l_i * tl.exp(m_i - m_new) + tl.sum(tl.exp(s - m_new[:, None]), axis=1)
        m_i = m_new

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + offs_n
        k_ptrs = k_ptr + rows[None, :] * stride_kn + offs_d[:, None] * stride_kd
        v_ptrs = v_ptr + rows[:, None] * stride_vn + offs_d[None, :] * stride_vd
        k = tl.load(k_ptrs, mask=rows[None, :] < N, other=0.0)
        v = tl.load(v_ptrs, mask=rows[:, None] < N, other=0.0)
        s = tl.where(rows[None, :] < N, tl.dot(q, k) * scale, float("-inf"))
        p = tl.exp(s - m_i[:, None]) / l_i[:, None]  # final already: m_i and l_i have seen the whole row
        acc = tl.dot(p.to(v.dtype), v, acc)

    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=offs_m[:, None] < M)
    tl.store(lse_ptr + offs_m, m_i + tl.log(l_i), mask=offs_m < M)


def two_pass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, BLOCK_N: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one head with two_pass_kernel, of any length; tensors and result as scheme_a's."""
    return launch(two_pass_kernel, q, k, v, scale=scale, BLOCK_N=BLOCK_N)
