# %% [markdown]
# # Phase 4 · Industrial Triton
#
# Phase 3's kernel is right, and no model can use it. It takes one head. It has no mask. A head size of 80 is refused. This lecture first writes the plain
# kernel that a model can use, whole. Then it makes that fast, one idea at a time. You will see each idea as a diff, with the reason for it and with
# something that is counted.

# %% [markdown]
# ## What you will be able to do
#
# - Write a kernel for a model's tensors, and its launcher.
# - Put batch and heads on the grid, and share key heads among query heads without a copy.
# - Take any head size, any two lengths and any strides.
# - Compute, for any mask that is a band, which tiles are never loaded, and which need a mask.
# - Add a window, a soft-cap or another scale so that a kernel without them pays nothing.
# - Choose tiles by the compiler's report and by a stopwatch.
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
import warnings

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashlab import choose_backend, flash_attention, runtime
from flashlab.attention import tiles, triton_forward, triton_plain
from flashlab.attention.ladder import STEPS, text
from flashlab.attention.inputs import check_qkv, scale_of
from flashlab.attention.options import band, visible
from flashlab.attention.reference import attention
from flashlab.attention.tiles import SEARCH, Tile
from flashlab.attention.triton_forward import (
    compile_arguments, flash_attention_forward, hbm_bytes, in_band, longest_first, soft_capped, store_tile,
    tile_step,
)
from flashlab.attention.triton_plain import LOG2_E
from flashlab.bench import industrial, timing
from flashlab.check import verify
from flashlab.check.training import wanted, worst
from flashlab.figures import curves, drawings, masks, show
from flashlab.figures.panels import panels
from flashlab.triton_tools.compile_report import compile_reports
from flashlab.triton_tools.watch import hbm_traffic

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl
from triton.language.extra import libdevice

show.style()

# %% [markdown]
# ## 1 · The plain kernel, whole
#
# Here is phase 3's kernel for the tensors of a model, as one would write it on a free afternoon: whole, and nothing in it is for later. Look for six things
# that phase 3 does not have:
#
# - the grid: a program is a block of queries of *one head of one batch*;
# - `head // group`: query heads share key heads;
# - four strides for each tensor, and 64 bits;
# - `BLOCK_D` columns, of which `HEAD_DIM` are real;
# - a causal mask in the scores;
# - where `lse` is stored.

# %%
# FROM flashlab.attention.triton_plain: plain_attention_kernel

# %% [markdown]
# The loop is phase 3's: a tile of K, scores, the mask, the new maximum, `correction`, a tile of V. Sections 2 to 4 take the new lines one by one. First the
# other half of a kernel, its **launcher**. It checks, allocates, and passes sizes and strides:

# %%
# FROM flashlab.attention.triton_plain: plain_attention (no docstrings)

# %% [markdown]
# - The grid counts programs: blocks of queries, times batch, times heads.
# - `o` is like `q`, in its order in memory too. `lse` is new, so it is contiguous, and needs no strides.
# - `BLOCK_D` is at least 16: `tl.dot` takes nothing smaller.
# - Without queries there is nothing to launch. Without keys there is: `o` must become 0.
#
# Run it on what a model has: two batches, six query heads that share two key heads, a head size of 40, fewer queries than keys. Then give it to the checker:
# grouped, causal and not, three dtypes, empty inputs, rows that see no key, strides with gaps of NaN.

# %%
def inputs(batch, heads, kv_heads, seq_q, seq_k, head_dim, dtype=torch.float16, seed=0):
    """q, k, v: random, the same on every machine, where kernels run."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
    drawn = [torch.randn(batch, h, n, head_dim, generator=generator) for h, n in sizes]
    return [x.to(runtime.device(), dtype) for x in (drawn[0], drawn[1], drawn[2] + 0.5)]


q, k, v = inputs(2, 6, 2, 50, 130, 40)
o, lse = plain_attention(q, k, v, causal=True)
print("o", list(o.shape), "and lse", list(lse.shape))
dtypes = (torch.float16, torch.bfloat16, torch.float32)
checked = {"causal": True, "gqa": True, "dtypes": dtypes, "head_dims": (64, 40), "empty": True}
print(verify(plain_attention, max_seq=300, **checked).verdict)

# %% [markdown]
# It is right. You could stop here, and a model would train with it. Now measure it. How many bytes does a launch ask for? As in phase 3: a program reads its
# queries once, and all keys and values of its head. The interpreter counts:

# %%
rows = []
for BLOCK_M in (16, 32, 64, 128):
    x = inputs(1, 4, 2, 256, 256, 64)
    traffic = hbm_traffic(plain_attention, *x, BLOCK_M=BLOCK_M, BLOCK_N=32)
    read, written = hbm_bytes(1, 4, 2, 256, 256, 64, 2, BLOCK_M)
    assert (traffic.bytes_read, traffic.bytes_written) == (read, written)
    paper = 4 * 2 * (256 * 64 * 2) ** 2 / (BLOCK_M * 64 * 2)
    rows.append([BLOCK_M, BLOCK_M * 64 * 2, traffic.bytes_read, f"{paper / traffic.bytes_read:.2f}"])
show.table(rows, ["BLOCK_M", "bytes of a tile of Q", "bytes read, counted", "of these K and V"])

# %% [markdown]
# The counts equal the formula, to the byte. And they are the law of the FlashAttention paper: theorem 2 says $\Theta(N^2 D^2 / S)$ accesses with $S$ of
# on-chip memory. Our on-chip tile of Q has $S = \mathrm{BLOCK\_M} \cdot D \cdot e$ bytes, and K and V together are
# $2 (N D e)^2 / S$ bytes per head. **Twice the tile, half the traffic.** The last column is that formula over the count; what is missing to 1 is Q.
#
# And its time, beside the kernel at the end of this lecture, where there is a GPU:

# %% tags=["nbval-ignore-output"]
if runtime.INTERPRETED:
    print("not timed here: the kernels are interpreted")
else:
    x = inputs(4, 16, 16, 4096, 4096, 128, torch.bfloat16)
    ways = {"plain": lambda: plain_attention(*x, causal=True),
            "the last one": lambda: flash_attention_forward(*x, causal=True)}
    for name, taken in timing.interleaved(ways).items():
        print(f"{name:13}{taken['ms']:.3f} ms")

# %% [markdown]
# ## 2 · Batch and heads
#
# Attention of one head has nothing to do with attention of another. So batch and heads multiply the number of programs, and nothing inside a
# program changes.
#
# - All programs are on the grid's first axis, x, and take their number apart by division. A grid may have $2^{31} - 1$ programs on x, but only
#   65 535 on y and z. Kernels with batch × heads on another axis fail at large batches (flash-linear-attention, issue 172).
# - Neighbouring numbers are blocks of *one* head. They run at about the same time, and read the same K and V, which then come from the L2 cache.

# %% [markdown]
# Models save memory by **grouped queries** (GQA): several query heads share one head of K and V. With `group` query heads to each key head, query
# head `h` reads key head `h // group`. That is all that the kernel has to do. A group of 1 is ordinary attention. A group
# of all heads is called MQA.
#
# Let the kernel's first lines write down what each program computes:

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
o, _ = plain_attention(q, k, v)
copies = [x.repeat_interleave(3, dim=1) for x in (k, v)]
assert torch.equal(plain_attention(q, *copies)[0], o)
by_index, by_copy = (sum(x.nbytes for x in pair) for pair in ((k, v), copies))
print(f"the same bits; K and V take {by_index} bytes by index, {by_copy} with copies")
assert by_copy == 3 * by_index

# %% [markdown]
# ### Four strides, 64 bits
#
# A tile of one head begins at `batch * stride_b + head * stride_h`, and from there it is phase 3's tile. Because the kernel takes strides, it does not care
# how a model lays its tensors out. Most projections of a transformer give `[B, N, H, D]`, which we
# see as `[B, H, N, D]` after a `transpose` that moves nothing:

# %%
by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
again, _ = plain_attention(*by_token)
assert torch.equal(again, o)
print("strides", q.stride(), "and", by_token[0].stride(), "give the same bits")
print("o has the order in memory of q:", again.stride() == by_token[0].stride())

# %% [markdown]
# `batch`, `head` and all rows are converted to 64 bits: an offset of more than $2^{31}$ elements wraps around in 32. Convert *before*
# multiplying: a product in 32 bits is wrong already, and no later conversion mends it.
#
# *Predict: batch 64, 32 heads, 8192 tokens, head size 128. Is $2^{31}$ far away?*

# %%
elements = 64 * 32 * 8192 * 128
print(f"{elements} elements, that is 2^{math.log2(elements):.0f}; {elements * 2 / 2**30:.0f} GiB in fp16")
assert elements == 2**31

# %% [markdown]
# One tensor of 4 GiB, then, which an H200 holds thirty times. FlashAttention had this bug (its issue 767 and pull request 1500), and
# FlexAttention's backward in 2026 (PyTorch issue 190857).

# %% [markdown]
# ## 3 · Any head size
#
# The sides of a tile are powers of two. Models have head sizes of 40, 80, 96, 112, 160. So a tile gets `BLOCK_D` columns, the next power of two,
# and the columns past `HEAD_DIM` are padding: `real_d` is false there, and no address is read.
#
# Padding columns of Q and K are zeros, so they add 0 to every score. Those of V are zeros, and their sums are never stored. No score has to be masked
# for it: this padding is harmless, and padded *keys* are not.

# %% [markdown]
# So padding costs no bytes. What it costs is multiplications with zeros, and registers. A head size of 80 is multiplied as 128:

# %%
for head_dim in (40, 64, 80, 128):
    x = inputs(1, 1, 1, 64, 64, head_dim)
    read = hbm_traffic(plain_attention, *x).bytes_read
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
# ## 4 · Causal, and tiles that no row sees
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
o, lse = plain_attention(*inputs(1, 1, 1, 5, 2, 16), causal=True)
print("rows that are 0:", (o[0, 0] == 0).all(-1).tolist())
print("lse is -inf:   ", lse[0, 0].isneginf().tolist())

# %% [markdown]
# The plain kernel loads every tile, and hides half of the scores. What a mask hides need not be loaded. From here on we work on the kernel of the package,
# `flash_attention_kernel`, one idea at a time. One text serves all of it, and a launch pays only for what it asks for. The means is `tl.constexpr`: a parameter
# that is known when the kernel is *compiled*. An `if` on it is decided then, and the other branch leaves no instruction behind:

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
# So a *step* of this lecture is the package's kernel with some constants fixed. Its text is what the compiler is left with, and the difference between two
# steps is one idea:

# %%
show.table([[step.name, step.idea] for step in STEPS], ["step", "idea"])

# %% [markdown]
# The first step computes what the plain kernel does. The lines that made addresses and masks have become functions, so that Q, K, V and O share them:

# %%
# FROM flashlab.attention.triton_forward: tile_ptrs, load_tile (no docstrings)

# %% [markdown]
# `tl.multiple_of` is a promise to the compiler. Triton finds out by itself whether a stride is a multiple of 16. The row stride of a head size of 40 is
# not. But it is a multiple of 8, which is 16 bytes of fp16, the most that a thread loads at once. `ALIGN` says so, if it is so.
#
# Now the loop from the plain kernel to the first step, what stands before a tile and what is done with one:

# %%
show.diff(triton_plain.plain_attention_kernel, text(STEPS[0], helpers=False), "loop", "tile")

# %% [markdown]
# - **`edges`** are four positions, computed before the loop: `edges[3]` is where the last row of the block stops seeing keys, and the loop ends there.
#   **Tiles that no row sees are never loaded.**
# - **The loop has three parts.** `tl.static_range(3)` is written out three times when the kernel is compiled. In this step the first two are empty. Sections 5
#   and 6 fill them.
# - **`in_band`** is the comparison of positions: a key is seen if `key <= query + last`, and `last` is $N - M$.

# %% [markdown]
# - **`k_ptrs` are made once.** `tile_step` is the distance to the next tile, in 64 bits: one number is added.
# - **The scale has moved.** Only the row maximum is multiplied by it, and then
#   `s * scale_log2 - m_safe` is *one* instruction per score, a multiply-add. It needs a positive scale: otherwise the maximum of the scaled
#   scores is not the scaled maximum. (For a negative one the kernel negates Q, once: `NEGATE`.)

# %% [markdown]
# - **The order of the blocks** (`longest_first`, before the loop): the last block of queries visits the most tiles. If it starts last, the GPU waits for it
#   while everything else has ended. So the longest start first, of 16 heads at a time. Why not of all heads? What runs at the same time shares K and V in the L2
#   cache. On an H200, with 4096 tokens, this order gained 4 % at $D = 64$, 6 % at 128 and 14 % at 256 over one head after the other.
#
# Which tiles are visited? `tile_edges` says it:

# %%
# FROM flashlab.attention.triton_forward: tile_edges (no docstrings)

# %% [markdown]
# Read the lines under `HAS_LAST`. The last row of the block is `stop - 1`, and it sees the keys before `stop + last`: that is `end`. `tl.maximum(..., 0)` is for
# blocks that see no key at all. An example: of 50 queries and 130 keys, rows 16 to 31. `last` is 80, `stop` is 32, so `end` is 112. (`HAS_FIRST` and `SPLIT` are
# false here; the next sections need them.)
#
# The next kernel stores the positions, a row for each block of queries, and `walks` lists the tiles between them.

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
# The interpreter counts the bytes of K that are really asked for. It must be the sum of the ends, and the plain kernel's are all:

# %%
for M, N in ((128, 128), (100, 150), (150, 100)):
    x = inputs(1, 1, 1, M, N, 32)
    read = hbm_traffic(flash_attention_forward, *x, causal=True, tile=Tile(16, 16, 4, 2)).read_from["k"]
    plain = hbm_traffic(plain_attention, *x, causal=True, BLOCK_M=16, BLOCK_N=16).read_from["k"]
    ends = sum(walk[-1][1] for walk in walks(M, N, 16, 16, causal=True) if walk)
    print(f"M={M}, N={N}: {read} bytes of K, plain {plain}")
    assert read == ends * 32 * 2 and plain == -(-M // 16) * N * 64

# %% [markdown]
# ## 5 · Tiles that need no mask
#
# Most of the orange tiles above are full of dots. Comparing positions there is work for nothing: two comparisons and a select for each score. So
# where does a tile stop being full? Where the *first* row of the block stops seeing it. The whole step is one line:

# %%
show.diff(text(STEPS[0]), text(STEPS[1]))

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
# Other lengths and tiles, to play with: which sizes leave the fewest orange tiles?

# %%
drawings.play("causal")

# %% [markdown]
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
show.diff(text(STEPS[1]), text(STEPS[2]))

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
count = 0
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
                    count += 1
            assert reached[seen].all()
print(f"{count} tiles, each as it should be")

# %% [markdown]
# ## 7 · Soft-cap, scale, dtypes
#
# Gemma 2 bounds its scores: $s$ becomes $c \tanh(s / c)$. It is one more constant, and one line in the loop:

# %%
show.diff(text(STEPS[2], helpers=False), text(STEPS[3], helpers=False), "tile")

# %% [markdown]
# Where is $c$? In the scale. The loop computes $2^{\,s \cdot \mathrm{scale\_log2} - m}$, so with a cap `scale_log2` is $c \log_2 e$, and what the line
# returns is $\tanh$ alone, between $-1$ and $1$. What goes into the $\tanh$ is the score times scale / $c$. That factor, times $2 \log_2 e$, is
# `tanh_scale`. And $\tanh$ itself is made of the exponential, which every tool of this course has. The textbook's
# $(e^{2x} - 1) / (e^{2x} + 1)$ is $\infty / \infty$ for large $x$, so it takes another form: exercise 4.6.

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
# A mask and a cap have an order: exercise 4.7.
#
# The remaining options are arguments. A scale may be anything, also negative or 0 (0 makes every key equal). fp16, bf16 and fp32 are one kernel. TF32, with
# its 10 bits, is for those who ask for it:

# %%
def of_bound(q, k, v, tma=False, tile=None, **options):
    """The kernel's largest error as a part of what is allowed."""
    o, lse = flash_attention_forward(q, k, v, tma=tma, tile=tile, **options)
    return worst(wanted(q, k, v, **options), o=o, lse=lse)[1]


for dtype in dtypes:
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
show.diff(text(STEPS[3]), text(STEPS[4]))

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
# The kernel with one option more in each row, for an A100 (`sm_80`) and an H100 or H200 (`sm_90`), with a head size of 128 and the tile of 128 × 64. It is one tile for all, so that
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
# takes two to six times as long. Eight warps for 64 rows are slow everywhere. It fits that four warps hold 64 rows in one product of Hopper's tensor cores (phase 11):
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
# - **`load_tile(q_ptrs, ..., True)`.** Q is loaded once, so its mask costs nothing that counts.
# - **`stop_m`.** The rows past M do not exist, so they must not move the edges.

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


print(verify(ours, max_seq=300, **checked).verdict)

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
# ## 12 · The door
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
# ## 13 · FlexAttention, beside it
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
# And its forms in turns with each other and with cuDNN, in a run of their own, forward: so compare within this table. *max-autotune* finds better tiles, mostly at $D = 256$. *FLASH* is another kernel, ahead of cuDNN on long texts and behind it on
# short ones. At $D = 256$ it refuses the causal block mask, because its tile of 80 keys does not divide a block:

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
# ## 14 · How fast?
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
# *Only half of the work counts under a causal mask.* ("gluon" is the same loop with the compiler's decisions made by hand: notebook 11b.) The same as ratios:

# %%
for run in industrial.having(runs, "shapes"):
    display(industrial.ratio_table(run, industrial.OURS, ["FlashAttention-2", "cuDNN", "eager"]))

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
# The rest needs a stopwatch. Descriptors are in section 8. And for tiles: a number is the
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

# %% [markdown]
# Worth trying now:
#
# - Sink tokens, which every query sees, as a second band.
# - Two tiles of columns for a head size of 80.
# - A block mask of your own, for documents that are packed into one sequence.

# %% [markdown]
# **What you can now do:** write a kernel with batch, heads, masks and tile edges from an empty page, and its launcher; say which tiles need no mask, and what each
# option costs. Phase 5 makes the gradient. There `lse` earns its place.

# %% [markdown]
# ## References
#
# - Tri Dao et al., *FlashAttention*, NeurIPS 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): theorem 2.
# - Tri Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691): blocks of queries in parallel, fewer masks.
# - Joshua Ainslie et al., *GQA*, EMNLP 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245); Noam Shazeer, *Fast Transformer Decoding*, 2019: MQA.
# - Iz Beltagy et al., *Longformer*, 2020, [arXiv:2004.05150](https://arxiv.org/abs/2004.05150): sliding windows.
# - Gemma Team, *Gemma 2*, 2024, [arXiv:2408.00118](https://arxiv.org/abs/2408.00118): soft-caps, windows in every second layer.
# - Juechu Dong et al., *FlexAttention*, 2024, [arXiv:2412.05496](https://arxiv.org/abs/2412.05496).
# - Triton documentation, tutorial *Fused Attention*: full and masked tiles, the search space.
# - NVIDIA, *CUDA C++ Programming Guide*: limits of a grid; results per clock, by kind of instruction; tensor maps and the copy engine.
# - flash-attention issue 767 and pull request 1500: offsets in 32 bits. flash-linear-attention issue 172: the limit of grid y and z.
