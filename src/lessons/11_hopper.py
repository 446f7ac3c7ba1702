# %% [markdown]
# # Phase 11 · Hopper: TMA, mbarriers and wgmma
#
# The kernel of phase 9 runs on any GPU since Ampere. On Hopper a third of the tensor cores' speed is out of its reach, because
# its instruction, `mma.sync`, cannot feed them faster. Hopper has another one, `wgmma`, and two machines around it: an engine
# that copies whole tiles, and barriers in shared memory that can wait for bytes.
#
# This lecture looks at each of the three alone. Then it builds FlashAttention from them, step by step. What was tuned beyond that
# is in a notebook of its own: [11c](11c_tuned.ipynb), which nothing later needs.

# %% [markdown]
# ## What you will be able to do
#
# - Work out the phase and the parity of an mbarrier by hand, and say who waits for whom.
# - Describe a tensor to the copy engine, and say where each byte of a swizzled tile lies.
# - Write the descriptor of a tile for `wgmma`; say why neither K nor V has to be transposed.
# - Divide a kernel into a producer and consumers, say when a stage may be filled again, and write such a kernel.
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
import matplotlib.pyplot as plt
import torch

from flashlab.bench import hardware, hopper_results
from flashlab.bench.hopper_jobs import PLANTED
from flashlab.check import verify
from flashlab.check.mistakes.hopper import MUTANTS
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
# The stage is filled again only when this consumer has said that it is through: after its wait.) In the
# kernels' code `phase` is the parity.
# %% [markdown]
# The barrier that has just been made is in phase 0. So phase 0 is not complete, and "phase −1" counts as complete:
# a wait for parity 1 returns at once. Remember that; a producer's first wait uses it.
#
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
# in the beginning. (A thread that wanted to wait for phase 0 and only looks now waits for phase 2: if nobody arrives any
# more, for ever.)

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
# they are there. (In between nobody looks: a GPU might say either.)
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
# last rows of a tensor. The zeros count: always announce the bytes of the whole box. (A mask is needed all the same: a row of
# zeros in K has score 0, and $e^0 = 1$.)

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
# eight groups of banks, and is read at once.*

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
# read it that way. Draw it from a run: the tile holds the number of its row,
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
# before the barrier; behind the barrier one thread issues the copy (or fences there, alone, and then issues). (The manual has this in "Causality order".) Two others look alike:
# `fence_mbarrier_init` publishes barriers that have just been made, `wgmma_fence` registers.

# %% [markdown]
# Where does a forward pass need it? TMA loads and wgmma are both async: no fence. But O goes out through shared memory: the
# warps store it there, then TMA brings it to global memory. Between the two stands the fence. A kernel without it may be
# right in every test on one GPU. The emulator finds it (section 8).
#
# Reads need none. Step 1 reads a stage with `ldmatrix`, and then TMA fills it again: what has been read is in a register,
# where no copy can change it, and the barrier says that it has been read.

# %% [markdown]
# ## 7 · The ladder
#
# Each step is a whole file, from phase 8's loop to a kernel that is made for Hopper. Most bring one idea; step 5 brings
# several that need each other. Every step runs in the emulator's watched build, is compared
# with the oracle, and is counted: one head, $N = 384$, $D = 64$, no mask, one SM. Below the counts stand the step's TFLOP/s
# on a GPU, from the record (heads × D is 2048, batch × N 16384). In brackets: how many times as fast as the step before.

# %%
prepare(["p9_flash", *(s.name for s in steps(11)[:10]), "p11_14_trust"])
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
#   those to global memory, by threads or by TMA. Exponentials and maxima are not counted.

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
# backwards: it is the tile before), whose stage the next copy fills. That second half gets mbarriers of its own in step 4.

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
show.diff(step("p11_1_tma"), step("p11_2_wgmma"), "operands", "operands of the scores", "scores")
grow("p11_2_wgmma")

# %% [markdown]
# `columns_on(k)` is what is added to a descriptor for the next 16 columns: 32 bytes inside the row, and after four of them
# the next slab.
#
# ### Step 3: O by wgmma, P from registers, V as it lies
#
# Section 5, in the kernel. No `ldmatrix` is left.

# %%
show.diff(step("p11_2_wgmma"), step("p11_3_operands"), "operands", "output")
grow("p11_3_operands")
assert TABLE[-1][draw.COLUMNS.index("ldmatrix")] == 0

# %% [markdown]
# So far the kernel waits for everything it starts: a copy, a product, the next product. Nearly all further steps are about
# one question: **who has something to do while the others wait?**

# %% [markdown]
# ### Step 4: a producer
#
# A fifth warp does nothing but ask for tiles. It runs ahead of the **consumer**, the four warps that compute, until both
# stages are full. Each stage has two barriers for K and two for V. At `full` the consumer waits for the bytes. At `empty` the producer waits
# until the consumer is through. One lane of the warp asks: `elect_one` is true in one lane, and the compiler knows it.
#
# One thread says that the consumer is through, after its own wait: a `wgmma` is one operation of all four warps, so it has ended for all.

# %%
before, after = step("p11_3_operands"), step("p11_4_producer")
show.diff(before, after, "barriers", "producer", "load K and V", "scores")
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
#
# The producer alone gains hardly anything (the copies were one tile ahead before, too), and at $D = 64$ it loses. But now
# there can be several consumers.

# %% [markdown]
# ### Step 5: several consumers, and registers that move
#
# A block gets two consumers (three for $D = 64$), each with 64 rows of its own. All of them use the same tiles of K and V,
# so a copied tile serves more rows. And while one consumer computes exponentials, the tensor cores can work for
# another. Tiles have 128 keys now.

# %% [markdown]
# A consumer's accumulators need registers: 64 × 128 of S are 64 per thread, O of $D = 128$ as many, P half. A block of 384
# threads gets 65536 / 384 = 170 per thread, in multiples of 8: 168. The producer needs hardly any. With `setmaxnreg` it gives
# them away: 24 for it, 240 for each consumer. (160 of them are accumulators and P.) Registers change hands by warpgroups, so the producer
# is a whole warpgroup now, though a single thread of it works. (Without `__launch_bounds__(THREADS, 1)`
# ptxas leaves `setmaxnreg` out, and says so: C7508.) `tiles.cuh`, `products.cuh` and `softmax.cuh` have what stays.

# %%
show.diff(step("p11_4_producer"), step("p11_5_consumers"), "constants", "barriers", "producer")
grow("p11_5_consumers")
assert 128 * (24 + 2 * 240) <= 65536 and 128 * (32 + 3 * 160) <= 65536

# %% [markdown]
# ### Who works when
#
# The emulator has no clock, but keeps what each warp issued and waited for. A small model gives these events a time:
#
# - the tensor cores are one queue; an m64nNk16 takes $N / 2$ clocks;
# - exponentials are 16 per clock, shared by the consumers;
# - copies are one queue too, of 64 bytes per clock, and 600 clocks on the way;
# - everything else takes no time at all.
#
# That is a **model**, and a kind one: maxima, sums and roundings cost nothing in it. It shows who waits for whom; it does not predict
# speed: a real SM may hold several blocks. One block, 1024 keys, $D = 64$:

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
for name, found in list(REPLAYED.items())[:3]:
    print(f"{name:16} tensor cores busy {found.share:.0%} of the time from the first product on")
assert REPLAYED["p11_3_operands"].share < 0.5 < REPLAYED["p11_5_consumers"].share

# %% [markdown]
# ### Steps 6 and 7: two products in flight, and turns
#
# Step 6: a consumer issues S of tile $j$, then O += P V of the tile *before*, and waits for S alone: `wgmma_wait<1>`. While it
# computes exponentials, the tensor cores are busy with the other product.

# %%
show.diff(step("p11_5_consumers"), step("p11_6_overlap"), "main loop")
grow("p11_6_overlap")

# %% [markdown]
# The price: O lags one tile behind, so the correction is applied when that product is there. And P, S and O are all alive at
# the same time. It gains where there are two consumers and no mask; with three, or with a causal mask, it loses a little. It
# stays, because the next step builds on it.

# %% [markdown]
# Step 7, **ping-pong**: left alone, the consumers may fall into step: all issue products, then all compute exponentials, and the tensor cores idle.
# So they take turns. A consumer waits for its turn before it issues, and passes it on when it has issued, before it waits for results. Two
# operations on **named barriers** do it: `sync` counts and waits, `arrive` only counts. A block has 16 of them, 0 to 15.
# They are hardware, not mbarriers in shared memory. Number 0 is that of `__syncthreads`, so turns begin at 1.

# %%
show.diff(step("p11_6_overlap"), step("p11_7_ping_pong"), "turns", "scores")
grow("p11_7_ping_pong")

# %% [markdown]
# Barrier `1 + c` is consumer $c$'s turn. 256 threads meet there: the 128 of consumer $c$, who wait, and the 128 of the one
# before it, who only arrive. At the very end one turn is left over, and consumer 0 takes it: a barrier that somebody has
# arrived at must not be left behind.

# %%
draw.timelines({name: REPLAYED[name] for name in list(REPLAYED)[2:]}, clocks=(1000, 7000))
plt.show()

# %% [markdown]
# *Without turns (the two upper panels) the first scores of all three consumers are multiplied in
# small pieces, alternately. So all get them late and at the same time. Then all compute exponentials, and the tensor cores
# pause. With turns (below) consumer 0 has its scores early, and its exponentials begin while consumer 1's are multiplied. Black
# marks are waits for a turn, drawn wider than they are. In the final kernel turns are worth 2 % at* $D = 64$, *and nothing elsewhere (11c).*

# %%
for name, found in list(REPLAYED.items())[2:]:
    print(f"{name:16} in the model {found.clocks:.0f} clocks, tensor cores {found.share:.0%} of the time")
assert REPLAYED["p11_7_ping_pong"].clocks < REPLAYED["p11_6_overlap"].clocks
assert REPLAYED["p11_7_ping_pong"].share > REPLAYED["p11_6_overlap"].share

# %% [markdown]
# ### Steps 8 and 9: blocks that stay, and take the next part
#
# So far each block begins with barriers and tensor maps, and ends with a store, while the tensor cores wait. Now one block
# per SM stays, and takes **part** after part of the work: 128 or 192 rows of one head. Heads are worked on in groups whose K and V fit
# into L2, the cache of the whole chip, together (`heads_together`).
#
# The producer runs on into the next part while the consumers finish this one. Causal parts are unequal, so those with the
# most keys go first (phase 9).

# %%
show.diff(step("p11_7_ping_pong"), step("p11_8_persistent"), "which rows", "producer", "main loop")
grow("p11_8_persistent")

# %% [markdown]
# "The n-th use of a stage" has changed: `nth` counts tiles over *all* parts. Both sides must count the same way, or
# their parities part company (exercise 11.2).

# %% [markdown]
# Step 9: a fixed share of the parts is the fastest only if all parts take equally long. Now a counter in global memory says which
# part is next. The producer asks, and tells the consumers through shared memory: two slots, each with two more barriers.

# %%
show.diff(step("p11_8_persistent"), step("p11_9_scheduler"), "producer", "main loop")
grow("p11_9_scheduler")

# %% [markdown]
# ### Step 10: O leaves by TMA
#
# A lane holds pairs of columns of O. `stmatrix`, the way back of `ldmatrix`, puts them into shared memory in the swizzled
# order. Then one thread has the copy engine store the consumer's 64 rows.

# %% [markdown]
# There are two waits. `bulk_wait_read` ends when the engine has *read* the buffer, so that it may be filled again; `bulk_wait` ends when
# the bytes are *written*. The first is enough before the next O, and before a block ends, when its shared memory goes to another block. What was
# written is there for the next kernel in any case; the second is for a thread that reads it back. (The kernel's last line waits for it all
# the same.)
#
# This is the place of section 6: ordinary stores, then the async proxy. Find the fence.

# %%
show.diff(step("p11_9_scheduler"), step("p11_10_epilogue"), "store")
grow("p11_10_epilogue")

# %% [markdown]
# ### Steps 11 and 14: look at a maximum only when a sum says so
#
# These two are tuning: no exercise needs them. (12 and 13 are 11c's.) Step 11 is phase 9's idea once more: O is rescaled only where a maximum
# has grown by more than 8, in units of $\log 2$. It still *looks* at every maximum: 64 comparisons per lane, then shuffles, and only then can the
# first exponential begin. But after the first tiles a maximum usually moves little.

# %% [markdown]
# So step 14 computes a full tile under the maximum of the tiles before (`TRUST`). If that was too low, a sum tells: a lane adds up its own part of a
# row, and if that is beyond $2^{14}$ (or NaN), the warp does not trust. fp16 ends at 65504, so no number of P has overflowed then. By that time S has
# been overwritten. So the warp computes it again, alone, with phase 8's `ldmatrix` and `mma.sync`, and takes the usual way.

# %% [markdown]
# In exact arithmetic any reference gives the same result. In floats it must not be far above the maximum, where everything might become 0 (bf16 has room there: 11c, step 16); the
# maximum of tiles before never is. And it must not be so far below that sums overflow or digits are lost. The idea is from FlashDecoding++, which
# takes a constant.

# %%
show.region(step("p11_14_trust"), "trust", "scores again")
grow("p11_14_trust")

# %% [markdown]
# (In brackets: over step 13.) What does it cost when trust is misplaced? Scores that grow from tile to tile, against random ones: `mma` are the
# products of warps that computed S again.

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
# 10240 is all of them: 40 warps have 4 trusted tiles each. On random scores nothing is computed twice. What it costs on a GPU, 11c measures.

# %% [markdown]
# ## 8 · Who finds the mistakes
#
# Four mistakes, planted one at a time in the kernels of this lecture. What does the emulator's watched build say?

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
print("\nOne of them:", FOUND["K is released before the wgmma are waited for"].message)

# %% [markdown]
# And on a GPU? NVIDIA's tool is `compute-sanitizer`. Its *racecheck* follows the loads and stores of threads. A tile that TMA
# brings has no thread that stores it, and an operand of `wgmma` no thread that loads it. On the H200, on the day of the record, three of the
# four kernels computed right results, and *racecheck* saw nothing; *synccheck* complained of one, the wait for V that is missing. For
# kernels in Gluon there is Triton's *concurrency sanitizer*; for CUDA C++ we know of no tool but the emulator.

# %% [markdown]
# ## 9 · The whole kernel
#
# You have met nearly every line of `p11_10_epilogue.cu`. Read it once from top to bottom. **The constants**, and how a tile lies and is asked for:

# %%
show.region(step("p11_10_epilogue"), "constants")
show.region(path("switches.cuh"), "switches")
show.region(path("tiles.cuh"), "operands")
show.region(path("maps.cuh"), "slabs", "copy a tile")

# %% [markdown]
# **What lies where** in shared memory: Q, the stages of K and of V, O, then the barriers. **Which rows** a part is. **The barriers**: a full one waits
# for one arrival and for bytes, an empty one for each consumer.

# %%
show.region(step("p11_10_epilogue"), "shared memory", "which rows", "barriers")

# %% [markdown]
# **The producer.** One thread, and all its waits are for `empty`.

# %%
show.region(step("p11_10_epilogue"), "producer")

# %% [markdown]
# **A consumer** and what each lane keeps. Then **the main loop**. Follow one tile through it:
#
# | part | from step | what it does |
# |---|---|---|
# | *turns* | 7 | who may issue now |
# | *output* | 3, 6 | O += P V of the tile before: issues it only |
# | *scores* | 2, 6, 7 | S of this tile; waits for S alone |
# | *row maxima*, *rescale*, *probabilities* | phase 9 | masks where needed; the online softmax |
# | *rescale O* | 6 | waits for O, brings it under the new maximum, rounds P |

# %%
show.region(step("p11_10_epilogue"), "state", "operands of the scores", "main loop")

# %% [markdown]
# **The functions** that the loop calls are in two headers.

# %%
show.region(path("products.cuh"), "issue scores", "issue output")
show.region(path("softmax.cuh"), "row maxima", "probabilities")

# %% [markdown]
# **The store**: `lse`, then O by way of shared memory and TMA. **The launch**: which heads together, and the counter set to 0.

# %%
show.region(step("p11_10_epilogue"), "store", "launch")
show.region(path("maps.cuh"), "tensor maps")

# %% [markdown]
# Does it compute attention? The checker's cases of up to 300 rows, at $D = 64$: causal and not, grouped heads, ragged and empty lengths, strides,
# large scores, rows that see no key. On a Hopper GPU it runs natively, elsewhere in the emulator.

# %%
final = load_inline(step("p11_10_epilogue"), backend=BACKEND)
print(verify(final.forward, causal=True, gqa=True, empty=True, max_seq=300).verdict)

# %% [markdown]
# ## 10 · How fast is it?
#
# `p11_flash`, which the notebook 11c tunes out of this kernel, beside its peers, from the record: cuDNN, FlashAttention-2 as PyTorch has it,
# FlashAttention-4, and the course's own `p9_flash` and Triton kernel. FlashAttention-3 was not measured.

# %%
WHO = "p11", "cuDNN", "FlashAttention-2", "FlashAttention-4", "p9_flash", "triton"
for run in RUNS:
    drawn = hopper_results.lines(run, WHO)
    panels(drawn, ylabel="TFLOP/s", title=f"forward, bf16, {run['machine']['gpu']}")
    plt.show()
    print("not measured yet:", [name for name in WHO if not any(name in who for who in drawn.values())])

# %% [markdown]
# *TFLOP/s over the length; upper row without a mask, lower row causal.* `p11` *is* `p11_flash`. *It is far above FlashAttention-2 and* `p9_flash`, *which
# feed the tensor cores by* `mma.sync`, *and ahead of cuDNN and FlashAttention-4 at nearly all shapes* (11c has the numbers). Of it the ladder up to
# step 10 has this share:

# %%
for run in RUNS:
    rows = hopper_results.ladder_table(run)
    last = {r[0]: r[2:] for r in rows.rows}
    for name in ("p11_5_consumers", "p11_10_epilogue"):
        of = [float(a.split()[0]) / float(b.split()[0]) for a, b in zip(last[name], last["p11_flash"])]
        print(f"{name}: {min(of):.0%} to {max(of):.0%} of p11_flash's TFLOP/s")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - An mbarrier counts arrivals and bytes. A wait names a parity; a fresh barrier lets parity 1 pass.
# - TMA copies boxes of a described tensor, fills with zeros, and swizzles by address bits.
# - `wgmma` finds operands by descriptors. One bit makes V an operand as it lies. P stays in registers.
# - A stage has two barriers: full, for bytes, and empty, for readers.
# - Asynchronous work pays when someone else has something to do. That is what consumers, overlap and turns are for.
# - The maximum is a matter of range, not of the result: look at it when a sum says that you must.

# %% [markdown]
# **What you can now do:** read a Hopper kernel's barriers like a protocol, say for each wait who ends it, and for each fence
# which write it is for. The exercises build up to writing step 5 from an empty page.
#
# **Two questions to take along.** A kernel hangs on the GPU, only for long sequences: which counter do both sides have to
# agree on? A consumer gives a stage back right after it has *issued* the product that reads it: what may happen, and why
# might every test pass?

# %% [markdown]
# Left to explore: FP8, whose operands must be K-major; clusters, in which one copy serves several SMs; and 11c. On your own GPU:
# `flashlab bench hopper`.

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
# - Hong, Dai, Xu, Mao, Li, Liu, Chen, Dong, Wang: *FlashDecoding++: Faster Large Language Model Inference on GPUs* (2023), arXiv
#   2311.01282: softmax with a reference that is known beforehand, and a way back where it does not hold.
# - Dao and others: *flash-attention*, github.com/Dao-AILab/flash-attention: `hopper/`, `flash_attn/cute/`, and
#   `AI/RACECHECK_TMA_HAZARD.md`: what racecheck makes of copies by TMA.
# - NVIDIA: *Compute Sanitizer*, docs.nvidia.com/compute-sanitizer.
# - Triton: github.com/triton-lang/triton, `python/test/gluon/test_consan.py`: the concurrency sanitizer.
# - Luo, Fan, Li and others: *Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking* (2024),
#   arXiv 2402.13499.
