# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 8 · Pipelines and banks: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one sentence what is
# wrong; `hint("8.4")` gives the next hint, `progress()` shows where you are.
#
# The CUDA answers are a few lines of text in a Python string. The check puts them in the place of the same lines of a kernel of the
# series, builds the whole file twice for the emulator, and runs it. No GPU is needed. In CUDA text the mark is `// YOUR CODE HERE`:
# replace it, and leave the rest of the string as it is.

# %%
from flashlab.figures import show
from flashlab.exercises import check, hint, progress
from flashlab.kernels.series import step

# %% [markdown]
# ## 8.1 Count the wavefronts of a padded tile
#
# *Warm-up · 10 min*
#
# The oldest cure for bank conflicts is padding: make a row a little longer than it has to be. Shared memory has 32 banks of 4 bytes;
# address $a$ is in bank $a / 4 \bmod 32$. One 8×8 tile of an `ldmatrix` is eight rows of 16 bytes, row $r$ at address
# $r \cdot \mathrm{row\_bytes}$. A wavefront delivers each bank once. How many wavefronts does the tile need, when `row_bytes` is a multiple of 16?

# %% tags=["exercise"]
def wavefronts(row_bytes):
    """Wavefronts of eight 16-byte rows at 0, row_bytes, ..., 7 * row_bytes: 1 (no conflict) to 8."""
    # BEGIN SOLUTION
    groups = [row * row_bytes // 16 % 8 for row in range(8)]  # of four banks
    return max(groups.count(g) for g in groups)
    # END SOLUTION

# %% tags=["check"]
# hint("8.1")
check("8.1", wavefronts)

# %% [markdown]
# Padding a row of `head_dim` 64 from 128 to 144 bytes would do. It costs an eighth of the tile's shared memory, and every address
# becomes a multiplication by 144. A swizzle costs neither.
#
# ## 8.2 A swizzle of your own
#
# *Core · 15 min*
#
# A row of `head_dim` 64 is eight chunks of 16 bytes, one of 128 is sixteen. `place(row, chunk)` says where in its row a chunk is kept. Two
# things must hold: in every row each place is used once; and the same chunk of the eight rows $8i \dots 8i + 7$ is in eight different groups
# of four banks (place $p$ is in group $p \bmod 8$). The course's answer is not the only one.

# %% tags=["exercise"]
def place(row, chunk):
    """The place, 0 to chunks - 1, of `chunk` in `row`; for 8, 16 and 32 chunks a row."""
    # BEGIN SOLUTION
    return chunk ^ (row % 8)
    # END SOLUTION

# %% tags=["check"]
# hint("8.2")
check("8.2", place)

# %% [markdown]
# ## 8.3 The swizzle in CUDA
#
# *Core · 10 min*
#
# Now as a line of the kernel. `at(row, column)` is the byte at which element (row, column) of a tile lies, counted from the tile's start; `column`
# is a multiple of 8, an element has 2 bytes, a row `ROW_BYTES`. In `p8_4_swizzle.cu` all who write and all who read go through it. The check wants
# the right result, and as many wavefronts as the ideal.

# %% tags=["exercise"]
# BEGIN STARTER
at = r"""
__device__ __forceinline__ int at(int row, int column) {
    return // YOUR CODE HERE
}
"""
# END STARTER
# BEGIN SOLUTION
at = r"""
__device__ __forceinline__ int at(int row, int column) {
    return row * ROW_BYTES + (column / 8 ^ row % 8) * 16;
}
"""
# END SOLUTION

# %% tags=["check"]
# hint("8.3")
check("8.3", at)

# %% [markdown]
# ## 8.4 How many groups may be in flight?
#
# *Core · 15 min*
#
# The loop of `p8_3_stages.cu`, for 1, 2, 3 or 4 stages:

# %%
show._between(step("p8_3_stages").path, "for (int j = 0; j < STAGES - 1; j++)", "if (STAGES > 1) load_kv(j")

# %% [markdown]
# Its wait is to be `cp_async_wait<IN_FLIGHT>()`. Write `IN_FLIGHT` as an expression in `STAGES`: small enough that tile $j$ has arrived, and no
# smaller, so that the copies of later tiles go on.

# %% tags=["exercise"]
# BEGIN STARTER
in_flight = r"""
constexpr int IN_FLIGHT = // YOUR CODE HERE
"""
# END STARTER
# BEGIN SOLUTION
in_flight = r"""
constexpr int IN_FLIGHT = STAGES == 1 ? 0 : STAGES - 2;
"""
# END SOLUTION

# %% tags=["check"]
# hint("8.4")
check("8.4", in_flight)

# %% [markdown]
# ## 8.5 A stage that is overwritten
#
# *Bug hunt · 15 min*
#
# "Start the copy as early as you can", somebody thought, and moved the refill to the top of the loop. On a GPU this passed every test
# of that day, and failed one run in some thousands. Run the check, read what the emulator says, repair what tile $j$'s round begins with. All copies of later tiles
# should still go on while tile $j$ is worked on.

# %% tags=["exercise"]
# BEGIN STARTER
loop_head = r"""
        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
        load_kv(j + STAGES - 1);
        cp_async_wait<STAGES - 1>();
        __syncthreads();
"""
# END STARTER
# BEGIN SOLUTION
loop_head = r"""
        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
        cp_async_wait<STAGES - 2>();
        __syncthreads();                   // every thread's part of tile j is here, and nobody reads tile j - 1 any more
        load_kv(j + STAGES - 1);           // repaired: so only now may its stage be filled again
"""
# END SOLUTION

# %% tags=["check"]
# hint("8.5")
check("8.5", loop_head)

# %% [markdown]
# ## 8.6 Right threads, wrong numbers
#
# *Bug hunt · 15 min*
#
# No race, no address out of bounds, every copy waited for. And every number is wrong. `at` is what the `ldmatrix` of the kernel use. Repair it so
# that the result is right *and* no bank is asked twice.

# %% tags=["exercise"]
# BEGIN STARTER
tile_addresses = r"""
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + column * 2; }

template <int ROWS>
__device__ __forceinline__ void load_tile(char* tile_smem, const T* tile_gmem, int64_t row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        const int row = (i + threadIdx.x) / CHUNKS, column = (i + threadIdx.x) % CHUNKS * 8;
        const bool exists = row < rows;
        const T* from = tile_gmem + (exists ? row : 0) * row_stride + column;
        const int to = row * ROW_BYTES + (column / 8 ^ row % 8) * 16;
        cp_async<16>(smem_u32(tile_smem + to), from, exists ? 16 : 0);
    }
}
"""
# END STARTER
# BEGIN SOLUTION
tile_addresses = r"""
__device__ __forceinline__ int at(int row, int column) { return row * ROW_BYTES + (column / 8 ^ row % 8) * 16; }  // repaired

template <int ROWS>
__device__ __forceinline__ void load_tile(char* tile_smem, const T* tile_gmem, int64_t row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS; i += THREADS) {
        const int row = (i + threadIdx.x) / CHUNKS, column = (i + threadIdx.x) % CHUNKS * 8;
        const bool exists = row < rows;
        const T* from = tile_gmem + (exists ? row : 0) * row_stride + column;
        cp_async<16>(smem_u32(tile_smem + at(row, column)), from, exists ? 16 : 0);  // repaired: one function for both sides
    }
}
"""
# END SOLUTION

# %% tags=["check"]
# hint("8.6")
check("8.6", tile_addresses)

# %% [markdown]
# ## Where you are
#
# You have the whole kernel. Phase 9 puts it into a transformer and looks at what is left with the profiler; phase 10 leaves `mma.sync` behind for
# Hopper's own instructions.

# %% tags=["nbval-ignore-output"]
progress(8)
