"""Phase 12: attention of a few queries per sequence over a long cache, whole or in pages, as Triton kernels.

A step of a language model asks one query per sequence. Then there is nothing to reuse but what the heads of a group
share, and the time is that of reading the cache once. So:

- One program owns a sequence, a key head and a split of its keys. The query heads of the group, and all the queries of
  the sequence, are the rows of its tile: each key is read once for all of them.
- Few sequences leave most of the chip idle. Their keys are split, `splits_for` says into how many parts, and the parts
  are merged: by a second kernel, or by the program of a group that arrives last.
- The cache lies in pages of any size. A table says which page holds which keys of a sequence, so that no memory is kept
  for keys that may come, and sequences may share pages. A contiguous cache is the same kernel without a table.
- How long each sequence is stands in a tensor on the device. The host never reads it: the launch depends on shapes
  alone, and a CUDA graph of it replays whatever the lengths have become.

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023), for the splits; Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023), for the pages; Ainslie et al., "GQA" (2023),
for the groups.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab.attention.inputs import check_no_gradient
from flashlab.attention.tiles import Tile, cdiv
from flashlab.attention.triton_forward import alignment, current_device, score_arguments, soft_capped

MAX_SPLITS = 256
SMS = 132  # of the chip that an interpreted launch is planned for, an H200
# In units of one tile's time, which is 32 KiB at a multiprocessor's share of an H200's bandwidth: 0.9 us. Counted: a
# program waits some 2 us for the length, the table and the first keys, one after the other; a second kernel costs as
# much. Of eight shapes measured on an H200, with up to 22 tiles and 5 numbers of splits each, what follows from them
# was the fastest or within 3 % of it at six; 7 and 16 % slower at one sequence of 1024 and 4096 keys, 32/4 heads.
START_TILES = 2.0
MERGE_TILES = 2.0
PROGRAMS_AT_ONCE = 2  # one program alone does not keep its multiprocessor's share of the memory busy


@triton.jit
def page_of(TABLE_ptr, batch, start, keys, end, PAGE: tl.constexpr, PAGED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each key of a tile, of those before `end`; one for all where a page holds whole tiles."""
    if not PAGED:
        return batch
    elif PAGE % BLOCK_N == 0:
        return tl.load(TABLE_ptr + start // PAGE, mask=start < end, other=0).to(tl.int64)
    else:
        return tl.load(TABLE_ptr + (start + keys) // PAGE, mask=start + keys < end, other=0).to(tl.int64)


@triton.jit
def merge_row(
    PART_O_ptr, PART_LSE_ptr, O_ptr, LSE_ptr,
    row, heads, queries, rows, splits, stride_ob, stride_oh, stride_om, stride_od,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Store o and lse of one row of [batch, heads, queries], from its parts, which are `rows` rows apart."""
    row = tl.cast(row, tl.int64)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        part = row + (start + s) * tl.cast(rows, tl.int64)
        lse = tl.load(PART_LSE_ptr + part, mask=start + s < splits, other=float("-inf"))
        some = lse != float("-inf")  # of a part without keys no o was written
        o = tl.load(
            PART_O_ptr + part[:, None] * HEAD_DIM + d[None, :],
            mask=some[:, None] & (d[None, :] < HEAD_DIM), other=0.0,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: -inf - (-inf) is NaN
        weight = tl.exp2((lse - m_safe) * 1.4426950408889634)
        correction = tl.exp2((m_i - m_safe) * 1.4426950408889634)
        l_i = l_i * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(o * weight[:, None], 0)
        m_i = m_new
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)
    head_row, query = row // queries, row % queries
    o_ptrs = O_ptr + head_row // heads * stride_ob + head_row % heads * stride_oh + query * stride_om + d * stride_od
    tl.store(o_ptrs, acc.to(O_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    one = tl.arange(0, 1)
    tl.store(LSE_ptr + row + one, m_i + tl.log2(l_i) * 0.6931471805599453)


@triton.jit(do_not_specialize=["queries", "new", "capacity", "left", "splits", "rows"])  # one kernel for all lengths
def decode_kernel(
    Q_ptr,  # [batch, heads, queries, HEAD_DIM]
    K_ptr,  # [pages, kv_heads, PAGE, HEAD_DIM]; [batch, kv_heads, capacity, HEAD_DIM] without a table
    V_ptr,  # like K
    TABLE_ptr,  # [batch, capacity / PAGE], integers
    LENGTHS_ptr,  # [batch], integers: so many keys a sequence has, and `new` more
    PART_O_ptr, PART_LSE_ptr,  # [splits, batch, heads, queries, HEAD_DIM] and the same without HEAD_DIM, float32
    O_ptr, LSE_ptr,  # like Q; [batch, heads, queries], float32
    COUNTERS_ptr,  # of each group of rows, int32, 0: how many of its programs have arrived
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_tb, stride_lengths,
    scale_log2,  # scores times it are in units of log 2
    tanh_scale,  # of the soft-cap
    kv_heads, group, queries, new,
    capacity,  # keys that a sequence has room for
    left,  # a query sees so many keys before its own
    splits,
    rows,  # batch * heads * queries
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
    PAGE: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there is more than one split
    FUSED: tl.constexpr,  # the program that arrives last merges
):  # fmt: skip
    # region: programs
    # One program: a sequence, a key head, a block of the rows that read it (of `group` heads, `queries` rows each).
    row_blocks = tl.cdiv(group * queries, BLOCK_M)
    program, split = tl.program_id(0), tl.program_id(1)
    block, pair = program % row_blocks, program // row_blocks
    kv_head, batch = (pair % kv_heads).to(tl.int64), (pair // kv_heads).to(tl.int64)
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = r < group * queries
    head, query = kv_head * group + r // queries, r % queries
    d, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    begin_q = tl.multiple_of(batch * stride_qb + head * stride_qh + query * stride_qm, ALIGN)
    q_mask = there[:, None] & (d[None, :] < HEAD_DIM)
    q = tl.load(Q_ptr + begin_q[:, None] + d[None, :] * stride_qd, mask=q_mask, other=0.0)
    # endregion

    # region: shares
    # Whole tiles, in equal shares; a share may be empty. A length beyond the table would read another sequence's row.
    length = tl.minimum(tl.load(LENGTHS_ptr + batch * stride_lengths).to(tl.int32) + new, capacity)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - queries - left, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(length - begin, 0), BLOCK_N), splits) * BLOCK_N
    first = begin + split * share
    last = tl.minimum(first + share, length)
    position = length - queries + query  # the last query stands beside the last key
    # endregion

    # region: loop
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = TABLE_ptr + batch * stride_tb
    page = page_of(table_ptr, batch, first, keys, last, PAGE, PAGED, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        key = start + keys
        slot = (key % PAGE if PAGED else key).to(tl.int64)
        kv_mask = (key < length)[:, None] & (d[None, :] < HEAD_DIM)
        # int64: page * stride passes 2^31, and so may slot * stride.
        begin_k = tl.multiple_of(page * stride_kb + kv_head * stride_kh + slot * stride_kn, ALIGN)
        begin_v = tl.multiple_of(page * stride_vb + kv_head * stride_vh + slot * stride_vn, ALIGN)
        k = tl.load(K_ptr + begin_k[:, None] + d[None, :] * stride_kd, mask=kv_mask, other=0.0)
        v = tl.load(V_ptr + begin_v[:, None] + d[None, :] * stride_vd, mask=kv_mask, other=0.0)
        # One tile ahead: Triton keeps more than one tile of K and V in flight only where their addresses are known.
        page = page_of(table_ptr, batch, start + BLOCK_N, keys, last, PAGE, PAGED, BLOCK_N)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if SOFTCAP:
            s = soft_capped(s, tanh_scale)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] >= position[:, None] - left)
        s = tl.where(seen, s * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        correction = tl.exp2(m_i - m_safe)
        l_i = l_i * correction + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
        m_i = m_new
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # times ln 2: a natural logarithm
    # endregion

    # region: results
    row = (batch * kv_heads * group + head) * queries + query
    if SPLIT:
        part = split * tl.cast(rows, tl.int64) + row
        some = there & (l_i != 0.0)  # o of a part without keys is neither written nor read
        tl.store(PART_O_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=some[:, None] & (d[None, :] < HEAD_DIM))
        tl.store(PART_LSE_ptr + part, lse, mask=there)
    else:
        begin_o = tl.multiple_of(batch * stride_ob + head * stride_oh + query * stride_om, ALIGN)
        tl.store(O_ptr + begin_o[:, None] + d[None, :] * stride_od, acc.to(O_ptr.dtype.element_ty), mask=q_mask)
        tl.store(LSE_ptr + row, lse, mask=there)
    # endregion

    # region: last to arrive
    if FUSED:
        tl.debug_barrier()  # every thread has stored its part before one of them counts
        # Release: who sees the count sees the parts. Acquire: the last one sees those of all.
        arrived = tl.atomic_add(COUNTERS_ptr + program, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            first_row = (batch * kv_heads + kv_head) * group * queries + block * BLOCK_M
            for i in tl.range(0, tl.minimum(group * queries - block * BLOCK_M, BLOCK_M)):
                merge_row(
                    PART_O_ptr, PART_LSE_ptr, O_ptr, LSE_ptr, first_row + i, kv_heads * group, queries, rows, splits,
                    stride_ob, stride_oh, stride_om, stride_od, HEAD_DIM, BLOCK_D, BLOCK_S,
                )  # fmt: skip
    # endregion


@triton.jit(do_not_specialize=["queries", "rows", "splits"])
def decode_merge_kernel(
    PART_O_ptr, PART_LSE_ptr,  # [splits, batch, heads, queries, HEAD_DIM]; the same without HEAD_DIM; float32
    O_ptr, LSE_ptr,  # [batch, heads, queries, HEAD_DIM]; [batch, heads, queries], float32
    stride_ob, stride_oh, stride_om, stride_od,
    heads, queries, rows, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    merge_row(
        PART_O_ptr, PART_LSE_ptr, O_ptr, LSE_ptr, tl.program_id(0), heads, queries, rows, splits,
        stride_ob, stride_oh, stride_om, stride_od, HEAD_DIM, BLOCK_D, BLOCK_S,
    )  # fmt: skip


@triton.jit(do_not_specialize=["new", "capacity"])
def append_kernel(
    K_ptr, V_ptr, TABLE_ptr, LENGTHS_ptr,  # as for decode_kernel
    NEW_K_ptr, NEW_V_ptr,  # [batch, kv_heads, new, HEAD_DIM]
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_nkb, stride_nkh, stride_nkn, stride_nkd,
    stride_nvb, stride_nvh, stride_nvn, stride_nvd,
    stride_tb, stride_lengths,
    kv_heads, new, capacity,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(new, BLOCK_N)
    pair = tl.program_id(0) // blocks
    kv_head, batch = (pair % kv_heads).to(tl.int64), (pair // kv_heads).to(tl.int64)
    n = (tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    key = tl.load(LENGTHS_ptr + batch * stride_lengths).to(tl.int64) + n
    there = (n < new) & (key >= 0) & (key < capacity)
    page, slot = batch, key
    if PAGED:
        page = tl.load(TABLE_ptr + batch * stride_tb + key // PAGE, mask=there, other=0).to(tl.int64)
        slot = key % PAGE
    mask = there[:, None] & (d[None, :] < HEAD_DIM)
    from_k = batch * stride_nkb + kv_head * stride_nkh + n * stride_nkn
    from_v = batch * stride_nvb + kv_head * stride_nvh + n * stride_nvn
    to_k = page * stride_kb + kv_head * stride_kh + slot * stride_kn
    to_v = page * stride_vb + kv_head * stride_vh + slot * stride_vn
    k = tl.load(NEW_K_ptr + from_k[:, None] + d[None, :] * stride_nkd, mask=mask)
    v = tl.load(NEW_V_ptr + from_v[:, None] + d[None, :] * stride_nvd, mask=mask)
    tl.store(K_ptr + to_k[:, None] + d[None, :] * stride_kd, k, mask=mask)
    tl.store(V_ptr + to_v[:, None] + d[None, :] * stride_vd, v, mask=mask)


@functools.lru_cache(maxsize=1024)  # a model asks for the same ones in every layer and step
def splits_for(pairs: int, keys: int, rows: int, block_n: int, itemsize: int, sms: int = SMS) -> int:
    """Into how many parts to split each sequence's keys: the number with the least time, counted in tiles.

    A multiprocessor gets p = ceil(pairs * splits / sms) programs, and they share its part of the memory's bandwidth.
    So they take p * (tiles of a split + START_TILES), and as long as PROGRAMS_AT_ONCE of them where they are fewer,
    because one alone waits for its loads. More than one split costs a merge: MERGE_TILES, and the parts, which are
    written and read, float32. Of equal numbers the smallest.

    Args:
        pairs: programs without a split: sequences times key heads times blocks of rows.
        keys: the most that a sequence has room for: what the shapes say, because lengths are on the device.
        rows: of each program. block_n: keys of a tile. itemsize: bytes of one number in the cache. sms: of the GPU.
    """
    tiles = max(1, cdiv(keys, block_n))
    part = 2 * pairs * rows * 4 / (2 * block_n * itemsize) / sms  # a row of a part has the columns of a key

    def time(splits: int) -> float:
        programs = max(cdiv(pairs * splits, sms), PROGRAMS_AT_ONCE)
        merge = MERGE_TILES + splits * part if splits > 1 else 0.0
        return programs * (cdiv(tiles, splits) + START_TILES) + merge

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=time)


def tile_of(rows: int, head_dim: int, dtype: torch.dtype, pairs: int = 1, sms: int = SMS) -> Tile:
    """BLOCK_M holds the rows of a group, up to 64. K and V of a tile are 16 KiB each, and two tiles are in flight: 64
    KiB, which fits any GPU from capability 8.0 on; an H200's 4.8 TB/s * 700 ns want 25 KB per multiprocessor. Three
    stages leave room for two programs per multiprocessor; where there are more, tiles of half the keys let four work
    at once, and the last ones wait less: 128 us for 155 at 64 sequences of 2048 keys, 32/8 heads, on an H200."""
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_n = 2**14 // (dtype.itemsize * max(16, triton.next_power_of_2(head_dim)))
    if pairs * cdiv(rows, block_m) > 2 * sms:
        block_n //= 2
    return Tile(block_m, min(128, max(16, block_n)), 4, 3)


def decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None = None, *, scale: float | None = None, left: int | None = None,
    softcap: float | None = None, new: int = 0, splits: int | None = None, fused: bool = False,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over a cache, causal at the end, of inputs that `flashlab.attention.cache_door` has checked.

    Args:
        q: [batch, heads, queries, head_dim]; head_dim up to 256, float16, bfloat16 or float32.
        k_cache, v_cache: [pages, kv_heads, page, head_dim]; without a table [batch, kv_heads, keys, head_dim].
        lengths: [batch], int32 or int64; a sequence has lengths + new keys. page_table: [batch, width], likewise.
        left: a query sees so many keys before its own position; None is no bound.
        splits: instead of those of `splits_for`. fused: merge in the same launch. tile: instead of `tile_of`.
    Returns:
        o: like q. lse: [batch, heads, queries], float32. A row that sees no key gives 0 and -inf.
    """
    check_no_gradient(q=q, k_cache=k_cache, v_cache=v_cache)
    batch, heads, queries, head_dim = q.shape
    o = torch.empty_like(q)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if q.numel() == 0:
        return o, lse
    kv_heads, page = k_cache.shape[1:3]
    capacity = page if page_table is None else page * page_table.shape[1]
    if capacity == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    group_rows = heads // kv_heads * queries
    sms = _sms(q.device)
    tile = tile or tile_of(group_rows, head_dim, q.dtype, batch * kv_heads, sms)
    programs = batch * kv_heads * cdiv(group_rows, tile.BLOCK_M)
    if splits is None:
        seen = capacity if left is None else min(capacity, left + queries + tile.BLOCK_N)
        of_a_program = min(group_rows, tile.BLOCK_M)
        splits = splits_for(programs, seen, of_a_program, tile.BLOCK_N, q.element_size(), sms)
    fused = fused and splits > 1
    part_o, part_lse = o, lse
    if splits > 1:
        part_o = q.new_empty((splits, *q.shape), dtype=torch.float32)
        part_lse = q.new_empty((splits, *lse.shape), dtype=torch.float32)
    counters = torch.zeros(programs, dtype=torch.int32, device=q.device) if fused else lengths
    table = lengths if page_table is None else page_table
    shared = _shared_arguments(q, o, splits)
    with current_device(q):
        decode_kernel[(programs, splits)](
            q, k_cache, v_cache, table, lengths, part_o, part_lse, o, lse, counters,
            **shared, **_cache_arguments(k_cache, v_cache, lengths, page_table, new),
            **decode_options(q, k_cache, v_cache, o, scale, left, softcap), **tile._asdict(), group=heads // kv_heads,
            SPLIT=splits > 1, FUSED=fused,
        )  # fmt: skip
        if splits > 1 and not fused:
            decode_merge_kernel[(batch * heads * queries,)](part_o, part_lse, o, lse, heads=heads, **shared)
    return o, lse


def append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write k_new and v_new, [batch, kv_heads, new, head_dim], into the cache from each sequence's length on.

    What a sequence has no room for is not written.
    """
    check_no_gradient(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    batch, kv_heads, new, head_dim = k_new.shape
    if k_new.numel() == 0 or k_cache.numel() == 0:
        return
    block_n = min(32, triton.next_power_of_2(new))
    table = lengths if page_table is None else page_table
    with current_device(k_new):
        append_kernel[(batch * kv_heads * cdiv(new, block_n),)](
            k_cache, v_cache, table, lengths, k_new, v_new,
            **_strides(nk=k_new, nv=v_new), **_cache_arguments(k_cache, v_cache, lengths, page_table, new),
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_N=block_n,
        )  # fmt: skip


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """By parameter name. The rows of what begins with q or o are called m, all others n."""
    return {
        f"stride_{name}{axis}": step
        for name, x in tensors.items()
        for axis, step in zip("bhmd" if name in "qo" else "bhnd", x.stride(), strict=True)
    }


def _shared_arguments(q: torch.Tensor, o: torch.Tensor, splits: int) -> dict[str, Any]:
    """What the kernel and the merge are both told, by parameter name."""
    batch, heads, queries, head_dim = q.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    return _strides(o=o) | {
        "queries": queries, "rows": batch * heads * queries, "splits": splits,
        "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_S": min(32, 4096 // block_d),
    }  # fmt: skip


def _cache_arguments(
    k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor | None, new: int
) -> dict[str, Any]:
    """What a kernel is told about the cache, by parameter name."""
    page = k.shape[2]
    return _strides(k=k, v=v) | {
        "stride_tb": 0 if table is None else table.stride(0), "stride_lengths": lengths.stride(0),
        "kv_heads": k.shape[1], "new": new, "capacity": page if table is None else page * table.shape[1],
        "PAGE": 1 if table is None else page, "PAGED": table is not None,
    }  # fmt: skip


def decode_options(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, scale: float | None, left: int | None,
    softcap: float | None,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel is told about the queries, the scores and the mask, by parameter name."""
    scores = score_arguments(q, k, False, scale, None, softcap)
    return _strides(q=q) | {
        **{name: scores[name] for name in ("scale_log2", "tanh_scale", "SOFTCAP", "PRECISION")},
        "ALIGN": alignment(q.element_size(), *((x.shape, x.stride()) for x in (q, k, v, o))),
        "left": min(left or 0, 2**30), "WINDOW": left is not None,
    }  # fmt: skip


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS
