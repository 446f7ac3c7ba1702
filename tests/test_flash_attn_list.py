"""The door against the list of FlashAttention's own tests (tests/test_flash_attn.py): its parameters, our tolerance.

Every combination that a backend takes is right, forward and backward; every other raises a sentence. Where kernels are
interpreted a sample is run; all of it on a GPU: `pytest -m gpu -n 8 --dist loadgroup tests/test_flash_attn_list.py`.
"""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from drawn import DEVICE, within

from flashlab import flash_attention, runtime
from flashlab.attention.backends import BACKENDS
from flashlab.check.training import wanted

LENGTHS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
)  # fmt: skip
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
KINDS = ("mha", "mqa", "gqa")
DTYPES = (torch.float16, torch.bfloat16)
SOFTCAPS = (0.0, 50.0)


class Combination(NamedTuple):
    dtype: torch.dtype
    kind: str
    local: bool
    causal: bool
    softcap: float
    head_dim: int
    lengths: tuple[int, int]

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), self.kind, f"d{self.head_dim}"]
        words += [word for word in ("local", "causal") if getattr(self, word)]
        return "-".join([*words, *(["softcap"] if self.softcap else []), "x".join(map(str, self.lengths))])

    def options(self) -> dict:
        """As FlashAttention's test draws its windows: both sides from 0 to seq_k."""
        draw = random.Random(str(self))
        window = tuple(draw.randrange(self.lengths[1]) for _ in range(2)) if self.local else None
        return dict(causal=self.causal, window=window, softcap=self.softcap)

    def inputs(self, batch: int, heads: int) -> list[torch.Tensor]:
        """q, k, v and the gradient of o. Under a soft-cap q is larger, so that the cap is felt."""
        kv_heads = {"mha": heads, "mqa": 1, "gqa": 2}[self.kind]
        generator = torch.Generator().manual_seed(0)
        sizes = [(heads, self.lengths[0]), *[(kv_heads, self.lengths[1])] * 2, (heads, self.lengths[0])]
        drawn = [torch.randn(batch, *size, self.head_dim, generator=generator) for size in sizes]
        drawn[0] *= self.softcap or 1
        return [x.to(DEVICE, self.dtype) for x in drawn]


ALL = [
    Combination(*values)
    for values in itertools.product(DTYPES, KINDS, (False, True), (False, True), SOFTCAPS, HEAD_DIMS, LENGTHS)
]


def sample() -> list[Combination]:
    """One of each head_dim, short ones; the other parameters drawn."""
    draw = random.Random(3)
    short = [c for c in ALL if c.lengths in LENGTHS[:4]]
    return [draw.choice([c for c in short if c.head_dim == head_dim]) for head_dim in HEAD_DIMS]


def expect(combination: Combination, backend: str, batch: int, heads: int) -> None:
    q, k, v, grad_o = combination.inputs(batch, heads)
    options = combination.options()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = flash_attention(*inputs, backend=backend, **options)
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, grad_o), strict=True))
    within(wanted(q, k, v, grad_o, **options), o=o, **found)


@pytest.mark.parametrize("combination", sample(), ids=str)
def test_a_sample(combination):
    expect(combination, "auto", 1, {"mha": 1, "mqa": 2, "gqa": 4}[combination.kind])


def refused(backend, c: Combination) -> bool:
    q = torch.empty(1, 1, 1, c.head_dim, dtype=c.dtype, device=DEVICE)
    left, right = (1, 1) if c.local else (None, None)
    return backend.refusal(q, left, 0 if c.causal else right, c.softcap or None) is not None


def taken_by(name: str) -> list:
    """What compiles the same kernels runs in one process (pytest -n 8 --dist loadgroup). Interpreted, nothing."""
    taken = [] if runtime.INTERPRETED else [c for c in ALL if not refused(BACKENDS[name], c)]
    return [
        pytest.param(c, id=str(c), marks=pytest.mark.xdist_group(str((c.dtype, c.head_dim, *c[2:5])))) for c in taken
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("combination", taken_by("triton"))
def test_all_of_it(combination):
    expect(combination, "auto", 4, 4 if combination.softcap else 6)


@pytest.mark.gpu
@pytest.mark.parametrize("combination", taken_by("p9_flash"))
def test_all_that_the_last_cuda_kernel_takes(combination):
    expect(combination, "p9_flash", 4, 6)


def test_what_a_backend_does_not_take_raises_a_sentence():
    """Each backend, each combination that it refuses; lengths are no reason to refuse."""
    count = dict.fromkeys(BACKENDS, 0)
    for c in {c._replace(kind="mha", lengths=LENGTHS[0]) for c in ALL}:
        q = torch.empty(1, 1, 1, c.head_dim, dtype=c.dtype, device=DEVICE)
        options = c.options() | dict(window=(1, 1) if c.local else None)
        for name in (name for name, backend in BACKENDS.items() if refused(backend, c)):
            with pytest.raises(ValueError, match=f"backend is '{name}', which does not take these inputs: it "):
                flash_attention(q, q, q, backend=name, **options)
            count[name] += 1
    assert count["triton"] == count["reference"] == 0
    assert count["p6_1_fa1"] == 192 and count["p9_flash"] == 192 - 2 * 2 * 3  # float32; no window, no soft-cap, 3 sizes
