"""What the checks of phases 6 to 9 read off from a wrong answer: by class, which row, lane, register, head or tile.

Each answer is the lesson's solution with a slip in it.
"""

import pytest
from lesson_answers import answers_of

from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.exercises.registry import find

LOOP_8_7 = "for (int j = 0; j < tiles; j++) {"
AT_8_6 = [("return row * ROW_BYTES + column * 2;", "return row * ROW_BYTES + (column / 8 ^ row / 8) * 16;")]

V_8_8 = "at(n * 16 + lane % 16, i * 16 + lane / 16 * 8)"

TOLD = {
    "shuffles down": ("6.4", [("__shfl_xor_sync", "__shfl_down_sync")], "lane-0-alone", "lane 31"),
    # 6.5 and 6.8: heads and strides, of an address out of bounds
    "heads of K by a remainder": (
        "6.5", [("head / (p.heads / p.kv_heads)", "head % (p.heads / p.kv_heads)")], "wrong-kv-head",
        "use heads 0, 0, 0 of K and V, and should use 0, 1, 2",
    ),
    "the batch counted twice": (
        "6.5", [("head / (p.heads / p.kv_heads)", "head_index / (p.heads / p.kv_heads)")], "wrong-kv-head", "one batch"
    ),
    "o with the strides of q": (
        "6.8", [("rows_of(p.o, p.o_stride", "rows_of(p.o, p.q_stride")], "wrong-stride", "q and o have the same strides"
    ),
    "v with the strides of k": (
        "6.8",
        [("v_gmem + n_start * p.v_stride.row, p.v_stride.row", "v_gmem + n_start * p.k_stride.row, p.k_stride.row")],
        "wrong-stride", "k and v have the same strides",
    ),
    # 6.8: a tile of which the block sees one key
    "a loop that ends a key too early": (
        "6.8", [("m_start + BLOCK_M + diagonal)", "m_start + BLOCK_M - 1 + diagonal)")], "causal-loop-too-short",
        "row 127 does not see key 128",
    ),
    "a key past the end": ("6.8", [("n < keys", "n <= keys")], "weights-not-normalised", "one key with a score of 0"),
    # 7.5: registers
    "a register twice": (
        "7.5", [("a[3] = pack<T>(d[2], d[3])", "a[3] = pack<T>(d[0], d[1])")], "wrong-register",
        "a[3] holds d[0] and d[1], and should hold d[2] and d[3]",
    ),
    # 7.7: corrections and scores
    "another row's correction": (
        "7.7",
        [("acc[n][2 * r] *= correction, acc[n][2 * r + 1] *= correction",
          "acc[n][r] *= correction, acc[n][r + 2] *= correction")],
        "wrong-correction", "acc[n] c1 and c2 get the correction of the row 8 above or below it",
    ),
    "keys of another tile": (
        "7.7", [("at(n * MMA_N + lane % 8,", "at(n * MMA_K + lane % 8,")], "wrong-scores", "right but for keys 8 to 15"
    ),
    "a sum of scores": (
        "7.7", [("c = exp2_approx(fmaf(c, scale_log2, -base));\n                    l_i[r] += c;",
                 "l_i[r] += c;\n                    c = exp2_approx(fmaf(c, scale_log2, -base));")],
        "l-before-exp", "divided by a sum of scores (the scores)",
    ),
    # 8.3 and 8.6: places
    "rows that share banks": (
        "8.3", [("row % 8)", "row / 8 % 8)")], "bank-conflicts", "rows 0, 1, 2, 3, 4, 5, 6, 7 are in"
    ),
    # 8.8: a tile twice
    "the tile before": (
        "8.8", [("k + (j + 1) * ROWS * p.k_stride.row, p.k_stride.row, p.seq_k - (j + 1) * ROWS",
                 "k + j * ROWS * p.k_stride.row, p.k_stride.row, p.seq_k - j * ROWS")],
        "values-exchanged", "the value of key 64 gets the weight of key 0",
    ),
    "V by the addresses of K": (
        "8.8", [(V_8_8, "at(n * 16 + lane % 8 + lane / 16 * 8, i * 16 + lane / 8 % 2 * 8)")], "values-moved",
        "where V[0, 8] belongs (key, column), V[8, 0] is multiplied, and the other way round",
    ),
    "tiles of V from the last": (
        "8.8", [(V_8_8, "at(ROWS - 16 - n * 16 + lane % 16, i * 16 + lane / 16 * 8)")], "values-exchanged",
        "on key 0 gets the value of key 48",
    ),
    # 8.7: the walk
    "upwards is downwards": (
        "8.7", [(LOOP_8_7, "for (int j = tiles - 1; j >= 0; j--) {")], "wrong-walk", "is 5, 4, 3, 2, 1, 0"
    ),
    "a walk over keys": (
        "8.7", [(LOOP_8_7, "for (int j = 0; j < p.seq_k; j += BLOCK_N) {")], "wrong-walk", "0, 64, 128"
    ),
    "a tile too many": ("8.7", [("j < tiles; j++", "j <= tiles; j++")], "wrong-walk", "0, 1, 2, 3, 4, 5, 6. It"),
    # 9.7: rows
    "row g in the place of g + 8": (
        "9.7", [("(o_gmem + row * p.o", "(o_gmem + (warp_row + g + r / 2 * 16) * p.o")], "rows-not-written",
        "row 0 of o holds what belongs in row 8",
    ),
    "c0 and c1 for both rows": (
        "9.7", [("acc[r / 2][n] + r % 2 * 2;", "acc[r / 2][n];")], "another-row-stored", "rows g + 8 of O are made of"
    ),
    "c2 and c3 first": (
        "9.7", [("acc[r / 2][n] + r % 2 * 2;", "acc[r / 2][n] + (1 - r % 2) * 2;")], "fragment-swapped",
        "Or rows g and g + 8 change places where O is stored",
    ),
    "warps with rows in common": (
        "9.7", [("WARP_SIZE * M_TILES * MMA_M;", "WARP_SIZE * MMA_M;")], "rows-in-common", "do two warps"
    ),
}  # fmt: skip


def slipped(id, replacements, kind="solutions"):
    answers = answers_of(id, kind)
    for old, new in replacements:
        assert old in answers[0]
        answers[0] = answers[0].replace(old, new)
    return answers


def one_of_each_exercise():
    """By default one answer of each exercise: every one is built by g++, which takes a second or two."""
    first = {answer[0]: name for name, answer in reversed(TOLD.items()) if answer[0] != "9.7"}  # slow
    return [pytest.param(name, marks=[] if first.get(TOLD[name][0]) == name else pytest.mark.long) for name in TOLD]


@pytest.mark.parametrize("name", one_of_each_exercise())
def test_what_is_wrong_is_read_off(name):
    id, replacements, slug, words = TOLD[name]
    with pytest.raises(CheckFailed) as caught:
        check(id, *slipped(id, replacements))
    assert (caught.value.diagnosis, words in caught.value.sentence) == (slug, True), caught.value.sentence


def test_where_a_chunk_is_written_and_where_it_is_read():
    with pytest.raises(CheckFailed, match="byte 144 of the tile, and at\\(1, 0\\)") as caught:
        check("8.6", *slipped("8.6", AT_8_6, "exercises"))
    assert caught.value.diagnosis == "two-formulas"


def test_the_tree_of_6_2_is_kept():
    rounds = """    for (int half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            part_smem[threadIdx.x] += part_smem[threadIdx.x + half];
        }
    }
"""
    atomic = "    if (threadIdx.x > 0) atomicAdd(&part_smem[0], part_smem[threadIdx.x]);\n    __syncthreads();\n"
    with pytest.raises(CheckFailed, match="the tree is gone") as caught:
        check("6.2", *slipped("6.2", [(rounds, atomic)], "exercises"))
    assert caught.value.diagnosis == "no-tree"


def test_a_barrier_in_a_branch_is_seen_beside_its_race():
    add = "part_smem[threadIdx.x] += part_smem[threadIdx.x + half];"
    with pytest.raises(
        CheckFailed, match="wait at the barrier in line 12 of your code when others have ended"
    ) as caught:
        check("6.2", *slipped("6.2", [(add, f"{add}\n            __syncthreads();")], "exercises"))
    assert caught.value.diagnosis == "race"


def test_the_own_key_of_the_last_row_in_9_1():
    def tiles(m_start, block_m, block_n, seq_q, seq_k, causal):
        end, full, shift = -(-seq_k // block_n), seq_k // block_n, seq_k - seq_q
        if causal:
            end = max(0, min(end, -(-(m_start + block_m - 1 + shift) // block_n)))
            full = max(0, min(full, (m_start + 1 + shift) // block_n))
        return end, full

    with pytest.raises(CheckFailed, match="end: `m_start` is one too small"):
        find("9.1").run(tiles)


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

    with pytest.raises(CheckFailed, match=words):
        find("6.7").run(visited)


# A cast in one address. Each is right in tensors of fewer than 2^31 elements.
CUT = {
    "6.8": [
        ("rows_of(p.o, p.o_stride, batch, head, m_start)",
         "(float*)p.o + (int)(batch * p.o_stride.batch + head * p.o_stride.head + m_start * p.o_stride.row)")
    ],
    "7.10": [("v_gmem + start * p.v_stride.row", "v_gmem + start * (int)p.v_stride.row")],
    "8.8": [("v + j * ROWS * p.v_stride.row", "v + j * ROWS * (int)p.v_stride.row")],
    "9.7": [("k_gmem + n_start * p.k_stride.row", "k_gmem + n_start * (int)p.k_stride.row")],
}  # fmt: skip


@pytest.mark.parametrize("id", [pytest.param(x, marks=[] if x in ("6.8", "9.7") else pytest.mark.long) for x in CUT])
def test_an_offset_in_32_bits_is_rejected(id):
    with pytest.raises(
        CheckFailed, match="row 128 of [kvo] begins more than 2\\^31 elements behind the first"
    ) as caught:
        check(id, *slipped(id, CUT[id]))
    assert caught.value.diagnosis == "offset-in-32-bits"
