"""What the checks of phases 6 to 9 say of wrong CUDA answers that no computed change makes.

Each answer is the lesson's solution with a slip in it. Changes and rows: `test_cuda_changes.py`.
"""

import re

import pytest
from lesson_answers import answers_of, diagnosis, failure

from flashlab.check import CheckFailed
from flashlab.exercises import check, phase_08
from flashlab.exercises.phase_07 import naive_loop
from flashlab.kernels import step, steps

LOOP_6_2 = """        if (threadIdx.x < half) {
            part_smem[threadIdx.x] += part_smem[threadIdx.x + half];
        }
"""
BARRIER = "__syncthreads();"
ADDED_6_6 = "            s[n] += __shfl_xor_sync(~0u, s[n], 1); "
LAUNCH_6_8 = "    flash_forward<<<grid, THREADS, 0, (cudaStream_t)stream>>>(*p);\n"
SLICE_7_3 = "        mma_m16n8k16<T>(c"
OUT = "T* o_gmem = rows_of(p.o, p.o_stride, batch, head, first);"
AT = "offset ^ row % 8 * 16"
LOOP_8_7 = "for (int j = 0; j < tiles; j++) {"
V_8_7, K_8_7 = "copy_v(j);", "copy_k(j + 1);"
REFILL = "        load_kv(j + STAGES - 1);"
V_8_8 = "at(n * 16 + lane % 16, i * 16 + lane / 16 * 8)"
COPY = "cp_async<16>(smem_u32(smem + at(row, column)), from, there ? 16 : 0);"
PLAIN = """uint4 x = make_uint4(0, 0, 0, 0);
        if (there) x = *(const uint4*)(gmem + row * stride + column);
        *(uint4*)(smem + at(row, column)) = x;"""

# id, edits of the solution, slug, words of the sentence
TOLD = [
    ("6.1", [("* blockDim.x + threadIdx.x", "* 32 + threadIdx.y * 8 + threadIdx.x % 8"),
             ("* blockDim.y + threadIdx.y", "* 4 + threadIdx.x / 8")], "not-coalesced", "run along the row"),
    ("6.2", [("    if (threadIdx.x < 32) {", "    if (threadIdx.x == 0) {\n        float sum = 0.f;\n        for (int "
              "i = 0; i < 32; i++) sum += part_smem[i];\n        part_smem[0] = sum;\n    }\n    if (false) {")],
     "no-tree", "the tree is gone"),
    ("6.2", [("            __syncwarp();                        // all lanes", "            // all lanes")], "race",
     "part_smem[threadIdx.x] += other"),
    ("6.2", [(f"{LOOP_6_2}        {BARRIER}", LOOP_6_2.replace("half];", f"half];\n            {BARRIER}"))], "race",
     "wait at the barrier in line 12 of your code when others have ended"),
    ("6.3", [("[32][33]", "[32][32]")], "bank-conflicts", "in bank i * pitch % 32"),
    ("6.3", [("if (col + i < cols && row + lane < rows) y[(col + i) * rows + row + lane] = tile_smem[lane][i]",
              "if (col + lane < cols && row + i < rows) y[(col + lane) * rows + row + i] = tile_smem[i][lane]")],
     "not-coalesced", "the stores touch"),
    ("6.4", [("    for (int i", "    for (int i = threadIdx.x; i < n; i += 32) m = fmaxf(m, row[i]);\n    for (int i")],
     "read-twice", "read the row once"),
    ("6.4", [("__shfl_xor_sync", "__shfl_down_sync")], "lane-0-alone", "lane 31"),
    ("6.5", [("head / (p.heads / p.kv_heads)", "head % (p.heads / p.kv_heads)")], "wrong-kv-head",
     "use heads 0, 0, 0 of K and V, and should use 0, 1, 2"),
    ("6.5", [("ceil_div(p.seq_q, BLOCK_M)", "ceil_div(p.seq_q, BLOCK_N)")], None, ""),
    ("6.6", [("v_smem[n][2 * c", "v_smem[n + 1][2 * c")], "index-out-of-bounds", "v_smem"),
    ("6.6", [(ADDED_6_6, ""), ("s[n] * scale_log2 :", "(s[n] + __shfl_xor_sync(~0u, s[n], 1)) * scale_log2 :")],
     "deadlock", "waits in a shuffle in line 14 of your code"),
    ("6.6", [("v_smem[n][2 * c + odd]", "v_smem[n][c]")], "o-columns-repeated", "column 4 of o holds what belongs in"),
    ("6.8", [("acc[c] = make_float4(0, 0, 0, 0);", "")], "uninitialised-local", "before it is set"),
    ("6.8", [("row < rows ? *from : make_float4(0, 0, 0, 0)", "*from")], "global-out-of-bounds", "of your code"),
    ("6.8", [(LAUNCH_6_8, "    (void)grid;\n")], "no-launch", "launched no kernel"),
    ("6.8", [("THREADS, 0, (cudaStream_t)stream>>>", "THREADS>>>")], "wrong-stream", "stream"),
    ("6.8", [("void* stream)", "cudaStream_t stream, int more)"), ("(cudaStream_t)", "")], "wrong-entry", "define"),
    ("6.8", [("    if (m_start + row >= p.seq_q) return;", "    return;")], "nothing-stored", "stores nothing"),
    ("6.8", [("    lse_gmem[row] = l_i", "    const float unused = l_i")], "lse-not-stored", "lse is never stored"),
    ("6.8", [("p.lse + (int64_t)head_index * p.seq_q + m_start", "p.lse + m_start")], "global-race", "lse"),
    ("6.8", [("c < CHUNKS; c++) o[c]", "c < CHUNKS / 2; c++) o[c]")], "columns-not-written", "columns 32 to 63"),
    ("6.8", [("l_i == 0.f ? -INFINITY : (m_i + log2f(l_i)) * LN2", "0")], "lse-zero", "o is right. lse is 0"),
    ("6.8", [("BLOCK_M = 128", "BLOCK_M = 4")], "tiles-too-small", "serves 4 rows"),
    ("6.8", [("k_smem[n][c], s[n])", "((const float4*)(k_gmem + (n_start + n) * p.k_stride.row))[c], s[n])"),
             ("n < BLOCK_N; n++) s[n] = dot", "n < min(BLOCK_N, p.seq_k - n_start); n++) s[n] = dot")],
     "tiles-not-shared", "let all rows of the block use it"),
    ("6.8", [("i / CHUNKS, chunk = i % CHUNKS", "i % ROWS, chunk = i / ROWS")], "not-coalesced", "neighbouring"),
    ("6.8", [("rows_of(p.o, p.o_stride", "rows_of(p.o, p.q_stride")], "wrong-stride", "q and o have the same strides"),
    ("6.8", [("m_start + BLOCK_M + diagonal)", "m_start + BLOCK_M - 1 + diagonal)")], "causal-loop-too-short",
     "row 127 does not see key 128"),
    ("7.3", [(SLICE_7_3, f"        mma_m16n8k16<T>(c, a, 0, 0);\n{SLICE_7_3}")], "wrong-count", "6 m16n8k16 where 3"),
    ("7.3", [("i < 4; i++) s_gmem", "i < 0; i++) s_gmem")], "nothing-stored", "nothing is stored"),
    ("7.3", [("mma_m16n8k16<T>", "mma_m16n8k16")], "fp16-alone", "`mma_m16n8k16<T>(c, a"),
    ("7.3", [(SLICE_7_3, SLICE_7_3.replace("mma", "if (D == 16 || d + 16 < D) mma"))], "wrong-value",
     "there are 2 MMAs, of 16 of the 48 dimensions each"),
    ("7.3", [("t * 2 + i % 2", "i % 2 * 4 + t")], "wrong-value", "c[1] of lane 0 is S[0, 1], and stored at [0, 4]"),
    ("7.3", [("lane % 16 * D", "(lane % 8 + lane / 16 * 8) * D")], "wrong-value", "a[1] of lane 0 holds Q[0, 0]"),
    ("7.3", [("= c[i]", "= 0.5f * c[i]")], "wrong-value",
     "stored are 0.5 times them"),
    ("7.5", [("pack<T>(c[0], c[1])", "pack<T>(c[0], c[2])"), ("pack<T>(c[2], c[3])", "pack<T>(c[1], c[3])")],
     "wrong-value", "a[0] of lane 0 holds P[0, 0] and P[8, 0], where m16n8k16 wants P[0, 0] and P[0, 1]"),
    ("9.4", [("l_i = l_i * correction + weight;", "l_i = l_i * weight + correction;")], "factor-elsewhere",
     "one part, lse 0: in o they count"),
    ("9.4", [("acc[HEAD_DIM / 32] = {}", "acc[HEAD_DIM / 32]")], "uninitialised-local", "read before it is set"),
    ("12.6", [("if (before == splits - 1) *counter", "if (before == 0) *counter")], "nobody-is-last",
     "the warps find 0, 0, 0, 0 in the counter, and should find 0 to 3"),
    ("12.6", [("__shfl_sync(~0u, before, 0) ==", "before ==")], "last-in-one-lane", "true in lane 0 alone"),
    ("7.5", [("a[1] = pack<T>(c[2], c[3])", "a[1] = pack<T>(d[0], d[1])"),
             ("a[2] = pack<T>(d[0], d[1])", "a[2] = pack<T>(c[2], c[3])")], "elements-exchanged", "are exchanged"),
    ("7.5", [("    ldmatrix_x2_trans",
              "    __shared__ __align__(16) T p_smem[256];\n    for (int i = 0; i < 4; i++)\n"
              "        *(uint32_t*)&p_smem[(g + i % 2 * 8) * 16 + i / 2 * 8 + t * 2] = a[i];\n    __syncwarp();\n"
              "    ldmatrix_x4(a, smem_u32(p_smem + lane % 16 * 16 + lane / 16 * 8));\n    ldmatrix_x2_trans")],
     "wrong-count", "P goes through shared memory"),
    ("7.6", [("i < 16 * D", "i < keys * D")], "uninitialised-shared", "of your code"),
    ("7.8", [(", sum_gmem[g + 8] = l[2]", "")], "line-missing", "`sum_gmem[g + 8] = l[2]` is missing"),
    ("7.9", [("d += 16", "d += 8")], "wrong-value", "dimensions 8 to 39 count 2 times"),
    ("7.9", [("if (D % 16)", "if (true)")], None, ""),
    ("7.7", [("at(n * MMA_N + lane % 8,", "at(n * MMA_K + lane % 8,")], "wrong-scores", "right but for keys 8 to 15"),
    ("7.7", [("c = exp2_approx(fmaf(c, scale_log2, -base));\n                    l_i[r] += c;",
              "l_i[r] += c;\n                    c = exp2_approx(fmaf(c, scale_log2, -base));")], None, ""),
    ("7.10", [(OUT, f"{OUT}\n    p.workspace[lane] = 1.f;")], "global-out-of-bounds", "workspace"),
    ("7.10", [("mma_m16n8k16<T>(o[n]", "mma_m16n8k16<__half>(o[n]")], "fp16-alone", "__half somewhere?"),
    ("7.10", [("PITCH = HEAD_DIM + 8", "PITCH = 64 + 8")], "head-dim-64-alone", "wrong with 128"),
    ("7.10", [("p.causal ? min(p.seq_k, first + 16 + diagonal) : p.seq_k", "p.seq_k")], "wrong-count", "a causal mask"),
    ("7.10", [("uint32_t b[4]; ", "uint32_t b[4]; float x[4] = {}; for (int i = 0; i < 4; i++) "
               "mma_m16n8k16<T>(x, q[d], 0, 0);")], "wrong-count", "is a product computed twice?"),
    ("7.10", [(OUT, f"float x[4] = {{}};\n    mma_m16n8k16<T>(x, q[0], 0, 0);\n    {OUT}")], "wrong-count", "beside"),
    ("8.3", [(AT, "row * ROW_BYTES + (column / 8 ^ row / 8 % 8) * 16")], None, "0, 0, 0 to the offsets of rows 0 to 7"),
    ("8.3", [(AT, "row * (ROW_BYTES + 16) + column * 2")], "outside-the-tile", "no room"),
    ("8.3", [(AT, "row * ROW_BYTES + (column / 8 + row) % 8 * 16")], "not-a-permutation", "in one place"),
    ("8.4", [("2 * STAGES - 3;", "STAGES - 1;")], "waits-too-long", "younger"),
    ("8.4", [("2 * STAGES - 3;", "2 * STAGES - 5;")], "wrong-value", "not negative"),
    ("8.4", [("2 * STAGES - 2;", "2 * STAGES - 1;")], "read-before-wait", "3, and V_j's group has 2 younger"),
    ("8.5", [(REFILL, "load_kv(j + 1);")], None, "right with 2 stages, and not with 3"),
    ("8.3", [(AT, "offset ^ (offset >> 7 & 7) * 16")], "bank-conflicts", "right with head_dim 64, and not with 128: "),
    ("8.5", [("<2 * STAGES - 4>", "<STAGES - 2>")], "waits-too-long", "not needed yet"),
    ("8.5", [(REFILL, f"{REFILL}\n        cp_async_wait<0>();\n        __syncthreads();")], "no-overlap", "every copy"),
    ("8.5", [("        __syncthreads();", "        //")], None, "__syncthreads"),
    ("8.5", [("stage = j % STAGES", "stage = (j + 1) % STAGES")], "stage-overwritten", "stage is still in use"),
    ("8.7", [("@J\n", "")], "part-missing", "part J"),
    ("8.7", [("@J\n", "@J\n@J\n")], "part-twice", "part J"),
    ("8.7", [("@J\n", "@X\n")], "unknown-part", "'X'"),
    ("8.7", [("    @E\n}\n", "}\n@E\n")], "outside-the-loop", "part E"),
    ("8.7", [("    @E\n}\n", "    @E\n")], "braces", "do not match"),
    ("8.7", [(f"@D\n{LOOP_8_7}\n", f"{LOOP_8_7}\n@D\n")], "inside-the-loop", "part D"),
    ("8.7", [("int j = 0", "int i = 0")], "does-not-compile", "line 14 of your code, `for"),
    ("8.7", [("j++", "j += 2")], "wrong-walk", "is 0, 2, 4. It"),
    # The lecture's order: what comes next sets out where a round begins.
    ("8.7", [(V_8_7, "copy_k(j + 1), copy_v(j + 1);"), (K_8_7, ""), ("copy_k(0);", "copy_k(0), copy_v(0);"),
             ("wait<1>", "wait<2>")], "wrong-tile", "wants tile 0 of K, and the last copy before it is copy_k(1)"),
    ("8.7", [(V_8_7, "")], "wrong-tile", "part E wants tile 0 of V, and there is no copy before it"),
    ("8.7", [("copy_k(0);", "copy_k(0), copy_v(0);"), ("wait<1>", "wait<2>")], "copied-twice", "copy_v(0) is called"),
    ("8.7", [("__syncthreads();         // all of V_j", "// all of V_j")], "stage-overwritten", "no barrier between"),
    ("8.7", [("wait<0>();\n    __syncthreads();         // all of V_j", "wait<1>();\n    __syncthreads();  // V_j")],
     "read-before-wait", "in part E, `ldmatrix_x4_trans"),
    ("8.7", [(V_8_7, ""), ("    @Q\n", "    @Q\n    copy_v(j);\n")], "no-overlap", "could be 15360"),
    ("8.8", [("> last) x = -INFINITY;", "> last) {}")], "tail-not-masked", "in m and l. And causal: each row sees"),
    ("8.8", [("at(key, d * 16 + lane / 8 % 2 * 8)", "at(n * 16 + lane % 16, d * 16 + lane / 16 * 8)")],
     "fragment-swapped", "b1 of the first 8 keys"),
    ("8.8", [(COPY, PLAIN)], "no-cp-async", "hold up their thread"),
    ("8.8", [("    __syncwarp();", "    //")], "race", "of your code"),
    ("8.8", [("    cp_async_wait<0>();\n    __syncthreads();  ", "    //")], "never-waited", "of your code"),
    ("8.8", [("extern __shared__ __align__(128) char", "extern __shared__ char")], "misaligned", "with __align__(16)"),
    ("8.8", [(V_8_8, "at(n * 16 + lane % 8 + lane / 16 * 8, i * 16 + lane / 8 % 2 * 8)")], "values-moved",
     "where V[0, 8] belongs (key, column), V[8, 0] is multiplied, and the other way round"),
    ("9.7", [("(o_gmem + row * p.o", "(o_gmem + (warp_row + g + r / 2 * 16) * p.o")], "rows-not-written",
     "row 0 of o holds what belongs in row 8"),
    ("9.7", [("acc[r / 2][n] + r % 2 * 2;", "acc[r / 2][n];")], "another-row-stored", "rows g + 8 of O are made of"),
    ("9.7", [("acc[r / 2][n] + r % 2 * 2;", "acc[r / 2][n] + (1 - r % 2) * 2;")], "fragment-swapped",
     "Or rows g and g + 8 change places where O is stored"),
    ("9.7", [("WARP_SIZE * M_TILES * MMA_M;", "WARP_SIZE * MMA_M;")], "rows-in-common", "do two warps"),
    # A cast in one address: right in tensors of fewer than 2^31 elements.
    ("6.8", [("rows_of(p.o, p.o_stride, batch, head, m_start)", "(float*)p.o + (int)(batch * p.o_stride.batch + "
              "head * p.o_stride.head + m_start * p.o_stride.row)")], "offset-in-32-bits", "row 128 of o"),
    ("7.10", [("v_gmem + start * p.v_stride.row", "v_gmem + start * (int)p.v_stride.row")], "offset-in-32-bits", "v"),
    ("8.8", [("v + j * ROWS * p.v_stride.row", "v + j * ROWS * (int)p.v_stride.row")], "offset-in-32-bits", "v"),
    ("9.7", [("k_gmem + n_start * p.k_stride", "k_gmem + n_start * (int)p.k_stride")], "offset-in-32-bits", "k"),
]  # fmt: skip


def slipped(id, edits, kind="solutions"):
    answers = [naive_loop()] if id == "7.7" else answers_of(id, kind)
    for old, new in edits:
        assert old in answers[0], old
        answers[0] = answers[0].replace(old, new)
    return answers


def one_of_each(table):
    """By default the first answer of each slug: every one is built by g++, which takes a second or two."""
    first = {slug or id: row for row in reversed(table) for id, _, slug, _ in [row] if id not in ("9.6", "9.7")}
    for row in table:
        yield pytest.param(*row, marks=[] if first.get(row[2] or row[0]) is row else pytest.mark.long)


@pytest.mark.parametrize("id, edits, slug, words", list(one_of_each(TOLD)), ids=lambda x: str(x)[:24] if x else "-")
@pytest.mark.every(4)
def test_what_is_wrong_is_told(id, edits, slug, words):
    failed = failure(id, *slipped(id, edits))
    assert failed.sentence.count("\n") < 2 and words in failed.sentence
    assert failed.diagnosis == (slug or failed.diagnosis), failed


@pytest.mark.parametrize("id", ["6.5", "6.6", "6.8", "7.7", "7.10", "8.8", "9.7"])
@pytest.mark.parametrize("page", ["", " \n\n", "// YOUR CODE HERE"], ids=["empty", "blank", "hole"])
def test_a_deleted_text_is_not_solved_yet(id, page):
    assert "not solved yet" in str(failure(id, page))


def swapped(a, b):
    """The solution of 8.7 with two parts exchanged, by the names of their regions."""
    a, b = (phase_08._LETTERS[name] for name in (a, b))
    text = re.sub(rf"@{a}\b", "@@", answers_of("8.7", "solutions")[0])
    return re.sub(rf"@{b}\b", f"@{a}", text).replace("@@", f"@{b}")


@pytest.mark.parametrize("first, later", [(a, b) for a, b, _ in phase_08._ORDER])
def test_every_part_out_of_order_is_named(first, later):
    with pytest.raises(CheckFailed, match=r"part [A-Q] has to come before part [A-Q]") as caught:
        check("8.7", swapped(first, later))
    assert caught.value.diagnosis == "out-of-order"


@pytest.mark.parametrize(
    "first, later", [pytest.param("which keys", "state", marks=pytest.mark.long), ("first copies", "state")]
)
def test_orders_that_do_not_matter(first, later):
    assert check("8.7", swapped(first, later))


KERNELS = [  # of the series, as answers; slug: of a right one that is slow, or does not do what the exercise is about
    ("8.8", "p8_5_registers", "part-sectors"), ("8.8", "p8_3_stages", "bank-conflicts"),
    ("8.8", "p8_side_shared_kv", "no-overlap"), ("9.7", "p8_6_store", "too-few-rows-per-warp"),
    ("11.14", "p11_4_producer", "too-few-rows-per-tile"), ("11.14", "p9_flash", "no-wgmma"),
    *(("7.10", name, "") for name in ("p8_5_registers", "p7_naive", "p9_flash")),
    *(("8.8", name, "") for name in ("p9_5_prefetch", "p8_6_store", "p8_side_shuffle_store")),
    *(("9.7", name, "") for name in ("p9_4_warp_tiles", "p9_flash")), ("6.8", steps(6)[5].name, ""),
    *(("11.14", name, "") for name in ("p11_5_consumers", "p11_7_ping_pong", "p11_10_epilogue")),
]  # fmt: skip


@pytest.mark.parametrize("id, name, slug", KERNELS)
@pytest.mark.every(15)
def test_a_kernel_of_the_series_is_accepted_or_told_why_not(id, name, slug):
    text = step(name).path.read_text()
    assert diagnosis(id, text) == slug if slug else check(id, text)


def test_no_cause_is_told_of_several_that_end_at_one_place():
    """A guard left out reads past the end first where one that is one off does."""
    said = failure("7.6", *slipped("7.6", [("i < keys * D ? v_gmem[i] : T(0.f)", "v_gmem[i]")])).sentence
    assert said.startswith("thread 0 of block 0 reads in line 10 of your code")
