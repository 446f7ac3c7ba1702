"""Phase 4: FlashAttention's forward pass as a Triton kernel that a model can use.

The loop is phase 3's. Around it stands what real inputs ask for: batch and heads on the grid, key heads shared by
several query heads, any head_dim up to 256, any lengths and strides, masks, a soft-cap, three dtypes.

What is worth knowing before reading the kernel:

- Every mask is two numbers: query i sees the keys i + first to i + last (flashlab.attention.options). `tile_edges`
  turns them into four positions, and the loop walks from edge to edge: tiles cut by the left border, tiles that every
  row sees whole, tiles cut by the right border or by the end of K. Tiles that no row sees are never loaded, and the
  tiles in the middle, nearly all of them, have no mask at all.
- A `tl.constexpr` is decided before compiling: a kernel without a soft-cap has no line of it. What is left of the
  kernel for given constants is its text at a step of the ladder (flashlab.attention.ladder).

Sources: Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023); the Triton tutorial "Fused Attention"
for the two kinds of tiles; sliding windows: Beltagy et al., "Longformer" (2020); soft-caps: Gemma 2 (2024).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention.inputs import check_block, check_qkv, scale_of
from flashlab.attention.options import Window, band, softcap_of
from flashlab.attention.tiles import Tile, Work, cdiv, choose, tune

LOG2_E = 1.4426950408889634  # exp(x) == exp2(x * LOG2_E)
SMALLEST_SCALE = 2.0**-126  # float32's smallest normal stands for a scale of 0: 0 * -inf is NaN
MAX_HEAD_DIM = 256
MAX_ROWS = 2**30
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def tile_edges(
    start, stop, first, last, LENGTH,
    BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Where tiles change their kind, for rows start ... stop - 1; row i sees i + first ... i + last of LENGTH others.

    Four positions. Between the first two and between the last two a tile has to be masked, between the second and the
    third every row sees all of it. Tiles begin at the first and are BLOCK long: what no row sees is never loaded.
    """
    begin, end = 0, LENGTH
    whole_begin, whole_end = 0, LENGTH  # what all the rows see
    if HAS_LAST:
        end = tl.maximum(tl.minimum(LENGTH, stop + last), 0)
        whole_end = tl.minimum(LENGTH, start + last + 1)
    if HAS_FIRST:
        begin = tl.minimum(tl.maximum(start + first, 0), end)
        whole_begin = tl.minimum(tl.maximum(stop - 1 + first, 0), end)
        whole_begin = begin + tl.cdiv(whole_begin - begin, BLOCK) * BLOCK
    if SPLIT:
        whole_end = whole_begin + tl.maximum(whole_end - whole_begin, 0) // BLOCK * BLOCK
    else:
        whole_end = whole_begin
    return begin, whole_begin, whole_end, end


@triton.jit
def longest_first(blocks):
    """This program's block and head, if later blocks are more work: 16 heads at a time, the last block of each first.

    Short programs fill the gaps that the long ones leave. All heads at once would not do: what runs at the same time
    has to share K and V in the L2 cache.
    """
    program = tl.program_id(0)
    begin = program // (16 * blocks) * 16
    heads = tl.minimum(16, tl.num_programs(0) // blocks - begin)
    place = program % (16 * blocks)
    return blocks - 1 - place // heads, begin + place % heads


@triton.jit
def in_band(query, key, first, last, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr):
    """Whether each query sees each key, for positions of two shapes that broadcast."""
    seen = key == key
    if HAS_FIRST:
        seen = seen & (key >= query + first)
    if HAS_LAST:
        seen = seen & (key <= query + last)
    return seen


@triton.jit
def tile_ptrs(ptr, batch, head, rows, columns, stride_b, stride_h, stride_n, stride_d, ALIGN: tl.constexpr):
    """Pointers to rows and columns of one head; ALIGN divides where a row begins: so many come at once."""
    # int64: an offset may pass 2^31 elements.
    begin = batch * stride_b + head * stride_h + rows.to(tl.int64)[:, None] * stride_n
    return ptr + tl.multiple_of(begin, [ALIGN, ALIGN]) + columns.to(tl.int64)[None, :] * stride_d


@triton.jit
def tile_step(start, stride, ALIGN: tl.constexpr):
    """How many elements further a tile begins that starts with row `start`."""
    return tl.multiple_of(start * tl.cast(stride, tl.int64), ALIGN)


@triton.jit
def load_tile(ptrs, rows, columns, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EDGE: tl.constexpr):
    """[rows, BLOCK_D]; zeros past HEAD_DIM, and in an edge tile from row `end` on."""
    if EDGE and HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=(rows[:, None] < end) & (columns[None, :] < HEAD_DIM), other=0.0)
    elif EDGE:
        return tl.load(ptrs, mask=rows[:, None] < end, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(ptrs, mask=columns[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_tile(ptrs, x, rows, columns, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """x [rows, BLOCK_D] in the pointers' dtype, without the padding."""
    x = x.to(ptrs.dtype.element_ty)
    if HEAD_DIM < BLOCK_D:
        tl.store(ptrs, x, mask=(rows[:, None] < end) & (columns[None, :] < HEAD_DIM))
    else:
        tl.store(ptrs, x, mask=rows[:, None] < end)


@triton.jit
def soft_capped(s, tanh_scale):
    """tanh(s * tanh_scale / (2 log2(e))) from the exponential that the hardware has; right up to infinity."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * tanh_scale))


@triton.jit(do_not_specialize=["M", "N", "first", "last"])  # one kernel for all lengths
def flash_attention_kernel(
    Q_ptr,  # [batch, heads, M, HEAD_DIM]
    K_ptr,  # [batch, heads / group, N, HEAD_DIM]
    V_ptr,  # like K
    O_ptr,  # like Q
    LSE_ptr,  # [batch, heads, M], float32, contiguous
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    scale_log2,  # positive: scores times it are in units of log 2
    tanh_scale,  # of the soft-cap
    M, N, heads,
    group,  # query heads to each key head
    first, last,  # query i sees the keys i + first ... i + last
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D: the next power of two
    ALIGN: tl.constexpr,  # a number of elements that divides every stride but the last
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr, NEGATE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,  # K and V by tensor descriptors
):  # fmt: skip
    # region: programs
    # One program: BLOCK_M queries of one head. All are on grid x: up to 2^31 - 1; on y and z it is 65535.
    m_blocks = tl.cdiv(M, BLOCK_M)
    if HAS_LAST:
        block_m, batch_head = longest_first(m_blocks)
    else:
        block_m, batch_head = tl.program_id(0) % m_blocks, tl.program_id(0) // m_blocks
    batch_head = batch_head.to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    # endregion

    # region: tiles
    start_m = block_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    q_ptrs = tile_ptrs(Q_ptr, batch, head, offs_m, offs_d, stride_qb, stride_qh, stride_qm, stride_qd, ALIGN)
    k_ptrs = tile_ptrs(K_ptr, batch, kv_head, keys, offs_d, stride_kb, stride_kh, stride_kn, stride_kd, ALIGN)
    v_ptrs = tile_ptrs(V_ptr, batch, kv_head, keys, offs_d, stride_vb, stride_vh, stride_vn, stride_vd, ALIGN)
    q = load_tile(q_ptrs, offs_m, offs_d, M, HEAD_DIM, BLOCK_D, True)
    if NEGATE:
        q = -q  # the scale is negative: the maximum of the scores is found before they are scaled
    if TMA:  # boxes of K and V, which the chip's copy engine fetches: no thread computes their addresses
        k_box = tl.make_tensor_descriptor(
            K_ptr + batch * stride_kb + kv_head * stride_kh, [N, HEAD_DIM], [stride_kn, 1], [BLOCK_N, BLOCK_D]
        )
        v_box = tl.make_tensor_descriptor(
            V_ptr + batch * stride_vb + kv_head * stride_vh, [N, HEAD_DIM], [stride_vn, 1], [BLOCK_N, BLOCK_D]
        )
    # endregion

    # region: loop
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score of each row so far
    l_i = tl.zeros([BLOCK_M], tl.float32)  # the sum of exp2(score - m_i) so far
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # the sum of exp2(score - m_i) * v so far
    stop_m = tl.minimum(start_m + BLOCK_M, M)  # rows that do not exist must not move the edges
    edges = tile_edges(start_m, stop_m, first, last, N, BLOCK_N, HAS_FIRST, HAS_LAST, SPLIT)
    for part in tl.static_range(3):  # the left edge, the tiles that are seen whole, the right edge
        for start_n in tl.range(edges[part], edges[part + 1], BLOCK_N):
            # endregion
            # region: tile
            offs_n = start_n + keys
            if TMA and part == 1:
                k = k_box.load([start_n, 0])
            else:
                k_tile = k_ptrs + tile_step(start_n, stride_kn, ALIGN)
                k = load_tile(k_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if SOFTCAP:
                s = soft_capped(s, tanh_scale)
            if part != 1:
                seen = in_band(offs_m[:, None], offs_n[None, :], first, last, HAS_FIRST, HAS_LAST)
                s = tl.where(seen & (offs_n[None, :] < edges[3]), s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale_log2)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no score yet: -inf - (-inf) is NaN
            p = tl.exp2(s * scale_log2 - m_safe[:, None])  # scaled here: one multiply-add a score
            correction = tl.exp2(m_i - m_safe)  # at most 1: what was added so far, for the new maximum
            l_i = l_i * correction + tl.sum(p, axis=1)
            acc = acc * correction[:, None]
            if TMA and part == 1:
                v = v_box.load([start_n, 0])
            else:
                v_tile = v_ptrs + tile_step(start_n, stride_vn, ALIGN)
                v = load_tile(v_tile, offs_n, offs_d, edges[3], HEAD_DIM, BLOCK_D, part != 1)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # acc + p @ v; p in v's dtype
            m_i = m_new
            # endregion

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # l_i is 0 in a row that sees no key: o is 0
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # times ln 2: a natural logarithm
    o_ptrs = tile_ptrs(O_ptr, batch, head, offs_m, offs_d, stride_ob, stride_oh, stride_om, stride_od, ALIGN)
    store_tile(o_ptrs, acc, offs_m, offs_d, M, HEAD_DIM, BLOCK_D)
    tl.store(LSE_ptr + batch_head * M + offs_m, lse, mask=offs_m < M)


def flash_attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None, allow_tf32: bool = False, split: bool = True,
    tma: bool = False, tile: Tile | None = None, tune_tile: bool = False, out_dtype: torch.dtype | None = None,
    kernel=flash_attention_kernel,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v in one kernel launch.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], heads a multiple of kv_heads. All
            float16, all bfloat16 or all float32, with any strides; head_dim up to 256; any lengths, 0 too.
        causal, window: which keys a query sees, aligned at the end; see `flashlab.attention.options`.
        scale: 1 / sqrt(head_dim) unless given. softcap: scores become softcap * tanh(score / softcap).
        allow_tf32: multiply float32 inputs in TF32, with 10 bits of mantissa instead of 23; never without asking.
            Otherwise as exactly as float32, or nearly: see `precision_of`.
        split: False masks every tile, also those that all rows see whole: to measure what it costs.
        tma: load the tiles that all rows see by tensor descriptors, with the copy engine of Hopper and later chips.
            K and V need a last stride of 1, and rows that begin on 16 bytes.
        tile: instead of the recorded choice (`flashlab.attention.tiles`).
        tune_tile: measure the tiles of the search space first, on these inputs; this machine remembers the fastest.
        out_dtype: of o; None is that of q. float32 for a part that is merged with others.
        kernel: another kernel with the same parameters.
    Returns:
        o: like q, in its dtype and its order in memory. lse: [batch, heads, seq_q], float32: log(sum(exp(scores))).
        A row that sees no key gives o = 0 and lse = -inf. A key that no query sees is never looked at.
    Raises:
        TypeError, ValueError: see `check_inputs`, and `flashlab.attention.options` for what is asked for; a tile whose
            sides are no powers of two of at least 16. RuntimeError: tune_tile where kernels are interpreted.
    """
    check_inputs(q, k, v, no_grad=True)
    o = torch.empty_like(q, dtype=out_dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return o, lse  # a grid of 0 programs cannot be launched

    scores = positive_scale(score_arguments(q, k, causal, scale, window, softcap, allow_tf32))
    scores |= {"SPLIT": split, "TMA": tma}
    if tma:
        check_boxes(k=k, v=v)
    masked = scores["HAS_FIRST"] or scores["HAS_LAST"]
    work = Work("forward", q.shape[3], q.dtype, masked, q.shape[2], k.shape[2], q.shape[0] * q.shape[1])

    def launch(tile: Tile) -> None:
        with current_device(q):
            grid = (cdiv(q.shape[2], tile.BLOCK_M) * q.shape[0] * q.shape[1],)
            kernel[grid](q, k, v, o, lse, **launch_arguments(tile, k=k, q=q, v=v, o=o), **scores)

    launch(tile_for(work, tile, q.device, launch if tune_tile else None))
    return o, lse


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, no_grad: bool = False) -> None:
    """Raise unless the Triton kernels of phases 4 and 5 take q, k and v.

    Raises:
        TypeError, ValueError: see `check_qkv`; a head_dim over 256; too many rows.
    """
    check_qkv(q, k, v, dtypes=DTYPES, same_v=True, on_gpu=not runtime.INTERPRETED, no_grad=no_grad)
    if q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {q.shape[3]}; a tile of this kernel has room for {MAX_HEAD_DIM} columns at most")
    for name, x in (("q", q), ("k", k)):
        batch, heads, rows, _ = x.shape
        if rows > MAX_ROWS:
            raise ValueError(f"{name} has {rows} rows; their numbers have to fit 32 bits: {MAX_ROWS} at most")
        if batch * heads * cdiv(rows, 16) >= 2**31:  # a block has at least 16 rows
            raise ValueError(
                f"{name} has {batch * heads} heads of {rows} rows; a grid has 2^31 - 1 programs: split the batch"
            )


def score_arguments(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, window: Window, softcap: float | None,
    allow_tf32: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What all the kernels are told about the scores and their mask, by parameter name."""
    factor, cap = scale_of(scale, q.shape[3]), softcap_of(softcap)
    first, last = band(q.shape[2], k.shape[2], causal, window)
    return {
        "scale_log2": LOG2_E * (factor if cap is None else cap),
        "tanh_scale": 0.0 if cap is None else 2 * LOG2_E * factor / cap,
        "first": first or 0,
        "last": last or 0,
        "HAS_FIRST": first is not None,
        "HAS_LAST": last is not None,
        "SOFTCAP": cap is not None,
        "PRECISION": precision_of(q.dtype, q.shape[3], allow_tf32),
    }


def precision_of(dtype: torch.dtype, head_dim: int, allow_tf32: bool) -> str:
    """How tl.dot multiplies; it matters for float32 only.

    "tf32x3": each number is split into a TF32 number and the TF32 number that is left of it, and three of the four
    products are added: nearly as exact as float32, on the tensor cores (Ootomo and Yokota 2022, arXiv:2203.03341).
    "ieee": FMA units. Rows of more than 128 numbers, split in two, do not fit into registers.
    """
    if allow_tf32 and dtype == torch.float32:
        return "tf32"
    return "tf32x3" if dtype == torch.float32 and head_dim <= 128 else "ieee"


def check_boxes(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless a tensor descriptor can describe [rows, head_dim] of each head; by name.

    Also gives Triton the means to allocate what descriptors that are made on the GPU are kept in.
    """
    for name, x in tensors.items():
        steps = [step * x.element_size() for step, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
        if x.numel() and (x.stride(3) != 1 or x.data_ptr() % 16 or any(step % 16 for step in steps)):
            raise ValueError(
                f"{name} has strides {tuple(x.stride())}; a tensor descriptor needs a last stride of 1 and rows that "
                f"begin on 16 bytes: pass {name}.contiguous() with a head_dim of a multiple of 8, or tma=False"
            )
        if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 9:
            raise ValueError(
                f"{name} is on a GPU without a copy engine for tensors (compute capability 9.0): tma=False"
            )
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=runtime.device()))


def positive_scale(scores: dict[str, Any]) -> dict[str, Any]:
    """The forward kernel's scale is positive, and never 0; it negates q where the scale is negative."""
    signed = scores["scale_log2"]
    return scores | {"scale_log2": max(abs(signed), SMALLEST_SCALE), "NEGATE": signed < 0}


def launch_arguments(tile: Tile, *, q: torch.Tensor, k: torch.Tensor, **others: torch.Tensor) -> dict[str, Any]:
    """What all the kernels are told about sizes, strides and tiles, by parameter name.

    others: the launch's other tensors of four dimensions by name; a name that ends in k or v has its rows along N.
    """
    given = {"q": q, "k": k, **others}
    layout = tuple((name, x.shape, x.stride()) for name, x in given.items())
    return dict(_launch_arguments(tile, q.element_size(), layout))


@functools.lru_cache(maxsize=1024)  # a model asks for the same ones in every layer and step
def _launch_arguments(
    tile: Tile, itemsize: int, layout: tuple[tuple[str, torch.Size, tuple[int, ...]], ...]
) -> dict[str, Any]:
    """layout: each tensor's name, shape and strides; q's and k's come first."""
    strides = {
        f"stride_{name}{axis}": step
        for name, _, steps in layout
        for axis, step in zip("bhnd" if name[-1] in "kv" else "bhmd", steps, strict=True)
    }
    (_, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = (shape for _, shape, _ in layout[:2])
    return strides | tile._asdict() | {
        "ALIGN": alignment(itemsize, *((shape, steps) for _, shape, steps in layout)),
        "M": seq_q, "N": seq_k, "heads": heads, "group": heads // kv_heads,
        "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
    }  # fmt: skip


def alignment(itemsize: int, *layouts: tuple[Sequence[int], Sequence[int]]) -> int:
    """Elements in 16 bytes, the most that a thread loads at once, if every row begins at a multiple of them; else 1.

    layouts: the shape and the strides of each tensor. Triton looks itself whether a stride is a multiple of 16, which
    that of a head_dim of 40 or 72 is not.
    """
    elements = 16 // itemsize
    apart = [step for shape, steps in layouts for step, size in zip(steps[:3], shape, strict=False) if size > 1]
    return 1 if any(step % elements for step in apart) else elements


def tile_for(
    work: Work, given: Tile | None, device: torch.device, launch: Callable[[Tile], None] | None = None
) -> Tile:
    """The caller's tile, or the one that is found with `launch` to be the fastest, or the recorded choice."""
    if given is not None:
        check_block("BLOCK_M", given.BLOCK_M, power_of_two=True)
        check_block("BLOCK_N", given.BLOCK_N, power_of_two=True)
        return given
    return choose(work, device) if launch is None else tune(work, device, launch)


def current_device(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, and on PyTorch's current stream there: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def compile_arguments(
    dtype: torch.dtype, head_dim: int, tile: Tile, *, seq: int = 4096, heads: int = 16, causal: bool = False,
    window: Window = None, softcap: float | None = None, scale: float | None = None, allow_tf32: bool = False,
    tma: bool = False,
) -> dict[str, object]:  # fmt: skip
    """What a compile report needs for a launch on contiguous tensors [1, heads, seq, head_dim]."""
    x = torch.empty((1, heads, seq, head_dim), dtype=dtype, device="meta")
    scores = positive_scale(score_arguments(x, x, causal, scale, window, softcap, allow_tf32))
    scores |= {"SPLIT": True, "TMA": tma}
    pointers = {f"{name}_ptr": dtype for name in "QKVO"} | {"LSE_ptr": torch.float32}
    return pointers | launch_arguments(tile, q=x, k=x, v=x, o=x) | scores


def hbm_bytes(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int, itemsize: int, BLOCK_M: int
) -> tuple[int, int]:
    """Bytes (read, written) by one launch without a mask: Q once, K and V once for each block of queries of each head;
    O and lse once. The caches of a GPU spare HBM much of the second reading."""
    rows = batch * heads * seq_q
    tiles_of_q = batch * heads * cdiv(seq_q, BLOCK_M)
    return (rows + tiles_of_q * 2 * seq_k) * head_dim * itemsize, rows * (head_dim * itemsize + 4)
