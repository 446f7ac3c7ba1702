"""Who has which tokens, and which blocks a rank computes: held against a mask of the whole sequence."""

import pytest
import torch

from flashlab.attention.options import visible
from flashlab.distributed import LAYOUTS, positions, shard, unshard
from flashlab.distributed.layout import blocks, local_lengths, pairs, places

CASES = [(world, layout, documents) for world in (1, 2, 3, 4) for layout in LAYOUTS for documents in (None, (24, 48))]


@pytest.mark.parametrize(("world", "layout", "documents"), CASES)
def test_every_token_is_on_one_rank_and_comes_back(world, layout, documents):
    x = torch.arange(72.0)[:, None].expand(72, 3)
    options = dict(layout=layout, documents=documents)
    parts = [shard(x, rank, world, **options) for rank in range(world)]
    assert {len(part) for part in parts} == {72 // world}
    assert sorted(torch.cat(parts)[:, 0].tolist()) == list(range(72))
    assert torch.equal(unshard(parts, **options), x)
    for rank in range(world):
        stand = positions(72, rank, world, **options)
        want = places(72, rank, world, **options)
        assert torch.equal(stand, want if documents is None else want - 24 * (want >= 24))


@pytest.mark.parametrize(("world", "layout", "documents"), CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_blocks_of_all_steps_are_the_mask_each_pair_once(world, layout, documents, causal):
    lengths = local_lengths(72, world, layout, documents)
    seen = torch.zeros(72, 72, dtype=torch.int)
    for rank in range(world):
        mine = places(72, rank, world, layout=layout, documents=documents)
        for source in range(world):
            theirs = places(72, source, world, layout=layout, documents=documents)
            for block in blocks(rank, source, world, lengths, causal=causal, layout=layout):
                rows, keys = mine[block.rows], theirs[block.keys]
                mask = visible(len(rows), len(keys), block.causal).int()
                seen[rows[:, None], keys] += mask
                assert pairs(block) == mask.sum()
    document = torch.arange(72) >= (24 if documents else 0)
    want = visible(72, 72, causal) & (document[:, None] == document[None, :])
    assert torch.equal(seen, want.int())


def test_a_mesh_shares_a_shard_of_the_ring():
    x = torch.arange(16.0)[:, None]
    parts = [shard(x, rank, 4, heads=2) for rank in range(4)]
    assert [part[:, 0].tolist() for part in parts] == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(unshard(parts, heads=2), x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: shard(x, 0, 4), "100 tokens; 'zigzag' over 4 ranks cuts it into 8 equal pieces: pad it to 104"),
        (lambda x: shard(x, 0, 3, layout="striped"), "pad it to 102"),
        (lambda x: shard(x, 0, 4, documents=(64, 36)), "document 1 has 36 tokens"),
        (lambda x: shard(x, 0, 4, documents=(64, 16)), "their sum must be 100"),
        (lambda x: shard(x, 4, 4, layout="striped"), "of 4 ranks it is 0 to 3"),
        (lambda x: shard(x, 0, 4, layout="zig-zag"), "it must be 'contiguous', 'zigzag' or 'striped'"),
        (lambda x: shard(x, 0, 4, heads=3), "4 ranks do not form groups of 3"),
        (lambda x: shard(x[:98], 0, 4, heads=4, layout="contiguous"), "not shared evenly"),
    ],
)
def test_what_does_not_divide_gets_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(100, 1))
