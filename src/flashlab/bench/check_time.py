"""How long a check takes: measured on purpose, never asserted in a test."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from flashlab.check import CheckFailed
from flashlab.check.table import Table


def check_time(checks: Mapping[str, Callable[[], Any]], *, repeats: int = 3) -> Table:
    """Run each check `repeats` times; a table of the first, the median and the slowest time in seconds.

    checks: name -> a call without arguments, `lambda: verify(fn)` or `lambda: check("2.3", fn)`. A check that fails is
    timed too: its diagnosis is part of what the learner waits for.
    """
    rows = []
    for name, run in checks.items():
        seconds, result = [], ""
        for _ in range(repeats):
            start = time.perf_counter()
            try:
                result = str(run())
            except CheckFailed as failed:
                result = f"✗ {failed.diagnosis}"
            seconds.append(time.perf_counter() - start)
        times = (seconds[0], statistics.median(seconds), max(seconds))
        rows.append((name, *(f"{t:.2f}" for t in times), result))
    return Table(("Check", "First (s)", "Median (s)", "Slowest (s)", "Result"), tuple(rows))
