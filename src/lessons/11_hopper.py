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
# The kernel of phase 9 runs on any GPU since Ampere. On Hopper a third of the tensor cores' speed is out of its reach, because
# its instruction, `mma.sync`, cannot feed them faster. Hopper has another one, `wgmma`, and two machines around it: an engine
# that copies whole tiles, and barriers in shared memory that can wait for bytes.
#
# This lecture looks at each of the three alone. Then it builds FlashAttention from them, in seventeen steps.

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
# **No GPU is needed.** The emulator runs these instructions too, and it checks what is hard to check on a GPU: whether a
# tile is read before it has arrived, and whether it is overwritten while a product still reads it. What is *counted* comes
# from the emulator. Times come from a recorded run and name their machine.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab.bench import hardware, hopper_results
from flashlab.bench.hopper_jobs import PLANTED
from flashlab.check import verify
from flashlab.check.zoo.hopper import MUTANTS
from flashlab.cuda import load_inline, missing
from flashlab.figures import hopper as draw
from flashlab.figures import show
from flashlab.figures.ladder import prepare
from flashlab.figures.panels import panels
from flashlab.kernels import path, step, steps
from flashlab.simt import SimtError

show.style()
torch.manual_seed(0)
PTX, WGMMA, MAPS = (path(name) for name in ("ptx_sm90.cuh", "wgmma.cuh", "tensor_map.cuh"))
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
# The last line of the table is what makes Hopper different. `wgmma` is **asynchronous**: the warps issue it and go on. So is the copy
# engine. Both read and write while your threads do something else. The hardware does not protect you from touching a tile
# too early. That is what barriers are for, and they come first.

# %% [markdown]
# ## 2 · An mbarrier: wait for arrivals, and for bytes
#
# `__syncthreads` is one barrier for all threads of a block. An **mbarrier** is an object in shared memory, 8 bytes. You can
# have as many as you like. Arriving and waiting are two different operations: some threads arrive, others wait.
#
# It counts two things: **arrivals** that are still missing, and **bytes** that are still under way. When both are zero, its
# *phase* is complete. Then it begins the next phase by itself, with all its arrivals missing again.

# %%
show.region(PTX, "mbarrier")

# %% [markdown]
# A wait names a **parity**, the last bit of the phase's number. `mbarrier_wait(barrier, 0)` waits until phase 0 (or 2, or
# 4 ...) is complete. One bit is enough as long as nobody falls two phases behind, and in a right kernel nobody does: the
# next phase needs an arrival of the one who still waits, or of somebody who waits for that one. (A consumer waits for a tile's bytes.
# The stage is filled again only when this consumer has said that it is through: after its wait.)
#
# %% [markdown]
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
    """What test_wait says of parities 0 and 1 after each operation (but a copy) of the script."""
    operations = torch.tensor(script, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros_like(operations)
    source = torch.zeros(512, dtype=torch.half, device=DEVICE)
    pieces.mbarrier(operations, seen, source, len(script), arrivals)
    return seen.cpu().bool().tolist()


seen = watch((ARRIVE, 0), (ARRIVE, 0), (ARRIVE, 0), (ARRIVE, 0), arrivals=2)
names = [f"arrival {i + 1}" for i in range(4)]
rows = [[name, *row] for name, row in zip(names, seen)]
show.table(rows, ["after", "parity 0 complete", "parity 1 complete"])
assert seen == [[False, True], [True, False], [True, False], [False, True]]

# %% [markdown]
# Two arrivals complete phase 0: parity 0 turns true, parity 1 turns false. Two more complete phase 1, and everything is as
# in the beginning. (A thread that wanted to wait for phase 0 and only looks now waits for phase 2. If nobody arrives any
# more, it waits for ever. In exercise 11.1 you follow the parities.)

# %% [markdown]
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
# they are there. (In between nobody looks: a GPU might say either, since a copy takes as long as it takes.)
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
# all threads wait. `fence_mbarrier_init()` stands after the barriers have been made: without it the copy engine, which is
# to count bytes at them, might not see them yet. (`__syncthreads` tells the other threads, not the engine.)

# %%
show.region(PIECES, "a TMA load")

# %% [markdown]
# A matrix [16, 64] whose numbers say where they come from: the row, and the chunk of 16 bytes. First without swizzle, a box
# of 8 rows beginning at row 4:

# %%
matrix = (torch.arange(16)[:, None] * 8 + torch.arange(64) // 8).to(torch.int16)  # 8 * row + chunk


def tile(swizzle, column=0, row=0, box=(8, 64)):
    """Shared memory after one TMA load of a box, as it lies: [lines of 128 bytes, 8 chunks]."""
    out = torch.full((box[0] * box[1],), -1, dtype=torch.int16, device=DEVICE)
    pieces.tma(matrix.to(DEVICE), out, *matrix.shape, *box, swizzle, column, row)
    return out.cpu().reshape(-1, 8, 8)[:, :, 0]


NONE, B32, B64, B128 = range(4)  # the values of CUtensorMapSwizzle
plain = tile(NONE, row=4)
assert torch.equal(plain, matrix[4:12, ::8])
print("row 0 of the box holds chunks", plain[0].tolist(), "of the matrix")

# %% [markdown]
# Boxes may stick out. Half of this one lies above the matrix, and becomes zeros. So a kernel needs no special case for the
# last rows of a tensor. The zeros count: always announce the bytes of the whole box. (The mask is needed all the same: a row of
# zeros in K has score 0, and $e^0 = 1$ would be added.)

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
# *Shared memory as it lies: a line is 128 bytes, a box is a chunk of 16. It says the row and the chunk of the matrix; the
# colour is the chunk's. Right: each column of the picture shows all eight colours. So the same chunk of eight rows lies in
# eight different groups of banks, and can be read at once.*

# %% [markdown]
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
# bytes at the last moment that is allowed, so the mistake shows every time; and its watched build names it.

# %%
def without(text, line):
    """The text with a line of code made a comment: the only one that contains it and the words after it."""
    code, words = line.split(" ... ")
    (found,) = [x for x in text.split("\n") if code in x and words in x]
    return text.replace(found, "    // " + found)

source = PIECES.read_text()
broken = without(source, "mbarrier_wait(barrier, 0); ... or the tile would")
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
# - `wgmma_fence()` before the first: what ordinary instructions wrote to the accumulators and to A's registers is seen by it;
# - `wgmma_commit()` closes a group, as with `cp.async`;
# - `wgmma_wait<N>()` waits until at most N groups, the latest, are under way. Before that nobody touches the
#   result, nor A's registers, nor the tiles.
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

# %% [markdown]
# (K is the dimension that is summed over here, as in $M \times N \times K$, and also the name of the keys' matrix.) **K-major**: a row of the atom runs
# along the summed dimension. That is how the matrices Q and K lie in memory: a row is one query or key, its elements are the dimensions. The next 8 rows are one atom further: *stride* 1024. A step of 16
# along K is 32 bytes *inside* the row. (The XOR is taken from the address that comes out, so it stays right.)
#
# With the 64-byte swizzle a row has 64 bytes, and so 8 rows have 512: *stride* 512.

# %% [markdown]
# **MN-major**: a row of the atom runs along M or N. That is how V lies: B of the second product has k = keys, n =
# dimensions, and a row of V is one key. The next 8 keys are one atom further: *stride* 1024. If N is more than 64, the next
# 64 columns are another tile: *leading* distance. A step of 16 along K is 16 keys, so 16 rows of 128 bytes, two atoms:
# 2048 bytes.

# %%
show.region(PIECES, "descriptors", "a product")

# %% [markdown]
# Where do the results lie? As in phase 7, we let it tell us. A is the identity, B the matrix of indices.

# %%
def product(A, B, b_as_it_is, module=pieces):
    """wgmma's D = A B, [64, 64], as the threads hold it: [128 threads, 32 registers]."""
    d = torch.zeros(128, 32, device=DEVICE)
    module.wgmma(A.half().to(DEVICE), B.half().contiguous().to(DEVICE), d, b_as_it_is)
    return d.cpu()


low, high = torch.arange(64).expand(64, 64), torch.arange(64)[:, None].expand(64, 64)
column, row = product(torch.eye(64), low, 1).int(), product(torch.eye(64), high, 1).int()
for thread in (0, 5, 37):
    places = torch.stack([row[thread, :6], column[thread, :6]], 1).tolist()
    print(f"thread {thread:2d}:", [tuple(place) for place in places])

# %% [markdown]
# Each pair is (row, column). Compare with phase 7: lane 5 of an `mma` held columns 2, 3 of rows 1 and 9. Thread 5 holds
# the same, then the same eight columns further, and so on. Warp $w$ has rows $16w$ to $16w + 15$. So D is a row of C
# fragments:

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
for as_it_is, given, name in ((0, B.T, "K-major, as K lies"), (1, B, "MN-major, as V lies")):
    assert torch.equal(product(A, given, as_it_is), (A @ B)[where])
    print(f"{name}: equal to torch's A B")

# %% [markdown]
# In phase 7 V needed `ldmatrix.trans`. Here one bit of the instruction says that B is MN-major, and the tensor cores
# read it that way. (For 16-bit numbers only. FP8 has no such bit.) Draw it from a run: the tile holds the number of its row,
# and A is the identity, so D is the operand B as the tensor cores have read it.

# %%
operands = torch.empty(2, 64, 64)
for bit in (0, 1):
    operands[bit][where] = product(torch.eye(64), high, bit)
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained")
for ax, operand, title in zip(axes, operands, ("K-major: K is read so", "MN-major: V is read so")):
    image = ax.imshow(operand)
    ax.set(title=title, xlabel="n, the column of B", ylabel="k, the row of B")
    ax.grid(False)
fig.colorbar(image, ax=axes, label="row of the tile in memory")
plt.show()
assert torch.equal(operands[0], operands[1].T)

# %% [markdown]
# *The same bytes in shared memory, read as two operands. Left: a row in memory is a column of B: a key is a column of*
# $K^\top$. *Right: a row in memory is a row of B: a key is a row of V. Neither is moved anywhere.*

# %% [markdown]
# **What a wrong descriptor computes.** Nothing faults; the tensor cores read what the numbers say. Say that the distance
# from 8 rows to the next 8 is only half an atom. Both operands get it from `k_major`. Then in both only
# the first eight rows are right, and so are 8 × 8 of the 64 × 64 results:

# %%
half_a_stride = source.replace("SWIZZLE_128, 16, ATOM_BYTES)", "SWIZZLE_128, 16, ATOM_BYTES / 2)")
got = product(A, B.T, 0, load_inline(half_a_stride, backend=BACKEND))
print(f"{(got != (A @ B)[where]).float().mean():.0%} of the elements differ, none is NaN")
assert got.isfinite().all() and not torch.equal(got, (A @ B)[where])

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

# %% [markdown]
# ## 6 · Two proxies
#
# Ordinary loads and stores go one way to shared memory; TMA and wgmma go another. The manual calls the ways **proxies**,
# the *generic* and the *async* one. A barrier orders accesses of one proxy. It does not make an ordinary store visible to
# the async proxy. For that there is `fence_proxy_async()`. Each thread that has stored executes it, after its last store and
# before the barrier; behind the barrier one thread issues the copy. (The manual, in "Causality order", asks for a proxy fence
# on the way from the store to the copy; the emulator accepts one anywhere on that way.)

# %% [markdown]
# (Two others look alike. `fence_mbarrier_init` publishes barriers that have just been made, `wgmma_fence` registers.)

# %% [markdown]
# Where does a forward pass need it? TMA loads and wgmma are both async: no fence. But O goes out through shared memory: the
# warps store it there, then TMA brings it to global memory. Between the two stands the fence. A kernel without it may be
# right in every test on one GPU. The emulator finds it (section 11, exercise 11.6).
#
# Reads need none. Step 1 reads a stage with `ldmatrix`, and then TMA fills it again: what has been read is in a register,
# where no copy can change it, and the barrier says that it has been read.


# %% [markdown]
# ## 7 · The ladder
#
# Seventeen steps, each a whole file, from phase 8's loop to a kernel that is made for Hopper. Most bring one idea; steps 5 and 13 bring
# several that need each other, and the ladder cannot tell those apart. Every step runs in the emulator's watched build, is compared
# with the oracle, and is counted: one head, $N = 384$, $D = 64$, no mask, one SM. Below the counts stands what the step reached
# on a GPU, from the record: heads × D is 2048, batch × N 16384. In brackets: how many times as fast as the step before.

# %%
prepare(["p9_flash", *(s.name for s in steps(11))])
RUNS = hopper_results.recorded()
TABLE = []

def grow(name):
    """A step's counts under those of the step before, and the recorded TFLOP/s of both."""
    TABLE.append(draw.row(name))
    show.table(TABLE[-2:], draw.COLUMNS)
    names = [r[0] for r in TABLE[-2:]]
    for found in map(hopper_results.ladder_table, RUNS):
        shapes, speeds = found.columns[2:], {r[0]: r[2:] for r in found.rows}
        rows = [[name, *speeds.get(name, ["not measured yet"] * len(shapes))] for name in names]
        show.table(rows, ["TFLOP/s", *shapes], align="l" + "r" * len(shapes))

# %%
captions = [hopper_results.ladder_table(run).caption for run in RUNS]
print("\n".join(captions or ["the ladder is not measured yet"]))
grow("p9_flash")

# %% [markdown]
# - **KB by TMA** is what the copy engine brought to shared memory; *copies* are the instructions with which threads do so
#   themselves.
# - **wavefronts** are passes through shared memory that warps ask for. What `wgmma` reads is its own business; it is given
#   in KB.
# - **waits** counts waits at mbarriers, once per warp; *barriers* those of the whole block, and named ones (step 7). *stores* are
#   those to global memory, by threads or by TMA. Exponentials and maxima are not counted: steps 11 to 16 change those.

# %% [markdown]
# ### Step 1: tiles by TMA
#
# The loop is that of `p9_1_masks`, 16 rows per warp; the products are `mma.sync`. Only the copies change. (`p9_flash` above has 32 rows per warp:
# that is why it reads shared memory half as often, and is faster.) A tile of 128 columns is wider than
# a swizzle can be, so tiles are cut into **slabs** of 64 columns, 128 bytes wide, one behind the other.

# %%
show.region(step("p11_1_tma"), "swizzle", "copy a tile", "first copies", "load K and V")
grow("p11_1_tma")

# %% [markdown]
# One thread asks, in one line per slab. Look at the head of the loop. All threads wait at the barrier `full_k`: it says that
# the bytes are there. The `__syncthreads` is still needed: it says that nobody reads tile $j + 1$ any more (keys are walked
# backwards: it is the tile before), whose stage the next copy fills. That second half of every pipeline will get mbarriers of its own in step 4.
#
# (The step is slower than `p9_flash`, of course: it has none of the other ideas of phase 9.)

# %% [markdown]
# The tensor maps are made by the launcher. A tensor has four dimensions. So the engine knows which rows exist *per head*,
# and it does not run on into the next one.

# %%
show.region(step("p11_1_tma"), "tensor maps")

# %% [markdown]
# ### Step 2: S by wgmma
#
# Q's fragments, K's `ldmatrix` and the many `mma` of $QK^\top$ are gone. A `wgmma` multiplies 64 rows of Q by 64 keys, 16 columns at a time.

# %%
show.diff(step("p11_1_tma"), step("p11_2_wgmma"), "operands", "operands of the scores", "scores", context=0)
grow("p11_2_wgmma")

# %% [markdown]
# `columns_on(k)` is what is added to a descriptor for the next 16 columns: 32 bytes inside the row, and after four of them
# the next slab.
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
# warps compute exponentials, then the tensor cores work again. Nearly all further steps are about one question: **who has
# something to do while the others wait?**

# %% [markdown]
# ### Step 4: a producer
#
# A fifth warp does nothing but ask for tiles. It runs ahead of the **consumer**, the four warps that compute, until both
# stages are full. Each stage has two barriers for K and two for V. At `full` the consumer waits for the bytes. At `empty` the producer waits
# until the consumer is through. One lane of the warp asks: `elect_one` is true in one lane, and lets the compiler know that it is one.

# %%
before, after = step("p11_3_operands"), step("p11_4_producer")
show.diff(before, after, "barriers", "producer", "load K and V", "scores", context=0)
grow("p11_4_producer")

# %% [markdown]
# *Predict:* in its first round the producer waits at `empty` for parity 1. Nobody has arrived there yet. Why does it not hang?
#
# <details><summary>Answer</summary>
#
# The barrier is in phase 0, so "phase −1", of parity 1, counts as complete (section 2). The first use of each stage passes
# at once. For the second use the parity is 0, and the producer waits for the consumer's first arrival.
#
# </details>

# %% [markdown]
# The producer alone gains hardly anything, and at $D = 64$ it loses; why, we did not look into. (The copies were one tile ahead before, too.) But now
# consumers can be several, and none of them has to think of copies.

# %%
for run in RUNS:
    gain = hopper_results.gains(run)["p11_4_producer"]
    print("step 4 over step 3:", " ".join(f"{g:.2f}" for g in gain))
    assert max(gain) < 1.05

# %% [markdown]
# ### Step 5: several consumers, and registers that move
#
# A block gets two consumers (three for $D = 64$), each with 64 rows of its own. All of them use the same tiles of K and V,
# so a tile is copied for more rows at once. And while one consumer computes exponentials, the tensor cores can work for
# another. Tiles have 128 keys now.

# %% [markdown]
# A consumer's accumulators need registers: 64 × 128 of S are 64 per thread, O of $D = 128$ as many, P half. A block of 384
# threads gets 65536 / 384 = 170 per thread, rounded down to 168. The producer needs hardly any. With `setmaxnreg` it gives
# them away: 24 for it, 240 for each consumer. (160 of them are accumulators and P. Addresses, maxima, sums and what the compiler keeps at hand
# need the rest.) Registers change hands by warpgroups, so the producer is a whole warpgroup
# now, though a single thread of it works. From here on `tiles.cuh` has the operands, copies and tensor maps.

# %%
show.diff(step("p11_4_producer"), step("p11_5_consumers"), "constants", "barriers", "producer", context=0)
grow("p11_5_consumers")
assert 128 * (24 + 2 * 240) <= 65536 and 128 * (32 + 3 * 160) <= 65536

# %% [markdown]
# ### Who works when
#
# The emulator has no clock. But it keeps what each warp issued and what it waited for. A small model gives these events a
# time:
#
# - the tensor cores are one queue; an m64nNk16 takes $N / 2$ clocks;
# - exponentials are 16 per clock, shared by the consumers that compute some;
# - copies are one queue too, of 64 bytes per clock, and 600 clocks on the way;
# - everything else takes no time at all.

# %% [markdown]
# That is a **model**, and a kind one: maxima, sums and roundings cost nothing in it. It is for seeing who waits for whom, not
# for predicting speed. One block, 1024 keys, $D = 64$:

# %%
REPLAYED = {s.name: draw.replayed(s.name) for s in steps(11)[2:7]}
draw.timelines({name: REPLAYED[name] for name in list(REPLAYED)[:3]}, clocks=(0, 6000))
plt.show()

# %% [markdown]
# *A consumer's line: a bar is exponentials, a thin line is a wait, and its colour says for what. Top: one warpgroup. Its exponentials and its products take
# turns, so the tensor cores are idle more than half of the time. Middle: a producer asks for tiles; most of the time it waits
# for a free stage. Bottom: three consumers, each with its colour. At first all three compute exponentials together, and the
# tensor cores pause. Slowly they drift apart, and one has products while another has exponentials. Copies are drawn from the request
# until the bytes are there; they overlap.*

# %%
speeds = [hopper_results.ladder_speeds(run)[(4, 32, 4096, 64), False] for run in RUNS]
for name, found in list(REPLAYED.items())[:3]:
    measured = ", ".join(f"{rows[name]['tflops']:.0f} TFLOP/s measured" for rows in speeds)
    print(f"{name:16} tensor cores busy {found.share:.0%} of the time from the first product on; {measured}")
assert REPLAYED["p11_3_operands"].share < 0.5 < REPLAYED["p11_5_consumers"].share

# %% [markdown]
# The measured speeds do not follow. An SM holds several blocks of steps 3 and 4 at once, which may fill each other's pauses; the
# picture has one block. And what costs nothing in the model, costs something on the chip. At $D = 128$ step 5 did gain.
#
# ### Step 6: two products in flight
#
# A consumer issues S of tile $j$, then O += P V of the tile *before*, and waits for S alone: `wgmma_wait<1>`. While it
# computes exponentials, the tensor cores are busy with the other product.

# %%
show.diff(step("p11_5_consumers"), step("p11_6_overlap"), "main loop", context=0)
grow("p11_6_overlap")

# %% [markdown]
# The price: O lags one tile behind, so the correction is applied when that product is there. And P, S and O are all alive at
# the same time. It gains where there are two consumers and no mask; with three, or with a causal mask, it loses a little. It
# stays, because the next step builds on it.
#
# ### Step 7: ping-pong
#
# Left alone, the consumers may fall into step: all issue products, then all compute exponentials, and the tensor cores idle.
# So they take turns.

# %% [markdown]
# A consumer waits for its turn before it issues, and passes it on when it has issued, before it waits for results. Two
# operations on **named barriers** do it: `sync` counts and waits, `arrive` only counts. A block has 16 of them, 0 to 15.
# They are hardware, not mbarriers in shared memory. Number 0 is that of `__syncthreads`, so turns begin at 1.

# %%
show.diff(step("p11_6_overlap"), step("p11_7_ping_pong"), "turns", "scores", context=0)
grow("p11_7_ping_pong")

# %% [markdown]
# Barrier `1 + c` is consumer $c$'s turn. 256 threads meet there: the 128 of consumer $c$, who wait, and the 128 of the one
# before it, who only arrive. At the very end one turn is left over, and consumer 0 takes it: a barrier that somebody has
# arrived at must not be left behind.

# %%
draw.timelines({name: REPLAYED[name] for name in list(REPLAYED)[2:]}, clocks=(1000, 7000))
plt.show()

# %% [markdown]
# *The model's clocks again. Without turns (the two upper panels) the first scores of all three consumers are multiplied in
# small pieces, alternately. So all get them late and at the same time. Then all compute exponentials, and the tensor cores
# pause. With turns (below) consumer 0 has its scores early, and its exponentials begin while consumer 1's are multiplied. Black
# marks are waits for a turn, drawn wider than they are, 4 to 12 clocks: a turn is passed on as soon as the products are issued.*

# %%
for name, found in list(REPLAYED.items())[2:]:
    print(f"{name:16} in the model {found.clocks:.0f} clocks, tensor cores {found.share:.0%} of the time")
assert REPLAYED["p11_7_ping_pong"].clocks < REPLAYED["p11_6_overlap"].clocks
assert REPLAYED["p11_7_ping_pong"].share > REPLAYED["p11_6_overlap"].share

# %% [markdown]
# In the middle panel the consumers part by themselves for a while, without turns. It does not last. With turns, the first round still has
# pauses; later ones are mostly waits for K and V, red. (A third stage gained nothing on the chip, where there is room for it.)
# Section 9 asks again what turns are worth, in the final kernel.

# %% [markdown]
# ### Step 8: blocks that stay
#
# So far each block begins with barriers and tensor maps, and ends with a store, while the tensor cores wait. Now one block
# per SM stays, and takes **part** after part of the work: 128 or 192 rows of one head. Heads are worked on in groups whose K and V fit
# into L2 together (`heads_together`).

# %% [markdown]
# The producer runs on into the next part while the consumers finish this one. Causal parts are unequal, so those with the
# most keys go first (phase 9).

# %%
show.diff(step("p11_7_ping_pong"), step("p11_8_persistent"), "which rows", "producer", "main loop", context=0)
grow("p11_8_persistent")

# %% [markdown]
# Note what "the n-th use of a stage" has become: `nth` counts tiles over *all* parts. Both sides must count the same way, or
# their parities part company (exercise 11.2).
#
# ### Step 9: whoever is free takes the next part
#
# A fixed share of the parts is the fastest only if all parts take equally long. Now a counter in global memory says which
# part is next. The producer asks, and tells the consumers through shared memory: two slots, each with two more barriers.

# %%
show.diff(step("p11_8_persistent"), step("p11_9_scheduler"), "producer", "main loop", context=0)
grow("p11_9_scheduler")

# %% [markdown]
# ### Step 10: O leaves by TMA
#
# A lane holds pairs of columns of O. `stmatrix`, the way back of `ldmatrix`, puts them into shared memory in the swizzled
# order. Then one thread has the copy engine store the consumer's 64 rows. Nobody waits until the buffer is needed again.

# %% [markdown]
# There are two waits. `bulk_wait_read` ends when the engine has *read* the buffer, so that it may be filled again; `bulk_wait` ends when
# the bytes are *written*. The first is enough before the next O, and before a block ends, when its shared memory goes to another block. What was
# written is there for the next kernel in any case; the second is for a thread that reads it back. (Our kernels end with the second, which is more
# than they need.)
#
# This is the place of section 6: ordinary stores, then the async proxy. Find the fence.

# %%
show.diff(step("p11_9_scheduler"), step("p11_10_epilogue"), "store", context=0)
grow("p11_10_epilogue")

# %% [markdown]
# ### Step 11: fewer multiplications
#
# It is phase 9's: O is rescaled only when a maximum has grown by more than 8, in units of $\log 2$. So P stays up to $2^8$.
# FlashAttention-4 has the idea too, in its kernels for Blackwell; its forward pass for Hopper rescales always.

# %%
show.diff(step("p11_10_epilogue"), step("p11_11_rescale"), "row maxima", "rescale", context=0)
grow("p11_11_rescale")

# %% [markdown]
# ### Step 12: fewer exponentials
#
# Another idea of FlashAttention-4. An SM computes 16 exponentials per clock. At $D = 64$ that takes as long as both products
# together. Multiply-adds are eight times as fast. So some of the exponentials could be computed by a polynomial:
# $2^x = 2^n \cdot 2^f$, where $n$ is the nearest integer and $|f| \le 1/2$. It is switched off (`POLYNOMIAL=0`): section 9 has what it costs. So
# the table below compares a kernel with itself.

# %%
scores, exponentials = 64 * 128, 64 * 128 / 16  # of a tile: how many, and their clocks
products = {d: (d // 16 * 128 + 128 // 16 * d) / 2 for d in (64, 128)}
print(f"clocks per tile of 64 rows and 128 keys: exponentials {exponentials:.0f}, products {products}")
assert products == {64: exponentials, 128: 2 * exponentials}

# %%
show.diff(step("p11_11_rescale"), step("p11_12_polynomial"), "exponential")
grow("p11_12_polynomial")

# %% [markdown]
# How good is the polynomial? The same steps in torch, against float64:

# %%
x = torch.linspace(-20, 0, 200001)
n = torch.round(x)
f = x - n
value = torch.zeros_like(f)
for c in (0.0550089516, 0.242211014, 0.693282902, 1.0):
    value = value * f + c
error = (value * 2**n / torch.exp2(x.double()) - 1).abs().max().item()
print(f"largest relative error {error:.1e}; fp16 rounds by up to {2**-11:.1e}, bf16 by {2**-8:.1e}")
assert error < 2**-11

# %% [markdown]
# For P, which is rounded to 16 bits, that is good enough. For the sums and so for `lse`, which stay in float, it is not, as
# you will see. With `POLYNOMIAL=4` every fourth MMA tile of P is computed so. Arguments are negative or small here; from step 14 on they may be any
# number, and the exponent has to end at infinity: else it runs over, and no sum tells.

# %% [markdown]
# ### Step 13: the next part begins before this one has ended
#
# Where sequences are short, a part is a few tiles, and its beginning and its end count. Until now the next part's Q had to wait for the only
# place, and everybody computed for himself where the part lies.

# %% [markdown]
# - Q has two places. The next part's Q comes while this one's is still read.
# - The producer alone works out where a part lies, which takes divisions, and hands all of it on. For them it keeps 40 registers, so two
#   consumers get 232 each.
# - It asks for a part's first K before its Q.

# %% [markdown]
# - A consumer *passes by* the causal tiles that none of its own 64 rows sees. It takes its turn all the same, and passes it on: turns go round,
#   and the consumer after it, whose rows may see the tile, waits for them. It still has to say that it needs the tile no more,
#   and it must not say so before it is there. While another consumer still reads the tile before, `empty` is still in that tile's
#   phase, and an arrival would count for it.

# %%
show.diff(step("p11_12_polynomial"), step("p11_13_parts"), "producer", "main loop", context=0)
grow("p11_13_parts")

# %% [markdown]
# What would happen without those waits? Take them out of `pass_by`, one at a time, and ask the watched build. One block, so that it
# takes several parts:

# %%
def without(wait):
    """What the watched build says of step 13 with this wait taken out of `pass_by`."""
    before, rest = step("p11_13_parts").path.read_text().split("auto pass_by", 1)
    body, after = rest.split("};", 1)
    body = "\n".join(line for line in body.split("\n") if wait not in line)
    checked = load_inline(f"{before}auto pass_by{body}}};{after}", check=True)
    checked.forward(*torch.randn(3, 1, 1, 640, 64).half(), causal=True, sms=1, echo=False)
    return [f.message for f in checked.report.findings]

WITHOUT = {wait: without(wait) for wait in ("mbarrier_wait(full_v", "mbarrier_wait(full_k")}
for wait, found in WITHOUT.items():
    print(f"without {wait} ...: {' '.join(found) or 'nothing found'}\n")
assert WITHOUT["mbarrier_wait(full_v"] and not WITHOUT["mbarrier_wait(full_k"]

# %% [markdown]
# Without V's wait a stage is refilled under a product. Without K's nothing happens, as long as V's is there: the producer asks for a tile's
# K before its V. So once V is there, K's `empty` is in the right phase too. The kernel has both, as every other consumer of a stage.

# %% [markdown]
# ### Step 14: trust
#
# In step 11 each tile still *looks* at its maxima: 64 comparisons per lane, then shuffles, and only then the first
# exponential can begin. But after the first tiles the maximum usually moves little. So a full tile is computed under the maximum of
# the tiles before (`TRUST`). If that was too low, a sum tells: a lane adds up its own part of a row, and if that is beyond $2^{14}$ (or NaN), the
# warp does not trust. fp16 ends at 65504, so no number of P has overflowed then.

# %% [markdown]
# By then S has been overwritten. So the warp computes it again, alone, with phase 8's `ldmatrix` and `mma.sync`, and takes the
# usual way.

# %% [markdown]
# What makes that right is the online softmax itself: in exact arithmetic any reference gives the same result. In floats it must not be
# above the maximum so far, where everything might become 0; the maximum of tiles before never is. And it must not be so far below that sums
# overflow or digits are lost: what that costs comes below. Step 11's threshold
# is 0 now (`RESCALE_ABOVE`): where maxima are looked at, the reference becomes exact.
#
# The idea of a reference without a look is from FlashDecoding++ (its "unified maximum value"), which takes a constant.

# %% [markdown]
# Trust has a price even where it is right: K's stage is given back only after the exponentials, since S may have to be computed again, and each
# warp gives it back for itself (`lane == 0`). `q_operand % 16384 * 16` is Q's address, out of its descriptor.

# %%
show.region(step("p11_14_trust"), "trust", "scores again")
grow("p11_14_trust")

# %% [markdown]
# **What does a reference cost that lags behind?** First, *range*: O before its division may overflow where the result does not. Without doubt
# a lane's sum is at most $2^{14}$ per tile, and a row has four lanes. So a tile adds up to $2^{16} \max |V|$, and float32 ends at $2^{128}$:
# right as long as $\max |V| < 2^{112}$ / tiles. Step 11's lag costs nearly as much: 128 keys of $2^8$ each. Always
# rescaled, 128 keys are $2^7$.

# %% [markdown]
# To see it, column $c$ of V holds $2^{64 + c}$: O should be the same. One head for each lag: the 128 keys met last have scores by 0, 7.9 and 8.9
# bits higher than those met first.

# %%
KINDS = {"always rescaled": ("p11_10_epilogue", {}), "a lag of 8": ("p11_flash", {"TRUST": 0}),
         "trust": ("p11_flash", {"TRUST": 1})}

def o_of(who, q, k, v):
    name, defines = KINDS[who]
    kernel = load_inline(step(name), backend="emulator", dtype=torch.bfloat16, defines=defines)
    return kernel.forward(q.bfloat16(), k.bfloat16(), v.bfloat16(), echo=False)[0]

q, k = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 256, 64)
q[..., 0] = 8
k[0, :, :128, 0] = torch.tensor([[0.0], [7.9], [8.9]]) * math.log(2)  # met last: a block begins at its last
v = (2.0 ** torch.arange(64, 128)).expand(1, 3, 256, 64)
END = {who: [63 + int(n) for n in (o_of(who, q, k, v)[0, :, 0] == v[0, :, 0]).sum(1)] for who in KINDS}
show.table([[who, *(f"2^{n}" for n in ends)] for who, ends in END.items()],
           ["the largest V that is right", "no lag", "7.9 bits", "8.9 bits"])
assert END == {"always rescaled": [119, 120, 120], "a lag of 8": [119, 113, 120], "trust": [119, 113, 112]}

# %% [markdown]
# All of fp16 is far below, and so is every model we know of. But bf16 has numbers up to $2^{128}$, and for the largest of them this kernel gives
# infinity where the formula does not. It says so in `choose_backend`, which chooses it.
#
# Second, *accuracy*. Where one key dominates a row, its weight is exactly 1 only under the true maximum. Under another reference it is some $2^x$,
# rounded to bf16, and the sum that divides it is not. Here such a key comes last, 5 to 13 bits above the reference:

# %%
q, k = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 256, 64)
q[0, 0, :, 0], k[0, 0, 0, 0] = torch.linspace(5, 13, 64), 8 * math.log(2)  # 16 rows of each warp
q[..., 1], k[0, 0, 1:255, 1] = 16, -16  # the other keys count for nothing, but for the first one met
v = torch.randn(1, 1, 256, 64, generator=torch.Generator().manual_seed(0))
exact = [x.bfloat16().double() for x in (q, k, v)]
want = torch.softmax(exact[0] @ exact[1].mT / 8, -1) @ exact[2]
WRONG = {who: (o_of(who, q, k, v) - want).abs()[0, 0].unflatten(0, (4, 16)).amax((1, 2)) for who in KINDS}
show.table([[who, *(f"{x:.4f}" for x in wrong.tolist())] for who, wrong in WRONG.items()],
           ["largest error of O", "5 to 7 bits", "7 to 9", "9 to 11", "11 to 13"])
always, lag, trust = (wrong.max() for wrong in WRONG.values())
assert all(1.5 * always < x <= 2.1 * always for x in (lag, trust))
assert (WRONG["a lag of 8"][2:] == WRONG["always rescaled"][2:]).all()

# %% [markdown]
# O itself is rounded to bf16, by everybody; the weight's rounding errs by as much again. So where one key dominates, the error is up to twice
# that of a kernel that rescales always. (In the last column O is nearly V itself, which needs no rounding.) Step 11 has it within 8 bits, trust within 14.

# %% [markdown]
# Third, *rows are no longer alone*. A warp votes, and its 16 rows move together. One wild row (times 50, the sixth) changes what?

# %%
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 1, n, 64, generator=g) for n in (64, 1024, 1024))
wild = q.clone()
wild[0, 0, 5] *= 50
OTHER = {who: (o_of(who, q, k, v) != o_of(who, wild, k, v))[0, 0].any(1).nonzero().flatten().tolist()
         for who in KINDS}
for who, rows in OTHER.items():
    print(f"{who}: other bits in the rows {rows}")
assert OTHER["always rescaled"] == [5]
assert all(len(OTHER[who]) > 1 and max(OTHER[who]) < 16 for who in ("a lag of 8", "trust"))

# %% [markdown]
# Its neighbours are as right as before, with other last digits. So "the same bits" in this lecture means from run to run, with the same inputs. It does
# not mean that a row has the same bits whatever stands in the other 15: another token there may change them. Other heads and other sequences
# cannot. Phase 9's kernels vote too, from `p9_3_rescale` on.

# %% [markdown]
# What does it cost in time when trust is misplaced? Scores that grow from tile to tile, against random ones, counted in the watched build:
# `mma` are the products of warps that computed S again.

# %%
def products(kind):
    """wgmma and mma.sync of one launch: one head of 640 rows, D = 64."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 640, 64, generator=g).half() for _ in range(3))
    if kind == "growing":  # a block walks from the last key to the first
        q[..., 0], k[..., 0] = 8, torch.linspace(64, -64, 640).half()
    checked = load_inline(step("p11_14_trust"), check=True)
    o, _ = checked.forward(q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert (o - right).abs().max() < 0.01
    return {name: checked.report.counters.get(name, 0) for name in ("wgmma", "mma")}

for kind in ("random", "growing"):
    print(f"{kind}: {products(kind)}")
assert products("random")["mma"] == 0 < products("growing")["mma"]

# %% [markdown]
# 10240 is all of them: 40 warps have 4 trusted tiles each. What does that cost on the GPU, and what do scores cost that are not random? In language
# models the first key often has a far higher score than the others (an *attention sink*, Xiao and others 2023); a block meets it last: here by 30. Where
# tiles *rise*, scores lie 12 above those of the tile before.

# %% [markdown]
# `p11_15_portions` computes each doubted tile again, as this step does; *doubted* says how many of the trusted tiles those are. The last kernel, `p11`, remembers
# its doubts: that is step 16. `TRUST=0` looks at every maximum. TFLOP/s, $N = 4096$:

# %%
OTHERS = {at: rows for run in RUNS for at, rows in hopper_results.input_rows(run).items()}
for run in RUNS:
    found = hopper_results.input_table(run)
    show.table(found.rows, found.columns, align=found.align)

def over(rows, peer):
    """How many times as fast the kernel is as a peer."""
    return rows[peer]["ms"] / rows["p11"]["ms"]

for kind in dict.fromkeys(at[0] for at in OTHERS):
    some = [rows for at, rows in OTHERS.items() if at[0] == kind]
    peers = "cuDNN", "FlashAttention-4", "p11_flash TRUST=0", "p11_15_portions"
    said = [f"{min(r):.2f} to {max(r):.2f} times {who}" for who in peers
            if (r := [over(rows, who) for rows in some if who in rows])]
    print(f"{kind}: {', '.join(said)}")
for (kind, *_), rows in OTHERS.items():
    forgets = rows["p11_15_portions"]["ms"] / rows["cuDNN"]["ms"]  # of cuDNN's time
    assert kind != "random" or over(rows, "cuDNN") > 1 < over(rows, "p11_flash TRUST=0") and forgets < 1
    assert not kind.startswith("every tile") or 1 / 0.585 < forgets < 1 / 0.425
LOOKS = {at: rows["p11_flash TRUST=0"]["ms"] for at, rows in OTHERS.items()}
assert all(LOOKS[at] / LOOKS[("random", *at[1:])] < 1.075 for at in LOOKS if at[0].startswith("every tile"))

# %% [markdown]
# So trust pays on random scores, and with a sink. It costs most where *every* tile raises every row's maximum, be it by a ramp or by one key at a tile's start or end. There
# `p11_15_portions` computes all of them twice, at 0.43 to 0.58 of cuDNN's speed. `TRUST=0`, which looks at each maximum, loses 7 % at most.

# %% [markdown]
# Those scores are made up. What are a language model's like? Two models have read 4096 tokens of this course: *SmolLM2-135M*, which a Python package ships
# (`tools/capture_scores.py`), and phase 10's, with heads of 128 columns, trained for 400 steps (`flashlab.bench.hopper_inputs`). The rule of doubt was
# applied to each layer's Q and K in PyTorch; tests compare that count with the emulator's.

# %%
def wrong(rows):
    """How many times the best peer's largest error of O ours is."""
    return rows["p11"]["error"] / min(row["error"] for who, row in rows.items() if not who.startswith("p11"))

for run in RUNS:
    layers = hopper_results.input_rows(run, "captured")
    for model in dict.fromkeys(at[0].rpartition(", ")[0] for at in layers):
        some = {at[0].rpartition(" ")[2]: rows for at, rows in layers.items() if at[0].startswith(model)}
        shares = {layer: hopper_results.doubted(rows["p11"]) for layer, rows in some.items()}
        most = sorted(shares, key=lambda layer: -shares[layer])[:3]
        print(f"{model}: doubted in", ", ".join(f"layer {n} {shares[n]:.2%}" for n in most),
              f"of those trusted; below 0.1 % in {sum(x < 0.001 for x in shares.values())} of {len(shares)}")
        assert max(shares.values()) < 0.1
        for layer, rows in some.items():
            if best := hopper_results.best_of(rows):
                low, high = hopper_results.spread(rows["p11"], rows[best])
                said = [f"{over(rows, n):.2f} times {n}" for n in ("p11_flash TRUST=0", "p11_15_portions")]
                print(f"  layer {layer}: {over(rows, best):.2f} ({low:.2f} to {high:.2f}) times {best}, "
                      f"{', '.join(said)}; error {wrong(rows):.2f} times the best peer's")
                assert 0.965 < over(rows, "p11_15_portions") < 1.005 and wrong(rows) < 2.15

# %% [markdown]
# In these two models trust is right nearly always, in every layer. That is what was looked at: one short text and two small models. A model whose scores grow against the order of the
# walk would pay, and nothing but its speed would tell.

# %% [markdown]
# And the accuracy, beside the peers? The largest error of O against float64 over two heads of these inputs, in brackets rms:

# %%
for run in RUNS:
    found = hopper_results.error_table(run)
    show.table(found.rows, found.columns, align=found.align)
for (kind, d, causal), rows in OTHERS.items():
    if kind == "three times as wide":
        print(f"D {d}{', causal' * causal}: {wrong(rows):.2f} times the best peer's largest")
    assert wrong(rows) < 1.9 and hopper_results.right(rows["p11"])

# %% [markdown]
# Where scores are wide, one key often dominates: the largest error is up to 1.9 times the best peer's, and 2.1 times in a layer above. It is still within the checker's rule. On the wide scores `TRUST=0`, which rescales only beyond 8 bits, has nearly as much.

# %% [markdown]
# ### Step 15: a tile's exponentials in three portions
#
# Now little stands before the exponentials. What stands behind them? P has to be rounded to 16 bits, into the registers of the P
# before. Those are free when the product with V has been computed. So a consumer computed all its exponentials, waited for O, and
# rounded: 32 instructions per lane with nothing beside them.

# %% [markdown]
# But O of the tile before should be there before the last exponential. So the exponentials come in three portions, a half, a quarter and a
# quarter (at $D = 64$ an eighth, five eighths and a quarter). After the second, the consumer waits for O. Then P of the first two is rounded
# *while* the third is computed: a scheduler's unit takes 4 lanes per clock, so a warp's exponential keeps it for 8 clocks, and an
# instruction that rounds fits in between.

# %% [markdown]
# How does one keep a compiler from mixing the portions? It may move arithmetic past a barrier, and `ptxas` did. It did not move it past a vote
# of the warp and the branch on it. Here that is a question worth asking anyway: is the sum of the first portion in doubt? Between the second and
# the third nothing is needed: there the two kinds of work *should* mix.
#
# At $D = 64$ the turn is passed on only after the first portion (`LATE_TURN`), against the rule of step 7. Three consumers then start less
# close to each other. With two consumers it loses: section 9.

# %%
show.diff(step("p11_14_trust"), step("p11_15_portions"), "constants", "probabilities", "trust", "rescale O")
grow("p11_15_portions")

# %% [markdown]
# How were those places found? By Nsight Compute's samples per instruction: 11 of 100 samples were at the rounding, 46 at the
# exponentials; and by trying some twenty places to cut. `notes/phase_11_experiments.md` has those that lost.

# %% [markdown]
# ### Step 16: trust that learns
#
# Scores that rise in one tile often rise in the next. So a warp that was in doubt is *wary* for some tiles: after the first portion it votes
# against trust, whatever its sums are, and looks at the maxima. S of that portion is kept in registers of its own, so nothing is computed twice.

# %%
show.diff(step("p11_15_portions"), step("p11_16_learns"), "trust")
grow("p11_16_learns")

# %% [markdown]
# After a doubt that is for 3 tiles. If the next doubt follows soon, for 15, then for 63; each trusted tile halves what was learnt. With each part it is forgotten: otherwise the bits
# of a row would depend on which parts its block had before. Counted for 64 rows, which trust 31 tiles: how many are computed again?

# %%
def computed_again(name, place):
    """Tiles that are: in each of 32 one key lies 12 above the one in the tile before, at this place."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=g).bfloat16() for n in (64, 4096, 4096))
    keys = torch.arange(4096)
    q[..., 0], k[..., 0] = 8, 12 * (32 - keys // 128) * (keys % 128 == place)
    module = load_inline(step(name), backend="emulator", dtype=torch.bfloat16)
    module.forward(q, k, v, echo=False)
    return module.report.counters.get("mma", 0) // 64 // 4  # of 64 mma.sync by each of four warps

STEPS = "p11_15_portions", "p11_16_learns"
AGAIN = {place: [computed_again(name, place) for name in STEPS] for place in (0, 127)}
show.table([[f"key {place} of each tile", *n] for place, n in AGAIN.items()], ["what rises", *STEPS])
assert AGAIN == {0: [31, 0], 127: [31, 3]}

# %% [markdown]
# At key 0 the first portion tells, and S is there; at key 127 only the third does, so that three doubts cost a product each.

# %% [markdown]
# So in the table of step 14, where the last kernel has this too, the rising rows run at 0.72 to 0.99 times the best peer's speed instead of 0.41 to 0.54, and those that rise now and then gain up to 15 %. The price: the ladder loses 1 to 3 %
# (`p11_flash` below), wide scores up to 4 %, and those of the two models up to 3 %. S of the first portion needs registers; that this is why, nothing isolates. What else was tried, and what ptxas made of it, is in `notes/phase_11_experiments.md`.

# %% [markdown]
# ### The last step: every shape
#
# `p11_flash` is the same kernel with tiles for every shape, which should change nothing at the ladder's four. Where parts would be too few to fill
# the GPU, blocks have one consumer. With $D = 256$ a tile of keys is 64 rows, O takes the place of Q (shared memory has no other), and there is no
# trust: it gained nothing there.
#
# Heads of 80, 96, 112, 160 or 192 columns are not padded in memory. A tile in shared memory has whole slabs: TMA fills the rest with zeros,
# which no product reads, since wgmma takes any multiple of 16.

# %% [markdown]
# With a mask, parts have different lengths, and the longest one must not begin last: all others would wait for it. So the last group of heads
# gets at least two parts for every block. Then short parts come last (`notes/phase_11_experiments.md` has what it gained). Without a mask all
# parts are equal, and nobody asks the counter.

# %%
show.diff(step("p11_16_learns"), step("p11_flash"), "constants", "launch", context=0)
grow("p11_flash")

# %% [markdown]
# What becomes of that, for 132 SMs? Few parts and many, and the shared memory that a block asks for. It may have 227 KB:

# %%
emulated = load_inline(step("p11_flash"), backend="emulator")

def launched(heads, rows, head_dim):
    emulated.forward(*torch.randn(3, 1, heads, rows, head_dim).half(), sms=132, echo=False)
    block = emulated.report.launches[0]
    consumers, kb = block.block[0] // 128 - 1, block.shared_bytes / 1024
    return [f"D = {head_dim}, {heads} heads of {rows} rows", block.grid[0], consumers, f"{kb:.1f} KB"]

LAUNCHED = [launched(40, 128, 128), launched(70, 128, 128), launched(70, 192, 64), launched(70, 128, 256)]
show.table(LAUNCHED, ["", "blocks", "consumers each", "shared memory"])
tile = {d: 128 * d * 2 / 1024 for d in (128, 256)}  # KB of 128 rows
assert LAUNCHED[1][3] == f"{7 * tile[128] + 0.2:.1f} KB" and LAUNCHED[3][3] == f"{3 * tile[256] + 0.1:.1f} KB"
assert 4 * tile[256] > 227

# %% [markdown]
# 40 parts of 128 rows would leave 92 SMs idle; with one consumer they are 80. At $D = 128$ two places for Q, two stages of K and of V, and O
# are seven tiles of 32 KB; the rest are barriers. At $D = 256$ one Q and four stages of 64 rows take three times 64 KB. O would be a fourth.

# %% [markdown]
# Does it compute attention? The checker's cases of up to 300 rows, at $D = 64$: causal and not, grouped heads, ragged and
# empty lengths, strides, large scores, rows that see no key. On a Hopper GPU it runs natively, elsewhere in the emulator.
# (The record has all cases, head sizes and types, on the H200.)

# %%
final = load_inline(step("p11_flash"), backend=BACKEND)
print(verify(final.forward, causal=True, gqa=True, empty=True, max_seq=300).verdict)

# %% [markdown]
# ## 8 · Beside the others
#
# Now the kernel, as it was on the day of the record, beside its peers: cuDNN, FlashAttention-2 as PyTorch has it, FlashAttention-4, the course's
# own `p9_flash` and Triton kernel (*descriptors*: with tensor descriptors). All take turns in one run, as CUDA graphs, on random numbers, and
# every result is compared with float64. Heads × D is 2048, and batch × N 16384 (one batch from there on). FlashAttention-3 is
# not among them: wheels of it exist for this stack, but the record has not measured them. Its paper has up to 740 TFLOP/s, in fp16 on an H100.

# %%
WHO = "p11", "cuDNN", "FlashAttention-2", "FlashAttention-4", "p9_flash", "triton"
for run in RUNS:
    drawn = hopper_results.lines(run, WHO)
    panels(drawn, ylabel="TFLOP/s", title=f"forward, bf16, {run['machine']['gpu']}")
    plt.show()
    print("not measured yet:", [name for name in WHO if not any(name in who for who in drawn.values())])

# %% [markdown]
# *TFLOP/s over the length; upper row without a mask, lower row causal. `p11` is this lecture's kernel.* It is far above
# FlashAttention-2 and `p9_flash`, which feed the tensor cores by `mma.sync`, and ahead of cuDNN and FlashAttention-4 at nearly all shapes.
# So look at ratios: how many times as fast as each peer, and as the best peer of each shape, as geometric means. An empty column is not measured.

# %%
for run in RUNS:
    means = hopper_results.mean_table(run)
    rows = [r for r in means.rows if r[0] == "all" or r[0] == "standard" and r[1] in ("bf16", "all")]
    show.table(rows, means.columns, align=means.align)

# %% [markdown]
# And how sure is that? Each time is the median of nine rounds. Where its slowest round is faster than the best peer's fastest, it is ahead *beyond both spreads*.
# All kinds of shapes: grouped heads, other layouts, odd lengths, fp16 too. In brackets the span of the ratio:

# %%
for run in RUNS:
    n, ahead, beyond, behind = hopper_results.against_best(run)
    print(f"ahead by the medians at {ahead} of {n} shapes, beyond both spreads at {beyond}; "
          f"behind beyond both at {behind}")
    found = [s for s in hopper_results.standings(run) if s.ratio is not None]
    for text, some in (("from 2048 on", [s for s in found if s.job["shape"][2] >= 2000]),
                       ("below", [s for s in found if s.job["shape"][2] < 2000])):
        worst = min(some, key=lambda s: s.ratio)
        print(f"N {text}: ahead at {sum(s.ratio > 1 for s in some)} of {len(some)}; "
              f"worst {worst.said} at {worst.label}, beside {worst.best}")

# %% [markdown]
# Goals are set before a run. *is* has the worst ratio of all shapes, but for the mean. "best" includes
# FlashAttention-4. *The same bits*: in 200 runs on the same inputs. *The rule*: the checker's bound for each number's rounding. The last column says whether
# a goal is met, by medians. Its last three rows are of the kernel as it was at step 15 (`notes/phase_11_experiments.md`); since then those cases have run in the emulator alone.

# %%
for run in RUNS:
    goals = hopper_results.goal_table(run)
    show.table(goals.rows, goals.columns, align=goals.align)

# %% [markdown]
# The shapes at which it is furthest behind:

# %%
for run in RUNS:
    found = sorted((s for s in hopper_results.standings(run) if s.ratio is not None), key=lambda s: s.ratio)
    for s in found[:6]:
        print(f"{s.said}: {s.label} ({s.job['kind']}), beside {s.best}")
    behind = [s for s in found if s.span[1] < 1]  # beyond both spreads
    kinds = {(s.job["shape"][3], s.job["causal"], s.best) for s in behind}
    print(f"behind beyond both spreads at {len(behind)}: head_dim, causal, who is ahead: {sorted(kinds)}")
    assert found[0].ratio > 0.95 and kinds <= {(256, True, "FlashAttention-4")}

# %% [markdown]
# Those beyond the spread are of one kind: $D = 256$, causal and long, where FlashAttention-4 is ahead by up to 3 %. Trust and portions are off there, as they
# gain nothing (section 9). Why the mask costs our kernel more than FlashAttention-4 there, we do not know.

# %% [markdown]
# **The backward pass.** The package has one in this style, `flashlab.cuda.hopper_backward`: two large kernels, no atomics, so
# that the bits are the same each time. `notes/phase_11_experiments.md` has its design. It
# computes seven products where five would do, is slower than cuDNN at every shape, and at $D = 64$ slower than the course's own Triton
# kernel too. FlashAttention-4's was not measured. First the whole, then its three kernels alone (in µs), then variants of it and the peers. TFLOP/s count 2.5 times the forward pass:

# %%
for backward in map(hopper_results.backward_table, RUNS):
    if backward.rows:
        show.table(backward.rows, backward.columns, align=backward.align)
    print(backward.caption)

# %% [markdown]
# ## 9 · What gained, and what did not
#
# The whole ladder, in brackets over the step before. (The same kernel at the same shape was up to 6 % faster in section 8, where it took
# turns with others. So compare within one table.)

# %%
for found in map(hopper_results.ladder_table, RUNS):
    align = "l" + "r" * len(found.columns[2:])
    show.table([[r[0], *r[2:]] for r in found.rows], ["TFLOP/s", *found.columns[2:]], align=align)

# %%
for run in RUNS:
    gains = hopper_results.gains(run)
    for text, wanted in (("gain more than 5 % somewhere", lambda g: max(g) > 1.05),
                         ("lose more than 2 % somewhere", lambda g: min(g) < 0.98),
                         ("stay within 1.5 % everywhere", lambda g: max(abs(x - 1) for x in g) < 0.015)):
        print(f"{text}: {', '.join(name for name, g in gains.items() if wanted(g))}")

# %% [markdown]
# - **The second product by wgmma** (step 3), with V as it lies, is worth more, at every shape, than any other step at any. (P was in registers
#   already, since phase 7.)
# - **Several consumers and the overlap** (5, 6) bring the next part at $D = 128$ without a mask; elsewhere the overlap loses.
# - **Ping-pong** (7) pays where the overlap lost: with a causal mask and at $D = 64$.
# - **The store by TMA** (10) pays most where rows are few.
# - **Trust** (14) brings 6 to 13 %, most at $D = 128$; **portions** (15) 3 to 7 %, most at $D = 64$. Both shorten what each warp does one
#   after the other.

# %%
for run in RUNS:
    gains = hopper_results.gains(run)
    others = [gain for name, g in gains.items() if name != "p11_3_operands" for gain in g]
    trust, portions = gains["p11_14_trust"], gains["p11_15_portions"]
    assert min(trust) > 1.05 and 1.02 < min(portions) and max(portions) == portions[2]  # D = 64
    assert min(gains["p11_3_operands"]) > max(others)
    overlap, turns, store = (gains[n] for n in ("p11_6_overlap", "p11_7_ping_pong", "p11_10_epilogue"))
    assert min(gains["p11_5_consumers"][0], overlap[0]) > 1.05 > 1 > max(overlap[1:])
    assert turns[0] < 1.03 < min(turns[1:]) and max(store) == store[3]
print("all five are in the record")

# %% [markdown]
# As in phase 9, a ladder says what an idea was worth *at its place*. So ask the final kernel too: change one macro, leave
# the rest. In brackets over `p11_flash` as it is; a "!" is a result that the checker's rule refuses.

# %%
for run in RUNS:
    found = hopper_results.variant_table(run)
    show.table(found.rows, found.columns, align=found.align)

# %%
def changed(run):
    """How many times as fast the kernel is with one macro changed, at each shape, by the change."""
    ratios = {}
    for rows in hopper_results.ladder_speeds(run, "variants").values():
        for name in (n for n in rows if "=" in n):
            ratios.setdefault(name.split()[1], []).append(rows["p11_flash"]["ms"] / rows[name]["ms"])
    return ratios

for run in RUNS:
    for name, r in changed(run).items():
        print(f"{name:13} {min(r):.2f} to {max(r):.2f} times as fast as the kernel as it is")

# %% [markdown]
# - `TRUST=0`: each tile's maxima are looked at, and there are no portions. 6 to 14 % slower at $D = 128$, 9 to 10 % at $D = 64$. At $D = 256$
#   that is how the kernel is, and `TRUST=1` gains nothing.
# - `LATE_TURN`: the turn after the first portion costs up to 8 % with two consumers. With three, at $D = 64$, it was worth 1 to 2 % before the kernel learnt
#   from its doubts; now it is worth less than 1 %.

# %% [markdown]
# - `PING_PONG=0`: taking turns is worth 2 % at $D = 64$ (`LATE_TURN` included), and nothing elsewhere any more.
# - `DYNAMIC=0`: without the counter three of the four causal shapes lose, the long one most: it has the most unequal parts. The counter is used with
#   a mask alone; `DYNAMIC=2` uses it always. Where that changes nothing in the kernel, what differs is noise: 1 %.

# %% [markdown]
# - `POLYNOMIAL=4`: slower at every shape, and at the causal ones its `lse` is refused by the rule. An exponential is one instruction, the
#   polynomial about nine, and a warp issues them one after the other. FlashAttention-4 reports a gain on Blackwell, whose tensor cores are
#   twice as fast beside the same unit for exponentials.

# %%
for run in RUNS:
    ratios = changed(run)
    head_dims = [shape[3] for shape, _ in hopper_results.ladder_speeds(run, "variants")]
    assert all((r < 0.99) == (d == 64) for r, d in zip(ratios["PING_PONG=0"], head_dims, strict=True))
    assert max(ratios["TRUST=0"]) < 0.97 and all(abs(r - 1) < 0.01 for r in ratios["TRUST=1"])
    assert all(0.99 < r < 1 for r in ratios["LATE_TURN=0"]) and min(ratios["LATE_TURN=1"]) < 0.95
    assert min(ratios["DYNAMIC=0"]) < 0.85 and max(ratios["POLYNOMIAL=4"]) < 1.01
    assert min(ratios["POLYNOMIAL=4"]) < 0.95
    some = [r for r in run["rows"] if r["part"] == "variants" and "POLYNOMIAL" in r["name"]]
    print(f"POLYNOMIAL=4: o at most {max(r['of_bound'] for r in some):.1f} of its bound, "
          f"lse up to {max(r['lse_of_bound'] for r in some):.1f} times its own")

# %% [markdown]
# ## 10 · What limits it now
#
# Nsight Compute says how long the tensor pipe is active, for each step and for cuDNN: $D = 128$, $N = 4096$, no mask.

# %%
PIPE = "tensor pipe, % of the time"

def profile(run):
    """The launches that were profiled, the fastest first."""
    rows = [r for r in run["rows"] if r["part"] == "profile" and "kernel" in r]
    return sorted(rows, key=lambda r: r["nanoseconds"])

for run in RUNS:
    rows = profile(run)[::-1]
    hues = [show.COLORS["green" if r["name"] == "cuDNN" else "blue"] for r in rows]
    fig, ax = plt.subplots(figsize=(8.6, 3.6))
    ax.barh([r["name"] for r in rows], [r[PIPE] for r in rows], color=hues)
    ax.set(xlim=(0, 100), xlabel=PIPE, title=f"the slowest kernel at the bottom: {run['machine']['gpu']}")
    plt.show()

# %% [markdown]
# *Green is cuDNN.* The faster a kernel, the busier the tensor pipe, with one large exception: step 1. It still has `mma.sync`, which
# keeps the pipe busy longer for the same FLOPs (section 1).

# %%
for run in RUNS:
    rows = {r["name"]: r for r in profile(run)}
    first, third, last = (rows[name] for name in ("p11_1_tma", "p11_3_operands", "p11_flash"))
    assert first[PIPE] > 0.9 * third[PIPE] and first["nanoseconds"] > 1.4 * third["nanoseconds"]
    stalls = {n.removeprefix("stalled: "): x for n, x in last.items() if n.startswith("stalled: ") and x}
    most = sorted(stalls, key=lambda n: -stalls[n])[:4]
    print(f"p11_flash: tensor pipe {last[PIPE]:.0f} % of the time")
    print("warps per issued instruction:", ", ".join(f"{n} {stalls[n]:.2f}" for n in most))
    assert last[PIPE] > 90 and most[0] == "wait"

# %% [markdown]
# So nine tenths of the time the tensor cores work. The rest is not one thing. Warps wait for the fixed latency of the
# instruction before (*wait*), for their turn or each other (*barrier*), and for what the tool calls global memory (*long scoreboard*; which
# instructions those are, we did not look up). *selected* are those that issued.
#
# At $D = 64$ (measured apart, $N = 8192$, `notes/phase_11_experiments.md`) the tensor pipe is busy 71 % of the time, and the unit for exponentials 71 % too.
# Both are needed for as long (step 12), so their work would have to overlap better.

# %% [markdown]
# So at $D = 128$ the pipe is busy nine tenths of the *clocks*. And the clock? Each switch of a transistor costs energy. On random numbers every kernel here draws 690 of the
# chip's 700 watts, and the chip lowers its clock until they are enough. On zeros, where few transistors switch, it draws 400 to 460 and the clock is higher. Each kernel alone
# for seconds, clock and power sampled by NVML meanwhile, beside the peak of the tensor cores: 4096 FLOPs per clock and SM.

# %%
for run in RUNS:
    found = hopper_results.clock_table(run)
    show.table(found.rows, found.columns, align=found.align)
    best = max(r["tflops"] for r in run["rows"] if r["part"] == "shapes" and r["name"] == "p11" and "ms" in r)
    peak = 4096 * run["machine"]["sms"] * run["machine"]["sm_clock_mhz"]["max"] / 1e6
    print(f"fastest of section 8: {best:.0f} TFLOP/s, {best / peak:.0%} of {peak:.0f} at the highest clock")
    rows = [r for r in run["rows"] if r["part"] == "clock" and r.get("clock")]
    at = {(r["shape"][3], r["inputs"], r["name"]): r for r in rows}
    for (d, kind, name), r in at.items():
        if (kind, name) == ("random", "p11"):
            zeros = at[d, "zeros", name]
            assert r["clock"]["median"] < zeros["clock"]["median"] and r["tflops"] < zeros["tflops"]
        assert (kind == "random") == (r["clock"]["watts"] > 600)

# %% [markdown]
# That is the race under a power cap: who does the same work with less energy gets a higher clock. A kernel that keeps the pipe busier gains less than its share, since it pays with its clock. Three things
# follow for measuring. Never time zeros. A median of the clock over a whole run says little: pauses and compilations are in it. And whoever comes behind the hottest kernel starts at its clock: so in section 8 each round
# has another order.

# %% [markdown]
# Two things we do not know. At $D = 128$ four of the five stay below 1980 MHz on zeros too, far from the cap. And our kernel has 79 % of the peak at its clock, 80 % on zeros, where
# Nsight Compute has the pipe busy for 91 % of one launch's clocks.

# %% [markdown]
# **Does the emulator count right?** The same small launch, emulated and under Nsight Compute: two heads of 200 rows, causal.

# %%
for run in RUNS:
    found = [r for r in run["rows"] if r["part"] == "counters" and "counters" in r]
    for name in found[0]["counters"]:
        equal = sum(r["counters"][name][0] == r["counters"][name][1] for r in found)
        print(f"{name:24} equal in {equal:2d} of {len(found)} launches")

# %% [markdown]
# What differs has reasons that can be seen, at least in part:
#
# - **Bytes loaded by TMA**: the emulator counts bytes of rows that exist, the chip whole boxes (as `expect_tx` does). In step 1 that explains it
#   to the byte: boxes of 64 rows, 128 bytes each.
# - **TMA instructions**: the chip counts each `bulk_commit` and each `tma_prefetch` too. Step 10 has 4 parts for 3 consumers each:
#   12 commits. The last step has 8 blocks of one consumer with one part each: 8 commits, and 4 prefetches a block. That is
#   all of the difference.
# - From the dynamic scheduler on, some counts depend on who is first.

# %%
for run in RUNS:
    first = next(r for r in run["rows"] if r["part"] == "counters" and r["name"] == "p11_1_tma")["counters"]
    boxes, (ours, theirs) = first["TMA instructions"], first["bytes loaded by TMA"]
    print(f"p11_1_tma: {boxes[1]:.0f} boxes, {theirs:.0f} bytes counted by the chip, {ours} by the emulator")
    assert boxes[0] == boxes[1] and theirs == boxes[1] * 64 * 64 * 2 > ours
    for r in (r for r in run["rows"] if r["part"] == "counters" and "counters" in r):
        ours, theirs = r["counters"]["TMA instructions"]
        stores = r["counters"]["bytes stored by TMA"][0] > 0
        more = 8 + 4 * 8 if r["name"] == "p11_flash" else 4 * 3 if stores else 0
        assert theirs == ours + more, r["name"]

# %% [markdown]
# ## 11 · Who finds the mistakes
#
# Four mistakes, planted one at a time in the kernels of this lecture. (The package's zoo has more, `check/zoo/hopper.py`; its
# tests say that each is found.) What does the emulator's watched build say?

# %%
FOUND = {}
for mutant in (m for m in MUTANTS if m.name in PLANTED):
    module = load_inline(mutant.source().text, check=True)
    try:
        module.forward(*torch.randn(3, 1, 1, 200, 64).half(), sms=1, echo=False)
    except SimtError:
        pass  # some of them end the launch: the report is there all the same
    FOUND[mutant.name] = module.report.findings[0]
    print(f"{mutant.name}: {FOUND[mutant.name].kind}")
assert len(FOUND) == len(PLANTED)

# %% [markdown]
# Each comes with a sentence, both lines and the threads. One of them:

# %%
print(FOUND["K is released before the wgmma are waited for"].message)

# %% [markdown]
# And on a GPU? NVIDIA's tool is `compute-sanitizer`. Its *racecheck* follows the loads and stores of threads. A tile that TMA
# brings has no thread that stores it, and an operand of `wgmma` no thread that loads it. The authors of FlashAttention have
# written down what they saw: copies by tensor map raise no hazard, whatever the barriers are; plain bulk copies raise false
# ones (see the references).

# %% [markdown]
# What it says of our four, and whether the broken kernels computed wrong results on the GPU at all, is for the record to say:

# %%
for run in RUNS:
    rows = hopper_results.planted_rows(run)
    for name in PLANTED:
        r = rows.get(name)
        said = ", ".join(f"{tool}: {text}" for tool, text in r["said"].items()) if r else "not measured yet"
        print(f"{name}: {'result ' + r['result'] + '; ' if r else ''}{said}")

# %% [markdown]
# On the GPU all four computed right results, on that day. *racecheck* and *memcheck* saw nothing; *synccheck* complains of the first alone, the wait
# for V that is missing.

# %%
for run in RUNS:
    rows = hopper_results.planted_rows(run)
    noticed = {name for name, r in rows.items()
               for text in r["said"].values() if not re.search(r"\b0 (errors|hazards)", text)}
    assert noticed == {"K is waited for, V is not"} and {r["result"] for r in rows.values()} == {"right"}
    print("noticed by compute-sanitizer:", *noticed)

# %% [markdown]
# Of the right kernels the record has these verdicts:

# %%
for run in RUNS:
    for v in hopper_results.verdicts(run)[-3:]:
        print(f"{v.goal}: {v.said} ({v.measured} runs)")

# %% [markdown]
# (For kernels in Gluon, Triton's own language of this level, there is a tool: its *concurrency sanitizer* follows barriers
# and asynchronous copies. For CUDA C++ we know of none but the emulator.)
#
# ## 12 · The whole kernel
#
# You have met nearly every line of `p11_flash.cu`, and of its header `tiles.cuh`. Read them once from top to bottom. **The constants**; `Tile` holds what
# depends on the number of consumers.

# %%
show.region(step("p11_flash"), "constants", "scheduler")
show.region(path("tiles.cuh"), "operands", "copy a tile")

# %% [markdown]
# **What lies where** in shared memory: two places for Q, the stages of K and of V, O, then the barriers. **Which rows** a part is. **The
# barriers**: a full one waits for one arrival and for bytes, an empty one for each consumer, or for each warp, since a warp may
# read Q and K for itself.

# %%
show.region(step("p11_flash"), "shared memory", "which rows", "barriers")

# %% [markdown]
# **The producer.** One thread, and all its waits are for `empty`. It asks the counter for the next part long before it needs
# the answer.

# %%
show.region(step("p11_flash"), "producer")

# %% [markdown]
# **A consumer** and what each lane keeps. Then **the main loop**. Follow one tile through it:
#
# | part | from step | what it does |
# |---|---|---|
# | *turns* | 7 | who may issue now |
# | *output* | 3, 6 | O += P V of the tile before: issues it only |
# | *scores* | 2, 6, 7 | S of this tile; waits for S alone |
# | *row maxima*, *rescale* | phase 9, 11 | masks where needed; moves the reference |
# | *probabilities* | 12, 15 | $2^{x - m}$ of a portion, and its rounding |
# | *trust* | 14, 15 | of a full tile the probabilities alone, unless a sum is too large; gives K's stage back |
# | *rescale O* | 6 | brings O under the new maximum, rounds the rest of P |

# %%
show.region(step("p11_flash"), "state", "operands of the scores", "main loop")

# %% [markdown]
# **The store**: `lse`, then O by way of shared memory and TMA. **The launch**: how many consumers, which heads together, and
# the counter set to 0.

# %%
show.region(step("p11_flash"), "store", "launch")
show.region(path("tiles.cuh"), "tensor maps")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - An mbarrier counts arrivals and bytes. A wait names a parity; a fresh barrier lets parity 1 pass.
# - TMA copies boxes of a described tensor, fills with zeros, and swizzles by address bits.
# - `wgmma` finds operands by descriptors. One bit makes V an operand as it lies. P stays in registers.
# - A stage has two barriers: full, for bytes, and empty, for readers.
# - Asynchronous work pays when someone else has something to do. That is what consumers, overlap and turns are for.

# %% [markdown]
# - Measure each idea again in the final kernel. Turns pay there at $D = 64$ alone, the polynomial nowhere.
# - The maximum is a matter of range, not of the result: look at it when a sum says that you must.
# - Where no unit is full, count what one warp does in a row, and let something else run beside it.

# %% [markdown]
# **What you can now do:** read a Hopper kernel's barriers like a protocol, say for each wait who ends it, and for each fence
# which write it is for.
#
# **Two questions to take along.** A kernel hangs on the GPU, only for long sequences: which counter do both sides have to
# agree on? A consumer gives a stage back right after it has *issued* the product that reads it: what may happen, and why
# might every test pass?

# %% [markdown]
# Left to explore: $D = 64$, where the exponentials and the products each need 71 % of the time and overlap only in part; $D = 256$ with a mask, where trust gained nothing; a backward pass with five products instead of seven;
# FP8, whose operands must be K-major; clusters, in which one copy serves several SMs. On your own GPU: `flashlab bench hopper`.

# %% [markdown]
# ## References
#
# - NVIDIA: *PTX ISA*, "Asynchronous warpgroup level matrix instructions", "mbarrier", "cp.async.bulk.tensor", "Memory
#   consistency model: proxies".
# - NVIDIA: *CUDA C++ Programming Guide*, "Asynchronous data copies using the tensor memory accelerator"; *CUDA Driver API*,
#   `cuTensorMapEncodeTiled`.
# - Thakkar, Kerr and others: *CUTLASS*, github.com/NVIDIA/cutlass: pipelines of full and empty barriers, the ping-pong
#   schedule, descriptors of the canonical layouts.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: *FlashAttention-3: Fast and Accurate Attention with Asynchrony and
#   Low-precision* (2024), arXiv 2407.08608: producer and consumers, ping-pong, the overlap of the two products.
# - Xiao, Tian, Chen, Han, Lewis: *Efficient Streaming Language Models with Attention Sinks* (2023), arXiv 2309.17453.
# - Hong, Dai, Xu, Mao, Li, Liu, Chen, Dong, Wang: *FlashDecoding++: Faster Large Language Model Inference on GPUs* (2023), arXiv
#   2311.01282: softmax with a reference that is known beforehand, and a way back where it does not hold.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao: *FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
#   Asymmetric Hardware Scaling* (2026), arXiv 2603.05451: conditional rescaling, exponentials by polynomial.
# - Dao and others: *flash-attention*, github.com/Dao-AILab/flash-attention: `hopper/`, `flash_attn/cute/`, and
#   `AI/RACECHECK_TMA_HAZARD.md`: what racecheck makes of copies by TMA.
# - NVIDIA: *Compute Sanitizer*, docs.nvidia.com/compute-sanitizer.
# - Triton: github.com/triton-lang/triton, `python/test/gluon/test_consan.py`: the concurrency sanitizer.
# - Luo, Fan, Li and others: *Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking* (2024),
#   arXiv 2402.13499.
