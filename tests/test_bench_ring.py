"""The bench of phase 13: its quick form with gloo, what it says of a record, and of a machine without GPUs."""

import json
from types import SimpleNamespace

import pytest
import torch

from flashlab.bench import ring
from flashlab.bench.ring import BACKENDS, CASES, CONTIGUOUS, GOALS, MANY, ONE, OURS, QUICK, ZIGZAG
from flashlab.distributed import run
from flashlab.distributed.scaling import Machine

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
def test_the_quick_form_measures_every_way_and_writes_a_record(tmp_path, capsys):
    out = tmp_path / "ring.json"
    ring.main(["--quick", "--out", str(out)])
    data = json.loads(out.read_text())
    assert data["ranks"] == 2 and data["rows"][0]["part"] == "link" and data["rows"][0]["gb_s"] > 0
    for case in QUICK:
        rows = ring.of(data, case)
        assert {ONE, CONTIGUOUS, "ring, one after the other", "all-gather", "Ulysses"} <= set(rows)
        assert (ZIGZAG in rows) == case.causal
        for name, row in rows.items():
            assert 0 < row["fastest"] <= row["ms"] <= row["slowest"], row
            share = rows[ONE]["ms"] / 2 / row["ms"]
            assert name == ONE or row["of_ideal"] == pytest.approx(share)
    errors = [ring.of(data, QUICK[1])[name]["error"] for name in (ONE, CONTIGUOUS)]
    assert all(0 < error < 1e-6 for error in errors)
    assert "each sends" in capsys.readouterr().out


def test_an_error_is_seen_and_a_way_that_fails_is_a_row(monkeypatch):
    wrong = lambda q, k, v, *, group, causal, layout, overlap=True: v.repeat_interleave(2, 1)  # noqa: E731
    monkeypatch.setattr(ring, "ring_attention", wrong)

    def fails(q, k, v, **options):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(ring, "all_gather_attention", fails)
    rows = run(2, lambda link: ring.measure(link, QUICK[1], 1))[0]
    by_name = {row["name"]: row for row in rows}
    assert by_name[CONTIGUOUS]["error"] > 0.1 > by_name[ONE]["error"]
    assert "no such kernel" in by_name["all-gather"]["unavailable"] and "ms" not in by_name["all-gather"]


def record(ours=None, peer=2.0, ranks=2):
    rows = [{"part": "link", "gb_s": 326.0}]
    for case in CASES if ranks == 2 else MANY:
        base = {"part": "ring"} | case.row
        rows += [base | {"name": ONE, "ms": 2.0, "error": 2e-3, "peak_bytes": 2 << 30},
                 base | {"name": OURS[case.causal], "ms": 1 / 0.98, "of_ideal": 0.98, "error": 2e-3,
                         "peak_bytes": 1 << 30} | (ours or {}),
                 *({"part": "ring", **case.row, "name": name, "ms": peer} for name in BACKENDS)]  # fmt: skip
    return {"machine": {"gpu": "Pretended"}, "ranks": ranks, "rows": rows}


def test_goals_are_judged_from_the_record():
    found = {what: (value, met) for what, value, _, met in ring.goals(record())}
    assert len(found) == 2 * len(GOALS) + 2  # each its share and its error, and two of both passes
    assert found["16 heads, N 65536, causal, forward: of the ideal"] == (0.98, True)
    assert found["8 heads, N 262144, causal, forward: of the ideal"] == (0.98, False)
    assert found["16 heads, N 65536, causal, both: times context_parallel"] == (pytest.approx(1.96), True)
    assert found["16 heads, N 65536, causal, forward: error, of one GPU's"] == (1.0, True)
    longest = "N 524288, both: longest sequence by memory, of one GPU's times the ranks"
    assert found[longest] == (1.0, True)
    worse = {what: met for what, _, _, met in ring.goals(record({"error": 3e-3, "peak_bytes": 2 << 30}, peer=1.1))}
    assert not any(
        met for what, met in worse.items() if "error" in what or "longest" in what or "times context" in what
    )
    nothing = ring.goals({"machine": {}, "ranks": 2, "rows": []})
    assert nothing and not any(met for *_, met in nothing)
    assert "not measured" in str(ring.goals_table({"machine": {}, "ranks": 2, "rows": []}))
    assert "each sends 326.0 GB/s" in str(ring.table(record()))


def test_more_gpus_have_goals_of_their_own():
    found = {what: (value, met) for what, value, _, met in ring.goals(record({"of_ideal": 0.94}, ranks=4))}
    share = "8 heads, N 262144, causal, forward: of the ideal"
    assert found[share] == (0.94, False) and not any("65536" in what for what in found)
    assert {what: met for what, *_, met in ring.goals(record({"of_ideal": 0.94}, ranks=8))}[share]
    assert sum("times context_parallel" in what for what in found) == 4


def test_the_simulation_is_set_beside_what_it_knows():
    machine = Machine({4096: 600.0}, backward={4096: 300.0}, step_us=20.0, in_ring=(1.0, 1.0))
    case = MANY[0]._replace(n=2**22)
    assert ring.simulated(machine, case, ZIGZAG, 4) == pytest.approx(1, abs=1e-3)
    assert ring.simulated(machine, case, CONTIGUOUS, 4) == pytest.approx(4 / 7, rel=0.01)
    assert ring.simulated(machine, case, ring.CUDNN, 4) is None


@no_gpu
def test_without_gpus_it_says_what_it_needs(monkeypatch):
    with pytest.raises(ring.NoGpu, match="two GPUs at least, and PyTorch sees 0"):
        ring.main([])
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(ring.harness, "again", lambda *words: started.append(words) or SimpleNamespace(returncode=0))
    ring.main(["--ranks", "4", "--graphs"])
    assert started[0][-5:] == ("-m", "flashlab.bench.ring", "--ranks", "4", "--graphs")
    assert "--nproc-per-node" in started[0] and "4" in started[0]
