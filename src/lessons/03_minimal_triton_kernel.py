# %% [markdown]
# # Phase 3 · Minimal Triton kernel
#
# The loop of phase 2 becomes a GPU kernel. It takes one head, has no causal mask and is not tuned. But it takes any number of queries
# and keys, three dtypes and any strides, and it passes every case of the checker. Then you take it back to phase 1's two walls.

# %% [markdown]
# ## What you will be able to do
#
# - Translate a block algorithm into Triton: pointers for slices, masks for short blocks, one program for one block.
# - Say what each of the kernel's four masks protects, and what goes wrong without it.
# - Explain why the kernel computes $2^x$ where the derivation has $e^x$, and what that does to `lse`.
# - Read shared memory, registers and tensor-core instructions off the compiler.
# - Predict the bytes that the kernel asks for, exactly, and check the prediction.

# %% [markdown]
# ## What you need first
#
# - Phase 1: the two walls, and the Triton primer (program, grid, `tl.load`, `tl.store`, strides, masks).
# - Phase 2: the simulation, with `m_i`, `l_i`, `acc`, `correction`.
#
# Without a GPU the kernel runs in Triton's interpreter. The compiler's answers come from the real compiler, which needs no GPU.

# %%
import ast
import contextlib
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import display

from flashlab import runtime
from flashlab.attention import reference, schemes, simulation
from flashlab.attention.cost import naive_cost
from flashlab.attention.inputs import TILE_SIDES, check_block, check_qkv, scale_of
from flashlab.attention.triton_minimal import (
    DTYPES, LOG2_E, compile_arguments, default_block, flash_attention_forward, hbm_bytes,
)
from flashlab.bench import hardware
from flashlab.bench import triton as bench
from flashlab.check import verify_one_head
from flashlab.check.cases import Case, make_inputs
from flashlab.check.tolerance import truth, within
from flashlab.figures import curves, show
from flashlab.triton_tools.compile_report import TARGETS, compile_report, compile_reports
from flashlab.triton_tools.watch import OutOfBounds, hbm_traffic

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

show.style()

# %% [markdown]
# ## 1 · The oracle, and one program's share of the work
#
# First what is right, as always: float64, one head. `on_device` puts the inputs where kernels run.

# %%
def oracle(q, k, v, **options):
    o, lse = reference.attention(*(x.cpu()[None, None] for x in (q, k, v)), **options)
    return o[0, 0], lse[0, 0]


def on_device(M, N, D, dtype=torch.float16, seed=0):
    """q [M, D], k and v [N, D]: random, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, D, generator=generator) for rows in (M, N, N))
    return [x.to(runtime.device(), dtype) for x in (q, k, v + 0.5)]

# %%
q, k, v = on_device(100, 150, 64)
o, lse = flash_attention_forward(q, k, v)
want, want_lse = oracle(q, k, v)
assert torch.allclose(o.cpu().double(), want, atol=2e-3)
assert torch.allclose(lse.cpu().double(), want_lse, atol=1e-5)
print("100 queries, 150 keys: o and lse are right")

# %% [markdown]
# So there is a kernel, and it is right on sizes that no tile divides. The rest of the lecture takes it apart.
#
# In phase 2 the outer loop went over blocks of query rows. On a GPU that loop becomes the *grid*: program $i$ takes the rows
# $i \cdot \mathrm{BLOCK\_M}$ to $(i+1) \cdot \mathrm{BLOCK\_M} - 1$. The inner loop, over keys, carries the state. So it stays a loop
# inside each program.

# %% [markdown]
# ## 2 · Recap: a program, its tile, its addresses
#
# From phase 1's primer: a launch with the grid `(P,)` starts P programs of the same code, and `tl.program_id(0)` tells each its
# number. A kernel gets a pointer to the first element and two strides: how many elements to walk to the next row and to the next
# column. The addresses of a tile are one sum of a column and a row:
#
# $$\mathrm{K\_ptr} + \mathrm{offs\_n}[:, \mathrm{None}] \cdot \mathrm{stride\_kn} + \mathrm{offs\_d}[\mathrm{None}, :] \cdot \mathrm{stride\_kd}$$

# %%
def tile(memory, stride_row, stride_col, rows, cols):
    rows, cols = torch.tensor(rows), torch.tensor(cols)
    offsets = rows[:, None] * stride_row + cols[None, :] * stride_col  # rows down, columns across
    return offsets, memory[offsets]


K = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]])
for name, matrix in (("K", K), ("K.T", K.T)):
    offsets, values = tile(K.flatten(), *matrix.stride(), rows=[1, 2], cols=[0, 1, 2])
    assert torch.equal(values, matrix[1:3, :3])
    print(f"{name:3s} strides {matrix.stride()}: offsets {offsets.tolist()} -> {values.tolist()}")

# %% [markdown]
# The transposed matrix is the same memory with the two strides exchanged. So the launcher passes all eight strides (two each for Q, K, V,
# O) and copies nothing.

# %% [markdown]
# **One trap.** `offs_n * stride_kn` is computed in 32 bits if both factors have 32. A row index of 3 million times a stride of 1024 is more
# than $2^{31}$. The address wraps around, and the kernel reads *something*, without an error.

# %%
row, stride = 3_000_000, 1024
wrapped = torch.tensor(row, dtype=torch.int32) * torch.tensor(stride, dtype=torch.int32)
print("as it should be:", row * stride, "  in 32 bits:", wrapped.item())
assert wrapped.item() == row * stride - 2**32

# %% [markdown]
# So the kernel's offsets are `int64`. (FlashAttention's tracker has this bug as issues 767, 1500 and 2611.)
#
# ## 3 · New: a loop on the GPU
#
# `for start in range(0, N, BLOCK)` in a Triton kernel becomes a loop on the GPU. N may be a run-time number, so one compiled kernel serves
# every N. A first example, the sum of a vector of any length:

# %%
@triton.jit
def total_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    total = 0.0
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)  # past the end: zeros
        total += tl.sum(x, axis=0)
    tl.store(out_ptr, total)

# %%
for N in (1, 64, 1000):
    x, out = torch.ones(N, device=runtime.device()), torch.zeros(1, device=runtime.device())
    total_kernel[(1,)](x, out, N, BLOCK=64)
    assert out.item() == N
    print(f"N = {N:4d}: {out.item():.0f}")

# %% [markdown]
# What a loop carries from one pass to the next must keep its shape and its type. `total = 0` instead of `0.0` starts as an integer and
# becomes a float. The interpreter accepts that; the compiler does not.

# %%
@triton.jit
def changing_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    total = 0
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + offs, mask=offs < N, other=0.0), axis=0)
    tl.store(out_ptr, total)


arguments = {"x_ptr": torch.float32, "out_ptr": torch.float32, "N": 1000, "BLOCK": 64}
refused = compile_report(changing_kernel, arguments, target="sm_90")
assert compile_report(total_kernel, arguments, target="sm_90").ok and not refused.ok
print("refused, because of the type of total:", "Loop-carried variable total" in refused.error)

# %% [markdown]
# This is the online softmax's other virtue: `m_i`, `l_i` and `acc` keep their shapes, so a loop can carry them.
#
# `break` is refused as well. `tl.range` is `range` with options for the compiler, and `tl.static_range` is unrolled when the kernel is
# compiled. The minimal kernel needs neither.

# %% [markdown]
# ## 4 · New: `tl.dot`
#
# `tl.dot(a, b, acc)` multiplies two tiles and adds the product to `acc`. It is compiled to the tensor cores, the GPU's units for
# matrix products. They multiply 16-bit numbers and add them up in 32 bits. `k.T` transposes a tile on chip.

# %%
@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)  # float16
    acc = tl.full([SIDE, SIDE], 100.0, tl.float32)
    tl.store(c_ptr + at, tl.dot(a, b.T, acc))


a, b = (torch.arange(256, device=runtime.device()).reshape(16, 16) % n for n in (5, 7))
c = torch.zeros(16, 16, device=runtime.device())
dot_kernel[(1,)](a.half(), b.half(), c, SIDE=16)
assert torch.equal(c, 100 + a.float() @ b.float().T)
print("tl.dot(a, b.T, acc) = acc + a @ b.T: True")

# %% [markdown]
# For float32 operands `tl.dot` would use TF32, a format that keeps 10 bits of the mantissa where float32 has 23. The kernel says
# `input_precision="ieee"` to keep them all. A function that takes float32 should not return 3 digits.

# %%
q32, k32, v32 = on_device(64, 128, 64, torch.float32)
want, _ = oracle(q32, k32, v32)
ieee = (flash_attention_forward(q32, k32, v32)[0].cpu() - want).abs().max().item()
ten_bits = [(x.view(torch.int32) & -(2**13)).view(torch.float32) for x in (q32, k32, v32)]  # what TF32 keeps
tf32 = (oracle(*ten_bits)[0] - want).abs().max().item()
assert ieee < 2e-6 and tf32 > 2e-4
print("the kernel's error in float32 below 2e-6: True;  TF32 inputs alone would make more than 2e-4: True")

# %% [markdown]
# ## 5 · Masks for short blocks
#
# `tl.arange(0, 64)` always has 64 entries: a tile's shape is fixed when the kernel is compiled, and its sides are powers of two. So the
# last block reaches over the end, and every load and store says which elements are real. What if one does not? This kernel masks its
# store but not its load.

# %%
@triton.jit
def careless_copy(x_ptr, y_ptr, rows, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = offs_m[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at)  # no mask
    tl.store(y_ptr + at, x, mask=offs_m[:, None] < rows)


def copy(x):
    y = torch.empty_like(x)
    careless_copy[(triton.cdiv(len(x), 64),)](x, y, len(x), x.stride(0), BLOCK=64, WIDTH=x.shape[1])
    return y

# %%
assert torch.equal(copy(q[:64]), q[:64])  # 64 rows: right
try:
    hbm_traffic(copy, q)  # 100 rows, watched
except OutOfBounds as error:
    print(error)

# %% [markdown]
# The copy *is* right, since the extra rows are never stored. So on a GPU nothing would have told you. But it reads 28 rows that belong to
# somebody else, and one day they are in an unmapped page. `hbm_traffic` runs a launcher interpreted and checks every address, on any
# machine. Make it a habit.

# %% [markdown]
# Our kernel has four masks. Three are for safety: the load of Q, the loads of K and V, the stores of O and lse.
#
# The fourth is different. A masked key is loaded as zeros, its score is 0, and phase 2 showed that a score of 0 is a full share of the
# softmax. Hence, after the dot and before the maximum:
#
#     s = tl.where(in_range[None, :], s, float("-inf"))
#
# A test whose lengths the tile divides never sees that this line is missing.

# %% [markdown]
# *Before you read on: V's tail is masked to zero too. With `p` already 0 there, is that mask needed?*
#
# <details><summary>Answer</summary>
#
# Yes. Whatever lies behind V's last row would be multiplied by 0, and $0 \cdot \text{NaN}$ is NaN, as is $0 \cdot \infty$. Memory that
# nobody initialised holds such things now and then. So the kernel would fail now and then.
#
# </details>

# %% [markdown]
# ## 6 · Two to the power of
#
# The GPU has one instruction for exponentials, `ex2`, and it computes $2^x$. So $e^x$ is computed as $2^{x \log_2 e}$, and `tl.exp` costs
# one more multiplication for each element. But $s$ is multiplied by the softmax scale anyway. Fold $\log_2 e$ into that scale, once, outside
# the kernel:
#
# $$e^{\,\text{scale} \cdot (q \cdot k) - m} = 2^{\,(\text{scale} \cdot \log_2 e)(q \cdot k) - m'}, \qquad m' = m \log_2 e .$$

# %% [markdown]
# All statistics are then in base 2, and the loop is the same with `exp2` for `exp`. Only the `lse` that leaves the kernel has to be natural
# again: $\text{lse} = (m' + \log_2 l) \cdot \ln 2$.
#
# Is the multiplication real? Two kernels that differ in one letter go to the compiler. `sm_90` is its name for Hopper GPUs such as H100 and
# H200; PTX is NVIDIA's documented assembly language.

# %%
@triton.jit
def with_exp(x_ptr, y_ptr):
    i = tl.arange(0, 1024)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


@triton.jit
def with_exp2(x_ptr, y_ptr):
    i = tl.arange(0, 1024)
    tl.store(y_ptr + i, tl.exp2(tl.load(x_ptr + i)))

# %%
pointers = {"x_ptr": torch.float32, "y_ptr": torch.float32}
e, two = (compile_report(kernel, pointers, target="sm_90") for kernel in (with_exp, with_exp2))
for report in (e, two):
    counts = [report.ptx.count(text) for text in ("ex2.approx", "mul.f32")]
    threads = 32 * report.num_warps
    print(f"{report.kernel}: {counts[0]} ex2 and {counts[1]} multiplications per thread")
    assert counts == [1024 // threads, 1024 // threads if report is e else 0]
print(f"1024 elements on {threads} threads ({report.num_warps} warps): {1024 // threads} per thread")

# %% [markdown]
# ## 7 · The kernel
#
# Here it is, whole. Read it once for its shape: load Q, start from the identity $(-\infty, 0, 0)$, loop over the keys, normalise, store.

# %%
# FROM flashlab.attention.triton_minimal: flash_attention_forward_kernel

# %% [markdown]
# It is phase 2's loop under the same names. So the two can be put side by side by machine: for every name that both assign, what they
# assign to it.

# %%
def assignments(fn):
    """What a function assigns to each name, in order."""
    found = {}
    for node in ast.walk(ast.parse(show.source_text(fn))):
        if isinstance(node, ast.Assign):
            values = found.setdefault(ast.unparse(node.targets[0]), [])
            values.append((node.lineno, ast.unparse(node.value)))
    return {name: [value for _, value in sorted(values)] for name, values in found.items()}

# %%
theirs = assignments(simulation.flash_attention_forward_sim)
ours = assignments(flash_attention_forward_kernel)
same = [name for name in theirs if name in ours]
assert {"m_i", "l_i", "acc", "k", "s", "m_new", "p", "correction", "v", "lse"} <= set(same)
rows = []
for name in same:
    values = ["<br>".join(f"`{x}`" for x in side[name]) for side in (theirs, ours)]
    rows.append([f"`{name}`", *values])
show.table(rows, ["name", "phase 2, simulation", "phase 3, Triton"])

# %% [markdown]
# What the kernel has and the simulation has not, apart from pointers, masks and base 2:
#
# - **`tl.dot(p, v, acc)`** multiplies and accumulates in one operation.
# - **`m_safe`.** If every score of a row so far is $-\infty$, then `m_new` is too, and $-\infty - (-\infty)$ is NaN. Subtracting 0 instead
#   gives $p = 0$. Such a row ends as `o = 0`, `lse = -inf`. Here only inputs with infinities get there. With a causal mask, in phase 4,
#   ordinary inputs will.

# %%
ones, endless = torch.ones_like(q[:3]), torch.full_like(k, -math.inf)  # every score is a sum of -inf
o, lse = flash_attention_forward(ones, endless, v)
assert (o == 0).all() and (lse == -math.inf).all()
print("only scores of -inf: o is 0, lse is", lse.tolist())

# %% [markdown]
# Libraries differ here. $\ln 0 = -\infty$ is what the formula says, and FlashAttention-3 writes it. FlashAttention-2 writes $+\infty$ for such
# a row. Whoever merges partial results by their `lse` has to know which.

# %% [markdown]
# ## 8 · The launcher, and what it refuses
#
# Around the kernel stands a Python function. It allocates `o` and `lse`, computes the grid, folds $\log_2 e$ into the scale and passes the
# strides. And it checks, because a kernel cannot: with a wrong shape it would read the wrong memory and return numbers.

# %%
# FROM flashlab.attention.triton_minimal: flash_attention_forward (no docstrings)

# %% [markdown]
# `num_warps` and `num_stages` come back in section 12. `check_qkv` refuses what the kernel cannot take, in a sentence:

# %%
attempts = {
    "four dimensions": [x[None, None] for x in (q, k, v)],
    "mixed dtypes": [q, k.float(), v],
    "float64": [x.double() for x in (q, k, v)],
    "head_dim 80": [torch.zeros(8, 80, dtype=q.dtype, device=q.device)] * 3,
    "one value too few": [q, k, v[:-1]],
}
for name, inputs in attempts.items():
    try:
        flash_attention_forward(*inputs)
    except (TypeError, ValueError) as error:
        print(f"{name}: {type(error).__name__}: {error}\n")

# %% [markdown]
# ## 9 · Is it right?
#
# `bench.accuracy` runs the kernel on the checker's inputs and returns the largest errors of `o` and `lse` against float64. Beside them stands
# the error of plain fp16 attention, the *twin*. "Of the bound" is the largest error as a multiple of what the checker allows at that
# element: a right kernel stays at 1 or below.
#
# First here and now, at lengths that the interpreter can do. 500 is no multiple of the block.

# %% tags=["nbval-ignore-output"]
COLUMNS = {
    "seq_len": "N", "head_dim": "D", "dtype": "dtype", "content": "inputs", "o_error": "error of o",
    "twin_error": "twin's", "lse_error": "error of lse", "o_of_bound": "o, of the bound",
    "lse_of_bound": "lse, of the bound",
}
live = [bench.accuracy(n, d) for n, d in ((128, 64), (500, 64), (1024, 64), (128, 128), (500, 128))]
assert all(row["o_of_bound"] <= 1 and row["lse_of_bound"] <= 1 for row in live)
show.table([[row[key] for key in COLUMNS] for row in live], COLUMNS.values())

# %% [markdown]
# Then at N = 4096, and at 4001, which no tile divides, for both head sizes. These were recorded on the GPU named in the output. In the
# "rising" inputs every block of keys has a new maximum.

# %%
for run in bench.recorded():
    found = run.get("errors", [])
    print(f"{run['machine']['gpu']}: {len(found)} inputs recorded")
    assert all(row["o_of_bound"] <= 1 and row["lse_of_bound"] <= 1 for row in found)
    show.table([[row[key] for key in COLUMNS] for row in found], COLUMNS.values())

# %% [markdown]
# Why not a simple tolerance? A usual verdict is "relative 1e-2 or absolute 1e-3, and a cosine above 0.999". At N = 1024 an output averages a
# thousand values. Let us make an answer wrong in *every* element, and ask both verdicts.

# %%
case = Case("", 1024, 1024)  # head_dim 64, float16
q, k, v = make_inputs(case, torch.device("cpu"))
right = truth(case, q, k, v)  # o and lse in float64, and how far off each element may be
o, _ = flash_attention_forward(*(x[0, 0].to(runtime.device()) for x in (q, k, v)))
o = o.cpu().double()[None, None]


def usual_verdict(o):
    close = torch.allclose(o, right.o, rtol=1e-2, atol=1e-3)
    cosine = torch.nn.functional.cosine_similarity(o.flatten(), right.o.flatten(), dim=0)
    return close and cosine.item() > 0.999

# %%
for name, answer in (("ours", o), ("ours, 0.5 % too large everywhere", 1.005 * o)):
    calibrated = within(answer, right.o, right.o_bound)
    print(f"{name}: usual {usual_verdict(answer)}, calibrated {calibrated}")
    assert usual_verdict(answer) and calibrated == (answer is o)

# %% [markdown]
# The calibrated verdict bounds each element by what rounding P to 16 bits can do to *that* element, and the largest error by twice the twin's.
#
# Random inputs are friendly. The checker's cases are not: maxima that rise in every block, scores near ±200, hugely negative scores, one key,
# one query, strided tensors with NaN in between.

# %%
report = verify_one_head(flash_attention_forward, dtypes=(torch.float16, torch.bfloat16, torch.float32))
print(report.verdict)

# %% [markdown]
# ## 10 · The physical wall, again
#
# Phase 1's scheme A kept a row of scores on chip and died of shared memory at N = 256 or 512. Ask the compiler about the minimal kernel, over N, for five
# targets.

# %%
lengths = [64, 128, 256, 512, 1024, 4096, 2**20]
arguments = [compile_arguments(torch.float16, 64, N) for N in lengths]
minimal = compile_reports(flash_attention_forward_kernel, arguments)
shared = {target: [r.shared_bytes for r in minimal if r.target == target] for target in TARGETS}
for target, needed in shared.items():
    limit = runtime.limits(target).shared_per_block
    assert len(set(needed)) == 1 and needed[0] <= limit
    tiles = needed[0] // (64 * 64 * 2)
    print(f"{target}: {needed[0]} bytes for every N up to {lengths[-1]}, that is {tiles} tiles;",
          f"the limit is {limit}")

# %% [markdown]
# Flat: N is not in the kernel's shapes, so it is not in its shared memory. Count the tiles of 64 × 64 × 2 = 8192 bytes. On sm_90 there are seven:
# one of Q, and three stages of K and V each (`num_stages=3`: two blocks are on their way while one is in use). Elsewhere there are five: Triton
# sets aside one pair of K and V fewer there. Section 12 varies the stages.

# %%
scheme_a_lengths = [64, 128, 256, 512, 1024]
scheme_a = schemes.scheme_a_reports(scheme_a_lengths, 64, ["sm_90"])
lines = [("scheme A", scheme_a_lengths, [r.shared_bytes / 1024 for r in scheme_a], "red", "s-")]
for target, marker, hue in (("sm_90", "o-", "blue"), ("sm_120", "^-", "green")):
    needed = [b / 1024 for b in shared[target]][:-1]
    lines.append((f"minimal kernel, {target}", lengths[:-1], needed, hue, marker))

# %%
figure, ax = plt.subplots(figsize=(7.4, 3.8))
curves.curves(ax, lines, log="xy", xticks=lengths[:-1], yticks=[8, 16, 32, 64, 128, 256],
              legend="lower right", xlabel="N, number of keys", ylabel="shared memory per program (KiB)",
              title="The physical wall, D = 64, float16")
for target in ("sm_120", "sm_80", "sm_90"):
    curves.level(ax, runtime.limits(target).shared_per_block / 1024, f"limit of {target}")
plt.show()

# %% [markdown]
# *Shared memory of one program against the number of keys. Scheme A grows with N through each GPU's limit (dashed; sm_86 and sm_89 have
# sm_120's). The minimal kernel does not depend on N. With D = 64 scheme A lasts twice as long as with phase 1's D = 128.*

# %% [markdown]
# ## 11 · The logical wall, again
#
# Scheme B failed because Triton does not slice a tensor. Does this kernel slice one? Ask Python's parser for every `[...]` in it.

# %%
tree = ast.parse(show.source_text(flash_attention_forward_kernel))
found = {ast.unparse(node.slice).strip("()") for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
print("subscripts in the kernel:", sorted(found))
assert found == {":, None", "None, :"}

# %% [markdown]
# Only `[:, None]` and `[None, :]`: they add an axis and move nothing. The only thing that is ever cut is a matrix *in HBM*, by adding `start_n` to
# row numbers before the load. The block of P that meets V was computed in the same pass, so nothing is cut out of anything. Both walls are gone.

# %% [markdown]
# ## 12 · What the compiler made of it
#
# Before looking, predict. A tile product is $64 \times 64 \times 64$ multiply-adds. A warp is 32 threads that run together; the program has 4.
#
# - On sm_80 the tensor-core instruction is `mma.m16n8k16`, by one warp.
# - On sm_90 Triton uses `wgmma.m64n64k16`, by four warps together.
# - A thread holds $64 \cdot 64 / 128 = 32$ elements of `s` and of `acc`, and the statistics of 2 rows.

# %%
by_target = {r.target: r.ptx for r in minimal}
mma = 2 * (64 // 16) * (64 // 8) * (64 // 16) // 4  # two products, shared out to four warps
wgmma = 2 * (64 // 16)  # two products, all four warps at once
expected = {
    "tensor-core products": (
        {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async"}, {"sm_80": mma, "sm_90": wgmma}
    ),
    "2^x, for p and correction": ("ex2.approx", 32 + 2),
    "scores masked with -inf": (", 0fFF800000, %p", 32),
    "divisions, after the loop": ("div.full", 32),
}
for name, (text, count) in expected.items():
    for target in ("sm_80", "sm_90"):
        pattern, want = (x[target] if isinstance(x, dict) else x for x in (text, count))
        seen = by_target[target].count(pattern)
        print(f"{target} {name}: expected {want}, in the PTX {seen}")
        assert seen == want

# %% [markdown]
# Every count is the prediction. Now the lines themselves, with what each stands for. (Register names differ from one compiler to the next, so the tests
# do not compare this output.)

# %% tags=["nbval-ignore-output"]
def first(text):
    """The first line of the PTX for sm_90 that has this text in it."""
    return next(line.strip()[:96] for line in by_target["sm_90"].splitlines() if text in line)


print("load of K, masked:   ", first("selp.b32"))
print("                     ", first("cp.async.cg"))
print("q @ k.T:             ", first("wgmma.mma_async"))
print("mask of the scores:  ", first(", 0fFF800000, %p"))
print("exp2:                ", first("ex2.approx"))
print("acc / l_i:           ", first("div.full"))
print("store of O, masked:  ", first("st.global"))

# %% [markdown]
# Three ways of masking. A *load* turns its mask into a size: 16 or 0 bytes, and `cp.async` (a copy to shared memory that runs in the background)
# fills the rest with zeros. The *scores* are selected one by one. A *store* is switched off: `@%p st.global`.
#
# These 32 selections run in every pass, though only the last block can need them. Phase 4 takes the last block out of the loop.

# %% [markdown]
# ### Warps and stages
#
# Two launch options decide what a program occupies. `num_warps` shares the tile out to more threads, so each needs fewer registers. `num_stages` is how
# far loads run ahead, which takes shared memory. Neither changes the result.

# %% tags=["nbval-ignore-output"]
options = [{"num_warps": w, "num_stages": s} for w, s in ((4, 1), (4, 2), (4, 3), (4, 4), (8, 3))]
arguments = [compile_arguments(torch.float16, 128) | option for option in options]
reports = compile_reports(flash_attention_forward_kernel, arguments, targets=["sm_86", "sm_90"])


def needs(r):
    return f"{r.shared_bytes // 1024} KiB{'' if r.fits else ' (too much)'}, {r.registers} registers"


rows = [[*option.values(), needs(here), needs(there)]
        for option, here, there in zip(options, reports[::2], reports[1::2], strict=True)]
print(", ".join(f"{name} = {arguments[0][name]}" for name in ("HEAD_DIM", "BLOCK_M", "BLOCK_N")))
print("triton", triton.__version__)
show.table(rows, ["num_warps", "num_stages", "sm_86, limit 99 KiB", "sm_90, limit 227 KiB"])

# %% [markdown]
# From two stages on, each stage adds a tile of K and one of V, 16 KiB each. sm_90 holds Q and as many pairs as `num_stages` says; sm_86 holds
# one pair fewer. A likely reason: `wgmma` reads K and V from shared memory while it runs. `mma.sync` has its operands in registers, so the place
# of a tile is free earlier. The other 8 KiB on sm_86 are the size of a tile of P; nothing here shows what they hold.

# %%
tile = 64 * 128 * 2  # bytes
for target, four_warps in (("sm_86", reports[0:8:2]), ("sm_90", reports[1:8:2])):
    pairs = [(r.shared_bytes - tile) / (2 * tile) for r in four_warps[1:]]
    print(f"{target}, 2, 3 and 4 stages: a tile of Q and {[int(pair) for pair in pairs]} pairs of K and V")
    assert pairs == [2, 3, 4] if target == "sm_90" else [int(pair) for pair in pairs] == [1, 2, 3]

# %% [markdown]
# Read a row as a budget. An SM (multiprocessor) has 65 536 registers and one pool of shared memory. What one program takes decides how many fit beside
# each other, and several programs per SM are how a GPU hides its waiting. Four stages at D = 128 do not start on sm_86:

# %%
too_deep = reports[6]                                       # 4 warps, 4 stages, sm_86
print("sm_86, D = 128, 4 stages: it compiles:", too_deep.ok, " it can be launched:", too_deep.fits)
assert too_deep.ok and not too_deep.fits

# %% [markdown]
# ## 13 · The bytes, asked for and moved
#
# What does a launch ask of HBM? Program $i$ reads its rows of Q once, and all of K and V. So with $P = \lceil M / \mathrm{BLOCK\_M} \rceil$
# programs and $e$ bytes per element
#
# $$\text{read} = (M + 2NP)\,D\,e, \qquad \text{written} = M D e + 4M .$$
#
# The interpreter counts every byte that an unmasked lane touches. The counts must be *equal*.

# %%
for M, N, BLOCK_M, BLOCK_N in (
    (128, 128, 64, 64), (256, 256, 64, 64), (256, 256, 64, 32), (100, 150, 64, 64), (256, 256, 128, 64)
):
    traffic = hbm_traffic(
        flash_attention_forward, *on_device(M, N, 64), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N
    )
    assert (traffic.bytes_read, traffic.bytes_written) == hbm_bytes(M, N, 64, 2, BLOCK_M)
    print(f"M={M} N={N} BLOCK_M={BLOCK_M} BLOCK_N={BLOCK_N}: read {traffic.bytes_read},",
          f"written {traffic.bytes_written}, as predicted: True")

# %% [markdown]
# K and V are read by every program. **So the bytes asked for fall as BLOCK_M grows**, and BLOCK_N changes nothing (lines 2 and 3). Beside naive attention, which
# moves the N × N matrix six times:

# %%
rows = []
for N in (256, 1024, 4096, 16384):
    naive, flash = naive_cost(N, 64).bytes, sum(hbm_bytes(N, N, 64, 2))
    rows.append([N, naive / 1e6, flash / 1e6, f"{naive / flash:.1f}"])
show.table(rows, ["N", "naive, MB asked for", "minimal kernel, MB asked for", "ratio"])
assert 2.9 < rows[-1][1] / rows[-1][2] < 3

# %% [markdown]
# The ratio settles at $3\,\mathrm{BLOCK\_M}/D = 3$, which looks modest. But these are sizes of tensors, not yet bytes of HBM. Programs that run at
# the same time read the same K and V, and find them in the L2 cache. Recorded counters of `ncu`, NVIDIA's profiler, at N = 16384, D = 64 (DRAM is what
# HBM is made of):

# %%
for run in hardware.recorded():
    print(run["machine"]["gpu"])
    names = {"naive": "naive", "minimal": "minimal kernel", "fa2": "FlashAttention-2, BLOCK_M = 128"}
    found = {name: moved for name in names if (moved := hardware.moved(run, name))}
    rows = [[names[name], *(x / 2**20 for x in moved.values())] for name, moved in found.items()]
    show.table(rows, ["MiB", "the tensors", "asked for", "through L2", "DRAM"])
    assert all(found[name]["dram"] < 1.1 * found[name]["tensors"] for name in found if name != "naive")
print("runs recorded:", len(hardware.recorded()))

# %% [markdown]
# The fused kernels move no more than the tensors through DRAM. (O may still lie in L2 when the kernel ends.) The naive matrix is larger than L2, so
# what is asked for does go to DRAM.
#
# L2 itself hands out only about half of what the fused kernels ask for. A possible reason: NVIDIA's GPUs have a unit before L2 that joins equal requests of
# neighbouring SMs, and these programs walk over the same tiles. Nothing here isolates that cause.

# %% [markdown]
# ## 14 · How fast?
#
# One head is a small job: at N = 1024 it is 16 programs, and an H200 has 132 SMs. Keep that in mind. With a GPU this cell measures four lengths here
# and now; without one it shows what was recorded on the machine it names.

# %% tags=["nbval-ignore-output"]
if runtime.INTERPRETED:
    runs = bench.recorded()
else:
    runs = [bench.BENCH.run(bench.jobs(lengths=(512, 1024, 4096, 16384), head_dims=(64,), long=(512,)))]
for run in runs:
    machine = run["machine"]
    print(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}")
    display(bench.table(run))
print("runs:", len(runs))

# %% [markdown]
# **What is timed:** the kernels on the GPU, not their launches from Python. The calls are recorded in CUDA graphs, which the GPU replays without Python,
# and the three implementations take turns. (A launch from Python can take longer than a short kernel. Timed with it, the kernel would seem to take
# the same time at every N.) The recorded times grow with N:

# %%
for run in bench.recorded():
    ours = [row for row in run["rows"] if row["name"] == "minimal kernel" and row["head_dim"] == 64]
    ms = {row["seq_len"]: row["ms"] for row in ours if row["seq_len"] >= 512 and "rounds" in row}
    longer = all(ms[2 * n] > ms[n] for n in ms if 2 * n in ms)
    print(f"{run['machine']['gpu']}: of {len(ms)} lengths, each takes longer than the one before: {longer}")
    assert longer

# %% [markdown]
# Read the comparison with care.
#
# - **Instructions.** On Hopper, Triton emits `wgmma` (section 12 counted it). FlashAttention-2 is written with `mma.sync`, the instruction of the
#   generation before, which is slower there. So where the minimal kernel leads at long N, the algorithm need not be the reason.
# - **Tuning.** The minimal kernel's tiles and stages are not tuned, and every block pays for the mask of the last one.

# %% [markdown]
# - **Programs.** With one head most of the GPU is idle at short N. FlashAttention-2 then cuts the keys among programs too, and merges (exercise 2.8). The
#   memory that it allocates for the parts gives that away: the next cell. The minimal kernel does not do that.

# %% [markdown]
# Bytes that FlashAttention-2 allocates beside its results, one head, D = 64:

# %%
for run in hardware.recorded():
    found = [row for row in run["workspace"] if (row["backend"], row["heads"]) == ("FLASH_ATTENTION", 1)]
    print(run["machine"]["gpu"], {row["seq_len"]: row["beside"] for row in found})
    assert found[-1]["beside"] < 0.01 * max(row["beside"] for row in found)  # at the longest it cuts no more

# %% [markdown]
# ## Summary, and what is left to explore
#
# - The query loop became the grid; the key loop stayed a loop. Slices became pointers with strides, short blocks became masks.
# - A masked load gives zeros, and a zero is a score of 0. Only $-\infty$ silences a key.
# - $\log_2 e$ in the scale, `exp2` in the loop, $\ln 2$ at the end.
# - Shared memory does not depend on N, and nothing is sliced. Both walls are gone.
# - A launch asks for $(M + 2NP)De$ bytes and writes $MDe + 4M$; L2 answers most of it.

# %% [markdown]
# What is missing: batch and heads, grouped queries, causal masks, head sizes that are no power of two, tuned tiles, a backward pass. Phase 4 adds all but
# the last; phase 5 adds that.
#
# Worth trying now: what does BLOCK_M = 128 with 4 warps do to the registers? Which of the four masks can you drop for N = 128 without the checker
# noticing? What happens to the PTX if you use `tl.exp`?

# %% [markdown]
# ## References
#
# - Tri Dao, Daniel Fu, Stefano Ermon, Atri Rudra, Christopher Ré, *FlashAttention*, NeurIPS 2022,
#   [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): Algorithm 1, and theorem 2 on HBM accesses.
# - Tri Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691): query blocks in parallel, division last.
# - Philippe Tillet, H. T. Kung, David Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations*, MAPL 2019.
# - Triton documentation, tutorial *Fused Attention*: the same loop with batch, heads, causal masks and autotuning.
# - NVIDIA, *PTX ISA*: `mma.sync`, `wgmma.mma_async`, `cp.async`, `ex2.approx`, `selp`.
# - flash-attention, `csrc/flash_attn/src/softmax.h` and `hopper/softmax.h`: the `lse` of a row without keys.
# - flash-attention issues 767, 1500 and 2611: addresses that overflow 32 bits.
