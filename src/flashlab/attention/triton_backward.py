"""Phase 5: FlashAttention's backward pass as three Triton kernels, for all that phase 4's forward pass takes.

    delta_kernel   delta = rowsum(dO * O), one number a row
    dkdv_kernel    a program keeps a block of keys and walks over the queries that see it, of every head that shares it
    dq_kernel      a program keeps a block of queries and walks over the keys that it sees

No program adds to what another one writes: there are no atomics, and two runs agree in every bit. The price is that
each tile of P is computed twice. The loops are those of `flashlab.attention.simulation_backward`; edges, masks and
loads are those of `flashlab.attention.triton_forward`.

In dkdv_kernel the scores are computed transposed, K Q^T. The other way, `tl.dot(tl.trans(p), do)` with p fresh from a
product, once gave wrong gradients on Hopper; and a transposition of registers costs time everywhere.

Sources: Dao et al., "FlashAttention" (2022), Algorithm 4; Dao, "FlashAttention-2" (2023), section 3.1; the Triton
tutorial "Fused Attention" for two kernels without atomics.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlab.attention.inputs import check_results, scale_of
from flashlab.attention.options import Window
from flashlab.attention.tiles import Tile, Work, cdiv, leaves_idle
from flashlab.attention.triton_forward import (
    check_inputs,
    current_device,
    in_band,
    launch_arguments,
    load_tile,
    longest_first,
    score_arguments,
    soft_capped,
    store_tile,
    tile_edges,
    tile_for,
    tile_ptrs,
    tile_step,
)


# region: delta kernel
@triton.jit(do_not_specialize=["M"])
def delta_kernel(
    O_ptr,  # [batch, heads, M, HEAD_DIM]
    DO_ptr,  # like O
    DLSE_ptr,  # [batch, heads, M], float32, contiguous; the gradient of the log-sum-exp, if HAS_DLSE
    DELTA_ptr,  # like DLSE
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    M, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    m_blocks = tl.cdiv(M, BLOCK_M)
    batch_head = (tl.program_id(0) // m_blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    offs_m = tl.program_id(0) % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    o_ptrs = tile_ptrs(O_ptr, batch, head, offs_m, offs_d, stride_ob, stride_oh, stride_om, stride_od, ALIGN)
    do_ptrs = tile_ptrs(DO_ptr, batch, head, offs_m, offs_d, stride_dob, stride_doh, stride_dom, stride_dod, ALIGN)
    o = load_tile(o_ptrs, offs_m, offs_d, M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    do = load_tile(do_ptrs, offs_m, offs_d, M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    rows = batch_head * M + offs_m
    if HAS_DLSE:
        delta -= tl.load(DLSE_ptr + rows, mask=offs_m < M, other=0.0)  # dlse / ds is P too
    tl.store(DELTA_ptr + rows, delta, mask=offs_m < M)


# endregion


# region: statistics
@triton.jit
def load_statistics(LSE_ptr, DELTA_ptr, rows, offs_m, end, EDGE: tl.constexpr):
    """lse in units of log 2, and delta, of some rows. lse is +inf, and so P is 0, in rows that see no key or that are
    not there."""
    if EDGE:
        lse = tl.load(LSE_ptr + rows + offs_m, mask=offs_m < end, other=float("inf"))
        delta = tl.load(DELTA_ptr + rows + offs_m, mask=offs_m < end, other=0.0)
    else:
        lse = tl.load(LSE_ptr + rows + offs_m)
        delta = tl.load(DELTA_ptr + rows + offs_m)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634), delta


# endregion


# region: dkdv arguments
@triton.jit(do_not_specialize=["M", "N", "first", "last"])
def dkdv_kernel(
    Q_ptr,  # [batch, heads, M, HEAD_DIM]
    K_ptr,  # [batch, heads / group, N, HEAD_DIM]
    V_ptr,  # like K
    DO_ptr,  # like Q
    LSE_ptr,  # [batch, heads, M], float32, contiguous
    DELTA_ptr,  # like LSE
    DK_ptr,  # like K
    DV_ptr,  # like K
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    scale, scale_log2, tanh_scale,
    M, N, heads, group, first, last,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # endregion
    # region: dkdv block
    # One program: BLOCK_N keys of one key head.
    n_blocks = tl.cdiv(N, BLOCK_N)
    if HAS_LAST:  # the first keys are seen most: counted from the end they are the last block
        block_n, batch_kv = longest_first(n_blocks)
        block_n = n_blocks - 1 - block_n
    else:
        block_n, batch_kv = tl.program_id(0) % n_blocks, tl.program_id(0) // n_blocks
    start_n = block_n * BLOCK_N
    batch_kv = batch_kv.to(tl.int64)
    kv_heads = heads // group
    batch, kv_head = batch_kv // kv_heads, batch_kv % kv_heads

    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    tile_m = tl.arange(0, BLOCK_M)
    k_ptrs = tile_ptrs(K_ptr, batch, kv_head, offs_n, offs_d, stride_kb, stride_kh, stride_kn, stride_kd, ALIGN)
    v_ptrs = tile_ptrs(V_ptr, batch, kv_head, offs_n, offs_d, stride_vb, stride_vh, stride_vn, stride_vd, ALIGN)
    k = load_tile(k_ptrs, offs_n, offs_d, N, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptrs, offs_n, offs_d, N, HEAD_DIM, BLOCK_D, True)

    # endregion
    # region: dkdv walk
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Seen from a key: query i sees key j <= i + last, so key j is seen by the queries i >= j - last.
    stop_n = tl.minimum(start_n + BLOCK_N, N)
    edges = tile_edges(start_n, stop_n, -last, -first, M, BLOCK_M, HAS_LAST, HAS_FIRST, True)
    left = (edges[1] - edges[0]) // BLOCK_M
    tiles = ((edges[2] - edges[1]) // BLOCK_M, left + tl.cdiv(edges[3] - edges[2], BLOCK_M))  # seen whole, and cut
    for member in range(group):  # the query heads that read this key head: their gradients add up
        head = kv_head * group + member
        rows = (batch * heads + head) * M
        q_ptrs = tile_ptrs(Q_ptr, batch, head, tile_m, offs_d, stride_qb, stride_qh, stride_qm, stride_qd, ALIGN)
        do_ptrs = tile_ptrs(DO_ptr, batch, head, tile_m, offs_d, stride_dob, stride_doh, stride_dom, stride_dod, ALIGN)
        for CUT in tl.static_range(2):
            # Cut tiles are few. With both loops pipelined, ptxas puts a wait behind every product (C7515).
            for tile in tl.range(tiles[CUT], num_stages=1 if CUT else None):
                start_m = edges[1] + tile * BLOCK_M
                if CUT:
                    start_m = tl.where(tile < left, edges[0], edges[2] - left * BLOCK_M) + tile * BLOCK_M
                # endregion
                # region: dkdv probabilities
                offs_m = start_m + tile_m
                q_tile = q_ptrs + tile_step(start_m, stride_qm, ALIGN)
                q = load_tile(q_tile, offs_m, offs_d, edges[3], HEAD_DIM, BLOCK_D, CUT)
                lse, delta = load_statistics(LSE_ptr, DELTA_ptr, rows, offs_m, edges[3], CUT)
                do_tile = do_ptrs + tile_step(start_m, stride_dom, ALIGN)
                do = load_tile(do_tile, offs_m, offs_d, edges[3], HEAD_DIM, BLOCK_D, CUT)
                s_t = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]: the scores, transposed
                dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # computed while the exponentials are
                if SOFTCAP:
                    s_t = soft_capped(s_t, tanh_scale)
                p_t = tl.exp2(s_t * scale_log2 - lse[None, :])  # no maximum is needed: lse is known
                seen = in_band(offs_m[None, :], offs_n[:, None], first, last, HAS_FIRST, HAS_LAST)
                if CUT:
                    p_t = tl.where(seen, p_t, 0.0)
                # endregion
                # region: dkdv gradients
                dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
                ds_t = p_t * (dp_t - delta[None, :])
                if SOFTCAP:
                    ds_t *= 1.0 - s_t * s_t  # the slope of tanh
                if CUT:
                    ds_t = tl.where(seen, ds_t, 0.0)  # again: 0 times a hidden NaN is NaN
                dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)
                # endregion

    # region: dkdv store
    dk_ptrs = tile_ptrs(DK_ptr, batch, kv_head, offs_n, offs_d, stride_dkb, stride_dkh, stride_dkn, stride_dkd, ALIGN)
    dv_ptrs = tile_ptrs(DV_ptr, batch, kv_head, offs_n, offs_d, stride_dvb, stride_dvh, stride_dvn, stride_dvd, ALIGN)
    store_tile(dk_ptrs, dk * scale, offs_n, offs_d, N, HEAD_DIM, BLOCK_D)
    store_tile(dv_ptrs, dv, offs_n, offs_d, N, HEAD_DIM, BLOCK_D)
    # endregion


# region: dq arguments
@triton.jit(do_not_specialize=["M", "N", "first", "last"])
def dq_kernel(
    Q_ptr,  # [batch, heads, M, HEAD_DIM]
    K_ptr,  # [batch, heads / group, N, HEAD_DIM]
    V_ptr,  # like K
    DO_ptr,  # like Q
    LSE_ptr,  # [batch, heads, M], float32, contiguous
    DELTA_ptr,  # like LSE
    DQ_ptr,  # like Q
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    scale, scale_log2, tanh_scale,
    M, N, heads, group, first, last,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # endregion
    # region: dq block
    # One program: BLOCK_M queries of one head, as in the forward kernel.
    m_blocks = tl.cdiv(M, BLOCK_M)
    if HAS_LAST:
        block_m, batch_head = longest_first(m_blocks)
    else:
        block_m, batch_head = tl.program_id(0) % m_blocks, tl.program_id(0) // m_blocks
    batch_head = batch_head.to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group

    start_m = block_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    tile_n = tl.arange(0, BLOCK_N)
    q_ptrs = tile_ptrs(Q_ptr, batch, head, offs_m, offs_d, stride_qb, stride_qh, stride_qm, stride_qd, ALIGN)
    k_ptrs = tile_ptrs(K_ptr, batch, kv_head, tile_n, offs_d, stride_kb, stride_kh, stride_kn, stride_kd, ALIGN)
    v_ptrs = tile_ptrs(V_ptr, batch, kv_head, tile_n, offs_d, stride_vb, stride_vh, stride_vn, stride_vd, ALIGN)
    do_ptrs = tile_ptrs(DO_ptr, batch, head, offs_m, offs_d, stride_dob, stride_doh, stride_dom, stride_dod, ALIGN)
    q = load_tile(q_ptrs, offs_m, offs_d, M, HEAD_DIM, BLOCK_D, True)
    do = load_tile(do_ptrs, offs_m, offs_d, M, HEAD_DIM, BLOCK_D, True)
    lse, delta = load_statistics(LSE_ptr, DELTA_ptr, batch_head * M, offs_m, M, True)

    # endregion
    # region: dq walk
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    edges = tile_edges(start_m, tl.minimum(start_m + BLOCK_M, M), first, last, N, BLOCK_N, HAS_FIRST, HAS_LAST, True)
    for part in tl.static_range(3):
        for start_n in tl.range(edges[part], edges[part + 1], BLOCK_N):
            offs_n = start_n + tile_n
            k_tile = k_ptrs + tile_step(start_n, stride_kn, ALIGN)
            k = load_tile(k_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            if SOFTCAP:
                s = soft_capped(s, tanh_scale)
            p = tl.exp2(s * scale_log2 - lse[:, None])
            v_tile = v_ptrs + tile_step(start_n, stride_vn, ALIGN)
            v = load_tile(v_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds *= 1.0 - s * s
            if part != 1:
                seen = in_band(offs_m[:, None], offs_n[None, :], first, last, HAS_FIRST, HAS_LAST)
                ds = tl.where(seen & (offs_n[None, :] < edges[3]), ds, 0.0)  # a key that is not there has a P too
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    # endregion

    # region: dq store
    dq_ptrs = tile_ptrs(DQ_ptr, batch, head, offs_m, offs_d, stride_dqb, stride_dqh, stride_dqm, stride_dqd, ALIGN)
    store_tile(dq_ptrs, dq * scale, offs_m, offs_d, M, HEAD_DIM, BLOCK_D)
    # endregion


class Tiles(NamedTuple):
    """The tiles of the two large kernels; neither needs to divide the other's."""

    dkdv: Tile
    dq: Tile


def flash_attention_backward(
    grad_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    grad_lse: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    allow_tf32: bool = False,
    tiles: Tiles | None = None,
    concurrent: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, from what `flash_attention_forward` took and gave.

    Args:
        grad_o: like q, with any strides, those of an expanded tensor too. grad_lse: like lse, or None for zeros.
        q, k, v, causal, scale, window, softcap, allow_tf32: as in the forward pass. o, lse: what it gave.
        tiles: as `tile` there.
        concurrent: launch dq's kernel on a stream of its own, so that it runs beside dkdv's; neither needs the other.
            None: where one of them alone leaves multiprocessors idle.
    Returns:
        Each like its input, in its dtype. A key head's gradient is the sum over the query heads that read it. A row
        that sees no key has dq = 0, a key that no query sees dk = dv = 0. Two runs agree in every bit.
    Raises:
        TypeError, ValueError: see `flash_attention_forward`; o, lse or a gradient that does not go with q.
    """
    check_inputs(q, k, v, no_grad=True)
    check_results(q, {"grad_o": grad_o, "o": o}, {"lse": lse, "grad_lse": grad_lse}, no_grad=True)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    scores = score_arguments(q, k, causal, scale, window, softcap, allow_tf32) | {"scale": scale_of(scale, q.shape[3])}
    lse = lse.contiguous()
    with current_device(q):
        delta = _launch_delta(grad_o, q, k, o, lse, grad_lse)
        _launch_both((q, k, v, grad_o, lse, delta), (dq, dk, dv), scores, tiles, concurrent)
    return dq, dk, dv


def _launch_delta(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """delta, like lse."""
    batch, heads, seq_q = q.shape[:3]
    tile = Tile(64, 16, 4, 1)
    arguments = launch_arguments(tile, q=q, k=k, o=o, do=grad_o)
    wanted = {name: arguments[name] for name in arguments if name.startswith(("stride_o", "stride_do"))}
    wanted |= {name: arguments[name] for name in ("M", "heads", "HEAD_DIM", "BLOCK_D", "ALIGN", "BLOCK_M")}
    delta = torch.empty_like(lse)
    given = lse if grad_lse is None else grad_lse.contiguous()
    grid = (cdiv(seq_q, tile.BLOCK_M) * batch * heads,)
    delta_kernel[grid](o, grad_o, given, delta, **wanted, HAS_DLSE=grad_lse is not None)
    return delta


def _launch_both(
    given: tuple[torch.Tensor, ...],
    wanted: tuple[torch.Tensor, ...],
    scores: dict[str, Any],
    tiles: Tiles | None,
    concurrent: bool | None,
) -> None:
    """dkdv and dq, in turn or at once. given: q, k, v, grad_o, lse, delta. wanted: dq, dk, dv."""
    q, k, v, grad_o, *_ = given
    dq, dk, dv = wanted
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    masked = scores["HAS_FIRST"] or scores["HAS_LAST"]

    def launch_dkdv(tile: Tile) -> None:
        grid = (cdiv(seq_k, tile.BLOCK_N) * batch * kv_heads,)
        arguments = launch_arguments(tile, q=q, k=k, v=v, do=grad_o, dk=dk, dv=dv)
        dkdv_kernel[grid](*given, dk, dv, **arguments, **scores)

    def launch_dq(tile: Tile) -> None:
        grid = (cdiv(seq_q, tile.BLOCK_M) * batch * heads,)
        arguments = launch_arguments(tile, q=q, k=k, v=v, do=grad_o, dq=dq)
        dq_kernel[grid](*given, dq, **arguments, **scores)

    of_keys = Work("dkdv", head_dim, q.dtype, masked, seq_k, seq_q, batch * kv_heads)
    of_queries = Work("dq", head_dim, q.dtype, masked, seq_q, seq_k, batch * heads)
    dkdv_tile = tile_for(of_keys, tiles and tiles.dkdv, q.device)
    dq_tile = tile_for(of_queries, tiles and tiles.dq, q.device)
    if concurrent is None:
        concurrent = leaves_idle(of_keys, dkdv_tile, q.device) or leaves_idle(of_queries, dq_tile, q.device)
    if not (concurrent and q.is_cuda):
        launch_dkdv(dkdv_tile)
        launch_dq(dq_tile)
        return
    here, aside = torch.cuda.current_stream(), _second_stream(q.device)
    aside.wait_stream(here)  # dq's kernel reads delta
    with torch.cuda.stream(aside):
        launch_dq(dq_tile)
    launch_dkdv(dkdv_tile)
    here.wait_stream(aside)  # so that all memory is used, and given back, as if there were one stream


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def compile_arguments(
    kernel: str, dtype: torch.dtype, head_dim: int, tile: Tile, *, seq: int = 4096, heads: int = 16,
    causal: bool = False, window: Window = None, softcap: float | None = None,
) -> dict[str, object]:  # fmt: skip
    """What a compile report needs for a launch of "dkdv" or "dq" on contiguous [1, heads, seq, head_dim]."""
    x = torch.empty((1, heads, seq, head_dim), dtype=dtype, device="meta")
    results = {"dq": x} if kernel == "dq" else {"dk": x, "dv": x}
    pointers = {f"{name}_ptr": dtype for name in ("Q", "K", "V", "DO", *(name.upper() for name in results))}
    pointers |= {"LSE_ptr": torch.float32, "DELTA_ptr": torch.float32}
    scores = score_arguments(x, x, causal, None, window, softcap) | {"scale": scale_of(None, head_dim)}
    return pointers | launch_arguments(tile, q=x, k=x, v=x, do=x, **results) | scores
