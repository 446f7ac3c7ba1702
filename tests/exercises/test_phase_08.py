"""Phase 8's checks: right answers pass, and the mistakes that learners make are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashlab.check import CheckFailed
from flashlab.exercises import check, phase_08
from flashlab.kernels import regions, step
from flashlab.simt import SimtError, find_compiler
from flashlab.simt import run as emulator

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)

LESSON = Path(__file__).resolve().parents[2] / "src" / "lessons" / "08_pipelines_and_banks_exercises.py"
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
    "8.3": "at",
    "8.4": "in_flight",
    "8.5": "loop_head",
    "8.6": "tile_addresses",
    "8.7": "kernel",
    "8.8": "blank_page",
}


@pytest.mark.parametrize("id", ANSWERS)
def test_text_is_wanted(id):
    assert diagnosis(id, *[3] * (1 if isinstance(ANSWERS[id], str) else 2)) == "wrong-type"


def test_wavefronts():
    assert check("8.1", lambda w: max([r * w // 16 % 8 for r in range(8)].count(g) for g in range(8)))


@pytest.mark.parametrize(
    "place, slug",
    [
        (lambda row, chunk: chunk, "bank-conflicts"),
        (lambda row, chunk: chunk ^ (row // 2 % 8), "bank-conflicts"),
        (lambda row, chunk: (chunk + row) % 8, "not-a-permutation"),  # at 16 chunks
        (lambda row, chunk: chunk ^ row, "not-a-permutation"),
    ],
)
def test_a_wrong_swizzle(place, slug):
    assert diagnosis("8.2", place) == slug


def test_other_swizzles_are_welcome():
    assert check("8.2", lambda row, chunk: chunk ^ (row % 8))
    assert check("8.2", lambda row, chunk: chunk // 8 * 8 + (chunk + row) % 8)
    assert check("8.3", solution("at", ("(column / 8 ^ row % 8)", "(column / 64 * 8 + (column / 8 + row) % 8)")))


@pytest.mark.parametrize(
    "formula, slug",
    [
        ("row * ROW_BYTES + column * 2", "bank-conflicts"),
        ("row * ROW_BYTES + (column / 8 ^ row / 2 % 8) * 16", "bank-conflicts"),
        ("row * HEAD_DIM + (column / 8 ^ row % 8) * 16", None),  # rows overlap: one race or another
        ("row * ROW_BYTES + column / 8 ^ row % 8 * 16", None),
        ("rows * ROW_BYTES", "does-not-compile"),
    ],
)
def test_a_wrong_address(formula, slug):
    got = diagnosis("8.3", solution("at", ("row * ROW_BYTES + (column / 8 ^ row % 8) * 16", formula)))
    assert got == slug or (slug is None and got not in ("does-not-compile", "not-solved-yet"))


@pytest.mark.parametrize(
    "which, formula, slug",
    [
        ("K", "0", "waits-too-long"),
        ("K", "STAGES - 1", "waits-too-long"),  # right with two stages
        ("K", "2 * STAGES - 2", "read-before-wait"),
        ("K", "2 * STAGES - 5", "wrong-value"),
        ("V", "2 * STAGES - 4", "waits-too-long"),
        ("V", "2 * STAGES - 1", "read-before-wait"),
    ],
)
def test_a_wrong_count_of_groups(which, formula, slug):
    right = {"K": "2 * STAGES - 3;", "V": "2 * STAGES - 2;"}[which]
    assert (
        diagnosis("8.4", solution("in_flight", (f"IN_FLIGHT_{which} = {right}", f"IN_FLIGHT_{which} = {formula};")))
        == slug
    )


def test_a_missing_barrier_is_called_so():
    with pytest.raises(CheckFailed, match="barrier") as caught:
        check("8.5", solution("loop_head", ("        __syncthreads();", "        //")))
    assert caught.value.diagnosis in ("stage-overwritten", "race")


REFILL = "        load_kv(j + STAGES - 1);"


def test_a_pipeline_without_overlap_is_no_repair():
    again = (REFILL, f"{REFILL}\n        cp_async_wait<0>();\n        __syncthreads();")
    assert diagnosis("8.5", solution("loop_head", again)) == "no-overlap"


def test_a_wait_for_everything_is_too_long_with_three_stages():
    wait = ("        cp_async_wait<STAGES - 2>();", "        cp_async_wait<0>();")
    assert diagnosis("8.5", solution("loop_head", wait)) == "waits-too-long"


@pytest.mark.long
def test_a_repair_with_two_barriers():
    two_barriers = "\n".join([
        "        const int n_start = j * BLOCK_N, stage = j % STAGES * KV_BYTES;", "        __syncthreads();", REFILL,
        "        cp_async_wait<STAGES - 1>();", "        __syncthreads();",
    ])  # fmt: skip
    assert check("8.5", two_barriers)


# ---- 8.7: the parts -------------------------------------------------------------------------------------------------


def swapped(a, b):
    """The solution of 8.7 with two parts exchanged, by the names of their regions."""
    a, b = (phase_08._LETTERS[name] for name in (a, b))
    text = re.sub(rf"@{a}\b", "@@", TEXTS["kernel"]["SOLUTION"])
    return re.sub(rf"@{b}\b", f"@{a}", text).replace("@@", f"@{b}")


def test_the_parts_are_the_whole_kernel_and_say_nothing():
    assert set(phase_08._LETTERS) <= set(regions.regions(step("p8_6_store").path.read_text()))
    joined = "\n".join(phase_08.parts().values())
    source = step("p8_6_store").path.read_text()
    lines = {re.sub(r"//.*", "", line).strip() for line in source.split("\n")} - {
        "",
        "}",
        "for (int j = 0; j < tiles; j++) {",
    }
    assert lines <= {line.strip() for line in joined.split("\n")} and "//" not in joined


@pytest.mark.parametrize("first, later", [(a, b) for a, b, _ in phase_08._ORDER])
def test_every_part_out_of_order_is_named(first, later):
    with pytest.raises(CheckFailed) as caught:
        check("8.7", swapped(first, later))
    assert caught.value.diagnosis == "out-of-order"
    assert re.search(r"part [A-Q] has to come before part [A-Q]", str(caught.value))


@pytest.mark.parametrize(
    "first, later", [pytest.param("which keys", "state", marks=pytest.mark.long), ("first copies", "state")]
)
def test_orders_that_do_not_matter(first, later):
    assert check("8.7", swapped(first, later))


@pytest.mark.parametrize(
    "old, new, slug",
    [
        ("@J\n", "", "part-missing"),
        ("@J\n", "@J\n@J\n", "part-twice"),
        ("@J\n", "@X\n", "unknown-part"),
        ("    @E\n}\n", "}\n@E\n", "outside-the-loop"),
        ("@D\nfor (int j = 0; j < tiles; j++) {\n", "for (int j = 0; j < tiles; j++) {\n@D\n", "inside-the-loop"),
        ("int j = 0", "int i = 0", "does-not-compile"),
    ],
)
def test_a_kernel_put_together_wrongly(old, new, slug):
    assert diagnosis("8.7", solution("kernel", (old, new))) == slug


# ---- 8.8: the blank page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["p9_5_prefetch", *(pytest.param(x, marks=pytest.mark.long) for x in ("p8_6_store", "p8_side_shuffle_store"))],
)
def test_other_right_kernels_are_welcome(name):
    assert check("8.8", step(name).path.read_text())


@pytest.mark.parametrize(
    "name, slug",
    [
        pytest.param("p8_3_stages", "bank-conflicts", marks=pytest.mark.long),
        ("p8_5_registers", "part-sectors"),
        pytest.param("p8_side_shared_kv", "no-overlap", marks=pytest.mark.long),
    ],
)
def test_a_right_kernel_that_is_slow_is_told_why(name, slug):
    assert diagnosis("8.8", step(name).path.read_text()) == slug


COPY = "cp_async<16>(smem_u32(smem + at(row, column)), from, there ? 16 : 0);"
PLAIN = """uint4 x = make_uint4(0, 0, 0, 0);
        if (there) x = *(const uint4*)(gmem + row * stride + column);
        *(uint4*)(smem + at(row, column)) = x;"""


@pytest.mark.parametrize(
    "old, new, slugs",
    [
        pytest.param("(column / 8 ^ row % 8) * 16", "column * 2", ("bank-conflicts",), marks=pytest.mark.long),
        (COPY, PLAIN, ("no-cp-async",)),
        ("        __syncthreads();                        // K_j (and Q)", "        //",
         ("race", "stage-overwritten", "read-before-wait")),
        ("        __syncthreads();                           // V_j is here", "        //",
         ("race", "read-before-wait", "stage-overwritten", "uninitialised-shared")),
        ("    __syncwarp();", "    //", ("race", "uninitialised-shared")),
        pytest.param("m[r] = top, l[r] *= correction;", "m[r] = top;", ("l-not-rescaled",), marks=pytest.mark.long),
        pytest.param(" + ahead) - j * ROWS", ") - j * ROWS", None, marks=pytest.mark.long),
        ("    cp_async_wait<0>();\n    __syncthreads();  ", "    //", ("never-waited",)),
        ('extern "C" int forward', 'extern "C" int attend', ("wrong-entry",)),
        ("ldmatrix_x4_trans", "ldmatrix_x4", ("v-not-transposed",)),
    ],
)  # fmt: skip
def test_a_wrong_page(old, new, slugs):
    got = diagnosis("8.8", solution("blank_page", (old, new)))
    assert got in slugs if slugs else got not in ("does-not-compile", "not-solved-yet", "wrong-entry"), got


def test_shared_memory_that_is_aligned_by_luck():
    page = solution("blank_page", ("extern __shared__ __align__(128) char", "extern __shared__ char"))
    with pytest.raises(CheckFailed, match=r"aligned to 1 byte only. Declare it with __align__\(16\)") as caught:
        check("8.8", page)
    assert caught.value.diagnosis == "misaligned"


def test_shared_memory_that_was_not_asked_for():
    text = step("p8_6_store").path.read_text()
    assert diagnosis("8.8", text.replace("    cudaFuncSetAttribute", "    //")) == "launch-configuration"


@pytest.mark.parametrize("page", ["", "\n\n", "// YOUR CODE HERE"])
def test_an_empty_page_is_not_solved_yet(page):
    assert diagnosis("8.8", page) == "not-solved-yet"


@pytest.mark.parametrize(
    "formula, slug",
    [
        ("row * (ROW_BYTES + 16) + column * 2", "outside-the-tile"),
        ("row * ROW_BYTES + (column / 8 ^ row) * 16", "outside-the-tile"),
        ("row * ROW_BYTES + (column / 8 + row) % 8 * 16", "not-a-permutation"),  # at head_dim 128
    ],
)
def test_at_is_tried_alone(formula, slug):
    assert diagnosis("8.3", solution("at", ("row * ROW_BYTES + (column / 8 ^ row % 8) * 16", formula))) == slug


def test_a_brace_is_forgotten_and_a_tile():
    assert diagnosis("8.7", solution("kernel", ("    @E\n}\n", "    @E\n"))) == "braces"
    assert diagnosis("8.7", solution("kernel", ("j < tiles", "j < tiles - 1"))) == "wrong-walk"


def test_a_loop_without_an_end_is_told_soon(monkeypatch):
    """After PATIENCE seconds of the kernel's own work, in which no block ends; others' work does not count."""
    assert emulator.PATIENCE <= 10
    monkeypatch.setattr(emulator, "PATIENCE", 2.0)
    assert diagnosis("8.7", solution("kernel", ("j++", ""))) == "timeout"
