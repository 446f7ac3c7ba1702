# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 0 · Attention and online softmax
#
# Attention is two matrix products with a softmax between them. The softmax is what makes it hard: it seems to need a
# whole row of scores before it can say anything about one of them. This lecture takes that "whole row" away. At its end
# a row can be cut into pieces, the pieces computed in any order, on any device, and put together again, exactly. Every
# kernel of this course, and every FlashAttention kernel in production, stands on that one fact.

# %% [markdown]
# ## What you will be able to do
#
# - compute attention by hand on a 3×2 example, and say which of its steps needs the whole row;
# - predict the score at which a softmax in a given dtype breaks, and the three ways in which it breaks;
# - derive the online recurrence for the normaliser and for the output, and count what it saves in memory accesses;
# - merge two partial results $(m, \ell, o)$, prove that the order cannot matter, and measure where rounding disagrees;
# - handle a row, or a block of a row, with nothing in it;
# - say why the pair $(o, \mathrm{lse})$ is all that has to be kept of a row.

# %% [markdown]
# ## What you need first
#
# Python and the basics of PyTorch tensors; matrix products; $e^x$ and $\ln x$. No GPU, no Triton, no CUDA. About 75
# minutes of reading and running, then the exercises in `exercises/00_attention_and_online_softmax.ipynb`.
#
# The course writes $m$, $\ell$ (`l`), $o$ for the state of a row; the FlashAttention papers use the same letters.

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
from flashlab.figures import curves, rows, show
from flashlab.attention.online_softmax import (
    State,
    block_state,
    identity,
    merge,
    online_softmax,
    require_block,
    require_mergeable,
    require_one_dtype,
    require_state,
    row_max,
    shifted_exp,
    softmax_naive,
    softmax_safe,
)

show.style()
torch.set_printoptions(precision=4, sci_mode=False)

# %% [markdown]
# ## 1. Attention, by hand
#
# For queries $Q$ (one row a query), keys $K$ and values $V$ (one row a key), Vaswani et al. (2017) define
#
# $$S = \frac{Q K^\top}{\sqrt{D}}, \qquad P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}}, \qquad O = P V .$$
#
# Row $i$ of $O$ is a weighted mean of the rows of $V$; the weights are positive and sum to 1. Each row of $O$ depends on
# one row of $Q$ and on all of $K$ and $V$. So one query row is the unit of thought for this whole lecture.
#
# Here are three of each, with $D = 2$. The odd factor in $K$ is there so that $e^{S}$ comes out in whole numbers.

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
# The whole computation in one picture. Read it from left to right, one row at a time: the highlighted row of $Q$ becomes
# a row of $e^S$, a row of $P$, a row of $O$, and no other row of $Q$ is involved. The two matrices in the middle are the
# trouble: they have $N^2$ entries, everything else has $N D$.

# %%
P = softmax_safe(S)
named = {"Q  [3, 2]": Q, "exp(S)  [3, 3]": torch.exp(S), "P  [3, 3]": P, "V  [3, 2]": V,
         "O = P V  [3, 2]": P @ V}
rows.matrices(named, rows={name: 2 for name in named if not name.startswith("V")})
plt.show()

# %% [markdown]
# The oracle first: the formula in plain Python, one number at a time. It is slow and it takes no precaution, but there
# is nothing in it to misunderstand.

# %%
# FROM flashlab.attention.online_softmax: attention_by_loops (no docstrings)
O_by_loops = attention_by_loops(Q, K, V)
torch.testing.assert_close(O_by_loops, O_by_hand)
print(O_by_loops.round(decimals=10))

# %% [markdown]
# Now in tensors: three lines for the same numbers. The same again from the course's reference implementation, which
# later phases use as their oracle (it takes `[batch, heads, seq_len, head_dim]`, like every real kernel).

# %%
O_in_tensors = softmax_naive(Q @ K.T / math.sqrt(2)) @ V
O_reference, _ = reference.attention(Q[None, None], K[None, None], V[None, None])

torch.testing.assert_close(O_in_tensors, O_by_hand)
torch.testing.assert_close(O_reference[0, 0], O_by_hand)
print("by hand = loops = tensors = reference: True")

# %% [markdown]
# ## 2. The exponential does not fit
#
# $e^x$ grows out of every floating-point format. If the largest finite number is $X$, then $e^x$ overflows to `inf` near
# $x = \ln X$. For float16 that is $\ln 65504 = 11.09$: a score of 12 is enough.
#
# Do not take the formula's word for it. Walk over the floating-point numbers themselves: the bits of positive floats,
# read as integers, are in order, so bisection finds the last score whose exponential is still finite.

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
# Two things to notice. bfloat16 overflows where float32 does: it has float32's exponent bits, and gave up mantissa bits
# for them. And its last good score is 88.5 only because the next bfloat16 number is 89: near 88 they are 0.5 apart.
#
# An overflow of one exponential is not the only failure. There are three, and they look different:
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
# How soon does that bite? The mean square of a dot product of two random vectors of length $D$ is $D$; the factor
# $1/\sqrt{D}$ brings it back to 1, and that is why it is in the formula. But trained queries and keys are not random:
# nothing keeps the scores of a real model at a standard deviation of 1.
#
# Let the scores be normal with standard deviation $\sigma$, in rows of $N = 512$. A row turns to NaN when its largest
# score passes 11.09, so theory says with probability $1 - \Phi(11.09/\sigma)^N$. The figure compares that with 1000 rows
# for each $\sigma$, and adds the silent failure.

# %%
from statistics import NormalDist

torch.manual_seed(0)
sigma = [1.5, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.25, 4.5, 5, 5.5, 6]
theory = [1 - NormalDist().cdf(math.log(65504) / s) ** 512 for s in sigma]
samples = [softmax_naive((torch.randn(1000, 512) * s).half()) for s in sigma]
nan = [p.isnan().any(dim=1).double().mean().item() for p in samples]
zero = [p.eq(0).all(dim=1).double().mean().item() for p in samples]

fig, ax = plt.subplots()
lines = [("NaN, theory", sigma, theory, "grey", "-"), ("NaN, measured", sigma, nan, "blue", "o"),
         ("silently all zeros, measured", sigma, zero, "red", "s--")]
curves.curves(ax, lines, title="Naive softmax in float16, rows of 512",
              xlabel="standard deviation of the scores", ylabel="fraction of rows")
plt.show()
distance = max(abs(a - b) for a, b in zip(theory, nan))
print("theory and measurement differ by less than 0.05 everywhere:", distance < 0.05)

# %% [markdown]
# *Rows of 512 float16 scores, 1000 rows a point. At a standard deviation of 3.5 a third of the rows is NaN, and another 45 %
# are zeros without a word, because only their sum overflowed.* The zeros disappear again to the right only because those
# rows have become NaN.

# %% [markdown]
# ## 3. The safe softmax
#
# A softmax does not change when a constant is subtracted from the whole row, because the constant cancels:
#
# $$\frac{e^{x_j - c}}{\sum_i e^{x_i - c}} = \frac{e^{-c}\, e^{x_j}}{e^{-c} \sum_i e^{x_i}} = \frac{e^{x_j}}{\sum_i e^{x_i}}.$$
#
# Every $c$ is right in real numbers. In floating point one is best, the row maximum $c = m = \max_i x_i$:
#
# - every exponent is $\le 0$, so every exponential is in $[0, 1]$: nothing overflows;
# - the largest of them is $e^0 = 1$ exactly, so $1 \le \ell \le N$: the division is safe;
# - a term that underflows is far below the rounding error of the sum. In float32 a term is lost below $e^{-103}$, and a
#   million lost terms together are still invisible.

# %%
# FROM flashlab.attention.online_softmax: row_max, softmax_safe (no docstrings)

# %% [markdown]
# `shifted_exp(x, m)` is $e^{x-m}$ with one precaution, the subject of section 6. The claim to test now: the softmax is
# right at any height, for every dtype. We compare with float64, *for the same scores, after their rounding* to the dtype.

# %%
torch.manual_seed(0)
for dtype, shift in itertools.product((torch.float16, torch.bfloat16, torch.float32), (0, 1000, -1000)):
    x = (3 * torch.randn(64, 512) + shift).to(dtype)
    error = (softmax_safe(x).double() - torch.softmax(x.double(), dim=-1)).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps, (dtype, shift, error)
print("9 combinations of dtype and height, error below 4 epsilon of the dtype: True")

# %% [markdown]
# What it cannot repair is a score that was rounded before it arrived. Near 1000 neighbouring float16 numbers are 0.5
# apart, and $e^{0.5} = 1.65$. That is why kernels keep the *scores* in float32 too, straight from the matrix product.

# %% [markdown]
# ## 4. Three passes, two passes, one pass
#
# Now think of memory. The row lives in a memory that is large and slow (HBM, on a GPU); arithmetic is cheap beside
# fetching its operands. Count the accesses of one element, reads of $x$ and writes of the result $y$:
#
# - **naive**: read $x$ for the sum; read $x$ again and write $y$: 3;
# - **safe**: read $x$ for the maximum; read $x$ for the sum; read $x$ again and write $y$: 4.
#
# Safety costs a third more traffic. A list that counts its accesses confirms it.

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
# The two softmaxes as loops over such rows: the shape of the code is the count.

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
# Can the first two passes of the safe softmax become one? The sum
# $\ell = \sum_i e^{x_i - m}$ needs the maximum $m$ of the *whole* row, which is known only at the end of pass 1. That
# looks like a proof that two passes are needed. It is not: it only shows that we asked for the wrong sum.
#
# Ask for a sum that *can* be known after $j$ elements. Let $m_j = \max_{i \le j} x_i$, and refer to that:
#
# $$\ell_j = \sum_{i \le j} e^{x_i - m_j}.$$
#
# For $j = N$ this is the $\ell$ we want. Each step has a new reference $m_j$, so express it by the step before it. Split
# off the last term, then move the reference of the rest from $m_j$ back to $m_{j-1}$, by adding and subtracting it:
#
# $$\ell_j = \sum_{i<j} e^{x_i - m_j} + e^{x_j - m_j}
#          = \sum_{i<j} e^{x_i - m_{j-1}}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} .$$
#
# The second factor does not depend on $i$, so it leaves the sum, and the sum that remains is $\ell_{j-1}$ by definition:
#
# $$\boxed{\; m_j = \max(m_{j-1}, x_j), \qquad \ell_j = \ell_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j} \;}
# \qquad m_0 = -\infty,\; \ell_0 = 0 .$$
#
# This is the *online normaliser* of Milakov & Gimelshein (2018). The factor $e^{m_{j-1} - m_j}$ is the **correction**: it
# is 1 while the maximum stands still and below 1 when it moves. **It is never above 1**: the old maximum stands on the
# left. Keep that sentence; it finds the commonest bug of the field.

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
# With the recurrence the safe softmax needs two passes and 3 accesses an element: the naive one's traffic, without its
# overflow. In the package, `online_softmax` does this for tensors; here it is on a counted row.

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

print("accesses an element, online:", accesses(online, torch.linspace(-3, 3, 100).tolist()))
x = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)) * 10
torch.testing.assert_close(online_softmax(x), torch.softmax(x, dim=-1))

# %% [markdown]
# ### The recurrence for the output
#
# Pass 2 cannot go: writing $p_j = e^{x_j - m}/\ell$ needs the final $m$ and $\ell$, for the very first $j$ already. Every
# softmax must read its row twice.
#
# But attention does not want $p$. It wants $\sum_j p_j v_j$, one vector of $D$ numbers, and $p$ is only on the way. Pull
# the division out of the sum, and play the same trick on what is left. With $v_j$ the $j$-th row of $V$, let
#
# $$o_j = \sum_{i \le j} e^{x_i - m_j}\, v_i \qquad\text{so that the output is}\qquad \frac{o_N}{\ell_N}.$$
#
# Split off the last term and move the reference, exactly as before; $v_i$ only rides along:
#
# $$o_j = \sum_{i<j} e^{x_i - m_{j-1}}\, e^{m_{j-1} - m_j}\, v_i + e^{x_j - m_j}\, v_j
# \;\;\Longrightarrow\;\; \boxed{\; o_j = o_{j-1}\, e^{m_{j-1} - m_j} + e^{x_j - m_j}\, v_j \;} \qquad o_0 = 0 .$$
#
# One pass. After it, one division. **Nothing of length $N$ was ever kept**: the state is $m$, $\ell$ and $o$, that is
# $D + 2$ numbers. Rabe & Staats (2021) showed with it that attention does not need $O(N^2)$ memory; Dao et al. (2022) made
# it FlashAttention.
#
# By hand: with $v = ([31,0], [0,31], [31,0], [0,31], [0,31])$ and the weights $2, 8, 4, 16, 1$ over 31 the output is
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
# The figure follows a row of 96 random scores. Above: the scores, and the running maximum as a staircase. In the middle:
# the correction of each step. Below: the running sum $\ell$, which falls each time the staircase rises: the old terms
# are re-measured against a larger reference.

# %%
torch.manual_seed(3)
scores = torch.randn(96, dtype=torch.float64) * 2
states = list(itertools.accumulate((block_state(s[None], torch.ones(1, 1).double()) for s in scores), merge))
running_max = torch.stack([s.m for s in states])
correction = shifted_exp(torch.cat([torch.tensor([-math.inf]).double(), running_max[:-1]]), running_max)

rows.read_once(scores, running_max, correction, torch.stack([s.l for s in states]),
               "A row of 96 keys, read once")
plt.show()
moved = (correction[1:] < 1).sum().item()
print(f"the maximum moved at {moved + 1} of 96 keys, the first included")
assert (correction <= 1).all()

# %% [markdown]
# The corrections are nearly all 1, and that is no accident of this row. For scores in random order, key $j$ is the
# largest of the first $j$ with probability $1/j$, whatever their distribution. So the maximum of a row of $N$ moves
# $H_N = 1 + \frac12 + \dots + \frac1N \approx \ln N + 0.58$ times on average. In blocks of $B$ keys only the maximum of a
# block counts, and it moves $H_{N/B}$ times.

# %%
torch.manual_seed(0)
x = torch.randn(4000, 1024)
for B in (1, 16, 64):
    running = x.view(4000, -1, B).amax(dim=2).cummax(dim=1).values
    measured = 1 + (running[:, 1:] > running[:, :-1]).sum(dim=1).double().mean().item()
    theory = sum(1 / k for k in range(1, 1024 // B + 1))
    print(f"{1024 // B:4} blocks of {B:2}:   moves in theory {theory:.1f}   measured {measured:.1f}")
    assert abs(measured - theory) < 0.2

# %% [markdown]
# FlashAttention-4 (2026) uses this: it skips a correction that would not matter much, and the last exercise of this
# phase lets you do the same. But rare is not never. A kernel that forgets the correction is right on every row whose
# largest score comes first, and a test with friendly inputs may hold no other rows.

# %% [markdown]
# ## 5. Merging two states
#
# One key at a time is no way to use a GPU; we want blocks, and blocks computed apart. So forget the order, and say what the
# state of a *set* of keys $A$ is:
#
# $$m_A = \max_{i \in A} x_i, \qquad \ell_A = \sum_{i \in A} e^{x_i - m_A}, \qquad o_A = \sum_{i \in A} e^{x_i - m_A}\, v_i .$$
#
# Of one block of keys it is computed at once:

# %%
# FROM flashlab.attention.online_softmax: State, block_state (no docstrings)

# %% [markdown]
# For two disjoint sets the derivation of section 4 goes through with $B$ in place of the one new key: take each sum to
# the common reference $m = \max(m_A, m_B)$, then add.
#
# $$\ell_{A \cup B} = \ell_A\, e^{m_A - m} + \ell_B\, e^{m_B - m}, \qquad
#   o_{A \cup B} = o_A\, e^{m_A - m} + o_B\, e^{m_B - m} .$$

# %%
# FROM flashlab.attention.online_softmax: merge (no docstrings)

# %% [markdown]
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
torch.testing.assert_close(AB.l.item(), l)
torch.testing.assert_close(finish(AB)[0], torch.tensor([6.0, 25.0], dtype=torch.float64))

# %% [markdown]
# ### Why the order cannot matter
#
# Is `merge` associative and commutative? One can expand both sides; it is more useful to see *why*. Map a state to the
# two sums it stands for, with no reference at all:
#
# $$\varphi(m, \ell, o) = \big(e^{m} \ell,\; e^{m} o\big) = \Big(\textstyle\sum_{i \in A} e^{x_i},\; \sum_{i \in A} e^{x_i} v_i\Big).$$
#
# Multiply the merge formulas by $e^m$ and read off $\varphi(\mathrm{merge}(a, b)) = \varphi(a) + \varphi(b)$: **merge is
# addition of vectors**, and addition is associative and commutative. The maximum is so on its own, and $m$ and
# $\varphi$ together determine the state. The identity is the state of no keys, $(-\infty, 0, 0)$.
#
# So why not just add? Because $e^{x}$ does not fit. A state $(m, \ell, o)$ is the pair of sums in a floating-point
# format of our own: $\ell$ and $o$ are the mantissas, and $m$ is their common exponent. The correction is the shift that
# aligns two such numbers before an addition.
#
# Now run it. Cut a row of 200 keys at random, shuffle the keys first, merge random neighbours in random order, and do so 300 times.

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
# What to expect: agreement with the reference to about the precision of float64 for every split, and, bit for bit, the
# identity and commutativity. (Commutativity is exact because IEEE addition and maximum are. A compiler that fuses one product and
# the addition into a single `fma` loses it: only one of the two products is then rounded.)

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
# The animation reads 32 keys in 8 blocks of 4. **Above**: the scores; the block at hand in orange, what has been read in
# blue, what has not in grey, and the running maximum $m$ in red. **Below left**: $\ell$ after the merge, made of the old
# $\ell$ times its correction (blue) and the block's own sum (orange); dotted, the old $\ell$ before its correction. **Below right**: $o/\ell$, the output *if the row
# ended here*, on its way to the final values (dashed). When $m$ jumps, in block 6 above all, watch the blue part of
# $\ell$ shrink inside its dotted outline.

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
# ## 6. Minus infinity minus minus infinity
#
# $-\infty$ comes into a state in two ways, both everyday:
#
# - the **start**: $m_0 = -\infty$, before any key;
# - a **mask**: a causal mask, a sliding window or padding sets scores to $-\infty$, and a whole block may be masked. The
#   first block of a row may.
#
# While at least one of the two maxima is finite, IEEE arithmetic does the right thing by itself:
# $e^{-\infty - m} = e^{-\infty} = 0$. When neither is, the exponent is $-\infty - (-\infty)$, and that is NaN. Here is
# the merge as the formula has it, without precaution, on two masked blocks and then a good one.

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
# The precaution in `shifted_exp`: where the reference is $-\infty$, refer to 0 instead. Then the exponent is
# $-\infty - 0 = -\infty$, the exponential is 0, and a block that saw nothing adds nothing. No branch is needed, one select
# on $m$ is enough, and it is what real kernels do.

# %%
# FROM flashlab.attention.online_softmax: shifted_exp (no docstrings)
fixed = merge(merge(nothing, nothing), good)
assert all(map(torch.equal, fixed, good))

o, lse = finish(merge(nothing, nothing))
print(f"start, masked block, block: l = {fixed.l:.4f}")
print(f"a row that saw no key:      o = {o.item()}, lse = {lse.item()}")

# %% [markdown]
# Note the convention in the last line: a row that may look at nothing gives $o = 0$ and $\mathrm{lse} = -\infty$ in this
# course, as in FlashAttention. `torch.softmax` gives NaN for it. When two libraries disagree on a masked row, look here first.

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
# In real numbers `merge` is associative. In floating point, addition is not, so `merge` is not either: which blocks you
# cut and how you bracket them moves the last bits of the result. That is no reason to worry and no reason to look away; it
# is something to measure.
#
# The natural unit is the dtype's **unit roundoff** $u$, the largest relative error of one rounding: $2^{-11}$ for
# float16, $2^{-24}$ for float32, $2^{-53}$ for float64. First question: how often do $(a+b)+c$ and $a+(b+c)$ differ in any
# bit, and by how much? 20 000 triples of blocks for each dtype.

# %%
def triples(dtype, count=20_000, keys=8):
    torch.manual_seed(0)
    x, v = (4 * torch.randn(3, count, keys)).to(dtype), torch.ones(3, count, keys, 1, dtype=dtype)
    m = x.amax(dim=-1)
    p = shifted_exp(x, m[..., None])
    return [State(*parts) for parts in zip(m, p.sum(dim=-1), (p[..., None] * v).sum(dim=-2))]

# %% [markdown]
# A guess before the measurement: each merge rounds a difference, an exponential, a product and a sum, each within about $u$
# of its value. So a few $u$, in every dtype.

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
# About a fifth to a quarter of all triples differ, in every dtype, and never by more than a few $u$. (The maxima never
# differ: a maximum does not round.)
#
# ### How the error grows
#
# More exactly. In one merge, the side that holds the maximum has correction $e^0 = 1$: its product is exact, and only the
# addition rounds, which costs at most $u$. The other side is shrunk by $e^{-d}$, $d > 0$, and pays more: $d\,u$ for the rounding of
# the exponent, about $2u$ for the exponential, $u$ for the product and $u$ for the sum. To first order, then,
#
# $$\text{relative error of } \ell \;\le\; (\text{merges on the longest path}) \times (4 + d)\, u .$$
#
# A sequential loop over $k$ blocks has a path of $k - 1$ merges; a balanced tree has $\lceil \log_2 k \rceil$. That is a
# bound for the worst case. Roundings that go either way grow only like the square root.
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
# after another or as a tree.

# %%
def tree(states):
    while len(states) > 1:
        states = [merge(*states[i : i + 2]) for i in range(0, len(states), 2)]  # len(states) is a power of 2
    return states[0]

torch.manual_seed(0)
x, v = 3 * torch.randn(256, 4096), torch.ones(4096, 1)
exact = torch.logsumexp(x.double(), dim=1)
counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
rms = {"sequential": [], "tree": []}
for k in counts:
    states = [block_state(x_i, v_i) for x_i, v_i in zip(x.chunk(k, dim=1), v.chunk(k))]
    for name, state in {"sequential": reduce(merge, states), "tree": tree(states)}.items():
        error = state.l.double() * torch.exp(state.m.double() - exact) - 1
        rms[name].append(error.square().mean().sqrt().item() / 2**-24)
assert rms["sequential"][-1] > 3 * rms["tree"][-1]

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
groups = {str(dtype).removeprefix("torch."): es for dtype, es in errors.items()}
curves.dots(left, groups, title="200 random splits each", ylabel="relative error of l, in u")
root, bound = [0.6 * math.sqrt(k) for k in counts], [4.0 * (k - 1) for k in counts]
lines = [("sequential, measured", counts, rms["sequential"], "blue", "o-"),
         ("tree, measured", counts, rms["tree"], "orange", "s-"),
         ("grows like √k", counts, root, "grey", ":"),
         ("bound, sequential (d = 0)", counts, bound, "red", "--")]
curves.curves(right, lines, log="xy", title="float32, 256 rows of 4096", xlabel="blocks k",
              ylabel="rms relative error of l, in u", ylim=(0.2, 2e4))
plt.show()

# %% [markdown]
# *Left: one row, 200 ways to cut and bracket it; each point is one way. In units of $u$ the three dtypes look alike: what
# differs between them is $u$. (The points lie on levels because $\ell$ can only be one of the dtype's numbers.) Right: the error against the number of blocks, with the square-root law and the worst-case
# bound.* The tree hardly grows; the sequential loop grows like the square root.

# %% [markdown]
# Is the worst case ever real? Yes, and with the friendliest input there is: equal scores, keys one at a time, in
# float16. Once $\ell$ reaches 2048, adding 1 no longer changes it: the next float16 number is 2050, and $2048 + 1$ rounds back. Let the
# first half of 4096 values be 0 and the second half 1; the output should be one half.

# %%
v = torch.cat([torch.zeros(2048, 1), torch.ones(2048, 1)])
for dtype in (torch.float16, torch.float32):
    keys = (block_state(torch.zeros(1, dtype=dtype), v_j[None].to(dtype)) for v_j in v)
    state = reduce(merge, keys)
    output = finish(state)[0].item()
    print(f"{str(dtype):14} l = {state.l.item():.0f} of 4096   o / l = {output}   (right: 0.5)")
    assert output == (0.5 if dtype == torch.float32 else 1.0)

# %% [markdown]
# Twice the right answer, with no overflow, no NaN and no large score. Hence the rule that all kernels of this course
# follow: **$m$, $\ell$ and $o$ live in float32**, whatever the dtype of $Q$, $K$, $V$. The matrix products may take
# float16 inputs; the statistics may not.
#
# Two more consequences to carry away from this section:
#
# - A kernel that fixes its block size and order gives the same bits each time. One that lets the *schedule* decide which
#   block is merged first does not. Both are right within $u$; only one is reproducible.
# - Compare two kernels with a tolerance that comes from $u$, never bit for bit and never with a number out of the air.

# %% [markdown]
# ## 8. What is left of a row: lse
#
# To finish a row, divide. And keep one number more: the logarithm of the sum of exponentials,
#
# $$\text{output} = \frac{o}{\ell}, \qquad \mathrm{lse} = m + \ln \ell = \ln \sum_j e^{x_j} .$$
#
# It fits in a float where the sum would not, and it holds both $m$ and $\ell$ as far as anyone later needs them. First
# use: any single probability can be recomputed from its score, with no row sum at hand. The backward pass (phase 5) lives on that:
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
# Second use: merging *finished* results. Suppose two devices have each finished the same query against their own keys, and
# have thrown $m$ and $\ell$ away. From $(o_1, \mathrm{lse}_1)$ one recovers the sums of section 5:
# $\sum e^{x} = e^{\mathrm{lse}_1}$ and $\sum e^{x} v = e^{\mathrm{lse}_1} o_1$. Compare with $\varphi(m, \ell, o) = (e^m \ell, e^m o)$: a
# finished result *is* a state, the one with $m = \mathrm{lse}$ and $\ell = 1$. So nothing new has to be written.

# %%
# FROM flashlab.attention.online_softmax: merge_finished (no docstrings)
o, lse = merge_finished(*finish(A), *finish(B))
torch.testing.assert_close(o, finish(AB)[0])
torch.testing.assert_close(lse, finish(AB)[1])
print(f"from finished halves: {[round(value, 4) for value in o.tolist()]}, exp(lse) = {torch.exp(lse):.4f}")

# %% [markdown]
# $o$ alone would not do. Below, two pairs of halves have the *same* outputs, 0 and 10; in the first pair both halves are equally heavy,
# in the second one weighs $e^3$ times as much. Averaging cannot tell them apart.

# %%
halves = torch.tensor([0.0]), torch.tensor([10.0])
for lse1, lse2 in ((2.0, 2.0), (2.0, 5.0)):
    o, _ = merge_finished(halves[0], torch.tensor(lse1), halves[1], torch.tensor(lse2))
    print(f"lse {lse1} and {lse2}:  merged output {o.item():.3f}")

# %% [markdown]
# ### m is only a reference
#
# If $(m, \ell, o)$ and $(\mathrm{lse}, 1, o/\ell)$ stand for the same sums, so do all states in between:
#
# $$(m, \ell, o) \;\sim\; (m + c,\; \ell e^{-c},\; o\, e^{-c}) \qquad \text{for every } c .$$
#
# Nothing in the algebra needs $m$ to be the maximum. It needs to be *near* it, so that nothing overflows, and that is a
# different and cheaper requirement: a stale maximum, a little too low, is as good.

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
# | | passes over the keys | stored for a row in between |
# |:--|:--|:--|
# | naive, safe | 3: scores and their maximum; exponentials and sum; weighted sum of $V$ | a row of $S$ or $P$: $N$ numbers |
# | online softmax, then $PV$ | 2 | a row of $S$ or $P$: $N$ numbers |
# | online softmax with $o$ | **1** | $m, \ell, o$: $D + 2$ numbers |
#
# Only the last row does not grow with $N$. That is the step from online softmax to FlashAttention, and Ye's note (2023)
# derives it in just these three stages. The price is the rescaling: $D + 1$ multiplications a block of $B$ keys, beside
# $4 B D$ operations of the two products.

# %%
D, B = 64, 64
for N in (1024, 16384, 262144):
    print(f"N = {N:6}:  a row of S in float32 {4 * N:8} bytes   the state {4 * (D + 2)} bytes")
print(f"rescaling, blocks of {B}: {(D + 1) / (4 * B * D):.2%} of the operations of the two products")

# %% [markdown]
# And because the state merges in any order, the blocks need not even be on one machine. Here is **ring attention** (Liu et al.
# 2023) with four pretend devices. Each holds a quarter of the queries and of the keys. In each step every device merges
# in the keys it holds, then hands them to its neighbour. Each device sees the blocks in a different order.

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
# | the loop over blocks with $m, \ell, o$ | phases 2 (in Python), 3–4 (Triton), 6–8 (CUDA) |
# | one division at the end, not one a block | FlashAttention-2; every kernel from phase 2 on |
# | $-\infty$ with care | causal masks and tails, from phase 3 on |
# | $p = e^{x - \mathrm{lse}}$ | the backward pass, phase 5 |
# | `merge_finished` | split-KV decoding and ring attention, phases 10 and later |
# | statistics in float32 | everywhere, and the checker looks for it |

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Softmax is invariant under a shift; subtracting the maximum keeps every exponential in $[0, 1]$ and the sum in $[1, N]$.
# - The sum against the *running* maximum obeys a recurrence, and so does the unnormalised output. One pass is enough.
# - The state $(m, \ell, o)$ is addition in disguise, with a common exponent $m$. Hence any order, any split, any device.
# - In floating point the order costs a few $u$ a merge. Statistics in float16 can fail completely; in float32 they do not.
# - $-\infty - (-\infty)$ is the one exponent that needs care; a finite sentinel is not care.
# - $(o, \mathrm{lse})$ is all that must be kept of a row.
#
# Test yourself: *a colleague proposes to compute the maximum of every row beforehand, in a cheap separate kernel that reads
# only $Q$ and $K$, so that no correction is needed. What does it cost, and what does it save?*
#
# <details><summary>Answer</summary>
#
# The scores have to be computed twice: once for the maxima and once more for the exponentials. That is half of the forward
# pass's products again ($2N^2D$ operations on top of $4N^2D$), and $K$ is read a second time. It saves the corrections,
# $D + 1$ multiplications a row and block: 0.4 % of the operations at $B = D = 64$. (They do not run on the tensor cores, so
# their share of the *time* is larger than that, but far from 50 %.) A good *bound* on the maximum is another matter: by
# Cauchy–Schwarz $x_j \le \|q\| \max_j \|k_j\| / \sqrt{D}$ costs nearly nothing, and by section 8 any reference will do that
# is close enough. Think about what "close enough" means in float32: if the bound is more than 103 too high, every
# exponential of the row is 0.
#
# </details>
#
# Left to explore: what the naive way costs in bytes, and why neither of the two obvious ways to tile it works (phase 1);
# the loop over blocks for a whole matrix (phase 2); skipping corrections (exercise 0.8).

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
