"""Computes anew what changes of CUDA solutions give (`flashlab.check.cuda_index`): python tools/cuda_changes.py 6.1

Each change that the trials do not tell from the right text, and for which no reason stands in `equal`, is put to the
exercise's check. What that accepts too is printed, as open: a hole in the check, or a text that is as right. With
--check nothing is written; with --quick no check is asked; with --judge no change is run anew.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "exercises"), str(ROOT / "src" / "lessons")]

from lesson_answers import answers_of  # noqa: E402

from flashlab.check import CheckFailed  # noqa: E402
from flashlab.check.cuda_index import TRIALS, joined, parted  # noqa: E402
from flashlab.exercises import registry  # noqa: E402


def judged(id: str, text: str) -> str:
    """What the check says against a text; nothing where it accepts it."""
    try:
        registry.exercises()[id].run(*parted(text))
    except CheckFailed as failed:
        return f"the check tells it: {failed.diagnosis}"
    return ""


def main(arguments: list[str]) -> int:
    registry.exercises()
    unknown = [x for x in arguments if x not in (*TRIALS, "--check", "--quick", "--judge")]
    if unknown:
        print(__doc__, f"{unknown[0]} is none of {', '.join(TRIALS)} and no option", sep="\n", file=sys.stderr)
        return 2
    due = 0
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
        written = f'{{{head},\n"same":[\n{lines["same"]}\n],"changes":[\n{lines["changes"]}\n]}}\n'
        path = it.path
        if "--check" in arguments:
            due += not path.exists() or json.loads(path.read_text()) != json.loads(written)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(written)
    return due


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
