"""What single keys tell of a wrong attention: which are counted, what they weigh, which dimensions make the scores."""

import math

import pytest
import torch
from failing import failure_of

from flashlab.check import verify, verify_one_head
from flashlab.check.mistakes.mask_rule import Seen, rule_of
from flashlab.check.mistakes.weights import counted, crossed


def attention(
    q, k, v, causal, scale, *, dims=slice(None), end=lambda i, m, n: i + n - m, moved=0, sums=1.0,
    after=lambda o, lse: (o, lse),
):  # fmt: skip
    """Attention of one head. dims: of the scores; end: a query's last key; moved: keys exchanged; sums: times l."""
    s = scale * (q.float()[:, dims] @ k.float()[:, dims].T)
    m, n = s.shape
    if moved and n % 16 == 0:
        s = s[:, torch.arange(n) ^ moved]
    if causal:
        row, key = torch.arange(m, device=s.device)[:, None], torch.arange(n, device=s.device)
        s = s.masked_fill(key > end(row, m, n), -math.inf)
    top = s.amax(1).nan_to_num(neginf=0.0)
    p = torch.exp(s - top[:, None])
    l_i = p.sum(1) * sums
    o = (p.to(v.dtype).float() @ v.float()) / torch.where(l_i == 0, 1.0, l_i)[:, None]
    o, lse = after(o, top + torch.log(l_i))
    return o.to(v.dtype), lse


def failure(**mistake):
    def fn(q, k, v, *, causal, scale):
        return attention(q, k, v, causal, scale, **mistake)

    return failure_of(verify_one_head, fn, causal=True, max_seq=200)


def half_of_o(o, lse):
    return o * (torch.arange(64, device=o.device) < 32), lse


def some_rows_nan(o, lse):
    rows = torch.arange(len(o), device=o.device) < 3
    return o.masked_fill(rows[:, None], 0.0), lse.masked_fill(rows, math.nan)


@pytest.mark.parametrize(
    "mistake, slug, words",
    [
        ({"dims": slice(0, 48)}, "wrong-dimensions", "dimensions 48 to 63 are missing"),
        ({"dims": [*range(64), *range(8, 16)]}, "wrong-dimensions", "dimensions 8 to 15 count 2 times"),
        ({"end": lambda i, m, n: i + n - m + 2}, "wrong-keys", "counts the keys up to i + seq_k - seq_q + 2;"),
        ({"end": lambda i, m, n: i + abs(n - m)}, "wrong-keys", "counts the keys up to i + abs(seq_k - seq_q);"),
        ({"end": lambda i, m, n: i + (n - m) // 16 * 16}, "wrong-keys", "up to i + (seq_k - seq_q) // 16 * 16;"),
        ({"end": lambda i, m, n: i * n // m}, "wrong-keys", "query 0 counts key 0, and should count no key"),
        ({"moved": 8}, "values-exchanged", "the value of key 0 gets the weight of key 8"),
        ({"sums": 1.25}, "output-scaled", "0.8 times"),
        ({"after": lambda o, lse: (o, 0.995 * lse)}, "lse-scaled", "every lse is 0.995 times"),
        ({"after": half_of_o}, "wrong-value",
         "columns 32 to 63 of o are wrong in every row"),
        ({"after": half_of_o}, "wrong-value", "lse is right in every case"),
        ({"after": some_rows_nan}, "wrong-value", "rows 0 to 2 are wrong"),
    ],
)  # fmt: skip
@pytest.mark.every(6)
def test_what_is_read_off(mistake, slug, words):
    told = failure(**mistake)
    assert told.diagnosis == slug and words in str(told)


def test_a_nan_that_was_hidden_is_told():
    def hides(q, k, v, *, causal, scale):
        """-inf - (-inf) where the walk begins behind the keys that a query sees; 0 in place of NaN at the end."""
        o, lse = attention(q, k, v, causal, scale)
        late = torch.arange(len(q), device=q.device) + len(k) - len(q) < (len(k) - 1) // 16 * 16
        blind = late if causal else torch.zeros_like(late)
        return o.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, math.nan)

    assert failure_of(verify_one_head, hides, causal=True, max_seq=200).diagnosis == "nan-hidden"


def test_an_lse_of_another_head_is_told_as_that():
    def fn(q, k, v, *, causal, scale):
        pairs = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
        out = {at: attention(q[at], k[at], v[at], causal, scale) for at in pairs}
        o, lse = (torch.stack([out[at][i] for at in pairs]).unflatten(0, q.shape[:2]) for i in (0, 1))
        return o, lse.flatten(0, 1).roll(1, 0).unflatten(0, q.shape[:2])

    told = failure_of(verify, fn, causal=True, max_seq=100)
    assert told.diagnosis == "wrong-head-stored" and "o is right, but" in str(told)


def test_something_added_to_the_sum_is_no_rounding():
    def fn(q, k, v, *, causal, scale):
        o, lse = attention(q.float(), k.float(), v.float(), causal, scale)
        return (o / (1 + 4e-3 / (1 + len(k)))).to(v.dtype), lse

    assert failure_of(verify_one_head, fn, max_seq=200).diagnosis == "rows-scaled"


def test_how_often_slices_count():
    design = torch.randn(128, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert counted(design, design.sum(1), 1e-6) is None
    assert counted(design, design[:, :5].sum(1), 1e-6) == "dimensions 40 to 47 are missing from the sum"
    assert counted(design, 0 * design.sum(1), 1e-6) == "every sum is 0"
    assert counted(design, design.sum(1) / 8, 1e-6) == "every sum is 0.125 times what it should be"
    assert counted(design, design.sum(1) + design[:, 0] ** 2, 1e-6) is None


def one_tile_at_a_time(q, k, v, scale, tile=32, shift=None, wrong=lambda c: c, of_acc=lambda c: c):
    """Attention over tiles. shift: rows of V that stand `shift` too high, from that row on; wrong: the correction,
    of_acc: that of acc alone.
    """
    if shift:
        v = torch.cat([v[:shift], v[: max(0, len(v) - shift)]])
    s = scale * (q.float() @ k.float().T)
    l_i, acc = s.new_zeros(len(q)), s.new_zeros(len(q), v.shape[1])
    m = l_i - math.inf
    for start in range(0, len(k), tile):
        part = s[:, start : start + tile]
        m_new = torch.maximum(m, part.amax(1))
        p, correction = torch.exp(part - m_new[:, None]), wrong(torch.exp(m - m_new))
        l_i, acc = l_i * correction + p.sum(1), acc * of_acc(correction)[:, None] + p @ v[start : start + tile].float()
        m = m_new
    return (acc / l_i[:, None]).to(v.dtype), m + torch.log(l_i)


@pytest.mark.parametrize(
    "mistake, slug, words",
    [
        # More than one tile of the sizes that are usual, and more keys than head_dim.
        ({"tile": 32, "wrong": lambda c: c**1.5}, "tiles-not-joined", "keys 0 to 31 are right beside each other"),
        ({"tile": 128, "wrong": lambda c: c**1.5}, "tiles-not-joined", "keys 0 to 127 are right beside each other"),
        ({"shift": 16}, "values-exchanged", "weight on key 16 gets the value of key 0, and so on, for 24 of 40"),
        ({"tile": 4, "of_acc": torch.ones_like}, "acc-not-rescaled", "gets the value of keys 0 to 4, and so on"),
    ],
)
@pytest.mark.every(3)
def test_several_tiles_are_read_off(mistake, slug, words):
    def fn(q, k, v, *, scale):
        return one_tile_at_a_time(q, k, v, scale, **mistake)

    told = failure_of(verify_one_head, fn, max_seq=300)
    assert told.diagnosis == slug and words in str(told)


@pytest.mark.parametrize(
    "of_m, of_dots, off, slug, words",
    [
        (0.5, 0.0, 0.0, "lse-parts", "lse is 0.5 m + 1 ln(l)"),
        (0.0, math.log(2), 0.0, "lse-parts", "lse is 0.6931 m / scale + 1 ln(l)"),
        # A little off, as of an exponential that is computed in another way: no cause is named that o would show.
        (1.0, 0.0, 3e-5, "low-precision", "o is right in every case; lse alone errs, and is always too large"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_an_lse_that_is_wrong_alone(of_m, of_dots, off, slug, words, causal):
    def fn(q, k, v, *, causal, scale):
        o, lse = attention(q, k, v, causal, scale)
        s = scale * (q.float() @ k.float().T)
        if causal:
            row, key = torch.arange(len(q), device=s.device)[:, None], torch.arange(len(k), device=s.device)
            s = s.masked_fill(key > row + len(k) - len(q), -math.inf)
        m = s.amax(1)
        return o, torch.where(m == -math.inf, lse, lse + (of_m - 1) * m + of_dots / scale * m + off)

    told = failure_of(verify_one_head, fn, causal=causal, max_seq=200)
    assert told.diagnosis == slug and words in str(told)


def test_which_dimensions_meet():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 48, dtype=torch.float64, generator=generator) for n in (16, 8))
    assert crossed(q, k, q @ k.T, 1e-6) is None
    again = torch.cat([q[:, :8], q[:, :8], q[:, 16:]], 1)
    assert crossed(q, k, again @ k.T, 1e-6) == "dimensions 8 to 15 of K are multiplied with dimensions 0 to 7 of Q"
    assert crossed(q, k, (q @ k.T).cos(), 1e-6) is None


def test_the_rule_of_a_mask():
    def seen(mask):
        shapes = [(9, 9), (9, 5), (5, 9), (12, 7), (1, 6), (20, 33)]
        grids = [(torch.arange(m)[:, None], torch.arange(n)[None]) for m, n in shapes]
        right = [j <= i + j.shape[1] - len(i) for i, j in grids]
        return [Seen(mask(i, j, seen), seen) for (i, j), seen in zip(grids, right, strict=True)]

    assert rule_of(seen(lambda i, j, right: right)) is None
    assert rule_of(seen(lambda i, j, right: right & (i % 2 == j % 3))) is None
    assert "keys up to i + seq_q" in rule_of(seen(lambda i, j, right: j <= i + len(i)))
    tail = rule_of(seen(lambda i, j, right: right & (j < j.shape[1] // 8 * 8)))
    assert tail.startswith("in each of 6 shapes the keys from key seq_k // 8 * 8 on are counted by no query; right: ")
    short = rule_of(seen(lambda i, j, right: right & (j < (i // 16 * 16 + 16).clamp(max=len(i)) // 16 * 16)))
    assert "a block of 16 queries walks over the keys before m_end, rounded down to tiles of 16" in short
    ahead = rule_of(seen(lambda i, j, right: j <= i // 16 * 16 + j.shape[1] - len(i)))
    assert "keys before key i // 16 * 16 + seq_k - seq_q + 1" in ahead
