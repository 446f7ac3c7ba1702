"""A model whose sequence lies on several ranks learns as one on a single rank does; what scaling.py says is counted."""

import pytest
import torch

from flashlab.distributed import LAYOUTS, ring_attention, run, shard
from flashlab.distributed.layout import blocks, local_lengths, pairs
from flashlab.distributed.scaling import critical_path, work
from flashlab.distributed.train import fit_split
from flashlab.models.language_model import Config
from flashlab.models.train import distance, fit

TINY = Config(width=32, depth=2, heads=4, kv_heads=2, vocabulary=256, positions=64, attention="flash")
OPTIONS = dict(steps=3, batch=2, seq_len=32)


@pytest.mark.parametrize(("way", "layout"), [("ring", "striped"), ("ulysses", "contiguous")])
def test_losses_are_those_of_one_rank(way, layout):
    """Lecture 13 has the other ways."""
    one = fit(TINY, device="cpu", **OPTIONS)[1]
    found = run(2, lambda link: fit_split(TINY, group=link, way=way, layout=layout, **OPTIONS))
    assert all(distance(losses, one) < 1e-5 for losses in found)
    assert len(set(one)) == 3


def test_a_model_refuses_what_ranks_cannot_share():
    with pytest.raises(ValueError, match="way is 'rings'; it must be 'ring', 'gather', 'ulysses' or 'mesh'"):
        run(2, lambda link: fit_split(TINY, group=link, way="rings", **OPTIONS))
    with pytest.raises(ValueError, match="the sequence has 32 tokens; 'zigzag' over 3 ranks"):
        run(3, lambda link: fit_split(TINY, group=link, **OPTIONS))


def test_work_is_what_a_run_computes_and_zigzag_is_even():
    unit = 8 * 8  # half a shard against half a shard
    table = {layout: critical_path(4, 64, causal=True, layout=layout) / unit for layout in LAYOUTS}
    assert 14 <= table["contiguous"] < 14.5 and 8 <= table["zigzag"] < table["striped"] < 9
    for layout in LAYOUTS:
        rows = work(4, 64, causal=True, layout=layout)
        assert sum(map(sum, rows)) == 64 * 65 // 2
        lengths = local_lengths(64, 4, layout)
        assert rows[1][2] == sum(map(pairs, blocks(2, 1, 4, lengths, causal=True, layout=layout)))
        assert set(map(sum, work(4, 64, causal=False, layout=layout))) == {4 * 16 * 16}


def test_a_trace_notes_what_each_rank_did():
    x, trace = torch.randn(1, 2, 32, 8), []
    run(4, lambda link, x: ring_attention(x, x, x, group=link, causal=True),
        [shard(x, r, 4) for r in range(4)], trace=trace)  # fmt: skip
    done = {(e.step, e.rank): e.amount for e in trace if e.what == "block"}
    rows = work(4, 32, causal=True, layout="zigzag")
    assert done == {(s, r): rows[s][r] for s in range(4) for r in range(4)}
    assert {e.what for e in trace} == {"block", "send", "wait"} and all(e.begin <= e.end for e in trace)
