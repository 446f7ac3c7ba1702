"""What each idea of the last kernel is worth: the kernel without it, beside the whole and FlashAttention-2.

Every variant computes the same attention, and is checked before it is timed; all are timed in turns, at large shapes,
with random inputs and with maxima that move in every tile (`mma.inputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlab.bench import harness, mma, peers
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels.ablations import ABLATIONS, WHOLE
from flashlab.table import Table

ROUNDS = 9


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
    builds = [(name, text, d) for d in head_dims for name, text in texts.items()]

    def one(job: tuple[str, str, int]) -> Built:
        name, text, head_dim = job
        return Built(name, head_dim, load_inline(text, backend="nvcc", head_dim=head_dim, dtype=torch.float16))

    return harness.at_once(one, builds)


def jobs() -> list[harness.Row]:
    """The large shapes, with maxima that hardly move and with such that move."""
    return [{"part": "ladder"} | mma.about((*big, kind)) for kind in ("randn", "moving") for big in mma.BIG]


def quick_jobs() -> list[harness.Row]:
    return jobs()[:1]


_built = functools.cache(build)


def prepare(todo: Sequence[harness.Row], until: float) -> dict[str, Any]:
    """Builds and checks."""
    del todo, until
    return {"rounds": ROUNDS, "worst_error_of_bound": max(mma.verify(b, b.module) for b in _built())}


def measure(job: harness.Row) -> list[harness.Row]:
    """The rows of a job: the whole, each variant, FlashAttention-2."""
    torch.manual_seed(0)
    q, k, v = mma.inputs(job["shape"], job["inputs"])
    functions = {"fa2": peers.sdpa("FLASH_ATTENTION", q, k, v, job["causal"])}
    functions |= {
        b.name: mma.forward_of(b.module, q, k, v, causal=job["causal"]) for b in _built() if b.head_dim == q.shape[3]
    }
    found = mma.rows_of(job, *harness.times_of(functions, ROUNDS))
    whole = next(r["ms"] for r in found if r["name"] == WHOLE.name)
    return [r | ({"vs_whole": whole / r["ms"]} if "ms" in r else {}) for r in found]


def table(data: dict[str, Any], inputs: str | None = None) -> Table:
    """The speed of each variant over the whole kernel's, for each case; the last line is FlashAttention-2."""
    cases: dict[tuple, str] = {}
    cells: dict[str, dict[tuple, str]] = {}
    for r in data["rows"]:
        if inputs in (None, r["inputs"]):
            key = (*r["shape"], r["causal"], r["inputs"])
            cases[key] = f"D {r['shape'][3]}{', causal' if r['causal'] else ''}"
            cases[key] += ", moving" if inputs is None and r["inputs"] == "moving" else ""
            cells.setdefault(r["name"], {})[key] = f"{r['vs_whole']:.2f}" if "ms" in r else ""
    instead = {a.name: a.instead for a in ABLATIONS}
    names = [*(n for n in cells if n in instead), *(n for n in cells if n == "fa2")]
    rows = [[n, instead.get(n, "FlashAttention-2"), *(cells[n].get(key, "") for key in cases)] for n in names]
    return Table.of(rows, ["without", "instead", *cases.values()], align="ll" + "r" * len(cases))


BENCH = harness.Bench(__name__, "the ablation is", ("shape", "causal", "inputs", "name"), quick_too=True)
main, recorded = BENCH.main, BENCH.recorded
