"""Phase 9's checks: right answers of several styles pass, and what no row or change says is told."""

from __future__ import annotations

import types

import pytest
from lesson_answers import accepted, answers_of, failure, told
from lesson_answers import changed_texts as changed

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import region
from flashlab.check.cuda_index import TRIALS
from flashlab.exercises import check
from flashlab.exercises.phase_09 import PARTS
from flashlab.exercises.phase_09_ladder import expect_budget
from flashlab.exercises.rule import RULES
from flashlab.kernels import step
from flashlab.simt import SimtError, find_compiler
from flashlab.simt.report import Counters

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)


FAR = "(m_new[r] - m_i[r]) * scale_log2 > RESCALE_ABOVE"
ROUNDED = "const float w = __half2float(__float2half(weight)); "
test_what_no_single_change_says = told(
    ("9.4", [("+ weight;", "+ __half2float(__float2half(weight));")], "lse is"),
    ("9.4", [("acc[i] = acc[i] * correction + weight", f"{ROUNDED}acc[i] = acc[i] * correction + w")],
     "fp16 has no such digits"),
    ("9.3", [("(before - base)", "(before - m_new[r])")], "`base` is the reference that it has from now on"),
    ("9.3", [(f"if ({FAR}) ", "")], "but not row by row"),
    ("9.5", [("for (; j >= full; j--)", "for (; j >= begin; j--)")], "right: 7*, 6*, 5*, 4, 3, 2*, 1* (*"),
    ("9.5", [("auto is_masked", "bool MASKED"), ("        constexpr bool MASKED = decltype(is_masked)::value;\n", ""),
             *((f"j >= {x}; j--) tile(j, std::{y}_type{{}})", f"j >= {x}; j--) tile(j, {y})")
               for x, y in (("full", "true"), ("whole", "false"), ("begin", "true")))], "MASKED is a variable"),
    ("9.5", [("    for (; j >= whole;",
             "    j = full - 1;\n    for (; j >= whole;"), ("    for (; j >= begin;",
             "    j = whole - 1;\n    for (; j >= begin;")], "is none walked twice"),
    ("9.6", [("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = 0")], "IN_FLIGHT should leave"),
    ("9.6", [("cp_async_wait<STAGES - 1>", "cp_async_wait <1>")], "where Q is waited for"),
    ("9.6", [("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = 2")], "tile j is read when its copy may still be under way"),
    ("9.8", [("o_lane ^ n * 16", "o_lane ^ n * 8")], "has each thread a place of its own"),
    ("9.7", [("(column / 8 ^ row % 8) * 16", "column * 2")], "are bank conflicts"),
    ("9.8", [("(o_lane ^ n * 16)", "at(warp_row + g, n * MMA_N) + t * 4")], "each lane calls `at`"),
    ("9.9", [("v_rmem[(step + 2) % 3], next);", "v_rmem[(step + 2) % 3], next);\nldmatrix_x4_trans(v_rmem[step % 3], "
              "(v_lane ^ (n * 32)) + stage + k * MMA_K * ROW_BYTES);")], "each fragment is loaded once"),
    ("9.12", [("(column / 8 ^ row % 8) * 16", "column * 2")], "are bank conflicts"),
    ("9.12", [("n < O_TILES; n++) {\n            const float* c", "n < 8; n++) {\n            const float* c")],
     "written to columns 64 to 127 of 128, in rows"),
    # What stands in the right text alone is no cause: another's loop or guard may be written in any way.
    ("9.6", [("i < STAGES; i++) load_kv(end - i);", "i < 4; i++) load_kv(end - i);")], "`for (i = 1; i < STAGES"),
    ("9.9", [("if (next_k < BLOCK_N / MMA_K) ld", "ld")], "`next_k < BLOCK_N / MMA_K` is not asked"),
    one_of_each=True, every=6,
)  # fmt: skip


def test_a_name_divided_by_itself_is_no_cause():
    said = [change.said for _, change, _ in RULES["9.2"].index.outcomes]
    assert said and "`registers` stands where 256 belongs, in `-32 * registers // 256`" not in said


@pytest.mark.parametrize("id", [id for id in TRIALS if id.startswith("9.")])
def test_no_row_hides_another(id):
    told = {said for _, said, *_ in TRIALS[id].kept["changes"]}
    assert [row.sentence for row in TRIALS[id].rows if row.sentence not in told] == []


test_other_repairs_of_a_row_alone = accepted(
    # The four lanes of a quad wish the same, and nobody else has a part of their rows.
    ("9.3", ("__any_sync(~0u, moved)", "moved")),
    ("9.3", [(f"if ({FAR}) m_i[r] = m_new[r];", ""), ("before - base", "m_i[r] - base"),
             ("const float before = m_i[r];", f"const float m_next = {FAR} ? m_new[r] : m_i[r];"),
             ("m_i[r] == -INFINITY ? 0.f : m_i[r]", "m_next == -INFINITY ? 0.f : m_next"),
             ("l_i[r] *= correction;", "l_i[r] *= correction, m_i[r] = m_next;")]),
    marks=[pytest.mark.long],
)  # fmt: skip


@pytest.mark.long
def test_the_lectures_rescaling_is_not_row_by_row():
    assert failure("9.3", region(step("p9_3_rescale"), "rescale")).diagnosis == "rescaled-with-the-warp"


LSE = "const float lse = part_lse[s * rows + row], m_new = fmaxf(m_i, lse);"


test_other_ways_to_merge_in_one_pass = accepted(
    # Empty parts skipped; a correction where the maximum moves; normalised after each part.
    ("9.4", ("const float reference =", "if (lse == -INFINITY) continue;\n        const float reference =")),
    ("9.4", [("        const float correction = exp2_approx((m_i - reference) * LOG2E);\n", ""), (LSE, f"""
        {LSE}
        const float correction = m_new > m_i ? exp2_approx((m_i - m_new) * LOG2E) : 1.f;""")]),
    ("9.4", [("    const float inverse = l_i > 0.f ? 1.f / l_i : l_i;", "    const float inverse = l_i > 0.f;"), (
        "l_i = l_i * correction + weight;", "const float sum = l_i * correction + weight, part = sum > 0 ? 1 / sum : 0;"
        "\n        const float old = l_i * correction * part, mine = weight * part;\n        l_i = sum;"),
        ("acc[i] * correction + weight", "acc[i] * old + mine"),
        ("acc[i + 1] * correction + weight", "acc[i + 1] * old + mine")]),
    every=3,
)  # fmt: skip


@pytest.mark.long
def test_the_lectures_merge_has_two_passes():
    assert failure("9.4", region(step("p9_flash"), "weighted sum")).diagnosis == "two-passes"


def test_a_mark_that_is_left_is_named():
    before, loop = answers_of("9.6", "solutions")
    failed = failure("9.6", before, loop + "// YOUR CODE HERE\n")
    assert failed.diagnosis == "not-solved-yet" and "still stands in line" in failed.sentence


# The next fragment is called as that of the scores; shared memory to spare.
test_other_names_and_sizes = accepted(
    ("9.12", ("constexpr int WARPS = 4,", "constexpr int SPARE = 64 * 1024, WARPS = 4,")),
    ("9.9", ("uint32_t v_rmem[3][4];", "uint32_t b[3][4]; uint32_t(&v_rmem)[3][4] = b;")),
    every=2,
)


# ---- 9.5: the parts --------------------------------------------------------------------------------------------------
def letter(name):
    return next(x for x, part in PARTS.items() if part == name)


def swapped(a, b):
    one, other = f"// PART {letter(a)}\n", f"// PART {letter(b)}\n"
    return answers_of("9.5", "solutions")[0].replace(one, "@@").replace(other, one).replace("@@", other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("rescale", "probabilities"),
        ("row maxima", "scores"),
        ("swizzle", "shared memory"),
        ("addresses", "first copies"),
        ("store", "launch"),
    ],
)
def test_a_part_out_of_place_is_named(a, b):
    failed = failure("9.5", swapped(a, b))
    assert failed.diagnosis == "part-out-of-place"
    assert a in failed.sentence or b in failed.sentence


def test_parts_left_out_or_used_twice():
    line = f"// PART {letter('store')}\n"
    for new, slug in (("", "missing"), (line + line, "twice"), (line + "// PART Z\n", "unknown")):
        assert failure("9.5", *changed("9.5", (line, new))).diagnosis == f"part-{slug}"


@pytest.mark.parametrize("borders, walk", [
    pytest.param("""
    const int first = m_start + diagonal - LEFT, last = first + BLOCK_M - 1;
    const int begin = first > 0 ? first / BLOCK_N : 0;
    int uncut = begin;
    while (uncut * BLOCK_N < last) uncut++;""", """
    while (j >= max(full, uncut)) tile(j--, std::true_type{});
    while (j >= uncut) tile(j--, std::false_type{});
    while (j >= begin) tile(j--, std::true_type{});""", id="by search"),
    pytest.param("""
    const int begin = max(0, m_start + diagonal - LEFT) / BLOCK_N;""", """
    for (; j >= begin; j--)
        if (j >= full || j * BLOCK_N < m_start + BLOCK_M - 1 + diagonal - LEFT) tile(j, std::true_type{});
        else tile(j, std::false_type{});""", id="one loop"),
])  # fmt: skip
@pytest.mark.long
def test_other_orders_and_walks_are_right(borders, walk):
    text = swapped("addresses", "state")  # the one does not need the other
    before, _, behind = text.partition("    // The first row")
    middle = behind.partition("// PART")
    begin, _, end = (borders + "\n" + "".join(middle[1:])).partition("    for (; j >= full;")
    assert check("9.5", before + begin + walk + "\n// PART" + end.partition("// PART")[2])


@pytest.mark.long
def test_the_lectures_walk_is_told_the_window():
    full, whole, begin = (f"for (; j >= {x}; j--)" for x in ("full", "whole", "begin"))
    lecture = [(whole, full.replace("full", "0")), (f"    {begin} tile(j, std::true_type{{}});\n", "")]
    assert "of a kernel without a window" in failure("9.5", *changed("9.5", *lecture)).sentence


# ---- 9.7: a kernel of one's own --------------------------------------------------------------------------------------
def lazy(above, base):
    """The kernel of 9.7 with a lazy rescaling."""
    old = """            const float base = x == -INFINITY ? 0.f : x;
            const float correction = exp2_approx((m_i[r] - base) * scale_log2);
            m_i[r] = x, l_i[r] *= correction;
            for (int n = 0; n < O_TILES; n++)
                for (int e = 0; e < 2; e++) acc[r / 2][n][r % 2 * 2 + e] *= correction;
"""
    new = f"""            if (__any_sync(~0u, (x - m_i[r]) * scale_log2 > {above})) {{
                const float correction = exp2_approx((m_i[r] - ({base})) * scale_log2);
                m_i[r] = x, l_i[r] *= correction;
                for (int n = 0; n < O_TILES; n++)
                    for (int e = 0; e < 2; e++) acc[r / 2][n][r % 2 * 2 + e] *= correction;
            }}
            const float base = m_i[r] == -INFINITY ? 0.f : m_i[r];
"""
    return changed("9.7", (old, new))


FINITE = "x == -INFINITY ? 0.f : x"


@pytest.mark.long
def test_a_lazy_rescaling():
    assert check("9.7", *lazy(8, FINITE))
    assert failure("9.7", *lazy(8, "x")).diagnosis == "masked-rows-nan"
    assert failure("9.7", *lazy(16.5, FINITE)).diagnosis == "p-overflows"


@pytest.mark.parametrize(("ldmatrix", "conflicts", "others", "slug"), [
    (26, 0, 0, ""), (52, 0, 0, "too-few-rows-per-warp"), (26, 700, 30, "bank-conflicts"), (26, 0, 30, "other-accesses"),
])  # fmt: skip
def test_the_wavefronts_are_told_by_what_takes_them(ldmatrix, conflicts, others, slug):
    ideal = 4 * ldmatrix + others
    counted = Counters(mma=100, ldmatrix=ldmatrix, shared_load_wavefronts=ideal + conflicts, shared_load_ideal=ideal)
    report = types.SimpleNamespace(counters=counted)
    if not slug:
        assert expect_budget(report, 1.25, "a case") == 1.04
        return
    with pytest.raises(CheckFailed, match=f"{conflicts / 100:.2f} are bank conflicts") as failed:
        expect_budget(report, 1.25, "a case")
    assert failed.value.diagnosis == slug
