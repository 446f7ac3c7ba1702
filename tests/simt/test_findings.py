"""What is said of a finding, its block and its threads: kernels/broken.cu. That each mistake is found, and on which
line, is test_mistakes.py's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashlab.simt import (
    DeadlockError,
    IllegalAccess,
    KernelFindings,
    KernelTimeout,
    KernelTrap,
    LaunchError,
    find_compiler,
)

from .conftest import KERNELS, module

NOWHERE = "belongs to no argument|wild"
LINES = {m[1]: n for n, text in enumerate((KERNELS / "broken.cu").read_text().splitlines(), 1)
         if (m := re.search(r"// <- (.*)$", text))}  # fmt: skip


def run(entry: str, *args, check: bool = True, **options):
    return getattr(module("broken.cu", check), entry)(*args, **options)


def floats(n: int = 128) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def ints(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.int32)


def only(report, kind: str):
    """The one kind of finding there is, its first."""
    assert {f.kind for f in report.findings} == {kind}, report
    return report.findings[0]


def test_race_names_both_lines_and_threads():
    report = run("run_missing_barrier", floats())
    races = [f for f in report.findings if f.kind == "race"]
    assert races and not report.ok
    finding = next(f for f in races if f.line == LINES["race: read"])
    assert finding.other_line == LINES["race: written"]
    assert finding.text.startswith("p[threadIdx.x] = tile[63")
    assert finding.block == (0, 0, 0) and abs(finding.thread[0] + finding.other_thread[0]) == 63
    assert "with no barrier between" in finding.message and f"line {LINES['race: written']}" in finding.message
    assert finding.times % 2 == 0  # in each of the two blocks


def test_two_writers():
    finding = only(run("run_both_write", ints()), "race")
    assert finding.line == finding.other_line == LINES["two writers"]


def test_read_before_the_wait():
    finding = only(run("run_no_wait", floats(), floats()), "read-before-wait")
    assert (finding.line, finding.other_line) == (LINES["too early"], LINES["issued"])


def test_barrier_before_the_wait():
    finding = only(run("run_barrier_before_wait", floats(256), floats()), "read-before-wait")
    assert (finding.line, finding.other_line) == (LINES["not visible yet"], LINES["landed"])
    assert "then a barrier" in finding.message


def test_bytes_land_at_the_wait_and_not_before():
    out = np.zeros(128, np.float32)
    run("run_no_wait", floats(), out, check=False)
    assert np.isnan(out[:32]).all()  # what was in shared memory before: nothing
    run("run_barrier_before_wait", floats(256), out, check=False)
    assert not np.isnan(out[:64]).all()


@pytest.mark.parametrize("check", [False, True])
def test_copies_never_waited_for(check):
    finding = only(run("run_never_waited", floats(), floats(), check=check), "never-waited")
    assert finding.line == LINES["never waited for"] and "never waited" in finding.message
    finding = only(run("run_never_committed", floats(), floats(), check=check), "never-waited")
    assert finding.line == LINES["never committed"] and "never committed" in finding.message


def test_uninitialised_shared_memory():
    finding = only(run("run_uninitialised", floats()), "uninitialised-shared")
    assert finding.line == LINES["nobody wrote"] and finding.thread == (32, 0, 0) and finding.times == 32
    assert "tile at byte 128" in finding.message
    finding = only(run("run_ldmatrix_uninitialised", np.zeros(32, np.uint32)), "uninitialised-shared")
    assert finding.line == LINES["ldmatrix of nothing"]
    assert "ldmatrix" in finding.message and "bytes 0 to 15 of the dynamic shared memory" in finding.message


def test_dynamic_shared_memory_out_of_bounds():
    with pytest.raises(IllegalAccess) as caught:
        run("run_dynamic_out_of_bounds", floats(), 1)
    finding = caught.value.report.findings[0]
    assert finding.line == LINES["beyond the dynamic array"] and finding.thread == (63, 0, 0)
    assert "bytes 256 to 259 of dynamic shared memory; the launch asked for 256" in finding.message


def test_static_arrays_out_of_bounds():
    report = run("run_static_index", floats(), 9)
    finding = next(f for f in report.findings if f.kind == "index-out-of-bounds")
    assert finding.line == LINES["index beyond the row"] and "index 9 of an array of type float [9]" in finding.message
    with pytest.raises(IllegalAccess, match="the launch asked for 0") as caught:
        run("run_static_pointer", floats(), 1 << 14)
    assert caught.value.report.findings[0].line == LINES["beyond the static array"]


@pytest.mark.parametrize("check", [False, True])
def test_ldmatrix_out_of_bounds(check):
    report = run("run_ldmatrix_out_of_bounds", np.zeros(32, np.uint32), check=check)
    finding = only(report, "shared-out-of-bounds")
    assert finding.line == LINES["rows 8 to 15"] and finding.thread == (8, 0, 0)


def test_global_memory_out_of_bounds_stops_there():
    data = floats(64)
    out = np.zeros(64, np.float32)
    with pytest.raises(IllegalAccess) as caught:
        run("run_past_the_end", data, out, 1)
    finding = caught.value.report.findings[-1]
    assert finding.kind == "global-out-of-bounds" and finding.fatal
    assert finding.line == LINES["beyond the end"] and finding.block == (1, 0, 0) and finding.thread == (31, 0, 0)
    assert "element 64 of in (shape [64]), 4 bytes past its end" in finding.message
    assert not out.any()  # a launch that failed brings nothing back
    with pytest.raises(IllegalAccess, match="4 bytes before the start of in"):
        run("run_past_the_end", data, out, -1)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "where, words", [(1 << 17, "past its end"), (1 << 40, NOWHERE), (-(1 << 44), NOWHERE), (1 << 62, NOWHERE)]
)
def test_wild_pointers_are_exceptions_and_not_crashes(check, where, words):
    with pytest.raises(IllegalAccess, match=words) as caught:
        run("run_wild", floats(), where, check=check)
    assert caught.value.report.findings[0].line == LINES["wild"]


@pytest.mark.parametrize("check", [False, True])
def test_null_pointers(check):
    with pytest.raises(IllegalAccess, match="null pointer"):
        run("run_wild", None, 8, check=check)
    with pytest.raises(IllegalAccess, match="null pointer"):
        run("run_copy_out_of_bounds", None, floats(), check=check)


def test_writes_to_const_arguments():
    data = floats()
    finding = only(run("run_read_only", data, floats()), "read-only")
    assert finding.line == LINES["const"] and "in, which the entry declares const" in finding.message
    assert (data == floats()).all()  # the caller's array is untouched


@pytest.mark.skipif("clang" in find_compiler().version, reason="clang++ splits a misaligned float4 into floats")
def test_misaligned_vectors():
    with pytest.raises(
        IllegalAccess, match="16 bytes of global memory at an address that is no multiple of 16"
    ) as caught:
        run("run_misaligned", floats(), floats())
    assert caught.value.report.findings[0].line == LINES["misaligned vector"]


@pytest.mark.parametrize("check", [False, True])
def test_copies_that_are_wrong(check):
    with pytest.raises(IllegalAccess, match="element 256 of in .shape .256.., 16 bytes past its end") as caught:
        run("run_copy_out_of_bounds", floats(256), floats(), check=check)
    assert caught.value.report.findings[-1].line == LINES["copy beyond the end"]
    with pytest.raises(IllegalAccess, match="cp.async.*16 bytes of global memory at an address") as caught:
        run("run_copy_misaligned", floats(), floats(), check=check)
    assert caught.value.report.findings[0].line == LINES["misaligned source"]


@pytest.mark.parametrize("check", [False, True])
def test_divergent_collectives(check):
    with pytest.raises(DeadlockError) as caught:
        run("run_shuffle_in_branch", floats(), check=check)
    finding = caught.value.report.findings[0]
    assert finding.kind == "divergent"
    assert {finding.line, finding.other_line} == {LINES["half of the warp"], LINES["the other half"]}
    assert "__syncwarp" in finding.message and "a shuffle" in finding.message

    finding = only(run("run_two_shuffles", floats(), check=check), "divergent")
    assert {finding.line, finding.other_line} == {LINES["one shuffle"], LINES["another"]}

    finding = only(run("run_shuffle_and_exit", floats(), check=check), "exited-lanes")
    assert finding.line == LINES["named, but gone"] and "lanes 16-31" in finding.message

    finding = only(run("run_barrier_in_branch", floats(), check=check), "divergent")
    assert {finding.line, finding.other_line} == {LINES["one warp"], LINES["the other warp"]}


@pytest.mark.parametrize("check", [False, True])
def test_wrong_masks(check):
    finding = only(run("run_wrong_mask", floats(), check=check), "shuffle-lane")
    assert finding.line == LINES["lane 16"] and "lane 16, which does not take part" in finding.message
    with pytest.raises(DeadlockError, match="mask 0x0000ffff, in which its own lane, 16, is missing"):
        run("run_mask_without_self", floats(), check=check)
    with pytest.raises(
        DeadlockError, match="mma in line .* lanes 0-15 only, but it needs all 32: the warp has only 16"
    ):
        run("run_half_a_warp", floats(), check=check)


@pytest.mark.parametrize("check", [False, True])
def test_deadlock(check):
    with pytest.raises(DeadlockError) as caught:
        run("run_deadlock", floats(), check=check)
    finding = caught.value.report.findings[-1]
    assert finding.kind == "deadlock" and {finding.line, finding.other_line} == {
        LINES["odd lanes"],
        LINES["even lanes"],
    }
    assert "64 threads of 64 left" in finding.message


@pytest.mark.parametrize("check", [False, True])
def test_threads_that_stop_themselves(check, capfd):
    with pytest.raises(KernelTrap, match=r"fails the assertion `p\[threadIdx.x\] >= 0`") as caught:
        run("run_asserts", np.array([0] * 9 + [-1] * 23, np.int32), check=check)
    assert caught.value.report.findings[0].thread == (9, 0, 0)
    assert caught.value.report.findings[0].line == LINES["assertion"]
    with pytest.raises(KernelTrap, match="__trap"):
        run("run_traps", ints(), check=check)
    with pytest.raises(KernelTrap, match="divides an integer by zero") as caught:
        run("run_divides", ints(), 7, check=check)
    assert caught.value.report.findings[0].thread == (7, 0, 0)
    assert caught.value.report.findings[0].line == LINES["division"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("check", [False, True])
def test_a_stack_that_overflows(check):
    with pytest.raises(IllegalAccess, match="more than 640 KB of local memory"):
        run("run_overflows", ints(), check=check)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.every(2)
def test_a_loop_that_does_not_end(check, little_patience):
    with pytest.raises(KernelTimeout, match="still running") as caught:
        run("run_for_ever", ints(), check=check)
    line = caught.value.report.findings[-1].line
    assert LINES["loop"] - 1 <= line <= LINES["loop"] + 4
    assert run("run_opt_in", floats(), check=check).ok  # and the next launch is none the worse


def test_shared_memory_above_48_kb_has_to_be_asked_for():
    with pytest.raises(LaunchError, match="65536 bytes.*cudaFuncSetAttribute"):
        run("run_no_opt_in", floats())
    out = np.zeros(128, np.float32)
    assert run("run_opt_in", out).ok and out[:32].all()


def test_an_entry_that_returns_an_error():
    with pytest.raises(LaunchError, match="run_own_error returned -3"):
        run("run_own_error", floats())


def test_raise_if_findings():
    report = run("run_both_write", ints())
    with pytest.raises(KernelFindings, match="race") as caught:
        report.raise_if_findings()
    assert caught.value.report is report
    good = run("run_opt_in", floats())
    assert good.raise_if_findings() is good
