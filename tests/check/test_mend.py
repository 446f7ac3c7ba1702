"""Answers in a style of their own, with one slip: what change of the learner's text makes them right."""

import itertools
import math
import re

import pytest
import torch

from flashlab.attention.online_softmax import State
from flashlab.check import CheckFailed, mend
from flashlab.check.changes import EndlessError
from flashlab.check.mend import mended, own_text
from flashlab.exercises import check, exercises
from flashlab.exercises.rule import RULES
from flashlab.triton_tools.model import Model, launch

exercises()


def not_divided(m_start, block_m, block_n, group, seq_q, seq_k, causal):
    first = last = seq_k
    if causal:
        first = max(0, min(seq_k, seq_k - seq_q + m_start // group + 1))
        last = max(0, min(seq_k, seq_k - seq_q + m_start // group + block_m - 1 + 1))
    return math.ceil(last / block_n), first // block_n


def a_turn_too_few(m_start, block_m, block_n, group, seq_q, seq_k, causal):
    end = full = 0
    shift = seq_k - seq_q
    while end * block_n < seq_k and not (causal and end * block_n > (m_start + block_m - 1) // group + shift):
        end += 1
    while (full + 1) * block_n < seq_k and not (causal and (full + 1) * block_n - 1 > m_start // group + shift):
        full += 1
    return end, full


def rounds(blocks, s, places):
    return blocks * s // places


def in_a_helper(blocks, tiles, places, rows, head_dim):
    best = min(range(1, max(1, tiles // 4) + 1), key=lambda s: (rounds(blocks, s, places) * math.ceil(tiles / s), s))
    return best, best * rows * (head_dim + 1) if best > 1 else 0


def place_of(table, length, j, kv_head, page, kv_heads, head_dim):
    number = table[j % page]
    offset = ((number * kv_heads + kv_head) * page + j // page) * head_dim
    return offset, -(-length // page) * page - length


def both_wrong(blocks, tiles, places, rows, head_dim):
    best = 1
    for s in range(1, max(1, tiles // 4) + 1):
        if math.ceil(blocks / places) * s * math.ceil(tiles / s) < math.ceil(blocks * best / places) * math.ceil(
            tiles / best
        ):
            best = s
    return best, best * rows * (head_dim + 1) if best > 1 else 0


def by_portion(number, m_blocks, heads, group, kv_together):
    blocks = sorted(
        ((h, m) for h in range(heads) for m in range(m_blocks)),
        key=lambda x: (x[0] // (kv_together * group), -x[1], -x[0]),
    )
    return blocks[number]


def not_infinite(attention, layers, faster):
    f = lambda s, t: 1 / (1 - s + s / t)  # noqa: E731
    share = attention * layers
    return f(attention, faster), f(share, faster), math.inf if share == 1 else f(share, 1e6)


def weighted_twice(a, b):
    m = torch.maximum(a.m, b.m)
    safe = m.masked_fill(m == -math.inf, 0.0)
    la, lb = a.l * torch.exp(a.m - safe), b.l * torch.exp(b.m - safe)
    return State(m, la + lb, la[..., None] * a.o + lb[..., None] * b.o)


def exchanged(os, lses):
    o, lse = torch.zeros_like(os[0]), torch.full_like(lses[0], -math.inf)
    for x, y in zip(os.nan_to_num(), lses, strict=True):
        new = torch.logaddexp(lse, y)
        safe = new.masked_fill(new == -math.inf, 0)
        o = torch.exp(y - safe)[:, None] * o + torch.exp(lse - safe)[:, None] * x
        lse = new
    return o, lse


def not_rescaled(os, lses):
    o, lse = torch.zeros_like(os[0]), torch.full_like(lses[0], -math.inf)
    for x, y in zip(os.nan_to_num(), lses, strict=True):
        new = torch.logaddexp(lse, y)
        o = o + torch.exp(y - new).nan_to_num()[:, None] * x
        lse = new
    return o, lse


def late_rows(rank, source, n, world):
    if source == rank:
        return 0, n, True
    return (n // 2, n // 2, False) if source < rank else (n // 2, n, False)


def one_sum_not_rescaled(scores, v, BLOCK_N, threshold):
    m, l, o, n = -math.inf, 0.0, torch.zeros(v.shape[1], dtype=v.dtype), 0
    for i in range(0, len(scores), BLOCK_N):
        s = scores[i : i + BLOCK_N]
        top = s.max().item()
        if top == -math.inf:
            continue
        if m == -math.inf:
            m = top
        elif top > m + threshold:
            l, m, n = l * math.exp(m - top), top, n + 1
        p = torch.exp(s - m)
        l, o = l + p.sum(), o + p @ v[i : i + BLOCK_N]
    if m == -math.inf:
        return o, torch.tensor(-math.inf, dtype=scores.dtype), 0
    return o / l, m + torch.log(l), n


def never_set_back(script, arrivals):
    left, owed, phase, pairs = arrivals, 0, 0, []
    for what, size in script:
        owed += -size if what == "copy" else size
        left -= what.startswith("arrive")
        if left <= 0 and owed == 0:
            phase ^= 1
        pairs.append((phase == 1, phase == 0))
    return pairs


def in_each_tile(q, k, v, do, lse, delta, BLOCK, scale, causal):
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, len(k), BLOCK):
        for i in range(0, len(q), BLOCK):
            rows, keys = slice(i, i + BLOCK), slice(j, j + BLOCK)
            p = torch.exp(scale * (q[rows] @ k[keys].T) - lse[rows, None])
            if causal:
                r = torch.arange(len(q[rows]), device=q.device)
                c = torch.arange(len(k[keys]), device=q.device)
                p = p.masked_fill(c[None, :] > r[:, None], 0.0)
            dv[keys] += p.T @ do[rows]
            dk[keys] += scale * (p * (do[rows] @ v[keys].T - delta[rows, None])).T @ q[rows]
    return dk, dv


def the_other_way_round(q, k, v, do, lse, delta, BLOCK, scale, causal):
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, len(k), BLOCK):
        for i in range(0 if causal else j, len(q), BLOCK):
            rows, keys = slice(i, i + BLOCK), slice(j, j + BLOCK)
            p = torch.exp(scale * (q[rows] @ k[keys].T) - lse[rows, None])
            if not causal and i == j:
                p = torch.tril(p)
            dv[keys] += p.T @ do[rows]
            dk[keys] += scale * (p * (do[rows] @ v[keys].T - delta[rows, None])).T @ q[rows]
    return dk, dv


def warps_never_read(registers, shared_bytes, threads, shared_per_sm, warps_per_sm):
    warps = -(-threads // 32)
    by_registers = 4 * (16384 // (-(-32 * registers // 256) * 256)) // warps
    by_shared = shared_per_sm // (shared_bytes + 1024)
    by_warps = warps_per_sm // warps  # noqa: F841
    return min(by_registers, by_shared)


def rate_for_time(flops, bytes_moved, gpu):
    roof = min(gpu.fp16_tflops * 1e12, flops / bytes_moved * gpu.memory_gb_s * 1e9)
    return roof, "compute" if roof == gpu.fp16_tflops * 1e12 else "memory"


def a_mean(p, v, o, do, dlse):
    return p * (do @ v.T - (o * do).sum(1, keepdim=True)) + dlse[:, None] / p.shape[1]


def weight_of_another_sum(first, second):
    top = torch.maximum(first.m, second.m)
    safe = top.masked_fill(top == -math.inf, 0)
    f1, f2 = ((x.m - safe).exp().unsqueeze(-1) for x in (first, second))
    return State(top, first.l + second.l, f1 * first.o + f2 * second.o)


def divided_in_each_turn(scores, v, BLOCK_N):
    m, l, o = scores.new_tensor(-math.inf), scores.new_tensor(0.0), v.new_zeros(v.shape[-1])
    for start in range(0, len(scores), BLOCK_N):
        x = scores[start : start + BLOCK_N]
        m_new = torch.maximum(m, x.max())
        alpha, p = torch.exp(m - m_new), torch.exp(x - m_new)
        l = l * alpha + p.sum()
        o = (o * alpha + p @ v[start : start + BLOCK_N]) / l
        m = m_new
    return o


def corrected_too_much(scores, v, BLOCK_N):
    x = scores[:BLOCK_N]
    m, l, o = x.max(), torch.exp(x - x.max()).sum(), torch.exp(x - x.max()) @ v[:BLOCK_N]
    for start in range(BLOCK_N, len(scores), BLOCK_N):
        x = scores[start : start + BLOCK_N]
        m_new = torch.maximum(m, x.max())
        p = torch.exp(x - m_new)
        l = (l + p.sum()) * torch.exp(m - m_new)
        o = (o + p @ v[start : start + BLOCK_N]) * torch.exp(m - m_new)
        m = m_new
    return o / l


def of_this_turn_alone(scores, v, BLOCK_N):
    ref, Z, acc = scores[0], scores.new_zeros(()), torch.zeros_like(v[0])
    for s, vb in zip(scores.split(BLOCK_N), v.split(BLOCK_N), strict=True):
        now = s.max()
        e = (s - now).exp()
        Z, acc, ref = (ref - now).exp() * Z + e.sum(), (ref - now).exp() * acc + e @ vb, now
    return acc / Z


def in_slices(q, k, v, causal):
    ranks, n, dim = q.shape
    out = torch.empty_like(q)
    for me in range(ranks):
        num, den, top = torch.zeros(n, dim).double(), torch.zeros(n).double(), torch.full((n,), -math.inf).double()
        for hop in range(ranks):
            src, rows, keys = (me - hop) % ranks, slice(0, n), slice(0, n)
            if causal and src < me:
                keys = slice(0, n // 2)
            if causal and src > me:
                rows = slice(n // 2, n)
            x = q[me, rows] @ k[src, keys].T
            if causal and src == me:
                x = x + torch.full_like(x, -math.inf).triu(1)
            m = torch.maximum(top[rows], x.amax(1))
            c, e = torch.exp(top[rows] - m), torch.exp(x - m[:, None])
            num[rows] = num[rows] * c[:, None] + e @ v[src, keys]
            den[rows] = den[rows] * c + e.sum(1)
        out[me] = (num / den[:, None]).to(q.dtype)
    return out


def in_base_2(xs):
    m, l = -math.inf, 0.0
    for x in xs:
        if x > -math.inf:
            n = max(m, x)
            l, m = l * 2 ** (m - n) + 2 ** (x - n), n
    return m, l


def any_for_all(os, lses):
    empty, lse = torch.isneginf(lses).any(0), torch.logsumexp(lses, 0)
    w = torch.exp(lses - torch.where(empty, torch.zeros_like(lse), lse))
    o = (w[..., None] * torch.nan_to_num(os)).sum(0)
    return torch.where(empty[:, None], torch.zeros_like(o), o), lse


def another_factor(q, k, v, do, lse, delta):
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for _ in range(len(q)):
        p = torch.exp(q @ k.mT - lse[..., None])
        dv = dv + p.mT @ do
        ds = p * (do @ v.mT - delta[..., None])
        dk = dk + ds @ k
        k, v, dk, dv = (t.roll(1, 0) for t in (k, v, dk, dv))
    return dk, dv


def above_alone(heads, kv_heads, queries, itemsize, tflops, gb_s):
    one = 2 * heads / (kv_heads * itemsize)
    return one * queries, math.floor(tflops * 1000 / gb_s / one) + 1


def summed_before(q, k, v):
    s = q @ k.T
    s *= 1 / math.sqrt(q.shape[-1])
    s -= s.amax(dim=1, keepdim=True)
    total = s.sum(dim=1, keepdim=True)
    s.exp_()
    return (s @ v) / total


def multiplied(q, k, v):
    s = torch.mm(q, k.t()).mul_(math.sqrt(q.size(1)))
    s.sub_(s.amax(1, keepdim=True)).exp_()
    return (s @ v) / s.sum(dim=1, keepdim=True)


def a_first_split_too_few(os, lses):
    top = lses.amax(0)
    top = torch.where(top.isneginf(), torch.zeros_like(top), top)
    num, den = torch.zeros_like(os[0]), torch.zeros_like(top)
    for i in range(1, len(os)):
        w = (lses[i] - top).exp()
        num = num + w[:, None] * torch.where(w[:, None] > 0, os[i], torch.zeros_like(os[i]))
        den = den + w
    return num / torch.where(den > 0, den, torch.ones_like(den))[:, None], top + den.log()


def a_large_epsilon(x):
    p = torch.nan_to_num((x - x.amax(-1, keepdim=True)).exp(), nan=0.0)
    return p / (p.sum(-1, keepdim=True) + 1e-3)


def from_the_last_program(pid, m_blocks, heads, kv_heads):
    pid = m_blocks * heads - 1 - pid % (m_blocks * heads) + pid // (m_blocks * heads) * (m_blocks * heads)
    rest, g = divmod(pid, heads // kv_heads)
    rest, b = divmod(rest, m_blocks)
    batch, kv = divmod(rest, kv_heads)
    return batch, kv * (heads // kv_heads) + g, kv, b


def a_block_late(q, k, v, o, lse, do, BLOCK_M, BLOCK_N, scale):
    delta = (o * do).sum(1)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    blocks = -(-len(q) // BLOCK_M)
    for pid in range(blocks - (-len(k) // BLOCK_N)):
        first, side = (pid * BLOCK_M, q) if pid < blocks else ((pid - blocks + 1) * BLOCK_N, k)
        rows = slice(first, first + (BLOCK_M if pid < blocks else BLOCK_N))
        if side is q:
            p = torch.exp(scale * q[rows] @ k.T - lse[rows, None])
            dq[rows] = scale * (p * (do[rows] @ v.T - delta[rows, None])) @ k
        else:
            p = torch.exp(scale * q @ k[rows].T - lse[:, None])
            dv[rows] = p.T @ do
            dk[rows] = scale * (p * (do @ v[rows].T - delta[:, None])).T @ q
    return dq, dk, dv


def numbers_of_other_bits(row, column):
    def bits(number, *which):
        return sum((number >> bit & 1) << place for place, bit in enumerate(which))

    lane = bits(column, 0, 1) | bits(row, 0, 1, 2) << 2
    return row >> 4, lane, bits(column, 0) | bits(row, 3) << 1 | column >> 3 << 2


def late_piece_first(row, rank, n, world):
    second, within = divmod(row, n // 2)
    pieces = (2 * world - 1 - rank, rank)
    return pieces[second] * (n // 2) + within, rank + world * row


def beside_the_first_part(os, lses):
    o, lse = os[0].clone(), lses[0].clone()
    for i in range(1, os.shape[0]):
        w = 1 / (1 + torch.exp(lses[0] - lses[i]))
        o = (1 - w).unsqueeze(-1) * o + w.unsqueeze(-1) * os[i]
        lse = torch.logaddexp(lse, lses[i])
    return o.to(os.dtype), lse


def axes_in_another_order(x):
    ranks, heads, rows, columns = x.shape
    x = x.reshape(ranks, ranks, heads // ranks, rows, columns).permute(1, 0, 2, 3, 4)
    return x.reshape(ranks, heads // ranks, ranks * rows, columns)


def a_block_for_its_first(x):
    each = x.shape[1] // len(x)
    return torch.stack([torch.cat([rank[i : i + each] for rank in x], dim=1) for i in range(len(x))])


def without_its_begin(lengths, block_n, programs, p):
    tiles = [-(-n // block_n) for n in lengths]
    run, pieces, base = -(-sum(tiles) // programs), [], 0
    for s, n in enumerate(lengths):
        a, b = max(p * run, base), min((p + 1) * run, base + tiles[s])
        if a < b:
            pieces.append((s, a * block_n, min((b - base) * block_n, n)))
        base += tiles[s]
    return pieces


def one_of_two_tensors(tflops, gb_s, heads, kv_heads, itemsize, world):
    above, below = tflops * 500 * itemsize * kv_heads, gb_s * heads
    return 2 * world * -(-above // (2 * below))


def without_p(p, dp):
    weighted = p * dp
    return dp - weighted.sum(1, keepdim=True), -((1 - p.sum(1)) * weighted.sum(1)).sum()


@pytest.mark.parametrize(
    ("id", "answer", "said"),
    [
        ("4.1", from_the_last_program, "is counted from the end"),
        ("5.10", a_block_late, "the term `1` is one too many, in `pid - blocks + 1`"),
        ("5.1", without_p, "the factor `p` is missing"),
        ("0.4", weight_of_another_sum, "`first.l + second.l` lacks the weights `f1.squeeze(-1)` and `f2.squeeze(-1)`"),
        ("0.5", divided_in_each_turn, "`o` is divided by `l` in each turn: once, behind the loop"),
        ("0.5", corrected_too_much, "multiplies the new term too, in"),
        ("0.5", of_this_turn_alone, "`s.max()` stands where `max(ref, s.max())` belongs"),
        ("0.3", in_base_2, "base 2 stands where base e belongs, everywhere"),
        ("13.8", in_slices, "the line `top[rows] = m` is missing at the end of the loop"),
        ("12.3", any_for_all, "`torch.isneginf(lses).any` stands where `torch.isneginf(lses).all` belongs"),
        ("12.3", a_first_split_too_few, "`1` stands where `0` belongs, in `range(1, len(os))`"),
        ("13.4", one_of_two_tensors, "in `2 * below`; or `500` stands where `1000` belongs"),  # both are as likely
        ("13.6", axes_in_another_order, "(1, 0, 2, 3, 4)` stands where `x.reshape(ra"),
        ("13.6", a_block_for_its_first, "`i:i + each` stands where `i * each:i * each + each` belongs"),
        ("12.8", without_its_begin, "`a` stands where `a - base` belongs"),
        ("13.5", another_factor, "`ds @ k` stands where `ds.mT @ q` belongs"),
        ("12.1", above_alone, "+ 1` stands where `math.ceil("),
        ("1.3", summed_before, "the line `total = s.sum(dim=1, keepdim=True)` comes too early, before `s.exp_()`"),
        ("1.3", multiplied, ".mul_` stands where `torch.mm(q, k.t()).div_` belongs"),
        ("0.2", a_large_epsilon, "`0.001` stands where `1e-30` belongs"),
        ("0.8", one_sum_not_rescaled, "`o` is not multiplied by `math.exp(m - top)`, as `l` is"),
        ("11.1", never_set_back, "`left` is not set back to `arrivals`, where `left <= 0 and owed == 0`"),
        ("5.9", in_each_tile, "`i` is missing at `torch.arange(len(q[rows]), device=q.device)` and `j` is missing at"),
        ("5.9", the_other_way_round, "`causal` is taken the other way round, everywhere"),
        ("9.2", warps_never_read, "stands where `min(by_registers, by_shared, by_warps)` belongs"),
        ("1.2", rate_for_time, "`roof` stands where `flops / roof` belongs"),
        ("5.7", a_mean, "`dlse[:, None] / p.shape[1]` stands where `p * dlse[:, None]` belongs"),
        ("9.10", by_portion, "`-x[0]` stands where `x[0]` belongs"),
        ("10.2", not_infinite, "`1e6` stands where `math.inf` belongs"),
        ("0.4", weighted_twice, "`la` stands where `torch.exp(a.m - safe)` belongs, and `lb` where"),
        ("12.3", exchanged, "`y` and `lse` are exchanged, in `o = "),
        ("12.3", not_rescaled, "the factor `torch.exp(lse - new)[..., None]` is missing at `o`, in `o"),
        ("13.3", late_rows, "`n // 2` stands where `0` belongs"),
        ("9.1", not_divided, "stands where `(m_start + block_m - 1) // group"),
        ("9.1", a_turn_too_few, "`(full + 1) * block_n < seq_k` stands where `(full + 1) * block_n <= seq_k` belongs"),
        ("11b.1", numbers_of_other_bits, "`bits(column, 0, 1)` stands where `bits(column, 1, 2)` belongs"),
        ("13.1", late_piece_first, "rank, rank` stands where `rank, 2 * world - 1 - rank` belongs"),
        ("13.2", beside_the_first_part, "`lses[0]` stands where `lse` belongs, in `lses[0] - lses[i]`"),
        ("9.11", in_a_helper, "`blocks * s // places` is rounded down: it should be rounded up"),
        ("9.11", both_wrong, "`math.ceil(blocks / places) * s` stands where `math.ceil(blocks * s / places)` belongs"),
    ],
)
def test_a_slip_in_ones_own_words_is_told(id, answer, said, monkeypatch):
    monkeypatch.setattr(mend, "_SECONDS", 60.0)  # on a machine with other work
    with pytest.raises(CheckFailed) as failed:
        RULES[id].check(answer)
    assert said in failed.value.sentence.splitlines()[0]


def test_the_turns_of_a_kernels_loops_are_counted():
    """Of repairs that walk over more or less the one with the fewest is told."""
    index = RULES["3.3"].index
    text = index.texts[0]
    assert mend._turns(index, text, text.compiled()) > len(index.inputs)


def test_a_row_and_a_likely_change_of_the_right_text_come_first():
    def off(m_start, block_m, block_n, group, seq_q, seq_k, causal):
        last = (m_start + block_m - 1) // group + seq_k - seq_q if causal else seq_k  # the query's own key is left out
        first = m_start // group + seq_k - seq_q + 1 if causal else seq_k
        return max(0, -(-min(seq_k, last) // block_n)), max(0, min(seq_k, first) // block_n)

    with pytest.raises(CheckFailed, match="query i sees its own key too") as failed:
        RULES["9.1"].check(off)
    assert failed.value.diagnosis == "term-missing"


def test_two_results_may_have_a_change_each():
    it = RULES["9.1"]

    def answer(m_start, block_m, block_n, group, seq_q, seq_k, causal):
        end = -(-seq_k // block_n)
        full = seq_k // block_n
        if causal:
            end = max(0, -(-min(seq_k, (m_start + block_m - 1) // group + 2 + seq_k - seq_q) // block_n))
            full = max(0, min(seq_k, m_start // group + seq_k - seq_q) // block_n)
        return end, full

    said, _ = mended(it.index, answer, it.own_text)
    assert re.fullmatch(
        r"end: `2` stands where `1` belongs, in `.* 2`; and full: the term `1` is missing in `m_start.*`", said
    )


def test_what_is_no_function_of_ones_own_is_left_alone():
    assert own_text(lambda x: x) is None and own_text(torch.add) is None


def only_compute(flops, bytes_moved, gpu):
    if flops < bytes_moved:
        return bytes_moved / (gpu.memory_gb_s * 1e9), "memory"
    return flops / (gpu.fp16_tflops * 1e12), "compute"


def plainly_compute(flops, bytes_moved, gpu):
    return flops / (gpu.fp16_tflops * 1e12), "compute"


def test_a_row_that_the_text_is_not_like_is_not_told():
    with pytest.raises(CheckFailed, match="only the time of arithmetic counts"):
        RULES["1.2"].check(plainly_compute)
    with pytest.raises(
        CheckFailed, match="^`flops < bytes_moved` stands where `bytes_moved / .* > flops / .*` belongs: the rest"
    ):
        RULES["1.2"].check(only_compute)


def rounded_share(rows, parts):
    times, calls = {}, {}
    for row in rows:
        part = parts.get(row.key, "other")
        times[part] = times.get(part, 0) + row.self_cpu_time_total
        calls[part] = calls.get(part, 0) + row.count
    most = max(times, key=times.get)
    return most, round(times[most] / sum(times.values()), 3), calls[most]


def test_a_number_that_is_rounded_should_not_be():
    with pytest.raises(CheckFailed, match=r"`round\(times\[most\] / sum.* stands where `times\[most\] / sum"):
        RULES["10.1"].check(rounded_share)


fresh = itertools.count()


def test_what_has_no_end_comes_to_one():  # a change may put it in the place of a list
    def two(n):
        from itertools import count

        return next(fresh), next(count(n))

    assert own_text(two).compiled()(7) == (next(fresh) - 1, 7)

    def all_of_it(n):
        return sum(1 for _ in fresh) if n else {*itertools.count()}

    for n in (0, 1):
        with pytest.raises(EndlessError):
            own_text(all_of_it).compiled()(n)


@pytest.mark.parametrize(
    "id", [id for id, it in RULES.items() if it.judged is None and getattr(it, "call", None) is None]
)
def test_what_is_right_is_right_for_the_mender(id):
    """Else it finds nothing, whatever an answer has, and nobody notices."""
    it = RULES[id]
    text = own_text(it.fn, it.own_text)
    got = text.steps_as(lambda run: [*it.index.run(run)])
    assert it.index.wrong_parts(got) == []
    if (asked := it.asked_of(it.fn)) is not None:
        asked(text.compiled())


def by_brute_force(block, M, N, BLOCK_M, BLOCK_N, window):
    blocks = {}
    for i in range(M):
        for key in range(max(0, i + N - M - window + 1), i + N - M):
            blocks.setdefault(i // BLOCK_M, set()).add(key // BLOCK_N)
    mine = [tile for tile in sorted(blocks, reverse=True) if block in blocks[tile]]
    return [(tile, sorted(blocks[tile]).index(block)) for tile in mine]


def three_conditions(block, M, N, BLOCK_M, BLOCK_N, window):
    found = []
    for tile in range(M // BLOCK_M):
        low, high = max(0, tile * BLOCK_M + N - M - window + 1), min(M, (tile + 1) * BLOCK_M) - 1 + N - M
        if high < 0 or low >= min(N, (block + 1) * BLOCK_N) or high < block * BLOCK_N:
            continue
        found.append((tile, block - low // BLOCK_N))
    return found[::-1]


@pytest.mark.parametrize("fn, words", [
    (by_brute_force, "the term `1` is missing in `i + N - M`"), (three_conditions, "`M // BLOCK_M` is rounded down"),
])  # fmt: skip
def test_an_answer_of_many_turns_and_of_many_conditions_is_mended(fn, words):
    with pytest.raises(CheckFailed, match=re.escape(words)):
        check("11c.2", fn)


def test_a_change_that_doubles_a_list_ends():
    def grows(n):
        found = [n]
        while len(found) < 10**9:
            found = found + found
        return found

    with pytest.raises(EndlessError):
        own_text(grows).compiled()(1)


def one_less(m_start, block_m, block_n, group, seq_q, seq_k, causal):
    rows = range(m_start, min(m_start + block_m, group * seq_q))
    keys = [max(0, min(seq_k, row // group + seq_k - seq_q + 1)) if causal else seq_k for row in rows]
    return max(keys) // block_n, min(keys) // block_n


def test_a_change_that_makes_another_thing_of_a_result_ends_nothing():
    """Here `rows` for a number, of which no minimum can be taken."""
    with pytest.raises(CheckFailed, match=re.escape("`max(keys) // block_n` is rounded down")):
        check("9.1", one_less)


def test_methods_and_hints_of_a_kernel_run_on_the_model():
    tl = Model()

    def kernel(x_ptr, y_ptr):
        at = tl.multiple_of(tl.arange(0, 8), 8)
        x = tl.load(x_ptr + at)
        tl.store(y_ptr + at, x.exp().log() + tl.math.exp2(x).log2() + x.sqrt().floor())

    x, y = torch.linspace(1, 4, 8), torch.zeros(8)
    got = launch(kernel, tl, 1, {"x_ptr": x, "y_ptr": y}, ("y_ptr",))["y_ptr"]
    torch.testing.assert_close(got, 2 * x + x.sqrt().floor())
