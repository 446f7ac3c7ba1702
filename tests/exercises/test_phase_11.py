"""Phase 11's checks: right answers of several styles pass, and the mistakes that learners make are named."""

from __future__ import annotations

import re

import pytest
import torch
from lesson_answers import accepted, answers_of, diagnosis, failure, told
from lesson_answers import changed_texts as changed

from flashlab.check.cuda_answer import PROBES, built, probe, source_of
from flashlab.exercises import check, phase_11, phase_11c
from flashlab.exercises.rule import RULES
from flashlab.kernels import step
from flashlab.simt import SimtError, find_compiler

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)


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
    assert check("11.1", lambda s, n: torch.tensor(model(s, n)))


# ---- 11.2 ------------------------------------------------------------------------------------------------------------
def found_in_a_pipeline(parities, stages=2, tiles=13, consumers=2):
    """What the emulator finds where a pipeline runs with these parities; nothing where it is right."""
    table = torch.tensor([parities(i, stages) for i in range(tiles)], dtype=torch.int32)
    source = torch.arange(tiles * 32, dtype=torch.int32) // 32
    out, pauses = (torch.full((consumers, tiles), x, dtype=torch.int32) for x in (-1, 0))
    try:
        arguments = (table, pauses, source, out, tiles, stages, consumers, 1, 1)
        phase_11._module(True).launch("pipeline", *arguments, echo=False)
    except SimtError as error:
        return str(error)
    return "" if bool((out == torch.arange(tiles)).all()) else "another tile"


def in_two_parts(i, stages, tiles=(5, 8)):
    return phase_11.waits(tiles, int(i >= 5), i - 5 * (i >= 5), stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_pipeline_runs_with_the_right_parities(stages):
    assert found_in_a_pipeline(in_two_parts, stages) == ""


def test_the_emulator_sees_what_wrong_parities_do():
    assert "waits for ever" in found_in_a_pipeline(lambda i, s: (i % s, i // s % 2, (i // s + (i > 5)) % 2))
    assert found_in_a_pipeline(lambda i, s: (i % s, i // s % 2, (i // s - 1) % 2))  # the lecture's


def test_a_float_is_no_number_of_bytes():
    right = phase_11.waits

    def nth(tiles, part, i):
        return i + sum(n for at, n in enumerate(tiles) if at < part)

    def again(t, n, i, s):
        return [nth(t, n, i) % s, *[nth(t, n, i) // s & 1] * 2]

    assert check("11.2", again, phase_11.tile_bytes)
    assert diagnosis("11.2", right, lambda rows, box, d, left: rows * (d * 2.0)) == "float"
    assert diagnosis("11.2", lambda *x: (right(*x)[0], nth(*x[:3]) / x[3] % 2, 0), phase_11.tile_bytes) == "float"


# ---- 11.3 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, slug",
    [
        (("tile + 32 * k, SWIZZLE_128", "tile + 16 * k, SWIZZLE_128"), "wrong-address"),
        (("tile + 32 * k, SWIZZLE_128, 16, 8 * 128", "tile + 32 * k, SWIZZLE_128, 16, 128"), "wrong-stride"),
        (("SWIZZLE_64", "SWIZZLE_128"), "wrong-swizzle"),
        (("64 * 128, 8 * 128", "8 * 128, 64 * 128"), "wrong-stride"),
        (("64 * 128, 8 * 128", "16, 8 * 128"), "wrong-leading"),
        (("SWIZZLE_128, 64 * 128, 8 * 128", "SWIZZLE_128, 64 * 128, 8 * 128, 3"), "wrong-base-offset"),
        (("tile + 32 * k, SWIZZLE_64", "tile, SWIZZLE_64"), "wrong-address"),
        (("v_rows(", "v_row("), "wrong-entry"),
    ],
)
@pytest.mark.every(2)
def test_a_wrong_descriptor(change, slug):
    assert diagnosis("11.3", *changed("11.3", change)) == slug


@pytest.mark.long
def test_other_descriptors_of_the_same_tile():
    steps = (
        ("tile + 32 * k, SWIZZLE_128, 16, 8 * 128)", "tile, SWIZZLE_128, 0, 1024) + 2 * k"),
        ("SWIZZLE_64, 16", "SWIZZLE_64, 512"),
    )
    assert check("11.3", *changed("11.3", *steps))


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


# ---- 11.5 ------------------------------------------------------------------------------------------------------------
def test_blames_of_other_shapes():
    right = phase_11.waited_for
    assert diagnosis("11.5", lambda e, a: right(e, a)[1:]) == "wrong-shape"
    assert diagnosis("11.5", lambda e, a: [x for _, x in right(e, a)]) == "wrong-type"
    assert diagnosis("11.5", lambda e, a: [(w, x or None) for w, x in right(e, a)]) == "wrong-type"
    assert "warp is 0 for wait" in str(failure("11.5", lambda e, a: [(0, w) for _, w in right(e, a)]))
    assert "warps is {" in str(failure("11.5", lambda e, a: [(w, x | {w}) for w, x in right(e, a)]))
    assert check("11.5", lambda e, a: [[w, sorted(x)] for w, x in right(e, a)])
    early = failure("11.5", lambda e, a: [(w, x or {0} if len(e) == 3 else x) for w, x in right(e, a)])
    assert "the log [(0, 'arrive', 8), (1, 'mbarrier-wait', 8)" in early.case  # one of two has arrived


# ---- 11.6 to 11.14: texts -------------------------------------------------------------------------------------------
# What the bug hunts say untouched, touched, and half repaired is in test_hunts.py; the rows are tried in
# test_cuda_changes.py.
OF_K = "mbarrier_wait(empty_k + 8 * stage, (n / K_STAGES + 1) % 2);"
BEFORE = "mbarrier_wait(empty_v + 8 * ((n - 2) % V_STAGES), (n - 2) / V_STAGES % 2);"
STORE, ROOM = "h.place[at] = part;", "mbarrier_wait(h.empty + 8 * at, (n / PLACES + 1) % 2);"
BOUNDS = "__launch_bounds__(THREADS, 1)"
HEADS, Q_IS_HERE = "p->k_stride, p->batch, p->kv_heads", "mbarrier_wait(full_q, 0);"
NEXT = "            for (int j = 0; j < tiles; j++) {"
LATE = "if (j > 0) mbarrier_wait(empty_v((j - 1) % STAGES), (j - 1) / STAGES % 2);"
BOTH, OWN = "named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);", "named_barrier_sync(1 + consumer, GROUP);"
STORE_DK = "    store_tile(dk, p.scale, k_smem, dk_map, n_start, kv_head, batch);"
K_READ = "        if (first_thread) mbarrier_arrive(empty + 8 * slot);\n\n"
SLOT_OF_V = "        slot = (2 * j + 1) % SLOTS;\n"
COUNTS = "mbarrier_init(empty_k(i), CONSUMERS), mbarrier_init(empty_v(i), CONSUMERS)"
O_FENCE, V_SLOT = "fence_proxy_async();", "empty_slot + 8 * ((2 * nth - 1) % SLOTS)"
test_what_no_row_says = told(
    ("11.6", [("bulk_commit();", "bulk_commit(;")], "it does not compile"),
    ("11.6", [("if (first_thread) bulk_wait_read<HEAD_DIM / SLAB - 1>();", "")], "may still be under way"),
    ("11.6", [(O_FENCE, ""), ("#pragma unroll\n            for", f"{O_FENCE}\n#pragma unroll\n            for")],
     "after its last store"),
    ("11.6", [("slab * SLAB,", "(1 - slab) * SLAB,")], "are in the wrong order: column 0 holds column 64"),
    ("11.6", [("bulk_wait_read", "bulk_wait")], "bulk_wait waits until O is written"),
    ("11.7", [(V_SLOT, "empty_v + 8 * ((nth - 1) % STAGES)")], "empty_v"),  # the lecture's line
    ("11.8", [(OF_K, f"if (n > 1) {BEFORE}\n                {OF_K}")], "its place is free"),
    ("11.9", [("{row_bytes, HEAD", "{2, row_bytes, HEAD")], "of your code, `return tensor_map("),
    ("11.10", [("sync(4", "sync(1"), ("arrive(4", "arrive(1")], "these barriers are in use: 1, 2"),
    ("11.10", [("(consumer + CONSUMERS - 1)", "(consumer + 1)")], "the turns go forwards"),
    ("11.10", [("sync(4", "sync(14"), ("arrive(4", "arrive(14")], "thread 383 of block 0 uses barrier 16"),
    ("11.11", [(ROOM, ""), (STORE, f"{STORE}\n    {ROOM}")], "a place is filled that somebody still reads"),
    ("11.12", [(BOUNDS, "")], "no __launch_bounds__(THREADS, 1) says how many threads"),
    ("11.12", [("(int)cudaGetLastError()", "0")], "does not return cudaGetLastError()"),
    ("11.12", [(HEADS, HEADS.replace("kv_", ""))], "told of kv_heads heads"),
    ("11.12", [(" + BARRIERS * 8", "")], "the shared memory is too small"),
    ("11.12", [("-smem_u32(pool) % 1024", "1008")], "the memory begins 16 bytes beyond a multiple of 1024, where"),
    ("11.12", [("p->heads, p->batch)", "p->heads)")], "the grid is (2, 4, 1) for 2 batches of 4 heads"),
    ("11.12", [("blockIdx.x, ", "0, ")], "rows 192 to 399 of 400 are wrong"),
    ("11.12", [("THREADS, 1)", "THREADS)")], "does not say that an SM has one block"),
    ("11.12", [("THREADS, 1)", "THREADS, 2)")], "room for more than one block of 512 threads"),
    ("11.12", [("THREADS, SHARED", "THREADS - 32, SHARED")], "that is no whole number of warpgroups"),
    ("11.12", [("const Problem p", "const Problem& p")], "a kernel's parameter cannot be a reference"),
    ("11.12", [("char* shared = pool + -smem_u32(pool) % 1024", "extern __shared__ __align__(1024) char shared[]")],
     "declare no array beside it"),  # the lecture's line
    ("11.8", [("((n - 1) / V_STAGES + 1) % 2", "(n - 1) / K_STAGES % 2 ^ 1")], "((n - 1) / V_STAGES + 1) % 2"),
    ("11.13", [("2 * j / SLOTS % 2", "j & 1")], "2 * j / SLOTS % 2"),
    ("11.13", [("acc[4 * n + 2 * r + e] *= correction;", ";")], "O is not rescaled"),
    ("11.13", [(K_READ, ""), (SLOT_OF_V, K_READ + SLOT_OF_V)], "when the softmax of tile 0 begins, K of the tile has"),
    ("11.14", [(COUNTS, COUNTS.replace("CONSUMERS", "1"))], "and which counts its arrival, too"),
    ("11.14", [(Q_IS_HERE, f"{Q_IS_HERE}\n    if (tiles == 0) return;")], "128 of the first 176 rows"),
    ("11.14", [(NEXT, NEXT + LATE)], "7 times it asks for a tile only when"),
    ("11.14", [("STAGES = 2", "STAGES = 1")], "the producer does not run ahead"),
    ("11.14", [("        setmaxnreg_dec<24>();\n", ""), ("    setmaxnreg_inc<240>();\n", "")], "registers do not move"),
    ("11c.1", [("return fmaf", "return exp2f(x); return fmaf")], "`exp2f` is what this function should do without"),
    ("11c.1", [("return fmaf", "return ldexpf(x, 1); return fmaf")], "`ldexpf` is what this"),
    ("11c.1", [("128.f ? 128.f", "120.f ? 120.f")], "exp2_polynomial(120.038) is"),
    ("11c.3", [("nth / 2 % 2 ^ 1", "(nth / 2 & 1)")], "with the consumers' parity"),
    ("11c.3", [("wgmma_commit();", "wgmma_commit(); wgmma_wait<0>();")], "the product is waited for here"),
    ("11c.4", [(BOTH, OWN), (STORE_DK, f"{STORE_DK}\n    {BOTH}")], "of K all 128 rows are read"),
    one_of_each=True, every=2,
)  # fmt: skip


@pytest.mark.long
def test_a_name_that_is_nowhere_in_the_text_is_not_blamed():
    failed = failure("11.12", *changed("11.12", ("p->heads, p->batch)", "p->kv_heads, p->batch)")))
    assert failed.sentence.startswith("`p->kv_heads` stands where `p->heads` belongs\nthe grid is (2, 2, 2)")


@pytest.mark.long
@pytest.mark.parametrize(
    ("id", "changes", "diagnosis"),
    [
        ("11.11", [(STORE, "h.place[0] = part;"), ("= h.place[at]", "= h.place[0]")], "race"),
        ("11.14", [("8 * (1 + 4 * STAGES)", "8 * STAGES")], "shared-out-of-bounds"),
        ("11c.3", [("(square_smem - k_smem)", "square_smem")], "uninit"),
    ],
)
def test_what_is_found_at_a_place_has_no_cause_that_the_text_denies(id, changes, diagnosis):
    failed = failure(id, *changed(id, *changes))
    mended = "`(float4 *)(shared + square_smem)` stands where `shared + (square_smem - k_smem)` belongs"  # of 11c.3
    assert failed.diagnosis.startswith(diagnosis) and failed.sentence.startswith(("thread ", mended))


@pytest.mark.long
def test_the_lectures_own_epilogue_waits_for_too_much():
    kernel = step("p11_10_epilogue").path.read_text()
    own = re.search(r"^ +if \(first_thread\) bulk_wait_read<0>.*?bulk_commit\(\);\n +}\n", kernel, re.S | re.M)[0]
    failed = failure("11.6", own)
    assert failed.diagnosis == "no-overlap" and "waits for the other slab's store too" in failed.sentence


@pytest.mark.long
def test_one_may_wait_as_soon_as_a_slab_is_on_its_way_and_fence_for_all():
    wait, store = "if (first_thread) bulk_wait_read<HEAD_DIM / SLAB - 1>();", "                tma_store("
    steps = (wait, ""), ("bulk_commit();", "bulk_commit(), bulk_wait_read<1>();"), (O_FENCE, "")
    assert check("11.6", *changed("11.6", *steps, (store, f"{O_FENCE}\n{store}")))


def of_the_ring(*lines):
    """11.7's answer with the lines behind the scores' loop changed, and O += P V behind it where `lines` has that."""
    scores = re.sub(r" *//.*", "", answers_of("11.7", "solutions")[0])
    loop = scores[: scores.index("        wgmma_wait")]
    return (loop.replace(O_ASKED, "") if O_ASKED in lines else loop) + "\n".join(lines)


O_ASKED, GIVEN_K = "if (!FIRST) add_output();", "if (first_thread) mbarrier_arrive(empty_slot + 8 * slot);"
GIVEN_V = "if (!FIRST && first_thread) mbarrier_arrive(empty_slot + 8 * ((2 * nth - 1) % SLOTS));"
NOW, THEN = "wgmma_wait<FIRST ? 0 : 1>();", "wgmma_wait<0>();"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param(
            [O_ASKED, NOW, GIVEN_K, THEN, GIVEN_V], "V of a tile is given back after K of the next", id="lecture"
        ),
        pytest.param([THEN, GIVEN_V, GIVEN_K], "issued first, and waited for alone", id="one wait for all"),
        pytest.param(
            [NOW, GIVEN_V.replace("first_thread", "threadIdx.x % GROUP == 64"), THEN, GIVEN_K],
            "one thread does both",
            id="two threads",
        ),
    ],
)
@pytest.mark.long
def test_slots_that_become_free_late(lines, words):
    assert words in failure("11.7", of_the_ring(*lines)).sentence


@pytest.mark.long
def test_both_products_of_11_7_are_under_way_together():
    scores = of_the_ring(NOW, GIVEN_V, THEN, GIVEN_K).replace(O_ASKED, f"{O_ASKED} {THEN}")
    assert "before the scores are issued" in failure("11.7", scores).sentence


@pytest.mark.long
def test_the_slot_of_v_may_be_named_by_that_of_k():
    v = "if (first_thread) mbarrier_arrive(empty_slot + 8 * ((slot + SLOTS - 1) % SLOTS));"
    assert check("11.7", of_the_ring("if (!FIRST) {", "wgmma_wait<1>();", v, "}", THEN, GIVEN_K))


def test_the_lectures_two_places_are_too_few():
    text = answers_of("11.11", "solutions")[0].replace("PLACES", "2")
    assert "2 of the 3 places are used" in failure("11.11", text).sentence


def test_other_producers():
    text = """
    if (threadIdx.x >= CONSUMERS * GROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * GROUP) {
            mbarrier_arrive_expect_tx(full_q, Q_BYTES);
            for (int c = 0; c < HEAD_DIM; c += SLAB)
                tma_load(q_smem + c / SLAB * BLOCK_M * SLAB_ROW, &q_map, full_q, c, m_start, head, batch);
            auto ask = [&](int n, int stages, const CUtensorMap& map, uint32_t smem, uint32_t full, uint32_t empty) {
                const int at = n % stages;
                while (!mbarrier_test_wait(empty + 8 * at, (n / stages & 1) ^ 1)) {}
                load_tile<BLOCK_N>(smem + at * KV_BYTES, map, full + 8 * at, (end - 1 - n) * BLOCK_N, kv_head, batch);
            };
            if (end > 0) ask(0, K_STAGES, k_map, k_smem, full_k, empty_k);
            for (int n = 0; n < end; n++) {
                if (n + 1 < end) ask(n + 1, K_STAGES, k_map, k_smem, full_k, empty_k);
                ask(n, V_STAGES, v_map, v_smem, full_v, empty_v);
            }
        }
        return;
    }
"""
    assert check("11.8", text)


def test_the_lectures_order_asks_too_late():
    later = [
        ("n <= end;", "n < end;"),
        ("if (n > 0)", "if (true)"),
        ("(n - 1) % V", "n % V"),
        ("(n - 1) / V", "n / V"),
        ("(end - n)", "(end - 1 - n)"),
    ]  # V of tile n
    text = changed("11.8", *later)[0]
    assert "when V of tile 0 has been read: its place is free when K of tile 0" in failure("11.8", text).sentence


@pytest.mark.long
def test_scores_of_another_tile_than_v_is_of_are_no_wrong_correction():
    text = changed("11.8", ("(end - 1 - n) * BLOCK_N", "n * BLOCK_N"))[0]
    assert "correction" not in failure("11.8", text).sentence


def test_other_powers():
    kernel = step("p11_12_polynomial").path.read_text()
    lecture = re.search(r"__device__ __forceinline__ float exp2_polynomial.*?\n}\n", kernel, re.S)[0]
    assert failure("11c.1", lecture).diagnosis == "not-exact-enough"
    polynomial = "fmaf(f, fmaf(f, fmaf(f, 0.0550089516f, 0.242211014f), 0.693282902f), 1.f)"
    exact = "0.00133335581f"
    for k in ("0.00961812911f", "0.0555041087f", "0.240226507f", "0.693147181f", "1.f"):
        exact = f"fmaf(f, {exact}, {k})"
    assert check("11c.1", lecture.replace(polynomial, exact))


test_a_power_is_told_why = told(
    ("11c.1", [("rintf(x)", "truncf(x)")], "x is cut towards 0"),
    ("11c.1", [("rintf(x)", "floorf(x)")], "x is rounded down"),
    ("11c.1", [("+ 127)", "+ 126)")], "every value is 2^-1 times"),
    ("11c.1", [("f = x - n", "f = n - x")], "f has the wrong sign"),
    ("11c.1", [("y = 0.00133335581f", "y = 0.f")], "Taylor's up to f^4"),
    ("11c.1", [("y = 0.00133335581f", "y = 0.f"), ("0.00961812911f", "0.f")], "Taylor's up to f^3"),
    ("11c.1", [("y = 0.00133335581f", "y = 0.f"), ("0.00961812911f", "0.0416666667f"),
               ("0.0555041087f", "0.166666667f"), ("0.240226507f", "0.5f"), ("0.693147181f", "1.f")], "that of e^f"),
    ("11c.1", [("-127.f ? -127.f", "-100.f ? -100.f")], "the same at -126 and -125.7: x is limited"),
    ("11c.1", [("128.f ? 128.f", "100.f ? 100.f")], "to 99.968, but"),
    ("11c.1", [("f = x - n;", "f = given - n;"), ("    x = x <", "    const float given = x;\n    x = x <")],
     "Limit x before"),
    ("11c.1", [("-127.f ? -127.f", "-129.f ? -129.f")], "runs over into the sign"),
    every=2,
)  # fmt: skip


def test_turns_in_other_words():
    def additions(block, M, N, BLOCK_M, BLOCK_N, window):
        pairs = phase_11c._pairs(M, N, BLOCK_M, BLOCK_N, window)
        tiles = sorted({tile for tile, b in pairs if b == block}, reverse=True)
        return [(tile, sum((tile, b) in pairs for b in range(block))) for tile in tiles]

    assert check("11c.2", additions)
    assert diagnosis("11c.2", lambda *given: iter(additions(*given))) == "wrong-type"
    same = failure("11c.2", lambda *given: [(tile, 0) for tile, _ in additions(*given)])
    assert "blocks 0 and 1 all have turn 0" in same.sentence and same.diagnosis == "order-open"
    late = failure("11c.2", lambda *given: [(tile, turn + 1) for tile, turn in additions(*given)])
    assert "turn 0 is nobody's" in late.sentence and late.diagnosis == "waits-for-ever"
    slow = failure("11c.2", lambda *given: additions(*given)[::-1])
    assert "takes 15 steps, where 8 are enough" in slow.sentence
    wide = failure("11c.2", lambda *given: additions(*given[:-1], given[-1] + 1)[::-1])
    assert wide.diagnosis == "wrong-tiles" and "right" not in wide.sentence


@pytest.mark.long
def test_a_square_in_other_words():
    as_in_the_lecture = ("nth / 2 % 2 ^ 1", "nth / 2 & 1 ^ 1"), ("if (lane == 0)", "if (elect_one())")
    passed = check("11c.3", *changed("11c.3", (BOTH, "named_barrier_sync(7, 256);"), *as_in_the_lecture))
    assert "The compiler warns" not in str(passed)


test_both_consumers_may_meet_after_dv = accepted(
    ("11c.4", [(BOTH, OWN), (STORE_DK, f"    {BOTH}\n{STORE_DK}")]), marks=[pytest.mark.long]
)
