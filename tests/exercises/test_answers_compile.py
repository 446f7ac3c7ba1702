"""The Triton kernels of the solutions go through the real compiler: the interpreter takes more than it does."""

import inspect

import pytest
import torch
import triton.runtime.interpreter as ti
from lesson_answers import PATHS, answers_of, asked, cell_of

from flashlab import runtime
from flashlab.exercises import check
from flashlab.triton_tools.compile_report import compile_reports

WITH_KERNELS = [id for phase in PATHS for id in asked(phase, "solutions") if "@triton.jit" in cell_of(id, "solutions")]


def kind(value):
    """What types follow from: a tensor's dtype, and of a number whether it is 1, which is a constant then."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return type(value), type(value) is int and value == 1


@pytest.mark.skipif(not runtime.INTERPRETED, reason="on a GPU every test of an exercise compiles")
@pytest.mark.long
@pytest.mark.parametrize("id", WITH_KERNELS)
def test_every_launch_of_a_solution_compiles(id, monkeypatch):
    launches, original = {}, ti.InterpretedFunction.__getitem__

    def launcher(kernel, grid):
        signature, execute = inspect.signature(kernel.fn), original(kernel, grid)
        constants = {name for name, p in signature.parameters.items() if "constexpr" in str(p.annotation)}

        def launch(*args, **options):
            given = dict(
                signature.bind(*args, **{k: v for k, v in options.items() if k in signature.parameters}).arguments
            )
            key = (kernel, *(value if name in constants else kind(value) for name, value in given.items()))
            launches.setdefault(key, given)
            return execute(*args, **options)

        return launch

    monkeypatch.setattr(ti.InterpretedFunction, "__getitem__", launcher)
    check(id, *answers_of(id, "solutions"))
    assert launches
    for kernel in {kernel for kernel, *_ in launches}:
        given = [launch for (other, *_), launch in launches.items() if other is kernel]
        for report in compile_reports(kernel, given, targets=["sm_90"]):
            assert report.ok, report.error
