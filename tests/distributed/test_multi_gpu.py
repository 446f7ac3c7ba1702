"""On a machine with several GPUs: `pytest -m multi_gpu`. Each rank is a process on a GPU of its own, with NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

COUNTS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()] or [2]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", COUNTS)
def test_every_way_is_right_on_gpus(ranks):
    assert torch.cuda.device_count() >= ranks, f"{ranks} GPUs are needed, and PyTorch sees {torch.cuda.device_count()}"
    script = Path(__file__).with_name("on_gpus.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.count("all cases right") == ranks, done.stdout + done.stderr


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["ring", "gather", "ulysses", "mesh"])
def test_training_on_gpus_has_the_losses_of_one(way):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(COUNTS[-1]),
               "-m", "flashlab.distributed.train", "--check", "--way", way]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "losses differ by at most" in done.stdout, done.stdout + done.stderr
