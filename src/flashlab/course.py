"""The phases of the course: the one table that README, `flashlab doctor`, the map and the build read.

Standard library only: `make doctor` reads it before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of the course."""

    number: int | str  # of its files, `NN_slug`; of an optional notebook behind phase 11 "11b" or "11c"
    slug: str
    title: str  # what pages call it
    kind: str  # what it runs on: torch, triton, gluon, cuda, profiler, hopper or distributed
    summary: str  # what the learner ends with, in Markdown
    reading: int = 0  # minutes for the lecture at the rate of `src/lessons/pacing.py`, to a quarter of an hour

    @property
    def name(self) -> str:
        """The name of its notebooks, `08_pipelines_and_banks`."""
        return f"{self.number:0>2}_{self.slug}"


PHASES = (
    Phase(
        0, "attention_and_online_softmax", "Attention and online softmax", "torch",
        "attention by hand, the safe softmax, the online recurrence, and the merge of two partial results as an "
        "associative operation", 90,
    ),
    Phase(
        1, "two_walls", "Naive attention and the two walls", "triton",
        "what naive attention costs; the **physical wall** (shared memory) and the **logical wall** (Triton does not "
        "slice), met for real", 105,
    ),
    Phase(
        2, "online_softmax_simulation", "FlashAttention simulated in plain PyTorch", "torch",
        "the whole forward pass, tile by tile: state m, l, acc, one correction, one division at the end", 75,
    ),
    Phase(
        3, "minimal_triton_kernel", "The minimal Triton kernel", "triton",
        "the same loop as a Triton kernel, any length; both walls tested again, and gone", 75,
    ),
    Phase(
        4, "industrial_triton", "The industrial Triton kernel", "triton",
        "batch, heads, GQA, masks, any head_dim, tiles never loaded or never masked, autotuning; measured against "
        "its peers", 120,
    ),
    Phase(
        5, "backward", "The backward pass", "triton",
        "recomputation, delta, dK/dV and dQ kernels without atomics, gradients checked, autograd; a model that trains",
        135,
    ),
    Phase(
        6, "cuda_scalar", "Scalar CUDA C++", "cuda",
        "threads, blocks and shared memory; FlashAttention-1 and -2 in float32 CUDA, from the paper's loops to a "
        "kernel that beats unfused PyTorch", 150,
    ),
    Phase(
        7, "tensor_cores", "Tensor cores: ldmatrix and mma.sync", "cuda",
        "who holds which element of a fragment, seen in a run; one MMA by hand; the first tensor-core FlashAttention",
        120,
    ),
    Phase(
        8, "pipelines_and_banks", "Pipelines and banks: cp.async and swizzle", "cuda",
        "tiles and warps, copies in flight, bank conflicts seen and removed, the collective store: each step with its "
        "counted reason", 105,
    ),
    Phase(
        9, "past_flash_attention_2", "Past FlashAttention-2", "cuda",
        "masks, addresses, rescaling, 32 rows per warp, prefetch, order, tiles: faster than FlashAttention-2", 120,
    ),
    Phase(
        10, "profiling_a_transformer", "Profiling a transformer", "profiler",
        "a real layer and a language model under the profiler, before and after", 180,
    ),
    Phase(
        11, "hopper", "Hopper: TMA and wgmma", "hopper",
        "TMA, mbarriers, wgmma, warp specialisation: a producer and its consumers, written from an empty page", 120,
    ),
    Phase(
        "11b", "gluon", "Optional: phase 4's loop in Gluon", "gluon",
        "layouts, barriers and waits in Triton's lower layer, compiled and read anywhere, run on Hopper", 60,
    ),
    Phase(
        "11c", "tuned", "Optional: tuned on an H200", "hopper",
        "what took the kernel past cuDNN and FlashAttention-4, what each idea gained and cost, and what limits it", 135,
    ),
    Phase(
        12, "decoding", "Decoding: split-KV and paged caches", "triton",
        "one query against a long cache: splits and their merge, pages, groups, ragged batches, counted; a pager, and "
        "a model that writes with it", 105,
    ),
    Phase(
        13, "many_gpus", "Many GPUs: ring attention", "distributed",
        "phase 0's merge over machines: ring, zigzag, Ulysses and a mesh, forward and backward, on torch.distributed; "
        "a model whose sequence lies on many ranks", 75,
    ),
)  # fmt: skip


def hours(minutes: float) -> str:
    """A time as pages state it: "45 min", "2½ h"."""
    halves = round(minutes / 30)
    return f"{round(minutes)} min" if halves < 2 else f"{halves // 2}{'½' * (halves % 2)} h"


def number_of(stem: str) -> int | str:
    """The phase's number in a file's name: 4 of "04_industrial_triton", "11b" of "11b_gluon"."""
    text = stem.partition("_")[0]
    return int(text) if text.isdigit() else text


def readme_table() -> str:
    """The README's table of the phases."""
    lines = ["| # | Lecture | You end with | To read | |", "|---|---|---|---|---|"]
    for p in PHASES:
        title = f"[{p.title}](notebooks/{p.name}.ipynb)"
        links = " · ".join(f"[{folder}]({folder}/{p.name}.ipynb)" for folder in ("exercises", "solutions"))
        lines.append(f"| {p.number} | {title} | {p.summary} | {hours(p.reading)} | {links} |")
    return "\n".join(lines)
