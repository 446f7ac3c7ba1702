"""Writing with three caches and with none: the same tokens from all; and what a cache reserves, formula and count."""

import pytest
import torch
from drawn import DEVICE, draw
from torch.utils._python_dispatch import TorchDispatchMode

from flashlab.models.caches import CACHES, DenseCache, PagedCache, StaticCache, cache_memory
from flashlab.models.generate import generate, step
from flashlab.models.language_model import Config, LanguageModel
from flashlab.models.pager import OutOfPages

SHAPE = Config(width=48, depth=2, heads=6, kv_heads=2, vocabulary=40, positions=64, tied=False)


def build(dtype=torch.float32, **changes):
    """Weights eight times as large as a model starts with: scores differ, and a token depends on all before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(Config(**vars(SHAPE) | changes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    return model.to(DEVICE, dtype)


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SHAPE.vocabulary, (n,), generator=generator).to(DEVICE) for n in lengths]


def all_caches(batch, capacity=40):
    return {
        "dense": DenseCache(SHAPE, batch, device=DEVICE),
        "static": StaticCache(SHAPE, batch, capacity, device=DEVICE),
        "paged": PagedCache(SHAPE, batch, 64, 4, capacity=capacity, device=DEVICE),
    }


@pytest.mark.parametrize(
    "changes", [{}, dict(kv_heads=6, attention="sdpa"), dict(kv_heads=1, attention="flash")], ids=str
)
def test_the_same_tokens_with_every_cache_and_without(changes):
    model, texts = build(**changes), prompts(5, 1, 9, seed=2)
    want = generate(model, texts, 12, cache=None)
    assert want.shape == (3, 12) and want.dtype == torch.int64 and len(want.unique()) > 12
    # The likeliest token is so by more than rounding: else equal tokens would be luck.
    for b, text in enumerate(texts):
        scores = model(torch.cat([text, want[b, :-1]])[None])[0, len(text) - 1 :]
        first, second = scores.topk(2).values.T
        assert (first - second).min() > 1e-3 and torch.equal(scores.argmax(-1), want[b])
    for cache in CACHES:
        assert torch.equal(generate(model, texts, 12, cache=cache), want), cache
    for page_size in (1, 2, 7, 256):
        assert torch.equal(generate(model, texts, 12, cache="paged", page_size=page_size), want), page_size
    alone = [generate(model, [text], 12) for text in texts]
    assert torch.equal(torch.cat(alone), want)  # no text depends on those beside it


def test_the_same_tokens_from_every_attention():
    model, texts = build(), prompts(5, 1, 9, seed=2)
    want = generate(model, texts, 6, cache=None)
    for cache, backend in (("dense", "sdpa"), ("static", "sdpa"), ("static", "triton"), ("paged", "triton")):
        assert torch.equal(generate(model, texts, 6, cache=cache, backend=backend), want), (cache, backend)
    with pytest.raises(ValueError, match="backend is 'sdpa', which cannot follow a page table"):
        generate(model, texts, 6, cache="paged", backend="sdpa")


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_the_same_tokens_from_the_cuda_kernel_and_from_a_graph(cache):
    model, texts = build(torch.bfloat16, width=128, heads=2, kv_heads=1, positions=32), prompts(3, 1)
    options = [dict(backend="p12_decode")]
    if DEVICE.type == "cuda":
        options += [dict(graph=True, backend=backend) for backend in ("reference", "triton", "p12_decode")]
    want = generate(model, texts, 3, cache=cache, backend="reference")
    for some in options:
        assert torch.equal(generate(model, texts, 3, cache=cache, **some), want), some


@pytest.mark.parametrize("kind", CACHES)
def test_a_step_takes_several_tokens_and_different_numbers_of_them(kind):
    """As for a prefill in chunks, and for drafts: the scores are those of the whole text at its last token."""
    model, texts, cache = build(), prompts(13, 6, 9), all_caches(3)[kind]
    done = [0, 0, 0]
    with torch.no_grad():
        for counts in ((4, 0, 2), (5, 5, 5), (1, 1, 1), (3, 0, 1)):
            pieces = [text[at : at + n] for text, at, n in zip(texts, done, counts, strict=True)]
            new = max(counts)
            tokens = torch.stack([torch.nn.functional.pad(piece, (new - len(piece), 0)) for piece in pieces])
            cache.reserve(counts)
            scores = step(model, tokens, cache)
            done = [at + n for at, n in zip(done, counts, strict=True)]
            assert cache.tokens == cache.lengths.tolist() == done
            for b, text in enumerate(texts):
                if counts[b]:
                    want = model(text[None, : done[b]])[0, -1]
                    torch.testing.assert_close(scores[b], want, rtol=1e-4, atol=1e-4)
    assert done == [13, 6, 9]


def test_forks_share_their_prompt_and_part_from_each_other():
    model, (text,) = build(), prompts(10)
    cache = PagedCache(SHAPE, 1, 9, 4, device=DEVICE)
    (first,) = cache.sequences
    with torch.no_grad():
        cache.reserve([10])
        step(model, text[None], cache)
        cache.follow([first, cache.pager.fork(first), cache.pager.fork(first)])
        assert cache.pager.free_pages == 6  # three pages hold all of them
        texts = [text] * 3
        for new in ([3, 4, 5], [6, 7, 8], [9, 9, 9]):
            cache.reserve([1, 1, 1])
            new = torch.tensor(new, device=DEVICE)
            scores = step(model, new[:, None], cache)
            texts = [torch.cat([old, token[None]]) for old, token in zip(texts, new, strict=True)]
            want = torch.cat([model(x[None])[:, -1] for x in texts])
            torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-4)
    assert len({cache.pager.pages(s)[0] for s in cache.sequences}) == 1  # the first page is still shared
    for sequence in cache.sequences:
        cache.pager.free(sequence)
    assert cache.pager.free_pages == 9


class NothingIsReadOnTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_step_reads_nothing_on_the_host_and_its_tensors_stay(kind):
    """So that a CUDA graph can replay it."""
    model, cache = build(), all_caches(2)[kind]
    tokens = torch.stack(prompts(1, 1))
    kept = [x for x in (*cache.k, *cache.v, cache.lengths, cache.page_table) if x is not None]
    with torch.no_grad():
        for _ in range(9):
            cache.reserve([1, 1])
            with NothingIsReadOnTheHost():
                step(model, tokens, cache)
    now = [x for x in (*cache.k, *cache.v, cache.lengths, cache.page_table) if x is not None]
    assert all(a is b for a, b in zip(kept, now, strict=True)) and cache.lengths.tolist() == [9, 9]
    with pytest.raises(AssertionError), NothingIsReadOnTheHost():
        cache.lengths.tolist() and cache.lengths[0].item()


def test_a_cache_of_ones_own_and_a_pool_that_ends():
    model, texts = build(), prompts(5, 7)
    cache = PagedCache(SHAPE, 2, 6, 4, device=DEVICE)
    with pytest.raises(OutOfPages, match="2 tokens need 1 more page of 4 tokens, and 0 of 6 are free"):
        generate(model, texts, 20, cache=cache)
    assert cache.tokens == cache.lengths.tolist() == [10, 12]  # all that there was room for, and none more
    cache.pager.free(cache.sequences[0])
    cache.follow(cache.sequences[1:])
    cache.reserve([3])  # the pages of the one that has ended
    assert cache.tokens == [15] and cache.page_table.shape == (1, 16)
    with pytest.raises(ValueError, match=r"counts is \[5, 7\]; each of the 1 sequences has one count"):
        generate(model, texts, 1, cache=cache)
    with pytest.raises(ValueError, match="17 tokens and 49 new ones, the last of which is not read, need 65 positions"):
        generate(model, prompts(2), 49, cache=cache)
    assert cache.tokens == [15]


@pytest.mark.parametrize("kind", CACHES)
def test_writing_goes_on_in_a_cache_that_holds_tokens(kind):
    model, (text,), cache = build(), prompts(9), all_caches(1)[kind]
    begun = generate(model, [text], 5, cache=cache)[0]  # the last of them is not in the cache yet
    on = generate(model, [begun[-1:]], 6, cache=cache)[0]
    assert torch.equal(torch.cat([begun, on]), generate(model, [text], 11, cache=None)[0])


def test_it_refuses():
    model, texts = build(), prompts(5, 7)
    for arguments, options, sentence in (
        ((texts, 59), {}, "7 tokens and 59 new ones, the last of which is not read, need 65 positions; .* has 64"),
        (([], 1), {}, r"the prompts have \[\] tokens and new_tokens is 1; there must be a prompt"),
        ((prompts(0, 3), 1), {}, r"the prompts have \[0, 3\] tokens"),
        ((texts, -1), {}, "new_tokens is -1"),
        ((texts, 1), dict(cache="Paged"), "cache is 'Paged'; it must be 'dense', 'static', 'paged' or None, or"),
        ((texts, 1), dict(cache="paged", page_size=0), "page_size is 0"),
        ((texts, 1), dict(backend="Triton"), "backend is 'Triton'; it must be 'auto', 'sdpa', 'triton'"),
        ((texts, 1), dict(cache="dense", graph=True), "graph is True: that takes a GPU, and a static or a paged cache"),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate(model, *arguments, **options)
    for cache in all_caches(2, capacity=6).values():
        for counts in ([1], [1, -1]):
            with pytest.raises(ValueError, match="each of the 2 sequences has one count of at least 0"):
                cache.reserve(counts)
        if not isinstance(cache, DenseCache):
            with pytest.raises(ValueError, match="a sequence would have 7 tokens; this cache has room for 6"):
                cache.reserve([7, 1])
        assert cache.tokens == cache.lengths.tolist() == [0, 0]
    assert generate(model, texts, 58).shape == (2, 58) and generate(model, texts, 0).shape == (2, 0)


def test_what_is_reserved_is_what_the_tensors_hold():
    lengths = [1, 30, 0, 16]
    for kind, cache in all_caches(4).items():
        cache.reserve(lengths)
        for layer in range(SHAPE.depth):
            cache.write(layer, draw(4, SHAPE.kv_heads, 30, 8), draw(4, SHAPE.kv_heads, 30, 8))
        said = cache_memory(SHAPE, lengths, kind, capacity=40, page_size=4, itemsize=4)
        there = sum(x.nbytes for x in (*cache.k, *cache.v))
        if kind == "paged":
            there = there * (64 - cache.pager.free_pages) // 64
            assert said.table == cache.page_table.nbytes
        assert said.reserved == there and said.used == 47 * 2 * 2 * 2 * 8 * 4
        assert said.table == (160 if kind == "paged" else 0)
    assert cache_memory(SHAPE, [], "dense") == (0, 0, 0) and cache_memory(SHAPE, [0], "paged").share == 1.0
