"""An attention layer with grouped-query attention and rotary embedding: the original form, and ours.

The original form is what many models were written as. Each step is a line of PyTorch, and each line reads its inputs
from memory and writes its result there:

    turn q and k by their positions       seven small operations for each
    repeat K and V for every query head   a copy, `group` times as large
    scores = q k^T / sqrt(head_dim)       [batch, heads, seq_len, seq_len], two operations
    hide the keys that come later         another tensor of that size
    P = softmax(scores)                   and another
    o = P V

Ours is two kernels: `fused_rope`, then `flashlab.flash_attention`. The weights are the same, so are the results.

Sources: grouped-query attention: Ainslie et al., "GQA" (2023), arXiv 2305.13245; the layer: Vaswani et al., "Attention
Is All You Need" (2017), arXiv 1706.03762.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import flashlab
from flashlab.attention.inputs import one_of
from flashlab.models.rope import fused_rope, rope


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(head_dim)) v, line by line, with every intermediate in memory.

    Args:
        q: [batch, heads, seq_len, head_dim]; k, v: [batch, kv_heads, seq_len, head_dim], heads a multiple of kv_heads.
        causal: a query does not see the keys that come after it.
    Returns:
        o: like q.
    """
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)  # query head h reads key head h // group
    v = v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [batch, heads, seq_len, seq_len]
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own attention, which picks the fastest of its kernels; arguments as `eager_attention`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:  # fmt: skip
    """The course's kernels; arguments as `eager_attention`."""
    return flashlab.flash_attention(q, k, v, causal=causal)


ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "flash": flash_attention,
}
"""The attentions that a model can ask for: (q, k, v, *, causal) -> o."""


class RotaryAttention(nn.Module):
    """Rotary embedding and attention, without weights: what is between the projections of a layer.

    Args:
        attention: a name of `ATTENTIONS`, or a function like those. causal: as there. fused_rope: one kernel for q and
            k, else `rope` for each.
    Raises:
        ValueError: an attention of another name.
    """

    def __init__(
        self, attention: str | Callable[..., torch.Tensor] = "eager", *,
        causal: bool = True, fused_rope: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if not callable(attention) and attention not in ATTENTIONS:
            names = [repr(name) for name in ATTENTIONS]
            raise ValueError(f"attention is {attention!r}; it must be {one_of(names)}")
        self.attention, self.causal, self.fused_rope = attention, causal, fused_rope

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tables: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """o [batch, heads, seq_len, head_dim]; q, k, v as `eager_attention`. tables: cos and sin as `rope_table` makes
        them; without them q and k are not turned."""
        if tables and self.fused_rope:
            q, k = fused_rope(q, k, *tables)
        elif tables:
            q, k = rope(q, *tables), rope(k, *tables)
        attend = self.attention if callable(self.attention) else ATTENTIONS[self.attention]
        return attend(q, k, v, causal=self.causal)


class AttentionLayer(nn.Module):
    """The four projections around `RotaryAttention`. None has a bias.

    Args:
        width: the numbers per token. heads: query heads. kv_heads: key heads, as many unless given.
        attention, causal, fused_rope: as `RotaryAttention`.
    Raises:
        ValueError: heads that do not divide evenly; an attention of another name.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *,
        attention: str = "eager", causal: bool = True, fused_rope: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads:
            raise ValueError(f"width is {width}; {heads} heads do not share it evenly")
        if heads % kv_heads:
            raise ValueError(
                f"kv_heads is {kv_heads}; {heads} query heads cannot share {kv_heads} key heads evenly"
            )  # fmt: skip
        self.head_dim = head_dim = width // heads
        self.to_q = nn.Linear(width, heads * head_dim, bias=False)
        self.to_k = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.to_v = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.core = RotaryAttention(attention, causal=causal, fused_rope=fused_rope)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, width], like x; cos and sin as `flashlab.models.rope.rope_table` makes them."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, seq_len, head_dim]
            for project in (self.to_q, self.to_k, self.to_v)
        )
        o = self.core(q, k, v, cos, sin)
        return self.out(o.transpose(1, 2).flatten(2))
