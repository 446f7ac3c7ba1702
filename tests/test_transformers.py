"""The door in real models of Hugging Face transformers, small and random: outputs and gradients beside `sdpa`."""

import pytest
import torch
from drawn import DEVICE

from flashlab.attention import transformers_door

transformers = pytest.importorskip("transformers")
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {  # family: its options, and what it is compared with
    "Llama": (dict(), "sdpa"),
    "Mistral": (dict(sliding_window=5), "sdpa"),
    "Gemma2": (dict(sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8), "eager"),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    transformers_door.register()


def model_of(family, implementation, **options):
    config = getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family][0], **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_attn_implementation(implementation)
    return model.to(DEVICE)


def tokens(batch=2, length=13):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("family", MODELS)
def test_outputs_and_gradients(family):
    found = {}
    for implementation in ("wall_by_wall", MODELS[family][1]):
        model = model_of(family, implementation).train()
        result = model(tokens(), labels=tokens())
        result.loss.backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        found[implementation] = result.logits.detach(), gradients
    (ours, our_gradients), (theirs, their_gradients) = found.values()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys() and len(our_gradients) > 15
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", MODELS)
def test_generation_with_a_cache(family):
    said = [
        model_of(family, name).eval().generate(tokens(1, 7), max_new_tokens=6, do_sample=False)
        for name in ("wall_by_wall", MODELS[family][1])
    ]
    assert torch.equal(*said)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("family", MODELS)
def test_generation_with_a_static_cache(family, backend):
    """It has room for more keys than there are: the mask function tells the layers how many."""
    transformers_door.register("on_cache", backend=backend)
    options = dict(max_new_tokens=6, do_sample=False, cache_implementation="static")
    said = [model_of(family, name).eval().generate(tokens(2, 7), **options) for name in ("on_cache", MODELS[family][1])]
    assert torch.equal(*said) and said[0].shape == (2, 13)


def test_the_room_of_a_static_cache():
    def causal(batch, head, query, key):
        return key <= query

    lengths = transformers_door.no_mask(3, 2, 16, q_offset=5, mask_function=causal)
    assert lengths.tolist() == [7, 7, 7] and transformers_door.no_mask(3, 2, 7, q_offset=5) is None
    with pytest.raises(ValueError, match="the last query is number 7, and keys 0 to 6 are there"):
        transformers_door.no_mask(1, 2, 7, q_offset=6, mask_function=causal)
    with pytest.raises(ValueError, match="lets queries see the empty room of a static cache"):
        transformers_door.no_mask(1, 2, 16, q_offset=5, mask_function=lambda b, h, q, k: torch.ones_like(q + k) > 0)


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="the name is 'flashlab'; transformers takes a name with"):
        transformers_door.register("flashlab")
    model = model_of("Llama", "wall_by_wall")
    padded = torch.ones(2, 13, dtype=torch.long, device=DEVICE)
    model(tokens(), attention_mask=padded)
    padded[0, :3] = 0
    with pytest.raises(ValueError, match="this batch is padded, and the kernels have no mask of padding"):
        model(tokens(), attention_mask=padded)
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]] * 2, device=DEVICE)
    with pytest.raises(ValueError, match="neither causal nor a sliding window .several sequences packed"):
        model(tokens(), position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="dropout is 0.1, and the kernels have none"):
        model_of("Llama", "wall_by_wall", attention_dropout=0.1).train()(tokens())
    x = torch.zeros(1, 2, 3, 8, device=DEVICE)
    with pytest.raises(ValueError, match="this layer passes s_aux, which the kernels do not know"):
        transformers_door.attend(model, x, x, x, None, s_aux=x)
    with pytest.raises(ValueError, match="this layer has a mask of its own"):
        transformers_door.attend(model, x, x, x, x)
