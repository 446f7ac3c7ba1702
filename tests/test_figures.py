"""The figures that need no kernel: they draw what they are given, and nothing overlaps that should be read."""

import ast
import itertools

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from lesson_source import find_lessons
from pacing import ROOT

from flashlab.attention.online_softmax import block_state, identity, merge
from flashlab.figures import curves, fragments, hopper, implementations, profiles, rings, rows, show
from flashlab.figures.panels import panels
from flashlab.figures.tiles import walk
from flashlab.simt.replay import Replay, Span


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def ax():
    show.style()
    return plt.subplots()[1]


def labels(axis):
    return [t.get_text() for t in axis.get_ticklabels()]


def test_curves_on_logarithmic_axes_are_marked_with_plain_numbers(ax):
    lines = [("formula", [128, 1024], [1, 100], "blue", "-"), ("", [128, 1024], [2, 99], "orange", "o")]
    curves.curves(ax, lines, log="xy", xticks=[128, 1024, 2**20], yticks=[1, 100], title="T", xlabel="N")
    assert labels(ax.xaxis) == ["128", "1024", "1048576"] and labels(ax.yaxis) == ["1", "100"]
    assert not ax.xaxis.get_minorticklocs().size and ax.get_xscale() == "log"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["formula"]
    assert ax.lines[1].get_linestyle() == "None"


def test_columns_side_by_side(ax):
    curves.columns(ax, ["a", "b"], {"x": ([1, 2], "blue"), "y": ([3, 4], "red")}, fmt="%d")
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(edges)) and len(edges) == 4
    assert [t.get_text() for t in ax.texts] == ["1", "2", "3", "4"]


def test_a_roofline_has_its_roofs_and_points(ax):
    curves.roofline(ax, {"GPU": lambda i: min(10, i)}, {"naive\nD = 64": 20}, ylim=(1, 20))
    assert max(ax.lines[0].get_ydata()) == 10 and ax.texts[0].get_text() == "naive\nD = 64"


def test_points_below_a_roofline_and_their_names(ax):
    groups = {"ours": ([512.0, 512.0, 8.0], [90.0, 60.0, 12.0], "blue", "o"), "peers": ([512.0], [95.0], "black", "x")}
    names = {"slow": (512.0, 60.0), "fast": (512.0, 90.0), "peer": (512.0, 95.0), "naive": (8.0, 12.0)}
    curves.reached(ax, 2.0, {"unit": 100.0}, groups, names, title="T", ylim=(5, 200))
    assert (max(ax.lines[0].get_ydata()), min(ax.lines[0].get_ydata())) == pytest.approx((100, 2 * ax.get_xlim()[0]))
    drawn = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() in ("o", "x")]
    assert drawn == [[[512, 90], [512, 60], [8, 12]], [[512, 95]]]
    assert {t.get_text() for t in ax.texts} == {"unit: 100", *names}
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.texts if t.get_text() in names]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def event(name, start, length, cat="cpu_op", tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": tid}


def test_a_profile_as_a_timeline(ax):
    inside = event("aten::bmm", 101, 8)  # of matmul
    trace = {"traceEvents": [
        inside, event("aten::matmul", 100, 10), event("aten::softmax", 110, 5), event("sgemm", 104, 9, "kernel", 7),
        {"ph": "i", "name": "[memory]", "ts": 100},
    ]}  # fmt: skip
    found = profiles.operations(trace)
    assert found == [("CPU", "aten::matmul", 0, 10), ("GPU", "sgemm", 4, 9), ("CPU", "aten::softmax", 10, 5)]
    profiles.timeline(ax, found, {"products": ("blue", ["matmul", "gemm"])}, "T")
    assert labels(ax.yaxis) == ["CPU", "GPU"]
    assert [(bar.get_x(), bar.get_width(), bar.get_y() > 0.5) for bar in ax.patches] == [
        (0, 10, False), (4, 9, True), (10, 5, False),
    ]  # fmt: skip
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["products", "other"]
    assert profiles.operations({"traceEvents": []}) == []


def test_memory_in_use_over_time():
    def change(at, size, device):
        return {"name": "[memory]", "ts": at, "args": {"Bytes": size, "Device Type": device}}

    trace = {"traceEvents": [change(3000, -10, 0), change(1000, 10, 0), change(2000, 5, 0), change(2500, 99, 1)]}
    assert profiles.allocated(trace) == ([0, 1, 2], [10, 15, 5])
    assert profiles.allocated(trace, device=True) == ([0], [99])


def test_a_row_in_blocks_has_a_frame_for_each():
    scores, v = torch.arange(8.0, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    blocks = [block_state(scores[j : j + 2], v[j : j + 2]) for j in range(0, 8, 2)]
    states = list(itertools.accumulate(blocks, merge, initial=identity(head_dim=2, dtype=torch.float64)))
    titles = [figure.axes[0].get_title(loc="left") for figure in rows.block_frames(scores, states)]
    assert [t.split("   ")[:2] for t in titles] == [[f"block {b} of 4", f"m = {2 * b - 1}.00"] for b in range(1, 5)]


# Machado, Oliveira, Fernandes (2009): what a viewer without one kind of cone sees, in linear RGB.
DICHROMACY = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(color, matrix=None):
    """CIE L*a*b* of a colour as seen through a matrix."""
    rgb = torch.tensor(matplotlib.colors.to_rgb(color), dtype=torch.float64)
    rgb = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    rgb = rgb if matrix is None else (torch.tensor(matrix, dtype=torch.float64) @ rgb).clamp(0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = torch.tensor(to_xyz, dtype=torch.float64) @ rgb / torch.tensor([0.95047, 1, 1.08883])
    f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("matrix", [None, *DICHROMACY.values()], ids=["normal", *DICHROMACY])
def test_red_is_told_apart_from_every_other_colour(matrix):
    distances = {
        name: (lab(color, matrix) - lab(show.COLORS["red"], matrix)).norm().item()
        for name, color in show.COLORS.items()
        if name != "red"
    }
    assert min(distances.values()) > 25, distances


@pytest.mark.parametrize(
    "keeps, number, causal, visited",
    [
        ("keys", 1, False, [(1, 0), (1, 1), (1, 2)]),
        ("queries", 1, False, [(0, 1), (1, 1), (2, 1)]),
        ("keys", 1, True, [(1, 1), (1, 2)]),
        ("queries", 1, True, [(0, 1), (1, 1)]),
    ],
)
def test_a_walk_numbers_the_tiles_it_visits(ax, keeps, number, causal, visited):
    walk(ax, 3, 3, keeps, number, causal=causal)
    found = {text.get_text(): tuple(int(x) for x in text.get_position()) for text in ax.texts}
    assert [found[str(i + 1)] for i in range(len(found))] == visited
    assert len(ax.patches) == 9


def test_panels_share_a_legend_and_say_what_was_not_measured():
    plots = {"left": {"a": ([512, 1024], [1.0, 2.0]), "b": ([512], [3.0])}, "right": {}}
    figure = panels(plots, columns=2, ylabel="TFLOP/s", level=1.5, level_text="peer")
    left, right = figure.axes
    assert labels(left.xaxis) == ["512", "1k"] and left.get_ylim()[0] == 0
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b"]
    assert "not measured" in [t.get_text() for t in right.texts]
    assert panels({"left": {}, "right": {}}, ylabel="ms") is None


# ---------------------------------------------------------------- one implementation, one colour

KNOWN = [name for names in implementations.LOOKS.values() for name in names]


def test_an_implementation_has_one_colour_and_no_other_has_it():
    assert len(KNOWN) == len(set(KNOWN))
    colors = [one.color for one in implementations.LOOKS]
    assert len(colors) == len(set(colors)) <= len(show.COLORS) and set(colors) <= set(show.COLORS)
    assert len({one.marker for one in implementations.LOOKS}) == len(colors)
    with pytest.raises(KeyError, match="no implementation is called 'mine'"):
        implementations.look("mine")


@pytest.mark.parametrize("order", [1, -1])
def test_panels_draw_an_implementation_in_its_colour_whatever_stands_beside_it(order):
    names = ["cuDNN", "mine", "triton", "eager"][::order]
    figure = panels({"T": {name: ([512, 1024], [1.0, 2.0]) for name in names}}, ylabel="TFLOP/s")
    drawn = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    for name in ("cuDNN", "triton", "eager"):
        assert drawn[name] == show.COLORS[implementations.look(name).color]
    assert len(set(drawn.values())) == 4
    figure = panels({"T": {name: ([512], [1.0]) for name in ("ours", "eager, ours", "x", "y")}}, ylabel="", pairs=True)
    hues = [line.get_color() for line in figure.axes[0].lines]
    assert hues == [show.COLORS[c] for c in ("blue", "blue", "orange", "orange")]


def given_another_colour(source):
    """(line, name, colour) wherever a tuple, or an entry of a dict, puts an implementation beside another's colour."""
    found = []
    for node in ast.walk(ast.parse(source)):
        groups = [node.elts] if isinstance(node, ast.Tuple | ast.List) else []
        if isinstance(node, ast.Dict):
            groups = [[k, v, *getattr(v, "elts", ())] for k, v in zip(node.keys, node.values, strict=True)]
        for group in groups:
            words = [e.value for e in group if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            names, colors = ([w for w in words if w in kind] for kind in (KNOWN, show.COLORS))
            if len(names) == len(colors) == 1 and implementations.look(names[0]).color != colors[0]:
                found.append((node.lineno, names[0], colors[0]))
    return found


def test_no_lecture_gives_an_implementation_another_colour():
    assert given_another_colour('x = {"cuDNN": ([1], "purple"), "mine": "red"}') == [(1, "cuDNN", "purple")]
    assert given_another_colour('for a in (("fused", "blue", "FlashAttention-2"), ("n", "cuDNN", "green")): pass')
    for path in find_lessons(ROOT, []):
        assert given_another_colour(path.read_text()) == [], f"{path.name}: figures/implementations.py has the colours"


def test_bars_and_curves_take_the_colour_of_an_implementation(ax):
    curves.curves(ax, [("cuDNN", [1, 2], [1, 2], "", "-")])
    curves.columns(ax, ["a"], {"cuDNN": ([1], "")})
    assert ax.lines[0].get_color() == show.COLORS["green"]
    assert ax.patches[0].get_facecolor() == matplotlib.colors.to_rgba(show.COLORS["green"])


# ---------------------------------------------------------------- threads, timelines, ratios


def test_the_holders_of_a_tile(ax):
    holder = {(row, column): (row // 2, (row % 2) * 4 + column // 2) for row in range(4) for column in range(8)}
    fragments.warps(ax, holder, (4, 8), "")
    assert [text.get_text() for text in ax.texts] == ["warp 0", "warp 1"]
    ax.clear()
    fragments.lanes(ax, holder, (2, 4), "", marked=5)
    assert [text.get_text() for text in ax.texts] == ["0", "0", "1", "1", "4", "4", "5", "5"]
    assert [text.get_color() == "white" for text in ax.texts] == [False] * 6 + [True] * 2


def test_who_works_when():
    spans = [Span(1, "copy", 0, 10), Span(0, "bytes", 0, 10), Span(0, "scores", 10, 20), Span(1, "release", 2, 30),
             Span(0, "exponentials", 20, 30), Span(0, "output", 30, 40)]  # fmt: skip
    figure = hopper.timelines({"alone": Replay(spans[1:3], [0], 20), "two": Replay(spans, [0, 1], 40)}, clocks=(0, 40))
    alone, two = figure.axes
    assert [text.get_text() for text in alone.get_yticklabels()] == ["copies", "tensor cores", "consumer 0"]
    assert [text.get_text() for text in two.get_yticklabels()] == ["copies", "producer", "tensor cores", "consumer 0"]
    bars = [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in two.patches]
    assert bars == [(0, 10, 0), (0, 10, 3), (10, 10, 2), (2, 28, 1), (20, 10, 3), (30, 10, 2)]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[2:] == ["waits for bytes", "waits for a free stage"]
    spans[1] = Span(0, "barrier", 8, 8.01)  # a wait for a turn is seen, however short it is
    turn = hopper.timelines({"turns": Replay(spans, [0, 1], 40)}, clocks=(0, 40))
    assert min(bar.get_width() for bar in turn.axes[0].patches if bar.get_x() == 8) > 0.1
    assert "waits for its turn" in [text.get_text() for text in turn.legends[0].get_texts()]
    waits = {hopper.COLORS[hue] for hue, _ in hopper._WAITS.values()}
    assert len(waits) == len(hopper._WAITS) and not waits & set(hopper._GROUP_HUES)
    shown = [
        x.get_facecolor() if hasattr(x, "get_facecolor") else x.get_color() for x in figure.legends[0].legend_handles
    ]
    assert len({matplotlib.colors.to_hex(hue, keep_alpha=True) for hue in shown}) == len(shown)


def test_a_ring_is_drawn_by_rank_and_step(ax):
    rings.steps(ax, [[2, 2], [0, 4]], "work", unit=2)  # by step and rank
    assert {(t.get_position(), t.get_text()) for t in ax.texts} == {
        ((0, 0), "1"), ((0, 1), "1"), ((1, 0), "0"), ((1, 1), "2"),
    }  # fmt: skip
    assert [t.get_text() for t in ax.texts if t.get_weight() == "bold"] == ["1", "1", "2"]


def test_a_timeline_of_ranks_begins_at_the_first_event_and_shows_blocks_and_sends(ax):
    events = [(0, 0, "block", 5.0, 5.002, 64), (1, 0, "send", 5.001, 5.003, 8), (1, 0, "wait", 5.002, 5.003, 0)]
    rings.timeline(ax, events, "two ranks")
    bars = [(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in ax.patches]
    assert bars == [(0, 2), (1, 2)], "milliseconds; waiting is white"
    assert [t.get_text() for t in ax.texts] == ["0"]
