# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 3 · Minimal Triton kernel
#
# The loop of phase 2 becomes a GPU kernel. One head, no causal mask, no tuning; but any number of queries and keys, three dtypes,
# any strides, and it passes every case of the checker. Then you take it back to phase 1's two walls and look for them.

# %% [markdown]
# ## What you will be able to do
#
# - Translate a block algorithm into Triton, line by line: pointers for slices, masks for short blocks, one program for one block.
# - Say what each of the kernel's four masks protects, and what goes wrong without it.
# - Explain why the kernel computes $2^x$ where the derivation has $e^x$, and what that does to `lse`.
# - Read a kernel's cost off the compiler: shared memory, registers, tensor-core instructions; and find them in the PTX.
# - Predict the bytes it moves, exactly, and check the prediction.

# %% [markdown]
# ## What you need first
#
# Phase 1 (the two walls, and what a Triton program is) and phase 2 (the simulation, `m_i`, `l_i`, `acc`, `correction`). Without a
# GPU the kernel runs in Triton's interpreter, and the compiler's answers come from the real compiler: it needs no GPU.

# %%
import contextlib
import math

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference, simulation, schemes
from flashlab.attention.cost import naive_cost
from flashlab import runtime
from flashlab.figures import curves, memory, show
from flashlab.bench import triton as bench
from flashlab.check import verify_one_head
from flashlab.check.cases import Case
from flashlab.check.tolerance import truth, within
from flashlab.triton_tools.compile_report import TARGETS, compile_report, compile_reports
from flashlab.triton_tools.watch import OutOfBounds, hbm_traffic
from flashlab.attention.triton_minimal import (
    LOG2_E,
    _check,
    compile_arguments,
    default_block,
    flash_attention_forward,
    hbm_bytes,
)

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
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, D, generator=generator) for rows in (M, N, N))
    return [x.to(runtime.device(), dtype) for x in (q, k, v + 0.5)]


q, k, v = on_device(100, 150, 64)
o, lse = flash_attention_forward(q, k, v)
want, want_lse = oracle(q, k, v)
print("o right:", torch.allclose(o.cpu().double(), want, atol=2e-3), " lse right:", torch.allclose(lse.cpu().double(), want_lse))

# %% [markdown]
# So there is a kernel, and it is right on a ragged size. The rest of the lesson takes it apart.
#
# In phase 2 the outer loop went over blocks of query rows, and no iteration read what another had written. On a GPU that loop
# disappears: it becomes the *grid*. A launch with the grid `(P,)` starts P programs of the same code, each is told its number by
# `tl.program_id(0)`, and program $i$ takes the rows $i \cdot \mathrm{BLOCK\_M}$ to $(i+1) \cdot \mathrm{BLOCK\_M} - 1$. The inner loop,
# over keys, carries the state, so it stays a loop inside each program.
#
# For 100 queries and BLOCK_M = 64 that is two programs, and the second has 28 rows too many. Hold on to that thought.

# %% [markdown]
# ## 2 · Pointers for slices
#
# `K[start_n : start_n + BLOCK_N]` is Python. A kernel gets an address, `K_ptr`, and strides: how many elements to walk to the
# next row (`stride_kn`) and to the next column (`stride_kd`). A tile's addresses are one outer sum:
#
# $$\text{address}[i, j] = \mathrm{K\_ptr} + \mathrm{offs\_n}[i] \cdot \mathrm{stride\_kn} + \mathrm{offs\_d}[j] \cdot \mathrm{stride\_kd}$$
#
# Check it by hand on a 4 × 3 matrix, rows 1 and 2, once as it lies in memory and once transposed. No Triton needed: this is integer
# arithmetic.

# %%
def tile(memory, stride_row, stride_col, rows, cols):
    rows, cols = torch.tensor(rows), torch.tensor(cols)
    offsets = rows[:, None] * stride_row + cols[None, :] * stride_col  # [rows, cols]: rows down, columns across
    return offsets, memory[offsets]


K = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]])
flat = K.flatten()  # 10 11 12 20 21 22 ...
for name, matrix in (("K", K), ("K.T", K.T)):
    offsets, values = tile(flat, *matrix.stride(), rows=[1, 2], cols=[0, 1, 2])
    assert torch.equal(values, matrix[1:3, :3])
    print(f"{name:3s} strides {matrix.stride()}: offsets {offsets.tolist()} -> {values.tolist()}")

# %% [markdown]
# `[:, None]` makes a column, `[None, :]` a row, and the sum of a column and a row is a tile. The only change for the transposed
# matrix is the two strides: same memory, same kernel. That is why the launcher passes all eight of them (two each for Q, K, V, O)
# and copies nothing.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.2, 1.9))
for ax, (name, matrix) in zip(axes, (("K, strides (3, 1)", K), ("K.T, strides (1, 3)", K.T)), strict=True):
    offsets, _ = tile(flat, *matrix.stride(), rows=[1, 2], cols=[0, 1, 2])
    memory.words(ax, flat.tolist(), offsets.flatten().tolist(), f"rows 1 and 2 of {name}")
plt.show()

# %% [markdown]
# *The twelve numbers as they lie in memory; orange: the tile. A contiguous tile is one run of addresses, a transposed one is
# scattered, which costs 32-byte sectors, not correctness.*
#
# One trap is hidden in the formula. `offs_n * stride_kn` is computed in 32 bits if both factors are. A row index of 3 million times a
# stride of 1024 is more than $2^{31}$: the address wraps around and the kernel reads *something*, without an error. So the kernel's
# offsets are `int64`. (FlashAttention's tracker has this bug as issues 767, 1500 and 2611.)

# %%
row, stride = 3_000_000, 1024
wrapped = torch.tensor(row, dtype=torch.int32) * torch.tensor(stride, dtype=torch.int32)
print("as it should be:", row * stride, "  in 32 bits:", wrapped.item())
assert wrapped.item() == row * stride - 2**32

# %% [markdown]
# ## 3 · Masks for short blocks
#
# Python's slice stopped at the end of K by itself. `tl.arange(0, 64)` has 64 entries, always: a tile's shape is fixed when the
# kernel is compiled, and its sides are powers of two. So the last block reaches over the end, and every load and store says
# which elements are real. What happens if one does not? This copy kernel masks its store but not its load.

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


assert torch.equal(copy(q[:64]), q[:64])  # 64 rows: right
try:
    hbm_traffic(copy, q)  # 100 rows, watched
except OutOfBounds as error:
    print(error)

# %% [markdown]
# On a GPU, and in Triton's interpreter as it comes, nothing would have told you: the copy *is* right, since the extra rows are never
# stored. It reads 28 rows that belong to somebody else, and one day that somebody is an unmapped page. `hbm_traffic` runs a
# launcher interpreted and checks every address, on any machine. Make it a habit.
#
# Our kernel has four masks. Three are this kind of safety: the load of Q, the loads of K and V, the stores of O and lse. The
# fourth is different. Loading a masked key gives a row of zeros, and **a zero is not "nothing"**: its score is $q \cdot 0 = 0$, and
# $e^0 = 1$ is a full share of the softmax. Two real keys with scores of -3, and two that are only padding:

# %%
scores = torch.tensor([-3.0, -3.0])
values = torch.tensor([8.0, 4.0])
padded_scores, padded_values = torch.cat([scores, torch.zeros(2)]), torch.cat([values, torch.zeros(2)])
right = torch.softmax(scores, 0) @ values
wrong = torch.softmax(padded_scores, 0) @ padded_values
masked = torch.softmax(torch.where(torch.arange(4) < 2, padded_scores, -math.inf), 0) @ padded_values
print(f"right {right:.3f}   padding unmasked {wrong:.3f}   masked with -inf {masked:.3f}")
assert right == masked == 6.0 and wrong < 0.3

# %% [markdown]
# Hence `s = tl.where(in_range[None, :], s, float("-inf"))`, after the dot and before the maximum. Thirteen of seventeen public
# checkers that were tried pass a kernel without that line, because they test lengths that the tile divides.
#
# *Before you read on: V's tail is masked to zero too. With `p` already 0 there, is that mask needed?*
#
# <details><summary>Answer</summary>
#
# Yes. Whatever lies behind V's last row would be multiplied by 0, and $0 \cdot \text{NaN}$ is NaN, as is $0 \cdot \infty$. Memory that
# nobody initialised holds such things now and then, so the kernel would fail now and then: the worst kind.
#
# </details>

# %% [markdown]
# ## 4 · Two to the power of
#
# The GPU's special function unit has one exponential: `MUFU.EX2`, $2^x$. So $e^x$ is computed as $2^{x \log_2 e}$, and a kernel that
# calls `tl.exp` pays a multiplication for each element of each tile. But $s$ was multiplied by the softmax scale a line earlier. Fold
# $\log_2 e$ into that scale, once, outside the kernel:
#
# $$e^{\,\text{scale} \cdot (q \cdot k) - m} = 2^{\,(\text{scale} \cdot \log_2 e)(q \cdot k) - m'}, \qquad m' = m \log_2 e .$$
#
# All the statistics are then in units of base 2, and nothing else changes: `correction = exp2(m_i - m_new)`. Only the `lse` that
# leaves the kernel has to be natural again: $\text{lse} = (m' + \log_2 l) \cdot \ln 2$.
#
# Is the multiplication real? Two kernels that differ in one letter go to the compiler.

# %%
@triton.jit
def with_exp(x_ptr, y_ptr):
    i = tl.arange(0, 1024)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


@triton.jit
def with_exp2(x_ptr, y_ptr):
    i = tl.arange(0, 1024)
    tl.store(y_ptr + i, tl.exp2(tl.load(x_ptr + i)))


pointers = {"x_ptr": torch.float32, "y_ptr": torch.float32}
e, two = (compile_report(kernel, pointers, target="sm_90") for kernel in (with_exp, with_exp2))
for report in (e, two):
    print(f"{report.kernel}: {report.ptx.count('ex2.approx')} ex2 and {report.ptx.count('mul.f32')} multiplications a thread")
assert e.ptx.count("mul.f32") == 8 and two.ptx.count("mul.f32") == 0

# %% [markdown]
# ## 5 · The kernel
#
# Here it is whole. Read it once for the shape of it: load Q, start from the identity $(-\infty, 0, 0)$, loop, normalise, store.

# %%
# FROM flashlab.attention.triton_minimal: flash_attention_forward_kernel

# %% [markdown]
# And here line for line beside phase 2. The cell takes both sides from the source files, so the table cannot drift from the code.

# %%
PAIRS = [
    ("m_i = q.new_full([BLOCK_M], -math.inf)", 'm_i = tl.full([BLOCK_M], float("-inf"), tl.float32)'),
    ("acc = q.new_zeros([BLOCK_M, V.shape[1]])", "acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)"),
    ("for start_n in range(0, N, BLOCK_N):", "for start_n in range(0, N, BLOCK_N):"),
    ("k = K[start_n : start_n + BLOCK_N].float()", "k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0)"),
    ("s = scale * (q @ k.T)", 's = tl.dot(q, k.T, input_precision="ieee") * scale_log2'),
    ("m_new = torch.maximum(m_i, s.amax(dim=1))", "m_new = tl.maximum(m_i, tl.max(s, axis=1))"),
    ("p = torch.exp(s - m_new[:, None])", "p = tl.exp2(s - m_safe[:, None])"),
    ("correction = torch.exp(m_i - m_new)", "correction = tl.exp2(m_i - m_safe)"),
    ("l_i = l_i * correction + p.sum(dim=1)", "l_i = l_i * correction + tl.sum(p, axis=1)"),
    ("acc = acc * correction[:, None]", "acc = acc * correction[:, None]"),
    ("v = V[start_n : start_n + BLOCK_N].float()", "v = tl.load(v_ptrs, mask=in_range[:, None], other=0.0)"),
    ("acc = acc + p.to(V.dtype).float() @ v", 'acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")'),
    ("m_i = m_new", "m_i = m_new"),
    ("lse = m_i + torch.log(l_i)", "lse = (m_i + tl.log2(l_i)) * 0.6931471805599453"),
]
sources = [show.source_text(fn) for fn in (simulation.flash_attention_forward_sim, flash_attention_forward_kernel)]
assert all(left in sources[0] and right in sources[1] for left, right in PAIRS)
show.table([[f"`{left}`", f"`{right}`"] for left, right in PAIRS], ["phase 2, simulation", "phase 3, Triton"])

# %% [markdown]
# What the kernel has and the simulation has not:
#
# - **`m_safe`.** If every score of a row so far is $-\infty$, then `m_new` is too, and $-\infty - (-\infty)$ is NaN. Subtracting 0
#   instead gives $p = 0$: a row without a key ends as `o = 0`, `lse = -inf`. Here only an input with infinities gets there; with a
#   causal mask, in phase 4, ordinary inputs will. A NaN in a row of Q, by contrast, makes that row NaN, and no other: garbage is not hidden.
# - **`tl.dot(p, v, acc)`.** The third argument is what the product is added to: tensor cores multiply *and accumulate*.
# - **`p.to(v.dtype)`.** For a 16-bit tensor-core product both operands have 16 bits. `l_i` is summed before that rounding.
# - **`input_precision="ieee"`.** For float16 and bfloat16 it changes nothing. For float32, `tl.dot` would otherwise use TF32, which
#   keeps 10 bits of each operand's mantissa. A function that takes float32 should not return 3 digits.

# %%
q32, k32, v32 = on_device(64, 128, 64, torch.float32)
ieee = (flash_attention_forward(q32, k32, v32)[0].cpu() - oracle(q32, k32, v32)[0]).abs().max().item()
ten_bits = [(x.view(torch.int32) & -(2**13)).view(torch.float32) for x in (q32, k32, v32)]  # what TF32 keeps
tf32 = (oracle(*ten_bits)[0] - oracle(q32, k32, v32)[0]).abs().max().item()
print("error in float32 below 2e-6:", ieee < 2e-6, "  error that TF32 inputs alone would make above 2e-4:", tf32 > 2e-4)
assert ieee < 2e-6 and tf32 > 2e-4

# %% [markdown]
# ## 6 · The launcher, and what it refuses
#
# Around the kernel stands a Python function: it allocates `o` and `lse`, computes the grid, folds $\log_2 e$ into the scale, passes
# strides. And it checks, because a kernel cannot: with a wrong shape it would read the wrong memory and return numbers.

# %%
# FROM flashlab.attention.triton_minimal: flash_attention_forward (no docstrings)

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
# ## 7 · Is it right?
#
# Measured on N = 128, 256, 500 and 1024, and 4096 where a GPU runs it (the interpreter would take minutes): the largest and the mean
# absolute error against float64, the largest relative error, the cosine of the angle between the two outputs. 500 is there because
# 64 does not divide it.

# %% tags=["nbval-ignore-output"]
lengths = [128, 256, 500, 1024] + ([] if runtime.INTERPRETED else [4096])
outputs, rows = {}, []
for N in lengths:
    inputs = on_device(N, N, 64, seed=N)
    o, lse = (x.cpu().double() for x in flash_attention_forward(*inputs))
    want, want_lse = oracle(*inputs)
    outputs[N] = inputs, o, lse
    error = (o - want).abs()
    cosine = torch.nn.functional.cosine_similarity(o.flatten(), want.flatten(), dim=0)
    rows.append([N, error.max().item(), error.mean().item(), (error / want.abs()).max().item(),
                f"{cosine:.8f}"])
show.table(rows, ["N", "max abs", "mean abs", "max rel", "cosine"])

# %% [markdown]
# Are those numbers *good*? The error alone cannot tell: at N = 1024 an output averages a thousand values, so it is small, and so is
# everything wrong with it. (The largest relative error sits where an output happens to be near zero. It says little.) A usual verdict is
# "relative 1e-2 or absolute 1e-3, and a cosine above 0.999". Watch it accept an answer that is wrong in *every* element:

# %%
(inputs, o, lse), (want, _) = outputs[1024], oracle(*outputs[1024][0])


def usual_verdict(o, want):
    close = torch.allclose(o, want, rtol=1e-2, atol=1e-3)
    return close and torch.nn.functional.cosine_similarity(o.flatten(), want.flatten(), dim=0).item() > 0.999


def calibrated_verdict(o, lse, inputs):
    q, k, v = (x.cpu()[None, None] for x in inputs)
    right = truth(Case("", q.shape[2], k.shape[2], dtype=q.dtype, head_dim=q.shape[3]), q, k, v)
    return within(o[None, None], right.o, right.o_bound) and within(lse[None, None], right.lse, right.lse_bound)


for name, answer in (("ours", o), ("ours, 0.5 % too large everywhere", 1.005 * o)):
    print(f"{name}: usual {usual_verdict(answer, want)}, calibrated {calibrated_verdict(answer, lse, inputs)}")

# %% [markdown]
# The calibrated verdict is the checker's. It bounds each element by what rounding P to 16 bits can do to *that* element, and the
# largest error by twice that of an eager fp16 attention, against float64. Nothing in it is a guess, and nothing in it is loose.

# %%
for N in (128, 256, 500, 1024):
    inputs, o, lse = outputs[N]
    verdict = calibrated_verdict(o, lse, inputs)
    print(f"N = {N:4d}: o and lse within the calibrated bound: {verdict}")
    assert verdict

# %% [markdown]
# Random inputs of four sizes are still friendly. The checker's cases are not: maxima that rise in every block, scores near ±200,
# hugely negative scores, one key, one query, strided tensors with NaN in between.

# %%
report = verify_one_head(flash_attention_forward, dtypes=(torch.float16, torch.bfloat16, torch.float32))
print(report.verdict)

# %% [markdown]
# ## 8 · The physical wall, again
#
# Phase 1's scheme A kept all of K and V on chip, and died of shared memory at N = 256 or so. The compiler is asked about both
# kernels, over N, for five targets.

# %%
lengths = [64, 128, 256, 512, 1024, 4096, 2**20]
minimal = compile_reports(flash_attention_forward_kernel, [compile_arguments(torch.float16, 64, N) for N in lengths])
shared = {target: [r.shared_bytes for r in minimal if r.target == target] for target in TARGETS}
for target, needed in shared.items():
    assert len(set(needed)) == 1 and needed[0] <= runtime.limits(target).shared_per_block
    tiles = needed[0] // (64 * 64 * 2)
    limit = runtime.limits(target).shared_per_block
    print(f"{target}: {needed[0]} bytes for every N up to {lengths[-1]}, that is {tiles} tiles; the limit is {limit}")

# %% [markdown]
# Flat. N is not in the kernel's shapes, so it is not in its shared memory. Count the tiles of 64 × 64 × 2 = 8192 bytes: on sm_90 seven, one of
# Q and three stages of K and V each (`num_stages=3`: two blocks on their way while one is computed with); elsewhere five, with two stages.

# %%
scheme_a_lengths = [64, 128, 256, 512, 1024]
scheme_a = schemes.scheme_a_reports(scheme_a_lengths, 64, ["sm_90"])
lines = [("scheme A", scheme_a_lengths, [r.shared_bytes / 1024 for r in scheme_a], "red", "s-")]
for target, marker, hue in (("sm_90", "o-", "blue"), ("sm_120", "^-", "green")):
    lines.append((f"minimal kernel, {target}", lengths[:-1], [b / 1024 for b in shared[target]][:-1], hue,
                 marker))
figure, ax = plt.subplots(figsize=(7.4, 3.8))
curves.curves(ax, lines, log="xy", xticks=lengths[:-1], yticks=[8, 16, 32, 64, 128, 256],
              legend="lower right", xlabel="N, number of keys", ylabel="shared memory per program (KiB)",
              title="The physical wall, D = 64, float16")
for target in ("sm_120", "sm_80", "sm_90"):
    curves.level(ax, runtime.limits(target).shared_per_block / 1024, f"limit of {target}")
plt.show()

# %% [markdown]
# *Shared memory of one program against the number of keys, both axes logarithmic. Scheme A grows with N through each GPU's limit
# (dashed; sm_86 and sm_89 have sm_120's); the minimal kernel does not depend on N. With D = 64 scheme A lasts twice as long as with
# phase 1's D = 128.*

# %% [markdown]
# ## 9 · The logical wall, again
#
# Scheme B failed because Triton does not slice a tensor. Does this kernel slice one? Rather than trust our eyes, ask Python's
# parser for every `[...]` in the kernel.

# %%
import ast

tree = ast.parse(show.source_text(flash_attention_forward_kernel))
found = {ast.unparse(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
print("subscripts in the kernel:", sorted(found))
assert found == {"(:, None)", "(None, :)"} or found == {":, None", "None, :"}

# %% [markdown]
# Only `[:, None]` and `[None, :]`: they add an axis, move nothing, and the compiler likes them. The one thing that is ever cut is a matrix
# *in HBM*, by adding `start_n` to row numbers before the load. The block of P that meets V in an iteration was computed in that same
# iteration, so there is nothing to cut out of anything. That is the answer to the course's second question, now as code.

# %% [markdown]
# ## 10 · What the compiler made of it
#
# PTX is the GPU's assembly language, as far as NVIDIA documents it. Before looking, predict. One tile product is
# $64 \times 64 \times 64$ multiply-adds. On sm_80 the tensor-core instruction is `mma.m16n8k16`, one warp each; on sm_90 `wgmma.m64n64k16`,
# four warps together. The program has 4 warps, 128 threads, so a thread holds $64 \cdot 64 / 128 = 32$ elements of `s` and of `acc`,
# and 2 of the 64 rows' statistics.

# %%
by_target = {r.target: r.ptx for r in minimal}
mma = 2 * (64 // 16) * (64 // 8) * (64 // 16) // 4  # two products, shared out to four warps
wgmma = 2 * (64 // 16)  # two products, all four warps at once
expected = {
    "tensor-core products": ({"sm_80": "mma.sync", "sm_90": "wgmma.mma_async"}, {"sm_80": mma, "sm_90": wgmma}),
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
# Every count is the prediction. Now look at the lines themselves, with what each stands for. (The register names differ from one compiler to
# the next, so this cell's output is not compared by the tests.)

# %% tags=["nbval-ignore-output"]
ptx = by_target["sm_90"].splitlines()


def first(text, lines=1):
    at = next(i for i, line in enumerate(ptx) if text in line)
    return "\n".join(line.strip()[:96] for line in ptx[at : at + lines])


print("load of K, masked:   ", first("selp.b32"))
print("                     ", first("cp.async.cg"))
print("q @ k.T:             ", first("wgmma.mma_async"))
print("mask of the scores:  ", first(", 0fFF800000, %p"))
print("exp2:                ", first("ex2.approx"))
print("acc / l_i:           ", first("div.full"))
print("store of O, masked:  ", first("st.global"))

# %% [markdown]
# Two ways of masking. A *load* turns its mask into a size: `selp.b32 %r, 16, 0, %p` picks 16 or 0 bytes, and `cp.async` fills the rest
# with zeros. The *scores* are selected one by one, `selp.f32 x, s, -inf, p`. A *store* is predicated: `@%p st.global`.
#
# These 32 selections run in every iteration, though only the last block can need them. That is the price of one loop for all blocks; phase 4
# takes the last block out. And the only division of the loop is none: it happens once, 32 elements a thread, after it.

# %% [markdown]
# ### Warps and stages
#
# Two launch options decide what a program occupies. `num_warps` shares the tile out to more threads: fewer registers each. `num_stages` is how
# deep loads run ahead: more shared memory. Both are free of charge in correctness, so they are what autotuning (phase 4) tries out.

# %% tags=["nbval-ignore-output"]
options = [{"num_warps": w, "num_stages": s} for w in (4, 8) for s in (1, 2, 3, 4)]
arguments = [compile_arguments(torch.float16, 128) | option for option in options]
reports = compile_reports(flash_attention_forward_kernel, arguments, targets=["sm_86", "sm_90"])
rows = []
for option, here, there in zip(options, reports[::2], reports[1::2], strict=True):
    cells = [f"{r.shared_bytes // 1024} KiB{'' if r.fits else ' (too much)'}, {r.registers} registers" for r in (here, there)]
    rows.append([option["num_warps"], option["num_stages"], *cells])
print("D = 128, triton", triton.__version__)
show.table(rows, ["num_warps", "num_stages", "sm_86, limit 99 KiB", "sm_90, limit 227 KiB"])

# %% [markdown]
# Read a row as a budget. An SM has 64 Ki registers and one pool of shared memory; what one program takes decides how many fit beside each
# other, and several programs on an SM are how a GPU hides its waiting. Four stages at D = 128 buy nothing on sm_86: they do not start.

# %%
too_deep = compile_report(flash_attention_forward_kernel, compile_arguments(torch.float16, 128), target="sm_86", num_stages=4)
print("sm_86, D = 128, 4 stages: it compiles:", too_deep.ok, " it can be launched:", too_deep.fits)
assert too_deep.ok and not too_deep.fits

# %% [markdown]
# ## 11 · The bytes, to the last one
#
# What does a launch move between HBM and the chip? Program $i$ reads its rows of Q once, and all of K and V. So with
# $P = \lceil M / \mathrm{BLOCK\_M} \rceil$ programs and $e$ bytes an element
#
# $$\text{read} = (M + 2NP)\,D\,e, \qquad \text{written} = M D e + 4M .$$
#
# The interpreter counts every byte that an unmasked lane touches. The counts must be *equal*.

# %%
for M, N, BLOCK_M in ((128, 128, 64), (256, 256, 64), (100, 150, 64), (256, 256, 128)):
    inputs = on_device(M, N, 64)
    traffic = hbm_traffic(flash_attention_forward, *inputs, BLOCK_M=BLOCK_M)
    predicted = hbm_bytes(M, N, 64, 2, BLOCK_M)
    assert (traffic.bytes_read, traffic.bytes_written) == predicted
    print(f"M={M} N={N} BLOCK_M={BLOCK_M}: read {traffic.bytes_read}, written {traffic.bytes_written}, as predicted: True")

# %% [markdown]
# K alone was read by every program: at M = 256 four times with BLOCK_M = 64 and twice with 128. That is the knob: **the traffic of K and V
# falls as BLOCK_M grows**, and BLOCK_N changes nothing. Against the naive four lines of phase 1, which write and read the N × N matrix:

# %%
rows = []
for N in (256, 1024, 4096, 16384):
    naive, flash = naive_cost(N, 64).bytes, sum(hbm_bytes(N, N, 64, 2))
    rows.append([N, naive / 1e6, flash / 1e6, f"{naive / flash:.1f}"])
show.table(rows, ["N", "naive, MB", "minimal kernel, MB", "ratio"])
assert 2.9 < rows[-1][1] / rows[-1][2] < 3

# %% [markdown]
# The ratio settles at $3\,\mathrm{BLOCK\_M}/D$: naive attention moves the matrix six times ($6N^2e$), the kernel moves K and V once for each
# query block ($2N^2De/\mathrm{BLOCK\_M}$). Three may look modest. But it is three with this BLOCK_M, and on a GPU much of the kernel's traffic
# never reaches HBM: programs that run at the same time read the same K and V, and find them in the L2 cache. The naive matrix has
# nothing to share.

# %% [markdown]
# ## 12 · How fast?
#
# One head is a small job: at N = 1024 it is 16 programs, and an H200 has 132 multiprocessors. Keep that in mind when you compare. With a
# GPU, this cell measures four lengths here and now; without one it shows the figures recorded on the machine it names.

# %% tags=["nbval-ignore-output"]
if runtime.INTERPRETED:
    runs = bench.recorded()
    if not runs:
        print("No GPU here and no recorded run: on a GPU this cell times the kernel, unfused PyTorch and FlashAttention-2.")
else:
    runs = [bench.run(lengths=(512, 1024, 4096, 16384), head_dims=(64,))]
for run in runs:
    machine = run["machine"]
    print(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}; D = 64, TFLOP/s (median)")
    by_length = {}
    for row in run["rows"]:
        if row["head_dim"] == 64:
            by_length.setdefault(row["seq_len"], {})[row["name"]] = f"{row['tflops']:.1f}" if "tflops" in row else "none"
    names = list(next(iter(by_length.values())))
    show.table([[n, *(found[name] for name in names)] for n, found in by_length.items()], ["N", *names])

# %% [markdown]
# Do not take these for the kernel's last word. Most of the GPU is idle at one head, tiles and stages are not tuned, and every block pays for
# masks that only the last one needs.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - The query loop became the grid; the key loop stayed a loop. Slices became pointers with strides, short blocks became masks.
# - A masked load gives zeros, and a zero is a score of 0. Only $-\infty$ silences a key.
# - $\log_2 e$ in the scale, `exp2` in the loop, $\ln 2$ at the end.
# - Shared memory does not depend on N: seven tiles on sm_90, five elsewhere. Nothing is sliced. Both walls are gone.
# - HBM traffic is $(M + 2NP)De$ read and $MDe + 4M$ written, counted and equal.
#
# What is missing, honestly: batch and heads (a launch per head would starve the GPU), grouped queries, causal masks and the skipping
# they allow, head sizes that are no power of two, tuned tiles, a backward pass. Phase 4 adds all but the last; phase 5 adds that.
#
# Worth trying now: what does BLOCK_M = 128 with 4 warps do to the registers? Which of the four masks can you drop for N = 128 without
# the checker noticing, and why is that no argument? What happens to the PTX if you use `tl.exp`?

# %% [markdown]
# ## References
#
# - Tri Dao, Daniel Fu, Stefano Ermon, Atri Rudra, Christopher Ré, *FlashAttention*, NeurIPS 2022,
#   [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): Algorithm 1, and theorem 2 on HBM accesses.
# - Tri Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691): query blocks in parallel, division last.
# - Philippe Tillet, H. T. Kung, David Cox, *Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations*, MAPL 2019.
# - Triton documentation, tutorial *Fused Attention*: the same loop with batch, heads, causal masks and autotuning.
# - NVIDIA, *PTX ISA*: `mma.sync`, `wgmma.mma_async`, `cp.async`, `ex2.approx`, `selp`.
# - Markus Rabe, Charles Staats, *Self-attention Does Not Need O(n²) Memory*, 2021, [arXiv:2112.05682](https://arxiv.org/abs/2112.05682).
# - flash-attention issues 767, 1500 and 2611: addresses that overflow 32 bits.
