"""The language model: its parts, its memory, its text, and that it trains. (Its size and first loss: lecture 10.)"""

import math
from pathlib import Path

import pytest
import torch
from drawn import DEVICE

from flashlab.models import memory, text
from flashlab.models.language_model import BYTES, Config, LanguageModel, config, make_optimizer, train_step
from flashlab.models.train import distance, fit

TINY = Config(width=32, depth=2, heads=2, vocabulary=BYTES, positions=32)


def build(shape, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LanguageModel(shape).to(DEVICE)


def tokens(shape, batch=2, seq_len=20):
    drawn = torch.randint(shape.vocabulary, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return drawn.to(DEVICE)[:, :-1], drawn.to(DEVICE)[:, 1:]


def test_the_sizes_are_those_of_gpt_2():
    # Millions, from Radford et al.'s weights. Theirs have positions and biases; ours round SwiGLU's width up.
    theirs = {"small": 124.4, "medium": 354.8, "large": 774.0, "xl": 1557.6}
    for size, millions in theirs.items():
        assert abs(config(size).parameters() / 1e6 / millions - 1) < 0.02
        assert config(size).head_dim == 64


def test_torch_compile_takes_it_as_one_graph():
    shape = Config(**vars(TINY) | dict(depth=1, attention="flash", fused_rope=True))
    model = build(shape)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for autocast in (None, torch.bfloat16):
        with torch.autocast(DEVICE.type, dtype=autocast, enabled=autocast is not None):
            got, want = (m(*tokens(shape)) for m in (compiled, model))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        weights = list(model.parameters())
        found, right = (torch.autograd.grad(x, weights) for x in (got, want))
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4 if autocast is None else 1e-3)


def test_a_step_lowers_the_loss_of_its_own_batch():
    for autocast in (None, torch.bfloat16):
        model = build(TINY)
        optimizer = make_optimizer(model, lr=1e-3)
        losses = [train_step(model, optimizer, *tokens(TINY), autocast=autocast).item() for _ in range(5)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.05
    decayed = [group["weight_decay"] > 0 for group in optimizer.param_groups for _ in group["params"]]
    assert sum(decayed) == sum(w.ndim == 2 for w in model.parameters()) and not all(decayed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("attention, fused", [("eager", False), ("eager", True), ("flash", False), ("flash", True)])
def test_activations_by_formula(attention, fused, kv_heads, dtype):
    """And the weights; what AdamW keeps is counted in lecture 10."""
    shape = Config(**vars(TINY) | dict(kv_heads=kv_heads, attention=attention, fused_rope=fused, tied=fused))
    model = build(shape).to(dtype)
    batch, seq_len, itemsize = 3, 20, dtype.itemsize
    x = torch.randn(batch, seq_len, 32, dtype=dtype, device=DEVICE, requires_grad=True)
    block = model.blocks[0]
    layer = memory.kept_bytes(lambda: block.attention(x, model.cos, model.sin), model)
    assert layer == sum(memory.attention_bytes(shape, batch, seq_len, itemsize=itemsize).values())

    options = dict(itemsize=itemsize, fused_norm=DEVICE.type == "cuda")
    whole_block = memory.kept_bytes(lambda: block(x, model.cos, model.sin), model)
    assert whole_block == sum(memory.block_bytes(shape, batch, seq_len, **options).values())
    pairs = tuple(y.clone() for y in tokens(shape, batch, seq_len))  # else they are one piece of memory
    whole = memory.kept_bytes(lambda: model(*pairs), model)
    said = memory.training_memory(shape, batch, seq_len, **options)
    assert whole == said.activations and said.parameters == sum(w.nbytes for w in model.parameters())
    assert said.total == whole + 4 * said.parameters  # gradients, and two averages


def test_the_text_is_the_recorded_one_and_goes_with_the_package():
    data = text.load()
    assert data.dtype == torch.uint8 and data.ndim == 1
    words = bytes(data.tolist()).decode()
    assert all(f"# Phase {phase} " in words for phase in range(10))
    pyproject = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert text.FILE.parent.name == "models" and '"**/*.txt"' in pyproject


def test_batches():
    data = torch.arange(200, dtype=torch.uint8)
    first, again, other = (text.batches(data, 4, 16, seed=seed) for seed in (0, 0, 1))
    starts = set()
    for _ in range(500):
        x, y = next(first)
        assert x.shape == y.shape == (4, 16) and x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)
        starts |= set(x[:, 0].tolist())
    assert starts == set(range(200 - 16))  # every place where a piece and the byte after it fit
    x, _ = next(again)
    assert torch.equal(x, next(text.batches(data, 4, 16, seed=0))[0]) and not torch.equal(x, next(other)[0])
    with pytest.raises(ValueError, match="the text has 16 bytes; a piece of 16 and the byte after it do not fit"):
        next(text.batches(data[:16], 1, 16))


def test_it_refuses():
    for shape, options, sentence in (
        (Config(**vars(TINY) | dict(vocabulary=100)), {}, "the vocabulary has 100 tokens"),
        (TINY, dict(steps=0), "steps is 0"),
        (TINY, dict(seq_len=64), "there are 64 tokens; this model has 32 positions"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit(shape, **dict(steps=1, batch=1, seq_len=16) | options)
    with pytest.raises(ValueError, match="attention is 'sdpa'; there is a formula for 'eager' and for 'flash'"):
        memory.attention_bytes(config("small", attention="sdpa"), 1, 128)
    with pytest.raises(ValueError, match="one curve has 1 steps and the other 2"):
        distance([1.0], [1.0, 2.0])
    assert math.isnan(distance([1.0, math.nan], [1.0, 2.0]))
