"""Builds shared by the emulator's tests: each kernel file is compiled once for each kind of build."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.simt import Module, compile_cuda, run

KERNELS = Path(__file__).parent / "kernels"


_modules: dict[str, Module] = {}


def module(name: str, check: bool = True, **options) -> Module:
    """A build of one of the files in kernels/."""
    key = repr((name, check, sorted(options.items())))
    if key not in _modules:
        _modules[key] = compile_cuda(KERNELS / name, check=check, **options)
    return _modules[key]


@pytest.fixture
def little_patience(monkeypatch):
    """What never ends is given up after 2 s of its own work: a busy machine does not cut short what ends."""
    monkeypatch.setattr(run, "PATIENCE", 2.0)


@pytest.fixture(params=["fast", "check"])
def language(request) -> Module:
    return module("language.cu", request.param == "check")
