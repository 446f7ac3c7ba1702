"""Computes anew what changes of CUDA solutions give (`flashlab.check.cuda_index`): python tools/cuda_changes.py 6.1

Prints the changes that the trials do not tell from the right text. With --check nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "exercises"), str(ROOT / "src" / "lessons")]

from lesson_answers import answers_of  # noqa: E402

from flashlab.check.cuda_index import TRIALS, joined  # noqa: E402
from flashlab.exercises import registry  # noqa: E402


def main(arguments: list[str]) -> int:
    registry.exercises()
    due = 0
    for id in [x for x in arguments if x in TRIALS] or TRIALS:
        text = joined(answers_of(id, "solutions"))
        found, survivors = TRIALS[id].compute(text)
        print(f"{id}: {len(found)} changes show, {len(survivors)} do not: {'; '.join(survivors)}", flush=True)
        lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in found)
        written = f'{{"digest":"{TRIALS[id].digest(text)}","changes":[\n{lines}\n]}}\n'
        path = TRIALS[id].path
        if "--check" in arguments:
            due += not path.exists() or json.loads(path.read_text()) != json.loads(written)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(written)
    return due


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
