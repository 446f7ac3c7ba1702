# %% [markdown]
# # Phase 2 · Online-softmax simulation
#
# You write FlashAttention's forward pass in plain Python, without a GPU and without Triton. It is a `for` loop over blocks of
# keys, with three tensors of state. One line makes it legal: `correction = exp(m_i - m_new)`.
#
# In phase 3 the same loop becomes a Triton kernel, line by line and under the same names.

# %% [markdown]
# ## What you will be able to do
#
# - Write `flash_attention_forward_sim(Q_block, K, V, BLOCK_N)` from memory, and say what each line is for.
# - Predict the state `m_i`, `l_i`, `acc` after every key block, by hand.
# - Recognise a wrong correction, a padded tail and a low-precision accumulator by their symptoms.
# - Count the bytes in use, the bytes asked for and the operations, and check each count against a measurement.
# - Say which computation FlashAttention reorders, and why scheme B is stuck where it is not.

# %% [markdown]
# ## What you need first
#
# - Phase 0: the safe softmax, and the merge of two partial states.
# - Phase 1: what naive attention costs, and the two walls. HBM is the GPU's main memory; "on chip" means registers and shared
#   memory.
# - From torch: slicing, `@`, `amax`, `exp`.

# %%
import math

import matplotlib.pyplot as plt
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.cost import Cost, Line, Meter, naive_cost, naive_peak_bytes
from flashlab.attention.naive import naive_attention
from flashlab.attention.simulation import Step, check_inputs, flash_attention_sim
from flashlab.bench import hardware
from flashlab.check import CheckFailed, verify, verify_block
from flashlab.figures import curves, show
from flashlab.figures.tiles import tile_figure, tile_frames

show.style()

# %% [markdown]
# ## 1 · The oracle first
#
# Before the new algorithm, fix what "right" means: `reference.attention`, which does every step in float64. This lecture works on
# one head at a time, so a small adapter drops the batch and head dimensions.

# %%
def oracle(Q, K, V, **options):
    """One head, Q [M, D], K and V [N, D]: returns O [M, D] and the log-sum-exp of each row [M] in float64."""
    o, lse = reference.attention(Q[None, None], K[None, None], V[None, None], **options)
    return o[0, 0], lse[0, 0]

# %% [markdown]
# The first example can be computed by hand. Its scores are whole multiples of $\ln 2$, so every exponential is a power of two:
#
# $$S = \ln 2 \cdot \begin{pmatrix} 1 & 0 & 3 & 2 \\ 2 & 0 & 1 & 1 \end{pmatrix}, \qquad
# e^{S} = \begin{pmatrix} 2 & 1 & 8 & 4 \\ 4 & 1 & 2 & 2 \end{pmatrix}, \qquad
# V = \begin{pmatrix} 4 & 0 \\ 0 & 4 \\ 8 & 0 \\ 0 & 8 \end{pmatrix}$$
#
# The rows of $e^S$ sum to 15 and 9. So $O = \begin{pmatrix} 72/15 & 36/15 \\ 32/9 & 20/9 \end{pmatrix}$, and the log-sum-exp
# (`lse`) is $(\ln 15, \ln 9)$.

# %%
LN2 = math.log(2)
Q_tiny = torch.eye(2)  # two queries; with the identity, the scores are simply K transposed
K_tiny = LN2 * torch.tensor([[1.0, 2], [0, 0], [3, 1], [2, 1]])
V_tiny = torch.tensor([[4.0, 0], [0, 4], [8, 0], [0, 8]])

O_tiny, lse_tiny = oracle(Q_tiny, K_tiny, V_tiny, scale=1.0)
assert torch.allclose(O_tiny.float(), torch.tensor([[72 / 15, 36 / 15], [32 / 9, 20 / 9]]))
assert torch.allclose(lse_tiny.exp().float(), torch.tensor([15.0, 9]))
print("the oracle and the hand computation agree")

# %% [markdown]
# ## 2 · One row, one key at a time
#
# Phase 0 derived the recurrence. For one query row, keep three things about the keys *seen so far*:
#
# $$m = \max_j s_j, \qquad l = \sum_j e^{s_j - m}, \qquad \mathrm{acc} = \sum_j e^{s_j - m}\, v_j .$$
#
# A new key may raise the maximum to $m_{\text{new}}$. Then every old exponential is too large by the same factor, so one
# multiplication repairs all of them:
#
# $$e^{s_j - m_{\text{new}}} = e^{s_j - m} \cdot \underbrace{e^{\,m - m_{\text{new}}}}_{\text{correction}\ \le\ 1}$$

# %% [markdown]
# That is the whole algorithm. Here it is for one row, on plain Python floats.

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

# %%
rows = [one_row(q, K_tiny.tolist(), V_tiny.tolist(), scale=1.0) for q in Q_tiny.tolist()]
for i, (o, lse) in enumerate(rows):
    assert torch.allclose(torch.tensor(o).double(), O_tiny[i])
    assert math.isclose(lse, lse_tiny[i], rel_tol=1e-6)
    print(f"row {i}: O = ({o[0]:.4f}, {o[1]:.4f}), exp(lse) = {math.exp(lse):.4f}")

# %% [markdown]
# Look at the first iteration. There `m` is $-\infty$ and `m_new` is finite, so `correction` is $e^{-\infty} = 0$. It multiplies
# an `l` and an `acc` that are 0 already. So the first key needs no `if`: $(-\infty, 0, 0)$ is the identity of phase 0's merge.
#
# There was no list of scores and no second pass. What is left of a row is `len(v) + 2` numbers, however many keys there were.

# %% [markdown]
# ## 3 · The same, for a block of rows and a block of keys
#
# GPUs multiply matrices, so take `BLOCK_M` query rows and `BLOCK_N` keys at once. The mathematics does not change, because
# the merge of states is associative.
#
# | | one row, one key | a block |
# |:--|:--|:--|
# | score | a number | `s`, a tile `[BLOCK_M, BLOCK_N]` |
# | `m_i`, `l_i`, `correction` | numbers | vectors `[BLOCK_M]` |
# | `acc` | a vector | a tile `[BLOCK_M, HEAD_DIM]` |
# | sum over keys | `acc + p * v` | a product, `p @ v` |

# %% [markdown]
# One step of it, frozen: six queries and eight keys, in 2 × 2 tiles. Query block 1 is about to finish its key block 1.

# %%
generator = torch.Generator().manual_seed(3)
Q_small, K_small, V_small = (torch.randn(n, 2, generator=generator) for n in (6, 8, 8))
tile_figure(Q_small, K_small, V_small, BLOCK_M=2, BLOCK_N=2, frame=6)
plt.show()

# %% [markdown]
# *Left: what lives in HBM, with the tiles of this step coloured. Right: all that is on chip. In the first row the maximum has
# just risen, so its correction is below 1. In the second row it has not.*

# %% [markdown]
# Here is the milestone of this phase, whole. Read it against `one_row` above: the same steps, on tiles. (New are the
# two loads; `acc` is corrected and added to in two lines.) `check_inputs` raises
# the errors for wrong shapes and returns the scale. `trace` lets us watch the state; it is handed a `Step` after each block.

# %%
# FROM flashlab.attention.simulation: flash_attention_forward_sim (no docstrings)

# %% [markdown]
# Four choices in it deserve a word. The first two are about precision.
#
# - **`.float()` is the load**, from HBM to the chip. From there on, tiles and statistics are float32, whatever the inputs are. The
#   product of two 16-bit numbers fits in float32 exactly, here and in a tensor core (the GPU's unit for matrix products). How a
#   tensor core adds is a little different; phase 7 measures it.
# - **`p.to(V.dtype)`.** A tensor core wants 16-bit operands, so P is rounded before the second product. `l_i` is summed from the
#   unrounded `p`. Section 9 measures what that costs.

# %% [markdown]
# The other two are about speed.
#
# - **`exp`, not `exp2`.** The derivation is in base $e$, so this simulation is too. A GPU has an instruction for $2^x$ and none for
#   $e^x$. Phase 3 changes the base.
# - **Division last.** `acc` is not an average until the very end. Section 5 counts what that saves.

# %% [markdown]
# ## 4 · The state, step by step
#
# Run it on the tiny example, two keys per block. First by hand. In block 0 the correction is 0, because nothing came before it:
#
# | | scores $/\ln 2$ | $m_i / \ln 2$ | $p$ | $l_i$ | acc |
# |:--|:--|--:|:--|--:|:--|
# | row 0 | $1, 0$ | 1 | $1, \tfrac12$ | $1.5$ | $(4, 2)$ |
# | row 1 | $2, 0$ | 2 | $1, \tfrac14$ | $1.25$ | $(4, 1)$ |

# %%
steps = []
O_block, lse = flash_attention_forward_sim(Q_tiny, K_tiny, V_tiny, 2, 1.0, trace=steps.append)


def state_is(step, m, correction, l, acc):
    """Every entry of the state, compared by machine."""
    state = [step.m_i / LN2, step.correction, step.l_i, step.acc]
    wanted = [torch.tensor(x, dtype=torch.float32) for x in (m, correction, l, acc)]
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(state, wanted, strict=True))


assert state_is(steps[0], [1, 2], [0, 0], [1.5, 1.25], [[4, 2], [4, 1]])
print("block 0 as computed by hand: True")

# %% [markdown]
# In block 1 the maximum of row 0 moves from 1 to 3, so its old state shrinks to $2^{1-3} = \tfrac14$. In row 1 the maximum stays:
#
# | | scores $/\ln 2$ | correction | $p$ | $l_i$ | acc |
# |:--|:--|--:|:--|--:|:--|
# | row 0 | $3, 2$ | $\tfrac14$ | $1, \tfrac12$ | $1.5 \cdot \tfrac14 + 1.5 = 1.875$ | $(4, 2)\cdot\tfrac14 + (8, 4) = (9, 4.5)$ |
# | row 1 | $1, 1$ | 1 | $\tfrac12, \tfrac12$ | $1.25 + 1 = 2.25$ | $(4, 1) + (4, 4) = (8, 5)$ |
#
# The last division gives $(9, 4.5) / 1.875 = (4.8, 2.4) = (72/15, 36/15)$. ✓

# %%
assert state_is(steps[1], [3, 2], [0.25, 1], [1.875, 2.25], [[9, 4.5], [8, 5]])
assert torch.allclose(O_block.double(), O_tiny) and torch.allclose(lse.double(), lse_tiny)
rows = []
for step in steps:
    for row in range(2):
        m, correction, l = (x[row].item() for x in (step.m_i / LN2, step.correction, step.l_i))
        acc = ", ".join(f"{a:.1f}" for a in step.acc[row])
        rows.append([step.start_n // 2, row, f"{m:.2f}", f"{correction:.2f}", f"{l:.3f}", acc])
show.table(rows, ["key block", "row", "m_i / ln 2", "correction", "l_i", "acc"], align="rrrrrr")

# %% [markdown]
# **Any block size gives the same answer**, up to rounding. BLOCK_N is a choice of schedule, not of mathematics. Try all of 1, 2,
# ..., N keys per block. N = 37 is prime, so every size but 1 and 37 leaves a shorter last block.

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
# The line that is easiest to get wrong is the correction: $e^{m_{\text{new}} - m}$ instead of $e^{m - m_{\text{new}}}$. What does
# that look like? If you start from $m = -\infty$, you are lucky.

# %%
m_i, m_new, l_i = torch.tensor([-math.inf]), torch.tensor([0.7]), torch.tensor([0.0])
correction = torch.exp(m_new - m_i)  # the wrong way round
print("correction =", correction.item(), "  l_i * correction =", (l_i * correction).item())
assert correction.isinf() and (l_i * correction).isnan()

# %% [markdown]
# $e^{+\infty} \cdot 0$ is NaN in every row, on the first block. You notice at once.
#
# The dangerous version handles the first block separately, so no infinity appears. Then only some rows are wrong: those whose
# maximum *moves after the first block*. Here is that version, with the sign as a parameter.

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

# %% [markdown]
# Four rows of scores, 8 blocks of 16 keys each:
#
# | row | its maximum |
# |:--|:--|
# | A | is in block 0, and never moves |
# | B | jumps once, by 3, in block 3 |
# | C | rises by 0.5 in every block |
# | D | jumps by 3 in the last block |

# %%
generator = torch.Generator().manual_seed(2)
S = torch.randn(4, 8, 16, generator=generator, dtype=torch.float64).clamp(-1, 1)
S[:, :, 0] = 1.0  # every block has the same maximum, 1, ...
S[0, 0] += 4  # ... until row A starts high,
S[1, 3:] += 3  # row B jumps in block 3,
S[2] += 0.5 * torch.arange(8)[:, None]  # row C rises,
S[3, 7] += 3  # row D jumps last
S, V = S.flatten(1), torch.randn(128, 8, generator=generator, dtype=torch.float64) + 0.5

# %% [markdown]
# After each block the truth is known: attention over the keys seen so far. So we can plot the error *by key block*. For a wrong
# attention kernel this plot says the most.

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
# *Row A never goes wrong. B and D go wrong at the block where their maximum moves, C from block 1 on. The right correction stays at
# rounding level (dashed).*
#
# - **Some rows are right.** A test with one row, one block or falling scores passes.
# - **Nothing overflows.** The output is still a weighted average of rows of V; only the weights are wrong.
# - **A later jump erases nothing.** The state carries the mistake to the end of the row.

# %% [markdown]
# How wrong are the weights? After a jump by $\Delta$ the earlier keys should be scaled by $e^{-\Delta}$. They were scaled by
# $e^{+\Delta}$, so they weigh $e^{2\Delta}$ too much. For row B, $\Delta = 3$: a factor of $e^6 \approx 403$.

# %%
first, rest = S[1, : 3 * 16], S[1, 3 * 16 :]
predicted_lse = torch.logsumexp(torch.cat([first + 2 * 3, rest]), dim=0)  # e^6 on the early keys
*_, (_, lse_wrong) = state_after_each_block(S, V, 16, -1)
assert torch.allclose(lse_wrong[1], predicted_lse)
print(f"row B, inverted: its first 48 keys weigh exp(6) = {math.exp(6):.0f} times too much, as predicted")

# %% [markdown]
# ## 5 · Normalise at the end, or at every step?
#
# The first FlashAttention paper kept `O` normalised after every block. That is also correct: at each moment O is the attention over
# the keys so far. It multiplies by the old `l_i`, adds, and divides by the new one.

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
# Which one is cheaper? `Meter` counts every operation that torch runs inside a `with` block. It does not time, so its numbers are
# the same on every machine.
#
# The prediction: with $T = \lceil N / \mathrm{BLOCK\_N} \rceil$ key blocks, dividing at every step costs
# $T \cdot \mathrm{BLOCK\_M} \cdot \mathrm{HEAD\_DIM}$ divisions. Dividing once costs
# $\mathrm{BLOCK\_M} \cdot \mathrm{HEAD\_DIM}$. Everything else is equal.

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
meters = [("at every step", every_step), ("at the end", at_the_end)]
counts = [[label, *(meter.operations[n] for n in names), meter.matmul_flops] for label, meter in meters]
show.table(counts, ["normalised", *names, "matmul FLOPs"])

# %% [markdown]
# Only the divisions differ, as predicted. Beside 16.8 million matmul FLOPs that seems like nothing. But matmuls run on tensor cores,
# and divisions do not.
#
# The FlashAttention-2 paper (section 3.1) gives an A100 312 TFLOP/s for one and 19.5 for the other. So an operation outside a
# matmul costs as much as 16 inside. Dividing once is the first change of that paper.

# %% [markdown]
# ## 6 · The tail
#
# 10 keys, 4 per block: the last block holds 2. In Python a slice stops at the end. On a GPU a tile has a fixed shape, so the last
# tile is filled up, with zeros if you ask for that.
#
# **A zero key is not a harmless key.** Its score is $q \cdot 0 = 0$, and $e^{0 - m}$ is not 0. The cell plays that GPU: it pads K
# and V with two rows of zeros.

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
# Each row's sum is too large by exactly 2: two keys with $e^0 = 1$ each. Their values are zero, so `acc` is right and only `l_i` is
# wrong. The output is too small.
#
# With scores near zero that is some percent, and a loose tolerance lets it pass. With scores far *below* zero the padding takes the
# whole row.

# %%
for shift in (0, -5, -20):
    K_low = K + shift * 4.0 * Q[0] / Q[0].square().sum()  # adds shift to row 0's scores (scale 1/4)
    want, _ = oracle(Q[:1], K_low, V)
    padded = torch.cat([K_low, torch.zeros(2, 16)])
    O_block, _ = flash_attention_forward_sim(Q[:1], padded, V_padded, BLOCK_N=4)
    ratio = (O_block.double().norm() / want.norm()).item()
    print(f"scores shifted by {shift:3d}: padded output is {ratio:.2f} of what it should be")
assert ratio < 1e-6

# %% [markdown]
# The repair is one line, and *every* kernel that pads needs it: give the padded columns a score of $-\infty$,
# `s = s.masked_fill(key >= N, -inf)`. Do it before the maximum, because the maximum must not see them either.

# %% [markdown]
# ## 7 · What stays in memory
#
# Nothing in the loop has N in its shape. Phase 1's scheme A held a `[BLOCK_M, N]` tile of scores, and the naive version an `[N, N]`
# matrix. Here the largest tiles are `[BLOCK_M, BLOCK_N]`, `[BLOCK_N, HEAD_DIM]` and `[BLOCK_M, HEAD_DIM]`.
#
# `Meter.peak_bytes` is the largest number of bytes that tensors made inside the block held at one moment.

# %% [markdown]
# Predict it for 64 × 64 tiles. At the worst moment eight float32 tiles are alive: `q`, `k`, `v`, `s`, `p`, the rescaled `acc`, the
# product and their sum. And four vectors: `m_i`, `m_new`, `l_i`, `correction`.

# %%
tiles, vectors = 8 * 64 * 64 * 4, 4 * 64 * 4
for N in (64, 128, 512, 2048):
    Q, K, V = (torch.randn(n, 64).half() for n in (64, N, N))
    with Meter() as meter:
        flash_attention_forward_sim(Q, K, V, BLOCK_N=64)
    assert meter.peak_bytes == tiles + vectors
    print(f"N = {N:4d}: peak {meter.peak_bytes} bytes, predicted {tiles + vectors}")

# %% [markdown]
# The number does not move. (Python holds more than it must. A kernel rescales `acc` in place.)

# %% [markdown]
# ## 8 · The whole matrix
#
# Every block of query rows is independent: it reads its own rows of Q, all of K and V, and writes its own rows of O. So the whole
# matrix is a loop around the milestone. The figure of section 3 was one frame of this animation.

# %% tags=["nbval-ignore-output"]
frames = tile_frames(Q_small, K_small, V_small, BLOCK_M=2, BLOCK_N=2)
animation = show.gif(frames, seconds_a_frame=1.0, dpi=90)
assert len(animation.data) < 800_000
animation

# %% [markdown]
# *In HBM: coloured is what is being read or written. On chip: the tiles alive now. Each tile of S exists for one step. K and V are
# read from the start again for each query block; Q is read once and O is written once.*
#
# Watch three things. `m_i` never falls. `correction` is below 1 exactly when `m_i` rose. The byte counter grows by one K tile and
# one V tile per step.

# %%
# FROM flashlab.attention.simulation: flash_attention_one_head_sim (no docstrings)

# %% [markdown]
# On a GPU the outer loop is not a loop. Its iterations share nothing that they write, so each becomes one *program*, and all of them
# may run at once. The inner loop over keys stays in order, because it carries the state.
#
# The first FlashAttention had the loops the other way round, keys outside. Then O, `m_i` and `l_i` travel to HBM and back for every
# key block.

# %% [markdown]
# ### Memory in use
#
# Phase 1's naive attention and this one, a whole head of N queries and N keys, head_dim 64, fp16. The naive peak is two N × N
# matrices, S and P, plus the output. The tiled peak is the output, plus the constant of section 7, plus one finished block of O
# and lse.

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
# The formulas hold exactly, so the figure can go further than the measurement.

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
# *Peak bytes that one head allocates, fp16, head_dim 64. Points: measured by `Meter`. Lines: the formulas. At N = 131072 one naive
# head wants 64 GiB, the tiled one 17 MiB.*

# %% [markdown]
# ### The bytes it asks for
#
# Now the bytes that a program asks of HBM: the sizes of the tiles it loads and stores. $e$ is the bytes per element.
#
# | | tiled | naive |
# |:--|:--|:--|
# | Q | $N D e$ | $N D e$ |
# | K, V | $\lceil N / \mathrm{BLOCK\_M} \rceil \cdot 2 N D e$ | $2 N D e$ |
# | S, P | 0 | $6 N^2 e$ |
# | O | $N D e$ | $N D e$ |
#
# K and V are read once *for each query block*. In the naive version the N × N matrix makes six trips (phase 1). The tiled version also
# writes 4 bytes of `lse` per row.

# %%
# FROM flashlab.attention.cost: flash_cost (no docstrings)

# %% [markdown]
# `flash_cost` holds the tiled column and the operations. `Meter(Q, K, V)` measures a run: the bytes of every slice of Q, K and V that
# is loaded, and of every tile that is stored. Do the two agree, also where no tile divides the lengths?

# %%
for M, N, BLOCK_M, BLOCK_N in [(512, 512, 64, 64), (512, 512, 128, 32), (300, 500, 64, 48)]:
    Q, K, V = (torch.randn(n, 64).half() for n in (M, N, N))
    with Meter(Q, K, V) as meter:
        flash_attention_one_head_sim(Q, K, V, BLOCK_M, BLOCK_N)
    cost = flash_cost(M, N, 64, BLOCK_M, BLOCK_N, itemsize=2)
    assert (meter.bytes_read, meter.bytes_written) == (cost.bytes_read, cost.bytes_written)
    assert (meter.matmul_flops, meter.other_flops) == (cost.matmul_flops, cost.other_flops)
    print(f"M {M}, N {N}, tiles {BLOCK_M} x {BLOCK_N}: formula = measured: {meter.bytes_read} bytes read,",
          f"{meter.bytes_written} written, {meter.matmul_flops + meter.other_flops} FLOP")

# %% [markdown]
# They agree to the byte. So the formula can be trusted at sizes for which a Python loop would take minutes. One head, N = 4096,
# head_dim 64, fp16:

# %%
N, D, e = 4096, 64, 2
naive = naive_cost(N, D, itemsize=e)
rows = [["naive", naive.bytes / 1e6, 1.0, naive.flops / 1e9, 4 * N * N * D / naive.bytes]]
for BLOCK_M in (16, 32, 64, 128, 256):
    cost = flash_cost(N, N, D, BLOCK_M, BLOCK_N=64, itemsize=e)
    less = naive.bytes / cost.bytes
    intensity = cost.matmul_flops / cost.bytes
    rows.append([f"BLOCK_M = {BLOCK_M}", cost.bytes / 1e6, less, cost.flops / 1e9, intensity])
show.table(rows, ["", "MB asked for", "times less than naive", "GFLOP", "matmul FLOPs per byte"])

# %% [markdown]
# Three things to take from this table.
#
# 1. **Small tiles ask for more than the naive version.** Tiling wins where $2 N^2 D e / \mathrm{BLOCK\_M} < 6 N^2 e$, that is, where
#    $\mathrm{BLOCK\_M} > D / 3$. BLOCK_M = 16 loses.
# 2. **The bytes fall as 1 / BLOCK_M.** A loaded K tile serves BLOCK_M rows. BLOCK_N does not appear. What limits BLOCK_M is room
#    on the chip.
# 3. **The operations do not fall.** There are slightly more of them: the corrections.

# %%
N = [2**i for i in range(9, 16)]
lines = [("naive", N, [naive_cost(n, 64).bytes / 1e6 for n in N], "red", "-")]
for BLOCK_M, hue in [(16, "sky"), (64, "blue"), (256, "black")]:
    tiled = [flash_cost(n, n, 64, BLOCK_M).bytes / 1e6 for n in N]
    lines.append((f"BLOCK_M = {BLOCK_M}", N, tiled, hue, "-"))
sizes = [16, 32, 64, 128, 256, 512]
costs = [flash_cost(16384, 16384, 64, BLOCK_M) for BLOCK_M in sizes]
intensities = [cost.matmul_flops / cost.bytes for cost in costs]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.5))
curves.curves(left, lines, log="xy", xticks=N[::2], title="Bytes asked for", xlabel="sequence length N",
              ylabel="asked of HBM, one head (MB)")
curves.curves(right, [("tiled", sizes, intensities, "blue", "o-")], xticks=sizes[2:], legend=None,
              title="Arithmetic intensity, N = 16384", xlabel="BLOCK_M (query rows)",
              ylabel="matmul FLOPs per byte")
for gpu, hue in [("A100", "orange"), ("H100", "green")]:
    curves.level(right, runtime.limits(gpu).ridge, f"{gpu}'s ridge: {runtime.limits(gpu).ridge:.0f}", hue)
plt.show()

# %% [markdown]
# *Left: all lines have the same slope, so **the bytes asked for are still quadratic in N**. Tiling divides them by a constant, about
# $3 \cdot \mathrm{BLOCK\_M} / D$. Only the memory in use became linear.*
#
# *Right: for 2-byte elements the intensity is about **BLOCK_M FLOPs per byte**. Below its ridge a GPU is limited by memory, above it
# by arithmetic (phase 1's roofline).*

# %% [markdown]
# ### Asked for is not moved
#
# BLOCK_M = 64 is below the ridge of both GPUs. Yet real kernels with BLOCK_M = 64 are not limited by HBM. *Why? Think of the L2 cache,
# which lies between HBM and all the programs.*
#
# <details><summary>Answer</summary>
#
# The formula counts what the programs *ask for*. K and V of one head are small: 4 MiB together at N = 16384, D = 64, fp16. All programs of
# the head walk over the same tiles, many of them at the same time. Once a tile has come from HBM, the L2 cache answers the others. The naive S
# and P are 512 MiB each at that length: they do not fit in L2.
#
# </details>
#
# Nsight Compute (`ncu`, NVIDIA's profiler) counts the bytes of DRAM, which is what HBM is made of. The counters below are recorded on the
# GPU named with them, at N = 16384.

# %%
for run in hardware.recorded():
    print(run["machine"]["gpu"])
    found = {name: hardware.moved(run, name) for name in ("naive", "minimal")}
    rows = [[name, *(x / 2**20 for x in moved.values())] for name, moved in found.items() if moved]
    show.table(rows, ["MiB", "the tensors", "asked for", "through L2", "DRAM"])
    if all(found.values()):
        assert found["naive"]["dram"] > 0.7 * found["naive"]["asked"]  # beyond L2: the two meet
        assert found["minimal"]["dram"] < 1.1 * found["minimal"]["tensors"]  # each tile comes once
print("runs recorded:", len(hardware.recorded()))

# %% [markdown]
# "minimal" is phase 3's Triton kernel: this loop, with BLOCK_M = 64. "The tensors" is the size of Q, K, V and O. "Through L2" is what
# the L2 cache handed out and took in.
#
# So read the formula with care. For the naive version it is close to what DRAM really moves. For the tiled version it is what the
# programs ask for, and DRAM moves no more than the tensors.

# %% [markdown]
# ## 9 · Precision: what does the block size change?
#
# Another BLOCK_N adds the same numbers in another order, so the results differ by rounding. How much? There are two yardsticks: the
# truth in float64, and the *low-precision twin*, which is plain attention in the input's dtype. The rule of flash-attention's own
# tests, for 16-bit inputs, is $\text{error} \le 2 \times \text{the twin's error}$. Does it hold in float32 too?

# %%
def errors_by_block_size(dtype, block_sizes, fn=flash_attention_forward_sim):
    """The largest error of O for each block size, and the twin's."""
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(n, 64, generator=generator) for n in (64, 1024, 1024))
    Q, K, V = Q.to(dtype), K.to(dtype), (V + 0.5).to(dtype)
    want, _ = oracle(Q, K, V)
    twin, _ = reference.attention_low_precision(Q[None, None], K[None, None], V[None, None])
    sizes = [(fn(Q, K, V, b)[0].double() - want).abs().max().item() for b in block_sizes]
    return sizes, (twin[0, 0].double() - want).abs().max().item()

# %%
blocks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
dtypes = (torch.float16, torch.bfloat16, torch.float32)
curves_of = {dtype: errors_by_block_size(dtype, blocks) for dtype in dtypes}
for dtype in dtypes[:2]:
    errors, twin = curves_of[dtype]
    assert all(error <= 2 * twin for error in errors) and max(errors) <= 1.5 * min(errors)
    print(f"{dtype}: {len(blocks)} block sizes within twice the twin's error, and within 1.5x of each other")
errors, twin = curves_of[torch.float32]
few, many = errors[0] <= 2 * twin, all(error <= 2 * twin for error in errors[5:])
assert many and not few
print(f"torch.float32: within twice the twin's error with {blocks[0]} key per block: {few},",
      f"with {blocks[5]} or more: {many}")

# %% [markdown]
# For 16-bit inputs the block size changes nothing that you would notice, and the rule holds. For float32 it does not hold at small blocks.
#
# What does the rounding of P cost, then? Hand the same 16-bit numbers to the milestone as float32: P is not rounded then. Only the output is.

# %%
def unrounded_p(Q_block, K, V, BLOCK_N):
    O_block, lse = flash_attention_forward_sim(Q_block.float(), K.float(), V.float(), BLOCK_N)
    return O_block.to(V.dtype), lse

for dtype in dtypes[:2]:
    rounded = curves_of[dtype][0][blocks.index(64)]
    (unrounded,), _ = errors_by_block_size(dtype, [64], unrounded_p)
    assert unrounded < rounded < 1.2 * unrounded
    print(f"{dtype}: rounding P adds to the largest error, but less than a fifth: True")

# %% [markdown]
# Little: most of the error is the rounding of the output, which no kernel escapes. What if the accumulator were 16 bits wide too? It would save
# half the registers of `acc`. This is the milestone with one line more: after each block, `acc` is rounded to the input's dtype.

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

# %%
curves_of["bf16 acc"] = errors_by_block_size(torch.bfloat16, blocks, low_precision_acc)
errors, twin = curves_of["bf16 acc"]
assert errors[0] > 20 * twin and errors[-1] <= 2 * twin
print("acc in bfloat16, one key per block: over 20 times the twin's error:", errors[0] > 20 * twin)

# %% [markdown]
# All of it in one figure. Dotted: the twin in the same dtype.

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
# - **fp16 and bf16: flat, and a little better than the twin.** What is left is the rounding of P and of the output; the twin rounds the
#   scores as well. In this sense FlashAttention is *exact*: it approximates nothing.
# - **fp32: a valley**, with its left end far above the twin. There 1024 numbers are added one after the other. Blocks make it a sum of
#   partial sums, whose rounding has a smaller bound.
# - **A 16-bit accumulator: a disaster with many blocks.** What a block adds is often too small to change the rounded `acc`, and is
#   lost. So the state is float32 in every kernel of this course.

# %% [markdown]
# ## 10 · The checker's opinion
#
# Two or three friendly shapes prove little. `verify_block` calls a function like ours on many unfriendly ones: moving maxima, scores
# near ±200, tails, one key. It compares with bounds derived from the dtype. `verify` does the same for whole
# `[batch, heads, seq_len, head_dim]` tensors; `flash_attention_sim` loops over batch and heads.

# %%
print("one block:    ", verify_block(flash_attention_forward_sim, dtypes=dtypes).verdict)
print("whole tensors:", verify(flash_attention_sim, dtypes=dtypes, gqa=True).verdict)

# %% [markdown]
# And it has to *fail* when it should. Try it on the low-precision accumulator of section 9 and the padded tail of section 6.
# `diagnosis` is the name of the mistake; `wrong-value` says only that numbers are beyond their bounds, and that it knows no such mistake.

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
        print(f"{fn.__name__}: rejected, {failed.diagnosis}")

# %% [markdown]
# ## 11 · The two questions
#
# Answer them in your own words before you open the folds.
#
# **Which computation does FlashAttention reorder?**
#
# <details><summary>Answer</summary>
#
# The reduction over the keys, in each row. The textbook order is: *all* scores, their maximum, all exponentials, their sum, the division, the product
# with V. Each step waits for the whole row, which has to be somewhere: in HBM (naive) or on chip (scheme A).
#
# FlashAttention carries the keys block by block through *all* of these steps. The result is a partial state $(m, l, \mathrm{acc})$, and partial
# states merge: `correction` re-expresses the older one relative to the newer maximum. The merge is associative and has an identity (phase 0), so the
# row may be cut anywhere. The division moves to the very end.
#
# Not changed are the two matmuls and their operation count. No score is dropped or approximated. What differs is the order of the additions and
# where numbers are rounded (section 9).
#
# </details>

# %% [markdown]
# **Why is scheme B (V in blocks, K whole) stuck in Triton, while the online softmax is not?**
#
# <details><summary>Answer</summary>
#
# Scheme B computes P `[BLOCK_M, N]` whole, because its softmax needs the whole row. Then it multiplies P with V by blocks of keys: step `j` needs the
# *columns* `P[:, j*BLOCK_N : (j+1)*BLOCK_N]`. P lies on chip, spread over the registers of all threads: it has no address. Triton refuses to slice it
# (phase 1). And P still has N in its shape, so the physical wall of scheme A stands right behind.
#
# The online softmax never needs P whole. The block of P that meets `v` in step `j` was computed from `k` in the same step. Only K and V are cut,
# *while being loaded*, by pointer arithmetic on HBM addresses. What crosses from one step to the next is `m_i`, `l_i` and `acc`, whose
# shapes do not depend on N: both walls are gone.
#
# </details>

# %% [markdown]
# The second answer, made concrete: the shapes of everything that the loop's steps hand over, for two values of N.

# %%
for N in (128, 1024):
    steps = []
    Q, K, V = (torch.randn(n, 32) for n in (64, N, N))
    flash_attention_forward_sim(Q, K, V, BLOCK_N=64, trace=steps.append)
    shapes = {tuple((name, *getattr(step, name).shape) for name in step._fields[1:]) for step in steps}
    assert len(shapes) == 1  # every step the same
    shown = ", ".join(f"{name} {shape}" for name, *shape in shapes.pop())
    print(f"N = {N:4d}, {len(steps):2d} steps: {shown}")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - A row of attention is a running state $(m_i, l_i, \mathrm{acc})$; `correction = exp(m_i - m_new)` moves it to a new maximum.
# - Inverted, the correction spoils only the rows whose maximum moves. Plot the error by key block and you see it.
# - Normalise once, at the end. Mask a padded tail with $-\infty$, before the maximum. Keep the state in float32.
# - Memory in use: linear in N. Bytes asked for: still quadratic, and L2 answers most of them. FLOPs: slightly more.

# %% [markdown]
# Left to explore, some of it in the exercises: cut the *keys* among several workers and merge at the end (2.8); skip the tiles that a
# causal mask empties (2.9); skip the correction when no row's maximum moved.
#
# Next, phase 3 translates the loop into Triton and runs it against the two walls of phase 1.

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
