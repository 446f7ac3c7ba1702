"""The bench of the attention layer, on a CPU: what it times, what a profile and a trace keep, what reads a record."""

import pytest
import torch

from flashlab.attention import triton_forward
from flashlab.bench import layer, peers, timing
from flashlab.bench.layer import CASES, OURS, SCOPES

SHAPES = ["tiny", "tiny, projections"]


def test_the_published_case_is_what_the_published_figures_tell():
    """As lecture 10 reads them."""
    case = CASES["published"]
    assert (case.batch * case.heads, case.seq_len, case.head_dim, case.heads // case.kv_heads) == (512, 1024, 16, 2)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("scope", SCOPES)
def test_every_layer_computes_the_same(case, scope):
    inputs = layer.draw(CASES[case], scope)

    def both(name):  # compiled ones are left out: that takes its time
        module, _ = layer.build(name, CASES[case], scope)
        return [layer.pass_of(module, CASES[case], scope, which, inputs)() for which in ("forward", "both")]

    found, reasons = timing.made(layer.names_of("time", scope), both)
    assert {"original", OURS, layer.SDPA} <= set(found) and reasons.keys() <= layer.BACKENDS.keys()
    want, grads = found["original"]
    for output, gradients in found.values():
        assert output.grad_fn is None
        torch.testing.assert_close(output, want, atol=1e-5, rtol=0)
        for a, b in zip(gradients, grads, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


def test_a_job_has_a_row_for_each_name_and_out_of_memory_is_one(monkeypatch):
    right = layer.build

    def build(name, case, scope):
        if name == "original":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32 GiB")
        return right(name, case, scope)

    monkeypatch.setattr(layer, "build", build)
    job = {"part": "time", "case": "tiny", "scope": "attention", "pass": "forward"}
    rows = layer.measure(job)
    assert sorted(r["name"] for r in rows) == sorted(layer.names_of("time", "attention"))
    assert all(job.items() <= row.items() for row in rows)
    by_name = {r["name"]: r for r in rows}
    assert by_name["original"]["unavailable"].startswith("out of memory")
    assert 0 < by_name[OURS]["fastest"] <= by_name[OURS]["ms"]
    data = {"rows": rows, "machine": {"gpu": None}}
    assert "out of memory" in repr(layer.times_table(data, "tiny"))
    assert layer.ratio(data, "tiny", OURS, "original", "attention") is None


def test_compiled_layers_are_timed_beside_the_original_and_ours(monkeypatch):
    monkeypatch.setitem(peers.COMPILE, "backend", "aot_eager")  # inductor takes minutes here
    rows = layer.measure({"part": "compiled", "case": "tiny", "scope": "layer", "pass": "forward"})
    assert [r["name"] for r in rows] == ["original", OURS, *layer.COMPILED] and all("ms" in r for r in rows)
    assert all(r["difference"] < 1e-5 for r in rows[1:]) and [r.get("replaced") for r in rows[2:]] == [False, False]


# ---- profiles --------------------------------------------------------------------------------------------------------
def test_a_profile_counts_calls_flops_and_bytes():
    a = torch.randn(64, 64)
    rows = {r["op"]: r for r in layer.profiled(lambda: a @ a, 3)}
    product = rows["aten::mm"]
    assert (product["calls"], product["runs"], product["kernel"]) == (3, 3, False)
    assert product["flops"] == 3 * 2 * 64**3 and product["cpu_bytes"] == 3 * 4 * 64**2
    assert 0 < product["self_cpu_ms"] <= product["cpu_ms"] <= rows["aten::matmul"]["cpu_ms"]
    assert not {"[memory]", layer.CALL} & set(rows)
    text = repr(layer.rows_table(list(rows.values())))
    assert "ms on the CPU" in text and "aten::mm" in text


def test_one_call_is_told_by_its_outermost_operations():
    a = torch.randn(64, 64)
    events = layer.one_call(lambda: (a @ a).softmax(-1))
    assert [e.name for e in events] == ["aten::matmul", "aten::softmax"]
    assert events[0].start_us == 0 and events[0].us > 0 and events[1].start_us >= events[0].us
    assert all(e.where.startswith("thread ") for e in events)


def test_the_kernel_that_answers_the_published_one_is_ours():
    assert triton_forward.flash_attention_kernel.fn.__name__ == layer.OUR_KERNEL
