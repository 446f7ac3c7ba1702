"""CUDA answers in a style of their own, with one slip: what change of the learner's lines makes them right."""

import time

import pytest

from flashlab.check import cuda_mend
from flashlab.check.changes import edited
from flashlab.check.cuda_index import TRIALS
from flashlab.exercises import exercises

exercises()

TILE = """
        int visible = p.seq_k - n_start;
        if (p.causal) visible = min(visible, m_start + row + diagonal + 1 - n_start);
        float s[BLOCK_N] = {};
        for (int c = 0; c < OWN; c++)
            for (int n = 0; n < BLOCK_N; n++) s[n] = dot(k_smem[n][c * 2 + odd], q_rmem[c], s[n]);
        float top = -INFINITY;
        for (int n = 0; n < BLOCK_N; n++) {
            s[n] = (s[n] + __shfl_xor_sync(~0u, s[n], 1)) * scale_log2;
            if (n >= visible) s[n] = -INFINITY;
            top = fmaxf(top, s[n]);
        }
        const float fresh = fmaxf(top, m_i);
        if (fresh != -INFINITY) {
            const float shrink = exp2_approx(m_i - fresh);
            for (int c = 0; c < OWN; c++) acc[c] = scaled(shrink, acc[c]);
            float total = 0.f;
            for (int n = 0; n < BLOCK_N; n++) {
                const float w = exp2_approx(s[n] - fresh);
                total += w;
                for (int c = 0; c < OWN; c++) acc[c] = axpy(w, v_smem[n][c * 2 + odd], acc[c]);
            }
            l_i = fmaf(l_i, shrink, total);
            m_i = fresh;
        }
"""  # fmt: skip
TRANSPOSE = """#include "simt.h"
__global__ void transpose(const float* x, float* y, int rows, int cols) {
    __shared__ float tile[32][33];
    int tx = threadIdx.x, ty = threadIdx.y, left = blockIdx.x * 32, top = blockIdx.y * 32;
    for (int k = 0; k < 32; k += 8)
        if (top + ty + k < rows && left + tx < cols) tile[ty + k][tx] = x[(top + ty + k) * cols + left + tx];
    __syncthreads();
    for (int k = 0; k < 32; k += 8)
        if (left + ty + k < cols && top + tx < rows) y[(left + ty + k) * rows + top + tx] = tile[tx][ty + k];
}
extern "C" int run(const float* x, float* y, int rows, int cols, void* stream) {
    transpose<<<dim3((cols + 31) / 32, (rows + 31) / 32), dim3(32, 8), 0, (cudaStream_t)stream>>>(x, y, rows, cols);
    return (int)cudaGetLastError();
}
"""

MERGE = """#include "simt.h"
__global__ void row_lse(const float* x, float* lse, int n) {
    const float* row = x + blockIdx.x * n;
    float m = -INFINITY, l = 0.f;
    for (int i = threadIdx.x; i < n; i += 32) {
        const float v = row[i];
        if (v > m) {
            l = l * expf(m - v) + 1.f;
            m = v;
        } else {
            l += expf(v - m);
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        const float m_other = __shfl_xor_sync(0xffffffffu, m, mask), l_other = __shfl_xor_sync(0xffffffffu, l, mask);
        const float m_new = fmaxf(m, m_other);
        const float a = m == -INFINITY ? 0.f : expf(m - m_new);
        const float b = m_other == -INFINITY ? 0.f : expf(m_other - m_new);
        l = l * a + l_other * b;
        m = m_new;
    }
    if (threadIdx.x == 0) lse[blockIdx.x] = m + logf(l);
}
extern "C" int run(const float* x, float* lse, int rows, int n, void* stream) {
    row_lse<<<rows, 32, 0, (cudaStream_t)stream>>>(x, lse, n);
    return (int)cudaGetLastError();
}
"""
TURNS = """constexpr int FIRST = 4, MEET = 256;
__device__ int giver(int consumer) { return consumer == CONSUMERS - 1 ? 0 : consumer + 1; }
__device__ void take_turn(int consumer) {
    named_barrier_sync(FIRST + giver(consumer), MEET);
}
__device__ void pass_turn(int consumer) {
    named_barrier_arrive(FIRST + consumer, MEET);
}
__device__ void begin(int consumer) {
    if (consumer == 0) pass_turn(consumer);
}
__device__ void end(int consumer) {
    if (giver(consumer) == 0) take_turn(consumer);
}
"""

BASE_2 = TRIALS["6.4"].kept["text"].replace("expf", "exp2f").replace("logf", "log2f")

ONE_ROUND = edited(TRANSPOSE, [("k < 32; k += 8)\n        if (top", "k < 8; k += 8)\n        if (top")])
SWIZZLED = edited(TRANSPOSE, [("tile[32][33]", "tile[32][32]"), ("tile[ty + k][tx]", "tile[ty + k][tx ^ (ty + k)]")])

# exercise, text, (old, new), what is said
SLIPS = [
    ("6.6", TILE, ("m_i = fresh;", "m_i = top;"), "`top` stands where `fresh` belongs"),
    ("6.6", TILE, ("            m_i = fresh;\n", ""), "the line `m_i = fresh` is missing"),
    ("6.6", TILE, ("exp2_approx(m_i - fresh)", "exp2_approx(fresh - m_i)"),
     "`fresh - m_i` stands where `m_i - fresh` belongs"),
    ("6.6", TILE, ("exp2_approx(s[n] - fresh)", "exp2_approx(s[n])"), "the term `-fresh` is missing in `s[n]`"),
    ("6.6", TILE, ("__shfl_xor_sync(~0u, s[n], 1)", "__shfl_sync(~0u, s[n], (threadIdx.x + 1) % 32)"),
     "`__shfl_sync(~0u, s[n], (threadIdx.x + 1) % 32)` stands where `__shfl_xor_sync(~0u, s[n], 1)` belongs"),
    ("6.3", TRANSPOSE, ("    __syncthreads();\n", ""), "`__syncthreads()` is missing behind "),
    ("6.3", TRANSPOSE, ("(left + ty + k) * rows", "(left + ty + k) * cols"), "`cols` stands where `rows` belongs"),
    ("6.3", TRANSPOSE, ("= blockIdx.x * 32, top = blockIdx.y * 32", "= blockIdx.y * 32, top = blockIdx.x * 32"),
     "`blockIdx.y * 32` and `blockIdx.x * 32` are exchanged"),
    ("6.3", ONE_ROUND, ("k < 32; k += 8)\n        if (left", "k < 8; k += 8)\n        if (left"),
     "`8` stands where `32` belongs, both times"),
    ("6.3", SWIZZLED, ("tile[tx][ty + k]", "tile[tx][ty+k]"), "`ty + k` stands where `ty + k ^ tx` belongs"),
    ("6.6", TILE, ("fmaf(l_i, shrink, total)", "fmaf(l_i, total, shrink)"),
     "`fmaf(l_i, total, shrink)` stands where `fmaf(l_i, shrink, total)` belongs"),
    ("6.4", TRIALS["6.4"].kept["text"], ("step < 32", "step <= 32"),
     "`step <= 32` stands where `step < 32` belongs: 32 lanes take five rounds"),
    ("6.4", BASE_2, ("step *= 2", "step += step"), "`exp2f` and `log2f` stand where `expf` and `logf` belong"),
    ("9.6", TRIALS["9.6"].kept["text"], ("cp_async_wait<IN_FLIGHT>();\n        __syncthreads();",
     "__syncthreads();\n        cp_async_wait<IN_FLIGHT>();"),
     "the line `__syncthreads()` comes too early, before `cp_async_wait<IN_FLIGHT>()`"),
    ("6.4", MERGE, ("l * a + l_other", "l + l_other"), "the factor `a` is missing in `l`, in `l + l_other * b`"),
    ("6.4", MERGE, ("u, l, mask)", "u, l, 16)"), "`16` stands where `mask` belongs"),
    ("6.4", MERGE, (" + 1.f;", ";"), "`l += expf(v - m)` is missing behind `m = v`"),
    ("11.10", TURNS, ("if (giver(consumer) == 0)", "if (consumer == 0)"),
     "`0` stands where `CONSUMERS - 1` belongs, in `consumer == 0`, the second of 2"),
    ("11.10", TURNS, ("sync(FIRST + giver(consumer)", "arrive(FIRST + giver(consumer)"),
     "`named_barrier_arrive` stands where `named_barrier_sync` belongs, in `named_barrier_arrive(FIRST + giver"),
    ("9.6", TRIALS["9.6"].kept["text"], ("i = 1", "i = 2"), "`2` stands where `1` belongs, where `i` is made"),
]  # fmt: skip


QUICK = ("`fresh - m_i`", "the line", "`cols`", "`step", "`2`", "the factor `a`", "`0`")


@pytest.mark.parametrize(
    "id, text, edit, words",
    [pytest.param(*x, id=x[3], marks=[] if x[3].startswith(QUICK) else pytest.mark.long) for x in SLIPS],
)
def test_a_slip_is_told_in_the_learners_words(id, text, edit, words, monkeypatch):
    monkeypatch.setattr(cuda_mend, "_SECONDS", 60.0)  # on a machine with other work
    assert cuda_mend.mended(TRIALS[id], TRIALS[id].place(edited(text, [edit]))).startswith(words)


TWO = edited(TILE, [("m_i = fresh;", "m_i = top;"), ("s[n] - fresh", "s[n]")])


@pytest.mark.parametrize("text", [TILE, pytest.param(TWO, marks=pytest.mark.long), "        no CUDA at all (;\n"])
def test_nothing_is_said_of_a_right_answer_or_of_two_slips(text, monkeypatch):
    monkeypatch.setattr(cuda_mend, "_SECONDS", 60.0)
    assert cuda_mend.mended(TRIALS["6.6"], TRIALS["6.6"].place(text)) == ""


def test_a_value_is_told_where_no_change_mends_it(monkeypatch):
    monkeypatch.setattr(cuda_mend, "_OF_VALUES", 60.0)
    monkeypatch.setitem(cuda_mend._TRIED, "6", cuda_mend._FIRST + 1)  # and little else
    text = edited(TRANSPOSE, [("x[(top + ty + k) * cols + left + tx]", "x[(top + ty) * cols + left + tx + k]")])
    told = cuda_mend.mended(TRIALS["6.3"], TRIALS["6.3"].place(text))
    wrong = "`(top + ty) * cols + left + tx + k`, or what it reads, is wrong"
    where = "in thread 0 of block 0, the 4th time"
    of_run = {f"{wrong}: it is 24 {where}, and should be {24 * cols}" for cols in (96, 70, 5)}
    assert told in of_run  # the quickest comes first


def test_the_quickest_of_the_wrong_runs_comes_first():
    class Trials:
        runs = range(3)

        def gives(self, module, i):
            time.sleep((0.06, 0.0, 0.03)[i])
            return i == 1

    wrong, right, longest = cuda_mend._by_time(Trials(), None)
    assert (wrong, right) == ([2, 0], [1]) and longest > 0.05
