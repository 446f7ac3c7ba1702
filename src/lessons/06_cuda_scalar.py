# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 6 · Scalar CUDA C++: from thread and block to a float32 FlashAttention
#
# Triton let you write what a *block* of the GPU does. From here on you write what one *thread* does, in CUDA C++. You start with a kernel
# of four lines, meet the two mistakes that every CUDA programmer makes, and then build FlashAttention twice: with the loops as
# its first paper has them, and with the loops as its second paper has them. After that come four more steps. Each has one idea, and
# one reason that you can count.

# %% [markdown]
# ## What you will be able to do
#
# - say what a thread, a warp, a block and a grid are, and which memory each of them sees;
# - find a race, a bad address and a barrier that not everybody reaches, from a sentence that names both lines;
# - count sectors of global memory and wavefronts of shared memory, and predict both;
# - write FlashAttention in both loop orders, and derive the bytes that each order moves;
# - name the resource that bounds a kernel: memory traffic, shared-memory bandwidth, registers or latency.

# %% [markdown]
# ## What you need first
#
# Phase 2 (the state $m$, $\ell$, acc and its correction) and phase 3 (the same loop as a kernel). Some C. No GPU: without one the same CUDA
# source runs in the course's emulator, which executes every thread of every block, and sees what each does. With a GPU the same cells
# compile it with nvcc. About two hours, then the exercises in `exercises/06_cuda_scalar.ipynb`.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference
from flashlab import runtime
from flashlab.figures import curves, ladder, memory, show
from flashlab.bench import published
from flashlab.bench import scalar as bench
from flashlab.bench.records import recorded as recorded_runs
from flashlab.check import verify
from flashlab.cuda import default_backend, load_inline
from flashlab.bench.resources import RECORDED, recorded
from flashlab.kernels import steps
from flashlab.attention.cost import fa1_cost, fa2_cost
from flashlab.simt import SimtError

show.style()
torch.manual_seed(6)
device = runtime.device()

# %% [markdown]
# ## 1. Thread, warp, block, grid
#
# A **kernel** is a function that thousands of **threads** execute. They all run the same code; what tells them apart is their index. Threads come
# in **blocks**, blocks in a **grid**; the launch `kernel<<<blocks, threads>>>(...)` says how many of each. Inside a block, 32 consecutive threads are a
# **warp**: the hardware issues one instruction for all 32 at once. A thread's place in its warp is its **lane**.
#
# Who sees what is the heart of the matter. The figure goes from the largest and slowest memory to the smallest and fastest; the sizes are those of an H200.

# %%
memory.hierarchy("global memory (HBM): 141 GB, every thread of every block",
                 "shared memory: up to 227 KB, this block's",
                 "each blue box: four of a warp's 32 threads, each with up to 255 registers that nobody else sees")
plt.show()

# %% [markdown]
# The first kernel lets every thread write down who it is. `blockIdx`, `threadIdx` and `blockDim` are given to each thread. A block may have two or three
# dimensions: that is a way of counting, not a shape in the hardware. Threads are numbered with `x` running fastest, and that number decides the warp.

# %%
WHO_AM_I = r"""
#include "simt.h"

__global__ void who_am_i(int* out, int n) {                // out [n][4]
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;             // its number in the block
    const int i = blockIdx.x * blockDim.x * blockDim.y + thread;           // and in the grid
    if (i >= n) return;                                    // the last block has threads with nothing to do
    out[4 * i] = blockIdx.x, out[4 * i + 1] = thread, out[4 * i + 2] = thread / 32, out[4 * i + 3] = thread % 32;
}
extern "C" int run(int* out, int n, void* stream) {
    const dim3 threads(16, 4);                             // 64 threads a block
    who_am_i<<<(n + 63) / 64, threads, 0, (cudaStream_t)stream>>>(out, n);
    return (int)cudaGetLastError();
}
"""
who = torch.zeros(150, 4, dtype=torch.int32, device=device)
assert load_inline(WHO_AM_I).run(who, 150) == 0  # CUDA's code for success

# %% [markdown]
# `load_inline` compiles the text and offers its `extern "C"` functions to Python. With a GPU that is nvcc and PyTorch's extension loader,
# without one the emulator; the cell is the same. The last line of the C function hands CUDA's error code back: a launch that is refused
# becomes a Python exception. `simt.h` is nearly empty under nvcc; for the emulator it spells CUDA in C++.

# %%
rows = [(i, *who[i].tolist()) for i in (0, 15, 16, 31, 32, 63, 64, 149)]
show.table(rows, ["element i", "blockIdx.x", "thread of the block", "warp", "lane"])
i = torch.arange(150)
assert torch.equal(who.cpu().long(), torch.stack([i // 64, i % 64, i % 64 // 32, i % 32], 1))

# %% [markdown]
# Thread (0, 1) of a 16 × 4 block has number 16: it sits in the same warp as (15, 0). The grid has three blocks for 150 elements, so 192 threads: 42
# of them only test `i >= n` and leave. **That test is not optional.** What happens without it?

# %%
source = WHO_AM_I.replace("if (i >= n) return;", "")
try:
    load_inline(source, check=True).run(torch.zeros(150, 4, dtype=torch.int32), 150)
except SimtError as error:
    print(f"{type(error).__name__}: {error}")
    assert error.report.findings[0].kind == "global-out-of-bounds"

# %% [markdown]
# `check=True` asks for the emulator's check build on every machine. It watches each load and store, stops at the first bad address, and Python gets an
# exception. On a real GPU you would get an error with no line, from some later call, and the process would have to be restarted; or, if
# the bytes behind the array belong to another tensor, no error at all. So in this course a kernel first runs in the check build.

# %% [markdown]
# ## 2. Shared memory, and the first race
#
# The threads of a block can talk: through **shared memory**, a small fast memory that the block owns. Here each thread puts one number in, and takes another one
# out: a block's 64 numbers in reverse order.

# %%
REVERSE = r"""
#include "simt.h"

__global__ void reverse(const float* x, float* y) {        // one block of 64 threads
    __shared__ float tile_smem[64];
    tile_smem[threadIdx.x] = x[threadIdx.x];
    // here?
    y[threadIdx.x] = tile_smem[63 - threadIdx.x];
}
extern "C" int run(const float* x, float* y, void* stream) {
    reverse<<<1, 64, 0, (cudaStream_t)stream>>>(x, y);
    return (int)cudaGetLastError();
}
"""
x = torch.arange(64.0)
racy = load_inline(REVERSE, check=True)
assert racy.run(x, torch.empty(64)) == 0

# %% [markdown]
# *Is anything wrong with it? Thread 5 reads what thread 58 wrote. Both lines are executed by everybody, and the store comes first in the source.*
#
# <details><summary>Answer</summary>
#
# The store comes first in each thread. It need not come first *between* threads: warp 0 may have reached the last line while warp 1 has not yet started. There is
# no order between two warps unless you make one.
#
# </details>

# %%
for finding in racy.report.findings:
    print(finding.message)
kinds = {f.kind for f in racy.report.findings}
races = [f for f in racy.report.findings if f.kind == "race"]
code = [REVERSE.splitlines()[n - 1].strip() for n in (races[0].other_line, races[0].line)]
assert kinds == {"race", "uninitialised-shared"} and {c.split("[")[0] for c in code} == {"tile_smem", "y"}

# %% [markdown]
# A **race**: two threads touch one word, one of them writes, and nothing orders them. Here it is told from both sides, with the lines (6 is the store, 8 the load) and the threads,
# and the first sentence is its consequence: in this order of events a thread read a word before anybody had written it. The remedy is a **barrier**: `__syncthreads()` lets no thread of the block past until all have arrived, and what was written before it is seen after it.

# %%
fixed = load_inline(REVERSE.replace("// here?", "__syncthreads();"), check=True)
y = torch.empty(64)
fixed.run(x, y)
assert torch.equal(y, x.flip(0)) and fixed.report.ok
print(f"reversed: True, findings: {len(fixed.report.findings)}, barriers: {fixed.report.counters['barriers']}")

# %% [markdown]
# "All have arrived" is meant literally. In an `if` that only some threads enter, a barrier waits for the others: it hangs, or it meets *another* barrier of
# theirs, and then each orders something that its author did not mean. Here threads 40 to 63 go straight to the second one:

# %%
bad = load_inline(REVERSE.replace("// here?", "if (threadIdx.x < 40) __syncthreads();\n    __syncthreads();"), check=True)
bad.run(x, y)
print(bad.report.findings[0].message)
assert bad.report.findings[0].kind == "divergent"

# %% [markdown]
# Keep three rules. A barrier between a write and the reads of others. A second one before the memory is written *again*. And no barrier where not
# all threads pass. In the kernels below every barrier has a comment that says which of the first two it serves.

# %% [markdown]
# ## 3. Global memory moves in sectors
#
# Global memory is never read by the number: it comes in **sectors** of 32 bytes. When a warp loads, the hardware collects the 32 addresses and fetches every
# sector that one of them lies in. Neighbouring lanes on neighbouring floats need 4 sectors for 32 floats: the load is **coalesced**. Below, dark is what was
# asked for, light what came along for nothing.

# %%
fig, axes = plt.subplots(3, 1, figsize=(8.5, 2.8))
for ax, stride in zip(axes, (1, 2, 8)):
    memory.sectors(ax, stride)
axes[0].set_title("What 32 lanes fetch (first 80 floats; a box between black lines is one sector)")
axes[-1].set_xlabel("float number")
plt.show()

# %% [markdown]
# The count as a formula: with stride $s$ floats between neighbouring lanes, $\min(4s, 32)$ sectors. One warp, counted:

# %%
STRIDED = r"""
#include "simt.h"

__global__ void strided(const float* x, float* y, int stride) { y[threadIdx.x] = x[threadIdx.x * stride]; }

extern "C" int run(const float* x, float* y, int stride, void* stream) {
    strided<<<1, 32, 0, (cudaStream_t)stream>>>(x, y, stride);
    return (int)cudaGetLastError();
}
"""
module = load_inline(STRIDED, check=True)
for stride in (1, 2, 4, 8, 64):
    module.run(torch.zeros(32 * stride), torch.zeros(32), stride)
    sectors = module.report.counters["global_load_sectors"]
    print(f"stride {stride:2}: {sectors:2} sectors = {32 * sectors:4} bytes moved for 128 asked, formula {min(4 * stride, 32):2}")
    assert sectors == min(4 * stride, 32)

# %% [markdown]
# A matrix in rows makes both cases: let neighbouring lanes walk along a row, and every load is coalesced; give each lane a row of its own, and the stride
# is the row's length. A lane may also load 16 bytes at once, as a `float4`. That is one instruction instead of four, and 16 full
# sectors if the warp's 512 bytes are consecutive. Remember it: the first kernels below give each thread a row.

# %% [markdown]
# ## 4. Shared memory has 32 banks
#
# Shared memory has no sectors. It has 32 **banks**, each of which serves one 4-byte word a cycle; word $w$ lies in bank $w \bmod 32$. If the lanes of a warp want words of
# 32 different banks, one pass serves them: one **wavefront**. Several lanes that want *the same* word share it. But $k$ different words of one bank take $k$ wavefronts: a **bank conflict**.
#
# Lane $l$ reads word $l \cdot p$, the first column of a tile whose rows are $p$ words long. How many wavefronts, for $p = 32$? For $p = 33$?
#
# <details><summary>Answer</summary>
#
# With $p = 32$ all words are in bank 0: 32 wavefronts. With $p = 33$ they are in banks 0, 1, 2, ...: one. In general $\gcd(p, 32)$. So one unused word at the end of
# each row, **padding**, makes a column as cheap as a row.
#
# </details>

# %%
COLUMN = r"""
#include "simt.h"

__global__ void column(float* y, int pitch) {
    __shared__ float tile_smem[32 * 64];
    for (int i = threadIdx.x; i < 32 * pitch; i += 32) tile_smem[i] = i;
    __syncwarp();                                          // the tile is complete: one warp needs no more
    y[threadIdx.x] = tile_smem[threadIdx.x * pitch];
}
extern "C" int run(float* y, int pitch, void* stream) {
    column<<<1, 32, 0, (cudaStream_t)stream>>>(y, pitch);
    return (int)cudaGetLastError();
}
"""
module = load_inline(COLUMN, check=True)
for pitch in (32, 33, 34, 36, 48):
    module.run(torch.zeros(32), pitch)
    wavefronts = module.report.counters["shared_load_wavefronts"]
    print(f"rows of {pitch} words: {wavefronts:2} wavefronts for a column, gcd(pitch, 32) = {math.gcd(pitch, 32)}")
    assert wavefronts == math.gcd(pitch, 32)

# %% [markdown]
# The emulator's counts are not estimates. Its model was compared with Nsight Compute's counters on an H200, pattern by pattern, and that is how one rule
# was found that no manual states: a `float4` load is served a quarter of the warp at a time, so four wavefronts at best; two if neighbouring lanes come in
# pairs that want the same address, as they do when *all* want the same. Even the cheapest `float4` broadcast takes two.

# %% [markdown]
# ## 5. Inside a warp: shuffles
#
# Lanes of a warp can read each other's registers, without any memory. `__shfl_xor_sync(mask, value, step)` gives each lane the `value` of the lane whose
# number differs in the bits of `step`. Five rounds with steps 1, 2, 4, 8, 16 leave the maximum of all 32 lanes in **every** lane. This butterfly is how a row's maximum and its
# sum are found once a row is spread over a warp. Here with 8 lanes, so that you can follow it:

# %%
BUTTERFLY = r"""
#include "simt.h"

__global__ void butterfly(const float* x, float* y) {      // y [4][32]: every lane's maximum before and after each round
    float m = x[threadIdx.x];
    y[threadIdx.x] = m;
    for (int step = 1, round = 1; step < 8; step *= 2, round++) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, step));       // ~0u: all 32 lanes take part
        y[32 * round + threadIdx.x] = m;
    }
}
extern "C" int run(const float* x, float* y, void* stream) {
    butterfly<<<1, 32, 0, (cudaStream_t)stream>>>(x, y);
    return (int)cudaGetLastError();
}
"""
x = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6.0]).repeat(4).to(device)
y = torch.zeros(4, 32, device=device)
load_inline(BUTTERFLY).run(x, y)
show.table([(name, *map(int, row[:8])) for name, row in zip(["at first", "step 1", "step 2", "step 4"], y)],
           ["lane", *map(str, range(8))])
assert (y[3] == 9).all()

# %% [markdown]
# That is all the CUDA that a FlashAttention needs: indices with a guard, tiles in shared memory with two barriers, loads along rows, and a butterfly.

# %% [markdown]
# ## 6. FlashAttention-1, looped as its paper loops
#
# Algorithm 1 of the 2022 paper has K and V in the **outer** loop and Q in the **inner** loop. A tile of K and V comes on chip once. Then every query row passes by, takes
# up the tile, and goes. So a row is visited once for each tile, and between two visits its output $O_i$ and its statistics $m_i$, $\ell_i$ have to wait
# somewhere: in global memory. The 2023 paper has the loops the other way round. The figure shows which tile is on chip when, for four tiles of each.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
memory.loop_order(axes[0], "FlashAttention-1: for K, V: for Q", keys_outside=True)
memory.loop_order(axes[1], "FlashAttention-2: for Q: for K, V", keys_outside=False)
plt.show()

# %% [markdown]
# Each white number is a tile that arrives on chip; for O, m and l it also means that the old tile is written back. On the left O arrives 16 times and leaves 16
# times. On the right it is made on chip, and leaves four times. Now K and V arrive 16 times, but they are only read.
#
# The kernel, whole except for its first lines. One block has one head; one thread has one query row of each tile. `float4` numbers are four columns of a row.

# %%
step1 = steps(6)[0]
show._between(step1.path, "for (int n_start = 0", "m_gmem[row] = m_new")

# %% [markdown]
# Compare it with Algorithm 1: $S_{ij}$ (line 9 of the paper), the tile's maximum and $\tilde P$ (line 10), the new statistics (line 11), the rescaled and renormalised $O_i$ (line 12, written
# back), $\ell_i, m_i$ (line 13). Two things differ. The exponentials are powers of two, with $\log_2 e$ inside the scale, as in phase 3. And the rows past the end are guarded: `keys` is how many
# keys of this tile the row sees, which takes care of the tail and of a causal mask alike.
#
# Is it right? The oracle decides, on lengths that no tile divides, moving maxima, causal masks, shared K/V heads, both head dimensions. This runs on the GPU, if there is one.

# %%
quick = "nvcc" if default_backend() == "torch" else None  # on a GPU: builds faster than PyTorch's extension loader

def correct(step, head_dims=(64,)):
    module = load_inline(step.path, dtype=torch.float32, backend=quick)
    return verify(module.forward, causal=True, dtypes=(torch.float32,), head_dims=head_dims, gqa=True, max_seq=200)

print(step1.name, "·", correct(step1, (64, 128)).verdict)

# %% [markdown]
# ### Derive its traffic, then count it
#
# One head, $N$ queries, $N$ keys, float32, $T = \lceil N / \mathrm{BLOCK\_N} \rceil$ tiles of K and V. Go through the kernel and write down every access to global memory, in numbers of 4 bytes:
#
# | what | reads | writes |
# |---|---|---|
# | set O, m, l | | $ND + 2N$ |
# | every K and V tile, once | $2ND$ | |
# | in each of the $T$ rounds: Q | $T \cdot ND$ | |
# | in each round: O | $T \cdot ND$ | $T \cdot ND$ |
# | in each round: m, l | $T \cdot 2N$ | $T \cdot 2N$ |
# | at the end: lse from m and l | $2N$ | $N$ |
#
# `fa1_cost` is this table times four. The emulator counts what the threads really ask for. They have to agree to the byte, also where $N$ is no multiple of anything.

# %%
def counted(source, seq_len=256, head_dim=64):
    """One head through the check build: the counters, after the result has been compared with the oracle."""
    module = load_inline(source, check=True, head_dim=head_dim, dtype=torch.float32)
    q, k, v = torch.randn(3, 1, 1, seq_len, head_dim)
    o, lse = module.forward(q, k, v)
    want, want_lse = reference.attention(q, k, v)
    assert (o - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5 and module.report.ok
    return module.report.counters

def compare(step, formula, seq_len, head_dim=64):
    c = counted(step.path, seq_len, head_dim)
    read = c["global_load_bytes"] + c["cp_async_bytes"]
    expected = formula(seq_len, seq_len, head_dim)
    match = (read, c["global_store_bytes"]) == (expected.bytes_read, expected.bytes_written)
    print(f"N = {seq_len}, D = {head_dim:3}: counted {read:8} read, {c['global_store_bytes']:8} written = formula: {match}")
    assert match

for n, d in ((128, 64), (256, 64), (300, 64), (256, 128)):
    compare(step1, fa1_cost, n, d)

# %% [markdown]
# The formula says what grows. $T$ is $N / \mathrm{BLOCK\_N}$, so
#
# $$\text{FA1} \approx \frac{3\,N^2 D}{\mathrm{BLOCK\_N}} \quad\text{numbers: Q in, O in, O out.}$$
#
# ## 7. The loops swapped: FlashAttention-2's order
#
# Put Q outside. Now a thread keeps its row from the first key to the last: `q_rmem`, `acc`, `m_i` and `l_i` are local variables, and so **registers**. Nothing waits in global memory. The division by
# $\ell$ is done once, at the end. And tiles of Q no longer depend on each other: each becomes a block of its own, so the grid grows from `heads` to `heads × ⌈N / BLOCK_M⌉`. (The 2023 paper
# credits Phil Tillet's Triton kernel with both ideas.) This is the diff:

# %%
step2 = steps(6)[1]
show.diff(step1.path, step2.path, context=1)

# %% [markdown]
# Read the diff twice: once for what became a register, once for what became an index of the grid. Then the same cases as before.

# %%
print(step2.name, "·", correct(step2).verdict)

# %% [markdown]
# The traffic: Q is read once and O and lse are written once. K and V are read again for each of the $\lceil N / \mathrm{BLOCK\_M} \rceil$ blocks:
#
# $$\text{FA2} = ND + \Big\lceil\frac{N}{\mathrm{BLOCK\_M}}\Big\rceil \cdot 2ND \ \text{ read}, \qquad ND + N \ \text{ written}, \qquad\text{about } \frac{2 N^2 D}{\mathrm{BLOCK\_M}}.$$

# %%
for n, d in ((128, 64), (256, 64), (300, 64), (256, 128)):
    compare(step2, fa2_cost, n, d)

# %% [markdown]
# ### Why FlashAttention-1's order moves more
#
# Three reasons, from the two formulas:
#
# 1. **Three against two.** What passes by is Q, O in and O out in one order, K and V in the other. Same tile heights: 1.5 times the bytes.
# 2. **Which BLOCK counts.** What stays on chip decides how often the rest passes by. FA1's order holds K and V tiles: two tiles of BLOCK_N rows in shared memory. FA2's order holds one row of Q
#    and of O in each thread's registers, so BLOCK_M is the number of *threads*, and registers are the larger memory (256 KB a multiprocessor). Here 128 against 32: four times fewer rounds.
# 3. **Writes.** FA1's order writes $N^2 D / \mathrm{BLOCK\_N}$ numbers; FA2's writes $ND$. And each round has to wait for what the round before has written.
#
# Together 6 times, for long sequences with these tiles. Test the claim about BLOCK sizes on the kernels themselves: change the constant, count again.

# %%
def with_tile(step, name, old, new):
    return step.path.read_text().replace(f"{name} = {old}", f"{name} = {new}")

measured = {"FA1": {}, "FA2": {}}
for rows in (16, 32, 64, 128):
    for order, step, name, old in (("FA1", step1, "BLOCK_N", 32), ("FA2", step2, "BLOCK_M", 128)):
        if (order, rows) in (("FA1", 128), ("FA2", 16)):
            continue  # a row of S in registers would be too long; a block would be half a warp
        c = counted(with_tile(step, name, old, rows))
        measured[order][rows] = c["global_load_bytes"] + c["global_store_bytes"]
assert all(b == fa1_cost(256, 256, 64, block_n=r).bytes for r, b in measured["FA1"].items())
assert all(b == fa2_cost(256, 256, 64, block_m=r).bytes for r, b in measured["FA2"].items())
print("bytes of both orders at N = 256, D = 64, each tile height:", measured)

# %% [markdown]
# The figure has the formulas as lines and these counts as points. On the left $N$ grows with the tiles of our kernels: both are quadratic, six apart at the end. The dashed line is phase 1's naive attention, which moves
# six $N \times N$ matrices. On the right the tile height grows, at $N = 256$.

# %%
lengths, heights = [128 * 2**i for i in range(8)], [16, 32, 64, 128]
against_n, against_tile = [], []
for order, formula, hue, option in (("FA1", fa1_cost, "orange", "block_n"), ("FA2", fa2_cost, "blue", "block_m")):
    against_n.append((f"{order}'s order", lengths, [formula(n, n, 64).bytes / 1e6 for n in lengths], hue,
                     "-"))
    against_tile.append(("", heights, [formula(256, 256, 64, **{option: h}).bytes / 1e6 for h in heights],
                        hue, "-"))
    points = [b / 1e6 for b in measured[order].values()]
    against_tile.append((f"{order}'s order, counted ({option.upper()})", list(measured[order]), points, hue,
                        "o"))
against_n.append(("naive", lengths, [(4 * n * 64 + 6 * n * n) * 4 / 1e6 for n in lengths], "grey", "--"))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
curves.curves(left, against_n, log="xy", xticks=lengths[::2], title="Traffic against N", xlabel="N",
              ylabel="MB per head, D = 64, float32")
curves.curves(right, against_tile, log="x", xticks=heights, title="Traffic against the tile",
              xlabel="rows of the tile that stays on chip", ylabel="MB per head, N = 256")
plt.show()

# %% [markdown]
# Surprised that FA1's order moves about as much as naive attention? Look at the constant: $3D/\mathrm{BLOCK\_N} = 6$ at $D = 64$ and 32 keys a tile, and naive moves $6N^2$. The *memory* is linear in $N$ either way: no $N \times N$ matrix exists. The *traffic*
# is saved only as far as the tile is large against $D$. The paper says it as $\Theta(N^2 D^2 / M)$ for on-chip memory of $M$ numbers.
#
# ### Sectors
#
# Bytes asked for are not bytes moved. Where does this kernel waste sectors? The emulator counts line by line.

# %%
def by_line(step, *kinds, least=1):
    """(code, instructions, count, ideal) of the lines that count most in the check build."""
    module = load_inline(step.path, check=True, dtype=torch.float32)
    module.forward(*torch.randn(3, 1, 1, 256, 64))
    lines = [re.sub(r"^for \(.*?\) |//.*", "", line.strip()).strip()
             for line in step.path.read_text().splitlines()]
    for number, c in module.report.by_line.items():
        for kind, unit in kinds:
            if c[f"{kind}_{unit}"] >= least:
                yield lines[number - 1], c[f"{kind}s"], c[f"{kind}_{unit}"], c[f"{kind}_ideal"]

rows = [(code, "load", *rest) for code, *rest in by_line(step1, ("global_load", "sectors"), least=4000)]
rows += [(code, "store", *rest) for code, *rest in by_line(step1, ("global_store", "sectors"), least=20000)]
show.table(rows, ["line of step 1", "", "instructions", "sectors", "at best"])
assert [r[3] / r[4] for r in rows] == [1, 2, 2, 2]

# %% [markdown]
# The tiles of K and V are loaded with neighbouring threads on neighbouring chunks: ideal. But a thread that has a row of its own loads and stores Q and O with a stride of a row: each lane's 16 bytes lie in a sector of
# their own, half of which nobody in this instruction wanted. FA1's order does that in every round, and so moves up to twice what its formula says (the L1 cache may still have the other half when the next
# chunk asks for it). In FA2's order only Q (once) and O (once) suffer.

# %% [markdown]
# ## 8. Who waits for whom: wavefronts
#
# With the traffic down, what bounds step 2? A multiprocessor can do four warps' worth of `fmaf` in a cycle (128 lanes), and shared memory serves one wavefront in a cycle. So a kernel needs at least
# **four `fmaf` instructions for each wavefront**, or shared memory is the bound. Both products take $2N^2D$ multiply-adds, so $2N^2D/32$ instructions of a warp:

# %%
def fma_per_wavefront(c, seq_len=256, head_dim=64):
    wavefronts = c["shared_load_wavefronts"] + c["shared_store_wavefronts"]
    return 2 * seq_len**2 * head_dim / 32 / wavefronts

c1, c2 = counted(step1.path), counted(step2.path)
print(f"step 2: {c2['shared_load_wavefronts']} load wavefronts, {fma_per_wavefront(c2):.2f} fmaf a wavefront, 4 needed")
assert c2["shared_load_wavefronts"] == 2 * (2 * 256 * 256 * 64 // 32 // 4)

# %% [markdown]
# Half of what is needed, and here is why: `dot(q_rmem[c], k_smem[n][c], s[n])`. All 32 lanes read the *same* four numbers of K, one broadcast, two wavefronts; it feeds four `fmaf`. **A number that comes from shared memory is used once by
# each thread.** To do better, a thread must use it more than once. So it must have more than one row.
#
# ## 9. Tiles in shared memory
#
# Step 3 makes the 16 × 16 threads of a block share a tile of S. A thread computes 4 rows by 4 keys: it reads 4 chunks of Q and 4 of K, 8 reads, for 64 `fmaf`. Q and S move to shared memory, and every tile is loaded and stored along its rows. The heart of the diff:

# %%
step3 = steps(6)[2]
show._between(step3.path, "// New: S_ij = Q_i K_j^T", "__syncthreads();")

# %% [markdown]
# *Predict:* step 2 reads one chunk of K for 4 `fmaf`, step 3 reads 8 chunks for 64: half as many reads for $QK^\top$. What becomes of the wavefronts?

# %%
print(step3.name, "·", correct(step3).verdict)
c3 = counted(step3.path)
loads = c3["shared_load_wavefronts"]
print(f"shared loads {c2['shared_loads']} -> {c3['shared_loads']}, load wavefronts {c2['shared_load_wavefronts']} -> {loads}")
print(f"fmaf a wavefront {fma_per_wavefront(c2):.2f} -> {fma_per_wavefront(c3):.2f}")
assert 1.9 < fma_per_wavefront(c3) < 2.1

# %% [markdown]
# **That did not help.** Half of the reads, and as many wavefronts as before. *Why?* Ask for the counts line by line:

# %%
rows = [(*r[:3],) for r in by_line(step3, ("shared_load", "wavefronts"), ("shared_store", "wavefronts"),
        least=2000)]
show.table(rows, ["line of step 3", "instructions", "wavefronts"])

# %% [markdown]
# - A broadcast `float4` cost 2 wavefronts. A chunk of K now takes 4: 16 lanes want 16 different rows, and a quarter of the warp is served at a time. Fewer instructions, each twice as dear. $QK^\top$ gets to 2.67 `fmaf` a wavefront.
# - $PV$ reads P as single floats: 4 reads of P and one of V for 16 `fmaf`. Exactly 2 a wavefront, as before.
# - And S goes to shared memory and back for the softmax, which only 64 of the 256 threads compute, between two more barriers.
#
# What the step does buy is not in these counts. It is in the compiler's report of section 13: step 2 needs all 255 registers of a thread, and at $D = 128$ it spills; step 3 needs about half as many, so twice as many warps fit on a multiprocessor, and a waiting warp costs
# nothing while another one can run. The padding (`CHUNKS + 1`) is section 4's: without it a chunk of K would take 32 wavefronts. Try it:

# %%
unpadded = step3.path.read_text().replace("k[BLOCK_N][CHUNKS + 1]", "k[BLOCK_N][CHUNKS]")
c = counted(unpadded)
print(f"wavefronts with padding {loads}, without {c['shared_load_wavefronts']}; conflicts {c3.bank_conflicts} -> {c.bank_conflicts}")
assert c["shared_load_wavefronts"] > 2 * loads

# %% [markdown]
# The 2048 conflicts that are left come from the store of S: the two halves of a warp write 16 words each into neighbouring rows, which are 65 words apart, so 15 of their banks are the same. It is 1.5 % of the wavefronts.
#
# ## 10. Registers
#
# Step 4 draws the conclusion. A thread has 8 rows by 8 keys: 16 chunks read for 256 `fmaf`. S never leaves the registers. The 8 lanes that share a row are neighbours in one warp, so the maximum is a butterfly of three rounds. P must change hands, because lane $x$ has the keys $x, x + 8, \ldots$ and every
# lane needs all of them: it passes through a corner of shared memory that belongs to the warp, with `__syncwarp` in place of the block's barrier, and is read back as `float4`.

# %%
step4 = steps(6)[3]
show.diff(step3.path, step4.path, context=0)

# %% [markdown]
# *Predict* before you run on. For 8 × 8: 8 chunks of K at 4 wavefronts each, 8 chunks of Q, which come in broadcasts, at 2 each, for 256 `fmaf`. And $PV$?
#
# <details><summary>Answer</summary>
#
# $256 / (8 \cdot 4 + 8 \cdot 2) = 5.33$ for $QK^\top$. $PV$ is the same picture: for four keys, 4 × 2 chunks of V at 4 wavefronts each and 8 chunks of P at 2 each, for $8 \cdot 2 \cdot 4 \cdot 4 = 256$ `fmaf`: 5.33 again. What is stored (tiles, P) makes it a little less.
#
# </details>

# %%
print(step4.name, "·", correct(step4).verdict)
c4 = counted(step4.path)
print(f"fmaf a wavefront {fma_per_wavefront(c3):.2f} -> {fma_per_wavefront(c4):.2f}; block barriers {c3['barriers']} -> {c4['barriers']}; "
      f"shuffles {c3['shuffles']} -> {c4['shuffles']}")
print(f"bytes read {c3['global_load_bytes']} -> {c4['global_load_bytes']}, because BLOCK_M is 128 again")
assert fma_per_wavefront(c4) > 4 and c4.bank_conflicts == 0

# %% [markdown]
# More than four `fmaf` a wavefront: shared memory is no longer the bound. This is the same climb as in a matrix product (Boehm's worklog in the references has it for SGEMM), with a softmax in the middle.
#
# ## 11. Latency, and the shape of a tile
#
# What is left is waiting. In step 4 a block loads a tile, waits, computes, waits. Step 5 uses `cp.async`: the copy from global to shared memory goes past the registers, and the thread does not wait for it. K's next tile travels while $PV$ is computed, V's while $QK^\top$ is. Phase 8 has all of
# `cp.async`; here it is eight lines.

# %%
step5, step6 = steps(6)[4:]
show._between(step5.path, "// New: K_j has been read", "cp_async_commit();")
c5, c6 = counted(step5.path), counted(step6.path)
print(f"loads through registers {c4['global_loads']} -> {c5['global_loads']}, cp.async {c4['cp_async']} -> {c5['cp_async']}")
assert c5["cp_async_bytes"] == c4["global_load_bytes"]

# %% [markdown]
# **The emulator cannot show what this step is worth.** It counts work, and this step does the same work in another order. Only a clock on a GPU can tell, and section 14 has it.
#
# What the emulator can do is see a copy that is read too early. Take the wait away:

# %%
broken = step5.path.read_text().replace("cp_async_wait<1>();", "")
module = load_inline(broken, check=True, dtype=torch.float32)
module.forward(*torch.randn(3, 1, 1, 64, 64))
print(module.report.findings[0].kind, "·", module.report.findings[0].message)
assert module.report.findings[0].kind == "read-before-wait"

# %% [markdown]
# Step 6 makes the tile's shape a parameter: 64 rows a block where 128 would leave multiprocessors without a block, and a smaller tile where the GPU has less shared memory (99 KB on RTX cards). For one head of 256 rows it takes the small one: more traffic and more wavefronts on purpose, for twice as
# many blocks.

# %%
for step in (step5, step6):
    print(step.name, "·", correct(step, (64, 128)).verdict)
print(f"step 6 on one small head: bytes read {c5['cp_async_bytes']} -> {c6['cp_async_bytes']}, fmaf a wavefront {fma_per_wavefront(c6):.2f}")
assert fa2_cost(256, 256, 64, block_m=64).bytes_read == c6["cp_async_bytes"]

# %% [markdown]
# ## 12. All steps in one table
#
# One head, $N = 256$, $D = 64$, everything counted by the emulator. (What `cp.async` writes to shared memory is not among the wavefronts of steps 5 and 6.)

# %%
counts = list(zip(steps(6), (c1, c2, c3, c4, c5, c6)))
rows = []
for step, c in counts:
    read, sectors = c["global_load_bytes"] + c["cp_async_bytes"], c["global_load_sectors"] + c["cp_async_sectors"]
    wavefronts = c["shared_load_wavefronts"] + c["shared_store_wavefronts"]
    rows.append((step.name[3:], read // 1024, c["global_store_bytes"] // 1024, sectors, wavefronts,
                fma_per_wavefront(c), c["barriers"]))
show.table(rows, ["step", "KiB read", "KiB written", "sectors read", "shared wavefronts", "fmaf a wavefront", "barriers"])

# %% [markdown]
# The same as a figure. The line at 4 is where shared memory and arithmetic are in balance; below it the multiprocessor's arithmetic cannot be busy all the time, whatever else you do.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
names = [s.name[3:].replace("_", "\n", 1) for s, _ in counts]
thousands = [(c["shared_load_wavefronts"] + c["shared_store_wavefronts"]) / 1000 for _, c in counts]
curves.columns(left, names, {"": (thousands, "blue")}, title="Shared-memory wavefronts",
               ylabel="thousand wavefronts")
curves.columns(right, names, {"": ([fma_per_wavefront(c) for _, c in counts], "blue")},
               title="Arithmetic for each of them", ylabel="fmaf instructions per wavefront")
curves.level(right, 4, "balance", "red")
plt.show()

# %% [markdown]
# ### Can you believe these counts?
#
# Each kernel was also launched on an H200 under Nsight Compute, and in the emulator on the same inputs (two heads of 200 rows, causal). Emulated against measured:

# %%
for run in recorded_runs("validation"):
    kinds = ["shared read wavefronts", "shared write wavefronts", "global read sectors", "global write sectors"]
    pairs = [(r["kernel"][3:], r["head_dim"], *(r["counters"][k] for k in kinds)) for r in run["rows"] if r["kernel"].startswith("p6")]
    show.table([(name, d, *(f"{a} / {b:.0f}" for a, b in rest)) for name, d, *rest in pairs], ["step", "D", *kinds])
    assert all(abs(a - b) <= 0.1 * b for name, _, *rest in pairs for a, b in (rest if name != "1_fa1" else rest[:3]))

# %% [markdown]
# Most of them agree to the last digit. With `cp.async` the hardware counts up to 8 % more sectors: the rows of Q and K are padded by 16 bytes, so every other row starts in the middle of a sector's worth of shared memory, and where a sector's two halves go to different 128-byte lines it is fetched twice. (That makes one sector more for every 64 numbers of a row, on average: 528 a head at 200 rows and D = 64, which is what the counter says.) And one count is wrong: the sectors that step 1 writes. The line that sets O to zero is one 16-byte store for nvcc, and four 4-byte stores for the compiler that builds the emulated kernel.
#
# ## 13. What the compiler says
#
# Registers are the resource that no counter of the emulator shows: the compiler deals them out. nvcc was asked for an H200 (`sm_90`), and its answers were recorded; with nvcc on your machine, `table(live=True)` asks again. (Step 6 has two kernels, one for each tile.)

# %%
names = [s.name for s in steps(6)]
kernels = [r for r in recorded()["kernels"] if r.target == "sm_90" and r.step in names] if RECORDED.exists() else []
gpu = runtime.limits("H200")
rows = []
for r in sorted(kernels, key=lambda r: (r.head_dim, names.index(r.step), r.kernel)):
    rows.append((r.step[3:], r.head_dim, r.registers, r.spill_bytes, r.shared_bytes,
                r.instructions.get("FFMA", 0), r.instructions.get("LDS", 0)))
show.table(rows, ["step", "D", "registers a thread", "spilled bytes", "shared bytes a block", "FFMA in the code", "LDS in the code"])

# %% [markdown]
# How many warps does that leave room for? A multiprocessor has 65536 registers, dealt out to a thread in eights, and 228 KB of shared memory for its blocks (each costs 1 KB extra):

# %%
def resident_warps(registers, threads, shared):
    """Warps that a multiprocessor of an H200 can hold: (warps, what limits them)."""
    by_registers = gpu.registers_per_sm // (-(-registers // 8) * 8 * threads)
    by_shared = gpu.shared_per_sm // (shared + 1024)
    blocks = min(by_registers, by_shared, 64 * 32 // threads)
    return blocks * threads // 32, "registers" if by_registers <= by_shared else "shared memory"

threads = {"p6_1_fa1": 128, "p6_2_loop_order": 128, "p6_3_tiles": 256, "p6_4_registers": 128, "p6_5_overlap": 128}
for r in kernels:
    if r.head_dim == 64 and r.step in threads:
        warps, limit = resident_warps(r.registers, threads[r.step], r.shared_bytes)
        print(f"{r.step:16} {r.registers:3} registers, {warps:2} warps of 64 at most, limited by {limit}")

# %% [markdown]
# Step 2 and step 4 have the same 8 warps, and yet step 4 is 1.4 times as fast (section 14): each of its threads has many independent `fmaf` to issue, and needs no other warp to fill the time. Occupancy is a means. Volkov's talk in the references makes that point; step 3 is the other strategy.

# %% [markdown]
# ## 14. The clock
#
# A float32 FlashAttention in FlashAttention-1's order was published with these times on an Ada GPU, beside PyTorch's three unfused calls in float32 (`flashlab.bench.published`, where the README says what was run).

# %%
ada = {(r["batch"], r["heads"], r["seq_len"], r["variant"]): r["ms"] for r in published.load("fa1_f32_fa2_mma_ada") if r["head_dim"] == 64}
shapes = sorted({key[:3] for key in ada})
ratios = {s: ada[(*s, "fa1_f32")] / ada[(*s, "torch_naive_f32")] for s in shapes}
print(f"the published FA1 kernel took {min(ratios.values()):.0f} to {max(ratios.values()):.0f} times as long as unfused torch")
for s in [(8, 8, 256), (16, 16, 256)]:
    print(f"batch {s[0]:2}, heads {s[1]:2}, N = {s[2]}: {s[0] * s[1]:3} heads in all, {ada[(*s, 'fa1_f32')]:.1f} ms")

# %% [markdown]
# Four times the heads for 1.3 times the time: so it looks when a head is one block, and 64 blocks leave most of a GPU empty. And a *fused* kernel lost to an *unfused* one by a factor of up to a hundred. Fusing saves nothing by itself. What counts is what you have counted here: traffic with its constant, wavefronts, blocks.
#
# The first figure has those times. The second has what was recorded on an H200 at the same shapes: one panel for each of our steps, its speed against unfused torch, with the other steps in grey. These are two machines: compare within a figure, not across. (`flashlab bench scalar` measures on your GPU.)

# %%
runs = bench.recorded()
fig, ax = plt.subplots(figsize=(6, 3.4))
ladder.times(ax, ada, {"fa1_f32": ("FA1 kernel", "orange"), "torch_naive_f32": ("unfused torch", "black")},
             "Published, an Ada GPU, D = 64, float32")
for run in runs:
    ms = {(r["batch"], r["heads"], r["seq_len"], r["variant"]): r["ms"]
          for r in run["rows"] if r["head_dim"] == 64 and not r["causal"]}
    ladder.small_multiples(ms, {s.name: f"step {s.name[3:]}" for s in steps(6)},
                           ("torch_naive_f32", "unfused torch"), ("sdpa_efficient_f32", "torch, fused"),
                           f"Recorded, {run['machine']['gpu']}, D = 64, float32")
plt.show()

# %% [markdown]
# The same in numbers: how many times as fast as unfused torch (float32, TF32 off) each step is, over all recorded shapes of both head dimensions, causal ones too. Above 1 the kernel is faster.

# %%
for run in runs:
    m = run["machine"]
    print(f"{m['gpu']}, torch {m['torch']}, {m['date']}: {len(run['rows']) // (len(steps(6)) + len(bench.PEERS))} shapes")
    for step in steps(6):
        speedups = sorted(bench.ratios(run, step.name).values())
        print(f"{step.name:16} {speedups[0]:5.2f} to {speedups[-1]:5.2f} times as fast, median {speedups[len(speedups) // 2]:5.2f}")
if not runs:
    print("none recorded yet: `flashlab bench scalar` measures them on your GPU")

# %% [markdown]
# ### Did the counts predict it?
#
# An H200 does at most 132 · 128 · 2 FLOP in a cycle, 67 TFLOP/s in float32 at the 1980 MHz that were recorded. With fewer than four `fmaf` a wavefront, shared memory lowers that ceiling in proportion. Theory and clock, for batch 16, 16 heads, $N = 1024$, $D = 64$. (At this shape step 6 takes the tile of step 5.)

# %%
for run in runs:
    clock = {(r["batch"] * r["heads"], r["seq_len"], r["head_dim"], r["causal"], r["variant"]): r for r in run["rows"]}
    peak = 132 * 128 * 2 * run["machine"]["sm_clock_mhz"]["median"] / 1e6
    rows = []
    for step, c in zip(steps(6), (c1, c2, c3, c4, c5, c5)):
        ceiling, r = min(1, fma_per_wavefront(c) / 4) * peak, clock[256, 1024, 64, False, step.name]
        rows.append((step.name[3:], r["ms"], round(r["tflops"], 1), round(ceiling, 1),
                    f"{r['tflops'] / ceiling:.0%}"))
        assert r["tflops"] < ceiling
    show.table(rows, ["step", "ms", "TFLOP/s", "ceiling by wavefronts", "of it"])

# %% [markdown]
# Steps 2 and 3 have the same count, and the same time. The tiles of step 3 bought nothing at $D = 64$, as the emulator said. At $D = 128$ it is another story, which the compiler told: step 2 spills. And one more prediction can be tested: FlashAttention-1's order has one block a head.

# %%
for run in runs:
    ms = {key: r["ms"] for key, r in clock.items()}
    two, three = (ms[256, 1024, 64, False, s.name] for s in (step2, step3))
    wide = [ms[256, 1024, 128, False, s.name] for s in (step1, step2, step3)]
    print(f"D =  64: step 2 {two:.2f} ms, step 3 {three:.2f} ms; D = 128: step 1 {wide[0]:.1f}, step 2 {wide[1]:.1f}, step 3 {wide[2]:.1f} ms")
    heads = [ms[h, 256, 64, False, step1.name] for h in (64, 128, 256)]
    print("step 1, N = 256:", ", ".join(f"{h} heads {t:.3f} ms" for h, t in zip((64, 128, 256), heads)), "on 132 multiprocessors")
    assert abs(two / three - 1) < 0.03 and wide[1] > 2 * wide[2] and heads[1] < 1.1 * heads[0]

# %% [markdown]
# - 64 heads and 128 heads take the same time: there is a multiprocessor for each. FlashAttention-2's order fills the GPU with $N / \mathrm{BLOCK\_M}$ times as many blocks, and most where heads are few.
# - With spills, the better loop order loses to the worse one ($D = 128$, the first two times). An order that keeps the state in registers needs registers that hold it.
# - `cp.async` is worth 12 % at this shape, which no count could say. The choice of tiles in step 6 is worth a factor of 1.37 on the smallest grid (64 heads, $N = 256$), and costs 2 % on the largest: keep both numbers.
# - The last step is faster than unfused torch on every recorded shape. Against torch's own fused float32 kernel it wins at $D = 64$ (by up to 1.3 times; one causal shape is lost) and loses at $D = 128$, by 15 to 27 %. There is room left.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - A thread knows its index and nothing else. A block shares memory and barriers, a warp shares instructions and shuffles. Every global access carries a guard.
# - Global memory moves sectors of 32 bytes; shared memory serves 32 banks. Both can be counted, and predicted by small formulas.
# - FlashAttention-1's loops keep K and V on chip and let the state of every row travel: $3N^2D/\mathrm{BLOCK\_N}$ numbers, a third of them written. FlashAttention-2's keep the row: $2N^2D/\mathrm{BLOCK\_M}$, none written but the result, and a grid that is $N/\mathrm{BLOCK\_M}$ times as large.
# - Then shared memory is the bound: four `fmaf` a wavefront are needed. Tiles of 4 × 4 did not get there, 8 × 8 in registers did.
# - The rest is latency, which no counter shows.
#
# Left to explore: `BLOCK_N` of step 2 (which resource stops you at 64?); P through shuffles alone; a thread with 16 × 4 (is that better than 8 × 8? count before you run); the softmax of step 3 with all 256 threads; and the 128 FP32 lanes
# themselves: tensor cores do 16 times as many multiply-adds a cycle in 16 bit. That is phase 7.

# %% [markdown]
# ## References
#
# - Dao, Fu, Ermon, Rudra, Ré: *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness* (2022), arXiv 2205.14135. Algorithm 1 is section 6; Theorem 2 is the $\Theta(N^2D^2/M)$.
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), arXiv 2307.08691. Section 3: the swapped loops, and the division once at the end.
# - NVIDIA: *CUDA C++ Programming Guide*: "Thread Hierarchy", "Memory Hierarchy", "Synchronization Functions", "Warp Shuffle Functions"; and *CUDA C++ Best Practices Guide*, "Coalesced Access to Global Memory".
# - Boehm: *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance: a Worklog* (2022), siboehm.com. Coalescing, shared tiles, register tiles, each measured.
# - Volkov: *Better Performance at Lower Occupancy* (GPU Technology Conference, 2010). Why few threads with many registers can win.
