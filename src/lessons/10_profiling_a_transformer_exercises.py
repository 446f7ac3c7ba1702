# %% [markdown]
# # Phase 10 · Profiling a transformer: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong. `hint("10.1")` gives the next hint, `progress()` shows where you are.
#
# None needs a GPU: profiles are made on the CPU, Triton kernels are interpreted, and the exercises about timing use a GPU with a
# simulated clock.

# %%
import os
os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own messages: off, before torch is imported

import math
import statistics

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from flashlab import flash_attention
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_10_trace import OPTIONAL, trace
from flashlab.exercises.simulated_gpu import SimulatedGpu
from flashlab.figures import profiles
from flashlab.models.layer import RotaryAttention
from flashlab.models.rope import fused_rope, rope, rope_table

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 10.1
#
# A profile has a row for each operation, but none for rotary embedding: that is many small ones. So sort the operations into parts, add
# up each part, and name the longest.
#
# A row of `rows` has four fields that you need, times in microseconds:
#
# - `row.key`, the operation's name, for instance `"aten::bmm"`;
# - `row.count`, how often it was called;
# - `row.self_cpu_time_total`, the time of all its calls, without the operations that it called itself;
# - `row.cpu_time_total`, the same with them. `aten::matmul` calls `aten::bmm`: this time of `bmm` is in both rows.
#
# `parts` is for instance `{"aten::bmm": "products", "aten::_softmax": "softmax"}`. Operations that it does not have are the part `"other"`.
# Return the part with the most time of its own, its share of the whole profile's time (of all self times, 0 to 1), and how many
# calls it has.
#
# The next cell profiles the original layer, on this machine.

# %% tags=["nbval-ignore-output"]
torch.set_num_threads(1)  # so that no operation's time has in it that threads wait for each other
layer, (cos, sin) = RotaryAttention("eager"), rope_table(256, 32)
q, k, v = (torch.randn(1, heads, 256, 32) for heads in (8, 2, 2))
layer(q, k, v, cos, sin)  # a first call, which is not looked at
with profile(activities=[ProfilerActivity.CPU]) as seen:
    layer(q, k, v, cos, sin)
print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=24))

# %% [markdown]
# ## 10.2
#
# Attention takes the share `attention` of the time of an attention layer, from 0 to 1. The attention layers together take the share
# `layers` of a training step. Now attention alone becomes `faster` times faster, and nothing else changes.
#
# Return three factors: how much faster the layer becomes, how much faster the step becomes, and the limit of the step's factor, however
# fast attention may get. The limit is `math.inf` where attention is the whole step.

# %% [markdown]
# ## 10.3
#
# A kernel that is used once is not worth compiling. So `first_cost` tells, for each function, how many milliseconds its first `warmup` calls
# take longer, all together, than as many usual calls. Its table looks sensible, until somebody asks for fewer `rounds`: then the same first
# calls cost less. Find the mistake and repair it.
#
# `gpu` is simulated: `gpu.clock()` reads the CPU's clock in milliseconds, `gpu.synchronize()` waits for the GPU, and a call such as
# `runs["flash"]()` launches kernels. You may try it:
#
#     gpu = SimulatedGpu()
#     a = gpu.program("a", kernel_ms=2.0, first_calls_ms=(300.0, 80.0))
#     first_cost({"a": a}, gpu)
#
# `first_calls_ms` are the milliseconds that its first calls take longer: a kernel is compiled, then a graph is recorded. After `warmup` calls
# every call is a usual one. Each call is timed alone.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_10: first_cost

# %% [markdown]
# ## 10.4
#
# Another timing function, on such a simulated GPU. It waits at both ends, as the lecture does, and for a step of a model it is right. But somebody
# chose between two kernels of 0.02 and 0.016 ms by it. It says 0.025 and 0.021 ms; a model that calls the one a thousand times, and waits once, takes
# 20 ms for it, and 16 for the other. Find out what is timed with the kernel, and repair it.
#
# Wanted is what a call takes in a long row of calls, to 2 %, for kernels from 0.01 ms on and also if there are few `rounds`. A call that launches many
# very short kernels takes as long as its launches then. One launch takes longer on some CPUs than on others.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_10: milliseconds

# %% [markdown]
# ## 10.5
#
# How many bytes does one training step keep? Everything is float32, 4 bytes per number. The model is the lecture's, its parts without a bias:
#
# - an embedding, `vocabulary` rows of `width` numbers. The last matrix of the model is the same one, so it counts once;
# - `depth` blocks. Each has four projections: from `width` to all the query heads, to all the key heads, to all the value heads, and back
#   from the query heads to `width`. A head has `width // heads` numbers (`heads` divides `width`), and there are as many value heads as key
#   heads, `kv_heads`. A block also has the three matrices of SwiGLU, each `width` × `hidden`, and two norms with `width` weights each;
# - one last norm with `width` weights.
#
# AdamW keeps two averages for each parameter.

# %% [markdown]
# Of the activations count those of the attention layers, in all the blocks. In each block original attention keeps for the backward pass:
# x, which the projections read; q; K repeated for every query head; V repeated for every query head; the mask, one **byte** for each pair of
# query and key, the same for all batches and heads; P; and o. Flash attention keeps x; q; K and V, not repeated; o; and lse, one number for
# each query and head.

# %% [markdown]
# ## 10.6
#
# Newer models (Qwen 3, Gemma 3) divide each row of q and k by its root mean square before they turn it. In PyTorch that
# is a dozen small operations. Write one kernel, which reads each number of X once and writes each of Y once:
#
# $$\hat x_j = w_j\, x_j \Big/ \sqrt{\tfrac{1}{2\,\text{HALF}} \textstyle\sum_k x_k^2 + \text{eps}} \qquad y_1 = \hat x_1 \cos - \hat x_2 \sin \qquad y_2 = \hat x_1 \sin + \hat x_2 \cos$$
#
# Pair $i$ of a row are its numbers $i$ and $i + \text{HALF}$; HALF is a power of two. At position $p$ it is turned by the angle whose cosine is
# `COS[p, i]`. W has 2 HALF numbers in float32, one behind the other.

# %% [markdown]
# Row $m$ of X stands at position `offset` + $m$. The tables are contiguous, `[positions, HALF]` in float32. X and Y have any strides. Compute in
# float32 and round once, when you store. `M` is any number: mind the rows past it.

# %% [markdown]
# ## 10.7
#
# One program of a flash kernel, without a mask, reads `BLOCK_M` rows of Q once, then all `N` rows of K and of V, and writes `BLOCK_M` rows of
# O. It computes two products of `BLOCK_M` × `N` × `HEAD_DIM` multiply-adds. All of its reads come from HBM.
#
# - `BLOCK_M` is the **smallest** power of two, from 16 to 256, with which the program's FLOPs per byte reach the roofline's ridge, which is
#   `peak_flops / bytes_per_s`. A multiply-add is 2 FLOPs; leave the softmax out.
# - `BLOCK_N` is then the **largest** power of two, from 16 to 256, with which the tiles fit into `shared_bytes`: one tile of Q, and `STAGES`
#   tiles of K and of V, each `BLOCK_N` rows, even if `N` is less. O stays in registers.
#
# A number has `itemsize` bytes. Return `None` where no `BLOCK_M` reaches the ridge, or no `BLOCK_N` fits with it.

# %% [markdown]
# ## 10.8
#
# This attention gives the right result. Each query sees a window of keys, as in many models of today, and a quarter of the pairs, those that turn most
# slowly, do not turn at all (*p-RoPE*, Barbero et al. 2024). Look at what it runs for it:

# %%
WINDOW = 12                                                     # keys that a query sees, its own among them

def slow_attention(q, k, v):
    """Causal attention over a window, with rotary embedding.

    q, o: [batch, heads, N, D]; k, v: [batch, kv_heads, N, D].
    """
    N, D = q.shape[2:]
    frequency = 10000.0 ** (-torch.arange(0, D, 2, device=q.device) / D)
    frequency[D * 3 // 8 :] = 0
    angle = torch.arange(N, device=q.device)[:, None] * frequency
    q, k = (rope(x, angle.cos(), angle.sin()) for x in (q, k))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    hidden = torch.full((N, N), -math.inf, device=q.device, dtype=q.dtype)
    scores = scores + hidden.triu(1) + hidden.tril(-WINDOW)
    if scores.isnan().any().item():
        raise ValueError("there is a NaN in the scores")
    return torch.softmax(scores, dim=-1) @ v

# %% [markdown]
# Write one that does the same with less. `prepare` is called once, when the model is made, and may return anything. `fast_attention` is called
# for every layer and step. The check counts what **a call of `fast_attention`** runs:
#
# - no tensor with a number for each pair of query and key, also none from `prepare`;
# - no copy of K or V for every query head;
# - no cosines and sines, not in a first call either: N never exceeds `positions`, so what `prepare` returned will do;
# - nothing that makes the CPU wait for the GPU. Nobody reads the error about a NaN;
# - at most 16 operations (views and casts are free), and at most 6 times the bytes of q and k for their results.
#
# Everything that you have met in the course may be used. Two operations are possible.

# %% tags=["exercise"]
def prepare(positions, head_dim, device):
    """Return whatever fast_attention needs that does not depend on q, k and v."""
    # BEGIN SOLUTION
    cos, sin = rope_table(positions, head_dim, device=device)
    cos[:, head_dim * 3 // 8 :], sin[:, head_dim * 3 // 8 :] = 1, 0
    return cos, sin
    # END SOLUTION


def fast_attention(q, k, v, prepared):
    """What slow_attention(q, k, v) returns."""
    # BEGIN SOLUTION
    cos, sin = prepared
    q, k = fused_rope(q, k, cos, sin)
    return flash_attention(q, k, v, causal=True, window=(WINDOW - 1, 0))
    # END SOLUTION

# %% [markdown]
# ## 10.9
#
# A colleague's step, as a profiler saw it: eight layers, a large last product, a loss. It is slower than it should be, and the two tables do not say why. Four of its operations are not needed for the result:

# %%
for name, what_for in OPTIONAL.items():
    print(f"{name}: {what_for}")

# %%
bars = profiles.operations(trace())  # ("CPU" or "GPU", name, begin, length), in microseconds
for unit in ("CPU", "GPU"):
    names = {name for u, name, _, _ in bars if u == unit}
    took = {x: sum(length for u, name, _, length in bars if (u, name) == (unit, x)) for x in names}
    print(unit, {name: round(took[name]) for name in sorted(took, key=took.get, reverse=True)[:6]})

# %% [markdown]
# You may open it in a browser, as the lecture does, draw it with `profiles.timeline`, or go through `bars`. For that: `json.dump(trace(), open("step.json", "w"))`.
#
# Which of the four would you take out **first**, and how many milliseconds does the step take then, to half a per cent? The check tries your
# function on other steps too, in which another of the four may gain most. The CPU launches in the same order. A kernel is launched at the end of
# its bar on the CPU, and begins when it is launched and the one before it is done. `all_finite` and `loss.item` launch theirs at the *beginning*
# of their bar, and end it 20 µs after the kernel, when its result is back: their bars get shorter or longer. All others stay as long as they are.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_10_trace: first_out

# %% [markdown]
# ## Where you are
#
# You can say where a model's time and memory go, and what a faster kernel is worth to it.
