# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 9 · Past FlashAttention-2
#
# Phase 8 ended with a kernel that stores its output in whole sectors, has no bank conflict, and is still slower than FlashAttention-2. This lecture takes the rest, one idea a file.

# %% [markdown]
# ## What you will be able to do

# %% [markdown]
# ## What you need first
#
# Phase 8.

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

# %%
ladder.prepare(s.name for s in SERIES)
TABLE = [row(s.name) for s in steps(7, 8)]

# %% [markdown]
# ## 1 · Full tiles and masked tiles
#
# The mask costs a comparison and a select for each score. But only few tiles need one: the ragged tile at the end, and with a causal mask those on the diagonal. Write the body of the loop as a lambda with a compile-time flag and compile it twice. And walk **backwards**: then
# the masked tiles come first, and the long loop after them is simple. (Backwards also gives the masked tiles the time in which the pipeline fills.)

# %%
show.diff(part(step("p8_6_store"), "for (int j = 0; j < tiles; j++) {", "{"), part(step("p9_1_masks"), "    int j = last - 1;", "std::false_type"), context=0)
said = traces.printed("p9_1_masks", ("cp_async_wait<0>();                                    // this",
                      'if (threadIdx.x == 0) printf("%d\\n", MASKED);'), n=512, causal=True).split()
print(f"causal, N = 512: {said.count('1')} tiles with a mask, {said.count('0')} without")
assert said.count("1") == 8 and said.count("0") == 28

# %% [markdown]
# At $N = 4096$ it is 64 masked tiles of 2080. Here is the first step whose gain the emulator cannot count: it counts no comparisons. The compiler and the profiler do; their figures are in section 16.

# %% [markdown]
# ## 2 · Addresses out of the loop
#
# `at(row, column)` is a multiplication, two shifts and an XOR; unrolled, it stands in front of every `ldmatrix`. All of it depends on the lane and not on the tile. Row offsets of 8, 16, ... only add to it; and column offsets of 16 elements, 32 bytes, *XOR* onto it, because they
# change chunk bits that the lane's own part leaves alone. So each lane computes three addresses before the loop, and the loop has constants.

# %%
show.diff(region(step("p9_1_masks"), "scores"), region(step("p9_2_addresses"), "scores"), context=0)

# %%
def at(r, column, d=64):
    return r * d * 2 + (column // 8 ^ r % 8) * 16

assert all(at(r + 8 * i, c + 16 * k) == (at(r, c) ^ 32 * k) + 8 * i * 128 for r in range(16) for c in (0, 8) for k in range(4) for i in range(6))
print("at(r + 8 i, c + 16 k) == (at(r, c) ^ 32 k) + 8 i · 128: True for all lanes")

# %% [markdown]
# The same for the copies: a thread copies the same chunk in each pass, so that a tile is one address plus constants, and the tiles are running pointers. That frees registers, which sections 11 and 12 will need: with addresses computed in the loop the final kernel spilled 88 bytes a thread.
#
# *Predict:* a fifth of all instructions go. Is the kernel faster?
#
# <details><summary>Answer</summary>
#
# With $D = 64$ yes. With $D = 128$ it becomes *slower*, on the H200, as long as the other steps are not there: section 16 shows it, and says why.
#
# </details>

# %% [markdown]
# ## 3 · Rescale only when it matters
#
# Each time a row's maximum moves, even by a hair, `acc` is multiplied by a correction: $D/8 \cdot 4$ multiplications a lane, for each tile. Phase 2 showed that any reference value will do instead of the maximum, as long as nothing overflows. So let the reference lag behind: rescale
# only when the maximum has moved by more than 8, in log2 units. P then stays below $2^8 = 256$, far from fp16's 65 504, and the sum in float32 does not notice. The decision is one vote a warp.

# %%
show.diff(part(step("p9_2_addresses"), "// What was summed", "const float correction"), part(step("p9_3_rescale"), "// New: when some row", "const float correction"), context=0)
for name in ("p9_2_addresses", "p9_3_rescale"):
    times, tiles = traces.rescales(name, n=512)
    print(f"{name}: a warp rescales in {times} of {tiles} tiles")
assert traces.rescales("p9_3_rescale", n=512)[0] * 4 < traces.rescales("p9_2_addresses", n=512)[0]

# %% [markdown]
# Once for each row of tiles: the first time, when the reference is $-\infty$. (FlashAttention-4 brought this idea into the field's main kernels in 2025.) Is it exact? In exact arithmetic, yes. In fp16, P's relative rounding does not depend on its size, unless it
# is so small that it becomes subnormal, and a lagging reference makes P larger, not smaller. The checker's nasty cases pass (section 14).

# %% [markdown]
# ## 4 · 32 query rows a warp
#
# Now the budget. A warp of 16 rows needs a 512-byte `ldmatrix.x4`, four wavefronts, for two MMAs. With **32 rows**, two MMA tiles, the same fragment of K or V serves four MMAs. That is split-KV's advantage, without its exchange.

# %%
show.diff(region(step("p9_3_rescale"), "scores"), region(step("p9_4_warp_tiles"), "scores"), context=0)
TABLE += [row(s.name) for s in SERIES[6:10]]
grow(TABLE, "p9_4_warp_tiles")
assert 2 * TABLE[-1][3] < 1.1 * TABLE[-2][3]

# %% [markdown]
# The price is registers: two score tiles and two accumulators. With $D = 128$ there are 128 accumulators and 64 scores a lane of 255 registers in all, so that Q goes back to shared memory there: its fragments are loaded for each tile again, 4 rows of the budget for 32 MMAs.
#
# Here is the whole path in one picture: wavefronts for each MMA, and the two budgets from section 1.

# %%
ladder.conflicts_and_ideal(TABLE, {"A100": 2.0, "H200, mma.sync": 1.6})
plt.show()

# %% [markdown]
# Two scales: the conflicts are ten times the rest. After the swizzle none are left; steps 5 to 10 sit right of both lines; with 32 rows per warp shared memory costs less than the MMAs that it feeds. This is why 32 rows matter, and it could be known before any GPU ran it:

# %%
per_mma = {r[0]: r[3] / r[1] for r in TABLE}
print(f"16 rows a warp: {per_mma['p9_3_rescale']:.2f} wavefronts an MMA; 32 rows: {per_mma['p9_4_warp_tiles']:.2f}")
assert per_mma["p9_3_rescale"] > 1.6 > per_mma["p9_4_warp_tiles"]

# %% [markdown]
# ## 5 · Fragments one step ahead
#
# Enough bandwidth is not enough. Each `ldmatrix` was followed at once by the MMAs that need it, and its latency is some 30 clocks. A warp that waits is fine if others run; but 32 rows a warp leave room for only two blocks, two warps on each scheduler. Nsight Compute said
# so of the version before: 0.36 warps eligible on average, and of each issued instruction 2.0 clocks waiting for `ldmatrix` results. So double-buffer the *fragments*: load the next one, then issue this one's MMAs.

# %%
show.diff(region(step("p9_4_warp_tiles"), "scores"), region(step("p9_5_prefetch"), "scores"), context=0)
grow(TABLE, "p9_5_prefetch")
assert TABLE[-1][1:] == TABLE[-2][1:]
print("not one count has changed: only the order of the instructions")

# %% [markdown]
# Only for K. Written out for V, it gained nothing: there the compiler had done it by itself.

# %% [markdown]
# ## 6 · The order of the blocks
#
# A causal block of the first rows has one tile of keys, one of the last rows has all of them. If the long ones start last, the GPU waits for them at the end with most of its SMs idle. Long ones first is the oldest rule of scheduling. A model in six lines: 264 places (two
# blocks on each of 132 SMs), each block takes as long as it has tiles, and goes to the place that is free first.

# %%
import heapq

def finish(blocks, places=264):
    """When the last block ends, if each is started in order at the place that is free first."""
    free = [0] * places
    for length in blocks:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)

for heads, n in ((64, 4096), (16, 4096), (16, 2048)):
    blocks = [128 * (i + 1) // 64 for i in range(n // 128)] * heads
    ideal = max(sum(blocks) / 264, max(blocks))
    print(f"heads {heads}, N {n}: in order {finish(blocks) / ideal:.2f} of the ideal time, long ones first {finish(sorted(blocks, reverse=True)) / ideal:.2f}")

# %% [markdown]
# For 64 heads and $N = 4096$ the model promises 15 %; measured it is 5 % (section 16), since blocks that run side by side also slow each other. The step does just that, in groups of as many heads as have K and V in the L2 cache together. Nothing else changes, and without a causal mask nothing at all.
#
# ## 7 · Lower tiles, and D = 256
#
# 128 rows a block are too many when there are few rows: at batch 1, one head and $N = 1024$, eight blocks for 132 SMs. Below 1.5 blocks an SM the kernel takes 64 rows a block, 16 a warp: less efficient each, and twice as many of them. The tile height becomes a template parameter; with it $D = 256$ fits (eight
# warps of 16 rows, one block an SM).

# %%
show.diff(region(step("p9_6_order"), "constants"), region(step("p9_7_tiles"), "constants"), context=0)
for sms in (1, 132):
    launch = counted("p9_7_tiles", n=256, sms=sms).launches[0]
    print(f"a GPU of {sms} SMs: {launch.grid[0]} blocks of {launch.kernel}")

# %% [markdown]
# ## 8 · Split the keys, after all
#
# And when even low blocks are too few? Then several blocks share the keys of the same rows, each leaves a part $(o_s, \text{lse}_s)$ in a workspace, and a second kernel merges them, weighted by $e^{\text{lse}_s}$. That is phase 0's associative merge, and what
# inference engines call flash decoding. Split-KV was wrong *within* a block, where it forces an exchange for each tile. *Between* blocks it exchanges once.

# %%
show.diff(region(step("p9_8_devices"), "which keys"), region(step("p9_flash"), "which keys"), context=0)
for launch in counted("p9_flash", n=1024, sms=132).launches:
    print(f"one head, N = 1024, 132 SMs: {launch.kernel}, {launch.grid[0]} blocks")

# %% [markdown]
# 16 row blocks times 4 shares of the keys, and 256 small blocks that merge. This is the last file. Does it still compute attention? Everything the checker has: causal and not, grouped heads, ragged and empty
# lengths, strides, scores of $\pm 200$ and of $-2^{24}$, rows that see no key. The same cell runs natively where there is a GPU with `nvcc`, and in the emulator where not.

# %%
module = load_inline(step("p9_flash").path, backend=BACKEND)
print(verify(module.forward, causal=True, gqa=True, empty=True, dtypes=(torch.float16, torch.bfloat16), head_dims=(64, 128)).verdict)

# %% [markdown]
# ## 9 · The ladder
#
# All that was counted, $N = 256$, $D = 64$, one head:

# %%
TABLE += [row(s.name) for s in SERIES[12:]]
show.table(TABLE, COLUMNS)
assert len(TABLE) == len(SERIES)

# %% [markdown]
# And what it is worth, measured on a GPU with `flashlab bench mma`: each step and FlashAttention-2 (`scaled_dot_product_attention` with its flash backend forced), as CUDA graphs that are replayed in turn in one run; the median of the rounds, and the
# fastest and slowest as a thin line.

# %%
runs = recorded("mma")
for run in runs:
    m = run["machine"]
    print(f"{m['gpu']}, torch {m['torch']}, driver {m['driver']}, {m['date']}, SM clock {m.get('sm_clock_mhz')}")
    for shape, causal in (((4, 16, 4096, 128), False), ((4, 16, 4096, 128), True), ((4, 32, 4096, 64), False)):
        if ladder.ladder_figure(run, shape, causal):
            plt.show()
print("machines recorded:", len(runs))

# %% [markdown]
# Some of it is as expected, some is not. Each step's speed over the step before, for four large problems and a small one:

# %%
cases = {"D 128": ((4, 16, 4096, 128), False), "D 128, causal": ((4, 16, 4096, 128), True), "D 64": ((4, 32, 4096, 64), False),
         "D 64, causal": ((4, 32, 4096, 64), True), "1 head, N 1024, D 64": ((1, 1, 1024, 64), False)}
for run in runs:
    columns = [ladder.gains(run, *case) for case in cases.values()]
    show.table([[s.name, *(f"{c[s.name]:.2f}" if s.name in c else "" for c in columns)] for s in SERIES[1:]], ["step", *cases], align="lrrrrr")

# %% [markdown]
# Four things to learn from it.
#
# - **The pipeline gained nothing, at first.** `cp.async` 1.05, two stages 1.01. The conflicts filled all the time that there was to hide. One, two or three stages made 51, 52 and 51 TFLOP/s. After the swizzle they could matter. *An optimisation is measured against the
#   bottleneck of the moment*; order is part of the result.
# - **Addresses out of the loop made $D = 128$ slower**, by a sixth, though a fifth of the instructions went. Registers went from 238 to 175 a thread: with less to compute, the compiler also held fewer fragments under way, and the tensor pipe was active 40 % of the time instead of 49 %. Latency, not instructions, was
#   the limit. `p9_5_prefetch`, which loads ahead explicitly, needs exactly the registers that this step has freed. Judged alone it would have been thrown away.
# - **The lag of the maximum** is worth a few percent at $D = 64$, nothing or less at $D = 128$ at that moment, and with the final kernel 6 % (see the table of failures below). Same lesson.
# - **Small problems live on the last steps, `p9_7_tiles` and `p9_flash`.** 32 rows a warp halve the number of blocks: for one head that is a third *slower*, until blocks may be low again and share the keys.

# %% [markdown]
# What the emulator does not count, the profiler does: issued instructions (`p9_1` to `p9_3`), and how busy the tensor pipe is. One launch of each step under Nsight Compute, $B\,2$, $H\,8$, $N\,2048$. What both count agrees: conflicts are there until `p8_3_stages`, and from `p8_4_swizzle` on what is left, below half a percent, is copies that arrive while
# a warp reads.

# %%
for run in runs:
    kept = [r for r in run.get("counters", []) if r["shape"][3] == 128 and "=" not in r["name"]]
    rows = [[r["name"], *(round(r[k] or 0) for k in ("registers", "instructions", "shared_wavefronts",
            "bank_conflicts", "tensor_active_pct"))] for r in kept]
    if rows:
        show.table(rows, ["step, D = 128", "registers", "instructions", "shared wavefronts", "bank conflicts", "tensor pipe active, %"])
print("runs with counters:", sum(bool(run.get("counters")) for run in runs))

# %% [markdown]
# Section 1 made a prediction before anything was measured: with one wavefront a clock and 1.6 clocks an MMA, the tensor pipe can be active at most 1.6 clocks for each MMA's wavefronts. The emulator's wavefronts, the profiler's pipe:

# %%
for run in runs:
    active = {r["name"]: r["tensor_active_pct"] for r in run.get("counters", []) if r["shape"][3] == 128}
    for name in (n for n in ("p7_naive", "p8_1_split_q", "p8_3_stages", "p8_5_registers", "p9_flash") if n in active):
        r = counted(name, head_dim=128)
        bound = min(1.0, 1.6 * r.counters["mma"] / ladder.wavefronts(r))
        print(f"{name:15} shared memory allows {bound:4.0%}, Nsight Compute saw {active[name]:3.0f} %")

# %% [markdown]
# While there are conflicts the prediction is the measurement: shared memory is the limit, and nothing else. Later it is only a bound, and a widening gap says that something else has taken over.

# %% [markdown]
# ### Beside the published figures
#
# A published course built the first third of this ladder (tile MMA and tile warps, `cp.async`, one stage and two, collective store) and printed 36 shapes, measured on *an Ada GPU*. Absolute times of two GPUs do not compare. Ratios to FlashAttention-2 *on the same machine* do, with
# care. Orange is theirs, on Ada; blue is ours, on the machine recorded above.

# %%
ada = {(r["batch"], r["heads"], r["seq_len"], r["head_dim"], r["variant"]): r["ms"] for r in load("mma_stages_ada")}
shapes = list(dict.fromkeys(key[:4] for key in ada))
theirs = {v: [ada[(*s, "flash_official")] / ada[(*s, v)] for s in shapes] for v in ("mma_naive", "mma_stage1", "mma_stage2")}
lines = [(f"published, Ada: {name}", range(len(shapes)), values, hue, "o-")
         for (name, values), hue in zip(theirs.items(), ("grey", "yellow", "orange"))]
for run in runs:
    ours = {tuple(r["shape"]): r["vs_fa2"] for r in run.get("final", []) if r["table"] == "mma_stages_ada" and r["name"] == "p9_flash"}
    lines.append((f"p9_flash, {run['machine']['gpu']}", range(len(shapes)), [ours.get(s) for s in shapes],
                 "blue", "o-"))
fig, ax = plt.subplots(figsize=(8.6, 3.6))
curves.curves(ax, lines, size=4, xlabel="shape: batch 1, 2, 4 × heads 1, 4, 8 × N 1024, 2048 × D 64, 128 (in the table's order)",
              ylabel="speed / FlashAttention-2", title="36 published shapes, each against FlashAttention-2 on its own machine", ylim=(0, None))
ax.axhline(1, color=show.COLORS["black"], linewidth=1)
plt.show()

# %%
def geometric_mean(x):
    return math.exp(sum(map(math.log, x)) / len(x))

for name, values in theirs.items():
    print(f"published, Ada: {name:10} {geometric_mean(values):.2f} of FlashAttention-2 on the geometric mean, best shape {max(values):.2f}")
for run in runs:
    for table, s in run.get("summary", {}).items():
        print(f"{run['machine']['gpu']}: {table:20} {s['geomean_vs_fa2']:.2f} over {s['shapes']} shapes, worst {s['worst']:.2f}")

# %% [markdown]
# The published two-stage kernel wins at some of these shapes as well: they are small, and small grids are decided by how well a few blocks fill the GPU. With more work it falls to 0.35. Two stages instead of one gained it 5 %.

# %% [markdown]
# ### What did not help
#
# Measured on an H200 on the way (2026-11-20, fp16, medians, $B\,4$, $H\,16$, $N\,4096$, $D\,128$ unless said; in brackets the ratio to FlashAttention-2 in the same run). A ladder that shows only the successes teaches the wrong lesson.
#
# | tried | TFLOP/s | compare with |
# |---|---|---|
# | 8 warps a block, one block an SM | 343 (0.99) | 356 (1.03) with 4 warps: fewer blocks to hide each other's barriers |
# | 16 rows a warp, three blocks an SM | 298 (0.86) | 335 (0.97) with two: registers spill |
# | BLOCK_N 128, $D = 64$, causal | 282 (1.03) | 318 (1.17) with 64: more of the diagonal's tiles is masked |
# | the scores of the next tile computed beside this tile's softmax | 339 (0.99) | 356 (1.03): two blocks on each SM overlap already, and the second score tile takes the registers that prefetch needs |
# | rescaling at every move of the maximum | 335 (0.99) | 356 (1.03) with the lag of 8 |
# | V's fragments prefetched by hand | 374 (1.09) | 371 (1.09): the compiler does it |
# | K in two stages and V in one, $D = 128$ / 64 | 399 (1.13) / 343 (1.15) | 398 (1.13) / 347 (1.17) with two of both: registers limit the blocks here, not shared memory |
# | `volatile` on the MMAs; the `.L2::128B` hint on the copies | no difference | |

# %% [markdown]
# ### What limits it now
#
# Nsight Compute on the way to `p9_4_warp_tiles` ($D = 128$): 0.36 warps eligible a clock; an issued instruction had waited 2.3 clocks for fixed latencies and 2.0 for `ldmatrix`; tensor pipe active 58 %, shared memory at 49 % of its peak. No bandwidth is used up: it is **latency**, with two warps a scheduler. Prefetching took it to
# 61 % (the table above). How good is that? Two numbers that know nothing of each other should agree: the pipe's activity, and the speed as a share of what `mma.sync` can do at the clock of that run.

# %%
for run in (r for r in runs if r["machine"].get("sm_clock_mhz") and r.get("ladder")):
    m, last = run["machine"], [r for r in run["ladder"] if r["name"] == "p9_flash" and r["shape"] == [4, 16, 4096, 128] and not r["causal"] and r["inputs"] == "randn"]
    peak = m["sms"] * 4096 * m["sm_clock_mhz"]["median"] / 1e6
    active = [r["tensor_active_pct"] for r in run.get("counters", []) if r["name"] == "p9_flash" and r["shape"][3] == 128]
    print(f"{m['gpu']}: peak at its clock {peak:.0f} TFLOP/s, mma.sync 63 % of it {0.63 * peak:.0f}; p9_flash {last[0]['tflops']:.0f}: "
          f"{last[0]['tflops'] / (0.63 * peak):.0%}; tensor pipe active {active[0] if active else math.nan:.0f} %")

# %% [markdown]
# They agree. So the tensor pipe is fed three clocks of five. The rest is softmax and waiting: its exponentials alone (16 a clock and SM) take half as many clocks as the MMAs at $D = 128$, and as many at $D = 64$; two blocks an SM overlap the one with the other only by luck.
#
# What lies beyond is another instruction set: `wgmma` reads its operands from shared memory by itself, TMA copies whole tiles, and warps specialise. cuDNN does all that and reaches about 640 TFLOP/s on the same shape. Phase 10 goes there.

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
