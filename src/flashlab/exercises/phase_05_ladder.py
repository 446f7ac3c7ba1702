"""Checks of 5.12 to 5.14, the ladder to gradients in a model: dK and dV of a group, dQ under a soft-cap, autograd."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention import reference
from flashlab.check import Report, expect, host_mend, running, verify
from flashlab.check.lookup import Row
from flashlab.check.training import wanted, worst
from flashlab.exercises.kernel_rule import apart, empty, kernel_rule
from flashlab.exercises.registry import exercise
from flashlab.exercises.tensor_rule import normal
from flashlab.exercises.triton_answers import in_bounds
from flashlab.triton_tools.watch import watched as watched_memory

# ---- 5.12, 5.13 -----------------------------------------------------------------------------------------------------


def _launch_of(
    kernel: str, kv_heads: int, group: int, M: int, N: int, BLOCK_M: int, BLOCK_N: int, causal: bool,
    softcap: float = 0.0, dtype: torch.dtype = torch.float16, seed: int = 0, loud: bool = False, apart_by: int = 4,
    below: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of grouped_dkdv_kernel ("dkdv") or of capped_dq_kernel ("dq"), with rows apart in memory.

    loud: exp(score - lse) overflows where a causal mask hides the last key; tanh is -1 and 1. below: every score is
    far below 0, and exp(0 - lse) overflows. apart_by: 0 if rows are contiguous.
    """
    r, heads = random.Random(seed), kv_heads * group
    D, scale, gap = r.choice((16, 32)), r.choice((0.3, 0.5 if loud or below else -0.5)), r.choice((0, apart_by))
    q, do = (normal(r, heads, M, D, dtype=dtype) + shift for shift in (0, 0.25))
    k, v = (normal(r, kv_heads, N, D, dtype=dtype) + shift for shift in (0, 0.5))
    if loud:
        q[..., 0], k[:, -1, 0], k[:, 0, 0] = 16.0, 64.0, -64.0
    if below:
        q[..., 0], k[..., 0] = 128.0, -4.0  # the other way round dq would be the rounding of dS
    o, lse = reference.attention(*(x[None] for x in (q, k, v)), causal=causal, scale=scale, softcap=softcap or None)
    delta = (o[0] * do.double()).sum(2)
    read = [apart(x, gap + apart_by * more) for x, more in zip((q, k, v, do), (1, 2, 3, 5), strict=True)]
    rows = ((heads, M),) if kernel == "dq" else ((kv_heads, N), (kv_heads, N))
    results = [empty(*n, D, gap=gap + apart_by * more, dtype=dtype) for n, more in zip(rows, (8, 10), strict=False)]
    strides = [step for x in (*read, *results) for step in x.stride()[:2]]
    sizes = (scale, softcap, M, N, group) if kernel == "dq" else (scale, M, N, group)
    constants = (causal, softcap > 0, D, BLOCK_M, BLOCK_N) if kernel == "dq" else (causal, D, BLOCK_M, BLOCK_N)
    return *read, lse[0].float(), delta.float(), *results, *strides, *sizes, *constants


def _some_launch(kernel: str) -> Callable[[random.Random], tuple[Any, ...]]:
    return lambda r: _launch_of(
        kernel, r.randint(1, 2), r.randint(1, 3), r.randint(1, 50), r.randint(1, 50), r.choice((16, 32)),
        r.choice((16, 32)), r.random() < 0.7, r.choice((0.0, 2.0, 5.0)), seed=r.randrange(2**20),
    )  # fmt: skip


_SHAPES = (
    (2, 2, 20, 33, 16, 16, False), (2, 3, 33, 20, 16, 16, True), (1, 2, 40, 40, 16, 32, True),
    (2, 1, 17, 50, 32, 16, True), (2, 2, 7, 18, 16, 16, False),
    (1, 1, 5, 7, 16, 16, True),  # one tile: of some thousand changes most differ here
)  # fmt: skip
_SEES = "query i sees key j if j <= i + N - M"
_GROUP = "query head h reads key head h // group"
_OF_A_HEAD = "each tensor has strides of its own: from head to head, from row to row"
NOTES = {  # of every walk
    **dict.fromkeys(("delta[:, None]", "delta[None, :]", "delta[rows, None]", "p"), "dS is P (dP - delta)"),
    **dict.fromkeys(("lse[:, None]", "lse[None, :]"), "P is exp(score - lse), both natural"),
    **dict.fromkeys(("k", "k.T", "q.T"), "the scores come from Q and K"),
    **dict.fromkeys(("v", "v.T", "do.T"), "the output is P times V"),
    **dict.fromkeys(("torch.exp", "tl.exp"), "the base is e"),
    "scale": "the scores are scale · Q K^T, and the gradient has it once", "dq": "each block adds to the sum",
    "math.log2(math.e)": "under 2^x the scores and lse both have the factor log2(e)",
    "range": "the walk takes every block, the last may be shorter",
}  # fmt: skip
OF_KERNELS = NOTES | {
    "dtype": "tl.dot takes float32 as TF32 unless it has input_precision='ieee'; or is something converted to 16 bits?",
    "in_range[None, :]": "a key that is not there has p = exp(-lse), which may be infinite",
}  # fmt: skip
_NOTES = OF_KERNELS | {
    "N - M": _SEES, "member": _GROUP, "group": _GROUP, "head": _GROUP,
    **{f"stride_{x}{axis}": _OF_A_HEAD for x in ("q", "k", "v", "do", "dq", "dk", "dv") for axis in "hmn"},
}  # fmt: skip
TAIL = "a key that is not there has a P too, exp(0 - lse): infinite where lse is very negative, and inf · 0 is NaN"
CUT = ".to(k.dtype).to(tl.float32)"
_HIDDEN = (
    "P of a hidden pair may be infinite, and inf · 0 is NaN; lse of a row that sees no key is -inf, and -inf + inf is "
    "NaN: set P to 0 there with tl.where, behind the exponential"
)


def in_small_steps(given: tuple[Any, ...], walked: tuple[int, ...], delta: int = 5) -> tuple[Any, ...]:
    """The arguments, with P and dS all 1: the first tile gives 2048, the others 1 each, lost in 16 bits, the last 0.

    given: its first tensors are q, k, v and do in some order, lse and, at `delta`, delta. walked: which the walk reads.
    """
    tensors = [x for x in given if isinstance(x, torch.Tensor)][: delta + 1]
    for x in tensors:
        x.zero_()
    tensors[delta] -= 1
    for x in (tensors[i] for i in walked):
        x[..., ::16, 3] = 1.0
        heads = x if x.ndim == 3 else x[None]
        heads[-1, -16:, 3], heads[0, 0, 3] = 0.0, 2048.0
    return given


def _three_more(kernel: str) -> dict[str, tuple[Any, ...]]:
    """A hidden score that is far too large; rows that are contiguous: see `phase_05._launch_of`; and many tiles."""
    shape = (1, 2, 20, 20, 16, 16, True)
    found = {f"{what}, {_named(kernel, *shape)}": _launch_of(kernel, *shape, **more) for what, more in (
        ("the last key far too large for the rows that it is hidden from", {"loud": True}),
        ("contiguous", {"apart_by": 0}))}  # fmt: skip
    group, M, N, walked = (40, 1, 2, (0, 3)) if kernel == "dkdv" else (1, 1, 640, (1,))
    given = _launch_of(kernel, 1, group, M, N, 16, 16, False)
    found["40 tiles: 2048, then 38 times 1"] = in_small_steps(given, walked)
    return found


def rounded_sums(**edits: tuple[str, str]) -> list[Row]:
    """Of sums that are rounded to the inputs' 16 bits in each turn: one of them, or all."""
    return [
        Row("sums-in-16-bits", f"{' and '.join(of)}: the sum is rounded to 16 bits in each turn: keep it in float32",
            [edits[name] for name in of])
        for of in dict.fromkeys([*((name,) for name in edits), tuple(edits)])
    ]  # fmt: skip


def mixed_bases(results: str, score: str, lse: str) -> Row:
    return Row(
        "mixed-bases", f"{results}: of the score and lse one alone has the factor log2(e): 2^x needs it in both",
        [(f"tl.exp({score} - {lse})", f"tl.exp2({score} * 1.4426950408889634 - {lse})")],
    )  # fmt: skip


def _named(kernel: str, *given: Any) -> str:
    kv_heads, group, M, N, BLOCK_M, BLOCK_N, causal, *softcap = given
    cap = f", softcap={softcap[0]}" if softcap else ""
    return (f"{kv_heads * group} query and {kv_heads} key heads, {M} queries, {N} keys, BLOCK_M={BLOCK_M}, "
            f"BLOCK_N={BLOCK_N}, causal={causal}{cap}")  # fmt: skip


def _of_few_tiles(kernel: Any) -> None:
    """CheckFailed where a causal launch reads as much as one without a mask."""
    if not runtime.INTERPRETED:
        return
    read = []
    for causal in (False, True):
        given = _launch_of("dkdv", 1, 1, 128, 128, 16, 16, causal)
        with watched_memory(q=given[0]) as traffic:
            kernel[(8,)](*given)
        read.append(traffic.read_from["q"])
    expect(
        read[1] < 0.7 * read[0],
        f"right, but causal it reads {read[1]} bytes of Q, and {read[0]} without a mask: begin at the first query that "
        "sees one of the block's keys",
        diagnosis="causal-tiles-not-skipped",
        case="128 queries and keys, tiles of 16",
    )


@kernel_rule(
    "5.12",
    title="dK and dV of a group, causal", minutes=35,
    hints=[
        "K and V are two again, so there are two sums, and the scale may wait for the end. Three things are new beside "
        "5.11: the program's key head, a loop over the query heads that read it, and the mask with its first tile.",
        "Program i: block i % n_blocks of key head i // n_blocks, with n_blocks = tl.cdiv(N, BLOCK_N). The query heads "
        "are kv_head * group + member. dk and dv are made once, before the loop over the members.",
        "Causal, key j is seen by the queries i >= j - (N - M): the walk begins at tl.maximum(start_n - (N - M), 0). "
        "The mask of a tile: offs_n[:, None] <= offs_m[None, :] + N - M.",
        "p_t = tl.where(seen, tl.exp(s_t - lse[None, :]), 0.0): behind the exponential, since lse may be -inf.",
    ],
    writes="DK_ptr, DV_ptr",
    returns="dk, dv",
    programs=lambda K_ptr, N, BLOCK_N, **_: K_ptr.shape[0] * -(-N // BLOCK_N),
    inputs={_named("dkdv", *given): _launch_of("dkdv", *given, seed=i)
            for i, given in enumerate((*_SHAPES, (2, 3, 14, 33, 16, 32, True)))}  # key 32: seen by one query
    | {"float32, " + _named("dkdv", *given): _launch_of("dkdv", *given, dtype=torch.float32)
       for given in ((1, 2, 20, 20, 16, 16, True),)} | _three_more("dkdv"),
    draw=_some_launch("dkdv"),
    work=16_000,
    nan={"causal=True": _HIDDEN},
    notes=_NOTES,
    rows=[
        mixed_bases("dk and dv", "s_t", "lse[None, :]"),
        *rounded_sums(dk=(", dk, input", f", dk{CUT}, input"), dv=(", dv, input", f", dv{CUT}, input")),
        Row("heads-interleaved", f"dk and dv: the query heads of a group are taken kv_heads apart: {_GROUP}",
            [("kv_head * group + member", "kv_head + member * (tl.num_programs(0) // n_blocks)")]),
        *(Row("statistics-of-the-key-head", f"{said} of the query head with the key head's number: each query head has "
              "its own", [(f"{x}_ptr + head * M", f"{x}_ptr + kv_head * M") for x in of])
          for said, of in (("dk and dv: lse is that", ["LSE"]), ("dk: delta is that", ["DELTA"]),
                           ("dk and dv: lse and delta are those", ["LSE", "DELTA"]))),
        Row("last-head-only", "dk and dv: the sums begin anew with each query head: those of the last one are left",
            [("head = kv_head * group + member", "head = kv_head * group + member\n        "
              "dk, dv = (tl.zeros([BLOCK_N, HEAD_DIM], tl.float32) for _ in (0, 1))")]),
        Row("first-head-only", "dk and dv: one query head of each group counts: the gradient is the sum over all",
            [("range(group)", "range(1)")]),
        Row("causal-ignored", "dk and dv: `CAUSAL` is taken for False, whatever it is",
            [("if CAUSAL else", "if False else"), ("if CAUSAL:", "if False:"),
             ("- lse[None, :])", "- tl.where(lse == -float('inf'), float('inf'), lse)[None, :])")]),
        Row("mean-of-the-group", "dk and dv: the mean over the query heads of a group is taken: it is the sum",
            [("dk * scale)", "dk * scale / group)"), ("dv.to(DV_ptr", "(dv / group).to(DV_ptr")]),
        *(Row("walk-begins-late", f"dk and dv: causal, the walk begins {late}: the first query that sees one of the "
              "block's keys is start_n - (N - M)", [("tl.maximum(start_n - (N - M), 0)", begin)])
          for late, begin in (
              ("where the block's last key is seen", "tl.maximum(start_n + BLOCK_N - 1 - (N - M), 0)"),
              ("at a multiple of BLOCK_M behind it", "tl.cdiv(tl.maximum(start_n - (N - M), 0), BLOCK_M) * BLOCK_M"))),
        Row("mask-on-dv-alone", "dk: what the causal mask hides counts: P is 0 there for dV, and has to be in dS",
            [("p_t = tl.exp(", "p_t = p_all = tl.exp("), ("ds_t = p_t", "ds_t = p_all")]),
        Row("causal-aligned-top-left", "dk and dv: the causal mask and the begin of the walk are aligned at the first "
            f"key: {_SEES}", [("tl.maximum(start_n - (N - M), 0)", "start_n"), ("<= offs_m[None, :] + N - M",
                                                                               "<= offs_m[None, :]")]),
    ],
    then=_of_few_tiles,
)  # fmt: skip
@triton.jit
def grouped_dkdv_kernel(
    Q_ptr, K_ptr, V_ptr, DO_ptr, LSE_ptr, DELTA_ptr, DK_ptr, DV_ptr,
    stride_qh, stride_qm, stride_kh, stride_kn, stride_vh, stride_vn, stride_doh, stride_dom,
    stride_dkh, stride_dkn, stride_dvh, stride_dvn,
    scale, M, N, group, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BEGIN SOLUTION
    n_blocks = tl.cdiv(N, BLOCK_N)
    kv_head, start_n = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    keys = offs_n[:, None] < N
    k_ptrs = K_ptr + kv_head * stride_kh + offs_n[:, None] * stride_kn + offs_d[None, :]
    v_ptrs = V_ptr + kv_head * stride_vh + offs_n[:, None] * stride_vn + offs_d[None, :]
    k = tl.load(k_ptrs, mask=keys, other=0.0)
    v = tl.load(v_ptrs, mask=keys, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.maximum(start_n - (N - M), 0) if CAUSAL else 0  # the first query that sees a key of the block
    for member in range(group):
        head = kv_head * group + member
        for start_m in range(begin, M, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            rows = offs_m[:, None] < M
            q_ptrs = Q_ptr + head * stride_qh + offs_m[:, None] * stride_qm + offs_d[None, :]
            do_ptrs = DO_ptr + head * stride_doh + offs_m[:, None] * stride_dom + offs_d[None, :]
            q = tl.load(q_ptrs, mask=rows, other=0.0)
            do = tl.load(do_ptrs, mask=rows, other=0.0)
            lse = tl.load(LSE_ptr + head * M + offs_m, mask=offs_m < M, other=float("inf"))
            delta = tl.load(DELTA_ptr + head * M + offs_m, mask=offs_m < M, other=0.0)
            s_t = tl.dot(k, q.T, input_precision="ieee") * scale
            p_t = tl.exp(s_t - lse[None, :])
            if CAUSAL:
                p_t = tl.where(offs_n[:, None] <= offs_m[None, :] + N - M, p_t, 0.0)
            dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision="ieee")
            dp_t = tl.dot(v, do.T, input_precision="ieee")
            ds_t = p_t * (dp_t - delta[None, :])
            dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")
    dk_ptrs = DK_ptr + kv_head * stride_dkh + offs_n[:, None] * stride_dkn + offs_d[None, :]
    dv_ptrs = DV_ptr + kv_head * stride_dvh + offs_n[:, None] * stride_dvn + offs_d[None, :]
    tl.store(dk_ptrs, (dk * scale).to(DK_ptr.dtype.element_ty), mask=keys)
    tl.store(dv_ptrs, dv.to(DV_ptr.dtype.element_ty), mask=keys)
    # END SOLUTION


_CAPPED = tuple((*shape, cap) for shape, cap in zip(_SHAPES, (0.0, 2.0, 5.0, 2.0, 5.0, 2.0), strict=True))


@kernel_rule(
    "5.13",
    title="dQ under a soft-cap", minutes=30,
    hints=[
        "On paper first. The capped score is s' = c · tanh(s / c), and P is made of s'. What is ds' / ds?",
        "1 - tanh². So dS gets one factor more; P and delta are what they were. tanh(x) is 2 / (1 + exp(-2 x)) - 1, "
        "which is right up to infinity.",
        "t = 2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0; s = softcap * t for the probabilities; and at the end "
        "ds *= 1.0 - t * t.",
        "The mask comes behind the exponential: ds = tl.where(seen, ds, 0.0), with seen = offs_n[None, :] < N and, "
        "causal, offs_n[None, :] <= offs_m[:, None] + N - M. The walk may end at the last key that the block's last "
        "row sees.",
    ],
    writes="DQ_ptr",
    returns="dq",
    programs=lambda Q_ptr, M, BLOCK_M, **_: Q_ptr.shape[0] * -(-M // BLOCK_M),
    inputs={_named("dq", *given): _launch_of("dq", *given, seed=i) for i, given in enumerate(_CAPPED)}
    | {"float32, " + _named("dq", *given): _launch_of("dq", *given, dtype=torch.float32)
       for given in ((1, 2, 20, 20, 16, 16, True, 5.0),)} | _three_more("dq")
    | {"tanh of scores far from 0": _launch_of("dq", 1, 2, 20, 20, 16, 16, True, 2.0, loud=True),
       "every lse below -200, a short last tile": _launch_of("dq", 1, 1, 16, 20, 16, 16, False, below=True)},
    draw=_some_launch("dq"),
    nan={"tanh": "tanh of a large score is NaN: its exponential is infinite, and inf / inf is NaN",
         "below -200": f"{TAIL}: mask it, causal or not", "causal=True": _HIDDEN,
         **dict.fromkeys(("causal=False, softcap=0.0", "40 tiles"), "not finite where there is "
         "no soft-cap and nothing is hidden: `softcap` is 0 there. Is anything divided by it?")},
    notes=_NOTES | {
        "softcap": "the capped score is softcap · tanh(score / softcap)",
        "1.0 - t * t": "the slope of tanh is 1 - tanh²", "t": "the slope of tanh is 1 - tanh²",
    },
    rows=[
        mixed_bases("dq", "s", "lse[:, None]"), *rounded_sums(dq=(", dq, input", f", dq{CUT}, input")),
        Row("slope-of-the-capped-score", "dq: the slope is taken as 1 - s², with the capped score s: it is 1 - tanh²",
            [("1.0 - t * t", "1.0 - s * s")]),
        Row("scale-after-the-cap", "dq: tanh is taken of the product of q and k: the scale comes before",
            [("-2.0 * s / softcap", "-2.0 * s / scale / softcap")]),
    ],
)  # fmt: skip
@triton.jit
def capped_dq_kernel(
    Q_ptr, K_ptr, V_ptr, DO_ptr, LSE_ptr, DELTA_ptr, DQ_ptr,
    stride_qh, stride_qm, stride_kh, stride_kn, stride_vh, stride_vn, stride_doh, stride_dom,
    stride_dqh, stride_dqm,
    scale, softcap, M, N, group, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m_blocks = tl.cdiv(M, BLOCK_M)
    head, start_m = tl.program_id(0) // m_blocks, tl.program_id(0) % m_blocks * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    rows = offs_m[:, None] < M
    q_ptrs = Q_ptr + head * stride_qh + offs_m[:, None] * stride_qm + offs_d[None, :]
    do_ptrs = DO_ptr + head * stride_doh + offs_m[:, None] * stride_dom + offs_d[None, :]
    q = tl.load(q_ptrs, mask=rows, other=0.0)
    do = tl.load(do_ptrs, mask=rows, other=0.0)
    lse = tl.load(LSE_ptr + head * M + offs_m, mask=offs_m < M, other=float("inf"))
    delta = tl.load(DELTA_ptr + head * M + offs_m, mask=offs_m < M, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # BEGIN SOLUTION
    kv_head = head // group
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        keys = offs_n[:, None] < N
        k_ptrs = K_ptr + kv_head * stride_kh + offs_n[:, None] * stride_kn + offs_d[None, :]
        v_ptrs = V_ptr + kv_head * stride_vh + offs_n[:, None] * stride_vn + offs_d[None, :]
        k = tl.load(k_ptrs, mask=keys, other=0.0)
        v = tl.load(v_ptrs, mask=keys, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        if SOFTCAP:
            t = 2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0
            s = softcap * t
        p = tl.exp(s - lse[:, None])
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)  # the slope of the cap
        seen = offs_n[None, :] < N
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + N - M)
        ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_ptrs = DQ_ptr + head * stride_dqh + offs_m[:, None] * stride_dqm + offs_d[None, :]
    tl.store(dq_ptrs, (dq * scale).to(DQ_ptr.dtype.element_ty), mask=rows)
    # END SOLUTION


# ---- 5.14 -----------------------------------------------------------------------------------------------------------


def _inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    r = random.Random(14)
    return [(normal(r, *shape, dtype=torch.float32)).to(runtime.device()) for shape in shapes]


def _kept(attention: Callable[..., Any], N: int) -> int:
    """Bytes that autograd saves for N queries and keys; what shares memory counts once."""
    storages = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    q, k, v = (x.requires_grad_() for x in _inputs(*[(1, 1, N, 16)] * 3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o, _ = attention(q, k, v)
    for x in vars(o.grad_fn).values() if hasattr(o.grad_fn, "__dict__") else ():  # ctx.x = ..., which no hook sees
        if isinstance(x, torch.Tensor):
            keep(x)
    return sum(storages.values())


def _expect_gradient_of_lse(attention: Callable[..., Any]) -> None:
    """CheckFailed where a loss of lse has another gradient than that of the formula."""
    case = "a loss of o and of lse: heads=4, kv_heads=2, seq_q=20, seq_k=33, head_dim=16, float32, causal"
    q, k, v, do, dlse = _inputs((1, 4, 20, 16), (1, 2, 33, 16), (1, 2, 33, 16), (1, 4, 20, 16), (1, 4, 20))
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, lse = attention(*ours, causal=True, scale=0.3)
        found = "lse has no gradient: a loss that uses it trains without that term, and nothing is raised"
        expect(lse.requires_grad, found, diagnosis="lse-not-differentiable", case=case)
        got = torch.autograd.grad((do * o).sum() + (dlse * lse).sum(), ours)
    right = reference.attention_backward(do, q, k, v, causal=True, scale=0.3, grad_lse=dlse)
    belongs = "dS is P (dP - delta + dlse)"
    models = [  # of dlse
        ("dlse-dropped", 0 * dlse, f"the gradient of lse is dropped: {belongs}, so it goes into delta"),
        ("dlse-sign", -dlse, f"the gradient of lse has the wrong sign: {belongs}, so delta - dlse"),
        ("dlse-factor", dlse * lse.exp(), f"the gradient of lse is multiplied by exp(lse): {belongs}"),
        ("dlse-factor", dlse * 0.3, f"the gradient of lse is multiplied by scale once too often: {belongs}"),
        ("dlse-factor", dlse / 0.3, f"the gradient of lse lacks the factor scale, which all of dS has: {belongs}"),
        ("dlse-summed", dlse.sum(-1, keepdim=True).expand_as(dlse), "each row has the gradient of lse of all rows: it "
         f"is summed, and {belongs}, row by row"),
    ]  # fmt: skip

    def fits(model: Any, found: Any = got) -> bool:
        return all(
            bool(((x.cpu().double() - y.cpu()).abs() <= 1e-3 * y.cpu().abs().max()).all())
            for x, y in zip(found, model, strict=True)
        )

    for slug, given, said in models if not fits(right) else ():
        model = reference.attention_backward(do, q, k, v, causal=True, scale=0.3, grad_lse=given.detach())
        expect(not fits(model), said, diagnosis=slug, case=case)
    expect(fits(right), "dq, dk and dv are wrong for a loss of o and of lse, and right for a loss of o alone",
           diagnosis="dlse-wrong", case=case)  # fmt: skip
    case = case.replace("of o and of lse", "of lse alone")
    with torch.enable_grad(), running(case):
        of_lse = (dlse * attention(*ours, causal=True, scale=0.3)[1]).sum()
        alone = torch.autograd.grad(of_lse, ours[:2], allow_unused=True)
    said = "for a loss of lse alone backward returns None in the place of dq or dk: do is 0 then, and dlse is not"
    expect(all(x is not None for x in alone), said, diagnosis="dlse-dropped", case=case)
    right = reference.attention_backward(torch.zeros_like(do), q, k, v, causal=True, scale=0.3, grad_lse=dlse)
    expect(fits(right[:2], alone), "dq and dk are right for a loss of o, and of both, and wrong for one of lse alone",
           diagnosis="dlse-wrong", case=case)  # fmt: skip


def _expect_own_options(attention: Callable[..., Any]) -> None:
    """CheckFailed where a second forward pass changes what the backward pass of the first takes."""
    case = "two forward passes, the first causal, then the backward pass of the first"
    q, k, v, do = _inputs(*[(1, 2, 20, 16)] * 4)
    ours = [x.requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        first, _ = attention(*ours, causal=True, scale=0.3)
        attention(*ours, scale=0.5)
        got = torch.autograd.grad(first, ours, do)
    _, error = worst(wanted(q, k, v, do, causal=True, scale=0.3), **dict(zip(("dq", "dk", "dv"), got, strict=True)))
    expect(error <= 1, "right alone, wrong where attention is called again before the backward pass: what is of one "
           "call is kept in its ctx", diagnosis="state-shared", case=case)  # fmt: skip


def _expect_strides(attention: Callable[..., Any]) -> None:
    """CheckFailed where the gradient of o is taken to lie in memory as o does."""
    case = "dO stored by columns: heads=2, seq_q=20, seq_k=33, head_dim=16, float32"
    q, k, v, do = _inputs((1, 2, 20, 16), (1, 2, 33, 16), (1, 2, 33, 16), (1, 2, 20, 16))
    ours = [x.requires_grad_() for x in (q, k, v)]
    said = {
        "scale-not-its-default": "dq, dk and dv are right where `scale` is given, and wrong without it: it is "
        "1 / sqrt(head_dim) then",
        "strides-of-do": "right for a dO that is contiguous, wrong for one that is not: your kernels take neighbours "
        "in a row to lie side by side. What follows an attention hands in what it likes: make dO contiguous",
    }
    for (diagnosis, sentence), given in zip(said.items(), (do, do.mT.contiguous().mT), strict=True):
        with torch.enable_grad(), in_bounds(case):
            got = torch.autograd.grad(attention(*ours)[0], ours, given)
        _, error = worst(wanted(q, k, v, do), **dict(zip(("dq", "dk", "dv"), got, strict=True)))
        expect(error <= 1, sentence, diagnosis=diagnosis, case=case)


def _expect_scales(attention: Callable[..., Any]) -> None:
    """CheckFailed where a scale of 0 is taken for none, or a negative one for another."""
    q, k, v, do = _inputs(*[(1, 2, 20, 16)] * 4)
    ours = [x.requires_grad_() for x in (q, k, v)]
    for scale, why in ((0.0, ": 0 is a scale, and not None"), (-0.3, "")):
        with torch.enable_grad():
            o, _ = attention(*ours, scale=scale)
            got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, ours, do), strict=True))
        name, error = worst(wanted(q, k, v, do, scale=scale), o=o.detach(), **got)
        expect(error <= 1, f"{name} is wrong where scale={scale:g}{why}", diagnosis="scale-zero" if why else
               "scale-negative", case=f"scale={scale:g}")  # fmt: skip


@exercise(
    "5.14",
    title="Your kernels, in autograd",
    minutes=40,
    difficulty="Stretch",
    hints=[
        "Three pieces: a launcher that returns dq, dk and dv; a torch.autograd.Function with forward and backward; "
        "attention, which fills in the scale and calls apply.",
        "Your kernels have heads, and no batch. q.flatten(0, 1) makes one dimension of both, and query head h still "
        "reads key head h // group. dO may have any strides, 0 too: .contiguous() first.",
        "forward returns (o, lse); then backward(ctx, do, dlse) gets a gradient for each, and returns five things: dq, "
        "dk, dv, None, None. delta = (o.float() * do.float()).sum(-1) - dlse.",
        "grouped_dkdv_kernel[(batch * kv_heads * n_blocks,)](q, k, v, do, lse, delta, dk, dv, *strides, ...) with "
        "strides = [s for x in (q, k, v, do, dk, dv) for s in x.stride()[:2]].",
    ],
)
def _(attention: Callable[..., Any]) -> Report:
    with host_mend.mended(attention, _in_small, _small_cases(), flash_attention_forward=_plain_forward):
        return _expect_autograd(attention)


def _plain_forward(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, **_: Any) -> Any:
    """The formula: no kernel is waited for."""
    o, lse = reference.attention(q, k, v, causal=causal, scale=scale)
    return o.to(q.dtype), lse.to(torch.float32)


def _in_small(attention: Callable[..., Any], case: Any) -> list[torch.Tensor]:
    (q, k, v, do, dlse), options = case
    ours = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, lse = attention(*ours, **options)
        return [o.detach(), lse.detach(), *torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), ours)]


def _small_cases() -> dict[str, Any]:
    """Of `host_mend.mended`: groups, batches, more keys or queries, strides."""
    cases = {}
    for batch, heads, kv_heads, M, N, options in (
        (1, 4, 2, 20, 33, {"causal": True, "scale": 0.3}), (2, 2, 1, 34, 13, {}), (2, 2, 2, 20, 20, {"scale": 0.5}),
        (1, 2, 1, 70, 40, {"causal": True}),
    ):  # fmt: skip
        shapes = ((heads, M, 16), (kv_heads, N, 16), (kv_heads, N, 16), (heads, M, 16), (heads, M))
        q, k, v, do, dlse = (x.cpu() for x in _inputs(*((batch, *shape) for shape in shapes)))
        q, do = q.transpose(1, 2).contiguous().transpose(1, 2), do.mT.contiguous().mT
        o, lse = reference.attention(q, k, v, **options)
        right = reference.attention_backward(do, q, k, v, grad_lse=dlse, **options)
        cases[f"{M} queries"] = ((q, k, v, do, dlse), options), [o, lse, *right]
    return cases


def _expect_autograd(attention: Callable[..., Any]) -> Report:
    case = "heads=2, seq_q=20, seq_k=20, head_dim=16"
    q, k, v = (x.requires_grad_() for x in _inputs(*[(1, 2, 20, 16)] * 3))
    with torch.enable_grad(), in_bounds(case) as traffic:
        result = attention(q, k, v, causal=True)
        pair = isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, torch.Tensor) for x in result)
        expect(pair, "return two tensors, (o, lse)", diagnosis="wrong-type", case=case)
        forward = traffic.loads if traffic else 0
        expect(result[0].requires_grad, "the output has no gradient: nothing leads back to q, k and v",
               diagnosis="no-gradient", case=case)  # fmt: skip
        try:
            torch.autograd.grad(result[0].sum(), (q, k, v), allow_unused=True)
        except RuntimeError as error:
            expect("Backward returned an" not in str(error), f"backward does not fit forward: {error}",
                   diagnosis="wrong-gradients", case=case)  # fmt: skip
            raise
    expect(traffic is None or traffic.loads > forward, "no Triton kernel reads anything in the backward pass",
           diagnosis="no-kernel", case=case)  # fmt: skip
    kept = [_kept(attention, N) for N in (64, 256)]
    said = f"right or not, {kept[1]} bytes are kept for 256 tokens and {kept[0]} for 64: that grows with the square"
    expect(kept[1] <= 4.5 * kept[0], said, diagnosis="memory-quadratic")
    with in_bounds(None):
        report = verify(attention, causal=True, gqa=True, grads=True, head_dims=(32,), max_seq=90)
    _expect_strides(attention)
    _expect_scales(attention)
    _expect_own_options(attention)
    _expect_gradient_of_lse(attention)
    return report
