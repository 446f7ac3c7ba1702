"""How long the check of every solved exercise takes on this machine.

flashlab bench verdicts            # writes .flashlab/bench/verdicts.json in the clone of the course
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlab.bench import records
from flashlab.table import Table

ROOT = Path(__file__).resolve().parents[3]  # of a clone of the course


def time_checks(notebook: Path) -> list[dict[str, Any]]:
    """Run a solution notebook's code cells in this process and time each `check(id, ...)` in them.

    Returns [{"id": "2.3", "seconds": 1.2, "cpu_seconds": 1.9, "passed": True}, ...] in the notebook's order: elapsed
    time, and processor time of all threads, which a busy machine does not lengthen. A cell that raises ends it, with
    the exception; `main` runs this in a process of its own.
    """
    import nbformat

    from flashlab import exercises as checker

    os.environ["FLASHLAB_PROGRESS"] = "off"
    found: list[dict[str, Any]] = []
    original = checker.check

    def timed(id: str, *answers: Any) -> Any:
        start, cpu_start = time.perf_counter(), time.process_time()
        passed = False
        try:
            result = original(id, *answers)
            passed = True
            return result
        finally:
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            row = {"id": id, "seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3), "passed": passed}
            found.append(row)

    # Kernels are looked up by their source: each cell is a file, as in Jupyter.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    checker.check = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells):
                if cell.cell_type == "code":
                    file = Path(folder, f"cell_{number}.py")
                    file.write_text(cell.source, encoding="utf-8")
                    exec(compile(cell.source, str(file), "exec"), namespace)
    finally:
        checker.check = original
    return found


def _in_child(notebook: Path) -> tuple[list[dict[str, Any]], str | None]:
    """`time_checks` in a fresh process: a notebook starts from nothing, and one that crashes spoils no other."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        code = (
            "import json, sys; from pathlib import Path; from flashlab.bench.verdicts import time_checks; "
            "Path(sys.argv[2]).write_text(json.dumps(time_checks(Path(sys.argv[1]))))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(notebook), str(answer)],
            cwd=notebook.parent, env={**os.environ, "MPLBACKEND": "Agg"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return [], (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return json.loads(answer.read_text()), None


def run(notebooks: Sequence[Path]) -> dict[str, Any]:
    """Times the checks of these solution notebooks: the rows of ``time_checks``, and by file what has failed."""
    result: dict[str, Any] = {"machine": records.machine(), "checks": [], "errors": {}}
    for notebook in notebooks:
        found, error = _in_child(notebook)
        result["checks"] += found
        if error:
            result["errors"][notebook.name] = error
    return result


def table(data: dict[str, Any]) -> Table:
    """Seconds per check."""
    rows = [
        [r["id"], f"{r['seconds']:.2f}", f"{r['cpu_seconds']:.2f}", "" if r["passed"] else "failed"]
        for r in data["checks"]
    ]
    slowest = max((r["seconds"] for r in data["checks"]), default=0.0)
    caption = [f"{len(rows)} checks, the slowest {slowest:.1f} s"]
    caption += [f"✗ {name}: {error}" for name, error in data["errors"].items()]
    columns = ["exercise", "elapsed, s", "processor, s", ""]
    return Table.of(rows, columns, align="lrrl", caption="\n".join(caption))


def main(arguments: Sequence[str] | None = None) -> None:
    given = records.parser(__doc__, "verdicts").parse_args(arguments)
    notebooks = sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.ipynb"))
    if not notebooks:
        raise SystemExit("There are no solutions beside this package: run it in a clone of the course.")
    given.out = given.out or ROOT / ".flashlab" / "bench" / "verdicts.json"
    result = run(notebooks[:1] if given.quick else notebooks)
    records.keep(given.out, result, table, given)
    if result["errors"] or not all(row["passed"] for row in result["checks"]):
        raise SystemExit(1)


if __name__ == "__main__":
    records.entry(main)
