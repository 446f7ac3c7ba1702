# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 11 · Hopper: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong; `hint("11.3")` gives the next hint, `progress()` shows where you are.
#
# The first exercises are Python. The CUDA answers are a few lines of text in a Python string: in CUDA text the mark is
# `// YOUR CODE HERE`. Everything runs in the emulator, which knows Hopper's instructions. No GPU is needed.

# %%
from flashlab.exercises import check, hint, progress
from flashlab.exercises.phase_11 import log
from flashlab.figures import show
from flashlab.kernels import path

# %% [markdown]
# ## 11.1 An mbarrier by hand
#
# *Warm-up · 15 min*
#
# Write a model of an mbarrier. A script is a list of operations on a new barrier, each with a number of bytes:
#
# | operation | what happens |
# |:--|:--|
# | `("arrive", 0)` | a thread arrives |
# | `("expect_tx", n)` | n bytes are announced |
# | `("arrive_expect_tx", n)` | both |
# | `("copy", n)` | n bytes have been delivered |
#
# A phase wants `arrivals` arrivals, and all bytes that were announced. After *each* operation, say of parity 0 and of parity 1
# whether a wait for it would pass.

# %% tags=["exercise"]
def complete(script, arrivals):
    """One pair for each operation: (is parity 0 complete?, is parity 1 complete?) after it."""
    # BEGIN SOLUTION
    phase, missing, bytes_under_way, seen = 0, arrivals, 0, []
    for operation, n in script:
        if operation in ("arrive", "arrive_expect_tx"):
            missing -= 1
        if operation in ("expect_tx", "arrive_expect_tx"):
            bytes_under_way += n
        if operation == "copy":
            bytes_under_way -= n
        if missing == 0 and bytes_under_way == 0:
            phase, missing = phase + 1, arrivals
        latest = phase - 1  # the latest complete phase; -1 for a new barrier
        seen.append((latest % 2 == 0, latest % 2 == 1))
    return seen
    # END SOLUTION

# %% tags=["check"]
# hint("11.1")
check("11.1", complete)

# %% [markdown]
# ## 11.2 Which parity, how many bytes?
#
# *Core · 15 min*
#
# A producer fills stages in a ring, consumers empty them. Each stage has two barriers: `full`, which the producer's copies complete,
# and `empty`, which the consumers complete when they are through with the tile. In iteration `i` (0, 1, 2 ...) the consumer waits for
# `full` of its stage, reads, and arrives at `empty`. The producer waits for `empty`, then asks for tile `i`. Both run the same loop,
# and no arrival is made before it.
#
# And how many bytes does the producer announce for a tile? `rows_left` rows of the tensor are left, which may be fewer than the box
# has.

# %% tags=["exercise"]
def waits(i, stages):
    """(the stage of iteration i, the parity a consumer waits for, the parity the producer waits for)."""
    # BEGIN SOLUTION
    use = i // stages  # how often the stage has been used before: each use is a phase
    return i % stages, use % 2, (use - 1) % 2
    # END SOLUTION


def tile_bytes(box_rows, head_dim, rows_left):
    """Bytes to announce for a tile of `box_rows` rows of 16-bit numbers, of which `rows_left` exist."""
    # BEGIN SOLUTION
    return box_rows * head_dim * 2  # the zeros count
    # END SOLUTION

# %% tags=["check"]
# hint("11.2")
check("11.2", waits, tile_bytes)

# %% [markdown]
# ## 11.3 Name the tile
#
# *Core · 30 min*
#
# Three tiles of 16-bit numbers lie in shared memory, as TMA has written them. Each begins at a multiple of 1024 bytes, `tile`.
#
# | function | tile | swizzle | role as B |
# |:--|:--|:--|:--|
# | `k_columns` | 64 rows of 64 columns | 128 bytes | K-major: a row is one n, its columns are k |
# | `v_rows` | 64 rows of 192 columns, as three slabs [64, 64], one behind the other | 128 bytes | MN-major: a row is one k, its columns are n |
# | `narrow_columns` | 64 rows of 32 columns: a row has 64 bytes | 64 bytes | K-major |
#
# Each function returns the descriptor of step `k`: the operand whose K are 16k to 16k + 15. The check multiplies it by the identity, so
# it sees which tile you have named.

# %% tags=["exercise"]
# BEGIN STARTER
descriptors = r"""
// smem_descriptor(address, swizzle, leading_bytes, stride_bytes)
__device__ uint64_t k_columns(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
__device__ uint64_t v_rows(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
__device__ uint64_t narrow_columns(uint32_t tile, int k) {
    return // YOUR CODE HERE
}
"""
# END STARTER
# BEGIN SOLUTION
descriptors = r"""
// smem_descriptor(address, swizzle, leading_bytes, stride_bytes)
__device__ uint64_t k_columns(uint32_t tile, int k) {
    return smem_descriptor(tile + 32 * k, SWIZZLE_128, 16, 8 * 128);
}
__device__ uint64_t v_rows(uint32_t tile, int k) {
    return smem_descriptor(tile + 16 * 128 * k, SWIZZLE_128, 64 * 128, 8 * 128);
}
__device__ uint64_t narrow_columns(uint32_t tile, int k) {
    return smem_descriptor(tile + 32 * k, SWIZZLE_64, 16, 8 * 64);
}
"""
# END SOLUTION

# %% tags=["check"]
# hint("11.3")
check("11.3", descriptors)

# %% [markdown]
# ## 11.4 Three budgets
#
# *Core · 25 min*
#
# Shared memory of a block holds Q, `block_m` rows; for each stage a tile of K and a tile of V, `block_n` rows each; and the barriers,
# 8 bytes each: one for Q, four for a stage. Numbers have 16 bits. How many stages fit into `shared_bytes`?
#
# A block has `consumers` warpgroups and one more for the producer, 128 threads each. At the launch every thread gets as many of the
# 65536 registers as it can, a multiple of 8. Then the producer's warpgroup keeps `producer` registers per thread. How many can each
# consumer thread take with `setmaxnreg`?
#
# A consumer has 64 rows. O (`head_dim` columns, float), S of the next tile (`block_n` columns, float) and P of this tile (`block_n`
# columns, 16 bits) are in its 128 threads' registers at the same time, and `others` more per thread. How large can `block_n` be? It
# is a multiple of 16.

# %% tags=["exercise"]
def most_stages(block_m, block_n, head_dim, shared_bytes):
    """How many stages fit; 0 if none does."""
    # BEGIN SOLUTION
    once = block_m * head_dim * 2 + 8
    per_stage = 2 * block_n * head_dim * 2 + 4 * 8
    return max(0, (shared_bytes - once) // per_stage)
    # END SOLUTION


def consumer_registers(consumers, producer):
    """Registers per thread of a consumer, a multiple of 8 and at most 256."""
    # BEGIN SOLUTION
    threads = 128 * (consumers + 1)
    at_launch = 65536 // threads // 8 * 8
    left = at_launch * threads - 128 * producer
    return min(256, left // (128 * consumers) // 8 * 8)
    # END SOLUTION


def widest_tile(head_dim, registers, others):
    """The largest block_n, a multiple of 16."""
    # BEGIN SOLUTION
    left = registers - others - head_dim // 2
    return left * 4 // 3 // 16 * 16  # a key takes 1/2 register for S and 1/4 for P
    # END SOLUTION

# %% tags=["check"]
# hint("11.4")
check("11.4", most_stages, consumer_registers, widest_tile)

# %% [markdown]
# ## 11.5 Who waits for whom?
#
# *Core · 25 min*
#
# The emulator keeps a log of what each warp does. Here is that of a small pipeline with two stages: warps 0 and 1 consume, warp 2
# produces. An event is (warp, what it did, the barrier's address, the parity it waits for). An arrival has in the last place the
# bytes that it announces.

# %%
events, arrivals = log(stages=2, consumers=2, tiles=3)
for i, event in enumerate(events):
    print(i, event)
print("arrivals per phase, of each barrier:", arrivals)

# %% [markdown]
# A wait is for one phase of a barrier, so for the warps whose arrivals make up this phase. Say it for each wait that has passed.
# (The copies that such a phase also waits for were asked for by one of these warps.)

# %% tags=["exercise"]
def waited_for(events, arrivals):
    """For each "mbarrier-passed", in the order of the log: (its warp, the set of the warps that the phase waited for)."""
    # BEGIN SOLUTION
    arrived = {bar: [] for bar in arrivals}
    found = []
    for warp, did, bar, _ in events:
        if did == "arrive":
            arrived[bar].append(warp)
        if did == "mbarrier-passed":
            phase = len(arrived[bar]) // arrivals[bar] - 1  # the latest complete one
            first = phase * arrivals[bar]
            found.append((warp, set(arrived[bar][first : first + arrivals[bar]]) if phase >= 0 else set()))
    return found
    # END SOLUTION

# %% tags=["check"]
# hint("11.5")
check("11.5", waited_for)
