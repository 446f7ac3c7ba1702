"""wgmma: which bytes a descriptor names, the product, what is found when it is used wrongly, counts and events."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from flashlab.cuda.toolchain import find_cuobjdump, find_nvcc
from flashlab.kernels import PTX
from flashlab.simt import DeadlockError
from flashlab.simt.build import INCLUDE

from .conftest import KERNELS, module
from .wgmma_model import BYTES, SWIZZLES, WIDTH, cases, decoded, descriptor, image, stored

LINES = {m[1]: n for n, text in enumerate((KERNELS / "wgmma.cu").read_text().splitlines(), 1)
         if (m := re.search(r"// <- (.*)$", text))}  # fmt: skip
N = 64


def probe(check: bool = False, n: int = N):
    return module("wgmma_probe.cu", check, defines={"PROBE_N": n})


# ---- descriptors: the probe copies an operand as the descriptor names it ----------------------------
def asked(operand: str, descriptors: list[tuple[int, int, int, int, int]], trans: bool, n: int = N) -> np.ndarray:
    """The numbers of the words that the emulator reads: [cases, rows, 16]."""
    words = np.array([descriptor(*d) for d in descriptors], np.uint64)
    columns = n if operand == "b" else 16
    found = []
    for half in image():
        out = np.full((len(words), 64, columns), np.nan, np.float32)
        run = getattr(probe(n=n), f"run_decode_{operand}")
        assert run(half.view(np.uint16), BYTES, words, out, len(words), int(trans), 0).ok
        found.append(out.transpose(0, 2, 1)[:, :, :16] if operand == "b" else out)
    return (found[0] + 2048 * found[1]).astype(int)


@pytest.mark.parametrize("trans", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.every(2)
def test_descriptors_name_what_the_canonical_layouts_say(operand, trans):
    words = np.arange(BYTES // 2)
    found = asked(operand, cases(), trans)
    for desc, got in zip(cases(), found, strict=True):
        assert (got == decoded(words, desc, 64, trans)).all(), (SWIZZLES[desc[1]], desc)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_a_tile_as_tma_stores_it_is_read_as_it_was(swizzle):
    """The layouts that kernels use, built without any address: pieces exchanged by the number of the row."""
    w = WIDTH[swizzle]
    rng = np.random.default_rng(swizzle)
    # K-major: 64 rows of W * 8 numbers; 16 of them at a time, further on in the row.
    tile = rng.integers(0, 2000, (64, w * 8)).astype(np.float16)
    steps = list(range(0, w * 8 - 8, 16)) if swizzle else []
    for k in steps:
        assert (read_b(stored(tile, swizzle), (k * 2, swizzle, 16, 128 * w, 0), False) == tile[:, k : k + 16]).all()
    # MN-major: 16 lines of K, W * 8 numbers of N in each; tiles side by side until there are 64.
    tiles = rng.integers(0, 2000, (64 // (w * 8), 16, w * 8)).astype(np.float16)
    across = np.concatenate(list(tiles), axis=1)  # [16, 64]
    shared = np.concatenate([stored(t, swizzle) for t in tiles])
    step, deep = 16 * w * 16, 8 * w * 16  # bytes from tile to tile; from 8 lines to the next 8
    desc = (0, swizzle, step, deep, 0) if swizzle else (0, 0, deep, step, 0)
    assert (read_b(shared, desc, True) == across.T).all()


def read_b(shared: np.ndarray, desc: tuple[int, int, int, int, int], trans: bool) -> np.ndarray:
    full = np.zeros(BYTES // 2, np.float16)
    full[: len(shared)] = shared
    out = np.zeros((1, 64, N), np.float32)
    words = np.array([descriptor(*desc)], np.uint64)
    assert probe().run_decode_b(full.view(np.uint16), BYTES, words, out, 1, int(trans), 0).ok
    return out[0, :16].T


# ---- the product ------------------------------------------------------------------------------------
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("bf16", [0, 1])
@pytest.mark.parametrize("trans", range(4))
def test_products_and_sums(check, bf16, trans):
    """c + A B + A B in small integers, which are exact: A and B in four layouts."""
    rng = np.random.default_rng(trans)
    a, b, c = (rng.integers(-8, 9, s) for s in ((64, 16), (64, 16), (64, N)))
    dtype = torch.bfloat16 if bf16 else torch.float16
    shared = np.zeros(BYTES // 2, np.uint16)
    words = []
    for i, (matrix, mn) in enumerate(((a, trans & 1), (b, trans & 2))):
        lines = np.zeros((64, 64), np.int64) if not mn else matrix.T  # MN-major: 16 lines of 64; K-major: 64 lines
        if not mn:
            lines[:, :16] = matrix
        bits = torch.from_numpy(lines.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        shared[i * 4096 : i * 4096 + lines.size] = stored(bits, 1)
        words.append(descriptor(i * 8192, 1, 16, 1024))
    out = np.zeros((64, N), np.float32)
    report = probe(check).run_multiply(
        shared, BYTES, np.array(words, np.uint64), c.astype(np.float32), out, trans, bf16
    )
    assert report.ok, report
    assert (out == c + 2 * (a @ b.T)).all()
    assert report.counters["wgmma"] == report.counters["wgmma_m64n64k16"] == 2
    assert report.counters["wgmma_flops"] == 2 * 2 * 64 * 64 * 16
    assert report.counters["wgmma_bytes"] == 2 * (64 + 64) * 32


def test_every_n():
    rng = np.random.default_rng(1)
    built = module("wgmma.cu", False, defines={"EVERY_N": 1})
    for n in range(8, 257, 8):
        a, b = rng.standard_normal((64, 16)).astype(np.float16), rng.standard_normal((n, 16)).astype(np.float16)
        out = np.zeros((64, n), np.float32)
        report = built.run_every_n(a.view(np.uint16), b.view(np.uint16), out, n)
        assert report.counters[f"wgmma_m64n{n}k16"] == 1
        assert np.allclose(out, a.astype(np.float64) @ b.T.astype(np.float64) + 1, rtol=0, atol=1e-4)


# ---- what is found ----------------------------------------------------------------------------------
def run(name: str, check: bool = True):
    out = np.zeros(128 * N // 2, np.float32)
    report = getattr(module("wgmma.cu", check), f"run_{name}")(np.ones(4096, np.float32), out)
    return report, out


def one(report, kind: str):
    """The first finding of this kind."""
    return next(f for f in report.findings if f.kind == kind)


@pytest.mark.parametrize("check", [False, True])
def test_what_is_right_is_let_through(check):
    report, out = run("right", check)
    assert report.ok and not report.findings and (out == 32).all()
    assert report.counters["wgmma"] == 2 and report.counters["wgmma_from_registers"] == 1
    assert report.counters["wgmma_waits"] == report.counters["wgmma_waits_for_more"] == 4


def test_accumulators_touched_under_way():
    report, _ = run("read_early")
    f = one(report, "wgmma-registers")
    assert (f.line, f.other_line, f.times) == (LINES["read early"], LINES["first product"], 128)
    assert "reads in line" in f.message and "an accumulator of the wgmma in line" in f.message
    assert f.message.endswith("which is still under way: the sums are there, and may be touched, after wgmma_wait")
    report, _ = run("write_early")
    assert {f.line for f in report.findings} == {LINES["written early"]}
    assert {f.kind for f in report.findings} == {"wgmma-registers"} and "writes" in report.findings[1].message
    report, _ = run("never_committed")
    assert one(report, "wgmma-registers").line == LINES["read though never committed"]
    assert one(report, "wgmma-registers").message.endswith("after wgmma_commit and wgmma_wait")
    assert one(report, "never-waited").message.endswith("is under way: its group was never committed")


def test_registers_of_a_rewritten_under_way():
    report, _ = run("a_rewritten")
    (f,) = report.findings
    assert (f.kind, f.line, f.other_line) == ("wgmma-registers", LINES["A rewritten"], LINES["second product"])
    assert "registers that hold A of the wgmma" in f.message and "may not have read them" in f.message


def test_missing_fences():
    report, _ = run("no_fence")
    assert {f.kind for f in report.findings} == {"wgmma-fence"}
    assert {f.line for f in report.findings} == {LINES["first product"], LINES["second product"]}
    assert "with no wgmma_fence before it: wgmma may use the accumulators as they were" in report.findings[0].message
    report, _ = run("sums_changed")
    (f,) = report.findings
    assert (f.kind, f.line) == ("wgmma-fence", LINES["sums changed"])
    assert "the accumulators have been written since the last wgmma_fence" in f.message
    report, _ = run("a_changed")
    (f,) = report.findings
    assert (f.kind, f.line) == ("wgmma-fence", LINES["second product"])
    assert "the registers of A have been written since the last wgmma_fence" in f.message


def test_operands_that_are_not_there_yet():
    report, _ = run("no_proxy_fence")
    assert {f.kind for f in report.findings} == {"proxy-fence"}
    f = one(report, "proxy-fence")
    assert f.line == LINES["first product"] and "reads with wgmma" in f.message
    assert "with no fence_proxy_async between: wgmma need not see what stores have written" in f.message
    report, out = run("uninitialised")
    (f,) = report.findings
    assert (f.kind, f.line) == ("uninitialised-shared", LINES["first product"]) and np.isnan(out).all()
    assert "reads with wgmma" in f.message and "bytes 0 to 15 of the dynamic shared memory" in f.message
    report, _ = run("copy_in_flight")
    f = one(report, "read-before-wait")
    assert (f.line, f.other_line) == (LINES["first product"], LINES["the copy"])
    assert "that a cp.async of thread 0 in line" in f.message
    report, _ = run("no_barrier")
    assert not report.ok
    f = one(report, "race")
    assert "writes in line" in f.message and "read with wgmma" in f.message and "no barrier between" in f.message
    report, out = run("out_of_bounds")
    (f,) = report.findings
    assert (f.kind, f.line) == ("shared-out-of-bounds", LINES["beyond the end"]) and np.isnan(out).all()
    assert "reads with wgmma" in f.message and "bytes 4096 to 4111 of dynamic shared memory" in f.message


def test_operands_overwritten_under_way():
    report, _ = run("overwritten")
    (f,) = report.findings
    assert (f.kind, f.line, f.other_line) == ("stage-overwritten", LINES["overwritten"], LINES["second product"])
    assert f.thread == (5, 0, 0) and "is still reading: no wgmma_wait of that warpgroup has ended it yet" in f.message


def test_registers_that_were_never_set():
    report, _ = run("sums_never_set")
    f = report.findings[0]
    assert (f.kind, f.line) == ("uninitialised-local", LINES["first product"])
    assert "gives wgmma" in f.message and f.message.endswith("registers that were never set (accumulator)")
    report, _ = run("a_never_set")
    f = report.findings[0]
    assert (f.kind, f.line) == ("uninitialised-local", LINES["registers of nothing"])
    assert f.message.endswith("registers that were never set (A)")


@pytest.mark.parametrize("check", [False, True])
def test_wgmma_that_not_all_take_part_in(check):
    with pytest.raises(
        DeadlockError, match="which needs the four warps 0 to 3, but only warps 0, 1 and 2 of them"
    ) as e:
        run("three_warps", check)
    f = e.value.report.findings[-1]
    assert f.kind == "wgmma-warps" and f.line == LINES["three warps"] and "waits for it for ever" in f.message
    with pytest.raises(DeadlockError, match="m64n8k16 against m64n64k16|m64n64k16 against m64n8k16") as e:
        run("another_shape", check)
    f = e.value.report.findings[-1]
    assert {f.line, f.other_line} == {LINES["one shape"], LINES["another shape"]}
    with pytest.raises(DeadlockError):
        run("half_a_warp", check)
    with pytest.raises(DeadlockError, match="block of 96 threads: it needs a warpgroup of 128"):
        run("three_quarters", check)
    report, out = run("another_descriptor", check)
    (f,) = report.findings
    assert f.kind == "wgmma-differs" and f.line == LINES["first product"]
    assert "with another descriptor of A than" in f.message and f.message.endswith("the same in all 128 threads")
    report, out = run("another_order", check)
    (f,) = report.findings
    assert f.kind == "divergent" and {f.line, f.other_line} == {LINES["one place"], LINES["another place"]}
    assert (out == 32).all()


@pytest.mark.parametrize("check", [False, True])
def test_wgmma_that_is_never_waited_for(check):
    report, _ = run("never_waited", check)
    (f,) = report.findings
    assert (f.kind, f.line) == ("never-waited", LINES["first product"])
    assert f.message.endswith("is under way: its group was never waited for (wgmma_wait)")


# ---- stages: who releases them, and when ------------------------------------------------------------
def stages(consumers: int, release: int, check: bool = True, count: int = 6):
    rng = np.random.default_rng(0)
    tiles, out = rng.integers(-3, 4, (6, 1024)).astype(np.float16), np.zeros((consumers, 128 * 32), np.float32)
    report = module("wgmma.cu", check).run_stages(tiles, out, count, consumers, release)
    return report, tiles, out


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("release", [0, 4])
def test_one_thread_of_a_warpgroup_may_release_a_stage(consumers, release, check):
    """After its own wait, whichever warp it is of: the wgmma is over for all four."""
    report, tiles, out = stages(consumers, release, check)
    assert report.ok and not report.findings, report
    # Every row of D is the same: for each of the 64 columns the sum of its 16 numbers, over the tiles.
    columns = tiles.astype(np.float64).reshape(6, 8, 2, 8, 8).sum(axis=(0, 2, 4)).reshape(64)
    assert sorted(set(out[0])) == sorted(set(columns)) and (out == out[0]).all()


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_a_stage_that_is_released_before_the_wait(consumers):
    report, _, _ = stages(consumers, 1)
    (f,) = report.findings
    assert (f.kind, f.line, f.other_line) == ("stage-overwritten", LINES["refill"], LINES["consume"])
    assert (
        "fills with bulk_load" in f.message
        and "is still reading: no wgmma_wait of that warpgroup has ended it yet" in f.message
    )


@pytest.mark.parametrize("consumers", [2, 3])
def test_a_stage_that_not_all_consumers_release(consumers):
    report, _, _ = stages(consumers, 2)
    (f,) = report.findings
    assert (f.kind, f.line, f.other_line) == ("stage-overwritten", LINES["refill"], LINES["consume"])
    assert f"(warpgroup of thread {128 * (consumers - 1)})" in f.message  # the one that was left out


def test_a_stage_that_is_read_before_it_is_filled():
    report, _, out = stages(1, 5, count=2)
    f = one(report, "uninitialised-shared")
    assert f.line == LINES["consume"] and "reads with wgmma" in f.message and np.isnan(out).all()
    f = one(report, "read-before-wait")
    assert (f.line, f.other_line) == (LINES["consume"], LINES["refill"])


# ---- setmaxnreg -------------------------------------------------------------------------------------
@pytest.mark.parametrize("check", [False, True])
def test_registers_are_dealt_out_again(check):
    built, out = module("wgmma.cu", check), np.zeros(512, np.float32)
    assert not built.run_registers(out, 384, 0).findings  # 168 each become 240, 240 and 24
    with pytest.raises(
        DeadlockError, match=r"setmaxnreg_inc<248> in line \d+: the launch gave the block 64512 registers"
    ) as e:
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
    command = [find_nvcc(), "-std=c++17", "-I", str(INCLUDE), "-I", str(PTX),
               "-gencode=arch=compute_90a,code=sm_90a", "-cubin",
               "-DEVERY_N", "-o", str(tmp_path / "wgmma.cubin"), str(KERNELS / "wgmma.cu")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # C7519: where sums begin as a constant, it is moved behind the fence, and ptxas adds one.
    said = [line for line in done.stderr.splitlines() if "(C75" in line and not ("C7519" in line and "every_n" in line)]
    assert all("one_warpgroup" in line or "setmaxnreg" in line for line in said), done.stderr
    assert not any("one_warpgroupILi0E" in line for line in said), done.stderr  # the one without a mistake
    if find_cuobjdump() is None:
        return
    sass = subprocess.run(
        [find_cuobjdump(), "-sass", str(tmp_path / "wgmma.cubin")], capture_output=True, text=True
    ).stdout
    assert {int(n) for n in re.findall(r"HGMMA\.64x(\d+)x16\.F32", sass)} == set(range(8, 257, 8))
