"""Run every part of `make test`, or those named, one after the other, and end with a table of their times.

    python tools/run_tests.py [static] [unit] [starters] [notebooks] | lint | sync | lectures | solutions | quick | long

A part that fails does not stop the others; the exit status is 1 if any failed, and the last lines name them and the
command that runs each again. `static` is `lint` and `sync` side by side, `notebooks` is `lectures` and `solutions` in
one run; `quick` is what of `unit` is not slow, `long` what `unit` leaves out. A learner's filled-in exercises
are in none of the parts: only `CI=true` compares exercises/ with the lessons.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STARTERS = "tests/test_notebooks.py"
# A cell that hangs is cut off after this many seconds; no cell of the course takes a tenth of it on two cores.
CELL_TIMEOUT = 300


@dataclass(frozen=True)
class Part:
    """One part: its name on the command line, what it proves, its commands."""

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    only_by_name: bool = False
    at_once: bool = False  # the commands run side by side, each on one core; what they say comes one after the other


def parts(python: str = sys.executable) -> list[Part]:
    """The parts in the order in which they run: the quick ones first."""
    pytest = (python, "-m", "pytest", "--color=yes" if sys.stdout.isatty() else "--color=no")
    tests = (*pytest, "-p", "no:nbval")  # its imports take seconds in each process
    # A process for each core, a file of tests in one process: what a file builds, it builds once. The files of the unit
    # tests come in the order of tests/conftest.py, the longest first; of the starters each page is one test.
    # One process that crashes is a failure; by itself xdist would run its file again, eight times.
    spread = ("-n", "auto", "--dist", "loadfile", "--max-worker-restart", "1")
    unit = (*tests, *spread, "--no-loadscope-reorder", "tests", f"--ignore={STARTERS}")
    nbval = (*pytest, *spread, "-p", "tools.no_grammars", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env",
             f"--nbval-cell-timeout={CELL_TIMEOUT}", "--nbval-sanitize-with", "nbval.cfg")  # fmt: skip
    lint = ((python, "-m", "ruff", "check", "."), (python, "-m", "ruff", "format", "--check", "--quiet", "."),
            (python, "-m", "mypy"))  # fmt: skip
    build = str(ROOT / "src" / "lessons" / "build.py")

    def ours(folder: str) -> list[str]:  # not a notebook that a learner made beside them; without one a file that fails
        found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("[0-9][0-9]*_*.ipynb"))]
        return found or [f"{folder}/*.ipynb"]

    lectures, solutions = ours("notebooks"), ours("solutions")
    in_sync = (python, build, "--check")
    starters = (*tests, "-n", "auto", "--dist", "worksteal", STARTERS)
    return [
        Part("static", "ruff, mypy, and lessons in sync with the notebooks", (*lint, in_sync), at_once=True),
        Part("lint", "ruff and mypy", lint, True),
        Part("sync", "lessons in sync with the notebooks", (in_sync,), True),
        Part("unit", "unit and property tests", (unit,)),
        Part("quick", "unit tests that are not slow", ((*unit, "-m", "not slow"),), True),
        Part("long", "unit tests that others nearly stand for", ((*unit, "-m", "long"),), True),
        Part("starters", "every unsolved exercise fails, and nothing else", (starters,)),
        Part("notebooks", "every lecture and every solution gives the outputs it shows",
             ((*nbval, *lectures, *solutions),)),
        Part("lectures", "every lecture gives the outputs it shows", ((*nbval, *lectures),), True),
        Part("solutions", "every solution gives the outputs it shows", ((*nbval, *solutions),), True),
    ]  # fmt: skip


def since(start: float) -> timedelta:
    return timedelta(seconds=round(time.time() - start))


def run_part(part: Part, number: int, of: int, begun: float) -> tuple[bool, timedelta]:
    """Run one part, its output straight to the screen. Returns (passed, how long it took)."""
    print(f"\n[{number}/{of}] {part.title}   ({since(begun)} so far)", flush=True)
    start = time.time()
    if part.at_once:
        passed = all(_side_by_side(part.commands))
    else:
        passed = all([subprocess.run(command, cwd=ROOT).returncode == 0 for command in part.commands])
    took = since(start)
    print(f"[{number}/{of}] {'passed' if passed else 'FAILED'} in {took}", flush=True)
    return passed, took


def _side_by_side(commands: Sequence[Sequence[str]]) -> list[bool]:
    """Run them all at once; what each has said is printed when it has ended. Returns whether each passed."""
    told = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    passed = []
    with ThreadPoolExecutor(len(commands)) as pool:
        for done in pool.map(lambda command: subprocess.run(command, **told), commands):
            passed.append(done.returncode == 0)
            print(done.stdout, end="", flush=True)
    return passed


def main(names: list[str]) -> int:
    # A process for each core: threads of small products, torch's and numpy's, would only spin and wait for each other.
    for library in ("OMP", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    # Images of containers say so to stay small: each process would compile the package, and pytest all tests, anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    every = parts()
    unknown = [name for name in names if name not in {part.name for part in every}]
    if unknown:
        print(f"there is no part {unknown[0]}: choose from {', '.join(part.name for part in every)}", file=sys.stderr)
        return 2
    chosen = [part for part in every if part.name in names or not (names or part.only_by_name)]
    begun = time.time()
    results = []
    for number, part in enumerate(chosen, 1):
        try:
            results.append((part, *run_part(part, number, len(chosen), begun)))
        except KeyboardInterrupt:
            print(f"\nstopped by you in part {number} of {len(chosen)}: {part.title}", file=sys.stderr)
            return 130
    print()
    for part, passed, took in results:
        print(f"  {'passed' if passed else 'FAILED'}  {part.name:<10} {took!s:>8}   {part.title}")
    failed = [part for part, passed, _ in results if not passed]
    print(f"  {'passed' if not failed else 'FAILED'}  {'in all':<10} {since(begun)!s:>8}")
    if failed:
        print("\nTo run again only what failed: " + ", ".join(f"make test-{part.name}" for part in failed))
    sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
