"""The changes of CUDA solutions that were run ahead, and that an answer in other words is told by them."""

import json

import pytest
from lesson_answers import answers_of

from flashlab.check import CheckFailed, cuda_text
from flashlab.check.changes import changes
from flashlab.check.cuda_index import TRIALS, joined, parted
from flashlab.check.cuda_text import CudaText
from flashlab.exercises.registry import exercises, find

exercises()  # which fills TRIALS

ADD_BIAS = """#include "simt.h"
__global__ void add(const float* in, const float* bias, float* out, int rows, int cols) {
    int c = threadIdx.x + blockDim.x * blockIdx.x;
    int r = threadIdx.y + blockDim.y * blockIdx.y;
    if (r < rows && c < cols) { int at = c + r * cols; out[at] = bias[c] + in[at]; }
}
extern "C" int run(const float* x, const float* bias, float* y, int rows, int cols, void* stream) {
    add<<<dim3((cols + 31) / 32, (rows + 3) / 4), dim3(32, 4), 0, (cudaStream_t)stream>>>(x, bias, y, rows, cols);
    return (int)cudaGetLastError();
}
"""


def told(id, text):
    with pytest.raises(CheckFailed) as caught:
        find(id).run(*parted(text))
    sentence, *_evidence = caught.value.sentence.split("\n")
    assert len(sentence) < 400
    return sentence


@pytest.mark.parametrize("id", TRIALS)
def test_what_was_run_ahead_is_in_sync(id):
    kept = json.loads(TRIALS[id].path.read_text())
    assert kept["digest"] == TRIALS[id].digest(joined(answers_of(id, "solutions"))), (
        f"python tools/cuda_changes.py {id}"
    )


@pytest.mark.parametrize("id", [pytest.param(x, marks=[] if x == "6.1" else pytest.mark.long) for x in TRIALS])
def test_a_row_is_told(id):
    text = joined(answers_of(id, "solutions"))
    for row in TRIALS[id].rows[:1]:
        for old, new in row.edits:
            text = text.replace(old, new)
        assert row.sentence in told(id, text)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("bias[c]", "bias[0]", "`bias[0]` stands where `bias[col]` belongs"),
        ("blockDim.y *", "blockDim.x *", "`blockDim.x` stands where `blockDim.y` belongs"),
        ("r < rows", "r < rows - 1", "one too large, in `row >= rows`"),
        ("bias[c] + in[at]", "in[at] - bias[c]", "`bias[col]` has the wrong sign"),
        ("r < rows && c < cols", "c < cols", "past its end"),
    ],
)
def test_an_answer_in_other_words_is_told_why(old, new, words):
    assert find("6.1").run(ADD_BIAS)
    assert words in told("6.1", ADD_BIAS.replace(old, new))


def test_a_text_is_put_together_as_it_was():
    text = CudaText(
        "const float x = p->q ? (float)*a : -b[i / 2], y = 0.f; for (int i = 0; i < n; i++) c[i] += f<T>(x, ~0u);", True
    )
    joined = " ".join(text.all_in_one([]).split())
    assert "p->q ? (float)*a : -b[i / 2]; const float y = 0.0f;" in joined and "c[i] += f < T >(x, ~0u);" in joined
    said = {change.said for change in changes(text, None, cuda_text)}
    assert {"`n` is one too small", "`p->q` is not asked"} & said
