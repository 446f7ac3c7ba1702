"""How the lectures read: the counts of src/lessons/pacing.py, each within its limit."""

import nbformat
import pacing
import pytest
from lesson_source import find_lessons

LECTURES = [p for p in find_lessons(pacing.ROOT) if not p.stem.endswith("_exercises")]


@pytest.mark.parametrize("path", LECTURES, ids=lambda p: p.stem)
def test_a_lecture_keeps_its_pace(path):
    problems = []
    for name, (value, cells) in pacing.pace(path).beyond().items():
        low, high, what = pacing.RULES[name]
        problems.append(f"{value:g} {what}, where {low:g} to {high:g} are the limit" + "\n    ".join(["", *cells]))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
def test_no_code_of_an_exercise_page_is_cut_off(folder):
    widest = pacing.RULES["width"][1]
    long = [
        f"{path.name}, cell {number}: {line}"
        for path in sorted((pacing.ROOT / folder).glob("[0-9][0-9]*_*.ipynb"))
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells)
        if cell.cell_type == "code"
        for line in cell.source.splitlines()
        if len(line) > widest
    ]
    assert not long, "\n".join(long)


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize(
    "what, text, count",
    [
        (pacing.words, "# A title\n\nTwo *words*.", 4),
        (pacing.words, "so $a + b = c$ holds, and\n$$x\n= y$$", 5),
        (pacing.words, "see\n\n<details><summary>Answer</summary>\n\nlong text\n\n</details>\nthis", 2),
        (pacing.words, "code:\n```\nx = 1\n```\n", 1),
        (pacing.words, "| a | b c |\n|---|---|\n| 1 | 2 |", 5),
        (pacing.plotting_lines, "import matplotlib.pyplot as plt\nx = 1", 0),
        (pacing.plotting_lines, "fig, ax = plt.subplots()\nax.plot(\n    x,\n    y)\nplt.show()", 5),
        (pacing.plotting_lines, "fig, (left, right) = plt.subplots(1, 2)\nz = f(x)\nleft.plot(z)\n", 2),
        (pacing.plotting_lines, "for ax, x in zip(axes, data):\n    y = g(x)\n    ax.plot(y)", 2),
        (pacing.plotting_lines, "curves.curves(ax, [('one', x, y, 'blue', '-')])\nplt.show()", 2),
        (pacing.plotting_lines, "if ax:\n    pass\nelse:\n    x = 1", 1),
    ],
)
def test_words_and_plotting_lines(what, text, count):
    assert what(text) == count


def test_output_lines_are_those_of_text():
    stream = nbformat.v4.new_output("stream", text="a\nb\n")
    figure = nbformat.v4.new_output("display_data", {"image/png": "x", "text/plain": "<Figure>"})
    plain = nbformat.v4.new_output("execute_result", {"text/plain": "1\n2\n3"})
    assert pacing.output_lines(nbformat.v4.new_code_cell("", outputs=[stream, figure, plain])) == 5


def test_what_is_seen_of_a_kernel():
    """Cells, regions and the new lines of diffs count; folds and what a diff takes away do not."""
    path = next(p for p in LECTURES if p.stem.startswith("03"))
    lesson = pacing.read_lesson(path)
    markdown = "`k.py`\n\n```python\n12  m_i = m_new\n```\n\n<details>\n\n```python\n13  l_i = 1\n```\n</details>"
    gone = "<pre><code>- x = 3\n+ 12  y = 4\n  13  z = 5</code></pre>"
    outputs = [nbformat.v4.new_output("display_data", {"text/markdown": text}) for text in (markdown, gone)]
    name, lines, seen = pacing.kernel_lines(lesson, pacing.ROOT, [nbformat.v4.new_code_cell("a = 1", outputs=outputs)])
    assert name == "flash_attention_forward_kernel" and "m_i = m_new" in lines
    assert seen == {"a=1", "m_i=m_new", "y=4", "z=5"}
