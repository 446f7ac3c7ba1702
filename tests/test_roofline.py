"""The roofline of the records, and what lecture 10 says of the language model's."""

import math

import pytest

from flashlab.bench import lm, roofline


def test_what_the_page_says_of_python_and_of_graphs_is_in_the_record():
    data = lm.record()
    by_python, graph = ([lm.exchanged(data, size, column) for size in lm.SIZES] for column in ("ms", "graph_ms"))
    assert all(
        waiting[what] < kernels[what] for waiting, kernels in zip(by_python, graph, strict=True) for what in waiting
    )
    assert all(0.97 < found["attention alone"] < 1.03 < 1.1 < found["attention and RoPE"] for found in graph)
    for column, fastest in (("ms", "sdpa"), ("graph_ms", "flash")):
        assert lm.quickest(data, "medium", column)[:2] == (fastest, True)
    compiled = lm.turns(data, "medium", "compiled")
    by_python, graph = ({way: row[c] for (way, how), row in compiled.items() if how} for c in ("ms", "graph_ms"))
    assert by_python["eager"] < by_python["flash"] and graph["eager"] > max(graph["flash"], graph["sdpa"])


def test_the_roofline_has_every_kernel_below_its_ceiling():
    for run in roofline.recorded():
        ceilings, found = roofline.ceilings(run), roofline.points(run)
        names = [p.name for p in found]
        assert {"naive PyTorch", "minimal Triton kernel", "p6_1_fa1", "p7_naive", "p9_flash"} <= set(names)
        phases = [p.phase or 99 for p in found]
        assert len(names) == len(set(names)) and phases == sorted(phases)
        for p in found:
            assert 0 < p.share(ceilings) < 1, p
        if run["machine"]["gpu"] == "NVIDIA H200":  # all roofs at one clock: the documented rate is the H100's 989
            assert ceilings.units[roofline.WGMMA] == pytest.approx(989 * 1980 / 1830, rel=2e-3)  # TFLOP/s at 1830 MHz
            assert 0.6 < ceilings.units[roofline.MMA] / ceilings.units[roofline.WGMMA] < 0.7
            assert 0.8 < ceilings.memory / 4.8 < 1  # of the datasheet's


def test_a_point_counts_what_has_to_move():
    row = {"part": "ladder", "name": "p9_flash", "shape": [2, 3, 1024, 64], "dtype": "fp16", "ms": 1.0}
    fused = roofline._point(row, roofline.MMA, {"p9": (9, "a")})
    assert fused.unit == roofline.MMA
    assert fused.tflops == pytest.approx(4 * 6 * 1024**2 * 64 / 1e9) and fused.intensity == 1024 / 2
    whole = roofline._point(row | {"shape": [1, 1, 1024, 64], "dtype": "f32"}, "", {"p9": (6, "b")})
    assert whole.intensity == 1024 / 4
    slow = roofline.Ceilings("gpu", 2.0, {roofline.MMA: 100.0}, ())
    assert slow.at(10, roofline.MMA) == 20 and slow.at(1000, roofline.MMA) == 100
    assert math.isclose(fused.share(slow), fused.tflops / 100)
