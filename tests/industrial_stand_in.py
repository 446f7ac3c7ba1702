"""A record of flashlab.bench.industrial with numbers that nobody measured, to try what reads it."""

import math

from flashlab.attention import tiles
from flashlab.bench import industrial, peers, timing

HOPPER = {"triton, descriptors": 420.0, "gluon": 480.0}  # forward passes only
STEPS = {"one_tile": 300.0, "pipelined": 400.0, "specialised": 480.0, "specialised, persistent": 490.0, "cuDNN": 500.0}
SPEEDS = {"triton": 400.0, "FlashAttention-2": 300.0, "cuDNN": 500.0, "FlexAttention": 350.0, "eager": 40.0}  # TFLOP/s


def record(parts=industrial.PARTS, keep=lambda job: True):
    """A record as a run would have left it whose other measurements were not made."""
    todo = [job for job in industrial.jobs(parts) if keep(job)]
    rows = [row for job in todo for row in _rows(job)]
    machine = {"gpu": "NVIDIA Stand-in", "target": "sm_90", "torch": "2", "triton": "3", "date": "2000-01-01"}
    left = len(industrial.jobs()) - len(todo)
    return {"bench": "industrial", "machine": machine, "dtype": "bfloat16", "left": left, "rows": rows}


def _rows(job):
    if job["part"] in industrial.TUNED:
        times = [(list(tile), 1.0 + 0.1 * i) for i, tile in enumerate(tiles.SEARCH[job["kernel"]])]
        rows = [job | {"tile": tile, "ms": ms} for tile, ms in times[1:]]
        return [*rows, job | {"tile": times[0][0], "unavailable": "it does not fit"}]
    if job["part"] == "options":
        return [job | {"name": name, "ms": 1.0 + 0.1 * i} for i, name in enumerate(industrial.OPTIONS)]
    if job["part"] == "streams":
        return [job | {"name": name, "ms": 2.0 - 0.5 * i} for i, name in enumerate(industrial.STREAMS)]
    batch, heads, n, d = job["shape"]
    found, reasons = {}, {}
    speeds = SPEEDS | (HOPPER if (job["part"], job["pass"]) == ("shapes", "forward") else {})
    if job["part"] == "flex":
        speeds = {"cuDNN": 500.0} | {name: 350.0 + 50 * i for i, name in enumerate(peers.FLEX)}
        reasons["FlexAttention, FLASH"] = "it is not there"
    for name, speed in (STEPS if job["part"] == "gluon" else speeds).items():
        if (
            (job["part"] == "published" and name not in ("triton", "eager"))
            or (name == "cuDNN" and d == 256)
            or name in reasons
        ):
            continue
        if name == "eager" and n > industrial.EAGER_MOST and batch * heads > 1:
            reasons[name] = "not measured"
            continue
        work = timing.attention_flops(batch, heads, n, d, job["causal"]) * industrial.WORK_OF[job["pass"]]
        ms = work / (speed * 1e9) * (1 + 500 / n) + 0.003
        found[name] = {"ms": ms, "fastest": ms, "slowest": ms, "rounds": 9}
        if job["pass"] == "both":
            scores = 3 * batch * heads * n * n * 2 if name == "eager" else 0
            buffer = math.prod(job["shape"]) * 4 if name == "FlashAttention-2" else 0
            found[name]["peak_bytes"] = 4 * math.prod(job["shape"]) * 2 + scores + buffer
    return industrial.rows_of(job, found, reasons)
