"""The checks of phase 6: right answers pass, and each typical wrong answer is told what is wrong with it.

The solutions are the ones of the lesson; most wrong answers are a solution with one piece of its text replaced.
"""

import re
from pathlib import Path

import pytest
import torch

from flashlab.attention.cost import FA1_BLOCK_N, FA2_BLOCK_M
from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import region
from flashlab.cuda import load_inline
from flashlab.exercises import check
from flashlab.exercises.phase_06 import causal_bytes_read
from flashlab.exercises.registry import exercises, find
from flashlab.kernels import steps

LESSON = Path(__file__).parents[2] / "src/lessons/06_cuda_scalar_exercises.py"
IDS = [f"6.{i}" for i in range(1, 9)]


def text(name, part="SOLUTION"):
    """The CUDA source called `name`, as the lesson's solution (or, with STARTER, its starter) has it."""
    blocks = re.findall(rf"^# BEGIN {part}\n(.*?)^# END {part}", LESSON.read_text(), re.M | re.S)
    found = [m[1] for b in blocks if (m := re.search(rf'^{name} = r"""(.*?)"""', b, re.M | re.S))]
    assert len(found) == 1
    return found[0]


def changed(name, *replacements):
    source = text(name)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


def rejected(id, *answers):
    with pytest.raises(CheckFailed) as caught:
        find(id).run(*answers)
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence and len(sentence) < 400
    return caught.value.diagnosis, sentence


ANSWERS = {
    "6.1": ("add_bias",),
    "6.2": ("block_sum",),
    "6.3": ("transpose",),
    "6.4": ("row_lse",),
    "6.5": ("which_rows",),
    "6.6": ("inner_loop",),
    "6.8": ("flash_attention",),
}


def test_the_phase_has_its_exercises():
    assert [e.id for e in exercises().values() if e.phase == 6] == IDS


@pytest.mark.parametrize("id, answers", [("6.6", [""]), ("6.5", [" "])])
def test_a_deleted_text_is_not_solved_yet(id, answers):
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers)
    assert caught.value.diagnosis == "not-solved-yet"


@pytest.mark.parametrize("id", ["6.1", "6.3", "6.4", "6.6", "6.8"])
def test_a_hole_is_not_solved_yet(id):
    with pytest.raises(CheckFailed) as caught:
        check(id, *(text(name, "STARTER") for name in ANSWERS[id]))
    assert caught.value.diagnosis == "not-solved-yet"


def test_what_is_no_source_is_refused():
    assert rejected("6.1", 7)[0] == "wrong-type"
    assert rejected("6.1", changed("add_bias", ("int run(", "int walk(")))[0] == "wrong-entry"


def test_a_compilers_message_quotes_the_line():
    diagnosis, sentence = rejected("6.1", changed("add_bias", ("+ bias[col];", "+ bias[col]")))
    assert diagnosis == "does-not-compile" and "expected" in sentence
    diagnosis, sentence = rejected("6.6", changed("inner_loop", ("m_i = m_new,", "m_i = m_nwe,")))
    assert diagnosis == "does-not-compile" and "of your code" in sentence and "m_nwe" in sentence


# ---- 6.1 and 6.2 ----------------------------------------------------------------------------------------------------


def test_neighbouring_threads_have_neighbouring_columns():
    source = changed(
        "add_bias",
        ("* blockDim.x + threadIdx.x", "* 32 + threadIdx.y * 8 + threadIdx.x % 8"),
        ("* blockDim.y + threadIdx.y", "* 4 + threadIdx.x / 8"),
    )
    assert rejected("6.1", source)[0] == "not-coalesced"


def test_a_strided_walk_is_told():
    swapped = changed(
        "add_bias",
        ("blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x * 32 + (threadIdx.x * 4 + threadIdx.y) / 4"),
        ("blockIdx.y * blockDim.y + threadIdx.y", "blockIdx.y * 4 + threadIdx.y"),
    )
    assert find("6.1").run(swapped)  # the same elements, computed in a roundabout way
    strided = changed(
        "add_bias",
        ("blockIdx.x * blockDim.x + threadIdx.x", "blockIdx.x * 32 + threadIdx.y + 4 * (threadIdx.x / 4)"),
        ("blockIdx.y * blockDim.y + threadIdx.y", "blockIdx.y * 4 + threadIdx.x % 4"),
    )
    assert rejected("6.1", strided)[0] == "not-coalesced"


def test_the_starter_of_the_sum_races_and_both_lines_are_named():
    diagnosis, sentence = rejected("6.2", text("block_sum", "STARTER"))
    assert diagnosis == "race" and "part_smem[threadIdx.x] += " in sentence and sentence.count(" in line ") == 2


def test_a_barrier_inside_the_if_is_no_remedy():
    source = text("block_sum", "STARTER").replace("+ half];", "+ half];\n            __syncthreads();")
    assert rejected("6.2", source)[0] in ("race", "divergent", "deadlock")


def test_one_thread_that_adds_everything_is_no_tree():
    source = re.sub(
        r"    for \(int half.*?\n    }\n",
        "    if (threadIdx.x == 0)\n        for (int i = 1; i < 128; i++) part_smem[0] += part_smem[i];\n"
        "    __syncthreads();\n",
        text("block_sum"),
        flags=re.S,
    )
    assert rejected("6.2", source)[0] == "no-tree"


# ---- 6.3 and 6.4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replacements, diagnosis",
    [
        ([("[32][33]", "[32][32]")], "bank-conflicts"),
        ([("    __syncthreads();", "    //")], "race"),
        (
            [
                ("if (col + i < cols && row + lane < rows) y[(col + i) * rows + row + lane] = tile_smem[lane][i]",
                 "if (col + lane < cols && row + i < rows) y[(col + lane) * rows + row + i] = tile_smem[i][lane]"),
            ],
            "not-coalesced",
        ),
    ],
)  # fmt: skip
def test_wrong_transposes(replacements, diagnosis):
    assert rejected("6.3", changed("transpose", *replacements))[0] == diagnosis


def test_a_row_is_read_once():
    loop = "    for (int i = threadIdx.x"
    twice = f"{loop}; i < n; i += 32) m = fmaxf(m, row[i]);\n{loop}"
    assert rejected("6.4", changed("row_lse", (loop, twice)))[0] == "read-twice"


def test_a_row_in_pieces_is_not_coalesced():
    source = changed(
        "row_lse",
        ("for (int i = threadIdx.x; i < n; i += 32) {",
         "const int each = (n + 31) / 32;\n"
         "    for (int i = threadIdx.x * each; i < min(n, (threadIdx.x + 1) * each); i++) {"),
    )  # fmt: skip
    assert rejected("6.4", source)[0] in ("not-coalesced", "read-twice")


# ---- 6.5 and 6.6 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replacements, diagnosis",
    [
        ([("acc[c] = scaled(correction, acc[c]);", "")], "o-not-rescaled"),
        ([("l_i = l_i * correction + l_tile", "l_i = l_i + l_tile")], "l-not-rescaled"),
        ([("n < keys ? s[n] * scale_log2 : -INFINITY", "s[n] * scale_log2")], "always-one-branch"),
        ([("v_smem[n][c]", "v_smem[n + 1][c]")], "index-out-of-bounds"),
    ],
)
def test_wrong_inner_loops(replacements, diagnosis):
    found, _ = rejected("6.6", changed("inner_loop", *replacements))
    assert diagnosis is None or found == diagnosis


def test_the_solution_of_the_milestone_is_the_kernels_own_loop():
    def code(lines):
        stripped = (re.sub(r"//.*", "", line).split() for line in lines)
        return sorted(" ".join(words) for words in stripped if words)

    assert code(region(steps(6)[1], "one tile").splitlines()) == code(text("inner_loop").splitlines())


# ---- 6.7 ------------------------------------------------------------------------------------------------------------


def test_the_counts_are_those_of_the_emulator():
    q, k, v = (torch.randn(1, 1, 200, 64) for _ in range(3))
    counted = causal_bytes_read(200, 64, FA2_BLOCK_M, FA1_BLOCK_N)
    for step, bytes_read in zip(steps(6)[:2], counted, strict=True):
        module = load_inline(step, check=True)
        module.forward(q, k, v, causal=True)
        assert module.report.counters["global_load_bytes"] == bytes_read


# ---- 6.8 ------------------------------------------------------------------------------------------------------------

STEP2 = steps(6)[1].path.read_text()

# Another way to write it: a warp per block, one row per lane, exponentials to base e, rows in plain floats.
ONE_WARP = """
#include "problem.cuh"

constexpr int ROWS = 32, KEYS = 16;

__global__ void attention(Problem p) {
    __shared__ float k[KEYS][64], v[KEYS][64];
    const int tiles = (p.seq_q + ROWS - 1) / ROWS, which = blockIdx.x / tiles;
    const int batch = which / p.heads, head = which % p.heads, kv = head * p.kv_heads / p.heads;
    const int lane = threadIdx.x, row = blockIdx.x % tiles * ROWS + lane;
    const bool exists = row < p.seq_q;
    const int sees = !exists ? 0 : p.causal ? min(p.seq_k, row + p.seq_k - p.seq_q + 1) : p.seq_k;
    float q[64], o[64], m = -INFINITY, l = 0;
    for (int d = 0; d < 64; d++) q[d] = exists ? rows_of(p.q, p.q_stride, batch, head, row)[d] : 0, o[d] = 0;
    for (int start = 0; start < p.seq_k; start += KEYS) {
        __syncwarp();
        for (int i = lane; i < KEYS * 64; i += 32) {
            const int key = start + i / 64, d = i % 64;
            k[i / 64][d] = key < p.seq_k ? rows_of(p.k, p.k_stride, batch, kv, key)[d] : 0;
            v[i / 64][d] = key < p.seq_k ? rows_of(p.v, p.v_stride, batch, kv, key)[d] : 0;
        }
        __syncwarp();
        for (int n = 0; n < KEYS && start + n < sees; n++) {
            float s = 0;
            for (int d = 0; d < 64; d++) s += q[d] * k[n][d];
            const float m_new = fmaxf(m, s * p.scale), c = expf(m - m_new), e = expf(s * p.scale - m_new);
            m = m_new, l = l * c + e;
            for (int d = 0; d < 64; d++) o[d] = o[d] * c + e * v[n][d];
        }
    }
    if (!exists) return;
    for (int d = 0; d < 64; d++) rows_of(p.o, p.o_stride, batch, head, row)[d] = l > 0 ? o[d] / l : 0;
    p.lse[(int64_t)which * p.seq_q + row] = l > 0 ? m + logf(l) : -INFINITY;
}
extern "C" int forward(const Problem* p, void* stream) {
    const int blocks = p->batch * p->heads * ((p->seq_q + ROWS - 1) / ROWS);
    attention<<<blocks, 32, 0, (cudaStream_t)stream>>>(*p);
    return cudaGetLastError();
}
"""


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(STEP2, id="step 2", marks=pytest.mark.long),
        pytest.param(steps(6)[5].path.read_text(), id="step 6"),
        pytest.param(ONE_WARP, id="one warp", marks=pytest.mark.long),
    ],
)
def test_any_right_kernel_is_accepted(answer):
    assert "rows" in find("6.8").run(answer)


ZEROS = """
#include "problem.cuh"
__global__ void zeros(const Problem p) {
    const int tiles = ceil_div(p.seq_q, 128), head = blockIdx.x / tiles, row = blockIdx.x % tiles * 128 + threadIdx.x;
    if (row >= p.seq_q) return;
    for (int d = 0; d < HEAD_DIM; d++) rows_of(p.o, p.o_stride, head / p.heads, head % p.heads, row)[d] = 0;
    p.lse[(int64_t)head * p.seq_q + row] = 0;
}
extern "C" int forward(const Problem* p, void* stream) {
    zeros<<<p->batch * p->heads * ceil_div(p->seq_q, 128), 128, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
"""


def test_the_first_step_that_the_text_recommends_is_told_as_such():
    diagnosis, sentence = rejected("6.8", ZEROS)
    assert diagnosis == "only-zeros" and "all of o is stored" in sentence


@pytest.mark.parametrize("empty", ["", "\n  \n", "// YOUR CODE HERE\n"])
def test_an_empty_page_is_not_solved_yet(empty):
    with pytest.raises(CheckFailed) as caught:
        check("6.8", empty)
    assert caught.value.diagnosis == "not-solved-yet"


LAUNCH = "    flash_forward<<<grid, THREADS, 0, (cudaStream_t)stream>>>(*p);\n"


def without_barriers(source):
    return re.sub(r"__syncthreads\(\);.*", "", source)


def edited(*replacements, source=STEP2):
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize(
    "answer, diagnosis",
    [
        (without_barriers(STEP2), "race"),
        (edited(("acc[c] = make_float4(0, 0, 0, 0);", "")), "uninitialised-local"),
        pytest.param(edited((", o[d] = 0;", ";"), source=ONE_WARP), "uninitialised-local", marks=pytest.mark.long),
        (edited(("row < rows ? *from : make_float4(0, 0, 0, 0)", "*from")), "global-out-of-bounds"),
        (edited((LAUNCH, "    (void)grid;\n")), "no-launch"),
        (edited(("THREADS, 0, (cudaStream_t)stream>>>", "THREADS>>>")), "wrong-stream"),
        (edited(("void* stream)", "cudaStream_t stream, int more)"), ("(cudaStream_t)", "")), "wrong-entry"),
        (edited(("extern \"C\" int forward", "extern \"C\" int forwards")), "wrong-entry"),
        (edited(('#include "problem.cuh"', "")), "does-not-compile"),
        (edited(("    if (m_start + row >= p.seq_q) return;", "    return;")), "nothing-stored"),
        (edited(("    lse_gmem[row] = l_i", "    const float unused = l_i")), "lse-not-stored"),
        (edited(("p.lse + (int64_t)head_index * p.seq_q + m_start", "p.lse + m_start")), "global-race"),
        (edited(("c < CHUNKS; c++) o[c]", "c < CHUNKS / 2; c++) o[c]")), "columns-not-written"),
        (edited(("l_i == 0.f ? -INFINITY : (m_i + log2f(l_i)) * LN2", "0")), "lse-zero"),
        (edited(("BLOCK_M = 128", "BLOCK_M = 4")), "tiles-too-small"),
        (edited(("BLOCK_N = 32", "BLOCK_N = 128")), "does-not-compile"),
        (edited(("BLOCK_M = 128", "BLOCK_M = 16"), ("base = m_new == -INFINITY ? 0.f : m_new", "base = m_new")),
         "masked-rows-nan"),
        (edited(("k[n][d];", "rows_of(p.k, p.k_stride, batch, kv, start + n)[d];"), source=ONE_WARP),
         "tiles-not-shared"),
        (edited(("const int key = start + i / 64, d = i % 64;", "const int key = start + i % KEYS, d = i / KEYS;"),
                ("[i / 64][d]", "[i % KEYS][d]"), source=ONE_WARP), "not-coalesced"),
    ],
)  # fmt: skip
def test_wrong_kernels_are_told(answer, diagnosis):
    found, sentence = rejected("6.8", answer)
    assert diagnosis is None or found == diagnosis, sentence


def test_a_launch_through_a_variable_names_its_stream():
    through = "    cudaStream_t queue = (cudaStream_t)stream;\n" + LAUNCH.replace("(cudaStream_t)stream", "queue")
    assert find("6.8").run(edited((LAUNCH, through)))
