# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 1 · Naive attention and the two walls
#
# Four lines of PyTorch compute attention. They also write a matrix of $N^2$ numbers to memory, and read it back, three
# times over. In this lecture you count what that costs, and then try the two obvious repairs as real Triton kernels.
# Each runs into a wall. The first wall is made of hardware: shared memory. The second is made of language: Triton will
# not slice a tensor. FlashAttention is what goes around both, and at the end you will see exactly which step of it does.

# %% [markdown]
# ## What you will be able to do
#
# - count the bytes and FLOPs of naive attention line by line, and check the count against what PyTorch really does;
# - place a kernel on the roofline of a GPU and say what bounds it;
# - predict the peak memory of a piece of PyTorch from its source;
# - write scheme A, a block of queries against all keys, in Triton, and predict the length at which each GPU refuses it;
# - ask the Triton compiler what a kernel needs on a GPU you do not have;
# - say why Triton refuses to slice a tensor, what the four ways around it cost, and what they do not solve.

# %% [markdown]
# ## What you need first
#
# Phase 0: the safe softmax, and the state $(m, \ell)$ of a row. A first look at Triton helps (a program works on a tile;
# `tl.load` brings it in, `tl.dot` multiplies tiles), but every line is explained. No GPU is needed: without one the kernels
# run in Triton's interpreter, and the compiler answers for GPUs that are not here. About 90 minutes, then the exercises in
# `exercises/01_two_walls.ipynb`.

# %%
import math
import re
import time

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference, schemes
from flashlab.attention.cost import attainable_tflops, fused_cost, naive_cost, naive_peak_bytes, peak_bytes, trace_ops
from flashlab import runtime
from flashlab.figures import curves, memory, show
from flashlab.bench import published, walls
from flashlab.check import verify_one_head
from flashlab.triton_tools.compile_report import TARGETS, compile_report, compile_reports
from flashlab.triton_tools.watch import hbm_traffic

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

show.style()
torch.manual_seed(1)
device = runtime.device()

# %% [markdown]
# ## 1. Four lines
#
# The oracle first: `reference.attention` does every step in float64. Beside it, attention as most people would write it.
# One head is enough for this lecture: $Q$, $K$, $V$ are $[N, D]$, with $N$ tokens (`seq_len`) and $D$ numbers a token
# (`head_dim`).

# %%
# FROM flashlab.attention.naive: naive_attention (no docstrings)
q, k, v = torch.randn(3, 1, 1, 100, 64, dtype=torch.float64)
want, _ = reference.attention(q, k, v)
torch.testing.assert_close(naive_attention(q, k, v), want)
print("four lines = the oracle: True")

# %% [markdown]
# It is right. So why does nobody run it? Before you read on, commit to a guess.
#
# *At $N = 4096$, $D = 128$, fp16: which of the four lines moves the most bytes between HBM (the GPU's main memory) and
# the chip? And which computes the most?*
#
# <details><summary>Answer</summary>
#
# The scaling and the softmax move the most: each reads $N^2$ numbers and writes $N^2$ numbers, and between them they do
# 1 % of the arithmetic. The two matrix products do 99 % of the arithmetic, and each moves about half as much. A line
# that looks like nothing, `scores * scale`, costs a third of the traffic.
#
# </details>

# %% [markdown]
# ## 2. What each line costs
#
# Count as eager PyTorch runs it: each line is one kernel, which reads its inputs from HBM and writes its result there. With
# $e$ bytes a number, and a multiply-add as 2 FLOPs:
#
# | line | reads | writes | FLOPs |
# |---|---|---|---|
# | $S = QK^\top$ | $2ND\,e$ | $N^2 e$ | $2N^2D$ |
# | $S \cdot \text{scale}$ | $N^2 e$ | $N^2 e$ | $N^2$ |
# | $P = \mathrm{softmax}(S)$ | $N^2 e$ | $N^2 e$ | $5N^2$ |
# | $O = PV$ | $(N^2 + ND)\,e$ | $ND\,e$ | $2N^2D$ |
#
# (The softmax: max, subtract, exp, sum, divide.) Put numbers in. Everything below is in MB, $10^6$ bytes.

# %%
N, D = 4096, 128
cost = naive_cost(N, D)
rows = [(x.line, x.bytes_read / 1e6, x.bytes_written / 1e6, x.flops / 1e9) for x in cost.lines]
total = ("sum", cost.bytes_read / 1e6, cost.bytes_written / 1e6, cost.flops / 1e9)
show.table([*rows, total], ["line", "MB read", "MB written", "GFLOP"])

# %% [markdown]
# The same as a picture. Each bar is one line of the program; dark is what has an $N^2$ in it. What the problem asks for,
# $Q$, $K$, $V$ in and $O$ out, are the four thin light slices, each with its letter.

# %%
fig, ax = plt.subplots(figsize=(7.5, 2.6))
small, large = N * D * 2 / 1e6, N * N * 2 / 1e6  # MB of a matrix [N, D] and of a matrix [N, N], fp16
thin = {name: (name, small, "sky") for name in "QKVO"}
parts = [[thin["Q"], thin["K"], ("write S", large, "blue")], [("read S, write S", 2 * large, "blue")],
         [("read S, write P", 2 * large, "blue")], [("read P", large, "blue"), thin["V"], thin["O"]]]
curves.stacked(ax, dict(zip((line.line for line in cost.lines), parts)),
               title="Six trips of the N × N matrix", xlabel="MB moved, N = 4096, D = 128, fp16")
plt.show()

# %% [markdown]
# That table is a claim about PyTorch, so test it on PyTorch. `trace_ops` watches every operation that torch dispatches, on
# any device, and adds up the tensors it takes and makes. No sampling: the counts are exact, and must equal the formula
# line by line.

# %%
q, k, v = torch.randn(3, 512, 64, dtype=torch.float16)
ops = trace_ops(naive_attention, q, k, v)
for op, line in zip(ops, naive_cost(512, 64).lines, strict=True):
    match = (op.bytes_read, op.bytes_written) == (line.bytes_read, line.bytes_written)
    print(f"{line.line:33} {op.name:8} reads {op.bytes_read:8} writes {op.bytes_written:8} = formula: {match}")
    assert match

# %% [markdown]
# And the FLOPs of the two products, by PyTorch's own counter.

# %%
from torch.utils.flop_counter import FlopCounterMode

with FlopCounterMode(display=False) as counter:
    naive_attention(q, k, v)
predicted = 4 * 512 * 512 * 64
print(f"matmul FLOPs: counted {counter.get_total_flops()}, 4·N²·D = {predicted}")
assert counter.get_total_flops() == predicted

# %% [markdown]
# ## 3. Arithmetic intensity and the roofline
#
# Is that much traffic bad? It depends on how much arithmetic comes with it. **Arithmetic intensity** is FLOPs for each
# byte moved. For large $N$ the $N^2$ terms are all that is left:
#
# $$I_{\text{naive}} \to \frac{4 N^2 D + 6 N^2}{6 N^2 \cdot 2} \approx \frac{D}{3}
# \qquad\text{while}\qquad
# I_{\text{fused}} = \frac{4N^2D + 6N^2}{4 N D \cdot 2} \approx \frac{N}{2}$$
#
# if one kernel did all four lines and the $N \times N$ matrix never left the chip. The naive intensity does not depend on
# $N$: a longer sequence does not help. The fused one grows with it.

# %%
for seq_len in (512, 4096, 32768):
    naive, fused = naive_cost(seq_len, 128), fused_cost(seq_len, 128)
    print(f"N = {seq_len:5}: naive {naive.intensity:5.1f} FLOP/byte (limit {(4 * 128 + 6) / 12:.1f}), "
          f"fused {fused.intensity:8.1f} (about N/2 = {seq_len // 2})")
assert naive_cost(10**6, 128).intensity < 43.2 and fused_cost(4096, 128).intensity > 2048

# %% [markdown]
# A GPU that computes at most $F$ FLOP/s and moves at most $B$ byte/s can run code of intensity $I$ at no more than
# $\min(F, I \cdot B)$. That is the **roofline** (Williams, Waterman and Patterson, 2009): a slope where memory is the bound, a
# flat roof where arithmetic is, and a ridge at $I = F/B$ between them.
#
# *Predict:* the H200 has more bandwidth than the H100 and the same tensor cores. Which of the two lines below moves?
#
# <details><summary>Answer</summary>
#
# The slope moves up, the roof stays. So naive attention gets faster on the H200, in proportion to its bandwidth, and a kernel
# that is bound by arithmetic gains nothing.
#
# </details>

# %%
shown = ["H200", "H100", "A100", "RTX 4090", "RTX 5060 Ti"]
roofs = {name: lambda i, name=name: attainable_tflops(i, runtime.GPUS[name]) for name in shown}
points = {"naive\nD = 64": naive_cost(4096, 64).intensity, "naive\nD = 128": naive_cost(4096, 128).intensity,
          "fused\nN = 4096": fused_cost(4096, 128).intensity}
fig, ax = plt.subplots(figsize=(7.5, 4.2))
curves.roofline(ax, roofs, points, ylim=(1, 2000), ylabel="attainable TFLOP/s, fp16")
ax.set_title("Naive attention sits on the slope of every GPU", pad=34)
plt.show()

# %% [markdown]
# Naive attention is left of every ridge: memory-bound on all of them. Fused attention is right of every ridge. How much of
# the machine does the naive way leave unused? At $D = 128$:

# %%
intensity = naive_cost(4096, 128).intensity
rows = []
for name in shown:
    gpu = runtime.GPUS[name]
    best = attainable_tflops(intensity, gpu)
    assert intensity < gpu.ridge, "naive attention should be memory-bound"
    rows.append((name, gpu.memory_gb_s, gpu.fp16_tflops, round(gpu.ridge), round(best),
                f"{best / gpu.fp16_tflops:.0%}"))
show.table(rows, ["GPU", "GB/s", "peak TFLOP/s", "ridge (FLOP/byte)", "naive at most (TFLOP/s)", "of peak"])

# %% [markdown]
# These are ceilings, from datasheets. Real kernels stay below. The gaps differ: the RTX 5060 Ti has modest tensor cores for its
# bandwidth, so it loses least; the H100 loses six sevenths. **The faster the arithmetic of a GPU has become
# compared with its memory, the worse the naive way fits it.** That trend is why FlashAttention was written in 2022 and not in 2012.

# %% [markdown]
# ## 4. The $N^2$ matrix, in memory
#
# Bandwidth costs time. Capacity is a harder limit: what does not fit does not run. Read the four lines again and ask what
# is alive when each of them ends. `scores` is rebound on line 2, so the unscaled matrix is freed *after* line 2 has made the
# scaled one. On line 4 the variable `scores` still holds its matrix while `probabilities` and the result exist:
#
# $$\text{peak} = (\underbrace{N^2}_{S} + \underbrace{N^2}_{P} + \underbrace{ND}_{O})\, e \quad\text{a head.}$$
#
# `trace_ops` also adds up what is alive after each operation, so the claim can be checked to the byte.

# %%
for op in ops:
    print(f"{op.name:8} ends with {op.live_bytes:8} bytes alive = {op.live_bytes / (512 * 512 * 2):.3f} matrices of N × N")
assert max(op.live_bytes for op in ops) == naive_peak_bytes(512, 64)

# %% [markdown]
# The softmax needs no matrix but its own result, yet line 4 pays for `scores`, because a variable still names it. Deleting that
# name halves the peak of line 4, not the peak of the function: lines 2 and 3 hold two matrices too (try it in exercise 1.3).
#
# Now let $N$ grow: the exact peak against the formula, and the time of this machine, live. Double $N$, and both should go up by
# four.

# %% tags=["nbval-ignore-output"]
def seconds(fn, repeat=5):
    """The fastest of a few runs of fn(), in seconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)

lengths = [256, 512, 1024, 2048] if device.type == "cpu" else [1024, 2048, 4096, 8192]
timed, peaks = [], []
for n in lengths:
    q, k, v = torch.randn(3, n, 64, device=device)
    timed.append(seconds(lambda: naive_attention(q, k, v)))
    peaks.append(peak_bytes(naive_attention, q, k, v))
    print(f"N = {n:5}: {1e3 * timed[-1]:8.2f} ms, peak {peaks[-1] / 1e6:7.2f} MB, "
          f"formula {naive_peak_bytes(n, 64, itemsize=4) / 1e6:7.2f} MB")

# %% tags=["nbval-ignore-output"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2))
exact = [naive_peak_bytes(n, 64, itemsize=4) for n in lengths]
assert peaks == exact
in_mb, in_ms = ([x / unit for x in values] for values, unit in ((exact, 1e6), (timed, 1e-3)))
quadratic = [in_ms[-1] * (n / lengths[-1]) ** 2 for n in lengths]
both = [("formula", lengths, in_mb, "blue", "-"), ("counted", lengths, [b / 1e6 for b in peaks], "orange",
        "o")]
curves.curves(left, both, log="xy", xticks=lengths, title="Peak memory, one head, float32", xlabel="N",
              ylabel="MB")
both = [("four times as long for 2 N", lengths, quadratic, "grey", "--"),
        ("this machine", lengths, in_ms, "orange", "o-")]
curves.curves(right, both, log="xy", xticks=lengths, title="Time, one head, float32", xlabel="N", ylabel="ms")
plt.show()

# %% [markdown]
# Left: counted and formula agree to the byte. Right: the dashed line is what pure $N^2$ would be, drawn back from the longest run. A CPU
# is faster than that at small $N$, while the matrix still fits its caches; a GPU is slower, while four launches cost more than the
# work. Either way the last doubling costs about four times as much. On a GPU the allocator can be asked, too:

# %% tags=["nbval-ignore-output"]
if device.type == "cuda":
    q, k, v = torch.randn(3, 16, 4096, 128, device=device, dtype=torch.float16)
    naive_attention(q, k, v)  # the first call allocates the matmul library's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    naive_attention(q, k, v)
    measured = torch.cuda.max_memory_allocated() - before
    print(f"allocator: {measured} bytes, formula: {naive_peak_bytes(4096, 128, heads=16)}")
else:
    print("no GPU here: the allocator's peak is in the recorded figures below, where there are any")

# %% [markdown]
# What was recorded on a data-centre GPU, with `python -m flashlab.bench.walls`: naive attention beside the fused kernel that
# PyTorch has built in, FlashAttention-2, on the same shapes. (The reader's own GPU can be added with the same command.)

# %%
for run in walls.recorded():
    m, s = run["machine"], run["shape"]
    n = [r["seq_len"] for r in run["fused"] if "ms" in r]
    time, peak = [], []
    for key, hue, label in (("naive", "orange", "naive"), ("fused", "blue", "FlashAttention-2")):
        kept = [r for r in run[key] if "ms" in r]
        time.append((label, [r["seq_len"] for r in kept], [r["ms"] for r in kept], hue, "o-"))
        peak.append((label, [r["seq_len"] for r in kept], [r["peak_bytes"] / 2**20 for r in kept], hue, "o-"))
    peak.append(("formula", n, [r["predicted_peak_bytes"] / 2**20 for r in run["naive"]], "black", "x"))
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2))
    curves.curves(left, time, log="xy", xticks=n, title="Time", xlabel="N", ylabel="ms")
    curves.curves(right, peak, log="xy", xticks=n, title="Peak memory", xlabel="N", ylabel="MiB")
    fig.suptitle(f"{m['gpu']}, torch {m['torch']}, {m['date']}: {s['heads']} heads, head_dim {s['head_dim']}, fp16", fontsize=10)
    plt.show()
print("machines recorded:", ", ".join(run["machine"]["gpu"] for run in walls.recorded()) or "none yet")

# %% [markdown]
# ### A published table, rebuilt
#
# Others measured this before us. A published benchmark of eager attention lists "MB in use before the backward pass" for batch
# 8, one head, on a GPU it does not name. With autograd on, $P$ is kept for the backward pass, and so are $Q$, $K$, $V$ and $O$. In
# float32 that predicts $8\,(N^2 + 4ND) \cdot 4$ bytes and a constant for what CUDA libraries take. One constant must then explain
# all sixteen rows.

# %%
rest = []
for row in published.load("attention_memory"):
    if row["mem_before_mb"] != "OOM":
        n, d = row["seq_len"], row["d_model"]
        predicted = 8 * (n * n + 4 * n * d) * 4 / 1e6
        rest.append(row["mem_before_mb"] - predicted)
        if d == 128:
            print(f"N = {n:4}, d = {d}: published {row['mem_before_mb']:4} MB, formula {predicted:6.0f} MB + {rest[-1]:.0f}")
print(f"{len(rest)} rows, the rest is {min(rest):.1f} to {max(rest):.1f} MB in every one of them")
assert max(rest) - min(rest) < 2

# %% [markdown]
# It does, to within 1 MB. From 2300 MB at $N = 8192$ the next doubling asks for 8.6 GB a matrix, several of them at once, and the
# table says *out of memory* there. A 100 000-token context, 16 heads, fp16: $16 \cdot 10^{10} \cdot 2$ bytes, 320 GB for one matrix.
# No faster memory saves this. The matrix has to go.

# %% [markdown]
# ## 5. Scheme A: a block of queries against everything
#
# A row of $O$ needs one row of $Q$ and all of $K$ and $V$. So let one Triton program take `BLOCK_M` = 64 rows of $Q$, load the whole
# of $K$ and $V$ into its multiprocessor, and do all four lines there. $S$ and $P$ are 64 rows tall and never touch HBM. Left: scheme A.
# Right: scheme B, for later. Blue and orange are on the chip at one time, grey stays in HBM.

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.4))
memory.on_chip(axes[0], "Scheme A: K and V whole")
memory.on_chip(axes[1], "Scheme B: K whole, V in blocks", v=0.25)
plt.show()

# %% [markdown]
# The kernel, whole. Read the shapes in the comments. Three details matter later: `tl.arange` only makes powers of two, so `BLOCK_N` is
# $N$ padded up, and the padded keys get a score of $-\infty$ (a padded key is a row of zeros; its score would be 0, and $e^0$ is not
# nothing); $K$ is loaded with its axes swapped, so the tile in hand is $K^\top$; and nothing here depends on other programs.

# %%
# FROM flashlab.attention.schemes: scheme_a_kernel (no docstrings)

# %% [markdown]
# Is it right? The checker runs it on all its small cases: lengths that are no power of two, one query, one key, large scores, both
# dtypes. Its tolerance comes from what fp16 itself loses (phase 3 says how).

# %%
report = verify_one_head(schemes.scheme_a, dtypes=(torch.float16, torch.bfloat16), max_seq=256)
print("scheme A:", report.verdict)

# %% [markdown]
# And it does what we wanted from it. Count the bytes that its loads and stores move: the $N^2$ is gone, and what is left is $Q$ and $O$
# once, and $K$ and $V$ once for each block of queries. (The 4 bytes a row are the log-sum-exp.)

# %%
N, D = 200, 64
q, k, v = torch.randn(3, N, D, dtype=torch.float16, device=device)
traffic = hbm_traffic(schemes.scheme_a, q, k, v)
blocks = math.ceil(N / 64)
print(f"read    {traffic.bytes_read:7} bytes, (N + {blocks}·2N)·D·2 = {(N + blocks * 2 * N) * D * 2}")
print(f"written {traffic.bytes_written:7} bytes, N·D·2 + 4N      = {N * D * 2 + 4 * N}")
assert traffic.bytes_read == (N + blocks * 2 * N) * D * 2 and traffic.bytes_written == N * D * 2 + 4 * N

# %% [markdown]
# ## 6. The physical wall
#
# "Into its multiprocessor" was said lightly. The tensor cores take their operands from **shared memory** (or from registers, after a
# detour through it), and a program gets at most what its GPU allows a block. Three operand tiles lie there at once:
#
# $$\text{shared}(N) = (\mathrm{BLOCK\_M} + 2N) \cdot D \cdot e .$$
#
# | a block may use at most | bytes | GPUs |
# |---|---|---|
# | sm_80 | 166 912 | A100 |
# | sm_86, sm_89, sm_120 | 101 376 | RTX 3090; RTX 4090, L4, L40S; RTX 5060 Ti, 5090 |
# | sm_90 | 232 448 | H100, H200 |
#
# *Before you run it:* $D = 128$, BLOCK_M = 64, fp16. At which $N$ (a power of two) does scheme A die on sm_120? On sm_90?
#
# <details><summary>Answer</summary>
#
# $(64 + 2N) \cdot 256$ is 81 920 bytes for $N = 128$, 147 456 for 256, 278 528 for 512. So sm_86, sm_89 and sm_120 die at 256, sm_80 and
# sm_90 at 512. A context of 512 tokens is too long for an H200.
#
# </details>
#
# Do not trust the formula. Ask the compiler: it needs no GPU to compile for one. (The first time, this takes a while; answers are kept.)

# %%
small = schemes.scheme_a_reports([64, 128, 256], 128, TARGETS)
large = schemes.scheme_a_reports([512], 128, ["sm_80", "sm_90"])  # the others have failed by then
needed = {64: small[:5], 128: small[5:10], 256: small[10:], 512: large}
for n, reports in needed.items():
    told = {r.shared_bytes for r in reports}
    verdicts = ", ".join(f"{r.target} {'fits' if r.fits else 'FAILS'}" for r in reports)
    print(f"N = {n:3}: {told.pop():6} bytes, formula {schemes.scheme_a_shared_bytes(n, 128):6}; {verdicts}")
    assert not told and reports[0].shared_bytes == schemes.scheme_a_shared_bytes(n, 128)

# %% [markdown]
# The formula is exact, on five targets, for two quite different tensor-core designs. So the first length that cannot run follows from
# the limit of a device alone. Derive it for every GPU in the table, and compare it with the compiler's verdicts.

# %%
rows = []
for name, gpu in runtime.GPUS.items():
    dies_at = schemes.first_failing_seq_len(gpu.shared_per_block, lambda n: schemes.scheme_a_shared_bytes(n, 128))
    refused = [n for n, reports in needed.items() for r in reports if r.target == gpu.target and not r.fits]
    assert gpu.target not in TARGETS or min(refused) == dies_at
    rows.append((name, gpu.target, gpu.shared_per_block, dies_at))
show.table(rows, ["GPU", "target", "limit a block (bytes)", "scheme A dies at N ="])

# %% [markdown]
# The wall, drawn. The line is what scheme A needs; each level is what a GPU has. A cross marks the first doubling that does not fit.

# %%
fig, ax = plt.subplots(figsize=(7.5, 3.8))
in_kib = {n: schemes.scheme_a_shared_bytes(n, 128) / 1024 for n in needed}
levels = {"sm_90": ("H100, H200", "blue"), "sm_80": ("A100", "green"), "sm_120": ("RTX 3090, 4090, 5060 Ti, 5090", "orange")}
limits = {target: runtime.limits(target).shared_per_block / 1024 for target in levels}
dies = sorted({next(n for n in in_kib if in_kib[n] > limit) for limit in limits.values()})
curves.curves(ax, [("", list(in_kib), list(in_kib.values()), "black", "o-")], xticks=list(in_kib),
              ylim=(0, 290), legend=None, xlabel="N (keys)", ylabel="shared memory per block (KiB)",
              title="Scheme A: 512 bytes more for every key")
ax.plot(dies, [in_kib[n] for n in dies], "x", color=show.COLORS["red"], markersize=13, markeredgewidth=3)
for target, (names, hue) in levels.items():
    curves.level(ax, limits[target], f"{names}: {limits[target]:.0f} KiB", hue, below=True)
plt.show()

# %% [markdown]
# Now run into it. On a GPU, `scheme_a` is launched at the length at which it must die, and Triton raises `OutOfResources`. Without a GPU
# the interpreter would happily compute any length: it is Python and numpy, and has no shared memory to run out of. **A kernel that
# passes in the interpreter may still not launch.** So the launcher can ask the compiler first (`as_if_on`).

# %% tags=["nbval-ignore-output"]
from triton.runtime.errors import OutOfResources

gpu = runtime.limits("RTX 5060 Ti" if runtime.INTERPRETED else None)
N = schemes.first_failing_seq_len(gpu.shared_per_block, lambda n: schemes.scheme_a_shared_bytes(n, 128))
q, k, v = torch.randn(3, N, 128, dtype=torch.float16, device=device)
try:
    schemes.scheme_a(q, k, v, as_if_on=gpu.name if runtime.INTERPRETED else None)
    raise AssertionError(f"scheme A ran at N = {N}, against the prediction")
except (OutOfResources, schemes.OutOfSharedMemory) as error:
    print(f"{gpu.name}, N = {N}: {type(error).__name__}: {error}")

# %% [markdown]
# Triton's own words, as they were recorded on a real GPU at the length predicted for it:

# %%
for run in walls.recorded():
    last = run["scheme_a"][-1]
    print(f"{run['machine']['gpu']}, triton {run['machine']['triton']}, N = {last['seq_len']}:\n  {last['message']}")
    assert last["required"] == schemes.scheme_a_shared_bytes(last["seq_len"], run["shape"]["head_dim"])
print("machines recorded:", len(walls.recorded()))

# %% [markdown]
# Read such a message for its two numbers. *Required* is the kernel's, *Hardware limit* the device's. "Reducing block sizes or
# `num_stages`", Triton's usual advice, does not help here: there is no loop to pipeline, and $N$ is not a block size that we chose.
#
# What if `BLOCK_M` is smaller? *Predict the length scheme A reaches on sm_90 with BLOCK_M = 16 before you look.*
#
# <details><summary>Answer</summary>
#
# Still 256. The term that grows is $2N$; BLOCK_M only adds a constant. Even BLOCK_M = 0 would not reach 512.
#
# </details>

# %%
for BLOCK_M in (128, 64, 32, 16):
    limit = runtime.limits("sm_90").shared_per_block
    dies_at = schemes.first_failing_seq_len(limit, lambda n: schemes.scheme_a_shared_bytes(n, 128, BLOCK_M=BLOCK_M))
    print(f"BLOCK_M = {BLOCK_M:3}: dies at N = {dies_at}")

# %% [markdown]
# ## 7. Somebody else's wall
#
# The tutorial that first told this story ran its scheme A at $D = 128$, BLOCK_M = 64 on an RTX 5060 Ti. It died at $N = 256$ with
# **131 072 bytes** required. Ours dies at the same length, asking for **147 456**. And a first draft of ours asked for **98 304**, which
# fits. Same mathematics, same GPU, same tile. What is going on?
#
# The formula above is not a law. It holds for a kernel *in which all three tiles are alive at once*. What shared memory holds is
# decided by the compiler, from how the kernel is written:
#
# - an operand of `tl.dot` is **staged** in shared memory, from its load to its last use;
# - a tile whose register layout must change on the way (a **layout conversion**) passes through **scratch** space there;
# - two tiles whose lives do not overlap share the same bytes.
#
# `scheme_a_variant_kernel` has three switches that do not change the result: transpose $K$ after loading it, load $V$ after the softmax,
# keep $P$ in float32.

# %%
switches = {"as above": (False, False, False), "K by rows, then tl.trans": (True, False, False),
            "V late, P in float32": (True, True, True)}
arguments = [schemes.kernel_arguments(256, 128, BLOCK_N=256, K_BY_ROWS=a, V_LATE=b, P_FLOAT32=c) for a, b, c in switches.values()]
variants = compile_reports(schemes.scheme_a_variant_kernel, arguments, targets=["sm_120"], num_stages=1)
for name, r in zip(switches, variants):
    print(f"{name:25} {r.shared_bytes:6} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
assert [r.shared_bytes for r in variants] == [147456, 98304, 131072]

# %% [markdown]
# The third line is the published number, to the byte. Looking into the compiler's intermediate code (TTGIR: each `local_alloc` is a
# staged tile, each `convert_layout` a conversion) tells what the worst moment of each kernel consists of:

# %%
moments = {"as above": [("Q", 16), ("Kᵀ", 64), ("V", 64)], "K by rows, then tl.trans": [("V", 64), ("P, fp16", 32)],
           "V late, P in float32": [("P, float32", 64), ("V", 64)]}
hues = {"Q": "sky", "Kᵀ": "blue", "V": "green", "P, fp16": "orange", "P, float32": "orange"}
for tiles, r in zip(moments.values(), variants):
    assert sum(size for _, size in tiles) * 1024 == r.shared_bytes
fig, ax = plt.subplots(figsize=(7.5, 2.6))
bars = {name: [(f"{tile}\n{size}", size, hues[tile]) for tile, size in tiles] for name,
        tiles in moments.items()}
curves.stacked(ax, bars, xlabel="shared memory at the worst moment (KiB), N = 256, sm_120", xlim=(0, 150))
ax.axvline(99, color=show.COLORS["red"], linestyle="--")
ax.text(100, -0.55, "limit, 99 KiB", color=show.COLORS["red"], fontsize=9, va="bottom")
plt.show()

# %% [markdown]
# In the second kernel $K$ only passes through scratch space, which is free again before $V$ and $P$ are staged; that is enough to fit.
# In the third, $P$ is staged as float32, 64 KiB instead of 32.
#
# Is that third kernel the published one? We cannot know. Its source is not part of the figure, and other kernels ask for 131 072
# too: in one that loads $Q$ last, $K$ and $V$ alone make up the worst moment, $64 + 64$ KiB. What can be said: the published failure is real, it is what
# our compiler predicts for at least one plain way to write scheme A, and **a byte count belongs to a kernel, a compiler and a target, not to
# an algorithm**. The verdict that belongs to the algorithm is the slope. Double $N$ once more, and every variant is dead on sm_120:

# %%
doubled = [schemes.kernel_arguments(512, 128, BLOCK_N=512, K_BY_ROWS=True, V_LATE=late, P_FLOAT32=late) for late in (False, True)]
for r in compile_reports(schemes.scheme_a_variant_kernel, doubled, targets=["sm_120"], num_stages=1):
    print(f"N = 512: {r.shared_bytes} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
    assert not r.fits

# %% [markdown]
# One more honest note. "Fits" is about shared memory only. $S$ and $P$ live in registers, 64 × 256 numbers over 128 threads: 128 registers a
# thread for one of them, out of 255. Look at what the kernel that fits pays (*spilled* values go to slow memory and come back):

# %% tags=["nbval-ignore-output"]
for name, r in zip(switches, variants):
    print(f"{name:25} {r.registers} registers a thread, {r.spill_bytes} bytes spilled")

# %% [markdown]
# ## 8. Scheme B, and the logical wall
#
# $V$ is half of the bill, and it is used only at the end: $O = PV = \sum_j P_j V_j$ over blocks of keys. So keep $K$ whole, compute all of $P$
# (it is in registers anyway), and bring $V$ in one block of 64 rows at a time. Block $j$ of $V$ needs columns $64j$ to $64j + 63$ of $P$.
# In NumPy or PyTorch that is a slice:

# %%
show.region(schemes, "V in blocks, P whole")

# %% [markdown]
# Compile it.

# %%
arguments = schemes.kernel_arguments(256, 128, BLOCK_N=64, HALVINGS=2, HOW="slice")
refused = compile_report(schemes.scheme_b_kernel, arguments, target="sm_120", num_stages=1)
print("compiled:", refused.ok)
for line in refused.error.splitlines()[-5:-1]:
    print(re.sub(r" at 0x\w+", "", line))

# %% [markdown]
# No GPU was involved, and no byte was counted. The *language* says no, for every size. The interpreter agrees, so this wall at least
# cannot surprise you later:

# %%
q, k, v = torch.randn(3, 128, 64, dtype=torch.float16, device=device)
try:
    schemes.scheme_b(q, k, v, how="slice")
    print("the slice was accepted")
except Exception as error:
    print("refused:", "unsupported tensor index" in str(error))

# %% [markdown]
# ### Why would a language for tensors refuse to slice one?
#
# Because of where a Triton tensor is. It is not an array in memory that a view can point into. It is spread over the **registers** of all
# the threads of the program, in a layout that the compiler picks for the operation at hand, and a thread cannot address another thread's
# registers. `P[:, 64:128]` may therefore mean: nothing at all (if the layout happens to put whole blocks of columns into each thread's
# registers), a shuffle between threads, or a trip through shared memory with barriers. The same three characters, three prices.
#
# Triton's makers could have hidden that. In 2026 a contributor offered indexing for contiguous slices (triton pull request 10801). The answer
# of a maintainer, Thomas Raoux: it is left out on purpose, so as "to not give the false intuition that such slicing is free/cheap". The
# contributor rewrote the slice as `reshape`, `permute` and `tl.split`, agreed that `__getitem__` would have hidden its cost, and closed the
# request. Users had asked since 2022 (issues 656, 2994, 7191), and the workarounds passed around in those threads are what we try next.
#
# So the logical wall is **not an impossibility. It is a design choice**: the price has to be written down.

# %% [markdown]
# ## 9. Four escape hatches
#
# | hatch | how block $j$ of $P$ is come by | $j$ may be |
# |---|---|---|
# | `split` | view $P$ as two halves, `tl.split` them, repeat | a constant: the loop is unrolled |
# | `gather` | `tl.gather` takes any column from anywhere | a variable |
# | `reduction` | view $P$ as blocks, zero all but block $j$, sum over the blocks | a variable |
# | `recompute` | forget $P$; $m$ and $\ell$ of the row are known, so make block $j$ again from $Q$ and $K_j$ | a variable |
#
# The first three are selections. Each is a few lines:

# %%
# FROM flashlab.attention.schemes: slice_by_split, slice_by_gather, slice_by_reduction (no docstrings)

# %% [markdown]
# `tl.split` wants a last axis of length 2. `reshape` to `[rows, 2, columns / 2]` makes the axis, `permute` puts it last. Check on something
# small enough to see, in plain PyTorch: the columns of $[0, 1, \dots, 7]$, cut twice, block 2.

# %%
x = torch.arange(8)[None, :]
part = x
for bit in (1, 0):  # block 2 of 4 is binary 10: the right half, then the left half of it
    part = part.reshape(1, 2, -1).permute(0, 2, 1)[..., bit]
    print(part.tolist())
assert part.equal(x[:, 4:6])

# %% [markdown]
# All four must give the same answer as the oracle: 100 queries, 250 keys, so that both tails are ragged.

# %%
q, k, v = (torch.randn(n, 64, dtype=torch.float16, device=device) for n in (100, 250, 250))
want, want_lse = (x[0, 0] for x in reference.attention(*(x[None, None] for x in (q, k, v))))
for how in schemes.ESCAPE_HATCHES:
    o, lse = schemes.scheme_b(q, k, v, how=how)
    error, lse_error = (o - want).abs().max().item(), (lse - want_lse).abs().max().item()
    print(f"{how:10} o within fp16 rounding: {error < 1e-3}, lse within 1e-5: {lse_error < 1e-5}")
    assert error < 1e-3 and lse_error < 1e-5

# %% [markdown]
# So the wall has doors. What do they cost? First shared memory. Scheme B holds $Q$ and $K$ at once, and blocks of $V$ later in the same
# place, so $(\mathrm{BLOCK\_M} + N) \cdot D \cdot e$. At $N = 256$, where scheme A dies on sm_120:

# %%
arguments = [schemes.kernel_arguments(256, 128, BLOCK_N=64, HALVINGS=2, HOW=how) for how in schemes.ESCAPE_HATCHES]
hatches = compile_reports(schemes.scheme_b_kernel, arguments, targets=["sm_90", "sm_120"], num_stages=1)
for r_90, r_120, how in zip(hatches[::2], hatches[1::2], schemes.ESCAPE_HATCHES):
    assert r_90.shared_bytes == r_120.shared_bytes == schemes.scheme_b_shared_bytes(256, 128)
    print(f"{how:10} {r_120.shared_bytes} bytes: sm_90 {'fits' if r_90.fits else 'fails'}, sm_120 {'fits' if r_120.fits else 'fails'}")

# %% [markdown]
# Scheme B runs where scheme A did not. The rest of the price is in registers and instructions. The table is the compiler's, for the
# version of Triton that ran this notebook, so its last digits are not the same everywhere. *Exchange* counts instructions that move data
# between threads (shared-memory loads and stores, shuffles), *MMA* the tensor-core instructions; both as they stand in the program text,
# where an unrolled loop shows all its copies.

# %% tags=["nbval-ignore-output"]
exchange = ("LDS", "STS", "LDSM", "STSM", "SHFL")
rows = []
for name, pair in {"scheme A": [r for r in needed[256] if r.target in ("sm_90", "sm_120")],
                   **{how: hatches[2 * i : 2 * i + 2] for i, how in enumerate(schemes.ESCAPE_HATCHES)}}.items():
    flops = (6 if name == "recompute" else 4) * 64 * 256 * 128 / 1e6
    for r in pair:
        rows.append((name, r.target, r.shared_bytes, r.registers, r.spill_bytes, sum(r.instructions.values()),
                     sum(r.instructions[op] for op in exchange), r.tensor_core_instructions, f"{flops:.1f}"))
rows.sort(key=lambda row: row[1] != "sm_90")
show.table(rows, ["kernel", "target", "shared bytes", "registers", "spilled bytes", "instructions", "exchange", "MMA", "MFLOP a program"])

# %% [markdown]
# Read it with care; not all of it is what one would expect.
#
# - `split` exchanges no more than scheme A, which cuts nothing. Here the slice is free: the compiler's layout for $P$ gives every thread
#   some columns of *each* block, so taking one block means using some registers and not others. That is a property of this layout, not
#   of slicing. (What it does cost is registers, because the unrolled loop is one long program.)
# - `gather` is general and pays for it: on sm_90 it exchanges more than twice as much.
# - `reduction` adds up a tile of which three quarters are zeros, and exchanges nothing extra either: the sum runs over blocks, which
#   lie within one thread, so it is selects and additions in registers.
# - `recompute` is the smallest program on both targets and does half as much matrix work again: 6 instead of 4 times
#   $\mathrm{BLOCK\_M} \cdot N \cdot D$. Tensor cores are the cheapest arithmetic on the chip, so this is no fool's choice. Remember it.
# - All but one are near 255 registers, the most a thread can have: they hold a whole row of scores. On sm_120 they all spill.

# %% [markdown]
# And in time? What was recorded natively, at $N = 256$, one program for each multiprocessor. "Two passes" is section 10.

# %%
for run in walls.recorded():
    m = run["machine"]
    rows = [(row["how"], 1e3 * row["ms"], f"{row['max_error']:.1e}") if row["ok"] else (row["how"], "out of shared memory", "")
            for row in run["scheme_b"]]
    print(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}, {m['date']}")
    show.table(rows, ["kernel", "µs (median)", "max error"])
print("machines recorded:", len(walls.recorded()))

# %% [markdown]
# ### And the physical wall?
#
# *Predict:* scheme B at $N = 512$. And at 1024?
#
# <details><summary>Answer</summary>
#
# $(64 + 512) \cdot 256 = 147\,456$ bytes: what scheme A needs at $N = 256$. sm_80 and sm_90 run it, the others do not. At 1024 it is 278 528, and
# everyone is dead. Scheme B moves the wall by one doubling.
#
# </details>

# %%
arguments = schemes.kernel_arguments(512, 128, BLOCK_N=64, HALVINGS=3, HOW="recompute")
for r in compile_reports(schemes.scheme_b_kernel, [arguments], targets=["sm_90", "sm_120"], num_stages=1):
    print(f"N = 512, {r.target}: {r.shared_bytes} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
    assert r.shared_bytes == schemes.scheme_b_shared_bytes(512, 128) and r.fits == (r.target == "sm_90")

# %% [markdown]
# The hatches open the logical wall, and behind it stands the physical one: $K$ is still whole. Blocks of $K$, then? Write down what block $j$
# of $V$ is multiplied by,
#
# $$P_{ij} = \frac{e^{S_{ij} - m_i}}{\ell_i}, \qquad m_i = \max_{j'} S_{ij'}, \quad \ell_i = \sum_{j'} e^{S_{ij'} - m_i},$$
#
# and the trouble is in plain sight. **Every block of $P$ needs the maximum and the sum of its whole row**, so all scores must have been seen before
# the first block of $V$ can be used. That, and not slicing, is why scheme B wants $K$ whole.

# %% [markdown]
# ## 10. Around both walls, the expensive way
#
# Unless the scores are computed twice. Phase 0 found $(m_i, \ell_i)$ in one pass over blocks of a row, keeping two numbers. So:
# **pass 1** runs over the blocks of $K$ and keeps only $m_i$ and $\ell_i$. **Pass 2** runs over the blocks of $K$ and $V$, computes each block of scores
# again, and turns it into its final $P_j$ at once. No slice, no whole row, no whole $K$. It is the `recompute` hatch, taken to its end.

# %%
q, k, v = (torch.randn(n, 64, dtype=torch.float16, device=device) for n in (100, 700, 700))
want = reference.attention(*(x[None, None] for x in (q, k, v)))[0][0, 0]
error = (schemes.two_pass(q, k, v)[0] - want).abs().max().item()
print(f"two passes, N = 700: within fp16 rounding: {error < 1e-3}")
assert error < 1e-3

# %% [markdown]
# And what does the compiler say? $Q$, one block of $K$ and one block of $V$ are on the chip at a time.

# %%
flat = compile_reports(schemes.two_pass_kernel, [schemes.kernel_arguments(4096, 128, BLOCK_N=64)], targets=TARGETS, num_stages=1)
for r in flat:
    print(f"{r.target:6}: {r.shared_bytes} of {r.shared_limit} bytes, for every N: {'fits' if r.fits else 'fails'}")
assert all(r.fits for r in flat) and {r.shared_bytes for r in flat} == {(64 + 2 * 64) * 128 * 2}

# %% [markdown]
# `N` is an ordinary argument of this kernel: one compilation serves all lengths. Both walls are behind us; the figure shows all three
# schemes.

# %%
lengths = [64, 128, 256, 512, 1024, 2048]
needs = {"scheme A": (schemes.scheme_a_shared_bytes, "orange"),
         "scheme B, any hatch": (schemes.scheme_b_shared_bytes, "purple"),
         "two passes": (lambda n, d: flat[0].shared_bytes, "blue")}
lines = [(name, lengths, [formula(n, 128) / 1024 for n in lengths], hue, "o-")
         for name, (formula, hue) in needs.items()]
fig, ax = plt.subplots(figsize=(7.5, 3.8))
curves.curves(ax, lines, log="xy", xticks=lengths, yticks=[32, 64, 128, 256, 512, 1024], legend="upper left",
              xlabel="N (keys)", ylabel="shared memory per block (KiB)", title="Two slopes and a floor")
for target, names in (("sm_90", "H100, H200"), ("sm_80", "A100"), ("sm_120", "RTX cards")):
    curves.level(ax, runtime.limits(target).shared_per_block / 1024, names)
plt.show()

# %% [markdown]
# So is this FlashAttention? Not quite. Count its work against the four lines:

# %%
N, D = 4096, 128
one_pass, two_passes = 4 * N * N * D, 6 * N * N * D
print(f"matmul FLOPs: {two_passes / 1e9:.1f} G, {two_passes / one_pass:.2f} times the {one_pass / 1e9:.1f} G of the four lines")
print(f"exponentials: {2 * N * N / 1e6:.1f} M, 2.00 times; reads of K for each block of queries: 2 times")

# %% [markdown]
# Half as much matrix work again, and every exponential twice: that is the price of wanting $P_j$ **final** when it meets $V_j$. Now ask the question
# that this whole course turns on: *does it have to be final?* $P_j V_j$ is linear in $P_j$. If block $j$ is computed with the maximum known **so
# far**, and the maximum later moves, the result is wrong by one factor a row, $e^{m_{\text{old}} - m_{\text{new}}}$, the same for the whole row. A wrong factor can be
# corrected afterwards, on a $[\mathrm{BLOCK\_M}, D]$ tile that is already in hand. Then one pass is enough. That is phase 2.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Naive attention moves the $N \times N$ matrix six times. Its intensity is $D/3$ FLOP a byte for every $N$: memory-bound on every GPU here.
# - Its peak memory is $(2N^2 + ND)\,e$ a head; the same reasoning rebuilt a published table to within 1 MB.
# - **Scheme A** removes the $N^2$ traffic and is right, and dies of shared memory at $N = 256$ or 512: the **physical wall**. The exact byte count
#   belongs to kernel, compiler and target; the slope belongs to the scheme.
# - **Scheme B** needs blocks of $P$, and Triton does not slice: the **logical wall**, a design choice that makes you write down the price. Four hatches
#   work. They move the physical wall by one doubling.
# - What really holds scheme B back is the normaliser of the whole row. Two passes get around it for 1.5 times the matrix work. One pass needs
#   one more idea.
#
# Left to explore: scheme A for float32 inputs (which $N$ kills it?); two programs on one multiprocessor, which halves what each may use; the
# hatch not tried here, writing $P$ to HBM and loading blocks of it; distributed shared memory, with which a cluster of blocks on sm_90 pools
# what it has (by how many doublings does a cluster of 8 move the wall?).

# %% [markdown]
# ## References
#
# - Dao, Fu, Ermon, Rudra, Ré: *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness* (2022), arXiv 2205.14135. Algorithm 0 is our
#   four lines; section 3 counts the IO.
# - Milakov, Gimelshein: *Online normalizer calculation for softmax* (2018), arXiv 1805.02867. The first of our two passes.
# - Rabe, Staats: *Self-attention Does Not Need O(n²) Memory* (2021), arXiv 2112.05682. The same goal, in one pass, on TPUs.
# - Williams, Waterman, Patterson: *Roofline: an insightful visual performance model for multicore architectures*, CACM 52 (2009).
# - Tillet, Kung, Cox: *Triton: an intermediate language and compiler for tiled neural network computations* (MAPL 2019). Why a tensor is a tile.
# - triton-lang/triton, pull request 10801 *Support contiguous tensor indexing* (2026), and issues 656 *Accessing slices of a tensor* (2022), 2994
#   *triton.language does not support array slices* (2024), 7191 (2025).
# - NVIDIA: *CUDA C++ Programming Guide*, "Technical Specifications per Compute Capability": the limits of section 6.
