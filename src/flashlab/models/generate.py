"""Writing with a language model: one token after the other, with a cache of keys and values or without.

Without a cache each new token costs a pass over the whole text. With one it costs a pass over one token: its query
attends to the keys and values of all tokens before it, which are kept (`flashlab.models.caches`).

    prefill    all tokens of the prompts in one step
    decode     the last token of each sequence in every further step

Prompts may differ in length. Then shorter ones are filled up in front, so that the last row of each is its last token;
what fills them up is written nowhere, and no query sees it.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.nn.utils.rnn import pad_sequence

from flashlab.attention.cache_door import CACHE_BACKENDS
from flashlab.attention.inputs import one_of
from flashlab.models.caches import CACHES, DenseCache, PagedCache, StaticCache, attention_of
from flashlab.models.language_model import Block, LanguageModel
from flashlab.models.pager import pages_for
from flashlab.models.rope import fused_rope, rope


def step(model: LanguageModel, tokens: torch.Tensor, cache: StaticCache, *, backend: str = "auto") -> torch.Tensor:
    """Scores of the token that comes after each sequence; K and V of `tokens` are written to the cache.

    Reserve first: `cache.reserve(counts)`. A step of a static or a paged cache reads nothing on the host, so it may be
    captured in a CUDA graph where all counts are equal.

    Args:
        tokens: [batch, new], int64: the last `new` tokens of each sequence. Where fewer have been reserved for it, its
            first entries count for nothing.
        backend: of the attention, see `flashlab.models.caches.attention_of`.
    Returns:
        [batch, vocabulary].
    """
    batch, new = tokens.shape
    attend = attention_of(cache, new, backend)
    at = cache.positions(new).flatten()  # below 0 for what fills up, and counts from the end: any angle will do
    cos, sin = model.cos[at], model.sin[at]  # [batch * new, head_dim / 2]
    x = model.embedding(tokens)
    for layer, block in enumerate(cast(list[Block], model.blocks)):
        h, inner = block.attention_norm(x), block.attention
        q, k, v = (  # [1, heads, batch * new, head_dim]: every row has its own angle
            project(h).view(1, batch * new, -1, inner.head_dim).transpose(1, 2)
            for project in (inner.to_q, inner.to_k, inner.to_v)
        )
        q, k = fused_rope(q, k, cos, sin) if model.config.fused_rope else (rope(q, cos, sin), rope(k, cos, sin))
        q, k, v = (y[0].unflatten(1, (batch, new)).transpose(0, 1) for y in (q, k, v))  # [batch, heads, new, head_dim]
        cache.write(layer, k, v)
        o = attend(q, *cache.read(layer))
        x = x + inner.out(o.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x[:, -1]))


@torch.no_grad()
def recorded(
    model: LanguageModel, tokens: torch.Tensor, cache: StaticCache, backend: str = "auto", *, compiled: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`step` for as many tokens, as a CUDA graph: a function of tokens. Each call overwrites the scores of the last.

    Reserve room for `tokens` first: they are read once while the kernels are compiled, and again by the first call.
    compiled: by torch.compile, which makes one kernel of what stands between the products.
    """
    one_step = torch.compile(step, fullgraph=True, dynamic=False) if compiled else step
    given = tokens.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one_step(model, given, cache, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = one_step(model, given, cache, backend=backend)

    def replayed(tokens: torch.Tensor) -> torch.Tensor:
        given.copy_(tokens)
        graph.replay()
        return scores

    return replayed


@torch.no_grad()
def generate(
    model: LanguageModel, prompts: Sequence[torch.Tensor] | torch.Tensor, new_tokens: int, *,
    cache: str | StaticCache | None = "static", page_size: int = 16, backend: str = "auto", graph: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Write `new_tokens` tokens behind each prompt, each time the likeliest.

    Args:
        prompts: [batch, seq_len], or one [seq_len] for each sequence, int64, on the model's device.
        cache: "dense", "static", "paged"; None computes the whole text again for every token; or a cache of your own
            (an empty one, or one with the tokens before the prompts).
        page_size: tokens per page of a paged cache.
        backend: of the attention over the cache: "sdpa", or one of `flashlab.flash_attention_with_cache`.
        graph: record the step into a CUDA graph, which is replayed for every token: no time goes into launches.
    Returns:
        [batch, new_tokens], int64: the new tokens alone.
    Raises:
        ValueError: no prompt, an empty one, more tokens than the model has positions, another cache or backend; a
            graph of a dense cache, of none, or without a GPU.
        flashlab.models.pager.OutOfPages: the pool of a cache of your own is too small.
    """
    prompts = list(prompts)
    lengths = [len(prompt) for prompt in prompts]
    if not prompts or min(lengths) < 1 or new_tokens < 0:
        raise ValueError(
            f"the prompts have {lengths} tokens and new_tokens is {new_tokens}; there must be a prompt, each with a "
            "token at least, and no fewer than 0 new ones"
        )
    _expect_room(model, cache, lengths, new_tokens)
    if backend not in (known := ["auto", "sdpa", *CACHE_BACKENDS]):
        raise ValueError(f"backend is {backend!r}; it must be {one_of([*map(repr, known)])}")
    kept = _cache_of(model, cache, lengths, new_tokens, page_size)
    if graph and (kept is None or isinstance(kept, DenseCache) or kept.lengths.device.type != "cuda"):
        raise ValueError("graph is True: that takes a GPU, and a static or a paged cache, whose tensors stay in place")
    written: list[torch.Tensor] = []
    replayed: Callable[[torch.Tensor], torch.Tensor] | None = None
    for _ in range(new_tokens):
        if kept is None:
            texts = [torch.cat([x, *(tokens[b : b + 1] for tokens in written)]) for b, x in enumerate(prompts)]
            scores = torch.cat([model(text[None])[:, -1] for text in texts])  # one after the other
        elif not written:
            kept.reserve(lengths)
            tokens = pad_sequence(prompts, batch_first=True, padding_side="left")
            scores = step(model, tokens, kept, backend=backend)
        else:
            kept.reserve([1] * len(prompts))
            last = written[-1][:, None]
            if graph and replayed is None:
                replayed = recorded(model, last, kept, backend)
            scores = replayed(last) if replayed else step(model, last, kept, backend=backend)
        written.append(scores.argmax(-1))
    return torch.stack(written, 1) if written else prompts[0].new_empty(len(prompts), 0)


def _expect_room(
    model: LanguageModel, cache: str | StaticCache | None, lengths: Sequence[int], new_tokens: int
) -> None:
    before = cache.tokens if isinstance(cache, StaticCache) else [0] * len(lengths)
    longest = max(map(sum, zip(before, lengths, strict=False)), default=0)
    most = longest + new_tokens - 1  # the last token is not read again
    if most > model.config.positions:
        raise ValueError(
            f"{longest} tokens and {new_tokens} new ones, the last of which is not read, need {most} positions; "
            f"this model has {model.config.positions}"
        )


def _cache_of(
    model: LanguageModel, cache: str | StaticCache | None, lengths: Sequence[int], new_tokens: int, page_size: int
) -> StaticCache | None:
    """The cache that is asked for, with room for all tokens that are read."""
    if cache is None or isinstance(cache, StaticCache):
        return cache
    config, batch = model.config, len(lengths)
    dtype, device = model.head.weight.dtype, model.head.weight.device
    totals = [length + new_tokens - 1 for length in lengths]
    if cache == "dense":
        return DenseCache(config, batch, dtype=dtype, device=device)
    if cache == "static":
        return StaticCache(config, batch, max(totals), dtype=dtype, device=device)
    if cache == "paged":
        pages = sum(pages_for(total, page_size) for total in totals)
        most = max(totals)
        return PagedCache(config, batch, max(1, pages), page_size, capacity=most, dtype=dtype, device=device)
    raise ValueError(f"cache is {cache!r}; it must be {one_of([*map(repr, CACHES), 'None'])}, or a cache")
