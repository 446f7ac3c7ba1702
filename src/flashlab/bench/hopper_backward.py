"""The part "backward" of the bench of phase 11: p11_backward beside cuDNN, FlashAttention-2 and phase 5's Triton.

    flashlab bench hopper --only backward

Each takes o and lse as given: the time is of the backward pass alone. Rows of this kernel with other macros, and of its
kernels by themselves, stand beside it. Every dq, dk and dv of the first head, and of the last, is compared with float64
(flashlab.check.training): `of_bound` is the largest error as a part of what is allowed. `different` counts the
repetitions that gave other bits.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from flashlab.attention import reference, triton_backward, triton_forward
from flashlab.attention.door import flash_attention
from flashlab.bench import harness, hopper_jobs, industrial, peers, timing
from flashlab.bench.harness import Row, Way
from flashlab.bench.hopper_jobs import CUDNN, DTYPES, FA2, FA4, OURS, TRITON, defines_of
from flashlab.bench.truth import right as is_right
from flashlab.check.training import wanted, worst
from flashlab.cuda import operators  # noqa: F401  (the door takes p11_flash once this is imported)
from flashlab.cuda.hopper_backward import compiled, hopper_backward

SEVEN = "PRODUCTS=7"
VARIANTS: dict[int, tuple[str, ...]] = {192: ("KEY_STEP=80", "QUERY_STEP=32"), 256: ("KEY_STEP=32", "KEY_STEP=64")}
VARIANTS |= dict.fromkeys((64, 128), (SEVEN, "ORDERED=0", "SKEWED=0", f"{SEVEN} KEY_STEP=64"))
"""Macros set otherwise, by head_dim."""
ALONE = {"statistics": 1, "statistics, keys": 3}
"""Which kernels a row is of: `launches` of flashlab.cuda.hopper_backward."""
DOOR = "flash_attention"  # what a model calls, by autograd: whatever backend that takes
REPEATS = 20
LARGE = 2**28
JUDGED = 4096  # up to so many rows two heads are compared with float64; of more, one

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # grad_o, q, k, v


def backend() -> str:
    """As the forward kernels are built here."""
    return "nvcc" if harness.on_gpu() else "emulator"


def make(shape: Sequence[int], kv_heads: int, dtype: torch.dtype) -> Given:
    """grad_o, q, k and v, the same each time."""
    batch, heads, rows, head_dim = shape
    of_q, of_k = ((batch, h, rows, head_dim) for h in (heads, kv_heads))
    grad_o, q, k, v = harness.draw(of_q, of_q, of_k, of_k, dtype=dtype, seed=sum(shape))
    return grad_o, q, k, v


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The o and lse that a backward pass takes: by the reference, where its scores have room."""
    if harness.on_gpu() and q.shape[:3].numel() * k.shape[2] > LARGE:
        return triton_forward.flash_attention_forward(q, k, v, causal=causal)
    o, lse = reference.attention(q, k, v, causal=causal)
    return o.to(q.dtype), lse.float()


# ---- what is right ---------------------------------------------------------------------------------------------------
def judged(found: Sequence[torch.Tensor], given: Given, causal: bool, most: int = 2) -> Row:
    """of_bound: the largest error as a part of its bound; None where it is NaN. of: whose it is."""
    grad_o, q, k, v = given
    batch, kv_heads, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    result: Row = {"of_bound": 0.0}
    for b, h in sorted({(0, 0), (batch - 1, kv_heads - 1)})[:most]:
        mine, keys = (slice(b, b + 1), slice(h * group, (h + 1) * group)), (slice(b, b + 1), slice(h, h + 1))
        right = wanted(q[mine], k[keys], v[keys], grad_o[mine], causal=causal)
        name, error = worst(right, dq=found[0][mine], dk=found[1][keys], dv=found[2][keys])
        if not math.isfinite(error):
            return {"of_bound": None, "of": name}
        if error >= result["of_bound"]:
            result = {"of_bound": error, "of": name}
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one layout are the same, bit by bit: a NaN is itself, and -0 is not 0."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def different(way: Way, first: Sequence[torch.Tensor], repeats: int) -> int:
    """How many repetitions gave other bits."""
    return sum(not all(map(same_bits, way(), first)) for _ in range(repeats))


_TRIED = (((1, 2, 1), 2), ((4, 6, 17), 2), ((2, 6, 300), 2), ((4, 8, 2048), 4))  # batch, heads, rows; key heads


def try_out(*names: str) -> None:
    """Launches builds, such as "128 bf16 MOST_STAGES=2". Raises ValueError where a result is wrong."""
    for name, (size, kv_heads), causal in itertools.product(names, _TRIED, (False, True)):
        d, dtype = name.split()[:2]
        given = make([*size, int(d)], kv_heads, DTYPES[dtype])
        _, q, k, v = given
        o, lse = forward(q, k, v, causal)
        how: dict[str, Any] = {"backend": backend(), "defines": defines_of(name)}
        result = judged(hopper_backward(*given, o, lse, causal=causal, **how), given, causal)
        where = f"{name}, N = {size[2]}, {'causal' if causal else 'whole'}, {kv_heads} key heads"
        print(f"{where}: {result}", flush=True)
        if not is_right(result):
            raise ValueError(f"at {where} it is wrong: {result}")


@functools.cache
def ready(head_dim: int, dtype: str) -> dict[str, str | None]:
    """By build, "64 bf16" or "64 bf16 KEY_STEP=64": why it is not measured, or None. All are compiled, then tried out,
    at once."""

    def tried(name: str) -> str | None:
        try:
            compiled(head_dim, DTYPES[dtype], backend(), False, defines_of(name))
        except Exception as error:
            return timing.reason(error)
        return harness.trial(*harness.calling(try_out, name), seconds=90.0) if harness.on_gpu() else None

    names = [f"{head_dim} {dtype} {macros}".strip() for macros in ("", *VARIANTS.get(head_dim, ()))]
    names = names[: None if harness.on_gpu() else 2]
    return dict(zip(names, harness.at_once(tried, names, 4), strict=True))


# ---- measuring -------------------------------------------------------------------------------------------------------
def ways_of(job: Row, given: Given, o: torch.Tensor, lse: torch.Tensor) -> tuple[dict[str, Way], dict[str, str]]:
    """The backward pass of everyone, by name; and why builds of ours have none."""
    causal, dtype = job["causal"], job["dtype"]
    grad_o, q, k, v = given
    ours = functools.partial(hopper_backward, *given, o, lse, causal=causal, backend=backend())
    found: dict[str, Way] = {}
    reasons: dict[str, str] = {}
    for name, why in ready(q.shape[3], dtype).items():
        label = " ".join([OURS, *name.split()[2:]])
        if why:
            reasons[label] = why
            continue
        found[label] = functools.partial(ours, defines=defines_of(name))
        if label in (OURS, f"{OURS} {SEVEN}") and harness.on_gpu():
            found |= {
                f"{label}: {what}": functools.partial(ours, defines=defines_of(name), launches=n)
                for what, n in ALONE.items()
            }
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with_gradient: dict[str, Way] = {name: peers.attention(name, q, k, v, causal) for name in (CUDNN, FA2, FA4)}
    with_gradient[DOOR] = functools.partial(flash_attention, q, k, v, causal=causal)
    found |= industrial.passes("backward", with_gradient, (q, k, v), grad_o)
    found[TRITON] = functools.partial(triton_backward.flash_attention_backward, *given, o, lse, causal=causal)
    return found, reasons


def measure(job: Row, rounds: int = 9) -> list[Row]:
    """A row for each: times in turns, and how far from right each is."""
    shape, causal = job["shape"], job["causal"]
    given = make(shape, shape[1], DTYPES[job["dtype"]])
    _, q, k, v = given
    o, lse = forward(q, k, v, causal)
    ways, reasons = ways_of(job, given, o, lse)
    found, more = harness.times_of(ways, rounds)
    work = hopper_jobs.BACKWARD_WORK * harness.work_of(job)
    for name, row in found.items():
        if ":" in name:  # a part of the work
            continue
        gradients: Any = ways[name]()
        row |= {"tflops": work / (row["ms"] * 1e9)}
        row |= judged(gradients, given, causal, 2 if shape[2] <= JUDGED else 1)
        if name.startswith(OURS):
            row |= {"different": different(ways[name], gradients, REPEATS if harness.on_gpu() else 1)}
    return harness.rows_of(job, found, reasons | more)
