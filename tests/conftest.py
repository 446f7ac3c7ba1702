"""flashlab comes before triton, in whatever order a test imports them: it decides whether kernels are interpreted."""

import collections
import os
import signal
from pathlib import Path

# Tests are small, and run side by side: more threads only wait for each other. numpy's library reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")  # figures are drawn, and none is shown

import pytest
import torch

import flashlab  # noqa: F401
from flashlab.check import mend

mend.loud = True  # a mender that fails says nothing, as one that finds nothing

HERE = Path(__file__).parent
# Whole kernels in the emulator, the whole zoo of mutants, compilers, processes: each file takes some ten seconds.
# Beside them, single tests are marked where they stand.
SLOW_FILES = (
    "check/test_check_mutants.py", "check/test_check_verification.py", "cuda/test_ablations.py",
    "cuda/test_builds.py", "cuda/test_decoding.py", "cuda/test_hopper_backward.py", "cuda/test_mutants.py",
    "cuda/test_operators.py", "cuda/test_resources.py", "cuda/test_series.py", "exercises/test_hunts.py",
    "exercises/test_phase_04.py", "exercises/test_phase_06.py", "exercises/test_phase_07.py",
    "exercises/test_phase_08.py", "exercises/test_phase_09.py", "exercises/test_phase_10.py",
    "exercises/test_phase_11.py", "exercises/test_rules.py", "exercises/test_told_cuda.py", "simt/test_build.py",
    "simt/test_hopper_memory.py", "simt/test_mistakes.py", "simt/test_process.py", "simt/test_waiting_blocks.py",
    "test_build.py", "test_compile_report.py", "test_doctor.py", "test_setup.py",
)  # fmt: skip

# The longest files, longest first, and not two at the head that need the emulator's runtime at once: spread over
# processes, none is then left with a long one at the end.
FIRST = (
    "exercises/test_rules.py", "exercises/test_phase_04.py", "check/test_check_mutants.py",
    "exercises/test_told_cuda.py", "exercises/test_phase_10.py", "exercises/test_hunts.py",
    "exercises/test_phase_09.py", "simt/test_mistakes.py", "cuda/test_hopper_series.py", "exercises/test_phase_11.py",
    "cuda/test_mutants.py", "cuda/test_series.py", "exercises/test_phase_05.py",
    "check/test_weights.py", "cuda/test_decoding.py", "exercises/test_phase_01.py", "exercises/test_phase_03.py",
    "exercises/test_phase_08.py", *SLOW_FILES, "exercises/test_ladders.py", "exercises/test_phase_12.py",
)  # fmt: skip

torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored, which the processes that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Builds of this test go here, not to the user's."""
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    return tmp_path


def pytest_collection_modifyitems(config, items):
    seen = collections.Counter()
    for item in items:
        every = item.get_closest_marker("every")
        if every and not item.get_closest_marker("long"):
            if seen[item.function] % every.args[0]:
                item.add_marker(pytest.mark.long)
            seen[item.function] += 1
    for mark in ("gpu", "long", "multi_gpu"):  # thousands of cases, minutes of compiling: only where they are asked for
        if mark not in config.option.markexpr:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    place = {HERE / file: number for number, file in reversed(list(enumerate(FIRST)))}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))  # stable: a file's own tests stay as they stand
    slow = {HERE / file for file in SLOW_FILES}
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)
