"""What the notebooks show: Markdown that renders, animations that play."""

import io
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from PIL import Image as Picture

from flashlab.attention import reference
from flashlab.figures import show


@pytest.fixture
def shown(monkeypatch):
    out = []
    monkeypatch.setattr(show, "display", lambda x: out.append(getattr(x, "data", x)))
    return out


def test_source_of_a_function(shown):
    show.source(reference.causal_mask)
    assert shown[0].startswith("```python\ndef causal_mask(") and shown[0].endswith("\n```")


def test_part_of_a_source(shown):
    show.source(reference.attention, start="lse = torch.logsumexp", end="p = torch.exp")
    assert shown[0].splitlines()[1].startswith("lse =") and "return" not in shown[0]


def test_a_start_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="contains 'no such line'"):
        show.source(reference.attention, start="no such line")


def test_source_of_something_without_one():
    with pytest.raises(TypeError, match="no source text"):
        show.source(len)


def test_diff(shown):
    show.diff("a\nb\nc", "a\nB\nc")
    assert "-b" in shown[0].splitlines() and "+B" in shown[0].splitlines() and "---" not in shown[0]


def test_a_cuda_file_is_shown_as_cpp(shown, tmp_path: Path):
    (tmp_path / "k.cu").write_text("__global__ void k() {}\n")
    show.source(tmp_path / "k.cu")
    assert shown[0].startswith("```cpp\n__global__")


def test_table(shown):
    show.table([("a|b", 1234567, 0.00012345)], ["name", "bytes", "error"])
    lines = ["| name | bytes | error |", "| :-- | --: | --: |", "| a\\|b | 1 234 567 | 0.0001234 |"]
    assert shown[0]._repr_markdown_().splitlines() == lines


def test_a_row_of_the_wrong_length():
    with pytest.raises(ValueError, match="a row has 1 cells"):
        show.table([("a",)], ["x", "y"])


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


def test_gif_keeps_the_colours():
    fig, ax = plt.subplots(figsize=(1, 1))
    ax.set_position([0, 0, 1, 1])
    ax.axis("off")
    ax.add_patch(plt.Rectangle((0, 0), 1, 1, color=show.COLORS["blue"]))
    picture = Picture.open(io.BytesIO(show.gif([fig]).data)).convert("RGB")
    centre = picture.getpixel((picture.width // 2, picture.height // 2))
    assert all(abs(a - b) <= 8 for a, b in zip(centre, (0x00, 0x72, 0xB2), strict=True)), centre


def test_an_animation_of_nothing():
    with pytest.raises(ValueError, match="at least one figure"):
        show.gif([])
