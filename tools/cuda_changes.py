"""Computes anew what changes of CUDA solutions give (`flashlab.check.cuda_index`): python tools/cuda_changes.py 6.1

Each change that the trials do not tell from the right text, and for which no reason stands in `equal`, is put to the
exercise's check. What that accepts too is printed, as open: a hole in the check, or a text that is as right. With
--quick no check is asked; with --judge no change is run anew.

With --survivors it is a table over all exercises, or over these, whatever their kind: how many changes their checks
refuse, how many of the others are explained, and how many are open. (A change of a rule, a tensor function or a Triton
kernel is explained by giving what the right one gives on all drawn inputs.) Nothing else is computed; minutes a kernel.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "exercises"), str(ROOT / "src" / "lessons")]

from lesson_answers import answers_of  # noqa: E402

from flashlab.check import CheckFailed, cuda_index  # noqa: E402
from flashlab.check.cuda_index import TRIALS, joined, parted  # noqa: E402
from flashlab.exercises import registry  # noqa: E402
from flashlab.exercises.rule import RULES  # noqa: E402

cuda_index.mended = lambda *_: ""  # it asks for what is computed here


def judged(id: str, text: str) -> str:
    """What the check says against a text; nothing where it accepts it."""
    try:
        registry.exercises()[id].run(*parted(text))
    except CheckFailed as failed:
        return f"the check tells it: {failed.diagnosis}"
    return ""


def counted(id: str) -> tuple[int, int, list[str]]:
    """Of an exercise's changes: how many there are, how many its check accepts, and those that nobody has explained."""
    changes, accepted, silent = 0, 0, []
    if id in TRIALS:
        kept = TRIALS[id].kept
        changes = len(kept["changes"]) + len(kept["same"])
        accepted = sum(bool(TRIALS[id].why_equal(said)) or not verdict for said, verdict in kept["same"])
        silent = [said for said, why in TRIALS[id].survivors(kept).items() if not why]
    for it in (it for name, it in RULES.items() if name.split()[0] == id):
        survivors = it.survivors()
        changes += len(it.index.outcomes)
        accepted += len(survivors)
        silent += [said for said, told_by in survivors if told_by is not None]
    return changes, accepted, silent


def table(ids: Sequence[str]) -> int:
    """Prints a line for each of these exercises of which changes are made, and the sums by phase."""
    form = "{:>9} {:>9} {:>9} {:>9} {:>9} {:>7}".format
    print(form("", "changes", "refused", "explained", "open", "seconds"))
    phases: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for id in ids:
        begin = time.monotonic()
        changes, accepted, silent = counted(id)
        if changes:
            took = round(time.monotonic() - begin)
            row = changes, changes - accepted, accepted - len(silent), len(silent), took
            print(form(id, *row), *silent, sep="\n    ", flush=True)
            phases[id.split(".")[0]] = [x + y for x, y in zip(phases[id.split(".")[0]], row, strict=True)]
    for phase, row in phases.items():
        print(form(f"phase {phase}", *row))
    return sum(bool(row[3]) for row in phases.values())


def main(arguments: list[str]) -> int:
    exercises = registry.exercises()
    if "--survivors" in arguments and not set(arguments) - {"--survivors", *exercises}:
        return table([id for id in exercises if id in arguments or arguments == ["--survivors"]])
    unknown = [x for x in arguments if x not in (*TRIALS, "--quick", "--judge")]
    if unknown:
        print(__doc__, f"{unknown[0]} is none of {', '.join(TRIALS)} and no option", sep="\n", file=sys.stderr)
        return 2
    for id in [x for x in arguments if x in TRIALS] or TRIALS:
        it, begin, text = TRIALS[id], time.monotonic(), joined(answers_of(id, "solutions"))
        kept = it.compute(text) if "--judge" not in arguments else json.loads(it.path.read_text())
        if "--quick" not in arguments:
            it.judge(text, kept, partial(judged, id))
        survivors = it.survivors(kept)
        silent = [said for said, why in survivors.items() if not why]
        told = f"{id}: {len(kept['changes'])} changes show, {len(survivors) - len(silent)} do not and it is known why"
        took = f"{time.monotonic() - begin:.0f} s"
        print(f"{told}, {len(silent)} are open, {took}", *silent, sep="\n    ", flush=True)
        lines = {
            key: ",\n".join(json.dumps(x, separators=(",", ":")) for x in kept[key]) for key in ("same", "changes")
        }
        head = f'"digest":"{kept["digest"]}","right":{json.dumps(kept["right"], separators=(",", ":"))}'
        end = f'\n],\n"text":{json.dumps(text)}}}\n'
        it.path.parent.mkdir(exist_ok=True)
        it.path.write_text(f'{{{head},\n"same":[\n{lines["same"]}\n],"changes":[\n{lines["changes"]}{end}')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
