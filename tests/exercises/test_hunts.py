"""The bug hunts: untouched they show symptoms and no cause; touched they are told why; each has a bug of its own."""

import re

import pytest
from lesson_answers import answers_of, cell_of, changed, failure

from flashlab.exercises import check
from flashlab.exercises.answers import fingerprint
from flashlab.exercises.registry import exercises, find
from flashlab.exercises.rule import RULES
from flashlab.simt import SimtError, find_compiler

HUNTS = [e.id for e in exercises().values() if e.difficulty == "Bug hunt" and e.order < (90,)]
try:
    find_compiler()
except SimtError:
    HUNTS = [id for id in HUNTS if find(id).order < (6,)]


def params(table):
    """The rows of the hunts that can be run here; those that need the emulator are slow, some of LONG long."""

    def marks(id, *rest):
        long = [pytest.mark.long] if (id, *rest[-1:]) in LONG or not (rest or id in UNTOUCHED) else []
        return long + ([pytest.mark.slow] if find(id).order >= (6,) else [])

    return [pytest.param(*row, marks=marks(*row)) for row in table if row[0] in HUNTS]


# Five seconds each, and the same is found in the tests of the exercise's phase.
LONG = {
    ("3.5", "lse-mixed-bases"), ("3.5", "lse-in-base-2"), ("3.6", "finite-sentinel"), ("8.6", "bank-conflicts"),
    ("8.6", "not-a-permutation"), ("9.3", "moved-before-corrected"), ("11.7", "out-of-order"),
}  # fmt: skip
UNTOUCHED = ("2.5", "6.5", "12.11")  # by default; that the others show symptoms, tests/test_notebooks.py sees
# What a touch that changes nothing is told: the bug.
TOUCHED = params([
    ("1.7", "offs_n = tl.arange(0, BLOCK_N)", "offs_n = tl.arange(0, BLOCK_N) + 0", "tail-not-masked"),
    ("2.5", "q = Q.float()", "q = Q.float() + 0", "causal-top-left"),
    ("2.6", "q = Q.float()", "q = Q.float() + 0", "first-tile-masked"),
    ("3.5", "    o_ptrs = O_ptr", "    offs_m += 0\n    o_ptrs = O_ptr", "lse-in-base-2"),
    ("3.6", "    o_ptrs = O_ptr", "    offs_m += 0\n    o_ptrs = O_ptr", "finite-sentinel"),
    ("6.2", "const float value", "; const float value", "race"),
    ("6.5", "const int row = ", "; const int row = ", "wrong-kv-head"),
    ("7.4", "0x10", "16", "wrong-shuffle-mask"),
    ("7.6", "uint32_t a[4];", "; uint32_t a[4];", "uninitialised-shared"),
    ("8.5", "__syncthreads();", "; __syncthreads();", "stage-overwritten"),
    ("8.6", "return row", "; return row", "not-a-permutation"),
    ("9.3", "m_i[r] = m_new[r];", "m_i[r] = m_new[r]; ;", "moved-before-corrected"),
    ("11.6", "uint32_t o_rmem[4];", "; uint32_t o_rmem[4];", "not-read-yet"),
    ("11.7", "if (!FIRST) add_output();", "; if (!FIRST) add_output();", "released-too-early"),
    ("11c.4", "    wgmma_wait<0>();", "    ; wgmma_wait<0>();", "k-overwritten"),
])  # fmt: skip
# A change that goes half the way, or the wrong way.
HALF = params([
    ("1.7", [("offs_m[:, None] < M, 0.0", "offs_n[None, :] < M, 0.0")], "mask-uses-seq-q"),
    ("2.5", [("row[:, None]", "row[:, None] + abs(N - M)")], "own-slip"),
    ("2.6", [("(acc / l_safe[:, None])", "(acc / l_safe[:, None]).nan_to_num(0.0)")], "nan-hidden"),
    ("2.6", [("s - m_new[:, None]", "s - torch.where(m_new == -math.inf, 0.0, m_new)[:, None]")], "first-tile-masked"),
    ("4.7", [('where(seen, s, float("-inf"))', "where(seen, s, -1e30)")], "capped-after-mask"),
    ("4.8", [("rows = tl.arange(0, BLOCK)", "rows = tl.arange(0, BLOCK).to(tl.int64)")], "batch-and-head-overflow"),
    ("4.8", [("batch = pid // heads", "batch = (pid // heads).to(tl.int64)")], "head-and-rows-overflow"),
    ("5.9", [("if start_m == start_n:", "if causal and start_m == start_n:")], "always-one-branch"),
    ("5.10", [("math.ceil(M / BLOCK_M)", "math.ceil(N / BLOCK_N)")], "limit-missing"),
    ("6.2", [("x + half];\n        }\n    }", "x + half];\n            __syncwarp();\n        }\n    }")], "race"),
    ("6.5", [("head % p.kv_heads", "head / p.kv_heads")], "wrong-kv-head"),
    ("7.4", [("0x10", "0b01")], "limit-missing"),
    ("7.6", [("i < keys * D; i += 32) v_smem[i] = v_gmem[i]",
              "i < 16 * D; i += 32) v_smem[i] = i < keys * D ? v_gmem[i] : T(0.f)")], "wrong-function"),
    ("8.5", [("        load_kv(j + STAGES - 1);\n        cp_async_wait<2 * STAGES - 2>();\n",
              "        cp_async_wait<2 * STAGES - 4>();\n        load_kv(j + STAGES - 1);\n")], "stage-overwritten"),
    ("8.6", [("row % 8", "row % 4")], "division-missing"),
    ("9.3", [("if (__any_sync(~0u, moved)) {", "{"), ("(m_i[r] - base)", "(before - base)"),
             ("                if (", "                const float before = m_i[r];\nif (")], "not-lazy"),
    ("11.6", [("HEAD_DIM / SLAB>", "0>")], "no-overlap"),
    ("11.6", [("HEAD_DIM / SLAB>", "1>"), ("if (first_thread) bulk", "if (first_thread && slab == 0) bulk")],
     "not-read-yet"),
    ("11.6", [("HEAD_DIM / SLAB>", "1>"), ("            fence_proxy_async();\n", "")], "proxy-fence"),
    ("11.7", [("wgmma_wait<1>", "wgmma_wait<0>")], "out-of-order"),
    ("11c.4", [("1 + consumer, GROUP", "1 + consumer, CONSUMERS * GROUP")], "deadlock"),
    ("12.11", [("first = b * sequence_stride", "first = b * head_dim")], "one-row-each"),
])  # fmt: skip
# Words of a diagnosis, which untouched code is not told.
CAUSES = re.compile(
    r"rescal|correction|invert|upside|guard|\bbase\b|barrier|swizzl|transpos|\.trans|uninitial|nobody has written|"
    r"sentinel|align|wait for|overwr|no barrier|\brace\b|shuffle|leaves the quad|// group|belongs to|not masked|padded|"
    r"padding|\bexp\b|\bln\b|log2|fence|proxy|wgmma|released|early",
    re.I,
)


@pytest.mark.parametrize("id", params([(id,) for id in HUNTS]))
def test_untouched_it_shows_symptoms_and_no_cause(id):
    failed = failure(id, *answers_of(id, "exercises"))
    said = str(failed).partition("without a cause.")[2]
    assert failed.diagnosis == "symptoms"
    assert not CAUSES.search(re.sub(r"\(.*?\)", "", said)), said
    lines = said.strip().splitlines()
    assert re.fullmatch(r"\d+ of \d+ cases wrong", lines[0]) and len(lines) <= 15
    assert "is " in said and "should be" in said or "objects" in said, "values, or what the emulator counted"
    assert failed._render_traceback_()[-1].endswith("(symptoms)")


def test_a_solution_is_told_the_bugs_history():  # nbval compares it for every hunt: the solutions show it
    assert "The bug's history: " in repr(check("2.5", *answers_of("2.5", "solutions")))


@pytest.mark.parametrize("id, old, new, slug", TOUCHED)
@pytest.mark.every(2)
def test_touched_it_is_told_its_bug(id, old, new, slug):
    assert failure(id, *changed(id, (old, new), kind="exercises")).diagnosis == slug


def test_every_hunt_has_a_bug_of_its_own():
    slugs = {p.values[0]: p.values[-1] for p in TOUCHED}
    slugs |= {id: RULES[id].rows[0].slug for id in set(HUNTS) - set(slugs)}  # a rule's `bug`, tested as all rows are
    assert set(slugs) == set(HUNTS)
    assert len(set(slugs.values())) == len(slugs)


@pytest.mark.parametrize("id, changes, slug", HALF)
@pytest.mark.every(4)
def test_half_a_repair_is_told_why_it_is_none(id, changes, slug):
    failed = failure(id, *changed(id, *changes, kind="exercises"))
    assert failed.diagnosis == slug and len(str(failed)) > 20 and failed.case


@pytest.mark.parametrize("id", HUNTS)
def test_its_fingerprint_is_that_of_the_lesson(id):
    found = fingerprint(*answers_of(id, "exercises"))
    assert found == find(id).untouched, f'write untouched="{found}" into the registration of {id}'


@pytest.mark.parametrize("id", [id for id in HUNTS if find(id).bug])
def test_a_hunt_begins_with_its_bug(id):
    starter, repaired = (cell_of(id, kind) for kind in ("exercises", "solutions"))
    assert starter != repaired and all(new in starter for _, new in find(id).bug)
    assert not re.search(r"BEGIN|(#|//):", starter + repaired)


def test_comments_and_blank_space_are_no_change():
    old = answers_of("2.5", "exercises")
    text = "    q = Q.float()\n"
    same = changed("2.5", (text, "    # a thought\n\n    q = Q . float( )  # another\n"), kind="exercises")
    assert fingerprint(*same) == fingerprint(*old)
    loop = "        m_i = m_new\n"
    assert fingerprint(*changed("2.5", (loop, "    m_i = m_new\n"), kind="exercises")) != fingerprint(*old), (
        "out of the loop is a change"
    )
    cuda = answers_of("6.2", "exercises")[0]
    assert fingerprint(cuda) == fingerprint(cuda.replace("__shared__ float", "__shared__   float  /* here */"))
    assert fingerprint(cuda) != fingerprint(cuda.replace("half > 0", "half > 1"))


def test_what_is_no_source_is_a_change():
    assert fingerprint(len) == "" and fingerprint(3) == ""
