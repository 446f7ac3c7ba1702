"""`flash_attention` in models of Hugging Face's transformers, beside its own attention; skipped where it is missing."""

from importlib.util import find_spec

import pytest
import torch

from flashlab import runtime
from flashlab.attention import transformers_attention

transformers = pytest.importorskip("transformers", "4.53") if find_spec("transformers") else None
needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
DEVICE = runtime.device()


def make(kind="Llama", seed=0, dtype=torch.float32, **changes):
    """A small model with random weights, and its twin with transformers' own attention."""
    sizes = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    ) | changes  # fmt: skip
    made = []
    for implementation in (transformers_attention.register(), sizes.pop("peer", "sdpa")):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation=implementation)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(DEVICE, dtype)
        assert model.config._attn_implementation == implementation
        made.append(model)
    made[1].load_state_dict(made[0].state_dict())
    return made


def tokens(batch=2, length=45, seed=1):
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expect_alike(ours, theirs, ids, bound=2e-5):
    """Logits and every parameter's gradient of a training step: their largest error relative to the largest value."""
    losses = [model(input_ids=ids, labels=ids) for model in (ours, theirs)]
    for out in losses:
        out.loss.backward()
    pairs = {"logits": (losses[0].logits, losses[1].logits)}
    pairs |= {
        name: (a.grad, b.grad)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True)
        if b.grad is not None
    }
    errors = {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}
    assert len(pairs) > 10 and max(errors.values()) <= bound, max(errors.items(), key=lambda pair: pair[1])
    return errors


@needs_transformers
def test_a_small_llama_trains_as_with_sdpa():
    errors = expect_alike(*make(), tokens())
    print(f"logits {errors['logits']:.2g}, the worst gradient {max(errors.values()):.2g}")


@needs_transformers
def test_the_backend_is_ours(monkeypatch):
    called = []
    real = transformers_attention.flash_attention
    monkeypatch.setattr(
        transformers_attention,
        "flash_attention",
        lambda *x, **options: (called.append(options), real(*x, **options))[1],
    )
    ours, theirs = make()
    ours(tokens()), theirs(tokens())
    assert len(called) == 2 and called[0]["causal"] is True


@needs_transformers
def test_generation_with_a_growing_cache():
    ours, theirs = make()
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(tokens(1, 20), **options), theirs.generate(tokens(1, 20), **options))


@needs_transformers
def test_a_sliding_window_and_a_softcap():
    expect_alike(*make("Mistral", sliding_window=7), tokens())
    changes = dict(sliding_window=7, query_pre_attn_scalar=16, attn_logit_softcapping=20.0, peer="eager")
    expect_alike(*make("Gemma2", **changes), tokens())


@needs_transformers
def test_what_it_does_not_have_is_refused():
    ours, _ = make()
    ids = tokens()
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    with pytest.raises(ValueError, match="marks padding"):
        ours(ids, attention_mask=padded)
    packed = torch.arange(45, device=DEVICE).repeat(2, 1)
    packed[:, 20:] -= 20
    with pytest.raises(ValueError, match="packed into one"):
        ours(ids, position_ids=packed, use_cache=False)  # with a cache transformers does not look for it
    dropping, _ = make(attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_dropout is 0.1"):
        dropping.train()(ids)
    assert ours(ids, attention_mask=torch.ones_like(ids)).logits.isfinite().all()


@pytest.mark.skipif(transformers is not None, reason="transformers is installed")
def test_without_transformers_a_sentence_says_so():
    with pytest.raises(ImportError, match="pip install transformers"):
        transformers_attention.register()


def test_the_mask_is_looked_at_beside_the_diagonal():
    """Without transformers: its mask functions are plain functions of positions."""
    causal = lambda b, h, q, k: k <= q  # noqa: E731
    sizes = dict(batch_size=2, q_length=9, kv_length=9)
    assert transformers_attention.mask(**sizes, mask_function=causal) is None
    assert transformers_attention.mask(2, 3, 9, 6, 0, causal) is None
    window = lambda b, h, q, k: (k <= q) & (k > q - 4)  # noqa: E731
    assert transformers_attention.mask(**sizes, mask_function=window, local_size=4) is None
    everything = lambda b, h, q, k: k == k  # noqa: E731
    assert transformers_attention.mask(**sizes, mask_function=everything) is None
    packed = lambda b, h, q, k: (k <= q) & ((k < 5) == (q < 5))  # noqa: E731
    for wrong in (packed, window, lambda b, h, q, k: k < q):
        with pytest.raises(ValueError, match="neither causal nor a window"):
            transformers_attention.mask(**sizes, mask_function=wrong)
    with pytest.raises(ValueError, match="DynamicCache"):
        transformers_attention.mask(2, 3, 9, 0, 0, causal)
