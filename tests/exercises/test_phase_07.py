"""Phase 7's checks: the mistakes that learners make are named, and what is unwritten or racy is told with its line.

The right answers are those of the lesson's solution; a mistake is one change to one of them.
"""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from lesson_source import make_notebook, read_lesson

from flashlab.check import CheckFailed
from flashlab.cuda import load_inline
from flashlab.exercises import check, phase_07
from flashlab.exercises.phase_07 import naive_loop
from flashlab.figures import fragments
from flashlab.kernels import path, source

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "src" / "lessons" / "07_tensor_cores_exercises.py"


@functools.cache
def answers(kind):
    """What the exercise cells define, in the solution or as the learner gets them."""
    notebook, _ = make_notebook(read_lesson(LESSON), kind, ROOT)
    names = {}
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    return names


def changed(name, *changes):
    text = answers("solutions")[name]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def failure(id, *given):
    with pytest.raises(CheckFailed) as caught:
        check(id, *given)
    assert len(str(caught.value)) > 20
    return caught.value


# ---- the fragments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand, shape", [("a", (16, 16)), ("b", (16, 8)), ("c", (16, 8))])
def test_a_fragment_is_a_permutation_of_its_matrix(operand, shape):
    matrix = torch.arange(shape[0] * shape[1]).reshape(shape)
    held = fragments.fragment(matrix, operand)
    assert held.numel() == matrix.numel() and len(held.unique()) == matrix.numel()
    assert torch.equal(fragments.matrix(held, operand).long(), matrix)


def test_the_formulas_are_those_of_the_instruction():
    A, B, C = (torch.randint(-8, 9, shape) for shape in (fragments.A_SHAPE, fragments.B_SHAPE, fragments.C_SHAPE))
    module = load_inline(path("p7_one_mma"), backend="emulator")
    c = fragments.fragment(C.float(), "c")
    module.mma(fragments.fragment(A.half(), "a"), fragments.fragment(B.half(), "b"), c)
    assert torch.equal(fragments.matrix(c, "c").long(), A @ B + C)


# ---- the Python exercises --------------------------------------------------------------------------------------------


def test_the_holders_are_those_of_the_fragments():
    for lane, register in itertools.product(range(32), range(4)):
        assert phase_07.holder_of_c(*fragments.c_position(lane, register)) == (lane, register)
    for slot in itertools.product(range(32), range(2), range(2)):
        assert phase_07.holder_of_b(*fragments.b_position(*slot)) == slot


@pytest.mark.parametrize("address, trans", [(phase_07.k_address, 0), (phase_07.v_address, 1)])
def test_ldmatrix_loads_both_fragments_from_these_addresses(address, trans):
    module = load_inline(path("p7_one_mma"), backend="emulator")
    tile, out = torch.arange(256, dtype=torch.int16).reshape(16, 16), torch.zeros(32, 4, 2, dtype=torch.int16)
    rows, columns = torch.tensor([address(lane) for lane in range(32)], dtype=torch.int32).T.contiguous()
    module.launch("ldmatrix", tile, rows, columns, out, 16, 16, 4, trans)
    halves = (tile[:, :8], tile[:, 8:]) if trans else (tile[:8].T, tile[8:].T)
    assert torch.equal(out, torch.cat([fragments.fragment(x, "b") for x in halves], dim=1))


# ---- the CUDA exercises ----------------------------------------------------------------------------------------------

MISTAKES = [
    ("7.3", "one_tile", "wrong-function", ("ldmatrix_x2(b", "ldmatrix_x2_trans(b")),
    ("7.3", "one_tile", "wrong-count", ("        mma_", "        mma_m16n8k16<T>(c, a, 0, 0);\n        mma_")),
    ("7.3", "one_tile", "wrong-entry", ("int run(", "int start(")),
    ("7.4", "row_statistics", "wrong-shuffle-mask", ("l, 0b10)", "l, 0x10)")),
    ("7.5", "second_product", "wrong-register", ("a[3] = pack<T>(d[2], d[3])", "a[3] = 0")),
    ("7.6", "pv", "wrong-function", ("ldmatrix_x2_trans", "ldmatrix_x2")),
    ("7.6", "pv", "uninitialised-shared", ("i < 16 * D", "i < keys * D")),
    ("7.8", "row_sums", "fp16-ones", ("pack<T>(1.f, 1.f)", "0x3C003C00")),
    ("7.8", "row_sums", "half-of-the-columns", ("pack<T>(1.f, 1.f)", "pack<T>(1.f, 0.f)")),
    ("7.8", "row_sums", "eight-columns", ("a, ones, ones", "a, ones, 0")),
    ("7.8", "row_sums", "rows-exchanged", ("l[0], sum_gmem[g + 8] = l[2]", "l[2], sum_gmem[g + 8] = l[0]")),
    ("7.9", "any_eight", "line-missing", ("if (D % 16)", "if (false)")),
    ("7.9", "any_eight", "wrong-value", ("if (D % 16)", "if (true)")),
    ("7.9", "any_eight", "wrong-number", ("lane % 16 * D + D - 8", "lane % 8 * D + D - 8")),
    ("7.3", "one_tile", "nothing-stored", ("i < 4; i++) s_gmem", "i < 0; i++) s_gmem")),
    ("7.3", "one_tile", "fp16-alone", ("mma_m16n8k16<T>", "mma_m16n8k16")),
    ("7.8", "row_sums", "fp16-alone", ("mma_m16n8k16<T>", "mma_m16n8k16")),
    ("7.8", "row_sums", "elements-missing", (", sum_gmem[g + 8] = l[2]", "")),
    (
        "7.5",
        "second_product",
        "wrong-count",
        (
            "    ldmatrix_x2_trans",
            "    __shared__ __align__(16) T p_smem[256];\n    for (int i = 0; i < 4; i++)\n"
            "        *(uint32_t*)&p_smem[(g + i % 2 * 8) * 16 + i / 2 * 8 + t * 2] = a[i];\n    __syncwarp();\n"
            "    ldmatrix_x4(a, smem_u32(p_smem + lane % 16 * 16 + lane / 16 * 8));\n    ldmatrix_x2_trans",
        ),
    ),
]


@pytest.mark.parametrize(
    "id, name, change, words",
    [
        (
            "7.3",
            "one_tile",
            ("        mma_", "        if (D == 16 || d + 16 < D) mma_"),
            "dimensions 32 to 47 are missing",
        ),
        ("7.9", "any_eight", ("d += 16", "d += 8"), "dimensions 8 to 39 count 2 times"),
    ],
)
def test_the_dimensions_that_are_not_in_a_sum_are_named(id, name, change, words):
    assert words in str(failure(id, changed(name, change)))


def test_fragments_may_be_loaded_by_hand_where_no_ldmatrix_is_asked_for():
    old = answers("solutions")["any_eight"]
    begin, end = old.index("        uint32_t a[2], b[1];"), old.index("        mma_m16n8k8")
    by_hand = (
        "        const T *q = q_smem + g * D + D - 8 + 2 * t, *k = k_smem + g * D + D - 8 + 2 * t;\n"
        "        uint32_t a[2] = {*(const uint32_t*)q, *(const uint32_t*)(q + 8 * D)}, b[1] = {*(const uint32_t*)k};\n"
    )
    assert check("7.9", old[:begin] + by_hand + old[end:])


@pytest.mark.parametrize(
    "id, name, slug, changes", [(i, n, s, c) for i, n, s, *c in MISTAKES], ids=lambda x: str(x)[:28]
)
def test_a_mistake_is_named(id, name, slug, changes):
    assert failure(id, changed(name, *changes)).diagnosis == slug


def test_a_race_is_told_with_the_learners_line():
    text = changed("one_tile", ("    __syncwarp();", "    "))
    line = next(i for i, x in enumerate(text.splitlines(), 1) if "ldmatrix_x4" in x)
    assert f"line {line} of your code, `ldmatrix_x4(a" in str(failure("7.3", text))


def test_a_compile_error_is_told_with_the_learners_line():
    error = failure("7.3", changed("one_tile", ("ldmatrix_x4(a", "ldmatrix_x4(b")))
    line = next(i for i, x in enumerate(answers("solutions")["one_tile"].splitlines(), 1) if "ldmatrix_x4" in x)
    assert f"line {line} of your code" in str(error)


# ---- the milestone ---------------------------------------------------------------------------------------------------

LOOP = {
    "race": (
        "#pragma unroll\n            for (int n = 0; n < O_TILES; n++) {",
        "k_smem[lane] = 0;\n            for (int n = 0; n < O_TILES; n++) {",
    ),
    "tail-not-masked": ("if (n_start + n * MMA_N", "if (p.causal && n_start + n * MMA_N"),
    "o-not-rescaled": ("acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction", "(void)correction"),
    "does-not-compile": ("float m_new[ROWS_PER_LANE];", "float m_new[ROWS_PER_LANE]"),
    "v-not-transposed": ("ldmatrix_x2_trans(b", "ldmatrix_x2(b"),
    "fragment-swapped": ("pack<T>(c[2], c[3]), pack<T>(d[0], d[1])", "pack<T>(d[0], d[1]), pack<T>(c[2], c[3])"),
    "quad-not-reduced": ("fmaxf(x, __shfl_xor_sync(~0u, x, 2))", "x"),
    "masked-rows-nan": ("(m_i[r] == -INFINITY ? 0.f : m_i[r])", "m_i[r]"),
    "wrong-dimensions": ("k < HEAD_DIM / MMA_K; k++", "k < HEAD_DIM / MMA_K - 1; k++"),
    "wrong-keys": ("row + diagonal)", "row - diagonal)"),
    "weights-not-normalised": ("l_i[r] += c;", "l_i[r] = (n + e ? l_i[r] : 0.f) + c;"),
}


def test_the_loop_of_the_kernel():
    assert check("7.7", naive_loop())
    error = failure("7.7", naive_loop().replace("float m_new[ROWS_PER_LANE];", "float m_new[ROWS_PER_LANE]"))
    assert "of your code" in str(error)


# The zoo's kernels (tests/cuda/test_mutants.py) have these too.
IN_THE_ZOO = ("tail-not-masked", "o-not-rescaled", "v-not-transposed", "fragment-swapped")


@pytest.mark.parametrize("slug", [pytest.param(x, marks=pytest.mark.long if x in IN_THE_ZOO else []) for x in LOOP])
def test_a_wrong_loop_is_told_its_mistake(slug):
    old, new = LOOP[slug]
    assert naive_loop().count(old) == 1
    assert failure("7.7", naive_loop().replace(old, new)).diagnosis == slug


def test_bf16_is_run_too():
    half_only = naive_loop().replace("pack<T>", "pack<__half>")
    assert failure("7.7", half_only).case.startswith("bfloat16")


# ---- the empty page --------------------------------------------------------------------------------------------------

READY = "__syncwarp();                                           // K and V are here"
DONE = "__syncwarp();                                           // all lanes are done with the last tile"
OUT = "T* o_gmem = rows_of(p.o, p.o_stride, batch, head, first);"
BOUND = "if (first + row >= p.seq_q) continue;"
PAGE = {
    "no barrier before K and V are read": ("race", (READY, "")),
    "no barrier before they are overwritten": ("race", (DONE, "")),
    "O is not rescaled": ("o-not-rescaled", ("o[n][2 * r] *= correction, o[n][2 * r + 1] *= correction", "(void)n")),
    "o is never set": ("uninitialised-local", ("float o[HEAD_DIM / 8][4] = {}, m", "float o[HEAD_DIM / 8][4], m")),
    "l is not rescaled": ("l-not-rescaled", ("m[r] = x, l[r] *= correction;", "m[r] = x;")),
    "the tail is not masked": ("tail-not-masked", (": p.seq_k - 1;", ": 1 << 30;")),
    "V without trans": ("v-not-transposed", ("ldmatrix_x2_trans(b", "ldmatrix_x2(b")),
    "c2 and c3 exchanged": ("fragment-swapped", ("pack<T>(s[0][2], s[0][3])", "pack<T>(s[0][3], s[0][2])")),
    "stores past the end": ("global-out-of-bounds", (BOUND, "")),
    "loads past the end": ("global-out-of-bounds", ("if (row < exist) x", "x")),
    "a workspace that nobody asked for": ("global-out-of-bounds", (OUT, f"{OUT}\n    p.workspace[lane] = 1.f;")),
    "no scale": ("scale-missing", ("c * p.scale", "c")),
    "every head has its own K": ("global-out-of-bounds", ("head / (p.heads / p.kv_heads), d", "head, d")),
    "causal from the upper left": ("causal-top-left", ("diagonal = p.seq_k - p.seq_q", "diagonal = 0")),
    "lse of base 2": ("lse-in-base-2", ("m[r] + logf(sum)", "(m[r] + logf(sum)) * LOG2E")),
    "only zeros": ("only-zeros", ("o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse", "0.f, 0.f")),
    "lse never stored": ("lse-not-stored", ("if (t == 0) p.lse", "if (t == 4) p.lse")),
    "lse of one head": ("global-race", ("(int64_t)blockIdx.y * p.seq_q + first", "first")),
    "one shuffle": ("quad-not-reduced", ("            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));\n", "")),
    "no guard for -inf - (-inf)": ("masked-rows-nan", ("base = x == -INFINITY ? 0.f : x", "base = x")),
    "half a row of O": ("columns-not-written", ("n * 8 + t * 2) =", "n / 2 * 8 + t * 2) =")),
    "fp16 alone": ("fp16-alone", ("mma_m16n8k16<T>(o[n]", "mma_m16n8k16<__half>(o[n]")),
    "HEAD_DIM 64 alone": ("head-dim-64-alone", ("PITCH = HEAD_DIM + 8", "PITCH = 64 + 8")),
    "all tiles for a causal mask": (
        "wrong-count",
        ("p.causal ? min(p.seq_k, first + 16 + diagonal) : p.seq_k", "p.seq_k"),
    ),
    "S three times": (
        "wrong-count",
        (
            "uint32_t b[4]; ",
            "uint32_t b[4]; float x[4] = {}; for (int i = 0; i < 4; i++) mma_m16n8k16<T>(x, q[d], 0, 0);",
        ),
    ),
    "aligned by luck": ("misaligned", ("__shared__ __align__(16) T", "__shared__ T")),
    "no launch": ("no-launch", ("attention<<<grid, 32, 0, (cudaStream_t)stream>>>(*p);", "(void)grid;")),
    "no forward": ("wrong-entry", ("int forward(", "int start(")),
    "a word too few": ("does-not-compile", ("const int lane = threadIdx.x,", "lane = threadIdx.x,")),
}  # fmt: skip

SCALAR = r"""
#include "problem.cuh"
__global__ void attention(const Problem p) {                     // a row per block, a thread per column of O
    const int row = blockIdx.x, batch = blockIdx.y / p.heads, head = blockIdx.y % p.heads, d = threadIdx.x;
    const int kv_head = head / (p.heads / p.kv_heads);
    const T* q = rows_of(p.q, p.q_stride, batch, head, row);
    const int end = p.causal ? min(p.seq_k, row + 1 + p.seq_k - p.seq_q) : p.seq_k;
    float m = -INFINITY, l = 0.f, o = 0.f;
    for (int j = 0; j < end; j++) {
        const T* k = rows_of(p.k, p.k_stride, batch, kv_head, j);
        float s = 0.f;
        for (int i = 0; i < HEAD_DIM; i++) s += (float)q[i] * (float)k[i];
        s *= p.scale;
        const float larger = fmaxf(m, s), correction = expf(m - larger), weight = expf(s - larger);
        m = larger, l = l * correction + weight;
        o = o * correction + weight * (float)rows_of(p.v, p.v_stride, batch, kv_head, j)[d];
    }
    rows_of(p.o, p.o_stride, batch, head, row)[d] = T(l > 0.f ? o / l : 0.f);
    if (d == 0) p.lse[(int64_t)blockIdx.y * p.seq_q + row] = m + logf(l);
}
extern "C" int forward(const Problem* p, void* stream) {
    attention<<<dim3(p->seq_q, p->batch * p->heads), HEAD_DIM, 0, (cudaStream_t)stream>>>(*p);
    return (int)cudaGetLastError();
}
"""


@pytest.mark.parametrize(
    "name", ["p8_5_registers", *(pytest.param(name, marks=pytest.mark.long) for name in ("p7_naive", "p9_flash"))]
)
def test_any_right_kernel_is_accepted(name):
    """One warp, four warps, several blocks for a row with a workspace. The lesson's is tested with the solutions."""
    assert check("7.10", source(name))


def one_of_each_mistake():
    """By default a mistake that neither LOOP has nor one before it: each is a whole kernel, built and run."""
    elsewhere = {*LOOP, "fp16-alone"}  # and in the next test
    first = {slug: name for name, (slug, _) in reversed(PAGE.items()) if slug not in elsewhere}
    return [pytest.param(name, marks=[] if first.get(PAGE[name][0]) == name else pytest.mark.long) for name in PAGE]


@pytest.mark.parametrize("name", one_of_each_mistake())
def test_a_wrong_kernel_is_told_its_mistake(name):
    slug, change = PAGE[name]
    assert failure("7.10", changed("kernel", change)).diagnosis == slug


def test_what_one_variant_alone_gets_wrong_says_which():
    error = failure("7.10", changed("kernel", PAGE["fp16 alone"][1]))
    assert error.diagnosis == PAGE["fp16 alone"][0]
    assert "__half somewhere?" in str(error) and "right in float16" in str(error)


@pytest.mark.long  # a minute of scalar products
def test_the_tensor_cores_have_to_be_used():
    error = failure("7.10", SCALAR)
    assert error.diagnosis == "wrong-count" and "no MMA" in str(error)


@pytest.mark.parametrize("text", ["", "\n\n", answers("exercises")["kernel"]], ids=["empty", "blank", "as given"])
def test_an_empty_page_is_not_solved_yet(text):
    with pytest.raises(CheckFailed, match="not solved yet"):
        check("7.10", text)


def test_a_race_of_the_learners_kernel_is_told_with_its_line():
    text = changed("kernel", (READY, ""))
    line = next(i for i, x in enumerate(text.splitlines(), 1) if "ldmatrix_x4(b" in x)
    assert f"line {line} of your code" in str(failure("7.10", text))
