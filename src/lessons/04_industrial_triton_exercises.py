# %% [markdown]
# # Phase 4 · Industrial Triton: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("4.2")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# Some answers are plain Python, some are kernels. The check launches the kernels, on a GPU if there is one and in Triton's
# interpreter if not. Interpreted, it also watches every address. A kernel that passes is compiled for a real GPU at the end.
#
# | name | what it is |
# |:--|:--|
# | `seq_q`, `seq_k` (in kernels `M`, `N`) | number of queries; number of keys |
# | `heads`, `kv_heads` | query heads, and key heads, of one batch; `heads` is a multiple of `kv_heads` |
# | `start`, `stop` | a block of queries: rows `start` to `stop - 1`, all of which exist |
# | `BLOCK_M`, `BLOCK_N`, `BLOCK_D` | sides of the tiles, powers of two |
# | aligned at the end | the last query stands beside the last key: query `i` beside key `i + seq_k - seq_q` |

# %%
import torch

from flashlab.exercises import check, hint, progress

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 4.1
#
# Another order of programs than the lecture's. As `pid` goes up, what changes first is the query head within a group: heads that share a key head read the
# same tiles, so they run side by side, for the same block of queries. Next changes the block, *the last one first*, because under a causal mask it is the
# longest; next the key head; last the batch. Take `pid` apart, into whole numbers. `block` is 0 for a head's first queries.

# %% [markdown]
# ## 4.2
#
# Another mask. A *prefix* language model (PaliGemma is one) reads its prompt in both directions: every query sees the first `prefix` keys. Beyond
# them the mask is causal, aligned at the end. For the block of queries `start` to `stop - 1` return two positions:
#
# - `whole_end`: the largest multiple of BLOCK_N such that *every* row of the block sees *all* keys before it;
# - `end`: one past the last key that *some* row of the block sees; 0 if there is none.

# %% [markdown]
# ## 4.3
#
# Now the tiles between the two, with the mask of 4.2. This kernel stores 1 where query `start_m + r` sees key `start_n + c`, and 0 elsewhere, with
# M queries and N keys. Keys from N on do not exist, and `prefix` is at most N. (Rows from M on may hold anything.)
#
# *Is a comparison with N needed at all, for a row that exists?*

# %% [markdown]
# ## 4.4
#
# In DeepSeek's latent attention a score is a sum over 576 columns. Padded to 1024, a tile would not fit. So the columns come in pieces.
#
# One program computes `s` = Q Kᵀ for M ≤ BLOCK_M queries and N ≤ BLOCK_N keys, without a scale. Q and K are fp16, and have HEAD_DIM
# columns, any number; a tile of them has BLOCK_D columns, a power of two, and no tile of yours may have more, however wide HEAD_DIM is. A row of Q begins
# `stride_q` elements after the one before, and what lies between the rows is not yours to read. Rows of K (every `stride_k` elements) and of S, which is float32, follow one another
# without a gap.

# %% [markdown]
# ## 4.5
#
# The lecture asks which keys a block of queries sees. The backward pass asks the reverse: a block of *keys* `start` to `stop - 1`, and a window, aligned at
# the end: a query sees `left` keys before its own position, `right` keys after it, and the one beside it. Return `begin` and `end`: the
# queries `begin` to `end - 1` see at least one of these keys, and no others do. Where no query does, any `begin >= end` will do.
#
# (Libraries count differently. Where one says `left` keys *before* and another a window of so many keys *in all*, models were
# off by one: Hugging Face transformers, issue 39408.)

# %% [markdown]
# ## 4.6
#
# Store $y = \mathrm{cap} \cdot \tanh(x / \mathrm{cap})$ for BLOCK numbers. `tl` has no `tanh`, but it has `tl.exp` and
# `tl.exp2`. (The compiler also takes libdevice's and the chip's own: lecture 4, section 7. Neither can be interpreted.) Any x may come, infinity too. (vLLM's kernels returned NaN for scores above 88 times the cap until 2026: its issue
# 56578.)

# %% [markdown]
# ## 4.7
#
# A causal kernel with a soft-cap, one head. With a cap of 50 its outputs agree with the reference, so it was merged. With a cap
# of 2 a language model that was trained with it knew the next token suspiciously well. Read the symptoms, find the mistake,
# repair it. (`capped` does 4.6's work for a tile, and is right.)

# %%
from flashlab.exercises.phase_04 import capped

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_04: capped_causal_kernel

# %% [markdown]
# ## 4.8
#
# This kernel writes down at which element each of the first BLOCK rows of each head begins: program `pid` has head
# `pid % heads` of batch `pid // heads`. It was tested on small tensors. On a long video, whose Q, K and V are views into one
# large buffer, the output was noise, without an error. The author had thought of the problem, as you can see. Run the check
# for the symptoms, and repair the kernel.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_04: row_offsets_kernel

# %% [markdown]
# ## 4.9
#
# A softmax has to give its weight to something, even if no key fits. Models such as gpt-oss give it a way out: one more score,
# the *sink*, a learned number per head, the same for every query. It takes part in the softmax, and its value is zero:
#
# $$o_i = \frac{\sum_j e^{s_{ij}} v_j}{e^{\text{sink}} + \sum_j e^{s_{ij}}}, \qquad
#   \text{lse}_i = \ln \Big( e^{\text{sink}} + \sum_j e^{s_{ij}} \Big)$$
#
# Write the state before the loop, and the two lines after it. A sink of $-\infty$ is no sink. (Base $e$ here, no causal mask.)

# %% [markdown]
# ## 4.10
#
# **Write this one last, after 4.11 to 4.13:** they are the ladder to it. Then close them and the lecture, and write a kernel and its launcher from nothing. It takes q
# `[batch, heads, seq_q, head_dim]` and k, v `[batch, kv_heads, seq_k, head_dim]`, in fp16, with any strides (an offset may need 64 bits), any lengths, any `head_dim` from 8 to 128,
# any scale, and heads a multiple of kv_heads. `causal` is aligned at the end. A row that sees no key gives o = 0 and lse = −inf. Tiles that
# no row sees are not loaded: the check counts.
#
# It need not be the lecture's last kernel: one loop with one mask is enough. It asks for 4.13's kernel with one head size and 4.12's end of the
# loop, for a contiguous `o`, and for an empty page: nothing else is new.

# %% tags=["exercise"]
# BEGIN STARTER
# The kernel here.
# END STARTER
# BEGIN SOLUTION
# The kernel of 4.13, whose two head sizes may be one.
# RULE flashlab.exercises.phase_04_ladder: two_sizes_kernel
# END SOLUTION


# RULE flashlab.exercises.phase_04_ladder: my_attention

# %% tags=["check"]
# hint("4.10")
check("4.10", my_attention)

# %% [markdown]
# ## 4.11
#
# The cell below is phase 3's kernel: one head, no mask. Make of it a kernel for a whole model, and write its launcher: batch and heads on the grid, shared
# key heads by index, all four strides. The layout is that of most projections, `[batch, seq, heads, head_dim]`. No mask, and `head_dim` is 16, 32, 64 or 128.

# %%
# FROM flashlab.attention.triton_minimal: flash_attention_forward_kernel

# %% tags=["exercise"]
# BEGIN STARTER
# The kernel here.
# END STARTER
# BEGIN SOLUTION
# RULE flashlab.exercises.phase_04_ladder: heads_kernel
# END SOLUTION


# RULE flashlab.exercises.phase_04_ladder: heads_attention

# %% tags=["check"]
# hint("4.11")
check("4.11", heads_attention)

# %% [markdown]
# ## 4.12
#
# Begin with your kernel of 4.11, now in the lecture's layout `[batch, heads, seq, head_dim]`. Give it the mask of 4.2 and 4.3: every query sees the first
# `prefix` keys, and beyond them those up to its own position, aligned at the end. (`head_dim` is as in 4.11.) A row that sees no key gives o = 0 and lse = −inf. **The loop ends
# where the last row of the block stops seeing keys**: the check counts what is loaded.

# %% tags=["exercise"]
# BEGIN STARTER
# The kernel here.
# END STARTER
# BEGIN SOLUTION
# RULE flashlab.exercises.phase_04_ladder: prefix_kernel
# END SOLUTION


# RULE flashlab.exercises.phase_04_ladder: prefix_attention

# %% tags=["check"]
# hint("4.12")
check("4.12", prefix_attention)

# %% [markdown]
# ## 4.13
#
# DeepSeek's models multiply Q and K of 192 columns, and V of 128. Begin with your kernel of 4.12, without the prefix: causal or not. Q and K have
# `head_dim` columns, V and O have `value_dim`, and neither need be a power of two. The check takes both from 8 to 128, rows that see no key (o is 0,
# lse $-\infty$), and offsets beyond 32 bits. How many tiles the loop visits is not counted here.

# %% tags=["exercise"]
# BEGIN STARTER
# The kernel here.
# END STARTER
# BEGIN SOLUTION
# RULE flashlab.exercises.phase_04_ladder: two_sizes_kernel
# END SOLUTION


# RULE flashlab.exercises.phase_04_ladder: two_sizes_attention

# %% tags=["check"]
# hint("4.13")
check("4.13", two_sizes_attention)

# %% [markdown]
# ## Where you are
#
# You have every part of the lecture's kernel in your own words. Next, phase 5 gives it a gradient.
