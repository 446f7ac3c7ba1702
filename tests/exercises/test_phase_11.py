"""Phase 11's checks: right answers of several styles pass, and the mistakes that learners make are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lesson_answers import answers_of

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import PROBES, built, probe, source_of
from flashlab.cuda import load_inline
from flashlab.exercises import check, phase_11
from flashlab.exercises.rule import RULES
from flashlab.kernels import step
from flashlab.simt import SimtError, find_compiler

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)

LESSONS = Path(__file__).resolve().parents[2] / "src" / "lessons"
PAGES = "".join((LESSONS / f"{name}_exercises.py").read_text() for name in ("11_hopper", "11c_tuned"))
TEXTS = {}  # name -> {"STARTER": text, "SOLUTION": text}
for kind, cell in re.findall(r"# BEGIN (STARTER|SOLUTION)\n(.*?)# END", PAGES, re.S):
    for name, text in re.findall(r'^(\w+) = r"""(.*?)"""', cell, re.S | re.M):
        TEXTS.setdefault(name, {})[kind] = text


def changed(name, *changes, of="SOLUTION"):
    text = TEXTS[name][of]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def failure(id, *answers):
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers)
    assert len(str(caught.value)) > 20
    return caught.value


def diagnosis(id, *answers):
    return failure(id, *answers).diagnosis


IDS = [*(f"11.{i}" for i in range(1, 9)), "11c.1"]  # test_phase_11_ladder.py has the others
LADDER = ("11.6", "11.7", "11.8")  # whole kernels: the solutions' notebook runs them too, and its outputs are compared


@pytest.mark.parametrize("id", [pytest.param(id, marks=[pytest.mark.long] * (id in LADDER)) for id in IDS])
def test_the_solution_passes(id):
    assert check(id, *answers_of(id, "solutions"))


@pytest.mark.parametrize("id", [id for id in IDS if id not in ("11.6", "11.7")])
def test_a_blank_is_not_solved_yet(id):
    assert diagnosis(id, *answers_of(id, "exercises")) == "not-solved-yet"


# ---- 11.1 ------------------------------------------------------------------------------------------------------------
def test_the_emulators_barrier_says_the_same():
    """What mbarrier_test_wait says of both parities after each operation of each script of the check."""
    given = RULES["11.1"].tried
    operations = torch.zeros(len(given), phase_11._STEPS, 2, dtype=torch.int32)
    operations[..., 0] = -1
    for block, (script, _) in enumerate(given):
        for at, (name, number) in enumerate(script):
            operations[block, at] = torch.tensor([phase_11.OPERATIONS.index(name), number])
    seen = torch.zeros_like(operations)
    arrivals = torch.tensor([n for _, n in given], dtype=torch.int32)
    source = torch.zeros(4096, dtype=torch.int8)
    phase_11._module(False).launch(
        "scripts", operations, arrivals, seen, source, len(given), phase_11._STEPS, echo=False
    )
    for row, (script, n) in zip(seen.tolist(), given, strict=True):
        assert [(bool(a), bool(b)) for a, b in row[: len(script)]] == phase_11.complete(script, n)


def test_a_barrier_that_outlives_the_call():
    phases = []

    def complete(script, arrivals):
        phases.append(0)
        return [(b, a) if len(phases) % 2 == 0 else (a, b) for a, b in phase_11.complete(script, arrivals)]

    assert diagnosis("11.1", complete) == "state-kept"


def test_other_barriers():
    model = phase_11.complete
    assert diagnosis("11.1", lambda s, n: model(s, n)[:-1]) == "wrong-shape"
    assert diagnosis("11.1", lambda s, n: [(a,) for a, _ in model(s, n)]) == "wrong-type"
    assert check("11.1", lambda s, n: [[int(a), int(b)] for a, b in model(s, n)])
    assert check("11.1", lambda s, n: torch.tensor(model(s, n)))


# ---- 11.2 ------------------------------------------------------------------------------------------------------------
def found_in_a_pipeline(parities, stages=2, tiles=13, consumers=2):
    """What the emulator finds where a pipeline runs with these parities; nothing where it is right."""
    table = torch.tensor([parities(i, stages) for i in range(tiles)], dtype=torch.int32)
    source = torch.arange(tiles * 32, dtype=torch.int32) // 32
    out, pauses = (torch.full((consumers, tiles), x, dtype=torch.int32) for x in (-1, 0))
    try:
        arguments = (table, pauses, source, out, tiles, stages, consumers, 1)
        phase_11._module(True).launch("pipeline", *arguments, echo=False)
    except SimtError as error:
        return str(error)
    return "" if bool((out == torch.arange(tiles)).all()) else "another tile"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_pipeline_runs_with_the_right_parities(stages):
    assert found_in_a_pipeline(phase_11.waits, stages) == ""


def test_the_emulator_sees_what_wrong_parities_do():
    assert "waits for ever" in found_in_a_pipeline(lambda i, s: (i % s, i // s % 2, i // s % 2))
    assert found_in_a_pipeline(lambda i, s: (i % s, i // s % 2, 1))


def test_a_float_is_no_number_of_bytes():
    right = phase_11.waits
    assert check("11.2", lambda i, s: [i % s, i // s & 1, i // s & 1 ^ 1], phase_11.tile_bytes)
    assert diagnosis("11.2", right, lambda rows, d, left: rows * (d * 2.0)) == "float"
    assert diagnosis("11.2", lambda i, s: (i % s, i / s % 2, right(i, s)[2]), phase_11.tile_bytes) == "float"


# ---- 11.3 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, slug",
    [
        (("tile + 32 * k, SWIZZLE_128", "tile + 16 * k, SWIZZLE_128"), "wrong-address"),
        (("tile + 32 * k, SWIZZLE_128, 16, 8 * 128", "tile + 32 * k, SWIZZLE_128, 16, 128"), "wrong-stride"),
        (("SWIZZLE_64", "SWIZZLE_128"), "wrong-swizzle"),
        (("8 * 64", "8 * 128"), "wrong-stride"),
        (("16 * 128 * k", "32 * k"), "wrong-address"),
        (("64 * 128, 8 * 128", "8 * 128, 64 * 128"), "wrong-stride"),
        (("64 * 128, 8 * 128", "16, 8 * 128"), "wrong-leading"),
        (("SWIZZLE_128, 64 * 128, 8 * 128", "SWIZZLE_128, 64 * 128, 8 * 128, 3"), "wrong-base-offset"),
        (("tile + 32 * k, SWIZZLE_128", "tile + 32 * k, SWIZZLE_NONE"), "wrong-swizzle"),
        (("tile + 32 * k, SWIZZLE_64", "tile, SWIZZLE_64"), "wrong-address"),
        (("v_rows(", "v_row("), "wrong-entry"),
    ],
)
def test_a_wrong_descriptor(change, slug):
    assert diagnosis("11.3", changed("descriptors", change)) == slug


def test_other_descriptors_of_the_same_tile():
    steps = (
        ("tile + 32 * k, SWIZZLE_128, 16, 8 * 128)", "tile, SWIZZLE_128, 0, 1024) + 2 * k"),
        ("SWIZZLE_64, 16", "SWIZZLE_64, 512"),
    )
    assert check("11.3", changed("descriptors", *steps))


# ---- 11.4 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_ladder_keeps_these_budgets(head_dim):
    kernel = source_of(step("p11_5_consumers"))
    report = probe(built(kernel, check=True, head_dim=head_dim), kernel, PROBES[0], head_dim=head_dim, timeline=1)
    consumers, used = (3, 160) if head_dim == 64 else (2, 240)
    shared = report.launches[0].shared_bytes
    block = (64 * consumers, 128, head_dim)
    assert phase_11.most_stages(*block, shared) == 2 and phase_11.most_stages(*block, shared - 1) == 1
    registers = {e.values[0] for e in report.launches[0].events if e.did == "registers"}
    assert registers == {used, 32 if consumers == 3 else 24}
    assert phase_11.consumer_registers(consumers, min(registers)) == used


def test_the_emulator_deals_out_as_many_registers():
    text = """#include "ptx_sm90.cuh"
__global__ void deal() {
    if (threadIdx.x >= CONSUMERS * 128) setmaxnreg_dec<PRODUCER>();
    else setmaxnreg_inc<CONSUMER>();
}
extern "C" int run(void* stream) {
    deal<<<1, CONSUMERS * 128 + 128, 0, (cudaStream_t)stream>>>();
    return (int)cudaGetLastError();
}
"""
    for consumers, more in ((2, 0), (4, 0), (4, 8)):
        numbers = {
            "CONSUMERS": consumers,
            "PRODUCER": 24,
            "CONSUMER": phase_11.consumer_registers(consumers, 24) + more,
        }
        module = load_inline(text, backend="emulator", defines=numbers)
        if not more:
            module.launch("run", echo=False)
            continue
        with pytest.raises(SimtError) as caught:
            module.launch("run", echo=False)
        assert "registers-missing" in str(caught.value)


# ---- 11.5 ------------------------------------------------------------------------------------------------------------
def test_blames_of_other_shapes():
    right = phase_11.waited_for
    assert diagnosis("11.5", lambda e, a: right(e, a)[1:]) == "wrong-shape"
    assert diagnosis("11.5", lambda e, a: [x for _, x in right(e, a)]) == "wrong-type"
    assert diagnosis("11.5", lambda e, a: [(w, x or None) for w, x in right(e, a)]) == "wrong-type"
    assert "warp is 0 for wait" in str(failure("11.5", lambda e, a: [(0, w) for _, w in right(e, a)]))
    assert "warps is {" in str(failure("11.5", lambda e, a: [(w, x | {w}) for w, x in right(e, a)]))
    assert check("11.5", lambda e, a: [[w, sorted(x)] for w, x in right(e, a)])


# ---- 11.6 and 11.7: the bug hunts ------------------------------------------------------------------------------------
# What they say untouched, touched, and half repaired is in test_hunts.py.
FENCE = "        fence_proxy_async();                                   // repaired\n"
BARRIER = "        named_barrier_sync(1 + CONSUMERS + consumer, GROUP);   // all 64 rows are stored\n"


@pytest.mark.parametrize(
    "changes, slug",
    [
        ([(FENCE, "        if (first_thread) fence_proxy_async();\n")], "proxy-fence"),
        pytest.param([(FENCE, "        __threadfence_block();\n")], "proxy-fence", marks=pytest.mark.long),
        pytest.param([(BARRIER, "")], None, marks=pytest.mark.long),
        (
            [("            bulk_commit();\n", "            bulk_commit();\n            bulk_commit(;\n")],
            "does-not-compile",
        ),
        (
            [("        if (first_thread) bulk_wait_read<0>();                 // the O before it has been read\n", "")],
            None,
        ),
    ],
)
def test_a_wrong_epilogue(changes, slug):
    with pytest.raises(CheckFailed) as caught:
        check("11.6", changed("epilogue", *changes))
    got, fences = caught.value.diagnosis, "fence_proxy_async" in changes[0][1]
    assert ("each thread that stores fences after its last store" in caught.value.sentence) == fences
    assert got == slug or (slug is None and got in ("race", "stage-overwritten", "proxy-fence", "never-waited"))


@pytest.mark.long
def test_the_one_who_stores_may_fence_after_the_barrier():
    fence = "            fence_proxy_async();\n            for (int column = 0;"
    assert check("11.6", changed("epilogue", (FENCE, ""), ("            for (int column = 0;", fence)))


RELEASE = "            if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));     // repaired\n"
RELEASE_K = "        if (first_thread) mbarrier_arrive(empty_k + 8 * stage);\n"
_CONSEQUENCES = ("deadlock", "stage-overwritten", "released-too-early", "read-before-wait", "mbarrier-arrivals")
O_THERE = "            output_is_there();\n"


@pytest.mark.parametrize(
    "changes, slug",
    [
        ([(RELEASE_K, ""), ("        wgmma_wait<FIRST", f"{RELEASE_K}        wgmma_wait<FIRST")], "released-too-early"),
        pytest.param([(RELEASE, ""), (O_THERE, f"{RELEASE}{O_THERE}")], "released-too-early", marks=pytest.mark.long),
        ([(RELEASE, "")], "deadlock"),
        ([(RELEASE, 2 * RELEASE)], "released-twice"),
        ([("wgmma_wait<FIRST ? 0 : 1>", "wgmma_wait<1>")], "wgmma-registers"),
        ([("empty_v + 8 * ((nth - 1) % STAGES)", "empty_v + 8 * stage")], "wrong-stage"),
        ([("empty_k + 8 * stage", "empty_k + 8 * ((nth + 1) % STAGES)")], "wrong-stage"),
    ],
)  # fmt: skip
def test_a_stage_released_wrongly(changes, slug):
    names = ("scores", "after_probabilities")
    texts = [TEXTS[name]["SOLUTION"] for name in names]
    for old, new in changes:
        assert sum(t.count(old) for t in texts) == 1
        texts = [t.replace(old, new) for t in texts]
    failed = failure("11.7", *texts)
    assert failed.diagnosis == slug
    assert slug != "deadlock" or "no consumer has said yet that a tile of V has been read" in failed.sentence


def test_every_thread_may_know_that_the_tile_was_read():
    late = (
        "            for (int i = 0; i < O_TILES",
        f"            ;\n{RELEASE}#pragma unroll\n            for (int i = 0; i < O_TILES",
    )
    text = changed(
        "after_probabilities", (RELEASE, ""), ("#pragma unroll\n            for (int i = 0; i < O_TILES", late[1])
    )
    assert check("11.7", TEXTS["scores"]["SOLUTION"], text)


def test_the_hunts_begin_with_the_ladders_lines():
    def bare(text):
        return re.sub(r"\s+|#pragma unroll", "", re.sub(r"//.*", "", text))

    assert bare(TEXTS["epilogue"]["SOLUTION"]) in bare(step("p11_10_epilogue").path.read_text())
    assert bare(TEXTS["scores"]["SOLUTION"]) in bare(step("p11_6_overlap").path.read_text())


# ---- 11.8 ------------------------------------------------------------------------------------------------------------
K_BAR = "full_k + 8 * stage"
K_BEFORE = "mbarrier_wait(empty_k + 8 * ((n - 1) % STAGES), (n - 1) / STAGES % 2);"
WAIT_K = "mbarrier_wait(empty_k + 8 * stage, free);"


@pytest.mark.parametrize(
    "changes, slugs",
    [
        ([("(n / STAGES + 1) % 2", "(n + 1) % 2")], {"deadlock", "stage-overwritten"}),
        ([("        setmaxnreg_dec<PRODUCER_REGISTERS>();\n", "")], {"registers-kept"}),
        ([(" && elect_one()", "")], {"asked-by-all"}),
        ([(WAIT_K, "")], {"stage-overwritten", "released-too-early", "read-before-wait", "mbarrier-arrivals"}),
        ([("(end - 1 - n) * BLOCK_N", "end - (n + 1) * BLOCK_N")], {"wrong-tile"}),
        pytest.param([(f"k_map, {K_BAR}, key, kv_head", f"k_map, {K_BAR}, key, head")], {"wrong-tile"},
                     marks=pytest.mark.long),
        pytest.param([("        return;\n", "")], None, marks=pytest.mark.long),
        pytest.param([("full_v + 8 * stage", "full_k + 8 * stage")], None, marks=pytest.mark.long),
        pytest.param([("            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);\n", "")],
                     {"deadlock"}, marks=pytest.mark.long),
        pytest.param([(WAIT_K, f"if (n > 0) {K_BEFORE}")], {"no-overlap"}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_wrong_producer(changes, slugs):
    got = diagnosis("11.8", changed("producer", *changes))
    assert got not in ("exception", "wrong-type", "symptoms") and (slugs is None or got in slugs), got


@pytest.mark.long
@pytest.mark.parametrize(
    "change, words",
    [
        (("(end - 1 - n) * BLOCK_N", "n * BLOCK_N"), "the tiles are asked for upwards"),
        (
            ("stage = n % STAGES", "stage = (end - 1 - n) % STAGES"),
            "and find tile 0 there, and with 4 tiles it is right",
        ),
        (("(end - 1 - n) * BLOCK_N", "(end - n) * BLOCK_N"), "the values of tile 0 are in no stage"),
    ],
)
def test_which_tile_the_consumers_find_first(change, words):
    with pytest.raises(CheckFailed, match=words) as caught:
        check("11.8", changed("producer", change))
    assert caught.value.diagnosis == "wrong-tile"


@pytest.mark.long
def test_a_producer_that_waits_for_its_own_copies():
    wait = f"if (n > 0) mbarrier_wait(full_k + 8 * ((n - 1) % STAGES), (n - 1) / STAGES % 2);\n                {WAIT_K}"
    assert diagnosis("11.8", changed("producer", (WAIT_K, wait))) == "no-overlap"


def test_a_producer_may_ask_for_the_next_k_before_v():
    text = """
    if (warp >= WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == WARPS && elect_one()) {
            auto ask = [&](int n, const CUtensorMap& map, uint32_t smem, uint32_t full_bar, uint32_t empty_bar) {
                const int stage = n % STAGES;
                mbarrier_wait(empty_bar + 8 * stage, (n / STAGES & 1) ^ 1);
                load_tile<BLOCK_N>(smem + stage * KV_BYTES, map, full_bar + 8 * stage, (end - 1 - n) * BLOCK_N, kv_head,
                                   batch);
            };
            load_tile<BLOCK_M>(q_smem, q_map, full_q, m_start, head, batch);
            for (int n = 0; n <= end; n++) {
                if (n < end) ask(n, k_map, k_smem, full_k, empty_k);
                if (n > 0) ask(n - 1, v_map, v_smem, full_v, empty_v);
            }
        }
        return;
    }
"""
    assert check("11.8", text)


@pytest.mark.long
def test_a_producer_that_leaves_a_stage_empty():
    late = "if (n > 1) mbarrier_wait(empty_v + 8 * ((n - 2) % STAGES), (n - 2) / STAGES % 2);"
    assert diagnosis("11.8", changed("producer", (WAIT_K, f"{late}\n                {WAIT_K}"))) == "no-overlap"


def test_a_producer_whose_k_waits_for_the_place_of_v():
    wait_v = "mbarrier_wait(empty_v + 8 * stage, free);"
    assert diagnosis("11.8", changed("producer", (wait_v, ""), (WAIT_K, f"{wait_v}\n{WAIT_K}"))) == "no-overlap"


def test_a_producer_without_q_where_there_is_no_key():
    load_q = "load_tile<BLOCK_M>(q_smem"
    failed = failure("11.8", changed("producer", (load_q, f"if (end == 0) return;\n{load_q}")))
    assert failed.diagnosis == "deadlock" and "nobody has asked for Q" in failed.sentence


@pytest.mark.parametrize(
    "change, words",
    [
        (("(n / STAGES + 1) % 2", "n / STAGES % 2"), "the first round's parity is 1"),
        (("n < end;", "n < end - 1;"), "it asks for too few tiles"),
    ],
)
def test_a_deadlock_is_said_in_tiles_and_stages(change, words):
    failed = failure("11.8", changed("producer", change))
    assert failed.diagnosis == "deadlock" and words in failed.sentence


def test_a_stage_that_is_filled_too_early_is_said_in_tiles():
    failed = failure("11.8", changed("producer", ("stage = n % STAGES", "stage = n % 2")))
    assert failed.diagnosis == "stage-overwritten"
    assert "in stage n % STAGES, of 3, and" in failed.sentence and "of tile n - 3" in failed.sentence


def test_output_that_is_waited_for_before_the_softmax():
    arrive_v = "if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));     // repaired"
    scores = answers_of("11.7", "solutions")[0] + f"        if (!FIRST) {{ output_is_there(); {arrive_v[:-15]} }}\n"
    after = answers_of("11.7", "solutions")[1].replace("output_is_there();", "").replace(arrive_v, "")
    assert diagnosis("11.7", scores, after) == "no-overlap"


def test_other_producers():
    text = """
    if (threadIdx.x >= CONSUMERS * GROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * GROUP) {
            mbarrier_arrive_expect_tx(full_q, Q_BYTES);
            for (int c = 0; c < HEAD_DIM; c += SLAB)
                tma_load(q_smem + c / SLAB * BLOCK_M * SLAB_ROW, &q_map, full_q, c, m_start, head, batch);
            int stage = 0, parity = 1;
            for (int j = end; j-- > 0;) {
                mbarrier_wait(empty_k + 8 * stage, parity);
                load_tile<BLOCK_N>(k_smem + stage * KV_BYTES, k_map, full_k + 8 * stage, j * BLOCK_N, kv_head, batch);
                mbarrier_wait(empty_v + 8 * stage, parity);
                load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, j * BLOCK_N, kv_head, batch);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
"""
    assert check("11.8", text)


# ---- 11c.1 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes, slug",
    [
        ([("0.0550089516f", "0.0555041087f"), ("0.242211014f", "0.240226507f"), ("0.693282902f", "0.693147181f")],
         "not-exact-enough"),
        ([("x < -127.f ? -127.f : x > 128.f", "x > 128.f")], "wrong-below"),
        ([(" : x > 128.f ? 128.f", "")], "wrong-above"),
        ([("128.f ? 128.f", "120.f ? 120.f")], "wrong-above"),
        ([("128.f ? 128.f", "150.f ? 150.f")], "wrong-above"),
        ([("x < -127.f ? -127.f : x > 128.f ? 128.f : x", "fmaxf(fminf(x, 128.f), -127.f)")], "nan-hidden"),
        ([("+ 127)", "+ 126)")], "wrong-power"),
        ([("rintf(x)", "truncf(x)")], "wrong-split"),
        ([("return fmaf", "return exp2f(x); return fmaf")], "not-by-hand"),
        ([("return fmaf", "return ldexpf(x, 1); return fmaf")], "not-by-hand"),
        ([("return fmaf", "return __builtin_exp2f(x); return fmaf")], "not-by-hand"),
        ([("    x = x <", "    x *= 1.44269504f;\n    x = x <")], "other-power"),
        ([("f = x - n", "f = n - x")], "wrong-split"),
        ([("0.0550089516f", "0.693282902f"), ("0.693282902f)", "0.0550089516f)")], "wrong-coefficients"),
        ([("0.0550089516f", "0.1666667f"), ("0.242211014f", "0.5f"), ("0.693282902f", "1.f")], "wrong-coefficients"),
        ([("<< 23", "<< 22")], "wrong-power"),
    ],
)  # fmt: skip
def test_a_wrong_power(changes, slug):
    got = diagnosis("11c.1", changed("exp2_polynomial", *changes))
    assert got == slug or (slug is None and got in ("not-exact-enough", "wrong-split"))


def test_other_powers():
    kernel = step("p11_12_polynomial").path.read_text()
    own = re.search(r"__device__ __forceinline__ float exp2_polynomial.*?\n}\n", kernel, re.S)[0]
    assert check("11c.1", own)
    taylor = (
        "0.0550089516f, 0.242211014f), 0.693282902f)",
        "fmaf(f, 0.00961813f, 0.0555041087f), 0.240226507f), 0.693147181f)",
    )
    assert check("11c.1", changed("exp2_polynomial", taylor))
