"""A record of flashlab.bench.hopper with numbers that nobody measured, to try what reads it."""

from flashlab import kernels
from flashlab.bench import hopper_jobs
from flashlab.bench.hopper_jobs import BOXES, CUDNN, FA2, FA4, OURS, P9, TRITON

SPEEDS = {OURS: 700.0, CUDNN: 600.0, FA2: 300.0, FA4: 650.0, P9: 400.0, TRITON: 450.0, BOXES: 470.0}  # TFLOP/s
STEPS = kernels.steps(9)
"""Stand in for the steps of phase 11, each a tenth faster than the one before."""


def record(keep=lambda job: True, speeds=SPEEDS, **changes):
    """A record as a run would have left it that made the kept measurements. changes: of the rows of OURS."""
    todo = [job for job in hopper_jobs.jobs() if keep(job)]
    rows = [row | (changes if row["name"] == OURS else {}) for job in todo for row in _rows(job, speeds)]
    machine = {
        "gpu": "NVIDIA Stand-in",
        "target": "sm_90",
        "sms": 132,
        "torch": "2",
        "triton": "3",
        "date": "2000-01-01",
    }
    left = len(hopper_jobs.jobs()) - len(todo)
    return {"bench": "hopper", "machine": machine, "left": left, "rows": rows}


def _rows(job, speeds):
    part = job["part"]
    if part == "validate":
        found = {"different": 0} if job["what"] == "repeats" else {"wrong": [], "cases": 90}
        return [job | {"name": OURS, "step": "p11_flash"} | found]
    if part == "sanitizer":
        return [job | {"name": "all", "said": "ERROR SUMMARY: 0 errors"}]
    if part == "planted":
        return [job | {"name": "p11_flash", "result": "right", "said": {"racecheck": "RACECHECK SUMMARY: 0 hazards"}}]
    if part == "counters":
        return [job | {"name": s.name, "head_dim": 64, "counters": {"wgmma, by warp": [8, 8]}} for s in STEPS]
    if part == "profile":
        return [job | {"name": CUDNN, "kernel": "x", "nanoseconds": 5.0, "stalled: gmma": 2.0}]
    if part == "ceiling":
        return [job | {"name": "matmul"} | _time(2.0 * 8192**3, 800.0)]
    work = hopper_jobs.work_of(job)
    if part == "ladder":
        speeds = {s.name: 300.0 * 1.1**i for i, s in enumerate(STEPS)} | {P9: 400.0, CUDNN: 600.0}
    if part == "backward":
        work *= hopper_jobs.BACKWARD_WORK
        speeds = {name: speeds[name] for name in (OURS, CUDNN, FA2, TRITON)}
    if part in ("inputs", "captured"):
        speeds = {OURS: 700.0, "p11_flash TRUST=0": 630.0, CUDNN: 600.0, FA2: 300.0, FA4: 650.0}
    if part == "variants":
        speeds = {"p11_flash": 700.0, "p11_flash STAGES=3": 630.0, CUDNN: 600.0}
    exact = {"error": 1e-3, "rms": 1e-4, "of_bound": 0.5, "doubted": 1, "trusted": 4}
    if part == "clock":
        exact = {"clock": {"median": 1600, "lowest": 1590, "highest": 1700, "max": 1980, "watts": 690.0}}
        speeds = {OURS: 700.0, CUDNN: 600.0}
    return [job | {"name": name} | _time(work, speed) | exact for name, speed in speeds.items()]


def _time(work, tflops):
    ms = work / (tflops * 1e9)
    return {"ms": ms, "fastest": 0.99 * ms, "slowest": 1.01 * ms, "rounds": 9, "tflops": tflops}
