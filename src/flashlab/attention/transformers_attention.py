"""`flash_attention` as an attention of Hugging Face's transformers, an optional package.

    from flashlab.attention.transformers_attention import register
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="wall_by_wall")

Models with grouped key heads, a sliding window or a soft-cap run as they are. What the kernels do not have raises a
sentence when the model is called, before a result could be wrong: padding, sequences packed into one, dropout, biases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from flashlab.attention.door import flash_attention

__all__ = ["attention", "mask", "register"]

NAME = "wall_by_wall"  # transformers takes a name with "flash" in it for the package flash_attn
_NOT_HERE = {
    "position_bias": "a bias of the scores",
    "s_aux": "attention sinks",
    "cu_seq_lens_q": "several sequences packed into one",
}


def register(name: str = NAME) -> str:
    """Make `flash_attention` known to transformers as the attn_implementation `name`, which is returned.

    Raises ImportError where transformers is not installed, or is older than 4.53.
    """
    try:
        transformers = importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
        interfaces = (transformers.AttentionInterface, masking.AttentionMaskInterface)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers, version 4.53 or newer, is needed for this: pip install transformers ({error})"
        ) from error
    for interface, function in zip(interfaces, (attention, mask), strict=True):
        interface.register(name, function)
    return name


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, *, scaling: float | None = None, dropout: float = 0.0,
    is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What a layer calls: query [batch, heads, seq_q, head_dim]; key, value with their own, fewer heads.

    Returns (o [batch, seq_q, heads, head_dim], None): there are no attention weights to return.
    Raises ValueError for what the kernels do not have.
    """
    if attention_mask is not None:
        raise ValueError(f"attention_mask was given; the attention {NAME!r} has causal masks and windows alone")
    if dropout:
        raise ValueError(f"attention_dropout is {dropout}; the attention {NAME!r} has none: set it to 0 in the config")
    for name, what in _NOT_HERE.items():
        if others.get(name) is not None:
            raise ValueError(f"{name} was given: the attention {NAME!r} does not have {what}; use another")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else sliding_window - 1  # theirs counts the query's own key
    o = flash_attention(query, key, value, causal=bool(causal), scale=scaling, window=window, softcap=softcap)
    return o.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None, attention_mask: torch.Tensor | None = None,
    local_size: int | None = None, device: torch.device | str = "cpu", **others: Any,
) -> None:  # fmt: skip
    """What a model calls once for all layers: no mask in memory, or ValueError where one would be needed.

    attention_mask: [batch, seq], False where a token is padding. mask_function(batch, head, query, key), by absolute
    positions: looked at beside the diagonal, where a causal mask, a window of `local_size` and no mask differ from
    everything else that models ask for. Not under torch.compile, which cannot branch on values.
    """
    if torch.compiler.is_compiling():
        return
    if int(q_offset) + q_length != int(kv_offset) + kv_length:
        raise ValueError(
            f"the cache has room for {kv_length} keys, and {int(q_offset) + q_length} are in use; "
            f"the attention {NAME!r} needs a cache that grows (DynamicCache)"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"attention_mask marks padding; the attention {NAME!r} takes sequences of one length")
    if mask_function is None:
        return
    query = torch.arange(q_length, device=device) + q_offset

    def seen(distance: int) -> torch.Tensor:
        """[batch, queries]: whether each sees the key at this distance, for the queries that have one."""
        has_key = (query + distance >= kv_offset) & (query + distance < kv_offset + kv_length)
        at = query[has_key]
        every = torch.arange(batch_size, device=device)[:, None]
        found = mask_function(every, torch.zeros_like(every), at[None], at[None] + distance)
        return found.expand(batch_size, len(at))

    whole = bool(seen(1).all()) and q_length > 1  # no mask at all: an encoder
    reach = kv_length if local_size is None else local_size
    expected = {0: True, -1: reach > 1, 1: whole, -(reach - 1): True, -reach: whole}
    for distance, value in expected.items():
        if abs(distance) < kv_length and not bool((seen(distance) == value).all()):
            raise ValueError(
                f"the model asks for a mask that is neither causal nor a window: some queries "
                f"{'do not see' if value else 'see'} the key at distance {distance}; if several sequences are packed "
                f"into one, the attention {NAME!r} cannot keep them apart"
            )
