# %% [markdown]
# # Phase 0 · Exercises: attention and online softmax
#
# Replace `raise NotImplementedError` with your code, run the cell, then run the check below it. A check that fails says in one
# sentence what is wrong, and on which input. `hint("0.3")` gives a hint for exercise 0.3; call it again for the next one.
# `progress()` at the end shows where you stand.
#
# Eight exercises. They need nothing but the lecture of phase 0. Any order will do, but 0.4 is used by 0.6.

# %%
from flashlab.exercises import check, hint, progress

# %%
import math

import torch

from flashlab.attention.online_softmax import (
    State,
    block_state,
    finish,
    identity,
    require_mergeable,
    require_one_dtype,
    row_max,
)

torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# Given, from the lecture:
#
# - `State(m, l, o)`: the largest score, the sum of $e^{x - m}$, the sum of $e^{x - m} v$;
# - `block_state(scores, v)`: the state of one block of keys;
# - `identity(*rows, head_dim=...)`: the state of no keys;
# - `finish(state)`: the output $o / \ell$, and $\mathrm{lse} = m + \ln \ell$;
# - `row_max(x)`: the maximum along the last axis.
#
# `require_mergeable(a, b)` and `require_one_dtype(...)` only raise a clear sentence on inputs that do not fit together. You may
# leave them out.

# %% [markdown]
# ## 0.1
#
# A row holds `n` equal scores $s$. Its naive softmax is computed in some dtype. What is the largest $s$ for which neither an
# exponential nor their sum overflows? Return it as a Python float, from the formula (no search).
#
# For `n = 1` in float16 the lecture measured 11.09. Will 1000 scores of 10 do in float16? Guess before you compute it.
# (`torch.finfo(dtype).max` is the largest finite number of a dtype.)

# %% [markdown]
# ## 0.2
#
# Write the softmax that is right at any height of the scores: along the last axis, for any number of leading axes, in the dtype of
# its input. A score of $-\infty$ is masked. A row of nothing but $-\infty$ gives zeros.
#
# Two functions, because everything later needs the first one: `shifted_exp` is $e^{x-m}$, and it is 0 where both are $-\infty$.

# %% tags=["exercise"]
# RULE flashlab.attention.online_softmax: shifted_exp, softmax_safe
def shifted_exp(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """exp(x - m) for x <= m; 0, not NaN, where x and m are both -inf. m is broadcastable to x."""
    # YOUR CODE HERE
    raise NotImplementedError


def softmax_safe(x: torch.Tensor) -> torch.Tensor:
    """Softmax along the last axis of x [..., N], each row less its own maximum; a masked row gives zeros."""
    # YOUR CODE HERE
    raise NotImplementedError

# %% tags=["check"]
# hint("0.2")
check("0.2", softmax_safe, shifted_exp)

# %% [markdown]
# ## 0.3
#
# The scores of a row arrive one after another, from an *iterator*: you see each of them once, and there is no going back.
# Return the maximum $m$ and the sum $\ell = \sum_j e^{x_j - m}$. Keep two numbers, not the row.
#
# Mind what can come first: $-\infty$, once or more, or nothing at all. A row without a finite score gives $(-\infty, 0)$.

# %% [markdown]
# ## 0.4
#
# `a` and `b` are the states of two blocks of keys, for the same query rows. Return the state of both blocks together.
#
# The states may have any leading axes: `m` and `l` are `[...]`, `o` is `[..., D]`. Either of them, or both, may be the identity
# $(-\infty, 0, 0)$, in all rows or in some.
#
# Do not change `a` and `b`, and keep their dtype. Do not divide: a state stays unnormalised.

# %% tags=["exercise"]
# RULE flashlab.attention.online_softmax: merge
def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of keys together."""
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# ## 0.5
#
# The function below computes attention for one row, `BLOCK_N` keys at a time, and is to go on doing so. Its author tested it, and it passed. It has one bug,
# the commonest one in hand-written FlashAttention kernels.
#
# Read the symptoms in the cell after it before you read the code a second time: **for which rows is it right?** Then repair it.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_00: attention_in_blocks

# %% [markdown]
# The symptoms: the same eight scores in two orders, with the same values moved along. The output must not depend on the
# order.

# %%
scores = torch.tensor([3.0, 0.0, 1.0, 2.0, 0.5, 1.5, 1.0, 0.0])
values = torch.arange(8.0)[:, None]

for name, order in {"largest first": range(8), "largest last": range(7, -1, -1)}.items():
    i = torch.tensor(list(order))
    got, right = attention_in_blocks(scores[i], values[i], 2), torch.softmax(scores, 0) @ values
    print(f"{name:14} got {got.item():.3f}   right {right.item():.3f}")

# %% tags=["check"]
# hint("0.5")
check("0.5", attention_in_blocks)

# %% [markdown]
# ## 0.6
#
# Two devices have each *finished* the same query rows against their own keys. The outputs are divided by their sums, and of $m$ and
# $\ell$ only $\mathrm{lse} = m + \ln \ell$ is left. Merge `(o1, lse1)` and `(o2, lse2)` into the result over all keys.
#
# Three lines are enough, with your `merge` of 0.4 and `finish`. Mind that lse may be 1000, and that a row may have seen no key on one
# device, or on both ($o = 0$, $\mathrm{lse} = -\infty$). `o` comes back in the dtype of `o1`, and lse in its own.

# %% tags=["exercise"]
# RULE flashlab.attention.online_softmax: merge_finished
def merge_finished(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) over both sets of keys. o1, o2: [..., D]; lse1, lse2: [...]."""
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# ## 0.7
#
# A loop merges $n$ states one after another: $n - 1$ merges, each waiting for the one before it. Because `merge` is associative,
# pairs can be merged at the same time, then pairs of the results. These are $n - 1$ merges too, none of them with `nothing`, but only $\lceil \log_2 n \rceil$ deep.
# The threads of a GPU combine their partial sums in this way (phase 6). By section 7 of the lecture it is also the more accurate order.
#
# Write it for *any* associative operation: merge neighbours only and keep their order. The list may have any length; an empty one
# gives `nothing`. Do not change the list.

# %% tags=["exercise"]
def merge_as_tree(states: list, merge, nothing):
    """Combine the list by `merge(left, right)`, ceil(log2(n)) merges deep; `nothing` for an empty list."""
    # BEGIN SOLUTION
    while len(states) > 1:
        pairs = [merge(*states[i : i + 2]) for i in range(0, len(states) - 1, 2)]
        states = pairs + states[len(pairs) * 2 :]                 # an odd one out goes on to the next round
    return states[0] if states else nothing
    # END SOLUTION

# %% [markdown]
# ## 0.8
#
# By section 8 of the lecture, $m$ need not be the maximum: any reference that is close enough will do. FlashAttention-4 lets the
# reference go stale, and corrects only when a block's maximum is above it by more than a `threshold`. (Its threshold is 8 in base 2, a
# factor of 256, which float32 sums bear easily.)
#
# Write it for one row. The rules, so that your count can be compared:
#
# - the first block that holds a finite score sets the reference to its maximum; that is no correction;
# - a later block whose maximum is `> reference + threshold` moves the reference to that maximum: one correction;
# - any other block is taken against the reference as it is. Its exponentials may exceed 1, but not
#   $e^{\text{threshold}}$;
# - a row with no finite score gives $o = 0$, $\mathrm{lse} = -\infty$, 0 corrections.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_00: lazy_attention

# %% [markdown]
# **To think about.** With a threshold of $8 \ln 2$, how often is there a correction in a row of random scores of standard
# deviation 2, in blocks of 64? And a kernel converts $P$ to float16 before it multiplies by $V$. Why does that limit the threshold?
#
# <details><summary>Answer</summary>
#
# Nearly never: after the first block the reference is about the maximum of 64 scores, $2 \cdot 2.4 = 4.8$, and the row
# would have to bring a score above $4.8 + 5.5 = 10.3$, more than five standard deviations. The block maxima still move
# $H_{N/64}$ times; they just do not move far.
#
# $P$ is what is converted: its entries may now be as large as $e^{\text{threshold}}$. 256 is harmless in float16, whose largest number is 65504;
# with float8 e4m3, whose largest is 448, there is no room above a factor of 256 either.
#
# </details>
