"""check, hint and progress, as a learner calls them."""

import inspect
import linecache
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import pytest
import torch
from failing import failure_of

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


failure = partial(failure_of, check)


def test_a_right_answer_passes_in_one_line(course):
    assert repr(check("97.1", lambda x: x * x)) == "✓ 97.1 Square — one number"
    check(" 97.1 ", lambda x: x * x)
    entry = saved(course).pop("97.1")
    assert entry["tries"] == 1 and entry["solved"] and len(saved(course)) == 1


def test_other_cases_are_told_where_a_comparison_tells_nothing():
    @exercises.exercise("97.3", title="Sum", minutes=5, difficulty="Warm-up", hints=[])
    def _(fn):
        for a in (1, 2, 3):
            for b in (10, 20):
                expect_close(fn(a, b), a + b, what="the sum", case=f"a={a}, b={b}")

    assert str(failure("97.3", lambda a, b: a + b + (b == 20))).endswith(". Wrong are just the cases with b=20: 3 of 6")
    assert str(failure("97.3", lambda a, b: a + b - (a > 1))).endswith(". Right are just the cases with a=1: 2 of 6")
    one = str(failure("97.3", lambda a, b: a + b + (a == 2 and b == 20)))
    assert one.endswith(". Right: a=1, b=10; and 4 more. No other case is wrong")
    assert "ight" not in str(failure("97.3", lambda a, b: 7 * a))


def test_the_line_of_a_verified_function_is_the_same_on_every_machine(on_cpu):
    @exercises.exercise("97.3", title="Kernel", minutes=5)
    def _(fn):
        return verify(fn, max_seq=16)

    from flashlab.check.mistakes.attention import flash_forward

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

    failed = failure("97.1", lacking)
    assert failed.diagnosis == "exception" and "aten::bmm" in str(failed)


def test_a_learners_exception_is_told_with_its_line_and_case(course):
    def mine(x):
        return [][1]

    failed = failure("97.1", mine)
    line = inspect.getsourcelines(mine)[1] + 1
    assert str(failed) == (
        f"your code raised IndexError: list index out of range, in line {line} of test_check_front.py, `return [][1]`"
    )
    assert (failed.diagnosis, failed.case) == ("exception", "x = 2")
    assert isinstance(failed.__cause__, IndexError)
    assert saved(course)["97.1"]["tries"] == 1


def test_shapes_that_do_not_match_are_told(course):
    def mine(x):
        many, sums = torch.ones(3, 4), torch.ones(3)
        return many / sums[None, :]

    assert "; there many is [3, 4], sums[None, :] [1, 3]" in str(failure("97.1", mine))


def test_a_line_of_a_cell_is_called_so(course):
    source = "def mine(x):\n    y = x\n    return y.missing\n"
    names = {}
    linecache.cache["/tmp/ipykernel_7/12.py"] = (len(source), None, source.splitlines(True), "/tmp/ipykernel_7/12.py")
    exec(compile(source, "/tmp/ipykernel_7/12.py", "exec"), names)
    assert "in line 3 of the cell, `return y.missing`" in str(failure("97.1", names["mine"]))


def test_what_the_check_cannot_use_is_told_as_what_was_returned(course):
    @exercises.exercise("97.3", title="Pair", minutes=5)
    def _(fn: Callable[..., tuple[int, float]]):
        first, second = fn(3)
        return "" if first < second else ""

    assert "your function returned None, and" in str(failure("97.3", lambda x: None))
    assert "a tuple of 2 (a whole number, a number) is wanted (TypeError" in str(failure("97.3", lambda x: (None, "a")))
    failed = failure("97.3", lambda: 1)
    assert failed.diagnosis == "wrong-signature" and "your function(3)" in str(failed)
    assert failed.case == "the call your function(3)"


def test_an_exit_in_an_answer_ends_nothing(course):
    assert "SystemExit: 3" in str(failure("97.1", lambda x: sys.exit(3)))


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
    assert process.communicate()[0] == "stopped\n"


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
    for level in (3, 0, "2", 1.0, True):
        with pytest.raises(CheckFailed, match=f"97.1 has hints 1 to 2, and level is one of .*, not {level!r}"):
            hint("97.1", level=level)


def test_progress_lists_what_was_done(course):
    check("97.1", lambda x: x * x)
    hint("97.1")
    table = progress(97)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["Phase 97", "97.1 ✓", "97.2"]
    assert rows["Phase 97"] == ("Phase 97", "", "", "15", "1 of 2", "", "")
    assert rows["97.1 ✓"][4].startswith("20") and rows["97.1 ✓"][5:] == ("1", "1 of 2")
    assert table.caption == "1 of 2 solved, about 10 minutes left. Next: 97.2 Two functions, about 10 min."
    assert "| :-- |" in table._repr_markdown_() and "Two functions" in repr(table)


@pytest.mark.parametrize("phase", ["2", 55, True, 1.0])
def test_progress_of_a_phase_that_is_none(course, phase):
    with pytest.raises(CheckFailed, match=f"phase is one of the numbers 0, 1, .*, not {phase!r}"):
        progress(phase)


def test_a_check_that_takes_long_says_how_to_interrupt_it(course, monkeypatch, capsys):
    """A loop without an end looks like a check at work. The clock is a stand-in: it strikes at once, or never."""
    timers = []

    class Strikes(threading.Timer):
        def start(self):
            timers.append(self)
            self.function(*self.args, **self.kwargs)

    class Never(threading.Timer):
        def start(self):
            timers.append(self)

    over = []  # whenever the answer is called, a wrong one again on all cases
    for timer in (Strikes, Never):
        monkeypatch.setattr(threading, "Timer", timer)
        check("97.1", lambda x: x * x)
        failure("97.1", lambda x: over.append(timers[-1].finished.is_set()) or 5.0)
    assert len(over) >= 4 and not any(over)
    said = capsys.readouterr().err.splitlines()
    assert said == 2 * [
        "97.1: 30 s so far. If your code loops without an end, interrupt it: ■ in the notebook, Ctrl-C in a terminal"
    ]
    assert all(timer.interval == 30 and timer.finished.is_set() for timer in timers), "none outlives its check"


def test_progress_has_a_row_for_each_phase_and_the_exercises_of_those_begun(course):
    check("97.1", lambda x: x * x)
    hint("0.3")
    table = progress()
    first = [row[0].removesuffix(" ✓") for row in table.rows]
    phases = dict.fromkeys(e.phase for e in exercises.exercises().values())
    assert [first[i] for i in sorted(table.heads)] == [f"Phase {number}" for number in phases]
    listed = [name for name in first if not name.startswith("Phase ")]
    assert listed == [*(f"0.{i}" for i in range(1, 9)), "97.1", "97.2"], "of a phase that was begun, all"
    titles = {row[0]: row[1] for row in table.rows}
    assert titles["Phase 0"] == PHASES[0].title
    assert table.caption.startswith("1 of ")
    assert [row[0] for row in progress(1).rows][:2] == ["Phase 1", "1.1"], "one that is asked for is listed in full"
    assert "**Phase 0**" in table._repr_markdown_()


def test_progress_reads_well_before_anything_is_solved(course):
    table = progress()
    assert all(row[0].startswith("Phase ") and " of " in row[-1] for row in table.rows)
    assert table.columns == ("Exercise", "Title", "Minutes", "Solved")
    assert "hours left. You have not begun yet. Next: 0.1 " in table.caption


def test_the_next_exercise(course):
    assert front.following() == (
        "Next: 0.1 " + exercises.find("0.1").title + ", exercises/00_attention_and_online_softmax.ipynb, about "
        f"{exercises.find('0.1').minutes} min."
    )
    record.solved("0.1")
    assert front.next_exercise().id == "0.2"
    for i in range(1, 14):
        record.solved(f"4.{i}") if i not in (3, 10) else None
    assert front.next_exercise().id == "4.3", "where one was last, not where one left out something"
    record.solved("4.3")
    assert front.next_exercise().id == "4.10", "a stretch exercise after the others of its phase"
    assert front.next_exercise("11b").id == "11b.1" and "Next: 4.10" in progress().caption
    for id in exercises.exercises():
        record.solved(id)
    assert front.following() == "Every exercise is solved."


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
    real = {id: e for id, e in exercises.exercises().items() if e.order < (90,)}
    for id, e in real.items():
        assert e.title and e.minutes > 0 and e.hints, id
    ids = list(real)
    assert ids == sorted(ids, key=lambda id: real[id].order)
