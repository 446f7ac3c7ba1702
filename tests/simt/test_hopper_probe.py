"""The emulator beside the record of an H200 (hopper_probe.py), and that the probe can be built without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flashlab.cuda.toolchain import find_nvcc

from . import hopper_probe
from .conftest import compile_for_hopper

RECORD = Path(__file__).parent / "data" / "hopper_probe_h200.json"


def test_the_emulator_answers_as_the_gpu_did():
    recorded = json.loads(RECORD.read_text())["checksums"]
    ours = {name: hopper_probe.checksum(answer) for name, answer in hopper_probe.answers()}
    assert set(ours) == set(recorded)
    wrong = [name for name, value in recorded.items() if ours[name] != value]
    assert not wrong, f"{len(wrong)} of {len(recorded)}, such as {wrong[:5]}"


@pytest.mark.long
@pytest.mark.skipif(find_nvcc() is None or shutil.which("g++") is None, reason="there is no nvcc")
def test_the_probe_compiles_for_the_gpu(tmp_path):
    for name in ("wgmma_probe.cu", "hopper_copies.cu"):
        said = compile_for_hopper(name, tmp_path / "probe.so", "-shared", "-Xcompiler", "-fPIC")
        assert "C75" not in said, said  # ptxas adds no fence and no wait
