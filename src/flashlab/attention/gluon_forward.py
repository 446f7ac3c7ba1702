"""Phase 11b: phase 4's forward loop in Gluon, the layer under Triton, for Hopper.

Triton decides which thread holds which element, when a tile is copied, and when a product is waited for. In Gluon the
kernel says it. What is new is named in Hopper's own terms:

layout              which thread holds which element of a tensor; `NVMMADistributedLayout` is how a product leaves it
warpgroup_mma       a product that the four warps of a *warpgroup* start together and wait for later
tensor descriptor   the shape and strides of a tensor in memory; the copy engine (TMA) fetches boxes of it by itself,
                    and fills with zeros what lies outside
mbarrier            a counter in shared memory: the copy engine reports its bytes there, threads wait for a phase of it
warp_specialize     parts of the kernel on different warps: one that only loads, others that only compute

Three kernels, each the one before with one idea more:

one_tile            a tile of K and V is loaded, waited for, used; then the next
pipelined           tiles are loaded STAGES ahead, and the scores of the next tile are computed beside P V of this one
specialised         one warp loads, and each warpgroup has 64 rows of its own; both go on to the next block of queries

The course has no interpreter for Gluon: these kernels are compiled anywhere, and run on Hopper.

Sources: the tutorials of Triton's repository, python/tutorials/gluon, for the language; Shah et al., "FlashAttention-3"
(2024), for the order of the products, and for the parts of a block that is specialised.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlab import runtime
from flashlab.attention.inputs import check_causal, check_qkv, scale_of
from flashlab.attention.triton_forward import LOG2_E, current_device, positive_scale

LN_2: gl.constexpr = gl.constexpr(math.log(2))
DTYPES = (torch.float16, torch.bfloat16)
WARPGROUP_ROWS = 64  # of a product; 16 in each of the four warps
# Every thread of the program, or of the part of it, meets here; Triton 3.6 has it under another name.
all_threads = getattr(gl, "barrier", None) or gl.thread_barrier


# ---- what the kernels share ------------------------------------------------------------------------------------------
@gluon.jit
def place_of(work, M, heads, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """The first query, the batch and the head of a piece of work. Causal: the longest first, in each head."""
    m_blocks = gl.cdiv(M, BLOCK_M)
    block_m = work % m_blocks
    if CAUSAL:
        block_m = m_blocks - 1 - block_m
    return block_m * BLOCK_M, work // m_blocks // heads, work // m_blocks % heads


@gluon.jit
def tiles_seen(stop, N, last, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries before `stop` see; query i sees the keys up to i + last.

    At least one: a tile that is masked whole is right too.
    """
    seen = N
    if CAUSAL:
        seen = gl.minimum(N, stop + last)
    return gl.maximum(gl.cdiv(seen, BLOCK_N), 1)


@gluon.jit
def tiles_masked(tiles, start, N, last, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many of these tiles, counted from the right, some query from `start` on does not see whole."""
    whole = N
    if CAUSAL:
        whole = gl.maximum(gl.minimum(N, start + last + 1), 0)
    return gl.maximum(tiles - whole // BLOCK_N, 0)


@gluon.jit
def load_box(desc, batch, head, row, ready, smem, pred):
    """Order a box from the copy engine; `ready` will know when all of its bytes are in shared memory."""
    mbarrier.expect(ready, desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], ready, smem, pred=pred)


@gluon.jit
def masked(s, rows, start_n, N, last, CAUSAL: gl.constexpr):
    """-inf in place of the scores that are not to be seen. Keys past the end were loaded as zeros."""
    columns = start_n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    seen = columns[None, :] < N
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + last)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def sums_of_threads(p):
    """[rows, 4]: the four threads that share a row have two columns in eight each, and add up their own."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def softmax_step(s, m_i, l_i, scale_log2):
    """One tile of scores: the weights p, the correction of earlier sums, and the new maximum and sums.

    The maximum needs all the columns of a row, so its four threads exchange theirs in each step; not the sum.
    """
    m_new = gl.maximum(m_i, gl.max(s, axis=1) * scale_log2)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # no score yet: -inf - (-inf) is NaN
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    correction = gl.exp2(m_i - m_safe)
    return p, correction, m_new, l_i * along_rows(correction, l_i) + sums_of_threads(p)


@gluon.jit
def along_rows(x, like):
    """A number for each row, in the layout in which it multiplies `like`. No number changes its thread."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def store_rows(o_desc, LSE_ptr, batch, head, heads, start, M, rows, acc, m_i, l_i, smem):
    """Normalise 64 or more rows, and send o by the copy engine, which leaves out what is past the end."""
    l_i = gl.convert_layout(gl.sum(l_i, axis=1), m_i.type.layout)
    acc = acc / along_rows(gl.where(l_i == 0.0, 1.0, l_i), acc)
    tile = smem.reshape([acc.shape[0], acc.shape[1]])
    tile.store(acc.to(o_desc.dtype))
    fence_async_shared()  # before the copy engine reads what threads wrote
    tma.async_copy_shared_to_global(o_desc, [batch, head, start, 0], smem)
    lse = (m_i + gl.log2(l_i)) * LN_2
    gl.store(LSE_ptr + gl.to_tensor(batch * heads + head).to(gl.int64) * M + rows, lse, mask=rows < M)
    tma.store_wait(0)


# ---- one tile after the other ----------------------------------------------------------------------------------------
@gluon.jit(do_not_specialize=["M", "N", "heads", "group", "last"])
def one_tile_kernel(
    q_desc,  # [batch, heads, M, D] in boxes of [1, 1, BLOCK_M, BLOCK_D]
    k_desc,  # [batch, heads / group, N, D] in boxes of [1, 1, BLOCK_N, BLOCK_D]
    v_desc,  # like k_desc
    o_desc,  # like q_desc
    LSE_ptr,  # [batch, heads, M], float32, contiguous
    scale_log2,  # positive: scores times it are in units of log 2
    M, N, heads,
    group,  # query heads to each key head
    last,  # query i sees the keys up to i + last, if CAUSAL
    CAUSAL: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    warps: gl.constexpr = gl.num_warps()
    # The warps lie along the rows: all the scores of a row are in the four threads of one quad.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    start_m, batch, head = place_of(gl.program_id(0), M, heads, BLOCK_M, CAUSAL)
    rows = start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, S_LAYOUT))

    q_smem = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    load_box(q_desc, batch, head, start_m, ready.index(0), q_smem, True)
    mbarrier.wait(ready.index(0), 0)
    q = q_smem.reshape([BLOCK_M, BLOCK_D])
    k = k_smem.reshape([BLOCK_N, BLOCK_D])
    v = v_smem.reshape([BLOCK_N, BLOCK_D])

    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    l_i = sums_of_threads(no_scores)
    tiles = tiles_seen(gl.minimum(start_m + BLOCK_M, M), N, last, BLOCK_N, CAUSAL)
    for i in range(tiles):
        start_n = (tiles - 1 - i) * BLOCK_N  # from the right: the tiles to be masked come first
        load_box(k_desc, batch, head // group, start_n, ready.index(1), k_smem, True)
        load_box(v_desc, batch, head // group, start_n, ready.index(2), v_smem, True)
        mbarrier.wait(ready.index(1), i & 1)
        s = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False)
        s = masked(s, rows, start_n, N, last, CAUSAL)
        p, correction, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
        p = gl.convert_layout(p.to(v_desc.dtype), P_LAYOUT)
        acc = acc * along_rows(correction, acc)
        mbarrier.wait(ready.index(2), i & 1)
        acc = warpgroup_mma(p, v, acc)

    store_rows(o_desc, LSE_ptr, batch, head, heads, start_m, M, rows, acc, m_i, l_i, q_smem)


# ---- loads ahead, and two products at a time -------------------------------------------------------------------------
@gluon.jit
def pipelined_step(
    i, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_desc, v_desc, k_smem, v_smem, k_ready, v_ready,
    batch, kv_head, scale_log2, N, last, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The scores of tile i, while P V of the tile before it is added to acc."""
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = no_scores.shape[1]
    BLOCK_D: gl.constexpr = acc.shape[1]
    start_n = (tiles - 1 - i) * BLOCK_N
    slot, before = i % STAGES, (i - 1) % STAGES
    k = k_smem.index(slot).reshape([BLOCK_N, BLOCK_D])
    v = v_smem.index(before).reshape([BLOCK_N, BLOCK_D])
    mbarrier.wait(k_ready.index(slot), i // STAGES & 1)
    scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), (i - 1) // STAGES & 1)
    sums = warpgroup_mma(p, v, acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(scores,))  # the scores; the other product goes on
    ahead = i + STAGES  # into the place of the tile of K that was read
    load_box(k_desc, batch, kv_head, (tiles - 1 - ahead) * BLOCK_N, k_ready.index(slot), k_smem.index(slot),
             ahead < tiles)  # fmt: skip
    if MASKED:
        s = masked(s, rows, start_n, N, last, CAUSAL)
    weights, correction, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    load_box(v_desc, batch, kv_head, (tiles - ahead) * BLOCK_N, v_ready.index(before), v_smem.index(before),
             ahead - 1 < tiles)  # fmt: skip
    acc = acc * along_rows(correction, acc)
    return gl.convert_layout(weights.to(v_desc.dtype), p.type.layout), acc, m_i, l_i


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """NUMBER barriers, of which each completes a phase after COUNT reports."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit(do_not_specialize=["M", "N", "heads", "group", "last"])
def pipelined_kernel(
    q_desc, k_desc, v_desc, o_desc, LSE_ptr, scale_log2, M, N, heads, group, last,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,  # tiles of K, and of V, in shared memory
):  # fmt: skip
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    warps: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    start_m, batch, head = place_of(gl.program_id(0), M, heads, BLOCK_M, CAUSAL)
    kv_head = head // group
    rows = start_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, S_LAYOUT))
    tiles = tiles_seen(gl.minimum(start_m + BLOCK_M, M), N, last, BLOCK_N, CAUSAL)

    q_smem = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = barriers(STAGES, 1)
    v_ready = barriers(STAGES, 1)
    mbarrier.init(q_ready, count=1)
    load_box(q_desc, batch, head, start_m, q_ready, q_smem, True)
    for i in gl.static_range(STAGES):  # the pipeline is filled
        load_box(k_desc, batch, kv_head, (tiles - 1 - i) * BLOCK_N, k_ready.index(i), k_smem.index(i), i < tiles)
        load_box(v_desc, batch, kv_head, (tiles - 1 - i) * BLOCK_N, v_ready.index(i), v_smem.index(i), i < tiles)

    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    l_i = sums_of_threads(no_scores)
    q = q_smem.reshape([BLOCK_M, BLOCK_D])
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)), no_scores, use_acc=False)
    load_box(k_desc, batch, kv_head, (tiles - 1 - STAGES) * BLOCK_N, k_ready.index(0), k_smem.index(0), STAGES < tiles)
    s = masked(s, rows, (tiles - 1) * BLOCK_N, N, last, CAUSAL)
    p, correction, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
    p = gl.convert_layout(p.to(v_desc.dtype), P_LAYOUT)

    # region: pipelined loop
    whole_from = gl.maximum(tiles_masked(tiles, start_m, N, last, BLOCK_N, CAUSAL), 1)
    for i in range(1, gl.minimum(whole_from, tiles)):
        p, acc, m_i, l_i = pipelined_step(
            i, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_desc, v_desc, k_smem, v_smem, k_ready, v_ready,
            batch, kv_head, scale_log2, N, last, CAUSAL, True,
        )  # fmt: skip
    for i in range(whole_from, tiles):
        p, acc, m_i, l_i = pipelined_step(
            i, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_desc, v_desc, k_smem, v_smem, k_ready, v_ready,
            batch, kv_head, scale_log2, N, last, CAUSAL, False,
        )  # fmt: skip

    end = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(end), (tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(p, v_smem.index(end).reshape([BLOCK_N, BLOCK_D]), acc)
    # endregion
    store_rows(o_desc, LSE_ptr, batch, head, heads, start_m, M, rows, acc, m_i, l_i, q_smem)


# ---- one warp loads, the others compute ------------------------------------------------------------------------------
@gluon.jit
def load_part(descriptors, places, ready, free, sizes, CAUSAL: gl.constexpr):
    """The warp that loads: it waits until a place is free, and orders the next box into it."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem = places
    q_ready, k_ready, v_ready = ready
    q_free, k_free, v_free = free
    M, N, heads, group, last, pieces = sizes
    GROUPS: gl.constexpr = q_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    done = 0  # tiles of K and V, over all the pieces of work
    turn = 0
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        start_m, batch, head = place_of(work, M, heads, GROUPS * ROWS, CAUSAL)
        kv_head = head // group
        tiles = tiles_seen(gl.minimum(start_m + GROUPS * ROWS, M), N, last, BLOCK_N, CAUSAL)
        for i in range(tiles + 1):  # K of tile i, then V of the tile before: the order in which they are used
            if i < tiles:
                at = done + i
                slot = at % STAGES
                mbarrier.wait(k_free.index(slot), at // STAGES & 1 ^ 1)  # a new barrier counts as free
                load_box(k_desc, batch, kv_head, (tiles - 1 - i) * BLOCK_N, k_ready.index(slot),
                         k_smem.index(slot), True)  # fmt: skip
            if i == 0:
                for number in gl.static_range(GROUPS):
                    mbarrier.wait(q_free.index(number), turn & 1 ^ 1)
                    load_box(q_desc, batch, head, start_m + number * ROWS, q_ready.index(number),
                             q_smem.index(number), True)  # fmt: skip
            else:
                at = done + i - 1
                slot = at % STAGES
                mbarrier.wait(v_free.index(slot), at // STAGES & 1 ^ 1)
                load_box(v_desc, batch, kv_head, (tiles - i) * BLOCK_N, v_ready.index(slot),
                         v_smem.index(slot), True)  # fmt: skip
        done += tiles
        turn += 1


@gluon.jit
def give_back(place):
    """Report that this warpgroup has read a place, all of its threads."""
    all_threads()
    mbarrier.arrive(place, count=1)


@gluon.jit
def specialised_step(
    i, done, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_smem, v_smem, ready, free, turns, number,
    scale_log2, N, last, CAUSAL: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """As `pipelined_step`; the loads are another warp's, which is told what has been read.

    With TURNS two warpgroups start their products in turn, so that one has its softmax while the other multiplies;
    `number` counts the turns.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = no_scores.shape[1]
    BLOCK_D: gl.constexpr = acc.shape[1]
    at = done + i
    slot, before = at % STAGES, (at - 1) % STAGES
    k = k_smem.index(slot).reshape([BLOCK_N, BLOCK_D])
    v = v_smem.index(before).reshape([BLOCK_N, BLOCK_D])
    if TURNS:
        mbarrier.wait(turns.index(NUMBER), number + 1 - NUMBER & 1)  # a new barrier counts as the first one's turn
    scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(ready[2].index(before), (at - 1) // STAGES & 1)
    sums = warpgroup_mma(p, v, acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - NUMBER), count=1)
    s = warpgroup_mma_wait(1, deps=(scores,))
    give_back(free[1].index(slot))
    if MASKED:
        s = masked(s, rows, (tiles - 1 - i) * BLOCK_N, N, last, CAUSAL)
    weights, correction, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
    after = at + 1
    mbarrier.wait(ready[1].index(after % STAGES), after // STAGES & 1, pred=i + 1 < tiles)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    give_back(free[2].index(before))
    acc = acc * along_rows(correction, acc)
    return gl.convert_layout(weights.to(k_smem.dtype), p.type.layout), acc, m_i, l_i


@gluon.jit
def compute_part(
    o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes,
    CAUSAL: gl.constexpr, TURNS: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Warpgroup NUMBER: its 64 rows of each block of queries, against all the tiles of the block."""
    q_smem, k_smem, v_smem = places
    M, N, heads, group, last, pieces = sizes
    GROUPS: gl.constexpr = q_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q = q_smem.index(NUMBER).reshape([ROWS, BLOCK_D])
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    done = 0  # tiles, over all the pieces of work: the same count as in the warp that loads
    turn = 0  # pieces of work
    for work in range(gl.program_id(0), pieces, gl.num_programs(0)):
        start_m, batch, head = place_of(work, M, heads, GROUPS * ROWS, CAUSAL)
        tiles = tiles_seen(gl.minimum(start_m + GROUPS * ROWS, M), N, last, BLOCK_N, CAUSAL)
        start = start_m + NUMBER * ROWS
        rows = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l_i = sums_of_threads(no_scores)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)

        # region: first tile
        slot = done % STAGES
        mbarrier.wait(ready[0].index(NUMBER), turn & 1)
        mbarrier.wait(ready[1].index(slot), done // STAGES & 1)
        k = k_smem.index(slot).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False)
        give_back(free[1].index(slot))
        s = masked(s, rows, (tiles - 1) * BLOCK_N, N, last, CAUSAL)
        p, correction, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
        p = gl.convert_layout(p.to(k_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(ready[1].index((done + 1) % STAGES), (done + 1) // STAGES & 1, pred=tiles > 1)
        # endregion

        whole_from = gl.maximum(tiles_masked(tiles, start, N, last, BLOCK_N, CAUSAL), 1)
        for i in range(1, gl.minimum(whole_from, tiles)):
            p, acc, m_i, l_i = specialised_step(
                i, done, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_smem, v_smem, ready, free,
                turns, done - turn + i - 1, scale_log2, N, last, CAUSAL, TURNS, True, NUMBER,
            )  # fmt: skip
        for i in range(whole_from, tiles):
            p, acc, m_i, l_i = specialised_step(
                i, done, tiles, p, acc, m_i, l_i, q, no_scores, rows, k_smem, v_smem, ready, free,
                turns, done - turn + i - 1, scale_log2, N, last, CAUSAL, TURNS, False, NUMBER,
            )  # fmt: skip

        end = (done + tiles - 1) % STAGES
        mbarrier.wait(ready[2].index(end), (done + tiles - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_smem.index(end).reshape([BLOCK_N, BLOCK_D]), acc)
        give_back(free[2].index(end))
        store_rows(o_desc, LSE_ptr, batch, head, heads, start, M, rows, acc, m_i, l_i, q_smem.index(NUMBER))
        give_back(free[0].index(NUMBER))
        done += tiles
        turn += 1


@gluon.jit(do_not_specialize=["M", "N", "heads", "group", "last", "pieces"])
def specialised_kernel(
    q_desc,  # in boxes of 64 rows, one for each warpgroup
    k_desc, v_desc,
    o_desc,  # like q_desc
    LSE_ptr, scale_log2, M, N, heads, group, last,
    pieces,  # blocks of queries of all heads; a program takes one after the other
    CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,  # warpgroups that compute: 2 or 3
    TURNS: gl.constexpr,  # two warpgroups start their products in turn
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    descriptors = (q_desc, k_desc, v_desc)
    places = (q_smem, k_smem, v_smem)
    # region: parts
    ready = (barriers(GROUPS, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    # Free when all the warpgroups have read it.
    free = (barriers(GROUPS, 1), barriers(STAGES, GROUPS), barriers(STAGES, GROUPS))
    sizes = (M, N, heads, group, last, pieces)
    turns = barriers(GROUPS, 1)
    # The warps of each part but the first, and the registers of their threads; the first gets what is left.
    if GROUPS == 2:
        gl.warp_specialize([
            (compute_part, (o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes, CAUSAL, TURNS, 0)),
            (compute_part, (o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes, CAUSAL, TURNS, 1)),
            (load_part, (descriptors, places, ready, free, sizes, CAUSAL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_part, (o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes, CAUSAL, TURNS, 0)),
            (compute_part, (o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes, CAUSAL, TURNS, 1)),
            (compute_part, (o_desc, LSE_ptr, places, ready, free, turns, scale_log2, sizes, CAUSAL, TURNS, 2)),
            (load_part, (descriptors, places, ready, free, sizes, CAUSAL)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    # endregion


# ---- the launch ------------------------------------------------------------------------------------------------------
class GluonTile(NamedTuple):
    """What a Gluon kernel is compiled with: 64 rows of Q for each warpgroup, BLOCK_N keys a tile, STAGES tiles of K and
    of V in shared memory (`one_tile` has one of each). turns: in `specialised`, two warpgroups start their products in
    turn ("ping-pong")."""

    warpgroups: int
    BLOCK_N: int
    STAGES: int
    turns: bool = False


KERNELS = {"one_tile": one_tile_kernel, "pipelined": pipelined_kernel, "specialised": specialised_kernel}
# By the columns of a tile. All fit into the 227 KiB of shared memory, and none spills registers (tests/test_gluon.py).
TILES = {64: GluonTile(2, 128, 3), 128: GluonTile(2, 128, 2, turns=True), 256: GluonTile(2, 64, 2)}


def flash_attention_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    step: str = "specialised",
    tile: GluonTile | None = None,
    persistent: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T + mask) v by a Gluon kernel, on Hopper.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], heads a multiple of kv_heads. All
            float16 or all bfloat16; head_dim a multiple of 8 up to 256; the last stride 1, the others multiples of 8
            elements: [batch, seq, heads, head_dim] transposed is one of them.
        causal: query i sees the keys j <= i + seq_k - seq_q. scale: 1 / sqrt(head_dim) unless given.
        step: "one_tile", "pipelined" or "specialised". tile: instead of that of `TILES`.
        persistent: for "specialised", as many programs as multiprocessors, each with many blocks of queries; else one
            for each block. Unless given, only without a mask, where all blocks are equally long.
    Returns:
        o: like q. lse: [batch, heads, seq_q], float32. A row that sees no key gives o = 0 and lse = -inf.
    Raises:
        TypeError, ValueError: a sentence that names the argument. RuntimeError: a process or a GPU that cannot run it.
    """
    check_qkv(q, k, v, dtypes=DTYPES, same_v=True, no_grad=True)
    check_causal(causal)
    if step not in KERNELS:
        raise ValueError(f"step is {step!r}; it must be one of {', '.join(KERNELS)}")
    if reason := why_not(q.device):
        raise RuntimeError(f"the Gluon kernels are compiled for Hopper's warpgroups, compute capability 9.0: {reason}")
    if q.numel() == 0:
        return torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:  # a descriptor of nothing cannot be made
        return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=q.device)
    signed = LOG2_E * scale_of(scale, q.shape[3])
    factor = positive_scale({"scale_log2": signed})["scale_log2"]
    o = torch.empty_like(q)
    if signed < 0:
        q = -q  # the maximum is found before the scores are scaled
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arguments = launch_arguments(step, q, k, v, o, causal, tile)
    programs = triton.cdiv(q.shape[2], WARPGROUP_ROWS * (tile or tile_for(q)).warpgroups) * q.shape[0] * q.shape[1]
    if step == "specialised" and (not causal if persistent is None else persistent):
        programs = min(programs, multiprocessors(q.device))
    with current_device(q):
        KERNELS[step][(programs,)](LSE_ptr=lse, scale_log2=factor, **arguments)
    return o, lse


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, as a clause; None where they can."""
    if runtime.INTERPRETED:
        return "this process interprets Triton, and the interpreter does not know Gluon"
    if device.type != "cuda":
        return f"the tensors are on {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == (9, 0) else f"this GPU has {capability[0]}.{capability[1]}"


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_for(q: torch.Tensor) -> GluonTile:
    """The tile for a head_dim: that of the next width in `TILES`."""
    return next(tile for columns, tile in TILES.items() if q.shape[3] <= columns)


def boxes(name: str, x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of [batch, heads, seq, head_dim] in boxes of rows x columns of one head.

    Raises ValueError for strides that the copy engine cannot have.
    """
    # The stride of an axis with one element is never used, and may be anything.
    dense = torch.empty(x.shape, device="meta").stride()
    strides = [s if size > 1 else d for s, d, size in zip(x.stride(), dense, x.shape, strict=True)]
    if x.shape[3] % 8 or strides[3] != 1 or x.data_ptr() % 16 or any(s <= 0 or s % 8 for s in strides[:3]):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {tuple(x.stride())}; the copy engine needs a last stride "
            f"of 1, and rows that begin on 16 bytes: a head_dim that is a multiple of 8, and {name}.contiguous()"
        )
    # 128-byte swizzle: the order in shared memory in which a product reads it without bank conflicts.
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, columns], layout)


def launch_arguments(
    step: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, causal: bool,
    tile: GluonTile | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel is told, by parameter name, but for lse and the scale."""
    if q.shape[3] > max(TILES):
        raise ValueError(f"head_dim is {q.shape[3]}; a tile of this kernel has room for {max(TILES)} columns at most")
    tile = tile or tile_for(q)
    possible = (2, 3) if step == "specialised" else (1, 2)
    if tile.warpgroups not in possible:
        raise ValueError(f"tile has {tile.warpgroups} warpgroups; {step} takes {possible[0]} or {possible[1]}")
    if tile.turns and tile.warpgroups != 2:
        raise ValueError(f"tile has turns and {tile.warpgroups} warpgroups; two take turns")
    columns = next(columns for columns in TILES if q.shape[3] <= columns)
    block_m = WARPGROUP_ROWS * tile.warpgroups
    rows = WARPGROUP_ROWS if step == "specialised" else block_m
    arguments: dict[str, Any] = {
        "q_desc": boxes("q", q, rows, columns),
        "k_desc": boxes("k", k, tile.BLOCK_N, columns),
        "v_desc": boxes("v", v, tile.BLOCK_N, columns),
        "o_desc": boxes("o", o, rows, columns),
        "M": q.shape[2], "N": k.shape[2], "heads": q.shape[1], "group": q.shape[1] // k.shape[1],
        "last": k.shape[2] - q.shape[2], "CAUSAL": causal,
        "num_warps": 4 * (1 if step == "specialised" else tile.warpgroups),
    }  # fmt: skip
    if step != "one_tile":
        arguments["STAGES"] = tile.STAGES
    if step == "specialised":
        pieces = triton.cdiv(q.shape[2], block_m) * q.shape[0] * q.shape[1]
        arguments |= {"pieces": pieces, "GROUPS": tile.warpgroups, "TURNS": tile.turns}
    return arguments


def compile_arguments(
    step: str, dtype: torch.dtype, head_dim: int, tile: GluonTile | None = None, *, seq: int = 4096, heads: int = 16,
    causal: bool = False,
) -> dict[str, object]:  # fmt: skip
    """What a compile report needs for a launch on contiguous tensors [1, heads, seq, head_dim]."""
    x = torch.empty((1, heads, seq, head_dim), dtype=dtype, device="meta")
    return launch_arguments(step, x, x, x, x, causal, tile) | {"LSE_ptr": torch.float32, "scale_log2": 0.1}
