"""Registers, spills, shared memory, instructions: parsed, recorded, and measured where there is an nvcc."""

import re

import pytest
import torch

from flashlab import runtime
from flashlab.bench import resources as bench
from flashlab.bench import schedule
from flashlab.cuda import Unavailable, resources
from flashlab.cuda.hopper_backward import HEAD_DIMS
from flashlab.cuda.hopper_backward import SOURCE as BACKWARD
from flashlab.cuda.resources import TARGETS
from flashlab.cuda.toolchain import nvcc_version
from flashlab.kernels import DECODING, HOPPER, SERIES, step

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kILi8EEv7Problem' for 'sm_90'
ptxas info    : Function properties for _Z1kILi8EEv7Problem
    320 bytes stack frame, 576 bytes spill stores, 584 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 320 bytes cumulative stack size, 32768 bytes smem
ptxas info    : Compiling entry function '_Z1jPf' for 'sm_90'
ptxas info    : Used 12 registers
"""
SASS = """\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 HMMA.16816.F32 R4, R8, R12, R4 ;  /* 0x0000000c0804723c */
        /*0020*/                   MUFU.EX2 R3, R3 ;                 /* 0x0000000300037308 */
        /*0030*/              @UP1 MUFU.RCP R3, R3 ;                 /* 0x0000000300037308 */
        /*0040*/                   FFMA R3, R3, R4, R5 ;             /* 0x0000000300037223 */
        /*0050*/                   FFMA.FTZ R3, R3, R4, R5 ;         /* 0x0000000300037223 */
"""


def test_ptxas_and_the_listing_are_read():
    assert resources._ptxas(PTXAS) == {"_Z1kILi8EEv7Problem": (255, 576, 32768, 320), "_Z1jPf": (12, 0, 0, 0)}
    counts = resources._opcodes(SASS)
    assert (counts["HMMA"], counts["MUFU.EX2"], counts["MUFU"], counts["FFMA"], counts["LDC"]) == (1, 1, 2, 2, 1)


def test_every_step_is_recorded_for_every_target():
    data = bench.recorded()
    assert re.fullmatch(r"\d+\.\d+\.\d+", data["nvcc"]) and data["targets"] == list(TARGETS)
    for s in SERIES:
        for d in (64, 128):
            for target in TARGETS:
                rows = [r for r in data["kernels"] if (r.step, r.head_dim, r.target) == (s.name, d, target)]
                assert rows and all(0 < r.registers <= 255 for r in rows), (s.name, d, target)
                tensor_cores = any(r.instructions.get("HMMA") for r in rows)
                assert tensor_cores == (torch.float32 not in s.dtypes), s.name


@pytest.mark.skipif(not resources.available(), reason="no nvcc, or no cuobjdump")
@pytest.mark.parametrize("name", ["p8_6_store", "p6_1_fa1", "p6_5_overlap"])
@pytest.mark.long
def test_measured_is_recorded(name):
    data, s = bench.recorded(), step(name)
    if data["nvcc"] != nvcc_version():
        pytest.skip(f"recorded with nvcc {data['nvcc']}, here is {nvcc_version()}")
    got = resources.resources(s.path, target="sm_90", head_dim=64, dtype=s.dtypes[0])
    want = [r for r in data["kernels"] if (r.step, r.head_dim, r.target) == (name, 64, "sm_90")]
    assert got == want


# What ptxas is known to leave over: a few bytes, outside of the inner loop.
SPILLS = {("p11_8_persistent", 64): 12, ("p11_9_scheduler", 64): 4, ("p11_16_learns", 64): 4, ("p11_flash", 64): 4}
# Of the backward pass, by head size: outside of its loop over tiles, but for one load there at 256 with a mask.
ONCE_A_PART = {64: 20, 80: 20, 96: 44, 112: 20, 128: 12, 160: 8, 192: 12, 256: 16}
BUILDS = [
    *((s, {"head_dim": d}) for s in HOPPER for d in s.head_dims),
    *((s, {"head_dim": d, "dtype": torch.bfloat16}) for s in DECODING for d in (64, 128)),
    *(
        (BACKWARD, {"HEAD_DIM": d, "ELEMENT": "__nv_bfloat16", "PRODUCTS": n})
        for d in HEAD_DIMS
        for n in (5, 7)
        if d <= 128 or n == 7
    ),
]


@pytest.mark.long
@pytest.mark.skipif(not resources.available(), reason="no nvcc, or no cuobjdump")
@pytest.mark.parametrize("source, options", BUILDS, ids=lambda x: getattr(x, "name", str(x)))
def test_nothing_is_spilled_or_serialised(source, options):
    found = resources.resources(source, launches=False, **options)
    once = ONCE_A_PART.get(options.get("HEAD_DIM"), 0)
    assert all(kernel.spill_bytes <= SPILLS.get((kernel.step, kernel.head_dim), once) for kernel in found), found
    built_for = options.pop("head_dim", None), options.pop("dtype", None)
    log = resources._compiled(source, "sm_90", *built_for, options)[2]
    assert "Potential Performance Loss" not in log and "setmaxnreg" not in log  # what ptxas says if it has to
    with_wgmma = sum("HGMMA" in kernel.instructions for kernel in found)
    if source is BACKWARD:
        assert (len(found), with_wgmma) == ((5, 4) if options["PRODUCTS"] == 7 else (4, 2))
    else:
        assert with_wgmma == (len(found) if source.phase == 11 and source.name != "p11_1_tma" else 0)


def test_a_target_that_was_not_measured():  # the table itself: lecture 7
    with pytest.raises(ValueError, match="no figures for sm_75"):
        bench.table("sm_75")


def test_without_nvcc_it_says_so(monkeypatch):
    monkeypatch.setattr(resources, "find_nvcc", lambda: None)
    with pytest.raises(Unavailable, match="measured with nvcc"):
        resources.resources("text\n")


# ---- what an SM holds ------------------------------------------------------------------------------------------------
def test_the_last_step_has_two_blocks_on_every_gpu():
    for gpu in ("A100", "H200", "RTX 4090"):
        (last,) = bench.occupancy(gpu, ["p9_flash"], 128)
        assert (last.blocks, last.warps) == (2, 8), gpu
    tiles = {gpu: bench.occupancy(gpu, ["p9_flash"], 128)[0].kernel.kernel for gpu in ("A100", "H200", "RTX 4090")}
    assert [re.findall(r"\d+", name)[:2] for name in tiles.values()] == [["2", "32"], ["2", "64"], ["2", "16"]]


def test_a_warps_registers_come_from_one_quarter():
    kernel = resources.Resources("x", "k", "sm_90", 64, "__half", 208, 0, 0, 0, {})
    assert bench.fits(kernel, runtime.limits("H200")).warps == 8  # 9 warps' worth, but two in each quarter
    with pytest.raises(ValueError, match="no launch"):
        bench.fits(resources.Resources("x", "k", "sm_90", 64, "__half", 32, 0, 0, None, {}), runtime.limits("H200"))
    with pytest.raises(ValueError, match="no figures of p9_flash for sm_120"):
        bench.occupancy("RTX 5090", ["p9_flash"])


@pytest.mark.skipif(not resources.available(), reason="no nvcc, or no cuobjdump")
@pytest.mark.long
def test_a_measured_schedule_is_the_recorded_one():
    recorded = [r for r in schedule.recorded() if r["step"] == "p9_2_addresses"]
    assert schedule.measure([step("p9_2_addresses")]) == recorded
