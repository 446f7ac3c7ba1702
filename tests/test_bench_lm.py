"""The bench of the language model, on a CPU: its passes, its memory, the longest text, the readers of a record."""

import json

import pytest
import torch

from flashlab.bench import harness, lm, peers
from flashlab.bench.lm import PASSES, TINY, WAYS

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
TURNS = {"part": "turns", "size": "tiny", "dtype": "float32", "what": "attention"}


@no_gpu
def test_a_pass_that_takes_long_is_seen_in_its_place(monkeypatch):
    training = lm.Training(TINY, "float32", 1, 16)
    ticks = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(lm.time, "perf_counter", lambda: next(ticks))
    assert lm.timed_step(training) == {"forward": 1e3, "backward": 3e3, "optimizer": 6e3, "step": 1e4}


# ---- memory ----------------------------------------------------------------------------------------------------------
@no_gpu
@pytest.mark.long
def test_out_of_memory_is_the_last_row_of_a_limit(monkeypatch):
    right = lm.Training

    def training(shape, *rest):
        if shape.positions > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32 GiB")
        return right(shape, *rest)

    monkeypatch.setattr(lm, "Training", training)
    rows = lm.measure({"part": "limit", "size": "tiny", "attention": "eager", "dtype": "float32"})
    assert [r["seq_len"] for r in rows] == [16, 32, 64] and "once_ms" in rows[1]
    assert rows[-1]["unavailable"].startswith("out of memory")
    data = {"rows": rows, "machine": {"gpu": None}}
    assert lm.runs_out(data) == {"eager": 64} and "out of memory" in repr(lm.limit_table(data))


# ---- runs ------------------------------------------------------------------------------------------------------------
@no_gpu
@pytest.mark.long
def test_the_quick_bench_runs_here(tmp_path, capsys):
    out = tmp_path / "lm.json"
    lm.main(["--quick", "--out", str(out)])
    data = json.loads(out.read_text())
    assert data["left"] == 0 and {row["part"] for row in data["rows"]} == {job["part"] for job in lm.jobs()}
    assert not harness.waiting(lm.quick_jobs(), data["rows"]), "a job's rows say all that the job says"
    assert "tiny" in capsys.readouterr().out and len(lm.losses(data)["eager"]) == 5
    step = {row["pass"]: row for row in data["rows"] if row["part"] == "step" and row["attention"] == "eager"}
    assert set(step) == {*PASSES, "step", "forward only"} and step["step"]["tokens"] == 32
    assert all(0 < r["fastest"] <= r["ms"] <= r["slowest"] and len(r["warm_up_ms"]) == 2 for r in step.values())
    assert sum(step[n]["warm_up_ms"][0] for n in PASSES) == pytest.approx(step["step"]["warm_up_ms"][0])
    (held,) = [row for row in data["rows"] if row["part"] == "memory"]
    assert len(held["us"]) == len(held["bytes"]) <= lm.SERIES and held["us"] == sorted(held["us"])
    assert held["peak_bytes"] == max(held["bytes"]) > TINY.depth * TINY.heads * 32 * 32 * 4 and held["drift"] == 0
    highest = held["us"][held["bytes"].index(held["peak_bytes"])]
    assert 0 < held["ends"]["forward"] and highest < held["ends"]["backward"] < held["ends"]["optimizer"]


@pytest.mark.long
def test_what_is_exchanged_takes_turns_in_one_run(monkeypatch):
    """One model: of the five ways nothing but attention and RoPE differs."""
    made, right = [], lm.Training

    def training(*arguments, **options):
        made.append(right(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(lm, "Training", training)
    asked: list[tuple[str, bool]] = []

    def timed(training):
        cores = {(block.attention.core.attention, block.attention.core.fused_rope) for block in training.model.blocks}
        asked.extend(cores)
        return {"step": 1.0}

    monkeypatch.setattr(lm, "timed_step", timed)
    rows = lm.measure(TURNS)
    ways = [(way["attention"], way.get("fused_rope", False)) for way in lm.TURNS["attention"].values()]
    assert len(made) == 1 and sorted(asked) == sorted(3 * ways)
    assert {(row["attention"], row["compiled"]) for row in rows} == {(way, False) for way in lm.TURNS["attention"]}


@pytest.mark.long
def test_a_compiled_step_takes_turns_with_the_plain_one(monkeypatch):
    monkeypatch.setitem(peers.COMPILE, "backend", "aot_eager")  # inductor takes minutes here
    monkeypatch.setitem(lm.TURNS, "compiled", {"sdpa": WAYS["sdpa"]})
    plain, compiled = lm.measure(TURNS | {"what": "compiled"})
    assert (plain["compiled"], compiled["compiled"], compiled["replaced"]) == (False, True, False)
    assert plain["ms"] > 0 and len(compiled["warm_up_ms"]) == 2
