"""Phase 12's kernels: right against float64, clean under the checks; refusals. Without its fences: lecture 12.

On a GPU the same tests run natively, and more of them. Layouts, new keys and opcheck: tests/test_decode.py.
"""

import itertools

import pytest
import torch
from sequences import DEVICE, Sequences

from flashlab import flash_attention_with_cache
from flashlab.cuda import decoding, operators
from flashlab.kernels.series import DECODING

FP16, BF16 = torch.float16, torch.bfloat16
*EARLY, LAST = (s.name for s in DECODING)
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
counted = pytest.mark.skipif(DEVICE.type == "cuda", reason="the emulator counts")


def run(x: Sequences, name=LAST, *, check=False, defines=(), **options):
    """o and lse of a step; in the emulator nothing may be found."""
    options = {"scale": x.q.shape[-1] ** -0.5} | options
    if name == LAST and not defines and DEVICE.type == "cpu":  # half the warps to emulate
        defines = decoding.SMALLER[x.q.shape[-1]]
    found = decoding.decode(*x.given, name=name, check=check, defines=defines, **options)
    if name in EARLY[:4]:
        defines = (*defines, ("ROWS", x.q.shape[1] // x.k_cache.shape[1]))
    built = decoding.compiled(name, x.q.shape[-1], x.q.dtype, decoding.backend_for(x.q, check), check, defines)
    assert built.report is None or not built.report.findings, built.report.findings[0]
    return found


@pytest.mark.parametrize("sms", [1, 5])
@pytest.mark.parametrize("page", [1, 3, 16, 48, 256, None])
def test_lengths_around_a_page(page, sms):
    edge = page or 16
    x = Sequences([0, 1, max(edge - 1, 2), edge, edge + 1, 40], page=page, head_dim=64, dtype=BF16, kv_heads=1)
    x.expect(*run(x, sms=sms))


GROUPS = [(1, 1), (2, 4), (3, 2), (4, 1), (5, 3), (8, 2), (16, 1), (1, 16), (6, 7), (16, 16)]


@pytest.mark.parametrize(("group", "queries"), GROUPS)
def test_a_group_and_its_queries_are_the_rows(group, queries):
    """Also where they are more than a block has, and where a sequence has fewer keys than queries."""
    x = Sequences([3, 150], group=group, queries=queries, page=5, head_dim=64, dtype=BF16, kv_heads=2)
    x.expect(*run(x, sms=3))


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)], ids=str)
@pytest.mark.every(3)
def test_head_sizes_and_dtypes(head_dim, dtype):
    for page in (16, 2, None):
        x = Sequences([130, 33], group=4, head_dim=head_dim, dtype=dtype, page=page, kv_heads=1)
        x.expect(*run(x, sms=2, scale=-0.2), scale=-0.2)


@pytest.mark.parametrize("check", [False, pytest.param(True, marks=pytest.mark.long)], ids=["fast", "watched"])
@pytest.mark.parametrize("name", EARLY)
@pytest.mark.every(2)
def test_every_step(name, check):
    sizes = {"group": 4, "kv_heads": 2, "head_dim": 64, "dtype": BF16}
    if name in EARLY[:2]:
        x = Sequences([130, 130], page=None, spare=0, **sizes)
    else:
        x = Sequences([0, 130, 33, 300], page=12, **sizes)
    options = {"splits": 3} if name in EARLY[1:6] else {"sms": 3}
    for _ in range(2):  # the counters are as they were
        x.expect(*run(x, name, check=check, **options))


CLUSTER = decoding.CLUSTER


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("page", [16, 5, None])
@pytest.mark.every(3)
def test_parts_meet_in_a_cluster(page, size):
    """NaN behind each length: first tiles are copied before it is known."""
    x = Sequences([0, 1, 15, 33, 300], page=page, head_dim=64, dtype=BF16, kv_heads=2, group=2, queries=3)
    x.expect(*run(x, CLUSTER, splits=size, defines=(("WARPS", 2),)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.every(2)
def test_cluster_head_sizes_and_groups_that_are_more_rows_than_a_block_has(head_dim):
    x = Sequences([130], group=6, queries=4, head_dim=head_dim, dtype=BF16, kv_heads=1)
    x.expect(*run(x, CLUSTER, splits=5, scale=-0.2, defines=(("WARPS", 2),)), scale=-0.2)


def test_a_cluster_is_clean_and_its_parts_do_not_go_through_memory():
    x = Sequences([300], group=4, head_dim=64, dtype=BF16, kv_heads=1)
    x.expect(*run(x, CLUSTER, check=True, splits=3, defines=(("WARPS", 2),)))
    if DEVICE.type == "cpu":
        report = decoding.compiled(CLUSTER, 64, BF16, "emulator", True, (("WARPS", 2),)).report
        assert report.counters["global_atomics"] == 0 and len(report.launches) == 1


@on_gpu
def test_one_sequence_takes_clusters_that_run_at_once():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    sizes = [decoding.cluster_blocks(DEVICE, 64, BF16, heads, 1024) for heads in (1, 4, 16, 200)]
    assert sizes[:2] == [16, 16] and 4 <= sizes[2] < 16 and sizes[3] is None
    assert decoding.cluster_blocks(DEVICE, 64, BF16, 4, 64) == 8  # with 16, half of the warps would have no tile
    for heads in (1, 4, 16):
        x = Sequences([3000], group=4, head_dim=64, dtype=BF16, kv_heads=heads)
        x.expect(*decoding.decode(*x.given, scale=0.125))


def test_a_step_says_what_it_does_not_take():
    sizes = {"head_dim": 64, "dtype": BF16}
    with pytest.raises(ValueError, match="p12_2_splits takes a contiguous cache: pages begin with p12_3_pages"):
        run(Sequences([3], **sizes), "p12_2_splits")
    with pytest.raises(ValueError, match="p12_7_shares takes one query per sequence"):
        run(Sequences([3], queries=2, **sizes), "p12_7_shares")
    with pytest.raises(ValueError, match="a cluster of p12_side_cluster has 1 to 16 blocks, and splits is 17"):
        run(Sequences([3], **sizes), CLUSTER, splits=17)
    q = torch.zeros(1, 1, 2, 64).half()
    with pytest.raises(KeyError, match="p12_decode reads a cache"):
        operators.attention("p12_decode", q, q, q)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.every(2)
def test_the_macros_of_a_large_gpu(head_dim):
    x = Sequences([400, 33], group=4, page=16, head_dim=head_dim, dtype=BF16, kv_heads=1)
    warps = 4 if head_dim == 256 else 8
    x.expect(*run(x, sms=2, defines=(("WARPS", warps),)))


@pytest.mark.parametrize("page", [16, 6])
def test_clean_in_the_check_build(page):
    x = Sequences([0, 300, 33], group=4, queries=2, page=page, head_dim=64, dtype=BF16, kv_heads=2)
    x.expect(*run(x, sms=3, check=True))


@counted
@pytest.mark.parametrize("group", [1, 8])
def test_a_key_is_read_once_for_a_whole_group_without_bank_conflicts_in_one_launch(group):
    x = Sequences([192, 33], group=group, page=None, head_dim=64, dtype=BF16, kv_heads=2)
    run(x, sms=3, check=True)
    report = decoding.compiled(LAST, 64, BF16, "emulator", True, decoding.SMALLER[64]).report
    counted = report.counters
    assert counted["cp_async_bytes"] == 2 * 2 * 64 * (192 + 33) * 2
    assert counted["ldmatrix_wavefronts"] == counted["ldmatrix_ideal"] and len(report.launches) == 1


@counted
def test_an_even_batch_is_not_cut_for_the_sake_of_a_few_blocks():
    """11 sequences and 12 blocks, of which one stays idle; only where they are uneven is anything merged."""
    for lengths, merged in (([320] * 11, False), ([320] * 10 + [700], True)):
        x = Sequences(lengths, head_dim=64, dtype=BF16, kv_heads=1)
        x.expect(*run(x, sms=6, check=True))
        report = decoding.compiled(LAST, 64, BF16, "emulator", True, decoding.SMALLER[64]).report
        assert bool(report.counters["global_atomics"]) == merged


@on_gpu
@pytest.mark.parametrize(("head_dim", "dtype"), [*itertools.product((64, 128, 256), (FP16, BF16))], ids=str)
@pytest.mark.parametrize("page", [1, 5, 16, 64, 256, None])
def test_many_lengths_natively(page, head_dim, dtype):
    edge = page or 16
    lengths = [0, 1, max(edge - 1, 2), edge, edge + 1, 700, 4097, 65537]
    for group, queries in ((1, 1), (4, 1), (8, 2), (16, 1), (3, 5)):
        x = Sequences(lengths, group=group, queries=queries, page=page, head_dim=head_dim, dtype=dtype, kv_heads=1)
        x.expect(*run(x))


@on_gpu
def test_a_cuda_graph_replays_with_other_lengths():
    x = Sequences([200, 9000], group=4, head_dim=64, dtype=BF16)
    given = *x.given[:3], torch.ones_like(x.lengths), x.table
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decoding.decode(*given, scale=0.125)  # built before it is recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = decoding.decode(*given, scale=0.125)
        for n in (1, 300, 0):
            given[3].copy_((x.lengths - n).clamp(min=0))
            graph.replay()
        given[3].copy_(x.lengths)
        graph.replay()
        torch.cuda.synchronize()
    x.expect(*found)


def test_nothing_at_all():
    for x in (Sequences([0, 0], head_dim=64, dtype=BF16), Sequences([0], page=None, spare=-1, head_dim=64, dtype=BF16)):
        o, lse = flash_attention_with_cache(*x.given, backend=LAST, return_lse=True)
        assert (o == 0).all() and torch.isneginf(lse).all()
        assert flash_attention_with_cache(x.q[:, :, :0], *x.given[1:], backend=LAST).numel() == 0


def columns_apart(c):
    return c.mT.contiguous().mT


def beside(c):
    return torch.cat([c, c], -1)[..., 1:65]


@pytest.mark.parametrize(
    ("sizes", "change", "options", "said"),
    [
        ({"dtype": torch.float32}, None, {}, "float16 or bfloat16 .* q is torch.float32 with 64"),
        ({"head_dim": 96}, None, {}, "a head_dim of 64, 128 or 256, and q is torch.bfloat16 with 96"),
        ({}, None, {"window": 3}, "neither window nor softcap"),
        ({}, None, {"softcap": 3.0}, "neither window nor softcap"),
        ({}, columns_apart, {}, "k_cache has strides .* rows must be contiguous"),
        ({}, beside, {}, "k_cache begins 2 bytes behind a 16-byte boundary"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_it_does_not_take(sizes, change, options, said):
    x = Sequences([3], **{"head_dim": 64, "dtype": BF16} | sizes)
    k_cache = change(x.k_cache) if change else x.k_cache
    with pytest.raises(ValueError, match=said):
        flash_attention_with_cache(x.q, k_cache, *x.given[2:], backend=LAST, **options)
