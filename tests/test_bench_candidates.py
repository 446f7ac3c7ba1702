"""The candidates for phase 5's backward pass: each text is right, and what is fastest wins."""

from __future__ import annotations

import pytest
import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.tiles import Tile
from flashlab.attention.triton_backward import Tiles
from flashlab.bench import candidates, harness
from flashlab.check.training import wanted, worst
from flashlab.triton_tools.compile_report import compile_report

# What the bench tries, and no learner meets: by default one text of each kernel, three seconds each.
EVERY = pytest.mark.parametrize(("kernel", "text"), [
    pytest.param(kernel, text, id=f"{kernel}-{text}", marks=pytest.mark.long if i else [])
    for kernel, texts in candidates.TEXTS.items() for i, text in enumerate(texts)
])  # fmt: skip


@EVERY
def test_every_text_is_right(kernel, text):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_o = (
        torch.randn(1, heads, rows, 40, generator=generator).half().to(runtime.device())
        for heads, rows in ((4, 90), (2, 110), (2, 110), (4, 90))
    )
    assert kernel in candidates.TILES and candidates.module(**{kernel: text}) is not candidates.module()
    for causal in (False, True):
        o, lse = reference.attention(q, k, v, causal=causal)
        both = Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
        run = candidates.module(**{kernel: text}).flash_attention_backward
        found = run(grad_o, q, k, v, o.half(), lse.float(), causal=causal, tiles=both)
        name, error = worst(wanted(q, k, v, grad_o, causal=causal), **dict(zip(("dq", "dk", "dv"), found, strict=True)))
        assert error <= 1, f"{name} is off by {error:.3g} times its bound"


@pytest.mark.slow
@EVERY
def test_every_text_compiles(kernel, text):
    """The interpreter accepts more than the compiler does."""
    texts = candidates.module(**{kernel: text})
    arguments = texts.compile_arguments(kernel, torch.bfloat16, 64, Tile(64, 64, 4, 2), causal=True)
    report = compile_report(getattr(texts, f"{kernel}_kernel"), arguments, target="sm_90")
    assert report.ok, report.error


def test_what_is_fastest_of_both_kernels_wins(monkeypatch):
    """With times that say so: two stages are faster, so is a text with "d" at its start; and nothing is launched."""
    asked = []

    def way(job, length, texts, chosen):
        asked.append((texts, chosen))
        return lambda: None

    def times_of(ways, rounds=9):
        def ms(name):
            return {"today": 6.0, "best": 5.0, candidates.FA2: 8.0}.get(name) or 9 - ("'d" in name) - ("2)" in name)

        return {name: {"ms": ms(name)} for name in ways}, {}

    monkeypatch.setattr(candidates, "way", way)
    monkeypatch.setattr(candidates, "given", lambda length, d, causal: (torch.zeros(1, 1, 2, 8),) * 6)
    monkeypatch.setattr(candidates, "_compile", lambda tasks: None)
    monkeypatch.setattr(candidates, "off", lambda *of: 0.5)
    monkeypatch.setattr(harness, "times_of", times_of)
    job = candidates.jobs()[0]
    rows = candidates.measure(job)
    best = [r for r in rows if r["name"] == "best"]
    assert [r["length"] for r in best] == list(candidates.LENGTHS) and {r["factor"] for r in best} == {1.2}
    assert all(r["tiles"][kernel][-1] == 2 for r in best for kernel in candidates.TILES)
    assert {len(t) for t, _ in asked if t} == {1, 2} and candidates.TEXTS["dq"].keys() >= {best[0]["texts"]["dq"]} - {
        "as it is"
    }
    found = candidates.table({"rows": rows, "machine": {"gpu": "a stand-in"}})
    assert len(found.rows) == 3 and found.rows[0][-3:] == ("1.200", "1.60", "")
