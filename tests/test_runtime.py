"""Which device, which limits, and which mode Triton is in."""

import os
import subprocess
import sys

import pytest
import torch

from flashlab import runtime
from flashlab.runtime import gpus, ptxas

MODE = "import flashlab.runtime as r, triton; print(r.INTERPRETED, triton.knobs.runtime.interpret, r.device().type)"
TRITON_FIRST = "import triton; " + MODE
REPAIRED = "import flashlab, triton.runtime.interpreter as ti; print(hasattr(ti.InterpreterBuilder, 'get_bf16'))"
BOTH = {"FLASHLAB_INTERPRET": "0", "TRITON_INTERPRET": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TOO_LATE = "WrongMode: triton was imported before flashlab "

# name -> program, environment, what it prints (or a part of what it says when it fails)
PROCESSES = {
    "asked to interpret": (MODE, {"FLASHLAB_INTERPRET": "1"}, "True True cpu"),
    "asked by Triton's own variable": (MODE, {"TRITON_INTERPRET": "1"}, "True True cpu"),
    "no GPU": (MODE, NO_GPU, "True True cpu"),
    "asked to compile, no GPU": (MODE, NO_GPU | BOTH, "False False cpu"),
    "a wrong wish": (MODE, {"FLASHLAB_INTERPRET": "please"}, "is 'please': set it to 1 (interpret) or 0 (compile)"),
    "triton first, compiling": (TRITON_FIRST, {"FLASHLAB_INTERPRET": "1"}, TOO_LATE + "and will compile"),
    "triton first, interpreting": (TRITON_FIRST, BOTH, TOO_LATE + "with TRITON_INTERPRET=1"),
    "triton first, in the right mode": (TRITON_FIRST, BOTH | {"FLASHLAB_INTERPRET": "1"}, "True True cpu"),
    "repairs come with flashlab": (REPAIRED, {"FLASHLAB_INTERPRET": "1"}, "True"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.every(9)
def test_the_mode_is_chosen_at_import(name):
    program, environment, want = PROCESSES[name]
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHLAB_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True)
    said = done.stdout.strip() if done.returncode == 0 else done.stderr
    assert want == said if len(want) < 20 else want in said


# The limits that decide which tile sizes run, as the CUDA programming guide gives them.
@pytest.mark.parametrize(
    "target, block", [("sm_80", 166912), ("sm_86", 101376), ("sm_89", 101376), ("sm_90", 232448), ("sm_120", 101376)]
)
def test_shared_memory_of_the_targets(target, block):
    gpu = runtime.limits(target)
    assert gpu.target == target and gpu.shared_per_block == block
    assert gpu.shared_per_sm == block + 1024  # the system keeps 1 KiB of an SM's for each block


@pytest.mark.parametrize(
    "name, threads, shared, registers, blocks",
    [("H200", 128, 0, None, 16), ("H200", 128, 40960, 128, 4), ("H200", 128, 0, 255, 2),
     ("RTX 4090", 128, 81920, 237, 1), ("RTX 4090", 128, 8192, None, 11), ("H200", 32, 0, 16, 32)],
)  # fmt: skip
def test_blocks_on_a_multiprocessor(name, threads, shared, registers, blocks):
    assert runtime.limits(name).resident_blocks(threads, shared, registers) == blocks


def test_unknown_gpu_says_what_there_is():
    with pytest.raises(KeyError) as caught:
        runtime.limits("RTX 9999")
    assert str(caught.value).startswith("no GPU 'RTX 9999' in the table; there are A100, ")
    assert str(caught.value).endswith("sm_80, sm_86, sm_89, sm_90, sm_100, sm_120")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_says_so():
    with pytest.raises(KeyError, match="this machine has no GPU; name one: A100"):
        runtime.limits()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_gpu():
    gpu = runtime.limits()
    assert gpu.capability == torch.cuda.get_device_capability()
    assert gpu.shared_per_block == runtime.SHARED_MEMORY[gpu.capability][0]
    assert gpu.sms > 0 and "driver" in gpu.source


@pytest.mark.parametrize(
    "bundled, others, driver, chosen",
    [
        ("12.8", ["13.0"], 13, 0),
        ("12.8", ["12.9", "none", "13.1", "13.0"], 13, 2),
        ("12.8", ["13.0"], 12, None),  # the driver may not load what it makes
        ("12.8", ["14.0"], 13, None),
        ("13.0", ["13.1"], 13, None),
        ("none", ["13.0"], 13, None),
    ],
)
def test_a_newer_ptxas_is_taken_where_the_bundled_one_is_old(tmp_path, bundled, others, driver, chosen):
    def tool(name, of):
        path = tmp_path / name
        if of != "none":
            path.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {of}, V{of}.88\n")
            path.chmod(0o755)
        return str(path)

    paths = [tool(str(i), of) for i, of in enumerate(others)]
    found = ptxas.newer(tool("bundled", bundled), paths, driver)
    assert found == (None if chosen is None else paths[chosen])


@pytest.mark.parametrize(
    "driver_name, capability, name",
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100"),
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA GeForce RTX 5060 Ti", (12, 0), "RTX 5060 Ti"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), None),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), None),
        ("NVIDIA A100-PCIE-40GB", (8, 0), None),
        ("NVIDIA H100 PCIe", (9, 0), None),
        ("NVIDIA L40S", (8, 9), "L40S"),
        ("Tesla T4", (7, 5), None),
    ],
)
def test_only_the_same_chip_lends_its_speeds(driver_name, capability, name):
    found = gpus._named_in(driver_name, capability)
    assert (found.name if found else None) == name
