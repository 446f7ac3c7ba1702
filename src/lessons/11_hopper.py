# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 11 · Hopper: TMA, mbarriers and wgmma
#
# The kernel of phase 9 runs on any GPU since Ampere. On Hopper it stops at about 60 % of the tensor cores, because its
# instruction, `mma.sync`, cannot feed them faster. Hopper has another one, `wgmma`, and two machines around it: an engine
# that copies whole tiles, and barriers in shared memory that can wait for bytes.
#
# This lecture looks at each of the three alone. Then it builds FlashAttention from them, in nine steps.

# %% [markdown]
# ## What you will be able to do
#
# - Work out the phase and the parity of an mbarrier by hand, and say who waits for whom.
# - Describe a tensor to the copy engine, and say where each byte of a swizzled tile lies.
# - Write the descriptor of a tile for `wgmma`; say why neither K nor V has to be transposed.
# - Divide a kernel into a producer and consumers, and say when a stage may be filled again.
# - Read a timeline of warpgroups, and see in it what ping-pong is for.

# %% [markdown]
# ## What you need first
#
# Phase 7: fragments, and why C of the first product is A of the second. Phase 8: stages, the XOR swizzle. Phase 9: masks,
# late rescaling, the order of tiles.
#
# **No GPU is needed.** The emulator runs these instructions too, and it checks what no tool on a GPU checks: whether a
# tile is read before it has arrived, and whether it is overwritten while a product still reads it. What is *counted* comes
# from the emulator. Times come from a recorded run and name their machine.

# %%
import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.bench import hardware
from flashlab.cuda import load_inline, missing
from flashlab.figures import hopper as draw
from flashlab.figures import show
from flashlab.figures.ladder import prepare
from flashlab.kernels import path, step, steps
from flashlab.simt.build import INCLUDE

show.style()
torch.manual_seed(0)
PTX, WGMMA, MAPS = (INCLUDE / name for name in ("ptx_sm90.cuh", "wgmma.cuh", "tensor_map.cuh"))
PIECES = path("p11_pieces")
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and not missing("nvcc")
DEVICE, BACKEND = ("cuda", "nvcc") if GPU else ("cpu", "emulator")

# %% [markdown]
# ## 1 · Why another instruction
#
# A multiprocessor (SM) of an H200 is built for 2048 multiply-adds per clock on its tensor cores. One `mma.m16n8k16` is
# 2048 of them, so one per clock would be the peak. We measured how many it does, with operands that are in registers
# already:

# %%
rates = [r for run in hardware.recorded() if isinstance(run.get("rates"), list) for r in run["rates"]]
best = max(r["per_clock"] for r in rates if r["instruction"] == "mma, float32 sums")
print(f"H200: {best:.2f} mma.m16n8k16 per clock and SM; the peak is 1")
assert best < 0.7

# %% [markdown]
# So a third of the tensor cores is out of reach for phase 9, however good its kernel. The new instruction is larger, and it
# reads its operands from shared memory itself:
#
# | | `mma.sync` | `wgmma` |
# |:--|:--|:--|
# | issued by | one warp | four warps together, a **warpgroup** |
# | shape | 16 × 8 × 16 | 64 × N × 16, N from 8 to 256 |
# | A | registers | registers or shared memory |
# | B | registers | shared memory |
# | C and D | registers | registers |
# | the result is there | when the next instruction needs it | after a wait that you write |

# %% [markdown]
# The last line is what makes Hopper different. `wgmma` is **asynchronous**: the warps issue it and go on. So is the copy
# engine. Both read and write while your threads do something else. The hardware does not protect you from touching a tile
# too early. That is what barriers are for, and they come first.

# %% [markdown]
# ## 2 · An mbarrier: wait for arrivals, and for bytes
#
# `__syncthreads` is one barrier for all threads of a block. An **mbarrier** is an object in shared memory, 8 bytes. You can
# have as many as you like. Arriving and waiting are two different operations: some threads arrive, others wait.
#
# It counts two things: **arrivals** that are still missing, and **bytes** that are still under way. When both are zero, its
# *phase* is complete. Then it starts again with the next phase, by itself.

# %%
show.region(PTX, "mbarrier")

# %% [markdown]
# A wait names a **parity**, the last bit of the phase's number. `mbarrier_wait(barrier, 0)` waits until phase 0 (or 2, or
# 4 ...) is complete. Why is one bit enough? Because nobody can be two phases ahead: the next phase needs the arrivals of
# those who still wait for this one.
#
# The barrier that has just been made is in phase 0. So phase 0 is not complete, and "phase −1" counts as complete:
# a wait for parity 1 returns at once. Remember that; a producer's first wait uses it.

# %% [markdown]
# Look at one. A single thread does the operations of a list, and after each it asks: is the phase of parity 0 complete?
# Of parity 1? The barrier wants two arrivals per phase.

# %%
show.region(PIECES, "an mbarrier")

# %%
pieces = load_inline(PIECES, backend=BACKEND)
ARRIVE, ARRIVE_EXPECT_TX, BULK_LOAD, WAIT = range(4)


def watch(*script, arrivals):
    """What test_wait says of parity 0 and of parity 1 after each operation of the script."""
    operations = torch.tensor(script, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros_like(operations)
    pieces.mbarrier(operations, seen, torch.zeros(512, dtype=torch.half, device=DEVICE), len(script), arrivals)
    return seen.cpu().bool().tolist()


seen = watch((ARRIVE, 0), (ARRIVE, 0), (ARRIVE, 0), (ARRIVE, 0), arrivals=2)
names = [f"arrival {i + 1}" for i in range(4)]
show.table([[name, *row] for name, row in zip(names, seen)], ["after", "parity 0 complete", "parity 1 complete"])
assert seen == [[False, True], [True, False], [True, False], [False, True]]

# %% [markdown]
# Two arrivals complete phase 0: parity 0 turns true, parity 1 turns false. Two more complete phase 1, and everything is as
# in the beginning. (A thread that waited for phase 0 and only looks now would wait for ever. That is the mistake of exercise
# 11.1.)
#
# Now bytes. `mbarrier_arrive_expect_tx(barrier, n)` arrives *and* adds n bytes to what the phase has to wait for. The copy
# engine takes off what it has delivered.

# %%
seen = watch((ARRIVE_EXPECT_TX, 512), (BULK_LOAD, 512), (WAIT, 0), arrivals=1)
names = ["one arrival, 512 bytes expected", "", "a copy of 512 bytes, and a wait for it"]
rows = [[names[i], *seen[i]] for i in (0, 2)]
show.table(rows, ["after", "parity 0 complete", "parity 1 complete"])
assert rows[0][1:] == [False, True] and rows[1][1:] == [True, False]

# %% [markdown]
# The only arrival was there after the first line, but the phase was not complete: bytes were missing. After the wait
# they are there. (In between a GPU may say either: the copy takes as long as it takes.)
#
# What if the numbers do not add up? On a GPU the kernel hangs. The emulator says why:

# %%
checked = load_inline(PIECES, check=True)  # the emulator, on every machine
script = torch.tensor([(ARRIVE_EXPECT_TX, 1024), (BULK_LOAD, 512), (WAIT, 0)], dtype=torch.int32)
try:
    checked.mbarrier(script, torch.zeros_like(script), torch.zeros(512, dtype=torch.half), 3, 1)
except Exception as error:
    print(error)

# %% [markdown]
# ## 3 · TMA: one thread copies a tile
#
# In phase 8 every thread computed addresses and issued its share of `cp.async`. On Hopper one thread says: *bring me the
# box at column c, row r*. The **tensor memory accelerator** (TMA) computes all addresses. It fills with zeros what lies
# outside, and it can swizzle.
#
# For that it must know the tensor. The host describes it once, in a `CUtensorMap` of 128 bytes:

# %%
show.region(PIECES, "a tensor map")

# %% [markdown]
# Sizes and box are given from the innermost dimension outwards. The innermost stride is not given: its elements are
# neighbours. The other strides are in bytes, and multiples of 16.
#
# The kernel receives the map as a parameter marked `const __grid_constant__`, so that it has an address. One thread asks,
# all threads wait:

# %%
show.region(PIECES, "a TMA load")

# %% [markdown]
# A matrix [16, 64] whose numbers say where they come from: the row, and the chunk of 16 bytes. First without swizzle, a box
# of 8 rows beginning at row 4:

# %%
matrix = (torch.arange(16)[:, None] * 8 + torch.arange(64) // 8).to(torch.int16)  # 8 row + chunk


def tile(swizzle, column=0, row=0, box=(8, 64)):
    """Shared memory after one TMA load of `box` rows and columns, as it lies: [rows of 128 bytes, 8 chunks]."""
    out = torch.full((box[0] * box[1],), -1, dtype=torch.int16, device=DEVICE)
    pieces.tma(matrix.to(DEVICE), out, *matrix.shape, *box, swizzle, column, row)
    return out.cpu().reshape(-1, 8, 8)[:, :, 0]


NONE, B32, B64, B128 = range(4)  # the values of CUtensorMapSwizzle
plain = tile(NONE, row=4)
assert torch.equal(plain, matrix[4:12, ::8])
print("row 0 of the box holds chunks", plain[0].tolist(), "of the matrix")

# %% [markdown]
# Boxes may stick out. Half of this one lies above the matrix, and becomes zeros. So a kernel needs no special case for the
# last rows of a tensor (only its mask, as $e^0$ is not 0).

# %%
above = tile(NONE, row=-4)
assert (above[:4] == 0).all() and torch.equal(above[4:], matrix[:4, ::8])
print("rows -4 to -1:", above[:4].unique().tolist(), " rows 0 to 3: as in the matrix")

# %% [markdown]
# Now with the swizzle of 128 bytes. It is the XOR of phase 8, done by the engine: chunk $c$ of row $r$ goes to place
# $c \oplus (r \bmod 8)$.

# %%
swizzled = tile(B128)
rows, chunks = torch.arange(8)[:, None], torch.arange(8)
assert torch.equal(swizzled, matrix[:8, ::8].gather(1, chunks ^ rows))
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for ax, held, title in ((axes[0], tile(NONE), "no swizzle"), (axes[1], swizzled, "128-byte swizzle")):
    draw.chunks(ax, held, title)
plt.show()

# %% [markdown]
# *Shared memory as it lies: a line is 128 bytes, a box is a chunk of 16. The number is the chunk's column in the matrix, the
# colour too. Right: each column of the picture shows all eight colours, so eight rows of one chunk lie in eight different
# groups of banks.*
#
# There are three such patterns. A row of the box must fit into the pattern: 128, 64 or 32 bytes. The XOR is taken from
# **address bits**, not from row numbers:
#
# | swizzle | chunk bits that change | with |
# |:--|:--|:--|
# | 128 bytes | 4, 5, 6 | bits 7, 8, 9 |
# | 64 bytes | 4, 5 | bits 7, 8 |
# | 32 bytes | 4 | bit 7 |
#
# So a tile must begin at a multiple of 1024 bytes, or row 0 of the tile is not row 0 of the pattern.

# %%
for mode, span, bits in ((B128, 128, 7), (B64, 64, 3), (B32, 32, 1)):
    got = tile(mode, box=(8, span // 2)).reshape(-1)
    for place in range(len(got)):
        source = place ^ place // 8 & bits  # chunk number: bits 4.. of the address; line number: bits 7..
        assert got[place] == matrix[source // (span // 16), source % (span // 16) * 8]
print("three patterns: every chunk is where the XOR of address bits puts it")

# %% [markdown]
# **Who checks that a tile has arrived?** On a GPU, nobody. Here is the kernel without its wait. The emulator delivers the
# bytes at the last moment that is allowed, so the mistake shows every time; and its check build names it.

# %%
source = PIECES.read_text()
broken = source.replace("    mbarrier_wait(barrier, 0);                                 // or the tile would", "    // or the tile would")
assert broken != source
no_wait = load_inline(broken, check=True)
no_wait.tma(matrix, torch.zeros(8 * 64, dtype=torch.int16), 16, 64, 8, 64, B128, 0, 0, echo=False)
print(no_wait.report.findings[0].message)
assert no_wait.report.findings[0].kind == "read-before-wait"

# %% [markdown]
# ## 4 · wgmma: 64 rows, four warps, operands in shared memory
#
# `wgmma.mma_async.m64nNk16` multiplies a tile of A, 64 × 16, by one of B, 16 × N. Four warps issue it together.
# Its functions:

# %%
show.region(WGMMA, "wgmma order", "wgmma")

# %% [markdown]
# `wgmma_ss` has both operands in **s**hared memory, `wgmma_rs` has A in **r**egisters. Around them are three more lines:
#
# - `wgmma_fence()` before the first: the registers that it uses may have been written by ordinary instructions;
# - `wgmma_commit()` closes a group, as with `cp.async`;
# - `wgmma_wait<N>()` waits until at most N groups, the latest, are under way. Before that nobody touches the result.
#
# An operand in shared memory is named by a **descriptor**, 64 bits: where the tile begins, how it is swizzled, and two
# distances.

# %%
show.region(WGMMA, "descriptor")

# %% [markdown]
# ### What the two distances mean
#
# The unit of a 128-byte swizzle is the **atom**: 8 rows of 128 bytes, 1024 bytes. An operand is made of atoms. In which
# direction does a row of the atom run? There are two cases.
#
# **K-major**: a row of the atom runs along K, the dimension that is summed over. That is how Q and K lie in memory: a row
# is one query or key, its elements are the dimensions. The next 8 rows are one atom further: *stride* 1024. A step of 16
# along K is 32 bytes *inside* the row.
#
# **MN-major**: a row of the atom runs along M or N. That is how V lies: B of the second product has k = keys, n =
# dimensions, and a row of V is one key. The next 8 keys are one atom further: *stride* 1024. If N is more than 64, the next
# 64 columns are another tile: *leading* distance.

# %%
show.region(PIECES, "descriptors", "a product")

# %% [markdown]
# Where do the results lie? As in phase 7, we let it tell us. A is the identity, B the matrix of indices.

# %%
def product(A, B, b_as_it_is, module=pieces):
    """wgmma's D = A B, [64, 64], as the threads hold it: [128 threads, 32 registers]. B is given as the kernel wants it."""
    d = torch.zeros(128, 32, device=DEVICE)
    module.wgmma(A.half().to(DEVICE), B.half().contiguous().to(DEVICE), d, b_as_it_is)
    return d.cpu()


low, high = torch.arange(64).expand(64, 64), torch.arange(64)[:, None].expand(64, 64)
column, row = product(torch.eye(64), low, 1).int(), product(torch.eye(64), high, 1).int()
for thread in (0, 5, 37):
    print(f"thread {thread:2d}:", [tuple(x) for x in torch.stack([row[thread, :6], column[thread, :6]], 1).tolist()])

# %% [markdown]
# Compare with phase 7. Lane 5 of an `mma` held columns 2, 3 of rows 1 and 9. Thread 5 holds the same, then the same eight
# columns further, and so on. Warp $w$ has rows $16w$ to $16w + 15$. So D is a row of C fragments:

# %%
thread, register = torch.meshgrid(torch.arange(128), torch.arange(32), indexing="ij")
warp, g, t = thread // 32, thread % 32 // 4, thread % 4
assert torch.equal(row, 16 * warp + g + 8 * (register // 2 % 2))
assert torch.equal(column, 8 * (register // 4) + 2 * t + register % 2)
print("4096 elements: four warps of 16 rows, each with 8 C fragments of mma.m16n8k16 side by side")

# %% [markdown]
# **K is not transposed, and V is not either.** Both kinds of B, on the same numbers. Small whole numbers, so that "equal"
# means equal:

# %%
A, B = (torch.randint(-4, 5, (64, 64)).float() for _ in range(2))
where = row.long(), column.long()
for as_it_is, given, name in ((0, B.T, "K-major: rows are columns of B, as those of K"), (1, B, "MN-major: rows are rows of B, as those of V")):
    assert torch.equal(product(A, given, as_it_is), (A @ B)[where])
    print(f"{name}: equal to torch's A B")

# %% [markdown]
# In phase 7 V needed `ldmatrix.trans`. Here one bit of the instruction says that B is MN-major, and the tensor cores
# read it that way. (For 16-bit numbers only. FP8 has no such bit.)
#
# **What a wrong descriptor computes.** Nothing faults; the tensor cores read what the numbers say. With the stride of 8 rows
# one too small, for example, A's rows 8 to 15 are read from the wrong place:

# %%
wrong = load_inline(source.replace("SWIZZLE_128, 16, ATOM_BYTES)", "SWIZZLE_128, 16, ATOM_BYTES / 2)"), backend=BACKEND)
differs = (product(A, B.T, 0, wrong) != (A @ B)[where])
print(f"{differs.float().mean():.0%} of the elements differ, none is NaN")

# %% [markdown]
# ## 5 · P stays in registers
#
# $O = P V$ has P as its A operand. P comes from the first product, so it is in registers, as C fragments. `wgmma_rs` wants
# A in registers: four of them per thread for 64 × 16, in the layout of phase 7's A fragment, 16 rows per warp. So the
# identity of phase 7 holds again: *C is A*.

# %%
show.region(PIECES, "pack P")

# %%
X, Y, Z = (torch.randint(-2, 3, (64, 64)).float() for _ in range(3))
out = torch.zeros(128, 32, device=DEVICE)
pieces.reuse(*(x.half().to(DEVICE) for x in (X, Y, Z)), out)
assert torch.equal(out.cpu(), ((X @ Y.T) @ Z)[where])
print("(X Y^T) Z: two products, P never left the registers")

# %% [markdown]
# Two rules come with it. Before the second product stands a `wgmma_fence`, since `p` was written by ordinary instructions.
# And until the wait `p` must not change: the product reads it while it runs.
#
# ## 6 · Two proxies
#
# Ordinary loads and stores go one way to shared memory; TMA and wgmma go another. The manual calls the ways **proxies**,
# the *generic* and the *async* one. A barrier orders accesses of one proxy. It does not make an ordinary store visible to
# the async proxy. For that there is `fence_proxy_async()`: by the thread that stored, after the store, before the barrier.

# %% [markdown]
# Where does a forward pass need it? TMA loads and wgmma are both async: no fence. But O goes out through shared memory: the
# warps store it there, then TMA brings it to global memory. Between the two stands the fence. Without it the kernel is right
# nearly always. The emulator finds it anyway (exercise 11.6).

# %% [markdown]
# ## 7 · The ladder
#
# Twelve steps, each a whole file with one new idea, from phase 8's loop to a kernel that is made for Hopper. Every step runs
# in the emulator's check build, is compared with the oracle, and is counted: one head, $N = 384$, $D = 64$.

# %%
NAMES = [s.name for s in steps(11)]
prepare(NAMES)
TABLE = []


def grow(name):
    """Adds a step's counts to the table, and shows them under those of the step before."""
    TABLE.append(draw.row(name))
    show.table(TABLE[-2:], draw.COLUMNS)


grow("p9_flash")

# %% [markdown]
# - **KB by TMA** is what the copy engine brought to shared memory; *copies* are the instructions with which threads do so
#   themselves.
# - **wavefronts** are passes through shared memory that warps ask for. What `wgmma` reads is its own business; it is given
#   in KB.
# - **waits** counts waits at mbarriers, once per warp; *barriers* those of the whole block.
#
# ### Step 1: tiles by TMA
#
# The loop is phase 8's, the products are `mma.sync`. Only the copies change. A tile of 128 columns is wider than a swizzle
# can be, so tiles are cut into **slabs** of 64 columns, 128 bytes, one beside the other.

# %%
show.region(step("p11_1_tma"), "swizzle", "copy a tile", "first copies", "load K and V")
grow("p11_1_tma")

# %% [markdown]
# One thread asks, in one line per slab. Look at the head of the loop. The barrier `full_k` is waited for by all: it says
# that the bytes are there. The `__syncthreads` is still needed: it says that nobody reads tile $j + 1$ any more, whose
# stage the next copy fills. That is the second half of every pipeline, and it will get mbarriers of its own in step 4.
#
# The tensor maps are made by the launcher. A tensor has four dimensions: so rows that do not exist are recognised *per
# head*, and the engine does not run on into the next one.

# %%
show.region(step("p11_1_tma"), "tensor maps")

# %% [markdown]
# ### Step 2: S by wgmma
#
# Q's fragments, K's `ldmatrix` and 8 `mma` per key tile and k step are gone. One `wgmma` multiplies 64 rows of Q by 64 keys.

# %%
show.diff(step("p11_1_tma"), step("p11_2_wgmma"), "operands", "operands of the scores", "scores", context=0)
grow("p11_2_wgmma")

# %% [markdown]
# `columns_on(k)` is what is added to a descriptor for the next 16 columns: 32 bytes inside the row, and in the next slab
# after four of them.
#
# ### Step 3: O by wgmma, P from registers, V as it lies
#
# Section 5, in the kernel. No `ldmatrix` is left.

# %%
show.diff(step("p11_2_wgmma"), step("p11_3_operands"), "operands", "output", context=0)
grow("p11_3_operands")
assert TABLE[-1][draw.COLUMNS.index("ldmatrix")] == 0

# %% [markdown]
# So far the kernel waits for everything it starts: a copy, a product, the next product. The tensor cores work, then the
# warps compute exponentials, then the tensor cores work again. All further steps are about one question: **who has
# something to do while the others wait?**
#
# ### Step 4: a producer
#
# A fifth warp does nothing but ask for tiles. It runs ahead of the consumers until both stages are full. Each stage has two
# barriers. At `full` the consumers wait for the bytes. At `empty` the producer waits until the consumers are through.

# %%
show.diff(step("p11_3_operands"), step("p11_4_producer"), "barriers", "producer", "scores", context=0)
grow("p11_4_producer")

# %% [markdown]
# *Predict:* in its first round the producer waits at `empty` for parity 1. Nobody has arrived there yet. Why does it not hang?
#
# <details><summary>Answer</summary>
#
# The barrier is in phase 0, so "phase −1", of parity 1, counts as complete (section 2). The first use of each stage passes
# at once. For the second use the parity is 0, and the producer waits for the consumers' first arrival.
#
# </details>

# %% [markdown]
# ### Step 5: several consumers, and registers that move
#
# A block gets two consumer warpgroups (three for $D = 64$), each with 64 rows of its own. All of them use the same tiles of K
# and V, so a tile is copied half as often. And while one computes exponentials, the tensor cores can work for another.
#
# A warpgroup's accumulators need registers: 64 × 128 of S are 64 per thread, O as many, P half. A block of 384 threads
# gets 65536 / 384 = 168 per thread. The producer needs hardly any. With `setmaxnreg` it gives them away: 24 for it, 240 for
# each consumer.

# %%
show.diff(step("p11_4_producer"), step("p11_5_consumers"), "constants", "producer", context=0)
grow("p11_5_consumers")
assert 128 * (24 + 2 * 240) <= 65536 and 128 * (32 + 3 * 160) <= 65536

# %% [markdown]
# ### Step 6: two products in flight
#
# A consumer issues S of tile $j$, then O += P V of the tile *before*, and waits for S alone: `wgmma_wait<1>`. While it
# computes exponentials, the tensor cores are busy with the other product.

# %%
show.diff(step("p11_5_consumers"), step("p11_6_overlap"), "output", "scores", "rescale O", context=0)
grow("p11_6_overlap")

# %% [markdown]
# The price: O lags one tile behind, so the correction is applied when that product is there. And P, S and O are all alive at
# the same time.
#
# ### Step 7: ping-pong
#
# Left alone, the consumers may fall into step: all issue products, then all compute exponentials, and the tensor cores idle.
# So they take turns. A consumer waits for its turn before it issues, and passes it on before it waits for results. Two
# **named barriers** do it: `sync` waits and counts, `arrive` only counts.

# %%
show.diff(step("p11_6_overlap"), step("p11_7_ping_pong"), "turns", context=0)
grow("p11_7_ping_pong")

# %% [markdown]
# Barrier `1 + c` is consumer $c$'s turn. 256 threads meet there: the 128 of consumer $c$, who wait, and the 128 of the one
# before it, who only arrive. At the very end one turn is left over, and consumer 0 takes it: a barrier that somebody has
# arrived at must not be left behind.
#
# ### Step 8: blocks that stay
#
# So far each block begins with barriers and tensor maps, and ends with a store, while the tensor cores wait. Now one block
# per SM stays, and takes **part** after part of the work: 128 or 192 rows of one head. The producer runs on into the next
# part while the consumers finish this one. Causal parts are unequal, so those with the most keys go first (phase 9).

# %%
show.diff(step("p11_7_ping_pong"), step("p11_8_persistent"), "which rows", "producer", context=0)
grow("p11_8_persistent")

# %% [markdown]
# Note what "the n-th use of a stage" has become: `nth` counts tiles over *all* parts. Both sides must count the same way, or
# their parities part company (exercise 11.2).
#
# ### Step 9: whoever is free takes the next part
#
# A fixed share of the parts is the fastest only if all parts take equally long. Now a counter in global memory says which
# part is next. The producer asks, and tells the consumers through shared memory: two more barriers per slot.

# %%
show.diff(step("p11_8_persistent"), step("p11_9_scheduler"), "producer", "main loop", context=0)
grow("p11_9_scheduler")

# %% [markdown]
# ### Step 10: O leaves by TMA
#
# A lane holds pairs of columns of O. `stmatrix`, the way back of `ldmatrix`, puts them into shared memory in the swizzled
# order. Then one thread has the copy engine store the consumer's 64 rows. Nobody waits until the buffer is needed again.
#
# This is the place of section 6: ordinary stores, then the async proxy. Find the fence.

# %%
show.diff(step("p11_9_scheduler"), step("p11_10_epilogue"), "store", context=0)
grow("p11_10_epilogue")

# %% [markdown]
# ### Steps 11 and 12: fewer multiplications, fewer exponentials
#
# Step 11 is phase 9's: O is rescaled only when a maximum has moved by more than $2^8$. FlashAttention-4 does it too.
#
# Step 12 is another idea of FlashAttention-4. An SM computes 16 exponentials per clock. At $D = 64$ that takes as long as
# both products together. Multiply-adds are eight times as fast. So some of the exponentials are computed by a polynomial:
# $2^x = 2^n \cdot 2^f$, where $n$ is the nearest integer and $|f| \le 1/2$.

# %%
show.diff(step("p11_10_epilogue"), step("p11_11_rescale"), "rescale", context=0)
show.region(step("p11_12_polynomial"), "exponential", whole_file=False)

# %% [markdown]
# How good is the polynomial? The same steps in torch, against float64:

# %%
x = torch.linspace(-20, 0, 200001)
n = torch.round(x)
f = x - n
coefficients = (0.0550089516, 0.242211014, 0.693282902, 1.0)
value = torch.zeros_like(f)
for c in coefficients:
    value = value * f + c
error = (value * 2**n / torch.exp2(x.double()) - 1).abs().max().item()
print(f"largest relative error {error:.1e}; a rounding to fp16 errs by up to {2**-11:.1e}, to bf16 by {2**-8:.1e}")
assert error < 2**-11

# %% [markdown]
# Whether steps 9, 11 and 12 pay is for the clock to say. They change no count of the table:

# %%
grow("p11_11_rescale")
grow("p11_12_polynomial")

# %% [markdown]
# ### The last step: every shape
#
# `p11_flash` is the same kernel with tiles for every shape. Where parts would be too few to fill the GPU, blocks have one
# consumer. With $D = 256$ a tile of keys is 80 rows, and O takes the place of Q.

# %%
show.diff(step("p11_12_polynomial"), step("p11_flash"), "constants", "launch", context=0)
grow("p11_flash")
