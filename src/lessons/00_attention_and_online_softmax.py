# %% [markdown]
# # Phase 0 · Attention and online softmax
#
# Attention is two matrix products with a softmax between them. The softmax is the hard part, because it seems to need a whole
# row of scores before it can say anything about one of them.
#
# This lecture takes that "whole row" away. At its end you can cut a row into pieces, compute the pieces in any order, on any
# device, and put them together again. Every FlashAttention kernel stands on that one fact.

# %% [markdown]
# ## What you will be able to do
#
# - compute attention by hand on a 3×2 example;
# - predict at which score a softmax breaks in a given dtype, and how;
# - derive the online recurrence for the sum and for the output;
# - merge two partial results $(m, \ell, o)$, show that the order cannot matter, and measure where rounding disagrees;
# - handle a row, or a block of a row, with nothing in it;
# - say why the pair $(o, \mathrm{lse})$ is all that has to be kept of a row.

# %% [markdown]
# ## What you need first
#
# Python and the basics of PyTorch tensors; matrix products; $e^x$ and $\ln x$. No GPU, no Triton, no CUDA.
#
# The course writes $m$, $\ell$ (`l` in code) and $o$ for the state of a row, as the FlashAttention papers do.

# %%
import itertools
import math
import random
from functools import reduce
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from IPython.display import display

from flashlab.attention import reference
from flashlab.attention.inputs import check_qkv, scale_of
from flashlab.figures import curves, drawings, rows, show
from flashlab.attention.online_softmax import (
    online_softmax,
    require_block,
    require_mergeable,
    require_one_dtype,
    require_state,
    shifted_exp,
)

show.style()
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## 1. Attention, by hand
#
# A token asks with its **query** $q$, and is found by its **key** $k$. What it has to say is its **value** $v$. The rows of $Q$, $K$
# and $V$ are the queries, keys and values of all tokens. Each row has $D$ numbers. Vaswani et al. (2017) define
#
# $$S = \frac{Q K^\top}{\sqrt{D}}, \qquad P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}}, \qquad O = P V .$$
#
# $S$ holds the **scores**, $P$ the **probabilities**. $P$ is the softmax of $S$, row by row.

# %% [markdown]
# Row $i$ of $O$ is a weighted mean of the rows of $V$. The weights are positive and sum to 1. Each row of $O$ depends on one row
# of $Q$, and on all of $K$ and $V$. So this lecture always thinks of one query row.
#
# Here are three of each, with $D = 2$. The odd factor `c` is there so that $e^{S}$ comes out in whole numbers.

# %%
c = math.sqrt(2) * math.log(2)
Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
K = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64) * c
V = torch.tensor([[20.0, 0.0], [0.0, 20.0], [20.0, 20.0]], dtype=torch.float64)

# %% [markdown]
# Work it out on paper before you run the next cell. The factor cancels the $\sqrt 2$ of the scale and leaves $\ln 2$:
#
# $$S = \ln 2 \begin{pmatrix} 0 & 1 & 0 \\ 0 & 0 & 1 \\ 0 & 1 & 1 \end{pmatrix}, \qquad
# e^{S} = \begin{pmatrix} 1 & 2 & 1 \\ 1 & 1 & 2 \\ 1 & 2 & 2 \end{pmatrix}, \qquad
# \text{row sums } \ell = \begin{pmatrix} 4 \\ 4 \\ 5 \end{pmatrix}.$$
#
# The first output row is $\tfrac14 (1\cdot[20, 0] + 2\cdot[0, 20] + 1\cdot[20, 20]) = [10, 15]$.
# The others, the same way, are $[15, 15]$ and $[12, 16]$.

# %%
O_by_hand = torch.tensor([[10.0, 15.0], [15.0, 15.0], [12.0, 16.0]], dtype=torch.float64)
S = Q @ K.T / math.sqrt(2)
by_hand = torch.tensor([[1.0, 2, 1], [1, 1, 2], [1, 2, 2]], dtype=torch.float64)
torch.testing.assert_close(torch.exp(S), by_hand)
print("row sums of exp(S):", [round(l, 10) for l in torch.exp(S).sum(dim=1).tolist()])

# %% [markdown]
# The whole computation in one picture. Read it from left to right: the highlighted row of $Q$ becomes a row of $e^S$, then of $P$,
# then of $O$. No other row of $Q$ is involved.
#
# The two matrices in the middle are the trouble: they have $N^2$ entries, where everything else has $N D$.

# %%
P = torch.softmax(S, dim=1)
named = {"Q  [3, 2]": Q, "exp(S)  [3, 3]": torch.exp(S), "P  [3, 3]": P, "V  [3, 2]": V,
         "O = P V  [3, 2]": P @ V}
rows.matrices(named, rows={name: 2 for name in named if not name.startswith("V")})
plt.show()

# %% [markdown]
# Now in code. The **oracle** comes first: the slow version that cannot be misunderstood, with which every faster one is compared.
# It is the formula, one number at a time. (`check_qkv` and `scale_of` refuse bad shapes and give $1/\sqrt D$.)

# %%
# FROM flashlab.attention.online_softmax: attention_by_loops (no docstrings)
O_by_loops = attention_by_loops(Q, K, V)
torch.testing.assert_close(O_by_loops, O_by_hand)
print(O_by_loops.round(decimals=10))

# %% [markdown]
# The same in tensors, and once more from the course's reference, which is the oracle of all later phases. It takes
# `[batch, heads, seq_len, head_dim]`, like every real kernel.

# %%
# FROM flashlab.attention.online_softmax: softmax_naive (no docstrings)
O_in_tensors = softmax_naive(Q @ K.T / math.sqrt(2)) @ V
O_reference, _ = reference.attention(Q[None, None], K[None, None], V[None, None])

torch.testing.assert_close(O_in_tensors, O_by_hand)
torch.testing.assert_close(O_reference[0, 0], O_by_hand)
print("by hand = loops = tensors = reference: True")

# %% [markdown]
# ## 2. The exponential does not fit
#
# $e^x$ grows out of every floating-point format. If $X$ is the largest finite number, $e^x$ overflows to `inf` near
# $x = \ln X$. For float16 that is $\ln 65504 = 11.09$, so a score of 12 is enough.
#
# Test it on the numbers themselves. The bits of positive floats, read as integers, are in order. So bisection finds the last
# score whose exponential is still finite.

# %%
def last_finite_score(dtype):
    """The largest x of `dtype` with a finite exp(x): bisection over the bit patterns of its numbers."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    low, high = (torch.tensor(x, dtype=dtype).view(ints).item() for x in (1.0, 1000.0))
    while high - low > 1:
        middle = (low + high) // 2
        finite = torch.exp(torch.tensor(middle, dtype=ints).view(dtype)).isfinite()
        low, high = (middle, high) if finite else (low, middle)
    return torch.tensor(low, dtype=ints).view(dtype).item()

for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    largest, measured = torch.finfo(dtype).max, last_finite_score(dtype)
    computed = math.log(largest)
    print(f"{str(dtype):15} largest {largest:9.4g}   ln: {computed:6.2f}   measured: {measured:6.2f}")
    assert computed - measured < computed * torch.finfo(dtype).eps

# %% [markdown]
# Two things to notice. bfloat16 overflows where float32 does, because it has float32's exponent bits. And its last good score is
# 88.5 only because the next bfloat16 number is 89.

# %% [markdown]
# One exponential that overflows is not the only failure. There are three, and they look different:
#
# | what happens | the row becomes | seen? |
# |:--|:--|:--|
# | one $e^{x}$ is inf | inf / inf = **NaN** | yes, NaN spreads |
# | every $e^{x}$ is finite, their **sum** is inf | $e^x$ / inf = **0** everywhere | no: a silent row of zeros |
# | every $e^{x}$ rounds to 0 | 0 / 0 = **NaN** | yes |

# %%
cases = {"one exp overflows": [12.0, 12.0], "only the sum does": [10.0] * 8, "all underflow": [-20.0] * 2}
for what, row in cases.items():
    x = torch.tensor(row, dtype=torch.float16)
    print(f"{what:18} naive: {softmax_naive(x)[0].item():6}   right: {1 / len(row)}")

assert softmax_naive(torch.full((8,), 10.0, dtype=torch.float16)).eq(0).all()  # zeros, and no NaN to warn you

# %% [markdown]
# How soon does that bite? The dot product of two random vectors of length $D$ has a mean square of $D$. The factor $1/\sqrt{D}$
# brings it back to 1: that is why the formula has it. But trained queries and keys are not random, and nothing keeps their scores
# at a standard deviation of 1.

# %% [markdown]
# Let the scores be normal with standard deviation $\sigma$, in rows of $N = 512$. A row turns to NaN when its largest score
# passes 11.09. In theory that has the probability $1 - \Phi(11.09/\sigma)^N$, where $\Phi$ is the normal distribution function.
#
# The figure compares this with 1000 measured rows per $\sigma$, and adds the silent failure.

# %%
from statistics import NormalDist

torch.manual_seed(0)
sigma = [1.5, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.25, 4.5, 5, 5.5, 6]
theory = [1 - NormalDist().cdf(math.log(65504) / s) ** 512 for s in sigma]
samples = [softmax_naive((torch.randn(1000, 512) * s).half()) for s in sigma]
nan = [p.isnan().any(dim=1).double().mean().item() for p in samples]
zero = [p.eq(0).all(dim=1).double().mean().item() for p in samples]

# %%
fig, ax = plt.subplots()
lines = [("NaN, theory", sigma, theory, "grey", "-"), ("NaN, measured", sigma, nan, "blue", "o"),
         ("silently all zeros, measured", sigma, zero, "red", "s--")]
at = sigma.index(3.5)
assert 0.25 < nan[at] < 0.4 < zero[at] < 0.5
curves.curves(ax, lines, title="Naive softmax in float16, rows of 512",
              xlabel="standard deviation of the scores", ylabel="fraction of rows")
plt.show()
distance = max(abs(a - b) for a, b in zip(theory, nan))
print("theory and measurement differ by less than 0.05 everywhere:", distance < 0.05)

# %% [markdown]
# *At a standard deviation of 3.5 a third of the rows is NaN (blue), and nearly half are silently zeros (red), because only their
# sum overflowed.* The zeros become fewer to the right only because those rows turn to NaN.

# %% [markdown]
# ## 3. The safe softmax
#
# A softmax does not change when a constant is subtracted from the whole row, because the constant cancels:
#
# $$\frac{e^{x_j - c}}{\sum_i e^{x_i - c}} = \frac{e^{-c}\, e^{x_j}}{e^{-c} \sum_i e^{x_i}} = \frac{e^{x_j}}{\sum_i e^{x_i}}.$$
#
# In real numbers every $c$ is right. In floating point one is best, the row maximum $c = m = \max_i x_i$.

# %% [markdown]
# - Every exponent is $\le 0$, so every exponential is in $[0, 1]$: nothing overflows.
# - The largest of them is exactly $e^0 = 1$, so $1 \le \ell \le N$: the division is safe.
# - A term that underflows is far below the rounding error of the sum: in float32 it is smaller than $e^{-103}$.

# %%
# FROM flashlab.attention.online_softmax: row_max, softmax_safe (no docstrings)

# %% [markdown]
# `shifted_exp(x, m)` is $e^{x-m}$ with one precaution, which section 6 explains.
#
# The claim to test: the softmax is right at any height of the scores, in every dtype. The truth is float64, *for the same scores,
# after they were rounded* to the dtype.

# %%
torch.manual_seed(0)
for dtype, shift in itertools.product((torch.float16, torch.bfloat16, torch.float32), (0, 1000, -1000)):
    x = (3 * torch.randn(64, 512) + shift).to(dtype)
    error = (softmax_safe(x).double() - torch.softmax(x.double(), dim=-1)).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps, (dtype, shift, error)
print("9 combinations of dtype and height, error below 4 epsilon of the dtype: True")

# %% [markdown]
# It cannot repair a score that was rounded before it arrived. Near 1000 neighbouring float16 numbers are 0.5 apart, and
# $e^{0.5} = 1.65$. That is why kernels keep the *scores* in float32 too, straight from the matrix product.

# %% [markdown]
# ## 4. Three passes, two passes, one pass
#
# Now think of memory. A GPU has a large and slow main memory, called **HBM** (high-bandwidth memory), and small fast memories on
# the chip. Arithmetic is cheap beside fetching its operands. So count how often one element is read or written in slow memory:
#
# - **naive**: read $x$ for the sum; read $x$ again and write $y$: 3;
# - **safe**: read $x$ for the maximum; read it for the sum; read it again and write $y$: 4.

# %% [markdown]
# Safety costs a third more traffic. A list that counts its accesses will confirm it.

# %%
class Row(list):
    """A row in slow memory: every x[j], read or written, is counted."""
    accesses = 0
    def __getitem__(self, j):
        self.accesses += 1
        return super().__getitem__(j)
    def __setitem__(self, j, value):
        self.accesses += 1
        super().__setitem__(j, value)

# %% [markdown]
# The two softmaxes as loops over such rows. Each pass is a loop.

# %%
def naive(x, y):
    l = sum(math.exp(x[j]) for j in range(len(x)))                # pass 1
    for j in range(len(x)):                                       # pass 2
        y[j] = math.exp(x[j]) / l

def safe(x, y):
    m = max(x[j] for j in range(len(x)))                          # pass 1
    l = sum(math.exp(x[j] - m) for j in range(len(x)))            # pass 2
    for j in range(len(x)):                                       # pass 3
        y[j] = math.exp(x[j] - m) / l

# %% [markdown]
# Run both on 100 numbers, and divide the accesses by 100.

# %%
def accesses(softmax, xs):
    x, y = Row(xs), Row([0.0] * len(xs))
    softmax(x, y)
    assert abs(sum(y) - 1) < 1e-12
    return (x.accesses + y.accesses) / len(xs)

xs = torch.linspace(-3, 3, 100).tolist()
print(f"accesses per element   naive: {accesses(naive, xs)} (by hand 3)   safe: {accesses(safe, xs)} (4)")

# %% [markdown]
# ### The recurrence for the sum
#
# Can the first two passes of the safe softmax become one? The sum $\ell = \sum_i e^{x_i - m}$ needs the maximum $m$ of the *whole*
# row, which is known only at the end of pass 1. That looks like a proof that two passes are needed. It only shows that we asked
# for the wrong sum.

# %% [markdown]
# Ask for a sum that *can* be known after $j$ elements. Let $m_j = \max_{i \le j} x_i$ be the maximum so far, and refer to that:
#
# $$\ell_j = \sum_{i \le j} e^{x_i - m_j}.$$
#
# For $j = N$ this is the $\ell$ we want.

# %% [markdown]
# Each step has a new reference $m_j$, so express it by the step before. Split off the last term. Then move the reference of the
# rest from $m_j$ back to $m_{j-1}$:
#
# $$\ell_j = \sum_{i<j} e^{x_i - m_j} + e^{x_j - m_j}
#          = \sum_{i<j} e^{x_i - m_{j-1}}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} .$$
#
# The factor $e^{m_{j-1} - m_j}$ does not depend on $i$, so it leaves the sum. What remains is $\ell_{j-1}$:
#
# $$\boxed{\; m_j = \max(m_{j-1}, x_j), \qquad \ell_j = \ell_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} \;}
# \qquad m_0 = -\infty,\; \ell_0 = 0 .$$

# %% [markdown]
# This is the *online normaliser* of Milakov & Gimelshein (2018). The factor $e^{m_{j-1} - m_j}$ is the **correction**. It is 1 while
# the maximum stays, and below 1 when it moves.
#
# **The correction is never above 1**, because the old maximum stands on the left. Keep that sentence: it finds the commonest bug of
# the field.

# %% [markdown]
# A hand example with powers of two again. Let $x = \ln 2 \cdot (1, 3, 2, 4, 0)$, so that $e^{x} = (2, 8, 4, 16, 1)$ and
# the sum is 31. Fill in the table before you run the cell:
#
# | $j$ | $x_j / \ln 2$ | $m_j / \ln 2$ | correction | $\ell_j$ |
# |--:|--:|--:|--:|:--|
# | 1 | 1 | 1 | 0 | $1$ |
# | 2 | 3 | 3 | 1/4 | $1 \cdot \frac14 + 1 = 1.25$ |
# | 3 | 2 | 3 | 1 | $1.25 + \frac12 = 1.75$ |
# | 4 | 4 | 4 | 1/2 | $1.75 \cdot \frac12 + 1 = 1.875$ |
# | 5 | 0 | 4 | 1 | $1.875 + \frac1{16} = 1.9375$ |
#
# At the end $\ell \, e^{m} = 1.9375 \cdot 16 = 31$.

# %%
LN2 = math.log(2)
xs = [1 * LN2, 3 * LN2, 2 * LN2, 4 * LN2, 0 * LN2]

m, l = -math.inf, 0.0
for x in xs:
    m_new = max(m, x)
    correction = math.exp(m - m_new)
    l = l * correction + math.exp(x - m_new)
    m = m_new
    print(f"x {x / LN2:.0f} ln 2   m {m / LN2:.0f} ln 2   correction {correction:.2f}   l {l:.4f}")
assert abs(l * math.exp(m) - 31) < 1e-12

# %% [markdown]
# With the recurrence the safe softmax needs two passes and 3 accesses per element. That is the naive one's traffic without its
# overflow. Here it is on a counted row; `online_softmax` of the package does the same for tensors.

# %%
def online(x, y):
    m, l = -math.inf, 0.0
    for j in range(len(x)):                                       # pass 1
        x_j = x[j]
        m_new = max(m, x_j)
        l = l * math.exp(m - m_new) + math.exp(x_j - m_new)
        m = m_new
    for j in range(len(x)):                                       # pass 2
        y[j] = math.exp(x[j] - m) / l

print("accesses per element, online:", accesses(online, torch.linspace(-3, 3, 100).tolist()))
x = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)) * 10
torch.testing.assert_close(online_softmax(x), torch.softmax(x, dim=-1))

# %% [markdown]
# ### The recurrence for the output
#
# Pass 2 cannot go: to write $p_j = e^{x_j - m}/\ell$ one needs the final $m$ and $\ell$, already for the first $j$. Every softmax must
# read its row twice.
#
# But attention does not want $p$. It wants $\sum_j p_j v_j$, one vector of $D$ numbers, and $p$ is only on the way.

# %% [markdown]
# So pull the division out of the sum, and play the same trick on what is left. With $v_j$ the $j$-th row of $V$, let
#
# $$o_j = \sum_{i \le j} e^{x_i - m_j}\, v_i \qquad\text{so that the output is}\qquad \frac{o_N}{\ell_N}.$$
#
# Split off the last term and move the reference as before; $v_i$ only rides along:
#
# $$o_j = \sum_{i<j} e^{x_i - m_{j-1}}\, e^{m_{j-1} - m_j}\, v_i + e^{x_j - m_j}\, v_j
# \;\;\Longrightarrow\;\; \boxed{\; o_j = o_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j}\, v_j \;} \qquad o_0 = 0 .$$

# %% [markdown]
# One pass, and one division after it. **Nothing of length $N$ was kept**: the state is $m$, $\ell$ and $o$, that is $D + 2$ numbers.
# Rabe & Staats (2021) showed with it that attention does not need $O(N^2)$ memory; Dao et al. (2022) made it FlashAttention.
#
# By hand: with $v = ([31,0], [0,31], [31,0], [0,31], [0,31])$ and the weights $2, 8, 4, 16, 1$ over 31, the output is
# $[2+4,\; 8+16+1] = [6, 25]$.

# %%
vs = torch.tensor([[31.0, 0], [0, 31], [31, 0], [0, 31], [0, 31]], dtype=torch.float64)

m, l, o = -math.inf, 0.0, torch.zeros(2, dtype=torch.float64)
for x, v in zip(xs, vs):
    m_new = max(m, x)
    correction, p = math.exp(m - m_new), math.exp(x - m_new)
    l, o, m = l * correction + p, o * correction + p * v, m_new
    print(f"correction {correction:.2f}   l {l:.4f}   o {o.tolist()[0]:7.4f} {o.tolist()[1]:7.4f}")
torch.testing.assert_close(o / l, torch.tensor([6.0, 25.0], dtype=torch.float64))

# %% [markdown]
# ### What a long row looks like
#
# The figure follows a row of 96 random scores. Above: the scores (grey), and the running maximum (red) as a staircase. In the
# middle: the correction of each step (blue). Below: the running sum $\ell$ (green). It can fall only where the staircase rises: the old
# terms are then measured against a larger reference, and together they may lose more than the new term, which is 1, brings.

# %%
torch.manual_seed(3)
scores = torch.randn(96, dtype=torch.float64) * 2
running_max = scores.cummax(dim=0).values
before = torch.cat([torch.tensor([-math.inf]), running_max[:-1]])
correction, l, sums = torch.exp(before - running_max), 0.0, []
for x, m, c in zip(scores, running_max, correction):
    l = l * c + torch.exp(x - m)
    sums.append(l)
rows.read_once(scores, running_max, correction, torch.stack(sums), "A row of 96 keys, read once")
plt.show()
moved = (correction[1:] < 1).sum().item()
print(f"the maximum moved at {moved + 1} of 96 keys, the first included")
sums = torch.stack(sums)
falls = sums[1:] < sums[:-1]
print(f"l fell at {falls.sum()} keys, at each of them the maximum moved: {(correction[1:][falls] < 1).all()}")
assert (correction <= 1).all() and (correction[1:][falls] < 1).all() and 0 < falls.sum() < moved

# %% [markdown]
# The corrections are nearly all 1, and not by chance. For scores in random order, key $j$ is the largest of the first $j$ with
# probability $1/j$. So the maximum of a row of $N$ moves $H_N = 1 + \frac12 + \dots + \frac1N \approx \ln N + 0.58$ times on average.
#
# In blocks of $n$ keys only the maximum of a block counts, and it moves $H_{N/n}$ times.

# %%
torch.manual_seed(0)
x = torch.randn(4000, 1024)
for n in (1, 16, 64):
    running = x.view(4000, -1, n).amax(dim=2).cummax(dim=1).values
    measured = 1 + (running[:, 1:] > running[:, :-1]).sum(dim=1).double().mean().item()
    theory = sum(1 / k for k in range(1, 1024 // n + 1))
    print(f"{1024 // n:4} blocks of {n:2}:   moves in theory {theory:.1f}   measured {measured:.1f}")
    assert abs(measured - theory) < 0.2

# %% [markdown]
# FlashAttention-4 (2026) uses this: it skips corrections that would matter little. The last exercise of this phase does the same.
#
# But rare is not never. A kernel that forgets the correction is right on every row whose largest score comes first, and a test with
# friendly inputs may hold no other rows.

# %% [markdown]
# ## 5. Merging two states
#
# One key at a time is no way to use a GPU. We want blocks, and blocks that are computed apart. So forget the order, and say what
# the state of a *set* of keys $A$ is:
#
# $$m_A = \max_{i \in A} x_i, \qquad \ell_A = \sum_{i \in A} e^{x_i - m_A}, \qquad o_A = \sum_{i \in A} e^{x_i - m_A}\, v_i .$$
#
# In code: `State` has the three parts, and `block_state` computes them for one block of keys. (`require_block` only refuses shapes
# that do not fit together.)

# %%
# FROM flashlab.attention.online_softmax: State, block_state (no docstrings)

# %% [markdown]
# For two disjoint sets the derivation of section 4 works with $B$ in place of the one new key. Take each sum to the common
# reference $m = \max(m_A, m_B)$, then add:
#
# $$\ell_{A \cup B} = \ell_A\, e^{m_A - m} + \ell_B\, e^{m_B - m}, \qquad
#   o_{A \cup B} = o_A\, e^{m_A - m} + o_B\, e^{m_B - m} .$$

# %%
# FROM flashlab.attention.online_softmax: identity, merge (no docstrings)

# %% [markdown]
# `finish` divides once, at the end. It also returns $\mathrm{lse} = m + \ln \ell$, the logarithm of the sum of exponentials, which
# section 8 is about.
#
# The example of section 4 in two blocks, $A$ = keys 1–2 and $B$ = keys 3–5. By hand:
#
# - $A$: $m = 3\ln2$, $\;\ell = \frac14 + 1 = 1.25$, $\;o = [7.75, 31]$
# - $B$: $m = 4\ln2$, $\;\ell = \frac14 + 1 + \frac1{16} = 1.3125$, $\;o = [7.75, 32.9375]$
# - together: $A$ is halved, $\ell = 0.625 + 1.3125 = 1.9375$: the number that the loop ended with.

# %%
# FROM flashlab.attention.online_softmax: finish (no docstrings)
x = torch.tensor(xs, dtype=torch.float64)
A, B = block_state(x[:2], vs[:2]), block_state(x[2:], vs[2:])
AB = merge(A, B)

for name, state in {"A": A, "B": B, "A + B": AB}.items():
    rounded = [round(value, 4) for value in state.o.tolist()]
    print(f"{name:6} m {state.m / LN2:.0f} ln 2   l {state.l:.4f}   o {rounded}")
assert abs(AB.l.item() - 1.9375) < 1e-12
torch.testing.assert_close(finish(AB)[0], torch.tensor([6.0, 25.0], dtype=torch.float64))

# %% [markdown]
# ### Why the order cannot matter
#
# Is `merge` associative and commutative? Map a state to the two sums it stands for, with no reference at all:
#
# $$\varphi(m, \ell, o) = \big(e^{m} \ell,\; e^{m} o\big) = \Big(\textstyle\sum_{i \in A} e^{x_i},\; \sum_{i \in A} e^{x_i} v_i\Big).$$
#
# Multiply the merge formulas by $e^m$, and read off $\varphi(\mathrm{merge}(a, b)) = \varphi(a) + \varphi(b)$.

# %% [markdown]
# So **merge is addition of vectors**, and addition is associative and commutative. So is the maximum, and $m$ and $\varphi$ together
# determine the state. The state of no keys, $(-\infty, 0, 0)$, changes nothing when it is merged: it is the **identity**.
#
# Why not just add? Because $e^{x}$ does not fit. A state is a pair of sums in a floating-point format of our own: $\ell$ and $o$ are
# the mantissas, $m$ is their common exponent. The correction aligns two such numbers before they are added.

# %% [markdown]
# Now run it. The two functions cut a row into random blocks of shuffled keys, and merge random neighbours in random order.

# %%
def merge_somehow(states, rng):
    """Merge a list of states, two random neighbours at a time, in a random left-right order."""
    states = list(states)
    while len(states) > 1:
        i = rng.randrange(len(states) - 1)
        pair = states[i : i + 2]
        states[i : i + 2] = [merge(*rng.sample(pair, 2))]
    return states[0]

def random_blocks(x, v, count, rng):
    """The states of `count` blocks of random sizes of the keys in random order."""
    order = torch.tensor(rng.sample(range(len(x)), len(x)))
    edges = [0, *sorted(rng.sample(range(1, len(x)), count - 1)), len(x)]
    return [block_state(x[order[a:b]], v[order[a:b]]) for a, b in itertools.pairwise(edges)]

# %% [markdown]
# Expect agreement with the reference, to about the precision of float64, for each of 300 splits. Expect the identity and
# commutativity to hold bit for bit, because IEEE addition and maximum are commutative.
#
# <details><summary>When commutativity is lost</summary>
#
# A compiler that fuses one product and the addition into a single `fma` loses it: only one of the two products is then rounded.
#
# </details>

# %%
rng = random.Random(0)
torch.manual_seed(0)
x, v = 5 * torch.randn(200, dtype=torch.float64), torch.randn(200, 4, dtype=torch.float64)
want = torch.softmax(x, dim=0) @ v
nothing = identity(head_dim=4, dtype=torch.float64)

worst, same_swapped, same_with_nothing = 0.0, 0, 0
for _ in range(300):
    blocks = random_blocks(x, v, rng.randint(2, 20), rng)
    o, lse = finish(merge_somehow(blocks, rng))
    worst = max(worst, (o - want).abs().max().item(), abs(lse.item() - torch.logsumexp(x, dim=0).item()))
    a, b = blocks[:2]
    same_swapped += all(map(torch.equal, merge(a, b), merge(b, a)))
    same_with_nothing += all(map(torch.equal, merge(a, nothing), a))
print("300 random splits, largest error below 1e-13:", worst < 1e-13)
print(f"bit for bit:  a + b = b + a in {same_swapped},  a + nothing = a in {same_with_nothing}")

# %% [markdown]
# The package's tests go further: there `hypothesis` searches for a counterexample over values, masks, splits, orders and
# bracketings (`tests/test_online_softmax.py`).

# %% [markdown]
# ### A row, consumed in blocks
#
# The animation reads 32 keys in 8 blocks of 4.
#
# - **Above**: the scores; the block at hand in orange, what has been read in blue, the rest in grey, the running maximum $m$ in red.
# - **Below left**: $\ell$ after the merge: the old $\ell$ times its correction (blue), plus the block's own sum (orange). Dotted: the
#   old $\ell$ before its correction.
# - **Below right**: $o/\ell$ (green), the output *if the row ended here*; dashed, the final values.
#
# When $m$ jumps, in block 6 above all, watch the blue part shrink inside its dotted outline.

# %% tags=["nbval-ignore-output"]
torch.manual_seed(16)
x = torch.randn(32, dtype=torch.float64) * 1.3
x[22] = 4.4                                                    # a late maximum
v = torch.randn(32, 2, dtype=torch.float64) + torch.tensor([0.8, -0.6], dtype=torch.float64)

blocks = [block_state(x[j : j + 4], v[j : j + 4]) for j in range(0, 32, 4)]
states = list(itertools.accumulate(blocks, merge, initial=identity(head_dim=2, dtype=torch.float64)))

animation = show.gif(rows.block_frames(x, states), seconds_a_frame=1.2, dpi=100)
assert len(animation.data) < 600_000
display(animation)

# %% [markdown]
# The same on numbers of yours: change the scores, the blocks' size, and how many of them are read. Where does $m$ move, and what does the
# correction do to $\ell$ and $o$ then?

# %%
drawings.play("softmax")

# %% [markdown]
# ## 6. Minus infinity minus minus infinity
#
# $-\infty$ comes into a state in two ways, both everyday:
#
# - the **start**: $m_0 = -\infty$, before any key;
# - a **mask**: some keys must not be seen, and their scores are set to $-\infty$. Even a whole block may be masked, and it may be
#   the first.

# %% [markdown]
# If at least one of the two maxima is finite, IEEE arithmetic does the right thing: $e^{-\infty - m} = e^{-\infty} = 0$. If neither
# is, the exponent is $-\infty - (-\infty)$, and that is NaN.
#
# Here is the merge without precaution, on two masked blocks and then a good one.

# %%
def merge_as_written(a, b):
    m = torch.maximum(a.m, b.m)
    ca, cb = torch.exp(a.m - m), torch.exp(b.m - m)
    return State(m, a.l * ca + b.l * cb, a.o * ca[..., None] + b.o * cb[..., None])

nothing = identity(head_dim=1, dtype=torch.float64)
good = block_state(torch.tensor([1.0, 2.0]).double(), torch.tensor([[3.0], [5.0]]).double())

once = merge_as_written(nothing, good)                              # one of the maxima is finite
twice = merge_as_written(merge_as_written(nothing, nothing), good)  # -inf - (-inf) on the way
print(f"start, block:               l = {once.l:.4f}")
print(f"start, masked block, block: l = {twice.l:.4f}   (the good block cannot help any more)")
assert once.l.isfinite() and twice.l.isnan()

# %% [markdown]
# The NaN is born in a block that contributes nothing, and it survives everything after it: $0 \cdot \mathrm{NaN}$ is NaN.
#
# The precaution is in `shifted_exp`: where the reference is $-\infty$, refer to 0 instead. Then the exponent is
# $-\infty - 0 = -\infty$, the exponential is 0, and a block that saw nothing adds nothing. Real kernels do the same, with one
# select on $m$.

# %%
# FROM flashlab.attention.online_softmax: shifted_exp (no docstrings)
fixed = merge(merge(nothing, nothing), good)
assert all(map(torch.equal, fixed, good))

o, lse = finish(merge(nothing, nothing))
print(f"start, masked block, block: l = {fixed.l:.4f}")
print(f"a row that saw no key:      o = {o.item()}, lse = {lse.item()}")

# %% [markdown]
# Note the last line. A row that may look at nothing gives $o = 0$ and $\mathrm{lse} = -\infty$ in this course, because that is the
# state of no keys.
#
# Libraries differ here. FlashAttention-3 writes $-\infty$ too. FlashAttention-2 writes $+\infty$ for such a row (and $-\infty$ in its
# split-KV path). `torch.softmax` gives NaN. When two libraries disagree on a masked row, look here first.

# %% [markdown]
# ### The tempting repair that is wrong
#
# "Start at a large negative *finite* number, say $-10^4$, and there will be no NaN." True, and the results are wrong
# whenever all the scores of a row lie far enough below that number: the maximum then is the sentinel, no key's.

# %%
sentinel = State(torch.tensor(-1e4).double(), torch.zeros(()).double(), torch.zeros(1).double())
low = block_state(torch.tensor([-20001.0, -20000.0]).double(), torch.tensor([[3.0], [5.0]]).double())

for name, start in {"-1e4": sentinel, "-inf": identity(head_dim=1, dtype=torch.float64)}.items():
    state = merge(start, low)
    o, lse = finish(state)
    print(f"m starts at {name}:  l = {state.l:.4f}   o = {o.item():.4f}   lse = {lse.item():.2f}")
assert abs(o.item() - (3 + 5 * math.e) / (1 + math.e)) < 1e-12

# %% [markdown]
# No NaN, no error: a row of zeros, silently. Distrust finite sentinels.

# %% [markdown]
# ## 7. Where rounding ends the algebra
#
# In real numbers `merge` is associative. In floating point, addition is not, so `merge` is not either: how you cut and bracket the
# blocks moves the last bits of the result. That can be measured.

# %% [markdown]
# The natural unit is the **unit roundoff** $u$, the largest relative error of one rounding: $2^{-11}$ for float16, $2^{-24}$ for
# float32, $2^{-53}$ for float64.
#
# First question: how often do $(a+b)+c$ and $a+(b+c)$ differ in any bit, and by how much? The test takes 20 000 triples of blocks per
# dtype.

# %%
def triples(dtype, count=20_000, keys=8):
    torch.manual_seed(0)
    x, v = (4 * torch.randn(3, count, keys)).to(dtype), torch.ones(3, count, keys, 1, dtype=dtype)
    m = x.amax(dim=-1)
    p = shifted_exp(x, m[..., None])
    return [State(*parts) for parts in zip(m, p.sum(dim=-1), (p[..., None] * v).sum(dim=-2))]

# %% [markdown]
# A guess before the measurement: each merge rounds a difference, an exponential, a product and a sum, each by about $u$. So expect a
# few $u$, in every dtype.

# %% tags=["nbval-ignore-output"]
for dtype in (torch.float16, torch.float32, torch.float64):
    a, b, c = triples(dtype)
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    differ = (left.l != right.l).double().mean().item()
    relative = (left.l.double() - right.l.double()).abs() / left.l.double()
    distance = relative.max().item() / (torch.finfo(dtype).eps / 2)
    print(f"{str(dtype):14} differ in some bit: {differ:.1%}   largest distance: {distance:.1f} u")
    assert torch.equal(left.m, right.m) and 0.1 < differ < 0.4 and distance < 6

# %% [markdown]
# About a fifth to a quarter of all triples differ, in every dtype, and never by more than a few $u$. The maxima never differ,
# because a maximum does not round.

# %% [markdown]
# ### How the error grows
#
# More exactly: in one merge, the side that holds the maximum has the correction $e^0 = 1$. Its product is exact, and only the
# addition rounds, by at most $u$. The other side is shrunk by $e^{-d}$, $d > 0$, and pays more: $d\,u$ for the exponent, about $2u$ for
# the exponential, $u$ for the product and $u$ for the sum. To first order, then,
#
# $$\text{relative error of } \ell \;\le\; (\text{merges on the longest path}) \times (4 + d)\, u .$$

# %% [markdown]
# A loop over $k$ blocks has a path of $k - 1$ merges, a balanced tree one of $\lceil \log_2 k \rceil$. This is a bound for the worst
# case. Roundings that go either way grow only like the square root.
#
# To see errors of float64 we need a better truth: `decimal` with 40 digits.

# %%
from decimal import Decimal, getcontext

getcontext().prec = 40
torch.manual_seed(0)
scores = (3 * torch.randn(1024)).half()                        # every dtype here holds these exactly
truth = sum(Decimal(s).exp() for s in scores.tolist())         # the sum of exp(score), to 40 digits

def relative_error(state):
    """Relative error of l e^m in units of u, against the truth."""
    u = torch.finfo(state.l.dtype).eps / 2
    return float(Decimal(state.l.item()) * Decimal(state.m.item()).exp() / truth - 1) / u

rng = random.Random(0)
errors = {}
for dtype in (torch.float16, torch.float32, torch.float64):
    x, v = scores.to(dtype), torch.ones(1024, 1, dtype=dtype)
    errors[dtype] = [relative_error(merge_somehow(random_blocks(x, v, 16, rng), rng)) for _ in range(200)]
largest = max(abs(e) for es in errors.values() for e in es)
print("600 splits in three dtypes, largest error below 10 u:", largest < 10)

# %% [markdown]
# And the growth with the number of merges, for float32: 256 rows of 4096 scores, cut into $k$ equal blocks, merged one
# after another or as a tree. The loop's bound takes the $d$ of every merge from the data, and the worst row. (It leaves out what a block
# rounds on its own.)

# %%
def tree(states):
    while len(states) > 1:
        states = [merge(*states[i : i + 2]) for i in range(0, len(states), 2)]  # len(states) is a power of 2
    return states[0]

torch.manual_seed(0)
x, v = 3 * torch.randn(256, 4096), torch.ones(4096, 1)
exact = torch.logsumexp(x.double(), dim=1)
counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
rms, bound = {"sequential": [], "tree": []}, []
for k in counts:
    states = [block_state(x_i, v_i) for x_i, v_i in zip(x.chunk(k, dim=1), v.chunk(k))]
    error = {}
    for name, state in {"sequential": reduce(merge, states), "tree": tree(states)}.items():
        error[name] = state.l.double() * torch.exp(state.m.double() - exact) - 1
        rms[name].append(error[name].square().mean().sqrt().item() / 2**-24)
    maxima = torch.stack([state.m for state in states])                     # [k, 256]
    d = (maxima[1:] - maxima.cummax(dim=0).values[:-1]).abs()               # of every merge of the loop
    bound.append((4 + d).sum(dim=0).max().item())
    assert error["sequential"].abs().max() < bound[-1] * 2**-24
assert rms["sequential"][-1] > 3 * rms["tree"][-1]

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
groups = {str(dtype).removeprefix("torch."): es for dtype, es in errors.items()}
curves.dots(left, groups, title="200 random splits each", ylabel="relative error of l, in u")
root = [0.6 * math.sqrt(k) for k in counts]
lines = [("sequential, measured", counts, rms["sequential"], "blue", "o-"),
         ("tree, measured", counts, rms["tree"], "orange", "s-"),
         ("grows like √k", counts, root, "grey", ":"),
         ("bound, sequential", counts, bound, "red", "--")]
curves.curves(right, lines, log="xy", title="float32, 256 rows of 4096", xlabel="blocks k",
              ylabel="rms relative error of l, in u", ylim=(0.2, 2e5))
plt.show()

# %% [markdown]
# *Left: one row, 200 ways to cut and bracket it; each point is one way. In units of $u$ the three dtypes look alike. (The points
# lie on levels because $\ell$ can only be one of the dtype's numbers.)*
#
# *Right: the error against the number of blocks. The loop (blue) grows like the square root, the tree (orange) hardly at all; the
# bound (red) is far away.*

# %% [markdown]
# Is the worst case ever real? Yes, with the friendliest input there is: equal scores, keys one at a time, in float16. Once $\ell$
# reaches 2048, adding 1 no longer changes it: the next float16 number is 2050, and $2048 + 1$ rounds back.
#
# Let the first half of 4096 values be 0 and the second half 1. The output should be one half.

# %%
v = torch.cat([torch.zeros(2048, 1), torch.ones(2048, 1)])
for dtype in (torch.float16, torch.float32):
    keys = (block_state(torch.zeros(1, dtype=dtype), v_j[None].to(dtype)) for v_j in v)
    state = reduce(merge, keys)
    output = finish(state)[0].item()
    print(f"{str(dtype):14} l = {state.l.item():.0f} of 4096   o / l = {output}   (right: 0.5)")
    assert output == (0.5 if dtype == torch.float32 else 1.0)

# %% [markdown]
# Twice the right answer, with no overflow, no NaN and no large score. Hence a rule that all kernels of this course follow: **$m$,
# $\ell$ and $o$ live in float32**, whatever the dtype of $Q$, $K$, $V$. The matrix products may take float16 inputs; the statistics may
# not.

# %% [markdown]
# Two more consequences:
#
# - A kernel that fixes its block size and order gives the same bits each time. One that lets the *schedule* decide which block is
#   merged first does not. Both are right within a few $u$.
# - Compare two kernels with a tolerance that comes from $u$, never bit for bit, and never with a number out of the air.

# %% [markdown]
# ## 8. What is left of a row: lse
#
# To finish a row, divide. And keep one number more, the logarithm of the sum of exponentials:
#
# $$\text{output} = \frac{o}{\ell}, \qquad \mathrm{lse} = m + \ln \ell = \ln \sum_j e^{x_j} .$$
#
# It fits in a float where the sum would not. With it any probability can be computed again from its score, with no row sum at
# hand. The backward pass (phase 5) lives on that:
#
# $$p_j = e^{x_j - m} / \ell = e^{x_j - \mathrm{lse}} .$$

# %%
o, lse = finish(AB)                                            # the five keys of sections 4 and 5
print(f"output {[round(value, 4) for value in o.tolist()]}   exp(lse) = {torch.exp(lse):.4f}")

x = torch.tensor(xs, dtype=torch.float64)
torch.testing.assert_close(torch.exp(x - lse), softmax_safe(x))
torch.testing.assert_close(torch.exp(x - lse) * 31, torch.tensor([2.0, 8, 4, 16, 1], dtype=torch.float64))

# %% [markdown]
# ### (o, lse) is enough
#
# Second use: merging *finished* results. Suppose two devices have each finished the same query against their own keys, and thrown
# $m$ and $\ell$ away. From $(o_1, \mathrm{lse}_1)$ one gets the sums of section 5 back:
# $\sum e^{x} = e^{\mathrm{lse}_1}$ and $\sum e^{x} v = e^{\mathrm{lse}_1} o_1$.
#
# Compare with $\varphi(m, \ell, o) = (e^m \ell, e^m o)$: a finished result *is* a state, with $m = \mathrm{lse}$ and $\ell = 1$. So
# `merge` can do it.

# %%
# FROM flashlab.attention.online_softmax: merge_finished (no docstrings)
o, lse = merge_finished(*finish(A), *finish(B))
torch.testing.assert_close(o, finish(AB)[0])
torch.testing.assert_close(lse, finish(AB)[1])
print(f"from finished halves: {[round(value, 4) for value in o.tolist()]}, exp(lse) = {torch.exp(lse):.4f}")

# %% [markdown]
# $o$ alone would not do. Below, two pairs of halves have the *same* outputs, 0 and 10. In the first pair both halves are equally heavy; in
# the second, one weighs $e^3$ times as much.

# %%
halves = torch.tensor([0.0]), torch.tensor([10.0])
for lse1, lse2 in ((2.0, 2.0), (2.0, 5.0)):
    o, _ = merge_finished(halves[0], torch.tensor(lse1), halves[1], torch.tensor(lse2))
    print(f"lse {lse1} and {lse2}:  merged output {o.item():.3f}")

# %% [markdown]
# ### m is only a reference
#
# If $(m, \ell, o)$ and $(\mathrm{lse}, 1, o/\ell)$ stand for the same sums, so do all states between them:
#
# $$(m, \ell, o) \;\sim\; (m + c,\; \ell e^{-c},\; o\, e^{-c}) \qquad \text{for every } c .$$
#
# So $m$ need not be the maximum. It needs to be *near* it, so that nothing overflows. A stale maximum, a little too low, is as good.

# %%
for shift in (-5.0, 0.0, 5.0):
    other = State(AB.m + shift, AB.l * math.exp(-shift), AB.o * math.exp(-shift))
    torch.testing.assert_close(finish(other), finish(AB))
    torch.testing.assert_close(finish(merge(other, A)), finish(merge(AB, A)))
print("the reference can be moved by -5, 0, +5 and nothing changes: True")

# %% [markdown]
# ## 9. From here to FlashAttention
#
# Count once more, now for attention over a row of $N$ keys. What has to be *stored* for one query row between the passes?
#
# | | passes over the keys | stored per row |
# |:--|:--|:--|
# | naive, safe | 3: scores and maximum; exponentials and sum; weighted sum of $V$ | a row of $S$ or $P$: $N$ numbers |
# | online softmax, then $PV$ | 2 | a row of $S$ or $P$: $N$ numbers |
# | online softmax with $o$ | **1** | $m, \ell, o$: $D + 2$ numbers |

# %% [markdown]
# Only the last row does not grow with $N$. That is the step from online softmax to FlashAttention; Ye's note (2023) derives it in
# these three stages.
#
# The price is the rescaling: $D + 1$ multiplications per block of $B$ keys, beside the $4 B D$ operations of the two products.

# %%
D, B = 64, 64
for N in (1024, 16384, 262144):
    print(f"N = {N:6}:  a row of S in float32 {4 * N:8} bytes   the state {4 * (D + 2)} bytes")
print(f"rescaling, blocks of {B}: {(D + 1) / (4 * B * D):.2%} of the operations of the two products")

# %% [markdown]
# Because states merge in any order, the blocks need not even be on one machine. Here is **ring attention** (Liu et al. 2023) with
# four pretend devices. Each holds a quarter of the queries and of the keys. In each step every device merges in the keys that it holds,
# then hands them to its neighbour. So each device sees the blocks in another order.

# %%
torch.manual_seed(0)
devices, n, D = 4, 32, 16
q, k, v = torch.randn(3, devices, n, D, dtype=torch.float64)

states = [identity(n, head_dim=D, dtype=torch.float64) for _ in range(devices)]
for step in range(devices):
    for rank in range(devices):
        held = (rank - step) % devices                         # whose keys are on this device now
        scores = q[rank] @ k[held].T / math.sqrt(D)
        states[rank] = merge(states[rank], block_state(scores, v[held]))

ring = torch.cat([finish(state)[0] for state in states])
want, _ = reference.attention(*(x.reshape(1, 1, devices * n, D) for x in (q, k, v)))
torch.testing.assert_close(ring, want[0, 0])
print("four devices, four orders, one result:", tuple(ring.shape))

# %% [markdown]
# Where each piece of this lecture goes:
#
# | piece | where it returns |
# |:--|:--|
# | the loop over blocks with $m, \ell, o$ | phases 2 (in Python), 3–4 (Triton), 6–9 (CUDA) |
# | one division at the end, not one per block | FlashAttention-2; every kernel from phase 2 on |
# | $-\infty$ with care | causal masks and tails, from phase 3 on |
# | $p = e^{x - \mathrm{lse}}$ | the backward pass, phase 5 |
# | `merge_finished` | split-KV decoding and ring attention, phases 12 and 13 |
# | statistics in float32 | everywhere, and the checker looks for it |

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Subtracting the maximum changes no softmax, and keeps every exponential in $[0, 1]$ and the sum in $[1, N]$.
# - The sum against the *running* maximum obeys a recurrence, and so does the unnormalised output. One pass is enough.
# - The state $(m, \ell, o)$ is addition in disguise, with a common exponent $m$. Hence any order, any split, any device.
# - In floating point each merge costs a few $u$. Statistics in float16 can fail completely; in float32 they do not.
# - $-\infty - (-\infty)$ is the one exponent that needs care; a finite sentinel is not care.
# - $(o, \mathrm{lse})$ is all that must be kept of a row.

# %% [markdown]
# Test yourself: *a colleague wants to compute the maximum of every row beforehand, in a cheap separate kernel that reads only $Q$ and
# $K$, so that no correction is needed. What does it cost, and what does it save?*
#
# <details><summary>Answer</summary>
#
# The scores have to be computed twice: $2N^2D$ operations on top of $4N^2D$, half of the forward pass's products again, and $K$ is read
# twice. It saves the corrections, $D + 1$ multiplications per row and block: 0.4 % of the operations at $B = D = 64$. (They do not
# run on the tensor cores, so their share of the *time* is larger than that.)
#
# A good *bound* on the maximum is another matter: by Cauchy–Schwarz $x_j \le \|q\| \max_j \|k_j\| / \sqrt{D}$ costs nearly nothing, and by
# section 8 any reference will do that is close enough. But if the bound is more than 103 too high, every exponential of the row is 0 in
# float32.
#
# </details>

# %% [markdown]
# Left to explore: what the naive way costs in bytes, and why neither of the two obvious ways to tile it works (phase 1); the loop over
# blocks for a whole matrix (phase 2); skipping corrections (exercise 0.8).

# %% [markdown]
# ## References
#
# - A. Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, arXiv:1706.03762. Section 3.2.1: the formula and the reason for $1/\sqrt{D}$.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv:1805.02867. Algorithms 1–3 are the naive, safe
#   and online softmax with their access counts; section 3.1 has the parallel form and its associativity.
# - M. N. Rabe, C. Staats, *Self-attention Does Not Need O(n²) Memory*, 2021, arXiv:2112.05682. The running output beside the running sum.
# - T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, NeurIPS
#   2022, arXiv:2205.14135. Tiling and recomputation, and the count of memory accesses.
# - T. Dao, *FlashAttention-2*, 2023, arXiv:2307.08691. Section 3.1: divide once at the end, keep lse in place of $m$ and $\ell$.
# - Z. Ye, *From Online Softmax to FlashAttention*, lecture note, University of Washington CSE 599M, 2023. Three passes, two, one.
# - Z. Ye et al., *FlashInfer*, MLSys 2025, arXiv:2501.01005. Attention states and the operator that composes them; in its documentation
#   `merge_state` and "Attention States and Recursive Attention".
# - H. Liu, M. Zaharia, P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, 2023, arXiv:2310.01889.
# - T. Dao, D. Haziza, F. Massa, G. Sizov, *Flash-Decoding for long-context inference*, PyTorch blog, 2023. Split-KV.
# - T. Zadouri, M. Hoehnerbach, J. Shah, T. Liu, V. Thakkar, T. Dao, *FlashAttention-4*, 2026. The correction that is skipped.
# - P. Blanchard, D. J. Higham, N. J. Higham, *Accurately computing the log-sum-exp and softmax functions*, IMA Journal of Numerical
#   Analysis 41 (2021). Error bounds for the shifted and unshifted forms.
# - N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002. Chapters 2–4: $u$, and summation in different orders.
