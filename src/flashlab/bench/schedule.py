"""Where the compiler puts each ldmatrix: how far ahead of the first MMA that needs its result, in the compiled loop.

    flashlab bench schedule        # compiles steps of phases 8 and 9, writes recorded/schedule.json; needs no GPU
    recorded()                     # a row per step and head_dim

The loop is the one over full tiles. A distance is a number of instructions of the listing (SASS); `at_once` says how
many loads have no other MMA between themselves and the first that waits for them. Nothing is run: it is a fact about
the instructions' order, not about time.
"""

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from flashlab.bench import records
from flashlab.cuda.resources import resources_listing
from flashlab.kernels.series import Step, step, steps
from flashlab.table import Table

RECORDED = records.RECORDED / "schedule.json"
TARGET = "sm_90"
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
_LOAD = re.compile(r"LDSM\S*\s+R(\d+)")


def loops(listing: str) -> list[list[str]]:
    """The bodies of a function's loops that hold MMAs, in the order of the listing: what a jump back repeats."""
    code = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(listing)]
    places = {address: i for i, (address, _) in enumerate(code)}
    found = []
    for i, (address, text) in enumerate(code):
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [t for _, t in code[places[int(target[1], 16)] : i + 1]]
            if any("HMMA" in t for t in body):
                found.append(body)
    return found


def distances(body: Sequence[str]) -> list[tuple[int, int]]:
    """For each ldmatrix of a loop: instructions, and MMAs, up to the first MMA that reads one of its registers."""
    found = []
    for i, text in enumerate(body):
        load = _LOAD.search(text)
        if not load:
            continue
        loaded, mmas = {int(load[1]) + j for j in range(4)}, 0
        for j in range(1, len(body)):
            other = body[(i + j) % len(body)]  # past the end the loop begins again
            if "HMMA" not in other:
                continue
            d, a, b, *_ = (int(r) for r in re.findall(r"R(\d+)", other))  # D, A (four registers), B (two), C
            if loaded & {a, a + 1, a + 2, a + 3, b, b + 1}:
                found.append((j, mmas))
                break
            mmas += 1
    return found


def measure(names: Sequence[Step], target: str = TARGET) -> list[dict[str, Any]]:
    """Of each step without a mask, in the loop over full tiles, which is the last one."""
    rows = []
    for s in names:
        for head_dim in (64, 128):
            functions = resources_listing(s, target=target, head_dim=head_dim)
            body = loops(next(code for name, code in functions.items() if "Lb1" not in name))[-1]
            ahead = distances(body)
            rows.append({
                "step": s.name, "head_dim": head_dim, "instructions": len(body),
                "mma": sum("HMMA" in text for text in body), "ldmatrix": len(ahead),
                "median_distance": statistics.median(j for j, _ in ahead), "at_once": sum(not m for _, m in ahead),
            })  # fmt: skip
    return rows


def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["loops"]


COLUMNS = ("instructions", "per MMA", "ldmatrix", "median instructions ahead", "no MMA between")


def cells(rows: Sequence[dict[str, Any]], head_dim: int) -> list[list[Any]]:
    """The rows of one head_dim as a table's, under the step's name and COLUMNS."""
    return [
        [r["step"], r["instructions"], f"{r['instructions'] / r['mma']:.1f}", r["ldmatrix"],
         f"{r['median_distance']:g}", r["at_once"]]
        for r in rows if r["head_dim"] == head_dim
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the steps from p8_5 to p9_5 (``--quick``: one) and writes the record."""
    given = records.parser(__doc__, "schedule").parse_args(arguments)
    names = [*steps(8)[4:], *steps(9)[:5]]
    rows = measure([step("p9_1_masks")] if given.quick else names)
    shown = Table.of(cells(rows, 128), [f"{TARGET}, D = 128", *COLUMNS])
    records.keep_compiled(RECORDED, given, TARGET, {"target": TARGET, "loops": rows}, shown)
