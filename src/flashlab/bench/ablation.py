"""What each idea of the last kernel is worth: the kernel without it, beside the whole and FlashAttention-2.

Every variant computes the same attention, and is checked before it is timed; all are timed in turns, at large shapes,
with random inputs and with maxima that move in every tile (`mma.inputs`).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flashlab.bench import harness, mma, peers
from flashlab.bench.rows import by, grid, where
from flashlab.cuda import CudaModule, load_inline
from flashlab.kernels.ablations import ABLATIONS, WHOLE
from flashlab.table import Table


@functools.cache
def built() -> dict[tuple[int, str], CudaModule]:
    """The whole, and the kernel without each idea, by head_dim and name. Raises Unavailable, CompileError of cuda."""
    texts = {WHOLE.name: WHOLE.path.read_text(encoding="utf-8")} | {a.name: a.text() for a in ABLATIONS}
    wanted = [*itertools.product((64, 128), texts)]
    options: dict[str, Any] = {"backend": "nvcc", "dtype": torch.float16}
    modules = harness.at_once(lambda one: load_inline(texts[one[1]], head_dim=one[0], **options), wanted)
    return dict(zip(wanted, modules, strict=True))


def jobs() -> list[harness.Row]:
    """The large shapes, with maxima that hardly move and with such that move."""
    return [{"part": "ladder"} | mma.about((*big, kind)) for kind in ("randn", "moving") for big in mma.BIG]


def prepare(todo: Sequence[harness.Row], until: float) -> dict[str, Any]:
    worst = max(mma.verify(name, head_dim, torch.float16, module) for (head_dim, name), module in built().items())
    return {"rounds": mma.ROUNDS, "worst_error_of_bound": worst}


def measure(job: harness.Row) -> list[harness.Row]:
    torch.manual_seed(0)
    q, k, v = mma.inputs(job["shape"], job["inputs"])
    functions: dict[str, harness.Way] = {"fa2": peers.sdpa("FLASH_ATTENTION", q, k, v, job["causal"])}
    mine = {name: module for (head_dim, name), module in built().items() if head_dim == q.shape[3]}
    functions |= {n: functools.partial(m.forward, q, k, v, causal=job["causal"]) for n, m in mine.items()}
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
