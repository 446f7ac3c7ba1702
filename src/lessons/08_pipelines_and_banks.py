# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 8 · Pipelines and banks
#
# The naive tensor-core kernel of phase 7 is right, and slow: its MMAs are few among the loads, barriers and conflicts around them. This lecture
# takes it to the speed of FlashAttention-2, and past it, in fifteen steps. Each step is a whole file with one idea. Before each you will see what
# is wrong as a *count*, not as an opinion; after it, the same count again.

# %% [markdown]
# ## What you will be able to do
#
# - say what a warp should own, and count what the other choice has to exchange through shared memory;
# - write a `cp.async` pipeline of any depth, and say which group each wait is for;
# - see a bank conflict in a count, draw it, and derive the XOR swizzle that removes it;
# - give shared memory a budget: how many wavefronts an MMA may cost before the tensor cores wait;
# - tell which of fifteen optimisations a counter can justify, which only a profiler can, and which did not help at all.

# %% [markdown]
# ## What you need first
#
# Phase 7: fragments, `ldmatrix`, `mma.m16n8k16`, and why C of the first product is A of the second. Phase 6: blocks, warps, barriers. No GPU is
# needed: the counts are the emulator's, and they are the hardware's too (on an H200, Nsight Compute counts the same `ldmatrix`, MMAs, wavefronts
# and sectors for the same launch). Times are recorded, with their machine. About two hours, then `exercises/08_pipelines_and_banks.ipynb`.

# %%
import math

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.figures import banks, curves, ladder, show, traces
from flashlab.bench.published import load
from flashlab.bench.records import recorded
from flashlab.check import verify
from flashlab.cuda import load_inline, missing
from flashlab.figures.ladder import COLUMNS, counted, grow, row
from flashlab.kernels import step, steps
from flashlab.check.cuda_answer import region

show.style()
SERIES = steps(7, 8, 9)
BACKEND = "emulator" if missing("nvcc") else "nvcc"

# %% [markdown]
# ## 1 · The bill of the naive kernel
#
# All files share one interface, `struct Problem` of `problem.cuh`: batch, heads, grouped K/V heads, any lengths, strides, causal. So they can be run,
# checked and counted by the same lines. `counted` runs one head of $N = 256$, $D = 64$ through the check build, compares the result with the
# oracle, insists that nothing was found, and returns the report.

# %%
ladder.prepare(s.name for s in SERIES)  # compile them all, two at a time; later runs find them in a cache
report = counted("p7_naive")
TABLE = [row("p7_naive")]
show.table(TABLE, COLUMNS)

# %% [markdown]
# Instructions are counted once a warp, barriers once a block. A **wavefront** is one pass through shared memory: up to 128 bytes, at most one 4-byte
# word from each of the 32 banks. **Conflicts** are the wavefronts beyond those that the same bytes would need at best. A **sector** is 32 bytes of global memory.
#
# What must be there, whatever the kernel? The MMAs: $4 N^2 D$ floating-point operations, 4096 in each.

# %%
N, D = 256, 64
needed = 4 * N * N * D // 4096
assert TABLE[0][1] == needed == report.counters["mma"]
print(f"MMAs: {needed}; an MMA comes with {ladder.wavefronts(report) / needed:.1f} wavefronts and {report.counters['ldmatrix'] / needed:.2f} ldmatrix")

# %% [markdown]
# Is 26 wavefronts a lot? A multiprocessor (SM) of an H100 or H200 can do 4096 fp16 tensor-core operations a clock: **one MMA a clock**. Shared memory delivers **one wavefront a
# clock**. `mma.sync`, the instruction that this phase is about, reaches at most about 63 % of that peak on Hopper (the rest needs `wgmma`, phase 10), so one MMA takes about 1.6 clocks; on
# an A100, whose tensor cores are half as wide, 2. There is the budget:
#
# $$\text{wavefronts for each MMA} \;\lesssim\; 1.6 \;(\text{H200}),\quad 2 \;(\text{A100}).$$
#
# At 26 the tensor cores idle fifteen clocks of sixteen. Keep that number in sight; the table's fourth column divided by its second has to come down to it.

# %% [markdown]
# ## 2 · Tile MMA and tile warps
#
# First, more rows. The naive block has 16 query rows and reads all of K and V for them. With 64 rows a block, K and V are read a quarter as often. But
# who computes what? Four warps, a tile of S of 64 × 64. Two ways to cut it:
#
# | | a warp's part of $S = QK^\top$ | so a row of S is | a warp's part of $O = PV$ |
# |---|---|---|---|
# | **split-KV** (as in LeetCUDA) | 64 rows × 16 keys | spread over four warps | 64 rows × a quarter of the columns |
# | **split-Q** (as in FlashAttention-2) | 16 rows × 64 keys | in one warp | 16 rows × all columns |
#
# The first looks attractive: a fragment of K, once loaded, serves 64 rows. What does it cost that a row is spread?

# %%
counted_kv = counted("p8_side_split_kv")
lines = counted_kv.source.splitlines()
for number, c in counted_kv.by_line.items():
    if "smem" in lines[number - 1] and (c["shared_loads"] or c["shared_stores"]) and "tile_smem" not in lines[number - 1]:
        passes = c["shared_load_wavefronts"] + c["shared_store_wavefronts"]
        print(f"{passes:5} wavefronts: {lines[number - 1].split('//')[0].strip()[:88]}")

# %% [markdown]
# Maxima out and in, P out (and back in through `ldmatrix`), sums out and in: all of it only because a row has four owners. And each exchange needs a barrier: two more for every
# tile. The other cut exchanges nothing. (FlashAttention-1 divides the keys over the warps too, and adds up partial O; it exchanges even more.) Two places of the diff, from the first to the second: how a row's maximum is found, and where P comes from.

# %%
show.diff(region(step("p8_side_split_kv"), "row maxima"), region(step("p8_4_swizzle"), "row maxima"), context=0)
show.diff(region(step("p8_side_split_kv"), "output"), region(step("p8_4_swizzle"), "output"), context=0)

# %% [markdown]
# To compare the two alone, both rows have everything up to section 5: asynchronous copies, two stages, no conflicts.

# %%
kv, q = row("p8_side_split_kv"), row("p8_4_swizzle")
show.table([kv, q], COLUMNS)
exchanged = counted_kv.counters["shared_loads"] + counted_kv.counters["shared_stores"]
assert kv[5] > 2 * q[5] and kv[2] < q[2]
print(f"split-KV: {exchanged} shared loads and stores; split-Q: {counted('p8_4_swizzle').counters['shared_stores']}")

# %%
grow(TABLE, "p8_1_split_q")

# %% [markdown]
# The first step of the ladder is split-Q: the naive kernel with two other numbers, and nothing else. (The whole diff of a step is `show.diff(step("p7_naive").path, step("p8_1_split_q").path)`; what is new is marked `// New:` in the files.)
#
# Not everything speaks for split-Q: it issues *more* `ldmatrix`, since its K fragments serve 16 rows only. Half of that comes back when a warp gets 32 rows (`p9_4_warp_tiles`).
#
# *Predict:* sectors read fell from 33 792 to 9 216. Why not to a quarter of it?
#
# <details><summary>Answer</summary>
#
# Q is read once, whatever the block's height: 1 024 sectors of 32 bytes (256 × 64 × 2 bytes). The rest, K and V, fell from 32 768 to 8 192, exactly a quarter.
#
# </details>

# %% [markdown]
# ## 3 · `cp.async`: past the registers
#
# A copy to shared memory was two instructions: a load into a register, a store out of it. The load's latency is paid by the thread, its register is taken all the while, and the store has wavefronts of its
# own. `cp.async` is one instruction: 16 bytes from global to shared memory, and the thread goes on. Three more instructions make it usable:
#
# - `commit_group` closes a group of the copies issued so far;
# - `wait_group N` waits until at most $N$ of *this thread's* groups, the latest, are still under way;
# - and a barrier after the wait, since other threads' copies are theirs to wait for.

# %%
show.diff(region(step("p8_1_split_q"), "copy a tile"), region(step("p8_2_cp_async"), "copy a tile"), context=0)
grow(TABLE, "p8_2_cp_async")
c2, c3 = counted("p8_1_split_q").counters, counted("p8_2_cp_async").counters
assert c2["shared_stores"] == c2["global_loads"] == c3["cp_async"] and c3["shared_stores"] == c3["global_loads"] == 0
print(f"{c2['global_loads']} loads and {c2['shared_stores']} stores became {c3['cp_async']} cp.async")

# %% [markdown]
# The fourth operand says how many bytes to read; the rest of the 16 become zeros. That fills the ragged tail without a branch. One trap: the address of a row that does not exist must still be a valid one.
#
# So far nothing is asynchronous. The kernel waits as soon as it has asked.

# %% [markdown]
# ## 4 · Stages: copy the next tile while working on this one
#
# Give shared memory room for `STAGES` tiles of K and of V. Before the loop, ask for the first `STAGES - 1`. In round $j$: wait for tile $j$, barrier, ask for tile $j + \text{STAGES} - 1$, work on tile $j$.

# %%
show.diff(region(step("p8_2_cp_async"), "load K and V"), region(step("p8_3_stages"), "load K and V"), context=0)

# %% [markdown]
# Three details carry all the weight.
#
# 1. **One barrier does two jobs.** It makes every thread's part of tile $j$ visible, and it says that every warp is through with tile $j - 1$. So the refill, which overwrites tile $j - 1$, comes after it.
#    Before it would be a race that no test on a GPU finds reliably (exercise 8.5; the emulator finds it always).
# 2. **Empty groups count.** Past the last tile nothing is copied, but a group is committed all the same, so that `wait_group` means the same in every round.
# 3. **The wait leaves `STAGES - 2` groups under way**: those of the tiles after $j$ that have been asked for by then (exercise 8.4).
#
# What is under way when? Let the kernel say: a copy of the source with three print statements, run in the emulator. Orange is a copy, from its issue to its wait; blue the work on that tile. The axis counts events; it is no clock.

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.9), sharey=True)
overlap = {s: traces.timeline(ax, traces.events(s), f"STAGES = {s}") for s, ax in zip((1, 2, 3), axes)}
axes[0].legend(loc="upper right", fontsize=8)
plt.show()

# %%
for stages, copies in overlap.items():
    shared = counted("p8_3_stages", STAGES=stages).launches[0].shared_bytes
    print(f"{stages} stages: copies under way during tiles 0 to 3: {copies}; shared memory {shared} bytes a block")
assert overlap[1] == [0, 0, 0, 0] and overlap[2][0] == 1 and overlap[3][0] == 2
grow(TABLE, "p8_3_stages")

# %% [markdown]
# With one stage, copy and work never overlap; with two, the next tile is always on its way. Three would help if one tile's work were shorter than a copy's latency. Here the work of a tile takes longer (the MMAs of
# 64 × 64 × 64, twice), and a third stage costs 16 KB: that may be a block less on the SM, and another block's warps hide latency as well as another stage does. The series stays with two.
#
# The count of barriers has halved. Nothing else has: wavefronts are where they were, 18 for each MMA. Seven eighths of those are conflicts.

# %% [markdown]
# ## 5 · Bank conflicts
#
# Shared memory is 32 banks, each 4 bytes wide: byte address $a$ is in bank $\lfloor a/4 \rfloor \bmod 32$. In one wavefront each bank delivers one word. `ldmatrix` reads an 8 × 8 tile as eight rows of 16 bytes: 128 bytes, one
# wavefront *if* the eight rows lie in eight different groups of four banks.
#
# Where do they lie? A row of K is $D \cdot 2 = 128$ bytes for $D = 64$: exactly once around all banks. Row $r + 1$ begins in the bank in which row $r$ began.

# %%
where = {name: banks.addresses(name) for name in ("p8_3_stages", "p8_4_swizzle")}
print("bytes :", *where["p8_3_stages"])
print("banks :", *(a // 4 % 32 for a in where["p8_3_stages"]))
c = counted("p8_3_stages").counters
assert c["ldmatrix_wavefronts"] == 8 * c["ldmatrix_ideal"]
print(f"ldmatrix: {c['ldmatrix_wavefronts']} wavefronts, {c['ldmatrix_ideal']} would do: 8 times")

# %% [markdown]
# (The addresses are what lanes 0 to 7 gave to the first `ldmatrix` of K, printed by the run.) All eight rows want banks 0 to 3, and 28 banks have nothing to do. With $D = 128$ a row is twice around, and the picture is the same.
#
# **Padding** would cure it: rows of 144 bytes instead of 128 (exercise 8.1). It costs an eighth of the tile, and awkward addresses. Better is to leave the rows where they are and permute *within* each row.

# %% [markdown]
# ### The XOR, derived
#
# A row of 128 bytes is eight **chunks** of 16 bytes, and place $p$ of a row is bank group $p$ ($p \bmod 8$ for longer rows). We look for a rule: chunk $c$ of row $r$ goes to place $f_r(c)$. Two demands:
#
# - **nothing is lost:** for each row, $f_r$ is a permutation of the places;
# - **no conflict:** for each $c$, the eight rows of an `ldmatrix` tile, $r = 8i, \dots, 8i + 7$, have eight different $f_r(c) \bmod 8$.
#
# Write the table of $f$ with rows $r$ and columns $c$: each row a permutation, each column a permutation. That is a Latin square of order 8. The simplest is the addition table, $(c + r) \bmod 8$. Another is the table of
# exclusive or: $f_r(c) = c \oplus (r \bmod 8)$. Why is it one? $x \mapsto x \oplus y$ undoes itself, so it is one-to-one for fixed $r$ and for fixed $c$ alike. It is cheaper than the addition: no carry, no modulo for longer rows (only the lowest three bits
# change), and later (section 9) the constant offsets of an unrolled loop can be XORed onto an address computed once.

# %%
square = [[c ^ r for c in range(8)] for r in range(8)]
show.table([[f"row {r}", *square[r]] for r in range(8)], ["place of", *(f"chunk {c}" for c in range(8))])
assert all(sorted(line) == list(range(8)) for line in square) and all(sorted(column) == list(range(8)) for column in zip(*square))

# %% [markdown]
# In the kernel it is one line. Writer and reader both go through it, which is the whole art: the swizzle on one side only is a classic, and it raises no alarm but wrong numbers (exercise 8.6).

# %%
show.diff(region(step("p8_3_stages"), "swizzle"), region(step("p8_4_swizzle"), "swizzle"), context=0)
fig, axes = plt.subplots(1, 2, figsize=(9, 2.8))
asked = [banks.bank_map(ax, where[name], f"{name}: K, columns 0 to 7") for name, ax in zip(where, axes)]
plt.show()

# %% [markdown]
# Left, before: eight rows on top of each other in the same four banks, eight wavefronts (red: a bank asked for more than once). Right, after: a diagonal, one wavefront. Blue means asked for once.
#
# The figure shows one tile. The count is about all of them: Q by 16 rows, K, V through `.trans`, in every round.

# %%
assert asked == [8, 1]
grow(TABLE, "p8_4_swizzle")
for head_dim in (64, 128):
    c = counted("p8_4_swizzle", head_dim=head_dim).counters
    print(f"D = {head_dim}: {c['ldmatrix_wavefronts']} wavefronts of ldmatrix, ideal {c['ldmatrix_ideal']}, conflicts {c.bank_conflicts}")
    assert c.bank_conflicts == 0

# %% [markdown]
# From 18 wavefronts for each MMA to 2.25, by one line. No other step gives as much; other ladders agree (in a public one of sixteen steps, on an A100, the swizzle alone took the kernel from 16 % to 73 % of FlashAttention-2).
#
# *Predict:* the copies write to shared memory too, through the swizzled `at`. Do they conflict?
#
# <details><summary>Answer</summary>
#
# No. Eight neighbouring threads write the eight chunks of one row; a permutation within the row still covers all 32 banks once. That is the first of the two demands again.
#
# </details>

# %% [markdown]
# ## 6 · Q in registers, `ldmatrix.x4`
#
# Still 2.25, and the budget is 1.6. Who spends it? Q's fragments are loaded again for each tile of keys, and Q is the same all along: load them once, keep them ($D/16$ fragments of 4 registers: 16 registers for $D = 64$, 32 for 128). K and V fragments are
# loaded two 8 × 8 tiles at a time; `ldmatrix.x4` loads four: the same wavefronts, half the instructions.

# %%
show.diff(region(step("p8_4_swizzle"), "scores"), region(step("p8_5_registers"), "scores"), context=0)
grow(TABLE, "p8_5_registers")
assert 2 * TABLE[-1][2] < TABLE[-2][2]

# %% [markdown]
# The extra barrier a block is the price of reading Q before the loop. Per MMA there are 2.06 wavefronts now. Two of them are unavoidable *for a warp of 16 rows*: a B fragment for two MMAs is 512 bytes, four wavefronts. Remember this for section 11.

# %% [markdown]
# ## 7 · The collective store
#
# At the end a lane holds columns $2t$ and $2t + 1$ of its rows: 4 bytes. Stored like that, a warp's store instruction touches 8 rows and uses 16 bytes of each 32-byte sector. The lanes have to trade first. Two ways: shuffles within the quad
# (4 rounds), until lane $t$ holds 16 neighbouring bytes; or through shared memory, where Q's tile is free by now.

# %%
rows = []
stores = {"p8_5_registers": "4 bytes per lane", "p8_side_shuffle_store": "shuffles, 16 bytes", "p8_6_store": "through shared memory, 16 bytes"}
for name, how in stores.items():
    r = counted(name)
    c = r.counters
    rows.append([name, c["global_stores"], c["global_store_sectors"], c["global_store_ideal"], c["shuffles"],
                ladder.wavefronts(r)])
show.table(rows, ["store", "store instructions", "sectors", "ideal", "shuffles", "shared wavefronts"])
assert rows[0][2] > 1.9 * rows[2][2] and rows[2][2] == rows[2][3]

# %% [markdown]
# A third of the instructions and half the sectors, either way. It happens once a block, not once a tile, so it matters for short sequences. The shared-memory way is shorter to write and leaves the shuffle units alone; the series keeps it.
# Only a `__syncwarp` stands between writing and reading: each warp reads back its own 16 rows.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - **Own rows, not keys:** a warp with whole rows exchanges nothing. Between blocks, where one exchange at the end is enough, splitting keys is right.
# - **Copy ahead:** two stages; the barrier that publishes tile $j$ also frees tile $j - 1$; the refill comes after it.
# - **Banks:** eight rows at a stride of 128 bytes are eight wavefronts. $c \oplus (r \bmod 8)$ is a Latin square, so it is one.
# - **The budget:** an MMA costs 1.6 to 2 clocks, a wavefront one. 26 wavefronts an MMA at the start, 2.06 with 16 rows a warp, about 1 with 32.
# - After that the limit is latency: fragments one step ahead, addresses out of the way, nothing spilled.
# - Counts justify the first half of the ladder before a GPU runs it; the second half needs a profiler; and some good ideas gain nothing.
#
# Left to explore: one stage of V where a block has only 99 KiB; `stmatrix` for the store on sm_90; the mask of a sliding window, whose full tiles lie between two ragged ends; the same ladder on your own GPU with
# `python -m flashlab.bench.mma`: on an A100 or an RTX card, which step pays most?

# %% [markdown]
# ## References
#
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), arXiv 2307.08691. Section 3.3 is `p8_1_split_q`.
# - Dao, Haziza, Massa, Sizov: *Flash-Decoding for long-context inference* (2023), pytorch.org/blog/flash-decoding. Split keys between blocks.
# - Zadouri, Shah, Dao and others: *FlashAttention-4* (2025/26), github.com/Dao-AILab/flash-attention: rescaling only when the maximum has moved far.
# - NVIDIA: *PTX ISA*, "Data Movement and Conversion: cp.async", "Warp-level matrix instructions: ldmatrix, mma"; *CUDA C++ Programming Guide*, "Shared memory: bank conflicts".
# - Thakkar, Kerr and others: *CUTLASS*, github.com/NVIDIA/cutlass, `include/cute/swizzle.hpp`: swizzles as XORs of address bits.
# - Boehm: *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance* (2022), siboehm.com/articles/22/CUDA-MMM. The form of a ladder with a measured reason for each step.
# - gau-nernst: *learn-cuda*, github.com/gau-nernst/learn-cuda, `07_attention` (2025): the same ladder on an RTX 5090, in the form of tables.
# - Sun, Li, Geng and others: *Dissecting Tensor Cores via Microbenchmarks* (2022), arXiv 2206.02874: `ldmatrix` and `mma` latencies and throughputs.
