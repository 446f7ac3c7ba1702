"""A decoder-only transformer, in the sizes of the GPT-2 family, with the parts that models have today.

    token -> embedding -> depth times a Block -> RMSNorm -> one number for each token that may come next

    Block:  x = x + attention(norm(x))        causal, with rotary embedding: flashlab.models.layer
            x = x + SwiGLU(norm(x))

Only the attention changes between "eager", "sdpa" and "flash"; the weights keep their names and shapes.

Sources: GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2, for widths and
depths; RMSNorm: Zhang and Sennrich (2019), arXiv 1910.07467; SwiGLU: Shazeer, "GLU Variants Improve Transformer"
(2020), arXiv 2002.05202; both with rotary embedding: Touvron et al., "LLaMA" (2023), arXiv 2302.13971.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flashlab.attention.inputs import one_of
from flashlab.models.layer import AttentionLayer
from flashlab.models.rope import rope_table

BYTES = 256  # the vocabulary of a model that reads bytes
GPT2_TOKENS = 50257  # the vocabulary of GPT-2: for timing, where the words do not matter


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    Attributes:
        width: the numbers per token. depth: how many blocks. heads: query heads of a block.
        kv_heads: key heads; None is as many as heads.
        vocabulary: how many tokens there are. positions: the longest text, in tokens.
        tied: the last matrix is the embedding, as in GPT-2.
        attention, fused_rope: as `flashlab.models.layer.RotaryAttention`.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int | None = None
    vocabulary: int = GPT2_TOKENS
    positions: int = 1024
    tied: bool = True
    attention: str = "eager"
    fused_rope: bool = False

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """The inner width of SwiGLU: 8/3 of the width, up to a multiple of 64.

        SwiGLU has three matrices where GPT-2 has two of 4 times the width: so both have about 8 width^2 parameters.
        """
        return -(-8 * self.width // (3 * 64)) * 64

    def parameters(self) -> int:
        """How many numbers the model learns, by formula."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.key_heads)  # q and out; k and v
        block = attention + 3 * self.width * self.hidden + 2 * self.width  # SwiGLU; two norms
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return embeddings + self.depth * block + self.width  # the last norm


SIZES: dict[str, Config] = {
    "small": Config(width=768, depth=12, heads=12),
    "medium": Config(width=1024, depth=24, heads=16),
    "large": Config(width=1280, depth=36, heads=20),
    "xl": Config(width=1600, depth=48, heads=25),
}
"""The GPT-2 family by size."""


def config(size: str, **changes: Any) -> Config:
    """Return a size of the GPT-2 family with some attributes of `Config` changed.

    Raises:
        ValueError: no size of that name. TypeError: no attribute of that name.
    """
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; it must be {one_of([repr(name) for name in SIZES])}")
    return replace(SIZES[size], **changes)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): one half of the hidden numbers decides how much of the other passes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then SwiGLU; each reads a normalised x, and adds to x."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = AttentionLayer(
            config.width, config.heads, config.kv_heads,
            attention=config.attention, fused_rope=config.fused_rope,
        )  # fmt: skip
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config.width, config.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[batch, seq_len, width], like x."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Tokens in, and for each position the scores of the token that comes next.

    The weights are drawn from PyTorch's global generator: call torch.manual_seed before.

    Raises:
        ValueError: heads that do not divide evenly, or an attention of another name.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        cos, sin = rope_table(config.positions, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._draw()

    def _draw(self) -> None:
        """GPT-2's start: 0.02 for every matrix, less for those that add to x, because 2 * depth of them do."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * self.config.depth) ** 0.5 if adds else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Scores, or the loss where there are targets.

        Args:
            tokens: [batch, seq_len], int64. targets: like tokens, the token that comes next at each position.
        Returns:
            [batch, seq_len, vocabulary], or the mean cross-entropy in nats per token.
        Raises:
            ValueError: more tokens than the model has positions.
        """
        if tokens.shape[1] > self.config.positions:
            raise ValueError(
                f"there are {tokens.shape[1]} tokens; this model has {self.config.positions} positions"
            )  # fmt: skip
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        scores = self.head(self.norm(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, *, lr: float = 3e-4, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW; the matrices decay, the norms' weights do not.

    On a GPU PyTorch's fused kernel updates all parameters in a few launches.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), arXiv 1711.05101.
    """
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim == 2], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=weights[0].is_cuda or None)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor, *,
    autocast: torch.dtype | None = None, done: Callable[[str], object] = lambda what: None,
) -> torch.Tensor:  # fmt: skip
    """One step: forward, backward, the gradients cut to a norm of 1, and the update. Returns the loss, a scalar.

    Args:
        model: a `LanguageModel`, compiled or not. tokens, targets: [batch, seq_len], int64.
        autocast: matrix products are computed in this dtype; the weights stay as they are. None is their own.
        done: is called with "forward", "backward", "optimizer" when each has been given to the device.
    """
    with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
        loss = model(tokens, targets)
    done("forward")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    done("backward")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    done("optimizer")
    return loss.detach()
