"""What a recorded ladder looks like. (The counts, and what is printed of the steps: lectures 6 to 9.)"""

import matplotlib.pyplot as plt

from flashlab.figures import ladder

RUN = {
    "machine": {"gpu": "a GPU"},
    "ladder": [
        {"shape": [1, 1, 64, 64], "causal": False, "name": name, "tflops": tflops, "ms": 1.0, "fastest": 0.9,
         "slowest": 1.1, "vs_fa2": tflops / 100}
        for name, tflops in (("fa2", 100.0), ("p7_naive", 10.0), ("p8_3_stages", 40.0), ("p8_3_stages STAGES=1", 30.0))
    ],
}  # fmt: skip


def test_recorded_ladders():
    assert ladder.gains(RUN, (1, 1, 64, 64), False) == {"p8_3_stages": 4.0}
    assert ladder.gains(RUN, (1, 1, 64, 128), False) == {}
    assert ladder.ladder_figure(RUN, (1, 1, 64, 64), True) is None
    figure = ladder.ladder_figure(RUN, (1, 1, 64, 64), False)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["p7_naive", "p8_3_stages"]
    assert figure.axes[0].get_legend() is None and "FlashAttention-2: 100" in [
        t.get_text() for t in figure.axes[0].texts
    ]
    plt.close(figure)


def test_conflicts_and_the_rest_add_up():
    table = [ladder.row(name) for name in ("p8_3_stages", "p8_4_swizzle")]
    figure = ladder.conflicts_and_ideal(table, {"a GPU": 2.0})
    left, right = ([bar.get_width() for bar in ax.patches] for ax in figure.axes)
    assert [a + b for a, b in zip(left, right, strict=True)] == [r[3] / r[1] for r in table] and left[1] == 0
    plt.close(figure)
