"""No published figure is without its counterpart."""

import json

import pytest

from flashlab.bench import attention, counterparts, industrial, layer, lm, mma, published, scalar
from flashlab.bench.counterparts import RULES


def test_no_published_figure_is_without_its_counterpart():
    assert not any(counterparts.missing().values())


def test_a_figure_that_is_answered_in_words_is_not_counted_as_a_number():
    """An operation that we never call, or whose kernel has another name here, is answered without a number."""
    *tables, last = counterparts.overview().rows
    words = [o.value for name in RULES for _, o in counterparts.counterparts(name) if not counterparts.is_number(o)]
    assert set(words) <= {"by other kernels", "not called"} and 0 < len(words) < 20
    assert last == (
        "all",
        str(total := sum(int(row[1]) for row in tables)),
        str(total),
        str(total - len(words)),
        "",
        "",
    )
    assert {row[0] for row in tables if row[-1]} == set(counterparts.UNLIKE) < set(RULES)


def test_every_figure_of_every_table_is_asked_for():
    assert set(RULES) == set(published.NAMES)
    for name in RULES:
        labels = [figure.label for figure, _ in counterparts.counterparts(name)]
        columns = published.load(name)[0]
        figures = [c for c in columns if c.endswith("ms") or c in ("mem_before_mb", "avg_forward_s", "avg_backward_s")]
        cells = [row[c] for row in published.load(name) for c in figures or ["cuda_total"]]
        assert len(labels) == sum(cell is not None for cell in cells), name
        assert len(set(labels)) == len(labels) or name == "gqa_layer_profile"  # an operation is there twice
        assert all(figure.value is not None for figure, _ in counterparts.counterparts(name))


def stand_in(folder, name, rows):
    data = {"machine": {"gpu": "NVIDIA Stand-in"}, "rows": rows}
    (folder / f"{name}_stand_in.json").write_text(json.dumps(data))


def test_what_the_benches_measure_are_the_counterparts(tmp_path):
    """Were every job of the benches done, these tables would be whole."""
    assert len(counterparts.missing(tmp_path)) == len(RULES)
    rows = {part: [j for j in mma.jobs() if j["part"] == part] for part in mma.PARTS}
    first = {"ms": 1.0, "first": [0.1, 0.2, 0.3]}
    done = [j | first | {"name": n} for j in rows["published"] for n in mma.STAGES_ADA.values()]
    done += [j | {"name": n, "ms": 1.0} for j in rows["final"] for n in ("p9_flash", "unfused")]
    stand_in(tmp_path, "mma", done)
    names = (*(s.name for s in scalar.STEPS), *scalar.PEERS)
    stand_in(tmp_path, "scalar", [j | {"variant": n, "ms": 1.0} for j in scalar.jobs() for n in names])
    ours = [j | {"name": n, "ms": 2.0} for j in industrial.jobs(["published"]) for n in ("triton", "eager")]
    stand_in(tmp_path, "industrial", ours)
    alone = [
        j | {"pass": which, "name": "eager", "ms": 1.0, "held_bytes": 2**20}
        for j in attention.jobs() for which in attention.PASSES if j["seq_len"] < 16384
    ]  # fmt: skip
    alone += [
        j | {"name": "all", "unavailable": "out of memory: 1 TiB"} for j in attention.jobs() if j["seq_len"] >= 16384
    ]
    stand_in(tmp_path, "attention", alone)
    assert set(counterparts.missing(tmp_path)) == {"lm_forward_backward", "gqa_layer_profile"}
    text = repr(counterparts.beside("mma_stages_ada", tmp_path))
    assert "0.1000 0.2000 0.3000" in text and "NVIDIA Stand-in" in text
    text = repr(counterparts.beside("attention_memory", tmp_path))
    assert "out of memory" in text and "OOM" in text and "563" in text


def test_the_layer_and_the_language_model_have_their_counterparts(tmp_path):
    """A kernel with another name still answers, an operation that is not called too; and both say so."""
    jobs = [j for j in layer.jobs() if j["part"] == "profile"]
    ops = {r["op"]: 7.5 for r in published.load("gqa_layer_profile") if r["op"].startswith("aten::")}
    del ops["aten::arange"]
    about = {"runs": 100, "calls": 100}
    rows = [j | {"op": op, "kernel": False, "device_ms": ms} | about for j in jobs for op, ms in ops.items()]
    for j in jobs:
        name = "gemm_of_another_gpu" if j["layer"] == layer.ORIGINAL else layer.OUR_KERNEL
        rows.append(j | {"op": name, "kernel": True, "device_ms": 44.25} | about)
    stand_in(tmp_path, "layer", rows=rows)
    passes = (*lm.PASSES, "step", "forward only")
    steps = [j | {"pass": which, "ms": 7.0} for j in lm.jobs() if j["part"] == "step" for which in passes]
    large = [row for row in steps if row["size"] == "large" and row["dtype"] == "float32"]
    steps = [row for row in steps if row not in large]
    steps += [{k: v for k, v in large[0].items() if k not in ("pass", "ms")} | {"name": "all", "unavailable": "OOM: 1"}]
    stand_in(tmp_path, "lm", rows=steps)
    assert not {"lm_forward_backward", "gqa_layer_profile"} & set(counterparts.missing(tmp_path))
    found = {figure.label: (figure.value, ours.value) for figure, ours in
             counterparts.counterparts("gqa_layer_profile", tmp_path)}  # fmt: skip
    assert found["flash flash_attentionv2_kernel"] == (444.92, 44.25)
    assert found["original aten::bmm"] == (2267.0, 7.5)
    assert found["flash aten::arange"] == (0.31, "not called")
    assert found["original ampere_sgemm_128x128_nn"] == (1580.0, "by other kernels")
    found = {figure.label: ours.value for figure, ours in counterparts.counterparts("lm_forward_backward", tmp_path)}
    assert found["forward_backward md backward"] == 7.0 and found["forward_only lg forward"] == "OOM: 1"


def test_a_profile_that_could_not_be_taken_answers_with_its_reason(tmp_path):
    jobs = [j for j in layer.jobs() if j["part"] == "profile"]
    stand_in(tmp_path, "layer", rows=[j | {"name": "all", "unavailable": "out of memory: 1"} for j in jobs])
    assert {ours.value for _, ours in counterparts.counterparts("gqa_layer_profile", tmp_path)} == {"out of memory: 1"}


def test_the_command(capsys, tmp_path):
    counterparts.main([])
    said = capsys.readouterr().out
    assert all(name in said for name in RULES) and "no counterpart" not in said
    counterparts.main(["triton_vs_torch"])
    said = capsys.readouterr().out
    assert "not measured" not in said and "NVIDIA H200" in said
    counterparts.main(["--records", str(tmp_path)])
    assert "have no counterpart" in capsys.readouterr().out
    counterparts.main(["--json", "--records", str(tmp_path)])
    assert json.loads(capsys.readouterr().out).keys() == RULES.keys()
    with pytest.raises(SystemExit):
        counterparts.main(["no_table"])
