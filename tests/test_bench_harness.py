"""The harness of the benches, with the GPU left out: how a run ends and goes on, what it keeps, how two compare."""

import contextlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from flashlab.bench import BENCHES, OF_ALL, harness, module_of, records, timing
from flashlab.bench.harness import Bench
from flashlab.table import Table

HARNESSED = {name: module_of(name).BENCH for name in BENCHES if hasattr(module_of(name), "BENCH")}


def table(data):
    return Table.of([[len(data["rows"])]], ["rows"])


def job(n, part="slow"):
    return {"part": part, "shape": [1, n]}


@pytest.fixture
def things(monkeypatch):
    """A bench whose jobs take ten seconds of a clock that is turned by hand; on a machine that says it has a GPU."""
    state = {"measured": [], "seconds": 0.0, "broken": None, "at": {}, "machine": {}}
    machine = records.machine() | {"gpu": "NVIDIA Pretended", "driver": "1"}
    monkeypatch.setattr(harness, "on_gpu", lambda: True)
    monkeypatch.setattr(harness, "_watched", lambda: contextlib.nullcontext(machine | state["machine"]))
    monkeypatch.setattr(records, "machine", lambda: machine | state["machine"])
    monkeypatch.setattr(harness.time, "monotonic", lambda: state["seconds"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def synchronize():
        if state["broken"] == state["measured"][-1]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def measure(job, factor=1):
        n = job["shape"][1]
        state["measured"].append(n)
        state["seconds"] += 10
        if n in state["at"]:
            raise state["at"][n]
        times = {"ms": 1.0 * factor, "fastest": 0.9 * factor, "slowest": 1.1 * factor, "rounds": 3}
        return [job | {"name": "ours"} | times, job | {"name": "peer", "unavailable": "no backend"}]

    module = SimpleNamespace(
        jobs=lambda: [job(n) for n in range(5)], measure=measure, table=table, quick_jobs=lambda: [job(0)]
    )
    monkeypatch.setitem(sys.modules, "bench.things", module)
    options = {"factor": {"type": int, "default": 1}}
    state["bench"] = Bench("bench.things", "things are", ("shape", "name"), options=options, facts={"dtype": "float16"})
    return state


def again(things, out, *options):
    things["bench"].main(["--out", str(out), *options])
    return json.loads(out.read_text())


def test_a_run_ends_in_time_and_the_next_goes_on(things, tmp_path, capsys):
    out = tmp_path / "x.json"
    first = again(things, out, "--minutes", "0.3")
    assert first["left"] == 3 and len(first["rows"]) == 4 and first["dtype"] == "float16"
    assert "3 measurements are left; run it again" in capsys.readouterr().err
    second = again(things, out)
    assert second["left"] == 0 and things["measured"] == [0, 1, 2, 3, 4]
    assert second["rows"][:4] == first["rows"]
    assert [session["rows"] for session in second["machine"]["earlier"]] == [4]
    assert again(things, out) == second and "--anew measures it again" in capsys.readouterr().err
    again(things, out, "--anew", "--factor", "2")
    assert len(things["measured"]) == 10 and json.loads(out.read_text())["rows"][0]["ms"] == 2.0


def test_a_run_elsewhere_takes_the_place_of_what_it_measured_again(things, tmp_path):
    here, there = tmp_path / "x.json", tmp_path / "y.json"
    again(things, here)
    things["at"] = {1: RuntimeError("no memory")}
    again(things, there, "--factor", "2", "--minutes", "0.3")
    data = again(things, here, "--merge", str(there))
    ms = {row["shape"][1]: row["ms"] for row in data["rows"] if "ms" in row}
    assert ms == {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0} and len(data["rows"]) == 10 and data["left"] == 0
    assert [session["rows"] for session in data["machine"]["earlier"]] == [10]
    things["machine"] = {"torch": "9.9"}
    again(things, tmp_path / "z.json")
    for name, why in (("z.json", "of another torch"), ("none.json", "none.json is no record .*No such file")):
        with pytest.raises(SystemExit, match=why):
            again(things, here, "--merge", str(tmp_path / name))
    assert json.loads(here.read_text()) == data


def test_figures_of_two_stacks_are_not_mixed(things, tmp_path, capsys):
    out = tmp_path / "x.json"
    again(things, out, "--minutes", "0.3")
    things["machine"] = {"torch": "9.9"}
    data = again(things, out)
    assert len(things["measured"]) == 2 + 5 and "earlier" not in data["machine"]
    assert "another torch" in capsys.readouterr().err


def test_a_killed_run_is_gone_on_with_and_a_job_that_kills_is_left_behind(things, tmp_path):
    class Killed(BaseException):
        pass

    out = tmp_path / "x.json"
    things["at"] = {2: Killed()}
    for attempt in (1, 2):
        with pytest.raises(Killed):
            again(things, out)
        kept = json.loads(out.read_text())
        assert kept["rows"][-1]["attempts"] == attempt and "the process ended" in kept["rows"][-1]["unavailable"]
    data = again(things, out)
    assert things["measured"] == [0, 1, 2, 2, 3, 4] and data["left"] == 0
    things["at"] = {}
    assert len(again(things, out, "--retry")["rows"]) == 10 and things["measured"][-1] == 2


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32 GiB.\nMore"), "out of memory: CUDA out of"),
        (MemoryError("no room"), "out of memory: no room"),
        (ValueError("it fails"), "ValueError: it fails"),
    ],
)
def test_what_fails_is_a_row_and_the_others_do_not_notice(things, error, said):
    things["at"] = {1: error}
    result = harness.run(things["bench"], things["bench"].jobs())
    rows = [row for row in result["rows"] if row["name"] == "all"]
    assert [row["shape"] for row in rows] == [[1, 1]] and rows[0]["unavailable"].startswith(said)
    assert "\n" not in rows[0]["unavailable"] and len(result["rows"]) == 9 and result["left"] == 0


def test_behind_a_gpu_that_a_job_has_broken_the_next_process_goes_on(things):
    things["broken"] = 2
    kept = []
    with pytest.raises(RuntimeError, match="run it again to go on behind it"):
        harness.run(things["bench"], things["bench"].jobs(), save=kept.append)
    assert "nothing ran on the GPU" in kept[-1]["rows"][-1]["unavailable"]
    things["broken"] = None
    harness.run(things["bench"], things["bench"].jobs(), json.loads(json.dumps(kept[-1])))
    assert things["measured"] == [0, 1, 2, 3, 4]


def test_what_is_found_before_the_measurements_is_in_the_record(things):
    sys.modules["bench.things"].prepare = lambda todo, until, factor: {"worst": factor + len(todo)}
    assert harness.run(things["bench"], things["bench"].jobs(), factor=3)["worst"] == 8


def test_quick_writes_nothing_and_json_prints_the_record(things, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    things["bench"].main(["--quick", "--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["shape"] == [1, 0] and "not written" in said.err
    assert not list(tmp_path.iterdir())


# ---- two records ---------------------------------------------------------------------------------------------------
def timed(name, low, ms, high, **more):
    return job(1) | {"name": name, "ms": ms, "fastest": low, "slowest": high} | more


def record(*rows, gpu="NVIDIA H200"):
    return {"machine": {"gpu": gpu, "date": "2026-11-22"}, "rows": list(rows)}


def test_slower_is_what_no_round_before_was(things):
    before = record(
        timed("a", 0.9, 1.0, 1.1), timed("b", 0.9, 1.0, 1.1), timed("c", 1.0, 1.0, 1.0), timed("d", 0.9, 1.0, 1.1),
        timed("e", 1, 1, 1),
    )  # fmt: skip
    after = record(
        timed("a", 1.2, 1.3, 1.4), timed("b", 1.0, 1.09, 1.2), timed("c", 1.005, 1.005, 1.005),
        timed("d", 0.4, 0.5, 0.6), job(1) | {"name": "e", "unavailable": "no memory"}, timed("new", 1, 1, 1),
    )  # fmt: skip
    found = harness.changes(things["bench"], before, after)
    assert [(label.split()[-1], what) for label, what, _, _ in found] == [
        ("e", "gone"),
        ("a", "slower"),
        ("d", "faster"),
    ]
    shown, worse = harness.compare(things["bench"], before, after)
    assert worse and "3 of 5" in shown.caption and "1.30" in repr(shown)
    assert not harness.compare(things["bench"], before, before)[1]
    assert "Not the same machine: gpu NVIDIA H200 and NVIDIA H100" in harness.compare(
        things["bench"], before, record(timed("a", 1, 1, 1), gpu="NVIDIA H100")
    )[0].caption  # fmt: skip


def test_the_exit_status_says_whether_something_got_slower(things, tmp_path, capsys):
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    fast.write_text(json.dumps(record(timed("a", 0.9, 1.0, 1.1))))
    slow.write_text(json.dumps(record(timed("a", 1.9, 2.0, 2.1))))
    for pair, status in (((fast, slow), 1), ((slow, fast), 0), ((fast, fast), 0)):
        with pytest.raises(SystemExit) as ended:
            things["bench"].main(["--compare", *map(str, pair)])
        assert ended.value.code == status and not things["measured"]
    assert "slower" in capsys.readouterr().out
    slow.write_text(json.dumps(record(timed("b", 1.9, 2.0, 2.1))))
    with pytest.raises(SystemExit, match="no row is in both records"):
        things["bench"].main(["--compare", str(fast), str(slow)])


@pytest.mark.parametrize(
    "text, why", [(None, "No such file"), ("{", "Expecting"), ("[]", "no attribute"), ("{}", "no rows")]
)
def test_a_record_that_is_none_is_named_in_one_sentence(things, tmp_path, text, why):
    path = tmp_path / "broken.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        things["bench"].main(["--compare", str(path), str(path)])
    said = str(ended.value.code)
    assert said.startswith(f"{path} is no record of `flashlab bench things`: ") and why in said and "\n" not in said


# ---- every bench on it ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "bench"), HARNESSED.items(), ids=HARNESSED)
def test_every_bench_is_one_entry_and_its_records_are_read_as_they_are(name, bench):
    todo = bench.jobs()
    assert bench.name == name and todo and len({json.dumps(j) for j in todo}) == len(todo)
    assert json.loads(json.dumps(todo)) == todo, "a job is found again in JSON"
    assert all("part" in j for j in todo)
    assert bench.quick_jobs() and {j["part"] for j in bench.quick_jobs()} <= {j["part"] for j in todo}
    assert set(vars(harness.parser(bench).parse_args([]))) >= {"out", "quick", "json", "minutes", "compare", "anew"}
    for data in records.recorded(name):
        rows = data["rows"]
        labels = [harness.describe({k: r[k] for k in ("part", *bench.keys) if k in r}) for r in rows if "ms" in r]
        assert len(set(labels)) == len(labels), "a row is not told from another"
        assert len(harness.waiting(todo, rows)) < len(todo)
        assert all(any(harness.is_of(row, job) for job in todo) for row in rows), "what was measured is asked for still"
        assert not harness.compare(bench, data, data)[1] and len(bench.table(data).rows) >= 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["layer", "industrial", "attention"])
@pytest.mark.every(3)
def test_the_quick_form_runs_here_and_its_record_is_read(name, tmp_path, capsys):
    bench, out = HARNESSED[name], tmp_path / "x.json"
    bench.main(["--quick", "--out", str(out)])
    data = json.loads(out.read_text())
    rows, todo = data["rows"], bench.quick_jobs()
    assert data["left"] == 0 and {row["part"] for row in rows} == {job["part"] for job in todo}
    assert not harness.waiting(todo, rows), "a job's rows say all that the job says"
    timed = [row for row in rows if "ms" in row]
    assert timed and all(0 < row["fastest"] <= row["ms"] <= row["slowest"] for row in timed)
    assert "all" not in {row.get("name") for row in rows}, "each job was measured"
    said = capsys.readouterr().out
    assert data["machine"]["gpu"] is None and "a CPU" in said and repr(bench.table(data)) in said


# ---- timing, the clock, the commit ---------------------------------------------------------------------------------
def test_on_a_cpu_peers_take_turns_after_a_warm_up():
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"} | {"c": lambda: [][0]}
    able, reasons = timing.able(ways)
    found = timing.on_cpu(able, rounds=2)
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert found["a"]["rounds"] == 2 and reasons == {"c": "IndexError: list index out of range"}


def test_each_round_has_an_order_of_its_own_and_the_same_one_in_every_run():
    names = ["p11", "cuDNN", "FlashAttention-2", "FlashAttention-4"]
    rounds = [timing.order(names, n) for n in range(40)]
    assert rounds == [timing.order(names, n) for n in range(40)] and all(sorted(r) == sorted(names) for r in rounds)
    behind = {r[r.index("cuDNN") - 1] for r in rounds if r[0] != "cuDNN"}
    assert behind == set(names) - {"cuDNN"} and {r[0] for r in rounds} == set(names)


def test_the_clock_of_a_time(monkeypatch):
    monkeypatch.setattr(timing, "nvidia_smi", lambda query: {"clocks.max.sm": "1980"}[query])
    monkeypatch.setattr(timing, "_nvml", lambda: lambda: (1500, None))
    with timing.Clock(0.001) as clock:
        while len(clock.samples) < 3:
            time.sleep(0.001)
    assert clock.summary() == {"median": 1500, "lowest": 1500, "highest": 1500, "max": 1980}
    clock.samples = [(1.0, 1500, None), (2.0, 1700, 650.0)]
    assert clock.summary(1.5)["median"] == 1700 and clock.summary(1.5)["watts"] == 650
    assert clock.summary(0, 1.5)["highest"] == 1500 and clock.summary(3) is None


def test_without_git_the_commit_is_what_was_said_or_none(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.delenv("FLASHLAB_COMMIT", raising=False)
    assert records.commit() is None
    monkeypatch.setenv("FLASHLAB_COMMIT", "39c61b8aa01f-dirty")
    assert records.commit() == "39c61b8aa01f-dirty"
    monkeypatch.setenv("FLASHLAB_COMMIT", "the newest")
    assert records.commit() is None


def test_a_function_is_called_in_a_process_of_its_own():
    assert harness.again(*harness.calling(print, "a", "b c"), capture_output=True, text=True).stdout == "a b c\n"


@pytest.mark.long
def test_what_may_hang_or_crash_is_tried_in_a_process_of_its_own(capsys):
    def tried(text, seconds=60.0):
        return harness.trial("-c", text, "one", seconds=seconds)

    assert tried("import time; time.sleep(60)", 0.01) == "its trial had not ended after 0 s"
    assert tried("import flashlab.course, sys; assert False, sys.argv[1]") == "its trial failed: AssertionError: one"
    assert tried("raise ValueError('at N = 1 it is wrong')") is None and tried("print('right')") is None
    assert "ValueError: at N = 1 it is wrong" in capsys.readouterr().err, "it is measured, and found wrong there"


# ---- all of them ---------------------------------------------------------------------------------------------------
def test_all_runs_what_can_run_here_says_why_not_of_the_others_and_fails_with_one(monkeypatch, capsys, tmp_path):
    called = []

    def again(*words):
        assert words[:3] == ("-m", "flashlab.cli", "bench")
        called.append(words[3:])
        return SimpleNamespace(returncode=words[3] == "mma")

    monkeypatch.setattr(harness, "again", again)
    monkeypatch.setattr(Bench, "needs", lambda self, quick: None if self.name in ("mma", "walls") else "no nvcc")
    with pytest.raises(SystemExit, match="failed: mma$"):
        module_of("all").main(["--quick", "--minutes", "3", "--out", str(tmp_path)])
    for name, call in zip(("walls", "mma"), called, strict=True):
        assert call[:3] == (name, "--quick", "--minutes") and float(call[3]) <= 3
        assert call[4:] == ("--out", str(tmp_path / f"{name}.json"))
    assert capsys.readouterr().out.count("left out: no nvcc") == len(OF_ALL) - 2
