"""A learner's CUDA becomes a sentence: the blank, the compiler's words, what the emulator found, in one order."""

import pytest
import torch
from failing import failure_of

from flashlab.check import cuda_answer
from flashlab.check.cuda_answer import Answer, Source, does_not_compile, failure, source_of, text_of
from flashlab.check.running import heeding_warnings
from flashlab.cuda.errors import compile_error
from flashlab.kernels import step
from flashlab.kernels.series import FOLDER
from flashlab.simt import Finding
from flashlab.simt.conversions import conversions

SUM = """#include "simt.h"
__global__ void sum_kernel(const float* x, float* y) {
    __shared__ float part_smem[64];
    part_smem[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = part_smem[63 - threadIdx.x];
}
extern "C" int run(const float* x, float* y, void* stream) {
    sum_kernel<<<1, 64, 0, (cudaStream_t)stream>>>(x, y);
    return cudaGetLastError();
}
"""


def test_a_blank_and_what_is_no_text():
    assert text_of("code", "kernel") == "code"
    with pytest.raises(NotImplementedError):
        text_of(f"int x = /* {cuda_answer.HOLE} */", "kernel")
    error = failure_of(text_of, 3, "kernel")
    assert error.diagnosis == "wrong-type" and str(error) == "kernel should be the CUDA text, a string, not a int"


def test_what_ended_the_launch_is_told_first_then_a_race_then_the_rest():
    rest, other = Finding("uninitialised-shared", "reads nothing"), Finding("index-out-of-bounds", "reads too far")
    race, end = Finding("race", "two threads"), Finding("deadlock", "all wait", fatal=True)
    whole = Source("", "kernel")
    assert failure([rest, other, race, end], whole).diagnosis == "deadlock"
    assert failure([rest, other, race], whole, "n=3").diagnosis == "race"
    assert failure([rest, other], whole).diagnosis == "uninitialised-shared"
    assert failure([other, rest], whole, "n=3").case == "n=3"


def test_a_finding_names_the_learners_line():
    finding = Finding("race", "thread 1 writes in line 2 (called from line 5) what thread 2 read in line 6")
    text = "a;\nb;  // why\nc;\nd;\ne;\nf;\n"
    assert Source(text, "k", 5, 6).told(finding) == (
        "thread 1 writes in line 2 of k.cu, `b;` (called from line 1 of your code, `e;`) what thread 2 read in "
        "line 2 of your code, `f;`"
    )
    assert Source(text, "k", 2, 3).told(finding).startswith("thread 1 writes in line 1 of your code, `b;`, what")
    assert "(called from line 5, `e;`)" in Source(text, "k").told(finding)
    assert Source("f(a, (b));\n", "k").told(Finding("race", "line 1: no")) == "line 1, `f(a, (b));`: no"


@pytest.mark.parametrize("log", ["k.cu:4:9: error: no such thing", "k.cu(4): error: no such thing"])
def test_a_compilers_error_is_one_sentence(log):
    error = compile_error("k.cu", SUM, log, "a compiler")
    said = does_not_compile(error, Source(SUM, "k", 3, 7))
    assert said.diagnosis == "does-not-compile"
    assert str(said) == (
        "it does not compile: line 2 of your code, `part_smem[threadIdx.x] = x[threadIdx.x];`, error: no such thing"
    )
    elsewhere = compile_error("k.cu", SUM, log.replace("k.cu", "/include/ptx.cuh"), "a compiler")
    assert str(does_not_compile(elsewhere, Source(SUM, "k"))).endswith("compile: ptx.cuh error: no such thing")
    wordless = compile_error("k.cu", SUM, "\nout of memory\n", "a compiler")
    assert str(does_not_compile(wordless, Source(SUM, "k"))) == "it does not compile: out of memory"


def test_an_answer_is_run_in_both_builds():
    answer, x = Answer(SUM, "sum"), torch.arange(64.0)
    for check in (True, False):
        y = torch.zeros(64)
        counters = answer.run(x, y, case="64", check=check)
        assert torch.equal(y, x.flip(0)) and counters["barriers"] == 1
    assert answer.module(check=True) is answer.module(check=True)


def test_a_wrong_answer_is_told():
    x, y = torch.zeros(64), torch.zeros(64)
    racy = failure_of(Answer(SUM.replace("__syncthreads();", ""), "sum").run, x, y, case="64 numbers", check=True)
    assert (racy.diagnosis, racy.case) == ("race", "64 numbers") and "line 4 of your code" in str(racy)
    gone = failure_of(Answer(SUM.replace("int run(", "int walk("), "sum").run, x, y, case="", check=True)
    assert gone.diagnosis == "wrong-entry" and "`run`" in str(gone)
    fewer = failure_of(
        Answer(SUM.replace("float* y, void", "float* y, int n, void"), "sum").run, x, y, case="", check=True
    )
    assert fewer.diagnosis == "wrong-entry" and "the parameters of `run` should stay" in str(fewer)
    broken = failure_of(Answer(SUM.replace("63 -", "63 ="), "sum").run, x, y, case="", check=True)
    assert broken.diagnosis == "does-not-compile" and "line 6 of your code" in str(broken)


def test_a_float32_kernel_is_examined_in_float32():
    verdict = cuda_answer.examine(
        step("p6_1_fa1"), dtype=torch.float32, probes=cuda_answer.PROBES[:1], max_seq=70, fast=False
    )
    assert verdict.cases > 10 and verdict.counters["global_loads"] > 0


@pytest.mark.parametrize(
    "extra, warned",
    [
        ("float a; y[i] = a + n;", "line 3 of your code, `float a; y[i] = a + n;`, "),
        ("unsigned u = 3; int unused; y[i] = i < u;", ""),
    ],
)
def test_a_compilers_warning_reaches_the_learner_and_its_noise_does_not(extra, warned):
    text = f"""#include "simt.h"
__global__ void fill(float* y, int n) {{ const int i = threadIdx.x;
    {extra}
}}
extern "C" int run(float* y, int n, void* stream) {{
    fill<<<1, 32, 0, (cudaStream_t)stream>>>(y, n);
    return (int)cudaGetLastError();
}}
"""
    with heeding_warnings() as warnings:
        Answer(text, "fill").run(torch.zeros(32), 32, case="one warp", check=False)
    assert len(warnings) == bool(warned)
    assert not warned or (warnings[0].startswith(warned) and "uninitialized" in warnings[0])


STRIDED = """#include "problem.cuh"
__global__ void kernel(const Problem p, float* y, float x) {
    WRITTEN
}
"""


@pytest.mark.parametrize(
    "written, found",
    [
        ("int at = threadIdx.x * p.q_stride.row + 1; y[at] = x;", ("offset", "threadIdx.x * p.q_stride.row + 1")),
        ("unsigned at = 2 * p.q_stride.head; y[at] = x;", ("offset", "2 * p.q_stride.head")),
        ("int l = 0; l += x * 2.5f; y[l] = x;", ("fraction", "l += x * 2.5f")),
        ("int64_t at = threadIdx.x * p.q_stride.row; y[at] = x;", None),
        ("const int stride = p.q_stride.row; y[(int64_t)threadIdx.x * stride] = x;", None),
        ("y[threadIdx.x * p.q_stride.row] = x * 3;", None),
        ("float half = 7 / 2; uint32_t bits = 3u * threadIdx.x; y[bits] = half;", None),
    ],
)
def test_what_is_lost_where_it_is_stored(written, found):
    text = STRIDED.replace("WRITTEN", written)
    got = [x[1:] for x in conversions(text, name="kernel.cu", include_dirs=[FOLDER])]
    assert got == ([found] if found else [])


def test_locals_without_a_value_are_filled_with_nan():
    text = """struct State { float m; };
__global__ void kernel(float* y) {
    __shared__ float tile[4];
    float acc[2][4], m = f(1, 2), l;  // float said;
    for (int i = 0; i < 4; i++) { float4 v; v = zero; }
    float one = 1, two[] = {1, 2};
}
"""
    filled = cuda_answer.with_nan(text)
    assert filled.count("\n") == text.count("\n")
    assert filled.splitlines()[3] == (
        "    float acc[2][4], m = f(1, 2), l; flashlab_unset(acc); flashlab_unset(l);  // float said;"
    )
    assert "{ float4 v; flashlab_unset(v); v = zero; }" in filled
    assert filled.count("flashlab_unset(") == 1 + 3, "not a member, what is shared, or what has a value"
    assert cuda_answer.with_nan("int x;") == "int x;"


@pytest.mark.parametrize("name", ["p6_2_loop_order", "p7_naive"])
def test_what_a_kernel_reads_before_it_is_set_is_found(name):
    text, dtype = source_of(step(name)).text, torch.float32 if name.startswith("p6") else torch.float16
    cuda_answer.expect_set(Source(text, name, 1, 10), dtype=dtype)
    unset = text.replace("acc[c] = make_float4(0, 0, 0, 0);", "").replace("acc[O_TILES][4] = {};", "acc[O_TILES][4];")
    assert unset != text
    error = failure_of(cuda_answer.expect_set, Source(unset, name, 1, 10), dtype=dtype)
    assert error.diagnosis == "uninitialised-local" and "o is NaN at [0, 0, 0, 0]" in str(error)
