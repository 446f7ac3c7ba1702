"""What each idea of the last kernel is worth: the kernel without it, beside the whole and FlashAttention-2.

    flashlab bench ablation           # writes recorded/ablation_<gpu>.json beside this file; some minutes

Every variant computes the same attention, and is checked before it is timed; all are timed in turns, at large shapes,
with random inputs and with maxima that move in every tile (`mma.inputs`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from flashlab.bench import mma, peers, records, timing
from flashlab.bench.records import NoGpu
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels.ablations import ABLATIONS, WHOLE
from flashlab.table import Table


@dataclass(frozen=True)
class Built:
    """A variant, compiled: as `mma.verify` wants it."""

    name: str
    head_dim: int
    module: CudaModule
    dtype: torch.dtype = torch.float16


def build(head_dims: Sequence[int] = (64, 128)) -> list[Built]:
    """The whole, and the kernel without each idea. Raises flashlab.cuda.Unavailable, CompileError."""
    texts = {WHOLE.name: WHOLE.path.read_text(encoding="utf-8")} | {a.name: a.text() for a in ABLATIONS}
    jobs = [(name, text, d) for d in head_dims for name, text in texts.items()]

    def one(job: tuple[str, str, int]) -> Built:
        name, text, head_dim = job
        return Built(name, head_dim, load_inline(text, backend="nvcc", head_dim=head_dim, dtype=torch.float16))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, jobs))


def run(rounds: int = 9, *, quick: bool = False) -> dict[str, Any]:
    """Build, check, measure; quick: one shape. Raises NoGpu where there is no GPU."""
    if not torch.cuda.is_available():
        raise NoGpu("the ablation is measured on a CUDA GPU, and PyTorch sees none")
    torch.manual_seed(0)
    cases = [(shape, causal, kind) for kind in ("randn", "moving") for shape, causal in mma.BIG]
    cases = cases[:1] if quick else cases
    built = build(sorted({shape[3] for shape, _, _ in cases}))
    worst = max(mma.verify(b, b.module) for b in built)
    rows: list[dict[str, Any]] = []
    with timing.measured() as machine:
        for case in cases:
            shape, causal, kind = case
            q, k, v = mma.inputs(shape, kind)
            functions = {"fa2": peers.sdpa("FLASH_ATTENTION", q, k, v, causal)}
            functions |= {
                b.name: mma.forward_of(b.module, q, k, v, causal=causal) for b in built if b.head_dim == shape[3]
            }
            found = mma.rows_of(case, mma.times_of(functions, rounds, 2.0))
            whole = next(r["ms"] for r in found if r["name"] == WHOLE.name)
            rows += [r | {"vs_whole": whole / r["ms"]} for r in found]
    return {"machine": machine, "rounds": rounds, "worst_error_of_bound": worst, "rows": rows}


def recorded() -> list[dict[str, Any]]:
    """The recorded runs, one per GPU."""
    return records.recorded("ablation")


def table(data: dict[str, Any], inputs: str | None = None) -> Table:
    """The speed of each variant over the whole kernel's, for each case; the last line is FlashAttention-2."""
    cases: dict[tuple, str] = {}
    cells: dict[str, dict[tuple, str]] = {}
    for r in data["rows"]:
        if inputs in (None, r["inputs"]):
            key = (*r["shape"], r["causal"], r["inputs"])
            cases[key] = f"D {r['shape'][3]}{', causal' if r['causal'] else ''}"
            cases[key] += ", moving" if inputs is None and r["inputs"] == "moving" else ""
            cells.setdefault(r["name"], {})[key] = f"{r['vs_whole']:.2f}"
    instead = {a.name: a.instead for a in ABLATIONS}
    names = [*(n for n in cells if n in instead), *(n for n in cells if n == "fa2")]
    rows = [[n, instead.get(n, "FlashAttention-2"), *(cells[n].get(key, "") for key in cases)] for n in names]
    return Table.of(rows, ["without", "instead", *cases.values()], align="ll" + "r" * len(cases))


def main(arguments: Sequence[str] | None = None) -> None:
    given = records.parser(__doc__, "ablation").parse_args(arguments)
    records.keep("ablation", run(quick=given.quick), table, given)


if __name__ == "__main__":
    records.entry(main)
