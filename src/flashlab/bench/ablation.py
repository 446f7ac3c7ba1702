"""What each idea of the last kernel is worth: the kernel without it, beside the whole and FlashAttention-2.

Every variant computes the same attention, and is checked before it is timed; all are timed in turns, at large shapes,
with random inputs and with maxima that move in every tile (`mma.inputs`).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashlab.bench import harness, mma, peers
from flashlab.bench.rows import by, grid, where
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels.ablations import ABLATIONS, WHOLE
from flashlab.table import Table


class Built(NamedTuple):
    """A variant, compiled: as `mma.verify` wants it."""

    name: str
    head_dim: int
    module: CudaModule
    dtype: torch.dtype = torch.float16


@functools.cache
def built() -> list[Built]:
    """The whole, and the kernel without each idea. Raises flashlab.cuda.Unavailable, CompileError."""
    texts = {WHOLE.name: WHOLE.path.read_text(encoding="utf-8")} | {a.name: a.text() for a in ABLATIONS}

    def one(job: tuple[int, str]) -> Built:
        head_dim, name = job
        return Built(name, head_dim, load_inline(texts[name], backend="nvcc", head_dim=head_dim, dtype=torch.float16))

    return harness.at_once(one, itertools.product((64, 128), texts))


def jobs() -> list[harness.Row]:
    """The large shapes, with maxima that hardly move and with such that move."""
    return [{"part": "ladder"} | mma.about((*big, kind)) for kind in ("randn", "moving") for big in mma.BIG]


def prepare(todo: Sequence[harness.Row], until: float) -> dict[str, Any]:
    del todo, until
    return {"rounds": mma.ROUNDS, "worst_error_of_bound": max(mma.verify(b, b.module) for b in built())}


def measure(job: harness.Row) -> list[harness.Row]:
    """The rows of a job: the whole, each variant, FlashAttention-2."""
    torch.manual_seed(0)
    q, k, v = mma.inputs(job["shape"], job["inputs"])
    functions: dict[str, harness.Way] = {"fa2": peers.sdpa("FLASH_ATTENTION", q, k, v, job["causal"])}
    mine = [b for b in built() if b.head_dim == q.shape[3]]
    functions |= {b.name: functools.partial(b.module.forward, q, k, v, causal=job["causal"]) for b in mine}
    found = mma.rows_of(job, *harness.times_of(functions, mma.ROUNDS))
    whole = next(r["ms"] for r in found if r["name"] == WHOLE.name)
    return [r | ({"vs_whole": whole / r["ms"]} if "ms" in r else {}) for r in found]


def table(data: dict[str, Any], inputs: str | None = None) -> Table:
    """The speed of each variant over the whole kernel's, for each case; the last line is FlashAttention-2."""
    lines = []
    for r in where(data["rows"], inputs=inputs or {"randn", "moving"}):
        case = f"D {r['shape'][3]}{', causal' if r['causal'] else ''}"
        case += ", moving" if inputs is None and r["inputs"] == "moving" else ""
        lines.append(r | {"without": r["name"], "name": case})
    instead = {a.name: a.instead for a in ABLATIONS} | {"fa2": "FlashAttention-2"}
    at = {(n, instead[n]): rows for (n,), rows in by(lines, "without").items() if n in instead}
    at |= {key: at.pop(key) for key in [*at] if key[0] == "fa2"}
    return grid(at, ("without", "instead"), lambda r: f"{r['vs_whole']:.2f}" if "ms" in r else "")


BENCH = harness.Bench(__name__, "the ablation is", ("shape", "causal", "inputs", "name"), quick_too=True)
main, recorded = BENCH.main, BENCH.recorded
