"""Phase 12's kernels: right against float64, clean under the checks, what the emulator finds without a fence; refusals.

On a GPU the same tests run natively, and more of them.
"""

import itertools

import pytest
import torch
from sequences import DEVICE, Sequences

from flashlab.cuda import decoding
from flashlab.kernels.series import DECODING

FP16, BF16 = torch.float16, torch.bfloat16
LAST = DECODING[-1].name
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")


def run(x: Sequences, name=LAST, *, check=False, defines=(), **options):
    """o and lse of a step; in the emulator nothing may be found."""
    options = {"scale": x.q.shape[-1] ** -0.5} | options
    found = decoding.decode(*x.given, name=name, check=check, defines=defines, **options)
    backend = None if DEVICE.type == "cuda" else "emulator"
    report = decoding.compiled(name, x.q.shape[-1], x.q.dtype, backend, check, defines).report
    assert report is None or not report.findings, report.findings[0]
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
def test_head_sizes_and_dtypes(head_dim, dtype):
    for page in (16, 2, None):
        x = Sequences([130, 33], group=4, head_dim=head_dim, dtype=dtype, page=page, kv_heads=1)
        x.expect(*run(x, sms=2, scale=-0.2), scale=-0.2)


@pytest.mark.parametrize("page", [16, 6])
def test_clean_in_the_check_build(page):
    x = Sequences([0, 300, 33], group=4, queries=2, page=page, head_dim=64, dtype=BF16, kv_heads=2)
    x.expect(*run(x, sms=3, check=True))


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
