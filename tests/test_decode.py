"""Decoding over a cache: the kernels and their door, whole caches and pages, against float64; refusals, fakes."""

from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from drawn import far_apart, needs_room
from sequences import DEVICE, FLOAT32, NAN, Sequences

from flashlab import flash_attention_with_cache
from flashlab.attention import cache_door, decode
from flashlab.attention.tiles import Tile
from flashlab.cuda import decoding
from flashlab.kernels.series import DECODING

BF16 = torch.bfloat16
DTYPES = (torch.float16, BF16, FLOAT32)
SMALL = Tile(16, 16, 4, 2)
TWO = ("triton", "reference")
DEFAULT = DECODING[-1].name  # tests/cuda/test_decoding.py has more of it
THREE = (*TWO, DEFAULT)


def sizes(backend, head_dim=16):
    """What Sequences are told that a backend should take."""
    return {"head_dim": 64, "dtype": BF16} if backend == DEFAULT else {"head_dim": head_dim}


@pytest.mark.parametrize("backend", TWO)
@pytest.mark.parametrize("page", [1, 3, 16, 256, None])
def test_lengths_around_a_page(page, backend):
    edge = page or 16
    x = Sequences([0, 1, max(edge - 1, 2), edge, edge + 1, 40], page=page)
    x.expect(*flash_attention_with_cache(*x.given, backend=backend, return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128, 256])
def test_head_sizes_and_dtypes(head_dim, dtype):
    x = Sequences([70, 33], kv_heads=1, group=4, head_dim=head_dim, dtype=dtype)
    x.expect(*flash_attention_with_cache(*x.given, backend="triton", return_lse=True))


@pytest.mark.parametrize(
    "group, queries", [(1, 1), (1, 16), (2, 4), (3, 2), (4, 1), (5, 3), (8, 1), (8, 4), (16, 1), (16, 3), (3, 16)]
)
@pytest.mark.every(2)
def test_a_group_and_its_queries_are_the_rows_of_one_tile(group, queries):
    """Also where they are more than a tile has, and where a sequence has fewer keys than queries."""
    x = Sequences([3, 50], kv_heads=1 if group > 3 else 2, group=group, queries=queries, page=5)
    x.expect(*decode.decode(*x.given, splits=2, tile=None if queries < 16 else SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("length", [8193, pytest.param(65537, marks=pytest.mark.long)])
def test_a_long_sequence_and_the_rules_own_splits(length):
    x = Sequences([length, 12], group=1, kv_heads=1, head_dim=64, dtype=BF16)
    x.expect(*decode.decode(*x.given))


@pytest.mark.parametrize("fused", [False, True], ids=["two launches", "last to arrive"])
@pytest.mark.parametrize("splits", [2, 3, 40])
def test_splits_and_their_merge(splits, fused):
    """Shares that are empty, whole sequences without a key, and parts that no program wrote o of."""
    x = Sequences([0, 17, 70], head_dim=24, kv_heads=1, queries=2, page=4)
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        new = empty(self, *args, **kwargs)
        return new.fill_(NAN) if new.is_floating_point() else new

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        found = decode.decode(*x.given, splits=splits, fused=fused, tile=SMALL)
    x.expect(*found)


@pytest.mark.parametrize(
    "options", [dict(left=0), dict(left=20), dict(left=20, softcap=2.0), dict(scale=-0.3)], ids=str
)
def test_windows_softcaps_and_scales(options):
    x = Sequences([5, 40, 100], queries=3, head_dim=16, page=16)
    door = {("window" if name == "left" else name): value for name, value in options.items()}
    for backend in TWO:
        x.expect(*flash_attention_with_cache(*x.given, backend=backend, return_lse=True, **door), **door)
    x.expect(*decode.decode(*x.given, splits=3, tile=SMALL, **options), **door)


@pytest.mark.parametrize("backend", THREE)
@pytest.mark.parametrize("page", [1, 4, None])
def test_new_keys_are_appended_in_place_and_seen(page, backend):
    x = Sequences([0, 3, 4, 21], page=page, queries=2, spare=3, **sizes(backend, 24))
    before = x.lengths.clone()
    given = Sequences([2, 2, 2, 2], page=None, **sizes(backend, 24))
    k_new, v_new = torch.cat(given.k), torch.cat(given.v).mT.contiguous().mT
    if x.table is not None:  # pages for them
        free = sorted(set(range(len(x.k_cache))) - set(x.table[x.table >= 0].tolist()))
        for i, n in enumerate(before.tolist()):
            for j in range(-(-n // page), -(-(n + 2) // page)):
                x.table[i, j] = free.pop()
    want = [x.k_cache.clone(), x.v_cache.clone()]
    for i, n in enumerate(before.tolist()):
        for cache, new in zip(want, (k_new, v_new), strict=True):
            x.write(cache, i, range(n, n + 2), new[i : i + 1])
        x.k[i], x.v[i] = (torch.cat([a[i], b[i : i + 1]], 2) for a, b in ((x.k, k_new), (x.v, v_new)))
    x.expect(*flash_attention_with_cache(*x.given, k_new=k_new, v_new=v_new, backend=backend, return_lse=True))
    assert torch.equal(x.lengths, before)
    torch.testing.assert_close([x.k_cache, x.v_cache], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", THREE)
def test_any_strides(backend):
    """Pages as [pages, page, kv_heads, head_dim], columns apart, a table that lies by columns, 64-bit numbers."""
    x = Sequences([9, 30, 0], page=4, queries=2, **sizes(backend))
    k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (x.k_cache, x.v_cache))
    v = v if backend == DEFAULT else v.mT.contiguous().mT  # which does not take such columns
    q, table = x.q.mT.contiguous().mT, x.table.long().mT.contiguous().mT
    lengths = torch.stack([x.lengths.long()] * 2, 1)[:, 0]
    o, lse = flash_attention_with_cache(q, k, v, lengths, table, backend=backend, return_lse=True)
    assert o.stride() == torch.empty_like(q).stride()
    x.expect(o, lse)


def test_a_length_beyond_the_room_is_cut_by_the_kernel():
    x = Sequences([32, 16], spare=0, page=16)
    x.table[1] = x.table[1].clamp(min=0)
    o, lse = decode.decode(x.q, x.k_cache, x.v_cache, x.lengths + torch.tensor([5, 0], device=DEVICE), x.table)
    x.expect(o, lse)


@needs_room
@pytest.mark.parametrize("axis", [0, 2], ids=["pages", "keys"])
def test_offsets_of_more_than_32_bits(axis):
    """A sequence whose one key is in the third page, or one of three keys; the last one is new."""
    x = Sequences([1 + axis], kv_heads=1, dtype=torch.float16, page=None, spare=0)
    k_new, v_new = x.k[0][:, :, -1:], x.v[0][:, :, -1:]
    k_cache, v_cache = (torch.cat([y] * (3 - axis)) for y in (x.k[0], x.v[0]))
    k_cache[-1, :, -1] = v_cache[-1, :, -1] = NAN
    table = None if axis else torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    given = x.q, *far_apart((k_cache, v_cache), axis), x.lengths - 1, table
    x.expect(*flash_attention_with_cache(*given, k_new=k_new, v_new=v_new, backend="triton", return_lse=True))


@pytest.mark.parametrize("backend", THREE)
def test_pytorch_finds_nothing_wrong_with_the_operators(backend):
    x = Sequences([3, 18], **sizes(backend))
    x.table.clamp_(min=0)
    options = 0.25, None if backend == DEFAULT else 7, None, 0, backend
    torch.library.opcheck(torch.ops.flashlab.decode.default, (*x.given, *options))
    cache, new = torch.zeros_like(x.k_cache), x.q[:, ::2].clone()
    append = torch.ops.flashlab.append_to_cache.default
    torch.library.opcheck(append, (cache, cache.clone(), new, new, x.lengths, x.table, backend))


def test_one_graph_under_compile():
    x = Sequences([3, 18], head_dim=16, spare=2)
    x.table[x.table < 0] = 0
    new = torch.ones(2, 2, 1, 16, device=DEVICE)

    def step(q, k, v, lengths, table, new):
        return flash_attention_with_cache(q, k, v, lengths, table, k_new=new, v_new=new)

    def cleared():
        return x.q, x.k_cache.nan_to_num(), x.v_cache.nan_to_num(), x.lengths, x.table, new

    first, second = cleared(), cleared()
    o = torch.compile(step, fullgraph=True, backend="aot_eager")(*first)
    torch.testing.assert_close(o, step(*second))
    assert torch.equal(first[1], second[1])


def test_the_bare_kernels_refuse_what_wants_a_derivative():
    x = Sequences([5], head_dim=64, dtype=BF16)
    lengths = x.lengths - 1
    for function in (decode.decode, decoding.decode):
        with pytest.raises(ValueError, match="k_cache requires a gradient, and this kernel's result has none"):
            function(x.q, x.k_cache.clone().requires_grad_(), *x.given[2:], scale=0.1)
        with forward_ad.dual_level(), pytest.raises(ValueError, match="q has a tangent"):
            function(forward_ad.make_dual(x.q, x.q), *x.given[1:], scale=0.1)
    new = torch.ones(1, x.k_cache.shape[1], 1, 64, dtype=BF16, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match="k_new requires a gradient"):
        decode.append(x.k_cache, x.v_cache, new, new, lengths, x.table)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CUDA graph is recorded on a GPU")
@pytest.mark.parametrize("fused", [False, True], ids=["two launches", "last to arrive"])
def test_a_cuda_graph_replays_with_other_lengths(fused):
    x = Sequences([200, 900], kv_heads=2, group=4, head_dim=64, dtype=BF16)
    lengths = torch.ones_like(x.lengths)
    given = *x.given[:3], lengths, x.table
    decode.decode(*given, fused=fused, splits=8)  # compiled before it is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode.decode(*given, fused=fused, splits=8)
    for _ in range(3):
        lengths.copy_(x.lengths)
        graph.replay()
        x.expect(*found)


def replaced(**changes):
    x = Sequences([3, 18], spare=0)
    x.table.clamp_(min=0)
    names = ("q", "k_cache", "v_cache", "lengths", "page_table")
    given = dict(zip(names, x.given, strict=True))
    return given | {name: change(given.get(name)) for name, change in changes.items()}


def is_(value):
    return lambda _: value


NEW = torch.zeros(2, 2, 1, 16, device=DEVICE)
WRONG = [
    (dict(q=lambda q: q[0]), ValueError, "q must be .* it has 3 dimensions"),
    (dict(q=lambda q: q.half()), TypeError, "one dtype for all three.* k_cache is torch.float32"),
    (dict(v_cache=lambda v: v[:-1]), ValueError, "k_cache is .* and v_cache is"),
    (dict(page_table=is_(None)), ValueError, "one batch size .* q has 2, k_cache has 6"),
    (dict(lengths=is_([3, 18])), TypeError, r"lengths is a list; a torch.Tensor is needed, \[batch\]"),
    (dict(lengths=lambda x: x.float()), TypeError, "lengths is torch.float32; it counts, .*torch.int32 or torch.int64"),
    (dict(lengths=lambda x: x[:1]), ValueError, r"lengths is \[1\]; with a batch of 2 it must be \[batch\]"),
    (dict(lengths=lambda x: x.to("meta")), ValueError, "lengths is on meta and q on .* one device"),
    (dict(page_table=lambda x: x[0]), ValueError, r"page_table is \[2\]; .* it must be \[batch, width\]"),
    (dict(k_cache=lambda x: x[:, :, :0], v_cache=lambda x: x[:, :, :0]), ValueError, "a page has room for at"),
    (dict(k_new=is_(NEW)), ValueError, "k_new and v_new go together"),
    (dict(k_new=is_(NEW[:1]), v_new=is_(NEW[:1])), ValueError, "one batch size .* k_new has 1"),
    (dict(k_new=is_(NEW[:, :1]), v_new=is_(NEW[:, :1])), ValueError, "k_new has 1 heads, but k_cache has 2"),
    (
        dict(k_new=is_(NEW.expand(2, 2, 40, 16)), v_new=is_(NEW.expand(2, 2, 40, 16))),
        ValueError, "k_new has 40 keys per sequence, and there is room for 32: page_table is 2 pages wide",
    ),
    (dict(backend=is_("cuda")), ValueError, "backend is 'cuda'; it must be auto, triton, reference or p12_decode"),
    (dict(softcap=is_(-1.0)), ValueError, "softcap is -1.0"),
    # What the elements say
    (dict(lengths=lambda x: x + 15), ValueError, r"lengths\[1\] is 33; sequence 1 has room for 0 to 32 keys: p"),
    (dict(lengths=lambda x: x - 4), ValueError, r"lengths\[0\] is -1; sequence 0"),
    (
        dict(lengths=lambda x: x + 14, k_new=is_(NEW), v_new=is_(NEW)),
        ValueError, r"lengths\[1\] is 32 and 1 new ones; sequence 1 has room for 0 to 32 keys",
    ),
    (dict(page_table=lambda x: x + 6), ValueError, r"page_table\[0, 0\] is \d+; the pages of k_cache are 0 to 5"),
    (dict(page_table=lambda x: x - 6), ValueError, r"page_table\[0, 0\] is -\d; .* sequence 0 has 3 keys in 1 pages"),
]  # fmt: skip


@pytest.mark.parametrize("changes, error, sentence", WRONG, ids=[sentence[:40] for *_, sentence in WRONG])
def test_refusals(changes, error, sentence):
    with pytest.raises(error, match=sentence):
        flash_attention_with_cache(**replaced(**changes), check=True)


def test_a_backend_says_what_it_does_not_take():
    x = Sequences([3], head_dim=272)
    with pytest.raises(ValueError, match="backend is 'triton', which does not take .* head_dim up to 256"):
        flash_attention_with_cache(*x.given, backend="triton")
    x.expect(*flash_attention_with_cache(*x.given, return_lse=True))
    assert cache_door._choose(*x.given[:3], None, None, "auto") == "reference"
