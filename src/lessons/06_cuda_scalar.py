# %% [markdown]
# # Phase 6 · Scalar CUDA C++: from thread and block to a float32 FlashAttention
#
# Triton let you write what a *block* of the GPU does. From here on you write what one *thread* does, in CUDA C++. You start with a
# kernel of four lines. Then you build FlashAttention in six steps. Each step has one idea, and one reason that you can count.

# %% [markdown]
# ## What you will be able to do
#
# - say what a thread, a warp, a block and a grid are, and which memory each of them sees;
# - read and write the C++ of CUDA kernels, and debug them;
# - count sectors of global memory and wavefronts of shared memory, and predict both;
# - write FlashAttention in both loop orders, and derive the bytes that each order moves;
# - name the resource that bounds a kernel: memory traffic, shared memory, registers or latency.

# %% [markdown]
# ## What you need first
#
# Phase 2 (the state $m$, $\ell$, acc and its correction) and phase 3 (the same loop as a kernel). Some C. No GPU: without one, the
# same CUDA source runs in the course's emulator, which executes every thread. With a GPU the same cells compile it with nvcc.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.cost import fa1_cost, fa2_cost
from flashlab.bench import hardware, published, records
from flashlab.bench import scalar as bench
from flashlab.bench.resources import recorded as compiled
from flashlab.check import verify
from flashlab.cuda import CompileError, default_backend, load_inline, missing
from flashlab.cuda.resources import available, resources
from flashlab.figures import curves, ladder, memory, show
from flashlab.kernels import path, steps
from flashlab.simt import SimtError

show.style()
torch.manual_seed(6)
device = runtime.device()

# %% [markdown]
# ## 1. Thread, warp, block, grid
#
# A **kernel** is a function that thousands of **threads** execute. All run the same code. What tells them apart is their index. Threads
# come in **blocks**, and blocks in a **grid**. Inside a block, 32 consecutive threads are a **warp**: the hardware issues one instruction
# for all 32 at once. A thread's place in its warp is its **lane**. Blocks run on **multiprocessors** (SMs); an H200 has 132 of them.

# %% [markdown]
# Who sees which memory? The figure goes from the fastest memory (inside the blue boxes) down to the largest. The sizes are those of an
# H200.

# %%
memory.hierarchy("global memory (HBM): 141 GB, every thread of every block",
                 "shared memory: up to 227 KB, this block's",
                 "each blue box: four of a warp's 32 threads, each with up to 255 registers of its own")
plt.show()

# %% [markdown]
# In the first kernel every thread writes down who it is. Four things are new in its source:
#
# - `__global__` marks a kernel: it runs on the GPU, and the CPU launches it.
# - `blockIdx`, `threadIdx` and `blockDim` are given to each thread. They have up to three dimensions, for counting only: threads are
#   numbered with `x` fastest, and that number decides the warp.
# - `<<<...>>>` is the launch, explained below the cell. `dim3` holds up to three sizes.
# - `extern "C"` makes the launching function callable from Python.
#
# A comma between two assignments, as in `a = 1, b = 2;`, does one after the other. The kernels use it for what belongs together.

# %%
WHO_AM_I = r"""
#include "simt.h"

__global__ void who_am_i(int* out, int n) {                       // out [n][4]
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;    // its number in the block
    const int i = blockIdx.x * blockDim.x * blockDim.y + thread;  // and in the grid
    if (i >= n) return;                                           // the last block has threads with no work
    out[4 * i] = blockIdx.x, out[4 * i + 1] = thread;
    out[4 * i + 2] = thread / 32, out[4 * i + 3] = thread % 32;   // warp and lane
}
extern "C" int run(int* out, int n, void* stream) {
    const dim3 threads(16, 4);                                    // 64 threads per block
    who_am_i<<<(n + 63) / 64, threads, 0, (cudaStream_t)stream>>>(out, n);
    return (int)cudaGetLastError();
}
"""
who = torch.zeros(150, 4, dtype=torch.int32, device=device)
assert load_inline(WHO_AM_I).run(who, 150) == 0  # CUDA's code for success

# %% [markdown]
# The launch `kernel<<<grid, block, bytes, stream>>>(arguments)` has four parts:
#
# | part | meaning | here |
# |---|---|---|
# | grid | how many blocks | `(n + 63) / 64`: enough for all elements |
# | block | how many threads per block, at most 1024 | 16 × 4 |
# | bytes | dynamic shared memory per block | 0 |
# | stream | the queue in which the launch waits its turn | PyTorch's |

# %% [markdown]
# A launch returns at once, and the kernel runs later. Work in one **stream** runs in order. So a kernel must go into the stream that PyTorch
# uses, or it may start before its inputs are ready. `load_inline` compiles the text and passes PyTorch's stream by itself. The last line
# returns CUDA's error code: a refused launch becomes a Python exception.

# %%
rows = [(i, *who[i].tolist()) for i in (0, 15, 16, 31, 32, 63, 64, 149)]
show.table(rows, ["element i", "blockIdx.x", "thread of the block", "warp", "lane"])
i = torch.arange(150)
assert torch.equal(who.cpu().long(), torch.stack([i // 64, i % 64, i % 64 // 32, i % 32], 1))

# %% [markdown]
# Thread (0, 1) of a 16 × 4 block has number 16: it sits in the same warp as (15, 0). Three blocks for 150 elements have 192 threads.
# 42 of them only test `i >= n` and leave. **That test is not optional.** What happens without it?

# %%
source = WHO_AM_I.replace("if (i >= n) return; ", "")
try:
    load_inline(source, check=True).run(torch.zeros(150, 4, dtype=torch.int32), 150)
except SimtError as error:
    print(f"{type(error).__name__}: {error}")
    assert error.report.findings[0].kind == "global-out-of-bounds"

# %% [markdown]
# `check=True` asks for the emulator's **watched build**, on every machine. It watches each load and store, and stops at the first bad
# address. A real GPU would report an error with no line, from some later call. Or it would report nothing, if the bytes behind the array
# belong to another tensor. So in this course a kernel first runs in the watched build.

# %% [markdown]
# ## 2. Shared memory, and the first race
#
# The threads of a block can talk through **shared memory**, a small fast memory that the block owns: a `__shared__` array. Here each thread
# puts one number in, and takes another one out. A block's 64 numbers come out in reverse order.

# %%
REVERSE = r"""
#include "simt.h"

__global__ void reverse(const float* x, float* y) {  // one block of 64 threads
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
# *Is anything wrong with it? Thread 5 reads what thread 58 wrote. Both lines are executed by everybody, and the store comes first in the
# source.*
#
# <details><summary>Answer</summary>
#
# The store comes first in each thread. It need not come first *between* threads: warp 0 may have reached the last line while warp 1 has
# not yet started. There is no order between two warps unless you make one.
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
# A **race**: two threads touch one word, one of them writes, and nothing orders them. Line 6 is the store, line 8 the load. The last
# sentence is the consequence: a thread read a word before anybody had written it.
#
# The remedy is a **barrier**. `__syncthreads()` lets no thread of the block past until all have arrived. What was written before it is seen
# after it.

# %%
fixed = load_inline(REVERSE.replace("// here?", "__syncthreads();"), check=True)
y = torch.empty(64)
fixed.run(x, y)
assert torch.equal(y, x.flip(0)) and fixed.report.ok
barriers = fixed.report.counters["barriers"]
print(f"reversed: {torch.equal(y, x.flip(0))}, findings: {len(fixed.report.findings)}, barriers: {barriers}")

# %% [markdown]
# "All have arrived" is meant literally. In an `if` that only some threads enter, a barrier waits for the others. The kernel hangs, or two
# different barriers meet. Here threads 40 to 63 go straight to the second one:

# %%
half = "if (threadIdx.x < 40) __syncthreads();\n    __syncthreads();"
bad = load_inline(REVERSE.replace("// here?", half), check=True)
bad.run(x, y)
print(bad.report.findings[0].message)
assert bad.report.findings[0].kind == "divergent"

# %% [markdown]
# Keep three rules:
#
# 1. A barrier between a write and the reads of others.
# 2. A second one before the memory is written *again*.
# 3. No barrier where not all threads pass.
#
# In the kernels below, every barrier has a comment that says which of the first two it serves.

# %% [markdown]
# ## 3. Global memory moves in sectors
#
# Global memory is never read by the number. It comes in **sectors** of 32 bytes. When a warp loads, the hardware collects the 32 addresses
# and fetches every sector that one of them lies in. Neighbouring lanes on neighbouring floats need 4 sectors for 32 floats: the load is
# **coalesced**. Below, dark is what was asked for, light is what came along for nothing.

# %%
fig, axes = plt.subplots(3, 1, figsize=(8.5, 2.8))
for ax, stride in zip(axes, (1, 2, 8)):
    memory.sectors(ax, stride)
axes[0].set_title("What 32 lanes fetch (first 80 floats; a box between black lines is one sector)")
axes[-1].set_xlabel("float number")
plt.show()

# %% [markdown]
# As a formula: with $s$ floats between neighbouring lanes (the **stride**), $\min(4s, 32)$ sectors. One warp, counted:

# %%
STRIDED = r"""
#include "simt.h"

__global__ void strided(const float* x, float* y, int s) { y[threadIdx.x] = x[threadIdx.x * s]; }

extern "C" int run(const float* x, float* y, int s, void* stream) {
    strided<<<1, 32, 0, (cudaStream_t)stream>>>(x, y, s);
    return (int)cudaGetLastError();
}
"""
module = load_inline(STRIDED, check=True)
for stride in (1, 2, 4, 8, 64):
    module.run(torch.zeros(32 * stride), torch.zeros(32), stride)
    sectors, formula = module.report.counters["global_load_sectors"], min(4 * stride, 32)
    print(f"stride {stride:2}: {sectors:2} sectors = {32 * sectors:4} bytes for 128, formula {formula:2}")
    assert sectors == formula

# %% [markdown]
# A matrix in rows makes both cases. If neighbouring lanes walk along a row, every load is coalesced. If each lane has a row of its own, the
# stride is the length of a row. A lane may also load 16 bytes at once, as a `float4`: one instruction instead of four. Remember this: the first
# kernels below give each thread a row.

# %% [markdown]
# ## 4. Shared memory has 32 banks
#
# Shared memory has 32 **banks** instead of sectors. Each bank serves one 4-byte word per cycle, and word $w$ lies in bank $w \bmod 32$. One
# pass through shared memory is a **wavefront**. If the lanes of a warp want words of 32 different banks, one wavefront serves them. Lanes that
# want *the same* word share it. But $k$ different words of one bank take $k$ wavefronts: a **bank conflict**.

# %% [markdown]
# Lane $l$ reads word $l \cdot p$: the first column of a tile whose rows are $p$ words long. How many wavefronts, for $p = 32$? For $p = 33$?
#
# <details><summary>Answer</summary>
#
# With $p = 32$ all words are in bank 0: 32 wavefronts. With $p = 33$ they are in banks 0, 1, 2, ...: one. In general $\gcd(p, 32)$. So one
# unused word at the end of each row, **padding**, makes a column as cheap as a row.
#
# </details>

# %%
COLUMN = r"""
#include "simt.h"

__global__ void column(float* y, int pitch) {
    __shared__ float tile_smem[32 * 64];
    for (int i = threadIdx.x; i < 32 * pitch; i += 32) tile_smem[i] = i;
    __syncwarp();                     // a barrier of one warp: the tile is complete
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
    wavefronts, formula = module.report.counters["shared_load_wavefronts"], math.gcd(pitch, 32)
    print(f"rows of {pitch} words: {wavefronts:2} wavefronts for a column, gcd(pitch, 32) = {formula}")
    assert wavefronts == formula

# %% [markdown]
# The emulator's model was compared with Nsight Compute's counters on an H200, pattern by pattern. One rule that no manual states was found
# that way. A `float4` load is served a quarter of the warp at a time: four wavefronts at best. It takes only two if neighbouring lanes come
# in pairs that want the same address. So the cheapest `float4` load, with one address for all lanes (a **broadcast**), takes two.
#
# Here each lane loads the `float4` whose number `from` tells it:

# %%
PAIRS = r"""
#include "simt.h"

__global__ void pairs(const int* from, float4* y) {
    __shared__ float4 tile_smem[32];
    tile_smem[threadIdx.x] = make_float4(0, 0, 0, 0);
    __syncwarp();
    y[threadIdx.x] = tile_smem[from[threadIdx.x]];
}
extern "C" int run(const int* from, float4* y, void* stream) {
    pairs<<<1, 32, 0, (cudaStream_t)stream>>>(from, y);
    return (int)cudaGetLastError();
}
"""
module, lane, found = load_inline(PAIRS, check=True), torch.arange(32), []
cases = {"lane": lane, "lane / 2": lane // 2, "lane % 16": lane % 16, "0": 0 * lane}
for name, wanted in cases.items():
    module.run(wanted.int(), torch.zeros(32, 4))
    found.append(module.report.counters["shared_load_wavefronts"])
    print(f"from = {name:9}: {len(wanted.unique()):2} different addresses, {found[-1]} wavefronts")
assert found == [4, 2, 4, 2]

# %% [markdown]
# The middle two want the same 16 addresses, twice each. Only where the two lanes that want one are neighbours does it help. Sections 9 to 11
# count with these numbers: 2 where neighbours want the same address, as in a broadcast, and 4 where they do not.

# %% [markdown]
# ## 5. Inside a warp: shuffles
#
# Lanes of a warp can read each other's registers. `__shfl_xor_sync(mask, value, step)` gives each lane the `value` of the lane whose number
# differs in the bits of `step`. Five rounds with steps 1, 2, 4, 8, 16 leave the maximum of all 32 lanes in **every** lane. This *butterfly*
# finds a row's maximum once the row is spread over a warp. Here with 8 lanes:

# %%
BUTTERFLY = r"""
#include "simt.h"

__global__ void butterfly(const float* x, float* y) {  // y [4][32]: every lane's maximum after each round
    float m = x[threadIdx.x];
    y[threadIdx.x] = m;
    for (int step = 1, round = 1; step < 8; step *= 2, round++) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, step));   // ~0u: all 32 lanes take part
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
rounds = zip(["at first", "step 1", "step 2", "step 4"], y)
show.table([(name, *map(int, row[:8])) for name, row in rounds], ["lane", *map(str, range(8))])
assert (y[3] == 9).all()

# %% [markdown]
# That is the machine. The next section is the language; after it come the kernels.

# %% [markdown]
# ## 6. A primer: the C++ of the kernels
#
# The kernels of this course use a small part of C++. Each part is one cell here: a kernel that runs, and an output that is compared. Skip
# what you know, and come back when a kernel uses it.
#
# First, who may call a function? `__global__` is a kernel. `__device__` functions are for kernels. `__host__ __device__` functions are for
# both sides. `__forceinline__` puts the body in the place of the call, so a call costs nothing.

# %%
FUNCTIONS = r"""
#include "simt.h"

constexpr int THREADS = 32;           // known at compile time: it costs no register and no load
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ float square(float x) { return x * x; }

__global__ void squares(const float* x, float* y, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) y[i] = square(x[i]);
}
extern "C" int run(const float* x, float* y, int n, void* stream) {
    squares<<<ceil_div(n, THREADS), THREADS, 0, (cudaStream_t)stream>>>(x, y, n);
    return (int)cudaGetLastError();
}
"""
x, y = torch.arange(100.0, device=device), torch.zeros(100, device=device)
load_inline(FUNCTIONS).run(x, y, 100)
print("squares of 0 to 99:", torch.equal(y, x * x))

# %% [markdown]
# `constexpr` numbers decide sizes and loops while compiling. A `static_assert` checks them at the same time: a wrong choice is a compile
# error with a sentence, not a wrong result. A **macro** sets such a number from outside, as `nvcc -DTHREADS=48` does. In `load_inline` that
# is `defines`.

# %%
whole_warps = 'static_assert(THREADS % 32 == 0, "whole warps");'
asserted = FUNCTIONS.replace("constexpr int THREADS = 32;", whole_warps)
for threads in (64, 48):
    try:
        load_inline(asserted, defines={"THREADS": threads}).run(x, y, 100)
        print(threads, "threads: compiled and run")
    except CompileError as error:
        print(threads, "threads: refused,", "whole warps" if "whole warps" in str(error) else error)

# %% [markdown]
# A **template** is a function with parameters for the compiler. Here they are the sizes of an array, and nobody has to write them. The
# parameter `float (&tile)[ROWS][COLUMNS]` is a **reference to an array**: the array itself, not a copy and not a bare pointer. So its sizes are
# part of its type, and the compiler fills in `ROWS` and `COLUMNS`.

# %%
TEMPLATE = r"""
#include "simt.h"

template <int ROWS, int COLUMNS>
__device__ void fill(float (&tile)[ROWS][COLUMNS], float value) {
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32) tile[i / COLUMNS][i % COLUMNS] = value;
}
__global__ void two_tiles(float* y) {
    __shared__ float k_smem[4][8], q_smem[2][33];
    fill(k_smem, 1.f), fill(q_smem, 2.f);              // fill<4, 8> and fill<2, 33>
    __syncwarp();
    if (threadIdx.x == 0) y[0] = k_smem[3][7], y[1] = q_smem[1][32];
}
extern "C" int run(float* y, void* stream) {
    two_tiles<<<1, 32, 0, (cudaStream_t)stream>>>(y);
    return (int)cudaGetLastError();
}
"""
y = torch.zeros(2, device=device)
load_inline(TEMPLATE).run(y)
print("last elements of the two tiles:", y.tolist())

# %% [markdown]
# A thread's own variables are **registers**. Registers have no addresses. So a local array can only live in registers if each index is a
# constant in the compiled code. `#pragma unroll` makes it one: the loop is written out, eight times here, with `i` = 0, 1, 2, ...
# `#pragma unroll 1` keeps the loop a loop.

# %%
UNROLL = r"""
#include "simt.h"

constexpr int TIMES = UNROLLED;       // a pragma knows constants, but no macros
__global__ void turn(const float* x, float* y) {
    float mine[8];
#pragma unroll TIMES
    for (int i = 0; i < 8; i++) mine[i] = x[8 * threadIdx.x + i];
#pragma unroll TIMES
    for (int i = 0; i < 8; i++) y[8 * threadIdx.x + i] = mine[7 - i];
}
extern "C" int run(const float* x, float* y, void* stream) {
    turn<<<1, 32, 0, (cudaStream_t)stream>>>(x, y);
    return (int)cudaGetLastError();
}
"""
x, results = torch.arange(256.0, device=device), []
for times in (8, 1):
    results.append(torch.zeros(256, device=device))
    load_inline(UNROLL, defines={"UNROLLED": times}).run(x, results[-1])
print("unrolled and rolled agree:", torch.equal(*results))

# %% [markdown]
# Same result, other code. With nvcc on this machine the next cell asks the compiler where the array is. In the rolled loop it is not in
# registers but in **local memory**: a thread's private piece of global memory, far slower. That is why nearly every loop of the
# kernels below carries the pragma.

# %% tags=["nbval-ignore-output"]
for times in (8, 1) if available() else ():
    (turn,) = resources(UNROLL, target="sm_90", UNROLLED=times)
    print(f"unrolled {times} times: {turn.stack_bytes} bytes of local memory per thread")
    assert (turn.stack_bytes == 0) == (times == 8)
if not available():
    print("no nvcc here")

# %% [markdown]
# Shared memory can also get its size at the launch. `extern __shared__` is an array without a size; the **third launch argument** says how
# many bytes it has. `__align__(16)` makes its address a multiple of 16, as a `float4` needs. The kernels describe its layout by a `struct`, and
# `auto& [a, b] = ...` gives the members names. Above 48 KB, `cudaFuncSetAttribute` has to ask for it first. `__launch_bounds__(32)` promises at most 32 threads per block, so the compiler knows
# how many registers it may give each.

# %%
DYNAMIC = r"""
#include "simt.h"

struct Shared {
    float4 rows[32];                                   // a float4 is four floats: .x .y .z .w, 16 bytes
    float sums[32];
};
__global__ void __launch_bounds__(32) sum_rows(const float4* x, float* y) {
    extern __shared__ __align__(16) char shared_bytes[];
    auto& [rows_smem, sums_smem] = *(Shared*)shared_bytes;
    const int lane = threadIdx.x;
    rows_smem[lane] = x[lane];
    __syncwarp();
    const float4 row = rows_smem[31 - lane];
    sums_smem[31 - lane] = row.x + row.y + row.z + row.w;
    __syncwarp();
    y[lane] = sums_smem[lane];
}
extern "C" int run(const float* x, float* y, void* stream) {
    sum_rows<<<1, 32, sizeof(Shared), (cudaStream_t)stream>>>((const float4*)x, y);
    return (int)cudaGetLastError();
}
"""
x, y = torch.arange(128.0, device=device), torch.zeros(32, device=device)
load_inline(DYNAMIC).run(x, y)
print("sums of 32 rows:", torch.equal(y, x.view(32, 4).sum(1)))

# %% [markdown]
# A **lambda** is a function written inside another; `[&]` lets it use the variables around it. With an `auto` parameter it is a template.
# `std::true_type{}` is an empty object whose *type* says true, and `decltype(x)::value` reads that. So the body is compiled twice: once with
# the test and once without. Phase 9 does this with the causal mask.

# %%
LAMBDA = r"""
#include "simt.h"
#include <type_traits>

__global__ void count_keys(int* y, int last) {
    auto tile = [&](auto is_masked) {
        constexpr bool MASKED = decltype(is_masked)::value;
        int seen = 0;
        for (int key = 0; key < 8; key++) {
            if constexpr (MASKED)                      // decided by the compiler: no test is left where false
                if (key > last) continue;
            seen++;
        }
        return seen;
    };
    y[0] = tile(std::false_type{}), y[1] = tile(std::true_type{});
}
extern "C" int run(int* y, int last, void* stream) {
    count_keys<<<1, 1, 0, (cudaStream_t)stream>>>(y, last);
    return (int)cudaGetLastError();
}
"""
y = torch.zeros(2, dtype=torch.int32, device=device)
load_inline(LAMBDA).run(y, 4)
print("keys seen without and with the mask:", y.tolist())

# %% [markdown]
# Some instructions have no C++ name. `ptx.cuh` wraps them as functions (**PTX** is NVIDIA's assembly language). One of them, `cp.async`,
# copies from global to shared memory while the thread goes on: `cp_async<16>` copies 16 bytes. It wants a shared address as a plain 32-bit
# number: `smem_u32(pointer)`. Copies are *committed* in groups and then *waited for*.

# %%
COPY = r"""
#include "ptx.cuh"

__global__ void copy(const float4* x, float4* y) {
    __shared__ float4 tile_smem[32];
    cp_async<16>(smem_u32(&tile_smem[threadIdx.x]), &x[threadIdx.x]);
    cp_async_commit();                                 // a group of copies is complete
    cp_async_wait<0>();                                // at most 0 groups of this thread are on their way
    __syncwarp();                                      // and those of the other lanes have arrived
    y[threadIdx.x] = tile_smem[31 - threadIdx.x];
}
extern "C" int run(const float* x, float* y, void* stream) {
    copy<<<1, 32, 0, (cudaStream_t)stream>>>((const float4*)x, (float4*)y);
    return (int)cudaGetLastError();
}
"""
x, y = torch.arange(128.0, device=device), torch.zeros(128, device=device)
load_inline(COPY).run(x, y)
print("rows reversed:", torch.equal(y.view(32, 4), x.view(32, 4).flip(0)))

# %% [markdown]
# ### How to debug a kernel
#
# 1. Make it small: one block, one warp, an input that you can add up by hand.
# 2. Run the watched build, and read `module.report.findings`.
# 3. If it finds nothing, the arithmetic is wrong. Print from **one** thread, with `printf`.
#
# This butterfly should add up 32 ones. The watched build finds nothing, but the sum is wrong:

# %%
WRONG_SUM = r"""
#include "simt.h"

__global__ void total(const float* x, float* y) {
    float sum = x[threadIdx.x];
    for (int step = 1; step < 16; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x == 0) printf("step %d: lane 0 has %g\n", step, sum);
    }
    y[threadIdx.x] = sum;
}
extern "C" int run(const float* x, float* y, void* stream) {
    total<<<1, 32, 0, (cudaStream_t)stream>>>(x, y);
    return (int)cudaGetLastError();
}
"""
module, y = load_inline(WRONG_SUM, check=True), torch.zeros(32)
module.run(torch.ones(32), y)
print(f"findings: {len(module.report.findings)}, sum: {y[0]:g}, wanted: 32")
assert y[0] == 16

# %% [markdown]
# Each line doubles the sum, as it should, but there are four lines and not five. The loop must run to `step < 32`. On a GPU `printf` works
# too, but its text goes to the terminal, not to the notebook.

# %% [markdown]
# ### One problem for all kernels
#
# From here on every kernel has the same interface: `extern "C" int forward(const Problem* p, void* stream)`. `struct Problem` describes one
# attention: pointers, strides, sizes, mask and scale. `problem.cuh` defines it, and every kernel begins with it. `rows_of` finds a row of a
# head: it multiplies indices by **strides**, so tensors need not be contiguous. (`MMA_M`, `MMA_N` and `MMA_K` are for phase 7.)

# %%
show.source(path("problem.cuh"))

# %% [markdown]
# Here is the smallest `forward`: it copies `q` to `o`. One block per head, one thread per column. `module.forward` checks the tensors, fills
# the struct and allocates `o` and `lse`. The input is `[batch, seq_len, heads, head_dim]` in memory; only the strides tell.

# %%
COPY_Q = r"""
#define ELEMENT float
#include "problem.cuh"

__global__ void copy_q(const Problem p) {
    const int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads, column = threadIdx.x;
    for (int row = 0; row < p.seq_q; row++) {
        const float* q_gmem = rows_of(p.q, p.q_stride, batch, head, row);
        rows_of(p.o, p.o_stride, batch, head, row)[column] = q_gmem[column];
    }
}
extern "C" int forward(const Problem* p, void* stream) {
    copy_q<<<p->batch * p->heads, p->head_dim, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
"""
q = torch.randn(2, 10, 3, 64, device=device).transpose(1, 2)
o, _ = load_inline(COPY_Q, dtype=torch.float32).forward(q, q, q)
print(f"shape {tuple(q.shape)}, strides {q.stride()}, copied: {torch.equal(o, q)}")

# %% [markdown]
# ### What PyTorch does with your source
#
# PyTorch can build CUDA by itself: `torch.utils.cpp_extension.load_inline` runs nvcc, makes a Python module and imports it. It needs one
# more C++ file, the **binding**: functions that take tensors, find their addresses and the current stream, and call your `extern "C"`
# functions. flashlab writes this file from the signatures. This is the one for the first kernel of the lecture:

# %%
binding = load_inline(WHO_AM_I).binding_source
show.source(binding)

# %% [markdown]
# With a GPU, the next cell calls PyTorch directly: the binding, the CUDA text, the folder of `simt.h`. `run` then takes tensors and no stream.
# flashlab's `load_inline(..., backend="torch")` makes the same call, with a cache and readable errors around it. Without a GPU the code is
# there to be read.

# %%
from torch.utils import cpp_extension

from flashlab.simt.build import INCLUDE

if missing("torch") is None:  # a GPU, nvcc and ninja
    extension = cpp_extension.load_inline(name="who_am_i", cpp_sources=[binding], cuda_sources=[WHO_AM_I],
                                          no_implicit_headers=True, extra_include_paths=[str(INCLUDE)])
    again = torch.zeros_like(who)
    assert extension.run(again, 150) == 0 and torch.equal(again, who)

# %% [markdown]
# ## 7. FlashAttention-1, looped as its paper loops
#
# Algorithm 1 of the 2022 paper has K and V in the **outer** loop and Q in the **inner** loop. A tile of K and V comes on chip once. Then every
# query row passes by. So a row is visited once per tile, and between two visits its output $O_i$ and its statistics $m_i$, $\ell_i$ wait in
# global memory. The 2023 paper has the loops the other way round. The figure shows which tile is on chip when, for four tiles of each.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
memory.loop_order(axes[0], "FlashAttention-1: for K, V: for Q", keys_outside=True)
memory.loop_order(axes[1], "FlashAttention-2: for Q: for K, V", keys_outside=False)
plt.show()

# %% [markdown]
# Each white number is a tile that arrives on chip. For O, m and l it also means that the old tile is written back. On the left O arrives 16
# times and leaves 16 times. On the right it is made on chip, and leaves four times. There K and V arrive 16 times, but they are only read.

# %% [markdown]
# Step 1 is this algorithm. One block has one head, and one thread has one query row of each tile. First the sizes, and three small functions on
# `float4`: four columns of a row at a time, a **chunk**. `fmaf(a, b, c)` is $a\,b + c$, a multiplication and an addition in one instruction.

# %%
step1, step2, step3, step4, step5, step6 = steps(6)
show.region(step1, "constants", "arithmetic")

# %% [markdown]
# The head of the kernel. One thread's place: which batch and head, where Q, K, V and O of that head begin.
#
# - *Grouped heads*: `heads / kv_heads` neighbouring query heads share a head of K and V.
# - *Causal mask*: query $i$ sees only the keys up to $i + \text{diagonal}$. The `diagonal` lets the last query see the last key.
#
# `m_gmem` and `l_gmem` are where the statistics wait: a **workspace**, memory that the kernel asks for beside its result. O, m and l are set
# first. A row has the same thread in every loop, so nobody has to wait for that.

# %%
show.region(step1, "shared memory", "which rows", "state")

# %% [markdown]
# A tile is copied by all threads together: neighbouring threads take neighbouring chunks, so the loads are coalesced. Rows past the end become
# zeros.

# %%
show.region(step1, "copy a tile")

# %% [markdown]
# Now the outer loop. `keys` is how many keys of this tile the row sees: that takes care of the tail and of a causal mask alike. Compare with
# the paper: $S_{ij}$ (its line 9), the maximum and $\tilde P$ (10), the new statistics (11), $O_i$ rescaled, normalised and written back (12),
# $\ell_i$ and $m_i$ (13). Exponentials are powers of two, with $\log_2 e$ inside the scale, as in phase 3.

# %%
show.region(step1, "main loop")

# %% [markdown]
# After the last tile, lse is made from m and l. (m counts in powers of two, hence the factor `LN2`.) Then the launch, with one block per head. A
# source that needs a workspace has a second function, `workspace_floats`. `module.forward` calls it first, allocates that many floats, and puts
# their address into `p.workspace`.

# %%
show.region(step1, "store", "launch")

# %% [markdown]
# Is it right? The oracle decides: lengths that no tile divides, moving maxima, causal masks, shared K/V heads, both head dimensions. This runs
# on the GPU, if there is one.

# %%
quick = "nvcc" if default_backend() == "torch" else None  # on a GPU: builds faster than PyTorch's loader

def correct(step, head_dims=(64,)):
    module = load_inline(step.path, dtype=torch.float32, backend=quick)
    return verify(module.forward, causal=True, dtypes=(torch.float32,), head_dims=head_dims, gqa=True,
                  max_seq=200)

print(step1.name, "·", correct(step1, (64, 128)).verdict)

# %% [markdown]
# *The loop order is the paper's; its published CUDA code does more.* That code also divides the **keys** of a tile among a block's warps. Each
# warp then has a partial O of every row, and the warps add them up through shared memory. The 2023 paper gives that up: it divides the
# **rows**. Step 1 has no such sum, because a thread has whole rows.

# %% [markdown]
# ### Derive its traffic, then count it
#
# One head, $N$ queries and keys, $T = \lceil N / \mathrm{BLOCK\_N} \rceil$ tiles. Every access to global memory, in numbers of 4 bytes:
#
# | what | reads | writes |
# |---|---|---|
# | set O, m, l | | $ND + 2N$ |
# | every K and V tile, once | $2ND$ | |
# | in each of the $T$ rounds: Q | $T \cdot ND$ | |
# | in each round: O | $T \cdot ND$ | $T \cdot ND$ |
# | in each round: m, l | $T \cdot 2N$ | $T \cdot 2N$ |
# | at the end: lse from m and l | $2N$ | $N$ |

# %% [markdown]
# `fa1_cost` is this table times four. The emulator counts what the threads really ask for. They have to agree to the byte, also where $N$ is
# no multiple of anything.

# %%
def counted(source, seq_len=256, head_dim=64):
    """One head through the watched build: the counters, after a comparison with the oracle."""
    module = load_inline(source, check=True, head_dim=head_dim, dtype=torch.float32)
    q, k, v = torch.randn(3, 1, 1, seq_len, head_dim)
    o, lse = module.forward(q, k, v)
    want, want_lse = reference.attention(q, k, v)
    assert (o - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5 and module.report.ok
    return module.report.counters

def compare(step, formula, seq_len, head_dim=64):
    c, expected = counted(step.path, seq_len, head_dim), formula(seq_len, seq_len, head_dim)
    read, written = c["global_load_bytes"] + c["cp_async_bytes"], c["global_store_bytes"]
    match = (read, written) == (expected.bytes_read, expected.bytes_written)
    print(f"N = {seq_len}, D = {head_dim:3}: {read:8} read, {written:8} written = formula: {match}")
    assert match

for n, d in ((128, 64), (256, 64), (300, 64), (256, 128)):
    compare(step1, fa1_cost, n, d)

# %% [markdown]
# What grows? $T$ is $N / \mathrm{BLOCK\_N}$, so the three rows with $T \cdot ND$ win:
#
# $$\text{FA1} \approx \frac{3\,N^2 D}{\mathrm{BLOCK\_N}} \quad\text{numbers: Q in, O in, O out.}$$
#
# A tile of K and one of V take $M = 2\,\mathrm{BLOCK\_N}\,D$ numbers of on-chip memory. Put in, that is $6 N^2 D^2 / M$: the paper's
# $\Theta(N^2 D^2 / M)$.

# %% [markdown]
# ## 8. The loops swapped: FlashAttention-2's order
#
# Put Q outside. Now a thread keeps its row from the first key to the last, so `q_rmem`, `acc`, `m_i` and `l_i` are **registers**. Nothing
# waits in global memory. The division by $\ell$ is done once, at the end. And tiles of Q no longer depend on each other: each becomes a block of
# its own, so the grid grows from `heads` to `heads × ⌈N / BLOCK_M⌉`. This is the diff:

# %%
show.diff(step1.path, step2.path, context=1)

# %% [markdown]
# Read it twice: once for what became a register, once for what became an index of the grid. (The 2023 paper credits Phil Tillet's Triton
# kernel with both ideas.) Then the same cases as before.

# %%
print(step2.name, "·", correct(step2).verdict)

# %% [markdown]
# The traffic: Q is read once, O and lse are written once. K and V are read again by each of the $\lceil N / \mathrm{BLOCK\_M} \rceil$ blocks:
#
# $$\text{FA2} = ND + \Big\lceil\frac{N}{\mathrm{BLOCK\_M}}\Big\rceil \cdot 2ND \ \text{ read}, \qquad ND + N \ \text{ written}, \qquad\text{about } \frac{2 N^2 D}{\mathrm{BLOCK\_M}}.$$

# %%
for n, d in ((128, 64), (256, 64), (300, 64), (256, 128)):
    compare(step2, fa2_cost, n, d)

# %% [markdown]
# ### Why FlashAttention-1's order moves more
#
# 1. **Three against two.** Q, O in and O out pass by in one order, K and V in the other.
# 2. **Which tile counts.** What stays on chip decides how often the rest passes by. FA1's order holds BLOCK_N rows in shared memory. FA2's order
#    holds BLOCK_M rows in registers, which are the larger memory. Here 128 against 32.
# 3. **Writes.** FA1's order writes $N^2 D / \mathrm{BLOCK\_N}$ numbers, FA2's $ND$.

# %% [markdown]
# Together about 6 times, for long sequences. Test the claim about tiles on the kernels themselves: change the constant, count again.

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
for order, found in measured.items():
    print(f"{order}'s order, N = 256, D = 64, bytes by tile height:", found)

# %% [markdown]
# The figure has the formulas as lines and these counts as points. On the left $N$ grows, with the tiles of our kernels. The dashed line is phase
# 1's naive attention, which moves six $N \times N$ matrices. On the right the tile height grows, at $N = 256$.

# %%
lengths, heights = [128 * 2**i for i in range(8)], [16, 32, 64, 128]
against_n, against_tile = [], []
orders = ("FA1", fa1_cost, "orange", "block_n"), ("FA2", fa2_cost, "blue", "block_m")
for order, formula, hue, option in orders:
    megabytes = [formula(n, n, 64).bytes / 1e6 for n in lengths]
    against_n.append((f"{order}'s order", lengths, megabytes, hue, "-"))
    megabytes = [formula(256, 256, 64, **{option: h}).bytes / 1e6 for h in heights]
    against_tile.append(("", heights, megabytes, hue, "-"))
    points = [b / 1e6 for b in measured[order].values()]
    label = f"{order}'s order, counted ({option.upper()})"
    against_tile.append((label, list(measured[order]), points, hue, "o"))
naive = [(4 * n * 64 + 6 * n * n) * 4 / 1e6 for n in lengths]
against_n.append(("naive", lengths, naive, "grey", "--"))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
curves.curves(left, against_n, log="xy", xticks=lengths[::2], title="Traffic against N", xlabel="N",
              ylabel="MB per head, D = 64, float32")
curves.curves(right, against_tile, log="x", xticks=heights, title="Traffic against the tile",
              xlabel="rows of the tile that stays on chip", ylabel="MB per head, N = 256")
plt.show()

# %% [markdown]
# FA1's order moves about as much as naive attention. Look at the constant: $3D/\mathrm{BLOCK\_N} = 6$ at $D = 64$ and 32 keys per tile, and naive
# moves $6N^2$. The *memory* is linear in $N$ either way: no $N \times N$ matrix exists. The *traffic* is saved only as far as the tile is large
# against $D$.

# %% [markdown]
# ### Sectors
#
# Bytes asked for are not bytes moved. Where does this kernel waste sectors? The emulator counts line by line.

# %%
def by_line(step, *kinds, least=1):
    """(code, "load" or "store", instructions, count, ideal) of the lines that count most."""
    module = load_inline(step.path, check=True, dtype=torch.float32)
    module.forward(*torch.randn(3, 1, 1, 256, 64))
    lines = [re.sub(r"^for \(.*?\) |//.*", "", line.strip()).strip()
             for line in step.path.read_text().splitlines()]
    for number, c in module.report.by_line.items():
        for kind, unit in kinds:
            if (count := c[f"{kind}_{unit}"]) >= least:
                yield lines[number - 1], kind.split("_")[1], c[f"{kind}s"], count, c[f"{kind}_ideal"]

rows = [*by_line(step1, ("global_load", "sectors"), least=4000),
        *by_line(step1, ("global_store", "sectors"), least=20000)]
show.table(rows, ["line of step 1", "", "instructions", "sectors", "at best"])
assert [r[3] / r[4] for r in rows] == [1, 2, 2, 2]

# %% [markdown]
# The tiles of K and V are loaded at best. But a thread with a row of its own loads and stores Q and O with the stride of a row. Each lane's 16
# bytes lie in a sector of their own, and half of that is wasted. FA1's order does so in every round. In FA2's order only Q and O suffer, once
# each. (The L1 cache may still have the other half when the next chunk asks for it.)

# %% [markdown]
# ## 9. Who waits for whom: wavefronts
#
# With the traffic down, what bounds step 2? A multiprocessor has a number of float32 **units**: each does one `fmaf` of one thread per clock.
# Shared memory serves one wavefront per clock. How many `fmaf` instructions of a warp fit in that clock? The units follow from the
# peak that a datasheet states, the number of multiprocessors, and the boost clock (in GHz) that belongs to that peak:

# %%
boost = {"A100": 1.41, "RTX 3090": 1.695, "RTX 4090": 2.52, "H100": 1.98, "H200": 1.98, "RTX 5090": 2.407}
balance, rows = {}, []
for name, ghz in boost.items():
    gpu = runtime.limits(name)
    units = round(gpu.fp32_tflops * 1e3 / (2 * gpu.sms * ghz))  # an fmaf counts as two operations
    balance[name] = units // 32
    rows.append((name, gpu.sms, gpu.fp32_tflops, ghz, units, balance[name]))
show.table(rows, ["GPU", "SMs", "TFLOP/s", "GHz", "float32 units per SM", "fmaf per wavefront"])
assert balance["A100"] == 2 and {balance[name] for name in boost if name != "A100"} == {4}

# %% [markdown]
# The last column is the **balance**. A kernel with fewer `fmaf` per wavefront is bound by shared memory. It is 4 on all of these but the A100,
# whose multiprocessors have half as many units: there it is 2. This lecture goes on with the H200's 4. Is it real? A kernel that does nothing but
# `fmaf` was timed (`flashlab bench hardware`):

# %%
for run in hardware.recorded():
    best = max(r["per_clock"] for r in run["rates"] if r["instruction"] == "multiply-adds")
    gpu = run["machine"]["gpu"]
    print(f"{gpu}: {best:.0f} multiply-adds per clock and SM, {best / 32:.1f} warp instructions")

# %% [markdown]
# Both products take $2N^2D$ multiply-adds, so $2N^2D/32$ instructions of a warp:

# %%
def fma_per_wavefront(c, seq_len=256, head_dim=64):
    wavefronts = c["shared_load_wavefronts"] + c["shared_store_wavefronts"]
    return 2 * seq_len**2 * head_dim / 32 / wavefronts

c1, c2 = counted(step1.path), counted(step2.path)
loads = c2["shared_load_wavefronts"]
print(f"step 2: {loads} load wavefronts")
print(f"{fma_per_wavefront(c2):.2f} fmaf per wavefront, {balance['H200']} needed")
assert loads == 2 * (2 * 256 * 256 * 64 // 32 // 4)

# %% [markdown]
# Half of what is needed. Look at `dot(q_rmem[c], k_smem[n][c], s[n])`. All 32 lanes read the *same* four numbers of K: a broadcast, two
# wavefronts, for four `fmaf`. **A number that comes from shared memory is used once by each thread.** To do better, a thread must use it more than
# once. So it must have more than one row.

# %% [markdown]
# ## 10. Tiles in shared memory
#
# Step 3 makes the 16 × 16 threads of a block share a tile of S. A thread computes 4 rows by 4 keys. Q and S move to shared memory. The
# rows and keys of a thread are 16 apart, and rows of Q and K get one chunk of padding:

# %%
show.diff(step2, step3, "constants", "state")

# %% [markdown]
# For each chunk column a thread reads 4 chunks of Q and 4 of K: 8 reads for 64 `fmaf`. Then S goes to shared memory, where a row's owner
# finds its maximum.

# %%
show.region(step3, "scores")

# %% [markdown]
# O is computed in the same manner: 4 rows by some chunks of columns in each thread. The probabilities P are read from shared memory one by one.

# %%
show.region(step3, "output")

# %% [markdown]
# *Predict:* step 2 reads one chunk of K for 4 `fmaf`, step 3 reads 8 chunks for 64: half as many reads for $QK^\top$. What becomes of the
# wavefronts?

# %%
print(step3.name, "·", correct(step3).verdict)
c3, before = counted(step3.path), loads
loads = c3["shared_load_wavefronts"]
print(f"shared loads {c2['shared_loads']} -> {c3['shared_loads']}, their wavefronts {before} -> {loads}")
print(f"fmaf per wavefront {fma_per_wavefront(c2):.2f} -> {fma_per_wavefront(c3):.2f}")
assert 1.9 < fma_per_wavefront(c3) < 2.1

# %% [markdown]
# **That did not help.** Fewer reads, and about as many wavefronts as before. *Why?* Ask for the counts line by line:

# %%
kinds = ("shared_load", "wavefronts"), ("shared_store", "wavefronts")
rows = [r[:4] for r in by_line(step3, *kinds, least=2000)]
show.table(rows, ["line of step 3", "", "instructions", "wavefronts"])

# %% [markdown]
# - A broadcast `float4` cost 2 wavefronts. A chunk of K now takes 4, because 16 lanes want 16 different rows. Fewer instructions, each
#   twice as dear.
# - $PV$ reads P as single floats: 4 reads of P and one of V for 16 `fmaf`. That is 2 per wavefront, as before.
# - S goes to shared memory and back for the softmax, which only 64 of the 256 threads compute.

# %% [markdown]
# What the step does buy is registers. Step 2 needs nearly all 255 of a thread, and step 3 about half as many (section 15). So twice as many warps fit on a
# multiprocessor. The padding (`CHUNKS + 1`) is section 4's. Try it without:

# %%
unpadded = step3.path.read_text().replace("k[BLOCK_N][CHUNKS + 1]", "k[BLOCK_N][CHUNKS]")
c = counted(unpadded)
print(f"wavefronts of loads with padding {loads}, without {c['shared_load_wavefronts']}")
print(f"bank conflicts {c3.bank_conflicts} -> {c.bank_conflicts}")
assert c["shared_load_wavefronts"] > 2 * loads

# %% [markdown]
# The few conflicts that are left come from the store of S. The two halves of a warp write 16 words each into neighbouring rows, which are 65
# words apart, so they meet in 15 banks.

# %% [markdown]
# ## 11. Registers
#
# Step 4 draws the conclusion: a thread has 8 rows by 8 keys, and S never leaves the registers. The diff comes in three parts.
#
# **Part 1: who has what.** The 8 lanes that share a row (`LANES`) are neighbours in one warp; a warp has `GROUPS` such teams. `m_i` and `l_i`
# become arrays, one element per row of the thread.

# %%
show.diff(step3, step4, "constants", "shared memory", "which rows", "state", context=1)

# %% [markdown]
# **Part 2: the scores and the softmax.** The 16 chunks that a thread reads serve 256 `fmaf`. A row's maximum is a butterfly over its lanes,
# three rounds. Each lane keeps only *its own part* of the row's sum `l_i`: nobody needs the whole until the end. The mask (below the diff) now
# costs work only in tiles that need one.

# %%
show.diff(step3, step4, "scores", "probabilities", context=1)
show.region(step4, "mask")

# %% [markdown]
# **Part 3: the output.** P must change hands: lane $x$ has the keys $x, x + 8, \ldots$, and every lane needs all of them. P passes through a corner
# of shared memory that belongs to the warp, with `__syncwarp` in place of the block's barrier. It is read back as `float4`. At the end the lanes
# of a row add up their sums, by a butterfly again.

# %%
show.diff(step3, step4, "output", "store", context=1)

# %% [markdown]
# *Predict* before you run on. $QK^\top$: 8 chunks of K at 4 wavefronts each and 8 chunks of Q, which come in broadcasts, at 2 each, for
# 256 `fmaf`. And $PV$?
#
# <details><summary>Answer</summary>
#
# $256 / (8 \cdot 4 + 8 \cdot 2) = 5.33$ for $QK^\top$. $PV$ is the same picture: for four keys, 4 × 2 chunks of V at 4 wavefronts each and 8 chunks of P at
# 2 each, for $8 \cdot 2 \cdot 4 \cdot 4 = 256$ `fmaf`: 5.33 again. What is stored (tiles, P) makes it a little less.
#
# </details>

# %%
print(step4.name, "·", correct(step4).verdict)
c4 = counted(step4.path)
print(f"fmaf per wavefront {fma_per_wavefront(c3):.2f} -> {fma_per_wavefront(c4):.2f}")
print(f"block barriers {c3['barriers']} -> {c4['barriers']}; shuffles {c3['shuffles']} -> {c4['shuffles']}")
print(f"bytes read {c3['global_load_bytes']} -> {c4['global_load_bytes']}, because BLOCK_M is 128 again")
assert fma_per_wavefront(c4) > balance["H200"] and c4.bank_conflicts == 0

# %% [markdown]
# More than four `fmaf` per wavefront: shared memory is no longer the bound, by this count. It is the same climb as in a matrix product (Boehm's
# worklog in the references has it), with a softmax in the middle.

# %% [markdown]
# ## 12. Latency, and the shape of a tile
#
# What is left is waiting. In step 4 a block loads a tile, waits, computes, waits. Step 5 copies with `cp.async`, so a thread goes on while
# the bytes travel. `start_tile` takes the place of `load_tile`. A copy of 0 bytes writes zeros: that is the tail.

# %%
show.diff(step4, step5, "copy a tile", context=1)

# %% [markdown]
# K's next tile travels while $PV$ is computed, V's while $QK^\top$ is. Each wait is followed by a barrier: the wait is for a thread's *own*
# copies, the barrier for everybody's.

# %%
show.region(step5, "first copies", "next K", "next V")
c5 = counted(step5.path)
print(f"loads through registers {c4['global_loads']} -> {c5['global_loads']}, cp.async -> {c5['cp_async']}")
assert c5["cp_async_bytes"] == c4["global_load_bytes"]

# %% [markdown]
# **The emulator cannot show what this step is worth.** It counts work, and this step does the same work in another order. Only a clock can
# tell (section 16). But the emulator can see a copy that is read too early. Take the wait away:

# %%
broken = step5.path.read_text().replace("cp_async_wait<1>();", "")
module = load_inline(broken, check=True, dtype=torch.float32)
module.forward(*torch.randn(3, 1, 1, 64, 64))
print(module.report.findings[0].kind, "·", module.report.findings[0].message)
assert module.report.findings[0].kind == "read-before-wait"

# %% [markdown]
# Step 6 makes the tile's shape a parameter: a `struct Tile` with compile-time numbers, and a kernel template over it. The launcher chooses. At
# $D = 64$, where the grid would have fewer than 1.5 blocks of 128 rows per multiprocessor, it takes 64 rows. At $D = 128$ it takes the large
# tile, unless the device has too little shared memory for it.

# %%
show.diff(step5, step6, "constants", "shared memory", "launch", context=1)

# %% [markdown]
# One head of 256 rows gets the small tile: more traffic and more wavefronts on purpose, for twice as many blocks.

# %%
for step in (step5, step6):
    print(step.name, "·", correct(step, (64, 128)).verdict)
c6 = counted(step6.path)
print(f"one small head: bytes read {c5['cp_async_bytes']} -> {c6['cp_async_bytes']}, "
      f"fmaf per wavefront {fma_per_wavefront(c5):.2f} -> {fma_per_wavefront(c6):.2f}")
assert fa2_cost(256, 256, 64, block_m=64).bytes_read == c6["cp_async_bytes"]

# %% [markdown]
# ## 13. The whole kernel
#
# **The milestone of this phase.** You have met every part of step 6. Here it is from the first line to the last; exercise 6.8 lets you write
# such a kernel on an empty page.
#
# First what the compiler knows: element type, head dimension, and the shape of a tile. A lane has `ROWS` × `KEYS` scores and
# `ROWS` × `COLUMNS` chunks of O.

# %%
show.region(step6, "constants")

# %% [markdown]
# The tools: three small functions on chunks, and the copy of a tile. `row < rows ? row : 0` keeps the address valid where nothing is
# copied.

# %%
show.region(path("arithmetic.cuh"), "arithmetic")
show.region(step6, "copy a tile")

# %% [markdown]
# The head of the kernel: shared memory, then who am I? A block finds its tile of Q, its batch, head and K/V head. Causal blocks start
# with the last rows, which have the most work. A thread finds its rows: `first_row + GROUPS * i`. Then its state: maximum, sum, output, all in
# registers.

# %%
show.region(step6, "shared memory", "which rows", "state")

# %% [markdown]
# The main loop, uncut. Its stations:
#
# 1. *first copies*: Q, K₀ and V₀ set out; the wait leaves V₀ on its way.
# 2. *scores*: $S_{ij}$ in registers.
# 3. *next K*: K's buffer is free, so the next tile sets out.
# 4. *mask*: only in tiles that need it.
# 5. *probabilities*: maximum, correction, P, the lane's part of the sum.
# 6. *output*: P through the warp's corner, then $O_i$.
# 7. *next V*: V's buffer is free.

# %%
show.region(step6, "main loop")

# %% [markdown]
# The end: sum up $\ell$ over the lanes of a row, divide, store O and lse, each row guarded. And the launcher: which tile, how many
# blocks, how many bytes, PyTorch's stream.

# %%
show.region(step6, "store", "launch")

# %% [markdown]
# ## 14. All steps in one table
#
# One head, $N = 256$, $D = 64$, everything counted by the emulator. (What `cp.async` writes to shared memory is not among the wavefronts of steps 5
# and 6.)

# %%
counts = list(zip(steps(6), (c1, c2, c3, c4, c5, c6)))
rows = []
for step, c in counts:
    read = c["global_load_bytes"] + c["cp_async_bytes"]
    sectors = c["global_load_sectors"] + c["cp_async_sectors"]
    wavefronts = c["shared_load_wavefronts"] + c["shared_store_wavefronts"]
    rows.append((step.name[3:], read // 1024, c["global_store_bytes"] // 1024, sectors, wavefronts,
                 round(fma_per_wavefront(c), 2), c["barriers"]))
show.table(rows, ["step", "KiB read", "KiB written", "sectors read", "shared wavefronts",
                  "fmaf per wavefront", "barriers"])

# %% [markdown]
# The same as a figure. At the red line shared memory and arithmetic are in balance on an H200. Below it the arithmetic cannot be busy all the
# time, whatever else you do. (Step 6 is below it here, with its small tile.)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
names = [s.name[3:].replace("_", "\n", 1) for s, _ in counts]
thousands = [(c["shared_load_wavefronts"] + c["shared_store_wavefronts"]) / 1000 for _, c in counts]
curves.columns(left, names, {"": (thousands, "blue")}, title="Shared-memory wavefronts",
               ylabel="thousand wavefronts")
curves.columns(right, names, {"": ([fma_per_wavefront(c) for _, c in counts], "blue")},
               title="Arithmetic per wavefront", ylabel="fmaf instructions per wavefront")
curves.level(right, balance["H200"], "balance", "red")
plt.show()

# %% [markdown]
# ### Can you believe these counts?
#
# Each kernel was also launched on an H200 under Nsight Compute, and in the emulator on the same inputs: two heads of 200 rows, causal. Emulated
# against measured:

# %%
KINDS = ["shared read wavefronts", "shared write wavefronts", "global read sectors", "global write sectors"]
for run in records.recorded("validation"):
    kernels = [r for r in run["kernels"] if r["kernel"].startswith("p6")]
    pairs = [(r["kernel"][3:], r["head_dim"], *(r["counters"][k] for k in KINDS)) for r in kernels]
    show.table([(name, d, *(f"{a} / {b:.0f}" for a, b in rest)) for name, d, *rest in pairs],
               ["step", "D", *KINDS])
    for _, _, reads, stores, *sectors in pairs:
        assert abs(reads[0] - reads[1]) < 0.005 * reads[1] and abs(stores[0] - stores[1]) <= 0.15 * stores[1]
        assert all(a == b for a, b in sectors)

# %% [markdown]
# Most of them agree to the last digit. Two kinds do not.
#
# - Stores of steps 5 and 6 take some more wavefronts at $D = 64$. We suppose that arriving copies get in their way.
# - Steps 1 and 3 read shared memory in a few wavefronts more than counted, less than 0.5 %. We do not know why.
#
# One rule was found by this table. `cp.async` read up to 8 % more sectors than we counted. The padding splits a sector over two 128-byte lines
# of shared memory, and such a sector is fetched twice. Counted so, the emulator agrees.

# %% [markdown]
# ## 15. What the compiler says
#
# Registers are the resource that no counter of the emulator shows: the compiler deals them out. nvcc was asked for an H200 (`sm_90` is its
# architecture). A **spill** is a value that found no register and goes to local memory. Step 6 has a kernel for each of its tiles; the table names
# them by lanes per row, rows and keys.

# %%
names = [s.name for s in steps(6)]
kernels = [r for r in compiled()["kernels"] if r.target == "sm_90" and r.step in names]
rows = []
for r in sorted(kernels, key=lambda r: (r.head_dim, names.index(r.step), r.kernel)):
    tile = " × ".join(re.findall(r"\d+", r.kernel))  # of flash_forward<Tile<16, 64, 64> >
    rows.append((r.step[3:], tile, r.head_dim, r.registers, r.spill_bytes, r.shared_bytes,
                 r.instructions.get("FFMA", 0), r.instructions.get("LDS", 0)))
show.table(rows, ["step", "tile", "D", "registers per thread", "spilled bytes", "shared bytes per block",
                  "FFMA", "LDS"])
spilled = {(r.step, r.head_dim) for r in kernels if r.spill_bytes}
assert spilled == {("p6_2_loop_order", 128)}

# %% [markdown]
# FFMA is `fmaf`, LDS a load from shared memory, each as often as it stands in the code. Only step 2 at $D = 128$ spills.
#
# How many warps does that leave room for? Registers are dealt out in eights per thread, and each block costs 1 KB of shared memory extra. The
# share of the 64 warps that a multiprocessor can hold is the kernel's **occupancy**.

# %%
gpu = runtime.limits("H200")

def resident_warps(registers, threads, shared):
    """Warps that a multiprocessor of an H200 can hold: (warps, what limits them)."""
    by_registers = gpu.registers_per_sm // (-(-registers // 8) * 8 * threads)
    by_shared = gpu.shared_per_sm // (shared + 1024)
    blocks = min(by_registers, by_shared, 64 * 32 // threads)
    return blocks * threads // 32, "registers" if by_registers <= by_shared else "shared memory"

threads = dict.fromkeys(names[:5], 128) | {"p6_3_tiles": 256}
for r in kernels:
    if r.head_dim == 64 and r.step in threads:
        warps, limit = resident_warps(r.registers, threads[r.step], r.shared_bytes)
        print(f"{r.step:16} {r.registers:3} registers, {warps:2} warps of 64 at most, limited by {limit}")

# %% [markdown]
# Steps 2 and 4 have the same number of warps, and yet step 4 is faster (section 16): it has more than twice as many `fmaf` per wavefront (section
# 11). Step 1 has three times as many warps as either, and is the slowest in section 16's table. So this number alone does not order the steps.
# Occupancy is a means. Volkov's talk in the references makes that point.

# %% [markdown]
# ## 16. The clock
#
# Another course published times of a float32 kernel in FlashAttention-1's order on an Ada GPU, beside PyTorch's three unfused calls. The table is
# `flashlab.bench.published`, whose README says what was run. None of it was measured here.

# %%
def times_of(rows):
    return {(r["batch"], r["heads"], r["seq_len"], r["variant"]): r["ms"] for r in rows}

ada = times_of(r for r in published.load("fa1_f32_fa2_mma_ada") if r["head_dim"] == 64)
shapes = sorted({key[:3] for key in ada})
ratios = [ada[(*s, "fa1_f32")] / ada[(*s, "torch_naive_f32")] for s in shapes]
print(f"the published FA1 kernel took {min(ratios):.0f} to {max(ratios):.0f} times as long as unfused torch")
for s in [(8, 8, 256), (16, 16, 256)]:
    print(f"batch {s[0]:2}, heads {s[1]:2}, N = {s[2]}: {s[0] * s[1]:3} heads, {ada[(*s, 'fa1_f32')]:.1f} ms")

# %% [markdown]
# Four times the heads for 1.3 times the time: so it looks when a head is one block, and 64 blocks leave most of a GPU empty. And a *fused* kernel
# lost to an *unfused* one, by far. Fusing saves nothing by itself. What counts is what you have counted here: traffic with its constant,
# wavefronts, blocks.

# %% [markdown]
# The first figure has those times. The second was recorded on an H200 at the same shapes: one panel per step, its speed against unfused torch,
# the other steps in grey. These are two machines: compare within a figure, not across. (`flashlab bench scalar` measures on your GPU.)

# %%
runs = bench.recorded()
fig, ax = plt.subplots(figsize=(6, 3.4))
ladder.times(ax, ada, {"fa1_f32": ("FA1 kernel", "sky"), "torch_naive_f32": ("unfused torch", "")},
             "Published, an Ada GPU, D = 64, float32")
for run in runs:
    ladder.small_multiples(times_of(r for r in run["rows"] if r["head_dim"] == 64 and not r["causal"]),
                           {s.name: f"step {s.name[3:]}" for s in steps(6)},
                           ("torch_naive_f32", "unfused torch"), ("sdpa_efficient_f32", "torch, fused"),
                           f"Recorded, {run['machine']['gpu']}, D = 64, float32")
plt.show()

# %% [markdown]
# The same in numbers: how many times as fast as unfused torch (float32, TF32 off) each step is, over all recorded shapes of both head
# dimensions, causal ones too. Above 1 the kernel is faster.

# %%
for run in runs:
    m = run["machine"]
    print(f"{m['gpu']}, torch {m['torch']}: {len(bench.ratios(run, step6.name))} shapes")
    for step in steps(6):
        s = sorted(bench.ratios(run, step.name).values())
        print(f"{step.name:16} {s[0]:5.2f} to {s[-1]:5.2f} times as fast, median {s[len(s) // 2]:5.2f}")
    assert min(bench.ratios(run, step6.name).values()) > 1
if not runs:
    print("none recorded yet: `flashlab bench scalar` measures them")

# %% [markdown]
# ### Did the counts predict it?
#
# An H200 does at most 132 · 128 · 2 FLOPs per clock. With fewer than four `fmaf` per wavefront, shared memory lowers that ceiling in proportion.
# Theory and clock for batch 16, 16 heads, $N = 1024$, $D = 64$. (At this shape step 6 takes the tile of step 5.)

# %%
for run in runs:
    clock = {(r["batch"] * r["heads"], r["seq_len"], r["head_dim"], r["causal"], r["variant"]): r
             for r in run["rows"]}
    peak = 132 * 128 * 2 * run["machine"]["sm_clock_mhz"]["median"] / 1e6
    rows = []
    for step, c in zip(steps(6), (c1, c2, c3, c4, c5, c5)):
        ceiling = min(1, fma_per_wavefront(c) / balance["H200"]) * peak
        r = clock[256, 1024, 64, False, step.name]
        share = r["tflops"] / ceiling
        rows.append((step.name[3:], r["ms"], round(r["tflops"], 1), round(ceiling, 1), f"{share:.0%}"))
        assert share < 1
    show.table(rows, ["step", "ms", "TFLOP/s", "ceiling by wavefronts", "of it"])

# %% [markdown]
# Steps 2 and 3 have the same count, and about the same time: at $D = 64$ the tiles of step 3 bought nothing, as the emulator said. At $D = 128$
# step 2 spills, and falls behind. And a prediction about the grid: FlashAttention-1's order has one block per head, so 64 and 128 heads
# should take the same time on 132 multiprocessors.

# %%
for run in runs:
    ms = {key: r["ms"] for key, r in clock.items()}
    for d in (64, 128):
        wide = [ms[256, 1024, d, False, s.name] for s in (step1, step2, step3)]
        print(f"D = {d:3}: " + ", ".join(f"step {i} {t:.2f} ms" for i, t in enumerate(wide, 1)))
    heads = [ms[h, 256, 64, False, step1.name] for h in (64, 128, 256)]
    print("step 1, N = 256: " + ", ".join(f"{h} heads {t:.3f} ms" for h, t in zip((64, 128, 256), heads)))
    assert wide[1] > wide[0] and wide[1] > 2 * wide[2] and heads[1] < 1.2 * heads[0]

# %% [markdown]
# With spills, the better loop order loses to the worse one ($D = 128$, the first two). An order that keeps the state in registers needs
# registers that hold it.
#
# What were the last two steps worth, and how do we stand against PyTorch's *fused* float32 attention?

# %%
def spread(name, found):
    """Print lowest, highest and median; return the median."""
    found = sorted(found)
    median = found[len(found) // 2]
    print(f"{name:42} {found[0]:.2f} to {found[-1]:.2f}, median {median:.2f}")
    return median

for run in runs:
    for new, old in ((step5, step4), (step6, step5)):
        spread(f"{new.name} over {old.name}", bench.ratios(run, new.name, old.name).values())
    fused = bench.ratios(run, step6.name, "sdpa_efficient_f32")
    wide, narrow = ([x for shape, x in fused.items() if shape[3] == d] for d in (128, 64))
    assert spread("step 6 over torch's fused, D = 64", narrow) > 1
    assert spread("step 6 over torch's fused, D = 128", wide) < 1

# %% [markdown]
# The choice of tiles (step 6) pays on small grids and costs a little elsewhere: keep both numbers. Against PyTorch's fused kernel we mostly win at $D =
# 64$ and lose at $D = 128$.
#
# But the two do not use the same units. PyTorch's memory-efficient kernel is built on CUTLASS, which computes a float32 product as **three TF32
# products on tensor cores** ("3xTF32"), even where TF32 is switched off. Nsight Compute counted the instructions, for the fused kernel
# ("efficient") and for unfused torch ("math"). One TF32 instruction does 16 × 8 × 8 multiply-adds:

# %%
shape, *_ = hardware.LAUNCHES["efficient, float32"]
batch, heads, n, d = shape
once = 4 * batch * heads * n * n * d / (2 * 16 * 8 * 8)  # all FLOPs, by those of one TF32 instruction
for run in hardware.recorded():
    for name in ("efficient, float32", "math, float32"):
        count = sum(r["tensor_instructions"] for r in run["float32"] if r["launch"] == name)
        print(f"{name:18}: {count:11,.0f} tensor-core instructions, {count / once:.3f} per product")
        assert abs(count / once - (3 if name.startswith("efficient") else 0)) < 0.02
if not hardware.recorded():
    print("not recorded yet: `flashlab bench hardware` counts them")

# %% [markdown]
# Exactly three per product. For unfused torch the counter is not quite zero, but far too small for its products. So against the fused kernel we
# compete with tensor cores. Step 6 does all its arithmetic on the float32 units. What tensor cores can do in 16 bits is the
# subject of phase 7.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - A block shares memory and barriers, a warp shares instructions and shuffles. Every global access carries a guard.
# - Global memory moves sectors of 32 bytes; shared memory serves 32 banks. Small formulas predict both.
# - FlashAttention-1's loops move $3N^2D/\mathrm{BLOCK\_N}$ numbers, FlashAttention-2's $2N^2D/\mathrm{BLOCK\_M}$, on a grid that is
#   $N/\mathrm{BLOCK\_M}$ times as large.
# - Then shared memory is the bound, until each number read is used often enough. The rest is latency.

# %% [markdown]
# Left to explore: `BLOCK_N` = 64 in step 2 (which resource stops you?). P through shuffles alone. A thread with 16 × 4 scores: is that better than
# 8 × 8? Count before you run. The softmax of step 3 with all 256 threads.

# %% [markdown]
# ## References
#
# - Dao, Fu, Ermon, Rudra, Ré: *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness* (2022), arXiv 2205.14135. Algorithm 1 is section 7; Theorem 2 is the $\Theta(N^2D^2/M)$.
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023), arXiv 2307.08691. Section 3.1: the division once at the end; 3.2: the swapped loops; 3.3: rows divided among warps, where FlashAttention-1 divides keys and adds partial O.
# - NVIDIA: *CUDA C++ Programming Guide*: "Thread Hierarchy", "Memory Hierarchy", "Synchronization Functions", "Warp Shuffle Functions"; and *CUDA C++ Best Practices Guide*, "Coalesced Access to Global Memory".
# - PyTorch: *Custom C++ and CUDA Extensions*, and `torch.utils.cpp_extension.load_inline`.
# - NVIDIA CUTLASS: example 27, *ampere_3xtf32_fast_accurate_tensorop_gemm* (2021): float32 products as three TF32 products.
# - Boehm: *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance: a Worklog* (2022), siboehm.com. Coalescing, shared tiles, register tiles, each measured.
# - Volkov: *Better Performance at Lower Occupancy* (GPU Technology Conference, 2010). Why few threads with many registers can win.
