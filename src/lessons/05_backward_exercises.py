# %% [markdown]
# # Phase 5 · The backward pass: exercises
#
# Fill in each cell that says `# YOUR CODE HERE`, run it, then run the check below it. A check that fails says in one
# sentence what is wrong. `hint("5.4")` gives the next hint, `progress()` shows where you are.

# %% [markdown]
# The names are the lecture's:
#
# | name | what it is |
# |:--|:--|
# | `do`, `dO` | the gradient of the loss with respect to O; `dp`, `ds`, `dq`, `dk`, `dv` likewise |
# | `lse` | log-sum-exp of each row of scores, natural logarithm; `p = exp(score - lse)` |
# | `delta` | `(o * do).sum(dim=1)`, one number per row |
# | `scale` | the scores are `scale * q @ k.T` |
# | `M`, `N` | number of queries; number of keys |

# %%
import math

import torch

from flashlab.attention import simulation_backward as lecture
from flashlab.attention.triton_forward import flash_attention_forward
from flashlab.exercises import check, hint, progress

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

# %% [markdown]
# ## 5.1
#
# Some models (gpt-oss is one) have a *sink* in each head, as in 4.9: one more score in every row's softmax, the same learned number for
# all rows, whose value is zero. `p` and `dp` are `[M, N]`, without the sink, so a row of p sums to less than 1. Return `ds`, the gradient
# with respect to the scores, and `dsink`, that with respect to the sink, a tensor without axes. No N × N matrix is needed, and no loop.

# %% [markdown]
# ## 5.2
#
# The same number per row, in two ways: from `p` and `dp`, both `[M, N]`; and from `o` and `do`, both `[M, HEAD_DIM]`. Return float32
# `[M]`. The second gets 16-bit tensors in a model, and should not lose digits then.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_05: delta_over_keys, delta_over_columns

# %% [markdown]
# ## 5.3
#
# A block of queries walks along the keys, BLOCK_N at a time; the last block of keys may be shorter. The forward pass had *dropout*, as in
# GPT-2's training: after the softmax a part of P is set to 0, and the rest is divided by `keep`, the probability of being kept: O = (P ∘ `KEPT` / `keep`) V.
# `KEPT` is True where an element was kept. (A kernel makes it again from a seed, a tile at a time.) lse and delta are what they were: the
# log-sum-exp of the scores, and the sum of O ∘ dO.
#
# Nothing in the function may have all N keys in its shape, but K, V and KEPT themselves.

# %% [markdown]
# ## 5.4
#
# **The milestone of this phase**: the walk down a column, under a sliding window. Query i sees the `window` keys up to its own, which is
# i + N − M: the last query sees the last key. So j is seen if i + N − M − window < j ≤ i + N − M.
# A block of keys walks down over the queries, BLOCK_M at a time, from whichever query you begin with. It visits a block of queries only if one of
# them sees one of these keys: that decides where the walk begins, and where it ends.
#
# `lecture.probabilities_sim(q, k, lse, distance, scale)` gives a tile of P in float32, of which row i sees its columns j ≤ i + distance. The
# other edge is yours. A score that is hidden there may be much larger than lse.

# %% [markdown]
# ## 5.5
#
# Some models gate what a head gives (Qiu et al., *Gated Attention for Large Language Models*, 2025): $y_i = g_i\, o_i$, with a number $g_i$
# per row. Then dY arrives, and dO has never been stored. In Triton, BLOCK_M rows per program: store $dg_i$, and the $\delta_i$ that the
# attention's backward pass needs.
#
# M need not be a multiple of BLOCK_M. O and dY each have their own two strides, and those of dY may be anything, also 0. g and both
# results are float32 and contiguous. Multiply in float32.

# %% [markdown]
# ## 5.6
#
# 5.3's walk as a Triton kernel, without dropout: one head, no mask, any M and N. The addresses and loads are written. The loop's body and the end are yours. The
# scale multiplies the scores, and once more the result. Use `tl.exp`; the statistics are natural logarithms.
#
# The check has float32 inputs too, and refuses TF32 for them: every `tl.dot` takes `input_precision="ieee"`. In some cases every lse is near −120, or near
# −10³⁰. Think of the last tile there.

# %% [markdown]
# ## 5.7
#
# A loss depends on O and on the log-sum-exp of each row. `do` is its gradient with respect to O `[M, HEAD_DIM]`, `dlse` that with respect to
# lse `[M]`. Return `ds` `[M, N]`, the gradient with respect to the scores.

# %% [markdown]
# ## 5.8
#
# Some kernels write dK for every *query* head, `[batch, heads, N, HEAD_DIM]`, and leave the sum to be done afterwards. Do it: return
# `[batch, kv_heads, N, HEAD_DIM]` in the dtype of `dk`. Query head h reads key head h // (heads / kv_heads). Add up in float32.

# %% [markdown]
# ## 5.9
#
# dK and dV of one head with as many queries as keys, in square tiles. It has trained language models, and its author compared every
# gradient with autograd's before. Then somebody used it for images, and the model did not learn. The forward pass was right.
#
# The check shows the symptoms, and no cause, until you change the code. **Which cases are right, and which are not?**

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_05: hunted_9

# %% [markdown]
# ## 5.10
#
# The whole backward pass in one launch: program i does its share of dQ and its share of dK and dV. The loop over `program` stands for
# the grid. All was well for a year. Then somebody tuned the tiles: it became faster, and the model worse.
#
# The functions of `lecture` are those of its section 6, and right. What is wrong stands around them.

# %% tags=["exercise"]
# RULE flashlab.exercises.phase_05: hunted_10

# %% [markdown]
# ## 5.11
#
# The other large kernel, with nothing written but its parameters, and for K and V that are *one* matrix C: K = V = C. DeepSeek's latent attention
# does so, with 64 columns more in its keys. Store dC, like C. One head, no mask, any M and N; program i keeps the rows i · BLOCK_N and
# following of C. Every row is contiguous; `stride_qm` and the others go from one row to the next. lse and delta are contiguous, in float32.
#
# The check is that of 5.6: TF32 is refused here too. `tl.dot(tl.trans(p), ...)` is right in the interpreter; the lecture says why not to write it.

# %% [markdown]
# ## 5.12
#
# The last three exercises lead from one head to gradients in a model. Begin with your kernel of 5.11. Now K and V are two again, `[kv_heads, N, HEAD_DIM]`, and Q and
# dO have `[kv_heads * group, M, HEAD_DIM]`. Query head h reads key head h // group. Program i is block i % n_blocks of key head i // n_blocks. Each tensor has a stride from head
# to head and one from row to row; columns lie side by side. `LSE_ptr` and `DELTA_ptr` are contiguous, `[heads, M]`.
#
# If `CAUSAL`, the last query sees the last key, and tiles that see none of the block's keys are not visited. A row that sees no key has an lse of $-\infty$, as the forward
# pass gives it.

# %% [markdown]
# ## 5.13
#
# dQ for the same tensors, with a soft-cap: the scores are $c \tanh(s / c)$, where s is scale · $q \cdot k$, and P is made of these. What follows for $ds$? `SOFTCAP` says
# whether there is one, `softcap` is c. Triton has no tanh that the interpreter knows; make it of `tl.exp`. The loop and the end are yours.

# %% [markdown]
# ## 5.14
#
# Make an attention that trains, with your kernels of 5.12 and 5.13 behind it. The forward pass is the package's: `flash_attention_forward(q, k, v, causal=..., scale=...)` gives (o, lse).
# For delta two lines of torch will do.
#
# The check asks autograd, as a training loop does: grouped heads, batches, causal or not, queries that see no key, a dO with any strides. `lse` is a result like `o`, and a loss may
# use it. What is kept for the backward pass grows with N, not with its square. There is always a query and a key.

# %% tags=["exercise"]
# BEGIN STARTER
# A launcher and a torch.autograd.Function here.


def attention(q, k, v, *, causal=False, scale=None):
    """(o, lse): o like q; lse [batch, heads, seq_q], float32, natural logarithm. Both have gradients.

    q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], with any strides.
    scale: 1 / sqrt(head_dim) unless given. causal: aligned at the end. head_dim: a power of two, at least 16.
    """
    raise NotImplementedError  # YOUR CODE HERE
# END STARTER
# BEGIN SOLUTION
def backward(do, dlse, q, k, v, o, lse, causal, scale, BLOCK=32):
    (batch, heads, M, head_dim), (kv_heads, N) = q.shape, k.shape[1:3]
    delta = (o.float() * do.float()).sum(-1) - dlse
    q, k, v, do = (x.flatten(0, 1).contiguous() for x in (q, k, v, do))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    strides = [step for x in (q, k, v, do) for step in x.stride()[:2]]
    given, group = (q, k, v, do, lse, delta.contiguous()), heads // kv_heads
    tile = {"CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_M": BLOCK, "BLOCK_N": BLOCK}
    keys, rows = batch * kv_heads * triton.cdiv(N, BLOCK), batch * heads * triton.cdiv(M, BLOCK)
    results = [step for x in (dk, dv) for step in x.stride()[:2]]
    grouped_dkdv_kernel[(keys,)](*given, dk, dv, *strides, *results, scale, M, N, group, **tile)
    strides += dq.stride()[:2]
    capped_dq_kernel[(rows,)](*given, dq, *strides, scale, 0.0, M, N, group, SOFTCAP=False, **tile)
    return dq.unflatten(0, (batch, heads)), *(x.unflatten(0, (batch, kv_heads)) for x in (dk, dv))


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        o, lse = flash_attention_forward(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = causal, scale
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        return *backward(do, dlse, *ctx.saved_tensors, *ctx.options), None, None


def attention(q, k, v, *, causal=False, scale=None):
    return Attention.apply(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale)
# END SOLUTION

# %% tags=["check"]
# hint("5.14")
check("5.14", attention)

# %% [markdown]
# ## Where you are
#
# You have the forward and the backward pass in Triton, and a model can train with them. Next, phase 6 begins again, in CUDA C++.
