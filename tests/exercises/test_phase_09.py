"""Phase 9's checks: right answers pass, and the mistakes that learners make are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.exercises.phase_09 import PARTS
from flashlab.kernels import step
from flashlab.simt import SimtError, find_compiler

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)

LESSON = Path(__file__).resolve().parents[2] / "src" / "lessons" / "09_past_flash_attention_2_exercises.py"
TEXTS = {}  # name -> {"STARTER": text, "SOLUTION": text}
for kind, cell in re.findall(r"# BEGIN (STARTER|SOLUTION)\n(.*?)# END", LESSON.read_text(), re.S):
    for name, text in re.findall(r'^(\w+) = r"""(.*?)"""', cell, re.S | re.M):
        TEXTS.setdefault(name, {})[kind] = text


def solution(name, *changes):
    text = TEXTS[name]["SOLUTION"]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def diagnosis(id, *answers):
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers)
    assert len(str(caught.value)) > 20
    return caught.value.diagnosis


ANSWERS = {
    "9.3": "rescale",
    "9.4": "merge_loop",
    "9.5": "kernel",
    "9.6": ("before_loop", "in_loop"),
    "9.7": "my_kernel",
    "9.8": "store",
    "9.9": "output",
    "9.12": "my_kernel_128",
}


@pytest.mark.parametrize("id", ANSWERS)
def test_text_is_wanted(id):
    assert diagnosis(id, *[3] * (1 if isinstance(ANSWERS[id], str) else 2)) == "wrong-type"


@pytest.mark.parametrize(
    "change, slug",
    [
        pytest.param(
            ("exp2_approx((part_lse[s * rows + row] - base) * LOG2E)", "1.f"),
            "split-not-weighted",
            marks=pytest.mark.long,
        ),
        (("l_i += weight;", "l_i = 1.f;"), "split-not-normalised"),
        ((" - base", " - m_i"), "masked-rows-nan"),
        (("weight * x.y", "x.y"), "split-not-weighted"),
        pytest.param((" * LOG2E", ""), "split-not-weighted", marks=pytest.mark.long),
        pytest.param(("const float weight", "const int weight"), "split-not-added", marks=pytest.mark.long),
        pytest.param(
            ("l_i += weight;", "l_i += __half2float(__float2half(weight));"),
            "merge-in-low-precision",
            marks=pytest.mark.long,
        ),
        (
            ("acc[i] += weight * x.x", "const float w = __half2float(__float2half(weight)); acc[i] += w * x.x"),
            "merge-in-low-precision",
        ),
        pytest.param(
            ("acc[i] += weight * x.x, acc[i + 1] +=", "if (s == 0) acc[i] += weight * x.x, acc[i + 1] +="),
            "split-not-added",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_wrong_merge(change, slug):
    got = diagnosis("9.4", solution("merge_loop", change))
    assert got == slug


@pytest.mark.parametrize(
    "change, slug",
    [
        (("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = 0"), "wrong-wait-count"),
        pytest.param(("load_kv(j - STAGES + 1)", "load_kv(j - 1)"), "wrong-order", marks=pytest.mark.long),
        (("cp_async_wait<STAGES - 1>", "cp_async_wait<STAGES>"), "read-before-wait"),
    ],
)
def test_a_wrong_third_stage(change, slug):
    texts = (solution(name, *[change] if change[0] in TEXTS[name]["SOLUTION"] else []) for name in ANSWERS["9.6"])
    assert diagnosis("9.6", *texts) == slug


# ---- 9.1: Python ----------------------------------------------------------------------------------------------------
def tiles(m_start, block_m, block_n, seq_q, seq_k, causal, up=1, first=1):
    end, full = -(-seq_k // block_n), seq_k // block_n
    if causal:
        diagonal = seq_k - seq_q
        end = max(0, min(end, (m_start + block_m + diagonal + up * (block_n - 1)) // block_n))
        full = max(0, min(full, (m_start + first + diagonal) // block_n))
    return end, full


def test_tiles():
    assert check("9.1", tiles)


# ---- 9.3: the bug hunt -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("l_i[r] *= correction;", "l_i[r] += correction;"), marks=pytest.mark.long),
        ("acc[n][2 * r + 1] *= correction", "acc[n][2 * r + 1] += 0.f"),
        pytest.param(("if (__any_sync(~0u, moved)) {", "if (false) {"), marks=pytest.mark.long),
    ],
)
def test_a_wrong_rescaling(change):
    got = diagnosis("9.3", solution("rescale", change))
    assert got not in ("does-not-compile", "not-solved-yet")


@pytest.mark.long
def test_a_vote_is_for_speed_alone():
    # The four lanes of a quad wish the same, and nobody else has a part of their rows.
    assert check("9.3", solution("rescale", ("__any_sync(~0u, moved)", "moved")))


# ---- 9.5: the parts --------------------------------------------------------------------------------------------------
def swapped(a, b):
    text = solution("kernel")
    one, other = f"// PART {a}\n", f"// PART {b}\n"
    return text.replace(one, "@@").replace(other, one).replace("@@", other)


def letter(name):
    return next(x for x, part in PARTS.items() if part == name)


@pytest.mark.parametrize(
    "a, b",
    [
        ("rescale", "probabilities"),
        ("row maxima", "scores"),
        ("swizzle", "shared memory"),
        ("addresses", "first copies"),
        ("store", "launch"),
    ],
)
def test_a_part_out_of_place_is_named(a, b):
    with pytest.raises(CheckFailed) as caught:
        check("9.5", swapped(letter(a), letter(b)))
    assert caught.value.diagnosis == "part-out-of-place"
    assert a in str(caught.value) or b in str(caught.value)


def test_parts_left_out_or_used_twice():
    line = f"// PART {letter('store')}\n"
    assert diagnosis("9.5", solution("kernel", (line, ""))) == "part-missing"
    assert diagnosis("9.5", solution("kernel", (line, line + line))) == "part-twice"
    assert diagnosis("9.5", solution("kernel", (line, line + "// PART Z\n"))) == "part-unknown"


def test_other_orders_are_right():
    assert check("9.5", swapped(letter("state"), letter("which keys")))


@pytest.mark.parametrize(
    "change, slugs",
    [
        (("for (; j >= full; j--) tile(j, std::true_type{});", ""), ("tail-not-masked", "diagonal-not-masked")),
        (("for (; j >= full; j--)", "for (; j >= 0; j--)"), ("everything-masked",)),
        pytest.param(("for (; j >= 0; j--)", "for (; j > 0; j--)"), ("wrong-walk",), marks=pytest.mark.long),
    ],
)
def test_wrong_glue(change, slugs):
    assert diagnosis("9.5", solution("kernel", change)) in slugs


# ---- 9.7: a kernel of one's own --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [pytest.param("p9_4_warp_tiles", marks=pytest.mark.long), "p9_flash"])
def test_the_series_own_kernels_are_accepted(name):
    assert check("9.7", step(name).path.read_text())


def test_right_but_too_dear():
    assert diagnosis("9.7", step("p8_6_store").path.read_text()) == "too-few-rows-per-warp"


@pytest.mark.parametrize(
    "change, slug",
    [
        (("(column / 8 ^ row % 8) * 16", "column * 2"), "bank-conflicts"),
        (('extern "C" int forward', "int forward"), "wrong-entry"),
        (("        __syncthreads();                                               // nobody", "        //"), None),
        (("constexpr int WARPS = 4,", "constexpr int WARPS = 4"), "does-not-compile"),
        pytest.param(("m_i[r] = x, l_i[r] *= correction;", "m_i[r] = x;"), "l-not-rescaled", marks=pytest.mark.long),
        pytest.param(("ldmatrix_x4_trans(b,", "ldmatrix_x4(b,"), "v-not-transposed", marks=pytest.mark.long),
    ],
)
def test_a_wrong_kernel(change, slug):
    got = diagnosis("9.7", solution("my_kernel", change))
    assert got == slug or (slug is None and got in ("race", "stage-overwritten", "read-before-wait"))


def test_an_empty_page_is_not_solved_yet():
    assert diagnosis("9.7", "") == "not-solved-yet"


# ---- what only some inputs show --------------------------------------------------------------------------------------
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
    return solution("my_kernel", (old, new))


FINITE = "x == -INFINITY ? 0.f : x"


def test_a_lazy_rescaling():
    assert check("9.7", lazy(8, FINITE))
    assert diagnosis("9.7", lazy(8, "x")) == "masked-rows-nan"
    assert diagnosis("9.7", lazy(16.5, FINITE)) == "p-overflows"


def test_the_rescaling_of_9_3_minds_rows_without_a_key_and_every_lane():  # that it stays lazy is in test_hunts.py
    assert diagnosis("9.3", solution("rescale", ("__any_sync(", "__all_sync("))) == "row-not-moved"
    base = ("m_new[r] == -INFINITY ? 0.f : m_new[r]", "m_new[r]")
    assert diagnosis("9.3", solution("rescale", base)) == "masked-rows-nan"


def test_the_maximum_moves_alone():
    vote = "        if (__any_sync(~0u, moved)) {"
    alone = "        for (int r = 0; r < 2; r++) if (!__any_sync(~0u, moved)) m_i[r] = m_new[r];\n"
    assert diagnosis("9.3", solution("rescale", (vote, alone + vote))) == "maximum-moved-alone"


def test_a_merge_at_head_dim_128():
    inner = ("            acc[i] +=", "            l_i += weight;\n            acc[i] +=")
    assert diagnosis("9.4", solution("merge_loop", ("        l_i += weight;\n", ""), inner)) == "wrong-at-head-dim-128"


@pytest.mark.long
def test_a_merge_of_large_sums():
    base = ("m_i == -INFINITY ? 0.f : m_i", "0.f")
    assert diagnosis("9.4", solution("merge_loop", base)) == "no-max-subtraction"


def test_masked_is_a_constant():
    text = solution(
        "kernel",
        ("auto is_masked", "bool MASKED"),
        ("        constexpr bool MASKED = decltype(is_masked)::value;\n", ""),
        ("std::true_type{}", "true"),
        ("std::false_type{}", "false"),
    )
    assert diagnosis("9.5", text) == "not-a-constant"


def test_q_is_waited_for_alone_and_tiles_come_in_order():
    before, loop = solution("before_loop"), solution("in_loop")
    as_given = before.replace("cp_async_wait<STAGES - 1>", "cp_async_wait<1>")
    assert diagnosis("9.6", as_given, loop) == "waits-too-long"
    assert diagnosis("9.6", before, loop.replace("load_kv(j - STAGES + 1)", "load_kv(j + 2)")) == "wrong-tile"
