# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 7 · Tensor cores
#
# Phase 6 multiplied matrices one number at a time. A tensor core multiplies a 16 × 16 tile by a 16 × 8 tile in one
# instruction, and the price is a layout: the 32 threads of a warp hold the tiles together, each a few elements, in
# places that the hardware chose. This lesson finds those places by looking, multiplies one tile by hand, and then reads
# a whole FlashAttention kernel built on nothing else.

# %% [markdown]
# ## What you will be able to do
#
# - Say which lane and which register holds element (row, column) of A, B and C of `mma.m16n8k16`, and derive it from a
#   run when in doubt.
# - Load a fragment with `ldmatrix`, give it the right 8, 16 or 32 addresses, and say when it needs `.trans`.
# - Explain why the scores, C of the first product, are A of the second without a single number changing lanes.
# - Reduce a row that lives in four lanes with two shuffles.
# - Write a FlashAttention forward pass on the tensor cores in 170 lines, and predict its instruction counts exactly.

# %% [markdown]
# ## What you need first
#
# Phase 2 (the state `m_i`, `l_i`, `acc`) and phase 6 (threads, warps, shared memory, barriers, `load_inline`, the
# emulator). On a machine with a GPU and `nvcc` the cells below run on its tensor cores. Without, the same sources run
# in the emulator, lane by lane; what is *counted* always comes from the emulator, so those numbers are the same for
# everybody.

# %%
import json
import textwrap

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from flashlab.attention import reference
from flashlab import runtime
from flashlab.figures import curves, fragments, show
from flashlab.bench.published import load
from flashlab.check import CheckFailed, verify
from flashlab.kernels import path, source
from flashlab.kernels.regions import region_text
from flashlab.cuda import load_inline, missing
from flashlab.bench.resources import RECORDED as RESOURCES
from flashlab.bench.resources import recorded as resources_recorded
from flashlab.bench.resources import table as resources_table
from flashlab.check.cuda_answer import examine

show.style()
torch.manual_seed(0)
DEVICE = runtime.device()
BACKEND = "emulator" if missing("nvcc") else "nvcc"  # nvcc, called directly: the quickest build on a GPU

# %% [markdown]
# ## 1 · One instruction
#
# `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32` computes $D = A\,B + C$ with A of 16 × 16, B of 16 × 8, C and D of
# 16 × 8. The name reads: shape M = 16, N = 8, K = 16; A by rows, B by columns; D in float32, A and B in float16, C in
# float32. One warp issues it once and gets $2 \cdot 16 \cdot 8 \cdot 16 = 4096$ floating-point operations. A fused
# multiply-add, the best that phase 6 had, gives a warp 64.
#
# It is worth the trouble because of this column of the data sheets:

# %%
rows = []
for name in ("A100", "RTX 3090", "RTX 4090", "H200"):
    gpu = runtime.GPUS[name]
    rows.append([name, gpu.fp32_tflops, gpu.fp16_tflops, f"{gpu.fp16_tflops / gpu.fp32_tflops:.1f}"])
show.table(rows, ["GPU", "float32, TFLOP/s", "tensor cores, fp16 in, fp32 sums, TFLOP/s", "factor"], align="lrrr")

# %% [markdown]
# (On GeForce cards a tensor core with float32 sums runs at half of its fp16 rate, hence the factor of 2.)
#
# No thread holds a matrix. A is 256 numbers of 16 bits: 8 a lane, packed two and two into 4 registers, `a0` to `a3`. B
# is 128 numbers: 2 registers, `b0 b1`. C and D are 128 floats: 4 registers each, `c0 c1 | c2 c3`. Ten registers a lane,
# and 32 lanes: that is everything. *Which* 8 numbers are lane 5's is the question of this lesson.

# %% [markdown]
# ## 2 · Let it tell us: `ldmatrix`
#
# The instruction that fills such registers from shared memory is `ldmatrix`. Its unit is a tile of 8 × 8 numbers of 16
# bits; a row of it is 16 bytes. We will load a tile whose numbers are their own *indices*, and let every lane write out
# what it received. The kernel is one warp:

# %%
def part(name, region):
    """Shows a region of a file of the series."""
    display(Markdown(f"```cpp\n{textwrap.dedent(region_text(source(name), region))}```"))


part("p7_one_mma", "ldmatrix")

# %% [markdown]
# `load_inline` builds the file and gives back its `extern "C"` functions. `look` calls one of them: each lane says
# where a row begins (a row and a column of the tile), and what it received comes back as
# `[32 lanes, registers, 2 halves]`. First a single 8 × 8 tile, `ldmatrix.x1`.

# %%
one_mma = load_inline(path("p7_one_mma"), backend=BACKEND)


def look(tile, first_row, first_column, count, trans=0):
    """What ldmatrix gives the lanes, [32 lanes, count registers, 2 halves], of a tile of 16-bit patterns."""
    out = torch.zeros(32, count, 2, dtype=torch.int16, device=DEVICE)
    addresses = [x.to(DEVICE, torch.int32) for x in (first_row, first_column)]
    one_mma.ldmatrix(tile.to(DEVICE, torch.int16), *addresses, out, *tile.shape, count, trans)
    return out.cpu()


LANE = torch.arange(32)
tile = torch.arange(64).reshape(8, 8)  # element (row, column) is 8 row + column
got = look(tile, first_row=LANE % 8, first_column=0 * LANE, count=1)
show.table([[f"lane {lane}", *got[lane, 0].tolist()] for lane in (0, 1, 2, 3, 4, 5, 31)], ["", "lower half", "upper half"])

# %% [markdown]
# Lane 0 got elements 0 and 1, lane 1 got 2 and 3; after four lanes the row of eight is used up, and lane 4 begins with
# 8, the second row. So with $g = \lfloor \text{lane} / 4 \rfloor$ and $t = \text{lane} \bmod 4$ (the PTX manual calls
# them *groupID* and *threadID in group*):
#
# $$\text{row} = g, \qquad \text{column} = 2t + \text{half}.$$
#
# Four lanes with the same $g$ are a *quad*. Remember the word: a row lives in a quad.

# %%
g, t = LANE // 4, LANE % 4
for half in (0, 1):
    assert torch.equal(got[:, 0, half].long(), tile[g, 2 * t + half])
print("row = lane // 4, column = 2 (lane % 4) + half: true of all 64 elements")

# %% [markdown]
# **Who says where the rows are?** Notice the two different things a lane does. It *gives an address*, of a whole row of
# 8 numbers; and it *receives two numbers*, usually from rows whose addresses others gave. In `x1` the eight addresses
# come from lanes 0 to 7. To see it, let lane 3 lie: it gives the address of row 0. Then everyone who should get a part
# of row 3, lanes 12 to 15, gets row 0 instead, and lane 3 itself notices nothing.

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
# `ldmatrix.x4` loads four such tiles at once: lanes $8i$ to $8i + 7$ give the rows of tile $i$, and tile $i$ arrives in
# register $i$. Which four 8 × 8 tiles of a 16 × 16 matrix should be registers `a0` to `a3`? The manual says: upper
# left, lower left, upper right, lower right. So lane $l$ gives the address of row $l \bmod 16$, at column
# $8 \lfloor l / 16 \rfloor$: two cheap operations, and you will read them in every kernel.

# %%
tile = torch.arange(256).reshape(16, 16)
a = look(tile, first_row=LANE % 16, first_column=LANE // 16 * 8, count=4)
for lane in (0, 5, 31):
    print(f"lane {lane:2d}:", "  ".join(f"a{r} = {a[lane, r].tolist()}" for r in range(4)))

# %% [markdown]
# Three lanes' numbers are hard to see as places, so draw all of them: every register of every lane at the elements that
# it received.

# %%
figure, ax = plt.subplots(figsize=(8.2, 4.6))
fragments.draw(ax, a, (16, 16), "a", outlined=[5], fontsize=6.5)
ax.set_aspect(0.5)
ax.set(title="A, 16 × 16: which lane holds what (from the run)", ylabel="row")
ax.set_xlabel("column")
plt.show()

# %% [markdown]
# *Each box is one register of one lane: two neighbours of a row. T5 is lane 5; its four registers are framed. Colours
# are the registers, which are also the four 8 × 8 tiles.*
#
# The same as a formula, and the table of a lane's numbers without a figure:

# %%
show.source(fragments.a_position)

# %% [markdown]
# A claim about all 256 elements is checked on all 256. And the way back, from an element to its holder, is the same
# arithmetic undone: the row's and the column's eights say the register, what is left of the row is $g$, what is left of
# the column is $2t + \text{half}$.

# %%
rows, columns = fragments.a_position(*fragments.slots("a"))
assert torch.equal(a.long(), tile[rows, columns])
for row in range(16):
    for column in range(16):
        lane = 4 * (row % 8) + column % 8 // 2
        register, half = row // 8 + 2 * (column // 8), column % 2
        assert a[lane, register, half] == tile[row, column]
print("256 elements: the formula, and its inverse, agree with the run")

# %% [markdown]
# ## 4 · The B fragment, and what `.row.col` means
#
# B is 16 × 8, two registers. The manual: `b0` holds rows $2t$ and $2t + 1$ of column $g$; `b1` the same, 8 rows further
# down. A register of A pairs two neighbours of a *row*; a register of B pairs two neighbours of a *column*. That is the
# `.row.col` in the name: both operands are paired along K, the dimension that is summed over. The instruction knows no
# other variant.
#
# Where does attention's B come from? In $S = Q K^\mathsf{T}$, B is $K^\mathsf{T}$, so
#
# $$B[k][n] = K[n][k]:$$
#
# two neighbours of a column of B are two neighbours of a *row of K*, which is how K lies in memory. `ldmatrix` hands
# out neighbours of rows. So K needs no transposition at all: load 8 keys × 16 dimensions as two tiles, and `b0 b1` are
# there.

# %%
K_tile = torch.arange(128).reshape(8, 16)  # 8 keys, 16 dimensions
b_of_K = look(K_tile, first_row=LANE % 8, first_column=LANE // 8 % 2 * 8, count=2)
rows, columns = fragments.b_position(*fragments.slots("b"))
assert torch.equal(b_of_K.long(), K_tile.T[rows, columns])
print("ldmatrix.x2 on the rows of K gives the B fragment of K^T")

# %% [markdown]
# In $O = P V$ it is different. B is V itself, $B[k][n] = V[k][n]$, and the two halves of a register are two neighbours
# of a *column* of V: two keys, one below the other, a row apart in memory. For this `ldmatrix` has `.trans`: each 8 × 8
# tile is transposed on its way to the registers, at no cost. Addresses as before, of rows: 16 keys, two tiles on top of
# each other.

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
fragments.draw(axes[0], b_of_V, (16, 8), "b", outlined=[5], fontsize=6.5)
fragments.draw(axes[1], plain, (16, 8), "b", outlined=[5], fontsize=6.5)
axes[0].set(title="V, loaded with .trans: the B fragment", xlabel="column (dimension)", ylabel="row (key)")
axes[1].set(title="without: each 8 × 8 tile transposed", xlabel="column (dimension)")
plt.show()

# %% [markdown]
# *Who gets which element of V's 16 × 8 tile. Left: a register is two keys of one dimension, as B wants. Right: two
# dimensions of one key. Lane 5 is framed in both.*
#
# A good question to pause at: is there no way to do without `.trans`, by giving other addresses? No. An address names a
# whole row of 16 bytes, and the two halves of a register always come from one row, unless the tile is transposed in
# flight. (Storing $V^\mathsf{T}$ in shared memory would do, at the price of 16-bit stores.)

# %% [markdown]
# ## 5 · The C fragment, and one product by hand
#
# C cannot be loaded with `ldmatrix`, it is float32. But we can let the tensor core tell: with A the identity and B the
# matrix of indices, $D = B$, and what a lane finds in its four registers are the indices of the elements it holds. The
# kernel takes the fragments as they are and multiplies:

# %%
part("p7_one_mma", "one MMA")

# %% [markdown]
# `fragments.fragment(matrix, "a")` picks each lane's elements by the formula, `fragments.matrix(held, "c")` puts them
# back. The wrapper below launches one warp for one instruction.

# %%
def mma(a, b, c=None, module=one_mma):
    """D = A B + C: fragments a [32, 4, 2], b [32, 2, 2], c [32, 4] (zeros, if None) -> d [32, 4]."""
    d = (torch.zeros(32, 4) if c is None else c.clone()).to(DEVICE)
    module.mma(a.to(DEVICE), b.to(DEVICE), d)
    return d.cpu()


indices = torch.arange(128).reshape(16, 8).half()  # whole numbers up to 2048 are exact in fp16
c = mma(fragments.fragment(torch.eye(16).half(), "a"), fragments.fragment(indices, "b"))
rows, columns = fragments.c_position(*fragments.slots("c"))
assert torch.equal(c, indices.float()[rows, columns])
print("lane 5 holds", c[5].int().tolist(), "= (1, 2) (1, 3) | (9, 2) (9, 3)")

# %% [markdown]
# `c0 c1` are columns $2t$ and $2t + 1$ of row $g$; `c2 c3` the same columns of row $g + 8$. Here are all three in one
# picture, placed as in a matrix product: a row of A against a column of B gives the element of C at their crossing.

# %%
figure, axes = plt.subplots(2, 2, figsize=(9.6, 7.6), width_ratios=[2, 1])
axes[0, 0].axis("off")
for ax, held, name, title in [(axes[0, 1], b_of_V, "b", "B, 16 × 8"), (axes[1, 0], a, "a", "A, 16 × 16"),
                              (axes[1, 1], c, "c", "C and D, 16 × 8")]:  # fmt: skip
    fragments.draw(ax, held, (16, 16 if name == "a" else 8), name, outlined=[5], fontsize=5.4)
    ax.set_aspect(0.55)
    ax.set_title(title)
plt.show()

# %% [markdown]
# *The three fragments of `mma.m16n8k16`, each from a run. Lane 5's registers are framed. It holds parts of rows 1 and 9
# of A and of C, and of column 1 of B: the elements of C that it ends up with are not the product of what it held. Lanes
# work together inside the instruction.*
#
# Now one product by hand. Small whole numbers, so that every sum is exact and "equal" means equal. Fragments are
# written with the formulas, the product is read back with them.

# %%
A, B, C = (torch.randint(-8, 9, shape) for shape in (fragments.A_SHAPE, fragments.B_SHAPE, fragments.C_SHAPE))
a, b, c = (fragments.fragment(x.half(), name) for x, name in ((A, "a"), (B, "b"), (C, "c")))
D = fragments.matrix(mma(a, b, c.float()), "c")
assert torch.equal(D, (A @ B + C).double())
print("one instruction: D = A B + C, all 128 elements equal to torch's")

# %% [markdown]
# **What a wrong fragment computes.** Give it V loaded without `.trans`. Nothing faults, nothing is NaN, and the numbers
# are of the right size. The result is not noise either: it is P times a V whose 8 × 8 tiles are transposed. A symmetric
# test matrix, or the identity, would pass.

# %%
P, V = torch.randint(0, 5, (16, 16)), torch.randint(-4, 5, (16, 8))
bits = V.half().view(torch.int16)
for trans in (1, 0):
    b = look(bits, first_row=LANE % 16, first_column=0 * LANE, count=2, trans=trans).view(torch.float16)
    O = fragments.matrix(mma(fragments.fragment(P.half(), "a"), b), "c").long()
    tiles_transposed = torch.cat([V[:8].T, V[8:].T])
    print(f"trans={trans}: equals P V: {torch.equal(O, P @ V)},  P times V's tiles transposed: {torch.equal(O, P @ tiles_transposed)}")
    assert torch.equal(O, P @ (V if trans else tiles_transposed))

# %% [markdown]
# ## 6 · Formats: what is rounded, and where
#
# A and B have 16 bits. The product of two fp16 or bf16 numbers is exact in float32, and sums are kept in float32
# registers. So what is lost is lost *before* the instruction, when inputs are rounded to 16 bits. fp16 keeps 11
# significant bits and overflows beyond 65504; bf16 keeps 8, with the range of float32. The layout is the same, so the
# same source serves both: `-DELEMENT=__nv_bfloat16`.

# %%
one_mma_bf16 = load_inline(path("p7_one_mma"), backend=BACKEND, defines={"ELEMENT": "__nv_bfloat16"})
A, B = torch.randn(16, 16), torch.randn(16, 8)
rows = []
for module, dtype in ((one_mma, torch.float16), (one_mma_bf16, torch.bfloat16)):
    D = fragments.matrix(mma(*(fragments.fragment(x.to(dtype), n) for x, n in ((A, "a"), (B, "b"))), module=module), "c")
    before = (D - A.double() @ B.double()).abs().max().item()
    after = (D - A.to(dtype).double() @ B.to(dtype).double()).abs().max().item()
    assert after < 4e-5 and before < 16 * torch.finfo(dtype).eps
    rows.append([str(dtype)[6:], f"{torch.finfo(dtype).max:.3g}", f"{before:.0e}", "yes"])
show.table(rows, ["A, B", "largest", "error against the unrounded matrices", "below 4e-5 against the rounded ones"], align="lrrl")

# %% [markdown]
# There is a variant with fp16 *accumulators* (two registers of C in place of four, and twice as fast on GeForce cards).
# Count to 3000 with it: A's first column and B's first row are ones, so each MMA adds 1. There is also a shorter shape,
# `m16n8k8`: half of the sum, so `a0 a1` and `b0` only. Two of them in a row are one `m16n8k16`; it is for a K that is
# no multiple of 16. Both fit in one small kernel. The lanes with `t == 0` are those that hold column 0 of A and row 0
# of B.

# %%
FORMATS = r"""
#include "ptx.cuh"
__global__ void count_up(float* out_gmem, int times) {          // [3, 32]
    const int lane = threadIdx.x, t = lane % 4;
    const uint32_t one = t == 0 ? pack(1.f, 0.f) : 0;           // (1, 0): a column of ones in A, a row of ones in B
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
# there are keys. All kernels of this course accumulate in float32, and comparisons with kernels that do not are not
# comparisons.

# %% [markdown]
# ## 7 · What a load costs: wavefronts
#
# Shared memory has 32 banks, each 4 bytes wide and each able to serve one word a cycle. A tile's row is 16 bytes, four
# banks. `ldmatrix` reads one 8 × 8 tile, 128 bytes, in one pass of all 32 banks, a *wavefront*, if its eight rows lie
# in eight different groups of four banks. If two rows share their banks they take turns. The emulator counts
# wavefronts; here is the same `x4` from a tile whose rows are longer and longer.

# %%
counted = load_inline(path("p7_one_mma"), check=True)  # the emulator, on every machine
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
# 512 bytes are four wavefronts at best. With rows of 128 bytes or a multiple of them, HEAD_DIM = 64 and 128, every row
# begins in bank 0: eight rows take eight turns, and one `x4` takes 32 wavefronts. The last line shows the cheap way
# out, rows with 16 bytes of padding: row $r$ begins $4r$ banks further. Phase 8 finds a way that wastes no memory. In
# this phase we only look, and pay: the kernel of section 10 loads tiles as they are.

# %% [markdown]
# ## 8 · C is A
#
# FlashAttention is two products in a row: $S = Q K^\mathsf{T}$, then $O = P V$ with $P = e^{S - m}$, element by
# element. S comes out of the tensor cores as C fragments, P has to go in as an A fragment. In phase 6 a tile travelled
# through shared memory for that. Look at the two layouts side by side: two C tiles of 8 columns are one A tile of 16.

# %%
lane, register = fragments.slots("c")
row, column = fragments.c_position(lane, register)
two_tiles = torch.cat([row * 16 + column, row * 16 + column + 8], dim=1)  # [32 lanes, c0..c3 d0..d3]
names = ["c0", "c1", "c2", "c3", "d0", "d1", "d2", "d3"]
figure, axes = plt.subplots(2, 1, figsize=(8.6, 8.8))
fragments.draw(axes[0], two_tiles, (16, 16), names, outlined=[5], hues=[0, 0, 1, 1, 2, 2, 3, 3], fontsize=5)
rows, columns = fragments.a_position(*fragments.slots("a"))
fragments.draw(axes[1], rows * 16 + columns, (16, 16), "a", outlined=[5], fontsize=6)
for ax, title in zip(axes, ("S, two C tiles: c of columns 0–7, d of 8–15", "P as the A operand"), strict=True):
    ax.set_aspect(0.5)
    ax.set_title(title)
plt.show()

# %% [markdown]
# *Above: who ends up with S. Below: who must bring P. The lanes are the same everywhere; the colours say which pairs
# become which register.*
#
# So each lane rounds its own pairs to 16 bits, packs them, and has the A fragment:
#
# $$a_0 = (c_0, c_1), \quad a_1 = (c_2, c_3), \quad a_2 = (d_0, d_1), \quad a_3 = (d_2, d_3).$$
#
# No shuffle, no shared memory, no barrier. The layouts were made for this. It holds for every lane, as an identity of
# the formulas:

# %%
for lane in range(32):
    for register, (tile_, pair) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):  # of a0 a1 a2 a3: which C tile, which pair
        for half in (0, 1):
            row, column = fragments.c_position(lane, 2 * pair + half)
            assert fragments.a_position(lane, register, half) == (row, column + 8 * tile_)
print("256 elements: C's place is A's place")

# %% [markdown]
# And on values. The kernel `c_to_a` computes $(X Y^\mathsf{T}) Z$ with two products, and nothing between them but `pack`:

# %%
part("p7_one_mma", "two products")

# %% [markdown]
# The emulator counts what it took. Three MMAs, two for the two C tiles of $X Y^\mathsf{T}$ and one for the second
# product:

# %%
X, Y, Z = (torch.randint(-3, 4, shape) for shape in ((16, 16), (16, 16), (16, 8)))
out = torch.zeros(16, 8, device=DEVICE)
one_mma.reuse(*(x.half().to(DEVICE) for x in (X, Y, Z)), out)
assert torch.equal(out.cpu().long(), X @ Y.T @ Z)
inputs = [x.half() for x in (X, Y, Z)]
counted.reuse(*inputs, torch.zeros(16, 8))
counters = counted.report.counters
assert counters["mma"] == 3 and counters["ldmatrix"] == 3 and counters["shuffles"] == 0
print(f"(X Y^T) Z equals torch's: {counters['mma']} MMAs, {counters['ldmatrix']} ldmatrix, {counters['shuffles']} shuffles")

# %% [markdown]
# What the packing costs: P is rounded to 16 bits, as every FlashAttention does, and as phase 2's `p.to(V.dtype)` did.
# The sum `l_i` is taken from the unrounded floats. Exercise 7.5 is this step, with its three classic mistakes.

# %% [markdown]
# ## 9 · A row lives in a quad
#
# The softmax needs the maximum and the sum of each row of S. Row $g$ of a C tile is in the `c0 c1` of four lanes, $4g$
# to $4g + 3$. Each lane first reduces what it holds; then the quad reduces across lanes. `__shfl_xor_sync(mask, x, d)`
# gives each lane the `x` of the lane whose number differs in the bits of $d$. With $d = 1$ lanes 0↔1 and 2↔3 exchange;
# with $d = 2$, 0↔2 and 1↔3. Two exchanges, and all four have the maximum of all four. They all *need* it, too: each
# goes on with its own columns.

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
# *Eight quads, one a row of C. Dark: the lane has its row's maximum already. No value crosses from one quad, one row of
# the figure, to another.*
#
# Two masks, 1 and 2: the two low bits of the lane number, which are $t$. Any higher bit changes $g$, and mixes rows. In
# PTX and in many kernels the masks are written as binary literals, `0b01` and `0b10`. Exercise 7.4 is about one wrong
# character in them.

# %% [markdown]
# ## 10 · The kernel
#
# `p7_naive.cu` is FlashAttention's forward pass built from exactly these pieces and as plainly as possible. A block is
# one warp. It owns 16 query rows, the M of one MMA, and walks the keys 16 at a time, so that S is two C tiles, and P is
# one A fragment. One stage, no overlap, no swizzle. It takes fp16 and bf16, HEAD_DIM 64 and 128, any lengths, causal,
# grouped heads, and it returns the log-sum-exp.

# %%
part("p7_naive", "constants")

# %% [markdown]
# **State.** Compare with phase 2: `acc` is O's tile of 16 × D, now `O_TILES` C fragments; of `m_i`
# and `l_i` a lane keeps two each, for rows $g$ and $g + 8$. The loop loads a tile of K and V, with 0 for
# rows that do not exist. Each of the two barriers prevents one hazard, which its comment names.

# %%
part("p7_naive", "state")
part("p7_naive", "load K and V")

# %% [markdown]
# **S = Q Kᵀ.** For each 16 dimensions: one `ldmatrix.x4` for the A fragment of Q (section 3's addresses), and for each
# of the two groups of 8 keys one `ldmatrix.x2` for B (section 4's). Q is loaded again for every key tile. That is
# waste, and phase 8 removes it.

# %%
part("p7_naive", "scores")

# %% [markdown]
# **The row maxima.** `r` is which of the lane's two rows, `e` which of the two columns: element `s[n][2 * r + e]` is
# row $g + 8r$, column $8n + 2t + e$, straight from section 5's formula. That makes the mask easy to write: the key's
# number is known to the lane that holds its score. Then the quad's two shuffles.

# %%
part("p7_naive", "row maxima")

# %% [markdown]
# **Correction, and P.** Phase 3's base-2 trick: `scale_log2` is the scale times $\log_2 e$, so that
# $e^{\text{scale} \cdot s}$ is one `ex2` instruction. The maximum is of the raw scores, and the scale is applied inside
# a fused multiply-add. `l_i` stays a *partial* sum, of this lane's columns only: the correction is the same in all
# four lanes of a quad, so they can be added up once, at the end.

# %%
part("p7_naive", "rescale")
part("p7_naive", "probabilities")

# %% [markdown]
# **O += P V.** Section 8's packing, and section 4's `.trans`.

# %%
part("p7_naive", "output")

# %% [markdown]
# **O and lse.** After the last tile the quad adds up its four partial sums. A row that has seen no key has the sum 0: it
# gets O = 0 and lse = $-\infty$. Each lane stores its pairs of columns, 4 bytes at a time.

# %%
part("p7_naive", "store")

# %% [markdown]
# Around all this are the lines that you know from phase 6: which rows and keys a block has, and the copy of a tile.
# Nothing in this file is new to you. Does it work? First one case against the oracle, with a length that is no
# multiple of anything:

# %%
naive = load_inline(path("p7_naive"), backend=BACKEND)
q, k, v = (torch.randn(1, 2, 100, 64).half().to(DEVICE) for _ in range(3))
for causal in (False, True):
    o, lse = naive.forward(q, k, v, causal=causal)
    want, want_lse = reference.attention(*(x.cpu() for x in (q, k, v)), causal=causal)
    error, lse_error = (o.cpu() - want).abs().max().item(), (lse.cpu() - want_lse).abs().max().item()
    assert error < 2e-3 and lse_error < 1e-4
    print(f"causal={causal!s:5}: o within 2e-3 of float64: {error < 2e-3}, lse within 1e-4: {lse_error < 1e-4}")

# %% [markdown]
# Then the checker: every nasty case it has, both dtypes, both head dimensions, causal, grouped heads, different lengths
# of Q and K. That compiles four variants of the source.

# %%
report = verify(naive.forward, causal=True, gqa=True, dtypes=(torch.float16, torch.bfloat16), head_dims=(64, 128))
print(report.verdict)

# %% [markdown]
# **And the other half of checking: kernels that are wrong.** `examine` runs a source in the emulator, with every access
# watched, and then gives it to the checker. Where only fragments can explain the numbers, it tries the known ways to
# get them wrong. Three edits of one line each:

# %%
edits = {
    "no mask for the tail": ("if (n_start + n * MMA_N", "if (p.causal && n_start + n * MMA_N"),
    "c3 packed before c2": ("pack<T>(c[2], c[3])", "pack<T>(c[3], c[2])"),
    "b0 and b1 of V exchanged": ("mma_m16n8k16<T>(acc[n], a, b[0], b[1]);", "mma_m16n8k16<T>(acc[n], a, b[1], b[0]);"),
}
rows = []
for name, (old, new) in edits.items():
    assert source("p7_naive").count(old) == 1
    try:
        examine(source("p7_naive").replace(old, new), fast=False)
        raise AssertionError(f"{name}: passed, and should not have")
    except CheckFailed as failed:
        rows.append([name, failed.diagnosis, str(failed)])
assert [row[1] for row in rows] == ["tail-not-masked", "fragment-swapped", "fragment-swapped"]
show.table(rows, ["the edit", "diagnosis", "what the learner reads"])

# %% [markdown]
# A missing barrier is another matter. On a GPU it may give the right answer for years, as the lanes of a warp often run
# in step; no comparison of numbers will find it. The check build does not look at the numbers, it looks at who touched
# what. Take out the second barrier:

# %%
text = source("p7_naive")
barrier = next(line for line in text.splitlines() if "another has not copied yet" in line)
try:
    examine(text.replace(barrier, "        // (no barrier)"))
    raise AssertionError("a race, and nobody saw it")
except CheckFailed as failed:
    assert failed.diagnosis == "race"
    print(failed)

# %% [markdown]
# ## 11 · Predict the counts
#
# For one head of N queries and keys, with $T$ the number of (16 × 16) score tiles visited, count along the source:
#
# | | a tile costs | why |
# |:--|:--|:--|
# | MMAs | $\tfrac{D}{16} \cdot 2 + \tfrac{D}{8} = \tfrac{D}{4}$ | S: two groups of keys for each 16 dimensions; O: one for each 8 columns |
# | `ldmatrix` | $\tfrac{D}{16} \cdot 3 + \tfrac{D}{8} = \tfrac{5D}{16}$ | Q once and K twice for each 16 dimensions; V for each 8 columns |
# | shuffles | 4 | two a row, two rows a lane; and 4 more a query block, for the sums |
# | barriers | 2 | |
#
# $D/4$ MMAs of 4096 operations are $1024 D = 4 \cdot 16 \cdot 16 \cdot D$: the two products of a tile, with not one
# wasted. $T$ is $(N/16)^2$, and in the causal case only the tiles on and under the diagonal.

# %%
counting = load_inline(path("p7_naive"), check=True)
N, rows = 128, []
for D in (64, 128):
    for causal in (False, True):
        counting.forward(*(torch.randn(1, 1, N, D).half() for _ in range(3)), causal=causal)
        assert counting.report.ok
        blocks = N // 16
        T = blocks * (blocks + 1) // 2 if causal else blocks**2
        expected = {"mma": T * D // 4, "ldmatrix": T * 5 * D // 16, "shuffles": 4 * T + 4 * blocks, "barriers": 2 * T}
        seen = {name: counting.report.counters[name] for name in expected}
        assert seen == expected
        rows.append([D, str(causal), *seen.values(), "yes"])
show.table(rows, ["D", "causal", "MMA", "ldmatrix", "shuffles", "barriers", "as predicted"], align="rlrrrrl")

# %% [markdown]
# **Bytes of global memory.** Q is read once. K and V are read once for each block of 16 queries. That is the formula of
# phase 2, with the smallest BLOCK_M there can be:

# %%
counting.forward(*(torch.randn(1, 1, 128, 64).half() for _ in range(3)))
counters = counting.report.counters
predicted = (N + N // 16 * 2 * N) * 64 * 2
assert counters["global_load_bytes"] == predicted
print(f"read: counted {counters['global_load_bytes']} bytes, predicted {predicted}; the three inputs are {3 * N * 64 * 2}")

# %% [markdown]
# **Bank conflicts**, by line. As section 7 promised, with rows of 128 bytes each tile of 8 rows takes 8 wavefronts
# where one would do:

# %%
lines, rows = source("p7_naive").splitlines(), []
for number, line_counters in counting.report.by_line.items():
    if line_counters["ldmatrix"]:
        wavefronts, ideal = line_counters["ldmatrix_wavefronts"], line_counters["ldmatrix_ideal"]
        rows.append([lines[number - 1].strip().split("(")[0], line_counters["ldmatrix"], wavefronts, ideal,
                    f"{wavefronts / ideal:.0f}"])
assert all(row[-1] == "8" for row in rows) and len(rows) == 3
show.table(rows, ["load", "instructions", "wavefronts", "ideal", "factor"], align="lrrrr")

# %% [markdown]
# ## 12 · How fast is it?
#
# Before the measurement, a bound. A multiprocessor does one wavefront of shared memory a cycle, and an H200's does up
# to 4096 dense fp16 operations on its tensor cores in the same cycle. The counts say how many operations the kernel
# gets for a wavefront:

# %%
flops = counters["mma_flops"]
wavefronts = counters["ldmatrix_wavefronts"] + counters["shared_store_wavefronts"]
ideal = counters["ldmatrix_ideal"] + counters["shared_store_ideal"]
peak = runtime.GPUS["H200"].fp16_tflops
for name, cycles in (("as it is", wavefronts), ("without bank conflicts", ideal)):
    share = flops / cycles / 4096
    print(f"{name}: {flops / cycles:.0f} FLOP a wavefront, so at most {share:.1%} of the tensor cores: {share * peak:.0f} TFLOP/s on an H200")

# %% [markdown]
# So this kernel can use a few per cent of the tensor cores, whatever else it does: they wait for shared memory. Where
# the course has a recorded run, here it is, beside FlashAttention-2 in the same run. On a GPU,
# `flashlab.bench.mma` measures yours.

# %% tags=["nbval-ignore-output"]
runs = [json.loads(path.read_text()) for path in sorted(RESOURCES.parent.glob("mma_*.json"))]
if not runs:
    print("none recorded yet: `python -m flashlab.bench.mma` on a GPU measures it")
for run in runs:
    rows = {}
    for row in run.get("ladder", []):
        if row["name"] in ("p7_naive", "fa2") and row["inputs"] == "randn":
            label = "B{} H{} N{} D{}".format(*row["shape"]) + (" causal" if row["causal"] else "")
            rows.setdefault(label, {})[row["name"]] = row["tflops"]
    machine = run["machine"]
    clock = (machine.get("sm_clock_mhz") or {}).get("median", "unknown")
    print(f"{machine['gpu']}, torch {machine['torch']}, {machine['date']}, SM clock {clock} MHz")
    both = [[label, x["p7_naive"], x["fa2"], x["fa2"] / x["p7_naive"]]
            for label, x in rows.items() if len(x) == 2]
    both = [[label, f"{ours:.1f}", f"{theirs:.0f}", f"{factor:.0f}"] for label, ours, theirs, factor in both]
    show.table(both, ["shape", "naive, TFLOP/s", "FlashAttention-2, TFLOP/s", "factor"], align="lrrr")

# %% [markdown]
# On the large shapes the kernel runs at about three quarters of its bound (which grows with the clock: at 1980 MHz it
# is 41 TFLOP/s). One warp alone waits most of the time, but a multiprocessor holds many such blocks (18 at D = 64,
# where a thread has 108 of its 65536 registers), and they fill each other's gaps. What they cannot fill is the queue in
# front of shared memory. On the smallest shape, 64 warps for 132
# multiprocessors, nobody fills the gaps, and a tenth of that is left.
#
# Was it really shared memory? NVIDIA's profiler, Nsight Compute, counts wavefronts too. In the same recording it looked
# at one launch with B = 2, H = 8, N = 2048, D = 64. The prediction needs no GPU: 384 wavefronts of `ldmatrix` a tile,
# of which 336 are conflicts, and 32 of stores.

# %% tags=["nbval-ignore-output"]
B, H, N, D = 2, 8, 2048, 64
T = B * H * (N // 16) ** 2
predicted = {"shared_wavefronts": (6 * D + D // 2) * T + B * H * N * D * 2 // 128, "bank_conflicts": 6 * D * T * 7 // 8}
for run in runs:
    seen = [c for c in run.get("counters") or [] if c["name"] == "p7_naive" and c["shape"] == [B, H, N, D]]
    for c in seen[:1]:
        rows = [[name, f"{value / 1e6:.2f} million", f"{c[name] / 1e6:.2f} million"]
                for name, value in predicted.items()]
        show.table(rows, ["", "predicted", f"Nsight Compute, {run['machine']['gpu']}"], align="lrr")
        print(f"busy: shared memory {c['shared_active_pct']:.0f} % of the time, tensor cores {c['tensor_active_pct']:.0f} %")

# %% [markdown]
# The conflicts agree to the fourth digit, the wavefronts within two per cent. Four fifths of all that shared memory
# does is repeating itself, and the tensor cores, for which all of this was done, work one cycle in twenty.

# %% [markdown]
# Others have been here. An earlier course published its own naive tensor-core kernel (`ldmatrix` and `mma`, one stage,
# one small tile a block) on an Ada GPU, beside unfused PyTorch and FlashAttention-2:

# %%
published = {(r["batch"], r["heads"], r["seq_len"], r["head_dim"], r["variant"]): r["ms"] for r in load("mma_stages_ada")}
shapes = [(1, 1, 1024, 64), (1, 8, 1024, 64), (4, 8, 2048, 64), (4, 8, 2048, 128)]
variants = [("mma_naive", "naive tensor-core kernel", "orange"), ("naive_unfused", "unfused PyTorch", "grey"),
            ("flash_official", "FlashAttention-2", "blue")]  # fmt: skip
tflops = {label: ([4 * b * h * n * n * d / published[b, h, n, d, name] / 1e9 for b, h, n, d in shapes], hue)
          for name, label, hue in variants}
figure, ax = plt.subplots(figsize=(8, 3.4))
curves.columns(ax, ["B{} H{} N{} D{}".format(*shape) for shape in shapes], tflops, fmt="%.2g", yscale="log",
               ylim=(0.2, 400), ylabel="TFLOP/s (higher is better)", title="Published, Ada GPU, fp16")
plt.show()

# %% [markdown]
# *Figures of another course, not measured by us; a logarithmic axis. Their naive kernel is 4 to 7 times slower than
# FlashAttention-2, and on three of these four shapes slower than PyTorch's unfused attention.*
#
# That is the lesson of this phase's last page: **the tensor cores make the multiplication cheap, and then everything
# else is the kernel.** What the compiler made of ours, where `nvcc` has been asked:

# %% tags=["nbval-ignore-output"]
if RESOURCES.exists():
    compiled = resources_table("sm_90", steps=["p7_naive"], head_dim=None, opcodes=("HMMA", "LDSM", "SHFL", "STS", "LDG", "BAR"))
    for r in (r for r in resources_recorded()["kernels"] if (r.step, r.target) == ("p7_naive", "sm_90")):
        assert r.instructions["HMMA"] == r.head_dim // 4 and r.instructions["LDSM"] == 5 * r.head_dim // 16
    display(compiled)
else:
    print("none recorded yet: `python -m flashlab.bench.resources` where there is an nvcc measures it")

# %% [markdown]
# `HMMA` is the MMA and `LDSM` is `ldmatrix` in the machine code; unrolled, the loop body holds exactly as many of them
# as section 11 counted for one tile, $D/4$ and $5D/16$. Nothing spills: registers are no problem yet.
#
# What keeps the kernel from its tensor cores, in the order in which phase 8 takes it on:
#
# 1. **Too little work a load.** 16 query rows make every K and V tile serve one A fragment. A block of 64 rows in four
#    warps copies K and V into shared memory a quarter as often.
# 2. **Waiting.** Load, barrier, compute, barrier. `cp.async` and a second stage let the copy of the next tile run under
#    the arithmetic.
# 3. **Bank conflicts**: a factor of 8 on every `ldmatrix`. The XOR swizzle makes it 1.
# 4. **The same Q fragment loaded for each tile**, half of the instructions' width unused (`x2` where `x4` would do),
#    and stores of 4 bytes.
#
# Phase 8 measures what each is worth. The counters above have already told you which one is worth the most; write your
# guess down before you go on.

# %% [markdown]
# ## Summary, and what is left to explore
#
# - With $g = \lfloor \text{lane}/4 \rfloor$, $t = \text{lane} \bmod 4$: A's registers hold row $g$ (+8), columns
#   $2t, 2t+1$ (+8); B's hold rows $2t, 2t+1$ (+8) of column $g$; C's hold columns $2t, 2t + 1$ of rows   $g$ and
#   $g + 8$. When in doubt, load indices and look.
# - `ldmatrix`: lane $8i + r$ gives the address of row $r$ of tile $i$; every lane receives two neighbours of row $g$. K
#   needs no `.trans`, V does: B's registers pair along K, and in V that is across rows.
# - Two C tiles, rounded and packed, are one A tile. FlashAttention's second product costs no data movement between lanes.
# - A row lives in a quad: shuffles with 1 and 2, never more.
# - The counts of a kernel can be predicted from its source, exactly. Here: $D/4$ MMAs and $5D/16$ `ldmatrix` a tile,
#   eight times the wavefronts that are needed.
#
# Left to explore, some of it in the exercises: let the tensor cores add up the rows (7.8: a B of ones); `m16n8k8` for a
# head dimension of 40 (7.9); exchanging the columns of A *and* the rows of B in the same way changes nothing, so the K
# index is yours to permute, and some kernels use that to load 8 bytes where a fragment wants 4. On Hopper the
# warp-level `mma.sync` reaches about two thirds of the peak; the rest belongs to `wgmma`, four warps and operands in
# shared memory.

# %% [markdown]
# ## References
#
# - NVIDIA, *Parallel Thread Execution ISA*,
#   [docs.nvidia.com/cuda/parallel-thread-execution](https://docs.nvidia.com/cuda/parallel-thread-execution/).
#   Warp-level matrix instructions: matrix fragments for `mma.m16n8k16` and `m16n8k8` with floating-point   type (the
#   figures drawn here), `ldmatrix`.
# - Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*, 2023,
#   [arXiv:2307.08691](https://arxiv.org/abs/2307.08691). Section 3: the loop order, and the division of work between
#   warps.
# - NVIDIA, *NVIDIA A100 Tensor Core GPU Architecture*, 2020, and *NVIDIA H100 Tensor Core GPU Architecture*, 2022
#   (white papers). Operations a clock and multiprocessor, and what changed from one to the other.
# - gau-nernst, *learn-cuda*, [github.com/gau-nernst/learn-cuda](https://github.com/gau-nernst/learn-cuda),
#   `07_attention`. A FlashAttention series on an RTX 5090, from a first MMA kernel to 94 % of the speed of light.
# - Vijay Thakkar and others, *CUTLASS* and its CuTe documentation,
#   [github.com/NVIDIA/cutlass](https://github.com/NVIDIA/cutlass), `media/docs/cpp/cute/0t_mma_atom.md`. The same
#   fragments as layout algebra.
# - Da Yan, Wei Wang, Xiaowen Chu, *Demystifying Tensor Cores to Optimize Half-Precision Matrix Multiply*, IPDPS 2020.
#   Fragments, shared memory and what limits a tensor-core kernel, measured.
