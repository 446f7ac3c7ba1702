"""The door as an attention implementation of Hugging Face transformers (which this package does not need otherwise).

    from flashlab.attention import transformers_door
    transformers_door.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="wall_by_wall")

transformers calls two functions by that name: one makes the mask of a whole model, one computes the attention of each
layer. Here the first makes none: a kernel needs two numbers in place of a mask (flashlab.attention.options). What is
left to do is to see that the model's mask is what two numbers can say, and to refuse it in a sentence where it is not.

    model.generate(..., cache_implementation="static")

A static cache has room for more keys than there are. Then the first function says how many there are, in place of a
mask, and each layer is a step over a cache (flashlab.attention.cache_door).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashlab.attention.cache_door import CACHE_BACKENDS, flash_attention_with_cache
from flashlab.attention.door import flash_attention

# What a layer may pass that changes the result, and that the door has not.
_UNKNOWN = ("position_bias", "s_aux", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask")


def register(name: str = "wall_by_wall", backend: str = "auto") -> None:
    """Let models ask for it: ``attn_implementation=name``.

    Raises:
        ImportError: transformers is not installed. ValueError: a name with "flash" in it.
    """
    if "flash" in name:
        raise ValueError(
            f'the name is {name!r}; transformers takes a name with "flash" in it for the flash_attn package'
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, partial(attend, backend=backend))
    AttentionMaskInterface.register(name, no_mask)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    *, backend: str = "auto", **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """One layer's attention: query [batch, heads, seq_q, head_dim], key and value with kv_heads and seq_k.

    A sliding window of w is the query's own key and w - 1 before it (and behind it, where nothing is causal).
    attention_mask is what `no_mask` has made: None, or how many keys each sequence has, [batch].

    Returns:
        o [batch, seq_q, heads, head_dim], as transformers wants it; None in place of the probabilities.
    Raises:
        ValueError: a mask, dropout, or what else the door has not.
    """
    lengths = attention_mask if attention_mask is not None and attention_mask.ndim == 1 else None
    if attention_mask is not None and lengths is None:
        raise ValueError("this layer has a mask of its own, and the kernels take none: attn_implementation='sdpa' does")
    if dropout:
        raise ValueError(f"dropout is {dropout}, and the kernels have none: set the model's attention_dropout to 0")
    if found := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"this layer passes {found[0]}, which the kernels do not know: take another implementation")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = dict(scale=scaling, window=window, softcap=softcap)
    o: Any
    if lengths is not None:
        name = backend if backend in CACHE_BACKENDS else "auto"
        o = flash_attention_with_cache(query, key, value, lengths, backend=name, **options)
    else:
        o = flash_attention(query, key, value, causal=causal, backend=backend, **options)
    return o.transpose(1, 2).contiguous(), None


def no_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: torch.Tensor | None = None,
    local_size: int | None = None, device: torch.device | str = "cpu", **others: Any,
) -> torch.Tensor | None:  # fmt: skip
    """None, where the mask is causal, or everything, within a window or not, and its last query is the last key's.

    Where there is room behind the last query's key, as in a static cache, and the mask is causal: the keys of each
    sequence, [batch], int32.

    Args:
        mask_function: (batch, head, query, key) -> whether it sees it, for tensors of positions.
        attention_mask: [batch, seq_k], False for padding.
        local_size: of the sliding window, if there is one.
    Raises:
        ValueError: padding, sequences packed into one, keys behind the last query that it sees: with what to do.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("this batch is padded, and the kernels have no mask of padding: take sequences of one length")
    room = kv_offset + kv_length - (q_offset + q_length)  # of a static cache; what lies there is looked at by nobody
    if room < 0 or (room > 0 and kv_offset > 0):
        raise ValueError(
            f"the last query is number {q_offset + q_length - 1}, and keys {kv_offset} to {kv_offset + kv_length - 1} "
            "are there: they have to end at the query's own, or begin at 0"
        )
    lengths = torch.full((batch_size,), int(q_offset + q_length), dtype=torch.int32, device=device) if room else None
    if mask_function is None or q_length == 0:
        return lengths
    # The borders of each query's band tell it from every other pattern that transformers makes.
    batch = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_offset, q_offset + q_length, device=device)[None, :]
    last = kv_offset + kv_length - 1
    causal = not bool(mask_function(batch, 0, query[:, :1], (query[:, :1] + 1).clamp(max=last)).all())
    first_seen = query * 0 + kv_offset if local_size is None else (query - local_size + 1).clamp(min=kv_offset)
    for key, seen in ((first_seen, True), (query, True), (first_seen - 1, False), (query + 1, not causal)):
        there = (key >= kv_offset) & (key <= last)
        found = torch.as_tensor(mask_function(batch, 0, query, key.clamp(kv_offset, last)), device=device)
        if bool(((found != seen) & there).any()):
            raise ValueError(
                "the model's mask is neither causal nor a sliding window (several sequences packed into one row?): "
                "attn_implementation='sdpa' takes any mask"
            )
    if room and not causal:
        raise ValueError("this mask lets queries see the empty room of a static cache: take one that grows")
    return lengths
