"""Whatever a host part launches goes into PyTorch's stream: the course's own, and each answer that has a host part."""

import re
from pathlib import Path

import pytest
from lesson_answers import answers_of, asked

from flashlab.exercises.registry import find
from flashlab.simt.source import blank_comments

ROOT = Path(__file__).resolve().parents[2]
STREAM = re.compile(r"\(cudaStream_t\)\s*stream(?=\s*>>>)")
# The first of each way to be judged; the rest launch in the same lines.
SHORT = {"6.1", "7.2", "7.10", "8.8", "9.7"}


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.long)], ids=["few", "all"])
@pytest.mark.parametrize("phase", [6, 7, 8, 9, 11])
def test_an_answer_that_launches_elsewhere_is_rejected(phase, few):
    for id in asked(phase, "solutions"):
        answers = answers_of(id, "solutions")
        elsewhere = [STREAM.sub("nullptr", x) if isinstance(x, str) else x for x in answers]
        if elsewhere != answers and (id in SHORT or not few):
            with pytest.raises(Exception, match="is not put into the stream that the function is given") as caught:
                find(id).run(*elsewhere)
            assert caught.value.diagnosis == "wrong-stream"


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "src/lessons").glob("[0-9]*.py"), *(ROOT / "src/flashlab/kernels").rglob("*.cu")]),
    ids=lambda p: p.stem,
)
def test_the_course_launches_in_the_stream_it_is_given(path):
    text = path.read_text()
    code = blank_comments(text) if path.suffix == ".cu" else re.sub(r"^#.*|//.*", "", text, flags=re.M)
    for launch in re.finditer(r"<<<(?!>)(.*?)>>>", code, re.S):
        last = launch[1].rpartition(",")[2].strip()
        assert last in ("(cudaStream_t)stream", "s", "stream"), f"line {code[: launch.start()].count(chr(10)) + 1}"
