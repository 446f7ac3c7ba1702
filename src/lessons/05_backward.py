# %% [markdown]
# # Phase 5 · The backward pass
#
# A model learns only if its attention has a gradient. You derive that gradient from the softmax, find the one number per row that makes
# it cheap, and compute it tile by tile from what the forward pass has left. Then it becomes three Triton kernels, and a model trains with
# them.

# %% [markdown]
# ## What you will be able to do
#
# - Derive $dQ$, $dK$ and $dV$ from the softmax's Jacobian, and check them by hand, by autograd and by finite differences.
# - Say what $\delta$ is, and why no row of P has to be kept to compute it.
# - Count what a backward pass keeps, moves and computes, naive and tiled, before you run it.
# - Write the two loops of the backward pass, and say why there are two.
# - Write the kernels, their launcher and the `autograd.Function`, and name the traps that others fell into.

# %% [markdown]
# ## What you need first
#
# - Phase 0: softmax and log-sum-exp. Phase 2: attention by tiles, in plain Python.
# - Phase 4: batch, heads, masks and tile edges in a Triton kernel, and its launcher. Each helper is named again where it is used.
# - From calculus: the chain rule for functions of several variables.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from flashlab import flash_attention, runtime
from flashlab.attention import reference, simulation_backward, tiles, triton_backward
from flashlab.attention.cost import Meter
from flashlab.attention.naive import naive_attention
from flashlab.attention.options import band, visible
from flashlab.attention.simulation_backward import flash_attention_backward_sim
from flashlab.attention.triton_backward import Tiles, flash_attention_backward
from flashlab.attention.triton_backward import delta_kernel, dkdv_kernel, dq_kernel
from flashlab.attention.triton_forward import flash_attention_forward, tile_edges
from flashlab.attention.tiles import Tile
from flashlab.bench import industrial, published
from flashlab.check import CheckFailed, verify
from flashlab.check.training import wanted, worst
from flashlab.check.mistakes.gradients import MUTANTS, attention_with
from flashlab.figures import curves, masks, show
from flashlab.figures.panels import panels
from flashlab.figures.tiles import walk
from flashlab.triton_tools.compile_report import compile_reports
from flashlab.triton_tools.watch import hbm_traffic

import triton  # after flashlab, which decides whether kernels are interpreted here
import triton.language as tl

show.style()

# %% [markdown]
# ## 1 · The question, and an oracle
#
# Somewhere behind the attention there is a loss $L$, a single number. The rest of the network hands back $dO$: for each element of O, by
# how much $L$ grows if that element grows. (For any X, $dX$ stands for $\partial L / \partial X$, and it has X's shape.)
#
# Wanted are $dQ$, $dK$ and $dV$.

# %% [markdown]
# A gradient has an oracle that needs no derivation: move the input a little, in some direction, and see how the loss moves. For the loss
# $L = \sum dO \cdot O$ the gradient of O is exactly $dO$. So this cell asks whether PyTorch's autograd, in float64, gives the slope that
# is there.

# %%
def attend(q, k, v, scale):
    """One head, plain and in the inputs' precision: q [M, D], k and v [N, D]."""
    return torch.softmax(scale * q @ k.T, dim=1) @ v


def slope(loss, x, direction, step=1e-6):
    """The slope of loss(x) in a direction, from two values."""
    return (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)

# %%
generator = torch.Generator().manual_seed(5)
q, k, v, do = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (6, 9, 9, 6))
inputs = [x.clone().requires_grad_() for x in (q, k, v)]
gradients = torch.autograd.grad((do * attend(*inputs, 0.3)).sum(), inputs)
for i, name in enumerate("qkv"):
    direction = torch.randn(inputs[i].shape, generator=generator, dtype=torch.float64)

    def loss(x):
        return (do * attend(*[x if j == i else y for j, y in enumerate((q, k, v))], 0.3)).sum()

    seen, told = slope(loss, (q, k, v)[i], direction), (gradients[i] * direction).sum()
    assert torch.isclose(seen, told, rtol=1e-7, atol=1e-8)
    print(f"d{name}: the slope that was measured is the one that autograd says")

# %% [markdown]
# Autograd in float64 is right, so from here on it is our oracle. But autograd keeps the whole matrix P for that. We want to know what is
# behind it, and then do it without P.

# %% [markdown]
# ## 2 · One row by hand: the softmax's Jacobian
#
# Take one query. Its scores are $s_1 \dots s_N$, and $p_j = e^{s_j} / \sum_m e^{s_m}$. If one score $s_j$ grows, then $p_j$ grows. All the
# others shrink, because they share the same sum. The quotient rule gives both cases in one line:
#
# $$\frac{\partial p_i}{\partial s_j} = p_i\,([i = j] - p_j), \qquad J = \mathrm{diag}(p) - p\,p^\top .$$

# %% [markdown]
# A row with scores $\ln 2 \cdot (1, 0, 0)$ has $p = (\tfrac12, \tfrac14, \tfrac14)$. By hand:
#
# $$J = \begin{pmatrix} \tfrac14 & -\tfrac18 & -\tfrac18 \\ -\tfrac18 & \tfrac3{16} & -\tfrac1{16} \\ -\tfrac18 & -\tfrac1{16} & \tfrac3{16}
# \end{pmatrix}$$

# %%
LN2 = math.log(2)
s = LN2 * torch.tensor([1.0, 0, 0])
p = torch.softmax(s, dim=0)
J = torch.diag(p) - torch.outer(p, p)
assert torch.allclose(p, torch.tensor([0.5, 0.25, 0.25]))
assert torch.allclose(16 * J, torch.tensor([[4.0, -2, -2], [-2, 3, -1], [-2, -1, 3]]))
assert torch.allclose(J, torch.autograd.functional.jacobian(lambda s: torch.softmax(s, dim=0), s))
print("the Jacobian by hand, by the formula, and by autograd: the same")
print("each of its rows sums to 0:", torch.allclose(J.sum(1), torch.zeros(3), atol=1e-7))

# %% [markdown]
# Why must each row sum to 0? Add the same number to every score, and p does not move.
#
# J is an N × N matrix *per row of P*. Nobody builds it. What is needed is its product with a vector: if the loss changes by $dp_j$ per unit
# of $p_j$, then
#
# $$ds = J\,dp = p \circ dp - p\,(p \cdot dp) = p \circ (dp - \delta), \qquad \delta = p \cdot dp .$$

# %%
dp = torch.tensor([4.0, 0, 8])
delta = p @ dp  # 1/2 * 4 + 1/4 * 0 + 1/4 * 8
ds = p * (dp - delta)
assert torch.allclose(ds, J @ dp) and torch.allclose(ds, torch.tensor([0.0, -1, 1]))
print(f"delta = {delta:.0f}, ds = {[round(x, 4) for x in ds.tolist()]}, and J @ dp is the same")

# %% [markdown]
# Two vectors and one number in the place of a matrix. $\delta$ is the average of $dp$, weighted by p. A score whose $dp$ is just average
# changes nothing.

# %% [markdown]
# ## 3 · delta without the row
#
# $\delta = p \cdot dp$ is a sum over all keys. In a kernel that goes tile by tile it would have to be known before the first tile can be
# finished. But look at what $dp$ is. The output is $o = \sum_j p_j v_j$, so $dp_j = do \cdot v_j$, and
#
# $$\delta = \sum_j p_j\,(do \cdot v_j) = do \cdot \sum_j p_j v_j = do \cdot o .$$

# %% [markdown]
# The sum over N keys has become a sum over HEAD_DIM columns, of two things that are there already. This is the step that makes the
# backward pass work by tiles. The example, now with a second row:
#
# $$V = \begin{pmatrix} 4 & 0 \\ 0 & 4 \\ 8 & 8 \end{pmatrix}, \quad P = \begin{pmatrix} \tfrac12 & \tfrac14 & \tfrac14 \\ \tfrac14 &
# \tfrac14 & \tfrac12 \end{pmatrix}, \quad O = PV = \begin{pmatrix} 4 & 3 \\ 5 & 5 \end{pmatrix}, \quad
# dO = \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}$$

# %%
Q = torch.eye(2)  # so the scores are K transposed
K = LN2 * torch.tensor([[1.0, 0], [0, 0], [0, 1]])
V = torch.tensor([[4.0, 0], [0, 4], [8, 8]])
dO = torch.tensor([[1.0, 0], [0, 1]])

P = torch.softmax(Q @ K.T, dim=1)
O = P @ V
assert torch.allclose(O, torch.tensor([[4.0, 3], [5, 5]]))
long_way, short_way = (P * (dO @ V.T)).sum(1), (dO * O).sum(1)
assert torch.allclose(long_way, short_way) and torch.allclose(short_way, torch.tensor([4.0, 5]))
ways = [[round(x, 4) for x in way.tolist()] for way in (long_way, short_way)]
print(f"delta over the keys: {ways[0]}, over the columns: {ways[1]}")

# %% [markdown]
# ## 4 · All three gradients: loops first
#
# Follow the chain backwards. O is a sum of rows of V, P comes from S, and $S = \text{scale} \cdot Q K^\top$ is linear in Q and in K. For one
# pair of a query i and a key j:
#
# | | |
# |:--|:--|
# | $o_i$ has $p_{ij} v_j$ in it | $dv_j \mathrel{+}= p_{ij}\, do_i$ |
# | $dp_{ij} = do_i \cdot v_j$ | $ds_{ij} = p_{ij}\,(dp_{ij} - \delta_i)$ |
# | $s_{ij} = \text{scale} \; q_i \cdot k_j$ | $dq_i \mathrel{+}= \text{scale} \; ds_{ij}\, k_j$ |
# | | $dk_j \mathrel{+}= \text{scale} \; ds_{ij}\, q_i$ |

# %% [markdown]
# On plain Python lists, so that nothing is hidden:

# %%
def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def add(row, factor, other):
    for d in range(len(row)):
        row[d] += factor * other[d]


def backward_by_pairs(q, k, v, o, do, lse, scale):
    dq, dk, dv = ([[0.0] * len(x[0]) for _ in x] for x in (q, k, v))
    for i in range(len(q)):
        delta = dot(do[i], o[i])
        for j in range(len(k)):
            p = math.exp(scale * dot(q[i], k[j]) - lse[i])
            ds = p * (dot(do[i], v[j]) - delta)
            add(dv[j], p, do[i])
            add(dq[i], scale * ds, k[j])
            add(dk[j], scale * ds, q[i])
    return dq, dk, dv

# %% [markdown]
# One detail: `p` is computed from the score and `lse`, the log-sum-exp that the forward pass returns. More about that in section 5.
#
# The example by hand, with scale 1: row 0 of $dS$ is $(0, -1, 1)$ as before. In row 1 $dp = (0, 4, 8)$ and $\delta = 5$, so row 1 is
# $(-\tfrac54, -\tfrac14, \tfrac32)$. Q is the identity, so $dK = dS^\top$.

# %%
lse = torch.logsumexp(Q @ K.T, dim=1)
dq, dk, dv = (torch.tensor(x) for x in backward_by_pairs(*(x.tolist() for x in (Q, K, V, O, dO, lse)), 1.0))
dS = torch.tensor([[0.0, -1, 1], [-1.25, -0.25, 1.5]])
assert torch.allclose(dv, P.T, atol=1e-6)  # dO is the identity
assert torch.allclose(dk, dS.T, atol=1e-6)
assert torch.allclose(dq, LN2 * torch.tensor([[0.0, 1], [-1.25, 1.5]]), atol=1e-6)
print("dQ, dK and dV as computed by hand: True")

# %% [markdown]
# The same with matrices. Four lines, and five matrix products (the fifth is $Q K^\top$):

# %%
def backward_by_matrices(q, k, v, o, do, lse, scale):
    p = torch.exp(scale * q @ k.T - lse[:, None])
    dv = p.T @ do
    ds = p * (do @ v.T - (do * o).sum(1)[:, None])
    return scale * ds @ k, scale * ds.T @ q, dv

# %%
o, lse = attend(q, k, v, 0.3), torch.logsumexp(0.3 * q @ k.T, dim=1)
by_matrices = backward_by_matrices(q, k, v, o, do, lse, 0.3)
by_pairs = backward_by_pairs(*(x.tolist() for x in (q, k, v, o, do, lse)), 0.3)
for name, a, b, told in zip(("dq", "dk", "dv"), by_matrices, by_pairs, gradients):
    assert torch.allclose(a, torch.tensor(b, dtype=a.dtype)) and torch.allclose(a, told)
    print(f"{name}: pairs, matrices and autograd agree")

# %% [markdown]
# ## 5 · What is kept between forward and backward
#
# Autograd saves what the backward formulas of each operation ask for. Phase 1's naive attention runs four operations. Its softmax saves its
# result, P, and P is N × N. PyTorch lets us look: `saved_tensors_hooks` calls a function for everything that is saved.

# %%
def kept_bytes(fn, *inputs):
    """Bytes of all that autograd saves while fn runs; what shares memory counts once."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        fn(*inputs)
    return sum(storages.values())

# %% [markdown]
# FlashAttention keeps q, k, v, o and the log-sum-exp of each row: four matrices of $N \times D$, and N numbers in float32. `flash_attention`
# is this course's own, with the kernels of phase 4 and of this phase behind it. The prediction, in bytes per head with $e$ bytes per element:
#
# $$\text{naive: } 3NDe + N^2 e, \qquad \text{FlashAttention: } 4NDe + 4N .$$

# %%
D, e = 64, 2
for N in (64, 128, 256):
    heads = [torch.randn(1, 1, N, D, device=runtime.device()).half() for _ in range(3)]
    naive, flash = kept_bytes(naive_attention, *heads), kept_bytes(flash_attention, *heads)
    assert naive == 3 * N * D * e + N * N * e and flash == 4 * N * D * e + 4 * N
    print(f"N = {N:3d}: naive keeps {naive} bytes, FlashAttention {flash}: as predicted")

# %% [markdown]
# At these lengths P is small. But the formulas hold for any length, and a model has many heads and many layers, all of which keep their
# share until the backward pass comes to them:

# %%
rows, layers, heads = [], 32, 32
for N in (1024, 4096, 16384, 65536):
    naive, flash = 3 * N * D * e + N * N * e, 4 * N * D * e + 4 * N
    rows.append([N, naive * heads / 2**20, flash * heads / 2**20, f"{naive / flash:.0f}",
                 f"{naive * heads * layers / 2**30:.0f}", f"{flash * heads * layers / 2**30:.1f}"])
assert 60 < rows[2][1] / rows[2][2] < 70
show.table(rows, ["N", "naive, MiB a layer", "kept by FlashAttention", "ratio", "naive, GiB in 32 layers",
                  "FlashAttention"])

# %% [markdown]
# *Kept for the backward pass, 32 heads, D = 64, 16 bits per element. At N = 16384 the naive model would keep 518 GiB.*
#
# ### P comes back from one number per row
#
# The forward pass needed a running maximum and a correction, because the sum of a row was unknown until the end. In the backward pass it is
# known: $\text{lse} = \ln \sum_j e^{s_j}$. So every element of P can be computed alone, in any order:
#
# $$p_{ij} = e^{\,s_{ij} - \text{lse}_i}$$

# %%
s = 0.3 * q @ k.T
whole = torch.softmax(s, dim=1)
tile = torch.exp(0.3 * q[2:4] @ k[5:9].T - lse[2:4, None])  # two rows, four keys, nothing else
assert torch.allclose(tile, whole[2:4, 5:9], rtol=1e-12)
assert torch.allclose(torch.exp(s - lse[:, None]).sum(1), torch.ones(6, dtype=s.dtype))
print("a tile of P from q, k and lse alone is the tile of the whole P: True")

# %% [markdown]
# No maximum, no correction, no state. No overflow either: a score that is part of its row's lse is never larger than that, so the exponent is
# at most 0. A score that is *no* part of it may be: that of a key that a mask hides, or that is not there (section 9).
#
# ### Why recomputing wins
#
# Recomputing P costs a matrix product, $2N^2D$ operations per head. Reading a stored P costs $N^2 e$ bytes, and writing it in the forward
# pass as many.

# %% [markdown]
# What does the naive backward pass move? Six operations: dV from P, dP, the softmax's backward (reads P and dP), the scale, dQ, dK. Each
# reads its inputs and writes its result, which makes $9 N^2 e + 8 N D e$ bytes. `Meter` counts what really runs.

# %%
for N in (128, 256, 512):
    inputs = [torch.randn(N, D).half().requires_grad_() for _ in range(3)]
    with Meter() as meter:
        o = naive_attention(*inputs)
        forward = len(meter.ops)
        torch.autograd.grad(o, inputs, torch.ones_like(o))
    ops = [op for op in meter.ops[forward:] if "ones" not in op.name]
    moved = sum(op.bytes_read + op.bytes_written for op in ops)
    assert moved == 9 * N * N * e + 8 * N * D * e
    print(f"N = {N}: {', '.join(op.name for op in ops)}: {moved} bytes, as predicted")

# %% [markdown]
# Set the two costs side by side for an H100: a product on its tensor cores against bytes from its memory. The card's data sheet has both
# speeds (`runtime.limits`). This is arithmetic on ideal speeds, no measurement.

# %%
gpu, N = runtime.limits("H100"), 4096
recompute = 2 * N * N * D / (gpu.fp16_tflops * 1e12)
stored = 2 * N * N * e / (gpu.memory_gb_s * 1e9)  # written once, read once
assert 3 < stored / recompute < 20
print(f"{gpu.name}, N = {N}, D = {D}, one head:")
print(f"    compute P again: {1e6 * recompute:.1f} us;  write P and read it back: {1e6 * stored:.1f} us")

# %% [markdown]
# The product is the cheaper one, by far. (With P alone the naive pass is not done: it moves the size of P nine times.)

# %% [markdown]
# ## 6 · The simulation, by tiles
#
# Now the same in tiles, in plain torch, as in phase 2. First $\delta$ for all rows, once, before any tile:

# %%
# FROM flashlab.attention.simulation_backward: delta_sim (no docstrings)

# %% [markdown]
# Then a tile of P. `distance` is the causal mask, in a form that needs no matrix: row i of the tile sees its columns $j \le i +
# \mathrm{distance}$. The rows and the columns count from the tile's own corner.

# %%
# FROM flashlab.attention.simulation_backward: probabilities_sim (no docstrings)

q, k, v, do = (x.float() for x in (q, k, v, do))
s, whole, lse = s.float(), whole.float(), lse.float()
assert torch.allclose(probabilities_sim(q[2:4], k[5:9], lse[2:4], None, 0.3), whole[2:4, 5:9], atol=1e-6)
corner = probabilities_sim(q[2:4], k[5:9], lse[2:4], 0, 0.3)
print("distance 0:", [["x" if x else "." for x in row] for row in corner])
assert (corner[0, 1:] == 0).all() and (corner[1, 2:] == 0).all() and (corner[1, :2] > 0).all()

# %% [markdown]
# Which sums are there to build? $dV$ and $dK$ sum over *queries*. So a program that owns a block of keys walks down over the queries.
# $dQ$ sums over *keys*. So a program that owns a block of queries walks along the keys, as in the forward pass.

# %%
figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.9))
walk(axes[0], 4, 4, "keys", 1)
walk(axes[1], 4, 4, "queries", 2)
walk(axes[2], 4, 4, "keys", 1, causal=True)
for ax, title in zip(axes, ("dK, dV of key block 1", "dQ of query block 2", "dK, dV, causal")):
    ax.set_title(title)
plt.show()

# %% [markdown]
# *The tiles of P that one program computes, in its order. Grey: other programs' tiles. White: hidden by the causal mask, so never computed.
# Under the mask a key block begins at the first query block that sees it.*
#
# Here is the walk down a column. Compare it with `backward_by_matrices`: the same four lines, on a tile.

# %%
# FROM flashlab.attention.simulation_backward: key_block_sim (no docstrings)

o = attend(q, k, v, 0.3)
delta = delta_sim(o, do)
dk_block, dv_block = key_block_sim(k[4:8], v[4:8], 4, q, do, lse, delta, len(k), 2, 0.3, causal=False)
assert torch.allclose(dk_block, gradients[1][4:8].float(), atol=1e-5)
assert torch.allclose(dv_block, gradients[2][4:8].float(), atol=1e-5)
print("dK and dV of keys 4 to 7, two queries at a time: as autograd says")

# %% [markdown]
# Three things in it are worth a look.
#
# - `p.to(dO.dtype)` and `ds.to(Q.dtype)`: tensor cores multiply 16-bit numbers, so P and dS are rounded before their products, as in phase 2.
# - The scale is multiplied in once, at the end, not for every tile.
# - `begin` is the first query that sees this block's first key. Query i sees key j if $j \le i + N - M$.

# %% [markdown]
# And the walk along a row. `lse` and `delta` are those of the block's own rows: two numbers per row, loaded once.

# %%
# FROM flashlab.attention.simulation_backward: query_block_sim (no docstrings)

dq_block = query_block_sim(q[2:5], do[2:5], 2, k, v, lse[2:5], delta[2:5], len(q), 4, 0.3, causal=False)
assert torch.allclose(dq_block, gradients[0][2:5].float(), atol=1e-5)
print("dQ of queries 2 to 4, four keys at a time: as autograd says")

# %% [markdown]
# `flash_attention_backward_sim` puts them together for whole tensors: loops over batch and heads around the two walks. Does it hold what
# it promises, with lengths that no tile divides, causal and not? `wanted` gives the right results in float64 with a bound for every
# element; section 10 says how. `worst` is the largest error, as a multiple of its bound.

# %%
def random_inputs(batch, heads, kv_heads, M, N, D, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, M), (kv_heads, N), (kv_heads, N), (heads, M))
    drawn = [torch.randn(batch, count, rows, D, generator=generator) for count, rows in shapes]
    return [x.to(runtime.device(), dtype) for x in drawn]

# %%
for causal in (False, True):
    q, k, v, do = (x.cpu() for x in random_inputs(2, 2, 2, 50, 70, 16))
    o, lse = reference.attention(q, k, v, causal=causal)
    dq, dk, dv = flash_attention_backward_sim(do, q, k, v, o.half(), lse.float(), 16, 32, causal=causal)
    _, error = worst(wanted(q, k, v, do, causal=causal), dq=dq, dk=dk, dv=dv)
    assert error <= 1
    print(f"50 queries, 70 keys, tiles of 16 x 32, causal {causal}: within the bounds: {error <= 1}")

# %% [markdown]
# ## 7 · Why two walks, when one could do?
#
# Both walks compute the same tiles of S, P, dP and dS. One walk could do everything: while a program walks down its column it has dS, so it
# could add $dS\,K$ to the rows of dQ as well. Count the products per tile:
#
# | | S | dP | dV | dK | dQ | products | of the forward pass's 2 |
# |:--|:-:|:-:|:-:|:-:|:-:|--:|--:|
# | one walk | 1 | 1 | 1 | 1 | 1 | 5 | 2.5 × |
# | two walks | 2 | 2 | 1 | 1 | 1 | 7 | 3.5 × |

# %%
M, N, D = 128, 192, 64
q, k, v, do = (x.cpu() for x in random_inputs(1, 1, 1, M, N, D))
o, lse = reference.attention(q, k, v)
with Meter() as meter:
    flash_attention_backward_sim(do, q, k, v, o.half(), lse.float(), 32, 64)
assert meter.matmul_flops == 7 * 2 * M * N * D
print(f"counted: {meter.matmul_flops / (2 * M * N * D):.0f} products of {M} x {N} x {D}")

# %% [markdown]
# So two walks cost 7/5 of the arithmetic of one. What does the second one buy? In one walk, many programs add to the *same* rows of dQ at the same
# time. That needs atomic additions, which the hardware carries out in whatever order they arrive. And a float sum depends on its order:

# %%
generator = torch.Generator().manual_seed(1)
parts = torch.randn(8, 64, 64, generator=generator)  # what eight key blocks would add to one block of dQ


def total(order):
    dq = torch.zeros(64, 64)
    for block in order:
        dq = dq + parts[block]
    return dq


one, other = total(range(8)), total([3, 0, 6, 1, 7, 4, 2, 5])
assert torch.allclose(one, other, atol=1e-5) and not torch.equal(one, other)
print("eight blocks added in two orders: close: True, equal in every bit:", torch.equal(one, other))

# %% [markdown]
# FlashAttention-2 takes the one walk with atomics. Its author, asked why dQ differs between two runs with the same seed: "backward pass is
# not deterministic because we use atomic adds" (flash-attention, issue 414). A deterministic mode came later, and its documentation says
# that it is slightly slower and uses more memory.
#
# The price is not only the last bits. dQ is accumulated in a float32 buffer in HBM, which each key block reads and writes.

# %% [markdown]
# Two walks need no buffer and no atomics: each result is written once, by one program. Two runs agree in every bit. That is worth a lot when
# you look for the step at which a training run went wrong. Triton's tutorial *Fused Attention* is built in this way, and so are our kernels.

# %% [markdown]
# What does the second walk cost in time? If every product of a tile took equally long, a backward pass of one walk would take 2.5 times as long as
# the forward pass, and one of two walks 3.5 times. On a GPU neither holds by itself: there are exponentials, loads and, in one walk, atomics.
# So it was measured. Times of the backward pass, as multiples of the same implementation's forward pass, at lengths from 1024 on:

# %%
for run in industrial.recorded():
    rows = []
    for name, walks in ((industrial.OURS, "two"), ("FlashAttention-2", "one")):
        times = industrial.backward_of_forward(run, name)
        for causal in (False, True) if times else ():
            span = industrial.span(ratio for key, ratio in times.items() if key[2] == causal)
            rows.append([name, walks, "causal" if causal else "whole", span])
    print(run["machine"]["gpu"])
    if rows:
        show.table(rows, ["", "walks", "mask", "backward / forward"])
print("runs recorded:", len(industrial.recorded()))

# %% [markdown]
# Read a ratio with care: it is small if the backward pass is good, and also if the forward pass is slow. Section 12 has the times themselves.

# %% [markdown]
# ## 8 · Heads, masks, and a second output
#
# ### Grouped queries: the gradients add up
#
# With grouped-query attention (GQA) several query heads read one key head. If a variable is used several times, its gradient is the sum over
# the uses. So $dK$ of a key head is the sum over its query heads. The naive way is to repeat K and V for each query head, and let autograd
# sum. The kernel does not repeat anything: its program walks over the queries of *all* heads of the group, and its accumulator sums.

# %%
q, k, v, do = (x.cpu().double() for x in random_inputs(1, 6, 2, 10, 12, 8))
wide = [x.repeat_interleave(3, dim=1) for x in (k, v)]  # a copy for each query head
dk_wide = reference.attention_backward(do, q, *wide).dk  # [1, 6, 12, 8]
dk = reference.attention_backward(do, q, k, v).dk  # [1, 2, 12, 8]
assert torch.allclose(dk, dk_wide.unflatten(1, (2, 3)).sum(2))
print("dK of 2 key heads is the sum over 3 query heads each: True")

# %% [markdown]
# This has been forgotten in public: the library levanter had no such sum in its backward pass until its pull request 449 (2024).
#
# ### Causal, and rows that see nothing
#
# Under a mask P is 0, and with it dS and all that comes from it. With more queries than keys the first rows see no key at all. Their lse is
# $-\infty$, and $e^{s - (-\infty)}$ would be $\infty$. So the backward pass takes $+\infty$ there: $e^{s - \infty} = 0$.

# %%
q, k, v, do = (x.cpu() for x in random_inputs(1, 1, 1, 7, 4, 8, torch.float32))
o, lse = reference.attention(q, k, v, causal=True)
assert torch.isneginf(lse[0, 0, :3]).all() and torch.isfinite(lse[0, 0, 3:]).all()
dq, dk, dv = flash_attention_backward_sim(do, q, k, v, o.float(), lse.float(), causal=True)
assert (dq[0, 0, :3] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))
print("7 queries, 4 keys: the first 3 rows see no key, and their dQ is 0")

# %% [markdown]
# ### If lse itself is used
#
# Some losses use the log-sum-exp too: the *z-loss* punishes a large one, and a merge of two partial results (phase 0) weighs by it. Then a
# gradient $d\text{lse}$ arrives beside $dO$. The derivative of a log-sum-exp with respect to its scores is the softmax:
#
# $$\frac{\partial\, \text{lse}_i}{\partial s_{ij}} = p_{ij}, \qquad\text{so}\qquad ds_{ij} = p_{ij}\,(dp_{ij} - \delta_i + d\text{lse}_i) .$$

# %% [markdown]
# So it is enough to subtract $d\text{lse}$ from $\delta$, once per row. No kernel has to change.

# %%
dlse = torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(2))
q, k, v, do = (x.cpu() for x in random_inputs(1, 1, 1, 5, 9, 8, torch.float32))
inputs = [x.clone().requires_grad_() for x in (q, k, v)]
s = 8**-0.5 * inputs[0] @ inputs[1].transpose(2, 3)
o, lse = torch.softmax(s, dim=3) @ inputs[2], torch.logsumexp(s, dim=3)
told = torch.autograd.grad((do * o).sum() + (dlse * lse).sum(), inputs)
ours = flash_attention_backward_sim(do, q, k, v, o.detach(), lse.detach(), grad_lse=dlse)
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, told))
print("a loss of O and of lse: dQ, dK and dV as autograd says")

# %% [markdown]
# FlashAttention-2 returns an lse on request, but hands no gradient through it (flash-attention, issues 141 and 889). A loss that uses it
# trains without that term, and nothing is raised.

# %% [markdown]
# ## 9 · Three kernels
#
# The simulation's three functions become three kernels. Everything around them is phase 4's: `tile_ptrs` makes pointers from strides,
# `load_tile` and `store_tile` mask what is not there, `tile_edges` says where tiles change their kind.
#
# The first is small. One program, BLOCK_M rows: $\delta$ from O and dO, in float32.

# %%
show.region(triton_backward, "delta kernel", whole_file=False)

# %% [markdown]
# Look at the strides. O and dO each have their own four. O is our tensor, and we know how it lies in memory. dO comes from whatever the
# model does next, and it may lie in any way. The most common case is the strangest: after `o.sum().backward()` every element of dO is the
# *same* 1.0 in memory, with a stride of 0.

# %%
q, k, v, _ = random_inputs(1, 2, 2, 40, 40, 16, torch.float32)
x = q.clone().requires_grad_()
found = {}
o = flash_attention(x, k, v, backend="triton")
o.register_hook(lambda do: found.update(strides=do.stride()))
o.sum().backward()
print("strides of o:", o.stride(), " strides of dO after o.sum():", found["strides"])
assert found["strides"] == (0, 0, 0, 0)

# %% [markdown]
# flash-attention gave wrong gradients for a dO that is not contiguous (issue 355, 2023), and xformers had to learn to take one (pull request
# 282, 2022). Then the statistics, loaded by both of the large kernels. Two numbers per row:

# %%
show.region(triton_backward, "statistics", whole_file=False)

# %% [markdown]
# The factor is $\log_2 e$: the kernels compute $2^x$, as in phase 3. Rows that are not there get lse = $+\infty$, and so P = 0.

# %% [markdown]
# ### dK and dV
#
# The arguments first. There are many, since nine tensors come with their strides. New beside phase 4: `scale` itself, because the gradients
# need it as a factor.

# %%
show.region(triton_backward, "dkdv arguments", whole_file=False)

# %% [markdown]
# A program owns BLOCK_N keys of one *key* head. It loads its tiles of K and V once and keeps them. Under a causal mask the first keys are seen by most
# queries, so their programs are the longest. Phase 4's `longest_first` starts the last block first; so the blocks are counted from the end.

# %%
show.region(triton_backward, "dkdv block", whole_file=False)

# %% [markdown]
# Two accumulators in float32, and three loops around a body. Read them from the outside:
#
# - **`member`** goes over the query heads that share this key head. The accumulators outlive it, so GQA's sum costs nothing.
# - **`CUT`** has two turns, and is known when the kernel is compiled. So the body is written out twice: for tiles that are seen whole, without
#   a mask, and for tiles that the mask or the end cuts.
# - **`tile`** counts the tiles of that kind.

# %%
show.region(triton_backward, "dkdv walk", whole_file=False)

# %% [markdown]
# `tile_edges` was written for a query that asks which keys it sees. Query $i$ sees the keys $i + \mathrm{first}$ to $i + \mathrm{last}$. Here key
# $j$ asks which queries see it. Turned around: those from $j - \mathrm{last}$ to $j - \mathrm{first}$. So the two bounds change their sign and their places,
# `-last, -first`, and N makes room for M. The rest of `tile_edges` is as good for columns as for rows.
#
# It returns four positions among the queries. This kernel stores them, a row for each block of keys:

# %%
@triton.jit
def edges_kernel(
    out_ptr, M, N, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
):
    start_n = tl.program_id(0) * BLOCK_N
    stop_n = tl.minimum(start_n + BLOCK_N, N)
    edges = tile_edges(start_n, stop_n, -last, -first, M, BLOCK_M, HAS_LAST, HAS_FIRST, True)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * tl.program_id(0) + i, edges[i])


def edges_of_keys(M, N, BLOCK_M, BLOCK_N, **mask):
    first, last = band(M, N, **mask)
    edges = torch.zeros(triton.cdiv(N, BLOCK_N), 4, dtype=torch.int32, device=runtime.device())
    has = (first is not None, last is not None)
    edges_kernel[(len(edges),)](edges, M, N, first or 0, last or 0, BLOCK_M, BLOCK_N, *has)
    return edges.tolist()

# %% [markdown]
# Between `edges[1]` and `edges[2]` every query sees every key of the block: whole tiles. Cut tiles lie on both sides of them: `left` tiles
# begin at `edges[0]`, the others at `edges[2]`. One loop takes both groups. While `tile < left` it counts from `edges[0]`. After that its
# tiles have to begin at `edges[2]`, but `tile` is `left` there and not 0. So `left * BLOCK_M` is subtracted.
#
# The same two loops in Python, to see their order:

# %%
def turns(edges, BLOCK_M):
    """The inner loops of dkdv_kernel: (CUT, first query of the tile), in their order."""
    left = (edges[1] - edges[0]) // BLOCK_M
    tiles = ((edges[2] - edges[1]) // BLOCK_M, left + math.ceil((edges[3] - edges[2]) / BLOCK_M))
    for CUT in (0, 1):
        for tile in range(tiles[CUT]):
            start_m = edges[1]
            if CUT:
                start_m = edges[0] if tile < left else edges[2] - left * BLOCK_M
            yield CUT, start_m + tile * BLOCK_M


edges = edges_of_keys(44, 40, 8, 8, causal=True)[1]  # keys 8 to 15
print("edges:", edges, " left:", (edges[1] - edges[0]) // 8)
print("(CUT, start_m):", list(turns(edges, 8)))

# %% [markdown]
# Check it by hand. N − M is −4, so query $i$ sees the keys up to $i - 4$, and key 8 is first seen by query 12: there the walk begins. All eight keys are seen from
# query 19 on. Tiles begin at 12, so the first whole one begins at 20, and one tile lies before it: `left` is 1. From 20 the queries fill three tiles of 8. They end
# at 44, so nothing is left at the end. The order is 20, 28, 36, and then 12.
#
# Now all blocks of keys:

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained")
for ax, (M, N, mask) in zip(axes, ((44, 40, {"causal": True}), (43, 43, {"window": (20, 6)}))):
    blocks = [list(turns(edges, 8)) for edges in edges_of_keys(M, N, 8, 8, **mask)]
    visited = [[(start, min(start + 8, M), CUT) for CUT, start in block] for block in blocks]
    seen = visible(M, N, **mask).T  # keys down, queries across
    masks.tile_map(ax, seen, visited, 8, f"{M} queries, {N} keys, {mask}", order=True, legend=ax is axes[1])
    ax.set(xlabel="query", ylabel="key")
    for block, row in enumerate(visited):
        keys = seen[8 * block : 8 * block + 8]
        assert all(keys[:, a:b].all() for a, b, CUT in row if not CUT)  # whole tiles are whole
        assert keys.sum() == sum(keys[:, a:b].sum() for a, b, _ in row)  # each pair that is seen, once
plt.show()

# %% [markdown]
# *One row of tiles is one program's walk; the numbers are its order. Blue: seen whole. Orange: cut, and masked. Left: a causal mask cuts at the beginning. Right: a
# window cuts at both ends, and `left` says how many of the orange tiles belong to the first end.*

# %% [markdown]
# Why not one loop from left to right that looks at each tile? A mask that is decided while the kernel runs is a branch around every mask, or a mask on every
# tile. And three loops, as in the forward kernel, would be three bodies of four products each. Two are enough, because no sum here cares about the order of the tiles.
#
# (ptxas is the assembler behind Triton; C7515 is the number of its warning.)
#
# Now the tile of P, and beside it that of dP. Both are computed *transposed*, keys down and queries across:

# %%
show.region(triton_backward, "dkdv probabilities", whole_file=False)

# %% [markdown]
# Why transposed? Both products that follow need $P^\top$ and $dS^\top$ as their left operand. The plain way is `tl.dot(tl.trans(p), do)`, with
# p fresh from a product. On Hopper such a line gave *wrong gradients* in a linear-attention kernel, with Triton 3.4 to 3.7.0
# (flash-linear-attention, issue 640). If S is computed as $K Q^\top$ in the first place, nothing has to be transposed.

# %% [markdown]
# And every `tl.dot` says `input_precision`. For 16-bit inputs it changes nothing. For float32 it decides: left out, Triton multiplies in **TF32**, which keeps 10
# of 23 bits of each factor. S loses three digits, and P is its exponential. dS is a *difference*, $dp - \delta$, of numbers that may be nearly equal. `"ieee"` keeps
# all bits. (Phase 4's `"tf32x3"` keeps nearly all.) Ask for TF32 and see:

# %%
q, k, v, do = random_inputs(1, 1, 1, 64, 64, 64, torch.float32)
o, lse = flash_attention_forward(q, k, v)
for allow in (False, True):
    got = flash_attention_backward(do, q, k, v, o, lse, allow_tf32=allow)
    _, error = worst(wanted(q, k, v, do), **dict(zip(("dq", "dk", "dv"), got)))
    assert (error <= 1) != allow
    print(f"float32, TF32 allowed: {allow!s:5}  within the bounds: {error <= 1}")

# %% [markdown]
# The interpreter rounds as the tensor cores do, so you need no GPU to be caught. Then the gradients of the block:

# %%
show.region(triton_backward, "dkdv gradients", whole_file=False)

# %% [markdown]
# Why is dP computed before P is finished? The tensor cores can multiply while other units compute exponentials. `p_t`, `dp_t` and `ds_t` are the simulation's `p`, `do @ v.T` and `ds`, all transposed. The soft-cap multiplies the slope of its tanh in. At
# the end the scale, once, and two masked stores:

# %%
show.region(triton_backward, "dkdv store", whole_file=False)

# %% [markdown]
# ### dQ
#
# The third kernel is the forward kernel's walk. It has the same arguments, but DQ_ptr in the place of the two results.

# %%
show.region(triton_backward, "dq arguments", whole_file=False)

# %%
show.region(triton_backward, "dq block", whole_file=False)

# %% [markdown]
# The block is the forward kernel's: BLOCK_M queries, the longest programs first under a causal mask. What it keeps is q, do, and the two
# statistics. Then the walk along the keys:

# %%
show.region(triton_backward, "dq walk", whole_file=False)

# %% [markdown]
# ### The tail of the keys
#
# The last mask's comment says: *a key that is not there has a P too*. Zeros are loaded in its place. Its score is 0, so its P is
# $e^{-\text{lse}}$. Its dS is some number. That number is multiplied by k, which is 0. So nothing happens, and in most backward kernels this
# mask looks superfluous. Until lse is very negative:

# %%
for lse in (3.0, -50.0, -100.0):
    p = torch.exp(torch.tensor(0.0 - lse))  # the P of a key that is not there, in float32
    print(f"lse = {lse:6.1f}: P = {p:.3g}, its contribution to dQ: {p * (0.0 - 0.7) * 0.0:.1f}")
assert p.isinf() and (p * -0.7 * 0.0).isnan()

# %% [markdown]
# Below about $-88.7$ the exponential overflows, and $\infty \cdot 0$ is NaN. PyTorch's cuDNN backward had exactly this bug in 2026: dQ was NaN
# where the last key tile was half full and a row's lse below $-88.7$ (pytorch, issue 196678). dK and dV were right, because a row of dK
# that is not there is not stored.

# %%
show.region(triton_backward, "dq store", whole_file=False)

# %% [markdown]
# ### The launcher
#
# Three kernels are no gradient yet. Somebody allocates, counts programs and passes strides. Here it is, for one square tile, without windows and
# soft-caps:

# %%
def launch_backward(do, q, k, v, o, lse, *, causal, scale, BLOCK=32):
    (batch, heads, M, head_dim), (kv_heads, N) = q.shape, k.shape[1:3]
    dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
    rows = (triton.cdiv(M, BLOCK) * batch * heads,)  # a program for each block of queries
    keys = (triton.cdiv(N, BLOCK) * batch * kv_heads,)  # and for each block of keys of a key head
    BLOCK_D = max(16, triton.next_power_of_2(head_dim))
    tile = {"HEAD_DIM": head_dim, "BLOCK_D": BLOCK_D, "ALIGN": 1, "BLOCK_M": BLOCK}
    delta_kernel[rows](o, do, lse, delta, *o.stride(), *do.stride(), M, heads, **tile, HAS_DLSE=False)
    given = (q, k, v, do, lse, delta)
    strides = [step for x in (q, k, v, do) for step in x.stride()]
    numbers = (scale, scale * math.log2(math.e), 0.0, M, N, heads, heads // kv_heads, 0, N - M)
    tile |= {"BLOCK_N": BLOCK, "HAS_FIRST": False, "HAS_LAST": causal, "SOFTCAP": False, "PRECISION": "ieee"}
    dkdv_kernel[keys](*given, dk, dv, *strides, *dk.stride(), *dv.stride(), *numbers, **tile)
    dq_kernel[rows](*given, dq, *strides, *dq.stride(), *numbers, **tile)
    return dq, dk, dv

# %% [markdown]
# - **Delta comes first**: both others read it. They do not read each other's results, so their order is free.
# - **The grids differ.** dQ has a program for each block of queries of each *query* head; dK and dV have one for each block of keys of each *key* head. A grid that is used
#   for both is exercise 5.10.
# - **Nothing is set to zero** before: every element of dq, dk and dv is stored once, by one program.
#
# ### Into autograd
#
# `torch.autograd.Function` is a pair of functions: what to compute, and what to do with the gradient of the result.

# %%
class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        o, lse = flash_attention_forward(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = {"causal": causal, "scale": scale}
        return o

    @staticmethod
    def backward(ctx, do):
        return *launch_backward(do, *ctx.saved_tensors, **ctx.options), None, None


def attention(q, k, v, *, causal=False, scale=None):
    return Attention.apply(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale)

# %% [markdown]
# - `ctx` carries what backward needs. Tensors go through `save_for_backward`, not into attributes. Then autograd notices if somebody writes into one
#   in between, and frees them when the graph is done.
# - `backward` gets a gradient for each result of `forward`, and returns one for each *argument*, in their order. `causal` and `scale` have none: `None`.
# - Inside of both nothing is recorded. A second derivative would need a backward pass of the backward pass, which no kernel here has.
#
# That is all of it. The checker asks autograd for the gradients, and knows nothing of kernels:

# %%
report = verify(attention, causal=True, gqa=True, lse=False, grads=True, dtypes=(torch.float32,), max_seq=70)
print(report.verdict)

# %% [markdown]
# ## 10 · Are they right?
#
# The package's `flash_attention_backward` is the same launcher with a tile for each kernel, windows, soft-caps and a second stream. Against the simulation first,
# with the same tiles: the same loops should give the same numbers, up to $2^x$ for $e^x$ and the order within a product.

# %%
q, k, v, do = random_inputs(1, 4, 2, 60, 75, 32, torch.float32)
o, lse = flash_attention_forward(q, k, v, causal=True)
small = Tiles(dkdv=Tile(16, 32, 4, 2), dq=Tile(16, 32, 4, 2))  # BLOCK_M, BLOCK_N, num_warps, num_stages
ours = flash_attention_backward(do, q, k, v, o, lse, causal=True, tiles=small)
simulated = flash_attention_backward_sim(*(x.cpu() for x in (do, q, k, v, o, lse)), 16, 32, causal=True)
assert all(torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(ours, simulated))
print("4 query heads, 2 key heads, causal, 60 x 75: kernels and simulation agree to 1e-5")

# %% [markdown]
# How far off may a 16-bit gradient be? Phase 3's rule, carried over. Each element gets a bound from its own terms: one rounding of P, of dS
# and of the result. And the largest error may be at most three times that of an eager attention in the same dtype. (Three is what
# flash-attention's own tests allow for gradients; for the output it is two.)
#
# Lengths that fill no tile have a history of their own. FlexAttention's gradient was NaN where the length was no multiple of 128, with a mask and
# a score function together (pytorch, issue 153799). So 1, 2, 5 and 17.

# %%
for length in (1, 2, 5, 17):
    ok = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for causal in (False, True):
            q, k, v, do = random_inputs(1, 2, 2, length, length, 32, dtype)
            o, lse = flash_attention_forward(q, k, v, causal=causal)
            dq, dk, dv = flash_attention_backward(do, q, k, v, o, lse, causal=causal)
            ok.append(worst(wanted(q, k, v, do, causal=causal), o=o, dq=dq, dk=dk, dv=dv)[1] <= 1)
    assert all(ok)
    print(f"length {length:2d}: fp16, bf16 and fp32, causal and not: {sum(ok)} of {len(ok)} right")

# %% [markdown]
# Then what a neighbour in the network may hand in: a dO with strides of 0, and one that lies transposed. And tiles of the two kernels that do
# not divide each other.

# %%
q, k, v, do = random_inputs(1, 2, 2, 40, 40, 16, torch.float32)
o, lse = flash_attention_forward(q, k, v)
one = torch.ones((), device=q.device).expand(q.shape)
apart = do.transpose(2, 3).contiguous().transpose(2, 3)
for name, given in (("strides of 0", one), ("rows that are not contiguous", apart)):
    got = flash_attention_backward(given, q, k, v, o, lse)
    plain = flash_attention_backward(given.contiguous(), q, k, v, o, lse)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, plain))
    print(f"dO with {name}: as with a contiguous one")

# %%
right = wanted(q, k, v, do)
for dkdv, dq in (((64, 16), (16, 64)), ((16, 64), (64, 16)), ((32, 128), (128, 32))):
    chosen = Tiles(Tile(*dkdv, 4, 2), Tile(*dq, 4, 2))
    got = flash_attention_backward(do, q, k, v, o, lse, tiles=chosen)
    assert worst(right, **dict(zip(("dq", "dk", "dv"), got)))[1] <= 1
    print(f"dK/dV in tiles of {dkdv}, dQ in tiles of {dq}: right")

# %% [markdown]
# And section 7's promise, in every bit:

# %%
q, k, v, do = random_inputs(2, 4, 2, 40, 50, 16)
o, lse = flash_attention_forward(q, k, v)
runs = [flash_attention_backward(do, q, k, v, o, lse) for _ in range(3)]
assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
print("three runs, dQ, dK and dV equal in every bit: True")

# %% [markdown]
# ### What the checker says of wrong ones
#
# A test is worth what it rejects. The zoo of the backward pass has the simulation with one mistake each, as an author makes them.
# `verify` with `grads=True` adds cases of the gradient to those of phase 3, half of them with a dO of stride 0. It should accept the right one
# and reject every other.

# %%
def verdict(module):
    try:
        attention = attention_with(module)
        return verify(attention, grads=True, causal=True, gqa=True, lse=False, **short).verdict
    except CheckFailed as failed:
        return failed.diagnosis


short = dict(dtypes=(torch.float32,), head_dims=(16,), max_seq=70)
print("the right one:", verdict(simulation_backward))
found = {mutant.name: verdict(mutant.module()) for mutant in MUTANTS}
assert not any("within" in said for said in found.values())
assert all(mutant.found in (None, found[mutant.name]) for mutant in MUTANTS)
print(f"{len(found)} wrong ones, all rejected")
show.table([[name, f"`{said}`"] for name, said in found.items()], ["the mistake", "the checker says"])

# %% [markdown]
# A slug such as `delta-missing` names the mistake: the gradients that were found are those which that mistake gives, in every case. `wrong-dq`
# says only what is wrong, and where; the checker does not guess.
#
# ### The traps of others
#
# | trap | what happened | where | here |
# |:--|:--|:--|:--|
# | only causal was tested | the tutorial's backward pass masked always; non-causal gradients were wrong | triton 4541, 5660, pull request 5241 | section 10's table: *the causal mask is there in every case* |
# | a transposed operand in `wgmma`'s layout | wrong gradients on Hopper, Triton 3.4 to 3.7.0 | flash-linear-attention 640 | the scores are computed transposed |

# %% [markdown]
# | trap | what happened | where | here |
# |:--|:--|:--|:--|
# | TF32 by default | float32 gradients off by 0.72, the forward pass within its tolerance | triton_docs_tutorials 6 | `input_precision` is always given (section 9) |
# | blocks must divide | one kernel asserts `BLOCK_N1 % BLOCK_M1 == 0` | Triton's tutorial | any two tiles, section 10 |
# | no bounds check | NaN for lengths below a tile | tokamax 316 | lengths 1, 2, 5, 17 |
# | strides of dO | wrong gradients where dO is not contiguous | flash-attention 355, xformers 282 | strides of 0, section 10 |

# %% [markdown]
# The first trap deserves its own look. Here is a backward pass that is always causal, on two groups of cases. Its author tested the first.

# %%
always = next(m for m in MUTANTS if m.found == "causal-always").module()
for causal in (True, False):
    q, k, v, do = (x.cpu() for x in random_inputs(1, 2, 2, 50, 50, 16, torch.float32))
    o, lse = reference.attention(q, k, v, causal=causal)
    got = always.flash_attention_backward_sim(do, q, k, v, o.float(), lse.float(), causal=causal)
    name, error = worst(wanted(q, k, v, do, causal=causal), **dict(zip(("dq", "dk", "dv"), got)))
    assert (error <= 1) == causal
    print(f"causal={causal}: within the bounds: {error <= 1}")

# %% [markdown]
# ## 11 · What it asks for, and what the compiler says
#
# ### Bytes
#
# What do the three launches ask of HBM? Without a mask, for one head with M queries and N keys:
#
# | kernel | read | written |
# |:--|:--|:--|
# | delta | $2MDe$ | $4M$ |
# | dK, dV | $2NDe + \lceil N / \mathrm{BLOCK\_N} \rceil (2MDe + 8M)$ | $2NDe$ |
# | dQ | $2MDe + 8M + \lceil M / \mathrm{BLOCK\_M} \rceil \, 2NDe$ | $MDe$ |

# %%
def backward_bytes(M, N, D, e, tiles):
    """Bytes (read, written) by delta, dK/dV and dQ, for one head without a mask."""
    read = 2 * M * D * e
    read += 2 * N * D * e + math.ceil(N / tiles.dkdv.BLOCK_N) * (2 * M * D * e + 8 * M)
    read += 2 * M * D * e + 8 * M + math.ceil(M / tiles.dq.BLOCK_M) * 2 * N * D * e
    return read, 4 * M + 2 * N * D * e + M * D * e

# %%
cases = ((64, 64, (32, 32), (32, 32)), (100, 150, (32, 64), (64, 32)), (100, 150, (64, 32), (16, 64)))
for M, N, dkdv, dq in cases:
    chosen = Tiles(Tile(*dkdv, 4, 2), Tile(*dq, 4, 2))
    q, k, v, do = (x.cpu() for x in random_inputs(1, 1, 1, M, N, 64))
    o, lse = (x.to(t) for x, t in zip(reference.attention(q, k, v), (torch.float16, torch.float32)))
    traffic = hbm_traffic(triton_backward.flash_attention_backward, do, q, k, v, o, lse, tiles=chosen)
    assert (traffic.bytes_read, traffic.bytes_written) == backward_bytes(M, N, 64, 2, chosen)
    print(f"M={M}, N={N}, dK/dV {dkdv}, dQ {dq}: {traffic.bytes_read} read, {traffic.bytes_written} written:",
          "as predicted")

# %% [markdown]
# Note which side of a tile counts: what a program *keeps*. The dK/dV kernel saves with BLOCK_N, the dQ kernel with BLOCK_M. With 128 for both,
# beside the naive backward pass:

# %%
large, lengths = Tiles(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)), [512, 1024, 4096, 16384, 65536]
naive = [9 * N * N * 2 + 8 * N * 64 * 2 for N in lengths]
flash = [sum(backward_bytes(N, N, 64, 2, large)) for N in lengths]
kept = [[3 * N * 64 * 2 + N * N * 2 for N in lengths], [4 * N * 64 * 2 + 4 * N for N in lengths]]
assert 4.3 < naive[-1] / flash[-1] < 4.6

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
parts = ((left, kept, "Kept for the backward pass"), (right, (naive, flash), "Asked for by it"))
for ax, (a, b), title in parts:
    lines = [("naive", lengths, [x / 2**20 for x in a], "red", "s-")]
    lines += [("FlashAttention", lengths, [x / 2**20 for x in b], "blue", "o-")]
    curves.curves(ax, lines, log="xy", xticks=lengths[::2], title=title, xlabel="sequence length N",
                  ylabel="one head (MiB)")
plt.show()

# %% [markdown]
# *Left: what waits in memory is linear in N. Right: what is asked for is still quadratic, about 4.4 times less than the naive pass. As in phase 2,
# the caches answer much of what FlashAttention asks for. A P of 512 MiB, at N = 16384, is in no cache.*

# %% [markdown]
# ### The compiler
#
# Ask for the recorded tiles at D = 128, in bf16, for an A100 (sm_80) and an H100 or H200 (sm_90). The kernels keep more than the forward pass does: two accumulators, and two
# tiles beside. So registers are short. A *spill* is a value that had to go to slow memory because no register was free.

# %%
chips = {"sm_80": "ampere", "sm_90": "hopper"}
reports = {}
for target, chip in chips.items():
    for name, kernel in (("dkdv", triton_backward.dkdv_kernel), ("dq", triton_backward.dq_kernel)):
        choices = tiles.recorded(name, chip, torch.bfloat16, masked=True)
        choice = next(choice for choice in choices if choice.head_dim >= 128)
        arguments = triton_backward.compile_arguments(name, torch.bfloat16, 128, choice.tile, causal=True)
        (reports[target, name],) = compile_reports(kernel, [arguments], targets=[target])

# %% [markdown]
# Whatever the compiler made of them, three things should hold on each target, and one more: section 7 promised that there are no atomics.

# %%
for (target, _), report in reports.items():
    assert ("wgmma" in report.ptx) == (target == "sm_90")  # Hopper's own tensor-core instruction
    assert report.fits and report.spill_bytes <= 128 and report.tensor_core_instructions > 0
    assert not re.search(r"\b(atom|red)\.", report.ptx)  # PTX's atomic operations
print(len(reports), "kernels: each fits, spills at most 128 bytes a thread, uses the tensor cores,")
print("and has no atomic operation")

# %% [markdown]
# What each needs, in figures. (They differ a little from one compiler to the next, so the tests do not compare them.)

# %% tags=["nbval-ignore-output"]
rows = [[*key, r.registers, r.spill_bytes, r.shared_bytes // 1024] for key, r in reports.items()]
show.table(rows, ["target", "kernel", "registers per thread", "bytes spilled", "shared memory, KiB"])

# %% [markdown]
# ## 12 · How fast?
#
# The kernels were timed beside FlashAttention-2, cuDNN, FlexAttention and eager attention: forward and backward, in one run, taking turns. Each
# case has 16384 tokens and 2048 columns in all heads together, in bf16. So with a longer N there are fewer sequences, and each token has more to look at.

# %%
runs = industrial.recorded()
for run in runs:
    machine = run["machine"]
    print(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}")
    left = f"{run['left']} measurements are still to be made"
    print(left if run["left"] else "every measurement was made")
print("runs recorded:", len(runs))

# %% [markdown]
# **What is counted.** A backward pass counts as 2.5 forward passes: five products, however many are computed. So all get the same work credited, and our
# kernels get nothing for the two products that they compute twice. Under a causal mask it is half of that.
#
# **What is timed:** the kernels, not their launches from Python. CUDA graphs replay them, as in phase 3. A line shows the median of the rounds.

# %%
for run in runs:
    plots = {f"D = {d}, {mask}": industrial.over_lengths(run, "backward", d, mask == "causal")
             for mask in ("whole", "causal") for d in (64, 128, 256)}
    panels(plots, ylabel="TFLOP/s", title=f"Backward pass alone, {run['machine']['gpu']}")
    plt.show()

# %% [markdown]
# *Higher is better. Upper row: no mask; lower row: causal. "triton" are the kernels of this lecture. Eager attention was timed up to N = 4096. Where another
# line is missing, or has fewer points, it was not measured there.*
#
# One comparison more closely: how many times as fast as FlashAttention-2? A training step pays for forward and backward, so both are shown.

# %%
for run in runs:
    passes = (("backward", "Backward alone"), ("both", "Forward and backward"))
    plots = {title: industrial.ratios_over_lengths(run, "FlashAttention-2", which) for which, title in passes}
    panels(plots, columns=2, pairs=True, ylabel="times as fast", level=1,
           level_text="FlashAttention-2")
    plt.show()

# %% [markdown]
# *Above the dashed line our kernels are faster, below it FlashAttention-2 is. Full lines: no mask; broken lines: causal.*
#
# The same in numbers, beside each peer: the smallest and the largest ratio over all lengths.

# %%
for run in runs:
    rows = []
    for peer in industrial.PEERS:
        found = [industrial.ratios(run, industrial.OURS, peer, which) for which in ("backward", "both")]
        rows += [[peer, *(industrial.span(ratios.values()) for ratios in found)]] if any(found) else []
    if rows:
        show.table(rows, ["beside", "backward", "forward and backward"])
    against = industrial.ratios(run, industrial.OURS, "eager", "backward")
    assert all(ratio > 1 for (_, _, causal), ratio in against.items() if causal)
    slower = [(d, n) for (d, n, causal), ratio in sorted(against.items()) if ratio < 1 and not causal]
    print("no mask, slower than eager attention in the backward pass at (D, N) =", slower)

# %% [markdown]
# So there are shapes where the unfused backward pass wins: it multiplies large matrices that are already there, and recomputes nothing. What it pays for
# that is memory, the next subject. With a causal mask it computes the hidden scores too, and loses.
#
# Three things to have in mind when you read the ratios.
#
# - FlashAttention-2 uses `mma.sync`, the tensor-core instruction of the generation before Hopper. On Hopper, Triton emits `wgmma`, which is faster there.
# - FlashAttention-2 has one walk, so it computes five products where our kernels compute seven.
# - FlexAttention's kernels are Triton too, with two walks like ours. So the two differ in tiles and details, not in the plan.

# %% [markdown]
# ### The memory
#
# What is allocated at the worst moment of forward and backward together, beside the inputs? In theory: o, dq, dk and dv. Each has $16384 \cdot 2048$
# numbers of 2 bytes, 64 MiB. The lse and $\delta$ are small beside that. FlashAttention-2 also has the float32 buffer for dQ. As long as the number of tokens
# stays the same, none of this should depend on N:

# %%
for run in runs:
    plots = {f"D = {d}, causal": industrial.peak_over_lengths(run, d, True) for d in (64, 128, 256)}
    panels(plots, log="xy", ylabel="MiB at the worst moment", level=4 * 64)
    plt.show()
    for lines in plots.values():
        _, ours = lines.get(industrial.OURS, ([], [1.0]))
        assert max(ours) < 1.5 * min(ours)  # flat: what a token needs does not grow with N

# %% [markdown]
# *Dashed: o, dq, dk and dv. All sequences together always have 16384 tokens. So memory that is linear in N shows as a flat line, and memory that is
# quadratic rises with N.*
#
# How many tensors of 64 MiB is that?

# %%
for run in runs:
    peaks = industrial.peak_over_lengths(run, 128, True)
    print({name: round(mib[0] / 64, 1) for name, (_, mib) in peaks.items() if name != "eager"})

# %% [markdown]
# Four are the theory. The float32 buffer of FlashAttention-2 is two of its tensors. What else the others have was not looked into.
#
# ### Which tiles
#
# Each kernel was timed with each tile of a search space (`tiles.search`). The time is that of the whole backward pass: delta, and the other kernel with its own
# tile, are in it. So the last column says what the choice of one tile is worth to the whole pass.

# %%
for run in runs:
    rows = []
    for kernel in ("dkdv", "dq"):
        for (d, causal), times in industrial.tile_times(run, kernel).items():
            (best, ms), (worst_tile, slow) = times[0], times[-1]
            mask = "causal" if causal else "whole"
            rows += [[kernel, d, mask, f"{tuple(best)}", ms, f"{tuple(worst_tile)}", slow / ms]]
    if rows:
        names = ["fastest (M, N, warps, stages)", "ms", "slowest", "times as long"]
        show.table(rows, ["kernel", "D", "mask", *names])

# %% [markdown]
# ### Two kernels at once
#
# dK/dV and dQ do not need each other. Both need delta alone. So they may run at the same time: `flash_attention_backward` launches dQ's kernel on a second stream,
# and then lets the first stream wait for it. It does so where one of them alone would leave multiprocessors idle. What is that worth?

# %%
for run in industrial.having(runs, "streams"):
    display(industrial.stream_table(run))

# %% [markdown]
# ### A table that somebody published
#
# A tutorial's table compares a Triton forward pass, with a compiled PyTorch backward pass, to eager attention: one head, causal, on a GPU that it does not
# name. Its backward passes at short lengths tell something about its clock:

# %%
table = published.load("triton_vs_torch")
short = {r["seq_len"]: r["torch_bwd_ms"] for r in table if (r["d_model"], r["precision"]) == (16, "bf16")}
print("its eager backward, D = 16, bf16, in ms:", {n: short[n] for n in (128, 256, 512, 1024, 2048)})
assert short[2048] < short[128]  # 256 times the scores, in less time

# %% [markdown]
# With 256 times the scores the time is *less*. So at these lengths it is not the work that was timed. It may be the launches from Python, which take longer than
# such short kernels. Here are its rows, and the same rows timed without launches:

# %%
for run in runs:
    plots = {f"{title}, {dtype}": industrial.beside_published(run, which, 64, dtype)
             for which, title in (("backward", "Backward"), ("both", "Both")) for dtype in ("bf16", "f32")}
    panels(plots, columns=2, pairs=True, log="xy", ylabel="ms", title="One head, D = 64, causal")
    plt.show()

# %% [markdown]
# *Lower is better. The two pairs of lines ran on different GPUs. So do not compare blue with orange. Compare the two distances, each from a kernel to the
# eager attention on the same GPU. A line that ends early ran out of memory.*
#
# One short head is a hard case: few programs, and a GPU with 132 multiprocessors. These rows got their own measured tiles, with few keys or few queries in each
# program, so that there are more programs. And float32 is multiplied in three TF32 products (section 7 of phase 4). All rows
# of the table from N = 1024:

# %%
for run in industrial.having(runs, "published"):
    display(industrial.eager_table(run, least=1024))

# %% [markdown]
# Below 1.00 eager attention is faster. Where that is so, it is float32 at short lengths. There each of our few programs does one product behind the other; that it waits for
# each would explain it, and is a hypothesis.

# %% [markdown]
# ## 13 · Through the door
#
# A model does not call kernels. It calls `flash_attention(q, k, v)`, and autograd calls the rest. Section 9's `Function` would do for that. But
# `torch.compile` cannot look into it. So behind the door each backend is an *operator* of
# PyTorch: a function that is registered with its gradient, and with a *fake* implementation, which says what shapes come out without
# computing anything. That is all that `torch.compile` needs to take it into its graph. The backend is named here, because on a CPU the door takes a
# quicker one than interpreted kernels.

# %%
q, k, v, do = (x.requires_grad_() for x in random_inputs(1, 4, 2, 40, 40, 16, torch.float32))
o = flash_attention(q, k, v, causal=True, backend="triton")
ours = torch.autograd.grad(o, (q, k, v), do)
theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
for name, a, b in zip(("dq", "dk", "dv"), ours, torch.autograd.grad(theirs, (q, k, v), do)):
    assert torch.allclose(a, b, atol=1e-5)
    print(f"{name}: as PyTorch's own attention gives")

# %% [markdown]
# `fullgraph=True` raises if anything would break the graph. The backend `aot_eager` traces forward and backward, as the default one does, and
# then runs the graph without generating code.

# %%
def block(q, k, v):
    return flash_attention(2 * q, k, v, causal=True, backend="triton").relu()


compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
for a, b in zip(*(torch.autograd.grad(fn(q, k, v).sum(), (q, k, v)) for fn in (compiled, block))):
    assert torch.allclose(a, b, atol=1e-6)
print("torch.compile takes it as one graph; gradients with and without: the same")

# %% [markdown]
# ### A model that learns with it
#
# The last test is the one that counts. The task is *recall*: 8 pairs of a key and a value, then 5 keys; which value went with each? One
# layer of attention can do this, if its gradients are right. Two query heads share a key head, and the 13 positions fill no tile.

# %%
KEYS = VALUES = 8


def recall(batch, generator, asked=5):
    """Pairs (key, value), the keys in random order, then keys to ask for. Returns keys, values, answers."""
    keys = torch.stack([torch.randperm(KEYS, generator=generator) for _ in range(batch)])
    values = torch.randint(VALUES, (batch, KEYS), generator=generator)
    place = torch.randint(KEYS, (batch, asked), generator=generator)
    unknown = torch.full((batch, asked), VALUES)  # the values that are asked for are not told
    keys, answers = torch.cat([keys, keys.gather(1, place)], 1), values.gather(1, place)
    return keys, torch.cat([values, unknown], 1), answers

# %% [markdown]
# The model. Its q, k and v are slices of one tensor, so none of them is contiguous; nothing is copied for that.

# %%
class Recaller(torch.nn.Module):
    """One layer of grouped-query attention between two embeddings and a linear map."""

    def __init__(self, backend, width=32):
        super().__init__()
        self.backend = backend
        self.key, self.value = torch.nn.Embedding(KEYS, width), torch.nn.Embedding(VALUES + 1, width)
        self.qkv, self.out = torch.nn.Linear(width, 4 * 16), torch.nn.Linear(2 * 16, VALUES)

    def forward(self, keys, values):
        x = self.key(keys) + self.value(values)  # [batch, 13, width]
        heads = self.qkv(x).unflatten(2, (4, 16)).transpose(1, 2)  # [batch, 4, 13, 16], not contiguous
        q, k, v = heads.split((2, 1, 1), dim=1)
        o = flash_attention(q, k, v, causal=True, backend=self.backend)
        return self.out(o.transpose(1, 2).flatten(2)[:, KEYS:])  # where keys are asked for

# %%
def train(backend, steps=40):
    torch.manual_seed(0)
    model = Recaller(backend).to(runtime.device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        keys, values, answers = (x.to(runtime.device()) for x in recall(4, generator))
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

# %% [markdown]
# Trained twice from the same start: once with the Triton kernels, once with the reference, which computes in float64. Guessing costs $\ln 8
# \approx 2.08$.

# %%
runs = {backend: train(backend) for backend in ("triton", "reference")}
apart = max(abs(a - b) for a, b in zip(*runs.values()))
assert apart < 1e-3 and runs["triton"][-1] < 0.25 * math.log(8)
print("40 steps: the two losses never differ by more than 0.001:", apart < 1e-3)
print("the last loss is below a quarter of what guessing costs:", runs["triton"][-1] < 0.25 * math.log(8))

# %%
figure, ax = plt.subplots(figsize=(7, 3))
lines = [("Triton kernels", range(40), runs["triton"], "blue", "-"),
         ("reference, float64", range(40), runs["reference"], "orange", "--")]
curves.curves(ax, lines, title="One layer of attention learns to recall", xlabel="step", ylabel="loss")
curves.level(ax, math.log(8), "guessing")
plt.show()

# %% [markdown]
# *Loss over 40 steps of Adam, 4 sequences each. Both curves lie on each other.*

# %% [markdown]
# ## Summary, and what is left to explore
#
# - $ds = p \circ (dp - \delta)$, and $\delta = do \cdot o$: one number per row stands for the softmax's Jacobian.
# - Kept are q, k, v, o and lse. P comes back from lse, in any order and without a state.
# - dK and dV walk over the queries, dQ over the keys. Two walks cost 7 products for 5. They need no atomics, and every bit is repeated.
# - Key heads sum over their query heads; a gradient of lse goes into $\delta$.
# - Test what others forgot: non-causal, strides of 0, lengths below a tile, tails with a very negative lse.

# %% [markdown]
# Left to explore: one walk with atomics, measured beside two (are 2/5 more arithmetic dearer than the traffic of dQ?). Computing $\delta$
# inside the dQ kernel. A dQ kernel that keeps dS for the other one.
#
# **What you can now do:** derive a gradient and check it without trusting the derivation; write its kernels, their launcher and the `autograd.Function`; say what
# is kept between forward and backward, and where float32 is not float32.
#
# Next, phase 6 leaves Triton and writes the forward pass in CUDA C++, one thread at a time. It needs phase 2's state and its correction, and phase 3's loop.

# %% [markdown]
# ## References
#
# - Tri Dao, Daniel Fu, Stefano Ermon, Atri Rudra, Christopher Ré, *FlashAttention*, NeurIPS 2022,
#   [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): Algorithm 4 and appendix B.2, the backward pass and its $\delta$ (there $D_i$).
# - Tri Dao, *FlashAttention-2*, 2023, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691): section 3.1, only the log-sum-exp is kept; section
#   3.2, a key block each, and dQ by atomics.
# - Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016,
#   [arXiv:1604.06174](https://arxiv.org/abs/1604.06174): recomputing instead of storing.
# - Triton documentation, tutorial *Fused Attention*: two walks without atomics.
# - PyTorch documentation: `torch.library.custom_op`, `torch.autograd.graph.saved_tensors_hooks`.
# - flash-attention, issues 141, 355, 414 and 889; triton, issues 4541 and 5660, pull request 5241; pytorch, issues 153799 and 196678;
#   flash-linear-attention, issue 640 (versions: unsloth, issue 5276); triton_docs_tutorials (evintunador), issue 6; tokamax, issue 316; xformers, pull request 282; levanter,
#   pull request 449.
