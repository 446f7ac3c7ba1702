# %% [markdown]
# # Phase 11b · Optional: phase 4's loop in Gluon, exercises
#
# Both answers are plain Python: no GPU is needed. A check that fails says in one sentence what is wrong. `hint("11b.1")` gives the next hint,
# `progress("11b")` shows where you are.

# %%
from flashlab.exercises import check, hint, progress

# %% [markdown]
# ## 11b.1
#
# The lecture's `place` goes from a thread's register to an element of the product. Each bit of the three numbers is a step of (rows, columns), the first
# that of bit 0:
#
# | register | (0, 1) | (8, 0) | (0, 8) | (0, 16) | … |
# |:--|:--|:--|:--|:--|:--|
# | **lane** | (0, 2) | (0, 4) | (1, 0) | (2, 0) | (4, 0) |
# | **warp** | (16, 0) | (32, 0) | (64, 0) | … | |
#
# Go back: which warp, which lane and which register hold element `(row, column)`? The tile has 64 rows for each warpgroup, and any number of columns
# that is a multiple of 8. Warps are counted over all warpgroups.

# %% [markdown]
# ## 11b.2
#
# The loading warp orders the boxes of a block of queries in the order in which they are used: K₀, K₁, V₀, K₂, V₁, and so on; V of the last tile comes
# last. K and V have `stages` places each, used in turn, and each place of each has a barrier `free`. The program's earlier blocks of queries had `done` tiles.
#
# For box number `b` of a block with `tiles` tiles say what is ordered, where it goes, and for which parity of that place's `free` the warp waits before it orders. A
# wait for parity 1 passes at once while nobody has arrived.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_11b: next_box

# %% [markdown]
# ## Where you are
#
# You can say who holds a number, and when a place may be filled again: what Triton decides for you.
