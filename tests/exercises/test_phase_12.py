"""Phase 12's exercises: answers in other styles, wrong and right, and what is told of a fence that is missing."""

import pytest
import torch
import triton
import triton.language as tl
from lesson_answers import diagnosis
from test_rules import judge, told

from flashlab.exercises import check
from flashlab.exercises.rule import RULES

# The count is one lane's; CUDA's own release and acquire are fences, and barriers of the warp.
RIGHT = """
    __syncwarp();
    unsigned count = 0;
    if (lane == 0) {
        __threadfence();
        count = atomicInc((unsigned*)counter, splits - 1) + 1;
        __threadfence();
    }
    last = __shfl_sync(0xffffffff, (int)count, 0) == splits;
    __syncwarp();
"""
FENCE = "        __threadfence();\n"
BARRIER = "    __syncwarp();\n    unsigned"
WRONG = {
    "no fence": (RIGHT.replace(FENCE, ""), "global-race"),
    "each lane its own": ("__threadfence();\n" + RIGHT.replace(FENCE, "") + "__threadfence();\n", "global-race"),
    "counted before all have stored": (
        RIGHT.replace(BARRIER, "    unsigned"), "global-race|merged-too-early"),  # whichever is met first
    "never 0 again": (RIGHT.replace("atomicInc((unsigned*)counter, splits - 1)", "atomicAdd(counter, 1)"),
                      "counter-not-reset"),
    "not acquired": (RIGHT[: RIGHT.rindex(FENCE)] + RIGHT[RIGHT.rindex(FENCE) + len(FENCE) :], "acquire-missing"),
    "not shown to the others": ("".join(RIGHT.rsplit("    __syncwarp();\n", 1)), "global-race"),
    "a barrier of the block": (RIGHT.replace("__syncwarp", "__syncthreads"), "barrier-of-the-block"),
    "one too late": (RIGHT.replace("== splits;", "== splits + 1;"), "nobody-is-last"),
}  # fmt: skip


@pytest.mark.slow
def test_the_last_warp_to_arrive_in_another_style():
    check("12.6", RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.every(2)
def test_an_arrival_that_is_wrong_is_told(name):
    text, slug = WRONG[name]
    assert diagnosis("12.6", text) in slug.split("|")


def by_tokens(script, page_size):
    """The pager with a list of owners per page, and pages as sets of tokens' numbers."""
    sequences, owners, results = [], [], []
    for what, s in script:
        copied = False
        if what == "new":
            sequences.append([[], 0])
        elif what == "fork":
            pages, n = sequences[s]
            for page in pages:
                owners[page] += 1
            sequences.append([pages[:], n])
        elif what == "free":
            for page in sequences[s][0]:
                owners[page] -= 1
        else:
            pages, n = sequences[s]
            copied = n % page_size > 0 and owners[pages[-1]] > 1
            if copied:
                owners[pages.pop()] -= 1
            if copied or n % page_size == 0:
                owners.append(1)
                pages.append(len(owners) - 1)
            sequences[s][1] = n + 1
        results.append([sum(map(bool, owners)), copied])
    return results


def tile_by_tile(lengths, block_n, programs, p):
    tiles = [(s, at, min(at + block_n, n)) for s, n in enumerate(lengths) for at in range(0, n, block_n)]
    share = -(-len(tiles) // programs)
    pieces = []
    for s, first, end in tiles[p * share : (p + 1) * share]:
        if pieces and pieces[-1][0] == s:
            pieces[-1] = (s, pieces[-1][1], end)
        else:
            pieces.append((s, first, end))
    return pieces


STYLES = [
    ("12.1", lambda h, kv, q, e, t, g: (2 * h * q / (kv * e), -(-t * 500 * kv * e // (g * h)))),
    ("12.2", lambda t, n, j, h, p, kv, d: (d * (j % p + p * (h + kv * t[j // p])), -(-n // p) * p - n)),
    ("12.5", lambda r, h, g, m, n: (h * g + r % g, r // g, max(n - m + r // g + 1, 0), (16 - g * m % 16) % 16)),
    ("12.7", by_tokens),
    ("12.8", tile_by_tile),
]


@pytest.mark.parametrize(("id", "fn"), STYLES)
def test_another_style_is_right(id, fn):
    judge(id, fn)


TOLD = [
    ("12.1", lambda h, kv, q, e, t, g: (h * q / kv, -(-t * 500 * kv * e // (g * h))), "intensity"),
    ("12.2", lambda t, n, j, h, p, kv, d: (((t[j // p] * p + j % p) * kv + h) * d, -n % p), "`kv_head` changes faster"),
    ("12.3", lambda os, ls: ((torch.softmax(ls, 0)[..., None] * os).sum(0), ls.logsumexp(0)), "0 * NaN is NaN"),
    ("12.4", lambda n, t, s, least: (RULES["12.4"].fn(n, t, s, least)[0], 1), "share"),
    ("12.5", lambda r, h, g, m, n: (h * g + r // m, r % m, max(n - m + r % m + 1, 0), -g * m % 16), "heads of a query"),
    ("12.7", lambda script, size: [(n, 0) for n, _ in RULES["12.7"].fn(script, size)], "copied"),
    ("12.8", lambda *x: [(s, a, b - 1) for s, a, b in RULES["12.8"].fn(*x)], "end"),
]


@pytest.mark.parametrize(("id", "fn", "words"), TOLD)
def test_a_slip_of_ones_own_is_told(id, fn, words):
    assert words in str(told(id, fn))


@triton.jit
def head_by_head(
    Q_ptr, K_ptr, V_ptr, TABLE_ptr, LENGTHS_ptr, PART_O_ptr, PART_LSE_ptr, width, splits, kv_heads, group, scale_log2,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """12.9 without a dot: one head after the other, sums over products."""
    split, pair = tl.program_id(0) % splits, tl.program_id(0) // splits
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    length = tl.load(LENGTHS_ptr + pair // kv_heads)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    row_ptr = TABLE_ptr + pair // kv_heads * width
    for g in range(0, group):
        head = pair * group + g
        q = tl.load(Q_ptr + head * HEAD_DIM + d).to(tl.float32)
        m = tl.full([1], -1e30, tl.float32)
        l = tl.zeros([1], tl.float32)  # noqa: E741
        o = tl.zeros([HEAD_DIM], tl.float32)
        for tile in range(split * share, split * share + share):
            key = tile * BLOCK_N + n
            page = tl.load(row_ptr + key // PAGE, mask=key < length, other=0).to(tl.int64)
            at = (page * PAGE * kv_heads + key % PAGE * kv_heads + pair % kv_heads) * HEAD_DIM
            k = tl.load(K_ptr + at[:, None] + d[None, :], mask=key[:, None] < length, other=0.0).to(tl.float32)
            v = tl.load(V_ptr + at[:, None] + d[None, :], mask=key[:, None] < length, other=0.0).to(tl.float32)
            s = tl.where(key < length, tl.sum(k * q[None, :], 1) * scale_log2, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 0))
            p = tl.exp2(s - m_new)
            l = l * tl.exp2(m - m_new) + tl.sum(p, 0)  # noqa: E741
            o = o * tl.exp2(m - m_new) + tl.sum(p[:, None] * v, 0)
            m = m_new
        some = l > 0
        tl.store(PART_O_ptr + (head * splits + split) * HEAD_DIM + d, tl.where(some, o / tl.where(some, l, 1.0), 0.0))
        lse = tl.where(some, m / 1.4426950408889634 + tl.log(l), -float("inf"))
        tl.store(PART_LSE_ptr + head * splits + split + tl.arange(0, 1), lse)


@pytest.mark.slow
@pytest.mark.long
def test_a_kernel_in_another_style():
    check("12.9", head_by_head)
