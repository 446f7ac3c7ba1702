"""What the bench of phase 11 measures: kernels, peers, and jobs in their order."""

from collections.abc import Iterable, Sequence
from itertools import product

import torch

from flashlab import kernels
from flashlab.bench import harness, hopper_inputs, validation
from flashlab.bench.harness import Row, jobs_of
from flashlab.kernels import Step

PHASE = 11
OURS = "p11"  # the name of phase 11's last step in every row; the row's `step` says which that was
CUDNN, FA2, FA4, P9 = "cuDNN", "FlashAttention-2", "FlashAttention-4", "p9_flash"
TRITON, BOXES = "triton", "triton, descriptors"
PEERS = (CUDNN, FA2, FA4, P9, TRITON, BOXES)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
HEAD_DIMS = (128, 64, 256)
LENGTHS = (4096, 1024, 16384, 2048, 8192, 512, 32768)  # the most telling first
KINDS = ("standard", "sizes", "grouped", "by token", "odd", "cross")
SIZES: dict[int, tuple[str, ...]] = {
    96: ("SLAB=64 BLOCK_N=128 TALL=2", "BLOCK_N=160 TALL=2", "LATE_TURN=1"),
    192: ("BLOCK_N=80", "TRUST=0"),
    80: ("SLAB=64 BLOCK_N=128 TALL=2", "BLOCK_N=176 TALL=2", "LATE_TURN=1"),
    112: ("BLOCK_N=80 TALL=3", "BLOCK_N=112"),
    160: ("SLAB=64 BLOCK_N=96", "BLOCK_N=112"),
}
"""Head sizes between those of HEAD_DIMS, and the kernel's macros that are tried at N = 4096."""
LADDER = (
    ((4, 16, 4096, 128), False), ((4, 16, 4096, 128), True), ((4, 32, 4096, 64), False), ((16, 16, 1024, 128), True),
)  # fmt: skip
VARIED = (*LADDER, ((4, 32, 4096, 64), True), ((1, 16, 16384, 128), True), ((4, 8, 4096, 256), False))
MASKS = (False, True)
BACKWARD_WORK = 2.5  # five products where the forward pass has two
REPEATS = 200
PLANTED = (
    "K is waited for, V is not", "K is released before the wgmma are waited for",
    "no wgmma_fence after P is written", "no proxy fence before O is stored",
)  # fmt: skip
"""Mistakes of flashlab.check.mistakes.hopper that leave nobody waiting for ever."""
SECONDS = 2.0  # of a job, about


# ---- the kernels -----------------------------------------------------------------------------------------------------
def ladder() -> tuple[Step, ...]:
    """The steps of the phase that there are, in order."""
    return kernels.steps(PHASE)


def step_of(kernel: str) -> Step:
    """Of a step with its macros as they are, or with some of them set: "p11_flash STAGES=3 BLOCK_N=64"."""
    return kernels.step(kernel.split()[0])  # KeyError for a name that is none


def defines_of(kernel: str) -> tuple[tuple[str, int], ...]:
    """ "p11 KEY_STEP=64": (("KEY_STEP", 64),)"""
    return tuple((macro, int(value)) for macro, value in (x.split("=") for x in kernel.split() if "=" in x))


def last() -> Step:
    """The kernel that stands for the phase."""
    return ladder()[-1]


_AS_THEY_ARE = {"TRUST": lambda head_dim: int(head_dim < 256), "LATE_TURN": lambda head_dim: int(head_dim == 64)}
"""Macros of the last step whose default is not the same for every head_dim."""


def varied(ours: Step, head_dim: int = 128) -> list[str]:
    """The kernel, and it with one macro of its step set otherwise."""
    found = [ours.name]
    for macro, values in ours.defines.items():
        usual = _AS_THEY_ARE[macro](head_dim) if macro in _AS_THEY_ARE else values[0]
        found += [f"{ours.name} {macro}={value}" for value in values if value != usual]
    return found


def steps_of(job: Row) -> list[str]:
    """The kernels of the phase that a job of a shape is about; of the ladder's every step, else the last first, and
    what else it is set beside: with other macros, or without trust."""
    ours = last()
    if job["part"] == "ladder":
        return [one.name for one in ladder()]
    if job["part"] == "variants":
        return varied(ours, job["shape"][3])
    if job["part"] in ("inputs", "captured", "clock"):
        return [ours.name, f"{ours.name} TRUST=0", FORGETS, ROUNDED]
    others = SIZES[job["shape"][3]] if job["part"] == "sizes" and job["shape"][2] == 4096 else ()
    return [ours.name, *(f"{ours.name} {x}" for x in others)]


FORGETS, LEARNS, ROUNDED = "p11_15_portions", "p11_16_learns", "p11_side_rounded"
"""The step that forgets its doubts, the one that does not, the exhibit that divides by the sum of rounded weights."""


# ---- what is measured ------------------------------------------------------------------------------------------------
def shape_job(
    shape: Sequence[int], causal: bool, dtype: str = "bf16", kind: str = "standard", *, kv_heads: int | None = None,
    keys: int | None = None,
) -> Row:  # fmt: skip
    """shape: batch, heads, queries, head_dim. kv_heads, keys: as many as heads and queries, if None."""
    return {
        "part": "shapes", "kind": kind, "shape": list(shape), "kv_heads": kv_heads or shape[1],
        "keys": keys or shape[2], "causal": causal, "dtype": dtype,
    }  # fmt: skip


def _shapes(lengths: Iterable[int], head_dims: Iterable[int] = HEAD_DIMS) -> list[tuple[tuple[int, ...], bool]]:
    """With and without a mask: 16384 queries, but of one sequence at least, and 2048 columns in all heads together."""
    return [((max(1, 16384 // n), 2048 // d, n, d), causal) for n, d, causal in product(lengths, head_dims, MASKS)]


def standard(dtype: str, lengths: Iterable[int] = LENGTHS) -> list[Row]:
    return [shape_job(*shape, dtype) for shape in _shapes(lengths)]


def sizes() -> list[Row]:
    """Head sizes of other models, which only some of the peers have kernels for."""
    found = _shapes((4096,), SIZES) + _shapes((1024, 16384), (96, 192))
    return [shape_job(*shape, kind="sizes") | {"part": "sizes"} for shape in found]


def others() -> list[Row]:
    """The shapes that models have, and that a kernel may have been forgotten for."""
    grouped = (((4, 32, 4096, 128), 8), ((4, 32, 4096, 64), 8), ((2, 16, 4096, 256), 4),
               ((1, 32, 16384, 128), 8), ((8, 28, 1024, 128), 4), ((4, 16, 4096, 128), 1))  # fmt: skip
    found = [shape_job(shape, causal, kind="grouped", kv_heads=kv) for (shape, kv), causal in product(grouped, MASKS)]
    for kind, lengths in (("by token", (4096, 1024)), ("odd", (4001, 1023))):
        found += [shape_job(*shape, kind=kind) for shape in _shapes(lengths)]
    return found + [shape_job((4, 2048 // d, 512, d), False, kind="cross", keys=8192) for d in HEAD_DIMS]


def jobs() -> list[Row]:
    """Every measurement, the most telling first, whatever its part."""
    found = standard("bf16", LENGTHS[:2])
    found += [{"part": "ladder", "shape": list(shape), "causal": causal} for shape, causal in LADDER]
    found += repeat_jobs() + input_jobs()
    # Zeros: on them no transistor of a multiplier switches.
    found += jobs_of("clock", shape=OF_INPUTS, inputs=("random", "zeros"), causal=[False], dtype=["bf16"])
    found += jobs_of("stamps", shape=STAMPED, causal=MASKS, dtype=["bf16"])
    for (model, layers), shape in zip(hopper_inputs.LAYERS.items(), OF_INPUTS, strict=True):
        about: Row = {"shape": [shape], "causal": [True], "dtype": ["bf16"]}
        found += jobs_of("captured", inputs=[model], layer=range(layers), **about)
    found += standard("bf16", LENGTHS[2:4])
    found += [_listed(d, dtype, causal) for dtype, d, causal in product(("bf16", "fp16"), HEAD_DIMS, MASKS)]
    found += sizes() + [_listed(d, "bf16", causal) for d, causal in product(SIZES, MASKS)]
    found += backward_jobs()
    found += standard("bf16", LENGTHS[4:])
    found += [{"part": "variants", "shape": list(shape), "causal": causal} for shape, causal in VARIED]
    found += others()
    found += [*standard("fp16"), {"part": "profile"}, {"part": "counters"}, {"part": "validate", "what": "cases"}]
    found += [{"part": "planted", "what": mistake} for mistake in PLANTED]
    return found + [{"part": "sanitizer", "tool": tool} for tool in validation.TOOLS]


def backward_jobs() -> list[Row]:
    """dQ, dK and dV, as `standard` has the forward pass."""
    found = _shapes((4096,), (128, 64, 256, 96, 192)) + _shapes((1024, 16384), (128, 64, 256))
    return [{"part": "backward", "shape": list(shape), "causal": c, "dtype": "bf16"} for shape, c in found]


def repeat_jobs(repeats: int = REPEATS) -> list[Row]:
    """A kernel whose result depends on who comes first would show it where many blocks take tiles from one counter."""
    shapes = (((4, 16, 4096, 128), 16), ((2, 16, 1000, 64), 4), ((2, 8, 2048, 256), 8))
    return [
        {"part": "validate", "what": "repeats", "repeats": repeats, "shape": list(shape), "kv_heads": kv,
         "causal": causal, "dtype": "bf16"}
        for shape, kv in shapes for causal in (True, False)
    ]  # fmt: skip


def _listed(head_dim: int, dtype: str, causal: bool, most: int | None = None) -> Row:
    """most: of queries and keys; None for the whole list."""
    about = {"head_dim": head_dim, "dtype": dtype, "causal": causal, "most": most}
    return {"part": "validate", "what": "shapes"} | about


def quick_jobs() -> list[Row]:
    """Of every part that this machine can run a little."""
    if harness.on_gpu():
        found = [job for job in standard("bf16", (4096, 1024)) if job["shape"][3] != 256]
        found += [{"part": "ladder", "shape": list(LADDER[0][0]), "causal": LADDER[0][1]}]
        found += backward_jobs()[:2]
        return [*found, repeat_jobs(20)[0], _listed(128, "bf16", True)]
    small = (1, 2, 100, 64)
    return [
        shape_job(small, False),
        shape_job(small, True, "fp16", "by token", kv_heads=1),
        {"part": "ladder", "shape": list(small), "causal": True},
        backward_jobs()[1] | {"shape": list(small)},
        repeat_jobs(2)[2] | {"shape": list(small), "kv_heads": 1},
        _listed(64, "fp16", True, most=160),
    ]


STAMPED = ([32, 32, 512, 64], [32, 16, 512, 128])
OF_INPUTS = ([4, 16, 4096, 128], [4, 32, 4096, 64])


def input_jobs() -> list[Row]:
    """Scores that trust likes, and scores that it does not."""
    return jobs_of("inputs", inputs=hopper_inputs.MADE, shape=OF_INPUTS, causal=(False, True), dtype=["bf16"])
