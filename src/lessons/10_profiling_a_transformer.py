# %% [markdown]
# # Phase 10 · Profiling a transformer
#
# You have built the kernels. Now put them where they belong: into a layer, and the layer into a language model. Then ask what has become faster, by how much,
# and compared with what.
#
# The tool for that is a profiler. You learn to read its table line by line, and to notice when it cannot be right. At the end, all kernels of the course
# stand on one roofline. Two appendices set all published figures beside ours.

# %% [markdown]
# ## What you will be able to do
#
# - read a profiler's table: what is counted twice, what is bound by memory, what is now the slowest part;
# - recover the shapes of a layer from its FLOPs and bytes;
# - fuse small operations into one kernel, and predict what that is worth;
# - time a training step without the mistakes that change the result most;
# - compute what training keeps in memory, and check it to the byte;
# - say how close each kernel of this course comes to its GPU's limits.

# %% [markdown]
# ## What you need first
#
# Phase 1: bytes, FLOPs and the roofline. Phases 4 and 5: the door `flash_attention`, and what a backward pass keeps. For section 11 it helps to have seen
# phases 6 to 9.
#
# No GPU is needed. Small sizes run here, large ones were recorded, each with its machine. Where something has not been measured yet, the page says so.
# The appendices at the end are a third of the page; nothing needs them.

# %%
import os
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own messages: off, before torch is imported
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from IPython.display import display
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import flashlab
import triton
import triton.language as tl
from flashlab import runtime
from flashlab.attention.cost import trace_ops
from flashlab.attention.inputs import one_of
from flashlab.bench import attention, counterparts, layer as layers, lm, published, roofline
from flashlab.figures import curves, profiles, show
from flashlab.figures.panels import panels
from flashlab.models import layer as layer_module, memory
from flashlab.models.language_model import BYTES, SIZES, Config, make_optimizer
from flashlab.models.rope import check_table, fused_rope, launch_arguments, rope_table
from flashlab.models.train import distance, fit
from flashlab.table import Table
from flashlab.triton_tools.watch import hbm_traffic

show.style()
DEVICE = runtime.device()
ON_GPU = DEVICE.type == "cuda"
if not ON_GPU:
    torch.set_num_threads(1)  # at these sizes several threads mostly wait for each other

# %% [markdown]
# ## 1 · The layer
#
# An attention layer takes x, `[batch, seq_len, width]`, and returns as much. Three matrices make q, k and v of it. Then attention lets the positions see each
# other, and a fourth matrix mixes the heads.
#
# One thing is missing. Attention sums over keys, and a sum has no order: so it does not know where a key stands. *Rotary embedding* (RoPE) tells it.

# %% [markdown]
# ### RoPE by hand
#
# Take two numbers of a query as a point in the plane, and turn it by an angle that grows with its position. Do the same with the keys. A head has many such
# pairs: number $i$ and number $i + D/2$. Each pair turns at its own speed: pair $i$ at position $p$ by the angle $p \cdot 10000^{-2i/D}$.
#
# With $D = 2$ there is one pair, and it turns by 1 per position. The point (1, 0) goes to $(\cos p, \sin p)$:

# %%
# FROM flashlab.models.rope: rope (no docstrings)
cos, sin = rope_table(4, 2)  # positions 0 to 3, head_dim 2
point = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
for p, (a, b) in enumerate(rope(point, cos, sin)[0, 0].tolist()):
    assert math.isclose(a, math.cos(p), abs_tol=1e-6) and math.isclose(b, math.sin(p), abs_tol=1e-6)
    print(f"position {p}: ({a:.3f}, {b:.3f})")

# %% [markdown]
# Why turn? Because the product of two turned vectors depends on the *difference* of their positions, and on nothing else about them. Turn both by 100 more, and
# nothing changes:

# %%
generator = torch.Generator().manual_seed(10)
one_q, one_k = (torch.randn(1, 1, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))
tables = [table.double() for table in rope_table(200, 16)]
score = {}
for at_q, at_k in ((7, 3), (107, 103), (7, 5)):
    score[at_q, at_k] = (rope(one_q, *tables, offset=at_q) * rope(one_k, *tables, offset=at_k)).sum().item()
assert math.isclose(score[7, 3], score[107, 103], abs_tol=1e-5) and abs(score[7, 3] - score[7, 5]) > 0.1
print("positions 7 and 3, 107 and 103: the same score. 7 and 5: another one")

# %% [markdown]
# ### Attention, three times
#
# `eager_attention` is how many models were written: one line of PyTorch after the other. Several query heads share a key head (grouped-query attention, GQA), so
# it first repeats K and V. The second one is PyTorch's own fused attention, SDPA. The third one is yours: your kernels on a GPU. On a CPU they
# would be interpreted, and the door takes PyTorch's products in blocks of queries.

# %%
# FROM flashlab.models.layer: eager_attention, sdpa_attention, flash_attention, ATTENTIONS (no docstrings)
print(list(ATTENTIONS))

# %% [markdown]
# Between the projections a layer has no weights. That part, RoPE and attention, is all that this phase changes:

# %%
# FROM flashlab.models.layer: RotaryAttention (no docstrings)

# %% [markdown]
# And the whole layer. `unflatten` and `transpose` only change how the same memory is read, so nothing is copied there.

# %%
# FROM flashlab.models.layer: AttentionLayer (no docstrings)

# %% [markdown]
# Four variants: the original, SDPA, ours, and ours with RoPE in one kernel (section 4). They have the same weights. Before you time anything, check that they
# compute the same.

# %%
VARIANTS = {"original": ("eager", False), "SDPA": ("sdpa", False),
            "ours": ("flash", False), "ours, fused RoPE": ("flash", True)}


def layer_of(name, width=64, heads=4, kv_heads=2):
    kind, fused = VARIANTS[name]
    torch.manual_seed(0)
    layer = AttentionLayer(width, heads, kv_heads, attention=kind, causal=False, fused_rope=fused)
    return layer.to(DEVICE)

x = torch.randn(1, 128, 64, generator=generator).to(DEVICE)
cos, sin = rope_table(128, 16, device=DEVICE)
exact = layer_of("original").double()(x.double(), cos.double(), sin.double())
for name in VARIANTS:
    error = (layer_of(name)(x, cos, sin).double() - exact).abs().max().item()
    assert error < 1e-5
    print(f"{name:17} within 1e-5 of float64")

# %% [markdown]
# ## 2 · A profile that somebody published
#
# A course published the profiler's table of such a layer on an Ampere GPU: 100 runs with the original attention, and 100 with a FlashAttention kernel in Triton.
# It is float32, without a causal mask. Here are the ten slowest operations of the original.

# %%
profile_of = {which: [r for r in published.load("gqa_layer_profile") if r["layer"] == which]
              for which in ("original", "flash")}
HEADS = ["op", "self_cuda", "self_cuda_pct", "cuda_total", "cuda_mem", "calls", "total_mflops"]
show.table([[str(r[h])[:46] for h in HEADS] for r in profile_of["original"]], HEADS, align="lrrrrrr")

# %% [markdown]
# First understand the columns.
#
# - **self** is the time of the operation's own kernels. **total** has those of the operations inside it too. So totals overlap: `aten::matmul` calls `aten::bmm`,
#   and both show 2.267 s. Never add up *total*.
# - Rows with `aten::` are operations. Most of the others are kernels, under the name that the GPU knows. An operation's self is the sum of *its* kernels: the **same time again**.
#   Here two kernels of 1.580 s and 0.674 s make the 2.254 s of `aten::bmm`. So add up *self* over kernels only.
# - `total_mflops` is computed from shapes, not measured. That makes it useful: it tells the shapes.

# %% [markdown]
# ### The shape, from the profile alone
#
# `aten::bmm` ran 200 times in 100 runs: $QK^\top$ and $PV$. Each has $2 H N^2 D$ FLOPs, where H counts all heads of the batch. `aten::softmax` wrote its P, $H N^2$
# numbers of 4 bytes. The ratio of the two gives D. (The profiler writes Gb where it means GiB.)
#
# A third equation gives N. `aten::bmm` wrote 203.12 GiB: 200 are scores, and 3.12 are outputs, $H N D$ numbers in each run.

# %%
rows = {r["op"]: r for r in profile_of["original"]}
flops = float(rows["aten::bmm"]["total_mflops"]) * 1e6 / 200
scores = 200 * 2**30 / 100 / 4  # H N^2: numbers in P
outputs = (float(rows["aten::bmm"]["cuda_mem"].split()[0]) - 200) * 2**30 / 100 / 4  # H N D numbers
print(f"D = {flops / 2 / scores:.2f}, H N^2 = 2^{math.log2(scores):.2f}, "
      f"H N = 2^{math.log2(outputs / 16):.2f}")
assert abs(flops / (2 * 512 * 1024**2 * 16) - 1) < 1e-6

# %% [markdown]
# D = 16, $H N^2 = 2^{29}$ and $H N = 2^{19}$. So N = 1024, and 512 heads: what the course says too. A very small head_dim, and many heads.
#
# Now the times. Each line of the original reads tensors and writes one. How fast does it move its bytes?

# %%
def ms(text):
    """Milliseconds of "2.267s", "673.615ms" or "400.000us"."""
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


P, SMALL = 2.0, 512 * 1024 * 16 * 4 / 2**30  # GiB: one N x N matrix of all heads, and one of q, k, v, o
KERNELS = {"Q K^T": ("ampere_sgemm_128x128_tn", 2 * SMALL + P),
           "/ sqrt(D)": ("void at::native::vector", 2 * P),
           "softmax": ("void (anonymous namespace)::softmax", 2 * P),
           "P V": ("ampere_sgemm_128x128_nn", P + 2 * SMALL)}
speed, took = {}, {}
for line, (kernel, gib) in KERNELS.items():
    (took[line],) = (ms(r["self_cuda"]) / 100 for r in profile_of["original"] if r["op"].startswith(kernel))
    speed[line] = gib * 2**30 / took[line] / 1e6
    print(f"{line:10} {took[line]:5.1f} ms per run, moves {gib:.2f} GiB: {speed[line]:3.0f} GB/s")

# %% [markdown]
# Which product is which? The last letters of a product's name say how its two factors are read: `n` as they lie, `t` transposed. $QK^\top$ has a transposed one: `tn`.
#
# Three of the four lines move about 330 GB/s, whatever they compute. That is what *bound by memory* looks like in a profile. Dividing by $\sqrt{D}$, one operation per
# number, takes as long as a whole softmax. The GPU's name is not told, so we cannot say what share of its peak 330 GB/s is.

# %%
bound = [speed[line] for line in ("Q K^T", "/ sqrt(D)", "softmax")]
assert max(bound) < 1.02 * min(bound) and speed["P V"] < 0.5 * min(bound)
print(f"{min(bound):.0f} to {max(bound):.0f} GB/s; P V: {speed['P V']:.0f}")

# %% [markdown]
# $PV$ is the exception, with less than half that speed. Its kernel is named after a tile of 128 × 128, but the result has only 16 columns. So 7/8 of a tile would be
# empty. That fits, but nothing here isolates it: a hypothesis.
#
# ### What does not fit
#
# The four kernels together, and the whole, which follows from a time and its percentage:

# %%
whole = ms(rows["aten::bmm"]["self_cuda"]) / float(rows["aten::bmm"]["self_cuda_pct"][:-1]) * 100
four = 100 * sum(took.values())
print(f"whole: {whole / 1e3:.3f} s; the four kernels: {four / 1e3:.3f} s; left: {whole - four:.0f} ms")
print("repeat_interleave, total:", rows["aten::repeat_interleave"]["cuda_total"])
assert ms(rows["aten::repeat_interleave"]["cuda_total"]) > whole - four

# %% [markdown]
# All other kernels together took less than 200 ms. But repeating K and V has a *total* of 540 ms. Both cannot be kernel times. It ran 400 times in 100 runs, so one call may
# be inside another one and be counted twice; even then it is too much. What the 540 ms are, the table does not say.
#
# You will meet such rows. Do not build on them.

# %% [markdown]
# There is also a statement in what is *not* in the table. `aten::matmul` ran 200 times, and that is attention alone, so no projection was profiled. And to hide later keys takes one more pass over the
# scores, as long as the division. It would be among the ten. So there was no mask.

# %% [markdown]
# ### The same layer with FlashAttention

# %%
show.table([[str(r[h])[:46] for h in HEADS] for r in profile_of["flash"]], HEADS, align="lrrrrrr")
after = {r["op"]: r for r in profile_of["flash"]}
whole_after = ms(after["flash_attentionv2_kernel"]["self_cuda"]) / 0.7575
print(f"{whole / 1e3:.3f} s became {whole_after:.0f} ms: {whole / whole_after:.1f} times as fast")

# %% [markdown]
# Two rows need care. `flash_attentionv2_kernel` has no row with `aten::`, because PyTorch does not know it. `cudaLaunchKernel` is no kernel: the CPU calls it. Adding up self over the kernels
# leaves it out, and gives the whole.
#
# *What replaced it?* One kernel took the place of four lines, and of the repeating: it takes three quarters of the new time. Bytes in P: none.
#
# *What is on top now?* Products, sums, a difference and `cat`. Those are RoPE's small operations. What was hidden behind the scores is now the next thing to do:

# %%
small = sum(ms(after[op]["self_cuda"]) for op in ("aten::mul", "aten::cat", "aten::add", "aten::sub"))
print(f"RoPE: {small:.0f} of {whole_after:.0f} ms, {small / whole_after:.0%}; "
      f"if it took as long in the original, {small / whole:.0%} there")
kernels = sum(ms(r["self_cuda"]) for op, r in after.items() if not op.startswith(("aten::", "cuda")))
attention_alone = ms(after["flash_attentionv2_kernel"]["self_cuda"])
assert 0.2 < small / whole_after < 0.3 and small < whole - four
assert abs(kernels - whole_after) < 1 and abs(attention_alone + small - whole_after) < 1
print(f"the kernels, added up: {kernels:.0f} ms")
print("the attention kernel and RoPE are all of it, to within 1 ms")

# %% [markdown]
# The original's ten rows do not show RoPE. The 3 % assume that it took the same 142 ms there. That fits into the 195 ms that were left over.
#
# And what does *8.6 times as fast* tell? That the original was slow. It moves each score to memory and back three times. Any kernel that does not do so wins by much. For
# a statement about *this* kernel you need another peer: a fused one. Section 5 has it.

# %% [markdown]
# ## 3 · A profile of your own
#
# `torch.profiler.profile` records what happens inside its `with`. Three things have to be right:
#
# - **run it before**, under the profiler too: a first call compiles, allocates, chooses kernels (section 7);
# - on a GPU **wait** inside: a launch returns at once, and the kernel runs later;
# - ask for memory and FLOPs, if you want those columns.
#
# A profiler costs time itself. So take *shares* from it, and speeds from a timing without it.
#
# And **one profile is one sample**. If a row that should cost nothing, such as `aten::empty`, is on top, run it again before you believe it. Here the quickest of three is taken.

# %%
def profiled(run, tries=3):
    """After a first call of run: the profile, of a few, with the least time in all."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
    found = []
    for _ in range(1 + tries):
        with profile(activities=activities, profile_memory=True, with_flops=True) as one:
            run()
            if ON_GPU:
                torch.cuda.synchronize()
        found.append(one)
    own = f"self_{'device' if ON_GPU else 'cpu'}_time_total"
    return min(found[1:], key=lambda one: sum(getattr(row, own) for row in one.key_averages()))

# %% [markdown]
# To profile a module of your own: `found = profiled(lambda: module(x))`. `found.key_averages()` has a row per operation. `found.key_averages().table(sort_by=...)` prints them with many columns; here are only those that are read.

# %%
def slowest(found, most=8):
    """Rows of the operations with the most own time: GPU time where there is one."""
    unit = "device" if ON_GPU else "cpu"
    ops = [r for r in found.key_averages() if r.device_type == DeviceType.CPU]
    own = {r.key: getattr(r, f"self_{unit}_time_total") for r in ops}
    ops.sort(key=lambda r: -own[r.key])
    return [[r.key[:40], r.count, own[r.key] / 1e3, f"{own[r.key] / sum(own.values()):.0%}",
             getattr(r, f"self_{unit}_memory_usage") / 2**10, r.flops / 1e6] for r in ops[:most]]

COLUMNS = ["operation", "calls", "self ms", "of all", "self KiB", "MFLOP"]

# %% [markdown]
# All four variants, forward only, without gradients:

# %%
profiles_here = {}
for name in VARIANTS:
    layer = layer_of(name)
    with torch.no_grad():
        profiles_here[name] = profiled(lambda: layer(x, cos, sin))

# %% tags=["nbval-ignore-output"]
print(f"original, on {torch.cuda.get_device_name() if ON_GPU else 'a CPU'}")
show.table(slowest(profiles_here["original"]), COLUMNS)

# %% [markdown]
# Times are different in each run. Read the rest: two columns do not depend on the machine.
#
# - *self KiB*: what an operation allocated, less what it released. So it may be negative. At this size, 4 heads and N = 128, one matrix of scores has 256 KiB. Which rows have that?
# - *MFLOP*: counted for matrix products, `mul` and `add`. For `div`, `sub`, softmax and each kernel that PyTorch does not know, it is 0; the published table prints `--`.
#
# The answer: the division, the softmax, and the product, whose 288 KiB are the scores and 32 KiB of output. The next cell counts them in another way.

# %%
squares, launches = {}, {}
for name in ("original", "ours", "ours, fused RoPE"):
    layer = layer_of(name)
    ops = trace_ops(lambda: layer(x, cos, sin))
    squares[name] = [op.name for op in ops if op.bytes_written >= 4 * 4 * 128 * 128]
    launches[name] = len(ops)
    print(f"{name:17} {launches[name]:2} operations; that write N x N: {', '.join(squares[name]) or 'none'}")
assert len(squares["original"]) == 3 and not squares["ours"] and not squares["ours, fused RoPE"]
assert launches["original"] > launches["ours"] > 2 * launches["ours, fused RoPE"]

# %% [markdown]
# `trace_ops`, from phase 1, counts what PyTorch dispatches, without views. Three operations of the original write an N × N matrix. Ours write none. And from
# line to line there are fewer operations, which matters where each is a launch.

# %% [markdown]
# Now the table of ours. A row with `flashlab::` is an operator of this course. Its FLOPs are 0: the profiler does not know them.

# %% tags=["nbval-ignore-output"]
print("ours, RoPE in one kernel;", "Triton is " + ("interpreted" if runtime.INTERPRETED else "compiled"))
show.table(slowest(profiles_here["ours, fused RoPE"]), COLUMNS)

# %% [markdown]
# On a CPU attention's row is `flashlab::torch`: 128 queries are one block of it, so its `aten::baddbmm` does make all the scores, which a kernel never writes. RoPE's row is the time of a Python program that imitates the Triton kernel. It says nothing about the kernel, and is by far the longest. Then compare the
# original with SDPA instead: on a CPU its fused kernel is compiled code. (On a GPU SDPA may have no fused kernel for float32 with grouped heads. Its rows say what it did.)

# %% tags=["nbval-ignore-output"]
show.table(slowest(profiles_here["SDPA"]), COLUMNS)

# %% [markdown]
# ### In time: the trace
#
# A table has no order. The *trace* has: every operation with its beginning and its length, in a JSON file that Chrome invented and many tools read.

# %% tags=["nbval-ignore-output"]
folder = Path(tempfile.mkdtemp(prefix="flashlab-trace-"))
traces = {}
for name, found in profiles_here.items():
    path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.json"
    found.export_chrome_trace(str(path))
    traces[name] = json.loads(path.read_text())
    print(path.stat().st_size // 1024, "KiB:", path.name)
print("in", folder.name, "of", tempfile.gettempdir())

# %% [markdown]
# Open such a file in your browser: go to `https://ui.perfetto.dev` and drop it there, or to `chrome://tracing` in Chrome and press *Load*. Both work on your machine and
# send nothing anywhere. Zoom with W and S, move with A and D, click a bar for its name.
#
# Inside it is a list of events. `ph: "X"` is a bar with a beginning `ts` and a length `dur`, in microseconds:

# %% tags=["nbval-ignore-output"]
bars = [e for e in traces["original"]["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
for e in [e for e in bars if e["name"] in ("aten::softmax", "aten::bmm")][:3]:
    print(e["name"], {key: e[key] for key in ("ts", "dur", "tid")})

# %% [markdown]
# And a picture of three of them. The colours say what a bar does:

# %% tags=["nbval-ignore-output"]
KINDS = {"products": ("blue", ["mm", "matmul", "linear"]), "softmax": ("orange", ["softmax"]),
         "attention kernel": ("green", ["scaled_dot", "flashlab::t"]), "division": ("red", ["div"]),
         "RoPE": ("purple", ["mul", "sub", "add", "cat", "rope"]),
         "K and V repeated": ("sky", ["repeat", "copy"])}
fig, axes = plt.subplots(3, 1, figsize=(8.6, 5.4))
for ax, name in zip(axes, ("original", "SDPA", "ours, fused RoPE")):
    profiles.timeline(ax, profiles.operations(traces[name]), KINDS, name)
axes[-1].set_xlabel("microseconds")
plt.show()

# %% [markdown]
# *One line per processor. Each picture has its own time scale. Gaps are the time between operations: Python, and on a GPU the launches.* Where Triton is interpreted, the third picture is one long bar:
# the Python program that imitates RoPE's kernel. The products beside it are too short to be seen.

# %% [markdown]
# On a GPU look at both lines. If the GPU's has gaps while the CPU's has none, the kernels are too short for their launches. Then a faster kernel gains nothing, and fusing
# or `torch.compile` does.

# %% [markdown]
# ## 4 · What is on top now: RoPE
#
# Count what `rope` does, as phase 1 counted attention. With $n$ numbers in q:

# %%
q, k = (torch.randn(1, heads, 128, 16, generator=generator).to(DEVICE) for heads in (4, 2))
n, e = q.numel(), 4
table_bytes = 128 * 8 * e  # one of cos and sin
ops = trace_ops(lambda: rope(q, cos, sin))
moved = sum(op.bytes_read + op.bytes_written for op in ops)
print([op.name for op in ops])
assert len(ops) == 7 and moved == 9 * n * e + 4 * table_bytes
print(f"7 operations move 9 n numbers, and 4 times a table: {moved} bytes")

# %% [markdown]
# Four products, each of half the numbers: read n/2, write n/2, so 4 n. A difference and a sum: 1.5 n each. `cat`: 2 n. Together 9 n. But each number only has to be read
# once and written once: **2 n**.
#
# So one kernel should need about 4.5 times less time. What would that be worth to the published layer, if the kernel moves 330 GB/s too?

# %%
mib = (32 + 16) * 2**20  # q; k has half as many heads, as the bytes of `cat` say
assert abs(float(after["aten::cat"]["cuda_mem"].split()[0]) * 2**30 / 100 / mib - 1) < 0.01
fused_ms = 2 * mib / (min(bound) * 1e6)
print(f"RoPE now {small / 100:.2f} ms per run; in one kernel {fused_ms:.2f} ms")
print(f"the layer: {whole_after / 100:.2f} ms would become {(whole_after - small) / 100 + fused_ms:.2f} ms")

# %% [markdown]
# A prediction, not a measurement. About a fifth of the layer, for a kernel of some seventy lines. Here it is.
#
# One program takes BLOCK_M positions. It loads their angles once, and uses them for several heads of q and of k:

# %%
# FROM flashlab.models.rope: rotate_heads

# %% [markdown]
# The kernel itself finds out which positions a program has, loads their angles, and calls `rotate_heads` twice: for q and for k.

# %%
# FROM flashlab.models.rope: rope_kernel

# %% [markdown]
# - `rotate_heads` is the formula: two halves of a row, each read once and written once.
# - `BACK` turns by the negative angle. That undoes a rotation, and it is also its gradient: so the backward pass is the same kernel.
# - It computes in float32, whatever the dtype of q and k. The small operations round after each of their steps.
# - Strides are passed for each axis, so q may be a view, as it is in the layer.

# %% [markdown]
# The launch: one program per block of rows, per batch, and per group of heads.

# %%
turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
arguments = launch_arguments(q, k, turned_q, turned_k, cos, sin, 0, False)
blocks = triton.cdiv(q.shape[2], arguments["BLOCK_M"])
rope_kernel[(q.shape[0] * blocks * arguments["parts"],)](q, k, turned_q, turned_k, cos, sin, **arguments)
for name, ours, theirs in (("q", turned_q, rope(q, cos, sin)), ("k", turned_k, rope(k, cos, sin))):
    assert torch.allclose(ours, theirs, atol=1e-6)
    print(f"{name} turned: as by the small operations")

# %% [markdown]
# In low precision the two are not equal. Which one is closer to float64?

# %%
exact = rope(q.bfloat16().double(), cos.double(), sin.double())
low = q.bfloat16(), k.bfloat16()
error = {"seven operations": rope(low[0], cos, sin), "one kernel": fused_rope(*low, cos, sin)[0]}
error = {name: (turned.double() - exact).abs().max().item() for name, turned in error.items()}
assert error["one kernel"] < 0.75 * error["seven operations"]
print("bf16: the largest error of one kernel is below 3/4 of that of seven operations")

# %% [markdown]
# So fusing does not only save time: what is not stored is not rounded.

# %% [markdown]
# And its bytes? `hbm_traffic` from phase 3 counts them, without caches.

# %%
traffic = hbm_traffic(fused_rope, q, k, cos, sin)
both = (q.numel() + k.numel()) * e
assert traffic.bytes_written == both and traffic.bytes_read == both + 2 * table_bytes
print("q and k: read once, written once; the tables: read once")

# %% [markdown]
# And the gradient, against the small operations:

# %%
gradients = []
for way in (fused_rope, lambda q, k, cos, sin: (rope(q, cos, sin), rope(k, cos, sin))):
    inputs = [y.clone().requires_grad_() for y in (q, k)]
    loss = sum((y**3).sum() for y in way(*inputs, cos, sin))
    gradients.append(torch.autograd.grad(loss, inputs))
for name, a, b in zip(("dq", "dk"), *gradients):
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    print(f"{name}: the same")

# %% [markdown]
# ## 5 · The same layer on one machine, with fair peers
#
# The published shape again, and one of today: batch 4, 32 query heads, 8 key heads, N = 4096, D = 128, bf16, causal, with its projections. `flashlab bench layer` times
# these in turns, each as a layer and as attention alone:
#
# - the original, and what torch.compile makes of it;
# - ours, with RoPE apart and in one kernel;
# - SDPA with the backend that it chooses, and with each backend by name.
#
# With `--quick` it takes tiny shapes, and runs on a CPU too. Before you look, write down your guess: in the present-day case, what part of the layer's time is attention?

# %%
data = layers.record()
for case in ("published", "present"):
    print(f"{case}: {layers.CASES[case]}")
    display(layers.times_table(data, case))

# %% [markdown]
# Two ratios from that table, of the forward pass. The first one is what such courses print. The second one is with the fastest of PyTorch's own kernels, so that a speedup
# over a weak baseline is not mistaken for speed. *RoPE apart* is the layer in which nothing but attention is exchanged: RoPE is the same small operations on both sides.

# %%
for case in ("published", "present"):
    for scope, name in (("layer", layers.OURS), ("layer", layers.APART), ("attention", layers.OURS)):
        peers = [layers.ORIGINAL, layers.best_sdpa(data, case, scope)]
        found = {over: layers.ratio(data, case, name, over, scope) for over in peers if over}
        said = [f"{ratio:.2f} times as fast as {over}" for over, ratio in found.items() if ratio]
        print(f"{case}, {scope}: {name} is " + (", ".join(said) or layers.NOT_YET))

# %% [markdown]
# The published shape first. On the H200 ours is ahead of everything, but look at who is behind. PyTorch *chooses* the unfused formula there: it has no fused kernel for float32 that
# takes grouped heads. The best of its kernels needs K and V repeated first. So even the fair peer is not made for this shape.
#
# The shape of today has a peer that is made for it: SDPA takes cuDNN there. (Ours are phase 11's kernels, which this door opens to on an H200.) Attention alone is ahead by a quarter, forward. But our layer is ahead by half. Where does the rest come from?

# %%
for which in layers.PASSES:
    took = {scope: layers.times(data, "present", scope, which) for scope in layers.SCOPES}
    if all(layers.OURS in found for found in took.values()):
        share = took["attention"][layers.OURS] / took["layer"][layers.OURS]
        order = sorted(set(took["layer"]) - set(layers.COMPILED), key=took["layer"].get)
        print(f"present, {which}: attention is {share:.0%} of our layer; the layers, the fastest first:")
        print("   ", "; ".join(order))
    if faster := layers.ratio(data, "present", "SDPA, compiled", layers.OURS, which=which):
        print(f"    in turns with ours, SDPA, compiled, is {faster:.2f} times as fast")

# %% [markdown]
# From RoPE. *Ours, RoPE apart* is ahead of SDPA by 5 percent: that is attention's part. The small operations are what SDPA's layer has too. Give RoPE to a compiler, and it fuses them for SDPA as well: *SDPA, compiled*, which took turns with ours in another job, comes much closer.
#
# So this layer gains more from a kernel of seventy lines than from the attention kernel, against a peer that has a good one. A single ratio for the whole layer would have hidden that.

# %% [markdown]
# Read the two profiles of the published shape as you read the published one: self times, kernels or operations but never both, bytes by formula.

# %%
for name in (layers.ORIGINAL, layers.OURS):
    print(f"{name}, the published shape, kernels only:")
    display(layers.profile_table(data, "published", name, most=8, kernels=True))

# %% [markdown]
# The original has the same four kernels as the published profile, each about 1 ms. Softmax and the division by $\sqrt{D}$, whose kernel is called `mul` here, read P and write it, 4 GiB: so they move over 4 TB/s, nearly all that this
# memory can (section 11). The pattern is the same on another GPU.
#
# And the prediction of section 4, that RoPE in one kernel takes 4.5 times less?

# %%
rope_of = {}
for name in (layers.APART, layers.OURS):
    shares = layers.kernel_shares(data, "published", name)
    rest = [(took, calls) for kernel, took, calls in shares if layers.OUR_KERNEL not in kernel]
    if rest:
        rope_of[name] = sum(took for took, _ in rest), sum(calls for _, calls in rest)
        print(f"{name}: RoPE takes {1e3 * rope_of[name][0]:.1f} us in {rope_of[name][1]} kernels")
if len(rope_of) == 2:
    print(f"times less: {rope_of[layers.APART][0] / rope_of[layers.OURS][0]:.1f}")

# %% [markdown]
# More than predicted. By section 4's count of bytes the one kernel moves about 4 TB/s, and the small ones, which take some 12 microseconds each, less than 3. Why they are slower, nothing here isolates.
#
# Now the layer of today, forward and backward, with operations and kernels, memory and FLOPs. *Predict:* what is on top, now that neither scores nor RoPE are?

# %%
display(layers.profile_table(data, "present", layers.OURS, "both"))
display(layers.profile_table(data, "present", layers.SDPA, "both", most=4, kernels=True))

# %% [markdown]
# The projections, `aten::mm`: more than half of the layer is plain matrix products. Then our backward pass: `keys`, a kernel of phase 11, takes 2.7 ms, as long as cuDNN's one kernel, below. An earlier record had phase 5's
# two kernels there, with 4.3 ms: a profile like this one said what to do next in *this* layer. (`flash_forward` is phase 11's forward kernel. FLOPs are counted for what PyTorch knows.)

# %% [markdown]
# And one call of each in time, where it was recorded. All have one scale, so the lengths compare.

# %%
recorded = {}
for name in (layers.ORIGINAL, layers.APART, layers.OURS):
    events = [e for e in layers.timeline(data, "published", name) if e.where.startswith("stream")]
    if events:
        recorded[name] = [("GPU", e.name, e.start_us, e.us) for e in events]
print("timelines recorded:", len(recorded))
if recorded:
    fig, axes = plt.subplots(len(recorded), 1, figsize=(8.6, 4.6), sharex=True, squeeze=False)
    for ax, (name, events) in zip(axes.flat, recorded.items()):
        profiles.timeline(ax, events, profiles.KERNEL_KINDS, f"{name}, {data['machine']['gpu']}")
    ax.set_xlabel("microseconds")
    plt.show()
for name, events in recorded.items():
    span = max(e[2] + e[3] for e in events) - min(e[2] for e in events)
    print(f"{name}: from the first kernel to the end of the last, "
          f"the GPU works {sum(e[3] for e in events) / span:.0%} of the time")

# %% [markdown]
# *White is waiting.* The profiler makes launches slower, and what is white here is mostly Python on its way to the next launch. In ours the GPU waits 0.23 ms between two kernels, of which the longer one takes 0.9 ms.
#
# The table above knows nothing of this: its launches were recorded beforehand, in a CUDA graph, to time kernels alone. Keep the white in mind. A model may have to pay for it.

# %% [markdown]
# ## 6 · A language model around it
#
# A decoder-only transformer repeats two steps: attention, and a small network for each position alone. Each reads a *normalised* x and adds its result to x.
#
# **RMSNorm** divides a row by the root of its mean square, and multiplies by a learned weight. For the row (3, 4) that root is $\sqrt{(9 + 16)/2} = \sqrt{12.5}$:

# %%
norm = nn.RMSNorm(2, eps=0.0)  # its weight starts as 1
row = norm(torch.tensor([3.0, 4.0]))
assert torch.allclose(row, torch.tensor([3.0, 4.0]) / 12.5**0.5)
print([round(number, 4) for number in row.tolist()], "mean square:", round((row**2).mean().item(), 4))

# %% [markdown]
# **SwiGLU** is the small network. It makes two wide rows of x. One of them, through $\text{silu}(a) = a / (1 + e^{-a})$, decides how much of the other passes.

# %%
# FROM flashlab.models.language_model: SwiGLU, Block (no docstrings)

# %% [markdown]
# The model: an embedding for each token, `depth` blocks, a norm, and a matrix that gives a score to each token that may come next. That matrix is the embedding again
# (*tied*).

# %%
# FROM flashlab.models.language_model: LanguageModel (no docstrings)

# %% [markdown]
# One step of training. `autocast` computes the matrix products in a shorter dtype, if one is given. `clip_grad_norm_` keeps a rare large gradient from doing harm.

# %%
# FROM flashlab.models.language_model: train_step (no docstrings)

# %% [markdown]
# The sizes are those of the GPT-2 family. How many numbers does each learn? By formula, and counted on the device `meta`, where a tensor has a shape but no memory:

# %%
rows = []
for size, shape in SIZES.items():
    with torch.device("meta"):
        counted = sum(weight.numel() for weight in LanguageModel(shape).parameters())
    assert counted == shape.parameters()
    rows.append([size, shape.width, shape.depth, shape.heads, shape.head_dim, counted / 1e6])
show.table(rows, ["size", "width", "depth", "heads", "head_dim", "million parameters"])

# %% [markdown]
# Only a string differs between the variants of the model: `attention="eager"`, `"sdpa"` or `"flash"`. From the same seed all three have the same weights. So they must have the same
# loss. Before training, a model knows nothing, and guessing among 256 bytes costs $\ln 256 = 5.55$:

# %%
SMALL_MODEL = Config(width=32, depth=2, heads=2, kv_heads=1, vocabulary=BYTES, positions=64)


def build(**changes):
    torch.manual_seed(0)
    return LanguageModel(replace(SMALL_MODEL, **changes)).to(DEVICE)

tokens = torch.randint(BYTES, (2, 65), generator=generator).to(DEVICE)
losses = {kind: build(attention=kind)(tokens[:, :-1], tokens[:, 1:]).item() for kind in ATTENTIONS}
assert max(losses.values()) - min(losses.values()) < 1e-5 and abs(losses["eager"] - math.log(256)) < 0.05
print("three attentions, one loss; within 0.05 of a guess:", abs(losses["eager"] - math.log(256)) < 0.05)

# %% [markdown]
# ## 7 · Timing a step: the first one is another thing
#
# Three parts of a step are timed apart: forward, backward, and the optimiser. `wait` is the line that is most often forgotten. On a GPU, PyTorch launches kernels and goes on; without it
# you time the launching.

# %%
def wait():
    if ON_GPU:
        torch.cuda.synchronize()


def timed(run):
    """(what run returns, its milliseconds)"""
    wait()
    begin = time.perf_counter()
    result = run()
    wait()
    return result, 1e3 * (time.perf_counter() - begin)


def first_steps(model, steps=8):
    """Milliseconds of forward, backward and optimiser of the first steps of a new model."""
    optimizer, found = make_optimizer(model), {"forward": [], "backward": [], "optimiser": []}
    for _ in range(steps):
        loss, took = timed(lambda: model(tokens[:, :-1], tokens[:, 1:]))
        found["forward"].append(took)
        found["backward"].append(timed(loss.backward)[1])
        found["optimiser"].append(timed(optimizer.step)[1])
        optimizer.zero_grad()
    return found

# %% [markdown]
# Two models: one as it is, and one through `torch.compile`. The backend `eager` reads the Python code into a graph and runs the same kernels; it generates nothing. So its first call is cheap for a
# compiled one.

# %%
steps = {"eager": first_steps(build())}
compiled_model = build()
compiled_model.compile(backend="eager")
steps["compiled"] = first_steps(compiled_model)
later = {name: statistics.median(found["forward"][2:]) for name, found in steps.items()}
assert steps["compiled"]["forward"][0] > 3 * later["compiled"]
print("compiled: the first forward pass takes more than 3 times as long as later ones")

# %% tags=["nbval-ignore-output"]
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.2), sharey=True)
for ax, (name, found) in zip(axes, steps.items()):
    lines = [(part, range(1, 9), found[part], hue, "o-")
             for part, hue in (("forward", "blue"), ("backward", "orange"), ("optimiser", "green"))]
    curves.curves(ax, lines, log="y", size=5, xlabel="step", title=name, ylabel="ms" if ax is axes[0] else "")
plt.show()

# %% [markdown]
# *The first eight steps of a new model, one by one; a logarithmic axis.* The eager model's forward pass shows no warm-up: its operations have run before, in section 6. In a new process it would have a
# first call too. Its backward pass and its optimiser run here for the first time. The compiled one has to be read first.

# %% [markdown]
# And what would a mean over these eight steps say? The last number is that mean over a later step. Where it is far from 1, the mean tells of the first call.

# %% tags=["nbval-ignore-output"]
for name, found in steps.items():
    mean, median = statistics.mean(found["forward"]), statistics.median(found["forward"][2:])
    print(f"{name:8} forward: first {found['forward'][0]:8.2f} ms, mean of 8 {mean:7.2f}, "
          f"median after 2 of warm-up {median:6.2f}: {mean / median:.1f} times")

# %% [markdown]
# What is in a first call? It depends: reading kernels from disk, choosing one for each matrix product, memory that has to be asked of the system, Triton's and torch.compile's compilers.
#
# The optimiser has a first call of its own. AdamW keeps two averages per weight, and makes them when it is first called. So the *memory* of the first step is not that of the second
# either:

# %%
model = build()
optimizer = make_optimizer(model)
print("averages before the first step:", len(optimizer.state))
train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:])
averages = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)
assert averages == 2 * SMALL_MODEL.parameters()
print(f"after it: {averages} numbers, 2 for each of {SMALL_MODEL.parameters()} weights")

# %% [markdown]
# ### A published table, under suspicion
#
# A course printed the mean seconds of 10 steps. The machine is not named. Look at the forward pass of the same model in its two runs:

# %%
table = {(r["run"], r["model"]): r for r in published.load("lm_forward_backward")}
show.table([[*key, *(f"{1e3 * r[c]:.1f}" if r[c] else "" for c in ("avg_forward_s", "avg_backward_s"))]
            for key, r in table.items()], ["run", "model", "forward, ms", "backward, ms"], align="llrr")
alone, beside = (1e3 * table[run, "sm"]["avg_forward_s"] for run in ("forward_only", "forward_backward"))
assert beside > 2.5 * alone and beside > 1e3 * table["forward_backward", "sm"]["avg_backward_s"]
print(f"small: {beside / alone:.1f} times as long; over 10 steps {10 * (beside - alone):.0f} ms more")

# %% [markdown]
# The same forward pass takes 2.8 times as long if a backward pass follows. And that backward pass is *shorter* than the forward pass, although it has twice its matrix products.
#
# *Predict:* name two mistakes of timing, each of which could make such a table.
#
# <details><summary>Answer</summary>
#
# A first call in the mean: one forward pass of about 440 ms among ten would be enough. Or no waiting: then a part is charged with work that an earlier part has launched. It also may
# be that the first run kept nothing for a backward pass. The table cannot tell which it was, or whether it was any of them.
#
# </details>

# %% [markdown]
# ## 8 · The model, measured
#
# `flashlab bench lm` times the steps of all sizes: 4 texts of 1024 tokens, after warm-up, and the first steps one by one. bf16 means autocast: products in bf16, weights in
# float32.
#
# Write down your guess first: how many times as fast is a step of the small model with our kernels as with eager attention?

# %%
model_data = lm.record()
display(lm.step_table(model_data))
for size in SIZES:
    found = {over: lm.ratio(model_data, size, "flash, fused RoPE", over) for over in ("eager", "sdpa")}
    said = [f"{ratio:.2f} times as fast as with {over}" for over, ratio in found.items() if ratio]
    print(f"{size}: a step with our kernels is " + (", ".join(said) or lm.NOT_YET))

# %% [markdown]
# The steps as bars. (A missing one would have run out of memory, or not have been measured.)

# %%
WAYS = {"eager": "grey", "sdpa": "green", "flash": "sky", "flash, fused RoPE": "blue"}  # as in every figure
sizes = lm.over_sizes(model_data)
print("attentions with a time:", len(sizes))
if sizes:
    fig, ax = plt.subplots(figsize=(8.0, 3.4))
    bars = {way: ([dict(zip(*found)).get(size, math.nan) for size in SIZES], WAYS[way])
            for way, found in sizes.items()}
    curves.columns(ax, list(SIZES), bars, fmt="%.0f", ylabel="ms",
                   title=f"One training step, bf16, 4 × 1024 tokens, {model_data['machine']['gpu']}")
    plt.show()

# %% [markdown]
# In bf16 our kernels beat eager attention by far and need 0.6 of its memory. Beside SDPA the printed ratio flatters us: *our kernels* are two, attention and RoPE, and SDPA's row has RoPE in PyTorch's small operations. What is attention worth
# alone? To tell, nothing else may change: one model in one process, whose attention and RoPE are exchanged from step to step, in turns:

# %%
display(lm.exchanged_table(model_data))

# %% [markdown]
# Above 1, ours is faster. The last column is the same step as one CUDA graph: the GPU never waits for Python. Where the two differ, Python is measured.
#
# So launched by Python ours are behind SDPA in all four sizes, on a busier host than the first table's. How far depends on how fast Python was: earlier runs had 0.59 to 1.03 for *attention and RoPE*, where this one has 0.92 to 0.99.
# As a graph the step gains 11 to 16 percent, nearly all by RoPE. In float32 kernels take longer, Python is not late, and ours, with fused RoPE, is ahead of SDPA in every size:

# %%
display(lm.step_table(model_data, "float32"))

# %% [markdown]
# The same model, the same kernels in another dtype. What else is in a step's time? The *optimiser* gives it away. Its work does not depend on attention, nor on
# autocast: weights, gradients and averages are float32 in every row.

# %%
for dtype in lm.DTYPES:
    for size in ("small", "medium"):
        rows_of = {way: lm.passes(model_data, size, way, dtype).get("optimizer") for way in lm.WAYS}
        said = ", ".join(f"{way} {row['ms']:.1f}" for way, row in rows_of.items() if row)
        print(f"optimiser, {size}, {dtype}, ms: {said or lm.NOT_YET}")

# %% [markdown]
# In float32 it takes the same time whatever the attention. In bf16 one row of *medium* takes 1.4 times as long as the others, with the same kernels on the same weights. That is what *waiting* looks like. Python launches kernel after
# kernel. While kernels are long, it runs ahead and nobody notices. In bf16 they are short, Python is late, and a step takes as long as Python does.
#
# How much of a step is that? Record the whole step into one CUDA graph: forward, backward, optimiser. Then Python launches once, and the GPU never waits. From the same turns as above:

# %%
display(lm.graph_table(model_data))

# %% [markdown]
# The graph is the time of the kernels, with short gaps between them. What is more than that in the other column is waiting: the shorter the kernels, and the more Python has to do for each of them, the longer.
#
# Could it be the attention kernels after all? Count them, at a modest 200 TFLOP/s:

# %%
shape = SIZES["small"]
pairs = shape.depth * lm.BATCH * shape.heads * 1024**2 / 2  # causal: half
work = 3.5 * 4 * pairs * shape.head_dim  # the backward pass is 2.5 times the forward pass
print(f"attention in a step of the small model: {work / 1e12:.2f} TFLOP, {1e3 * work / 200e12:.1f} ms")
assert 1e3 * work / 200e12 < 2

# %% [markdown]
# Less than 2 ms; the end of this section measures it. So a faster kernel would change little here. What is left is Python: its operators, and Triton's launches, as in the white of section 5.
#
# How much it costs depends on the processor more than on anything else. In an earlier run four benches shared the host: there our step took 1.4 to 1.7 times as long as SDPA's, and the optimiser up to three times as long.

# %% [markdown]
# And before these tables were taken, most of our part of it was needless: an operator of `torch.library` can be traced and intercepted, and each call pays for that. Where nobody looks, the door (`flashlab.flash_attention`) now calls its functions plainly (`runtime/dispatch.py`): 0.13 ms instead of 0.43 for a forward call without the launch itself (`notes/phase_10_experiments.md`).

# %% [markdown]
# *What would you do?* Anything that launches less: longer texts, larger batches, CUDA graphs, `torch.compile`. What torch.compile does is recorded for two models: each attention plain and compiled, in turns in one run:

# %%
display(lm.compiled_table(model_data))
for size in SIZES:
    for column, words in (("ms", "launched by Python"), ("graph_ms", "as one CUDA graph")):
        if best := lm.quickest(model_data, size, column):
            name, how, took = best
            print(f"{size}, {words}: the fastest is {name}{', compiled' if how else ''}, {took:.1f} ms")

# %% [markdown]
# Launched by Python, *compiled eager* is ahead of *compiled flash*, with all its scores in memory; in a first run it was the fastest row of all. How can that be? `replaced` says that no fused attention was put in its place. But the compiler sees through
# eager attention: it fuses mask, scale and softmax, and launches what is left from a few lines of its own. Our attention is a closed operator to it, which is called as before, with all that the host does for it, in each layer and pass.

# %% [markdown]
# That is a mechanism, and no proof. The columns *its graph* are the test, where nobody waits for Python: there compiled eager is last of the three, and ours ahead of SDPA by 3 to 5 percent. So launches decided between these two, not kernels. (The compiler also about halves the graph's time: it fuses the small operations around attention.)
#
# And what would a missing warm-up have said?

# %%
display(lm.warm_up_table(model_data))

# %% [markdown]
# The first step of *flash* has a compiler in it: nvcc for phase 11's kernels, or Triton's. *Fused RoPE* came last, and found all of it done. A mean over five steps would make it look many times as slow as it is.

# %% [markdown]
# So much for launches. Without them, how much can a faster attention give to a step? It is only a part of it. Begin with SDPA and ours, which keep no scores in memory: then FLOPs are a first guess. How large a part of a block's?
#
# With width w, a block's four projections have $4 w^2$ weights, and SwiGLU about $8 w^2$. Each weight is one multiplication and one addition per token: together $24 w^2$ FLOPs. Attention has $4 N w$ per token,
# of which a causal mask leaves half:

# %%
for size, shape in SIZES.items():
    matrices = 2 * (shape.parameters() - shape.vocabulary * shape.width) / shape.depth
    shares = [2 * n * shape.width / (2 * n * shape.width + matrices) for n in (1024, 4096, 16384)]
    print(f"{size:6} attention's share of a block's FLOPs: "
          + ", ".join(f"{share:.0%} at N = {n}" for share, n in zip(shares, (1024, 4096, 16384))))

# %% [markdown]
# At N = 1024 not much, and of a whole step it is less: the matrix at the end and the optimiser come on top.
#
# *Amdahl's law*: a part takes the share s of the time, and gets f times as fast. The rest, 1 - s, still takes its time. So the whole gets $1/(1 - s + s/f)$ times as fast, and never more than $1/(1 - s)$.
#
# The s is that of the version you start from. Of eager's step about half was attention, or more: so this section began with a factor of up to 1.9. Of SDPA's it is less.

# %% [markdown]
# How much less can be measured. Leave attention out: its o is v, and its gradient goes to q, k and v as it is. No kernel runs, so no attention is faster. SDPA, ours and *none*, with RoPE apart in all, each step as one CUDA graph. SDPA's time less *none*'s is its attention's.
#
# *Predict:* from which length on does our attention make the step 5 percent faster?

# %%
display(lm.lengths_table(model_data))

# %% [markdown]
# From somewhere between 4096 and 16384 tokens on. At 1024 not even an attention for nothing would make it more than 5 to 6 percent faster; ours takes 2 of them (the same graphs above: 0 to 2). Yet at all lengths ours is at least 1.2 times as fast as SDPA's attention: the share decides.
#
# And the measured share is only 0.4 to 0.8 of the FLOPs' share: norms, RoPE, loss and optimiser take time with few FLOPs. (4 × 4096 and 1 × 16384 are as many tokens: so *none* takes as long.)
#
# Short texts want a faster *rest*; long texts want the kernels of this course.

# %% [markdown]
# ## 9 · The memory of training
#
# When the forward pass has ended, memory holds:
#
# | | numbers |
# |---|---|
# | weights | one each |
# | gradients | as many, from the second step on |
# | AdamW's averages | twice as many |
# | activations | what the forward pass keeps for the backward pass |
#
# `train_step` clears the old gradients *after* the forward pass; in the first step there are none.
#
# Only the activations depend on the text. Two parts of it grow with $N^2$, both of eager attention: P, with 4 bytes per pair for each head and text, and the mask, with 1 byte per pair. For one layer:

# %%
shape = SIZES["small"]
for kind in ("eager", "flash"):
    kept = memory.attention_bytes(replace(shape, attention=kind, fused_rope=kind == "flash"), 4, 1024)
    print(f"{kind}: {sum(kept.values()) / 2**20:.1f} MiB")
    for what, size in kept.items():
        print(f"    {size / 2**20:6.1f}  {what}")

# %% [markdown]
# *One layer of the small model, 4 texts of 1024 tokens, float32.* Is the formula right? PyTorch shows what it keeps. A small model, forward, counted piece by piece:

# %%
for kind, fused in (("eager", False), ("flash", False), ("flash", True)):
    model = build(attention=kind, fused_rope=fused)
    pieces = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    counted = memory.kept_bytes(lambda: model(*pieces), model)
    said = memory.training_memory(model.config, 2, 64, fused_norm=ON_GPU).activations
    assert counted == said
    print(f"{kind}{', fused RoPE' if fused else ''}: to the byte as the formula says")

# %% [markdown]
# So the formula may be trusted where nothing can be run. And what else do activations consist of? The whole list of the small model, which has 12 blocks:

# %%
def account(shape, batch, seq_len):
    """MiB of activations, by where they are."""
    block, head = (by(shape, batch, seq_len) for by in (memory.block_bytes, memory.head_bytes))
    kinds = {"attention": "attention: ", "SwiGLU": "SwiGLU: ", "the norms": "the "}
    found = {f"{kind}, {shape.depth} times":
             shape.depth * sum(n for what, n in block.items() if what.startswith(of))
             for kind, of in kinds.items()}
    logs = head["the logarithm of each probability"]
    found |= {"log-probabilities": logs, "the rest at the end": sum(head.values()) - logs}
    assert sum(found.values()) == memory.training_memory(shape, batch, seq_len).activations
    return {what: n / 2**20 for what, n in found.items()}

whole_list = {kind: account(replace(shape, attention=kind, fused_rope=kind == "flash"), 4, 1024)
              for kind in ("eager", "flash")}
lines = [[what, *(f"{found[what]:.1f}" for found in whole_list.values())] for what in whole_list["eager"]]
lines.append(["together", *(f"{sum(found.values()):.1f}" for found in whole_list.values())])
show.table(lines, ["MiB", *whole_list], align="lrr")

# %% [markdown]
# The sum is the small model's orange bar below. Without P the largest part is SwiGLU: its four wide rows per token. The log-probabilities are one number for each position and each of the 50257 tokens of the vocabulary.
#
# All sizes, with 4 texts of 1024 tokens:

# %%
def parts(shape, batch, seq_len):
    return [n / 2**30 for n in memory.training_memory(shape, batch, seq_len)]

PARTS = {"weights": "blue", "gradients": "sky", "AdamW": "green", "activations": "orange"}
bars = {}
for size, shape in SIZES.items():
    for kind in ("eager", "flash"):
        found = parts(replace(shape, attention=kind, fused_rope=kind == "flash"), 4, 1024)
        assert found[3] == max(found)  # largest in every bar
        bars[f"{size}, {kind}"] = [("", n, hue) for n, hue in zip(found, PARTS.values())]
fig, ax = plt.subplots(figsize=(8.6, 4.2))
curves.stacked(ax, bars, xlabel="GiB, by formula", title="One training step in float32, 4 × 1024 tokens")
ax.legend([Patch(color=show.COLORS[hue]) for hue in PARTS.values()], list(PARTS))
plt.show()

# %% [markdown]
# Even at N = 1024 the activations are the largest part, in every bar. Fused attention makes them smaller. Weights, gradients and averages do not care about attention.
#
# And with a longer text? Double N as long as the formula stays below the 141 GB of an H200:

# %%
def longest(shape, limit=141e9):
    """The largest power of two that fits, and bytes there; one text, in float32."""
    n = 1
    while memory.training_memory(shape, 1, 2 * n).total <= limit:
        n *= 2
    return n

rows = [[size, *(longest(replace(shape, attention=kind)) for kind in ("eager", "flash"))]
        for size, shape in SIZES.items()]
show.table(rows, ["size", "eager fits up to N =", "flash"])
assert all(flash >= 4 * eager for _, eager, flash in rows)

# %% [markdown]
# A ceiling, not a promise: what one operation needs for a moment comes on top. Measured, with a small model that reads bytes, 4 texts, in bf16; the length is doubled until a step no longer fits:

# %%
display(lm.limit_table(model_data))
out = lm.runs_out(model_data)
print({kind: f"out of memory at {n}" if n else "not reached" for kind, n in out.items()} or lm.NOT_YET)

# %% [markdown]
# On the H200 both fused attentions train on texts 16 times as long as eager's, and at every length they need the same to a tenth of a GiB: they keep the same things. Their memory doubles with N. Eager's comes
# near to four times.

# %% [markdown]
# ### A step, seen from its memory
#
# The profiler notes every allocation and every release. Their running sum is a curve: it rises in the forward pass, layer by layer, and falls in the backward pass. Live, a small model with N =
# 256:

# %%
def memory_curve(kind, seq_len=256):
    shape = replace(SMALL_MODEL, attention=kind, depth=4, positions=seq_len)
    torch.manual_seed(0)
    model = LanguageModel(shape).to(DEVICE)
    optimizer = make_optimizer(model)
    text = torch.randint(BYTES, (2, seq_len + 1), generator=generator).to(DEVICE)
    found = profiled(lambda: train_step(model, optimizer, text[:, :-1], text[:, 1:]), tries=1)
    path = folder / f"memory_{kind}.json"
    found.export_chrome_trace(str(path))
    return profiles.allocated(json.loads(path.read_text()), device=ON_GPU)

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots(figsize=(7.6, 3.2))
for kind in ("eager", "flash"):
    times, held = memory_curve(kind)
    order = [100 * i / len(held) for i in range(len(held))]
    ax.step(order, [size / 2**20 for size in held], color=show.COLORS[WAYS[kind]], where="post", label=kind)
ax.set(xlabel="allocations and releases, in order (%)", ylabel="MiB of this step",
       title="4 layers, 2 × 256 tokens")
ax.legend()
plt.show()

# %% [markdown]
# *Four stairs up, four down. Each stair of the eager curve has P in it. A spike is what one operation needs for a moment. The flat half is clipping and the optimiser, which keep little.*
#
# The small model on a GPU, where it is recorded. The floor is the weights and AdamW's averages. While allocations are noted, a step takes longer than in section 8, and not by the same factor for each; so each curve has its own
# step as its axis, from 0 to 100 %.

# %%
series = lm.memory(model_data)
print("curves recorded:", len(series))
if series:
    fig, ax = plt.subplots(figsize=(8.0, 3.4))
    lines = [(way, [100 * t / found.ms[-1] for t in found.ms], [mib / 1024 for mib in found.mib],
              WAYS[way], "-") for way, found in series.items()]
    curves.curves(ax, lines, xlabel="a step (%)", ylabel="GiB allocated", ylim=(0, None),
                  title=f"One step of the small model, bf16, {model_data['machine']['gpu']}")
    plt.show()

# %% [markdown]
# *Twelve stairs up, twelve down. Those of eager are more than twice as high.* The spike in the middle is the end of the model, where each position has a number for each of 50257 tokens. It has nothing to do with attention.

# %% [markdown]
# ## 10 · It trains
#
# The text is the words of lectures 0 to 9, as bytes. A loss is counted in *nats*: natural logarithms, as in $\ln 256 = 5.55$ above. Does the model learn the same with our kernels?
#
# Not bit for bit. Two right attentions round in different places, and training carries the differences on. So you need a yardstick for *the same within noise*. Take eager twice, and change
# the second one's first weights by less than a rounding. How far apart those two curves come, their largest difference at any step, is what rounding alone can do.

# %%
RUNS = {"eager": ("eager", 0.0), "ours": ("flash", 0.0), "sdpa": ("sdpa", 0.0),
        "eager, other roundings": ("eager", torch.finfo(torch.float32).eps)}
curve = {}
for name, (kind, jitter) in RUNS.items():
    shape = replace(SMALL_MODEL, attention=kind, fused_rope=kind == "flash")
    _, curve[name] = fit(shape, steps=10, batch=2, seq_len=24, lr=1e-2, jitter=jitter)
apart = {name: distance(curve["eager"], found) for name, found in curve.items() if name != "eager"}
noise = max(apart["eager, other roundings"], torch.finfo(torch.float32).eps * curve["eager"][0])
assert all(found[-1] < found[0] - 0.3 for found in curve.values())
assert noise < 1e-4 and apart["ours"] <= 8 * noise and apart["sdpa"] <= 8 * noise
print("10 steps: every loss falls by more than 0.3")
print("ours and sdpa: at most 8 times as far from eager as other roundings are")

# %% [markdown]
# Why 8 and not 1? An attention rounds several times in every step, and the yardstick's weights are changed once. Would a wrong attention be noticed? With a scale that is wrong by 10 % it is:

# %%
def slightly_wrong(q, k, v, *, causal=True):
    return eager_attention(1.1 * q, k, v, causal=causal)


layer_module.ATTENTIONS["wrong"] = slightly_wrong
_, wrong = fit(replace(SMALL_MODEL, attention="wrong"), steps=10, batch=2, seq_len=24, lr=1e-2)
del layer_module.ATTENTIONS["wrong"]
assert distance(curve["eager"], wrong) > 8 * noise and wrong[-1] < wrong[0] - 0.3
print("a scale that is wrong by 10 % is outside of the noise, and its loss falls too")

# %% [markdown]
# The second half of that line matters more. *A wrong attention trains as well*, as the left picture shows. So a loss that falls proves nothing, and two curves that look the same in a plot prove little. The distance
# says it, and gradients that are checked (phase 5) say it better.

# %% tags=["nbval-ignore-output"]
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.3))
HUES = {"eager": ("grey", "-"), "ours": ("blue", "o--"), "sdpa": ("green", "s:"),
        "eager, other roundings": ("black", "^-"), "scale 10 % off": ("red", "v-")}
drawn = curve | {"scale 10 % off": wrong}
gaps_of = {name: [max(abs(a - b), 1e-8) for a, b in zip(drawn["eager"], found)]
           for name, found in drawn.items()}
lines = [(name, range(1, 11), drawn[name], *HUES[name]) for name in ("ours", "scale 10 % off")]
left.plot(range(1, 11), drawn["eager"], color=show.COLORS["light"], linewidth=12, label="eager")
curves.curves(left, lines[:1], size=9)
curves.curves(left, lines[1:], size=4, xlabel="step", ylabel="nats per byte", title="Loss: 3 curves, 1 line")
lines = [(name, range(1, 11), gaps, *HUES[name]) for name, gaps in gaps_of.items() if name != "eager"]
curves.curves(right, lines[:1], size=9)  # ours below the others: large, so that it is seen around them
curves.curves(right, lines[1:], log="y", size=4, xlabel="step", title="Distance from eager",
              ylim=(6e-9, 9e-2))
plt.show()

# %% [markdown]
# *Left: the losses, each drawn over the wider one before it. Right: how far each is from eager's, on a logarithmic axis; what is equal to the last bit is drawn at $10^{-8}$. Ours is drawn large, below the others.* Ten steps of a tiny model are a check, not an experiment. The recorded run is longer: 6 layers of width 384,
# 300 steps of 16 texts of 256 bytes.

# %%
for dtype in ("float32", "bfloat16"):
    found = lm.losses(model_data, dtype)
    distances = ", ".join(f"{name} {gap:.2g}" for name, gap in lm.apart(model_data, dtype).items())
    print(f"{dtype}: distance from eager, nats per byte:", distances or lm.NOT_YET)
    if found:
        fig, ax = plt.subplots(figsize=(7.6, 3.2))
        lines = [(name, range(1, len(loss) + 1), loss, (WAYS | {lm.NOISE: "black"})[name], form)
                 for (name, loss), form in zip(found.items(), ("-", "--", ":"))]
        curves.curves(ax, lines, xlabel="step", ylabel="nats per byte",
                      title=f"{dtype}: learning the lectures' text, {model_data['machine']['gpu']}")
        plt.show()

# %% [markdown]
# On the H200 ours ends 1.4 times as far from eager as other roundings do, in float32, and 0.7 times in bf16: equal within noise. After 300 steps, noise is 0.02 nats even in float32, over a hundred times what
# it was after the ten above. A rounding in bf16 is 65 536 times as large. So its yardstick sees less: a limit of this test, not a property of an attention.

# %% [markdown]
# ## 11 · The roofline of the whole course
#
# Phase 1 drew a roofline from datasheets. Now there are measured ceilings: how many MMAs and multiply-adds per clock the units really do, and the most bytes per second that a recorded kernel moved.
#
# A point is a kernel: its FLOPs per byte that *has to* move, and the TFLOP/s that it reached.

# %%
roofs = {run["machine"]["gpu"]: roofline.ceilings(run) for run in roofline.recorded()}
points = {run["machine"]["gpu"]: roofline.points(run) for run in roofline.recorded()}
for gpu, found in roofs.items():
    said = ", ".join(f"{unit} {top:.0f}{' (documented)' if unit in found.not_measured else ''}"
                     for unit, top in found.units.items())
    print(f"{gpu}: memory {found.memory:.2f} TB/s; TFLOP/s: {said}; {len(points[gpu])} kernels")

# %% [markdown]
# `mma.sync` and `wgmma` are two ways into the tensor cores: the first is an instruction of one warp, the second, since Hopper, of four warps at once.
#
# Which ceiling counts for a kernel? That of the unit that multiplies for it, or the memory's slope, if that is lower. Triton emits `wgmma` on Hopper, so its kernels have the higher roof. For `wgmma` only the
# documented rate is known here: 4096 FLOPs per clock and multiprocessor.
#
# All roofs are of one clock, the highest (1980 MHz; the datasheet's 989 TFLOP/s are that rate at 1830). Under such kernels it falls: lecture 11c, section 11.

# %%
GROUPS = {"PyTorch and phase 1": ((1,), "grey", "s"), "Triton, phases 3 and 4": ((3, 4), "blue", "D"),
          "scalar CUDA, phase 6": ((6,), "purple", "^"), "tensor cores, phases 7 and 8": ((7, 8), "sky", "o"),
          "phase 9": ((9,), "blue", "o"), "Hopper, phase 11": ((11,), "orange", "P"),
          "peers": ((None,), "black", "x")}
NAMED = ("naive PyTorch", "minimal", "Triton", "Gluon", "p6_1", "p6_6", "p7", "p8_3", "p8_4", "p8_6",
         "p9_flash", "p11_1_", "p11_3", "p11_flash", "FlashAttention-2", "FlashAttention-4", "scheme A")
for gpu, found in roofs.items():
    groups = {}
    for label, (phases, hue, marker) in GROUPS.items():
        inside = [p for p in points[gpu] if p.phase in phases]
        groups[label] = ([p.intensity for p in inside], [p.tflops for p in inside], hue, marker)
    named = [p for p in points[gpu] if p.name.startswith(NAMED)]
    names = {p.name.partition(",")[0]: (p.intensity, p.tflops) for p in named}
    tops = {u + ", documented" * (u in found.not_measured): top for u, top in found.units.items()}
    fig, ax = plt.subplots(figsize=(8.6, 5.4))
    curves.reached(ax, found.memory, tops, groups, names, ylim=(5, 1600),
                   title=f"The whole course on an {gpu}")
    plt.show()

# %% [markdown]
# *Both axes are logarithmic. Fused kernels of one shape stand above each other, because they have to move the same bytes. Naive attention stands far to the left, under the slope.*
#
# The climb from `p7_naive` to `p9_flash` is at one intensity, because x is the bytes that *have to* move. What each kernel really moves is not in this picture. It shows how far each is from its roof, and not
# why.

# %%
for gpu, found in roofs.items():
    rows = []
    for p in points[gpu]:
        limit = p.unit if found.units[p.unit] <= p.intensity * found.memory else "memory"
        phase, shape = "peer" if p.phase is None else p.phase, " × ".join(map(str, p.shape))
        rows.append([phase, p.name, shape, p.dtype, f"{p.tflops:.0f}", limit, f"{p.share(found):.0%}"])
    columns = ["phase", "kernel", "B × H × N × D", "", "TFLOP/s", "its ceiling", "of it"]
    show.table(rows, columns, align="rlllrlr")

# %% [markdown]
# Read it with care. Rows of another shape or dtype are another exercise: compare those of $4 \times 16 \times 4096 \times 128$.
#
# - The last step of the CUDA series reaches more than half of what `mma.sync` can do, FlashAttention-2 about half.
# - Through `wgmma` cuDNN, FlashAttention-4, the Gluon kernel and phase 11's reach more TFLOP/s. Their roof is higher, too.
#   (Phase 11 and FlashAttention-4 were measured in another run than cuDNN and Gluon, on a GPU whose clock fell more often.)
# - Nobody is near 100 %. A part of what is missing is the clock. Phase 9 said what else is in between: exponentials, and waiting for one's own results.

# %% [markdown]
# In two numbers:

# %%
for gpu in roofs:
    best = max((p for p in points[gpu] if p.phase is not None), key=lambda p: p.tflops)
    first = next(p for p in points[gpu] if p.name == "p7_naive")
    last = next(p for p in points[gpu] if p.name == "p9_flash")
    print(f"{gpu}: p7_naive to p9_flash is {last.tflops / first.tflops:.1f} times; "
          f"the fastest of the course: {best.name}, {best.tflops:.0f} TFLOP/s")
    assert 0.5 < last.share(roofs[gpu]) < 1 and last.tflops > 10 * first.tflops
    assert best.share(roofs[gpu]) < 0.8

# %% [markdown]
# ## Appendix A · Attention alone
#
# *The two appendices are for reference: read on at the summary, and come back when you need a figure.*
#
# Without a layer around it, one thing is left to ask: what does each attention hold between forward and backward? By phase 5's formula, for $B$ heads and $e$ bytes per number:
#
# $$\text{eager: } B\,(3ND + N^2)\,e, \qquad \text{ours: } B\,(4ND\,e + 4N).$$
#
# Eager's backward pass reads q, k, v and P, and ours q, k, v, o and one number per row.

# %%
for n in (64, 128):
    q, k, v, _ = attention.inputs({"d_model": 16, "seq_len": n, "dtype": "float32"})
    held = {name: memory.kept_bytes(attention.way_of(name, q, k, v)) for name in ("eager", "ours")}
    assert held["eager"] == attention.BATCH * (3 * n * 16 + n * n) * 4
    assert held["ours"] == attention.BATCH * (4 * n * 16 * 4 + 4 * n)
    print(f"N = {n}: eager saves {held['eager']} bytes, ours {held['ours']}: as predicted")

# %% [markdown]
# A published table has the memory before the backward pass, on a machine that is not named. Can the formula explain it? Eager holds q, k, v and P, and o is in memory too, because somebody asked for it: so 4ND. The table's batch is not told either; take
# 8, and MB as $10^6$ bytes:

# %%
told = [r for r in published.load("attention_memory") if r["mem_before_mb"] != "OOM"]
rest = []
for r in told:
    n, d = r["seq_len"], r["d_model"]
    rest.append(r["mem_before_mb"] - 8 * (4 * n * d + n * n) * 4 / 1e6)
print(f"{len(told)} rows: table minus formula is {min(rest):.1f} to {max(rest):.1f} MB")
assert max(rest) - min(rest) < 2

# %% [markdown]
# Sixteen rows, from 20 to 2300 MB, and the difference is nearly the same in all of them: between 16.7 and 18.3 MB, about 17. So the batch is 8, the numbers are float32, and P is kept exactly once. What the constant is, the
# table does not say; a library's workspace would fit.

# %% [markdown]
# It also says out of memory at N = 16384, where P alone has 8.6 GB. How many such matrices are there at once? In this course's eager code two: Python frees the raw scores when they are divided. If a name keeps
# them, there are three: the scores, the scaled scores, P. Counted at N = 512:

# %%
def with_names(q, k, v):
    raw = q @ k.mT
    scaled = raw / math.sqrt(q.shape[-1])
    return torch.softmax(scaled, dim=-1) @ v

q, k, v = (torch.randn(1, 8, 512, 16, device=DEVICE, requires_grad=True) for _ in range(3))
def without_names(q, k, v):
    return eager_attention(q, k, v, causal=False)

for name, way, many in (("this course", without_names, 2), ("with names", with_names, 3)):
    profiled(lambda: way(q, k, v), tries=1).export_chrome_trace(str(folder / "squares.json"))
    held = profiles.allocated(json.loads((folder / "squares.json").read_text()), device=ON_GPU)[1]
    assert many <= max(held) / (8 * 512**2 * 4) < many + 0.2
    print(f"{name}: {many} matrices at once")

# %% [markdown]
# In bytes, at batch 8 in float32:

# %%
sizes = {n: 8 * n * n * 4 / 1e9 for n in (8192, 16384, 32768)}
print({n: f"P {gb:.1f} GB, two {2 * gb:.1f}, three {3 * gb:.1f}" for n, gb in sizes.items()})
attention_runs = attention.recorded()
print("runs of attention alone recorded:", len(attention_runs), "" if attention_runs else f"({lm.NOT_YET})")

# %% [markdown]
# What `flashlab bench attention` measured: batch 8, one head; eager, eager through torch.compile, and ours. Higher is slower. Where a line ends, the table below says what came next: out of memory, or nothing,
# if it was not measured.
#
# From N = 4096 on the times have Python's launches in them, because a CUDA graph would hold all scores at once.

# %%
def over_lengths(run, dtype, d, which, column="ms", unit=1.0):
    """By name: lengths, and a column of the rows that have it."""
    found = {}
    for r in run["rows"]:
        if (r.get("dtype"), r.get("d_model"), r.get("pass")) == (dtype, d, which) and column in r:
            lengths, values = found.setdefault(r["name"], ([], []))
            lengths.append(r["seq_len"])
            values.append(r[column] * unit)
    return found

def measured(run):
    """Which dtypes a run has."""
    return [dtype for dtype in attention.DTYPES if any(r["dtype"] == dtype for r in run["rows"])]


for run in attention_runs:
    plots = {f"{dtype}, {which}, D = {d}": over_lengths(run, dtype, d, which)
             for dtype in measured(run) for which in attention.PASSES for d in (16, 64, 128)}
    panels(plots, log="xy", ylabel="ms", title=f"Attention alone, {run['machine']['gpu']}")
    plt.show()
print("measured:", [measured(run) for run in attention_runs] or lm.NOT_YET)

# %% [markdown]
# In numbers, at the longest N that has all four D:

# %%
for run in attention_runs:
    for dtype in measured(run):
        for which in attention.PASSES:
            took = {d: {name: dict(zip(*found)) for name, found in over_lengths(run, dtype, d, which).items()}
                    for d in attention.D_MODELS}
            both = [set(by_name.get("eager", ())) & set(by_name.get("ours", ())) for by_name in took.values()]
            longest_n = max(set.intersection(*both), default=None)
            said = {d: round(took[d]["eager"][longest_n] / took[d]["ours"][longest_n], 2)
                    for d in took if longest_n}
            print(f"{dtype}, {which}, N = {longest_n}: times as fast as eager, by D: {said or lm.NOT_YET}")

# %% [markdown]
# At D = 16 in bfloat16 the launches show: from N = 2048 to 4096 the work grows 4 times, our time 9 times.
#
# In float32 ours wins where rows are short, and **loses at D = 128**, in the backward pass by a factor of two. It was three, before its tiles for D = 128 were timed: the table of tiles had *compiled* as their source. What is left has a known part. Ours multiplies each
# pair three times in TF32, to be as exact as float32 (phase 4).

# %% [markdown]
# In bfloat16 *compiled eager* is ahead of ours at D = 64 and 128 from N = 2048 on: from 8192 on by 1.06 to 1.5 times, before that by up to 3.6 times. At D = 16 and 32 it is ahead at some lengths from 1024 to 8192.
# The record says that torch.compile put a fused kernel of PyTorch's in its place.

# %% [markdown]
# And what autograd saves between the two passes, the subject of the formulas above:

# %%
for run in attention_runs:
    plots = {f"{dtype}, D = {d}": over_lengths(run, dtype, d, "forward", "saved_bytes", 2**-20)
             for dtype in measured(run) for d in (16, 64, 128)}
    panels(plots, log="xy", ylabel="MiB", title=f"Saved for the backward pass, {run['machine']['gpu']}")
    plt.show()
if attention_runs:
    display(*(attention.table(run) for run in attention_runs))
else:
    print(lm.NOT_YET)

# %% [markdown]
# ## Appendix B · Every published table again
#
# Six tables of earlier courses ship with this one, as they were printed: `flashlab/bench/published/`. For each of their figures a rule finds what our records have of the same function on the same
# shape. How many are answered, how many by a number? The last column says where it is not the same work.

# %%
display(counterparts.overview())

# %% [markdown]
# A figure from another GPU is not a competition. It tells two things: whether the *pattern* is the same (what is faster than what), and whether anything was measured wrongly, there or here.
#
# So for each table: the ratio theirs / ours as a geometric mean over its rows, for each of its columns, and all figures in a fold. *Above 1: less time here.*

# %%
def compared(name, kind_of):
    """By kind of figure: the machines here, and theirs / ours of the rows where both took time."""
    found = {}
    for figure, ours in counterparts.counterparts(name):
        gpus, ratios = found.setdefault(kind_of(figure.label), (set(), []))
        gpus |= {ours.gpu} if ours else set()
        theirs = ms(figure.value) if re.fullmatch(r"[\d.]+(us|ms|s)", str(figure.value)) else figure.value
        if ours and all(isinstance(value, (int, float)) and value > 0 for value in (theirs, ours.value)):
            ratios.append(theirs / ours.value)
    return found

# %% [markdown]
# A label begins with the shape. What comes after it is the kind.

# %%
SHAPE_OF = r"^(\d+x\S+|N \d+ D \d+|D \d+ N \d+|forward_\w+ \w+) "

def summary(name, there, kind_of=lambda label: re.sub(SHAPE_OF, "", label), fold=False):
    """The table of `compared`, in a fold if asked; every figure of the published table in a fold."""
    rows = []
    for kind, (gpus, ratios) in compared(name, kind_of).items():
        mean = f"{math.exp(statistics.mean(map(math.log, ratios))):.2f}" if ratios else lm.NOT_YET
        span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        rows.append([kind, len(ratios), mean, span, ", ".join(sorted(gpus))])
    columns = [f"{name}, {there}", "rows", "theirs / ours", "from, to", "ours on"]
    table = Table.of(rows, columns, align="lrrrl")
    if fold:
        measured = sum(row[1] for row in rows)
        show.folded(table, f"{name}: " + (f"{measured} rows compared" if measured else lm.NOT_YET))
    else:
        display(table)
    show.folded(counterparts.beside(name), "every figure, theirs beside ours")
    return {row[0]: float(row[2]) for row in rows if row[1]}

# %% [markdown]
# ### 36 shapes, five kernels: `mma_stages_ada`
#
# Unfused PyTorch, three steps of a tensor-core kernel, and FlashAttention-2, in fp16. Their steps stand beside ours that have the same ideas: `p7_naive`, and our kernel with one and two stages.

# %%
means = summary("mma_stages_ada", "an Ada GPU")
times = {}  # by shape and kernel: theirs, ours
for theirs, ours in counterparts.counterparts("mma_stages_ada"):
    if ours and isinstance(ours.value, float):
        times[tuple(theirs.label.split())] = theirs.value, ours.value
for peer in ("naive_unfused", "mma_stage2"):
    shapes = {shape for shape, kernel in times if kernel == peer and (shape, "flash_official") in times}
    there, here = (sum(times[shape, "flash_official"][i] > times[shape, peer][i] for shape in shapes)
                   for i in (0, 1))
    print(f"FlashAttention-2 slower than {peer}: there in {there}, here in {here} of {len(shapes)} shapes")

# %% [markdown]
# What is to be seen: at the smallest shapes the fused kernel is slower than the unfused one there, and never here. Their fused times hardly grow with the work: at N = 1024 and
# D = 64 0.114 ms for one head, 0.139 ms for eight. That looks like the cost of a launch, which our times do not have; nothing here isolates it.
#
# The first values of our outputs are in the fold, so that agreement can be seen: five kernels, which differ in the fourth decimal at most.

# %% [markdown]
# ### FlashAttention-1 in float32, FlashAttention-2 in fp16: `fa1_f32_fa2_mma_ada`
#
# Two hand-written kernels, each beside unfused PyTorch in the same precision. The line below the table has the evidence: on their own machine their float32 kernel was much slower than PyTorch. Phase 6 says why such
# a loop order is slow.

# %%
means = summary("fa1_f32_fa2_mma_ada", "an Ada GPU")
table = {tuple(r.values())[:-1]: r["ms"] for r in published.load("fa1_f32_fa2_mma_ada")}
slower = [table[(*key[:-1], "fa1_f32")] / ms for key, ms in table.items() if key[-1] == "torch_naive_f32"]
print(f"there: fa1_f32 takes {min(slower):.0f} to {max(slower):.0f} times as long as torch_naive_f32")

# %% [markdown]
# ### One head, causal, over the length: `triton_vs_torch`
#
# Two things before you read it. Their *triton backward* is no Triton: only their forward pass is, the backward pass is compiled PyTorch (phase 5). And its short rows time launches, while ours are
# kernels alone. So at short lengths a large ratio is mostly launches. At the largest length it is not.

# %%
means = summary("triton_vs_torch", "a machine without a name")
pairs = [(theirs, ours) for theirs, ours in counterparts.counterparts("triton_vs_torch") if ours]
told = [(theirs.label, theirs.value / ours.value) for theirs, ours in pairs
        if all(isinstance(value, (int, float)) for value in (theirs.value, ours.value))]
long = [ratio for label, ratio in told if re.match("N 32768 .*bf16 triton backward", label)]
if long:
    print(f"bf16 triton backward at N = 32768: {math.exp(statistics.mean(map(math.log, long))):.0f}")
for kind in means:
    ratios = [ratio for label, ratio in told if label.endswith(" " + kind)]
    below = sum(ratio < 1 for ratio in ratios)
    if below:
        print(f"slower here, {kind}: {below} of {len(ratios)} rows, down to {min(ratios):.2f}")
print(f"slower here, in all: {sum(ratio < 1 for _, ratio in told)} of {len(told)} rows")

# %% [markdown]
# The more interesting direction is the last one: what is *slower* here, on a larger GPU? A mean above 1 can hide such rows, so they are counted.
#
# A row that is slower here may have two reasons. In float32, how a kernel multiplies is a choice: exactly, as three products in TF32, or as one, which is fast and loses digits.
# Which one theirs takes, the table does not say. And one short head gives a large GPU little to do. Neither reason has been isolated.

# %% [markdown]
# ### Eager attention alone: `attention_memory`
#
# Appendix A explained its memory by a formula. Its figures, and ours where they are measured, are in the folds. What ran out of memory there at N = 16384 runs here where it is measured.

# %%
means = summary("attention_memory", "a machine without a name", fold=True)

# %% [markdown]
# ### Models and the layer: `lm_forward_backward`, `gqa_layer_profile`
#
# The first does not tell its batch, length and vocabulary, so its ratios compare nothing but the order of magnitude. But one pattern can be compared: here a forward pass takes as long with a backward
# pass behind it as without, and the backward pass is the longer one. So the two oddities of section 7 are no property of such a model.
#
# The second is the profile of section 2. Both are in folds. A kernel of another GPU has another name; where our profile answers with other kernels, it says so.

# %%
means = summary("lm_forward_backward", "a machine without a name", fold=True)
means = summary("gqa_layer_profile", "an Ampere GPU", lambda label: label.partition(" ")[0], fold=True)

# %% [markdown]
# ## Summary, and what is left to explore
#
# - In a profile add up *self*, over the kernels only.
# - The same GB/s in every line means memory. Then only bytes that do not move help.
# - When the slowest part is gone, the next one is on top. RoPE was about 3 % and became 24 %.
# - A speedup has a denominator. Name it, and show the best peer beside it.
# - Time without the first calls, with waiting, one part at a time.
# - A step may wait for Python. Then no kernel helps.
# - Training memory is a formula, to the byte. P grows with $N^2$.
# - A loss that falls proves nothing. Measure the noise first.

# %% [markdown]
# **What you can now do:** take any model, find the part that is worth a kernel, say beforehand what it can gain, and afterwards whether it did.
#
# **Two questions to take along.** Your layer's profile shows three operations of equal length, and one of them only divides by a constant: what do you do first? A colleague reports that a kernel makes a
# model 8 times as fast: which two numbers do you ask for?

# %% [markdown]
# Left to explore: fusing the norm with the projection that follows; activation checkpointing, which pays for memory with time; the same profile on your own GPU (`flashlab bench layer`,
# `flashlab bench lm`). Phase 11 goes to Hopper's own instructions.

# %% [markdown]
# ## References
#
# - Vaswani and others: *Attention Is All You Need* (2017), arXiv 1706.03762.
# - Su, Lu, Pan and others: *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021), arXiv 2104.09864.
# - Ainslie and others: *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints* (2023), arXiv 2305.13245.
# - Radford and others: *Language Models are Unsupervised Multitask Learners* (2019): the sizes; Zhang, Sennrich: *Root Mean Square Layer Normalization* (2019), arXiv 1910.07467;
#   Shazeer: *GLU Variants Improve Transformer* (2020), arXiv 2002.05202; Touvron and others: *LLaMA* (2023), arXiv 2302.13971.
# - Rajbhandari and others: *ZeRO* (2020), arXiv 1910.02054, and Korthikanti and others: *Reducing Activation Recomputation in Large Transformer Models* (2022), arXiv
#   2205.05198: the memory of training.
# - Loshchilov, Hutter: *Decoupled Weight Decay Regularization* (2019), arXiv 1711.05101.
# - Williams, Waterman, Patterson: *Roofline: An Insightful Visual Performance Model for Multicore Architectures* (2009), Communications of the ACM 52(4).
# - Amdahl: *Validity of the single processor approach to achieving large scale computing capabilities* (1967), AFIPS 30.
# - PyTorch documentation: `torch.profiler`; *Understanding CUDA Memory Usage*; `torch.autograd.graph.saved_tensors_hooks`.
# - Google: *Trace Event Format* (the JSON of a Chrome trace); *Perfetto*, ui.perfetto.dev.
# - The published tables: `src/flashlab/bench/published/README.md` says what each of them was, and where.
