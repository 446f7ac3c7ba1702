"""Phase 4 step by step: from the plain kernel (triton_plain) to `triton_forward.flash_attention_kernel`.

How it is held: behind the plain kernel there is one, the last, and no copy of it. Each idea stands in it behind a
`tl.constexpr`, and the compiler drops what a launch does not ask for. A step is a set of such constants; its text is
the kernel without the branches that they switch off, and the difference of two steps is one idea. So a step can be read
(`text`), run and timed (the kernel with those constants is that text, which a test shows), and no line lives twice.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlab.attention import triton_forward
from flashlab.triton_tools.portable import unwrap
from flashlab.triton_tools.specialised import specialised

HELPERS = (
    triton_forward.tile_edges, triton_forward.in_band, triton_forward.tile_ptrs, triton_forward.tile_step,
    triton_forward.load_tile, triton_forward.store_tile, triton_forward.soft_capped, triton_forward.longest_first,
)  # fmt: skip
_OFF = {"HAS_FIRST": False, "HAS_LAST": False, "SPLIT": False, "SOFTCAP": False, "NEGATE": False, "TMA": False}


@dataclass(frozen=True)
class Step:
    """One rung: the constants of its kernel, and how to launch it (options of `flash_attention_forward`)."""

    name: str
    idea: str
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    head_dim: int = 64

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel as it is at this step; `more` goes to `flash_attention_forward` (a tile, say)."""
        return triton_forward.flash_attention_forward(q, k, v, **self.options, **more)


def _steps() -> tuple[Step, ...]:
    """Each step has the constants of the one before, and one idea more."""
    rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("edges", "tiles above the diagonal are never loaded", {"HAS_LAST": True}, {"causal": True, "split": False}),
        ("split", "tiles that every row sees whole have no mask", {"SPLIT": True}, {"split": True}),
        ("window", "a sliding window; tiles to its left are never loaded", {"HAS_FIRST": True}, {"window": 128}),
        ("softcap", "scores bounded by tanh", {"SOFTCAP": True}, {"softcap": 30.0}),
        ("descriptors", "whole tiles fetched by the chip's copy engine", {"TMA": True}, {"tma": True}),
    ]
    constants: dict[str, Any] = {"HEAD_DIM": 40, "BLOCK_D": 64, **_OFF}
    options: dict[str, Any] = {}
    steps = []
    for name, idea, new_constants, new_options in rows:
        constants, options = constants | new_constants, options | new_options
        steps.append(Step(name, idea, constants, options, constants["HEAD_DIM"]))
    return tuple(steps)


STEPS: tuple[Step, ...] = _steps()


def text(step: Step, *, helpers: bool = True) -> str:
    """The source of a step: its kernel, and before it the functions that the kernel still calls."""
    kernel = _specialised(triton_forward.flash_attention_kernel, step)
    called = [_specialised(helper, step) for helper in HELPERS if f"{_name(helper)}(" in kernel]
    return "\n\n".join([*(called if helpers else []), kernel])


def _name(function: Any) -> str:
    return unwrap(function).__name__


def _specialised(function: Any, step: Step) -> str:
    known = inspect.signature(unwrap(function)).parameters
    return specialised(function, **{name: value for name, value in step.constants.items() if name in known})
