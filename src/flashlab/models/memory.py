"""What a training step keeps in GPU memory: four parts, each by formula.

    parameters         one number each
    gradients          as many again
    optimiser state    AdamW keeps two averages of each gradient
    activations        what the forward pass keeps for the backward pass

The first three depend on the model alone. The activations grow with the batch and with the length of the text, and
those of an eager attention with the square of the length. `kept_bytes` counts what PyTorch really keeps, so that each
formula can be checked.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), arXiv
1910.02054, section 3; for activations line by line Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), arXiv 2205.05198.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from flashlab.models.language_model import Config


class TrainingMemory(NamedTuple):
    """Bytes of a training step, when the forward pass has just ended."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def attention_bytes(config: Config, batch: int, seq_len: int, *, itemsize: int = 4) -> dict[str, int]:
    """Bytes that one `AttentionLayer` keeps for its backward pass, by what they are.

    For attention "eager" and "flash", causal, without autocast; `itemsize` is the bytes per element. Every element of
    q, k and v is one of batch * seq_len * head_dim * heads (or kv_heads).

    Raises:
        ValueError: another attention, whose kernel may keep what it likes.
    """
    head = batch * seq_len * config.head_dim * itemsize  # one head of q, k, v or o
    q, kv = config.heads * head, config.key_heads * head
    squares = config.heads * batch * seq_len * seq_len
    kept = {"x, which the projections read": batch * seq_len * config.width * itemsize}
    if config.attention == "eager":
        kept |= {
            "q, turned": q,
            "K repeated for every query head": q,
            "V repeated for every query head": q,
            "the mask, one byte per pair": seq_len * seq_len,
            "P": squares * itemsize,
            "o, its heads side by side, for the last projection": q,
        }
    elif config.attention == "flash":
        kept |= {"q, turned": q, "K, turned": kv, "V": kv, "o": q, "lse, float32": config.heads * batch * seq_len * 4}
        if not config.fused_rope:  # it keeps the order in memory in which the heads lie side by side already
            kept["o again, its heads side by side, for the last projection"] = q
    else:
        raise ValueError(f"attention is {config.attention!r}; there is a formula for 'eager' and for 'flash'")
    return kept


def norm_bytes(config: Config, batch: int, seq_len: int, *, itemsize: int = 4, fused: bool = True) -> int:
    """Bytes that one RMSNorm keeps beside its output: x, and the size of each row.

    fused: PyTorch's kernel for the GPU. On the CPU it runs as small operations in float32, and they keep the normalised
    row as well.
    """
    tokens = batch * seq_len
    return tokens * (config.width * itemsize + 4) if fused else tokens * (2 * config.width * 4 + 4)


def block_bytes(
    config: Config, batch: int, seq_len: int, *, itemsize: int = 4, fused_norm: bool = True
) -> dict[str, int]:
    """Bytes that one `Block` keeps for its backward pass, by what they are; arguments as `attention_bytes`."""
    tokens = batch * seq_len
    norm = norm_bytes(config, batch, seq_len, itemsize=itemsize, fused=fused_norm)
    attention = attention_bytes(config, batch, seq_len, itemsize=itemsize)
    return {
        "the first norm": norm,
        **{f"attention: {name}": size for name, size in attention.items()},
        "the second norm": norm,
        "SwiGLU: x, which gate and up read": tokens * config.width * itemsize,
        "SwiGLU: gate, silu(gate), up, their product": 4 * tokens * config.hidden * itemsize,
    }


def head_bytes(
    config: Config, batch: int, seq_len: int, *, itemsize: int = 4, fused_norm: bool = True
) -> dict[str, int]:
    """Bytes that a `LanguageModel` keeps outside of its blocks, with a loss; arguments as `attention_bytes`."""
    tokens = batch * seq_len
    return {
        "tokens and targets, int64": 2 * tokens * 8,
        "the last norm": norm_bytes(config, batch, seq_len, itemsize=itemsize, fused=fused_norm),
        "x, which the head reads": tokens * config.width * itemsize,
        "the logarithm of each probability": tokens * config.vocabulary * itemsize,
        "how many targets count, one number": itemsize,
    }


def training_memory(
    config: Config, batch: int, seq_len: int, *, itemsize: int = 4, fused_norm: bool = True
) -> TrainingMemory:
    """Bytes of one training step with AdamW; arguments as `attention_bytes`.

    What a step needs for a moment only, inside of one operation or until the next one has run, comes on top.
    """
    options: dict[str, Any] = dict(itemsize=itemsize, fused_norm=fused_norm)
    weights = config.parameters() * itemsize
    block = sum(block_bytes(config, batch, seq_len, **options).values())
    rest = sum(head_bytes(config, batch, seq_len, **options).values())
    return TrainingMemory(weights, weights, 2 * weights, config.depth * block + rest)


def kept_bytes(run: Callable[[], Any], model: nn.Module | None = None) -> int:
    """Run the forward pass `run()`, and count the bytes that PyTorch keeps for the backward pass; on any device.

    A model's weights and buffers are left out: they are there anyway. Memory that several operations keep counts once.
    """
    there = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]} if model else set()
    kept: dict[int, torch.Tensor] = {}  # the tensors themselves: so no memory is freed and used again

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in there:
            kept.setdefault(x.untyped_storage()._cdata, x.detach())
        return x.detach()  # with its graph, it would keep alive the graph that saves it, and neither would be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(x.untyped_storage().nbytes() for x in kept.values())
