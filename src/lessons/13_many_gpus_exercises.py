# %% [markdown]
# # Phase 13 · Many GPUs: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, or mend the one that is there, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("13.4")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# The names are the lecture's:
#
# | name | what it is |
# |:--|:--|
# | `rank`, `world` | the number of a rank, from 0; how many there are |
# | `n` | tokens on each rank |
# | `source` | whose keys a rank has now |
# | `lse`, `delta` | of a whole row: the log of the sum of exponentials; the sum of `o * do` |
#
# No ranks are started here. Where several are meant, index 0 of a tensor is the rank that has it.

# %%
import math

import torch

from flashlab.exercises import check, hint, progress

# %% [markdown]
# ## 13.1
#
# Before anything is computed, each row has to know where it stands: rotary embedding needs it, and so does the mask. Two layouts, a rank's
# row, and its position in the whole sequence, a whole number. **Zigzag**: the sequence is cut into 2 · world pieces, and rank r has pieces r
# and 2 · world − 1 − r, in this order. **Striped**: token after token goes to the next rank.

# %% [markdown]
# ## 13.2
#
# Parts come one after the other, and are merged into a state. Implementations on GPUs do it with *one* weight per row: the share of the new
# part. No maximum is needed for it, and nothing overflows. Find the share, then the line of
# the output and that of `lse`, in the dtype that came.
#
# The first part is a rank's own and has seen a key in each row. Later ones may have seen none: `lse` is $-\infty$ there and `o` is 0.

# %% [markdown]
# ## 13.3
#
# Zigzag, causal. A rank has its two pieces of queries, one after the other in one tensor, and the two pieces of keys of `source`. A kernel
# is called once per step. Which rows, which keys, and is there a mask?

# %% [markdown]
# ## 13.4
#
# The lecture derived from how many tokens per rank on sending is hidden, without a mask. Now for a causal zigzag ring, in tokens of
# the *whole* sequence, which zigzag cuts into $2W$ equal pieces of whole tokens: so it is a multiple of $2W$, and $W$ is
# 2 or more. Every step but the first is meant; the first has more work.

# %% [markdown]
# ## 13.5
#
# The backward ring, all ranks at once. Sending to the next rank is `x.roll(1, 0)`: index 1 then has what index 0 had. You need only that, as
# often as something has to get home, and phase 5's lines for dK and dV.

# %% [markdown]
# ## 13.6
#
# The all-to-all of Ulysses, as a change of axes.

# %% [markdown]
# ## 13.7
#
# A ring's backward pass, the part that stays at home. It ran for months. Losses went down, if slowly; the forward pass was compared with one
# GPU to the last digit. Then somebody compared gradients.
#
# The check shows the symptoms, and no cause, until you change the code. Ask yourself first: **with how many ranks is it right?**

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_13: hunted_dq

# %% [markdown]
# ## 13.8
#
# A ring in zigzag. It was written for language models, and made them twice as fast as the contiguous one. Then it was used for images, where
# every patch sees every other. The check shows the symptoms, and no cause, until you change the code.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_13: hunted_ring

# %% [markdown]
# ## 13.9
#
# With a sliding window most blocks of a ring are empty (token i sees itself and the `window` tokens before it, where they exist), and zigzag is the wrong remedy: two pieces have two sets of neighbours. Contiguous
# pieces need just the keys of a few ranks before them. Of how many, and is the work even?
#
# When it is solved, try it with 8 ranks of 4096 tokens and a window of 4096, and then of 32 768: at which window does the ring need to be
# balanced again?

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_13: with_window

# %% [markdown]
# ## Where you are
#
# You have gone from one row of scores to a sequence over many GPUs. That is the whole course.
