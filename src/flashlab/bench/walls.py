"""Phase 1: naive attention beside FlashAttention-2, scheme A until the GPU refuses it, the escape hatches of scheme B.

lengths   naive: naive_attention in fp16: milliseconds, and the allocator's peak beside the formula's; fused: the same
          shapes through torch's FlashAttention-2 (the backend is forced, so the peer has a name)
scheme_a  one head through scheme_a, N doubling until the GPU refuses; then what its error says
scheme_b  one head through each escape hatch and through two_pass: milliseconds and error against float64

Times are as flashlab.bench.timing takes them; those of the schemes include filling their outputs first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import naive_peak_bytes
from flashlab.attention.naive import naive_attention
from flashlab.bench import harness, peers, timing
from flashlab.bench.harness import Row, jobs_of

HEADS, HEAD_DIM = 16, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def jobs(lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """naive and fused at each length, then the schemes."""
    return [*jobs_of("lengths", seq_len=lengths), {"part": "scheme_a"}, {"part": "scheme_b"}]


def quick_jobs() -> list[Row]:
    return jobs((512, 2048))


def measure(job: Row) -> list[Row]:
    if job["part"] == "lengths":
        return measure_length(job)
    return [job | row for row in (measure_scheme_a() if job["part"] == "scheme_a" else measure_scheme_b())]


def measure_length(job: Row) -> list[Row]:
    """The rows of naive attention and of FlashAttention-2 at one length; one that cannot run says why."""
    shape = [1, HEADS, job["seq_len"], HEAD_DIM]
    q, k, v = harness.draw(*[shape] * 3, dtype=torch.float16)
    predicted = naive_peak_bytes(job["seq_len"], HEAD_DIM, heads=HEADS)
    about: Row = {"naive": {"predicted_peak_bytes": predicted}, "fused": {"backend": "FLASH_ATTENTION"}}
    ways = {"naive": lambda: naive_attention(q, k, v), "fused": peers.sdpa("FLASH_ATTENTION", q, k, v)}
    found, reasons = harness.times_of(ways, rounds=15)
    for name in found:  # which has its workspaces by now
        found[name] |= about[name] | {"peak_bytes": timing.allocated(ways[name])}
    return harness.rows_of(job | {"shape": shape}, found, reasons)


def measure_scheme_a() -> list[Row]:
    """scheme_a on one head, N doubling from 64, ending with the first N that this GPU refuses."""
    rows: list[Row] = []
    ways: dict[int, Callable[[], Any]] = {}
    seq_len = 64
    while len(ways) == len(rows):
        q, k, v = harness.draw(*[(seq_len, HEAD_DIM)] * 3, dtype=torch.float16)
        row = {"shape": [1, 1, seq_len, HEAD_DIM], "name": "scheme A", "seq_len": seq_len}
        row |= {"shared_bytes": schemes.scheme_a_shared_bytes(seq_len, HEAD_DIM)}
        way = functools.partial(schemes.scheme_a, q, k, v)
        rows.append(row | _tried(way, q, k, v))
        if rows[-1]["ok"]:
            ways[seq_len] = way
        seq_len *= 2
    times = timing.interleaved({str(n): way for n, way in ways.items()})
    return [row | times.get(str(row["seq_len"]), {}) for row in rows]


def measure_scheme_b() -> list[Row]:
    """Each escape hatch and two_pass, one program per multiprocessor of the GPU, at a length scheme_b can hold."""
    rows, seq_len = 64 * runtime.limits().sms, 256
    q, k, v = harness.draw(*((n, HEAD_DIM) for n in (rows, seq_len, seq_len)), dtype=torch.float16)
    ways: dict[str, Callable[[], Any]] = {"scheme A": lambda: schemes.scheme_a(q, k, v)}
    ways |= {how: functools.partial(schemes.scheme_b, q, k, v, how=how) for how in schemes.ESCAPE_HATCHES}
    ways |= {"two passes": lambda: schemes.two_pass(q, k, v)}
    tried = {name: _tried(way, q, k, v) for name, way in ways.items()}
    times = timing.interleaved({name: ways[name] for name, row in tried.items() if row["ok"]})
    about = {"shape": [1, 1, seq_len, HEAD_DIM], "seq_q": rows, "seq_len": seq_len}
    return [about | {"name": name} | row | times.get(name, {}) for name, row in tried.items()]


def _tried(way: Callable[[], Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Row:
    """Whether it runs: with its error against float64, or with what Triton's refusal says."""
    try:
        o = way()[0]
    except OutOfResources as error:
        figures = {"resource": error.name, "required": error.required, "limit": error.limit}
        return {"ok": False, "message": str(error)} | figures
    want, _ = reference.attention(*(x[None, None] for x in (q, k, v)))
    return {"ok": True, "max_error": (o.double() - want[0, 0]).abs().max().item()}


BENCH = harness.Bench(
    __name__, "phase 1's kernels are", ("seq_len", "name"), quick_too=True,
    facts={"shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float16"}},
)  # fmt: skip
main, recorded = BENCH.main, BENCH.recorded
