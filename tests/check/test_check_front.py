"""check, hint and progress, as a learner calls them."""

import signal
import subprocess
import sys
import traceback
from dataclasses import asdict

import pytest
import torch

from flashlab.check import CheckFailed, expect_close, running, verify
from flashlab.course import PHASES
from flashlab.exercises import check, front, hint, progress, record
from flashlab.exercises import registry as exercises


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    """Two exercises of phase 97 and a progress file of their own."""
    monkeypatch.setenv("FLASHLAB_PROGRESS", str(tmp_path / "progress.jsonl"))
    exercises.exercises()  # import the phases first: what they register has to outlive this test
    monkeypatch.setattr(exercises, "_registry", dict(exercises._registry))
    monkeypatch.setattr(front, "_shown_hints", {})
    monkeypatch.setattr(record, "_said", set())

    @exercises.exercise("97.1", title="Square", minutes=5, difficulty="Warm-up", hints=["What is 2 * 2?", "x * x"])
    def _(fn):
        with running("x = 2"):
            got = fn(2.0)
        expect_close(got, 4.0, what="the square of 2")
        return "one number"

    @exercises.exercise("97.2", title="Two functions", minutes=10)
    def _(first, second):
        assert first() == second()

    return tmp_path / "progress.jsonl"


def saved(file) -> dict:
    assert file.exists()
    return {id: asdict(entry) for id, entry in record.load().items()}


def failure(*args) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        check(*args)
    return caught.value


def test_a_right_answer_passes_in_one_line(course):
    assert repr(check("97.1", lambda x: x * x)) == "✓ 97.1 Square — one number"
    entry = saved(course)["97.1"]
    assert entry["tries"] == 1 and entry["solved"]


def test_the_line_of_a_verified_function_is_the_same_on_every_machine(on_cpu):
    @exercises.exercise("97.3", title="Kernel", minutes=5)
    def _(fn):
        return verify(fn, max_seq=16)

    from flashlab.check.zoo.attention import flash_forward

    first, second = repr(check("97.3", flash_forward)), repr(check("97.3", lambda q, k, v: flash_forward(q, k, v)))
    assert first == "✓ 97.3 Kernel — 3 cases, all within their bounds"
    assert "e-0" not in second


def test_a_wrong_answer_fails_and_counts_as_a_try(course):
    assert "it should be 4" in str(failure("97.1", lambda x: x + 1))
    failure("97.1", lambda x: x + 1)
    assert saved(course)["97.1"] == {"tries": 2, "hints": 0, "solved": None}


def test_a_blank_is_not_solved_yet_and_no_try(course):
    def blank(x):
        raise NotImplementedError

    failed = failure("97.1", blank)
    assert failed.diagnosis == "not-solved-yet" and "not solved yet" in str(failed)
    assert failure("97.1", None).diagnosis == "not-solved-yet"
    assert not course.exists()


def test_a_blank_that_triton_wrapped_is_not_solved_yet():
    def kernel(x):
        try:
            raise NotImplementedError
        except NotImplementedError as error:
            raise RuntimeError("NotImplementedError()") from error

    assert failure("97.1", kernel).diagnosis == "not-solved-yet"


def test_an_operation_that_torch_lacks_is_an_error_not_a_blank():
    def lacking(x):
        raise NotImplementedError("Could not run 'aten::bmm' with arguments from the 'SparseCPU' backend")

    with pytest.raises(NotImplementedError, match="aten::bmm"):
        check("97.1", lacking)


def test_a_learners_exception_is_theirs(course):
    def mine(x):
        return [][1]

    with pytest.raises(IndexError) as caught:
        check("97.1", mine)
    if sys.version_info >= (3, 11):
        assert any("x = 2" in note for note in caught.value.__notes__)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "mine"
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert not any("contextlib" in file for file in files), files
    assert saved(course)["97.1"]["tries"] == 1


def test_an_interrupt_passes_through_and_changes_nothing(course):
    threads = torch.get_num_threads()

    @exercises.exercise("97.3", title="Kernel", minutes=5)
    def _(fn):
        return verify(fn)

    def endless(q, k, v, *, causal, scale):
        raise KeyboardInterrupt  # what the stop button raises in the middle of a loop

    with pytest.raises(KeyboardInterrupt):
        check("97.3", endless)
    assert not course.exists()
    assert torch.get_num_threads() == threads
    assert torch._C._len_torch_function_stack() == 0  # fresh memory is no longer marked


@pytest.mark.slow
def test_an_endless_loop_can_be_stopped(tmp_path):
    script = (
        "from flashlab.check import verify\n"
        "def endless(q, k, v, *, causal, scale):\n"
        "    print('running', flush=True)\n"
        "    while True: pass\n"
        "try: verify(endless)\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "stopped\n"


def test_an_unknown_exercise_names_its_neighbours():
    failed = failure("97.11", lambda x: x)
    assert failed.diagnosis == "unknown-exercise" and "97.1" in str(failed)
    assert "in quotes" in str(failure(97.1, lambda x: x))
    assert "there is no exercise 'nonsense'" in str(failure("nonsense", lambda x: x))


def test_the_number_of_answers_is_checked():
    failed = failure("97.2", lambda: 1)
    assert 'check("97.2", first, second)' in str(failed) and failed.diagnosis == "wrong-arguments"
    assert repr(check("97.2", lambda: 1, lambda: 1)) == "✓ 97.2 Two functions"


def test_hints_come_one_after_the_other(course):
    assert "Hint 1 of 2" in repr(hint("97.1")) and "What is 2 * 2?" in hint("97.1", level=1)._repr_markdown_()
    second = hint("97.1")
    assert "x * x" in repr(second) and "last hint" in repr(second)
    assert repr(hint("97.1")) == repr(second)
    assert "One more" in repr(hint("97.1", level=1))
    assert saved(course)["97.1"]["hints"] == 2
    assert repr(hint("97.2")) == "This exercise has no hints."
    with pytest.raises(CheckFailed, match="hints 1 to 2"):
        hint("97.1", level=3)


def test_progress_lists_what_was_done(course):
    check("97.1", lambda x: x * x)
    hint("97.1")
    table = progress(97)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["Phase 97", "97.1 ✓", "97.2"]
    assert rows["Phase 97"] == ("Phase 97", "", "", "15", "1 of 2", "", "")
    assert rows["97.1 ✓"][4].startswith("20") and rows["97.1 ✓"][5:] == ("1", "1 of 2")
    assert table.caption == "1 of 2 solved, about 10 minutes left."
    assert "| :-- |" in table._repr_markdown_() and "Two functions" in repr(table)


def test_progress_has_a_row_for_each_phase_and_then_its_exercises(course):
    check("97.1", lambda x: x * x)
    first = [row[0].removesuffix(" ✓") for row in progress().rows]
    phases = [name.removeprefix("Phase ") for name in first if name.startswith("Phase ")]
    assert phases == [*(str(p.number) for p in PHASES if any(name.startswith(f"{p.number}.") for name in first)), "97"]
    for name, after in zip(first, first[1:], strict=False):
        if name.startswith("Phase "):
            assert after == name.removeprefix("Phase ") + ".1"
    titles = {row[0]: row[1] for row in progress().rows}
    assert titles["Phase 0"] == PHASES[0].title
    assert progress().caption.startswith("1 of ")


def test_nothing_is_written_when_progress_is_off(course, monkeypatch):
    monkeypatch.setenv("FLASHLAB_PROGRESS", "off")
    check("97.1", lambda x: x * x)
    hint("97.1")
    assert not course.exists()
    assert repr(progress()) == "Progress is not recorded here."


def test_an_id_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="registered twice"):
        exercises.exercise("97.1", title="Another", minutes=1)(lambda fn: None)
    for bad in ("2", "a.b", "2.3.4"):
        with pytest.raises(ValueError, match="phase.number"):
            exercises.exercise(bad, title="x", minutes=1)
    with pytest.raises(ValueError, match="difficulty"):
        exercises.exercise("97.9", title="x", minutes=1, difficulty="Hard")


def test_every_registered_exercise_is_complete():
    real = {id: e for id, e in exercises.exercises().items() if e.phase < 90}
    for id, e in real.items():
        assert e.title and e.minutes > 0 and e.hints, id
    ids = list(real)
    assert ids == sorted(ids, key=lambda id: tuple(map(int, id.split("."))))
