"""The bench of phase 11, as far as no GPU is needed: its jobs, what is right, the goals, a run in the emulator."""

import itertools
import json
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashlab import kernels
from flashlab.attention import reference
from flashlab.bench import (
    harness,
    hopper,
    hopper_backward,
    hopper_inputs,
    hopper_jobs,
    hopper_results,
    ncu,
    peers,
    truth,
    validation,
)
from flashlab.bench.clocked import MARKS, clocked, cycles
from flashlab.bench.hopper_jobs import BOXES, CUDNN, FA2, FA4, OURS, P9, TRITON
from flashlab.bench.mma import Variant
from flashlab.check.tolerance import bounded
from flashlab.cuda import load_inline

emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
# Of a record that nobody measured
SPEEDS = {OURS: 700.0, CUDNN: 600.0, FA2: 300.0, FA4: 650.0, P9: 400.0, TRITON: 450.0, BOXES: 470.0}  # TFLOP/s
OF_PART = {"backward": (OURS, CUDNN, FA2, TRITON)} | dict.fromkeys(("inputs", "captured"), (OURS, CUDNN, FA2, FA4))
JUDGED = ("shapes", "sizes", "inputs", "captured", "backward", "validate", "sanitizer")


def record(keep=lambda job: True, **changes):
    """A record as a run would have left it that made the kept measurements. changes: of the rows of OURS."""
    todo = [job for job in hopper_jobs.jobs() if job["part"] in JUDGED and keep(job)]
    rows = [row | (changes if row["name"] == OURS else {}) for job in todo for row in _rows(job)]
    return {"machine": {"gpu": "NVIDIA Stand-in", "torch": "2", "triton": "3", "date": "2000-01-01"}, "rows": rows}


def _rows(job):
    part = job["part"]
    if part == "validate":
        found = {"different": 0} if job["what"] == "repeats" else {"wrong": [], "cases": 90}
        return [job | {"name": OURS, "step": "p11_flash"} | found]
    if part == "sanitizer":
        return [job | {"name": "all", "said": "ERROR SUMMARY: 0 errors"}]
    work = harness.work_of(job) * (hopper_jobs.BACKWARD_WORK if part == "backward" else 1)
    exact = {"error": 1e-3, "rms": 1e-4, "of_bound": 0.5, "doubted": 1, "trusted": 4}
    return [job | {"name": name} | _time(work, SPEEDS[name]) | exact for name in OF_PART.get(part, SPEEDS)]


def _time(work, tflops):
    ms = work / (tflops * 1e9)
    return {"ms": ms, "fastest": 0.99 * ms, "slowest": 1.01 * ms, "rounds": 9, "tflops": tflops}


@pytest.fixture
def steps(monkeypatch):
    """Two kernels of phase 9 stand in for the steps of phase 11; nothing is built yet."""
    found = (kernels.step("p9_1_masks"), kernels.step("p9_flash"))
    monkeypatch.setattr(hopper_jobs, "ladder", lambda: found)
    monkeypatch.setattr(hopper, "_modules", {})
    return found


# ---- the kernels ---------------------------------------------------------------------------------------------------
def test_flash_attention_4_is_given_rows_by_token(monkeypatch):
    def theirs(q, k, v, causal):  # [batch, rows, heads, head_dim], and a second result
        o, lse = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return o.to(q.dtype).transpose(1, 2), lse

    monkeypatch.setattr(peers, "fa4", lambda: (theirs, ""))
    job = hopper_jobs.shape_job((2, 4, 33, 64), False, "bf16", "cross", kv_heads=2, keys=70)
    q, k, v = hopper.make(job)
    assert k.shape == (2, 2, 70, 64) and q.is_contiguous()
    assert hopper_results.right(
        truth.judged(hopper.forward_of(FA4, q, k, v, causal=False)(), truth.pieces(q, k, v, False))
    )


def test_a_kernel_is_varied_by_its_macros(monkeypatch):
    one = kernels.step("p8_6_store")
    assert hopper_jobs.varied(one) == ["p8_6_store", "p8_6_store STAGES=1", "p8_6_store STAGES=3"]
    assert hopper_jobs.defines_of("p8_6_store STAGES=3 X=1") == (("STAGES", 3), ("X", 1))
    given = {}
    monkeypatch.setattr(hopper, "_modules", {})
    monkeypatch.setattr(hopper, "load_inline", lambda step, **options: given.update(options) or step.name)
    assert hopper.module_of("p8_6_store STAGES=3", 64, torch.float16) == "p8_6_store"
    assert given["defines"] == {"STAGES": 3}
    monkeypatch.setattr(hopper_jobs, "ladder", lambda: (one,))
    keys = hopper.wanted_modules([{"part": "variants", "shape": [1, 1, 64, 64], "causal": False}])
    assert [key[0] for key in keys] == hopper_jobs.varied(one)
    assert hopper.wanted_modules(hopper_jobs.backward_jobs()) == []  # that builds its own


# ---- what is right -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(300, 300, True), (300, 340, True), (300, 200, True), (300, 70, False)]
)
def test_a_sample_is_what_the_whole_would_be(rows, keys, causal, monkeypatch):
    monkeypatch.setattr(truth, "WHOLE", 100)
    q, k, v = hopper.make({"shape": [2, 4, rows, 16], "kv_heads": 2, "keys": keys, "dtype": "bf16"})
    whole = bounded(q, k, v, causal=causal)
    found = truth.pieces(q, k, v, causal)
    assert len(found) == 6
    for p in found:
        torch.testing.assert_close(p.truth.o, whole.o[p.batches, p.heads, p.rows])
        torch.testing.assert_close(p.truth.lse, whole.lse[p.batches, p.heads, p.rows])
    assert {(p.batches.start, p.heads.start, p.heads.stop) for p in found} == {(0, 0, 2), (1, 2, 4)}
    assert {p.rows.stop for p in found} >= {truth.SPAN, rows}
    monkeypatch.setattr(truth, "WHOLE", rows)
    assert [p.rows for p in truth.pieces(q, k, v, causal)] == [slice(0, rows)] * 2


def test_what_is_wrong_is_seen():
    q, k, v = hopper.make({"shape": [1, 2, 40, 16], "dtype": "fp16"})
    o, lse = reference.attention(q, k, v)
    wanted = truth.pieces(q, k, v, False)
    assert hopper_results.right(truth.judged(o.half(), wanted)) and hopper_results.right(
        truth.judged((o.half(), lse.float()), wanted)
    )
    for wrong in ((1.1 * o, lse), (o, lse + 0.1), (o * float("nan"), lse), (o, lse * float("inf"))):
        found = truth.judged(wrong, wanted)
        assert not hopper_results.right(found) and json.dumps(found, allow_nan=False)


def test_a_kernel_that_is_wrong_has_a_time_and_counts_nowhere():
    data = record(lambda job: job["part"] == "shapes", of_bound=1.2)
    assert {s.ratio for s in hopper_results.standings(data)} == {0.0}
    found = hopper_results.verdicts(data)[0]
    assert found.said == "missed" and found.at.startswith("wrong at D 128")
    assert hopper_results.mean_table(data).rows[-1][-1] == "0.00"
    data = record(lambda job: job["part"] == "shapes", of_bound=None)
    assert {s.ratio for s in hopper_results.standings(data)} == {0.0}
    backward = record(lambda job: job["part"] == "backward", of_bound=2.0, different=3)
    assert hopper_results.backward_table(backward).rows[0][1] == "700 ! ≠"
    assert hopper_results.geometric_mean([2.0, 8.0]) == pytest.approx(4) and not hopper_results.geometric_mean([1.0, 0])


# ---- validation ----------------------------------------------------------------------------------------------------
class Module:
    """A kernel of the series, in float64; `spoil(call, o, lse)` may change what it gives."""

    def __init__(self, spoil=lambda call, o, lse: None):
        self.spoil, self.calls = spoil, 0

    def forward(self, q, k, v, *, causal=False, scale=None):
        o, lse = reference.attention(q, k, v, causal=causal, scale=scale)
        o, lse = o.to(q.dtype), lse.float()
        self.spoil(self.calls, o, lse)
        self.calls += 1
        return o, lse


def validated(job, monkeypatch, spoil=lambda call, o, lse: None):
    module = Module(spoil)
    monkeypatch.setattr(hopper, "module_of", lambda *key: module)
    return hopper.validate(job)


def test_other_bits_are_counted(steps, monkeypatch):
    job = hopper_jobs.repeat_jobs(5)[2] | {"shape": [1, 2, 20, 64], "kv_heads": 2}

    def spoil(call, o, lse):
        if call == 2:
            lse[0, 0, 3] += 1e-6
        if call == 4:
            o[0, 1, 3, 5] = -o[0, 1, 3, 5]

    assert validated(job, monkeypatch)["different"] == 0
    assert validated(job, monkeypatch, spoil) == {"step": "p9_flash", "different": 2}
    zero = torch.zeros(3)
    assert not hopper_backward.same_bits(zero, -zero) and hopper_backward.same_bits(zero / zero, (zero / zero).clone())


def test_a_trial_says_where_a_result_is_wrong(steps, monkeypatch):
    monkeypatch.setattr(hopper, "_TRIED", ((1, 2, 2, 1, 1), (1, 6, 2, 30, 30)))
    monkeypatch.setattr(hopper, "module_of", lambda *key: Module())
    hopper.try_out("p9_1_masks", "64 fp16", "128 bf16")
    monkeypatch.setattr(hopper, "module_of", lambda *key: Module(lambda call, o, lse: o.mul_(1.1)))
    with pytest.raises(ValueError, match="at D = 64, fp16, whole it is wrong: .*heads 2 of 2, 1 queries, 1 keys"):
        hopper.try_out("p9_1_masks", "64 fp16", "128 bf16")


def test_before_the_measurements_all_is_built_and_tried_and_what_fails_is_said(steps, monkeypatch, capsys):
    warmed = []
    monkeypatch.setattr(harness, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(hopper, "warm", lambda *task: warmed.append(task))
    monkeypatch.setattr(hopper_jobs, "PHASE", 9)
    monkeypatch.setattr(hopper, "_unsound", set())
    monkeypatch.setenv(hopper.CACHED, "1")
    monkeypatch.setattr(hopper, "fa4", lambda: (None, "not installed"))

    def load_inline(step, *, head_dim, **options):
        if head_dim == 256:
            raise OSError("nvcc: no such file")
        return step.name

    monkeypatch.setattr(hopper, "load_inline", load_inline)
    tried = {}

    def trial(*arguments, seconds):
        name, *builds = arguments[2:]
        tried[name] = builds
        return "it had not ended" if name == "p9_1_masks" else None

    monkeypatch.setattr(harness, "trial", trial)
    todo = [job for job in hopper_jobs.jobs() if job["part"] in ("shapes", "ladder") and job.get("dtype") != "fp16"]
    facts = hopper.prepare(todo, hopper.time.monotonic() + 60)
    assert "flash_attention_4" not in facts
    assert facts["not_built"] == ["p9_flash, D = 256: OSError: nvcc: no such file", "p9_1_masks: it had not ended"]
    assert hopper.module_of("p9_flash", 64, torch.bfloat16) == "p9_flash" and hopper.sound() == ["p9_flash"]
    with pytest.raises(RuntimeError, match="it had not ended"):
        hopper.module_of("p9_1_masks", 128, torch.bfloat16)
    assert tried == {"p9_flash": ["128 bf16", "64 bf16"], "p9_1_masks": ["128 bf16", "64 bf16"]}
    assert len(warmed) == 2 * 3 * 2 and {name for name, *_ in warmed} == {TRITON, BOXES}
    said = capsys.readouterr().err
    assert "built 4 of 5 kernels" in said and "it had not ended" in said


# ---- the backward pass ---------------------------------------------------------------------------------------------
def test_a_wrong_gradient_is_seen():
    given = hopper_backward.make([1, 4, 40, 64], 2, torch.float16)
    grad_o, q, k, v = given
    right = [x.half() for x in reference.attention_backward(grad_o, q, k, v)]
    assert hopper_results.right(hopper_backward.judged(right, given, False))
    for i, name in enumerate(("dq", "dk", "dv")):
        for factor in (1.1, float("nan")):
            wrong = [x * (factor if i == j else 1) for j, x in enumerate(right)]
            found = hopper_backward.judged(wrong, given, False)
            assert not hopper_results.right(found) and found["of"] == name and json.dumps(found, allow_nan=False)
    gradients = iter([right, [right[0], -right[1], right[2]], right])
    assert hopper_backward.different(lambda: next(gradients), right, 3) == 1


# ---- counters ------------------------------------------------------------------------------------------------------
def test_counts_stand_beside_the_emulators(steps, monkeypatch):
    def profile(arguments, metrics, **options):
        assert arguments == harness.calling(hopper.launch_all, "p9_1_masks", "p9_flash")
        rows = []
        for v in hopper.launched():
            about = {"kernel": "flash", "launch": [v.name, v.head_dim]} | dict.fromkeys(metrics, 7.0)
            rows += [about | {"nanoseconds": 9.0}, about | {"kernel": "small", "nanoseconds": 1.0}]
        return rows

    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.setattr(ncu, "known", lambda metrics: metrics)
    monkeypatch.setattr(hopper, "launched", lambda: [Variant(steps[0], 64, torch.bfloat16)])
    (row,) = hopper.count()
    assert (row["name"], row["native"]["kernel"]) == ("p9_1_masks", "flash")
    emulated = row["counters"]["global write sectors"][0]
    assert emulated > 0 and row["counters"]["global write sectors"] == [emulated, 7.0]
    assert row["counters"]["wgmma, by warp"] == [0, 7.0]  # it has none


@pytest.fixture
def ran(monkeypatch):
    """The commands that validation runs; each is answered as by a sanitizer without findings, or a right kernel."""
    commands = []

    def run(command, **options):
        commands.append(command)
        sanitizer = "========= ERROR SUMMARY: 0 errors\n"
        return types.SimpleNamespace(stdout=sanitizer if "compute-sanitizer" in command else "RESULT right\n")

    monkeypatch.setattr(validation.subprocess, "run", run)
    return commands


def test_one_tool_of_the_sanitizer_is_one_row(steps, ran, monkeypatch):
    (row,) = hopper.measure({"part": "sanitizer", "tool": "memcheck"})
    assert row["said"] == "ERROR SUMMARY: 0 errors" and ran[0][2] == "memcheck" and "launch_all" in ran[0][-3]
    monkeypatch.setattr(hopper, "_unsound", {"p9_1_masks"})
    hopper.measure({"part": "sanitizer", "tool": "memcheck"})
    assert "launch_all" in ran[1][-2] and ran[1][-1] == "p9_flash"  # what hangs would take the tool with it
    assert hopper_results._clean(row) and not hopper_results._clean(
        {"said": "RACECHECK SUMMARY: 3 hazards displayed (3 errors)"}
    )
    assert hopper_results._clean({"said": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"})
    assert not hopper_results._clean({"said": "no summary: killed"})


def test_what_is_planted_is_in_the_zoo_and_leaves_nobody_waiting(ran):
    known = {m.name: m for m in hopper.MUTANTS}
    assert all("deadlock" not in known[name].found for name in hopper_jobs.PLANTED)
    (job,) = [job for job in hopper_jobs.jobs() if job.get("what") == hopper_jobs.PLANTED[0]]
    (row,) = hopper.measure(job)
    assert row["result"] == "right" and set(row["said"]) == set(hopper.PLANTED_TOOLS)
    assert len(ran) == 4 and all(tuple(x[-3:]) == harness.calling(hopper.launch_planted, job["what"]) for x in ran)
    assert hopper_results.planted_rows({"rows": [row, {"part": "planted", "what": "x", "unavailable": "no"}]}) == {
        job["what"]: row
    }


# ---- reading a record ----------------------------------------------------------------------------------------------
def said(data):
    return {v.goal: v.said for v in hopper_results.verdicts(data)}


def test_the_goals_are_met_or_missed_by_what_is_recorded():
    found = {v.goal: v for v in hopper_results.verdicts(record())}
    missed = {goal for goal, v in found.items() if v.said != "met"}
    # 1.077 where 1.12 is wanted; and of the way back nothing of FlashAttention-4
    assert missed == {"geometric mean of all shapes", "backward, D = 64, 128", "backward, D = 256"}
    assert found["geometric mean of all shapes"].value == "1.08" and found["each of them"].said == "met"
    assert found["each of them"].value == "1.08 (1.06 to 1.10)" and FA4 in found["each of them"].at
    assert found["D = 96, 192"].measured == "12 of 12" and "layer" not in found["D = 96, 192"].at
    wide = record(lambda job: job["part"] == "inputs", error=1.3e-3)  # where the peers' is 1e-3
    assert said(wide)["the best peer's error on them, over ours"] == "missed"
    text = repr(hopper_results.goal_table(record()))
    assert "missed" in text and "NVIDIA Stand-in" in text


RISES = {"random": 0, "every 8th tile rises": 1, "three tiles rise": 3, "a sink": 1, hopper_inputs.WIDE: 0}
"""How often a tile's scores lie far above those of all tiles behind it, of 16; every tile of the others."""


@pytest.mark.parametrize(
    "job", hopper_jobs.input_jobs()[:: len(hopper_jobs.OF_INPUTS) * 2], ids=lambda job: job["inputs"]
)
def test_inputs_are_what_they_are_called(job):
    q, k, _ = hopper.make(job | {"shape": [1, 1, 16 * 128, 64]})
    s = (q.float() @ k.float().mT / 8)[0, 0]
    tiles = s.unflatten(1, (16, 128)).amax(2).flip(1)  # a block walks from the last to the first
    rises = (tiles[:, 1:] > tiles.cummax(1).values[:, :-1] + 7).float().mean(0) > 0.9
    assert int(rises.sum()) == RISES.get(job["inputs"], 15)
    assert s.std().item() == pytest.approx(3, rel=0.1) or job["inputs"] != hopper_inputs.WIDE


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["random", "three tiles rise", "every tile rises at its start", hopper_inputs.WIDE])
def test_as_many_tiles_are_doubted_as_the_kernel_computes_again(kind, head_dim):
    module = load_inline(kernels.step("p11_15_portions"), backend="emulator", head_dim=head_dim, dtype=torch.bfloat16)
    for causal in (False, True):
        q, k, v = hopper.make({"shape": [1, 1, 600, head_dim], "inputs": kind})
        q[:, :, 200:] *= 2 if kind == hopper_inputs.WIDE else 0.5  # some warps doubt, and some do not
        found = hopper_inputs.doubts(q, k, causal=causal)
        module.forward(q, k, v, causal=causal, echo=False)
        assert found.doubted == module.report.counters.get("mma", 0) / (head_dim // 16 * 16)  # all of a tile's S
        assert (found.doubted > 0) == (kind != "random") and found.doubted < found.trusted == (80 if causal else 160)


# ---- a run ---------------------------------------------------------------------------------------------------------
@emulated
@pytest.mark.slow
def test_a_quick_run_in_the_emulator(steps, tmp_path, capsys):
    out = tmp_path / "x.json"
    hopper.main(["--quick", "--out", str(out), "--rounds", "1"])
    data = json.loads(out.read_text())
    rows = {(row["part"], row["name"]): row for row in data["rows"]}
    assert not data["left"] and rows["shapes", OURS]["step"] == "p9_flash" and "unavailable" in rows["shapes", CUDNN]
    judged = [row for row in data["rows"] if row["part"] in ("shapes", "ladder") and "ms" in row]
    assert {OURS, FA2, P9, TRITON, "p9_1_masks"} <= {row["name"] for row in judged}
    for row in judged:  # everyone computes the same attention, by token too
        assert hopper_results.right(row) and ("lse_of_bound" in row) == (row["name"] != FA2), row
    assert [r["different"] for r in data["rows"] if r.get("what") == "repeats"] == [0]
    (listed,) = [r for r in data["rows"] if r.get("what") == "shapes"]
    assert listed["wrong"] == [] and listed["cases"] == len(list(hopper.listed(160))) and listed["of_bound"] <= 1
    seven = f"{OURS} {hopper_backward.SEVEN}"
    assert all(hopper_results.right(rows["backward", name]) for name in (OURS, seven, FA2, TRITON))
    assert rows["backward", OURS]["different"] == rows["backward", seven]["different"] == 0
    assert "times as fast as the best peer" in capsys.readouterr().out


@emulated
@pytest.mark.parametrize("name", [hopper_jobs.LEARNS, "p11_flash"])
def test_stamps_say_what_a_consumer_passes(name):
    ways = [load_inline(source, backend="emulator", head_dim=64, dtype=torch.bfloat16)
            for source in (kernels.step(name), clocked(kernels.step(name)))]  # fmt: skip
    qkv = harness.draw(*[(1, 1, 700, 64)] * 3, dtype=torch.bfloat16, seed=1, device="cpu")
    plain, stamped = (way.forward(*qkv, sms=1) for way in ways)
    assert all(map(torch.equal, plain, stamped))
    order = [name for name, *_ in MARKS]
    passed = cycles(ways[1])
    assert passed.pop("a part") > sum(passed.values())  # several tiles
    tile = {"a tile's end > a tile"}  # back to the next one
    assert set(passed) == tile | {f"{a} > {b}" for a, b in itertools.pairwise([*order, order[0]])}
    with pytest.raises(ValueError, match="no whole part"):  # it is cleared
        cycles(ways[1])


def test_a_step_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="p11_1_tma: .* occurs 0 times"):
        clocked(kernels.step("p11_1_tma"))
