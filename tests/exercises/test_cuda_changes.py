"""The changes of CUDA solutions that were run ahead, and that an answer in other words is told by them."""

import json

import pytest
from lesson_answers import accepted, answers_of, diagnosed, failure

from flashlab.check import cuda_mend, cuda_text
from flashlab.check.changes import changes, edited
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


@pytest.mark.parametrize("id", TRIALS)
def test_what_was_run_ahead_is_in_sync(id):
    kept = json.loads(TRIALS[id].path.read_text())
    assert kept["digest"] == TRIALS[id].digest(joined(answers_of(id, "solutions"))), (
        f"python tools/cuda_changes.py {id}"
    )


@pytest.mark.parametrize("id", TRIALS)
def test_it_is_known_why_a_change_does_not_show(id):
    assert [said for said, why in TRIALS[id].survivors(TRIALS[id].kept).items() if not why] == []


ROWS = [(id, row) for id, it in TRIALS.items() for row in it.rows]
BESIDE = {"one-consumer": "belongs"}  # a race, told by the line
CHANCE = ("no-fence", "counted-too-early")  # of 12.6: which of its races is met first, and told, is chance
QUICK = [next(x for x in ROWS if x[0] == id) for id in ("6.1", "7.8") if id in TRIALS]


@pytest.mark.parametrize(
    "id, row",
    [
        pytest.param(*x, id=f"{x[0]} {x[1].slug}", marks=[] if x in QUICK else pytest.mark.long)
        for x in ROWS
        if x[1].slug not in CHANCE
    ],
)
def test_a_row_is_told(id, row):
    text = edited(joined(answers_of(id, "solutions")), row.edits)
    told = failure(id, *parted(text)).sentence  # what two edits of a slug give alike is told as either
    if "this is the code as it was given" in told:  # a hunt's own bug, of which no cause is told
        assert find(id).untouched
        return
    said_of_it = [BESIDE.get(row.slug, row.sentence), *(x.sentence for x in TRIALS[id].rows if x.slug == row.slug)]
    assert any(x in told for x in said_of_it)


@pytest.mark.parametrize("id", [pytest.param(x, marks=[] if x in ("6.1", "7.5") else pytest.mark.long) for x in TRIALS])
def test_a_change_is_told(id):
    """The one in the middle of those that are kept, as a learner would have it."""
    it, text = TRIALS[id], joined(answers_of(id, "solutions"))
    whole, made = it._changes(text)
    kept = {(x[0], x[1]) for x in it.kept["changes"] if x[2] and not any(isinstance(y, str) for y in x[3])}
    shown = [x for x in made if (x.slug, it._noted(x)) in kept]
    change = shown[len(shown) // 2]
    failure(id, *parted(it.answer(whole, change)))


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("bias[c]", "bias[0]", "`0` stands where `c` belongs, in `bias[0]"),
        ("blockDim.y *", "blockDim.x *", "`blockDim.x` stands where `blockDim.y` belongs"),
        ("r < rows", "r < rows - 1", "`r < rows - 1` stands where `r <= rows - 1` belongs"),
        ("bias[c] + in[at]", "in[at] - bias[c]", "`in[at] - bias[c]` stands where `in[at] + bias[c]` belongs"),
        ("r < rows && c < cols", "c < cols", "past its end"),
    ],
)
def test_an_answer_in_other_words_is_told_why(old, new, words, monkeypatch):
    monkeypatch.setattr(cuda_mend, "_SECONDS", 60.0)  # on a machine with other work
    assert find("6.1").run(ADD_BIAS)
    assert words in str(failure("6.1", ADD_BIAS.replace(old, new)))


test_what_another_scale_or_build_shows = diagnosed(
    ("11.13", ("float x = m_i[r];", "float x = m_i[r] - 1;"), "wrong-with-a-large-scale"),
    ("9.3", ("n < O_TILES", "n < S_TILES"), "head-dim-64-alone"),
    ("9.4", ("float m_i = -INFINITY", "float m_i = -1e30f"), "wrong-value"),
    ("11.7", ("BLOCK_N, T>", "BLOCK_N, __half>"), "fp16-alone"),
    ("11.8", ("(end - n) * BLOCK_N", "(end - n) * BLOCK_M"), "head-dim-128-alone"),
    ("11.12", ("(int)cudaGetLastError()", "(int)cudaGetLastError() / 2"), "error-not-returned"),
    every=6,
)
test_a_space_more_is_as_right = accepted(
    ("11.10", ("take_turn(int", "take_turn (int")), ("11.12", ("Problem* p,", "Problem *p,"))
)


def test_a_text_is_put_together_as_it_was():
    text = CudaText(
        "const float x = p->q ? (float)*a : -b[i / 2], y = 0.f; for (int i = 0; i < n; i++) c[i] += f<T>(x, ~0u);", True
    )
    joined = " ".join(text.all_in_one([]).split())
    assert "p->q ? (float)*a : -b[i / 2]; const float y = 0.0f;" in joined and "c[i] += f < T >(x, ~0u);" in joined
    said = {change.said for change in changes(text, None, cuda_text)}
    assert {"`n` is one too small", "`p->q` is not asked"} & said
