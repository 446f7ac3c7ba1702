"""The model of clocks: what a block did gets a time, and warpgroups wait where they have to."""

from __future__ import annotations

import pytest

from flashlab.simt import replay as model
from flashlab.simt.replay import replay
from flashlab.simt.report import Counters, Event, Launch

SCORES, OUTPUT = 10, 20  # lines


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    monkeypatch.setattr(model, "COPY_CLOCKS", 100)


def launch(*warps: tuple[int, list[tuple]], threads: int) -> Launch:
    """Of (warp, [(did, line, values), ...])."""
    events = [Event(0, warp, did, line, values) for warp, did_all in warps for did, line, values in did_all]
    return Launch("k", (1, 1, 1), (threads, 1, 1), 0, Counters({}), {}, events)


def product(first: int, count: int, n: int, line: int) -> list[tuple]:
    return [("wgmma", line, (first + i, n)) for i in range(count)]


def test_a_warpgroup_alone_waits_for_its_products_and_then_exponentiates():
    did = [*product(1, 4, 128, SCORES), ("wait", 1, (4, 0)), *product(5, 1, 64, OUTPUT), ("wait", 2, (5, 0))]
    found = replay(launch((0, did), threads=128), [SCORES])
    (scores,), (output,), (exponentials,) = found.of("scores"), found.of("output"), found.of("exponentials")
    assert (scores.begin, scores.end) == (0, 4 * 64)
    assert (exponentials.begin, exponentials.end) == (256, 256 + 64 * 128 / 16)
    assert (output.begin, output.end) == (768, 768 + 32) and found.clocks == 800
    assert [(s.begin, s.end) for s in found.of("products")] == [(4, 256), (769, 800)]
    assert found.share == (256 + 32) / 800 and found.groups == [0]


def test_two_warpgroups_share_a_unit():
    did = [*product(1, 2, 128, SCORES), ("wait", 1, (2, 0))]
    found = replay(launch((0, did), (4, did), threads=256), [SCORES])
    assert sum(s.end - s.begin for s in found.of("scores")) == 4 * 64 == max(s.end for s in found.of("scores"))
    ends = [s.end for s in found.of("exponentials")]
    assert len(ends) == 2 and max(ends) == found.clocks == 192 + 2 * 512  # the unit is never without work from 192 on


@pytest.mark.parametrize("stages, waits", [(1, 3), (2, 0)])
def test_a_producer_waits_for_the_release_of_a_stage_and_a_consumer_for_bytes(stages, waits):
    """4 copies of 6400 bytes: 100 clocks of the engine and 100 on the way, each read for a moment."""
    producer, consumer = [], []
    for i in range(4):
        full, empty, parity = 8 * (i % stages), 100 + 8 * (i % stages), i // stages % 2
        producer += [("mbarrier-wait", 1, (empty, parity ^ 1)), ("arrive", 2, (full, 6400)), ("load", 3, (0, 6400))]
        consumer += [("mbarrier-wait", 4, (full, parity)), ("arrive", 5, (empty, 0))]
    found = replay(launch((0, consumer), (4, producer), threads=160), [])
    assert len(found.of("bytes")) == 4 and len(found.of("copy")) == 4
    assert (len(found.of("release")) >= waits) and (found.clocks > 700 if stages == 1 else found.clocks < 620)


def test_named_barriers_pass_a_turn_on():
    turns = [("barrier", 1, (1, 256)), *product(1, 2, 128, SCORES), ("barrier-arrive", 2, (2, 256))]
    second = [("barrier-arrive", 3, (1, 256)), ("barrier", 1, (2, 256)), *product(1, 2, 128, SCORES)]
    found = replay(launch((0, turns), (4, second), threads=256), [SCORES])
    assert [(s.group, s.begin, s.end) for s in found.of("scores")] == [(0, 0, 128), (1, 128, 256)]  # not interleaved
    assert [s.group for s in found.of("barrier")] == [1]


def test_what_does_not_fit_together_is_said():
    with pytest.raises(ValueError, match="make the call with timeline=1"):
        replay(launch(threads=128), [])
    stuck = [("mbarrier-wait", 7, (8, 0))]
    with pytest.raises(ValueError, match="warp 0 cannot go on at mbarrier-wait in line 7"):
        replay(launch((0, stuck), threads=128), [])
