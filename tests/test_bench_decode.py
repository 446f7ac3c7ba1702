"""The bench of phase 12: its quick form, a way that is wrong, and what it says of a record."""

import functools
import json

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from flashlab import flash_attention_with_cache
from flashlab.bench import decode, harness, peers
from flashlab.bench.decode import CASES, CUDNN, EVEN, LARGE, MICROSECONDS, ONES, OURS, QUICK, UNEVEN, WHOLE, Case
from flashlab.models.language_model import SIZES, Config

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_the_quick_form_measures_every_way_and_writes_a_record(tmp_path):
    out = tmp_path / "decode.json"
    decode.main(["--quick", "--out", str(out)])
    data = json.loads(out.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    for name in (OURS, WHOLE, ONES, "Triton, pages of 16"):
        assert 0 < rows[name]["fastest"] <= rows[name]["ms"] <= rows[name]["slowest"] and 0 < rows[name]["error"] <= 1
        assert rows[name]["gb_s"] == pytest.approx(2 * 2 * 2 * 70 * 2 * 64 / rows[name]["ms"] / 1e6)
    assert "unavailable" in rows[CUDNN] and not any(goal["met"] for goal in decode.goals(data))


@no_gpu
def test_a_model_writes_in_every_way(monkeypatch):
    monkeypatch.setitem(SIZES, "small", Config(width=128, depth=1, heads=2, vocabulary=64))
    rows = decode.generate({"part": "generate", "batch": 2, "keys": 20}, tokens=2, rounds=1)
    assert [row["name"] for row in rows] == list(decode.WRITERS)
    for row in rows:
        if row["name"].endswith("graph"):
            assert "CUDA" in row["unavailable"]
        else:
            assert row["same"] == 1 and row["ms"] > 0 and row["cache_bytes"] >= 2 * 2 * 2 * 24 * 128
    data = {"rows": rows}
    assert len(decode.table(data).rows) > len(rows)
    for row in rows:
        row.update(batch=1, keys=1024, ms=1.3 if row["name"] == decode.GRAPH else 1.0)
    found = [goal for goal in decode.goals(data) if goal["what"].startswith("a token")]
    assert [goal["met"] for goal in found if goal["found"]] == [True] and len(found) == len(decode.WRITING)


@no_gpu
def test_a_way_that_is_wrong_or_fails_has_no_time(monkeypatch):
    def fails(q, x):
        raise RuntimeError("no such kernel\nand more")

    ways = {"wrong": (16, lambda q, x: lambda: q), "fails": (None, fails)}
    monkeypatch.setattr(decode, "ways", lambda case, part: ways)
    wrong, failed = decode.measure({"part": "work", **QUICK[0]._asdict()})
    assert "wrong: o is off by" in wrong["unavailable"] and wrong["error"] > 1 and "ms" not in wrong
    assert failed["unavailable"] == "no such kernel"


@no_gpu
def test_peers_with_pages_are_right_in_each_setting(monkeypatch):
    def attend(q, k, v, *, seqused_k, page_table):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attention_with_cache(q, k, v, seqused_k, page_table).transpose(1, 2), None

    monkeypatch.setattr(peers, "fa4", lambda name: (attend, ""))
    monkeypatch.setattr(peers, "_compiled_flex", lambda mode: flex_attention)
    monkeypatch.setattr(decode, "RAGGED", (64, 1, 70, 33))
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    case = Case(4, 8, 2, 42, 64, ragged=True)
    (q,) = harness.draw((4, 8, 1, 64), dtype=torch.float32)
    for page in (16, 128):
        x = decode.Filled(case, page, 0)
        settings = {n: functools.partial(decode._flex, whole) for n, whole in (("one", False), ("two", True))}
        for make in (decode._fa4, *settings.values()):
            assert decode.off(case, q, x, make(q, x)()) <= 1
        best = decode.Fastest(case, settings | {"wrong": lambda q, x: lambda: q})
        best(q, x)
        assert best.told["setting"] in settings and "wrong" in best.told["refused"]["wrong"]


def record(ours, **others):
    names = {OURS: ours, WHOLE: 1.0, ONES: 1.1, CUDNN: 1.0} | others
    rows = [{"part": "work", **case._asdict(), "name": n, "ms": ms} for case in CASES for n, ms in names.items()]
    return {"rows": rows}


def test_goals_are_judged_from_the_record():
    good, bad = (decode.goals(record(ours)) for ours in (0.006, 1.04))
    assert len(good) == 3 * len(LARGE) + len(MICROSECONDS) + 1 == len(bad)
    assert all(goal["met"] for goal in good)
    met = {goal["what"]: goal["met"] for goal in bad if tuple(goal["case"]) in (LARGE[0], UNEVEN)}
    assert met == {"speed, of cuDNN's": False, "pages of 16, of a contiguous cache's time": False,
                   "pages of 1, the same": True, "microseconds": False, "time, of its even twin's": True}  # fmt: skip
    assert not any(goal["met"] for goal in decode.goals({"rows": []}))
    assert sum(UNEVEN.lengths) - sum(EVEN.lengths) < 16 and len(UNEVEN.lengths) == UNEVEN.batch
