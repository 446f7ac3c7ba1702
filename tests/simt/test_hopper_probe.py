"""The emulator beside the record of an H200 (hopper_probe.py), and that the probe can be built without one."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from flashlab.cuda.toolchain import find_cuobjdump, find_nvcc

from . import hopper_probe
from .conftest import compile_for_hopper


def test_the_emulator_answers_as_the_gpu_did():
    recorded = json.loads(hopper_probe.RECORD.read_text())["checksums"]
    ours = {name: hopper_probe.checksum(answer) for name, answer in hopper_probe.answers()}
    assert set(ours) == set(recorded) and len(recorded) > 5000
    wrong = [name for name, value in recorded.items() if ours[name] != value]
    assert not wrong, f"{len(wrong)} of {len(recorded)}, such as {wrong[:5]}"


@pytest.mark.long
@pytest.mark.skipif(find_nvcc() is None or shutil.which("g++") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", ["wgmma_probe", "hopper_copies", "hopper_memory"])
def test_nvcc_compiles_it_for_hopper(name, tmp_path):
    said = compile_for_hopper(f"{name}.cu", tmp_path / "probe.so", "-shared", "-Xcompiler", "-fPIC")
    assert "C75" not in said, said  # ptxas adds no fence and no wait
    if name == "hopper_copies" and find_cuobjdump():
        command = [find_cuobjdump(), "-sass", tmp_path / "probe.so"]
        sass = subprocess.run(command, capture_output=True, text=True).stdout
        for instruction in ("UTMALDG.5D", "UTMASTG.5D", "UTMAREDG.5D", "UBLKCP", "SYNCS", "UTMACCTL.PF", "ELECT"):
            assert instruction in sass, instruction
