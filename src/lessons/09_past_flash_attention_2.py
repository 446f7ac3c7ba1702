# %% [markdown]
# # Phase 9 · Past FlashAttention-2
#
# Phase 8 ended with a kernel that has no bank conflict, copies ahead, and stores whole sectors. It is still slower than FlashAttention-2. This
# lecture takes it past FlashAttention-2 in nine steps. Each step is a whole file with one new idea, and you will see all of its new lines.
#
# The first half of the course's ladder could be argued with counts alone. Here counts are no longer enough. So this lecture also asks the
# compiler what it made of each step, and recorded measurements what each step was worth. Some steps lose before they win.

# %% [markdown]
# ## What you will be able to do
#
# - compile one loop body twice, so that most tiles pay nothing for the mask;
# - keep addresses out of a loop, with an XOR that distributes over a swizzle;
# - let the row maximum lag behind, and say why the result is the same;
# - choose how many rows a warp owns from a budget of wavefronts and registers;
# - compute how many blocks an SM of your GPU holds, and which resource limits them;
# - tell what an idea is worth from an ablation, not from its place in a ladder;
# - write such a kernel from an empty file.

# %% [markdown]
# ## What you need first
#
# Phase 8: `cp.async`, stages, the XOR swizzle, and the meaning of a *wavefront* (one pass through shared memory, at most 128 bytes). Phase 7:
# fragments, `ldmatrix`, `mma.m16n8k16`.
#
# No GPU is needed. Counts come from the emulator, compiled facts and times are recorded, each with its machine.

# %%
import heapq
import math

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.bench import ablation, hardware, mma, resources, schedule
from flashlab.bench.published import load
from flashlab.bench.records import recorded
from flashlab.check import verify
from flashlab.cuda import load_inline, missing
from flashlab.figures import curves, ladder, show, traces
from flashlab.figures.ladder import COLUMNS, counted, grow, row
from flashlab.kernels import path, step, steps

show.style()
BACKEND = "emulator" if missing("nvcc") else "nvcc"

# %% [markdown]
# ## 1 · Where phase 8 left us
#
# `counted` runs one head of $N = 256$, $D = 64$ in the emulator, compares the result with float64, and returns the counters. The number to
# watch is wavefronts per MMA. (The first run compiles every kernel of phases 7 to 9, which takes some minutes.)

# %%
ladder.prepare(s.name for s in steps(7, 8, 9))  # compiles them; later runs find them in a cache
TABLE = [row(s.name) for s in steps(7, 8)]
show.table(TABLE[-1:], COLUMNS)
mmas, wavefronts = TABLE[-1][1], TABLE[-1][3]
print(f"{wavefronts / mmas:.2f} wavefronts per MMA")

# %% [markdown]
# Shared memory delivers one wavefront per clock and SM (multiprocessor). So the budget is: **as many wavefronts per MMA as an MMA takes
# clocks**. How many clocks is that?
#
# An MMA is 2048 multiply-adds. The whitepapers say how many the tensor cores of an SM do per clock: 1024 on an A100, 256 on an RTX 4090. Hopper's
# 2048 need `wgmma`. What `mma.sync` reaches there has been measured, with nothing else in the loop.

# %%
MMA_CLOCKS = {gpu: 2048 / runtime.GPUS[gpu].fp16_fma_per_clock for gpu in ("A100", "RTX 4090")}

def rate(run, instruction):
    """Units per clock and SM, with the number of warps that does best."""
    return max(r["per_clock"] for r in run["rates"] if r["instruction"] == instruction)

for run in hardware.recorded():
    name = run["machine"]["gpu"].removeprefix("NVIDIA ")
    MMA_CLOCKS[name] = 1 / rate(run, "mma, float32 sums")
    print(f"{name}: {MMA_CLOCKS[name]:.2f} clocks per mma.sync, {1 / MMA_CLOCKS[name]:.0%} of wgmma's peak")
print({gpu: f"{clocks:.2f}" for gpu, clocks in MMA_CLOCKS.items()})

# %% [markdown]
# So phase 8's kernel spends more wavefronts per MMA than a Hopper SM has clocks for, and about as many as an A100 has. On an RTX 4090
# shared memory is far from its limit. Keep the budget in mind; section 5 meets it. It is not sufficient: sections 3 and 6 are about what
# else can make the tensor cores wait.

# %% [markdown]
# ## 2 · Full tiles and masked tiles
#
# The mask costs a comparison and a select per score. But only few tiles need it: the ragged tile at the end, and with a causal mask those on
# the diagonal. From which tile on does some row of the block miss a key?

# %%
show.diff(step("p8_6_store"), step("p9_1_masks"), "which keys")

# %% [markdown]
# `end` is one past the last tile that any row needs. `full` is the first tile that some row does not see whole: for the first row of the
# block, `m_start`, the keys up to `m_start + diagonal` are visible.
#
# `CAUSAL` was a field of the problem, and is now a template parameter. The compiler makes one kernel for each value, and the non-causal one
# has no trace of the diagonal.
#
# Now the loop. Its body becomes a lambda with a compile-time flag, so that it is compiled twice:

# %%
show.diff(step("p8_6_store"), step("p9_1_masks"), "main loop", context=1)

# %% [markdown]
# - `auto is_masked` takes `std::true_type{}` or `std::false_type{}`. Only their *types* differ, so `MASKED` is a constant, and
#   `if (MASKED && ...)` disappears from one of the two bodies.
# - The tiles are walked **backwards**. Then the masked ones come first, and the long loop after them is simple.
# - So the next tile is `j - 1`, and it goes into the stage that tile `j + 1` has left.
# - `STAGES` is a constant now, 2. So the wait in the loop leaves no group under way: it is `<0>`.
#
# How many tiles still pay?

# %%
said = traces.printed(
    "p9_1_masks", ("one tile", 'if (threadIdx.x == 0) printf("%d ", MASKED);'), n=512, causal=True
).split()
print(f"causal, N = 512: {said.count('1')} tiles with a mask, {said.count('0')} without")
assert said.count("1") == 8 and said.count("0") == 28

# %% [markdown]
# One tile of each row of blocks: 8 of 36 here. At $N = 4096$ it is 64 of 2080.
#
# This is the first step whose gain the emulator cannot count, because it counts no comparisons. The compiler knows: the loop over full tiles
# has fewer instructions per MMA. `schedule` reads that loop from the compiled code (SASS) for `sm_90`.

# %%
def compiled(*names, head_dim=128):
    rows = [r for name in names for r in schedule.recorded() if r["step"] == name]
    show.table(schedule.cells(rows, head_dim), ["", *schedule.COLUMNS])
    return {r["step"]: r for r in rows if r["head_dim"] == head_dim}

loop = compiled("p8_6_store", "p9_1_masks")
assert loop["p9_1_masks"]["instructions"] < loop["p8_6_store"]["instructions"]

# %% [markdown]
# (The last two columns are for later: how far in front of its MMA each `ldmatrix` stands.) And the time? From the record, on large grids:

# %%
# (batch, heads, N, D), causal
LARGE = {"D 128": ((4, 16, 4096, 128), False), "D 64": ((4, 32, 4096, 64), False)}
RUNS = recorded("mma")

def worth(name):
    """What a step gained over the one before, at both head_dims, and its registers before and after."""
    for run in RUNS:
        for label, case in LARGE.items():
            at_case, names = ladder.speeds(run, *case), [s.name for s in steps(7, 8, 9)]
            a, b = at_case[names[names.index(name) - 1]], at_case[name]
            print(f"{label}: {a['tflops']:.0f} -> {b['tflops']:.0f} TFLOP/s, "
                  f"times {b['tflops'] / a['tflops']:.2f}; registers "
                  f"{a['registers']} -> {b['registers']}, spilled {b['spill_bytes']} bytes")

worth("p9_1_masks")

# %% [markdown]
# ## 3 · Addresses out of the loop
#
# `at(row, column)` is a multiplication, two shifts and an XOR. Unrolled, it stands in front of every `ldmatrix`. But all of it depends on the
# lane, and nothing on the tile. Two facts let it leave the loop:
#
# - rows 8, 16, ... further only *add* a constant, since the swizzle looks at `row % 8`;
# - columns 16, 32, ... further *XOR* a constant, because they change chunk bits that the lane's own part leaves alone.

# %%
def at(r, column, d=64):
    return r * d * 2 + (column // 8 ^ r % 8) * 16

for r in range(16):
    for c in (0, 8):
        for i in range(6):
            for k in range(4):
                assert at(r + 8 * i, c + 16 * k) == (at(r, c) ^ 32 * k) + 8 * i * 128
print("at(r + 8 i, c + 16 k) == (at(r, c) ^ 32 k) + 8 i * 128, for every lane, i and k")

# %% [markdown]
# So each lane computes three addresses before the loop, for Q, K and V, and each thread one place to copy to and two running pointers to
# copy from:

# %%
show.region(step("p9_2_addresses"), "addresses")
show.diff(step("p9_1_masks"), step("p9_2_addresses"), "scores", "output", context=1)

# %% [markdown]
# In the loop nothing is left of an address but constants: `k_lane ^ (k * 32)`, plus the stage, plus rows. V works the same, with columns in
# the place of `k`.
#
# The copies change too. A thread copies the same chunk in each pass, so a tile is one address plus constants. And tiles of which every row
# exists need no test, so there are two functions:

# %%
show.region(step("p9_2_addresses"), "copy a tile")

# %% [markdown]
# Why does `copy_part` keep an address that is `valid`, when it copies no bytes? Nothing promises that another one works. (On an H200 it did:
# the record `hardware`, part `zero_copy`, has a null pointer and two others. No error, and zeros.)
#
# Since the tiles are walked backwards, only the first one can be ragged. So the loop needs `copy_tile` alone, and its pointers just step
# back. Q and the first tile are one group again, and one wait before the loop is for both:

# %%
show.diff(step("p9_1_masks"), step("p9_2_addresses"), "first copies", "load K and V", context=0)

# %% [markdown]
# *Predict:* a fifth of the loop's instructions go. Is the kernel faster?

# %%
worth("p9_2_addresses")

# %% [markdown]
# With $D = 64$ it is. With $D = 128$ the kernel became *slower*, with fewer instructions and fewer registers. The wavefronts are the same.
# What else has changed? The order in which the compiler put the instructions:

# %%
before, after = compiled("p9_1_masks", "p9_2_addresses").values()
narrow = compiled("p9_1_masks", "p9_2_addresses", head_dim=64)
assert after["instructions"] < 0.85 * before["instructions"]
assert after["at_once"] > 10 * before["at_once"] and after["median_distance"] < before["median_distance"] / 10
assert narrow["p9_2_addresses"]["at_once"] < narrow["p9_1_masks"]["at_once"]

# %% [markdown]
# Read the last two columns. At $D = 128$ the compiler used to load a fragment dozens of instructions before the first MMA that needs it. Now
# most `ldmatrix` stand right in front of their MMA, with no other MMA between: each time the warp waits for the load's whole latency. At
# $D = 64$ it is the other way round, and there the step gained.
#
# That is a fact about the code, and it fits the times in both directions. It is not a proof; an experiment that moves the loads and
# nothing else would be one. Section 6 comes near it.

# %% [markdown]
# ## 4 · Rescale only when it matters
#
# In every tile `acc` is multiplied by a correction, also where no maximum has moved and the correction is 1: $D/8 \cdot 4$
# multiplications per lane. Phase 2 showed that any reference value will do instead of the maximum, as long as nothing overflows.
#
# So let the reference lag behind. Rescale only when the maximum has moved by more than 8, in log2 units. P then stays below $2^8 = 256$, far
# from fp16's 65 504. The decision is one vote per warp. (From here on `copies.cuh` has the swizzle and the copies.)

# %%
show.diff(step("p9_2_addresses"), step("p9_3_rescale"), "row maxima", "rescale", context=1)

# %% [markdown]
# - `moved` is a lane's own wish: one of its rows has moved far. At the start `m_i` is $-\infty$, so the first tile always wishes.
# - `__any_sync` asks the 32 lanes. All get the same answer, so the warp does not split.
# - When the answer is no, `m_i` **stays as it is**, and so do `l_i` and `acc`. All three belong to one reference.
# - *probabilities* subtracts `m_i`, whatever it is.

# %% [markdown]
# How often does a warp rescale? That depends on the numbers. Random ones are the kindest case: after the first tile their maximum hardly
# moves. So here are two inputs: `randn`, and `moving`, in which every tile moves every row's maximum far.

# %%
moving = mma.inputs((1, 1, 512, 64), "moving", "cpu")
cases = {"randn": None, "moving": moving}
rows = [[name, *(traces.rescales(name, n=512, tensors=t)[0] for t in cases.values())]
        for name in ("p9_2_addresses", "p9_3_rescale")]
show.table(rows, ["of 256 tiles a warp rescales, inputs:", *cases])
assert rows == [["p9_2_addresses", 256, 256], ["p9_3_rescale", 32, 256]]

# %% [markdown]
# With `randn` a warp rescales once, at its first tile. With `moving` it rescales in every tile, as before, and the vote comes on top.
# Real attention lies between. So whoever measures this step on random numbers alone measures its best case. Both, from the record:

# %%
for run in RUNS:
    for kind in ("randn", "moving"):
        for label, (shape, _) in LARGE.items():
            plain, causal = (ladder.gains(run, shape, c, kind)["p9_3_rescale"] for c in (False, True))
            print(f"{kind:6} {label:5}: times {plain:.2f}, causal {causal:.2f}")

# %% [markdown]
# At this point of the ladder it gains a little at $D = 64$ on random numbers. At $D = 128$ it gains nothing, and with the causal mask it
# loses. Where every tile moves it costs. Section 12 asks again, inside the final kernel.

# %% [markdown]
# *Is it exact?* In exact arithmetic, yes. In fp16, P's relative rounding does not depend on its size, unless it is so small that it becomes
# subnormal, and a lagging reference makes P larger, not smaller. But a row's last bits now depend on its neighbours: one row that moves far makes its whole warp rescale.
# FlashAttention-4 (2026) has the idea too, in its kernels for Blackwell; its authors call it conditional rescaling.

# %% [markdown]
# ## 5 · 32 query rows per warp
#
# Now the budget. An `ldmatrix.x4` delivers 512 bytes, which are four wavefronts. With 16 rows per warp these bytes of K or V feed two MMAs.
# With **32 rows**, two MMA tiles, they feed four. (Split-KV had that advantage in phase 8. Here it comes without an exchange.)

# %%
show.diff(step("p9_3_rescale"), step("p9_4_warp_tiles"), "scores", "output", context=1)

# %% [markdown]
# The new inner loop over `m` is all there is to it: one `b`, loaded once, multiplied with `M_TILES` fragments of Q, or of P.
#
# Everything a lane owns of its rows now comes twice. Row `r` of a lane is row `r % 2` of MMA tile `r / 2`:

# %%
show.region(step("p9_4_warp_tiles"), "state", "rescale", "probabilities")

# %% [markdown]
# The price is registers. At $D = 128$ a lane has 128 accumulators and 64 scores, of 255 registers in all. So there Q goes back to shared
# memory, and its fragments are loaded again for each tile. With $D = 64$ they stay.

# %%
show.diff(step("p9_3_rescale"), step("p9_4_warp_tiles"), "constants", "Q in registers", context=0)
TABLE += [row(s.name) for s in steps(9)[:3]]
grow(TABLE, "p9_4_warp_tiles")
assert 2 * TABLE[-1][3] < 1.1 * TABLE[-2][3]

# %% [markdown]
# The wavefronts are half. `__launch_bounds__(THREADS, BLOCKS_PER_SM)` asks the compiler to keep to the registers with which two blocks fit on
# an SM.
#
# Here is the whole path so far: on the left the bank conflicts, on the right what is left, with the clocks of an MMA as lines. Each panel
# has its own scale.

# %%
ladder.conflicts_and_ideal(TABLE, {gpu: c for gpu, c in MMA_CLOCKS.items() if gpu != "RTX 4090"})
plt.show()

# %% [markdown]
# With 32 rows per warp shared memory costs fewer clocks than the MMAs that it feeds, on each of these GPUs. This could be known before any GPU
# ran it.

# %%
per_mma = {r[0]: r[3] / r[1] for r in TABLE}
for rows, name in ((16, "p9_3_rescale"), (32, "p9_4_warp_tiles")):
    print(f"{rows} rows per warp: {per_mma[name]:.2f} wavefronts per MMA")
assert per_mma["p9_3_rescale"] > 2 > 1.25 > per_mma["p9_4_warp_tiles"]
worth("p9_4_warp_tiles")

# %% [markdown]
# At $D = 128$ the compiler ran out of registers: some values are *spilled*, kept in local memory.

# %% [markdown]
# ## 6 · Fragments one step ahead
#
# Section 3 asked for an experiment that moves the loads and nothing else. This is an attempt. The compiler may put an `ldmatrix` right in
# front of the MMAs that need it. So say it in the source: double-buffer the *fragments*. Load the next one, then issue this one's MMAs.

# %%
show.diff(step("p9_4_warp_tiles"), step("p9_5_prefetch"), "scores", context=1)

# %% [markdown]
# `b` and (where it is not in registers) Q's fragment have two places each. `step` counts the fragments of K through both loops; its last bit
# chooses the place. All of it is unrolled, so that no index is computed at run time.

# %%
grow(TABLE, "p9_5_prefetch")
assert TABLE[-1][1:] == TABLE[-2][1:]
print("not one count has changed: only the order of the instructions")
worth("p9_5_prefetch")

# %%
wide = compiled("p9_4_warp_tiles", "p9_5_prefetch")
same = compiled("p9_4_warp_tiles", "p9_5_prefetch", head_dim=64)
assert wide["p9_5_prefetch"]["at_once"] < wide["p9_4_warp_tiles"]["at_once"] / 4
assert same["p9_5_prefetch"] | {"step": ""} == same["p9_4_warp_tiles"] | {"step": ""}

# %% [markdown]
# At $D = 64$ the compiled loop is the same as before: the compiler had already moved the loads, and the speed does not change. At $D = 128$
# almost no load stands at its MMA any more, and the kernel is faster.
#
# But be careful: something else has changed with it. Before, this kernel spilled. With the prefetch in the source it does not:

# %%
spills = [(r.step, r.spill_bytes) for r in resources.recorded()["kernels"]
          if r.target == "sm_90" and r.head_dim == 128 and r.kernel == "flash_forward<false>"]
print({name: spilled for name, spilled in spills if name in ("p9_4_warp_tiles", "p9_5_prefetch")})
assert dict(spills)["p9_4_warp_tiles"] > dict(spills)["p9_5_prefetch"] == 0

# %% [markdown]
# So the gain at $D = 128$ has several candidates: K's fragments earlier, Q's fragments earlier, no spills. This step does not separate them.
# Section 12 takes one of them out alone. Written out for V as well, the prefetch gained nothing more (section 15).

# %% [markdown]
# ## 7 · The order of the blocks
#
# A causal block of the first rows has one tile of keys, one of the last rows has all of them. If the long ones start last, the GPU waits for
# them at the end with most of its SMs idle. *Long ones first* is the oldest rule of scheduling.
#
# A model in six lines: 264 places, two blocks on each of 132 SMs. A block takes as long as it has tiles, and goes to the first free place.

# %%
def finish(blocks, places=264):
    """When the last block ends, if each is started in order at the place that is free first."""
    free = [0] * places
    for length in blocks:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)

# %%
for heads, n in ((64, 4096), (16, 4096), (16, 2048)):
    blocks = [128 * (i + 1) // 64 for i in range(n // 128)] * heads
    ideal = max(sum(blocks) / 264, max(blocks))
    natural, sorted_ = finish(blocks) / ideal, finish(sorted(blocks, reverse=True)) / ideal
    print(f"{heads} heads, N {n}: in order {natural:.2f} of the ideal time, long ones first {sorted_:.2f}")
    assert sorted_ <= natural

# %% [markdown]
# The kernel gets it from its block's number. Within a group of heads the last rows of all heads go first. Why groups? Blocks that run at
# the same time should find their K and V in the L2 cache. A group may fill half of it, since Q and O pass through too.
#
# From here on the work of a warp on one tile does not change any more. `warp_tile.cuh` has it, as functions.

# %%
show.diff(step("p9_5_prefetch"), step("p9_6_order"), "which rows", "launch", context=1)

# %% [markdown]
# Without a causal mask the order does not change. With one, the record says how much of the model's promise came true. The model leaves out
# that blocks which run side by side slow each other.

# %%
for run in RUNS:
    for label, (shape, _) in LARGE.items():
        print(f"{label}, causal: times {ladder.gains(run, shape, True)['p9_6_order']:.2f}; "
              f"not causal: {ladder.gains(run, shape, False)['p9_6_order']:.2f}")

# %% [markdown]
# ## 8 · Lower tiles, and D = 256
#
# 128 rows per block are too many when there are few rows: with one head of $N = 1024$ there are eight blocks for 132 SMs. Below 1.5 blocks per
# SM the kernel takes 64 rows per block, 16 per warp: each block is less efficient, but there are twice as many.
#
# The tile's height becomes a template parameter, a `struct` whose constants follow from it:

# %%
show.diff(step("p9_6_order"), step("p9_7_tiles"), "constants", "launch", context=1)

# %% [markdown]
# With it $D = 256$ fits too: eight warps of 16 rows, and one block per SM. The choice is made at launch, from the number of blocks and
# SMs.

# %%
for sms in (1, 132):
    launch = counted("p9_7_tiles", n=256, sms=sms).launches[0]
    print(f"a GPU of {sms} SMs: {launch.grid[0]} blocks of {launch.kernel}")
launch = counted("p9_7_tiles", n=128, head_dim=256).launches[0]  # compared with the oracle
fits = runtime.limits("H200").shared_per_sm // (launch.shared_bytes + 1024)
print(f"D = 256: {launch.block[0] // 32} warps, {launch.shared_bytes // 1024} KiB; {fits} block per SM")
assert fits == 1 and launch.block[0] == 8 * 32

# %% [markdown]
# ## 9 · Tiles that fit the device
#
# Two blocks at $D = 128$ want $2 \cdot 96$ KiB of shared memory, and 1 KiB more each, which the system takes. An H100 or H200 SM has 228 KiB,
# an A100's 164, a GeForce's 100. There a tile of 64 keys would leave one block per SM: four warps, one on each scheduler, and nothing to do
# while it waits.
#
# So the launch asks the device, and halves the tiles of K and V until two blocks fit:

# %%
show.diff(step("p9_7_tiles"), step("p9_8_devices"), "constants", "launch a tile", context=1)

# %%
for gpu in ("H200", "A100", "RTX 4090"):
    limits = runtime.limits(gpu)
    launch = counted("p9_8_devices", head_dim=128, shared_limit=limits.shared_per_block).launches[0]
    blocks = limits.shared_per_sm // (launch.shared_bytes + 1024)
    print(f"{gpu:8}: {launch.kernel}, {launch.shared_bytes // 1024} KiB per block, {blocks} blocks per SM")
    assert blocks == 2

# %% [markdown]
# Would one stage for V do instead? It saves 16 KiB per block: two blocks of 81 KiB fit on an A100, but not in the 100 KiB of a GeForce. And
# smaller tiles have a price, since Q's fragments are loaded again for every tile.
#
# How many blocks an SM holds is the least of three quotients: its registers, its shared memory, and its warps, each divided by what a block
# takes.

# %%
GPUS = ("A100", "H200", "RTX 4090")
NAMES = [s.name for s in (*steps(8), *steps(9))]

def speed_of_light(gpu, head_dim=128):
    """Of each step: registers, blocks per SM and what limits them, and what shared memory allows."""
    for o in resources.occupancy(gpu, NAMES, head_dim):
        limit = runtime.limits(gpu).shared_per_block
        r = counted(o.kernel.step, head_dim=head_dim, shared_limit=limit)
        allowed = min(1, MMA_CLOCKS.get(gpu, math.nan) * r.counters["mma"] / r.counters.wavefronts)
        yield [o.kernel.registers, f"{o.blocks}: {o.limit}", f"{allowed:.0%}"]

# %% [markdown]
# Here is every step on three GPUs. An MMA's clocks are section 1's.

# %%
heads = [f"{gpu}: {what}" for gpu in GPUS for what in ("registers", "blocks", "allowed")]
columns = zip(NAMES, *map(speed_of_light, GPUS))
show.table([[name, *(cell for gpu in gpus for cell in gpu)] for name, *gpus in columns], ["D = 128", *heads])

# %% [markdown]
# *Registers* are ptxas's, for the GPU's own target. *Blocks*: per SM, four warps each, and what allows no more. *Allowed*: clocks per MMA divided
# by wavefronts per MMA, the share of their time that shared memory lets the tensor cores work.
#
# - On an H200 registers limit the last steps to two blocks.
# - On an A100 and a GeForce the *size* of shared memory left one block, until `p9_8_devices` made it two.
# - On a GeForce an MMA takes 8 clocks, so the *speed* of shared memory was no limit from the swizzle on.
# - Fewer warps are not worse by themselves: the fastest kernels hold the fewest.

# %% [markdown]
# ## 10 · Split the keys, after all
#
# And when even low blocks are too few? Then several blocks share the keys of the same rows. Each leaves a part $(o_s, \text{lse}_s)$ in a
# workspace, and a second kernel merges them, weighted by $e^{\text{lse}_s}$. That is phase 0's associative merge. Inference engines call it
# *flash decoding*.
#
# Split-KV was wrong *within* a block, where it forces an exchange for each tile. *Between* blocks it exchanges once.

# %%
show.diff(step("p9_8_devices"), step("p9_flash"), "which keys", "store", context=0)

# %% [markdown]
# A block walks its share of the tiles, from `end - 1` down to `begin`. It stores its part in float, unrounded, and its `lse` beside it. Then
# the merge, one warp per row:

# %%
show.region(step("p9_flash"), "weighted sum")
for launch in counted("p9_flash", n=1024, sms=132).launches:
    print(f"one head, N = 1024, 132 SMs: {launch.kernel}, {launch.grid[0]} blocks")

# %% [markdown]
# 16 row blocks times 4 shares of the keys, and 256 small blocks that merge. This is the last file.
#
# Does it still compute attention? Here is everything the checker has: causal and not, grouped heads, ragged and empty lengths, strides, scores
# of $\pm 200$ and of $-2^{24}$, rows that see no key. The cell runs natively where there is a GPU with `nvcc`, else in the emulator.

# %%
module = load_inline(step("p9_flash").path, backend=BACKEND)
options = dict(causal=True, gqa=True, empty=True, dtypes=(torch.float16, torch.bfloat16), head_dims=(64, 128))
print(verify(module.forward, **options).verdict)

# %% [markdown]
# ## 11 · The ladder
#
# All that was counted, $N = 256$, $D = 64$, one head:

# %%
TABLE += [row(s.name) for s in steps(9)[5:]]
show.table(TABLE, COLUMNS)
assert [r[0] for r in TABLE] == [s.name for s in steps(7, 8, 9)]

# %% [markdown]
# And what it is worth, measured with `flashlab bench mma`: each step and FlashAttention-2 (`scaled_dot_product_attention` with its flash
# backend forced), as CUDA graphs that are replayed in turn in one run. A bar is the median of the rounds; the thin line goes from the slowest
# to the fastest.

# %%
for run in RUNS:
    for shape, causal in (*LARGE.values(), ((4, 16, 4096, 128), True)):
        if ladder.ladder_figure(run, shape, causal):
            plt.show()
print("machines recorded:", len(RUNS))

# %% [markdown]
# Each step's speed over the step before, for four large problems and a small one:

# %%
CASES = {"D 128": ((4, 16, 4096, 128), False), "causal": ((4, 16, 4096, 128), True),
         "D 64": ((4, 32, 4096, 64), False), "D 64, causal": ((4, 32, 4096, 64), True),
         "1 head, N 1024, D 64": ((1, 1, 1024, 64), False)}
for run in RUNS:
    gains = [ladder.gains(run, *case) for case in CASES.values()]
    rows = [[s.name, *(f"{g[s.name]:.2f}" for g in gains)] for s in steps(8, 9) if s.name in gains[0]]
    show.table(rows, ["step", *CASES], align="lrrrrr")

# %% [markdown]
# What to learn from it:
#
# - **A step can lose and still be right.** `p9_2_addresses` alone would have been thrown away at $D = 128$. In the final kernel it is worth
#   a good deal there, as the next section shows.
# - **Order is part of the result.** What a step gains depends on the bottleneck of that moment. The ablation in the next section asks again,
#   at the end.
# - **Small problems live on the last steps.** 32 rows per warp halve the number of blocks; for one head that is *slower*, until blocks may be
#   low again and share the keys.

# %%
for run in RUNS:
    first, last = gains[0], gains[4]
    assert first["p9_2_addresses"] < 1 < first["p9_4_warp_tiles"]
    assert last["p9_4_warp_tiles"] < 1 < min(last["p9_7_tiles"], last["p9_flash"])
print("all three are in the record")

# %% [markdown]
# ## 12 · What makes it faster than FlashAttention-2?
#
# Not because of 32 rows per warp alone: FlashAttention-2 has 32 rows per warp too, at these head_dims. So which ideas make the difference?
# Take the *final* kernel, leave out one idea, keep all the others, and measure. That is an **ablation**. A value below 1 is what the kernel
# falls to without the idea; the last row is FlashAttention-2 on the same scale.

# %%
for run in ablation.recorded():
    for kind in ("randn", "moving"):
        print(f"{run['machine']['gpu']}, inputs {kind}:")
        show.table(ablation.table(run, kind).rows, ablation.table(run, kind).columns)
print("machines whose ablation is recorded:", len(ablation.recorded()))

# %% [markdown]
# Read it row by row.
#
# - **The swizzle** is worth the most by far. Without it every fragment waits for banks.
# - **32 rows per warp** and **full tiles without a mask** are worth several percent everywhere, **copies during the work** some percent.
# - **Addresses out of the loop** are worth much at $D = 128$ and nothing at $D = 64$. When they came in, it was the reverse.
# - **Lazy rescaling** is worth a few percent on random numbers, and nothing where every tile moves. It costs nothing there either.
# - **Fragments of K one step ahead** are worth nothing here, although section 6 gained at $D = 128$.

# %%
def without(run, idea, head_dim, kind="randn"):
    return next(r["vs_whole"] for r in run["rows"] if (r["name"], r["shape"][3], r["inputs"], r["causal"])
                == (idea, head_dim, kind, False))

for run in ablation.recorded():
    assert without(run, "the swizzle", 128) < 0.5
    addresses = [without(run, "addresses out of the loop", d) for d in (64, 128)]
    assert addresses[1] < 0.95 < addresses[0]
    assert abs(addresses[1] - without(run, "fa2", 128)) < 0.03
    assert without(run, "lazy rescaling", 128) < 0.97 < without(run, "lazy rescaling", 128, "moving")
    assert without(run, "fragments one step ahead", 128) > 0.98
    assert all(without(run, "copies during the work", 128, kind) < 0.985 for kind in ("randn", "moving"))
    assert without(run, "Q in registers", 64) < 0.97 < 0.98 < without(run, "Q in registers", 128)
    assert without(run, "16-byte stores", 128) < 0.99 < without(run, "16-byte stores", 64)
    assert without(run, "fa2", 128) < without(run, "fa2", 128, "moving") < 1
print("all of that is in the record")

# %% [markdown]
# Both answers side by side, for the steps that can be taken out of the last kernel. *When it came*: speed with the step over speed before it. *At the end*: the last kernel over
# the last kernel without it. Random inputs.

# %%
IDEAS = {
    "p8_4_swizzle": "the swizzle", "p8_6_store": "16-byte stores",
    "p9_1_masks": "full tiles without a mask", "p9_2_addresses": "addresses out of the loop",
    "p9_3_rescale": "lazy rescaling", "p9_4_warp_tiles": "32 rows per warp",
    "p9_5_prefetch": "fragments one step ahead", "p9_6_order": "long blocks first",
}
ladders = {run["machine"]["gpu"]: run for run in RUNS}
for taken_out in ablation.recorded():
    came = [ladder.gains(ladders[taken_out["machine"]["gpu"]], *case) for case in list(CASES.values())[:4]]
    left = {(r["name"], tuple(r["shape"]), r["causal"]): 1 / r["vs_whole"]
            for r in taken_out["rows"] if r["inputs"] == "randn" and "vs_whole" in r}
    rows = [[name, idea, *(f"{gain[name]:.2f}" for gain in came),
             *(f"{left[(idea, *case)]:.2f}" for case in list(CASES.values())[:4])]
            for name, idea in IDEAS.items()]
    heads = [f"{when}: {case}" for when in ("when it came", "at the end") for case in list(CASES)[:4]]
    show.table(rows, ["step", "idea", *heads], align="ll" + "r" * 8)

# %% [markdown]
# The other rows are smaller:
#
# - **Long blocks first** helps where it does something: with the causal mask. **Q in registers** helps at $D = 64$ only.
# - **16-byte stores** help at $D = 128$. That was not to be expected: the step that brought them gained hardly anything.

# %% [markdown]
# FlashAttention-2 has the swizzle, asynchronous copies, masked tiles apart, and 32 rows per warp. With moving maxima lazy rescaling does
# not help, but the kernel is still faster. Addresses out of the loop are worth as much as the whole distance at $D = 128$, and nothing at
# $D = 64$, where the distance is as large. (How FlashAttention-2 computes its addresses we have not looked up.) So no single idea of this
# list explains it at both.
#
# Nsight Compute ran both. FlashAttention-2's kernel says its tile in its name: `head_dim`, rows, keys, warps. And how many instructions does each
# issue per MMA?

# %%
for run in hardware.recorded():
    clocks = 1 / rate(run, "mma, float32 sums")
    per_mma = {}
    for r in (r for r in run["stalls"] if r["launch"].endswith("D=128")):
        mmas = r["tensor_active_pct"] / clocks  # an MMA keeps the pipe active for that many clocks
        per_mma[r["launch"]] = 4 * r["issue_active_pct"] / mmas  # four schedulers
        print(f"{per_mma[r['launch']]:.1f} instructions per MMA: {r['kernel'][:62]}")
    assert per_mma["stalls, fa2, D=128"] > 1.3 * per_mma["stalls, D=128"]

# %% [markdown]
# (Section 6 counted 3.5 per MMA for our loop. That includes the rescaling, which is nearly always skipped: its $2 D/8 \cdot 4$ multiplications
# of `acc` are 128 for 256 MMAs, the missing half.)
#
# That is the largest difference that is measured: FlashAttention-2 issues many more instructions for the same MMAs. It fits what the steps
# of this lecture do: masks, addresses and rescaling all take instructions out of the loop. That this is *the* cause is a hypothesis.
# Nobody has taken them out of FlashAttention-2 one by one.

# %% [markdown]
# ## 13 · What limits it now
#
# Start with the exponentials. A score costs one, and $4D$ FLOPs of MMAs. An MMA has 4096 FLOPs, so there are $1024 / D$ exponentials per MMA.
# Both rates were measured on their own. How many clocks does the one take beside the other?

# %%
for run in hardware.recorded():
    for head_dim in (64, 128):
        clocks = 1024 / head_dim / rate(run, "exponentials")
        share = clocks * rate(run, "mma, float32 sums")
        print(f"{run['machine']['gpu']}, D = {head_dim}: {clocks:.2f} clocks of exponentials per MMA, "
              f"{share:.0%} of the MMA's own")
        assert share < 1
print("machines whose rates are recorded:", len(hardware.recorded()))

# %% [markdown]
# They run on another unit than the MMAs, so in principle both fit side by side. But within one warp P has to be there before $PV$ begins. Only
# *another* warp's MMAs can fill that time, and an SM holds two blocks: two warps on each scheduler. Nothing arranges that one of them computes
# exponentials while the other multiplies.
#
# How much do they fill? Nsight Compute counts how long the tensor pipe is active. As a cross-check, that activity divided by the MMAs of the launch
# should be the same for every kernel: what one MMA takes.

# %%
for run in hardware.recorded():
    took = []
    for r in run["stalls"]:
        batch, heads, n, d = (4, 32, 4096, 64) if r["launch"].endswith("D=64") else (4, 16, 4096, 128)
        mmas = 4 * batch * heads * n * n * d / 4096 / run["machine"]["sms"]
        took.append(r["tensor_active_pct"] / 100 * r["nanoseconds"] / mmas)
        print(f"{r['launch']:19}: tensor pipe active {r['tensor_active_pct']:.0f} %, "
              f"{took[-1]:.3f} ns per MMA")
    assert max(took) < 1.02 * min(took)

# %% [markdown]
# They agree. So the tensor cores work about two thirds of the time at $D = 128$, and less at $D = 64$, where there are more exponentials per
# MMA. Where does the rest go?
#
# An SM has four schedulers. Each can issue one instruction per clock, from a warp that is ready, and each has two warps. For each instruction
# that was issued, Nsight Compute says how many warps waited meanwhile, and for what.

# %%
for run in hardware.recorded():
    show.table(hardware.stall_rows(run), hardware.STALL_COLUMNS, align="lrrr")
    ours = next(r for r in run["stalls"] if r["launch"] == "stalls, D=128")
    assert max(hardware.REASONS, key=lambda name: ours.get(name) or 0) == "wait"
    assert ours["warps_eligible"] < 1
print("machines whose stalls are recorded:", len(hardware.recorded()))

# %% [markdown]
# - *wait*: the instruction before has a fixed latency, and the next one depends on it, or may not follow at once;
# - *math pipe throttle*: the unit, here mostly the tensor cores, is busy. This is the good reason to wait;
# - *short scoreboard*: a result from shared memory (`ldmatrix`) or of an exponential is not there yet;
# - *not selected*: ready, but the scheduler took the other warp;
# - *dispatch stall*: the scheduler had chosen the warp, but the dispatch unit held it back;
# - *long scoreboard*: a result from global or local memory is not there yet;
# - *barrier*: another warp of the block has not come to `__syncthreads()`.

# %% [markdown]
# No unit is used up, neither the tensor cores nor shared memory. It is **latency**: most of the time none of a scheduler's two warps is
# ready. More warps? With 32 rows per warp registers allow no more. With 16 rows they do, and both tries were slower (sections 12 and 15).
# cuDNN's kernel for Hopper goes another way, with `wgmma` and specialised warps; it is in the tables of `docs/results.md`. Phase 11 goes there.

# %% [markdown]
# ## 14 · Beside the published figures
#
# A published course, LeetCUDA, built the first third of this ladder (tile MMA and tile warps, `cp.async`, one stage and two, collective store)
# and printed 36 shapes, measured on *an Ada GPU*. Absolute times of two GPUs do not compare. Ratios to FlashAttention-2 *on the same machine*
# do, with care.

# %%
KEY = ("batch", "heads", "seq_len", "head_dim", "variant")
ada = {tuple(r[k] for k in KEY): r["ms"] for r in load("mma_stages_ada")}
shapes = list(dict.fromkeys(key[:4] for key in ada))
STEPS = {"mma_naive": "grey", "mma_stage1": "yellow", "mma_stage2": "orange"}
theirs = {v: [ada[(*s, "flash_official")] / ada[(*s, v)] for s in shapes] for v in STEPS}
places = range(len(shapes))
lines = [(f"published, Ada: {v}", [x + (v == "mma_stage2") / 4 for x in places], theirs[v], hue, "o")
         for v, hue in STEPS.items()]
for run in RUNS:
    ours = {tuple(r["shape"]): r["vs_fa2"] for r in run["final"]
            if r["table"] == "mma_stages_ada" and r["name"] == "p9_flash"}
    name = f"p9_flash, {run['machine']['gpu']}"
    lines.append((name, places, [ours[s] for s in shapes], "blue", "D"))

# %%
fig, ax = plt.subplots(figsize=(8.6, 4.2))
curves.curves(ax, lines, size=5, ylim=(0, 2.9), ylabel="speed / FlashAttention-2", legend="upper right",
              xlabel="batch · heads; in each: N 1024 with D 64 and 128, N 2048 with D 64 and 128",
              title="36 published shapes, each against FlashAttention-2 on its own machine")
ax.axhline(1, color=show.COLORS["black"], linewidth=1)
ax.set_xticks(places[::4], [f"{b} · {h}" for b, h, *_ in shapes[::4]], ha="left")
ax.grid(axis="x", visible=True)
plt.show()

# %% [markdown]
# Orange, yellow and grey are theirs, on Ada; blue is ours, on the machine named. At the black line a kernel is as fast as FlashAttention-2. The
# published kernels win at some small shapes. There their FlashAttention-2 takes nearly the same time for one head as for eight (phase 10, appendix B), as if it were the time of a launch: a
# hypothesis. How the published times were taken is not known; ours are of kernels alone, without their launches.

# %%
def geometric_mean(x):
    return math.exp(sum(map(math.log, x)) / len(x))

for name, values in theirs.items():
    print(f"published, Ada: {name:10} {geometric_mean(values):.2f} of FlashAttention-2, "
          f"worst {min(values):.2f}")
for run in RUNS:
    for table, s in mma.summary(run).items():
        print(f"{run['machine']['gpu']}: {table:20} {s['geomean_vs_fa2']:.2f} over {s['shapes']} shapes, "
              f"worst {s['worst']:.2f}")

# %% [markdown]
# All of these are on random numbers. At the large shapes the record also has maxima that move in every tile. FlashAttention-2 rescales in every
# tile, whatever the numbers; our kernel now has to do the same.

# %%
for run in RUNS:
    big = {(tuple(r["shape"]), r["causal"], r["inputs"]): r for r in run["final"] if r["name"] == "p9_flash"}
    rows = []
    for label, case in list(CASES.items())[:4]:
        randn, moving = (big[(*case, kind)] for kind in ("randn", "moving"))
        rows.append([label, *(f"{r['tflops']:.0f} ({r['vs_fa2']:.2f})" for r in (randn, moving))])
        assert 1 < moving["vs_fa2"] < randn["vs_fa2"]
    show.table(rows, ["p9_flash, TFLOP/s (of FlashAttention-2)", "randn", "moving"], align="lrr")

# %% [markdown]
# The tables of `docs/results.md` have these numbers. The ladder's for the same kernel and shape may differ by a percent or two, because they are other
# measurements: there all steps take turns, here the kernel takes turns with cuDNN and unfused PyTorch, and the GPU's clock and caches are not the
# same. So compare kernels within one of them only. Both have FlashAttention-2 for that.

# %% [markdown]
# ## 15 · What did not help
#
# TFLOP/s on an H200 (2026-11-20, fp16, medians, $D\,128$ unless said), in brackets the ratio to FlashAttention-2 in the same run. Shapes
# and more of them: `notes/phase_09_experiments.md`. All of it was tried on the kernel as it was then.

# %% [markdown]
# | tried | TFLOP/s | compare with |
# |---|---|---|
# | 8 warps per block, one block per SM | 343 (0.99) | 356 (1.03): 4 warps, two blocks |
# | 16 rows per warp, three blocks per SM | 298 (0.86) | 335 (0.97): two blocks |
# | BLOCK_N 128, $D = 64$, causal | 282 (1.03) | 318 (1.17): BLOCK_N 64 |
# | next tile's scores beside this tile's softmax | 339 (0.99) | 356 (1.03): one after the other |
# | V's fragments prefetched by hand | 374 (1.09) | 371 (1.09): left to the compiler |
# | K in two stages and V in one | 399 (1.13) | 398 (1.13): two of both |
# | `volatile` MMAs; the `.L2::128B` hint | no difference | |

# %% [markdown]
# ## 16 · The whole kernel
#
# You have met nearly every line of `p9_flash.cu` as a change; new are the merge's frame and the division of the keys at the launch. Now
# read it as a whole, from top to bottom, part by part. In the exercises you will put such a kernel together from its parts, and then
# write one.
#
# **The constants** fix the shape of the work. `Tile` holds all that depends on the tile's size, so that one source gives several kernels.

# %%
show.region(step("p9_flash"), "constants")

# %% [markdown]
# **The swizzle and the copies.** `at` is called before the loop only. Every thread copies its own chunk, and those `ROWS_PER_PASS` rows below.

# %%
show.region(path("copies.cuh"), "swizzle", "copy a tile")

# %% [markdown]
# **Who works on what.** The block's number says which rows of which head, and which share of the keys. Q lies first in shared memory, then the
# stages of K, then those of V. From `begin` to `end` the block walks backwards; from `full` on its tiles are masked.

# %%
show.region(step("p9_flash"), "shared memory", "which rows", "which keys")

# %% [markdown]
# **What a lane keeps**: its part of O, the maxima and sums of its rows, its addresses. Then the first copies: Q, and the last tile of K and V,
# in one group. After the wait and the barrier Q's fragments move to registers, where there is room.

# %%
show.region(step("p9_flash"), "state", "addresses", "first copies", "Q in registers")

# %% [markdown]
# **The main loop** waits for a tile, asks for the next one, and calls the functions of `warp_tile.cuh`, one after the other.

# %%
show.region(step("p9_flash"), "main loop")

# %% [markdown]
# **The functions.** Follow one tile through them:
#
# | part | from step | what it does |
# |---|---|---|
# | *load K and V* | `p8_3`, `p9_2` | waits for tile $j$, then asks for tile $j - 1$. One barrier does two jobs |
# | *scores* | `p9_4`, `p9_5` | $QK^\top$: a fragment ahead, each feeds 2 `M_TILES` MMAs |
# | *row maxima* | `p9_1` | masks, if `MASKED`; a row is in the four lanes of a quad |
# | *rescale* | `p9_3` | only if some row of the warp has moved far |
# | *probabilities* | `p7` | $2^{x - m}$ in place; sums stay the lane's own |
# | *output* | `p7`, `p9_4` | $PV$: accumulators of S become A fragments |

# %%
show.region(path("warp_tile.cuh"), "scores", "row maxima", "rescale", "probabilities", "output")

# %% [markdown]
# **The store.** Only now are the four lanes' sums added. Q's shared memory has done its work, so O goes through it to be stored in 16-byte pieces;
# a part of split keys goes to the workspace, in float.

# %%
show.region(step("p9_flash"), "store")

# %% [markdown]
# **The merge**, a second kernel, with one warp per row. **The launch**, on the host's side: which tile, how many shares (`splits_of`),
# how much shared memory. `workspace_floats` tells the caller how much room the parts need.

# %%
show.region(step("p9_flash"), "merge", "launch")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Compile a loop body twice, and the common case pays nothing for the rare one.
# - What depends on the lane alone is computed once. An XOR swizzle allows it.
# - The softmax's reference may lag behind the maximum.
# - Budget: as many wavefronts per MMA as an MMA takes clocks. 32 rows per warp keep it.
# - After that it is latency. The SASS shows where the compiler has put each load; what that is worth, only an experiment shows.
# - A step is worth what an ablation says, on inputs that do not flatter it.

# %% [markdown]
# **What you can now do:** write a kernel at the level of FlashAttention-2 from an empty file, and say of masks, addresses, late rescaling and the order of tiles what each
# is worth, when it came and at the end.

# %% [markdown]
# Left to explore: `stmatrix` for the store on sm_90; the mask of a sliding window, whose full tiles lie between two ragged ends (exercise 9.5 begins it); the same ladder on
# your own GPU, with `flashlab bench mma` and `flashlab bench ablation`.

# %% [markdown]
# ## References
#
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), arXiv 2307.08691.
# - Dao, Haziza, Massa, Sizov: *Flash-Decoding for long-context inference* (2023), pytorch.org/blog/flash-decoding: split keys between blocks.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao: *FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for Asymmetric Hardware Scaling*
#   (2026), arXiv 2603.05451: conditional rescaling.
# - Milakov, Gimelshein: *Online normalizer calculation for softmax* (2018), arXiv 1805.02867.
# - Graham: *Bounds on multiprocessing timing anomalies* (1969), SIAM J. Appl. Math. 17(2): long jobs first.
# - NVIDIA: *PTX ISA*, "Warp-level matrix instructions"; *CUDA C++ Programming Guide*, "Compute capabilities" (registers, shared memory and warps
#   per SM); whitepapers of the A100, H100 and Ada architectures (tensor-core FLOPs per clock and SM).
# - Thakkar, Kerr and others: *CUTLASS*, github.com/NVIDIA/cutlass, `include/cute/swizzle.hpp`: swizzles as XORs of address bits.
# - DefTruth and others: *LeetCUDA*, github.com/xlite-dev/LeetCUDA: the published table of section 14.
# - gau-nernst: *learn-cuda*, github.com/gau-nernst/learn-cuda, `07_attention` (2025): such a ladder on an RTX 5090.
# - Sun, Li, Geng and others: *Dissecting Tensor Cores via Microbenchmarks* (2022), arXiv 2206.02874: `ldmatrix` and `mma` latencies.
