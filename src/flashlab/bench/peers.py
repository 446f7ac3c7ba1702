"""What the kernels are measured against: PyTorch's fused attention with its backend forced, and unfused attention.

Each returns a function without arguments, for flashlab.bench.timing: what it needs beside q, k and v is made before.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlab.bench import timing

SDPA = {"FlashAttention-2": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}
"""By the name in rows: a backend of scaled_dot_product_attention."""
COMPILE: dict[str, Any] = {"fullgraph": True, "dynamic": False}
"""For torch.compile: all of a function or none of it, and anew for each shape."""


def attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> Callable[[], torch.Tensor]:
    """The forward pass of a peer by its name in rows: of SDPA or FLEX, "FlashAttention-4", or "eager" (unfused)."""
    if name in SDPA:
        return sdpa(SDPA[name], q, k, v, causal)
    if name in FLEX:
        return flex(q, k, v, causal, name)
    return {"FlashAttention-4": flash_attention_4, "eager": unfused}[name](q, k, v, causal)


def sdpa(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> Callable[[], torch.Tensor]:
    """scaled_dot_product_attention by one backend: "FLASH_ATTENTION" (which is FlashAttention-2), "CUDNN_ATTENTION",
    "EFFICIENT_ATTENTION" or "MATH" (unfused). It raises RuntimeError where it cannot run; no other takes its place.
    k and v may have fewer heads than q, each for a group of its heads.
    """
    chosen, grouped = getattr(SDPBackend, backend), q.shape[1] != k.shape[1]

    def run() -> torch.Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return run


@functools.cache
def fa4(name: str = "flash_attn_func") -> tuple[Any, str]:
    """FlashAttention-4's function on [batch, rows, heads, head_dim], or what it has of a name; or None and why not."""
    try:
        return getattr(importlib.import_module("flash_attn.cute"), name), ""
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return None, "not installed" + ("" if missing == "flash_attn" else f": it needs {error.name}")
    except Exception as error:
        return None, timing.reason(error)


def flash_attention_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> Callable[[], torch.Tensor]:
    """FlashAttention-4, with its gradient. It raises RuntimeError where it cannot be imported, with the reason."""

    def run() -> torch.Tensor:
        function, why = fa4()
        if function is None:
            raise RuntimeError(why)
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> Callable[[], torch.Tensor]:
    """softmax(q k^T * scale) v in PyTorch's operations, with the scores in memory."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None
    return lambda: _unfused(q, k, v, mask)


def _unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        s.masked_fill_(mask, -math.inf)
    return s.softmax(-1) @ v


def compiled_unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The operations of `unfused`, given to torch.compile for these shapes.

    Its compiler knows this pattern, and may put scaled_dot_product_attention in its place; `replaced` counts how often.
    """
    compiled = _compiled_unfused()
    return lambda: compiled(q, k, v, None)


@functools.cache
def _compiled_unfused() -> Callable[..., torch.Tensor]:
    many_shapes()
    backward_again()
    torch._functorch.config.enable_autograd_cache = False  # a graph that is found there is not counted in `replaced`
    return torch.compile(_unfused, **COMPILE)


def many_shapes() -> None:
    """Past its limits torch.compile would run the operations one by one, and say nothing."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 512
    torch._dynamo.config.accumulated_recompile_limit = 1024


def backward_again() -> None:
    """Let a compiled backward pass run again on the same graph: by default it overwrites what was saved for it."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def replaced() -> int:
    """How often torch.compile has put fused attention in the place of unfused, in this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fuse_attention"]


FLEX: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "FlexAttention": (None, None),
    "FlexAttention, max-autotune": ("max-autotune-no-cudagraphs", None),
    "FlexAttention, FLASH": (None, {"BACKEND": "FLASH"}),
}
"""The mode of torch.compile and the kernel_options: with its default tiles; with tiles that it tries out for a shape;
by the kernels of FlashAttention-4, where flash_attn.cute can be imported."""


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, how: str = "FlexAttention",
    mask: Any = None, tiles: dict[str, Any] | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """FlexAttention as FLEX has it, compiled for these shapes; a causal mask as a block mask, made here; or `mask`.
    tiles: more kernel_options.

    It raises where it would not be fused: past its limit of recompilations torch.compile otherwise runs the unfused
    operations, which would make any kernel look good. The limit is raised as well.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rows, keys = q.shape[2], k.shape[2]
    seen = lambda batch, head, query, key: query >= key  # noqa: E731
    mask = create_block_mask(seen, None, None, rows, keys, device=q.device.type) if causal else mask
    mode, options = FLEX[how]
    compiled = _compiled_flex(mode)
    grouped, options = q.shape[1] != k.shape[1], (options or {}) | (tiles or {}) or None
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=options)


@functools.cache
def _compiled_flex(mode: str | None) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    many_shapes()
    backward_again()
    return torch.compile(flex_attention, mode=mode, **COMPILE)
