"""Fixtures of the checker's tests."""

import pytest
import torch

from flashlab import runtime


@pytest.fixture
def on_cpu(monkeypatch):
    """Give the cases' inputs on the CPU, where the catalogue runs, whatever this machine has."""
    monkeypatch.setattr(runtime, "device", lambda: torch.device("cpu"))
