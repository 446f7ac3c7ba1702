# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 4 · Industrial Triton
#
# Phase 3's kernel is right, and no model can use it. It takes one head. It has no mask. A head size of 80 is refused. This lecture makes of it a
# kernel that a model can train with, one idea at a time. You will see each idea as a diff, with the reason for it and with something that is counted.
#
# **Time:** about two and a half hours for the lecture. The exercises take about two hours, and nearly two more for the stretch exercises.

# %% [markdown]
# ## What you will be able to do
#
# - Put batch and heads on the grid, and share key heads among query heads without a copy.
# - Take any head size, any two lengths and any strides.
# - Compute, for any mask that is a band, which tiles are never loaded, and which need a mask.
# - Add a window, a soft-cap or another scale so that a kernel without them pays nothing.
# - Choose tiles by the compiler's report and by a stopwatch.
# - Read a kernel in Gluon: layouts, barriers, and why one warp only loads.
# - Say what FlexAttention does for you, and when to write a kernel instead.

# %% [markdown]
# ## What you need first
#
# - Phase 3: the kernel, its four masks, `exp2`, and the words *program*, *grid*, *stride*.
# - Phase 0: causal masks, and how two partial results are merged by their `lse`.
#
# Without a GPU the kernels run in Triton's interpreter, on small inputs. What the compiler says comes from the real compiler.

# %%
import math
import re
import warnings

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashlab import choose_backend, flash_attention, runtime
from flashlab.attention import tiles, triton_forward
from flashlab.attention.ladder import STEPS, text
from flashlab.attention.options import band, visible
from flashlab.attention.reference import attention
from flashlab.attention.tiles import SEARCH, Tile
from flashlab.attention.triton_forward import (
    compile_arguments, flash_attention_forward, hbm_bytes, in_band, load_tile, longest_first, soft_capped,
    store_tile,
)
from flashlab.bench import industrial
from flashlab.check import verify
from flashlab.check.training import wanted, worst
from flashlab.figures import curves, masks, show
from flashlab.figures.panels import panels
from flashlab.triton_tools.compile_report import compile_report, compile_reports
from flashlab.triton_tools.watch import hbm_traffic

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl
from triton.language.extra import libdevice

show.style()

# %% [markdown]
# ## 1 · The end first, and one kernel that is many
#
# Here is what we are going to build, on an input as a model has it: two batches, six query heads that share two key heads, a head size of 40,
# fewer queries than keys, a causal mask. `wanted` is the formula in float64, with the error that each element may have.

# %%
def inputs(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype=torch.float16, seed=0):
    """q, k, v: random, the same on every machine, where kernels run."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
    drawn = [torch.randn(batch, h, n, head_dim, generator=generator) for h, n in sizes]
    return [x.to(runtime.device(), dtype) for x in (drawn[0], drawn[1], drawn[2] + 0.5)]


def of_bound(q, k, v, tma=False, tile=None, **options):
    """The kernel's largest error as a part of what is allowed."""
    o, lse = flash_attention_forward(q, k, v, tma=tma, tile=tile, **options)
    return worst(wanted(q, k, v, **options), o=o, lse=lse)[1]

# %%
q, k, v = inputs(2, 6, 2, 50, 130, 40)
assert of_bound(q, k, v, causal=True) <= 1
print("o", list(q.shape), "and lse", list(q.shape[:3]), "are within their bounds")

# %% [markdown]
# It is one kernel, and it serves all the cases of this lecture. But a kernel that can do everything should not cost everything. The means is
# `tl.constexpr`: a parameter that is known when the kernel is *compiled*. An `if` on such a parameter is decided then, and the other branch
# leaves no instruction behind. A small example:

# %%
@triton.jit
def maybe_capped(x_ptr, CAP: tl.constexpr):
    i = tl.arange(0, 128)
    x = tl.load(x_ptr + i)
    if CAP:
        x = tl.exp2(x)
    tl.store(x_ptr + i, x)


arguments = [{"x_ptr": torch.float32, "CAP": cap} for cap in (False, True)]
both = compile_reports(maybe_capped, arguments, targets=["sm_90"])
print("ex2 instructions in the PTX:", [report.ptx.count("ex2.approx") for report in both])
assert "ex2" not in both[0].ptx and "ex2" in both[1].ptx

# %% [markdown]
# So a launch with `CAP=False` and one with `CAP=True` run two different kernels. Each is compiled the first time it is asked for.
#
# This also gives us the steps of this lecture. A *step* is the final kernel with some constants fixed. Its text is what the compiler is left
# with, so the difference between two steps is one idea:

# %%
show.table([[step.name, step.idea] for step in STEPS], ["step", "idea"])

# %% [markdown]
# ## 2 · Batch and heads
#
# Attention of one head has nothing to do with attention of another. So batch and heads multiply the number of programs, and nothing inside a
# program changes. Phase 3 launched one program per block of queries. Now it is one per block of queries *of each head of each batch*:

# %%
show.region(text(STEPS[0]), "programs")

# %% [markdown]
# - All programs are on the grid's first axis, x, and take their number apart by division. A grid may have $2^{31} - 1$ programs on x, but only
#   65 535 on y and z. Kernels with batch × heads on another axis fail at large batches (flash-linear-attention, issue 172).
# - Neighbouring numbers are blocks of *one* head. They run at about the same time, and read the same K and V, which then come from the L2 cache.
# - `kv_head` is explained below, and `.to(tl.int64)` under "Four strides".

# %% [markdown]
# Models save memory by **grouped queries** (GQA): several query heads share one head of K and V. With `group` query heads to each key head, query
# head `h` reads key head `h // group`. (`group` is `heads // kv_heads`.) That is all that the kernel has to do. A group of 1 is ordinary attention. A group
# of all heads is called MQA.
#
# Let a small kernel write down what each program computes:

# %%
@triton.jit
def who_kernel(out_ptr, M, heads, group, BLOCK_M: tl.constexpr):
    pid = tl.program_id(0)
    m_blocks = tl.cdiv(M, BLOCK_M)
    batch_head = pid // m_blocks
    head = batch_head % heads
    tl.store(out_ptr + 4 * pid, batch_head // heads)
    tl.store(out_ptr + 4 * pid + 1, head)
    tl.store(out_ptr + 4 * pid + 2, head // group)
    tl.store(out_ptr + 4 * pid + 3, pid % m_blocks)


found = torch.zeros(2 * 6 * 4, 4, dtype=torch.int32, device=runtime.device())
who_kernel[(len(found),)](found, 50, 6, 3, BLOCK_M=16)
assert len(set(map(tuple, found.tolist()))) == len(found), "each block of each head once"

# %%
figure, ax = plt.subplots(figsize=(6.4, 4.2))
masks.programs(ax, found.tolist(), "Programs of a launch: B 2, H 6, H_kv 2, 50 queries, BLOCK_M 16")
plt.show()

# %% [markdown]
# *Each box is a program, with its number. Three query heads of a batch have one colour: they read the same head of K and V.*
#
# The other way to do it is to copy each key head `group` times, as `repeat_interleave` does. The result is the same. The memory is not:

# %%
o, _ = flash_attention_forward(q, k, v)
copies = [x.repeat_interleave(3, dim=1) for x in (k, v)]
assert torch.equal(flash_attention_forward(q, *copies)[0], o)
by_index, by_copy = (sum(x.nbytes for x in pair) for pair in ((k, v), copies))
print(f"the same bits; K and V take {by_index} bytes by index, {by_copy} with copies")
assert by_copy == 3 * by_index

# %% [markdown]
# ### Four strides, 64 bits
#
# A tensor now has four strides. A tile of one head begins at `batch * stride_b + head * stride_h`, and from there it is phase 3's tile:

# %%
# FROM flashlab.attention.triton_forward: tile_ptrs, tile_step (no docstrings)

# %% [markdown]
# - `rows.to(tl.int64)`, and `batch` and `head` are 64 bits already. An offset of more than $2^{31}$ elements wraps around in 32 bits. Convert *before*
#   multiplying: a product in 32 bits is wrong already, and no later conversion mends it.
# - `tl.multiple_of` is a promise to the compiler. Triton finds out by itself whether a stride is a multiple of 16. The row stride of a head size of 40 is
#   not. But it is a multiple of 8, which is 16 bytes of fp16, the most that a thread loads at once. `ALIGN` says so, if it is so.

# %% [markdown]
# *Predict: batch 64, 32 heads, 8192 tokens, head size 128. Is $2^{31}$ far away?*

# %%
elements = 64 * 32 * 8192 * 128
print(f"{elements} elements, that is 2^{math.log2(elements):.0f}; {elements * 2 / 2**30:.0f} GiB in fp16")
assert elements == 2**31

# %% [markdown]
# One tensor of 4 GiB, then, which an H200 holds thirty times. FlashAttention had this bug (its issue 767 and pull request 1500), and
# FlexAttention's backward in 2026 (PyTorch issue 190857).
#
# Because the kernel takes strides, it does not care how a model lays its tensors out. Most projections of a transformer give `[B, N, H, D]`, which we
# see as `[B, H, N, D]` after a `transpose` that moves nothing:

# %%
by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
again, _ = flash_attention_forward(*by_token)
assert torch.equal(again, o)
print("strides", q.stride(), "and", by_token[0].stride(), "give the same bits")
print("o has the order in memory of q:", again.stride() == by_token[0].stride())

# %% [markdown]
# ### The loop, as it begins
#
# Now the loop of the first step. It is phase 3's, with `tile_ptrs` and `load_tile` for the lines that made addresses. Look for what is different:

# %%
show.region(text(STEPS[0]), "loop")

# %% [markdown]
# - **The scale has moved.** Phase 3 multiplied all of `s` by it. Here only the row maximum is multiplied, and then
#   `s * scale_log2 - m_safe` is *one* instruction per score, a multiply-add. It needs a positive scale: otherwise the maximum of the scaled
#   scores is not the scaled maximum. (For a negative one the kernel negates Q, once. `NEGATE` says so.)

# %% [markdown]
# - **The loop has three parts**, `for part in tl.static_range(3)`. This is written out three times when the kernel is compiled. Here `tile_edges` gives 0, 0, 0
#   and N. So the first two parts are empty, and all tiles are in the third.
# - `in_band`, `stop_m`, `edges`: read over them for now. Nothing is masked but the end of K. Sections 4 and 5 explain them.

# %% [markdown]
# How many bytes does a launch ask for? As in phase 3: a program reads its queries once, and all keys and values of its head. The interpreter
# counts. Grouped queries change nothing here, since each program reads for itself. (The caches change, because there is less to hold.)

# %%
rows = []
for BLOCK_M in (16, 32, 64, 128):
    x = inputs(1, 4, 2, 256, 256, 64)
    traffic = hbm_traffic(flash_attention_forward, *x, tile=Tile(BLOCK_M, 32, 4, 2))
    read, written = hbm_bytes(1, 4, 2, 256, 256, 64, 2, BLOCK_M)
    assert (traffic.bytes_read, traffic.bytes_written) == (read, written)
    paper = 4 * 2 * (256 * 64 * 2) ** 2 / (BLOCK_M * 64 * 2)
    rows.append([BLOCK_M, BLOCK_M * 64 * 2, traffic.bytes_read, f"{paper / traffic.bytes_read:.2f}"])
show.table(rows, ["BLOCK_M", "bytes of a tile of Q", "bytes read, counted", "of these K and V"])

# %% [markdown]
# The counts equal the formula, to the byte. And they are the law of the FlashAttention paper: theorem 2 says $\Theta(N^2 D^2 / S)$ accesses with $S$ of
# on-chip memory. Our on-chip tile of Q has $S = \mathrm{BLOCK\_M} \cdot D \cdot e$ bytes, and K and V together are
# $2 (N D e)^2 / S$ bytes per head. **Twice the tile, half the traffic.** The last column is that formula over the count; what is missing to 1 is Q.

# %% [markdown]
# ## 3 · Any head size
#
# The sides of a tile are powers of two. Models have head sizes of 40, 80, 96, 112, 160. So a tile gets `BLOCK_D` columns, the next power of two,
# and the columns past `HEAD_DIM` are padding. (At least 16: `tl.dot` takes nothing smaller.) The diff:

# %%
show.diff(text(STEPS[0]), text(STEPS[1]), context=1)

# %% [markdown]
# Padding columns of Q and K are zeros, so they add 0 to every score. Those of V are zeros, and their sums are never stored. No score has to be masked
# for it: this padding is harmless, and padded *keys* are not.
#
# `load_tile` picks its mask when it is compiled: a condition for the rows in an edge tile, one for the columns where the head size is padded, both, or none.
# Here is what it loads, from a matrix of ones:

# %%
@triton.jit
def loaded_kernel(x_ptr, out_ptr, N, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + rows[:, None] * HEAD_DIM + columns[None, :]
    x = load_tile(x_ptrs, rows, columns, N, HEAD_DIM, BLOCK_D, True)
    tl.store(out_ptr + rows[:, None] * BLOCK_D + columns[None, :], x)


ones = torch.ones(11, 40, device=runtime.device())
tile = torch.full((16, 64), -1.0, device=runtime.device())
loaded_kernel[(1,)](ones, tile, 11, HEAD_DIM=40, BLOCK_D=64, BLOCK=16)
assert tile[:11, :40].eq(1).all() and tile.sum() == 11 * 40

# %%
figure, ax = plt.subplots(figsize=(6.4, 2.4))
ax.imshow(tile.cpu(), cmap="Blues", vmin=-0.4, vmax=1.6, aspect="auto")
ax.set(title="The last tile of K: 11 rows are left, HEAD_DIM 40, BLOCK_D 64", xlabel="column", ylabel="row")
ax.grid(visible=False)
plt.show()

# %% [markdown]
# *Dark: loaded. Light: zeros that no address was read for.*
#
# So padding costs no bytes. What it costs is multiplications with zeros, and registers. A head size of 80 is multiplied as 128:

# %%
for head_dim in (40, 64, 80, 128):
    x = inputs(1, 1, 1, 64, 64, head_dim)
    read = hbm_traffic(flash_attention_forward, *x).bytes_read
    padded = triton.next_power_of_2(head_dim)
    print(f"head_dim {head_dim:3d}: {read:6d} bytes read, {padded / head_dim:.2f} times the multiplications")
    assert read == 3 * 64 * head_dim * 2

# %% [markdown]
# *Could two tiles, 64 and 16 columns wide, do 80 columns?*
#
# <details><summary>Answer</summary>
#
# Yes: two products for the scores, two accumulators, and 80 columns instead of 128. It doubles the lines of the loop and the number of loads, and
# `acc` becomes two variables. Some libraries do it. This kernel does not, because every head size would be another text.
#
# </details>

# %% [markdown]
# ## 4 · Causal, aligned at the end
#
# A causal query sees the keys up to its own position. With as many queries as keys this is the lower triangle. But when a model generates, there are fewer
# queries than keys: the last query is the newest token, and stands beside the *last* key. So **query $i$ sees the keys
# $j \le i + N - M$**. This is called bottom-right alignment. (PyTorch's `is_causal` is aligned top-left.)

# %%
print(visible(2, 5, causal=True).int())
print("query i sees the keys up to i +", band(2, 5, causal=True).last)
print(visible(5, 2, causal=True).int())
print("query i sees the keys up to i -", -band(5, 2, causal=True).last, ": the first three see none")

# %% [markdown]
# A row that sees no key gives `o = 0` and `lse = -inf`, the logarithm of an empty sum. The kernel gets this from `m_safe` and from the division by 1 in
# place of 0. Both were in phase 3, for inputs with infinities. Now ordinary inputs get there:

# %%
x = inputs(1, 1, 1, 5, 2, 16)
o, lse = flash_attention_forward(*x, causal=True)
assert of_bound(*x, causal=True) <= 1
print("rows that are 0:", (o[0, 0] == 0).all(-1).tolist())
print("lse is -inf:   ", lse[0, 0].isneginf().tolist())

# %% [markdown]
# The diff has three parts. `last` is the number from above, $N - M$.

# %%
show.diff(text(STEPS[1]), text(STEPS[2]), context=1)

# %% [markdown]
# - `end` in `tile_edges`: the last row of the block is `stop - 1`, and it sees the keys before `stop + last`. The loop ends there. **Tiles that no row
#   sees are never loaded.** `tl.maximum(..., 0)` is for blocks that see no key at all. An example: of 50 queries and 130 keys, rows 16 to 31. `last` is 80,
#   `stop` is 32, so `end` is 112.
# - `in_band`: inside a tile, the rows see different keys. A key is seen if `key <= query + last`. (`key == key` is a tile of True to start from.)

# %% [markdown]
# - `whole_end` is computed, and not used yet. Section 5 needs it.

# %% [markdown]
# - `longest_first`, the order of the blocks: the last block of queries visits the most tiles. If it starts last, the GPU waits for it while everything else
#   has ended. So the longest start first, of 16 heads at a time. Why not of all heads? What runs at the same time shares K and V in the L2 cache. (So what
#   section 2 said of neighbours holds without a causal mask only. With one, they are blocks of up to 16 heads.) On an H200, with 4096 tokens, this order
#   gained 4 % at $D = 64$, 6 % at 128 and 14 % at 256 over one head after the other.

# %% [markdown]
# Which tiles are visited? Let `tile_edges` itself say it. This kernel stores its four positions for each block of queries:

# %%
# FROM flashlab.attention.triton_forward: tile_edges (no docstrings)

# %% [markdown]
# In this step `HAS_FIRST` and `SPLIT` are false; the next two sections need them. `edges` below has a row for each block of queries, and `walks` lists the
# tiles between the positions.

# %%
@triton.jit
def edges_kernel(
    out_ptr, M, N, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SPLIT: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, M)
    edges = tile_edges(start, stop, first, last, N, BLOCK_N, HAS_FIRST, HAS_LAST, SPLIT)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * tl.program_id(0) + i, edges[i])


def walks(M, N, BLOCK_M, BLOCK_N, split=True, **mask):
    """For each block of queries the tiles that it visits: (first key, end, is masked)."""
    first, last = band(M, N, **mask)
    edges = torch.zeros(triton.cdiv(M, BLOCK_M), 4, dtype=torch.int32, device=runtime.device())
    edges_kernel[(len(edges),)](
        edges, M, N, first or 0, last or 0, BLOCK_M, BLOCK_N, first is not None, last is not None, split
    )
    return [[(start, min(start + BLOCK_N, e[3]), part != 1) for part in range(3)
             for start in range(e[part], e[part + 1], BLOCK_N)] for e in edges.tolist()]

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), width_ratios=[26, 40])
for ax, (M, N) in zip(axes, ((32, 26), (26, 40)), strict=True):
    walk = walks(M, N, 8, 8, split=False, causal=True)
    masks.tile_map(ax, visible(M, N, causal=True), walk, 8, f"{M} queries, {N} keys", legend=ax is axes[1])
plt.show()

# %% [markdown]
# *Dots: pairs that are seen. Orange: tiles that are visited, all with a mask in this step. Grey: never loaded. The diagonal ends in the corner at the
# bottom right, for any two lengths.*
#
# The interpreter counts the bytes of K that are really asked for. It must be the sum of the ends:

# %%
for M, N in ((128, 128), (100, 150), (150, 100)):
    x = inputs(1, 1, 1, M, N, 32)
    read = hbm_traffic(flash_attention_forward, *x, causal=True, tile=Tile(16, 16, 4, 2)).read_from["k"]
    ends = sum(walk[-1][1] for walk in walks(M, N, 16, 16, causal=True) if walk)
    print(f"M={M}, N={N}: {read} bytes of K, of {-(-M // 16) * N * 64} without the mask")
    assert read == ends * 32 * 2

# %% [markdown]
# ## 5 · Tiles that need no mask
#
# Most of the orange tiles above are full of dots. Comparing positions there is work for nothing: two comparisons and a select for each score. So
# where does a tile stop being full? Where the *first* row of the block stops seeing it. The whole step is one line:

# %%
show.diff(text(STEPS[2]), text(STEPS[3]), context=2)

# %% [markdown]
# `whole_end` is rounded *down* to a tile. (In the example above row 16 sees 97 keys. With `BLOCK_N` 32 `whole_end` is 96.) Before it, every row sees
# everything, and no key is past the end. The tile at `whole_end` is the first that is cut. Now the loop's three parts have something to do: part 1 is
# the full tiles, and there `part != 1` is false when the kernel is compiled. No mask on the scores, and none on the loads.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), width_ratios=[26, 40])
for ax, (M, N) in zip(axes, ((32, 26), (26, 40)), strict=True):
    walk = walks(M, N, 8, 8, causal=True)
    masks.tile_map(ax, visible(M, N, causal=True), walk, 8, f"{M} queries, {N} keys", legend=ax is axes[1])
plt.show()

# %% [markdown]
# *Blue: every row sees the whole tile. Only the diagonal is masked. Where its offset is no multiple of the tile, as in both pictures, it crosses two tiles
# of most blocks of queries.*
#
# How many tiles still pay, at a real size?

# %%
for mask in ({}, {"causal": True}):
    for N in (4096, 4097):
        visited = [tile for walk in walks(N, N, 128, 64, **mask) for tile in walk]
        masked = sum(is_masked for *_, is_masked in visited)
        print(f"N={N}, {mask or 'no mask'}: {len(visited)} tiles, {masked} with a mask")

# %% [markdown]
# Without a causal mask and with a length that the tile divides, none. One key more, and one tile of each block pays. Causal, two tiles of each block do: 6 %
# of all.
#
# What does it save, and what does it cost? The kernel now holds two bodies of the loop, one with a mask and one without. Ask the compiler about the kernel
# with and without that line:

# %% tags=["nbval-ignore-output"]
TILE = Tile(128, 64, 8, 2)
arguments = compile_arguments(torch.bfloat16, 128, TILE, causal=True)
variants = [arguments | {"SPLIT": split} for split in (False, True)]
reports = compile_reports(triton_forward.flash_attention_kernel, variants, targets=["sm_80", "sm_90"])
for report, split in zip(reports, (False, False, True, True), strict=True):
    size = sum(report.instructions.values())
    print(f"{report.target}, SPLIT={split}: {size} instructions, {report.registers} registers,",
          f"{report.spill_bytes} bytes spilled")

# %% [markdown]
# More code, then, and a shorter path through most of it. What that is worth in time only a GPU can say: section 9 has the times.
#
# *Predict: why is it right to test `whole_end` with the first row, and `end` with the last?*
#
# <details><summary>Answer</summary>
#
# With a causal mask the rows of a block see more and more keys. A tile is full if the row that sees least sees all of it: the first. A tile is visited if
# the row that sees most sees any of it: the last.
#
# </details>

# %% [markdown]
# ## 6 · A sliding window
#
# Mistral and Gemma have layers in which a query sees only the keys near it. With `window=(left, right)` query $i$ sees `left` keys before its own position
# and `right` after it: with its own, `left + 1 + right` keys. Now a mask has two borders, so the kernel takes two numbers: **query $i$ sees the keys
# $i + \mathrm{first}$ to $i + \mathrm{last}$**. Causal is the special case without `first`. Query $i$ stands at key $i + N - M$, so first is N − M − left, and
# last is N − M + right. One number stands for both sides, `window=128` for `(128, 128)`; with `causal=True` the right side becomes 0.

# %%
show.diff(text(STEPS[3]), text(STEPS[4]), context=1)

# %% [markdown]
# The left border mirrors the right one. The first row sees furthest to the left, so tiles begin at `start + first`. The last row begins to see at
# `stop - 1 + first`, so from there on tiles are full; rounded *up*. The tiles do not begin at a multiple of BLOCK_N. They begin where the window does,
# so that none is wasted.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6))
for ax, window in zip(axes, ((14, 0), (20, 6)), strict=True):
    walk = walks(40, 40, 8, 8, window=window)
    masks.tile_map(ax, visible(40, 40, window=window), walk, 8, f"window {window}", legend=ax is axes[1])
plt.show()

# %% [markdown]
# *The left window is narrow: between its borders no tile is full. The right one leaves room for one or two.*
#
# What would tiles cost that begin at multiples of BLOCK_N?

# %%
for N, window in ((4096, 128), (4096, 100), (4100, 128), (4100, 1024)):
    own = walks(4096, N, 128, 64, window=(window, 0))
    visited = sum(map(len, own))
    aligned = sum(-(-walk[-1][1] // 64) - walk[0][0] // 64 for walk in own)
    print(f"4096 queries, {N} keys, window {window}: {visited} tiles, aligned {aligned}")
    assert visited <= aligned

# %% [markdown]
# Nothing in training, where there are as many queries as keys: a block's last key is then itself at the end of a tile. With another offset, up to one tile
# per block of queries.
#
# The work of a windowed layer grows with N, not with its square:

# %%
for N in (256, 512, 1024):
    x = inputs(1, 1, 1, N, N, 16)
    options = {"causal": True, "tile": Tile(64, 32, 4, 2)}
    whole, window = (hbm_traffic(flash_attention_forward, *x, window=w, **options).read_from["k"]
                     for w in (None, 128))
    print(f"N={N:4d}: {whole:7d} bytes of K causal, {window:6d} with a window of 128")
assert whole > 3 * window

# %% [markdown]
# Are the four positions right for *every* mask? That is a question for a search. A pair that is seen must be in a visited tile. A tile without a mask must be
# seen whole. And no tile may be visited in which nothing is seen:

# %%
checked = 0
for M, N in ((1, 1), (5, 40), (40, 5), (33, 33), (24, 40)):
    for left in (None, 0, 3, 20):
        for right in (None, 0, 9):
            seen = visible(M, N, window=(left, right))
            reached = torch.zeros_like(seen)
            for block, walk in enumerate(walks(M, N, 8, 4, window=(left, right))):
                for start, end, masked in walk:
                    tile = seen[8 * block : 8 * block + 8, start:end]
                    assert tile.any() and (masked or tile.all())
                    reached[8 * block : 8 * block + 8, start:end] = True
                    checked += 1
            assert reached[seen].all()
print(f"{checked} tiles, each as it should be")

# %% [markdown]
# ## 7 · Soft-cap, scale, dtypes
#
# Gemma 2 bounds its scores: $s$ becomes $c \tanh(s / c)$. It is one more constant, and one line in the loop:

# %%
show.diff(text(STEPS[4]), text(STEPS[5]), context=1)

# %% [markdown]
# Where is $c$? In the scale. The loop computes $2^{\,s \cdot \mathrm{scale\_log2} - m}$, so with a cap `scale_log2` is $c \log_2 e$, and what the line
# returns is $\tanh$ alone, between $-1$ and $1$. What goes into the $\tanh$ is the score times scale / $c$. That factor, times $2 \log_2 e$, is
# `tanh_scale`. And $\tanh$ itself is made of the exponential, which every tool of this course has:
#
# $$\tanh x = 1 - \frac{2}{1 + e^{2x}} = 1 - \frac{2}{1 + 2^{2 x \log_2 e}}$$
#
# Why this form? $\tanh x = (e^{2x} - 1) / (e^{2x} + 1)$ says the same, and is $\infty / \infty$ for large $x$.

# %%
@triton.jit
def cap_kernel(x_ptr, y_ptr, tanh_scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, soft_capped(tl.load(x_ptr + i), tanh_scale))


x = torch.cat([torch.linspace(-20, 20, 62), torch.tensor([-math.inf, math.inf])]).to(runtime.device())
y = torch.empty_like(x)
cap_kernel[(1,)](x, y, 2 * math.log2(math.e), BLOCK=64)
assert (y - torch.tanh(x)).abs().max() < 1e-6
print("as torch.tanh, from -inf to inf; the ends are", y[-2:].tolist())

# %% [markdown]
# There are two others, which the interpreter cannot run but the compiler can: libdevice, NVIDIA's library, has a `tanh`, and since Turing the chip has `tanh.approx.f32`. What
# does each add to a kernel that only multiplies by a scale, in instructions per number?

# %% tags=["nbval-ignore-output"]
@triton.jit
def scaled_kernel(x_ptr, y_ptr, scale, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) * scale
    if KIND == "ours":
        x = soft_capped(x, 2 * 1.4426950408889634)
    if KIND == "libdevice":
        x = libdevice.tanh(x)
    if KIND == "tanh.approx":
        x = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(y_ptr + i, x)


KINDS = ("scale alone", "ours", "libdevice", "tanh.approx")
pointers = {"x_ptr": torch.float32, "y_ptr": torch.float32, "scale": 0.1, "BLOCK": 1024}
arguments = [pointers | {"KIND": kind} for kind in KINDS]
alone, *capped = compile_reports(scaled_kernel, arguments, targets=["sm_90"])
for kind, report in zip(KINDS[1:], capped):
    more = report.instructions - alone.instructions
    del more["NOP"]
    units = {name: n // 8 for name, n in more.items() if name.startswith("MUFU")}  # 8 numbers per thread
    print(f"{kind:11}  {more.total() / 8:2.0f} per number, of which {units}")
    assert (kind == "tanh.approx") == (more.total() < 12)

# %% [markdown]
# One instruction would do, and FlashAttention takes it. So the price of a soft-cap in section 9 is that of *our choice*. It buys accuracy. NVIDIA's manual lets `tanh.approx` be off by $2^{-11}$ of its value: with a cap of 30 by 0.015 in the score, so 1.5 % in a weight, which bf16 rounds by 0.2 %.

# %% [markdown]
# A mask and a cap have an order: first the cap, then the mask. The other way round $-\infty$ becomes $-c$, and every masked key gets a share. (FlashAttention's
# pull request 1025 discusses it. The ONNX standard had it wrong until its issue 7865.)
#
# The remaining options are arguments. A scale may be anything, also negative or 0 (0 makes every key equal). fp16, bf16 and fp32 are one kernel. TF32, with
# its 10 bits, is for those who ask for it:

# %%
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    x = inputs(1, 2, 1, 40, 70, 32, dtype)
    for options in ({"scale": -0.3}, {"scale": 0.0}, {"causal": True, "window": 30, "softcap": 5.0}):
        assert of_bound(*x, **options) <= 1
want = attention(*x)[0].cpu()
error = [(flash_attention_forward(*x, allow_tf32=ask)[0].cpu() - want).abs().max() for ask in (False, True)]
assert error[0] < 2e-6 and 1e-5 < error[1]
print("three dtypes, each with three sets of options: within the bounds")
print("float32: error below 2e-6; with allow_tf32=True above 1e-5")

# %% [markdown]
# But only TF32 is multiplied on the tensor cores. There is a way to have both. Split each float32 number into what TF32 keeps and what is left, which is again
# nearly a TF32 number. A product of two numbers is then four products. Three of them are enough: the fourth, left times left, is too small to be seen.
#
# `tl.dot` does it for `input_precision="tf32x3"`. Here it is by hand:

# %%
def kept(x):
    """What TF32 keeps of float32 numbers: the sign, the exponent, 10 bits of the mantissa."""
    return (x.view(torch.int32) & -(2**13)).view(torch.float32)


a, b = torch.randn(64, 64), torch.randn(64, 64)
a_left, b_left = kept(a - kept(a)), kept(b - kept(b))
one = kept(a).double() @ kept(b).double()
three = one + kept(a).double() @ b_left.double() + a_left.double() @ kept(b).double()
exact = a.double() @ b.double()
scale = (a.double().abs() @ b.double().abs()).max()
for name, product, bits in (("one", one, 10), ("three", three, 20)):
    assert 2.0 ** -(bits + 4) < (product - exact).abs().max() / scale < 2.0**-bits
    print(f"{name:5} TF32 product(s): right to more than {bits} bits")

# %% [markdown]
# float32 itself has 24. Sums of many products have rounding errors of their own, so the checker's bound for float32 sees no difference: the kernel's errors
# on the H200 are 0.06 of the bound with either. So for float32 our kernels take the three products, up to a head size of 128. (Above it the split numbers do
# not fit into registers.) This costs three times the products, and gains the tensor cores.

# %% [markdown]
# What is `lse` for? The backward pass of phase 5 makes P again from it. And it merges: cut the keys in two, attend to each half, and weigh the two results
# by their `lse`. This is how a long sequence is spread over programs, or over GPUs.

# %%
q, k, v = inputs(1, 2, 1, 40, 200, 64)
(o1, lse1), (o2, lse2) = (flash_attention_forward(q, k[:, :, part], v[:, :, part])
                          for part in (slice(0, 77), slice(77, None)))
lse = torch.logaddexp(lse1, lse2)
merged = o1 * torch.exp(lse1 - lse)[..., None] + o2 * torch.exp(lse2 - lse)[..., None]
want, want_lse = attention(q, k, v)
assert (merged.cpu() - want.cpu()).abs().max() < 2e-3 and (lse.cpu() - want_lse.cpu()).abs().max() < 1e-5
print("two halves of the keys, merged by their lse: right")

# %% [markdown]
# ## 8 · Tiles fetched by the copy engine
#
# So far each thread computes addresses and asks for 16 bytes at a time. Hopper and later chips have a copy engine, the TMA (Tensor Memory Accelerator). It
# is told once what a matrix looks like: where it begins, its shape, its strides, the size of a box. That is a *tensor descriptor*. Then one
# thread says "the box at row 64", and the engine fetches it.

# %%
show.diff(text(STEPS[5]), text(STEPS[6]), context=1)

# %% [markdown]
# - The shape in the descriptor is `[N, HEAD_DIM]`, the box is `[BLOCK_N, BLOCK_D]`. Outside of the shape the engine fills in zeros by itself. So padding
#   needs no mask.
# - Only full tiles come this way. The engine knows the end of the matrix, and not the end of a window. So a tile that is cut is loaded with pointers
#   and a mask, as before.
# - It has conditions: the last stride is 1, and rows begin on 16 bytes. The launcher says so when they are not met.

# %%
x = inputs(1, 4, 2, 70, 130, 40)
assert of_bound(*x, tma=runtime.INTERPRETED or torch.cuda.get_device_capability()[0] >= 9) <= 1
try:
    flash_attention_forward(*inputs(1, 1, 1, 20, 20, 59), tma=True)
except ValueError as error:
    print(error)

# %% [markdown]
# The compiler's report shows the engine at work. `UTMALDG` is its instruction; `LDGSTS` is the copy of 16 bytes per thread.

# %% tags=["nbval-ignore-output"]
pair = [compile_arguments(torch.bfloat16, 128, Tile(128, 64, 8, 2), tma=tma) for tma in (False, True)]
plain, boxed = compile_reports(triton_forward.flash_attention_kernel, pair, targets=["sm_90"])
for name, r in (("pointers", plain), ("descriptors", boxed)):
    print(f"{name:12}: {r.instructions['LDGSTS']} LDGSTS, {r.instructions['UTMALDG']} UTMALDG,",
          f"{sum(r.instructions.values())} instructions, {r.registers} registers")
assert plain.instructions["UTMALDG"] == 0 < boxed.instructions["UTMALDG"]

# %% [markdown]
# It is an option, off unless asked for. Is it faster? Only a GPU can say. `flashlab bench industrial` has times of all the kernels of this lecture,
# and keeps them in a record. The cells that read it show a part for each GPU that it was run on. A number above 1: the
# copy engine is faster than pointers.

# %%
runs = industrial.recorded()
print("runs recorded:", len(runs))
for run in industrial.having(runs, "shapes"):
    display(industrial.ratio_table(run, industrial.BOXES, [industrial.OURS]))

# %% [markdown]
# ## 9 · What each step costs to have
#
# Four of the steps, for an A100 (`sm_80`) and an H100 or H200 (`sm_90`), with a head size of 128 and the tile of 128 × 64. It is one tile for all, so that
# they compare; section 10 chooses others for Hopper. A thread has at most 255 registers. What does not fit is *spilled* to slow memory. (Numbers differ
# between compilers, so the tests do not compare this table. They do hold that next to nothing spills.)

# %% tags=["nbval-ignore-output"]
OPTIONS = {"heads": {}, "causal": {"causal": True}}
OPTIONS["window"] = OPTIONS["causal"] | {"window": 128}
OPTIONS["softcap"] = OPTIONS["window"] | {"softcap": 30.0}
arguments = [compile_arguments(torch.bfloat16, 128, TILE, **options) for options in OPTIONS.values()]
reports = compile_reports(triton_forward.flash_attention_kernel, arguments, targets=["sm_80", "sm_90"])
rows = []
for name, a, b in zip(OPTIONS, reports[::2], reports[1::2], strict=True):
    rows.append([name, *(x for r in (a, b) for x in (r.registers, r.spill_bytes, r.shared_bytes // 1024,
                                                     r.instructions["MUFU.EX2"]))])
    assert a.fits and b.fits and max(a.spill_bytes, b.spill_bytes) <= 64
facts = ("registers", "spilled", "KiB", "ex2")
heads = [f"{target}: {fact}" for target in ("sm_80", "sm_90") for fact in facts]
print("triton", triton.__version__)
show.table(rows, ["step", *heads])

# %% [markdown]
# Read the column of `ex2`, exponentials in the program's text. The soft-cap adds one for each score, as many as the softmax has, and a reciprocal, which comes from the same unit. An SM makes 16
# of these per clock, beside a thousand multiply-adds and more on the tensor cores, so a cap is not free. A window adds a third body of the loop to the text. It is
# not run unless tiles are cut.
#
# And in time? The record has launches with one thing more or less, at $N = 4096$. What can be hoped for is the share of the scores that a mask leaves:

# %%
causal = visible(4096, 4096, causal=True).sum().item()
print(f"causal: {causal / 4096**2:.3f} of all scores")
for keys in (1024, 128):
    left = visible(4096, 4096, window=(keys - 1, 0)).sum().item()
    print(f"a window of {keys}: {left / causal:.3f} of the causal scores")

# %% [markdown]
# Each bar is the time *with* it over the time *without* it:

# %%
IDEAS = {
    "a causal\nmask": ("causal", "whole"),
    "no mask on\nwhole tiles": ("causal", "causal, every tile masked"),
    "window 1024\n(over causal)": ("window of 1024", "causal"),
    "window 128\n(over causal)": ("window of 128", "causal"),
    "a soft-cap": ("whole, soft-cap", "whole"),
    "descriptors": ("whole, descriptors", "whole"),
    "descriptors,\ncausal": ("causal, descriptors", "causal"),
}
for run in industrial.having(runs, "options"):
    figure, ax = plt.subplots(figsize=(8.6, 3.2))
    bars = {f"D = {d}": [ms.get(a, math.nan) / ms.get(b, math.nan) for a, b in IDEAS.values()]
            for d, ms in industrial.option_times(run).items()}
    colored = {name: (bars[name], color) for name, color in zip(bars, ("sky", "blue"), strict=True)}
    curves.ratio_columns(ax, list(IDEAS), colored, ylabel="time with / without", title=run["machine"]["gpu"])
    plt.show()

# %% [markdown]
# A causal mask comes close to its share of the scores. A window of 128 does not. Every program also starts, loads Q, stores O, and computes tiles whole that
# the mask cuts: with so few tiles in each program that should weigh most. The soft-cap costs most of all, with our exact tanh: an exponential and
# a reciprocal more for each score.

# %% [markdown]
# ## 10 · Which tile?
#
# A large tile reads K and V less often. But it must fit: into the shared memory of a block and into 255 registers per thread. GPUs differ in the first. So
# there is a table of recorded choices, by class of chip, head size and dtype:

# %%
rows = []
for chip, masks_ in (("hopper", (False, True)), ("ampere", (False,)), ("consumer", (False,))):
    for masked in masks_:
        for choice in tiles.recorded("forward", chip, torch.bfloat16, masked):
            mask = ("whole", "masked")[masked] if len(masks_) > 1 else "both"
            rows.append([chip, f"up to {choice.head_dim}", mask, *choice.tile, choice.source])
show.table(rows, ["chip", "head_dim", "mask", *Tile._fields, "source"])

# %% [markdown]
# `source` says what a choice rests on. "compiled" means: a usual tile, which fits and does not spill, but nobody has timed it on such a chip.
# "measured" means timed.
#
# Why not the largest that there is? Ask the compiler about the choice for Hopper, and about three other tiles:

# %% tags=["nbval-ignore-output"]
choice = next(c for c in tiles.recorded("forward", "hopper", torch.bfloat16, True) if c.head_dim >= 128)
tried = [choice.tile, Tile(128, 128, 8, 2), Tile(128, 64, 4, 2), Tile(256, 64, 8, 2)]
arguments = [compile_arguments(torch.bfloat16, 128, tile, causal=True) for tile in tried]
reports = compile_reports(triton_forward.flash_attention_kernel, arguments, targets=["sm_86", "sm_90"])


def verdict(r):
    return f"{r.shared_bytes // 1024} KiB{'' if r.fits else ' (too much)'}, {r.spill_bytes} bytes spilled"


pairs = zip(tried, reports[::2], reports[1::2], strict=True)
rows = [[*tile, verdict(a), verdict(b)] for tile, a, b in pairs]
show.table(rows, [*Tile._fields, "sm_86, limit 99 KiB", "sm_90, limit 227 KiB"])

# %% [markdown]
# Spilled bytes are per thread. A spill is a warning, found without a GPU. How much it costs only the stopwatch says: in the figure below, the tile of 128 ×
# 64 with 4 warps and 2 stages is spilled here, and yet it is within 10 % of the best at $D = 128$. (The times are of Triton 3.6.0.)
#
# What the compiler cannot say is which of the tiles that fit is fastest. **Autotuning** times them. The search space is small on purpose:

# %% tags=["nbval-ignore-output"]
print(len(SEARCH["forward"]), "tiles, from", tuple(SEARCH["forward"][0]), "to", tuple(SEARCH["forward"][-1]))
try:
    flash_attention_forward(*inputs(1, 1, 1, 64, 64, 64), tune_tile=True)
    print("tuned")
except RuntimeError as error:
    print(error)

# %% [markdown]
# With a GPU `tune_tile=True` times them all on your inputs. That takes a while, because each is compiled first. The fastest is remembered on this machine, by
# the GPU's name and by the lengths' powers of two. Without being asked nothing is tuned: the first call should not make you wait.
#
# The bench has timed the whole space once, at $N = 4096$. How much does a wrong tile lose?

# %%
def fields(t):
    return f"{t.BLOCK_M} rows, {t.num_warps} warps", f"{t.BLOCK_N}\n{t.num_stages}"


names = zip(*map(fields, SEARCH["forward"]), strict=True)
rows, columns = (list(dict.fromkeys(x)) for x in names)  # without repeats
for run in industrial.having(runs, "tune"):
    times = industrial.tile_times(run, "forward")
    figure, axes = plt.subplots(3, 2, figsize=(8.6, 6.4), sharex=True, sharey=True)
    for ax, ((d, causal), found) in zip(axes.flat, times.items(), strict=False):
        slower = {fields(t): ms / found[0][1] for t, ms in found}
        curves.matrix(ax, rows, columns, slower, f"D = {d}, {'causal' if causal else 'whole'}")
    figure.supxlabel("keys of a tile, below them num_stages")
    plt.show()
    print(run["machine"]["gpu"])

# %% [markdown]
# *Each number is the time over that of the fastest tile. A dash: the tile does not fit, or was not timed.* A few tiles are within 6 % of the best. A bad one
# takes two to six times as long. Eight warps for 64 rows are slow everywhere. It fits that four warps hold 64 rows in one product of Hopper's tensor cores (section 12):
# eight share its columns, and a row's maximum has to cross from four to the others. Nothing here isolates it.

# %% [markdown]
# Few queries are a case of their own. A program computes all rows of its block, also those that are not there. So with 20 queries the block shrinks:

# %%
for rows in (1, 20, 64, 65):
    work = tiles.Work("forward", 128, torch.bfloat16, True, rows, 4096, 32)
    print(f"{rows} queries: BLOCK_M", tiles.choose(work, torch.device("cpu")).BLOCK_M)

# %% [markdown]
# ## 11 · The whole kernel
#
# Here is the kernel as it stands in the package, the one text behind all the steps. Read it with the constants in mind: every
# `if` in it is decided before the GPU sees anything.

# %%
# FROM flashlab.attention.triton_forward: flash_attention_kernel

# %% [markdown]
# What has not been said yet, from top to bottom:
#
# - **`do_not_specialize`.** Triton compiles a kernel anew for arguments that are 1, or multiples of 16. That helps with strides. For the lengths the code is
#   the same to the instruction, so one kernel serves them all.
# - **`LSE_ptr` has no strides.** The launcher allocates it, so it is contiguous: `batch_head * M + offs_m`.
# - **`load_tile(q_ptrs, ..., True)`.** Q is loaded once, so its mask costs nothing that counts.
# - **`stop_m`.** The rows past M do not exist, so they must not move the edges.
# - **`tile_step`.** `k_ptrs` are made once. Tile after tile only one number is added to them.

# %% [markdown]
# - **`part != 1` in `load_tile`.** The third part ends where K ends, or where the window does. In both cases `edges[3]` is the first row that may not be
#   loaded.
# - **`p.to(v.dtype)`.** P is rounded to 16 bits for the tensor cores. `l_i` is summed before that, in float32.
# - **`input_precision=PRECISION`** is "tf32x3" ("ieee" above a head size of 128) or, if asked for, "tf32". It concerns float32 only.

# %% [markdown]
# The cell above has defined the kernel anew, in this notebook. Change a line of it, if you like, run both cells, and see what the checker says. It goes to
# the launcher, and to the checker: causal and not, grouped, three dtypes, empty inputs, rows that see no key, strides with gaps of NaN.

# %%
def ours(q, k, v, *, causal=False, scale=None):
    return flash_attention_forward(q, k, v, causal=causal, scale=scale, kernel=flash_attention_kernel)


dtypes = (torch.float16, torch.bfloat16, torch.float32)
report = verify(ours, causal=True, gqa=True, dtypes=dtypes, head_dims=(64, 40), empty=True, max_seq=300)
print(report.verdict)

# %% [markdown]
# The window and the soft-cap are not in the checker's list. Here they are against the formula, with lengths that no tile divides:

# %%
x = inputs(1, 6, 2, 75, 133, 40)
for window in (None, 20, (30, 10), (None, 5)):
    for softcap in (None, 2.0):
        error = of_bound(*x, causal=window == 20, window=window, softcap=softcap, tile=Tile(32, 16, 4, 2))
        assert error <= 1
print("8 combinations of window and soft-cap, within their bounds")

# %% [markdown]
# ## 12 · The same loop in Gluon
#
# The kernel above says *what* is computed. Three other things the compiler has decided for us until now:
#
# | | in Triton | in Gluon |
# |---|---|---|
# | Which thread holds which element of a tile? | the compiler | you, by a *layout* |
# | When does a copy begin, and who waits for it? | the compiler, from `num_stages` | you, with *barriers* |
# | When is a product waited for? | the compiler | you |

# %% [markdown]
# (This section is long. Without a Hopper GPU you may read it up to the timeline of the first kernel, and go on at "What the compiler makes of them".)
#
# **Gluon** is the layer under Triton, and comes with it: the same programs, tiles and Python, but these decisions are yours. So a Gluon kernel is
# written for one kind of chip. Ours are for Hopper, the H100 and H200.

# %% [markdown]
# There are three kernels. Each is the one before with one idea more:
#
# - `one_tile`: a tile of K and one of V are fetched, waited for, and used. Then come the next.
# - `pipelined`: tiles are fetched ahead, and two products are under way at a time.
# - `specialised`: one warp only fetches, the others only compute.
#
# A warp, as in phase 1, is 32 threads that execute together. A thread's number in its warp, 0 to 31, is called its *lane*. Four warps are a
# **warpgroup**. On Hopper a warpgroup starts a product together. Its 128 threads then hold 64 rows of the result.

# %%
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)

from flashlab.attention import gluon_forward
from flashlab.attention.gluon_forward import LN_2, all_threads
from flashlab.figures import fragments, timelines

# %% [markdown]
# ### Which thread holds which element
#
# A product leaves its result in registers, in an order that the hardware sets. Gluon calls this order `NVMMADistributedLayout`. It can be written down
# with bits. A register of a thread has a number, and so have its lane and its warp. **Each bit of these numbers is a step in the tile.**
# To find an element, add up the steps of the bits that are 1:

# %%
# A step is (rows, columns). The first is that of bit 0.
REGISTER = ((0, 1), (8, 0), (0, 8), (0, 16), (0, 32), (0, 64))
LANE = ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))
WARP = ((16, 0), (32, 0))


def place(register, lane, warp):
    """The (row, column) of a 64 x 128 product that this register of this thread holds."""
    numbers = ((register, REGISTER), (lane, LANE), (warp, WARP))
    steps = [step for number, bits in numbers for bit, step in enumerate(bits) if number >> bit & 1]
    return tuple(map(sum, zip((0, 0), *steps, strict=True)))


holder = {place(r, lane, w): (w, lane) for w in range(4) for lane in range(32) for r in range(64)}
assert len(holder) == 64 * 128, "each element is held once"
print("lane 5 of warp 1 holds", *(place(register, 5, 1) for register in range(6)), "...")

# %% [markdown]
# By hand: register 3 is `11` in bits, so it adds (0, 1) and (8, 0). Lane 5 is `101`, and adds (0, 2) and (1, 0). Warp 1 adds (16, 0). Together that is
# (25, 3), the fourth above.
#
# Is it what the hardware does? The compiler knows. The next kernel makes a tile in the layout of a product, and converts it to our bits.
# With `assert_trivial` it does not compile if any element would change its thread. It asks the same of `P_LAYOUT`, in which the second product
# wants its left operand, P:

# %%
@gluon.jit
def agrees_kernel(REGISTER: gl.constexpr, LANE: gl.constexpr, WARP: gl.constexpr):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    BITS: gl.constexpr = gl.DistributedLinearLayout(REGISTER, LANE, WARP, [], [64, 128])
    s = gl.full([64, 128], 1.0, gl.float32, S_LAYOUT)
    gl.convert_layout(s, BITS, assert_trivial=True)
    gl.convert_layout(s.to(gl.float16), P_LAYOUT, assert_trivial=True)


bits = {"REGISTER": REGISTER, "LANE": LANE, "WARP": WARP}
right, wrong = compile_reports(agrees_kernel, [bits, bits | {"LANE": LANE[::-1]}], targets=["sm_90"])
print("our bits:", "accepted" if right.ok else "refused")
print("the lane's bits in another order:", "accepted" if wrong.ok else "refused")
print("the compiler's own:", re.search(r"reg_bases=\[\[.*warp_bases=\[.*?\]\]", wrong.error)[0])
assert right.ok and "is not trivial" in wrong.error
assert all(str([list(step) for step in steps]) in wrong.error for steps in (REGISTER, LANE))

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 4.2), width_ratios=[1, 1.35])
fragments.warps(axes[0], holder, (64, 128), "64 x 128: the warps")
fragments.lanes(axes[1], holder, (16, 16), "its corner: the lanes of warp 0", marked=5)
plt.show()

# %% [markdown]
# *Left: each warp has 16 rows, whole. Right: the first 16 rows and columns, with the lane that holds each element. Black: what lane 5 holds.*
#
# Softmax needs the maximum and the sum of each row. So the question is: in how many threads is a row?

# %%
threads = [{holder[row, column] for column in range(128)} for row in range(64)]
own = {row for (row, _), who in holder.items() if who == (1, 5)}
print("row 17 is in", sorted(threads[17]), "(warp, lane)")
print("lane 5 of warp 1 holds numbers of the rows", sorted(own))
assert all(len(t) == 4 and len({lane // 4 for _, lane in t}) == 1 for t in threads)

# %% [markdown]
# In four neighbouring threads, a *quad*. Each of them finds the maximum of its own 32 numbers. Two exchanges, and all four know that of the row.
# Nothing goes through shared memory.
#
# This is chosen in the layout's numbers. `NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])` says: a product of Hopper (version 3),
# all `warps` along the rows and one along the columns, 16 rows and `BLOCK_N` columns for each. With eight warps a tile has 128 rows: one more
# bit in `WARP`. Triton's compiler makes such choices too. Here you see them made.

# %% [markdown]
# ### A copy, and who waits for it
#
# Section 8's copy engine fetches a box by itself. In Gluon one orders the box, and waits for it later:

# %%
# FROM flashlab.attention.gluon_forward: load_box

# %% [markdown]
# `ready` is an **mbarrier**, a counter in shared memory. It counts *phases*, beginning with phase 0.
#
# - `init(ready, count=1)`: a phase needs one report.
# - `expect(ready, bytes)` is that report, and says how many bytes will come. The engine takes them off as they arrive.
# - When no report and no byte is missing, the phase is over. The next begins by itself.
# - `wait(ready, parity)` waits for the end of a phase. It knows the phase by its last bit, the *parity*: that is all the hardware compares.

# %%
class Barrier:
    """What an mbarrier counts."""

    def __init__(self, count):
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def change(self, reports=0, nbytes=0):
        self.missing -= reports
        self.bytes += nbytes
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passes(self, parity):
        return self.phase % 2 != parity  # the phase under way is another: that one is over

# %%
def seen(barrier):
    return [barrier.phase, *("passes" if barrier.passes(parity) else "waits" for parity in (0, 1))]


ready = Barrier(count=1)
rows = [["the barrier is new", *seen(ready)]]
for i in range(3):
    ready.change(reports=1, nbytes=32768)
    rows.append([f"tile {i} is ordered", *seen(ready)])
    ready.change(nbytes=-32768)
    rows.append([f"tile {i} has arrived", *seen(ready)])
show.table(rows, ["after this", "the phase under way", "wait(ready, 0)", "wait(ready, 1)"])

# %% [markdown]
# So tile $i$ is waited for with parity `i & 1`. Look at the first row, too: `wait(ready, 1)` passes on a new barrier. The third kernel uses that, for places
# that are free at first.
#
# *Predict: a kernel waits with parity 0 for every tile. What happens at tile 1?*
#
# <details><summary>Answer</summary>
#
# When tile 1 is ordered, phase 1 is under way. `wait(ready, 0)` passes, because phase 0 is over. So the product reads what lies there: tile 0, or a part
# of tile 1. **A wrong parity is no error.** Nothing hangs, and the result is wrong, or even right when the copy was quick.
#
# </details>

# %% [markdown]
# The other two kernels have `STAGES` places for tiles, used in turn, and a barrier for each. Then tile $i$ lies in place `i % STAGES`, and it is
# the tile number `i // STAGES` there:

# %%
STAGES = 2
rows = [[i, i % STAGES, i // STAGES, i // STAGES & 1] for i in range(6)]
show.table(rows, ["tile", "place", "phase of its barrier", "parity to wait for"])

# %% [markdown]
# ### The first kernel, line by line
#
# First the softmax of a tile. It is section 11's, with the same names, but for one thing: each of the four threads of a row keeps a sum of its own. They are
# added up once, at the end.

# %%
# FROM flashlab.attention.gluon_forward: sums_of_threads, softmax_step, masked, along_rows

# %% [markdown]
# - **`SliceLayout`** is the layout of a tile without one of its axes: `rows` or `columns`, held by the threads that need them.
# - **`along_rows`**: `correction` was made in the layout of the scores, and multiplies `acc`, which has `BLOCK_D` columns. In both a row is in the
#   same quad. So the conversion moves nothing.
#
# Three small functions are left. They say where a program works, how many tiles it visits, and how it ends:

# %%
# FROM flashlab.attention.gluon_forward: place_of, tiles_seen, store_rows

# %% [markdown]
# `tiles_seen` is section 4's `end`. The copy engine also stores: rows past the end it leaves out. `fence_async_shared` is for a detail of
# the hardware: what threads wrote to shared memory, the engine sees only after this fence.
#
# Now the kernel. Read the loop at its end first:

# %%
# FROM flashlab.attention.gluon_forward: one_tile_kernel

# %% [markdown]
# | section 11 | here | what is said now |
# |---|---|---|
# | `load_tile(k_ptrs, ...)` | `load_box(k_desc, ...)`, `mbarrier.wait` | when a copy begins, and when it must have ended |
# | `tl.dot(q, k.T)` | `warpgroup_mma(q, k.permute((1, 0)), ...)` | `q` and `k` are read from shared memory, `s` comes in `S_LAYOUT` |
# | `tl.where(in_band(...))` | `masked` | each thread compares the positions that it holds |
# | `p.to(v.dtype)` | `gl.convert_layout(p.to(...), P_LAYOUT)` | P stays in the threads that computed it |
# | `acc * correction[:, None]` | `acc * along_rows(correction, acc)` | so does `correction` |
# | `tl.dot(p, v, acc)` | `warpgroup_mma(p, v, acc)` | `p` comes from registers, `v` from shared memory |

# %% [markdown]
# - **`DotOperandLayout(0, O_LAYOUT, 2)`**: the left operand of a product whose result has `O_LAYOUT`, two 16-bit numbers in a register.
# - **`q_desc.layout`** is the order of a box in shared memory, in which products read it fast. (Phase 8 explains it: a swizzle.)
# - **`k.permute((1, 0))`** moves nothing. The product reads K along the other axis.
# - **`use_acc=False`**: the product is not added to anything, so `no_scores` is never read.

# %% [markdown]
# - **The tiles go from right to left.** Then those that need a mask come first. This kernel masks them all. The next two treat the first tile before their
#   loop, so the loop is free of masks.
# - **Both waits have the parity `i & 1`**, as in the table above.
# - K and V have one place each. So tile $i + 1$ can be ordered only when tile $i$ has been used. That is what is wrong with this kernel.

# %% [markdown]
# ### Who does what, and when
#
# How much is wrong with it? Here is a model of one multiprocessor. It has three units: the copy engine, the tensor cores, and the units that make
# the softmax. A unit does one thing at a time, and begins when what it needs is there.

# %%
PRODUCT = 2 * 128 * 128 * 128 // 4096  # clocks: 128 queries and keys, head size 128, 4096 FLOPs per clock
EXPONENTIALS = 128 * 128 // 16  # 16 per clock
SOFTMAX = EXPONENTIALS * 3 // 2  # assumed: half as much again for maxima, sums, masks
COPY = 32768 // 64  # assumed: 64 bytes per clock
print(f"a product {PRODUCT} clocks, the exponentials {EXPONENTIALS}, with the rest {SOFTMAX}, a copy {COPY}")


def timeline(orders):
    """When each (unit, name, clocks, names of what it needs) begins: bars (unit, name, start, clocks)."""
    ends, free, bars = {}, {}, []
    for unit, name, clocks, needs in orders:
        start = max([free.get(unit, 0), *(ends[x] for x in needs if x in ends)])
        ends[name] = free[unit] = start + clocks
        bars.append((unit, name, start, clocks))
    return bars

# %%
def one_tile_orders(tiles):
    for i in range(tiles):
        yield "copies", f"K{i}", COPY, [f"O{i - 1}"]  # K i is ordered when O of the tile before is done
        yield "copies", f"V{i}", COPY, [f"O{i - 1}"]
        yield "products", f"S{i}", PRODUCT, [f"K{i}"]  # S i needs K i
        yield "softmax", f"P{i}", SOFTMAX, [f"S{i}"]
        yield "products", f"O{i}", PRODUCT, [f"P{i}", f"V{i}"]


def busy(bars):
    """The tensor cores' share of the time, of a long run."""
    return sum(clocks for unit, *_, clocks in bars if unit == "products") / max(s + c for *_, s, c in bars)


figure, ax = plt.subplots(figsize=(8.6, 1.9))
timelines.units(ax, timeline(one_tile_orders(3)), "one_tile")
plt.show()
print(f"the tensor cores work {busy(timeline(one_tile_orders(200))):.0%} of the time")

# %% [markdown]
# *S: scores. P: softmax. O: the sums P V. Each number is a tile.* At nearly any time one unit works, and the others wait for it. The tensor cores
# do what all this is for, and they wait half of the time.
#
# So the second kernel does two things differently. It fetches tiles `STAGES` ahead. And it starts *two* products before it waits for one. The loop is
# one new function:

# %%
# FROM flashlab.attention.gluon_forward: pipelined_step

# %% [markdown]
# - **`is_async=True`**: the product is started, and the program goes on. **`warpgroup_mma_wait(1, ...)`** waits until at most one product is
#   under way. Products end in order, so the scores are there. The other one, P V of the tile before, runs beside the softmax.
# - **Only then is the next box ordered** into the place of K: now nothing reads it any more. The same holds for V, after `wait(0)`.
# - **`acc` is rescaled after the wait.** While a product adds to it, nobody else may touch it.

# %% [markdown]
# The rest of the kernel begins and ends the pipeline: the first scores have no P V beside them, and the last P V has no scores. And the loop is written
# twice, with and without a mask, as in section 5. (Open the fold for the whole.)

# %%
show.region(gluon_forward.pipelined_kernel, "pipelined loop", whole_file=False)

# %% [markdown]
# One thing is left. A place may be refilled only when *all* eight warps have read it. So they meet in every step (the compiler adds the barrier; you do not
# see it in the Python), and keep in step: there is a time when all compute softmax, and a time when all wait for products.
#
# The third kernel takes this apart. Each warpgroup has its own 64 rows, and goes at its own pace. Boxes are ordered by one more
# warp, which does nothing else. The step:

# %%
step, after = (show.source_text(f) for f in (gluon_forward.pipelined_step, gluon_forward.specialised_step))
show.diff(step, after, context=1)

# %% [markdown]
# - The loads are gone. In their place is `give_back`: "I have read this place." Such a report goes to a second barrier of the place, `free`. It needs a
#   report from *each* warpgroup: `barriers(STAGES, GROUPS)`. The loading warp waits for it, then refills the place, and `ready` tells the others.
# - With `TURNS` two warpgroups start their products in turn, by a barrier each. So one has its softmax while the other multiplies.

# %%
# FROM flashlab.attention.gluon_forward: give_back, load_part

# %% [markdown]
# - **`parity ^ 1`** in the waits for `free`: on a new barrier such a wait passes at once, and every place is free at first.
# - **`done`** counts tiles over *all* blocks of queries that the program takes. Both sides count alike, so they agree on places and phases, and never
#   exchange a number.
# - K of tile $i$ comes before V of tile $i - 1$: the order in which they are used.

# %% [markdown]
# The other side, `compute_part`, is the second kernel with these reports in it. Here is how a warpgroup treats the first tile of a block of queries;
# the rest is in the fold:

# %%
show.region(gluon_forward.compute_part, "first tile", whole_file=False)

# %% [markdown]
# Both sides are started by one call:

# %%
show.region(gluon_forward.specialised_kernel, "parts", whole_file=False)

# %% [markdown]
# `[4, 1]` are the warps of the second and the third part. The first has the program's own four. `[240, 24]` are their registers. The warp that loads
# needs few. What it gives up the computing warps can use (`setmaxnreg` in the machine code).
#
# Without a mask these programs are *persistent*: there are only as many as the GPU holds at once, and each takes one block of queries after the other. That is why
# `load_part` has a loop over `work`, and counts its tiles on in `done`.
#
# The model again. In the third kernel the two warpgroups, a and b, take turns at the units:

# %%
def pipelined_orders(tiles):
    for i in range(tiles + 1):
        if i < tiles:
            yield "copies", f"K{i}", COPY, [f"S{i - 2}"]
            yield "products", f"S{i}", PRODUCT, [f"K{i}", f"P{i - 1}", f"O{i - 2}"]
        if i > 0:
            yield "copies", f"V{i - 1}", COPY, [f"O{i - 3}"]
            yield "products", f"O{i - 1}", PRODUCT, [f"P{i - 1}", f"V{i - 1}"]
        if i < tiles:
            yield "softmax", f"P{i}", SOFTMAX, [f"S{i}"]


def specialised_orders(tiles):
    for unit, name, clocks, needs in pipelined_orders(tiles):
        if unit == "copies":
            yield unit, name, clocks, [f"{x}{group}" for x in needs for group in "ab"]
            continue
        for group in "ab":
            own = [x if x[0] in "KV" else x + group for x in needs]
            yield unit, name + group, clocks // 2, own

# %%
figure, axes = plt.subplots(2, 1, figsize=(8.6, 3.6), sharex=True)
orders = {"pipelined": pipelined_orders, "specialised": specialised_orders}
for ax, (name, made) in zip(axes, orders.items(), strict=True):
    timelines.units(ax, timeline(made(5)), name)
    print(f"{name}: the tensor cores work {busy(timeline(made(200))):.0%} of the time")
plt.show()

# %% [markdown]
# *In `pipelined` the softmax of a tile runs beside P V of the tile before. In `specialised` one warpgroup's softmax runs beside the other's products.*
#
# This is a model with two assumed numbers. It knows nothing of waits, masks and the cost of starting things. It shows an order, and why the
# order matters. The real speeds are at the end of this section.

# %% [markdown]
# ### What the compiler makes of them
#
# Each kernel is compiled for `sm_90`. The first time this takes half a minute. `HGMMA` is a product of a warpgroup, `UTMALDG` a box from the
# copy engine, `SYNCS` what is done with barriers.

# %% tags=["nbval-ignore-output"]
rows, compiled = [], {}
for step, kernel in gluon_forward.KERNELS.items():
    arguments = gluon_forward.compile_arguments(step, torch.bfloat16, 128, causal=True)
    compiled[step] = r = compile_report(kernel, arguments, target="sm_90")
    counts = [r.instructions[name] for name in ("HGMMA", "UTMALDG", "SYNCS", "SHFL")]
    counts.append(r.ptx.count("setmaxnreg"))
    rows.append([step, r.registers, r.spill_bytes, r.shared_bytes // 1024, *counts])
    assert r.fits and r.spill_bytes == 0 and r.instructions["HGMMA"] and r.instructions["UTMALDG"]
show.table(rows, ["kernel", "registers", "spilled", "KiB", "HGMMA", "UTMALDG", "SYNCS", "SHFL", "setmaxnreg"])

# %% [markdown]
# An HGMMA multiplies 16 columns of its left operand. So a product of 128 is 8 of them, and one loop has 16. `pipelined` has that loop twice, and half
# of it before and after. `specialised` has all of this for each warpgroup. The exchanges in the quads are the `SHFL`: in a loop two for
# the maximum of each of a thread's two rows, and as many for the sums at the end.
#
# And who meets whom? `BAR.SYNC` is where threads wait for each other. A plain `0x0` is for all threads of a program. A second number is
# how many threads meet: `0x80` is 128, one warpgroup.

# %% tags=["nbval-ignore-output"]
for step, r in compiled.items():
    meetings = re.findall(r"BAR\.SYNC\S* (0x\w+(?:, 0x\w+)?)", r.sass)
    print(f"{step:12}", {who: meetings.count(who) for who in sorted(set(meetings))})

# %% [markdown]
# The first number is the barrier's. In `pipelined` all meet, everywhere. In `specialised` most meetings are of one warpgroup with itself, which is what the
# third kernel is for. Those with one number alone are of all threads.
#
# How many programs does a multiprocessor hold at once? It has 65 536 registers, and 228 KiB of shared memory, of which each program takes 1 KiB more
# than it asks for:

# %% tags=["nbval-ignore-output"]
rows, asked = [], [(d, causal) for d in (64, 128) for causal in (False, True)]
arguments = [gluon_forward.compile_arguments("one_tile", torch.bfloat16, d, causal=mask) for d, mask in asked]
reports = compile_reports(one_tile_kernel, arguments, targets=["sm_90"])
for (d, causal), r in zip(asked, reports, strict=True):
    by_registers = 65536 // (32 * r.num_warps * 8 * math.ceil(r.registers / 8))  # given out in eights
    by_memory = 228 * 1024 // (r.shared_bytes + 1024)
    rows.append([d, "causal" if causal else "whole", r.registers, by_registers, by_memory])
show.table(rows, ["head size", "mask", "registers", "programs by registers", "by shared memory"])

# %% [markdown]
# Where two programs of `one_tile` fit, one computes while the other waits. They do for each other what the pipeline does inside a program. And a few registers
# decide it. With two programs of 256 threads each thread may have 128.
#
# ### Run, where there is a Hopper GPU

# %% tags=["nbval-ignore-output"]
reason = gluon_forward.why_not(runtime.device())
for step in gluon_forward.KERNELS if reason is None else ():
    def forward(q, k, v, *, causal, scale, step=step):
        return gluon_forward.flash_attention_gluon(q, k, v, causal=causal, scale=scale, step=step)

    sixteen = (torch.float16, torch.bfloat16)
    report = verify(forward, causal=True, gqa=True, dtypes=sixteen, head_dims=(64, 128))
    print(f"{step}: {report.verdict}")
print("not run here:", reason) if reason else None

# %% [markdown]
# And how fast? This draws what is recorded, at $N = 4096$, beside cuDNN:

# %%
STEPS_AND_COLORS = {"one_tile": "sky", "pipelined": "blue", "specialised": "purple", "cuDNN": "green"}
for run in industrial.having(runs, "gluon"):
    found = industrial.gluon_speeds(run)
    names = [f"D = {d}\n{'causal' if causal else 'whole'}" for d, causal in found]
    bars = {step: ([row.get(step, math.nan) for row in found.values()], color)
            for step, color in STEPS_AND_COLORS.items()}
    top = 1.2 * max(max(row.values()) for row in found.values())
    figure, ax = plt.subplots(figsize=(8.6, 3.6))
    curves.columns(ax, names, bars, fmt="%.0f", ylabel="TFLOP/s", ylim=(0, top), title=run["machine"]["gpu"])
    plt.show()

# %% [markdown]
# The model foresaw 50, 80 and 100 % of the time with products: 1.60 and 1.25 from step to step. Here is what was measured, each step over the one before; the
# fastest of our rows over cuDNN; and other tiles over the last step:

# %%
for run in industrial.having(runs, "gluon"):
    rows = []
    for (d, causal), speed in industrial.gluon_speeds(run).items():
        one, ahead, parts, cudnn = (speed.get(name, math.nan) for name in STEPS_AND_COLORS)
        best = max([v for name, v in speed.items() if name != "cuDNN"], default=math.nan)
        other = max([v for name, v in speed.items() if "keys" in name], default=math.nan)
        ratios = (ahead / one, parts / ahead, best / cudnn, other / parts)
        rows.append([d, "causal" if causal else "whole", *(f"{x:.2f}" if x == x else "" for x in ratios)])
    show.table(rows, ["D", "mask", "loads ahead", "parts", "best, over cuDNN", "other tiles"])

# %% [markdown]
# An empty place was not measured. Read it together with the table of programs above: "loads ahead" below 1 would mean that the pipeline made the kernel
# *slower*, and could be where two programs of `one_tile` fit on a multiprocessor, and one of the pipeline.

# %% [markdown]
# ### What Gluon costs
#
# - **No interpreter.** The kernels of this section run on Hopper and nowhere else. (The tests of this course run their *logic* on a CPU, over a
#   stand-in for barriers, copies and products.)
# - **Nobody checks your barriers.** A wrong one hangs the GPU, or reads an old tile.
# - **It moves.** Gluon is under `triton.experimental`. Between Triton 3.6 and 3.7 `thread_barrier` became `barrier`.
# - **These kernels do less.** fp16 and bf16, head sizes that are multiples of 8, causal or not. No window, no soft-cap, no gradient.
#
# Phase 11 says the same things once more, in CUDA C++.
# %% [markdown]
# ## 13 · The door
#
# A model calls none of this. It calls one function, with a gradient (phase 5 makes it), which takes the kernel where it can. `torch.compile` takes it whole,
# and `flashlab.attention.transformers_door` gives it to models of Hugging Face's transformers.
#
# On a CPU it takes PyTorch's own products, in blocks of queries, unless you say `backend="triton"`.

# %%
q, k, v = inputs(1, 4, 2, 60, 90, 64)
o = flash_attention(q, k, v, causal=True, window=40, backend="triton")
want, _ = attention(q, k, v, causal=True, window=40)
assert (o.cpu() - want.cpu()).abs().max() < 2e-3
by_itself = choose_backend(q, k, v, causal=True, window=40).backend
assert by_itself == ("torch" if runtime.INTERPRETED else "triton")
print("right, by the Triton kernel")
print("float64:", choose_backend(*(x.double() for x in (q, k, v))).reason)

# %% [markdown]
# It refuses what it cannot do, before anything is launched. A kernel with a wrong shape would read the wrong memory, and return numbers.

# %%
attempts = {
    "heads": (q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1), {}),
    "dtypes": (q, k.float(), v, {}),
    "window": (q, k, v, {"window": -3}),
}
for name, (*tensors, options) in attempts.items():
    try:
        flash_attention(*tensors, **options)
    except (TypeError, ValueError) as error:
        print(f"{name}: {error}\n")

# %% [markdown]
# ## 14 · FlexAttention, beside it
#
# PyTorch has a function for masks and scores of your own: FlexAttention. You write two small functions, and `torch.compile` makes them part of
# a Triton kernel much like ours. `score_mod` changes a score. `mask_mod` says whether query `i` sees key `j`. Our options, in its terms:

# %%
q, k, v = inputs(1, 4, 2, 300, 400, 64, torch.float32)


def score_mod(score, b, h, i, j):
    return 30.0 * torch.tanh(score / 30.0)


def mask_mod(b, h, i, j):
    i = i + 400 - 300  # bottom-right
    return (j <= i) & (j >= i - 150)


block_mask = create_block_mask(mask_mod, None, None, 300, 400, device=runtime.device())
flex = flex_attention if runtime.INTERPRETED else torch.compile(flex_attention)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # uncompiled it says that it is slow, which is right
    theirs = flex(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)

# %%
ours_too = flash_attention(q, k, v, causal=True, window=150, softcap=30.0, backend="triton")
want, _ = attention(q, k, v, causal=True, window=150, softcap=30.0)
for name, o in (("FlexAttention", theirs), ("flash_attention", ours_too)):
    assert (o.cpu() - want.cpu()).abs().max() < 1e-4
    print(f"{name}: right")

# %% [markdown]
# A `mask_mod` may be anything, so FlexAttention cannot compute edges from two numbers. It *evaluates* the mask, and keeps a table: for each block of
# queries the list of tiles that are cut, and the list of those that are full. This is the **block mask**. For a causal mask it must agree with our edges:

# %%
def causal(b, h, i, j):
    return j <= i + 128

table = create_block_mask(causal, None, None, 512, 640, device=runtime.device())
cut, full = table.kv_num_blocks[0, 0].tolist(), table.full_kv_num_blocks[0, 0].tolist()
own = walks(512, 640, 128, 128, causal=True)
print("cut:", cut, " full:", full)
assert cut == [sum(masked for *_, masked in walk) for walk in own]
assert full == [sum(not masked for *_, masked in walk) for walk in own]

# %% [markdown]
# | | FlexAttention | the kernel of this lecture |
# |---|---|---|
# | masks | any, by a Python function | bands: causal, windows |
# | the mask costs | a table, built once for each mask and length, kept for all layers | two numbers |
# | scores | any `score_mod`, with its gradient, and that of tensors which it reads | scale, soft-cap |
# | needs | `torch.compile`; compiled again for new functions | Triton |
# | you change | two functions, and options of the kernel | the loop itself |

# %% [markdown]
# Its kernel is one of several. By default it is Triton's, with a tile chosen beforehand; `torch.compile(..., mode="max-autotune")` times several tiles. `kernel_options={"BACKEND": "FLASH"}`, an experiment, puts your two functions into FlashAttention-4's kernel, where that is installed.

# %% [markdown]
# And its speed? With its default tiles, without a mask or with a causal one, in turns with ours. Above 1, ours is faster. An empty place: not measured.

# %%
for run in industrial.having(runs, "shapes"):
    display(industrial.ratio_table(run, industrial.OURS, ["FlexAttention"]))

# %% [markdown]
# And its forms in turns with each other and with cuDNN, in a run of their own, where that was recorded: at $D = 256$. So compare within this table. *FLASH* is ahead of cuDNN without a mask, and so of our Triton kernel. The causal block
# mask it refuses, because its tile of 80 keys does not divide a block:

# %%
print("runs with other forms recorded:", len(industrial.having(runs, "flex")))
for run in industrial.having(runs, "flex"):
    display(industrial.flex_table(run))

# %% [markdown]
# So: take FlexAttention for masks that are not bands (documents packed in one sequence, prefixes), for biases such as ALiBi, and to try an idea in ten
# lines. Take a kernel of your own where the loop itself changes, where a library must not compile at run time, or where its speed is worth your week.
#
# One trap: compiled anew too often, it falls back to the unfused form, with a line in the log or a warning. Then any kernel looks good beside it.

# %% [markdown]
# ## 15 · How fast?
#
# Now beside those who do the same work, all in bf16 on the same inputs: FlashAttention-2 and cuDNN, which PyTorch calls, FlexAttention, compiled, and eager
# attention, which writes its scores to memory. There are 16 384 queries in all, so that short sequences fill the GPU too. Times are of the
# kernels on the GPU, without the launch from Python.

# %%
NAMES = (industrial.OURS, industrial.GLUON, *industrial.PEERS)
for run in industrial.having(runs, "shapes"):
    plots = {f"D = {d}, {mask}": industrial.over_lengths(run, "forward", d, mask == "causal", NAMES)
             for d in (64, 128, 256) for mask in ("whole", "causal")}
    panels(plots, columns=2, ylabel="TFLOP/s", title=run["machine"]["gpu"])
    plt.show()
    print({key: run["machine"][key] for key in ("gpu", "torch", "triton", "date")})

# %% [markdown]
# *Only half of the work counts under a causal mask.* The same as ratios: how many times as fast as each of them is the Triton kernel?

# %%
for run in industrial.having(runs, "shapes"):
    display(industrial.ratio_table(run, industrial.OURS, ["FlashAttention-2", "cuDNN", "eager"]))

# %% [markdown]
# Compare "triton" with "gluon" in the figure. Formula and algorithm are the same. What differs is what section 12 is about: layouts, copies, waits, and the
# tiles that go with them; the order of the blocks, too, and how many of them a program takes. So their distance is what such decisions are worth, made by
# hand. Where Gluon's line is the lower one, the compiler has decided better than we have.

# %% [markdown]
# ### Beside a published table
#
# An earlier course published times of its Triton kernel, causal, with one head, beside eager PyTorch. We have measured its rows again:

# %%
for run in industrial.having(runs, "published"):
    display(industrial.published_table(run, "forward", 64, "bf16"))

# %% [markdown]
# The milliseconds are of two machines and two ways to measure, so they do not compare. What compares is each kernel beside eager attention *on its own
# machine*. One head of a short sequence cannot fill a GPU. Its few programs leave most multiprocessors idle.

# %% [markdown]
# ### What did not help
#
# Some of it is known without a stopwatch:
#
# | tried, or thought of | seen |
# |---|---|
# | tiles of 128 × 128 at $D = 128$, on consumer GPUs | section 10: on `sm_86` they spill; on `sm_90` they do not, and there we take them |
# | tiles of 256 × 64 at $D = 128$ | section 10: they spill on both |
# | 4 warps for 128 rows at $D = 128$ | section 10: each thread holds twice as much, and it spills on both; not the fastest anywhere |

# %% [markdown]
# These were timed on the H200 while the kernel was made. `notes/phase_04_experiments.md` has all the figures:
#
# | tried | seen |
# |---|---|
# | persistent programs: as many as the GPU holds, each with many blocks | 3 % slower at $D = 128$, 26 % at 64: the outer loop costs registers |
# | the longest programs of *all* heads first | up to 36 % slower; programs side by side then read other keys, which L2 may not hold |
# | `warp_specialize=True` on the loop | nothing with 8 warps; with 4 the compiler failed |

# %% [markdown]
# The rest needs a stopwatch. Descriptors are in section 8, loads ahead with two programs on a multiprocessor in section 12. And for tiles: a number is the
# best time that a part of the search space reaches, over the best of all. 1.00: the best tile is one of these.

# %%
PARTS = {
    "64 rows": lambda t: t.BLOCK_M == 64, "128 rows": lambda t: t.BLOCK_M == 128,
    "32 keys": lambda t: t.BLOCK_N == 32, "64 keys": lambda t: t.BLOCK_N == 64,
    "128 keys": lambda t: t.BLOCK_N == 128,
    "4 warps": lambda t: t.num_warps == 4, "8 warps": lambda t: t.num_warps == 8,
    "2 stages": lambda t: t.num_stages == 2, "3 stages": lambda t: t.num_stages == 3,
    "4 stages": lambda t: t.num_stages == 4,
}
for run in industrial.having(runs, "tune"):
    found = industrial.tile_times(run, "forward")
    rows = []
    for part, keep in PARTS.items():  # times are sorted, the fastest first
        best = [next((ms for t, ms in times if keep(t)), math.nan) / times[0][1] for times in found.values()]
        rows.append([part, *(f"{x:.2f}" if x == x else "" for x in best)])
    show.table(rows, ["only", *(f"D = {d}, {'causal' if causal else 'whole'}" for d, causal in found)])

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Batch and heads are programs. Grouped queries are one division.
# - Padded columns are harmless zeros. Padded keys are not.
# - A mask that is a band is two numbers, and four positions per block of queries: never loaded, masked, whole, masked.
# - A `constexpr` makes one text into many kernels.
# - The bytes follow the paper's law: twice the tile of Q, half the traffic.
# - Tiles are chosen by what fits, then by a stopwatch, and the record says which.
# - Gluon puts layouts, barriers and waits into your hands, for one kind of chip.

# %% [markdown]
# Worth trying now:
#
# - Sink tokens, which every query sees, as a second band.
# - Two tiles of columns for a head size of 80.
# - A block mask of your own, for documents that are packed into one sequence.
#
# Phase 5 makes the gradient. There `lse` earns its place.

# %% [markdown]
# ## References
#
# - Tri Dao et al., *FlashAttention*, NeurIPS 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): theorem 2.
# - Tri Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691): blocks of queries in parallel, fewer masks.
# - Joshua Ainslie et al., *GQA*, EMNLP 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245); Noam Shazeer, *Fast Transformer Decoding*, 2019: MQA.
# - Iz Beltagy et al., *Longformer*, 2020, [arXiv:2004.05150](https://arxiv.org/abs/2004.05150): sliding windows.
# - Gemma Team, *Gemma 2*, 2024, [arXiv:2408.00118](https://arxiv.org/abs/2408.00118): soft-caps, windows in every second layer.
# - Juechu Dong et al., *FlexAttention*, 2024, [arXiv:2412.05496](https://arxiv.org/abs/2412.05496).
# - Triton documentation, tutorial *Fused Attention*: full and masked tiles, the search space. Triton's repository, `python/tutorials/gluon`: the language.
# - Jay Shah et al., *FlashAttention-3*, 2024, [arXiv:2407.08608](https://arxiv.org/abs/2407.08608): two products at a time, warps that only load.
# - NVIDIA, *PTX ISA*: mbarrier, `wgmma`, the layout of its result.
# - NVIDIA, *CUDA C++ Programming Guide*: limits of a grid; results per clock, by kind of instruction; tensor maps and the copy engine.
# - flash-attention issue 767 and pull request 1500: offsets in 32 bits. flash-linear-attention issue 172: the limit of grid y and z.
