# %% [markdown]
# # Phase 11c · Optional: tuned on an H200
#
# [Lecture 11](11_hopper.ipynb) ends with a kernel in which every idea of Hopper is at work. This notebook is the workshop behind it: what else was
# tried until the kernel passed cuDNN and FlashAttention-4 on one H200, what each try gained, what it cost, and what limits the kernel now. Nothing
# later needs it.

# %% [markdown]
# ## What you will be able to do
#
# - Say what an idea is worth at its place in a ladder, and what in the final kernel.
# - Name the price of a shortcut before you measure its gain: range, digits, whose bits depend on whom.
# - Read a table of times with its spreads, its power and its clock.

# %% [markdown]
# ## What you need first
#
# Lecture 11: producer, consumers, turns, parts, and step 14, trust. Its steps keep their numbers here. Counts and bits come from the emulator, on any
# machine. Times come from a recorded run and name their machine.

# %%
import math
import re

import matplotlib.pyplot as plt
import torch

from flashlab.attention import reference
from flashlab.bench import hopper_results
from flashlab.bench.clocked import clocked
from flashlab.bench.hopper_jobs import PLANTED
from flashlab.check import verify
from flashlab.cuda import load_inline, missing
from flashlab.cuda.hopper_backward import hopper_backward
from flashlab.figures import hopper as draw
from flashlab.figures import show
from flashlab.figures.ladder import prepare
from flashlab.figures.panels import panels
from flashlab.kernels import path, step, steps, whole

show.style()
torch.manual_seed(0)
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and not missing("nvcc")
BACKEND = "nvcc" if GPU else "emulator"
RUNS = hopper_results.recorded()

# %% [markdown]
# ## 1 · Where the ladder stands
#
# The steps from 10 on, counted as in lecture 11: one head, $N = 384$, $D = 64$, no mask, one SM. Exponentials and maxima, which most of these steps are
# about, are not counted. What each gained in time, section 9 has.

# %%
NAMES = [s.name for s in steps(11)[9:]]
prepare(NAMES)
show.table([draw.row(name) for name in NAMES], draw.COLUMNS)

# %% [markdown]
# ## 2 · Step 11: fewer multiplications
#
# It is phase 9's: O is rescaled only when a maximum has grown by more than 8, in units of $\log 2$. So P stays up to $2^8$.
# FlashAttention-4 has the idea too, in its kernels for Blackwell; its forward pass for Hopper rescales always.

# %%
show.diff(whole("p11_10_epilogue"), step("p11_11_rescale"), "row maxima", "rescale")

# %% [markdown]
# ## 3 · Step 12: fewer exponentials
#
# Another idea of FlashAttention-4. An SM computes 16 exponentials per clock. At $D = 64$ that takes as long as both products
# together. Multiply-adds are eight times as fast. So some of the exponentials could be computed by a polynomial:
# $2^x = 2^n \cdot 2^f$, where $n$ is the nearest integer and $|f| \le 1/2$. It is switched off (`POLYNOMIAL=0`): section 9 has what it costs.

# %%
scores, exponentials = 64 * 128, 64 * 128 / 16  # of a tile: how many, and their clocks
products = {d: (d // 16 * 128 + 128 // 16 * d) / 2 for d in (64, 128)}
print(f"clocks per tile of 64 rows and 128 keys: exponentials {exponentials:.0f}, products {products}")
assert products == {64: exponentials, 128: 2 * exponentials}

# %%
show.diff(step("p11_11_rescale"), step("p11_12_polynomial"), "exponential")

# %% [markdown]
# How good is the polynomial? The same steps in torch, against float64:

# %%
x = torch.linspace(-20, 0, 200001)
n = torch.round(x)
f = x - n
value = torch.zeros_like(f)
for c in (0.0550089516, 0.242211014, 0.693282902, 1.0):
    value = value * f + c
error = (value * 2**n / torch.exp2(x.double()) - 1).abs().max().item()
print(f"largest relative error {error:.1e}; fp16 rounds by up to {2**-11:.1e}, bf16 by {2**-8:.1e}")
assert error < 2**-11

# %% [markdown]
# For P, which is rounded to 16 bits, that is good enough. For the sums and so for `lse`, which stay in float, it is not, as
# you will see. With `POLYNOMIAL=4` every fourth MMA tile of P is computed so. Arguments are negative or small here; from step 14 on they may be any
# number, and the exponent has to end at infinity: else it runs over, and no sum tells.

# %% [markdown]
# ## 4 · Step 13: the next part begins before this one has ended
#
# Where sequences are short, a part is a few tiles, and its beginning and its end count. Until now the next part's Q had to wait for the only
# place, and everybody computed for himself where the part lies.

# %% [markdown]
# - Q has two places. The next part's Q comes while this one's is still read.
# - The producer alone works out where a part lies, which takes divisions, and hands all of it on. For them it keeps 40 registers, so two
#   consumers get 232 each.
# - It asks for a part's first K before its Q.

# %% [markdown]
# - A consumer *passes by* the causal tiles that none of its own 64 rows sees. It takes its turn all the same, and passes it on: turns go round,
#   and the consumer after it, whose rows may see the tile, waits for them. It still has to say that it needs the tile no more,
#   and it must not say so before it is there. While another consumer still reads the tile before, `empty` is still in that tile's
#   phase, and an arrival would count for it.

# %%
show.diff(step("p11_12_polynomial"), step("p11_13_parts"), "producer", "main loop")

# %% [markdown]
# What would happen without those waits? Take them out of `pass_by`, one at a time, and ask the watched build. One block, so that it
# takes several parts:

# %%
def without(wait):
    """What the watched build says of step 13 with this wait taken out of `pass_by`."""
    before, rest = step("p11_13_parts").path.read_text().split("auto pass_by", 1)
    body, after = rest.split("};", 1)
    body = "\n".join(line for line in body.split("\n") if wait not in line)
    checked = load_inline(f"{before}auto pass_by{body}}};{after}", check=True)
    checked.forward(*torch.randn(3, 1, 1, 640, 64).half(), causal=True, sms=1, echo=False)
    return [f.message for f in checked.report.findings]

WITHOUT = {wait: without(wait) for wait in ("mbarrier_wait(full_v", "mbarrier_wait(full_k")}
for wait, found in WITHOUT.items():
    print(f"without {wait} ...: {' '.join(found) or 'nothing found'}\n")
assert WITHOUT["mbarrier_wait(full_v"] and not WITHOUT["mbarrier_wait(full_k"]

# %% [markdown]
# Without V's wait a stage is refilled under a product. Without K's nothing happens, as long as V's is there: the producer asks for a tile's
# K before its V. So once V is there, K's `empty` is in the right phase too. The kernel has both, as every other consumer of a stage.

# %% [markdown]
# ## 5 · Step 14: what trust costs
#
# Lecture 11 says what trust is: a full tile is computed under the maximum of the tiles before, and where a lane's sum says that this was too
# low, the warp computes the tile again. What the lecture left out: step 11's threshold is 0 now (`RESCALE_ABOVE`), so where maxima are looked at,
# the reference becomes exact. And trust has a price even where it is right: K's stage is given back only after the exponentials, since S may have
# to be computed again, and each warp gives it back for itself.

# %% [markdown]
# **What does a reference cost that lags behind?** First, *range*: O before its division may overflow where the result does not. Without doubt
# a lane's sum is at most $2^{14}$ per tile, and a row has four lanes. So a tile adds up to $2^{16} \max |V|$, and float32 ends at $2^{128}$:
# right as long as $\max |V| < 2^{112}$ / tiles. Step 11's lag costs nearly as much: 128 keys of $2^8$ each. Always
# rescaled, 128 keys are $2^7$.

# %% [markdown]
# To see it, column $c$ of V holds $2^{64 + c}$: O should be the same. One head for each lag: the 128 keys met last have scores by 0, 7.9 and 8.9
# bits higher than those met first.

# %%
KINDS = {"always rescaled": ("p11_10_epilogue", {}), "a lag of 8": ("p11_flash", {"TRUST": 0}),
         "trust": ("p11_flash", {"TRUST": 1})}

def o_of(who, q, k, v):
    name, defines = KINDS[who]
    kernel = load_inline(step(name), backend="emulator", dtype=torch.bfloat16, defines=defines)
    return kernel.forward(q.bfloat16(), k.bfloat16(), v.bfloat16(), echo=False)[0]

q, k = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 256, 64)
q[..., 0] = 8
k[0, :, :128, 0] = torch.tensor([[0.0], [7.9], [8.9]]) * math.log(2)  # met last: a block begins at its last
v = (2.0 ** torch.arange(64, 128)).expand(1, 3, 256, 64)
END = {who: [63 + int(n) for n in (o_of(who, q, k, v)[0, :, 0] == v[0, :, 0]).sum(1)] for who in KINDS}
show.table([[who, *(f"2^{n}" for n in ends)] for who, ends in END.items()],
           ["the largest V that is right", "no lag", "7.9 bits", "8.9 bits"])
assert END == {"always rescaled": [119, 120, 120], "a lag of 8": [119, 113, 120], "trust": [119, 113, 112]}

# %% [markdown]
# All of fp16 is far below, and so is every model we know of. But bf16 has numbers up to $2^{128}$, and for the largest of them this kernel gives
# infinity where the formula does not. It says so in `choose_backend`, which chooses it.
#
# Second, *accuracy*. Where one key dominates a row, its weight is exactly 1 only under the true maximum. Under another reference it is some $2^x$,
# rounded to bf16, and the sum that divides it is not. Here such a key comes last, 5 to 13 bits above the reference:

# %%
q, k = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 256, 64)
q[0, 0, :, 0], k[0, 0, 0, 0] = torch.linspace(5, 13, 64), 8 * math.log(2)  # 16 rows of each warp
q[..., 1], k[0, 0, 1:255, 1] = 16, -16  # the other keys count for nothing, but for the first one met
v = torch.randn(1, 1, 256, 64, generator=torch.Generator().manual_seed(0))
exact = [x.bfloat16().double() for x in (q, k, v)]
want = torch.softmax(exact[0] @ exact[1].mT / 8, -1) @ exact[2]
WRONG = {who: (o_of(who, q, k, v) - want).abs()[0, 0].unflatten(0, (4, 16)).amax((1, 2)) for who in KINDS}
show.table([[who, *(f"{x:.4f}" for x in wrong.tolist())] for who, wrong in WRONG.items()],
           ["largest error of O", "5 to 7 bits", "7 to 9", "9 to 11", "11 to 13"])
always, lag, trust = (wrong.max() for wrong in WRONG.values())
assert all(1.5 * always < x <= 2.1 * always for x in (lag, trust))
assert (WRONG["a lag of 8"][2:] == WRONG["always rescaled"][2:]).all()

# %% [markdown]
# O itself is rounded to bf16, by everybody; the weight's rounding errs by as much again. So where one key dominates, the largest error
# doubles. (In the last column O is nearly V itself, which needs no rounding.) Step 11 has it within 8 bits, trust within 14, and once a part has had a doubt within 78 (section 7).

# %% [markdown]
# Third, *rows are no longer alone*. A warp votes, and its 16 rows move together. One wild row (times 50, the sixth) changes what?

# %%
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 1, n, 64, generator=g) for n in (64, 1024, 1024))
wild = q.clone()
wild[0, 0, 5] *= 50
OTHER = {who: (o_of(who, q, k, v) != o_of(who, wild, k, v))[0, 0].any(1).nonzero().flatten().tolist()
         for who in KINDS}
for who, rows in OTHER.items():
    print(f"{who}: other bits in the rows {rows}")
assert OTHER["always rescaled"] == [5]
assert all(len(OTHER[who]) > 1 and max(OTHER[who]) < 16 for who in ("a lag of 8", "trust"))

# %% [markdown]
# Its neighbours are within the same bounds, with other last digits. So "the same bits" in this lecture means from run to run, with the same inputs. It does
# not mean that a row has the same bits whatever stands in the other 15: another token there may change them. Other heads and other sequences
# cannot. Phase 9's kernels vote too, from `p9_3_rescale` on.

# %% [markdown]
# What does misplaced trust cost on the GPU, and what do scores cost that are not random? In language
# models the first key often has a far higher score than the others (an *attention sink*, Xiao and others 2023); a block meets it last: here 30 higher, 43 bits. Where
# tiles *rise*, scores lie 12 above those of the tile before.

# %% [markdown]
# `p11_15_portions` computes each doubted tile again, as this step does; *doubted* says how many of the trusted tiles those are. The last kernel, `p11`, learns
# from its doubts: that is step 16. `TRUST=0` looks at every maximum. TFLOP/s, $N = 4096$:

# %%
OTHERS = {at: rows for run in RUNS for at, rows in hopper_results.input_rows(run).items()}
for run in RUNS:
    found = hopper_results.input_table(run)
    show.table(found.rows, found.columns, align=found.align)

def over(rows, peer):
    """How many times as fast the kernel is as a peer."""
    return rows[peer]["ms"] / rows["p11"]["ms"]

for kind in dict.fromkeys(at[0] for at in OTHERS):
    some = [rows for at, rows in OTHERS.items() if at[0] == kind]
    peers = "cuDNN", "FlashAttention-4", "p11_flash TRUST=0", "p11_15_portions"
    said = [f"{min(r):.2f} to {max(r):.2f} times {who}" for who in peers
            if (r := [over(rows, who) for rows in some if who in rows])]
    print(f"{kind}: {', '.join(said)}")
for (kind, *_), rows in OTHERS.items():
    forgets = rows["p11_15_portions"]["ms"] / rows["cuDNN"]["ms"]  # of cuDNN's time
    assert kind != "random" or over(rows, "cuDNN") > 1 < over(rows, "p11_flash TRUST=0") and forgets < 1
    assert not kind.startswith("every tile") or 1 / 0.585 < forgets < 1 / 0.425
LOOKS = {at: rows["p11_flash TRUST=0"]["ms"] for at, rows in OTHERS.items()}
assert all(LOOKS[at] / LOOKS[("random", *at[1:])] < 1.075 for at in LOOKS if at[0].startswith("every tile"))

# %% [markdown]
# So trust pays on random scores, and with a sink. It costs most where *every* tile raises every row's maximum, be it by a ramp or by one key at a tile's start or end. There
# `p11_15_portions` computes all of them twice, at 0.43 to 0.58 of cuDNN's speed. `TRUST=0`, which looks at each maximum, loses at most 7 % of its own speed on random scores.

# %% [markdown]
# Those scores are made up. What are a language model's like? Two models have read 4096 tokens of this course: *SmolLM2-135M*, which a Python package ships
# (`tools/capture_scores.py`), and phase 10's, with heads of 128 columns, trained for 400 steps (`flashlab.bench.hopper_inputs`). The rule of doubt was
# applied to each layer's Q and K in PyTorch; tests compare that count with the emulator's.

# %%
def wrong(rows, ours="p11"):
    """How many times the best peer's largest error of O ours is."""
    return rows[ours]["error"] / min(row["error"] for who, row in rows.items() if not who.startswith("p11"))

for run in RUNS:
    layers = hopper_results.input_rows(run, "captured")
    for model in dict.fromkeys(at[0].rpartition(", ")[0] for at in layers):
        some = {at[0].rpartition(" ")[2]: rows for at, rows in layers.items() if at[0].startswith(model)}
        shares = {layer: hopper_results.doubted(rows["p11"]) for layer, rows in some.items()}
        most = sorted(shares, key=lambda layer: -shares[layer])[:3]
        print(f"{model}: doubted in", ", ".join(f"layer {n} {shares[n]:.2%}" for n in most),
              f"of those trusted; below 0.1 % in {sum(x < 0.001 for x in shares.values())} of {len(shares)}")
        assert max(shares.values()) < 0.1
        for layer, rows in some.items():
            if best := hopper_results.best_of(rows):
                low, high = hopper_results.spread(rows["p11"], rows[best])
                said = [f"{over(rows, n):.2f} times {n}" for n in ("p11_flash TRUST=0", "p11_15_portions")]
                print(f"  layer {layer}: {over(rows, best):.2f} ({low:.2f} to {high:.2f}) times {best}, "
                      f"{', '.join(said)}; error {wrong(rows):.2f} times the best peer's")
                assert 0.965 < over(rows, "p11_15_portions") < 1.04 and wrong(rows) < 1.7

# %% [markdown]
# In these two models trust is right nearly always, in every layer. That is what was looked at: one short text and two small models. A model whose scores grow along the
# walk, from the last key to the first, would pay: in speed until step 16, and since in last bits.

# %% [markdown]
# The error of a dominating key can be had back. `p11_side_rounded` divides O by the sum of the weights *as they were rounded*: what rounding takes from such a weight it takes from the
# sum. For `lse` the exact sum is kept as well. Each weight is unpacked and added once more; what does that cost?

# %%
ROUNDED = {at: rows for at, rows in OTHERS.items() if "p11_side_rounded" in rows}
for at, rows in ROUNDED.items():
    if at[0] == "three times as wide":
        print(f"{at}: error {wrong(rows):.2f} times the best peer's,",
              f"{wrong(rows, 'p11_side_rounded'):.2f} with rounded sums")
costs = sorted(rows["p11"]["ms"] / rows["p11_side_rounded"]["ms"] for rows in ROUNDED.values())
print(f"over all scores: {costs[0]:.2f} to {costs[-1]:.2f} times as fast")
assert costs[-1] < 0.96

# %% [markdown]
# A sixth of the speed at $D = 128$ and a fifth at $D = 64$, for the last bit of rows that one key dominates: that is no bargain, so it stays an exhibit.

# %% [markdown]
# And the accuracy, beside the peers? The largest error of O against float64 over two heads of these inputs, in brackets rms:

# %%
for run in RUNS:
    found = hopper_results.error_table(run)
    show.table(found.rows, found.columns, align=found.align)
for (kind, d, causal), rows in OTHERS.items():
    if kind == "three times as wide":
        print(f"D {d}{', causal' * causal}: {wrong(rows):.2f} times the best peer's largest")
    assert wrong(rows) < 1.9 and hopper_results.right(rows["p11"])

# %% [markdown]
# Where scores are wide, one key often dominates: the largest error is up to 1.9 times the best peer's, and 1.5 times in a layer above. It is still within the checker's rule. On the wide scores `TRUST=0`, which rescales only beyond 8 bits, has nearly as much.

# %% [markdown]
# ## 6 · Step 15: a tile's exponentials in three portions
#
# Now little stands before the exponentials. What stands behind them? P has to be rounded to 16 bits, into the registers of the P
# before. Those are free when the product with V has been computed. So a consumer computed all its exponentials, waited for O, and
# rounded: 32 instructions per lane with nothing beside them.

# %% [markdown]
# But O of the tile before should be there before the last exponential. So the exponentials come in three portions, a half, a quarter and a
# quarter (at $D = 64$ an eighth, five eighths and a quarter). After the second, the consumer waits for O. Then P of the first two is rounded
# *while* the third is computed: a scheduler's unit takes 4 lanes per clock, so a warp's exponential keeps it for 8 clocks, and an
# instruction that rounds fits in between.

# %% [markdown]
# How does one keep a compiler from mixing the portions? It may move arithmetic past a barrier, and `ptxas` did. It did not move it past a vote
# of the warp and the branch on it. Here that is a question worth asking anyway: is the sum of the first portion in doubt? Between the second and
# the third nothing is needed: there the two kinds of work *should* mix.
#
# At $D = 64$ the turn is passed on only after the first portion (`LATE_TURN`), against the rule of step 7. Three consumers then start less
# close to each other. With two consumers it loses: section 9.

# %%
show.diff(step("p11_14_trust"), step("p11_15_portions"), "constants", "probabilities", "trust", "rescale O")

# %% [markdown]
# How were those places found? By Nsight Compute's samples per instruction: 11 of 100 samples were at the rounding, 46 at the
# exponentials; and by trying some twenty places to cut. `notes/phase_11_experiments.md` has those that lost.

# %% [markdown]
# ## 7 · Step 16: trust that learns
#
# Where every tile raises the maxima, each is computed twice. But what is wrong with P under too low a reference? It is too large, by one factor for the whole row, and
# float32 holds it. So S is not needed. From the largest P of a row follows the new reference; P, its sums and O are multiplied by the same factor.
# That must not become 0, below $2^{-126}$. So where P is above $2^{56}$, in fp16 $2^{120}$, the product is computed again.

# %% [markdown]
# And scores that rise in one tile often rise in the next. A reference far *above* the maximum would stand for many tiles. What speaks against it is the range of P: fp16 ends at
# $2^{-24}$. But bf16 has float32's exponents, and a weight near $2^{-64}$ has as many bits as one near 1. So a doubt puts the references of all 16 rows
# `ROOM` = 64 bits above their maxima. The next comes when tiles have risen by 78 more: 64 of room, and 14 until a sum is in doubt.

# %%
show.diff(step("p11_15_portions"), step("p11_16_learns"), "constants", "lower", "trust")

# %% [markdown]
# At the last tile, where a sink lies, a warp that has had a doubt sets its references anew: then a key that dominates there has a weight that is a power of two, and exact. One
# that dominates in a tile between two doubts is rounded, as in section 5. With each part the doubt is forgotten: otherwise the bits of a row would
# depend on which parts its block had before.
#
# Counted for 64 rows, which trust 31 tiles: in how many is a doubt, and how many are computed again?

# %%
def counted(name, rise, dtype=torch.bfloat16):
    """(doubts, tiles computed again): each of 32 tiles' last key is so much above that of the one before."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=g).to(dtype) for n in (64, 4096, 4096))
    keys = torch.arange(4096)
    q[..., 0], k[..., 0] = 8, rise * (32 - keys // 128) * (keys % 128 == 127)
    module = load_inline(step(name), backend="emulator", dtype=dtype)
    module.forward(q, k, v, echo=False)
    found = module.report.counters
    # a maximum is 4 shuffles by each of four warps, a tile 64 mma.sync
    return found["shuffles"] // 4 // 4, found.get("mma", 0) // 64 // 4

def doubts_and_again(name, rise, dtype=torch.bfloat16):
    (some, again), (others, _) = counted(name, rise, dtype), counted(name, 0, dtype)
    return some - others, again

BF16, FP16 = torch.bfloat16, torch.float16
WAYS = ("p11_15_portions", BF16), ("p11_16_learns", BF16), ("p11_16_learns", FP16)
AGAIN = {rise: [doubts_and_again(name, rise, dtype) for name, dtype in WAYS] for rise in (12, 60, 100)}
show.table([[f"{rise}, {rise / math.log(2):.0f} bits", *(f"{n}, {m}" for n, m in found)]
            for rise, found in AGAIN.items()],
           ["each tile rises by", *(f"{name}, {str(dtype)[6:]}" for name, dtype in WAYS)])
assert AGAIN == {12: [(31, 31), (7, 0), (31, 0)], 60: [(31, 31), (31, 1), (31, 0)], 100: [(31, 31)] * 3}

# %% [markdown]
# Rises of 17 bits use up the room in five tiles: seven doubts for 31.
#
# What does room cost? Small numbers of V are multiplied by P of $2^{-64}$, and float32 ends: below $2^{-126}$ it loses bits, at $2^{-149}$ the last one. Again O should be V. Its
# columns hold 255 · $2^{-48}$ to 255 · $2^{-111}$, so all eight bits of a bf16 count; scores rise by 17 bits from tile to tile:

# %%
q, k = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 512, 64)
q[..., 0], k[0, 0, :, 0] = 8, 12 * (4 - torch.arange(512) // 128)
v = (255 * 2.0 ** -torch.arange(48, 112)).expand(1, 1, 512, 64)
for name, _ in WAYS[:2]:
    kernel = load_inline(step(name), backend="emulator", dtype=torch.bfloat16)
    o = kernel.forward(q.bfloat16(), k.bfloat16(), v.bfloat16(), echo=False)[0]
    print(f"{name}: right down to 255 · 2^-{47 + int((o[0, 0, 0] == v[0, 0, 0]).sum())}")

# %% [markdown]
# No model that we know of has such values. And on a GPU? The rising scores of section 5, beside the best peer of each:

# %%
RISING = [rows for at, rows in OTHERS.items() if at[0].startswith("every tile")]
OF_BEST = {}
for who in ("p11_15_portions", "p11_flash TRUST=0", "p11"):
    best = [min(row["ms"] for name, row in rows.items() if not name.startswith("p11")) for rows in RISING]
    OF_BEST[who] = sorted(ms / rows[who]["ms"] for ms, rows in zip(best, RISING, strict=True))
    print(f"{who}: {OF_BEST[who][0]:.2f} to {OF_BEST[who][-1]:.2f} times the speed of the best peer")
assert OF_BEST["p11"][0] > max(0.95, OF_BEST["p11_flash TRUST=0"][0]) and OF_BEST["p11_15_portions"][-1] < 0.6

# %% [markdown]
# An earlier step 16 looked, after a doubt, at the maxima of the tiles that follow, each before its S was overwritten. That took registers from every tile, and reached 0.72 to
# 0.99 of the best peer's speed. What else was tried is in `notes/phase_11_experiments.md`.

# %% [markdown]
# ## 8 · The last step: every shape
#
# `p11_flash` is the same kernel with tiles for every shape, which should change little at the ladder's four. Where parts would be too few to fill
# the GPU, blocks have one consumer. With $D = 256$ a tile of keys is 64 rows, and there is no trust: it gained nothing there.

# %% [markdown]
# From $D = 160$ on there is no room for all of O beside Q, K and V. At first O took the place of Q. But then the next part's Q could not come before
# O had left. Now O leaves by slabs (`store_output`, in a header since step 11): five of 32 columns through three places at $D = 160$, three and
# four of 64 through two at 192 and 256. So Q's place is free after the part's last scores, and each warp says so. On one H200 that was 6 % faster at
# $D = 256$, $N = 1024$, and 11 % at $D = 192$, $N = 512$ (`notes/phase_11_experiments.md`, *Between two parts*).

# %% [markdown]
# Heads of 80, 96, 112, 160 or 192 columns are not padded in memory. A tile in shared memory has whole slabs: TMA fills the rest with zeros,
# which no product reads, since wgmma takes any multiple of 16. But zeros take room. At $D = 80$, 96 and 160 slabs of 32 columns have fewer of them than
# slabs of 64: there is room for a third consumer, or for 128 keys at a time instead of 96. How much longer does it take with slabs of 64? ($N = 4096$)

# %%
for run in RUNS:
    found = []
    for (shape, causal), rows in hopper_results.ladder_speeds(run, "sizes").items():
        case, own = f"D = {shape[3]}{', causal' if causal else ''}", rows["p11"]["ms"]
        slabs = [name for name in rows if "SLAB=64" in name]
        found += [(case, name.partition(" ")[2], f"{rows[name]['ms'] / own:.2f}") for name in slabs]
    show.table(found, ["", "instead", "times as long"])

# %% [markdown]
# With a mask, parts have different lengths, and the longest one must not begin last: all others would wait for it. So the last group of heads
# gets two parts for every block, or three or four where rows are many. Then short parts come last. Without a mask all parts of a head are equal, but for the
# last: with three consumers $N = 1024$ is $5\tfrac13$ parts of 192 rows, and of the last one two consumers have none. They pass their turns by, so that part is
# shorter. Where parts are many, blocks ask the counter then too. (`notes/phase_11_experiments.md` has what each gained.)

# %%
show.diff(whole("p11_16_learns"), whole("p11_flash"), "constants", "store", "launch")
show.region(path("store_output.cuh"), "store output")

# %% [markdown]
# What becomes of that, for 132 SMs? Few parts and many, and the shared memory that a block asks for. It may have 227 KB:

# %%
emulated = load_inline(step("p11_flash"), backend="emulator")

def launched(heads, rows, head_dim):
    emulated.forward(*torch.randn(3, 1, heads, rows, head_dim).half(), sms=132, echo=False)
    block = emulated.report.launches[0]
    consumers, kb = block.block[0] // 128 - 1, block.shared_bytes / 1024
    return [f"D = {head_dim}, {heads} heads of {rows} rows", block.grid[0], consumers, f"{kb:.1f} KB"]

LAUNCHED = [launched(40, 128, 128), launched(70, 128, 128), launched(70, 192, 64), launched(70, 128, 256)]
show.table(LAUNCHED, ["", "blocks", "consumers each", "shared memory"])
tile = {d: 128 * d * 2 / 1024 for d in (128, 256)}  # KB of 128 rows
assert LAUNCHED[1][3] == f"{7 * tile[128] + 0.2:.1f} KB"
assert LAUNCHED[3][3] == f"{3.5 * tile[256] + 0.1:.1f} KB"
assert 4 * tile[256] > 227

# %% [markdown]
# 40 parts of 128 rows would leave 92 SMs idle; with one consumer they are 80. At $D = 128$ two places for Q, two stages of K and of V, and O
# are seven tiles of 32 KB; the rest are barriers. At $D = 256$ one Q and four stages of 64 rows take three times 64 KB. All of O would be
# a fourth, so two of its four slabs have a place.

# %% [markdown]
# Does it compute attention? The checker's cases of up to 300 rows, at $D = 64$: causal and not, grouped heads, ragged and
# empty lengths, strides, large scores, rows that see no key. On a Hopper GPU it runs natively, elsewhere in the emulator.
# (The record has all cases, head sizes and types, on the H200.)

# %%
final = load_inline(step("p11_flash"), backend=BACKEND)
print(verify(final.forward, causal=True, gqa=True, empty=True, max_seq=300).verdict)

# %% [markdown]
# ### Besides its tiles
#
# A part of $N = 512$ has four tiles. From the times of $N = 512$ and 4096 follows what does not grow with N: some 2 µs a part in step 16, a quarter to a third
# of its time. Where do they go? Every multiprocessor has a clock. `clocked` puts stamps into a kernel's text: a consumer's first thread writes down
# `clock64()` and where it is. Below, what the first consumer passes in a part, in cycles (medians, no mask). Each span has in it what is waited for there, and
# the stamp itself, some 40 cycles.

# %%
STAMPED = {}
for run in RUNS:
    found = [r for r in run["rows"] if r["part"] == "stamps" and not r["causal"]]
    STAMPED = {(r["shape"][3], r["name"]): r["cycles"] for r in found}
    spans = list(found[0]["cycles"])
    cells = [[span, *(f"{cycles[span]:.0f}" for cycles in STAMPED.values())] for span in spans]
    show.table(cells, ["cycles, N = 512", *(f"D = {d}, {name}" for d, name in STAMPED)], align="lrrrr")

# %% [markdown]
# "A tile", "its scores are there" and "a tile's end" are passed by every tile. Look behind the last one: step 16 needs 1000 cycles between O and its store. There
# stand two divisions and two logarithms, in one chain, each with a branch for numbers that are subnormal, infinite or NaN; then `lse` is stored. O's store may
# have to wait for that too: a proxy fence is `MEMBAR.ALL.CTA` in machine code, behind which all earlier stores have to be visible. That the stamps cannot show: each is
# a store, too.

# %%
for d in (64, 128):
    before, after, span = STAMPED[d, "p11_16_learns"], STAMPED[d, "p11_flash"], "O is there > O's store"
    assert before[span] > 900 and after[span] < 250 and after["a part"] < before["a part"]
    print(f"D = {d}: {before[span]:.0f} cycles, then {after[span]:.0f}; a part {before['a part']:.0f}, "
          f"then {after['a part']:.0f}")

# %% [markdown]
# So the last step has approximate reciprocals and logarithms, one instruction each (`last_sums`, `store_lse`), and stores `lse` behind O. And masks got cheaper. Without
# a mask the first tile is full unless N ends in it: that is asked once per tile now, not per score (`is_full`). Where a mask is needed, a lane has two of
# every 8 columns of a row, at most 32 numbers: one bit for each (`hide`). An instruction, `R2P`, makes predicates of seven bits at once, where a comparison makes one.

# %%
show.region(path("edges.cuh"), "hide", "last sums of a row", "store lse")
show.source(clocked)

# %% [markdown]
# All of it together made the kernel 1.05 to 1.08 times as fast at $N = 512$, $D = 64$ and 128, 1.04 to 1.05 at 1024, 1.01 to 1.02 at 4096, and no faster at 16 384:
# old and new in turns on one H200, without stamps (`notes/phase_11_experiments.md`, *By the clock*). O's last bit may differ, `lse` by $10^{-6}$. A fourth compiled copy of the tile,
# for a first one without a mask, was as fast at $D = 64$, but 1.5 % slower at $D = 80$: its loop had 20 instructions more.

# %% [markdown]
# ## 9 · What gained, and what did not
#
# The whole ladder, in brackets over the step before. (The same kernel at the same shape was up to 6 % faster in section 10, where it took
# turns with others. So compare within one table.)

# %%
for found in map(hopper_results.ladder_table, RUNS):
    align = "l" + "r" * len(found.columns[2:])
    show.table([[r[0], *r[2:]] for r in found.rows], ["TFLOP/s", *found.columns[2:]], align=align)

# %%
for run in RUNS:
    gains = hopper_results.gains(run)
    for text, wanted in (("gain more than 5 % somewhere", lambda g: max(g) > 1.05),
                         ("lose more than 2 % somewhere", lambda g: min(g) < 0.98),
                         ("stay within 1.5 % everywhere", lambda g: max(abs(x - 1) for x in g) < 0.015)):
        print(f"{text}: {', '.join(name for name, g in gains.items() if wanted(g))}")

# %% [markdown]
# - **The second product by wgmma** (step 3), with V as it lies, is worth more, at every shape, than any other step at any. (P was in registers
#   already, since phase 7.)
# - **Several consumers and the overlap** (5, 6) bring the next part at $D = 128$ without a mask; elsewhere the overlap loses.
# - **Ping-pong** (7) pays where the overlap lost: with a causal mask and at $D = 64$.
# - **The store by TMA** (10) pays most where rows are few.
# - **Trust** (14) brings 6 to 12 %, most at $D = 128$ and $N = 4096$; **portions** (15) 3 to 6 %, most at $D = 64$; step 16 costs up to 2 %. The first two shorten
#   a warp's chain.

# %%
for run in RUNS:
    gains = hopper_results.gains(run)
    others = [gain for name, g in gains.items() if name != "p11_3_operands" for gain in g]
    trust, portions = gains["p11_14_trust"], gains["p11_15_portions"]
    assert min(trust) > 1.05 and 1.02 < min(portions) and max(portions) == portions[2]  # D = 64
    assert min(gains["p11_3_operands"]) > max(others)
    overlap, turns, store = (gains[n] for n in ("p11_6_overlap", "p11_7_ping_pong", "p11_10_epilogue"))
    assert min(gains["p11_5_consumers"][0], overlap[0]) > 1.05 > 1 > max(overlap[1:])
    assert turns[0] < 1.03 < min(turns[1:]) and max(store) == store[3]
print("all five are in the record")

# %% [markdown]
# As in phase 9, a ladder says what an idea was worth *at its place*. So ask the final kernel too: change one macro, leave
# the rest. In brackets over `p11_flash` as it is; a "!" is a result that the checker's rule refuses.

# %%
for run in RUNS:
    found = hopper_results.variant_table(run)
    show.table(found.rows, found.columns, align=found.align)

# %%
def changed(run):
    """How many times as fast the kernel is with one macro changed, at each shape, by the change."""
    ratios = {}
    for rows in hopper_results.ladder_speeds(run, "variants").values():
        for name in (n for n in rows if "=" in n):
            ratios.setdefault(name.split()[1], []).append(rows["p11_flash"]["ms"] / rows[name]["ms"])
    return ratios

for run in RUNS:
    for name, r in changed(run).items():
        print(f"{name:13} {min(r):.2f} to {max(r):.2f} times as fast as the kernel as it is")

# %% [markdown]
# - `TRUST=0`: each tile's maxima are looked at, and there are no portions. 8 to 15 % slower at $D = 128$, 10 to 11 % at $D = 64$. At $D = 256$
#   that is how the kernel is, and `TRUST=1` gains nothing.
# - `LATE_TURN`: the turn after the first portion costs up to 10 % with two consumers. With three, at $D = 64$, it is worth 1 %.

# %% [markdown]
# - `PING_PONG=0`: taking turns is worth 1 to 2 % at $D = 64$ (`LATE_TURN` included), and nothing elsewhere any more.
# - `DYNAMIC=0`: without the counter three of the four causal shapes lose, the long one most: it has the most unequal parts. Without a
#   mask it is used up to $D = 96$, and by `DYNAMIC=2` always. Where that changes nothing in the kernel, what differs is noise: up to 2 %.

# %% [markdown]
# - `POLYNOMIAL=4`: slower at every shape, and at the causal ones its `lse` is refused by the rule. An exponential is one instruction, the
#   polynomial about nine, and a warp issues them one after the other. FlashAttention-4 reports a gain on Blackwell, whose tensor cores are
#   twice as fast beside the same unit for exponentials.

# %%
for run in RUNS:
    ratios = changed(run)
    head_dims = [shape[3] for shape, _ in hopper_results.ladder_speeds(run, "variants")]
    assert all((r < 0.995) == (d == 64) for r, d in zip(ratios["PING_PONG=0"], head_dims, strict=True))
    assert max(ratios["TRUST=0"]) < 0.97 and all(abs(r - 1) < 0.01 for r in ratios["TRUST=1"])
    assert all(0.98 < r < 1 for r in ratios["LATE_TURN=0"]) and min(ratios["LATE_TURN=1"]) < 0.95
    assert min(ratios["DYNAMIC=0"]) < 0.85 and max(ratios["POLYNOMIAL=4"]) < 1.01
    assert min(ratios["POLYNOMIAL=4"]) < 0.95
    some = [r for r in run["rows"] if r["part"] == "variants" and "POLYNOMIAL" in r["name"]]
    print(f"POLYNOMIAL=4: o at most {max(r['of_bound'] for r in some):.1f} of its bound, "
          f"lse up to {max(r['lse_of_bound'] for r in some):.1f} times its own")

# %% [markdown]
# ## 10 · Beside the others
#
# Now the kernel, as it was on the day of the record, beside its peers: cuDNN, FlashAttention-2 as PyTorch has it, FlashAttention-4, the course's
# own `p9_flash` and Triton kernel (*descriptors*: with tensor descriptors). All take turns in one run, as CUDA graphs, on random numbers, and
# every result is compared with float64. Heads × D is 2048, and batch × N 16384 (one batch from there on). FlashAttention-3 is
# not among them: wheels of it exist for this stack, but the record has not measured them. Its paper has up to 740 TFLOP/s, in fp16 on an H100.

# %%
WHO = "p11", "cuDNN", "FlashAttention-2", "FlashAttention-4", "p9_flash", "triton"
for run in RUNS:
    drawn = hopper_results.lines(run, WHO)
    panels(drawn, ylabel="TFLOP/s", title=f"forward, bf16, {run['machine']['gpu']}")
    plt.show()
    print("not measured yet:", [name for name in WHO if not any(name in who for who in drawn.values())])

# %% [markdown]
# *TFLOP/s over the length; upper row without a mask, lower row causal. `p11` is this notebook's kernel.* It is far above
# FlashAttention-2 and `p9_flash`, which feed the tensor cores by `mma.sync`, and ahead of cuDNN and FlashAttention-4 at nearly all shapes.
# So look at ratios: how many times as fast as each peer, and as the best peer of each shape, as geometric means. An empty column is not measured. In
# brackets: at how many shapes, where a peer was not measured at all.

# %%
for run in RUNS:
    means = hopper_results.mean_table(run)
    rows = [r for r in means.rows if r[0] == "all" or r[0] == "standard" and r[1] in ("bf16", "all")]
    show.table(rows, means.columns, align=means.align)

# %% [markdown]
# And how sure is that? Each time is the median of nine rounds. Where its slowest round is faster than the best peer's fastest, it is ahead *beyond both spreads*.
# All kinds of shapes: grouped heads, other layouts, odd lengths, fp16 too. In brackets the span of the ratio:

# %%
for run in RUNS:
    n, ahead, beyond, behind = hopper_results.against_best(run)
    print(f"ahead by the medians at {ahead} of {n} shapes, beyond both spreads at {beyond}; "
          f"behind beyond both at {behind}")
    found = [s for s in hopper_results.standings(run) if s.ratio is not None]
    for text, some in (("from 2048 on", [s for s in found if s.job["shape"][2] >= 2000]),
                       ("below", [s for s in found if s.job["shape"][2] < 2000])):
        worst = min(some, key=lambda s: s.ratio)
        print(f"N {text}: ahead at {sum(s.ratio > 1 for s in some)} of {len(some)}; "
              f"worst {worst.said} at {worst.label}, beside {worst.best}")

# %% [markdown]
# Goals are set before a run. *is* has the worst ratio of all shapes, but for the mean. "best" includes
# FlashAttention-4. *The same bits*: in 200 runs on the same inputs. *The rule*: the checker's bound for each number's rounding. The last column says whether
# a goal is met, by medians. Its last three rows are of this kernel too.

# %%
for run in RUNS:
    goals = hopper_results.goal_table(run)
    show.table(goals.rows, goals.columns, align=goals.align)

# %% [markdown]
# The shapes at which it is furthest behind:

# %%
for run in RUNS:
    found = sorted((s for s in hopper_results.standings(run) if s.ratio is not None), key=lambda s: s.ratio)
    for s in found[:6]:
        print(f"{s.said}: {s.label} ({s.job['kind']}), beside {s.best}")
    behind = [s for s in found if s.span[1] < 1]
    print(f"behind beyond both spreads at {len(behind)}")
    assert found[0].ratio > 0.97 and not behind

# %% [markdown]
# None is behind beyond both spreads. Five of these six are of one kind: $D = 256$, causal and long, beside FlashAttention-4. There the mask costs our kernel no
# cycles, but clock (a run of its own, $N = 16384$; notes, *By the clock*). A tile takes 2087 cycles with a mask, 2070 without. But alone for a second, at its power
# limit, the chip runs at 1.29 to 1.32 GHz with it and at 1.45 without; at $D = 128$ at 1.36 to 1.40 and 1.47. Why, we do not know.

# %% [markdown]
# At $D = 256$ 1.5 GB are read from memory with the mask, and 0.3 without it; but an order of keys and heads that reads 0.9 is no faster.

# %% [markdown]
# ### The backward pass
#
# `flashlab.cuda.hopper_backward` is this phase's way back, by the same means. Of its three kernels `statistics` computes $\delta$ of each row, and `convert`
# rounds the sums of $dQ$. Between them `keys` does nearly all of the work. One of its blocks keeps 128 keys, 64 for each of two consumers, and walks over the
# queries that see them, a tile at a time. The scores are computed transposed, $S^\top = K Q^\top$ and $dP^\top = V\,dO^\top$: so $P^\top$ and
# $dS^\top$ lie in registers just as $dV$ and $dK$ want their A operand.

# %% [markdown]
# That is two products of five, in `begin_step`, which makes $P$ of $S$ meanwhile. Here are the other three, in one row. $dQ = dS\,K$ sums over the keys of both consumers, so $dS$ goes to
# shared memory too, transposed (`place_transposed`). `nth` counts tiles; at $D = 64$ a tile is taken in two steps, from query `first` on. `numbers` is lse and then $\delta$ (beyond $D = 96$ that is in `of_g`), `hide` is the mask; `multiply_dq` issues $dQ$, and `hand_dq_on` brings it to shared memory.

# %% [markdown]
# $dS$ and $dQ$ have two places each, by turns: tiles 3 and 5 share one. `multiply_dq` (you will write it, in exercise 11c.3) begins with a barrier of both consumers. Who passes it in tile 4 knows that the other one has waited for its $dQ$ of tile 3: so $dS$ of tile 5 may come where that was.

# %%
show.region(path("p11_backward"), "dV and dK")

# %% [markdown]
# Every block of keys has a part of each query's $dQ$. Atomic additions would take them as they come, and the last bits would differ from run to run:
# a float sum depends on its order. So each tile has a *turn*, a number in global memory that says how many blocks of keys have added; `statistics` sets it to 0. Block $j$ of a head waits until it is
# $j$, and then the copy engine does the adding, by `tma_reduce_add`. All smaller $j$ come to a tile before it, since a query that sees a key sees those before it.

# %% [markdown]
# Why does nobody wait for ever? The grid is persistent: who is through with its part takes the next, and parts are dealt out so that $j$ of a head comes before $j + 1$. So a part waits only for parts that were taken before it. The first of all that are not done waits for nobody: it goes on, and so, one after the other, do all.

# %% [markdown]
# In which order a block takes its tiles, exercise 11c.2 asks. Two threads add, each every other tile, from a place of its own: `dq_full` says that
# $dQ$ lies there, `dq_empty` that it may be overwritten. Two waits, as in lecture 11: `bulk_wait_read` ends when the place has been read, `bulk_wait` when the sum is in
# memory. Only then the turn is passed on. `fence_proxy_async_global` is lecture 11's proxy fence, for global memory: what was added before comes before this
# copy. `part.block` is $j$. Block 0 stores, so sums need no zeros; and a query that sees no key has none: `convert` writes 0 there.

# %%
show.region(path("p11_backward"), "sum dQ")

# %% [markdown]
# Does order matter? With 600 keys five blocks add to each query. Here are their parts of $dQ$ by formula, added from the first to the last and from the last to the first:

# %%
q, k, v, grad_o = (torch.randn(1, 1, 600, 64).half() for _ in range(4))
o, lse = reference.attention(q, k, v)
p = torch.exp(q.float() @ k.float().mT / 8 - lse[..., None].float())
ds = p * (grad_o.float() @ v.float().mT - (grad_o * o).sum(-1, keepdim=True).float())
parts = [of_block @ keys.float() / 8 for of_block, keys in zip(ds.split(128, -1), k.split(128, -2))]
forwards, backwards = sum(parts), sum(parts[::-1])
assert 0.2 < (forwards != backwards).float().mean() < 0.9 and torch.allclose(forwards, backwards, atol=1e-5)
print(f"{len(parts)} parts; as close as can be, and yet a good part of the sums end in other bits")

# %% [markdown]
# The kernel, with four blocks at a time and with one. *The same bits*:

# %%
given = grad_o, q, k, v, o.half(), lse.float()
four, one = (hopper_backward(*given, backend="emulator", threads=n) for n in (4, 1))
right = reference.attention_backward(grad_o, q, k, v)
for name, a, b, x in zip(("dq", "dk", "dv"), four, one, right, strict=True):
    assert torch.equal(a, b)
    print(f"{name}: the same bits; off by at most {(a - x).abs().max() / x.abs().max():.1e} of the largest")

# %% [markdown]
# What does order cost, and what do five products save beside seven? `ORDERED=0` adds in any order, `SKEWED=0` lets both consumers begin a step at the same time. `PRODUCTS=7` is the design before: no block adds to what
# another writes, as a second kernel keeps 128 queries, and computes $S$ and $dP$ again.

# %%
for run in RUNS:
    found = hopper_results.ladder_speeds(run, "backward")
    others = ["cuDNN", "FlashAttention-2", "FlashAttention-4"]
    for who in ("p11 SKEWED=0", "p11 ORDERED=0", "p11 PRODUCTS=7", *others):
        r = [rows[who]["ms"] / rows["p11"]["ms"] for rows in found.values() if "ms" in rows.get(who, {})]
        if r:
            print(f"{who:16} takes {min(r):.2f} to {max(r):.2f} times as long")

# %% [markdown]
# So the same bits each time cost nothing, as measured: adding in any order takes as long, or longer. (Its sums have to begin as zeros; whether that is why, was not isolated.) cuDNN is behind at every shape. FlashAttention-4, here without its option for the same bits, is behind at most of them, and ahead by up to 4 % at some.
#
# TFLOP/s, by 2.5 times the forward pass. "≠": in 20 runs bits differed, which was asked of `p11`'s variants alone. *best* is the best of the others; `flash_attention` is `p11` through the door, `KEY_STEP` says how many keys `queries` takes at a time; not every variant was timed everywhere:

# %%
for backward in map(hopper_results.backward_table, RUNS):
    if backward.rows:
        show.table(backward.rows, backward.columns, align=backward.align)
    print(backward.caption)

# %% [markdown]
# What was tried, with figures, is in `notes/phase_11_experiments.md`. Shared memory is the narrowest: up to $D = 96$ the fragments of $K$ and $V$ stay in registers and are not read again for
# every tile. And the barrier in `multiply_dq` brings both consumers to one place in every tile. From there both would do the same at the same time: first
# products, then exponentials, while the tensor cores have nothing to do. So the second one waits in each step, in `begin_step`, until the first has its $P$; above, `GO_ON` is the first one's arrival.
# Schedules that hide more (the next scores behind $dK$) gained nothing.

# %% [markdown]
# But a fifth of the time at $N = 1024$ was spent before and behind the loop. So the grid is persistent, and the next keys are loaded while $dK$ and $dV$ of
# these leave, from where $dS$ was (beyond $D = 64$ there is room for $dK$ alone; $dV$ leaves from where V was). `empty_k` and `empty_v` tell the producer when.

# %% [markdown]
# ### Rows of more than 128 columns
#
# At $D = 256$ nothing of this fits. A consumer's $dK$ and $dV$, of 64 keys, would be 256 registers for each of its threads, which have 240. So a block keeps 64 keys, and each consumer has one gradient of them:
# the first $dV$, the second $dK$. A square of $dQ$ would be 64 KB; K, V and two stages of Q and $dO$ leave 32. So $dQ$ is `queries`' work: seven products, as with `PRODUCTS=7`.

# %% [markdown]
# What does each need? $dV = P^\top dO$ needs $P$, and $dK = dS^\top Q$ needs $dS = P \circ (dP - \delta)$: $P$ too. Both could compute $S$. But the first can hand $P$ over: its thread 5 holds the keys and queries that the second's thread 5 has in $dP$. So each computes one product of scores and one gradient.
#
# And $K$ and $V$? Each consumer needs one of them, always as A: 64 registers of fragments, read once. With 128 of its gradient, 16 of scores and 8 of these rounded that is 216. Beside $P$ shared memory is then for stages: three.

# %% [markdown]
# Is that worth it? The tensor cores take 2048 multiply-adds per clock; shared memory hands out 128 bytes. A product of 64 rows and $N$ columns reads B, 32 $N$ bytes for each 16 of the inner dimension, and A, 2 KB, if that is not in registers:

# %%
def product(rows, n, inner, a_in_registers):
    "KB that a product reads from shared memory, and its clocks on the tensor cores."
    times = rows // 64 * inner // 16
    return times * (32 * n + 2048 * (not a_in_registers)) / 1024, rows * n * inner / 2048

D, copies = 256, 64  # a tile of Q and one of dO, 64 rows each, come in once: KB
by_design = {
    "both compute S, A in shared memory": 3 * [product(64, 64, D, False)],
    "P goes over, A in shared memory": 2 * [product(64, 64, D, False)] + [(32, 0)],
    "P goes over, K and V in registers": 2 * 2 * [product(64, 32, D, True)] + [(32, 0)],
}
gradients = 2 * [product(64, D, 64, True)]
for name, scores in by_design.items():
    read, clocks = (sum(x) for x in zip(*scores, *gradients, strict=True))
    read += copies
    print(f"{name:35} {read:4.0f} KB, {read * 1024 / 128:5.0f} clocks; tensor cores {clocks:5.0f}")

# %% [markdown]
# (Of these queries $P$ in float32 is 16 KB, written once and read once. Scores are taken 32 queries at a time: more registers are not left.) Handing $P$ over takes a fifth of the work from the tensor cores. With fragments in registers shared memory is no longer the slower of the two.
#
# $P$ has two places of 32 queries, and two barriers for each, `full_p` and `empty_p`: the first consumer may be a step or two ahead.

# %% [markdown]
# Both consumers run this code; `HAS_V` is true in the first. `kept` is its fragments of $K$ or $V$, `acc` its $dV$ or $dK$. `OF_SCORES` and `OF_SUM` say where in a stage its two B operands lie, Q or $dO$. `of_lane` is lse, or $\delta$, of a query for each lane: who needs another's gets it by a shuffle. `steps` counts steps, `place` and `turn` are $P$'s place and its barrier's parity. Each product is waited for: what overlaps is the other consumer.

# %%
show.region(path("wide_keys.cuh"), "scores of wide keys", "P goes over", "dV or dK")

# %% [markdown]
# A part has a stage for $K$ and $V$ too: the ring of stages brings them like any tile. At its end one more is given out empty (the producer's arrival expects 0 bytes), for $dV$ and $dK$ to leave from:

# %%
show.region(path("wide_keys.cuh"), "main loop of wide keys", "store dV or dK")

# %% [markdown]
# Look at the proxy fence behind `ldmatrix`. In its place there was nothing at first, and all tests passed: the emulator was silent, results on the GPU were right. Then twenty runs of each shape were compared, bit by bit. Without a mask, at $N = 4096$, five of them differed: in one row of $dK$, or in one row of $dV$ and the same row of $dK$. What is wrong in both? $P$, so a row of $K$. In $dK$ alone? A row of $V$.

# %% [markdown]
# `ldmatrix` only *asks*. The registers are waited for where they are first used, and an arrival uses none. So the stage was given back while the last loads were still under way, and now and then the next tile was faster. In other kernels the values are used, by a product or an exponential, before the stage is freed: that is a wait as well. With the fence 300 of 300 runs agree. (This is read off the machine code and the runs; in the documents we have not found it.)

# %% [markdown]
# The lesson is *compare bits over many runs, at full size*. And since then the emulator takes an `ldmatrix` for read only when its registers are used. Without the fence (line numbers are of the text with the header in it):

# %%
header = '#include "p11_hopper/wide_keys.cuh"'
text = path("p11_backward").read_text().replace(header, path("wide_keys.cuh").read_text())
fence = "            fence_proxy_async();    "
assert text.count(fence) == 1
defines = {"HEAD_DIM": 160, "ELEMENT": "__half"}
without = load_inline(text.replace(fence, ""), backend="emulator", check=True, defines=defines)
q, k, v, grad_o = (torch.randn(1, 1, 300, 160).half() for _ in range(4))
o, lse = reference.attention(q, k, v)
hopper_backward(grad_o, q, k, v, o.half(), lse.float(), module=without)
print(without.report.findings[0].message)

# %% [markdown]
# And how fast is it, where rows have more than 128 columns?

# %%
for run in RUNS:
    found = hopper_results.ladder_speeds(run, "backward")
    for (shape, causal), rows in found.items():
        everyone = ("p11", "cuDNN", "FlashAttention-4", "triton")
        speed = {who: rows[who]["tflops"] for who in everyone if who in rows}
        if shape[3] > 128 and "FlashAttention-4" in speed:
            at = f"D {shape[3]}, N {shape[2]:5}, {'causal' if causal else 'whole '}"
            print(f"{at}  TFLOP/s:", ", ".join(f"{who} {x:.0f}" for who, x in speed.items()))

# %% [markdown]
# ## 11 · What limits it now
#
# Nsight Compute says how long the tensor pipe is active, for each step and for cuDNN: $D = 128$, $N = 4096$, no mask.

# %%
PIPE = "tensor pipe, % of the time"

def profile(run):
    """The launches that were profiled, the fastest first."""
    rows = [r for r in run["rows"] if r["part"] == "profile" and "kernel" in r]
    return sorted(rows, key=lambda r: r["nanoseconds"])

for run in RUNS:
    rows = profile(run)[::-1]
    hues = [show.COLORS["green" if r["name"] == "cuDNN" else "blue"] for r in rows]
    fig, ax = plt.subplots(figsize=(8.6, 3.6))
    ax.barh([r["name"] for r in rows], [r[PIPE] for r in rows], color=hues)
    ax.set(xlim=(0, 100), xlabel=PIPE, title=f"the slowest kernel at the bottom: {run['machine']['gpu']}")
    plt.show()

# %% [markdown]
# *Green is cuDNN.* The faster a kernel, the busier the tensor pipe, with one large exception: step 1. It still has `mma.sync`, which
# keeps the pipe busy longer for the same FLOPs (lecture 11, section 1).

# %%
for run in RUNS:
    rows = {r["name"]: r for r in profile(run)}
    first, third, last = (rows[name] for name in ("p11_1_tma", "p11_3_operands", "p11_flash"))
    assert first[PIPE] > 0.9 * third[PIPE] and first["nanoseconds"] > 1.4 * third["nanoseconds"]
    stalls = {n.removeprefix("stalled: "): x for n, x in last.items() if n.startswith("stalled: ") and x}
    most = sorted(stalls, key=lambda n: -stalls[n])[:4]
    print(f"p11_flash: tensor pipe {last[PIPE]:.0f} % of the time")
    print("warps per issued instruction:", ", ".join(f"{n} {stalls[n]:.2f}" for n in most))
    assert last[PIPE] > 90 and most[0] == "wait"

# %% [markdown]
# So nine tenths of the time the tensor cores work. The rest is not one thing. Warps wait for the fixed latency of the
# instruction before (*wait*), for their turn or each other (*barrier*), and for what the tool calls global memory (*long scoreboard*; which
# instructions those are, we did not look up). *selected* are those that issued.
#
# At $D = 64$ (measured apart, $N = 8192$, `notes/phase_11_experiments.md`) the tensor pipe is busy 71 % of the time, and the unit for exponentials 71 % too.
# Both are needed for as long (section 3), so their work would have to overlap better.

# %% [markdown]
# So at $D = 128$ the pipe is busy nine tenths of the *clocks*. And the clock? Each switch of a transistor costs energy. On random numbers every kernel here draws 690 of the
# chip's 700 watts, and the chip lowers its clock until they are enough. On zeros, where few transistors switch, it draws 400 to 460 and the clock is higher. Each kernel alone
# for seconds, clock and power sampled by NVML meanwhile, beside the peak of the tensor cores: 4096 FLOPs per clock and SM.

# %%
for run in RUNS:
    found = hopper_results.clock_table(run)
    show.table(found.rows, found.columns, align=found.align)
    best = max(r["tflops"] for r in run["rows"] if r["part"] == "shapes" and r["name"] == "p11" and "ms" in r)
    peak = 4096 * run["machine"]["sms"] * run["machine"]["sm_clock_mhz"]["max"] / 1e6
    print(f"fastest of section 10: {best:.0f} TFLOP/s, {best / peak:.0%} of {peak:.0f} at the highest clock")
    rows = [r for r in run["rows"] if r["part"] == "clock" and r.get("clock")]
    at = {(r["shape"][3], r["inputs"], r["name"]): r for r in rows}
    for (d, kind, name), r in at.items():
        if (kind, name) == ("random", "p11"):
            zeros = at[d, "zeros", name]
            assert r["clock"]["median"] < zeros["clock"]["median"] and r["tflops"] < zeros["tflops"]
        assert (kind == "random") == (r["clock"]["watts"] > 600)

# %% [markdown]
# That is the race under a power cap: who does the same work with less energy gets a higher clock. A kernel that keeps the pipe busier gains less than its share, since it pays with its clock. Three things
# follow for measuring. Never time zeros. A median of the clock over a whole run says little: pauses and compilations are in it. And whoever comes behind the hottest kernel starts at its clock: so in section 10 each round
# has another order.

# %% [markdown]
# Two things we do not know. At $D = 128$ four of the five stay below 1980 MHz on zeros too, far from the cap. And our kernel has 79 % of the peak at its clock, 80 % on zeros, where
# Nsight Compute has the pipe busy for 91 % of one launch's clocks.

# %% [markdown]
# **Does the emulator count right?** The same small launch, emulated and under Nsight Compute: two heads of 200 rows, causal.

# %%
for run in RUNS:
    found = [r for r in run["rows"] if r["part"] == "counters" and "counters" in r]
    for name in found[0]["counters"]:
        equal = sum(r["counters"][name][0] == r["counters"][name][1] for r in found)
        print(f"{name:24} equal in {equal:2d} of {len(found)} launches")

# %% [markdown]
# What differs has reasons that can be seen, at least in part:
#
# - **Bytes loaded by TMA**: the emulator counts bytes of rows that exist, the chip whole boxes (as `expect_tx` does). In step 1 that explains it
#   to the byte: boxes of 64 rows, 128 bytes each.
# - **TMA instructions**: the chip counts each `bulk_commit` and each `tma_prefetch` too. Step 10 has 4 parts for 3 consumers each:
#   12 commits. The last step has 8 blocks of one consumer with one part each: 8 commits, and 4 prefetches a block. That is
#   all of the difference.
# - From the dynamic scheduler on, some counts depend on who is first.

# %%
for run in RUNS:
    first = next(r for r in run["rows"] if r["part"] == "counters" and r["name"] == "p11_1_tma")["counters"]
    boxes, (ours, theirs) = first["TMA instructions"], first["bytes loaded by TMA"]
    print(f"p11_1_tma: {boxes[1]:.0f} boxes, {theirs:.0f} bytes counted by the chip, {ours} by the emulator")
    assert boxes[0] == boxes[1] and theirs == boxes[1] * 64 * 64 * 2 > ours
    for r in (r for r in run["rows"] if r["part"] == "counters" and "counters" in r):
        ours, theirs = r["counters"]["TMA instructions"]
        stores = r["counters"]["bytes stored by TMA"][0] > 0
        more = 8 + 4 * 8 if r["name"] == "p11_flash" else 4 * 3 if stores else 0
        assert theirs == ours + more, r["name"]

# %% [markdown]
# ## 12 · What NVIDIA's tools find
#
# Lecture 11 plants four mistakes, and the emulator names each. `compute-sanitizer` is NVIDIA's tool for that on a GPU. Its *racecheck* follows loads and
# stores of threads, *synccheck* barriers, *memcheck* addresses. The authors of FlashAttention have written down what they saw: copies by tensor map
# raise no hazard, whatever the barriers are; plain bulk copies raise false ones (see the references). And ours? The record, too, says whether the
# broken kernels computed wrong results on the GPU at all:

# %%
for run in RUNS:
    rows = hopper_results.planted_rows(run)
    for name in PLANTED:
        r = rows.get(name)
        said = ", ".join(f"{tool}: {text}" for tool, text in r["said"].items()) if r else "not measured yet"
        print(f"{name}: {'result ' + r['result'] + '; ' if r else ''}{said}")

# %% [markdown]
# Three of the four computed right results on the GPU, on that day; days before all four did. *racecheck* and *memcheck* saw nothing; *synccheck* complains of
# the first alone, the wait for V that is missing.

# %%
for run in RUNS:
    rows = hopper_results.planted_rows(run)
    noticed = {name for name, r in rows.items()
               for text in r["said"].values() if not re.search(r"\b0 (errors|hazards)", text)}
    assert noticed == {"K is waited for, V is not"}
    assert sum(r["result"] == "right" for r in rows.values()) == 3
    print("noticed by compute-sanitizer:", *noticed)

# %% [markdown]
# Of the right kernels the record has these verdicts:

# %%
for run in RUNS:
    for v in hopper_results.verdicts(run)[-3:]:
        print(f"{v.goal}: {v.said} ({v.measured} runs)")

# %% [markdown]
# ## 13 · The whole kernel
#
# `p11_flash.cu`, once from top to bottom; its header `tiles.cuh` is in lecture 11. **The constants**; `Tile` holds what
# depends on the number of consumers.

# %%
show.region(step("p11_flash"), "constants", "scheduler")
show.region(path("switches.cuh"), "switches")

# %% [markdown]
# **What lies where** in shared memory: two places for Q, the stages of K and of V, O, then the barriers. **Which rows** a part is. **The
# barriers**: a full one waits for one arrival and for bytes, an empty one for each consumer, or for each warp, since a warp may
# read Q and K for itself.

# %%
show.region(step("p11_flash"), "shared memory", "which rows", "barriers")

# %% [markdown]
# **The producer.** One thread, and all its waits are for `empty`. It asks the counter for the next part long before it needs
# the answer.

# %%
show.region(step("p11_flash"), "producer")

# %% [markdown]
# **A consumer** and what each lane keeps. Then **the main loop**. Follow one tile through it:
#
# | part | from step | what it does |
# |---|---|---|
# | *turns* | 7 | who may issue now |
# | *output* | 3, 6 | O += P V of the tile before: issues it only |
# | *scores* | 2, 6, 7 | S of this tile; waits for S alone |
# | *row maxima*, *rescale* | phase 9, 11 | masks where needed; moves the reference |
# | *probabilities* | 12, 15 | $2^{x - m}$ of a portion, and its rounding |
# | *trust* | 14, 15 | of a full tile the probabilities alone, unless a sum is too large; gives K's stage back |
# | *rescale O* | 6 | brings O under the new maximum, rounds the rest of P |

# %%
show.region(step("p11_flash"), "state", "operands of the scores", "main loop")

# %% [markdown]
# **The functions** that it calls: from steps 2 and 3, 11, 12 and 14. Those of `edges.cuh` are in section 8.

# %%
show.region(path("products.cuh"), "issue scores", "issue output")
show.region(path("maxima.cuh"), "row maxima")
show.region(path("exponential.cuh"), "exponential")
show.region(path("scores_again.cuh"), "scores again")

# %% [markdown]
# **The store**: O by way of shared memory and TMA, then `lse`. **The launch**: how many consumers, which heads together, and
# the counter set to 0.

# %%
show.region(path("tiles.cuh"), "heads together")
show.region(path("start.cuh"), "start")
show.region(step("p11_flash"), "store", "launch")

# %% [markdown]
# ## Summary, and what is left to explore
#
# - Measure each idea again in the final kernel. Turns pay there at $D = 64$ alone, the polynomial nowhere.
# - A shortcut's price may be digits, range, or that rows are no longer alone: look for it before somebody else does.
# - Where no unit is full, count what one warp does in a row, and let something else run beside it.
# - Before you guess where time goes, ask the clock. A thousand cycles stood in the open, in the ten lines behind the loop.
# - Under a power cap the clock is part of the result.

# %% [markdown]
# Left to explore: $D = 64$, where the exponentials and the products each need 71 % of the time and overlap only in part; $D = 256$ with a mask, and what
# lowers the clock there; O's store by a warp that has nothing else to do; a backward pass whose tiles have 80 queries, as FlashAttention-4's have at $D = 128$. On your own GPU: `flashlab bench hopper`.

# %% [markdown]
# ## References
#
# - Xiao, Tian, Chen, Han, Lewis: *Efficient Streaming Language Models with Attention Sinks* (2023), arXiv 2309.17453.
# - Hong, Dai, Xu, Mao, Li, Liu, Chen, Dong, Wang: *FlashDecoding++: Faster Large Language Model Inference on GPUs* (2023), arXiv
#   2311.01282: softmax with a reference that is known beforehand, and a way back where it does not hold.
# - Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao: *FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
#   Asymmetric Hardware Scaling* (2026), arXiv 2603.05451: conditional rescaling, exponentials by polynomial.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: *FlashAttention-3* (2024), arXiv 2407.08608.
# - Dao and others: *flash-attention*, github.com/Dao-AILab/flash-attention: `AI/RACECHECK_TMA_HAZARD.md`: what racecheck makes of copies by TMA.
# - The same, pull request 1839 (2025): turns that did not begin at 0. pytorch/FBGEMM, pull request 4982 (2025): turns under a window, which
#   counted blocks that never come. Both waited for ever; exercise 11c.2 is the second.
# - NVIDIA: *Compute Sanitizer*, docs.nvidia.com/compute-sanitizer.
