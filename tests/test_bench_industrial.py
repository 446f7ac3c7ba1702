"""The bench of phases 4 and 5, as far as no GPU is needed: its jobs, recorded tiles; and that of attention alone."""

import json
from types import SimpleNamespace

import pytest
import torch

from flashlab.attention import reference, tiles
from flashlab.bench import attention, industrial, peers
from flashlab.bench.industrial import OURS
from flashlab.bench.rows import where


@pytest.mark.parametrize("causal", [False, True])
def test_each_pass_computes_what_it_says(causal):
    torch.manual_seed(0)
    q, k, v, grad_o = industrial.make((1, 2, 40, 16), torch.float32, grad=True)
    forward = {name: industrial.forward_of(name, q, k, v, causal) for name in (OURS, "eager")}
    want = reference.attention(q.double(), k.double(), v.double(), causal=causal)[0]
    grads = torch.autograd.grad(want, (q, k, v), grad_o.double())
    for name in forward:
        torch.testing.assert_close(forward[name]().double(), want, atol=1e-5, rtol=0)
        for which in ("backward", "both"):
            ways = industrial.passes(which, forward, (q, k, v), grad_o)
            for _ in range(2):
                for got, right in zip(ways[name](), grads, strict=True):
                    torch.testing.assert_close(got, right, atol=1e-4, rtol=0)


def test_flex_is_the_same_attention_and_asked_for_at_its_best(monkeypatch):
    asked = []

    def compiled(mode):
        def flex(*qkv, kernel_options, **options):
            asked.append((mode, kernel_options))
            return torch.nn.attention.flex_attention.flex_attention(*qkv, **options)

        return flex

    monkeypatch.setattr(peers, "_compiled_flex", compiled)
    monkeypatch.setattr(industrial, "times_of", lambda ways: ({name: {"ms": 1.0} for name in ways}, {}))
    job = where(industrial.jobs(), part="flex", causal=True)[0] | {"shape": [1, 2, 20, 16]}
    way = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(peers, "sdpa", lambda backend, *qkv: lambda: way(*qkv[:3], is_causal=qkv[3]))
    rows = {row["name"]: row for row in industrial.measure(job)}
    assert list(rows) == ["cuDNN", *peers.FLEX] and all(row["difference_to_cudnn"] < 0.02 for row in rows.values())
    assert asked == [(None, None), ("max-autotune-no-cudagraphs", None), (None, {"BACKEND": "FLASH"})]


def test_flex_is_measured_at_every_shape_and_who_cannot_run_says_why():
    todo = where(industrial.jobs(), part="flex")
    assert len({(*j["shape"], j["causal"]) for j in todo if j["pass"] == "forward"}) == 36 == len(todo) / 2
    data = industrial.recorded()[0]
    for row in data["flex"]:
        if row["name"] == "FlexAttention, FLASH":
            del row["ms"]
            row["unavailable"] = "it is not there"
    found = industrial.flex_table(data)
    assert len(found.rows) == 36 and found.columns[3:] == ("cuDNN", *peers.FLEX)
    assert {row[-1] for row in found.rows} == {"–"} and "FlexAttention, FLASH: it is not there" in found.caption
    assert industrial.flex_table(data | {"rows": []}).rows == ()


# ---- the tiles -----------------------------------------------------------------------------------------------------
def tuned(kernel, head_dim, causal, **times):
    job = {"part": "tune", "kernel": kernel, "head_dim": head_dim, "causal": causal}
    return [job | {"tile": [64, int(name[1:]), 4, 2], "ms": ms} for name, ms in times.items()]


def test_the_fastest_tile_with_and_without_a_mask_is_read_from_then_on(tmp_path, monkeypatch):
    rows = tuned("forward", 64, False, n32=1.0, n64=1.1, n128=9.0)
    rows += tuned("forward", 64, True, n32=2.0, n64=1.0) + tuned("forward", 256, False, n64=1.0)
    rows += [rows[0] | {"tile": [1, 1, 1, 1]}, {"part": "tune", "kernel": "dq", "unavailable": "too large"}]
    rows[-2].pop("ms")
    one_head = rows[0] | {"part": "one head", "shape": [1, 1, industrial.FEW, 64], "dtype": "f32", "ms": 5.0}
    long = one_head | {"shape": [1, 1, 16384, 64], "tile": [32, 32, 4, 2]}
    assert industrial.choices([*rows, one_head, long], "hopper") == {
        ("forward hopper 16-bit whole", 64): [64, 32, 4, 2],
        ("forward hopper 16-bit masked", 64): [64, 64, 4, 2],
        ("forward hopper 16-bit whole", 256): [64, 64, 4, 2],
        ("forward hopper float32 whole few", 64): [64, 32, 4, 2],
        ("forward hopper float32 whole", 64): [32, 32, 4, 2],
    }

    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiles, "MEASURED", path)
    industrial.write_choices(rows, "sm_90")
    industrial.write_choices(tuned("forward", 256, False, n32=1.0), "sm_90")
    assert json.loads(path.read_text()) == {
        "forward hopper 16-bit masked": [[64, [64, 64, 4, 2]]],
        "forward hopper 16-bit whole": [[64, [64, 32, 4, 2]], [256, [64, 32, 4, 2]]],
    }
    found = tiles.recorded("forward", "hopper", torch.bfloat16)
    assert [(c.head_dim, c.source) for c in found] == [(64, "measured"), (128, "compiled"), (256, "measured")]
    assert found[0].tile == (64, 32, 4, 2)
    assert tiles.recorded("forward", "hopper", torch.bfloat16, masked=True)[0].tile == (64, 64, 4, 2)
    assert all(c.source == "compiled" for c in tiles.recorded("forward", "ampere", torch.bfloat16))
    assert all(c.source == "compiled" for c in tiles.recorded("forward", "hopper", torch.float32))
    tiles._measured.cache_clear()
    tiles.recorded.cache_clear()


def test_what_is_tuned_is_taken_from_then_on(monkeypatch):
    kept = []
    monkeypatch.setattr(industrial, "launcher", lambda job: lambda tile: None)
    monkeypatch.setattr(industrial, "times_of", lambda ways, rounds: ({name: {"ms": 1.0} for name in ways}, {}))
    monkeypatch.setattr(industrial.runtime, "limits", lambda: SimpleNamespace(target="sm_90"))
    monkeypatch.setattr(industrial, "write_choices", lambda rows, target: kept.append((rows, target)))
    job = where(industrial.jobs(), part="tune")[0]
    rows = industrial.measure(job)
    assert kept == [(rows, "sm_90")] and [tuple(row["tile"]) for row in rows] == list(industrial.tiles_of(job))


# ---- attention alone ----------------------------------------------------------------------------------------------
ALONE = {"part": "attention", "d_model": 16, "seq_len": 40, "dtype": "float32"}


def test_a_job_that_failed_is_in_the_table():
    assert "no room" in repr(attention.table({"rows": [ALONE | {"name": "all", "unavailable": "no room: 1"}]}))


@pytest.mark.slow
@pytest.mark.long
def test_compiled_eager_is_the_same_and_its_backward_pass_can_be_repeated():
    q, k, v, grad_o = attention.inputs(ALONE)
    o = peers.compiled_unfused(q, k, v)()
    torch.testing.assert_close(o, peers.unfused(q, k, v)(), atol=1e-5, rtol=0)
    first, second = (torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert peers.replaced() >= 0
