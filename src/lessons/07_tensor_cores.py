# %% [markdown]
# # Phase 7 · Tensor cores
#
# Phase 6 multiplied matrices one number at a time. A tensor core multiplies a 16 × 16 tile by a 16 × 8 tile in one
# instruction. The price is a layout. The 32 threads of a warp hold the tiles together, a few elements each, in places
# that the hardware chose.
#
# This lecture finds those places by looking. Then it multiplies one tile by hand, and reads a whole FlashAttention
# kernel that is built on nothing else.

# %% [markdown]
# ## What you will be able to do
#
# - Say which lane and which register holds element (row, column) of A, B and C of `mma.m16n8k16`; find it by a run when
#   in doubt.
# - Load a fragment with `ldmatrix`: give it 8, 16 or 32 addresses, and say when it needs `.trans`.
# - Explain why the scores, C of the first product, are A of the second, and no number changes lanes.
# - Reduce a row that lives in four lanes, with two shuffles.
# - Write a FlashAttention forward pass on the tensor cores, and predict its instruction counts exactly.

# %% [markdown]
# ## What you need first
#
# Phase 2: the state `m_i`, `l_i`, `acc`. Phase 6: its CUDA primer (templates, `#pragma unroll`, references to arrays,
# `smem_u32`), threads, warps, shared memory, barriers, the emulator.
#
# With a GPU and `nvcc` the cells below run on tensor cores. Without, the same sources run in the emulator, lane by
# lane. What is *counted* always comes from the emulator, so those numbers are the same for everybody.

# %%
from typing import Any

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.bench import hardware, records, resources
from flashlab.bench.published import load
from flashlab.check import CheckFailed, verify
from flashlab.check.cuda_answer import examine, region, replaced
from flashlab.cuda import load_inline, missing
from flashlab.figures import drawings, fragments, show
from flashlab.kernels import path, step
from flashlab.kernels.regions import regions

show.style()
torch.manual_seed(0)
DEVICE = runtime.device()
BACKEND = "emulator" if missing("nvcc") else "nvcc"
PTX, ONE_MMA, NAIVE = path("ptx.cuh"), path("p7_one_mma"), step("p7_naive")

# %% [markdown]
# ## 1 · One instruction
#
# `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32` computes $D = A\,B + C$. Its name is read in three parts:
#
# | part | meaning |
# |:--|:--|
# | `m16n8k16` | A is 16 × 16, B is 16 × 8, C and D are 16 × 8 |
# | `row.col` | A by rows, B by columns (section 4) |
# | `f32.f16.f16.f32` | D in float32, A and B in float16, C in float32 |
#
# One warp issues it once and gets $2 \cdot 16 \cdot 8 \cdot 16 = 4096$ FLOPs. A fused multiply-add, the best that
# phase 6 had, gives a warp 64.

# %% [markdown]
# What a whole GPU gains by it is in the data sheets:

# %%
rows = []
for name in ("A100", "RTX 3090", "RTX 4090", "H200"):
    gpu = runtime.GPUS[name]
    rows.append([name, gpu.fp32_tflops, gpu.fp16_tflops, f"{gpu.fp16_tflops / gpu.fp32_tflops:.1f}"])
columns = ["GPU", "float32, TFLOP/s", "tensor cores (fp16 in, fp32 sums), TFLOP/s", "factor"]
show.table(rows, columns, align="lrrr")

# %% [markdown]
# (On GeForce cards a tensor core with float32 sums runs at half of its fp16 rate, hence the factor of 2.)
#
# No thread holds a matrix. A is 256 numbers of 16 bits: 8 per lane, packed two and two into 4 registers, `a0` to `a3`.
# B is 128 numbers: 2 registers, `b0 b1`. C and D are 128 floats: 4 registers, `c0 c1 | c2 c3`.
#
# What the 32 lanes hold of an operand is called its **fragment**. *Which* 8 numbers of A are lane 5's is the question
# of this lecture.

# %% [markdown]
# ## 2 · Let it tell us: `ldmatrix`
#
# `ldmatrix` fills such registers from shared memory. Its unit is a tile of 8 × 8 numbers of 16 bits. A row of the tile
# is 16 bytes. `x1`, `x2` and `x4` load one, two or four tiles.
#
# C++ has no word for it. It is an instruction of PTX, the GPU's assembly language, and `ptx.cuh` wraps it in a function
# of one line:

# %%
show.region(PTX, "ldmatrix x4")

# %% [markdown]
# How to read an `asm` line:
#
# | piece | meaning |
# |:--|:--|
# | `{%0, %1, %2, %3}, [%4]` | places for the operands listed after the colons, counted from 0 |
# | `"=r"(r[0])` | an output, in a 32-bit register |
# | `"r"(address)` | an input: the address in shared memory, from `smem_u32` |
# | `"memory"` | it reads memory: the compiler must not move stores past it |
# | `volatile` | it must not be removed or merged |
# | `.sync.aligned` | all 32 lanes execute it together |
#
# `uint32_t (&r)[4]` is a reference to an array of four (phase 6), so the function fills the caller's registers.

# %% [markdown]
# Now the question. We load a tile whose numbers are their own *indices*, and every lane writes out what it received.
# The kernel is one warp. Each lane is told where the row begins whose address it gives.

# %%
show.region(ONE_MMA, "ldmatrix")

# %% [markdown]
# `load_inline` builds the file and gives back its `extern "C"` functions. Here it calls `nvcc` or the emulator. PyTorch's
# own `torch.utils.cpp_extension.load_inline`, which phase 6 explains, builds the same text with `backend="torch"`; it
# only takes longer.
#
# `look` calls the kernel above. First a single 8 × 8 tile, `x1`.

# %%
one_mma = load_inline(ONE_MMA, backend=BACKEND)


def look(tile, first_row, first_column, count, trans=0):
    """What ldmatrix gives the lanes, [32 lanes, count registers, 2 halves], of a tile of 16-bit patterns."""
    out = torch.zeros(32, count, 2, dtype=torch.int16, device=DEVICE)
    places = [x.to(DEVICE, torch.int32) for x in (first_row, first_column)]
    one_mma.ldmatrix(tile.to(DEVICE, torch.int16), *places, out, *tile.shape, count, trans)
    return out.cpu()


LANE = torch.arange(32)
tile = torch.arange(64).reshape(8, 8)  # element (row, column) is 8 row + column
got = look(tile, first_row=LANE % 8, first_column=0 * LANE, count=1)
shown = [[f"lane {lane}", *got[lane, 0].tolist()] for lane in (0, 1, 2, 3, 4, 5, 31)]
show.table(shown, ["", "lower half", "upper half"])

# %% [markdown]
# Lane 0 got elements 0 and 1, lane 1 got 2 and 3. After four lanes the row of eight is used up, and lane 4 begins with
# 8, the second row. So with $g = \lfloor \text{lane} / 4 \rfloor$ and $t = \text{lane} \bmod 4$:
#
# $$\text{row} = g, \qquad \text{column} = 2t + \text{half}.$$
#
# (The PTX manual calls them *groupID* and *threadID in group*.) Four lanes with the same $g$ are a **quad**. Remember
# the word: a row lives in a quad.

# %%
g, t = LANE // 4, LANE % 4
for half in (0, 1):
    assert torch.equal(got[:, 0, half].long(), tile[g, 2 * t + half])
print("row = lane // 4, column = 2 (lane % 4) + half: true of all 64 elements")

# %% [markdown]
# **A lane does two different things.** It *gives an address*, of a whole row of 8 numbers. And it *receives two
# numbers*, usually from a row whose address another lane gave.
#
# In `x1` the addresses come from lanes 0 to 7. To see it, let lane 3 lie and name row 0. Then all who should get a part
# of row 3, lanes 12 to 15, get row 0 instead. Lane 3 itself notices nothing.

# %%
lie = LANE % 8
lie[3] = 0
lied = look(tile, first_row=lie, first_column=0 * LANE, count=1)
changed = [lane for lane in range(32) if not torch.equal(lied[lane], got[lane])]
assert changed == [12, 13, 14, 15] and lied[12, 0].tolist() == [0, 1]
print("lanes that received something else:", changed)

# %% [markdown]
# ## 3 · The A fragment
#
# `ldmatrix.x4` loads four such tiles. Lanes $8i$ to $8i + 7$ give the rows of tile $i$, and tile $i$ arrives in register
# $i$.
#
# Which four 8 × 8 tiles of a 16 × 16 matrix should be `a0` to `a3`? The manual says: upper left, lower left, upper
# right, lower right. So lane $l$ names row $l \bmod 16$, at column $8 \lfloor l / 16 \rfloor$. You will read these two
# expressions in every kernel.

# %%
tile = torch.arange(256).reshape(16, 16)
a = look(tile, first_row=LANE % 16, first_column=LANE // 16 * 8, count=4)
for lane in (0, 5, 31):
    print(f"lane {lane:2d}:", "  ".join(f"a{r} = {a[lane, r].tolist()}" for r in range(4)))

# %% [markdown]
# Three lanes' numbers are hard to see as places. So draw all of them: above, who names which row; below, who received
# which element.

# %%
figure, axes = plt.subplots(2, 1, figsize=(7.8, 8.6))
fragments.addresses(axes[0], LANE % 16, LANE // 16 * 8, (16, 16))
fragments.draw(axes[1], a, (16, 16), "a", outlined=[5])
titles = ("The address that each lane gives", "What each lane received: A, 16 × 16")
for ax, title in zip(axes, titles, strict=True):
    ax.set(title=title, aspect=0.5, ylabel="row")
plt.show()

# %% [markdown]
# *Above, a box is a row of 8 numbers, 16 bytes. Below, a box is one register of one lane, two neighbours of a row; T5 is
# lane 5, and its four registers are framed. A colour is a register, `a0` blue, `a1` orange, `a2` green, `a3` pink, and
# also one of the four 8 × 8 tiles.*
#
# The same as a formula:

# %%
# FROM flashlab.figures.fragments: a_position
rows, columns = a_position(*fragments.slots("a"))  # every (lane, register, half)
assert torch.equal(a.long(), tile[rows, columns])
print("256 elements: the formula agrees with the run")

# %% [markdown]
# The way back, from an element to its holder, is the same arithmetic undone. The eights of row and column say the
# register. What is left of the row is $g$; what is left of the column is $2t + \text{half}$.

# %%
for row in range(16):
    for column in range(16):
        lane = 4 * (row % 8) + column % 8 // 2
        register, half = row // 8 + 2 * (column // 8), column % 2
        assert a[lane, register, half] == tile[row, column]
print("256 elements: the inverse agrees too")

# %% [markdown]
# ## 4 · The B fragment, and what `.row.col` means
#
# B is 16 × 8, two registers. The manual: `b0` holds rows $2t$ and $2t + 1$ of column $g$; `b1` the same, 8 rows further
# down.
#
# A register of A pairs two neighbours of a *row*. A register of B pairs two neighbours of a *column*. That is the
# `.row.col` in the name: both are paired along K, the dimension that is summed over. The instruction has no other
# variant.

# %%
# FROM flashlab.figures.fragments: b_position
print("lane 5:", [b_position(5, register, half) for register in (0, 1) for half in (0, 1)], "of B")

# %% [markdown]
# **K needs no transposition.** In $S = Q K^\mathsf{T}$, B is $K^\mathsf{T}$, so
#
# $$B[k][n] = K[n][k].$$
#
# Two neighbours of a column of B are two neighbours of a *row of K*, which is how K lies in memory. `ldmatrix` hands
# out neighbours of rows. So load 8 keys × 16 dimensions as two tiles, and `b0 b1` are there.

# %%
K_tile = torch.arange(128).reshape(8, 16)  # 8 keys, 16 dimensions
b_of_K = look(K_tile, first_row=LANE % 8, first_column=LANE // 8 % 2 * 8, count=2)
rows, columns = b_position(*fragments.slots("b"))
assert torch.equal(b_of_K.long(), K_tile.T[rows, columns])
print("ldmatrix.x2 on the rows of K gives the B fragment of K^T")

# %% [markdown]
# **V does.** In $O = P V$, B is V itself. The two halves of a register are two neighbours of a *column* of V: two keys,
# one below the other, a row apart in memory.
#
# For this `ldmatrix` has `.trans`. Each 8 × 8 tile is transposed on its way to the registers, by the same instruction.
# The addresses are those of rows, as before: 16 keys, two tiles on top of each other.

# %%
V_tile = torch.arange(128).reshape(16, 8)  # 16 keys, 8 dimensions
b_of_V = look(V_tile, first_row=LANE % 16, first_column=0 * LANE, count=2, trans=1)
plain = look(V_tile, first_row=LANE % 16, first_column=0 * LANE, count=2, trans=0)
assert torch.equal(b_of_V.long(), V_tile[rows, columns])
assert not torch.equal(plain.long(), V_tile[rows, columns])
print("ldmatrix.x2.trans on the rows of V gives the B fragment of V; without .trans it does not")

# %% [markdown]
# Drawn, so that you recognise it when you meet it: the same two loads, with and without.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 5.4))
fragments.draw(axes[0], b_of_V, (16, 8), "b", outlined=[5])
fragments.draw(axes[1], plain, (16, 8), "b", outlined=[5])
axes[0].set(title="V, loaded with .trans: the B fragment", xlabel="column (dimension)", ylabel="row (key)")
axes[1].set(title="without: each 8 × 8 tile transposed", xlabel="column (dimension)")
plt.show()

# %% [markdown]
# *Who gets which element of V's 16 × 8 tile; `b0` is blue, `b1` orange. Left: a register is two keys of one dimension,
# as B wants. Right: two dimensions of one key. Lane 5 is framed in both.*
#
# Could other addresses do without `.trans`? No. An address names a whole row of 16 bytes, and without `.trans` the two
# halves of a register come from one row. (Storing $V^\mathsf{T}$ in shared memory would do, at the price of 16-bit
# stores.)
#
# All six wrappers differ in their number of registers and in `.trans`, in nothing else:

# %%
show.region(PTX, "ldmatrix")

# %% [markdown]
# ## 5 · The C fragment, and one product by hand
#
# The instruction itself is wrapped in the same way. `"+f"(c[0])` is a float that is read *and* written, so that C and D
# are the same registers. `if constexpr` takes one branch while compiling: the name of the type is part of the
# instruction's name.

# %%
show.region(PTX, "mma m16n8k16")

# %% [markdown]
# C cannot be loaded with `ldmatrix`, because it is float32. But the tensor core can tell us where it is. With A the
# identity and B the matrix of indices, $D = B$. What a lane then finds in its four registers are the indices of its
# elements.
#
# This kernel takes fragments as they are, and multiplies:

# %%
show.region(ONE_MMA, "one MMA")

# %% [markdown]
# `fragments.fragment(matrix, "a")` picks each lane's elements by the formula; `fragments.matrix(held, "c")` puts them
# back. `mma` launches one warp for one instruction.

# %%
# FROM flashlab.figures.fragments: c_position
def mma(a, b, c=None, module=one_mma):
    """D = A B + C: fragments a [32, 4, 2], b [32, 2, 2], c [32, 4] (zeros, if None) -> d [32, 4]."""
    d = (torch.zeros(32, 4) if c is None else c.clone()).to(DEVICE)
    module.mma(a.to(DEVICE), b.to(DEVICE), d)
    return d.cpu()


indices = torch.arange(128).reshape(16, 8).half()  # whole numbers up to 2048 are exact in fp16
c = mma(fragments.fragment(torch.eye(16).half(), "a"), fragments.fragment(indices, "b"))
rows, columns = c_position(*fragments.slots("c"))
assert torch.equal(c, indices.float()[rows, columns])
print("lane 5 holds", c[5].int().tolist(), "of 0 to 127, at", [c_position(5, i) for i in range(4)])

# %% [markdown]
# `c0 c1` are columns $2t$ and $2t + 1$ of row $g$; `c2 c3` are the same columns of row $g + 8$.
#
# Here are all three fragments in one picture, placed as in a matrix product. A row of A meets a column of B in the
# element of C at their crossing.

# %%
figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.6), width_ratios=[2, 1])
axes[0, 0].axis("off")
for ax, name, held in ((axes[0, 1], "b", b_of_V), (axes[1, 0], "a", a), (axes[1, 1], "c", c)):
    width = 16 if name == "a" else 8
    fragments.draw(ax, held, (16, width), name, outlined=[5], fontsize=5.4)
    ax.set(aspect=0.55, title=f"{name.upper()}, 16 × {width}")
plt.show()

# %% [markdown]
# *The three fragments of `mma.m16n8k16`, each from a run; a colour is a register. Lane 5's are framed. It holds parts of
# rows 1 and 9 of A and of C, and of column 1 of B. So the elements of C that it ends up with are not the product of what
# it held: the lanes work together inside the instruction.*
#
# One operand at a time, to play with. A click on an element shows all that its lane holds:

# %%
drawings.play("fragments")

# %% [markdown]
# Now one product by hand. Small whole numbers, so that every sum is exact and "equal" means equal.

# %%
A, B, C = (torch.randint(-8, 9, shape) for shape in (fragments.A_SHAPE, fragments.B_SHAPE, fragments.C_SHAPE))
held = [fragments.fragment(x.half(), name) for x, name in ((A, "a"), (B, "b"), (C, "c"))]
D = fragments.matrix(mma(held[0], held[1], held[2].float()), "c")
assert torch.equal(D, (A @ B + C).double())
print("one instruction: D = A B + C, all 128 elements equal to torch's")

# %% [markdown]
# **What a wrong fragment computes.** Give it V loaded without `.trans`. Nothing faults, nothing is NaN, and the numbers
# are of the right size. The result is P times a V whose 8 × 8 tiles are transposed. A test with the identity, or with
# any symmetric tile, would pass.

# %%
P, V = torch.randint(0, 5, (16, 16)), torch.randint(-4, 5, (16, 8))
tiles_transposed = torch.cat([V[:8].T, V[8:].T])
for trans, wanted in ((1, V), (0, tiles_transposed)):
    bits = V.half().view(torch.int16)
    b = look(bits, first_row=LANE % 16, first_column=0 * LANE, count=2, trans=trans).view(torch.float16)
    O = fragments.matrix(mma(fragments.fragment(P.half(), "a"), b), "c").long()
    assert torch.equal(O, P @ wanted)
    names = {"P V": V, "P times the transposed tiles": tiles_transposed}
    print(f"trans={trans}: the result is", *(name for name, x in names.items() if torch.equal(O, P @ x)))

# %% [markdown]
# ## 6 · Formats: what is rounded, and where
#
# A and B have 16 bits. fp16 keeps 11 significant bits and overflows beyond 65504. bf16 keeps 8, with the range of
# float32. The layout is the same, so one source serves both: `-DELEMENT=__nv_bfloat16`.
#
# Rounding the *inputs* to 16 bits is the large error. Compared with the product of the rounded matrices, what the
# instruction itself adds is small:

# %%
bfloat = load_inline(ONE_MMA, backend=BACKEND, defines={"ELEMENT": "__nv_bfloat16"})
A, B, rows = torch.randn(16, 16), torch.randn(16, 8), []
for module, dtype in ((one_mma, torch.float16), (bfloat, torch.bfloat16)):
    held = [fragments.fragment(x.to(dtype), name) for x, name in ((A, "a"), (B, "b"))]
    D = fragments.matrix(mma(*held, module=module), "c")
    before = (D - A.double() @ B.double()).abs().max().item()
    after = (D - A.to(dtype).double() @ B.to(dtype).double()).abs().max().item()
    assert after < 4e-5 and before < 16 * torch.finfo(dtype).eps
    small = "yes" if after < 4e-5 else "no"
    rows.append([str(dtype)[6:], f"{torch.finfo(dtype).max:.3g}", f"{before:.0e}", small])
columns = ["A, B", "largest", "error against the unrounded", "below 4e-5 against the rounded"]
show.table(rows, columns, align="lrrl")

# %% [markdown]
# **How a tensor core adds.** The product of two 16-bit numbers is exact in float32. The sum is not. A tensor core adds
# many products at once: it shifts them to the exponent of the largest, and *cuts off* the bits that do not fit. IEEE
# addition rounds to nearest instead.
#
# To see it, add to 1 some products that are each a fraction of 1's last place, $2^{-23}$. The exact sum is known.

# %%
def last_places(count, fraction):
    """One MMA: 1 + count products of fraction * 2^-23. How many times 2^-23 above 1 is the result?"""
    A, B = torch.zeros(16, 16), torch.zeros(16, 8)
    A[:, 0], B[0] = 1.0, 1.0
    A[:, 1 : 1 + count], B[1 : 1 + count] = 2.0**-12, fraction * 2.0**-11
    D = fragments.matrix(mma(fragments.fragment(A.half(), "a"), fragments.fragment(B.half(), "b")), "c")
    return (D[0, 0].item() - 1) * 2**23


CASES = ((1, 0.75), (4, 0.25), (8, 0.125), (15, 0.25), (15, 0.75))
here = {case: last_places(*case) for case in CASES}
assert all(abs(got - count * fraction) <= count for (count, fraction), got in here.items())

# %% [markdown]
# The emulator adds one product after the other, each sum rounded to nearest. So it can differ from a GPU in the last
# places, and neither is the exact sum rounded once. Where a GPU's run is recorded, its column is beside ours:

# %% tags=["nbval-ignore-output"]
runs = [run for run in hardware.recorded() if isinstance(run.get("sums"), list)]
columns = ["products", "each, in last places", "exact sum", "rounded once", f"here ({BACKEND})"]
seen = [{(r["products"], r["fraction"]): r["got"] for r in run["sums"]} for run in runs]
rows = [[count, fraction, count * fraction, round(count * fraction), f"{here[count, fraction]:g}",
         *(f"{gpu[count, fraction]:g}" for gpu in seen)] for count, fraction in CASES]  # fmt: skip
columns += [f"recorded: {run['machine']['gpu']}" for run in runs]
show.table(rows, columns, align="r" * len(columns))
for gpu in seen:
    assert gpu[1, 0.75] == 0 and gpu[15, 0.25] < 4  # cut off; to nearest they would be 1 and 4
if not runs:
    print("no GPU recorded yet: `flashlab bench hardware` on a GPU adds its column")

# %% [markdown]
# Read the H200's column. Three quarters of a last place are cut off, where rounding would make them 1. Four quarters
# add up, but eight eighths vanish: each was cut off *before* the sum.
#
# For attention this is far below the rounding of P to 16 bits. But it is why results are compared with a tolerance, and
# why two GPUs may differ.

# %% [markdown]
# There are two variants of the instruction. `m16n8k8` is half of the sum: `a0 a1` and `b0` only. It is for a K that is
# no multiple of 16. And there are fp16 *accumulators*: half as many registers, and twice as fast on GeForce cards.

# %%
show.region(PTX, "mma m16n8k8", "mma fp16 sums")

# %% [markdown]
# Count to 3000 with each. A's first column and B's first row are ones, so each MMA adds 1. The lanes with `t == 0` hold
# column 0 of A and row 0 of B.

# %%
FORMATS = r"""
#include "ptx.cuh"
__global__ void count_up(float* out_gmem, int times) {          // [3, 32]
    const int lane = threadIdx.x, t = lane % 4;
    const uint32_t one = t == 0 ? pack(1.f, 0.f) : 0;           // (1, 0): ones in A's column 0, in B's row 0
    const uint32_t a16[4] = {one, one, 0, 0}, a8[2] = {one, one};
    float sum[4] = {}, sum_k8[4] = {};
    uint32_t half_sum[2] = {};
    for (int i = 0; i < times; i++) {
        mma_m16n8k16(sum, a16, one, 0);
        mma_m16n8k8(sum_k8, a8, one);
        mma_m16n8k16_f16(half_sum, a16, one, 0);
    }
    out_gmem[lane] = sum[0], out_gmem[32 + lane] = sum_k8[0], out_gmem[64 + lane] = unpack(half_sum[0]).x;
}
extern "C" int run(float* out, int times, void* stream) {
    count_up<<<1, 32, 0, (cudaStream_t)stream>>>(out, times);
    return (int)cudaGetLastError();
}
"""
sums = torch.zeros(3, 32, device=DEVICE)
load_inline(FORMATS, backend=BACKEND).run(sums, 3000)
float32, k8, float16 = sums[:, 0].tolist()
assert (float32, k8, float16) == (3000, 3000, 2048) and (sums == sums[:, :1]).all()
print(f"3000 ones: fp32 accumulator {float32:.0f}, m16n8k8 {k8:.0f}, fp16 accumulator {float16:.0f}")

# %% [markdown]
# At 2048 the spacing of fp16 becomes 2, and $2048 + 1$ rounds back to 2048 for ever. Attention sums as many terms as
# there are keys. All kernels of this course accumulate in float32, unless they say otherwise.

# %% [markdown]
# ## 7 · What a load costs: wavefronts
#
# Shared memory has 32 banks. Each is 4 bytes wide and serves one word per clock. A pass of all 32 banks, 128 bytes, is a
# *wavefront*.
#
# A row of an 8 × 8 tile is 16 bytes, four banks. `ldmatrix` reads a tile in one wavefront if its eight rows lie in eight
# different groups of four banks. Rows that share banks take turns. The emulator counts; here is the same `x4` from a
# tile whose rows are longer and longer.

# %%
counted = load_inline(ONE_MMA, check=True)  # the emulator, on every machine
rows = []
for columns in (16, 32, 64, 128, 72):
    tile = torch.zeros(16, columns, dtype=torch.int16)
    out = torch.zeros(32, 4, 2, dtype=torch.int16)
    counted.ldmatrix(tile, (LANE % 16).int(), (LANE // 16 * 8).int(), out, 16, columns, 4, 0)
    counters = counted.report.counters
    rows.append([columns, columns * 2, counters["ldmatrix_wavefronts"], counters["ldmatrix_ideal"]])
assert [row[2] for row in rows] == [8, 16, 32, 32, 4] and {row[3] for row in rows} == {4}
show.table(rows, ["row length, elements", "bytes", "wavefronts of one x4", "ideal"])

# %% [markdown]
# Four tiles are four wavefronts at best. With rows of 128 bytes or a multiple (HEAD_DIM = 64 and 128) every row begins
# in bank 0. Eight rows take eight turns, and one `x4` takes 32 wavefronts.
#
# The last line shows a cheap way out: rows with 16 bytes of padding. Row $r$ then begins $4r$ banks further. Phase 8
# finds a way that wastes no memory. In this phase we only look, and pay.

# %% [markdown]
# ## 8 · C is A
#
# FlashAttention is two products in a row: $S = Q K^\mathsf{T}$, then $O = P V$ with $P = e^{S - m}$, element by element.
# S comes out of the tensor cores as C fragments. P has to go in as an A fragment. In phase 6 a tile travelled through
# shared memory for that.
#
# Look at the two layouts. Two C tiles of 8 columns are one A tile of 16:

# %%
row, column = c_position(*fragments.slots("c"))
two_tiles = torch.cat([row * 16 + column, row * 16 + column + 8], dim=1)  # [32 lanes, c0..c3 d0..d3]
names = ["c0", "c1", "c2", "c3", "d0", "d1", "d2", "d3"]
figure, axes = plt.subplots(2, 1, figsize=(8.6, 8.8))
fragments.draw(axes[0], two_tiles, (16, 16), names, outlined=[5], hues=[0, 0, 1, 1, 2, 2, 3, 3], fontsize=5)
fragments.draw(axes[1], a, (16, 16), "a", outlined=[5])
titles = ("S, two C tiles: c of columns 0–7, d of 8–15", "P as the A operand")
for ax, title in zip(axes, titles, strict=True):
    ax.set(aspect=0.5, title=title)
plt.show()

# %% [markdown]
# *Above: who ends up with S. Below: who must bring P. The lanes are the same everywhere. A pair above has the colour of
# the register below that it becomes.*
#
# So each lane rounds its own pairs to 16 bits, packs them, and has the A fragment:
#
# $$a_0 = (c_0, c_1), \quad a_1 = (c_2, c_3), \quad a_2 = (d_0, d_1), \quad a_3 = (d_2, d_3).$$
#
# No shuffle, no shared memory, no barrier. For every lane it is an identity of the formulas:

# %%
for lane in range(32):
    for register, (which, pair) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):  # which C tile, which pair
        for half in (0, 1):
            row, column = c_position(lane, 2 * pair + half)
            assert a_position(lane, register, half) == (row, column + 8 * which)
print("256 elements: C's place is A's place")

# %% [markdown]
# `pack` rounds two floats to nearest and puts them into one register, the first into the lower half:

# %%
show.region(PTX, "pack")

# %% [markdown]
# And on values: `c_to_a` computes $(X Y^\mathsf{T}) Z$ with two products, and nothing between them but `pack`.

# %%
show.region(ONE_MMA, "C becomes A")

# %% [markdown]
# The emulator counts what it took. Three MMAs: two for the two C tiles of $X Y^\mathsf{T}$, one for the second product.

# %%
X, Y, Z = (torch.randint(-3, 4, shape) for shape in ((16, 16), (16, 16), (16, 8)))
out = torch.zeros(16, 8, device=DEVICE)
one_mma.reuse(*(x.half().to(DEVICE) for x in (X, Y, Z)), out)
assert torch.equal(out.cpu().long(), X @ Y.T @ Z)
counted.reuse(*(x.half() for x in (X, Y, Z)), torch.zeros(16, 8))
counters = counted.report.counters
assert counters["mma"] == 3 and counters["ldmatrix"] == 3 and counters["shuffles"] == 0
print("(X Y^T) Z equals torch's:", {name: counters[name] for name in ("mma", "ldmatrix", "shuffles")})

# %% [markdown]
# The cost: P is rounded to 16 bits, as every FlashAttention does, and as phase 2's `p.to(V.dtype)` did. The sum `l_i`
# is taken from the unrounded floats. Exercise 7.5 is this step, with its three classic mistakes.

# %% [markdown]
# ## 9 · A row lives in a quad
#
# The softmax needs the maximum and the sum of each row of S. Row $g$ of a C tile is in the `c0 c1` of four lanes, $4g$
# to $4g + 3$. Each lane first reduces what it holds. Then the quad reduces across its lanes.
#
# `__shfl_xor_sync(mask, x, d)` gives each lane the `x` of the lane whose number differs in the bits of $d$. With $d = 1$
# lanes 0↔1 and 2↔3 exchange; with $d = 2$, 0↔2 and 1↔3. After both, all four have the maximum of all four.

# %%
QUAD = r"""
#include "ptx.cuh"
__global__ void quad_max(const float* x_gmem, float* steps_gmem) {      // [32], [3, 32]
    const int lane = threadIdx.x;
    float x = x_gmem[lane];
    steps_gmem[lane] = x;
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    steps_gmem[32 + lane] = x;
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    steps_gmem[64 + lane] = x;
}
extern "C" int run(const float* x, float* steps, void* stream) {
    quad_max<<<1, 32, 0, (cudaStream_t)stream>>>(x, steps);
    return (int)cudaGetLastError();
}
"""
x, steps = torch.randperm(32).float(), torch.zeros(3, 32, device=DEVICE)
load_inline(QUAD, backend=BACKEND).run(x.to(DEVICE), steps)
steps = steps.cpu().reshape(3, 8, 4)  # [step, g, t]
assert torch.equal(steps[2], x.reshape(8, 4).amax(dim=1, keepdim=True).expand(8, 4))
print("after two shuffles every lane of a quad has its row's maximum")

# %% [markdown]
# What the lanes held before, between and after:

# %%
figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.6), sharey=True)
for ax, values, title in zip(axes, steps, ("each lane's own", "after xor 1", "after xor 2"), strict=True):
    fragments.quads(ax, values, steps[2], title)
axes[0].set(ylabel="g = lane // 4  (row of C)")
plt.show()

# %% [markdown]
# *Eight quads, one for each row of C. Dark: the lane has its row's maximum already. No value crosses from one quad, one
# row of the figure, to another.*
#
# The masks 1 and 2 are the two low bits of the lane number, which are $t$. Any higher bit changes $g$, and mixes rows.
# In many kernels the masks are written as binary literals, `0b01` and `0b10`. Exercise 7.4 is about one wrong character
# in them.

# %% [markdown]
# ## 10 · The kernel, part by part
#
# `p7_naive.cu` is FlashAttention's forward pass, built from exactly these pieces and as plainly as possible. A block is
# one warp. It owns 16 query rows, the M of one MMA. It walks the keys 16 at a time, so that S is two C tiles, and P is
# one A fragment.
#
# It takes fp16 and bf16, HEAD_DIM 64 and 128, any lengths, causal, grouped heads. It returns the log-sum-exp too.

# %%
show.region(NAIVE, "constants")

# %% [markdown]
# `WARP_SIZE`, `MMA_M`, `MMA_N`, `MMA_K`, `T` and `struct Problem` come from `problem.cuh`, which every kernel of the
# series begins with (phase 6). `WARPS` is 1 here; the same lines will do for more.
#
# **Copy a tile.** Thread $i$ takes chunk $i$, $i + 32$, …, 16 bytes each, so that neighbouring threads read neighbouring
# addresses. Rows that do not exist become zeros: a score of garbage can be masked, but $0 \cdot \text{NaN}$ in $PV$ is
# NaN. `at` says where an element lies in a tile, for now row by row. (Its region is named *swizzle*, because phase 8
# changes this line.)

# %%
show.region(NAIVE, "swizzle", "copy a tile")

# %% [markdown]
# **Who works on what.** Three tiles of shared memory; their size is the third launch argument. The block's number says
# which head and which 16 rows. Query head `head` uses K and V of head `head / (heads / kv_heads)`: grouped heads.

# %%
show.region(NAIVE, "shared memory", "which rows")

# %% [markdown]
# **Which keys.** Causal means: query $i$ sees the keys up to $i + \text{diagonal}$. So the block stops after the last
# tile that its last row sees. If there are fewer keys than queries, `diagonal` is negative, and the first rows see no
# key at all.
#
# **State.** Compare with phase 2. `acc` is O's 16 × D tile, now `O_TILES` C fragments. Of `m_i` and `l_i` a lane keeps
# two each, for rows $g$ and $g + 8$.

# %%
show.region(NAIVE, "which keys", "state")

# %% [markdown]
# **Load Q, then K and V.** Q's tile is copied once, before the loop over the tiles of keys. It needs no barrier of its
# own, because the loop begins with two. Each of these prevents one hazard, which its comment names. One warp would get
# by with `__syncwarp`; from phase 8 on there are four.

# %%
show.region(NAIVE, "loop head", "load K and V")

# %% [markdown]
# **S = Q Kᵀ.** For each 16 dimensions: one `ldmatrix.x4` for the A fragment of Q (section 3's addresses), and for each
# of the two groups of 8 keys one `ldmatrix.x2` for B (section 4's). Q is loaded again for every key tile. That is waste,
# and phase 8 removes it.

# %%
show.region(NAIVE, "scores")

# %% [markdown]
# **The row maxima.** `r` is which of the lane's two rows, `e` which of the two columns. So `s[n][2 * r + e]` is row
# $g + 8r$, column $8n + 2t + e$: section 5's formula.
#
# That makes the mask easy: the lane that holds a score knows its key's number. Keys that do not exist and keys above
# the diagonal get $-\infty$. Then the quad's two shuffles.

# %%
show.region(NAIVE, "row maxima")

# %% [markdown]
# **Correction, and P.** `scale_log2` is the scale times $\log_2 e$ (phase 3), so that $e^{\text{scale} \cdot s}$ is one
# `ex2` instruction, `exp2_approx`. The maximum is of the raw scores; the scale is applied inside a fused multiply-add.
#
# A row that has seen no key has the maximum $-\infty$. `base` is 0 for it, because $-\infty - (-\infty)$ is NaN.
#
# `l_i` stays a *partial* sum, of this lane's columns. The correction is the same in all four lanes of a quad, so they
# can be added up once, at the end.

# %%
show.region(NAIVE, "rescale", "probabilities")

# %% [markdown]
# **O += P V.** Section 8's packing, and section 4's `.trans`.

# %%
show.region(NAIVE, "output")

# %% [markdown]
# **O and lse.** After the last tile the quad adds up its four partial sums. Each lane stores its pairs of columns, 4
# bytes at a time, and only rows that exist.
#
# A row that has seen no key has the sum 0. It gets O = 0 and lse = $-\infty$, the logarithm of an empty sum. Libraries
# differ here: FlashAttention-2 writes $+\infty$ for such a row, FlashAttention-3 $-\infty$.

# %%
show.region(NAIVE, "store")

# %% [markdown]
# **The launch.** One block for each 16 rows of each head. The four arguments in `<<<>>>` are blocks, threads per block,
# bytes of shared memory, and PyTorch's stream.

# %%
show.region(NAIVE, "launch")

# %% [markdown]
# ## 11 · Milestone: the whole kernel
#
# Nothing in this file is new to you any more. First a map, then all of it, uncut. Read it once from top to bottom, and
# say for each region which shapes go in and come out.

# %%
MAP = {
    "constants": "shapes; how many tiles a warp holds", "swizzle": "where an element of a tile lies (7)",
    "copy a tile": "global to shared memory, zeros beyond the end", "shared memory": "three tiles (7)",
    "which rows": "block number → head, 16 rows", "which keys": "the causal end of the loop",
    "state": "acc, m_i, l_i in registers (5)", "loop head": "Q, once; then over the tiles of keys",
    "load K and V": "two copies between two barriers",
    "scores": "A and B fragments, D/16 × 2 MMAs (3, 4)", "row maxima": "mask; two shuffles (9)",
    "rescale": "acc and l_i under the new maximum", "probabilities": "P = exp(S − m), in place",
    "output": "C is A (8), .trans (4), D/8 MMAs", "store": "sum of the quad, O and lse", "launch": "the grid",
}  # fmt: skip
found = regions(NAIVE.path.read_text())
assert set(found) - set(MAP) == {"main loop", "one tile"}  # which hold others
rows = [[name, f"{found[name].first}–{found[name].last}", what] for name, what in MAP.items()]
show.table(rows, ["region", "lines", "what it does (section of this lecture)"], align="lrl")

# %% [markdown]
# The whole file:

# %%
show.source(NAIVE.path)

# %% [markdown]
# To own it, write it. Exercise 7.7 gives you everything but the inside of the loop. Exercise 7.10 gives you the
# signature of `forward`, and an empty page.

# %% [markdown]
# ## 12 · Does it work?
#
# First one case against the oracle, with a length that is a multiple of nothing:

# %%
naive = load_inline(NAIVE, backend=BACKEND)
q, k, v = (torch.randn(1, 2, 100, 64).half().to(DEVICE) for _ in range(3))
for causal in (False, True):
    o, lse = naive.forward(q, k, v, causal=causal)
    want, want_lse = reference.attention(*(x.cpu() for x in (q, k, v)), causal=causal)
    error, lse_error = (o.cpu() - want).abs().max().item(), (lse.cpu() - want_lse).abs().max().item()
    assert error < 2e-3 and lse_error < 1e-4
    print(f"causal={causal!s:5}: o is within 2e-3 of float64, lse within 1e-4")

# %% [markdown]
# Then the checker: every nasty case it has, both dtypes, both head dimensions, causal, grouped heads, different lengths
# of Q and K. That compiles four variants of the source.

# %%
HALVES = (torch.float16, torch.bfloat16)
report = verify(naive.forward, causal=True, gqa=True, dtypes=HALVES, head_dims=(64, 128), max_seq=200)
print(report.verdict)

# %% [markdown]
# **The other half of checking: kernels that are wrong.** `examine` runs a source in the emulator, with every access
# watched, and then gives it to the checker. Where only fragments can explain the numbers, it tries the known ways to
# get them wrong. Three edits of one line each:

# %%
edits = {
    "no mask for the tail": ("if (n_start + n * MMA_N", "if (p.causal && n_start + n * MMA_N"),
    "c3 packed before c2": ("pack<T>(c[2], c[3])", "pack<T>(c[3], c[2])"),
    "b0 and b1 of V exchanged": ("(acc[n], a, b[0], b[1])", "(acc[n], a, b[1], b[0])"),
}
text, rows = NAIVE.path.read_text(), []
for name, (old, new) in edits.items():
    assert text.count(old) == 1
    try:
        examine(text.replace(old, new), fast=False)
        raise AssertionError(f"{name}: passed, and should not have")
    except CheckFailed as failed:
        rows.append([name, failed.diagnosis, str(failed)])
assert [row[1] for row in rows] == ["tail-not-masked", "fragment-swapped", "fragment-swapped"]
show.table(rows, ["the edit", "diagnosis", "what the learner reads"])

# %% [markdown]
# A missing barrier is another matter. On a GPU it may give the right answer for years, because the lanes of a warp often
# run in step. No comparison of numbers finds it. The watched build looks at who touched what. Take both barriers out of
# *load K and V*. The first reader that is too early is the one of Q, whose copy had no barrier of its own:

# %%
without = region(NAIVE, "load K and V").replace("__syncthreads();", "/* no barrier */ ")
try:
    examine(replaced(NAIVE, "load K and V", without))
    raise AssertionError("a race, and nobody saw it")
except CheckFailed as failed:
    assert failed.diagnosis == "race"
    print(failed)

# %% [markdown]
# ## 13 · Predict the counts
#
# For one head of N queries and keys, with $T$ the number of (16 × 16) score tiles visited, count along the source:
#
# | | per tile | why |
# |:--|:--|:--|
# | MMAs | $\tfrac{D}{16} \cdot 2 + \tfrac{D}{8} = \tfrac{D}{4}$ | S: 2 per 16 dimensions; O: 1 per 8 columns |
# | `ldmatrix` | $\tfrac{D}{16} \cdot 3 + \tfrac{D}{8} = \tfrac{5D}{16}$ | Q 1, K 2 per 16 dimensions; V 1 per 8 columns |
# | shuffles | 4 | 2 per row; and 4 per query block, for the sums |
# | barriers | 2 | |
#
# $D/4$ MMAs of 4096 FLOPs are $1024 D = 4 \cdot 16 \cdot 16 \cdot D$: the two products of a tile, with not one wasted.

# %% [markdown]
# $T$ is $(N/16)^2$, and in the causal case only the tiles on and under the diagonal.

# %%
counting = load_inline(NAIVE, check=True)
N, rows = 128, []
for D, causal in ((64, False), (64, True), (128, False), (128, True)):
    counting.forward(*(torch.randn(1, 1, N, D).half() for _ in range(3)), causal=causal)
    assert counting.report.ok
    blocks = N // 16
    T = blocks * (blocks + 1) // 2 if causal else blocks**2
    expected = {"mma": T * D // 4, "ldmatrix": T * 5 * D // 16}
    expected |= {"shuffles": 4 * T + 4 * blocks, "barriers": 2 * T}
    seen = {name: counting.report.counters[name] for name in expected}
    assert seen == expected
    rows.append([D, str(causal), *seen.values(), "yes" if seen == expected else "no"])
show.table(rows, ["D", "causal", *expected, "as predicted"], align="rlrrrrl")

# %% [markdown]
# **Bytes of global memory.** Q is read once. K and V are read once for each block of 16 queries. That is phase 2's
# formula, with the smallest BLOCK_M that an MMA allows:

# %%
counting.forward(*(torch.randn(1, 1, 128, 64).half() for _ in range(3)))
counters = counting.report.counters
predicted = (N + N // 16 * 2 * N) * 64 * 2
assert counters["global_load_bytes"] == predicted
print(f"bytes: {counters['global_load_bytes']} read, {predicted} predicted; the inputs have {3 * N * 64 * 2}")

# %% [markdown]
# **Bank conflicts**, by line. As section 7 promised, with rows of 128 bytes each tile of 8 rows takes 8 wavefronts where
# one would do:

# %%
lines, rows = text.splitlines(), []
for number, line_counters in counting.report.by_line.items():
    if line_counters["ldmatrix"]:
        wavefronts, ideal = line_counters["ldmatrix_wavefronts"], line_counters["ldmatrix_ideal"]
        called = lines[number - 1].strip().split("(")[0]
        rows.append([number, called, line_counters["ldmatrix"], wavefronts, ideal, wavefronts // ideal])
assert all(row[-1] == 8 for row in rows) and len(rows) == 3
show.table(rows, ["line", "load", "instructions", "wavefronts", "ideal", "factor"], align="rlrrrr")

# %% [markdown]
# ## 14 · How fast can it be?
#
# Before the measurement, a bound. Per clock, a multiprocessor (SM) does one wavefront of shared memory. Per clock, the
# tensor cores of an H100 or H200 do 4096 dense fp16 FLOPs, twice an A100's (NVIDIA's white papers). That is one
# `m16n8k16` per clock.
#
# The counts say how many FLOPs the kernel gets per wavefront:

# %%
per_wavefront = {}
for D in (64, 128):
    counting.forward(*(torch.randn(1, 1, N, D).half() for _ in range(3)))
    c = counting.report.counters
    as_it_is = c["ldmatrix_wavefronts"] + c["shared_store_wavefronts"]
    at_best = c["ldmatrix_ideal"] + c["shared_store_ideal"]
    for name, wavefronts in (("as it is", as_it_is), ("without bank conflicts", at_best)):
        per_wavefront[D, name] = got = c["mma_flops"] / wavefronts
        print(f"D = {D:3}, {name:22}: {got:4.0f} FLOPs per wavefront, at most {got / 4096:.1%} of the peak")
assert per_wavefront[64, "as it is"] == per_wavefront[128, "as it is"]

# %% [markdown]
# The bound is the same for both D, because FLOPs and wavefronts both grow with D. So this kernel can use a few per cent of the tensor cores, whatever else it does: they wait for shared memory.
#
# (Is the peak of 4096 within reach of `mma.sync` at all? Where a GPU's rates are recorded, this cell says it. What
# `mma.sync` leaves on Hopper belongs to `wgmma`, phase 11: four warps together, operands in shared memory.)

# %% tags=["nbval-ignore-output"]
PEAK = {"sm_80": 0.5, "sm_90": 1.0}  # MMAs per clock and SM: A100, H100 and H200
runs = [run for run in hardware.recorded() if isinstance(run.get("rates"), list)]
for run in runs:
    rates = {r["warps"]: r["per_clock"] for r in run["rates"] if r["instruction"] == "mma, float32 sums"}
    peak = PEAK.get(run["machine"].get("target"))
    shares = "" if peak is None else f"; at best {max(rates.values()) / peak:.0%} of the peak"
    print(run["machine"]["gpu"], "MMAs per clock and SM:",
          ", ".join(f"{warps} warps {rate:.2f}" for warps, rate in rates.items()) + shares)
if not runs:
    print("no GPU recorded yet: `flashlab bench hardware` on a GPU measures it")

# %% [markdown]
# Now the measurement. Where the course has a recorded run, here it is, with FlashAttention-2 in the same run. The bound
# is the FLOPs per wavefront from above, times the SMs and their clock. `flashlab bench mma` measures your GPU.

# %% tags=["nbval-ignore-output"]
LADDERS = records.recorded("mma")
for run in LADDERS:
    machine, times = run["machine"], {}
    clock = (machine.get("sm_clock_mhz") or {}).get("median") or float("nan")
    bound = per_wavefront[64, "as it is"] * machine["sms"] * clock / 1e6  # TFLOP/s, for D = 128 too
    print(f"{machine['gpu']}, torch {machine['torch']}, {clock:.0f} MHz: the bound is {bound:.0f} TFLOP/s")
    for row in run["ladder"]:
        if row["name"] in ("p7_naive", "fa2") and row["inputs"] == "randn" and not row["causal"]:
            times.setdefault("B{} H{} N{} D{}".format(*row["shape"]), {})[row["name"]] = row["tflops"]
    both = [(shape, x["p7_naive"], x["fa2"]) for shape, x in times.items() if len(x) == 2]
    rows = [[shape, f"{x:.1f}", f"{x / bound:.0%}", f"{fa2:.0f}", f"{fa2 / x:.0f}"] for shape, x, fa2 in both]
    columns = ["shape", "naive, TFLOP/s", "of the bound", "FlashAttention-2, TFLOP/s", "factor"]
    show.table(rows, columns, align="lrrrr")
if not LADDERS:
    print("none recorded yet: `flashlab bench mma` on a GPU measures it")

# %% [markdown]
# On the large shapes most of the bound is reached. One warp alone waits most of the time, but an SM holds several blocks
# at once, and they fill each other's gaps. On the smallest shape, B1 H1 N1024, there are 64 warps for all SMs. Nobody
# fills the gaps there.
#
# How many blocks an SM holds follows from what the compiler gave each thread. Registers come in steps of 256 per warp;
# an H200 has 65536 of them, and 228 KiB of shared memory, of which each block costs 1 KiB extra:

# %%
gpu, rows = runtime.GPUS["H200"], []
for r in resources.recorded()["kernels"]:
    if (r.step, r.target) == ("p7_naive", "sm_90"):
        by_registers = gpu.registers_per_sm // (-(-r.registers * 32 // 256) * 256)
        shared = 3 * 16 * r.head_dim * 2  # bytes: the tiles of Q, K and V
        by_shared = gpu.shared_per_sm // (shared + 1024)
        fit = min(32, by_registers, by_shared)
        rows.append([r.head_dim, r.registers, by_registers, shared, by_shared, fit])
columns = ["D", "registers per thread", "so many blocks", "shared bytes", "so many blocks", "blocks per SM"]
show.table(rows, columns, align="r" * 6)

# %% [markdown]
# Was it really shared memory? NVIDIA's profiler, Nsight Compute, counts wavefronts too. In the same recording it looked
# at B = 2, H = 8, N = 2048. The prediction needs no GPU: $6D$ wavefronts of `ldmatrix` per tile, of which seven in eight
# are conflicts, and $D/2$ of stores.

# %% tags=["nbval-ignore-output"]
def predict(B, H, N, D):
    """Wavefronts of shared memory, and those that are conflicts."""
    T = B * H * (N // 16) ** 2
    return (6 * D + D // 2) * T + B * H * N * D * 2 // 128, 6 * D * T * 7 // 8


for run in LADDERS:
    rows = []
    for c in (c for c in run.get("counters") or [] if c["name"] == "p7_naive" and not c["causal"]):
        counted_pair, predicted_pair = (c["shared_wavefronts"], c["bank_conflicts"]), predict(*c["shape"])
        ratios = [x / p for x, p in zip(counted_pair, predicted_pair, strict=True)]
        assert all(abs(ratio - 1) < 0.05 for ratio in ratios)
        busy = [f"{c[name]:.0f} %" for name in ("shared_active_pct", "tensor_active_pct")]
        rows.append([c["shape"][3], *(f"{x:.4f}" for x in ratios), *busy])
    columns = ["D", "wavefronts, counted / predicted", "conflicts", "shared memory busy", "tensor cores busy"]
    show.table(rows, columns, align="r" * 5)

# %% [markdown]
# The counts meet the prediction. Most of what shared memory does is repeating itself, and the tensor cores, for which
# all of this was done, are idle most of the time.
#
# At D = 64 shared memory is busy for most of the time, and the kernel is near its bound. At D = 128 it is less busy: the
# bound is necessary, not sufficient. There fewer blocks fit on an SM (the table above), so fewer warps hide each other's
# waiting. That would explain the gap; nothing here isolates it.

# %% [markdown]
# Others have been here. An earlier course published its own naive tensor-core kernel (`ldmatrix` and `mma`, one stage,
# one small tile per block) on an Ada GPU. These are its figures, not ours (`mma_stages_ada.csv`):

# %%
keys = ("batch", "heads", "seq_len", "head_dim", "variant")
published = {tuple(row[key] for key in keys): row["ms"] for row in load("mma_stages_ada")}
variants, rows = ("mma_naive", "naive_unfused", "flash_official"), []
for b, h, n, d in ((1, 1, 1024, 64), (1, 8, 1024, 64), (4, 8, 2048, 64), (4, 8, 2048, 128)):
    tflops = [4 * b * h * n * n * d / published[b, h, n, d, name] / 1e9 for name in variants]
    rows.append([f"B{b} H{h} N{n} D{d}", *(f"{x:.2g}" for x in tflops), f"{tflops[2] / tflops[0]:.1f}"])
columns = ["shape", "naive, tensor cores", "unfused PyTorch", "FlashAttention-2", "FlashAttention-2 / naive"]
show.table(rows, columns, align="lrrrr")

# %% [markdown]
# *TFLOP/s, fp16.* Their naive kernel is slower than PyTorch's unfused attention on three of these four shapes.
#
# **The tensor cores make the multiplication cheap, and then everything else is the kernel.** What the compiler made of
# ours, recorded from `nvcc`:

# %% tags=["nbval-ignore-output"]
for r in resources.recorded()["kernels"]:
    if (r.step, r.target) == ("p7_naive", "sm_90"):
        assert r.instructions["HMMA"] == r.head_dim // 4 and r.instructions["LDSM"] == 5 * r.head_dim // 16
opcodes = ("HMMA", "LDSM", "SHFL", "STS", "LDG", "BAR")
resources.table("sm_90", steps=["p7_naive"], head_dim=None, opcodes=opcodes)

# %% [markdown]
# `HMMA` is the MMA and `LDSM` is `ldmatrix` in the machine code. Unrolled, the loop body holds exactly as many as
# section 13 counted for one tile: $D/4$ and $5D/16$. Nothing spills: registers are no problem yet.

# %% [markdown]
# What keeps the kernel from its tensor cores:
#
# 1. **Too little work per load.** Every K and V tile serves 16 query rows. With 64 rows in four warps, K and V are
#    copied a quarter as often.
# 2. **Waiting.** Load, barrier, compute, barrier. With `cp.async` the next copy runs under the arithmetic.
# 3. **Bank conflicts**: a factor of 8 on every `ldmatrix`. The XOR swizzle makes it 1.
# 4. **Narrow instructions**: Q loaded again for each tile, `x2` for `x4`, stores of 4 bytes.
#
# Phase 8 measures what each is worth. Which is worth the most? Write your guess down before you go on.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - With $g = \lfloor \text{lane}/4 \rfloor$, $t = \text{lane} \bmod 4$: A's registers hold row $g$ (+8), columns
#   $2t, 2t+1$ (+8); B's rows $2t, 2t+1$ (+8) of column $g$; C's columns $2t, 2t + 1$ of rows $g$ and $g + 8$.
# - `ldmatrix`: lane $8i + r$ names row $r$ of tile $i$; every lane receives two neighbours of row $g$. K needs no
#   `.trans`, V does.
# - Two C tiles, rounded and packed, are one A tile.
# - A row lives in a quad: shuffles with 1 and 2, never more.
# - Per tile: $D/4$ MMAs, $5D/16$ `ldmatrix`, eight times the wavefronts that are needed.

# %% [markdown]
# Left to explore, some of it in the exercises:
#
# - let the tensor cores add up the rows (7.8: a B of ones);
# - `m16n8k8` for a head dimension of 40 (7.9);
# - the whole kernel from an empty page (7.10);
# - the columns of A *and* the rows of B exchanged in the same way change nothing. So the order along K is yours to
#   choose, and some kernels use that to load 8 bytes where a fragment wants 4.

# %% [markdown]
# ## References
#
# - NVIDIA, *Parallel Thread Execution ISA*,
#   [docs.nvidia.com/cuda/parallel-thread-execution](https://docs.nvidia.com/cuda/parallel-thread-execution/).
#   Warp-level matrix instructions: matrix fragments for `mma.m16n8k16` and `m16n8k8` with floating-point type (the
#   figures drawn here), `ldmatrix`.
# - Massimiliano Fasi, Nicholas J. Higham, Mantas Mikaitis, Srikara Pranesh, *Numerical behavior of NVIDIA tensor cores*,
#   PeerJ Computer Science 7:e330, 2021. How tensor cores add: truncation, extra bits, order.
# - Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*, 2023,
#   [arXiv:2307.08691](https://arxiv.org/abs/2307.08691). Section 3: the loop order, and the division of work between
#   warps.
# - NVIDIA, *NVIDIA A100 Tensor Core GPU Architecture*, 2020, and *NVIDIA H100 Tensor Core GPU Architecture*, 2022
#   (white papers). FLOPs per clock and multiprocessor, and what changed from one to the other.
# - gau-nernst, *learn-cuda*, [github.com/gau-nernst/learn-cuda](https://github.com/gau-nernst/learn-cuda),
#   `07_attention`. A FlashAttention series on an RTX 5090, from a first MMA kernel to 94 % of the speed of light.
# - Vijay Thakkar and others, *CUTLASS* and its CuTe documentation,
#   [github.com/NVIDIA/cutlass](https://github.com/NVIDIA/cutlass), `media/docs/cpp/cute/0t_mma_atom.md`. The same
#   fragments as layout algebra.
# - Da Yan, Wei Wang, Xiaowen Chu, *Demystifying Tensor Cores to Optimize Half-Precision Matrix Multiply*, IPDPS 2020.
#   Fragments, shared memory and what limits a tensor-core kernel, measured.
