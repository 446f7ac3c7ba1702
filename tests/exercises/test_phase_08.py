"""Phase 8's checks: right answers in other styles pass. Wrong ones are in `test_told_cuda.py`."""

import re

import pytest
from lesson_answers import answers_of, diagnosis

from flashlab.exercises import check, phase_08
from flashlab.kernels import regions, step
from flashlab.simt import run as emulator


@pytest.mark.parametrize(
    "place, slug",
    [
        (lambda row, chunk: chunk, "bank-conflicts"),
        (lambda row, chunk: chunk ^ (row // 2 % 8), "bank-conflicts"),
        (lambda row, chunk: (chunk + row) % 8, "not-a-permutation"),  # at 16 chunks
        (lambda row, chunk: chunk ^ row, "not-a-permutation"),
        (lambda row, chunk: chunk ^ row % 8, "of-the-lecture"),
        (lambda row, chunk: chunk // 8 * 8 + (chunk + row) % 8, "of-the-lecture"),
    ],
)
def test_a_wrong_swizzle(place, slug):
    assert diagnosis("8.2", place) == slug


@pytest.mark.long
def test_other_swizzles_are_welcome():
    assert check("8.2", lambda row, chunk: chunk ^ row % 8 ^ row % 8 // 2)
    assert check("8.2", lambda row, chunk: chunk // 8 * 8 + (chunk - row) % 8)
    at, other = answers_of("8.3", "solutions")[0], "row * ROW_BYTES + (column / 64 * 8 + (column / 8 + row) % 8) * 16"
    assert check("8.3", at.replace("offset ^ row % 8 * 16", other))


@pytest.mark.long
def test_a_repair_with_two_barriers():
    two_barriers = """        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;
        __syncthreads();
        load_kv(j + STAGES - 1);
        cp_async_wait<2 * STAGES - 2>();
        __syncthreads();
"""
    assert check("8.5", two_barriers)


def code(line):
    return re.sub(r"//.*", "", line).strip()


def test_the_parts_are_the_whole_kernel_and_say_nothing():
    source = phase_08.one_buffer_each().text
    assert set(phase_08._LETTERS) <= set(regions.regions(source))
    joined = "\n".join(phase_08.parts().values())
    left_out = ["", "}", "for (int j = 0; j < tiles; j++) {", *regions.region_text(source, "load K and V").split("\n")]
    lines = {code(line) for line in source.split("\n")} - set(map(code, left_out))
    assert lines <= {line.strip() for line in joined.split("\n")} and "//" not in joined


def test_v_may_be_waited_for_after_the_softmax():
    """Three barriers per tile, and V_j has the softmax to arrive too."""
    text, here = (
        answers_of("8.7", "solutions")[0],
        "    cp_async_wait<0>();\n    __syncthreads();         // all of V_j",
    )
    late = text.replace(here, "    __syncthreads();  // all of V_j")
    assert check("8.7", late.replace("    @E\n", "    cp_async_wait<1>();\n    __syncthreads();\n    @E\n"))


def test_a_comment_behind_a_part_is_no_other_part():
    parts = answers_of("8.7", "solutions")[0]
    assert phase_08._put_together(parts.replace("@K", "@K  // sizes")) == phase_08._put_together(parts)


def test_shared_memory_that_was_not_asked_for():
    text = step("p8_6_store").path.read_text()
    assert diagnosis("8.8", text.replace("    cudaFuncSetAttribute", "    //")) == "launch-configuration"


@pytest.mark.long
def test_a_loop_without_an_end_is_told_soon(monkeypatch):
    """After PATIENCE seconds of the kernel's own work, in which no block ends; others' work does not count."""
    assert emulator.PATIENCE <= 10
    monkeypatch.setattr(emulator, "PATIENCE", 2.0)
    assert diagnosis("8.7", answers_of("8.7", "solutions")[0].replace("j++", "")) == "timeout"
