# %% [markdown]
# # Phase 1 · Naive attention and the two walls
#
# Four lines of PyTorch compute attention. They also write a matrix of $N^2$ numbers to memory and read it back, three times over.
#
# In this lecture you count what that costs. Then you try the two obvious repairs as real Triton kernels, and each runs into a wall. The
# first is made of hardware: shared memory. The second is made of language: Triton does not slice a tensor. FlashAttention goes around
# both.

# %% [markdown]
# ## What you will be able to do
#
# - count the bytes and FLOPs of naive attention, and check the count;
# - place a kernel on the roofline of a GPU;
# - read and write a small Triton kernel: programs, pointers, masks;
# - predict at which length each GPU refuses scheme A;
# - ask the Triton compiler what a kernel needs on a GPU you do not have;
# - say why Triton does not slice a tensor, and what the ways around it do not solve.

# %% [markdown]
# ## What you need first
#
# Phase 0: the safe softmax, and the state $(m, \ell)$ of a row. No Triton: section 5 is a primer. No GPU: without one the kernels run
# in Triton's interpreter, and the compiler answers for GPUs that are not here.
#
# Nothing later needs the appendix, which is about 40 minutes of the lecture.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import attainable_tflops, fused_cost, naive_cost, naive_peak_bytes, trace_ops
from flashlab.bench import hardware, published, walls
from flashlab.check import verify_one_head
from flashlab.figures import curves, memory, show
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
#
# One head is enough for this lecture. $Q$, $K$, $V$ are $[N, D]$: $N$ tokens (`seq_len`), and $D$ numbers per token (`head_dim`).

# %%
# FROM flashlab.attention.naive: naive_attention (no docstrings)
q, k, v = torch.randn(3, 1, 1, 100, 64, dtype=torch.float64)
want, _ = reference.attention(q, k, v)
torch.testing.assert_close(naive_attention(q, k, v), want)
print("four lines = the oracle: True")

# %% [markdown]
# It is right. So why does nobody run it? Before you read on, commit to a guess.
#
# *Take $N = 4096$, $D = 128$, fp16. Which of the four lines moves the most bytes between the GPU's main memory (HBM) and the chip?
# And which computes the most?*
#
# <details><summary>Answer</summary>
#
# The scaling and the softmax move the most: each reads $N^2$ numbers and writes $N^2$ numbers, and between them they do about 1 % of the
# arithmetic. The two matrix products do the rest of the arithmetic, and each moves about half as much. A line that looks like nothing,
# `scores * scale`, costs a third of the traffic.
#
# </details>

# %% [markdown]
# ## 2. What each line costs
#
# Eager PyTorch runs each line as one kernel. It reads its inputs from HBM and writes its result there. With $e$ bytes per number, and a
# multiply-add as 2 FLOPs (floating-point operations):
#
# | line | reads | writes | FLOPs |
# |---|---|---|---|
# | $S = QK^\top$ | $2ND\,e$ | $N^2 e$ | $2N^2D$ |
# | $S \cdot \text{scale}$ | $N^2 e$ | $N^2 e$ | $N^2$ |
# | $P = \mathrm{softmax}(S)$ | $N^2 e$ | $N^2 e$ | $5N^2$ |
# | $O = PV$ | $(N^2 + ND)\,e$ | $ND\,e$ | $2N^2D$ |
#
# (The softmax: max, subtract, exp, sum, divide.) Now with numbers:

# %%
N, D = 4096, 128
cost = naive_cost(N, D)
rows = [(x.line, x.bytes_read / 1e6, x.bytes_written / 1e6, x.flops / 1e9) for x in cost.lines]
total = ("sum", cost.bytes_read / 1e6, cost.bytes_written / 1e6, cost.flops / 1e9)
show.table([*rows, total], ["line", "MB read", "MB written", "GFLOP"])

# %% [markdown]
# The same as a picture, one bar per line of the program. Blue is an $N \times N$ matrix on its way. What the problem asks for, $Q$, $K$ and
# $V$ in and $O$ out, are the four thin slices in light blue.

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
# That table is a claim about PyTorch, so test it on PyTorch. `trace_ops` watches every operation that torch dispatches, and adds up the
# tensors it takes and makes. The counts must equal the formula line by line. PyTorch's own counter has the FLOPs of the two products.

# %%
from torch.utils.flop_counter import FlopCounterMode

q, k, v = torch.randn(3, 512, 64, dtype=torch.float16)
with FlopCounterMode(display=False) as counter:
    ops = trace_ops(naive_attention, q, k, v)
for op, line in zip(ops, naive_cost(512, 64).lines, strict=True):
    assert (op.bytes_read, op.bytes_written) == (line.bytes_read, line.bytes_written)
    print(f"{line.line:33} {op.name:8} reads {op.bytes_read:8} writes {op.bytes_written:8} = formula")
print("FLOPs of the products:", counter.get_total_flops(), "= 4·N²·D:", 4 * 512 * 512 * 64)
assert counter.get_total_flops() == 4 * 512 * 512 * 64

# %% [markdown]
# ### Do these bytes reach HBM?
#
# So far "bytes" are **sizes of tensors**. Between HBM and the cores lies a cache, the **L2** (60 MiB on an H200). What one line has just written
# may still be there when the next one reads it, and then it makes no trip to HBM.
#
# NVIDIA's profiler `ncu` counts what HBM really moves (its DRAM counters). The package holds **records** of it:
# figures measured on the GPU that the output names. This one has one head, $D = 64$, at two lengths: the $N \times N$
# matrix of the first fits in the L2, that of the second is far too large.

# %%
rows = []
for run in hardware.recorded():
    for name in ("naive, in L2", "naive"):
        kernels = [r for r in run["traffic"] if r["launch"] == name]
        n, first = kernels[0]["shape"][2], kernels[0]
        formula = first["formula_read"] + first["formula_written"]
        counted = sum(r["kept_read"] + r["kept_written"] for r in kernels)
        rows.append((run["machine"]["gpu"], n, n * n * 2 / 1e6, formula / 1e6, counted / 1e6,
                     first["compulsory_bytes"] / 1e6))
        assert abs(counted / formula - 1) < 0.05 if name == "naive" else counted <= first["compulsory_bytes"]
show.table(rows, ["GPU", "N", "MB of S", "MB by formula", "MB of DRAM, by ncu", "MB of Q, K, V and O"])

# %% [markdown]
# At $N = 2048$ the matrix stays in the L2: DRAM moves no more than $Q$, $K$, $V$ and $O$. At $N = 16384$ it cannot stay, and DRAM moves what the
# formula says.
#
# So "bytes moved" in this course are bytes that a program *asks for*. HBM moves as many where the tensors are larger than the L2. With many heads at once
# they usually are.

# %% [markdown]
# ## 3. Arithmetic intensity and the roofline
#
# Is that much traffic bad? It depends on how much arithmetic comes with it. **Arithmetic intensity** is FLOPs per byte moved. For large
# $N$ only the $N^2$ terms matter:
#
# $$I_{\text{naive}} \to \frac{4 N^2 D + 6 N^2}{6 N^2 \cdot 2} \approx \frac{D}{3}
# \qquad\text{while}\qquad
# I_{\text{fused}} = \frac{4N^2D + 6N^2}{4 N D \cdot 2} \approx \frac{N}{2}$$
#
# if one kernel did all four lines, and the $N \times N$ matrix never left the chip. A longer sequence does not help the naive way.

# %%
for seq_len in (512, 4096, 32768):
    naive, fused = naive_cost(seq_len, 128), fused_cost(seq_len, 128)
    print(f"N = {seq_len:5}: naive {naive.intensity:5.1f} FLOPs per byte (limit {(4 * 128 + 6) / 12:.1f}), "
          f"fused {fused.intensity:8.1f} (about N/2 = {seq_len // 2})")
assert naive_cost(10**6, 128).intensity < 43.2 and fused_cost(4096, 128).intensity > 2048

# %% [markdown]
# A GPU that computes at most $F$ FLOP/s and moves at most $B$ byte/s runs code of intensity $I$ at no more than $\min(F, I \cdot B)$. That
# is the **roofline** (Williams, Waterman and Patterson, 2009). It has a slope where memory is the bound, a flat roof where arithmetic is,
# and a ridge at $I = F/B$ between them.
#
# *Predict:* the H200 has more bandwidth than the H100, and the same tensor cores (the units that multiply matrices). Which part of its
# roofline moves?
#
# <details><summary>Answer</summary>
#
# The slope moves up, the roof stays. So naive attention gets faster on the H200, in proportion to its bandwidth, and a kernel that is
# bound by arithmetic gains nothing.
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
assert all(points["naive\nD = 128"] < runtime.GPUS[name].ridge < points["fused\nN = 4096"] for name in shown)
best = attainable_tflops(points["naive\nD = 128"], runtime.GPUS["H100"]) / runtime.GPUS["H100"].fp16_tflops
print(f"naive attention at D = 128 uses at most {best:.0%} of an H100's tensor cores")

# %% [markdown]
# Naive attention is left of every ridge: memory-bound. Fused attention is right of every ridge. The faster the arithmetic of a GPU is compared
# with its memory, the worse the naive way fits it. (These are ceilings, from datasheets; real kernels stay below.)

# %% [markdown]
# ## 4. The $N^2$ matrix, in memory
#
# Bandwidth costs time. Capacity is a harder limit: what does not fit does not run. So ask of the four lines what is alive when each of them
# ends. On line 4 the variable `scores` still holds its matrix, while `probabilities` and the result exist too:
#
# $$\text{peak} = (\underbrace{N^2}_{S} + \underbrace{N^2}_{P} + \underbrace{ND}_{O})\, e \quad\text{per head.}$$
#
# `trace_ops` also adds up what is alive after each operation, so the claim can be checked to the byte.

# %%
for op in ops:
    matrices = op.live_bytes / (512 * 512 * 2)
    print(f"{op.name:8} ends with {op.live_bytes:8} bytes alive = {matrices:.3f} matrices of N × N")
assert max(op.live_bytes for op in ops) == naive_peak_bytes(512, 64)

# %% [markdown]
# Now a real GPU. The record holds naive attention beside the fused kernel that PyTorch has built in, FlashAttention-2, on the same shapes.
#
# **What is timed:** the kernels on the GPU, not Python's launches. Each function is recorded once as a *CUDA graph*, a list of kernels that
# the GPU replays without Python. The graphs are replayed in turns; a point is the median. (`flashlab bench walls` adds your GPU.)

# %%
for run in walls.recorded():
    m, s, time, peak = run["machine"], run["shape"], [], []
    n = sorted({r["seq_len"] for r in run["lengths"]})
    for key, hue, name in (("naive", "grey", "naive"), ("fused", "orange", "FlashAttention-2")):
        kept = [r for r in run["lengths"] if r["name"] == key]
        time.append((name, n[: len(kept)], [r["ms"] for r in kept], hue, "o-"))
        peak.append((name, n[: len(kept)], [r["peak_bytes"] / 2**20 for r in kept], hue, "o-"))
    formula = [r["predicted_peak_bytes"] / 2**20 for r in run["lengths"] if r["name"] == "naive"]
    peak.append(("formula", n, formula, "black", "x"))
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2))
    curves.curves(left, time, log="xy", xticks=n, title="Time of the kernels", xlabel="N", ylabel="ms")
    curves.curves(right, peak, log="xy", xticks=n, title="Peak memory", xlabel="N", ylabel="MiB")
    fig.suptitle(f"{m['gpu']}: {s['heads']} heads, D = {s['head_dim']}, fp16", fontsize=10)
    plt.show()
print("GPUs recorded:", len(walls.recorded()))

# %% [markdown]
# Naive's peak (grey) lies on the formula (black crosses) to the byte, at every length: no kink there. FlashAttention-2's (orange) has one. At the
# smallest length it takes *more* memory than at the next. Why? What it must allocate is $O$ and one `lse` per row. See what is beside them:

# %%
for run in walls.recorded():
    heads, d = run["shape"]["heads"], run["shape"]["head_dim"]
    naive, fused = ([r for r in run["lengths"] if r["name"] == name] for name in ("naive", "fused"))
    assert all(r["peak_bytes"] == r["predicted_peak_bytes"] for r in naive)
    for r in fused:
        n = r["seq_len"]
        beside = r["peak_bytes"] - heads * n * (d * 2 + 4)  # o in fp16, lse in float32
        splits, rest = divmod(beside, heads * n * (d + 1) * 4)  # a partial o and lse in float32, per split
        print(f"N = {n:5}: {beside:8} bytes beside the result = {splits} partial results + {rest} bytes")
        assert rest <= 4096 and splits != 1

# %% [markdown]
# At the smallest length it keeps partial results. Heads times blocks of queries are too few there to fill the GPU, so FlashAttention-2 divides the
# *keys* too (**split-KV**). Each split writes its own $O$ and `lse` in float32, and a second kernel merges them, as phase 0's `merge` does.
# (Appendix C counts the splits.)

# %% [markdown]
# Naive's *time* has a kink: from $N = 8192$ to 16384 it grows less than fourfold. Which of the four lines is it? PyTorch's profiler times each
# kernel:

# %%
for run in hardware.recorded():
    rows = []
    for n in sorted({r["seq_len"] for r in run["naive"]}):
        of = [r for r in run["naive"] if r["seq_len"] == n]  # scores, scale, softmax, output
        rows.append((n, *(round(r["microseconds"]) for r in of), re.search(r"(\w+)<", of[2]["kernel"])[1]))
    show.table(rows, ["N", "scores, µs", "scale, µs", "softmax, µs", "output, µs", "softmax kernel"])
    assert rows[-1][3] < 2.5 * rows[-2][3] and all(rows[-1][i] > 3.5 * rows[-2][i] for i in (1, 2, 4))
print("GPUs recorded:", len(hardware.recorded()))

# %% [markdown]
# It is the softmax. PyTorch has several kernels for it and chooses by the row's length; the one for the longest rows is the faster one. The other three
# lines take four times as long, as they should.

# %% [markdown]
# FlashAttention-2's memory grows like $N$, naive's like $N^2$. A context of 100 000 tokens, 16 heads, fp16: $16 \cdot 10^{10} \cdot 2$ bytes
# are 320 GB for one matrix. No faster memory saves this. **The matrix has to go.**

# %% [markdown]
# ## 5. A Triton primer
#
# To keep the matrix on the chip we have to write a kernel. First the machine, from the bottom of the figure up:
#
# - **HBM** is large and slow; the **L2** cache is in front of it.
# - The chip has many **multiprocessors** (SM, streaming multiprocessors), each with a **shared memory**.
# - A multiprocessor runs many **threads**. Each has **registers**, the fastest memory. No thread can address another's.
# - 32 threads form a **warp**: they execute each instruction together.

# %%
memory.machine(runtime.GPUS["H200"])
plt.show()

# %% [markdown]
# A Triton **program** is one instance of a kernel. It runs on one multiprocessor, on four warps unless one says otherwise. You write what the
# whole program does with a **tile**, a small array. Triton spreads its elements over the threads' registers.
#
# A launch starts a **grid** of programs. All run the same code, and `tl.program_id(0)` tells each its number. They run in any order, at the same
# time or not, and do not see each other.

# %% [markdown]
# ### A first kernel: add two vectors
#
# `x_ptr` is a **pointer**, the address of the first element, and `x_ptr + i` is the address of element `i`. With a tile of indices it is a tile of
# addresses.
#
# - `tl.arange(0, BLOCK)` is the tile $0, 1, \dots, \mathrm{BLOCK} - 1$. Its length is a power of two.
# - `tl.load(addresses, mask=, other=)` reads where the mask is true, and takes `other` elsewhere. `tl.store` writes where it is true.
# - `BLOCK: tl.constexpr` is known to the compiler, as a tile's shape must be. Another value is another compilation.

# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the indices of this program's elements
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    y = tl.load(y_ptr + i, mask=i < N, other=0.0)
    tl.store(out_ptr + i, x + y, mask=i < N)

# %% [markdown]
# Ten numbers in blocks of four are three programs. The third has two indices too many, 10 and 11: the mask keeps it from reading and writing
# memory that is not ours. A launch names the kernel, its grid in square brackets, and
# its arguments; a tensor passes its pointer.

# %%
x = torch.arange(1.0, 11.0, device=device)  # 1 to 10
y = 10 * x
out = torch.full((12,), -1.0, device=device)  # two more than are written
add_kernel[(3,)](x, y, out, 10, BLOCK=4)
print(out.tolist())
assert out.tolist() == [11.0 * i for i in range(1, 11)] + [-1.0, -1.0]

# %% [markdown]
# ### Two dimensions: strides and row sums
#
# Memory has one dimension. The **stride** of an axis is how many elements lie between neighbours along it. A contiguous matrix of 3 columns has
# strides (3, 1); its transpose has (1, 3), and shares the memory.
#
# The addresses of a tile are an outer sum. `rows[:, None]` is a column, `cols[None, :]` is a row, and column plus row is a tile:
#
# $$\text{address}[i, j] = \text{x\_ptr} + \text{rows}[i] \cdot \text{stride\_row} + \text{cols}[j] \cdot \text{stride\_col}$$

# %%
@triton.jit
def row_sum_kernel(
    x_ptr, out_ptr, stride_row, stride_col, ROWS, COLS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_ptrs = x_ptr + rows[:, None] * stride_row + cols[None, :] * stride_col  # [BLOCK_M, BLOCK_N]
    inside = (rows[:, None] < ROWS) & (cols[None, :] < COLS)
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    tl.store(out_ptr + rows, tl.sum(x, axis=1), mask=rows < ROWS)  # one sum per row

def row_sum(x):
    out = torch.empty(len(x), device=x.device)
    row_sum_kernel[(triton.cdiv(len(x), 2),)](x, out, *x.stride(), *x.shape, BLOCK_M=2, BLOCK_N=8)
    return out.tolist()

# %% [markdown]
# Check it by hand: five rows of three numbers, two rows per program. The transpose needs no other kernel, only its own strides.
# (`triton.cdiv` divides and rounds up.)

# %%
x = torch.tensor([[1.0, 2, 3], [10, 20, 30], [100, 200, 300], [4, 5, 6], [7, 8, 9]], device=device)
print("rows   ", row_sum(x))
print("columns", row_sum(x.T))
assert row_sum(x) == [6, 60, 600, 15, 24] and row_sum(x.T) == [122, 235, 348]

# %% [markdown]
# ### Blocks in a loop: row maxima
#
# A tile cannot be as long as any row, so long rows are read in blocks. `tl.full` and `tl.zeros` make the tile that the loop starts with;
# `tl.maximum` takes the larger of two tiles, element by element; `tl.max` reduces one axis.
#
# *Before you run it: the load's `other` is $-\infty$ here. What would 0 do?*
#
# <details><summary>Answer</summary>
#
# The padding of the last block would count as zeros. The maximum of a row of negative numbers would be 0. Masked elements must be *neutral*:
# 0 in a sum, $-\infty$ in a maximum, and $-\infty$ for a score, because $e^{-\infty} = 0$.
#
# </details>

# %%
@triton.jit
def row_max_kernel(x_ptr, out_ptr, stride_row, COLS, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)  # one row per program
    m = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for start in range(0, COLS, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * stride_row + cols, mask=cols < COLS, other=float("-inf"))
        m = tl.maximum(m, x)
    tl.store(out_ptr + row, tl.max(m, axis=0))

x = torch.tensor([[-3.0, -1, -4, -1, -5], [-2.0, -7, -1, -8, -2]], device=device)
out = torch.empty(2, device=device)
row_max_kernel[(2,)](x, out, x.stride(0), 5, BLOCK_N=2)
assert out.tolist() == [-1, -1]
print(out.tolist())

# %% [markdown]
# ### A product of tiles
#
# `tl.dot(a, b, acc)` is `acc + a @ b`, on the tensor cores. No side of a tile may be shorter than 16. The operands are fp16 or bf16 here, the
# sum is float32.
#
# Below, `a` is twice the identity matrix, so the product is twice `b`.

# %%
@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]  # a contiguous square matrix
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    acc = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), acc)
    tl.store(c_ptr + at, acc)

a = 2 * torch.eye(16, dtype=torch.float16, device=device)
b = torch.arange(256, device=device).reshape(16, 16).half()
c = torch.empty(16, 16, device=device)
dot_kernel[(1,)](a, b, c, SIZE=16)
print(c[:2, :4].tolist())
assert torch.equal(c, 2 * b.float())

# %% [markdown]
# ### Where does it run?
#
# With a GPU these kernels were compiled. Without one they ran in Triton's **interpreter**, which is Python and numpy: right, slow, and more
# lenient than a GPU.
#
# The compiler itself needs no GPU. `compile_report` asks it about any **target**, a generation of multiprocessors: `sm_80` is NVIDIA's name for the
# A100's, `sm_90` for the H100's and H200's, `sm_120` for the RTX 50 cards'.

# %% [markdown]
# The generations have different instructions for a product of tiles. Triton chooses `wgmma` on `sm_90` (four warps together, operands straight
# from shared memory), and `mma.sync` (one warp, operands in registers) on the others.

# %%
pointers = {"a_ptr": torch.float16, "b_ptr": torch.float16, "c_ptr": torch.float32}
for target in ("sm_80", "sm_90", "sm_120"):
    r = compile_report(dot_kernel, pointers | {"SIZE": 64}, target=target)
    used = [name for name in ("wgmma", "mma.sync") if name in r.ptx.replace("wgmma.mma_async.sync", "wgmma")]
    print(f"{target}: {used[0]}, {r.shared_bytes} bytes of shared memory")
    assert used == ["wgmma" if target == "sm_90" else "mma.sync"]

# %% [markdown]
# Remember this when you compare times on an H200: our Triton kernels use `wgmma` there, FlashAttention-2 uses `mma.sync`, which is slower on
# that chip. (Phases 7 to 9 stay with `mma.sync`; phase 11 goes to `wgmma`.)

# %% [markdown]
# ## 6. Scheme A: a block of queries against everything
#
# A row of $O$ needs one row of $Q$ and all of $K$ and $V$. So let one program take `BLOCK_M` = 64 rows of $Q$, load the whole of $K$ and $V$,
# and do all four lines on its multiprocessor. $S$ and $P$ are then 64 rows tall, and never touch HBM.
#
# Left: scheme A. Right: scheme B, for later. Blue and orange are on the chip; grey stays in HBM. The dashed outline is the rest of $S$ and
# $P$: other programs make it, and it is never in HBM.

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.4))
memory.on_chip(axes[0], "Scheme A: K and V whole")
memory.on_chip(axes[1], "Scheme B: K whole, V in blocks", v=0.25)
plt.show()

# %% [markdown]
# The kernel, whole. In its names `m` stands for query rows, `n` for keys, `d` for the head_dim: `stride_qm` is the stride of $Q$ from one
# query to the next. Three details matter:
#
# - `BLOCK_N` is $N$ padded to a power of two. A padded key gets a score of $-\infty$: its zeros would give a score of 0, and $e^0$ is not nothing.
# - $K$ is loaded with its axes swapped, so the tile in hand is $K^\top$.
# - `lse` is phase 0's $m + \ln \ell$, one number per row.

# %%
# FROM flashlab.attention.schemes: scheme_a_kernel (no docstrings)

# %% [markdown]
# Is it right? The checker runs it on small cases: lengths that are no power of two, one query, one key, large scores, both dtypes. Its tolerance
# comes from what fp16 itself loses (phase 3 says how). `schemes.scheme_a` is the launcher: it makes `o` and `lse`, and starts the grid.

# %%
report = verify_one_head(schemes.scheme_a, dtypes=(torch.float16, torch.bfloat16), max_seq=256)
print("scheme A:", report.verdict)

# %% [markdown]
# And it does what we wanted. Count the bytes that its loads and stores ask for: the $N^2$ is gone. What is left is $Q$ and $O$ once, and $K$ and
# $V$ once per block of queries. (The 4 bytes per row are `lse`.)

# %%
N, D = 200, 64
q, k, v = torch.randn(3, N, D, dtype=torch.float16, device=device)
traffic = hbm_traffic(schemes.scheme_a, q, k, v)
blocks = math.ceil(N / 64)
print(f"read    {traffic.bytes_read:7} bytes, (N + {blocks}·2N)·D·2 = {(N + blocks * 2 * N) * D * 2}")
print(f"written {traffic.bytes_written:7} bytes, N·D·2 + 4N      = {N * D * 2 + 4 * N}")
assert traffic.bytes_read == (N + blocks * 2 * N) * D * 2 and traffic.bytes_written == N * D * 2 + 4 * N

# %% [markdown]
# ## 7. The physical wall
#
# The tensor cores take their operands from shared memory, or from registers after a way through it. Three operand tiles lie there at once:
#
# $$\text{shared}(N) = (\mathrm{BLOCK\_M} + 2N) \cdot D \cdot e .$$
#
# A program (CUDA says *block*) may use at most:
#
# | target | bytes | GPUs |
# |---|---|---|
# | sm_80 | 166 912 | A100 |
# | sm_86, sm_89, sm_120 | 101 376 | RTX 3090; RTX 4090, L4, L40S; RTX 5060 Ti, 5090 |
# | sm_90 | 232 448 | H100, H200 |

# %% [markdown]
# *Before you run it:* $D = 128$, BLOCK_M = 64, fp16. At which $N$ (a power of two) does scheme A die on sm_120? On sm_90?
#
# <details><summary>Answer</summary>
#
# $(64 + 2N) \cdot 256$ is 81 920 bytes for $N = 128$, 147 456 for 256, 278 528 for 512. So sm_86, sm_89 and sm_120 die at 256, sm_80 and
# sm_90 at 512. A context of 512 tokens is too long for an H200.
#
# </details>
#
# Do not trust the formula. Ask the compiler. (The first time this takes a while; answers are kept.)

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
# The formula is exact, on five targets. (It belongs to this kernel, not to every way of writing scheme A: appendix A.) So the first length
# that cannot run follows from the limit of the device alone. Each level in the figure is what a GPU has; a red cross marks the first doubling that
# does not fit.

# %%
fig, ax = plt.subplots(figsize=(7.5, 3.8))
in_kib = {n: schemes.scheme_a_shared_bytes(n, 128) / 1024 for n in needed}
levels = {"sm_90": ("H100, H200", "blue"), "sm_80": ("A100", "green"), "sm_120": ("RTX cards", "orange")}
limits = {target: runtime.limits(target).shared_per_block / 1024 for target in levels}
dies = sorted({next(n for n in in_kib if in_kib[n] > limit) for limit in limits.values()})
curves.curves(ax, [("", list(in_kib), list(in_kib.values()), "black", "o-")], xticks=list(in_kib),
              ylim=(0, 290), legend=None, xlabel="N (keys)", ylabel="shared memory per program (KiB)",
              title="Scheme A: 512 bytes more per key")
ax.plot(dies, [in_kib[n] for n in dies], "x", color=show.COLORS["red"], markersize=13, markeredgewidth=3)
for target, (names, hue) in levels.items():
    curves.level(ax, limits[target], f"{names}: {limits[target]:.0f} KiB", hue, below=True)
plt.show()

# %% [markdown]
# Now run into it. On a GPU, `scheme_a` is launched at the length at which it must die, and Triton raises `OutOfResources`. The interpreter has
# no shared memory to run out of, and would compute any length. **A kernel that passes in the interpreter may still not launch.** So the
# launcher can ask the compiler first (`as_if_on`).

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
    print(f"{run['machine']['gpu']}, N = {last['seq_len']}:\n  {last['message']}")
    assert last["required"] == schemes.scheme_a_shared_bytes(last["seq_len"], run["shape"]["head_dim"])
print("GPUs recorded:", len(walls.recorded()))

# %% [markdown]
# *Required* is the kernel's number, *Hardware limit* the device's. Triton's advice does not help: there is no loop to pipeline in stages, and $N$ is
# not a block size that we chose.
#
# *And a smaller `BLOCK_M`? Predict the length that scheme A reaches on sm_90 with BLOCK_M = 16.*
#
# <details><summary>Answer</summary>
#
# Still 256. The term that grows is $2N$; BLOCK_M only adds a constant. Even BLOCK_M = 0 would not reach 512.
#
# </details>

# %% [markdown]
# ## 8. Scheme B, and the logical wall
#
# $V$ is half of the bill, and it is used only at the end: $O = PV = \sum_j P_j V_j$ over blocks of keys. So keep $K$ whole, compute all of $P$
# (it is in registers anyway), and bring in $V$ one block of 64 rows at a time.
#
# Block $j$ of $V$ needs columns $64j$ to $64j + 63$ of $P$. In NumPy or PyTorch that is a slice. (`tl.static_range` is a loop that the compiler
# unrolls; `HOW` selects the line that we want to try.)

# %%
show.region(schemes.scheme_b_kernel, "V in blocks, P whole", whole_file=False)

# %% [markdown]
# Compile it. No GPU is involved, and no byte is counted: the *language* says no, for every size. (The interpreter says no too.)

# %%
arguments = schemes.kernel_arguments(256, 128, BLOCK_N=64, HALVINGS=2, HOW="slice")
refused = compile_report(schemes.scheme_b_kernel, arguments, target="sm_120", num_stages=1)
print("compiled:", refused.ok)
for line in refused.error.splitlines()[-5:-1]:
    print(re.sub(r" at 0x\w+", "", line))
assert "unsupported tensor index" in refused.error

# %% [markdown]
# ### Why would a language for tensors refuse to slice one?
#
# Because of where a Triton tensor is. It is no array in memory that a view can point into. It is spread over the **registers** of all threads
# of the program, in a layout that the compiler picks, and a thread cannot address another thread's registers.
#
# So `P[:, 64:128]` may cost nothing (if each thread happens to hold some columns of every block), an exchange between threads, or a trip through
# shared memory.

# %% [markdown]
# Triton could have hidden that. In 2026 a contributor offered indexing for contiguous slices (triton pull request 10801). A maintainer,
# Thomas Raoux, answered that it is left out on purpose, so as "to not give the false intuition that such slicing is free/cheap". Users had
# asked since 2022 (issues 656, 2994, 7191).
#
# So the logical wall is **not an impossibility. It is a design choice**: the price has to be written down.

# %% [markdown]
# ## 9. Four escape hatches
#
# | hatch | how block $j$ of $P$ is made | $j$ may be |
# |---|---|---|
# | `split` | view $P$ as two halves, `tl.split` them, repeat | a constant |
# | `gather` | `tl.gather` takes any column from anywhere | a variable |
# | `reduction` | view $P$ as blocks, zero all but block $j$, sum over the blocks | a variable |
# | `recompute` | forget $P$; $m$ and $\ell$ of the row are known, so make block $j$ again from $Q$ and $K_j$ | a variable |
#
# The first three are selections, of a few lines each; appendix B has their code and what each costs.

# %% [markdown]
# All four must agree with the oracle. 100 queries and 250 keys leave a rest in both directions.

# %%
q, k, v = (torch.randn(n, 64, dtype=torch.float16, device=device) for n in (100, 250, 250))
want, want_lse = (x[0, 0] for x in reference.attention(*(x[None, None] for x in (q, k, v))))
for how in schemes.ESCAPE_HATCHES:
    o, lse = schemes.scheme_b(q, k, v, how=how)
    error, lse_error = (o - want).abs().max().item(), (lse - want_lse).abs().max().item()
    print(f"{how:10} o within fp16 rounding: {error < 1e-3}, lse within 1e-5: {lse_error < 1e-5}")
    assert error < 1e-3 and lse_error < 1e-5

# %% [markdown]
# So the wall has doors. And shared memory? Scheme B holds $Q$ and $K$ at once, and blocks of $V$ later in the same place:
# $(\mathrm{BLOCK\_M} + N) \cdot D \cdot e$. At $N = 256$, where scheme A dies on sm_120:

# %%
sizes = {"BLOCK_N": 64, "HALVINGS": 2}
arguments = [schemes.kernel_arguments(256, 128, **sizes, HOW=how) for how in schemes.ESCAPE_HATCHES]
hatches = compile_reports(schemes.scheme_b_kernel, arguments, targets=["sm_90", "sm_120"], num_stages=1)
for r_90, r_120, how in zip(hatches[::2], hatches[1::2], schemes.ESCAPE_HATCHES):
    assert r_90.shared_bytes == r_120.shared_bytes == schemes.scheme_b_shared_bytes(256, 128)
    verdicts = [f"{r.target} {'fits' if r.fits else 'fails'}" for r in (r_90, r_120)]
    print(f"{how:10} {r_120.shared_bytes} bytes: {', '.join(verdicts)}")

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
shared = {"num_stages": 1, "shared_only": True}  # the compiler may stop when it knows how much
for r in compile_reports(schemes.scheme_b_kernel, [arguments], targets=["sm_90", "sm_120"], **shared):
    print(f"N = 512, {r.target}: {r.shared_bytes} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
    assert r.shared_bytes == schemes.scheme_b_shared_bytes(512, 128) and r.fits == (r.target == "sm_90")

# %% [markdown]
# Behind the logical wall stands the physical one: $K$ is still whole. Why not blocks of $K$, then? Look at what block $j$ of $V$ is multiplied by:
#
# $$P_{ij} = \frac{e^{S_{ij} - m_i}}{\ell_i}, \qquad m_i = \max_{j'} S_{ij'}, \quad \ell_i = \sum_{j'} e^{S_{ij'} - m_i}.$$
#
# **Every block of $P$ needs the maximum and the sum of its whole row.** All scores must have been seen before the first block of $V$ can be
# used. That, and not slicing, is why scheme B wants $K$ whole.

# %% [markdown]
# ## 10. Around both walls, the expensive way
#
# Unless the scores are computed twice. Phase 0 found $(m_i, \ell_i)$ in one pass over blocks of a row, keeping two numbers. So:
#
# - **pass 1** runs over the blocks of $K$, and keeps only $m_i$ and $\ell_i$;
# - **pass 2** runs over the blocks of $K$ and $V$, computes the scores again, and turns them into the final $P_j$ at once.
#
# No slice, no whole row, no whole $K$. You will write it in exercise 1.8.

# %%
q, k, v = (torch.randn(n, 64, dtype=torch.float16, device=device) for n in (100, 700, 700))
want = reference.attention(*(x[None, None] for x in (q, k, v)))[0][0, 0]
error = (schemes.two_pass(q, k, v)[0] - want).abs().max().item()
print(f"two passes, N = 700: within fp16 rounding: {error < 1e-3}")
assert error < 1e-3

# %% [markdown]
# And what does the compiler say? $Q$, one block of $K$ and one block of $V$ are on the chip at a time. `N` is an ordinary argument of this
# kernel, so one compilation serves all lengths.

# %%
arguments = schemes.kernel_arguments(4096, 128, BLOCK_N=64)
flat = compile_reports(schemes.two_pass_kernel, [arguments], targets=TARGETS, **shared)
for r in flat:
    print(f"{r.target:6}: {r.shared_bytes} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
assert all(r.fits for r in flat) and {r.shared_bytes for r in flat} == {(64 + 2 * 64) * 128 * 2}

# %% [markdown]
# Both walls are behind us. The figure shows all three: scheme A (orange) and B (purple) climb into the limits, two passes (blue) stay below.

# %%
lengths = [64, 128, 256, 512, 1024, 2048]
needs = {"scheme A": (schemes.scheme_a_shared_bytes, "orange"),
         "scheme B, any hatch": (schemes.scheme_b_shared_bytes, "purple"),
         "two passes": (lambda n, d: flat[0].shared_bytes, "blue")}
lines = [(name, lengths, [formula(n, 128) / 1024 for n in lengths], hue, "o-")
         for name, (formula, hue) in needs.items()]
fig, ax = plt.subplots(figsize=(7.5, 3.8))
curves.curves(ax, lines, log="xy", xticks=lengths, yticks=[32, 64, 128, 256, 512, 1024], legend="upper left",
              xlabel="N (keys)", ylabel="shared memory per program (KiB)", title="Two slopes and a floor")
for target, names in (("sm_90", "H100, H200"), ("sm_80", "A100"), ("sm_120", "RTX cards")):
    curves.level(ax, runtime.limits(target).shared_per_block / 1024, names)
plt.show()

# %% [markdown]
# So is this FlashAttention? Not quite. It needs $6N^2D$ FLOPs for its products where the four lines need $4N^2D$, and every exponential twice. That
# is the price of wanting $P_j$ **final** when it meets $V_j$. *Does it have to be final?* The whole course turns on this question.

# %% [markdown]
# $P_j V_j$ is linear in $P_j$. If block $j$ is computed with the maximum known **so far**, and the maximum moves later, the result is wrong by one
# factor per row, $e^{m_{\text{old}} - m_{\text{new}}}$. A known factor can be corrected afterwards, on a $[\mathrm{BLOCK\_M}, D]$ tile that is already in
# hand. Then one pass is enough. That is phase 2.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Naive attention moves the $N \times N$ matrix six times: $D/3$ FLOPs per byte. It is memory-bound on every GPU here.
# - **Scheme A** removes that traffic. It dies of shared memory at $N = 256$ or 512: the **physical wall**.
# - **Scheme B** needs blocks of $P$, and Triton does not slice: the **logical wall**. Four hatches open it, and move the physical wall by one
#   doubling.
# - What really holds scheme B back is the normaliser of the whole row. Two passes get around it for 1.5 times the matrix work. One pass needs one
#   more idea.

# %% [markdown]
# Left to explore: scheme A for float32 inputs (which $N$ kills it?); two programs on one multiprocessor, which halves what each may use; distributed
# shared memory, with which eight programs on sm_90 pool what they have (by how many doublings do they move the wall?).
#
# The appendix has more: A, whose bytes shared memory holds; B, what the hatches cost; C, more on memory; D, the least that any order can move.

# %% [markdown]
# ### Appendix A. Whose bytes?
#
# The tutorial that first told this story ran its scheme A at $D = 128$, BLOCK_M = 64 on an RTX 5060 Ti. It died at $N = 256$ with **131 072
# bytes** required. Ours dies at the same length, and asks for **147 456**. A first draft of ours asked for **98 304**, which fits. Same
# mathematics, same GPU, same tile. What is going on?

# %% [markdown]
# The compiler decides what shared memory holds, from how the kernel is written:
#
# - an operand of `tl.dot` is **staged** there, from its load to its last use;
# - a tile whose register layout must change on the way (a **layout conversion**) passes through **scratch** space there;
# - two tiles whose lives do not overlap share the same bytes.
#
# `scheme_a_variant_kernel` has three switches that do not change the result: transpose $K$ after loading it, load $V$ after the softmax, keep $P$
# in float32.

# %%
switches = {"as above": (False, False, False), "K by rows, then tl.trans": (True, False, False),
            "V late, P in float32": (True, True, True)}
arguments = [schemes.kernel_arguments(256, 128, BLOCK_N=256, K_BY_ROWS=a, V_LATE=b, P_FLOAT32=c)
             for a, b, c in switches.values()]
variants = compile_reports(schemes.scheme_a_variant_kernel, arguments, targets=["sm_120"], num_stages=1)
for name, r in zip(switches, variants):
    print(f"{name:25} {r.shared_bytes:6} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
assert [r.shared_bytes for r in variants] == [147456, 98304, 131072]

# %% [markdown]
# The third line is the published number, to the byte. The figure shows what the worst moment of each kernel consists of. In the second, $K$ only
# passes through scratch space, which is free again before $V$ and $P$ are staged. In the third, $P$ is staged as float32: 64 KiB instead of 32.
#
# <details><summary>How one finds this out</summary>
#
# From the compiler's intermediate code, TTGIR: each `local_alloc` is a staged tile, each `convert_layout` a
# conversion.
#
# </details>

# %%
parts = [[("Q", 16), ("Kᵀ", 64), ("V", 64)], [("V", 64), ("P, fp16", 32)], [("P, float32", 64), ("V", 64)]]
moments = dict(zip(switches, parts))
hues = {"Q": "sky", "Kᵀ": "blue", "V": "green", "P, fp16": "orange", "P, float32": "orange"}
for tiles, r in zip(moments.values(), variants):
    assert sum(size for _, size in tiles) * 1024 == r.shared_bytes
fig, ax = plt.subplots(figsize=(7.5, 2.6))
bars = {name: [(f"{tile}\n{size}", size, hues[tile]) for tile, size in tiles]
        for name, tiles in moments.items()}
curves.stacked(ax, bars, xlabel="shared memory at the worst moment (KiB), N = 256, sm_120", xlim=(0, 150))
ax.axvline(99, color=show.COLORS["red"], linestyle="--")
ax.text(100, -0.55, "limit, 99 KiB", color=show.COLORS["red"], fontsize=9, va="bottom")
plt.show()

# %% [markdown]
# Is that third kernel the published one? We cannot know: its source is not published with the number. What can be said: **a byte count belongs to a
# kernel, a compiler and a target, not to an algorithm**. What belongs to the algorithm is the slope. Double $N$ once more, and every variant is dead
# on sm_120:

# %%
doubled = [schemes.kernel_arguments(512, 128, BLOCK_N=512, K_BY_ROWS=True, V_LATE=late, P_FLOAT32=late)
           for late in (False, True)]
for r in compile_reports(schemes.scheme_a_variant_kernel, doubled, targets=["sm_120"], **shared):
    print(f"N = 512: {r.shared_bytes} of {r.shared_limit} bytes: {'fits' if r.fits else 'fails'}")
    assert not r.fits

# %% [markdown]
# "Fits" is about shared memory only. $S$ and $P$ live in registers: 64 × 256 numbers over 128 threads are 128 registers per thread for one of
# them, out of 255. Values that find no register are **spilled** to slow memory and come back. See what the kernel that fits pays:

# %% tags=["nbval-ignore-output"]
for name, r in zip(switches, variants):
    print(f"{name:25} {r.registers} registers per thread, {r.spill_bytes} bytes spilled")

# %% [markdown]
# ### Appendix B. The hatches: their code, and what they cost
#
# Three of the hatches are selections:

# %%
# FROM flashlab.attention.schemes: slice_by_split, slice_by_gather, slice_by_reduction (no docstrings)

# %% [markdown]
# `tl.split` wants a last axis of length 2. `reshape` to `[rows, 2, columns / 2]` makes the axis, `permute` puts it last. Check it in plain
# PyTorch: the columns of $[0, 1, \dots, 7]$, cut twice, block 2.

# %%
x = torch.arange(8)[None, :]
part = x
for bit in (1, 0):  # block 2 of 4 is binary 10: the right half, then the left half of it
    part = part.reshape(1, 2, -1).permute(0, 2, 1)[..., bit]
    print(part.tolist())
assert part.equal(x[:, 4:6])

# %% [markdown]
# What does the compiler make of them? The table is the compiler's, for the version of Triton that ran this notebook. *Exchange* counts instructions that move data between threads:
# shared-memory loads and stores, and shuffles. *MMA* counts tensor-core instructions. *Loops* counts branches that go back. The code of an unrolled
# loop is there in all its copies; that of a loop is there once, however often it runs.

# %% tags=["nbval-ignore-output"]
exchange = ("LDS", "STS", "LDSM", "STSM", "SHFL")
rows = []
compiled = {how: hatches[2 * i : 2 * i + 2] for i, how in enumerate(schemes.ESCAPE_HATCHES)}
whole = schemes.scheme_a_reports([256], 128, ["sm_90", "sm_120"], shared_only=False)
compiled = {"scheme A": whole} | compiled
for name, pair in compiled.items():
    for r in pair:
        exchanged = sum(r.instructions[op] for op in exchange)
        branches = re.findall(r"^\s*([0-9a-f]+) .*\bBRA\b.* 0x([0-9a-f]+)", r.sass, re.MULTILINE)
        loops = sum(int(goal, 16) < int(address, 16) for address, goal in branches)
        rows.append((name, r.target, r.registers, r.spill_bytes, sum(r.instructions.values()),
                     exchanged, r.tensor_core_instructions, loops))
        whole = compiled["scheme A"][pair.index(r)]
        assert loops or r.tensor_core_instructions >= whole.tensor_core_instructions
rows.sort(key=lambda row: row[1] != "sm_90")
columns = ["kernel", "target", "registers", "spilled bytes", "instructions", "exchange", "MMA", "loops"]
show.table(rows, columns)

# %% [markdown]
# Not all of it is what one would expect. (Fewer MMA than scheme A is no less work: it is a loop whose body is counted once.)
#
# - `split` exchanges no more than scheme A, which cuts nothing. The compiler's layout gives every thread some columns of *each* block of $P$, so
#   a block is just some of its registers. That is luck with this layout, not a property of slicing.
# - `gather` is general and pays for it: on sm_90 it exchanges much more.
# - `reduction` adds up a tile that is mostly zeros, but the sum runs within one thread, so it exchanges nothing extra.

# %% [markdown]
# - `recompute` is the smallest program. It does half as much matrix work again, 6 instead of 4 times $\mathrm{BLOCK\_M} \cdot N \cdot D$ FLOPs.
#   Tensor cores are the cheapest arithmetic on the chip, so this is no fool's choice.
# - A program holds a whole row of scores, so registers run out. On sm_120 all five take 255, the most a thread can have, and spill.

# %% [markdown]
# And in time? The record has $N = 256$ keys, one program per multiprocessor.
#
# **What is timed:** CUDA graphs, as in section 4. A graph holds the kernel, and two small ones that fill its outputs first, the same for all
# rows.

# %%
for run in walls.recorded():
    m = run["machine"]
    rows = [(row["name"], 1e3 * row["ms"], f"{row['max_error']:.1e}") if row["ok"]
            else (row["name"], "out of shared memory", "") for row in run["scheme_b"]]
    print(f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}")
    show.table(rows, ["kernel", "µs (median)", "max error"])
    µs = {row[0]: row[1] for row in rows}
    assert µs["scheme A"] < µs["two passes"] < 1.5 * µs["scheme A"]
print("GPUs recorded:", len(walls.recorded()))

# %% [markdown]
# Two passes do 1.5 times the matrix work of scheme A, and take less than 1.5 times as long.

# %% [markdown]
# ### Appendix C. More on memory: a published table, and the splits of FlashAttention-2
#
# A published benchmark of eager attention lists "MB in use before the backward pass" for batch 8, one head, on a GPU it does not name. For the
# backward pass PyTorch keeps $P$, and $Q$, $K$, $V$ and $O$. In float32 that predicts $8\,(N^2 + 4ND) \cdot 4$ bytes, and a constant for what
# CUDA libraries take. One constant must then explain all sixteen rows.

# %%
rest = []
for row in published.load("attention_memory"):
    if row["mem_before_mb"] != "OOM":
        n, d = row["seq_len"], row["d_model"]
        predicted = 8 * (n * n + 4 * n * d) * 4 / 1e6
        rest.append(row["mem_before_mb"] - predicted)
        if d == 128:
            told = row["mem_before_mb"]
            print(f"N = {n:4}: published {told:4} MB, formula {predicted:6.0f} MB + {rest[-1]:.0f}")
print(f"{len(rest)} rows, the rest is {min(rest):.1f} to {max(rest):.1f} MB in every one of them")
assert max(rest) - min(rest) < 2

# %% [markdown]
# It does, to within 1 MB. At the next doubling of $N$ one matrix takes 8.6 GB, several are needed at once, and the table says *out of memory*.

# %% [markdown]
# The number of splits that FlashAttention-2 chose, by heads and length, computed from what it allocates (head_dim 64; 0: no splitting). Few heads and
# short sequences are few programs, so the keys are split, and each split needs room for its partial result.

# %%
for run in hardware.recorded():
    flash = [r for r in run["workspace"] if r["backend"] == "FLASH_ATTENTION"]
    lengths = sorted({r["seq_len"] for r in flash})
    table = {h: {r["seq_len"]: r["beside"] // (h * r["seq_len"] * 65 * 4) for r in flash if r["heads"] == h}
             for h in sorted({r["heads"] for r in flash})}
    print(run["machine"]["gpu"])
    show.table([(h, *row.values()) for h, row in table.items()], ["heads", *(f"N = {n}" for n in lengths)])
print("GPUs recorded:", len(hardware.recorded()))

# %% [markdown]
# ### Appendix D. How little could any order move?
#
# Scheme A reads $K$ and $V$ once per block of queries, and so will phase 2's loop, for any $N$. Is there a cleverer order that moves less? No, but for
# a constant factor. The argument goes back to Hong and Kung (1981), and needs only counting.

# %% [markdown]
# **The model.** The chip holds $M$ numbers; everything else is in slow memory. We count numbers moved between the two, in either direction. Each
# score is a sum of $D$ multiply-adds of numbers on the chip, taken in any order.

# %% [markdown]
# **Step 1: phases.** Cut the run into phases of $M$ moves each; only the last may be shorter. In one phase the chip sees at most $2M$ numbers of
# $Q$ and $K$: those that were there when it began, and those that came.

# %% [markdown]
# **Step 2: scores done within the phase.** If all $D$ multiply-adds of a score fall into one phase, the phase has seen its whole row of $Q$ and
# its whole row of $K$. With $a$ whole rows of $Q$ and $b$ of $K$, $(a + b) D \le 2M$, so $a\,b \le (M/D)^2$. That is at most
# $D \cdot (M/D)^2 = M^2/D$ multiply-adds.

# %% [markdown]
# **Step 3: scores begun or continued.** All others have a part of their sum in another phase. So their partial sum is a number that is on the chip
# when the phase begins, or when it ends, or it moves in between. There are at most $3M$ of these.
#
# Let the phase see $a_k$ numbers of column $k$ of $Q$, and $b_k$ of $K$. At this $k$ it does at most
# $\min(a_k b_k,\, 3M) \le \sqrt{3M\, a_k b_k} \le \sqrt{3M}\,(a_k + b_k)/2$ multiply-adds. Because $\sum_k (a_k + b_k) \le 2M$, all $k$ together are
# at most $\sqrt{3}\, M^{3/2}$.

# %% [markdown]
# **Step 4: add up.** Let $M \ge D^2$. Then $M^{3/2} \le M^2/D$, so a phase does at most $(1 + \sqrt 3)\, M^2 / D$ multiply-adds. All scores
# together need $N^2 D$. So there are at least $N^2 D^2 / ((1 + \sqrt 3) M^2)$ phases, and all but the last move $M$ numbers:
#
# $$\text{moves} \;\ge\; \frac{N^2 D^2}{(1 + \sqrt 3)\, M} - M, \qquad\text{and of course}\qquad \text{moves} \ge 4ND .$$
#
# (Computing a score twice only adds work. If $M < D^2$, step 3 is the larger part, and the bound is a multiple of $N^2 D / \sqrt M$.)

# %% [markdown]
# **Step 5: what the loop moves.** A block of $B$ queries needs room for its rows of $Q$ and $O$, for $m$, $\ell$ and a score per row, and for one key
# and one value: $B(2D + 3) + 2D \le M$, so $B \approx M / 2D$. $K$ and $V$ are read once per block:
#
# $$\text{moves} = 2ND + \lceil N / B \rceil \cdot 2ND \;\approx\; \frac{4 N^2 D^2}{M} .$$
#
# The same $N^2 D^2 / M$, with another factor in front. Now evaluate naive, loop and bound:

# %%
def loop_moves(N, D, M):
    B = (M - 2 * D) // (2 * D + 3)
    return 2 * N * D + math.ceil(N / B) * 2 * N * D

def lower_bound(N, D, M):
    assert M >= D * D
    return max(4 * N * D, N**2 * D**2 / ((1 + math.sqrt(3)) * M) - M)

N, D = 16384, 64
naive = naive_cost(N, D, itemsize=1).bytes  # one byte per number: bytes are numbers
for M in (4096, 16384, 65536, 262144):
    loop, bound = loop_moves(N, D, M), lower_bound(N, D, M)
    print(f"M = {M:6}: naive {naive / 1e6:5.0f}, loop {loop / 1e6:6.1f}, bound {bound / 1e6:5.1f} million; "
          f"loop / bound = {loop / bound:.1f}")
    assert bound <= loop <= naive and loop < 12 * bound

# %% [markdown]
# The loop is within a factor of 12 of what *any* order must move, for every $M$ from $D^2$ to $ND$ and beyond. (The largest $M$ here is where the
# second bound, $4ND$, takes over.)

# %% [markdown]
# The FlashAttention paper (its Proposition 3) says less: no algorithm moves $o(N^2 D^2 / M)$ numbers for *all* $M$ from $D$ to $ND$. Its proof looks at
# $M$ near $ND$ only, where the inputs alone are that many. Saha and Ye (2024) proved the bound for each $M \ge D^2$, with any way of
# multiplying matrices, and showed that another order is better for $M < D^2$.

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
# - NVIDIA: *CUDA C++ Programming Guide*, "Technical Specifications per Compute Capability": the limits of section 7.
# - Hong, Kung: *I/O complexity: the red-blue pebble game* (STOC 1981). Phases of $M$ moves, the argument of appendix D.
# - Saha, Ye: *The I/O Complexity of Attention, or How Optimal is FlashAttention?* (ICML 2024), arXiv 2402.07443. The bound for each $M$.
