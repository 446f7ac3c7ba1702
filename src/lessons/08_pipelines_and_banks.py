# %% [markdown]
# # Phase 8 · Pipelines and banks
#
# The naive tensor-core kernel of phase 7 is right, and slow: for every MMA there are many loads, barriers and bank conflicts. This
# lecture removes them in six steps. Each step is a whole file with one new idea. Before a step you see what is wrong as a *count*.
# After it you see the same count again.

# %% [markdown]
# ## What you will be able to do
#
# - say which rows and keys a warp should own, and count what another choice costs;
# - write a `cp.async` pipeline of any depth, and say which copy each wait is for;
# - see a bank conflict in a count, draw it, and derive the XOR swizzle that removes it;
# - compute how many wavefronts an MMA may cost on a given GPU, and say what this budget does not tell;
# - write the whole kernel yourself.

# %% [markdown]
# ## What you need first
#
# Phase 7: fragments, `ldmatrix`, `mma.m16n8k16`, and why C of the first product is A of the second. Phase 6: blocks, warps, barriers.
#
# No GPU is needed: the emulator counts. Times come from a recorded run and name their machine.

# %%
import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.bench import hardware
from flashlab.bench.records import recorded
from flashlab.bench.resources import recorded as resources
from flashlab.cuda import load_inline
from flashlab.figures import drawings, ladder, show, traces
from flashlab.figures.ladder import COLUMNS, counted, grow, row
from flashlab.kernels import step, steps

show.style()
LADDER = ["p7_naive", *(s.name for s in steps(8))]

# %% [markdown]
# ## 1 · The bill of the naive kernel
#
# All kernels have one interface: `struct Problem`, with batch, heads, grouped K/V heads, any lengths, strides, causal. So the same
# lines run, check and count each of them.
#
# `counted` runs one head with $N = 256$ and $D = 64$ in the emulator's watched build. It compares the result with the oracle, insists
# that no mistake was found, and returns the counts.

# %%
ladder.prepare(LADDER)  # compiles them, two at a time; later runs find them in a cache
report = counted("p7_naive")
TABLE = [row("p7_naive")]
show.table(TABLE, COLUMNS)

# %% [markdown]
# How to read the columns:
#
# - an instruction counts once per warp, a barrier once per block;
# - a **wavefront** is one pass through shared memory: at most one 4-byte word from each of its 32 banks, so up to 128 bytes;
# - **conflicts** are the wavefronts beyond those that the same bytes would need at best;
# - **copies** are instructions that bring something from global memory, once per warp; a **sector** is 32 bytes of it.
#   *Stores* are instructions that write O and lse.

# %% [markdown]
# Some of this work is needed by any kernel: $4 N^2 D$ floating-point operations, and an MMA does 4096 of them. How much comes with
# each MMA here?

# %%
N, D = 256, 64
needed = 4 * N * N * D // 4096
assert report.counters["mma"] == needed
per_mma = report.counters.wavefronts / needed
loads = report.counters["ldmatrix"] / needed
print(f"{needed} MMAs; with each come {per_mma:.1f} wavefronts and {loads:.2f} ldmatrix")

# %% [markdown]
# Is that a lot? A multiprocessor (SM) delivers one wavefront per clock. So the question is how many clocks an MMA takes. An
# `m16n8k16` is 2048 multiply-adds. NVIDIA's white papers say how many the tensor cores of an SM do per clock.
#
# One correction: on Hopper, `mma.sync` does not reach that peak; only `wgmma` does (phase 11). A published microbenchmark found 62.9 %.
# We measured it too:

# %%
rates = [r for run in hardware.recorded() if isinstance(run.get("rates"), list) for r in run["rates"]]
measured = max((r["per_clock"] for r in rates if r["instruction"] == "mma, float32 sums"), default=None)
HOPPER = measured or 0.629  # MMAs of mma.sync per clock and SM
source = "measured" if measured else "published"
print(f"mma.sync on Hopper: {HOPPER:.3f} MMAs per clock and SM, {source}; the peak is 1")
FMA = {name: gpu.fp16_fma_per_clock for name, gpu in runtime.GPUS.items() if gpu.fp16_fma_per_clock}
CLOCKS = {name: 1 / HOPPER if name in ("H100", "H200") else 2048 / fma for name, fma in FMA.items()}
show.table([[name, FMA[name], f"{CLOCKS[name]:.1f}"] for name in CLOCKS],
           ["GPU", "multiply-adds per clock and SM", "clocks per MMA of mma.sync"])

# %% [markdown]
# There is the budget, for each GPU:
#
# $$\text{wavefronts per MMA} \;\le\; \text{clocks per MMA}.$$
#
# If the left side is larger, the tensor cores must wait for shared memory. If it is smaller, they need not wait *for that*; other
# reasons to wait remain. So the budget is necessary and not sufficient. Section 8 holds it against a profiler.

# %%
print(f"at {per_mma:.0f} wavefronts per MMA the tensor cores can work at most")
for name in ("H200", "A100", "RTX 4090"):
    print(f"{CLOCKS[name] / per_mma:6.0%} of the time on {name}")
    assert per_mma > CLOCKS[name]

# %% [markdown]
# ## 2 · Tile MMA and tile warps
#
# First, larger tiles. The naive block has 16 query rows, and reads all of K and V for them. With 64 rows per block, K and V are read
# a quarter as often. Four warps then share a tile of S, 64 rows by 64 keys. Which cut is better?
#
# | | a warp's part of $S = QK^\top$ | so a row of S is | a warp's part of $O = PV$ |
# |---|---|---|---|
# | **split-KV** | 64 rows × 16 keys | spread over four warps | 64 rows × a quarter of the columns |
# | **split-Q** | 16 rows × 64 keys | in one warp | 16 rows × all columns |

# %% [markdown]
# With split-Q a row stays in one warp, in one quad of lanes even. So its maximum, its sum and its P need no other warp. FlashAttention-2
# cuts like this. Section 9 shows what the other cut costs.
#
# The step is tiny, because the naive kernel was written for it: two numbers change. The loops over `S_TILES` and `O_TILES`, the *tile
# MMAs* of one warp, become longer, and four *tile warps* stand one below the other.

# %%
show.diff(step("p7_naive"), step("p8_1_split_q"), "constants", context=1)
grow(TABLE, "p8_1_split_q")

# %% [markdown]
# *Predict:* the sectors read fell from 33 792 to 9 216. Why not to a quarter?
#
# <details><summary>Answer</summary>
#
# Q is read once, whatever the block's height: 1 024 sectors of 32 bytes (256 × 64 × 2 bytes). The rest, K and V, fell from 32 768 to
# 8 192, which is exactly a quarter.
#
# </details>

# %%
q_sectors = N * D * 2 // 32
assert TABLE[0][7] - q_sectors == 4 * (TABLE[1][7] - q_sectors)
print(f"K and V: {TABLE[0][7] - q_sectors} sectors, then {TABLE[1][7] - q_sectors}; Q: {q_sectors} in both")

# %% [markdown]
# ## 3 · `cp.async`: copies that go past the registers
#
# A copy to shared memory was a load into a register, and a store out of it. The store has wavefronts of its own.
#
# `cp.async` is one instruction: 16 bytes from global to shared memory, and the thread goes on at once. Two more instructions say when
# they have arrived:
#
# - `cp_async_commit()` closes a **group** of the copies that this thread has issued so far;
# - `cp_async_wait<N>()` waits until at most N groups of *this thread*, its latest, are still under way.

# %%
show.diff(step("p8_1_split_q"), step("p8_2_cp_async"), "copy a tile", context=2)
show.diff(step("p8_1_split_q"), step("p8_2_cp_async"), "load K and V", context=1)

# %% [markdown]
# The wait is for this thread's copies only. Other threads' copies are theirs to wait for, so a barrier has to follow: it says that
# everybody has waited.
#
# So far nothing overlaps, because the kernel waits as soon as it has asked. The registers and the stores are saved all the same.

# %%
grow(TABLE, "p8_2_cp_async")
before, after = counted("p8_1_split_q").counters, counted("p8_2_cp_async").counters
assert before["shared_stores"] == before["global_loads"] == after["cp_async"]
assert after["shared_stores"] == after["global_loads"] == after["mma_during_copies"] == 0
loads, stores = before["global_loads"], before["shared_stores"]
print(f"{loads} loads and {stores} stores became {after['cp_async']} cp.async")

# %% [markdown]
# The last operand says how many bytes to read; the rest of the 16 become zeros. With 0 it fills rows that do not exist, without a
# branch. But which address does such a row have?
#
# The PTX manual does not say whether an address from which 0 bytes are read must be valid. So the kernel passes that of row 0. What does
# the hardware do with addresses that are nobody's?

# %%
for run in hardware.recorded():
    for one in run["zero_copy"]:
        gpu, address = run["machine"]["gpu"], one["name"]
        print(f"{gpu}: 0 bytes from a source address that is {address}: {one['said'][:70]}")
if not hardware.recorded():
    print("not measured yet: `flashlab bench hardware` on a GPU writes the record")

# %% [markdown]
# *Recorded on the GPU that is named.* What one chip does is no promise for the next, and the manual makes none. The valid address costs
# one select per copy, so the series keeps it.

# %% [markdown]
# ## 4 · Stages: copy the next tile while working on this one
#
# Give shared memory room for `STAGES` tiles of K and of V. Before the loop, ask for the first `STAGES - 1` tiles. Then, in round $j$:
#
# 1. wait for tile $j$, and meet at the barrier;
# 2. ask for tile $j + \text{STAGES} - 1$;
# 3. work on tile $j$.

# %%
show.diff(step("p8_2_cp_async"), step("p8_3_stages"), "shared memory", "first copies", context=1)

# %% [markdown]
# `load_kv` copies one tile into its stage, as one group. Past the last tile it copies nothing, but it commits all the same: an empty
# group. So `wait` means the same in every round.
#
# And the head of the loop:

# %%
show.diff(step("p8_2_cp_async"), step("p8_3_stages"), "load K and V", context=0)

# %% [markdown]
# Two details carry the weight.
#
# **One barrier does two jobs.** It makes every thread's part of tile $j$ visible. And it says that every warp is through with tile
# $j - 1$, whose stage the next copy fills. So `load_kv` comes after it: before it would be a race.
#
# **The wait leaves `STAGES - 2` groups under way:** those of the tiles after $j$ that have been asked for by then.

# %% [markdown]
# What is under way when? The same source with three print statements added says it, in the emulator. Orange is a copy,
# from its issue to its wait. Blue is the work on that tile. The axis counts events; it is no clock.

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.9), sharey=True)
overlap = {s: traces.timeline(ax, traces.events(s), f"STAGES = {s}") for s, ax in zip((1, 2, 3), axes)}
axes[0].legend(loc="upper right", fontsize=8)
plt.show()

# %% [markdown]
# With one stage there is never orange and blue at the same time: copy and work take turns. With two, the next tile is always on its
# way. With three, the next two are. The emulator counts the same: MMAs during which a copy of the block is under way.

# %%
rows = []
for stages, copies in overlap.items():
    r = counted("p8_3_stages", STAGES=stages)
    during = f"{r.counters['mma_during_copies']} of {r.counters['mma']}"
    rows.append([stages, " ".join(map(str, copies)), during, r.launches[0].shared_bytes])
show.table(rows, ["stages", "copies under way during tiles 0 to 3", "MMAs with a copy under way",
                  "shared bytes per block"])
assert overlap[1] == [0, 0, 0, 0] and overlap[2][0] == 1 and overlap[3][0] == 2

# %% [markdown]
# A third stage costs 16 KB per block at $D = 64$. That may be one block less on the SM, and another block's warps hide
# latency too. The series has two; section 8 asks whether that was right. The counts of that step:

# %%
grow(TABLE, "p8_3_stages")
assert 2 * TABLE[-1][5] == TABLE[-2][5] and TABLE[-1][3] == TABLE[-2][3]

# %% [markdown]
# Half of the barriers are gone; the wavefronts are where they were. Now a copy can hide behind work. Is that worth anything? Not while
# everybody waits for shared memory. Section 8 has the times of 1, 2 and 3 stages, before and after the conflicts are gone.

# %% [markdown]
# ## 5 · Bank conflicts
#
# 18 wavefronts come with each MMA, and seven eighths of them are conflicts. Why?
#
# Byte address $a$ is in bank $\lfloor a/4 \rfloor \bmod 32$. `ldmatrix` reads an 8 × 8 tile as eight rows of 16 bytes. That is one
# wavefront *if* the rows lie in eight different groups of four banks.
#
# But a row of K has 128 bytes for $D = 64$: once around all banks. So every row begins in the same bank.

# %%
where = {name: traces.addresses(name) for name in ("p8_3_stages", "p8_4_swizzle")}
print("bytes :", *where["p8_3_stages"])
print("banks :", *(a // 4 % 32 for a in where["p8_3_stages"]))
c = counted("p8_3_stages").counters
assert c["ldmatrix_wavefronts"] == 8 * c["ldmatrix_ideal"]
print(f"ldmatrix: {c['ldmatrix_wavefronts']} wavefronts, {c['ldmatrix_ideal']} would do: 8 times")

# %% [markdown]
# These are the addresses that lanes 0 to 7 gave to the first `ldmatrix` of K. All eight rows want banks 0 to 3. With $D = 128$ a row goes
# twice around, and the picture is the same.
#
# **Padding** would cure it: rows of 144 bytes (exercise 8.1). It costs an eighth of the tile. Better is to change the order *within* each
# row.

# %% [markdown]
# ### The XOR, derived
#
# A row of 128 bytes is eight **chunks** of 16 bytes, and place $p$ of a row is bank group $p \bmod 8$. We look for a rule: chunk $c$ of
# row $r$ goes to place $f_r(c)$. Two demands:
#
# - **nothing is lost:** in each row, $f_r$ uses each place once;
# - **no conflict:** for each $c$, the eight rows of an `ldmatrix` tile have eight different $f_r(c) \bmod 8$.

# %% [markdown]
# Write $f$ as a table of rows and chunks. Every row and every column has to hold each of the eight numbers once: a **Latin square**.
# The addition table $(c + r) \bmod 8$ is one. Another is the exclusive or:
#
# $$f_r(c) = c \oplus (r \bmod 8).$$
#
# Why is it one? $x \oplus y \oplus y = x$: XOR with a fixed number undoes itself, so it never maps two numbers to one. It is cheaper than
# the addition: no carry, and in longer rows only the lowest three bits of the place change.

# %%
square = [[c ^ r for c in range(8)] for r in range(8)]
show.table([[f"row {r}", *square[r]] for r in range(8)], ["place of", *(f"chunk {c}" for c in range(8))])
assert all(sorted(line) == list(range(8)) for line in [*square, *zip(*square)])

# %% [markdown]
# In the kernel it is one line. Writer and reader both go through it. If only one of them does, no alarm is raised, and all numbers are
# wrong.

# %%
show.diff(step("p8_3_stages"), step("p8_4_swizzle"), "swizzle", context=0)
fig, axes = plt.subplots(1, 2, figsize=(9, 2.8))
asked = [traces.bank_map(ax, where[name], f"{name}: K, columns 0 to 7") for name, ax in zip(where, axes)]
plt.show()

# %% [markdown]
# Left, before: eight rows in the same four banks, so eight wavefronts (red: a bank asked for by several rows). Right, after: a diagonal,
# and one wavefront (blue: asked for once).
#
# To play with: other chunks, and longer rows. With which number of bytes per row is there no conflict, swizzled or not?

# %%
drawings.play("banks")

# %% [markdown]
# The figure shows one tile. The count is about all of them: Q, K, and V through `.trans`, in every round.

# %%
assert asked == [8, 1]
grow(TABLE, "p8_4_swizzle")
for head_dim in (64, 128):
    c = counted("p8_4_swizzle", head_dim=head_dim).counters
    assert c.bank_conflicts == 0 and c["ldmatrix_wavefronts"] == c["ldmatrix_ideal"]
    print(f"D = {head_dim}: {c['ldmatrix_wavefronts']} wavefronts of ldmatrix, {c.bank_conflicts} conflicts")

# %% [markdown]
# From 18 wavefronts per MMA to 2.25, by one line. No other step gives as much.
#
# A published ladder (*Flash Attention from Scratch*, see the references; $D = 128$) went by its swizzle from 16 to 73 % of
# FlashAttention-2 on an A100, and from 50 to 98 % on an RTX 3090. Why is the work nearly done on one chip and not on the other? Section 8
# has an answer.

# %% [markdown]
# *Predict:* the writers, the `cp.async`, go through the swizzle too. Do *they* have conflicts now?
#
# <details><summary>Answer</summary>
#
# They should have none. Eight neighbouring threads write the eight chunks of one row. A permutation within the row
# still covers all 32 banks once. That is the first of the two demands again.
#
# It is an argument, not a count: neither the emulator nor the profiler's counter of shared stores counts what a
# `cp.async` writes.
#
# </details>

# %% [markdown]
# ## 6 · Q in registers, `ldmatrix.x4`
#
# Who spends the remaining 2.25 wavefronts per MMA? Q's fragments are loaded again for each tile of keys, although Q never changes. So
# load them once and keep them: $D/16$ fragments of 4 registers each, so 16 registers per lane for $D = 64$.
#
# And the fragments of K and V are loaded two 8 × 8 tiles at a time. `ldmatrix.x4` loads four: the same wavefronts, half of the
# instructions.

# %%
show.diff(step("p8_4_swizzle"), step("p8_5_registers"), "first copies", "Q in registers", "scores", context=0)

# %% [markdown]
# The wait is for Q only. Up to `p8_4_swizzle` Q was copied with tile 0, in one group. Now it is a group of its own, the
# first one. So the wait may leave the `STAGES - 1` groups of tiles under way.
#
# In `scores`, lanes 0 to 7 give the rows of keys 0 to 7 at columns 0 to 7, lanes 8 to 15 the same keys at columns 8 to
# 15, and lanes 16 to 31 the next eight keys. So `b[0], b[1]` is the B fragment of one MMA, and `b[2], b[3]` that of the
# next. V is treated in the same way, with `.trans`:

# %%
show.diff(step("p8_4_swizzle"), step("p8_5_registers"), "output", context=0)
grow(TABLE, "p8_5_registers")
assert 2 * TABLE[-1][2] < TABLE[-2][2]

# %% [markdown]
# Less than half of the `ldmatrix`. The four new barriers, one per block, are the price of reading Q before the loop.
#
# An MMA comes with 2.06 wavefronts now. Two of them cannot be avoided *for a warp of 16 rows*: a B fragment for two MMAs is 512 bytes,
# which is four wavefronts. Only a warp with more rows can use it more often. That is a step of phase 9.

# %% [markdown]
# ## 7 · The collective store
#
# At the end a lane holds columns $2t$ and $2t + 1$ of its rows: 4 bytes. If it stores them like that, a store of the warp touches 8
# rows, and uses 16 bytes of each sector of 32.
#
# So the lanes trade first, until each has 16 neighbouring bytes. There are two ways: through shared memory, where Q's tile is free by
# now, or by shuffles within the quad. The series takes the first:

# %%
show.diff(step("p8_5_registers"), step("p8_6_store"), "store", context=0)

# %% [markdown]
# Only a `__syncwarp` stands between writing and reading, because each warp reads back its own 16 rows. The barrier
# before it keeps a warp from writing O over Q that it still reads. These rows too are the warp's own, so a second
# `__syncwarp` would do there.
#
# The other way is an exhibit beside the ladder. In round $r$ lane $t$ trades with lane $t \oplus r$:

# %%
show.diff(step("p8_5_registers"), step("p8_side_shuffle_store"), "store", context=0)

# %% [markdown]
# Both ways, beside the store of the step before:

# %%
rows = []
names = ["p8_5_registers", "p8_side_shuffle_store", "p8_6_store"]
for name, how in zip(names, ["lanes alone", "shuffles", "shared memory"]):
    c = counted(name).counters
    sectors = [c["global_stores"], c["global_store_sectors"], c["global_store_ideal"]]
    rows.append([name, how, *sectors, c["shuffles"], c.wavefronts])
show.table(rows, ["step", "by", "store instructions", "sectors", "ideal", "shuffles", "shared wavefronts"])
assert rows[0][3] > 1.9 * rows[2][3] and rows[1][3] == rows[2][3] == rows[2][4]

# %% [markdown]
# A third of the instructions and half of the sectors, either way. But it happens once per block and not once per tile.
# **Verdict:** the shuffles need no shared memory and no barrier; the other way is shorter to write. The counts do not
# decide between them.

# %%
grow(TABLE, "p8_6_store")

# %% [markdown]
# ## 8 · What the budget says, and what the profiler says
#
# The whole ladder in one figure: wavefronts per MMA, the conflicts on the left, all others on the right. Each panel has its own scale.
# The dashed lines are the clocks that an MMA takes, from section 1.

# %%
ladder.conflicts_and_ideal(TABLE, {"A100": CLOCKS["A100"], "H200, mma.sync": CLOCKS["H200"]})
plt.show()

# %% [markdown]
# The last steps are near the A100's line, and clearly above the H200's. On which GPU does shared memory stop being the
# limit, and at which step? By the budget it depends on the clocks per MMA only:

# %%
spent = {r[0]: r[3] / r[1] for r in TABLE}
within = {gpu: [name for name in spent if spent[name] <= clocks] for gpu, clocks in CLOCKS.items()}
within = {gpu: fitting[0] if fitting else None for gpu, fitting in within.items()}
show.table([[gpu, f"{clocks:.1f}", within[gpu] or "not in this phase"] for gpu, clocks in CLOCKS.items()],
           ["GPU", "clocks per MMA", "first step within the budget"])
assert {within[gpu] for gpu in ("RTX 4090", "RTX 3090", "L40S")} == {"p8_4_swizzle"}
assert within["A100"] is within["H200"] is None
copied = counted("p8_6_store").counters["cp_async_bytes"] / 128 / needed
print(f"not in the budget: cp.async writes {copied:.2f} times 128 bytes per MMA")

# %% [markdown]
# On GeForce an MMA takes so long that the swizzle is enough: after it, shared memory is not the limit. On an A100 or an H100 it may still
# be one: two wavefronts per MMA are about as many as an A100's tensor cores leave time for, and more than an H100's. What `cp.async`
# writes would come on top, as far as it takes passes of its own.
#
# This agrees with the published ladder of section 5: the RTX 3090 was nearly done after the swizzle, the A100 was not. (Agrees; it does
# not prove the cause.)

# %% [markdown]
# ### The profiler
#
# Is shared memory the limit on the H200, then? NVIDIA's profiler says for each launch how busy both sides were: the tensor pipe, and
# shared memory. A pipe that is the limit is busy nearly all the time.

# %%
runs = [run for run in recorded("mma") if "H200" in run["machine"]["gpu"]]
COUNTERS = {(c["name"], c["shape"][3]): c for run in runs for c in run.get("counters") or []}
BUSY = ("tensor_active_pct", "shared_active_pct")
busy = [[name, *(f"{COUNTERS[name, d][what]:.0f} %" for d in (64, 128) for what in BUSY)] for name in LADDER]
show.table(busy, ["H200", "D=64: tensor pipe", "shared memory", "D=128: tensor pipe", "shared memory"])

# %% [markdown]
# Two regimes. Up to `p8_3_stages` shared memory is busy most of the time, in the end nearly all of it: there it *is* the limit. After the
# swizzle neither side is.
#
# By the budget alone, the tensor cores could work more than they do. So being near it is necessary, and it is not sufficient: the
# kernel waits for something that the budget does not count. Latency is the first suspect; phase 9 follows it.

# %%
for d in (64, 128):
    old, new = (COUNTERS[name, d] for name in ("p8_3_stages", "p8_6_store"))
    first = COUNTERS["p7_naive", d]["tensor_active_pct"]
    now, allowed = new["tensor_active_pct"], 100 * CLOCKS["H200"] / spent["p8_6_store"]
    assert old["shared_active_pct"] > 80 > 70 > new["shared_active_pct"] and now < allowed
    print(f"D = {d}: the tensor pipe was active {first:.0f} % of the time in phase 7, and is {now:.0f} % now;"
          f" the budget alone allows {allowed:.0f} %")

# %% [markdown]
# ### What was step 5 worth, and why?
#
# `p8_5_registers` has a tenth fewer wavefronts. Is that its gain? The same recording, as a ratio of the step to the one before:

# %%
rows = []
for d in (64, 128):
    old, new = (COUNTERS[name, d] for name in ("p8_4_swizzle", "p8_5_registers"))
    ratios = [f"{new[x] / old[x]:.2f}" for x in ("shared_wavefronts", "instructions", "nanoseconds")]
    rows.append([f"D = {d}", *ratios, f"{old['registers']:.0f} → {new['registers']:.0f}"])
show.table(rows, ["p8_5 over p8_4", "wavefronts", "instructions", "time", "registers per thread"])

# %% [markdown]
# The wavefronts fall by the same part at both head dimensions; the time does not. So the wavefronts alone are not the
# cause. The step also issues fewer instructions. And at $D = 128$ the compiler takes more registers than Q's fragments
# need, which are 32; the others may serve to load ahead. Which of these it is, no counter here isolates: call it a
# hypothesis.

# %%
(w64, t64), (w128, t128) = ((float(r[1]), float(r[3])) for r in rows)
assert abs(w64 - w128) < 0.05 and abs(t64 - t128) > 0.05
print(f"wavefronts: {w64:.2f} and {w128:.2f} of the step before; time: {t64:.2f} and {t128:.2f}")

# %% [markdown]
# ### Were the stages worth it?
#
# Now with times: 1, 2 and 3 stages, in every step that has them, in TFLOP/s. What counts as a difference? More than one per cent.

# %%
BIG = ([4, 16, 4096, 128], [4, 32, 4096, 64])
timed = [r for run in runs for r in run["ladder"] if r["shape"] in BIG and r["inputs"] == "randn"]
SPEED = {(r["name"], r["shape"][3]): r["tflops"] for r in timed if not r["causal"]}
rows = []
for name in (s.name for s in steps(8) if "STAGES" in s.defines):
    for d in (64, 128):
        found = {s: SPEED.get((name if s == 2 else f"{name} STAGES={s}", d)) for s in (1, 2, 3)}
        if all(found.values()):
            best = [s for s in found if found[s] > 0.99 * max(found.values())]
            rows.append([name, d, *(f"{x:.0f}" for x in found.values()), " or ".join(map(str, best))])
show.table(rows, ["step", "D", "1 stage", "2 stages", "3 stages", "best"])

# %% [markdown]
# Read the rows of `p8_3_stages` first. Where shared memory is the limit, stages are worth a percent or so: a pipeline
# hides latency, and there the warps wait for shared memory's bandwidth. The rows after it say what stages are worth
# once the work is fast.

# %%
gains, H200 = [], runtime.limits("H200")
for name, d, *_ in rows:
    keys = [(name if s == 2 else f"{name} STAGES={s}", d) for s in (1, 2, 3)]
    one, two, three = (SPEED[key] for key in keys)
    needs = [(int(COUNTERS[key]["shared_bytes"]), int(COUNTERS[key]["registers"])) for key in keys]
    blocks = [str(H200.resident_blocks(128, *need)) for need in needs]
    gains.append([name, d, f"{two / one - 1:+.0%}", f"{three / two - 1:+.0%}", " ".join(blocks)])
    if name == "p8_3_stages" or d == 64:
        assert abs(two / one - 1) < (0.02 if name == "p8_3_stages" else 0.05)
    else:
        assert two > 1.03 * one
show.table(gains, ["step", "D", "second stage", "third stage", "blocks per SM, 1 to 3 stages"])

# %% [markdown]
# After the swizzle, the second stage pays at $D = 128$ in every step. At $D = 64$ it is hardly felt. A third stage
# helps in one row, and costs in the others, also where it takes no block from the SM. Why, nothing here isolates.
#
# So two is a good choice here, and no law.

# %% [markdown]
# ### The ladder, timed
#
# Bars are TFLOP/s, thin lines the fastest and slowest round. In brackets: the part of FlashAttention-2's speed, measured in turns with
# it.

# %%
for run in runs:
    ours = run | {"ladder": [r for r in run["ladder"] if r["name"] in [*LADDER, "fa2"]]}
    ladder.ladder_figure(ours, (4, 16, 4096, 128), causal=False)
    plt.show()
assert SPEED["p8_4_swizzle", 128] > 4 * SPEED["p8_3_stages", 128]
assert SPEED["p8_6_store", 128] < SPEED["fa2", 128]

# %% [markdown]
# The swizzle is the jump, as the counts said. The store is hardly felt at this length. And FlashAttention-2 is still ahead: phase 9
# goes on from here.

# %% [markdown]
# ## 9 · Beside the ladder
#
# LeetCUDA, a public collection of CUDA kernels, has ideas that this ladder does not keep. The file of each has only the parts in
# which it differs from one of our steps: read what it changes, count what it costs, and judge. The times of all are in 9.6.

# %% [markdown]
# ### 9.1 Split-KV: the keys divided over the warps
#
# This is the other cut of section 2. A fragment of K, once loaded, serves 64 rows instead of 16. But each row has four owners now, so
# its maximum and its P have to travel:

# %%
show.diff(step("p8_4_swizzle"), step("p8_side_split_kv"), "row maxima", "output", context=0)

# %%
kv, q = row("p8_side_split_kv"), row("p8_4_swizzle")
show.table([kv, q], COLUMNS)
assert kv[2] < q[2] and kv[3] > 1.5 * q[3] and kv[5] > 3 * q[5] and kv[4] == q[4] == 0
moved = counted("p8_side_split_kv").counters
print(f"between warps: {moved['shared_stores']} stores and {moved['shared_loads']} loads; split-Q: none")

# %% [markdown]
# Both have the swizzle, P's tile too, so only the cut differs. **Verdict:** split-KV issues fewer `ldmatrix`, as promised. But the
# exchange costs more wavefronts than that saves, and three times the barriers.
#
# Some call this cut FlashAttention-1's. It is not: FlashAttention-1 divides the keys too, but each warp multiplies its own part of P by
# its own rows of V, and the warps then add up their partial O.

# %% [markdown]
# ### 9.2 K and V share one buffer
#
# K is not needed once S is computed, and V is not needed before. So one buffer can serve both: V's copy starts when every warp has read
# K, and the next K's when every warp has read V.

# %%
show.diff(step("p8_6_store"), step("p8_side_shared_kv"), "shared memory", "load K and V", context=0)
show.region(step("p8_side_shared_kv"), "V in K's place")

# %% [markdown]
# ### 9.3 Q in the same buffer too
#
# Q's fragments are in registers before the first tile of K sets out. So its tile can go as well:

# %%
old, new = step("p8_side_shared_kv"), step("p8_side_shared_qkv")
show.diff(old, new, "constants", "shared memory", "Q in registers", context=0)

# %% [markdown]
# What does a block need now, and how many blocks fit on an SM? Shared memory is one limit, registers are another:

# %%
REGISTERS = {(r.step, r.target): r.registers for r in resources()["kernels"] if r.head_dim == 64}
rows = []
for name in ("p8_6_store", "p8_side_shared_kv", "p8_side_shared_qkv"):
    r, shared = counted(name), counted(name).launches[0].shared_bytes
    chips = [runtime.limits(gpu) for gpu in ("H200", "RTX 4090")]
    blocks = [chip.resident_blocks(128, shared, REGISTERS[name, chip.target]) for chip in chips]
    counts = [r.counters["barriers"], r.counters.wavefronts, r.counters["mma_during_copies"]]
    rows.append([name, shared, *counts, REGISTERS[name, "sm_90"], *blocks])
show.table(rows, ["D = 64", "shared bytes", "barriers", "wavefronts", "MMAs with a copy under way",
                  "registers, sm_90", "blocks per SM, H200", "RTX 4090"])
assert [r[1] for r in rows] == [40960, 16384, 8192] and rows[0][4] > 0 == rows[1][4] == rows[2][4]

# %% [markdown]
# **Verdict:** a fifth of the shared memory, three times the barriers, the same wavefronts. And no MMA has a copy beside it any more: V's
# copy is hidden behind the softmax only, K's behind nothing.
#
# Other blocks would have to hide that. But the compiler takes more registers here, so an H200 even holds fewer blocks
# than before. Where shared memory is scarce, as on GeForce, it holds more. There the trade may pay; we have not
# measured it there.

# %% [markdown]
# ### 9.4 Slices of D: shared memory that does not grow
#
# With whole rows in shared memory, `p8_5_registers` needs $640 \cdot D$ bytes per block (two stages). At $D = 512$ no GPU has them. But
# $QK^\top$ is a sum over D: it can grow slice by slice.

# %%
show.diff(step("p8_5_registers"), step("p8_side_tile_d"), "scores", context=0)

# %% [markdown]
# 64 columns of Q and K are copied, multiplied, and given up. Then V passes by in slices too, each of which makes 64 columns of O. Does
# it hold at $D = 512$?

# %%
rows = []
for head_dim in (64, 128, 256, 512):
    r = counted("p8_side_tile_d", n=128, head_dim=head_dim)  # compared with the oracle
    least = 4 * 128 * 128 * head_dim // 4096
    rows.append([head_dim, 640 * head_dim, r.launches[0].shared_bytes, r.counters["mma"], least])
show.table(rows, ["D", "bytes, whole rows", "bytes, slices", "MMAs", "MMAs needed"])
assert len({r[2] for r in rows}) == 1 and rows[-1][1] > runtime.limits("H200").shared_per_block

# %% [markdown]
# It does, in 32 KB. The price: Q is copied again for every tile of keys. And O still lies in registers, all $D$ columns of it. So at
# $D = 512$ two warps share the columns of 16 rows and both compute S: that is why the MMAs are more than needed.
#
# **Verdict:** shared memory O(1) in D, registers not. It is the way to large heads. (LeetCUDA reports 81 TFLOP/s with it on an L20 at
# $D = 512$, and 58 for PyTorch's memory-efficient kernel.)

# %% [markdown]
# ### 9.5 Sums in fp16
#
# There is an MMA whose accumulators are fp16: two registers instead of four. On GeForce it is twice as fast; on A100, H100 and H200 it is
# not. What does it cost? Every partial sum is rounded to 11 bits:

# %%
show.diff(step("p8_6_store"), step("p8_side_fp16_acc"), "state", "rescale", context=0)

# %% [markdown]
# The error against float64, relative to O, while the keys become more. V has the mean 1 here, so that the sums grow with N. (The emulator
# rounds once per MMA. Hardware may round more often inside.)

# %%
def relative_error(name, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) for n in (64, keys, keys))
    q, k, v = q.half(), k.half(), (v + 1).half()
    o, _ = load_inline(step(name), backend="emulator", head_dim=64).forward(q, k, v, echo=False)
    want, _ = reference.attention(q, k, v, causal=False)
    return ((o - want).square().mean() / want.square().mean()).sqrt().item()

SUMS = ("p8_6_store", "p8_side_fp16_acc")
errors = {n: [relative_error(name, n) for name in SUMS] for n in (64, 256, 1024, 4096)}
rows = [[n, *(f"{e:.1e}" for e in both)] for n, both in errors.items()]
show.table(rows, ["keys", "float32 sums", "fp16 sums"])
assert errors[4096][1] > 4 * errors[64][1] and errors[4096][0] < 1.1 * errors[64][0]

# %% [markdown]
# With float32 sums the error is the rounding of the inputs and of P, at any length. With fp16 sums it grows with N. And sums beyond 65504
# overflow: a score, or P times V.
#
# **Verdict:** fast on GeForce, for short sequences and tame values. A comparison with a float32 kernel has to say so. The series keeps
# float32.

# %% [markdown]
# ### 9.6 The exhibits, timed
#
# Each on the H200 beside the step from which it differs, in turns, on random inputs. The error is the largest of O against float64.

# %%
measured = {(r["exhibit"], r["name"], r["shape"][3]): r for run in runs for r in run["exhibits"]}
rows, ratios = [], {}
for name, mine, d in [key for key in measured if key[0] == key[1]]:
    ours, beside = measured[name, mine, d], step(name).beside
    theirs = measured[name, beside, d]["tflops"] if (name, beside, d) in measured else None
    ratios[name, d] = ours["tflops"] / theirs if theirs else None
    compared = [f"{theirs:.0f}", f"{ratios[name, d]:.2f}"] if theirs else ["-", "-"]
    rows.append([name, d, f"{ours['tflops']:.0f}", beside, *compared, f"{ours['error']:.0e}"])
show.table(rows, ["exhibit", "D", "TFLOP/s", "beside", "its TFLOP/s", "ratio", "error"])

# %% [markdown]
# On this GPU split-KV, the shared buffer and the slices all cost speed. The store by shuffles is level with its step. fp16 sums gain nothing
# and lose digits. Q in the same buffer gains a little over K and V alone, as the table shows, but not what the shared buffer lost.
#
# That is a verdict for an H200 and large grids. On a chip with 100 KB per SM it may be another.

# %%
for d in (64, 128):
    assert all(ratios[f"p8_side_{name}", d] < 0.97 for name in ("split_kv", "tile_d", "shared_kv"))
    assert abs(ratios["p8_side_shuffle_store", d] - 1) < 0.03 and ratios["p8_side_fp16_acc", d] < 1.03
    both = ratios["p8_side_shared_kv", d] * ratios["p8_side_shared_qkv", d]
    assert both < 1
    print(f"D = {d}: one buffer for Q, K and V has {both:.2f} of the speed of p8_6_store")

# %% [markdown]
# ## 10 · Milestone: the whole kernel
#
# This is `p8_6_store.cu`, every line of it, from top to bottom. You have met all of its parts. Read it once as a whole: after this page
# you will give its parts another pipeline (exercise 8.7), and then write one from an empty page (8.8).
#
# **Sizes first.** Everything that the compiler has to know is a `constexpr`, derived from `HEAD_DIM` and `STAGES`.

# %%
show.region(step("p8_6_store"), "constants", "swizzle", "copy a tile")

# %% [markdown]
# **The kernel begins.** One dynamic array of shared memory is divided by hand. A block finds its head and its 64 rows from `blockIdx`, and
# the number of key tiles from the diagonal. A lane keeps O, two maxima and two sums in registers.

# %%
show.region(step("p8_6_store"), "shared memory", "which rows", "which keys", "state")

# %% [markdown]
# **Before the loop.** Q is the first group, then come the first `STAGES - 1` tiles. The wait leaves those tiles under way: only Q has to be
# here, for its fragments.

# %%
show.region(step("p8_6_store"), "first copies", "Q in registers")

# %% [markdown]
# **The main loop.** Per tile of keys:
#
# 1. wait, barrier, next copy (section 4);
# 2. $S = QK^\top$: B fragments of K by `ldmatrix.x4`;
# 3. mask, row maxima, two shuffles within the quad;
# 4. rescale `l_i` and O to the new maximum;
# 5. $P = e^{S - m}$, in the registers of S;
# 6. $O \mathrel{+}= PV$: P is packed into A fragments, V comes by `.trans`.

# %%
show.region(step("p8_6_store"), "main loop")

# %% [markdown]
# **The end.** Sum up `l_i` over the quad, divide once, write lse, and store O together (section 7). A row that sees no key gets 0, and
# $-\infty$ as its lse.

# %%
show.region(step("p8_6_store"), "store")

# %% [markdown]
# **The launch.** One block per 64 rows of a head. Beyond 48 KB dynamic shared memory has to be asked for: at $D = 128$ it is 80 KB.

# %%
show.region(step("p8_6_store"), "launch")

# %% [markdown]
# Does it hold? Ragged lengths, grouped heads, causal, at both head dimensions:

# %%
for head_dim in (64, 128):
    generator = torch.Generator().manual_seed(1)
    heads_and_rows = ((4, 150), (2, 190), (2, 190))
    q, k, v = (torch.randn(1, h, n, head_dim, generator=generator).half() for h, n in heads_and_rows)
    module = load_inline(step("p8_6_store"), check=True, head_dim=head_dim)
    o, lse = module.forward(q, k, v, causal=True, echo=False)
    want, want_lse = reference.attention(q, k, v, causal=True)
    assert module.report.ok, module.report
    assert (o - want).abs().max() < 2e-3 and (lse - want_lse).abs().max() < 1e-4
    print(f"D = {head_dim}: agrees with float64, nothing found by the emulator")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - **Own rows, not keys:** a warp with whole rows exchanges nothing.
# - **Copy ahead:** the barrier that publishes tile $j$ also frees tile $j - 1$.
# - **Banks:** $c \oplus (r \bmod 8)$ is a Latin square, so eight rows are one wavefront, not eight.
# - **The budget:** wavefronts per MMA, at most the clocks per MMA. What else the kernel waits for, it does not say.
# - **Exhibits:** less shared memory costs barriers and overlap; fp16 sums cost digits.

# %% [markdown]
# **What you can now do:** copy ahead with `cp.async` and stages, lay tiles out by the XOR swizzle, and count wavefronts before you measure.
#
# Left to explore: why the tensor cores still idle (phase 9); the same ladder on your own GPU, with `flashlab bench mma`.

# %% [markdown]
# ## References
#
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), arXiv 2307.08691. Section 3.3 is
#   `p8_1_split_q`, and says how FlashAttention-1 divided the keys.
# - NVIDIA: *PTX ISA*, "Data Movement and Conversion: cp.async", "Warp-level matrix instructions: ldmatrix, mma"; *CUDA C++ Programming
#   Guide*, "Shared memory: bank conflicts", "Technical specifications per compute capability".
# - NVIDIA: white papers of the *A100* (2020), *GA102* (2020), *H100* (2022) and *Ada* (2022) architectures: multiply-adds per clock and
#   tensor core.
# - Luo, Fan, Li and others: *Benchmarking and Dissecting the Nvidia Hopper GPU Architecture* (2024), arXiv 2402.13499: `mma` on Hopper
#   reaches 62.9 % of the peak on average.
# - *Flash Attention from Scratch* (2025), lubits.ch/flash: 16 kernels on A100 and RTX 3090. Its second kernel is the swizzle: from 15.8 to
#   72.6 % of FlashAttention-2 on the A100, from 49.5 to 98.3 % on the RTX 3090, at N = 4096.
# - DefTruth and others: *LeetCUDA*, github.com/xlite-dev/LeetCUDA, `kernels/flash-attn`: split-KV, shared KV and QKV, tiling along D, fp16
#   sums.
# - Thakkar, Kerr and others: *CUTLASS*, github.com/NVIDIA/cutlass, `include/cute/swizzle.hpp`: swizzles as XORs of address bits.
# - Boehm: *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance* (2022), siboehm.com/articles/22/CUDA-MMM. The form of a ladder
#   with a measured reason for each step.
# - gau-nernst: *learn-cuda*, github.com/gau-nernst/learn-cuda, `07_attention` (2025): such a ladder on an RTX 5090.
