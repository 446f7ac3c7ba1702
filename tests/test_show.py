"""What the notebooks show: Markdown that renders, animations that play."""

import html
import io
import re

import matplotlib.pyplot as plt
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import select_figure_formats
from PIL import Image as Picture

from flashlab.attention import reference
from flashlab.figures import show


@pytest.fixture
def shown(monkeypatch):
    out = []
    monkeypatch.setattr(show, "display", lambda x: out.append(getattr(x, "data", x)))
    return out


BEFORE = """\
#include "simt.h"

__global__ void kernel(float* y_gmem) {
    // region: main loop
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < 8; i++)                              // over the tile
            y_gmem[i] += j < 2 && i < 4;
    }
    // endregion
}
"""
AFTER = BEFORE.replace("y_gmem[i] += j < 2 && i < 4;", "y_gmem[i ^ j] += j < 2 && i < 4;  // New: the swizzle").replace(
    "    // region: main", "    // region: state\n    float m = 0;\n    // endregion\n    // region: main"
)


@pytest.fixture
def files(tmp_path):
    for name, text in (("before.cu", BEFORE), ("after.cu", AFTER)):
        (tmp_path / name).write_text(text)
    return tmp_path / "before.cu", tmp_path / "after.cu"


def test_a_region_of_a_text_and_of_a_function(shown):
    show.region(AFTER, "state")
    assert shown[0].startswith("lines 5 to 5, *state*\n\n<samp>\n\n```c++\n5  float m = 0;")
    with pytest.raises(KeyError, match="no region 'loop'; its regions: none"):
        show.region(reference.attention, "loop")


def test_a_region_that_is_not_there(shown, files):
    with pytest.raises(KeyError, match="no region 'loop'; its regions: 'state', 'main loop'"):
        show.region(files[1], "loop")
    with pytest.raises(KeyError, match="no region 'loop'"):
        show.diff(*files, "loop")
    with pytest.raises(ValueError, match="name a region"):
        show.region(files[1])
    assert not shown


def test_a_region_that_only_one_of_the_two_has(shown, files):
    show.diff(*files, "state")
    assert "*state* (lines: 1 new, 0 gone)" in shown[0]
    show.diff(files[1], files[0], "state")
    assert "*state* (lines: 0 new, 1 gone)" in shown[1]


def test_what_is_no_difference(shown):
    old = "// region: a\nint x;  // New: a word\n// endregion\n"
    show.diff(old, "{\n    // region: a\n    int x;      // A word\n    // endregion\n}\n", "a")
    assert "(lines: 0 new, 0 gone)\n\nNo line changes." in shown[0]


@pytest.mark.parametrize(
    "code",
    [
        "x = f(" + "a, " * 60 + "b)",
        "y = 1;" + " " * 70 + "// " + "word " * 20,
        "// " + "x" * 250,
        "const int one_very_long_name = " + "y" * 120,
        " " * 100 + "return z;",
    ],
)
def test_no_shown_line_is_wider_than_the_page(shown, code):
    text = f"// region: a\nvoid g() {{\n    {code}\n}}\n// endregion\n"
    show.region(text, "a")
    show.diff("", text, "a")
    for markdown in shown:
        lines = html.unescape(re.sub("<[^>]*>", "", markdown)).splitlines()
        assert max(map(len, lines)) <= show.WIDTH
        squeezed = [re.sub(r"\s|//", "", line) for line in show.shown(markdown)]
        assert squeezed == ["voidg(){", re.sub(r"\s|//", "", code), "}"]


def test_an_empty_line_of_code_is_a_line(shown):
    show.region("// region: a\nint a;\n\nint b;\n// endregion\n", "a")
    assert show.shown(shown[-1]) == ["int a;", "", "int b;"]


def test_what_cannot_be_shown():
    with pytest.raises(TypeError, match="no source text"):
        show.source(len)
    with pytest.raises(ValueError, match="a row has 1 cells"):
        show.table([("a",)], ["x", "y"])
    with pytest.raises(ValueError, match="at least one figure"):
        show.gif([])


def test_gif_plays_every_frame_and_is_the_same_each_time():
    def figures():
        for i in range(3):
            fig, ax = plt.subplots(figsize=(2, 1))
            ax.barh(0, i + 1)
            yield fig

    first, second = (show.gif(figures()) for _ in range(2))
    picture = Picture.open(io.BytesIO(first.data))
    assert picture.n_frames == 3
    assert first.data == second.data
    assert not plt.get_fignums()


def test_a_figure_is_told_in_words_wherever_it_is_shown():
    shell = InteractiveShell.instance()
    try:
        select_figure_formats(shell, {"png"})
        for _ in range(2):  # a cell may be run again
            show.style()
        drawn = []
        for _ in range(2):
            figure, ax = plt.subplots()
            ax.plot([1, 2], label="ours")
            ax.set(title="Forward", xlabel="N", ylabel="TFLOP/s")
            ax.legend()
            data, metadata = shell.display_formatter.format(figure)
            words = "Forward; TFLOP/s over N; ours"
            assert data["image/png"] and metadata["image/png"]["alt"] == words
            assert f"<title>{words}</title>" in data["image/svg+xml"], "line art is sharp at any size"
            drawn.append(data["image/svg+xml"])
        assert drawn[0] == drawn[1], "a lecture that is built again has the same bytes"
        ax.imshow([[1, 2]])
        assert set(shell.display_formatter.format(figure)[0]) == {"image/png", "text/plain"}
    finally:
        InteractiveShell.clear_instance()
        plt.close("all")
