"""Timing on a GPU, recorded results (recorded/*.json) and figures that others published (published/*.csv).

BENCHES names every bench; `flashlab bench NAME` runs it. A bench that times something is a harness.Bench and gives
``jobs()`` and ``measure(job)``; flashlab.bench.harness has the rest, for all of them.
"""

import importlib
from types import ModuleType

BENCHES = {
    "walls": ("Phase 1: naive attention, scheme A to its refusal, the escape hatches.", "a GPU"),
    "triton": ("Phase 3: the minimal Triton kernel against its peers.", "a GPU"),
    "industrial": ("Phases 4 and 5: forward and backward against FlashAttention-2, cuDNN, Flex, eager.", "a GPU"),
    "scalar": ("Phase 6: the float32 CUDA kernels against unfused PyTorch and SDPA.", "a GPU, nvcc"),
    "mma": ("The tensor-core kernels against FlashAttention-2, cuDNN, unfused PyTorch.", "a GPU, nvcc"),
    "hopper": ("Phase 11's kernels against cuDNN, FlashAttention-2 and 4, and the course's own.", "a GPU, nvcc"),
    "decode": ("Phase 12: one query per sequence over paged caches, against cuDNN, FlashInfer, our Triton.",
                    "a GPU, nvcc"),
    "ring": ("Phase 13: one sequence over several GPUs, beside one and beside context_parallel.", "two GPUs"),
    "attention": ("Attention alone: forward, backward, memory; eager, compiled, ours.", "a GPU"),
    "layer": ("Phase 10: an attention layer timed and profiled: original, ours, SDPA, compiled.", "a GPU"),
    "lm": ("Phase 10: the language model's steps, memory, longest text and loss.", "a GPU"),
    "hardware": ("What the hardware itself does: rates, sums, traffic, workspaces, stalls.", "a GPU, nvcc, ncu"),
    "ablation": ("The last kernel with one idea at a time taken out.", "a GPU, nvcc"),
    "validation": ("The emulator against the hardware: results, counters, sanitizer.", "a GPU, nvcc, ncu"),
    "resources": ("Registers, spills, shared memory and instructions of the compiled kernels.", "nvcc"),
    "schedule": ("How far ahead of its MMA each ldmatrix stands in the compiled loop.", "nvcc"),
    "readme": ("Nothing: writes README's results and docs/results.md, from the records.", "nothing more"),
    "all": ("Every bench that times kernels, one after the other.", "nothing more"),
}  # fmt: skip
"""By the name on the command line, which is the module's: what it measures, and what that needs."""

OF_ALL = ("walls", "triton", "industrial", "scalar", "mma", "hopper", "decode", "attention", "layer", "lm", "ablation")
"""What `bench all` runs, in this order."""


def module_of(name: str) -> ModuleType:
    """The module of a bench. It has ``main(arguments)``, and one that is on the harness BENCH."""
    return importlib.import_module(f"flashlab.bench.{name}")
