# %% [markdown]
# # Phase 2 · Online-softmax simulation: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("2.3")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# All exercises are plain torch on one head, with natural logarithms:
#
# | name | shape | what it is |
# |:--|:--|:--|
# | `Q_block` | `[BLOCK_M, HEAD_DIM]` | one block of query rows |
# | `K`, `V` | `[N, HEAD_DIM]` | all keys and values |
# | `BLOCK_N` | a number | keys per step of the loop |
# | `m_i`, `l_i`, `acc` | `[BLOCK_M]`, `[BLOCK_M]`, `[BLOCK_M, HEAD_DIM]` | the state (lecture, section 3) |
# | `lse` | `[BLOCK_M]` | log-sum-exp of each row of scores |
#
# With a GPU the checks hand you GPU tensors. So make new tensors from the ones you get: `q.new_zeros([3])`, not
# `torch.zeros(3)`.

# %%
import math

import torch

from flashlab.exercises import check, hint, progress
from flashlab.attention.simulation import Step, check_inputs

# %% [markdown]
# ## 2.1
#
# One query row, HEAD_DIM = 1, two blocks of two keys. Block 0 had the scores $(\ln 2,\ 0)$ and the values $(3,\ 5)$, so after it
#
# $$m_i = \ln 2, \qquad l_i = 1 + \tfrac12 = 1.5, \qquad \mathrm{acc} = 1 \cdot 3 + \tfrac12 \cdot 5 = 5.5 .$$
#
# Block 1 has the scores $(\ln 8,\ \ln 4)$ and the values $(1,\ 6)$. Do the step with pencil and paper. Return a dictionary
# with the keys `m_new`, `correction`, `l_i`, `acc` (all after block 1) and `O`, the output that the row ends with.

# %% [markdown]
# ## 2.2
#
# The state of a single block of keys, from its scores `s` `[BLOCK_M, BLOCK_N]` and its values `v` `[BLOCK_N, HEAD_DIM]`: the row
# maxima `m` `[BLOCK_M]`, the sums `l` `[BLOCK_M]` of `exp(s - m)`, and the *unnormalised* output `acc` `[BLOCK_M, HEAD_DIM]`.

# %% [markdown]
# ## 2.3
#
# **The milestone of this phase.** FlashAttention's forward pass for one block of query rows. Write it without looking at the
# lecture; the five steps are in the comments. `check_inputs` is given: it refuses bad shapes and dtypes, and returns the scale.
#
# The check runs moving maxima, scores near ±200, lengths that BLOCK_N does not divide and three dtypes. It also measures the
# memory: a function that computes the whole `Q_block @ K.T` first does not pass.

# %% tags=["exercise"]
# RULE flashlab.attention.simulation: flash_attention_forward_sim
def flash_attention_forward_sim(Q_block, K, V, BLOCK_N, scale=None):
    """softmax(scale * Q_block K^T) V, BLOCK_N keys at a time.

    Q_block [BLOCK_M, HEAD_DIM], K [N, HEAD_DIM], V [N, V_DIM], of one dtype.
    Returns O_block [BLOCK_M, V_DIM] in V's dtype, and lse [BLOCK_M] in float32.
    """
    scale = check_inputs(Q_block, K, V, BLOCK_N, scale)
    # 1. The state before the first key: m_i, l_i, acc, all float32.
    # 2. For each block of BLOCK_N keys (the last may be shorter): load k, compute the scores s,
    # 3.   the new maximum, p and the correction,
    # 4.   update l_i and acc (round p to V's dtype before you multiply it with v), then m_i.
    # 5. Normalise once; lse = m_i + log(l_i).
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# ## 2.4
#
# One block of rows is done; now all M of them. Loop over blocks of BLOCK_M query rows and call `flash_attention_forward_sim` for
# each, as `flash_attention_forward_sim(Q_block, K, V, BLOCK_N, scale)`. M need not be a multiple of BLOCK_M, nor V_DIM be HEAD_DIM.
# The check counts products and bytes: both block sizes matter.
#
# This uses your function from 2.3. To do this exercise first, import ours:
# `from flashlab.attention.simulation import flash_attention_forward_sim`.

# %% tags=["exercise"]
# RULE flashlab.attention.simulation: flash_attention_one_head_sim
def flash_attention_one_head_sim(Q, K, V, BLOCK_M=64, BLOCK_N=64, scale=None):
    """Attention of one head. Q [M, HEAD_DIM], K [N, HEAD_DIM], V [N, V_DIM].

    Returns O [M, V_DIM] in V's dtype, and lse [M] in float32.
    """
    scale = check_inputs(Q, K, V, BLOCK_N, scale)
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# ## 2.5
#
# A causal simulation: each query may see the keys up to its own position. It passed every test with as many queries as keys, and
# a model was trained with it. Then the model had to write a text, with the keys of what it had written before kept in a cache:
# a few new queries, many keys. It wrote as if it had forgotten the end of its own text.
#
# One thing is wrong. The check shows the symptoms, and no cause, until you change the code. **Which lengths are right, and which are
# not?** The convention is this course's: the last query sees the last key.

# %% tags=["exercise"]
def hunted_5(Q, K, V, BLOCK_N, scale=None):
    """Causal attention of one head; the last query sees the last key. Returns (O, lse)."""
    scale = check_inputs(Q, K, V, BLOCK_N, scale)
    M, N = Q.shape[0], K.shape[0]
    row = torch.arange(M, device=Q.device)
    q = Q.float()
    m_i = q.new_full([M], -math.inf)
    l_i = q.new_zeros([M])
    acc = q.new_zeros([M, V.shape[1]])
    for start_n in range(0, N, BLOCK_N):
        k, v = K[start_n : start_n + BLOCK_N].float(), V[start_n : start_n + BLOCK_N].float()
        key = torch.arange(start_n, start_n + len(k), device=Q.device)
        s = scale * (q @ k.T)
        s = s.masked_fill(key[None, :] > row[:, None] + N - M, -math.inf)  #: row M - 1 sees key N - 1
        m_new = torch.maximum(m_i, s.amax(dim=1))
        m_safe = torch.where(m_new == -math.inf, 0.0, m_new)  # -inf - (-inf) would be NaN
        p = torch.exp(s - m_safe[:, None])
        correction = torch.exp(m_i - m_safe)
        l_i = l_i * correction + p.sum(dim=1)
        acc = acc * correction[:, None] + p.to(V.dtype).float() @ v
        m_i = m_new
    l_safe = torch.where(l_i == 0, 1.0, l_i)  # a row that sees no key: O = 0, lse = -inf
    return (acc / l_safe[:, None]).to(V.dtype), m_i + torch.log(l_i)

# %% [markdown]
# ## 2.6
#
# The same causal attention, and its mask is right. Its author had read that FlashAttention-2 walks over the keys from the last tile
# to the first, and turned the loop round. The order of the tiles cannot matter: the online softmax is associative (phase 0). Yet the
# output is full of NaN.
#
# **Which rows are NaN, and what is special about the first tile that they meet?** A large negative number where the
# maximum or a masked score is $-\infty$ is no repair: the check has rows that see no key at all, and for them O = 0 and lse = $-\infty$, and it
# has scores below any such number.

# %% tags=["exercise"]
def hunted_6(Q, K, V, BLOCK_N, scale=None):
    """Causal attention of one head; the last query sees the last key. Returns (O, lse)."""
    scale = check_inputs(Q, K, V, BLOCK_N, scale)
    M, N = Q.shape[0], K.shape[0]
    row = torch.arange(M, device=Q.device)
    q = Q.float()
    m_i = q.new_full([M], -math.inf)
    l_i = q.new_zeros([M])
    acc = q.new_zeros([M, V.shape[1]])
    for start_n in reversed(range(0, N, BLOCK_N)):
        k, v = K[start_n : start_n + BLOCK_N].float(), V[start_n : start_n + BLOCK_N].float()
        key = torch.arange(start_n, start_n + len(k), device=Q.device)
        s = scale * (q @ k.T)
        s = s.masked_fill(key[None, :] > row[:, None] + N - M, -math.inf)
        m_new = torch.maximum(m_i, s.amax(dim=1))
        m_safe = torch.where(m_new == -math.inf, 0.0, m_new)  #: -inf - (-inf) would be NaN: repaired
        p = torch.exp(s - m_safe[:, None])
        correction = torch.exp(m_i - m_safe)
        l_i = l_i * correction + p.sum(dim=1)
        acc = acc * correction[:, None] + p.to(V.dtype).float() @ v
        m_i = m_new
    l_safe = torch.where(l_i == 0, 1.0, l_i)  # a row that sees no key: O = 0, lse = -inf
    return (acc / l_safe[:, None]).to(V.dtype), m_i + torch.log(l_i)

# %% [markdown]
# ## 2.7
#
# What does the whole-matrix simulation of 2.4 ask of HBM, in bytes? Q is `[M, HEAD_DIM]`, K and V are `[N, HEAD_DIM]`, with
# `itemsize` bytes per element. O has Q's dtype, and one float32 of lse is written for each row. Every load and store counts,
# also when another query block has loaded the same tile before.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_02: hbm_bytes

# %% [markdown]
# Two questions, once your formula passes. From which BLOCK_M on does the tiled version ask for less than the naive one, with its
# $6 N^2$ elements (phase 1)? And what if only one query block is on the GPU at a time?
#
# <details><summary>Answer</summary>
#
# For long sequences K and V dominate: $2 N^2 D / \mathrm{BLOCK\_M}$ elements against $6 N^2$, so from BLOCK_M > D / 3 on.
#
# Several query blocks that walk over the same tiles at the same time share one fetch from HBM, through L2. With one at a time, each
# walks alone, and whether K and V are still in L2 depends on their size. The formula counts the requests in either case.
#
# </details>

# %% [markdown]
# ## 2.8
#
# When a model writes one token at a time there is a single query row and a very long K and V. Then there are no query blocks to
# run in parallel. So cut the *keys* into `splits` parts, give each part to a worker, and merge what comes back.
#
# The worker is `flash_attention_forward_sim`. It returns a *finished* part: a normalised O and its lse, which is all you need to
# merge (phase 0). Merge in float32, and return O in V's dtype and lse in float32, as the worker does. `K.chunk(splits)` cuts K; where `splits` is larger than N it gives N parts, none empty.

# %% tags=["exercise"]
from flashlab.attention.simulation import flash_attention_forward_sim as worker


# RULE flashlab.exercises.phase_02: split_kv_sim

# %% [markdown]
# ## 2.9
#
# In a language model a query may only see the keys up to its own position. With M queries and N keys the last query sees the
# last key: query $i$ sees key $j$ if $j \le i + N - M$. A row that sees no key (the first rows, if M > N) gets O = 0 and
# lse = $-\infty$.
#
# Mask the tiles that are partly visible, and *skip* those that are not visible at all. The check counts the tiles. Watch the row
# whose keys so far are all masked: what is $-\infty - (-\infty)$?

# %% tags=["exercise"]
# RULE flashlab.attention.simulation: flash_attention_causal_sim
def flash_attention_causal_sim(Q, K, V, BLOCK_M=64, BLOCK_N=64, scale=None):
    """Causal attention of one head. Q [M, HEAD_DIM], K [N, HEAD_DIM], V [N, V_DIM].

    Returns O [M, V_DIM] in V's dtype, and lse [M] in float32.
    """
    scale = check_inputs(Q, K, V, BLOCK_N, scale)
    # YOUR CODE HERE
    raise NotImplementedError

# %% [markdown]
# You now have FlashAttention's forward pass, tiled both ways, causal, and cut along the keys, in plain Python. Phase 3 writes 2.3 again in
# Triton. `progress()` shows what is left.
