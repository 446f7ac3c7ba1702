"""Every bench that times kernels, one after the other, each in a process of its own; what cannot run here says why.

flashlab bench all                       # the records of this GPU
flashlab bench all --quick               # a little of each, on whatever is there; `make bench`
flashlab bench all --minutes 25          # in all; run it again to go on
flashlab bench all --quick --out FOLDER  # FOLDER/mma.json, ...
"""

import sys
import time
from collections.abc import Sequence

from flashlab.bench import OF_ALL, harness, module_of, records


def main(arguments: Sequence[str] | None = None) -> None:
    parser = records.parser(__doc__, "all")
    parser.add_argument("--minutes", type=float, help="stop after about so many, in all; run it again to go on")
    given = parser.parse_args(arguments)
    end = time.monotonic() + 60 * (given.minutes or 0)
    failed = []
    for name in OF_ALL:
        reason = module_of(name).BENCH.needs(given.quick)
        if reason is None and given.minutes and time.monotonic() > end:
            reason = "the time is up"
        if reason:
            print(f"{name}: left out: {reason}", flush=True)
            continue
        options = ["--quick"] if given.quick else []
        options += ["--json"] if given.json else []
        options += ["--minutes", f"{(end - time.monotonic()) / 60:.2f}"] if given.minutes else []
        options += ["--out", str(given.out / f"{name}.json")] if given.out else []
        print(f"{name}", flush=True, file=sys.stderr)
        # In a process of its own, so that a GPU that one leaves broken is whole for the next.
        done = harness.again("-m", "flashlab.cli", "bench", name, *options)
        failed += [name] if done.returncode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
