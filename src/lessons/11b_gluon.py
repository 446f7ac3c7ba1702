# %% [markdown]
# # Phase 11b · Optional: phase 4's loop in Gluon
#
# Phase 4's kernel says *what* is computed, and Triton's compiler decides how. Phase 11 decided everything by hand, in CUDA C++. **Gluon** lies between:
# Triton's programs, tiles and Python, but layouts, copies and waits are yours. Nothing later needs this notebook. Without a Hopper GPU its kernels are
# compiled and read, not run.

# %% [markdown]
# ## What you will be able to do
#
# - Say which thread holds which element of a product, with bits.
# - Read a kernel in Gluon, and name in it what phase 11 calls a producer, a consumer, and the turns of two warpgroups.
# - Say what these decisions gained over Triton's compiler, and what they cost.

# %% [markdown]
# ## What you need first
#
# - Phase 4: the kernel, its causal edges, tensor descriptors.
# - Phase 11: TMA, mbarriers with their parity, wgmma, warp specialisation, ping-pong.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import gluon_forward
from flashlab.attention.gluon_forward import LN_2, all_threads
from flashlab.bench import industrial
from flashlab.check import verify
from flashlab.figures import curves, fragments, profiles, show
from flashlab.triton_tools.compile_report import compile_report, compile_reports
from triton.experimental import gluon  # after flashlab, which decides whether kernels are interpreted here
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)

show.style()
runs = industrial.recorded()

# %% [markdown]
# ## 1 · Three decisions, three kernels
#
# | | in Triton | in Gluon |
# |---|---|---|
# | Which thread holds which element of a tile? | the compiler | you, by a *layout* |
# | When does a copy begin, and who waits for it? | the compiler, from `num_stages` | you, with *barriers* |
# | When is a product waited for? | the compiler | you |

# %% [markdown]
# So a Gluon kernel is written for one kind of chip. Ours are for Hopper, the H100 and H200. Each of the three is the one before with one idea more:
#
# - `one_tile`: a tile of K and one of V are fetched, waited for, and used. Then come the next.
# - `pipelined`: tiles are fetched ahead, and two products are under way at a time.
# - `specialised`: one warp only fetches, the others only compute.

# %% [markdown]
# ## 2 · Which thread holds which element
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
# ## 3 · A copy, and who waits for it
#
# Phase 11's two halves of a copy, the order and the wait. Here is the order:

# %%
# FROM flashlab.attention.gluon_forward: load_box

# %% [markdown]
# `ready` is phase 11's mbarrier under other names: `expect` is `mbarrier_arrive_expect_tx`, and `wait(ready, parity)` waits for the phase of that parity. So
# tile $i$ is waited for with parity `i & 1`, and a new barrier passes parity 1 at once.
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
# ## 4 · The first kernel, line by line
#
# First the softmax of a tile. It is lecture 4's, with the same names, but for one thing: each of the four threads of a row keeps a sum of its own. They are
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
# `tiles_seen` is lecture 4's `end`. The copy engine also stores: rows past the end it leaves out. `fence_async_shared` is for a detail of
# the hardware: what threads wrote to shared memory, the engine sees only after this fence.
#
# Now the kernel. Read the loop at its end first:

# %%
# FROM flashlab.attention.gluon_forward: one_tile_kernel

# %% [markdown]
# | lecture 4 | here | what is said now |
# |---|---|---|
# | `load_tile(k_ptrs, ...)` | `load_box(k_desc, ...)`, `mbarrier.wait` | when a copy begins, and when it must have ended |
# | `tl.dot(q, k.T)` | `warpgroup_mma(q, k.permute((1, 0)), ...)` | `q` and `k` are read from shared memory, `s` comes in `S_LAYOUT` |
# | `tl.where(in_band(...))` | `masked` | each thread compares the positions that it holds |
# | `p.to(v.dtype)` | `gl.convert_layout(p.to(...), P_LAYOUT)` | P stays in the threads that computed it |
# | `acc * correction[:, None]` | `acc * along_rows(correction, acc)` | so does `correction` |
# | `tl.dot(p, v, acc)` | `warpgroup_mma(p, v, acc)` | `p` comes from registers, `v` from shared memory |

# %% [markdown]
# - **`DotOperandLayout(0, O_LAYOUT, 2)`**: the left operand of a product whose result has `O_LAYOUT`, two 16-bit numbers in a register.
# - **`q_desc.layout`** is the order of a box in shared memory, in which products read it fast. (Phase 8's swizzle.)
# - **`k.permute((1, 0))`** moves nothing. The product reads K along the other axis.
# - **`use_acc=False`**: the product is not added to anything, so `no_scores` is never read.

# %% [markdown]
# - **The tiles go from right to left.** Then those that need a mask come first. This kernel masks them all. The next two treat the first tile before their
#   loop, so the loop is free of masks.
# - **Both waits have the parity `i & 1`**, as in the table above.
# - K and V have one place each. So tile $i + 1$ can be ordered only when tile $i$ has been used. That is what is wrong with this kernel.

# %% [markdown]
# ## 5 · Who does what, and when
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
profiles.units(ax, timeline(one_tile_orders(3)), "one_tile")
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
# twice, with and without a mask, as in lecture 4. (Open the fold for the whole.)

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
    profiles.units(ax, timeline(made(5)), name)
    print(f"{name}: the tensor cores work {busy(timeline(made(200))):.0%} of the time")
plt.show()

# %% [markdown]
# *In `pipelined` the softmax of a tile runs beside P V of the tile before. In `specialised` one warpgroup's softmax runs beside the other's products.*
#
# This is a model with two assumed numbers. It knows nothing of waits, masks and the cost of starting things. It shows an order, and why the
# order matters. The real speeds are in section 7.

# %% [markdown]
# ## 6 · What the compiler makes of them
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
# ## 7 · Run, where there is a Hopper GPU

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
# ## 8 · What Gluon costs
#
# - **No interpreter.** These kernels run on Hopper and nowhere else. (The tests of this course run their *logic* on a CPU, over a
#   stand-in for barriers, copies and products.)
# - **Nobody checks your barriers.** A wrong one hangs the GPU, or reads an old tile.
# - **It moves.** Gluon is under `triton.experimental`. Between Triton 3.6 and 3.7 `thread_barrier` became `barrier`.
# - **These kernels do less.** fp16 and bf16, head sizes that are multiples of 8, causal or not. No window, no soft-cap, no gradient.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - A layout is bits: each bit of a register's, a lane's or a warp's number is a step in the tile.
# - Gluon says in a line what CUDA C++ says in ten, and checks as little.
# - From `one_tile` to `specialised` no formula has changed. Only who waits for whom has.
#
# Worth trying: a window in `tiles_seen` and `load_part`; the layouts of a tile of 64 × 64.

# %% [markdown]
# ## References
#
# - Triton's repository, `python/tutorials/gluon`: the language.
# - Jay Shah et al., *FlashAttention-3*, 2024, [arXiv:2407.08608](https://arxiv.org/abs/2407.08608): two products at a time, warps that only load.
# - NVIDIA, *PTX ISA*: mbarrier, `wgmma`, the layout of its result.
