# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 2 · Online-softmax simulation
#
# You write FlashAttention's forward pass in plain Python. No GPU, no Triton: a `for` loop over blocks of keys, three
# tensors of state, and one line that makes it all legal, `correction = exp(m_i - m_new)`. In phase 3 the same loop
# becomes a Triton kernel, line by line and under the same names.

# %% [markdown]
# ## What you will be able to do
#
# - Write `flash_attention_forward_sim(Q_block, K, V, BLOCK_N)` from memory, and say what each line is for.
# - Predict the state `m_i`, `l_i`, `acc` after every key block, by hand.
# - Recognise a wrong correction, a padded tail and a low-precision accumulator by their symptoms.
# - Count the bytes in use, the bytes moved and the operations, and check each count against a measurement.
# - Answer the course's two questions: *which computation does FlashAttention reorder?* and *why is scheme B stuck in
#   Triton while this is not?*

# %% [markdown]
# ## What you need first
#
# Phase 0 (the safe softmax, and the merge of two partial states as an associative operation) and phase 1 (the naive
# cost, scheme A's physical wall, scheme B's logical wall). From torch: slicing, `@`, `amax`, `exp`.

# %%
import math

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference
from flashlab import runtime
from flashlab.figures import curves, show
from flashlab.check import CheckFailed, verify, verify_block
from flashlab.attention.cost import Meter, flash_cost
from flashlab.attention.simulation import (
    Step,
    check_inputs,
    flash_attention_sim,
)
from flashlab.attention.naive import naive_attention
from flashlab.attention.cost import naive_cost, naive_peak_bytes

show.style()

# %% [markdown]
# ## 1 · The oracle first
#
# Before the first line of the new algorithm, fix what "right" means: `flashlab.attention.reference`, every step in float64. This
# lesson works on one head at a time, so a small adapter drops the batch and head dimensions.
#
# The first example is made to be computed by hand. Its scores are whole multiples of $\ln 2$, so that every
# exponential is a power of two:
#
# $$S = \ln 2 \cdot \begin{pmatrix} 1 & 0 & 3 & 2 \\ 2 & 0 & 1 & 1 \end{pmatrix}, \qquad
# e^{S} = \begin{pmatrix} 2 & 1 & 8 & 4 \\ 4 & 1 & 2 & 2 \end{pmatrix}, \qquad
# V = \begin{pmatrix} 4 & 0 \\ 0 & 4 \\ 8 & 0 \\ 0 & 8 \end{pmatrix}$$
#
# The first row of $e^S$ sums to 15, the second to 9. So the output is
# $O = \begin{pmatrix} 72/15 & 36/15 \\ 32/9 & 20/9 \end{pmatrix}$ and the log-sum-exp is $(\ln 15, \ln 9)$.

# %%
def oracle(Q, K, V, **options):
    o, lse = reference.attention(Q[None, None], K[None, None], V[None, None], **options)
    return o[0, 0], lse[0, 0]


LN2 = math.log(2)
Q_tiny = torch.eye(2)  # two queries; with the identity, the scores are simply K transposed
K_tiny = LN2 * torch.tensor([[1.0, 2], [0, 0], [3, 1], [2, 1]])
V_tiny = torch.tensor([[4.0, 0], [0, 4], [8, 0], [0, 8]])

O_tiny, lse_tiny = oracle(Q_tiny, K_tiny, V_tiny, scale=1.0)
by_hand = torch.tensor([[72 / 15, 36 / 15], [32 / 9, 20 / 9]])
assert torch.allclose(O_tiny.float(), by_hand)
assert torch.allclose(lse_tiny.exp().float(), torch.tensor([15.0, 9]))
print("the oracle and the hand computation agree")

# %% [markdown]
# ## 2 · One row, one key at a time
#
# Phase 0 derived the recurrence. For one query row, after some keys have been seen, keep
#
# $$m = \max_j s_j, \qquad l = \sum_j e^{s_j - m}, \qquad \mathrm{acc} = \sum_j e^{s_j - m}\, v_j .$$
#
# All three sums run over the keys *seen so far*, and all exponentials are taken relative to the maximum *so far*. When a
# new key raises the maximum to $m_{\text{new}}$, every old exponential is too large by the same factor, so one
# multiplication repairs all of them:
#
# $$e^{s_j - m_{\text{new}}} = e^{s_j - m} \cdot \underbrace{e^{\,m - m_{\text{new}}}}_{\text{correction}\ \le\ 1}$$
#
# That is the whole algorithm. Here it is for one row on plain Python floats: no tensor, no block, nothing hidden.

# %%
def one_row(q, K, V, scale):
    m, l, acc = -math.inf, 0.0, [0.0] * len(V[0])
    for k, v in zip(K, V, strict=True):
        s = scale * sum(a * b for a, b in zip(q, k, strict=True))
        m_new = max(m, s)
        correction = math.exp(m - m_new)
        p = math.exp(s - m_new)
        l = l * correction + p
        acc = [a * correction + p * b for a, b in zip(acc, v, strict=True)]
        m = m_new
    return [a / l for a in acc], m + math.log(l)


rows = [one_row(q, K_tiny.tolist(), V_tiny.tolist(), scale=1.0) for q in Q_tiny.tolist()]
for i, (o, lse) in enumerate(rows):
    assert torch.allclose(torch.tensor(o).double(), O_tiny[i])
    assert math.isclose(lse, lse_tiny[i], rel_tol=1e-6)
    print(f"row {i}: O = ({o[0]:.4f}, {o[1]:.4f}), exp(lse) = {math.exp(lse):.4f}")

# %% [markdown]
# Look at the first iteration. There `m` is $-\infty$ and `m_new` is finite, so `correction` is $e^{-\infty} = 0$, and it
# multiplies an `l` and an `acc` that are 0 already. No `if` for the first key is needed: $(-\infty, 0, 0)$ is the
# identity of phase 0's merge, and starting a loop from the identity is what an identity is for.
#
# What did *not* happen either: no list of scores, no second pass. The row was read once, and what is left of it is
# `len(v) + 2` numbers, however many keys there were.

# %% [markdown]
# ## 3 · The same, for a block of rows and a block of keys
#
# One key at a time is a poor fit for hardware that multiplies matrices. So take `BLOCK_M` query rows and `BLOCK_N` keys
# at once. Nothing changes in the mathematics: the state of a *block* of keys merges into the running state exactly as
# the state of one key did, because the merge is associative.
#
# | | one row, one key | a block |
# |:--|:--|:--|
# | score | a number | `s`, a tile `[BLOCK_M, BLOCK_N]` |
# | `m_i`, `l_i`, `correction` | numbers | vectors `[BLOCK_M]`, one entry a row |
# | `acc` | a vector | a tile `[BLOCK_M, HEAD_DIM]` |
# | the sum over keys | `acc + p * v` | a matrix product, `p @ v` |
#
# One step of it, frozen. Six queries and eight keys, in 2 × 2 tiles; query block 1 is about to finish its key block 1.

# %%
from flashlab.figures.tiles import tile_figure, tile_frames

generator = torch.Generator().manual_seed(3)
Q_small, K_small, V_small = (torch.randn(n, 2, generator=generator) for n in (6, 8, 8))
tile_figure(Q_small, K_small, V_small, BLOCK_M=2, BLOCK_N=2, frame=6)
plt.show()

# %% [markdown]
# *Left: what lives in HBM, with the tiles of this step coloured. Right: all that is on chip. In the first row the maximum has just
# risen, so its correction is below 1; in the second it has not.*
#
# Here is the body of the milestone, `flash_attention_forward_sim`. Read it against the eight lines above.

# %%
# FROM flashlab.attention.simulation: flash_attention_forward_sim (no docstrings)

# %% [markdown]
# Four choices in it deserve a word.
#
# - **`.float()` is the load.** It stands for the trip from HBM to the chip. After it, tiles are float32, and so are the
#   statistics, whatever the inputs are. The product of two 16-bit numbers fits in float32 exactly, so `q @ k.T` on loaded
#   tiles is what a tensor core computes: 16-bit operands, float32 accumulation.
# - **`p.to(V.dtype)`.** The second tensor-core product needs 16-bit operands too, so P is rounded before it. `l_i` is
#   summed from the unrounded `p`. Section 9 measures what the rounding costs.
# - **`exp`, not `exp2`.** The derivation is in base $e$, so this simulation is too. A GPU has an instruction for $2^x$ and
#   none for $e^x$; phase 3 multiplies the scale by $\log_2 e$ once, and every `exp` of this loop becomes an `exp2`.
# - **Division last.** `acc` is not an average until the very end. Section 5 counts what that saves.

# %% [markdown]
# ## 4 · The state, step by step
#
# Now run it on the tiny example, two keys a block, and follow the state by hand first. All numbers are powers of two.
#
# | | block 0: scores $/\ln 2$ | $m_i / \ln 2$ | correction | $p$ | $l_i$ | acc |
# |:--|:--|--:|--:|:--|--:|:--|
# | row 0 | $1, 0$ | 1 | 0 | $1, \tfrac12$ | $1.5$ | $(4, 2)$ |
# | row 1 | $2, 0$ | 2 | 0 | $1, \tfrac14$ | $1.25$ | $(4, 1)$ |
#
# | | block 1: scores $/\ln 2$ | $m_i / \ln 2$ | correction | $p$ | $l_i$ | acc |
# |:--|:--|--:|--:|:--|--:|:--|
# | row 0 | $3, 2$ | 3 | $\tfrac14$ | $1, \tfrac12$ | $1.5 \cdot \tfrac14 + 1.5 = 1.875$ | $(4, 2)\cdot\tfrac14 + (8, 4) = (9, 4.5)$ |
# | row 1 | $1, 1$ | 2 | 1 | $\tfrac12, \tfrac12$ | $1.25 + 1 = 2.25$ | $(4, 1) + (4, 4) = (8, 5)$ |
#
# In row 0 the maximum moves, so the old state shrinks to a quarter. In row 1 it stays: the correction is 1 and the new
# keys count for less. The last division gives $(9, 4.5) / 1.875 = (4.8, 2.4) = (72/15, 36/15)$. ✓

# %%
steps, rows = [], []
O_block, lse = flash_attention_forward_sim(Q_tiny, K_tiny, V_tiny, 2, 1.0, trace=steps.append)
for step in steps:
    for row in range(2):
        m, correction, l = (x[row].item() for x in (step.m_i / LN2, step.correction, step.l_i))
        acc = ", ".join(f"{a:.1f}" for a in step.acc[row])
        rows.append([step.start_n // 2, row, f"{m:.2f}", f"{correction:.2f}", f"{l:.3f}", acc])
columns = ["key block", "row", "m_i / ln 2", "correction", "l_i", "acc"]
show.table(rows, columns, align="rrrrrr")

# %% [markdown]
# Comparing tables by eye is how mistakes get through, so the next cell compares them by machine: every entry of the two
# hand-made tables, then the result against the oracle.

# %%
hand = [  # m_i / ln 2, correction, l_i, acc
    ([1, 2], [0, 0], [1.5, 1.25], [[4, 2], [4, 1]]),
    ([3, 2], [0.25, 1], [1.875, 2.25], [[9, 4.5], [8, 5]]),
]
for step, wanted in zip(steps, hand, strict=True):
    state = [step.m_i / LN2, step.correction, step.l_i, step.acc]
    for got, want in zip(state, wanted, strict=True):
        assert torch.allclose(got, torch.tensor(want, dtype=torch.float32), atol=1e-6)
assert torch.allclose(O_block.double(), O_tiny) and torch.allclose(lse.double(), lse_tiny)
print("every entry of the trace equals the hand computation; O and lse equal the oracle")

# %% [markdown]
# **Any block size gives the same answer.** BLOCK_N is a choice of schedule, not of mathematics. The next cell tries all
# of 1, 2, ..., N keys a block on a random input, where N = 37 is prime: every size but 1 and 37 leaves a last block that
# is shorter. Python cuts the slice `K[start_n : start_n + BLOCK_N]` at the end by itself; section 6 shows what a machine
# that cannot do that has to do instead.

# %%
torch.manual_seed(0)
Q, K, V = torch.randn(16, 32), torch.randn(37, 32), torch.randn(37, 32)
want, want_lse = oracle(Q, K, V)
worst = 0.0
for BLOCK_N in range(1, 38):
    O_block, lse = flash_attention_forward_sim(Q, K, V, BLOCK_N)
    worst = max(worst, (O_block - want).abs().max().item(), (lse - want_lse).abs().max().item())
assert worst <= 5e-6
print("37 block sizes, worst error of O and lse below 5e-6:", worst <= 5e-6)

# %% [markdown]
# ### The correction, the wrong way round
#
# The line that everybody gets wrong once is the correction: $e^{m_{\text{new}} - m}$ instead of $e^{m - m_{\text{new}}}$.
# What does that look like? If you start from $m = -\infty$, you are lucky.

# %%
m_i, m_new, l_i = torch.tensor([-math.inf]), torch.tensor([0.7]), torch.tensor([0.0])
correction = torch.exp(m_new - m_i)  # the wrong way round
print("correction =", correction.item(), "  l_i * correction =", (l_i * correction).item())
assert correction.isinf() and (l_i * correction).isnan()

# %% [markdown]
# $e^{+\infty} \cdot 0$ is NaN in every row, on the first block. Loud, at once, everywhere: the best kind of bug.
#
# The dangerous version is the one that "handles the first block separately", so that the infinity never appears. Then
# the mistake only shows in rows whose maximum *moves after the first block*, and only from that block on. The next cell
# builds four rows to see exactly that, 8 blocks of 16 keys each:
#
# | row | its maximum |
# |:--|:--|
# | A | is in block 0, and never moves |
# | B | jumps once, by 3, in block 3 |
# | C | rises by 0.5 in every block |
# | D | jumps by 3 in the last block |

# %%
def state_after_each_block(S, V, BLOCK_N, sign):
    """Yield (O, lse) after each key block; sign=+1 is the right correction, -1 the inverted one."""
    m_i = S[:, :BLOCK_N].amax(dim=1)  # the first block apart: no infinity anywhere
    p = torch.exp(S[:, :BLOCK_N] - m_i[:, None])
    l_i, acc = p.sum(dim=1), p @ V[:BLOCK_N]
    yield acc / l_i[:, None], m_i + torch.log(l_i)
    for start_n in range(BLOCK_N, S.shape[1], BLOCK_N):
        s, v = S[:, start_n : start_n + BLOCK_N], V[start_n : start_n + BLOCK_N]
        m_new = torch.maximum(m_i, s.amax(dim=1))
        p = torch.exp(s - m_new[:, None])
        correction = torch.exp(sign * (m_i - m_new))
        l_i = l_i * correction + p.sum(dim=1)
        acc = acc * correction[:, None] + p @ v
        m_i = m_new
        yield acc / l_i[:, None], m_i + torch.log(l_i)


generator = torch.Generator().manual_seed(2)
S = torch.randn(4, 8, 16, generator=generator, dtype=torch.float64).clamp(-1, 1)
S[:, :, 0] = 1.0  # every block has the same maximum, 1, ...
S[0, 0] += 4  # ... until row A starts high,
S[1, 3:] += 3  # row B jumps in block 3,
S[2] += 0.5 * torch.arange(8)[:, None]  # row C rises,
S[3, 7] += 3  # row D jumps last
S, V = S.flatten(1), torch.randn(128, 8, generator=generator, dtype=torch.float64) + 0.5

# %% [markdown]
# After each block, the truth is known: attention over the keys seen so far. So the error can be plotted *by key block*,
# which is the most useful plot there is for a wrong attention kernel.

# %%
errors = {}
for sign in (+1, -1):
    for b, (o, _) in enumerate(state_after_each_block(S, V, 16, sign)):
        seen = S[:, : 16 * (b + 1)]
        truth = torch.softmax(seen, dim=1) @ V[: 16 * (b + 1)]
        errors.setdefault(sign, []).append((o - truth).abs().amax(dim=1).clamp(min=1e-17))
right, wrong = torch.stack(errors[+1]), torch.stack(errors[-1])
first_wrong = [next((b for b in range(8) if wrong[b, r] > 1e-6), None) for r in range(4)]
assert right.max() < 1e-12 and first_wrong == [None, 3, 1, 7]
print("first wrong key block of rows A, B, C, D:", first_wrong)

# %%
figure, ax = plt.subplots(figsize=(7, 3.4))
hues = {"A": ("blue", "o-"), "B": ("orange", "s-"), "C": ("green", "D-"), "D": ("red", "^-")}
lines = [(f"row {name}, inverted", range(8), wrong[:, r], *hue) for r, (name, hue) in enumerate(hues.items())]
curves.curves(ax, [*lines, ("all rows, right", range(8), right.amax(dim=1), "grey", "--")], log="y",
              legend=(0.5, 0.3), xlabel="key block", ylabel="largest error of O after it",
              title="The inverted correction, block by block")
plt.show()

# %% [markdown]
# *Error of the output against the truth over the keys seen so far. Row A never goes wrong; B and D go wrong at the block
# where their maximum moves; C from block 1 on. The right correction stays at rounding level (dashed).*
#
# Read the symptoms off the figure, because you will meet them again:
#
# - **Some rows are right to the last bit.** A test with one row, one block, or a descending input passes.
# - **Nothing overflows and nothing looks odd.** Numerator and denominator are wrong by the same factor, so the output is
#   still a weighted average of rows of V. Only the weights are wrong: after a jump by $\Delta$ the earlier keys should have
#   been scaled by $e^{-\Delta}$ and were scaled by $e^{+\Delta}$, so they weigh $e^{2\Delta}$ too much.
# - **A later jump erases nothing.** The state carries the mistake to the end of the row.
#
# For row B, $\Delta = 3$: a factor of $e^6 \approx 403$. The cell checks that prediction.

# %%
first, rest = S[1, : 3 * 16], S[1, 3 * 16 :]
predicted_lse = torch.logsumexp(torch.cat([first + 2 * 3, rest]), dim=0)  # e^6 on the early keys
*_, (_, lse_wrong) = state_after_each_block(S, V, 16, -1)
assert torch.allclose(lse_wrong[1], predicted_lse)
print(
    f"row B, inverted: its first 48 keys weigh exp(6) = {math.exp(6):.0f} times too much, as predicted"
)

# %% [markdown]
# ## 5 · Normalise at the end, or at every step?
#
# The first FlashAttention paper kept `O` normalised after every block. That is also correct, and it reads nicely: at each
# moment O is the attention over the keys so far. It multiplies by the old `l_i` to un-normalise, adds, and divides by the
# new one. Here it is.

# %%
def normalised_at_every_step(Q_block, K, V, BLOCK_N):
    q, scale = Q_block.float(), Q_block.shape[1] ** -0.5
    m_i, l_i = q.new_full([len(q)], -math.inf), q.new_zeros([len(q)])
    O_block = q.new_zeros([len(q), V.shape[1]])
    for start_n in range(0, len(K), BLOCK_N):
        s = scale * (q @ K[start_n : start_n + BLOCK_N].float().T)
        m_new = torch.maximum(m_i, s.amax(dim=1))
        p = torch.exp(s - m_new[:, None])
        l_old = l_i * torch.exp(m_i - m_new)
        l_i = l_old + p.sum(dim=1)
        v = V[start_n : start_n + BLOCK_N].float()
        O_block = (O_block * l_old[:, None] + p @ v) / l_i[:, None]
        m_i = m_new
    return O_block, m_i + torch.log(l_i)

# %% [markdown]
# Which one is cheaper? `Meter`, from `flashlab.attention.simulation`, counts every operation that torch dispatches inside a `with`
# block. It counts, it does not time, so its numbers are the same on every machine. The prediction, with $T = \lceil N /
# \mathrm{BLOCK\_N} \rceil$ key blocks: dividing at every step costs $T \cdot \mathrm{BLOCK\_M} \cdot \mathrm{HEAD\_DIM}$ divisions,
# dividing once costs $\mathrm{BLOCK\_M} \cdot \mathrm{HEAD\_DIM}$. Everything else is equal.

# %%
Q, K, V = torch.randn(64, 64), torch.randn(1024, 64), torch.randn(1024, 64)
with Meter() as every_step:
    O_1, lse_1 = normalised_at_every_step(Q, K, V, BLOCK_N=64)
with Meter() as at_the_end:
    O_2, lse_2 = flash_attention_forward_sim(Q, K, V, BLOCK_N=64)

assert torch.allclose(O_1, O_2, atol=1e-6) and torch.allclose(lse_1, lse_2, atol=1e-5)
T = 1024 // 64
assert every_step.operations["div"] == T * 64 * 64 and at_the_end.operations["div"] == 64 * 64
assert every_step.other_flops - at_the_end.other_flops == (T - 1) * 64 * 64
names = ["div", "mul", "add", "sub", "exp", "amax", "sum"]
show.table(
    [[label, *(meter.operations[n] for n in names), meter.matmul_flops]
     for label, meter in [("at every step", every_step), ("at the end", at_the_end)]],
    columns=["normalised", *names, "matmul FLOPs"],
)

# %% [markdown]
# Same result, and the operation counts differ in the divisions alone, as predicted. Beside the matmuls' 16.8 million FLOPs
# that seems like nothing. But matmuls run on tensor cores, and these do not: the FlashAttention-2 paper puts an A100 at
# 312 TFLOP/s for one and 19.5 TFLOP/s for the other, so each operation outside a matmul costs as much as 16 inside
# (section 3.1 there). Dividing once is the first of that paper's changes.

# %% [markdown]
# ## 6 · The tail
#
# 10 keys, 4 a block: the last block holds 2. In Python a slice stops at the end. On a GPU it does not: a tile has a
# fixed, compile-time shape, so the last tile is filled up, with zeros if you ask for that. A zero *key* is not a harmless
# key. Its score is $q \cdot 0 = 0$, and $e^{0 - m}$ is not 0. The cell plays that GPU: it pads K and V with two rows of
# zeros and runs the same simulation.

# %%
Q, K, V = torch.randn(4, 16), torch.randn(10, 16), torch.randn(10, 16) + 0.5
K_padded, V_padded = (torch.cat([x, torch.zeros(2, 16)]) for x in (K, V))
_, want_lse = oracle(Q, K, V)
_, lse = flash_attention_forward_sim(Q, K, V, BLOCK_N=4)
_, lse_padded = flash_attention_forward_sim(Q, K_padded, V_padded, BLOCK_N=4)
assert torch.allclose(lse.double(), want_lse, atol=1e-5)
extra = lse_padded.double().exp() - want_lse.exp()
print("too much in each row's sum of exponentials:", [round(x, 3) for x in extra.tolist()])
assert torch.allclose(extra, torch.full([4], 2.0).double(), atol=1e-4)

# %% [markdown]
# Each row's sum is too large by exactly 2: two keys with $e^0 = 1$ each. Their values are zero, so `acc` is right and only
# `l_i` is wrong, which makes the output too small by a factor that depends on the row. With scores near zero, that is some
# percent, and a loose tolerance lets it through. With scores far *below* zero the padding takes the whole row: the output
# collapses towards 0.

# %%
for shift in (0, -5, -20):
    K_low = (
        K + shift * 4.0 * Q[0] / Q[0].square().sum()
    )  # adds shift to row 0's scores (scale 1/4)
    want, _ = oracle(Q[:1], K_low, V)
    padded = torch.cat([K_low, torch.zeros(2, 16)])
    O_block, _ = flash_attention_forward_sim(Q[:1], padded, V_padded, BLOCK_N=4)
    ratio = (O_block.double().norm() / want.norm()).item()
    print(f"scores shifted by {shift:3d}: padded output is {ratio:.2f} of what it should be")
assert ratio < 1e-6

# %% [markdown]
# The repair is one line, and it belongs in *every* kernel that pads: give the padded columns a score of $-\infty$ before
# the maximum, `s = s.masked_fill(key >= N, -inf)`. Not after the exponential: the maximum must not see them either.
# Exercise 2.6 has this bug, together with a friend.

# %% [markdown]
# ## 7 · What stays in memory
#
# The point of it all: nothing in the loop has N in its shape. Phase 1's scheme A held a `[BLOCK_M, N]` tile of scores,
# and the naive version an `[N, N]` matrix. Here the largest tiles are `[BLOCK_M, BLOCK_N]`, `[BLOCK_N, HEAD_DIM]` and
# `[BLOCK_M, HEAD_DIM]`.
#
# `Meter.peak_bytes` is the largest number of bytes that tensors made inside the block held at one moment. It follows each
# tensor from birth to death, so it is exact. For 64 × 64 × 64 tiles and fp16 inputs the formula is: at the worst moment
# eight float32 tiles are alive (`q`, `k`, `v`, `s`, `p`, the rescaled `acc`, the product, their sum) and four vectors
# (`m_i`, `m_new`, `l_i`, `correction`).

# %%
tiles, vectors = 8 * 64 * 64 * 4, 4 * 64 * 4
for N in (64, 128, 512, 2048):
    Q, K, V = (torch.randn(n, 64).half() for n in (64, N, N))
    with Meter() as meter:
        flash_attention_forward_sim(Q, K, V, BLOCK_N=64)
    assert meter.peak_bytes == tiles + vectors
    print(f"N = {N:4d}: peak {meter.peak_bytes} bytes, predicted {tiles + vectors}")

# %% [markdown]
# The number does not move. (Python holds more than it must: a kernel keeps the rescaled `acc` in place. But what it holds
# does not depend on N, and that is the claim.)
#
# One block of rows is done. The remaining question is how the other rows get theirs.

# %% [markdown]
# ## 8 · The whole matrix
#
# Every block of query rows is independent of every other: it reads its own rows of Q, all of K and V, and writes its own
# rows of O. So the whole matrix is a loop around the milestone. The figure of section 3 was one frame of this animation.
# Coloured in HBM: what is being read or written. On chip: the tiles alive now, and the real state of the run.

# %% tags=["nbval-ignore-output"]
frames = tile_frames(Q_small, K_small, V_small, BLOCK_M=2, BLOCK_N=2)
animation = show.gif(frames, seconds_a_frame=1.0, dpi=90)
assert len(animation.data) < 800_000
animation

# %% [markdown]
# *A query block walks along its row of S. Each tile of S exists on chip for one step and is gone. K and V are read from the
# start again for each query block; Q is read once and O written once.*
#
# Watch three things: `m_i` never falls; `correction` is below 1 exactly when `m_i` rose; and the byte counter jumps by one
# K tile and one V tile a step. The code is shorter than the animation's caption:

# %%
# FROM flashlab.attention.simulation: flash_attention_one_head_sim (no docstrings)

# %% [markdown]
# On a GPU the outer loop is not a loop. Its iterations share nothing that they write, so each becomes one *program* (one
# thread block), and all of them may run at once. The inner loop over keys is the one that must stay in order, because it
# carries the state. The first FlashAttention had the loops the other way round, keys outside; then O, `m_i` and `l_i`
# travel to HBM and back for every key block, and programs that share rows of O would have to take turns.
#
# Batch and heads are independent too: `flash_attention_sim` wraps two more loops around this one, for
# `[batch, heads, seq_len, head_dim]`. Memory first: phase 1's naive attention and this one, the whole head, N × N,
# head_dim 64, fp16.

# %%
sizes, peaks = [128, 256, 512, 1024, 2048], {"naive": [], "tiled": []}
for N in sizes:
    Q, K, V = (torch.randn(N, 64).half() for _ in range(3))
    for name, fn in [("naive", naive_attention), ("tiled", flash_attention_one_head_sim)]:
        with Meter() as meter:
            fn(Q, K, V)
        peaks[name].append(meter.peak_bytes)
    output, one_block = N * 64 * 2 + N * 4, 64 * 64 * 2 + 64 * 4  # O in fp16 and lse in float32
    assert peaks["naive"][-1] == naive_peak_bytes(N, 64) == 2 * N * N * 2 + N * 64 * 2
    assert peaks["tiled"][-1] == output + one_block + tiles + vectors
print("measured peaks equal the formulas at N =", sizes)

# %% [markdown]
# The naive peak is two N × N matrices, S and P, plus the output. The tiled peak is the output plus 140 544 bytes (the constant of section 7, and one
# finished block of O and lse that waits to be overwritten). The
# formulas hold exactly, so the figure can go further than the measurement.

# %%
N = torch.logspace(7, 17, 50, base=2)
formulas = {"naive": 4 * N * N + 128 * N, "tiled": 132 * N + 8448 + tiles + vectors}
lines = [("naive: two N × N matrices", "naive", "red"), ("tiled: O, lse and 137 KiB", "tiled", "blue")]
figure, ax = plt.subplots(figsize=(7, 3.4))
curves.curves(ax, [("", N, formulas[name] / 2**20, hue, "-") for _, name, hue in lines]
              + [(label, sizes, [b / 2**20 for b in peaks[name]], hue, "o") for label, name, hue in lines],
              log="xy", xticks=[2**i for i in range(7, 18, 2)],
              title="Peak memory: quadratic against linear", xlabel="sequence length N",
              ylabel="peak memory, one head (MiB)")
plt.show()

# %% [markdown]
# *Peak bytes that one head allocates, fp16, head_dim 64. Points: measured by `Meter`. Lines: the formulas. At N = 131072
# one naive head wants 64 GiB, the tiled one 17 MiB.*

# %% [markdown]
# ### What it moves, and what it computes
#
# Now the traffic. Count the bytes between HBM and the chip, `e` bytes an element, $N$ queries and $N$ keys:
#
# | | tiled | naive (phase 1, line by line) |
# |:--|:--|:--|
# | Q | read once: $N D e$ | read once: $N D e$ |
# | K, V | read once *for each query block*: $\lceil N / \mathrm{BLOCK\_M} \rceil \cdot 2 N D e$ | read once: $2 N D e$ |
# | S, P | never | written by `q @ k.T`; read and written to scale; read and written by the softmax; read by `p @ v`: $6 N^2 e$ |
# | O | written once: $N D e$ | written once: $N D e$ |
#
# (The tiled version also writes 4 bytes of `lse` a row.) `flash_cost` computes the left column and the operations;
# `Meter(Q, K, V)` measures the run: it counts the bytes of every slice of Q, K and V that is loaded, and of every tile
# that is stored. BLOCK_M and BLOCK_N of different sizes, and lengths that divide by neither:

# %%
for M, N, BLOCK_M, BLOCK_N in [(512, 512, 64, 64), (512, 512, 128, 32), (300, 500, 64, 48)]:
    Q, K, V = (torch.randn(n, 64).half() for n in (M, N, N))
    with Meter(Q, K, V) as meter:
        flash_attention_one_head_sim(Q, K, V, BLOCK_M, BLOCK_N)
    cost = flash_cost(M, N, 64, BLOCK_M, BLOCK_N, itemsize=2)
    assert (meter.bytes_read, meter.bytes_written) == (cost.bytes_read, cost.bytes_written)
    assert (meter.matmul_flops, meter.other_flops) == (cost.matmul_flops, cost.other_flops)
    print(
        f"M {M}, N {N}, tiles {BLOCK_M} x {BLOCK_N}: measured = formula:",
        f"read {meter.bytes_read} = {cost.bytes_read}, written {meter.bytes_written} = {cost.bytes_written},",
        f"FLOP {meter.matmul_flops + meter.other_flops} = {cost.flops}",
    )

# %% [markdown]
# Theory and measurement agree to the byte, so the formula can be trusted at sizes that a Python loop would take minutes
# for. One head, N = 4096, head_dim 64, fp16:

# %%
N, D, e = 4096, 64, 2
naive = naive_cost(N, D, itemsize=e)
rows = [["naive", naive.bytes / 1e6, 1.0, naive.flops / 1e9, 4 * N * N * D / naive.bytes]]
for BLOCK_M in (16, 32, 64, 128, 256):
    cost = flash_cost(N, N, D, BLOCK_M, BLOCK_N=64, itemsize=e)
    less = naive.bytes / cost.bytes
    rows.append(
        [f"BLOCK_M = {BLOCK_M}", cost.bytes / 1e6, less, cost.flops / 1e9, cost.intensity]
    )
columns = ["", "HBM traffic, MB", "times less than naive", "GFLOP", "matmul FLOP a byte"]
show.table(rows, columns)

# %% [markdown]
# Three things to take from this table, the first of them a disappointment.
#
# 1. **Small tiles move more than the naive version.** K and V are read $N / \mathrm{BLOCK\_M}$ times, $2 N^2 D e /
#    \mathrm{BLOCK\_M}$ bytes; the naive S and P cost $6 N^2 e$. Tiling wins only if $\mathrm{BLOCK\_M} > D / 3$. At BLOCK_M = 16
#    and D = 64 it loses.
# 2. **Traffic falls as 1 / BLOCK_M; BLOCK_N does not appear.** A loaded K tile is used by BLOCK_M rows, so twice the rows
#    means half the trips. What stops BLOCK_M is room on the chip: `acc` alone is BLOCK_M × D float32 numbers.
# 3. **The operations do not fall.** FlashAttention computes the same matmuls, and slightly more around them (the
#    corrections). It is faster because of what it does not move.

# %%
N = [2**i for i in range(9, 16)]
lines = [("naive", N, [naive_cost(n, 64).bytes / 1e6 for n in N], "red", "-")]
for BLOCK_M, hue in [(16, "sky"), (64, "blue"), (256, "black")]:
    lines.append((f"BLOCK_M = {BLOCK_M}", N, [flash_cost(n, n, 64, BLOCK_M).bytes / 1e6 for n in N], hue,
                 "-"))
sizes = [16, 32, 64, 128, 256, 512]
intensities = [flash_cost(16384, 16384, 64, BLOCK_M).intensity for BLOCK_M in sizes]
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5))
curves.curves(left, lines, log="xy", xticks=N[::2], title="Bytes moved", xlabel="sequence length N",
              ylabel="HBM traffic, one head (MB)")
curves.curves(right, [("tiled, N = 16384", sizes, intensities, "blue", "o-")], xticks=sizes[2:], legend=None,
              title="Arithmetic intensity, N = 16384", xlabel="BLOCK_M (query rows)",
              ylabel="matmul FLOP per byte")
for gpu, hue in [("A100", "orange"), ("H100", "green")]:
    curves.level(right, runtime.limits(gpu).ridge, f"{gpu}'s ridge: {runtime.limits(gpu).ridge:.0f}", hue)
plt.show()

# %% [markdown]
# *Left: bytes moved by one head, fp16, head_dim 64. Right: FLOPs for each byte; a GPU is limited by memory below its ridge
# and by arithmetic above it (phase 1's roofline).*
#
# On the left all lines have the same slope: **the traffic is still quadratic in N**. Tiling divides it by a constant,
# about $3 \cdot \mathrm{BLOCK\_M} / D$; only the *memory in use* went from quadratic to linear. On the right, the intensity is
# a straight line, and for 2-byte elements it is simply **BLOCK_M FLOPs a byte**: each K and V element (2 bytes) takes part
# in 2 FLOPs for each of BLOCK_M rows.
#
# That puts BLOCK_M = 64 below the ridge of every data-centre GPU, and yet real kernels with BLOCK_M = 64 are not limited by
# memory. Why?
#
# <details><summary>Answer</summary>
#
# The formula counts what the program *asks for*. K and V of one head are small (N = 4096, D = 64, fp16: 1 MiB together), and
# the programs of that head run at the same time and walk over the same tiles. After the first one has fetched a tile from
# HBM, the others find it in the L2 cache. The naive S and P are 32 MiB each, for every head: they do not stay there. So the
# naive traffic really goes to HBM, and most of the tiled traffic does not. The counter is an upper bound for the tiled
# version, and close to the truth for the naive one.
#
# </details>

# %% [markdown]
# ## 9 · Precision: what does the block size change?
#
# Another BLOCK_N adds the same numbers in another order. So the results differ, by rounding. How much, and does it matter?
# Two yardsticks: the truth in float64, and the *low-precision twin*, the eager attention of `flashlab.attention.reference` in the
# input's dtype. The rule of flash-attention's own tests is $\text{error} \le 2 \times \text{the twin's error}$.

# %%
def errors_by_block_size(dtype, block_sizes, fn=flash_attention_forward_sim):
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(n, 64, generator=generator) for n in (64, 1024, 1024))
    Q, K, V = Q.to(dtype), K.to(dtype), (V + 0.5).to(dtype)
    want, _ = oracle(Q, K, V)
    twin, _ = reference.attention_low_precision(Q[None, None], K[None, None], V[None, None])
    sizes = [(fn(Q, K, V, b)[0].double() - want).abs().max().item() for b in block_sizes]
    return sizes, (twin[0, 0].double() - want).abs().max().item()


blocks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
dtypes = (torch.float16, torch.bfloat16, torch.float32)
curves_of = {dtype: errors_by_block_size(dtype, blocks) for dtype in dtypes}
for dtype in dtypes[:2]:
    errors, twin = curves_of[dtype]
    assert all(error <= 2 * twin for error in errors) and max(errors) <= 1.5 * min(errors)
    print(
        f"{dtype}: {len(blocks)} block sizes within twice the twin's error, and within 1.5x of each other"
    )

# %% [markdown]
# For 16-bit inputs the block size changes nothing that you could measure. What if the accumulator were 16 bits wide too?
# It would save half the registers of `acc`. The next cell is the milestone with one line changed: after each block, `acc`
# is rounded to the input's dtype.

# %%
def low_precision_acc(Q_block, K, V, BLOCK_N, scale=None):
    q, scale = Q_block.float(), Q_block.shape[1] ** -0.5 if scale is None else scale
    m_i, l_i = q.new_full([len(q)], -math.inf), q.new_zeros([len(q)])
    acc = q.new_zeros([len(q), V.shape[1]])
    for start_n in range(0, len(K), BLOCK_N):
        s = scale * (q @ K[start_n : start_n + BLOCK_N].float().T)
        m_new = torch.maximum(m_i, s.amax(dim=1))
        p, correction = torch.exp(s - m_new[:, None]), torch.exp(m_i - m_new)
        l_i = l_i * correction + p.sum(dim=1)
        v = V[start_n : start_n + BLOCK_N].float()
        acc = acc * correction[:, None] + p.to(V.dtype).float() @ v
        acc = acc.to(V.dtype).float()  # the one change
        m_i = m_new
    return (acc / l_i[:, None]).to(V.dtype), m_i + torch.log(l_i)


curves_of["bf16 acc"] = errors_by_block_size(torch.bfloat16, blocks, low_precision_acc)
errors, twin = curves_of["bf16 acc"]
assert errors[0] > 20 * twin and errors[-1] <= 2 * twin
print("acc in bfloat16, one key a block: over 20 times the twin's error:", errors[0] > 20 * twin)

# %%
styles = [
    ("bf16 acc", "red", "^-", "bf16 inputs, acc rounded to bf16"),
    (torch.bfloat16, "orange", "s-", "bf16 inputs"),
    (torch.float16, "blue", "o-", "fp16 inputs"),
    (torch.float32, "green", "D-", "fp32 inputs"),
]
lines = [(label, blocks, curves_of[key][0], hue, form) for key, hue, form, label in styles]
lines += [("", blocks, [curves_of[key][1]] * len(blocks), hue, ":") for key, hue, *_ in styles[1:]]
figure, ax = plt.subplots(figsize=(7, 3.9))
curves.curves(ax, lines, log="xy", xticks=blocks[::2], ylim=(1e-7, 2), xlabel="BLOCK_N (keys per block)",
              ylabel="largest error against float64", title="Error by block size, N = 1024", legend=None)
ax.legend(ncols=2, loc="upper right")
plt.show()

# %% [markdown]
# *Largest error of O over 64 rows, N = 1024, head_dim 64. Dotted: the eager twin in the same dtype.*
#
# - **fp16 and bf16: flat, and a little better than the twin.** What is left is the rounding of P and of the final output;
#   the twin rounds the scores as well. That is the sense in which FlashAttention is *exact*: it is not an approximation.
# - **fp32: a shallow valley.** With one key a block, 1024 numbers are added one after the other and rounding piles up. Blocks
#   of 32 to 64 keys make it a sum of partial sums, which is the better way to add. One huge block leaves the order to torch.
# - **A 16-bit accumulator: a disaster with many blocks.** Each block adds less than half a unit in the last place of what is
#   there already, and the addition is lost. This is why the statistics and `acc` are float32 in every kernel of this course,
#   and why exercise checks use inputs where it shows.

# %% [markdown]
# ## 10 · The checker's opinion
#
# Two or three friendly shapes prove little. `verify_block` calls a function like ours on many unfriendly ones (moving row
# maxima, scores near ±200, tails, one key, block sizes that divide nothing) and compares with bounds derived from the dtype;
# `verify` does the same for whole `[batch, heads, seq_len, head_dim]` tensors.

# %%
print("one block:    ", verify_block(flash_attention_forward_sim, dtypes=dtypes).verdict)
print("whole tensors:", verify(flash_attention_sim, dtypes=dtypes, gqa=True).verdict)

# %% [markdown]
# And it has to *fail* when it should, or the lines above mean nothing. The low-precision accumulator of section 9 and the
# padded tail of section 6:

# %%
def padded_tail(Q_block, K, V, BLOCK_N, scale=None):
    short = -len(K) % BLOCK_N
    K, V = (torch.cat([x, x.new_zeros(short, x.shape[1])]) for x in (K, V))
    return flash_attention_forward_sim(Q_block, K, V, BLOCK_N, scale)


for fn in (low_precision_acc, padded_tail):
    try:
        verify_block(fn, dtypes=(torch.bfloat16,))
        raise AssertionError(f"{fn.__name__} passed, and should not have")
    except CheckFailed as failed:
        diagnosis = failed.diagnosis
        print(f"{fn.__name__}: rejected")
print("what the checker calls the second:", diagnosis)

# %% [markdown]
# ## 11 · The two questions
#
# Answer them in your own words before you open the folds. If you can, you have understood FlashAttention.
#
# **Which computation does FlashAttention reorder?**
#
# <details><summary>Answer</summary>
#
# The reduction over the keys, in each row. The textbook order is: *all* scores of the row, then their maximum, then all
# exponentials, then their sum, then the division, then the product with V. Each arrow waits for the whole row, so the whole
# row has to be somewhere: in HBM (naive) or on chip (scheme A).
#
# FlashAttention takes the keys block by block and carries each block through *all* of these steps at once: scores, a
# provisional maximum, exponentials relative to it, their sum, their product with V. The result is a partial state
# $(m, l, \mathrm{acc})$, and partial states merge: `correction` re-expresses the older one relative to the newer maximum. The merge is
# associative and has an identity (phase 0), so the row may be cut anywhere. The division commutes with the sum over keys,
# so it moves to the very end.
#
# What is *not* changed: the two matmuls, their operation count, and the result. Only the order of additions differs, hence
# the rounding of section 9. No score is dropped or approximated.
#
# </details>
#
# **Why is scheme B (V in blocks, K whole) stuck in Triton, while the online softmax is not?**
#
# <details><summary>Answer</summary>
#
# Scheme B computes P `[BLOCK_M, N]` whole, because its softmax needs the whole row before it can use any of it. Then it wants
# to multiply P with V one block of keys at a time, so in step `j` it needs the *columns* `P[:, j*BLOCK_N : (j+1)*BLOCK_N]`. P is
# not in memory with an address: it is a tensor on chip, its elements spread over the registers of all threads of the
# program. Cutting out columns that depend on a loop counter would mean moving data between threads, so Triton has no such
# operation and refuses `P[:, a:b]` when it compiles (phase 1 showed its error, and the expensive ways around it). And even where
# a way around works, P still has N in its shape: the physical wall of scheme A stands right behind.
#
# The online softmax never needs P whole. The block of P that meets `v` in step `j` is the one just computed from `k` in step `j`:
# same loop counter, same iteration, used at once and forgotten. The only things ever cut into blocks are K and V, and they are cut
# *while being loaded*, by pointer arithmetic on HBM addresses, which every kernel can do. What crosses from one step to the next
# is `m_i`, `l_i` and `acc`, whose shapes do not depend on N or on `j`. Nothing is left to slice, so the logical wall is gone, and
# nothing grows with N, so the physical one is gone too.
#
# In one sentence: scheme B cuts the *second* matmul only and has to hand pieces of a finished softmax to it; the online softmax
# makes the softmax itself a running state, so that both matmuls can be cut along the same line.
#
# </details>
#
# The cell below makes the second answer concrete. It lists the shapes of everything that the loop's steps hand over, for two
# values of N.

# %%
for N in (128, 1024):
    steps = []
    Q, K, V = (torch.randn(n, 32) for n in (64, N, N))
    flash_attention_forward_sim(Q, K, V, BLOCK_N=64, trace=steps.append)
    shapes = {
        tuple((name, *getattr(step, name).shape) for name in step._fields[1:]) for step in steps
    }
    assert len(shapes) == 1  # every step the same
    shown = ", ".join(f"{name} {shape}" for name, *shape in shapes.pop())
    print(f"N = {N:4d}, {len(steps):2d} steps: {shown}")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - A row of attention is a running state $(m_i, l_i, \mathrm{acc})$; `correction = exp(m_i - m_new)` moves it to a new maximum.
# - Inverted, the correction leaves the rows whose maximum never moves untouched, and weighs the others' early keys $e^{2\Delta}$ too
#   much. Plot the error by key block and you see it.
# - Normalise once, at the end. Mask a padded tail with $-\infty$, before the maximum. Keep the state in float32.
# - Memory in use: linear in N instead of quadratic. Traffic: still quadratic, divided by about $3\,\mathrm{BLOCK\_M}/D$. FLOPs: the same.
# - Query blocks are independent, so they run in parallel; the loop over keys carries the state, so it does not.
#
# Left to explore, some of it in the exercises: cut the *keys* among several workers and merge at the end (2.8, the idea of
# split-KV decoding and ring attention); skip the tiles that a causal mask empties (2.9); skip the correction when no row's maximum moved
# (FlashAttention-4 does, within a bound). And the obvious next step, phase 3: translate the loop into Triton, run it against the two
# walls of phase 1, and see them gone.

# %% [markdown]
# ## References
#
# - Tri Dao, Daniel Fu, Stefano Ermon, Atri Rudra, Christopher Ré, *FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness*, NeurIPS 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135). Algorithm 1 (normalised at every step, keys in the
#   outer loop) and theorem 2 (HBM accesses).
# - Tri Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*, 2023,
#   [arXiv:2307.08691](https://arxiv.org/abs/2307.08691). Section 3.1: normalise once, and why operations outside matmuls are dear;
#   section 3.2: query blocks in parallel.
# - Maxim Milakov, Natalia Gimelshein, *Online normalizer calculation for softmax*, 2018,
#   [arXiv:1805.02867](https://arxiv.org/abs/1805.02867). The recurrence for m and l.
# - Markus Rabe, Charles Staats, *Self-attention Does Not Need O(n²) Memory*, 2021,
#   [arXiv:2112.05682](https://arxiv.org/abs/2112.05682). The same state, merged over chunks of keys.
# - Nicholas Higham, *The Accuracy of Floating Point Summation*, SIAM Journal on Scientific Computing 14 (1993), 783–799. Why sums of
#   partial sums round better.
