"""The benches, as far as no GPU is needed: what would be measured, what is recorded, and the tables."""

import json
import math

import pytest
import torch

from flashlab.bench import harness, mma, ncu, records, timing, triton, validation
from flashlab.bench import resources as resources_bench
from flashlab.kernels import SERIES

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


# ---- timing --------------------------------------------------------------------------------------------------------
def test_summary_of_samples():
    times = {"ms": 3.0, "fastest": 1.0, "slowest": 5.0, "rounds": 5}
    assert timing.summary([3.0, 1.0, 2.0, 5.0, 4.0]) == times


def test_flops_of_attention():
    whole, causal = (harness.work_of({"shape": (1, 2, 10, 64), "causal": causal}) for causal in (False, True))
    assert whole == 2 * causal == 4 * 2 * 100 * 64


@gpu
def test_interleaved_orders_what_is_plainly_slower():
    x = torch.randn(2048, 2048, device="cuda")
    functions = {"one": lambda: x @ x, "four": lambda: x @ x @ x @ x @ x, "two sets": [lambda: x @ x] * 2}
    able, reasons = timing.able(functions | {"impossible": lambda: torch.empty(2**50, device="cuda")})
    assert list(able) == list(functions) and "memory" in reasons["impossible"]
    times = timing.interleaved(able)
    assert 2 < times["four"]["ms"] / times["one"]["ms"] < 8 and times["one"]["rounds"] == 15
    assert all(t["fastest"] <= t["ms"] <= t["slowest"] for t in times.values())
    assert timing.input_sets(1) == 8 and timing.input_sets(10**12) == 1


@no_gpu
def test_without_a_gpu_timing_says_so():
    with pytest.raises(timing.NoGpu, match="timing needs a GPU"):
        timing.interleaved({"nothing": lambda: None})


@pytest.mark.parametrize("content", ["plain", "rising"])
def test_the_minimal_kernels_error_is_measured_anywhere(content):
    row = triton.accuracy(100, 32, torch.float16, content)
    assert row["o_of_bound"] <= 1 and row["lse_of_bound"] <= 1
    assert 0 < row["o_error"] <= 2 * row["twin_error"] and 0 < row["lse_error"] < 1e-4


# ---- the tensor-core bench -----------------------------------------------------------------------------------------
def test_every_step_and_every_define_of_each_is_measured():
    found = mma.variants()
    names = {(v.name, v.head_dim) for v in found}
    assert len(names) == len(found)
    for s in mma.SERIES:
        for d in s.head_dims:
            assert (s.name, d) in names
            for define, values in s.defines.items():
                assert all((f"{s.name} {define}={value}", d) in names for value in values[1:])
    assert {v.step.name for v in mma.variants(only_last=True)} == {SERIES[-1].name}
    assert len(mma.variants((torch.float16, torch.bfloat16))) == 2 * len(found)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_moving_inputs_move_every_rows_maximum_in_every_tile(head_dim):
    torch.manual_seed(0)
    for content, most, least in (("moving", 1.0, 0.999), ("randn", 0.0, -1.0)):
        q, k, v = mma.inputs((1, 2, 1024, head_dim), content, "cpu")
        assert q.dtype == torch.float16 and all(x.isfinite().all() for x in (q, k, v))
        s = q.float() @ k.float().mT * head_dim**-0.5 * math.log2(math.e)
        tiles = s.unflatten(3, (-1, 64)).amax(4).flip(3)  # in the order in which they are read
        moves = tiles.cummax(3).values.diff(dim=3) > 8  # RESCALE_ABOVE of the kernels
        assert least < moves.float().mean() <= most
    with pytest.raises(ValueError, match="randn or moving"):
        mma.inputs((1, 1, 64, 64), "still", "cpu")


def test_the_kernel_of_a_large_grid():
    found = [r for r in resources_bench.recorded()["kernels"] if r.target == "sm_90" and r.head_dim == 128]
    for s in mma.SERIES:
        for causal in (False, True):
            kernel = mma.main_kernel([r for r in found if r.step == s.name], causal)
            assert kernel is not None and "merge" not in kernel.kernel, s.name
            assert ("true" in kernel.kernel) == (causal and "<" in kernel.kernel)
            if s is SERIES[-1]:
                assert kernel.kernel.startswith("flash_forward<Tile<2, 64>")
    assert mma.main_kernel([], False) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p6_1_fa1", "p6_5_overlap", "p7_naive", "p9_flash"])
def test_the_emulator_still_counts_what_was_compared_with_the_hardware(name):
    variant = next(v for v in validation.variants() if v.name == name)
    recorded = next(r for r in records.recorded("validation")[0]["kernels"] if r["kernel"] == name)
    _, counted = validation.emulate(variant)
    assert {k: counted[k] for k in recorded["counters"]} == {k: pair[0] for k, pair in recorded["counters"].items()}


# ---- records, and Nsight Compute's table ---------------------------------------------------------------------------
def test_a_run_is_recorded_under_its_gpus_name():
    assert records.default_path("walls", "NVIDIA H200").name == "walls_h200.json"
    assert records.default_path("walls", "NVIDIA GeForce RTX 4090").name == "walls_geforce_rtx_4090.json"


def test_every_recorded_file_names_its_machine_versions_and_date():
    files = sorted(records.RECORDED.glob("*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text())
        if "nvcc" in content:  # what a compiler said: no machine takes part
            assert content["date"], file.name
        else:
            assert {"gpu", "torch", "date"} <= set(content["machine"]), file.name


TABLE = """LAUNCH {"n": 1}
==PROF== Profiling "first" - 0: 0%....50%....100% - 3 passes
==PROF== Profiling "second" - 1: 0%....50%....100% - 3 passes
LAUNCH {"n": 2}
==PROF== Profiling "third" - 2: 0%....50%....100% - 3 passes
"ID","Kernel Name","dram__bytes_read.sum"
"","","byte"
"0","first","1,024"
"1","second","2048"
"2","third",""
"""


def test_a_kernel_belongs_to_what_was_announced_last():
    rows = ncu.parse(TABLE, {"read": "dram__bytes_read.sum"})
    assert [(r["kernel"], r["launch"], r["read"]) for r in rows] == [
        ("first", {"n": 1}, 1024.0), ("second", {"n": 1}, 2048.0), ("third", {"n": 2}, None),
    ]  # fmt: skip


def test_without_its_own_lines_each_announcement_is_a_kernel_or_nothing_is_known():
    quiet = "\n".join(line for line in TABLE.splitlines() if not line.startswith("=="))
    assert [r["launch"] for r in ncu.parse(quiet, {"read": "dram__bytes_read.sum"})] == [None] * 3
    one_each = quiet.replace('LAUNCH {"n": 2}', 'LAUNCH {"n": 2}\nLAUNCH {"n": 3}')
    assert [r["launch"]["n"] for r in ncu.parse(one_each, {"read": "dram__bytes_read.sum"})] == [1, 2, 3]
    assert ncu.parse("==ERROR== no kernels were profiled", {"read": "x"}) == []
