"""Phase 6's checks: right answers in other styles pass. Wrong ones are in `test_told_cuda.py`."""

import pytest
import torch
from lesson_answers import changed_texts as changed
from lesson_answers import failure

from flashlab.attention.cost import FA1_BLOCK_N, FA2_BLOCK_M
from flashlab.check.cuda_answer import region
from flashlab.cuda import load_inline
from flashlab.exercises.phase_06 import causal_bytes_read
from flashlab.exercises.registry import find
from flashlab.kernels import steps

# Another way to write 6.6: one key after the other, the online softmax in steps of one.
KEY_BY_KEY = """
        const int last = p.causal ? min(p.seq_k - 1, m_start + row + diagonal) : p.seq_k - 1;
        for (int n = 0; n < BLOCK_N; n++) {
            float x = 0;
            for (int c = 0; c < OWN; c++) x = dot(k_smem[n][odd + 2 * c], q_rmem[c], x);
            x = (x + __shfl_sync(~0u, x, threadIdx.x % 32 ^ 1)) * p.scale * LOG2E;
            if (n_start + n > last) continue;
            const float m_new = fmaxf(m_i, x), old = exp2f(m_i - m_new), e = exp2f(x - m_new);
            m_i = m_new, l_i = l_i * old + e;
            for (int c = 0; c < OWN; c++) acc[c] = axpy(e, v_smem[n][odd + 2 * c], scaled(old, acc[c]));
        }
"""


def test_two_lanes_that_go_key_by_key():
    assert find("6.6").run(KEY_BY_KEY)


def test_the_lectures_loop_is_not_the_answer():
    """In it a thread has all chunks of its row."""
    assert "index 8 of an array of type float4" in str(failure("6.6", region(steps(6)[1], "one tile")))


@pytest.mark.long
def test_the_counts_are_those_of_the_emulator():
    q, k, v = (torch.randn(1, 1, 200, 64) for _ in range(3))
    counted = causal_bytes_read(200, 64, FA2_BLOCK_M, FA1_BLOCK_N)
    for step, bytes_read in zip(steps(6)[:2], counted, strict=True):
        module = load_inline(step, check=True)
        module.forward(q, k, v, causal=True)
        assert module.report.counters["global_load_bytes"] == bytes_read


@pytest.mark.parametrize(
    "rows_of_a_tile, words",
    [
        (lambda N, n, BLOCK_N: max(0, N - n - BLOCK_N), "own rows too"),
        (lambda N, n, BLOCK_N: N // 2, "half of the rows is only nearly right"),
    ],
)
def test_the_visits_of_6_7(rows_of_a_tile, words):
    def visited(N, D, BLOCK_M, BLOCK_N):
        visits = sum(rows_of_a_tile(N, n, BLOCK_N) for n in range(0, N, BLOCK_N))
        keys = sum(min(N, m + BLOCK_M) for m in range(0, N, BLOCK_M))
        return 4 * (2 * N * D + visits * (2 * D + 2) + 2 * N), 4 * (N * D + 2 * D * keys)

    assert words in str(failure("6.7", visited))


# Another way to write 6.8: a warp per block, one row per lane, exponentials to base e, rows in plain floats (and 7.10).
ONE_WARP = """
#include "problem.cuh"

constexpr int ROWS = 32, KEYS = 16;

__global__ void attention(Problem p) {
    __shared__ float k[KEYS][HEAD_DIM], v[KEYS][HEAD_DIM];
    const int tiles = (p.seq_q + ROWS - 1) / ROWS, which = blockIdx.x / tiles;
    const int batch = which / p.heads, head = which % p.heads, kv = head * p.kv_heads / p.heads;
    const int lane = threadIdx.x, row = blockIdx.x % tiles * ROWS + lane;
    const bool exists = row < p.seq_q;
    const int sees = !exists ? 0 : p.causal ? min(p.seq_k, row + p.seq_k - p.seq_q + 1) : p.seq_k;
    float q[HEAD_DIM], o[HEAD_DIM], m = -INFINITY, l = 0;
    const T* from = rows_of(p.q, p.q_stride, batch, head, row);
    for (int d = 0; d < HEAD_DIM; d++) q[d] = exists ? (float)from[d] : 0, o[d] = 0;
    for (int start = 0; start < p.seq_k; start += KEYS) {
        __syncwarp();
        for (int i = lane; i < KEYS * HEAD_DIM; i += 32) {
            const int key = start + i / HEAD_DIM, d = i % HEAD_DIM;
            k[i / HEAD_DIM][d] = key < p.seq_k ? (float)rows_of(p.k, p.k_stride, batch, kv, key)[d] : 0;
            v[i / HEAD_DIM][d] = key < p.seq_k ? (float)rows_of(p.v, p.v_stride, batch, kv, key)[d] : 0;
        }
        __syncwarp();
        for (int n = 0; n < KEYS && start + n < sees; n++) {
            float s = 0;
            for (int d = 0; d < HEAD_DIM; d++) s += q[d] * k[n][d];
            const float m_new = fmaxf(m, s * p.scale), c = expf(m - m_new), e = expf(s * p.scale - m_new);
            m = m_new, l = l * c + e;
            for (int d = 0; d < HEAD_DIM; d++) o[d] = o[d] * c + e * v[n][d];
        }
    }
    if (!exists) return;
    for (int d = 0; d < HEAD_DIM; d++) rows_of(p.o, p.o_stride, batch, head, row)[d] = T(l > 0 ? o[d] / l : 0);
    p.lse[(int64_t)which * p.seq_q + row] = l > 0 ? m + logf(l) : -INFINITY;
}
extern "C" int forward(const Problem* p, void* stream) {
    const int blocks = p->batch * p->heads * ((p->seq_q + ROWS - 1) / ROWS);
    attention<<<blocks, 32, 0, (cudaStream_t)stream>>>(*p);
    return cudaGetLastError();
}
"""
LAUNCH = "    flash_forward<<<grid, THREADS, 0, (cudaStream_t)stream>>>(*p);\n"
NAMED = "    cudaStream_t queue = (cudaStream_t)stream;\n" + LAUNCH.replace("(cudaStream_t)stream", "queue")


@pytest.mark.parametrize("answer", [ONE_WARP, changed("6.8", (LAUNCH, NAMED))[0]], ids=["one warp", "a named stream"])
@pytest.mark.long
def test_any_right_kernel_is_accepted(answer):
    assert "rows" in find("6.8").run(answer)


def test_the_first_step_that_the_text_recommends_is_told_as_such():
    """A launch that stores zeros."""
    begin, end = ONE_WARP.index("    for (int start"), ONE_WARP.index("    if (!exists)")
    zeros = (ONE_WARP[:begin] + ONE_WARP[end:]).replace("l > 0 ? m + logf(l) : -INFINITY", "0")
    failed = failure("6.8", zeros)
    assert failed.diagnosis == "only-zeros" and "all of o is stored" in str(failed)
