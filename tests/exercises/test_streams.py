"""Whatever a host part launches goes into PyTorch's stream: the course's own, and each answer that has a host part."""

import re
from pathlib import Path

import pytest
from lesson_answers import answers_of, asked

from flashlab.exercises.registry import find
from flashlab.simt.source import blank_comments

ROOT = Path(__file__).resolve().parents[2]
STREAM = re.compile(r"\(cudaStream_t\)\s*stream(?=\s*>>>)")
# A list, as to find them runs five notebooks: where tests are collected, each process would, and build the emulator.
LAUNCHING = [
    "6.1", "6.2", "6.3", "6.4", "6.8", "7.3", "7.4", "7.5", "7.6", "7.8", "7.9", "7.10", "8.8", "9.7", "9.12",
    "11.12", "11.14",
]  # fmt: skip
# The first of each way to be judged; the rest launch in the same lines.
SHORT = {"6.1", "7.2", "7.10", "8.8", "9.7"}


def test_the_exercises_that_launch():
    def launches(id):
        return any(isinstance(text, str) and STREAM.search(text) for text in answers_of(id, "solutions"))

    of_phases = (id for phase in (6, 7, 8, 9, 11) for id in asked(phase, "solutions"))
    assert LAUNCHING == list(filter(launches, of_phases))


@pytest.mark.parametrize(
    "id", [id if id in SHORT else pytest.param(id, marks=pytest.mark.long) for id in LAUNCHING]
)  # fmt: skip
def test_an_answer_that_launches_elsewhere_is_rejected(id):
    answers = answers_of(id, "solutions")
    elsewhere = [STREAM.sub("nullptr", x) if isinstance(x, str) else x for x in answers]
    assert elsewhere != answers
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
