# %% [markdown]
# # Phase 12 · Decoding: exercises
#
# Fill in each cell that says `YOUR CODE HERE`, or mend the one that is there, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("12.4")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# The names are the lecture's:
#
# | name | what it is |
# |:--|:--|
# | `length` | how many keys a sequence has |
# | `page`, `table` | rows per key head in a page; the numbers of a sequence's pages, in order |
# | `group`, `queries` | query heads per key head; queries per sequence, the last beside the last key (there may be more of them than keys) |
# | `splits` | into how many parts a sequence's keys are cut |
# | `lse` | the log of the sum of exponentials |

# %%
import itertools
import math
from collections import Counter

import torch

from flashlab.exercises import check, hint, progress
import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 12.1
#
# The lecture counts one query, in 16 bits. Now any number of queries per sequence (a draft, a part of a prompt), and numbers of `itemsize` bytes.
# As there, both products count, a multiply-add as two operations, and of the memory K and V alone.
# How many queries does it take until the tensor cores, and not the memory, are the wall?

# %% [markdown]
# ## 12.2
#
# From a key's number to the element at which it begins, and what the pages cost.

# %% [markdown]
# ## 12.3
#
# Splits of a short sequence get no key. A whole sequence may have none. So any part may be empty, and all of them too: the result is then 0,
# with an lse of $-\infty$. Nobody writes o of an empty part. In the check it is NaN.

# %% [markdown]
# ## 12.4
#
# The lecture's rule counts time. A simpler one fills the chip just once: no block waits for another one to end. Write that one.
#
# When it is solved, compare: for 8 programs of 128 tiles and 132 slots, what does `splits_for` of the lecture say, and
# which of its terms makes the difference?

# %% [markdown]
# ## 12.5
#
# The lecture's tile goes through the queries of one head, then through those of the next. FlashAttention packs them the other way: the heads of one
# query stand together. (Then the rows of a tile see nearly the same keys.) Name each row.

# %% [markdown]
# ## 12.6
#
# In this CUDA kernel each warp works for itself: its lanes have stored their part of 32 columns in global memory, `part_o` and `part_lse`. Each of `splits` warps has such a part of the same columns. What follows your lines is `if (!last) return;`, then the merge, which
# reads the parts of *all* of these warps.
#
# Set `last`, a `bool` of each thread, declared already. `counter` points to an `int` that these warps share: 0 before the launch, and 0 again behind it, so that the
# launch can be repeated. One lane counts for its warp: you have `lane` and `splits`; `atomicAdd(counter, 1)` returns the old value. No
# barrier of the block. (A shuffle or a vote brings a number to the other lanes, and orders no memory.)
#
# The check runs it in the emulator, which sees which writes are published before which reads, and who acquires them.

# %% tags=["exercise"]
arrive = r"""
// BEGIN SOLUTION
    __syncwarp();                                              // lane 0 is shown what its warp has written,
    int before = 0;
    if (lane == 0) {
        __threadfence();                                       // and shows it to all that see its count
        before = atomicAdd(counter, 1);
        __threadfence();                                       // sees what the counts before it show
        if (before == splits - 1) *counter = 0;                // for the next launch
    }
    last = __shfl_sync(~0u, before, 0) == splits - 1;
    __syncwarp();                                              // what lane 0 sees, all see
// END SOLUTION
"""

# %% [markdown]
# ## 12.7
#
# Count what a pager does, one token at a time, behind each operation. Forks share pages. Which page may be written to, and which has to be copied
# first?

# %% [markdown]
# ## 12.8
#
# A batch has one sequence of 8192 keys and fifteen short ones. Splits are the same for all, so that the programs of the long one work on when all
# others are through. A persistent grid deals out *tiles* instead. Which keys does program `p` read?

# %% [markdown]
# ## 12.9
#
# Close the lecture. One query per sequence, a group's heads as rows, pages, lengths on the device, splits: a program computes the
# part of one sequence, key head and split. The programs stand on one axis, in any order. Here a page has the key heads side by
# side: `[PAGE, kv_heads, HEAD_DIM]`, other than in the lecture. All tensors are contiguous, and float32: products with `input_precision="ieee"`.
#
# Shares are whole tiles of `BLOCK_N` keys, equal and rounded up; tiles are counted from the sequence's first key. A share may be empty: o is 0
# there, stored, and lse is $-\infty$. `BLOCK_M` is at least `group`, and `HEAD_DIM` a power of two. Scores times `scale_log2` are in units of log 2; lse is a natural logarithm.
# Entries of the table that no key needs are -1, and what no key has in the cache is NaN.

# %% [markdown]
# ## 12.10
#
# This kernel writes down at which element each key of a sequence begins. It served for weeks. Then somebody gave the cache more memory, and after
# some hours of traffic other kernels crashed, here and there. The table of pages holds 32-bit numbers; the elements are written down in 64 bits.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_12: key_offsets_kernel

# %% [markdown]
# ## 12.11
#
# Sequences may have different numbers of queries. So the result is *packed*: rows of one sequence behind those of the other. The parts of the splits
# are padded to the longest sequence, as that is simpler, and what lies in the padding is whatever was there before. The kernel without splits,
# which is not here, was right in every test. With splits a single sequence is right. Find the mistake, and mend it.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_12: hunted_merge

# %% [markdown]
# ## Where you are
#
# You can say of a decoding step what it reads, who reads it, and who waits. Phase 13 takes the merge once more, over machines.
