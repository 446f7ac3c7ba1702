"""Checks of 4.11 to 4.13, the ladder to a kernel from an empty page, and of 4.10, that page."""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from flashlab import runtime
from flashlab.check import CheckFailed, Report, expect, expect_close, verify
from flashlab.check.lookup import Row
from flashlab.check.mistakes.mask_rule import PREFIX
from flashlab.exercises.kernel_rule import Keys, apart, empty, kernel_rule
from flashlab.exercises.tensor_rule import EMPTY_ROWS, normal
from flashlab.exercises.triton_answers import in_bounds
from flashlab.triton_tools.watch import watched as watched_memory

# ---- what is asked of a launcher, fn(q, k, v, causal=..., scale=...), beside its values -----------------------------


def expect_scales(fn: Callable[..., Any], head_dim: int = 40, value_dim: int = 0) -> None:
    """The default scale, at a head_dim that is no power of two where there may be one, a scale of 0, a negative one."""
    sizes = (2, 20, head_dim), (1, 30, head_dim), (1, 30, value_dim or head_dim)
    q, k, v = (normal(random.Random(i), 1, *size, dtype=torch.float16).to(runtime.device())
               for i, size in enumerate(sizes))  # fmt: skip

    def o(**scale: float) -> torch.Tensor:
        return fn(q, k, v, **scale)[0].float().cpu()

    def near(x: torch.Tensor, y: torch.Tensor) -> bool:
        return bool((x - y).abs().max() < 0.01)

    default, zero = o(), o(scale=0.0)
    if not near(default, o(scale=head_dim**-0.5)):
        raise CheckFailed(
            "right where a scale is given; without one o is not that of scale = 1 / sqrt(head_dim)"
            + (": it is that of 1 / sqrt(64), the padded head_dim" if near(default, o(scale=64**-0.5)) else ""),
            diagnosis="default-scale",
            case=f"head_dim={head_dim}, no scale given",
        )
    if not near(zero, v.float().cpu().mean(2, keepdim=True).expand_as(zero)):
        raise CheckFailed(
            "with scale=0 every key counts the same, and o is the mean of v"
            + ("; here o is that of the default scale: 0 is a scale, and not None" if near(zero, default) else ""),
            diagnosis="scale-zero",
            case=f"head_dim={head_dim}, scale=0",
        )
    p = torch.softmax(-0.2 * q.float() @ k.float().mT, 3)
    expect(near(o(scale=-0.2), (p @ v.float()).cpu()), "o is wrong where the scale is negative",
           diagnosis="scale-negative", case=f"head_dim={head_dim}, scale=-0.2")  # fmt: skip


def expect_tiles_skipped(fn: Callable[..., Any], mask: str = "the causal mask") -> None:
    """A causal mask has to save reads of K; a block whose rows see no key reads nothing of it."""

    def bytes_of_k(M: int, N: int, causal: bool) -> int:
        q, k = (normal(random.Random(0), 1, 1, seq, 16, dtype=torch.float16) for seq in (M, N))
        with watched_memory(q=q, k=k) as traffic:
            fn(q, k, torch.zeros_like(k), causal=causal, scale=0.25)
        return traffic.read_from["k"]

    whole, read = bytes_of_k(512, 512, False), bytes_of_k(512, 512, True)
    said = f"right, but with {mask} it reads {read} bytes of K of {whole} for 512 queries and keys: end the "
    said += "loop where the block's last row stops seeing keys"
    expect(read < 0.85 * whole, said, diagnosis="causal-tiles-not-skipped", case="seq_q=512, seq_k=512, causal")
    said = "right, but tiles are read that no row sees: of 257 queries only the last sees the one key, and more than "
    said += "one block reads it. The loop ends where the block's last row stops seeing keys"
    expect(bytes_of_k(257, 1, True) <= 32, said, diagnosis="one-tile-too-many", case="seq_q=257, seq_k=1, causal")


def expect_no_copies(fn: Callable[..., Any]) -> None:
    """Key heads are shared where they lie: a copy for each query head is right, and `group` times as large."""
    q, k, v = (normal(random.Random(0), 1, heads, 16, 16, dtype=torch.float16) for heads in (4, 2, 2))
    with watched_memory(k=k, v=v) as traffic:
        fn(q, k, v, scale=0.25)
    copied = [x for x in "kv" if not traffic.read_from[x]]
    said = f"right, but the kernel reads copies of {' and '.join(copied)}: key heads are shared by index, head // "
    said += "group"
    expect(not copied, said, diagnosis="key-heads-copied", case="heads=4, kv_heads=2")


def expect_small_heads(fn: Callable[..., Any]) -> None:
    """A head_dim below what the compiler takes for a product's inner side. The interpreter takes any."""
    q, k, v = (normal(random.Random(i), 1, 1, 20, 8, dtype=torch.float16).to(runtime.device()) for i in range(3))
    asked: Any = mock.patch.dict(interpreter_builder.codegen_fns, {"min_dot_size": lambda *_: (1, 1, 16)})
    try:
        with asked if runtime.INTERPRETED else contextlib.nullcontext():
            fn(q, k, v)
    except Exception as error:
        if "Input shapes should have" not in str(error):
            raise
        sentence = "with a head_dim of 8 the compiler refuses `tl.dot`: pad its tiles to 16 columns at least"
        raise CheckFailed(sentence, diagnosis="tile-too-small", case="head_dim=8") from error


_NARROW = "which products of an index and a stride have 32 bits?"


_FAR = {  # of q, k and v where it begins in a file, its shape and its strides
    "batches of k, heads of v, rows of q": (
        (0, (3, 3, 17, 16), (768, 256, 2**27, 1)), (2**12, (3, 3, 5, 16), (2**30, 80, 16, 1)),
        (2**13, (3, 3, 5, 16), (80, 2**30, 16, 1))),
    "keys of k and of v": (
        (2**13, (1, 1, 17, 16), (272, 272, 16, 1)), (0, (1, 1, 5, 16), (16, 16, 2**29, 1)),
        (2**12, (1, 1, 5, 16), (16, 16, 2**29, 1))),
}  # fmt: skip


def expect_64_bits(fn: Callable[..., Any]) -> None:
    """Rows, heads and batches that lie 2^31 elements apart; of the file behind them only what is touched is there."""
    for what, layouts in _FAR.items():
        _expect_far(fn, f"elements 2^31 apart: {what}", layouts)


def _expect_far(fn: Callable[..., Any], case: str, layouts: Sequence[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            far = torch.from_file(f"{folder}/far", shared=True, size=2**31 + 2**14, dtype=torch.float16)
        except (RuntimeError, OSError):
            return  # no room for it here
        q, k, v = (far.as_strided(shape, stride, at) for at, shape, stride in layouts)
        small = [normal(random.Random(i), *x.shape, dtype=torch.float16) for i, x in enumerate((q, k, v))]
        for x, values in zip((q, k, v), small, strict=True):
            x.copy_(values)
        want = fn(*small, causal=False, scale=0.3)[0]
        try:
            with in_bounds(case):
                o = fn(q, k, v, causal=False, scale=0.3)[0]
        except CheckFailed as failed:
            if "before the first" not in failed.sentence:
                raise
            sentence = f"{failed.sentence}. Here an offset is 2^31, which wraps around in 32 bits: {_NARROW}"
            raise CheckFailed(sentence, diagnosis="offset-overflow", case=case) from None
        expect_close(o, want, what="o", case=case, diagnosis="offset-overflow", because=_NARROW)


def _told_by(verified: Callable[..., Report]) -> Callable[[Any], tuple[str, str] | None]:
    """Where no change of the text gives the values, which tiles of another size may do: what is known of attention."""

    def told(launch: Any) -> tuple[str, str] | None:
        try:
            verified(getattr(launch, "answer", launch))
        except CheckFailed as failed:
            if failed.diagnosis not in ("wrong-value", "out-of-bounds"):
                return failed.diagnosis, failed.sentence
        return None

    return told


# ---- the ladder -----------------------------------------------------------------------------------------------------

Shape = tuple[int, int, int, int, int, int, int]  # batch, kv_heads, group, M, N, D, and of V


def _tensors(r: random.Random, shape: Shape, by_token: bool = False) -> tuple[Any, ...]:
    """q, k, v, o, lse and the strides: fp16, with room behind each row, so that a stride taken for another shows."""
    batch, kv_heads, group, M, N, D, DV = shape
    sizes = [(kv_heads * group, M, D), (kv_heads, N, D), (kv_heads, N, DV), (kv_heads * group, M, DV)]
    sizes = [(rows, heads, d) for heads, rows, d in sizes] if by_token else sizes
    q, k, v = (apart(0.5 * normal(r, batch, *size, dtype=torch.float16), gap)
               for size, gap in zip(sizes[:3], (8, 16, 24), strict=True))  # fmt: skip
    o, lse = empty(batch, *sizes[3], dtype=torch.float16), empty(batch, kv_heads * group, M)
    return q, k, v, o, lse, *(step for x in (q, k, v, o) for step in x.stride())


def _by_columns(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with q, k and v stored by columns."""
    read = [x.mT.contiguous().mT for x in given[:3]]
    return *read, *given[3:5], *(step for x in read for step in x.stride()), *given[17:]


def _in_small_steps(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """One query's arguments, so that what each tile but the first adds to column 0 of acc is lost in 16 bits."""
    q, k, v = (x.flatten(0, 2) for x in given[:3])  # one head
    q[:] = 0
    q[:, 0], k[:, 0], v[:, 0] = 1, -6 / (given[21] * math.log(2)), 2.85
    k[:64, 0], v[:64, 0] = 0, 30
    return given


_COLUMNS, _MANY = "q, k and v stored by columns", "one query, 1600 keys, of which the first 64 weigh most"
_TURNED, _LONG = (1, 2, 1, 10, 65, 16, 16), (1, 1, 1, 1, 1600, 16, 16)


def _and_two_more(of: Callable[..., tuple[Any, ...]], *mask: Any) -> dict[str, tuple[Any, ...]]:
    return {_COLUMNS: _by_columns(of(random.Random(75), _TURNED, *mask)),
            _MANY: _in_small_steps(of(random.Random(0), _LONG, *mask))}  # fmt: skip


def _of_heads(r: random.Random, shape: Shape) -> tuple[Any, ...]:
    """heads_kernel's arguments."""
    _, kv_heads, group, M, N, D, _ = shape
    return *_tensors(r, shape, by_token=True), 0.3 / math.log(2), M, N, kv_heads * group, group, D, 64, 64


def _of_a_prefix(r: random.Random, shape: Shape, prefix: int) -> tuple[Any, ...]:
    """prefix_kernel's arguments."""
    _, kv_heads, group, M, N, D, _ = shape
    return *_tensors(r, shape), 0.3 / math.log(2), M, N, prefix, kv_heads * group, group, D, 64, 64


def _of_two(r: random.Random, shape: Shape, causal: bool, scale: float = 0.3) -> tuple[Any, ...]:
    """two_sizes_kernel's arguments."""
    _, kv_heads, group, M, N, D, DV = shape
    wide = (max(16, 1 << (size - 1).bit_length()) for size in (D, DV))
    return *_tensors(r, shape), scale / math.log(2), M, N, kv_heads * group, group, causal, D, DV, *wide, 64, 64


def _some_shape(r: random.Random, D: int, DV: int) -> Shape:
    return r.randint(1, 2), r.randint(1, 2), r.randint(1, 3), r.randint(1, 80), r.randint(1, 80), D, DV


def _named(shape: Shape, **more: Any) -> str:
    batch, kv_heads, group, M, N, D, DV = shape
    said = f"batch={batch}, heads={kv_heads * group}, kv_heads={kv_heads}, seq_q={M}, seq_k={N}, head_dim={D}"
    return said + "".join(f", {name}={x}" for name, x in (({"value_dim": DV} if D != DV else {}) | more).items())


def _called(
    fn: Callable[..., Any], Q_ptr: Any, K_ptr: Any, V_ptr: Any, scale_log2: float, CAUSAL: bool | None = None,
    prefix: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    options = {"causal": CAUSAL, "prefix": prefix, "scale": scale_log2 * math.log(2)}
    return fn(Q_ptr, K_ptr, V_ptr, **{name: x for name, x in options.items() if x is not None})


def _programs(Q_ptr: Any, LSE_ptr: Any, BLOCK_M: int, **_: Any) -> int:
    return LSE_ptr.shape[0] * LSE_ptr.shape[1] * -(-LSE_ptr.shape[2] // BLOCK_M)


_HEAD = "query head h reads key head h // group"
ALIGNED = "the last query, M - 1, sees the last key, N - 1, so query i sees the keys j <= i + N - M"
_NOTES = {
    "head // group": _HEAD, "group": _HEAD, "N - M": ALIGNED, "offs_n < N": "keys from N on do not exist",
    "prefix": "every query sees the first `prefix` keys",
    **{f"stride_{x}{axis}": "each tensor has strides of its own" for x in "qkvo" for axis in "bhmnd"},
}  # fmt: skip
_LAUNCHED: dict[str, Any] = dict(
    call=_called, writes="O_ptr, LSE_ptr", returns="o, lse", programs=_programs, notes=_NOTES, tries=100
)
_KV_HEADS = [
    Row("wrong-kv-head", f"the head of {' and '.join(x)} is head % kv_heads: {_HEAD}",
        [(f"stride_{name}b + head // group", f"stride_{name}b + head % (heads // group)") for name in x])
    for x in ("kv", "k", "v")
]  # fmt: skip
_SHARED = [
    *_KV_HEADS,
    Row("group-for-kv-heads", "key head and `group` are mixed up: heads // (heads // group) divides head. " + _HEAD,
        [(f"stride_{name}b + head // group", f"stride_{name}b + head // (heads // group)") for name in "kv"]),
    Row("log2e-missing", "the scores are not multiplied by log2(e): exp(x) is exp2(x * log2(e))",
        [("* scale_log2", "* (scale_log2 * 0.6931471805599453)")]),
    Row("scale-ignored", "the scale that is given does not count: these are the values of 1 / sqrt(head_dim)",
        [("* scale_log2", "* (HEAD_DIM**-0.5 * 1.4426950408889634)")]),
    *(Row("strides-of-another", f"`{mine.upper()}_ptr` is read with {other.upper()}'s strides: each has its own",
          [(f"{mine.upper()}_ptr += batch * stride_{mine}b + head // group * stride_{mine}h",
            f"{mine.upper()}_ptr += batch * stride_{other}b + head // group * stride_{other}h"),
           (f"offs_n * stride_{mine}n", f"offs_n * stride_{other}n"), (f"* stride_{mine}d", f"* stride_{other}d")])
      for mine, other in ("kv", "vk")),
]  # fmt: skip
_TOP_LEFT = [
    Row("causal-loop-top-left", f"the loop's end fits M = N only: {ALIGNED}", [("BLOCK_M + N - M)", "BLOCK_M)")]),
    Row("causal-top-left", f"the mask is aligned at the first key: {ALIGNED}",  # whatever ends the loop
        [("BLOCK_M + N - M)", "BLOCK_M)"), ("offs_m + N - M)", "offs_m)")]),
]  # fmt: skip
_EMPTY = {EMPTY_ROWS: "NaN in a row that sees no key: where is -inf - (-inf), or 0 / 0?"}


def _by_token(heads_attention: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors whose heads come before their rows."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **_: Any) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            o, lse = heads_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale)
        return o.transpose(1, 2).contiguous(), lse

    return forward


def _verify_heads(heads_attention: Callable[..., Any]) -> Report:
    forward = _by_token(heads_attention)
    return verify(lambda q, k, v, *, scale=None: forward(q, k, v, scale=scale), gqa=True, max_seq=150)


def _all_heads(heads_attention: Callable[..., Any]) -> Report:
    forward, report = _by_token(heads_attention), _verify_heads(heads_attention)
    expect_scales(forward, 64)
    if runtime.INTERPRETED:
        expect_no_copies(lambda q, k, v, scale: heads_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale))
        expect_64_bits(forward)
    return report


_HEADS = (
    (1, 2, 1, 5, 20, 16, 16), (2, 2, 3, 20, 50, 32, 32), (1, 1, 2, 70, 20, 16, 16), (2, 2, 1, 5, 70, 16, 16),
    # What tells a stride from a length, or from the side of a tile:
    (2, 1, 2, 66, 67, 32, 32), (1, 2, 2, 72, 13, 16, 16), (2, 2, 1, 42, 9, 16, 16), (2, 1, 1, 41, 66, 16, 16),
    (1, 1, 1, 3, 5, 16, 16),  # one tile: of some thousand changes most differ here
)  # fmt: skip


@kernel_rule(
    "4.11",
    title="From one head to all of them", minutes=35,
    hints=[
        "First the grid: one program for each block of each head of each batch. Take the program's number apart, as "
        "the lecture's kernel does.",
        "Then move each pointer to its head, once: `Q_ptr += batch * stride_qb + head * stride_qh`. From there on the "
        "kernel is phase 3's. K and V go to head `head // group`.",
        "The strides come in the order of the layout: `*q.stride()` gives stride_qb, stride_qm, stride_qh, stride_qd. "
        "lse has another layout, [batch, heads, seq_q]: LSE_ptr + (batch * heads + head) * M + offs_m.",
    ],
    answer="heads_attention",
    **_LAUNCHED,
    inputs={_named(x): _of_heads(random.Random(i), x) for i, x in enumerate(_HEADS)}
    | _and_two_more(_of_heads),
    draw=lambda r: _of_heads(r, _some_shape(r, *(2 * [r.choice((16, 32))]))),
    rows=_SHARED,
    axes=("batches", "rows", "heads", "columns"),
    symptom=_told_by(_verify_heads),
    then=_all_heads,
)  # fmt: skip
@triton.jit
def heads_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qb, stride_qm, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd, stride_ob, stride_om, stride_oh, stride_od,
    scale_log2, M, N, heads, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64) // tl.cdiv(M, BLOCK_M)
    batch, head = batch_head // heads, batch_head % heads
    offs_m = (tl.program_id(0) % tl.cdiv(M, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    Q_ptr += batch * stride_qb + head * stride_qh
    K_ptr += batch * stride_kb + head // group * stride_kh
    V_ptr += batch * stride_vb + head // group * stride_vh
    O_ptr += batch * stride_ob + head * stride_oh
    q = tl.load(Q_ptr + offs_m * stride_qm + offs_d * stride_qd, mask=offs_m < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = (start_n + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        k = tl.load(K_ptr + offs_n * stride_kn + offs_d * stride_kd, mask=offs_n < N, other=0.0)
        s = tl.where((offs_n < N).T, tl.dot(q, k.T) * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, correction = tl.exp2(s - m_safe[:, None]), tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        v = tl.load(V_ptr + offs_n * stride_vn + offs_d * stride_vd, mask=offs_n < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
        m_i = m_new
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(O_ptr + offs_m * stride_om + offs_d * stride_od, o.to(O_ptr.dtype.element_ty), mask=offs_m < M)
    lse = ((m_i + tl.log2(l_i)) * 0.6931471805599453)[:, None]
    tl.store(LSE_ptr + batch_head * M + offs_m, lse, mask=offs_m < M)


def heads_attention(q, k, v, *, scale=None):
    """(o, lse): o like q, in shape and dtype; lse [batch, heads, seq_q], float32, natural logarithm.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], fp16, with any strides.
    scale: 1 / sqrt(head_dim) unless given.
    """
    # BEGIN SOLUTION
    batch, M, heads, head_dim = q.shape
    N, kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    o = torch.empty_like(q)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    heads_kernel[(triton.cdiv(M, 64) * batch * heads,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), scale * 1.4426950408889634,
        M, N, heads, heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return o, lse
    # END SOLUTION


def _by_prefix(prefix_attention: Callable[..., Any]) -> Callable[..., Any]:
    """Causal attention: a prefix of 0; and attention to all keys: a prefix of all."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            return prefix_attention(q, k, v, prefix=0 if causal else k.shape[2], scale=scale)

    return forward


def _verify_prefix(prefix_attention: Callable[..., Any]) -> Report:
    return verify(_by_prefix(prefix_attention), causal=True, gqa=True, max_seq=150)


def _with_a_prefix(prefix_attention: Callable[..., Any]) -> Report:
    forward, report = _by_prefix(prefix_attention), _verify_prefix(prefix_attention)
    expect_scales(forward, 64)
    if runtime.INTERPRETED:
        expect_no_copies(prefix_attention)
        expect_tiles_skipped(forward)
        expect_tiles_skipped(
            lambda q, k, v, causal, scale: prefix_attention(
                q, k, v, prefix=min(1, k.shape[2] - 1) if causal else k.shape[2], scale=scale
            ),
            mask="a prefix of 1",
        )
        expect_64_bits(forward)
    return report


_PREFIXES = (
    ((1, 2, 1, 20, 50, 16, 16), 40), ((1, 1, 1, 140, 140, 16, 16), 130), ((1, 2, 1, 90, 30, 16, 16), 0),
    ((1, 1, 2, 70, 40, 32, 32), 40), ((2, 2, 2, 20, 50, 16, 16), 0), ((1, 1, 1, 10, 90, 16, 16), 0),
    ((1, 1, 1, 3, 5, 16, 16), 4), ((2, 2, 3, 7, 20, 16, 16), 3),
)  # fmt: skip


@kernel_rule(
    "4.12",
    title="The mask, and where the loop ends", minutes=30,
    hints=[
        "Two changes in the kernel: which scores are -inf (4.3), and what stands in `range(0, ..., BLOCK_N)` (4.2).",
        "The last row of the block is (block + 1) * BLOCK_M - 1, and `end` is at most N, also where it is past M.",
        "end = tl.minimum(N, tl.maximum(prefix, (block + 1) * BLOCK_M + N - M)), and a row that sees no key needs "
        "m_safe, and a division by 1 where l_i is 0.",
    ],
    answer="prefix_attention",
    **_LAUNCHED,
    inputs={_named(x, prefix=n): _of_a_prefix(random.Random(i), x, n) for i, (x, n) in enumerate(_PREFIXES)}
    | _and_two_more(_of_a_prefix, 0),
    draw=lambda r: (lambda x: _of_a_prefix(r, x, r.randint(0, x[4])))(_some_shape(r, *(2 * [r.choice((16, 32))]))),
    keys=Keys(
        lambda M, N, prefix: _of_a_prefix(random.Random(0), (1, 1, 1, M, N, 64, 64), prefix),
        [{"M": m, "N": n, "prefix": p} for m, n, p in (
            (16, 16, 5), (20, 50, 40), (60, 30, 0), (66, 60, 20), (10, 65, 0), (3, 129, 0), (129, 129, 0),
            (100, 100, 70), (150, 90, 30), (80, 150, 100), (200, 210, 0))],
        "(j < prefix) | (j <= i + N - M)", PREFIX,
    ),
    nan=_EMPTY,
    rows=[*_SHARED, *_TOP_LEFT],
    symptom=_told_by(_verify_prefix),
    then=_with_a_prefix,
)  # fmt: skip
@triton.jit
def prefix_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om, stride_od,
    scale_log2, M, N, prefix, heads, group,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % tl.cdiv(M, BLOCK_M)
    batch_head = tl.program_id(0).to(tl.int64) // tl.cdiv(M, BLOCK_M)
    batch, head = batch_head // heads, batch_head % heads
    offs_m = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    Q_ptr += batch * stride_qb + head * stride_qh
    K_ptr += batch * stride_kb + head // group * stride_kh
    V_ptr += batch * stride_vb + head // group * stride_vh
    O_ptr += batch * stride_ob + head * stride_oh
    q = tl.load(Q_ptr + offs_m * stride_qm + offs_d * stride_qd, mask=offs_m < M, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = tl.minimum(N, tl.maximum(prefix, (block + 1) * BLOCK_M + N - M))
    for start_n in range(0, end, BLOCK_N):
        offs_n = (start_n + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        k = tl.load(K_ptr + offs_n * stride_kn + offs_d * stride_kd, mask=offs_n < N, other=0.0)
        seen = (offs_n.T < prefix) | ((offs_n.T <= offs_m + N - M) & (offs_n.T < N))
        s = tl.where(seen, tl.dot(q, k.T) * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, correction = tl.exp2(s - m_safe[:, None]), tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        v = tl.load(V_ptr + offs_n * stride_vn + offs_d * stride_vd, mask=offs_n < N, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
        m_i = m_new
    o = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(O_ptr + offs_m * stride_om + offs_d * stride_od, o.to(O_ptr.dtype.element_ty), mask=offs_m < M)
    lse = ((m_i + tl.log2(l_i)) * 0.6931471805599453)[:, None]
    tl.store(LSE_ptr + batch_head * M + offs_m, lse, mask=offs_m < M)


def prefix_attention(q, k, v, *, prefix=0, scale=None):
    """(o, lse): o like q; lse [batch, heads, seq_q], float32, natural logarithm. prefix: 0 to seq_k.

    q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], fp16, with any strides.
    """
    # BEGIN SOLUTION
    batch, heads, M, head_dim = q.shape
    kv_heads, N = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    o = torch.empty_like(q)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    prefix_kernel[(triton.cdiv(M, 64) * batch * heads,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), scale * 1.4426950408889634,
        M, N, prefix, heads, heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return o, lse
    # END SOLUTION


def _of_two_sizes(two_sizes_attention: Callable[..., Any]) -> Report:
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Any:
        with in_bounds(None, q=q, k=k, v=v):
            return two_sizes_attention(q, k, v, causal=causal, scale=scale)

    report = verify(forward, causal=True, gqa=True, head_dims=(64, 40), max_seq=150)
    expect_scales(forward, 40, 24)
    expect_small_heads(forward)
    if runtime.INTERPRETED:
        expect_no_copies(two_sizes_attention)
        expect_64_bits(forward)
    return report


_TWO_SIZES = (
    ((1, 2, 1, 5, 20, 24, 40), True),
    ((2, 2, 2, 20, 50, 40, 24), False),
    ((1, 1, 2, 70, 90, 24, 80), True),
    ((1, 2, 1, 40, 20, 96, 64), True),
    ((1, 1, 1, 3, 5, 24, 40), True),
    # What tells heads from a number, and the end of the loop from a side of a tile:
    ((2, 2, 3, 7, 20, 24, 40), False),
    ((1, 1, 1, 70, 150, 24, 16), True),
)


@kernel_rule(
    "4.13",
    title="Two head sizes, no power of two", minutes=30,
    hints=[
        "Tiles have BLOCK_D and BLOCK_V columns, the next powers of two, at least 16 each. Every load and store of "
        "such a tile needs a second condition.",
        "Q and K are loaded with offs_d < HEAD_DIM, V is loaded and O stored with offs_v < VALUE_DIM, all with "
        "other=0.0. acc has BLOCK_V columns.",
        "o = torch.empty((batch, heads, M, value_dim), ...) has strides of its own: pass them. The default scale is "
        "head_dim**-0.5, of the real head_dim.",
    ],
    answer="two_sizes_attention",
    **_LAUNCHED,
    inputs={_named(x, causal=causal): _of_two(random.Random(i), x, causal) for i, (x, causal) in enumerate(_TWO_SIZES)}
    | _and_two_more(_of_two, False),
    draw=lambda r: _of_two(r, _some_shape(r, r.choice((16, 24, 40)), r.choice((16, 24, 40))), r.random() < 0.5),
    nan=_EMPTY,
    rows=[
        *_SHARED, *_TOP_LEFT,
        Row("columns-cut", "the scores lack the columns of Q and K from 64 on: BLOCK_D is head_dim's next power of two",
            [("tl.arange(0, BLOCK_D)", "tl.arange(0, 64)")]),
    ],
    then=_of_two_sizes,
)  # fmt: skip
@triton.jit
def two_sizes_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, LSE_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om, stride_od,
    scale_log2, M, N, heads, group, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % tl.cdiv(M, BLOCK_M)
    batch_head = tl.program_id(0).to(tl.int64) // tl.cdiv(M, BLOCK_M)
    batch, head = batch_head // heads, batch_head % heads
    offs_m = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_d, offs_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    Q_ptr += batch * stride_qb + head * stride_qh
    K_ptr += batch * stride_kb + head // group * stride_kh
    V_ptr += batch * stride_vb + head // group * stride_vh
    O_ptr += batch * stride_ob + head * stride_oh
    q_real = (offs_m < M) & (offs_d < HEAD_DIM)
    q = tl.load(Q_ptr + offs_m * stride_qm + offs_d * stride_qd, mask=q_real, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, (block + 1) * BLOCK_M + N - M)
    for start_n in range(0, end, BLOCK_N):
        offs_n = (start_n + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        k_real = (offs_n < N) & (offs_d < HEAD_DIM)
        k = tl.load(K_ptr + offs_n * stride_kn + offs_d * stride_kd, mask=k_real, other=0.0)
        seen = offs_n.T < N
        if CAUSAL:
            seen = seen & (offs_n.T <= offs_m + N - M)
        s = tl.where(seen, tl.dot(q, k.T) * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, correction = tl.exp2(s - m_safe[:, None]), tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        v_real = (offs_n < N) & (offs_v < VALUE_DIM)
        v = tl.load(V_ptr + offs_n * stride_vn + offs_v * stride_vd, mask=v_real, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
        m_i = m_new
    o = (acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]).to(O_ptr.dtype.element_ty)
    tl.store(O_ptr + offs_m * stride_om + offs_v * stride_od, o, mask=(offs_m < M) & (offs_v < VALUE_DIM))
    lse = ((m_i + tl.log2(l_i)) * 0.6931471805599453)[:, None]
    tl.store(LSE_ptr + batch_head * M + offs_m, lse, mask=offs_m < M)


def two_sizes_attention(q, k, v, *, causal=False, scale=None):
    """(o, lse): o [batch, heads, seq_q, value_dim]; lse [batch, heads, seq_q], float32, natural logarithm.

    q: [batch, heads, seq_q, head_dim]; k: [batch, kv_heads, seq_k, head_dim];
    v: [batch, kv_heads, seq_k, value_dim]; fp16, with any strides.
    scale: 1 / sqrt(head_dim) unless given. causal: aligned at the end.
    """
    # BEGIN SOLUTION
    (batch, heads, M, head_dim), (_, kv_heads, N, value_dim) = q.shape, v.shape
    scale = head_dim**-0.5 if scale is None else scale
    o = torch.empty((batch, heads, M, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    two_sizes_kernel[(triton.cdiv(M, 64) * batch * heads,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), scale * 1.4426950408889634,
        M, N, heads, heads // kv_heads, causal, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return o, lse
    # END SOLUTION


# ---- 4.10: the kernel of 4.13 is the right text ---------------------------------------------------------------------


def _contiguous(fn: Callable[..., Any], **arguments: Any) -> Any:
    result = _called(fn, **arguments)
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor):
        expect(result[0].is_contiguous(), "o should be contiguous, however q lies in memory: empty_like(q) is as q is",
               diagnosis="not-contiguous")  # fmt: skip
    return result


def _verify(fn: Callable[..., Any]) -> Report:
    return verify(fn, causal=True, gqa=True, head_dims=(64, 40), max_seq=150, max_tile=128)


def _verified(my_attention: Callable[..., Any]) -> Report:
    report = _verify(my_attention)
    expect_scales(my_attention)
    expect_small_heads(my_attention)
    if runtime.INTERPRETED:
        expect_no_copies(my_attention)
        expect_tiles_skipped(my_attention)
        expect_64_bits(my_attention)
    return report


_EMPTY_PAGE = (
    ((1, 1, 2, 20, 50, 16, 16), False, 0.3), ((2, 2, 3, 5, 9, 16, 16), False, 0.3),
    ((1, 1, 2, 34, 9, 16, 16), True, 0.3), ((2, 1, 2, 34, 66, 24, 24), True, 0.2),
    ((1, 1, 1, 100, 70, 16, 16), True, 0.3), ((2, 2, 3, 20, 70, 40, 40), False, 0.1),
    ((1, 1, 1, 3, 5, 16, 16), True, 0.3),
)  # fmt: skip

kernel_rule(
    "4.10",
    title="From an empty page", minutes=60, difficulty="Stretch",
    hints=[
        "Write the launcher's call first: what must the kernel be told? Then the grid, one program for each block of "
        "each head of each batch, and phase 3's loop. Run the check early: it says which case fails first.",
        "Four strides per tensor. The pointer of a head is Q_ptr + batch * stride_qb + head * stride_qh; from there on "
        "it is phase 3.",
        "head_dim: BLOCK_D = max(16, triton.next_power_of_2(head_dim)), and in each load and store a second condition. "
        "Causal: the mask of 4.3, and range(0, end, BLOCK_N) with the end of 4.2.",
        "A row that sees no key: m_safe = tl.where(m_new == float('-inf'), 0.0, m_new), and a division by 1 where l_i "
        "is 0.",
    ],
    answer="my_attention",
    **{**_LAUNCHED, "call": _contiguous},
    inputs={_named(x, causal=causal): _of_two(random.Random(x[3] + x[4]), x, causal, scale)
            for x, causal, scale in _EMPTY_PAGE}
    | _and_two_more(_of_two, False),
    draw=lambda r: _of_two(r, _some_shape(r, *(2 * [r.choice((16, 24, 40))])), r.random() < 0.5, r.choice((0.1, 0.3))),
    nan=_EMPTY,
    rows=[*_SHARED, *_TOP_LEFT],
    symptom=_told_by(_verify),
    then=_verified,
)(two_sizes_kernel)  # fmt: skip


def my_attention(q, k, v, *, causal=False, scale=None):
    """(o, lse): o like q, contiguous; lse [batch, heads, seq_q], float32, natural logarithm.

    scale: 1 / sqrt(head_dim) unless given.
    """
    # BEGIN SOLUTION
    batch, heads, M, head_dim = q.shape
    kv_heads, N = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    o = torch.empty((batch, heads, M, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    BLOCK_D = max(16, triton.next_power_of_2(head_dim))
    two_sizes_kernel[(triton.cdiv(M, 64) * batch * heads,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), *o.stride(), scale * 1.4426950408889634,
        M, N, heads, heads // kv_heads, causal, head_dim, head_dim, BLOCK_D, BLOCK_D, BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return o, lse
    # END SOLUTION
