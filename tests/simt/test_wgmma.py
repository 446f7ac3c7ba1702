"""wgmma: the product, what is found when it is used wrongly, counts and events. Descriptors: test_hopper_probe.py."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest

from flashlab.cuda.toolchain import find_cuobjdump, find_nvcc
from flashlab.simt import DeadlockError

from .conftest import KERNELS, compile_for_hopper, marked, module, report_of

LINES = marked("wgmma.cu")
MISTAKES, RELEASES = (
    re.findall(r"\w+", re.search(rf"enum {name} {{(.*?)}}", (KERNELS / "wgmma.cu").read_text(), re.S)[1])
    for name in ("Mistake", "Release")
)
N = 64


# ---- the product ------------------------------------------------------------------------------------
def test_every_n():
    """C + A B; how each operand may lie is compared with an H200 by test_hopper_probe.py."""
    rng = np.random.default_rng(1)
    built = module("wgmma.cu", False, defines={"EVERY_N": 1})
    for n in range(8, 257, 8):
        a, b = rng.standard_normal((64, 16)).astype(np.float16), rng.standard_normal((n, 16)).astype(np.float16)
        out = np.zeros((64, n), np.float32)
        report = built.run_every_n(a.view(np.uint16), b.view(np.uint16), out, n)
        assert report.ok and report.counters["wgmma"] == report.counters[f"wgmma_m64n{n}k16"] == 1
        assert report.counters["wgmma_flops"] == 2 * 64 * n * 16 and report.counters["wgmma_bytes"] == (64 + n) * 32
        assert np.allclose(out, a.astype(np.float64) @ b.T.astype(np.float64) + 1, rtol=0, atol=1e-4)


# ---- what is found ----------------------------------------------------------------------------------
def run(mistake: str, check: bool = True, threads: int = 128):
    out = np.zeros(128 * N // 2, np.float32)
    call = module("wgmma.cu", check).run_mistake
    return report_of(call, np.ones(4096, np.float32), out, MISTAKES.index(mistake), threads), out


def one(report, kind: str):
    """The first finding of this kind."""
    return next(f for f in report.findings if f.kind == kind)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("how, sums", [("NONE", 32), ("LATE_FENCE", 32), ("COPIED", 30)])  # halves of ones are 1.875
def test_what_is_right_is_let_through(how, sums, check):
    report, out = run(how, check)
    assert report.ok and not report.findings and (out == sums).all()
    assert report.counters["wgmma"] == 2 and report.counters["wgmma_from_registers"] == 1
    assert report.counters["wgmma_waits"] == report.counters["wgmma_waits_for_more"] == 4


TOUCHED = (
    "an accumulator of the wgmma in line .* which is still under way: the sums are there, and may be touched, after "
)
# mistake -> what is found of it: kind, line, the other line, words
WATCHED = {
    "READ_EARLY": ("wgmma-registers", "read early", "first product", f"reads in line .* {TOUCHED}wgmma_wait$"),
    "WRITE_EARLY": ("wgmma-registers", "written early", "first product", TOUCHED),
    "NEVER_COMMITTED": ("wgmma-registers", "read though never committed", "first product",
                        f"{TOUCHED}wgmma_commit and wgmma_wait$"),
    "A_REWRITTEN": ("wgmma-registers", "A rewritten", "second product",
                    "registers that hold A of the wgmma .* may not have read them"),
    "NO_FENCE": ("wgmma-fence", "first product", None,
                 "with no wgmma_fence before it: wgmma may use the accumulators as they were"),
    "SUMS_CHANGED": ("wgmma-fence", "sums changed", None,
                     "the accumulators have been written since the last wgmma_fence"),
    "A_CHANGED": ("wgmma-fence", "second product", None,
                  "the registers of A have been written since the last wgmma_fence"),
    "NO_PROXY_FENCE": ("proxy-fence", "first product", None, "reads with wgmma .* with no fence_proxy_async between: "
                       "wgmma need not see what stores have written"),
    "UNINITIALISED": ("uninitialised-shared", "first product", None,
                      "reads with wgmma .* bytes 0 to 15 of the dynamic shared memory"),
    "COPY_IN_FLIGHT": ("read-before-wait", "first product", "the copy", "that a cp.async of thread 0 in line"),
    "NO_BARRIER": ("race", None, None, "writes in line .* read with wgmma .* no barrier between"),
    "OVERWRITTEN": ("stage-overwritten", "overwritten", "second product",
                    "thread 5 of .* is still reading: no wgmma_wait of that warpgroup has ended it yet"),
}  # fmt: skip
BOTH = {
    "OUT_OF_BOUNDS": ("shared-out-of-bounds", "beyond the end", None,
                      "reads with wgmma .* bytes 4096 to 4111 of dynamic shared memory"),
    "SUMS_NEVER_SET": ("uninitialised-local", "first product", None,
                       r"gives wgmma .* registers that were never set \(accumulator\)$"),
    "A_NEVER_SET": ("uninitialised-local", "registers of nothing", None, r"registers that were never set \(A\)$"),
    "THREE_WARPS": ("wgmma-warps", "three warps", None, "which needs the four warps 0 to 3, but only warps 0, 1 and 2 "
                    "of them have come to it.* waits for it for ever"),
    "ANOTHER_SHAPE": ("wgmma-form", "one shape", "another shape", "m64n8k16 against m64n64k16"),
    "HALF_A_WARP": ("divergent", "half a warp", "second product", "comes from another place"),
    "ANOTHER_DESCRIPTOR": ("wgmma-differs", "first product", None,
                           "with another descriptor of A than .* the same in all 128 threads$"),
    "ANOTHER_ORDER": ("divergent", "one place", "another place", "comes from another place"),
    "NEVER_WAITED": ("never-waited", "first product", None,
                     r"is under way: its group was never waited for \(wgmma_wait\)$"),
}  # fmt: skip
SEVERAL = ("READ_EARLY", "WRITE_EARLY", "NEVER_COMMITTED", "NO_FENCE", "NO_PROXY_FENCE", "COPY_IN_FLIGHT", "NO_BARRIER",
           "SUMS_NEVER_SET")  # fmt: skip


@pytest.mark.parametrize("mistake, check", [*((m, True) for m in (*WATCHED, *BOTH)), *((m, False) for m in BOTH)])
def test_a_mistake_is_found(mistake, check):
    kind, line, other, words = (WATCHED | BOTH)[mistake]
    report, out = run(mistake, check)
    f = report.findings[0]
    assert f.kind == kind and re.search(words, f.message), report
    assert mistake in SEVERAL or len(report.findings) == 1
    places = [f.line, f.other_line]  # of two that meet, either may be named first
    wanted = [LINES[line] if line else f.line, LINES[other] if other else f.other_line]
    assert wanted == places or kind in ("divergent", "wgmma-form") and wanted == places[::-1], report
    if mistake in ("UNINITIALISED", "OUT_OF_BOUNDS"):
        assert np.isnan(out).all()


def test_what_more_is_said_of_accumulators_and_fences():
    assert run("READ_EARLY")[0].findings[0].times == 128
    findings = run("WRITE_EARLY")[0].findings
    assert {(f.kind, f.line) for f in findings} == {("wgmma-registers", LINES["written early"])}
    assert "writes" in findings[1].message
    message = one(run("NEVER_COMMITTED")[0], "never-waited").message
    assert message.endswith("is under way: its group was never committed")
    findings = run("NO_FENCE")[0].findings
    assert {(f.kind, f.line) for f in findings} == {
        ("wgmma-fence", LINES["first product"]), ("wgmma-fence", LINES["second product"]),
    }  # fmt: skip
    assert {f.kind for f in run("NO_PROXY_FENCE")[0].findings} == {"proxy-fence"}
    assert (run("ANOTHER_ORDER")[1] == 32).all()


@pytest.mark.parametrize("check", [False, True])
def test_wgmma_that_not_all_can_take_part_in(check):
    built, x, out = module("wgmma.cu", check), np.ones(4096, np.float32), np.zeros(4096, np.float32)
    for mistake in ("THREE_WARPS", "ANOTHER_SHAPE", "HALF_A_WARP"):
        with pytest.raises(DeadlockError):
            built.run_mistake(x, out, MISTAKES.index(mistake), 128)
    with pytest.raises(DeadlockError, match="block of 96 threads: it needs a warpgroup of 128"):
        built.run_mistake(x, out, 0, 96)


# ---- stages: who releases them, and when ------------------------------------------------------------
def stages(consumers: int, release: str, check: bool = True, count: int = 6):
    rng = np.random.default_rng(0)
    tiles, out = rng.integers(-3, 4, (6, 1024)).astype(np.float16), np.zeros((consumers, 128 * 32), np.float32)
    report = module("wgmma.cu", check).run_stages(tiles, out, count, consumers, RELEASES.index(release))
    return report, tiles, out


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("release", ["RIGHT", "BY_THE_LAST_WARP"])
def test_one_thread_of_a_warpgroup_may_release_a_stage(consumers, release, check):
    """After its own wait, whichever warp it is of: the wgmma is over for all four."""
    report, tiles, out = stages(consumers, release, check)
    assert report.ok and not report.findings, report
    # Every row of D is the same: for each of the 64 columns the sum of its 16 numbers, over the tiles.
    columns = tiles.astype(np.float64).reshape(6, 8, 2, 8, 8).sum(axis=(0, 2, 4)).reshape(64)
    assert sorted(set(out[0])) == sorted(set(columns)) and (out == out[0]).all()


UNDER_WAY = "fills with bulk_load .*no wgmma_wait of that warpgroup has ended it yet"
LEFT_OUT = {n: rf"\(warpgroup of thread {128 * (n - 1)}\)" for n in (2, 3)}


@pytest.mark.parametrize(
    "release, consumers, words",
    [("BEFORE_THE_WAIT", n, UNDER_WAY) for n in (1, 2, 3)] + [("ONE_TOO_FEW", *item) for item in LEFT_OUT.items()],
)
def test_a_stage_that_is_released_too_early(release, consumers, words):
    (f,) = stages(consumers, release)[0].findings
    assert (f.kind, f.line, f.other_line) == ("stage-overwritten", LINES["refill"], LINES["consume"])
    assert re.search(words, f.message, re.DOTALL)


def test_a_stage_that_is_read_before_it_is_filled():
    report, _, out = stages(1, "NOT_FILLED", count=2)
    f = one(report, "uninitialised-shared")
    assert f.line == LINES["consume"] and "reads with wgmma" in f.message and np.isnan(out).all()
    f = one(report, "read-before-wait")
    assert (f.line, f.other_line) == (LINES["consume"], LINES["refill"])


# ---- setmaxnreg -------------------------------------------------------------------------------------
@pytest.mark.parametrize("check", [False, True])
def test_registers_are_dealt_out_again(check):
    built, out = module("wgmma.cu", check), np.zeros(512, np.float32)
    assert not built.run_registers(out, 384, 0).findings  # 168 each become 240, 240 and 24
    with pytest.raises(DeadlockError, match="setmaxnreg_inc<248> .*: the launch gave the block 64512 registers") as e:
        built.run_registers(out, 384, 3)
    assert e.value.report.findings[-1].line == LINES["too many"]
    report = built.run_registers(out, 384, 2)
    (f,) = report.findings
    assert (f.kind, f.line) == ("registers-warps", LINES["one warp"])
    assert "warp 8 of warps 8 to 11" in f.message
    with pytest.raises(DeadlockError) as e:
        built.run_registers(out, 384, 1)
    f = one(e.value.report, "registers-direction")
    assert f.line == LINES["wrong direction"]
    assert "calls setmaxnreg_inc<24>" in f.message and f.message.endswith(
        "which is fewer than the 168 registers that it has"
    )


@pytest.mark.parametrize("which, others", [(4, set()), (5, {"registers-warps"})])
def test_who_waits_for_registers_that_nobody_gives_is_told_first(which, others):
    found = report_of(module("wgmma.cu").run_registers, np.zeros(384, np.float32), 384, which).findings
    assert (found[0].kind, found[0].line) == ("registers-missing", LINES["too many"]), found
    assert {f.kind for f in found[1:]} == others and all(f.line == LINES["one warp"] for f in found[1:])


# ---- events -----------------------------------------------------------------------------------------
def test_events_of_the_first_blocks():
    built = module("wgmma.cu", False)
    out = np.zeros((2, 128 * 32), np.float32)
    tiles = np.ones((6, 1024), np.float16)
    report = built.run_stages(tiles, out, 6, 2, 0)
    assert not report.launches[0].events
    events = built.run_stages(tiles, out, 6, 2, 0, timeline=1).launches[0].events
    of_warp = [(e.did, e.values) for e in events if e.warp == 5 and e.did in ("wgmma", "commit", "wait", "wait-end")]
    assert of_warp[:4] == [("wgmma", (1, 64)), ("commit", (1, 1)), ("wait", (1, 0)), ("wait-end", (1, 0))]
    assert len(of_warp) == 24 and {e.block for e in events} == {0}
    assert {e.line for e in events if e.did == "wgmma"} == {LINES["consume"]}
    executed = [(e.warp, e.values[0]) for e in events if e.did == "execute"]
    assert sorted(executed) == [(w, i) for w in (0, 4) for i in range(1, 7)]
    order = [e.did for e in events if e.warp == 0 and e.did in ("wgmma", "execute", "wait-end")]
    assert order[:3] == ["wgmma", "execute", "wait-end"]


# ---- nvcc's side ------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.skipif(find_nvcc() is None or shutil.which("g++") is None, reason="there is no nvcc")
def test_nvcc_compiles_it_for_hopper(tmp_path):
    """Into the instruction of each N; and ptxas serialises nothing, but where the kernel is wrong."""
    log = compile_for_hopper("wgmma.cu", tmp_path / "wgmma.cubin", "-cubin", "-DEVERY_N")
    # C7519: where sums begin as a constant, it is moved behind the fence, and ptxas adds one.
    said = [line for line in log.splitlines() if "(C75" in line and not ("C7519" in line and "every_n" in line)]
    assert all("one_warpgroup" in line or "setmaxnreg" in line for line in said), log
    assert not any("one_warpgroupILi0E" in line for line in said), log  # the one without a mistake
    if find_cuobjdump() is None:
        return
    sass = subprocess.run(
        [find_cuobjdump(), "-sass", str(tmp_path / "wgmma.cubin")], capture_output=True, text=True
    ).stdout
    assert {int(n) for n in re.findall(r"HGMMA\.64x(\d+)x16\.F32", sass)} == set(range(8, 257, 8))
